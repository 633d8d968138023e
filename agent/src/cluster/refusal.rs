//! Why a cluster refuses a request: the one table of `muster-node`'s codes and etcd's texts.
//!
//! `muster-node` sends a code with each refusal of a change of members. Stock etcd sends no code,
//! so its reason is recognised by the text. A refusal that the table doesn't have is
//! [`ClusterRefusal::Other`].

use tonic::Status;

/// gRPC metadata key of a refusal's code.
const REFUSAL_METADATA: &str = "muster-refusal";

macro_rules! refusals {
    ($($(#[$doc:meta])* $name:ident: $code:literal $($text:literal)+;)*) => {
        /// Reasons of refusals that the agent distinguishes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum ClusterRefusal {
            $($(#[$doc])* $name,)*
            /// Any other reason, which the table does not have.
            Other,
        }

        impl ClusterRefusal {
            /// Each reason with `muster-node`'s code and the texts of etcd's releases.
            const TABLE: &[(Self, &str, &[&str])] = &[$((Self::$name, $code, &[$($text),+]),)*];
        }
    };
}

refusals! {
    /// Too few voters have been healthy for long enough.
    UnhealthyCluster: "unhealthy-cluster" "etcdserver: unhealthy cluster";
    /// Too few of the voters after the change would have started.
    NotEnoughStarted: "not-enough-started"
        "etcdserver: re-configuration failed due to not enough started members";
    /// The cluster already has the maximum number of learners.
    TooManyLearners: "too-many-learners" "etcdserver: too many learner members in cluster";
    /// The learner to be promoted lacks too many entries, or doesn't answer.
    LearnerNotReady: "learner-not-ready"
        "etcdserver: can only promote a learner member which is in sync with leader";
    /// Too many requests wait for the cluster.
    TooManyRequests: "too-many-requests" "etcdserver: too many requests";
    /// The cluster has no member with this id.
    MemberNotFound: "member-not-found" "etcdserver: member not found";
    /// The member that was asked is a learner, or was removed.
    NotSupportedForLearner: "not-for-learners" "etcdserver: rpc not supported for learner";
    /// The cluster has no leader now. `muster-node` sends no code, because a request that waits for
    /// a leader may still be carried out.
    NoLeader: "" "etcdserver: no leader";
    /// The member that was asked can't serve the request yet, since it has just started.
    NotCapable: "not-capable" "etcdserver: not capable";
    /// The member that was asked doesn't know the method.
    UnknownMethod: "unknown-method" "etcdserver: unknown method";
    /// The caller may not make this request.
    PermissionDenied: "permission-denied"
        "etcdserver: permission denied" "auth: permission denied";
}

impl ClusterRefusal {
    /// Returns the reason of the refusal in `status`: by the refusal's code if that is known, else
    /// by its text. `None` if neither is known.
    pub(super) fn of(status: &Status) -> Option<Self> {
        let code = status.metadata().get(REFUSAL_METADATA).and_then(|code| code.to_str().ok());
        let by_code = Self::TABLE.iter().find(|(_, known, _)| Some(*known) == code);
        let by_text = || Self::TABLE.iter().find(|(.., texts)| texts.contains(&status.message()));
        by_code.or_else(by_text).map(|(refusal, ..)| *refusal)
    }

    /// Returns whether the members' state caused the refusal: too few are healthy or have started.
    pub(crate) fn is_about_quorum(self) -> bool {
        matches!(self, Self::UnhealthyCluster | Self::NotEnoughStarted)
    }

    /// Returns whether the cause of the refusal may be temporary, so that a retry may succeed.
    pub(crate) fn is_transient(self) -> bool {
        match self {
            Self::UnhealthyCluster
            | Self::NotEnoughStarted
            | Self::TooManyLearners
            | Self::LearnerNotReady
            | Self::TooManyRequests => true,
            Self::MemberNotFound
            | Self::NotSupportedForLearner
            | Self::NoLeader
            | Self::NotCapable
            | Self::UnknownMethod
            | Self::PermissionDenied
            | Self::Other => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::super::ClusterError;
    use super::*;

    fn with_code(code: Code, text: &str, refusal: &'static str) -> Status {
        let mut status = Status::new(code, text);
        status.metadata_mut().insert(REFUSAL_METADATA, refusal.parse().unwrap());
        status
    }

    #[test]
    fn a_code_and_each_of_etcds_texts_mean_the_same_refusal() {
        for (refusal, code, texts) in ClusterRefusal::TABLE {
            let coded = with_code(Code::FailedPrecondition, "in other words", code);
            assert_eq!(ClusterRefusal::of(&coded), Some(*refusal), "{code}");
            for text in *texts {
                let told = Status::new(Code::FailedPrecondition, *text);
                assert_eq!(ClusterRefusal::of(&told), Some(*refusal), "{text}");
            }
        }
    }

    #[test]
    fn an_unknown_code_falls_back_to_the_text_and_an_unknown_text_is_other() {
        let text = "etcdserver: unhealthy cluster";
        let newer = with_code(Code::Unavailable, text, "something-newer");
        assert_eq!(ClusterRefusal::of(&newer), Some(ClusterRefusal::UnhealthyCluster));
        for status in [
            Status::new(Code::FailedPrecondition, "etcdserver: Peer URLs already exists"),
            with_code(Code::FailedPrecondition, "etcdserver: unheard of", "something-newer"),
        ] {
            assert_eq!(ClusterRefusal::of(&status), None);
            let error = ClusterError::from_status(&status, "member add", true);
            let other =
                matches!(error, ClusterError::Refused { refusal: ClusterRefusal::Other, .. });
            assert!(other, "{error:?}");
        }
    }

    #[test]
    fn only_refusals_with_a_temporary_cause_are_transient() {
        let transient = |text: &str| {
            let refusal = ClusterRefusal::of(&Status::new(Code::FailedPrecondition, text));
            refusal.unwrap_or(ClusterRefusal::Other).is_transient()
        };
        assert!(transient("etcdserver: unhealthy cluster"));
        assert!(transient("etcdserver: too many learner members in cluster"));
        assert!(!transient("etcdserver: Peer URLs already exists"));
        assert!(!transient("etcdserver: permission denied"));
    }
}
