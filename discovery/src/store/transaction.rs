//! A transaction on a pooled connection, which is always ended before the connection is reused.
//!
//! The pool takes back any connection, even in a transaction. The next request would then run in
//! that transaction, with its locks. If the transaction was aborted, Postgres would refuse every
//! SQL statement.
//!
//! sqlx's own guard rolls back only a transaction whose BEGIN succeeded. It misses a failed BEGIN,
//! and a BEGIN whose caller stopped waiting. This guard sends ROLLBACK in every case. So BEGIN can
//! share its round trip with an SQL statement that takes a lock. A connection that can't be rolled
//! back in time is closed.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, PgPool, Postgres, SqlSafeStr, SqlStr};

use super::error::{is_dead_connection, no_answer_error};
use crate::metrics::DatabaseTimer;

/// Time limit for BEGIN, including the wait for a connection. It exceeds the session's
/// `lock_timeout`.
const BEGIN_WAIT: Duration = Duration::from_secs(4);
/// Time limit for COMMIT. Even a loaded disk needs less.
const COMMIT_WAIT: Duration = Duration::from_secs(10);
/// Time limit for ROLLBACK. ROLLBACK can wait for an abandoned SQL statement, which Postgres ends
/// after `statement_timeout`.
const ROLLBACK_WAIT: Duration = Duration::from_secs(5);

/// A connection that goes from one transaction to the next of the same caller. Meanwhile it isn't
/// in the pool, which would ping it.
#[derive(Debug)]
pub(crate) struct KeptConnection(PoolConnection<Postgres>);

/// A transaction. Dropping it rolls it back, unless it was committed.
#[derive(Debug)]
pub(crate) struct Transaction {
    /// `None` once the transaction has ended.
    connection: Option<PoolConnection<Postgres>>,
    /// Measures the transaction until it is dropped. `None` until it has begun.
    _timer: Option<DatabaseTimer>,
}

impl Transaction {
    /// Starts a transaction, on `kept` if it is given and alive. `begin` is BEGIN, followed by any
    /// SQL statements that share its round trip. Also returns the rows that these statements
    /// select. BEGIN also tests whether the connection is alive. `timer` is dropped when the
    /// transaction ends, or can't begin.
    pub(super) async fn begin(
        pool: &PgPool,
        kept: Option<KeptConnection>,
        begin: impl SqlSafeStr,
        timer: DatabaseTimer,
    ) -> Result<(Self, Vec<PgRow>), sqlx::Error> {
        let begin = begin.into_sql_str();
        let begun = async {
            if let Some(KeptConnection(connection)) = kept {
                match Transaction::begin_on(connection, begin.clone()).await {
                    Err(error) if is_dead_connection(&error) => {
                        tracing::debug!(%error, "a kept connection has died");
                    }
                    begun => return begun,
                }
            }
            // BEGIN on a dead connection has changed nothing, so trying the next connection is
            // safe. Dead connections have left the pool, so at most `pool.size()` tries fail.
            for _ in 0..pool.size() {
                match Transaction::begin_on(pool.acquire().await?, begin.clone()).await {
                    Err(error) if is_dead_connection(&error) => {
                        tracing::debug!(%error, "a pooled connection has died");
                    }
                    begun => return begun,
                }
            }
            Transaction::begin_on(pool.acquire().await?, begin.clone()).await
        };
        let begun = tokio::time::timeout(BEGIN_WAIT, begun).await;
        let (mut transaction, rows) = begun.unwrap_or_else(|_| Err(no_answer_error()))?;
        transaction._timer = Some(timer);
        Ok((transaction, rows))
    }

    async fn begin_on(
        connection: PoolConnection<Postgres>,
        begin: SqlStr,
    ) -> Result<(Self, Vec<PgRow>), sqlx::Error> {
        let mut transaction = Transaction { connection: Some(connection), _timer: None };
        let rows = sqlx::raw_sql(begin).fetch_all(&mut *transaction).await?;
        Ok((transaction, rows))
    }

    /// Commits the transaction. An error means that it was rolled back, or that its fate is
    /// unknown.
    pub(crate) async fn commit(self) -> Result<(), sqlx::Error> {
        self.commit_and_keep().await.map(drop)
    }

    /// Commits the transaction as [`Transaction::commit`] does. Returns the connection, for the
    /// caller's next transaction.
    pub(crate) async fn commit_and_keep(mut self) -> Result<Option<KeptConnection>, sqlx::Error> {
        let asked = sqlx::raw_sql("COMMIT").execute(&mut *self);
        tokio::time::timeout(COMMIT_WAIT, asked)
            .await
            .unwrap_or_else(|_| Err(no_answer_error()))?;
        Ok(self.connection.take().map(KeptConnection))
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            tokio::spawn(roll_back(connection));
        }
    }
}

async fn roll_back(mut connection: PoolConnection<Postgres>) {
    let asked = sqlx::raw_sql("ROLLBACK").execute(&mut *connection);
    if !matches!(tokio::time::timeout(ROLLBACK_WAIT, asked).await, Ok(Ok(_))) {
        connection.close_on_drop();
    }
}

impl Deref for Transaction {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.connection.as_deref().expect("it is there until the transaction is over")
    }
}

impl DerefMut for Transaction {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.connection.as_deref_mut().expect("it is there until the transaction is over")
    }
}
