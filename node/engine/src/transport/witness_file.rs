//! The file that makes a [`Witness`] durable: what this member remembers of its peers.
//!
//! The file is always written as a whole, with all changes so far. So a caller that had to wait for
//! another write needs no write of its own, if that write included its change.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use node_state::identity::MemberId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{WitnessFileError, wire::hello::StreamRefusal};
use crate::witness::{ClaimRejection, ProcessClaim, Promise, Witness, WitnessDecodeError};

/// Maximum size of the witness file, far more than the largest cluster needs.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Maximum number of received votes that wait for the witness file. Further votes are dropped,
/// which Raft tolerates.
const MAX_WAITING_VOTES: usize = 64;

/// Reason why a peer's process was not recorded.
#[derive(Debug)]
pub enum AdmitError {
    /// The process contradicts what this member remembers of its peer.
    Refused(StreamRefusal),
    /// The process is acceptable, but the file could not be written.
    Files(muster_files::Error),
}

/// A [`Witness`] (this member's memory of its peers) and the file that it is written to.
#[derive(Debug)]
pub struct WitnessFile {
    path: PathBuf,
    /// Memory of the peers. This lock is never held during disk I/O.
    witness: Mutex<Witness>,
    /// Lock that is held while the file is written.
    file: Mutex<()>,
    /// Version of `witness` that was last written to the file.
    written: AtomicU64,
    waiting_votes: Arc<Semaphore>,
}

/// Changes of a [`Witness`] that a write must make durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredDurability {
    /// Changes that must be durable before anything that depends on them is done.
    Urgent,
    /// All changes that were made before the write begins.
    All,
}

impl From<ClaimRejection> for StreamRefusal {
    fn from(objection: ClaimRejection) -> Self {
        match objection {
            ClaimRejection::Incarnation => Self::Incarnation,
            ClaimRejection::Boot => Self::Boot,
            ClaimRejection::Amnesia => Self::Amnesia,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WitnessFile {
    /// Reads the witness from the file at `path`. If there is no file, the witness knows nothing.
    ///
    /// # Errors
    /// If the file exists and can't be read.
    pub fn open(path: &Path) -> Result<Self, WitnessFileError> {
        let witness = match muster_files::data::read_own(path, MAX_FILE_BYTES)? {
            Some(bytes) => {
                let text = std::str::from_utf8(&bytes).map_err(|_| WitnessDecodeError::File)?;
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

    /// Locks the witness for reading or updating.
    pub(super) fn witness(&self) -> MutexGuard<'_, Witness> {
        lock(&self.witness)
    }

    /// Accepts `shown` as the process of `member`, and makes this durable. May block on the disk.
    pub fn admit(&self, member: MemberId, shown: &ProcessClaim) -> Result<(), AdmitError> {
        let admitted = self.witness().admit(member, shown);
        admitted.map_err(|objection| AdmitError::Refused(objection.into()))?;
        self.write(RequiredDurability::Urgent).map_err(AdmitError::Files)
    }

    /// Makes the changes that `what` names durable, unless they already are. Blocks on the disk.
    pub fn write(&self, what: RequiredDurability) -> Result<(), muster_files::Error> {
        let _file = lock(&self.file);
        let (version, text) = {
            let witness = self.witness();
            // While this call waited for the lock, another call may have written the same version.
            if self.is_durable(what, &witness) {
                return Ok(());
            }
            (witness.version(), witness.encode())
        };
        muster_files::data::replace(&self.path, text.as_bytes())?;
        self.written.store(version, Relaxed);
        Ok(())
    }

    /// Returns whether the file already contains the changes that `what` names.
    fn is_durable(&self, what: RequiredDurability, witness: &Witness) -> bool {
        let needed = match what {
            RequiredDurability::Urgent => witness.urgent(),
            RequiredDurability::All => witness.version(),
        };
        needed <= self.written.load(Relaxed)
    }

    /// Records a promise of `member`. Returns whether all urgent changes are already durable.
    pub fn record_promise(&self, member: MemberId, promise: Promise) -> bool {
        let mut witness = self.witness();
        witness.record_promise(member, promise);
        self.is_durable(RequiredDurability::Urgent, &witness)
    }

    /// Reserves a slot for a received vote that waits until the witness file is written. Dropping
    /// the permit frees the slot. Returns `None` if too many votes wait already.
    pub fn reserve_vote_slot(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.waiting_votes).try_acquire_owned().ok()
    }
}
