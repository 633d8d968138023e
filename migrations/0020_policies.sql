-- Replacement policies: an operator signs beforehand when a member that nobody can reach may be
-- replaced. A policy is a grant of the kind 'heal', whose token many hosts redeem.

ALTER TABLE grants DROP CONSTRAINT grants_kind_check;
ALTER TABLE grants ADD CONSTRAINT grants_kind_check CHECK (kind IN ('boot', 'join', 'heal'));
CREATE INDEX grants_of_policies ON grants (cluster_id, stored_us) WHERE kind = 'heal';
-- The list of all policies, newest first.
CREATE INDEX policies_by_age ON grants (stored_us DESC, id DESC) WHERE kind = 'heal';

-- The operation id already ties a ticket to one intent. A policy's grant has an intent for each host.
ALTER TABLE intents DROP CONSTRAINT intents_grant_id_key;
CREATE INDEX intents_by_grant ON intents (grant_id) WHERE grant_id IS NOT NULL;

-- When a host that waits under a policy was last heard of. NULL for every other intent.
ALTER TABLE intents ADD COLUMN seen_us bigint;
-- The member that the cluster's agents let such a host replace.
ALTER TABLE intents ADD COLUMN replaces bytea CHECK (octet_length(replaces) = 8);

CREATE OR REPLACE FUNCTION is_whole() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM pg_constraint
            WHERE connamespace = current_schema()::regnamespace AND contype IN ('p', 'u', 'f'))
        + (SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
            WHERE c.relnamespace = current_schema()::regnamespace)
        + (SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
            WHERE c.relnamespace = current_schema()::regnamespace
                AND NOT t.tgisinternal AND t.tgenabled <> 'D')
        >= 141
$$;
