//! Starts a program, and waits until it answers on its addresses or has ended.

use std::fmt;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use muster_tests::harness::{Network, TestHost};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use crate::cases::{Case, ConfigSource};

/// Maximum number of concurrent starts, which mostly wait for a disk or an election.
const MAX_CONCURRENT_STARTS: usize = 24;
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
/// Time limit for a program to answer or to end; a slower one fails the test.
const TIME_LIMIT: Duration = Duration::from_secs(120);
/// Time limit of one attempt to get an answer from an address.
const PROBE_LIMIT: Duration = Duration::from_millis(500);
/// Number of consecutive checks that must find a process idle before it counts as idle.
const IDLE_CHECKS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(20);
/// HTTP request that shows whether a program answers at an address.
const REQUEST: &[u8] = b"GET /version HTTP/1.0\r\nHost: localhost\r\n\r\n";
/// Number of addresses of one start.
const ADDRESSES_PER_START: usize = 3;

/// A program, and the configuration to start it with.
pub(crate) struct StartRequest {
    pub(crate) program: PathBuf,
    pub(crate) case: Case,
    pub(crate) source: ConfigSource,
}

/// Outcome of a start: the program serves, or has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StartOutcome {
    Started,
    Ended {
        /// Exit code; `None` after a signal.
        code: Option<i32>,
        output: String,
    },
}

impl StartOutcome {
    pub(crate) fn says(&self, words: &str) -> bool {
        matches!(self, Self::Ended { output, .. } if output.contains(words))
    }
}

impl fmt::Display for StartOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Ended { code, output } = self else { return f.write_str("starts") };
        let last: Vec<&str> = output.lines().rev().take(3).collect();
        write!(f, "ends with {code:?}: {}", last.join(" / "))
    }
}

/// Runs starts. It owns a folder with certificates, and networks with addresses for the starts.
pub(crate) struct StartRunner {
    folder: TempDir,
    networks: Mutex<Vec<Network>>,
    /// Addresses that no start has used yet.
    free: Mutex<Vec<IpAddr>>,
    /// First bytes of a TLS handshake.
    hello: Vec<u8>,
}

impl StartRunner {
    pub(crate) fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        write_certificates(&folder)?;
        let hello = client_hello()?;
        Ok(Self { folder, networks: Mutex::default(), free: Mutex::default(), hello })
    }

    /// Runs all starts, some of them at the same time. Returns their outcomes in the same order.
    pub(crate) fn run(&self, starts: Vec<StartRequest>) -> Result<Vec<StartOutcome>> {
        let count = starts.len();
        let waiting = Mutex::new(starts.into_iter().enumerate());
        let ended: Mutex<Vec<(usize, Result<StartOutcome>)>> = Mutex::default();
        std::thread::scope(|scope| {
            for _ in 0..MAX_CONCURRENT_STARTS.min(count) {
                scope.spawn(|| {
                    loop {
                        let next = waiting.lock().expect("no thread panics").next();
                        let Some((n, start)) = next else { break };
                        let outcome = self.start(&start);
                        ended.lock().expect("no thread panics").push((n, outcome));
                    }
                });
            }
        });
        let mut ended = ended.into_inner().expect("no thread panics");
        ended.sort_by_key(|(n, _)| *n);
        ended.into_iter().map(|(_, outcome)| outcome).collect()
    }

    fn addresses(&self) -> Result<[IpAddr; ADDRESSES_PER_START]> {
        let mut free = self.free.lock().expect("no thread panics");
        if free.len() < ADDRESSES_PER_START {
            let network = Network::loopback(240);
            free.extend(network.hosts.iter().map(|host: &TestHost| host.address));
            self.networks.lock().expect("no thread panics").push(network);
        }
        let first = free.len() - ADDRESSES_PER_START;
        let taken: Vec<IpAddr> = free.drain(first..).collect();
        taken.try_into().ok().context("a network has enough addresses")
    }

    fn start(&self, start: &StartRequest) -> Result<StartOutcome> {
        let own = tempfile::tempdir_in(self.folder.path())?;
        let [ip, ip2, other] = self.addresses()?;
        let fill = |text: String| {
            let path = |name: &str| self.folder.path().join(name).display().to_string();
            text.replace("{ip}", &ip.to_string())
                .replace("{ip2}", &ip2.to_string())
                .replace("{other}", &other.to_string())
                .replace("{dir}", &own.path().display().to_string())
                .replace("{cert}", &path("leaf.crt"))
                .replace("{key}", &path("leaf.key"))
                .replace("{cert2}", &path("other.crt"))
                .replace("{key2}", &path("other.key"))
                .replace("{ca}", &path("ca.crt"))
        };
        let mut command = Command::new(&start.program);
        command.env_clear().current_dir(own.path()).stdin(Stdio::null());
        match start.source {
            ConfigSource::Flags => {
                command.args(start.case.arguments().into_iter().map(fill));
            }
            ConfigSource::Environment => {
                let variables = start.case.variables().into_iter();
                command.envs(variables.map(|(name, value)| (name, fill(value))));
            }
            ConfigSource::File => {
                let path = own.path().join("etcd.conf.yml");
                fs_err::write(&path, fill(start.case.file()))?;
                command.arg("--config-file").arg(path);
            }
        }
        let log = own.path().join("log");
        let output = fs_err::File::create(&log)?.into_parts().0;
        command.stdout(output.try_clone()?).stderr(output);
        let mut child = ChildGuard(command.spawn().context("starting a program")?);
        let mut silent = vec![SocketAddr::new(ip, PEER_PORT)];
        if start.case.serves_soon() {
            silent.push(SocketAddr::new(ip, CLIENT_PORT));
        }
        let ended = child.wait_answering(silent, &self.hello).with_context(|| {
            format!("{} by {:?}: {}", start.program.display(), start.source, start.case.text())
        })?;
        Ok(match ended {
            Some(status) => {
                StartOutcome::Ended { code: status.code(), output: fs_err::read_to_string(&log)? }
            }
            None => StartOutcome::Started,
        })
    }
}

/// A process that is killed when this value is dropped.
struct ChildGuard(Child);

impl ChildGuard {
    /// Waits until every address has answered and the process is idle, or until the process has
    /// ended. etcd may answer before it ends with an error.
    fn wait_answering(
        &mut self,
        mut silent: Vec<SocketAddr>,
        hello: &[u8],
    ) -> Result<Option<ExitStatus>> {
        let began = Instant::now();
        let mut idle_checks = 0;
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(Some(status));
            }
            silent.retain(|address| match address.port() {
                // An accepted connection isn't enough on the client port. etcd opens it early,
                // closes its connections until it serves, and may still end.
                CLIENT_PORT => !answers(*address, hello),
                _ => !reacts_twice(*address),
            });
            if silent.is_empty() {
                idle_checks = if is_idle(self.0.id()) { idle_checks + 1 } else { 0 };
                if idle_checks == IDLE_CHECKS {
                    return Ok(self.0.try_wait()?);
                }
            }
            if began.elapsed() > TIME_LIMIT {
                bail!("it neither answers on {silent:?} and gets idle, nor ends");
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// Whether no thread of a process runs, waits for a processor, or waits for a disk. A process that
/// has ended is idle.
fn is_idle(pid: u32) -> bool {
    let Ok(threads) = fs_err::read_dir(format!("/proc/{pid}/task")) else { return true };
    threads.flatten().all(|thread| {
        let status = fs_err::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // A thread's state is the field after the program's name, which is in parentheses
        // (proc_pid_stat(5)).
        status.rsplit(") ").next().is_none_or(|fields| !fields.starts_with(['R', 'D']))
    })
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns whether a program serves HTTP or TLS at `address`. That is so if it sends at least one
/// byte, of a status line, a certificate or an alert.
fn answers(address: SocketAddr, hello: &[u8]) -> bool {
    [REQUEST, hello].iter().any(|bytes| exchange(address, bytes).is_some_and(|read| read.is_ok()))
}

/// Whether a program accepts connections at `address`. Connects twice: a program that is about to
/// end may close the first connection, and refuses the second one.
fn reacts_twice(address: SocketAddr) -> bool {
    let reacts = || match exchange(address, REQUEST) {
        Some(Err(error)) => {
            matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset)
        }
        other => other.is_some(),
    };
    reacts() && reacts()
}

/// Sends `bytes` to `address`, and reads one byte. Returns `None` if no connection to `address` can
/// be made.
fn exchange(address: SocketAddr, bytes: &[u8]) -> Option<io::Result<()>> {
    let mut stream = TcpStream::connect_timeout(&address, PROBE_LIMIT).ok()?;
    stream.set_read_timeout(Some(PROBE_LIMIT)).ok()?;
    stream.write_all(bytes).ok()?;
    Some(stream.read_exact(&mut [0; 1]))
}

/// Returns the first bytes of a TLS handshake.
fn client_hello() -> Result<Vec<u8>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let mut connection = rustls::ClientConnection::new(Arc::new(config), "localhost".try_into()?)?;
    let mut hello = Vec::new();
    connection.write_tls(&mut hello)?;
    Ok(hello)
}

fn write_certificates(folder: &TempDir) -> Result<()> {
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_key = KeyPair::generate()?;
    let authority_pem = authority.self_signed(&authority_key)?.pem();
    let issuer = Issuer::new(authority, authority_key);
    fs_err::write(folder.path().join("ca.crt"), authority_pem)?;
    for name in ["leaf", "other"] {
        let key = KeyPair::generate()?;
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let mut leaf = CertificateParams::new(names)?;
        leaf.extended_key_usages = vec![
            rcgen::ExtendedKeyUsagePurpose::ServerAuth,
            rcgen::ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let pem = leaf.signed_by(&key, &issuer)?.pem();
        fs_err::write(folder.path().join(format!("{name}.crt")), pem)?;
        fs_err::write(folder.path().join(format!("{name}.key")), key.serialize_pem())?;
    }
    Ok(())
}
