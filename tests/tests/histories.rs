//! Records the answers to clients and watchers of three built members, which are killed, stopped
//! and disconnected meanwhile. One order of all requests must explain every answer and every event.

#![allow(clippy::print_stdout, reason = "a test's report, shown with --nocapture")]

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use muster_tests::client::{EtcdClient, channel};
use muster_tests::harness::{Network, NodeProcess, nodes, programs, wait_for};
use muster_tests::histories::record::{Recording, RecordingPlan, administrator};
use muster_tests::histories::{HistoryReport, judge};
use muster_tests::rng::Rng;
use node_proto::etcdserverpb::StatusResponse;
use node_proto::etcdserverpb::auth_client::AuthClient;
use rustix::process::Signal;

/// Time limit of each wait; a test that passes waits much less.
const LIMIT: Duration = Duration::from_secs(60);
const CALL_LIMIT: Duration = Duration::from_millis(500);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
const MEMBERS: usize = 3;
/// Number of answers between two faults.
const ANSWERS_BETWEEN_FAULTS: u64 = 150;

/// Members that a fault affects.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Victim {
    Leader,
    Follower,
    All,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Kill,
    Stop,
    Cut,
    /// Packets that the member sends are dropped.
    CutOutbound,
    /// Packets to the member are dropped.
    CutInbound,
    /// All packets between the member and one other are dropped.
    OneLink,
}

#[test]
fn histories_of_killed_members_are_right() -> Result<()> {
    let faults = [
        (Fault::Kill, Victim::Leader),
        (Fault::Kill, Victim::Follower),
        (Fault::Kill, Victim::All),
        (Fault::Kill, Victim::Leader),
        (Fault::Kill, Victim::Follower),
        (Fault::Kill, Victim::All),
    ];
    check_scenario("kill", Network::loopback(3), false, &faults)?;
    Ok(())
}

#[test]
fn histories_of_stopped_members_with_users_are_right() -> Result<()> {
    let faults = [
        (Fault::Stop, Victim::Leader),
        (Fault::Stop, Victim::Follower),
        (Fault::Stop, Victim::Leader),
        (Fault::Stop, Victim::Leader),
    ];
    let report = check_scenario("stop", Network::loopback(3), true, &faults)?;
    ensure!(report.denied > 0, "nobody asked for what is not permitted: {report:?}");
    Ok(())
}

#[test]
fn histories_of_members_that_are_cut_off_are_right() -> Result<()> {
    if !Network::can_be_cut() {
        return Ok(());
    }
    let faults = [
        (Fault::Cut, Victim::Leader),
        (Fault::CutOutbound, Victim::Leader),
        (Fault::Cut, Victim::Follower),
        (Fault::CutInbound, Victim::Leader),
        (Fault::OneLink, Victim::Leader),
        (Fault::CutOutbound, Victim::Follower),
    ];
    check_scenario("cut", Network::namespaces(3)?, false, &faults)?;
    Ok(())
}

/// Records a history while these faults happen one after another, and checks it.
fn check_scenario(
    name: &str,
    network: Network,
    has_users: bool,
    faults: &[(Fault, Victim)],
) -> Result<HistoryReport> {
    let seed = match std::env::var("SEED") {
        Ok(seed) => seed.parse().context("SEED is a number")?,
        Err(_) => u64::from(SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos()),
    };
    let again = || format!("{name}, SEED={seed} has clients ask for the same again");
    let began = Instant::now();
    network.hub.enter_namespace()?;
    let mut cluster = FaultyCluster::start(network, &mut Rng::new(seed)).with_context(again)?;
    let result = cluster.record(has_users, seed, faults);
    let history =
        result.with_context(|| nodes::last_log_lines(&cluster.nodes)).with_context(again)?;
    let recorded = began.elapsed();
    let report = judge(&history).map_err(|violation| {
        // A history can't be reproduced from its seed, so it is kept completely.
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("history-{name}-{seed}"));
        let kept = fs_err::write(&path, format!("{violation}\n{history:#?}"));
        let kept = kept.map_or_else(|error| error.to_string(), |()| path.display().to_string());
        anyhow::Error::new(violation).context(format!("all of it: {kept}"))
    });
    let report = report.with_context(again)?;
    println!(
        "{name}: seed {seed}, {} faults, {recorded:?}, judged in {:?}: {report:?}",
        faults.len(),
        began.elapsed() - recorded
    );
    ensure!(report.unknown > 0, "every outcome is known: {report:?}; {}", again());
    ensure!(report.terms > 1, "nobody else was elected: {report:?}; {}", again());
    let watchers = history.watchers.len();
    ensure!(report.resumed >= watchers, "too few went on elsewhere: {report:?}; {}", again());
    Ok(report)
}

struct FaultyCluster {
    network: Network,
    nodes: Vec<NodeProcess>,
    /// Whether clients must authenticate.
    has_users: bool,
    runtime: tokio::runtime::Runtime,
    _folder: tempfile::TempDir,
}

impl FaultyCluster {
    fn start(network: Network, rng: &mut Rng) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let folder = tempfile::tempdir()?;
        let program = programs::program_path("muster-node")?;
        let hosts = network.hosts.iter();
        let initial: Vec<String> =
            hosts.clone().map(|host| format!("{}={}", host.name, nodes::peer_url(host))).collect();
        let mut nodes: Vec<NodeProcess> =
            hosts.map(|host| NodeProcess::new(host, &host.name, &program, folder.path())).collect();
        // `muster-node` accepts `--snapshot-count` but ignores it, so this number changes nothing.
        let snapshot_count = [100, 1_000, 10_000][rng.pick(3)];
        for node in &mut nodes {
            node.flags.push(format!("--name={}", node.host.name));
            node.flags.push(format!("--initial-cluster={}", initial.join(",")));
            node.flags.push(format!("--snapshot-count={snapshot_count}"));
            node.flags.push("--snapshot-catchup-entries=100".to_owned());
            node.flags.push("--watch-progress-notify-interval=300ms".to_owned());
            node.flags.push("--bcrypt-cost=4".to_owned());
            node.start()?;
        }
        for node in &mut nodes {
            node.wait_ready(LIMIT)?;
        }
        Ok(Self { network, nodes, has_users: false, runtime, _folder: folder })
    }

    fn record(
        &mut self,
        has_users: bool,
        seed: u64,
        faults: &[(Fault, Victim)],
    ) -> Result<muster_tests::histories::RecordedHistory> {
        self.leader(|_, _| true)?;
        let from = self.network.hub.clone();
        let members = (0..MEMBERS).map(|member| self.address(member)).collect();
        let recording = Recording::start(RecordingPlan { seed, from, members, has_users })?;
        wait_answers(&recording)?;
        self.has_users = has_users;
        let mut rng = Rng::new(seed.rotate_left(32));
        let result = faults.iter().try_for_each(|(fault, victim)| {
            self.run_fault(*fault, *victim, &recording, &mut rng)
                .with_context(|| format!("{fault:?} of {victim:?}"))
        });
        let history = recording.finish();
        result?;
        history
    }

    /// Begins a fault, and ends it after some requests have lost their answers. If the leader is
    /// the victim, another leader must answer requests before the end.
    fn run_fault(
        &mut self,
        fault: Fault,
        victim: Victim,
        recording: &Recording,
        rng: &mut Rng,
    ) -> Result<()> {
        wait_answers(recording)?;
        let (leader, term) = self.leader(|_, _| true)?;
        let follower = (leader + 1 + rng.pick(MEMBERS - 1)) % MEMBERS;
        let victims: Vec<usize> = match victim {
            Victim::Leader => vec![leader],
            Victim::Follower => vec![follower],
            Victim::All => (0..MEMBERS).collect(),
        };
        let lost = recording.lost();
        for victim in &victims {
            self.begin(fault, *victim, follower)?;
        }
        std::thread::sleep(Duration::from_millis(rng.range(200, 1_500)));
        if fault != Fault::OneLink {
            wait_for("an outcome that is unknown", LIMIT, || {
                (recording.lost() > lost).then_some(())
            })?;
            if victim == Victim::Leader {
                self.leader(|member, now| member != leader && now > term)?;
                wait_answers(recording)?;
            }
        }
        for victim in &victims {
            self.end(fault, *victim)?;
        }
        Ok(())
    }

    fn begin(&mut self, fault: Fault, victim: usize, follower: usize) -> Result<()> {
        let others = (0..MEMBERS).filter(|other| *other != victim);
        match fault {
            Fault::Kill => self.nodes[victim].kill(),
            Fault::Stop => self.nodes[victim].signal(Signal::STOP)?,
            Fault::OneLink => {
                self.network.cut(victim, follower)?;
                self.network.cut(follower, victim)?;
            }
            Fault::Cut | Fault::CutOutbound | Fault::CutInbound => {
                for other in others {
                    if fault != Fault::CutInbound {
                        self.network.cut(victim, other)?;
                    }
                    if fault != Fault::CutOutbound {
                        self.network.cut(other, victim)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn end(&mut self, fault: Fault, victim: usize) -> Result<()> {
        match fault {
            Fault::Kill => self.nodes[victim].start(),
            Fault::Stop => self.nodes[victim].signal(Signal::CONT),
            Fault::Cut | Fault::CutOutbound | Fault::CutInbound | Fault::OneLink => {
                self.network.heal()
            }
        }
    }

    /// Waits for a leader that `wanted` accepts, and returns it with its term.
    fn leader(&self, wanted: impl Fn(usize, u64) -> bool) -> Result<(usize, u64)> {
        let started = Instant::now();
        self.runtime.block_on(async {
            loop {
                let mut leads = None;
                for member in 0..MEMBERS {
                    let Ok(status) = self.status(member).await else { continue };
                    let own = status.header.context("an answer has a header")?.member_id;
                    let term = status.raft_term;
                    if status.leader == own && leads.is_none_or(|(_, highest)| term > highest) {
                        leads = Some((member, term));
                    }
                }
                if let Some(found) = leads.filter(|(member, term)| wanted(*member, *term)) {
                    return Ok(found);
                }
                ensure!(started.elapsed() < LIMIT, "no such leader");
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        })
    }

    async fn status(&self, member: usize) -> Result<StatusResponse> {
        let address = self.address(member);
        let token = if self.has_users {
            let mut auth = AuthClient::new(channel(address, None)?);
            let answer = auth.authenticate(administrator());
            Some(tokio::time::timeout(CALL_LIMIT, answer).await??.into_inner().token)
        } else {
            None
        };
        EtcdClient::new(address, None)?.with_token(token).status(CALL_LIMIT).await
    }

    fn address(&self, member: usize) -> SocketAddr {
        SocketAddr::new(self.network.hosts[member].address, 2379)
    }
}

/// Waits until clients have received some more answers.
fn wait_answers(recording: &Recording) -> Result<()> {
    let before = recording.answered();
    wait_for("answers", LIMIT, || {
        (recording.answered() >= before + ANSWERS_BETWEEN_FAULTS || recording.has_failed())
            .then_some(())
    })?;
    ensure!(!recording.has_failed(), "the recording has ended");
    Ok(())
}
