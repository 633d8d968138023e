//! Tests of clusters that expired and that their owner lets form after all.

use discovery_formation::memory::LedgerEntry;
use discovery_formation::service::EndCause;
use discovery_types::api::{ClusterState, ClusterSummary};
use discovery_types::approval::Approval;
use discovery_types::client::DiscoveryClient;
use discovery_types::problem::Code;
use discovery_types::statement::Statement;
use discovery_types::token::Token;
use uuid::Uuid;

use super::agent::{TestAgent, form, sign};
use super::support::{TestInstallation, wait_until};
use crate::server::RunningService;

/// Lets the deadline of every cluster pass, and waits until `cluster` has expired.
async fn expire(world: &TestInstallation, admin: &DiscoveryClient, cluster: Uuid) {
    sqlx::raw_sql("UPDATE clusters SET deadline_us = now_us() - 1, next_deadline_us = 1")
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    wait_until("the cluster expires", async || {
        summary(admin, cluster).await.state == ClusterState::Expired
    })
    .await;
}

async fn summary(admin: &DiscoveryClient, cluster: Uuid) -> ClusterSummary {
    admin.show_cluster(cluster).await.unwrap().summary
}

fn agents(
    world: &TestInstallation,
    service: &RunningService,
    (statement, token): (&Statement, &Token),
) -> Vec<TestAgent> {
    (1..=3).map(|i| TestAgent::new(world, service, statement, token, i)).collect()
}

/// The second process knows from its own ledger that the cluster expired, and decides the list.
#[tokio::test]
async fn an_expired_cluster_forms_after_its_owner_reopened_it() {
    let world = TestInstallation::new().await;
    let one = world.serve().await;
    let two = crate::server::start(world.args("ledger-2")).await.unwrap();
    let admin = world.owner(&one);
    let statement = world.cluster(&admin, "demo", 3).await;
    let (id, token) = (statement.cluster, world.token(&admin, &statement).await);
    let mut agents = agents(&world, &one, (&statement, &token));
    for agent in &agents {
        agent.redeem().await.unwrap();
    }
    // One agent has signed the list of epoch 1 when the deadline passes.
    let seen = agents[0].poll_until(|seen| seen.proposal.is_some()).await;
    agents[0].ack(&seen).await.unwrap();
    expire(&world, &admin, id).await;
    assert_eq!(agents[0].poll(None).await.unwrap_err().code(), Some(Code::Expired));
    let ended = admin.show_cluster(id).await.unwrap().ended.unwrap();
    assert!(ended.reopen_until_ms.unwrap() > ended.at_ms && ended.unretire_until_ms.is_none());
    wait_until("the second ledger knows the end", async || {
        two.app().store.ledger().entry(id).unwrap() == Some(LedgerEntry::End(EndCause::Deadline))
    })
    .await;

    let open = admin.reopen(id).await.unwrap();
    assert_eq!((open.state, open.name.as_str(), open.epoch), (ClusterState::Open, "demo", 2));
    let left_ms = open.deadline_at_ms.unwrap() - admin.service_now_ms();
    assert!((3_500_000..=3_600_000).contains(&left_ms), "{left_ms}");
    assert!(admin.show_cluster(id).await.unwrap().ended.is_none());
    for agent in &mut agents {
        agent.connect_to(&world, &two);
    }
    assert_eq!(form(&mut agents).await.state, ClusterState::Committed);
    for service in [&one, &two] {
        wait_until("each ledger knows the commit", async || {
            matches!(
                service.app().store.ledger().entry(id).unwrap(),
                Some(LedgerEntry::Commit { .. })
            )
        })
        .await;
    }
    assert_eq!(admin.reopen(id).await.unwrap_err().code(), Some(Code::WrongState));
    // A restart compares the ledgers with the database, and finds no contradiction.
    one.stop().await;
    two.stop().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    assert_eq!(summary(&admin, id).await.state, ClusterState::Committed);
    assert!(service.app().store.refresh_generation().await.unwrap().settled);
    service.stop().await;
}

/// The abandonment has to replace the expiry in the ledger. Otherwise a database that was set back
/// to the time before the end would form the abandoned cluster.
#[tokio::test]
async fn a_reopened_cluster_that_is_abandoned_stays_abandoned_in_a_restored_database() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let (id, token) = (statement.cluster, world.token(&admin, &statement).await);
    expire(&world, &admin, id).await;
    admin.reopen(id).await.unwrap();
    let backup = world.database.back_up().await;
    admin.abandon(id, "").await.unwrap();
    assert_eq!(admin.reopen(id).await.unwrap_err().code(), Some(Code::Abandoned));
    wait_until("the ledger knows the second end", async || {
        service.app().store.ledger().entry(id).unwrap() == Some(LedgerEntry::End(EndCause::Abandon))
    })
    .await;
    service.stop().await;
    world.database.replace_with(&backup).await;

    let service = world.serve().await;
    let admin = world.owner(&service);
    wait_until("the abandoned cluster has ended again", async || {
        summary(&admin, id).await.state == ClusterState::Abandoned
    })
    .await;
    let refused = agents(&world, &service, (&statement, &token))[0].redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::Abandoned));
    service.stop().await;
}

/// The backup was made after the reopening, so the cluster in it has a later deadline than the one
/// that passed.
#[tokio::test]
async fn a_reopened_cluster_stays_open_in_a_restored_database() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let id = statement.cluster;
    expire(&world, &admin, id).await;
    admin.reopen(id).await.unwrap();
    wait_until("the ledger knows the expiry", async || {
        service.app().store.ledger().entry(id).unwrap()
            == Some(LedgerEntry::End(EndCause::Deadline))
    })
    .await;
    let backup = world.database.back_up().await;
    service.stop().await;
    world.database.replace_with(&backup).await;

    let service = world.serve().await;
    let admin = world.owner(&service);
    let token = world.token(&admin, &statement).await;
    let mut agents = agents(&world, &service, (&statement, &token));
    for agent in &agents {
        agent.redeem().await.unwrap();
    }
    assert_eq!(sign(&mut agents).await.state, ClusterState::Committed);
    service.stop().await;
}

#[tokio::test]
async fn a_reopened_cluster_whose_name_was_taken_gets_a_part_of_its_id() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let first = world.cluster(&admin, "demo", 3).await.cluster;
    expire(&world, &admin, first).await;
    world.cluster(&admin, "demo", 3).await;
    let open = admin.reopen(first).await.unwrap();
    let id = first.to_string();
    assert_eq!(open.name.as_str(), format!("demo-{}", &id[id.len() - 8..]));
    service.stop().await;
}

/// The other agents wouldn't sign a list with a host whose token ended long ago.
#[tokio::test]
async fn a_reopened_cluster_refuses_a_token_that_ended_long_ago() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let (id, token) = (statement.cluster, world.token(&admin, &statement).await);
    let agents = agents(&world, &service, (&statement, &token));
    agents[0].redeem().await.unwrap();
    // Three hours later, the cluster's deadline and the token's expiry are past. So is the time
    // after the expiry in which lists still accept the token.
    sqlx::raw_sql(
        "CREATE OR REPLACE FUNCTION now_us() RETURNS bigint LANGUAGE sql VOLATILE AS
         $$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + 10800000000 $$",
    )
    .execute(&mut world.database.connect().await)
    .await
    .unwrap();
    wait_until("the cluster expires", async || {
        summary(&world.owner(&service), id).await.state == ClusterState::Expired
    })
    .await;
    world.owner(&service).reopen(id).await.unwrap();
    for agent in &agents[..2] {
        assert_eq!(agent.redeem().await.unwrap_err().code(), Some(Code::GrantExpired));
    }
    service.stop().await;
}

/// After a cluster has expired and is reopened, approved hosts are still approved. A token whose
/// seats were freed still gives no seat.
#[tokio::test]
async fn approvals_and_freed_seats_outlast_an_expiry() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let mut statement = world.draft(&admin, "demo", 2).await;
    statement.needs_approval = true;
    let id = statement.cluster;
    admin.put_statement(id, &statement.sign(&world.owner)).await.unwrap();
    let stolen = world.token(&admin, &statement).await;
    let thief = TestAgent::new(&world, &service, &statement, &stolen, 9);
    thief.redeem().await.unwrap();
    admin.revoke_grant_and_free_seats(stolen.id()).await.unwrap();
    let token = world.token(&admin, &statement).await;
    let agents = [1, 2].map(|i| TestAgent::new(&world, &service, &statement, &token, i));
    let approve = async |agent: &TestAgent| {
        let approval = Approval { cluster: id, agent: *agent.key.public() };
        admin.approve_host(id, &approval.sign(&world.owner)).await.unwrap();
    };
    for agent in &agents {
        agent.redeem().await.unwrap();
    }
    approve(&agents[0]).await;
    expire(&world, &admin, id).await;
    admin.reopen(id).await.unwrap();
    assert_eq!(thief.redeem().await.unwrap_err().code(), Some(Code::GrantRevoked));
    for agent in &agents {
        agent.redeem().await.unwrap();
    }
    // The first host is still approved. The second host's approval completes the list.
    assert!(agents[0].poll(None).await.unwrap().proposal.is_none());
    approve(&agents[1]).await;
    let seen = agents[0].poll_until(|seen| seen.proposal.is_some()).await;
    assert_eq!(seen.approvals.len(), 2);
    service.stop().await;
}
