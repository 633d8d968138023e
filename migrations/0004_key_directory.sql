-- The key directory that this database belongs to: `sealed` opens with its key-encryption keys and
-- with no other's, `pin` is the SHA-256 of its TLS key (SPKI), so that it can be named.
CREATE TABLE key_directory (
    one    boolean PRIMARY KEY DEFAULT true CHECK (one),
    sealed bytea   NOT NULL,
    pin    bytea   NOT NULL CHECK (octet_length(pin) = 32)
);
