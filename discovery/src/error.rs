//! Turns every error into a response, in one place: problem documents of RFC 9457.

use actix_web::http::StatusCode;
use actix_web::http::header::{self, HeaderValue};
use actix_web::{HttpResponse, ResponseError};
use discovery_formation::Millis;
use discovery_formation::service::Refusal;
use discovery_types::access::AccessError;
use discovery_types::admin::AdminError;
use discovery_types::approval::ApprovalError;
use discovery_types::confirmation::ConfirmationError;
use discovery_types::convert::problem_code;
use discovery_types::document::DocumentError;
use discovery_types::grant::GrantError;
use discovery_types::member_address::MemberAddressError;
use discovery_types::order::OrderError;
use discovery_types::problem::{Code, PROBLEM_JSON, Problem, Removal};
use discovery_types::readmission::ReadmissionError;
use discovery_types::record::RecordError;
use discovery_types::recovery::RecoveryError;
use discovery_types::redeem::RedeemError;
use discovery_types::retire::RetireError;
use discovery_types::service::ServiceStatementError;
use discovery_types::statement::StatementError;
use discovery_types::text::printable;

use crate::ca::CaError;
use crate::ledger::LedgerError;
use crate::store::StoreError;

/// Value of `Retry-After`, in seconds, for responses with status 429 or 503.
const RETRY_AFTER_SECONDS: u64 = 2;

/// A refused or failed request, as a problem document.
#[derive(Debug)]
pub(crate) struct ApiError {
    // Boxed to keep `Result` small: nearly every function here returns this error.
    problem: Box<Problem>,
    retry_after_seconds: Option<u64>,
    /// The cause, for the log only: clients never see it.
    cause: Option<String>,
    /// Whether a newer program wrote the rows that can't be read.
    is_newer_data: bool,
    /// Whether the database answers, but takes no writes.
    is_without_writes: bool,
}

impl ApiError {
    /// Makes a problem. `detail` says what happened, `next` what the caller should do. `detail` may
    /// quote a text of the request, so it is made printable.
    pub(crate) fn new(code: Code, detail: impl Into<String>, next: impl Into<String>) -> Self {
        let retry_after_seconds = matches!(code.status(), 429 | 503).then_some(RETRY_AFTER_SECONDS);
        let problem = Box::new(Problem::new(code, printable(&detail.into()), next));
        ApiError {
            problem,
            retry_after_seconds,
            cause: None,
            is_newer_data: false,
            is_without_writes: false,
        }
    }

    /// Keeps the messages of `error` and its sources for the log. Only messages are kept, because
    /// the details of a database error can quote a row.
    #[must_use]
    pub(crate) fn because(mut self, error: &dyn std::error::Error) -> Self {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(deeper) = source {
            text = format!("{text}: {deeper}");
            source = deeper.source();
        }
        self.cause = Some(text);
        self
    }

    /// Error for an unknown id. `what` is the kind of thing, such as "cluster".
    pub(crate) fn not_found(what: &str) -> Self {
        let next = "Check the id, and that it is this service's.";
        ApiError::new(Code::NotFound, format!("There is no {what} here."), next)
    }

    /// Error for the agent of a member that was removed from its cluster.
    pub(crate) fn removed(removal: Removal) -> Self {
        let detail = format!(
            "Member {} was removed from its cluster by {}.",
            removal.member,
            printable(&removal.by)
        );
        let next = "Ask the cluster itself. If it says the same, leave the data for inspection; the \
                    host comes anew after `muster-agent reset`, with a ticket.";
        let mut error = ApiError::new(Code::Removed, detail, next);
        error.problem.removal = Some(removal);
        error
    }

    /// Error for a fault of the service, or of something it depends on. `wrap_request` logs it with
    /// its cause.
    pub(crate) fn internal(detail: impl Into<String>, error: &dyn std::error::Error) -> Self {
        ApiError::new(Code::Internal, detail, "Look into the service's log.").because(error)
    }

    /// Sets the `Retry-After` header, in seconds.
    #[must_use]
    pub(crate) fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after_seconds = Some(seconds);
        self
    }

    /// Replaces `key` in the texts by `name (key)`, so that a reader sees whose key it is.
    #[must_use]
    pub(crate) fn with_key_name(mut self, key: &str, name: &str) -> Self {
        for text in [&mut self.problem.detail, &mut self.problem.next] {
            *text = text.replace(key, &format!("{name} ({key})"));
        }
        self
    }

    /// Replaces the advice on what to do next.
    #[must_use]
    pub(crate) fn with_advice(mut self, next: impl Into<String>) -> Self {
        self.problem.next = next.into();
        self
    }

    /// The problem document that is sent to the client.
    pub(crate) fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Marks the error as retryable: the same request may succeed later.
    #[must_use]
    pub(crate) fn mark_retryable(mut self) -> Self {
        self.problem.retryable = true;
        self
    }

    /// Whether the error means that rows are damaged: an internal error that no retry fixes. Rows
    /// of a newer program aren't damaged: that program can read them.
    pub(crate) fn is_damage(&self) -> bool {
        self.problem.code == Code::Internal && !self.problem.retryable && !self.is_newer_data
    }

    /// Whether a newer program wrote the rows that can't be read.
    pub(crate) fn is_newer_data(&self) -> bool {
        self.is_newer_data
    }

    /// Whether the database answers, but takes no writes.
    pub(crate) fn is_without_writes(&self) -> bool {
        self.is_without_writes
    }

    /// Error for a database that answers, but takes no writes.
    pub(crate) fn takes_no_writes() -> Self {
        let detail = "The database takes no writes: its disk is full, or it is a standby.";
        let next = "Free space on the database's disk, or let the service use the primary.";
        let mut error = ApiError::new(Code::DatabaseUnavailable, detail, next);
        error.is_without_writes = true;
        error
    }

    /// Converts a refusal by the formation state machine.
    pub(crate) fn from_refusal(refusal: &Refusal, lease: Millis) -> Self {
        let mut error = ApiError::new(
            problem_code(refusal.code()),
            sentence(refusal),
            sentence(refusal.remedy(lease)),
        );
        error.problem.retryable = refusal.is_retryable();
        error
    }
}

/// Makes a sentence: "the token expired" → "The token expired." A first word that isn't all
/// lowercase letters, such as a key or a URL, stays as it is.
pub(crate) fn sentence(text: impl ToString) -> String {
    let text = text.to_string();
    let end = if text.ends_with(['.', '!', '?']) { "" } else { "." };
    let first = text.split(' ').next().unwrap_or_default();
    if !first.chars().all(|letter| letter.is_ascii_lowercase()) {
        return format!("{text}{end}");
    }
    let (head, tail) = text.split_at(text.len().min(1));
    format!("{}{tail}{end}", head.to_uppercase())
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.problem.fmt(f)?;
        match &self.cause {
            Some(cause) => write!(f, " ({cause})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for ApiError {}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        StatusCode::from_u16(self.problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.status_code());
        if let Some(seconds) = self.retry_after_seconds {
            response.insert_header((header::RETRY_AFTER, HeaderValue::from(seconds)));
        }
        if self.problem.status == 401 {
            response.insert_header((header::WWW_AUTHENTICATE, "Bearer"));
        }
        let body = serde_json::to_vec(&self.problem).unwrap_or_default();
        response.content_type(PROBLEM_JSON).body(body)
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        let refused = match &error {
            StoreError::Unavailable(_) => {
                let next = "Wait, and try again.";
                ApiError::new(Code::DatabaseUnavailable, "The database doesn't answer.", next)
            }
            StoreError::TakesNoWrites(_) => ApiError::takes_no_writes(),
            StoreError::UniqueViolation { .. } => {
                let next = "Read it again, and decide anew.";
                ApiError::new(Code::Conflict, "Somebody else has changed it.", next)
            }
            StoreError::Damaged { what } => {
                let next = "Look who changed the database by hand; `muster-discovery cluster \
                            abandon` gives an uncommitted cluster up.";
                let mut error = ApiError::new(
                    Code::Internal,
                    format!("The database holds what can't be: {what}."),
                    next,
                );
                error.problem.retryable = false;
                return error;
            }
            StoreError::Newer(_) => {
                let next = "Upgrade muster-discovery to the newest version that runs on this \
                            database. Nothing was changed.";
                let mut error = ApiError::new(Code::Internal, sentence(&error), next);
                error.problem.retryable = false;
                error.is_newer_data = true;
                return error;
            }
            StoreError::OutOfRange(error) => {
                let next = "Send a smaller number.";
                ApiError::new(Code::InvalidRequest, sentence(error), next)
            }
            StoreError::Refused(sqlx::Error::Database(told)) => {
                from_postgres_error(told.code().as_deref(), told.message())
            }
            StoreError::Refused(_) => from_postgres_error(None, ""),
        };
        refused.because(&error)
    }
}

/// Response for an error that Postgres reports. Postgres' own message goes to the log only. The
/// exception is a dropped database: the operator needs to read which one is missing.
fn from_postgres_error(code: Option<&str>, message: &str) -> ApiError {
    /// SQLSTATE "invalid_catalog_name": the database doesn't exist.
    const NO_SUCH_DATABASE: &str = "3D000";
    match code {
        Some(NO_SUCH_DATABASE) => ApiError::new(
            Code::DatabaseUnavailable,
            format!("Postgres says: {message}."),
            "Create the database again and restore its backup into it. Nodes that run go on \
             meanwhile.",
        ),
        _ => {
            let next = "Look into the service's log.";
            ApiError::new(Code::Internal, "The database refused.", next)
        }
    }
}

impl From<LedgerError> for ApiError {
    fn from(error: LedgerError) -> Self {
        match error {
            LedgerError::Contradiction { cluster_id } => ApiError::new(
                Code::Split,
                format!("This process has let out another commit of cluster {cluster_id}."),
                "Run no second cluster: look which list's members hold data.",
            ),
            LedgerError::Io { .. }
            | LedgerError::Files(_)
            | LedgerError::InUse { .. }
            | LedgerError::Damaged { .. }
            | LedgerError::Failed => {
                let next = "Wait, and try again.";
                ApiError::new(Code::Overloaded, "The service is stopping.", next).because(&error)
            }
        }
    }
}

macro_rules! refused_as {
    ($($error:ty => $code:ident, $next:literal;)*) => {
        $(impl From<$error> for ApiError {
            fn from(error: $error) -> Self {
                ApiError::new(Code::$code, sentence(error), $next)
            }
        })*
    };
}

impl From<ReadmissionError> for ApiError {
    fn from(error: ReadmissionError) -> Self {
        let next =
            "Replace the member: `muster-agent reset` on its host, and a ticket with --replace.";
        ApiError::new(Code::Forbidden, sentence(error), next)
    }
}

refused_as! {
    MemberAddressError => RecordRefused, "Wait until the agent has renewed its member's certificates.";
    StatementError => StatementRefused, "Sign a statement that follows the newest one.";
    RedeemError => RecordRefused, "Check which service the bundle is for.";
    DocumentError => DocumentRefused, "Show the document as it was received.";
    AdminError => AdminRefused, "Fetch the newest chain and sign anew.";
    CaError => CsrRefused, "Send a PKCS#10 request of an ECDSA P-256 key.";
    OrderError => OrderRefused, "Look with `muster-discovery cluster show`, and order again.";
    RecoveryError => RecoveryRefused, "Look with `muster-agent recover examine` what was made, and \
        have an operator or owner of today sign it: `muster-agent recover make`.";
    ApprovalError => RecordRefused, "Have an issuer of the cluster's newest statement run \
        `muster-discovery cluster approve`.";
    ConfirmationError => GrantRefused, "Look with `muster-discovery token list`, and run \
        `muster-discovery token confirm` again.";
    RetireError => StatementRefused, "Fetch the newest statement and sign anew.";
    ServiceStatementError => StatementRefused, "Announce again with `muster-discovery service \
        announce`, as an owner.";
    AccessError => TokenInvalid, "Ask for another token at /v1/token.";
}

impl From<RecordError> for ApiError {
    fn from(error: RecordError) -> Self {
        use RecordError::{OtherAddress, OtherName, OtherZone};
        let (code, next) = match &error {
            OtherAddress { .. } | OtherName { .. } | OtherZone(_) => {
                (Code::GrantBinding, "Use the token for the member that it is for.")
            }
            _ => (Code::RecordRefused, "Correct the agent's settings and start it again."),
        };
        ApiError::new(code, sentence(error), next)
    }
}

impl From<GrantError> for ApiError {
    fn from(error: GrantError) -> Self {
        let next = "Mint another one with `muster-discovery token create`.";
        ApiError::new(Code::GrantRefused, sentence(error), next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn postgres_messages_about_the_schema_are_kept_from_clients() {
        let error = from_postgres_error(Some("42501"), "permission denied for table grants");
        assert!(!error.to_string().contains("grants"), "{error}");
    }
}
