//! Operators, who change the members. Each reads a list of members from some member, decides on one
//! change, asks any member for it, and waits. After a time-out the outcome is unknown. The operator
//! then reads the list again, or asks again for the same operation.
//!
//! Production code ([`node_state::membership::ChangeJudge`]) decides how a member treats a change.
//! This module decides which member is asked, and when.

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
use super::simulation::{ScheduledEvent, Simulation, TICK, index_of};

/// Maximum number of voters that operators aim for.
const MAX_VOTERS: u64 = 7;
/// Maximum number of machines in a history.
const MAX_MACHINES: usize = 14;

/// Virtual microseconds after which an operator considers the outcome unknown.
const OPERATOR_TIMEOUT: u64 = 300_000;
/// Virtual microseconds for which a leader waits for the outcome of the change that it proposed.
const PROPOSAL_TIMEOUT: u64 = 1_500_000;
/// Virtual microseconds that a leader waits for its successor's election.
const TRANSFER_TIMEOUT: u64 = 10 * TICK;
/// Virtual microseconds between two checks whether a quorum knows that the last change is
/// committed.
const RETRY_INTERVAL: u64 = 5_000;
/// Maximum number of changes that wait on a leader for the change under way.
const MAX_QUEUED_CHANGES: usize = 16;

/// A membership change that a member is asked for.
#[derive(Clone, Debug)]
pub(super) struct OperatorChange {
    /// Operator that requests the change; `None` if a leader promotes a learner by itself.
    operator: Option<usize>,
    number: u64,
    request: ChangeRequest,
    /// Virtual time until which the leader keeps the change while no quorum knows of the previous
    /// change. After that, the leader refuses the change.
    until: u64,
}

/// The membership change that a leader has under way.
#[derive(Debug)]
pub(super) struct PendingChange {
    change: OperatorChange,
    /// Id of the proposed request; 0 while the leader transfers its leadership.
    request_id: u64,
}

/// An operator, and the request that it waits for.
#[derive(Debug, Default)]
pub(super) struct Operator {
    /// Number of the request that the operator waits for; 0 if it waits for none.
    pending_number: u64,
    /// Change that the operator requested last, unless that was answered.
    unanswered: Option<ChangeRequest>,
    /// Number of voters that the operator wants.
    target_voters: u64,
}

impl Simulation {
    /// Calls `f` with a judge of membership changes. The judge knows what the node's process knows
    /// now.
    fn with_change_judge<T>(
        &self,
        node: &SimulatedNode,
        f: impl FnOnce(&ChangeJudge<'_>) -> T,
    ) -> Option<T> {
        let process = node.process.as_ref()?;
        let since = |since: u64| Duration::from_micros(self.now - since);
        let connected: BTreeMap<MemberId, Duration> = process
            .connected
            .iter()
            .map(|(id, stream)| (MemberId(*id), since(stream.since)))
            .collect();
        let (view, status) = (process.store.view(), process.core.driver().status());
        let rules = ChangeRules {
            healthy_after: Duration::from_micros(self.plan.healthy_after),
            in_sync_entries: self.plan.in_sync_entries,
            guards: self.options.guards,
            ..ChangeRules::new(self.plan.strict, self.plan.max_learners)
        };
        Some(f(&ChangeJudge {
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

    pub(super) fn run_operator(&mut self, operator: usize) -> Result<(), InvariantViolation> {
        if self.are_faults_over || self.operators[operator].pending_number != 0 {
            return Ok(());
        }
        let delay = self.rng.range(5_000, 80_000);
        self.schedule(delay, ScheduledEvent::Operator { operator });
        let id = self.random_machine();
        let Some(view) = self.nodes[index_of(id)].store_view() else { return Ok(()) };
        let unanswered =
            self.operators[operator].unanswered.take().filter(|_| self.rng.chance(500));
        let request = match unanswered {
            Some(unanswered) => unanswered,
            None => match self.draw_change(operator, view.members()) {
                Some(change) => {
                    let operation = Some(OperationId(u128::from(self.next_id).to_be_bytes()));
                    ChangeRequest { change, operation, planned_at: None }
                }
                None => return Ok(()),
            },
        };
        let node = &self.nodes[index_of(id)];
        if !matches!(self.with_change_judge(node, |judge| judge.precheck(&request)), Some(Ok(()))) {
            self.report.changes_refused += 1;
            return Ok(());
        }
        let number = self.next_id;
        self.next_id += 1;
        self.operators[operator].pending_number = number;
        self.schedule(OPERATOR_TIMEOUT, ScheduledEvent::OperatorTimeout { operator, number });
        self.start_machine_to_add(&request.change);
        self.operators[operator].unanswered = Some(request.clone());
        let until = self.now + PROPOSAL_TIMEOUT;
        let change = OperatorChange { operator: Some(operator), number, request, until };
        self.forward_change(id, change)
    }

    /// Lets a member handle a change. A leader carries the change out, and any other member
    /// forwards it to the leader that it knows.
    fn forward_change(
        &mut self,
        id: u64,
        change: OperatorChange,
    ) -> Result<(), InvariantViolation> {
        let node = &self.nodes[index_of(id)];
        let (generation, member) = (node.generation, node.member);
        let Some(process) = &node.process else { return Ok(()) };
        let leader = process.core.driver().leadership().1;
        if leader == member {
            return self.handle_change_as_leader(id, generation, change);
        }
        let Some(stream) = process.connected.get(&leader).copied() else {
            self.schedule_answer(&change);
            return Ok(());
        };
        // In production the request has a stream of its own, so it arrives once or never.
        let delays = self.network.delays(&mut self.rng, &self.plan, id, stream.machine);
        if let Some(delay) = delays.first() {
            let (node, generation) = (stream.machine, stream.generation);
            self.schedule(*delay, ScheduledEvent::ChangeRequested { node, generation, change });
        }
        Ok(())
    }

    /// Lets a process handle a change as the leader.
    pub(super) fn handle_change_as_leader(
        &mut self,
        id: u64,
        generation: u64,
        change: OperatorChange,
    ) -> Result<(), InvariantViolation> {
        let one_at_a_time = self.options.guards.one_change_at_a_time();
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        if process.pending_change.is_some() && one_at_a_time {
            if process.changes.len() < MAX_QUEUED_CHANGES {
                process.changes.push_back(change);
            }
            return Ok(());
        }
        let node = &self.nodes[index_of(id)];
        let decision = self.with_change_judge(node, |judge| judge.decide(&change.request));
        match decision {
            None => Ok(()),
            Some(Err(ChangeRefusal::Objection(ChangeObjection::Unsettled)))
                if self.now < change.until =>
            {
                self.schedule(
                    RETRY_INTERVAL,
                    ScheduledEvent::ChangeRequested { node: id, generation, change },
                );
                Ok(())
            }
            Some(Err(refusal)) => {
                self.report.changes_refused += u64::from(refusal != ChangeRefusal::NotLeader);
                self.schedule_answer(&change);
                Ok(())
            }
            Some(Ok(ChangeDecision::TransferLeadership)) => {
                self.report.handed_over += 1;
                self.schedule(
                    TRANSFER_TIMEOUT,
                    ScheduledEvent::ChangeEnds { node: id, generation, request: 0 },
                );
                let Some(process) = self.running_process(id, generation) else { return Ok(()) };
                process.pending_change = Some(PendingChange { change, request_id: 0 });
                self.notice(id, generation, Notice::Transfer(None))
            }
            Some(Ok(ChangeDecision::Propose(entry))) => {
                self.propose_change(id, generation, change, entry)
            }
        }
    }

    fn propose_change(
        &mut self,
        id: u64,
        generation: u64,
        change: OperatorChange,
        entry: Box<command::MemberChange>,
    ) -> Result<(), InvariantViolation> {
        if let MemberChange::Promote(member) = &change.request.change {
            let last = self.nodes[index_of(id)]
                .process
                .as_ref()
                .map(|process| process.core.driver().status().last);
            self.invariants.counts.check_promotion(
                member.0,
                last.unwrap_or(0),
                self.plan.in_sync_entries,
            )?;
        }
        let request = request_id(self.next_id, id);
        self.next_id += 1;
        self.change_requests.insert(request);
        self.proposed_changes.push((entry.planned_at, change.request.change.clone()));
        let data = command::encode(request, None, Operation::ChangeMember(*entry));
        let proposal = ClientProposal { id: RequestId(request), kind: EntryKind::ConfChange, data };
        self.schedule(
            PROPOSAL_TIMEOUT,
            ScheduledEvent::ChangeEnds { node: id, generation, request },
        );
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        if process.mail.propose(proposal).is_err() {
            self.schedule_answer(&change);
            return Ok(());
        }
        process.pending_change = Some(PendingChange { change, request_id: request });
        self.wake(id)
    }

    /// Handles the outcome of a change on the process that proposed it.
    pub(super) fn finish_change(
        &mut self,
        id: u64,
        request: u64,
        outcome: Option<&Outcome>,
    ) -> Result<(), InvariantViolation> {
        let generation = self.node(id).generation;
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        let Some(pending) = process.pending_change.take_if(|pending| pending.request_id == request)
        else {
            return Ok(());
        };
        let is_stale = matches!(outcome, Some(Err(ApplyError::Members(ChangeError::Stale { .. }))));
        if is_stale {
            // Another change was applied since this change was judged, so this change is judged
            // again.
            self.handle_change_as_leader(id, generation, pending.change)?;
        } else {
            self.schedule_answer(&pending.change);
        }
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        match process.changes.pop_front() {
            Some(next) if process.pending_change.is_none() => {
                self.handle_change_as_leader(id, generation, next)
            }
            Some(next) => {
                process.changes.push_front(next);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Schedules the answer to an operator. The network may lose the answer.
    fn schedule_answer(&mut self, change: &OperatorChange) {
        let Some(operator) = change.operator else { return };
        if !self.rng.chance(self.plan.loss) {
            let delay = self.rng.range(200, 4_000);
            self.schedule(
                delay,
                ScheduledEvent::OperatorAnswered { operator, number: change.number },
            );
        }
    }

    pub(super) fn receive_operator_answer(&mut self, operator: usize, number: u64) {
        if self.operators[operator].pending_number == number {
            self.operators[operator].unanswered = None;
            self.end_operator_request(operator, number);
        }
    }

    /// Lets an operator continue, because it was answered or gave up.
    pub(super) fn end_operator_request(&mut self, operator: usize, number: u64) {
        if self.operators[operator].pending_number == number {
            self.operators[operator].pending_number = 0;
            let delay = self.rng.range(2_000, 60_000);
            self.schedule(delay, ScheduledEvent::Operator { operator });
        }
    }

    /// Lets a leader promote the learner that waits to become a voter, once the learner is ready.
    pub(super) fn promote_when_ready(
        &mut self,
        id: u64,
        generation: u64,
        learner: MemberId,
    ) -> Result<(), InvariantViolation> {
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        if process.core.driver().leadership().0 != Role::Leader || process.pending_change.is_some()
        {
            return Ok(());
        }
        let request = MemberChange::Promote(learner).into();
        self.handle_change_as_leader(
            id,
            generation,
            OperatorChange { operator: None, number: 0, request, until: 0 },
        )
    }

    /// Draws the change that an operator wants, given the list that it has read.
    fn draw_change(&mut self, operator: usize, table: &MemberTable) -> Option<MemberChange> {
        if self.operators[operator].target_voters == 0 || self.rng.chance(80) {
            self.operators[operator].target_voters = self.rng.range(1, MAX_VOTERS + 1);
        }
        let target = self.operators[operator].target_voters;
        let amnesiac = |member: &&Member| {
            self.nodes.iter().any(|node| node.has_lost_promises && node.member == member.id.0)
        };
        let amnesiac = table.members().find(amnesiac).map(|member| member.id);
        if let Some(amnesiac) = amnesiac
            && self.rng.chance(600)
        {
            return Some(MemberChange::Remove(amnesiac));
        }
        let voters: Vec<&Member> = table.members().filter(|member| !member.is_learner).collect();
        let learners: Vec<&Member> = table.members().filter(|member| member.is_learner).collect();
        let voter_count = voters.len() as u64;
        if self.rng.chance(60) {
            // Sometimes ask again for an old addition whose member was removed since. An id is
            // never used twice, so the request must be refused.
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
        if voter_count < target && !learners.is_empty() && self.rng.chance(700) {
            return Some(MemberChange::Promote(learners[self.rng.pick(learners.len())].id));
        }
        if voter_count < target {
            return self.add(table);
        }
        if voter_count > target || self.rng.chance(200) {
            let leader = self.find_leader(0).map(|id| MemberId(self.nodes[index_of(id)].member));
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
        // An operator repeats its unanswered request for a machine. So another operator leaves that
        // machine alone.
        let is_asked_for = |node: &SimulatedNode| {
            let mut requests =
                self.operators.iter().filter_map(|operator| operator.unanswered.as_ref());
            requests.any(|request| match &request.change {
                MemberChange::Add(new) => node.has_address(&new.peer_urls[0]),
                _ => false,
            })
        };
        let can_join = |node: &&SimulatedNode| {
            let is_member = table.members().any(|member| node.has_address(&member.peer_urls[0]));
            node.member == 0 && !is_member && !is_asked_for(node)
        };
        let waiting = self.nodes.iter().find(can_join).map(|node| node.id);
        let machine = match waiting {
            Some(machine) => machine,
            None if self.nodes.len() < MAX_MACHINES => self.add_machine(),
            None => return None,
        };
        let id = MemberId(1_000 + self.next_id);
        let is_bound = self.plan.binds_incarnations && self.rng.chance(500);
        let incarnation = self.nodes[index_of(machine)].files.incarnation;
        let incarnation = is_bound.then(|| Incarnation(incarnation.to_be_bytes()));
        let url = self.nodes[index_of(machine)].url.clone();
        Some(MemberChange::Add(new_member(id, url, self.rng.chance(600), incarnation)))
    }

    /// Starts the machine of the member that this change adds, as an operator would.
    fn start_machine_to_add(&mut self, change: &MemberChange) {
        let MemberChange::Add(member) = change else { return };
        let machine = self.nodes.iter().find(|node| node.has_address(&member.peer_urls[0]));
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
