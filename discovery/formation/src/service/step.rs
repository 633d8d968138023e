//! Applies one event to a cluster: the table of phases and events, row by row.

use crate::rules::{Rule, Rules};
use crate::service::cluster::{Applicant, Cluster, EndCause, LastError, Phase, Seating};
use crate::service::event::Event;
use crate::service::outcome::{Alarm, Answer, Change, Outcome, Reopen, Standing};
use crate::service::refusal::Refusal;
use crate::service::settings::Settings;
use crate::values::{Hash, KeyId, Micros, Proposal, Statement};

/// Inputs of a step besides the cluster, the time and the event.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Rules to apply: [`Rules::ALL`] in the programs.
    pub rules: &'a Rules,
    pub settings: &'a Settings,
    /// Whether the clock has run evenly for [`Settings::steady_after`]. Only then does a deadline
    /// that has passed end a cluster, since a jump forward may be taken back.
    pub steady: bool,
    /// Computes the hash of a proposal: SHA-256 as the protocol writes it. Called at most twice in
    /// a step.
    pub hash: &'a dyn Fn(&Proposal) -> Hash,
}

/// Applies one event to `cluster`, whose row is locked, at the database's time `now`.
///
/// Time is judged first: lapsed leases are gone before the event is examined. So no event is ever
/// judged by a state that has already expired. Seats that the event left free or filled are settled
/// last.
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

/// Returns the cluster as `key` sees it: the answer to a read-only poll.
#[must_use]
pub fn view(cluster: &Cluster, key: Option<KeyId>) -> Answer {
    let agent = key.and_then(|key| cluster.agents.get(&key));
    let listed = key.is_some_and(|key| cluster.lists(key));
    let decided = matches!(cluster.phase, Phase::Committed | Phase::Formed);
    let standing = agent.map(|agent| match agent.seating {
        Seating::Seat(seat) => Standing::Seat(seat),
        Seating::Standby(order) => {
            Standing::Standby { ahead: cluster.standbys().range(..order).count() }
        }
        Seating::Absent => Standing::Out,
    });
    let h = cluster.frozen.as_ref().filter(|_| listed).map(|frozen| frozen.h);
    Answer {
        phase: cluster.phase,
        epoch: cluster.epoch,
        rev: cluster.rev,
        standing,
        proposal: h.filter(|_| cluster.phase == Phase::Preparing),
        document: h.filter(|_| decided),
    }
}

/// Working state of one step.
pub(super) struct Turn<'a> {
    pub(super) cluster: &'a mut Cluster,
    pub(super) context: Context<'a>,
    pub(super) now: Micros,
    pub(super) changed: bool,
    pub(super) changes: Vec<Change>,
    pub(super) committed: Option<Hash>,
    pub(super) alarms: Vec<Alarm>,
}

/// Key of the agent that sent the event, if an agent did, or the refusal.
pub(super) type Applied = Result<Option<KeyId>, Refusal>;

impl Turn<'_> {
    pub(super) fn record_change(&mut self, change: Change) {
        self.changed = true;
        self.changes.push(change);
    }

    fn finish(mut self, result: Applied) -> Outcome {
        if !self.changes.is_empty() {
            self.cluster.rev += 1;
        }
        let answer = result.map(|asker| view(self.cluster, asker));
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
            Event::Tick => Ok(None),
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
                Ok(None)
            }
            Event::Adopt(document) => self.adopt(document),
            Event::Abandon { by } => self.abandon(by),
            Event::Retire { by } => self.retire(by),
            Event::Unretire { by } => self.unretire(by),
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

    pub(super) fn is_forming(&self) -> bool {
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

    fn restate(&mut self, statement: Statement) -> Applied {
        self.refuse_if_ended()?;
        let newest = &self.cluster.statement;
        if statement.hash == newest.hash {
            return Ok(None);
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
        Ok(None)
    }

    pub(super) fn reopen(&mut self, why: Reopen) {
        self.cluster.phase = Phase::Open;
        self.cluster.epoch = self.cluster.epoch.saturating_add(1);
        self.cluster.frozen = None;
        self.record_change(Change::Reopened { epoch: self.cluster.epoch, why });
    }

    pub(super) fn agent_mut(&mut self, key: KeyId) -> &mut Applicant {
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
