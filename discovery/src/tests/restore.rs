//! Tests of databases that are set back to an older state, moved, or changed by hand.

use discovery_types::api::{AcceptRequest, ClusterQuery, ClusterState};
use discovery_types::client::DiscoveryClient;
use discovery_types::problem::Code;
use uuid::Uuid;

use super::agent::{TestAgent, form, sign};
use super::support::{
    TestInstallation, age_last_change, age_last_seen, stored_document, wait_for_value, wait_until,
};
use crate::server::RunningService;

async fn state(admin: &DiscoveryClient, cluster: Uuid) -> ClusterState {
    admin.show_cluster(cluster).await.unwrap().summary.state
}

fn agents(
    world: &TestInstallation,
    service: &RunningService,
    statement: &discovery_types::statement::Statement,
    token: &discovery_types::token::Token,
    numbers: std::ops::RangeInclusive<u16>,
) -> Vec<TestAgent> {
    numbers.map(|i| TestAgent::new(world, service, statement, token, i)).collect()
}

#[tokio::test]
async fn a_backup_of_an_open_cluster_restored_after_the_commit_forms_no_second_one() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    let backup = world.database.back_up().await;
    let mut first = agents(&world, &service, &statement, &token, 1..=3);
    wait_for_value("the service has its database again", async || {
        admin.context().await.ok().filter(|_| true)
    })
    .await;
    form(&mut first).await;
    let decided = stored_document(&world.database, statement.cluster).await.unwrap();

    service.stop().await;
    world.database.replace_with(&backup).await;
    assert!(stored_document(&world.database, statement.cluster).await.is_none());
    let service = world.serve().await;
    let admin = world.owner(&service);
    let back = wait_for_value("the ledger is back", async || {
        (state(&admin, statement.cluster).await == ClusterState::Committed).then_some(())
    });
    back.await;
    assert_eq!(stored_document(&world.database, statement.cluster).await, Some(decided));
    let late = agents(&world, &service, &statement, &token, 4..=4).pop().unwrap();
    assert_eq!(late.redeem().await.unwrap_err().code(), Some(Code::BootClosed));
    // The service accepts the members' agents again, and returns their certificates.
    first[0].connect_to(&world, &service);
    let seen = first[0].poll(None).await.unwrap();
    assert!(seen.document.unwrap().leaves.is_some());
    service.stop().await;
}

#[tokio::test]
async fn a_backup_of_a_preparing_cluster_restored_after_the_commit_is_committed_again() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let mut members = agents(&world, &service, &statement, &token, 1..=2);
    for agent in &members {
        agent.redeem().await.unwrap();
    }
    members[0].poll_until(|seen| seen.proposal.is_some()).await;
    let backup = world.database.back_up().await;
    wait_for_value("the service has its database again", async || members[0].poll(None).await.ok())
        .await;
    sign(&mut members).await;
    let decided = stored_document(&world.database, statement.cluster).await.unwrap();

    // The service keeps running. Its connections end, and its next connection reaches the restored
    // database.
    world.database.replace_with(&backup).await;
    wait_for_value("the ledger is back", async || {
        let shown = admin.show_cluster(statement.cluster).await.ok()?;
        (shown.summary.state == ClusterState::Committed).then_some(())
    })
    .await;
    assert_eq!(stored_document(&world.database, statement.cluster).await, Some(decided));
    service.stop().await;
}

#[tokio::test]
async fn nothing_forms_until_every_known_process_has_put_its_ledger_back_or_is_forgotten() {
    let world = TestInstallation::new().await;
    let one = world.serve().await;
    let two = crate::server::start(world.args("ledger-2")).await.unwrap();
    let absent = two.app().store.ledger().process();
    let admin = world.owner(&one);
    let demo = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &demo).await;
    let backup = world.database.back_up().await;
    wait_for_value("the service has its database again", async || admin.context().await.ok()).await;
    let mut member = agents(&world, &one, &demo, &token, 1..=1);
    form(&mut member).await;
    one.stop().await;
    two.stop().await;
    world.database.replace_with(&backup).await;

    let one = world.serve().await;
    let admin = world.owner(&one);
    let other = world.cluster(&admin, "other", 1).await;
    let token = world.token(&admin, &other).await;
    let mut agent = agents(&world, &one, &other, &token, 2..=2).pop().unwrap();
    let waiting = agent.redeem().await.unwrap();
    assert_eq!(waiting.state, ClusterState::Open, "its one seat is taken, and it isn't frozen");
    assert!(
        waiting.explain.iter().any(|line| line.missing.contains(&absent.to_string())),
        "{:?}",
        waiting.explain
    );
    let ready = text_of(&world, &one, "/readyz").await;
    assert!(ready.contains("degraded") && ready.contains(&absent.to_string()), "{ready}");

    // The answering process restores its own ledger's entries in the background.
    wait_until("the answering process has put its ledger back", async || {
        let listed = admin.list_processes().await.unwrap();
        assert!(!listed.settled && listed.explain.is_some());
        listed.processes.iter().all(|process| process.missing == (process.id == absent))
    })
    .await;
    // The process was seen a moment ago, so it can't be forgotten yet.
    let refused = admin.forget_process(absent).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::WrongState));
    // A restored old dump would show an old last-seen time even for a running process. So a process
    // can be forgotten only a minute after the change of generation.
    age_last_seen(&world.database, absent).await;
    let refused = admin.forget_process(absent).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::WrongState), "{refused}");
    age_last_change(&world.database).await;
    let listed = admin.forget_process(absent).await.unwrap();
    assert!(listed.settled, "{listed:?}");
    let seen = agent.poll_until(|seen| seen.proposal.is_some()).await;
    assert_eq!(agent.ack(&seen).await.unwrap().state, ClusterState::Committed);
    assert_eq!(state(&admin, demo.cluster).await, ClusterState::Committed);
    one.stop().await;
}

#[tokio::test]
async fn accepting_a_database_from_another_server_abandons_and_revokes() {
    let world = TestInstallation::new().await;
    let one = world.serve().await;
    let two = crate::server::start(world.args("ledger-2")).await.unwrap();
    two.stop().await;
    let admin = world.owner(&one);
    let statement = world.cluster(&admin, "demo", 1).await;
    one.stop().await;
    // The database looks as if its files had been restored on another server.
    sqlx::query("UPDATE generation SET system_identifier = '1'")
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();

    let one = world.serve().await;
    let admin = world.owner(&one);
    let token = world.token(&admin, &statement).await;
    let agent = agents(&world, &one, &statement, &token, 1..=1).pop().unwrap();
    assert_eq!(agent.redeem().await.unwrap().state, ClusterState::Open);
    let wrong = AcceptRequest { system_identifier: Some("1".into()) };
    assert_eq!(admin.accept_database(&wrong).await.unwrap_err().code(), Some(Code::Conflict));
    let accepted = admin.accept_database(&AcceptRequest { system_identifier: None }).await.unwrap();
    assert_eq!(accepted.abandoned, [statement.cluster]);
    assert_eq!(accepted.revoked_tokens, 1);
    assert_eq!(agent.poll(None).await.unwrap_err().code(), Some(Code::Abandoned));
    let again = admin.accept_database(&AcceptRequest { system_identifier: None }).await;
    assert_eq!(again.unwrap_err().code(), Some(Code::WrongState));
    // New clusters can form in the accepted database.
    let next = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &next).await;
    let mut agent = agents(&world, &one, &next, &token, 1..=1);
    assert_eq!(form(&mut agent).await.state, ClusterState::Committed);
    one.stop().await;
}

#[tokio::test]
async fn a_listed_agent_can_show_the_document_to_a_database_that_lost_it() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let backup = world.database.back_up().await;
    wait_for_value("the service has its database again", async || admin.context().await.ok()).await;
    let mut member = agents(&world, &service, &statement, &token, 1..=1);
    let committed_answer = form(&mut member).await;
    service.stop().await;
    world.database.replace_with(&backup).await;
    // The new ledger is empty, so only the agent knows the commit.
    std::fs::remove_dir_all(world.folder.path().join("ledger")).unwrap();
    let service = world.serve().await;
    let admin = world.owner(&service);
    assert_eq!(state(&admin, statement.cluster).await, ClusterState::Open);

    let shown = committed_answer.document.unwrap();
    let adopt = discovery_types::api::AdoptRequest {
        cluster: statement.cluster,
        document: shown.document.clone(),
        statements: shown.statements.clone(),
    };
    let stranger = agents(&world, &service, &statement, &token, 9..=9).pop().unwrap();
    let refused = stranger.client.adopt(&adopt).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::Forbidden), "{refused}");
    member[0].connect_to(&world, &service);
    // The request has no access token, because the service gives one only to an agent that it
    // knows.
    let answer =
        send_raw(&world, &service, Some(&member[0]), "POST", "adopt", statement.cluster, &adopt);
    let (status, body) = answer.await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(state(&admin, statement.cluster).await, ClusterState::Committed);
    let seen = member[0].poll(None).await.unwrap();
    assert_eq!(seen.document.unwrap().document, shown.document);
    // Each request costs dozens of signature checks and needs no token, so there is a rate limit.
    let mut shown_again = 0;
    loop {
        let again = send_raw(
            &world,
            &service,
            Some(&member[0]),
            "POST",
            "adopt",
            statement.cluster,
            &adopt,
        );
        let (status, body) = again.await;
        if status == 429 {
            break assert!(body.contains("rate_limited"), "{body}");
        }
        assert_eq!(status, 200, "{body}");
        shown_again += 1;
        assert!(shown_again < 200, "nobody is held back");
    }
    service.stop().await;
}

#[tokio::test]
async fn a_cluster_whose_name_was_reused_comes_back_and_the_database_settles() {
    let world = TestInstallation::new().await;
    let one = world.serve().await;
    let admin = world.owner(&one);
    admin.list_clusters(&ClusterQuery::default()).await.unwrap();
    let backup = world.database.back_up().await;
    wait_for_value("the service has its database again", async || admin.context().await.ok()).await;
    let lost = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &lost).await;
    form(&mut agents(&world, &one, &lost, &token, 1..=1)).await;
    one.stop().await;
    world.database.replace_with(&backup).await;
    // While the first process is stopped, another process starts with its own ledger, and a new
    // cluster takes the lost cluster's name.
    let two = crate::server::start(world.args("ledger-2")).await.unwrap();
    let taken = world.cluster(&world.owner(&two), "demo", 1).await;
    two.stop().await;

    let one = world.serve().await;
    let admin = world.owner(&one);
    wait_for_value("the ledger is back", async || {
        let shown = admin.show_cluster(lost.cluster).await.ok()?;
        (shown.summary.state == ClusterState::Committed).then_some(())
    })
    .await;
    assert_eq!(state(&admin, taken.cluster).await, ClusterState::Open);
    let name = admin.show_cluster(lost.cluster).await.unwrap().summary.name;
    assert!(name.as_str().starts_with("demo-"), "{name}");
    let two = crate::server::start(world.args("ledger-2")).await.unwrap();
    let generation = wait_for_value("both ledgers are back", async || {
        let listed = admin.list_processes().await.ok()?;
        listed.settled.then_some(listed.generation)
    })
    .await;
    // After a restart, new connections find no further difference between database and ledger.
    one.stop().await;
    two.stop().await;
    let one = world.serve().await;
    let listed = world.owner(&one).list_processes().await.unwrap();
    assert_eq!((listed.settled, listed.generation), (true, generation));
    one.stop().await;
}

#[tokio::test]
async fn a_late_ledger_with_a_commit_of_an_abandoned_cluster_unsettles_nothing() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let backup = world.database.back_up().await;
    wait_for_value("the service has its database again", async || admin.context().await.ok()).await;
    form(&mut agents(&world, &service, &statement, &token, 1..=1)).await;
    let gone = service.app().store.ledger().process();
    service.stop().await;
    world.database.replace_with(&backup).await;
    // Another process runs with its own ledger, and an owner forgets the first process.
    let two = crate::server::start(world.args("ledger-2")).await.unwrap();
    age_last_seen(&world.database, gone).await;
    age_last_change(&world.database).await;
    world.owner(&two).forget_process(gone).await.unwrap();
    wait_for_value("settled", async || {
        world.owner(&two).list_processes().await.ok().filter(|listed| listed.settled)
    })
    .await;
    world.owner(&two).abandon(statement.cluster, "nobody came").await.unwrap();
    two.stop().await;
    let service = world.serve().await;
    let listed = world.owner(&service).list_processes().await.unwrap();
    assert!(listed.settled, "{listed:?}");
    assert_eq!(state(&world.owner(&service), statement.cluster).await, ClusterState::Abandoned);
    service.stop().await;
}

async fn text_of(world: &TestInstallation, service: &RunningService, path: &str) -> String {
    super::support::get(world, service, path).await.1
}

async fn send_raw(
    world: &TestInstallation,
    service: &RunningService,
    agent: Option<&TestAgent>,
    method: &str,
    what: &str,
    cluster: Uuid,
    body: &impl serde::Serialize,
) -> (u16, String) {
    let path = format!("/v1/clusters/{cluster}/{what}");
    let key = agent.map(|agent| &*agent.key);
    super::support::send(world, service, key, method, &path, serde_json::to_string(body).unwrap())
        .await
}

#[tokio::test]
async fn the_database_refuses_changes_that_could_make_a_second_cluster() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let mut members = agents(&world, &service, &statement, &token, 1..=2);
    form(&mut members).await;
    let mut connection = world.database.connect().await;
    for sql in [
        "UPDATE commits SET h = h",
        "DELETE FROM commits",
        "TRUNCATE commits CASCADE",
        "UPDATE events SET body = ''",
        "DELETE FROM events",
        "TRUNCATE events",
        "UPDATE statements SET jws = ''",
        "DELETE FROM statements",
        "DELETE FROM frozen_seats",
        "UPDATE frozen_seats SET name = 'x' WHERE seat = 1",
        "UPDATE clusters SET phase = 'open', frozen_h = NULL, frozen_epoch = NULL,
             frozen_statement = NULL, frozen_us = NULL",
        "UPDATE clusters SET frozen_h = sha256('x')",
        "UPDATE clusters SET epoch = epoch - 1",
        "UPDATE clusters SET size = 3",
        "UPDATE agents SET seat = 1",
        "UPDATE agents SET seat = 3",
        "UPDATE agents SET standby = 1 WHERE seat = 1",
        "INSERT INTO commits SELECT * FROM commits",
    ] {
        let done = sqlx::raw_sql(sql).execute(&mut connection).await;
        assert!(done.is_err(), "{sql}");
    }
    let broken: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM (SELECT hash <> event_hash(e) OR previous <> coalesce(
             lag(hash) OVER (PARTITION BY stream ORDER BY number), decode(repeat('00', 32), 'hex'))
             AS broken FROM events e) chain WHERE broken",
    )
    .fetch_one(&mut connection)
    .await
    .unwrap();
    assert_eq!(broken, 0, "the chain of events is whole");
    service.stop().await;
}

#[tokio::test]
async fn a_commit_without_all_acks_is_refused_by_the_database_itself() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let mut members = agents(&world, &service, &statement, &token, 1..=2);
    for agent in &members {
        agent.redeem().await.unwrap();
    }
    let seen = members[0].poll_until(|seen| seen.proposal.is_some()).await;
    members[0].ack(&seen).await.unwrap();
    let refused = sqlx::raw_sql(
        "INSERT INTO commits SELECT id, frozen_epoch, frozen_h, 'x', false, 0 FROM clusters",
    )
    .execute(&mut world.database.connect().await)
    .await
    .unwrap_err();
    assert!(refused.to_string().contains("1 of 2 members have signed"), "{refused}");
    service.stop().await;
}

#[tokio::test]
async fn a_cluster_with_a_record_changed_by_hand_can_only_be_abandoned() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let members = agents(&world, &service, &statement, &token, 1..=2);
    members[0].redeem().await.unwrap();
    // Replace the first agent's record in the database by the second agent's record, which has
    // valid signatures.
    let forged = members[1].record.sign(&members[1].key, token.key());
    sqlx::query("UPDATE agents SET record = $1, token_record = $2")
        .bind(forged.record.as_str())
        .bind(forged.endorsement.as_str())
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    let refused = members[1].redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::Internal));
    assert!(refused.to_string().contains("can't be"), "{refused}");
    let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM agents")
        .fetch_one(&mut world.database.connect().await)
        .await
        .unwrap();
    assert_eq!(rows, 1, "nothing was consumed");
    let given_up = admin.abandon(statement.cluster, "its rows were changed by hand").await.unwrap();
    assert_eq!(given_up.state, ClusterState::Abandoned);
    service.stop().await;
}

#[tokio::test]
async fn a_frozen_list_changed_by_hand_stops_its_cluster() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let mut members = agents(&world, &service, &statement, &token, 1..=2);
    for member in &members {
        member.redeem().await.unwrap();
    }
    let seen = members[0].poll_until(|seen| seen.proposal.is_some()).await;
    sqlx::raw_sql("UPDATE clusters SET frozen_h = sha256('another list')")
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    for refused in [members[0].ack(&seen).await, members[1].poll(None).await] {
        assert_eq!(refused.unwrap_err().code(), Some(Code::Internal));
    }
    service.stop().await;
}
