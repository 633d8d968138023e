//! Published status of this member, and the times at which its leader and connections changed.

use std::sync::Arc;
use std::time::Instant;

use node_consensus::{Members, PeerStatus, Position, Role};

use super::driver_core::DriverCore;
use super::error::ProposeError;
use crate::witness::Promise;

/// Status of this member, as the core thread last published it.
#[derive(Clone, Debug)]
pub struct NodeStatus {
    pub member: u64,
    /// Leader known to this member; 0 if it knows none.
    pub leader: u64,
    /// Current term of this member.
    pub term: u64,
    pub role: Role,
    /// Highest index that this member knows to be committed.
    pub commit: u64,
    /// Position of the last entry applied.
    pub applied: Position,
    /// Position of the last entry that the store holds durably.
    pub durable: Position,
    /// First index that the log has.
    pub first: u64,
    /// Last index in the log, durable or not.
    pub last: u64,
    /// Start of the current period in which this member and its connected peers form a quorum;
    /// `None` without a quorum.
    pub quorum_connected: Option<Instant>,
    /// Time at which this member last lost a leader.
    pub leader_lost: Option<Instant>,
    /// Promises that this member has made to others.
    pub promised: Promise,
    /// Leaders only: index of an entry after all applied changes of members. A member that has this
    /// entry on disk knows the current members.
    pub barrier_index: Option<u64>,
    /// Leaders only: replication status of the other members.
    pub peers: Vec<PeerStatus>,
    /// Voter to which this member would transfer leadership. `None` if it isn't the leader, or no
    /// voter is suitable.
    pub successor: Option<u64>,
    /// Voters and learners of the current configuration.
    pub members: Arc<Members>,
    /// Whether this member was removed, and the cluster no longer needs it.
    pub has_left: bool,
    /// Whether this member may be the only one that knows of its removal.
    pub may_be_only_one_to_know_removal: bool,
}

/// Returns whether a member that was removed may end when the peer `by` reports the removal.
///
/// `may_alone_know` is whether possibly no other voter knows of the removal. If so, a learner's
/// report isn't enough. A voter that doesn't know of the removal may then still need the removed
/// member's vote. The learner can't give a vote instead, because candidates don't ask learners. A
/// voter's report is enough, because it shows that another voter knows of the removal.
#[must_use]
pub fn accepts_removal_report(by: u64, members: &Members, may_alone_know: bool) -> bool {
    !(may_alone_know && members.learners.contains(&by))
}

impl NodeStatus {
    /// Returns the current status of `driver`, which runs on `member`.
    pub(super) fn of(driver: &DriverCore, member: u64, seen: &Observations) -> Self {
        let status = driver.status();
        let (applied, durable) = driver.positions();
        Self {
            member,
            leader: status.leader,
            term: status.term,
            role: status.role,
            commit: status.commit,
            applied,
            durable,
            first: status.first,
            last: status.last,
            quorum_connected: seen.quorum_connected,
            leader_lost: seen.leader_lost,
            promised: driver.promised(),
            barrier_index: status.barrier_index,
            successor: driver.successor_among(&status.peers),
            peers: status.peers,
            members: Arc::clone(driver.members()),
            has_left: driver.has_left(),
            may_be_only_one_to_know_removal: driver.may_be_only_one_to_know_removal(),
        }
    }

    /// Returns the error for a request that began at `started` and got no answer in time. The cases
    /// are those of etcd's `parseProposeCtxErr` (server/etcdserver/errors).
    pub(super) fn timeout_error(&self, started: Instant) -> ProposeError {
        let after = |at: Instant| at >= started;
        if self.leader_lost.is_some_and(after) {
            ProposeError::TimeoutLeaderFailed
        } else if self.leader == 0 {
            ProposeError::NoLeader
        } else if self.quorum_connected.is_none_or(after) {
            ProposeError::TimeoutConnectionLost
        } else {
            ProposeError::Timeout
        }
    }
}

/// Times at which leader and connections last changed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Observations {
    /// Leader that was known at the last observation; 0 if there was none.
    pub leader: u64,
    leader_lost: Option<Instant>,
    quorum_connected: Option<Instant>,
}

impl Observations {
    /// Records the present leader and connections. Returns whether the leader has changed.
    pub(super) fn observe(&mut self, leader: u64, is_quorum_connected: bool, now: Instant) -> bool {
        self.quorum_connected = self.quorum_connected.or(Some(now)).filter(|_| is_quorum_connected);
        let changed = leader != self.leader;
        if changed && self.leader != 0 {
            self.leader_lost = Some(now);
        }
        self.leader = leader;
        changed
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(start: Instant, millis: u64) -> Instant {
        start + Duration::from_millis(millis)
    }

    #[test]
    fn a_leader_counts_as_lost_also_when_another_replaces_it() {
        let (mut seen, start) = (Observations::default(), Instant::now());
        assert!(!seen.observe(0, false, start) && seen.observe(2, false, at(start, 1)));
        assert_eq!(seen.leader_lost, None, "there was none before");
        assert!(!seen.observe(2, false, at(start, 2)) && seen.observe(3, false, at(start, 3)));
        assert_eq!(seen.leader_lost, Some(at(start, 3)));
        assert!(seen.observe(0, false, at(start, 4)) && seen.observe(3, false, at(start, 5)));
        assert_eq!(seen.leader_lost, Some(at(start, 4)), "nobody is no leader to lose");
    }

    #[test]
    fn quorum_connected_is_the_start_of_the_current_unbroken_period() {
        let (mut seen, start) = (Observations::default(), Instant::now());
        seen.observe(0, true, start);
        seen.observe(0, true, at(start, 1));
        assert_eq!(seen.quorum_connected, Some(start));
        seen.observe(0, false, at(start, 2));
        assert_eq!(seen.quorum_connected, None);
        seen.observe(0, true, at(start, 3));
        assert_eq!(seen.quorum_connected, Some(at(start, 3)));
    }

    #[test]
    fn a_timed_out_request_gets_the_first_reason_that_fits() {
        let start = Instant::now();
        let late = |leader, leader_lost: Option<u64>, quorum_connected: Option<u64>| {
            let mut status = crate::driver::peers::test_inbox::status();
            status.leader = leader;
            status.leader_lost = leader_lost.map(|millis| at(start, millis));
            status.quorum_connected = quorum_connected.map(|millis| at(start, millis));
            status.timeout_error(at(start, 5))
        };
        assert_eq!(late(0, None, Some(1)), ProposeError::NoLeader);
        assert_eq!(late(0, Some(4), Some(1)), ProposeError::NoLeader);
        assert_eq!(late(0, Some(5), Some(1)), ProposeError::TimeoutLeaderFailed);
        assert_eq!(late(2, Some(6), None), ProposeError::TimeoutLeaderFailed);
        assert_eq!(late(2, Some(4), None), ProposeError::TimeoutConnectionLost);
        assert_eq!(late(2, None, Some(5)), ProposeError::TimeoutConnectionLost);
        assert_eq!(late(2, None, Some(4)), ProposeError::Timeout);
    }
}
