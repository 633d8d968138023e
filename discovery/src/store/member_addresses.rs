//! Queries on addresses of members that moved.

use discovery_types::key::PublicKey;
use uuid::Uuid;

use super::{Store, StoreError};
use crate::domain::number_to_row;

impl Store {
    /// Stores an agent's address statement, unless the stored statement has a higher number. With
    /// an equal number, the new statement replaces the stored one.
    pub(crate) async fn put_member_address(
        &self,
        cluster: Uuid,
        agent: &PublicKey,
        number: u64,
        statement: &str,
    ) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO member_addresses AS m (cluster_id, agent_key, number, statement)
             VALUES ($1, $2, $3, $4)
             ON CONFLICT (cluster_id, agent_key) DO UPDATE
                 SET number = excluded.number, statement = excluded.statement
                 WHERE m.number < excluded.number
                     OR m.number = excluded.number AND m.statement <> excluded.statement",
        )
        .bind(cluster)
        .bind(&agent.as_bytes()[..])
        .bind(number_to_row(number)?)
        .bind(statement)
        .execute(&mut *self.acquire().await?)
        .await?;
        Ok(())
    }

    /// Returns the newest address statement of each agent in `agents`, as far as there is one.
    pub(crate) async fn member_addresses(
        &self,
        cluster: Uuid,
        agents: &[PublicKey],
    ) -> Result<Vec<String>, StoreError> {
        let keys: Vec<&[u8]> = agents.iter().map(|key| &key.as_bytes()[..]).collect();
        let found = sqlx::query_scalar(
            "SELECT statement FROM member_addresses
             WHERE cluster_id = $1 AND agent_key = ANY($2) ORDER BY agent_key",
        )
        .bind(cluster)
        .bind(keys)
        .fetch_all(&mut *self.acquire().await?)
        .await?;
        Ok(found)
    }
}
