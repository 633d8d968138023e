//! What may come of asking a cluster, told apart by what the caller has to do next.

use std::time::Duration;

use tonic::{Code, Status};

use super::CONFIGURATION;
use crate::door::DoorError;

/// Why a cluster didn't do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClusterError {
    /// What was typed leads nowhere.
    #[error(transparent)]
    Door(#[from] DoorError),
    /// Nobody was reached: nothing was sent.
    #[error("no member can be reached: {}", .0.join("; "))]
    Unreachable(Vec<String>),
    /// Whoever was asked can't serve now; nothing has changed.
    #[error("the cluster can't serve this now: {text}")]
    Unavailable {
        /// In the server's words, or why it was silent.
        text: String,
    },
    /// The cluster said no, and nothing has changed.
    #[error("refused: {text}")]
    Refused {
        /// gRPC's code.
        code: Code,
        /// The server's words.
        text: String,
    },
    /// The cluster has carried out a request with this operation id before.
    #[error("the cluster has done this already: {text}")]
    CarriedOut {
        /// The configuration that it made.
        at: Option<u64>,
        /// The server's words.
        text: String,
    },
    /// The members are others than when the change was planned.
    #[error("the plan is stale: {text}")]
    Stale {
        /// The configuration now.
        now: Option<u64>,
        /// The server's words.
        text: String,
    },
    /// It was asked and the answer is lost, or the server itself doesn't know: it may have been
    /// done. Never ask again before the list of members has been read.
    #[error(
        "{what}: it may have been done, since the answer was lost ({text}); the list of members shows whether"
    )]
    Ambiguous {
        /// What was asked for.
        what: &'static str,
        /// How the answer was lost.
        text: String,
    },
}

impl ClusterError {
    /// Whether it may have been done.
    pub(crate) fn is_ambiguous(&self) -> bool {
        matches!(self, Self::Ambiguous { .. })
    }

    /// Whether nobody could serve it: it may help to ask again.
    pub(crate) fn is_silence(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::Unavailable { .. })
    }

    /// Whether another member may answer what this one did not.
    pub(super) fn may_be_asked_elsewhere(&self) -> bool {
        match self {
            Self::Unavailable { .. } => true,
            // A learner, or one that was removed, speaks for itself alone.
            Self::Refused { text, .. } => text.contains("not supported for learner"),
            _ => false,
        }
    }

    /// What the status means that a server, or the way to it, gave a request for `what`.
    pub(super) fn of(status: &Status, what: &'static str, is_change: bool) -> Self {
        let text = status.message().to_owned();
        let lost = || {
            let text = if text.is_empty() { format!("{:?}", status.code()) } else { text.clone() };
            if is_change { Self::Ambiguous { what, text } } else { Self::Unavailable { text } }
        };
        // A status that was made on this side tells of the connection.
        if std::error::Error::source(status).is_some() {
            return lost();
        }
        let configuration = || {
            let value = status.metadata().get(CONFIGURATION)?;
            value.to_str().ok()?.parse().ok()
        };
        match status.code() {
            Code::AlreadyExists => Self::CarriedOut { at: configuration(), text },
            Code::Aborted => Self::Stale { now: configuration(), text },
            code @ (Code::InvalidArgument
            | Code::NotFound
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::Unimplemented
            | Code::ResourceExhausted
            | Code::DataLoss) => Self::Refused { code, text },
            // Stock etcd sends some of its refusals under these two.
            code @ (Code::Unknown | Code::Unavailable) => match text.as_str() {
                "etcdserver: unhealthy cluster"
                | "etcdserver: re-configuration failed due to not enough started members"
                | "etcdserver: too many requests"
                | "etcdserver: unknown method"
                | "etcdserver: rpc not supported for learner"
                | "auth: permission denied" => Self::Refused { code, text },
                "etcdserver: no leader" | "etcdserver: not capable" => Self::Unavailable { text },
                _ => lost(),
            },
            Code::Ok | Code::Cancelled | Code::DeadlineExceeded | Code::Internal => lost(),
        }
    }

    /// No answer came within `limit`.
    pub(super) fn late(what: &'static str, is_change: bool, limit: Duration) -> Self {
        let text = format!("no answer within {} s", limit.as_secs());
        if is_change { Self::Ambiguous { what, text } } else { Self::Unavailable { text } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(code: Code, text: &str, is_change: bool) -> ClusterError {
        ClusterError::of(&Status::new(code, text), "member add", is_change)
    }

    #[test]
    fn only_what_surely_did_not_happen_is_called_refused() {
        for (code, text) in [
            (Code::FailedPrecondition, "etcdserver: Peer URLs already exists"),
            (Code::NotFound, "etcdserver: member not found"),
            (Code::Unavailable, "etcdserver: unhealthy cluster"),
            (
                Code::Unknown,
                "etcdserver: re-configuration failed due to not enough started members",
            ),
        ] {
            assert!(matches!(of(code, text, true), ClusterError::Refused { .. }), "{text}");
        }
        for (code, text) in [
            (Code::Unavailable, "etcdserver: request timed out"),
            (Code::Unavailable, "etcdserver: request timed out, possibly due to connection lost"),
            (Code::Unavailable, "etcdserver: server stopped"),
            (Code::Unavailable, "etcdserver: leader changed"),
            (Code::DeadlineExceeded, "context deadline exceeded"),
            (Code::Unknown, "raft: stopped"),
            (Code::Cancelled, ""),
            (Code::Internal, "h2 protocol error"),
        ] {
            assert!(of(code, text, true).is_ambiguous(), "{text}");
            let read = of(code, text, false);
            assert!(matches!(read, ClusterError::Unavailable { .. }), "{text}");
        }
        let no_leader = of(Code::Unavailable, "etcdserver: no leader", true);
        assert!(matches!(no_leader, ClusterError::Unavailable { .. }));
    }

    #[test]
    fn a_lost_connection_is_not_taken_for_an_answer() {
        let lost = Status::from_error(Box::new(std::io::Error::other("reset")));
        assert!(ClusterError::of(&lost, "member add", true).is_ambiguous());
        assert!(!ClusterError::of(&lost, "member list", false).is_ambiguous());
    }

    #[test]
    fn an_operation_that_was_done_and_a_stale_plan_say_which_configuration() {
        let mut status = Status::new(Code::AlreadyExists, "x");
        status.metadata_mut().insert(CONFIGURATION, 17.into());
        let done = ClusterError::of(&status, "member add", true);
        assert!(matches!(done, ClusterError::CarriedOut { at: Some(17), .. }));
        let mut status = Status::new(Code::Aborted, "x");
        status.metadata_mut().insert(CONFIGURATION, 18.into());
        let stale = ClusterError::of(&status, "member add", true);
        assert!(matches!(stale, ClusterError::Stale { now: Some(18), .. }));
    }
}
