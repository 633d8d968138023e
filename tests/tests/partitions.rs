//! Partitions during each kind of membership change, on hosts with their own addresses. A client
//! writes all the time. Whatever was cut off and whether or not the change was made, every
//! acknowledged write must be on every member afterwards.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use muster_tests::client::{EtcdClient, channel};
use muster_tests::harness::{Network, NodeProcess, TestHost, nodes, programs};
use node_proto::etcdserverpb::cluster_client::ClusterClient;
use node_proto::etcdserverpb::{
    self as pb, MemberAddRequest, MemberListRequest, MemberPromoteRequest, MemberRemoveRequest,
    MemberUpdateRequest, RangeRequest, StatusResponse,
};
use tonic::{Status, transport::Channel};

/// Time limit of each wait; a test that passes waits much less.
const LIMIT: Duration = Duration::from_secs(60);
/// Duration of a partition, which is more than twice that of an election.
const CUT_TIME: Duration = Duration::from_millis(2_500);
/// Time limit of one call. A change that timed out may still be made later.
const CALL_LIMIT: Duration = Duration::from_secs(2);
const PUT_LIMIT: Duration = Duration::from_millis(300);
/// Index of the host whose member is added. The first members' hosts are 0 to 2.
const SPARE: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq)]
enum MembershipChange {
    AddVoter,
    AddLearner,
    Promote,
    RemoveFollower,
    RemoveLeader,
    Update,
}

/// Connections that a partition cuts, and in which direction.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Partition {
    Leader,
    LeaderOutbound,
    LeaderInbound,
    Target,
    Follower,
    OneLink,
}

const PARTITIONS: [Partition; 6] = [
    Partition::Leader,
    Partition::LeaderOutbound,
    Partition::LeaderInbound,
    Partition::Target,
    Partition::Follower,
    Partition::OneLink,
];

#[test]
fn adding_a_voter_loses_no_write() -> Result<()> {
    partitions_during(MembershipChange::AddVoter)
}

#[test]
fn adding_a_learner_loses_no_write() -> Result<()> {
    partitions_during(MembershipChange::AddLearner)
}

#[test]
fn promoting_loses_no_write() -> Result<()> {
    partitions_during(MembershipChange::Promote)
}

#[test]
fn removing_a_follower_loses_no_write() -> Result<()> {
    partitions_during(MembershipChange::RemoveFollower)
}

#[test]
fn removing_the_leader_loses_no_write() -> Result<()> {
    partitions_during(MembershipChange::RemoveLeader)
}

#[test]
fn moving_a_member_loses_no_write() -> Result<()> {
    partitions_during(MembershipChange::Update)
}

/// The firewall between the leader and one follower rejects packets. To that follower, the leader's
/// process seems to have ended.
#[test]
fn a_leader_that_a_majority_hears_keeps_its_term_while_connections_are_refused() -> Result<()> {
    with_three_members(async |cluster, leader| {
        let term = cluster.term(leader).await?;
        let (refused, hears) = ((leader + 1) % SPARE, (leader + 2) % SPARE);
        cluster.network.reset_connections(leader, refused)?;
        // The follower's connections to the leader are refused. So it believes that the leader's
        // process has ended, and tries to become leader.
        retry("the follower forgets its leader", async || {
            let status = cluster.status(refused).await?;
            ensure!(status.leader == 0, "it follows {:x}", status.leader);
            Ok(())
        })
        .await?;
        tokio::time::sleep(CUT_TIME).await;
        ensure!(cluster.settled(&[leader, hears]).await? == leader, "another one leads");
        cluster.network.heal()?;
        ensure!(cluster.settled(&[0, 1, 2]).await? == leader, "another one leads");
        let now = cluster.term(leader).await?;
        ensure!(now == term, "an election: term {now} after {term}");
        Ok(())
    })
}

/// The firewall rejects all packets from and to the leader's host. The leader's process keeps
/// running.
#[test]
fn a_leader_whose_connections_are_all_refused_is_replaced_and_comes_back() -> Result<()> {
    with_three_members(async |cluster, leader| {
        let others: Vec<usize> = (0..SPARE).filter(|host| *host != leader).collect();
        others.iter().try_for_each(|host| cluster.network.reset_connections(leader, *host))?;
        let next = cluster.settled(&others).await?;
        ensure!(next != leader, "it still leads");
        cluster.network.heal()?;
        let agreed = cluster.settled(&[0, 1, 2]).await?;
        ensure!(agreed != leader, "it leads again");
        Ok(())
    })
}

/// Runs `test` on a cluster of three that has a leader, while a client writes. Afterwards every
/// member must have every acknowledged write.
fn with_three_members(
    test: impl AsyncFnOnce(&PartitionedCluster, usize) -> Result<()>,
) -> Result<()> {
    if !Network::can_be_cut() {
        return Ok(());
    }
    let network = Network::namespaces(4)?;
    network.hub.enter_namespace()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let cluster = PartitionedCluster::start(network, "1000")?;
        let leader = cluster.settled(&[0, 1, 2]).await?;
        let writer = WriteRecorder::start(&cluster.network)?;
        let result = test(&cluster, leader).await;
        let written = writer.stop();
        result.with_context(|| nodes::last_log_lines(&cluster.nodes))?;
        cluster.check_data(&[0, 1, 2], &written?).await
    })
}

/// Tests all partitions in parallel, each with its own network and cluster.
fn partitions_during(change: MembershipChange) -> Result<()> {
    if !Network::can_be_cut() {
        return Ok(());
    }
    let run = |partition| {
        check_partition(change, partition)
            .with_context(|| format!("{change:?} with {partition:?} cut"))
    };
    std::thread::scope(|scope| {
        let runs = PARTITIONS.map(|partition| scope.spawn(move || run(partition)));
        runs.into_iter().try_for_each(|run| run.join().expect("it fails with an error"))
    })
}

fn check_partition(change: MembershipChange, partition: Partition) -> Result<()> {
    let network = Network::namespaces(4)?;
    network.hub.enter_namespace()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut cluster = PartitionedCluster::start(network, election(change, partition))?;
        let leader = cluster.settled(&[0, 1, 2]).await?;
        let target = cluster.prepare(change, leader).await?;
        let writer = WriteRecorder::start(&cluster.network)?;
        let result = cluster.run_change(change, partition, leader, target, &writer).await;
        let written = writer.stop();
        let members = result.with_context(|| nodes::last_log_lines(&cluster.nodes))?;
        cluster
            .check_data(&members, &written?)
            .await
            .with_context(|| nodes::last_log_lines(&cluster.nodes))
    })
}

/// Whether the change removes a member that is cut off.
fn removes_unreachable_member(change: MembershipChange, partition: Partition) -> bool {
    matches!(change, MembershipChange::RemoveFollower | MembershipChange::RemoveLeader)
        && partition == Partition::Target
}

/// Returns the election timeout in milliseconds. The timeout is long where the test checks that a
/// returning member causes no election, because a busy machine must not cause one either.
fn election(change: MembershipChange, partition: Partition) -> &'static str {
    if removes_unreachable_member(change, partition) { "8000" } else { "1000" }
}

struct PartitionedCluster {
    network: Network,
    nodes: Vec<NodeProcess>,
    ids: Vec<u64>,
    _folder: tempfile::TempDir,
}

impl PartitionedCluster {
    /// Starts three members and prepares a spare host. Health checks of changes are off: a change
    /// that is refused because of the partition would prove nothing.
    fn start(network: Network, election: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let program: PathBuf = programs::program_path("muster-node")?;
        let hosts = network.hosts.iter();
        let mut nodes: Vec<NodeProcess> =
            hosts.map(|host| NodeProcess::new(host, &host.name, &program, folder.path())).collect();
        for node in &mut nodes {
            node.flags.push(format!("--name={}", node.host.name));
            node.flags.push("--strict-reconfig-check=false".to_owned());
            node.flags.push(format!("--election-timeout={election}"));
        }
        let initial = initial_cluster(&network.hosts[..SPARE]);
        for node in &mut nodes[..SPARE] {
            node.flags.push(format!("--initial-cluster={initial}"));
            node.start()?;
        }
        for node in &mut nodes[..SPARE] {
            node.wait_ready(LIMIT)?;
        }
        Ok(Self { network, nodes, ids: Vec::new(), _folder: folder })
    }

    /// Records the member ids, and prepares what the change needs. Returns the host that the change
    /// is about.
    async fn prepare(&mut self, change: MembershipChange, leader: usize) -> Result<usize> {
        for host in 0..SPARE {
            let status = retry("a member's status", async || self.status(host).await).await?;
            self.ids.push(header(&status)?.member_id);
        }
        self.ids.push(0);
        match change {
            MembershipChange::AddVoter | MembershipChange::AddLearner => Ok(SPARE),
            MembershipChange::Promote => {
                self.ids[SPARE] = retry("the spare is a member", async || {
                    let _ = self.request_change(leader, MembershipChange::AddLearner, SPARE).await;
                    self.spare_id(leader).await
                })
                .await?;
                self.start_spare()?;
                Ok(SPARE)
            }
            MembershipChange::RemoveLeader => Ok(leader),
            MembershipChange::RemoveFollower | MembershipChange::Update => Ok((leader + 1) % SPARE),
        }
    }

    /// Cuts the connections, requests the change, heals the partition, and completes the change.
    /// Returns the hosts that are members afterwards.
    async fn run_change(
        &mut self,
        change: MembershipChange,
        partition: Partition,
        leader: usize,
        target: usize,
        writer: &WriteRecorder,
    ) -> Result<Vec<usize>> {
        let before = writer.acknowledged();
        self.cut(partition, leader, target)?;
        // The request goes to a member that is not cut off, so that the change can succeed.
        let follower = (leader + 2) % SPARE;
        let cut_off =
            partition == Partition::Leader || partition == Partition::Target && leader == target;
        let receiver = if cut_off { follower } else { leader };
        // The request may fail, or its answer may be lost. The checks below find out whether the
        // change was made.
        let _ = self.request_change(receiver, change, target).await;
        tokio::time::sleep(CUT_TIME).await;
        let removes =
            matches!(change, MembershipChange::RemoveFollower | MembershipChange::RemoveLeader);
        let term = if removes_unreachable_member(change, partition) {
            let others: Vec<usize> = (0..SPARE).filter(|host| *host != target).collect();
            self.settled(&others).await?;
            self.complete_change(change, target).await?;
            Some(self.term(follower).await?)
        } else {
            None
        };
        self.network.heal()?;
        self.complete_change(change, target).await?;
        let members: Vec<usize> = match (change, removes) {
            (_, true) => (0..SPARE).filter(|host| *host != target).collect(),
            (MembershipChange::Update, _) => (0..SPARE).collect(),
            _ => (0..=SPARE).collect(),
        };
        if removes {
            let code = self.nodes[target].exit_code(LIMIT)?;
            ensure!(code == 3, "a removed member ended with {code}");
        }
        self.settled(&members).await?;
        if let Some(term) = term {
            // The removed member was cut off during the change. It has learned of its removal
            // since, and must not have caused an election.
            let now = self.term(follower).await?;
            ensure!(now == term, "its return has brought term {now} after {term}");
        }
        let start = Instant::now();
        while writer.acknowledged() < before + 50 {
            ensure!(start.elapsed() < LIMIT, "no writes after the partition");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(members)
    }

    fn cut(&self, partition: Partition, leader: usize, target: usize) -> Result<()> {
        let all = 0..=SPARE;
        let (off, hears, is_heard) = match partition {
            Partition::Leader => (leader, false, false),
            Partition::LeaderOutbound => (leader, true, false),
            Partition::LeaderInbound => (leader, false, true),
            Partition::Target => (target, false, false),
            Partition::Follower => ((leader + 1) % SPARE, false, false),
            Partition::OneLink => {
                let other = (leader + 1) % SPARE;
                self.network.cut(leader, other)?;
                return self.network.cut(other, leader);
            }
        };
        for other in all.filter(|other| *other != off) {
            if !hears {
                self.network.cut(other, off)?;
            }
            if !is_heard {
                self.network.cut(off, other)?;
            }
        }
        Ok(())
    }

    async fn request_change(
        &self,
        host: usize,
        change: MembershipChange,
        target: usize,
    ) -> Result<(), Status> {
        let mut api = self.api(host);
        let (id, peer_ur_ls) = (self.ids[target], vec![self.moved(change, target)]);
        let request = async {
            match change {
                MembershipChange::AddVoter | MembershipChange::AddLearner => {
                    let is_learner = change == MembershipChange::AddLearner;
                    let request = MemberAddRequest { peer_ur_ls, is_learner };
                    api.member_add(request).await.map(drop)
                }
                MembershipChange::Promote => {
                    api.member_promote(MemberPromoteRequest { id }).await.map(drop)
                }
                MembershipChange::RemoveFollower | MembershipChange::RemoveLeader => {
                    api.member_remove(MemberRemoveRequest { id }).await.map(drop)
                }
                MembershipChange::Update => {
                    api.member_update(MemberUpdateRequest { id, peer_ur_ls }).await.map(drop)
                }
            }
        };
        let late = |_| Status::deadline_exceeded("the test's own deadline");
        tokio::time::timeout(CALL_LIMIT, request).await.map_err(late)?
    }

    /// Returns the peer URL that the target has after the change.
    fn moved(&self, change: MembershipChange, target: usize) -> String {
        let url = nodes::peer_url(&self.network.hosts[target]);
        if change == MembershipChange::Update { url.replace("2380", "2390") } else { url }
    }

    /// Repeats the request until the change is made, then carries out the steps that follow on the
    /// target's host.
    async fn complete_change(&mut self, change: MembershipChange, target: usize) -> Result<()> {
        let start = Instant::now();
        let url = self.moved(change, target);
        loop {
            // The target itself may have been removed, so ask the other members.
            for host in (0..SPARE).filter(|host| *host != target) {
                let Ok(list) = self.members(host).await else { continue };
                let found = list.iter().find(|member| member.peer_ur_ls.contains(&url));
                let done = match change {
                    MembershipChange::AddVoter
                    | MembershipChange::AddLearner
                    | MembershipChange::Update => found.is_some(),
                    MembershipChange::Promote => found.is_some_and(|member| !member.is_learner),
                    MembershipChange::RemoveFollower | MembershipChange::RemoveLeader => {
                        found.is_none()
                    }
                };
                if done {
                    return self.finish(host, change, target).await;
                }
                let _ = self.request_change(host, change, target).await;
            }
            ensure!(start.elapsed() < LIMIT, "the change was never made");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn finish(&mut self, host: usize, change: MembershipChange, target: usize) -> Result<()> {
        match change {
            MembershipChange::AddVoter => self.start_spare(),
            MembershipChange::AddLearner => {
                let known = async || self.spare_id(host).await;
                self.ids[SPARE] = retry("the spare is a member", known).await?;
                self.start_spare()?;
                let start = Instant::now();
                while let Err(refused) =
                    self.request_change(host, MembershipChange::Promote, SPARE).await
                {
                    // The learner is a voter already: an earlier request has promoted it, although
                    // the answer came too late.
                    if refused.message() == "etcdserver: can only promote a learner member" {
                        break;
                    }
                    ensure!(start.elapsed() < LIMIT, "never in sync: {refused}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Ok(())
            }
            MembershipChange::Update => {
                let node = &mut self.nodes[target];
                node.stop(LIMIT)?;
                for flag in &mut node.flags {
                    *flag = if flag.contains("initial-cluster=") {
                        flag.clone()
                    } else {
                        flag.replace("2380", "2390")
                    };
                }
                node.start()?;
                node.wait_ready(LIMIT)
            }
            MembershipChange::Promote
            | MembershipChange::RemoveFollower
            | MembershipChange::RemoveLeader => Ok(()),
        }
    }

    fn start_spare(&mut self) -> Result<()> {
        let initial = initial_cluster(&self.network.hosts);
        let node = &mut self.nodes[SPARE];
        node.flags.push(format!("--initial-cluster={initial}"));
        node.flags.push("--initial-cluster-state=existing".to_owned());
        node.start()?;
        node.wait_ready(LIMIT)
    }

    async fn spare_id(&self, host: usize) -> Result<u64> {
        let url = nodes::peer_url(&self.network.hosts[SPARE]);
        let list = self.members(host).await?;
        let spare = list.iter().find(|member| member.peer_ur_ls.contains(&url));
        Ok(spare.context("the spare is a member")?.id)
    }

    /// Waits until these hosts agree on a leader, and returns it.
    async fn settled(&self, hosts: &[usize]) -> Result<usize> {
        let start = Instant::now();
        loop {
            if let Ok(Some(leader)) = self.leader(hosts).await {
                return Ok(leader);
            }
            ensure!(start.elapsed() < LIMIT, "{hosts:?} follow no leader that all agree on");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn leader(&self, hosts: &[usize]) -> Result<Option<usize>> {
        let (mut leads, mut seen) = (None, BTreeSet::new());
        for host in hosts {
            let status = self.status(*host).await?;
            seen.insert((status.leader, status.raft_term));
            if status.leader == header(&status)?.member_id {
                leads = Some(*host);
            }
        }
        Ok(leads.filter(|_| seen.len() == 1))
    }

    /// Checks that all members have equal member lists, equal data, and all acknowledged writes.
    async fn check_data(&self, hosts: &[usize], written: &BTreeSet<u64>) -> Result<()> {
        let range = RangeRequest {
            key: b"w/".to_vec().into(),
            range_end: b"w0".to_vec().into(),
            ..RangeRequest::default()
        };
        let mut client = self.client(hosts[0])?;
        let found = client.range(range, LIMIT).await?;
        let there: BTreeSet<u64> = found.kvs.iter().filter_map(|kv| number(&kv.key)).collect();
        let lost: Vec<_> = written.difference(&there).collect();
        ensure!(lost.is_empty(), "{} acknowledged writes are lost: {lost:?}", lost.len());
        let revision = found.header.context("a header")?.revision;
        let listed = async |host| retry("a list", async || self.members(host).await).await;
        let expected = listed(hosts[0]).await?;
        ensure!(expected.len() == hosts.len(), "members: {expected:?}");
        ensure!(expected.iter().all(|member| !member.is_learner), "a learner: {expected:?}");
        let start = Instant::now();
        let mut hashes = Vec::new();
        for host in hosts {
            let mut client = self.client(*host)?;
            while header(&client.status(LIMIT).await?)?.revision < revision {
                ensure!(start.elapsed() < LIMIT, "host {host} does not catch up");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            hashes.push(client.hash_kv(revision, LIMIT).await?.hash);
            let list = listed(*host).await?;
            ensure!(list == expected, "host {host} lists {list:?}, the first {expected:?}");
        }
        ensure!(hashes.iter().all(|hash| *hash == hashes[0]), "hashes differ: {hashes:?}");
        Ok(())
    }

    async fn term(&self, host: usize) -> Result<u64> {
        Ok(retry("a member's status", async || self.status(host).await).await?.raft_term)
    }

    async fn status(&self, host: usize) -> Result<StatusResponse> {
        self.client(host)?.status(CALL_LIMIT).await
    }

    async fn members(&self, host: usize) -> Result<Vec<pb::Member>> {
        let mut api = self.api(host);
        let list = api.member_list(MemberListRequest { linearizable: true });
        Ok(tokio::time::timeout(CALL_LIMIT, list).await??.into_inner().members)
    }

    fn client(&self, host: usize) -> Result<EtcdClient> {
        EtcdClient::new(address(&self.network.hosts[host]), None)
    }

    fn api(&self, host: usize) -> ClusterClient<Channel> {
        let channel = channel(address(&self.network.hosts[host]), None);
        ClusterClient::new(channel.expect("an address makes a URL"))
    }
}

/// Repeats `ask` until it succeeds.
async fn retry<T>(what: &str, mut ask: impl AsyncFnMut() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return Ok(answer),
            Err(error) if start.elapsed() > LIMIT => return Err(error.context(what.to_owned())),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

fn initial_cluster(hosts: &[TestHost]) -> String {
    let members = hosts.iter().map(|host| format!("{}={}", host.name, nodes::peer_url(host)));
    members.collect::<Vec<_>>().join(",")
}

fn header(status: &StatusResponse) -> Result<pb::ResponseHeader> {
    status.header.context("an answer has a header")
}

fn address(host: &TestHost) -> SocketAddr {
    SocketAddr::new(host.address, 2379)
}

fn number(key: &[u8]) -> Option<u64> {
    std::str::from_utf8(key).ok()?.strip_prefix("w/")?.parse().ok()
}

/// A thread that writes one key after another through changing members, and records which writes
/// were acknowledged.
struct WriteRecorder {
    ends: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
    thread: JoinHandle<Result<BTreeSet<u64>>>,
}

impl WriteRecorder {
    fn start(network: &Network) -> Result<Self> {
        let hub = network.hub.clone();
        let addresses: Vec<SocketAddr> = network.hosts[..SPARE].iter().map(address).collect();
        let (ends, count) = (Arc::default(), Arc::default());
        let (stop, acknowledged) = (Arc::clone(&ends), Arc::clone(&count));
        let thread = std::thread::Builder::new().name("writer".to_owned()).spawn(move || {
            hub.enter_namespace()?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(write(&addresses, &stop, &acknowledged))
        })?;
        Ok(Self { ends, count, thread })
    }

    fn acknowledged(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    fn stop(self) -> Result<BTreeSet<u64>> {
        self.ends.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(written) => written,
            Err(_) => bail!("the writer panicked"),
        }
    }
}

async fn write(
    addresses: &[SocketAddr],
    stop: &AtomicBool,
    acknowledged: &AtomicU64,
) -> Result<BTreeSet<u64>> {
    let clients: Result<Vec<EtcdClient>> =
        addresses.iter().map(|address| EtcdClient::new(*address, None)).collect();
    let mut clients = clients?;
    let mut written = BTreeSet::new();
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let at = usize::try_from(number)? % clients.len();
        // A write that was not acknowledged may have happened or not, and is not repeated.
        if clients[at].put(format!("w/{number}").as_bytes(), b"x", PUT_LIMIT).await.is_ok() {
            written.insert(number);
            acknowledged.fetch_add(1, Ordering::Relaxed);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(written)
}
