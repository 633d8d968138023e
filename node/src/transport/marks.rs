//! The file behind a [`Witness`]: what this member remembers of its peers, and when that is durable.
//!
//! The file is written whole. Whoever needs something durable writes everything that is known by
//! then; who comes meanwhile and needs no more than that, waits and writes nothing.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{MarksError, hello::Refusal};
use crate::{
    identity::MemberId,
    witness::{Appearance, DecodeError, Objection, Promise, Witness},
};

/// Far more than the file of the largest cluster has.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Votes that may wait for the disk; more are dropped, which to Raft is a lost message.
const MAX_WAITING_VOTES: usize = 64;

/// Why a claim was not taken.
#[derive(Debug)]
pub(crate) enum TakeError {
    /// It doesn't fit what is remembered.
    Refused(Refusal),
    /// It fits, but can't be remembered.
    Files(muster_files::Error),
}

/// Memory and file.
#[derive(Debug)]
pub(crate) struct Marks {
    path: PathBuf,
    /// Never held while the disk works.
    witness: Mutex<Witness>,
    /// Held while the file is written.
    file: Mutex<()>,
    /// The version that it has.
    written: AtomicU64,
    waiting_votes: Arc<Semaphore>,
}

/// When something has to be durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Durable {
    /// What nothing may follow from before it is.
    Urgent,
    /// Everything.
    All,
}

impl From<Objection> for Refusal {
    fn from(objection: Objection) -> Self {
        match objection {
            Objection::Incarnation => Self::Incarnation,
            Objection::Boot => Self::Boot,
            Objection::Amnesia => Self::Amnesia,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Marks {
    /// Reads what was remembered; no file is an empty memory.
    ///
    /// # Errors
    /// If there is one that can't be read.
    pub(crate) fn open(path: &Path) -> Result<Self, MarksError> {
        let witness = match muster_files::data::read_own(path, MAX_FILE_BYTES)? {
            Some(bytes) => {
                let text = std::str::from_utf8(&bytes).map_err(|_| DecodeError::File)?;
                Witness::decode(text)?
            }
            None => Witness::default(),
        };
        Ok(Self {
            path: path.to_owned(),
            file: Mutex::new(()),
            written: AtomicU64::new(witness.version()),
            witness: Mutex::new(witness),
            waiting_votes: Arc::new(Semaphore::new(MAX_WAITING_VOTES)),
        })
    }

    /// The memory, to look at or to add to.
    pub(super) fn witness(&self) -> MutexGuard<'_, Witness> {
        lock(&self.witness)
    }

    /// Takes `member` to be the process that shows itself, durably if it is news. May block on the
    /// disk.
    pub(crate) fn take(&self, member: MemberId, shown: &Appearance) -> Result<(), TakeError> {
        let admitted = self.witness().admit(member, shown);
        admitted.map_err(|objection| TakeError::Refused(objection.into()))?;
        self.write(Durable::Urgent).map_err(TakeError::Files)
    }

    /// Makes durable what is known now, if it isn't. Blocks on the disk.
    pub(crate) fn write(&self, what: Durable) -> Result<(), muster_files::Error> {
        let _file = lock(&self.file);
        let (version, text) = {
            let witness = self.witness();
            if self.has(what, &witness) {
                return Ok(());
            }
            (witness.version(), witness.encode())
        };
        muster_files::data::replace(&self.path, text.as_bytes())?;
        self.written.store(version, Relaxed);
        Ok(())
    }

    /// Whether the file has what it needs to.
    fn has(&self, what: Durable, witness: &Witness) -> bool {
        let needed = match what {
            Durable::Urgent => witness.urgent(),
            Durable::All => witness.version(),
        };
        needed <= self.written.load(Relaxed)
    }

    /// Notes what `member` has promised. Whether what nothing may follow from is durable.
    pub(crate) fn heard(&self, member: MemberId, promise: Promise) -> bool {
        let mut witness = self.witness();
        witness.heard(member, promise);
        self.has(Durable::Urgent, &witness)
    }

    /// A place among the votes that wait for the disk, until it is dropped; `None` if all are taken.
    pub(crate) fn wait_for_vote(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.waiting_votes).try_acquire_owned().ok()
    }
}
