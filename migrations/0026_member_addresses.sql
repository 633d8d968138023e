-- Where members are since they moved, as their agents have signed it: a mailbox for agents whose clusters
-- have no leader.
CREATE TABLE member_addresses (
    cluster_id uuid   NOT NULL REFERENCES clusters (id) ON DELETE CASCADE,
    agent_key  bytea  NOT NULL CHECK (octet_length(agent_key) = 32),
    -- Of two statements of one agent, the one with the higher number counts.
    number     bigint NOT NULL CHECK (number >= 0),
    -- The statement with its proof, as JSON. Agents verify it again.
    statement  text   NOT NULL,
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
        >= 160
$$;
