use std::time::Duration;

use sqlx::{ConnectOptions, Connection};

use super::*;

fn settings(dir: &Path) -> ManagedPostgresSettings {
    ManagedPostgresSettings { dir: dir.to_owned(), binaries: None, user: "postgres".into() }
}

/// Makes a folder that an unprivileged user can enter.
fn folder() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    tempfile::Builder::new()
        .permissions(std::fs::Permissions::from_mode(0o755))
        .tempdir_in("/tmp")
        .unwrap()
}

async fn row_count(postgres: &ManagedPostgres) -> Result<i32, sqlx::Error> {
    let mut connection = postgres.connect_options("postgres").connect().await?;
    let answer = sqlx::query_scalar("SELECT count(*)::int FROM t").fetch_one(&mut connection).await;
    connection.close().await?;
    answer
}

#[tokio::test]
async fn postgres_survives_a_kill_and_keeps_its_data_over_a_restart() {
    let folder = folder();
    let dir = folder.path().join("pg");
    let postgres = ManagedPostgres::start(settings(&dir)).await.unwrap();
    let mut connection = postgres.connect_options("postgres").connect().await.unwrap();
    let checksums: String =
        sqlx::query_scalar("SHOW data_checksums").fetch_one(&mut connection).await.unwrap();
    assert_eq!(checksums, "on");
    let addresses: String =
        sqlx::query_scalar("SHOW listen_addresses").fetch_one(&mut connection).await.unwrap();
    assert_eq!(addresses, "");
    sqlx::raw_sql("CREATE TABLE t (x int); INSERT INTO t VALUES (1), (2)")
        .execute(&mut connection)
        .await
        .unwrap();

    let pid = postgres.pid().unwrap();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid as i32).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    let mut state = postgres.state.clone();
    state
        .wait_for(|state| matches!(state, PostgresState::Ready { pid: new } if *new != pid))
        .await
        .unwrap();
    assert_eq!(row_count(&postgres).await.unwrap(), 2);

    postgres.stop().await;
    assert!(!dir.join("data/postmaster.pid").exists(), "it was stopped in order");
    // A power failure leaves such a `postmaster.pid`. Its process id now belongs to another
    // process.
    std::fs::write(dir.join("data/postmaster.pid"), "1\n/nowhere\n0\n5432\n\n\n\n").unwrap();
    let postgres = ManagedPostgres::start(settings(&dir)).await.unwrap();
    assert_eq!(row_count(&postgres).await.unwrap(), 2);

    let second = ManagedPostgres::start(settings(&dir)).await.unwrap_err();
    assert!(matches!(*second, ManagedPostgresError::InUse { .. }), "{second}");
    postgres.stop().await;
}

#[tokio::test]
async fn a_directory_whose_socket_path_is_too_long_is_refused_and_not_created() {
    let folder = folder();
    let dir = folder.path().join("x".repeat(100));
    let error = ManagedPostgres::start(settings(&dir)).await.unwrap_err();
    assert!(matches!(*error, ManagedPostgresError::PathTooLong { .. }), "{error}");
    assert!(!dir.exists());
}

#[tokio::test]
async fn the_error_for_missing_binaries_says_what_to_install() {
    let folder = folder();
    let mut settings = settings(&folder.path().join("pg"));
    settings.binaries = Some(folder.path().join("nothing-here"));
    let error = ManagedPostgres::start(settings).await.unwrap_err();
    assert!(error.to_string().contains("apt-get install postgresql"), "{error}");
}

#[tokio::test]
async fn a_database_of_another_major_version_is_not_touched() {
    let folder = folder();
    let data = folder.path().join("pg/data");
    std::fs::create_dir_all(&data).unwrap();
    std::fs::write(data.join("PG_VERSION"), "9\n").unwrap();
    let error = ManagedPostgres::start(settings(&folder.path().join("pg"))).await.unwrap_err();
    assert!(matches!(*error, ManagedPostgresError::Version { .. }), "{error}");
}

#[test]
fn dropping_the_handle_stops_the_server() {
    let folder = folder();
    let dir = folder.path().join("pg");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut postgres = runtime.block_on(ManagedPostgres::start(settings(&dir))).unwrap();
    let thread = postgres.thread.take().unwrap();
    drop(postgres);
    let waiting = std::thread::spawn(move || thread.join().unwrap());
    for _ in 0..1_200 {
        if waiting.is_finished() {
            break;
        }
        std::thread::sleep(Duration::from_millis(25));
    }
    assert!(waiting.is_finished(), "the server is still supervised");
    assert!(!dir.join("data/postmaster.pid").exists());
}

#[tokio::test]
async fn links_that_the_servers_user_could_make_are_neither_followed_nor_given_away() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    if !rustix::process::geteuid().is_root() {
        // Only root can give files to another user.
        return;
    }
    let folder = folder();
    let dir = folder.path().join("pg");
    let postgres = ManagedPostgres::start(settings(&dir)).await.unwrap();
    let owner = |path: &Path| std::fs::symlink_metadata(path).unwrap();
    let base = owner(&dir);
    assert_eq!((base.uid(), base.permissions().mode() & 0o777), (0, 0o711));
    assert_eq!(owner(&dir.join("postgres.log")).uid(), 0);
    for own in ["data", "run"] {
        assert_ne!(owner(&dir.join(own)).uid(), 0, "{own}");
    }
    postgres.stop().await;
    // A start must not follow symbolic links, which an unprivileged user who once owned the
    // directory could have left.
    let target = folder.path().join("target");
    for (link, is_dir) in [("run", true), ("postgres.log", false), ("lock", false)] {
        let (path, kept) = (dir.join(link), dir.join("kept"));
        std::fs::rename(&path, &kept).unwrap();
        if is_dir {
            std::fs::create_dir(&target).unwrap();
        } else {
            std::fs::write(&target, "").unwrap();
        }
        symlink(&target, &path).unwrap();
        let refused = ManagedPostgres::start(settings(&dir)).await;
        assert!(refused.is_err(), "{link}");
        let after = owner(&target);
        assert_eq!((after.uid(), after.is_dir() || after.len() == 0), (0, true), "{link}");
        std::fs::remove_file(&path).unwrap();
        std::fs::rename(&kept, &path).unwrap();
        if is_dir { std::fs::remove_dir(&target) } else { std::fs::remove_file(&target) }.unwrap();
    }
    ManagedPostgres::start(settings(&dir)).await.unwrap().stop().await;
}
