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
    /// No leader is known when the time is up.
    #[error("no leader")]
    NoLeader,
    /// There was no outcome within the request time-out.
    #[error("request timed out")]
    Timeout,
    /// There was no outcome within the request time-out, and a leader was lost meanwhile.
    #[error("request timed out, possibly due to previous leader failure")]
    TimeoutLeaderFailed,
    /// There was no outcome within the request time-out, and this member can't reach a quorum.
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
    /// No leader is known when the time is up.
    #[error("no leader")]
    NoLeader,
    /// No read index was confirmed and applied within the request time-out.
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
    /// The requested transferee isn't a voter.
    #[error("the transferee can't lead")]
    BadTransferee,
    /// The transferee didn't take over in time.
    #[error("request timed out, leader transfer took too long")]
    Timeout,
    /// This member is stopping.
    #[error("the server is stopping")]
    Stopped,
}
