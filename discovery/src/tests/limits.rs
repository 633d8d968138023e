//! Tests of limits, and of the error at each one.

use std::time::Duration;

use discovery_types::client::client_tls_config;
use discovery_types::problem::{Code, Problem};
use tokio::io::AsyncWriteExt;

use super::malformed::{CallerKind, connect, read_answer};
use super::support::{
    TestInstallation, WAIT_TIMEOUT, etcd_address, exchange, get, send, send_with, wait_until,
    with_long_polls,
};

fn problem(body: &str) -> Problem {
    serde_json::from_str(body).unwrap_or_else(|_| panic!("{body}"))
}

#[tokio::test]
async fn a_bad_body_path_or_method_is_refused_with_a_problem_document() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let path = "/v1/redeem";
    let key = Some(&*world.owner);
    let large = format!("{{\"jws\":\"{}\"}}", "x".repeat(70_000));
    let (status, body) = send(&world, &service, key, "POST", path, large).await;
    assert_eq!((status, problem(&body).code), (413, Code::TooLarge));
    let junk: String = (0..4_096).map(|i| char::from(33 + (i % 90) as u8)).collect();
    let deep = "[".repeat(4_000);
    for bad in [junk, deep, "{\"jws\":1}".into(), "{\"jws\":\"a.b.c\",\"x\":1}".into()] {
        let (status, body) = send(&world, &service, key, "POST", path, bad).await;
        assert_eq!((status, problem(&body).code), (400, Code::InvalidRequest), "{body}");
    }
    let headers = [("content-type", "text/plain")];
    let answer = send_with(&world, &service, key, "POST", path, &headers, "{}".into()).await;
    assert_eq!((answer.0, problem(&answer.1).code), (415, Code::MediaType));
    let (status, body) = get(&world, &service, "/v1/clusters/not-an-id").await;
    assert_eq!((status, problem(&body).code), (400, Code::InvalidRequest));
    let (status, body) = get(&world, &service, "/v1/nothing").await;
    assert_eq!((status, problem(&body).code), (404, Code::NotFound));
    let (status, body) = get(&world, &service, "/v1/token").await;
    assert_eq!((status, problem(&body).code), (405, Code::MethodNotAllowed));
    service.stop().await;
}

#[tokio::test]
async fn requests_to_change_members_are_refused_and_name_the_cluster_api() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let id = uuid::Uuid::now_v7();
    let requests = [
        ("POST", ""),
        ("GET", ""),
        ("PUT", "/1"),
        ("PATCH", "/1"),
        ("DELETE", "/8e9e05c52164694d"),
    ];
    for (method, tail) in requests {
        let path = format!("/v1/clusters/{id}/members{tail}");
        let (status, body) = send(&world, &service, None, method, &path, "{}".into()).await;
        assert_eq!((status, problem(&body).code), (405, Code::MembershipElsewhere));
        assert!(problem(&body).next.contains("Cluster API"));
    }
    service.stop().await;
}

#[tokio::test]
async fn responses_have_the_headers_that_http_requires() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let ask = async |method: &str, path: &str| {
        let end = "host: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        let request = format!("{method} {path} HTTP/1.1\r\n{end}");
        let answer = exchange(&world, &service, Some(&*world.owner), request.as_bytes()).await;
        let answer = answer.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_lowercase(), body.to_owned())
    };
    // RFC 9110, 15.5.6: a 405 response has an Allow header.
    let (head, _) = ask("DELETE", "/v1/admins").await;
    assert!(head.contains(" 405 ") && head.contains("\r\nallow: get, head, put"), "{head}");
    let members = format!("/v1/clusters/{}/members", uuid::Uuid::now_v7());
    let (head, _) = ask("PATCH", &members).await;
    assert!(head.contains(" 405 ") && head.contains("\r\nallow:"), "{head}");
    // RFC 9110, 9.3.2: a HEAD response has no body.
    for path in ["/livez", "/readyz", "/metrics"] {
        let (head, body) = ask("HEAD", path).await;
        assert!(head.contains(" 200 "), "{path}: {head}");
        assert_eq!(body, "", "{path}");
    }
    // RFC 9110, 15.5.2: a 401 response has a WWW-Authenticate header.
    let (head, _) = ask("GET", "/v1/clusters").await;
    assert!(head.contains(" 401 ") && head.contains("\r\nwww-authenticate: bearer"), "{head}");
    service.stop().await;
}

/// Maximum number of requests to send. The rate limit must refuse one of them.
const MANY_REQUESTS: usize = 200;

#[tokio::test]
async fn an_address_over_its_rate_limit_is_refused_before_any_signature_check() {
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    (args.limits.rate, args.limits.burst) = (1, 3);
    // Prevent further sweeps, because each sweep sets the clock that the responses show.
    args.times.sweep = Duration::from_secs(3_600);
    let service = crate::server::start(args).await.unwrap();
    // On a slow machine the limit allows one more request each second, so more than `burst`
    // requests may be needed. One connection serves all of them, since a handshake can take as
    // long.
    let caller = CallerKind { key: None, authorization: None };
    let mut connection = connect(&world, &service, &caller).await;
    let request = b"POST /v1/redeem HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\
        content-type: application/json\r\n\r\njunk";
    let mut refusal = None;
    for _ in 0..MANY_REQUESTS {
        // Every response has the service's time in its `Date` header, by which clients correct
        // their clocks. Set the service's clock before each request, because the service sets it to
        // the database's time whenever it reads the list of admins.
        service.app().clock.set(784_111_777_000_000);
        connection.write_all(request).await.unwrap();
        let Some(answer) = read_answer(&mut connection, true).await else {
            connection = connect(&world, &service, &caller).await;
            continue;
        };
        if answer.status == 429 && answer.header("date").is_some_and(|date| date.contains("1994")) {
            refusal = Some(answer);
            break;
        }
    }
    let refusal = refusal.expect("a request beyond the limit");
    assert_eq!(refusal.header("date"), Some("Sun, 06 Nov 1994 08:49:37 GMT"));
    assert_eq!(problem(&refusal.body).code, Code::RateLimited);
    service.stop().await;
}

#[tokio::test]
async fn long_polls_beyond_the_limit_are_refused() {
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    args.limits.max_parked_polls = 1;
    let service = crate::server::start(with_long_polls(args)).await.unwrap();
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    let first = super::agent::TestAgent::new(&world, &service, &statement, &token, 1);
    let second = super::agent::TestAgent::new(&world, &service, &statement, &token, 2);
    first.redeem().await.unwrap();
    second.redeem().await.unwrap();
    let rev = second.poll(None).await.unwrap().rev;
    let parked = first.poll(Some(rev));
    let shed = async {
        while service.app().poll_slots.taken() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let shed = second.poll(Some(rev)).await.unwrap_err().code();
        let third = super::agent::TestAgent::new(&world, &service, &statement, &token, 3);
        third.redeem().await.unwrap();
        shed
    };
    let (kept, shed) = tokio::join!(parked, shed);
    assert!(kept.unwrap().rev > rev);
    assert_eq!(shed, Some(Code::Overloaded));
    service.stop().await;
}

#[tokio::test]
async fn every_listener_accepts_only_tls_1_3() {
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    args.etcd_listen = args.listen.clone();
    args.console.console_listen = args.listen.clone();
    let service = crate::server::start(args).await.unwrap();
    let addresses = [service.addresses[0], etcd_address(&service), service.console_addresses[0]];
    for address in addresses {
        let connect = async |tls: rustls::ClientConfig| {
            let socket = tokio::net::TcpStream::connect(address).await.unwrap();
            let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
            tokio_rustls::TlsConnector::from(std::sync::Arc::new(tls)).connect(name, socket).await
        };
        let old = rustls::ClientConfig::builder_with_provider(muster_tls::provider())
            .with_protocol_versions(&[&rustls::version::TLS12])
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let refused = connect(old).await.unwrap_err();
        assert!(refused.to_string().contains("ProtocolVersion"), "{address}: {refused}");
        connect(client_tls_config(&world.context.pins, None)).await.unwrap();
    }
    service.stop().await;
}

#[tokio::test]
async fn headers_that_never_end_and_bodies_that_never_come_are_cut_off() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let headers = exchange(&world, &service, None, b"GET /livez HTTP/1.1\r\nhost: x\r\n");
    let body = exchange(
        &world,
        &service,
        None,
        b"POST /v1/redeem HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
          content-type: application/json\r\ncontent-length: 10\r\n\r\n{",
    );
    let (headers, body) = tokio::join!(headers, body);
    assert!(headers.unwrap().starts_with("HTTP/1.1 408"));
    assert!(body.unwrap().starts_with("HTTP/1.1 4"));
    service.stop().await;
}

#[tokio::test]
async fn a_draining_service_answers_waiting_polls_at_once() {
    let world = TestInstallation::new().await;
    let mut args = with_long_polls(world.args("ledger"));
    // Prevent further sweeps, because each sweep sets the clock that the responses show.
    args.times.sweep = Duration::from_secs(3_600);
    let service = crate::server::start(args).await.unwrap();
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    let agent = super::agent::TestAgent::new(&world, &service, &statement, &token, 1);
    let rev = agent.redeem().await.unwrap().rev;
    let parked = service.app().poll_slots.clone();
    let poll = tokio::spawn(async move { agent.poll(Some(rev)).await });
    while parked.taken() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    service.app().clock.set(4_000_000_000_000_000);
    service.stop().await;
    let answer = poll.await.unwrap().unwrap();
    assert_eq!(answer.rev, rev);
    assert!(answer.now_ms >= 4_000_000_000_000, "the time of the answer, not of the question");
}

#[tokio::test]
async fn sockets_of_one_address_beyond_the_limit_are_closed_before_a_handshake() {
    use tokio::io::AsyncReadExt;
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    args.limits.max_connections_per_address = 2;
    let service = crate::server::start(args).await.unwrap();
    let connect = async || tokio::net::TcpStream::connect(service.addresses[0]).await.unwrap();
    let mut silent = vec![connect().await, connect().await, connect().await];
    // The workers accept the sockets in any order. So the service can close any of the three.
    let ends = silent.iter_mut().map(|socket| Box::pin(async { socket.read(&mut [0]).await }));
    let ends = tokio::time::timeout(WAIT_TIMEOUT, futures_util::future::select_all(ends));
    let (end, beyond, _) = ends.await.expect("one of three is closed");
    assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    drop(silent.remove(beyond));
    drop(silent.pop());
    // Two sockets were dropped, so the address may connect again.
    wait_until("it is served again", async || {
        let request = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        let answer = exchange(&world, &service, None, request).await;
        answer.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
    })
    .await;
    drop(silent);
    service.stop().await;
}

#[tokio::test]
async fn silent_sockets_of_one_address_delay_no_other_address() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    // Open more sockets than all workers together may have in a handshake.
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    let mut silent = Vec::new();
    for _ in 0..(workers * 256 + 64).min(900) {
        silent.push(tokio::net::TcpStream::connect(service.addresses[0]).await.unwrap());
    }
    let from = tokio::net::TcpSocket::new_v4().unwrap();
    from.bind("127.0.0.9:0".parse().unwrap()).unwrap();
    let socket = from.connect(service.addresses[0]).await.unwrap();
    let config = discovery_types::client::client_tls_config(&world.context.pins, None);
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
    let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
    // The silent sockets stay open until the test ends.
    let entered = tokio::time::timeout(WAIT_TIMEOUT, connector.connect(name, socket)).await;
    entered.expect("it is let in").unwrap();
    drop(silent);
    service.stop().await;
}

#[tokio::test]
async fn a_client_that_reads_no_response_loses_its_connection() {
    use tokio::io::AsyncWriteExt;
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(1_024).unwrap();
    let socket = socket.connect(service.addresses[0]).await.unwrap();
    let config = discovery_types::client::client_tls_config(&world.context.pins, None);
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
    let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
    let mut stream = connector.connect(name, socket).await.unwrap();
    let requests = "GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n".repeat(40);
    stream.write_all(requests.as_bytes()).await.unwrap();
    let ended = async {
        // Without a TLS alert, a client notices the end of its connection only when it sends
        // something.
        while stream.write_all(b"G").await.is_ok() && stream.flush().await.is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(WAIT_TIMEOUT, ended).await.expect("the connection stays for ever");
    service.stop().await;
}

#[tokio::test]
async fn silent_sockets_from_many_addresses_delay_nobody() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let connect = async |from: std::net::Ipv4Addr| {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        socket.connect(service.addresses[0]).await.unwrap()
    };
    let mut silent = Vec::new();
    for host in 0..20 {
        for _ in 0..32 {
            silent.push(connect(std::net::Ipv4Addr::new(127, 0, 7, host)).await);
        }
    }
    // The silent sockets stay open until the test ends.
    let request = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let answer =
        tokio::time::timeout(WAIT_TIMEOUT, exchange(&world, &service, None, request)).await;
    let answer = answer.expect("it is let in").unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    drop(silent);
    service.stop().await;
}
