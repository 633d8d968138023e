//! Queries on whole clusters: drafts, first statements, lists, and the sweep's work.

use discovery_formation as formation;
use discovery_formation::service::{Cluster, EndCause, FormationSettings, next_deadline};
use discovery_types::api::SILENT_AFTER;
use discovery_types::grant::Grant;
use discovery_types::jws::{Jws, JwsType};
use discovery_types::statement::Statement;
use ipnet::IpNet;
use uuid::Uuid;

use super::cluster::{
    Authorities, AuthorityRow, CHANNEL, add_statement, append_event, authorities,
};
use super::{ListPosition, Store, StoreError, UnixMicros};
use crate::ca::NewCa;
use crate::domain::number_to_row;
use crate::ledger;

/// Row of a cluster in a list.
#[derive(Clone, Debug, sqlx::FromRow)]
pub(crate) struct ClusterSummaryRow {
    pub id: Uuid,
    pub name: String,
    /// Number of seats, from 1 to 9.
    pub size: i16,
    /// Phase of the cluster, or `draft`.
    pub phase: String,
    pub epoch: i64,
    /// When the draft was made.
    pub created_us: UnixMicros,
    /// When the cluster expires if it hasn't committed.
    pub deadline_us: UnixMicros,
    /// Number of occupied seats.
    pub seated: i64,
    /// Number of agents that wait for a seat.
    pub standbys: i64,
    /// Number of members in the confirmed list. If no list is confirmed yet, the cluster's size.
    pub members: Option<i64>,
    /// Number of members that reported recently and weren't removed.
    pub reporting_members: i64,
}

/// Columns of a summary row that are in the table `clusters`.
const SUMMARY_OWN: &str = "c.id, c.name, c.size, c.phase, c.epoch, c.created_us, c.deadline_us";

/// Columns of a summary row that are counted in other tables. A member without a report in the last
/// `$1` microseconds counts as silent.
const SUMMARY_COUNTS: &str = "
    (SELECT count(*) FROM agents a WHERE a.cluster_id = c.id AND a.seat IS NOT NULL) AS seated,
    (SELECT count(*) FROM agents a WHERE a.cluster_id = c.id AND a.standby IS NOT NULL) AS standbys,
    coalesce((SELECT jsonb_array_length(d.membership::jsonb -> 'members') FROM directory d
        WHERE d.cluster_id = c.id), c.size)::bigint AS members,
    (SELECT count(*) FROM directory_reports r WHERE r.cluster_id = c.id
        AND r.at_us > now_us() - $1
        AND NOT EXISTS (SELECT 1 FROM removed_members m
            WHERE m.cluster_id = c.id AND m.member_id = r.member_id)) AS reporting_members";

/// Filter of the list of clusters.
#[derive(Clone, Debug)]
pub(crate) struct ClusterFilter<'a> {
    /// Only clusters with this name are listed, if one is given.
    pub name: Option<&'a str>,
    /// Only clusters in one of these phases are listed.
    pub phases: &'a [&'static str],
    /// The clusters were created at this time or later.
    pub created_from_us: UnixMicros,
    /// Position in the list of all clusters after which the returned list begins.
    pub after: &'a ListPosition,
    /// Maximum number of clusters; the newest are listed.
    pub limit: i64,
}

pub(super) fn silent_after_us() -> UnixMicros {
    UnixMicros::try_from(SILENT_AFTER.as_micros()).unwrap_or(UnixMicros::MAX)
}

/// Position in the list of forming clusters, oldest first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FormingPosition {
    created_us: UnixMicros,
    id: Uuid,
}

impl FormingPosition {
    /// Start of a walk over the forming clusters, which goes from the oldest to the newest.
    pub(crate) const START: FormingPosition =
        FormingPosition { created_us: UnixMicros::MIN, id: Uuid::nil() };
}

/// Source address and grant of an agent.
#[derive(Clone, Debug, sqlx::FromRow)]
pub(crate) struct Origin {
    pub key: Vec<u8>,
    /// The last source address of the agent.
    pub address: Option<String>,
    /// JWS of the agent's grant. `None` if the agent is known from a commit document only.
    pub grant_jws: Option<String>,
}

impl Origin {
    /// Returns the networks that the agent's token is bound to. An empty list means any network.
    pub(crate) fn bound_to(&self) -> Vec<IpNet> {
        let jws = self.grant_jws.as_ref().and_then(|jws| jws.parse::<Jws>().ok());
        let grant = jws.and_then(|jws| jws.claims_unverified::<Grant>(JwsType::Grant).ok());
        grant.map(|grant| grant.cidrs).unwrap_or_default()
    }
}

/// A draft of a cluster.
#[derive(Clone, Debug)]
pub(crate) struct Draft {
    pub name: String,
    /// Number of seats, from 1 to 9.
    pub size: i16,
    /// Peer CA and client CA of the draft.
    pub authorities: Authorities,
}

/// Result of storing a cluster's first statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenResult {
    /// The draft has become an open cluster.
    Open,
    /// There is no draft with this id: it has expired, or its cluster is open already.
    NoDraft,
    /// Another live cluster has the same name.
    NameTaken,
}

/// A CA and its wrapped key, to be stored.
pub(crate) struct WrappedCa {
    /// The CA with its unwrapped key.
    pub ca: NewCa,
    /// Key of the CA, wrapped by the KEK.
    pub wrapped_key: Vec<u8>,
}

/// Maximum number of rows that the sweep takes at once.
const SWEEP_BATCH: i64 = 100;
/// Maximum number of used assertions that are deleted at once.
const ASSERTIONS_BATCH: i64 = 1_000;

impl Store {
    /// Stores a draft. Returns the time at which it expires.
    pub(crate) async fn add_draft(
        &self,
        id: Uuid,
        name: &str,
        size: u8,
        by: &str,
        life: std::time::Duration,
        [peer, client]: [&WrappedCa; 2],
    ) -> Result<UnixMicros, StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        let deadline: i64 = sqlx::query_scalar(
            "INSERT INTO clusters (id, name, size, phase, created_us, created_by, deadline_us)
             VALUES ($1, $2, $3, 'draft', now_us(), $4, now_us() + $5) RETURNING deadline_us",
        )
        .bind(id)
        .bind(name)
        .bind(i16::from(size))
        .bind(by)
        .bind(i64::try_from(life.as_micros()).unwrap_or(i64::MAX / 2))
        .fetch_one(&mut *transaction)
        .await?;
        for (purpose, ca) in [("peer", peer), ("client", client)] {
            sqlx::query(
                "INSERT INTO authorities (cluster_id, purpose, certificate, wrapped_key)
                 VALUES ($1, $2, $3, $4)",
            )
            .bind(id)
            .bind(purpose)
            .bind(&ca.ca.certificate)
            .bind(&ca.wrapped_key)
            .execute(&mut *transaction)
            .await?;
        }
        transaction.commit().await?;
        Ok(deadline)
    }

    /// Whether a live cluster has this name.
    pub(crate) async fn is_name_taken(&self, name: &str) -> Result<bool, StoreError> {
        let taken = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM clusters WHERE name = $1
                 AND phase IN ('open', 'preparing', 'committed', 'formed'))",
        )
        .bind(name)
        .fetch_one(&mut *self.acquire().await?)
        .await?;
        Ok(taken)
    }

    /// Returns a draft that hasn't expired.
    pub(crate) async fn draft(&self, id: Uuid) -> Result<Option<Draft>, StoreError> {
        let mut connection = self.acquire().await?;
        let row: Option<(String, i16)> = sqlx::query_as(
            "SELECT name, size FROM clusters
             WHERE id = $1 AND phase = 'draft' AND deadline_us > now_us()",
        )
        .bind(id)
        .fetch_optional(&mut *connection)
        .await?;
        let Some((name, size)) = row else { return Ok(None) };
        let authorities = authorities(&mut connection, id).await?;
        Ok(Some(Draft { name, size, authorities }))
    }

    /// Turns a draft into an open cluster, given its verified first statement.
    pub(crate) async fn open_cluster(
        &self,
        statement: formation::Statement,
        jws: &Jws,
        deadline_seconds: u64,
        settings: &FormationSettings,
        by: &str,
    ) -> Result<OpenResult, StoreError> {
        let id = Uuid::from_u128(statement.cluster.0);
        let mut transaction = self.begin("BEGIN").await?;
        let draft: Option<Uuid> = sqlx::query_scalar(
            "SELECT id FROM clusters WHERE id = $1 AND phase = 'draft' FOR UPDATE",
        )
        .bind(id)
        .fetch_optional(&mut *transaction)
        .await?;
        let now: i64 = sqlx::query_scalar("SELECT now_us()").fetch_one(&mut *transaction).await?;
        if draft.is_none() {
            return Ok(OpenResult::NoDraft);
        }
        let now = formation::UnixMicros(now.unsigned_abs());
        let deadline = now.after(formation::Millis(deadline_seconds.saturating_mul(1_000)));
        let cluster = Cluster::opened(statement, deadline);
        let next = next_deadline(&cluster, settings, now);
        let opened = sqlx::query(
            "UPDATE clusters SET phase = 'open', deadline_us = $2, epoch = $3, rev = $4,
                 next_place = $5, next_deadline_us = $6 WHERE id = $1",
        )
        .bind(id)
        .bind(number_to_row(deadline.0)?)
        .bind(number_to_row(cluster.epoch)?)
        .bind(number_to_row(cluster.rev)?)
        .bind(number_to_row(cluster.next_queue_number)?)
        .bind(next.map(|at| number_to_row(at.0)).transpose()?)
        .execute(&mut *transaction)
        .await
        .map_err(StoreError::from);
        match opened {
            Ok(_) => {}
            Err(StoreError::UniqueViolation { .. }) => return Ok(OpenResult::NameTaken),
            Err(error) => return Err(error),
        }
        add_statement(&mut transaction, id, now, jws).await?;
        let body = serde_json::json!({ "by": by });
        append_event(&mut transaction, id, now, "open", &body).await?;
        transaction.commit().await?;
        Ok(OpenResult::Open)
    }

    /// Inserts a cluster that a ledger holds but this database lacks: its row, CAs and statements.
    /// The cluster is open until the caller adopts its commit document. The row of an existing
    /// cluster that isn't a draft stays unchanged; only missing CAs and statements are added. If
    /// another cluster has the name, the new name ends in a part of the id.
    pub(crate) async fn restore_cluster(
        &self,
        statements: &[Jws],
        first: &Statement,
        authorities: [&AuthorityRow; 2],
    ) -> Result<(), StoreError> {
        let own = first.name.as_str();
        match self.restore_as(own, statements, first, authorities).await {
            Err(StoreError::UniqueViolation { .. }) => {
                let id = first.cluster.simple().to_string();
                let short: String = own.chars().take(50).collect();
                let name = format!("{short}-{}", &id[id.len() - 8..]);
                self.restore_as(&name, statements, first, authorities).await
            }
            done => done,
        }
    }

    async fn restore_as(
        &self,
        name: &str,
        statements: &[Jws],
        first: &Statement,
        [peer, client]: [&AuthorityRow; 2],
    ) -> Result<(), StoreError> {
        let id = first.cluster;
        let mut transaction = self.begin("BEGIN").await?;
        // A database restored from a backup may contain this cluster as a draft, or not at all.
        sqlx::query(
            "INSERT INTO clusters (id, name, size, phase, created_us, created_by, deadline_us, rev)
             VALUES ($1, $2, $3, 'open', now_us(), 'ledger', now_us() + 86400000000, 1)
             ON CONFLICT (id) DO UPDATE SET phase = 'open', deadline_us = now_us() + 86400000000,
                 rev = 1 WHERE clusters.phase = 'draft'",
        )
        .bind(id)
        .bind(name)
        .bind(i16::from(first.size))
        .execute(&mut *transaction)
        .await?;
        let now: i64 = sqlx::query_scalar("SELECT now_us() FROM clusters WHERE id = $1 FOR UPDATE")
            .bind(id)
            .fetch_one(&mut *transaction)
            .await?;
        for (purpose, ca) in [("peer", peer), ("client", client)] {
            sqlx::query(
                "INSERT INTO authorities (cluster_id, purpose, certificate, wrapped_key)
                 VALUES ($1, $2, $3, $4) ON CONFLICT (cluster_id, purpose) DO NOTHING",
            )
            .bind(id)
            .bind(purpose)
            .bind(&ca.certificate)
            .bind(&ca.wrapped_key)
            .execute(&mut *transaction)
            .await?;
        }
        let there: i64 =
            sqlx::query_scalar("SELECT count(*) FROM statements WHERE cluster_id = $1")
                .bind(id)
                .fetch_one(&mut *transaction)
                .await?;
        let now = formation::UnixMicros(now.unsigned_abs());
        for jws in statements.iter().skip(there as usize) {
            add_statement(&mut transaction, id, now, jws).await?;
        }
        transaction.commit().await?;
        Ok(())
    }

    /// Returns the clusters that fit the filter, newest first.
    pub(crate) async fn clusters(
        &self,
        filter: &ClusterFilter<'_>,
    ) -> Result<Vec<ClusterSummaryRow>, StoreError> {
        let sql = list_statement(filter);
        let rows = sqlx::query_as(sqlx::AssertSqlSafe(sql))
            .bind(silent_after_us())
            .bind(filter.created_from_us)
            .bind(filter.after.at_us)
            .bind(&filter.after.id)
            .bind(filter.name)
            .fetch_all(&mut *self.acquire().await?)
            .await?;
        Ok(rows)
    }

    /// Returns the list row of one cluster, which may be a draft.
    pub(crate) async fn summary(&self, id: Uuid) -> Result<Option<ClusterSummaryRow>, StoreError> {
        let sql = format!("SELECT {SUMMARY_OWN}, {SUMMARY_COUNTS} FROM clusters c WHERE c.id = $2");
        let row = sqlx::query_as(sqlx::AssertSqlSafe(sql))
            .bind(silent_after_us())
            .bind(id)
            .fetch_optional(&mut *self.acquire().await?)
            .await?;
        Ok(row)
    }

    /// Returns the source address and grant of each of a cluster's agents.
    pub(crate) async fn origins(&self, id: Uuid) -> Result<Vec<Origin>, StoreError> {
        let rows = sqlx::query_as(
            "SELECT a.key, a.address, g.jws AS grant_jws FROM agents a
             LEFT JOIN grants g ON g.id = a.grant_id WHERE a.cluster_id = $1",
        )
        .bind(id)
        .fetch_all(&mut *self.acquire().await?)
        .await?;
        Ok(rows)
    }

    /// Returns the CA for peers and the CA for clients of a cluster.
    pub(crate) async fn authorities(&self, id: Uuid) -> Result<Authorities, StoreError> {
        let mut connection = self.acquire().await?;
        authorities(&mut connection, id).await
    }

    /// Returns a batch of clusters whose next deadline has passed, except for the clusters in
    /// `stuck`.
    pub(crate) async fn due_clusters(&self, stuck: &[Uuid]) -> Result<Vec<Uuid>, StoreError> {
        let rows = sqlx::query_scalar(
            // The time is a subquery, because Postgres uses no index to compare with a volatile
            // function.
            "SELECT id FROM clusters WHERE next_deadline_us <= (SELECT now_us())
                 AND id <> ALL($2)
             ORDER BY next_deadline_us LIMIT $1",
        )
        .bind(SWEEP_BATCH)
        .bind(stuck)
        .fetch_all(&mut *self.acquire().await?)
        .await?;
        Ok(rows)
    }

    /// Returns the next batch of clusters that are still forming, and moves `position` to the last
    /// of them. An empty batch means that there are no more.
    pub(crate) async fn forming_clusters(
        &self,
        position: &mut FormingPosition,
    ) -> Result<Vec<Uuid>, StoreError> {
        self.forming_clusters_where("true", position).await
    }

    /// Returns the next batch of clusters that can't proceed before the database is settled.
    /// `position` moves as in [`Store::forming_clusters`].
    pub(crate) async fn unsettled_clusters(
        &self,
        position: &mut FormingPosition,
    ) -> Result<Vec<Uuid>, StoreError> {
        self.forming_clusters_where("unsettled", position).await
    }

    /// Returns the next batch of forming clusters for which `condition` holds. Reads the index
    /// `clusters_by_phase` in its order, once for each phase.
    async fn forming_clusters_where(
        &self,
        condition: &'static str,
        position: &mut FormingPosition,
    ) -> Result<Vec<Uuid>, StoreError> {
        let branch = |phase: &str| {
            format!(
                "(SELECT created_us, id FROM clusters
                  WHERE phase = '{phase}' AND (created_us, id) > ($1, $2) AND {condition}
                  ORDER BY created_us, id LIMIT {SWEEP_BATCH})"
            )
        };
        let branches = [branch("open"), branch("preparing")].join(" UNION ALL ");
        let sql = format!("{branches} ORDER BY created_us, id LIMIT {SWEEP_BATCH}");
        let rows: Vec<(UnixMicros, Uuid)> = sqlx::query_as(sqlx::AssertSqlSafe(sql))
            .bind(position.created_us)
            .bind(position.id)
            .fetch_all(&mut *self.acquire().await?)
            .await?;
        if let Some((created_us, id)) = rows.last() {
            *position = FormingPosition { created_us: *created_us, id: *id };
        }
        Ok(rows.into_iter().map(|(_, id)| id).collect())
    }

    /// Deletes expired drafts and expired assertions.
    pub(crate) async fn delete_expired(&self) -> Result<(), StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        let dead: Vec<Uuid> = sqlx::query_scalar(
            "SELECT id FROM clusters WHERE phase = 'draft' AND deadline_us <= (SELECT now_us())
             ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED",
        )
        .bind(SWEEP_BATCH)
        .fetch_all(&mut *transaction)
        .await?;
        sqlx::query("DELETE FROM authorities WHERE cluster_id = ANY($1)")
            .bind(&dead)
            .execute(&mut *transaction)
            .await?;
        sqlx::query("DELETE FROM clusters WHERE id = ANY($1)")
            .bind(&dead)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        // Delete batches until none is left: one address alone may use more assertions than a batch
        // between two sweeps.
        loop {
            // Keep assertions for a minute after their end, for clocks that are behind. `SKIP
            // LOCKED` skips rows that another process is deleting. Waiting for those could return
            // an empty batch and end the loop.
            let deleted = sqlx::query(
                "WITH batch AS (
                     SELECT key, jti FROM used_assertions
                     WHERE expires_us < (SELECT now_us() - 60000000)
                     ORDER BY expires_us LIMIT $1 FOR UPDATE SKIP LOCKED)
                 DELETE FROM used_assertions USING batch
                 WHERE used_assertions.key = batch.key AND used_assertions.jti = batch.jti",
            )
            .bind(ASSERTIONS_BATCH)
            .execute(&mut *self.acquire().await?)
            .await?
            .rows_affected();
            if deleted < ASSERTIONS_BATCH.unsigned_abs() {
                return Ok(());
            }
        }
    }

    /// Stores an error of the service as the last error of a forming cluster.
    pub(crate) async fn note_error(&self, id: Uuid, text: &str) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE clusters SET error_us = now_us(), error_key = NULL, error_text = $2
             WHERE id = $1 AND phase IN ('open', 'preparing')",
        )
        .bind(id)
        .bind(text)
        .execute(&mut *self.acquire().await?)
        .await?;
        Ok(())
    }

    /// Abandons a forming cluster without parsing its rows, so damaged rows can't prevent it.
    /// Returns `false` if the cluster isn't forming.
    pub(crate) async fn abandon_unread(
        &self,
        id: Uuid,
        cause: EndCause,
        by: &str,
    ) -> Result<bool, StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        let ended: Option<i64> = sqlx::query_scalar(
            "UPDATE clusters SET phase = 'abandoned', ended_cause = $2, ended_us = now_us(),
                 ended_by = $3, frozen_epoch = NULL, frozen_h = NULL, frozen_statement = NULL,
                 frozen_us = NULL, unsettled = false, rev = rev + 1, next_deadline_us = NULL
             WHERE id = $1 AND phase IN ('open', 'preparing') RETURNING ended_us",
        )
        .bind(id)
        .bind(cause.as_str())
        .bind(by)
        .fetch_optional(&mut *transaction)
        .await?;
        let Some(ended) = ended else { return Ok(false) };
        sqlx::query("DELETE FROM frozen_seats WHERE cluster_id = $1")
            .bind(id)
            .execute(&mut *transaction)
            .await?;
        let body = serde_json::json!({ "phase": "abandoned", "unread": true });
        let now = formation::UnixMicros(ended.unsigned_abs());
        append_event(&mut transaction, id, now, "ended", &body).await?;
        sqlx::query("SELECT pg_notify($1, $2)")
            .bind(CHANNEL)
            .bind(id.to_string())
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(true)
    }

    /// Notifies other processes that clusters have changed. Postgres doesn't wait for the disk,
    /// because the SQL statement writes no row. A notification may be lost, so the connection isn't
    /// pinged first.
    pub(crate) async fn notify_clusters(&self, clusters: &[Uuid]) -> Result<(), StoreError> {
        sqlx::query("SELECT pg_notify($1, id::text) FROM unnest($2::uuid[]) AS id")
            .bind(CHANNEL)
            .bind(clusters)
            .execute(&mut *self.pool.acquire().await?)
            .await?;
        Ok(())
    }

    /// Deletes a draft that must never become a cluster.
    pub(crate) async fn drop_draft(&self, id: Uuid) -> Result<(), StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        for sql in [
            "DELETE FROM authorities a USING clusters c
             WHERE c.id = a.cluster_id AND c.id = $1 AND c.phase = 'draft'",
            "DELETE FROM clusters WHERE id = $1 AND phase = 'draft'",
        ] {
            sqlx::query(sql).bind(id).execute(&mut *transaction).await?;
        }
        transaction.commit().await?;
        Ok(())
    }

    /// Records that a commit from a ledger can't be restored in this database.
    pub(crate) async fn note_refused_commit(
        &self,
        commit: &ledger::Commit,
        why: &str,
    ) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO refused_commits (cluster_id, h, process, why, refused_us)
             VALUES ($1, decode($2, 'hex'), $3, $4, now_us()) ON CONFLICT DO NOTHING",
        )
        .bind(commit.cluster_id)
        .bind(&commit.h)
        .bind(self.ledger.process())
        .bind(why)
        .execute(&mut *self.acquire().await?)
        .await?;
        Ok(())
    }
}

/// Returns the SQL statement that lists clusters. Its parameters are: `$1` as in
/// [`SUMMARY_COUNTS`], `$2` the filter's `created_from_us`, `$3` and `$4` its position, and `$5`
/// its `name`. The limit is a part of the SQL text: a plan for any limit would read and sort all
/// clusters.
///
/// Each phase is a branch of its own. The index `clusters_by_phase` has the clusters of one phase
/// in the order of the list, but not those of several phases.
fn list_statement(filter: &ClusterFilter<'_>) -> String {
    let name = if filter.name.is_some() { "c.name = $5" } else { "$5::text IS NULL" };
    let limit = filter.limit;
    let branch = |phase: &&str| {
        format!(
            "(SELECT {SUMMARY_OWN} FROM clusters c
              WHERE c.phase = '{phase}' AND c.created_us >= $2
                  AND (c.created_us, c.id) < ($3, $4::uuid) AND {name}
              ORDER BY c.created_us DESC, c.id DESC LIMIT {limit})"
        )
    };
    let branches: Vec<String> = filter.phases.iter().map(branch).collect();
    format!(
        "SELECT c.*, {SUMMARY_COUNTS}
         FROM (SELECT * FROM ({}) b ORDER BY created_us DESC, id DESC LIMIT {limit}) c
         ORDER BY c.created_us DESC, c.id DESC",
        branches.join(" UNION ALL ")
    )
}
