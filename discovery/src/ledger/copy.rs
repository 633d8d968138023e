//! Copies new decisions from the database into the ledger, in the order of their numbers.

use discovery_formation::Hash;
use discovery_formation::memory::{HistoryPosition, LedgerEntry};
use discovery_formation::service::EndCause;
use sqlx::PgConnection;
use uuid::Uuid;

use super::index::{CopiedDecisions, pack_commit};
use super::{DatabaseWatch, Ledger, LedgerError, failed};

/// Maximum number of decisions in one query and in one line of the ledger.
const BATCH: usize = 10_000;

/// Result of copying decisions from the database into the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyResult {
    /// All decisions that this connection sees are durable in the ledger.
    Done,
    /// The limit was reached, although there are more decisions to copy.
    Limited,
    /// The database's generation or history differs from the one that the ledger knows. The next
    /// check of the database (`look`) finds the reason.
    OtherHistory,
}

#[derive(Debug, sqlx::FromRow)]
struct DecisionRow {
    number: i64,
    cluster_id: Uuid,
    h: Option<Vec<u8>>,
    cause: Option<String>,
    hash: Vec<u8>,
    generation: i64,
    /// Hash of the decision chain at `from`, where the last copy ended.
    before: Option<Vec<u8>>,
}

/// Copies at most `limit` decisions after `from` into the ledger. Each batch is durable as soon as
/// it is copied, so a killed process continues from there.
pub(crate) async fn copy_decisions(
    connection: &mut PgConnection,
    ledger: &Ledger,
    watch: &DatabaseWatch,
    from: HistoryPosition,
    limit: usize,
) -> Result<CopyResult, sqlx::Error> {
    let (mut from, mut left) = (from, limit);
    while left > 0 {
        let asked = left.min(BATCH);
        let rows: Vec<DecisionRow> = sqlx::query_as(
            "SELECT d.number, d.cluster_id, d.h, d.cause, d.hash, g.number AS generation,
                    (SELECT hash FROM decisions WHERE number = $1) AS before
             FROM decisions d, generation g WHERE d.number > $1 ORDER BY d.number LIMIT $2",
        )
        .bind(from.number as i64)
        .bind(asked as i64)
        .fetch_all(&mut *connection)
        .await?;
        let Some(last) = rows.last() else { return Ok(CopyResult::Done) };
        let generation = ledger.known().map_or(0, |known| known.generation);
        let goes_on = from.number == 0 || last.before.as_deref() == Some(&from.hash.0);
        if last.generation.unsigned_abs() != generation || !goes_on {
            return Ok(CopyResult::OtherHistory);
        }
        let Some(hash) = last.hash.as_slice().try_into().ok().map(Hash) else {
            return Ok(CopyResult::OtherHistory);
        };
        from = HistoryPosition { number: last.number.unsigned_abs(), hash };
        let mut copied = CopiedDecisions::up_to(generation, from);
        for row in &rows {
            add_decision(&mut copied, ledger, watch, row).map_err(failed)?;
        }
        ledger.append_copied(copied).await.map_err(failed)?;
        watch.progress.set_copied(from.number);
        if rows.len() < asked {
            return Ok(CopyResult::Done);
        }
        left -= rows.len();
    }
    Ok(CopyResult::Limited)
}

fn add_decision(
    copied: &mut CopiedDecisions,
    ledger: &Ledger,
    watch: &DatabaseWatch,
    row: &DecisionRow,
) -> Result<(), LedgerError> {
    let known = ledger.entry(row.cluster_id)?;
    let h = row.h.as_deref().and_then(|h| h.try_into().ok()).map(Hash);
    match (h, known) {
        (Some(h), Some(LedgerEntry::Commit { h: known, .. })) if h != known => {
            watch.metrics.count_alarm("split");
            tracing::error!(
                cluster.id = %row.cluster_id, decided = %h, ledger = %known,
                "the database has committed another list than this ledger knows of"
            );
        }
        // This process sent the commit's document out, and now the database confirms the commit.
        // Record that, so that no later check of the database searches for the commit.
        (Some(h), Some(LedgerEntry::Commit { .. })) if ledger.is_unconfirmed(row.cluster_id) => {
            copied.commits.push(pack_commit(row.cluster_id, &h));
        }
        // Replace a known expiry by the later end. An owner can have reopened the expired cluster,
        // which then ended for good.
        (None, None | Some(LedgerEntry::End(EndCause::Deadline))) => {
            copied.ends.extend(row.cause.clone().map(|cause| (row.cluster_id, cause)));
        }
        (Some(_), Some(LedgerEntry::Commit { .. })) | (None, Some(_)) => {}
        (Some(h), _) => copied.commits.push(pack_commit(row.cluster_id, &h)),
    }
    Ok(())
}
