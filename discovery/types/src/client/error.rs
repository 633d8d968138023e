//! Errors of requests to the discovery service.

use std::error::Error;

use super::pinned::PinMismatch;
use crate::problem::{Code, Problem};

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server's key isn't among the pinned keys. The request was not sent to this server.
    #[error(
        "{url} has the key {}, which is not the pinned one: this is not the service that you were \
         told about, or its key was changed and you need a new context or bundle",
        mismatch.found
    )]
    Pin {
        /// URL of the server.
        url: String,
        /// Key of the server's certificate.
        mismatch: PinMismatch,
    },
    /// No URL could be reached.
    #[error("the discovery service can't be reached at {url}")]
    Unreachable {
        /// The last URL that was tried.
        url: String,
        /// Error of the connection attempt.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The connection broke or timed out after the request may have been sent. So the service may
    /// have carried out the request.
    #[error("the connection to {url} broke before the answer came")]
    Interrupted {
        /// URL that the request was sent to.
        url: String,
        /// Error of the connection.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The service refused the request; holds the reason.
    #[error("{0}")]
    Problem(Box<Problem>),
    /// The answer isn't one of the discovery API.
    #[error("{url} answered with status {status} and something that is not of this API: {reason}")]
    Foreign {
        /// URL that gave the answer.
        url: String,
        /// HTTP status of the answer.
        status: u16,
        /// Reason why the answer can't be used.
        reason: String,
    },
    /// The client was made without a key, and the request needs one.
    #[error("this request needs a key to authenticate with")]
    NoKey,
    /// The HTTPS client can't be built from these settings.
    #[error("the HTTPS client can't be set up")]
    Setup(#[source] Box<dyn Error + Send + Sync>),
}

impl ClientError {
    /// Whether the same request may succeed later without any other action.
    pub fn is_retryable(&self) -> bool {
        match self {
            ClientError::Unreachable { .. } | ClientError::Interrupted { .. } => true,
            ClientError::Problem(problem) => problem.retryable,
            // A proxy sends status 429, 502, 503 or 504 if it can't serve a request at the moment.
            // Any other foreign answer comes from a wrong server.
            ClientError::Foreign { status, .. } => matches!(status, 429 | 502 | 503 | 504),
            ClientError::Pin { .. } | ClientError::NoKey | ClientError::Setup(_) => false,
        }
    }

    /// Returns the error and its causes as one text.
    pub fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        text
    }

    /// The code of the service's problem document, if the service refused the request.
    pub fn code(&self) -> Option<Code> {
        match self {
            ClientError::Problem(problem) => Some(problem.code),
            ClientError::Pin { .. }
            | ClientError::Unreachable { .. }
            | ClientError::Interrupted { .. }
            | ClientError::Foreign { .. }
            | ClientError::NoKey
            | ClientError::Setup(_) => None,
        }
    }
}

/// Searches the causes of a failed connection for a pin mismatch. The method `source` of an I/O
/// error doesn't return the error that it wraps. So the wrapped error is searched explicitly.
pub(super) fn pin_mismatch(error: &(dyn Error + 'static)) -> Option<PinMismatch> {
    if let Some(rustls::Error::InvalidCertificate(rustls::CertificateError::Other(other))) =
        error.downcast_ref()
    {
        return other.0.downcast_ref::<PinMismatch>().cloned();
    }
    if let Some(inner) = error.downcast_ref::<std::io::Error>().and_then(|io| io.get_ref()) {
        return pin_mismatch(inner);
    }
    pin_mismatch(error.source()?)
}
