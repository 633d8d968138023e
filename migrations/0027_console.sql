-- Sign-in links and sessions of the console. Of a secret, only its SHA-256 is stored.

-- The newest link of each admin.
CREATE TABLE console_links (
    admin_key  bytea  PRIMARY KEY CHECK (octet_length(admin_key) = 32),
    code_hash  bytea  NOT NULL UNIQUE CHECK (octet_length(code_hash) = 32),
    expires_us bigint NOT NULL
);

-- A session belongs to the generation of the database in which it began. So a database that was set back
-- revives no session that was ended.
CREATE TABLE console_sessions (
    cookie_hash bytea  PRIMARY KEY CHECK (octet_length(cookie_hash) = 32),
    admin_key   bytea  NOT NULL CHECK (octet_length(admin_key) = 32),
    generation  bigint NOT NULL,
    begun_us    bigint NOT NULL,
    expires_us  bigint NOT NULL
);
CREATE INDEX console_sessions_by_admin ON console_sessions (admin_key, begun_us);

CREATE OR REPLACE FUNCTION is_whole() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM pg_constraint
            WHERE connamespace = current_schema()::regnamespace AND contype IN ('p', 'u', 'f'))
        + (SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
            WHERE c.relnamespace = current_schema()::regnamespace)
        + (SELECT count(*) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
            WHERE c.relnamespace = current_schema()::regnamespace
                AND NOT t.tgisinternal AND t.tgenabled <> 'D')
        >= 167
$$;
