//! Probes every peer of a proposal until it answers or the epoch is over.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use discovery_formation::agent::Target;
use discovery_formation::{Epoch, KeyId};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::convert;
use crate::exit::chain;
use crate::probe::client::probe;
use crate::probe::{Answer, ProbeIdentity};
use crate::supervisor::policy::jitter;

/// The first pause between two tries; the other side may not have the proposal yet.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Findings that wait for the owner; with more, probers wait.
const FINDINGS: usize = 64;

/// What a probe of one peer found.
#[derive(Debug)]
pub struct Finding {
    /// For the proposal of this epoch.
    pub epoch: Epoch,
    /// Whom it was about.
    pub peer: KeyId,
    /// The answer and its round trip, or the reason.
    pub result: Result<(Answer, Duration), String>,
}

/// Probers at work, for one epoch at a time.
pub struct Mesh {
    identity: Arc<ProbeIdentity>,
    epoch: Epoch,
    stop: CancellationToken,
    sender: mpsc::Sender<Finding>,
    findings: mpsc::Receiver<Finding>,
}

impl Mesh {
    /// Nobody is probed yet.
    pub fn new(identity: Arc<ProbeIdentity>) -> Self {
        let (sender, findings) = mpsc::channel(FINDINGS);
        Self { identity, epoch: 0, stop: CancellationToken::new(), sender, findings }
    }

    /// Probes `targets` for the proposal of `epoch`; the probers of another epoch stop. Those whose
    /// release is waited for (`wanted`) are asked again and again.
    pub fn start(&mut self, epoch: Epoch, targets: Vec<Target>, wanted: &BTreeSet<KeyId>) {
        if epoch == self.epoch {
            return;
        }
        self.stop();
        self.epoch = epoch;
        for target in targets {
            let again = wanted.contains(&target.key);
            let prober = Prober {
                identity: Arc::clone(&self.identity),
                epoch,
                target,
                again,
                sender: self.sender.clone(),
            };
            let stop = self.stop.clone();
            tokio::spawn(async move {
                tokio::select! {
                    () = prober.run() => {}
                    () = stop.cancelled() => {}
                }
            });
        }
    }

    /// Stops every prober.
    pub fn stop(&mut self) {
        self.stop.cancel();
        self.stop = CancellationToken::new();
        self.epoch = 0;
    }

    /// The next finding. Safe to drop.
    pub async fn next(&mut self) -> Finding {
        self.findings.recv().await.expect("this value holds a sender itself")
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

struct Prober {
    identity: Arc<ProbeIdentity>,
    epoch: Epoch,
    target: Target,
    again: bool,
    sender: mpsc::Sender<Finding>,
}

impl Prober {
    async fn run(self) {
        let mut pause = FIRST_PAUSE;
        let mut last = None;
        loop {
            let result = self.all_urls().await;
            let reached = result.is_ok();
            // The same failure again is no news.
            let said = result.as_ref().map(|(answer, _)| answer.clone()).map_err(Clone::clone);
            if last.as_ref() != Some(&said) {
                last = Some(said);
                let finding = Finding { epoch: self.epoch, peer: self.target.key, result };
                if self.sender.send(finding).await.is_err() {
                    return;
                }
            }
            if reached && !self.again {
                return;
            }
            pause = if reached { LONGEST_PAUSE } else { pause };
            tokio::time::sleep(pause.mul_f64(0.5 + jitter() / 2.0)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Every URL of the peer has to lead to it.
    async fn all_urls(&self) -> Result<(Answer, Duration), String> {
        let mut found = Err("it has no peer URL".to_owned());
        for url in &self.target.peer_urls {
            let at = url.strip_prefix("https://").unwrap_or(url);
            let began = Instant::now();
            let key = convert::public_key(self.target.key);
            match probe(&self.identity, key, at).await {
                Ok(answer) => found = Ok((answer, began.elapsed())),
                Err(error) => return Err(chain(&error)),
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use discovery_formation::Incarnation;
    use discovery_types::key::SigningKey;
    use tokio::sync::watch;

    use super::*;
    use crate::probe::server::{Policy, ProbeListener};

    fn target(key: &SigningKey, at: &str) -> Target {
        Target {
            key: convert::key(key.public()),
            incarnation: Incarnation(1),
            peer_urls: vec![format!("https://{at}")],
            in_proposal: true,
        }
    }

    #[tokio::test]
    async fn a_peer_that_comes_late_is_found_and_each_news_is_told_once() {
        let (own, other) = (SigningKey::generate(), SigningKey::generate());
        let answer = Answer {
            key: *other.public(),
            incarnation: discovery_types::digest::Incarnation([0; 16]),
            released: None,
        };
        let (policy, changes) = watch::channel(Policy::default());
        let identity = ProbeIdentity::new(&other);
        let listener =
            ProbeListener::open("127.0.0.1:0".parse().unwrap(), &identity, changes).await.unwrap();
        let mut mesh = Mesh::new(Arc::new(ProbeIdentity::new(&own)));
        let targets = vec![target(&other, &listener.address().to_string())];
        mesh.start(4, targets, &BTreeSet::new());
        // The listener doesn't know this host yet.
        let first = mesh.next().await;
        assert!(first.result.is_err());
        policy.send_replace(Policy {
            askers: BTreeSet::from([*own.public()]),
            answer: Some(answer.clone()),
        });
        let second = mesh.next().await;
        assert_eq!(second.epoch, 4);
        assert_eq!(second.result.unwrap().0, answer);
    }

    #[tokio::test]
    async fn the_probers_of_an_older_epoch_stop() {
        let (own, other) = (SigningKey::generate(), SigningKey::generate());
        let mut mesh = Mesh::new(Arc::new(ProbeIdentity::new(&own)));
        // Nobody listens on port 1: each try fails at once.
        mesh.start(1, vec![target(&other, "127.0.0.1:1")], &BTreeSet::new());
        assert_eq!(mesh.next().await.epoch, 1);
        mesh.start(2, vec![target(&other, "127.0.0.1:1")], &BTreeSet::new());
        assert_eq!(mesh.next().await.epoch, 2);
    }
}
