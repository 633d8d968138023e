//! The snapshot that was built last: who is being sent it, and when its body may go.

use std::collections::BTreeSet;

/// A body is as large as the store. It is kept while somebody is sent it, and for one who asked and is
/// about to be; whoever needs one later gets a newer one.
#[derive(Debug)]
pub(super) struct Outgoing {
    index: u64,
    sending: BTreeSet<u64>,
    served: bool,
}

impl Outgoing {
    /// A body of the store as it was at `index`.
    pub(super) fn new(index: u64) -> Self {
        Self { index, sending: BTreeSet::new(), served: false }
    }

    /// A transfer to `peer` begins.
    pub(super) fn begin(&mut self, peer: u64) {
        self.sending.insert(peer);
    }

    /// A transfer to `peer` has ended, whole or not.
    pub(super) fn end(&mut self, peer: u64) {
        self.sending.remove(&peer);
        self.served = true;
    }

    /// The log now begins after `base`: nobody can go on from a body of before.
    pub(super) fn compacted(&mut self, base: u64) {
        self.served |= self.index < base;
    }

    /// Whether nobody needs the body any more.
    pub(super) fn is_over(&self, leads: bool) -> bool {
        self.sending.is_empty() && (self.served || !leads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_kept_until_the_last_transfer_has_ended() {
        let mut body = Outgoing::new(10);
        assert!(!body.is_over(true), "somebody has asked for it");
        body.begin(2);
        body.begin(3);
        body.end(2);
        body.compacted(11);
        assert!(!body.is_over(true) && !body.is_over(false));
        body.end(3);
        assert!(body.is_over(true));
    }

    #[test]
    fn a_body_that_nobody_came_for_goes_with_the_leadership_or_once_it_is_too_old() {
        let mut body = Outgoing::new(10);
        assert!(body.is_over(false));
        body.compacted(10);
        assert!(!body.is_over(true));
        body.compacted(11);
        assert!(body.is_over(true));
    }
}
