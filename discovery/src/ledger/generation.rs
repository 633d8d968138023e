//! The database's generation: which history of the database this is, and which processes it waits
//! for.

use discovery_formation::memory::CopyScope;
use sqlx::PgConnection;
use uuid::Uuid;

use super::look::{DatabaseLook, DatabaseRow, MismatchReason, Occasion};
use super::server::PostgresServer;
use super::watch::publish;
use super::{Commit, CopyResult, LOOK_LIMIT, LedgerError, look_at_database, server_of};
use crate::store::{Store, StoreError, UnixMicros};

/// Advisory lock on the generation. A change of generation takes it exclusively, a commit takes it
/// shared (`check_commit` in the migrations).
const LOCK: i64 = 0x6d75_7374_6572_0001;

/// The database's generation, with the processes that are missing from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Generation {
    /// Number of the generation; each change increments it.
    pub number: i64,
    /// Whether lists may be frozen and committed.
    pub settled: bool,
    /// Why the generation began, in words.
    pub reason: String,
    /// When the generation began.
    pub changed_us: UnixMicros,
    /// Known processes that haven't put their ledgers back into this generation.
    pub missing: Vec<Uuid>,
}

impl Generation {
    /// Explains what is wrong and what to do, for `explain`, `/readyz` and the log. Returns `None`
    /// if the generation is settled.
    pub(crate) fn explain(&self) -> Option<String> {
        if self.settled {
            return None;
        }
        let waiting: Vec<String> = self.missing.iter().map(Uuid::to_string).collect();
        Some(format!(
            "the database changed ({}): nothing is frozen or committed until each discovery process \
             that used it has put its ledger's commits back; still missing: {}. Start them (one that \
             runs and is missing has a ledger that was copied or put back, too, and may be as old as \
             this database), or have an owner run `muster-discovery process forget ID` for one that is gone for good, or \
             `muster-discovery db accept`, which abandons every cluster that isn't committed and \
             revokes every token",
            self.reason,
            if waiting.is_empty() { "none".to_owned() } else { waiting.join(", ") },
        ))
    }
}

/// A process that uses, or used, this database.
#[derive(Clone, Debug, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct ProcessRow {
    /// Id of the process, from its ledger.
    pub id: Uuid,
    /// The last generation into which the process put its ledger back.
    pub generation: i64,
    /// Number of commits in its ledger when it was last seen. After a restore the ledger may hold
    /// more.
    pub entries: i64,
    /// When the process was first seen.
    pub first_seen_us: UnixMicros,
    /// When the process last connected or swept.
    pub last_seen_us: UnixMicros,
    /// When an owner said that the process won't come back.
    pub forgotten_us: Option<UnixMicros>,
}

/// Inserts the first generation, the next one, or only this process's row. The caller holds the
/// lock.
pub(super) async fn begin_generation(
    connection: &mut PgConnection,
    looked: &DatabaseLook<'_>,
    row: &DatabaseRow,
    verdict: &Result<CopyScope, MismatchReason>,
) -> Result<(), sqlx::Error> {
    let (ledger, server) = (looked.ledger, looked.server);
    let seen = ledger.position();
    let remembered = seen.as_ref().map_or(0, |seen| seen.generation);
    let number = match (row.generation, verdict) {
        (Some(number), Ok(_)) => number,
        (last, _) => last.unwrap_or(0).max(remembered as i64) + 1,
    };
    if row.generation != Some(number) {
        let reason = verdict.as_ref().err().map_or("it is new".into(), MismatchReason::to_string);
        write_generation(connection, server, number, verdict.is_ok(), &reason).await?;
    }
    if verdict.is_err() {
        // A restored table may lack processes that joined later. The ledger remembers them.
        sqlx::query(
            "INSERT INTO processes (id, generation, entries, first_seen_us, last_seen_us)
             SELECT id, 0, 0, now_us(), now_us() FROM unnest($1::uuid[]) AS id
             ON CONFLICT (id) DO NOTHING",
        )
        .bind(seen.as_ref().map(|seen| seen.processes.clone()).unwrap_or_default())
        .execute(&mut *connection)
        .await?;
    }
    // A process that joins with an empty ledger has nothing to put back, so don't wait for it.
    let joins = verdict.is_ok() && ledger.entries(None, 1).is_empty();
    let put_back = if joins { number } else { 0 };
    sqlx::query(
        "INSERT INTO processes (id, generation, entries, first_seen_us, last_seen_us, beat)
         VALUES ($1, $2, 0, now_us(), now_us(), $3)
         ON CONFLICT (id) DO UPDATE SET last_seen_us = now_us(),
             beat = greatest(processes.beat, $3), forgotten_us = NULL, forgotten_by = NULL",
    )
    .bind(ledger.process())
    .bind(put_back)
    .bind(seen.map_or(0, |seen| seen.beat as i64))
    .execute(connection)
    .await?;
    Ok(())
}

async fn write_generation(
    connection: &mut PgConnection,
    server: &PostgresServer,
    number: i64,
    settled: bool,
    reason: &str,
) -> Result<(), sqlx::Error> {
    let site = server.site()?;
    sqlx::query(
        "INSERT INTO generation (number, system_identifier, timeline, settled, reason,
             changed_us, void_before_us, database_oid, table_oids)
         VALUES ($1, $2, $3, $4, $5, now_us(), CASE WHEN $4 THEN 0 ELSE now_us() END, $6, $7)
         ON CONFLICT (one) DO UPDATE SET number = $1, system_identifier = $2, timeline = $3,
             settled = $4, reason = $5, changed_us = now_us(), void_before_us = now_us(),
             database_oid = $6, table_oids = $7",
    )
    .bind(number)
    .bind(site.system.to_string())
    .bind(i64::from(site.timeline))
    .bind(settled)
    .bind(reason)
    .bind(i64::from(site.database))
    .bind(site.tables.map(i64::from).to_vec())
    .execute(&mut *connection)
    .await?;
    note_event(connection, "database_changed", number, reason).await
}

async fn note_event(
    connection: &mut PgConnection,
    kind: &str,
    number: i64,
    text: &str,
) -> Result<(), sqlx::Error> {
    let body = serde_json::json!({ "generation": number, "text": text }).to_string();
    sqlx::query(
        "INSERT INTO events (stream, number, at_us, kind, body, previous, hash)
         VALUES ($1, 1, now_us(), $2, $3, '', '')",
    )
    .bind(Uuid::nil())
    .bind(kind)
    .bind(body)
    .execute(connection)
    .await?;
    Ok(())
}

/// Reads the generation and the processes that are missing.
pub(super) async fn read(connection: &mut PgConnection) -> Result<Generation, sqlx::Error> {
    let (number, settled, reason, changed_us, missing): (i64, bool, String, i64, Vec<Uuid>) =
        sqlx::query_as(
            "SELECT number, settled, reason, changed_us, CASE WHEN settled THEN '{}' ELSE
                 ARRAY(SELECT id FROM processes p WHERE forgotten_us IS NULL
                     AND p.generation < g.number ORDER BY id) END
             FROM generation g",
        )
        .fetch_one(connection)
        .await?;
    Ok(Generation { number, settled, reason, changed_us, missing })
}

pub(super) async fn known_processes(
    connection: &mut PgConnection,
) -> Result<Vec<Uuid>, sqlx::Error> {
    sqlx::query_scalar("SELECT id FROM processes WHERE forgotten_us IS NULL ORDER BY id")
        .fetch_all(connection)
        .await
}

impl Store {
    /// Looks at the database as a new connection does. A pooled connection outlives a restore that
    /// only replaces the tables, and the replacement of the primary.
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
    /// interrupted fill continues from there. Errors if the database has changed in the meantime.
    pub(crate) async fn fill_ledger(&self) -> Result<(), StoreError> {
        let _alone = self.watch().fill_lock.lock().await;
        let mut connection = self.acquire().await?;
        look_at_database(&mut connection, self.ledger(), self.watch(), Occasion::Fill).await?;
        let generation = read(&mut connection).await?;
        match self.watch().is_complete(generation.number.unsigned_abs()) {
            true => Ok(()),
            false => Err(sqlx::Error::Configuration("the database has changed".into()).into()),
        }
    }

    /// Copies new decisions after a notification that there are some.
    pub(crate) async fn copy_new_decisions(&self) -> Result<(), StoreError> {
        // A running fill copies the new decisions as well.
        let Ok(_alone) = self.watch().fill_lock.try_lock() else { return Ok(()) };
        let Some(known) = self.ledger().known() else { return Ok(()) };
        let mut connection = self.acquire().await?;
        let (ledger, watch) = (self.ledger(), self.watch());
        match super::copy_decisions(&mut connection, ledger, watch, known.last_copied, LOOK_LIMIT)
            .await?
        {
            CopyResult::Limited => watch.fill_needed.notify_one(),
            CopyResult::Done | CopyResult::OtherHistory => {}
        }
        Ok(())
    }

    /// Reads the generation and publishes it. The sweep and `/readyz` call this.
    pub(crate) async fn refresh_generation(&self) -> Result<Generation, StoreError> {
        let generation = read(&mut *self.acquire().await?).await?;
        publish(self.watch(), self.ledger().process(), generation.clone());
        Ok(generation)
    }

    /// Records that this process has put its ledger back into `generation`. If no other process is
    /// missing, the generation becomes settled. Returns whether it is settled now.
    pub(super) async fn note_ledger_back(&self, generation: i64) -> Result<bool, StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        lock_generation(&mut transaction).await?;
        sqlx::query("UPDATE processes SET generation = $2 WHERE id = $1")
            .bind(self.ledger().process())
            .bind(generation)
            .execute(&mut *transaction)
            .await?;
        let settled = settle_if_complete(&mut transaction).await?;
        transaction.commit().await?;
        self.refresh_generation().await?;
        Ok(settled)
    }

    /// Writes a commit to the ledger, then the number of its commits to the process's row. An owner
    /// decides by that number whether a process may be forgotten. A ledger that holds fewer was set
    /// back. The commit is durable when this returns.
    pub(crate) async fn record_commit(&self, commit: Commit) -> Result<(), LedgerError> {
        self.ledger().ensure_commit(commit).await?;
        if let Err(error) = self.count_entries().await {
            tracing::debug!(%error, "the sweep will count this commit");
        }
        Ok(())
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
        lock_generation(&mut transaction).await?;
        let forgotten = sqlx::query(
            "UPDATE processes SET forgotten_us = now_us(), forgotten_by = $2 WHERE id = $1",
        )
        .bind(id)
        .bind(by)
        .execute(&mut *transaction)
        .await?
        .rows_affected();
        if forgotten == 1 {
            let generation = read(&mut transaction).await?;
            let text = format!("{by} forgot process {id}");
            note_event(&mut transaction, "process_forgotten", generation.number, &text).await?;
            settle_if_complete(&mut transaction).await?;
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
        lock_generation(&mut transaction).await?;
        let generation = read(&mut transaction).await?;
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
        note_event(&mut transaction, "database_accepted", generation.number, &text).await?;
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

pub(super) async fn lock_generation(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(LOCK).execute(connection).await?;
    Ok(())
}

async fn settle_if_complete(connection: &mut PgConnection) -> Result<bool, StoreError> {
    let generation = read(connection).await?;
    if generation.settled || !generation.missing.is_empty() {
        return Ok(generation.settled);
    }
    sqlx::query("UPDATE generation SET settled = true").execute(&mut *connection).await?;
    let text = "every known process has put its ledger's commits back";
    note_event(connection, "database_settled", generation.number, text).await?;
    Ok(true)
}
