//! Tests of recovered clusters: after a recovery, discovery accepts only the agents of the new Raft
//! cluster.

use discovery_types::api::{IntentState, RecoveriesResponse, ReportResponse};
use discovery_types::client::ClientError;
use discovery_types::digest::{Incarnation, MemberId};
use discovery_types::features::AgentBuild;
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::order::Order;
use discovery_types::problem::Code;
use discovery_types::recovery::{NodeIdentity, Recovery};
use discovery_types::role::Role;
use discovery_types::statement::Statement;

use super::{CommittedCluster, added, code, names, remove};
use crate::tests::agent::TestAgent;

/// Raft cluster id after the first recovery.
pub(super) const FIRST_RECOVERED_CLUSTER: u64 = 0xc1;
/// Raft cluster id after the second recovery.
const SECOND_RECOVERED_CLUSTER: u64 = 0xc2;
/// The only member after the first recovery.
pub(super) const SURVIVOR: MemberId = MemberId([0, 0, 0, 0, 0, 0, 0x10, 0xc1]);

impl CommittedCluster {
    /// Makes a recovery statement: the host of `agent` continues Raft cluster `was` as Raft cluster
    /// `is`.
    pub(super) fn recovery(&self, was: u64, is: u64, agent: &TestAgent) -> Recovery {
        let identity = |of: u64| NodeIdentity {
            cluster_id: format!("{of:016x}"),
            member_id: format!("{:016x}", of + 0x1000),
            incarnation: Incarnation(u128::from(of).to_be_bytes()),
        };
        Recovery {
            version: 1,
            cluster: self.statement.cluster,
            statement: self.statement.sign(&self.world.owner).hash(),
            agent: *agent.key.public(),
            was: identity(was),
            is: identity(is),
            last_index: 90,
            last_term: 3,
            at: 1_700_000_000,
        }
    }

    /// Makes a recovery statement about the founded Raft cluster, signed by the owner, for the host
    /// of `agent`.
    fn first(&self, agent: &TestAgent) -> Jws {
        self.recovery(self.raft_cluster(), FIRST_RECOVERED_CLUSTER, agent).sign(&self.world.owner)
    }

    async fn show(
        &self,
        agent: &TestAgent,
        recoveries: &[&Jws],
    ) -> Result<RecoveriesResponse, ClientError> {
        let all: Vec<Jws> = recoveries.iter().map(|jws| (*jws).clone()).collect();
        agent.client.send_recoveries(self.statement.cluster, &all).await
    }

    /// Sends a report by `agent` that the Raft cluster has these voters. Returns the answer.
    pub(super) async fn answer(
        &self,
        raft_cluster: u64,
        agent: &TestAgent,
        configuration: u64,
        voters: &[MemberId],
    ) -> Result<ReportResponse, ClientError> {
        let voters: Vec<_> = voters.iter().map(|id| (*id, false)).collect();
        let report = self.report_request(raft_cluster, agent, Some(configuration), 9, &voters);
        agent.client.report(self.statement.cluster, &report, &AgentBuild::own()).await
    }

    async fn alarms(&self) -> Vec<String> {
        self.admin.show_cluster(self.statement.cluster).await.unwrap().alarms
    }
}

#[tokio::test]
async fn discovery_follows_a_recovery_that_an_operator_signed() {
    let cluster = CommittedCluster::of(3).await;
    let [a, b, c] = [0, 1, 2].map(|i| cluster.id(&cluster.agents[i]));
    let [survivor, lost, _] = &cluster.agents[..] else { panic!("three agents") };
    let founded = cluster.raft_cluster();
    for who in [0, 1] {
        let founders = [a, b, c];
        cluster.answer(founded, &cluster.agents[who], 70, &founders).await.unwrap();
    }
    assert_eq!(cluster.confirmed().await, Some(vec![a, b, c]));

    // The survivor's report is answered with the founded Raft cluster's id. So the survivor sends
    // the recovery statement.
    let followed = cluster
        .answer(FIRST_RECOVERED_CLUSTER, survivor, 2, &[SURVIVOR])
        .await
        .unwrap()
        .raft_cluster_id;
    assert_eq!(followed, Some(format!("{founded:016x}")));
    assert_eq!(cluster.confirmed().await, Some(vec![a, b, c]));
    let statement = cluster.first(survivor);
    for _ in 0..2 {
        let answer = cluster.show(survivor, &[&statement]).await.unwrap();
        assert_eq!(
            (answer.followed, answer.raft_cluster_id),
            (1, format!("{FIRST_RECOVERED_CLUSTER:016x}"))
        );
    }
    assert_eq!(cluster.confirmed().await, None, "nothing is known of the recovered one yet");
    // The recovered cluster's single voter is a quorum. Its configuration number can be far below
    // the lost cluster's.
    let followed = cluster
        .answer(FIRST_RECOVERED_CLUSTER, survivor, 2, &[SURVIVOR])
        .await
        .unwrap()
        .raft_cluster_id;
    assert_eq!(followed, Some(format!("{FIRST_RECOVERED_CLUSTER:016x}")));
    assert_eq!(cluster.confirmed().await, Some(vec![SURVIVOR]));

    // The survivor's new certificates contain its new address. Their SPIFFE id still ends in
    // `/member/1`, which identifies the certificates' user.
    let id = cluster.statement.cluster;
    let leaves = survivor.client.renew_leaves(id, &survivor.record.csr).await.unwrap();
    let names = names(&leaves.peer);
    assert!(names.iter().any(|name| name.contains("7f:00:00:09")), "{names:?}");
    assert!(names.iter().any(|name| name.ends_with("/member/1)")), "{names:?}");

    // Agents of the lost cluster's members can't report, renew certificates or read intents.
    let refused = cluster.answer(founded, lost, 99, &[b, c]).await;
    assert_eq!(code(refused), Code::ClusterLost);
    assert_eq!(code(lost.client.renew_leaves(id, &lost.record.csr).await), Code::ClusterLost);
    assert_eq!(code(lost.client.intents(id, None, false).await), Code::ClusterLost);
    let old = cluster.answer(founded, survivor, 99, &[a, b, c]).await.unwrap();
    assert_eq!(old.raft_cluster_id, Some(format!("{FIRST_RECOVERED_CLUSTER:016x}")));
    assert_eq!(cluster.confirmed().await, Some(vec![SURVIVOR]));
    assert_eq!(code(cluster.put(&cluster.order(remove(b))).await), Code::OrderRefused);

    let view = cluster.admin.show_cluster(id).await.unwrap();
    assert_eq!(view.raft_cluster_id, Some(format!("{FIRST_RECOVERED_CLUSTER:016x}")));
    let recovered = view.timeline.iter().filter(|moment| moment.event == "recovered").count();
    assert_eq!((recovered, view.alarms.len()), (1, 0));
    cluster.service.stop().await;
}

#[tokio::test]
async fn after_a_recovery_tickets_and_orders_belong_to_the_recovered_cluster() {
    let cluster = CommittedCluster::of(3).await;
    let id = cluster.statement.cluster;
    let [a, b, c] = [0, 1, 2].map(|i| cluster.id(&cluster.agents[i]));
    let founded = cluster.raft_cluster();
    for who in [0, 1] {
        cluster.answer(founded, &cluster.agents[who], 70, &[a, b, c]).await.unwrap();
    }
    let survivor = &cluster.agents[0];
    // When the cluster is lost, three changes are pending: a learner, an order, and a redeemed
    // ticket that no agent has acted on.
    let learner = cluster.newcomer(7).await;
    let begun = learner.join().await.unwrap().intent;
    cluster.report_outcome(survivor, &begun, added(77), 12).await.unwrap();
    let ordered = cluster.put(&cluster.order(remove(c))).await.unwrap();
    let waits = cluster.newcomer(8).await;
    let waiting = waits.join().await.unwrap().intent;
    assert_eq!(waiting.intent.planned_at, Some(70));
    cluster.show(survivor, &[&cluster.first(survivor)]).await.unwrap();
    cluster.answer(FIRST_RECOVERED_CLUSTER, survivor, 2, &[SURVIVOR]).await.unwrap();

    let state = async |operation| {
        let view = cluster.admin.intent(id, operation, None).await.unwrap();
        (view.state, view.explain.first().map(|line| line.missing.clone()).unwrap_or_default())
    };
    let (stalled, why) = state(begun.intent.operation).await;
    assert!(stalled == IntentState::Stalled && why.contains("was lost"), "{stalled} {why}");
    let (refused, why) = state(ordered.intent.operation).await;
    assert!(refused == IntentState::Refused && why.contains("order again"), "{refused} {why}");
    assert_eq!(code(learner.client.renew_leaves(id, &learner.record.csr).await), Code::Forbidden);

    // The recovered cluster carries out the waiting ticket. Its configuration numbers start anew,
    // so the intent names none.
    let open = survivor.client.intents(id, None, false).await.unwrap().intents;
    let [open] = &open[..] else { panic!("{open:?}") };
    assert_eq!((open.intent.operation, open.intent.planned_at), (waiting.intent.operation, None));
    cluster.report_outcome(survivor, open, added(78), 20).await.unwrap();
    let second = MemberId::new(78);
    cluster.answer(FIRST_RECOVERED_CLUSTER, survivor, 5, &[SURVIVOR, second]).await.unwrap();
    assert_eq!(cluster.confirmed().await, Some(vec![SURVIVOR, second]));
    waits.client.renew_leaves(id, &waits.record.csr).await.unwrap();
    // The recovered cluster has two voters now, so its quorum is both of them.
    cluster.answer(FIRST_RECOVERED_CLUSTER, survivor, 8, &[SURVIVOR]).await.unwrap();
    assert_eq!(cluster.confirmed().await, Some(vec![SURVIVOR, second]));
    cluster.answer(FIRST_RECOVERED_CLUSTER, &waits, 8, &[SURVIVOR]).await.unwrap();
    assert_eq!(cluster.confirmed().await, Some(vec![SURVIVOR]));
    assert_eq!(code(waits.client.renew_leaves(id, &waits.record.csr).await), Code::Removed);

    // A new host may have a lost member's name, but not its incarnation.
    let again = cluster.newcomer(2).await;
    assert_eq!(again.record.name, cluster.agents[1].record.name);
    again.join().await.unwrap();
    let mut copied = cluster.newcomer(9).await;
    copied.record.incarnation = cluster.agents[1].record.incarnation;
    assert_eq!(code(copied.join().await), Code::Conflict);
    let planned = Order { planned_at: Some(8), ..cluster.order(remove(SURVIVOR)) };
    cluster.put(&planned).await.unwrap();
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_recovered_cluster_can_be_recovered_again_from_a_newcomers_host() {
    let cluster = CommittedCluster::of(1).await;
    let id = cluster.statement.cluster;
    let founder = &cluster.agents[0];
    let first = cluster.first(founder);
    cluster.show(founder, &[&first]).await.unwrap();
    cluster.answer(FIRST_RECOVERED_CLUSTER, founder, 2, &[SURVIVOR]).await.unwrap();
    let newcomer = cluster.newcomer(9).await;
    let intent = newcomer.join().await.unwrap().intent;
    cluster.report_outcome(founder, &intent, added(77), 12).await.unwrap();
    let second = cluster
        .recovery(FIRST_RECOVERED_CLUSTER, SECOND_RECOVERED_CLUSTER, &newcomer)
        .sign(&cluster.world.owner);
    // The chain of recovery statements must start at the founded cluster. Without the first
    // statement, the second one proves nothing.
    assert_eq!(code(cluster.show(&newcomer, &[&second]).await), Code::RecoveryRefused);
    let answer = cluster.show(&newcomer, &[&first, &second]).await.unwrap();
    assert_eq!(
        (answer.followed, answer.raft_cluster_id),
        (2, format!("{SECOND_RECOVERED_CLUSTER:016x}"))
    );
    let made = MemberId::new(SECOND_RECOVERED_CLUSTER + 0x1000);
    cluster.answer(SECOND_RECOVERED_CLUSTER, &newcomer, 2, &[made]).await.unwrap();
    assert_eq!(cluster.confirmed().await, Some(vec![made]));
    let leaves = newcomer.client.renew_leaves(id, &newcomer.record.csr).await.unwrap();
    let own = cluster.admin.intent(id, intent.intent.operation, None).await.unwrap();
    assert_eq!(own.state, IntentState::Promoted, "it is the only voter");
    let label = MemberId::new(77).to_string();
    assert!(names(&leaves.peer).iter().any(|name| name.contains(&label)));
    // The first survivor's host returns late and sends its shorter chain, which changes nothing.
    let refused = cluster.answer(FIRST_RECOVERED_CLUSTER, founder, 99, &[SURVIVOR]).await;
    assert_eq!(code(refused), Code::ClusterLost);
    assert_eq!(cluster.show(founder, &[&first]).await.unwrap().followed, 2);
    assert_eq!(cluster.confirmed().await, Some(vec![made]));
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_recovery_that_no_current_operator_signed_changes_nothing() {
    let cluster = CommittedCluster::of(3).await;
    let founded = cluster.raft_cluster();
    let [a, b, c] = [0, 1, 2].map(|i| cluster.id(&cluster.agents[i]));
    for who in [0, 1] {
        cluster.answer(founded, &cluster.agents[who], 70, &[a, b, c]).await.unwrap();
    }
    // One statement adds an operator, and the next statement removes it. So only the first of these
    // two statements names the operator.
    let operator = SigningKey::generate();
    let mut with = cluster.statement.clone();
    with.admins.push(discovery_types::admin::Admin {
        key: *operator.public(),
        name: "gone".parse().unwrap(),
        roles: vec![Role::Operator],
    });
    let owner = &cluster.world.owner;
    with = Statement { seq: 1, previous: Some(cluster.statement.sign(owner).hash()), ..with };
    let without = Statement {
        seq: 2,
        previous: Some(with.sign(owner).hash()),
        admins: cluster.statement.admins.clone(),
        ..with.clone()
    };
    for statement in [&with, &without] {
        let (id, signed) = (statement.cluster, statement.sign(owner));
        cluster.admin.put_statement(id, &signed).await.unwrap();
    }
    let survivor = &cluster.agents[0];
    let genuine = cluster.recovery(founded, FIRST_RECOVERED_CLUSTER, survivor);
    let dated_back = Recovery { statement: with.sign(owner).hash(), ..genuine.clone() };
    let mut elsewhere = genuine.clone();
    elsewhere.cluster = uuid::Uuid::now_v7();
    let gap = cluster.recovery(FIRST_RECOVERED_CLUSTER, SECOND_RECOVERED_CLUSTER, survivor);
    let same = Recovery { is: genuine.was.clone(), ..genuine.clone() };
    let stranger = Recovery { agent: *SigningKey::generate().public(), ..genuine.clone() };
    for (what, jws, expected) in [
        ("an agent", genuine.sign(&survivor.key), Code::RecoveryRefused),
        ("a stranger", genuine.sign(&SigningKey::generate()), Code::RecoveryRefused),
        ("an operator who has left", dated_back.sign(&operator), Code::RecoveryRefused),
        ("who never was one", genuine.sign(&operator), Code::RecoveryRefused),
        ("another cluster", elsewhere.sign(owner), Code::RecoveryRefused),
        ("a cluster that nobody founded", gap.sign(owner), Code::RecoveryRefused),
        ("nothing new", same.sign(owner), Code::RecoveryRefused),
        ("another host", stranger.sign(owner), Code::Forbidden),
    ] {
        assert_eq!(code(cluster.show(survivor, &[&jws]).await), expected, "{what}");
    }
    // The agent of another member can't submit this recovery statement, and neither can an unknown
    // agent.
    let genuine = genuine.sign(owner);
    let shown = cluster.show(&cluster.agents[1], &[&genuine]).await;
    assert_eq!(code(shown), Code::Forbidden);
    let outside = cluster.newcomer(9).await;
    assert!(cluster.show(&outside, &[&genuine]).await.is_err());
    let forged = cluster.answer(FIRST_RECOVERED_CLUSTER, survivor, 99, &[SURVIVOR]).await.unwrap();
    assert_eq!(forged.raft_cluster_id, Some(format!("{founded:016x}")));
    assert_eq!(cluster.confirmed().await, Some(vec![a, b, c]));
    assert!(cluster.alarms().await.is_empty());
    cluster.show(survivor, &[&genuine]).await.unwrap();
    cluster.service.stop().await;
}

#[tokio::test]
async fn of_two_recoveries_the_first_is_followed_and_an_alarm_names_the_other() {
    let cluster = CommittedCluster::of(3).await;
    let [one, two, three] = &cluster.agents[..] else { panic!("three agents") };
    let first = cluster.first(one);
    cluster.show(one, &[&first]).await.unwrap();
    cluster.answer(FIRST_RECOVERED_CLUSTER, one, 2, &[SURVIVOR]).await.unwrap();
    let founded = cluster.raft_cluster();
    let other = cluster.recovery(founded, 0xd1, two).sign(&cluster.world.owner);
    let longer = cluster.recovery(0xd1, 0xd2, two).sign(&cluster.world.owner);
    let third = cluster.recovery(founded, 0xe1, three).sign(&cluster.world.owner);
    for (agent, shown) in
        [(two, &[&other][..]), (two, &[&other, &longer]), (three, &[&third]), (two, &[&other])]
    {
        let error = cluster.show(agent, shown).await.unwrap_err();
        assert_eq!(error.code(), Some(Code::RecoveryContested), "{error}");
        let text = error.to_string();
        assert!(
            text.contains(&format!("{FIRST_RECOVERED_CLUSTER:016x}")) && text.contains("reset"),
            "{text}"
        );
    }
    assert_eq!(code(cluster.answer(0xd1, two, 99, &[SURVIVOR]).await), Code::ClusterLost);
    assert_eq!(cluster.confirmed().await, Some(vec![SURVIVOR]));
    let alarms = cluster.alarms().await;
    let [alarm] = &alarms[..] else { panic!("{alarms:?}") };
    assert!(alarm.contains("00000000000000d1") && alarm.contains("Keep one"), "{alarm}");
    let view = cluster.admin.show_cluster(cluster.statement.cluster).await.unwrap();
    let contests = view.timeline.iter().filter(|moment| moment.event == "recovery_contested");
    assert_eq!(contests.count(), 1, "the first of them is kept, and each one is logged");
    // The service already follows this recovery. Signed and sent again, it doesn't count as a
    // competing recovery.
    let again = cluster.first(one);
    assert_eq!(cluster.show(one, &[&again]).await.unwrap().followed, 1);
    cluster.service.stop().await;
}
