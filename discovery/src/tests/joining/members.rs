//! Tests of members' reports: which are believed, and what follows from them.

use discovery_types::api::{InitialMember, IntentState, Outcome};
use discovery_types::client::ClientError;
use discovery_types::csr::NodeKey;
use discovery_types::digest::MemberId;
use discovery_types::order::Order;
use discovery_types::problem::Code;

use super::{CommittedCluster, added, code, names, remove};
use crate::tests::agent::{TestAgent, form};

#[tokio::test]
async fn only_members_agents_can_report_and_no_newcomer_about_itself() {
    let cluster = CommittedCluster::of(1).await;
    let id = cluster.statement.cluster;
    let founder = &cluster.agents[0];
    let newcomer = cluster.newcomer(9).await;
    let intent = newcomer.join().await.unwrap().intent;
    let operation = intent.intent.operation;
    // A newcomer that isn't added has no rights over the cluster, and can't report its own
    // addition.
    assert_eq!(code(newcomer.client.intents(id, None, false).await), Code::Forbidden);
    assert_eq!(
        code(cluster.report_outcome(&newcomer, &intent, added(77), 20).await),
        Code::Forbidden
    );
    let other = cluster.newcomer(8).await;
    let others = other.join().await.unwrap().intent;
    assert_eq!(
        code(cluster.report_outcome(&newcomer, &others, added(78), 20).await),
        Code::Forbidden
    );
    assert_eq!(
        code(newcomer.client.intent(id, others.intent.operation, None).await),
        Code::Forbidden
    );
    assert_eq!(
        code(cluster.report(&newcomer, None, 20, &[(MemberId::new(1), false)]).await),
        Code::UnknownKey
    );

    // The agent of another cluster's member has no rights here.
    let stranger = agent_of_other_cluster(&cluster).await;
    assert_eq!(code(stranger.client.intents(id, None, false).await), Code::Forbidden);
    assert_eq!(code(stranger.client.intent(id, operation, None).await), Code::Forbidden);
    assert_eq!(
        code(cluster.report_outcome(&stranger, &intent, added(77), 20).await),
        Code::Forbidden
    );
    assert_eq!(code(stranger.client.renew_leaves(id, &stranger.record.csr).await), Code::Forbidden);
    assert_eq!(code(stranger.client.directory(id).await), Code::Forbidden);
    assert_eq!(code(stranger.client.export_cluster(id).await), Code::Forbidden);

    // Outcomes that don't fit the intent, or arrive too late, are refused.
    let founders_own =
        Outcome::Added { member: cluster.id(founder), initial_cluster: initial(), replaces: None };
    assert_eq!(
        code(cluster.report_outcome(founder, &intent, founders_own, 20).await),
        Code::Conflict
    );
    let member = MemberId::new(77);
    let wrong = cluster.report_outcome(founder, &intent, Outcome::Removed { member }, 20).await;
    assert_eq!(code(wrong), Code::InvalidRequest);
    cluster.report_outcome(founder, &intent, added(77), 20).await.unwrap();
    assert_eq!(code(cluster.report_outcome(founder, &intent, added(78), 21).await), Code::Conflict);
    let late = cluster.admin.withdraw_intent(id, operation).await;
    assert_eq!(code(late), Code::WrongState, "it is a member by now");
    let promoted = Outcome::Promoted { member };
    assert_eq!(
        code(cluster.report_outcome(founder, &intent, promoted.clone(), 19).await),
        Code::Conflict
    );
    let refused = Outcome::Refused { reason: "no".into() };
    assert_eq!(code(cluster.report_outcome(founder, &intent, refused, 21).await), Code::Conflict);
    assert_eq!(
        code(cluster.report_outcome(&newcomer, &intent, promoted.clone(), 21).await),
        Code::Forbidden
    );
    assert_eq!(
        cluster.report_outcome(founder, &intent, promoted, 21).await.unwrap().state,
        IntentState::Promoted
    );
    cluster.service.stop().await;
}

fn initial() -> Vec<InitialMember> {
    let Outcome::Added { initial_cluster, .. } = added(1) else { unreachable!("it is one") };
    initial_cluster
}

/// Returns the agent of the only member of another cluster of the same service.
async fn agent_of_other_cluster(cluster: &CommittedCluster) -> TestAgent {
    let (world, admin, service) = (&cluster.world, &cluster.admin, &cluster.service);
    let statement = world.cluster(admin, "other", 1).await;
    let token = world.token(admin, &statement).await;
    let mut agents = vec![TestAgent::new(world, service, &statement, &token, 5)];
    form(&mut agents).await;
    agents.remove(0)
}

#[tokio::test]
async fn a_quorum_of_the_last_voters_confirms_a_list_and_never_an_older_one() {
    let cluster = CommittedCluster::of(3).await;
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
    // One lying reporter changes nothing, however often it reports.
    for configuration in 50..60 {
        say(2, configuration, &[(c, false)]).await;
    }
    assert_eq!(cluster.confirmed().await, Some(vec![a, b, c]));
    let d = MemberId::new(77);
    say(0, 7, &[(a, false), (b, false), (d, true)]).await;
    say(1, 7, &[(a, false), (b, false), (d, true)]).await;
    assert_eq!(cluster.confirmed().await, Some(vec![a, b, d]));
    // Late reports of the old list change nothing.
    say(0, 3, &all).await;
    say(1, 3, &all).await;
    assert_eq!(cluster.confirmed().await, Some(vec![a, b, d]));
    // A change planned on the old list is stale, and a removed member can't be removed again.
    let stale = Order { planned_at: Some(3), ..cluster.order(remove(b)) };
    assert_eq!(code(cluster.put(&stale).await), Code::StalePlan);
    let planned = Order { planned_at: Some(7), ..cluster.order(remove(b)) };
    assert!(cluster.put(&planned).await.is_ok());
    for gone in [c, MemberId::new(99)] {
        assert_eq!(code(cluster.put(&cluster.order(remove(gone))).await), Code::OrderRefused);
    }
    // A new ticket's intent is planned on the newest list.
    let intent = cluster.newcomer(9).await.join().await.unwrap().intent;
    assert_eq!(intent.intent.planned_at, Some(7));
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_confirmed_list_can_make_earlier_reports_a_quorum() {
    let cluster = CommittedCluster::of(3).await;
    let [a, b] = [0, 1].map(|i| cluster.id(&cluster.agents[i]));
    let newcomer = cluster.newcomer(9).await;
    let intent = newcomer.join().await.unwrap().intent;
    cluster.report_outcome(&cluster.agents[0], &intent, added(77), 12).await.unwrap();
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
async fn an_impossible_position_is_refused_and_the_next_report_corrects_a_wrong_one() {
    const MAX: u64 = i64::MAX as u64;
    /// A false term, index or configuration that the service still accepts, because it is the
    /// highest one allowed.
    const WRONG: u64 = 1 << 53;
    let cluster = CommittedCluster::of(3).await;
    let [a, b, c] = [0, 1, 2].map(|i| cluster.id(&cluster.agents[i]));
    let all = [(a, false), (b, false), (c, false)];
    let liar = &cluster.agents[2];
    for (configuration, index) in [(Some(MAX), 20), (Some(3), MAX), (None, MAX)] {
        let refused = cluster.report(liar, configuration, index, &all).await;
        assert_eq!(code(refused), Code::InvalidRequest, "{configuration:?} {index}");
    }
    // A report with a false configuration and index within the limits is accepted, but confirms no
    // list of members. The same agent's next report replaces it.
    cluster.report(liar, Some(WRONG), WRONG, &[(c, false)]).await.unwrap();
    cluster.report(&cluster.agents[1], Some(3), 12, &all).await.unwrap();
    assert_eq!(cluster.confirmed().await, None);
    cluster.report(liar, Some(3), 13, &all).await.unwrap();
    assert_eq!(cluster.confirmed().await, Some(vec![a, b, c]));
    // A report of the true members with a false Raft index doesn't become the confirmed index.
    cluster.report(liar, Some(5), WRONG, &all[..2]).await.unwrap();
    cluster.report(&cluster.agents[0], Some(5), 20, &all[..2]).await.unwrap();
    let shown = cluster.admin.directory(cluster.statement.cluster).await.unwrap().view.unwrap();
    assert_eq!((shown.confirmed, shown.raft_index), (true, 20));
    cluster.service.stop().await;
}

#[tokio::test]
async fn an_outcome_with_a_false_position_does_not_block_other_agents() {
    const WRONG: u64 = 1 << 53;
    let cluster = CommittedCluster::of(3).await;
    let [a, b, c] = [0, 1, 2].map(|i| cluster.id(&cluster.agents[i]));
    let all = [(a, false), (b, false), (c, false)];
    let intent = cluster.newcomer(9).await.join().await.unwrap().intent;
    let refused =
        cluster.report_outcome(&cluster.agents[2], &intent, added(77), i64::MAX as u64).await;
    assert_eq!(code(refused), Code::InvalidRequest);
    cluster.report_outcome(&cluster.agents[2], &intent, added(77), WRONG).await.unwrap();
    for who in [0, 1] {
        cluster.report(&cluster.agents[who], Some(3), 12, &all).await.unwrap();
    }
    let promoted = Outcome::Promoted { member: MemberId::new(77) };
    let late = cluster.report_outcome(&cluster.agents[0], &intent, promoted.clone(), 11).await;
    assert_eq!(code(late), Code::Conflict, "a quorum is further on");
    let taken = cluster.report_outcome(&cluster.agents[0], &intent, promoted, 13).await.unwrap();
    assert_eq!(taken.state, IntentState::Promoted);
    cluster.service.stop().await;
}

/// A member reports another Raft cluster than the founded one. The service hasn't seen a recovery
/// statement for that cluster.
#[tokio::test]
async fn a_recovered_clusters_list_removes_nobody_from_the_founded_one() {
    let cluster = CommittedCluster::of(1).await;
    let (agent, own) = (&cluster.agents[0], cluster.id(&cluster.agents[0]));
    cluster.report(agent, Some(1), 12, &[(own, false)]).await.unwrap();
    let made = [(MemberId::new(77), false)];
    cluster.report_of(7, agent, Some(99), 99, &made).await.unwrap();
    assert_eq!(cluster.confirmed().await, Some(vec![own]));
    let newcomer = cluster.newcomer(9).await;
    let view = newcomer.join().await.unwrap().intent;
    let open = agent.client.intents(cluster.statement.cluster, None, false).await.unwrap();
    assert_eq!(open.intents[0].intent, view.intent, "it still carries tickets out");
    cluster.service.stop().await;
}

#[tokio::test]
async fn every_call_tells_a_removed_members_agent_of_the_removal() {
    let cluster = CommittedCluster::of(3).await;
    let id = cluster.statement.cluster;
    let [a, b, c] = [0, 1, 2].map(|i| cluster.id(&cluster.agents[i]));
    let intent = cluster.put(&cluster.order(remove(c))).await.unwrap();
    let removed = Outcome::Removed { member: c };
    cluster.report_outcome(&cluster.agents[0], &intent, removed, 12).await.unwrap();
    let gone = &cluster.agents[2];
    // A single member's report confirms no removal, so the agent may still poll.
    assert!(gone.poll(None).await.is_ok());
    assert!(gone.client.renew_leaves(id, &gone.record.csr).await.is_ok());
    for who in [0, 1] {
        let left = [(a, false), (b, false)];
        cluster.report(&cluster.agents[who], None, 12, &left).await.unwrap();
    }
    let client = &gone.client;
    assert_eq!(code(gone.poll(None).await), Code::Removed);
    assert_eq!(code(gone.redeem().await), Code::Removed);
    assert_eq!(code(cluster.report(gone, None, 99, &[(c, false)]).await), Code::Removed);
    assert_eq!(code(client.renew_leaves(id, &gone.record.csr).await), Code::Removed);
    assert_eq!(code(client.intents(id, None, false).await), Code::Removed);
    assert_eq!(code(client.intent(id, intent.intent.operation, None).await), Code::Removed);
    assert_eq!(code(client.directory(id).await), Code::Removed);
    assert_eq!(code(client.statements(id).await), Code::Removed);
    assert_eq!(code(client.document(id).await), Code::Removed);
    let other = cluster.newcomer(9).await.join().await.unwrap().intent;
    assert_eq!(code(cluster.report_outcome(gone, &other, added(77), 99).await), Code::Removed);
    // A removed member's agent gets no new access token either.
    let anew = cluster.world.client(&cluster.service, Some(&gone.key));
    let error = anew.statements(id).await.unwrap_err();
    let ClientError::Problem(problem) = error else { panic!("{error}") };
    let removal = problem.removal.unwrap();
    assert_eq!((removal.member, removal.by.as_str()), (c, "owner"));
    assert!(problem.status == 410 && removal.at_ms > 0);
    // The removed member's agent can't join again with its old keys.
    let ticket = cluster.world.ticket(&cluster.admin, &cluster.statement).await;
    let mut back = TestAgent::new(&cluster.world, &cluster.service, &cluster.statement, &ticket, 9);
    back.record.incarnation = gone.record.incarnation;
    assert_eq!(code(back.join().await), Code::Conflict);
    cluster.service.stop().await;
}

/// A newcomer is added and then removed. Its agent redeems the used ticket again, as after the loss
/// of its directory.
#[tokio::test]
async fn a_removed_newcomer_is_refused_when_it_redeems_its_ticket_again() {
    let cluster = CommittedCluster::of(1).await;
    let (founder, own) = (&cluster.agents[0], cluster.id(&cluster.agents[0]));
    let newcomer = cluster.newcomer(9).await;
    let intent = newcomer.join().await.unwrap().intent;
    cluster.report_outcome(founder, &intent, added(77), 12).await.unwrap();
    let both = [(own, false), (MemberId::new(77), true)];
    cluster.report(founder, None, 13, &both).await.unwrap();
    assert!(newcomer.join().await.is_ok());
    cluster.report(founder, None, 14, &[(own, false)]).await.unwrap();
    assert_eq!(code(newcomer.join().await), Code::Removed);
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_member_renews_its_leaves_for_its_own_key_and_its_new_address() {
    let cluster = CommittedCluster::of(1).await;
    let id = cluster.statement.cluster;
    let agent = &cluster.agents[0];
    let leaves = agent.client.renew_leaves(id, &agent.record.csr).await.unwrap();
    let node_key = agent.record.csr.verify().unwrap().node_key;
    leaves.verify(&node_key, &cluster.statement).unwrap();
    let name = format!("URI(spiffe://muster/cluster/{id}/member/1)");
    assert!(names(&leaves.peer).contains(&name), "{:?}", names(&leaves.peer));
    assert!(names(&leaves.client).contains(&name));
    let other = NodeKey::generate().csr;
    assert_eq!(code(agent.client.renew_leaves(id, &other).await), Code::CsrRefused);
    let own = cluster.id(agent);
    cluster.report(agent, None, 12, &[(own, false)]).await.unwrap();
    let moved = agent.client.renew_leaves(id, &agent.record.csr).await.unwrap();
    assert!(
        names(&moved.peer).iter().any(|name| name.contains("7f:00:00:09")),
        "{:?}",
        names(&moved.peer)
    );
    assert!(!names(&moved.peer).iter().any(|name| name.contains("7f:00:00:01")));
    // The client certificate contains the old and the new host, because clients can still use the
    // old one.
    for place in ["7f:00:00:01", "7f:00:00:09"] {
        assert!(names(&moved.client).iter().any(|name| name.contains(place)), "{place}");
    }
    cluster.service.stop().await;
}
