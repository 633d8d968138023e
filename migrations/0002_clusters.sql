-- Clusters and how they form. The service decides in code; what stands here makes a wrong decision
-- an error instead of a second cluster.

CREATE TABLE clusters (
    id               uuid     PRIMARY KEY,
    name             text     NOT NULL CHECK (name ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'),
    size             smallint NOT NULL CHECK (size BETWEEN 1 AND 9),
    phase            text     NOT NULL CHECK (phase IN ('draft', 'open', 'preparing', 'committed',
                                                        'formed', 'expired', 'abandoned', 'retired')),
    created_us       bigint   NOT NULL,
    created_by       text     NOT NULL,
    deadline_us      bigint   NOT NULL,
    epoch            bigint   NOT NULL DEFAULT 1 CHECK (epoch > 0),
    floor            bigint   NOT NULL DEFAULT 0 CHECK (floor >= 0),
    rev              bigint   NOT NULL DEFAULT 0,
    next_place       bigint   NOT NULL DEFAULT 1,
    frozen_epoch     bigint,
    frozen_h         bytea    CHECK (octet_length(frozen_h) = 32),
    frozen_statement bytea    CHECK (octet_length(frozen_statement) = 32),
    frozen_us        bigint,
    unsettled        boolean  NOT NULL DEFAULT false,
    ended_cause      text,
    ended_us         bigint,
    ended_by         text,
    split_other      bytea    CHECK (octet_length(split_other) = 32),
    split_epoch      bigint,
    error_us         bigint,
    error_key        bytea    CHECK (octet_length(error_key) = 32),
    error_text       text,
    -- When time alone changes something; NULL: never.
    next_deadline_us bigint,
    UNIQUE (id, size),
    CHECK ((frozen_h IS NULL) = (frozen_epoch IS NULL)),
    CHECK ((frozen_h IS NULL) = (frozen_statement IS NULL)),
    CHECK ((frozen_h IS NULL) = (frozen_us IS NULL)),
    CHECK (phase NOT IN ('preparing', 'committed', 'formed', 'retired') OR frozen_h IS NOT NULL),
    CHECK (phase NOT IN ('draft', 'open') OR frozen_h IS NULL)
);
-- A name is free again when its cluster has ended.
CREATE UNIQUE INDEX clusters_by_live_name ON clusters (name)
    WHERE phase IN ('open', 'preparing', 'committed', 'formed');
CREATE INDEX clusters_by_deadline ON clusters (next_deadline_us)
    WHERE next_deadline_us IS NOT NULL;
CREATE INDEX clusters_by_name ON clusters (name, id);

-- open → preparing → committed → formed → retired, and out of the first two: expired, abandoned.
-- An abandoned one may come back as committed, for a valid document that somebody shows.
CREATE FUNCTION check_phase() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.id <> OLD.id OR NEW.size <> OLD.size OR NEW.name <> OLD.name THEN
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
CREATE TRIGGER clusters_follow_their_phases BEFORE UPDATE ON clusters
    FOR EACH ROW EXECUTE FUNCTION check_phase();

-- Both CAs. The keys are encrypted under the service's KEK.
CREATE TABLE authorities (
    cluster_id  uuid  NOT NULL REFERENCES clusters (id),
    purpose     text  NOT NULL CHECK (purpose IN ('peer', 'client')),
    certificate bytea NOT NULL,
    wrapped_key bytea,
    PRIMARY KEY (cluster_id, purpose)
);

-- What owners signed that the cluster is, in a chain.
CREATE TABLE statements (
    cluster_id uuid   NOT NULL REFERENCES clusters (id),
    sequence   bigint NOT NULL CHECK (sequence >= 0),
    hash       bytea  NOT NULL UNIQUE CHECK (octet_length(hash) = 32),
    jws        text   NOT NULL,
    stored_us  bigint NOT NULL,
    PRIMARY KEY (cluster_id, sequence)
);
CREATE TRIGGER statements_are_kept BEFORE UPDATE OR DELETE ON statements
    FOR EACH ROW EXECUTE FUNCTION refuse_change();

-- What issuers signed: nothing secret, the token's public key.
CREATE TABLE grants (
    id         text     PRIMARY KEY CHECK (octet_length(id) BETWEEN 1 AND 64),
    cluster_id uuid     NOT NULL REFERENCES clusters (id),
    kind       text     NOT NULL CHECK (kind IN ('boot', 'join')),
    hash       bytea    NOT NULL UNIQUE CHECK (octet_length(hash) = 32),
    token_key  bytea    NOT NULL UNIQUE CHECK (octet_length(token_key) = 32),
    jws        text     NOT NULL,
    uses       integer  NOT NULL CHECK (uses > 0),
    expires_us bigint   NOT NULL,
    issued_by  text     NOT NULL,
    stored_us  bigint   NOT NULL,
    revoked_us bigint,
    revoked_by text,
    UNIQUE (id, cluster_id)
);
CREATE INDEX grants_by_cluster ON grants (cluster_id, stored_us);

-- Every agent key that ever redeemed; rows are never deleted, for they count.
CREATE TABLE agents (
    cluster_id     uuid     NOT NULL,
    size           smallint NOT NULL,
    key            bytea    NOT NULL CHECK (octet_length(key) = 32),
    grant_id       text     NOT NULL REFERENCES grants (id),
    record         text     NOT NULL,
    token_record   text     NOT NULL,
    seat           smallint CHECK (seat BETWEEN 1 AND size),
    standby        bigint   CHECK (standby > 0),
    lease_us       bigint   NOT NULL,
    boot           bigint   CHECK (boot >= 0),
    nonce          bytea    CHECK (octet_length(nonce) = 16),
    highest_epoch  bigint   NOT NULL CHECK (highest_epoch >= 0),
    counts         integer  NOT NULL CHECK (counts >= 0),
    held_us        bigint   NOT NULL,
    release_epoch  bigint,
    release_jws    text,
    address        text,
    redeemed_us    bigint   NOT NULL,
    -- One key, one seat; and either a seat or a place in the queue.
    PRIMARY KEY (cluster_id, key),
    CHECK (seat IS NULL OR standby IS NULL),
    CHECK ((boot IS NULL) = (nonce IS NULL)),
    CHECK ((release_epoch IS NULL) = (release_jws IS NULL)),
    FOREIGN KEY (cluster_id, size) REFERENCES clusters (id, size),
    -- Checked at COMMIT: a seat may change hands within a transaction.
    CONSTRAINT agents_one_for_a_seat UNIQUE (cluster_id, seat) DEFERRABLE INITIALLY DEFERRED,
    CONSTRAINT agents_one_for_a_place UNIQUE (cluster_id, standby) DEFERRABLE INITIALLY DEFERRED
);
CREATE INDEX agents_by_grant ON agents (grant_id);
CREATE INDEX agents_by_key ON agents (key, redeemed_us);

-- The frozen list: while it is being signed, and from the commit on for ever.
CREATE TABLE frozen_seats (
    cluster_id   uuid     NOT NULL,
    size         smallint NOT NULL,
    epoch        bigint   NOT NULL,
    seat         smallint NOT NULL CHECK (seat BETWEEN 1 AND size),
    key          bytea    NOT NULL CHECK (octet_length(key) = 32),
    name         text     NOT NULL,
    incarnation  bytea    NOT NULL CHECK (octet_length(incarnation) = 16),
    node_key     bytea    NOT NULL CHECK (octet_length(node_key) = 32),
    grant_id     text     NOT NULL REFERENCES grants (id),
    record       text     NOT NULL,
    token_record text     NOT NULL,
    PRIMARY KEY (cluster_id, seat),
    UNIQUE (cluster_id, key),
    UNIQUE (cluster_id, name),
    UNIQUE (cluster_id, incarnation),
    UNIQUE (cluster_id, node_key),
    FOREIGN KEY (cluster_id, size) REFERENCES clusters (id, size)
);

-- No address twice in a list, be it for peers or for clients.
CREATE TABLE frozen_urls (
    cluster_id uuid     NOT NULL,
    url        text     NOT NULL,
    seat       smallint NOT NULL,
    PRIMARY KEY (cluster_id, url),
    FOREIGN KEY (cluster_id, seat) REFERENCES frozen_seats (cluster_id, seat) ON DELETE CASCADE
);

CREATE FUNCTION keep_decided_seats() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM commits WHERE cluster_id = OLD.cluster_id AND epoch = OLD.epoch) THEN
        RAISE EXCEPTION 'a decided list never changes' USING ERRCODE = 'restrict_violation';
    END IF;
    IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER frozen_seats_are_kept BEFORE UPDATE OR DELETE ON frozen_seats
    FOR EACH ROW EXECUTE FUNCTION keep_decided_seats();

CREATE TABLE acks (
    cluster_id uuid   NOT NULL,
    key        bytea  NOT NULL,
    epoch      bigint NOT NULL,
    jws        text   NOT NULL,
    PRIMARY KEY (cluster_id, key),
    -- Only those listed sign.
    FOREIGN KEY (cluster_id, key) REFERENCES frozen_seats (cluster_id, key) ON DELETE CASCADE
);

CREATE TABLE probes (
    cluster_id uuid   NOT NULL,
    key        bytea  NOT NULL,
    epoch      bigint NOT NULL,
    row        jsonb  NOT NULL,
    PRIMARY KEY (cluster_id, key),
    FOREIGN KEY (cluster_id, key) REFERENCES frozen_seats (cluster_id, key) ON DELETE CASCADE
);

-- The decision. One for a cluster, and never another.
CREATE TABLE commits (
    cluster_id   uuid   PRIMARY KEY REFERENCES clusters (id),
    epoch        bigint NOT NULL,
    h            bytea  NOT NULL CHECK (octet_length(h) = 32),
    document     text   NOT NULL,
    -- Decided here by the last ack, or shown by an agent or a ledger.
    adopted      boolean NOT NULL,
    committed_us bigint NOT NULL
);
CREATE TRIGGER commits_are_kept BEFORE UPDATE OR DELETE ON commits
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER commits_stay BEFORE TRUNCATE ON commits
    EXECUTE FUNCTION refuse_change();

CREATE FUNCTION check_commit() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE c clusters; signed integer;
BEGIN
    -- Against whoever finds out, at this moment, that the database is another one.
    PERFORM pg_advisory_xact_lock_shared(x'6d75737465720001'::bigint);
    SELECT * INTO c FROM clusters WHERE id = NEW.cluster_id;
    IF c.frozen_h IS DISTINCT FROM NEW.h OR c.frozen_epoch IS DISTINCT FROM NEW.epoch THEN
        RAISE EXCEPTION 'the commit isn''t of the frozen list'
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF NOT NEW.adopted AND (c.unsettled OR NOT (SELECT settled FROM generation)) THEN
        RAISE EXCEPTION 'nothing is committed until the ledgers agree'
            USING ERRCODE = 'restrict_violation';
    END IF;
    SELECT count(*) INTO signed FROM acks
        WHERE cluster_id = NEW.cluster_id AND epoch = NEW.epoch;
    IF NOT NEW.adopted AND signed <> c.size THEN
        RAISE EXCEPTION '% of % members have signed', signed, c.size
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER commits_are_signed BEFORE INSERT ON commits
    FOR EACH ROW EXECUTE FUNCTION check_commit();

-- A cluster is called committed if, and only if, its commit stands.
CREATE FUNCTION check_decided() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE c clusters;
BEGIN
    SELECT * INTO c FROM clusters WHERE id = NEW.id;
    IF (c.phase IN ('committed', 'formed', 'retired'))
        <> EXISTS (SELECT 1 FROM commits WHERE cluster_id = NEW.id) THEN
        RAISE EXCEPTION 'phase % and the commit of cluster % don''t agree', c.phase, NEW.id
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER clusters_are_decided AFTER INSERT OR UPDATE ON clusters
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION check_decided();

-- The members' certificates, issued in the transaction that commits.
CREATE TABLE leaves (
    cluster_id  uuid     NOT NULL REFERENCES commits (cluster_id),
    seat        smallint NOT NULL CHECK (seat BETWEEN 1 AND 9),
    purpose     text     NOT NULL CHECK (purpose IN ('peer', 'client')),
    certificate bytea    NOT NULL,
    PRIMARY KEY (cluster_id, seat, purpose)
);

-- What members say of their own nodes.
CREATE TABLE reports (
    cluster_id   uuid  NOT NULL REFERENCES clusters (id),
    key          bytea NOT NULL CHECK (octet_length(key) = 32),
    raft_cluster bytea NOT NULL CHECK (octet_length(raft_cluster) = 8),
    PRIMARY KEY (cluster_id, key)
);
