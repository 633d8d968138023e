//! Postgres. SQL is here, and in `ledger`, which compares and copies.
//!
//! Every transaction on a cluster locks the cluster's row, then reads the clock, then does one
//! thing; read committed suffices with the lock, and a replica is never read.

pub mod admins;
pub mod check;
pub mod cluster;
pub mod clusters;
mod connect;
mod error;
pub mod grants;
mod key_directory;

use std::sync::Arc;

use sqlx::pool::PoolConnection;
use sqlx::{PgPool, Postgres, SqlSafeStr, Transaction};

use crate::ledger::{DatabaseWatch, Ledger};

pub use connect::{ConnectError, PoolSettings, connect};
pub use error::StoreError;

/// Microseconds since 1970 by Postgres' clock.
pub type Micros = i64;

/// A handle to the database; clones share the pool.
#[derive(Clone, Debug)]
pub struct Store {
    pool: PgPool,
    ledger: Ledger,
    watch: Arc<DatabaseWatch>,
    caches: Arc<cluster::Caches>,
}

impl Store {
    /// The pool.
    pub(crate) fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// A connection.
    pub(crate) async fn acquire(&self) -> Result<PoolConnection<Postgres>, StoreError> {
        Ok(self.pool.acquire().await?)
    }

    /// A transaction. `begin` is BEGIN with its options and nothing else: what fails, or is given up,
    /// while it is asked for leaves a connection in the pool that is in a transaction and doesn't
    /// know it. For the same reason it is asked in a task of its own, which goes on when whoever
    /// waits for it leaves.
    pub(crate) async fn begin(
        &self,
        begin: impl SqlSafeStr,
    ) -> Result<Transaction<'static, Postgres>, StoreError> {
        let (pool, begin) = (self.pool.clone(), begin.into_sql_str());
        let begun = tokio::spawn(async move {
            // The pool may hold connections that died a moment ago. On one that can't begin nothing
            // was done, and it is gone from the pool: the next is tried, and no more than there were.
            for _ in 0..pool.size() {
                match pool.begin_with(begin.clone()).await {
                    Err(error) if error::is_dead_connection(&error) => {
                        tracing::debug!(%error, "a pooled connection has died");
                    }
                    begun => return begun,
                }
            }
            pool.begin_with(begin).await
        });
        Ok(begun.await.map_err(|error| sqlx::Error::Io(std::io::Error::other(error)))??)
    }

    /// This process's ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// What is known of the database.
    pub fn watch(&self) -> &DatabaseWatch {
        &self.watch
    }

    /// Asks Postgres for the time.
    pub async fn now(&self) -> Result<Micros, StoreError> {
        Ok(sqlx::query_scalar("SELECT now_us()").fetch_one(&self.pool).await?)
    }
}
