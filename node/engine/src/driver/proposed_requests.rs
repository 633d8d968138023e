//! Requests that were proposed and perhaps have no outcome yet.
//!
//! If the leader's process ends, most of them never take effect, and their clients would wait until
//! the request time-out ends. Once an entry of a later term is applied, every entry that the ended
//! leader committed is applied, too. So the requests without an outcome are then reported as lost.
//! A leader that hands over, or is deposed while it runs, passes proposals on to its successor, so
//! nothing is reported as lost then.

use std::collections::VecDeque;

use node_state::state_machine::RequestId;

/// Maximum number of requests that are remembered; the oldest are forgotten first. The clients of
/// forgotten requests wait until the request time-out ends.
const MAX_REMEMBERED: usize = 4096;

/// The requests that were proposed last.
#[derive(Debug, Default)]
pub(super) struct ProposedRequests {
    /// Requests proposed since a leader's process was last reported to have ended, oldest first.
    recent: VecDeque<RequestId>,
    /// Requests that were proposed before a leader's process was last reported to have ended, and
    /// that leader's term.
    doubtful: Option<(u64, Vec<RequestId>)>,
}

impl ProposedRequests {
    /// Records that `requests` were proposed.
    pub(super) fn record(&mut self, requests: &[RequestId]) {
        let new = &requests[requests.len().saturating_sub(MAX_REMEMBERED)..];
        let surplus = (self.recent.len() + new.len()).saturating_sub(MAX_REMEMBERED);
        self.recent.drain(..surplus);
        self.recent.extend(new);
    }

    /// Records that the process of the leader of `term` has ended.
    pub(super) fn leader_ended(&mut self, term: u64) {
        self.doubtful = Some((term, self.recent.drain(..).collect()));
    }

    /// Takes the requests that are lost once an entry of `term` is applied. An outcome may already
    /// exist for some of them.
    pub(super) fn take_lost(&mut self, term: u64) -> Vec<RequestId> {
        let lost = self.doubtful.take_if(|(ended, _)| *ended < term);
        lost.map(|(_, requests)| requests).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_before_the_end_of_a_leader_are_taken_once_in_a_later_term() {
        let mut proposed = ProposedRequests::default();
        proposed.record(&[RequestId(1), RequestId(2)]);
        assert_eq!(proposed.take_lost(9), [], "no leader has ended");
        proposed.leader_ended(3);
        proposed.record(&[RequestId(3)]);
        assert_eq!(proposed.take_lost(3), [], "an entry of the ended leader");
        assert_eq!(proposed.take_lost(4), [RequestId(1), RequestId(2)]);
        assert_eq!(proposed.take_lost(5), []);
    }

    #[test]
    fn the_number_of_remembered_requests_is_bounded() {
        let mut proposed = ProposedRequests::default();
        let ids = |numbers: std::ops::Range<u64>| numbers.map(RequestId).collect::<Vec<_>>();
        let most = MAX_REMEMBERED as u64;
        proposed.record(&ids(0..10));
        proposed.record(&ids(10..most + 5));
        assert_eq!((proposed.recent.len(), proposed.recent[0]), (MAX_REMEMBERED, RequestId(5)));
        proposed.record(&ids(0..2 * most));
        assert_eq!((proposed.recent.len(), proposed.recent[0]), (MAX_REMEMBERED, RequestId(most)));
    }
}
