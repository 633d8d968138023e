//! Watches which voters can be reached from this host.
//!
//! A voter counts as reachable if its client port answers this agent, or if this host's node has a
//! connection to it. Only a voter that fails both is unreachable. This host's monotonic clock
//! measures for how long. After a break in the watch, the measurement begins again.
//!
//! Stock etcd reads from its peers without a time limit: its `NewTimeoutTransport` sets `Dial`,
//! which Go ignores because `DialContext` is set, too. So etcd keeps the connection to a host that
//! has vanished until TCP gives up, which takes minutes. A connection of stock etcd therefore
//! counts only if one of these facts confirms it:
//! - etcd has received bytes from the peer since the last check. A follower receives none from
//!   another follower, although both live.
//! - The peer port accepts a TCP connection.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::decide::DeadMemberState;
use crate::cluster::{ClusterApiClient, ClusterMember, MemberId};
use crate::endpoint::{CONNECT_DEADLINE, ClientEndpoint};
use crate::exit::error_chain;

/// How often the voters are checked while there is a policy.
const WATCH_INTERVAL: Duration = Duration::from_secs(5);
/// Longest time between two checks that count as one watch without a break.
const MAX_BREAK: Duration = Duration::from_secs(30);

/// The other voters: which of them this host can reach, and since when it can't reach the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reachability {
    /// Other voters at the last check. For a voter that can't be reached, the value is when that
    /// began.
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

    /// Returns the state of `member` as this host alone sees it. `own` is this host's member. It
    /// isn't among the checked voters, and it isn't dead: its own agent calls this function.
    pub(crate) fn state_of(
        &self,
        member: MemberId,
        own: MemberId,
        now: Instant,
    ) -> DeadMemberState {
        match self.unreachable_for(member, now) {
            _ if member == own => DeadMemberState::Back,
            Some(_) => DeadMemberState::Unreachable,
            None if self.is_known(member, now) => DeadMemberState::Back,
            None => DeadMemberState::Unknown,
        }
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
    let mut traffic = PeerTraffic::default();
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
        let looked = look(&node, &own, &mut traffic).await;
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

/// Checks all other voters once: at their ports, and by the connections that this host's node has.
/// Compares those connections with `traffic`, which the previous check has stored, and stores the
/// present traffic there.
async fn look(
    node: &ClusterApiClient,
    own: &ClientEndpoint,
    traffic: &mut PeerTraffic,
) -> Result<BTreeMap<MemberId, bool>, String> {
    let status = node.status().await.map_err(|error| error_chain(&error))?;
    let members = node.list_members_serializable().await.map_err(|error| error_chain(&error))?;
    let metrics = own.get_metrics().await.map_err(|error| error_chain(&error))?;
    let before = std::mem::replace(traffic, PeerTraffic::read(&metrics));
    let is_stock_etcd = members.configuration.is_none();
    let is_other = |member: &&ClusterMember| !member.is_learner && member.id != status.member_id;
    let others: Vec<&ClusterMember> = members.list.iter().filter(is_other).collect();
    let answers = join_all(others.iter().map(|member| {
        let connection = traffic.connection(member.id, &before, is_stock_etcd);
        async move { (member.id, is_reached(node, member, connection).await) }
    }));
    Ok(answers.await.into_iter().collect())
}

/// Whether this host reaches a voter.
async fn is_reached(
    node: &ClusterApiClient,
    member: &ClusterMember,
    connection: PeerConnection,
) -> bool {
    match connection {
        PeerConnection::Confirmed => true,
        PeerConnection::Unconfirmed => {
            node.status_of(member).await.is_ok() || accepts_peers(member).await
        }
        PeerConnection::Missing => node.status_of(member).await.is_ok(),
    }
}

/// Whether any of a member's peer URLs accepts a TCP connection. Also `true` if the addresses of a
/// URL can't be found out: then nothing was observed about the member.
async fn accepts_peers(member: &ClusterMember) -> bool {
    for url in &member.peer_urls {
        let authority = url.split_once("://").map_or(url.as_str(), |(_, rest)| rest);
        let found = timeout(CONNECT_DEADLINE, lookup_host(authority.trim_end_matches('/'))).await;
        let Ok(Ok(addresses)) = found else { return true };
        let addresses: Vec<_> = addresses.collect();
        let connected = timeout(CONNECT_DEADLINE, TcpStream::connect(&addresses[..])).await;
        if matches!(connected, Ok(Ok(_))) {
            return true;
        }
    }
    false
}

/// A node's connection to a peer, as its metrics show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerConnection {
    /// The node has no connection.
    Missing,
    /// The node has a connection, but nothing shows that the peer's host still exists.
    Unconfirmed,
    /// The node has a connection to a peer that lives.
    Confirmed,
}

/// A node's connections to its peers and the bytes received from them, as its metrics show them.
#[derive(Debug, Default)]
struct PeerTraffic {
    connected: BTreeSet<MemberId>,
    received: BTreeMap<MemberId, f64>,
}

impl PeerTraffic {
    /// Reads the metrics of etcd or `muster-node`, which have the same names:
    /// `etcd_network_active_peers{Local="…",Remote="…"} 1` and
    /// `etcd_network_peer_received_bytes_total{From="…"} 4096`.
    fn read(metrics: &str) -> Self {
        let active = |line| sample(line, "etcd_network_active_peers{", "Remote=\"");
        let active = metrics.lines().filter_map(active).filter(|(_, value)| *value > 0.0);
        let received = |line| sample(line, "etcd_network_peer_received_bytes_total{", "From=\"");
        Self {
            connected: active.map(|(id, _)| id).collect(),
            received: metrics.lines().filter_map(received).collect(),
        }
    }

    /// Returns the state of the connection to the member `id`. `before` is the traffic at the last
    /// check. Only a connection of stock etcd can be unconfirmed: `muster-node` itself closes
    /// connections to peers that have vanished.
    fn connection(&self, id: MemberId, before: &Self, is_stock_etcd: bool) -> PeerConnection {
        if !self.connected.contains(&id) {
            return PeerConnection::Missing;
        }
        let has_grown = match (before.received.get(&id), self.received.get(&id)) {
            (Some(before), Some(now)) => now > before,
            _ => false,
        };
        if is_stock_etcd && !has_grown {
            PeerConnection::Unconfirmed
        } else {
            PeerConnection::Confirmed
        }
    }
}

/// Returns the member that a line of metrics names in the label `label`, and the line's value.
/// `None` for lines of other metrics than `name`.
fn sample(line: &str, name: &str, label: &str) -> Option<(MemberId, f64)> {
    let (labels, value) = line.strip_prefix(name)?.rsplit_once("} ")?;
    let (_, rest) = labels.split_once(label)?;
    let id = rest.split('"').next()?.parse().ok()?;
    Some((id, value.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MemberId = MemberId(0xa);
    const B: MemberId = MemberId(0xb);

    fn looked(a: bool, b: bool) -> BTreeMap<MemberId, bool> {
        BTreeMap::from([(A, a), (B, b)])
    }

    /// A replacement can name this host's own member: that member has come back meanwhile, and
    /// leads.
    #[tokio::test(start_paused = true)]
    async fn a_host_needs_no_check_of_its_own_member() {
        const OWN: MemberId = MemberId(0xc);
        let mut seen = Reachability::default();
        let now = Instant::now();
        let states =
            |seen: &Reachability| [A, B, OWN].map(|member| seen.state_of(member, OWN, now));
        use DeadMemberState::{Back, Unknown, Unreachable};
        assert_eq!(states(&seen), [Unknown, Unknown, Back]);
        seen.record(&looked(false, true), now);
        assert_eq!(states(&seen), [Unreachable, Back, Back]);
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
            etcd_network_peer_received_bytes_total{From=\"0\"} 95\n\
            etcd_network_peer_received_bytes_total{From=\"a\"} 1.2345678e+07\n\
            etcd_network_client_grpc_received_bytes_total 4\n";
        let traffic = PeerTraffic::read(metrics);
        let connected = BTreeSet::from([A, MemberId(0xff00_0000_0000_0001)]);
        assert_eq!(traffic.connected, connected);
        assert_eq!(traffic.received, BTreeMap::from([(MemberId(0), 95.0), (A, 12_345_678.0)]));
    }

    /// Returns a node's traffic with A: whether it has a connection, and the bytes received.
    fn traffic(is_connected: bool, received: Option<u32>) -> PeerTraffic {
        PeerTraffic {
            connected: is_connected.then_some(A).into_iter().collect(),
            received: received.map(|bytes| (A, f64::from(bytes))).into_iter().collect(),
        }
    }

    #[test]
    fn a_connection_of_stock_etcd_is_confirmed_only_by_bytes_received_since_the_last_check() {
        let connection = |is_stock_etcd, before, now| {
            traffic(true, now).connection(A, &traffic(true, before), is_stock_etcd)
        };
        assert_eq!(connection(true, Some(5), Some(6)), PeerConnection::Confirmed);
        for (before, now) in [(Some(6), Some(6)), (None, Some(6)), (None, None), (Some(6), Some(5))]
        {
            assert_eq!(connection(true, before, now), PeerConnection::Unconfirmed);
            assert_eq!(connection(false, before, now), PeerConnection::Confirmed);
        }
        let lost = traffic(false, Some(6)).connection(A, &traffic(true, Some(5)), true);
        assert_eq!(lost, PeerConnection::Missing, "its last bytes came before the loss");
    }

    #[tokio::test]
    async fn an_unconfirmed_connection_counts_only_while_the_peer_port_accepts_connections() {
        let node = ClusterApiClient::new(Vec::new());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let member = ClusterMember { id: A, peer_urls: vec![url], ..ClusterMember::default() };
        assert!(is_reached(&node, &member, PeerConnection::Unconfirmed).await);
        assert!(!is_reached(&node, &member, PeerConnection::Missing).await, "nobody answers");
        drop(listener);
        assert!(!is_reached(&node, &member, PeerConnection::Unconfirmed).await);
        assert!(is_reached(&node, &member, PeerConnection::Confirmed).await);
        let unclear = ClusterMember { peer_urls: vec!["https://no-port".to_owned()], ..member };
        assert!(
            is_reached(&node, &unclear, PeerConnection::Unconfirmed).await,
            "nothing was observed about it"
        );
    }
}
