//! Transactions on several clusters.

use std::collections::BTreeMap;

use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use super::super::{Store, StoreError, Transaction};
use super::load::{self, LoadParameters, Trust};
use super::{LoadedCluster, save};

/// Several clusters, and the transaction that locks their rows.
pub(crate) struct BatchTransaction {
    transaction: Transaction,
    /// The clusters by id. Clusters that another transaction had locked are missing, and so are
    /// clusters that can't be read.
    pub clusters: BTreeMap<Uuid, LoadedCluster>,
}

impl Store {
    /// Locks and loads the clusters `ids`, and the grants with the ids `requested_grants`. Skips
    /// clusters that another transaction has locked.
    pub(crate) async fn begin_batch(
        &self,
        ids: &[Uuid],
        requested_grants: &[String],
    ) -> Result<BatchTransaction, StoreError> {
        // Read the ledger, then lock the clusters, then read their rows. `begin_with` explains this
        // order.
        let known = self.ledger.known();
        let list: Vec<String> = ids.iter().map(|id| format!("'{id}'")).collect();
        let locked = format!(
            "BEGIN; SELECT id FROM clusters WHERE id IN ({}) FOR UPDATE SKIP LOCKED",
            list.join(", ")
        );
        let (mut transaction, locked) = self.begin_and_fetch(AssertSqlSafe(locked)).await?;
        let locked = locked.iter().map(|row| row.try_get(0)).collect::<Result<Vec<Uuid>, _>>()?;
        let of = LoadParameters {
            ids: &locked,
            copied: known.map_or(0, |known| known.last_copied.number),
            requested_grants,
            process: self.ledger.process(),
            with_changes: false,
        };
        let mut clusters = BTreeMap::new();
        for rows in load::read(&mut transaction, &of).await? {
            let id = rows.id();
            match LoadedCluster::parse(&self.caches, id, rows, known, Trust::Verify) {
                Ok(loaded) => drop(clusters.insert(id, loaded)),
                Err(error) => tracing::debug!(cluster.id = %id, %error, "can't read a cluster"),
            }
        }
        Ok(BatchTransaction { transaction, clusters })
    }
}

impl BatchTransaction {
    /// Saves what [`LoadedCluster::note_step`] has noted, in one SQL statement.
    pub(crate) async fn save(&mut self) -> Result<(), StoreError> {
        let changed: Vec<&LoadedCluster> =
            self.clusters.values().filter(|cluster| cluster.unsaved.is_changed).collect();
        match changed.is_empty() {
            true => Ok(()),
            false => save::save(&mut self.transaction, &changed).await,
        }
    }

    /// Commits what was saved. After an error, it is unknown whether the changes are stored.
    pub(crate) async fn commit(self) -> Result<(), StoreError> {
        Ok(self.transaction.commit().await?)
    }
}
