//! The directory: names, spares, and making files durable before they are used.

use std::io;
use std::path::{Path, PathBuf};

use super::{LogError, LogOptions};
use crate::disk::{DiskFile, Open, SharedDisk};

const LIVE: &str = ".wal";
const SPARE: &str = ".spare";
const MAKING: &str = ".making";

/// The directory's name beside its members.
pub(super) const NAME: &str = "wal";
pub(super) const NAME_WHILE_MADE: &str = "wal.tmp";

/// One log's directory.
#[derive(Debug)]
pub(super) struct Directory {
    disk: SharedDisk,
    path: PathBuf,
    /// Ids of live segments, ascending and without gaps.
    pub live: Vec<u64>,
    spares: Vec<u64>,
    next_spare: u64,
    /// A spare that is being filled, and how far.
    making: Option<(Box<dyn DiskFile>, u64)>,
}

pub(super) fn live_name(id: u64) -> String {
    format!("{id:016x}{LIVE}")
}

fn spare_name(id: u64) -> String {
    format!("{id:016x}{SPARE}")
}

fn id_of(name: &str, suffix: &str) -> Option<u64> {
    let stem = name.strip_suffix(suffix)?;
    (stem.len() == 16).then(|| u64::from_str_radix(stem, 16).ok())?
}

impl Directory {
    pub fn new(disk: SharedDisk, path: PathBuf) -> Self {
        Self { disk, path, live: Vec::new(), spares: Vec::new(), next_spare: 1, making: None }
    }

    /// Reads the names. What was being made when the process died is removed.
    pub fn scan(&mut self) -> Result<(), LogError> {
        let names = self.disk.list(&self.path).map_err(disk_error("list", &self.path))?;
        for name in &names {
            if let Some(id) = id_of(name, LIVE) {
                self.live.push(id);
            } else if let Some(id) = id_of(name, SPARE) {
                self.spares.push(id);
                self.next_spare = self.next_spare.max(id + 1);
            } else if name.ends_with(MAKING) {
                let path = self.path.join(name);
                self.disk.remove(&path).map_err(disk_error("remove", &path))?;
            }
        }
        self.live.sort_unstable();
        Ok(())
    }

    pub fn disk(&self) -> &SharedDisk {
        &self.disk
    }

    pub fn path(&self, id: u64) -> PathBuf {
        self.path.join(live_name(id))
    }

    pub fn segments(&self) -> usize {
        self.live.len()
    }

    pub fn open(&self, id: u64) -> Result<Box<dyn DiskFile>, LogError> {
        let path = self.path(id);
        self.disk.open(&path, Open::Existing).map_err(disk_error("open", &path))
    }

    /// A file for segment `id`: a spare if there is one. Its name is durable. Returns how far it
    /// is filled, whatever with.
    pub fn add(&mut self, id: u64) -> Result<(Box<dyn DiskFile>, u64), LogError> {
        let path = self.path(id);
        let file = match self.spares.pop() {
            Some(spare) => {
                let spare = self.path.join(spare_name(spare));
                self.disk.rename(&spare, &path).map_err(disk_error("rename", &spare))?;
                self.disk.open(&path, Open::Existing)
            }
            None => self.disk.open(&path, Open::New),
        };
        let file = file.map_err(disk_error("open", &path))?;
        self.sync()?;
        self.live.push(id);
        let filled = file.len().map_err(disk_error("measure", &path))?;
        Ok((file, filled))
    }

    /// The oldest segment becomes a spare, or goes. Durable when this returns, so that segments
    /// disappear from the front only.
    pub fn retire_first(&mut self, options: &LogOptions) -> Result<(), LogError> {
        let id = self.live[0];
        let path = self.path(id);
        if self.spares.len() < options.spare_segments {
            let spare = self.path.join(spare_name(self.next_spare));
            self.disk.rename(&path, &spare).map_err(disk_error("rename", &path))?;
            self.spares.push(self.next_spare);
            self.next_spare += 1;
        } else {
            self.disk.remove(&path).map_err(disk_error("remove", &path))?;
        }
        self.live.remove(0);
        self.sync()
    }

    /// The last segment was never used: its first record is torn.
    pub fn remove_last(&mut self) -> Result<(), LogError> {
        if let Some(id) = self.live.pop() {
            let path = self.path(id);
            self.disk.remove(&path).map_err(disk_error("remove", &path))?;
            self.sync()?;
        }
        Ok(())
    }

    pub fn sync(&self) -> Result<(), LogError> {
        self.disk.sync_dir(&self.path).map_err(disk_error("sync", &self.path))
    }

    /// One step towards the number of spares wanted; whether there is more to do. A full disk is
    /// no failure here: nothing depends on a spare yet.
    pub fn make_spare(&mut self, options: &LogOptions) -> Result<bool, LogError> {
        if self.spares.len() >= options.spare_segments {
            return Ok(false);
        }
        match self.fill_spare(options) {
            Err(LogError::Disk { source, .. }) if is_full(&source) => {
                self.making = None;
                Ok(false)
            }
            other => other,
        }
    }

    fn fill_spare(&mut self, options: &LogOptions) -> Result<bool, LogError> {
        let path = self.path.join(format!("{:016x}{MAKING}", self.next_spare));
        let (file, filled) = match self.making.take() {
            Some(making) => making,
            None => {
                let file = self.disk.open(&path, Open::ExistingOrNew);
                (file.map_err(disk_error("create", &path))?, 0)
            }
        };
        let filled = fill(&*file, filled, options).map_err(disk_error("fill", &path))?;
        file.sync_data().map_err(disk_error("sync", &path))?;
        if filled < options.segment_bytes {
            self.making = Some((file, filled));
            return Ok(true);
        }
        let spare = self.path.join(spare_name(self.next_spare));
        self.disk.rename(&path, &spare).map_err(disk_error("rename", &path))?;
        self.sync()?;
        self.spares.push(self.next_spare);
        self.next_spare += 1;
        Ok(self.spares.len() < options.spare_segments)
    }
}

/// Writes the next step of zeros; returns how far the file is filled then.
pub(super) fn fill(file: &dyn DiskFile, filled: u64, options: &LogOptions) -> io::Result<u64> {
    let step = options.fill_bytes.min(options.segment_bytes - filled);
    let zeros = vec![0; usize::try_from(step).expect("a few MiB")];
    file.write_at(filled, &zeros)?;
    Ok(filled + step)
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

pub(super) fn disk_error(
    action: &'static str,
    path: &Path,
) -> impl FnOnce(io::Error) -> LogError + use<> {
    let path = path.to_path_buf();
    move |source| LogError::Disk { action, path, source }
}
