//! Tests of the supervisor with real processes: the built agent as the launcher, small programs as
//! nodes.

#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use muster_agent::exit::ExitError;
use muster_agent::launch::restart_policy::MAX_QUICK_DEATHS;
use muster_agent::launch::running_node::{CommandLine, NodeExit, RunningNode};
use muster_agent::launch::supervisor::{Observer, SupervisionOutcome, Supervisor};
use muster_agent::state::Layout;
use tokio_util::sync::CancellationToken;

/// Time limit of each step, much longer than any step takes. Only a failing test waits for it.
const LIMIT: Duration = Duration::from_secs(60);

struct SupervisorFixture {
    _dir: tempfile::TempDir,
    layout: Layout,
}

impl SupervisorFixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        std::fs::create_dir(layout.node()).unwrap();
        Self { _dir: dir, layout }
    }

    fn supervisor(&self, script: &str) -> Supervisor<'_> {
        Supervisor {
            layout: &self.layout,
            launcher: launcher(),
            node: shell(script),
            stop_deadline: LIMIT,
            is_lost: &|_| false,
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.layout.node_log()).unwrap_or_default()
    }

    async fn wait_for_log(&self, text: &str) {
        let began = Instant::now();
        while !self.log().contains(text) {
            assert!(began.elapsed() < LIMIT, "no {text:?} in {:?}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for SupervisorFixture {
    fn drop(&mut self) {
        // A failed test must leave no node behind.
        let text = std::fs::read_to_string(self.layout.pid_file()).unwrap_or_default();
        let node = muster_agent::launch::process::ProcessIdentity::from_text(&text);
        if let Some(Ok(Some(process))) = node.map(|node| node.open()) {
            let _ = process.signal(rustix::process::Signal::KILL);
        }
    }
}

fn launcher() -> CommandLine {
    CommandLine {
        path: PathBuf::from(env!("CARGO_BIN_EXE_muster-agent")),
        arguments: vec!["launch-node".to_owned()],
    }
}

fn shell(script: &str) -> CommandLine {
    let arguments = vec!["-c".to_owned(), script.to_owned()];
    CommandLine { path: PathBuf::from("/bin/bash"), arguments }
}

async fn start(world: &SupervisorFixture, script: &str) -> RunningNode {
    RunningNode::start(&world.layout, &launcher(), &shell(script)).await.unwrap().unwrap()
}

#[derive(Default)]
struct RecordedEvents {
    pids: Vec<i32>,
    adopted: usize,
    deaths: Vec<String>,
    on_running: Option<Box<dyn FnMut()>>,
}

impl Observer for RecordedEvents {
    fn running(&mut self, node: &RunningNode) {
        self.pids.push(node.identity.pid);
        self.adopted += usize::from(node.is_adopted());
        if let Some(act) = &mut self.on_running {
            act();
        }
    }

    fn died(&mut self, reason: &str, _pause: Duration) {
        self.deaths.push(reason.to_owned());
    }

    fn stopping(&mut self) {}
}

fn parent_of(pid: i32) -> i32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, rest) = stat.rsplit_once(')').unwrap();
    rest.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_node_has_a_session_of_its_own_and_writes_to_its_log() {
    let world = SupervisorFixture::new();
    let node = start(&world, "echo out; echo err >&2; exec sleep 600").await;
    world.wait_for_log("err").await;
    assert!(world.log().contains("out"));
    let pid = rustix::process::Pid::from_raw(node.identity.pid).unwrap();
    assert_eq!(rustix::process::getsid(Some(pid)).unwrap(), pid);
    assert_eq!(parent_of(node.identity.pid), i32::try_from(std::process::id()).unwrap());
}

#[tokio::test]
async fn a_node_that_an_earlier_agent_left_is_adopted_and_not_started_again() {
    let world = SupervisorFixture::new();
    let first = start(&world, "echo began; exec sleep 600").await;
    world.wait_for_log("began").await;
    let pid = first.identity.pid;
    // A killed agent leaves the node, its lock and its pid file behind.
    drop(first);
    let adopted = RunningNode::adopt(&world.layout).await.unwrap().unwrap();
    assert!(adopted.is_adopted());
    assert_eq!(adopted.identity.pid, pid);
    let again = start(&world, "echo second; exec sleep 600").await;
    assert_eq!(again.identity.pid, pid, "a second node was started");
    assert!(!world.log().contains("second"));
}

#[tokio::test]
async fn the_end_of_an_adopted_node_is_seen() {
    let world = SupervisorFixture::new();
    let first = start(&world, "exec sleep 600").await;
    let mut adopted = RunningNode::adopt(&world.layout).await.unwrap().unwrap();
    adopted.terminate().unwrap();
    let end = tokio::time::timeout(LIMIT, adopted.ended()).await.unwrap().unwrap();
    assert_eq!(end, NodeExit::Unknown);
    drop(first);
}

#[tokio::test]
async fn a_killed_node_is_started_again() {
    let world = SupervisorFixture::new();
    let stop = CancellationToken::new();
    let supervisor = world.supervisor("echo began; exec sleep 600");
    let (layout, stopping) = (world.layout.clone(), stop.clone());
    let mut starts = 0;
    let mut seen = RecordedEvents {
        on_running: Some(Box::new(move || {
            starts += 1;
            if starts == 2 {
                stopping.cancel();
                return;
            }
            // Wait until the node has logged a line. The test shows that this line isn't reported
            // as the reason of the node's death.
            while !std::fs::read_to_string(layout.node_log()).unwrap().contains("began") {
                std::thread::sleep(Duration::from_millis(5));
            }
            let text = std::fs::read_to_string(layout.pid_file()).unwrap();
            let node = muster_agent::launch::process::ProcessIdentity::from_text(&text).unwrap();
            let process = node.open().unwrap().unwrap();
            process.signal(rustix::process::Signal::KILL).unwrap();
        })),
        ..RecordedEvents::default()
    };
    let outcome = tokio::time::timeout(LIMIT, supervisor.run(&stop, &mut seen)).await.unwrap();
    assert!(matches!(outcome, SupervisionOutcome::Stopped), "{outcome:?}");
    assert_eq!(seen.deaths.len(), 1);
    assert!(seen.deaths[0].starts_with("signal 9"), "{:?}", seen.deaths);
    assert!(!seen.deaths[0].contains("last words"), "it said nothing: {:?}", seen.deaths);
    assert_ne!(seen.pids[0], seen.pids[1]);
}

#[tokio::test]
async fn supervision_of_a_node_that_keeps_dying_ends_with_the_nodes_own_error() {
    let world = SupervisorFixture::new();
    // The usage text follows the error, and is longer than the part of the log that is quoted.
    let usage = "for line in 1 2 3 4 5 6; do echo usage $line; done";
    let supervisor = world.supervisor(&format!("echo the disk is on fire; {usage}; exit 1"));
    let mut seen = RecordedEvents::default();
    let outcome = supervisor.run(&CancellationToken::new(), &mut seen).await;
    let SupervisionOutcome::Failed(end) = outcome else { panic!("{outcome:?}") };
    assert_eq!(end.code(), 1);
    assert!(end.to_string().contains("the disk is on fire"), "{end}");
    assert!(seen.deaths[0].ends_with("its last words: the disk is on fire"), "{:?}", seen.deaths);
    let starts = world.log().matches("the disk is on fire").count();
    assert_eq!(starts, usize::try_from(MAX_QUICK_DEATHS).unwrap());
}

#[tokio::test]
async fn a_node_that_exits_with_code_3_is_not_started_again() {
    let world = SupervisorFixture::new();
    let supervisor = world.supervisor("echo once; exit 3");
    let outcome = supervisor.run(&CancellationToken::new(), &mut RecordedEvents::default()).await;
    assert!(
        matches!(outcome, SupervisionOutcome::Failed(ExitError::DoNotRestart(_))),
        "{outcome:?}"
    );
    assert_eq!(world.log(), "once\n");
}

#[tokio::test]
async fn a_tombstone_ends_supervision_whatever_the_nodes_exit_code() {
    let world = SupervisorFixture::new();
    let path = world.layout.node().join("muster-tombstone.json");
    let supervisor = world.supervisor(&format!(
        "echo '{{\"version\":1,\"by\":\"ada\"}}' > {}; exit 0",
        path.display()
    ));
    let outcome = supervisor.run(&CancellationToken::new(), &mut RecordedEvents::default()).await;
    let SupervisionOutcome::Removed(tombstone) = outcome else { panic!("{outcome:?}") };
    assert_eq!(tombstone.by, "ada");
    // A tombstone exists now, so a second run starts no node.
    let mut seen = RecordedEvents::default();
    let outcome = supervisor.run(&CancellationToken::new(), &mut seen).await;
    assert!(matches!(outcome, SupervisionOutcome::Removed(_)) && seen.pids.is_empty());
}

#[tokio::test]
async fn an_etcd_that_logs_its_own_removal_is_not_started_again() {
    let world = SupervisorFixture::new();
    let word = "the member has been permanently removed from the cluster";
    let line = format!(r#"{{"level":"warn","msg":"server error","error":"{word}"}}"#);
    let supervisor = world.supervisor(&format!("echo '{line}'; exit 0"));
    let mut seen = RecordedEvents::default();
    let outcome = supervisor.run(&CancellationToken::new(), &mut seen).await;
    assert!(matches!(outcome, SupervisionOutcome::RemovalLogged), "{outcome:?}");
    assert!(seen.deaths.is_empty(), "{:?}", seen.deaths);
    assert_eq!(world.log().lines().count(), 1, "it was started again");
}

#[tokio::test]
async fn stopping_sends_sigterm_to_the_node_and_waits_for_its_end() {
    let world = SupervisorFixture::new();
    let supervisor = world
        .supervisor("trap 'echo goodbye; exit 0' TERM; echo began; while :; do sleep 0.05; done");
    let stop = CancellationToken::new();
    let stopper = async {
        world.wait_for_log("began").await;
        stop.cancel();
    };
    let mut seen = RecordedEvents::default();
    let (outcome, ()) = tokio::join!(supervisor.run(&stop, &mut seen), stopper);
    assert!(matches!(outcome, SupervisionOutcome::Stopped), "{outcome:?}");
    assert!(world.log().contains("goodbye"));
    assert!(RunningNode::adopt(&world.layout).await.unwrap().is_none());
}

#[tokio::test]
async fn a_node_that_does_not_stop_is_left_running_and_its_pid_is_reported() {
    let world = SupervisorFixture::new();
    let mut supervisor = world.supervisor("trap '' TERM; echo began; while :; do sleep 0.05; done");
    supervisor.stop_deadline = Duration::from_millis(300);
    let stop = CancellationToken::new();
    let stopper = async {
        world.wait_for_log("began").await;
        stop.cancel();
    };
    let mut seen = RecordedEvents::default();
    let (outcome, ()) = tokio::join!(supervisor.run(&stop, &mut seen), stopper);
    let SupervisionOutcome::Failed(end) = outcome else { panic!("{outcome:?}") };
    assert!(end.to_string().contains(&seen.pids[0].to_string()), "{end}");
    assert!(RunningNode::adopt(&world.layout).await.unwrap().is_some());
}

#[tokio::test]
async fn a_program_that_cannot_be_executed_is_named_in_the_error() {
    let world = SupervisorFixture::new();
    let mut supervisor = world.supervisor("");
    supervisor.node.path = PathBuf::from("/etc/hostname");
    let outcome = supervisor.run(&CancellationToken::new(), &mut RecordedEvents::default()).await;
    let SupervisionOutcome::Failed(end) = outcome else { panic!("{outcome:?}") };
    assert!(end.to_string().contains("/etc/hostname"), "{end}");
    assert!(Path::new("/etc/hostname").exists());
}

/// A node that listens on an address that the host has lost is killed if SIGTERM doesn't stop it.
/// That holds when an agent adopts the node, and when the agent stops it.
#[tokio::test]
async fn a_stranded_node_is_started_again_and_killed_if_it_does_not_stop() {
    let world = SupervisorFixture::new();
    let stubborn = "trap '' TERM; echo began $$; while :; do sleep 0.1; done";
    let mut node = shell(stubborn);
    let flag = ["node", "--listen-peer-urls", "https://192.0.2.7:2380"];
    node.arguments.extend(flag.map(str::to_owned));
    let first = RunningNode::start(&world.layout, &launcher(), &node).await.unwrap().unwrap();
    world.wait_for_log("began").await;
    let (pid, stop) = (first.identity.pid, CancellationToken::new());
    // The supervisor below is a later agent. It can't reap the node, which is this test's child, so
    // the test has to.
    let reaper = tokio::spawn(async move {
        let mut first = first;
        first.ended().await
    });
    let lost = std::net::IpAddr::from([192, 0, 2, 7]);
    let is_lost = move |address| address == lost;
    let supervisor = Supervisor { node, is_lost: &is_lost, ..world.supervisor(stubborn) };
    let mut events = RecordedEvents::default();
    let when = stop.clone();
    events.on_running = Some(Box::new(move || when.cancel()));
    let began = Instant::now();
    let outcome = supervisor.run(&stop, &mut events).await;
    assert!(matches!(outcome, SupervisionOutcome::Stopped), "{outcome:?}");
    assert!(began.elapsed() < LIMIT, "it waited for the node's own end");
    assert_eq!(reaper.await.unwrap().unwrap(), NodeExit::Killed(9));
    assert_eq!((events.pids.len(), events.adopted), (1, 0), "{:?}", events.pids);
    assert_ne!(events.pids[0], pid);
}
