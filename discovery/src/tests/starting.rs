//! Tests of the start of a service, and of what a failed start leaves behind.

use discovery_types::key::SigningKey;

use super::support::TestInstallation;
use crate::server::{InitArgs, ServerError, init, start};

async fn processes(world: &TestInstallation) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM processes")
        .fetch_one(&mut world.database.connect().await)
        .await
        .unwrap()
}

#[tokio::test]
async fn a_service_with_another_key_directory_is_kept_out_of_the_database() {
    let world = TestInstallation::before_first_start().await;
    world.serve().await.stop().await;
    let before = processes(&world).await;
    let mut args = world.args("ledger-2");
    args.keys = world.folder.path().join("other-keys");
    init(&InitArgs {
        owner: *SigningKey::generate().public(),
        dir: args.keys.clone(),
        urls: vec!["https://127.0.0.1:1".into()],
        trust_domain: "muster".into(),
    })
    .unwrap();
    let Err(refused) = start(args).await else { panic!("it started") };
    assert!(matches!(refused, ServerError::DoNotRestart { .. }), "{refused:?}");
    assert_eq!(refused.exit_code(), 3);
    let cause = std::error::Error::source(&refused).unwrap().to_string();
    assert!(cause.contains(&world.context.pins[0].to_string()), "{cause}");
    assert_eq!(processes(&world).await, before, "it doesn't stand in the table");
    // A process with the right key directory may still use the database.
    start(world.args("ledger-3")).await.unwrap().stop().await;
}

/// Records a migration after the newest one, and returns its version.
async fn record_later_migration(world: &TestInstallation) -> i64 {
    let mut connection = world.database.connect().await;
    let newest: i64 = sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    sqlx::query(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES ($1, 'later', true, '\\x00', 0)",
    )
    .bind(newest + 1)
    .execute(&mut connection)
    .await
    .unwrap();
    newest + 1
}

#[tokio::test]
async fn a_database_that_a_newer_program_has_migrated_asks_for_no_restart() {
    let world = TestInstallation::before_first_start().await;
    world.serve().await.stop().await;
    let before = processes(&world).await;
    let known = record_later_migration(&world).await - 1;
    let newest = record_later_migration(&world).await;
    let Err(refused) = start(world.args("ledger-2")).await else { panic!("it started") };
    assert_eq!(refused.exit_code(), 3, "{refused:?}");
    let cause = std::error::Error::source(&refused).unwrap().to_string();
    assert!(cause.contains(&format!("its newest migration is {newest},")), "{cause}");
    assert!(cause.contains(&format!("knows none after {known}:")), "{cause}");
    assert!(cause.contains("install the newer muster-discovery"), "{cause}");
    assert_eq!(processes(&world).await, before);
}

#[tokio::test]
async fn a_service_whose_port_is_taken_leaves_nothing_in_the_database() {
    let world = TestInstallation::before_first_start().await;
    let service = world.serve().await;
    let before = processes(&world).await;
    let mut args = world.args("ledger-2");
    args.listen = service.addresses.clone();
    let Err(refused) = start(args).await else { panic!("it started") };
    assert_eq!(refused.exit_code(), 1, "{refused}");
    assert!(refused.to_string().contains("can't listen"), "{refused}");
    assert_eq!(processes(&world).await, before);
    service.stop().await;
}

/// In this test, the first check of a database (a "look") takes longer than a request may wait for
/// a connection.
#[tokio::test]
async fn a_service_starts_on_a_database_with_a_slow_disk() {
    let world = TestInstallation::before_first_start().await;
    world.serve().await.stop().await;
    sqlx::raw_sql(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN PERFORM pg_sleep(3); RETURN NEW; END $$;
         CREATE TRIGGER slow_disk BEFORE INSERT ON processes
             FOR EACH ROW EXECUTE FUNCTION wait()",
    )
    .execute(&mut world.database.connect().await)
    .await
    .unwrap();
    start(world.args("ledger-2")).await.unwrap().stop().await;
    assert_eq!(processes(&world).await, 2);
}

#[tokio::test]
async fn a_damaged_ledger_or_missing_key_directory_asks_for_no_restart() {
    let world = TestInstallation::before_first_start().await;
    world.serve().await.stop().await;
    let ledger = world.folder.path().join("ledger/ledger.jsonl");
    let whole = std::fs::read(&ledger).unwrap();
    let mut damaged = whole.clone();
    damaged[10] ^= 1;
    std::fs::write(&ledger, damaged).unwrap();
    let Err(refused) = start(world.args("ledger")).await else { panic!("it started") };
    assert_eq!(refused.exit_code(), 3, "{refused:?}");
    std::fs::write(&ledger, whole).unwrap();
    let mut args = world.args("ledger");
    args.keys = world.folder.path().join("none");
    let Err(refused) = start(args).await else { panic!("it started") };
    assert_eq!(refused.exit_code(), 3, "{refused:?}");
    let cause = std::error::Error::source(&refused).unwrap().to_string();
    assert!(cause.contains("muster-discovery init"), "{cause}");
    start(world.args("ledger")).await.unwrap().stop().await;
}

#[tokio::test]
async fn the_error_without_a_database_names_the_ways_to_give_one() {
    let world = TestInstallation::before_first_start().await;
    let mut args = world.args("ledger");
    args.database.database_url = None;
    let Err(refused) = start(args).await else { panic!("it started") };
    assert_eq!(refused.exit_code(), 2, "{refused:?}");
    for way in ["--managed-postgres", "--database-url", "MUSTER_DATABASE_URL"] {
        assert!(refused.to_string().contains(way), "{refused}");
    }
}

#[tokio::test]
async fn managed_postgres_refuses_a_folder_with_foreign_files_and_leaves_it_alone() {
    use std::os::unix::fs::MetadataExt;
    let world = TestInstallation::before_first_start().await;
    let dir = world.folder.path().join("letters");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("letter.txt"), "dear").unwrap();
    let look = || {
        let metadata = std::fs::metadata(&dir).unwrap();
        let entries = std::fs::read_dir(&dir).unwrap().count();
        (metadata.mode(), metadata.uid(), metadata.gid(), entries)
    };
    let before = look();
    let mut args = world.args("ledger");
    args.database.database_url = None;
    args.database.managed_postgres = Some(dir.clone());
    let Err(refused) = start(args).await else { panic!("it started") };
    assert_eq!(refused.exit_code(), 2, "{refused:?}");
    assert!(refused.to_string().contains("letter.txt"), "{refused}");
    assert_eq!(look(), before);
}
