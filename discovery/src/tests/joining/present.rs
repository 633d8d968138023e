//! Tests of the present members, silent members, hosts that ask for a seat, and retirements.

use std::time::Duration;

use discovery_types::api::{
    ClusterQuery, ClusterState, IntentState, MembersView, RELEASED, SILENT_AFTER, WaitRequest,
};
use discovery_types::csr::Csr;
use discovery_types::digest::MemberId;
use discovery_types::jws::Jws;
use discovery_types::problem::Code;
use discovery_types::retire::{Retire, Unretire};

use super::{CommittedCluster, added, code, remove};
use crate::server::RunningService;
use crate::store::counts::SilentMembersCount;
use crate::tests::agent::TestAgent;

/// Makes the service believe that agents could report to it for more than [`SILENT_AFTER`]. Before
/// that time it calls no member silent.
fn listen(service: &RunningService) {
    service.app().clock.pretend_listening_for(SILENT_AFTER + Duration::from_secs(60));
}

/// Moves these members' reports into the past, so that the members count as silent.
pub(super) async fn silence(cluster: &CommittedCluster, agents: &[usize]) {
    listen(&cluster.service);
    let mut connection = cluster.world.database.connect().await;
    let us = SILENT_AFTER.as_micros() as i64 + 1_000_000;
    for agent in agents {
        let member = cluster.id(&cluster.agents[*agent]);
        sqlx::query("UPDATE directory_reports SET at_us = at_us - $1 WHERE member_id = $2")
            .bind(us)
            .bind(&member.0[..])
            .execute(&mut connection)
            .await
            .unwrap();
    }
}

async fn present(cluster: &CommittedCluster) -> MembersView {
    cluster.admin.show_cluster(cluster.statement.cluster).await.unwrap().present
}

async fn codes(cluster: &CommittedCluster) -> Vec<String> {
    let told = cluster.admin.explain(cluster.statement.cluster).await.unwrap();
    told.explain.into_iter().map(|line| line.code).collect()
}

pub(super) async fn report_all(
    cluster: &CommittedCluster,
    configuration: u64,
    members: &[(MemberId, bool)],
) {
    for agent in &cluster.agents {
        let index = configuration + 10;
        cluster.report(agent, Some(configuration), index, members).await.unwrap();
    }
}

/// A new host with the founders' boot token.
fn late_host(cluster: &CommittedCluster, number: u16) -> TestAgent {
    let CommittedCluster { world, service, statement, token, .. } = cluster;
    TestAgent::new(world, service, statement, token, number)
}

pub(super) fn founders(cluster: &CommittedCluster) -> Vec<(MemberId, bool)> {
    cluster.agents.iter().map(|agent| (cluster.id(agent), false)).collect()
}

pub(super) fn retire(cluster: &CommittedCluster, force: bool) -> Jws {
    let retire = Retire {
        cluster: cluster.statement.cluster,
        statement: cluster.chain().newest_hash(),
        reason: "moved".into(),
        force,
    };
    retire.sign(&cluster.world.owner)
}

fn unretire(cluster: &CommittedCluster, retired_at_ms: i64) -> Jws {
    let unretire = Unretire {
        cluster: cluster.statement.cluster,
        statement: cluster.chain().newest_hash(),
        retired_at_ms,
    };
    unretire.sign(&cluster.world.owner)
}

#[tokio::test]
async fn silent_voters_and_a_lost_majority_are_explained_and_counted_in_the_list() {
    let cluster = CommittedCluster::of(3).await;
    report_all(&cluster, 3, &founders(&cluster)).await;
    assert!(codes(&cluster).await.is_empty());
    assert!(present(&cluster).await.members.iter().all(|member| member.is_healthy()));
    let list = async || {
        cluster.admin.list_clusters(&ClusterQuery::default()).await.unwrap().clusters.remove(0)
    };
    assert_eq!((list().await.members, list().await.heard), (Some(3), Some(3)));

    silence(&cluster, &[1]).await;
    assert_eq!(codes(&cluster).await, ["member_silent"]);
    let told = cluster.admin.explain(cluster.statement.cluster).await.unwrap();
    let command = told.explain[0].command.clone().unwrap();
    assert!(command.contains("token create --cluster demo --kind join --replace"), "{command}");
    assert_eq!(list().await.heard, Some(2));

    silence(&cluster, &[2]).await;
    assert_eq!(codes(&cluster).await, ["no_quorum", "member_silent", "member_silent"]);
    let told = cluster.admin.explain(cluster.statement.cluster).await.unwrap();
    assert!(told.explain[0].command.as_ref().unwrap().contains("recover"));
    assert_eq!(list().await.heard, Some(1));
    cluster.service.stop().await;
}

#[tokio::test]
async fn silent_members_are_counted_for_the_metrics_without_released_ones() {
    let cluster = CommittedCluster::of(3).await;
    report_all(&cluster, 3, &founders(&cluster)).await;
    sqlx::query("UPDATE clusters SET frozen_us = frozen_us - $1")
        .bind(SILENT_AFTER.as_micros() as i64 + 1_000_000)
        .execute(&mut cluster.world.database.connect().await)
        .await
        .unwrap();
    let app = cluster.service.app();
    let count = async || {
        app.count_silent_members(&mut SilentMembersCount::default()).await.unwrap();
        app.metrics.silent_members.get()
    };
    assert_eq!(count().await, 0);
    silence(&cluster, &[1, 2]).await;
    assert_eq!(count().await, 2);
    let tell = async |agent: &TestAgent, detail: &str| {
        let (session, detail) = (agent.session(), detail.to_owned());
        let trouble = discovery_types::api::TroubleRequest { session, h: cluster.h, detail };
        agent.client.report_missing_leader(cluster.statement.cluster, &trouble).await.unwrap();
    };
    tell(&cluster.agents[1], "the node has no leader").await;
    assert_eq!(count().await, 1, "its agent reports");
    tell(&cluster.agents[2], RELEASED).await;
    sqlx::query("UPDATE member_troubles SET at_us = at_us - $1")
        .bind(SILENT_AFTER.as_micros() as i64 + 500_000)
        .execute(&mut cluster.world.database.connect().await)
        .await
        .unwrap();
    assert_eq!(count().await, 1, "a released member has no agent that could report");
    cluster.service.stop().await;
}

#[tokio::test]
async fn members_that_disagree_or_have_no_leader_are_explained_as_such() {
    let cluster = CommittedCluster::of(3).await;
    let all = founders(&cluster);
    report_all(&cluster, 3, &all).await;
    cluster.report(&cluster.agents[2], Some(9), 30, &all[..1]).await.unwrap();
    assert_eq!(codes(&cluster).await, ["member_disagrees"]);
    let trouble = discovery_types::api::TroubleRequest {
        session: cluster.agents[2].session(),
        h: cluster.h,
        detail: "the node has no leader".into(),
    };
    let id = cluster.statement.cluster;
    cluster.agents[2].client.report_missing_leader(id, &trouble).await.unwrap();
    assert_eq!(codes(&cluster).await, ["member_without_leader"]);
    let third = cluster.id(&cluster.agents[2]);
    let members = present(&cluster).await.members;
    let shown = members.iter().find(|member| member.id == third).unwrap();
    assert_eq!(shown.last_error.as_deref(), Some("the node has no leader"));
    cluster.report(&cluster.agents[2], Some(9), 31, &all).await.unwrap();
    assert!(present(&cluster).await.members.iter().all(|member| member.last_error.is_none()));
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_member_that_never_reported_is_explained() {
    let cluster = CommittedCluster::of(3).await;
    let all = founders(&cluster);
    for agent in &cluster.agents[..2] {
        cluster.report(agent, Some(3), 13, &all).await.unwrap();
    }
    assert!(codes(&cluster).await.is_empty(), "it has just been committed");
    let mut connection = cluster.world.database.connect().await;
    sqlx::query("UPDATE clusters SET frozen_us = frozen_us - $1")
        .bind(SILENT_AFTER.as_micros() as i64 + 1_000_000)
        .execute(&mut connection)
        .await
        .unwrap();
    listen(&cluster.service);
    assert_eq!(codes(&cluster).await, ["member_never_heard"]);
    cluster.service.stop().await;
}

#[tokio::test]
async fn credentials_list_the_current_members_with_silent_ones_last() {
    let cluster = CommittedCluster::of(3).await;
    let id = cluster.statement.cluster;
    let [a, b, c] = [0, 1, 2].map(|at| cluster.id(&cluster.agents[at]));
    report_all(&cluster, 3, &[(a, false), (b, false), (c, false)]).await;
    let endpoints = async || {
        let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        let answer = cluster.admin.issue_credentials(id, &Csr::new(&pair)).await.unwrap();
        answer.endpoints.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let of = |agent: &TestAgent| agent.record.client_urls[0].to_string();
    let [first, second, third] = [0, 1, 2].map(|at| of(&cluster.agents[at]));
    assert_eq!(endpoints().await.len(), 3);
    // A newcomer takes the third member's place in the confirmed list.
    let newcomer = cluster.newcomer(9).await;
    let intent = newcomer.join().await.unwrap().intent;
    cluster.report_outcome(&cluster.agents[0], &intent, added(77), 20).await.unwrap();
    let now = [(a, false), (b, false), (MemberId::new(77), false)];
    for agent in &cluster.agents[..2] {
        cluster.report(agent, Some(7), 21, &now).await.unwrap();
    }
    cluster.report(&newcomer, Some(7), 21, &now).await.unwrap();
    let shown = endpoints().await;
    assert!(shown.contains(&of(&newcomer)) && !shown.contains(&third), "{shown:?}");
    silence(&cluster, &[0]).await;
    let shown = endpoints().await;
    assert_eq!(shown.last(), Some(&first), "{shown:?}");
    assert!(shown.contains(&second), "{shown:?}");
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_late_host_with_a_boot_token_is_listed_and_told_that_it_needs_a_ticket() {
    let cluster = CommittedCluster::of(1).await;
    let id = cluster.statement.cluster;
    let late = late_host(&cluster, 9);
    let refused = late.redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::BootClosed));
    let text = refused.to_string();
    let command = "token create --cluster demo --kind join --replace";
    assert!(text.contains(command) && text.contains("--wait-for-ticket"), "{text}");
    let _ = late.redeem().await.unwrap_err();
    let shown = cluster.admin.show_cluster(id).await.unwrap();
    let [asking] = &shown.asking[..] else { panic!("{:?}", shown.asking) };
    assert_eq!((asking.name.as_str(), asking.times), ("node-9", 2));
    assert_eq!((asking.agent, asking.source.as_str()), (late.key.key_id(), "127.0.0.1"));
    assert!(codes(&cluster).await.contains(&"asking".to_owned()));
    // Of many hosts that ask for a seat, only the newest are kept.
    for number in 10..30 {
        let _ = late_host(&cluster, number).redeem().await.unwrap_err();
    }
    let shown = cluster.admin.show_cluster(id).await.unwrap();
    assert_eq!(shown.asking.len(), 16);
    assert_eq!(shown.asking[0].name, "node-29");
    // A host that redeems a ticket disappears from the list of hosts that ask for a seat.
    let newcomer = cluster.newcomer(29).await;
    newcomer.join().await.unwrap();
    let shown = cluster.admin.show_cluster(id).await.unwrap();
    assert!(shown.asking.iter().all(|host| host.name != "node-29"), "{:?}", shown.asking);
    cluster.service.stop().await;
}

#[tokio::test]
async fn the_reason_why_an_intent_waits_is_shown_with_its_reporter_and_member() {
    let cluster = CommittedCluster::of(3).await;
    let all = founders(&cluster);
    report_all(&cluster, 3, &all).await;
    let about = all[1].0;
    let intent = cluster.put(&cluster.order(remove(about))).await.unwrap();
    assert_eq!((intent.about, intent.waits.as_ref()), (Some(about), None));
    let name = intent.about_name.clone().unwrap();
    let (id, operation) = (cluster.statement.cluster, intent.intent.operation);
    let client = &cluster.agents[0].client;
    let wait = WaitRequest { reason: "etcdserver: unhealthy cluster".into() };
    let shown = client.report_wait(id, operation, &wait).await.unwrap();
    assert!(shown.rev > intent.rev, "whoever waits for news hears of it");
    let waits = shown.waits.unwrap();
    assert_eq!(
        (waits.reason.as_str(), waits.by.as_str()),
        ("etcdserver: unhealthy cluster", "node-1")
    );
    let line = &shown.explain[0];
    assert!(line.missing.contains(&name) && line.missing.contains("unhealthy cluster"), "{line}");
    assert_eq!(shown.state, IntentState::Open);
    // Reporting the same reason again doesn't change the change counter in the intent.
    let again = client.report_wait(id, operation, &wait).await.unwrap();
    assert_eq!(again.rev, shown.rev);
    let stranger = cluster.newcomer(9).await;
    stranger.join().await.unwrap();
    assert_eq!(code(stranger.client.report_wait(id, operation, &wait).await), Code::Forbidden);
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_reporting_cluster_is_retired_only_by_force_and_can_be_unretired() {
    let cluster = CommittedCluster::of(3).await;
    let id = cluster.statement.cluster;
    report_all(&cluster, 3, &founders(&cluster)).await;
    let before = cluster.admin.show_cluster(id).await.unwrap();
    assert_eq!(before.summary.state, ClusterState::Formed);
    assert_eq!(code(cluster.admin.retire(id, &retire(&cluster, false)).await), Code::MembersReport);
    let retired = cluster.admin.retire(id, &retire(&cluster, true)).await.unwrap();
    assert_eq!(retired.state, ClusterState::Retired);
    assert_eq!(code(cluster.agents[0].poll(None).await), Code::Retired);
    let ended = cluster.admin.show_cluster(id).await.unwrap().ended.unwrap();
    assert!(ended.unretire_until_ms.unwrap() > ended.at_ms);

    // Undoing a retirement needs an owner's signature that names the time of this retirement.
    let forged = Unretire {
        cluster: id,
        statement: cluster.chain().newest_hash(),
        retired_at_ms: ended.at_ms,
    };
    let forged = forged.sign(&discovery_types::key::SigningKey::generate());
    assert_eq!(code(cluster.admin.unretire(id, &forged).await), Code::StatementRefused);
    let other = unretire(&cluster, ended.at_ms - 1);
    assert_eq!(code(cluster.admin.unretire(id, &other).await), Code::Conflict);
    let back = cluster.admin.unretire(id, &unretire(&cluster, ended.at_ms)).await.unwrap();
    assert_eq!((back.state, &back.name), (ClusterState::Formed, &before.summary.name));
    let after = cluster.admin.show_cluster(id).await.unwrap();
    assert_eq!((after.document, after.raft_cluster_id), (before.document, before.raft_cluster_id));
    assert_eq!(after.ended, None);
    let seen = cluster.agents[0].poll(None).await.unwrap();
    assert_eq!(cluster.agents[0].document(&seen).hash(), cluster.h);
    // A boot token gives no seat in a cluster whose retirement was undone.
    let late = late_host(&cluster, 9);
    assert_eq!(code(late.redeem().await), Code::BootClosed);
    cluster.service.stop().await;
}

#[tokio::test]
async fn silent_members_allow_a_retirement_and_a_reused_name_is_not_taken_back() {
    let cluster = CommittedCluster::of(3).await;
    let id = cluster.statement.cluster;
    report_all(&cluster, 3, &founders(&cluster)).await;
    silence(&cluster, &[0, 1, 2]).await;
    cluster.admin.retire(id, &retire(&cluster, false)).await.unwrap();
    let taker = cluster.world.cluster(&cluster.admin, "demo", 1).await;
    let ended = cluster.admin.show_cluster(id).await.unwrap().ended.unwrap();
    let back = cluster.admin.unretire(id, &unretire(&cluster, ended.at_ms)).await.unwrap();
    assert_eq!(back.state, ClusterState::Formed);
    assert!(back.name.as_str().starts_with("demo-"), "{}", back.name);
    let taken = cluster.admin.show_cluster(taker.cluster).await.unwrap();
    assert_eq!(taken.summary.name.as_str(), "demo");
    cluster.service.stop().await;
}

/// The service was down for so long that each report is old. Then the service must not call the
/// members silent.
#[tokio::test]
async fn members_that_could_not_report_are_awaited_and_not_called_silent() {
    let cluster = CommittedCluster::of(3).await;
    let id = cluster.statement.cluster;
    report_all(&cluster, 3, &founders(&cluster)).await;
    silence(&cluster, &[0, 1, 2]).await;
    assert_eq!(codes(&cluster).await.first().map(String::as_str), Some("no_quorum"));
    cluster.service.app().clock.pretend_listening_for(Duration::from_secs(1));
    assert_eq!(codes(&cluster).await, ["members_awaited"]);
    assert!(present(&cluster).await.members.iter().all(|member| !member.is_healthy()));
    let refused = cluster.admin.retire(id, &retire(&cluster, false)).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::MembersReport), "{refused}");
    assert!(refused.to_string().contains("could not report"), "{refused}");
    // One of the members reports.
    cluster.report(&cluster.agents[0], Some(3), 50, &founders(&cluster)).await.unwrap();
    let told = cluster.admin.explain(id).await.unwrap().explain.remove(0);
    assert_eq!((told.code.as_str(), told.held_by.len()), ("members_awaited", 2));
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_retirement_cant_be_undone_after_a_week() {
    let cluster = CommittedCluster::of(1).await;
    let id = cluster.statement.cluster;
    cluster.admin.retire(id, &retire(&cluster, true)).await.unwrap();
    let mut connection = cluster.world.database.connect().await;
    sqlx::query("UPDATE clusters SET ended_us = ended_us - 7 * 86400000000::bigint - 1000000")
        .execute(&mut connection)
        .await
        .unwrap();
    let ended = cluster.admin.show_cluster(id).await.unwrap().ended.unwrap();
    assert_eq!(ended.unretire_until_ms, None);
    let late = cluster.admin.unretire(id, &unretire(&cluster, ended.at_ms)).await;
    assert_eq!(code(late), Code::WrongState);
    cluster.service.stop().await;
}
