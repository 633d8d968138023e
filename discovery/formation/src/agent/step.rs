//! One agent, one event.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::agent::directory::Directory;
use crate::agent::event::{
    Action, Event, From, Objection, Offer, Output, ProbeAnswer, Shown, Target,
};
use crate::agent::journal::{Bound, Journal, Start};
use crate::agent::sign;
use crate::rules::{Rule, Rules};
use crate::service::{Phase, Probe, RefusalCode, Row};
use crate::values::{Document, Epoch, KeyId, Machine, Millis, Record, Session};

/// How far this host's clock may be off the service's (S4).
pub const SKEW_ALLOWED: Millis = Millis(30_000);

/// How long a proposal may wait for releases before the agent says so (S6), if the service gives it
/// up in `left`: half of that, so that the service hears why before it has given it up.
#[must_use]
pub fn patience(left: Millis) -> Millis {
    Millis(left.0 / 2)
}

/// Exit code: something is wrong that a person has to mend.
const EXIT_FAILED: u8 = 1;
/// Exit code: restarting changes nothing.
const EXIT_FOR_GOOD: u8 = 3;

/// One running agent: its journal as it is on disk, and what a restart forgets.
#[derive(Clone, Debug)]
pub struct Agent {
    /// As on disk, once the last [`Output::durable`] is.
    pub journal: Journal,
    /// This run.
    pub session: Session,
    /// The proposal that is being looked at.
    considered: Option<Considered>,
    /// Others' releases, verified: the highest of each.
    releases: BTreeMap<KeyId, Epoch>,
}

#[derive(Clone, Debug)]
struct Considered {
    offer: Box<Offer>,
    /// What the probes found.
    row: Row,
    /// Signed or refused: nothing more is said about it.
    answered: bool,
}

impl Agent {
    /// An agent that has decided to go on at its start; `journal` is on disk with this boot
    /// counter, `nonce` is random and new.
    #[must_use]
    pub fn new(journal: Journal, nonce: u128) -> Agent {
        let session = Session { boot: journal.boot, nonce };
        Agent { journal, session, considered: None, releases: BTreeMap::new() }
    }

    /// Applies one event. `self.journal` is then what `durable` says: if it can't be written, this
    /// value must be thrown away, and with it the process.
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
            Event::Looked(directory) => self.looked(rules, &directory, &mut output),
            Event::MarkerWritten => {
                if self.journal.held.is_some() && self.journal.start == Start::NotYet {
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

    /// Whether it listens for probes on the node's peer address: from before its first redeem
    /// until the launch.
    #[must_use]
    pub fn listens(&self) -> bool {
        self.journal.start == Start::NotYet && !self.journal.tombstone
    }

    /// The answer to a probe by `asker` (the key of its TLS certificate): none, and the connection
    /// is closed, unless it is in the proposal or in a list that this agent signed.
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

    /// The releases that this agent waits for before it signs the proposal that it looks at (S6).
    #[must_use]
    pub fn waits_for(&self, rules: &Rules) -> Option<Objection> {
        let considered = self.considered.as_ref().filter(|considered| !considered.answered)?;
        sign::s6_releases(rules, &self.journal, &considered.offer, &self.releases).err()
    }

    fn persist(&self, output: &mut Output) {
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

    /// The service shows `epoch`: nothing below it will ever be signed or held here. Whoever holds
    /// a document releases nothing.
    fn release_below(&mut self, rules: &Rules, epoch: Epoch, output: &mut Output) {
        let holds = self.journal.held.is_some() && rules.on(Rule::HeldReleasesNothing);
        let below = epoch.saturating_sub(1);
        if holds || below <= self.journal.released || epoch > self.journal.epoch_limit() {
            return;
        }
        self.journal.released = below;
        self.persist(output);
        output.then.push(Action::SignRelease { epoch: below });
    }

    fn offered(&mut self, rules: &Rules, offer: Box<Offer>, output: &mut Output) {
        self.release_below(rules, offer.proposal.epoch, output);
        let epoch = offer.proposal.epoch;
        if let Some(held) = &self.journal.held
            && held.h == offer.h
        {
            output.then.push(Action::ShowDocument { h: held.h });
            return;
        }
        match self.considered.take() {
            // The same list again, shown with newer releases: the probes so far still count.
            Some(known) if known.offer.h == offer.h => {
                self.considered = Some(Considered { offer, ..known });
                if known_answer_stands(&self.considered) {
                    return;
                }
            }
            _ => {
                self.considered = Some(Considered { offer, row: Row::new(), answered: false });
            }
        }
        let Some(considered) = &mut self.considered else { return };
        if let Err(reason) = sign::judge(rules, &self.journal, &considered.offer) {
            considered.answered = true;
            output.then.push(Action::Nack { epoch, reason });
            return;
        }
        if sign::is_signed(&self.journal, &considered.offer) {
            considered.answered = true;
            let h = considered.offer.h;
            output.then.push(Action::SignAck { epoch, h });
            return;
        }
        let targets = targets(&self.journal, &considered.offer);
        if !targets.is_empty() {
            output.then.push(Action::Probe { epoch, targets });
        }
        self.try_to_sign(rules, false, output);
    }

    fn probed(
        &mut self,
        rules: &Rules,
        epoch: Epoch,
        peer: KeyId,
        result: Result<ProbeAnswer, String>,
        output: &mut Output,
    ) {
        let expected = self.incarnation_of(peer);
        let probe = match result {
            Ok(answer) if answer.key == peer && expected == Some(answer.incarnation) => {
                self.note_release(peer, answer.released);
                Probe::Reached
            }
            Ok(answer) => Probe::Failed(format!("another agent answered there: {}", answer.key)),
            Err(why) => Probe::Failed(why),
        };
        let Some(considered) = &mut self.considered else { return };
        let proposal = &considered.offer.proposal;
        if proposal.epoch != epoch || considered.answered {
            return;
        }
        let mut changed = false;
        if proposal.seat_of(peer).is_some() && peer != self.journal.key {
            changed = considered.row.get(&peer) != Some(&probe);
            considered.row.insert(peer, probe);
        }
        self.try_to_sign(rules, changed, output);
    }

    /// The incarnation that `peer` must have: by the proposal, or by an earlier signed list.
    fn incarnation_of(&self, peer: KeyId) -> Option<crate::values::Incarnation> {
        let proposal = self.considered.as_ref().map(|considered| &considered.offer.proposal);
        let proposed = proposal.and_then(|proposal| proposal.record_of(peer));
        proposed.map(|record| record.incarnation).or_else(|| {
            let mut members = self.journal.bound.values().flat_map(|bound| &bound.members);
            members.find(|member| member.key == peer).map(|member| member.incarnation)
        })
    }

    fn note_release(&mut self, key: KeyId, epoch: Epoch) {
        if epoch > 0 {
            let known = self.releases.entry(key).or_insert(epoch);
            *known = epoch.max(*known);
        }
    }

    /// Signs if the matrix row is green and every earlier list is released; if not, shows the row
    /// once every peer has been tried.
    fn try_to_sign(&mut self, rules: &Rules, row_changed: bool, output: &mut Output) {
        let Some(considered) = &mut self.considered else { return };
        if considered.answered {
            return;
        }
        let offer = &considered.offer;
        let (epoch, h) = (offer.proposal.epoch, offer.h);
        let complete = considered.row.len() + 1 >= offer.proposal.records.len();
        let green = complete && considered.row.values().all(|probe| *probe == Probe::Reached);
        let released = sign::s6_releases(rules, &self.journal, offer, &self.releases).is_ok();
        if green && released {
            considered.answered = true;
            self.journal.bound.insert(epoch, Bound::to(&considered.offer.proposal, h));
            self.persist(output);
            output.then.push(Action::SignAck { epoch, h });
        } else if complete && row_changed {
            output.then.push(Action::SendRow { epoch, row: considered.row.clone() });
        }
    }

    fn impatient(&mut self, rules: &Rules, epoch: Epoch, output: &mut Output) {
        let Some(considered) = &mut self.considered else { return };
        if considered.answered || considered.offer.proposal.epoch != epoch {
            return;
        }
        let check = sign::s6_releases(rules, &self.journal, &considered.offer, &self.releases);
        if let Err(reason) = check {
            considered.answered = true;
            output.then.push(Action::Nack { epoch, reason });
        }
    }

    fn document_shown(
        &mut self,
        rules: &Rules,
        document: Arc<Document>,
        machine: &Machine,
        output: &mut Output,
    ) {
        if let Some(held) = &self.journal.held {
            if held.h == document.h {
                if self.journal.start == Start::NotYet {
                    output.then.push(Action::LookAtDirectory);
                }
                return;
            }
            if rules.on(Rule::OneDocument) {
                output.then.push(Action::ShowDocument { h: held.h });
                return;
            }
        }
        match self.may_hold(rules, &document, machine) {
            Ok(()) => {
                self.journal.held = Some(document);
                self.considered = None;
                self.persist(output);
                output.then.push(Action::LookAtDirectory);
            }
            Err(why) => output.then.push(Action::ReplacementWanted { why }),
        }
    }

    /// Whether this agent may be a member of `document`, or why it never can.
    fn may_hold(
        &self,
        rules: &Rules,
        document: &Document,
        machine: &Machine,
    ) -> Result<(), String> {
        let journal = &self.journal;
        let epoch = document.proposal.epoch;
        let listed = document.proposal.record_of(journal.key).map(|record| record.hash);
        let mine = journal.record.as_ref().map(|record| record.hash);
        if listed.is_none() || listed != mine {
            return Err(format!("the document of epoch {epoch} has not my record in it"));
        }
        if rules.on(Rule::HoldAboveReleased) && epoch <= journal.released {
            return Err(format!(
                "I have promised the others never to be in a list of an epoch up to {}, and the \
                 document is of epoch {epoch}",
                journal.released
            ));
        }
        if rules.on(Rule::HoldWhatWasSigned)
            && journal.bound.get(&epoch).is_none_or(|bound| bound.h != document.h)
        {
            return Err(format!(
                "the document of epoch {epoch} has my signature, and my journal knows nothing of it: \
                 this directory is an old copy"
            ));
        }
        if rules.on(Rule::SameMachine) && journal.machine.differs_from(machine) {
            return Err("this is not the machine that my key was made on".to_owned());
        }
        Ok(())
    }

    fn looked(&mut self, rules: &Rules, directory: &Directory, output: &mut Output) {
        if self.journal.held.is_none() || self.journal.start != Start::NotYet {
            return;
        }
        let incarnation = self.journal.incarnation;
        match directory {
            Directory::Blank if rules.on(Rule::LaunchingBeforeExec) => {
                output.then.push(Action::WriteMarker { incarnation });
            }
            Directory::Blank => output.then.push(Action::Launch(From::List)),
            Directory::Marked(whose) if *whose == incarnation => self.launch(rules, output),
            other => {
                let reason = format!("the node's directory is not blank: {other}");
                output.then.push(Action::Stop { exit: EXIT_FAILED, reason });
            }
        }
    }

    fn launch(&mut self, rules: &Rules, output: &mut Output) {
        let after_log = rules.on(Rule::RanAfterLog);
        self.journal.start = if after_log { Start::Launching } else { Start::Ran };
        self.persist(output);
        output.then.push(Action::Launch(From::List));
    }

    fn refused(&mut self, code: Option<RefusalCode>, retryable: bool, output: &mut Output) {
        if self.journal.start != Start::NotYet {
            return;
        }
        if let Some(held) = &self.journal.held {
            // It is a member whatever the service knows: the document says so.
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
            // A restart would take the key over from the other copy, and so on for ever.
            Some(RefusalCode::KeyElsewhere) => {
                stop(EXIT_FOR_GOOD, "another session holds this agent's key: this host is a copy")
            }
            // Another bundle, or another address: a person has to bring it.
            Some(
                RefusalCode::GrantUnknown
                | RefusalCode::GrantExpired
                | RefusalCode::GrantRevoked
                | RefusalCode::GrantBinding
                | RefusalCode::GrantExhausted
                | RefusalCode::RecordRefused
                | RefusalCode::StatementRefused,
            ) => stop(EXIT_FOR_GOOD, "the service has refused this host's token or record"),
            // What these are about is looked at anew with the next poll.
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

fn known_answer_stands(considered: &Option<Considered>) -> bool {
    considered.as_ref().is_some_and(|considered| considered.answered)
}

/// Whom to probe: every other member of the list, and members of earlier signed lists that are
/// not in it, for their releases.
fn targets(journal: &Journal, offer: &Offer) -> Vec<Target> {
    let mut targets: BTreeMap<KeyId, Target> = BTreeMap::new();
    for member in journal.bound.values().flat_map(|bound| &bound.members) {
        let target = Target {
            key: member.key,
            incarnation: member.incarnation,
            peer_urls: member.peer_urls.clone(),
            in_proposal: false,
        };
        targets.insert(member.key, target);
    }
    for record in &offer.proposal.records {
        let target = Target {
            key: record.key,
            incarnation: record.incarnation,
            peer_urls: record.peer_urls.clone(),
            in_proposal: true,
        };
        targets.insert(record.key, target);
    }
    targets.remove(&journal.key);
    targets.into_values().collect()
}
