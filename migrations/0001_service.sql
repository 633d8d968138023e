-- The service itself: which database this is, which processes share it, who may administer it.
--
-- Times are microseconds since 1970 by this server's clock (clock_timestamp()).

CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% on % is refused: its rows are kept for ever', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation';
END $$;

CREATE FUNCTION now_us() RETURNS bigint LANGUAGE sql VOLATILE AS
$$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint $$;

-- One history of one database. A restore, a failover or a missing commit starts the next one, and
-- nothing is frozen or committed until it is settled.
CREATE TABLE generation (
    one               boolean PRIMARY KEY DEFAULT true CHECK (one),
    number            bigint  NOT NULL CHECK (number > 0),
    system_identifier text    NOT NULL,
    timeline          bigint  NOT NULL,
    settled           boolean NOT NULL,
    reason            text    NOT NULL,
    changed_us        bigint  NOT NULL,
    -- Tokens signed before an owner accepted a restored database are void.
    accepted_us       bigint  NOT NULL DEFAULT 0
);

-- Each process, by the id in its ledger file. One that has put its ledger's commits back into this
-- generation carries its number.
CREATE TABLE processes (
    id                 uuid    PRIMARY KEY,
    generation         bigint  NOT NULL,
    entries            bigint  NOT NULL CHECK (entries >= 0),
    first_seen_us      bigint  NOT NULL,
    last_seen_us       bigint  NOT NULL,
    forgotten_us       bigint,
    forgotten_by       text
);

-- The chain of owner-signed elements that starts at the owner key of the key directory. What does
-- not follow from that key is ignored, whatever stands here.
CREATE TABLE admin_elements (
    sequence  bigint PRIMARY KEY CHECK (sequence > 0),
    hash      bytea  NOT NULL UNIQUE CHECK (octet_length(hash) = 32),
    jws       text   NOT NULL,
    stored_us bigint NOT NULL
);
CREATE TRIGGER admin_elements_are_kept BEFORE UPDATE OR DELETE ON admin_elements
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER admin_elements_stay BEFORE TRUNCATE ON admin_elements
    EXECUTE FUNCTION refuse_change();

-- An assertion is used once (RFC 7523, jti).
CREATE TABLE used_assertions (
    key        bytea  NOT NULL CHECK (octet_length(key) = 32),
    jti        text   NOT NULL CHECK (octet_length(jti) BETWEEN 1 AND 128),
    expires_us bigint NOT NULL,
    PRIMARY KEY (key, jti)
);
CREATE INDEX used_assertions_by_expiry ON used_assertions (expires_us);

-- What happened, in order, hash-chained within a stream: a cluster's id, or the nil UUID for the
-- service itself.
CREATE TABLE events (
    stream   uuid   NOT NULL,
    number   bigint NOT NULL CHECK (number > 0),
    at_us    bigint NOT NULL,
    kind     text   NOT NULL,
    body     text   NOT NULL,
    previous bytea  NOT NULL CHECK (octet_length(previous) = 32),
    hash     bytea  NOT NULL CHECK (octet_length(hash) = 32),
    PRIMARY KEY (stream, number)
);

CREATE FUNCTION event_hash(e events) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
    SELECT sha256(e.previous || convert_to(
        e.stream::text || ' ' || e.number || ' ' || e.at_us || ' ' || e.kind || ' ' || e.body,
        'UTF8'))
$$;

CREATE FUNCTION chain_event() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE last events;
BEGIN
    -- A cluster's stream is written under its row's lock; the service's own has no row.
    IF NEW.stream = '00000000-0000-0000-0000-000000000000' THEN
        PERFORM pg_advisory_xact_lock(x'6d75737465720002'::bigint);
    END IF;
    SELECT * INTO last FROM events WHERE stream = NEW.stream ORDER BY number DESC LIMIT 1;
    NEW.number := coalesce(last.number, 0) + 1;
    NEW.previous := coalesce(last.hash, decode(repeat('00', 32), 'hex'));
    NEW.hash := event_hash(NEW);
    RETURN NEW;
END $$;
CREATE TRIGGER events_are_chained BEFORE INSERT ON events
    FOR EACH ROW EXECUTE FUNCTION chain_event();
CREATE TRIGGER events_are_kept BEFORE UPDATE OR DELETE ON events
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER events_stay BEFORE TRUNCATE ON events
    EXECUTE FUNCTION refuse_change();
