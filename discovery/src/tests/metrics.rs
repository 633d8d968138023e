//! Tests of the values that `/metrics` shows.

use std::time::{SystemTime, UNIX_EPOCH};

use super::agent::{TestAgent, form};
use super::support::{TestInstallation, get, wait_until};
use crate::server::RunningService;

/// Returns the samples of `/metrics`: names with labels, and values.
async fn scrape(world: &TestInstallation, service: &RunningService) -> Vec<(String, f64)> {
    let (_, text) = get(world, service, "/metrics").await;
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let parse = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        (name.to_owned(), value.parse().unwrap())
    };
    samples.map(parse).collect()
}

fn value(samples: &[(String, f64)], name: &str) -> f64 {
    let mut found = samples.iter().filter(|(sample, _)| sample == name);
    let (_, value) = found.next().unwrap_or_else(|| panic!("no {name} in {samples:?}"));
    assert!(found.next().is_none(), "{name} is there twice");
    *value
}

/// Returns this host's time, in seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

#[tokio::test]
async fn clusters_are_counted_by_state_and_the_oldest_forming_one_has_an_age() {
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    // Allow only the first sweep, because later ones would count the clusters again and disturb the
    // test.
    args.times.sweep = std::time::Duration::from_secs(3_600);
    let service = crate::server::start(args).await.unwrap();
    let admin = world.owner(&service);
    let clusters = |samples: &[(String, f64)], state: &str| -> f64 {
        value(samples, &format!("muster_discovery_clusters{{state=\"{state}\"}}"))
    };
    let oldest = "muster_discovery_forming_oldest_seconds";
    wait_until("the clusters are counted", async || {
        service.app().metrics.text().contains("muster_discovery_clusters{")
    })
    .await;
    let samples = scrape(&world, &service).await;
    for state in discovery_types::api::ClusterState::ALL {
        assert_eq!(clusters(&samples, state.as_str()), 0.0, "{state:?}");
    }
    assert_eq!(value(&samples, oldest), 0.0);

    let formed = world.cluster(&admin, "formed", 1).await;
    let token = world.token(&admin, &formed).await;
    form(&mut [TestAgent::new(&world, &service, &formed, &token, 1)]).await;
    let old = world.cluster(&admin, "old", 3).await;
    world.cluster(&admin, "new", 3).await;
    world.draft(&admin, "draft", 3).await;
    let abandoned = world.cluster(&admin, "abandoned", 3).await;
    admin.abandon(abandoned.cluster, "").await.unwrap();
    // Only a cluster that is still forming has an age.
    for (cluster, hours) in [(old.cluster, 2), (formed.cluster, 9), (abandoned.cluster, 9)] {
        sqlx::query("UPDATE clusters SET created_us = now_us() - $2 WHERE id = $1")
            .bind(cluster)
            .bind(hours * 3_600_000_000_i64)
            .execute(&mut world.database.connect().await)
            .await
            .unwrap();
    }
    service.app().count_clusters().await.unwrap();
    let samples = scrape(&world, &service).await;
    assert_eq!(clusters(&samples, "committed") + clusters(&samples, "formed"), 1.0);
    for (state, number) in [("open", 2.0), ("draft", 1.0), ("abandoned", 1.0), ("retired", 0.0)] {
        assert_eq!(clusters(&samples, state), number, "{state}");
    }
    assert!((7_200.0..7_260.0).contains(&value(&samples, oldest)), "{samples:?}");
    service.stop().await;
}

#[tokio::test]
async fn the_metrics_of_the_process_are_those_of_its_settings_sweeps_and_certificate() {
    let begun = now();
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let swept = async || {
        value(&scrape(&world, &service).await, "muster_discovery_last_sweep_timestamp_seconds")
    };
    wait_until("it has swept", async || swept().await >= begun).await;
    let first = swept().await;
    wait_until("it has swept again", async || swept().await > first).await;
    assert!(swept().await <= now());

    let samples = scrape(&world, &service).await;
    let started = value(&samples, "process_start_time_seconds");
    assert!((begun..=first).contains(&started), "{started}");
    assert_eq!(value(&samples, "muster_discovery_parked_polls_limit"), 100.0);
    // The certificate ends a hundred years of 365 days after the start of 2020.
    let end = value(&samples, "muster_discovery_tls_certificate_end_timestamp_seconds");
    assert_eq!(end, 1_577_836_800.0 + 100.0 * 365.0 * 86_400.0);
    service.stop().await;
}

#[tokio::test]
async fn each_use_of_the_database_is_timed_also_one_that_fails() {
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    args.times.sweep = std::time::Duration::from_secs(3_600);
    let service = crate::server::start(args).await.unwrap();
    wait_until("it has swept", async || service.app().metrics.database_up.get() == 1).await;
    let count = async |kind: &str| {
        let name = "muster_discovery_database_duration_seconds_count";
        value(&scrape(&world, &service).await, &format!("{name}{{kind=\"{kind}\"}}"))
    };
    let store = &service.app().store;
    let before = count("transaction").await;
    store.begin("BEGIN").await.unwrap().commit().await.unwrap();
    drop(store.begin("BEGIN").await.unwrap());
    store.begin("nonsense").await.unwrap_err();
    // The count can be higher, because a background task may use the database at the same time.
    assert!(count("transaction").await >= before + 3.0);
    let before = count("statements").await;
    store.now().await.unwrap();
    assert!(count("statements").await > before);
    service.stop().await;
}
