//! Queries on etcd tokens and on the members that registered with them.

use discovery_types::api::EtcdTokenRequest;
use discovery_types::digest::{Digest, MemberId};
use discovery_types::grant::GrantId;
use ipnet::IpNet;
use serde::Deserialize;
use serde_json::Value;
use sqlx::types::Json;
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use super::cluster::{CHANNEL, Hex, append_event};
use super::{ListPosition, Store, StoreError, UnixMicros};
use crate::domain::number_to_row;
use crate::etcd_tokens::registry::{EtcdRegistry, RegisteredMember};

/// How long an etcd token is kept after its end, in microseconds: 7 days.
const KEPT_US: UnixMicros = 7 * 86_400 * 1_000_000;
/// Largest number of expired tokens that one call deletes.
const DELETED_AT_ONCE: i64 = 1_000;

/// A stored etcd token.
#[derive(Clone, Debug)]
pub(crate) struct StoredEtcdToken {
    /// Id by which the service wakes requests that wait for this token.
    pub uuid: Uuid,
    pub id: GrantId,
    /// Hash of the token's secret.
    pub secret_hash: Digest,
    /// Name of the cluster.
    pub name: String,
    /// Networks from which members may register; empty for any.
    pub cidrs: Vec<IpNet>,
    /// Name of the admin who made the token.
    pub made_by: String,
    pub made_us: UnixMicros,
    pub expires_us: UnixMicros,
    pub is_revoked: bool,
    /// Whether registrations can be lost: the token was made before the last change of the
    /// database, or the database isn't settled.
    pub is_void: bool,
    /// Database time at which the token was read.
    pub now: UnixMicros,
    /// List of the members that have registered.
    pub registry: EtcdRegistry,
}

/// An event to append to the service's chain.
#[derive(Clone, Debug)]
pub(crate) struct ServiceEvent {
    pub kind: &'static str,
    pub body: Value,
}

#[derive(sqlx::FromRow)]
struct TokenRow {
    uuid: Uuid,
    id: String,
    secret_hash: Vec<u8>,
    name: String,
    protocol: String,
    size: i16,
    cidrs: Vec<String>,
    made_by: String,
    made_us: UnixMicros,
    expires_us: UnixMicros,
    revoked_us: Option<UnixMicros>,
    last_index: i64,
    lapse_index: i64,
    cluster_token: Option<Vec<u8>>,
    complete_us: Option<UnixMicros>,
    settled: bool,
    void_before_us: UnixMicros,
    now: UnixMicros,
    members: Json<Vec<MemberRow>>,
}

#[derive(Deserialize)]
struct MemberRow {
    member_id: Hex,
    value: String,
    address: String,
    created_index: i64,
    lease_us: UnixMicros,
    lapsed: bool,
    at_us: UnixMicros,
}

/// Columns and tables of a [`TokenRow`].
const TOKEN: &str = "
    t.uuid, t.id, t.secret_hash, t.name, t.protocol, t.size, t.cidrs, t.made_by, t.made_us,
    t.expires_us, t.revoked_us, t.last_index, t.lapse_index, t.cluster_token, t.complete_us,
    g.settled, g.void_before_us, now_us() AS now,
    (SELECT coalesce(json_agg(json_build_object('member_id', encode(m.member_id, 'hex'),
         'value', m.value, 'address', m.address, 'created_index', m.created_index,
         'lease_us', m.lease_us, 'lapsed', m.lapsed, 'at_us', m.at_us)), '[]')
     FROM etcd_members m WHERE m.token = t.uuid) AS members
FROM etcd_tokens t CROSS JOIN generation g";

impl TokenRow {
    fn parse(self) -> Result<StoredEtcdToken, StoreError> {
        let damaged = || StoreError::damaged(format!("etcd token {}", self.id));
        let digest = |bytes: &[u8]| bytes.try_into().map(Digest).map_err(|_| damaged());
        let member = |row: &MemberRow| -> Option<RegisteredMember> {
            Some(RegisteredMember {
                id: MemberId(row.member_id.0.as_slice().try_into().ok()?),
                value: row.value.clone(),
                address: row.address.parse().ok()?,
                created_index: row.created_index.unsigned_abs(),
                lease_until: row.lease_us,
                has_lapsed: row.lapsed,
                at_us: row.at_us,
            })
        };
        let members = self.members.iter().map(member).collect::<Option<_>>();
        let cidrs = self.cidrs.iter().map(|cidr| cidr.parse()).collect::<Result<_, _>>();
        Ok(StoredEtcdToken {
            uuid: self.uuid,
            id: self.id.parse().map_err(|_| damaged())?,
            secret_hash: digest(&self.secret_hash)?,
            name: self.name.clone(),
            cidrs: cidrs.map_err(|_| damaged())?,
            made_by: self.made_by.clone(),
            made_us: self.made_us,
            expires_us: self.expires_us,
            is_revoked: self.revoked_us.is_some(),
            is_void: !self.settled || self.made_us < self.void_before_us,
            now: self.now,
            registry: EtcdRegistry {
                protocol: self.protocol.parse().map_err(|_| damaged())?,
                size: self.size.try_into().map_err(|_| damaged())?,
                last_index: self.last_index.unsigned_abs(),
                lapse_index: self.lapse_index.unsigned_abs(),
                is_complete: self.complete_us.is_some(),
                cluster_token: self.cluster_token.as_deref().map(digest).transpose()?,
                members: members.ok_or_else(damaged)?,
            },
        })
    }
}

impl Store {
    /// Stores a new etcd token. Returns `false` if there is one with this id.
    pub(crate) async fn put_etcd_token(
        &self,
        token: &EtcdTokenRequest,
        by: &str,
    ) -> Result<bool, StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        let cidrs: Vec<String> = token.cidrs.iter().map(ToString::to_string).collect();
        let empty = EtcdRegistry::new(token.protocol, token.size);
        let lifetime = number_to_row(token.lifetime_seconds.saturating_mul(1_000_000))?;
        let made_us: Option<UnixMicros> = sqlx::query_scalar(
            "INSERT INTO etcd_tokens (uuid, id, secret_hash, name, protocol, size, cidrs, made_by,
                 made_us, expires_us, last_index, lapse_index)
             SELECT $1, $2, $3, $4, $5, $6, $7, $8, now, now + $9, $10, 0 FROM now_us() AS now
             ON CONFLICT (id) DO NOTHING RETURNING made_us",
        )
        .bind(Uuid::now_v7())
        .bind(token.id.to_string())
        .bind(&token.secret_hash.0[..])
        .bind(token.name.as_str())
        .bind(token.protocol.as_str())
        .bind(i16::from(token.size))
        .bind(cidrs)
        .bind(by)
        .bind(lifetime)
        .bind(number_to_row(empty.last_index)?)
        .fetch_optional(&mut *transaction)
        .await?;
        let Some(made_us) = made_us else { return Ok(false) };
        let body = serde_json::json!({
            "token": token.id.to_string(), "name": token.name, "protocol": token.protocol,
            "size": token.size, "by": by,
        });
        append_service_event(&mut transaction, made_us, "etcd_token_made", &body).await?;
        transaction.commit().await?;
        Ok(true)
    }

    /// Revokes an etcd token. Returns `false` if there is none with this id.
    pub(crate) async fn revoke_etcd_token(
        &self,
        id: &GrantId,
        by: &str,
    ) -> Result<bool, StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        let revoked: Option<(Uuid, UnixMicros)> = sqlx::query_as(
            "UPDATE etcd_tokens SET revoked_us = now_us() WHERE id = $1 AND revoked_us IS NULL
             RETURNING uuid, revoked_us",
        )
        .bind(id.to_string())
        .fetch_optional(&mut *transaction)
        .await?;
        if let Some((uuid, at_us)) = revoked {
            let body = serde_json::json!({ "token": id.to_string(), "by": by });
            append_service_event(&mut transaction, at_us, "etcd_token_revoked", &body).await?;
            notify(&mut transaction, uuid).await?;
        }
        transaction.commit().await?;
        Ok(revoked.is_some() || self.etcd_token(id).await?.is_some())
    }

    /// Reads an etcd token and its members.
    pub(crate) async fn etcd_token(
        &self,
        id: &GrantId,
    ) -> Result<Option<StoredEtcdToken>, StoreError> {
        read(&mut *self.acquire().await?, id).await
    }

    /// Applies `change` to an etcd token under a lock, and appends the events that `change`
    /// returns. Returns the changed token, or `None` if there is no token with this id.
    pub(crate) async fn change_etcd_members<E>(
        &self,
        id: &GrantId,
        change: impl FnOnce(&mut StoredEtcdToken) -> Result<Vec<ServiceEvent>, E>,
    ) -> Result<Option<Result<StoredEtcdToken, E>>, StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        // Lock the row first. The SQL statement that follows then sees all changes by earlier
        // holders of the lock.
        sqlx::query("SELECT 1 FROM etcd_tokens WHERE id = $1 FOR UPDATE")
            .bind(id.to_string())
            .execute(&mut *transaction)
            .await?;
        let Some(mut token) = read(&mut transaction, id).await? else { return Ok(None) };
        let before = token.registry.clone();
        let events = match change(&mut token) {
            Ok(events) => events,
            Err(error) => return Ok(Some(Err(error))),
        };
        if token.registry != before {
            save(&mut transaction, &token).await?;
        }
        for ServiceEvent { kind, body } in events {
            append_service_event(&mut transaction, token.now, kind, &body).await?;
        }
        if token.registry.last_index != before.last_index {
            notify(&mut transaction, token.uuid).await?;
        }
        transaction.commit().await?;
        Ok(Some(Ok(token)))
    }

    /// Returns the first `limit` etcd tokens after `position` in the list, newest first.
    pub(crate) async fn etcd_tokens(
        &self,
        position: &ListPosition,
        limit: i64,
    ) -> Result<Vec<StoredEtcdToken>, StoreError> {
        // The limit is a part of the SQL text: a plan for any limit would read and sort all tokens.
        let sql = format!(
            "SELECT {TOKEN} WHERE (t.made_us, t.id) < ($1, $2)
             ORDER BY t.made_us DESC, t.id DESC LIMIT {limit}"
        );
        let rows: Vec<TokenRow> = sqlx::query_as(AssertSqlSafe(sql))
            .bind(position.at_us)
            .bind(&position.id)
            .fetch_all(&mut *self.acquire().await?)
            .await?;
        rows.into_iter().map(TokenRow::parse).collect()
    }

    /// Returns the number of etcd tokens that have not expired, at most `limit`.
    pub(crate) async fn live_etcd_tokens(&self, limit: i64) -> Result<i64, StoreError> {
        let count = sqlx::query_scalar(
            "SELECT count(*) FROM (SELECT 1 FROM etcd_tokens
                 WHERE expires_us > (SELECT now_us() OFFSET 0) LIMIT $1) t",
        )
        .bind(limit)
        .fetch_one(&mut *self.acquire().await?)
        .await?;
        Ok(count)
    }

    /// Deletes etcd tokens whose end is long past.
    pub(crate) async fn delete_old_etcd_tokens(&self) -> Result<(), StoreError> {
        sqlx::query(
            "DELETE FROM etcd_tokens WHERE uuid IN (SELECT uuid FROM etcd_tokens
                 WHERE expires_us < (SELECT now_us() OFFSET 0) - $1 LIMIT $2)",
        )
        .bind(KEPT_US)
        .bind(DELETED_AT_ONCE)
        .execute(&mut *self.acquire().await?)
        .await?;
        Ok(())
    }
}

async fn read(
    connection: &mut PgConnection,
    id: &GrantId,
) -> Result<Option<StoredEtcdToken>, StoreError> {
    let sql = format!("SELECT {TOKEN} WHERE t.id = $1");
    let row: Option<TokenRow> =
        sqlx::query_as(AssertSqlSafe(sql)).bind(id.to_string()).fetch_optional(connection).await?;
    row.map(TokenRow::parse).transpose()
}

/// Writes all members of the token, because the list is short and seldom changes.
async fn save(connection: &mut PgConnection, token: &StoredEtcdToken) -> Result<(), StoreError> {
    let registry = &token.registry;
    sqlx::query("DELETE FROM etcd_members WHERE token = $1")
        .bind(token.uuid)
        .execute(&mut *connection)
        .await?;
    for member in &registry.members {
        sqlx::query(
            "INSERT INTO etcd_members (token, member_id, value, address, created_index, lease_us,
                 lapsed, at_us) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        )
        .bind(token.uuid)
        .bind(&member.id.as_bytes()[..])
        .bind(&member.value)
        .bind(member.address.to_string())
        .bind(number_to_row(member.created_index)?)
        .bind(member.lease_until)
        .bind(member.has_lapsed)
        .bind(member.at_us)
        .execute(&mut *connection)
        .await?;
    }
    sqlx::query(
        "UPDATE etcd_tokens SET last_index = $2, lapse_index = $3, cluster_token = $4,
             complete_us = CASE WHEN $5 THEN now_us() END WHERE uuid = $1",
    )
    .bind(token.uuid)
    .bind(number_to_row(registry.last_index)?)
    .bind(number_to_row(registry.lapse_index)?)
    .bind(registry.cluster_token.as_ref().map(|token| token.0.to_vec()))
    .bind(registry.is_complete)
    .execute(connection)
    .await?;
    Ok(())
}

async fn append_service_event(
    connection: &mut PgConnection,
    at_us: UnixMicros,
    kind: &str,
    body: &Value,
) -> Result<(), StoreError> {
    let at = discovery_formation::UnixMicros(at_us.unsigned_abs());
    append_event(connection, Uuid::nil(), at, kind, body).await
}

/// Wakes the requests that wait for the token's members, in every process.
async fn notify(connection: &mut PgConnection, token: Uuid) -> Result<(), StoreError> {
    sqlx::query("SELECT pg_notify($1, $2)")
        .bind(CHANNEL)
        .bind(token.to_string())
        .execute(connection)
        .await?;
    Ok(())
}
