//! Limits the time of work on clusters, and prevents such work on a database that was set back to
//! an older state.

use std::time::Duration;

use discovery_formation::memory::LedgerVerdict;
use discovery_types::problem::Code;
use uuid::Uuid;

use crate::app::App;
use crate::error::ApiError;
use crate::ledger::Occasion;
use crate::store::StoreError;
use crate::store::cluster::ClusterTransaction;

/// Time limit for applying an event or reading a cluster. It is longer than all SQL statements of
/// one event together, because Postgres ends each of them after two seconds.
const APPLY_TIMEOUT: Duration = Duration::from_secs(20);

/// Limits `work` to `APPLY_TIMEOUT`. A caller gets an error if Postgres stops responding.
pub(crate) async fn with_timeout<T>(
    work: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    let done = tokio::time::timeout(APPLY_TIMEOUT, work).await;
    done.unwrap_or_else(|_| Err(StoreError::no_answer().into()))
}

impl App {
    /// Returns an error if the database was set back to an older state. Call this right after
    /// `transaction` was begun.
    pub(crate) async fn check_not_set_back(
        &self,
        transaction: ClusterTransaction,
    ) -> Result<ClusterTransaction, ApiError> {
        if let LedgerVerdict::OlderDatabase(difference) = transaction.ledger_verdict() {
            let cluster = transaction.id();
            transaction.terminate_connection().await;
            return Err(self.report_database_change(cluster, &difference.to_string()).await);
        }
        self.clock.set(transaction.now.0 as i64);
        Ok(transaction)
    }

    /// Checks the database again, as is done for each new connection, and returns the error for the
    /// caller. If the database has changed, this process starts to restore its ledger's entries
    /// there.
    pub(crate) async fn report_database_change(&self, cluster: Uuid, why: &str) -> ApiError {
        tracing::error!(cluster.id = %cluster, why, "the database was set back");
        self.metrics.count_alarm("database_set_back");
        self.store.watch().require_full_comparison();
        if let Err(error) = self.store.look_at_database(Occasion::Doubt).await {
            return error.into();
        }
        let next = "Wait: what the discovery processes know of it is put back from their ledgers.";
        let detail = format!("The database isn't the one that this process has seen: {why}.");
        ApiError::new(Code::DatabaseChanged, detail, next)
    }
}
