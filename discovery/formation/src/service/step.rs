//! Applies one event to a cluster: the table of phases and events, row by row.

use crate::rules::{Rule, Rules};
use crate::service::cluster::{Applicant, Cluster, EndCause, LastError, Phase, Seating};
use crate::service::event::ClusterEvent;
use crate::service::outcome::{
    AgentStanding, Alarm, Answer, ClusterChange, ReopenReason, StepOutcome,
};
use crate::service::refusal::Refusal;
use crate::service::settings::FormationSettings;
use crate::values::{AgentKey, Hash, ProposedList, Statement, UnixMicros};

/// Inputs of a step besides the cluster, the time and the event.
#[derive(Clone, Copy)]
pub struct StepContext<'a> {
    /// Rules that are on; in the programs always [`Rules::ALL`].
    pub rules: &'a Rules,
    pub settings: &'a FormationSettings,
    /// Whether the clock has run evenly for [`FormationSettings::steady_after`]. Only then does a
    /// deadline that has passed end a cluster, because a clock that jumped forward may be set back.
    pub is_clock_steady: bool,
    /// Computes the hash of a proposal: SHA-256 over the bytes that the protocol defines. Called at
    /// most twice in a step.
    pub hash: &'a dyn Fn(&ProposedList) -> Hash,
}

/// Applies one event to `cluster`, whose row is locked, at the database's time `now`.
///
/// The effects of time come first: lapsed leases are removed before the event is examined. So no
/// event is ever judged by a state that has already expired. Seats are updated last, because the
/// event may have freed or taken some.
pub fn step(
    cluster: &mut Cluster,
    context: &StepContext<'_>,
    now: UnixMicros,
    event: ClusterEvent,
) -> StepOutcome {
    let mut turn = StepState {
        cluster,
        context: *context,
        now,
        changed: false,
        changes: Vec::new(),
        committed: None,
        alarms: Vec::new(),
    };
    let time_first = turn.context.rules.is_on(Rule::LapseFirst);
    if time_first {
        turn.pass_time();
    }
    let result = turn.apply(event);
    if !time_first {
        turn.pass_time();
    }
    turn.update_seats();
    turn.finish(result)
}

/// Returns the cluster as `key` sees it: the answer to a read-only poll.
#[must_use]
pub fn view(cluster: &Cluster, key: Option<AgentKey>) -> Answer {
    let agent = key.and_then(|key| cluster.agents.get(&key));
    let listed = key.is_some_and(|key| cluster.is_listed(key));
    let decided = matches!(cluster.phase, Phase::Committed | Phase::Formed);
    let standing = agent.map(|agent| match agent.seating {
        Seating::Seat(seat) => AgentStanding::Seat(seat),
        Seating::Standby(order) => {
            AgentStanding::Standby { ahead: cluster.standbys().range(..order).count() }
        }
        Seating::Absent => AgentStanding::Unseated,
    });
    let h = cluster.frozen.as_ref().filter(|_| listed).map(|frozen| frozen.proposal_hash);
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
pub(super) struct StepState<'a> {
    pub(super) cluster: &'a mut Cluster,
    pub(super) context: StepContext<'a>,
    pub(super) now: UnixMicros,
    pub(super) changed: bool,
    pub(super) changes: Vec<ClusterChange>,
    pub(super) committed: Option<Hash>,
    pub(super) alarms: Vec<Alarm>,
}

/// Result of applying an event: the key of the agent that sent it, `None` if no agent did, or the
/// refusal.
pub(super) type EventResult = Result<Option<AgentKey>, Refusal>;

impl StepState<'_> {
    pub(super) fn record_change(&mut self, change: ClusterChange) {
        self.changed = true;
        self.changes.push(change);
    }

    fn finish(mut self, result: EventResult) -> StepOutcome {
        if !self.changes.is_empty() {
            self.cluster.rev += 1;
        }
        let answer = result.map(|asker| view(self.cluster, asker));
        StepOutcome {
            answer,
            changed: self.changed,
            changes: std::mem::take(&mut self.changes),
            committed: self.committed,
            alarms: std::mem::take(&mut self.alarms),
        }
    }

    fn apply(&mut self, event: ClusterEvent) -> EventResult {
        if let (Some(split), false) = (&self.cluster.split, is_allowed_while_split(&event)) {
            let decided =
                self.cluster.frozen.as_ref().map_or(split.other, |frozen| frozen.proposal_hash);
            return Err(Refusal::Split { decided, other: split.other });
        }
        match event {
            ClusterEvent::Tick => Ok(None),
            ClusterEvent::Redeem(redeem) => self.redeem(&redeem),
            ClusterEvent::Poll(poll) => self.poll(&poll),
            ClusterEvent::SessionSeen { key, session } => self.record_session(key, session),
            ClusterEvent::Ack { key, epoch, h, jws } => self.ack(key, epoch, h, jws),
            ClusterEvent::Nack { key, epoch, reason } => self.nack(key, epoch, &reason),
            ClusterEvent::Probes { key, epoch, row } => self.probes(key, epoch, row),
            ClusterEvent::Release { key, release } => self.release(key, release),
            ClusterEvent::Report { key, raft_cluster } => self.report(key, raft_cluster),
            ClusterEvent::Trouble { key, text } => self.trouble(key, text),
            ClusterEvent::StatementAdded(statement) => self.restate(statement),
            ClusterEvent::Approve { key, jws } => self.approve(key, jws),
            ClusterEvent::GrantRevoked { grant, frees_seats } => {
                if self.cluster.revoked.insert(grant.clone()) {
                    self.record_change(ClusterChange::GrantRevoked);
                }
                if frees_seats {
                    self.free_seats(grant);
                }
                Ok(None)
            }
            ClusterEvent::Adopt(document) => self.adopt(document),
            ClusterEvent::Abandon { by } => self.abandon(by),
            ClusterEvent::Retire { by } => self.retire(by),
            ClusterEvent::Unretire { by } => self.unretire(by),
            ClusterEvent::Reopen { by, deadline } => self.reopen_expired(by, deadline),
            ClusterEvent::DatabaseChanged => self.database_changed(),
            ClusterEvent::DatabaseSettled => self.database_settled(),
            ClusterEvent::DatabaseAccepted { by } => {
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

    fn restate(&mut self, statement: Statement) -> EventResult {
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
        self.record_change(ClusterChange::Restated { sequence: statement.sequence });
        self.cluster.statement = statement;
        if self.cluster.phase == Phase::Preparing {
            self.reopen(ReopenReason::Restated);
        }
        Ok(None)
    }

    pub(super) fn reopen(&mut self, why: ReopenReason) {
        self.cluster.phase = Phase::Open;
        self.cluster.epoch = self.cluster.epoch.saturating_add(1);
        self.cluster.frozen = None;
        self.record_change(ClusterChange::Reopened { epoch: self.cluster.epoch, why });
    }

    pub(super) fn agent_mut(&mut self, key: AgentKey) -> &mut Applicant {
        self.cluster.agents.get_mut(&key).expect("the caller has looked the key up")
    }

    pub(super) fn note_error(&mut self, key: AgentKey, text: String) {
        let now = self.now;
        let error = LastError { at: now, key: Some(key), text };
        if self.cluster.last_error.as_ref() != Some(&error) {
            self.cluster.last_error = Some(error);
            self.changed = true;
        }
    }
}

fn is_allowed_while_split(event: &ClusterEvent) -> bool {
    matches!(
        event,
        ClusterEvent::Tick
            | ClusterEvent::Retire { .. }
            | ClusterEvent::DatabaseChanged
            | ClusterEvent::DatabaseSettled
            | ClusterEvent::DatabaseAccepted { .. }
    )
}
