//! Wraps the keys of clusters' CAs again, under the newest key-encryption key.

use discovery_types::digest::Digest;
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use super::StoreError;
use super::cluster::append_event;
use crate::kek::{Kek, KekError, KeyPurpose};

/// Tables with CA keys: one for the issuing CAs, and one for all other CAs.
const TABLES: [&str; 2] = ["authorities", "other_authorities"];
/// Number of CAs that are read and wrapped in one transaction.
const PAGE: i64 = 500;

/// Why keys weren't wrapped again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RewrapError {
    /// The database doesn't answer, or a row in it can't be read.
    #[error("can't use the database")]
    Store(#[from] StoreError),
    /// A wrapped key doesn't open.
    #[error("the CA keys of cluster {cluster}")]
    Key {
        /// Cluster of the CA.
        cluster: Uuid,
        /// Reason why the key doesn't open.
        #[source]
        source: KekError,
    },
    /// The database belongs to another service.
    #[error(
        "the database belongs to the service with the pin {0}, which has another key directory"
    )]
    OtherKeys(Digest),
}

/// Numbers of CA keys in a rewrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RewrapCounts {
    /// Number of CA keys in the database.
    pub all: u64,
    /// Number of CA keys that were wrapped again.
    pub rewrapped: u64,
}

/// Wraps all CA keys again that are wrapped under an older version of the key-encryption key, under
/// its newest version. Calls `progress` after each page. Can be repeated after a failure: keys
/// under the newest version stay as they are.
pub(crate) async fn rewrap(
    connection: &mut PgConnection,
    kek: &Kek,
    mut progress: impl FnMut(RewrapCounts),
) -> Result<RewrapCounts, RewrapError> {
    rewrap_seal(connection, kek).await?;
    let mut counts = RewrapCounts::default();
    // A replacement of CAs moves keys from one table to the other. So the tables are read again
    // until nothing is left to do.
    loop {
        let before = counts.rewrapped;
        counts.all = 0;
        for table in TABLES {
            let mut after = (Uuid::nil(), String::new());
            while let Some(last) = rewrap_page(connection, kek, table, &after, &mut counts).await? {
                after = last;
                progress(counts);
            }
        }
        if counts.rewrapped == before {
            break;
        }
    }
    if counts.rewrapped > 0 {
        let now: i64 = sqlx::query_scalar("SELECT now_us()")
            .fetch_one(&mut *connection)
            .await
            .map_err(lost)?;
        let at = discovery_formation::UnixMicros(now.unsigned_abs());
        let body =
            serde_json::json!({ "keys": counts.rewrapped, "kek_version": kek.newest_version() });
        append_event(connection, Uuid::nil(), at, "ca_keys_rewrapped", &body).await?;
    }
    Ok(counts)
}

/// Seals the database with the newest key-encryption key, so that older ones can be deleted.
async fn rewrap_seal(connection: &mut PgConnection, kek: &Kek) -> Result<(), RewrapError> {
    let (sealed, pin): (Vec<u8>, Vec<u8>) = sqlx::query_as("SELECT sealed, pin FROM key_directory")
        .fetch_one(&mut *connection)
        .await
        .map_err(lost)?;
    if !kek.opens(&sealed) {
        let pin = pin.try_into().map(Digest).map_err(|_| StoreError::damaged("a pin"))?;
        return Err(RewrapError::OtherKeys(pin));
    }
    let cluster = Uuid::nil();
    let failed = |source| RewrapError::Key { cluster, source };
    if kek.is_newest(&sealed) {
        return Ok(());
    }
    sqlx::query("UPDATE key_directory SET sealed = $1")
        .bind(kek.seal().map_err(failed)?)
        .execute(connection)
        .await
        .map_err(lost)?;
    Ok(())
}

/// Wraps the keys of the next page of a table. Returns cluster and purpose of the page's last row,
/// or `None` after the last page.
async fn rewrap_page(
    connection: &mut PgConnection,
    kek: &Kek,
    table: &str,
    after: &(Uuid, String),
    counts: &mut RewrapCounts,
) -> Result<Option<(Uuid, String)>, RewrapError> {
    let mut transaction = sqlx::Connection::begin(connection).await.map_err(lost)?;
    let rows: Vec<(Uuid, String, Vec<u8>)> = sqlx::query_as(AssertSqlSafe(format!(
        "SELECT cluster_id, purpose, wrapped_key FROM {table}
         WHERE wrapped_key IS NOT NULL AND (cluster_id, purpose) > ($1, $2)
         ORDER BY cluster_id, purpose LIMIT $3 FOR UPDATE"
    )))
    .bind(after.0)
    .bind(&after.1)
    .bind(PAGE)
    .fetch_all(&mut *transaction)
    .await
    .map_err(lost)?;
    let last = rows.last().map(|(cluster, purpose, _)| (*cluster, purpose.clone()));
    let (mut clusters, mut purposes, mut keys) = (Vec::new(), Vec::new(), Vec::new());
    counts.all += rows.len() as u64;
    for (cluster, purpose, wrapped) in rows {
        if kek.is_newest(&wrapped) {
            continue;
        }
        let kind = match &*purpose {
            "peer" => KeyPurpose::PeerCa,
            _ => KeyPurpose::ClientCa,
        };
        let again = kek.unwrap(cluster, kind, &wrapped).and_then(|key| {
            // Check that the newly wrapped key opens, before it overwrites the old one.
            let again = kek.wrap(cluster, kind, &key)?;
            kek.unwrap(cluster, kind, &again).map(|_| again)
        });
        keys.push(again.map_err(|source| RewrapError::Key { cluster, source })?);
        clusters.push(cluster);
        purposes.push(purpose);
    }
    counts.rewrapped += keys.len() as u64;
    sqlx::query(AssertSqlSafe(format!(
        "UPDATE {table} a SET wrapped_key = n.wrapped_key
         FROM unnest($1::uuid[], $2::text[], $3::bytea[]) AS n (cluster_id, purpose, wrapped_key)
         WHERE a.cluster_id = n.cluster_id AND a.purpose = n.purpose"
    )))
    .bind(clusters)
    .bind(purposes)
    .bind(keys)
    .execute(&mut *transaction)
    .await
    .map_err(lost)?;
    transaction.commit().await.map_err(lost)?;
    Ok(last)
}

fn lost(error: sqlx::Error) -> RewrapError {
    RewrapError::Store(error.into())
}
