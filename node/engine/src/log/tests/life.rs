//! The log in normal operation, and with a disk that reports errors.

use node_state::disk::RealDisk;
use node_state::disk::simulated::{DiskFailure, DiskOperation, Fault};

use super::*;

#[test]
fn what_was_written_is_there_after_a_restart() {
    let disk = disk(1);
    let mut log = create(&disk);
    let state = hard_state(2, 0xb, 3);
    let both = Batch { hard_state: Some(state), ..batch(entries(1..=5, 2)) };
    log.write(&[both]).unwrap();
    disk.crash();
    let (log, recovered) = open(&disk).unwrap();
    assert_eq!((recovered.boot, recovered.hard_state, &recovered.truncated_at), (2, state, &None));
    assert_eq!((recovered.base, recovered.last()), (at(0, 0), at(5, 2)));
    assert_eq!(recovered.identity, identity());
    assert_eq!(all_entries(&log), entries(1..=5, 2));
}

#[test]
fn a_log_can_begin_after_the_last_entry_of_a_store() {
    let disk = disk(1);
    Log::create_after(at(7, 3), &disk.shared(), member(), &identity(), &small_segments()).unwrap();
    for boot in 1..=2 {
        let (log, recovered) = open(&disk).unwrap();
        assert_eq!((recovered.base, recovered.last(), recovered.boot), (at(7, 3), at(7, 3), boot));
        assert_eq!(recovered.hard_state, hard_state(3, 0, 7));
        assert_eq!(log.check_store(at(7, 3)).unwrap(), StoreConsistency::Consistent);
        assert!(log.check_store(at(6, 3)).is_err(), "what the store has is not in the log");
    }
    let (mut log, _) = open(&disk).unwrap();
    write(&mut log, entries(8..=9, 3));
    drop(log);
    disk.crash();
    assert_eq!(all_entries(&open(&disk).unwrap().0), entries(8..=9, 3));
}

#[test]
fn the_log_works_on_a_real_disk() {
    let temporary = tempfile::tempdir().unwrap();
    let disk: SharedDisk = std::sync::Arc::new(RealDisk);
    assert!(!Log::exists(&disk, temporary.path()).unwrap());
    let mut log = create_on(&disk, temporary.path());
    assert!(Log::exists(&disk, temporary.path()).unwrap());
    for first in (1..=400).step_by(20) {
        write(&mut log, entries(first..=first + 19, 1));
    }
    let refused = Log::open(&disk, temporary.path(), &small_segments()).unwrap_err();
    assert!(matches!(refused, LogError::InUse { .. }), "{refused}");
    assert_eq!(log.compact(350).unwrap(), at(350, 1));
    while log.prepare().unwrap() {}
    drop(log);
    let (log, recovered) = Log::open(&disk, temporary.path(), &small_segments()).unwrap();
    assert_eq!((recovered.base, recovered.last()), (at(350, 1), at(400, 1)));
    assert_eq!(all_entries(&log), entries(351..=400, 1));
}

#[test]
fn many_batches_are_one_write_and_one_sync() {
    let disk = disk(1);
    let mut log = create(&disk);
    while log.prepare().unwrap() {}
    let (before, bytes) = (disk.counts(), log.written_bytes());
    let batches: Vec<_> = (1..=40).map(|index| batch(entries(index..=index, 1))).collect();
    log.write(&batches).unwrap();
    let after = disk.counts();
    assert_eq!((after.writes - before.writes, after.syncs - before.syncs), (1, 1));
    assert_eq!(log.written_bytes() - bytes, 8192);
    log.write(&[]).unwrap();
    assert_eq!(disk.counts(), after, "nothing to do, nothing done");
}

#[test]
fn a_batch_larger_than_a_record_takes_several() {
    let disk = disk(1);
    let mut log = create(&disk);
    let state = hard_state(1, 1, 190);
    let before = disk.counts().syncs;
    log.write(&[Batch { hard_state: Some(state), ..batch(entries(1..=200, 1)) }]).unwrap();
    assert_eq!(disk.counts().syncs - before, 3);
    disk.crash();
    let (log, recovered) = open(&disk).unwrap();
    assert_eq!(recovered.hard_state, state);
    assert_eq!(all_entries(&log), entries(1..=200, 1));
}

#[test]
fn an_entry_too_large_for_a_segment_is_refused() {
    let disk = disk(1);
    let mut log = create(&disk);
    let largest = 64 * 1024 - 4 * 4096 - 28 - 32 - 13;
    for index in 1..=3 {
        write(&mut log, vec![entry(index, 1, largest)]);
    }
    let refused = log.write(&[batch(vec![entry(4, 1, largest + 1)])]).unwrap_err();
    assert!(matches!(refused, LogError::EntryTooLarge { index: 4, .. }), "{refused}");
    drop(log);
    let (log, _) = open(&disk).unwrap();
    assert_eq!(
        all_entries(&log),
        (1..=3).map(|index| entry(index, 1, largest)).collect::<Vec<_>>()
    );
}

#[test]
fn a_new_leaders_entries_replace_the_tail_also_after_a_restart() {
    let disk = disk(1);
    let mut log = create(&disk);
    write(&mut log, entries(1..=5, 1));
    log.write(&[batch(entries(4..=6, 2)), batch(entries(6..=6, 3))]).unwrap();
    let expected = [entries(1..=3, 1), entries(4..=5, 2), entries(6..=6, 3)].concat();
    assert_eq!(all_entries(&log), expected);
    drop(log);
    let (log, recovered) = open(&disk).unwrap();
    assert_eq!(all_entries(&log), expected);
    assert_eq!((recovered.terms.get(5), recovered.last()), (Some(2), at(6, 3)));
}

#[test]
fn a_snapshot_replaces_the_log() {
    let disk = disk(1);
    let mut log = create(&disk);
    for first in (1..=2000).step_by(100) {
        write(&mut log, entries(first..=first + 99, 1));
    }
    let snapshot = at(5000, 4);
    log.write(&[Batch { installing: Some(snapshot), ..Batch::default() }]).unwrap();
    assert_eq!(log.last(), at(2000, 1), "the old log counts until the store holds the snapshot");
    log.write(&[Batch {
        snapshot: Some(snapshot),
        hard_state: Some(hard_state(4, 0, 5000)),
        ..batch(entries(5001..=5002, 4))
    }])
    .unwrap();
    assert_eq!(log.segment_count(), 1, "no old entry is needed any more");
    drop(log);
    let (log, recovered) = open(&disk).unwrap();
    assert_eq!((recovered.base, recovered.last()), (snapshot, at(5002, 4)));
    assert_eq!(recovered.installing, None);
    assert_eq!(all_entries(&log), entries(5001..=5002, 4));
}

#[test]
fn a_snapshot_install_interrupted_by_a_crash_is_finished() {
    let disk = disk(1);
    let mut log = create(&disk);
    let first = 3;
    // The vote belongs to term 1. The snapshot's term 4 is later, so no vote is left after the
    // install.
    let voted = Some(hard_state(1, 2, 3));
    log.write(&[Batch { hard_state: voted, ..batch(entries(1..=first, 1)) }]).unwrap();
    let snapshot = at(50, 4);
    log.write(&[Batch { installing: Some(snapshot), ..Batch::default() }]).unwrap();
    while log.segment_count() < 3 {
        let next = log.last().index + 1;
        write(&mut log, entries(next..=next, 1));
    }
    drop(log);
    let (mut log, recovered) = open(&disk).unwrap();
    assert_eq!(recovered.installing, Some(snapshot));
    assert_eq!(
        log.check_store(at(first, 1)).unwrap(),
        StoreConsistency::Consistent,
        "the store is the old one"
    );
    assert_eq!(log.check_store(snapshot).unwrap(), StoreConsistency::Installed);
    log.finish_install(snapshot).unwrap();
    write(&mut log, entries(51..=52, 4));
    drop(log);
    let (log, recovered) = open(&disk).unwrap();
    assert_eq!((recovered.base, recovered.installing), (snapshot, None));
    assert_eq!(recovered.hard_state, hard_state(4, 0, 50));
    assert_eq!(all_entries(&log), entries(51..=52, 4));
}

#[test]
fn a_store_that_does_not_fit_the_log_is_refused() {
    let disk = disk(1);
    let mut log = create(&disk);
    for first in (1..=2000).step_by(100) {
        write(&mut log, entries(first..=first + 99, 2));
    }
    log.compact(1500).unwrap();
    assert_eq!(log.check_store(at(1500, 2)).unwrap(), StoreConsistency::Consistent);
    assert_eq!(log.check_store(at(2000, 2)).unwrap(), StoreConsistency::Consistent);
    for wrong in [at(2001, 2), at(2000, 1), at(1499, 2), at(0, 0)] {
        assert!(log.check_store(wrong).unwrap_err().is_final(), "{wrong:?}");
    }
    assert_eq!(log.hard_state_with(at(1600, 2)).commit, 1600);
}

#[test]
fn recycled_segments_never_show_their_old_entries() {
    let disk = disk(1);
    let mut log = create(&disk);
    let mut names = std::collections::BTreeSet::new();
    for round in 0..60_u64 {
        let first = round * 50 + 1;
        write(&mut log, entries(first..=first + 49, 1 + round / 10));
        if round >= 5 {
            log.compact(first - 100).unwrap();
        }
        names.extend(files(&disk, "wal"));
        if round % 7 == 6 {
            drop(log);
            disk.crash();
            log = open(&disk).unwrap().0;
        }
        let kept = all_entries(&log);
        let expected =
            |entry: &Entry| *entry == self::entry(entry.index, 1 + (entry.index - 1) / 500, 100);
        assert!(kept.iter().all(expected));
        assert_eq!(kept.last().unwrap().index, first + 49);
    }
    assert!(names.len() > 5, "{names:?}");
    assert!(files(&disk, "wal").len() + files(&disk, "spare").len() <= 4);
}

#[test]
fn a_lost_new_segment_is_noticed_after_a_power_failure() {
    for seed in 0..10 {
        let disk = disk(seed);
        let mut log = create(&disk);
        while log.segment_count() < 2 {
            let next = log.last().index + 1;
            write(&mut log, entries(next..=next, 1));
        }
        disk.crash();
        drop(log);
        disk.remove(files(&disk, "wal").last().unwrap()).unwrap();
        let error = open(&disk).unwrap_err();
        let LogError::Corrupt { what, .. } = &error else { panic!("{error}") };
        assert_eq!(*what, Damage::Missing);
    }
}

#[test]
fn compaction_keeps_later_entries_and_survives_a_restart() {
    let disk = disk(1);
    let mut log = create(&disk);
    for first in (1..=3000).step_by(100) {
        write(&mut log, entries(first..=first + 99, 1));
    }
    let (before, writes) = (log.segment_count(), disk.counts().writes);
    assert_eq!(log.compact(50).unwrap(), at(0, 0));
    assert_eq!(disk.counts().writes, writes, "what frees no segment isn't worth a write");
    assert_eq!(log.compact(2500).unwrap(), at(2500, 1));
    assert!(log.segment_count() < before);
    assert_eq!(log.compact(100).unwrap(), at(2500, 1), "it never goes back");
    assert_eq!(log.compact(9999).unwrap(), at(2500, 1), "what isn't there isn't forgotten");
    disk.crash();
    let (mut log, recovered) = open(&disk).unwrap();
    assert_eq!(recovered.base, at(2500, 1));
    assert_eq!((recovered.terms.get(2500), recovered.terms.get(2501)), (None, Some(1)));
    assert_eq!(all_entries(&log), entries(2501..=3000, 1));
    assert_eq!(log.compact(3000).unwrap(), at(3000, 1));
    drop(log);
    let (mut log, recovered) = open(&disk).unwrap();
    assert_eq!(recovered.last(), at(3000, 1));
    write(&mut log, entries(3001..=3001, 2));
}

#[test]
fn the_hard_state_outlives_the_segment_it_was_written_to() {
    let disk = disk(1);
    let mut log = create(&disk);
    let state = hard_state(7, 3, 0);
    log.write(&[Batch { hard_state: Some(state), ..Batch::default() }]).unwrap();
    for first in (1..=3000).step_by(100) {
        write(&mut log, entries(first..=first + 99, 7));
    }
    log.compact(3000).unwrap();
    drop(log);
    assert_eq!(open(&disk).unwrap().1.hard_state, state);
}

#[test]
fn reading_stops_at_the_bound_but_gives_at_least_one_entry() {
    let disk = disk(1);
    let mut log = create(&disk);
    for first in (1..=1000).step_by(10) {
        write(&mut log, entries(first..=first + 9, 1));
    }
    let reader = log.reader();
    assert_eq!(reader.entries(8, 101, 1).unwrap(), entries(8..=8, 1));
    assert_eq!(reader.entries(8, 101, 148 * 5).unwrap(), entries(8..=12, 1));
    assert_eq!(reader.entries(995, 2000, u64::MAX).unwrap(), entries(995..=1000, 1));
    assert_eq!(reader.entries(5, 5, 9).unwrap(), []);
    assert_eq!(reader.entries(1001, 1002, 9).unwrap(), []);
    log.compact(500).unwrap();
    let gone = reader.entries(500, 600, 9).unwrap_err();
    assert!(matches!(gone, LogError::Compacted { low: 500 }), "{gone}");
    assert_eq!((reader.term(499), reader.term(500), reader.term(501)), (None, Some(1), Some(1)));
}

#[test]
fn a_failed_write_or_sync_ends_the_log_at_once() {
    for operation in [DiskOperation::Write, DiskOperation::Sync] {
        for failure in [DiskFailure::Io, DiskFailure::NoSpace] {
            let disk = disk(1);
            let mut log = create(&disk);
            write(&mut log, entries(1..=1, 1));
            disk.inject(Fault { operation, after: 0, times: 1, failure });
            let failed = log.write(&[batch(entries(2..=2, 1))]).unwrap_err();
            assert!(matches!(failed, LogError::Disk { .. }), "{failed}");
            let asked = disk.counts();
            for refused in [
                log.write(&[batch(entries(2..=2, 1))]).unwrap_err(),
                log.compact(1).unwrap_err(),
                log.prepare().unwrap_err(),
            ] {
                assert!(matches!(refused, LogError::Poisoned), "{refused}");
            }
            assert_eq!(disk.counts(), asked, "nothing is ever tried again");
            assert_eq!(log.last(), at(1, 1));
        }
    }
}

#[test]
fn a_restart_after_a_failed_sync_reads_the_disk_and_not_the_cache() {
    let mut lost = 0;
    for seed in 0..20 {
        let disk = disk(seed);
        let mut log = create(&disk);
        write(&mut log, entries(1..=1, 1));
        disk.inject(Fault {
            operation: DiskOperation::Sync,
            after: 0,
            times: 1,
            failure: DiskFailure::Io,
        });
        log.write(&[batch(entries(2..=20, 1))]).unwrap_err();
        disk.kill();
        let (log, recovered) = open(&disk).unwrap();
        let last = recovered.last().index;
        assert!(last == 1 || last == 20, "{last}");
        lost += u64::from(last == 1);
        drop(log);
        disk.crash();
        assert_eq!(open(&disk).unwrap().1.last().index, last, "what was told stays");
    }
    assert!(lost > 0);
}

#[test]
fn a_full_disk_is_reported_before_the_log_needs_the_space() {
    let disk = disk(1);
    let mut log = create(&disk);
    while log.prepare().unwrap() {}
    assert!(files(&disk, "spare").is_empty(), "an almost empty log keeps nothing in reserve");
    write(&mut log, entries(1..=200, 1));
    let full = Fault {
        operation: DiskOperation::Resize,
        after: 0,
        times: 1,
        failure: DiskFailure::NoSpace,
    };
    disk.inject(full);
    assert!(!log.prepare().unwrap());
    assert!(log.is_short_of_space() && files(&disk, "spare").is_empty());
    let left = log.bytes_before_new_segment();
    write(&mut log, entries(201..=201, 1));
    assert_eq!(log.bytes_before_new_segment(), left - 4096, "the log still works");
    assert!(log.prepare().unwrap(), "space came back");
    assert!(!log.is_short_of_space());
    assert_eq!(log.bytes_before_new_segment(), left - 4096 + 48 * 1024);
}

#[test]
fn a_full_disk_is_reported_in_time_without_a_pause_between_writes() {
    let disk = disk(1);
    let mut log = create(&disk);
    let full = Fault {
        operation: DiskOperation::Resize,
        after: 0,
        times: u64::MAX,
        failure: DiskFailure::NoSpace,
    };
    disk.inject(full);
    let mut next = 1;
    while !log.is_short_of_space() {
        write(&mut log, entries(next..=next, 1));
        log.keep_spare().unwrap();
        next += 1;
    }
    assert!(log.bytes_before_new_segment() > 16 * 1024, "there is room left for what frees space");
    write(&mut log, entries(next..=next, 1));
}

#[test]
fn creating_a_second_log_is_refused() {
    let disk = disk(1);
    let none = open(&disk).unwrap_err();
    assert!(matches!(none, LogError::Disk { .. }), "{none}");
    drop(create(&disk));
    let twice = Log::create(&disk.shared(), member(), &identity(), &small_segments()).unwrap_err();
    assert!(matches!(twice, LogError::Exists { .. }), "{twice}");
}

#[test]
#[should_panic(expected = "entries before 3 are missing")]
fn a_batch_that_leaves_a_gap_is_a_broken_invariant() {
    let mut log = create(&disk(1));
    write(&mut log, entries(1..=1, 1));
    let _ = log.write(&[batch(entries(3..=3, 1))]);
}

/// Returns the number of bytes that this thread has caused to be written to disk, as the kernel
/// counts them.
fn bytes_written_by_thread() -> u64 {
    let io = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    let line = io.lines().find_map(|line| line.strip_prefix("write_bytes: ")).unwrap();
    line.parse().unwrap()
}

#[test]
fn a_sync_writes_its_record_and_not_the_zeros_around_it() {
    let temporary = tempfile::tempdir().unwrap();
    let disk: SharedDisk = std::sync::Arc::new(RealDisk);
    let options = LogOptions::default();
    Log::create(&disk, temporary.path(), &identity(), &options).unwrap();
    let (mut log, _) = Log::open(&disk, temporary.path(), &options).unwrap();
    while log.prepare().unwrap() {}
    // The measured writes come after the first MiB of zeros. That MiB begins at an unaligned
    // offset, so the page cache never holds it as one folio, and a sync in it is never slow.
    (1..=300).for_each(|index| write(&mut log, entries(index..=index, 1)));
    let before = bytes_written_by_thread();
    (301..=350).for_each(|index| write(&mut log, entries(index..=index, 1)));
    let each = (bytes_written_by_thread() - before) / 50;
    assert!(each <= 64 * 1024, "{each} bytes for a record of 4 KiB");
}
