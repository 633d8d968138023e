//! Errors of requests to a cluster, distinguished by what the caller has to do next.

use std::time::Duration;

use tonic::{Code, Status};

use super::{CONFIGURATION, ClusterRefusal};
use crate::endpoint::EndpointError;

/// Why a cluster did not carry out a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClusterError {
    /// The endpoint or certificates can't be used.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// No member could be reached: nothing was sent.
    #[error("no member can be reached: {}", .0.join("; "))]
    Unreachable(Vec<String>),
    /// The member that was asked can't serve now; nothing has changed.
    #[error("the cluster can't serve this now: {text}")]
    Unavailable {
        /// Text of the server, or why no answer came.
        text: String,
    },
    /// The cluster refused the request; nothing has changed.
    #[error("refused: {text}")]
    Refused {
        /// Reason of the refusal.
        refusal: ClusterRefusal,
        /// Text of the server's answer.
        text: String,
    },
    /// The cluster carried out a request with this operation id before.
    #[error("the cluster has done this already: {text}")]
    CarriedOut {
        /// Index of the configuration that the request made.
        at: Option<u64>,
        /// Text of the server's answer.
        text: String,
    },
    /// The members have changed since the change was planned.
    #[error("the plan is stale: {text}")]
    Stale {
        /// Index of the configuration that the cluster has now.
        now: Option<u64>,
        /// Text of the server's answer.
        text: String,
    },
    /// The answer is lost, or the server itself doesn't know: the change may have been made. Read
    /// the list of members before sending it again.
    #[error(
        "{what}: it may have been done, since the answer was lost ({text}); the list of members shows whether"
    )]
    Ambiguous {
        /// Name of the request.
        what: &'static str,
        /// How the answer was lost.
        text: String,
    },
}

impl ClusterError {
    /// Returns whether the change may have been made.
    pub(crate) fn is_ambiguous(&self) -> bool {
        matches!(self, Self::Ambiguous { .. })
    }

    /// Returns whether no member could serve the request, so that a retry may help.
    pub(crate) fn is_retryable(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::Unavailable { .. })
    }

    /// Returns the reason of a refusal.
    pub(crate) fn refusal(&self) -> Option<ClusterRefusal> {
        match self {
            Self::Refused { refusal, .. } => Some(*refusal),
            _ => None,
        }
    }

    /// Returns whether another member could serve the request that this member did not serve.
    pub(super) fn may_try_another_member(&self) -> bool {
        // A learner or a removed member refuses with this reason; another member may accept.
        matches!(self, Self::Unavailable { .. })
            || self.refusal() == Some(ClusterRefusal::NotSupportedForLearner)
    }

    /// Converts a gRPC status from the server or the connection. `what` names the request;
    /// `is_change` tells whether that request changes the cluster.
    pub(super) fn from_status(status: &Status, what: &'static str, is_change: bool) -> Self {
        let text = status.message().to_owned();
        let lost = || {
            let text = if text.is_empty() { format!("{:?}", status.code()) } else { text.clone() };
            if is_change { Self::Ambiguous { what, text } } else { Self::Unavailable { text } }
        };
        // A status with a source was made by the client library: the connection failed.
        if std::error::Error::source(status).is_some() {
            return lost();
        }
        let configuration = || {
            let value = status.metadata().get(CONFIGURATION)?;
            value.to_str().ok()?.parse().ok()
        };
        let refused = |refusal, text| Self::Refused { refusal, text };
        match (status.code(), ClusterRefusal::of(status)) {
            (Code::AlreadyExists, _) => Self::CarriedOut { at: configuration(), text },
            (Code::Aborted, _) => Self::Stale { now: configuration(), text },
            (Code::Ok | Code::Cancelled | Code::DeadlineExceeded | Code::Internal, _) => lost(),
            (_, Some(ClusterRefusal::NoLeader | ClusterRefusal::NotCapable)) => {
                Self::Unavailable { text }
            }
            // Stock etcd sends some refusals with these two codes. With an unknown text, they can
            // also mean that the answer was lost.
            (Code::Unknown | Code::Unavailable, None) => lost(),
            (_, Some(refusal)) => refused(refusal, text),
            (
                Code::InvalidArgument
                | Code::NotFound
                | Code::FailedPrecondition
                | Code::OutOfRange
                | Code::PermissionDenied
                | Code::Unauthenticated
                | Code::Unimplemented
                | Code::ResourceExhausted
                | Code::DataLoss,
                None,
            ) => refused(ClusterRefusal::Other, text),
        }
    }

    /// Makes the error of a request without an answer within `limit`.
    pub(super) fn timed_out(what: &'static str, is_change: bool, limit: Duration) -> Self {
        let text = format!("no answer within {} s", limit.as_secs());
        if is_change { Self::Ambiguous { what, text } } else { Self::Unavailable { text } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(code: Code, text: &str, is_change: bool) -> ClusterError {
        ClusterError::from_status(&Status::new(code, text), "member add", is_change)
    }

    #[test]
    fn only_failures_that_certainly_changed_nothing_are_refusals() {
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
        assert!(ClusterError::from_status(&lost, "member add", true).is_ambiguous());
        assert!(!ClusterError::from_status(&lost, "member list", false).is_ambiguous());
    }

    #[test]
    fn errors_of_a_carried_out_operation_and_a_stale_plan_name_the_configuration() {
        let mut status = Status::new(Code::AlreadyExists, "x");
        status.metadata_mut().insert(CONFIGURATION, 17.into());
        let done = ClusterError::from_status(&status, "member add", true);
        assert!(matches!(done, ClusterError::CarriedOut { at: Some(17), .. }));
        let mut status = Status::new(Code::Aborted, "x");
        status.metadata_mut().insert(CONFIGURATION, 18.into());
        let stale = ClusterError::from_status(&status, "member add", true);
        assert!(matches!(stale, ClusterError::Stale { now: Some(18), .. }));
    }
}
