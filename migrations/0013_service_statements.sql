-- Where the discovery service is, as an owner signed it for the agents of a cluster. The service
-- only hands the newest statement on; agents verify it.

CREATE TABLE service_statements (
    cluster_id uuid   PRIMARY KEY REFERENCES clusters (id),
    sequence   bigint NOT NULL CHECK (sequence > 0),
    -- The signed statement.
    jws        text   NOT NULL,
    stored_us  bigint NOT NULL
);

CREATE OR REPLACE FUNCTION is_whole() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM pg_constraint
            WHERE connamespace = current_schema()::regnamespace AND contype IN ('p', 'u', 'f'))
        + (SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
            WHERE c.relnamespace = current_schema()::regnamespace)
        + (SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
            WHERE c.relnamespace = current_schema()::regnamespace
                AND NOT t.tgisinternal AND t.tgenabled <> 'D')
        >= 138
$$;
