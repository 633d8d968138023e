//! Requests that wait for their outcomes.
//!
//! A request is served on the thread of its connection, and its outcome comes from the core or the
//! apply thread. A wake-up of another thread costs a system call. So one task of each tokio runtime
//! delivers all outcomes of a batch to the requests on that runtime. Only this task is woken from
//! another thread.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};

use node_consensus::Position;
use node_state::state_machine::RequestId;
use tokio::runtime;
use tokio::sync::oneshot;

use super::mail::ReadToken;
use super::{ProposeError, ReadBarrierError};

/// Requests that wait for their outcomes. API calls add requests; the apply and core threads remove
/// them.
#[derive(Debug)]
pub(super) struct Waiters<O> {
    pub(super) proposals: Waiting<RequestId, Result<O, ProposeError>>,
    pub(super) reads: Waiting<ReadToken, Result<Position, ReadBarrierError>>,
}

impl<O> Default for Waiters<O> {
    fn default() -> Self {
        Self { proposals: Waiting::default(), reads: Waiting::default() }
    }
}

impl<O> Waiters<O> {
    /// Ends all waiting requests without an outcome.
    pub(super) fn stop(&self) {
        self.proposals.lock().clear();
        self.reads.lock().clear();
    }
}

/// A request that waits.
#[derive(Debug)]
struct Waiter<T> {
    sender: oneshot::Sender<T>,
    /// Runtime on which the request waits.
    runtime: runtime::Handle,
}

/// Outcomes, each with the channel to its request.
type Batch<T> = Vec<(oneshot::Sender<T>, T)>;

/// Waiting requests of one kind, by their id.
#[derive(Debug)]
pub(super) struct Waiting<K, T>(Mutex<HashMap<K, Waiter<T>>>);

impl<K, T> Default for Waiting<K, T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Copy + Eq + Hash, T> Waiting<K, T> {
    fn lock(&self) -> MutexGuard<'_, HashMap<K, Waiter<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request that waits on the current tokio runtime. Dropping the returned guard removes
    /// the request.
    ///
    /// # Panics
    /// If a request with this id waits already, or outside of a tokio runtime.
    pub(super) fn add(&self, id: K) -> (WaiterGuard<'_, K, T>, oneshot::Receiver<T>) {
        let (sender, receiver) = oneshot::channel();
        let waiter = Waiter { sender, runtime: runtime::Handle::current() };
        let previous = self.lock().insert(id, waiter);
        assert!(previous.is_none(), "a request id is used once");
        (WaiterGuard { waiting: self, id }, receiver)
    }
}

impl<K: Copy + Eq + Hash, T: Send + 'static> Waiting<K, T> {
    /// Delivers outcomes to the requests that still wait for them.
    pub(super) fn answer(&self, outcomes: impl IntoIterator<Item = (K, T)>) {
        let mut batches: Vec<(runtime::Handle, Batch<T>)> = Vec::new();
        {
            let mut waiting = self.lock();
            for (id, outcome) in outcomes {
                let Some(Waiter { sender, runtime }) = waiting.remove(&id) else { continue };
                match batches.iter_mut().find(|(known, _)| known.id() == runtime.id()) {
                    Some((_, batch)) => batch.push((sender, outcome)),
                    None => batches.push((runtime, vec![(sender, outcome)])),
                }
            }
        }
        for (runtime, batch) in batches {
            if batch.len() == 1 {
                deliver(batch);
            } else {
                // If the runtime has ended, the task is dropped. Then the requests have ended, too.
                runtime.spawn(async move { deliver(batch) });
            }
        }
    }
}

fn deliver<T>(batch: Batch<T>) {
    for (sender, outcome) in batch {
        // The send fails only if the caller no longer waits, so the error is ignored.
        let _ = sender.send(outcome);
    }
}

/// Guard that removes a waiting request when the request's future is dropped or completes.
pub(super) struct WaiterGuard<'a, K: Copy + Eq + Hash, T> {
    waiting: &'a Waiting<K, T>,
    id: K,
}

impl<K: Copy + Eq + Hash, T> Drop for WaiterGuard<'_, K, T> {
    fn drop(&mut self) {
        self.waiting.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn each_request_of_a_batch_gets_its_own_outcome() {
        let waiting: Arc<Waiting<u64, u64>> = Arc::default();
        let (_first, one) = waiting.add(1);
        let (second, two) = waiting.add(2);
        let (_third, three) = waiting.add(3);
        drop(second);
        let answering = Arc::clone(&waiting);
        let answer = move || answering.answer([(1, 10), (2, 20), (3, 30), (4, 40)]);
        std::thread::spawn(answer).join().unwrap();
        assert_eq!((one.await, three.await), (Ok(10), Ok(30)));
        assert!(two.await.is_err(), "its guard was dropped");
        assert!(waiting.lock().is_empty());
    }

    #[test]
    fn requests_on_several_runtimes_are_answered_on_each_of_them() {
        let waiting: Arc<Waiting<u64, u64>> = Arc::default();
        let runtime = || runtime::Builder::new_current_thread().build().unwrap();
        let (first, second) = (runtime(), runtime());
        let on_runtime = |runtime: &runtime::Runtime, ids: [u64; 2]| {
            let _entered = runtime.enter();
            ids.map(|id| {
                let (guard, receiver) = waiting.add(id);
                std::mem::forget(guard);
                receiver
            })
        };
        let [a, b] = on_runtime(&first, [1, 2]);
        let [c, d] = on_runtime(&second, [3, 4]);
        waiting.answer((1..=4).map(|id| (id, id * 10)));
        assert_eq!(first.block_on(async { (a.await, b.await) }), (Ok(10), Ok(20)));
        assert_eq!(second.block_on(async { (c.await, d.await) }), (Ok(30), Ok(40)));
    }
}
