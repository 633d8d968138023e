//! Tests of the client against a real TLS server that sends scripted answers.

use std::sync::Arc;

use muster_tls::{CertificateRule, PeerCertificate};
use rustls::SignatureScheme;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::api::ClusterQuery;
use crate::digest::Digest;
use crate::key::SigningKey;
use crate::problem::Code;
use crate::tls::client_key;
use crate::url::ServiceUrl;

/// One HTTP request that the server received.
#[derive(Debug)]
struct ReceivedRequest {
    head: String,
    body: String,
    client: Option<crate::key::PublicKey>,
    /// Time just before the answer was sent.
    at: std::time::Instant,
}

struct ScriptedServer {
    url: ServiceUrl,
    pin: Digest,
    requests: mpsc::Receiver<ReceivedRequest>,
}

#[derive(Debug)]
struct AnyClient;

impl CertificateRule for AnyClient {
    fn verify(&self, _: &PeerCertificate<'_>) -> Result<(), rustls::Error> {
        Ok(())
    }

    fn is_mandatory(&self) -> bool {
        false
    }

    fn choose_schemes(&self, _: Vec<SignatureScheme>) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// Starts a server that sends one of `answers` on each connection. Its certificate expired in 1999.
async fn serve(
    versions: &[&'static rustls::SupportedProtocolVersion],
    answers: Vec<String>,
) -> ScriptedServer {
    serve_after(versions, answers, std::time::Duration::ZERO).await
}

/// Starts a server as [`serve`] does. The server waits for `pause` before each answer.
async fn serve_after(
    versions: &[&'static rustls::SupportedProtocolVersion],
    answers: Vec<String>,
    pause: std::time::Duration,
) -> ScriptedServer {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.not_after = rcgen::date_time_ymd(1999, 1, 1);
    let certificate = params.self_signed(&key).unwrap();
    let pin = crate::tls::spki_hash(certificate.der()).unwrap();
    let private = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let provider = muster_tls::provider();
    let verifier = muster_tls::client_verifier(AnyClient, &provider);
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![certificate.der().clone()], private)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap()).parse().unwrap();
    let (sender, seen) = mpsc::channel(16);
    tokio::spawn(async move {
        for answer in answers {
            let (socket, _) = listener.accept().await.unwrap();
            let Ok(mut stream) = acceptor.accept(socket).await else { continue };
            let certificates = stream.get_ref().1.peer_certificates();
            let client = certificates.and_then(|chain| client_key(&chain[0]).ok());
            let (head, body) = read_request(&mut stream).await;
            tokio::time::sleep(pause).await;
            sender
                .send(ReceivedRequest { head, body, client, at: std::time::Instant::now() })
                .await
                .unwrap();
            // Ignore errors: a client may close the connection in the middle of a long answer.
            let _ = stream.write_all(answer.as_bytes()).await;
            let _ = stream.shutdown().await;
        }
    });
    ScriptedServer { url, pin, requests: seen }
}

async fn read_request(stream: &mut (impl AsyncReadExt + Unpin)) -> (String, String) {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|l| l.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok())
                .unwrap_or(0usize);
            if body.len() >= length {
                return (head.to_owned(), body.to_owned());
            }
        }
        let mut chunk = [0; 4096];
        match stream.read(&mut chunk).await.unwrap() {
            0 => return (text, String::new()),
            n => bytes.extend_from_slice(&chunk[..n]),
        }
    }
}

fn answer(status: &str, kind: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\
         date: Sun, 06 Nov 2033 08:49:37 GMT\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
}

fn ok(body: &serde_json::Value) -> String {
    answer("200 OK", "application/json", &body.to_string())
}

fn context_answer() -> String {
    ok(&json!({
        "issuer": "urn:muster:discovery:test", "urls": ["https://a:1"], "pins": [],
        "root_owner": SigningKey::from_seed(&[1; 32]).public(),
        "admin_head": Digest::of(b"x"), "now_ms": 1, "version": "0",
    }))
}

fn token_answer() -> String {
    let token = crate::jws::Jws::sign(
        crate::jws::JwsType::Access,
        &SigningKey::from_seed(&[2; 32]),
        &json!({ "any": "thing" }),
    );
    ok(&json!({ "access_token": token, "token_type": "Bearer", "expires_in": 600 }))
}

/// Returns a token response of a faulty service: the token's lifetime is almost endless.
fn endless_token_answer() -> String {
    token_answer().replace("\"expires_in\":600", &format!("\"expires_in\":{}", u64::MAX))
}

fn client(urls: Vec<ServiceUrl>, pin: Digest, key: Option<&Arc<SigningKey>>) -> DiscoveryClient {
    DiscoveryClient::new(ClientConfig { urls, pins: vec![pin], key: key.cloned() }).unwrap()
}

const TLS13: &[&rustls::SupportedProtocolVersion] = &[&rustls::version::TLS13];

#[tokio::test]
async fn a_pinned_server_is_trusted_whatever_its_dates_and_sees_the_clients_key() {
    let mut server = serve(TLS13, vec![context_answer()]).await;
    let key = Arc::new(SigningKey::generate());
    let client = client(vec![server.url.clone()], server.pin, Some(&key));
    assert_eq!(client.context().await.unwrap().issuer, "urn:muster:discovery:test");
    assert_eq!(server.requests.recv().await.unwrap().client, Some(*key.public()));
}

#[tokio::test]
async fn another_key_is_refused_before_anything_is_sent() {
    let mut server = serve(TLS13, vec![context_answer()]).await;
    let client = client(vec![server.url.clone()], Digest::of(b"another key"), None);
    match client.context().await {
        Err(error @ ClientError::Pin { .. }) => {
            assert!(!error.is_retryable());
            assert!(error.to_string().contains(&server.pin.to_string()), "{error}");
        }
        other => panic!("{other:?}"),
    }
    assert!(server.requests.recv().await.is_none(), "a request was sent to a server not pinned");
}

#[tokio::test]
async fn an_older_tls_is_refused() {
    let server = serve(&[&rustls::version::TLS12], vec![context_answer()]).await;
    let client = client(vec![server.url.clone()], server.pin, None);
    assert!(matches!(client.context().await, Err(ClientError::Unreachable { .. })));
}

#[tokio::test]
async fn the_next_url_is_tried_if_one_is_down() {
    let server = serve(TLS13, vec![context_answer()]).await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let down = format!("https://{closed}").parse().unwrap();
    let client = client(vec![down, server.url.clone()], server.pin, None);
    assert!(client.context().await.is_ok());
}

#[tokio::test]
async fn a_client_follows_the_service_to_other_urls_and_pins() {
    let key = Arc::new(SigningKey::generate());
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let client =
        client(vec![format!("https://{closed}").parse().unwrap()], Digest::of(b"old"), Some(&key));
    let contact = client.contact();
    assert!(matches!(client.context().await, Err(ClientError::Unreachable { .. })));
    let lost = contact.borrow().clone();
    let super::ServiceContact::Unreachable { error, .. } = &lost else { panic!("{lost:?}") };
    assert!(error.contains("can't be reached"), "{error}");

    let list = ok(&json!({ "clusters": [] }));
    let mut server = serve(TLS13, vec![context_answer(), token_answer(), list]).await;
    let moves = client.moves();
    client.set_service(vec![server.url.clone()], vec![server.pin]).unwrap();
    assert!(moves.has_changed().unwrap());
    client.list_clusters(&ClusterQuery::default()).await.unwrap();
    assert_eq!(*contact.borrow(), super::ServiceContact::Reachable);
    assert_eq!(server.requests.recv().await.unwrap().client, Some(*key.public()));
}

#[tokio::test]
async fn a_key_that_is_pinned_no_longer_is_refused_at_the_old_url_too() {
    let mut old = serve(TLS13, vec![context_answer()]).await;
    let client = client(vec![old.url.clone()], old.pin, None);
    client.set_service(vec![old.url.clone()], vec![Digest::of(b"the new key")]).unwrap();
    assert!(matches!(client.context().await, Err(ClientError::Pin { .. })));
    assert!(matches!(*client.contact().borrow(), super::ServiceContact::Unreachable { .. }));
    assert!(old.requests.recv().await.is_none(), "a request was sent to the old key");
}

#[tokio::test]
async fn a_refusal_shows_that_the_service_can_be_reached() {
    let problem = json!(crate::problem::Problem::new(Code::Overloaded, "", "")).to_string();
    let busy = answer("503 Service Unavailable", crate::problem::PROBLEM_JSON, &problem);
    let server = serve(TLS13, vec![busy, answer("502 Bad Gateway", "text/html", "")]).await;
    let client = client(vec![server.url.clone()], server.pin, None);
    assert!(client.context().await.is_err());
    assert_eq!(*client.contact().borrow(), super::ServiceContact::Reachable);
    assert!(client.context().await.is_err());
    assert!(matches!(*client.contact().borrow(), super::ServiceContact::Unreachable { .. }));
}

#[tokio::test]
async fn one_broken_connection_is_no_outage_and_two_in_a_row_are() {
    let list = ok(&json!({ "clusters": [] }));
    let broken = || "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n".to_owned();
    let answers =
        vec![context_answer(), token_answer(), broken(), list, broken(), broken(), broken()];
    let server = serve(TLS13, answers).await;
    let key = Arc::new(SigningKey::generate());
    let client = client(vec![server.url.clone()], server.pin, Some(&key));
    let mut reachable = Vec::new();
    for _ in 0..5 {
        let _ = client.list_clusters(&ClusterQuery::default()).await;
        let contact = client.contact();
        reachable.push(*contact.borrow() == super::ServiceContact::Reachable);
    }
    assert_eq!(reachable, [true, true, true, false, false]);
}

/// While the service changes its TLS key, a join bundle has two pins, and the client one redeem
/// envelope for each. The service refuses the record in an envelope for another key.
#[tokio::test]
async fn the_next_redeem_envelope_is_sent_only_if_the_record_was_refused() {
    let key = Arc::new(SigningKey::generate());
    let redeems = [1, 2].map(|number| {
        crate::jws::Jws::sign(crate::jws::JwsType::Redeem, &key, &json!({ "number": number }))
    });
    let other = "The redeem is meant for another discovery service.";
    let record = "A peer URL is a loopback address.";
    for (answers, returned) in [
        (&[(Code::RecordRefused, other), (Code::GrantExpired, "")][..], 1),
        (&[(Code::RecordRefused, other), (Code::RecordRefused, record)], 1),
        (&[(Code::RecordRefused, record), (Code::RecordRefused, other)], 0),
        (&[(Code::RecordRefused, other), (Code::RecordRefused, other)], 1),
        (&[(Code::GrantExpired, "")], 0),
        (&[(Code::Overloaded, "")], 0),
    ] {
        let sent = answers.len();
        let problem = |(code, detail): &(Code, &str)| {
            let problem = json!(crate::problem::Problem::new(*code, *detail, "")).to_string();
            answer("400 Bad Request", crate::problem::PROBLEM_JSON, &problem)
        };
        let mut server = serve(TLS13, answers.iter().map(problem).collect()).await;
        let client = client(vec![server.url.clone()], server.pin, Some(&key));
        let ClientError::Problem(refused) = client.join(&redeems, None).await.unwrap_err() else {
            panic!("{answers:?}");
        };
        assert_eq!((refused.code, refused.detail.as_str()), answers[returned], "{answers:?}");
        for redeem in &redeems[..sent] {
            let request = server.requests.recv().await.unwrap();
            assert!(request.body.contains(redeem.as_str()), "{}", request.body);
        }
        assert!(server.requests.recv().await.is_none(), "{answers:?}");
    }
}

#[tokio::test]
async fn a_request_fetches_one_token_and_then_uses_it() {
    let list = ok(&json!({ "clusters": [] }));
    let answers = vec![context_answer(), token_answer(), list.clone(), list];
    let mut server = serve(TLS13, answers).await;
    let key = Arc::new(SigningKey::generate());
    let client = client(vec![server.url.clone()], server.pin, Some(&key));
    client.list_clusters(&ClusterQuery::default()).await.unwrap();
    let named = ClusterQuery { name: Some("demo".parse().unwrap()), ..ClusterQuery::default() };
    client.list_clusters(&named).await.unwrap();

    let mut requests = Vec::new();
    for _ in 0..4 {
        requests.push(server.requests.recv().await.unwrap());
    }
    let lines: Vec<_> = requests.iter().map(|r| r.head.lines().next().unwrap()).collect();
    assert_eq!(
        lines,
        [
            "GET /v1/context HTTP/1.1",
            "POST /v1/token HTTP/1.1",
            "GET /v1/clusters HTTP/1.1",
            "GET /v1/clusters?name=demo HTTP/1.1",
        ]
    );
    let form = &requests[1].body;
    let (grant, assertion) = form.split_once("&assertion=").unwrap();
    assert_eq!(grant, "grant_type=urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Ajwt-bearer");
    // The assertion's times follow the `Date` of the first answer, not the local clock.
    let server_time = 2_014_879_777;
    let verified = crate::access::Assertion::verify(
        &assertion.parse().unwrap(),
        key.public(),
        "urn:muster:discovery:test",
        server_time,
    );
    assert!(verified.is_ok(), "{verified:?}");
    for request in &requests[2..] {
        assert!(request.head.to_ascii_lowercase().contains("authorization: bearer "));
    }
}

#[tokio::test]
async fn a_refused_access_token_is_replaced_once() {
    let problem = serde_json::to_string(&crate::problem::Problem::new(
        Code::TokenInvalid,
        "It has expired.",
        "Get another.",
    ))
    .unwrap();
    let refused = answer("401 Unauthorized", "application/problem+json", &problem);
    let answers = vec![context_answer(), token_answer(), refused.clone(), token_answer(), refused];
    let mut server = serve(TLS13, answers).await;
    let key = Arc::new(SigningKey::generate());
    let client = client(vec![server.url.clone()], server.pin, Some(&key));
    let error = client.list_clusters(&ClusterQuery::default()).await.unwrap_err();
    assert_eq!(error.code(), Some(Code::TokenInvalid));
    assert_eq!(error.to_string(), "It has expired. Get another. [token_invalid]");
    let mut count = 0;
    while server.requests.recv().await.is_some() {
        count += 1;
    }
    assert_eq!(count, 5);
}

#[tokio::test]
async fn a_refused_assertion_is_replaced_once() {
    let problem = serde_json::to_string(&crate::problem::Problem::new(
        Code::AssertionRefused,
        "It is from the future.",
        "Set the clock.",
    ))
    .unwrap();
    let refused = answer("401 Unauthorized", "application/problem+json", &problem);
    let list = ok(&json!({ "clusters": [] }));
    let answers = vec![context_answer(), refused, token_answer(), list];
    let server = serve(TLS13, answers).await;
    let key = Arc::new(SigningKey::generate());
    let client = client(vec![server.url.clone()], server.pin, Some(&key));
    client.list_clusters(&ClusterQuery::default()).await.unwrap();
}

#[tokio::test]
async fn the_date_of_an_answer_is_compared_with_its_arrival_time() {
    /// Time for which the server delays the answer, as in a long poll.
    const PARKED: std::time::Duration = std::time::Duration::from_secs(4);
    let mut server = serve_after(TLS13, vec![context_answer()], PARKED).await;
    let client = client(vec![server.url.clone()], server.pin, None);
    client.context().await.unwrap();
    let came = server.requests.recv().await.unwrap().at;
    // The client sets its clock by the answer's `Date`. So its time is now that date plus the time
    // since the answer arrived.
    let error = client.service_now_ms() - 2_014_879_777_000;
    let passed = i64::try_from(came.elapsed().as_millis()).unwrap();
    assert!((0..1_600 + passed).contains(&error), "{error} ms, {passed} ms after it");
}

#[tokio::test]
async fn a_precise_clock_offset_is_kept_until_a_date_contradicts_it() {
    let server = serve(TLS13, vec![context_answer()]).await;
    let client = client(vec![server.url.clone()], server.pin, None);
    client.context().await.unwrap();
    let exact = client.clock_offset_ms() + 700;
    let start = std::time::Instant::now();
    client.note_now_ms(client.service_now_ms() + 700);
    // `note_now_ms` reads the clock a moment after `service_now_ms`, so the stored offset is lower
    // than `exact` by the time in between.
    let passed = i64::try_from(start.elapsed().as_millis()).unwrap();
    let late = exact - client.clock_offset_ms();
    assert!((-1..=passed + 1).contains(&late), "{late} ms in {passed} ms");
}

#[tokio::test]
async fn an_empty_answer_to_a_poll_means_that_nothing_has_changed() {
    use crate::api::PollRequest;
    use crate::digest::Nonce;
    let whole = json!({
        "rev": 7, "now_ms": 1, "state": "open", "epoch": 1, "standing": "reader", "seated": 0,
        "size": 3, "lease_ms": null, "prepare_ms": null, "statements": [], "proposal": null,
        "matrix": [], "releases": [], "document": null, "explain": [],
    });
    let answers = vec![
        context_answer(),
        token_answer(),
        answer("204 No Content", "", ""),
        // A service that doesn't know `Prefer: return=minimal` answers in full.
        ok(&whole),
        answer("404 Not Found", "text/html", ""),
    ];
    let mut server = serve(TLS13, answers).await;
    let key = Arc::new(SigningKey::generate());
    let client = client(vec![server.url.clone()], server.pin, Some(&key));
    let cluster = uuid::Uuid::now_v7();
    let poll = PollRequest { after: Some(7), boot: 1, nonce: Nonce::random(), highest_epoch: 0 };
    assert_eq!(client.poll_for_changes(cluster, &poll).await.unwrap(), None);
    let seen = client.poll_for_changes(cluster, &poll).await.unwrap();
    assert_eq!(seen.map(|answer| answer.rev), Some(7));
    client.poll_for_changes(cluster, &poll).await.unwrap_err();
    let mut heads = Vec::new();
    for _ in 0..3 {
        heads.push(server.requests.recv().await.unwrap().head.to_lowercase());
    }
    assert!(heads[2].contains("prefer: return=minimal"), "{}", heads[2]);
}

#[tokio::test]
async fn answers_outside_the_api_are_errors() {
    let long = format!("{{\"x\":\"{}\"}}", "x".repeat(crate::api::MAX_RESPONSE));
    let answers = vec![
        answer("200 OK", "text/html", "<html>"),
        answer("502 Bad Gateway", "text/html", "<html>"),
        answer("302 Found", "application/json", "{}"),
        answer("200 OK", "application/json", "{}"),
        answer("200 OK", "application/json", &long),
    ];
    let server = serve(TLS13, answers).await;
    let client = client(vec![server.url.clone()], server.pin, None);
    let mut retryable = Vec::new();
    for _ in 0..5 {
        match client.context().await {
            Err(error @ ClientError::Foreign { .. }) => retryable.push(error.is_retryable()),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(retryable, [false, true, false, false, false]);
}

#[tokio::test]
async fn a_client_without_a_key_sends_no_request_that_needs_one() {
    let server = serve(TLS13, vec![]).await;
    let client = client(vec![server.url.clone()], server.pin, None);
    assert!(matches!(
        client.list_clusters(&ClusterQuery::default()).await,
        Err(ClientError::NoKey)
    ));
}

#[tokio::test]
async fn an_endless_lifetime_of_a_token_is_accepted_without_overflow() {
    let list = answer("200 OK", "application/json", r#"{"clusters":[]}"#);
    // The new body is longer, so compute its `content-length` again.
    let endless = endless_token_answer();
    let (_, body) = endless.split_once("\r\n\r\n").unwrap();
    let endless = answer("200 OK", "application/json", body);
    let server = serve(TLS13, vec![context_answer(), endless, list]).await;
    let key = Arc::new(SigningKey::generate());
    let client = client(vec![server.url.clone()], server.pin, Some(&key));
    client.list_clusters(&ClusterQuery::default()).await.unwrap();
}

#[tokio::test]
async fn no_time_in_an_answer_overflows_the_clock_offset() {
    let server = serve(TLS13, vec![context_answer(); 2]).await;
    let client = client(vec![server.url.clone()], server.pin, None);
    for wild in [i64::MIN, i64::MAX, -1] {
        client.note_now_ms(wild);
        let _ = client.service_now_ms();
        std::thread::sleep(std::time::Duration::from_millis(5));
        let _ = client.service_now_ms();
    }
    // After an impossible time in a body, the `Date` of a later answer corrects the clock offset.
    client.note_now_ms(i64::MIN);
    client.context().await.unwrap();
    assert!(client.service_now_ms() > 2_000_000_000_000);
}
