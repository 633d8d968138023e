//! Recovery after a loss of quorum: a survivor's directory becomes a cluster of one member.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{
    TestMember, as_refs, free_ports, node_command_killed_at, put_with_retries, report_skip,
    small::SmallFilesystem, start_three, wait_settled, watch_compact_revision,
};
use node_proto::command::{self, Operation};
use node_proto::etcdserverpb::{MemberAddRequest, MemberPromoteRequest, MemberUpdateRequest};
use node_proto::musterpb::MemberChange;
use node_proto::musterpb::member_change::Change;
use serde_json::Value;

const BUMP: i64 = 1_000_000_000;

async fn cluster_id(member: &TestMember) -> u64 {
    member.status().await.unwrap().header.unwrap().cluster_id
}

fn start_with_force(member: &mut TestMember) {
    member.args.push("--force-new-cluster".to_owned());
    member.start();
    member.wait_ready();
}

fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
}

fn read_json(member: &TestMember, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(member.data_dir.join(name)).unwrap()).unwrap()
}

/// Adds a learner to `members`, starts it, and waits until it is ready.
async fn learner(root: &Path, members: &[TestMember]) -> TestMember {
    let [peer, client] = free_ports();
    let url = format!("http://127.0.0.1:{peer}");
    let request = MemberAddRequest { peer_ur_ls: vec![url.clone()], is_learner: true };
    let add = async || members[0].cluster().member_add(request.clone()).await;
    crate::common::retry_while_unhealthy(add).await;
    let others = members.iter().map(|member| {
        let url = member.args.iter().find_map(|arg| arg.strip_prefix("--listen-peer-urls="));
        format!("{}={}", member.name, url.unwrap())
    });
    let initial: Vec<String> = others.chain([format!("d={url}")]).collect();
    let mut learner = TestMember::new(root, "d", peer, client, &initial.join(","));
    learner.args.push("--initial-cluster-state=existing".to_owned());
    learner.start();
    learner.wait_ready();
    learner
}

#[tokio::test]
async fn a_survivor_becomes_a_cluster_of_one_and_loses_nothing_that_was_acknowledged() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    wait_settled(&as_refs(&members)).await;
    let mut learner = learner(root.path(), &members).await;
    let old_cluster = cluster_id(&members[0]).await;
    let leader = wait_settled(&as_refs(&members)).await;
    let mut last = 0;
    for n in 0..200 {
        last = members[leader].put("k", &n.to_string()).await.unwrap();
    }
    // All members are killed at the same time, so that no disk records the last entry as committed.
    members.iter_mut().for_each(TestMember::kill);
    learner.kill();

    let survivor = &mut members[leader];
    start_with_force(survivor);
    assert_eq!(survivor.get("k").await.unwrap().as_deref(), Some("199"));
    let list = survivor.members().await.unwrap();
    assert_eq!(list.len(), 1);
    assert!(!list[0].is_learner);
    let cluster = cluster_id(survivor).await;
    assert_ne!(cluster, old_cluster);
    let made = read_json(survivor, "muster-forced.json");
    assert_eq!(made["dropped"].as_array().unwrap().len(), 3, "{made}");
    assert!(survivor.log().contains("kept_unknown"), "{}", survivor.log());

    // Clients may have seen revisions of the old cluster, and must read everything again. So their
    // watches are cancelled as compacted.
    let revision = survivor.put("k", "new").await.unwrap();
    assert_eq!(revision, last + BUMP + 1);
    assert_eq!(watch_compact_revision(survivor, last + 7).await, last + BUMP);

    // `--force-new-cluster` takes effect only once, so this start ignores it.
    survivor.kill();
    survivor.start();
    survivor.wait_ready();
    assert!(survivor.log().contains("not followed again"), "{}", survivor.log());
    assert_eq!(cluster_id(survivor).await, cluster);
    assert_eq!(survivor.get("k").await.unwrap().as_deref(), Some("new"));

    // The other two members still belong to the old cluster, and form a quorum of it. They must not
    // mix with the new one.
    let strangers: Vec<usize> = (0..3).filter(|n| *n != leader).collect();
    for n in &strangers {
        members[*n].start();
    }
    for n in &strangers {
        members[*n].wait_ready();
    }
    put_with_retries(&members[strangers[0]], "k", "old").await;
    assert_eq!(cluster_id(&members[strangers[0]]).await, old_cluster);
    assert_eq!(members[leader].get("k").await.unwrap().as_deref(), Some("new"));
    assert_eq!(members[leader].members().await.unwrap().len(), 1);
}

/// The store on the disk is behind the log: an entry that changes the survivor's URL is only in the
/// log.
#[tokio::test]
async fn a_survivor_that_moved_just_before_the_loss_keeps_its_new_address() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    let leader = wait_settled(&as_refs(&members)).await;
    let survivor = members[leader].status().await.unwrap().header.unwrap().member_id;
    let moved = vec!["http://127.0.0.1:1".to_owned()];
    let request = MemberUpdateRequest { id: survivor, peer_ur_ls: moved.clone() };
    let update = async || members[leader].cluster().member_update(request.clone()).await;
    crate::common::retry_while_unhealthy(update).await;
    members.iter_mut().for_each(TestMember::kill);

    // This test uses the command `data recover`, because it takes the survivor's peer URL from the
    // member table. A start with `--force-new-cluster` takes the URL from its flags instead.
    let survivor = &mut members[leader];
    let recover = ["data", "recover", "--i-accept-data-loss"];
    let command = Command::new(env!("CARGO_BIN_EXE_muster-node"))
        .args(recover)
        .arg(&survivor.data_dir)
        .output()
        .unwrap();
    assert!(command.status.success(), "{command:?}");
    survivor.start();
    survivor.wait_ready();
    let list = survivor.members().await.unwrap();
    assert_eq!(list.len(), 1);
    assert_eq!(list[0].peer_ur_ls, moved);
}

#[tokio::test]
async fn two_survivors_and_a_learner_become_three_clusters() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    wait_settled(&as_refs(&members)).await;
    members.push(learner(root.path(), &members).await);
    members[0].put("k", "v").await.unwrap();
    crate::common::eventually("the learner has it", || {
        let indices = members.iter().map(|member| {
            let page = member.http("/metrics");
            let applied = |line: &&str| line.starts_with("etcd_server_proposals_applied_total ");
            page.lines().find(applied).map(str::to_owned)
        });
        let indices: Vec<_> = indices.collect();
        indices[0].is_some() && indices.iter().all(|index| *index == indices[0])
    });
    members.iter_mut().for_each(TestMember::kill);
    let mut ids = Vec::new();
    for n in [0, 1, 3] {
        let member = &mut members[n];
        start_with_force(member);
        assert_eq!(member.get("k").await.unwrap().as_deref(), Some("v"));
        ids.push((cluster_id(member).await, member.member_id().await));
        let list = member.members().await.unwrap();
        assert_eq!((list.len(), list[0].is_learner), (1, false));
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 3);

    // Another member, whose disk was emptied, joins the first new cluster. Later that cluster is
    // recovered once more.
    let (first, rest) = members.split_at_mut(1);
    let (first, joiner) = (&mut first[0], &mut rest[1]);
    let url = |member: &TestMember| {
        let url = member.args.iter().find_map(|arg| arg.strip_prefix("--listen-peer-urls="));
        url.unwrap().to_owned()
    };
    std::fs::remove_dir_all(&joiner.data_dir).unwrap();
    let request = MemberAddRequest { peer_ur_ls: vec![url(joiner)], is_learner: true };
    let added = first.cluster().member_add(request).await.unwrap().into_inner().member.unwrap();
    joiner.args.push(format!("--initial-cluster=a={},c={}", url(first), url(joiner)));
    joiner.args.push("--initial-cluster-state=existing".to_owned());
    joiner.start();
    joiner.wait_ready();
    while first.cluster().member_promote(MemberPromoteRequest { id: added.id }).await.is_err() {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    first.put("k", "two").await.unwrap();
    let two = cluster_id(first).await;
    first.kill();
    first.start();
    first.wait_ready();
    assert_eq!(cluster_id(first).await, two);
    assert_eq!(first.members().await.unwrap().len(), 2);
    first.kill();
    joiner.kill();
    // Start once without `--force-new-cluster`. After that, the flag takes effect again.
    first.args.pop();
    first.start();
    crate::common::eventually("it has begun", || {
        first.log().matches("starting member").count() >= 4
    });
    first.kill();
    force_again(first).await;
    assert_ne!(cluster_id(first).await, two);
    assert_eq!(first.get("k").await.unwrap().as_deref(), Some("two"));
    let made = read_json(first, "muster-forced.json");
    assert_eq!(made["earlier"].as_array().unwrap().len(), 1, "{made}");
}

async fn force_again(member: &mut TestMember) {
    member.args.push("--force-new-cluster".to_owned());
    member.start();
    crate::common::eventually("it serves", || member.log().matches("ready to serve").count() >= 4);
    put_with_retries(member, "alive", "yes").await;
}

#[tokio::test]
async fn force_new_cluster_on_an_empty_directory_does_no_harm() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.args.push("--force-new-cluster".to_owned());
    member.start();
    member.wait_ready();
    member.put("k", "v").await.unwrap();
    let id = cluster_id(&member).await;
    // The member was created with `--force-new-cluster`. So the flag has no effect at its later
    // starts.
    for _ in 0..2 {
        member.kill();
        member.start();
        member.wait_ready();
        assert_eq!(cluster_id(&member).await, id);
    }
    assert!(
        member.log().contains("without a member's data, and is not followed"),
        "{}",
        member.log()
    );
    assert!(!member.data_dir.join("muster-forced.json").exists());
    member.kill();
    // Start once without `--force-new-cluster`. After that, the flag takes effect again.
    member.args.pop();
    member.start();
    member.wait_ready();
    member.kill();
    member.args.push("--force-new-cluster".to_owned());
    member.start();
    member.wait_ready();
    assert_ne!(cluster_id(&member).await, id);
    assert_eq!(member.get("k").await.unwrap().as_deref(), Some("v"));
}

#[tokio::test]
async fn a_running_member_a_damaged_one_and_a_tombstone_are_refused_and_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.start();
    member.wait_ready();
    member.put("k", "v").await.unwrap();
    let mut second = TestMember::alone(root.path());
    second.name = "second".to_owned();
    second.args.push(format!("--data-dir={}", member.data_dir.display()));
    second.args.push("--force-new-cluster".to_owned());
    second.start();
    assert_eq!(second.exit_code(), Some(1));
    assert!(second.log().contains("in use by another process"), "{}", second.log());
    assert_eq!(member.stop(), Some(0));

    let tomb = root.path().join("tomb");
    copy(&member.data_dir, &tomb);
    std::fs::write(tomb.join("muster-tombstone.json"), "{}").unwrap();
    second.args.push(format!("--data-dir={}", tomb.display()));
    second.start();
    assert_eq!(second.exit_code(), Some(3));

    let damaged = root.path().join("damaged");
    copy(&member.data_dir, &damaged);
    let log = damaged.join("member/wal/0000000000000001.wal");
    let mut bytes = std::fs::read(&log).unwrap();
    bytes[4096 + 30] ^= 1;
    std::fs::write(&log, bytes).unwrap();
    second.args.push(format!("--data-dir={}", damaged.display()));
    second.start();
    assert_eq!(second.exit_code(), Some(3));
    assert!(second.log().contains("is corrupt at offset 4096"), "{}", second.log());
    assert!(!damaged.join("muster-forcing.json").exists());
}

/// Kills the process at its N-th call that changes the disk, for each N.
#[tokio::test]
async fn a_recovery_killed_at_any_step_leaves_the_old_member_or_the_new_one() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    let leader = wait_settled(&as_refs(&members)).await;
    for n in 0..20 {
        members[leader].put("k", &n.to_string()).await.unwrap();
    }
    let old = cluster_id(&members[leader]).await;
    members.iter_mut().for_each(TestMember::kill);
    let member = &mut members[leader];
    let origin = root.path().join("origin");
    copy(&member.data_dir, &origin);
    let (mut olds, mut news, mut step) = (0, 0, 0);
    let mut alone = TestMember::alone(root.path());
    alone.args.push(format!("--data-dir={}", member.data_dir.display()));
    loop {
        step += 1;
        std::fs::remove_dir_all(&member.data_dir).unwrap();
        copy(&origin, &member.data_dir);
        let calls = "fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir";
        let mut killed = node_command_killed_at(calls, step);
        killed.args(&alone.args).arg("--force-new-cluster");
        let log = root.path().join("strace.log");
        killed.stderr(std::fs::File::create(&log).unwrap()).stdout(Stdio::null());
        let Ok(mut child) = killed.spawn() else { return report_skip("no strace") };
        let serves = || std::fs::read_to_string(&log).unwrap().contains("ready to serve");
        let ended = loop {
            if child.try_wait().unwrap().is_some() {
                break true;
            }
            if serves() {
                break false;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        };
        if !ended {
            let children = format!("/proc/{0}/task/{0}/children", child.id());
            let traced = std::fs::read_to_string(children).unwrap();
            let traced = rustix::process::Pid::from_raw(traced.trim().parse().unwrap()).unwrap();
            rustix::process::kill_process(traced, rustix::process::Signal::KILL).unwrap();
            child.wait().unwrap();
            break;
        }
        // Without `--force-new-cluster`, the killed member starts as the old one, which has no
        // quorum, or as the new one. That depends on the step at which it was killed.
        alone.start();
        crate::common::eventually("it says who it is", || {
            alone.log().contains("starting member") || alone.log().contains("server error")
        });
        let log = alone.log();
        let line = log.lines().find(|line| line.contains("\"starting member\"")).expect(&log);
        let said: Value = serde_json::from_str(line).unwrap();
        if said["cluster.id"] == format!("{old:x}") {
            olds += 1;
            assert_eq!(news, 0, "step {step} went back");
        } else {
            news += 1;
            put_with_retries(&alone, "after", "kill").await;
            assert_eq!(alone.get("k").await.unwrap().as_deref(), Some("19"), "step {step}");
            assert_eq!(alone.members().await.unwrap().len(), 1);
        }
        alone.kill();
        assert!(!member.data_dir.join("muster-forcing.json").exists(), "step {step}");
        std::fs::remove_file(root.path().join("one.log")).unwrap();
    }
    assert!(olds > 5 && news > 5, "{olds} times the old one, {news} times the new one");
}

#[tokio::test]
async fn etcds_variable_has_the_same_effect_as_its_flag() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.start();
    member.wait_ready();
    member.put("k", "v").await.unwrap();
    let old = cluster_id(&member).await;
    member.kill();
    let forced = |value: &str, member: &mut TestMember| {
        let program = root.path().join("forced");
        let node = env!("CARGO_BIN_EXE_muster-node");
        let script = format!("#!/bin/sh\nexec env ETCD_FORCE_NEW_CLUSTER={value} {node} \"$@\"\n");
        crate::common::write_script(&program, &script);
        member.program = Some(program);
        member.start();
        member.wait_ready();
    };
    forced("false", &mut member);
    assert_eq!(cluster_id(&member).await, old);
    member.kill();
    forced("true", &mut member);
    assert_ne!(cluster_id(&member).await, old);
    assert_eq!(member.get("k").await.unwrap().as_deref(), Some("v"));
}

/// Appends a ConfChange entry to the log of a stopped member, as if its leader's last message had
/// contained it. With `committed`, also records that the entry is committed.
fn append(member: &TestMember, operation: Operation, committed: bool) {
    use node_consensus::HardState;
    use node_engine::log::{Batch, Log, LogOptions};
    let disk: node_state::disk::SharedDisk = std::sync::Arc::new(node_state::disk::RealDisk);
    let member_dir = member.data_dir.join("member");
    let (mut log, found) = Log::open(&disk, &member_dir, &LogOptions::default()).unwrap();
    let entry = node_consensus::Entry {
        index: found.last().index + 1,
        term: found.hard_state.term,
        kind: node_consensus::EntryKind::ConfChange,
        data: command::encode(0, None, operation),
    };
    let commit = entry.index;
    let hard_state = committed.then_some(HardState { commit, ..found.hard_state });
    log.write(&[Batch { hard_state, entries: vec![entry], ..Batch::default() }]).unwrap();
}

#[tokio::test]
async fn a_survivor_whose_last_entry_removes_it_goes_on_unless_that_was_committed() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    wait_settled(&as_refs(&members)).await;
    members[0].put("k", "v").await.unwrap();
    let own = members[0].member_id().await;
    members.iter_mut().for_each(TestMember::kill);
    let removal = || {
        Operation::ChangeMember(MemberChange {
            change: Some(Change::Remove(own)),
            ..MemberChange::default()
        })
    };
    let survivor = &mut members[0];
    let origin = root.path().join("origin");
    copy(&survivor.data_dir, &origin);
    append(survivor, removal(), true);
    survivor.args.push("--force-new-cluster".to_owned());
    survivor.start();
    assert_eq!(survivor.exit_code(), Some(3), "{}", survivor.log());
    assert!(survivor.log().contains("has removed this member"), "{}", survivor.log());

    std::fs::remove_dir_all(&survivor.data_dir).unwrap();
    copy(&origin, &survivor.data_dir);
    append(survivor, removal(), false);
    survivor.start();
    crate::common::eventually("it serves", || {
        survivor.log().matches("ready to serve client requests").count() == 2
    });
    assert!(survivor.log().contains("removes this very member"), "{}", survivor.log());
    assert_eq!(survivor.get("k").await.unwrap().as_deref(), Some("v"));
    assert_eq!(survivor.members().await.unwrap().len(), 1);
}

#[tokio::test]
async fn on_a_full_disk_no_cluster_is_made_and_the_old_member_stays() {
    let root = tempfile::tempdir().unwrap();
    let Some(small) = SmallFilesystem::mount(&root.path().join("small"), 300) else {
        return report_skip("no tmpfs can be mounted");
    };
    let mut member = TestMember::alone(root.path());
    member.data_dir = small.0.join("data");
    member.args.push(format!("--data-dir={}", member.data_dir.display()));
    member.start();
    member.wait_ready();
    member.put("k", "v").await.unwrap();
    let old = cluster_id(&member).await;
    member.kill();
    let filler = small.fill_up_to(0);
    let dir = member.data_dir.display().to_string();
    let recover = || {
        let args = ["data", "recover", &dir, "--i-accept-data-loss", "--json"];
        crate::common::node_command().args(args).output().unwrap()
    };
    let full = recover();
    let said = String::from_utf8_lossy(&full.stderr).into_owned();
    assert_eq!(full.status.code(), Some(1), "{said}");
    assert!(said.contains("No space left on device"), "{said}");
    std::fs::remove_file(&filler).unwrap();
    // The failed attempt changed nothing, and the next one succeeds.
    let status = ["data", "status", "--json", &dir];
    let seen = crate::common::node_command().args(status).output().unwrap();
    let seen: Value = serde_json::from_slice(&seen.stdout).unwrap();
    assert_eq!(
        (&seen["state"], &seen["cluster_id"]),
        (&"whole".into(), &format!("{old:x}").into())
    );
    assert_eq!(recover().status.code(), Some(0));
    member.start();
    member.wait_ready();
    assert_ne!(cluster_id(&member).await, old);
    assert_eq!(member.get("k").await.unwrap().as_deref(), Some("v"));
}
