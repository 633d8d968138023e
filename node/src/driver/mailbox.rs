//! The core's one inbox: bounded, drained whole at each wake-up.
//!
//! Batching is the main lever on throughput, so that the core takes everything that has gathered
//! while it was busy. Proposals and peer messages are counted in bytes, and who comes too late is
//! refused; notices come from the other threads and are bounded by what those were given to do.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use node_consensus::{Entry, EntryKind, Members, Message, Position};

use super::peers::{InboxFull, IncomingSnapshot};
use crate::machine::{AppliedChange, RequestId};

/// Proposals that wait for the core; more are refused as "too many requests".
pub const MAX_QUEUED_PROPOSAL_BYTES: usize = 32 * 1024 * 1024;
/// The same in number.
pub const MAX_QUEUED_PROPOSALS: usize = 16 * 1024;
/// Peer messages that wait for the core; more are refused, which to Raft is a lost message.
pub const MAX_QUEUED_MESSAGE_BYTES: usize = 64 * 1024 * 1024;
/// Reads that wait for one barrier; more are refused as "too many requests".
pub const MAX_QUEUED_READS: usize = 64 * 1024;

/// One proposal.
#[derive(Clone, Debug)]
pub struct Proposal {
    /// How its outcome finds who waits.
    pub id: RequestId,
    /// What entry it becomes; not a leader's own kind.
    pub kind: EntryKind,
    /// What is proposed.
    pub data: Bytes,
}

/// Who waits for a read barrier.
pub type ReadToken = u64;

/// What other threads have done, or the transport has seen.
#[derive(Debug)]
pub enum Notice {
    /// The log is durable up to this batch.
    Persisted(u64),
    /// Applied up to here.
    Applied {
        /// Where the state machine stands.
        at: Position,
        /// What became of changes of members, in order.
        changes: Vec<AppliedChange>,
    },
    /// The store is durable up to here.
    Checkpointed(Position),
    /// The log begins after this position now.
    Compacted(Position),
    /// The store holds the snapshot.
    Installed {
        /// Its position.
        at: Position,
        /// Who belongs to the cluster there, by the store.
        members: Members,
    },
    /// A snapshot file is there to be sent, with who belonged to the cluster at its position; or it
    /// couldn't be made.
    Built(Option<(Position, Members)>),
    /// What a fetch asked for.
    Fetched {
        /// Which fetch.
        id: u64,
        /// The entries, in order.
        entries: Vec<Entry>,
    },
    /// A snapshot arrived.
    Snapshot(IncomingSnapshot),
    /// A snapshot's way to a peer ended.
    SnapshotSent {
        /// To whom.
        peer: u64,
        /// Whether all of it arrived.
        arrived: bool,
    },
    /// Something to this peer was lost.
    Unreachable(u64),
    /// A stream stands.
    Connected(u64),
    /// None does.
    Disconnected(u64),
    /// Campaign now.
    Campaign,
    /// Hand over to this member, or to any that can.
    Transfer(Option<u64>),
}

/// What [`PeerInbox`](super::PeerInbox) needs of a mailbox, whatever the state machine.
pub(super) trait Inlet: Debug + Send + Sync {
    fn message(&self, message: Message) -> Result<(), InboxFull>;
    fn notice(&self, notice: Notice);
    fn snapshot(&self, snapshot: IncomingSnapshot) -> Receiver<bool>;
}

#[derive(Debug, Default)]
pub(super) struct Mail {
    pub proposals: Vec<Proposal>,
    pub reads: Vec<ReadToken>,
    pub messages: Vec<Message>,
    pub notices: Vec<Notice>,
    pub stop: bool,
    proposal_bytes: usize,
    message_bytes: usize,
}

impl Mail {
    fn is_empty(&self) -> bool {
        self.proposals.is_empty()
            && self.reads.is_empty()
            && self.messages.is_empty()
            && self.notices.is_empty()
            && !self.stop
    }
}

#[derive(Debug, Default)]
pub(super) struct Mailbox {
    mail: Mutex<Mail>,
    arrived: Condvar,
    /// Who waits for a received snapshot to be installed or discarded, by its file. At most one for
    /// each peer, since the transport takes one at a time.
    snapshots: Mutex<BTreeMap<PathBuf, SyncSender<bool>>>,
}

/// A queue is full, or the core has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Full,
    Stopped,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Mail> {
        // Nothing under the lock can panic half way through a change.
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn propose(&self, proposal: Proposal) -> Result<(), Refused> {
        let mut mail = self.lock();
        if mail.stop {
            return Err(Refused::Stopped);
        }
        let bytes = mail.proposal_bytes + proposal.data.len();
        if bytes > MAX_QUEUED_PROPOSAL_BYTES || mail.proposals.len() >= MAX_QUEUED_PROPOSALS {
            return Err(Refused::Full);
        }
        mail.proposal_bytes = bytes;
        mail.proposals.push(proposal);
        drop(mail);
        self.arrived.notify_one();
        Ok(())
    }

    pub(super) fn read(&self, token: ReadToken) -> Result<(), Refused> {
        let mut mail = self.lock();
        if mail.stop {
            return Err(Refused::Stopped);
        }
        if mail.reads.len() >= MAX_QUEUED_READS {
            return Err(Refused::Full);
        }
        mail.reads.push(token);
        drop(mail);
        self.arrived.notify_one();
        Ok(())
    }

    pub(super) fn stop(&self) {
        self.lock().stop = true;
        self.arrived.notify_one();
        // Nobody gets an answer any more.
        self.lock_snapshots().clear();
    }

    /// A received snapshot is part of the state now, or never will be.
    pub(super) fn snapshot_ended(&self, body: &Path, installed: bool) {
        if let Some(sender) = self.lock_snapshots().remove(body) {
            // Who gave up meanwhile needs no answer.
            let _ = sender.try_send(installed);
        }
    }

    fn lock_snapshots(&self) -> MutexGuard<'_, BTreeMap<PathBuf, SyncSender<bool>>> {
        self.snapshots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything that is there; waits until `deadline` for something to come.
    pub(super) fn take(&self, deadline: Instant) -> Mail {
        let mut mail = self.lock();
        while mail.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                break;
            }
            let waited = self.arrived.wait_timeout(mail, left);
            mail = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let stop = mail.stop;
        mem::replace(&mut *mail, Mail { stop, ..Mail::default() })
    }
}

impl Inlet for Mailbox {
    fn message(&self, message: Message) -> Result<(), InboxFull> {
        let mut mail = self.lock();
        let bytes = mail.message_bytes + message.cost();
        if bytes > MAX_QUEUED_MESSAGE_BYTES {
            return Err(InboxFull);
        }
        mail.message_bytes = bytes;
        mail.messages.push(message);
        drop(mail);
        self.arrived.notify_one();
        Ok(())
    }

    fn notice(&self, notice: Notice) {
        self.lock().notices.push(notice);
        self.arrived.notify_one();
    }

    fn snapshot(&self, snapshot: IncomingSnapshot) -> Receiver<bool> {
        let (sender, receiver) = sync_channel(1);
        let mut mail = self.lock();
        // Under the mail's lock, so that a stop comes before all of it or after.
        if !mail.stop {
            self.lock_snapshots().insert(snapshot.body.clone(), sender);
            mail.notices.push(Notice::Snapshot(snapshot));
            self.arrived.notify_one();
        }
        receiver
    }
}
