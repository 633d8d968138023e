//! Putting this process's ledger back into a database that has changed, and accepting one.

use std::sync::Arc;

use data_encoding::BASE64;
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

impl Forming {
    /// If the database is unsettled and this process hasn't put its ledger back into it: does so.
    /// Returns how many commits it put back. Every step can be repeated.
    pub async fn put_ledger_back(&self) -> Result<u64, ApiError> {
        let generation = self.store.look_at_generation().await?;
        let own = self.store.ledger().process();
        if generation.settled || !generation.missing.contains(&own) {
            return Ok(0);
        }
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
            match self.put_commit_back(&commit).await {
                Ok(()) => restored += 1,
                // Neither can come true by trying again; the cluster can't form a second time.
                Err(error) if !error.problem().retryable => {
                    self.metrics.alarm("ledger_entry_refused");
                    tracing::error!(cluster.id = %commit.cluster_id, %error,
                        "a commit of the ledger can't be put back");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(restored)
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
        if self.store.look_at_generation().await?.settled {
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
                self.apply(cluster, event, None).await?;
                abandoned.push(cluster);
            }
        }
        let revoked_tokens = self.store.accept_generation(by).await?;
        self.wakes.wake_all();
        Ok(AcceptResponse {
            system_identifier: server.system_identifier,
            timeline: server.timeline,
            abandoned,
            revoked_tokens,
            restored_commits,
        })
    }

    /// What is due, in all clusters: the sweep.
    pub async fn sweep(&self) -> Result<(), ApiError> {
        let generation = self.store.look_at_generation().await?;
        self.metrics.settled.set(i64::from(generation.settled));
        self.metrics.generation.set(generation.number);
        self.metrics.ledger_entries.set(self.store.ledger().len() as i64);
        self.store.note_position().await?;
        loop {
            let due = self.store.due().await?;
            if due.is_empty() {
                break;
            }
            let mut stuck = true;
            for cluster in due {
                match self.apply(cluster, Incoming::Tick, None).await {
                    Ok(_) => stuck = false,
                    Err(error) if error.problem().code == Code::DatabaseUnavailable => {
                        return Err(error);
                    }
                    Err(error) => {
                        tracing::error!(cluster.id = %cluster, %error, "can't look after a cluster");
                    }
                }
            }
            if stuck {
                break;
            }
        }
        self.store.clear_out().await?;
        Ok(())
    }
}
