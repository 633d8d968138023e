//! Creating and opening a log.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use node_consensus::{HardState, Position};
use node_state::disk::{DirLock, SharedDisk};

use super::codec::{Item, SegmentHeader};
use super::frame::{BLOCK_BYTES, HEADER_BYTES};
use super::reader::{LogReader, SharedLogState};
use super::recover::{self, RecoveredLog};
use super::rotate::sync_dir;
use super::segment::{Segment, encode_first_record, make_file, segment_path};
use super::writer::{PendingRecord, RESERVED_BLOCKS};
use super::{Log, LogError, LogIdentity, LogOptions, RecoveredState};

/// Name of the log's directory, beside the member's other files.
const LOG_DIR: &str = "wal";
/// Name of the log's directory until it is complete.
const TEMPORARY_LOG_DIR: &str = "wal.tmp";

impl Log {
    /// Returns whether `member_dir` holds a log.
    pub fn exists(disk: &SharedDisk, member_dir: &Path) -> Result<bool, LogError> {
        let directory = member_dir.join(LOG_DIR);
        disk.exists(&directory).map_err(LogError::io("look for", &directory))
    }

    /// Returns the identity of the log in `member_dir`, read from its oldest segment.
    pub fn identity_of(disk: &SharedDisk, member_dir: &Path) -> Result<LogIdentity, LogError> {
        let directory = member_dir.join(LOG_DIR);
        let numbers = recover::list_segments(disk, &directory)?;
        let first = *numbers.first().expect("no segments at all is a gap");
        Ok(Segment::open(disk, &directory, first)?.2.identity)
    }

    /// Creates an empty log in the existing directory `member_dir`. When this returns, the log is
    /// complete and durable. If the process dies earlier, the log is complete if
    /// [`exists`](Self::exists) returns true.
    pub fn create(
        disk: &SharedDisk,
        member_dir: &Path,
        identity: &LogIdentity,
        options: &LogOptions,
    ) -> Result<(), LogError> {
        Self::create_after(Position::default(), disk, member_dir, identity, options)
    }

    /// Creates a log like [`create`](Self::create), for a member that starts with a copy of a
    /// store. That store must durably hold everything up to `base`.
    pub fn create_after(
        base: Position,
        disk: &SharedDisk,
        member_dir: &Path,
        identity: &LogIdentity,
        options: &LogOptions,
    ) -> Result<(), LogError> {
        validate(options);
        let making = member_dir.join(TEMPORARY_LOG_DIR);
        let directory = member_dir.join(LOG_DIR);
        disk.create_dir(&making).map_err(LogError::io("create", &making))?;
        let _lock = lock(disk, &making)?;
        if Self::exists(disk, member_dir)? {
            return Err(LogError::Exists { path: directory });
        }
        // An interrupted attempt to create the log may have left files, so all files are removed
        // first.
        for name in disk.list(&making).map_err(LogError::io("list", &making))? {
            let path = making.join(name);
            disk.remove(&path).map_err(LogError::io("remove", &path))?;
        }
        let path = segment_path(&making, 1);
        let file = make_file(disk, &path, options.segment_bytes)?;
        let start = SegmentHeader {
            identity: *identity,
            segment: 1,
            segment_bytes: options.segment_bytes,
            last: base,
            repeated: initial_items(base),
        };
        let (bytes, _) = encode_first_record(&start, 1, 0);
        file.write_at(0, &bytes).map_err(LogError::io("write", &path))?;
        file.sync_data().map_err(LogError::io("sync", &path))?;
        sync_dir(disk, &making)?;
        disk.rename(&making, &directory).map_err(LogError::io("rename", &making))?;
        sync_dir(disk, member_dir)
    }

    /// Opens the log in `member_dir`, and locks it until the returned log is dropped. A torn end is
    /// truncated, and the boot counter is incremented. Everything in the result is durable.
    pub fn open(
        disk: &SharedDisk,
        member_dir: &Path,
        options: &LogOptions,
    ) -> Result<(Self, RecoveredState), LogError> {
        validate(options);
        let directory = member_dir.join(LOG_DIR);
        let held = lock(disk, &directory)?;
        // If the previous process was killed, its renames may not be durable yet. So the
        // directories are synced first.
        sync_dir(disk, member_dir)?;
        sync_dir(disk, &directory)?;
        let found = recover::recover(disk, &directory, options)?;
        // While recovery read the segments, readahead may have put them into the page cache as
        // large folios. Each write into a large folio makes a sync slow. So the cache is dropped.
        for segment in found.segments.values() {
            segment.file.sync_and_drop_cache().map_err(LogError::io("reread", &segment.path))?;
        }
        let cut = (found.torn, found.end);
        let mut log = Self::from_recovered(disk, directory, options, held, found);
        let cut = cut.0.then(|| (log.active.path.clone(), cut.1));
        log.find_spares()?;
        let boot = log.reader.shared().history.boot + 1;
        log.push(Item::Boot(boot));
        log.write_pending()?;
        log.drop_unneeded()?;
        let recovered = RecoveredState {
            identity: log.identity,
            boot,
            hard_state: log.hard_state(),
            base: log.base(),
            terms: log.terms(),
            installing: log.installing(),
            truncated_at: cut,
        };
        Ok((log, recovered))
    }

    /// Opens the log in `member_dir` without changing it: no boot is counted, and nothing is
    /// truncated. Also returns the offset of a torn end, if there is one. The caller must not
    /// write, except on a disk that discards writes.
    pub fn open_read_only(
        disk: &SharedDisk,
        member_dir: &Path,
    ) -> Result<(Self, Option<u64>), LogError> {
        let (directory, options) = (member_dir.join(LOG_DIR), LogOptions::default());
        let held = lock(disk, &directory)?;
        let found = recover::recover(disk, &directory, &options)?;
        let torn = found.torn.then_some(found.end);
        Ok((Self::from_recovered(disk, directory, &options, held, found), torn))
    }

    fn from_recovered(
        disk: &SharedDisk,
        directory: PathBuf,
        options: &LogOptions,
        held: DirLock,
        found: RecoveredLog,
    ) -> Self {
        let RecoveredLog { identity, history, segments, end, sequence, previous, .. } = found;
        let active = segments.last_key_value().expect("recovery found one").1.clone();
        let pending = PendingRecord {
            buffer: vec![0; HEADER_BYTES],
            items: Vec::new(),
            last: history.last(),
            base: history.base.index,
            hard_state: history.hard_state,
        };
        let verify = options.guards.verify_tail();
        Self {
            disk: disk.clone(),
            directory,
            identity,
            options: options.clone(),
            _lock: held,
            reader: LogReader::new(SharedLogState { verify, history, segments }),
            active,
            offset: end,
            filled: end,
            sequence,
            previous,
            spares: Vec::new(),
            next_spare: 0,
            pending,
            sealed: false,
            poisoned: false,
            disk_full: false,
            short_of_space: false,
            written_bytes: 0,
        }
    }
}

/// Returns the items of the first record of a new log that begins after `base`.
fn initial_items(base: Position) -> Vec<Item> {
    if base == Position::default() {
        return Vec::new();
    }
    let state = HardState { term: base.term, vote: 0, commit: base.index };
    vec![Item::HardState(state), Item::Base(base)]
}

fn validate(options: &LogOptions) {
    let bytes = options.segment_bytes;
    assert!(
        bytes.is_multiple_of(BLOCK_BYTES) && bytes >= 2 * RESERVED_BLOCKS * BLOCK_BYTES,
        "{bytes}"
    );
    let step = options.fill_bytes;
    assert!(step.is_multiple_of(BLOCK_BYTES) && step > 0, "{step}");
}

fn lock(disk: &SharedDisk, directory: &Path) -> Result<DirLock, LogError> {
    disk.lock_dir(directory).map_err(|error| {
        if error.kind() == ErrorKind::WouldBlock {
            LogError::InUse { path: directory.to_path_buf() }
        } else {
            LogError::io("lock", directory)(error)
        }
    })
}
