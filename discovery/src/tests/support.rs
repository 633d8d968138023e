//! Test support: one managed Postgres for the test program, a database for each test, and services.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use discovery_types::admin::Admin;
use discovery_types::api::DraftRequest;
use discovery_types::client::{ClientConfig, DiscoveryClient};
use discovery_types::context::Context;
use discovery_types::grant::{Grant, TokenKind};
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::role::Role;
use discovery_types::statement::{Permissions, Statement};
use discovery_types::token::Token;
use managed_postgres::{ManagedPostgres, ManagedPostgresSettings};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection, PgConnection};
use tokio::sync::OnceCell;
use uuid::Uuid;

use crate::server::{
    ConsoleArgs, DatabaseArgs, InitArgs, LimitArgs, RunningService, ServeArgs, TimeArgs, init,
    start,
};

/// The Postgres server that all tests share.
struct Postgres {
    socket: PathBuf,
    _stop: mpsc::Sender<()>,
}

/// Makes a folder with a short path that an unprivileged user may enter.
pub(super) fn folder() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    tempfile::Builder::new()
        .prefix("mdt")
        .permissions(std::fs::Permissions::from_mode(0o755))
        .tempdir_in("/tmp")
        .unwrap()
}

fn postgres() -> &'static Postgres {
    static POSTGRES: OnceLock<Postgres> = OnceLock::new();
    POSTGRES.get_or_init(|| {
        remove_stale_folders();
        let dir = base().join(format!("muster-test-pg-{}", std::process::id()));
        let socket = dir.join("run");
        remove_afterwards(&dir);
        let (ready, is_ready) = mpsc::channel();
        let (stop, stopped) = mpsc::channel();
        // The thread owns the server: when the test program ends, the thread ends, and the server
        // with it.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let settings = ManagedPostgresSettings { dir, binaries: None, user: "postgres".into() };
            let postgres = runtime.block_on(ManagedPostgres::start(settings));
            ready.send(postgres.as_ref().map(|_| ()).map_err(ToString::to_string)).unwrap();
            let _ = stopped.recv();
            drop(postgres);
        });
        is_ready.recv().unwrap().unwrap();
        Postgres { socket, _stop: stop }
    })
}

/// Returns the folder for the shared server. It is in memory if there is space, because a busy disk
/// would make the service refuse requests.
fn base() -> &'static Path {
    let memory = Path::new("/dev/shm");
    let room = rustix::fs::statvfs(memory).map_or(0, |stat| stat.f_bavail * stat.f_frsize);
    if room > 2 << 30 { memory } else { Path::new("/tmp") }
}

/// Starts a process that removes `dir` after this process has ended. Rust's test harness has no
/// hook at its end.
fn remove_afterwards(dir: &Path) {
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};
    let script = "while kill -0 \"$0\" 2>/dev/null; do sleep 1; done; sleep 3; rm -rf -- \"$1\"";
    let waiter = Command::new("sh")
        .args(["-c", script, &std::process::id().to_string()])
        .arg(dir)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    drop(waiter.unwrap());
}

/// Removes folders that were left because a test program and its cleanup process were killed
/// together.
fn remove_stale_folders() {
    for entry in std::fs::read_dir(base()).unwrap().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix("muster-test-pg-"));
        if pid.is_some_and(|pid| !PathBuf::from("/proc").join(pid).exists()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Returns the folder of the shared server's socket.
pub(super) fn socket() -> &'static Path {
    &postgres().socket
}

/// A database on the shared server.
pub(super) struct TestDatabase {
    pub name: String,
}

impl TestDatabase {
    /// Makes an empty database.
    pub(super) async fn new() -> Self {
        TestDatabase::from_template("template0").await
    }

    /// Makes a database with the service's tables. The migrations run once, and each database is a
    /// copy: hundreds of tests would wait for them.
    pub(super) async fn migrated() -> Self {
        static MIGRATED: OnceCell<TestDatabase> = OnceCell::const_new();
        let migrated = MIGRATED.get_or_init(async || {
            let database = TestDatabase::new().await;
            let mut connection = database.connect().await;
            sqlx::migrate!("../migrations").run(&mut connection).await.unwrap();
            connection.close().await.unwrap();
            database
        });
        TestDatabase::from_template(&migrated.await.name).await
    }

    /// Copies another database, as a restore from a backup does. No connection to it may be open.
    pub(super) async fn from_template(template: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("t{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let mut connection = options("postgres").connect().await.unwrap();
        let create = format!("CREATE DATABASE {name} TEMPLATE {template} ENCODING 'UTF8'");
        sqlx::raw_sql(sqlx::AssertSqlSafe(create)).execute(&mut connection).await.unwrap();
        TestDatabase { name }
    }

    /// Replaces this database by a copy of `backup`, as a restore does.
    pub(super) async fn replace_with(&self, backup: &TestDatabase) {
        let mut connection = options("postgres").connect().await.unwrap();
        for sql in [
            format!("DROP DATABASE {} WITH (FORCE)", self.name),
            format!("CREATE DATABASE {} TEMPLATE {}", self.name, backup.name),
        ] {
            sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
        }
    }

    /// Copies this database. Ends all of its connections.
    pub(super) async fn back_up(&self) -> TestDatabase {
        let mut connection = options("postgres").connect().await.unwrap();
        for _ in 0..100 {
            sqlx::query(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1",
            )
            .bind(&self.name)
            .execute(&mut connection)
            .await
            .unwrap();
            static NUMBER: AtomicU32 = AtomicU32::new(0);
            let name = format!("b{}", NUMBER.fetch_add(1, Ordering::Relaxed));
            let create = format!("CREATE DATABASE {name} TEMPLATE {}", self.name);
            match sqlx::raw_sql(sqlx::AssertSqlSafe(create)).execute(&mut connection).await {
                Ok(_) => return TestDatabase { name },
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
        panic!("the database is never free");
    }

    /// Returns a dump of this database, made with `pg_dump`.
    pub(super) fn dump(&self) -> Vec<u8> {
        let mut dump = client("pg_dump");
        let done = dump.args(["--format=custom", &self.name]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        done.stdout
    }

    /// Restores a dump as manuals describe it: DROP, CREATE, `pg_restore`.
    pub(super) async fn load(&self, dump: &[u8]) {
        self.make_anew().await;
        self.restore(dump, &[]);
    }

    /// Drops this database and ends all of its connections.
    pub(super) async fn remove(&self) {
        let sql = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        let mut connection = options("postgres").connect().await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
    }

    /// Drops this database and creates it empty.
    pub(super) async fn make_anew(&self) {
        self.remove().await;
        let sql = format!("CREATE DATABASE {} TEMPLATE template0 ENCODING 'UTF8'", self.name);
        let mut connection = options("postgres").connect().await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
    }

    /// Returns the table of contents of `dump`, one line for each item. `pg_restore --use-list`
    /// accepts such lines.
    pub(super) fn parts(dump: &[u8]) -> String {
        let file = file_of(dump);
        let done = client("pg_restore").arg("--list").arg(file.path()).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    }

    /// Runs `pg_restore` with these options.
    pub(super) fn restore(&self, dump: &[u8], options: &[&str]) {
        let file = file_of(dump);
        let mut restore = client("pg_restore");
        restore.args(["--exit-on-error", "--dbname", &self.name]).args(options).arg(file.path());
        let done = restore.output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }

    /// Replaces the rows of all tables by those of a dump. The tables themselves stay.
    pub(super) async fn set_rows_back(&self, dump: &[u8]) {
        let mut connection = self.connect().await;
        sqlx::raw_sql(
            "SET session_replication_role = replica;
             DO $$ BEGIN EXECUTE (
                 SELECT 'TRUNCATE ' || string_agg(quote_ident(tablename), ', ')
                 FROM pg_tables WHERE schemaname = 'public'
             ); END $$",
        )
        .execute(&mut connection)
        .await
        .unwrap();
        self.restore(dump, &["--data-only", "--disable-triggers"]);
    }

    /// Suppresses the notifications about decisions, so that each process finds decisions only when
    /// it reads the database.
    pub(super) async fn keep_decisions_quiet(&self) {
        sqlx::raw_sql(
            "DO $$ BEGIN EXECUTE replace(
                 pg_get_functiondef('add_decision'::regproc), 'muster_decision', 'nobody_hears');
             END $$",
        )
        .execute(&mut self.connect().await)
        .await
        .unwrap();
    }

    pub(super) async fn connect(&self) -> PgConnection {
        options(&self.name).connect().await.unwrap()
    }

    pub(super) fn url(&self) -> String {
        let socket = postgres().socket.display().to_string().replace('/', "%2F");
        format!("postgres://muster@{socket}:5432/{}", self.name)
    }
}

pub(super) fn file_of(bytes: &[u8]) -> tempfile::NamedTempFile {
    use std::io::Write;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// Makes a command that runs one of Postgres' programs on the shared server.
fn client(program: &str) -> std::process::Command {
    let mut command = std::process::Command::new(program);
    command.arg("--host").arg(&postgres().socket);
    command.args(["--port", "5432", "--username", "muster"]);
    command
}

pub(super) fn options(database: &str) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass()
        .socket(&postgres().socket)
        .port(5432)
        .username("muster")
        .database(database)
}

/// Time limit for waits. It is so long that only a failing test reaches it.
pub(super) const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Calls `ask` repeatedly until it returns a value.
pub(super) async fn wait_for_value<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let start = std::time::Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(start.elapsed() < WAIT_TIMEOUT, "never: {what}");
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
}

/// Calls `ask` repeatedly until it returns true.
pub(super) async fn wait_until(what: &str, mut ask: impl AsyncFnMut() -> bool) {
    wait_for_value(what, async || ask().await.then_some(())).await;
}

/// Sets long time limits, so that a poll waits until something changes.
pub(super) fn with_long_polls(mut args: ServeArgs) -> ServeArgs {
    (args.times.poll, args.times.lease) = (Duration::from_secs(50), Duration::from_secs(100));
    args
}

/// Time limits that keep tests quick, and leave enough time on a loaded machine.
pub(super) fn times() -> TimeArgs {
    TimeArgs {
        lease: Duration::from_secs(30),
        prepare: Duration::from_secs(30),
        sweep: Duration::from_millis(200),
        poll: Duration::from_secs(5),
        deadline: Duration::from_secs(86_400),
        draft: Duration::from_secs(600),
        unread: Duration::from_secs(2),
        // Longer than any test: a connection that waits for a handshake must not time out.
        handshake: Duration::from_secs(3_600),
        drain: Duration::from_secs(5),
    }
}

/// Returns the arguments of a service for tests.
pub(super) fn serve_args(keys: PathBuf, ledger: PathBuf, database_url: String) -> ServeArgs {
    ServeArgs {
        check: false,
        etcd_listen: Vec::new(),
        identity_keys: None,
        console: ConsoleArgs::default(),
        keys,
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        ledger,
        database: DatabaseArgs {
            managed_postgres: None,
            database_url: Some(database_url),
            database_url_file: None,
            postgres_bin: None,
            postgres_user: "postgres".into(),
            pool_size: 4,
        },
        times: times(),
        limits: LimitArgs {
            max_connections: 1_000,
            max_connections_per_address: 1_000,
            max_parked_polls: 100,
            rate: 10_000,
            burst: 10_000,
        },
    }
}

/// One installation: keys, ledgers and a database. Services can be started and stopped.
pub(super) struct TestInstallation {
    pub folder: tempfile::TempDir,
    pub database: TestDatabase,
    pub owner: Arc<SigningKey>,
    pub context: Context,
}

impl TestInstallation {
    pub(super) async fn new() -> Self {
        Self::with(TestDatabase::migrated().await)
    }

    /// Returns an installation whose database is empty, as before the first start of a service.
    pub(super) async fn before_first_start() -> Self {
        Self::with(TestDatabase::new().await)
    }

    fn with(database: TestDatabase) -> Self {
        let folder = folder();
        let owner = Arc::new(SigningKey::generate());
        let context = init(&InitArgs {
            owner: *owner.public(),
            dir: folder.path().join("keys"),
            urls: vec!["https://127.0.0.1:1".into()],
            trust_domain: "muster".into(),
        })
        .unwrap();
        let context = context.parse().unwrap();
        TestInstallation { folder, database, owner, context }
    }

    pub(super) fn args(&self, ledger: &str) -> ServeArgs {
        let folder = self.folder.path();
        serve_args(folder.join("keys"), folder.join(ledger), self.database.url())
    }

    pub(super) async fn serve(&self) -> RunningService {
        start(self.args("ledger")).await.unwrap()
    }

    pub(super) fn client(
        &self,
        service: &RunningService,
        key: Option<&Arc<SigningKey>>,
    ) -> DiscoveryClient {
        DiscoveryClient::new(ClientConfig {
            urls: vec![format!("https://{}", service.addresses[0]).parse().unwrap()],
            pins: self.context.pins.clone(),
            key: key.cloned(),
        })
        .unwrap()
    }

    pub(super) fn owner(&self, service: &RunningService) -> DiscoveryClient {
        self.client(service, Some(&self.owner))
    }

    /// Makes a draft, and returns its first statement without sending it.
    pub(super) async fn draft(&self, admin: &DiscoveryClient, name: &str, size: u8) -> Statement {
        let name = name.parse().unwrap();
        let request = DraftRequest { name, size };
        let draft = admin.create_draft(&request).await.unwrap();
        Statement {
            version: 1,
            cluster: draft.cluster,
            name: request.name,
            size,
            seq: 0,
            previous: None,
            peer_ca: draft.peer_ca,
            client_ca: draft.client_ca,
            admins: vec![Admin {
                key: *self.owner.public(),
                name: "owner".parse().unwrap(),
                roles: vec![Role::Owner],
            }],
            permissions: Permissions {
                loopback: true,
                shared_host: true,
                even_size: true,
                low_ports: false,
            },
            deadline_seconds: 3_600,
            spread: None,
            needs_approval: false,
            also_trusted: None,
            adopted: None,
        }
    }

    /// Opens a cluster and returns its first statement.
    pub(super) async fn cluster(&self, admin: &DiscoveryClient, name: &str, size: u8) -> Statement {
        let statement = self.draft(admin, name, size).await;
        let jws = statement.sign(&self.owner);
        admin.put_statement(statement.cluster, &jws).await.unwrap();
        statement
    }

    /// Makes a grant for a new token without sending it.
    pub(super) fn grant(&self, admin: &DiscoveryClient, statement: &Statement) -> (Token, Grant) {
        let token = Token::generate(TokenKind::Boot);
        let now = admin.service_now_ms().unsigned_abs() / 1_000;
        let grant = Grant {
            version: 1,
            id: token.id(),
            kind: TokenKind::Boot,
            key: *token.public(),
            cluster: statement.cluster,
            statement: statement.sign(&self.owner).hash(),
            uses: statement.size,
            issued_at: now,
            expires_at: now + 3_600,
            cidrs: Vec::new(),
            name: None,
            zone: None,
            replaces: None,
            replacement: None,
            require: Vec::new(),
        };
        (token, grant)
    }

    /// Makes a token that expires soon, and stores its grant at the service.
    pub(super) async fn short_lived(
        &self,
        admin: &DiscoveryClient,
        make: impl Fn() -> (Token, Grant),
    ) -> (Token, Grant) {
        let mut seconds = 2;
        loop {
            let (token, mut grant) = make();
            let life = grant.expires_at - grant.issued_at;
            grant.expires_at = admin.service_now_ms().unsigned_abs() / 1_000 + seconds;
            grant.issued_at = grant.expires_at - life;
            match admin.put_grant(&grant.sign(&self.owner)).await {
                Ok(_) => return (token, grant),
                // On a slow machine the grant can expire before it arrives. Then try again with a
                // later expiry.
                Err(error) if seconds > 60 => panic!("{error}"),
                Err(_) => seconds *= 2,
            }
        }
    }

    /// Waits until a grant has expired by the service's clock.
    pub(super) async fn wait_until_expired(&self, admin: &DiscoveryClient, grant: &Grant) {
        while admin.service_now_ms().unsigned_abs() / 1_000 <= grant.expires_at + 1 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Makes a token that can be redeemed.
    pub(super) async fn token(&self, admin: &DiscoveryClient, statement: &Statement) -> Token {
        let (token, grant) = self.grant(admin, statement);
        admin.put_grant(&grant.sign(&self.owner)).await.unwrap();
        token
    }
}

impl TestInstallation {
    /// Makes a grant for a new join ticket without sending it.
    pub(super) fn join_grant(
        &self,
        admin: &DiscoveryClient,
        statement: &Statement,
    ) -> (Token, Grant) {
        let token = Token::generate(TokenKind::Join);
        let (_, grant) = self.grant(admin, statement);
        let grant = Grant {
            id: token.id(),
            kind: TokenKind::Join,
            key: *token.public(),
            uses: 1,
            expires_at: grant.issued_at + 900,
            ..grant
        };
        (token, grant)
    }

    /// Makes a join ticket that can be redeemed.
    pub(super) async fn ticket(&self, admin: &DiscoveryClient, statement: &Statement) -> Token {
        let (token, grant) = self.join_grant(admin, statement);
        admin.put_grant(&grant.sign(&self.owner)).await.unwrap();
        token
    }
}

/// Moves a process's last-seen time back by more than a minute. The process then seems to have
/// stopped, so an owner may have it forgotten.
pub(super) async fn age_last_seen(database: &TestDatabase, process: Uuid) {
    sqlx::query("UPDATE processes SET last_seen_us = last_seen_us - 61000000 WHERE id = $1")
        .bind(process)
        .execute(&mut database.connect().await)
        .await
        .unwrap();
}

/// Moves the time of the last change of generation back by more than a minute. Running processes
/// then had time to compare their ledgers with the database.
pub(super) async fn age_last_change(database: &TestDatabase) {
    sqlx::query("UPDATE generation SET changed_us = changed_us - 61000000")
        .execute(&mut database.connect().await)
        .await
        .unwrap();
}

/// Returns a cluster's commit document from the database.
pub(super) async fn stored_document(database: &TestDatabase, cluster: Uuid) -> Option<Jws> {
    let row: Option<String> =
        sqlx::query_scalar("SELECT document FROM commits WHERE cluster_id = $1")
            .bind(cluster)
            .fetch_optional(&mut database.connect().await)
            .await
            .unwrap();
    row.map(|text| text.parse().unwrap())
}

/// Sends a request with exactly these headers, without the client library. Returns status and body.
pub(super) async fn send_with(
    world: &TestInstallation,
    service: &RunningService,
    key: Option<&SigningKey>,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: String,
) -> (u16, String) {
    let mut text = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
    let answer = exchange(world, service, key, text.as_bytes()).await.unwrap();
    let status = answer.split(' ').nth(1).unwrap_or_default().parse().unwrap_or(0);
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body).unwrap_or_default();
    (status, unchunked(body))
}

/// Sends a JSON request. Returns status and body.
pub(super) async fn send(
    world: &TestInstallation,
    service: &RunningService,
    key: Option<&SigningKey>,
    method: &str,
    path: &str,
    body: String,
) -> (u16, String) {
    let headers = [("content-type", "application/json")];
    send_with(world, service, key, method, path, &headers, body).await
}

/// Sends a GET request without a client key. Returns status and body.
pub(super) async fn get(
    world: &TestInstallation,
    service: &RunningService,
    path: &str,
) -> (u16, String) {
    send_with(world, service, None, "GET", path, &[], String::new()).await
}

/// Returns the address of the listener for etcd's discovery protocol v3.
pub(super) fn etcd_address(service: &RunningService) -> std::net::SocketAddr {
    let endpoint = &service.app().etcd_v3_endpoints[0];
    endpoint.parse().expect("the tests' services have the address 127.0.0.1")
}

/// Sends bytes over TLS. Returns everything received until the service closes the connection.
pub(super) async fn exchange(
    world: &TestInstallation,
    service: &RunningService,
    key: Option<&SigningKey>,
    bytes: &[u8],
) -> std::io::Result<String> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let config = discovery_types::client::client_tls_config(&world.context.pins, key);
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let socket = tokio::net::TcpStream::connect(service.addresses[0]).await?;
    let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
    let mut stream = connector.connect(name, socket).await?;
    stream.write_all(bytes).await?;
    let mut answer = Vec::new();
    // Ignore an error: the connection has ended even if the service sent no close_notify.
    let _ = stream.read_to_end(&mut answer).await;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn unchunked(body: &str) -> String {
    let Some((size, _)) = body.split_once("\r\n") else { return body.to_owned() };
    if usize::from_str_radix(size, 16).is_err() {
        return body.to_owned();
    }
    let (mut rest, mut whole) = (body, String::new());
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap_or(0);
        if size == 0 || after.len() < size {
            break;
        }
        whole.push_str(&after[..size]);
        rest = after[size..].trim_start_matches("\r\n");
    }
    whole
}
