//! Clusters of three or five members: formation, forwarding, loss of the leader, and members of
//! other clusters.

use crate::common::{
    TestMember, as_refs, etcdctl, eventually, five_members, put_with_retries, start_led_by_first,
    start_three, start_three_led_by_first, three_members, wait_same_hash, wait_settled,
};

#[tokio::test]
async fn the_first_member_leads_first_and_every_member_takes_writes() {
    let root = tempfile::tempdir().unwrap();
    let members = start_three_led_by_first(root.path());
    assert_eq!(wait_settled(&as_refs(&members)).await, 0);
    let mut revision = 0;
    for member in &members {
        revision = member.put(&format!("by-{}", member.name), "x").await.unwrap();
    }
    for member in &members {
        for other in &members {
            let got = member.get(&format!("by-{}", other.name)).await.unwrap();
            assert_eq!(got.as_deref(), Some("x"));
        }
    }
    wait_same_hash(&members, revision).await;
}

#[tokio::test]
async fn writes_go_on_without_the_leader_and_it_catches_up_when_it_returns() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    for round in 0..2 {
        let leader = wait_settled(&as_refs(&members)).await;
        members[0].put(&format!("before-{round}"), "x").await.unwrap();
        members[leader].kill();
        let other = &members[(leader + 1) % 3];
        let revision = put_with_retries(other, &format!("during-{round}"), "y").await;
        members[leader].start();
        members[leader].wait_ready();
        wait_same_hash(&members, revision).await;
        let got = members[leader].get(&format!("during-{round}")).await.unwrap();
        assert_eq!(got.as_deref(), Some("y"));
    }
}

#[tokio::test]
async fn a_leader_that_is_stopped_gracefully_hands_over_first() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three_led_by_first(root.path());
    let leader = wait_settled(&as_refs(&members)).await;
    assert_eq!(members[leader].stop(), Some(0));
    let others: Vec<&TestMember> =
        members.iter().enumerate().filter(|(n, _)| *n != leader).map(|(_, m)| m).collect();
    // The leader exits only after another member has become leader. Without this handover, there
    // would be no leader yet: an election takes at least the election timeout.
    let mut successors = 0;
    for member in &others {
        let status = member.status().await.unwrap();
        successors += usize::from(status.leader == status.header.unwrap().member_id);
    }
    assert_eq!(successors, 1);
    put_with_retries(others[0], "after", "x").await;
}

/// All members have equal logs, so only closed streams show the leader which member is dead.
#[tokio::test]
async fn a_leader_that_is_stopped_gracefully_hands_over_to_no_dead_member() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_led_by_first(five_members(root.path()));
    let leader = wait_settled(&as_refs(&members)).await;
    let mut ids = Vec::new();
    for member in &members {
        ids.push(member.member_id().await);
    }
    let followers = (0..5).filter(|n| *n != leader);
    let dead = followers.max_by_key(|n| ids[*n]).unwrap();
    members[dead].kill();
    eventually("its streams end", || !members[leader].has_stream_to(ids[dead]));
    assert_eq!(members[leader].stop(), Some(0));
    let left: Vec<&TestMember> =
        (0..5).filter(|n| ![leader, dead].contains(n)).map(|n| &members[n]).collect();
    let mut successors = 0;
    for member in &left {
        let status = member.status().await.unwrap();
        successors += usize::from(status.leader == status.header.unwrap().member_id);
    }
    assert_eq!(successors, 1, "an election would take longer than this test waits");
    put_with_retries(left[0], "after", "x").await;
}

/// An operator who looks at one member should see which connections are missing.
#[tokio::test]
async fn a_member_that_is_not_ready_names_the_peers_that_it_has_no_stream_to() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    let leader = wait_settled(&as_refs(&members)).await;
    let (gone, left) = ([leader, (leader + 1) % 3], (leader + 2) % 3);
    let mut expected = Vec::new();
    for n in gone {
        expected.push(format!("{} ({:x})", members[n].name, members[n].member_id().await));
    }
    for n in gone {
        members[n].kill();
    }
    eventually("its readiness names both", || {
        let ready = members[left].http("/readyz");
        let reason = ready.lines().find(|line| line.starts_with("[-]linearizable_read failed: "));
        reason.is_some_and(|reason| {
            reason.contains("; no stream to ") && expected.iter().all(|name| reason.contains(name))
        })
    });
}

#[test]
fn a_member_without_peers_retries_to_publish_itself() {
    let root = tempfile::tempdir().unwrap();
    let mut alone = three_members(root.path()).swap_remove(0);
    // A client's request may wait for two election timeouts. With this flag, that is longer than
    // the whole test waits, so publishing must have a limit of its own.
    alone.args.push("--election-timeout=50000".to_owned());
    // A keep-alive for the service manager is due every 100 ms. It must not begin the attempt to
    // publish the member anew. Otherwise no attempt would reach its time limit.
    let node = env!("CARGO_BIN_EXE_muster-node").to_owned();
    alone.program = Some("/usr/bin/env".into());
    alone.args.splice(0..0, ["WATCHDOG_USEC=300000".to_owned(), node]);
    alone.start();
    eventually("it has given up waiting twice", || {
        alone.log().matches("failed to publish local member").count() == 2
    });
    assert!(alone.log().contains("no answer in time"), "{}", alone.log());
}

#[tokio::test]
async fn one_of_three_members_serves_local_reads_and_refuses_the_rest() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    members[0].put("k", "v").await.unwrap();
    eventually("the last one has it", || {
        etcdctl(&members[2].client_url, &["get", "k", "--consistency=s"])
            .is_none_or(|(_, text)| text.contains('v'))
    });
    members[0].kill();
    members[1].kill();
    let local = etcdctl(&members[2].client_url, &["get", "k", "--consistency=s"]);
    if let Some((done, text)) = local {
        assert!(done && text.contains('v'), "{text}");
    }
    assert!(members[2].put("k", "w").await.is_err());
    assert!(members[2].get("k").await.is_err());
}

#[tokio::test]
async fn a_restarted_member_with_a_wiped_disk_exits_and_never_serves() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    wait_settled(&as_refs(&members)).await;
    members[2].kill();
    std::fs::remove_dir_all(&members[2].data_dir).unwrap();
    let before = members[2].log().matches("ready to serve").count();
    members[2].start();
    assert_eq!(members[2].exit_code(), Some(3));
    assert!(members[2].log().contains("its disk was wiped or replaced"), "{}", members[2].log());
    put_with_retries(&members[0], "still", "serving").await;
    assert!(members[2].get("still").await.is_err());
    assert_eq!(members[2].log().matches("ready to serve").count(), before);
}

#[tokio::test]
async fn a_second_process_on_a_copy_of_the_data_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    members[2].put("old", "x").await.unwrap();
    members[2].kill();
    let copy = root.path().join("copy");
    let status = std::process::Command::new("cp")
        .arg("-a")
        .args([&members[2].data_dir, &copy])
        .status()
        .unwrap();
    assert!(status.success());
    members[2].start();
    members[2].wait_ready();
    let others = [members[0].member_id().await, members[1].member_id().await];
    eventually("both know it", || others.iter().all(|other| members[2].has_stream_to(*other)));
    // The copy has the same state as the original. So both processes start with the same boot
    // counter.
    let [peer, client] = crate::common::free_ports();
    let initial = members[2].args.last().unwrap().strip_prefix("--initial-cluster=").unwrap();
    let mut twin = TestMember::new(root.path(), "c", peer, client, initial);
    twin.args.retain(|arg| !arg.starts_with("--initial-advertise") && !arg.starts_with("--data"));
    let advertised = members[2].args.iter().find(|arg| arg.starts_with("--initial-advertise"));
    twin.args.push(advertised.unwrap().clone());
    twin.args.push(format!("--data-dir={}", copy.display()));
    twin.start();
    eventually("a peer refuses it", || {
        members[..2].iter().any(|member| member.log().contains("its data directory is a copy"))
    });
    assert_eq!(twin.exit_code(), Some(3));
    put_with_retries(&members[0], "still", "serving").await;
}

#[tokio::test]
async fn members_of_another_cluster_are_refused_at_the_handshake() {
    let (one_root, two_root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let members = start_three(one_root.path());
    // The stranger uses a peer address of this cluster. Its token differs, and so does its cluster
    // id.
    let mut stranger = three_members(two_root.path()).swap_remove(0);
    let addresses = members[0].args.last().unwrap().clone();
    let own = stranger.args.iter().find(|a| a.starts_with("--initial-advertise")).unwrap();
    let own = own.split_once('=').unwrap().1.to_owned();
    let initial = addresses.strip_prefix("--initial-cluster=").unwrap();
    // The stranger gets only one address of this cluster, because a member refuses to bootstrap if
    // most of its members run already.
    let other = initial.split(',').find(|part| part.starts_with("b=")).unwrap();
    stranger.args.push(format!("--initial-cluster=a={own},{other},c=http://127.0.0.1:9"));
    stranger.args.push("--initial-cluster-token=other".to_owned());
    stranger.start();
    eventually("both sides say why", || {
        stranger.log().contains("cluster ID mismatch")
            && members[1].log().contains("cluster ID mismatch")
    });
    assert!(!stranger.log().contains("ready to serve"));
    members[0].put("k", "v").await.unwrap();
}

#[tokio::test]
async fn metrics_show_each_peers_traffic_under_etcds_names() {
    let root = tempfile::tempdir().unwrap();
    let members = start_three(root.path());
    let leader = wait_settled(&as_refs(&members)).await;
    members[leader].put("k", "v").await.unwrap();
    let ids: Vec<u64> = {
        let mut ids = Vec::new();
        for member in &members {
            ids.push(member.status().await.unwrap().header.unwrap().member_id);
        }
        ids
    };
    let others = || ids.iter().enumerate().filter(|(n, _)| *n != leader).map(|(_, id)| *id);
    eventually("it reaches both", || others().all(|peer| members[leader].has_stream_to(peer)));
    let body = members[leader].http("/metrics");
    let value = |line: String| {
        let found = body.lines().find_map(|found| found.strip_prefix(line.as_str()));
        found.unwrap_or_else(|| panic!("no {line} in {body}")).trim().parse::<f64>().unwrap()
    };
    let local = ids[leader];
    for peer in ids.iter().filter(|id| **id != local) {
        assert!(value(format!("etcd_network_peer_sent_bytes_total{{To=\"{peer:x}\"}}")) > 0.0);
        assert!(
            value(format!("etcd_network_peer_received_bytes_total{{From=\"{peer:x}\"}}")) > 0.0
        );
        value(format!("etcd_network_peer_sent_failures_total{{To=\"{peer:x}\"}}"));
        let link = format!("{{Local=\"{local:x}\",Remote=\"{peer:x}\"}}");
        assert_eq!(value(format!("etcd_network_active_peers{link}")), 1.0);
    }
}
