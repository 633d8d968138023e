//! Tests of a database with too many decisions for a connection to copy before its first use.

use std::collections::BTreeSet;
use std::sync::Arc;

use discovery_types::api::ClusterState;
use discovery_types::problem::Code;
use sqlx::postgres::PgConnectOptions;

use super::agent::TestAgent;
use super::past::alarms;
use super::support::{TestDatabase, TestInstallation, get, wait_for_value, wait_until};
use crate::keydir::KeyDirectory;
use crate::ledger::{Authority, Commit, LOOK_LIMIT, Ledger, Occasion};
use crate::metrics::ServiceMetrics;
use crate::server::{RunningService, ServeArgs, start};
use crate::store::{PoolSettings, connect};

/// More decisions than one connection can copy in the pool's time limit, even on a fast machine.
const MANY_DECISIONS: i64 = 400_000;
/// Number of decisions that a start copies at once: each of its two connections to the database
/// makes one check (a "look").
const COPIED_AT_START: usize = 2 * LOOK_LIMIT;
/// A number of decisions that is larger than the number that a start copies at once.
const SEVERAL_DECISIONS: i64 = 12_000;

/// Inserts decisions about clusters that have no rows. That suffices, because a ledger copies only
/// a cluster's id and a hash.
async fn decide_many(database: &TestDatabase, count: i64) {
    sqlx::query(
        "INSERT INTO decisions
         SELECT n, gen_random_uuid(), sha256(n::text::bytea), NULL, 0, sha256(('c' || n)::bytea)
         FROM (SELECT coalesce(max(number), 0) AS last FROM decisions) AS l,
              generate_series(l.last + 1, l.last + $1) AS n",
    )
    .bind(count)
    .execute(&mut database.connect().await)
    .await
    .unwrap();
}

/// Arguments of a service that never sweeps. It finds new decisions only when it checks the
/// database (a "look") or decides something.
fn args_without_sweeps(world: &TestInstallation) -> ServeArgs {
    let mut args = world.args("ledger");
    args.times.sweep = std::time::Duration::from_secs(3_600);
    args
}

async fn wait_for_sweep(service: &RunningService) {
    let ledger = service.app().store.ledger();
    wait_until("swept for the only time", async || {
        ledger.known().is_some_and(|known| known.sweeps == 2)
    })
    .await;
}

/// Waits until the service's ledger holds all decisions.
pub(super) async fn wait_until_ready(world: &TestInstallation, service: &RunningService) {
    wait_until("the ledger is complete", async || {
        get(world, service, "/readyz").await.1.contains(r#""status":"ready""#)
    })
    .await;
}

#[tokio::test]
async fn a_service_with_a_new_ledger_starts_at_once_and_fills_it_afterwards() {
    let world = TestInstallation::new().await;
    world.serve().await.stop().await;
    decide_many(&world.database, MANY_DECISIONS).await;

    // The service answers while it fills the ledger, and its decisions wait until the ledger is
    // complete. A busy database may not answer the first request in time.
    let two = start(world.args("ledger-2")).await.unwrap();
    wait_until("the service answers", async || get(&world, &two, "/readyz").await.0 == 200).await;
    wait_until_ready(&world, &two).await;
    assert_eq!(two.app().store.ledger().commits() as i64, MANY_DECISIONS);
    two.stop().await;

    // The ledger matches the hash over the database's decisions. So the restarted service neither
    // copies nor compares it again.
    let two = start(world.args("ledger-2")).await.unwrap();
    assert!(two.app().store.watch().is_complete(1));
    two.stop().await;
}

#[tokio::test]
async fn an_interrupted_fill_of_a_ledger_continues_where_it_stopped() {
    let world = TestInstallation::new().await;
    world.serve().await.stop().await;
    decide_many(&world.database, SEVERAL_DECISIONS).await;

    // Only the checks of the start's two connections copy decisions. Stop before the rest is
    // copied.
    let folder = world.folder.path().join("ledger-2");
    let ledger = Ledger::open(&folder).unwrap();
    let options: PgConnectOptions = world.database.url().parse().unwrap();
    let pool = PoolSettings { size: 2, wait: std::time::Duration::from_secs(60) };
    let keys = KeyDirectory::load(&world.folder.path().join("keys")).unwrap();
    let metrics = Arc::new(ServiceMetrics::default());
    let store = connect(options, pool, ledger, &keys, metrics).await.unwrap();
    assert_eq!(store.ledger().commits(), COPIED_AT_START);
    assert!(!store.watch().is_complete(1), "and decides nothing");
    store.pool().close().await;
    drop(store);

    let two = start(world.args("ledger-2")).await.unwrap();
    wait_until("complete", async || two.app().store.watch().is_complete(1)).await;
    two.stop().await;
    let text = std::fs::read_to_string(folder.join("ledger.jsonl")).unwrap();
    let lines = text.lines().filter_map(|line| {
        let line: serde_json::Value = serde_json::from_str(line.split_once(' ')?.1).ok()?;
        Some((line["to"].as_u64()?, line["commits"].as_array()?.clone()))
    });
    let (mut to, mut commits) = (0, Vec::new());
    // The check of a new connection can copy the same decisions while the ledger is filled. So the
    // file can have a lower number after a higher one. The position in memory stays at the higher
    // number.
    for (next, new) in lines {
        let at_start = COPIED_AT_START as u64;
        assert!(to <= at_start || next > at_start, "{next} was copied after {to}");
        to = to.max(next);
        commits.extend(new.into_iter().map(|packed| packed.to_string()));
    }
    let different: BTreeSet<String> = commits.into_iter().collect();
    assert_eq!((to as i64, different.len() as i64), (SEVERAL_DECISIONS, SEVERAL_DECISIONS));
}

#[tokio::test]
async fn a_process_whose_ledger_is_being_filled_answers_and_decides_nothing() {
    let world = TestInstallation::new().await;
    let one = start(args_without_sweeps(&world)).await.unwrap();
    let admin = world.owner(&one);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let agent = TestAgent::new(&world, &one, &statement, &token, 1);
    let watch = one.app().store.watch();
    wait_for_sweep(&one).await;

    // Keep the ledger incomplete by force. The check of the database on each new connection would
    // find it complete.
    watch.hold_incomplete(true);
    let refused = agent.redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::Overloaded), "{refused}");
    assert!(refused.is_retryable() && refused.to_string().contains("ledger"), "{refused}");
    let abandoned = admin.abandon(statement.cluster, "too early").await.unwrap_err();
    assert_eq!(abandoned.code(), Some(Code::Overloaded), "{abandoned}");
    let shown = admin.show_cluster(statement.cluster).await.unwrap();
    assert_eq!(shown.summary.state, ClusterState::Open);
    let (status, said) = get(&world, &one, "/readyz").await;
    assert_eq!(status, 200, "{said}");
    assert!(said.contains("degraded") && said.contains("decisions copied"), "{said}");
    assert_eq!(get(&world, &one, "/livez").await.0, 200);

    watch.hold_incomplete(false);
    let seen = wait_for_value("it is frozen", async || agent.redeem().await.ok()).await;
    assert!(seen.proposal.is_some());
    one.stop().await;
}

#[tokio::test]
async fn a_process_that_lacks_many_decisions_copies_them_before_it_freezes_a_list() {
    let world = TestInstallation::new().await;
    let one = start(args_without_sweeps(&world)).await.unwrap();
    let admin = world.owner(&one);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let agent = TestAgent::new(&world, &one, &statement, &token, 1);
    let store = &one.app().store;
    wait_for_sweep(&one).await;
    let held = store.watch().fill_lock.lock().await;
    decide_many(&world.database, SEVERAL_DECISIONS).await;
    // A transaction that locks a cluster copies only a limited number of decisions.
    let refused = agent.redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::Overloaded), "{refused}");
    assert_eq!(store.ledger().commits(), LOOK_LIMIT);

    drop(held);
    let seen = wait_for_value("it is frozen", async || agent.redeem().await.ok()).await;
    assert!(seen.proposal.is_some());
    assert_eq!(store.ledger().commits() as i64, SEVERAL_DECISIONS);
    one.stop().await;
}

/// A look reads the ledger before the database. Another connection can record a commit between
/// these two reads. The process's row then counts this commit, but the look hasn't read it in the
/// ledger.
#[tokio::test]
async fn a_commit_during_a_look_does_not_make_the_ledger_seem_set_back() {
    let world = TestInstallation::new().await;
    let service = start(args_without_sweeps(&world)).await.unwrap();
    wait_for_sweep(&service).await;
    let store = service.app().store.clone();
    let mut other = world.database.connect().await;
    sqlx::raw_sql("BEGIN; LOCK TABLE processes IN ACCESS EXCLUSIVE MODE")
        .execute(&mut other)
        .await
        .unwrap();
    let looking = store.clone();
    let look = tokio::spawn(async move { looking.look_at_database(Occasion::Doubt).await });
    wait_until("the look waits for the lock", async || {
        let waits = "SELECT EXISTS (SELECT 1 FROM pg_locks
                     WHERE NOT granted AND relation = 'processes'::regclass)";
        sqlx::query_scalar(waits).fetch_one(&mut other).await.unwrap()
    })
    .await;
    let authority = Authority { certificate: String::new(), wrapped_key: None };
    let commit = Commit {
        cluster_id: uuid::Uuid::now_v7(),
        h: "00".repeat(32),
        document: String::new(),
        statements: Vec::new(),
        peer_ca: authority.clone(),
        client_ca: authority,
    };
    store.ledger().ensure_commit(commit).await.unwrap();
    sqlx::raw_sql("UPDATE processes SET entries = entries + 1; COMMIT")
        .execute(&mut other)
        .await
        .unwrap();
    look.await.unwrap().unwrap();
    assert_eq!(alarms(&world, &service, "ledger_set_back").await, "0");
    assert!(store.watch().is_complete(1));
    service.stop().await;
}
