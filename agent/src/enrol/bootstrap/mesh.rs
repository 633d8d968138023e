//! Probes every peer of a proposal until it answers or the epoch has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use discovery_formation::agent::ProbeTarget;
use discovery_formation::{AgentKey, Epoch, Hash};
use discovery_types::convert;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::etcd::EtcdTarget;
use crate::exit::error_chain;
use crate::launch::restart_policy::jitter;
use crate::probe::client::{ProbeError, probe};
use crate::probe::{Answer, ProbeIdentity};

/// Pause after the first probe. Each later pause is twice as long, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// How long a peer may take to learn of the proposal. Until then, the peer doesn't know this host's
/// key, and closes connections without an answer. During this time, such a failure is not reported.
/// All hosts learn of a list at nearly the same time.
const PROPOSAL_GRACE: Duration = Duration::from_secs(1);
/// The longest pause between two probes.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Capacity of the channel of findings. Probers wait while it is full.
const FINDING_CHANNEL_CAPACITY: usize = 64;

/// Result of probing one peer.
#[derive(Debug)]
pub(super) struct ProbeFinding {
    /// Epoch of the proposal for which the peer was probed.
    pub epoch: Epoch,
    /// Key of the probed peer.
    pub peer: AgentKey,
    /// The answer and its round-trip time, or the reason of the failure.
    pub result: Result<(Answer, Duration), String>,
}

/// The running probers, all for one proposed list of members.
pub(super) struct Probers {
    identity: Arc<ProbeIdentity>,
    /// Hash of the proposed list whose members are probed.
    list: Option<Hash>,
    stop: CancellationToken,
    sender: mpsc::Sender<ProbeFinding>,
    findings: mpsc::Receiver<ProbeFinding>,
    /// The etcds that are asked in the place of the agents, in a cluster that comes under
    /// management.
    pub(super) etcds: BTreeMap<AgentKey, EtcdTarget>,
}

impl Probers {
    /// Makes the set of probers, none of which runs yet.
    pub(super) fn new(identity: Arc<ProbeIdentity>) -> Self {
        let (sender, findings) = mpsc::channel(FINDING_CHANNEL_CAPACITY);
        let (list, stop, etcds) = (None, CancellationToken::new(), BTreeMap::new());
        Self { identity, list, stop, sender, findings, etcds }
    }

    /// Probes `targets`, members of the proposed list `h` of `epoch`. Probers for another list
    /// stop, and their findings are dropped. Peers in `wanted` are probed again after they have
    /// answered. A later answer may have a release: the peer's promise to be in no earlier list.
    pub(super) fn start(
        &mut self,
        (epoch, h): (Epoch, Hash),
        targets: Vec<ProbeTarget>,
        wanted: &BTreeSet<AgentKey>,
    ) {
        if self.list == Some(h) {
            return;
        }
        self.stop();
        self.list = Some(h);
        for target in targets {
            let again = wanted.contains(&target.key);
            let prober = Prober {
                identity: Arc::clone(&self.identity),
                epoch,
                etcd: self.etcds.get(&target.key).cloned(),
                target,
                is_repeated: again,
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

    /// Stops all probers, and drops their findings.
    pub(super) fn stop(&mut self) {
        self.stop.cancel();
        self.stop = CancellationToken::new();
        self.list = None;
        (self.sender, self.findings) = mpsc::channel(FINDING_CHANNEL_CAPACITY);
    }

    /// Waits for the next finding. If the future is dropped, no finding is lost.
    pub(super) async fn next(&mut self) -> ProbeFinding {
        self.findings.recv().await.expect("this value holds a sender itself")
    }
}

impl Drop for Probers {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

struct Prober {
    identity: Arc<ProbeIdentity>,
    epoch: Epoch,
    target: ProbeTarget,
    /// The etcd to ask in the agent's place.
    etcd: Option<EtcdTarget>,
    is_repeated: bool,
    sender: mpsc::Sender<ProbeFinding>,
}

impl Prober {
    async fn run(self) {
        let began = Instant::now();
        let mut pause = FIRST_PAUSE;
        let mut last = None;
        loop {
            let result = match &self.etcd {
                Some(etcd) => etcd.probe(&self.target).await,
                None => self.all_urls().await,
            };
            let reached = result.is_ok();
            let early = began.elapsed() < PROPOSAL_GRACE;
            if early && matches!(result, Err(ProbeError::Silent { .. })) {
                pause = sleep_and_double(pause).await;
                continue;
            }
            let result = result.map_err(|error| error_chain(&error));
            // A result is not reported if it equals the one reported last.
            let said = result.as_ref().map(|(answer, _)| answer.clone()).map_err(Clone::clone);
            if last.as_ref() != Some(&said) {
                last = Some(said);
                let finding = ProbeFinding { epoch: self.epoch, peer: self.target.key, result };
                if self.sender.send(finding).await.is_err() {
                    return;
                }
            }
            if reached && !self.is_repeated {
                return;
            }
            pause = sleep_and_double(if reached { LONGEST_PAUSE } else { pause }).await;
        }
    }

    /// Probes all URLs of the peer. Fails unless every URL leads to the peer.
    async fn all_urls(&self) -> Result<(Answer, Duration), ProbeError> {
        let mut found = Err(ProbeError::NoUrl);
        for url in &self.target.peer_urls {
            let at = url.strip_prefix("https://").unwrap_or(url);
            let began = Instant::now();
            let key = convert::public_key(self.target.key);
            match probe(&self.identity, key, at).await {
                Ok(answer) => found = Ok((answer, began.elapsed())),
                Err(error) => return Err(error),
            }
        }
        found
    }
}

/// Waits for a random time between half of `pause` and all of it. Returns the next pause.
async fn sleep_and_double(pause: Duration) -> Duration {
    tokio::time::sleep(pause.mul_f64(0.5 + jitter() / 2.0)).await;
    (pause * 2).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use discovery_formation::Incarnation;
    use discovery_types::key::SigningKey;
    use tokio::sync::watch;

    use super::*;
    use crate::probe::server::{ProbeListener, ProbePolicy};

    fn target(key: &SigningKey, at: &str) -> ProbeTarget {
        ProbeTarget {
            key: convert::key(key.public()),
            incarnation: Incarnation(1),
            peer_urls: vec![format!("https://{at}")],
            is_in_proposal: true,
        }
    }

    struct ListeningPeer {
        answer: Answer,
        listener: ProbeListener,
        policy: watch::Sender<ProbePolicy>,
    }

    /// Makes a peer that listens and admits no key yet.
    async fn peer(key: &SigningKey) -> ListeningPeer {
        let answer = Answer {
            key: *key.public(),
            incarnation: discovery_types::digest::Incarnation([0; 16]),
            released: None,
        };
        let (policy, changes) = watch::channel(ProbePolicy::default());
        let any = "127.0.0.1:0".parse().unwrap();
        let listener = ProbeListener::open(any, &ProbeIdentity::new(key), changes).await.unwrap();
        ListeningPeer { answer, listener, policy }
    }

    impl ListeningPeer {
        /// Admits a key, as a peer does once it has learned of the proposal.
        fn admits(&self, asker: &SigningKey) {
            let askers = BTreeSet::from([*asker.public()]);
            self.policy.send_replace(ProbePolicy {
                allowed_keys: askers,
                answer: Some(self.answer.clone()),
            });
        }
    }

    #[tokio::test]
    async fn a_peer_that_learns_of_the_list_a_moment_later_is_not_reported_as_a_failure() {
        let (own, other) = (SigningKey::generate(), SigningKey::generate());
        let peer = peer(&other).await;
        let mut mesh = Probers::new(Arc::new(ProbeIdentity::new(&own)));
        let targets = vec![target(&other, &peer.listener.address().to_string())];
        mesh.start((4, Hash([4; 32])), targets, &BTreeSet::new());
        tokio::time::sleep(FIRST_PAUSE).await;
        peer.admits(&own);
        let first = mesh.next().await;
        assert_eq!(first.epoch, 4);
        assert_eq!(first.result.unwrap().0, peer.answer);
    }

    #[tokio::test]
    async fn a_silent_peer_is_reported_once_and_found_when_it_answers() {
        let (own, other) = (SigningKey::generate(), SigningKey::generate());
        let peer = peer(&other).await;
        let mut mesh = Probers::new(Arc::new(ProbeIdentity::new(&own)));
        let targets = vec![target(&other, &peer.listener.address().to_string())];
        mesh.start((4, Hash([4; 32])), targets, &BTreeSet::new());
        let first = mesh.next().await;
        assert!(first.result.unwrap_err().contains("doesn't answer"));
        peer.admits(&own);
        let second = mesh.next().await;
        assert_eq!(second.result.unwrap().0, peer.answer);
    }

    #[tokio::test]
    async fn another_list_of_the_same_epoch_is_probed_too() {
        let (own, other) = (SigningKey::generate(), SigningKey::generate());
        let peer = peer(&other).await;
        peer.admits(&own);
        let mut mesh = Probers::new(Arc::new(ProbeIdentity::new(&own)));
        mesh.start((1, Hash([1; 32])), vec![target(&other, "127.0.0.1:1")], &BTreeSet::new());
        assert!(mesh.next().await.result.is_err());
        let at = peer.listener.address().to_string();
        mesh.start((1, Hash([2; 32])), vec![target(&other, &at)], &BTreeSet::new());
        assert_eq!(mesh.next().await.result.unwrap().0, peer.answer);
    }

    #[tokio::test]
    async fn the_probers_of_an_older_epoch_stop() {
        let (own, other) = (SigningKey::generate(), SigningKey::generate());
        let mut mesh = Probers::new(Arc::new(ProbeIdentity::new(&own)));
        // No process listens on port 1, so each probe fails at once.
        mesh.start((1, Hash([1; 32])), vec![target(&other, "127.0.0.1:1")], &BTreeSet::new());
        assert_eq!(mesh.next().await.epoch, 1);
        mesh.start((2, Hash([2; 32])), vec![target(&other, "127.0.0.1:1")], &BTreeSet::new());
        assert_eq!(mesh.next().await.epoch, 2);
    }
}
