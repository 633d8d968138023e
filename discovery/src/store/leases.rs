//! Renews the leases of agents that wait, and moves the next deadlines of their clusters. Neither
//! operation locks a cluster before it reads, and neither decides anything.

use discovery_formation as formation;
use discovery_types::api::PollRequest;
use discovery_types::key::PublicKey;
use uuid::Uuid;

use super::{Store, StoreError, UnixMicros};
use crate::domain::number_to_row;

/// An agent's poll that only has to extend the agent's lease, if the cluster is still as the agent
/// has seen it.
#[derive(Clone, Debug)]
pub(crate) struct LeaseRenewal {
    /// Cluster that the agent polls.
    pub cluster: Uuid,
    /// Public key of the agent.
    pub key: Vec<u8>,
    /// Number of times that the agent has started.
    pub boot: i64,
    /// Random number of this run of the agent.
    pub nonce: Vec<u8>,
    /// Highest epoch that the agent has signed or released.
    pub highest_epoch: i64,
    /// Value of the cluster's change counter (column `clusters.rev`) that the agent has seen.
    pub rev: i64,
}

impl LeaseRenewal {
    /// Returns the renewal for an agent's poll. Returns `None` if the agent has seen no value of
    /// the cluster's change counter, or if the database can't hold a number of the poll.
    pub(crate) fn of_poll(cluster: Uuid, key: &PublicKey, poll: &PollRequest) -> Option<Self> {
        Some(LeaseRenewal {
            cluster,
            key: key.as_bytes().to_vec(),
            boot: number_to_row(poll.boot).ok()?,
            nonce: poll.nonce.as_bytes().to_vec(),
            highest_epoch: number_to_row(poll.highest_epoch).ok()?,
            rev: number_to_row(poll.after?).ok()?,
        })
    }
}

/// Renews the leases that `$1` to `$6` ask for, in the generation `$8` of the database. A renewed
/// lease ends `$7` microseconds from now. Returns the index of each renewed lease in those arrays,
/// and its cluster's next deadline.
///
/// A lease is renewed only if the whole poll would change nothing else. The cluster must be open,
/// and its change counter must have the value that the agent has seen. The agent must have a place
/// that hasn't lapsed, and its boot counter and nonce must be the stored ones. Rows that another
/// transaction has locked are skipped.
const RENEW: &str = "
WITH asked AS (
    SELECT * FROM unnest($1::uuid[], $2::bytea[], $3::bigint[], $4::bytea[], $5::bigint[],
        $6::bigint[]) WITH ORDINALITY
        AS t (cluster_id, key, boot, nonce, highest_epoch, rev, place)
), fit AS (
    SELECT asked.place, a.cluster_id, a.key, c.next_deadline_us, t.now
    FROM asked
        JOIN clusters c ON c.id = asked.cluster_id
        JOIN agents a ON a.cluster_id = asked.cluster_id AND a.key = asked.key
        CROSS JOIN generation g
        CROSS JOIN (SELECT now_us() AS now OFFSET 0) t
    WHERE g.number = $8 AND g.settled
        AND c.phase = 'open' AND c.rev = asked.rev AND c.deadline_us > t.now
        AND NOT c.unsettled AND c.split_other IS NULL
        AND (a.seat IS NOT NULL OR a.standby IS NOT NULL)
        AND a.lease_us > t.now AND a.lease_us <= t.now + $7
        AND a.boot = asked.boot AND a.nonce = asked.nonce
        AND a.highest_epoch = asked.highest_epoch
    FOR UPDATE OF a SKIP LOCKED
)
UPDATE agents a SET lease_us = fit.now + $7
FROM fit WHERE a.cluster_id = fit.cluster_id AND a.key = fit.key
RETURNING fit.place, fit.next_deadline_us";

/// Moves the next deadlines of clusters in `$1`. Such a deadline can have passed although no
/// agent's lease has expired, because the agents have renewed their leases since. Returns all
/// clusters in `$1` that aren't due any more, with their next deadlines.
///
/// The new deadline is that of `next_deadline` in the formation crate, for an open cluster. It is
/// at most one lease of `$2` microseconds away. A cluster that has changed since it was read keeps
/// the deadline that the change has stored.
///
/// If the backoff of an agent with a seat has ended since the stored deadline, something is due:
/// the cluster's list of members can perhaps be frozen now.
const POSTPONE: &str = "
WITH due AS (
    SELECT c.id, c.rev, c.next_deadline_us, t.now, least(c.deadline_us, t.now + $2, (
        SELECT min(least(a.lease_us,
            CASE WHEN a.seat IS NOT NULL AND a.held_us > t.now THEN a.held_us END))
        FROM agents a
        WHERE a.cluster_id = c.id AND (a.seat IS NOT NULL OR a.standby IS NOT NULL))) AS next_us
    FROM clusters c CROSS JOIN generation g CROSS JOIN (SELECT now_us() AS now OFFSET 0) t
    WHERE c.id = ANY($1) AND c.phase = 'open' AND c.next_deadline_us <= t.now AND g.settled
        AND NOT c.unsettled AND c.split_other IS NULL
        AND NOT EXISTS (SELECT FROM agents a WHERE a.cluster_id = c.id AND a.seat IS NOT NULL
            AND a.held_us BETWEEN c.next_deadline_us AND t.now)
), moved AS (
    UPDATE clusters c SET next_deadline_us = due.next_us FROM due
    WHERE c.id = due.id AND c.rev = due.rev AND c.next_deadline_us = due.next_deadline_us
        AND due.next_us > due.now
    RETURNING c.id, c.next_deadline_us
)
SELECT id, next_deadline_us FROM moved
UNION ALL
SELECT id, next_deadline_us FROM clusters
WHERE id = ANY($1) AND next_deadline_us > (SELECT now_us())";

impl Store {
    /// Renews leases in one SQL statement. The result has one item for each renewal, in the order
    /// of `renewals`. If the lease was renewed, the item is the cluster's next deadline, which can
    /// be earlier than necessary. If the poll needs a transaction, the item is `None`. `generation`
    /// is the database's generation that this process knows.
    pub(crate) async fn renew_leases(
        &self,
        renewals: &[LeaseRenewal],
        lease: formation::Millis,
        generation: i64,
    ) -> Result<Vec<Option<UnixMicros>>, StoreError> {
        let renewed: Vec<(i64, Option<UnixMicros>)> = sqlx::query_as(RENEW)
            .bind(renewals.iter().map(|renewal| renewal.cluster).collect::<Vec<_>>())
            .bind(renewals.iter().map(|renewal| &renewal.key[..]).collect::<Vec<_>>())
            .bind(renewals.iter().map(|renewal| renewal.boot).collect::<Vec<_>>())
            .bind(renewals.iter().map(|renewal| &renewal.nonce[..]).collect::<Vec<_>>())
            .bind(renewals.iter().map(|renewal| renewal.highest_epoch).collect::<Vec<_>>())
            .bind(renewals.iter().map(|renewal| renewal.rev).collect::<Vec<_>>())
            .bind(lease_us(lease)?)
            .bind(generation)
            .fetch_all(&mut *self.acquire().await?)
            .await?;
        let mut next = vec![None; renewals.len()];
        for (place, next_deadline) in renewed {
            let place = usize::try_from(place).unwrap_or_default().saturating_sub(1);
            // The deadline is never null, because an open cluster always has one.
            if let Some(slot) = next.get_mut(place) {
                *slot = next_deadline;
            }
        }
        Ok(next)
    }

    /// Postpones the stored deadlines of clusters whose agents have renewed their leases since the
    /// deadlines were stored. Returns the clusters that aren't due now, with their next deadlines.
    pub(crate) async fn postpone_deadlines(
        &self,
        clusters: &[Uuid],
        lease: formation::Millis,
    ) -> Result<Vec<(Uuid, UnixMicros)>, StoreError> {
        let postponed = sqlx::query_as(POSTPONE).bind(clusters).bind(lease_us(lease)?);
        Ok(postponed.fetch_all(&mut *self.acquire().await?).await?)
    }
}

fn lease_us(lease: formation::Millis) -> Result<i64, StoreError> {
    Ok(number_to_row(lease.0.saturating_mul(1_000))?)
}
