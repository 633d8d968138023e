//! How a request can end.

use std::error::Error;

use super::pinned::PinMismatch;
use crate::problem::{Code, Problem};

/// Why a request didn't give what was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// A server was reached that has another key. Nothing was sent to it.
    #[error(
        "{url} has the key {}, which is not the pinned one: this is not the service that you were \
         told about, or its key was changed and you need a new context or bundle",
        mismatch.found
    )]
    Pin {
        /// Where.
        url: String,
        /// What it showed.
        mismatch: PinMismatch,
    },
    /// No URL could be reached.
    #[error("the discovery service can't be reached at {url}")]
    Unreachable {
        /// The last URL that was tried.
        url: String,
        /// What the system said.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The connection broke, or took too long, after the request may have been sent. It may have
    /// been carried out.
    #[error("the connection to {url} broke before the answer came")]
    Interrupted {
        /// Where.
        url: String,
        /// What the system said.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The service refused, and says why.
    #[error("{0}")]
    Problem(Box<Problem>),
    /// The answer is not one of our API's.
    #[error("{url} answered with status {status} and something that is not of this API: {reason}")]
    Foreign {
        /// Where.
        url: String,
        /// HTTP status.
        status: u16,
        /// What is wrong with the answer.
        reason: String,
    },
    /// The client was made without a key, and the request needs one.
    #[error("this request needs a key to authenticate with")]
    NoKey,
    /// The settings make no client.
    #[error("the HTTPS client can't be set up")]
    Setup(#[source] Box<dyn Error + Send + Sync>),
}

impl ClientError {
    /// Whether the same request may succeed later without anybody doing anything.
    pub fn is_retryable(&self) -> bool {
        match self {
            ClientError::Unreachable { .. } | ClientError::Interrupted { .. } => true,
            ClientError::Problem(problem) => problem.retryable,
            // A proxy's 502 passes; a wrong page doesn't.
            ClientError::Foreign { status, .. } => matches!(status, 429 | 502 | 503 | 504),
            ClientError::Pin { .. } | ClientError::NoKey | ClientError::Setup(_) => false,
        }
    }

    /// The problem's code, if the service refused.
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

/// The mismatch, if that is what lies at the bottom of a failed connection. An I/O error counts
/// what it wraps as itself, not as its source, so each is looked into.
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
