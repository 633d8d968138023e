//! Files with the bodies of snapshots. A body is either built here to be sent, or received to be
//! installed.
//!
//! Each body is as large as the store. Of the bodies built here, only the latest is kept. A newer
//! one replaces it as soon as it is written completely. A message that refers to a replaced body
//! can't be sent any more. The driver decides who receives the body and when it may be removed
//! ([`OutgoingSnapshotBody`](super::outgoing_snapshot_body::OutgoingSnapshotBody)).

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use muster_files::data;
use node_consensus::{Message, Position};
use node_state::state_machine::Snapshot;

use super::mail::Notice;

/// Storage of snapshot bodies.
pub trait SnapshotStorage {
    /// A snapshot body that is being written.
    type New: Write;
    /// A snapshot body that is being read.
    type Body: Read;
    /// Creates the file of a snapshot body at `path`, and replaces an existing one.
    fn create(&self, path: &Path) -> io::Result<Self::New>;
    /// Opens the snapshot body at `path` for reading from its beginning.
    fn open(&self, path: &Path) -> io::Result<Self::Body>;
    /// Removes the snapshot body at `path`.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// Storage of snapshot bodies in files, as in production.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotFiles;

impl SnapshotStorage for SnapshotFiles {
    type New = File;
    type Body = File;

    fn create(&self, path: &Path) -> io::Result<File> {
        Ok(data::recreate(path)?)
    }

    fn open(&self, path: &Path) -> io::Result<File> {
        Ok(data::open(path, data::OpenMode::Read)?)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        Ok(data::remove(path)?)
    }
}

/// Snapshot bodies of one member.
#[derive(Debug)]
pub struct SnapshotStore<B> {
    dir: PathBuf,
    bodies: B,
    /// Position and file of the snapshot body that was built last.
    built: Mutex<Option<(Position, PathBuf)>>,
}

impl<B: SnapshotStorage> SnapshotStore<B> {
    /// Creates a store for bodies in the directory `dir`, in which no body has been built yet.
    pub fn new(dir: PathBuf, bodies: B) -> Self {
        Self { dir, bodies, built: Mutex::default() }
    }

    /// Writes the body of `snapshot`, which then replaces the body that was built last. Returns the
    /// notice that tells the core thread how the build ended.
    pub fn build<S: Snapshot>(&self, snapshot: S) -> Notice {
        let (at, members) = (snapshot.position(), snapshot.members());
        let path = self.dir.join(format!("outgoing-{:016x}", at.index));
        let written = self.write(&snapshot, &path);
        // The snapshot is dropped as soon as it is written. Until then, the store can't reuse the
        // space that it has freed.
        drop(snapshot);
        if let Err(error) = &written {
            let error = &**error;
            tracing::error!(error, index = at.index, "a snapshot couldn't be made");
            // A partly written snapshot body is useless and takes up space, so it is removed.
            self.remove(&path);
            return Notice::Built(None);
        }
        let old = self.lock().replace((at, path.clone()));
        old.filter(|(_, old)| *old != path).into_iter().for_each(|(_, old)| self.remove(&old));
        Notice::Built(Some((at, members)))
    }

    fn write<S: Snapshot>(
        &self,
        snapshot: &S,
        path: &Path,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let mut out = BufWriter::new(self.bodies.create(path)?);
        snapshot.write(&mut out)?;
        Ok(out.flush()?)
    }

    /// Opens the snapshot body that `message` announces. Returns `None` if that isn't the body that
    /// was built last, or if it can't be opened.
    pub fn body_of(&self, message: &Message) -> Option<B::Body> {
        // The lock is held while the body is opened, so that no other thread removes the file
        // first.
        let built = self.lock();
        let (_, path) = built.as_ref().filter(|(at, _)| message.snapshot == Some(*at))?;
        self.bodies.open(path).ok()
    }

    /// Removes the snapshot body that was built last.
    pub fn drop_built(&self) {
        let built = self.lock().take();
        built.into_iter().for_each(|(_, path)| self.remove(&path));
    }

    /// Opens the body of a received snapshot, whose file is `path`.
    pub fn open(&self, path: &Path) -> io::Result<B::Body> {
        self.bodies.open(path)
    }

    /// Removes a snapshot body. If that fails, the file only takes up space until the next start.
    pub fn remove(&self, path: &Path) {
        if let Err(error) = self.bodies.remove(path) {
            tracing::warn!(path = %path.display(), %error, "a snapshot's file couldn't be removed");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Position, PathBuf)>> {
        self.built.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use node_consensus::{Members, MessageKind};

    use super::*;

    struct TestSnapshot(u64);

    impl Snapshot for TestSnapshot {
        type Error = io::Error;

        fn position(&self) -> Position {
            Position { index: self.0, term: 1 }
        }

        fn members(&self) -> Members {
            Members { voters: vec![self.0], learners: Vec::new() }
        }

        fn write(&self, out: &mut dyn Write) -> io::Result<()> {
            write!(out, "body {}", self.0)
        }
    }

    fn announced(index: u64) -> Message {
        let snapshot = Some(Position { index, term: 1 });
        Message { snapshot, ..Message::new(MessageKind::Snapshot, 1, 2) }
    }

    fn in_dir(dir: &Path) -> Vec<String> {
        let names = dir.read_dir().unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect()
    }

    #[test]
    fn only_the_body_built_last_exists_and_only_its_own_message_opens_it() {
        let dir = tempfile::tempdir().unwrap();
        let snapshots = SnapshotStore::new(dir.path().to_owned(), SnapshotFiles);
        assert!(snapshots.body_of(&announced(3)).is_none());
        for index in [3, 3, 5] {
            let Notice::Built(Some((at, members))) = snapshots.build(TestSnapshot(index)) else {
                panic!("it was written")
            };
            assert_eq!((at.index, members.voters), (index, vec![index]));
        }
        assert!(snapshots.body_of(&announced(3)).is_none(), "a newer one took its place");
        let mut body = String::new();
        snapshots.body_of(&announced(5)).unwrap().read_to_string(&mut body).unwrap();
        assert_eq!(body, "body 5");
        assert_eq!(in_dir(dir.path()), ["outgoing-0000000000000005"]);
        snapshots.drop_built();
        assert!(snapshots.body_of(&announced(5)).is_none());
        assert!(in_dir(dir.path()).is_empty());
        snapshots.drop_built();
    }

    /// Storage on a disk that is full, so that every write fails.
    struct FullDisk(Cell<bool>);

    impl SnapshotStorage for FullDisk {
        type New = FullDisk;
        type Body = File;

        fn create(&self, path: &Path) -> io::Result<FullDisk> {
            File::create(path).map(|_| FullDisk(Cell::new(false)))
        }

        fn open(&self, path: &Path) -> io::Result<File> {
            File::open(path)
        }

        fn remove(&self, path: &Path) -> io::Result<()> {
            self.0.set(true);
            std::fs::remove_file(path)
        }
    }

    impl Write for FullDisk {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_partly_written_body_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let snapshots = SnapshotStore::new(dir.path().to_owned(), FullDisk(Cell::new(false)));
        assert!(matches!(snapshots.build(TestSnapshot(4)), Notice::Built(None)));
        assert!(snapshots.bodies.0.get() && in_dir(dir.path()).is_empty());
        assert!(snapshots.body_of(&announced(4)).is_none());
    }
}
