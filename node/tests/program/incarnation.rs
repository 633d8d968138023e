//! Tests of data directories that lost state (old images, clones, wiped disks), with real
//! processes. Such a directory is refused; the member's own, complete directory never is.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{
    TestMember, WAIT_LIMIT, eventually, free_ports, put_with_retries, start_three,
    start_three_led_by_first, three_members, wait_same_hash,
};
use rustix::process::Signal;

/// Minimum time for which a member runs before it is killed.
const MIN_RUN_TIME: Duration = Duration::from_millis(400);
const KILLS: usize = 24;

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(copied.success());
}

/// Copies a member's directory at one moment, while its process is stopped with SIGSTOP.
fn copy_while_stopped(member: &TestMember, to: &Path) {
    member.signal(Signal::STOP);
    copy(&member.data_dir, to);
    member.signal(Signal::CONT);
}

/// Returns the last log index that member `of` has acknowledged, as recorded on `member`'s disk.
fn remembered(member: &TestMember, of: u64) -> u64 {
    let text = std::fs::read_to_string(member.data_dir.join("member/peers")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{of:x} ")));
    // A line of this file ends with two numbers for the peer's current boot. The first is the index
    // that it has acknowledged, the second is the index known to be committed.
    let matched = line.and_then(|line| line.rsplit(' ').nth(1)?.parse().ok());
    matched.unwrap_or(0)
}

/// Waits until the first and the third member have recorded on disk that the second acknowledged
/// more than `index`.
async fn wait_until_more_is_remembered(members: &[TestMember], index: u64) {
    let second = members[1].member_id().await;
    let more = |member: &TestMember| remembered(member, second) > index;
    eventually("it is remembered", || more(&members[0]) && more(&members[2]));
}

/// Returns the last index of the first member's log.
async fn log_end(members: &[TestMember]) -> u64 {
    members[0].status().await.unwrap().raft_index
}

fn restart(member: &mut TestMember) {
    member.kill();
    member.start();
    member.wait_ready();
}

/// Asserts that the member exits with code 3 and the reason `why` at each start, and neither loses
/// nor creates a store.
fn is_refused(member: &mut TestMember, why: &str) {
    let store = member.data_dir.join("member/db");
    let had = store.exists();
    for _ in 0..2 {
        assert_eq!(member.exit_code(), Some(3), "{}", member.log());
        assert!(member.log().contains(why), "{}", member.log());
        assert!(member.log().contains("Replace this member"), "{}", member.log());
        assert_eq!(store.exists(), had);
        member.start();
    }
    member.exit_code();
}

async fn put_many(member: &TestMember, name: &str) {
    for n in 0..20 {
        put_with_retries(member, &format!("{name}-{n}"), "x").await;
    }
}

fn has_counted_refusal(member: &TestMember, reason: &str) -> bool {
    let line = format!("muster_peer_streams_refused_total{{reason=\"{reason}\"}} ");
    let metrics = member.http("/metrics");
    metrics.lines().any(|found| found.strip_prefix(&line).is_some_and(|count| count != "0"))
}

#[tokio::test]
async fn an_image_taken_while_the_member_ran_and_put_back_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    put_many(&members[0], "before").await;
    let (old, own) = (root.path().join("old"), root.path().join("own"));
    copy_while_stopped(&members[1], &old);
    let had = log_end(&members).await;
    put_many(&members[0], "after").await;
    wait_until_more_is_remembered(&members, had).await;
    members[1].kill();
    // Members 1 and 3 must keep the record of what member 2 has acknowledged, even if they restart.
    // While both of them restart, no running member could remind them.
    restart(&mut members[0]);
    restart(&mut members[2]);
    std::fs::rename(&members[1].data_dir, &own).unwrap();
    copy(&old, &members[1].data_dir);
    members[1].start();
    is_refused(&mut members[1], "put back from an older image");
    // The refused member connects to the two others, and exits at the first refusal. So it is
    // enough if one of them has counted a refusal.
    let others = [&members[0], &members[2]];
    eventually("it is counted", || {
        others.iter().any(|member| has_counted_refusal(member, "amnesia"))
    });
    eventually("it is told", || {
        others.iter().any(|member| member.log().contains("refused a peer stream"))
    });
    put_many(&members[0], "without").await;
    std::fs::remove_dir_all(&members[1].data_dir).unwrap();
    std::fs::rename(&own, &members[1].data_dir).unwrap();
    members[1].start();
    let revision = put_with_retries(&members[1], "with its own disk", "x").await;
    wait_same_hash(&members, revision).await;
}

#[tokio::test]
async fn a_clone_or_original_that_lacks_state_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    put_many(&members[0], "before").await;
    let elsewhere = root.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let [peer, client] = free_ports();
    let mut clone = TestMember::new(&elsewhere, "b", peer, client, "");
    clone.args.pop();
    copy_while_stopped(&members[1], &clone.data_dir);
    let had = log_end(&members).await;
    put_many(&members[0], "after").await;
    wait_until_more_is_remembered(&members, had).await;
    clone.start();
    is_refused(&mut clone, "put back from an older image");
    put_with_retries(&members[1], "the original", "goes on").await;

    // Now the clone has all of the original's state, and runs first. It continues as the member,
    // and the original is refused.
    members[1].kill();
    let original = root.path().join("original");
    copy(&members[1].data_dir, &original);
    let had = log_end(&members).await;
    members[1].start();
    put_with_retries(&members[1], "the clone", "is the member").await;
    wait_until_more_is_remembered(&members, had).await;
    members[1].kill();
    std::fs::remove_dir_all(&members[1].data_dir).unwrap();
    copy(&original, &members[1].data_dir);
    members[1].start();
    assert_eq!(members[1].exit_code(), Some(3), "{}", members[1].log());
    assert!(members[1].log().contains("boot counter went back, or runs twice"));
    members[1].start();
    is_refused(&mut members[1], "put back from an older image");
    put_with_retries(&members[2], "the cluster", "goes on").await;
}

/// Nothing is written after the copy is made, so the clone lacks no state. It is refused because
/// its original is connected.
#[tokio::test]
async fn a_clone_that_lacks_nothing_is_refused_while_its_original_lives() {
    let root = tempfile::tempdir().unwrap();
    let members = start_three_led_by_first(root.path());
    let had = log_end(&members).await;
    put_many(&members[0], "before").await;
    let revision = put_with_retries(&members[0], "the last", "x").await;
    wait_same_hash(&members, revision).await;
    wait_until_more_is_remembered(&members, had).await;
    let original = members[1].member_id().await;
    eventually("the others reach it", || {
        [&members[0], &members[2]].iter().all(|member| member.has_stream_to(original))
    });
    let elsewhere = root.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let [peer, client] = free_ports();
    let mut clone = TestMember::new(&elsewhere, "b", peer, client, "");
    clone.args.pop();
    copy_while_stopped(&members[1], &clone.data_dir);
    clone.start();
    is_refused(&mut clone, "boot counter went back, or runs twice");
    put_with_retries(&members[1], "the original", "goes on").await;
    assert!(!members[1].log().contains("the peer refused this member"), "{}", members[1].log());
}

#[tokio::test]
async fn a_member_with_a_wiped_disk_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    put_many(&members[0], "before").await;
    members[1].kill();
    std::fs::remove_dir_all(&members[1].data_dir).unwrap();
    members[1].start();
    is_refused(&mut members[1], "its disk was wiped or replaced");
    put_with_retries(&members[0], "the cluster", "goes on").await;
}

/// If the wiped members weren't refused, the two could elect each other with empty logs, under
/// their old ids.
#[tokio::test]
async fn two_wiped_members_of_three_begin_no_cluster_beside_the_third() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    put_many(&members[0], "before").await;
    for wiped in &mut members[1..] {
        wiped.kill();
        std::fs::remove_dir_all(&wiped.data_dir).unwrap();
    }
    members[1..].iter_mut().for_each(TestMember::start);
    for wiped in &mut members[1..] {
        is_refused(wiped, "its disk was wiped or replaced");
    }
}

#[tokio::test]
async fn a_correct_member_is_never_refused_however_often_it_is_killed() {
    let root = tempfile::tempdir().unwrap();
    let mut members = three_members(root.path());
    for member in &mut members {
        let quick = ["--heartbeat-interval=20", "--election-timeout=200"];
        member.args.extend(quick.map(str::to_owned));
        member.start();
    }
    members.iter_mut().for_each(TestMember::wait_ready);
    let mut written = 0;
    for kill in 0..KILLS {
        let key = format!("k{kill}");
        let start = Instant::now();
        // Each process runs for at least `MIN_RUN_TIME`, and until another write was acknowledged.
        // So there is state that the kill could lose.
        while start.elapsed() < MIN_RUN_TIME || written <= kill {
            assert!(start.elapsed() < WAIT_LIMIT, "nobody takes a write");
            let put = members[(kill + 1) % 3].put(&key, "x");
            written += usize::from(
                tokio::time::timeout(MIN_RUN_TIME, put).await.is_ok_and(|put| put.is_ok()),
            );
        }
        members[kill % 3].kill();
        members[kill % 3].start();
    }
    let revision = put_with_retries(&members[0], "all", "well").await;
    wait_same_hash(&members, revision).await;
    for member in &members {
        let refused = ["its disk holds less", "boot counter went back", "wiped or replaced"];
        assert!(!refused.iter().any(|why| member.log().contains(why)), "{}", member.log());
    }
}

#[tokio::test]
async fn a_member_that_cannot_write_its_peer_records_refuses_peers_and_says_why() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    let promises = members[0].data_dir.join("member/peers");
    eventually("what peers promised is on the disk", || promises.is_file());
    std::fs::remove_file(&promises).unwrap();
    std::fs::create_dir(&promises).unwrap();
    // Member 1 can't record anything about its peers, so only member 3 accepts member 2. There may
    // be no leader until the directory is removed.
    members[1].kill();
    members[1].start();
    for said in
        ["cannot remember a peer's boot counter", "cannot remember what peers have promised"]
    {
        eventually(said, || {
            let log = members[0].log();
            let mut lines = log.lines().filter(|line| line.contains(said));
            lines.any(|line| line.contains("Is a directory (os error 21)"))
        });
    }
    std::fs::remove_dir(&promises).unwrap();
    members[1].wait_ready();
    let revision = put_with_retries(&members[1], "after", "x").await;
    wait_same_hash(&members, revision).await;
}
