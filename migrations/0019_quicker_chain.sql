-- As before, and it computes the same hash as event_hash. Postgres doesn't inline that function, so
-- each event paid for a query of its own.
CREATE OR REPLACE FUNCTION chain_event() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE last_number bigint; last_hash bytea;
BEGIN
    -- A cluster's stream is written under its row's lock; the service's own has no row.
    IF NEW.stream = '00000000-0000-0000-0000-000000000000' THEN
        PERFORM pg_advisory_xact_lock(x'6d75737465720002'::bigint);
    END IF;
    SELECT number, hash INTO last_number, last_hash
        FROM events WHERE stream = NEW.stream ORDER BY number DESC LIMIT 1;
    NEW.number := coalesce(last_number, 0) + 1;
    NEW.previous := coalesce(last_hash,
        '\x0000000000000000000000000000000000000000000000000000000000000000'::bytea);
    NEW.hash := sha256(NEW.previous || convert_to(
        NEW.stream::text || ' ' || NEW.number || ' ' || NEW.at_us || ' ' || NEW.kind || ' ' || NEW.body,
        'UTF8'));
    RETURN NEW;
END $$;
