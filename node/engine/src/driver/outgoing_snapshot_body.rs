//! Lifetime of the snapshot body that was built last: which peers are receiving it, and when it may
//! be removed.

use std::collections::BTreeSet;

/// The snapshot body that was built last, which is as large as the store. It is kept while any
/// transfer of it runs. A leader also keeps it until the first transfer has ended, or until the log
/// begins after the body's position. For a later request, a newer body is built.
#[derive(Debug)]
pub(super) struct OutgoingSnapshotBody {
    index: u64,
    sending: BTreeSet<u64>,
    served: bool,
}

impl OutgoingSnapshotBody {
    /// Creates the state of a snapshot body that has just been built from the store's state at
    /// `index`.
    pub(super) fn new(index: u64) -> Self {
        Self { index, sending: BTreeSet::new(), served: false }
    }

    /// Records that a transfer to `peer` begins.
    pub(super) fn begin(&mut self, peer: u64) {
        self.sending.insert(peer);
    }

    /// Records that a transfer to `peer` ended, complete or not.
    pub(super) fn end(&mut self, peer: u64) {
        self.sending.remove(&peer);
        self.served = true;
    }

    /// Records that the log now begins after `base`. If the body is older than `base`, its receiver
    /// could not continue from the log, so the body is useless.
    pub(super) fn compacted(&mut self, base: u64) {
        self.served |= self.index < base;
    }

    /// Returns whether the snapshot body may be removed. `leads` is whether this member leads.
    pub(super) fn is_unneeded(&self, leads: bool) -> bool {
        self.sending.is_empty() && (self.served || !leads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_kept_until_the_last_transfer_has_ended() {
        let mut body = OutgoingSnapshotBody::new(10);
        assert!(!body.is_unneeded(true), "somebody has asked for it");
        body.begin(2);
        body.begin(3);
        body.end(2);
        body.compacted(11);
        assert!(!body.is_unneeded(true) && !body.is_unneeded(false));
        body.end(3);
        assert!(body.is_unneeded(true));
    }

    #[test]
    fn an_unsent_body_is_dropped_when_leadership_ends_or_the_log_has_passed_it() {
        let mut body = OutgoingSnapshotBody::new(10);
        assert!(body.is_unneeded(false));
        body.compacted(10);
        assert!(!body.is_unneeded(true));
        body.compacted(11);
        assert!(body.is_unneeded(true));
    }
}
