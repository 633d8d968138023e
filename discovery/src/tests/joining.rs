//! Changes of a cluster that runs: tickets, orders, and what agents say became of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use discovery_types::admin::Admin;
use discovery_types::api::{
    ClusterState, GrantState, InitialMember, IntentState, IntentView, ListedMember, Membership,
    Outcome, OutcomeRequest, ReportRequest,
};
use discovery_types::client::{Client, ClientError};
use discovery_types::csr::NodeKey;
use discovery_types::digest::{Digest, MemberId, Nonce};
use discovery_types::document::VerifiedDocument;
use discovery_types::grant::{Grant, ISSUER_SKEW_SECONDS};
use discovery_types::intent::{Errand, Verb, VerifiedIntent};
use discovery_types::key::SigningKey;
use discovery_types::order::{Change, Order};
use discovery_types::problem::Code;
use discovery_types::raft_id;
use discovery_types::role::Role;
use discovery_types::statement::{Statement, StatementChain};
use futures_util::future::join_all;
use x509_parser::prelude::*;

use super::agent::{Agent, form};
use super::support::{World, send};
use crate::server::Running;

/// A cluster that runs.
pub(super) struct Formed {
    pub(super) world: World,
    pub(super) service: Running,
    pub(super) admin: Client,
    pub(super) statement: Statement,
    pub(super) agents: Vec<Agent>,
    pub(super) h: Digest,
}

impl Formed {
    pub(super) async fn of(size: u8) -> Self {
        let world = World::new().await;
        let service = world.serve().await;
        let admin = world.owner(&service);
        let statement = world.cluster(&admin, "demo", size).await;
        let token = world.token(&admin, &statement).await;
        let numbers = 1..=u16::from(size);
        let mut agents: Vec<Agent> =
            numbers.map(|i| Agent::new(&world, &service, &statement, &token, i)).collect();
        let seen = form(&mut agents).await;
        let h = agents[usize::from(size) - 1].document(&seen).hash();
        Formed { world, service, admin, statement, agents, h }
    }

    fn chain(&self) -> StatementChain {
        StatementChain::verify_links(&[self.statement.sign(&self.world.owner)]).unwrap()
    }

    async fn newcomer(&self, number: u16) -> Agent {
        let ticket = self.world.ticket(&self.admin, &self.statement).await;
        Agent::new(&self.world, &self.service, &self.statement, &ticket, number)
    }

    fn id(&self, agent: &Agent) -> MemberId {
        raft_id::of_founder(&self.h, &agent.record.peer_urls)
    }

    fn order(&self, change: Change) -> Order {
        let now = self.admin.service_now_ms().unsigned_abs() / 1_000;
        Order {
            version: 1,
            id: Nonce::random(),
            cluster: self.statement.cluster,
            statement: self.statement.sign(&self.world.owner).hash(),
            change,
            planned_at: None,
            issued_at: now,
            expires_at: now + 900,
            reason: "its disk is gone".into(),
        }
    }

    async fn put(&self, order: &Order) -> Result<IntentView, ClientError> {
        self.admin.put_order(&order.sign(&self.world.owner)).await
    }

    /// One agent's word about an intent.
    async fn say(
        &self,
        agent: &Agent,
        intent: &IntentView,
        outcome: Outcome,
        raft_index: u64,
    ) -> Result<IntentView, ClientError> {
        let request = OutcomeRequest { outcome, raft_term: 2, raft_index };
        let operation = intent.intent.operation;
        agent.client.report_outcome(self.statement.cluster, operation, &request).await
    }

    /// One agent's word about its cluster.
    async fn report(
        &self,
        agent: &Agent,
        configuration: Option<u64>,
        raft_index: u64,
        members: &[(MemberId, bool)],
    ) -> Result<ClusterState, ClientError> {
        let listed = |(id, is_learner): &(MemberId, bool)| ListedMember {
            id: *id,
            name: format!("node-{id}"),
            peer_urls: vec![format!("https://127.0.0.9:{}", id.get() % 50_000 + 2_000)],
            client_urls: Vec::new(),
            is_learner: *is_learner,
        };
        let members = members.iter().map(listed).collect();
        let report = ReportRequest {
            session: agent.session(),
            h: self.h,
            raft_cluster_id: "00000000deadbeef".into(),
            member_id: "0000000000000001".into(),
            leader_id: Some("0000000000000001".into()),
            raft_term: 2,
            raft_index,
            membership: Some(Membership { configuration, members }),
        };
        agent.client.report(self.statement.cluster, &report).await.map(|answer| answer.state)
    }

    /// Ids of the confirmed list; none where nothing is confirmed.
    async fn confirmed(&self) -> Option<Vec<MemberId>> {
        let directory = self.admin.directory(self.statement.cluster).await.unwrap();
        let view = directory.view.filter(|view| view.confirmed)?;
        Some(view.membership.members.iter().map(|member| member.id).collect())
    }
}

fn added(id: u64) -> Outcome {
    let peer_url = "https://127.0.0.1:2001".parse().unwrap();
    let initial_cluster = vec![InitialMember { name: "node-1".into(), peer_url }];
    Outcome::Added { member: MemberId::new(id), initial_cluster }
}

fn remove(member: MemberId) -> Change {
    Change::Remove { member }
}

fn code<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> Code {
    let error = answer.expect_err("it was not refused");
    error.code().unwrap_or_else(|| panic!("{error}"))
}

/// The names in a certificate.
fn names(pem: &str) -> Vec<String> {
    let (_, pem) = parse_x509_pem(pem.as_bytes()).unwrap();
    let certificate = pem.parse_x509().unwrap();
    let names = certificate.subject_alternative_name().unwrap().unwrap();
    names.value.general_names.iter().map(|name| name.to_string()).collect()
}

#[tokio::test]
async fn a_ticket_is_carried_to_the_clusters_agents_and_its_holder_becomes_a_member() {
    let cluster = Formed::of(1).await;
    let id = cluster.statement.cluster;
    let newcomer = cluster.newcomer(9).await;
    let joined = newcomer.join().await.unwrap();
    assert_eq!(joined.intent.state, IntentState::Open);
    let chain = StatementChain::verify_from_pin(&joined.statements, &newcomer.statement).unwrap();
    assert_eq!(VerifiedDocument::verify(&joined.document, &chain).unwrap().hash(), cluster.h);
    assert_eq!(code(newcomer.client.leaves(id, &newcomer.record.csr).await), Code::Forbidden);

    // The founder's agent finds it, and believes what is signed in it.
    let founder = &cluster.agents[0];
    let list = founder.client.intents(id, None, false).await.unwrap();
    let [view] = &list.intents[..] else { panic!("{list:?}") };
    let intent = VerifiedIntent::verify(&view.intent, &cluster.chain()).unwrap();
    let Errand::Add { record, .. } = intent.errand() else { panic!("{intent:?}") };
    assert_eq!(record.agent_key, newcomer.record.agent_key);
    let now = list.now_ms.unsigned_abs() / 1_000;
    assert_eq!(intent.untimely(now, now), None);
    assert_eq!((view.by.as_str(), view.subject.as_str()), ("owner", "node-9"));

    // The newcomer waits, and hears of it at once.
    let operation = view.intent.operation;
    let waiting = newcomer.client.intent(id, operation, Some(joined.intent.rev));
    let (heard, said) = tokio::join!(waiting, async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        cluster.say(founder, view, added(77), 20).await
    });
    let heard = heard.unwrap();
    assert_eq!(heard, said.unwrap());
    assert_eq!(heard.outcome, Some(added(77)));
    assert_eq!(heard.reported_by.as_deref(), Some("node-1"));

    let leaves = newcomer.client.leaves(id, &newcomer.record.csr).await.unwrap();
    let node_key = newcomer.record.csr.verify().unwrap().node_key;
    leaves.verify(&node_key, &cluster.statement).unwrap();
    let name = format!("URI(spiffe://muster/cluster/{id}/member/000000000000004d)");
    assert!(names(&leaves.peer).contains(&name), "{:?}", names(&leaves.peer));

    let member = MemberId::new(77);
    let done = cluster.say(founder, view, Outcome::Promoted { member }, 30).await.unwrap();
    assert_eq!((done.state, done.explain), (IntentState::Promoted, Vec::new()));
    assert!(founder.client.intents(id, None, false).await.unwrap().intents.is_empty());
    assert_eq!(founder.client.intents(id, None, true).await.unwrap().intents.len(), 1);
    // It is a member now, and sees what members see.
    assert!(newcomer.client.intents(id, None, false).await.is_ok());
    cluster.service.stop().await;
}

/// The answer is lost, service and Postgres' connections end, after each step; whoever asks again
/// hears the same.
#[tokio::test]
async fn every_step_may_be_asked_twice_and_survives_the_service() {
    let mut cluster = Formed::of(1).await;
    let id = cluster.statement.cluster;
    let mut newcomer = cluster.newcomer(9).await;
    let first = newcomer.join().await.unwrap().intent;
    let member = MemberId::new(77);
    for step in [None, Some(added(77)), Some(Outcome::Promoted { member })] {
        let founder = &cluster.agents[0];
        let said = match &step {
            Some(outcome) => cluster.say(founder, &first, outcome.clone(), 20).await.unwrap(),
            None => first.clone(),
        };
        cluster.service.stop().await;
        cluster.service = cluster.world.serve().await;
        cluster.admin = cluster.world.owner(&cluster.service);
        cluster.agents[0].turn_to(&cluster.world, &cluster.service);
        newcomer.turn_to(&cluster.world, &cluster.service);
        newcomer.boot += 1;
        assert_eq!(newcomer.join().await.unwrap().intent, said, "the same key, the same answer");
        if let Some(outcome) = step {
            let again = cluster.say(&cluster.agents[0], &first, outcome, 20).await.unwrap();
            assert_eq!(again, said);
        }
        let all = cluster.admin.intents(id, None, true).await.unwrap().intents;
        assert_eq!(all, [said]);
    }
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_ticket_belongs_to_its_first_key() {
    let cluster = Formed::of(1).await;
    let ticket = cluster.world.ticket(&cluster.admin, &cluster.statement).await;
    let agent =
        |number| Agent::new(&cluster.world, &cluster.service, &cluster.statement, &ticket, number);
    let (first, thief) = (agent(8), agent(9));
    let joined = first.join().await.unwrap();
    for _ in 0..3 {
        assert_eq!(code(thief.join().await), Code::TicketTaken);
    }
    let known =
        cluster.admin.intent(cluster.statement.cluster, joined.intent.intent.operation, None);
    let known = known.await.unwrap();
    let codes: Vec<&str> = known.explain.iter().map(|line| line.code.as_str()).collect();
    assert_eq!(codes, ["waits_for_an_agent", "ticket_contested"]);
    assert_eq!(known.rev, joined.intent.rev, "what was noted is no step of it");
    let events: i64 =
        sqlx::query_scalar("SELECT count(*) FROM events WHERE kind = 'ticket_contested'")
            .fetch_one(&mut cluster.world.database.connect().await)
            .await
            .unwrap();
    assert_eq!(events, 1, "however often somebody tries");
    let grant = cluster.admin.show_grant(ticket.id()).await.unwrap();
    assert_eq!((grant.state, grant.keys), (GrantState::Closed, 1));
    // The same host with other addresses is not what was endorsed first.
    let mut moved = first;
    moved.record.peer_urls = vec!["https://127.0.0.1:2999".parse().unwrap()];
    assert_eq!(code(moved.join().await), Code::Conflict);
    cluster.service.stop().await;
}

/// Straight at the service's heart: a thousand TLS handshakes would be what is measured.
#[tokio::test]
async fn of_a_thousand_keys_that_redeem_one_ticket_at_once_one_wins() {
    let cluster = Formed::of(1).await;
    let ticket = cluster.world.ticket(&cluster.admin, &cluster.statement).await;
    let agents: Vec<Agent> = (0..1_000)
        .map(|_| Agent::new(&cluster.world, &cluster.service, &cluster.statement, &ticket, 9))
        .collect();
    let app = cluster.service.app();
    let redeem = async |agent: &Agent| {
        let envelope = agent.envelope();
        let redeem = envelope.claims_unverified(discovery_types::jws::Typ::Redeem).unwrap();
        let claimed = agent.record.clone();
        let address = "127.0.0.1".parse().unwrap();
        let joining = crate::intents::Joining { envelope, redeem, claimed, address };
        loop {
            match app.join(&joining).await {
                Ok(_) => return true,
                Err(error) if error.problem().retryable => {}
                Err(error) => {
                    assert_eq!(error.problem().code, Code::TicketTaken, "{error}");
                    return false;
                }
            }
        }
    };
    let begun = Instant::now();
    let won = join_all(agents.iter().map(redeem)).await;
    println!("a thousand redeems of one ticket: {:?}", begun.elapsed());
    assert_eq!(won.iter().filter(|won| **won).count(), 1);
    let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM intents")
        .fetch_one(&mut cluster.world.database.connect().await)
        .await
        .unwrap();
    assert_eq!(rows, 1);
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_ticket_admits_nobody_it_is_not_for() {
    let cluster = Formed::of(1).await;
    let (world, admin) = (&cluster.world, &cluster.admin);
    let statement = &cluster.statement;
    let refused = async |change: &dyn Fn(&mut Grant)| {
        let (token, mut grant) = world.join_grant(admin, statement);
        change(&mut grant);
        admin.put_grant(&grant.sign(&world.owner)).await.unwrap();
        let agent = Agent::new(world, &cluster.service, statement, &token, 9);
        code(agent.join().await)
    };
    let elsewhere = |grant: &mut Grant| grant.cidrs = vec!["10.0.0.0/8".parse().unwrap()];
    assert_eq!(refused(&elsewhere).await, Code::GrantBinding);
    assert_eq!(
        refused(&|grant| grant.name = Some("db".parse().unwrap())).await,
        Code::GrantBinding
    );
    assert_eq!(refused(&|grant| grant.zone = Some("z".parse().unwrap())).await, Code::GrantBinding);
    let ending = |grant: &mut Grant| {
        grant.issued_at -= 898;
        grant.expires_at -= 898;
    };
    let (token, mut grant) = world.join_grant(admin, statement);
    ending(&mut grant);
    admin.put_grant(&grant.sign(&world.owner)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    let late = Agent::new(world, &cluster.service, statement, &token, 9);
    assert_eq!(code(late.join().await), Code::GrantExpired);

    let revoked = cluster.newcomer(9).await;
    admin.revoke_grant(revoked.record.grant).await.unwrap();
    assert_eq!(code(revoked.join().await), Code::GrantRevoked);
    // A boot token is none, and a ticket gives no seat.
    let (token, grant) = world.grant(admin, statement);
    assert_eq!(code(admin.put_grant(&grant.sign(&world.owner)).await), Code::BootClosed);
    let stranger = Agent::new(world, &cluster.service, statement, &token, 9);
    assert_eq!(code(stranger.join().await), Code::GrantUnknown);
    let ticket = cluster.newcomer(9).await;
    assert_eq!(code(ticket.redeem().await), Code::GrantUnknown);
    // Of another cluster, or by a founder of this one.
    let other = world.cluster(admin, "other", 1).await;
    let (_, grant) = world.join_grant(admin, &other);
    assert_eq!(code(admin.put_grant(&grant.sign(&world.owner)).await), Code::WrongState);
    let mut foreign = cluster.newcomer(9).await;
    foreign.record.cluster = other.cluster;
    assert!(matches!(code(foreign.join().await), Code::GrantUnknown | Code::WrongState));
    let mut again = cluster.newcomer(9).await;
    again.record.csr = cluster.agents[0].record.csr.clone();
    assert_eq!(code(again.join().await), Code::Conflict);
    let mut again = cluster.newcomer(9).await;
    again.record.incarnation = cluster.agents[0].record.incarnation;
    assert_eq!(code(again.join().await), Code::Conflict);
    // An envelope with another signer than the connection's.
    let honest = cluster.newcomer(9).await;
    let thief = world.client(&cluster.service, Some(&Arc::new(SigningKey::generate())));
    assert_eq!(code(thief.join(&honest.envelope()).await), Code::RecordRefused);
    assert!(honest.join().await.is_ok());
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_ticket_of_before_a_restore_is_void() {
    let mut cluster = Formed::of(1).await;
    let used = cluster.newcomer(8).await;
    // Made on a machine whose clock is ahead.
    let (ticket, grant) = cluster.world.join_grant(&cluster.admin, &cluster.statement);
    let grant = Grant { issued_at: grant.issued_at + ISSUER_SKEW_SECONDS / 2, ..grant };
    cluster.admin.put_grant(&grant.sign(&cluster.world.owner)).await.unwrap();
    let unused = Agent::new(&cluster.world, &cluster.service, &cluster.statement, &ticket, 9);
    let dump = cluster.world.database.dump();
    used.join().await.unwrap();
    cluster.service.stop().await;
    cluster.world.database.load(&dump).await;
    cluster.service = cluster.world.serve().await;
    for mut agent in [used, unused] {
        agent.turn_to(&cluster.world, &cluster.service);
        let refused = loop {
            match code(agent.join().await) {
                // Until the service has looked at it.
                Code::DatabaseChanged => tokio::time::sleep(Duration::from_millis(50)).await,
                code => break code,
            }
        };
        assert_eq!(refused, Code::GrantRevoked, "its use was forgotten");
    }
    cluster.service.stop().await;
}

#[tokio::test]
async fn operators_order_and_nobody_else() {
    let world = World::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let keys: Vec<Arc<SigningKey>> = (0..3).map(|_| Arc::new(SigningKey::generate())).collect();
    let roles = [Role::Issuer, Role::Operator, Role::Auditor];
    let mut statement = world.draft(&admin, "demo", 1).await;
    for (key, role) in keys.iter().zip(roles) {
        let name = role.as_str().parse().unwrap();
        statement.admins.push(Admin { key: *key.public(), name, roles: vec![role] });
    }
    admin.put_statement(statement.cluster, &statement.sign(&world.owner)).await.unwrap();
    let token = world.token(&admin, &statement).await;
    let mut agents = vec![Agent::new(&world, &service, &statement, &token, 1)];
    let seen = form(&mut agents).await;
    let h = agents[0].document(&seen).hash();
    let cluster = Formed { world, service, admin, statement, agents, h };
    let order = cluster.order(remove(MemberId::new(7)));
    // What an owner puts must be signed by who may, and an agent puts nothing.
    for (key, role) in keys.iter().zip(roles) {
        let answer = cluster.admin.put_order(&order.sign(key)).await;
        match role {
            Role::Operator => assert_eq!(answer.unwrap().by, "operator"),
            _ => assert_eq!(code(answer), Code::NotInStatement, "{role}"),
        }
    }
    let own = order.sign(&cluster.agents[0].key);
    assert_eq!(code(cluster.agents[0].client.put_order(&own).await), Code::Forbidden);
    let forged = order.sign(&SigningKey::generate());
    assert_eq!(code(cluster.admin.put_order(&forged).await), Code::OrderRefused);
    cluster.service.stop().await;
}

#[tokio::test]
async fn an_order_is_taken_once_in_its_time_and_may_be_taken_back() {
    let cluster = Formed::of(1).await;
    let id = cluster.statement.cluster;
    let order = cluster.order(remove(MemberId::new(7)));
    let intent = cluster.put(&order).await.unwrap();
    assert_eq!((intent.intent.verb, intent.subject.as_str()), (Verb::Remove, "0000000000000007"));
    assert_eq!(cluster.put(&order).await.unwrap(), intent, "the same order again");
    let verified = VerifiedIntent::verify(&intent.intent, &cluster.chain()).unwrap();
    assert!(matches!(verified.errand(), Errand::Remove { .. }));

    let withdrawn = cluster.admin.withdraw_intent(id, intent.intent.operation).await.unwrap();
    assert_eq!(withdrawn.state, IntentState::Withdrawn);
    assert_eq!(cluster.put(&order).await.unwrap().state, IntentState::Withdrawn, "and stays so");
    // What an agent did a moment before counts for more.
    let member = MemberId::new(7);
    let agent = &cluster.agents[0];
    let done = cluster.say(agent, &intent, Outcome::Removed { member }, 9).await.unwrap();
    assert_eq!(done.state, IntentState::Removed);
    let late = cluster.admin.withdraw_intent(id, intent.intent.operation).await;
    assert_eq!(code(late), Code::WrongState);

    let old = Order {
        issued_at: order.issued_at - 950,
        expires_at: order.issued_at - 50,
        ..order.clone()
    };
    assert_eq!(code(cluster.put(&old).await), Code::OrderRefused);
    let future = Order {
        issued_at: order.issued_at + 500,
        expires_at: order.issued_at + 900,
        ..order.clone()
    };
    assert_eq!(code(cluster.put(&future).await), Code::OrderRefused);
    let ending = Order {
        id: Nonce::random(),
        issued_at: order.issued_at - 10,
        expires_at: cluster.admin.service_now_ms().unsigned_abs() / 1_000 + 2,
        ..order
    };
    let ending = cluster.put(&ending).await.unwrap();
    // Whoever waits hears of the end, though nobody changes anything.
    let waited = agent.client.intent(id, ending.intent.operation, Some(ending.rev)).await.unwrap();
    assert_eq!(waited.state, IntentState::Expired);
    assert_eq!(waited.explain[0].code, "expired");
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_cluster_has_so_many_changes_under_way_and_no_more() {
    let cluster = Formed::of(1).await;
    for member in 0..16 {
        cluster.put(&cluster.order(remove(MemberId::new(member)))).await.unwrap();
    }
    let more = cluster.put(&cluster.order(remove(MemberId::new(16)))).await;
    assert_eq!(code(more), Code::Conflict);
    assert_eq!(code(cluster.newcomer(9).await.join().await), Code::Conflict);
    cluster.service.stop().await;
}

/// An operator may order and withdraw without end.
#[tokio::test]
async fn many_later_changes_make_nobody_forget_who_came_by_ticket() {
    let cluster = Formed::of(1).await;
    let id = cluster.statement.cluster;
    let newcomer = cluster.newcomer(9).await;
    let intent = newcomer.join().await.unwrap().intent;
    cluster.say(&cluster.agents[0], &intent, added(77), 20).await.unwrap();
    sqlx::query(
        "INSERT INTO intents (cluster_id, operation, verb, authority, subject, made_us, made_by,
             expires_us, state, rev)
         SELECT cluster_id, decode(lpad(to_hex(n), 32, '0'), 'hex'), 'remove', authority, 'x',
             made_us + n, 'owner', expires_us, 'withdrawn', rev
         FROM intents, generate_series(1, 1001) n",
    )
    .execute(&mut cluster.world.database.connect().await)
    .await
    .unwrap();
    assert!(newcomer.client.intents(id, None, false).await.is_ok());
    assert!(newcomer.client.leaves(id, &newcomer.record.csr).await.is_ok());
    let member = MemberId::new(77);
    let promoted = cluster.say(&cluster.agents[0], &intent, Outcome::Promoted { member }, 30).await;
    assert_eq!(promoted.unwrap().state, IntentState::Promoted);
    cluster.service.stop().await;
}

#[tokio::test]
async fn only_members_agents_read_and_report_and_none_of_itself() {
    let cluster = Formed::of(1).await;
    let id = cluster.statement.cluster;
    let founder = &cluster.agents[0];
    let newcomer = cluster.newcomer(9).await;
    let intent = newcomer.join().await.unwrap().intent;
    let operation = intent.intent.operation;
    // The newcomer holds no right over the cluster, and doesn't say that it was added.
    assert_eq!(code(newcomer.client.intents(id, None, false).await), Code::Forbidden);
    assert_eq!(code(cluster.say(&newcomer, &intent, added(77), 20).await), Code::Forbidden);
    let other = cluster.newcomer(8).await;
    let others = other.join().await.unwrap().intent;
    assert_eq!(code(cluster.say(&newcomer, &others, added(78), 20).await), Code::Forbidden);
    assert_eq!(
        code(newcomer.client.intent(id, others.intent.operation, None).await),
        Code::Forbidden
    );
    assert_eq!(
        code(cluster.report(&newcomer, None, 20, &[(MemberId::new(1), false)]).await),
        Code::UnknownKey
    );

    // A member of another cluster.
    let stranger = world_of_another(&cluster).await;
    assert_eq!(code(stranger.client.intents(id, None, false).await), Code::Forbidden);
    assert_eq!(code(stranger.client.intent(id, operation, None).await), Code::Forbidden);
    assert_eq!(code(cluster.say(&stranger, &intent, added(77), 20).await), Code::Forbidden);
    assert_eq!(code(stranger.client.leaves(id, &stranger.record.csr).await), Code::Forbidden);
    assert_eq!(code(stranger.client.directory(id).await), Code::Forbidden);
    assert_eq!(code(stranger.client.export_cluster(id).await), Code::Forbidden);

    // Words that don't fit, or come too late.
    let founders_own = Outcome::Added { member: cluster.id(founder), initial_cluster: initial() };
    assert_eq!(code(cluster.say(founder, &intent, founders_own, 20).await), Code::Conflict);
    let member = MemberId::new(77);
    let wrong = cluster.say(founder, &intent, Outcome::Removed { member }, 20).await;
    assert_eq!(code(wrong), Code::InvalidRequest);
    cluster.say(founder, &intent, added(77), 20).await.unwrap();
    assert_eq!(code(cluster.say(founder, &intent, added(78), 21).await), Code::Conflict);
    let late = cluster.admin.withdraw_intent(id, operation).await;
    assert_eq!(code(late), Code::WrongState, "it is a member by now");
    let promoted = Outcome::Promoted { member };
    assert_eq!(code(cluster.say(founder, &intent, promoted.clone(), 19).await), Code::Conflict);
    let refused = Outcome::Refused { reason: "no".into() };
    assert_eq!(code(cluster.say(founder, &intent, refused, 21).await), Code::Conflict);
    assert_eq!(code(cluster.say(&newcomer, &intent, promoted.clone(), 21).await), Code::Forbidden);
    assert_eq!(
        cluster.say(founder, &intent, promoted, 21).await.unwrap().state,
        IntentState::Promoted
    );
    cluster.service.stop().await;
}

#[tokio::test]
async fn the_directory_believes_a_quorum_of_who_had_a_vote_and_goes_forward_only() {
    let cluster = Formed::of(3).await;
    let [a, b, c] = [0, 1, 2].map(|i| cluster.id(&cluster.agents[i]));
    let all = [(a, false), (b, false), (c, false)];
    let say = async |who: usize, configuration, members: &[(MemberId, bool)]| {
        let index = configuration + 10;
        cluster.report(&cluster.agents[who], Some(configuration), index, members).await.unwrap();
    };
    say(0, 3, &all).await;
    assert_eq!(cluster.confirmed().await, None);
    say(1, 3, &all).await;
    assert_eq!(cluster.confirmed().await, Some(vec![a, b, c]));
    // One liar, however often.
    for configuration in 50..60 {
        say(2, configuration, &[(c, false)]).await;
    }
    assert_eq!(cluster.confirmed().await, Some(vec![a, b, c]));
    let d = MemberId::new(77);
    say(0, 7, &[(a, false), (b, false), (d, true)]).await;
    say(1, 7, &[(a, false), (b, false), (d, true)]).await;
    assert_eq!(cluster.confirmed().await, Some(vec![a, b, d]));
    // Back to what was, by who was late.
    say(0, 3, &all).await;
    say(1, 3, &all).await;
    assert_eq!(cluster.confirmed().await, Some(vec![a, b, d]));
    // What was planned on the list before is stale, and who is gone can't go again.
    let stale = Order { planned_at: Some(3), ..cluster.order(remove(b)) };
    assert_eq!(code(cluster.put(&stale).await), Code::StalePlan);
    let planned = Order { planned_at: Some(7), ..cluster.order(remove(b)) };
    assert!(cluster.put(&planned).await.is_ok());
    for gone in [c, MemberId::new(99)] {
        assert_eq!(code(cluster.put(&cluster.order(remove(gone))).await), Code::OrderRefused);
    }
    // A ticket is planned on the newest list.
    let intent = cluster.newcomer(9).await.join().await.unwrap().intent;
    assert_eq!(intent.intent.planned_at, Some(7));
    cluster.service.stop().await;
}

#[tokio::test]
async fn what_is_believed_may_make_a_quorum_for_what_was_said_before() {
    let cluster = Formed::of(3).await;
    let [a, b] = [0, 1].map(|i| cluster.id(&cluster.agents[i]));
    let newcomer = cluster.newcomer(9).await;
    let intent = newcomer.join().await.unwrap().intent;
    cluster.say(&cluster.agents[0], &intent, added(77), 12).await.unwrap();
    let d = MemberId::new(77);
    let (first, later) = ([(a, false), (b, false), (d, false)], [(a, false), (d, false)]);
    cluster.report(&cluster.agents[0], None, 20, &later).await.unwrap();
    cluster.report(&newcomer, None, 21, &later).await.unwrap();
    assert_eq!(cluster.confirmed().await, None, "of the founders only one says so");
    for who in [1, 2] {
        cluster.report(&cluster.agents[who], None, 14, &first).await.unwrap();
    }
    assert_eq!(cluster.confirmed().await, Some(vec![a, d]), "two of three, by then");
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_removed_members_agent_hears_that_from_every_call() {
    let cluster = Formed::of(3).await;
    let id = cluster.statement.cluster;
    let [a, b, c] = [0, 1, 2].map(|i| cluster.id(&cluster.agents[i]));
    let intent = cluster.put(&cluster.order(remove(c))).await.unwrap();
    let removed = Outcome::Removed { member: c };
    cluster.say(&cluster.agents[0], &intent, removed, 12).await.unwrap();
    let gone = &cluster.agents[2];
    // One member's word removes nobody here.
    assert!(gone.poll(None).await.is_ok());
    assert!(gone.client.leaves(id, &gone.record.csr).await.is_ok());
    for who in [0, 1] {
        let left = [(a, false), (b, false)];
        cluster.report(&cluster.agents[who], None, 12, &left).await.unwrap();
    }
    let client = &gone.client;
    assert_eq!(code(gone.poll(None).await), Code::Removed);
    assert_eq!(code(gone.redeem().await), Code::Removed);
    assert_eq!(code(cluster.report(gone, None, 99, &[(c, false)]).await), Code::Removed);
    assert_eq!(code(client.leaves(id, &gone.record.csr).await), Code::Removed);
    assert_eq!(code(client.intents(id, None, false).await), Code::Removed);
    assert_eq!(code(client.intent(id, intent.intent.operation, None).await), Code::Removed);
    assert_eq!(code(client.directory(id).await), Code::Removed);
    assert_eq!(code(client.statements(id).await), Code::Removed);
    assert_eq!(code(client.document(id).await), Code::Removed);
    let other = cluster.newcomer(9).await.join().await.unwrap().intent;
    assert_eq!(code(cluster.say(gone, &other, added(77), 99).await), Code::Removed);
    // A new access token neither.
    let anew = cluster.world.client(&cluster.service, Some(&gone.key));
    let error = anew.statements(id).await.unwrap_err();
    let ClientError::Problem(problem) = error else { panic!("{error}") };
    let removal = problem.removal.unwrap();
    assert_eq!((removal.member, removal.by.as_str()), (c, "owner"));
    assert!(problem.status == 410 && removal.at_ms > 0);
    // Nor does it join anew with the keys that it had.
    let ticket = cluster.world.ticket(&cluster.admin, &cluster.statement).await;
    let mut back = Agent::new(&cluster.world, &cluster.service, &cluster.statement, &ticket, 9);
    back.record.incarnation = gone.record.incarnation;
    assert_eq!(code(back.join().await), Code::Conflict);
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_member_renews_its_leaves_over_its_own_key_alone_at_where_it_moved() {
    let cluster = Formed::of(1).await;
    let id = cluster.statement.cluster;
    let agent = &cluster.agents[0];
    let leaves = agent.client.leaves(id, &agent.record.csr).await.unwrap();
    let node_key = agent.record.csr.verify().unwrap().node_key;
    leaves.verify(&node_key, &cluster.statement).unwrap();
    let name = format!("URI(spiffe://muster/cluster/{id}/member/1)");
    assert!(names(&leaves.peer).contains(&name), "{:?}", names(&leaves.peer));
    assert!(names(&leaves.client).contains(&name));
    let other = NodeKey::generate().csr;
    assert_eq!(code(agent.client.leaves(id, &other).await), Code::CsrRefused);
    let own = cluster.id(agent);
    cluster.report(agent, None, 12, &[(own, false)]).await.unwrap();
    let moved = agent.client.leaves(id, &agent.record.csr).await.unwrap();
    assert!(
        names(&moved.peer).iter().any(|name| name.contains("7f:00:00:09")),
        "{:?}",
        names(&moved.peer)
    );
    assert!(!names(&moved.peer).iter().any(|name| name.contains("7f:00:00:01")));
    // Clients are told of both: they may have been told of the place before.
    for place in ["7f:00:00:01", "7f:00:00:09"] {
        assert!(names(&moved.client).iter().any(|name| name.contains(place)), "{place}");
    }
    cluster.service.stop().await;
}

/// A name in a command or an order means one member.
#[tokio::test]
async fn a_newcomer_has_a_name_of_its_own_or_the_place_of_whoever_has_it() {
    let cluster = Formed::of(3).await;
    let mut newcomer = cluster.newcomer(9).await;
    newcomer.record.name = "node-2".parse().unwrap();
    assert_eq!(code(newcomer.join().await), Code::NameTaken);
    // The ticket is not used up.
    newcomer.record.name = "node-9".parse().unwrap();
    assert!(newcomer.join().await.is_ok());
    let b = cluster.id(&cluster.agents[1]);
    let (token, mut grant) = cluster.world.join_grant(&cluster.admin, &cluster.statement);
    grant.replaces = Some(b);
    cluster.admin.put_grant(&grant.sign(&cluster.world.owner)).await.unwrap();
    let (world, service) = (&cluster.world, &cluster.service);
    let mut heir = Agent::new(world, service, &cluster.statement, &token, 8);
    heir.record.name = "node-2".parse().unwrap();
    assert!(heir.join().await.is_ok());
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_replacement_says_whom_it_replaces_and_who_is_gone_is_replaced_by_nobody() {
    let cluster = Formed::of(3).await;
    let (world, admin, statement) = (&cluster.world, &cluster.admin, &cluster.statement);
    let [a, b, c] = [0, 1, 2].map(|i| cluster.id(&cluster.agents[i]));
    let mut tickets = Vec::new();
    for number in [8, 9] {
        let (token, mut grant) = world.join_grant(admin, statement);
        grant.replaces = Some(c);
        admin.put_grant(&grant.sign(&world.owner)).await.unwrap();
        tickets.push(Agent::new(world, &cluster.service, statement, &token, number));
    }
    let intent = tickets[0].join().await.unwrap().intent;
    assert_eq!(intent.intent.verb, Verb::Replace);
    let verified = VerifiedIntent::verify(&intent.intent, &cluster.chain()).unwrap();
    assert_eq!(verified.leaves(), Some(c));
    cluster.say(&cluster.agents[0], &intent, added(77), 12).await.unwrap();
    let member = MemberId::new(77);
    cluster.say(&cluster.agents[0], &intent, Outcome::Promoted { member }, 14).await.unwrap();
    for who in [0, 1] {
        let list = [(a, false), (b, false), (member, false)];
        cluster.report(&cluster.agents[who], None, 14, &list).await.unwrap();
    }
    let error = cluster.agents[2].poll(None).await.unwrap_err();
    let ClientError::Problem(problem) = error else { panic!("{error}") };
    assert_eq!(problem.removal.unwrap().by, "owner");
    assert_eq!(code(tickets[1].join().await), Code::WrongState);
    // The newcomer's word counts with the others' now.
    let (left, newcomer) = ([(a, false), (member, false)], &tickets[0]);
    cluster.report(&cluster.agents[0], None, 20, &left).await.unwrap();
    assert_eq!(cluster.confirmed().await, Some(vec![a, b, member]));
    cluster.report(newcomer, None, 21, &left).await.unwrap();
    assert_eq!(cluster.confirmed().await, Some(vec![a, member]));
    cluster.service.stop().await;
}

#[tokio::test]
async fn no_request_changes_a_membership() {
    let cluster = Formed::of(1).await;
    let id = cluster.statement.cluster;
    let key = &cluster.agents[0].key;
    for (method, path) in [
        ("POST", format!("/v1/clusters/{id}/members")),
        ("DELETE", format!("/v1/clusters/{id}/members/1")),
        ("PUT", format!("/v1/clusters/{id}/members/1")),
        ("POST", format!("/v1/clusters/{id}/members/1/promote")),
    ] {
        let (status, body) =
            send(&cluster.world, &cluster.service, Some(key), method, &path, "{}".into()).await;
        assert_eq!(status, 405, "{method} {path}: {body}");
        assert!(body.contains("muster-agent member") && body.contains("etcdctl"), "{body}");
    }
    cluster.service.stop().await;
}

fn initial() -> Vec<InitialMember> {
    let Outcome::Added { initial_cluster, .. } = added(1) else { unreachable!("it is one") };
    initial_cluster
}

/// The only member of another cluster of the same service.
async fn world_of_another(cluster: &Formed) -> Agent {
    let (world, admin, service) = (&cluster.world, &cluster.admin, &cluster.service);
    let statement = world.cluster(admin, "other", 1).await;
    let token = world.token(admin, &statement).await;
    let mut agents = vec![Agent::new(world, service, &statement, &token, 5)];
    form(&mut agents).await;
    agents.remove(0)
}

/// Postgres takes the service's connections away while a ticket is redeemed and its outcome told,
/// again and again: whatever was answered stands, and nothing stands twice.
#[tokio::test]
async fn connections_that_die_at_any_step_leave_one_intent_and_no_answer_that_is_taken_back() {
    let cluster = Formed::of(1).await;
    let newcomer = cluster.newcomer(9).await;
    let founder = &cluster.agents[0];
    let mut postgres = cluster.world.database.connect().await;
    let storm = async {
        loop {
            let ended = sqlx::query(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                 WHERE datname = current_database() AND application_name = 'muster-discovery'
                     AND random() < 0.5",
            );
            ended.fetch_all(&mut postgres).await.unwrap();
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    };
    let work = async {
        let mut failed = 0;
        let mut answers = Vec::new();
        for _ in 0..10 {
            match newcomer.join().await {
                Ok(joined) => answers.push(joined.intent),
                Err(_) => failed += 1,
            }
        }
        (failed, answers)
    };
    let (failed, answers) = tokio::select! {
        () = storm => unreachable!("it has no end"),
        done = work => done,
    };
    println!("{failed} of 10 requests failed");
    let intent = newcomer.join().await.unwrap().intent;
    assert!(answers.iter().all(|answer| *answer == intent), "{answers:?}");
    let rows = cluster.admin.intents(cluster.statement.cluster, None, true).await.unwrap().intents;
    assert_eq!(rows.len(), 1);
    let said = cluster.say(founder, &intent, added(77), 20).await.unwrap();
    assert_eq!(said.state, IntentState::Added);
    cluster.service.stop().await;
}
