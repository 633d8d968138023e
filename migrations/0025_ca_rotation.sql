-- Replaces a cluster's CAs while it runs.

-- CAs that a cluster trusts beside those that issue (authorities): the new ones before the switch, the old
-- ones after it. The keys are encrypted under the service's KEK.
CREATE TABLE other_authorities (
    cluster_id  uuid  NOT NULL REFERENCES clusters (id),
    purpose     text  NOT NULL CHECK (purpose IN ('peer', 'client')),
    certificate bytea NOT NULL,
    wrapped_key bytea,
    PRIMARY KEY (cluster_id, purpose)
);

-- How far each member is with the replacement, as its agent reported last. The numbers are positions in the
-- statement chain (statements.sequence).
CREATE TABLE member_authorities (
    cluster_id uuid   NOT NULL REFERENCES clusters (id),
    member_id  bytea  NOT NULL CHECK (octet_length(member_id) = 8),
    trusted    bigint NOT NULL CHECK (trusted >= 0),
    certified  bigint CHECK (certified >= 0),
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
        >= 157
$$;
