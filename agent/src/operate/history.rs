//! Checks that discovery doesn't rewrite its history of this cluster.
//!
//! The agent keeps the last checkpoint that discovery signed, and the next one has to continue it.
//! Otherwise discovery's database was set back to an older state, or rewritten. The agent then only
//! reports the fault, and keeps both checkpoints in a file as evidence until a person removes that
//! file.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use discovery_types::checkpoint::{Checkpoint, VerifiedCheckpoint};
use discovery_types::client::DiscoveryClient;
use discovery_types::jws::{Jws, JwsType};
use discovery_types::key::PublicKey;
use muster_files::data;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use uuid::Uuid;

use crate::exit::error_chain;
use crate::observe::status::StatusHandle;
use crate::state::{self, Layout};

/// How often the history is checked while discovery answers. After an outage it is checked at once.
const CHECK_INTERVAL: Duration = Duration::from_secs(600);

/// Two checkpoints of one chain that contradict each other.
#[derive(Debug, Serialize, Deserialize)]
struct Contradiction {
    /// Sentence that says how the checkpoints contradict each other.
    fault: String,
    /// Time at which this agent noticed the contradiction.
    found_at: jiff::Timestamp,
    /// Checkpoint that this agent had kept.
    earlier: Jws,
    /// Checkpoint that discovery signed later.
    later: Jws,
}

/// Checks discovery's history of this host's cluster.
pub(crate) struct HistoryWatch {
    client: Arc<DiscoveryClient>,
    cluster: Uuid,
    layout: Layout,
    board: StatusHandle,
    next_check: Cell<Instant>,
}

impl HistoryWatch {
    /// Makes a watch whose first check is due at once. If an earlier run of the agent has found a
    /// contradiction between two checkpoints, shows it in the status.
    pub(crate) fn new(
        client: Arc<DiscoveryClient>,
        cluster: Uuid,
        layout: Layout,
        board: StatusHandle,
    ) -> Self {
        let watch = Self { client, cluster, layout, board, next_check: Cell::new(Instant::now()) };
        watch.show_contradiction();
        watch
    }

    /// Makes the next check due, because discovery's database may have been replaced.
    pub(crate) fn mark_due(&self) {
        self.next_check.set(Instant::now());
    }

    /// Checks the history if that is due. A failed check is logged, and repeated after
    /// [`CHECK_INTERVAL`].
    pub(crate) async fn check_if_due(&self) {
        if Instant::now() < self.next_check.get() {
            return;
        }
        self.next_check.set(Instant::now() + CHECK_INTERVAL);
        if let Err(why) = self.check().await {
            tracing::debug!("discovery's history isn't checked: {why}");
        }
        self.show_contradiction();
    }

    async fn check(&self) -> Result<(), String> {
        let known = self.known();
        let number = known.as_ref().map_or(0, |(_, known)| known.last.number);
        let cause = |error: &dyn std::error::Error| error_chain(error);
        let answer = self.client.checkpoint(self.cluster, number).await;
        let jws = answer.map_err(|error| cause(&error))?;
        let keys = self.client.jwks().await.map_err(|error| cause(&error))?;
        let keys: Vec<PublicKey> = keys.keys.iter().filter_map(|key| key.public_key()).collect();
        let later =
            VerifiedCheckpoint::verify(&jws, self.cluster, &keys).map_err(|error| cause(&error))?;
        if let Some((earlier, known)) = known
            && let Err(fault) = later.check_continues(&known)
        {
            let found_at = jiff::Timestamp::now();
            let fault = format!(
                "discovery's history of this cluster isn't what it was: {fault}. A backup was \
                 restored, or somebody changed its database"
            );
            tracing::error!(evidence = %self.evidence().display(), "{fault}");
            let later = jws.clone();
            let found = Contradiction { fault, found_at, earlier, later };
            // The first contradiction stays: an attacker could otherwise provoke another one that
            // overwrites it.
            if !self.evidence().exists() {
                let text = serde_json::to_vec_pretty(&found).map_err(|error| cause(&error))?;
                data::replace(&self.evidence(), &text).map_err(|error| cause(&error))?;
            }
        }
        let file = self.layout.checkpoint();
        data::replace(&file, jws.as_str().as_bytes()).map_err(|error| cause(&error))
    }

    /// Returns the checkpoint that this agent has kept. Only the agent itself writes the file, and
    /// only after it has verified the signature.
    fn known(&self) -> Option<(Jws, Checkpoint)> {
        let bytes = state::read(&self.layout.checkpoint()).ok().flatten()?;
        let jws: Jws = String::from_utf8(bytes).ok()?.trim().parse().ok()?;
        let checkpoint: Checkpoint = jws.claims_unverified(JwsType::Checkpoint).ok()?;
        (checkpoint.cluster == self.cluster).then_some((jws, checkpoint))
    }

    fn evidence(&self) -> PathBuf {
        self.layout.contradiction()
    }

    /// Shows in the status the contradiction between two checkpoints that is in the evidence file.
    /// Without that file, the status shows none.
    fn show_contradiction(&self) {
        let bytes = state::read(&self.evidence()).ok().flatten();
        let found = bytes.and_then(|bytes| serde_json::from_slice::<Contradiction>(&bytes).ok());
        let text = found.map(|found| {
            let file = self.evidence();
            format!("{} (noticed at {}; evidence: {})", found.fault, found.found_at, file.display())
        });
        self.board.update(|status| status.history_fault.clone_from(&text));
    }
}
