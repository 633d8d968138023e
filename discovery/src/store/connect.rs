//! Connecting: look, migrate, then a pool whose every new connection is compared with the ledger
//! before its first use.

use std::sync::Arc;
use std::time::Duration;

use discovery_types::digest::Digest;
use sqlx::migrate::Migrator;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions, Connection};

use super::{Store, StoreError, check, key_directory};
use crate::keydir::Keydir;
use crate::ledger::{DatabaseWatch, HALF_LOADED, Ledger, Occasion, look};
use crate::metrics::Metrics;

static MIGRATOR: Migrator = sqlx::migrate!("../migrations");

/// Each session's own settings. `synchronous_commit` is set whatever the server's default is.
const SESSION: &str = "SET statement_timeout = '2s'; SET lock_timeout = '2s'; \
     SET idle_in_transaction_session_timeout = '10s'; SET synchronous_commit = on; \
     SET application_name = 'muster-discovery'";
/// A connection is given up after this long, so that a failed-over address is looked up again.
const CONNECTION_LIFE: Duration = Duration::from_secs(30 * 60);

/// The pool's bounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolSettings {
    /// Connections.
    pub size: u32,
    /// How long a request waits for one.
    pub wait: Duration,
}

/// Why the service can't work with this database.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    /// It doesn't answer, or refuses us.
    #[error("can't use the database")]
    Store(#[from] StoreError),
    /// It answers, and isn't fit.
    #[error("this Postgres can't keep promises: {}", .0.join("; "))]
    Unfit(Vec<String>),
    /// Somebody is at it.
    #[error("{HALF_LOADED}")]
    HalfLoaded,
    /// It is another service's.
    #[error(
        "this database belongs to the service with the pin {pin}, which has another key directory: \
         start with that one's --keys, or use a database of its own"
    )]
    OtherKeys {
        /// SHA-256 of that service's TLS key (SPKI).
        pin: Digest,
    },
    /// Our keys can't be used.
    #[error("can't use the key directory: {0}")]
    Keys(String),
    /// The schema is newer than this program, or a migration fails.
    #[error("can't bring the schema up to date")]
    Migrate(#[source] sqlx::migrate::MigrateError),
}

/// Looks at the server, brings the schema up to date, opens the pool, and compares with `ledger`.
pub(crate) async fn connect(
    options: PgConnectOptions,
    settings: PoolSettings,
    ledger: Ledger,
    keys: &Keydir,
    metrics: Arc<Metrics>,
) -> Result<Store, ConnectError> {
    let mut connection = options.connect().await.map_err(StoreError::from)?;
    let findings = check::check(&mut connection).await?;
    for warning in &findings.warnings {
        tracing::warn!("about this Postgres: {warning}");
    }
    if !findings.refusals.is_empty() {
        return Err(ConnectError::Unfit(findings.refusals));
    }
    MIGRATOR.run(&mut connection).await.map_err(ConnectError::Migrate)?;
    let whole = sqlx::query_scalar("SELECT is_whole()").fetch_one(&mut connection).await;
    if !whole.map_err(StoreError::from)? {
        return Err(ConnectError::HalfLoaded);
    }
    // Before this process stands in the database.
    key_directory::check(&mut connection, keys).await?;
    connection.close().await.map_err(StoreError::from)?;

    let watch = Arc::new(DatabaseWatch::new(metrics));
    let (compared_ledger, compared_watch) = (ledger.clone(), watch.clone());
    let pool = PgPoolOptions::new()
        .max_connections(settings.size)
        .acquire_timeout(settings.wait)
        // The store asks itself, in bounded time, and where BEGIN is asked anyway that is enough.
        .test_before_acquire(false)
        .max_lifetime(CONNECTION_LIFE)
        .after_connect(move |connection, _| {
            let (ledger, watch) = (compared_ledger.clone(), compared_watch.clone());
            Box::pin(async move {
                sqlx::raw_sql(SESSION).execute(&mut *connection).await?;
                look(connection, &ledger, &watch, Occasion::Doubt).await
            })
        })
        .connect_lazy_with(options);
    let store = Store { pool, ledger, watch, caches: Arc::default() };
    store.now().await?;
    Ok(store)
}
