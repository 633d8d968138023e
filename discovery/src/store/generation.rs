//! Which history of which database this is.
//!
//! A restore, a failover to another server, or a commit that we let out and that isn't there start
//! a new *generation*, unsettled: nothing is frozen or committed in it until every known process
//! has put its ledger's commits back, or an owner has accepted the database as it is.
//!
//! Found by any of: another system identifier or timeline than the row says; a write-ahead log that
//! is behind where this process has seen it; a generation lower than the ledger's; a ledger entry
//! that has no row.

use sqlx::{Connection, PgConnection};
use uuid::Uuid;

use super::{DatabaseWatch, Micros, Store, StoreError};
use crate::ledger::{Commit, Ledger, LedgerError, Seen};

/// Whoever changes the generation holds this advisory lock alone; a commit holds it with others
/// (`check_commit` in the migrations).
const LOCK: i64 = 0x6d75_7374_6572_0001;
/// Ledger entries looked up by one statement.
const BATCH: usize = 1_000;

/// The generation, and who is still missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Grows with each change.
    pub number: i64,
    /// Whether lists may be frozen and committed.
    pub settled: bool,
    /// What was found, in words.
    pub reason: String,
    /// When it was found.
    pub changed_us: Micros,
    /// Known processes that haven't put their ledgers back into it.
    pub missing: Vec<Uuid>,
}

impl Generation {
    /// What is wrong and what to do, for `explain`, `/readyz` and the log; `None` if all is well.
    pub fn explain(&self) -> Option<String> {
        if self.settled {
            return None;
        }
        let waiting: Vec<String> = self.missing.iter().map(Uuid::to_string).collect();
        Some(format!(
            "the database changed ({}): nothing is frozen or committed until each discovery process \
             that used it has put its ledger's commits back; still missing: {}. Start them, or have \
             an owner run `muster-discovery process forget ID` for one that is gone for good, or \
             `muster-discovery db accept`, which abandons every cluster that isn't committed and \
             revokes every token",
            self.reason,
            if waiting.is_empty() { "none".to_owned() } else { waiting.join(", ") },
        ))
    }
}

/// A process that uses, or used, this database.
#[derive(Clone, Debug, PartialEq, Eq, sqlx::FromRow)]
pub struct Process {
    /// The id in its ledger.
    pub id: Uuid,
    /// The last generation that it put its ledger back into.
    pub generation: i64,
    /// Commits in its ledger when it was last seen. After a restore it may hold more.
    pub entries: i64,
    /// When it was first seen.
    pub first_seen_us: Micros,
    /// When it last connected or swept.
    pub last_seen_us: Micros,
    /// When an owner said that it won't come back.
    pub forgotten_us: Option<Micros>,
}

/// Which server this is.
#[derive(Clone, Debug, sqlx::FromRow)]
pub struct Server {
    in_recovery: bool,
    /// `pg_control_system().system_identifier`.
    pub system_identifier: String,
    /// Of its write-ahead log.
    pub timeline: i64,
    wal: i64,
}

#[derive(Debug, sqlx::FromRow)]
struct Row {
    number: i64,
    system_identifier: String,
    timeline: i64,
    settled: bool,
}

/// Compares a new connection's database with the ledger, before the connection's first use.
pub(super) async fn compare(
    connection: &mut PgConnection,
    ledger: &Ledger,
    watch: &DatabaseWatch,
) -> Result<(), sqlx::Error> {
    // Before the server is asked: what another connection notes meanwhile is ahead of the answer.
    let before = ledger.seen();
    let server = server_of(connection).await?;
    if server.in_recovery {
        return Err(sqlx::Error::Configuration("this server is a replica now".into()));
    }
    let mut transaction = connection.begin().await?;
    let row = row(&mut transaction).await?;
    let found =
        difference(&mut transaction, &server, row.as_ref(), before.as_ref(), ledger).await?;
    let known = is_known(&mut transaction, ledger).await?;
    if found.is_some() || row.is_none() || !known {
        // Again, alone: another process may be at it as well.
        sqlx::query("SELECT pg_advisory_xact_lock($1)")
            .bind(LOCK)
            .execute(&mut *transaction)
            .await?;
        record(&mut transaction, &server, before.as_ref(), ledger).await?;
    }
    let generation = read(&mut transaction).await?;
    let processes = known_processes(&mut transaction).await?;
    transaction.commit().await?;
    let first = ledger.seen().is_none();
    let seen = Seen {
        system_identifier: server.system_identifier,
        timeline: server.timeline,
        wal: server.wal.unsigned_abs(),
        generation: generation.number,
        processes,
    };
    ledger
        .note(seen, first)
        .await
        .map_err(|error| sqlx::Error::Io(std::io::Error::other(error)))?;
    publish(watch, ledger.process(), generation);
    Ok(())
}

/// Makes it known; wakes whoever puts the ledger back if there is news and we are waited for.
fn publish(watch: &DatabaseWatch, own: Uuid, generation: Generation) {
    let waited_for = !generation.settled && generation.missing.contains(&own);
    let news = watch.generation.send_if_modified(|known| {
        let changed = known.as_ref() != Some(&generation);
        if changed {
            if let Some(text) = generation.explain() {
                tracing::error!(generation = generation.number, "{text}");
            } else if known.as_ref().is_some_and(|known| !known.settled) {
                tracing::info!(generation = generation.number, "the database is settled");
            }
            *known = Some(generation);
        }
        changed
    });
    if news && waited_for {
        watch.changed.notify_one();
    }
}

async fn server_of(connection: &mut PgConnection) -> Result<Server, sqlx::Error> {
    // The flushed position never goes back after a crash; the inserted one may. On a replica
    // neither can be asked for.
    sqlx::query_as(
        "SELECT r AS in_recovery, s.system_identifier::text AS system_identifier,
                CASE WHEN r THEN 0 ELSE
                    ('x' || substr(pg_walfile_name(pg_current_wal_flush_lsn()), 1, 8))::bit(32)::bigint
                END AS timeline,
                CASE WHEN r THEN 0 ELSE
                    pg_wal_lsn_diff(pg_current_wal_flush_lsn(), '0/0')::bigint
                END AS wal
         FROM pg_is_in_recovery() AS r, pg_control_system() AS s",
    )
    .fetch_one(connection)
    .await
}

async fn row(connection: &mut PgConnection) -> Result<Option<Row>, sqlx::Error> {
    sqlx::query_as("SELECT number, system_identifier, timeline, settled FROM generation")
        .fetch_optional(connection)
        .await
}

/// Renews this process's row; `false` if there is none, or an owner has it forgotten.
async fn is_known(connection: &mut PgConnection, ledger: &Ledger) -> Result<bool, sqlx::Error> {
    let updated = sqlx::query(
        "UPDATE processes SET last_seen_us = now_us(), entries = $2
         WHERE id = $1 AND forgotten_us IS NULL",
    )
    .bind(ledger.process())
    .bind(ledger.len() as i64)
    .execute(connection)
    .await?;
    Ok(updated.rows_affected() == 1)
}

/// What tells this database from the one that was known, in words.
async fn difference(
    connection: &mut PgConnection,
    server: &Server,
    row: Option<&Row>,
    seen: Option<&Seen>,
    ledger: &Ledger,
) -> Result<Option<String>, sqlx::Error> {
    let Some(row) = row else {
        return Ok(match (seen, ledger.len()) {
            (None, 0) => None,
            _ => Some("it is empty, and this process has worked with one that wasn't".into()),
        });
    };
    if row.system_identifier != server.system_identifier {
        return Ok(Some("it was moved to another server: the system identifier differs".into()));
    }
    if row.timeline != server.timeline {
        let (was, is) = (row.timeline, server.timeline);
        return Ok(Some(format!("a failover or a restore: timeline {is} instead of {was}")));
    }
    if let Some(seen) = seen {
        if seen.generation > row.number {
            let (was, is) = (seen.generation, row.number);
            return Ok(Some(format!("a backup: generation {is}, and {was} was seen before")));
        }
        let same =
            seen.system_identifier == server.system_identifier && seen.timeline == server.timeline;
        if same && row.settled && server.wal.unsigned_abs() < seen.wal {
            return Ok(Some("a backup: its log ends before what was seen of it".into()));
        }
    }
    if !row.settled {
        return Ok(None);
    }
    let missing = missing(connection, ledger).await?;
    Ok(missing.map(|cluster| format!("a backup: the commit of cluster {cluster} isn't in it")))
}

/// The first ledger entry that this database could contradict: its commit isn't there, and its
/// cluster, as it stands here, could form another list. One that has ended here for good can't, and
/// neither can one whose commit was refused; of one that is known to be split everybody knows.
async fn missing(
    connection: &mut PgConnection,
    ledger: &Ledger,
) -> Result<Option<Uuid>, sqlx::Error> {
    for batch in ledger.commits().chunks(BATCH) {
        let (ids, hashes): (Vec<Uuid>, Vec<&str>) =
            batch.iter().map(|commit| (commit.cluster_id, commit.h.as_str())).unzip();
        let missing: Option<Uuid> = sqlx::query_scalar(
            "SELECT l.id FROM unnest($1::uuid[], $2::text[]) AS l (id, h) WHERE NOT EXISTS (
                 SELECT 1 FROM clusters cl LEFT JOIN commits c ON c.cluster_id = cl.id
                 WHERE cl.id = l.id AND (encode(c.h, 'hex') = l.h OR cl.split_other IS NOT NULL
                     OR (c.h IS NULL AND cl.ended_cause <> 'database_accepted')))
             AND NOT (EXISTS (SELECT 1 FROM refused_commits r
                     WHERE r.cluster_id = l.id AND encode(r.h, 'hex') = l.h)
                 AND NOT EXISTS (SELECT 1 FROM clusters f WHERE f.id = l.id
                     AND f.phase IN ('draft', 'open', 'preparing'))) LIMIT 1",
        )
        .bind(&ids)
        .bind(&hashes)
        .fetch_optional(&mut *connection)
        .await?;
        if missing.is_some() {
            return Ok(missing);
        }
    }
    Ok(None)
}

/// Under the lock: writes the first generation, the next one, or only this process's row.
async fn record(
    connection: &mut PgConnection,
    server: &Server,
    before: Option<&Seen>,
    ledger: &Ledger,
) -> Result<(), sqlx::Error> {
    let row = row(connection).await?;
    let found = difference(connection, server, row.as_ref(), before, ledger).await?;
    let seen = ledger.seen();
    let last = row.as_ref().map_or(0, |row| row.number);
    let number = match (&row, &found) {
        (Some(row), None) => row.number,
        _ => last.max(seen.as_ref().map_or(0, |seen| seen.generation)) + 1,
    };
    if row.is_none() || found.is_some() {
        let reason = found.clone().unwrap_or_else(|| "it is new".into());
        sqlx::query(
            "INSERT INTO generation (number, system_identifier, timeline, settled, reason,
                 changed_us, void_before_us)
             VALUES ($1, $2, $3, $4, $5, now_us(), CASE WHEN $4 THEN 0 ELSE now_us() END)
             ON CONFLICT (one) DO UPDATE SET number = $1, system_identifier = $2, timeline = $3,
                 settled = $4, reason = $5, changed_us = now_us(), void_before_us = now_us()",
        )
        .bind(number)
        .bind(&server.system_identifier)
        .bind(server.timeline)
        .bind(found.is_none())
        .bind(&reason)
        .execute(&mut *connection)
        .await?;
        note_event(connection, "database_changed", number, &reason).await?;
    }
    if found.is_some() {
        // A restored table may lack those who came later; the ledger remembers them.
        for process in seen.map(|seen| seen.processes).unwrap_or_default() {
            sqlx::query(
                "INSERT INTO processes (id, generation, entries, first_seen_us, last_seen_us)
                 VALUES ($1, 0, 0, now_us(), now_us()) ON CONFLICT (id) DO NOTHING",
            )
            .bind(process)
            .execute(&mut *connection)
            .await?;
        }
    }
    // Nothing to put back: settled from the start.
    let put_back = if ledger.is_empty() { number } else { 0 };
    sqlx::query(
        "INSERT INTO processes (id, generation, entries, first_seen_us, last_seen_us)
         VALUES ($1, $2, $3, now_us(), now_us())
         ON CONFLICT (id) DO UPDATE SET last_seen_us = now_us(), entries = $3,
             forgotten_us = NULL, forgotten_by = NULL",
    )
    .bind(ledger.process())
    .bind(put_back)
    .bind(ledger.len() as i64)
    .execute(connection)
    .await?;
    Ok(())
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

/// The generation with those who are missing.
async fn read(connection: &mut PgConnection) -> Result<Generation, sqlx::Error> {
    let (number, settled, reason, changed_us): (i64, bool, String, i64) =
        sqlx::query_as("SELECT number, settled, reason, changed_us FROM generation")
            .fetch_one(&mut *connection)
            .await?;
    let missing = if settled {
        Vec::new()
    } else {
        sqlx::query_scalar(
            "SELECT id FROM processes WHERE forgotten_us IS NULL AND generation < $1 ORDER BY id",
        )
        .bind(number)
        .fetch_all(connection)
        .await?
    };
    Ok(Generation { number, settled, reason, changed_us, missing })
}

async fn known_processes(connection: &mut PgConnection) -> Result<Vec<Uuid>, sqlx::Error> {
    sqlx::query_scalar("SELECT id FROM processes WHERE forgotten_us IS NULL ORDER BY id")
        .fetch_all(connection)
        .await
}

impl Store {
    /// Reads the generation anew and publishes it; the sweep's and `/readyz`'s question.
    pub async fn look_at_generation(&self) -> Result<Generation, StoreError> {
        let mut connection = self.pool.acquire().await?;
        let generation = read(&mut connection).await?;
        publish(&self.watch, self.ledger.process(), generation.clone());
        Ok(generation)
    }

    /// This process has put its ledger back into `generation`; settles it if it was the last.
    /// Returns whether it is settled now.
    pub async fn ledger_is_back(&self, generation: i64) -> Result<bool, StoreError> {
        let mut transaction = self.pool.begin().await?;
        lock_alone(&mut transaction).await?;
        sqlx::query("UPDATE processes SET generation = $2, entries = $3 WHERE id = $1")
            .bind(self.ledger.process())
            .bind(generation)
            .bind(self.ledger.len() as i64)
            .execute(&mut *transaction)
            .await?;
        let settled = settle_if_complete(&mut transaction).await?;
        transaction.commit().await?;
        self.look_at_generation().await?;
        Ok(settled)
    }

    /// Writes a commit to the ledger, and that the ledger holds one more: by that number an owner
    /// decides whether a process may be forgotten. Returns when the commit is durable.
    pub async fn let_out(&self, commit: Commit) -> Result<(), LedgerError> {
        let counted = sqlx::query("UPDATE processes SET entries = $2 WHERE id = $1")
            .bind(self.ledger.process())
            .bind(self.ledger.len() as i64 + 1)
            .execute(&self.pool)
            .await;
        if let Err(error) = counted {
            tracing::debug!(%error, "the sweep will count this commit");
        }
        self.ledger.ensure(commit).await
    }

    /// All processes, the oldest first; this one's row as of now.
    pub async fn processes(&self) -> Result<Vec<Process>, StoreError> {
        is_known(&mut *self.pool.acquire().await?, &self.ledger).await?;
        let rows = sqlx::query_as(
            "SELECT id, generation, entries, first_seen_us, last_seen_us, forgotten_us
             FROM processes ORDER BY first_seen_us, id",
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows)
    }

    /// An owner says that a process won't come back. `false`: there is none of that id.
    pub async fn forget_process(&self, id: Uuid, by: &str) -> Result<bool, StoreError> {
        let mut transaction = self.pool.begin().await?;
        lock_alone(&mut transaction).await?;
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
        self.look_at_generation().await?;
        Ok(forgotten == 1)
    }

    /// An owner takes the database as it is: every token is revoked; the clusters that aren't
    /// committed must have been abandoned before.
    /// Returns how many tokens that were; `None`: it isn't generation `number` any more.
    pub async fn accept_generation(
        &self,
        number: i64,
        by: &str,
    ) -> Result<Option<u64>, StoreError> {
        let mut transaction = self.pool.begin().await?;
        lock_alone(&mut transaction).await?;
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
        self.look_at_generation().await?;
        Ok(Some(revoked))
    }

    /// Which server this is.
    pub async fn server(&self) -> Result<Server, StoreError> {
        let mut connection = self.pool.acquire().await?;
        Ok(server_of(&mut connection).await?)
    }

    /// Looks at the database as a new connection does: pooled ones outlive a restore that only
    /// replaces the tables. Also remembers how far the write-ahead log has come, and that this
    /// process lives.
    pub async fn compare_again(&self) -> Result<(), StoreError> {
        let mut connection = self.pool.acquire().await?;
        compare(&mut connection, &self.ledger, &self.watch).await?;
        Ok(())
    }
}

async fn lock_alone(connection: &mut PgConnection) -> Result<(), StoreError> {
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

#[cfg(test)]
mod tests {
    use tokio::sync::{Notify, watch};

    use super::*;

    fn unsettled(missing: Vec<Uuid>) -> Generation {
        Generation { number: 2, settled: false, reason: "a backup".into(), changed_us: 0, missing }
    }

    async fn is_woken(watch: &DatabaseWatch) -> bool {
        let wait = std::time::Duration::ZERO;
        tokio::time::timeout(wait, watch.changed.notified()).await.is_ok()
    }

    #[tokio::test]
    async fn only_news_that_this_process_is_waited_for_wake_whoever_puts_the_ledger_back() {
        let watch = DatabaseWatch { generation: watch::channel(None).0, changed: Notify::new() };
        let (own, other) = (Uuid::now_v7(), Uuid::now_v7());
        publish(&watch, own, unsettled(vec![own, other]));
        assert!(is_woken(&watch).await);
        publish(&watch, own, unsettled(vec![own, other]));
        assert!(!is_woken(&watch).await, "nothing new");
        publish(&watch, own, unsettled(vec![other]));
        assert!(!is_woken(&watch).await, "others are waited for");
        publish(&watch, own, unsettled(vec![own]));
        assert!(is_woken(&watch).await, "set back once more");
    }
}
