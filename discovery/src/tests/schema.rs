//! Tests of rules that the database enforces, whatever a program writes.

use super::agent::{TestAgent, form};
use super::support::TestInstallation;

/// Runs `sql` in a transaction of its own, and returns whether the database took it.
async fn is_accepted(world: &TestInstallation, sql: &str) -> bool {
    let sql = format!("BEGIN; {sql}; COMMIT");
    let mut connection = world.database.connect().await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.is_ok()
}

#[tokio::test]
async fn a_cluster_is_committed_exactly_if_it_has_a_commit() {
    let world = TestInstallation::before_first_start().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let mut agents: Vec<TestAgent> =
        (1..=2).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    assert!(!is_accepted(&world, "UPDATE clusters SET phase = 'committed'").await);
    for agent in &agents {
        agent.redeem().await.unwrap();
    }
    let commit = "INSERT INTO commits (cluster_id, epoch, h, document, adopted, committed_us)
        SELECT id, frozen_epoch, frozen_h, 'x', true, now_us() FROM clusters";
    assert!(!is_accepted(&world, commit).await, "the cluster is still preparing");
    assert!(!is_accepted(&world, "UPDATE clusters SET phase = 'committed'").await);
    form(&mut agents).await;
    assert!(!is_accepted(&world, "UPDATE clusters SET phase = 'abandoned'").await);
    service.stop().await;
}

#[tokio::test]
async fn what_never_changes_in_a_cluster_is_kept() {
    let world = TestInstallation::before_first_start().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    form(&mut [TestAgent::new(&world, &service, &statement, &token, 1)]).await;
    assert!(is_accepted(&world, "UPDATE clusters SET rev = rev + 1").await);
    let refused = [
        "id = gen_random_uuid()",
        "size = 3",
        "name = 'other'",
        "rev = rev - 1",
        "epoch = epoch - 1",
        "floor = floor - 1",
        "phase = 'open'",
        "frozen_h = decode(repeat('00', 32), 'hex')",
    ];
    for change in refused {
        assert!(!is_accepted(&world, &format!("UPDATE clusters SET {change}")).await, "{change}");
    }
    service.stop().await;
}
