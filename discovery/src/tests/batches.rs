//! Tests of requests that are applied in one transaction.

use futures_util::future::join_all;

use super::agent::TestAgent;
use super::support::{TestDatabase, TestInstallation, wait_until};
use crate::server::RunningService;

/// Number of requests that are sent at a time.
const REQUESTS: usize = 12;

/// Returns the number of transactions that have written agents' rows. Each row has the id of the
/// transaction that inserted it.
async fn count_transactions(database: &TestDatabase) -> i64 {
    let sql = "SELECT count(DISTINCT xmin::text) FROM agents";
    sqlx::query_scalar(sql).fetch_one(&mut database.connect().await).await.unwrap()
}

/// Sends the redeems, and applies them once all of them wait. Returns the number of taken seats
/// that each agent sees, or the refusal.
async fn redeem_together(
    service: &RunningService,
    agents: &[TestAgent],
) -> Vec<Result<u8, String>> {
    let app = service.app();
    wait_until("no transaction runs", async || app.pause_batches()).await;
    let redeems = join_all(agents.iter().map(async |agent| match agent.redeem().await {
        Ok(seen) => Ok(seen.seated),
        Err(error) => Err(error.to_string()),
    }));
    let resume = async {
        wait_until("all wait", async || app.waiting_requests() == agents.len()).await;
        app.resume_batches();
    };
    tokio::join!(redeems, resume).0
}

#[tokio::test]
async fn redeems_of_many_clusters_share_a_transaction() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let mut agents = Vec::new();
    for number in 0..REQUESTS {
        let statement = world.cluster(&admin, &format!("demo-{number}"), 3).await;
        let token = world.token(&admin, &statement).await;
        agents.push(TestAgent::new(&world, &service, &statement, &token, 1));
    }
    let seated = redeem_together(&service, &agents).await;
    assert!(seated.iter().all(|seated| *seated == Ok(1)), "{seated:?}");
    assert_eq!(count_transactions(&world.database).await, 1);
    service.stop().await;
}

#[tokio::test]
async fn redeems_of_one_cluster_share_a_transaction_and_get_seats_in_turn() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 9).await;
    let token = world.token(&admin, &statement).await;
    let agents: Vec<TestAgent> =
        (1..=8).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    let mut seated = redeem_together(&service, &agents).await;
    seated.sort();
    assert_eq!(seated, (1..=8).map(Ok).collect::<Vec<_>>());
    assert_eq!(count_transactions(&world.database).await, 1);
    service.stop().await;
}

/// The agents' redeems are in one batch. One of them is refused, and another one's cluster is
/// locked by somebody else. All others get their seats nevertheless.
#[tokio::test]
async fn a_refusal_and_a_locked_cluster_hold_up_no_other_request_of_the_batch() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let mut agents = Vec::new();
    for number in 0..REQUESTS {
        let statement = world.cluster(&admin, &format!("demo-{number}"), 3).await;
        let other = world.cluster(&admin, &format!("other-{number}"), 3).await;
        let token = world.token(&admin, &statement).await;
        // A token of another cluster is unknown in this one.
        let named = if number == 5 { &other } else { &statement };
        agents.push(TestAgent::new(&world, &service, named, &token, 1));
    }
    let mut locker = world.database.connect().await;
    let lock = "BEGIN; SELECT 1 FROM clusters WHERE name = 'demo-7' FOR UPDATE";
    sqlx::raw_sql(lock).execute(&mut locker).await.unwrap();
    let unlock = async {
        let seated = "SELECT count(*) FROM agents";
        let expected = REQUESTS as i64 - 2;
        let mut connection = world.database.connect().await;
        wait_until("all other agents have seats", async || {
            let count: i64 = sqlx::query_scalar(seated).fetch_one(&mut connection).await.unwrap();
            count == expected
        })
        .await;
        sqlx::raw_sql("ROLLBACK").execute(&mut locker).await.unwrap();
    };
    let (seated, ()) = tokio::join!(redeem_together(&service, &agents), unlock);
    for (number, seated) in seated.iter().enumerate() {
        match number {
            5 => assert!(seated.is_err(), "{seated:?}"),
            _ => assert_eq!(*seated, Ok(1), "request {number}"),
        }
    }
    service.stop().await;
}
