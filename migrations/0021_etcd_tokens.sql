-- Etcd tokens: stock etcd forms clusters through this service by its own discovery protocols.

CREATE TABLE etcd_tokens (
    -- Names the token in the service: waiting requests are woken by it.
    uuid          uuid     PRIMARY KEY,
    -- Public id of the token, a part of its text.
    id            text     NOT NULL UNIQUE CHECK (length(id) = 16),
    -- SHA-256 of the secret. The secret is never stored.
    secret_hash   bytea    NOT NULL CHECK (octet_length(secret_hash) = 32),
    name          text     NOT NULL,
    protocol      text     NOT NULL CHECK (protocol IN ('v2', 'v3')),
    size          smallint NOT NULL CHECK (size BETWEEN 1 AND 9),
    cidrs         text[]   NOT NULL,
    made_by       text     NOT NULL,
    made_us       bigint   NOT NULL,
    expires_us    bigint   NOT NULL,
    revoked_us    bigint,
    -- Index of the last change of the list, and of the last one by which a member lost its place.
    last_index    bigint   NOT NULL CHECK (last_index >= 2),
    lapse_index   bigint   NOT NULL CHECK (lapse_index BETWEEN 0 AND last_index),
    -- Cluster token of the first member: the discovery URL or the discovery token that it was given.
    -- With a token's text in it, only its hash would be of use; so it is stored as a hash.
    cluster_token bytea    CHECK (octet_length(cluster_token) = 32),
    -- When the last member registered. From then on the list never changes.
    complete_us   bigint
);
CREATE INDEX etcd_tokens_by_age ON etcd_tokens (made_us DESC, id DESC);
CREATE INDEX etcd_tokens_by_end ON etcd_tokens (expires_us);

CREATE TABLE etcd_members (
    token         uuid     NOT NULL REFERENCES etcd_tokens (uuid) ON DELETE CASCADE,
    member_id     bytea    NOT NULL CHECK (octet_length(member_id) = 8),
    -- "name=url,name=url", as etcd sent it.
    value         text     NOT NULL,
    address       text     NOT NULL,
    created_index bigint   NOT NULL,
    lease_us      bigint   NOT NULL,
    lapsed        boolean  NOT NULL,
    at_us         bigint   NOT NULL,
    PRIMARY KEY (token, created_index)
);

-- A complete list never changes: two members that begin with different lists are two clusters.
CREATE FUNCTION keep_complete_list() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM etcd_tokens WHERE uuid = coalesce(NEW.token, OLD.token)
               AND complete_us IS NOT NULL) THEN
        RAISE EXCEPTION 'the list of members is complete'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END $$;
CREATE TRIGGER etcd_members_stay BEFORE INSERT OR UPDATE OR DELETE ON etcd_members
    FOR EACH ROW EXECUTE FUNCTION keep_complete_list();

CREATE OR REPLACE FUNCTION is_whole() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM pg_constraint
            WHERE connamespace = current_schema()::regnamespace AND contype IN ('p', 'u', 'f'))
        + (SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
            WHERE c.relnamespace = current_schema()::regnamespace)
        + (SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
            WHERE c.relnamespace = current_schema()::regnamespace
                AND NOT t.tgisinternal AND t.tgenabled <> 'D')
        >= 151
$$;
