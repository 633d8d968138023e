//! The simulation's event loop: one queue in virtual time, one step at a time, with faults until
//! they end. `process_steps` has the members' steps, and `requests` has the clients'.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use node_consensus::FetchRequest;
use node_engine::driver::Notice;
use node_state::corruption::{Question, judge_claims, make_claims};
use node_state::identity::{StartKind, StartRefusal};
use node_state::membership::{MemberChange, MemberTable};
use node_state::state_machine::StateMachine as _;

use super::api_servers::ApiServer;
use super::clients::{ClientRequestGenerator, SimulatedClient};
use super::faults::FaultKind;
use super::invariants::Invariants;
use super::invariants::progress::stuck;
use super::members::first_members;
use super::network::Network;
use super::node::{SimulatedNode, broken};
use super::operators::{Operator, OperatorChange};
use super::peer_streams::Transfer;
use super::plan::HistoryPlan;
use super::prefix_copy::CopyState;
use super::watch_streams::{STREAM_COUNT, SingleWatchStream};
use super::{InvariantViolation, SimulationOptions};
use crate::rng::Rng;

/// Virtual microseconds of one tick.
pub(super) const TICK: u64 = 10_000;
/// Virtual microseconds within which the cluster must settle after the faults have ended.
const SETTLE_TIMEOUT: u64 = 20_000_000;
/// Virtual microseconds after which a member that knows no present member is given up.
const STRANDED_TIMEOUT: u64 = 4_000_000;
/// Virtual microseconds that one leader must have been undisputed before every request must be
/// answered.
const STEADY_TIME: u64 = 300_000;
/// Number of requests of each client that must be answered after the faults have ended.
const REQUIRED_ANSWERS: u64 = 3;

#[derive(Debug)]
pub(super) enum ScheduledEvent {
    Tick { node: u64, generation: u64 },
    Core { node: u64, generation: u64 },
    CommitIndexDue { node: u64, generation: u64 },
    HeldHeartbeatsDue { node: u64, generation: u64, round: u64 },
    ReadRoundDue { node: u64, generation: u64, round: u64 },
    Deliver { to: u64, generation: u64, bytes: Bytes, body: Option<Transfer> },
    MaintainStreams { node: u64, generation: u64 },
    LogDone { node: u64, generation: u64 },
    ApplyDone { node: u64, generation: u64 },
    Fetch { node: u64, generation: u64, fetch: FetchRequest },
    SnapshotWritten { node: u64, generation: u64 },
    CheckpointDone { node: u64, generation: u64 },
    SnapshotReport { node: u64, generation: u64, peer: u64, arrived: bool },
    CompactStep { node: u64, generation: u64 },
    Hub { node: u64, generation: u64 },
    Client { client: usize },
    ClientTimeout { client: usize, id: u64 },
    LeaseEntryDue { node: u64, generation: u64, request: u64, data: Bytes },
    KeepAlive { node: u64, generation: u64, client: usize, id: u64, lease: i64 },
    Stream { stream: usize },
    ApiServer { server: usize },
    Fault(FaultKind),
    Rejoin { node: u64, was_leader: bool, until: u64 },
    CutWrite { node: u64, generation: u64 },
    DiskSpaceReturns { node: u64 },
    Restart { node: u64 },
    StateArrives { node: u64, generation: u64, body: Bytes },
    RemovalReported { node: u64, generation: u64 },
    Leave { node: u64, generation: u64 },
    GiveUpStranded,
    Move { node: u64 },
    Operator { operator: usize },
    OperatorTimeout { operator: usize, number: u64 },
    OperatorAnswered { operator: usize, number: u64 },
    ChangeRequested { node: u64, generation: u64, change: OperatorChange },
    ChangeEnds { node: u64, generation: u64, request: u64 },
}

/// Counters of a history that violated no invariant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimulationReport {
    /// Hash over all events, in order.
    pub trace: u64,
    /// Steps of the event loop.
    pub steps: u64,
    /// Entries that were committed.
    pub committed: u64,
    /// Number of terms that had a leader.
    pub elections: u64,
    /// Writes that were answered.
    pub writes: u64,
    /// Proposals that were refused.
    pub refused: u64,
    /// Reads answered after a barrier.
    pub reads: u64,
    /// Proposals that were lost with an ended leader. Their clients were told that the outcome is
    /// unknown.
    pub lost_outcomes: u64,
    /// Ends of processes that were reported to peers.
    pub process_ends: u64,
    /// Running processes that were reported to peers as ended.
    pub wrong_process_ends: u64,
    /// Crashes of machines and killed processes.
    pub crashes: u64,
    /// Members that ended because their disk failed or was full.
    pub disk_failures: u64,
    /// Snapshots that were installed.
    pub snapshots: u64,
    /// Membership changes; each one is counted by every member that applied it.
    pub membership_changes: u64,
    /// Membership changes that the asked member refused.
    pub changes_refused: u64,
    /// Leaders that transferred leadership before their own removal.
    pub handed_over: u64,
    /// New members that began with the whole state of another one.
    pub joined: u64,
    /// Starts of removed members, which ended at once.
    pub refused_starts: u64,
    /// Machines that lost what their member had promised.
    pub amnesia: u64,
    /// Processes that ended because their peers no longer accepted them as the member that they
    /// claimed to be.
    pub disowned: u64,
    /// Machines that moved to another address.
    pub moves: u64,
    /// Members given up because they knew no present member any more.
    pub stranded: u64,
    /// Processes that ended during the installation of a snapshot.
    pub interrupted_installs: u64,
    /// Checkpoints in which the process ended.
    pub interrupted_checkpoints: u64,
    /// Logs that had a torn end at the start of a process.
    pub torn: u64,
    /// Batches that replaced entries of another leader in a log.
    pub conflicts: u64,
    /// Finished compactions of the store.
    pub compactions: u64,
    /// Messages that watch streams received: events, progress, compactions.
    pub notices: u64,
    /// Progress requests of watches.
    pub progress_requests: u64,
    /// Turns in which a state machine took more than one job together.
    pub shared_turns: u64,
    /// Messages and requests that met a full queue.
    pub full_queues: u64,
    /// Snapshots that could not be sent because their body was missing.
    pub lost_bodies: u64,
    /// Leases that a leader's clock ended.
    pub leases_expired: u64,
    /// Renewals of leases that were confirmed to a client.
    pub renewals: u64,
    /// Checkpoint entries, which record how long leases have left.
    pub lease_checkpoints: u64,
    /// Expiry entries without effect, because another leader led when they were committed.
    pub outdated_clocks: u64,
    /// Changes of users and roles.
    pub user_changes: u64,
    /// Requests that were refused for lack of permission.
    pub denied: u64,
    /// Tokens that identified their user.
    pub tokens_used: u64,
    /// Number of times that a member ran short of disk space.
    pub disk_space_warnings: u64,
    /// Members whose data was compared with other members' data.
    pub compared: u64,
    /// Pages of API servers' lists.
    pub pages: u64,
    /// Lists of a prefix's keys that API servers have completed.
    pub lists: u64,
    /// Number of times that an API server's copy of a prefix was compared with the model.
    pub copies_checked: u64,
    /// Lists of a prefix's keys that an API server had to start again, because a revision or a
    /// previous value was gone.
    pub lists_restarted: u64,
    /// Changes of a key that succeeded, because the API server's copy had the key's newest record.
    pub updates: u64,
    /// Changes of a key that failed, because the store had another record of the key than the API
    /// server's copy.
    pub updates_conflicted: u64,
    /// Number of races for the right to compact that an API server has won. The servers race by
    /// conditional writes to one key.
    pub races_won: u64,
    /// Number of those races that an API server has lost.
    pub races_lost: u64,
    /// Compactions by API servers that had won the race for the right to compact.
    pub races_compacted: u64,
}

impl SimulationReport {
    /// Counts the state of an API server's copy of a prefix, after the copy has taken a list,
    /// events or a progress notice.
    pub(super) fn count_copy_state(&mut self, state: CopyState) {
        self.copies_checked += u64::from(state == CopyState::Checked);
        self.lists_restarted += u64::from(state == CopyState::Outdated);
    }
}

/// Returns the index of `id` in a list of all members or machines.
pub(super) fn index_of(id: u64) -> usize {
    usize::try_from(id - 1).expect("few")
}

pub(super) struct Simulation {
    pub(super) options: SimulationOptions,
    pub(super) seed: u64,
    pub(super) plan: HistoryPlan,
    pub(super) rng: Rng,
    /// Generator that draws which ends of processes are reported.
    pub(super) report_rng: Rng,
    pub(super) now: u64,
    pub(super) sequence: u64,
    pub(super) queue: BTreeMap<(u64, u64), ScheduledEvent>,
    pub(super) nodes: Vec<SimulatedNode>,
    pub(super) network: Network,
    pub(super) clients: Vec<SimulatedClient>,
    pub(super) streams: Vec<SingleWatchStream>,
    /// API servers; their clients come last in `clients`.
    pub(super) servers: Vec<ApiServer>,
    pub(super) operators: Vec<Operator>,
    /// Index of the last entry that the most advanced store has applied, and the member table of
    /// that store.
    pub(super) latest_members: (u64, MemberTable),
    /// Ids of all requests that change the members.
    pub(super) change_requests: BTreeSet<u64>,
    /// Every membership change that was ever proposed, with the configuration it was planned on.
    pub(super) proposed_changes: Vec<(Option<u64>, MemberChange)>,
    pub(super) invariants: Invariants,
    pub(super) next_id: u64,
    pub(super) bodies: u64,
    pub(super) refused_requests: Vec<u64>,
    /// Whether the faults have ended.
    pub(super) are_faults_over: bool,
    /// Virtual time at which the leader, the term or the members last changed.
    pub(super) leadership_since: u64,
    /// Leader and term, as each machine sees them.
    pub(super) leaders: Vec<(u64, u64)>,
    pub(super) report: SimulationReport,
}

impl Simulation {
    pub(super) fn new(seed: u64, options: SimulationOptions) -> Self {
        let mut rng = Rng::new(seed);
        let plan = HistoryPlan::new(&mut rng, options.members);
        let nodes: Vec<SimulatedNode> = (1..=plan.members)
            .map(|id| {
                let drift = if plan.drift > 0 { rng.range(0, plan.drift) } else { 0 };
                // Spreads ticks by `plan.drift` per mille, centred on their nominal length.
                let tick = TICK * (1000 + drift) / (1000 + plan.drift / 2);
                SimulatedNode::new(id, id, rng.number(), tick)
            })
            .collect();
        let all_clients = 0..plan.clients + plan.api_servers;
        let clients = all_clients.map(|_| SimulatedClient::default()).collect();
        let leaders = vec![(0, 0); nodes.len()];
        let operators = (0..plan.operators).map(|_| Operator::default()).collect();
        let latest = (0, MemberTable::new(first_members(&plan)));
        let mut invariants = Invariants::default();
        invariants.stores.model.members.begin(&first_members(&plan));
        invariants.stores.model.refuses_outdated_expiry = options.guards.lease_clock_per_term();
        // A separate generator draws the reports of ended processes. So histories without such
        // reports stay the same.
        let report_rng = Rng::new(seed ^ 0x7265_706f_7274);
        let mut draw = ClientRequestGenerator { rng: &mut rng, keys: plan.keys, known: 1 };
        let streams = (0..STREAM_COUNT).map(|_| SingleWatchStream::new(&mut draw)).collect();
        let servers = (0..plan.api_servers).map(|_| ApiServer::new(&mut rng, &plan)).collect();
        Self {
            options,
            seed,
            plan,
            rng,
            report_rng,
            now: 0,
            sequence: 0,
            queue: BTreeMap::new(),
            nodes,
            network: Network::default(),
            clients,
            streams,
            servers,
            operators,
            latest_members: latest,
            change_requests: BTreeSet::new(),
            proposed_changes: Vec::new(),
            invariants,
            next_id: 1,
            bodies: 0,
            refused_requests: Vec::new(),
            are_faults_over: false,
            leadership_since: 0,
            leaders,
            report: SimulationReport::default(),
        }
    }

    /// Runs the history to its end.
    pub(super) fn run(mut self) -> Result<SimulationReport, InvariantViolation> {
        for id in 1..=self.plan.members {
            self.start(id)?;
        }
        for client in 0..self.clients.len() {
            let after = self.rng.range(1, 200_000);
            self.schedule(after, ScheduledEvent::Client { client });
        }
        for stream in 0..self.streams.len() {
            let after = self.rng.range(1, 100_000);
            self.schedule(after, ScheduledEvent::Stream { stream });
        }
        for server in 0..self.servers.len() {
            let after = self.rng.range(1, 100_000);
            self.schedule(after, ScheduledEvent::ApiServer { server });
        }
        for operator in 0..self.operators.len() {
            let after = self.rng.range(1, 300_000);
            self.schedule(after, ScheduledEvent::Operator { operator });
        }
        self.begin_faults();
        while self.now < self.options.duration {
            self.step()?;
        }
        self.end_faults()?;
        self.schedule(STRANDED_TIMEOUT, ScheduledEvent::GiveUpStranded);
        let deadline = self.now + SETTLE_TIMEOUT;
        while !self.is_settled() {
            if self.now > deadline {
                return Err(stuck(self.describe_state()));
            }
            self.step()?;
        }
        self.finish()
    }

    pub(super) fn schedule(&mut self, delay: u64, event: ScheduledEvent) {
        self.sequence += 1;
        self.queue.insert((self.now + delay, self.sequence), event);
    }

    pub(super) fn node(&mut self, id: u64) -> &mut SimulatedNode {
        &mut self.nodes[index_of(id)]
    }

    pub(super) fn add_to_trace(&mut self, parts: &[u64]) {
        for part in parts {
            self.report.trace =
                (self.report.trace.rotate_left(5) ^ part).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
    }

    #[allow(clippy::too_many_lines, reason = "a table: one method for each event")]
    pub(super) fn step(&mut self) -> Result<(), InvariantViolation> {
        let Some(((at, _), event)) = self.queue.pop_first() else {
            return Err(stuck("nothing is left to happen".to_owned()));
        };
        self.now = at;
        self.report.steps += 1;
        self.add_to_trace(&[at]);
        match event {
            ScheduledEvent::Tick { node, generation } => self.tick(node, generation),
            ScheduledEvent::CommitIndexDue { node, generation } => {
                self.send_due_commit_index(node, generation)
            }
            ScheduledEvent::HeldHeartbeatsDue { node, generation, round } => {
                self.send_due_held_heartbeats(node, generation, round)
            }
            ScheduledEvent::ReadRoundDue { node, generation, round } => {
                self.start_due_read_round(node, generation, round)
            }
            ScheduledEvent::Deliver { to, generation, bytes, body } => {
                self.deliver(to, generation, bytes, body)
            }
            ScheduledEvent::Core { node, generation } => self.run_delayed_core(node, generation),
            ScheduledEvent::MaintainStreams { node, generation } => {
                self.maintain_streams(node, generation)
            }
            ScheduledEvent::LogDone { node, generation } => {
                self.complete_log_write(node, generation)
            }
            ScheduledEvent::ApplyDone { node, generation } => {
                self.complete_apply_turn(node, generation)
            }
            ScheduledEvent::Fetch { node, generation, fetch } => {
                self.fetch_entries(node, generation, fetch)
            }
            ScheduledEvent::SnapshotWritten { node, generation } => {
                self.write_snapshot(node, generation)
            }
            ScheduledEvent::CheckpointDone { node, generation } => {
                self.run_checkpoint(node, generation)
            }
            ScheduledEvent::SnapshotReport { node, generation, peer, arrived } => {
                self.notice(node, generation, Notice::SnapshotSent { peer, arrived })
            }
            ScheduledEvent::Client { client } => self.start_client_request(client),
            ScheduledEvent::ClientTimeout { client, id } => self.handle_client_timeout(client, id),
            ScheduledEvent::LeaseEntryDue { node, generation, request, data } => {
                self.propose_lease_entry(node, generation, request, data)
            }
            ScheduledEvent::KeepAlive { node, generation, client, id, lease } => {
                self.keep_alive((node, generation), client, id, lease)
            }
            ScheduledEvent::CompactStep { node, generation } => self.compact_step(node, generation),
            ScheduledEvent::Hub { node, generation } => {
                self.run_hub(node, generation);
                Ok(())
            }
            ScheduledEvent::Stream { stream } => self.run_watch_stream(stream),
            ScheduledEvent::ApiServer { server } => self.run_api_server_stream(server),
            ScheduledEvent::Restart { node } => self.start(node),
            ScheduledEvent::StateArrives { node, generation, body } => {
                self.receive_initial_state(node, generation, &body)
            }
            ScheduledEvent::RemovalReported { node, generation } => {
                self.receive_removal_report(node, generation)
            }
            ScheduledEvent::Leave { node, generation } => {
                self.leave_after_removal(node, generation)
            }
            ScheduledEvent::GiveUpStranded => {
                self.remove_stranded_member();
                Ok(())
            }
            ScheduledEvent::Move { node } => self.restart_at_new_address(node),
            ScheduledEvent::Operator { operator } => self.run_operator(operator),
            ScheduledEvent::OperatorTimeout { operator, number } => {
                self.end_operator_request(operator, number);
                Ok(())
            }
            ScheduledEvent::OperatorAnswered { operator, number } => {
                self.receive_operator_answer(operator, number);
                Ok(())
            }
            ScheduledEvent::ChangeRequested { node, generation, change } => {
                self.handle_change_as_leader(node, generation, change)
            }
            ScheduledEvent::ChangeEnds { node, generation, request } => {
                let same = self.node(node).generation == generation;
                if same { self.finish_change(node, request, None) } else { Ok(()) }
            }
            ScheduledEvent::Fault(kind) => self.inject_fault(kind),
            ScheduledEvent::DiskSpaceReturns { node } => {
                self.node(node).disk.limit_free_bytes(u64::MAX);
                Ok(())
            }
            ScheduledEvent::Rejoin { node, was_leader, until } => {
                self.rejoin(node, was_leader, until);
                Ok(())
            }
            ScheduledEvent::CutWrite { node, generation } => {
                self.cut_power_during_write(node, generation);
                Ok(())
            }
        }
    }

    pub(super) fn random_machine(&mut self) -> u64 {
        self.rng.range(1, self.nodes.len() as u64 + 1)
    }

    /// Returns a machine that serves clients: one whose member is a voter in the member table of
    /// the most advanced store.
    pub(super) fn random_voter(&mut self) -> u64 {
        let voters: Vec<u64> =
            self.nodes.iter().filter(|node| self.is_voter(node)).map(|node| node.id).collect();
        if voters.is_empty() { self.random_machine() } else { voters[self.rng.pick(voters.len())] }
    }

    pub(super) fn start(&mut self, id: u64) -> Result<(), InvariantViolation> {
        let node = &self.nodes[index_of(id)];
        if node.process.is_some() || node.has_ended_for_good {
            return Ok(());
        }
        let (plan, guards) = (self.plan.clone(), self.options.guards);
        match node.start_evidence().start_kind(guards) {
            Err(StartRefusal::Removed) => {
                self.refuse_start(id);
                return Ok(());
            }
            Err(StartRefusal::LogMissing) => return Err(broken(id, "its log is gone")),
            // A machine with a tombstone gets here only if a test has switched off the check of
            // tombstones.
            Ok(StartKind::First) if node.files.tombstone => {}
            Ok(StartKind::First) if !node.is_founder(&plan) => return self.start_joining(id),
            Ok(StartKind::First | StartKind::Restart) => {}
        }
        let node = &self.nodes[index_of(id)];
        self.invariants.removed.check_start(id, node.member, node.files.incarnation)?;
        let seed = self.seed ^ (id << 32);
        let node = self.node(id);
        let generation = node.generation + 1;
        if let Err(end) = node.boot(&plan, seed ^ generation, guards) {
            return self.handle_process_end(id, end);
        }
        let node = &self.nodes[index_of(id)];
        let last = node.process.as_ref().map_or(0, |process| process.log_summary.last);
        self.invariants.counts.record_durable(node.member, last);
        self.check_member_table(id)?;
        let (generation, was_torn) = (self.node(id).generation, self.node(id).was_torn());
        self.report.torn += u64::from(was_torn);
        let delay = self.rng.range(1, TICK);
        self.schedule(delay, ScheduledEvent::Tick { node: id, generation });
        self.check_store(id, false)?;
        self.schedule(delay, ScheduledEvent::CompactStep { node: id, generation });
        let delay = self.rng.range(200, 5_000);
        self.schedule(delay, ScheduledEvent::MaintainStreams { node: id, generation });
        self.run_rounds(id)
    }

    /// Returns whether the faults have ended and all members have agreed on one leader for a while.
    pub(super) fn is_steady(&self) -> bool {
        let mut leaders = self.acting_machines().map(|node| self.leaders[index_of(node.id)]);
        let first = leaders.next().unwrap_or_default();
        let agreed = first.0 != 0 && leaders.all(|leader| leader == first);
        self.are_faults_over && agreed && self.now - self.leadership_since > STEADY_TIME
    }

    /// Returns whether a request to `node` must be answered now. A write to a follower need not be
    /// answered, because the follower gets no answer if the leader can't take the proposal.
    pub(super) fn must_be_answered(&self, node: u64, is_write: bool) -> bool {
        let machine = &self.nodes[index_of(node)];
        let is_leader = self.leaders[index_of(node)].0 == machine.member;
        let leader_accepts = self.plan.has_room_for_forwarded() || is_leader;
        self.is_voter(machine) && self.is_steady() && (leader_accepts || !is_write)
    }

    /// Returns whether the client needs no more requests: the faults have ended, and enough of its
    /// requests were answered.
    pub(super) fn is_client_satisfied(&self, client: usize) -> bool {
        let is_listing =
            self.api_server_index(client).is_some_and(|server| self.servers[server].is_listing());
        self.are_faults_over && self.clients[client].served >= REQUIRED_ANSWERS && !is_listing
    }

    /// Returns whether the cluster has settled. All members run, agree and have nothing left to do.
    /// All clients have been served, and all watches have received everything.
    pub(super) fn is_settled(&self) -> bool {
        let idle = (0..self.clients.len()).all(|client| {
            self.clients[client].pending.is_none() && self.is_client_satisfied(client)
        });
        let mut positions = self.acting_machines().map(|node| {
            let process = node.process.as_ref()?;
            let status = process.core.driver().status();
            let applied = process.applier.machine().applied();
            let connected = process.core.driver().is_quorum_connected();
            let is_caught_up = connected && status.leader != 0 && status.commit == status.last;
            is_caught_up.then_some((status.leader, status.last, applied))
        });
        if !idle {
            return false;
        }
        let first = positions.next().flatten();
        let is_applied = first.is_some_and(|(_, last, applied)| applied.index == last);
        let model = &self.invariants.stores.model;
        is_applied
            && positions.all(|position| position == first)
            && self.streams.iter().all(|stream| stream.watch.is_done(model))
            && self.servers.iter().all(|server| server.is_at(model.newest_revision()))
            && self.has_no_learner_to_promote()
            && model.leases.all.is_empty()
    }

    pub(super) fn describe_state(&self) -> String {
        let served: Vec<u64> = self.clients.iter().map(|client| client.served).collect();
        let table = self.latest_table();
        let mut text = format!("served {served:?}; members {:?}", table.voters_and_learners());
        for stream in &self.streams {
            text = format!("{text}; {:?}", stream.watch);
        }
        for server in &self.servers {
            text = format!("{text}; {server:?}");
        }
        for node in &self.nodes {
            let status = node.process.as_ref().map(|process| process.core.driver().status());
            let (member, lost) = (node.member, node.has_lost_promises);
            text = format!("{text}; {} is {member} (lost: {lost}): {status:?}", node.id);
        }
        text
    }

    /// Checks that a member's store holds what the model holds.
    pub(super) fn check_store(&mut self, id: u64, all: bool) -> Result<(), InvariantViolation> {
        let Some(process) = &self.nodes[index_of(id)].process else { return Ok(()) };
        self.invariants.stores.check_contents(id, &process.store, all)
    }

    /// Compares all members' data as member `id` would if it checked for corruption now. No
    /// difference may ever be found.
    pub(super) fn check_corruption(&mut self, id: u64) -> Result<(), InvariantViolation> {
        let Some(view) = self.nodes[index_of(id)].store_view() else { return Ok(()) };
        let (question, members) = (Question::of(&view), view.members().voters_and_learners());
        let mut claims_by_member = BTreeMap::new();
        for node in self.acting_machines() {
            let Some(process) = &node.process else { continue };
            // A member whose disk fails gives no answer.
            let Ok(claims) = make_claims(&process.store, &process.store.view(), question) else {
                continue;
            };
            claims_by_member.insert(node.member, claims);
        }
        let verdict = judge_claims(&members.voters.into_iter().collect(), &claims_by_member);
        self.report.compared += verdict.compared.len() as u64;
        if verdict.corrupt.is_empty() && !verdict.is_undecided {
            return Ok(());
        }
        Err(InvariantViolation::new(
            "no false alarm",
            format!("{id} asks {question:?}: {verdict:?}, {claims_by_member:?}"),
        ))
    }

    pub(super) fn finish(mut self) -> Result<SimulationReport, InvariantViolation> {
        for id in 1..=self.nodes.len() as u64 {
            if self.acts_for_member(&self.nodes[index_of(id)]) {
                self.check_corruption(id)?;
            }
        }
        let mut hashes = Vec::new();
        for id in 1..=self.nodes.len() as u64 {
            if self.acts_for_member(&self.nodes[index_of(id)]) {
                self.check_store(id, true)?;
            }
        }
        for node in self.acting_machines() {
            let Some(process) = &node.process else { continue };
            let view = process.store.view();
            let hash = process
                .store
                .hash_kv(&view, 0)
                .map_err(|error| broken(node.id, &format!("hashing failed: {error:?}")))?;
            hashes.push((node.id, hash.hash, view.revision()));
        }
        if let Some(differing) = hashes.iter().find(|(_, hash, _)| *hash != hashes[0].1) {
            let what = format!("{} holds other data than {}", differing.0, hashes[0].0);
            return Err(InvariantViolation::new("equal stores", what));
        }
        self.check_equal_members()?;
        self.invariants.acks.check(&self.invariants.machines, hashes[0].2)?;
        if let Some(id) =
            self.refused_requests.iter().find(|id| self.invariants.machines.has_request(**id))
        {
            let what = format!("put {id} was refused for good and is committed");
            return Err(InvariantViolation::new("a refusal is final", what));
        }
        self.add_to_trace(&[u64::from(hashes[0].1)]);
        self.report.elections = self.invariants.elections.elections();
        self.report.leases_expired = self.invariants.leases.expired;
        self.report.outdated_clocks = self.invariants.stores.model.leases.outdated;
        self.report.committed = self.invariants.machines.last();
        Ok(self.report)
    }
}
