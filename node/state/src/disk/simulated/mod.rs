//! A simulated disk that loses what a real disk can lose, deterministically for a seed.
//!
//! Besides the state that processes see, it keeps everything that can be on the medium:
//!
//! - For each file: the earlier contents of each 512-byte sector written since the last sync.
//! - For each directory: the operations since the last [`Disk::sync_dir`].
//!
//! [`SimulatedDisk::crash`] then chooses for each sector which contents survive, so a write can
//! survive in part or out of order. For each directory it chooses how many of the operations
//! survive, in their order. This is harsher than a journaling file system. Syncing a new file does
//! not make its name durable, and operations on different directories are not ordered.
//!
//! A sync that fails by an injected error leaves pages that look clean but are not on the medium. A
//! second sync succeeds and changes nothing. Only [`DiskFile::sync_and_drop_cache`] shows what is
//! on the medium.

mod directory;
mod faults;
mod file;
mod rng;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::{Component, Path};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use directory::{Directory, DirectoryChange};
pub use faults::{Counts, DiskFailure, DiskOperation, Fault, IgnoredSyncs};
use faults::{Faults, power_off_error};
use file::SimulatedFile;
use rng::Rng;

use super::{DirLock, Disk, DiskFile, LockGuard, OpenMode, SharedDisk};

const ROOT: u64 = 0;

/// The disk of one simulated machine. Clones share the disk.
#[derive(Clone)]
pub struct SimulatedDisk {
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for SimulatedDisk {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("SimulatedDisk").finish_non_exhaustive()
    }
}

#[derive(Clone)]
struct State {
    rng: Rng,
    inodes: BTreeMap<u64, Inode>,
    next_inode: u64,
    /// Number of restarts. Files and locks of an earlier boot are invalid.
    boot: u64,
    locked: BTreeSet<u64>,
    faults: Faults,
}

#[derive(Clone)]
enum Inode {
    File(SimulatedFile),
    Directory(Directory),
}

impl SimulatedDisk {
    /// Creates an empty disk whose random choices depend on `seed`.
    pub fn new(seed: u64) -> Self {
        let state = State {
            rng: Rng::new(seed),
            inodes: BTreeMap::from([(ROOT, Inode::Directory(Directory::default()))]),
            next_inode: ROOT + 1,
            boot: 0,
            locked: BTreeSet::new(),
            faults: Faults::default(),
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Returns the disk as the shared trait object that log and store take.
    pub fn shared(&self) -> SharedDisk {
        Arc::new(self.clone())
    }

    /// Simulates a power failure and restart. Each unsynced sector or directory operation survives
    /// or is lost, by the seed. Open files and locks become invalid.
    pub fn crash(&self) {
        let mut state = self.lock();
        let state = &mut *state;
        for inode in state.inodes.values_mut() {
            match inode {
                Inode::File(file) => file.crash(&mut state.rng),
                Inode::Directory(directory) => directory.crash(&mut state.rng),
            }
        }
        state.restart();
    }

    /// Simulates the end of the process while the machine goes on. No write is lost, but unsynced
    /// writes stay unsynced. Open files and locks become invalid.
    pub fn kill(&self) {
        self.lock().restart();
    }

    /// Makes the next operations of one kind fail as `fault` describes.
    pub fn inject(&self, fault: Fault) {
        self.lock().faults.inject(fault);
    }

    /// Makes the power fail after `operations` more operations; every further operation fails until
    /// [`crash`](Self::crash). The last operation can be lost, like any unsynced one.
    pub fn power_off_after(&self, operations: u64) {
        self.lock().faults.power_off_after(operations);
    }

    /// Limits the number of bytes by which all files together may still grow; `u64::MAX` is no
    /// limit. Removing or truncating files does not free space.
    pub fn limit_free_bytes(&self, bytes: u64) {
        self.lock().faults.free = bytes;
    }

    /// Makes some kinds of sync succeed without doing anything from now on.
    pub fn ignore_syncs(&self, lies: IgnoredSyncs) {
        self.lock().faults.ignored_syncs = lies;
    }

    /// Whether the power has failed and the disk has not been restarted.
    pub fn is_power_off(&self) -> bool {
        self.lock().faults.is_power_off()
    }

    /// Whether an injected error has occurred since the process last started.
    pub fn has_failed(&self) -> bool {
        self.lock().faults.has_failed()
    }

    /// Returns the number of operations on the disk so far.
    pub fn counts(&self) -> Counts {
        self.lock().faults.counts
    }

    /// Returns a copy of the disk at this moment, like an image that a hypervisor takes. The
    /// crashes of the copy depend on `seed`.
    pub fn duplicate(&self, seed: u64) -> Self {
        let mut state = self.lock().clone();
        state.rng = Rng::new(seed);
        state.restart();
        Self { state: Arc::new(Mutex::new(state)) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn restart(&mut self) {
        self.boot += 1;
        self.locked.clear();
        self.faults.power_on();
        self.remove_unnamed_inodes();
    }

    /// Removes inodes that no directory names, durably or not.
    fn remove_unnamed_inodes(&mut self) {
        let mut live = BTreeSet::new();
        let mut next = vec![ROOT];
        while let Some(number) = next.pop() {
            if live.insert(number)
                && let Some(Inode::Directory(directory)) = self.inodes.get(&number)
            {
                next.extend(directory.all_inodes());
            }
        }
        self.inodes.retain(|number, _| live.contains(number));
    }

    fn find(&self, path: &Path) -> io::Result<u64> {
        let mut at = ROOT;
        for component in path.components() {
            let name = match component {
                Component::RootDir | Component::CurDir => continue,
                Component::Normal(name) => name.to_str().ok_or(io::ErrorKind::InvalidFilename)?,
                Component::Prefix(_) | Component::ParentDir => {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
            };
            at = self.directory(at)?.get(name).ok_or(io::ErrorKind::NotFound)?;
        }
        Ok(at)
    }

    fn directory(&self, number: u64) -> io::Result<&Directory> {
        match self.inodes.get(&number) {
            Some(Inode::Directory(directory)) => Ok(directory),
            Some(Inode::File(_)) => Err(io::ErrorKind::NotADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn directory_mut(&mut self, number: u64) -> io::Result<&mut Directory> {
        match self.inodes.get_mut(&number) {
            Some(Inode::Directory(directory)) => Ok(directory),
            Some(Inode::File(_)) => Err(io::ErrorKind::NotADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Returns the directory that contains `path`, and the name in it.
    fn parent_and_name(&self, path: &Path) -> io::Result<(u64, String)> {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or(io::ErrorKind::InvalidFilename)?.to_owned();
        let directory = self.find(path.parent().unwrap_or(Path::new("")))?;
        self.directory(directory)?;
        Ok((directory, name))
    }

    fn create_inode(&mut self, directory: u64, name: String, inode: Inode) -> io::Result<u64> {
        let number = self.next_inode;
        self.next_inode += 1;
        self.inodes.insert(number, inode);
        self.directory_mut(directory)?.change(DirectoryChange::Link { name, inode: number });
        Ok(number)
    }
}

impl Disk for SimulatedDisk {
    fn open(&self, path: &Path, how: OpenMode) -> io::Result<Box<dyn DiskFile>> {
        let mut state = self.lock();
        state.faults.begin_operation(DiskOperation::Open)?;
        let inode = match (state.find(path), how) {
            (Ok(_), OpenMode::New) => return Err(io::ErrorKind::AlreadyExists.into()),
            (Ok(number), OpenMode::Existing | OpenMode::ExistingOrNew) => {
                match state.inodes.get(&number) {
                    Some(Inode::File(_)) => number,
                    _ => return Err(io::ErrorKind::IsADirectory.into()),
                }
            }
            (Err(error), OpenMode::New | OpenMode::ExistingOrNew)
                if error.kind() == io::ErrorKind::NotFound =>
            {
                let (directory, name) = state.parent_and_name(path)?;
                state.create_inode(directory, name, Inode::File(SimulatedFile::default()))?
            }
            (Err(error), _) => return Err(error),
        };
        let boot = state.boot;
        Ok(Box::new(Handle { disk: self.clone(), inode, boot }))
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        let mut state = self.lock();
        state.faults.begin_operation(DiskOperation::List)?;
        match state.find(path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.lock();
        state.faults.begin_operation(DiskOperation::Open)?;
        if let Ok(found) = state.find(path) {
            return state.directory(found).map(|_| ());
        }
        let (directory, name) = state.parent_and_name(path)?;
        state.create_inode(directory, name, Inode::Directory(Directory::default()))?;
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let mut state = self.lock();
        state.faults.begin_operation(DiskOperation::List)?;
        let number = state.find(path)?;
        Ok(state.directory(number)?.names())
    }

    /// Renames within one directory only, because the effect of a crash is not defined otherwise.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.lock();
        state.faults.begin_operation(DiskOperation::Rename)?;
        let (from_directory, from) = state.parent_and_name(from)?;
        let (directory, to) = state.parent_and_name(to)?;
        if from_directory != directory {
            return Err(io::ErrorKind::CrossesDevices.into());
        }
        let directory = state.directory_mut(directory)?;
        directory.get(&from).ok_or(io::ErrorKind::NotFound)?;
        directory.change(DirectoryChange::Rename { from, to });
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.lock();
        state.faults.begin_operation(DiskOperation::Remove)?;
        let found = state.find(path)?;
        if state.directory(found).is_ok() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let (directory, name) = state.parent_and_name(path)?;
        state.directory_mut(directory)?.change(DirectoryChange::Unlink { name });
        Ok(())
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.lock();
        state.faults.begin_operation(DiskOperation::SyncDir)?;
        let number = state.find(path)?;
        let pretend = state.faults.ignored_syncs.directories;
        let directory = state.directory_mut(number)?;
        if !pretend {
            directory.sync();
        }
        Ok(())
    }

    fn free_bytes(&self, _: &Path) -> io::Result<u64> {
        Ok(self.lock().faults.free)
    }

    fn lock_dir(&self, path: &Path) -> io::Result<DirLock> {
        let mut state = self.lock();
        state.faults.begin_operation(DiskOperation::List)?;
        let inode = state.find(path)?;
        state.directory(inode)?;
        if !state.locked.insert(inode) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(DirLock::new(SimulatedLock { disk: self.clone(), inode, boot: state.boot }))
    }
}

#[derive(Debug)]
struct SimulatedLock {
    disk: SimulatedDisk,
    inode: u64,
    boot: u64,
}

impl LockGuard for SimulatedLock {}

impl Drop for SimulatedLock {
    fn drop(&mut self) {
        let mut state = self.disk.lock();
        if state.boot == self.boot {
            state.locked.remove(&self.inode);
        }
    }
}

#[derive(Debug)]
struct Handle {
    disk: SimulatedDisk,
    inode: u64,
    boot: u64,
}

impl Handle {
    fn run_operation<T>(
        &self,
        operation: DiskOperation,
        act: impl FnOnce(&mut SimulatedFile, &mut Rng, io::Result<()>) -> io::Result<T>,
    ) -> io::Result<T> {
        self.run_growing_operation(operation, 0, act)
    }

    /// Runs `act` like [`run_operation`](Self::run_operation), for an operation that may extend the
    /// file to `len` bytes.
    fn run_growing_operation<T>(
        &self,
        operation: DiskOperation,
        len: u64,
        act: impl FnOnce(&mut SimulatedFile, &mut Rng, io::Result<()>) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut state = self.disk.lock();
        if state.boot != self.boot {
            return Err(power_off_error());
        }
        let met = state.faults.begin_operation(operation);
        let State { inodes, rng, faults, .. } = &mut *state;
        if met.is_err() && faults.is_power_off() && !faults.has_power_just_failed() {
            return Err(power_off_error());
        }
        match inodes.get_mut(&self.inode) {
            Some(Inode::File(file)) => {
                let grows = len.saturating_sub(file.len());
                act(file, rng, met.and_then(|()| faults.take_free_bytes(grows)))
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl DiskFile for Handle {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        self.run_operation(DiskOperation::Read, |file, _, met| met.map(|()| file.read(offset, out)))
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.run_growing_operation(
            DiskOperation::Write,
            offset + data.len() as u64,
            |file, rng, met| {
                // A failing write has written a part of its data.
                let part = if met.is_ok() { data.len() } else { rng.below(data.len() + 1) };
                file.write(offset, &data[..part]);
                met
            },
        )
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.run_growing_operation(DiskOperation::Resize, len, |file, _, met| {
            met.map(|()| file.resize(len))
        })
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        self.run_growing_operation(DiskOperation::Resize, len, |file, _, met| {
            met.map(|()| file.resize(len.max(file.len())))
        })
    }

    fn len(&self) -> io::Result<u64> {
        self.run_operation(DiskOperation::Read, |file, _, met| met.map(|()| file.len()))
    }

    fn sync_data(&self) -> io::Result<()> {
        if self.disk.lock().faults.ignored_syncs.files {
            return self.run_operation(DiskOperation::Sync, |_, _, met| met);
        }
        self.run_operation(DiskOperation::Sync, |file, rng, met| match met {
            Ok(()) => {
                file.sync();
                Ok(())
            }
            Err(error) => {
                file.fail_sync(rng);
                Err(error)
            }
        })
    }

    fn sync_and_drop_cache(&self) -> io::Result<()> {
        self.sync_data()?;
        self.run_operation(DiskOperation::Read, |file, _, met| met.map(|()| file.drop_cache()))
    }
}

#[cfg(test)]
mod tests;
