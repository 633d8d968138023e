//! Sends many malformed requests over HTTP. Each must get an answer that blames the client, and
//! none may change what other clients rely on.

mod random;
pub(in crate::tests) mod requests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use discovery_types::access::ClientKind;
use discovery_types::client::client_tls_config;
use discovery_types::key::SigningKey;
use discovery_types::problem::{PROBLEM_JSON, Problem};
use discovery_types::statement::Statement;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::agent::{TestAgent, form};
use super::random::Random;
use super::support::{TestInstallation, WAIT_TIMEOUT};
use crate::server::RunningService;
use requests::RequestMaker;

/// Number of requests. The environment variable `MALFORMED_REQUESTS` overrides it, and
/// `MALFORMED_SEED` sets the seed from which the requests are made.
const REQUESTS: u64 = 50_000;
/// Number of connections of each kind of caller. More connections would take processor time from
/// other tests.
const CONNECTIONS: u64 = 1;

/// Maximum number of attempts to send a request while the service can't answer it.
const TRIES: u32 = 20;
/// Pause before a request is sent again.
const PAUSE: Duration = Duration::from_millis(500);

pub(in crate::tests) type Connection = tokio_rustls::client::TlsStream<tokio::net::TcpStream>;

/// An answer of the service.
pub(in crate::tests) struct RawAnswer {
    pub(in crate::tests) status: u16,
    head: String,
    pub(in crate::tests) body: String,
}

impl RawAnswer {
    /// Returns the value of a header.
    pub(in crate::tests) fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }
}

/// One kind of caller: its TLS key, and its access token.
pub(in crate::tests) struct CallerKind {
    pub(in crate::tests) key: Option<Arc<SigningKey>>,
    pub(in crate::tests) authorization: Option<String>,
}

pub(in crate::tests) async fn connect(
    world: &TestInstallation,
    service: &RunningService,
    caller: &CallerKind,
) -> Connection {
    let config = client_tls_config(&world.context.pins, caller.key.as_deref());
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let socket = tokio::net::TcpStream::connect(service.addresses[0]).await.unwrap();
    let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
    connector.connect(name, socket).await.unwrap()
}

/// Reads one answer. Returns `None` if the connection ends before the answer does.
pub(in crate::tests) async fn read_answer(
    connection: &mut Connection,
    with_body: bool,
) -> Option<RawAnswer> {
    let mut received = Vec::new();
    loop {
        let mut part = [0; 16_384];
        let end = received.windows(4).position(|four| four == b"\r\n\r\n");
        if let Some(end) = end {
            let head = String::from_utf8(received[..end].to_vec()).unwrap();
            let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap();
            let mut answer = RawAnswer { status, head, body: String::new() };
            let length = answer.header("content-length").and_then(|length| length.parse().ok());
            let length: usize = if with_body { length.unwrap_or(0) } else { 0 };
            if received.len() >= end + 4 + length {
                answer.body = String::from_utf8(received[end + 4..][..length].to_vec()).unwrap();
                return Some(answer);
            }
        }
        match connection.read(&mut part).await {
            Ok(0) | Err(_) => return None,
            Ok(read) => received.extend_from_slice(&part[..read]),
        }
    }
}

/// Sends a request. Repeats it while the service is overloaded, or on another connection if the
/// service closes this one. Both happen on a slow machine.
pub(in crate::tests) async fn answer_to(
    (world, service, caller): (&TestInstallation, &RunningService, &CallerKind),
    connection: &mut Connection,
    request: &[u8],
) -> RawAnswer {
    for _ in 0..TRIES {
        let answer = match connection.write_all(request).await {
            Ok(()) => read_answer(connection, true).await,
            Err(_) => None,
        };
        let is_open =
            answer.as_ref().is_some_and(|answer| answer.header("connection") != Some("close"));
        if !is_open {
            *connection = connect(world, service, caller).await;
        }
        match answer {
            Some(answer) if answer.status != 503 => return answer,
            _ => tokio::time::sleep(PAUSE).await,
        }
    }
    panic!("no answer to {}", String::from_utf8_lossy(request));
}

/// Panics unless the answer is one that a malformed request may get.
fn check_answer(answer: &RawAnswer, is_http: bool, sent: &[u8]) {
    let shown = || {
        let sent = String::from_utf8_lossy(&sent[..sent.len().min(1_500)]);
        format!("{}\n{}\n\non\n{sent}", answer.head, answer.body)
    };
    if answer.status == 503 {
        assert!(answer.header("retry-after").is_some(), "503 without Retry-After: {}", shown());
    } else {
        assert!((200..500).contains(&answer.status), "{}", shown());
    }
    // The HTTP library answers bytes that aren't HTTP, without a problem document.
    if answer.status < 400 || !is_http || answer.body.is_empty() && sent.starts_with(b"HEAD ") {
        return;
    }
    assert_eq!(answer.header("content-type"), Some(PROBLEM_JSON), "{}", shown());
    let problem: Problem =
        serde_json::from_str(&answer.body).unwrap_or_else(|_| panic!("{}", shown()));
    assert_eq!(problem.code.status(), answer.status, "{}", shown());
    assert!(!problem.detail.is_empty() && !problem.next.is_empty(), "{}", shown());
}

/// Sends requests of one caller until `left` is used up.
async fn send_requests(
    (world, service): (&TestInstallation, &RunningService),
    (maker, caller): (&RequestMaker, &CallerKind),
    mut random: Random,
    (left, refused): (&AtomicU64, &AtomicUsize),
) {
    let mut connection = connect(world, service, caller).await;
    let next = |left: u64| left.checked_sub(1);
    while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok() {
        let request = maker.next(&mut random, caller.authorization.as_deref());
        let sent = async {
            // The service may answer, and close, before it has read everything.
            let _ = connection.write_all(&request.bytes).await;
            let _ = connection.flush().await;
            if !request.is_http {
                let _ = connection.shutdown().await;
            }
            read_answer(&mut connection, !request.bytes.starts_with(b"HEAD ")).await
        };
        let answer = tokio::time::timeout(WAIT_TIMEOUT, sent).await.unwrap_or_else(|_| {
            let start = &request.bytes[..request.bytes.len().min(1_500)];
            panic!("no answer to {}", String::from_utf8_lossy(start))
        });
        let closes =
            answer.as_ref().is_none_or(|answer| answer.header("connection") == Some("close"));
        match &answer {
            Some(answer) => {
                check_answer(answer, request.is_http, &request.bytes);
                refused.fetch_add(usize::from(answer.status >= 400), Ordering::Relaxed);
            }
            None => assert!(
                !request.is_http,
                "no answer to {}",
                String::from_utf8_lossy(&request.bytes)
            ),
        }
        if closes || !request.is_http {
            connection = connect(world, service, caller).await;
        }
    }
}

/// Counts the rows that the malformed requests must not change.
async fn count_rows(world: &TestInstallation) -> Vec<(String, i64)> {
    let tables = [
        "SELECT 'admin changes', count(*) FROM admin_elements",
        "SELECT 'statements', count(*) FROM statements",
        "SELECT 'grants', count(*) FROM grants WHERE revoked_us IS NULL",
        "SELECT 'agents', count(*) FROM agents a JOIN clusters c ON c.id = a.cluster_id
            WHERE a.seat IS NOT NULL AND c.name <> 'disturbed'",
        "SELECT 'commits', count(*) FROM commits",
        "SELECT 'leaves', count(*) FROM leaves",
        "SELECT 'intents', count(*) FROM intents",
        "SELECT 'decisions', count(*) FROM decisions",
        "SELECT phase, count(*) FROM clusters WHERE phase <> 'draft' GROUP BY phase",
    ];
    let sql = format!("{} ORDER BY 1", tables.join(" UNION ALL "));
    let rows = sqlx::query_as(sqlx::AssertSqlSafe(sql));
    rows.fetch_all(&mut world.database.connect().await).await.unwrap()
}

/// Makes requests that may be about any of these clusters.
fn request_maker(clusters: [&Statement; 3]) -> RequestMaker {
    let description: Value = serde_json::from_str(crate::openapi::openapi_text()).unwrap();
    // These requests are valid without a body or a signed text, so they aren't malformed.
    let valid = ["/v1/db/accept", "/v1/clusters/{id}/abandon", "/v1/grants/{id}/revoke"];
    let mut maker = RequestMaker::new(&description, &valid);
    maker.clusters = clusters.map(|statement| statement.cluster.to_string()).into();
    maker
}

/// Returns callers without a key, with an unknown key, of the owner, and of an agent.
fn caller_kinds(
    world: &TestInstallation,
    service: &RunningService,
    agent: &TestAgent,
) -> [CallerKind; 4] {
    let caller = |key: &Arc<SigningKey>, kind: ClientKind| {
        let token = service.app().issue_access_token(key.public(), kind).access_token;
        CallerKind { key: Some(key.clone()), authorization: Some(format!("Bearer {token}")) }
    };
    [
        CallerKind { key: None, authorization: None },
        CallerKind { key: Some(Arc::new(SigningKey::generate())), authorization: None },
        caller(&world.owner, ClientKind::Admin),
        caller(&agent.key, ClientKind::Agent(agent.record.cluster)),
    ]
}

/// Sends all requests, over several connections at a time. Returns how many were refused.
async fn send_all(
    world: &TestInstallation,
    service: &RunningService,
    maker: &RequestMaker,
    callers: &[CallerKind],
) -> usize {
    let from_environment = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let requests = from_environment("MALFORMED_REQUESTS").unwrap_or(REQUESTS);
    let seed: u64 = from_environment("MALFORMED_SEED").unwrap_or(1);
    let (left, refused) = (AtomicU64::new(requests), AtomicUsize::new(0));
    let senders = callers.iter().zip(0..).flat_map(|(caller, kind)| {
        let counters = (&left, &refused);
        (0..CONNECTIONS).map(move |number| {
            let random = Random(seed * 1_000 + kind * CONNECTIONS + number);
            send_requests((world, service), (maker, caller), random, counters)
        })
    });
    futures_util::future::join_all(senders).await;
    refused.load(Ordering::Relaxed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_requests_are_refused_and_change_nothing() {
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    args.times.poll = Duration::from_millis(5);
    // Let leases outlast the test: the agents don't poll meanwhile, and must not lose their seats.
    args.times.lease = Duration::from_secs(3_600);
    (args.limits.rate, args.limits.burst) = (1_000_000, 1_000_000);
    let service = crate::server::start(args).await.unwrap();
    let admin = world.owner(&service);
    let (forming, formed) =
        (world.cluster(&admin, "forming", 3).await, world.cluster(&admin, "formed", 1).await);
    let mut agents = Vec::new();
    let token = world.token(&admin, &forming).await;
    for number in 1..=2 {
        agents.push(TestAgent::new(&world, &service, &forming, &token, number));
        agents.last().unwrap().redeem().await.unwrap();
    }
    // The agent that sends malformed requests may lose its own seat by them.
    let disturbed = world.cluster(&admin, "disturbed", 3).await;
    let token_of_disturbed = world.token(&admin, &disturbed).await;
    let sender = TestAgent::new(&world, &service, &disturbed, &token_of_disturbed, 1);
    sender.redeem().await.unwrap();
    let token_of_formed = world.token(&admin, &formed).await;
    let mut member = [TestAgent::new(&world, &service, &formed, &token_of_formed, 9)];
    form(&mut member).await;

    let mut maker = request_maker([&forming, &formed, &disturbed]);
    maker.known = vec![
        sender.envelope().to_string(),
        forming.sign(&world.owner).to_string(),
        agents[0].envelope().to_string(),
        agents[0].record.agent_key.to_string(),
        agents[0].record.csr.to_string(),
        agents[0].nonce.to_string(),
        token.id().to_string(),
        formed.cluster.to_string(),
        "demo".into(),
    ];
    let before = count_rows(&world).await;
    let refused =
        send_all(&world, &service, &maker, &caller_kinds(&world, &service, &sender)).await;
    println!("{} requests were refused", refused);
    assert_eq!(count_rows(&world).await, before);

    // The forming cluster's last host comes, and the cluster forms.
    agents.push(TestAgent::new(&world, &service, &forming, &token, 3));
    form(&mut agents).await;
    service.stop().await;
}
