-- Who is a member of a cluster now, who asks to be one, and a retirement that is taken back.

-- What keeps a member's node from finding a leader, as its agent said last.
CREATE TABLE member_troubles (
    cluster_id uuid   NOT NULL REFERENCES clusters (id),
    member_id  bytea  NOT NULL CHECK (octet_length(member_id) = 8),
    at_us      bigint NOT NULL,
    detail     text   NOT NULL,
    PRIMARY KEY (cluster_id, member_id)
);

-- Hosts that hold a boot token of a cluster which has its members already.
CREATE TABLE asking_hosts (
    cluster_id uuid   NOT NULL REFERENCES clusters (id),
    agent_key  bytea  NOT NULL CHECK (octet_length(agent_key) = 32),
    name       text   NOT NULL,
    address    text   NOT NULL,
    first_us   bigint NOT NULL,
    last_us    bigint NOT NULL,
    times      bigint NOT NULL CHECK (times > 0),
    PRIMARY KEY (cluster_id, agent_key)
);

-- Why an intent waits, as the agent beside the leader said last.
ALTER TABLE intents ADD COLUMN waits_for text;
ALTER TABLE intents ADD COLUMN waits_by text;
ALTER TABLE intents ADD COLUMN waits_us bigint;

-- As before, but that a retirement may be taken back: to the phase before it, with the list as it
-- was. Somebody may have taken the name in the meantime.
CREATE OR REPLACE FUNCTION check_phase() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.id <> OLD.id OR NEW.size <> OLD.size THEN
        RAISE EXCEPTION 'id, name and size of a cluster never change'
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.name <> OLD.name AND OLD.phase <> 'retired'
        AND NOT (OLD.phase = 'abandoned' AND OLD.ended_cause = 'database_accepted') THEN
        RAISE EXCEPTION 'id, name and size of a cluster never change'
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.phase <> OLD.phase AND NOT (OLD.phase, NEW.phase) IN (
        ('draft', 'open'),
        ('open', 'preparing'), ('open', 'committed'), ('open', 'expired'), ('open', 'abandoned'),
        ('preparing', 'open'), ('preparing', 'committed'), ('preparing', 'expired'),
        ('preparing', 'abandoned'),
        ('committed', 'formed'), ('committed', 'retired'), ('formed', 'retired'),
        ('retired', 'committed'), ('retired', 'formed'),
        ('abandoned', 'committed')
    ) THEN
        RAISE EXCEPTION 'a cluster doesn''t go from % to %', OLD.phase, NEW.phase
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF OLD.phase IN ('committed', 'formed', 'retired') AND NEW.frozen_h <> OLD.frozen_h THEN
        RAISE EXCEPTION 'a decided list never changes' USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.rev < OLD.rev OR NEW.epoch < OLD.epoch OR NEW.floor < OLD.floor THEN
        RAISE EXCEPTION 'revision, epoch and floor never go back'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;

CREATE OR REPLACE FUNCTION is_whole() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM pg_constraint
            WHERE connamespace = current_schema()::regnamespace AND contype IN ('p', 'u', 'f'))
        + (SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
            WHERE c.relnamespace = current_schema()::regnamespace)
        + (SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
            WHERE c.relnamespace = current_schema()::regnamespace
                AND NOT t.tgisinternal AND t.tgenabled <> 'D')
        >= 128
$$;
