//! `serve`: reads the files, connects to Postgres, listens, serves, and drains at the end.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use actix_server::{ServerBuilder, ServerHandle};
use discovery_formation::Millis;
use discovery_formation::service::FormationSettings;
use discovery_types::access::issuer;
use managed_postgres::{
    ManagedPostgres, ManagedPostgresError, ManagedPostgresSettings as PostgresSettings, SUPERUSER,
};
use muster_shares::slots::SlotPool;
use sqlx::ConnectOptions;
use sqlx::postgres::PgConnectOptions;
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use zeroize::Zeroizing;

use super::accept::{self, ConnectionLimits, MAX_HANDSHAKES, RouteSet, SocketLimits};
use super::args::{DATABASE_URL, MAX_URL_FILE};
use super::console::{self, ConsoleSetup};
use super::tls::server_config;
use super::{DatabaseArgs, ServeArgs, ServerError, TimeArgs};
use crate::admins::AdminCache;
use crate::app::{ADOPTION_RATE_AND_BURST, App};
use crate::background;
use crate::clock::Clock;
use crate::etcd_tokens::{v3, wait_slots};
use crate::host_identity::IdentityKeys;
use crate::keydir::KeyDirectory;
use crate::ledger::{LEDGER_USED_TWICE, Ledger, LedgerError};
use crate::limits::AddressLimit;
use crate::metrics::ServiceMetrics;
use crate::notify::ClusterNotifier;
use crate::store::{ConnectError, PoolSettings, connect};
use crate::throttle_log::ThrottleLog;

/// How long a request waits for a connection to Postgres before it is refused.
const POOL_WAIT: Duration = Duration::from_secs(1);
/// Upper limit for `--poll`.
const LONGEST_POLL: Duration = Duration::from_secs(55);
/// Backlog of the listening socket: connections that wait to be accepted.
const BACKLOG: u32 = 1024;
/// Factor between the two rate limits of an address: it may open this many connections for each
/// request that it may make. So an address over its request limit first gets error responses. Its
/// new connections are closed only if it keeps reconnecting.
const CONNECTIONS_PER_REQUEST: u32 = 4;
/// Maximum number of long polls of one key. An agent needs one poll, and a second poll while the
/// first one's connection times out.
const MAX_POLLS_PER_KEY: usize = 8;
/// Name of the database in the managed server.
pub(super) const DATABASE: &str = "muster";

/// A started service, which stops with [`RunningService::stop`].
pub(crate) struct RunningService {
    /// Addresses on which the service listens.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests serve where the kernel picks"))]
    pub addresses: Vec<SocketAddr>,
    /// Addresses on which the console listens.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests serve where the kernel picks"))]
    pub console_addresses: Vec<SocketAddr>,
    handle: ServerHandle,
    server: JoinHandle<std::io::Result<()>>,
    app: App,
    tracker: TaskTracker,
    stop_background: CancellationToken,
    postgres: Option<ManagedPostgres>,
    drain: Duration,
}

/// Serves until SIGTERM or SIGINT, then drains. The caller must provide a tokio runtime and a
/// tracing subscriber.
pub(crate) async fn serve(args: ServeArgs) -> Result<(), ServerError> {
    let broken = |error| ServerError::failed("can't wait for signals", error);
    let mut terminate = signal(SignalKind::terminate()).map_err(broken)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(broken)?;
    let starting = start(args);
    let mut running = tokio::select! {
        running = starting => running?,
        _ = terminate.recv() => return Ok(()),
        _ = interrupt.recv() => return Ok(()),
    };
    let _ = muster_notify::notify(muster_notify::State::Ready);
    let mut ledger_failed = running.app.store.ledger().failed();
    let mut elsewhere = running.app.store.watch().must_stop.subscribe();
    let ended = tokio::select! {
        _ = terminate.recv() => Ok("SIGTERM"),
        _ = interrupt.recv() => Ok("SIGINT"),
        Ok(_) = ledger_failed.wait_for(|failed| *failed) => Err(ledger_disk_failed()),
        Ok(_) = elsewhere.wait_for(|met| *met) => {
            Err(ServerError::permanent_if(true, "this process must not go on", LEDGER_USED_TWICE))
        }
        ended = &mut running.server => Err(match ended {
            Ok(Ok(())) => ServerError::Failed { message: "the listener ended".into(), source: None },
            Ok(Err(error)) => ServerError::failed("the listener failed", error),
            Err(error) => ServerError::failed("the listener failed", error),
        }),
    };
    let _ = muster_notify::notify(muster_notify::State::Stopping);
    if let Ok(signal) = &ended {
        tracing::info!(signal, "draining");
    }
    running.stop().await;
    tracing::info!("stopped");
    ended.map(|_| ())
}

/// Starts a service. Returns when it listens.
pub(crate) async fn start(args: ServeArgs) -> Result<RunningService, ServerError> {
    check_args(&args)?;
    let metrics = Arc::new(ServiceMetrics::default());
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        keys = %args.keys.display(),
        ledger = %args.ledger.display(),
        "starting"
    );
    let keys = load_keys(&args)?;
    let identity_keys = load_identity_keys(&args)?;
    let ledger = Ledger::open(&args.ledger).map_err(ledger_error)?;
    // Bind before using the database: if a port is taken, this process must leave no row in the
    // database.
    let sockets = bind(&args.listen)?;
    let etcd_sockets = bind(&args.etcd_listen)?;
    let console_sockets = bind(&args.console.console_listen)?;
    let console = prepare_console(&args, &keys, &console_sockets)?;
    let (options, postgres) = open_database(&args.database).await?;
    let pool = PoolSettings { size: args.database.pool_size, wait: POOL_WAIT };
    let ledger_failed = ledger.failed();
    let store = match connect(options, pool, ledger, &keys, metrics).await {
        Ok(store) => store,
        Err(error) => {
            if let Some(postgres) = postgres {
                postgres.stop().await;
            }
            return Err(start_error(error, *ledger_failed.borrow()));
        }
    };
    let process = store.ledger().process();
    tracing::info!(%process, ledger = %args.ledger.display(), "this process's ledger");
    let tls = load_tls(&keys)?;
    let etcd_listeners = listen_for_etcd(etcd_sockets)?;
    let mut app = build_app(&args, (keys, identity_keys), store, &etcd_listeners)?;
    app.console = console.as_ref().map(|console| console.settings.clone());

    let mut builder = HttpsServerBuilder::new(&args, &app);
    let addresses = builder.listen(RouteSet::Api, &tls, sockets)?;
    let console_addresses = match &console {
        Some(console) => builder.listen(RouteSet::Console, &console.tls, console_sockets)?,
        None => Vec::new(),
    };
    let server = builder.server.run();
    let handle = server.handle();
    let (tracker, stop_background) = (TaskTracker::new(), CancellationToken::new());
    background::start(&app, args.times.sweep, &tracker, &stop_background);
    for listener in etcd_listeners {
        tracker.spawn(v3::listener::serve(
            app.clone(),
            listener,
            tls.clone(),
            args.times.handshake,
            args.times.drain,
        ));
    }
    let server = tokio::spawn(server);
    let drain = args.times.drain;
    Ok(RunningService {
        addresses,
        console_addresses,
        handle,
        server,
        app,
        tracker,
        stop_background,
        postgres,
        drain,
    })
}

pub(super) fn load_keys(args: &ServeArgs) -> Result<KeyDirectory, ServerError> {
    KeyDirectory::load(&args.keys).map_err(|error| {
        ServerError::permanent_if(error.is_permanent(), "can't read the keys", error)
    })
}

pub(super) fn load_identity_keys(args: &ServeArgs) -> Result<IdentityKeys, ServerError> {
    IdentityKeys::load(args.identity_keys.as_deref())
        .map_err(|error| ServerError::failed("--identity-keys", error))
}

pub(super) fn load_tls(keys: &KeyDirectory) -> Result<rustls::ServerConfig, ServerError> {
    server_config(keys).map_err(|error| ServerError::failed("can't set up TLS", error))
}

/// Maps the error to an exit code: 2 for a refused folder, 3 for a damaged ledger, otherwise 1.
pub(super) fn ledger_error(error: LedgerError) -> ServerError {
    match error {
        LedgerError::Files(error) if error.is_refusal() => {
            ServerError::Usage(format!("--ledger: {error}"))
        }
        error => {
            let damaged = matches!(error, LedgerError::Damaged { .. });
            ServerError::permanent_if(damaged, "can't open the ledger", error)
        }
    }
}

fn ledger_disk_failed() -> ServerError {
    let message = "the ledger's disk has failed: mend it or free space on it, then start again";
    ServerError::Failed { message: message.into(), source: None }
}

/// Returns the error of a start that could not use the database. Each connection writes to the
/// ledger before it is used, so a failed ledger is the reason, and not the database.
fn start_error(error: ConnectError, has_ledger_failed: bool) -> ServerError {
    match has_ledger_failed {
        true => ledger_disk_failed(),
        false => database_error(error),
    }
}

/// Maps the error to an exit code: 3 for a database of another service or of a newer program,
/// otherwise 1.
pub(super) fn database_error(error: ConnectError) -> ServerError {
    let permanent =
        matches!(error, ConnectError::OtherKeys { .. } | ConnectError::NewerSchema { .. });
    ServerError::permanent_if(permanent, "can't use the database", error)
}

/// Reads the console's certificate and settings, if there is to be a console.
fn prepare_console(
    args: &ServeArgs,
    keys: &KeyDirectory,
    sockets: &[(SocketAddr, TcpSocket)],
) -> Result<Option<ConsoleSetup>, ServerError> {
    let first = sockets
        .first()
        .map(|(address, socket)| socket.local_addr().map_err(|error| cant_listen(*address, error)));
    let console = console::prepare(&args.console, keys, first.transpose()?)?;
    if let Some(console) = &console {
        console.warn_of_service_certificate();
    }
    Ok(console)
}

/// Builder of the HTTPS server: its listeners, and the limits that they share.
struct HttpsServerBuilder<'a> {
    server: ServerBuilder,
    app: &'a App,
    limits: ConnectionLimits,
}

impl<'a> HttpsServerBuilder<'a> {
    fn new(args: &ServeArgs, app: &'a App) -> Self {
        let bounds = socket_limits(args);
        let (rate, throttle_log) = (app.connection_limit.clone(), app.throttle_log.clone());
        actix_tls::accept::max_concurrent_tls_connect(MAX_HANDSHAKES);
        let server = actix_server::Server::build()
            .max_concurrent_connections(args.limits.max_connections)
            .shutdown_timeout(args.times.drain.as_secs().max(1))
            .disable_signals();
        HttpsServerBuilder {
            server,
            app,
            limits: ConnectionLimits::new(&bounds, rate, throttle_log),
        }
    }

    /// Listens on `sockets`, and serves these routes there. Returns the addresses.
    fn listen(
        &mut self,
        route_set: RouteSet,
        tls: &rustls::ServerConfig,
        sockets: Vec<(SocketAddr, TcpSocket)>,
    ) -> Result<Vec<SocketAddr>, ServerError> {
        let mut addresses = Vec::new();
        for (address, socket) in sockets {
            let failed = |error| cant_listen(address, error);
            let listening = socket.listen(BACKLOG).and_then(TcpListener::into_std);
            let listener = listening.map_err(failed)?;
            let local = listener.local_addr().map_err(failed)?;
            let (app, limits, tls) = (self.app.clone(), self.limits.clone(), tls.clone());
            let serve = move || accept::connection_service(route_set, &app, &limits, &tls);
            let server = std::mem::take(&mut self.server);
            self.server = server.listen(route_set.name(), listener, serve).map_err(failed)?;
            addresses.push(local);
        }
        for address in &addresses {
            tracing::info!(%address, "{}", route_set.listening());
        }
        Ok(addresses)
    }
}

fn socket_limits(args: &ServeArgs) -> SocketLimits {
    SocketLimits {
        max: args.limits.max_connections,
        max_per_address: args.limits.max_connections_per_address,
        handshake_timeout: args.times.handshake,
        write_timeout: args.times.unread,
    }
}

/// Binds the addresses without listening. Until the sockets listen, the kernel refuses connections.
pub(super) fn bind(addresses: &[SocketAddr]) -> Result<Vec<(SocketAddr, TcpSocket)>, ServerError> {
    let bound = |address: SocketAddr| {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok(socket)
    };
    addresses
        .iter()
        .map(|&address| match bound(address) {
            Ok(socket) => Ok((address, socket)),
            Err(error) => Err(cant_listen(address, error)),
        })
        .collect()
}

/// Listens for stock etcd on sockets that are already bound.
fn listen_for_etcd(sockets: Vec<(SocketAddr, TcpSocket)>) -> Result<Vec<TcpListener>, ServerError> {
    let listen = |(address, socket): (SocketAddr, TcpSocket)| {
        let listener = socket.listen(BACKLOG).map_err(|error| cant_listen(address, error))?;
        tracing::info!(%address, "listening for stock etcd (v3)");
        Ok(listener)
    };
    sockets.into_iter().map(listen).collect()
}

/// Returns where stock etcd reaches `listeners`: at the hosts of the service's URLs.
fn v3_endpoints(keys: &KeyDirectory, listeners: &[TcpListener]) -> std::io::Result<Vec<String>> {
    let mut endpoints = Vec::new();
    for listener in listeners {
        let port = listener.local_addr()?.port();
        for url in &keys.settings.urls {
            let endpoint = format!("{}:{port}", url.host());
            if !endpoints.contains(&endpoint) {
                endpoints.push(endpoint);
            }
        }
    }
    Ok(endpoints)
}

fn cant_listen(address: SocketAddr, error: std::io::Error) -> ServerError {
    ServerError::failed(format!("can't listen on {address}"), error)
}

pub(super) fn check_args(args: &ServeArgs) -> Result<(), ServerError> {
    if args.listen.is_empty() {
        return Err(ServerError::Usage("--listen: name at least one address".into()));
    }
    if args.ledger.starts_with(&args.keys) || args.keys.starts_with(&args.ledger) {
        let why = "replicas share the key directory, and each has a ledger of its own";
        return Err(ServerError::Usage(format!("--ledger must lie outside --keys: {why}")));
    }
    let TimeArgs { lease, prepare, poll, .. } = args.times;
    if poll > LONGEST_POLL {
        let most = LONGEST_POLL.as_secs();
        let why = "clients and what lies between give up on longer answers";
        return Err(ServerError::Usage(format!("--poll may be at most {most} s: {why}")));
    }
    if prepare > lease * 10 {
        let why = "a list would wait long after its members' leases lapsed";
        return Err(ServerError::Usage(format!("--prepare is far longer than --lease: {why}")));
    }
    Ok(())
}

async fn open_database(
    args: &DatabaseArgs,
) -> Result<(PgConnectOptions, Option<ManagedPostgres>), ServerError> {
    if let Some(dir) = &args.managed_postgres {
        let postgres = start_postgres(postgres_settings(args, dir)?).await?;
        let made = make_database(&postgres).await;
        return match made {
            Ok(()) => Ok((postgres.connect_options(DATABASE), Some(postgres))),
            Err(error) => {
                postgres.stop().await;
                Err(ServerError::failed("can't make the database", error))
            }
        };
    }
    Ok((external_options(args)?, None))
}

/// Returns the settings of the managed Postgres in `dir`.
pub(super) fn postgres_settings(
    args: &DatabaseArgs,
    dir: &Path,
) -> Result<PostgresSettings, ServerError> {
    // The managed Postgres has another working directory, so it needs an absolute path.
    let dir = std::path::absolute(dir)
        .map_err(|error| ServerError::failed("--managed-postgres", error))?;
    let (binaries, user) = (args.postgres_bin.clone(), args.postgres_user.clone());
    Ok(PostgresSettings { dir, binaries, user })
}

/// Returns the connect options of a database that a running service uses.
pub(super) fn running_database_options(
    args: &DatabaseArgs,
) -> Result<PgConnectOptions, ServerError> {
    let Some(dir) = &args.managed_postgres else { return external_options(args) };
    let dir = std::path::absolute(dir)
        .map_err(|error| ServerError::failed("--managed-postgres", error))?;
    managed_postgres::running_connect_options(&dir, DATABASE).ok_or_else(|| {
        ServerError::Usage(format!(
            "--managed-postgres: no Postgres runs in {}: start the service first",
            dir.display()
        ))
    })
}

/// Returns the connect options of an external Postgres. Its URL can hold a password, so no error
/// message repeats the URL.
pub(super) fn external_options(args: &DatabaseArgs) -> Result<PgConnectOptions, ServerError> {
    let from_environment =
        || std::env::var(DATABASE_URL).ok().filter(|url| !url.is_empty()).map(Zeroizing::new);
    let url = match (&args.database_url, &args.database_url_file) {
        (Some(url), _) => Some(Zeroizing::new(url.clone())),
        (None, Some(file)) => Some(read_url(file)?),
        (None, None) => from_environment(),
    };
    let url = url.ok_or_else(|| {
        ServerError::Usage(format!(
            "name a database: --managed-postgres DIR runs a Postgres of its own, --database-url URL \
             (or --database-url-file FILE, or {DATABASE_URL} in the environment) uses one that is there"
        ))
    })?;
    url.trim()
        .parse()
        .map_err(|_| ServerError::Usage("the database's URL isn't a postgres:// URL".into()))
}

fn read_url(file: &Path) -> Result<Zeroizing<String>, ServerError> {
    let unread = |error: std::io::Error| {
        ServerError::Usage(format!("--database-url-file {}: {error}", file.display()))
    };
    let bytes = muster_files::read_named(file, MAX_URL_FILE).map_err(unread)?;
    let bytes = Zeroizing::new(bytes);
    let mode = fs_err::metadata(file).map_err(unread)?.permissions().mode();
    if mode & 0o077 != 0 {
        tracing::warn!(file = %file.display(), "others may read this file, which may hold a password: \
            chmod 600 it");
    }
    Ok(Zeroizing::new(String::from_utf8_lossy(&bytes).into_owned()))
}

pub(super) async fn start_postgres(
    settings: PostgresSettings,
) -> Result<ManagedPostgres, ServerError> {
    ManagedPostgres::start(settings).await.map_err(postgres_error)
}

/// Converts the error of a managed Postgres that can't be started.
pub(super) fn postgres_error(error: Arc<ManagedPostgresError>) -> ServerError {
    match &*error {
        ManagedPostgresError::Foreign { .. } => {
            ServerError::Usage(format!("--managed-postgres: {error}"))
        }
        _ => ServerError::failed("can't run Postgres", error),
    }
}

pub(super) async fn make_database(postgres: &ManagedPostgres) -> Result<(), sqlx::Error> {
    use sqlx::Connection;
    let mut connection = postgres.connect_options("postgres").connect().await?;
    let there: bool =
        sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM pg_database WHERE datname = $1)")
            .bind(DATABASE)
            .fetch_one(&mut connection)
            .await?;
    if !there {
        tracing::info!(database = DATABASE, user = SUPERUSER, "making the database");
        sqlx::raw_sql("CREATE DATABASE muster").execute(&mut connection).await?;
    }
    connection.close().await
}

fn build_app(
    args: &ServeArgs,
    (keys, identity_keys): (KeyDirectory, IdentityKeys),
    store: crate::store::Store,
    etcd_listeners: &[TcpListener],
) -> Result<App, ServerError> {
    let etcd_v3_endpoints = v3_endpoints(&keys, etcd_listeners)
        .map_err(|error| ServerError::failed("can't read the address of a listener", error))?;
    let millis = |time: Duration| Millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    let settings = FormationSettings {
        lease: millis(args.times.lease),
        ack_timeout: millis(args.times.prepare),
        sweep: millis(args.times.sweep),
        ..FormationSettings::DEFAULT
    };
    let clock = Arc::new(Clock::default());
    let metrics = store.watch().metrics.clone();
    metrics.parked_limit.set(i64::try_from(args.limits.max_parked_polls).unwrap_or(i64::MAX));
    metrics.tls_certificate_end.set(keys.tls_certificate_end());
    Ok(App {
        throttle_log: Arc::new(ThrottleLog::new(metrics.clone())),
        metrics,
        issuer: issuer(&keys.owner).into(),
        admins: Arc::new(AdminCache::new(keys.owner, store.clone(), clock.clone())),
        keys: Arc::new(keys),
        store,
        clock,
        notifier: ClusterNotifier::default(),
        hints: Arc::default(),
        batches: Arc::default(),
        renewals: Arc::default(),
        guesses: Arc::default(),
        identity_keys: Arc::new(identity_keys),
        refusals: Arc::default(),
        settings,
        max_deadline_seconds: args.times.deadline.as_secs().max(1),
        request_limit: Arc::new(AddressLimit::new(args.limits.rate, args.limits.burst)),
        adoption_limit: Arc::new(AddressLimit::new(
            ADOPTION_RATE_AND_BURST.0,
            ADOPTION_RATE_AND_BURST.1,
        )),
        connection_limit: Arc::new(AddressLimit::new(
            args.limits.rate.saturating_mul(CONNECTIONS_PER_REQUEST),
            args.limits.burst.saturating_mul(CONNECTIONS_PER_REQUEST),
        )),
        poll_slots: SlotPool::new(args.limits.max_parked_polls, MAX_POLLS_PER_KEY),
        max_poll_wait: args.times.poll,
        draft_life: args.times.draft,
        draining: CancellationToken::new(),
        etcd_wait_slots: wait_slots(args.limits.max_parked_polls),
        etcd_v3_endpoints: etcd_v3_endpoints.into(),
        console: None,
    })
}

impl RunningService {
    /// Returns the state shared by all requests, for tests that inspect more than the API shows.
    #[cfg(test)]
    pub(crate) fn app(&self) -> &App {
        &self.app
    }

    /// Process id of the managed Postgres, while it runs.
    #[cfg(test)]
    pub(crate) fn postgres_pid(&self) -> Option<u32> {
        self.postgres.as_ref().and_then(ManagedPostgres::pid)
    }

    /// Stops accepting requests, gives running ones the drain time to finish, then stops everything
    /// else.
    pub(crate) async fn stop(self) {
        self.app.draining.cancel();
        let graceful = tokio::time::timeout(self.drain, self.handle.stop(true));
        if graceful.await.is_err() {
            tracing::warn!("some requests didn't finish in time");
            self.handle.stop(false).await;
        }
        self.app.write_refusals().await;
        self.stop_background.cancel();
        self.tracker.close();
        self.tracker.wait().await;
        // Limit the wait: closing the pool can block on a Postgres that doesn't respond.
        let _ = tokio::time::timeout(POOL_WAIT, self.app.store.pool().close()).await;
        if let Some(postgres) = self.postgres {
            postgres.stop().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreError;

    #[test]
    fn a_full_disk_of_the_ledger_is_not_called_a_silent_database() {
        let error = || ConnectError::from(StoreError::no_answer());
        let told = |has_ledger_failed| {
            let error = start_error(error(), has_ledger_failed);
            (error.exit_code(), error.to_string())
        };
        let (code, text) = told(true);
        assert!(
            code == 1 && text.contains("ledger's disk") && text.contains("free space"),
            "{text}"
        );
        let (code, text) = told(false);
        assert!(code == 1 && text.contains("database"), "{text}");
    }
}
