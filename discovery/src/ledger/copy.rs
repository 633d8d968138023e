//! Copying what the database holds into the ledger: what is new, by its number.

use discovery_formation::Hash;
use discovery_formation::memory::{Entry, Mark};
use sqlx::PgConnection;
use uuid::Uuid;

use super::index::{Copied, packed};
use super::{DatabaseWatch, Ledger};

/// Decisions copied by one statement, and in one line.
const BATCH: usize = 1_000;

#[derive(Debug, sqlx::FromRow)]
struct Decision {
    number: i64,
    cluster_id: Uuid,
    h: Option<Vec<u8>>,
    cause: Option<String>,
    hash: Vec<u8>,
    generation: i64,
    /// The chain's hash where the last copy ended.
    before: Option<Vec<u8>>,
}

/// Returns when everything after `from` is durably in the ledger. Copies nothing out of a generation
/// or a history that the ledger doesn't know: who looks at it finds that first.
pub(crate) async fn copy(
    connection: &mut PgConnection,
    ledger: &Ledger,
    watch: &DatabaseWatch,
    from: Mark,
) -> Result<(), sqlx::Error> {
    let mut from = from;
    loop {
        let rows: Vec<Decision> = sqlx::query_as(
            "SELECT d.number, d.cluster_id, d.h, d.cause, d.hash, g.number AS generation,
                    (SELECT hash FROM decisions WHERE number = $1) AS before
             FROM decisions d, generation g WHERE d.number > $1 ORDER BY d.number LIMIT $2",
        )
        .bind(from.number as i64)
        .bind(BATCH as i64)
        .fetch_all(&mut *connection)
        .await?;
        let Some(last) = rows.last() else { return Ok(()) };
        let generation = ledger.known().map_or(0, |known| known.generation);
        let goes_on = from.number == 0 || last.before.as_deref() == Some(&from.hash.0);
        if last.generation.unsigned_abs() != generation || !goes_on {
            return Ok(());
        }
        let Some(hash) = last.hash.as_slice().try_into().ok().map(Hash) else { return Ok(()) };
        from = Mark { number: last.number.unsigned_abs(), hash };
        let mut copied = Copied {
            generation,
            to: from.number,
            hash: data_encoding::HEXLOWER.encode(&from.hash.0),
            commits: Vec::new(),
            ends: Vec::new(),
        };
        for row in &rows {
            add(&mut copied, ledger, watch, row);
        }
        let durable = ledger.take(copied).await;
        durable.map_err(|error| sqlx::Error::Io(std::io::Error::other(error)))?;
        if rows.len() < BATCH {
            return Ok(());
        }
    }
}

fn add(copied: &mut Copied, ledger: &Ledger, watch: &DatabaseWatch, row: &Decision) {
    let known = ledger.entry(row.cluster_id);
    let h = row.h.as_deref().and_then(|h| h.try_into().ok()).map(Hash);
    match (h, known) {
        (Some(h), Some(Entry::Commit { h: known, .. })) if h != known => {
            watch.metrics.alarm("split");
            tracing::error!(
                cluster.id = %row.cluster_id, decided = %h, ledger = %known,
                "the database has committed another list than this ledger knows of"
            );
        }
        (Some(_), Some(Entry::Commit { .. })) | (None, Some(_)) => {}
        (Some(h), _) => copied.commits.push(packed(row.cluster_id, &h)),
        (None, None) => {
            copied.ends.extend(row.cause.clone().map(|cause| (row.cluster_id, cause)));
        }
    }
}
