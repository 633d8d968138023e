-- Fills a database with clusters number {first} to {last}, of three members each, as a service has
-- them that was used for years: of twenty, one is open, one has expired, two are retired and sixteen are formed.
-- Nobody verifies the signed texts of clusters in a list, so they are short here.

-- No triggers and no foreign keys: rows are inserted table after table.
SET session_replication_role = replica;

CREATE TEMP TABLE made AS
SELECT n, 'made-' || n AS name, at_ms * 1000 AS at_us, sha256(('list ' || n)::bytea) AS h,
    -- 16 characters of base32.
    translate(lpad(to_hex(n), 16, '0'), '0189', 'wxyz') AS grant_id,
    -- A version-7 UUID: 48 bits of time, version, 12 bits, variant, and the number.
    (lpad(to_hex(at_ms), 12, '0') || '70008000' || lpad(to_hex(n), 12, '0'))::uuid AS id,
    CASE WHEN n % 20 = 0 THEN 'open' WHEN n % 20 = 1 THEN 'expired'
        WHEN n % 20 IN (2, 3) THEN 'retired' ELSE 'formed' END AS phase
FROM (
    SELECT n, (now_us() / 1000 - ({last} - n + 1) * 1000)::bigint AS at_ms
    FROM generate_series({first}::bigint, {last}) AS n
) AS numbered;

INSERT INTO clusters (id, name, size, phase, created_us, created_by, deadline_us, rev, next_place,
    frozen_epoch, frozen_h, frozen_statement, frozen_us, ended_cause, ended_us, ended_by,
    next_deadline_us)
SELECT id, name, 3, phase, at_us, 'owner', at_us + 86400000000000, 9, 4,
    CASE WHEN phase IN ('formed', 'retired') THEN 1 END,
    CASE WHEN phase IN ('formed', 'retired') THEN h END,
    CASE WHEN phase IN ('formed', 'retired') THEN h END,
    CASE WHEN phase IN ('formed', 'retired') THEN at_us END,
    CASE WHEN phase = 'expired' THEN 'deadline' END,
    CASE WHEN phase IN ('expired', 'retired') THEN at_us END,
    CASE WHEN phase IN ('expired', 'retired') THEN 'owner' END,
    -- None is due for years.
    CASE WHEN phase = 'open' THEN at_us + 86400000000000 END
FROM made;

INSERT INTO authorities
SELECT id, purpose, '\x00', '\x00' FROM made, unnest(ARRAY['peer', 'client']) AS purpose;

INSERT INTO statements SELECT id, 0, sha256(('statement ' || n)::bytea), 'made', at_us FROM made;

INSERT INTO grants (id, cluster_id, kind, hash, token_key, jws, uses, expires_us, issued_by, stored_us)
SELECT grant_id, id, 'boot', sha256(('grant ' || n)::bytea), sha256(('token ' || n)::bytea),
    '{grant}', 3, at_us + 3600000000, 'owner', at_us
FROM made;

INSERT INTO agents (cluster_id, size, key, grant_id, record, token_record, seat, lease_us,
    highest_epoch, counts, held_us, address, redeemed_us)
SELECT id, 3, sha256(('agent ' || n || ' ' || seat)::bytea), grant_id, 'made', 'made', seat,
    at_us, 0, 1, 0, '10.0.0.1', at_us
FROM made, generate_series(1, 3) AS seat;

INSERT INTO frozen_seats
SELECT id, 3, 1, seat, sha256(('agent ' || n || ' ' || seat)::bytea), 'node-' || seat,
    substr(sha256(('incarnation ' || n || ' ' || seat)::bytea), 1, 16),
    sha256(('node ' || n || ' ' || seat)::bytea), grant_id, 'made', 'made'
FROM made, generate_series(1, 3) AS seat WHERE phase IN ('formed', 'retired');

INSERT INTO frozen_urls
SELECT id, 'https://10.0.0.' || seat || ':' || port, seat
FROM made, generate_series(1, 3) AS seat, unnest(ARRAY[2379, 2380]) AS port
WHERE phase IN ('formed', 'retired');

INSERT INTO commits
SELECT id, 1, h, 'made', false, at_us FROM made WHERE phase IN ('formed', 'retired');

INSERT INTO decisions
SELECT last + row_number() OVER (ORDER BY n), id, CASE WHEN phase <> 'expired' THEN h END,
    CASE WHEN phase = 'expired' THEN 'deadline' END, at_us, sha256(('decision ' || n)::bytea)
FROM made, (SELECT coalesce(max(number), 0) AS last FROM decisions) AS l
WHERE phase IN ('formed', 'retired', 'expired');

INSERT INTO directory_reports
SELECT id, substr(sha256(('member ' || n || ' ' || seat)::bytea), 1, 8), 1, 2, 100, NULL, '{}', at_us
FROM made, generate_series(1, 3) AS seat WHERE phase = 'formed';

INSERT INTO directory
SELECT id, 1, 2, 100, '{"members":[{},{},{}]}', at_us FROM made WHERE phase = 'formed';

INSERT INTO events
SELECT id, number, at_us, 'made', '{}', sha256(''), sha256((n || ' ' || number)::text::bytea)
FROM made, generate_series(1, 5) AS number;

DROP TABLE made;
SET session_replication_role = DEFAULT;
ANALYZE;
