//! Looks at a connection's database and checks whether it is the one that was last seen. Such a
//! check is called a *look*.

use std::sync::atomic::Ordering;

use discovery_formation::Hash;
use discovery_formation::memory::{
    CopyScope, DatabaseDifference, DatabaseIdentity, HistoryPosition, LedgerSummary,
    ObservedDatabase, ProcessRow, StoredGeneration, compare, is_running_elsewhere,
};
use sqlx::{Connection, PgConnection};
use uuid::Uuid;

use super::agree::{Agreement, compare_entries, still_contradicts};
use super::copy::{self, CopyResult};
use super::generation::{self, Generation, begin_generation};
use super::server::{PostgresServer, server_of, site};
use super::watch::publish;
use super::{DatabasePosition, DatabaseWatch, Ledger, UNCOPIED, failed};

/// Reason for a look (a check of the database). It limits how much the look may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// A new connection, a notification, or a suspected change of the database. A caller waits for
    /// the look.
    Doubt,
    /// The periodic sweep of the service, which checks the database each time.
    Sweep,
    /// The ledger lacks more decisions than a look on another occasion may copy. This look copies
    /// all of them.
    Fill,
}

/// Maximum number of decisions that a look (a check of the database) copies while a caller waits.
/// It is also the maximum number of entries that the look compares. A look on [`Occasion::Fill`]
/// does the rest.
pub(crate) const LOOK_LIMIT: usize = 2_000;

/// Maximum number of attempts to check the database. An attempt that begins a new generation must
/// be repeated in that generation.
const MAX_LOOK_ATTEMPTS: usize = 3;

impl Occasion {
    fn limit(self) -> usize {
        match self {
            Occasion::Doubt | Occasion::Sweep => LOOK_LIMIT,
            Occasion::Fill => usize::MAX,
        }
    }
}

/// Looks at a connection's database, before the connection's first use and at each sweep. It copies
/// the decisions that the ledger lacks, then compares the ledger's entries. A difference begins a
/// new generation.
///
/// A look that would have to read more than its [`Occasion`] allows leaves the ledger incomplete
/// ([`DatabaseWatch::is_complete`]) and wakes the task that fills it.
pub(crate) async fn look_at_database(
    connection: &mut PgConnection,
    ledger: &Ledger,
    watch: &DatabaseWatch,
    occasion: Occasion,
) -> Result<(), sqlx::Error> {
    let mut occasion = occasion;
    for _ in 0..MAX_LOOK_ATTEMPTS {
        if look_once(connection, ledger, watch, occasion).await? {
            return Ok(());
        }
        // Count a sweep once, even if it needs several attempts.
        if occasion == Occasion::Sweep {
            occasion = Occasion::Doubt;
        }
    }
    Err(sqlx::Error::Configuration("the database changes while it is looked at".into()))
}

/// Makes one attempt to check the database. Returns `false` if it has begun a new generation, in
/// which the check must be repeated.
async fn look_once(
    connection: &mut PgConnection,
    ledger: &Ledger,
    watch: &DatabaseWatch,
    occasion: Occasion,
) -> Result<bool, sqlx::Error> {
    // Read the ledger's summary before asking the server. Otherwise another connection could
    // meanwhile record a newer position, and this server's answer would seem too old.
    let before = ledger.memory();
    let server = server_of(connection).await?;
    if server.in_recovery {
        return Err(sqlx::Error::Configuration("this server is a replica now".into()));
    }
    let looked = DatabaseLook { server: &server, ledger, watch, memory: before };
    let mut transaction = connection.begin().await?;
    let (mut verdict, mut row) = looked.judge(&mut transaction).await?;
    if verdict.is_err() || row.generation.is_none() || row.beat.is_none() || row.forgotten {
        // Read the state again under the exclusive lock: another process can be changing the
        // generation, too.
        generation::lock_generation(&mut transaction).await?;
        (verdict, row) = looked.judge(&mut transaction).await?;
        let mismatch = verdict.as_ref().err().map(MismatchReason::to_string);
        begin_generation(&mut transaction, ledger, &server, row.generation, mismatch).await?;
    }
    let elsewhere = verdict.is_ok() && looked.lives_elsewhere(&row);
    if occasion == Occasion::Sweep && watch.note_other_run(elsewhere) {
        return Err(sqlx::Error::Configuration(LEDGER_USED_TWICE.into()));
    }
    let generation = generation::read(&mut transaction).await?;
    let processes = generation::known_processes(&mut transaction).await?;
    transaction.commit().await?;
    let fill = match verdict {
        // Another process with this process's id, on a copy of this ledger, also counts its sweeps
        // and entries in the row. So higher counts don't show that this ledger is old.
        Ok(_) if elsewhere => CopyScope::NewDecisions,
        Ok(fill) => fill,
        Err(_) => CopyScope::NewHistory,
    };
    let mut seen = looked.position(&generation, &row, processes)?;
    if fill == CopyScope::IncompleteLedger {
        alarm_older_ledger(ledger, watch);
        watch.set_incomplete();
        // Keep the old count of sweeps until the ledger is filled. If the process restarts before
        // then, it finds again that its ledger is old.
        seen.beat = before.database.map_or(0, |known| known.sweeps);
    }
    if ledger.position().is_none_or(|old| !old.has_same_history(&seen)) {
        ledger.record_position(seen.clone()).await.map_err(failed)?;
    }
    let found =
        LookFindings { looked: &looked, generation, fill, newest: row.newest.unsigned_abs() };
    match found.complete(connection, occasion).await? {
        Completion::Contradicted => return Ok(false),
        Completion::Incomplete => {
            update_own_row(connection, ledger, watch.run_id, false).await?;
            publish(watch, ledger.process(), found.generation);
            watch.fill_needed.notify_one();
            return Ok(true);
        }
        Completion::Complete => {}
    }
    if ledger.is_copy() {
        alarm_copied_ledger(ledger, watch);
        if found.generation.settled {
            ledger.clear_copy_mark();
        }
    }
    // The first look of a process counts as a sweep, too.
    let counts = occasion == Occasion::Sweep || !watch.has_stored_run_id.load(Ordering::Relaxed);
    seen.beat = update_own_row(connection, ledger, watch.run_id, counts).await?.unsigned_abs();
    if counts || fill != CopyScope::NewDecisions {
        // `update_own_row` has written the sweep count to the process's row; now the ledger stores
        // the same count. So if a later look finds that the row's count is lower than the ledger's,
        // the database was set back to an older state. If the row's count is higher by one, the
        // process was killed between the two writes.
        ledger.record_position(seen).await.map_err(failed)?;
    }
    watch.has_stored_run_id.store(true, Ordering::Relaxed);
    watch.set_complete(&found.generation);
    publish(watch, ledger.process(), found.generation);
    Ok(true)
}

/// Findings of a look (a check of the database), before it copies anything.
struct LookFindings<'a> {
    looked: &'a DatabaseLook<'a>,
    generation: Generation,
    fill: CopyScope,
    /// Number of the newest decision in the database.
    newest: u64,
}

/// Result of an attempt to complete the ledger.
enum Completion {
    /// The ledger holds all decisions that the database has. If the generation is settled (lists
    /// may be committed), the database also contradicts no entry of the ledger.
    Complete,
    /// The look ended before it had read everything, because its [`Occasion`] limits how much it
    /// may read.
    Incomplete,
    /// The ledger contradicts the database. A new generation has begun.
    Contradicted,
}

impl LookFindings<'_> {
    async fn complete(
        &self,
        connection: &mut PgConnection,
        occasion: Occasion,
    ) -> Result<Completion, sqlx::Error> {
        let DatabaseLook { ledger, watch, .. } = *self.looked;
        let from = match (self.fill, ledger.known()) {
            (CopyScope::NewDecisions, Some(known)) => known.last_copied,
            _ => UNCOPIED,
        };
        watch.progress.set_newest(self.newest);
        let copying =
            copy::copy_decisions(connection, ledger, watch, from, occasion.limit()).await?;
        if copying != CopyResult::Done {
            return Ok(Completion::Incomplete);
        }
        if !self.generation.settled || !watch.has_to_compare(self.generation.number) {
            return Ok(Completion::Complete);
        }
        match compare_entries(connection, ledger, watch, occasion.limit()).await? {
            Agreement::Agrees => Ok(Completion::Complete),
            Agreement::Unknown => Ok(Completion::Incomplete),
            Agreement::Contradicted(cluster) => {
                self.begin_after_contradiction(connection, cluster).await?;
                Ok(Completion::Contradicted)
            }
        }
    }

    /// Begins a generation, because the database could make a decision on `cluster` that
    /// contradicts the ledger. Does nothing if another process has meanwhile begun a generation, or
    /// has restored the cluster in the database.
    async fn begin_after_contradiction(
        &self,
        connection: &mut PgConnection,
        cluster: Uuid,
    ) -> Result<(), sqlx::Error> {
        let mut transaction = connection.begin().await?;
        generation::lock_generation(&mut transaction).await?;
        let (verdict, row) = self.looked.judge(&mut transaction).await?;
        let same = row.generation == Some(self.generation.number) && row.settled == Some(true);
        if verdict.is_ok()
            && same
            && still_contradicts(&mut transaction, self.looked.ledger, cluster).await?
        {
            let DatabaseLook { ledger, server, .. } = *self.looked;
            let mismatch = Some(MismatchReason::Contradicts(cluster).to_string());
            begin_generation(&mut transaction, ledger, server, row.generation, mismatch).await?;
        }
        transaction.commit().await
    }
}

/// Raises the alarm for an old ledger, once in the life of the process.
fn alarm_older_ledger(ledger: &Ledger, watch: &DatabaseWatch) {
    if watch.has_alarmed_older.swap(true, Ordering::Relaxed) {
        return;
    }
    watch.metrics.count_alarm("ledger_set_back");
    tracing::error!(
        process = %ledger.process(),
        "this ledger holds less than the database says that it did: it was put back to an older \
         state. It is filled from the database; look who did that, and why"
    );
}

/// Raises the alarm for a copied ledger, once in the life of the process.
fn alarm_copied_ledger(ledger: &Ledger, watch: &DatabaseWatch) {
    if watch.has_alarmed_copy.swap(true, Ordering::Relaxed) {
        return;
    }
    watch.metrics.count_alarm("ledger_copied");
    tracing::error!(
        process = %ledger.process(),
        "this ledger is not where it was written: it was put back from a backup, or copied. What it \
         lacks of the database is filled in. If the database was put back as well, nothing tells how \
         old the two are, and an owner has to decide; and no second process may run on it"
    );
}

/// Updates this process's row: last seen, number of commits, sweeps. Returns the number of sweeps.
async fn update_own_row(
    connection: &mut PgConnection,
    ledger: &Ledger,
    life: Uuid,
    counts: bool,
) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(
        "UPDATE processes SET last_seen_us = now_us(), entries = greatest(entries, $2),
             beat = beat + $3, life = CASE WHEN $3 = 0 THEN life ELSE $4 END
         WHERE id = $1 RETURNING beat",
    )
    .bind(ledger.process())
    .bind(ledger.commits() as i64)
    .bind(i64::from(counts))
    .bind(life)
    .fetch_one(connection)
    .await
}

/// Data that a look (a check of the database) has before it reads any table.
struct DatabaseLook<'a> {
    server: &'a PostgresServer,
    ledger: &'a Ledger,
    watch: &'a DatabaseWatch,
    memory: LedgerSummary,
}

/// Error with which this process stops if another one uses a copy of its ledger.
pub(crate) const LEDGER_USED_TWICE: &str = "two processes use copies of one ledger: another one goes by this one's id \
     in the database. Look for a cloned machine, or a ledger that was copied to a second host; leave one \
     of the two running, and give the other an empty --ledger of its own";

/// Error for a database that is only partly restored. Nothing is written to it, because the rest of
/// the restore would then fail.
pub(crate) const HALF_LOADED: &str = "this database isn't whole: keys, indexes or triggers are missing. \
     Wait for the restore that is under way; one that broke off is begun anew, with an empty database";

/// The database's data about its generation, its decisions and this process, read in one query.
///
/// The fields from `system_identifier` to `table_oids` were stored when the generation began. Those
/// from `entries` to `forgotten` are from this process's own row.
#[derive(Debug, sqlx::FromRow)]
struct DatabaseRow {
    /// Number of the generation; `None` before the first one.
    generation: Option<i64>,
    settled: Option<bool>,
    system_identifier: Option<String>,
    timeline: Option<i64>,
    database_oid: Option<i64>,
    table_oids: Option<Vec<i64>>,
    newest: i64,
    at_copied: Option<Vec<u8>>,
    /// Whether everything exists that a restore makes last: keys, indexes and triggers.
    is_whole: bool,
    /// Number of commits in this process's ledger.
    entries: Option<i64>,
    beat: Option<i64>,
    life: Option<Uuid>,
    forgotten: bool,
}

impl DatabaseRow {
    fn own(&self) -> Option<ProcessRow> {
        let (entries, sweeps) = self.entries.zip(self.beat)?;
        Some(ProcessRow { entries: entries.unsigned_abs(), sweeps: sweeps.unsigned_abs() })
    }
}

/// Why a database isn't the one that this process has seen before.
enum MismatchReason {
    Differs(DatabaseDifference),
    /// The database could make a decision on this cluster that contradicts the ledger.
    Contradicts(uuid::Uuid),
}

impl std::fmt::Display for MismatchReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MismatchReason::Differs(difference) => difference.fmt(f),
            MismatchReason::Contradicts(cluster) => {
                write!(f, "a backup: what was decided of cluster {cluster} isn't in it")
            }
        }
    }
}

impl DatabaseLook<'_> {
    async fn judge(
        &self,
        connection: &mut PgConnection,
    ) -> Result<(Result<CopyScope, MismatchReason>, DatabaseRow), sqlx::Error> {
        let copied = self.memory.database.map_or(HistoryPosition::START, |known| known.last_copied);
        let row: DatabaseRow = sqlx::query_as(
            "SELECT g.number AS generation, g.settled, g.system_identifier, g.timeline,
                    g.database_oid, g.table_oids, p.entries, p.beat, p.life,
                    coalesce(p.forgotten_us IS NOT NULL, false) AS forgotten,
                    is_whole(), (SELECT coalesce(max(number), 0) FROM decisions) AS newest,
                    (SELECT hash FROM decisions WHERE number = $2) AS at_copied
             FROM (SELECT 1) AS one LEFT JOIN generation g ON true LEFT JOIN processes p ON p.id = $1",
        )
        .bind(self.ledger.process())
        .bind(copied.number as i64)
        .fetch_one(&mut *connection)
        .await?;
        if !row.is_whole {
            return Err(sqlx::Error::Configuration(HALF_LOADED.into()));
        }
        let database = self.database(&row)?;
        let mut verdict = compare(&self.memory, &database);
        if verdict == Ok(CopyScope::IncompleteLedger) {
            verdict = compare(&self.memory_after(&row), &database);
        }
        let verdict = verdict.map_err(MismatchReason::Differs);
        Ok((verdict, row))
    }

    /// Returns what the ledger holds now that `row` was read. Another connection can have added
    /// commits or sweeps to the ledger and to this process's row since the look began. If the
    /// ledger was set back to an older state, it still holds less than the row says.
    fn memory_after(&self, row: &DatabaseRow) -> LedgerSummary {
        let now = self.ledger.memory();
        let mut memory = LedgerSummary { entries: now.entries, ..self.memory };
        if let (Some(known), Some(now)) = (&mut memory.database, now.database) {
            // Ignore sweeps that the ledger has recorded since the row was read: they aren't in the
            // row.
            let in_row = row.beat.map_or(known.sweeps, i64::unsigned_abs);
            known.sweeps = now.sweeps.min(in_row).max(known.sweeps);
        }
        memory
    }

    /// Returns the database's identity and position, to be recorded in the ledger.
    fn position(
        &self,
        generation: &Generation,
        row: &DatabaseRow,
        processes: Vec<Uuid>,
    ) -> Result<DatabasePosition, sqlx::Error> {
        let site = self.server.site()?;
        Ok(DatabasePosition {
            system_identifier: site.system,
            timeline: site.timeline,
            database: site.database,
            tables: site.tables,
            generation: generation.number.unsigned_abs(),
            wal: self.server.wal.unsigned_abs(),
            beat: row.beat.unwrap_or(0).unsigned_abs(),
            processes,
        })
    }

    fn lives_elsewhere(&self, row: &DatabaseRow) -> bool {
        let began = self.watch.has_stored_run_id.load(Ordering::Relaxed);
        let (known, is_ours) = (self.memory.database, row.life == Some(self.watch.run_id));
        let known = known.zip(row.own()).filter(|_| began);
        known.is_some_and(|(known, own)| is_running_elsewhere(&known, &own, is_ours))
    }

    fn database(&self, row: &DatabaseRow) -> Result<ObservedDatabase, sqlx::Error> {
        let hash = row.at_copied.as_deref().and_then(|hash| hash.try_into().ok()).map(Hash);
        let noted = row.generation.map(|number| {
            let noted = site(
                row.system_identifier.as_deref().unwrap_or_default(),
                row.timeline.unwrap_or_default(),
                row.database_oid.unwrap_or_default(),
                row.table_oids.as_deref().unwrap_or_default(),
            );
            // An older version stored the generation without the database's identity. Use an
            // identity that no database has.
            let site = noted.unwrap_or(DatabaseIdentity {
                system: 0,
                timeline: 0,
                database: 0,
                tables: [0; 4],
            });
            StoredGeneration { identity: site, generation: number.unsigned_abs() }
        });
        Ok(ObservedDatabase {
            identity: self.server.site()?,
            wal: self.server.wal.unsigned_abs(),
            stored: noted,
            newest: row.newest.unsigned_abs(),
            hash_at_last_copied: hash,
            process_row: row.own(),
        })
    }
}
