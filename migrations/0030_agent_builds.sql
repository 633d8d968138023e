-- Version and features of each member's agent, as the agent reported last. An agent that sends no features is older
-- than this migration.
CREATE TABLE agent_builds (
    cluster_id uuid   NOT NULL REFERENCES clusters (id) ON DELETE CASCADE,
    agent_key  bytea  NOT NULL CHECK (octet_length(agent_key) = 32),
    version    text   NOT NULL CHECK (length(version) BETWEEN 1 AND 64),
    features   text[] NOT NULL CHECK (cardinality(features) <= 64),
    PRIMARY KEY (cluster_id, agent_key)
);

CREATE OR REPLACE FUNCTION is_whole() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM pg_constraint
            WHERE connamespace = current_schema()::regnamespace AND contype IN ('p', 'u', 'f'))
        + (SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
            WHERE c.relnamespace = current_schema()::regnamespace)
        + (SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
            WHERE c.relnamespace = current_schema()::regnamespace
                AND NOT t.tgisinternal AND t.tgenabled <> 'D')
        >= 176
$$;
