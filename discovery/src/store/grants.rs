//! Queries on grants: insert a grant, read one, list the newest.

use discovery_formation as formation;
use discovery_types::api::Redemption;
use discovery_types::digest::{MemberId, OperationId};
use discovery_types::grant::{TokenKind, VerifiedGrant};
use discovery_types::jws::{Jws, JwsType};
use discovery_types::key::PublicKey;
use discovery_types::record::Record;
use discovery_types::redeem::Redeem;
use sqlx::PgConnection;
use uuid::Uuid;

use super::cluster::GrantRow;
use super::{ListPosition, Store, StoreError, UnixMicros};
use crate::domain::number_to_row;

/// A grant and its use so far.
#[derive(Clone, Debug, sqlx::FromRow)]
pub(crate) struct GrantUse {
    /// Row of the grant.
    #[sqlx(flatten)]
    pub grant: GrantRow,
    /// Name of the admin who stored the grant.
    pub issued_by: String,
    /// Number of different keys that have used the grant.
    pub keys: i64,
    /// Name of the grant's cluster.
    pub cluster_name: String,
    /// Phase of the grant's cluster.
    pub phase: String,
    /// Tokens issued before this time are void.
    pub void_before_us: UnixMicros,
}

/// A host that redeemed a token: a row of `agents`, or of `intents`.
#[derive(Clone, Debug, sqlx::FromRow)]
pub(crate) struct RedemptionRow {
    /// Id of the token's grant.
    pub grant_id: String,
    agent_key: Vec<u8>,
    /// Record of a host that asked for a seat.
    record: Option<String>,
    /// Redeem envelope of a host that joins a running cluster; the record is in it.
    redeem: Option<String>,
    address: Option<String>,
    instance: Option<String>,
    at_us: UnixMicros,
    seat: Option<i16>,
    state: Option<String>,
    operation: Option<Vec<u8>>,
    member_id: Option<Vec<u8>>,
}

impl RedemptionRow {
    /// Parses the row, without the host's certificates. Returns `None` if the row is damaged.
    pub(crate) fn parse(self) -> Option<Redemption> {
        let record: Jws = match (self.record, self.redeem) {
            (Some(record), _) => record.parse().ok()?,
            (None, redeem) => {
                let redeem: Jws = redeem?.parse().ok()?;
                redeem.claims_unverified::<Redeem>(JwsType::Redeem).ok()?.signed.record
            }
        };
        let record: Record = record.claims_unverified(JwsType::Record).ok()?;
        let change = |state: String| serde_json::from_value(serde_json::Value::from(state)).ok();
        Some(Redemption {
            name: record.name,
            agent: PublicKey::from_bytes(self.agent_key.try_into().ok()?).key_id(),
            address: self.address,
            instance: self.instance,
            zone: record.zone,
            at_ms: self.at_us / 1_000,
            seat: self.seat.and_then(|seat| u8::try_from(seat).ok()),
            change: self.state.and_then(change),
            operation: self.operation.and_then(|id| id.try_into().ok()).map(OperationId),
            member: self.member_id.and_then(|id| id.try_into().ok()).map(MemberId),
            certificates: Vec::new(),
        })
    }
}

/// Inserts a verified grant. Returns `false` if it was stored already.
pub(crate) async fn insert(
    connection: &mut PgConnection,
    grant: &VerifiedGrant,
    by: &str,
    now: formation::UnixMicros,
) -> Result<bool, StoreError> {
    let inserted = sqlx::query(
        "INSERT INTO grants (id, cluster_id, kind, hash, token_key, jws, uses, expires_us,
             issued_by, stored_us)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) ON CONFLICT (hash) DO NOTHING",
    )
    .bind(grant.id.to_string())
    .bind(grant.cluster)
    .bind(grant.kind.as_str())
    .bind(&grant.jws().hash().0[..])
    .bind(&grant.key.as_bytes()[..])
    .bind(grant.jws().as_str())
    .bind(i32::from(grant.uses))
    .bind(number_to_row(grant.expires_at.saturating_mul(1_000_000))?)
    .bind(by)
    .bind(number_to_row(now.0)?)
    .execute(connection)
    .await?;
    Ok(inserted.rows_affected() == 1)
}

/// Columns and tables of a [`GrantUse`].
const GRANT_USE: &str = "
    g.id, g.cluster_id, g.kind, g.jws, g.stored_us, g.revoked_us, g.confirmation, g.issued_by, c.phase, c.name AS cluster_name,
    (SELECT count(*) FROM agents a WHERE a.grant_id = g.id)
        + (SELECT count(*) FROM intents i WHERE i.grant_id = g.id) AS keys,
    (SELECT void_before_us FROM generation) AS void_before_us
FROM grants g JOIN clusters c ON c.id = g.cluster_id";

impl Store {
    /// Stores a grant. Storing the same grant again changes nothing.
    pub(crate) async fn put_grant(
        &self,
        grant: &VerifiedGrant,
        by: &str,
        now: formation::UnixMicros,
    ) -> Result<(), StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        if insert(&mut transaction, grant, by, now).await? {
            let body = serde_json::json!({ "grant": grant.id.to_string(), "by": by });
            // The lock on the cluster serialises writers of its event chain.
            sqlx::query("SELECT id FROM clusters WHERE id = $1 FOR UPDATE")
                .bind(grant.cluster)
                .execute(&mut *transaction)
                .await?;
            super::cluster::append_event(&mut transaction, grant.cluster, now, "granted", &body)
                .await?;
            if grant.kind == TokenKind::Heal {
                // The cluster's agents wait until its change counter differs, and then fetch the
                // policy.
                super::intents::increment_revision(&mut transaction, grant.cluster).await?;
            }
        }
        transaction.commit().await?;
        Ok(())
    }

    /// Stores the confirmation of a grant that isn't revoked, in place of an earlier one. Returns
    /// `false` if the grant is revoked.
    pub(crate) async fn confirm_grant(
        &self,
        grant: &VerifiedGrant,
        confirmation: &Jws,
        by: &str,
        now: formation::UnixMicros,
    ) -> Result<bool, StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        // The lock on the cluster serialises writers of its event chain.
        sqlx::query("SELECT id FROM clusters WHERE id = $1 FOR UPDATE")
            .bind(grant.cluster)
            .execute(&mut *transaction)
            .await?;
        let updated = sqlx::query(
            "UPDATE grants SET confirmation = $2 WHERE id = $1 AND revoked_us IS NULL
                 AND confirmation IS DISTINCT FROM $2",
        )
        .bind(grant.id.to_string())
        .bind(confirmation.as_str())
        .execute(&mut *transaction)
        .await?;
        if updated.rows_affected() == 1 {
            let body = serde_json::json!({ "grant": grant.id.to_string(), "by": by });
            super::cluster::append_event(
                &mut transaction,
                grant.cluster,
                now,
                "grant_confirmed",
                &body,
            )
            .await?;
        }
        let is_confirmed: bool = sqlx::query_scalar(
            "SELECT confirmation = $2 AND revoked_us IS NULL FROM grants WHERE id = $1",
        )
        .bind(grant.id.to_string())
        .bind(confirmation.as_str())
        .fetch_one(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(is_confirmed)
    }

    /// Returns one grant by id.
    pub(crate) async fn grant(&self, id: &str) -> Result<Option<GrantUse>, StoreError> {
        let row =
            sqlx::query_as(sqlx::AssertSqlSafe(format!("SELECT {GRANT_USE} WHERE g.id = $1")))
                .bind(id)
                .fetch_optional(&mut *self.acquire().await?)
                .await?;
        Ok(row)
    }

    /// Returns the hosts that have redeemed each of these tokens: for each token at most `limit`,
    /// newest first.
    pub(crate) async fn redemptions(
        &self,
        grants: &[String],
        limit: i64,
    ) -> Result<Vec<RedemptionRow>, StoreError> {
        let rows = sqlx::query_as(
            "SELECT wanted.id AS grant_id, used.* FROM unnest($1::text[]) AS wanted (id)
             CROSS JOIN LATERAL (
                 SELECT key AS agent_key, record, NULL AS redeem, address, instance,
                     redeemed_us AS at_us, seat, NULL AS state, NULL::bytea AS operation,
                     NULL::bytea AS member_id
                 FROM agents WHERE grant_id = wanted.id
                 UNION ALL
                 SELECT agent_key, NULL, redeem, address, instance, made_us, NULL, state, operation,
                     member_id
                 FROM intents WHERE grant_id = wanted.id
                 ORDER BY at_us DESC LIMIT $2) AS used
             ORDER BY used.at_us DESC",
        )
        .bind(grants)
        .bind(limit)
        .fetch_all(&mut *self.acquire().await?)
        .await?;
        Ok(rows)
    }

    /// Returns the first `limit` grants after `position` in the list, newest first. With `cluster`,
    /// they are only that cluster's grants. With `only_policies`, they are only replacement
    /// policies.
    pub(crate) async fn grants(
        &self,
        (cluster, only_policies): (Option<Uuid>, bool),
        position: &ListPosition,
        limit: i64,
    ) -> Result<Vec<GrantUse>, StoreError> {
        let of = if cluster.is_some() { "g.cluster_id = $3" } else { "$3::uuid IS NULL" };
        let kind = if only_policies { "AND g.kind = 'heal'" } else { "" };
        // The limit is a part of the SQL text: a plan for any limit would read and sort all grants.
        let sql = format!(
            "SELECT {GRANT_USE} WHERE (g.stored_us, g.id) < ($1, $2) AND {of} {kind}
             ORDER BY g.stored_us DESC, g.id DESC LIMIT {limit}"
        );
        let rows = sqlx::query_as(sqlx::AssertSqlSafe(sql))
            .bind(position.at_us)
            .bind(&position.id)
            .bind(cluster)
            .fetch_all(&mut *self.acquire().await?)
            .await?;
        Ok(rows)
    }
}
