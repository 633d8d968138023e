use std::os::unix::fs::PermissionsExt;

use super::*;

fn scratch() -> (tempfile::TempDir, PathBuf) {
    let root = tempfile::tempdir().expect("a temporary directory");
    let path = root.path().join("data");
    (root, path)
}

#[test]
fn a_new_directory_is_private() {
    let (_root, path) = scratch();
    let dir = DataDir::open(&path).expect("it can be made");
    let mode = std::fs::metadata(dir.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn an_existing_directory_keeps_its_mode() {
    let (_root, path) = scratch();
    std::fs::create_dir(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let _dir = DataDir::open(&path).expect("it can be used");
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
}

#[test]
fn a_path_that_is_no_directory_is_refused_and_unchanged() {
    let (_root, path) = scratch();
    std::fs::write(&path, "precious").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let error = DataDir::open(&path).unwrap_err();
    assert!(error.is_final(), "{error}");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn a_directory_that_others_can_write_is_accepted_and_keeps_its_mode() {
    let (_root, path) = scratch();
    std::fs::create_dir(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
    DataDir::open(&path).unwrap().count_boot().unwrap();
    let mode = |name| std::fs::metadata(path.join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("."), mode(BOOT_COUNTER)), (0o777, 0o600));
}

#[test]
fn a_prepared_symbolic_link_is_not_written_through() {
    let (root, path) = scratch();
    let victim = root.path().join("victim");
    std::fs::write(&victim, "kept").unwrap();
    std::fs::create_dir(&path).unwrap();
    for name in [format!("{BOOT_COUNTER}.tmp"), format!("{MARKER}.tmp")] {
        std::os::unix::fs::symlink(&victim, path.join(name)).unwrap();
    }
    let dir = DataDir::open(&path).unwrap();
    dir.claim(None).unwrap();
    dir.count_boot().unwrap();
    assert_eq!(std::fs::read(&victim).unwrap(), b"kept");
}

#[test]
fn a_directory_with_etcds_data_is_refused_before_anything_is_written() {
    let (_root, path) = scratch();
    std::fs::create_dir_all(path.join("member/wal")).unwrap();
    std::fs::create_dir_all(path.join("member/snap")).unwrap();
    std::fs::write(path.join(ETCDS_STORE), "bbolt").unwrap();
    let error = DataDir::open(&path).unwrap_err();
    assert!(matches!(error, DataDirError::EtcdDirectory(_)) && error.is_final(), "{error}");
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1, "only etcd's `member`");
}

#[test]
fn a_store_left_by_a_mistakenly_started_etcd_is_reported() {
    let (_root, path) = scratch();
    let dir = DataDir::open(&path).unwrap();
    dir.mark_log().unwrap();
    drop(dir);
    std::fs::create_dir_all(path.join("member/snap")).unwrap();
    std::fs::write(path.join(ETCDS_STORE), "bbolt").unwrap();
    let error = DataDir::open(&path).unwrap_err();
    assert!(matches!(error, DataDirError::EtcdStoreBeside(_)) && error.is_final(), "{error}");
    assert!(!DataDir::open_read_only(&path).unwrap().0.is_etcd_directory());
    std::fs::remove_file(path.join(ETCDS_STORE)).unwrap();
    DataDir::open(&path).unwrap();
}

#[test]
fn a_missing_log_is_an_error_once_it_was_marked() {
    let (_root, path) = scratch();
    let dir = DataDir::open(&path).unwrap();
    assert!(!dir.has_log().unwrap());
    std::fs::create_dir_all(path.join(LOG)).unwrap();
    assert!(dir.has_log().unwrap(), "a crash may have come before the mark");
    dir.mark_log().unwrap();
    assert!(dir.has_log().unwrap());
    std::fs::remove_dir_all(path.join("member")).unwrap();
    let error = dir.has_log().unwrap_err();
    assert!(matches!(error, DataDirError::LogMissing(_)) && error.is_final(), "{error}");
}

#[test]
fn a_directory_is_refused_while_another_process_has_it_open() {
    let (_root, path) = scratch();
    let first = DataDir::open(&path).unwrap();
    assert!(matches!(DataDir::open(&path), Err(DataDirError::InUse(_))));
    drop(first);
    assert!(DataDir::open(&path).is_ok());
}

#[test]
fn a_directory_keeps_its_incarnation() {
    let (_root, path) = scratch();
    let dir = DataDir::open(&path).unwrap();
    let first = dir.claim(None).unwrap();
    assert_eq!(dir.claim(None).unwrap(), first);
    assert_eq!(dir.claim(Some(first)).unwrap(), first);
}

#[test]
fn another_incarnation_is_refused_finally() {
    let (_root, path) = scratch();
    let dir = DataDir::open(&path).unwrap();
    dir.claim(Some(Incarnation([1; 16]))).unwrap();
    let error = dir.claim(Some(Incarnation([2; 16]))).unwrap_err();
    assert!(matches!(error, DataDirError::OtherIncarnation { .. }));
    assert!(error.is_final());
}

#[test]
fn a_supervisors_marker_is_read() {
    let (_root, path) = scratch();
    let dir = DataDir::open(&path).unwrap();
    std::fs::write(path.join(MARKER), format!("{}\n", "0a".repeat(16))).unwrap();
    assert_eq!(dir.claim(None).unwrap(), Incarnation([10; 16]));
    std::fs::write(path.join(MARKER), "junk").unwrap();
    assert!(matches!(dir.claim(None), Err(DataDirError::Damaged { .. })));
}

#[test]
fn each_start_has_a_higher_boot_number() {
    let (_root, path) = scratch();
    let dir = DataDir::open(&path).unwrap();
    assert_eq!(dir.count_boot().unwrap(), 1);
    assert_eq!(dir.count_boot().unwrap(), 2);
    drop(dir);
    assert_eq!(DataDir::open(&path).unwrap().count_boot().unwrap(), 3);
}

#[test]
fn a_log_without_its_boot_counter_is_refused() {
    let (_root, path) = scratch();
    let dir = DataDir::open(&path).unwrap();
    std::fs::create_dir_all(path.join(LOG)).unwrap();
    assert!(matches!(dir.count_boot(), Err(DataDirError::Damaged { .. })));
}

#[test]
fn a_member_with_a_tombstone_never_starts_again() {
    let (_root, path) = scratch();
    let dir = DataDir::open(&path).unwrap();
    let tombstone = Tombstone::new(
        Incarnation([3; 16]),
        MemberId(0xab),
        ClusterId(0xcd),
        "2026-01-01T00:00:00Z".to_owned(),
        "log".to_owned(),
    );
    dir.write_tombstone(&tombstone).unwrap();
    drop(dir);
    match DataDir::open(&path) {
        Err(DataDirError::Removed(found)) => assert_eq!(*found, tombstone),
        other => panic!("it opened: {other:?}"),
    }
    // A tombstone without contents still prevents a start.
    std::fs::write(path.join(TOMBSTONE), b"").unwrap();
    assert!(DataDir::open(&path).unwrap_err().is_final());
}

#[test]
fn a_forced_clusters_directory_still_matches_the_member_document() {
    use crate::identity::{ForcedCluster, MemberIdentity};
    let (_root, path) = scratch();
    let dir = DataDir::open(&path).expect("it can be made");
    let bearer = |of: u8| {
        let incarnation = Incarnation([of; 16]);
        MemberIdentity { cluster_id: ClusterId(1), member_id: MemberId(1), incarnation }
    };
    let (old, new, other) = (bearer(1), bearer(2), bearer(3));
    dir.claim(Some(old.incarnation)).unwrap();
    dir.write_forced_cluster(&ForcedCluster::new("t".to_owned(), old, new, None)).unwrap();
    dir.replace_marker(new.incarnation).unwrap();
    assert_eq!(dir.claim(Some(old.incarnation)).unwrap(), new.incarnation);
    assert_eq!(dir.claim(None).unwrap(), new.incarnation);
    let refused = dir.claim(Some(other.incarnation)).unwrap_err();
    assert!(matches!(refused, DataDirError::OtherIncarnation { .. }), "{refused}");
}

#[test]
fn an_unreadable_forced_cluster_record_is_damage() {
    let (_root, path) = scratch();
    let dir = DataDir::open(&path).expect("it can be made");
    for content in ["", "{}", "nonsense"] {
        std::fs::write(path.join(FORCED), content).unwrap();
        assert!(matches!(dir.forced_cluster(), Err(DataDirError::Damaged { .. })), "{content}");
    }
}
