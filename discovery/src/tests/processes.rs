//! Tests of the list of processes. An owner uses it to decide whether to have a process forgotten.

use discovery_types::api::ProcessView;
use discovery_types::client::DiscoveryClient;
use discovery_types::problem::Code;

use super::agent::{TestAgent, form};
use super::support::{TestInstallation, wait_until};
use crate::server::{RunningService, start};

async fn row(admin: &DiscoveryClient, service: &RunningService) -> ProcessView {
    let id = service.app().store.ledger().process();
    let list = admin.list_processes().await.unwrap();
    list.processes.into_iter().find(|process| process.id == id).unwrap()
}

#[tokio::test]
async fn the_commits_of_each_ledger_are_counted_without_a_sweep() {
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    // Prevent further sweeps, because a sweep would correct a wrong number of commits.
    args.times.sweep = std::time::Duration::from_secs(3_600);
    let one = start(args.clone()).await.unwrap();
    args.ledger = world.folder.path().join("ledger-2");
    let two = start(args.clone()).await.unwrap();
    let admin = world.owner(&one);
    assert_eq!(row(&admin, &one).await.ledger_entries, 0);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    form(&mut [TestAgent::new(&world, &one, &statement, &token, 1)]).await;
    let other = world.owner(&two);
    assert_eq!(row(&other, &one).await.ledger_entries, 1, "seen by another process as well");
    wait_until("it has copied that, without a sweep", async || {
        row(&other, &two).await.ledger_entries == 1
    })
    .await;
    one.stop().await;
    let one = start(world.args("ledger")).await.unwrap();
    assert_eq!(row(&other, &one).await.ledger_entries, 1, "after a restart");
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn a_running_process_cant_be_forgotten() {
    let world = TestInstallation::new().await;
    let one = world.serve().await;
    let two = start(world.args("ledger-2")).await.unwrap();
    let admin = world.owner(&one);
    for service in [&one, &two] {
        let id = service.app().store.ledger().process();
        let refused = admin.forget_process(id).await.unwrap_err();
        assert_eq!(refused.code(), Some(Code::WrongState), "{refused}");
        assert_eq!(row(&admin, service).await.forgotten_at_ms, None);
    }
    let refused = admin.forget_process(uuid::Uuid::now_v7()).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::NotFound));
    one.stop().await;
    two.stop().await;
}

/// Two processes each begin a transaction on one cluster, and wait for the lock on its row before
/// reading. Without the lock, both would see an empty cluster and give away the same seat.
#[tokio::test]
async fn two_processes_change_one_cluster_one_after_the_other() {
    let world = TestInstallation::new().await;
    let one = world.serve().await;
    let two = start(world.args("ledger-2")).await.unwrap();
    let admin = world.owner(&one);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    let agents = [
        TestAgent::new(&world, &one, &statement, &token, 1),
        TestAgent::new(&world, &two, &statement, &token, 2),
    ];
    let mut holder = world.database.connect().await;
    let mut held = sqlx::Connection::begin(&mut holder).await.unwrap();
    sqlx::query("SELECT id FROM clusters FOR UPDATE").execute(&mut *held).await.unwrap();
    let release = async {
        let mut watcher = world.database.connect().await;
        loop {
            let waiting: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM pg_stat_activity
                 WHERE wait_event_type = 'Lock' AND datname = current_database()",
            )
            .fetch_one(&mut watcher)
            .await
            .unwrap();
            if waiting >= 2 {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        held.commit().await.unwrap();
    };
    // Retry: one of the redeems can reach the lock timeout before the other one waits for the lock.
    let redeem = async |agent: &TestAgent| loop {
        match agent.redeem().await {
            Ok(seen) => break seen.standing,
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
    };
    let all = async { tokio::join!(redeem(&agents[0]), redeem(&agents[1]), release) };
    let all = tokio::time::timeout(std::time::Duration::from_secs(60), all).await;
    let (first, second, ()) = all.expect("both wait at a time");
    let standings = [first, second];
    for seat in 1..=2 {
        let seated = discovery_types::api::Standing::Seated(seat);
        assert!(standings.contains(&seated), "{standings:?}");
    }
    one.stop().await;
    two.stop().await;
}
