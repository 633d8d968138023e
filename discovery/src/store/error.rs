//! Errors of the store, by what the caller can do about them.

use discovery_types::jws::{JwsError, newer_version};

use crate::domain::OutOfRange;

/// Postgres error classes and codes (its appendix A) that mean "try again later".
const TRANSIENT_CODES: [&str; 7] = [
    "08",    // connection exceptions
    "40",    // transaction rollback: deadlock, serialisation
    "53",    // insufficient resources: too many connections, no memory
    "57",    // operator intervention: shutdown, statement timeout
    "58",    // system errors
    "55P03", // lock not available
    "25P03", // idle in transaction for too long
];
/// Codes with which a server ends a connection: by an administrator, after a crash, or while
/// starting.
const CONNECTION_END_CODES: [&str; 3] = ["57P01", "57P02", "57P03"];
const UNIQUE_VIOLATION: &str = "23505";
/// Codes with which a server that answers refuses to write: its disk is full, or it is a standby.
const NO_WRITES_CODES: [&str; 2] = ["53100", "25006"];

/// Why a store call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// Postgres is unreachable, slow or full. The response is 503, and a retry may succeed.
    #[error("the database doesn't answer")]
    Unavailable(#[source] sqlx::Error),
    /// Postgres answers, but writes nothing: its disk is full, or it is a standby. The response is
    /// 503, and a retry may succeed.
    #[error("the database takes no writes")]
    TakesNoWrites(#[source] sqlx::Error),
    /// A unique constraint failed: another row holds the value.
    #[error("`{constraint}` holds such a row already")]
    UniqueViolation { constraint: String },
    /// A row holds an impossible value: it was changed by hand, or by a broken disk.
    #[error("the database holds what can't be: {what}")]
    Damaged {
        /// Description of the damaged row.
        what: String,
    },
    /// A row holds a signed text that a newer program made.
    #[error("the database holds what was {0}")]
    Newer(JwsError),
    /// A number in the request is too large for a row.
    #[error(transparent)]
    OutOfRange(#[from] OutOfRange),
    /// A constraint prevented a wrong decision, or the schema isn't the one that this program made.
    /// Either case is a bug.
    #[error("the database refused")]
    Refused(#[source] sqlx::Error),
}

impl StoreError {
    /// Error for a Postgres that doesn't respond.
    pub(crate) fn no_answer() -> Self {
        StoreError::Unavailable(no_answer_error())
    }

    /// Error for a row that doesn't parse or verify.
    pub(crate) fn damaged(what: impl Into<String>) -> Self {
        StoreError::Damaged { what: what.into() }
    }

    /// Converts `error` about a signed text. The result is `Newer` if a newer program made the
    /// text, and otherwise the value of `damaged`.
    pub(crate) fn unreadable(
        error: &(dyn std::error::Error + 'static),
        damaged: impl FnOnce() -> Self,
    ) -> Self {
        newer_version(error).map_or_else(damaged, |newer| StoreError::Newer(newer.clone()))
    }
}

/// Whether the connection failed, and not only the SQL statement.
pub(super) fn is_dead_connection(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) => true,
        sqlx::Error::Database(told) => {
            told.code().is_some_and(|code| CONNECTION_END_CODES.contains(&&*code))
        }
        _ => false,
    }
}

/// Error for a Postgres that accepted a connection but doesn't respond.
pub(super) fn no_answer_error() -> sqlx::Error {
    sqlx::Error::Protocol("Postgres doesn't answer".into())
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        let Some(database) = error.as_database_error() else {
            return match error {
                sqlx::Error::ColumnDecode { .. }
                | sqlx::Error::Decode(_)
                | sqlx::Error::ColumnNotFound(_)
                | sqlx::Error::TypeNotFound { .. }
                | sqlx::Error::RowNotFound => StoreError::Refused(error),
                _ => StoreError::Unavailable(error),
            };
        };
        let code = database.code().unwrap_or_default();
        if code == UNIQUE_VIOLATION {
            let constraint = database.constraint().unwrap_or("a constraint").to_owned();
            return StoreError::UniqueViolation { constraint };
        }
        if NO_WRITES_CODES.contains(&&*code) {
            return StoreError::TakesNoWrites(error);
        }
        match TRANSIENT_CODES.iter().any(|prefix| code.starts_with(prefix)) {
            true => StoreError::Unavailable(error),
            false => StoreError::Refused(error),
        }
    }
}
