//! Postgres away, and back.

use discovery_types::problem::Code;

use super::support::{World, folder, get};
use crate::server::start;

#[tokio::test]
async fn without_postgres_the_service_lives_says_so_and_comes_back_with_it() {
    let world = World::new().await;
    let pg = folder();
    let mut args = world.args("ledger");
    args.database.database_url = None;
    args.database.managed_postgres = Some(pg.path().join("pg"));
    let service = start(args).await.unwrap();
    let admin = world.owner(&service);
    world.cluster(&admin, "demo", 1).await;

    let pid = rustix::process::Pid::from_raw(service.postgres_pid().unwrap() as i32).unwrap();
    // Stopped, so that it neither answers nor dies nor is started again.
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let children = children_of(pid);
    for child in &children {
        let _ = rustix::process::kill_process(*child, rustix::process::Signal::STOP);
    }
    let (status, body) = get(&world, &service, "/readyz").await;
    assert_eq!(status, 503, "{body}");
    assert_eq!(get(&world, &service, "/livez").await.0, 200);
    let refused = admin.list_clusters(None).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::DatabaseUnavailable), "{refused}");
    assert!(refused.is_retryable());

    for process in children.iter().chain([&pid]) {
        let _ = rustix::process::kill_process(*process, rustix::process::Signal::CONT);
    }
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    for _ in 0..600 {
        if admin.list_clusters(None).await.is_ok() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert_eq!(admin.list_clusters(None).await.unwrap().clusters.len(), 1);
    assert_eq!(get(&world, &service, "/readyz").await.0, 200);
    service.stop().await;
    assert!(!pg.path().join("pg/data/postmaster.pid").exists(), "stopped in order");
}

fn children_of(parent: rustix::process::Pid) -> Vec<rustix::process::Pid> {
    let parent = parent.as_raw_nonzero().get();
    let path = format!("/proc/{parent}/task/{parent}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace()
        .filter_map(|pid| rustix::process::Pid::from_raw(pid.parse().ok()?))
        .collect()
}
