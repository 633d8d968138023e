//! Virtual machines of hosts, as their clouds' identity documents name them.

use discovery_types::key::PublicKey;
use sqlx::PgConnection;
use uuid::Uuid;

use super::StoreError;

/// Returns the keys, other than `key`, that redeemed a token of this cluster with the identity
/// document of this virtual machine.
pub(crate) async fn other_keys(
    connection: &mut PgConnection,
    cluster: Uuid,
    instance: &str,
    key: &PublicKey,
) -> Result<Vec<PublicKey>, StoreError> {
    let rows: Vec<Vec<u8>> = sqlx::query_scalar(
        "SELECT key FROM agents WHERE cluster_id = $1 AND instance = $2 AND key <> $3
         UNION
         SELECT agent_key FROM intents WHERE cluster_id = $1 AND instance = $2 AND agent_key <> $3",
    )
    .bind(cluster)
    .bind(instance)
    .bind(&key.as_bytes()[..])
    .fetch_all(connection)
    .await?;
    let parse = |bytes: Vec<u8>| {
        let bytes: [u8; 32] = bytes.try_into().ok()?;
        Some(PublicKey::from_bytes(bytes))
    };
    let keys: Option<Vec<PublicKey>> = rows.into_iter().map(parse).collect();
    keys.ok_or_else(|| StoreError::damaged(format!("an agent's key in cluster {cluster}")))
}
