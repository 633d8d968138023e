//! Campaigns before the election time-out ends: at once on request, soon after a start, and after
//! the end of the leader's process.
//!
//! A member that has heard from a leader within an election time-out ignores requests for votes
//! (Raft dissertation 4.2.3). A member that learns that its leader's process has ended forgets the
//! leader, and then answers such requests. So a candidate wins early only if a majority knows that
//! the leader's process has ended. If that was a false report, the leader's next heartbeat makes
//! the member follow the leader again, in the same term.
//!
//! Members that begin to wait at the same moment must not campaign at the same moment, because they
//! would split the votes. They campaign in turn instead ([`Turn`]).

use raft::StateRole;

use super::Consensus;
use crate::convert::message_to_raft;

/// Ticks for which a starting member waits for a leader's heartbeat before the first turn. A member
/// that campaigns although there is a leader does no harm, because members that hear from a leader
/// ignore its request.
const HASTENED_TICKS: usize = 1;

/// Ticks between two members' turns. An election takes less than a tick. One tick would still be
/// too short, because members' ticks begin at different times.
const TURN_TICKS: usize = 2;

/// A member's place among the voters that campaign in turn. All voters should number these places
/// alike. If they don't, two may campaign at once and split the votes; the next turn tries again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// This member's place in the order of turns; 0 is the first one.
    pub place: usize,
    /// Number of voters that campaign in turn.
    pub places: usize,
}

impl Turn {
    fn wait(self) -> usize {
        TURN_TICKS * self.place
    }

    fn period(self) -> usize {
        TURN_TICKS * self.places.max(1)
    }
}

/// State of a member that takes turns in campaigning, and waits for its next turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Succession {
    /// Term in which the wait for a turn began.
    term: u64,
    /// Ticks until this member's next turn.
    wait: usize,
    /// Ticks between two turns of this member.
    period: usize,
    /// Ticks for which this member still takes turns. After that, only the election time-out makes
    /// it campaign.
    left: usize,
}

impl Consensus {
    /// Campaigns at once, if this member may do so and knows no leader.
    pub fn campaign(&mut self) {
        if self.raw.raft.promotable() && self.raw.raft.leader_id == 0 && !self.must_not_campaign() {
            // The library refuses to campaign while a change of members is committed and not
            // applied, because that change could take this member's vote. The next election
            // time-out tries again.
            let _ = self.raw.campaign();
            self.after_input();
        }
    }

    /// Shortens the wait for the first election after a start: this member campaigns at its turns,
    /// and the first turn comes after one tick. The caller uses this if the member knows no leader
    /// although its peers are connected.
    pub fn hasten_election(&mut self, turn: Turn) {
        let raft = &self.raw.raft;
        if raft.state == StateRole::Follower && raft.leader_id == 0 {
            self.await_turn(HASTENED_TICKS + turn.wait(), turn);
        }
    }

    /// Handles the report that the process of the member `leader` has ended. If this member follows
    /// that leader, it forgets the leader, and campaigns at its turns until a new leader is known.
    /// After an election time-out its turns end. While a snapshot is being installed, the report is
    /// ignored. Returns whether this member has forgotten the leader.
    pub fn forget_leader(&mut self, leader: u64, turn: Turn) -> bool {
        let raft = &self.raw.raft;
        let follows = raft.state == StateRole::Follower && raft.leader_id == leader;
        if !follows || self.is_restoring() {
            return false;
        }
        let raft = &mut self.raw.raft;
        raft.become_follower(raft.term, 0);
        let requests = self.deferred.take_pre_vote_requests();
        // Another member already campaigns, so this one lets its first turn pass.
        let wait = if requests.is_empty() { turn.wait() } else { turn.period() };
        for request in requests {
            let _ = self.raw.step(message_to_raft(request));
        }
        self.after_input();
        self.await_turn(wait, turn);
        if wait == 0 {
            self.take_turn();
        }
        true
    }

    fn await_turn(&mut self, wait: usize, turn: Turn) {
        self.succession = Some(Succession {
            term: self.raw.raft.term,
            wait,
            period: turn.period(),
            left: self.election_ticks,
        });
    }

    /// Advances the wait for this member's turn by one tick, and campaigns if the turn has come.
    pub(super) fn tick_succession(&mut self) {
        let raft = &self.raw.raft;
        let waits = matches!(raft.state, StateRole::Follower | StateRole::PreCandidate);
        let may_wait = |wait: &mut Succession| {
            waits && wait.left > 0 && raft.leader_id == 0 && raft.term == wait.term
        };
        self.succession = self.succession.take_if(may_wait);
        let Some(succession) = &mut self.succession else { return };
        succession.left -= 1;
        succession.wait = succession.wait.saturating_sub(1);
        if succession.wait == 0 {
            self.take_turn();
        }
    }

    fn take_turn(&mut self) {
        if let Some(succession) = &mut self.succession {
            succession.wait = succession.period;
        }
        self.campaign();
    }

    /// Returns whether this member ignores requests for votes, because it has heard from its leader
    /// within an election time-out.
    pub(super) fn ignores_votes(&self) -> bool {
        let raft = &self.raw.raft;
        raft.state == StateRole::Follower
            && raft.leader_id != 0
            && raft.election_elapsed < self.election_ticks
    }

    /// Returns whether this member must not campaign now, for the reasons given at [`Self::tick`].
    pub(super) fn must_not_campaign(&self) -> bool {
        let raft = &self.raw.raft;
        let is_alone = self.members.voters == [self.member];
        let writes = raft.raft_log.persisted < raft.raft_log.last_index();
        self.is_restoring() || (is_alone && writes && raft.state != StateRole::Leader)
    }
}
