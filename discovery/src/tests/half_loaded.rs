//! Tests of a dump that is loaded while services run. The services must write nothing before the
//! dump is loaded completely.

use std::time::Duration;

use discovery_types::api::{ClusterQuery, ClusterState};

use super::support::{TestDatabase, TestInstallation, file_of, wait_until};
use crate::server::start;

/// Time in which the services sweep and connect many times.
const OBSERVATION_TIME: Duration = Duration::from_millis(1_500);

async fn generation(world: &TestInstallation) -> i64 {
    sqlx::query_scalar("SELECT number FROM generation")
        .fetch_one(&mut world.database.connect().await)
        .await
        .unwrap()
}

/// Loads a dump, except for the item whose line in the dump's table of contents contains `last`.
/// Returns that line.
async fn load_all_but(world: &TestInstallation, dump: &[u8], last: &str) -> String {
    let parts = TestDatabase::parts(dump);
    let (rest, first): (Vec<&str>, Vec<&str>) = parts.lines().partition(|line| line.contains(last));
    assert_eq!(rest.len(), 1, "{rest:?}");
    world.database.make_anew().await;
    let list = file_of(first.join("\n").as_bytes());
    world.database.restore(dump, &["--use-list", list.path().to_str().unwrap()]);
    rest[0].to_owned()
}

#[tokio::test]
async fn a_running_service_leaves_a_half_loaded_database_alone() {
    let world = TestInstallation::before_first_start().await;
    let service = start(world.args("ledger")).await.unwrap();
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let dump = world.database.dump();

    let last = load_all_but(&world, &dump, " ends_are_numbered ").await;
    tokio::time::sleep(OBSERVATION_TIME).await;
    assert_eq!(generation(&world).await, 1, "it has written into a half-loaded database");
    assert!(admin.list_clusters(&ClusterQuery::default()).await.is_err());
    let list = file_of(last.as_bytes());
    world.database.restore(&dump, &["--use-list", list.path().to_str().unwrap()]);
    wait_until("it is settled", async || {
        admin.list_processes().await.is_ok_and(|listed| listed.settled)
    })
    .await;
    assert_eq!(generation(&world).await, 2, "a dump was loaded");
    let state = admin.show_cluster(statement.cluster).await.unwrap().summary.state;
    assert_eq!(state, ClusterState::Open);
    service.stop().await;
}

#[tokio::test]
async fn a_service_that_starts_leaves_a_half_loaded_database_alone() {
    let world = TestInstallation::before_first_start().await;
    let service = start(world.args("ledger")).await.unwrap();
    service.stop().await;
    let dump = world.database.dump();
    load_all_but(&world, &dump, " ends_are_numbered ").await;
    let refused = start(world.args("ledger")).await.err().expect("it doesn't start");
    assert_eq!(refused.exit_code(), 1, "{refused}");
    assert_eq!(generation(&world).await, 1);
}
