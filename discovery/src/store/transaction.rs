//! A transaction on a pooled connection that is always ended before the connection is reused.
//!
//! The pool takes back any connection. One that is still in a transaction would put the next
//! request into it, with its locks. One whose transaction was aborted would refuse every statement.
//!
//! sqlx's own guard rolls back only a transaction whose BEGIN it has seen succeed. It misses one
//! whose BEGIN failed, or whose caller stopped waiting. This guard rolls back whatever became of
//! BEGIN, so BEGIN may take a lock as well, in one round trip. A connection that can't be rolled
//! back in time is closed.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, PgPool, Postgres, SqlSafeStr, SqlStr};

use super::error::{is_dead_connection, no_answer_error};

/// Time limit for BEGIN, including the wait for a connection: longer than it waits for a lock.
const BEGIN_WAIT: Duration = Duration::from_secs(4);
/// Time limit for COMMIT: longer than a loaded disk needs.
const COMMIT_WAIT: Duration = Duration::from_secs(10);
/// Time limit for ROLLBACK. It may have to wait for an abandoned statement, which Postgres ends
/// after the statement timeout.
const ROLLBACK_WAIT: Duration = Duration::from_secs(5);

/// A transaction. Dropping it rolls it back, unless it was committed.
#[derive(Debug)]
pub(crate) struct Transaction {
    /// `None` once the transaction has ended.
    connection: Option<PoolConnection<Postgres>>,
}

impl Transaction {
    /// Starts a transaction. `begin` is BEGIN and any statements for the same round trip. It also
    /// tests whether the connection is alive.
    pub(super) async fn begin(pool: &PgPool, begin: impl SqlSafeStr) -> Result<Self, sqlx::Error> {
        let begin = begin.into_sql_str();
        let begun = async {
            // A dead connection has done nothing and has left the pool, so it is safe to try the
            // next one. There are at most as many as the pool holds.
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
        tokio::time::timeout(BEGIN_WAIT, begun).await.unwrap_or_else(|_| Err(no_answer_error()))
    }

    async fn begin_on(
        connection: PoolConnection<Postgres>,
        begin: SqlStr,
    ) -> Result<Self, sqlx::Error> {
        let mut transaction = Transaction { connection: Some(connection) };
        sqlx::raw_sql(begin).execute(&mut *transaction).await?;
        Ok(transaction)
    }

    /// Commits. An error means that the transaction was rolled back, or that its fate is unknown.
    pub(crate) async fn commit(mut self) -> Result<(), sqlx::Error> {
        let asked = sqlx::raw_sql("COMMIT").execute(&mut *self);
        tokio::time::timeout(COMMIT_WAIT, asked)
            .await
            .unwrap_or_else(|_| Err(no_answer_error()))?;
        self.connection = None;
        Ok(())
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
