//! One event: the table of states and events, row by row.

use std::sync::Arc;

use crate::fitness;
use crate::rules::{Rule, Rules};
use crate::service::cluster::{
    Agent, Cluster, EndCause, Ended, LastError, Phase, Place, Probe, Row,
};
use crate::service::event::{Event, Poll, Redeem};
use crate::service::outcome::{Alarm, Answer, Change, Outcome, Reopen, Standing};
use crate::service::refusal::Refusal;
use crate::service::settings::{EPOCH_DISTANCE, EPOCH_MAX, Settings};
use crate::values::{
    Epoch, Hash, KeyId, Micros, Proposal, Record, Release, Session, Statement, quorum,
};

/// How many bytes of a probe's or an agent's own words are kept: the 300 characters that the API
/// takes, and the word for the reason before them.
const SENTENCE_LIMIT: usize = 400;

/// What a step needs beside cluster, time and event.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// [`Rules::ALL`].
    pub rules: &'a Rules,
    /// Times and limits.
    pub settings: &'a Settings,
    /// The clock has gone evenly for [`Settings::steady_after`]: only then does a deadline that has
    /// passed end a cluster. A jump forward may be taken back.
    pub steady: bool,
    /// The hash of a proposal: SHA-256 as the protocol writes it. Called at most twice in a step.
    pub hash: &'a dyn Fn(&Proposal) -> Hash,
}

/// Applies one event to `cluster`, whose row is locked, at the database's time `now`.
///
/// Time is judged first: leases that have lapsed are gone before the event is looked at, so that
/// no event is ever judged by a state that only a late clock still shows. Whatever seats the event
/// left free or filled is settled last.
pub fn step(cluster: &mut Cluster, context: &Context<'_>, now: Micros, event: Event) -> Outcome {
    let mut turn = Turn {
        cluster,
        context: *context,
        now,
        changed: false,
        changes: Vec::new(),
        committed: None,
        alarms: Vec::new(),
    };
    let time_first = turn.context.rules.on(Rule::LapseFirst);
    if time_first {
        turn.pass_time();
    }
    let result = turn.apply(event);
    if !time_first {
        turn.pass_time();
    }
    turn.settle();
    turn.finish(result)
}

/// How `cluster` looks to `key`: the answer to a read-only poll.
#[must_use]
pub fn view(cluster: &Cluster, key: Option<KeyId>) -> Answer {
    let agent = key.and_then(|key| cluster.agents.get(&key));
    let listed = key.is_some_and(|key| cluster.lists(key));
    let decided = matches!(cluster.phase, Phase::Committed | Phase::Formed);
    let standing = agent.map(|agent| match agent.place {
        Place::Seat(seat) => Standing::Seat(seat),
        Place::Standby(order) => {
            Standing::Standby { ahead: cluster.standbys().range(..order).count() }
        }
        Place::Absent => Standing::Out,
    });
    let h = cluster.frozen.as_ref().filter(|_| listed).map(|frozen| frozen.h);
    Answer {
        phase: cluster.phase,
        epoch: cluster.epoch,
        rev: cluster.rev,
        standing,
        proposal: h.filter(|_| cluster.phase == Phase::Preparing),
        document: h.filter(|_| decided),
        show_document: false,
    }
}

/// One step under way.
pub(super) struct Turn<'a> {
    pub(super) cluster: &'a mut Cluster,
    pub(super) context: Context<'a>,
    pub(super) now: Micros,
    pub(super) changed: bool,
    pub(super) changes: Vec<Change>,
    pub(super) committed: Option<Hash>,
    pub(super) alarms: Vec<Alarm>,
}

/// Who asked, and which document it holds.
pub(super) struct Asker {
    key: Option<KeyId>,
    holds: Option<Hash>,
}

impl Asker {
    pub(super) const NOBODY: Asker = Asker { key: None, holds: None };

    fn agent(key: KeyId) -> Asker {
        Asker { key: Some(key), holds: None }
    }
}

pub(super) type Applied = Result<Asker, Refusal>;

impl Turn<'_> {
    pub(super) fn record_change(&mut self, change: Change) {
        self.changed = true;
        self.changes.push(change);
    }

    fn finish(mut self, result: Applied) -> Outcome {
        if !self.changes.is_empty() {
            self.cluster.rev += 1;
        }
        let answer = result.map(|asker| {
            let mut answer = view(self.cluster, asker.key);
            answer.show_document = asker.holds.is_some() && asker.holds != answer.document;
            answer
        });
        Outcome {
            answer,
            changed: self.changed,
            changes: std::mem::take(&mut self.changes),
            committed: self.committed,
            alarms: std::mem::take(&mut self.alarms),
        }
    }

    fn apply(&mut self, event: Event) -> Applied {
        if let (Some(split), false) = (&self.cluster.split, allowed_while_split(&event)) {
            let decided = self.cluster.frozen.as_ref().map_or(split.other, |frozen| frozen.h);
            return Err(Refusal::Split { decided, other: split.other });
        }
        match event {
            Event::Tick => Ok(Asker::NOBODY),
            Event::Redeem(redeem) => self.redeem(&redeem),
            Event::Poll(poll) => self.poll(&poll),
            Event::Speaks { key, session } => self.speaks(key, session),
            Event::Ack { key, epoch, h, jws } => self.ack(key, epoch, h, jws),
            Event::Nack { key, epoch, reason } => self.nack(key, epoch, &reason),
            Event::Probes { key, epoch, row } => self.probes(key, epoch, row),
            Event::Release { key, release } => self.release(key, release),
            Event::Report { key, raft_cluster } => self.report(key, raft_cluster),
            Event::Trouble { key, text } => self.trouble(key, text),
            Event::Restate(statement) => self.restate(statement),
            Event::GrantRevoked(grant) => {
                if self.cluster.revoked.insert(grant) {
                    self.record_change(Change::GrantRevoked);
                }
                Ok(Asker::NOBODY)
            }
            Event::Adopt(document) => self.adopt(document),
            Event::Abandon { by } => self.abandon(by),
            Event::Retire { by } => self.retire(by),
            Event::DatabaseChanged => self.database_changed(),
            Event::DatabaseSettled => self.database_settled(),
            Event::DatabaseAccepted { by } => {
                if self.is_forming() {
                    self.end(Phase::Abandoned, EndCause::DatabaseAccepted, by);
                }
                self.database_settled()
            }
        }
    }

    fn is_forming(&self) -> bool {
        matches!(self.cluster.phase, Phase::Open | Phase::Preparing)
    }

    pub(super) fn refuse_if_ended(&self) -> Result<(), Refusal> {
        if !self.cluster.phase.has_ended() {
            return Ok(());
        }
        let ended = self.cluster.ended.as_ref();
        Err(Refusal::Ended {
            phase: self.cluster.phase,
            cause: ended.map(|ended| ended.cause),
            by: ended.map(|ended| ended.by.clone()).unwrap_or_default(),
        })
    }

    fn redeem(&mut self, redeem: &Redeem) -> Applied {
        self.refuse_if_ended()?;
        let record = &redeem.record;
        if record.cluster != self.cluster.id || record.grant != redeem.grant.id {
            return Err(Refusal::ForeignRecord);
        }
        let key = record.key;
        if self.is_forming() {
            self.check_epoch(redeem.highest_epoch)?;
        }
        if self.cluster.agents.contains_key(&key) {
            self.redeem_again(redeem)?;
        } else {
            if !self.is_forming() {
                return Err(Refusal::BootClosed { key });
            }
            self.admit(redeem)?;
        }
        Ok(Asker { key: Some(key), holds: redeem.holds })
    }

    /// A new key: everything about its token is judged now, and never again.
    fn admit(&mut self, redeem: &Redeem) -> Result<(), Refusal> {
        let grant = &redeem.grant;
        if grant.revoked || self.cluster.revoked.contains(&grant.id) {
            return Err(Refusal::GrantRevoked);
        }
        if grant.expires <= self.now {
            return Err(Refusal::GrantExpired { expired: grant.expires });
        }
        let of_grant = |agent: &&Agent| agent.record.grant == grant.id;
        let admitted = self.cluster.agents.values().filter(of_grant).count();
        let limit =
            usize::from(self.cluster.statement.size) * self.context.settings.keys_per_seat as usize;
        if admitted >= limit {
            return Err(Refusal::TooManyKeys { admitted, limit });
        }
        if !self.context.rules.on(Rule::UseIsASeat) && admitted >= grant.uses as usize {
            return Err(Refusal::GrantUsed);
        }
        self.check_record(&redeem.record)?;
        let key = redeem.record.key;
        let agent = Agent {
            record: Arc::clone(&redeem.record),
            uses: grant.uses,
            place: Place::Absent,
            lease_until: self.now,
            session: Some(redeem.session),
            highest_epoch: 0,
            counts: 0,
            held_until: Micros(0),
            release: None,
        };
        self.cluster.agents.insert(key, agent);
        self.record_change(Change::Joined { key });
        self.renew(key, redeem.highest_epoch);
        Ok(())
    }

    fn check_record(&self, record: &Record) -> Result<(), Refusal> {
        let permissions = self.cluster.statement.permissions;
        fitness::fit(record, permissions).map_err(Refusal::Unfit)?;
        for (&other, agent) in &self.cluster.agents {
            if other != record.key && agent.place != Place::Absent {
                fitness::together(record, &agent.record, permissions)
                    .map_err(|clash| Refusal::Duplicate { other, clash })?;
            }
        }
        Ok(())
    }

    fn redeem_again(&mut self, redeem: &Redeem) -> Result<(), Refusal> {
        let key = redeem.record.key;
        let known = &self.cluster.agents[&key];
        let same_record = known.record.hash == redeem.record.hash;
        let newer = known.session.is_none_or(|session| redeem.session.boot > session.boot);
        if !same_record && self.is_forming() && newer {
            self.check_record(&redeem.record)?;
        }
        self.take_over(key, redeem.session)?;
        if !self.is_forming() {
            if !self.cluster.lists(key) {
                return Err(Refusal::BootClosed { key });
            }
            return if same_record { Ok(()) } else { Err(Refusal::RecordChanged { key }) };
        }
        if !same_record {
            if !newer {
                return Err(Refusal::RecordChanged { key });
            }
            self.replace_record(key, redeem);
        }
        self.renew(key, redeem.highest_epoch);
        Ok(())
    }

    fn replace_record(&mut self, key: KeyId, redeem: &Redeem) {
        let agent = self.agent_mut(key);
        agent.record = Arc::clone(&redeem.record);
        agent.uses = redeem.grant.uses;
        self.record_change(Change::RecordReplaced { key });
        if self.cluster.phase == Phase::Preparing && self.cluster.lists(key) {
            self.reopen(Reopen::RecordReplaced(key));
        }
    }

    fn poll(&mut self, poll: &Poll) -> Applied {
        self.refuse_if_ended()?;
        let key = poll.key;
        if !self.cluster.agents.contains_key(&key) {
            return Err(Refusal::UnknownKey { key });
        }
        if self.is_forming() {
            self.check_epoch(poll.highest_epoch)?;
        }
        self.take_over(key, poll.session)?;
        if self.is_forming() {
            self.renew(key, poll.highest_epoch);
        } else if !self.cluster.lists(key) {
            return Err(Refusal::BootClosed { key });
        }
        Ok(Asker { key: Some(key), holds: poll.holds })
    }

    fn speaks(&mut self, key: KeyId, session: Session) -> Applied {
        self.refuse_if_ended()?;
        if !self.cluster.agents.contains_key(&key) {
            return Err(Refusal::UnknownKey { key });
        }
        self.take_over(key, session)?;
        Ok(Asker::agent(key))
    }

    /// Whether an agent can have come to `epoch` by what services proposed to it.
    fn check_epoch(&self, epoch: Epoch) -> Result<(), Refusal> {
        let seen = self.cluster.epoch.max(self.cluster.floor);
        let limit = seen.saturating_add(EPOCH_DISTANCE).min(EPOCH_MAX);
        if epoch > limit {
            return Err(Refusal::EpochTooFar { sent: epoch, limit });
        }
        Ok(())
    }

    /// Lets `session` hold `key`, or says who does.
    fn take_over(&mut self, key: KeyId, session: Session) -> Result<(), Refusal> {
        let one_session = self.context.rules.on(Rule::OneSession);
        let agent = self.agent_mut(key);
        match agent.session {
            Some(last) if last == session => Ok(()),
            Some(last) if session.boot <= last.boot && one_session => {
                self.alarms.push(Alarm::KeyElsewhere { key });
                self.note_error(key, "two holders of this agent's key have spoken".to_owned());
                Err(Refusal::KeyElsewhere { key, last: last.boot, sent: session.boot })
            }
            _ => {
                agent.session = Some(session);
                self.changed = true;
                Ok(())
            }
        }
    }

    /// A word from an agent of a cluster that is forming: its lease, its place, the floor.
    fn renew(&mut self, key: KeyId, highest_epoch: Epoch) {
        let until = self.now.after(self.context.settings.lease);
        let place = self.cluster.next_place;
        let agent = self.agent_mut(key);
        agent.lease_until = until;
        agent.highest_epoch = agent.highest_epoch.max(highest_epoch);
        let returned = agent.place == Place::Absent;
        if returned {
            agent.place = Place::Standby(place);
        }
        self.changed = true;
        self.cluster.floor = self.cluster.floor.max(highest_epoch);
        if returned {
            self.cluster.next_place += 1;
            self.record_change(Change::Queued { key });
        }
    }

    fn ack(&mut self, key: KeyId, epoch: Epoch, h: Hash, jws: Arc<str>) -> Applied {
        self.refuse_if_ended()?;
        if self.is_forming() {
            let size = usize::from(self.cluster.statement.size);
            let frozen = self.frozen_at(key, epoch)?;
            if frozen.h != h {
                return Err(Refusal::OtherProposal { sent: h, h: frozen.h, epoch });
            }
            if frozen.acks.insert(key, jws).is_none() {
                let complete = frozen.acks.len() == size;
                self.record_change(Change::Acked { key, epoch });
                if complete {
                    self.cluster.phase = Phase::Committed;
                    self.committed = Some(h);
                    self.record_change(Change::Committed { epoch, h });
                }
            }
            return Ok(Asker::agent(key));
        }
        match &self.cluster.frozen {
            Some(frozen) if self.cluster.lists(key) => {
                if frozen.h != h {
                    return Err(Refusal::OtherProposal { sent: h, h: frozen.h, epoch });
                }
                if !self.context.rules.on(Rule::AckAgain) {
                    return Err(self.stale(epoch));
                }
                Ok(Asker::agent(key))
            }
            _ => Err(Refusal::BootClosed { key }),
        }
    }

    fn stale(&self, sent: Epoch) -> Refusal {
        Refusal::StaleEpoch { sent, epoch: self.cluster.epoch, phase: self.cluster.phase }
    }

    /// The present proposal, if it has this epoch and `key` has a seat in it.
    fn frozen_at(
        &mut self,
        key: KeyId,
        epoch: Epoch,
    ) -> Result<&mut super::cluster::Frozen, Refusal> {
        let stale = self.stale(epoch);
        if self.cluster.phase != Phase::Preparing || self.cluster.epoch != epoch {
            return Err(stale);
        }
        match &mut self.cluster.frozen {
            Some(frozen) if frozen.proposal.seat_of(key).is_some() => Ok(frozen),
            Some(_) => Err(Refusal::NotSeated { key, epoch }),
            None => Err(stale),
        }
    }

    fn nack(&mut self, key: KeyId, epoch: Epoch, reason: &str) -> Applied {
        self.refuse_if_ended()?;
        self.frozen_at(key, epoch)?;
        let reason = shortened(reason);
        self.note_error(key, reason.clone());
        self.reopen(Reopen::Refused { key, reason });
        self.count(key);
        Ok(Asker::agent(key))
    }

    fn probes(&mut self, key: KeyId, epoch: Epoch, mut row: Row) -> Applied {
        self.refuse_if_ended()?;
        let frozen = self.frozen_at(key, epoch)?;
        row.retain(|&peer, _| peer != key && frozen.proposal.seat_of(peer).is_some());
        for probe in row.values_mut() {
            if let Probe::Failed(why) = probe {
                *why = shortened(why);
            }
        }
        if frozen.probes.get(&key) != Some(&row) {
            frozen.probes.insert(key, row);
            self.record_change(Change::Probed { key, epoch });
        }
        Ok(Asker::agent(key))
    }

    fn release(&mut self, key: KeyId, release: Release) -> Applied {
        self.refuse_if_ended()?;
        if !self.cluster.agents.contains_key(&key) {
            return Err(Refusal::UnknownKey { key });
        }
        let epoch = release.epoch;
        self.check_epoch(epoch)?;
        let agent = self.agent_mut(key);
        if agent.release.as_ref().is_none_or(|known| known.epoch < epoch) {
            agent.release = Some(release);
            agent.highest_epoch = agent.highest_epoch.max(epoch);
            self.cluster.floor = self.cluster.floor.max(epoch);
            self.record_change(Change::Released { key, epoch });
        }
        Ok(Asker::agent(key))
    }

    /// `key` is a member of the list that was decided.
    fn check_member(&self, key: KeyId) -> Result<(), Refusal> {
        self.refuse_if_ended()?;
        if self.is_forming() {
            return Err(Refusal::NotCommitted { phase: self.cluster.phase });
        }
        if self.cluster.lists(key) { Ok(()) } else { Err(Refusal::BootClosed { key }) }
    }

    fn trouble(&mut self, key: KeyId, text: String) -> Applied {
        self.check_member(key)?;
        self.note_error(key, text);
        Ok(Asker::agent(key))
    }

    fn report(&mut self, key: KeyId, raft_cluster: u64) -> Applied {
        self.check_member(key)?;
        if self.cluster.reports.insert(key, raft_cluster) != Some(raft_cluster) {
            self.record_change(Change::Reported { key, raft_cluster });
        }
        let agreeing = self.cluster.reports.values().filter(|&&id| id == raft_cluster).count();
        let size = usize::from(self.cluster.statement.size);
        if self.cluster.phase == Phase::Committed && agreeing >= quorum(size) {
            self.cluster.phase = Phase::Formed;
            self.record_change(Change::Formed { raft_cluster });
        }
        Ok(Asker::agent(key))
    }

    fn restate(&mut self, statement: Statement) -> Applied {
        self.refuse_if_ended()?;
        let newest = &self.cluster.statement;
        if statement.hash == newest.hash {
            return Ok(Asker::NOBODY);
        }
        if statement.cluster != self.cluster.id || statement.size != newest.size {
            return Err(Refusal::StatementFixed);
        }
        if statement.sequence != newest.sequence + 1 {
            return Err(Refusal::StatementOutOfOrder {
                sent: statement.sequence,
                newest: newest.sequence,
            });
        }
        self.record_change(Change::Restated { sequence: statement.sequence });
        self.cluster.statement = statement;
        if self.cluster.phase == Phase::Preparing {
            self.reopen(Reopen::Restated);
        }
        Ok(Asker::NOBODY)
    }

    fn abandon(&mut self, by: String) -> Applied {
        let committed = matches!(self.cluster.phase, Phase::Committed | Phase::Formed);
        if committed && self.context.rules.on(Rule::AbandonBeforeCommit) {
            return Err(Refusal::AlreadyCommitted { phase: self.cluster.phase });
        }
        // One that `db accept` or a ledger has closed may come back with its document: whoever asks
        // must not be told that it is given up.
        let cause = self.cluster.ended.as_ref().map(|ended| ended.cause);
        if cause != Some(EndCause::Abandon) {
            self.refuse_if_ended()?;
            // A ledger may still show that it was committed, and its nodes run.
            if self.cluster.unsettled && self.context.rules.on(Rule::EndWhenSettled) {
                return Err(Refusal::Unsettled);
            }
            self.end(Phase::Abandoned, EndCause::Abandon, by);
        }
        Ok(Asker::NOBODY)
    }

    fn retire(&mut self, by: String) -> Applied {
        match self.cluster.phase {
            Phase::Retired => Ok(Asker::NOBODY),
            phase @ (Phase::Open | Phase::Preparing) => Err(Refusal::NothingToRetire { phase }),
            phase @ (Phase::Committed | Phase::Formed) => {
                if !self.context.rules.on(Rule::RetireIsAnExit) {
                    return Err(Refusal::AlreadyCommitted { phase });
                }
                self.end(Phase::Retired, EndCause::Retire, by);
                Ok(Asker::NOBODY)
            }
            Phase::Expired | Phase::Abandoned => {
                self.refuse_if_ended()?;
                Ok(Asker::NOBODY)
            }
        }
    }

    fn database_changed(&mut self) -> Applied {
        if !self.cluster.unsettled {
            self.cluster.unsettled = true;
            self.record_change(Change::Unsettled);
        }
        if self.cluster.phase == Phase::Preparing {
            self.reopen(Reopen::DatabaseChanged);
        }
        Ok(Asker::NOBODY)
    }

    fn database_settled(&mut self) -> Applied {
        if self.cluster.unsettled {
            self.cluster.unsettled = false;
            self.record_change(Change::Settled);
        }
        Ok(Asker::NOBODY)
    }

    pub(super) fn end(&mut self, phase: Phase, cause: EndCause, by: String) {
        self.cluster.phase = phase;
        self.cluster.ended = Some(Ended { cause, at: self.now, by });
        // A retired cluster keeps its list; an uncommitted proposal is nothing any more.
        if phase != Phase::Retired {
            self.cluster.frozen = None;
        }
        self.record_change(Change::Ended { phase });
    }

    pub(super) fn reopen(&mut self, why: Reopen) {
        self.cluster.phase = Phase::Open;
        self.cluster.epoch = self.cluster.epoch.saturating_add(1);
        self.cluster.frozen = None;
        self.record_change(Change::Reopened { epoch: self.cluster.epoch, why });
    }

    pub(super) fn agent_mut(&mut self, key: KeyId) -> &mut Agent {
        self.cluster.agents.get_mut(&key).expect("the caller has looked the key up")
    }

    pub(super) fn note_error(&mut self, key: KeyId, text: String) {
        let now = self.now;
        let error = LastError { at: now, key: Some(key), text };
        if self.cluster.last_error.as_ref() != Some(&error) {
            self.cluster.last_error = Some(error);
            self.changed = true;
        }
    }
}

fn allowed_while_split(event: &Event) -> bool {
    matches!(
        event,
        Event::Tick
            | Event::Retire { .. }
            | Event::DatabaseChanged
            | Event::DatabaseSettled
            | Event::DatabaseAccepted { .. }
    )
}

/// At most [`SENTENCE_LIMIT`] bytes of what somebody else wrote.
fn shortened(text: &str) -> String {
    text.chars()
        .scan(0, |length, c| {
            *length += c.len_utf8();
            (*length <= SENTENCE_LIMIT).then_some(c)
        })
        .collect()
}
