//! The core's inbox: [`Mail`] behind a lock, with a way to wait for it.

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

#[derive(Debug, Default)]
pub(super) struct Mailbox {
    mail: Mutex<Mail>,
    arrived: Condvar,
    /// Channels that report whether a received snapshot was installed or discarded, by the
    /// snapshot's file. Each peer has at most one, because the transport receives one snapshot of a
    /// peer at a time.
    snapshots: Mutex<BTreeMap<PathBuf, SyncSender<bool>>>,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Mail> {
        // A poisoned lock is safe to use: nothing under it can panic half-way through a change.
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn propose(&self, proposal: ClientProposal) -> Result<(), QueueError> {
        self.lock().propose(proposal)?;
        self.arrived.notify_one();
        Ok(())
    }

    pub(super) fn read(&self, token: ReadToken) -> Result<(), QueueError> {
        self.lock().read(token)?;
        self.arrived.notify_one();
        Ok(())
    }

    pub(super) fn stop(&self) {
        self.lock().stop = true;
        self.arrived.notify_one();
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
        let mut mail = self.lock();
        while mail.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                break;
            }
            let waited = self.arrived.wait_timeout(mail, left);
            mail = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        mail.take()
    }
}

impl CoreInbox for Mailbox {
    fn message(&self, message: Message) -> Result<(), InboxFull> {
        self.lock().message(message).map_err(|_| InboxFull)?;
        self.arrived.notify_one();
        Ok(())
    }

    fn notice(&self, notice: Notice) {
        self.lock().notice(notice);
        self.arrived.notify_one();
    }

    fn snapshot(&self, snapshot: IncomingSnapshot) -> Receiver<bool> {
        let (sender, receiver) = sync_channel(1);
        let mut mail = self.lock();
        // The mail's lock is held throughout, so that a stop happens before or after these steps,
        // never between.
        if !mail.stop {
            self.lock_snapshots().insert(snapshot.body.clone(), sender);
            mail.notice(Notice::Snapshot(snapshot));
            self.arrived.notify_one();
        }
        receiver
    }
}
