//! Checks whether the database holds what the ledger holds.
//!
//! Most of a ledger was copied from the database's chain of decisions. If the chain's hash still
//! matches, those entries needn't be read again. Two kinds of entries have to be compared:
//!
//! * Commits that this process has sent out, and that no copied part of the chain contains yet
//!   (*unconfirmed*).
//! * Everything that the ledger held when the database's generation began. These entries are
//!   compared once in each generation, and the ledger records that this was done.

use discovery_formation::memory::{LedgerEntry, RestoreAction};
use sqlx::PgConnection;
use uuid::Uuid;

use super::index::{CopiedDecisions, pack_commit};
use super::restore::{BATCH, compare_with_database};
use super::{DatabaseWatch, Ledger, failed};

/// Result of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Agreement {
    /// The database can make no decision that contradicts the ledger.
    Agrees,
    /// The database could make a decision on this cluster that contradicts the ledger.
    Contradicted(Uuid),
    /// More entries have to be compared than the limit allows, or the ledger knows no database yet.
    Unknown,
}

/// Compares at most `limit` of the ledger's entries with the database, and records in the ledger
/// that they were compared.
pub(super) async fn compare_entries(
    connection: &mut PgConnection,
    ledger: &Ledger,
    watch: &DatabaseWatch,
    limit: usize,
) -> Result<Agreement, sqlx::Error> {
    let Some(known) = ledger.known() else { return Ok(Agreement::Unknown) };
    let whole = watch.doubts_all() || !ledger.is_compared();
    let mut copied = CopiedDecisions::up_to(known.generation, known.last_copied);
    copied.compared = whole;
    let (mut after, mut left) = (None, limit);
    loop {
        let size = left.min(BATCH);
        let batch = match whole {
            true => ledger.entries(after, BATCH),
            false => ledger.unconfirmed(after, BATCH),
        }
        .map_err(failed)?;
        let Some((last, _)) = batch.last() else { break };
        if batch.len() > size {
            return Ok(Agreement::Unknown);
        }
        (after, left) = (Some(*last), left - batch.len());
        for planned in compare_with_database(connection, &batch).await? {
            if planned.action != RestoreAction::Nothing {
                return Ok(Agreement::Contradicted(planned.cluster));
            }
            if let LedgerEntry::Commit { h, .. } = planned.entry
                && planned.is_same_commit
                && ledger.is_unconfirmed(planned.cluster)
            {
                copied.commits.push(pack_commit(planned.cluster, &h));
            }
        }
    }
    if whole || !copied.commits.is_empty() {
        ledger.append_copied(copied).await.map_err(failed)?;
    }
    watch.clear_doubts();
    Ok(Agreement::Agrees)
}

/// Whether the database still contradicts the ledger's entry for `cluster`.
pub(super) async fn still_contradicts(
    connection: &mut PgConnection,
    ledger: &Ledger,
    cluster: Uuid,
) -> Result<bool, sqlx::Error> {
    let Some(entry) = ledger.entry(cluster).map_err(failed)? else { return Ok(false) };
    let planned = compare_with_database(connection, &[(cluster, entry)]).await?;
    Ok(planned.iter().any(|planned| planned.action != RestoreAction::Nothing))
}
