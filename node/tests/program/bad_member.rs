//! A malicious member: it passes the handshake and then sends invalid messages. The other members
//! must go on.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use crate::common::{TestMember, WAIT_LIMIT, three_members, wait_settled};
use bytes::{Bytes, BytesMut};
use node_consensus::{Entry, Members, Message, MessageKind, Position};

const MESSAGES: u8 = 0;
const SNAPSHOT: u8 = 1;

/// Ids for a stream on which the test acts as member `from`.
struct Ids {
    cluster: u64,
    from: u64,
    to: u64,
}

/// Opens the stream that member `from` would open to `to`, and exchanges hellos (see
/// `transport/wire/hello.rs`).
fn open(address: &str, ids: &Ids, purpose: u8, run: u64) -> TcpStream {
    // The hello says that the sender's disk is empty. The other members have no record that
    // contradicts this.
    let mut hello = vec![0; 96];
    hello[..8].copy_from_slice(b"MUSTERP1");
    hello[9] = 2;
    hello[10] = purpose;
    hello[16..24].copy_from_slice(&ids.cluster.to_be_bytes());
    hello[24..32].copy_from_slice(&ids.from.to_be_bytes());
    hello[32..40].copy_from_slice(&ids.to.to_be_bytes());
    hello[40..56].fill(0xcc);
    hello[56..64].copy_from_slice(&1_u64.to_be_bytes());
    hello[64..72].copy_from_slice(&run.to_be_bytes());
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(WAIT_LIMIT)).unwrap();
    stream.write_all(&hello).unwrap();
    let mut answer = vec![0; hello.len()];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[11], 0, "the hello is accepted");
    stream
}

fn send_frame(stream: &mut TcpStream, kind: u8, payload: &[u8]) {
    let len = u32::try_from(payload.len() + 1).unwrap();
    stream.write_all(&len.to_be_bytes()).unwrap();
    stream.write_all(&[kind]).unwrap();
    stream.write_all(payload).unwrap();
}

fn encoded(message: &Message) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    message.encode(&mut bytes);
    bytes.to_vec()
}

fn message(kind: MessageKind, ids: &Ids) -> Message {
    Message::new(kind, ids.from, ids.to)
}

/// Starts two of three members. Returns them, the leader's index and peer address, and the ids for
/// a malicious third member.
async fn two_of_three(root: &std::path::Path) -> (Vec<TestMember>, usize, String, Ids) {
    let mut members = three_members(root);
    let third_url = peer_url(&members.split_off(2)[0]);
    members.iter_mut().for_each(TestMember::start);
    members.iter_mut().for_each(TestMember::wait_ready);
    let leader = wait_settled(&[&members[0], &members[1]]).await;
    let header = members[leader].status().await.unwrap().header.unwrap();
    let list = members[0].members().await.unwrap();
    let third = list.iter().find(|member| member.peer_ur_ls.contains(&third_url)).unwrap();
    let ids = Ids { cluster: header.cluster_id, from: third.id, to: header.member_id };
    let address = peer_url(&members[leader]).trim_start_matches("http://").to_owned();
    (members, leader, address, ids)
}

fn peer_url(member: &TestMember) -> String {
    let flag = "--listen-peer-urls=";
    member.args.iter().find_map(|arg| arg.strip_prefix(flag)).unwrap().to_owned()
}

async fn both_serve(members: &[TestMember]) {
    for n in 0..5 {
        for member in members {
            member.put(&format!("k{n}"), "v").await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn proposals_that_no_member_could_apply_are_refused_from_a_peer() {
    let root = tempfile::tempdir().unwrap();
    let (members, leader, address, ids) = two_of_three(root.path()).await;
    let mut stream = open(&address, &ids, MESSAGES, 1);
    let entry = |data: Bytes| Entry { data, ..Entry::default() };
    let junk = [
        entry(Bytes::from_static(b"junk")),
        entry(Bytes::from_static(&[1, 0xff])),
        entry(Bytes::new()),
        entry(Bytes::from(vec![1; 11 << 20])),
    ];
    for (sequence, entry) in (1..).zip(junk) {
        let propose = Message {
            index: sequence,
            commit: 1,
            entries: vec![entry],
            ..message(MessageKind::Propose, &ids)
        };
        send_frame(&mut stream, 2, &encoded(&propose));
    }
    // Once the leader has logged three invalid messages, it has rejected all of these proposals.
    let looked = || members[leader].log().matches("a peer sent an invalid message").count() >= 3;
    crate::common::eventually("they are refused", looked);
    tokio::time::sleep(Duration::from_millis(300)).await;
    both_serve(&members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_could_not_be_installed_is_refused_and_the_store_stays() {
    let root = tempfile::tempdir().unwrap();
    let (members, leader, address, ids) = two_of_three(root.path()).await;
    members[leader].put("kept", "v").await.unwrap();
    let status = members[leader].status().await.unwrap();
    // This store is complete and has the format of a snapshot, but not the position that the
    // message announces.
    let elsewhere = whole_store(Position { index: 3, term: 1 });
    // This store has the announced position, but other members than the cluster.
    let at = Position { index: status.raft_index + 1000, term: status.raft_term };
    let foreign = whole_store(at);
    let voters = {
        let mut voters = vec![
            ids.from,
            ids.to,
            members[1 - leader].status().await.unwrap().header.unwrap().member_id,
        ];
        voters.sort_unstable();
        voters
    };
    for (run, body) in
        [elsewhere.clone(), foreign, elsewhere[..elsewhere.len() / 2].to_vec(), b"junk".to_vec()]
            .iter()
            .enumerate()
    {
        let announced = Message {
            term: status.raft_term + 1,
            snapshot: Some(at),
            members: Some(Members { voters: voters.clone(), learners: Vec::new() }),
            ..message(MessageKind::Snapshot, &ids)
        };
        let mut stream = open(&address, &ids, SNAPSHOT, 1);
        send_frame(&mut stream, 3, &encoded(&announced));
        send_frame(&mut stream, 4, body);
        let mut end = (body.len() as u64).to_be_bytes().to_vec();
        end.extend(crc32c::crc32c(body).to_be_bytes());
        send_frame(&mut stream, 5, &end);
        assert_eq!(answer(&mut stream), 0, "{run}: it is refused");
    }
    both_serve(&members).await;
    assert_eq!(members[leader].get("kept").await.unwrap().as_deref(), Some("v"));
}

/// Returns the peer's answer to a snapshot, and skips pings that come before the answer.
fn answer(stream: &mut TcpStream) -> u8 {
    loop {
        let mut head = [0; 5];
        stream.read_exact(&mut head).unwrap();
        let len = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
        let mut payload = vec![0; len as usize - 1];
        stream.read_exact(&mut payload).unwrap();
        if head[4] == 6 {
            return payload[0];
        }
    }
}

/// Returns the snapshot of a small store at position `at`.
fn whole_store(at: Position) -> Vec<u8> {
    use node_state::{
        disk::{Disk as _, OpenMode, RealDisk, RedbBackend},
        mvcc::{StoreOptions, StoreWriter},
    };
    let dir = tempfile::tempdir().unwrap();
    let file = RealDisk.open(&dir.path().join("db"), OpenMode::New).unwrap();
    let mut writer =
        StoreWriter::open(RedbBackend::new(file).unwrap(), StoreOptions::default()).unwrap();
    let put = |batch: &mut node_state::mvcc::Batch<'_>| {
        batch.put(Bytes::from_static(b"other"), Bytes::from_static(b"v"), 0);
        batch.end_request();
        Ok(())
    };
    let _ = writer.batch(at, put).unwrap();
    let mut body = Vec::new();
    writer.store().view().write_snapshot(&mut body).unwrap();
    body
}
