//! What is refused of the messages that peers send, and what is mended.

use raft::StateRole;
use thiserror::Error;

use super::Consensus;
use crate::{Message, MessageKind};

/// No member is behind by more terms, at an election a second for a century. A term near the highest
/// that there is would be remembered for ever, and leave none to elect a leader in.
const MAX_TERM_AHEAD: u64 = 1 << 32;

/// Why a message was not taken. It had no effect.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum StepError {
    /// For somebody else.
    #[error("a message for {to:016x}")]
    NotForUs {
        /// For whom.
        to: u64,
    },
    /// From somebody who isn't a member, and of a kind that only members send; or from one that was
    /// removed.
    #[error("a message from {from:016x}, who is not a member")]
    NotAMember {
        /// From whom.
        from: u64,
    },
    /// It can't be true: the sender lost data, we did, or somebody lies.
    #[error("{kind:?} from {from:016x} can't be: {what}")]
    Impossible {
        /// From whom.
        from: u64,
        /// What kind.
        kind: MessageKind,
        /// What is wrong.
        what: &'static str,
    },
}

impl Consensus {
    /// Refuses what can't be, mends what the library would mishandle, drops what is stale.
    pub(super) fn check(&mut self, mut message: Message) -> Result<Option<Message>, StepError> {
        if message.to != self.member {
            return Err(StepError::NotForUs { to: message.to });
        }
        if !self.may_say(message.from, message.kind) {
            return Err(StepError::NotAMember { from: message.from });
        }
        if message.term != 0 && message.term < self.raw.raft.term {
            // The library answers or ignores it by its term alone.
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
            // The library would pass it on in the asker's name, to the asker itself if that leads by
            // now. Who asked will ask again.
            MessageKind::ReadIndex if self.raw.raft.state != StateRole::Leader => return Ok(None),
            // A leader that would hand over gives up, and goes on.
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
                return Ok(self.mend_rejection(&mut message).then_some(message));
            }
            _ => {}
        }
        Ok(Some(message))
    }

    /// Whether `from` may send such a message. A member that was away doesn't know of those that came
    /// meanwhile: one of them may lead, or need its vote, and a server takes both from servers that are
    /// not in its configuration (Raft dissertation 4.1). Who may speak at all is the transport's matter.
    fn may_say(&self, from: u64, kind: MessageKind) -> bool {
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

    /// Whether an append that fits the log would change something committed.
    fn contradicts(&self, message: &Message) -> bool {
        let log = &self.raw.raft.raft_log;
        message
            .entries
            .iter()
            .take_while(|entry| entry.index <= log.committed)
            .any(|entry| log.term(entry.index).is_ok_and(|term| term != 0 && term != entry.term))
            && log.match_term(message.index, message.log_term)
    }

    /// A rejection at or below what the peer is known to have is late; one that hints below it is
    /// raised to it: 0.7.0 would send again what the peer has. Returns whether the message still says anything.
    fn mend_rejection(&mut self, message: &mut Message) -> bool {
        if !message.reject || message.request_snapshot != 0 {
            return true;
        }
        let Some(progress) = self.raw.raft.mut_prs().get_mut(message.from) else { return false };
        if message.index <= progress.matched && progress.matched > 0 {
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
