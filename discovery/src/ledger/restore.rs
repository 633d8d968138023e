//! Restores the entries of this process's ledger in a database that has changed, and lets an owner
//! accept such a database.

use std::collections::BTreeMap;

use data_encoding::BASE64;
use discovery_formation::Hash;
use discovery_formation::memory::{ClusterInDatabase, LedgerEntry, RestoreAction, plan_restore};
use discovery_formation::service::{EndCause, Phase};
use discovery_types::api::AcceptResponse;
use discovery_types::jws::Jws;
use discovery_types::problem::Code;
use discovery_types::statement::StatementChain;
use sqlx::PgConnection;
use uuid::Uuid;

use super::{Authority, Commit};
use crate::app::App;
use crate::error::ApiError;
use crate::forming::ClusterRequest;
use crate::store::StoreError;
use crate::store::cluster::AuthorityRow;
use crate::store::clusters::FormingPosition;

/// Maximum number of ledger entries that one query looks up.
pub(super) const BATCH: usize = 1_000;

/// A ledger entry, compared with the database.
pub(super) struct EntryComparison {
    pub(super) cluster: Uuid,
    pub(super) entry: LedgerEntry,
    /// Action that is needed for the entry.
    pub(super) action: RestoreAction,
    /// Whether the database holds the same commit as the entry.
    pub(super) is_same_commit: bool,
}

/// Compares entries with the database, and returns the action that each one needs.
pub(super) async fn compare_with_database(
    connection: &mut PgConnection,
    entries: &[(Uuid, LedgerEntry)],
) -> Result<Vec<EntryComparison>, sqlx::Error> {
    let (ids, hashes): (Vec<Uuid>, Vec<Option<Vec<u8>>>) = entries
        .iter()
        .map(|(id, entry)| match entry {
            LedgerEntry::Commit { h, .. } => (*id, Some(h.0.to_vec())),
            LedgerEntry::End(_) => (*id, None),
        })
        .unzip();
    let rows: Vec<ClusterStateRow> = sqlx::query_as(
        "SELECT l.id, cl.phase, cl.ended_cause, c.h, cl.split_other IS NOT NULL AS split,
                r.h IS NOT NULL AS refused
         FROM unnest($1::uuid[], $2::bytea[]) AS l (id, h)
         LEFT JOIN clusters cl ON cl.id = l.id LEFT JOIN commits c ON c.cluster_id = l.id
         LEFT JOIN refused_commits r ON r.cluster_id = l.id AND r.h = l.h",
    )
    .bind(&ids)
    .bind(&hashes)
    .fetch_all(connection)
    .await?;
    let rows: BTreeMap<Uuid, ClusterStateRow> = rows.into_iter().map(|row| (row.id, row)).collect();
    let planned = |&(cluster, entry): &(Uuid, LedgerEntry)| {
        let row = rows.get(&cluster);
        let refused = row.is_some_and(|row| row.refused);
        let there = row.and_then(ClusterStateRow::in_database);
        let what = plan_restore(entry, there.as_ref(), refused);
        let commit = there.and_then(|there| there.commit);
        let is_same_commit = matches!(entry, LedgerEntry::Commit { h, .. } if commit == Some(h));
        EntryComparison { cluster, entry, action: what, is_same_commit }
    };
    Ok(entries.iter().map(planned).collect())
}

#[derive(Debug, sqlx::FromRow)]
struct ClusterStateRow {
    id: Uuid,
    phase: Option<String>,
    ended_cause: Option<String>,
    h: Option<Vec<u8>>,
    split: bool,
    refused: bool,
}

impl ClusterStateRow {
    fn in_database(&self) -> Option<ClusterInDatabase> {
        let phase = self.phase.as_deref()?;
        Some(ClusterInDatabase {
            // The type `Phase` has no value for a draft, so a draft's row gives `None`.
            phase: Phase::parse(phase),
            cause: self.ended_cause.as_deref().and_then(EndCause::parse),
            commit: self.h.as_deref().and_then(|h| h.try_into().ok()).map(Hash),
            is_split: self.split,
        })
    }
}

impl App {
    /// Restores the ledger's entries in the database, if the database is unsettled and this process
    /// is missing from its generation. Returns the number of restored commits. Every step can be
    /// repeated.
    pub(crate) async fn restore_ledger(&self) -> Result<u64, ApiError> {
        let generation = self.store.refresh_generation().await?;
        let own = self.store.ledger().process();
        if generation.settled || !generation.missing.contains(&own) {
            return Ok(0);
        }
        self.restore_admins().await?;
        let restored = self.restore_entries().await?;
        if self.store.ledger().is_copy() {
            tracing::error!(
                generation = generation.number,
                restored,
                "what this ledger holds is back, and it may be as old as the database: an owner has to \
                 decide, with `muster-discovery db accept`"
            );
            return Ok(restored);
        }
        tracing::info!(generation = generation.number, restored, "the ledger is back");
        if !self.store.record_ledger_restored(generation.number).await? {
            tracing::warn!("other processes have yet to put their ledgers back");
        }
        Ok(restored)
    }

    async fn restore_entries(&self) -> Result<u64, ApiError> {
        let (mut after, mut restored) = (None, 0);
        loop {
            let batch = self.store.ledger().entries(after, BATCH)?;
            let Some((last, _)) = batch.last() else { return Ok(restored) };
            after = Some(*last);
            let planned = compare_with_database(&mut *self.store.acquire().await?, &batch).await;
            for EntryComparison { cluster, action: what, .. } in
                planned.map_err(StoreError::from)?
            {
                match what {
                    RestoreAction::Nothing => {}
                    RestoreAction::Adopt => {
                        restored += u64::from(self.restore_commit(cluster).await?)
                    }
                    RestoreAction::Close => self.close(cluster).await?,
                    RestoreAction::End(cause) => {
                        self.end(cluster, cause, "a ledger").await?;
                        tracing::warn!(cluster.id = %cluster, "a cluster ends again");
                    }
                }
            }
        }
    }

    /// Restores a commit in the database. Returns whether that was possible. If it will never be
    /// possible, the commit is recorded as refused and isn't tried again. Its cluster is abandoned,
    /// so that it can't form another list here.
    async fn restore_commit(&self, cluster: Uuid) -> Result<bool, ApiError> {
        let Some(commit) = self.store.ledger().commit_with_document(cluster)? else {
            return Ok(false);
        };
        let mut put = self.adopt_from_ledger(&commit).await;
        if put.as_ref().is_err_and(|error| error.problem().code == Code::Conflict) {
            // Try again after a conflict. For example, another cluster may just have taken this
            // cluster's name.
            put = self.adopt_from_ledger(&commit).await;
        }
        match put {
            Ok(()) => Ok(true),
            // Don't record the commit as refused, because a retry may succeed. The error can be
            // temporary, or a newer version of this program may be able to read the commit.
            Err(error) if error.problem().retryable || error.is_newer_data() => Err(error),
            Err(error) => {
                self.metrics.count_alarm("ledger_entry_refused");
                tracing::error!(cluster.id = %cluster, %error,
                    "a commit of the ledger can't be put back");
                let by = "a commit of it stands in a ledger and can't be put back";
                self.store.abandon_unread(cluster, EndCause::DatabaseAccepted, by).await?;
                self.store.note_refused_commit(&commit, &error.to_string()).await?;
                Ok(false)
            }
        }
    }

    /// Closes a cluster whose commit another process sent out, because its document isn't in this
    /// ledger.
    async fn close(&self, cluster: Uuid) -> Result<(), ApiError> {
        let by = "a commit of it stands in a ledger, without the document: it comes back with the \
                  process that let it out, or with a host that holds it";
        self.end(cluster, EndCause::DatabaseAccepted, by).await?;
        self.metrics.count_alarm("ledger_entry_refused");
        tracing::error!(cluster.id = %cluster, "closed: {by}");
        Ok(())
    }

    async fn end(&self, cluster: Uuid, cause: EndCause, by: &str) -> Result<(), ApiError> {
        if !self.store.abandon_unread(cluster, cause, by).await? {
            self.store.drop_draft(cluster).await?;
        }
        Ok(())
    }

    async fn adopt_from_ledger(&self, commit: &Commit) -> Result<(), ApiError> {
        let damaged = |what: &str| {
            StoreError::damaged(format!("{what} of cluster {} in the ledger", commit.cluster_id))
        };
        let statements: Vec<Jws> = commit
            .statements
            .iter()
            .map(|text| text.parse().map_err(|_| damaged("a statement")))
            .collect::<Result<_, _>>()?;
        let chain = StatementChain::verify_links(&statements)?;
        let authority = |of: &Authority| -> Result<AuthorityRow, StoreError> {
            let decode = |text: &str| BASE64.decode(text.as_bytes()).map_err(|_| damaged("a CA"));
            let wrapped_key = of.wrapped_key.as_deref().map(decode).transpose()?;
            Ok(AuthorityRow { certificate: decode(&of.certificate)?, wrapped_key })
        };
        let (peer, client) = (authority(&commit.peer_ca)?, authority(&commit.client_ca)?);
        self.store.restore_cluster(&statements, chain.newest(), [&peer, &client]).await?;
        let document: Jws = commit.document.parse().map_err(|_| damaged("the document"))?;
        self.apply(commit.cluster_id, ClusterRequest::Adopt { document, statements }).await?;
        Ok(())
    }

    /// Restores elements of the admin chain that the ledger has and the database lacks. If the
    /// database's rows contradict the ledger, nothing is restored. The rows stay as they are, and
    /// this process ignores them.
    pub(crate) async fn restore_admins(&self) -> Result<(), ApiError> {
        let known = self.store.ledger().admins();
        let there = self.store.admin_elements().await?;
        if there.len() >= known.len() {
            return Ok(());
        }
        if !known.starts_with(&there) {
            self.metrics.count_alarm("admin_rows_contradict_the_ledger");
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

    /// Accepts the database as it is, on behalf of an owner. This ledger's entries are restored in
    /// the database first. Then every uncommitted cluster is abandoned, every token is revoked, and
    /// the generation is settled.
    pub(crate) async fn accept_database(
        &self,
        system_identifier: Option<&str>,
        by: &str,
    ) -> Result<AcceptResponse, ApiError> {
        let (system, timeline) = self.store.server().await?;
        let system = system.to_string();
        if system_identifier.is_some_and(|expected| expected != system) {
            return Err(ApiError::new(
                Code::Conflict,
                format!("The database's system identifier is {system}."),
                "Look which database this is before you accept it.",
            ));
        }
        let generation = self.store.refresh_generation().await?;
        if generation.settled {
            return Err(ApiError::new(
                Code::WrongState,
                "The database is settled: there is nothing to accept.",
                "Nothing needs to be done.",
            ));
        }
        let restored_commits = self.restore_entries().await?;
        let abandoned = self.abandon_forming_clusters(by).await?;
        let revoked = self.store.accept_generation(generation.number, by).await?;
        let revoked_tokens = revoked.ok_or_else(|| {
            let next = "Look at `muster-discovery process list`, and decide anew.";
            ApiError::new(Code::Conflict, "The database has changed once more.", next)
        })?;
        self.notifier.wake_all();
        Ok(AcceptResponse {
            system_identifier: system,
            timeline: i64::from(timeline),
            abandoned,
            revoked_tokens,
            restored_commits,
        })
    }

    async fn abandon_forming_clusters(&self, by: &str) -> Result<Vec<Uuid>, ApiError> {
        let mut abandoned = Vec::new();
        let mut position = FormingPosition::START;
        loop {
            let batch = self.store.forming_clusters(&mut position).await?;
            if batch.is_empty() {
                return Ok(abandoned);
            }
            for cluster in batch {
                let event = ClusterRequest::DatabaseAccepted { by: by.to_owned() };
                match self.apply(cluster, event).await {
                    Ok(_) => {}
                    Err(error) if error.is_damage() => {
                        tracing::error!(cluster.id = %cluster, %error, "abandoned unread");
                        self.store.abandon_unread(cluster, EndCause::DatabaseAccepted, by).await?;
                    }
                    Err(error) => return Err(error),
                }
                abandoned.push(cluster);
            }
        }
    }
}
