//! Queries on members whose nodes have no leader, and on hosts that asked for a seat after the
//! cluster had formed.

use discovery_types::digest::MemberId;
use discovery_types::key::PublicKey;
use sqlx::PgConnection;
use uuid::Uuid;

use super::{Store, StoreError, UnixMicros};

/// Maximum number of hosts per cluster that are stored as asking for a seat. Those with the newest
/// requests are kept.
pub(crate) const MAX_ASKING: i64 = 16;

/// Reason why a member's node has no leader, as the member's agent reported it last.
#[derive(Clone, Debug)]
pub(crate) struct Trouble {
    pub member: MemberId,
    /// When the agent reported the reason.
    pub at_us: UnixMicros,
    /// Text of the reason, as the agent sent it.
    pub text: String,
}

/// A host that used a boot token although the cluster already has all its members.
#[derive(Clone, Debug, sqlx::FromRow)]
pub(crate) struct AskingHostRow {
    /// Public key of the host's agent.
    pub agent_key: Vec<u8>,
    /// Name that the member would have.
    pub name: String,
    /// The last source address of the host.
    pub address: String,
    /// When the host first asked for a seat.
    pub first_us: UnixMicros,
    /// When the host last asked for a seat.
    pub last_us: UnixMicros,
    /// How often the host has asked for a seat.
    pub times: i64,
}

/// Returns, for each member that has reported it, the last reason why its node has no leader.
pub(crate) async fn troubles(
    connection: &mut PgConnection,
    cluster: Uuid,
) -> Result<Vec<Trouble>, StoreError> {
    let rows: Vec<(Vec<u8>, UnixMicros, String)> = sqlx::query_as(
        "SELECT member_id, at_us, detail FROM member_troubles WHERE cluster_id = $1",
    )
    .bind(cluster)
    .fetch_all(connection)
    .await?;
    let trouble = |(member, at_us, text): (Vec<u8>, UnixMicros, String)| {
        Some(Trouble { member: MemberId(member.try_into().ok()?), at_us, text })
    };
    Ok(rows.into_iter().filter_map(trouble).collect())
}

impl Store {
    /// Returns, for each member that has reported it, the last reason why its node has no leader.
    pub(crate) async fn troubles(&self, cluster: Uuid) -> Result<Vec<Trouble>, StoreError> {
        troubles(&mut *self.acquire().await?, cluster).await
    }

    /// Stores the reason why a member's node has no leader, in place of the member's previous one.
    pub(crate) async fn note_trouble(
        &self,
        cluster: Uuid,
        member: MemberId,
        text: &str,
    ) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO member_troubles (cluster_id, member_id, at_us, detail)
             VALUES ($1, $2, now_us(), $3)
             ON CONFLICT (cluster_id, member_id) DO UPDATE SET at_us = excluded.at_us,
                 detail = excluded.detail",
        )
        .bind(cluster)
        .bind(&member.0[..])
        .bind(text)
        .execute(&mut *self.acquire().await?)
        .await?;
        Ok(())
    }

    /// Counts a request of a host that gets no seat. Returns `true` for the host's first request.
    /// Keeps only the [`MAX_ASKING`] hosts with the newest requests.
    pub(crate) async fn note_asking_host(
        &self,
        cluster: Uuid,
        key: &PublicKey,
        name: &str,
        address: &str,
    ) -> Result<bool, StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        let times: i64 = sqlx::query_scalar(
            "INSERT INTO asking_hosts (cluster_id, agent_key, name, address, first_us, last_us, times)
             VALUES ($1, $2, $3, $4, now_us(), now_us(), 1)
             ON CONFLICT (cluster_id, agent_key) DO UPDATE SET name = excluded.name,
                 address = excluded.address, last_us = excluded.last_us,
                 times = asking_hosts.times + 1
             RETURNING times",
        )
        .bind(cluster)
        .bind(key.as_bytes().to_vec())
        .bind(name)
        .bind(address)
        .fetch_one(&mut *transaction)
        .await?;
        sqlx::query(
            "DELETE FROM asking_hosts WHERE cluster_id = $1 AND agent_key NOT IN
                 (SELECT agent_key FROM asking_hosts WHERE cluster_id = $1
                  ORDER BY last_us DESC, agent_key LIMIT $2)",
        )
        .bind(cluster)
        .bind(MAX_ASKING)
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(times == 1)
    }

    /// Returns the hosts that asked for a seat and have none, starting with the newest request.
    /// Leaves out a host that redeemed a ticket after its last request.
    pub(crate) async fn asking_hosts(
        &self,
        cluster: Uuid,
    ) -> Result<Vec<AskingHostRow>, StoreError> {
        let rows = sqlx::query_as(
            "SELECT agent_key, name, address, first_us, last_us, times FROM asking_hosts a
             WHERE cluster_id = $1 AND NOT EXISTS (SELECT 1 FROM intents i
                 WHERE i.cluster_id = $1 AND i.made_us > a.last_us
                     AND (i.agent_key = a.agent_key OR i.subject = a.name))
             ORDER BY last_us DESC LIMIT $2",
        )
        .bind(cluster)
        .bind(MAX_ASKING)
        .fetch_all(&mut *self.acquire().await?)
        .await?;
        Ok(rows)
    }
}
