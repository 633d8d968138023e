-- What a changed database must not bring back, and what can't be put back into it.

-- Tokens issued before this are void: a restore would revive those that were revoked since.
ALTER TABLE generation ADD COLUMN void_before_us bigint NOT NULL DEFAULT 0;

-- Commits of a ledger that this database refused, and why. They aren't waited for again as long as
-- their cluster can't form here.
CREATE TABLE refused_commits (
    cluster_id uuid   NOT NULL,
    h          bytea  NOT NULL CHECK (octet_length(h) = 32),
    process    uuid   NOT NULL,
    why        text   NOT NULL,
    refused_us bigint NOT NULL,
    PRIMARY KEY (cluster_id, h)
);

-- As before, but that a cluster that `db accept` abandoned may change its name: somebody may have
-- taken it before a valid document brings the cluster back.
CREATE OR REPLACE FUNCTION check_phase() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.id <> OLD.id OR NEW.size <> OLD.size THEN
        RAISE EXCEPTION 'id, name and size of a cluster never change'
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.name <> OLD.name
        AND NOT (OLD.phase = 'abandoned' AND OLD.ended_cause = 'database_accepted') THEN
        RAISE EXCEPTION 'id, name and size of a cluster never change'
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.phase <> OLD.phase AND NOT (OLD.phase, NEW.phase) IN (
        ('draft', 'open'),
        ('open', 'preparing'), ('open', 'committed'), ('open', 'expired'), ('open', 'abandoned'),
        ('preparing', 'open'), ('preparing', 'committed'), ('preparing', 'expired'),
        ('preparing', 'abandoned'),
        ('committed', 'formed'), ('committed', 'retired'), ('formed', 'retired'),
        ('abandoned', 'committed')
    ) THEN
        RAISE EXCEPTION 'a cluster doesn''t go from % to %', OLD.phase, NEW.phase
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF OLD.phase IN ('committed', 'formed', 'retired') AND NEW.frozen_h <> OLD.frozen_h THEN
        RAISE EXCEPTION 'a decided list never changes' USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.rev < OLD.rev OR NEW.epoch < OLD.epoch OR NEW.floor < OLD.floor THEN
        RAISE EXCEPTION 'revision, epoch and floor never go back'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
