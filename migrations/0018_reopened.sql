-- As before, except that an owner may reopen an expired cluster. It can be renamed then, since
-- another cluster may have taken its name meanwhile.
CREATE OR REPLACE FUNCTION check_phase() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.id <> OLD.id OR NEW.size <> OLD.size THEN
        RAISE EXCEPTION 'id and size of a cluster never change'
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.name <> OLD.name AND OLD.phase NOT IN ('retired', 'expired')
        AND NOT (OLD.phase = 'abandoned' AND OLD.ended_cause = 'database_accepted') THEN
        RAISE EXCEPTION 'the name of a cluster changes only when its end is undone'
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.phase <> OLD.phase AND NOT (OLD.phase, NEW.phase) IN (
        ('draft', 'open'),
        ('open', 'preparing'), ('open', 'committed'), ('open', 'expired'), ('open', 'abandoned'),
        ('preparing', 'open'), ('preparing', 'committed'), ('preparing', 'expired'),
        ('preparing', 'abandoned'),
        ('committed', 'formed'), ('committed', 'retired'), ('formed', 'retired'),
        ('retired', 'committed'), ('retired', 'formed'),
        ('expired', 'open'),
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
