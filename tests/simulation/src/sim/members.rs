//! Members and machines: which machine runs which member, and which members are compared at the
//! end. A new member joins here with the whole state of another one.
//!
//! A machine whose member was given another address moves there, and can't be reached at its old
//! address any more. A member that was unreachable learns the present members and their addresses
//! from the members that it knows. If all of these have been removed meanwhile, the member has to
//! be replaced ([`Simulation::remove_stranded_member`]).

use std::collections::BTreeSet;

use bytes::Bytes;
use node_consensus::{Entry, Role};
use node_engine::driver::ClientProposal;
use node_proto::command::{self, Operation};
use node_proto::musterpb::PublishMember;
use node_state::identity::{Incarnation, MemberId};
use node_state::membership::{Member, MemberTable};
use node_state::state_machine::{CommittedEntry, EntryKind, RequestId, StateMachine as _};

use super::InvariantViolation;
use super::clients::{NO_CLIENT, request_id};
use super::invariants::{configurations, quorums};
use super::node::SimulatedNode;
use super::peer_streams::StreamRefusalReason;
use super::plan::HistoryPlan;
use super::simulation::{ScheduledEvent, Simulation, index_of};

/// Number of times that a removed member's supervisor starts it again.
const MAX_REFUSED_STARTS: u64 = 12;

/// Returns the address of a machine after it has moved this number of times.
pub(super) fn url(machine: u64, moves: u64) -> String {
    format!("http://m{machine}-{moves}:2380")
}

/// Returns the members that every store begins with. Their ids equal the numbers of their machines.
pub(super) fn first_members(plan: &HistoryPlan) -> Vec<Member> {
    let member = |id| Member {
        id: MemberId(id),
        name: format!("m{id}"),
        peer_urls: vec![url(id, 0)],
        client_urls: Vec::new(),
        is_learner: false,
        incarnation: plan
            .binds_incarnations
            .then(|| Incarnation(first_incarnation(id).to_be_bytes())),
        node_key: None,
        changed_at: 0,
        vote_when_ready: false,
        operations: Vec::new(),
    };
    (1..=plan.members).map(member).collect()
}

/// Returns the incarnation of a machine that was never wiped.
pub(super) fn first_incarnation(machine: u64) -> u128 {
    u128::from(machine) << 64 | 0xfeed
}

impl Simulation {
    /// Returns the member table of the most advanced store.
    pub(super) fn latest_table(&self) -> &MemberTable {
        &self.latest_members.1
    }

    /// Checks a store's member table against the model's. Remembers the table if the store is the
    /// most advanced one.
    pub(super) fn check_member_table(&mut self, id: u64) -> Result<(), InvariantViolation> {
        let Some(process) = &self.nodes[index_of(id)].process else { return Ok(()) };
        let view = process.store.view();
        let at = view.applied().index;
        configurations::check_table(id, at, view.members(), &self.invariants.stores.model.members)?;
        if at > self.latest_members.0 {
            if self.latest_members.1 != *view.members() {
                self.leadership_since = self.now;
                // The machine that a client waits for may belong to a removed member. So the
                // requests that are pending now need not be answered any more.
                let pending = self.clients.iter_mut().filter_map(|client| client.pending.as_mut());
                pending.for_each(|pending| pending.must_be_answered = false);
                self.latest_members.1 = view.members().clone();
                self.machines_to_move().into_iter().for_each(|(mover, _)| {
                    let delay = self.rng.range(1_000, 150_000);
                    self.schedule(delay, ScheduledEvent::Move { node: mover });
                });
            }
            self.latest_members.0 = at;
        }
        Ok(())
    }

    /// Returns the machines whose member was given another address, and that address.
    fn machines_to_move(&self) -> Vec<(u64, String)> {
        let address = |node: &SimulatedNode| {
            let member = self.latest_table().member(MemberId(node.member))?;
            let url = member.peer_urls.iter().find(|url| node.has_address(url))?;
            (*url != node.url).then(|| (node.id, url.clone()))
        };
        self.nodes.iter().filter_map(address).collect()
    }

    /// Restarts a machine at the address that its member was given.
    pub(super) fn restart_at_new_address(&mut self, id: u64) -> Result<(), InvariantViolation> {
        let Some((_, url)) = self.machines_to_move().into_iter().find(|(mover, _)| *mover == id)
        else {
            return Ok(());
        };
        self.report.moves += 1;
        let node = self.node(id);
        node.url = url;
        if node.process.is_some() {
            self.end_process(id, true);
            self.leaders[index_of(id)] = (0, 0);
        }
        if self.are_faults_over { self.start(id) } else { Ok(()) }
    }

    /// Returns the machines whose process can still act for a member of the cluster.
    pub(super) fn acting_machines(&self) -> impl Iterator<Item = &SimulatedNode> {
        self.nodes.iter().filter(|node| self.acts_for_member(node))
    }

    pub(super) fn acts_for_member(&self, node: &SimulatedNode) -> bool {
        !node.has_lost_promises && self.latest_table().member(MemberId(node.member)).is_some()
    }

    /// Returns whether a machine's member is a voter in the member table of the most advanced
    /// store.
    pub(super) fn is_voter(&self, node: &SimulatedNode) -> bool {
        self.acts_for_member(node) && !self.latest_table().is_learner(MemberId(node.member))
    }

    /// Adds a new machine, which is no member yet.
    pub(super) fn add_machine(&mut self) -> u64 {
        let id = self.nodes.len() as u64 + 1;
        let drift = if self.plan.drift > 0 { self.rng.range(0, self.plan.drift) } else { 0 };
        // Spreads ticks by `plan.drift` per mille, centred on their nominal length.
        let tick = super::simulation::TICK * (1000 + drift) / (1000 + self.plan.drift / 2);
        let seed = self.rng.number();
        self.nodes.push(SimulatedNode::new(id, 0, seed, tick));
        self.leaders.push((0, 0));
        id
    }

    /// Lets a new member look up its id, and fetch the whole state from a member that has added it.
    pub(super) fn start_joining(&mut self, id: u64) -> Result<(), InvariantViolation> {
        let retry_delay = self.rng.range(10_000, 60_000);
        let joiner = &self.nodes[index_of(id)];
        let can_serve = |node: &&SimulatedNode| {
            let cut = self.network.is_cut(id, node.id) || self.network.is_cut(node.id, id);
            let is_running =
                node.id != id && node.process.is_some() && node.paused_until <= self.now;
            is_running && !cut && node.member_at(&joiner.url).is_some()
        };
        let sources = self.nodes.iter().filter(can_serve);
        let best = sources.max_by_key(|node| {
            node.store_view().map_or(0, |view| view.members().configuration_index())
        });
        let Some((from, member)) =
            best.and_then(|node| Some((node.id, node.member_at(&joiner.url)?)))
        else {
            self.schedule(retry_delay, ScheduledEvent::Restart { node: id });
            return Ok(());
        };
        let generation = self.node(id).begin_joining(member.0);
        match self.admit_stream(from, id) {
            Ok(()) => {}
            Err(StreamRefusalReason::Removed) => return self.end_removed_member(id),
            Err(StreamRefusalReason::Disowned) => {
                self.report.disowned += 1;
                let node = self.node(id);
                (node.has_lost_promises, node.has_ended_for_good) = (true, true);
                return Ok(());
            }
            Err(StreamRefusalReason::Unknown) => {
                self.schedule(retry_delay, ScheduledEvent::Restart { node: id });
                return Ok(());
            }
        }
        let Some(process) = &self.nodes[index_of(from)].process else { return Ok(()) };
        let mut body = Vec::new();
        if process.store.view().write_snapshot(&mut body).is_err() {
            self.schedule(retry_delay, ScheduledEvent::Restart { node: id });
            return Ok(());
        }
        let delay = self.rng.range(500, 40_000);
        self.schedule(
            delay,
            ScheduledEvent::StateArrives { node: id, generation, body: body.into() },
        );
        Ok(())
    }

    /// Creates the new member's store and log from the state that has arrived, and starts the
    /// member.
    pub(super) fn receive_initial_state(
        &mut self,
        id: u64,
        generation: u64,
        body: &Bytes,
    ) -> Result<(), InvariantViolation> {
        if self.node(id).generation != generation || self.node(id).process.is_some() {
            return Ok(());
        }
        let (plan, guards) = (self.plan.clone(), self.options.guards);
        match self.node(id).create_from_snapshot(&plan, guards, body) {
            Ok(()) => {
                self.report.joined += 1;
                self.start(id)
            }
            Err(end) => self.handle_process_end(id, end),
        }
    }

    /// Handles a member's discovery that it was removed: it writes its tombstone and its process
    /// ends. Its supervisor will start it again.
    pub(super) fn end_removed_member(&mut self, id: u64) -> Result<(), InvariantViolation> {
        let node = self.node(id);
        node.files.tombstone = true;
        self.invariants.removed.record_tombstone(id);
        let node = self.node(id);
        if node.process.is_some() {
            self.end_process(id, true);
        } else {
            self.schedule(50_000, ScheduledEvent::Restart { node: id });
        }
        Ok(())
    }

    /// Handles a peer's message that this process's member was removed.
    pub(super) fn receive_removal_report(
        &mut self,
        id: u64,
        generation: u64,
    ) -> Result<(), InvariantViolation> {
        if self.running_process(id, generation).is_none() {
            return Ok(());
        }
        self.end_removed_member(id)
    }

    /// Ends a process that has applied its own removal, unless other members may still need it.
    pub(super) fn leave_after_removal(
        &mut self,
        id: u64,
        generation: u64,
    ) -> Result<(), InvariantViolation> {
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        if process.core.driver().has_left() {
            return self.end_removed_member(id);
        }
        let delay = self.rng.range(1_000, 50_000);
        self.schedule(delay, ScheduledEvent::Leave { node: id, generation });
        Ok(())
    }

    /// Ends the process of a removed member right after its start.
    pub(super) fn refuse_start(&mut self, id: u64) {
        self.report.refused_starts += 1;
        let node = self.node(id);
        node.refused_starts += 1;
        if node.refused_starts < MAX_REFUSED_STARTS {
            let delay = self.rng.range(5_000, 100_000);
            self.schedule(delay, ScheduledEvent::Restart { node: id });
        }
    }

    /// Publishes a member's name after its first start. If the member leads, it also promotes a
    /// learner that waits to become a voter.
    pub(super) fn publish_and_promote(
        &mut self,
        id: u64,
        generation: u64,
    ) -> Result<(), InvariantViolation> {
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        let view = process.store.view();
        let member = self.node(id).member;
        let Some(own) = view.members().member(MemberId(member)) else { return Ok(()) };
        let (unnamed, incarnation) = (own.name.is_empty(), self.node(id).files.incarnation);
        if unnamed && self.rng.chance(400) {
            let request = request_id(self.next_id, NO_CLIENT);
            self.next_id += 1;
            let publication = PublishMember {
                member_id: member,
                name: format!("m{id}"),
                client_urls: Vec::new(),
                incarnation: Bytes::copy_from_slice(&incarnation.to_be_bytes()),
                node_key: Bytes::new(),
            };
            let data = command::encode(
                request,
                command::member_caller(),
                Operation::PublishMember(publication),
            );
            let proposal = ClientProposal { id: RequestId(request), kind: EntryKind::Normal, data };
            if let Some(process) = self.running_process(id, generation) {
                // If the queue of proposals is full, a later call of this function proposes the
                // member's name again.
                let _ = process.mail.propose(proposal);
            }
            self.wake(id)?;
        }
        if let Some(learner) = view.members().learner_to_promote() {
            self.promote_when_ready(id, generation, learner)?;
        }
        Ok(())
    }

    /// Removes a stranded member, as an operator would once the faults have ended. A member is
    /// stranded if all members in its member table are gone, so that it can't learn the present
    /// members. Several members that know only each other and members that are gone are stranded,
    /// too.
    pub(super) fn remove_stranded_member(&mut self) {
        self.schedule(200_000, ScheduledEvent::GiveUpStranded);
        let status = |node: &SimulatedNode| Some(node.process.as_ref()?.core.driver().status());
        let leader = self
            .acting_machines()
            .filter_map(|node| Some((status(node)?, node.id)))
            .filter(|(status, _)| status.role == Role::Leader)
            .max_by_key(|(status, _)| status.term);
        let Some((_, leader)) = leader else { return };
        let linked = self.machines_linked_to(leader);
        let knows_nobody = |node: &&SimulatedNode| {
            node.store_view().is_some_and(|view| {
                let mut known = view.members().members().map(|known| known.id.0);
                !known.any(|id| {
                    self.acting_machines().any(|other| other.member == id && other.id != node.id)
                })
            })
        };
        let is_unlinked =
            |node: &&SimulatedNode| node.process.is_some() && !linked.contains(&node.id);
        let stranded = self
            .acting_machines()
            .filter(|node| node.id != leader)
            .find(|node| knows_nobody(node) || is_unlinked(node));
        if let Some(id) = stranded.map(|node| node.id) {
            self.report.stranded += 1;
            self.end_process(id, true);
            let node = self.node(id);
            (node.has_lost_promises, node.has_ended_for_good) = (true, true);
        }
    }

    /// Returns the leader's machine and all running machines that know its member, or know a member
    /// that knows it, and so on. A process refuses connections of members that it doesn't know.
    fn machines_linked_to(&self, leader: u64) -> BTreeSet<u64> {
        let mut linked = BTreeSet::from([leader]);
        let mut members = BTreeSet::from([self.nodes[index_of(leader)].member]);
        loop {
            let before = linked.len();
            for node in self.acting_machines() {
                let mut known = node.neighbours().into_iter().map(|known| known.id.0);
                if known.any(|id| members.contains(&id)) {
                    linked.insert(node.id);
                    members.insert(node.member);
                }
            }
            if linked.len() == before {
                return linked;
            }
        }
    }

    /// Checks at the end that all stores have the same members and the same removed members.
    pub(super) fn check_equal_members(&self) -> Result<(), InvariantViolation> {
        let mut views = self.acting_machines().filter_map(|node| {
            let process = node.process.as_ref()?;
            Some((node.id, process.store.view()))
        });
        let Some((first_id, expected)) = views.next() else { return Ok(()) };
        match views.find(|(_, table)| table.members() != expected.members()) {
            None => Ok(()),
            Some((differing, _)) => {
                let what = format!("{differing} has other members than {first_id}");
                Err(InvariantViolation::new("equal members", what))
            }
        }
    }

    /// Checks that consensus uses the members of the store's table. Does nothing while the core
    /// doesn't know all entries that the store has applied.
    pub(super) fn check_members_in_use(&self, id: u64) -> Result<(), InvariantViolation> {
        let Some(process) = &self.nodes[index_of(id)].process else { return Ok(()) };
        let driver = process.core.driver();
        // During a snapshot's installation, consensus has the new members before the store does.
        let is_in_step = driver.positions().0 == process.applier.machine().applied();
        if !is_in_step || process.log_summary.installing {
            return Ok(());
        }
        configurations::check_consensus_members(
            id,
            driver.members(),
            process.store.view().members(),
        )
    }

    /// Applies an entry to the model when the first member applies it, and checks the resulting
    /// leases and members.
    pub(super) fn apply_to_model(
        &mut self,
        entry: &CommittedEntry,
    ) -> Result<(), InvariantViolation> {
        let model = &mut self.invariants.stores.model;
        let changed_members = model.apply(entry);
        for event in std::mem::take(&mut model.leases.events) {
            let quickest = 1_000_000 / (1_000 + self.plan.drift / 2);
            self.invariants.leases.check_event(event, self.now, quickest)?;
        }
        if !changed_members {
            return Ok(());
        }
        match model.members.last_two() {
            Some((now, before)) => quorums::check_overlap(&before.members, &now.members),
            None => Ok(()),
        }
    }

    /// Checks each membership change that a leader of the present term writes to its log.
    pub(super) fn check_proposed_changes(
        &mut self,
        id: u64,
        changes: &[Entry],
    ) -> Result<(), InvariantViolation> {
        let node = &self.nodes[index_of(id)];
        let Some(process) = &node.process else { return Ok(()) };
        let driver = process.core.driver();
        let (role, _, term) = driver.leadership();
        if role != Role::Leader {
            return Ok(());
        }
        for change in changes.iter().filter(|change| change.term == term) {
            let model = &self.invariants.stores.model;
            let changed =
                |index| model.state(index).is_none() || model.members.has_changed_members(index);
            let may_count = |index, term| driver.term_at(index) == Some(term) && changed(index);
            let voters = &driver.members().voters;
            self.invariants.changes.check_proposal(node.member, voters, change, may_count)?;
        }
        Ok(())
    }
}
