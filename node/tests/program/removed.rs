//! A removed member that a supervisor restarts again and again. It exits each time, never rejoins,
//! and costs the cluster next to nothing. The variable `RESTARTS` sets the number of restarts (see
//! the first test).

use std::{io::Write as _, path::Path, process::Command, time::Instant};

use crate::common::{
    TestMember, as_refs, eventually, put_with_retries, retry_while_unhealthy,
    start_three_led_by_first, wait_settled,
};
use node_proto::etcdserverpb::MemberRemoveRequest;

const REMOVED: &str = "this member has been permanently removed from the cluster";

/// Number of restarts: 40, or the value of the variable `RESTARTS` for a longer run.
fn restart_count() -> usize {
    std::env::var("RESTARTS").map_or(40, |times| times.parse().unwrap())
}

/// A cluster of two members, and a third member `gone` that was removed while it was stopped.
/// `image` is a copy of the third one's directory from before the removal.
struct ShrunkCluster {
    left: Vec<TestMember>,
    gone: TestMember,
    image: std::path::PathBuf,
    _root: tempfile::TempDir,
}

async fn cluster() -> ShrunkCluster {
    let root = tempfile::tempdir().unwrap();
    let mut left = start_three_led_by_first(root.path());
    let id = left[2].member_id().await;
    let mut gone = left.pop().unwrap();
    gone.kill();
    let image = root.path().join("image");
    copy(&gone.data_dir, &image);
    wait_settled(&as_refs(&left)).await;
    retry_while_unhealthy(async || {
        left[0].cluster().member_remove(MemberRemoveRequest { id }).await
    })
    .await;
    put_with_retries(&left[0], "k", "v").await;
    ShrunkCluster { left, gone, image, _root: root }
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").args(["-a", "--sparse=always"]).args([from, to]).status();
    let copied = copied.unwrap();
    assert!(copied.success());
}

/// Returns the CPU time of a process in hundredths of a second (see proc_pid_stat(5)).
fn cpu_time(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

impl ShrunkCluster {
    /// Repeats `prepare` and a start of the removed member. Asserts that the start ends with `code`
    /// each time, and that the status of the other members stays the same.
    async fn restart_and_check(
        &mut self,
        what: &str,
        code: i32,
        prepare: impl Fn(&TestMember, &Path),
    ) {
        let status = async |left: &[TestMember]| {
            let status = left[0].status().await.unwrap();
            (status.raft_term, status.leader, left[0].members().await.unwrap())
        };
        let before = status(&self.left).await;
        let used =
            |left: &[TestMember]| left.iter().map(|member| cpu_time(member.id())).sum::<u64>();
        let (start, used_before, times) = (Instant::now(), used(&self.left), restart_count());
        for _ in 0..times {
            prepare(&self.gone, &self.image);
            self.gone.start();
            assert_eq!(self.gone.exit_code(), Some(code), "{what}: {}", self.gone.log());
        }
        let (seconds, used) = (start.elapsed().as_secs_f64(), used(&self.left) - used_before);
        assert_eq!(status(&self.left).await, before, "{what}");
        put_with_retries(&self.left[1], what, "x").await;
        // The CPU time is only printed, for measurements. An assertion could fail because of other
        // work on the machine.
        let _ = writeln!(
            std::io::stderr(),
            "{what}: {times} starts in {seconds:.1} s; the two others took {:.2} % of a core",
            f64::from(u32::try_from(used).unwrap()) / seconds
        );
    }
}

fn wipe(gone: &TestMember, _: &Path) {
    std::fs::remove_dir_all(&gone.data_dir).unwrap();
}

#[tokio::test]
async fn a_removed_member_with_a_tombstone_exits_at_each_start_without_asking() {
    let mut cluster = cluster().await;
    cluster.restart_and_check("a tombstone", 3, |_, _| {}).await;
    assert_eq!(cluster.gone.log().matches(REMOVED).count(), restart_count());
    // The log shows two starts of the member itself: its first one, and the one in which it learned
    // of its removal. All others ended at the tombstone.
    assert_eq!(cluster.gone.log().matches("starting member").count(), 2, "{}", cluster.gone.log());
    assert!(cluster.gone.data_dir.join("member/wal").exists(), "its data is kept");
}

#[tokio::test]
async fn a_removed_member_on_an_old_image_learns_of_its_removal_at_each_start() {
    let mut cluster = cluster().await;
    let put_back = |gone: &TestMember, image: &Path| {
        wipe(gone, image);
        copy(image, &gone.data_dir);
    };
    cluster.restart_and_check("an image of before", 3, put_back).await;
    assert_eq!(cluster.gone.log().matches(REMOVED).count(), restart_count());
}

#[tokio::test]
async fn a_removed_member_that_was_wiped_is_refused_at_each_start() {
    let mut cluster = cluster().await;
    cluster.gone.args.push("--initial-cluster-state=existing".to_owned());
    cluster.restart_and_check("an empty directory", 1, wipe).await;
    let log = cluster.gone.log();
    assert_eq!(log.matches("member count is unequal").count(), restart_count(), "{log}");
    assert!(!cluster.gone.data_dir.join("member/wal").exists(), "it has begun nothing");
    // Without the last flag, the member would begin a new cluster. That fails as well, because the
    // other members run in another cluster.
    cluster.gone.args.pop();
    cluster.restart_and_check("an empty directory, as new", 3, wipe).await;
}

/// Simulates a member that was killed after its removal was committed, and before it wrote its
/// tombstone. Members that don't know of the commit may still need its vote. So the removed member
/// goes on until a voter confirms the removal.
#[tokio::test]
async fn a_removed_member_without_its_tombstone_runs_until_a_voter_confirms() {
    let root = tempfile::tempdir().unwrap();
    let mut left = start_three_led_by_first(root.path());
    let mut gone = left.pop().unwrap();
    let id = gone.member_id().await;
    retry_while_unhealthy(async || {
        left[0].cluster().member_remove(MemberRemoveRequest { id }).await
    })
    .await;
    assert_eq!(gone.exit_code(), Some(3), "{}", gone.log());
    left.iter_mut().for_each(TestMember::kill);
    let tombstone = gone.data_dir.join("muster-tombstone.json");
    std::fs::remove_file(&tombstone).unwrap();
    gone.start();
    eventually("it says why it stays", || {
        gone.log().contains("it goes on until a voting member says so")
    });
    assert!(!tombstone.exists());
    left.iter_mut().for_each(TestMember::start);
    assert_eq!(gone.exit_code(), Some(3), "{}", gone.log());
    assert!(tombstone.exists());
}
