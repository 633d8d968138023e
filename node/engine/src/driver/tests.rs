//! Tests of the driver's threads with real files and a simple state machine. Faults of timing are
//! tested by the simulation.

mod cluster;
mod commit_index;
mod ended_leader;
mod first_election;
mod follower;
mod hand_over;
mod leader;
mod reads;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use node_consensus::{Config, InitialState};
use node_state::disk::{RealDisk, SharedDisk};
use node_state::state_machine::{
    AppliedChange, ApplyResult, CheckpointWork, CommittedEntry, ConfChange, EntryKind, Members,
    RequestId, Snapshot, StateMachine,
};

use super::*;
use crate::log::{Log, LogIdentity, LogOptions};

/// State machine that lists the requests it has applied, in order. A checkpoint writes the list to
/// a file.
struct List {
    applied: Position,
    durable: Arc<Mutex<Position>>,
    requests: Vec<u64>,
    members: Members,
    file: PathBuf,
}

impl List {
    fn open(dir: &Path) -> Self {
        let file = dir.join("list");
        let mut list = Self {
            applied: Position::default(),
            durable: Arc::default(),
            requests: Vec::new(),
            members: Members::default(),
            file,
        };
        if let Ok(bytes) = std::fs::read(&list.file) {
            list.load(&bytes);
        }
        list
    }

    fn save(&self) -> Vec<u8> {
        let mut numbers = vec![self.applied.index, self.applied.term];
        for ids in [&self.members.voters, &self.members.learners] {
            numbers.push(ids.len() as u64);
            numbers.extend(ids);
        }
        numbers.extend(&self.requests);
        numbers.iter().flat_map(|number| number.to_be_bytes()).collect()
    }

    fn load(&mut self, bytes: &[u8]) {
        let mut numbers: Vec<u64> =
            bytes.chunks(8).map(|chunk| u64::from_be_bytes(chunk.try_into().unwrap())).collect();
        let mut take =
            |count: u64| -> Vec<u64> { numbers.drain(..usize::try_from(count).unwrap()).collect() };
        let at = take(2);
        self.applied = Position { index: at[0], term: at[1] };
        let mut ids = || {
            let count = take(1)[0];
            take(count)
        };
        self.members = Members { voters: ids(), learners: ids() };
        self.requests = numbers;
        *self.durable.lock().unwrap() = self.applied;
    }
}

/// Snapshot of a [`List`]: its position, the members, and the content of the list's file.
struct ListSnapshot(Position, Members, Vec<u8>);

impl Snapshot for ListSnapshot {
    type Error = std::io::Error;

    fn position(&self) -> Position {
        self.0
    }

    fn members(&self) -> Members {
        self.1.clone()
    }

    fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        out.write_all(&self.2)
    }
}

impl StateMachine for List {
    type Outcome = u64;
    type Error = std::io::Error;
    type Snapshot = ListSnapshot;

    fn is_final(_: &std::io::Error) -> bool {
        false
    }

    fn applied(&self) -> Position {
        self.applied
    }

    fn durable(&self) -> Position {
        *self.durable.lock().unwrap()
    }

    fn members(&self) -> Members {
        self.members.clone()
    }

    fn apply(&mut self, entries: &[CommittedEntry]) -> std::io::Result<ApplyResult<u64>> {
        let (mut outcomes, mut changes) = (Vec::new(), Vec::new());
        for entry in entries {
            assert_eq!(entry.position.index, self.applied.index + 1);
            self.applied = entry.position;
            if entry.kind == EntryKind::NoOp {
                continue;
            }
            let id = u64::from_be_bytes(entry.data[..8].try_into().unwrap());
            outcomes.push((RequestId(id), entry.position.index));
            if entry.kind == EntryKind::ConfChange {
                let learner = u64::from_be_bytes(entry.data[8..].try_into().unwrap());
                let index = entry.position.index;
                self.members.learners.push(learner);
                let change = Some(ConfChange::Learner(learner));
                changes.push(AppliedChange { index, change, members: self.members.clone() });
                continue;
            }
            self.requests.push(id);
        }
        Ok(ApplyResult { position: self.applied, outcomes, changes })
    }

    fn unflushed_bytes(&self) -> usize {
        0
    }

    fn checkpoint(&self) -> CheckpointWork<std::io::Error> {
        let (file, bytes, at) = (self.file.clone(), self.save(), self.applied);
        let durable = Arc::clone(&self.durable);
        Box::new(move || {
            std::fs::write(&file, bytes)?;
            *durable.lock().unwrap() = at;
            Ok(at)
        })
    }

    fn snapshot(&self) -> ListSnapshot {
        ListSnapshot(self.applied, self.members.clone(), self.save())
    }

    fn install_snapshot(&mut self, input: &mut dyn Read) -> std::io::Result<Position> {
        let mut bytes = Vec::new();
        input.read_to_end(&mut bytes)?;
        self.load(&bytes);
        self.checkpoint()()
    }
}

/// Network that connects members in one process. It encodes and decodes each message.
#[derive(Clone, Default)]
struct Net(Arc<Mutex<BTreeMap<u64, (PeerInbox, PathBuf)>>>);

impl PeerSender for Net {
    fn try_send(&self, message: Message) -> Result<(), SendError> {
        let mut bytes = BytesMut::new();
        message.encode(&mut bytes);
        let message = Message::decode(bytes.freeze()).expect("what is sent can be read");
        let peers = self.0.lock().unwrap();
        let (inbox, _) = peers.get(&message.to).ok_or(SendError::NotConnected)?;
        inbox.deliver(message.from, message).map_err(|_| SendError::Full)
    }

    fn send_snapshot(&self, mut snapshot: OutgoingSnapshot) {
        let peers = self.0.lock().unwrap();
        let (from, to) = (snapshot.message.from, snapshot.message.to);
        let Some((inbox, dir)) = peers.get(&to) else { return };
        let body = dir.join("incoming");
        std::io::copy(&mut snapshot.body, &mut std::fs::File::create(&body).unwrap()).unwrap();
        let _ = inbox.deliver_snapshot(IncomingSnapshot { message: snapshot.message, body });
        peers[&from].0.snapshot_sent(to, true);
    }
}

struct DriverNode {
    handle: Handle<u64>,
    running: RunningDriver,
}

struct ThreadedCluster {
    dir: tempfile::TempDir,
    net: Net,
    voters: Vec<u64>,
    tick: Duration,
}

impl ThreadedCluster {
    fn new(size: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tick = Duration::from_millis(10);
        Self { dir, net: Net::default(), voters: (1..=size).collect(), tick }
    }

    fn start(&self, member: u64) -> DriverNode {
        let dir = self.dir.path().join(member.to_string());
        std::fs::create_dir_all(&dir).unwrap();
        let disk: SharedDisk = Arc::new(RealDisk);
        let small = LogOptions {
            segment_bytes: 64 * 1024,
            fill_bytes: 64 * 1024,
            max_record_bytes: 32 * 1024,
            ..LogOptions::default()
        };
        if !Log::exists(&disk, &dir).unwrap() {
            let identity = LogIdentity { cluster: 9, member, incarnation: 5 };
            Log::create(&disk, &dir, &identity, &small).unwrap();
        }
        let (log, recovered) = Log::open(&disk, &dir, &small).unwrap();
        let mut options = MemberOptions::new(member, dir.join("snapshots"));
        options.tick = self.tick;
        options.request_timeout = Duration::from_secs(30);
        options.campaign_when_connected = member == 1;
        options.catch_up_entries = 1;
        let mut machine = List::open(&dir);
        if machine.members == Members::default() {
            machine.members.voters.clone_from(&self.voters);
        }
        let parts = MemberParts {
            options,
            machine,
            log,
            recovered,
            sender: Arc::new(self.net.clone()),
            seed: member,
        };
        let (handle, inbox, running) = start(parts).unwrap();
        let mut peers = self.net.0.lock().unwrap();
        for (id, (peer, _)) in peers.iter() {
            peer.connected(member);
            inbox.connected(*id);
        }
        peers.insert(member, (inbox, dir.join("snapshots")));
        DriverNode { handle, running }
    }

    fn stop(&self, member: u64, node: DriverNode) {
        self.net.0.lock().unwrap().remove(&member);
        node.running.stop();
    }
}

fn payload(id: u64, bytes: usize) -> Bytes {
    let mut data = id.to_be_bytes().to_vec();
    data.resize(8 + bytes, 7);
    Bytes::from(data)
}

async fn put(node: &DriverNode, id: u64) -> Result<u64, ProposeError> {
    node.handle.propose(payload(id, 100), RequestId(id)).await
}

#[tokio::test]
async fn a_single_voter_answers_and_keeps_requests_after_a_restart() {
    let cluster = ThreadedCluster::new(1);
    let node = cluster.start(1);
    let first = put(&node, 1).await.unwrap();
    assert!(node.handle.read_barrier().await.unwrap().index >= first);
    cluster.stop(1, node);
    let node = cluster.start(1);
    assert_eq!(put(&node, 2).await.unwrap(), first + 2);
    cluster.stop(1, node);
    assert_eq!(List::open(&cluster.dir.path().join("1")).requests, [1, 2]);
}

#[tokio::test]
async fn any_member_takes_proposals_and_answers_reads() {
    let cluster = ThreadedCluster::new(3);
    let nodes: Vec<_> = (1..=3).map(|member| cluster.start(member)).collect();
    for (id, node) in (1..=3).zip(&nodes) {
        let at = put(node, id).await.unwrap();
        for other in &nodes {
            assert!(other.handle.read_barrier().await.unwrap().index >= at);
        }
    }
    for (member, node) in (1..=3).zip(nodes) {
        cluster.stop(member, node);
    }
    for member in ["1", "2", "3"] {
        assert!(!List::open(&cluster.dir.path().join(member)).requests.is_empty());
    }
}

#[tokio::test]
async fn leadership_is_handed_over_on_request() {
    let cluster = ThreadedCluster::new(3);
    let nodes: Vec<_> = (1..=3).map(|member| cluster.start(member)).collect();
    put(&nodes[0], 1).await.unwrap();
    let leader = nodes[0].handle.status().borrow().leader;
    let to = leader % 3 + 1;
    let follower = &nodes[usize::try_from(to - 1).unwrap()];
    assert_eq!(follower.handle.transfer_leader(leader).await, Err(TransferError::NotLeader));
    let old = &nodes[usize::try_from(leader - 1).unwrap()];
    old.handle.transfer_leader(to).await.unwrap();
    assert_eq!(old.handle.status().borrow().leader, to);
    put(old, 2).await.unwrap();
}

#[tokio::test]
async fn a_member_that_missed_more_than_the_log_holds_gets_a_snapshot() {
    let cluster = ThreadedCluster::new(3);
    let mut nodes: BTreeMap<_, _> = (1..=3).map(|member| (member, cluster.start(member))).collect();
    put(&nodes[&1], 1).await.unwrap();
    let leader = nodes[&1].handle.status().borrow().leader;
    let lagging = leader % 3 + 1;
    cluster.stop(lagging, nodes.remove(&lagging).unwrap());
    let mut id = 1;
    let mut status = nodes[&leader].handle.status();
    // Write enough entries to make the leader checkpoint the store and remove old log segments.
    while status.borrow_and_update().first < 10 {
        for _ in 0..100 {
            id += 1;
            let payload = payload(id, 20_000);
            nodes[&leader].handle.propose(payload, RequestId(id)).await.unwrap();
        }
    }
    nodes.insert(lagging, cluster.start(lagging));
    // Wait for the snapshot first. A request proposed earlier might be part of the snapshot, and
    // such a request gets no outcome.
    nodes[&lagging].handle.read_barrier().await.unwrap();
    id += 1;
    put(&nodes[&lagging], id).await.unwrap();
    let metrics = nodes[&lagging].handle.metrics();
    assert_eq!(metrics.snapshots_installed.load(std::sync::atomic::Ordering::Relaxed), 1);
    // After the transfer, every member must have removed the snapshot body, which is as large as
    // the store.
    let bodies = || {
        let of = |member: u64| cluster.dir.path().join(member.to_string()).join("snapshots");
        (1..=3).map(|member| std::fs::read_dir(of(member)).unwrap().count()).sum::<usize>()
    };
    let start = std::time::Instant::now();
    while bodies() > 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "a body stays");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    cluster.stop(lagging, nodes.remove(&lagging).unwrap());
    let expected: Vec<u64> = (1..=id).collect();
    assert_eq!(List::open(&cluster.dir.path().join(lagging.to_string())).requests, expected);
}

#[tokio::test]
async fn a_request_without_a_quorum_fails_with_the_reason() {
    let cluster = ThreadedCluster::new(3);
    let node = cluster.start(1);
    let mut short = node.handle.clone();
    let mut options = (*short.options).clone();
    options.request_timeout = Duration::from_millis(50);
    short.options = Arc::new(options);
    assert_eq!(short.propose(payload(1, 1), RequestId(1)).await, Err(ProposeError::NoLeader));
    assert_eq!(short.read_barrier().await, Err(ReadBarrierError::NoLeader));
    cluster.stop(1, node);
    assert_eq!(short.propose(payload(2, 1), RequestId(2)).await, Err(ProposeError::Stopped));
}

/// The member was removed. Its peers drop proposals that it forwards, so without an error its
/// requests would wait for an answer.
#[tokio::test]
async fn waiting_requests_fail_at_once_when_their_member_leaves() {
    let cluster = ThreadedCluster::new(3);
    let node = cluster.start(1);
    let (write, read) = (put(&node, 1), node.handle.read_barrier());
    let leave = async {
        // At this point the write and the read both wait.
        tokio::task::yield_now().await;
        node.handle.leave();
    };
    let (write, read, ()) = tokio::join!(write, read, leave);
    assert_eq!((write, read), (Err(ProposeError::Stopped), Err(ReadBarrierError::Stopped)));
    assert_eq!(put(&node, 2).await, Err(ProposeError::Stopped));
}

#[tokio::test]
async fn all_members_apply_a_change_of_members_and_keep_it_after_a_restart() {
    let cluster = ThreadedCluster::new(3);
    let nodes: Vec<_> = (1..=3).map(|member| cluster.start(member)).collect();
    let changed = Members { voters: vec![1, 2, 3], learners: vec![9] };
    put(&nodes[0], 1).await.unwrap();
    let change = Bytes::from([2_u64.to_be_bytes(), 9_u64.to_be_bytes()].concat());
    nodes[0].handle.propose_change(change, RequestId(2)).await.unwrap();
    for node in &nodes {
        let mut status = node.handle.status();
        status.wait_for(|now| *now.members == changed).await.unwrap();
    }
    for (member, node) in (1..=3).zip(nodes) {
        cluster.stop(member, node);
    }
    let node = cluster.start(2);
    assert_eq!(*node.handle.status().borrow().members, changed);
    cluster.stop(2, node);
}

fn options(max_backlog_bytes: usize) -> DriverOptions {
    DriverOptions {
        campaign_when_connected: false,
        hasten_first_election: false,
        catch_up_entries: 5,
        proposal_ticks: 100,
        read_retry_ticks: 2,
        min_shared_reads: 4,
        max_backlog_bytes,
    }
}

/// A follower full of uncommitted entries drops every append, even one that would replace those
/// entries. So the limit on uncommitted bytes must stay below `max_backlog_bytes`.
#[test]
#[should_panic(expected = "1000 are no bound on the backlog")]
fn the_limit_on_uncommitted_bytes_must_be_below_the_backlog_limit() {
    let only = Members { voters: vec![1], learners: Vec::new() };
    let initial = InitialState { members: only, ..InitialState::default() };
    let config = Config { max_uncommitted_bytes: 1_000, ..Config::new(1, 1, 1) };
    drop(DriverCore::new(&config, options(1_000), &initial));
}

/// Returns the driver of a single voter. Its state machine has applied `change` and reports
/// `members` as the new members.
fn after_a_change(change: ConfChange, members: Members) -> DriverCore {
    let only = Members { voters: vec![1], learners: Vec::new() };
    let initial = InitialState { members: only, ..InitialState::default() };
    let mut driver = DriverCore::new(&Config::new(1, 1, 1), options(128 << 20), &initial).unwrap();
    let data = Bytes::from_static(b"a change");
    let mut pending = Some(ClientProposal { id: RequestId(1), kind: EntryKind::ConfChange, data });
    loop {
        let effects = driver.advance();
        if let Some((number, _)) = effects.persist.last() {
            driver.notice(Notice::Persisted(*number));
        }
        for entry in effects.apply {
            let (at, index) = (entry.position, entry.position.index);
            let mut changes = Vec::new();
            let done = entry.kind == EntryKind::ConfChange;
            if done {
                let (change, members) = (Some(change), members.clone());
                changes.push(AppliedChange { index, change, members });
            }
            driver.notice(Notice::Applied { at, changes });
            if done {
                return driver;
            }
            driver.propose(pending.take());
        }
    }
}

#[test]
fn consensus_counts_a_new_voter_once_its_change_is_applied() {
    let changed = Members { voters: vec![1, 2], learners: Vec::new() };
    let driver = after_a_change(ConfChange::Voter(2), changed.clone());
    assert_eq!(**driver.members(), changed);
    assert!(!driver.is_quorum_connected(), "one of two is no majority");
}

#[test]
#[should_panic(expected = "the member table says Members { voters: [1, 2], learners: [] }")]
fn a_member_table_that_disagrees_with_consensus_ends_the_process() {
    // etcd issue 21694: the member table forgot that a member is a learner.
    after_a_change(ConfChange::Learner(2), Members { voters: vec![1, 2], learners: Vec::new() });
}

#[test]
#[should_panic(expected = "the member table says Members { voters: [1], learners: [] }")]
fn a_snapshot_whose_members_do_not_fit_its_position_ends_the_process() {
    let changed = Members { voters: vec![1], learners: vec![2] };
    let mut driver = after_a_change(ConfChange::Learner(2), changed.clone());
    let before = Members { voters: vec![1], learners: Vec::new() };
    let (now, _) = driver.positions();
    let earlier = Position { index: now.index - 1, term: now.term };
    driver.notice(Notice::Built(Some((earlier, before.clone()))));
    driver.notice(Notice::Built(Some((now, changed))));
    driver.notice(Notice::Built(Some((now, before))));
}
