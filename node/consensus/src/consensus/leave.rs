//! A member that was removed, and what it still owes to those who stay.

use raft::StateRole;

use super::Consensus;
use crate::convert::message_in;
use crate::{Message, MessageKind};

impl Consensus {
    /// Whether this member has applied its own removal, and nobody needs it any more.
    ///
    /// One that found out itself, as the leader, may be the only one that knows, of two members for
    /// example, that its removal is committed; so may one that was told before its process ended, and
    /// has forgotten by whom. It stays, votes, tells, and acknowledges what it is sent, until somebody else
    /// says so. One that another leader has told since knows that this one knows.
    pub fn has_left(&self) -> bool {
        !self.members.contains(self.member) && !self.stays
    }

    /// While it leads, what it knows to be committed is its own finding.
    pub(super) fn note_found(&mut self) {
        let raft = &self.raw.raft;
        if raft.state == StateRole::Leader {
            (self.led, self.found) = (Some(raft.term), raft.raft_log.committed);
        }
    }

    /// Somebody would stand for election.
    ///
    /// A removed leader can't give its vote to one whose log is shorter than its own, and may be asked
    /// for it by one who can't win without. It tells that one what is committed instead, as the leader of
    /// its last term still may: after that the other counts without it.
    pub(super) fn ask_for_vote(&mut self, asked: Message) {
        let (to, index, log_term) = (asked.from, asked.index, asked.log_term);
        let _ = self.raw.step(message_in(asked));
        let raft = &self.raw.raft;
        let last_led = self.led.filter(|term| self.stays && raft.term == *term);
        // A log whose last entry this member made in that term is the beginning of its own.
        if last_led == Some(log_term) && index < raft.raft_log.last_index() {
            let commit = raft.raft_log.committed.min(index);
            let told = Message::new(MessageKind::Heartbeat, self.member, to);
            self.saying.push(Message { term: log_term, commit, ..told });
        }
    }
}
