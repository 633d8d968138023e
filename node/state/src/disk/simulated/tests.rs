use std::collections::BTreeSet;

use redb::{Database, ReadableDatabase, TableDefinition};

use super::*;
use crate::disk::RedbBackend;

fn file(disk: &SimulatedDisk, name: &str) -> Box<dyn DiskFile> {
    disk.open(Path::new(name), OpenMode::ExistingOrNew).unwrap()
}

fn content(disk: &SimulatedDisk, name: &str) -> Vec<u8> {
    let file = disk.open(Path::new(name), OpenMode::Existing).unwrap();
    let mut bytes = vec![0; position(file.len().unwrap())];
    file.read_at(0, &mut bytes).unwrap();
    bytes
}

fn position(at: u64) -> usize {
    usize::try_from(at).unwrap()
}

#[test]
fn synced_data_survives_any_crash() {
    for seed in 0..100 {
        let disk = SimulatedDisk::new(seed);
        file(&disk, "/f").write_at(0, &[7; 2000]).unwrap();
        file(&disk, "/f").sync_data().unwrap();
        disk.sync_dir(Path::new("/")).unwrap();
        disk.crash();
        assert_eq!(content(&disk, "/f"), [7; 2000], "seed {seed}");
    }
}

#[test]
fn unsynced_sectors_survive_whole_or_not_at_all_in_any_mixture() {
    let mut seen = BTreeSet::new();
    for seed in 0..200 {
        let disk = SimulatedDisk::new(seed);
        file(&disk, "f").write_at(0, &[1; 3 * 512]).unwrap();
        file(&disk, "f").sync_data().unwrap();
        disk.sync_dir(Path::new("")).unwrap();
        file(&disk, "f").write_at(0, &[2; 3 * 512]).unwrap();
        disk.crash();
        let bytes = content(&disk, "f");
        for sector in bytes.chunks(512) {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "a sector is never torn");
        }
        seen.insert([bytes[0], bytes[512], bytes[1024]]);
    }
    assert_eq!(seen.len(), 8, "every subset comes up: {seen:?}");
}

#[test]
fn a_full_disk_stops_growth_but_not_overwriting() {
    let disk = SimulatedDisk::new(1);
    file(&disk, "f").write_at(0, &[1; 1000]).unwrap();
    disk.limit_free_bytes(1000);
    file(&disk, "f").write_at(500, &[2; 1000]).unwrap();
    assert_eq!(disk.free_bytes(Path::new("/")).unwrap(), 500);
    assert!(!disk.has_failed());
    let full = file(&disk, "g").allocate(501).unwrap_err();
    assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    assert!(disk.has_failed());
    file(&disk, "g").set_len(500).unwrap();
    file(&disk, "f").write_at(0, &[3; 1500]).unwrap();
    file(&disk, "g").write_at(0, &[3; 501]).unwrap_err();
    disk.limit_free_bytes(u64::MAX);
    file(&disk, "g").write_at(0, &[3; 501]).unwrap();
}

#[test]
fn the_same_seed_loses_the_same_data() {
    let run = |seed| {
        let disk = SimulatedDisk::new(seed);
        disk.sync_dir(Path::new("")).unwrap();
        for round in 0..20_u8 {
            file(&disk, "f").write_at(u64::from(round) * 300, &[round; 1000]).unwrap();
            disk.sync_dir(Path::new("")).unwrap();
            disk.crash();
        }
        content(&disk, "f")
    };
    assert_eq!(run(5), run(5));
    assert_ne!(run(5), run(6));
}

#[test]
fn a_name_survives_only_if_its_directory_was_synced() {
    let mut lost = 0;
    for seed in 0..50 {
        let disk = SimulatedDisk::new(seed);
        file(&disk, "kept").sync_data().unwrap();
        disk.sync_dir(Path::new("")).unwrap();
        file(&disk, "new").sync_data().unwrap();
        disk.crash();
        assert!(disk.exists(Path::new("kept")).unwrap());
        lost += usize::from(!disk.exists(Path::new("new")).unwrap());
    }
    assert!(lost > 0 && lost < 50, "lost {lost} of 50");
}

#[test]
fn directory_operations_survive_in_their_order() {
    let mut seen = BTreeSet::new();
    for seed in 0..100 {
        let disk = SimulatedDisk::new(seed);
        file(&disk, "a");
        disk.sync_dir(Path::new("")).unwrap();
        disk.rename(Path::new("a"), Path::new("b")).unwrap();
        file(&disk, "c");
        disk.remove(Path::new("b")).unwrap();
        disk.crash();
        seen.insert(disk.list(Path::new("")).unwrap());
    }
    let expected: [&[&str]; 4] = [&["a"], &["b"], &["b", "c"], &["c"]];
    assert_eq!(
        seen,
        expected.iter().map(|names| names.iter().map(|n| (*n).to_owned()).collect()).collect()
    );
}

#[test]
fn a_second_sync_does_not_repair_a_failed_one() {
    let mut lost = 0;
    for seed in 0..20 {
        let disk = SimulatedDisk::new(seed);
        let open = file(&disk, "f");
        open.write_at(0, &[1; 512]).unwrap();
        open.sync_data().unwrap();
        disk.sync_dir(Path::new("")).unwrap();
        open.write_at(0, &[2; 512]).unwrap();
        disk.inject(Fault {
            operation: DiskOperation::Sync,
            after: 0,
            times: 1,
            failure: DiskFailure::Io,
        });
        assert_eq!(open.sync_data().unwrap_err().raw_os_error(), Some(5));
        open.sync_data().unwrap();
        assert_eq!(content(&disk, "f")[0], 2, "the cache still shows it");
        disk.kill();
        let again = file(&disk, "f");
        again.sync_and_drop_cache().unwrap();
        lost += usize::from(content(&disk, "f")[0] == 1);
    }
    assert!(lost > 0 && lost < 20, "lost {lost} of 20");
}

#[test]
fn without_power_nothing_works_until_the_restart() {
    let disk = SimulatedDisk::new(1);
    let open = file(&disk, "f");
    disk.power_off_after(2);
    open.write_at(0, b"x").unwrap();
    assert!(open.sync_data().is_err() && disk.is_power_off());
    assert!(disk.exists(Path::new("f")).is_err());
    disk.crash();
    assert!(disk.exists(Path::new("f")).is_ok());
    assert!(open.len().is_err(), "what was opened before is dead");
}

#[test]
fn a_lock_ends_with_its_holder_or_the_process() {
    let disk = SimulatedDisk::new(1);
    let root = Path::new("");
    let held = disk.lock_dir(root).unwrap();
    assert_eq!(disk.lock_dir(root).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    disk.kill();
    let other = disk.lock_dir(root).unwrap();
    drop(held);
    assert!(disk.lock_dir(root).is_err(), "a dead lock's end frees nothing");
    drop(other);
    disk.lock_dir(root).unwrap();
}

#[test]
fn a_duplicate_does_not_change_with_the_original() {
    let disk = SimulatedDisk::new(1);
    file(&disk, "f").write_at(0, b"old").unwrap();
    let copy = disk.duplicate(2);
    file(&disk, "f").write_at(0, b"new").unwrap();
    assert_eq!(content(&copy, "f"), b"old");
}

#[test]
fn a_database_on_the_simulated_disk_keeps_durable_commits() {
    const TABLE: TableDefinition<u64, u64> = TableDefinition::new("t");
    for seed in 0..20 {
        let disk = SimulatedDisk::new(seed);
        for round in 0..5 {
            let backend = RedbBackend::new(file(&disk, "db")).unwrap();
            disk.sync_dir(Path::new("")).unwrap();
            let database = Database::builder().create_with_backend(backend).unwrap();
            if round > 0 {
                let read = database.begin_read().unwrap();
                let found = read.open_table(TABLE).unwrap().get(0).unwrap().map(|v| v.value());
                assert_eq!(found, Some(round - 1), "seed {seed}");
            }
            let write = database.begin_write().unwrap();
            write.open_table(TABLE).unwrap().insert(0, round).unwrap();
            write.commit().unwrap();
            let mut lazy = database.begin_write().unwrap();
            lazy.set_durability(redb::Durability::None).unwrap();
            lazy.open_table(TABLE).unwrap().insert(1, round).unwrap();
            lazy.commit().unwrap();
            disk.crash();
        }
    }
}
