//! Transactions on several clusters.

use std::collections::BTreeMap;

use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use super::super::{KeptConnection, Store, StoreError, Transaction};
use super::load::{self, LoadParameters, Trust};
use super::{Authorities, LoadedCluster, NewCommit, authorities_of, copy_decisions_up_to, save};

/// Maximum number of decisions that a transaction on several clusters copies into the ledger. If
/// the ledger lacks more, each request that decides something gets a transaction of its own.
const MAX_COPIED: u64 = 256;

/// Several clusters, and the transaction that locks their rows.
pub(crate) struct BatchTransaction {
    transaction: Transaction,
    /// The clusters by id. Clusters that another transaction had locked are missing, and so are
    /// clusters that can't be read.
    pub clusters: BTreeMap<Uuid, LoadedCluster>,
}

impl Store {
    /// Locks and loads the clusters `ids`, and the grants with the ids `requested_grants`. Skips
    /// clusters that another transaction has locked. Uses the connection `kept` if it is alive.
    pub(crate) async fn begin_batch(
        &self,
        ids: &[Uuid],
        requested_grants: &[String],
        kept: Option<KeptConnection>,
    ) -> Result<BatchTransaction, StoreError> {
        // Read the ledger, then lock the clusters, then read their rows. `begin_with` explains this
        // order.
        let known = self.ledger.known();
        let list: Vec<String> = ids.iter().map(|id| format!("'{id}'")).collect();
        let locked = format!(
            "BEGIN; SELECT id FROM clusters WHERE id IN ({}) FOR UPDATE SKIP LOCKED",
            list.join(", ")
        );
        let (mut transaction, locked) = self.begin_and_fetch(AssertSqlSafe(locked), kept).await?;
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
    /// Copies decisions into the ledger that this transaction sees and the ledger lacks. Returns
    /// whether the ledger has all decisions now. Copies none if it lacks more than
    /// [`MAX_COPIED`]: all clusters of the batch are locked meanwhile.
    pub(crate) async fn copy_new_decisions(&mut self, store: &Store) -> Result<bool, StoreError> {
        // One SQL statement has read the database's state for all clusters, so it is the same for
        // each of them.
        let Some(loaded) = self.clusters.values().next() else { return Ok(true) };
        match loaded.missing_decisions() <= MAX_COPIED {
            true => copy_decisions_up_to(&mut self.transaction, store, loaded).await,
            false => Ok(false),
        }
    }

    /// Returns both CAs of each cluster, by the cluster's id. A cluster that lacks one is left out.
    pub(crate) async fn authorities(
        &mut self,
        clusters: &[Uuid],
    ) -> Result<BTreeMap<Uuid, Authorities>, StoreError> {
        authorities_of(&mut self.transaction, clusters).await
    }

    /// Saves what [`LoadedCluster::note_step`] has noted, in one SQL statement, and the decisions
    /// `commits` of these clusters in another one.
    pub(crate) async fn save(&mut self, commits: &[(Uuid, &NewCommit)]) -> Result<(), StoreError> {
        let changed: Vec<&LoadedCluster> =
            self.clusters.values().filter(|cluster| cluster.unsaved.is_changed).collect();
        let Some(now) = changed.first().map(|loaded| loaded.now) else { return Ok(()) };
        save::save(&mut self.transaction, &changed).await?;
        match commits.is_empty() {
            true => Ok(()),
            false => save::commits(&mut self.transaction, now, commits).await,
        }
    }

    /// Commits what was saved, and returns the connection. After an error, it is unknown whether
    /// the changes are stored, unless Postgres has refused them.
    pub(crate) async fn commit(self) -> Result<Option<KeptConnection>, StoreError> {
        Ok(self.transaction.commit_and_keep().await?)
    }
}
