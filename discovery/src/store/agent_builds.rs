//! Queries on the versions and features of members' agents.

use discovery_types::features::AgentBuild;
use discovery_types::key::PublicKey;
use uuid::Uuid;

use super::{Store, StoreError};

impl Store {
    /// Stores the build of an agent, in place of the one that it reported before.
    pub(crate) async fn note_agent_build(
        &self,
        cluster: Uuid,
        agent: &PublicKey,
        build: &AgentBuild,
    ) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO agent_builds AS b (cluster_id, agent_key, version, features)
             VALUES ($1, $2, $3, $4)
             ON CONFLICT (cluster_id, agent_key) DO UPDATE
                 SET version = excluded.version, features = excluded.features
                 WHERE (b.version, b.features)
                     IS DISTINCT FROM (excluded.version, excluded.features)",
        )
        .bind(cluster)
        .bind(&agent.as_bytes()[..])
        .bind(&build.version)
        .bind(&build.features)
        .execute(&mut *self.acquire().await?)
        .await?;
        Ok(())
    }

    /// Returns the builds that the agents of a cluster have reported.
    pub(crate) async fn agent_builds(
        &self,
        cluster: Uuid,
    ) -> Result<Vec<(PublicKey, AgentBuild)>, StoreError> {
        let rows: Vec<(Vec<u8>, String, Vec<String>)> = sqlx::query_as(
            "SELECT agent_key, version, features FROM agent_builds WHERE cluster_id = $1",
        )
        .bind(cluster)
        .fetch_all(&mut *self.acquire().await?)
        .await?;
        let agent = |(key, version, features): (Vec<u8>, String, Vec<String>)| {
            let build = AgentBuild { version, features };
            let key = PublicKey::from_bytes(key.try_into().ok()?);
            build.is_valid().then_some((key, build))
        };
        Ok(rows.into_iter().filter_map(agent).collect())
    }
}
