//! Tests of a database that is set back to an older state while a service runs, and of its repair
//! from the ledger.

use std::sync::Arc;
use std::time::Duration;

use discovery_types::admin::{Admin, AdminChain, AdminOperation};
use discovery_types::api::{ClusterQuery, ClusterState};
use discovery_types::key::SigningKey;
use discovery_types::problem::Code;
use discovery_types::role::Role;
use uuid::Uuid;

use super::agent::{TestAgent, form};
use super::support::{
    TestInstallation, age_last_change, age_last_seen, stored_document, wait_for_value, wait_until,
    with_long_polls,
};
use crate::ledger::Ledger;
use crate::server::ServeArgs;

/// Arguments of a process that never sweeps. It compares ledger and database only at other times,
/// such as for a new connection.
fn args_without_sweeps(world: &TestInstallation) -> ServeArgs {
    let mut args = world.args("ledger");
    args.times.sweep = Duration::from_secs(3_600);
    args
}

/// Sets the tables back to their state before the first redeem. Connections stay open, as with
/// `pg_restore --clean`.
async fn set_tables_back(world: &TestInstallation, cluster: Uuid) {
    let sql = format!(
        "SET session_replication_role = replica;
         DELETE FROM leaves; DELETE FROM commits; DELETE FROM acks; DELETE FROM probes;
         DELETE FROM reports; DELETE FROM frozen_urls; DELETE FROM frozen_seats;
         DELETE FROM agents; DELETE FROM decisions;
         UPDATE clusters SET phase = 'open', epoch = 1, floor = 0, frozen_epoch = NULL,
             frozen_h = NULL, frozen_statement = NULL, frozen_us = NULL WHERE id = '{cluster}'"
    );
    let mut connection = world.database.connect().await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
}

async fn eventually_committed(
    world: &TestInstallation,
    cluster: Uuid,
) -> discovery_types::jws::Jws {
    wait_for_value("it is put back", async || stored_document(&world.database, cluster).await).await
}

#[tokio::test]
async fn tables_set_back_under_open_connections_freeze_no_second_list() {
    let world = TestInstallation::new().await;
    let service = crate::server::start(args_without_sweeps(&world)).await.unwrap();
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    form(&mut [TestAgent::new(&world, &service, &statement, &token, 1)]).await;
    let decided = stored_document(&world.database, statement.cluster).await.unwrap();

    set_tables_back(&world, statement.cluster).await;
    let other = TestAgent::new(&world, &service, &statement, &token, 2);
    let refused = other.redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::DatabaseChanged), "{refused}");
    assert!(refused.is_retryable());
    assert_eq!(eventually_committed(&world, statement.cluster).await, decided);
    service.stop().await;
}

#[tokio::test]
async fn a_database_that_was_set_back_ends_no_cluster_that_committed() {
    let world = TestInstallation::new().await;
    let service = crate::server::start(args_without_sweeps(&world)).await.unwrap();
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    form(&mut [TestAgent::new(&world, &service, &statement, &token, 1)]).await;
    set_tables_back(&world, statement.cluster).await;
    let refused = admin.abandon(statement.cluster, "nobody came").await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::DatabaseChanged), "{refused}");
    eventually_committed(&world, statement.cluster).await;
    service.stop().await;
}

/// The process has copied no decision from the database. Only the commit in the process's own
/// ledger shows that the database lacks that commit.
#[tokio::test]
async fn a_commit_that_was_not_copied_yet_is_put_back_into_the_database() {
    let world = TestInstallation::new().await;
    let service = crate::server::start(args_without_sweeps(&world)).await.unwrap();
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    world.database.keep_decisions_quiet().await;
    form(&mut [TestAgent::new(&world, &service, &statement, &token, 1)]).await;
    set_tables_back(&world, statement.cluster).await;
    let copied = service.app().store.ledger().known().unwrap().last_copied;
    assert_eq!(copied.number, 0);
    let refused = admin.abandon(statement.cluster, "nobody came").await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::DatabaseChanged), "{refused}");
    eventually_committed(&world, statement.cluster).await;
    service.stop().await;
}

#[tokio::test]
async fn the_last_ack_of_a_list_that_the_ledger_contradicts_commits_nothing() {
    let world = TestInstallation::new().await;
    let service = crate::server::start(args_without_sweeps(&world)).await.unwrap();
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let mut agent = TestAgent::new(&world, &service, &statement, &token, 1);
    let seen = agent.redeem().await.unwrap();
    // Add a commit to the ledger, as if this process had sent it out before the database was set
    // back.
    let ledger: &Ledger = service.app().store.ledger();
    let authority = crate::ledger::Authority { certificate: String::new(), wrapped_key: None };
    ledger
        .ensure_commit(crate::ledger::Commit {
            cluster_id: statement.cluster,
            h: "00".repeat(32),
            document: String::new(),
            statements: Vec::new(),
            peer_ca: authority.clone(),
            client_ca: authority,
        })
        .await
        .unwrap();
    let refused = agent.ack(&seen).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::DatabaseChanged), "{refused}");
    assert!(stored_document(&world.database, statement.cluster).await.is_none());
    service.stop().await;
}

/// Makes the database look as if its files had been restored on another server.
pub(super) async fn move_elsewhere(world: &TestInstallation) {
    sqlx::raw_sql("UPDATE generation SET system_identifier = '1'")
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
}

/// Starts and stops another process with its own ledger. Returns its id.
async fn run_another_process(world: &TestInstallation) -> Uuid {
    let two = crate::server::start(world.args("ledger-2")).await.unwrap();
    let process = two.app().store.ledger().process();
    two.stop().await;
    process
}

#[tokio::test]
async fn a_ledger_entry_that_cant_be_put_back_unsettles_the_database_only_once() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let authority = crate::ledger::Authority { certificate: String::new(), wrapped_key: None };
    let commit = crate::ledger::Commit {
        cluster_id: statement.cluster,
        h: "00".repeat(32),
        document: String::new(),
        statements: Vec::new(),
        peer_ca: authority.clone(),
        client_ca: authority,
    };
    service.app().store.ledger().ensure_commit(commit).await.unwrap();
    service.stop().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    wait_until("settled", async || admin.list_processes().await.unwrap().settled).await;
    let generation = admin.list_processes().await.unwrap().generation;
    let shown = admin.show_cluster(statement.cluster).await.unwrap().summary.state;
    assert_eq!(shown, ClusterState::Abandoned, "it can't form another list either");
    service.stop().await;
    let service = world.serve().await;
    let listed = world.owner(&service).list_processes().await.unwrap();
    assert_eq!((listed.settled, listed.generation), (true, generation));
    service.stop().await;
}

#[tokio::test]
async fn a_late_ledger_brings_an_abandoned_cluster_back_under_a_new_name() {
    let world = TestInstallation::new().await;
    let one = world.serve().await;
    let two = crate::server::start(world.args("ledger-2")).await.unwrap();
    let admin = world.owner(&one);
    let lost = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &lost).await;
    form(&mut [TestAgent::new(&world, &two, &lost, &token, 1)]).await;
    let decided = stored_document(&world.database, lost.cluster).await.unwrap();
    two.stop().await;
    one.stop().await;
    set_tables_back(&world, lost.cluster).await;
    move_elsewhere(&world).await;

    let one = world.serve().await;
    let admin = world.owner(&one);
    let accept = discovery_types::api::AcceptRequest { system_identifier: None };
    // The process knows from its ledger that the cluster committed, so it has closed the cluster
    // already.
    let abandoned = admin.accept_database(&accept).await.unwrap().abandoned;
    assert!(abandoned.is_empty(), "{abandoned:?}");
    let closed = admin.show_cluster(lost.cluster).await.unwrap().summary.state;
    assert_eq!(closed, ClusterState::Abandoned);
    let taken = world.cluster(&admin, "demo", 1).await;
    let two = crate::server::start(world.args("ledger-2")).await.unwrap();
    assert_eq!(eventually_committed(&world, lost.cluster).await, decided);
    let name = admin.show_cluster(lost.cluster).await.unwrap().summary.name;
    assert!(name.as_str().starts_with("demo-"), "{name}");
    let state = admin.show_cluster(taken.cluster).await.unwrap().summary.state;
    assert_eq!(state, ClusterState::Open);
    wait_until("settled", async || admin.list_processes().await.unwrap().settled).await;
    let generation = admin.list_processes().await.unwrap().generation;
    two.stop().await;
    let two = crate::server::start(world.args("ledger-2")).await.unwrap();
    let listed = world.owner(&two).list_processes().await.unwrap();
    assert_eq!((listed.settled, listed.generation), (true, generation));
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn a_token_from_before_the_database_was_set_back_admits_nobody() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let leaked = world.token(&admin, &statement).await;
    admin.revoke_grant(leaked.id()).await.unwrap();
    service.stop().await;
    sqlx::raw_sql("UPDATE grants SET revoked_us = NULL, revoked_by = NULL")
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    move_elsewhere(&world).await;

    let service = world.serve().await;
    let admin = world.owner(&service);
    wait_until("settled", async || admin.list_processes().await.unwrap().settled).await;
    let refused =
        TestAgent::new(&world, &service, &statement, &leaked, 1).redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::GrantVoid), "{refused}");
    let shown = admin.show_grant(leaked.id()).await.unwrap().state;
    assert_eq!(shown, discovery_types::api::GrantState::Void);
    let fresh = world.token(&admin, &statement).await;
    TestAgent::new(&world, &service, &statement, &fresh, 1).redeem().await.unwrap();
    service.stop().await;
}

#[tokio::test]
async fn an_old_token_has_to_be_confirmed_once_the_database_is_settled() {
    let world = TestInstallation::new().await;
    let absent = run_another_process(&world).await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let old = world.token(&admin, &statement).await;
    service.stop().await;
    age_last_seen(&world.database, absent).await;
    move_elsewhere(&world).await;
    let service = world.serve().await;
    let agent = TestAgent::new(&world, &service, &statement, &old, 1);
    let refused = agent.redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::DatabaseChanged), "{refused}");
    assert!(refused.is_retryable());
    age_last_change(&world.database).await;
    world.owner(&service).forget_process(absent).await.unwrap();
    // The running process learns that the database is settled when it next checks the database by
    // itself.
    let refused = wait_for_value("it is settled", async || {
        let refused = agent.redeem().await.unwrap_err();
        (refused.code() != Some(Code::DatabaseChanged)).then_some(refused)
    })
    .await;
    assert_eq!(refused.code(), Some(Code::GrantVoid), "{refused}");
    service.stop().await;
}

#[tokio::test]
async fn a_new_ticket_is_redeemed_only_once_the_database_is_settled() {
    let world = TestInstallation::new().await;
    let absent = run_another_process(&world).await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    form(&mut [TestAgent::new(&world, &service, &statement, &token, 1)]).await;
    service.stop().await;
    age_last_seen(&world.database, absent).await;
    move_elsewhere(&world).await;
    let service = world.serve().await;
    let ticket = world.ticket(&world.owner(&service), &statement).await;
    let newcomer = TestAgent::new(&world, &service, &statement, &ticket, 9);
    let refused = newcomer.join().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::DatabaseChanged), "{refused}");
    assert!(refused.is_retryable());
    age_last_change(&world.database).await;
    world.owner(&service).forget_process(absent).await.unwrap();
    newcomer.join().await.unwrap();
    service.stop().await;
}

#[tokio::test]
async fn a_revoked_admin_stays_revoked_in_a_database_that_lost_the_revocation() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let auditor = Arc::new(SigningKey::generate());
    let mut chain = AdminChain::root(world.owner.public());
    let named = Admin {
        key: *auditor.public(),
        name: "audrey".parse().unwrap(),
        roles: vec![Role::Auditor],
    };
    let add = chain.sign_next(&world.owner, AdminOperation::Add(named));
    chain.append(&add).unwrap();
    let revoke = chain.sign_next(&world.owner, AdminOperation::Revoke(*auditor.public()));
    admin.put_admin(&add).await.unwrap();
    admin.put_admin(&revoke).await.unwrap();
    service.stop().await;
    let mut connection = world.database.connect().await;
    sqlx::raw_sql(
        "SET session_replication_role = replica; DELETE FROM admin_elements WHERE sequence = 2",
    )
    .execute(&mut connection)
    .await
    .unwrap();

    let service = world.serve().await;
    let client = world.client(&service, Some(&auditor));
    let refused = client.list_clusters(&ClusterQuery::default()).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::UnknownKey), "{refused}");
    wait_until("the row is back", async || {
        let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM admin_elements")
            .fetch_one(&mut connection)
            .await
            .unwrap();
        rows == 2
    })
    .await;
    service.stop().await;
}

async fn damage_statements(world: &TestInstallation) {
    let sql = "SET session_replication_role = replica; UPDATE statements SET jws = 'x'";
    sqlx::raw_sql(sql).execute(&mut world.database.connect().await).await.unwrap();
}

#[tokio::test]
async fn a_cluster_whose_statements_were_damaged_can_still_be_abandoned() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let statement = world.cluster(&world.owner(&service), "demo", 1).await;
    service.stop().await;
    damage_statements(&world).await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let given_up = admin.abandon(statement.cluster, "damaged").await.unwrap();
    assert_eq!(given_up.state, ClusterState::Abandoned);
    world.cluster(&admin, "demo", 1).await;
    service.stop().await;
}

#[tokio::test]
async fn accepting_a_database_abandons_a_cluster_with_damaged_statements() {
    let world = TestInstallation::new().await;
    let two = crate::server::start(world.args("ledger-2")).await.unwrap();
    two.stop().await;
    let service = world.serve().await;
    let statement = world.cluster(&world.owner(&service), "demo", 1).await;
    service.stop().await;
    damage_statements(&world).await;
    move_elsewhere(&world).await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let store = &service.app().store;
    let number = store.refresh_generation().await.unwrap().number;
    let other = store.accept_generation(number - 1, "owner").await.unwrap();
    assert_eq!(other, None, "not the generation that was looked at");
    let accept = discovery_types::api::AcceptRequest { system_identifier: None };
    let accepted = admin.accept_database(&accept).await.unwrap();
    assert_eq!(accepted.abandoned, [statement.cluster]);
    assert!(admin.list_processes().await.unwrap().settled);
    service.stop().await;
}

#[tokio::test]
async fn a_waiting_poll_is_answered_when_the_database_becomes_settled() {
    let world = TestInstallation::new().await;
    let absent = run_another_process(&world).await;
    age_last_seen(&world.database, absent).await;
    move_elsewhere(&world).await;
    let service = crate::server::start(with_long_polls(world.args("ledger"))).await.unwrap();
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let agent = TestAgent::new(&world, &service, &statement, &token, 1);
    let rev = agent.redeem().await.unwrap().rev;
    let parked = service.app().poll_slots.clone();
    let settle = async {
        while parked.taken() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        age_last_change(&world.database).await;
        admin.forget_process(absent).await.unwrap();
    };
    let (news, ()) = tokio::join!(agent.poll(Some(rev)), settle);
    assert!(news.unwrap().rev > rev);
    service.stop().await;
}
