//! The only owner of the protocol's state machine and of its journal.
//!
//! Only this module persists before it acts: a step's journal is durable before any of its actions
//! is returned. If a write fails, the process ends, and a restart continues from what is on disk.

use std::sync::Arc;

use discovery_formation::Rules;
use discovery_formation::agent::{Action, Agent, Event, Journal, Start};
use discovery_types::digest::Nonce;
use discovery_types::document::VerifiedDocument;
use discovery_types::key::SigningKey;

use crate::crash::{self, Step};
use crate::exit::{End, chain};
use crate::state::journal::{self, Keepsakes};
use crate::state::{Layout, StateError};

/// The agent's state machine with its journal on disk.
pub(crate) struct Protocol {
    /// Paths in the data directory.
    pub layout: Layout,
    /// The agent's private key.
    pub key: Arc<SigningKey>,
    /// The pure state machine of `discovery-formation`.
    pub agent: Agent,
    /// Facts journalled beside the machine's. Changes become durable with the next step that
    /// writes.
    pub keepsakes: Keepsakes,
    /// The document this agent holds, or that of the cluster that added this host; verified.
    pub document: Option<VerifiedDocument>,
}

impl Protocol {
    /// Makes the state machine from a journal that is on disk, with its boot counter.
    pub(crate) fn new(
        layout: Layout,
        key: SigningKey,
        journal: Journal,
        keepsakes: Keepsakes,
        document: Option<VerifiedDocument>,
    ) -> Self {
        let nonce = u128::from_be_bytes(*Nonce::random().as_bytes());
        let agent = Agent::new(journal, nonce);
        Self { layout, key: Arc::new(key), agent, keepsakes, document }
    }

    /// Returns the nonce of this run in its wire format.
    pub(crate) fn nonce(&self) -> Nonce {
        Nonce(self.agent.session.nonce.to_be_bytes())
    }

    /// Makes changes of `keepsakes` durable without a step.
    pub(crate) fn keep(&self) -> Result<(), End> {
        journal::write(&self.layout, &self.agent.journal, &self.keepsakes).map_err(state_end)
    }

    /// Applies one event. When this returns, everything that has to be durable is.
    pub(crate) fn step(&mut self, event: Event) -> Result<Vec<Action>, End> {
        let held_before = self.agent.journal.held.is_some();
        let start_before = self.agent.journal.start;
        let output = self.agent.step(&Rules::ALL, event);
        if let Some(journal) = &output.durable {
            if !held_before && journal.held.is_some() {
                // The commit may be seen before the ack's own answer arrives; the ack was sent in
                // any case.
                crash::at(Step::AckSent);
            }
            journal::write(&self.layout, journal, &self.keepsakes).map_err(state_end)?;
            if !held_before && journal.held.is_some() {
                crash::at(Step::Hold);
            }
            if start_before != journal.start {
                match journal.start {
                    Start::Launching => crash::at(Step::Launching),
                    Start::Ran => crash::at(Step::Ran),
                    Start::NotYet => {}
                }
            }
        }
        for action in &output.then {
            match action {
                Action::Redeem => crash::at(Step::Redeem),
                Action::SignAck { .. } => crash::at(Step::Ack),
                Action::SignRelease { .. } => crash::at(Step::Release),
                _ => {}
            }
        }
        Ok(output.then)
    }
}

/// Converts a state error into an end of the agent.
pub(crate) fn state_end(error: StateError) -> End {
    if error.is_retryable() { End::Failed(chain(&error)) } else { End::DoNotRestart(chain(&error)) }
}
