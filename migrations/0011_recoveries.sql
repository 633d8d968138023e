-- Recovery statements: a cluster that was lost for good goes on as another Raft cluster, by an
-- operator's word. The service follows the longest chain that it was shown first.

CREATE TABLE recoveries (
    cluster_id uuid    NOT NULL REFERENCES clusters (id),
    -- The first leads away from the founded Raft cluster, the second from what the first made.
    number     integer NOT NULL CHECK (number BETWEEN 1 AND 64),
    -- The signed statement.
    jws        text    NOT NULL,
    -- False: it competes with the one that is followed. Only the first such statement is kept.
    followed   boolean NOT NULL,
    at_us      bigint  NOT NULL,
    PRIMARY KEY (cluster_id, number, followed)
);
CREATE TRIGGER recoveries_are_kept BEFORE UPDATE OR DELETE ON recoveries
    FOR EACH ROW EXECUTE FUNCTION refuse_change();

-- How many recoveries the cluster had gone through when the newcomer became its member: a recovery
-- leaves all members but one behind.
ALTER TABLE intents ADD COLUMN recovery integer NOT NULL DEFAULT 0;

CREATE OR REPLACE FUNCTION is_whole() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM pg_constraint
            WHERE connamespace = current_schema()::regnamespace AND contype IN ('p', 'u', 'f'))
        + (SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
            WHERE c.relnamespace = current_schema()::regnamespace)
        + (SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
            WHERE c.relnamespace = current_schema()::regnamespace
                AND NOT t.tgisinternal AND t.tgenabled <> 'D')
        >= 132
$$;
