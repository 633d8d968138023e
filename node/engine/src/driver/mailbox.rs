//! The core thread's inbox: [`Mail`] behind a lock, with a way to wait for it.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use node_consensus::Message;

use super::mail::{ClientProposal, Mail, Notice, QueueError, ReadToken};
use super::peers::{InboxFull, IncomingSnapshot};

/// Part of a mailbox that [`PeerInbox`](super::PeerInbox) uses, independent of the state machine.
pub(super) trait CoreInbox: Debug + Send + Sync {
    fn message(&self, message: Message) -> Result<(), InboxFull>;
    fn notice(&self, notice: Notice);
    fn snapshot(&self, snapshot: IncomingSnapshot) -> Receiver<bool>;
}

/// Queued inputs, and whether the core thread waits for one.
#[derive(Debug, Default)]
struct Inputs {
    mail: Mail,
    /// Whether the core thread waits and nobody has woken it yet. A wake-up costs a system call
    /// even if nobody waits, so only the first input after the wait began makes one.
    is_core_waiting: bool,
}

#[derive(Debug, Default)]
pub(super) struct Mailbox {
    inputs: Mutex<Inputs>,
    arrived: Condvar,
    /// Channels that report whether a received snapshot was installed or discarded, by the
    /// snapshot's file. Each peer has at most one, because the transport receives one snapshot of a
    /// peer at a time.
    snapshots: Mutex<BTreeMap<PathBuf, SyncSender<bool>>>,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Inputs> {
        // A poisoned lock is safe to use: nothing under it can panic half-way through a change.
        self.inputs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds inputs, and wakes the core thread if it waits for them.
    fn add<T>(&self, add: impl FnOnce(&mut Mail) -> T) -> T {
        let mut inputs = self.lock();
        let result = add(&mut inputs.mail);
        let wakes_core = std::mem::take(&mut inputs.is_core_waiting);
        // Unlock before waking the core thread, because it needs the lock to take the inputs.
        drop(inputs);
        if wakes_core {
            self.arrived.notify_one();
        }
        result
    }

    pub(super) fn propose(&self, proposal: ClientProposal) -> Result<(), QueueError> {
        self.add(|mail| mail.propose(proposal))
    }

    pub(super) fn read(&self, token: ReadToken) -> Result<(), QueueError> {
        self.add(|mail| mail.read(token))
    }

    pub(super) fn stop(&self) {
        self.add(|mail| mail.stop = true);
        // Dropping the senders tells the waiting receivers that no result will follow.
        self.lock_snapshots().clear();
    }

    /// Reports whether a received snapshot was installed (true) or discarded (false).
    pub(super) fn snapshot_ended(&self, body: &Path, installed: bool) {
        if let Some(sender) = self.lock_snapshots().remove(body) {
            // The send fails only if the receiver no longer waits, so the error is ignored.
            let _ = sender.try_send(installed);
        }
    }

    fn lock_snapshots(&self) -> MutexGuard<'_, BTreeMap<PathBuf, SyncSender<bool>>> {
        self.snapshots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all queued inputs. If there are none, waits for one until `deadline`.
    pub(super) fn take(&self, deadline: Instant) -> Mail {
        let mut inputs = self.lock();
        while inputs.mail.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                break;
            }
            inputs.is_core_waiting = true;
            let waited = self.arrived.wait_timeout(inputs, left);
            inputs = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        inputs.is_core_waiting = false;
        inputs.mail.take()
    }
}

impl CoreInbox for Mailbox {
    fn message(&self, message: Message) -> Result<(), InboxFull> {
        self.add(|mail| mail.message(message)).map_err(|_| InboxFull)
    }

    fn notice(&self, notice: Notice) {
        self.add(|mail| mail.notice(notice));
    }

    fn snapshot(&self, snapshot: IncomingSnapshot) -> Receiver<bool> {
        let (sender, receiver) = sync_channel(1);
        // The inputs stay locked during both steps: adding the channel and queueing the notice. So
        // a stop never happens between them.
        self.add(|mail| {
            if !mail.stop {
                self.lock_snapshots().insert(snapshot.body.clone(), sender);
                mail.notice(Notice::Snapshot(snapshot));
            }
        });
        receiver
    }
}
