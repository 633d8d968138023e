//! A transaction on a pooled connection, and the only way in which one ends.
//!
//! The pool takes back whatever it is given. A connection that is still in a transaction would put
//! the next request into it, with its locks, and one whose transaction was aborted would refuse
//! everything. sqlx's own guard rolls back what it has seen begin; where that failed, or whoever
//! waited for it left, it has seen nothing. This one rolls back whatever became of BEGIN, so that
//! BEGIN may lock as well, in one round trip; and what can't be rolled back in time is closed.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, PgPool, Postgres, SqlSafeStr, SqlStr};

use super::error::{is_dead_connection, silent};

/// How long BEGIN may take, with a connection for it: longer than it waits for a lock.
const BEGIN_WAIT: Duration = Duration::from_secs(4);
/// How long COMMIT may take: longer than a loaded disk needs.
const COMMIT_WAIT: Duration = Duration::from_secs(10);
/// How long ROLLBACK may take: it comes after a statement that nobody waits for any more, and that
/// Postgres ends after its time-out.
const ROLLBACK_WAIT: Duration = Duration::from_secs(5);

/// Rolls back when it is dropped, unless it was committed.
#[derive(Debug)]
pub(crate) struct Transaction {
    /// There until the transaction is over.
    connection: Option<PoolConnection<Postgres>>,
}

impl Transaction {
    /// `begin` is BEGIN, and what else may be asked in the same breath. It is also how the
    /// connection is asked whether it lives.
    pub(super) async fn begin(pool: &PgPool, begin: impl SqlSafeStr) -> Result<Self, sqlx::Error> {
        let begin = begin.into_sql_str();
        let begun = async {
            // On one that has died nothing was done, and it is gone from the pool: the next is
            // tried, and no more than there were.
            for _ in 0..pool.size() {
                match Transaction::on(pool.acquire().await?, begin.clone()).await {
                    Err(error) if is_dead_connection(&error) => {
                        tracing::debug!(%error, "a pooled connection has died");
                    }
                    begun => return begun,
                }
            }
            Transaction::on(pool.acquire().await?, begin.clone()).await
        };
        tokio::time::timeout(BEGIN_WAIT, begun).await.unwrap_or_else(|_| Err(silent()))
    }

    async fn on(connection: PoolConnection<Postgres>, begin: SqlStr) -> Result<Self, sqlx::Error> {
        let mut transaction = Transaction { connection: Some(connection) };
        sqlx::raw_sql(begin).execute(&mut *transaction).await?;
        Ok(transaction)
    }

    /// Errors if nothing was committed, or nobody knows.
    pub(crate) async fn commit(mut self) -> Result<(), sqlx::Error> {
        let asked = sqlx::raw_sql("COMMIT").execute(&mut *self);
        tokio::time::timeout(COMMIT_WAIT, asked).await.unwrap_or_else(|_| Err(silent()))?;
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
