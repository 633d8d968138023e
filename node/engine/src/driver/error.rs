//! Errors of proposals, reads and transfers of leadership.

use thiserror::Error;

/// Reason why a proposal has no outcome.
///
/// After [`ProposeError::TooManyRequests`] and [`ProposeError::TooLarge`] the proposal has had no
/// effect and never will. After any other error it may still be applied, or may have been applied
/// already.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ProposeError {
    /// A queue is full. The caller should retry later, and not send more.
    #[error("too many requests")]
    TooManyRequests,
    /// The proposal is larger than [`MAX_PROPOSAL_BYTES`](super::MAX_PROPOSAL_BYTES).
    #[error("the request is too large")]
    TooLarge,
    /// No leader was known when the request time-out ended.
    #[error("no leader")]
    NoLeader,
    /// The request time-out ended without an outcome.
    #[error("request timed out")]
    Timeout,
    /// A leader was lost before the outcome was known. Either the request time-out has ended, or
    /// the leader's process has ended and this member has applied the next leader's first entry.
    #[error("request timed out, possibly due to previous leader failure")]
    TimeoutLeaderFailed,
    /// The request time-out ended without an outcome, and this member can't reach a quorum.
    #[error("request timed out, possibly due to connection lost")]
    TimeoutConnectionLost,
    /// This member is stopping, or was removed.
    #[error("the server is stopping")]
    Stopped,
}

/// Reason why a linearizable read can't be answered.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ReadBarrierError {
    /// The queue of waiting reads is full.
    #[error("too many requests")]
    TooManyRequests,
    /// No leader was known when the request time-out ended.
    #[error("no leader")]
    NoLeader,
    /// The request time-out ended before a read index was confirmed and applied.
    #[error("request timed out")]
    Timeout,
    /// This member is stopping.
    #[error("the server is stopping")]
    Stopped,
}

/// Reason why leadership was not transferred.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum TransferError {
    /// This member isn't the leader.
    #[error("not the leader")]
    NotLeader,
    /// The requested transferee is not a voter of the cluster.
    #[error("the transferee can't lead")]
    BadTransferee,
    /// The transferee did not become leader in time.
    #[error("request timed out, leader transfer took too long")]
    Timeout,
    /// This member is stopping.
    #[error("the server is stopping")]
    Stopped,
}
