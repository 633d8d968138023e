//! The rules that a test may switch off, one at a time, to see that the simulation notices.
//!
//! Product code passes [`Guards::ALL`]. The constructors that leave one out exist only in builds
//! with debug assertions: a release build has no code path that makes such a value, whatever
//! Cargo features any crate of the workspace asks for.

/// Which safety rules hold. Everything but [`Guards::ALL`] is for tests.
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
    changes_settle: bool,
    promote_in_sync: bool,
    update_keeps_learner: bool,
    removed_for_ever: bool,
    same_incarnation: bool,
    images_are_known: bool,
    tombstones_hold: bool,
    clocks_count_in_their_term: bool,
}

impl Guards {
    /// Every rule holds.
    pub const ALL: Self = Self {
        persist_before_vote: true,
        persist_before_ack: true,
        persist_before_self_ack: true,
        unique_read_context: true,
        verify_tail: true,
        failed_sync_is_final: true,
        count_durable_batches: true,
        one_change_at_a_time: true,
        changes_settle: true,
        promote_in_sync: true,
        update_keeps_learner: true,
        removed_for_ever: true,
        same_incarnation: true,
        images_are_known: true,
        tombstones_hold: true,
        clocks_count_in_their_term: true,
    };

    /// Votes leave only once term and vote are durable.
    pub fn persist_before_vote(self) -> bool {
        self.persist_before_vote
    }

    /// A follower acknowledges entries only once they are durable.
    pub fn persist_before_ack(self) -> bool {
        self.persist_before_ack
    }

    /// A leader counts itself only once its own log is durable.
    pub fn persist_before_self_ack(self) -> bool {
        self.persist_before_self_ack
    }

    /// A read's context is never used a second time.
    pub fn unique_read_context(self) -> bool {
        self.unique_read_context
    }

    /// A record at the log's end counts only if its checksum fits.
    pub fn verify_tail(self) -> bool {
        self.verify_tail
    }

    /// A sync that failed is never asked for again: the kernel may call the second one a success.
    pub fn failed_sync_is_final(self) -> bool {
        self.failed_sync_is_final
    }

    /// What waits for a batch of the log leaves with that batch, not with the one before it.
    pub fn count_durable_batches(self) -> bool {
        self.count_durable_batches
    }

    /// A change of members waits for the one before it, and names the members it was judged on.
    pub fn one_change_at_a_time(self) -> bool {
        self.one_change_at_a_time
    }

    /// It also waits until a quorum can't fall back behind the last one.
    pub fn changes_settle(self) -> bool {
        self.changes_settle
    }

    /// A learner gets its vote only when little is left for it to fetch.
    pub fn promote_in_sync(self) -> bool {
        self.promote_in_sync
    }

    /// A learner that moves stays a learner.
    pub fn update_keeps_learner(self) -> bool {
        self.update_keeps_learner
    }

    /// A member that was removed is remembered, and never added again.
    pub fn removed_for_ever(self) -> bool {
        self.removed_for_ever
    }

    /// A member is the incarnation that was seen first, no other one under its id.
    pub fn same_incarnation(self) -> bool {
        self.same_incarnation
    }

    /// A data directory that has forgotten what its member promised is not taken for it.
    pub fn images_are_known(self) -> bool {
        self.images_are_known
    }

    /// Nothing begins where a tombstone stands.
    pub fn tombstones_hold(self) -> bool {
        self.tombstones_hold
    }

    /// What a leader's clock says of leases counts in that leader's term only.
    pub fn clocks_count_in_their_term(self) -> bool {
        self.clocks_count_in_their_term
    }
}

#[cfg(debug_assertions)]
impl Guards {
    /// Votes leave before they are durable.
    pub const VOTE_BEFORE_SYNC: Self = Self { persist_before_vote: false, ..Self::ALL };
    /// Followers acknowledge before they have synced.
    pub const ACK_BEFORE_SYNC: Self = Self { persist_before_ack: false, ..Self::ALL };
    /// A leader counts its own unsynced log towards the quorum.
    pub const SELF_ACK_BEFORE_SYNC: Self = Self { persist_before_self_ack: false, ..Self::ALL };
    /// All reads share one context.
    pub const SHARED_READ_CONTEXT: Self = Self { unique_read_context: false, ..Self::ALL };
    /// The log's last record is taken as it is found.
    pub const KEEP_TORN_TAIL: Self = Self { verify_tail: false, ..Self::ALL };
    /// With each batch that is durable, the next one is acknowledged as well.
    pub const ACK_NEXT_BATCH: Self = Self { count_durable_batches: false, ..Self::ALL };
    /// A failed sync is tried once more and then believed.
    pub const RETRY_FAILED_SYNC: Self = Self { failed_sync_is_final: false, ..Self::ALL };
    /// A change of members is proposed whatever becomes of the one before it.
    pub const DOUBLE_CHANGE: Self =
        Self { one_change_at_a_time: false, changes_settle: false, ..Self::ALL };
    /// A change follows as soon as the leader has applied the last one.
    pub const UNSETTLED_CHANGE: Self = Self { changes_settle: false, ..Self::ALL };
    /// A learner is promoted however far behind it is.
    pub const PROMOTE_LAGGING: Self = Self { promote_in_sync: false, ..Self::ALL };
    /// A learner whose peer URLs change is a voter in the member table.
    pub const UPDATE_DROPS_LEARNER: Self = Self { update_keeps_learner: false, ..Self::ALL };
    /// A removed member can be added again.
    pub const REMOVED_ID_AGAIN: Self = Self { removed_for_ever: false, ..Self::ALL };
    /// A wiped machine passes for the member that it was.
    pub const SAME_ID_REIMAGE: Self = Self { same_incarnation: false, ..Self::ALL };
    /// An old image of a machine passes for the member that it was.
    pub const OLD_IMAGE_VOTES: Self = Self { images_are_known: false, ..Self::ALL };
    /// A removed member begins a cluster of its own, from nothing.
    pub const TOMBSTONE_BOOTSTRAPS: Self = Self { tombstones_hold: false, ..Self::ALL };
    /// A leader that was deposed still ends leases: the next one passes on what it proposes.
    pub const DEPOSED_CLOCK_COUNTS: Self = Self { clocks_count_in_their_term: false, ..Self::ALL };
}
