//! The only owner of the state machine that forms a cluster (crate `discovery-formation`), and of
//! its journal.
//!
//! This module makes the journal durable before anything is done: a step returns its actions only
//! after the journal was written. If a write fails, the process ends, and a restart continues from
//! what is on disk.

use std::sync::Arc;

use discovery_formation::Rules;
use discovery_formation::agent::{Agent, AgentAction, AgentEvent, Journal, LaunchState};
use discovery_types::digest::Nonce;
use discovery_types::document::VerifiedDocument;
use discovery_types::key::SigningKey;

use crate::crash::{self, Failpoint};
use crate::exit::ExitError;
use crate::state::journal::{self, JournalExtras};
use crate::state::{Layout, state_exit_error};

/// The state machine of the formation protocol, with its journal on disk.
pub(crate) struct Protocol {
    /// Paths in the data directory.
    pub layout: Layout,
    /// The agent's private key.
    pub key: Arc<SigningKey>,
    /// The pure state machine of `discovery-formation`.
    pub agent: Agent,
    /// Facts in the journal that aren't part of the state machine's journal. Changes become durable
    /// by [`Self::change_extras`], by [`Self::persist_extras`], or with the next step that writes
    /// the journal.
    pub extras: JournalExtras,
    /// The verified commit document: the one that this agent holds, or that of the cluster that
    /// added this host.
    pub document: Option<VerifiedDocument>,
}

impl Protocol {
    /// Makes the state machine from a journal that is on disk, with its boot counter.
    pub(crate) fn new(
        layout: Layout,
        key: SigningKey,
        journal: Journal,
        extras: JournalExtras,
        document: Option<VerifiedDocument>,
    ) -> Self {
        let nonce = u128::from_be_bytes(*Nonce::random().as_bytes());
        let agent = Agent::new(journal, nonce);
        Self { layout, key: Arc::new(key), agent, extras, document }
    }

    /// Restarts the state machine from its journal, in the same session. Used after the state
    /// machine has ended because the cluster has its members already.
    pub(crate) fn renewed(self) -> Self {
        let mut agent = Agent::new(self.agent.journal, self.agent.session.nonce);
        agent.session = self.agent.session;
        Self { agent, ..self }
    }

    /// Returns the nonce of this run in its wire format.
    pub(crate) fn nonce(&self) -> Nonce {
        Nonce(self.agent.session.nonce.to_be_bytes())
    }

    /// Makes changes of `extras` durable without a step of the state machine.
    pub(crate) fn persist_extras(&self) -> Result<(), ExitError> {
        journal::write(&self.layout, &self.agent.journal, &self.extras).map_err(state_exit_error)
    }

    /// Changes `extras`, and makes the change durable.
    ///
    /// # Errors
    /// If the journal can't be written. Then `extras` is unchanged, so nothing acts on facts that a
    /// restart would forget.
    pub(crate) fn change_extras(
        &mut self,
        change: impl FnOnce(&mut JournalExtras),
    ) -> Result<(), ExitError> {
        let mut changed = self.extras.clone();
        change(&mut changed);
        journal::write(&self.layout, &self.agent.journal, &changed).map_err(state_exit_error)?;
        self.extras = changed;
        Ok(())
    }

    /// Applies one event. When this returns, the journal is durable, so the returned actions may be
    /// carried out.
    pub(crate) fn step(&mut self, event: AgentEvent) -> Result<Vec<AgentAction>, ExitError> {
        let held_before = self.agent.journal.held_document.is_some();
        let start_before = self.agent.journal.launch_state;
        let output = self.agent.step(&Rules::ALL, event);
        if let Some(journal) = &output.journal {
            if !held_before && journal.held_document.is_some() {
                // A poll may show the commit before the answer to this agent's ack arrives. The
                // commit proves that the ack was sent.
                crash::at(Failpoint::AckSent);
            }
            journal::write(&self.layout, journal, &self.extras).map_err(state_exit_error)?;
            if !held_before && journal.held_document.is_some() {
                crash::at(Failpoint::Hold);
            }
            if start_before != journal.launch_state {
                match journal.launch_state {
                    LaunchState::Launching => crash::at(Failpoint::Launching),
                    LaunchState::Ran => crash::at(Failpoint::Ran),
                    LaunchState::NotStarted => {}
                }
            }
        }
        for action in &output.actions {
            match action {
                AgentAction::Redeem => crash::at(Failpoint::Redeem),
                AgentAction::SignAck { .. } => crash::at(Failpoint::Ack),
                AgentAction::SignRelease { .. } => crash::at(Failpoint::Release),
                _ => {}
            }
        }
        Ok(output.actions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::machine;

    #[test]
    fn a_change_that_can_not_be_journalled_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let machine = machine::from_texts(None, Some("here"));
        let (key, journal, extras) = journal::create(&layout, machine).unwrap();
        let mut protocol = Protocol::new(layout.clone(), key, journal, extras.clone(), None);
        // A folder in the place of the journal makes every write fail.
        std::fs::remove_file(layout.journal()).unwrap();
        std::fs::create_dir(layout.journal()).unwrap();
        assert!(protocol.change_extras(|extras| extras.address_number = 7).is_err());
        assert_eq!(protocol.extras, extras);
        std::fs::remove_dir(layout.journal()).unwrap();
        protocol.change_extras(|extras| extras.address_number = 7).unwrap();
        let (_, journalled) = journal::read(&layout).unwrap().unwrap();
        assert_eq!((journalled.extras.address_number, protocol.extras.address_number), (7, 7));
    }
}
