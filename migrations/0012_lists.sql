-- Lists and the sweep read only the rows that they return, however many clusters there are.

-- The newest clusters in one state. A list of several states merges those of each.
CREATE INDEX clusters_by_phase ON clusters (phase, created_us, id);

-- Forming clusters that wait until the database is settled; mostly none.
CREATE INDEX clusters_unsettled ON clusters (created_us, id) WHERE unsettled;

-- The newest tokens, of all clusters and of one.
CREATE INDEX grants_by_age ON grants (stored_us, id);
DROP INDEX grants_by_cluster;
CREATE INDEX grants_by_cluster ON grants (cluster_id, stored_us, id);

CREATE OR REPLACE FUNCTION is_whole() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM pg_constraint
            WHERE connamespace = current_schema()::regnamespace AND contype IN ('p', 'u', 'f'))
        + (SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
            WHERE c.relnamespace = current_schema()::regnamespace)
        + (SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
            WHERE c.relnamespace = current_schema()::regnamespace
                AND NOT t.tgisinternal AND t.tgenabled <> 'D')
        >= 135
$$;
