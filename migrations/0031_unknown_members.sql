-- Members that have proved how they joined, and that this database doesn't know: it was restored from a backup that
-- is older than their join. A member's row stays until the member is readmitted; an old row means nothing.
CREATE TABLE unknown_members (
    cluster_id uuid   NOT NULL REFERENCES clusters (id) ON DELETE CASCADE,
    member_id  bytea  NOT NULL CHECK (octet_length(member_id) = 8),
    name       text   NOT NULL CHECK (length(name) BETWEEN 1 AND 64),
    at_us      bigint NOT NULL,
    PRIMARY KEY (cluster_id, member_id)
);

CREATE OR REPLACE FUNCTION is_whole() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM pg_constraint
            WHERE connamespace = current_schema()::regnamespace AND contype IN ('p', 'u', 'f'))
        + (SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
            WHERE c.relnamespace = current_schema()::regnamespace)
        + (SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
            WHERE c.relnamespace = current_schema()::regnamespace
                AND NOT t.tgisinternal AND t.tgenabled <> 'D')
        >= 179
$$;
