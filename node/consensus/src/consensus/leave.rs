//! Duties of a removed member towards the members that remain.

use raft::StateRole;

use super::Consensus;
use crate::convert::message_to_raft;
use crate::{Message, MessageKind};

impl Consensus {
    /// Returns whether this member has applied its own removal, and no other member needs it any
    /// more.
    ///
    /// A leader that found the commit of its own removal may be the only member that knows of it,
    /// for example of two members. A process that has restarted may be in the same position: it no
    /// longer knows which leader informed it. Such a member stays until another member informs it
    /// that it was removed. Until then it votes, acknowledges appends, and says what is committed.
    /// A member that another leader has informed may leave, because that leader knows of the
    /// removal.
    pub fn has_left(&self) -> bool {
        !self.members.contains(self.member) && !self.stays_after_removal
    }

    /// Records, while this member is the leader, the commit index as its own finding.
    pub(super) fn record_own_commit(&mut self) {
        let raft = &self.raw.raft;
        if raft.state == StateRole::Leader {
            (self.last_led_term, self.own_commit) = (Some(raft.term), raft.raft_log.committed);
        }
    }

    /// Handles a vote request of any kind.
    ///
    /// A removed leader can't vote for a candidate whose log is shorter than its own. But that
    /// candidate may be unable to win without its vote. The removed leader then sends what is
    /// committed, which it may do as the leader of its last term. Afterwards the candidate counts
    /// majorities without it.
    pub(super) fn handle_vote_request(&mut self, asked: Message) {
        let (to, index, log_term) = (asked.from, asked.index, asked.log_term);
        let _ = self.raw.step(message_to_raft(asked));
        let raft = &self.raw.raft;
        let last_led =
            self.last_led_term.filter(|term| self.stays_after_removal && raft.term == *term);
        // This member made the last entry of that log in its last term, so that log is a prefix of
        // its own.
        if last_led == Some(log_term) && index < raft.raft_log.last_index() {
            let commit = raft.raft_log.committed.min(index);
            let commit_notice = Message::new(MessageKind::Heartbeat, self.member, to);
            self.own_messages.push(Message { term: log_term, commit, ..commit_notice });
        }
    }
}
