//! Safety rules that a test can switch off one at a time, to prove that the simulation then finds
//! the fault.
//!
//! Product code passes [`Guards::ALL`]. The constants that leave one rule out exist only in builds
//! with debug assertions. A release build can't make such a value, whatever Cargo features are
//! enabled.

/// Set of safety rules in force. Every value but [`Guards::ALL`] is for tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guards {
    persist_before_vote: bool,
    persist_before_ack: bool,
    persist_before_self_ack: bool,
    unique_read_context: bool,
    verify_tail: bool,
    failed_sync_is_final: bool,
    count_durable_batches: bool,
    one_change_at_a_time: bool,
    change_barrier: bool,
    promote_in_sync: bool,
    update_keeps_learner: bool,
    removed_for_ever: bool,
    same_incarnation: bool,
    refuse_old_images: bool,
    respect_tombstones: bool,
    lease_clock_per_term: bool,
}

impl Guards {
    /// All rules are in force.
    pub const ALL: Self = Self {
        persist_before_vote: true,
        persist_before_ack: true,
        persist_before_self_ack: true,
        unique_read_context: true,
        verify_tail: true,
        failed_sync_is_final: true,
        count_durable_batches: true,
        one_change_at_a_time: true,
        change_barrier: true,
        promote_in_sync: true,
        update_keeps_learner: true,
        removed_for_ever: true,
        same_incarnation: true,
        refuse_old_images: true,
        respect_tombstones: true,
        lease_clock_per_term: true,
    };

    /// Rule: a vote is sent only once term and vote are durable.
    pub fn persist_before_vote(self) -> bool {
        self.persist_before_vote
    }

    /// Rule: a follower acknowledges entries only once they are durable.
    pub fn persist_before_ack(self) -> bool {
        self.persist_before_ack
    }

    /// Rule: a leader counts its own log towards the quorum only once that log is durable.
    pub fn persist_before_self_ack(self) -> bool {
        self.persist_before_self_ack
    }

    /// Rule: a read's context is never reused.
    pub fn unique_read_context(self) -> bool {
        self.unique_read_context
    }

    /// Rule: the last record of the log is accepted only if its checksum matches.
    pub fn verify_tail(self) -> bool {
        self.verify_tail
    }

    /// Rule: a failed sync is never retried. The kernel may report success for the retry though the
    /// data is lost.
    pub fn failed_sync_is_final(self) -> bool {
        self.failed_sync_is_final
    }

    /// Rule: messages that depend on a batch of the log are sent when that batch is durable, not
    /// one batch earlier.
    pub fn count_durable_batches(self) -> bool {
        self.count_durable_batches
    }

    /// Rule: a change of members waits for the previous change, and names the configuration that it
    /// was judged on.
    pub fn one_change_at_a_time(self) -> bool {
        self.one_change_at_a_time
    }

    /// Rule: a change of members waits until a quorum durably knows that the previous change is
    /// committed.
    pub fn change_barrier(self) -> bool {
        self.change_barrier
    }

    /// Rule: a learner becomes a voter only when few entries are missing from its log.
    pub fn promote_in_sync(self) -> bool {
        self.promote_in_sync
    }

    /// Rule: a learner whose address changes stays a learner.
    pub fn update_keeps_learner(self) -> bool {
        self.update_keeps_learner
    }

    /// Rule: a removed member is remembered and can never be added again.
    pub fn removed_for_ever(self) -> bool {
        self.removed_for_ever
    }

    /// Rule: a member is bound to the first incarnation that was seen. Another incarnation with the
    /// member's id is refused.
    pub fn same_incarnation(self) -> bool {
        self.same_incarnation
    }

    /// Rule: a data directory that lost promises of its member (a restored disk image) is not
    /// accepted as that member.
    pub fn refuse_old_images(self) -> bool {
        self.refuse_old_images
    }

    /// Rule: a node refuses to start in a directory that has a tombstone.
    pub fn respect_tombstones(self) -> bool {
        self.respect_tombstones
    }

    /// Rule: entries of a leader's lease clock are valid only in that leader's own term.
    pub fn lease_clock_per_term(self) -> bool {
        self.lease_clock_per_term
    }
}

#[cfg(debug_assertions)]
impl Guards {
    /// Fault: votes are sent before they are durable.
    pub const VOTE_BEFORE_SYNC: Self = Self { persist_before_vote: false, ..Self::ALL };
    /// Fault: followers acknowledge entries before they have synced.
    pub const ACK_BEFORE_SYNC: Self = Self { persist_before_ack: false, ..Self::ALL };
    /// Fault: a leader counts its own unsynced log towards the quorum.
    pub const SELF_ACK_BEFORE_SYNC: Self = Self { persist_before_self_ack: false, ..Self::ALL };
    /// Fault: all linearizable reads use the same read context.
    pub const SHARED_READ_CONTEXT: Self = Self { unique_read_context: false, ..Self::ALL };
    /// Fault: the last record of the log is accepted without a check of its checksum.
    pub const KEEP_TORN_TAIL: Self = Self { verify_tail: false, ..Self::ALL };
    /// Fault: each durable batch also acknowledges the batch after it.
    pub const ACK_NEXT_BATCH: Self = Self { count_durable_batches: false, ..Self::ALL };
    /// Fault: a failed sync is retried, and the result of the retry is trusted.
    pub const RETRY_FAILED_SYNC: Self = Self { failed_sync_is_final: false, ..Self::ALL };
    /// Fault: a change of members is proposed without waiting for the previous one.
    pub const DOUBLE_CHANGE: Self =
        Self { one_change_at_a_time: false, change_barrier: false, ..Self::ALL };
    /// Fault: a change of members is proposed as soon as the leader has applied the previous one.
    pub const UNSETTLED_CHANGE: Self = Self { change_barrier: false, ..Self::ALL };
    /// Fault: a learner is promoted however far its log is behind.
    pub const PROMOTE_LAGGING: Self = Self { promote_in_sync: false, ..Self::ALL };
    /// Fault: a learner whose peer URLs change becomes a voter in the member table.
    pub const UPDATE_DROPS_LEARNER: Self = Self { update_keeps_learner: false, ..Self::ALL };
    /// Fault: a removed member can be added again.
    pub const REMOVED_ID_AGAIN: Self = Self { removed_for_ever: false, ..Self::ALL };
    /// Fault: a machine whose disk was wiped is accepted as its former member.
    pub const SAME_ID_REIMAGE: Self = Self { same_incarnation: false, ..Self::ALL };
    /// Fault: a machine restored from an old disk image is accepted as its former member.
    pub const OLD_IMAGE_VOTES: Self = Self { refuse_old_images: false, ..Self::ALL };
    /// Fault: a removed member bootstraps a cluster of its own in an empty directory.
    pub const TOMBSTONE_BOOTSTRAPS: Self = Self { respect_tombstones: false, ..Self::ALL };
    /// Fault: a deposed leader's lease clock still expires leases, because its successor accepts
    /// the forwarded proposal.
    pub const DEPOSED_CLOCK_COUNTS: Self = Self { lease_clock_per_term: false, ..Self::ALL };
}
