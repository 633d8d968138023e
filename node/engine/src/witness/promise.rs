//! Promises of a member, and the state of its disk with which they are compared.

use node_consensus::{Message, MessageKind};

/// Everything that a member is known to have promised to others, by votes and acknowledgements. It
/// was on the member's disk before the message with the promise was sent. The following holds for
/// the disk at any later time:
/// - The term never goes back, and a member votes at most once in a term.
/// - Within one term, a member's log follows the log of that term's leader, and the leader never
///   truncates its own log. So the member's log doesn't end before an index that the member
///   acknowledged in that term. In a higher term the log may end earlier, because uncommitted
///   entries can be replaced.
/// - A committed entry is in the log of every later leader, so it is never truncated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Promise {
    /// Highest term in which the member is known to have voted or acknowledged entries.
    pub term: u64,
    /// Member that received the vote in the term [`Self::term`]; 0 if no vote is known.
    pub vote: u64,
    /// Highest index that the member acknowledged in the term [`Self::term`].
    pub matched: u64,
    /// Highest index, acknowledged in any term, whose entry was known to be committed.
    pub floor: u64,
}

impl Promise {
    /// Returns the promise that the sender makes by `message`, if it makes one.
    ///
    /// Only messages that wait for the disk make a promise. A pre-vote message makes none, because
    /// it names a term that no member has entered yet. An append makes none, because a leader may
    /// send entries before its own disk has them.
    pub fn of(message: &Message) -> Option<Self> {
        let promise = Self { term: message.term, ..Self::default() };
        match message.kind {
            MessageKind::RequestVote => Some(Self { vote: message.from, ..promise }),
            MessageKind::RequestVoteResponse if !message.reject => {
                Some(Self { vote: message.to, ..promise })
            }
            MessageKind::AppendResponse if !message.reject => {
                Some(Self { matched: message.index, ..promise })
            }
            _ => None,
        }
    }

    /// Returns this promise with its `floor` raised, for a member that in `term` knows entries up
    /// to `commit` to be committed. If `term` is later than the promise's term, the promise is
    /// returned unchanged: the committed entries may differ from the acknowledged ones.
    #[must_use]
    pub fn with_commit(self, term: u64, commit: u64) -> Self {
        if term > self.term {
            return self;
        }
        Self { floor: self.floor.max(self.matched.min(commit)), ..self }
    }

    /// Returns the combination of two promises of one member.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        let (low, high) = if self.term < other.term { (self, other) } else { (other, self) };
        let mut both = Self { floor: low.floor.max(high.floor), ..high };
        if low.term == high.term {
            both.matched = low.matched.max(high.matched);
            if both.vote == 0 {
                both.vote = low.vote;
            }
        }
        both
    }
}

/// State that a member found on its own disk when its process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskState {
    /// Current term on the disk.
    pub term: u64,
    /// Member that received the vote in the term [`Self::term`]; 0 if none did.
    pub vote: u64,
    /// Index of the last entry in the log.
    pub last: u64,
}

impl DiskState {
    /// Returns whether the disk has everything that `promise` requires.
    pub fn keeps(&self, promise: &Promise) -> bool {
        let in_term = self.term > promise.term
            || self.term == promise.term
                && (promise.vote == 0 || promise.vote == self.vote)
                && promise.matched <= self.last;
        in_term && promise.floor <= self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn promise(term: u64, vote: u64, matched: u64, floor: u64) -> Promise {
        Promise { term, vote, matched, floor }
    }

    fn disk(term: u64, vote: u64, last: u64) -> DiskState {
        DiskState { term, vote, last }
    }

    #[test]
    fn a_disk_that_has_all_or_more_keeps_a_promise() {
        let given = promise(5, 2, 10, 7);
        assert!(disk(5, 2, 10).keeps(&given));
        assert!(disk(5, 2, 11).keeps(&given));
        assert!(disk(6, 0, 7).keeps(&given), "another leader replaced what was not committed");
        assert!(disk(0, 0, 0).keeps(&Promise::default()));
        assert!(disk(5, 3, 10).keeps(&promise(5, 0, 10, 0)), "no vote is known");
    }

    #[test]
    fn a_disk_that_lacks_any_part_of_a_promise_is_found() {
        let given = promise(5, 2, 10, 7);
        for (what, less) in [
            ("the term", disk(4, 2, 10)),
            ("the vote", disk(5, 0, 10)),
            ("whom it voted for", disk(5, 3, 10)),
            ("an acknowledged entry", disk(5, 2, 9)),
            ("a committed entry, in a later term", disk(6, 2, 6)),
            ("everything", disk(0, 0, 0)),
        ] {
            assert!(!less.keeps(&given), "{what}");
        }
    }

    #[test]
    fn merged_promises_keep_the_higher_term_and_all_committed_entries() {
        assert_eq!(promise(5, 2, 10, 7).merge(promise(6, 0, 8, 3)), promise(6, 0, 8, 7));
        assert_eq!(promise(6, 0, 8, 3).merge(promise(5, 2, 10, 7)), promise(6, 0, 8, 7));
        assert_eq!(promise(5, 0, 10, 0).merge(promise(5, 2, 3, 1)), promise(5, 2, 10, 1));
        assert_eq!(promise(5, 2, 3, 1).merge(promise(5, 0, 10, 0)), promise(5, 2, 10, 1));
    }

    #[test]
    fn a_commit_index_of_a_later_term_does_not_raise_the_floor() {
        let given = promise(5, 0, 10, 0);
        assert_eq!(given.with_commit(5, 8), promise(5, 0, 10, 8));
        assert_eq!(given.with_commit(4, 8), promise(5, 0, 10, 8));
        assert_eq!(given.with_commit(5, 12), promise(5, 0, 10, 10), "it has no more than that");
        assert_eq!(given.with_commit(6, 8), given);
        assert_eq!(promise(5, 0, 10, 9).with_commit(5, 8), promise(5, 0, 10, 9));
    }

    #[test]
    fn only_messages_that_wait_for_the_disk_are_promises() {
        let message =
            |kind, reject| Message { term: 3, index: 9, reject, ..Message::new(kind, 1, 2) };
        for kind in [
            MessageKind::RequestPreVote,
            MessageKind::RequestPreVoteResponse,
            MessageKind::Append,
            MessageKind::Heartbeat,
            MessageKind::HeartbeatResponse,
            MessageKind::Snapshot,
            MessageKind::Propose,
        ] {
            assert_eq!(Promise::of(&message(kind, false)), None, "{kind:?}");
        }
        let of = |kind, reject| Promise::of(&message(kind, reject));
        assert_eq!(of(MessageKind::RequestVote, false), Some(promise(3, 1, 0, 0)));
        assert_eq!(of(MessageKind::RequestVoteResponse, false), Some(promise(3, 2, 0, 0)));
        assert_eq!(of(MessageKind::AppendResponse, false), Some(promise(3, 0, 9, 0)));
        assert_eq!(of(MessageKind::RequestVoteResponse, true), None);
        assert_eq!(of(MessageKind::AppendResponse, true), None);
    }
}
