//! Queries on the admin chain, used assertions, agents' clusters and event chains.

use discovery_types::api::EventView;
use discovery_types::checkpoint::ChainPosition;
use discovery_types::digest::Digest;
use discovery_types::jws::Jws;
use sqlx::types::Json;
use uuid::Uuid;

use super::{Store, StoreError, UnixMicros};
use crate::domain::number_to_row;
use crate::ledger;

impl Store {
    /// Returns the SHA-256 over all elements of the admin chain, and the database's time. A changed
    /// hash means that the elements changed.
    pub(crate) async fn admin_fingerprint(&self) -> Result<(Vec<u8>, UnixMicros), StoreError> {
        let row = sqlx::query_as(
            "SELECT sha256(convert_to(coalesce(string_agg(jws, E'\\n' ORDER BY sequence), ''),
                                      'UTF8')), now_us()
             FROM admin_elements",
        )
        .fetch_one(&mut *self.acquire().await?)
        .await?;
        Ok(row)
    }

    /// Returns all stored elements of the admin chain, in order.
    pub(crate) async fn admin_elements(&self) -> Result<Vec<String>, StoreError> {
        let rows = sqlx::query_scalar("SELECT jws FROM admin_elements ORDER BY sequence")
            .fetch_all(&mut *self.acquire().await?)
            .await?;
        Ok(rows)
    }

    /// Appends a verified element to the admin chain. Returns `UniqueViolation` if another element
    /// has this place in the chain.
    pub(crate) async fn put_admin_element(
        &self,
        sequence: u64,
        jws: &Jws,
        by: &str,
    ) -> Result<(), StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        let now: i64 = sqlx::query_scalar(
            "INSERT INTO admin_elements (sequence, hash, jws, stored_us)
             VALUES ($1, $2, $3, now_us()) RETURNING stored_us",
        )
        .bind(number_to_row(sequence)?)
        .bind(&jws.hash().0[..])
        .bind(jws.as_str())
        .fetch_one(&mut *transaction)
        .await?;
        let now = discovery_formation::UnixMicros(now.unsigned_abs());
        let body = serde_json::json!({ "sequence": sequence, "by": by });
        super::cluster::append_event(&mut transaction, Uuid::nil(), now, "admins_changed", &body)
            .await?;
        sqlx::query("SELECT pg_notify($1, 'admins')")
            .bind(ledger::CHANNEL)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Appends events of refused requests to the service's own chain.
    pub(crate) async fn append_refusals(
        &self,
        bodies: &[serde_json::Value],
    ) -> Result<(), StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        let now: i64 = sqlx::query_scalar("SELECT now_us()").fetch_one(&mut *transaction).await?;
        let now = discovery_formation::UnixMicros(now.unsigned_abs());
        for body in bodies {
            let kind = "refused";
            super::cluster::append_event(&mut transaction, Uuid::nil(), now, kind, body).await?;
        }
        transaction.commit().await?;
        Ok(())
    }

    /// Records the use of the assertion `jti`, by which `key` authenticates itself. Returns `false`
    /// if it was used before.
    pub(crate) async fn use_assertion(
        &self,
        key: &[u8; 32],
        jti: &str,
        expires_us: UnixMicros,
    ) -> Result<bool, StoreError> {
        let inserted = sqlx::query(
            "INSERT INTO used_assertions (key, jti, expires_us) VALUES ($1, $2, $3)
             ON CONFLICT DO NOTHING",
        )
        .bind(&key[..])
        .bind(jti)
        .bind(expires_us)
        .execute(&mut *self.acquire().await?)
        .await?;
        Ok(inserted.rows_affected() == 1)
    }

    /// Returns the newest `limit` events of an event chain, newest first.
    pub(crate) async fn events(
        &self,
        stream: Uuid,
        limit: i64,
    ) -> Result<Vec<StoredEvent>, StoreError> {
        let rows: Vec<(i64, String, String)> = sqlx::query_as(
            "SELECT at_us, kind, body FROM events WHERE stream = $1
             ORDER BY number DESC LIMIT $2",
        )
        .bind(stream)
        .bind(limit)
        .fetch_all(&mut *self.acquire().await?)
        .await?;
        let event = |(at_us, kind, body): (i64, String, String)| StoredEvent {
            at_us,
            kind,
            body: Json(serde_json::from_str(&body).unwrap_or_default()),
        };
        Ok(rows.into_iter().map(event).collect())
    }
}

impl Store {
    /// Returns at most `limit` events of a chain after the event with the number `after`, and the
    /// number of the chain's last event.
    pub(crate) async fn event_chain(
        &self,
        stream: Uuid,
        after: i64,
        limit: i64,
    ) -> Result<(u64, Vec<EventView>), StoreError> {
        type Row = (i64, i64, String, String, Vec<u8>, Vec<u8>);
        let mut connection = self.acquire().await?;
        let rows: Vec<Row> = sqlx::query_as(
            "SELECT number, at_us, kind, body, previous, hash FROM events
             WHERE stream = $1 AND number > $2 ORDER BY number LIMIT $3",
        )
        .bind(stream)
        .bind(after)
        .bind(limit)
        .fetch_all(&mut *connection)
        .await?;
        let last: Option<i64> = sqlx::query_scalar(
            "SELECT number FROM events WHERE stream = $1 ORDER BY number DESC LIMIT 1",
        )
        .bind(stream)
        .fetch_optional(&mut *connection)
        .await?;
        let damaged = |_| StoreError::damaged(format!("the events of {stream}"));
        let view = |(number, at_us, kind, body, previous, hash): Row| {
            Ok(EventView {
                number: number.unsigned_abs(),
                at_us,
                kind,
                body,
                previous: Digest(previous.try_into().map_err(damaged)?),
                hash: Digest(hash.try_into().map_err(damaged)?),
            })
        };
        let events = rows.into_iter().map(view).collect::<Result<_, StoreError>>()?;
        Ok((last.unwrap_or(0).unsigned_abs(), events))
    }
}

/// Builds an event's place in its chain from a row's number and hash. Returns `None` if the hash
/// has a wrong length.
fn chain_position((number, hash): (i64, Vec<u8>)) -> Option<ChainPosition> {
    Some(ChainPosition { number: number.unsigned_abs(), hash: Digest(hash.try_into().ok()?) })
}

impl Store {
    /// Returns the last event of a chain, and the one with the number `known`, if there is one.
    /// Both are read at the same time.
    pub(crate) async fn chain_positions(
        &self,
        stream: Uuid,
        known: Option<u64>,
    ) -> Result<(ChainPosition, Option<ChainPosition>), StoreError> {
        let known = known.and_then(|number| i64::try_from(number).ok());
        let rows: Vec<(i64, Vec<u8>)> = sqlx::query_as(
            "(SELECT number, hash FROM events WHERE stream = $1 ORDER BY number DESC LIMIT 1)
             UNION ALL
             SELECT number, hash FROM events WHERE stream = $1 AND number = $2",
        )
        .bind(stream)
        .bind(known)
        .fetch_all(&mut *self.acquire().await?)
        .await?;
        let positions: Option<Vec<ChainPosition>> = rows.into_iter().map(chain_position).collect();
        let positions =
            positions.ok_or_else(|| StoreError::damaged(format!("the events of {stream}")))?;
        let last = positions.iter().max_by_key(|position| position.number).copied();
        let last = last.unwrap_or(ChainPosition { number: 0, hash: Digest([0; 32]) });
        let is_known = |found: &&ChainPosition| known == i64::try_from(found.number).ok();
        Ok((last, positions.iter().find(is_known).copied()))
    }
}

/// One event of an event chain.
#[derive(Clone, Debug)]
pub(crate) struct StoredEvent {
    /// When the event happened: the database's time in microseconds.
    pub at_us: UnixMicros,
    /// Kind of the event, such as "frozen".
    pub kind: String,
    /// Body of the event, which depends on its kind.
    pub body: Json<serde_json::Value>,
}
