-- Members whose agents follow another statement chain than this database has: the number and the hash of the
-- first statement that differs, as the agent showed it last. The row of a member that follows the database's
-- chain again stays, and means nothing: the chain then has that statement.
CREATE TABLE statement_branches (
    cluster_id uuid   NOT NULL REFERENCES clusters (id) ON DELETE CASCADE,
    member_id  bytea  NOT NULL CHECK (octet_length(member_id) = 8),
    number     bigint NOT NULL CHECK (number > 0),
    hash       bytea  NOT NULL CHECK (octet_length(hash) = 32),
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
        >= 170
$$;
