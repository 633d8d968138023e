//! The log over a real directory. Power loss is the simulation's matter; here a crash is a file
//! cut or damaged by hand.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::disk::RealDisk;

struct Fixture {
    dir: tempfile::TempDir,
    disk: SharedDisk,
    options: LogOptions,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let disk: SharedDisk = Arc::new(RealDisk);
        let options = LogOptions {
            segment_bytes: 64 * 1024,
            fill_bytes: 16 * 1024,
            spare_segments: 1,
            max_record_bytes: 32 * 1024,
            ..LogOptions::default()
        };
        let fixture = Self { dir, disk, options };
        Log::create(&fixture.disk, fixture.dir.path(), &identity(), &fixture.options).unwrap();
        fixture
    }

    fn open(&self) -> (Log, Recovered) {
        self.try_open().unwrap()
    }

    fn try_open(&self) -> Result<(Log, Recovered), LogError> {
        Log::open(&self.disk, self.dir.path(), &self.options)
    }

    fn segment(&self, id: u64) -> PathBuf {
        self.dir.path().join("wal").join(segment::live_name(id))
    }

    fn file(&self, id: u64) -> std::fs::File {
        std::fs::OpenOptions::new().read(true).write(true).open(self.segment(id)).unwrap()
    }
}

fn identity() -> Identity {
    Identity { cluster: 7, member: 1, incarnation: 0xabcd << 100, voters: vec![1, 2, 3] }
}

fn entry(index: u64, term: u64, bytes: usize) -> Entry {
    let fill = u8::try_from((index * 31 + term) % 251).unwrap();
    Entry { index, term, data: Bytes::from(vec![fill; bytes]) }
}

fn entries(range: std::ops::RangeInclusive<u64>, term: u64) -> Batch {
    let commit = range.start() - 1;
    Batch {
        hard_state: Some(HardState { term, vote: 1, commit }),
        entries: range.map(|index| entry(index, term, 100)).collect(),
        ..Batch::default()
    }
}

fn all(log: &Log) -> Vec<(u64, u64)> {
    let read = log.read(log.base().index + 1, u64::MAX, u64::MAX).unwrap();
    for found in &read {
        assert_eq!(found, &entry(found.index, found.term, found.data.len()));
    }
    read.iter().map(|entry| (entry.index, entry.term)).collect()
}

#[test]
fn what_was_written_is_there_after_reopening() {
    let fixture = Fixture::new();
    let (mut log, first) = fixture.open();
    assert_eq!((first.boot, &first.identity), (1, &identity()));
    log.write(&[entries(1..=3, 1), entries(3..=4, 2)]).unwrap();
    drop(log);
    let (log, found) = fixture.open();
    assert_eq!(found.boot, 2);
    assert_eq!(found.hard_state, HardState { term: 2, vote: 1, commit: 2 });
    assert_eq!(all(&log), [(1, 1), (2, 1), (3, 2), (4, 2)]);
    assert_eq!(found.cut, None);
}

#[test]
fn a_flush_begins_at_a_block_of_its_own() {
    let fixture = Fixture::new();
    let (mut log, _) = fixture.open();
    let before = log.written_bytes();
    log.write(&[entries(1..=1, 1)]).unwrap();
    assert_eq!(log.written_bytes() - before, BLOCK);
}

#[test]
fn a_torn_end_is_cut_and_written_over() {
    let fixture = Fixture::new();
    let (mut log, _) = fixture.open();
    log.write(&[entries(1..=2, 1)]).unwrap();
    log.write(&[entries(3..=4, 1)]).unwrap();
    let at = log.current.offset - BLOCK;
    drop(log);
    fixture.file(1).write_all_at(&[0; 64], at + 100).unwrap();
    let (mut log, found) = fixture.open();
    assert_eq!(found.cut, Some((fixture.segment(1), at)));
    assert_eq!(all(&log), [(1, 1), (2, 1)]);
    log.write(&[entries(3..=3, 2)]).unwrap();
    drop(log);
    assert_eq!(all(&fixture.open().0), [(1, 1), (2, 1), (3, 2)]);
}

#[test]
fn damage_before_the_end_is_refused_with_file_and_offset() {
    let fixture = Fixture::new();
    let (mut log, _) = fixture.open();
    log.write(&[entries(1..=2, 1)]).unwrap();
    let at = log.current.offset - BLOCK;
    log.write(&[entries(3..=4, 1)]).unwrap();
    drop(log);
    fixture.file(1).write_all_at(&[0xff], at + 100).unwrap();
    match fixture.try_open() {
        Err(LogError::Corrupt { path, offset, .. }) => {
            assert_eq!((path, offset), (fixture.segment(1), at));
        }
        other => panic!("opened a damaged log: {other:?}"),
    }
}

#[test]
fn a_flush_that_was_lost_whole_under_a_later_one_is_refused() {
    let fixture = Fixture::new();
    let (mut log, _) = fixture.open();
    log.write(&[entries(1..=2, 1)]).unwrap();
    let at = log.current.offset - BLOCK;
    log.write(&[entries(3..=4, 1)]).unwrap();
    drop(log);
    fixture.file(1).write_all_at(&[0; 4096], at).unwrap();
    assert!(matches!(fixture.try_open(), Err(LogError::Corrupt { offset, .. }) if offset == at));
}

#[test]
fn a_missing_segment_is_refused() {
    let fixture = Fixture::new();
    let (mut log, _) = fixture.open();
    for index in 1..=60 {
        log.write(&[entries(index..=index, 1)]).unwrap();
    }
    assert!(log.segments() > 3);
    drop(log);
    std::fs::remove_file(fixture.segment(2)).unwrap();
    assert!(matches!(fixture.try_open(), Err(LogError::Corrupt { .. })));
}

#[test]
fn compaction_drops_whole_segments_and_their_files_are_used_again() {
    let fixture = Fixture::new();
    let (mut log, _) = fixture.open();
    for index in 1..=40 {
        log.write(&[entries(index..=index, 1)]).unwrap();
    }
    let base = log.compact(30).unwrap();
    assert!(base.index <= 30 && base.index > 15, "{base:?}");
    let files = || fixture.disk.list(&fixture.dir.path().join("wal")).unwrap();
    assert!(files().iter().any(|name| name.ends_with(".spare")), "{:?}", files());
    for index in 41..=60 {
        log.write(&[entries(index..=index, 2)]).unwrap();
    }
    assert!(files().iter().all(|name| name.ends_with(".wal")), "{:?}", files());
    drop(log);
    let (log, found) = fixture.open();
    assert_eq!(found.base, base);
    assert_eq!(all(&log).len() as u64, 60 - base.index);
}

#[test]
fn old_bytes_in_a_recycled_segment_are_no_records() {
    let fixture = Fixture::new();
    let (mut log, _) = fixture.open();
    for index in 1..=31 {
        log.write(&[entries(index..=index, 1)]).unwrap();
    }
    log.compact(31).unwrap();
    let segment = log.current.id;
    while log.current.id == segment {
        let next = log.last().index + 1;
        log.write(&[entries(next..=next, 1)]).unwrap();
    }
    let last = log.last();
    drop(log);
    let (log, found) = fixture.open();
    assert_eq!((log.last(), found.cut), (last, None));
}

#[test]
fn a_snapshot_replaces_the_log() {
    let fixture = Fixture::new();
    let (mut log, _) = fixture.open();
    log.write(&[entries(1..=3, 1)]).unwrap();
    let at = Position { index: 50, term: 4 };
    log.write(&[Batch { installing: Some(at), ..Batch::default() }]).unwrap();
    drop(log);
    let (mut log, found) = fixture.open();
    assert_eq!(found.installing, Some(at));
    assert_eq!(log.check_store(at).unwrap(), recover::Fit::Installed);
    log.finish_install(at).unwrap();
    log.write(&[entries(51..=52, 4)]).unwrap();
    drop(log);
    let (log, found) = fixture.open();
    assert_eq!((found.base, found.installing, found.hard_state.term), (at, None, 4));
    assert_eq!(all(&log), [(51, 4), (52, 4)]);
}

#[test]
fn a_store_that_knows_more_than_the_log_is_refused() {
    let fixture = Fixture::new();
    let (mut log, _) = fixture.open();
    log.write(&[entries(1..=3, 1)]).unwrap();
    assert!(log.check_store(Position { index: 3, term: 1 }).is_ok());
    assert!(log.check_store(Position { index: 4, term: 1 }).is_err());
    assert!(log.check_store(Position { index: 3, term: 2 }).is_err());
}

#[test]
fn a_batch_larger_than_a_record_takes_several() {
    let fixture = Fixture::new();
    let (mut log, _) = fixture.open();
    let batch = Batch {
        entries: (1..=50).map(|index| entry(index, 1, 1000)).collect(),
        ..Batch::default()
    };
    log.write(&[batch]).unwrap();
    drop(log);
    assert_eq!(all(&fixture.open().0).len(), 50);
}

#[test]
fn reading_stops_at_the_bound_but_gives_at_least_one_entry() {
    let fixture = Fixture::new();
    let (mut log, _) = fixture.open();
    log.write(&[entries(1..=10, 1)]).unwrap();
    assert_eq!(log.read(2, 11, 1).unwrap().len(), 1);
    assert_eq!(log.read(2, 11, 350).unwrap().len(), 3);
    assert!(log.read(11, 12, 1).unwrap().is_empty());
}

#[test]
fn filling_ahead_and_spares_come_step_by_step() {
    let fixture = Fixture::new();
    let (mut log, _) = fixture.open();
    let mut steps = 0;
    while log.prepare().unwrap() {
        steps += 1;
        assert!(steps < 100);
    }
    assert_eq!(std::fs::metadata(fixture.segment(1)).unwrap().len(), 64 * 1024);
    let names = fixture.disk.list(&fixture.dir.path().join("wal")).unwrap();
    assert_eq!(names.iter().filter(|name| name.ends_with(".spare")).count(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever prefix of the file survives, what was flushed within it is there and nothing else.
    #[test]
    fn every_prefix_of_the_file_opens_to_what_was_flushed_in_it(
        flushes in proptest::collection::vec((1_u64..4, 1_usize..6000), 1..6),
        cut in 0_u64..64 * 1024,
    ) {
        let fixture = Fixture::new();
        let (mut log, _) = fixture.open();
        let mut last = 0;
        for (count, bytes) in flushes {
            let new = (last + 1..=last + count).map(|index| entry(index, 1, bytes)).collect();
            log.write(&[Batch { entries: new, ..Batch::default() }]).unwrap();
            last += count;
            prop_assume!(log.current.id == 1);
        }
        let cut = cut.max(2 * BLOCK);
        let is_whole = |index: &u64| {
            let extent = log.index.find(*index).unwrap().1;
            extent.offset + u64::from(extent.bytes) <= cut
        };
        let expected = (1..=last).filter(is_whole).max().unwrap_or(0);
        drop(log);
        fixture.file(1).set_len(cut).unwrap();
        let (log, _) = fixture.open();
        prop_assert_eq!(log.last().index, expected);
        all(&log);
    }

    #[test]
    fn random_bytes_in_the_last_flush_never_panic(
        at in 0_u64..4096,
        junk in proptest::collection::vec(any::<u8>(), 1..400),
    ) {
        let fixture = Fixture::new();
        let (mut log, _) = fixture.open();
        log.write(&[entries(1..=2, 1)]).unwrap();
        log.write(&[entries(3..=9, 1)]).unwrap();
        let start = log.current.offset - BLOCK;
        drop(log);
        fixture.file(1).write_all_at(&junk, start + at).unwrap();
        let last = fixture.try_open().unwrap().0.last().index;
        prop_assert!(last == 2 || last == 9);
    }

    #[test]
    fn one_flipped_byte_is_refused_or_changes_nothing(at in 0_u64..5 * 4096) {
        let fixture = Fixture::new();
        let (mut log, _) = fixture.open();
        log.write(&[entries(1..=2, 1)]).unwrap();
        log.write(&[entries(3..=9, 1)]).unwrap();
        log.write(&[]).unwrap();
        drop(fixture.open());
        let file = fixture.file(1);
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x40], at).unwrap();
        if let Ok((log, _)) = fixture.try_open() {
            prop_assert_eq!(all(&log).len(), 9);
        }
    }
}
