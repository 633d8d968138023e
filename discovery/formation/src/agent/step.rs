//! Applies one event to one agent.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::agent::event::{Action, Event, Objection, Output, ProbeAnswer, Shown};
use crate::agent::journal::{Journal, Start};
use crate::agent::offers::Considered;
use crate::agent::sign;
use crate::rules::{Rule, Rules};
use crate::service::{Phase, RefusalCode};
use crate::values::{Epoch, KeyId, Millis, Record, Session};

/// Largest difference between this host's clock and the service's that S4 allows.
pub const SKEW_ALLOWED: Millis = Millis(30_000);

/// Returns how long a proposal may wait for releases (S6) before the agent refuses it. The service
/// gives the proposal up in `left`; half of that lets it hear the reason before.
#[must_use]
pub fn patience(left: Millis) -> Millis {
    Millis(left.0 / 2)
}

/// Exit code for a fault that a person has to mend.
pub(super) const EXIT_FAILED: u8 = 1;
/// Exit code for a state that no restart changes.
const EXIT_FOR_GOOD: u8 = 3;

/// One running agent: its journal as it is on disk, and the state that a restart forgets.
#[derive(Clone, Debug)]
pub struct Agent {
    /// Journal, equal to the one on disk once the last [`Output::durable`] is written.
    pub journal: Journal,
    /// Session of this run of the agent.
    pub session: Session,
    /// Proposal that the agent is deciding on.
    pub(super) considered: Option<Considered>,
    /// Verified releases of other agents: the highest epoch of each.
    pub(super) releases: BTreeMap<KeyId, Epoch>,
}

impl Agent {
    /// Returns an agent that goes on after its start. `journal` is on disk with this boot counter;
    /// `nonce` is random and new.
    #[must_use]
    pub fn new(journal: Journal, nonce: u128) -> Agent {
        let session = Session { boot: journal.boot, nonce };
        Agent { journal, session, considered: None, releases: BTreeMap::new() }
    }

    /// Applies one event. `self.journal` then equals [`Output::durable`]. If that can't be written,
    /// the caller must throw this value away and end the process.
    pub fn step(&mut self, rules: &Rules, event: Event) -> Output {
        let mut output = Output::default();
        match event {
            Event::RecordReady(record) => self.record_ready(record, &mut output),
            Event::Shown(shown) => self.shown(rules, shown, &mut output),
            Event::Offered(offer) => self.offered(rules, offer, &mut output),
            Event::Probed { epoch, peer, result } => {
                self.probed(rules, epoch, peer, result, &mut output);
            }
            Event::ReleaseSeen { key, epoch } => {
                self.note_release(key, epoch);
                self.try_to_sign(rules, false, &mut output);
            }
            Event::Impatient { epoch } => self.impatient(rules, epoch, &mut output),
            Event::DocumentShown { document, machine } => {
                self.document_shown(rules, document, &machine, &mut output);
            }
            Event::Admitted => self.admitted(&mut output),
            Event::Looked(directory) => self.looked(rules, &directory, &mut output),
            Event::MarkerWritten => {
                if self.journal.may_launch() && self.journal.start == Start::NotYet {
                    self.launch(rules, &mut output);
                }
            }
            Event::LogSeen => {
                if self.journal.start != Start::Ran {
                    self.journal.start = Start::Ran;
                    self.persist(&mut output);
                }
                output.then.push(Action::Report);
            }
            Event::Refused { code, retryable } => self.refused(code, retryable, &mut output),
            Event::TombstoneSeen => {
                self.journal.tombstone = true;
                self.persist(&mut output);
                let reason = "this member was removed from its cluster".to_owned();
                output.then.push(Action::Stop { exit: EXIT_FOR_GOOD, reason });
            }
        }
        let broken = self.journal.broken(rules);
        assert_eq!(broken, None, "an agent must not go on, nor write such a journal");
        output
    }

    /// Whether the agent listens for probes on the node's peer address: from before its first
    /// redeem until the launch.
    #[must_use]
    pub fn listens(&self) -> bool {
        self.journal.start == Start::NotYet && !self.journal.tombstone
    }

    /// Answers a probe by `asker`, the key of its TLS certificate. `None` closes the connection:
    /// `asker` is neither in the proposal nor in a list that this agent signed, or the agent no
    /// longer listens.
    #[must_use]
    pub fn answer_probe(&self, asker: KeyId) -> Option<ProbeAnswer> {
        let proposed = self
            .considered
            .as_ref()
            .is_some_and(|considered| considered.offer.proposal.seat_of(asker).is_some());
        let signed = || {
            let mut members = self.journal.bound.values().flat_map(|bound| &bound.members);
            members.any(|member| member.key == asker)
        };
        (self.listens() && (proposed || signed())).then_some(ProbeAnswer {
            key: self.journal.key,
            incarnation: self.journal.incarnation,
            released: self.journal.released,
        })
    }

    /// Returns the objection (S6) with the releases that the agent waits for before it signs the
    /// present proposal.
    #[must_use]
    pub fn waits_for(&self, rules: &Rules) -> Option<Objection> {
        let considered = self.considered.as_ref().filter(|considered| !considered.answered)?;
        sign::s6_releases(rules, &self.journal, &considered.offer, &self.releases).err()
    }

    pub(super) fn persist(&self, output: &mut Output) {
        output.durable = Some(Box::new(self.journal.clone()));
    }

    fn record_ready(&mut self, record: Arc<Record>, output: &mut Output) {
        let known = self.journal.record.as_ref().map(|known| known.hash);
        if known.is_none() || (known != Some(record.hash) && self.journal.may_change_record()) {
            self.journal.record = Some(record);
            self.persist(output);
        }
        output.then.push(Action::Redeem);
    }

    fn shown(&mut self, rules: &Rules, shown: Shown, output: &mut Output) {
        if matches!(shown.phase, Phase::Open | Phase::Preparing) {
            self.release_below(rules, shown.epoch, output);
            let over = |considered: &mut Considered| {
                considered.offer.proposal.epoch < shown.epoch || shown.phase == Phase::Open
            };
            self.considered.take_if(over);
        }
        if let (Some(held), true) = (&self.journal.held, shown.show_document) {
            output.then.push(Action::ShowDocument { h: held.h });
        }
    }

    /// Promises never to sign or hold a list below `epoch`, which the service shows. An agent that
    /// holds a document releases nothing.
    pub(super) fn release_below(&mut self, rules: &Rules, epoch: Epoch, output: &mut Output) {
        let holds = self.journal.held.is_some() && rules.on(Rule::HeldReleasesNothing);
        let below = epoch.saturating_sub(1);
        if holds || below <= self.journal.released || epoch > self.journal.epoch_limit() {
            return;
        }
        self.journal.released = below;
        self.persist(output);
        output.then.push(Action::SignRelease { epoch: below });
    }

    fn refused(&mut self, code: Option<RefusalCode>, retryable: bool, output: &mut Output) {
        if self.journal.start != Start::NotYet {
            return;
        }
        if let Some(held) = &self.journal.held {
            // The document makes this agent a member, whatever the service knows.
            if let Some(
                RefusalCode::BootClosed | RefusalCode::Abandoned | RefusalCode::UnknownKey,
            ) = code
            {
                output.then.push(Action::ShowDocument { h: held.h });
            }
            return;
        }
        let stop = |exit, reason: &str| Action::Stop { exit, reason: reason.to_owned() };
        output.then.push(match code {
            Some(RefusalCode::UnknownKey) => Action::Redeem,
            Some(
                RefusalCode::BootClosed
                | RefusalCode::Expired
                | RefusalCode::Abandoned
                | RefusalCode::Retired,
            ) => stop(EXIT_FOR_GOOD, "the cluster has no place for this host"),
            // Never restart: it would take the key over from the other copy, which would do the
            // same.
            Some(RefusalCode::KeyElsewhere) => {
                stop(EXIT_FOR_GOOD, "another session holds this agent's key: this host is a copy")
            }
            // Only a person can mend these, with another bundle or another address.
            Some(
                RefusalCode::GrantUnknown
                | RefusalCode::GrantExpired
                | RefusalCode::GrantRevoked
                | RefusalCode::GrantBinding
                | RefusalCode::GrantExhausted
                | RefusalCode::RecordRefused
                | RefusalCode::StatementRefused,
            ) => stop(EXIT_FOR_GOOD, "the service has refused this host's token or record"),
            // The next poll shows the state that these refusals are about.
            Some(
                RefusalCode::StaleEpoch
                | RefusalCode::Split
                | RefusalCode::DatabaseChanged
                | RefusalCode::Conflict
                | RefusalCode::VoteRefused
                | RefusalCode::WrongState
                | RefusalCode::Committed
                | RefusalCode::DocumentRefused,
            )
            | None => {
                if retryable {
                    return;
                }
                stop(EXIT_FAILED, "the service has refused this host's request")
            }
        });
    }
}
