//! Watches which voters can be reached from this host.
//!
//! A voter counts as reachable if its client port answers this agent, or if this host's node has a
//! connection to it. Only a voter that fails both is unreachable. This host's monotonic clock
//! measures for how long. After a break in the watch, the measurement begins again.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::cluster::{ClusterApiClient, ClusterMember, MemberId};
use crate::endpoint::ClientEndpoint;
use crate::exit::error_chain;

/// How often the voters are checked while there is a policy.
const WATCH_INTERVAL: Duration = Duration::from_secs(5);
/// Longest time between two checks that count as one watch without a break.
const MAX_BREAK: Duration = Duration::from_secs(30);

/// The other voters: which of them this host can reach, and since when it can't reach the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reachability {
    /// Other voters at the last check. For a voter that can't be reached, the value is the
    /// beginning of that state.
    voters: BTreeMap<MemberId, Option<Instant>>,
    last_look: Option<Instant>,
}

impl Reachability {
    /// Records the result of a check of all other voters: whether each was reached.
    pub(super) fn record(&mut self, reached: &BTreeMap<MemberId, bool>, now: Instant) {
        let broken = self.last_look.is_none_or(|last| now.duration_since(last) > MAX_BREAK);
        let before = if broken { BTreeMap::new() } else { std::mem::take(&mut self.voters) };
        let since = |(id, is_reached): (&MemberId, &bool)| {
            let earlier = before.get(id).copied().flatten();
            (*id, (!is_reached).then(|| earlier.unwrap_or(now)))
        };
        self.voters = reached.iter().map(since).collect();
        self.last_look = Some(now);
    }

    /// Forgets everything: nobody needs the watch, or this host's own node doesn't answer.
    fn forget(&mut self) {
        *self = Self::default();
    }

    /// Whether a recent check tells anything about this voter.
    pub(crate) fn is_known(&self, id: MemberId, now: Instant) -> bool {
        let is_recent = self.last_look.is_some_and(|last| now.duration_since(last) <= MAX_BREAK);
        is_recent && self.voters.contains_key(&id)
    }

    /// Returns the voters that can't be reached, and for how long.
    pub(crate) fn unreachable(&self, now: Instant) -> Vec<(MemberId, Duration)> {
        let each = self.voters.iter().filter(|(id, _)| self.is_known(**id, now));
        each.filter_map(|(id, since)| Some((*id, now.duration_since((*since)?)))).collect()
    }

    /// Returns for how long this voter has not been reached. `None` if it is reached, or not known.
    pub(crate) fn unreachable_for(&self, id: MemberId, now: Instant) -> Option<Duration> {
        self.unreachable(now).into_iter().find(|(of, _)| *of == id).map(|(_, time)| time)
    }
}

/// Checks the voters again and again while `wanted` is true, and sends the result to `found`. `own`
/// is the client port of this host's node.
pub(super) async fn watch(
    node: ClusterApiClient,
    own: ClientEndpoint,
    mut wanted: watch::Receiver<bool>,
    found: watch::Sender<Reachability>,
) -> Infallible {
    loop {
        if !*wanted.borrow_and_update() {
            found.send_if_modified(|seen| {
                let was_known = seen.last_look.is_some();
                seen.forget();
                was_known
            });
            if wanted.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            continue;
        }
        let looked = look(&node, &own).await;
        found.send_if_modified(|seen| {
            let before: Vec<MemberId> = ids(seen);
            match &looked {
                Ok(reached) => seen.record(reached, Instant::now()),
                Err(why) => {
                    tracing::debug!("it can't be told which voters are reachable: {why}");
                    seen.forget();
                }
            }
            before != ids(seen)
        });
        sleep(WATCH_INTERVAL).await;
    }
}

/// Returns the unreachable voters, for the comparison of two checks.
fn ids(seen: &Reachability) -> Vec<MemberId> {
    seen.voters.iter().filter(|(_, since)| since.is_some()).map(|(id, _)| *id).collect()
}

/// Checks all other voters once, at their client ports and in the node's own connections.
async fn look(
    node: &ClusterApiClient,
    own: &ClientEndpoint,
) -> Result<BTreeMap<MemberId, bool>, String> {
    let status = node.status().await.map_err(|error| error_chain(&error))?;
    let members = node.list_members_serializable().await.map_err(|error| error_chain(&error))?;
    let metrics = own.get_metrics().await.map_err(|error| error_chain(&error))?;
    let connected = connected_peers(&metrics);
    let is_other = |member: &&ClusterMember| !member.is_learner && member.id != status.member_id;
    let others: Vec<&ClusterMember> = members.list.iter().filter(is_other).collect();
    let answers = join_all(others.iter().map(|member| async {
        let is_reached = connected.contains(&member.id) || node.status_of(member).await.is_ok();
        (member.id, is_reached)
    }));
    Ok(answers.await.into_iter().collect())
}

/// Returns the peers to which a node's metrics show a connection, in the words of etcd and of
/// `muster-node`: `etcd_network_active_peers{Local="…",Remote="…"} 1`.
fn connected_peers(metrics: &str) -> Vec<MemberId> {
    let remote = |line: &str| {
        let (labels, value) = line.strip_prefix("etcd_network_active_peers{")?.rsplit_once("} ")?;
        let (_, rest) = labels.split_once("Remote=\"")?;
        let id = rest.split('"').next()?.parse().ok()?;
        (value.trim().parse::<f64>().ok()? > 0.0).then_some(id)
    };
    metrics.lines().filter_map(remote).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MemberId = MemberId(0xa);
    const B: MemberId = MemberId(0xb);

    fn looked(a: bool, b: bool) -> BTreeMap<MemberId, bool> {
        BTreeMap::from([(A, a), (B, b)])
    }

    #[tokio::test(start_paused = true)]
    async fn a_voter_is_unreachable_since_the_first_look_that_failed_without_a_break() {
        let mut seen = Reachability::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!seen.is_known(A, at(0)));
        seen.record(&looked(false, true), at(0));
        seen.record(&looked(false, true), at(20));
        assert_eq!(seen.unreachable(at(25)), [(A, Duration::from_secs(25))]);
        assert_eq!(seen.unreachable_for(B, at(25)), None);
        seen.record(&looked(true, false), at(40));
        seen.record(&looked(false, false), at(50));
        assert_eq!(
            seen.unreachable_for(A, at(50)),
            Some(Duration::ZERO),
            "it was reached meanwhile"
        );
        assert_eq!(seen.unreachable_for(B, at(50)), Some(Duration::from_secs(10)));
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_break_nothing_is_known_and_the_measurement_begins_again() {
        let mut seen = Reachability::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        seen.record(&looked(false, true), at(0));
        assert!(!seen.is_known(A, at(31)) && seen.unreachable(at(31)).is_empty());
        seen.record(&looked(false, true), at(31));
        assert_eq!(seen.unreachable_for(A, at(32)), Some(Duration::from_secs(1)));
        seen.forget();
        assert!(!seen.is_known(A, at(32)));
    }

    #[test]
    fn connections_are_read_from_the_metrics_of_either_program() {
        let metrics = "# TYPE etcd_network_active_peers gauge\n\
            etcd_network_active_peers{Local=\"1\",Remote=\"a\"} 1\n\
            etcd_network_active_peers{Remote=\"b\",Local=\"1\"} 0\n\
            etcd_network_active_peers{Remote=\"ff00000000000001\",Local=\"1\"} 2e0\n\
            etcd_network_active_peers{Remote=\"zz\",Local=\"1\"} 1\n\
            etcd_network_client_grpc_received_bytes_total 4\n";
        assert_eq!(connected_peers(metrics), [A, MemberId(0xff00_0000_0000_0001)]);
    }
}
