//! Tests with a Postgres that dies, stops responding, or loses its database.

use std::path::Path;
use std::time::Duration;

use discovery_types::api::ClusterQuery;
use discovery_types::problem::Code;
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::timeout;

use super::agent::TestAgent;
use super::support::{TestInstallation, folder, get, wait_until};
use crate::server::{RunningService, start};

#[tokio::test]
async fn the_service_reports_a_lost_postgres_and_recovers_with_it() {
    let world = TestInstallation::new().await;
    let pg = folder();
    let service = serve_with_postgres(&world, &pg.path().join("pg")).await;
    let admin = world.owner(&service);
    world.cluster(&admin, "demo", 1).await;

    let pid = postmaster(&service);
    let silent = StoppedPostgres::make(pid);
    let (status, body) = get(&world, &service, "/readyz").await;
    assert_eq!(status, 503, "{body}");
    assert_eq!(get(&world, &service, "/livez").await.0, 200);
    let refused = admin.list_clusters(&ClusterQuery::default()).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::DatabaseUnavailable), "{refused}");
    assert!(refused.is_retryable());

    drop(silent);
    kill_process(pid, Signal::KILL).unwrap();
    // Postgres' backends live a moment longer than the postmaster, and still answer.
    wait_until("another one answers", async || {
        service.postgres_pid().is_some_and(|new| new != pid.as_raw_nonzero().get() as u32)
            && admin.list_clusters(&ClusterQuery::default()).await.is_ok()
    })
    .await;
    assert_eq!(admin.list_clusters(&ClusterQuery::default()).await.unwrap().clusters.len(), 1);
    assert_eq!(get(&world, &service, "/readyz").await.0, 200);
    service.stop().await;
    assert!(!pg.path().join("pg/data/postmaster.pid").exists(), "stopped in order");
}

/// Tests requests of all kinds: a poll, a redeem, a wait for a row lock, and an admin's request.
#[tokio::test]
async fn no_request_waits_forever_for_a_postgres_that_stops_responding() {
    const SOON: Duration = Duration::from_secs(60);
    let world = TestInstallation::new().await;
    let pg = folder();
    let service = serve_with_postgres(&world, &pg.path().join("pg")).await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    let agents: Vec<TestAgent> =
        (1..=3).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    // Concurrent requests leave several idle connections in the pool.
    let _ = tokio::join!(agents[0].redeem(), agents[0].poll(None), agents[1].redeem());
    let lock = "BEGIN; SELECT 1 FROM clusters FOR UPDATE";
    let mut locker = service.app().store.acquire().await.unwrap();
    sqlx::raw_sql(lock).execute(&mut *locker).await.unwrap();
    let silence = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        StoppedPostgres::make(postmaster(&service))
    };
    let (waits, silent) = tokio::join!(timeout(SOON, agents[0].poll(None)), silence);
    let told = waits.expect("who waits for a lock is told").unwrap_err();
    assert_eq!(told.code(), Some(Code::DatabaseUnavailable), "{told}");
    let (redeemed, polled, explained) = tokio::join!(
        timeout(SOON, agents[2].redeem()),
        timeout(SOON, agents[1].poll(None)),
        timeout(SOON, admin.explain(statement.cluster)),
    );
    for told in [redeemed.unwrap().unwrap_err(), polled.unwrap().unwrap_err()] {
        assert_eq!(told.code(), Some(Code::DatabaseUnavailable), "{told}");
    }
    let told = explained.unwrap().unwrap_err();
    assert_eq!(told.code(), Some(Code::DatabaseUnavailable), "{told}");
    drop(silent);
    sqlx::raw_sql("ROLLBACK").execute(&mut *locker).await.unwrap();
    drop(locker);
    let back = async {
        while agents[2].redeem().await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(SOON, back).await.expect("it answers again");
    service.stop().await;
}

#[tokio::test]
async fn a_service_whose_database_has_no_space_is_not_ready_until_it_writes_again() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let agent = TestAgent::new(&world, &service, &statement, &token, 1);
    let mut connection = world.database.connect().await;
    sqlx::raw_sql(
        "CREATE FUNCTION refuse_for_space() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             RAISE EXCEPTION 'could not extend file: No space left on device'
                 USING ERRCODE = 'disk_full';
         END $$;
         CREATE TRIGGER no_space BEFORE INSERT OR UPDATE ON agents
             FOR EACH ROW EXECUTE FUNCTION refuse_for_space();
         CREATE TRIGGER no_space BEFORE UPDATE ON processes
             FOR EACH ROW EXECUTE FUNCTION refuse_for_space()",
    )
    .execute(&mut connection)
    .await
    .unwrap();

    let refused = agent.redeem().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::DatabaseUnavailable), "{refused}");
    assert!(refused.is_retryable() && refused.to_string().contains("takes no writes"), "{refused}");
    let (status, body) = get(&world, &service, "/readyz").await;
    assert_eq!(status, 503, "{body}");
    assert!(body.contains("its disk is full"), "{body}");
    assert_eq!(get(&world, &service, "/livez").await.0, 200);
    admin.show_cluster(statement.cluster).await.expect("reads go on");

    sqlx::raw_sql("DROP TRIGGER no_space ON agents; DROP TRIGGER no_space ON processes")
        .execute(&mut connection)
        .await
        .unwrap();
    wait_until("ready", async || get(&world, &service, "/readyz").await.0 == 200).await;
    agent.redeem().await.unwrap();
    service.stop().await;
}

#[tokio::test]
async fn the_error_for_a_dropped_database_names_it_and_the_way_back() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let dump = world.database.dump();
    world.database.remove().await;
    let missing = format!("database \"{}\" does not exist", world.database.name);
    for told in [
        admin.list_clusters(&ClusterQuery::default()).await.unwrap_err(),
        admin.explain(statement.cluster).await.unwrap_err(),
    ] {
        assert_eq!(told.code(), Some(Code::DatabaseUnavailable), "{told}");
        let text = told.to_string();
        assert!(text.contains(&missing) && text.contains("restore its backup"), "{text}");
    }
    world.database.make_anew().await;
    world.database.restore(&dump, &[]);
    wait_until("it is settled", async || {
        admin.list_processes().await.is_ok_and(|listed| listed.settled)
    })
    .await;
    assert_eq!(admin.list_clusters(&ClusterQuery::default()).await.unwrap().clusters.len(), 1);
    service.stop().await;
}

/// Starts a service with a managed Postgres.
async fn serve_with_postgres(world: &TestInstallation, dir: &Path) -> RunningService {
    let mut args = world.args("ledger");
    args.database.database_url = None;
    args.database.managed_postgres = Some(dir.to_owned());
    start(args).await.unwrap()
}

fn postmaster(service: &RunningService) -> Pid {
    Pid::from_raw(service.postgres_pid().unwrap() as i32).unwrap()
}

/// A Postgres whose processes are stopped with SIGSTOP until this value is dropped. It neither
/// answers nor exits, so the service doesn't restart it.
struct StoppedPostgres(Vec<Pid>);

impl StoppedPostgres {
    /// Stops the postmaster first, so that it forks no further backends.
    fn make(postmaster: Pid) -> Self {
        kill_process(postmaster, Signal::STOP).unwrap();
        while !stands_still(postmaster) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut processes = children_of(postmaster);
        for child in &processes {
            let _ = kill_process(*child, Signal::STOP);
        }
        processes.push(postmaster);
        StoppedPostgres(processes)
    }
}

impl Drop for StoppedPostgres {
    fn drop(&mut self) {
        for process in &self.0 {
            let _ = kill_process(*process, Signal::CONT);
        }
    }
}

/// Whether SIGSTOP has taken effect on the process, which happens only when the kernel schedules
/// the process. See proc_pid_stat(5).
fn stands_still(process: Pid) -> bool {
    let id = process.as_raw_nonzero();
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
    stat.rsplit_once(") ").unwrap().1.starts_with('T')
}

fn children_of(parent: Pid) -> Vec<Pid> {
    let parent = parent.as_raw_nonzero().get();
    let path = format!("/proc/{parent}/task/{parent}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}
