//! Queries on the console's sign-in links and sessions.

use std::time::Duration;

use discovery_formation as formation;
use discovery_types::digest::Digest;
use discovery_types::key::PublicKey;
use serde_json::json;
use uuid::Uuid;

use super::{Store, StoreError, Transaction, UnixMicros};

/// Maximum number of sessions of one admin. A further one ends the oldest.
const MAX_SESSIONS_PER_ADMIN: i64 = 8;

/// A session that begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewConsoleSession<'a> {
    /// Hash of the cookie's secret.
    pub cookie: &'a Digest,
    /// Key of the admin who signed in.
    pub admin: &'a PublicKey,
    /// Name of the admin, for the event.
    pub name: &'a str,
    /// Source address of the browser, for the event.
    pub address: &'a str,
    /// Longest life of the session.
    pub life: Duration,
}

/// A session as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoredConsoleSession {
    /// Key of the admin who signed in. The admin may have been revoked since.
    pub admin: PublicKey,
    /// Time at which the session ends.
    pub expires_us: UnixMicros,
}

fn micros(time: Duration) -> UnixMicros {
    UnixMicros::try_from(time.as_micros()).unwrap_or(UnixMicros::MAX / 2)
}

impl Store {
    /// Stores an admin's sign-in link, in place of an earlier one. Returns the time at which it
    /// expires.
    pub(crate) async fn put_console_link(
        &self,
        admin: &PublicKey,
        name: &str,
        code: &Digest,
        life: Duration,
    ) -> Result<UnixMicros, StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        let expires_us: UnixMicros = sqlx::query_scalar(
            "INSERT INTO console_links (admin_key, code_hash, expires_us)
             VALUES ($1, $2, now_us() + $3)
             ON CONFLICT (admin_key)
                 DO UPDATE SET code_hash = excluded.code_hash, expires_us = excluded.expires_us
             RETURNING expires_us",
        )
        .bind(&admin.as_bytes()[..])
        .bind(&code.0[..])
        .bind(micros(life))
        .fetch_one(&mut *transaction)
        .await?;
        append(&mut transaction, "console_link", &json!({ "by": name })).await?;
        transaction.commit().await?;
        Ok(expires_us)
    }

    /// Removes a link. Returns the key of its admin, unless the link has expired. If several
    /// requests use one link at once, even at several processes, only one of them gets the key.
    pub(crate) async fn take_console_link(
        &self,
        code: &Digest,
    ) -> Result<Option<PublicKey>, StoreError> {
        let taken: Option<(Vec<u8>, bool)> = sqlx::query_as(
            "DELETE FROM console_links WHERE code_hash = $1
             RETURNING admin_key, expires_us > now_us()",
        )
        .bind(&code.0[..])
        .fetch_optional(&mut *self.acquire().await?)
        .await?;
        let valid = taken.filter(|(_, is_valid)| *is_valid);
        valid.map(|(key, _)| admin_key(key)).transpose()
    }

    /// Stores a session of the database's present generation. Ends the admin's oldest sessions if
    /// there are too many.
    pub(crate) async fn begin_console_session(
        &self,
        session: NewConsoleSession<'_>,
    ) -> Result<(), StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        sqlx::query(
            "INSERT INTO console_sessions (cookie_hash, admin_key, generation, begun_us, expires_us)
             SELECT $1, $2, number, now_us(), now_us() + $3 FROM generation",
        )
        .bind(&session.cookie.0[..])
        .bind(&session.admin.as_bytes()[..])
        .bind(micros(session.life))
        .execute(&mut *transaction)
        .await?;
        sqlx::query(
            "DELETE FROM console_sessions WHERE cookie_hash IN (
                 SELECT cookie_hash FROM console_sessions WHERE admin_key = $1
                 ORDER BY begun_us DESC OFFSET $2)",
        )
        .bind(&session.admin.as_bytes()[..])
        .bind(MAX_SESSIONS_PER_ADMIN)
        .execute(&mut *transaction)
        .await?;
        let body = json!({ "by": session.name, "address": session.address });
        append(&mut transaction, "console_sign_in", &body).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Returns the session with this cookie, if it hasn't ended.
    pub(crate) async fn console_session(
        &self,
        cookie: &Digest,
    ) -> Result<Option<StoredConsoleSession>, StoreError> {
        let row: Option<(Vec<u8>, UnixMicros)> = sqlx::query_as(
            "SELECT s.admin_key, s.expires_us FROM console_sessions s
             JOIN generation g ON g.number = s.generation
             WHERE s.cookie_hash = $1 AND s.expires_us > (SELECT now_us())",
        )
        .bind(&cookie.0[..])
        .fetch_optional(&mut *self.acquire().await?)
        .await?;
        let session =
            |(key, expires_us)| Ok(StoredConsoleSession { admin: admin_key(key)?, expires_us });
        row.map(session).transpose()
    }

    /// Ends a session. Ending one that has ended changes nothing.
    pub(crate) async fn end_console_session(
        &self,
        cookie: &Digest,
        name: &str,
    ) -> Result<(), StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        let ended = sqlx::query("DELETE FROM console_sessions WHERE cookie_hash = $1")
            .bind(&cookie.0[..])
            .execute(&mut *transaction)
            .await?;
        if ended.rows_affected() == 1 {
            append(&mut transaction, "console_sign_out", &json!({ "by": name })).await?;
        }
        transaction.commit().await?;
        Ok(())
    }

    /// Deletes links and sessions that have expired. Each admin has a few at most.
    pub(crate) async fn delete_expired_console_rows(&self) -> Result<(), StoreError> {
        for sql in [
            "DELETE FROM console_links WHERE expires_us <= (SELECT now_us())",
            "DELETE FROM console_sessions WHERE expires_us <= (SELECT now_us())",
        ] {
            sqlx::query(sql).execute(&mut *self.acquire().await?).await?;
        }
        Ok(())
    }
}

fn admin_key(bytes: Vec<u8>) -> Result<PublicKey, StoreError> {
    let bytes: Option<[u8; 32]> = bytes.try_into().ok();
    let key = bytes.and_then(|bytes| PublicKey::try_from(bytes).ok());
    key.ok_or_else(|| StoreError::damaged("the key of a console session".to_owned()))
}

/// Appends an event to the service's own chain.
async fn append(
    transaction: &mut Transaction,
    kind: &str,
    body: &serde_json::Value,
) -> Result<(), StoreError> {
    let now: i64 = sqlx::query_scalar("SELECT now_us()").fetch_one(&mut **transaction).await?;
    let now = formation::UnixMicros(now.unsigned_abs());
    super::cluster::append_event(transaction, Uuid::nil(), now, kind, body).await
}
