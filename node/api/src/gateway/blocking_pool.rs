//! Conversion of large messages on other threads, so that a conversion doesn't block the other
//! clients of the calling thread.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tonic::Status;

use crate::rpc;

/// Number of bytes above which a message is converted on another thread.
const LARGE_BYTES: usize = 256 << 10;
/// Maximum number of large messages that are converted at a time. A converted message can take a
/// hundred times as much memory as its JSON.
const MAX_LARGE_AT_ONCE: usize = 2;

#[derive(Clone)]
pub(super) struct BlockingPool(Arc<Semaphore>);

impl BlockingPool {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(MAX_LARGE_AT_ONCE)))
    }

    /// Runs `work`, which processes `bytes` bytes. Large work waits for one of the few permits. The
    /// number of waiting messages is bounded, since each is charged to its sender's account.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        if bytes <= LARGE_BYTES {
            return work();
        }
        let turn = Arc::clone(&self.0).acquire_owned().await.expect("it is never closed");
        rpc::run_blocking(turn, work).await?
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn only_a_large_message_is_converted_on_another_thread() {
        let (tell, told) = mpsc::channel();
        let apart = BlockingPool::new();
        let large = apart.run(LARGE_BYTES + 1, move || Ok(told.recv().unwrap()));
        let other = async {
            tokio::task::yield_now().await;
            tell.send(7).unwrap();
        };
        assert_eq!(tokio::join!(large, other).0.unwrap(), 7);
        let here = std::thread::current().id();
        let small = apart.run(LARGE_BYTES, || Ok(std::thread::current().id())).await;
        assert_eq!(small.unwrap(), here);
    }

    #[tokio::test]
    async fn the_number_of_large_messages_converted_at_a_time_is_limited() {
        static NOW: AtomicUsize = AtomicUsize::new(0);
        static MOST: AtomicUsize = AtomicUsize::new(0);
        let apart = BlockingPool::new();
        let work = || {
            MOST.fetch_max(NOW.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(5));
            NOW.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        };
        let all = (0..20).map(|_| apart.run(LARGE_BYTES + 1, work));
        assert!(futures_util::future::join_all(all).await.iter().all(Result::is_ok));
        assert!((1..=MAX_LARGE_AT_ONCE).contains(&MOST.load(Ordering::SeqCst)));
    }
}
