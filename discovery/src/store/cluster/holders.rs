//! Finds the cluster of an agent's key. A row alone proves nothing, because an intruder in the
//! database can insert one. The agent and its token's key must have signed the texts in the row. An
//! issuer of the cluster must have signed the token's grant.

use discovery_types::jws::{Jws, JwsType};
use discovery_types::key::PublicKey;
use discovery_types::redeem::Redeem;
use uuid::Uuid;

use super::super::{Store, StoreError};
use super::load::Trust;

/// Maximum number of rows of one key that are looked at, newest first. An honest key has one.
const MAX_ROWS_OF_KEY: i64 = 16;

/// Cluster of an agent's key, and rows that were ignored because a signature in them isn't valid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AgentCluster {
    /// The newest cluster that the key belongs to.
    pub cluster: Option<Uuid>,
    /// Clusters of newer rows that were ignored because a signature in them isn't valid.
    pub forged: Vec<Uuid>,
}

/// A row that names an agent's key: the row of a seat, or of a redeemed ticket.
#[derive(Debug, sqlx::FromRow)]
struct HolderRow {
    cluster_id: Uuid,
    /// The agent's record. `None` in a ticket's row.
    record: Option<String>,
    /// The token's endorsement of the record. `None` in a ticket's row.
    endorsement: Option<String>,
    /// Redeem envelope, which contains the record and the endorsement. `None` in a seat's row.
    redeem: Option<String>,
    grant_jws: String,
    statements: Vec<String>,
}

impl Store {
    /// Returns the cluster that an agent's key belongs to. If the key belongs to several clusters,
    /// returns the newest one. Rows whose signatures aren't valid don't count.
    pub(crate) async fn cluster_of_agent(
        &self,
        key: &PublicKey,
    ) -> Result<AgentCluster, StoreError> {
        let rows: Vec<HolderRow> = sqlx::query_as(
            "SELECT cluster_id, record, endorsement, redeem, grant_jws,
                 ARRAY(SELECT jws FROM statements s WHERE s.cluster_id = known.cluster_id
                     ORDER BY sequence) AS statements
             FROM (
                 SELECT a.cluster_id, a.redeemed_us AS at_us, a.record,
                     a.token_record AS endorsement, NULL AS redeem, g.jws AS grant_jws
                 FROM agents a JOIN grants g ON g.id = a.grant_id WHERE a.key = $1
                 UNION ALL
                 SELECT cluster_id, made_us, NULL, NULL, redeem, authority
                 FROM intents WHERE agent_key = $1) known
             ORDER BY at_us DESC LIMIT $2",
        )
        .bind(&key.as_bytes()[..])
        .bind(MAX_ROWS_OF_KEY)
        .fetch_all(&mut *self.acquire().await?)
        .await?;
        let mut found = AgentCluster::default();
        for row in rows {
            match self.verify_holder(&row, key) {
                Ok(()) => {
                    found.cluster = Some(row.cluster_id);
                    break;
                }
                Err(StoreError::Damaged { .. }) => found.forged.push(row.cluster_id),
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Verifies that an agent with this key was let into the row's cluster by a token.
    fn verify_holder(&self, row: &HolderRow, key: &PublicKey) -> Result<(), StoreError> {
        let cluster = row.cluster_id;
        let damaged = || StoreError::damaged(format!("an agent's row of cluster {cluster}"));
        let (record, endorsement) = match (&row.record, &row.endorsement, &row.redeem) {
            (Some(record), Some(endorsement), _) => (record.clone(), endorsement.clone()),
            (_, _, Some(redeem)) => {
                let redeem: Jws = redeem.parse().map_err(|_| damaged())?;
                let redeem: Redeem = redeem
                    .verify(JwsType::Redeem, key)
                    .map_err(|error| StoreError::unreadable(&error, damaged))?;
                (redeem.signed.record.to_string(), redeem.signed.endorsement.to_string())
            }
            _ => return Err(damaged()),
        };
        let chain = self.caches.chain(cluster, &row.statements)?;
        let grant = self.caches.grant(&row.grant_jws, &chain, Trust::Verify)?;
        let record = self.caches.stored_record(&record, &endorsement, &grant.key, Trust::Verify)?;
        let is_own = record.key.0 == *key.as_bytes()
            && record.cluster.0 == cluster.as_u128()
            && grant.cluster == cluster;
        if is_own { Ok(()) } else { Err(damaged()) }
    }
}
