//! The database's generation: the number of its present history. Until the generation is settled,
//! it waits for the processes that haven't restored their ledgers' entries yet.

use sqlx::PgConnection;
use uuid::Uuid;

use super::Ledger;
use super::server::PostgresServer;
use crate::store::UnixMicros;

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
    /// Known processes that haven't restored their ledgers' entries in the database since this
    /// generation began.
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
             that used it has restored its ledger's commits; still missing: {}. Start them (one that \
             runs and is missing has a ledger that was copied or restored, too, and may be as old as \
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
    /// The last generation in which the process restored its ledger's entries in the database.
    pub generation: i64,
    /// Number of commits in the process's ledger when the process was last seen. After a restore
    /// the ledger can hold more.
    pub entries: i64,
    /// When the process was first seen.
    pub first_seen_us: UnixMicros,
    /// When the process last connected or swept.
    pub last_seen_us: UnixMicros,
    /// When an owner said that the process won't come back.
    pub forgotten_us: Option<UnixMicros>,
}

/// Begins the first generation if there is none, or the next one if there is a `mismatch`. Then
/// inserts or updates this process's row. `last` is the present generation's number. `mismatch` is
/// the reason why the database isn't the one that this process last saw. The caller holds the
/// generation's lock.
pub(super) async fn begin_generation(
    connection: &mut PgConnection,
    ledger: &Ledger,
    server: &PostgresServer,
    last: Option<i64>,
    mismatch: Option<String>,
) -> Result<(), sqlx::Error> {
    let seen = ledger.position();
    let remembered = seen.as_ref().map_or(0, |seen| seen.generation);
    let is_known = mismatch.is_none();
    let number = match last {
        Some(number) if is_known => number,
        last => last.unwrap_or(0).max(remembered as i64) + 1,
    };
    if last != Some(number) {
        let reason = mismatch.unwrap_or_else(|| "it is new".into());
        write_generation(connection, server, number, is_known, &reason).await?;
    }
    if !is_known {
        // Restored tables can lack processes that joined after the backup. Insert those that the
        // ledger lists, so that the generation waits for them.
        sqlx::query(
            "INSERT INTO processes (id, generation, entries, first_seen_us, last_seen_us)
             SELECT id, 0, 0, now_us(), now_us() FROM unnest($1::uuid[]) AS id
             ON CONFLICT (id) DO NOTHING",
        )
        .bind(seen.as_ref().map(|seen| seen.processes.clone()).unwrap_or_default())
        .execute(&mut *connection)
        .await?;
    }
    // A process that joins with an empty ledger has nothing to restore, so don't wait for it.
    let joins = is_known && ledger.is_empty();
    let restored_in = if joins { number } else { 0 };
    sqlx::query(
        "INSERT INTO processes (id, generation, entries, first_seen_us, last_seen_us, beat)
         VALUES ($1, $2, 0, now_us(), now_us(), $3)
         ON CONFLICT (id) DO UPDATE SET last_seen_us = now_us(),
             beat = greatest(processes.beat, $3), forgotten_us = NULL, forgotten_by = NULL",
    )
    .bind(ledger.process())
    .bind(restored_in)
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

pub(super) async fn note_event(
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

pub(super) async fn lock_generation(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(LOCK).execute(connection).await?;
    Ok(())
}

/// Settles the generation if no process is missing. Returns whether it is settled now.
pub(super) async fn settle_if_complete(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let generation = read(connection).await?;
    if generation.settled || !generation.missing.is_empty() {
        return Ok(generation.settled);
    }
    sqlx::query("UPDATE generation SET settled = true").execute(&mut *connection).await?;
    let text = "every known process has restored its ledger's commits";
    note_event(connection, "database_settled", generation.number, text).await?;
    Ok(true)
}
