//! Tests of the log on the simulated disk, and in one case on a real one.

mod crashes;
mod damage;
mod life;

use std::path::{Path, PathBuf};

use bytes::Bytes;
use node_consensus::{Entry, EntryKind, HardState, Position};
use node_state::disk::simulated::SimulatedDisk;
use node_state::disk::{Disk, DiskFile, OpenMode, SharedDisk};

use super::*;

fn identity() -> LogIdentity {
    LogIdentity { cluster: 0xc1, member: 0xa, incarnation: 0xabcd << 100 }
}

fn small_segments() -> LogOptions {
    LogOptions {
        segment_bytes: 64 * 1024,
        spare_segments: 1,
        fill_bytes: 16 * 1024,
        max_record_bytes: 8 * 1024,
        ..LogOptions::default()
    }
}

fn member() -> &'static Path {
    Path::new("/member")
}

fn directory() -> PathBuf {
    PathBuf::from("/member/wal")
}

/// Returns a disk with a durable directory `/member`.
fn disk(seed: u64) -> SimulatedDisk {
    let disk = SimulatedDisk::new(seed);
    disk.create_dir(member()).unwrap();
    disk.sync_dir(Path::new("/")).unwrap();
    disk
}

fn create_on(disk: &SharedDisk, member_dir: &Path) -> Log {
    Log::create(disk, member_dir, &identity(), &small_segments()).unwrap();
    Log::open(disk, member_dir, &small_segments()).unwrap().0
}

fn create(disk: &SimulatedDisk) -> Log {
    create_on(&disk.shared(), member())
}

fn open(disk: &SimulatedDisk) -> Result<(Log, RecoveredState), LogError> {
    Log::open(&disk.shared(), member(), &small_segments())
}

fn entry(index: u64, term: u64, bytes: usize) -> Entry {
    let data = vec![u8::try_from(index % 251).unwrap(); bytes];
    let kind = if bytes == 0 { EntryKind::NoOp } else { EntryKind::Normal };
    Entry { index, term, kind, data: Bytes::from(data) }
}

fn entries(indexes: std::ops::RangeInclusive<u64>, term: u64) -> Vec<Entry> {
    indexes.map(|index| entry(index, term, 100)).collect()
}

fn batch(entries: Vec<Entry>) -> Batch {
    Batch { entries, ..Batch::default() }
}

fn write(log: &mut Log, entries: Vec<Entry>) {
    log.write(&[batch(entries)]).unwrap();
}

fn at(index: u64, term: u64) -> Position {
    Position { index, term }
}

fn hard_state(term: u64, vote: u64, commit: u64) -> HardState {
    HardState { term, vote, commit }
}

fn all_entries(log: &Log) -> Vec<Entry> {
    log.read(log.base().index + 1, u64::MAX, u64::MAX).unwrap()
}

/// Returns the paths of all log files with this extension, sorted by name.
fn files(disk: &SimulatedDisk, extension: &str) -> Vec<PathBuf> {
    let names = disk.list(&directory()).unwrap();
    let ours = names.iter().filter(|name| name.ends_with(extension));
    ours.map(|name| directory().join(name)).collect()
}

fn file(disk: &SimulatedDisk, path: &Path) -> Box<dyn DiskFile> {
    disk.open(path, OpenMode::Existing).unwrap()
}
