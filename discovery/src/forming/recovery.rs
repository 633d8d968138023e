//! Putting this process's ledger back into a database that has changed, and accepting one.

use std::sync::Arc;

use data_encoding::BASE64;
use discovery_formation::service::EndCause;
use discovery_types::api::AcceptResponse;
use discovery_types::jws::Jws;
use discovery_types::problem::Code;
use discovery_types::statement::StatementChain;
use uuid::Uuid;

use super::{Forming, Incoming};
use crate::error::ApiError;
use crate::ledger;
use crate::store::StoreError;
use crate::store::cluster::AuthorityRow;

/// Clusters that one sweep may find beyond help before it leaves the rest to the next.
const STUCK_MAX: usize = 1_000;

impl Forming {
    /// If the database is unsettled and this process hasn't put its ledger back into it: does so.
    /// Returns how many commits it put back. Every step can be repeated.
    pub async fn put_ledger_back(&self) -> Result<u64, ApiError> {
        let generation = self.store.look_at_generation().await?;
        let own = self.store.ledger().process();
        if generation.settled || !generation.missing.contains(&own) {
            return Ok(0);
        }
        self.put_admins_back().await?;
        let restored = self.put_commits_back().await?;
        tracing::info!(generation = generation.number, restored, "the ledger is back");
        if !self.store.ledger_is_back(generation.number).await? {
            tracing::warn!("other processes have yet to put their ledgers back");
        }
        Ok(restored)
    }

    async fn put_commits_back(&self) -> Result<u64, ApiError> {
        let mut restored = 0;
        for commit in self.store.ledger().commits() {
            if self.store.has_commit(&commit).await? {
                continue;
            }
            let mut put = self.put_commit_back(&commit).await;
            if put.as_ref().is_err_and(|error| error.problem().code == Code::Conflict) {
                // Somebody took its name at this very moment.
                put = self.put_commit_back(&commit).await;
            }
            match put {
                Ok(()) => restored += 1,
                Err(error) if error.problem().retryable => return Err(error),
                Err(error) => self.refuse_commit(&commit, &error).await?,
            }
        }
        Ok(restored)
    }

    /// A commit that can't be put back, now or ever: its cluster forms no other list here either,
    /// and the commit isn't waited for again.
    async fn refuse_commit(
        &self,
        commit: &ledger::Commit,
        error: &ApiError,
    ) -> Result<(), ApiError> {
        self.metrics.alarm("ledger_entry_refused");
        let id = commit.cluster_id;
        tracing::error!(cluster.id = %id, %error, "a commit of the ledger can't be put back");
        let by = "a commit of it stands in a ledger and can't be put back";
        self.store.give_up(id, EndCause::DatabaseAccepted, by).await?;
        self.store.note_refused(commit, &error.to_string()).await?;
        Ok(())
    }

    /// Admin elements that the ledger has and the database lacks. Rows that contradict it are left
    /// alone: this process doesn't follow them.
    async fn put_admins_back(&self) -> Result<(), ApiError> {
        let known = self.store.ledger().admins();
        let there = self.store.admin_elements().await?;
        if there.len() >= known.len() {
            return Ok(());
        }
        if !known.starts_with(&there) {
            self.metrics.alarm("admin_rows_contradict_the_ledger");
            tracing::error!("rows in admin_elements are not those that the ledger has seen");
            return Ok(());
        }
        for (sequence, text) in (1..).zip(&known).skip(there.len()) {
            let damaged = |_| StoreError::damaged("an admin element in the ledger");
            let jws: Jws = text.parse().map_err(damaged)?;
            self.store.put_admin_element(sequence, &jws, "the ledger").await?;
            tracing::warn!(sequence, "an admin element that the database had lost is back");
        }
        Ok(())
    }

    /// Gives up a cluster that hasn't committed; also one whose rows somebody damaged so that
    /// nothing else can be done with it.
    pub async fn abandon(&self, cluster: Uuid, by: String) -> Result<(), ApiError> {
        match self.apply(cluster, Incoming::Abandon { by: by.clone() }, None).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_damage() => {
                if self.store.ledger().committed(cluster).is_some()
                    || !self.store.look_at_generation().await?.settled
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

    async fn put_commit_back(&self, commit: &Arc<ledger::Commit>) -> Result<(), ApiError> {
        let damaged = |what: &str| {
            StoreError::damaged(format!("{what} of cluster {} in the ledger", commit.cluster_id))
        };
        let statements: Vec<Jws> = commit
            .statements
            .iter()
            .map(|text| text.parse().map_err(|_| damaged("a statement")))
            .collect::<Result<_, _>>()?;
        let chain = StatementChain::verify_links(&statements)?;
        let authority = |of: &ledger::Authority| -> Result<AuthorityRow, StoreError> {
            let decode = |text: &str| BASE64.decode(text.as_bytes()).map_err(|_| damaged("a CA"));
            let wrapped_key = of.wrapped_key.as_deref().map(decode).transpose()?;
            Ok(AuthorityRow { certificate: decode(&of.certificate)?, wrapped_key })
        };
        let (peer, client) = (authority(&commit.peer_ca)?, authority(&commit.client_ca)?);
        self.store.put_cluster_back(&statements, chain.newest(), [&peer, &client]).await?;
        let document: Jws = commit.document.parse().map_err(|_| damaged("the document"))?;
        self.apply(commit.cluster_id, Incoming::Adopt { document, statements }, None).await?;
        Ok(())
    }

    /// An owner takes the database as it is: what the own ledger holds goes back first, then every
    /// cluster that isn't committed is abandoned, every token revoked, and the gate opens.
    pub async fn accept_database(
        &self,
        system_identifier: Option<&str>,
        by: &str,
    ) -> Result<AcceptResponse, ApiError> {
        let server = self.store.server().await?;
        if system_identifier.is_some_and(|expected| expected != server.system_identifier) {
            return Err(ApiError::new(
                Code::Conflict,
                format!("The database's system identifier is {}.", server.system_identifier),
                "Look which database this is before you accept it.",
            ));
        }
        let generation = self.store.look_at_generation().await?;
        if generation.settled {
            return Err(ApiError::new(
                Code::WrongState,
                "The database is settled: there is nothing to accept.",
                "Nothing needs to be done.",
            ));
        }
        let restored_commits = self.put_commits_back().await?;
        let mut abandoned = Vec::new();
        let mut after = Uuid::nil();
        loop {
            let batch = self.store.forming(after).await?;
            let Some(last) = batch.last() else { break };
            after = *last;
            for cluster in batch {
                let event = Incoming::DatabaseAccepted { by: by.to_owned() };
                match self.apply(cluster, event, None).await {
                    Ok(_) => {}
                    Err(error) if error.is_damage() => {
                        tracing::error!(cluster.id = %cluster, %error, "abandoned unread");
                        self.store.give_up(cluster, EndCause::DatabaseAccepted, by).await?;
                    }
                    Err(error) => return Err(error),
                }
                abandoned.push(cluster);
            }
        }
        let revoked = self.store.accept_generation(generation.number, by).await?;
        let revoked_tokens = revoked.ok_or_else(|| {
            let next = "Look at `muster-discovery process list`, and decide anew.";
            ApiError::new(Code::Conflict, "The database has changed once more.", next)
        })?;
        self.wakes.wake_all();
        Ok(AcceptResponse {
            system_identifier: server.system_identifier,
            timeline: server.timeline,
            abandoned,
            revoked_tokens,
            restored_commits,
        })
    }

    /// Tells the clusters that waited for it that the database is settled. One that can't be told
    /// is told by whoever asks for it next.
    pub async fn settle_clusters(&self) -> Result<(), ApiError> {
        let mut after = Uuid::nil();
        loop {
            let batch = self.store.unsettled(after).await?;
            let Some(last) = batch.last() else { return Ok(()) };
            after = *last;
            for cluster in batch {
                if let Err(error) = self.apply(cluster, Incoming::Tick, None).await {
                    tracing::warn!(cluster.id = %cluster, %error, "can't look after a cluster");
                }
            }
        }
    }

    /// What is due, in all clusters: the sweep.
    pub async fn sweep(&self) -> Result<(), ApiError> {
        let generation = self.store.look_at_generation().await?;
        self.metrics.settled.set(i64::from(generation.settled));
        self.metrics.generation.set(generation.number);
        self.metrics.ledger_entries.set(self.store.ledger().len() as i64);
        self.store.compare_again().await?;
        self.put_admins_back().await?;
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
