//! The handle by which the node's other parts use the driver: proposals, read barriers and the
//! status.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;
use node_consensus::{EntryKind, Position};
use node_state::state_machine::RequestId;
use tokio::sync::watch;

use super::mail::{ClientProposal, Notice, QueueError};
use super::mailbox::{CoreInbox as _, Mailbox};
use super::waiters::Waiters;
use super::{
    DriverMetrics, MAX_PROPOSAL_BYTES, MemberOptions, NodeStatus, ProposeError, ReadBarrierError,
    TransferError,
};

/// Handle of the driver, by which the node's other parts use consensus. Cheap to clone.
#[derive(Debug)]
pub struct Handle<O> {
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) waiters: Arc<Waiters<O>>,
    pub(super) status: watch::Receiver<Arc<NodeStatus>>,
    pub(super) leader: watch::Receiver<u64>,
    pub(super) space: watch::Receiver<bool>,
    pub(super) metrics: Arc<DriverMetrics>,
    pub(super) options: Arc<MemberOptions>,
    pub(super) next_read: Arc<AtomicU64>,
}

impl<O> Clone for Handle<O> {
    fn clone(&self) -> Self {
        Self {
            mailbox: Arc::clone(&self.mailbox),
            waiters: Arc::clone(&self.waiters),
            status: self.status.clone(),
            leader: self.leader.clone(),
            space: self.space.clone(),
            metrics: Arc::clone(&self.metrics),
            options: Arc::clone(&self.options),
            next_read: Arc::clone(&self.next_read),
        }
    }
}

impl<O: Send + 'static> Handle<O> {
    /// Proposes `payload` and returns the outcome once this member has applied it. The state
    /// machine recognises the request by `id`. While no leader is known, the proposal waits for
    /// one. Dropping the future ends the wait but does not withdraw the proposal.
    pub async fn propose(&self, payload: Bytes, id: RequestId) -> Result<O, ProposeError> {
        self.propose_entry(EntryKind::Normal, payload, id).await
    }

    /// Proposes a change of members; otherwise works like [`propose`](Self::propose). The change
    /// waits until a quorum is known to have the previous change on disk.
    pub async fn propose_change(&self, payload: Bytes, id: RequestId) -> Result<O, ProposeError> {
        self.propose_entry(EntryKind::ConfChange, payload, id).await
    }

    async fn propose_entry(
        &self,
        kind: EntryKind,
        payload: Bytes,
        id: RequestId,
    ) -> Result<O, ProposeError> {
        if payload.len() > MAX_PROPOSAL_BYTES {
            return Err(ProposeError::TooLarge);
        }
        let started = Instant::now();
        let (_waiting, receiver) = self.waiters.proposals.add(id);
        let proposal = ClientProposal { id, kind, data: payload };
        self.mailbox.propose(proposal).map_err(|refused| match refused {
            QueueError::Full => ProposeError::TooManyRequests,
            QueueError::Stopped => ProposeError::Stopped,
        })?;
        match tokio::time::timeout(self.options.request_timeout, receiver).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(ProposeError::Stopped),
            Err(_) => Err(self.status.borrow().timeout_error(started)),
        }
    }

    /// Waits until this member has applied everything that any member acknowledged before the call.
    /// A local read after that is linearizable. All calls that wait share one ReadIndex round.
    pub async fn read_barrier(&self) -> Result<Position, ReadBarrierError> {
        let answer = self.wait_for_confirmation().await;
        match answer {
            Ok(_) => {}
            Err(ReadBarrierError::Timeout) => {
                self.metrics.reads_timed_out.fetch_add(1, Ordering::Relaxed);
                self.metrics.reads_failed.fetch_add(1, Ordering::Relaxed);
            }
            Err(_) => {
                self.metrics.reads_failed.fetch_add(1, Ordering::Relaxed);
            }
        }
        answer
    }

    async fn wait_for_confirmation(&self) -> Result<Position, ReadBarrierError> {
        let token = self.next_read.fetch_add(1, Ordering::Relaxed);
        let (_waiting, receiver) = self.waiters.reads.add(token);
        self.mailbox.read(token).map_err(|refused| match refused {
            QueueError::Full => ReadBarrierError::TooManyRequests,
            QueueError::Stopped => ReadBarrierError::Stopped,
        })?;
        match tokio::time::timeout(self.options.request_timeout, receiver).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(ReadBarrierError::Stopped),
            Err(_) if self.status.borrow().leader == 0 => Err(ReadBarrierError::NoLeader),
            Err(_) => Err(ReadBarrierError::Timeout),
        }
    }

    /// Returns a watch channel with the current leader (0 while there is none). This channel wakes
    /// its receiver only when the leader changes. That of [`Self::status`] changes with every
    /// round.
    pub fn leader(&self) -> watch::Receiver<u64> {
        self.leader.clone()
    }

    /// Returns a watch channel with this member's status.
    pub fn status(&self) -> watch::Receiver<Arc<NodeStatus>> {
        self.status.clone()
    }

    /// Returns a watch channel that says whether this member's disk is nearly full. While its value
    /// is true, requests that make the data grow must be refused.
    pub fn short_of_space(&self) -> watch::Receiver<bool> {
        self.space.clone()
    }

    /// Returns the driver's counters.
    pub fn metrics(&self) -> &DriverMetrics {
        &self.metrics
    }

    /// Campaigns at once, if no leader is known.
    pub fn campaign(&self) {
        self.mailbox.notice(Notice::Campaign);
    }

    /// Transfers leadership to `to` and waits until that member leads. Fails if this member isn't
    /// the leader.
    pub async fn transfer_leader(&self, to: u64) -> Result<(), TransferError> {
        let mut status = self.status.clone();
        {
            let now = status.borrow();
            if now.leader != now.member {
                return Err(TransferError::NotLeader);
            }
            if to == now.member {
                return Ok(());
            }
            if !now.members.voters.contains(&to) {
                return Err(TransferError::BadTransferee);
            }
        }
        self.mailbox.notice(Notice::Transfer(Some(to)));
        let done = status.wait_for(|now| now.leader == to);
        match tokio::time::timeout(self.options.transfer_timeout(), done).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(TransferError::Stopped),
            Err(_) => Err(TransferError::Timeout),
        }
    }

    /// Ends this member's part in consensus. All waiting and later requests on this member fail
    /// with `Stopped`.
    pub fn leave(&self) {
        self.mailbox.stop();
    }

    /// If this member leads, transfers leadership to the most suitable voter. Returns at once if no
    /// voter is suitable. Otherwise returns once another member leads, or after one election
    /// time-out.
    pub async fn hand_over(&self) {
        let mut status = self.status.clone();
        let (leads, alone, successor) = {
            let now = status.borrow();
            (now.leader == now.member, now.members.voters.len() == 1, now.successor)
        };
        if alone || !leads {
            return;
        }
        if successor.is_none() {
            tracing::warn!(
                "no other voter is connected and answers: leadership can't be handed over"
            );
            return;
        }
        self.mailbox.notice(Notice::Transfer(None));
        let done = status.wait_for(|now| now.leader != now.member && now.leader != 0);
        let _ = tokio::time::timeout(self.options.transfer_timeout(), done).await;
    }
}
