//! What can go wrong in the database, by what the caller does about it.

use crate::domain::OutOfRange;

/// Postgres error classes and codes (its appendix A) that mean "not now".
const TRANSIENT: [&str; 7] = [
    "08",    // connection exceptions
    "40",    // transaction rollback: deadlock, serialisation
    "53",    // insufficient resources: disk full, too many connections
    "57",    // operator intervention: shutdown, statement timeout
    "58",    // system errors
    "55P03", // lock not available
    "25P03", // idle in transaction for too long
];
/// What a server says to a connection that it ends: by hand, after a crash, before it is up again.
const ENDED: [&str; 3] = ["57P01", "57P02", "57P03"];
const UNIQUE_VIOLATION: &str = "23505";

/// A failed store call.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// Postgres is away, slow or full: 503, and try again.
    #[error("the database doesn't answer")]
    Unavailable(#[source] sqlx::Error),
    /// A unique constraint: somebody else has it.
    #[error("`{constraint}` holds such a row already")]
    Taken {
        /// The constraint's name.
        constraint: String,
    },
    /// A row that can't be right: changed by hand, or by a broken disk.
    #[error("the database holds what can't be: {what}")]
    Damaged {
        /// Which row, and in which way.
        what: String,
    },
    /// A number from outside that no row can hold.
    #[error(transparent)]
    OutOfRange(#[from] OutOfRange),
    /// A constraint stopped a wrong decision, or the schema isn't ours. A bug either way.
    #[error("the database refused")]
    Refused(#[source] sqlx::Error),
}

impl StoreError {
    /// Postgres doesn't say anything.
    pub(crate) fn silent() -> Self {
        StoreError::Unavailable(silent())
    }

    /// A row that doesn't parse or verify.
    pub(crate) fn damaged(what: impl Into<String>) -> Self {
        StoreError::Damaged { what: what.into() }
    }
}

/// Whether it was the connection that failed, and not what was asked.
pub(super) fn is_dead_connection(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) => true,
        sqlx::Error::Database(told) => told.code().is_some_and(|code| ENDED.contains(&&*code)),
        _ => false,
    }
}

/// Postgres is there, or was, and says nothing.
pub(super) fn silent() -> sqlx::Error {
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
            return StoreError::Taken { constraint };
        }
        match TRANSIENT.iter().any(|prefix| code.starts_with(prefix)) {
            true => StoreError::Unavailable(error),
            false => StoreError::Refused(error),
        }
    }
}
