//! The number of clusters in each state, without reading every cluster; and the number of silent
//! members, in small batches.
//!
//! A state with few clusters is counted in the index `clusters_by_phase`. The number in a larger
//! state comes from the statistics that Postgres' autovacuum gathers. An exact count of a million
//! rows would read them all each time, or need a counter row that every change of a cluster
//! updates.

use discovery_types::api::{ClusterState, RELEASED};
use uuid::Uuid;

use super::clusters::silent_after_us;
use super::{Store, StoreError, UnixMicros};

/// Maximum number of clusters of one state that are counted. A result below this limit is exact.
/// Any other result is an estimate, which is never lower than the limit.
pub(crate) const MAX_COUNTED: i64 = 500;

/// The numbers of clusters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClusterCounts {
    /// Number of clusters in each state.
    pub by_state: Vec<(ClusterState, i64)>,
    /// Age of the oldest cluster that is still forming, in microseconds.
    pub oldest_forming_age_us: Option<i64>,
}

/// Number of clusters in one batch of [`Store::count_silent_members`].
const SILENT_BATCH: usize = 100;
/// States of the clusters whose members can be silent.
const SILENT_STATES: [ClusterState; 2] = [ClusterState::Committed, ClusterState::Formed];

/// A count of the silent members of all clusters, which proceeds in batches of clusters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SilentMembersCount {
    /// Index of the current state in [`SILENT_STATES`].
    state: usize,
    /// Creation time and id of the last cluster in the previous batch, after which the next batch
    /// starts. `None` before the first batch of each state in [`SILENT_STATES`].
    after: Option<(UnixMicros, Uuid)>,
    /// Number of silent members in the batches that are counted already.
    silent: i64,
}

/// Row of a cluster: when it was created, its id, and the number of its silent members.
type SilentRow = (UnixMicros, Uuid, i64);

impl SilentMembersCount {
    /// Adds the silent members of a batch of clusters. After the last batch, returns the number of
    /// silent members in all clusters and starts a new count.
    fn add(&mut self, batch: &[SilentRow]) -> Option<i64> {
        self.silent += batch.iter().map(|(_, _, silent)| silent).sum::<i64>();
        if batch.len() >= SILENT_BATCH {
            self.after = batch.last().map(|(created_us, id, _)| (*created_us, *id));
            return None;
        }
        (self.state, self.after) = (self.state + 1, None);
        if self.state < SILENT_STATES.len() {
            return None;
        }
        Some(std::mem::take(self).silent)
    }
}

impl Store {
    /// Counts the silent members of the next batch of clusters. After the last batch, returns the
    /// number of silent members in all clusters.
    pub(crate) async fn count_silent_members(
        &self,
        count: &mut SilentMembersCount,
    ) -> Result<Option<i64>, StoreError> {
        let state = SILENT_STATES[count.state];
        let (created_us, id) = count.after.unwrap_or((UnixMicros::MIN, Uuid::nil()));
        let mut transaction = self.begin(BEGIN_IN_INDEX_ORDER).await?;
        let batch: Vec<SilentRow> = sqlx::query_as(SILENT_MEMBERS)
            .bind(state.as_str())
            .bind(created_us)
            .bind(id)
            .bind(SILENT_BATCH as i64)
            .bind(silent_after_us())
            .bind(RELEASED)
            .fetch_all(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(count.add(&batch))
    }

    /// Counts the clusters in each state, and finds the oldest one that is still forming.
    pub(crate) async fn count_clusters(&self) -> Result<ClusterCounts, StoreError> {
        let mut transaction = self.begin(BEGIN_IN_INDEX_ORDER).await?;
        let counted: Vec<(String, i64)> = sqlx::query_as(sqlx::AssertSqlSafe(count_statement()))
            .fetch_all(&mut *transaction)
            .await?;
        let estimated: Vec<(String, i64)> =
            match counted.iter().any(|(_, number)| *number >= MAX_COUNTED) {
                true => sqlx::query_as(ESTIMATE).fetch_all(&mut *transaction).await?,
                false => Vec::new(),
            };
        let oldest_forming_age_us =
            sqlx::query_scalar(OLDEST_FORMING).fetch_one(&mut *transaction).await?;
        transaction.commit().await?;
        let by_state = ClusterState::ALL.map(|state| (state, number(state, &counted, &estimated)));
        Ok(ClusterCounts { by_state: by_state.into(), oldest_forming_age_us })
    }
}

/// Returns the number of clusters in a state: the counted number, or the estimate from Postgres'
/// statistics if the count reached its limit and the estimate is higher.
fn number(state: ClusterState, counted: &[(String, i64)], estimated: &[(String, i64)]) -> i64 {
    let find = |numbers: &[(String, i64)]| {
        let found = numbers.iter().find(|(phase, _)| phase == state.as_str());
        found.map_or(0, |(_, number)| *number)
    };
    match find(counted) {
        counted if counted < MAX_COUNTED => counted,
        counted => counted.max(find(estimated)),
    }
}

/// Begins a transaction in which Postgres reads in index order. Otherwise it would read and sort
/// all clusters of a state to find the first [`MAX_COUNTED`].
const BEGIN_IN_INDEX_ORDER: &str = "BEGIN READ ONLY; SET LOCAL enable_seqscan = off; \
     SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off";

/// Returns the SQL statement that counts the clusters of each state, at most [`MAX_COUNTED`]. It
/// reads in the order of the index, so Postgres can stop reading the index at the limit.
fn count_statement() -> String {
    let branch = |state: ClusterState| {
        let phase = state.as_str();
        format!(
            "SELECT '{phase}' AS phase, count(*) AS number FROM (SELECT FROM clusters
                 WHERE phase = '{phase}' ORDER BY created_us, id LIMIT {MAX_COUNTED}) c"
        )
    };
    ClusterState::ALL.map(branch).join(" UNION ALL ")
}

/// The number of clusters in each frequent state, by Postgres' statistics. Without statistics, or
/// without the right to read them, there is no row.
const ESTIMATE: &str = "
    SELECT v.phase, (greatest(c.reltuples, 0) * v.frequency)::bigint AS number
    FROM pg_class c
    JOIN pg_stats s ON s.schemaname = c.relnamespace::regnamespace::text
        AND s.tablename = c.relname AND s.attname = 'phase' AND NOT s.inherited
    CROSS JOIN LATERAL unnest(s.most_common_vals::text::text[], s.most_common_freqs)
        AS v (phase, frequency)
    WHERE c.oid = 'clusters'::regclass";

/// Age of the oldest forming cluster. Reads the first row of each forming phase from
/// `clusters_by_phase`.
const OLDEST_FORMING: &str = "
    SELECT now_us() - min(created_us) FROM (
        (SELECT created_us FROM clusters WHERE phase = 'open' ORDER BY created_us, id LIMIT 1)
        UNION ALL
        (SELECT created_us FROM clusters WHERE phase = 'preparing' ORDER BY created_us, id LIMIT 1)
    ) forming";

/// SQL that returns the number of silent members of each cluster in a batch. The cluster's members
/// are those of its confirmed list, or the founders before a list is confirmed. A member isn't
/// silent if it was heard in the last `$5` microseconds or was released. A cluster whose list was
/// decided in that time has no silent members.
const SILENT_MEMBERS: &str = "
    SELECT c.created_us, c.id, CASE WHEN c.frozen_us > now_us() - $5 THEN 0 ELSE greatest(0,
        coalesce((SELECT jsonb_array_length(d.membership::jsonb -> 'members') FROM directory d
            WHERE d.cluster_id = c.id), c.size)
        - (SELECT count(*) FROM (
            SELECT r.member_id FROM directory_reports r
            WHERE r.cluster_id = c.id AND r.at_us > now_us() - $5
            UNION
            SELECT t.member_id FROM member_troubles t
            WHERE t.cluster_id = c.id AND (t.at_us > now_us() - $5
                OR t.detail = $6 AND NOT EXISTS (SELECT 1 FROM directory_reports r
                    WHERE r.cluster_id = c.id AND r.member_id = t.member_id AND r.at_us >= t.at_us))
        ) heard WHERE NOT EXISTS (SELECT 1 FROM removed_members m
            WHERE m.cluster_id = c.id AND m.member_id = heard.member_id))
    ) END::bigint AS silent
    FROM (SELECT created_us, id, size, frozen_us FROM clusters
        WHERE phase = $1 AND (created_us, id) > ($2, $3) ORDER BY created_us, id LIMIT $4) c
    ORDER BY c.created_us, c.id";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_members_are_counted_over_full_batches_and_both_states() {
        let rows = |numbers: std::ops::Range<u128>| -> Vec<SilentRow> {
            numbers.map(|n| (n as i64, Uuid::from_u128(n), 1)).collect()
        };
        let mut count = SilentMembersCount::default();
        assert_eq!(count.add(&rows(0..3)), None, "the formed clusters are missing");
        assert_eq!((count.state, count.after), (1, None));
        assert_eq!(count.add(&rows(0..100)), None, "there may be more clusters");
        assert_eq!(count.after, Some((99, Uuid::from_u128(99))));
        assert_eq!(count.add(&rows(100..107)), Some(110));
        assert_eq!(count, SilentMembersCount::default());
        assert_eq!((count.add(&[]), count.add(&[])), (None, Some(0)));
    }

    #[test]
    fn only_a_state_that_was_not_counted_to_its_end_is_estimated() {
        let row = |state: ClusterState, number: i64| (state.as_str().to_owned(), number);
        let (open, formed) = (ClusterState::Open, ClusterState::Formed);
        let counted = [row(open, MAX_COUNTED - 1), row(formed, MAX_COUNTED)];
        let estimated = [row(open, 2_000), row(formed, 1_000_000)];
        assert_eq!(number(open, &counted, &estimated), MAX_COUNTED - 1);
        assert_eq!(number(formed, &counted, &estimated), 1_000_000);
        assert_eq!(number(formed, &counted, &[]), MAX_COUNTED);
        assert_eq!(number(formed, &counted, &[row(formed, 3)]), MAX_COUNTED);
        assert_eq!(number(ClusterState::Retired, &counted, &estimated), 0);
    }
}
