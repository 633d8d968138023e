//! Tests that no request reads more rows when there are more clusters. Postgres itself logs the
//! plan of each SQL statement, with the rows that each step of it read.

use std::path::PathBuf;

use discovery_types::api::{ClusterQuery, ClusterState, ClusterStates, GrantQuery};
use serde_json::Value;

use super::agent::{TestAgent, form};
use super::support::{TestDatabase, TestInstallation, socket};
use crate::server::{RunningService, start};
use crate::store::clusters::FormingPosition;
use crate::store::counts::{ClusterCounts, SilentMembersCount};

/// Number of clusters in the database. No SQL statement may read all of them.
const CLUSTERS: usize = 20_000;
/// Maximum number of rows that a step of a plan may read. A page of a list has [`PAGE`] clusters
/// with three members each.
const MAX_ROWS: f64 = 500.0;
/// Part of the SQL statement that copies decisions into a ledger.
const COPY: &str = "FROM decisions d, generation g WHERE d.number > $1";
/// Number of items on a page.
const PAGE: u16 = 50;
/// Number of times that each request is made. Postgres may choose another plan after five.
const REPEATS: usize = 7;

/// Fills the database with clusters.
async fn fill(world: &TestInstallation, grant: &str) {
    let sql = include_str!("fill.sql")
        .replace("{first}", "1")
        .replace("{last}", &CLUSTERS.to_string())
        .replace("{grant}", grant);
    let mut connection = world.database.connect().await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
}

/// Sets parameters of Postgres for the later connections to this database.
async fn set(database: &TestDatabase, parameters: &[(&str, &str)]) {
    let mut connection = database.connect().await;
    for (name, value) in parameters {
        let sql = format!("ALTER DATABASE {} SET {name} = {value}", database.name);
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
    }
}

/// Makes Postgres log the plan of each SQL statement in this database, also of those in triggers.
async fn log_plans(database: &TestDatabase) {
    let parameters = [
        ("session_preload_libraries", "auto_explain"),
        ("auto_explain.log_min_duration", "0"),
        ("auto_explain.log_analyze", "on"),
        ("auto_explain.log_timing", "off"),
        ("auto_explain.log_nested_statements", "on"),
        ("auto_explain.log_format", "json"),
    ];
    set(database, &parameters).await;
}

/// Log of the shared Postgres server. Only connections to this test's database log plans.
fn server_log() -> PathBuf {
    socket().with_file_name("postgres.log")
}

/// Returns the logged plans. In the log, a plan is a JSON value whose lines begin with a tab.
fn logged_plans() -> Vec<Value> {
    let log = std::fs::read_to_string(server_log()).unwrap();
    let mut plans = Vec::new();
    for entry in log.split("plan:\n").skip(1) {
        let json: String = entry.lines().take_while(|line| line.starts_with('\t')).collect();
        plans.push(serde_json::from_str(&json).unwrap());
    }
    plans
}

/// Returns the number of rows that a step of a plan has read, in all of its loops.
fn rows_read(step: &Value) -> f64 {
    let number = |field: &str| step[field].as_f64().unwrap_or_default();
    let removed: f64 = step
        .as_object()
        .unwrap()
        .keys()
        .filter(|field| field.starts_with("Rows Removed"))
        .map(|field| number(field))
        .sum();
    (number("Actual Rows") + removed) * number("Actual Loops")
}

/// Appends a description of each step that reads too many rows.
fn find_long_steps(query: &str, step: &Value, found: &mut Vec<String>) {
    let rows = rows_read(step);
    let (kind, relation) = (&step["Node Type"], &step["Relation Name"]);
    // Postgres' own tables don't grow with the clusters.
    if rows > MAX_ROWS && !relation.as_str().is_some_and(|name| name.starts_with("pg_")) {
        found.push(format!("{rows} rows: {kind} of {relation} in {query}"));
    }
    for inner in step["Plans"].as_array().into_iter().flatten() {
        find_long_steps(query, inner, found);
    }
}

/// Fails if any logged SQL statement has read too many rows.
fn assert_short_plans() {
    let plans = logged_plans();
    let mut found = Vec::new();
    for plan in &plans {
        let query = plan["Query Text"].as_str().unwrap();
        // Skip the SQL statement that copies decisions into a ledger. It reads many rows, but no
        // request waits for it.
        if query.contains(COPY) {
            continue;
        }
        find_long_steps(query, &plan["Plan"], &mut found);
    }
    assert!(plans.len() > 10 * REPEATS, "{} plans", plans.len());
    assert!(found.is_empty(), "{}", found.join("\n\n"));
}

/// Makes each of an admin's requests that list or show clusters and tokens.
async fn list_everything(world: &TestInstallation, service: &RunningService) {
    let admin = world.owner(service);
    let page = || ClusterQuery { limit: Some(PAGE), ..ClusterQuery::default() };
    let states = |states: &[ClusterState]| Some(ClusterStates::new(states.iter().copied()));
    let hour_ago = admin.service_now_ms().unsigned_abs() - 3_600_000;
    let newest = admin.list_clusters(&page()).await.unwrap();
    let queries = [
        page(),
        ClusterQuery { after: newest.next.clone(), ..page() },
        ClusterQuery { name: Some("made-17".parse().unwrap()), ..page() },
        ClusterQuery { name: Some("no-such-name".parse().unwrap()), ..page() },
        ClusterQuery { state: states(&[ClusterState::Open]), ..page() },
        // No cluster is in this state.
        ClusterQuery { state: states(&[ClusterState::Abandoned]), ..page() },
        ClusterQuery { state: states(&ClusterState::ALL), ..page() },
        ClusterQuery { created_before_ms: Some(hour_ago), ..page() },
        ClusterQuery {
            created_from_ms: Some(hour_ago),
            state: states(&[ClusterState::Expired]),
            ..page()
        },
    ];
    let tokens = GrantQuery { limit: Some(PAGE), after: None, policies: None };
    let cluster = newest.clusters[0].cluster;
    for _ in 0..REPEATS {
        for query in &queries {
            admin.list_clusters(query).await.unwrap();
        }
        let list = admin.list_grants(None, &tokens).await.unwrap();
        let next = GrantQuery { after: list.next, ..tokens.clone() };
        assert!(next.after.is_some());
        admin.list_grants(None, &next).await.unwrap();
        admin.list_grants(Some(cluster), &tokens).await.unwrap();
        let policies = GrantQuery { policies: Some(true), ..tokens.clone() };
        admin.list_grants(None, &policies).await.unwrap();
        admin.list_grants(Some(cluster), &policies).await.unwrap();
        admin.show_grant(list.grants[0].grant.id).await.unwrap_err();
    }
}

/// Forms a cluster, and makes the requests that its agents and admins make later.
async fn form_and_run(world: &TestInstallation, service: &RunningService, name: &str) {
    let admin = world.owner(service);
    let statement = world.cluster(&admin, name, 3).await;
    let token = world.token(&admin, &statement).await;
    let mut agents: Vec<TestAgent> =
        (1..=3).map(|n| TestAgent::new(world, service, &statement, &token, n)).collect();
    form(&mut agents).await;
    let id = statement.cluster;
    admin.show_cluster(id).await.unwrap();
    admin.explain(id).await.unwrap();
    admin.directory(id).await.unwrap();
    admin.intents(id, None, true).await.unwrap();
    admin.statements(id).await.unwrap();
    admin.document(id).await.unwrap();
    admin.list_processes().await.unwrap();
    let ticket = world.ticket(&admin, &statement).await;
    let newcomer = TestAgent::new(world, service, &statement, &ticket, 4);
    newcomer.join().await.unwrap();
    service.app().sweep().await.unwrap();
}

/// Fails if the counted numbers of clusters differ much from those that `fill` made. They may be
/// estimates.
fn assert_near_filled(counts: &ClusterCounts) {
    for (state, part) in [
        (ClusterState::Open, 0.05),
        (ClusterState::Expired, 0.05),
        (ClusterState::Retired, 0.1),
        (ClusterState::Formed, 0.8),
        (ClusterState::Abandoned, 0.0),
    ] {
        let (_, number) = counts.by_state.iter().find(|(counted, _)| *counted == state).unwrap();
        let expected = part * CLUSTERS as f64;
        let error = (*number as f64 - expected).abs();
        assert!(error <= expected * 0.1 + 2.0, "{number} {state:?} clusters, and not {expected}");
    }
    // The oldest open cluster is among the first twenty, which were made a second apart.
    let oldest = counts.oldest_forming_age_us.unwrap() / 1_000_000;
    assert!(oldest >= CLUSTERS as i64 - 20, "{oldest}");
}

#[tokio::test]
async fn no_request_reads_more_rows_if_there_are_more_clusters() {
    let world = TestInstallation::new().await;
    // The first start makes the tables, which `fill` needs. On the second start, the ledger copies
    // all decisions that `fill` inserted.
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "real", 1).await;
    let (_, grant) = world.grant(&admin, &statement);
    service.stop().await;
    fill(&world, grant.sign(&world.owner).as_str()).await;
    let service = world.serve().await;
    super::large_ledger::wait_until_ready(&world, &service).await;
    service.stop().await;

    log_plans(&world.database).await;
    let service = start(world.args("ledger")).await.unwrap();
    list_everything(&world, &service).await;
    let store = &service.app().store;
    let (mut forming, mut unsettled) = (FormingPosition::START, FormingPosition::START);
    let mut silent = SilentMembersCount::default();
    for _ in 0..REPEATS {
        assert!(!store.forming_clusters(&mut forming).await.unwrap().is_empty());
        assert!(store.unsettled_clusters(&mut unsettled).await.unwrap().is_empty());
        assert_near_filled(&store.count_clusters().await.unwrap());
        store.count_silent_members(&mut silent).await.unwrap();
    }
    for number in 0..REPEATS {
        form_and_run(&world, &service, &format!("real-{number}")).await;
    }
    service.stop().await;
    assert_short_plans();
}
