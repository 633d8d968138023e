//! What a request may be told.

use thiserror::Error;

/// Why a proposal has no outcome.
///
/// Only [`ProposeError::TooManyRequests`] and [`ProposeError::TooLarge`] say that it had none and never
/// will; after the others it may still be applied, or have been.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ProposeError {
    /// A queue is full. Later is better than more.
    #[error("too many requests")]
    TooManyRequests,
    /// Larger than [`MAX_PROPOSAL_BYTES`](super::MAX_PROPOSAL_BYTES).
    #[error("the request is too large")]
    TooLarge,
    /// No leader was known all the time.
    #[error("no leader")]
    NoLeader,
    /// It took too long.
    #[error("request timed out")]
    Timeout,
    /// It took too long, and the leader was lost meanwhile.
    #[error("request timed out, possibly due to previous leader failure")]
    TimeoutLeaderFailed,
    /// It took too long, and this member can't reach a quorum.
    #[error("request timed out, possibly due to connection lost")]
    TimeoutConnectionLost,
    /// This member is going down, or is no member any more.
    #[error("the server is stopping")]
    Stopped,
}

/// Why a linearizable read can't be answered.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ReadError {
    /// A queue is full.
    #[error("too many requests")]
    TooManyRequests,
    /// No leader was known all the time.
    #[error("no leader")]
    NoLeader,
    /// Nobody confirmed in time.
    #[error("request timed out")]
    Timeout,
    /// This member is going down.
    #[error("the server is stopping")]
    Stopped,
}

/// Why leadership was not handed over.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum TransferError {
    /// Only the leader can.
    #[error("not the leader")]
    NotLeader,
    /// It isn't a voter, or it is the leader itself.
    #[error("the transferee can't lead")]
    BadTransferee,
    /// It didn't take over in time.
    #[error("request timed out, leader transfer took too long")]
    Timeout,
    /// This member is going down.
    #[error("the server is stopping")]
    Stopped,
}
