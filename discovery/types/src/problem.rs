//! Problem documents (RFC 9457): what went wrong, whether to try again, and what to do next.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::digest::MemberId;

/// Media type of a problem document.
pub const PROBLEM_JSON: &str = "application/problem+json";

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident $text:tt $status:literal $retry:ident $title:literal,)*) => {
        /// Stable name of a problem. Programs branch on it, so a code never gets another meaning.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
        pub enum Code {
            $($(#[$doc])* #[serde(rename = $text)] $name,)*
            /// A code that this program doesn't know, sent by a newer service.
            #[serde(other, rename = "unknown")]
            Unknown,
        }

        impl Code {
            /// Every code that a service may send.
            pub const ALL: &'static [Code] = &[$(Code::$name),*];

            /// Returns the code's name on the wire.
            pub fn as_str(self) -> &'static str {
                match self { $(Code::$name => $text,)* Code::Unknown => "unknown" }
            }

            /// Returns the HTTP status of an answer with this code.
            pub fn status(self) -> u16 {
                match self { $(Code::$name => $status,)* Code::Unknown => 500 }
            }

            /// Whether the same request may succeed later without any other action.
            pub fn is_retryable(self) -> bool {
                match self { $(Code::$name => codes!(@ $retry),)* Code::Unknown => false }
            }

            /// Returns a short description of the problem.
            pub fn title(self) -> &'static str {
                match self { $(Code::$name => $title,)* Code::Unknown => "Unknown problem" }
            }
        }
    };
    (@ again) => { true };
    (@ never) => { false };
}

codes! {
    /// The request is malformed: its JSON, one of its fields, or a length.
    InvalidRequest "invalid_request" 400 never "The request can't be read",
    /// The statement isn't valid, or doesn't follow the previous one.
    StatementRefused "statement_refused" 400 never "The statement is refused",
    /// The grant isn't valid.
    GrantRefused "grant_refused" 400 never "The grant is refused",
    /// The record or its endorsement isn't valid.
    RecordRefused "record_refused" 400 never "The record is refused",
    /// The ack, nack, release or probe report isn't valid.
    VoteRefused "vote_refused" 400 never "The signed message is refused",
    /// The element of the admin chain isn't valid.
    AdminRefused "admin_refused" 400 never "The change of admins is refused",
    /// The order isn't valid.
    OrderRefused "order_refused" 400 never "The order is refused",
    /// The recovery statement isn't valid, or doesn't begin with the Raft cluster that the previous
    /// one ended with.
    RecoveryRefused "recovery_refused" 400 never "The recovery statement is refused",
    /// The certificate signing request isn't valid.
    CsrRefused "csr_refused" 400 never "The signing request is refused",
    /// The commit document isn't valid.
    DocumentRefused "document_refused" 400 never "The commit document is refused",

    /// The request has no access token.
    TokenMissing "token_missing" 401 never "An access token is needed",
    /// The access token isn't valid, or has expired. The client should get a new one.
    TokenInvalid "token_invalid" 401 never "The access token is not valid",
    /// The assertion isn't valid, is too old, or was used before.
    AssertionRefused "assertion_refused" 401 never "The assertion is refused",
    /// The connection has no client certificate, or its key isn't an Ed25519 key.
    ClientKeyMissing "client_key_missing" 401 never "A client certificate is needed",
    /// The key belongs to no agent or admin of this service, or was revoked.
    UnknownKey "unknown_key" 401 never "The key is not known here",
    /// The token doesn't exist here, belongs to another cluster or service, or the request doesn't
    /// prove its secret.
    GrantUnknown "grant_unknown" 401 never "The token is not known here",

    /// The client's role doesn't allow the request.
    Forbidden "forbidden" 403 never "Not allowed",
    /// The key is not among the admins of the cluster's newest statement.
    NotInStatement "not_in_statement" 403 never "Not in the cluster's statement",
    /// The token has expired.
    GrantExpired "grant_expired" 403 never "The token has expired",
    /// The token was revoked.
    GrantRevoked "grant_revoked" 403 never "The token was revoked",
    /// The token was made before the last change of the database. An issuer can confirm it.
    GrantVoid "grant_void" 403 again "The token has to be confirmed",
    /// The token doesn't allow this address, name or zone.
    GrantBinding "grant_binding" 403 never "The token is bound to something else",
    /// The token was used with more different keys than three times the cluster's size.
    GrantExhausted "grant_exhausted" 403 never "Too many keys have used the token",

    /// There is no such cluster, grant, admin or route.
    NotFound "not_found" 404 never "Not found",
    /// Only the cluster's own API can change its members.
    MembershipElsewhere "membership_elsewhere" 405 never "Membership is changed elsewhere",
    /// The route needs another HTTP method.
    MethodNotAllowed "method_not_allowed" 405 never "Another method is needed",
    /// The client took too long to send its request.
    RequestTimeout "request_timeout" 408 again "The request took too long to arrive",

    /// Another cluster has this name.
    NameTaken "name_taken" 409 never "The name is taken",
    /// The object was changed in the meantime. The client should read it again.
    Conflict "conflict" 409 never "It was changed in the meantime",
    /// Another session uses the key: the request's boot counter isn't higher than that session's.
    KeyElsewhere "key_elsewhere" 409 never "This key is in use elsewhere",
    /// Another key has already redeemed the join ticket.
    TicketTaken "ticket_taken" 409 never "The ticket belongs to another key",
    /// The order names another configuration than the cluster's present one. The operator should
    /// check the members and order again.
    StalePlan "stale_plan" 409 never "The plan is stale",
    /// The epoch is not the current one. The agent should poll for the present proposal.
    StaleEpoch "stale_epoch" 409 never "The epoch is not the current one",
    /// Another recovery statement begins with the same Raft cluster, and the service follows that
    /// other statement.
    RecoveryContested "recovery_contested" 409 never "The cluster was recovered twice",
    /// The cluster's state doesn't allow the request.
    WrongState "wrong_state" 409 never "The cluster's state doesn't allow this",
    /// Members of the cluster have reported a moment ago, so retiring it needs `force`.
    MembersReport "members_report" 409 never "Members of the cluster still report",
    /// The cluster has committed, so only an owner's retirement can end it.
    Committed "committed" 409 never "The cluster has committed",
    /// The cluster has two commit documents.
    Split "split" 409 never "Two commit documents of one cluster",

    /// The cluster has all its members, so a boot token gives no seat any more.
    BootClosed "boot_closed" 410 never "The cluster has its members",
    /// An admin abandoned the cluster before its commit, or the cluster was closed after the
    /// database changed.
    Abandoned "abandoned" 410 never "The cluster was abandoned",
    /// The cluster's deadline passed before its commit.
    Expired "expired" 410 never "The cluster didn't form in time",
    /// An owner retired the cluster.
    Retired "retired" 410 never "The cluster was retired",
    /// This incarnation was removed from its cluster. A client must have the cluster itself confirm
    /// this, and can't rely on this answer alone.
    Removed "removed" 410 never "The member was removed",
    /// The agent's member belongs to a lost Raft cluster, which a recovered one has replaced.
    ClusterLost "cluster_lost" 410 never "The member's cluster was lost",
    /// The draft has expired. Drafts expire ten minutes after they were made.
    DraftGone "draft_gone" 410 never "The draft is gone",

    /// The request body is longer than allowed.
    TooLarge "too_large" 413 never "The body is too large",
    /// The route needs another media type.
    MediaType "media_type" 415 never "Another media type is needed",
    /// Too many requests from this address.
    RateLimited "rate_limited" 429 again "Too many requests",

    /// The service has an internal fault, such as a damaged row in its database.
    Internal "internal" 500 again "A fault of the service",
    /// Postgres can't be reached or didn't answer in time.
    DatabaseUnavailable "database_unavailable" 503 again "The database doesn't answer",
    /// Postgres now is another database than before. Nothing commits until the ledgers agree with
    /// it, or an owner accepts it.
    DatabaseChanged "database_changed" 503 again "The database is not the one that it was",
    /// The service is overloaded, or is stopping.
    Overloaded "overloaded" 503 again "The service is busy",
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Problem document of RFC 9457.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// URN of the problem: `urn:muster:problem:` and the code.
    #[serde(rename = "type")]
    pub kind: String,
    /// Short description of the problem, which depends only on the code.
    pub title: String,
    /// HTTP status of the answer.
    pub status: u16,
    /// Description of what happened in this case.
    pub detail: String,
    /// Code that programs branch on.
    pub code: Code,
    /// Whether the same request may succeed later without any other action.
    pub retryable: bool,
    /// Advice on what to do now.
    pub next: String,
    /// Member and time of the removal; only with [`Code::Removed`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removal: Option<Removal>,
}

/// Removal of a member from its cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Removal {
    /// Id of the member in the cluster.
    pub member: MemberId,
    /// Time at which the service learned of the removal, in milliseconds since 1970.
    pub at_ms: i64,
    /// Admin who ordered the removal, as far as the service knows.
    pub by: String,
}

impl Problem {
    /// Makes a problem document. `detail` says what happened and `next` what to do about it, each
    /// in one sentence.
    pub fn new(code: Code, detail: impl Into<String>, next: impl Into<String>) -> Self {
        Self {
            kind: format!("urn:muster:problem:{code}"),
            title: code.title().into(),
            status: code.status(),
            detail: detail.into(),
            code,
            retryable: code.is_retryable(),
            next: next.into(),
            removal: None,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.detail)?;
        if !self.next.is_empty() {
            write!(f, " {}", self.next)?;
        }
        write!(f, " [{}]", self.code)
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_keep_their_names_and_statuses() {
        let table: Vec<_> = Code::ALL
            .iter()
            .map(|c| format!("{} {c}{}", c.status(), if c.is_retryable() { " again" } else { "" }))
            .collect();
        insta::assert_snapshot!(table.join("\n"));
    }

    #[test]
    fn each_code_survives_a_round_trip_through_json() {
        for code in Code::ALL {
            let text = serde_json::to_string(code).unwrap();
            assert_eq!(text, format!("\"{code}\""));
            assert_eq!(serde_json::from_str::<Code>(&text).unwrap(), *code);
        }
    }

    #[test]
    fn a_problem_with_an_unknown_code_is_still_parsed() {
        let text = r#"{"type":"urn:x","title":"t","status":409,"detail":"d","code":"brand_new",
            "retryable":true,"next":"n","instance":"/v1/x"}"#;
        let problem: Problem = serde_json::from_str(text).unwrap();
        assert_eq!((problem.code, problem.retryable), (Code::Unknown, true));
    }
}
