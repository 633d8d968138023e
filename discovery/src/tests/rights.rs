//! Every route with every kind of caller: who may do what, as the running service answers.
//!
//! In the table, `-` means that the caller was refused. `yes` means that no request was refused
//! because of the caller, and that at least one was judged by its content. The test fails if no
//! request of a caller had a body that the service could judge. The column `foreign` is an agent of
//! another cluster. The columns `foreign-admin` and `foreign-owner` are admins whom only another
//! cluster's statement names: an issuer and operator, and an owner. A route whose rights depend on
//! the body shows the most that a caller may do.
//!
//! Some routes are open to every key: `join`, `redeem` and `readmit`, where signatures in the body
//! decide, and `token`, where the key has to be a known one. Where an admin sends a signed message,
//! its signer has to be named by the cluster's statement. So another cluster's admin may deliver an
//! order or a retirement that this cluster's owner has signed.
//!
//! [`super::console`] and [`super::etcd_rights`] have such tables of the other listeners and of
//! etcd's protocols.

use std::sync::Arc;

use discovery_types::access::{Assertion, ClientKind, JWT_BEARER};
use discovery_types::admin::{Admin, AdminChain, AdminOperation};
use discovery_types::api::{AdoptRequest, CommitDocument, EtcdTokenRequest, ReportRequest};
use discovery_types::approval::Approval;
use discovery_types::client::DiscoveryClient;
use discovery_types::digest::{Digest, MemberId, Nonce};
use discovery_types::etcd_token::{EtcdProtocol, EtcdToken};
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::order::{Order, OrderedChange};
use discovery_types::problem::{Code, Problem};
use discovery_types::proposal::{Ack, Release};
use discovery_types::retire::{Retire, Unretire};
use discovery_types::role::Role;
use discovery_types::service::ServiceStatement;
use discovery_types::statement::Statement;
use serde::Serialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::agent::{TestAgent, form};
use super::malformed::requests::RequestMaker;
use super::malformed::{CallerKind, answer_to, connect};
use super::random::Random;
use super::support::TestInstallation;
use crate::server::RunningService;

/// Number of requests with random bodies that fit the schema, for each route and caller. A request
/// whose body is refused tells nothing about rights.
const ATTEMPTS: u64 = 60;

/// Number of requests that have a body made for the route, if the test makes one. A caller sends
/// these requests before those with random bodies.
const MADE_BODIES: u64 = 3;

/// Answer to the question whether a caller may use a route.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Right {
    /// No request reached the check of rights.
    Unknown,
    /// Requests were refused only because of their signed content.
    Judged,
    /// A request was refused because of the caller. Some routes read the signed content before they
    /// check the caller, so this outweighs [`Right::Judged`].
    Refused,
    /// A request passed the check.
    Allowed,
}

/// A line of a table of rights.
pub(super) struct RightsRow {
    pub(super) method: String,
    pub(super) path: String,
    /// Answers to the callers, in the order of the columns.
    pub(super) cells: Vec<&'static str>,
}

/// Formats a table of rights, with a column for each caller.
pub(super) fn format_rights(callers: &[&str], mut rows: Vec<RightsRow>) -> String {
    rows.sort_by(|a, b| (&a.path, &a.cells).cmp(&(&b.path, &b.cells)));
    let mut table = format!("{:62}{}", "", callers.join(" "));
    for RightsRow { method, path, cells } in rows {
        let cells = cells.iter().zip(callers);
        let cells: Vec<_> =
            cells.map(|(cell, name)| format!("{cell:width$}", width = name.len())).collect();
        table.push_str(&format!("\n{method:6} {path:54} {}", cells.join(" ").trim_end()));
    }
    table
}

/// A caller with its TLS key and access token.
struct RightsCaller {
    name: &'static str,
    kind: CallerKind,
}

/// The world of this test: a running cluster, another one, an admin of each role, and admins of the
/// other cluster.
struct RightsWorld {
    world: TestInstallation,
    service: RunningService,
    statement: Statement,
    callers: Vec<RightsCaller>,
    maker: RequestMaker,
    grant: String,
    operation: String,
    process: Uuid,
    /// Agent of the running cluster's founder.
    own: TestAgent,
    /// Commit document of the running cluster.
    document: CommitDocument,
    /// Hash of the running cluster's committed proposal.
    h: Digest,
    /// A host that redeemed a join ticket.
    newcomer: TestAgent,
    /// An element of the admin chain.
    element: Jws,
    etcd_token: EtcdTokenRequest,
}

/// Admins of this test beside the owner. Each has the name of its column.
const ADMINS: [(&str, &[Role]); 5] = [
    ("auditor", &[Role::Auditor]),
    ("issuer", &[Role::Issuer]),
    ("operator", &[Role::Operator]),
    ("foreign-admin", &[Role::Issuer, Role::Operator]),
    ("foreign-owner", &[Role::Owner]),
];

/// Adds [`ADMINS`] to the service. Returns them with their names and keys, and the last element of
/// the admin chain.
async fn add_admins(
    world: &TestInstallation,
    admin: &DiscoveryClient,
) -> (Vec<(&'static str, Admin, Arc<SigningKey>)>, Jws) {
    let mut chain = AdminChain::root(world.owner.public());
    let (mut admins, mut last) = (Vec::new(), None);
    for (name, roles) in ADMINS {
        let key = Arc::new(SigningKey::generate());
        let named =
            Admin { key: *key.public(), name: name.parse().unwrap(), roles: roles.to_vec() };
        let add = chain.sign_next(&world.owner, AdminOperation::Add(named.clone()));
        admin.put_admin(&add).await.unwrap();
        chain.append(&add).unwrap();
        admins.push((name, named, key));
        last = Some(add);
    }
    (admins, last.unwrap())
}

/// Forms a cluster of one host. Returns the host's agent, the commit document, and the hash `h` of
/// the committed proposal.
async fn formed(
    world: &TestInstallation,
    service: &RunningService,
    admin: &DiscoveryClient,
    statement: &Statement,
    number: u16,
) -> (TestAgent, CommitDocument, Digest) {
    let token = world.token(admin, statement).await;
    let mut agents = [TestAgent::new(world, service, statement, &token, number)];
    let seen = form(&mut agents).await;
    let [agent] = agents;
    let h = agent.document(&seen).hash();
    (agent, seen.document.unwrap(), h)
}

/// Makes an etcd token, and returns the request that made it.
async fn etcd_token(admin: &DiscoveryClient) -> EtcdTokenRequest {
    let token = EtcdToken::generate();
    let request = EtcdTokenRequest {
        id: token.id(),
        secret_hash: token.secret_hash(),
        name: "stock".parse().unwrap(),
        protocol: EtcdProtocol::V2,
        size: 3,
        lifetime_seconds: 86_400,
        cidrs: Vec::new(),
    };
    admin.put_etcd_token(&request).await.unwrap();
    request
}

/// Returns an order to remove a member that the cluster doesn't have. `issued_at` is in seconds
/// since 1970.
fn order(world: &TestInstallation, statement: &Statement, issued_at: u64) -> Jws {
    let order = Order {
        version: 1,
        id: Nonce::random(),
        cluster: statement.cluster,
        statement: statement.sign(&world.owner).hash(),
        change: OrderedChange::Remove { member: MemberId::new(7) },
        planned_at: None,
        issued_at,
        expires_at: issued_at + 900,
        reason: String::new(),
    };
    order.sign(&world.owner)
}

/// Makes requests for every operation of the API.
fn request_maker() -> RequestMaker {
    let description: Value = serde_json::from_str(crate::openapi::openapi_text()).unwrap();
    RequestMaker::new(&description, &[])
}

/// Returns a statement that the service is at another address.
fn service_statement(cluster: Uuid) -> ServiceStatement {
    ServiceStatement {
        version: 1,
        cluster,
        sequence: 1,
        urls: vec!["https://new.example:8443".parse().unwrap()],
        pins: vec![Digest::of(b"key")],
        issued_at: 1_700_000_000,
    }
}

/// Returns the body of a request that is one signed message.
fn signed(jws: &Jws) -> String {
    json!({ "jws": jws }).to_string()
}

fn json_of(body: &impl Serialize) -> String {
    serde_json::to_string(body).unwrap()
}

impl RightsWorld {
    async fn new() -> Self {
        let world = TestInstallation::new().await;
        let mut args = world.args("ledger");
        args.times.poll = std::time::Duration::from_millis(5);
        (args.limits.rate, args.limits.burst) = (1_000_000, 1_000_000);
        let service = crate::server::start(args).await.unwrap();
        let admin = world.owner(&service);
        let (admins, element) = add_admins(&world, &admin).await;
        let mut statement = world.draft(&admin, "demo", 1).await;
        let mut other = world.draft(&admin, "other", 1).await;
        for (name, named, _) in &admins {
            let names =
                if name.starts_with("foreign") { &mut other.admins } else { &mut statement.admins };
            names.push(named.clone());
        }
        for statement in [&statement, &other] {
            admin.put_statement(statement.cluster, &statement.sign(&world.owner)).await.unwrap();
        }
        let (own, document, h) = formed(&world, &service, &admin, &statement, 1).await;
        let (foreign, ..) = formed(&world, &service, &admin, &other, 2).await;
        let ticket = world.ticket(&admin, &statement).await;
        let newcomer = TestAgent::new(&world, &service, &statement, &ticket, 3);
        let intent = newcomer.join().await.unwrap().intent.intent;
        let grants = admin.list_grants(None, &Default::default()).await.unwrap().grants;
        let mut maker = request_maker();
        maker.clusters = vec![statement.cluster.to_string()];
        maker.known = grants.iter().map(|view| view.jws.to_string()).collect();
        maker.known.extend([
            statement.sign(&world.owner).to_string(),
            own.envelope().to_string(),
            own.record.csr.to_string(),
            own.record.agent_key.to_string(),
            own.nonce.to_string(),
            intent.operation.to_string(),
            statement.sign(&world.owner).hash().to_string(),
            order(&world, &statement, 1).to_string(),
            Approval { cluster: statement.cluster, agent: own.record.agent_key }
                .sign(&world.owner)
                .to_string(),
            statement.cluster.to_string(),
        ]);
        let caller = |name, key: &Arc<SigningKey>, kind| {
            let token = service.app().issue_access_token(key.public(), kind).access_token;
            let authorization = Some(format!("Bearer {token}"));
            RightsCaller { name, kind: CallerKind { key: Some(key.clone()), authorization } }
        };
        let mut callers = vec![
            RightsCaller { name: "nobody", kind: CallerKind { key: None, authorization: None } },
            caller("foreign", &foreign.key, ClientKind::Agent(other.cluster)),
            caller("agent", &own.key, ClientKind::Agent(statement.cluster)),
        ];
        callers.extend(admins.iter().map(|(name, _, key)| caller(name, key, ClientKind::Admin)));
        callers.push(caller("owner", &world.owner, ClientKind::Admin));
        Self {
            grant: ticket.id().to_string(),
            operation: intent.operation.to_string(),
            process: Uuid::now_v7(),
            etcd_token: etcd_token(&admin).await,
            own,
            document,
            h,
            newcomer,
            element,
            world,
            service,
            statement,
            callers,
            maker,
        }
    }

    /// Makes a body that the service can judge, for a route whose random bodies it would refuse as
    /// unreadable or wrongly signed.
    fn made_body(&self, method: &str, path: &str, caller: &RightsCaller) -> Option<String> {
        let (owner, cluster) = (&self.world.owner, self.statement.cluster);
        let statement = self.statement.sign(owner).hash();
        let (key, h) = (&self.own.key, self.h);
        let epoch = self.own.highest_epoch;
        let now = self.service.app().clock.seconds();
        // Whoever has the token of a host can redeem it with a key of its own.
        let redeem_of = |host: &TestAgent| match &caller.kind.key {
            Some(key) => host.copy_with_key(&self.world, &self.service, key.clone()).envelope(),
            None => host.envelope(),
        };
        let reason = String::new();
        let body = match (method, path.trim_start_matches("/v1/clusters/{id}")) {
            ("PUT", "/v1/admins") => signed(&self.element),
            ("PUT", "/v1/etcd-tokens") => json_of(&self.etcd_token),
            ("PUT", "/v1/orders") => signed(&order(&self.world, &self.statement, now)),
            ("POST", "/v1/join") => signed(&redeem_of(&self.newcomer)),
            ("POST", "/v1/redeem") => signed(&redeem_of(&self.own)),
            ("POST", "/v1/token") => {
                let key = caller.kind.key.as_ref().unwrap_or(owner);
                let assertion = Assertion::sign(key, &self.service.app().issuer, now);
                format!("grant_type={}&assertion={assertion}", JWT_BEARER.replace(':', "%3A"))
            }
            ("POST", "/ack") => signed(&Ack { cluster, epoch, h }.sign(key)),
            ("POST", "/adopt") => json_of(&AdoptRequest {
                cluster,
                document: self.document.document.clone(),
                statements: self.document.statements.clone(),
            }),
            ("POST", "/release") => signed(&Release { cluster, epoch }.sign(key)),
            ("POST", "/report") => json_of(&ReportRequest {
                session: self.own.session(),
                h,
                raft_cluster_id: "0000000000000001".into(),
                member_id: "0000000000000001".into(),
                leader_id: None,
                raft_term: 1,
                raft_index: 1,
                membership: None,
                cas: None,
            }),
            ("PUT", "/service") => signed(&service_statement(cluster).sign(owner)),
            ("POST", "/retire") => {
                signed(&Retire { cluster, statement, reason, force: true }.sign(owner))
            }
            ("POST", "/unretire") => {
                signed(&Unretire { cluster, statement, retired_at_ms: 0 }.sign(owner))
            }
            _ => return None,
        };
        Some(body)
    }

    /// Sends requests of one caller to one route, and returns whether the caller may use the route.
    async fn right(&self, number: usize, caller: &RightsCaller, random: &mut Random) -> Right {
        let (method, pattern) = &self.maker.operations()[number];
        let id = match pattern.split('/').nth(2) {
            Some("grants") => self.grant.clone(),
            Some("etcd-tokens") => self.etcd_token.id.to_string(),
            Some("processes") => self.process.to_string(),
            _ => self.statement.cluster.to_string(),
        };
        let mut path = pattern.replace("{id}", &id).replace("{operation}", &self.operation);
        if path == "/v1/events" {
            path.push_str(&format!("?stream={id}"));
        }
        let mut connection = connect(&self.world, &self.service, &caller.kind).await;
        let mut right = Right::Unknown;
        for attempt in 0..ATTEMPTS {
            let (media_type, mut body) = self.maker.fitting_body(number, random);
            if attempt < MADE_BODIES
                && let Some(made) = self.made_body(method, pattern, caller)
            {
                body = made;
            }
            let mut head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\n");
            let named =
                [("authorization", &caller.kind.authorization), ("content-type", &media_type)];
            for (name, value) in named {
                if let Some(value) = value {
                    head.push_str(&format!("{name}: {value}\r\n"));
                }
            }
            let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
            let parties = (&self.world, &self.service, &caller.kind);
            let answer = answer_to(parties, &mut connection, request.as_bytes()).await;
            let code =
                serde_json::from_str::<Problem>(&answer.body).ok().map(|problem| problem.code);
            match (answer.status, code) {
                (401, _) | (_, Some(Code::Forbidden | Code::UnknownKey | Code::NotInStatement)) => {
                    right = right.max(Right::Refused);
                }
                (400 | 413 | 415 | 422, _) => {}
                (403, _) if media_type.is_some() => right = right.max(Right::Judged),
                (status, _) => {
                    assert!(status < 500, "{method} {path}: {status} {}", answer.body);
                    return Right::Allowed;
                }
            }
            if media_type.is_none() {
                break;
            }
        }
        right
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_route_serves_the_callers_that_it_is_for() {
    let rights = RightsWorld::new().await;
    let mut random = Random(1);
    let names: Vec<&str> = rights.callers.iter().map(|caller| caller.name).collect();
    let mut operations: Vec<(usize, (String, String))> =
        rights.maker.operations().into_iter().enumerate().collect();
    // These routes come last: accepting the database ends clusters, and retiring ends this cluster.
    let is_last = |path: &str| path.ends_with("/accept") || path.contains("retire");
    operations.sort_by_key(|(_, (_, path))| is_last(path));
    let mut rows = Vec::new();
    for (number, (method, path)) in operations {
        let mut cells = Vec::new();
        for caller in &rights.callers {
            cells.push(match rights.right(number, caller, &mut random).await {
                Right::Allowed | Right::Judged => "yes",
                Right::Refused => "-",
                Right::Unknown => {
                    let name = caller.name;
                    panic!("{method} {path}: no request of {name} could be judged: make a body")
                }
            });
        }
        rows.push(RightsRow { method, path, cells });
    }
    rights.service.stop().await;
    insta::assert_snapshot!(format_rights(&names, rows));
}
