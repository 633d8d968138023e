//! Duties of a removed member towards the members that remain.

use raft::StateRole;

use super::Consensus;
use crate::convert::message_to_raft;
use crate::{Message, MessageKind};

impl Consensus {
    /// Returns whether this member has applied its own removal, and no other member needs it any
    /// more.
    ///
    /// A leader that found its own removal to be committed can be the only member that knows of it.
    /// That happens in a cluster of two, for example. A restarted process can be in the same
    /// position, because it no longer knows which leader informed it. Such a member stays until
    /// another member reports the removal to it. Until then it votes, acknowledges appends, and
    /// sends its commit index. A member that learned of its removal from another leader may leave
    /// at once, because that leader knows of the removal.
    pub fn has_left(&self) -> bool {
        !self.members.contains(self.member) && !self.stays_after_removal
    }

    /// Records the term as `last_led_term`, and the commit index as `own_commit`, if this member is
    /// the leader.
    pub(super) fn record_own_commit(&mut self) {
        let raft = &self.raw.raft;
        if raft.state == StateRole::Leader {
            (self.last_led_term, self.own_commit) = (Some(raft.term), raft.raft_log.committed);
        }
    }

    /// Handles a pre-vote request.
    ///
    /// A removed leader can't vote for a candidate whose log is shorter than its own. But that
    /// candidate may need this vote to win. The removed leader then sends its commit index in a
    /// heartbeat, as the leader of its last term. Afterwards the candidate applies the removal, and
    /// counts majorities without the removed leader.
    pub(super) fn handle_pre_vote_request(&mut self, asked: Message) {
        let (to, index, log_term) = (asked.from, asked.index, asked.log_term);
        if self.ignores_votes() && self.members.contains(to) {
            self.deferred.keep_pre_vote_request(asked.clone());
        }
        let _ = self.raw.step(message_to_raft(asked));
        let raft = &self.raw.raft;
        let last_led =
            self.last_led_term.filter(|term| self.stays_after_removal && raft.term == *term);
        // The candidate's last entry is of the last term that this member led. So the candidate's
        // log is a prefix of this member's log.
        if last_led == Some(log_term) && index < raft.raft_log.last_index() {
            let commit = raft.raft_log.committed.min(index);
            let commit_notice = Message::new(MessageKind::Heartbeat, self.member, to);
            self.own_messages.push(Message { term: log_term, commit, ..commit_notice });
        }
    }
}
