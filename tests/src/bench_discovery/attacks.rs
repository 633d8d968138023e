//! Measures how attacks on the service affect an honest client. Attackers send requests from four
//! addresses of the loopback network, and the honest client has an address of its own. The service
//! has its default limits.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use discovery_types::api::ClusterQuery;
use discovery_types::client::{DiscoveryClient, client_tls_config};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::service::BenchService;

/// Last numbers of the attackers' addresses, in 127.66.0.0/24.
const ATTACKER_ADDRESS_ENDS: [u8; 4] = [1, 2, 3, 4];
/// Connections that each attacker tries to keep at a time.
const CONNECTIONS: usize = 64;
/// Number of sockets that each attacker opens and sends nothing on. It exceeds the service's limit
/// for one address.
const SILENT_SOCKETS: usize = 1_200;
/// Time between two requests of the honest client.
const HONEST_PAUSE: Duration = Duration::from_millis(50);
/// Longest wait of an attacker for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Size of a large request, in bytes: far above the service's limit.
const LARGE: usize = 4 << 20;

/// A way to attack the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attack {
    Nothing,
    SilentSockets,
    Handshakes,
    SlowHeaders,
    LargeHeaders,
    LargeBodies,
    DeepJson,
    Requests,
}

impl Attack {
    const ALL: [Attack; 8] = [
        Attack::Nothing,
        Attack::SilentSockets,
        Attack::Handshakes,
        Attack::SlowHeaders,
        Attack::LargeHeaders,
        Attack::LargeBodies,
        Attack::DeepJson,
        Attack::Requests,
    ];

    fn name(self) -> &'static str {
        match self {
            Attack::Nothing => "no attack",
            Attack::SilentSockets => "sockets that send nothing",
            Attack::Handshakes => "TLS handshakes",
            Attack::SlowHeaders => "headers, a byte a second",
            Attack::LargeHeaders => "headers of 4 MiB",
            Attack::LargeBodies => "bodies of 4 MiB",
            Attack::DeepJson => "JSON, 60,000 levels deep",
            Attack::Requests => "requests without a token",
        }
    }

    /// The request that an attacker repeats; `None` if it sends none.
    fn request(self) -> Option<Vec<u8>> {
        let post = |body: &[u8]| {
            let length = body.len();
            let head = "POST /v1/redeem HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
            [format!("{head}content-length: {length}\r\n\r\n").as_bytes(), body].concat()
        };
        match self {
            Attack::Nothing | Attack::SilentSockets | Attack::Handshakes | Attack::SlowHeaders => {
                None
            }
            Attack::LargeHeaders => {
                let lines = "x: y\r\n".repeat(LARGE / 6);
                Some(format!("GET /livez HTTP/1.1\r\nhost: x\r\n{lines}\r\n").into_bytes())
            }
            Attack::LargeBodies => Some(post(&vec![b' '; LARGE])),
            Attack::DeepJson => Some(post(&[b'['; 60_000])),
            Attack::Requests => Some(b"GET /v1/clusters HTTP/1.1\r\nhost: x\r\n\r\n".to_vec()),
        }
    }
}

/// Figures of one attack: its size, and how long honest requests took meanwhile.
#[derive(Clone, Debug)]
pub struct AttackFigures {
    /// Description of the attack.
    pub name: &'static str,
    /// Number of connections that the attackers opened or tried to open.
    pub attacks: u64,
    /// Number of honest requests: lists of clusters, and new connections, in turn.
    pub honest: usize,
    /// Honest requests that failed.
    pub failed: usize,
    /// Median of the honest requests' wall times.
    pub median: Duration,
    /// 99th percentile of the honest requests' wall times.
    pub p99: Duration,
    /// CPU time that the service uses per second of the attack.
    pub service: Duration,
    /// Resident memory of the service at the end of the attack, in bytes.
    pub resident_bytes: u64,
}

/// Carries out each attack for `time`.
pub(super) async fn measure_attacks(
    service: &mut BenchService,
    time: Duration,
    progress: &impl Fn(&str),
) -> Result<Vec<AttackFigures>> {
    service.stop().await?;
    service.start(&[]).await?;
    let admin = service.admin()?;
    let mut figures = Vec::new();
    for attack in Attack::ALL {
        progress(&format!("attack: {}", attack.name()));
        let mut attackers = JoinSet::new();
        if attack != Attack::Nothing {
            let request = attack.request().map(Arc::new);
            let connections = match attack {
                Attack::SilentSockets => SILENT_SOCKETS,
                _ => CONNECTIONS,
            };
            for address in ATTACKER_ADDRESS_ENDS {
                let connector =
                    TlsConnector::from(Arc::new(client_tls_config(&service.context.pins, None)));
                for _ in 0..connections {
                    let attacker = Attacker {
                        address,
                        target: service.address(),
                        connector: connector.clone(),
                        request: request.clone(),
                    };
                    attackers.spawn(attacker.attack(attack, Instant::now() + time));
                }
            }
        }
        let (before, began) = (service.cpu()?, Instant::now());
        let (times, failed) = send_honest_requests(service, &admin, time).await;
        let cpu = service.cpu()?.since(before).service;
        let resident_bytes = service.resident_bytes()?;
        let attacks = attackers.join_all().await.into_iter().sum();
        let at = |percent: usize| times.get((times.len() * percent).div_ceil(100).max(1) - 1);
        figures.push(AttackFigures {
            name: attack.name(),
            attacks,
            honest: times.len() + failed,
            failed,
            median: *at(50).context("no honest request was answered")?,
            p99: *at(99).context("no honest request was answered")?,
            service: cpu.div_f64(began.elapsed().as_secs_f64()),
            resident_bytes,
        });
    }
    Ok(figures)
}

/// Sends honest requests for `time`. They alternate between two kinds: a request for a list of
/// clusters over an open connection, and a readiness check over a new one. Returns the sorted wall
/// times, and the number of requests that failed.
async fn send_honest_requests(
    service: &BenchService,
    admin: &DiscoveryClient,
    time: Duration,
) -> (Vec<Duration>, usize) {
    let (end, mut times, mut failed) = (Instant::now() + time, Vec::new(), 0);
    let query = ClusterQuery { limit: Some(10), ..ClusterQuery::default() };
    while Instant::now() < end {
        for is_new_connection in [false, true] {
            let began = Instant::now();
            let is_answered = match is_new_connection {
                true => service.readiness().await.is_ok_and(|answer| answer.contains("200 OK")),
                false => admin.list_clusters(&query).await.is_ok(),
            };
            match is_answered {
                true => times.push(began.elapsed()),
                false => failed += 1,
            }
            tokio::time::sleep(HONEST_PAUSE).await;
        }
    }
    times.sort();
    (times, failed)
}

/// A client that attacks over one connection at a time.
struct Attacker {
    /// Last number of the source address.
    address: u8,
    target: SocketAddr,
    connector: TlsConnector,
    request: Option<Arc<Vec<u8>>>,
}

impl Attacker {
    /// Attacks until `end`. Returns how many connections it opened or tried to open.
    async fn attack(self, attack: Attack, end: Instant) -> u64 {
        let mut opened = 0;
        while Instant::now() < end {
            let left = end.saturating_duration_since(Instant::now());
            // Ignore errors: the service may refuse or close a connection at any step to defend
            // itself.
            let done = tokio::time::timeout(left, self.connect_and_attack(attack)).await;
            opened += 1;
            if !matches!(done, Ok(Ok(()))) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        opened
    }

    async fn connect_and_attack(&self, attack: Attack) -> Result<()> {
        let socket = TcpSocket::new_v4()?;
        let source = IpAddr::V4(Ipv4Addr::new(127, 66, 0, self.address));
        socket.bind(SocketAddr::new(source, 0))?;
        let mut socket = socket.connect(self.target).await?;
        if attack == Attack::SilentSockets {
            socket.read_u8().await?;
            return Ok(());
        }
        let mut stream = self.connector.connect("127.0.0.1".try_into()?, socket).await?;
        match (attack, &self.request) {
            (Attack::SlowHeaders, _) => {
                stream.write_all(b"GET /livez HTTP/1.1\r\nx: ").await?;
                loop {
                    stream.write_all(b"y").await?;
                    stream.flush().await?;
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
            (_, Some(request)) => loop {
                send(&mut stream, request).await?;
            },
            (_, None) => Ok(()),
        }
    }
}

/// Sends a request, and reads a part of its answer.
async fn send(stream: &mut TlsStream<TcpStream>, request: &[u8]) -> Result<()> {
    stream.write_all(request).await?;
    let mut answer = [0; 4_096];
    let read = tokio::time::timeout(ANSWER_LIMIT, stream.read(&mut answer)).await??;
    anyhow::ensure!(read > 0, "the service closed the connection");
    Ok(())
}
