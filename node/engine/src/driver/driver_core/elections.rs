//! Elections and transfers of leadership: when this member campaigns, and which voter succeeds it.

use std::cmp::Reverse;

use node_consensus::{PeerState, PeerStatus, Role, Turn};

use super::DriverCore;

impl DriverCore {
    /// Returns whether the connected peers and this member form a quorum of the voters.
    pub fn is_quorum_connected(&self) -> bool {
        let voters = &self.members().voters;
        voters.iter().filter(|voter| self.is_reached(**voter)).count() > voters.len() / 2
    }

    /// Returns whether `member` is this member, or a connected peer.
    fn is_reached(&self, member: u64) -> bool {
        member == self.member || self.connected.contains(&member)
    }

    /// Returns this member's place in the order in which voters campaign one after another: those
    /// that `may_campaign` accepts, by their ids.
    fn turn_among(&self, may_campaign: impl Fn(&u64) -> bool) -> Turn {
        let voters = self.members().voters.iter().filter(|voter| may_campaign(voter));
        let (before, places) = voters.fold((0, 0), |(before, places), voter| {
            (before + usize::from(*voter < self.member), places + 1)
        });
        Turn { place: before, places }
    }

    /// Handles the report that the process of `peer` has ended. If `peer` led, the connected voters
    /// campaign one after another, in the order of their ids. This member campaigns when its turn
    /// comes.
    pub(super) fn succeed(&mut self, peer: u64) {
        let turn = self.turn_among(|voter| *voter != peer && self.is_reached(*voter));
        let (_, _, term) = self.consensus.leadership();
        if self.consensus.forget_leader(peer, turn) {
            self.proposed.leader_ended(term);
        }
    }

    /// Shortens the wait for the first election when a quorum is connected for the first time. If
    /// the connections break and return later, the wait isn't shortened again: the member has
    /// already waited for a heartbeat.
    pub(super) fn hasten_if_connected(&mut self) {
        if self.was_quorum_connected || !self.is_quorum_connected() {
            return;
        }
        self.was_quorum_connected = true;
        if self.options.hasten_first_election {
            self.consensus.hasten_election(self.turn_among(|_| true));
        }
    }

    pub(super) fn campaign_if_connected(&mut self) {
        let (role, leader, term) = self.consensus.leadership();
        if self.options.campaign_when_connected
            && term <= 1
            && leader == 0
            && matches!(role, Role::Follower | Role::PreCandidate)
            && self.is_quorum_connected()
        {
            self.consensus.campaign();
        }
    }

    /// Returns the voter to which this leader would transfer leadership; `None` if no other voter
    /// can be expected to take over.
    pub fn successor(&self) -> Option<u64> {
        self.successor_among(&self.consensus.status().peers)
    }

    /// Returns the best successor among a leader's `peers`.
    ///
    /// A successor must be a voter that is connected and has answered within an election time-out.
    /// Candidates are ranked by:
    /// 1. replication: a voter that receives a stream of entries ranks above all others. Those must
    ///    first be sent a snapshot, or the leader doesn't know their logs yet (Raft's probe state);
    /// 2. promptness: a voter that answers promptly ranks above one that has missed heartbeats;
    /// 3. the length of the voter's log. A successor with a shorter log must first be sent the
    ///    rest, while the cluster takes no proposals.
    pub(in crate::driver) fn successor_among(&self, peers: &[PeerStatus]) -> Option<u64> {
        let able = peers.iter().filter(|peer| {
            self.members().voters.contains(&peer.member)
                && self.connected.contains(&peer.member)
                && peer.silent_ticks.is_some_and(|ticks| ticks < self.election_ticks)
        });
        let best = able.max_by_key(|peer| {
            let streams = peer.state == PeerState::Replicate;
            (streams, peer.is_prompt(), peer.matched, Reverse(peer.silent_ticks))
        });
        best.map(|peer| peer.member)
    }

    /// Transfers leadership if this leader's disk has not completed a write for two election
    /// time-outs.
    pub(super) fn transfer_from_stuck_disk(&mut self) {
        let stuck = self
            .waiting
            .front()
            .is_some_and(|oldest| self.now - oldest.since > 2 * self.election_ticks);
        if stuck
            && self.consensus.leadership().0 == Role::Leader
            && !self.consensus.is_transferring()
            && let Some(to) = self.successor()
        {
            self.consensus.transfer_leader(to);
        }
    }
}
