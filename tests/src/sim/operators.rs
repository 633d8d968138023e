//! Operators, who change the members. Each reads a list of members from some member, decides on one change,
//! asks any member for it, and waits. After a time-out the outcome is unknown. The operator then reads the list
//! again, or asks again for the same operation.
//!
//! Production code ([`node_state::membership::ChangeJudge`]) decides what a member does with a change. This module
//! decides which member is asked, and when.

use std::collections::BTreeMap;
use std::time::Duration;

use node_consensus::Role;
use node_engine::driver::{ClientProposal, Notice};
use node_proto::command::{self, Operation};
use node_state::apply::{ApplyError, Outcome};
use node_state::identity::{Incarnation, MemberId, OperationId};
use node_state::membership::{
    ChangeDecision, ChangeError, ChangeJudge, ChangeObjection, ChangeRefusal, ChangeRequest,
    ChangeRules, Member, MemberChange, MemberTable,
};
use node_state::state_machine::{EntryKind, RequestId};

use super::InvariantViolation;
use super::clients::request_id;
use super::members::url;
use super::node::SimulatedNode;
use super::world::{ScheduledEvent, Simulation, TICK, index_of};

/// Maximum number of voters that operators aim for.
const MAX_VOTERS: u64 = 7;
/// Maximum number of machines in a history.
const MAX_MACHINES: usize = 14;

/// Virtual microseconds after which an operator considers the outcome unknown.
const OPERATOR_TIMEOUT: u64 = 300_000;
/// Virtual microseconds that a leader waits for its proposal.
const PROPOSAL_TIMEOUT: u64 = 1_500_000;
/// Virtual microseconds that a leader waits for its successor.
const TRANSFER_TIMEOUT: u64 = 10 * TICK;
/// Virtual microseconds between two checks whether a quorum knows of the last change.
const RETRY_INTERVAL: u64 = 5_000;
/// Maximum number of changes that wait on a leader for the one under way.
const MAX_QUEUED_CHANGES: usize = 16;

/// A membership change that a member is asked for.
#[derive(Clone, Debug)]
pub(super) struct OperatorChange {
    /// Operator that asks; `None` if a leader promotes a learner that waits for its vote.
    operator: Option<usize>,
    number: u64,
    change: ChangeRequest,
    /// Virtual time until which the leader lets the change wait for a quorum to know of the last one.
    until: u64,
}

/// The membership change that a leader has under way.
#[derive(Debug)]
pub(super) struct PendingChange {
    asked: OperatorChange,
    /// Id of the proposed request; 0 while the leader hands over.
    request: u64,
}

/// An operator, and the request that it waits for.
#[derive(Debug, Default)]
pub(super) struct Operator {
    /// Number of the request that it waits for; 0 if none.
    pending_number: u64,
    /// Change that it last asked for, unless that was answered.
    unanswered: Option<ChangeRequest>,
    /// Number of voters that it wants.
    target_voters: u64,
}

impl Simulation {
    /// Calls `says` with a judge of changes that knows what this process knows now.
    fn judge<T>(
        &self,
        node: &SimulatedNode,
        says: impl FnOnce(&ChangeJudge<'_>) -> T,
    ) -> Option<T> {
        let live = node.process.as_ref()?;
        let since = |since: u64| Duration::from_micros(self.now - since);
        let connected: BTreeMap<MemberId, Duration> =
            live.connected.iter().map(|(id, link)| (MemberId(*id), since(link.since))).collect();
        let (view, status) = (live.store.view(), live.core.driver().status());
        let rules = ChangeRules {
            healthy_after: Duration::from_micros(self.plan.healthy_after),
            in_sync_entries: self.plan.in_sync_entries,
            guards: self.options.guards,
            ..ChangeRules::new(self.plan.strict, self.plan.max_learners)
        };
        Some(says(&ChangeJudge {
            rules,
            local: MemberId(node.member),
            is_leader: status.role == Role::Leader,
            table: view.members(),
            connected: &connected,
            peers: &status.peers,
            settled_index: status.barrier_index,
            last: status.last,
        }))
    }

    pub(super) fn operate(&mut self, operator: usize) -> Result<(), InvariantViolation> {
        if self.are_faults_over || self.operators[operator].pending_number != 0 {
            return Ok(());
        }
        let delay = self.rng.range(5_000, 80_000);
        self.schedule(delay, ScheduledEvent::Operator { operator });
        let id = self.any_machine();
        let Some(view) = self.nodes[index_of(id)].store_view() else { return Ok(()) };
        let again = self.operators[operator].unanswered.take().filter(|_| self.rng.chance(500));
        let change = match again {
            Some(again) => again,
            None => match self.wish(operator, view.members()) {
                Some(change) => {
                    let operation = Some(OperationId(u128::from(self.next_id).to_be_bytes()));
                    ChangeRequest { change, operation, planned_at: None }
                }
                None => return Ok(()),
            },
        };
        let node = &self.nodes[index_of(id)];
        if !matches!(self.judge(node, |judge| judge.precheck(&change)), Some(Ok(()))) {
            self.report.changes_refused += 1;
            return Ok(());
        }
        let number = self.next_id;
        self.next_id += 1;
        self.operators[operator].pending_number = number;
        self.schedule(OPERATOR_TIMEOUT, ScheduledEvent::OperatorTimeout { operator, number });
        self.prepare(&change.change);
        self.operators[operator].unanswered = Some(change.clone());
        let until = self.now + PROPOSAL_TIMEOUT;
        let asked = OperatorChange { operator: Some(operator), number, change, until };
        self.pass_on(id, asked)
    }

    /// Lets a member handle a change: it acts itself if it leads, or forwards the change to the leader it
    /// knows.
    fn pass_on(&mut self, id: u64, asked: OperatorChange) -> Result<(), InvariantViolation> {
        let node = &self.nodes[index_of(id)];
        let (life, member) = (node.life, node.member);
        let Some(live) = &node.process else { return Ok(()) };
        let leader = live.core.driver().leadership().1;
        if leader == member {
            return self.lead(id, life, asked);
        }
        let Some(link) = live.connected.get(&leader).copied() else {
            self.answer(&asked);
            return Ok(());
        };
        // Production sends this on a stream of its own, so a request arrives once or never.
        let delays = self.network.delays(&mut self.rng, &self.plan, id, link.machine);
        if let Some(delay) = delays.first() {
            let (node, life) = (link.machine, link.life);
            self.schedule(*delay, ScheduledEvent::ChangeRequested { node, life, asked });
        }
        Ok(())
    }

    /// Lets a process handle a change as the leader.
    pub(super) fn lead(
        &mut self,
        id: u64,
        life: u64,
        asked: OperatorChange,
    ) -> Result<(), InvariantViolation> {
        let one_at_a_time = self.options.guards.one_change_at_a_time();
        let Some(live) = self.live(id, life) else { return Ok(()) };
        if live.pending_change.is_some() && one_at_a_time {
            if live.changes.len() < MAX_QUEUED_CHANGES {
                live.changes.push_back(asked);
            }
            return Ok(());
        }
        let node = &self.nodes[index_of(id)];
        let ruling = self.judge(node, |judge| judge.decide(&asked.change));
        match ruling {
            None => Ok(()),
            Some(Err(ChangeRefusal::Objection(ChangeObjection::Unsettled)))
                if self.now < asked.until =>
            {
                self.schedule(
                    RETRY_INTERVAL,
                    ScheduledEvent::ChangeRequested { node: id, life, asked },
                );
                Ok(())
            }
            Some(Err(refused)) => {
                self.report.changes_refused += u64::from(refused != ChangeRefusal::NotLeader);
                self.answer(&asked);
                Ok(())
            }
            Some(Ok(ChangeDecision::TransferLeadership)) => {
                self.report.handed_over += 1;
                self.schedule(
                    TRANSFER_TIMEOUT,
                    ScheduledEvent::ChangeEnds { node: id, life, request: 0 },
                );
                let Some(live) = self.live(id, life) else { return Ok(()) };
                live.pending_change = Some(PendingChange { asked, request: 0 });
                self.notice(id, life, Notice::Transfer(None))
            }
            Some(Ok(ChangeDecision::Propose(entry))) => self.propose_change(id, life, asked, entry),
        }
    }

    fn propose_change(
        &mut self,
        id: u64,
        life: u64,
        asked: OperatorChange,
        entry: Box<command::MemberChange>,
    ) -> Result<(), InvariantViolation> {
        if let MemberChange::Promote(member) = &asked.change.change {
            let last = self.nodes[index_of(id)]
                .process
                .as_ref()
                .map(|live| live.core.driver().status().last);
            self.invariants.counts.check_promotion(
                member.0,
                last.unwrap_or(0),
                self.plan.in_sync_entries,
            )?;
        }
        let request = request_id(self.next_id, id);
        self.next_id += 1;
        self.change_requests.insert(request);
        self.proposed_changes.push((entry.planned_at, asked.change.change.clone()));
        let data = command::encode(request, None, Operation::ChangeMember(*entry));
        let proposal = ClientProposal { id: RequestId(request), kind: EntryKind::ConfChange, data };
        self.schedule(PROPOSAL_TIMEOUT, ScheduledEvent::ChangeEnds { node: id, life, request });
        let Some(live) = self.live(id, life) else { return Ok(()) };
        if live.mail.propose(proposal).is_err() {
            self.answer(&asked);
            return Ok(());
        }
        live.pending_change = Some(PendingChange { asked, request });
        self.wake(id)
    }

    /// Handles the outcome of a change on the process that proposed it.
    pub(super) fn change_done(
        &mut self,
        id: u64,
        request: u64,
        outcome: Option<&Outcome>,
    ) -> Result<(), InvariantViolation> {
        let life = self.node(id).life;
        let Some(live) = self.live(id, life) else { return Ok(()) };
        let Some(changing) = live.pending_change.take_if(|changing| changing.request == request)
        else {
            return Ok(());
        };
        let stale = matches!(outcome, Some(Err(ApplyError::Members(ChangeError::Stale { .. }))));
        if stale {
            // Another change came in between, so this one is judged again.
            self.lead(id, life, changing.asked)?;
        } else {
            self.answer(&changing.asked);
        }
        let Some(live) = self.live(id, life) else { return Ok(()) };
        match live.changes.pop_front() {
            Some(next) if live.pending_change.is_none() => self.lead(id, life, next),
            Some(next) => {
                live.changes.push_front(next);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Schedules the answer to an operator; it may be lost.
    fn answer(&mut self, asked: &OperatorChange) {
        let Some(operator) = asked.operator else { return };
        if !self.rng.chance(self.plan.loss) {
            let delay = self.rng.range(200, 4_000);
            self.schedule(
                delay,
                ScheduledEvent::OperatorAnswered { operator, number: asked.number },
            );
        }
    }

    pub(super) fn answered(&mut self, operator: usize, number: u64) {
        if self.operators[operator].pending_number == number {
            self.operators[operator].unanswered = None;
            self.operator_goes_on(operator, number);
        }
    }

    /// Lets an operator continue, because it was answered or gave up.
    pub(super) fn operator_goes_on(&mut self, operator: usize, number: u64) {
        if self.operators[operator].pending_number == number {
            self.operators[operator].pending_number = 0;
            let delay = self.rng.range(2_000, 60_000);
            self.schedule(delay, ScheduledEvent::Operator { operator });
        }
    }

    /// Lets a leader promote the learner that waits for its vote, once that is ready.
    pub(super) fn promote_when_ready(
        &mut self,
        id: u64,
        life: u64,
        waits: MemberId,
    ) -> Result<(), InvariantViolation> {
        let Some(live) = self.live(id, life) else { return Ok(()) };
        if live.core.driver().leadership().0 != Role::Leader || live.pending_change.is_some() {
            return Ok(());
        }
        let change = MemberChange::Promote(waits).into();
        self.lead(id, life, OperatorChange { operator: None, number: 0, change, until: 0 })
    }

    /// Draws the change that an operator wants, given the list that it has read.
    fn wish(&mut self, operator: usize, table: &MemberTable) -> Option<MemberChange> {
        if self.operators[operator].target_voters == 0 || self.rng.chance(80) {
            self.operators[operator].target_voters = self.rng.range(1, MAX_VOTERS + 1);
        }
        let aim = self.operators[operator].target_voters;
        let lost = |member: &&Member| {
            self.nodes.iter().any(|node| node.has_lost_promises && node.member == member.id.0)
        };
        let lost = table.members().find(lost).map(|member| member.id);
        if let Some(lost) = lost
            && self.rng.chance(600)
        {
            return Some(MemberChange::Remove(lost));
        }
        let voters: Vec<&Member> = table.members().filter(|member| !member.is_learner).collect();
        let learners: Vec<&Member> = table.members().filter(|member| member.is_learner).collect();
        let count = voters.len() as u64;
        if self.rng.chance(60) {
            // Retry of an old addition that was carried out and undone since.
            let removed: Vec<MemberId> = table.removed().map(|(id, _)| id).collect();
            let id = *removed.get(self.rng.pick(removed.len().max(1)))?;
            let machine = self.nodes.iter().find(|node| node.member == id.0)?;
            let url = machine.url.clone();
            return Some(MemberChange::Add(new_member(id, url, true, None)));
        }
        if self.rng.chance(150) {
            let all: Vec<&Member> = table.members().collect();
            let member = all[self.rng.pick(all.len())];
            let owner = self.nodes.iter().find(|node| node.member == member.id.0)?;
            let (owner, moves) = (owner.id, self.rng.range(1, 50));
            return Some(MemberChange::Update(member.id, vec![url(owner, moves)]));
        }
        if count < aim && !learners.is_empty() && self.rng.chance(700) {
            return Some(MemberChange::Promote(learners[self.rng.pick(learners.len())].id));
        }
        if count < aim {
            return self.add(table);
        }
        if count > aim || self.rng.chance(200) {
            let leader = self.leader(0).map(|id| MemberId(self.nodes[index_of(id)].member));
            let leader = leader.filter(|id| table.member(*id).is_some());
            let any = voters[self.rng.pick(voters.len())].id;
            return Some(MemberChange::Remove(
                leader.filter(|_| self.rng.chance(350)).unwrap_or(any),
            ));
        }
        match learners.first() {
            Some(learner) if self.rng.chance(400) => Some(MemberChange::Remove(learner.id)),
            Some(_) => None,
            None => self.add(table),
        }
    }

    fn add(&mut self, table: &MemberTable) -> Option<MemberChange> {
        // A machine with an unanswered request is left to the operator that will ask again.
        let asked_for = |node: &SimulatedNode| {
            let mut asked = self.operators.iter().filter_map(|one| one.unanswered.as_ref());
            asked.any(|asked| match &asked.change {
                MemberChange::Add(new) => node.owns(&new.peer_urls[0]),
                _ => false,
            })
        };
        let waits = |node: &&SimulatedNode| {
            let is_taken = table.members().any(|member| node.owns(&member.peer_urls[0]));
            node.member == 0 && !is_taken && !asked_for(node)
        };
        let waiting = self.nodes.iter().find(waits).map(|node| node.id);
        let machine = match waiting {
            Some(machine) => machine,
            None if self.nodes.len() < MAX_MACHINES => self.new_machine(),
            None => return None,
        };
        let id = MemberId(1_000 + self.next_id);
        let bound = self.plan.binds_incarnations && self.rng.chance(500);
        let incarnation = self.nodes[index_of(machine)].files.incarnation;
        let incarnation = bound.then(|| Incarnation(incarnation.to_be_bytes()));
        let url = self.nodes[index_of(machine)].url.clone();
        Some(MemberChange::Add(new_member(id, url, self.rng.chance(600), incarnation)))
    }

    /// Starts the machine of a member that is to be added, as its operator would.
    fn prepare(&mut self, change: &MemberChange) {
        let MemberChange::Add(member) = change else { return };
        let machine = self.nodes.iter().find(|node| node.owns(&member.peer_urls[0]));
        if let Some(id) = machine.filter(|node| node.member == 0).map(|node| node.id) {
            let delay = self.rng.range(1_000, 150_000);
            self.schedule(delay, ScheduledEvent::Restart { node: id });
        }
    }
}

fn new_member(
    id: MemberId,
    url: String,
    is_learner: bool,
    incarnation: Option<Incarnation>,
) -> Member {
    Member {
        id,
        name: String::new(),
        peer_urls: vec![url],
        client_urls: Vec::new(),
        is_learner,
        incarnation,
        node_key: None,
        changed_at: 0,
        vote_when_ready: false,
        operations: Vec::new(),
    }
}
