-- What a process's ledger is compared with, and what it copies.

-- Commits and ends in the order in which they became visible, chained: a ledger copies what follows
-- the last number that it has, and another hash at that number is another history.
CREATE TABLE decisions (
    number     bigint PRIMARY KEY CHECK (number > 0),
    cluster_id uuid   NOT NULL,
    -- Of the list that was decided.
    h          bytea  CHECK (octet_length(h) = 32),
    -- Of an end before that.
    cause      text,
    decided_us bigint NOT NULL,
    hash       bytea  NOT NULL CHECK (octet_length(hash) = 32),
    CHECK ((h IS NULL) <> (cause IS NULL))
);
CREATE TRIGGER decisions_are_kept BEFORE UPDATE OR DELETE ON decisions
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER decisions_stay BEFORE TRUNCATE ON decisions
    EXECUTE FUNCTION refuse_change();

CREATE FUNCTION add_decision(cluster uuid, list bytea, ended text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE last decisions; next bigint; at_us bigint := now_us();
BEGIN
    -- One at a time until COMMIT: who sees a number sees all below it.
    PERFORM pg_advisory_xact_lock(x'6d75737465720003'::bigint);
    SELECT * INTO last FROM decisions d ORDER BY d.number DESC LIMIT 1;
    next := coalesce(last.number, 0) + 1;
    INSERT INTO decisions VALUES (next, cluster, list, ended, at_us,
        sha256(coalesce(last.hash, '') || coalesce(list, '') || convert_to(
            next || ' ' || cluster || ' ' || at_us || ' ' || coalesce(ended, ''), 'UTF8')));
    PERFORM pg_notify('muster_decision', next::text);
END $$;

CREATE FUNCTION note_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM add_decision(NEW.cluster_id, NEW.h, NULL);
    RETURN NULL;
END $$;
CREATE TRIGGER commits_are_numbered AFTER INSERT ON commits
    FOR EACH ROW EXECUTE FUNCTION note_commit();

CREATE FUNCTION note_end() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM add_decision(NEW.id, NULL, coalesce(NEW.ended_cause, NEW.phase));
    RETURN NULL;
END $$;
CREATE TRIGGER ends_are_numbered AFTER UPDATE ON clusters FOR EACH ROW
    WHEN (OLD.phase <> NEW.phase AND NEW.phase IN ('expired', 'abandoned'))
    EXECUTE FUNCTION note_end();

-- What no dump carries: where a database was when its generation began. Another place is a dump
-- that was loaded.
ALTER TABLE generation ADD COLUMN database_oid bigint NOT NULL DEFAULT 0;
ALTER TABLE generation ADD COLUMN table_oids bigint[] NOT NULL DEFAULT '{}';

-- How often each process has swept; its ledger knows as well.
ALTER TABLE processes ADD COLUMN beat bigint NOT NULL DEFAULT 0 CHECK (beat >= 0);
