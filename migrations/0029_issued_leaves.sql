-- Certificates that agents fetched after the commit: a newcomer's first ones, and all renewals. The founders' first
-- ones are in the table leaves. What was issued before this migration stays unknown, apart from those.
CREATE TABLE issued_leaves (
    cluster_id uuid   NOT NULL REFERENCES clusters (id) ON DELETE CASCADE,
    agent_key  bytea  NOT NULL CHECK (octet_length(agent_key) = 32),
    serial     bytea  NOT NULL CHECK (octet_length(serial) BETWEEN 1 AND 20),
    purpose    text   NOT NULL CHECK (purpose IN ('peer', 'client')),
    issued_us  bigint NOT NULL,
    expires_us bigint NOT NULL,
    PRIMARY KEY (cluster_id, agent_key, serial)
);

CREATE OR REPLACE FUNCTION is_whole() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM pg_constraint
            WHERE connamespace = current_schema()::regnamespace AND contype IN ('p', 'u', 'f'))
        + (SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
            WHERE c.relnamespace = current_schema()::regnamespace)
        + (SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
            WHERE c.relnamespace = current_schema()::regnamespace
                AND NOT t.tgisinternal AND t.tgenabled <> 'D')
        >= 173
$$;
