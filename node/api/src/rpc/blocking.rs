//! Runs long work away from the threads that serve requests.

use tokio::task::spawn_blocking;

use super::error::Error;

/// Runs `work` on a thread that may block. Once begun, `work` runs to its end even if the caller
/// stops waiting. `turn` is the permit to run, and is released when `work` has ended.
pub(crate) async fn run_blocking<T: Send + 'static>(
    turn: impl Send + 'static,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let work = move || {
        let done = work();
        drop(turn);
        done
    };
    spawn_blocking(work).await.map_err(|_| Error::Stopped)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use tokio::sync::{Semaphore, oneshot};

    use super::*;

    #[tokio::test]
    async fn a_permit_is_held_until_the_work_ends_even_if_its_caller_has_left() {
        let places = Arc::new(Semaphore::new(1));
        let turn = Arc::clone(&places).try_acquire_owned().unwrap();
        let (begin, begun) = oneshot::channel();
        let (tell, told) = mpsc::channel();
        let waits = tokio::spawn(run_blocking(turn, move || {
            begin.send(()).unwrap();
            told.recv().unwrap();
        }));
        begun.await.unwrap();
        waits.abort();
        assert!(waits.await.unwrap_err().is_cancelled());
        assert_eq!(places.available_permits(), 0);
        tell.send(()).unwrap();
        let _free = places.acquire().await.unwrap();
    }
}
