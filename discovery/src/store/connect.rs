//! Connects to Postgres: checks the server, migrates, and opens a pool. Every new connection of the
//! pool is compared with the ledger before its first use.

use std::sync::Arc;
use std::time::{Duration, Instant};

use discovery_types::digest::Digest;
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions, Connection, PgConnection};

use super::{Store, StoreError, check, key_directory};
use crate::keydir::KeyDirectory;
use crate::ledger::{DatabaseWatch, HALF_LOADED, Ledger, Occasion, look_at_database};
use crate::metrics::ServiceMetrics;

static MIGRATOR: Migrator = sqlx::migrate!("../migrations");

/// Settings of each session. `synchronous_commit` is set whatever the server's default is. With
/// `force_generic_plan` a connection plans each prepared statement once. By default Postgres would
/// plan the first five executions anew. `jit` is off: Postgres would compile an expensive plan to
/// machine code at each execution, which takes longer than any SQL statement of the service.
const SESSION: &str = "SET statement_timeout = '2s'; SET lock_timeout = '2s'; \
     SET idle_in_transaction_session_timeout = '10s'; SET synchronous_commit = on; \
     SET plan_cache_mode = 'force_generic_plan'; SET jit = off; \
     SET application_name = 'muster-discovery'";
/// Setting of the connection that migrates and makes the first check of the database. This
/// connection has no time limits, because no request waits for the service yet.
const DURABLE_COMMITS: &str = "SET synchronous_commit = on";
/// How long the start tries to get the pool's first connection.
const FIRST_CONNECTION_WAIT: Duration = Duration::from_secs(30);
/// Maximum age of a connection. Reconnecting resolves the address again, which notices a failover.
const CONNECTION_LIFE: Duration = Duration::from_secs(30 * 60);

/// Limits of the connection pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolSettings {
    /// Maximum number of connections.
    pub size: u32,
    /// How long a request waits for a connection.
    pub wait: Duration,
}

/// Why the service can't work with this database.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    /// The database doesn't respond, or refuses the connection.
    #[error("can't use the database")]
    Store(#[from] StoreError),
    /// The server responds, but its version or settings are unsafe.
    #[error("this Postgres can't keep promises: {}", .0.join("; "))]
    UnsafeServer(Vec<String>),
    /// Keys, indexes or triggers of the schema are missing: a restore is running or was
    /// interrupted.
    #[error("{HALF_LOADED}")]
    HalfLoaded,
    /// The database belongs to another service.
    #[error(
        "this database belongs to the service with the pin {pin}, which has another key directory: \
         start with that one's --keys, or use a database of its own"
    )]
    OtherKeys {
        /// SHA-256 of the other service's TLS key (SPKI).
        pin: Digest,
    },
    /// A key of the key directory can't be used.
    #[error("can't use the key directory: {0}")]
    Keys(String),
    /// A newer program has migrated the database.
    #[error(
        "this database's schema is newer than this program: its newest migration is {found}, and \
         this program knows none after {known}: install the newer muster-discovery, or restore a \
         backup from before the upgrade"
    )]
    NewerSchema {
        /// Version of the newest migration that the database has.
        found: i64,
        /// Version of the newest migration that this program knows.
        known: i64,
    },
    /// A migration failed, or its text differs from the one that was applied to this database.
    #[error("can't bring the schema up to date")]
    Migrate(#[source] MigrateError),
}

/// Facts about a database, found without changing it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DatabaseFacts {
    /// Settings of the server that weaken durability, in sentences.
    pub warnings: Vec<String>,
    /// Whether the database has no schema yet.
    pub is_new: bool,
    /// Number of migrations that the next start applies.
    pub pending_migrations: usize,
}

/// Checks the server and the database as [`connect`] does, and changes nothing. Compares the
/// database with the key directory only if `keys` is given and no migration is pending.
pub(crate) async fn inspect(
    options: PgConnectOptions,
    keys: Option<&KeyDirectory>,
) -> Result<DatabaseFacts, ConnectError> {
    let mut connection = options.connect().await.map_err(StoreError::from)?;
    let findings = check::check(&mut connection).await?;
    if !findings.refusals.is_empty() {
        return Err(ConnectError::UnsafeServer(findings.refusals));
    }
    sqlx::raw_sql("BEGIN READ ONLY").execute(&mut connection).await.map_err(StoreError::from)?;
    let has_schema: bool = sqlx::query_scalar("SELECT to_regclass('_sqlx_migrations') IS NOT NULL")
        .fetch_one(&mut connection)
        .await
        .map_err(StoreError::from)?;
    let pending_migrations = match has_schema {
        true => pending_migrations(&mut connection).await?,
        false => MIGRATOR.iter().count(),
    };
    if has_schema && pending_migrations == 0 {
        let whole = sqlx::query_scalar("SELECT is_whole()").fetch_one(&mut connection).await;
        if !whole.map_err(StoreError::from)? {
            return Err(ConnectError::HalfLoaded);
        }
        if let Some(keys) = keys {
            key_directory::verify(&mut connection, keys).await?;
        }
    }
    connection.close().await.map_err(StoreError::from)?;
    Ok(DatabaseFacts { warnings: findings.warnings, is_new: !has_schema, pending_migrations })
}

/// Returns the number of migrations that are not applied yet. Applied migrations that this program
/// doesn't know, or knows with another content, are an error as in [`Migrator::run`].
async fn pending_migrations(connection: &mut PgConnection) -> Result<usize, ConnectError> {
    let applied: Vec<(i64, bool, Vec<u8>)> =
        sqlx::query_as("SELECT version, success, checksum FROM _sqlx_migrations ORDER BY version")
            .fetch_all(connection)
            .await
            .map_err(StoreError::from)?;
    let newest = applied.last().map_or(0, |(version, ..)| *version);
    for (version, succeeded, checksum) in &applied {
        let Some(known) = MIGRATOR.iter().find(|known| known.version == *version) else {
            return Err(schema_error(MigrateError::VersionMissing(*version), newest));
        };
        if !succeeded {
            return Err(ConnectError::Migrate(MigrateError::Dirty(*version)));
        }
        if known.checksum.as_ref() != checksum.as_slice() {
            return Err(ConnectError::Migrate(MigrateError::VersionMismatch(*version)));
        }
    }
    Ok(MIGRATOR.iter().count() - applied.len())
}

/// Applies the migrations that are pending.
async fn migrate(connection: &mut PgConnection) -> Result<(), ConnectError> {
    let Err(error) = MIGRATOR.run(&mut *connection).await else { return Ok(()) };
    let newest = match error {
        MigrateError::VersionMissing(_) => newest_applied(connection).await?,
        _ => 0,
    };
    Err(schema_error(error, newest))
}

async fn newest_applied(connection: &mut PgConnection) -> Result<i64, StoreError> {
    let newest: Option<i64> = sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations")
        .fetch_one(connection)
        .await?;
    Ok(newest.unwrap_or_default())
}

/// Converts an error of the migrations. `newest` is the version of the newest migration that the
/// database has.
fn schema_error(error: MigrateError, newest: i64) -> ConnectError {
    let known = MIGRATOR.iter().map(|known| known.version).max().unwrap_or_default();
    match error {
        MigrateError::VersionMissing(_) if newest > known => {
            ConnectError::NewerSchema { found: newest, known }
        }
        error => ConnectError::Migrate(error),
    }
}

/// Checks the server, migrates the schema, opens the pool, and compares the database with `ledger`.
pub(crate) async fn connect(
    options: PgConnectOptions,
    settings: PoolSettings,
    ledger: Ledger,
    keys: &KeyDirectory,
    metrics: Arc<ServiceMetrics>,
) -> Result<Store, ConnectError> {
    // Log no SQL statements, not even slow ones: a migration's text is long, and a slow disk is no
    // reason to log it.
    let quiet = options.clone().disable_statement_logging();
    let mut connection = quiet.connect().await.map_err(StoreError::from)?;
    let findings = check::check(&mut connection).await?;
    for warning in &findings.warnings {
        tracing::warn!("about this Postgres: {warning}");
    }
    if !findings.refusals.is_empty() {
        return Err(ConnectError::UnsafeServer(findings.refusals));
    }
    migrate(&mut connection).await?;
    let whole = sqlx::query_scalar("SELECT is_whole()").fetch_one(&mut connection).await;
    if !whole.map_err(StoreError::from)? {
        return Err(ConnectError::HalfLoaded);
    }
    // Check the key directory before this process inserts a row of its own: the database can belong
    // to another service.
    key_directory::check(&mut connection, keys).await?;
    let watch = Arc::new(DatabaseWatch::new(metrics));
    // The first check of a database writes to it, and a slow disk may take seconds for that. A
    // check on a pool's connection must end within the pool's time limit. So the first check is
    // made on this connection.
    sqlx::raw_sql(DURABLE_COMMITS).execute(&mut connection).await.map_err(StoreError::from)?;
    look_at_database(&mut connection, &ledger, &watch, Occasion::Doubt)
        .await
        .map_err(StoreError::from)?;
    connection.close().await.map_err(StoreError::from)?;

    let (compared_ledger, compared_watch) = (ledger.clone(), watch.clone());
    let pool = PgPoolOptions::new()
        .max_connections(settings.size)
        .acquire_timeout(settings.wait)
        // Pinging here isn't needed. `Store::acquire` pings with its own time limit, and
        // `Transaction::begin` tests the connection with BEGIN.
        .test_before_acquire(false)
        .max_lifetime(CONNECTION_LIFE)
        .after_connect(move |connection, _| {
            let (ledger, watch) = (compared_ledger.clone(), compared_watch.clone());
            Box::pin(async move {
                sqlx::raw_sql(SESSION).execute(&mut *connection).await?;
                look_at_database(connection, &ledger, &watch, Occasion::Doubt).await
            })
        })
        .connect_lazy_with(options);
    let store = Store { pool, ledger, watch, caches: Arc::default() };
    wait_for_pool(&store).await?;
    Ok(store)
}

/// Waits until the pool has its first connection. On a loaded server this can take longer than a
/// request may wait for a connection.
async fn wait_for_pool(store: &Store) -> Result<(), StoreError> {
    let deadline = Instant::now() + FIRST_CONNECTION_WAIT;
    loop {
        match store.now().await {
            Err(StoreError::Unavailable(sqlx::Error::PoolTimedOut))
                if Instant::now() < deadline =>
            {
                tracing::warn!("the database is slow to accept a connection: trying again");
            }
            answer => return answer.map(drop),
        }
    }
}
