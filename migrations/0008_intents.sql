-- Changes of clusters that run, on their way to the clusters' own agents; and what members say that
-- their clusters are. Nothing here decides anything: an agent believes the signatures that it finds
-- in an intent, and the cluster itself refuses a second use.

CREATE TABLE intents (
    cluster_id  uuid   NOT NULL REFERENCES clusters (id),
    operation   bytea  NOT NULL CHECK (octet_length(operation) = 16),
    verb        text   NOT NULL CHECK (verb IN ('join', 'replace', 'remove', 'update')),
    -- What somebody signed: a ticket's grant, or an order.
    authority   text   NOT NULL,
    redeem      text,
    -- A ticket is used once.
    grant_id    text   UNIQUE REFERENCES grants (id),
    agent_key   bytea  CHECK (octet_length(agent_key) = 32),
    -- A newcomer's name, or the id of the member that it is about.
    subject     text   NOT NULL,
    address     text,
    planned_at  bigint,
    made_us     bigint NOT NULL,
    made_by     text   NOT NULL,
    expires_us  bigint NOT NULL,
    -- An open one whose time is over is expired; nobody has to say so.
    state       text   NOT NULL CHECK (state IN ('open', 'added', 'promoted', 'removed', 'updated',
                                                 'refused', 'stalled', 'withdrawn')),
    -- The cluster's, when it changed last.
    rev         bigint NOT NULL,
    outcome     text,
    member_id   bytea  CHECK (octet_length(member_id) = 8),
    reported_by text,
    raft_term   bigint,
    raft_index  bigint,
    -- From where another key tried the same ticket.
    contested   text,
    PRIMARY KEY (cluster_id, operation),
    CHECK ((grant_id IS NULL) = (redeem IS NULL)),
    CHECK ((grant_id IS NULL) = (agent_key IS NULL)),
    CHECK ((verb IN ('join', 'replace')) = (grant_id IS NOT NULL)),
    CHECK ((state IN ('added', 'promoted', 'removed', 'updated', 'refused', 'stalled'))
        = (outcome IS NOT NULL))
);
CREATE INDEX intents_by_age ON intents (cluster_id, made_us);
CREATE INDEX intents_by_agent ON intents (agent_key) WHERE agent_key IS NOT NULL;

-- What each member said last of its cluster.
CREATE TABLE directory_reports (
    cluster_id    uuid   NOT NULL REFERENCES clusters (id),
    member_id     bytea  NOT NULL CHECK (octet_length(member_id) = 8),
    configuration bigint,
    raft_term     bigint NOT NULL,
    raft_index    bigint NOT NULL,
    leader        bytea  CHECK (octet_length(leader) = 8),
    membership    text   NOT NULL,
    at_us         bigint NOT NULL,
    PRIMARY KEY (cluster_id, member_id)
);

-- What a quorum of those who had a vote in it before said. It never goes back.
CREATE TABLE directory (
    cluster_id    uuid   PRIMARY KEY REFERENCES clusters (id),
    configuration bigint,
    raft_term     bigint NOT NULL,
    raft_index    bigint NOT NULL,
    membership    text   NOT NULL,
    at_us         bigint NOT NULL
);
CREATE FUNCTION check_directory() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (coalesce(NEW.configuration, 0), NEW.raft_term, NEW.raft_index)
        < (coalesce(OLD.configuration, 0), OLD.raft_term, OLD.raft_index) THEN
        RAISE EXCEPTION 'what is known of a cluster never goes back'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER directory_goes_forward BEFORE UPDATE ON directory
    FOR EACH ROW EXECUTE FUNCTION check_directory();

-- Members that were confirmed as gone, for ever.
CREATE TABLE removed_members (
    cluster_id uuid   NOT NULL REFERENCES clusters (id),
    member_id  bytea  NOT NULL CHECK (octet_length(member_id) = 8),
    -- Its agent, if that is known.
    agent_key  bytea  CHECK (octet_length(agent_key) = 32),
    at_us      bigint NOT NULL,
    by         text   NOT NULL,
    PRIMARY KEY (cluster_id, member_id)
);
CREATE INDEX removed_members_by_agent ON removed_members (agent_key) WHERE agent_key IS NOT NULL;
CREATE TRIGGER removed_members_are_kept BEFORE UPDATE OR DELETE ON removed_members
    FOR EACH ROW EXECUTE FUNCTION refuse_change();

CREATE OR REPLACE FUNCTION is_whole() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM pg_constraint
            WHERE connamespace = current_schema()::regnamespace AND contype IN ('p', 'u', 'f'))
        + (SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
            WHERE c.relnamespace = current_schema()::regnamespace)
        + (SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
            WHERE c.relnamespace = current_schema()::regnamespace
                AND NOT t.tgisinternal AND t.tgenabled <> 'D')
        >= 122
$$;
