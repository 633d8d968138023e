//! Requests that were proposed and perhaps have no outcome yet.
//!
//! If their leader fails, most of them never take effect. Their clients would wait until the request
//! time-out ends. Once an entry of a later term is applied, every entry that the earlier leader
//! committed is applied, too. So the requests without an outcome are then reported as lost. A
//! proposal that was on its way to the leader may still take effect, so the report says no more than
//! a time-out does.

use std::collections::VecDeque;

use node_state::state_machine::RequestId;

/// Maximum number of requests that are remembered; the oldest are forgotten first. The clients of
/// forgotten requests wait until the request time-out ends.
const MAX_REMEMBERED: usize = 4096;

/// The requests that were proposed last, oldest first, each with the term at that time.
#[derive(Debug, Default)]
pub(super) struct ProposedRequests(VecDeque<(u64, RequestId)>);

impl ProposedRequests {
    /// Records that `requests` were proposed to the leader of `term`.
    pub(super) fn record(&mut self, term: u64, requests: &[RequestId]) {
        let new = &requests[requests.len().saturating_sub(MAX_REMEMBERED)..];
        let surplus = (self.0.len() + new.len()).saturating_sub(MAX_REMEMBERED);
        self.0.drain(..surplus);
        self.0.extend(new.iter().map(|id| (term, *id)));
    }

    /// Takes the requests that were proposed before `term`. An outcome may already exist for some
    /// of them.
    pub(super) fn take_before(&mut self, term: u64) -> impl Iterator<Item = RequestId> {
        let count = self.0.partition_point(|(proposed, _)| *proposed < term);
        self.0.drain(..count).map(|(_, id)| id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_earlier_terms_are_taken_once() {
        let mut proposed = ProposedRequests::default();
        proposed.record(3, &[RequestId(1), RequestId(2)]);
        proposed.record(5, &[RequestId(3)]);
        assert_eq!(proposed.take_before(3).count(), 0);
        assert_eq!(proposed.take_before(5).collect::<Vec<_>>(), [RequestId(1), RequestId(2)]);
        assert_eq!(proposed.take_before(5).count(), 0);
    }

    #[test]
    fn the_number_of_remembered_requests_is_bounded() {
        let mut proposed = ProposedRequests::default();
        let ids = |numbers: std::ops::Range<u64>| numbers.map(RequestId).collect::<Vec<_>>();
        let most = MAX_REMEMBERED as u64;
        proposed.record(1, &ids(0..10));
        proposed.record(1, &ids(10..most + 5));
        assert_eq!(proposed.0.len(), MAX_REMEMBERED);
        assert_eq!(proposed.0[0].1, RequestId(5));
        proposed.record(2, &ids(0..2 * most));
        assert_eq!(proposed.0.len(), MAX_REMEMBERED);
        assert_eq!(proposed.take_before(3).next(), Some(RequestId(most)));
    }
}
