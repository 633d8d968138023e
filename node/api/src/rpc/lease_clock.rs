//! Remaining time of leases, which only the leader knows.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use node_engine::driver::{NodeStatus, Role};
use node_state::lease::{Lessor, RaftStatus};
use node_state::mvcc::Store;
use tokio::sync::watch;
use tokio::time::Instant;

/// The leader's lease clock.
pub(crate) struct LeaseClock {
    lessor: Mutex<Lessor>,
    began: Instant,
    status: watch::Receiver<Arc<NodeStatus>>,
    store: Store,
}

impl LeaseClock {
    pub(super) fn new(
        election_timeout: Duration,
        status: watch::Receiver<Arc<NodeStatus>>,
        store: Store,
    ) -> Self {
        let lessor = Mutex::new(Lessor::new(election_timeout));
        Self { lessor, began: Instant::now(), status, store }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Lessor> {
        self.lessor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the lease clock, after updating it to the current term and leases. Also returns the
    /// clock's time.
    pub(super) fn read(&self) -> (MutexGuard<'_, Lessor>, Duration) {
        let seat = {
            let status = self.status.borrow();
            let leads = status.role == Role::Leader;
            RaftStatus { is_leader: leads, term: status.term, applied_term: status.applied.term }
        };
        let (mut lessor, now) = (self.lock(), self.began.elapsed());
        lessor.update(seat, self.store.leases(), now);
        (lessor, now)
    }
}
