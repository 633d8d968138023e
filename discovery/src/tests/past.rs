//! Tests of databases and ledgers that are set back in time. A process must notice that without a
//! notification, so that no cluster forms twice.

use std::path::Path;
use std::time::Duration;

use discovery_types::api::{AcceptRequest, ClusterState};
use discovery_types::client::DiscoveryClient;
use discovery_types::jws::Jws;
use discovery_types::problem::Code;
use discovery_types::statement::Statement;
use discovery_types::token::Token;
use uuid::Uuid;

use super::agent::{TestAgent, form};
use super::support::{
    TestInstallation, age_last_change, age_last_seen, get, stored_document, wait_until,
};
use crate::ledger::Occasion;
use crate::server::{RunningService, ServeArgs, start};

/// Arguments of the second process of an installation.
fn second_process_args(world: &TestInstallation) -> ServeArgs {
    world.args("ledger-2")
}

/// Arguments of a process that never sweeps. It compares ledger and database only on other
/// occasions, such as a new connection.
fn args_without_sweeps(world: &TestInstallation, ledger: &str) -> ServeArgs {
    let mut args = world.args(ledger);
    args.times.sweep = Duration::from_secs(3_600);
    args
}

/// Tries to form the cluster again from a host that never saw the commit. Panics if a second list
/// commits.
async fn assert_forms_no_second_list(
    world: &TestInstallation,
    service: &RunningService,
    (statement, token): (&Statement, &Token),
    decided: &Jws,
) {
    let mut other = TestAgent::new(world, service, statement, token, 9);
    for _ in 0..40 {
        if let Ok(seen) = other.redeem().await
            && seen.proposal.is_some()
        {
            let _ = other.ack(&seen).await;
        }
        let there = stored_document(&world.database, statement.cluster).await;
        let same = there.is_none() || there.as_ref() == Some(decided);
        assert!(same, "two clusters of one identity: the second list is decided");
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
}

/// Makes a token that is issued now, and sends its grant. The service may refuse to store the
/// grant.
async fn another_token(
    world: &TestInstallation,
    admin: &DiscoveryClient,
    statement: &Statement,
) -> Token {
    let (token, grant) = world.grant(admin, statement);
    let _ = admin.put_grant(&grant.sign(&world.owner)).await;
    token
}

/// Returns the number of alarms of one kind, as the service's metrics show it.
pub(super) async fn alarms(
    world: &TestInstallation,
    service: &RunningService,
    kind: &str,
) -> String {
    let text = get(world, service, "/metrics").await.1;
    let sample = format!("muster_discovery_alarms_total{{kind=\"{kind}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&sample));
    line.unwrap_or("none").to_owned()
}

/// Forms a cluster of one member through `one`. Returns its statement, its token, a dump from
/// before the commit, and its commit document.
async fn form_demo_cluster(
    world: &TestInstallation,
    one: &RunningService,
) -> (Statement, Token, Vec<u8>, Jws) {
    let admin = world.owner(one);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let dump = world.database.dump();
    form(&mut [TestAgent::new(world, one, &statement, &token, 1)]).await;
    let decided = stored_document(&world.database, statement.cluster).await.unwrap();
    (statement, token, dump, decided)
}

#[tokio::test]
async fn a_cluster_that_another_process_formed_forms_no_second_time_from_a_dump() {
    let world = TestInstallation::new().await;
    let one = world.serve().await;
    let two = start(second_process_args(&world)).await.unwrap();
    let delivered = one.app().store.ledger().process();
    let (statement, token, dump, decided) = form_demo_cluster(&world, &one).await;
    // The second process copies only the commit's hash into its ledger, not the commit document.
    wait_until("copied", async || two.app().store.ledger().commits() == 1).await;
    one.stop().await;
    world.database.load(&dump).await;

    assert_forms_no_second_list(&world, &two, (&statement, &token), &decided).await;
    let admin = world.owner(&two);
    wait_until("noticed", async || {
        admin.list_processes().await.is_ok_and(|list| !list.settled && list.generation == 2)
    })
    .await;
    // Treat the first process as lost. Only the second process's ledger still knows the commit.
    age_last_seen(&world.database, delivered).await;
    age_last_change(&world.database).await;
    assert!(admin.forget_process(delivered).await.unwrap().settled);
    assert_forms_no_second_list(&world, &two, (&statement, &token), &decided).await;
    // No second cluster forms with a token that was issued after the loss, even at a process with
    // an empty ledger.
    let fresh = another_token(&world, &admin, &statement).await;
    assert_forms_no_second_list(&world, &two, (&statement, &fresh), &decided).await;
    let three = start(world.args("ledger-3")).await.unwrap();
    assert_forms_no_second_list(&world, &three, (&statement, &fresh), &decided).await;
    let state = world.owner(&three).show_cluster(statement.cluster).await.unwrap().summary.state;
    assert_eq!(state, ClusterState::Abandoned, "closed for everybody");
    three.stop().await;
    // The first process, which sent the commit document out, returns after all.
    let one = world.serve().await;
    wait_until("its document is back", async || {
        stored_document(&world.database, statement.cluster).await.as_ref() == Some(&decided)
    })
    .await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn a_process_that_joined_after_the_dump_and_never_swept_notices_it() {
    let world = TestInstallation::new().await;
    let one = world.serve().await;
    let admin = world.owner(&one);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let dump = world.database.dump();
    let two = start(args_without_sweeps(&world, "ledger-2")).await.unwrap();
    form(&mut [TestAgent::new(&world, &one, &statement, &token, 1)]).await;
    let decided = stored_document(&world.database, statement.cluster).await.unwrap();
    one.stop().await;
    world.database.load(&dump).await;
    assert_forms_no_second_list(&world, &two, (&statement, &token), &decided).await;
    two.stop().await;
}

#[tokio::test]
async fn a_process_whose_ledger_is_empty_sees_that_a_dump_was_loaded() {
    let world = TestInstallation::new().await;
    let one = world.serve().await;
    let (statement, token, dump, decided) = form_demo_cluster(&world, &one).await;
    one.stop().await;
    world.database.load(&dump).await;
    let new = start(second_process_args(&world)).await.unwrap();
    assert_forms_no_second_list(&world, &new, (&statement, &token), &decided).await;
    let listed = world.owner(&new).list_processes().await.unwrap();
    assert!(!listed.settled, "it waits for the one that the dump knows: {listed:?}");
    new.stop().await;
}

#[tokio::test]
async fn a_process_that_the_dump_lacks_is_waited_for() {
    let world = TestInstallation::new().await;
    let two = start(second_process_args(&world)).await.unwrap();
    let (.., dump, _) = form_demo_cluster(&world, &two).await;
    let one = world.serve().await;
    let joined = one.app().store.ledger().process();
    two.app().store.look_at_database(Occasion::Doubt).await.unwrap();
    one.stop().await;
    world.database.load(&dump).await;
    let admin = world.owner(&two);
    wait_until("noticed", async || {
        admin.list_processes().await.is_ok_and(|list| {
            list.processes.iter().any(|process| process.id == joined && process.missing)
        })
    })
    .await;
    two.stop().await;
}

/// Sets the database back with `put_back`. Meanwhile a process runs that keeps its connections,
/// doesn't sweep, and hasn't copied the commit. Checks that no second list commits.
async fn assert_forms_no_second_list_unnoticed(
    put_back: impl AsyncFnOnce(&TestInstallation, &[u8]),
) {
    let world = TestInstallation::new().await;
    let mut args = args_without_sweeps(&world, "ledger-2");
    // The listener for notifications uses one connection, so one is left for requests.
    args.database.pool_size = 2;
    let two = start(args).await.unwrap();
    let sweeps = || two.app().store.ledger().known().map(|known| known.sweeps);
    wait_until("begun, and swept once", async || sweeps() == Some(2)).await;
    wait_until("connected", async || connections(&world).await.len() == 2).await;
    let before = connections(&world).await;

    let one = world.serve().await;
    let admin = world.owner(&one);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let dump = world.database.dump();
    two.app().store.look_at_database(Occasion::Sweep).await.unwrap();
    world.database.keep_decisions_quiet().await;
    form(&mut [TestAgent::new(&world, &one, &statement, &token, 1)]).await;
    let decided = stored_document(&world.database, statement.cluster).await.unwrap();
    one.stop().await;
    put_back(&world, &dump).await;

    let known = two.app().store.ledger().known().unwrap();
    assert_eq!((known.generation, known.last_copied.number), (1, 0), "it has heard of nothing");
    wait_until("one is gone", async || connections(&world).await.len() <= 2).await;
    assert_eq!(connections(&world).await, before, "it has connected anew");
    assert_forms_no_second_list(&world, &two, (&statement, &token), &decided).await;
    assert_eq!(two.app().store.refresh_generation().await.unwrap().number, 2);
    two.stop().await;
}

#[tokio::test]
async fn a_dump_loaded_over_the_tables_under_open_connections_is_noticed() {
    assert_forms_no_second_list_unnoticed(async |world, dump| {
        world.database.restore(dump, &["--clean", "--if-exists"]);
    })
    .await;
}

#[tokio::test]
async fn rows_of_a_dump_in_the_same_tables_under_open_connections_are_noticed() {
    assert_forms_no_second_list_unnoticed(async |world, dump| {
        world.database.set_rows_back(dump).await
    })
    .await;
}

/// Copies the files of a folder.
fn copy_folder(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

async fn entries(world: &TestInstallation, process: Uuid) -> i64 {
    sqlx::query_scalar("SELECT entries FROM processes WHERE id = $1")
        .bind(process)
        .fetch_one(&mut world.database.connect().await)
        .await
        .unwrap()
}

#[tokio::test]
async fn a_ledger_that_was_set_back_is_filled_from_the_database_with_an_alarm() {
    let world = TestInstallation::new().await;
    let (ledger, kept) = (world.folder.path().join("ledger"), world.folder.path().join("kept"));
    let one = world.serve().await;
    let admin = world.owner(&one);
    let first = world.cluster(&admin, "first", 1).await;
    let token = world.token(&admin, &first).await;
    form(&mut [TestAgent::new(&world, &one, &first, &token, 1)]).await;
    one.stop().await;
    copy_folder(&ledger, &kept);
    let one = world.serve().await;
    let process = one.app().store.ledger().process();
    let (statement, token, dump, decided) = form_demo_cluster(&world, &one).await;
    one.stop().await;
    assert_eq!(entries(&world, process).await, 2);
    copy_folder(&kept, &ledger);

    let one = world.serve().await;
    wait_until("filled", async || one.app().store.ledger().commits() == 2).await;
    assert_eq!(entries(&world, process).await, 2, "never counted down");
    assert_eq!(alarms(&world, &one, "ledger_set_back").await, "1");
    one.stop().await;
    // The entries that the process copied back into its ledger also prevent a second list.
    world.database.load(&dump).await;
    let one = world.serve().await;
    assert_forms_no_second_list(&world, &one, (&statement, &token), &decided).await;
    let fresh = another_token(&world, &world.owner(&one), &statement).await;
    assert_forms_no_second_list(&world, &one, (&statement, &fresh), &decided).await;
    // The ledger was completed by the first start, so the next start raises no alarm.
    one.stop().await;
    let one = world.serve().await;
    assert_eq!(alarms(&world, &one, "ledger_set_back").await, "0");
    one.stop().await;
}

/// A common restore: the dump and the ledger's backup were made in the same night.
#[tokio::test]
async fn a_dump_and_a_ledger_of_the_same_night_wait_for_an_owner() {
    let world = TestInstallation::new().await;
    let (ledger, kept) = (world.folder.path().join("ledger"), world.folder.path().join("kept"));
    let one = world.serve().await;
    let admin = world.owner(&one);
    let first = world.cluster(&admin, "first", 1).await;
    let token = world.token(&admin, &first).await;
    form(&mut [TestAgent::new(&world, &one, &first, &token, 1)]).await;
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    one.stop().await;
    copy_folder(&ledger, &kept);
    let dump = world.database.dump();
    let one = world.serve().await;
    form(&mut [TestAgent::new(&world, &one, &statement, &token, 1)]).await;
    let decided = stored_document(&world.database, statement.cluster).await.unwrap();
    one.stop().await;
    copy_folder(&kept, &ledger);
    world.database.load(&dump).await;

    // After a restart the service still waits for an owner.
    for _ in 0..2 {
        let one = world.serve().await;
        let fresh = another_token(&world, &world.owner(&one), &statement).await;
        assert_forms_no_second_list(&world, &one, (&statement, &fresh), &decided).await;
        assert!(!world.owner(&one).list_processes().await.unwrap().settled);
        assert_eq!(alarms(&world, &one, "ledger_copied").await, "1");
        one.stop().await;
    }
    let one = world.serve().await;
    let accept = AcceptRequest { system_identifier: None };
    let accepted = world.owner(&one).accept_database(&accept).await.unwrap();
    assert_eq!(accepted.abandoned, [statement.cluster]);
    assert_forms_no_second_list(&world, &one, (&statement, &token), &decided).await;
    one.stop().await;
    // After an owner's acceptance the ledger belongs to its present folder, so it no longer counts
    // as a copy.
    let one = world.serve().await;
    one.stop().await;
    let one = world.serve().await;
    assert_eq!(alarms(&world, &one, "ledger_copied").await, "0");
    one.stop().await;
}

#[tokio::test]
async fn a_ledger_with_a_line_cut_out_is_filled_from_the_start() {
    let world = TestInstallation::new().await;
    let one = world.serve().await;
    let admin = world.owner(&one);
    let mut clusters = Vec::new();
    for (number, name) in (1..).zip(["first", "second"]) {
        let statement = world.cluster(&admin, name, 1).await;
        let token = world.token(&admin, &statement).await;
        form(&mut [TestAgent::new(&world, &one, &statement, &token, 1)]).await;
        clusters.push(statement.cluster);
        wait_until("copied", async || {
            one.app().store.ledger().known().unwrap().last_copied.number == number
        })
        .await;
    }
    one.stop().await;
    // Remove the copied line of the first cluster, and the commit line of the second one.
    let path = world.folder.path().join("ledger/ledger.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let first = text.lines().find(|line| line.contains(r#""kind":"copied""#)).unwrap();
    let kept = |line: &&str| !line.contains(r#""kind":"commit""#) && *line != first;
    let lines: Vec<&str> = text.lines().filter(kept).collect();
    std::fs::write(&path, lines.join("\n") + "\n").unwrap();
    let one = world.serve().await;
    for cluster in clusters {
        assert!(one.app().store.ledger().contains(cluster));
    }
    assert_eq!(alarms(&world, &one, "ledger_set_back").await, "1");
    one.stop().await;
}

#[tokio::test]
async fn a_process_copies_the_decisions_of_others_before_it_freezes_a_list() {
    let world = TestInstallation::new().await;
    let one = start(args_without_sweeps(&world, "ledger")).await.unwrap();
    let admin = world.owner(&one);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let store = &one.app().store;
    wait_until("swept for the only time", async || {
        store.ledger().known().is_some_and(|known| known.sweeps == 2)
    })
    .await;
    // Insert another process's decision without the notification that goes with it.
    let other = Uuid::now_v7();
    sqlx::query("INSERT INTO decisions VALUES (1, $1, sha256('h'), NULL, 0, sha256('chain'))")
        .bind(other)
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    let seen = TestAgent::new(&world, &one, &statement, &token, 1).redeem().await.unwrap();
    assert!(seen.proposal.is_some(), "frozen");
    assert!(store.ledger().contains(other));
    one.stop().await;
}

#[tokio::test]
async fn a_pooled_connection_to_an_old_primary_decides_nothing() {
    let world = TestInstallation::new().await;
    let one = start(args_without_sweeps(&world, "ledger")).await.unwrap();
    let admin = world.owner(&one);
    let statement = world.cluster(&admin, "demo", 1).await;
    let token = world.token(&admin, &statement).await;
    let mut agent = TestAgent::new(&world, &one, &statement, &token, 1);
    let seen = agent.redeem().await.unwrap();
    // Show generation 2 to this process, as a new primary would. Then set it back to 1, as on the
    // old primary.
    sqlx::raw_sql("UPDATE generation SET number = 2")
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    one.app().store.look_at_database(Occasion::Doubt).await.unwrap();
    sqlx::raw_sql("UPDATE generation SET number = 1")
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    let before = connections(&world).await;
    let refused = agent.ack(&seen).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::DatabaseChanged), "{refused}");
    assert!(stored_document(&world.database, statement.cluster).await.is_none());
    wait_until("it is given to nobody again", async || {
        let now = connections(&world).await;
        before.iter().any(|pid| !now.contains(pid))
    })
    .await;
    one.stop().await;
}

/// Returns the process ids of the backends that serve the service's connections.
async fn connections(world: &TestInstallation) -> Vec<i32> {
    sqlx::query_scalar(
        "SELECT pid FROM pg_stat_activity
         WHERE datname = current_database() AND application_name = 'muster-discovery' ORDER BY pid",
    )
    .fetch_all(&mut world.database.connect().await)
    .await
    .unwrap()
}

/// Changes rows without triggers, as a restore of only the rows would.
async fn set_back(world: &TestInstallation, sql: &'static str) {
    let mut connection = world.database.connect().await;
    sqlx::raw_sql("SET session_replication_role = replica").execute(&mut connection).await.unwrap();
    sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
}

#[tokio::test]
async fn a_row_with_fewer_sweeps_than_the_ledger_begins_a_new_generation() {
    let world = TestInstallation::new().await;
    let one = start(args_without_sweeps(&world, "ledger")).await.unwrap();
    let store = &one.app().store;
    let sweeps = || store.ledger().known().map(|known| known.sweeps);
    wait_until("swept for the only time", async || sweeps() == Some(2)).await;
    store.look_at_database(Occasion::Sweep).await.unwrap();
    assert_eq!(sweeps(), Some(3));
    assert_eq!(store.refresh_generation().await.unwrap().number, 1);
    set_back(&world, "UPDATE processes SET beat = beat - 1").await;
    store.look_at_database(Occasion::Doubt).await.unwrap();
    let generation = store.refresh_generation().await.unwrap();
    assert_eq!(generation.number, 2, "{generation:?}");
    one.stop().await;
}

#[tokio::test]
async fn a_different_history_is_noticed_and_not_copied_as_a_continuation() {
    let world = TestInstallation::new().await;
    let one = start(args_without_sweeps(&world, "ledger")).await.unwrap();
    form_demo_cluster(&world, &one).await;
    let store = &one.app().store;
    let copied = || store.ledger().known().unwrap().last_copied.number;
    wait_until("copied", async || copied() == 1).await;
    // Replace decision 1 by a different one, and add decision 2.
    set_back(&world, "UPDATE decisions SET hash = sha256('x')").await;
    let mut connection = world.database.connect().await;
    sqlx::raw_sql("SELECT add_decision(gen_random_uuid(), sha256('y'), NULL)")
        .execute(&mut connection)
        .await
        .unwrap();
    store.copy_new_decisions().await.unwrap();
    assert_eq!((copied(), store.ledger().commits()), (1, 1));
    store.look_at_database(Occasion::Doubt).await.unwrap();
    let generation = store.refresh_generation().await.unwrap();
    assert_eq!(generation.number, 2, "{generation:?}");
    assert_eq!((copied(), store.ledger().commits()), (2, 2), "copied as another history");
    one.stop().await;
}
