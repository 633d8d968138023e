//! The store's operations on the ledger and on the database's generation.

use uuid::Uuid;

use super::copy::{CopyResult, copy_decisions};
use super::generation::{self, Generation, ProcessRow};
use super::look::{LOOK_LIMIT, Occasion, look_at_database};
use super::server::server_of;
use super::watch::publish;
use super::{Commit, LedgerError};
use crate::store::{Store, StoreError};

impl Store {
    /// Checks the database, as is done for each new connection. A pooled connection stays open when
    /// a restore only replaces the tables, or when the primary is replaced.
    pub(crate) async fn look_at_database(&self, occasion: Occasion) -> Result<(), StoreError> {
        let store = self.clone();
        // Run in a task of its own: a caller that gives up must not cancel a running transaction.
        let looks = tokio::spawn(async move {
            let mut connection = store.acquire().await?;
            look_at_database(&mut connection, store.ledger(), store.watch(), occasion).await?;
            Ok(())
        });
        looks.await.map_err(|error| sqlx::Error::Io(std::io::Error::other(error)))?
    }

    /// Completes the ledger, however much it lacks. Each batch is durable when it is copied, so an
    /// interrupted fill continues from there. Returns an error if the database has changed in the
    /// meantime.
    pub(crate) async fn fill_ledger(&self) -> Result<(), StoreError> {
        let _alone = self.watch().fill_lock.lock().await;
        let mut connection = self.acquire().await?;
        look_at_database(&mut connection, self.ledger(), self.watch(), Occasion::Fill).await?;
        let generation = generation::read(&mut connection).await?;
        match self.watch().is_complete(generation.number.unsigned_abs()) {
            true => Ok(()),
            false => Err(sqlx::Error::Configuration("the database has changed".into()).into()),
        }
    }

    /// Copies new decisions from the database into the ledger, after a notification that there are
    /// some.
    pub(crate) async fn copy_new_decisions(&self) -> Result<(), StoreError> {
        // Return if the ledger is being filled: the fill copies the new decisions as well.
        let Ok(_alone) = self.watch().fill_lock.try_lock() else { return Ok(()) };
        let Some(known) = self.ledger().known() else { return Ok(()) };
        let mut connection = self.acquire().await?;
        let (ledger, watch) = (self.ledger(), self.watch());
        match copy_decisions(&mut connection, ledger, watch, known.last_copied, LOOK_LIMIT).await? {
            CopyResult::Limited => watch.fill_needed.notify_one(),
            CopyResult::Done | CopyResult::OtherHistory => {}
        }
        Ok(())
    }

    /// Reads the generation and publishes it. The sweep and `/readyz` call this.
    pub(crate) async fn refresh_generation(&self) -> Result<Generation, StoreError> {
        let generation = generation::read(&mut *self.acquire().await?).await?;
        publish(self.watch(), self.ledger().process(), generation.clone());
        Ok(generation)
    }

    /// Records that this process has restored its ledger's entries in `generation`. If no other
    /// process is missing, the generation becomes settled. Returns whether it is settled now.
    pub(super) async fn record_ledger_restored(&self, generation: i64) -> Result<bool, StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        generation::lock_generation(&mut transaction).await?;
        sqlx::query("UPDATE processes SET generation = $2 WHERE id = $1")
            .bind(self.ledger().process())
            .bind(generation)
            .execute(&mut *transaction)
            .await?;
        let settled = generation::settle_if_complete(&mut transaction).await?;
        transaction.commit().await?;
        self.refresh_generation().await?;
        Ok(settled)
    }

    /// Writes commits of different clusters to the ledger, then the number of the ledger's commits
    /// to the process's row. By that number an owner decides whether a process may be forgotten. A
    /// ledger that holds fewer commits than the row says was set back to an older state. The
    /// commits are durable when this returns. The results have the order of `commits`.
    pub(crate) async fn record_commits(
        &self,
        commits: Vec<Commit>,
    ) -> Result<Vec<Result<(), LedgerError>>, LedgerError> {
        let results = self.ledger().ensure_commits(commits).await?;
        if let Err(error) = self.count_entries().await {
            tracing::debug!(%error, "the sweep will count these commits");
        }
        Ok(results)
    }

    /// Writes a commit as [`Store::record_commits`] does.
    pub(crate) async fn record_commit(&self, commit: Commit) -> Result<(), LedgerError> {
        self.record_commits(vec![commit]).await?.pop().unwrap_or(Err(LedgerError::Failed))
    }

    async fn count_entries(&self) -> Result<(), StoreError> {
        sqlx::query("UPDATE processes SET entries = greatest(entries, $2) WHERE id = $1")
            .bind(self.ledger().process())
            .bind(self.ledger().commits() as i64)
            .execute(&mut *self.acquire().await?)
            .await?;
        Ok(())
    }

    /// Returns all processes, oldest first. This process's own row is up to date.
    pub(crate) async fn processes(&self) -> Result<Vec<ProcessRow>, StoreError> {
        let rows = sqlx::query_as(
            "SELECT id, generation, greatest(entries, CASE WHEN id = $1 THEN $2 END) AS entries,
                    first_seen_us, CASE WHEN id = $1 THEN now_us() ELSE last_seen_us END
                        AS last_seen_us, forgotten_us
             FROM processes ORDER BY first_seen_us, id",
        )
        .bind(self.ledger().process())
        .bind(self.ledger().commits() as i64)
        .fetch_all(&mut *self.acquire().await?)
        .await?;
        Ok(rows)
    }

    /// Marks a process as forgotten, on behalf of an owner. Returns `false` if the id is unknown.
    pub(crate) async fn forget_process(&self, id: Uuid, by: &str) -> Result<bool, StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        generation::lock_generation(&mut transaction).await?;
        let forgotten = sqlx::query(
            "UPDATE processes SET forgotten_us = now_us(), forgotten_by = $2 WHERE id = $1",
        )
        .bind(id)
        .bind(by)
        .execute(&mut *transaction)
        .await?
        .rows_affected();
        if forgotten == 1 {
            let generation = generation::read(&mut transaction).await?;
            let text = format!("{by} forgot process {id}");
            generation::note_event(&mut transaction, "process_forgotten", generation.number, &text)
                .await?;
            generation::settle_if_complete(&mut transaction).await?;
        }
        transaction.commit().await?;
        self.refresh_generation().await?;
        Ok(forgotten == 1)
    }

    /// Accepts the database as it is, on behalf of an owner: revokes every token and settles the
    /// generation. The caller must have abandoned every uncommitted cluster. Returns the number of
    /// revoked tokens, or `None` if the generation isn't `number` any more.
    pub(crate) async fn accept_generation(
        &self,
        number: i64,
        by: &str,
    ) -> Result<Option<u64>, StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        generation::lock_generation(&mut transaction).await?;
        let generation = generation::read(&mut transaction).await?;
        if generation.number != number {
            return Ok(None);
        }
        let revoked = sqlx::query(
            "UPDATE grants SET revoked_us = now_us(), revoked_by = $1 WHERE revoked_us IS NULL",
        )
        .bind(by)
        .execute(&mut *transaction)
        .await?
        .rows_affected();
        let accepted = "UPDATE generation SET settled = true, accepted_us = now_us(),
                            void_before_us = now_us()";
        sqlx::query(accepted).execute(&mut *transaction).await?;
        let text = format!("{by} accepted the database as it is");
        generation::note_event(&mut transaction, "database_accepted", generation.number, &text)
            .await?;
        transaction.commit().await?;
        self.refresh_generation().await?;
        Ok(Some(revoked))
    }

    /// Returns the server's system identifier and timeline.
    pub(crate) async fn server(&self) -> Result<(u64, u32), StoreError> {
        let server = server_of(&mut *self.acquire().await?).await?;
        let site = server.site()?;
        Ok((site.system, site.timeline))
    }
}
