//! What is due in all clusters, whoever asks for them.

use discovery_formation::service::EndCause;
use discovery_types::problem::Code;
use uuid::Uuid;

use super::Incoming;
use crate::app::App;
use crate::error::ApiError;
use crate::ledger::Occasion;

/// Clusters that one sweep may find beyond help before it leaves the rest to the next.
const STUCK_MAX: usize = 1_000;

impl App {
    /// Gives up a cluster that hasn't committed; also one whose rows somebody damaged so that
    /// nothing else can be done with it.
    pub(crate) async fn abandon(&self, cluster: Uuid, by: String) -> Result<(), ApiError> {
        match self.apply(cluster, Incoming::Abandon { by: by.clone() }, None).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_damage() => {
                let generation = self.store.look_at_generation().await?;
                let is_complete = self.store.watch().is_complete(generation.number.unsigned_abs());
                if self.store.ledger().entry(cluster).is_some()
                    || !generation.settled
                    || !is_complete
                {
                    return Err(error);
                }
                match self.store.give_up(cluster, EndCause::Abandon, &by).await? {
                    true => Ok(()),
                    false => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Tells the clusters that waited for it that the database is settled. One that can't be told
    /// is told by whoever asks for it next.
    pub(crate) async fn settle_clusters(&self) -> Result<(), ApiError> {
        let mut after = Uuid::nil();
        loop {
            let batch = self.store.unsettled(after).await?;
            let Some(last) = batch.last() else { return Ok(()) };
            after = *last;
            self.look_after(batch).await;
        }
    }

    /// The clock that clusters were stored by was ahead, and so is the time at which the sweep would
    /// look at them.
    async fn take_back_stored_times(&self) -> Result<(), ApiError> {
        let mut after = Uuid::nil();
        loop {
            let batch = self.store.forming(after).await?;
            let Some(last) = batch.last() else { return Ok(()) };
            after = *last;
            self.look_after(batch).await;
        }
    }

    async fn look_after(&self, clusters: Vec<Uuid>) {
        for cluster in clusters {
            if let Err(error) = self.apply(cluster, Incoming::Tick, None).await {
                tracing::warn!(cluster.id = %cluster, %error, "can't look after a cluster");
            }
        }
    }

    /// Copies what other processes have decided, and the admin chain, into this one's ledger.
    pub(crate) async fn copy_news(&self) -> Result<(), ApiError> {
        self.store.copy_news().await?;
        self.admins.current(self).await?;
        self.metrics.ledger_entries.set(self.store.ledger().commits() as i64);
        Ok(())
    }

    /// The sweep: looks at the database, then at what is due in its clusters.
    pub(crate) async fn sweep(&self) -> Result<(), ApiError> {
        self.store.look_again(Occasion::Sweep).await?;
        let generation = self.store.look_at_generation().await?;
        self.metrics.settled.set(i64::from(generation.settled));
        self.metrics.generation.set(generation.number);
        self.copy_news().await?;
        self.put_admins_back().await?;
        self.clock.set(self.store.now().await?);
        if self.clock.take_went_back() {
            self.take_back_stored_times().await?;
        }
        if !self.store.watch().is_complete(generation.number.unsigned_abs()) {
            // Nothing could be decided that is due; the task that fills the ledger goes on.
            return Ok(());
        }
        // One that can't be looked after keeps nobody else waiting.
        let mut stuck = Vec::new();
        while stuck.len() < STUCK_MAX {
            let due = self.store.due(&stuck).await?;
            if due.is_empty() {
                break;
            }
            for cluster in due {
                match self.apply(cluster, Incoming::Tick, None).await {
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
        self.store.clear_out().await?;
        Ok(())
    }
}
