//! The table by which an owner decides whether a process may be forgotten.

use discovery_types::api::ProcessView;
use discovery_types::client::Client;
use discovery_types::problem::Code;

use super::agent::{Agent, form};
use super::support::World;
use crate::server::{Running, start};

async fn row(admin: &Client, service: &Running) -> ProcessView {
    let id = service.app().forming.store.ledger().process();
    let list = admin.list_processes().await.unwrap();
    list.processes.into_iter().find(|process| process.id == id).unwrap()
}

#[tokio::test]
async fn the_commits_of_each_ledger_are_counted_as_they_are_let_out() {
    let world = World::new().await;
    let mut args = world.args("ledger");
    // No sweep corrects the number.
    args.times.sweep = std::time::Duration::from_secs(3_600);
    let one = start(args.clone()).await.unwrap();
    args.ledger = world.folder.path().join("ledger-2");
    let two = start(args.clone()).await.unwrap();
    let admin = world.owner(&one);
    assert_eq!(row(&admin, &one).await.ledger_entries, 0);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    form(&mut [Agent::new(&world, &one, &statement, &token, 1)]).await;
    let other = world.owner(&two);
    assert_eq!(row(&other, &one).await.ledger_entries, 1, "seen by another process as well");
    assert_eq!(row(&other, &two).await.ledger_entries, 0, "it has let nothing out");
    one.stop().await;
    let one = start(world.args("ledger")).await.unwrap();
    assert_eq!(row(&other, &one).await.ledger_entries, 1, "after a restart");
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn a_process_that_runs_is_not_forgotten() {
    let world = World::new().await;
    let one = world.serve().await;
    let two = start(world.args("ledger-2")).await.unwrap();
    let admin = world.owner(&one);
    for service in [&one, &two] {
        let id = service.app().forming.store.ledger().process();
        let refused = admin.forget_process(id).await.unwrap_err();
        assert_eq!(refused.code(), Some(Code::WrongState), "{refused}");
        assert_eq!(row(&admin, service).await.forgotten_at_ms, None);
    }
    let refused = admin.forget_process(uuid::Uuid::now_v7()).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::NotFound));
    one.stop().await;
    two.stop().await;
}
