//! The sweep: does what is due in all clusters, even if nobody polls them.

use std::time::Duration;

use discovery_formation::service::EndCause;
use discovery_types::access::MAX_ASSERTION_SECONDS;
use discovery_types::api::SILENT_AFTER;
use discovery_types::problem::Code;
use uuid::Uuid;

use super::ClusterRequest;
use crate::app::App;
use crate::error::ApiError;
use crate::ledger::Occasion;
use crate::store::clusters::FormingPosition;
use crate::store::counts::SilentMembersCount;

/// Number of failed clusters at which a sweep ends. The next sweep does the rest.
const STUCK_MAX: usize = 1_000;
const MICROS_PER_SECOND: i64 = 1_000_000;
/// Maximum number of batches in one step of the count of silent members. A service with more
/// clusters needs several steps for a count.
const SILENT_BATCHES: usize = 100;
/// How long the database's clock must have run without a jump before expired rows are deleted. It
/// is longer than an assertion lives.
const MIN_STEADY_FOR_DELETION: Duration = Duration::from_secs(2 * MAX_ASSERTION_SECONDS);

impl App {
    /// Abandons a cluster that hasn't committed. This works even if its rows are so damaged that
    /// nothing else can be done with it.
    pub(crate) async fn abandon(&self, cluster: Uuid, by: String) -> Result<(), ApiError> {
        match self.apply(cluster, ClusterRequest::Abandon { by: by.clone() }).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_damage() => {
                let generation = self.store.refresh_generation().await?;
                let is_complete = self.store.watch().is_complete(generation.number.unsigned_abs());
                if self.store.ledger().contains(cluster) || !generation.settled || !is_complete {
                    return Err(error);
                }
                match self.store.abandon_unread(cluster, EndCause::Abandon, &by).await? {
                    true => Ok(()),
                    false => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Applies a tick (the event that time has passed) to each cluster that is still marked as
    /// unsettled, after the database was settled. If that fails for a cluster, its next request
    /// clears the mark.
    pub(crate) async fn settle_clusters(&self) -> Result<(), ApiError> {
        let mut position = FormingPosition::START;
        loop {
            let batch = self.store.unsettled_clusters(&mut position).await?;
            if batch.is_empty() {
                return Ok(());
            }
            self.tick_clusters(batch).await;
        }
    }

    /// Applies a tick (the event that time has passed) to every forming cluster if the database's
    /// clock was set back. Each cluster's stored next deadline comes from the clock that was ahead,
    /// so it is too late. If a tick fails, the next sweep applies all of them again.
    async fn correct_deadlines(&self) -> Result<(), ApiError> {
        if !self.clock.take_was_set_back() {
            return Ok(());
        }
        let ticked = self.tick_forming_clusters().await;
        if !matches!(ticked, Ok(true)) {
            self.clock.restore_was_set_back();
        }
        ticked.map(drop)
    }

    /// Applies a tick (the event that time has passed) to every forming cluster. Returns what
    /// [`App::tick_clusters`] returns.
    async fn tick_forming_clusters(&self) -> Result<bool, ApiError> {
        let mut position = FormingPosition::START;
        let mut is_complete = true;
        loop {
            let batch = self.store.forming_clusters(&mut position).await?;
            if batch.is_empty() {
                return Ok(is_complete);
            }
            is_complete &= self.tick_clusters(batch).await;
        }
    }

    /// Applies a tick (the event that time has passed) to each cluster. Returns `false` if another
    /// try may help a cluster whose tick failed. Another try doesn't help a cluster whose rows this
    /// program can't read.
    async fn tick_clusters(&self, clusters: Vec<Uuid>) -> bool {
        let mut is_complete = true;
        for cluster in clusters {
            if let Err(error) = self.apply(cluster, ClusterRequest::Tick).await {
                tracing::warn!(cluster.id = %cluster, %error, "can't look after a cluster");
                is_complete &= error.is_damage() || error.is_newer_data();
            }
        }
        is_complete
    }

    /// Copies other processes' decisions and the admin chain into this process's ledger.
    pub(crate) async fn copy_new_decisions(&self) -> Result<(), ApiError> {
        self.store.copy_new_decisions().await?;
        self.admins.current().await?;
        self.metrics.ledger_entries.set(self.store.ledger().commits() as i64);
        Ok(())
    }

    /// Counts the clusters by state for the metrics, and shows the age of the oldest forming one.
    pub(crate) async fn count_clusters(&self) -> Result<(), ApiError> {
        let counts = self.store.count_clusters().await?;
        for (state, number) in counts.by_state {
            self.metrics.set_clusters(state, number);
        }
        let age_us = counts.oldest_forming_age_us.unwrap_or(0);
        self.metrics.forming_oldest.set(age_us / MICROS_PER_SECOND);
        Ok(())
    }

    /// Continues the count of silent members by at most [`SILENT_BATCHES`] batches. Sets the metric
    /// once all clusters are counted. For a while after agents could not report to this process, no
    /// member counts as silent. Then the count begins anew, and the metric keeps its value.
    pub(crate) async fn count_silent_members(
        &self,
        count: &mut SilentMembersCount,
    ) -> Result<(), ApiError> {
        if self.clock.listening_for() <= SILENT_AFTER {
            *count = SilentMembersCount::default();
            return Ok(());
        }
        for _ in 0..SILENT_BATCHES {
            if let Some(number) = self.store.count_silent_members(count).await? {
                self.metrics.silent_members.set(number);
                break;
            }
        }
        Ok(())
    }

    /// Runs one sweep: checks the database, then handles every cluster that is due.
    pub(crate) async fn sweep(&self) -> Result<(), ApiError> {
        self.store.look_at_database(Occasion::Sweep).await?;
        let generation = self.store.refresh_generation().await?;
        self.metrics.settled.set(i64::from(generation.settled));
        self.metrics.generation.set(generation.number);
        self.copy_new_decisions().await?;
        self.restore_admins().await?;
        self.clock.set(self.store.now().await?);
        self.correct_deadlines().await?;
        if !self.store.watch().is_complete(generation.number.unsigned_abs()) {
            // No cluster can be handled: an incomplete ledger allows no decision. Another task
            // fills the ledger.
            return Ok(());
        }
        // Skip clusters that fail, so that they don't hold up the others.
        let mut stuck = Vec::new();
        while stuck.len() < STUCK_MAX {
            let mut due = self.store.due_clusters(&stuck).await?;
            if due.is_empty() {
                break;
            }
            let postponed = self.store.postpone_deadlines(&due, self.settings.lease).await?;
            due.retain(|cluster| postponed.iter().all(|(later, _)| later != cluster));
            for cluster in due {
                match self.apply(cluster, ClusterRequest::Tick).await {
                    Ok(_) => {}
                    Err(error) if error.problem().code == Code::DatabaseUnavailable => {
                        return Err(error);
                    }
                    Err(error) => {
                        tracing::error!(cluster.id = %cluster, %error, "can't look after a cluster");
                        stuck.push(cluster);
                    }
                }
            }
        }
        // Delete expired rows only if the clock has been steady. If it was set ahead and is set
        // back later, a used assertion that was deleted meanwhile could be used again.
        if self.clock.steady_for() >= MIN_STEADY_FOR_DELETION {
            self.store.delete_expired().await?;
            self.store.delete_old_etcd_tokens().await?;
            self.store.delete_expired_console_rows().await?;
        }
        self.metrics.note_sweep();
        Ok(())
    }
}
