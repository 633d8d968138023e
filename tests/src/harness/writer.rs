//! A client that writes steadily while a cluster changes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use node_proto::etcdserverpb::RangeRequest;
use rustls::ClientConfig;

use crate::client::EtcdClient;

/// Time limit of one write, which is longer than any election. A slower write is treated as lost.
const WRITE_LIMIT: Duration = Duration::from_secs(60);
/// Minimum number of writes, even if the test stops the writer earlier.
const MIN_WRITES: usize = 20;
const CALL_LIMIT: Duration = Duration::from_secs(2);
/// Pause between two writes.
const WRITE_PAUSE: Duration = Duration::from_millis(10);

/// A thread that writes one key after another. It repeats each write until a member acknowledges
/// it.
#[derive(Debug)]
pub struct RetryingWriter {
    tls: Option<Arc<ClientConfig>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<usize>>,
}

impl RetryingWriter {
    /// Starts writing to `urls` without TLS.
    pub fn start(urls: Vec<String>) -> Self {
        Self::start_with_tls(urls, None)
    }

    /// Starts writing to `urls`, with the identity in `tls`.
    pub fn start_with_tls(urls: Vec<String>, tls: Option<Arc<ClientConfig>>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, identity) = (Arc::clone(&stop), tls.clone());
        let thread =
            std::thread::spawn(move || write_until_stopped(&urls, identity.as_ref(), &stopped));
        Self { tls, stop, thread }
    }

    /// Stops the writer, and checks that every write was acknowledged and is stored.
    pub fn stop_and_check(self, url: &str) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let written = self.thread.join().expect("the writer doesn't panic")?;
        runtime()?.block_on(async {
            let request = RangeRequest {
                key: b"w".to_vec().into(),
                range_end: b"x".to_vec().into(),
                count_only: true,
                ..RangeRequest::default()
            };
            let start = Instant::now();
            let found = loop {
                match client(url, self.tls.as_ref())?.range(request.clone(), CALL_LIMIT).await {
                    Ok(answer) => break answer.count,
                    Err(error) if start.elapsed() > WRITE_LIMIT => return Err(error),
                    Err(_) => tokio::time::sleep(WRITE_PAUSE).await,
                }
            };
            ensure!(found == i64::try_from(written)?, "{written} acknowledged, {found} there");
            Ok(())
        })
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

fn client(url: &str, tls: Option<&Arc<ClientConfig>>) -> Result<EtcdClient> {
    let (_, address) = url.split_once("://").context("a URL")?;
    EtcdClient::new(address.parse::<SocketAddr>()?, tls.cloned())
}

fn write_until_stopped(
    urls: &[String],
    tls: Option<&Arc<ClientConfig>>,
    stop: &AtomicBool,
) -> Result<usize> {
    let mut written = 0;
    runtime()?.block_on(async {
        let mut at = 0;
        while written < MIN_WRITES || !stop.load(Ordering::Relaxed) {
            let key = format!("w{written:08}");
            let start = Instant::now();
            // Each retry puts an equal key and value, so all attempts together are one write.
            while client(&urls[at], tls)?.put(key.as_bytes(), b"x", CALL_LIMIT).await.is_err() {
                at = (at + 1) % urls.len();
                ensure!(start.elapsed() < WRITE_LIMIT, "no write gets through");
            }
            written += 1;
            tokio::time::sleep(WRITE_PAUSE).await;
        }
        Ok(written)
    })
}
