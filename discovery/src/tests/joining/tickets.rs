//! Tests of join tickets: who may redeem a ticket, and that each ticket adds only one member.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use discovery_types::api::{GrantState, IntentState, NodeProgram, Outcome};
use discovery_types::client::ClientError;
use discovery_types::digest::MemberId;
use discovery_types::document::VerifiedDocument;
use discovery_types::grant::{Grant, ISSUER_SKEW_SECONDS};
use discovery_types::intent::{IntentChange, Verb, VerifiedIntent};
use discovery_types::key::SigningKey;
use discovery_types::problem::Code;
use discovery_types::statement::StatementChain;
use futures_util::future::join_all;

use super::{CommittedCluster, added, code, names};
use crate::redeem::RedeemRequest;
use crate::tests::agent::TestAgent;

#[tokio::test]
async fn a_clusters_agents_get_a_redeemed_ticket_and_its_host_becomes_a_member() {
    let cluster = CommittedCluster::of(1).await;
    let id = cluster.statement.cluster;
    let newcomer = cluster.newcomer(9).await;
    let joined = newcomer.join().await.unwrap();
    assert_eq!(joined.intent.state, IntentState::Open);
    let chain = StatementChain::verify_from_pin(&joined.statements, &newcomer.statement).unwrap();
    assert_eq!(VerifiedDocument::verify(&joined.document, &chain).unwrap().hash(), cluster.h);
    assert_eq!(code(newcomer.client.renew_leaves(id, &newcomer.record.csr).await), Code::Forbidden);

    // The founder's agent reads the intent and verifies its signatures.
    let founder = &cluster.agents[0];
    let list = founder.client.intents(id, None, false).await.unwrap();
    let [view] = &list.intents[..] else { panic!("{list:?}") };
    let intent = VerifiedIntent::verify(&view.intent, &cluster.chain()).unwrap();
    let IntentChange::Add { record, .. } = intent.change() else { panic!("{intent:?}") };
    assert_eq!(record.agent_key, newcomer.record.agent_key);
    let now = list.now_ms.unsigned_abs() / 1_000;
    assert_eq!(intent.time_error(now, now), None);
    assert_eq!((view.by.as_str(), view.subject.as_str()), ("owner", "node-9"));

    // The newcomer's long poll ends as soon as the outcome is reported.
    let operation = view.intent.operation;
    let waiting = newcomer.client.intent(id, operation, Some(joined.intent.rev));
    let (heard, said) = tokio::join!(waiting, async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        cluster.report_outcome(founder, view, added(77), 20).await
    });
    let heard = heard.unwrap();
    assert_eq!(heard, said.unwrap());
    assert_eq!(heard.outcome, Some(added(77)));
    assert_eq!(heard.reported_by.as_deref(), Some("node-1"));

    let leaves = newcomer.client.renew_leaves(id, &newcomer.record.csr).await.unwrap();
    let node_key = newcomer.record.csr.verify().unwrap().node_key;
    leaves.verify(&node_key, &cluster.statement).unwrap();
    let name = format!("URI(spiffe://muster/cluster/{id}/member/000000000000004d)");
    assert!(names(&leaves.peer).contains(&name), "{:?}", names(&leaves.peer));

    let member = MemberId::new(77);
    let done =
        cluster.report_outcome(founder, view, Outcome::Promoted { member }, 30).await.unwrap();
    assert_eq!((done.state, done.explain), (IntentState::Promoted, Vec::new()));
    let metrics = cluster.service.app().metrics.text();
    for sample in [
        "intents_total{verb=\"join\",state=\"promoted\"} 1\n",
        "intents_total{verb=\"join\",state=\"refused\"} 0\n",
        "policy_replacements_total 0\n",
    ] {
        assert!(metrics.contains(sample), "no {sample} in {metrics}");
    }
    assert!(founder.client.intents(id, None, false).await.unwrap().intents.is_empty());
    assert_eq!(founder.client.intents(id, None, true).await.unwrap().intents.len(), 1);
    // The newcomer is a member now, so it may read the cluster's intents.
    assert!(newcomer.client.intents(id, None, false).await.is_ok());
    cluster.service.stop().await;
}

/// After each step the response is lost and the service restarts. The repeated request must get the
/// same answer.
#[tokio::test]
async fn every_step_of_a_join_can_be_repeated_and_survives_a_restart() {
    let mut cluster = CommittedCluster::of(1).await;
    let id = cluster.statement.cluster;
    let mut newcomer = cluster.newcomer(9).await;
    let first = newcomer.join().await.unwrap().intent;
    let member = MemberId::new(77);
    for step in [None, Some(added(77)), Some(Outcome::Promoted { member })] {
        let founder = &cluster.agents[0];
        let said = match &step {
            Some(outcome) => {
                cluster.report_outcome(founder, &first, outcome.clone(), 20).await.unwrap()
            }
            None => first.clone(),
        };
        cluster.service.stop().await;
        cluster.service = cluster.world.serve().await;
        cluster.admin = cluster.world.owner(&cluster.service);
        cluster.agents[0].connect_to(&cluster.world, &cluster.service);
        newcomer.connect_to(&cluster.world, &cluster.service);
        newcomer.boot += 1;
        assert_eq!(newcomer.join().await.unwrap().intent, said, "the same key, the same answer");
        if let Some(outcome) = step {
            let again =
                cluster.report_outcome(&cluster.agents[0], &first, outcome, 20).await.unwrap();
            assert_eq!(again, said);
        }
        let all = cluster.admin.intents(id, None, true).await.unwrap().intents;
        assert_eq!(all, [said]);
    }
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_ticket_belongs_to_its_first_key() {
    let cluster = CommittedCluster::of(1).await;
    let ticket = cluster.world.ticket(&cluster.admin, &cluster.statement).await;
    let agent = |number| {
        TestAgent::new(&cluster.world, &cluster.service, &cluster.statement, &ticket, number)
    };
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
    // The same host with other addresses makes another record. The ticket is bound to the first
    // endorsed record, so the request is refused.
    let mut moved = first;
    moved.record.peer_urls = vec!["https://127.0.0.1:2999".parse().unwrap()];
    assert_eq!(code(moved.join().await), Code::Conflict);
    cluster.service.stop().await;
}

/// Opens an agent's redeem as if it came from `address`.
fn request_from(agent: &TestAgent, address: &str) -> RedeemRequest {
    let (envelope, key) = (agent.envelope(), *agent.key.public());
    RedeemRequest::open(envelope, key, agent.service, address.parse().unwrap()).unwrap()
}

/// The test calls `App::join` directly, because a thousand TLS handshakes would take most of its
/// time.
#[tokio::test]
async fn of_a_thousand_keys_that_redeem_one_ticket_at_once_one_wins() {
    let cluster = CommittedCluster::of(1).await;
    let ticket = cluster.world.ticket(&cluster.admin, &cluster.statement).await;
    let agents: Vec<TestAgent> = (0..1_000)
        .map(|_| TestAgent::new(&cluster.world, &cluster.service, &cluster.statement, &ticket, 9))
        .collect();
    let app = cluster.service.app();
    let redeem = async |agent: &TestAgent| {
        let request = request_from(agent, "127.0.0.1");
        loop {
            match app.join(&request, None).await {
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
async fn a_used_ticket_keeps_its_network_and_a_copy_raises_the_alarm_from_anywhere() {
    let cluster = CommittedCluster::of(1).await;
    let (token, mut grant) = cluster.world.join_grant(&cluster.admin, &cluster.statement);
    grant.cidrs = vec!["127.0.0.0/8".parse().unwrap()];
    cluster.admin.put_grant(&grant.sign(&cluster.world.owner)).await.unwrap();
    let agent = |number| {
        TestAgent::new(&cluster.world, &cluster.service, &cluster.statement, &token, number)
    };
    let (newcomer, thief) = (agent(8), agent(9));
    let app = cluster.service.app();
    let ask = async |agent: &TestAgent, address: &str| {
        let asked = app.join(&request_from(agent, address), None).await;
        asked.err().map(|error| error.problem().code)
    };
    assert_eq!(ask(&newcomer, "192.0.2.1").await, Some(Code::GrantBinding));
    assert_eq!(ask(&newcomer, "127.0.0.1").await, None);
    assert_eq!(ask(&newcomer, "192.0.2.1").await, Some(Code::GrantBinding));
    assert_eq!(ask(&newcomer, "127.0.0.2").await, None);
    assert_eq!(ask(&thief, "192.0.2.1").await, Some(Code::TicketTaken));
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_ticket_admits_only_the_host_that_it_is_for() {
    let cluster = CommittedCluster::of(1).await;
    let (world, admin) = (&cluster.world, &cluster.admin);
    let statement = &cluster.statement;
    let refused = async |change: &dyn Fn(&mut Grant)| {
        let (token, mut grant) = world.join_grant(admin, statement);
        change(&mut grant);
        admin.put_grant(&grant.sign(&world.owner)).await.unwrap();
        let agent = TestAgent::new(world, &cluster.service, statement, &token, 9);
        code(agent.join().await)
    };
    let elsewhere = |grant: &mut Grant| grant.cidrs = vec!["10.0.0.0/8".parse().unwrap()];
    assert_eq!(refused(&elsewhere).await, Code::GrantBinding);
    assert_eq!(
        refused(&|grant| grant.name = Some("db".parse().unwrap())).await,
        Code::GrantBinding
    );
    assert_eq!(refused(&|grant| grant.zone = Some("z".parse().unwrap())).await, Code::GrantBinding);
    let (token, grant) = world.short_lived(admin, || world.join_grant(admin, statement)).await;
    world.wait_until_expired(admin, &grant).await;
    let late = TestAgent::new(world, &cluster.service, statement, &token, 9);
    assert_eq!(code(late.join().await), Code::GrantExpired);

    let revoked = cluster.newcomer(9).await;
    admin.revoke_grant(revoked.record.grant).await.unwrap();
    assert_eq!(code(revoked.join().await), Code::GrantRevoked);
    // A boot token isn't accepted as a ticket, and a ticket gives no seat.
    let (token, grant) = world.grant(admin, statement);
    assert_eq!(code(admin.put_grant(&grant.sign(&world.owner)).await), Code::BootClosed);
    let stranger = TestAgent::new(world, &cluster.service, statement, &token, 9);
    assert_eq!(code(stranger.join().await), Code::GrantUnknown);
    let stranger = TestAgent::new(world, &cluster.service, statement, &cluster.token, 9);
    assert_eq!(code(stranger.join().await), Code::GrantUnknown);
    let ticket = cluster.newcomer(9).await;
    assert_eq!(code(ticket.redeem().await), Code::GrantUnknown);
    // Tickets of another cluster, and tickets redeemed with a founder's keys, are refused.
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
    // The connection's client key isn't the key that signed the envelope.
    let honest = cluster.newcomer(9).await;
    let thief = world.client(&cluster.service, Some(&Arc::new(SigningKey::generate())));
    assert_eq!(code(thief.join(&[honest.envelope()], None).await), Code::RecordRefused);
    assert!(honest.join().await.is_ok());
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_ticket_issued_before_a_restore_is_void() {
    let mut cluster = CommittedCluster::of(1).await;
    let used = cluster.newcomer(8).await;
    // The ticket was made on a machine whose clock is ahead.
    let (ticket, grant) = cluster.world.join_grant(&cluster.admin, &cluster.statement);
    let grant = Grant { issued_at: grant.issued_at + ISSUER_SKEW_SECONDS / 2, ..grant };
    cluster.admin.put_grant(&grant.sign(&cluster.world.owner)).await.unwrap();
    let unused = TestAgent::new(&cluster.world, &cluster.service, &cluster.statement, &ticket, 9);
    let dump = cluster.world.database.dump();
    used.join().await.unwrap();
    cluster.service.stop().await;
    cluster.world.database.load(&dump).await;
    cluster.service = cluster.world.serve().await;
    for mut agent in [used, unused] {
        agent.connect_to(&cluster.world, &cluster.service);
        let refused = loop {
            match code(agent.join().await) {
                // The service hasn't compared the restored database with its ledger yet.
                Code::DatabaseChanged => tokio::time::sleep(Duration::from_millis(50)).await,
                code => break code,
            }
        };
        assert_eq!(refused, Code::GrantRevoked, "its use was forgotten");
    }
    cluster.service.stop().await;
}

/// Commands and orders name members, so a newcomer can't take a name that another member has.
#[tokio::test]
async fn a_newcomer_needs_a_free_name_or_that_of_the_member_it_replaces() {
    let cluster = CommittedCluster::of(3).await;
    let mut newcomer = cluster.newcomer(9).await;
    newcomer.record.name = "node-2".parse().unwrap();
    assert_eq!(code(newcomer.join().await), Code::NameTaken);
    // The refused request didn't use the ticket up.
    newcomer.record.name = "node-9".parse().unwrap();
    assert!(newcomer.join().await.is_ok());
    let b = cluster.id(&cluster.agents[1]);
    let (token, mut grant) = cluster.world.join_grant(&cluster.admin, &cluster.statement);
    grant.replaces = Some(b);
    cluster.admin.put_grant(&grant.sign(&cluster.world.owner)).await.unwrap();
    let (world, service) = (&cluster.world, &cluster.service);
    let mut heir = TestAgent::new(world, service, &cluster.statement, &token, 8);
    heir.record.name = "node-2".parse().unwrap();
    assert!(heir.join().await.is_ok());
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_replacement_names_the_old_member_and_no_other_can_replace_it_again() {
    let cluster = CommittedCluster::of(3).await;
    let (world, admin, statement) = (&cluster.world, &cluster.admin, &cluster.statement);
    let [a, b, c] = [0, 1, 2].map(|i| cluster.id(&cluster.agents[i]));
    let mut tickets = Vec::new();
    for number in [8, 9] {
        let (token, mut grant) = world.join_grant(admin, statement);
        grant.replaces = Some(c);
        admin.put_grant(&grant.sign(&world.owner)).await.unwrap();
        tickets.push(TestAgent::new(world, &cluster.service, statement, &token, number));
    }
    let intent = tickets[0].join().await.unwrap().intent;
    assert_eq!(intent.intent.verb, Verb::Replace);
    let verified = VerifiedIntent::verify(&intent.intent, &cluster.chain()).unwrap();
    assert_eq!(verified.leaving_member(), Some(c));
    cluster.report_outcome(&cluster.agents[0], &intent, added(77), 12).await.unwrap();
    let member = MemberId::new(77);
    cluster
        .report_outcome(&cluster.agents[0], &intent, Outcome::Promoted { member }, 14)
        .await
        .unwrap();
    for who in [0, 1] {
        let list = [(a, false), (b, false), (member, false)];
        cluster.report(&cluster.agents[who], None, 14, &list).await.unwrap();
    }
    let error = cluster.agents[2].poll(None).await.unwrap_err();
    let ClientError::Problem(problem) = error else { panic!("{error}") };
    assert_eq!(problem.removal.unwrap().by, "owner");
    assert_eq!(code(tickets[1].join().await), Code::WrongState);
    // The newcomer is a voter now, so its report counts towards the quorum.
    let (left, newcomer) = ([(a, false), (member, false)], &tickets[0]);
    cluster.report(&cluster.agents[0], None, 20, &left).await.unwrap();
    assert_eq!(cluster.confirmed().await, Some(vec![a, b, member]));
    cluster.report(newcomer, None, 21, &left).await.unwrap();
    assert_eq!(cluster.confirmed().await, Some(vec![a, member]));
    cluster.service.stop().await;
}

/// Postgres repeatedly ends the service's connections while a ticket is redeemed ten times. No
/// later answer may contradict an earlier one, and nothing may be stored twice.
#[tokio::test]
async fn dying_connections_leave_one_intent_and_no_contradicting_answers() {
    let cluster = CommittedCluster::of(1).await;
    let newcomer = cluster.newcomer(9).await;
    let founder = &cluster.agents[0];
    let mut postgres = cluster.world.database.connect().await;
    let over = Cell::new(false);
    let storm = async {
        while !over.get() {
            // The query returns when the backends have ended, so none is still ending when the loop
            // stops.
            let ended = sqlx::query(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
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
        over.set(true);
        (failed, answers)
    };
    let ((), (failed, answers)) = tokio::join!(storm, work);
    println!("{failed} of 10 requests failed");
    let intent = newcomer.join().await.unwrap().intent;
    assert!(answers.iter().all(|answer| *answer == intent), "{answers:?}");
    let rows = cluster.admin.intents(cluster.statement.cluster, None, true).await.unwrap().intents;
    assert_eq!(rows.len(), 1);
    let said = cluster.report_outcome(founder, &intent, added(77), 20).await.unwrap();
    assert_eq!(said.state, IntentState::Added);
    cluster.service.stop().await;
}

/// `muster-node` and stock etcd can't be members of one cluster.
#[tokio::test]
async fn a_host_that_runs_another_node_program_is_refused_and_keeps_its_ticket() {
    let cluster = CommittedCluster::of(1).await;
    let founder = &cluster.agents[0];
    let members = [(cluster.id(founder), false)];
    cluster.report(founder, Some(3), 10, &members).await.unwrap();
    let newcomer = cluster.newcomer(9).await;
    let refused = newcomer.join_running(NodeProgram::Etcd).await;
    assert_eq!(code(refused), Code::Conflict);
    let list = founder.client.intents(cluster.statement.cluster, None, true).await.unwrap();
    assert!(list.intents.is_empty(), "{list:?}");
    newcomer.join_running(NodeProgram::MusterNode).await.unwrap();

    // Members with stock etcd report no configuration.
    let stock = CommittedCluster::of(1).await;
    let founder = &stock.agents[0];
    stock.report(founder, None, 10, &[(stock.id(founder), false)]).await.unwrap();
    let newcomer = stock.newcomer(9).await;
    let refused = newcomer.join_running(NodeProgram::MusterNode).await;
    assert_eq!(code(refused), Code::Conflict);
    newcomer.join_running(NodeProgram::Etcd).await.unwrap();
}
