//! Access to Postgres. All SQL is in this module and in `ledger`, which compares ledger and
//! database and copies decisions.
//!
//! Every transaction that decides on a cluster locks the cluster's row before it reads the clock or
//! the cluster. With that lock, the isolation level read committed suffices. All reads go to the
//! primary, never to a replica.

pub(crate) mod admins;
mod agent_builds;
pub(crate) mod ca_rotation;
pub(crate) mod changes;
pub(crate) mod check;
pub(crate) mod cluster;
pub(crate) mod clusters;
mod connect;
pub(crate) mod console;
pub(crate) mod counts;
mod error;
pub(crate) mod etcd_tokens;
pub(crate) mod grants;
pub(crate) mod instances;
pub(crate) mod intents;
mod issued_leaves;
mod key_directory;
pub(crate) mod leases;
mod member_addresses;
pub(crate) mod present;
pub(crate) mod rewrap;
pub(crate) mod statement_branches;
mod transaction;
pub(crate) mod unknown_members;

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{Connection, PgConnection, PgPool, Postgres, SqlSafeStr};

use crate::ledger::{DatabaseWatch, Ledger};
use crate::metrics::{DatabaseTimer, DatabaseUse};

pub(crate) use connect::{ConnectError, PoolSettings, connect, inspect};
pub(crate) use error::StoreError;
pub(crate) use transaction::{KeptConnection, Transaction};

/// Time in microseconds since 1970, by Postgres' clock.
pub(crate) type UnixMicros = i64;

/// Position in a list that is ordered by time and id, newest first. It is the position of an item,
/// and a page begins with the item after it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ListPosition {
    /// Time of the item.
    pub at_us: UnixMicros,
    /// Id of the item.
    pub id: String,
}

impl ListPosition {
    /// Position before the newest item. `lowest` is lower than the id of any item.
    pub(crate) fn start(lowest: impl ToString) -> Self {
        ListPosition { at_us: UnixMicros::MAX, id: lowest.to_string() }
    }
}

impl fmt::Display for ListPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.at_us, self.id)
    }
}

/// How long a pooled connection may take to answer a ping.
const PING_WAIT: Duration = Duration::from_secs(1);

/// Handle to the database. Clones share the pool.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    pool: PgPool,
    ledger: Ledger,
    watch: Arc<DatabaseWatch>,
    caches: Arc<cluster::Caches>,
}

/// A connection from the pool. It measures the time until it goes back to the pool.
#[derive(Debug)]
pub(crate) struct StoreConnection {
    connection: PoolConnection<Postgres>,
    _timer: DatabaseTimer,
}

impl Deref for StoreConnection {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.connection
    }
}

impl DerefMut for StoreConnection {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.connection
    }
}

impl Store {
    /// Returns the pool, for a caller that listens for notifications or closes the pool at the end.
    pub(crate) fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// Takes a connection from the pool and pings it. A dead connection is dropped, and the next
    /// one is tried. If a ping gets no answer in time, returns an error at once.
    pub(crate) async fn acquire(&self) -> Result<StoreConnection, StoreError> {
        let timer = self.watch.metrics.time_database(DatabaseUse::Statements);
        for _ in 0..=self.pool.size() {
            let mut connection = self.pool.acquire().await?;
            match tokio::time::timeout(PING_WAIT, connection.ping()).await {
                Ok(Ok(())) => return Ok(StoreConnection { connection, _timer: timer }),
                Ok(Err(error)) => {
                    tracing::debug!(%error, "a pooled connection has died");
                    connection.close_on_drop();
                }
                Err(_) => {
                    connection.close_on_drop();
                    break;
                }
            }
        }
        Err(StoreError::no_answer())
    }

    /// Begins a transaction with the statements in `begin`.
    pub(crate) async fn begin(&self, begin: impl SqlSafeStr) -> Result<Transaction, StoreError> {
        Ok(self.begin_and_fetch(begin, None).await?.0)
    }

    /// Begins a transaction with the statements in `begin`, on `kept` if it is given and alive.
    /// Also returns the rows that the statements select.
    pub(crate) async fn begin_and_fetch(
        &self,
        begin: impl SqlSafeStr,
        kept: Option<KeptConnection>,
    ) -> Result<(Transaction, Vec<PgRow>), StoreError> {
        let timer = self.watch.metrics.time_database(DatabaseUse::Transaction);
        Ok(Transaction::begin(&self.pool, kept, begin, timer).await?)
    }

    /// Returns the caches of verified signatures.
    pub(crate) fn caches(&self) -> &cluster::Caches {
        &self.caches
    }

    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the database's state, as this process knows it.
    pub(crate) fn watch(&self) -> &DatabaseWatch {
        &self.watch
    }

    /// Returns the time by Postgres' clock.
    pub(crate) async fn now(&self) -> Result<UnixMicros, StoreError> {
        Ok(sqlx::query_scalar("SELECT now_us()").fetch_one(&mut *self.acquire().await?).await?)
    }
}
