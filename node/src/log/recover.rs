//! Opening: what is there, where it ends, and whether it may end there.

use std::path::Path;

use bytes::Bytes;
use node_consensus::{HardState, Position};
use prost::Message as _;

use super::index::Index;
use super::record::{Group, HEADER, Header, Kind, Start, VERSION};
use super::segment::{Directory, disk_error};
use super::write::directory;
use super::{BLOCK, Current, Identity, Log, LogError, LogOptions, Recovered};
use crate::disk::{DiskFile, SharedDisk, read_padded};

/// Read at a time.
const WINDOW: usize = 1024 * 1024;

impl Log {
    /// Opens the log in `member_dir`, cuts a torn end, counts the boot up, and says what is there.
    pub fn open(
        disk: &SharedDisk,
        member_dir: &Path,
        options: &LogOptions,
    ) -> Result<(Self, Recovered), LogError> {
        let mut directory = directory(disk, member_dir);
        directory.scan()?;
        let mut replay = Replay::new(&directory, options)?;
        let ids = directory.live.clone();
        for id in &ids {
            if !replay.segment(&directory, *id, ids.last() == Some(id))? {
                directory.remove_last()?;
            }
        }
        let cut = replay.check_end(&directory)?;
        let mut log = replay.finish(directory, options)?;
        log.boot += 1;
        let boot = log.boot;
        log.flush(Vec::new(), boot)?;
        let recovered = Recovered {
            identity: log.identity.clone(),
            boot,
            hard_state: log.hard_state,
            base: log.index.base(),
            terms: log.index.terms().clone(),
            installing: log.installing,
            cut: cut.map(|(id, offset)| (log.directory.path(id), offset)),
        };
        Ok((log, recovered))
    }
}

/// A file read front to back through one buffer.
struct Window {
    file: Box<dyn DiskFile>,
    len: u64,
    start: u64,
    buffer: Vec<u8>,
}

impl Window {
    fn get(&mut self, offset: u64, len: usize) -> std::io::Result<&[u8]> {
        let end = self.start + self.buffer.len() as u64;
        if offset < self.start || offset + len as u64 > end {
            self.buffer.resize(len.max(WINDOW), 0);
            self.start = offset;
            read_padded(&*self.file, offset, &mut self.buffer)?;
        }
        let at = usize::try_from(offset - self.start).expect("within the buffer");
        Ok(&self.buffer[at..at + len])
    }
}

/// A record that parses; whether it fits is a matter of where it stands.
struct Found {
    header: Header,
    payload: Bytes,
    intact: bool,
}

struct Replay {
    options: LogOptions,
    log: Option<Log>,
    /// The newest segment whose first record fits.
    window: Option<(u64, Window)>,
    /// Where it ends.
    offset: u64,
}

impl Replay {
    fn new(directory: &Directory, options: &LogOptions) -> Result<Self, LogError> {
        let gap = directory.live.windows(2).find(|pair| pair[0] + 1 != pair[1]);
        let missing = match (directory.live.first(), gap) {
            (None, _) => Some(1),
            (_, Some(pair)) => Some(pair[0] + 1),
            _ => None,
        };
        if let Some(id) = missing {
            let path = directory.path(id);
            return Err(LogError::Corrupt { path, offset: 0, what: "the segment is missing" });
        }
        Ok(Self { options: options.clone(), log: None, window: None, offset: 0 })
    }

    /// Replays one segment; false if it was never used.
    fn segment(&mut self, directory: &Directory, id: u64, last: bool) -> Result<bool, LogError> {
        let path = directory.path(id);
        let file = directory.open(id)?;
        file.reread().map_err(disk_error("read anew", &path))?;
        let len = file.len().map_err(disk_error("measure", &path))?;
        let mut window = Window { file, len, start: 0, buffer: Vec::new() };
        let start = self.find(&mut window, id, 0, &path)?;
        let start = match start {
            Some(found) if found.intact && found.header.kind == Kind::Start => found,
            _ => {
                let expected = self.log.as_ref().map_or(0, |log| log.sequence);
                let used = self.later(&mut window, id, BLOCK, expected, &path)?;
                if last && self.log.is_some() && used.is_none() {
                    return Ok(false);
                }
                let what = "the segment's first record doesn't fit";
                return Err(LogError::Corrupt { path, offset: 0, what });
            }
        };
        self.begin(directory, id, &start, &path)?;
        self.offset = start.header.end(0);
        while let Some(found) = self.find(&mut window, id, self.offset, &path)? {
            let log = self.log.as_mut().expect("set by the first segment");
            let follows = found.header.sequence == log.sequence
                && found.header.previous == log.previous
                && found.header.kind == Kind::Group;
            let taken_as_found = !self.options.guards.verify_tail();
            if !follows || !(found.intact || taken_as_found) {
                break;
            }
            if let Err(what) = log.replay(id, self.offset, &found) {
                if !found.intact {
                    break;
                }
                return Err(LogError::Corrupt { path, offset: self.offset, what });
            }
            self.offset = found.header.end(self.offset);
        }
        self.window = Some((id, window));
        Ok(true)
    }

    /// The first record of a segment.
    fn begin(
        &mut self,
        directory: &Directory,
        id: u64,
        found: &Found,
        path: &Path,
    ) -> Result<(), LogError> {
        let corrupt = |what| LogError::Corrupt { path: path.to_path_buf(), offset: 0, what };
        let start = Start::decode(found.payload.clone())
            .map_err(|_| corrupt("the segment's first record is not readable"))?;
        if start.version != VERSION {
            let (version, known) = (start.version, VERSION);
            return Err(LogError::Version { path: path.to_path_buf(), version, known });
        }
        let identity = start.identity().ok_or_else(|| corrupt("an incarnation that is none"))?;
        let Some(log) = &mut self.log else {
            self.log = Some(Log {
                directory: Directory::new(directory.disk().clone(), std::path::PathBuf::new()),
                options: self.options.clone(),
                identity,
                boot: start.boot,
                hard_state: start.hard_state.into(),
                installing: start.installing.map(Into::into),
                index: Index::new(start.last.into()),
                current: Current { id, file: directory.open(id)?, offset: 0, filled: 0 },
                sequence: found.header.sequence + 1,
                previous: found.header.crc,
                poisoned: false,
                written_bytes: 0,
                buffer: Vec::new(),
            });
            return Ok(());
        };
        if log.identity != identity {
            return Err(corrupt("it is another member's"));
        }
        if found.header.sequence != log.sequence || found.header.previous != log.previous {
            let before = directory.path(id - 1);
            let what = "records are missing between it and the next segment";
            return Err(LogError::Corrupt { path: before, offset: self.offset, what });
        }
        log.sequence += 1;
        log.previous = found.header.crc;
        Ok(())
    }

    /// The newest segment ends at `offset`: is that the torn end of the last flush?
    fn check_end(&mut self, directory: &Directory) -> Result<Option<(u64, u64)>, LogError> {
        let (id, mut window) = self.window.take().expect("there is at least one segment");
        let path = directory.path(id);
        let expected = self.log.as_ref().map_or(0, |log| log.sequence);
        if self.later(&mut window, id, self.offset + BLOCK, expected, &path)?.is_some() {
            let what = "a record doesn't fit, and later ones do";
            return Err(LogError::Corrupt { path, offset: self.offset, what });
        }
        let torn = self
            .find(&mut window, id, self.offset, &path)?
            .is_some_and(|found| found.header.sequence == expected);
        self.window = Some((id, window));
        Ok(torn.then_some((id, self.offset)))
    }

    fn finish(mut self, directory: Directory, options: &LogOptions) -> Result<Log, LogError> {
        let (id, window) = self.window.take().expect("there is at least one segment");
        let mut log = self.log.take().expect("set by the first segment");
        log.current = Current { id, file: window.file, offset: self.offset, filled: window.len };
        log.directory = directory;
        log.options = options.clone();
        Ok(log)
    }

    /// What begins at `offset`, if anything does.
    fn find(
        &self,
        window: &mut Window,
        id: u64,
        offset: u64,
        path: &Path,
    ) -> Result<Option<Found>, LogError> {
        if offset + HEADER as u64 > window.len {
            return Ok(None);
        }
        let bytes = window.get(offset, HEADER).map_err(disk_error("read", path))?;
        let head = bytes.first_chunk().expect("as long as asked for");
        let Some(header) = Header::parse(head) else { return Ok(None) };
        let room = (window.len - offset - HEADER as u64).min(self.options.max_record_bytes);
        if u64::from(header.length) > room {
            return Ok(None);
        }
        let bytes = window
            .get(offset, HEADER + header.length as usize)
            .map_err(disk_error("read", path))?;
        let payload = Bytes::copy_from_slice(&bytes[HEADER..]);
        let incarnation = self.log.as_ref().map_or(0, |log| log.identity.incarnation);
        let intact = header.expected_crc(id, incarnation, &payload) == header.crc;
        Ok(Some(Found { header, payload, intact }))
    }

    /// A record at or after `from` that is intact in itself and comes after `expected`.
    fn later(
        &self,
        window: &mut Window,
        id: u64,
        from: u64,
        expected: u64,
        path: &Path,
    ) -> Result<Option<u64>, LogError> {
        let mut offset = from;
        while offset < window.len {
            let found = self.find(window, id, offset, path)?;
            if found.is_some_and(|found| found.intact && found.header.sequence > expected) {
                return Ok(Some(offset));
            }
            offset += BLOCK;
        }
        Ok(None)
    }
}

impl Log {
    fn replay(&mut self, id: u64, offset: u64, found: &Found) -> Result<(), &'static str> {
        let group =
            Group::decode(found.payload.clone()).map_err(|_| "the record is not readable")?;
        if let Some(flaw) = group.batches.iter().find_map(super::record::WireBatch::flaw) {
            return Err(flaw);
        }
        let bytes = u32::try_from(HEADER + found.payload.len()).map_err(|_| "too long")?;
        for batch in group.batches {
            self.note(batch, id, offset, bytes)?;
        }
        self.boot = self.boot.max(group.boot);
        self.sequence += 1;
        self.previous = found.header.crc;
        Ok(())
    }
}

/// What a store must be to fit the log: see [`Log::check_store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// It does.
    Fits,
    /// The store holds the snapshot that was being installed.
    Installed,
}

impl Log {
    /// Compares the store's durable position with the log. A store ahead of the log, or beside it,
    /// means that one of them lost data: refused, unless it is the snapshot that was being
    /// installed.
    pub fn check_store(&self, durable: Position) -> Result<Fit, LogError> {
        let path = self.directory.path(self.current.id);
        let corrupt =
            |what| LogError::Corrupt { path: path.clone(), offset: self.current.offset, what };
        if durable.index < self.index.base().index {
            return Err(corrupt("it begins after the store's last entry: the store lost data"));
        }
        match self.index.term_at(durable.index) {
            Some(term) if term == durable.term => Ok(Fit::Fits),
            Some(_) if self.installing == Some(durable) => Ok(Fit::Installed),
            None if self.installing == Some(durable) => Ok(Fit::Installed),
            Some(_) => Err(corrupt("its entry differs from the one that the store has applied")),
            None => Err(corrupt("it ends before the store's last entry: it lost data")),
        }
    }

    /// As last persisted, and never behind what the store has applied.
    pub fn hard_state_with(&self, applied: Position) -> HardState {
        let mut state = self.hard_state;
        state.commit = state.commit.max(applied.index).min(self.index.last().index);
        state
    }
}

/// So that identities can be compared by whoever starts the member.
impl Identity {
    /// A short text for messages.
    pub fn brief(&self) -> String {
        format!(
            "cluster {:016x}, member {:016x}, incarnation {:032x}",
            self.cluster, self.member, self.incarnation
        )
    }
}
