//! The discovery service under measurement, with its Postgres.

use std::io::BufRead;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use discovery_types::admin::Admin;
use discovery_types::api::{ClusterQuery, DraftRequest};
use discovery_types::client::{ClientConfig, DiscoveryClient, client_tls_config};
use discovery_types::context::Context;
use discovery_types::digest::Digest;
use discovery_types::grant::{Grant, TokenKind};
use discovery_types::key::SigningKey;
use discovery_types::role::Role;
use discovery_types::statement::{Permissions, Statement};
use discovery_types::token::Token;
use futures_util::{StreamExt as _, TryStreamExt as _};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::postgres;
use crate::bench::process::ServerProcess;

/// Time limit for a start, and for filling the ledger with a million decisions.
const START_LIMIT: Duration = Duration::from_secs(300);
/// Time limit for a stop.
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// Interval at which the service's state is checked.
const PAUSE: Duration = Duration::from_millis(10);
/// Number of connections that are opened at a time.
const CONNECTING: usize = 32;
/// Text that the readiness answer contains once the service is ready.
const READY: &str = r#""status":"ready""#;

/// A cluster with free seats, and a token for all of them.
pub(super) struct OpenCluster {
    pub(super) statement: Statement,
    /// Hash of the signed statement.
    pub(super) hash: Digest,
    pub(super) token: Token,
}

/// The service that is measured. It manages its Postgres, which ends with it.
pub(super) struct BenchService {
    program: PathBuf,
    folder: PathBuf,
    port: u16,
    pub(super) context: Context,
    owner: Arc<SigningKey>,
    process: Option<ServerProcess>,
}

/// CPU time of the service and of its Postgres.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CpuTimes {
    pub(super) service: Duration,
    pub(super) postgres: Duration,
}

impl CpuTimes {
    /// Returns the CPU time used since `before`.
    pub(super) fn since(self, before: CpuTimes) -> CpuTimes {
        CpuTimes {
            service: self.service.saturating_sub(before.service),
            postgres: self.postgres.saturating_sub(before.postgres),
        }
    }
}

impl BenchService {
    /// Makes the service's keys in `folder`, without starting the service.
    pub(super) fn new(program: &Path, folder: &Path) -> Result<Self> {
        let owner = Arc::new(SigningKey::generate());
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let init = Command::new(program)
            .args(["init", "--owner", &owner.public().to_string()])
            .args(["--url", &format!("https://127.0.0.1:{port}"), "--dir"])
            .arg(folder.join("keys"))
            .stderr(Stdio::inherit())
            .output()?;
        ensure!(init.status.success(), "init ended with {}", init.status);
        let context = init.stdout.lines().next().context("init prints a context")??.parse()?;
        let (program, folder) = (program.to_owned(), folder.to_owned());
        Ok(Self { program, folder, port, context, owner, process: None })
    }

    /// Starts the service. Returns how long it took until the service answered an admin.
    pub(super) async fn start(&mut self, options: &[&str]) -> Result<Duration> {
        let listen = format!("127.0.0.1:{}", self.port);
        let path = |name: &str| self.folder.join(name).display().to_string();
        let (keys, ledger, postgres) = (path("keys"), path("ledger"), path("pg"));
        let own = ["serve", "--listen", &listen, "--keys", &keys, "--ledger", &ledger];
        let more = ["--managed-postgres", &postgres];
        let args = [&own[..], &more, options].concat();
        let args: Vec<String> = args.into_iter().map(str::to_owned).collect();
        let began = Instant::now();
        self.process = Some(ServerProcess::start(&self.program, &args, &self.log())?);
        let admin = self.admin()?;
        while let Err(error) = admin.list_clusters(&ClusterQuery::default()).await {
            self.check_starting(began).with_context(|| format!("the last answer: {error}"))?;
            tokio::time::sleep(PAUSE).await;
        }
        Ok(began.elapsed())
    }

    /// Waits until the service reports that it is ready. By then its ledger has all decisions.
    pub(super) async fn wait_until_ready(&mut self) -> Result<()> {
        let began = Instant::now();
        while !self.readiness().await?.contains(READY) {
            self.check_starting(began)?;
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    pub(super) fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Returns the service's answer about its readiness, over a new connection.
    pub(super) async fn readiness(&self) -> Result<String> {
        let config = client_tls_config(&self.context.pins, None);
        let connector = TlsConnector::from(Arc::new(config));
        let socket = TcpStream::connect(self.address()).await?;
        // Turn off Nagle's algorithm. It would delay the request until the acknowledgement of the
        // handshake, which the system also delays.
        socket.set_nodelay(true)?;
        let mut stream = connector.connect("127.0.0.1".try_into()?, socket).await?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
        let mut answer = Vec::new();
        // Ignore errors: the service may close the connection without a TLS `close_notify` alert.
        let _ = stream.read_to_end(&mut answer).await;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    /// Opens connections with mutual TLS, each with a key of its own, and sends no request.
    pub(super) async fn connect_without_request(
        &self,
        count: usize,
    ) -> Result<Vec<TlsStream<TcpStream>>> {
        let connect = |_| async {
            let key = SigningKey::generate();
            let config = client_tls_config(&self.context.pins, Some(&key));
            let socket = TcpStream::connect(self.address()).await?;
            let connector = TlsConnector::from(Arc::new(config));
            anyhow::Ok(connector.connect("127.0.0.1".try_into()?, socket).await?)
        };
        futures_util::stream::iter(0..count)
            .map(connect)
            .buffer_unordered(CONNECTING)
            .try_collect()
            .await
    }

    /// Removes the ledger and the log, so that the next start begins with an empty ledger.
    pub(super) fn forget_ledger(&self) -> Result<()> {
        fs_err::remove_dir_all(self.folder.join("ledger"))?;
        fs_err::remove_file(self.log())?;
        Ok(())
    }

    fn log(&self) -> PathBuf {
        self.folder.join("log")
    }

    fn process(&mut self) -> Result<&mut ServerProcess> {
        self.process.as_mut().context("the service was not started")
    }

    fn check_starting(&mut self, began: Instant) -> Result<()> {
        if let Some(status) = self.process()?.exit_status()? {
            bail!("the service ended with {status}; see {}", self.log().display());
        }
        ensure!(began.elapsed() < START_LIMIT, "the service isn't ready after {START_LIMIT:?}");
        Ok(())
    }

    /// Stops the service and its Postgres with SIGTERM.
    pub(super) async fn stop(&mut self) -> Result<()> {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        let pid = i32::try_from(process.pid()).ok().and_then(Pid::from_raw).context("a pid")?;
        kill_process(pid, Signal::TERM)?;
        let began = Instant::now();
        while process.exit_status()?.is_none() {
            ensure!(began.elapsed() < STOP_LIMIT, "the service doesn't stop");
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Returns the folder of the managed Postgres.
    pub(super) fn postgres_folder(&self) -> PathBuf {
        self.folder.join("pg")
    }

    pub(super) fn cpu(&self) -> Result<CpuTimes> {
        let process = self.process.as_ref().context("the service was not started")?;
        let postgres = postgres::cpu(&self.postgres_folder())?;
        Ok(CpuTimes { service: process.cpu()?, postgres })
    }

    /// Returns the resident memory of the service in bytes.
    pub(super) fn resident_bytes(&self) -> Result<u64> {
        self.process.as_ref().context("the service was not started")?.resident_bytes()
    }

    /// Returns a client with `key`. It connects with its first request.
    pub(super) fn client(&self, key: &Arc<SigningKey>) -> Result<DiscoveryClient> {
        Ok(DiscoveryClient::new(ClientConfig {
            urls: self.context.urls.clone(),
            pins: self.context.pins.clone(),
            key: Some(key.clone()),
        })?)
    }

    /// Returns a client with the owner's key.
    pub(super) fn admin(&self) -> Result<DiscoveryClient> {
        self.client(&self.owner)
    }

    /// Makes a cluster of `size` seats as an admin: its statement, and a boot token for all seats.
    pub(super) async fn open(
        &self,
        admin: &DiscoveryClient,
        name: &str,
        size: u8,
    ) -> Result<OpenCluster> {
        let request = DraftRequest { name: name.parse()?, size };
        let draft = admin.create_draft(&request).await?;
        let statement = Statement {
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
                name: "owner".parse()?,
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
        };
        let jws = statement.sign(&self.owner);
        admin.put_statement(statement.cluster, &jws).await?;
        let (token, grant) = self.grant(&statement, jws.hash(), admin.service_now_ms());
        admin.put_grant(&grant.sign(&self.owner)).await?;
        Ok(OpenCluster { hash: jws.hash(), statement, token })
    }

    /// Makes a boot token for all seats of a cluster, and its grant.
    fn grant(&self, statement: &Statement, hash: Digest, now_ms: i64) -> (Token, Grant) {
        let token = Token::generate(TokenKind::Boot);
        let now = now_ms.unsigned_abs() / 1_000;
        let grant = Grant {
            version: 1,
            id: token.id(),
            kind: TokenKind::Boot,
            key: *token.public(),
            cluster: statement.cluster,
            statement: hash,
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

    /// Fills the database with clusters of three members, which have these numbers. The service
    /// must run.
    pub(super) async fn fill(&self, numbers: RangeInclusive<u64>) -> Result<()> {
        let admin = self.admin()?;
        let name = format!("before-{}", numbers.end());
        let real = self.open(&admin, &name, 3).await?;
        let (_, grant) = self.grant(&real.statement, real.hash, admin.service_now_ms());
        postgres::fill(&self.postgres_folder(), numbers, grant.sign(&self.owner).as_str())
    }
}
