//! Checks on peers' messages: which are refused, and which are corrected before the library sees
//! them.

use raft::StateRole;
use thiserror::Error;

use super::Consensus;
use crate::{Message, MessageKind};

/// Maximum number of terms that a message may be ahead of this member. No member falls further
/// behind, even with an election a second for a century. Members never forget a term. So a term
/// near the largest possible number would leave no terms for later elections.
const MAX_TERM_AHEAD: u64 = 1 << 32;

/// Reason why a message was refused. A refused message has no effect.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum StepError {
    /// The message is addressed to another member.
    #[error("a message for {to:016x}")]
    NotForUs {
        /// Member that the message is addressed to.
        to: u64,
    },
    /// The sender was removed, or it is no member and sent a kind of message that only members may
    /// send.
    #[error("a message from {from:016x}, who is not a member")]
    NotAMember {
        /// Sender of the message.
        from: u64,
    },
    /// The message contradicts this member's state: the sender or this member has lost data, or the
    /// sender lies.
    #[error("{kind:?} from {from:016x} can't be: {what}")]
    Impossible {
        /// Sender of the message.
        from: u64,
        kind: MessageKind,
        /// Contradiction that was found.
        what: &'static str,
    },
}

impl Consensus {
    /// Refuses impossible messages, corrects those that the library would mishandle, and drops
    /// stale ones (`None`).
    pub(super) fn check(&mut self, mut message: Message) -> Result<Option<Message>, StepError> {
        if message.to != self.member {
            return Err(StepError::NotForUs { to: message.to });
        }
        if !self.may_send(message.from, message.kind) {
            return Err(StepError::NotAMember { from: message.from });
        }
        if message.term != 0 && message.term < self.raw.raft.term {
            // A message of an older term needs no further check. The library answers or ignores it
            // because of its term, and reads no other field.
            return Ok(Some(message));
        }
        let impossible =
            |what| Err(StepError::Impossible { from: message.from, kind: message.kind, what });
        if message.term.saturating_sub(self.raw.raft.term) > MAX_TERM_AHEAD {
            return impossible("no elections lead to its term");
        }
        let log = &self.raw.raft.raft_log;
        match message.kind {
            MessageKind::Unknown | MessageKind::Propose => {
                return impossible("proposals are proposed, not stepped");
            }
            // The library would forward the request in the requester's name. If the requester leads
            // by now, it would get its own request back. It retries in any case.
            MessageKind::ReadIndex if self.raw.raft.state != StateRole::Leader => return Ok(None),
            // Drop the request. The leader that transfers its leadership gives up after a while,
            // and stays leader.
            MessageKind::TimeoutNow if self.is_restoring() => return Ok(None),
            MessageKind::Heartbeat if message.commit > log.last_index() => {
                return impossible("it commits entries that are not in this member's log");
            }
            MessageKind::Append if self.contradicts(&message) => {
                return impossible("it contradicts committed entries");
            }
            MessageKind::Append
            | MessageKind::Heartbeat
            | MessageKind::Snapshot
            | MessageKind::TimeoutNow
                if message.term == self.raw.raft.term
                    && self.raw.raft.state == StateRole::Leader =>
            {
                return impossible("two leaders of one term");
            }
            MessageKind::AppendResponse
                if self.raw.raft.state == StateRole::Leader
                    && message.term == self.raw.raft.term =>
            {
                if !message.reject && message.index > log.last_index() {
                    return impossible("it acknowledges entries that were never sent");
                }
                return Ok(self.correct_rejection(&mut message).then_some(message));
            }
            _ => {}
        }
        Ok(Some(message))
    }

    /// Returns whether `from` may send a message of this kind. A sender that is not a member here
    /// may have been added while this member was offline. It may be the leader, or need this
    /// member's vote. A Raft server accepts such requests from servers that are not in its
    /// configuration (Raft dissertation 4.1). The transport decides which peers may connect.
    fn may_send(&self, from: u64, kind: MessageKind) -> bool {
        let anybody = matches!(
            kind,
            MessageKind::Append
                | MessageKind::Heartbeat
                | MessageKind::Snapshot
                | MessageKind::RequestPreVote
                | MessageKind::RequestVote
        );
        self.raw.raft.prs().get(from).is_some() || (anybody && !self.removed.contains(&from))
    }

    /// Returns whether an append that fits the log would replace a committed entry.
    fn contradicts(&self, message: &Message) -> bool {
        let log = &self.raw.raft.raft_log;
        message
            .entries
            .iter()
            .take_while(|entry| entry.index <= log.committed)
            .any(|entry| log.term(entry.index).is_ok_and(|term| term != 0 && term != entry.term))
            && log.match_term(message.index, message.log_term)
    }

    /// Corrects a peer's rejection of an append. Returns false if the message must be dropped. A
    /// rejection at or below the peer's `matched` index is late, and is dropped. Otherwise, if the
    /// index that the peer proposes (`reject_hint`) is below `matched`, it is raised to `matched`.
    /// Without this, raft 0.7.0 would again send entries that the peer has.
    fn correct_rejection(&mut self, message: &mut Message) -> bool {
        if !message.reject || message.request_snapshot != 0 {
            return true;
        }
        let Some(progress) = self.raw.raft.mut_prs().get_mut(message.from) else { return false };
        if message.index <= progress.matched && progress.matched > 0 {
            // The rejection is late and is dropped. It proves nevertheless that the peer is alive.
            progress.recent_active = true;
            return false;
        }
        if message.reject_hint < progress.matched {
            message.reject_hint = progress.matched;
            message.log_term = 0;
        }
        true
    }
}
