//! Adding, moving, promoting and removing members. A new member takes two steps: the cluster adds
//! it, then it starts.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::{
    NO_ELECTIONS, TestMember, WAIT_LIMIT, as_refs, etcdctl, eventually, free_ports,
    put_with_retries, retry_while_unhealthy, start_three, start_three_led_by_first, wait_same_hash,
    wait_settled,
};
use node_proto::etcdserverpb::{
    self as pb, MemberAddRequest, MemberListRequest, MemberPromoteRequest, MemberRemoveRequest,
    MemberUpdateRequest, maintenance_client::MaintenanceClient,
};
use rustix::process::Signal;
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Status};

const REMOVED: &str = "this member has been permanently removed from the cluster";

async fn add(member: &TestMember, url: &str, is_learner: bool) -> Result<pb::Member, Status> {
    let request = MemberAddRequest { peer_ur_ls: vec![url.to_owned()], is_learner };
    Ok(member.cluster().member_add(request).await?.into_inner().member.unwrap())
}

async fn remove(member: &TestMember, id: u64) -> Result<(), Status> {
    member.cluster().member_remove(MemberRemoveRequest { id }).await.map(drop)
}

async fn promote(member: &TestMember, id: u64) -> Result<(), Status> {
    member.cluster().member_promote(MemberPromoteRequest { id }).await.map(drop)
}

async fn update(member: &TestMember, id: u64, urls: &[&str]) -> Result<(), Status> {
    let peer_ur_ls = urls.iter().map(|url| (*url).to_owned()).collect();
    member.cluster().member_update(MemberUpdateRequest { id, peer_ur_ls }).await.map(drop)
}

fn expect_error<T: std::fmt::Debug>(result: Result<T, Status>) -> (Code, String) {
    let status = result.unwrap_err();
    (status.code(), status.message().to_owned())
}

/// Returns a member on the given ports that is to join `members`, not started yet.
fn joiner(root: &Path, name: &str, members: &[TestMember], [peer, client]: [u16; 2]) -> TestMember {
    let initial: Vec<String> = members
        .iter()
        .map(|member| (member.name.as_str(), peer_url(member)))
        .chain([(name, format!("http://127.0.0.1:{peer}"))])
        .map(|(name, url)| format!("{name}={url}"))
        .collect();
    let mut joiner = TestMember::new(root, name, peer, client, &initial.join(","));
    joiner.args.push("--initial-cluster-state=existing".to_owned());
    joiner
}

fn peer_url(member: &TestMember) -> String {
    let flag = "--initial-advertise-peer-urls=";
    member.args.iter().find_map(|arg| arg.strip_prefix(flag)).unwrap().to_owned()
}

#[tokio::test]
async fn the_guides_commands_add_a_member_start_it_and_remove_it_for_good() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    let first = members[0].put("before", "x").await.unwrap();
    let url = members[1].client_url.clone();
    let [peer, client] = free_ports();
    let peer_urls = format!("--peer-urls=http://127.0.0.1:{peer}");
    let mut said = String::new();
    let mut missing = false;
    eventually("the member is added", || {
        match etcdctl(&url, &["member", "add", "d", &peer_urls]) {
            None => {
                missing = true;
                true
            }
            Some((done, text)) => {
                assert!(done || text.contains("etcdserver: unhealthy cluster"), "{text}");
                said = text;
                done
            }
        }
    });
    if missing {
        return;
    }
    // etcdctl pads the ids to 16 characters.
    let id = said.strip_prefix("Member ").unwrap().split_whitespace().next().unwrap().to_owned();
    assert!(said.contains(" added to cluster "), "{said}");
    // Start the new member with the settings that etcdctl has printed, and no others.
    let mut new = TestMember::new(root.path(), "d", peer, client, "");
    new.args.retain(|arg| !arg.starts_with("--name") && !arg.starts_with("--initial-cluster"));
    for line in said.lines().filter_map(|line| line.strip_prefix("ETCD_")) {
        let (variable, value) = line.split_once('=').unwrap();
        let flag = variable.to_lowercase().replace('_', "-");
        new.args.push(format!("--{flag}={}", value.trim_matches('"')));
    }
    new.start();
    new.wait_ready();
    assert_eq!(new.get("before").await.unwrap().as_deref(), Some("x"));
    // A joining member connects twice to the others: to fetch the state, and for its peer streams.
    // They must not take that for two processes of one member.
    assert!(!new.log().contains("runs twice"), "{}", new.log());
    let revision = new.put("by-d", "x").await.unwrap();
    assert!(revision > first);
    members.push(new);
    wait_same_hash(&members, revision).await;
    let (done, list) = etcdctl(&url, &["member", "list"]).unwrap();
    let listed = list.lines().find(|line| line.starts_with(&id)).unwrap();
    let expected =
        format!("{id}, started, d, http://127.0.0.1:{peer}, http://127.0.0.1:{client}, false");
    assert!(done && listed == expected, "{list}");

    let mut new = members.pop().unwrap();
    let mut text = String::new();
    eventually("the member is removed", || {
        let (done, said) = etcdctl(&url, &["member", "remove", &id]).unwrap();
        text = said;
        done
    });
    assert!(text.starts_with(&format!("Member {id:>16} removed from cluster ")), "{text}");
    assert_eq!(new.exit_code(), Some(3));
    assert!(new.log().contains(REMOVED));
    for start in 2..=3 {
        new.start();
        assert_eq!(new.exit_code(), Some(3));
        assert_eq!(new.log().matches(REMOVED).count(), start, "{}", new.log());
    }
    put_with_retries(&members[0], "after", "x").await;
    assert_eq!(members[0].members().await.unwrap().len(), 3);
}

#[tokio::test]
async fn a_learner_serves_little_and_is_promoted_once_it_is_in_sync() {
    let root = tempfile::tempdir().unwrap();
    let members = start_three(root.path());
    let ports = free_ports();
    let mut new = joiner(root.path(), "d", &members, ports);
    let learner =
        retry_while_unhealthy(async || add(&members[0], &peer_url(&new), true).await).await;
    assert!(learner.is_learner && learner.name.is_empty());
    // On a busy machine a broken stream can make the cluster unhealthy for a while. The request is
    // then refused with another error than the expected one.
    let start = Instant::now();
    let too_many = loop {
        let refusal = expect_error(add(&members[1], "http://127.0.0.1:9", true).await);
        if refusal.0 != Code::Unavailable || start.elapsed() > WAIT_LIMIT {
            break refusal;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let expected = (Code::FailedPrecondition, "etcdserver: too many learner members in cluster");
    assert_eq!((too_many.0, too_many.1.as_str()), expected);
    let behind = "etcdserver: can only promote a learner member which is in sync with leader";
    for member in &members {
        let early = expect_error(promote(member, learner.id).await);
        assert_eq!((early.0, early.1.as_str()), (Code::FailedPrecondition, behind));
    }
    new.start();
    new.wait_ready();
    let not_for_learners = "etcdserver: rpc not supported for learner";
    for refusal in [
        expect_error(new.put("k", "v").await),
        expect_error(new.get("k").await),
        expect_error(new.members().await),
        expect_error(promote(&new, learner.id).await),
    ] {
        assert_eq!((refusal.0, refusal.1.as_str()), (Code::FailedPrecondition, not_for_learners));
    }
    assert!(new.status().await.unwrap().is_learner);
    assert!(new.http("/health").starts_with("HTTP/1.1 200"));
    assert!(new.http("/readyz").contains("[-]non_learner failed"));
    let start = Instant::now();
    while let Err(error) = promote(&members[2], learner.id).await {
        assert_eq!(error.message(), behind);
        assert!(start.elapsed() < WAIT_LIMIT);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let revision = put_with_retries(&new, "by-d", "x").await;
    assert!(!new.status().await.unwrap().is_learner);
    let mut members = members;
    members.push(new);
    wait_same_hash(&members, revision).await;
    for (id, code, text) in [
        (learner.id, Code::FailedPrecondition, "etcdserver: can only promote a learner member"),
        (0x1234, Code::NotFound, "etcdserver: member not found"),
    ] {
        let refusal = expect_error(promote(&members[1], id).await);
        assert_eq!((refusal.0, refusal.1.as_str()), (code, text));
    }
}

#[tokio::test]
async fn an_impossible_member_change_is_refused_with_etcds_message() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    let ids =
        [members[0].member_id().await, members[1].member_id().await, members[2].member_id().await];
    let asked = &members[1];
    let unhealthy = (Code::Unavailable, "etcdserver: unhealthy cluster".to_owned());
    let before = asked.members().await.unwrap();
    let bad = (Code::InvalidArgument, "etcdserver: given member URLs are invalid".to_owned());
    for url in ["garbage", "http://h:1/path", "ftp://h:1", ""] {
        assert_eq!(expect_error(add(asked, url, false).await), bad, "{url}");
        assert_eq!(expect_error(update(asked, ids[0], &[url]).await), bad, "{url}");
    }
    assert_eq!(expect_error(update(asked, ids[0], &[]).await), bad);
    let taken = (Code::FailedPrecondition, "etcdserver: Peer URLs already exists".to_owned());
    let other = peer_url(&members[2]);
    assert_eq!(expect_error(update(asked, ids[0], &[&other]).await), taken);
    let start = Instant::now();
    loop {
        let refusal = expect_error(add(asked, &other, false).await);
        if refusal != unhealthy {
            assert_eq!(refusal, taken);
            break;
        }
        assert!(start.elapsed() < WAIT_LIMIT);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let unknown = (Code::NotFound, "etcdserver: member not found".to_owned());
    assert_eq!(expect_error(remove(asked, 0x1234).await), unknown);
    assert_eq!(expect_error(update(asked, 0x1234, &["http://127.0.0.1:9"]).await), unknown);
    assert_eq!(asked.members().await.unwrap(), before);

    // While one member is stopped, no member can be added, and no running member can be removed.
    // The stopped member can be removed.
    members[2].kill();
    wait_settled(&[&members[0], &members[1]]).await;
    let asked = &members[1];
    eventually("both notice", || members[..2].iter().all(|member| !member.has_stream_to(ids[2])));
    assert_eq!(expect_error(add(asked, "http://127.0.0.1:9", true).await), unhealthy);
    assert_eq!(expect_error(remove(asked, ids[0]).await), unhealthy);
    retry_while_unhealthy(async || remove(asked, ids[2]).await).await;
    assert_eq!(expect_error(remove(asked, ids[2]).await), unknown);
    // Two members are left, and both are needed for a quorum. So a removal is refused until both
    // have been connected for some time.
    let last = retry_while_unhealthy(async || remove(asked, ids[0]).await).await;
    let () = last;
    assert_eq!(members[0].exit_code(), Some(3));
    let alone = (
        Code::FailedPrecondition,
        "etcdserver: re-configuration failed due to not enough started members".to_owned(),
    );
    assert_eq!(expect_error(remove(&members[1], ids[1]).await), alone);
    put_with_retries(&members[1], "still", "serving").await;
}

/// Returns a request to remove `id` with this operation id, planned on configuration `planned_at`.
fn removal(id: u64, operation: &str, planned_at: u64) -> Request<MemberRemoveRequest> {
    let mut request = Request::new(MemberRemoveRequest { id });
    request.metadata_mut().insert("muster-operation", operation.parse().unwrap());
    request.metadata_mut().insert("muster-planned-at", planned_at.into());
    request
}

fn configuration_number_in(metadata: &MetadataMap) -> u64 {
    metadata.get("muster-configuration").unwrap().to_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn an_operation_is_carried_out_once_and_a_stale_plan_never() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    let [operation, other] = ["0123456789abcdef0123456789abcdef", &"f".repeat(32)];
    let url = "http://127.0.0.1:9";
    let mut planned = 0;
    let added = retry_while_unhealthy(async || {
        let mut cluster = members[0].cluster();
        let list = cluster.member_list(MemberListRequest { linearizable: true }).await?;
        planned = configuration_number_in(list.metadata());
        let request = MemberAddRequest { peer_ur_ls: vec![url.to_owned()], is_learner: true };
        let mut request = Request::new(request);
        request.metadata_mut().insert("muster-operation", operation.parse().unwrap());
        request.metadata_mut().insert("muster-planned-at", planned.into());
        members[0].cluster().member_add(request).await
    })
    .await;
    let at = configuration_number_in(added.metadata());
    assert!(at > planned);
    let id = added.into_inner().member.unwrap().id;
    for member in &members {
        // A completed operation's id is refused, even in a request of another kind. It doesn't
        // matter on which configuration the request was planned.
        for again in [removal(id, operation, at), removal(id, operation, planned)] {
            let status = member.cluster().member_remove(again).await.unwrap_err();
            assert_eq!(status.code(), Code::AlreadyExists, "{status}");
            assert_eq!(
                status.message(),
                format!("muster: this operation was carried out, at configuration {at}")
            );
            assert_eq!(configuration_number_in(status.metadata()), at);
        }
        let stale = member.cluster().member_remove(removal(id, other, planned)).await.unwrap_err();
        assert_eq!(stale.code(), Code::Aborted, "{stale}");
        assert!(stale.message().ends_with(&format!("the configuration is {at} now")), "{stale}");
        assert_eq!(configuration_number_in(stale.metadata()), at);
        let mut bad = Request::new(MemberRemoveRequest { id });
        bad.metadata_mut().insert("muster-operation", "0123".parse().unwrap());
        let status = member.cluster().member_remove(bad).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    }
    let removed = members[0].cluster().member_remove(removal(id, other, at)).await.unwrap();
    let gone = configuration_number_in(removed.metadata());
    assert!(gone > at);
    // The operations are remembered after the member's removal and after a restart of all members.
    for member in &mut members {
        member.kill();
    }
    members.iter_mut().for_each(TestMember::start);
    members.iter_mut().for_each(TestMember::wait_ready);
    wait_settled(&as_refs(&members)).await;
    for (operation, done) in [(operation, at), (other, gone)] {
        let again = removal(id, operation, gone);
        let status = members[1].cluster().member_remove(again).await.unwrap_err();
        assert_eq!(status.code(), Code::AlreadyExists, "{status}");
        assert_eq!(configuration_number_in(status.metadata()), done);
    }
}

/// Gives `mover` a new peer URL through `asked`, and restarts it there.
async fn move_to_new_peer_url(asked: &TestMember, mover: &mut TestMember) -> String {
    let [peer] = free_ports();
    let new = format!("http://127.0.0.1:{peer}");
    update(asked, mover.member_id().await, &[&new]).await.unwrap();
    assert_eq!(mover.stop(), Some(0));
    start_with_peer_url(mover, &new);
    new
}

/// Starts `mover` with another peer URL in its flags.
fn start_with_peer_url(mover: &mut TestMember, new: &str) {
    let old = peer_url(mover);
    for arg in &mut mover.args {
        if arg.starts_with("--listen-peer") || arg.starts_with("--initial-advertise") {
            *arg = arg.replace(&old, new);
        }
    }
    mover.start();
    mover.wait_ready();
}

/// Moves leadership to `members[to]`.
async fn move_leadership(members: &[&TestMember], to: usize) {
    let target_id = members[to].member_id().await;
    let start = Instant::now();
    loop {
        let leader = wait_settled(members).await;
        if leader == to {
            return;
        }
        let mut asked = MaintenanceClient::new(members[leader].channel());
        // The request fails if the member is no longer the leader. The loop then asks the new
        // leader.
        let _ = asked.move_leader(pb::MoveLeaderRequest { target_id }).await;
        assert!(start.elapsed() < WAIT_LIMIT, "{} never leads", members[to].name);
    }
}

/// Starts a stopped member, and waits until it has the newest data and serves a linearizable read.
async fn start_and_catch_up(away: &mut TestMember, leader: &TestMember) {
    away.start();
    let revision = put_with_retries(leader, "while-it-was-away", "x").await;
    let start = Instant::now();
    while away.hash(revision).await.ok() != leader.hash(revision).await.ok() {
        assert!(start.elapsed() < WAIT_LIMIT, "it stays behind:\n{}", away.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(away.get("while-it-was-away").await.unwrap().as_deref(), Some("x"));
}

#[tokio::test]
async fn a_returning_member_follows_a_leader_that_was_added_meanwhile() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three_led_by_first(root.path());
    let ports = free_ports();
    let mut new = joiner(root.path(), "d", &members, ports);
    new.args.push(NO_ELECTIONS.to_owned());
    let url = peer_url(&new);
    // The third member stays connected until it is stopped, so it never learns of the addition.
    let taken = peer_url(&members[1]);
    let refusal = retry_while_unhealthy(async || match add(&members[0], &taken, false).await {
        Err(status) if status.code() == Code::FailedPrecondition => Ok(status),
        other => Err(other.unwrap_err()),
    });
    assert_eq!(refusal.await.message(), "etcdserver: Peer URLs already exists");
    members[2].signal(Signal::STOP);
    retry_while_unhealthy(async || add(&members[0], &url, false).await).await;
    members[2].kill();
    new.start();
    new.wait_ready();
    move_leadership(&[&members[0], &members[1], &new], 2).await;
    start_and_catch_up(&mut members[2], &new).await;
    assert!(new.status().await.unwrap().leader == new.member_id().await, "it led all the time");
}

#[tokio::test]
async fn a_returning_member_finds_a_leader_that_moved_meanwhile() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three_led_by_first(root.path());
    members[2].kill();
    let [one, mover, away] = &mut members[..] else { unreachable!("three") };
    wait_settled(&[one, mover]).await;
    move_to_new_peer_url(one, mover).await;
    move_leadership(&[one, mover], 1).await;
    start_and_catch_up(away, mover).await;
    assert!(mover.status().await.unwrap().leader == mover.member_id().await, "it led all the time");
}

/// Simulates an update of a peer URL of which no running member has learned.
#[tokio::test]
async fn a_member_whose_new_peer_url_nobody_knows_announces_it_itself() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    let [others @ .., mover] = &mut members[..] else { unreachable!("three") };
    assert_eq!(mover.stop(), Some(0));
    let [peer] = free_ports();
    start_with_peer_url(mover, &format!("http://127.0.0.1:{peer}"));
    let revision = put_with_retries(&others[0], "moved", "x").await;
    wait_same_hash(&members, revision).await;
}

#[tokio::test]
async fn a_member_moves_to_other_peer_urls_by_update_then_restart() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    let id = members[2].member_id().await;
    let [one, _, mover] = &mut members[..] else { unreachable!("three") };
    let new = move_to_new_peer_url(one, mover).await;
    let revision = put_with_retries(&members[2], "moved", "x").await;
    wait_same_hash(&members, revision).await;
    let listed = members[0].members().await.unwrap();
    let moved = listed.iter().find(|member| member.id == id).unwrap();
    assert_eq!((moved.peer_ur_ls.as_slice(), moved.is_learner), ([new].as_slice(), false));
}

/// Number of changes of a follower's peer URL while clients write through that follower.
const MOVES: usize = 40;

#[tokio::test]
async fn no_put_is_lost_while_the_forwarding_member_changes_its_peer_url() {
    let root = tempfile::tempdir().unwrap();
    // A lost put would time out and fail the test. Elections are off, because an election could
    // also make a put fail.
    let members = start_three_led_by_first(root.path());
    let follower = &members[1];
    let id = follower.member_id().await;
    let [url, nowhere] = [peer_url(follower), "http://192.0.2.1:2380".to_owned()];
    let other = url.replace("127.0.0.1", "localhost");
    for n in 0..MOVES {
        let urls = [[&other, &url, &nowhere][n % 3].as_str()];
        let keys = ["a", "b", "c"].map(|key| format!("{key}{n}"));
        let [a, b, c] = &keys;
        let (moved, first, second, third) = tokio::join!(
            update(&members[2], id, &urls),
            follower.put(a, "x"),
            follower.put(b, "x"),
            follower.put(c, "x"),
        );
        moved.unwrap();
        for put in [first, second, third] {
            put.unwrap_or_else(|error| panic!("move {n}: {error}"));
        }
    }
    let revision = follower.put("last", "x").await.unwrap();
    wait_same_hash(&members, revision).await;
}

#[tokio::test]
async fn a_leader_that_is_removed_hands_over_first() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three_led_by_first(root.path());
    let leader = wait_settled(&as_refs(&members)).await;
    let id = members[leader].member_id().await;
    let asked = &members[leader];
    retry_while_unhealthy(async || remove(asked, id).await).await;
    let mut old = members.remove(leader);
    let start = Instant::now();
    put_with_retries(&members[0], "after", "x").await;
    let elapsed = start.elapsed();
    assert!(elapsed < Duration::from_secs(18), "{elapsed:?}: {NO_ELECTIONS}");
    assert_eq!(old.exit_code(), Some(3));
    assert!(old.log().contains(REMOVED));
    assert_eq!(members[1].members().await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_member_that_the_cluster_does_not_expect_logs_why_it_can_not_join() {
    let root = tempfile::tempdir().unwrap();
    let members = start_three(root.path());
    let ports = free_ports();
    let mut early = joiner(root.path(), "d", &members, ports);
    early.start();
    assert_eq!(early.exit_code(), Some(1));
    assert!(early.log().contains("member count is unequal"), "{}", early.log());
    retry_while_unhealthy(async || add(&members[0], &peer_url(&early), true).await).await;
    let mut elsewhere = joiner(root.path(), "e", &members, free_ports());
    elsewhere.start();
    assert_eq!(elsewhere.exit_code(), Some(1));
    let why = "unmatched member while checking PeerURLs";
    assert!(elsewhere.log().contains(why), "{}", elsewhere.log());
    assert!(!elsewhere.data_dir.join("member/wal").exists(), "it has begun nothing");
    let mut nobody = joiner(root.path(), "f", &[], free_ports());
    nobody.start();
    assert_eq!(nobody.exit_code(), Some(1));
    assert!(nobody.log().contains("could not retrieve cluster information"), "{}", nobody.log());
    // `early` failed before, because the cluster had no member with its peer URL. Now the cluster
    // has one, so `early` can start.
    early.start();
    eventually("it serves", || early.log().contains("ready to serve client requests"));
}

#[tokio::test]
async fn a_new_member_with_a_wiped_disk_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let members = start_three(root.path());
    let mut new = joiner(root.path(), "d", &members, free_ports());
    retry_while_unhealthy(async || add(&members[0], &peer_url(&new), true).await).await;
    new.start();
    new.wait_ready();
    new.kill();
    std::fs::remove_dir_all(&new.data_dir).unwrap();
    new.start();
    assert_eq!(new.exit_code(), Some(3), "{}", new.log());
    assert!(new.log().contains("its disk was wiped or replaced"), "{}", new.log());
}

#[tokio::test]
async fn one_member_becomes_three_and_serves_all_the_time() {
    let root = tempfile::tempdir().unwrap();
    let mut members = vec![TestMember::alone(root.path())];
    members[0].start();
    members[0].wait_ready();
    for name in ["two", "three"] {
        let mut new = joiner(root.path(), name, &members, free_ports());
        // The new member is added as a voter, as in etcd's guide. It begins as a learner all the
        // same, because the cluster has a single member.
        retry_while_unhealthy(async || add(&members[0], &peer_url(&new), false).await).await;
        members[0].put(name, "is not here yet").await.unwrap();
        new.start();
        new.wait_ready();
        // The new member serves requests as a voter would, even if it hasn't been promoted yet.
        if let Err(error) = new.put("through", name).await {
            assert!(!error.message().contains("learner"), "{error}");
        }
        members.push(new);
        let count = members.len();
        let start = Instant::now();
        loop {
            let listed = members[0].members().await.unwrap();
            if listed.len() == count && listed.iter().all(|member| !member.is_learner) {
                break;
            }
            assert!(start.elapsed() < WAIT_LIMIT, "{listed:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    let revision = put_with_retries(&members[2], "by-three", "x").await;
    wait_same_hash(&members, revision).await;
    // Three voters must survive the loss of any one of them.
    let leader = wait_settled(&as_refs(&members)).await;
    members[leader].kill();
    put_with_retries(&members[(leader + 1) % 3], "without one", "x").await;
}

#[tokio::test]
async fn a_wiped_member_started_as_new_reports_that_its_cluster_runs() {
    let root = tempfile::tempdir().unwrap();
    let members = start_three(root.path());
    let mut new = joiner(root.path(), "d", &members, free_ports());
    retry_while_unhealthy(async || add(&members[0], &peer_url(&new), true).await).await;
    new.start();
    new.wait_ready();
    new.kill();
    std::fs::remove_dir_all(&new.data_dir).unwrap();
    assert_eq!(new.args.pop().as_deref(), Some("--initial-cluster-state=existing"));
    new.start();
    assert_eq!(new.exit_code(), Some(1), "{}", new.log());
    assert!(new.log().contains("runs already at the peer URLs"), "{}", new.log());
    assert!(!new.data_dir.join("member/wal").exists(), "it has begun nothing");
}
