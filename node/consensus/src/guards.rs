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
}
