-- Two checks of a cluster's row run only if the change is of a kind that they can refuse. Most
-- changes, such as a taken seat, are not.

DROP TRIGGER clusters_follow_their_phases ON clusters;
CREATE TRIGGER clusters_follow_their_phases BEFORE UPDATE ON clusters FOR EACH ROW
    WHEN (NEW.id <> OLD.id OR NEW.size <> OLD.size OR NEW.name <> OLD.name
        OR NEW.phase <> OLD.phase OR NEW.frozen_h IS DISTINCT FROM OLD.frozen_h
        OR NEW.rev < OLD.rev OR NEW.epoch < OLD.epoch OR NEW.floor < OLD.floor)
    EXECUTE FUNCTION check_phase();

-- A cluster is called committed if, and only if, its commit stands. Only a new cluster, another
-- phase and a new commit can contradict that.
DROP TRIGGER clusters_are_decided ON clusters;
CREATE CONSTRAINT TRIGGER clusters_begin_undecided AFTER INSERT ON clusters
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION check_decided();
CREATE CONSTRAINT TRIGGER clusters_are_decided AFTER UPDATE ON clusters
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.phase <> OLD.phase)
    EXECUTE FUNCTION check_decided();
CREATE FUNCTION check_commit_is_decided() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM clusters
            WHERE id = NEW.cluster_id AND phase IN ('committed', 'formed', 'retired')) THEN
        RAISE EXCEPTION 'the commit of cluster % and its phase don''t agree', NEW.cluster_id
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER commits_are_decided AFTER INSERT ON commits
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION check_commit_is_decided();

CREATE OR REPLACE FUNCTION is_whole() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM pg_constraint
            WHERE connamespace = current_schema()::regnamespace AND contype IN ('p', 'u', 'f'))
        + (SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
            WHERE c.relnamespace = current_schema()::regnamespace)
        + (SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
            WHERE c.relnamespace = current_schema()::regnamespace
                AND NOT t.tgisinternal AND t.tgenabled <> 'D')
        >= 140
$$;
