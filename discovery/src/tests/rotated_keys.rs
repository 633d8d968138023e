//! The service's keys change again and again while a cluster forms, and while connections are open.

use std::sync::Arc;

use discovery_types::access::ClientKind;
use discovery_types::admin::{Admin, AdminChain, AdminOperation};
use discovery_types::api::ClusterState;
use discovery_types::client::{ClientError, client_tls_config};
use discovery_types::document::VerifiedDocument;
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::problem::{Code, Problem};
use discovery_types::role::Role;
use discovery_types::statement::StatementChain;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::agent::{TestAgent, form};
use super::support::{TestInstallation, send_with, stored_document, wait_until};
use crate::keydir::KeyDirectory;
use crate::server::{RunningService, ServeArgs, start};

/// Stops the service, makes a new signing key and a new key-encryption key, and removes all earlier
/// signing keys, as after a leak. Starts the service again at its address.
async fn restart_with_new_keys(service: RunningService, args: &ServeArgs) -> RunningService {
    service.stop().await;
    let keys = KeyDirectory::load(&args.keys).unwrap();
    let newest = keys.add_signing_key(&args.keys).unwrap();
    keys.add_kek(&args.keys).unwrap();
    for earlier in keys.signing_keys.current().iter() {
        let name = format!("signing-{}.key", earlier.version);
        fs_err::remove_file(args.keys.join(name)).unwrap();
    }
    let service = start(args.clone()).await.unwrap();
    assert_eq!(service.app().keys.signer().version, newest);
    service
}

/// Repeats a request as an agent does: the service closes connections when it stops.
async fn retried<T>(mut request: impl AsyncFnMut() -> Result<T, ClientError>) -> T {
    loop {
        match request().await {
            Err(error) if error.is_retryable() => {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
            answer => return answer.unwrap(),
        }
    }
}

/// Each of the agents keeps its client, and so an access token that the removed key signed.
#[tokio::test]
async fn a_cluster_forms_while_keys_are_replaced_and_removed_at_each_step() {
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    let hour = std::time::Duration::from_secs(3_600);
    (args.times.lease, args.times.prepare) = (hour, hour);
    // No other test binds this address, so the port stays free while the service is stopped.
    args.listen = vec!["127.0.28.10:0".parse().unwrap()];
    let mut service = start(args.clone()).await.unwrap();
    args.listen = service.addresses.clone();
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    let mut agents: Vec<TestAgent> =
        (1..=3).map(|n| TestAgent::new(&world, &service, &statement, &token, n)).collect();
    for agent in &agents {
        retried(async || agent.redeem().await).await;
        service = restart_with_new_keys(service, &args).await;
    }
    for agent in &mut agents {
        let seen = loop {
            let seen = retried(async || agent.poll(None).await).await;
            if seen.proposal.is_some() {
                break seen;
            }
        };
        service = restart_with_new_keys(service, &args).await;
        retried(async || agent.probe(&seen).await).await;
        service = restart_with_new_keys(service, &args).await;
        retried(async || agent.ack(&seen).await).await;
        service = restart_with_new_keys(service, &args).await;
    }
    let hash = agents[0].document(&retried(async || agents[0].poll(None).await).await).hash();
    for agent in &agents {
        let seen = retried(async || agent.poll(None).await).await;
        assert_eq!(agent.document(&seen).hash(), hash);
    }
    let shown = retried(async || admin.show_cluster(statement.cluster).await).await;
    assert_eq!(shown.summary.state, ClusterState::Committed);

    let stolen = service.app().issue_access_token(world.owner.public(), ClientKind::Admin);
    let ask = async |service: &RunningService| {
        let bearer = format!("Bearer {}", stolen.access_token);
        let headers = [("authorization", bearer.as_str())];
        let key = Some(&*world.owner);
        send_with(&world, service, key, "GET", "/v1/admins", &headers, String::new()).await
    };
    assert_eq!(ask(&service).await.0, 200);
    service = restart_with_new_keys(service, &args).await;
    let (status, body) = ask(&service).await;
    let problem: Problem = serde_json::from_str(&body).unwrap();
    assert_eq!((status, problem.code), (401, Code::TokenInvalid));
    service.stop().await;
}

/// Maximum number of requests on a connection while a test waits.
const MAX_REQUESTS: usize = 3_000;

/// A connection that stays open from one request to the next.
struct OpenConnection(BufReader<TlsStream<TcpStream>>);

impl OpenConnection {
    async fn open(world: &TestInstallation, service: &RunningService, key: &SigningKey) -> Self {
        let config = client_tls_config(&world.context.pins, Some(key));
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let socket = TcpStream::connect(service.addresses[0]).await.unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        OpenConnection(BufReader::new(connector.connect(name, socket).await.unwrap()))
    }

    /// Asks for the list of clusters with an access token. Returns the code of the refusal, or
    /// `None` if the service answered with the list.
    async fn refusal(&mut self, token: &Jws) -> Option<Code> {
        let request = format!(
            "GET /v1/clusters HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\r\n"
        );
        self.0.write_all(request.as_bytes()).await.unwrap();
        let (mut status, mut length) = (0_u16, 0_usize);
        loop {
            let mut line = String::new();
            assert!(self.0.read_line(&mut line).await.unwrap() > 0, "the connection has ended");
            let line = line.trim_end().to_ascii_lowercase();
            if let Some(rest) = line.strip_prefix("http/1.1 ") {
                status = rest[..3].parse().unwrap();
            } else if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.parse().unwrap();
            } else if line.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).await.unwrap();
        let refused = || serde_json::from_slice::<Problem>(&body).unwrap().code;
        (status != 200).then(refused)
    }

    /// Shows the token again and again until `is_done`. The service would close a connection that is
    /// idle for seconds.
    async fn show_until(&mut self, token: &Jws, is_done: impl Fn() -> bool) {
        for _ in 0..MAX_REQUESTS {
            if is_done() {
                return;
            }
            self.refusal(token).await;
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        panic!("it has not happened after {MAX_REQUESTS} requests");
    }
}

/// The connection has shown its token before, so the service has verified the token's signature
/// already.
#[tokio::test]
async fn a_removed_signing_key_ends_its_access_tokens_on_open_connections() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let app = service.app();
    let keys = &app.keys.signing_keys;
    let issue = || app.issue_access_token(world.owner.public(), ClientKind::Admin).access_token;
    let (stolen, first) = (issue(), app.keys.signer());
    let mut open = OpenConnection::open(&world, &service, &world.owner).await;
    for _ in 0..2 {
        assert_eq!(open.refusal(&stolen).await, None);
    }
    let folder = world.args("ledger").keys;
    let newest = KeyDirectory::load(&folder).unwrap().add_signing_key(&folder).unwrap();
    open.show_until(&stolen, || app.keys.signer().version == newest).await;
    assert_eq!(open.refusal(&stolen).await, None, "the directory still has the earlier key");

    fs_err::remove_file(folder.join(format!("signing-{}.key", first.version))).unwrap();
    open.show_until(&stolen, || !keys.contains(&first.key.key_id())).await;
    for _ in 0..2 {
        assert_eq!(open.refusal(&stolen).await, Some(Code::TokenInvalid));
    }
    assert_eq!(open.refusal(&issue()).await, None, "the connection goes on with another token");
    assert_eq!(open.refusal(&stolen).await, Some(Code::TokenInvalid));
    service.stop().await;
}

/// The first member's agent gets the document only after the key that signed it was removed. An
/// agent accepts a document only with a signature of the service's present keys.
#[tokio::test]
async fn a_document_is_signed_again_if_its_key_was_removed() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let mut agents = [1, 2].map(|n| TestAgent::new(&world, &service, &statement, &token, n));
    form(&mut agents).await;
    let stored = stored_document(&world.database, statement.cluster).await.unwrap();
    let keys = &service.app().keys.signing_keys;
    let first = keys.newest();
    let folder = world.args("ledger").keys;
    KeyDirectory::load(&folder).unwrap().add_signing_key(&folder).unwrap();
    fs_err::remove_file(folder.join(format!("signing-{}.key", first.version))).unwrap();
    wait_until("the key is gone", async || !keys.contains(&first.key.key_id())).await;

    let delivered = agents[0].poll(None).await.unwrap().document.unwrap();
    let chain = StatementChain::verify_links(&delivered.statements).unwrap();
    let jwks = agents[0].client.jwks().await.unwrap();
    let present: Vec<_> = jwks.keys.iter().filter_map(|key| key.public_key()).collect();
    let known = VerifiedDocument::verify(&stored, &chain).unwrap();
    let received = VerifiedDocument::verify_received(&delivered.document, &chain, &present);
    assert_eq!(received.unwrap().hash(), known.hash());
    assert_eq!(stored_document(&world.database, statement.cluster).await, Some(stored));
    service.stop().await;
}

#[tokio::test]
async fn a_revoked_admins_access_token_ends_on_an_open_connection() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let owner = world.owner(&service);
    let auditor = SigningKey::generate();
    let name = "audrey".parse().unwrap();
    let named = Admin { key: *auditor.public(), name, roles: vec![Role::Auditor] };
    let mut chain = AdminChain::root(world.owner.public());
    let add = chain.sign_next(&world.owner, AdminOperation::Add(named));
    owner.put_admin(&add).await.unwrap();
    chain.append(&add).unwrap();
    let token = service.app().issue_access_token(auditor.public(), ClientKind::Admin).access_token;
    let mut open = OpenConnection::open(&world, &service, &auditor).await;
    for _ in 0..2 {
        assert_eq!(open.refusal(&token).await, None);
    }
    let revoke = chain.sign_next(&world.owner, AdminOperation::Revoke(*auditor.public()));
    owner.put_admin(&revoke).await.unwrap();
    assert_eq!(open.refusal(&token).await, Some(Code::UnknownKey));
    service.stop().await;
}
