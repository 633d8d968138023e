//! Tests of authenticated members that send false messages.

use node_consensus::{Members, Position};
use node_engine::{
    driver::{NodeStatus, test_inbox},
    witness::{DiskState, ProcessClaim},
};
use node_state::{
    disk::{Disk as _, OpenMode, RealDisk, RedbBackend},
    identity::Incarnation,
};

use super::*;

fn message(kind: MessageKind, from: u64) -> Message {
    Message { term: 1, ..Message::new(kind, from, 1) }
}

fn encoded(message: &Message) -> Bytes {
    let mut bytes = BytesMut::new();
    message.encode(&mut bytes);
    bytes.freeze()
}

fn open_witness_file(dir: &Path) -> Arc<WitnessFile> {
    Arc::new(WitnessFile::open(&dir.join("marks")).unwrap())
}

/// Makes the channels for peers' reports, and the receiver of the member lists.
fn report_channels() -> (PeerReports, watch::Receiver<Censuses>) {
    let (told, _, counted) = PeerReports::channels();
    (told, counted)
}

fn member(id: u64, name: &str) -> Member {
    Member {
        id: MemberId(id),
        name: name.to_owned(),
        peer_urls: vec![format!("http://{name}:2380")],
        client_urls: Vec::new(),
        is_learner: false,
        incarnation: Some(Incarnation([1; 16])),
        node_key: None,
        changed_at: 0,
        vote_when_ready: false,
        operations: Vec::new(),
    }
}

/// Returns a snapshot of a small store at this position, with the voters 1 and 2.
fn whole_store(at: Position) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let file = RealDisk.open(&dir.path().join("db"), OpenMode::New).unwrap();
    let members = vec![member(1, "one"), member(2, "two")];
    let options = mvcc::StoreOptions { members, ..mvcc::StoreOptions::default() };
    let mut writer = mvcc::StoreWriter::open(RedbBackend::new(file).unwrap(), options).unwrap();
    let put = |batch: &mut mvcc::Batch<'_>| {
        batch.put(Bytes::from_static(b"k"), Bytes::from_static(b"v"), 0);
        batch.end_request();
        Ok(())
    };
    let _ = writer.batch(at, put).unwrap();
    let mut body = Vec::new();
    writer.store().view().write_snapshot(&mut body).unwrap();
    body
}

#[test]
fn a_message_in_another_members_name_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let (inbox, recorded) = test_inbox::inbox();
    let inbound = PeerMessageReceiver::new(
        inbox,
        dir.path().to_owned(),
        report_channels().0,
        open_witness_file(dir.path()),
        Vec::new(),
    );
    let vote = encoded(&message(MessageKind::RequestVote, 3));
    inbound.receive_message(MemberId(2), vote.clone());
    assert!(recorded.messages.lock().unwrap().is_empty());
    inbound.receive_message(MemberId(3), vote);
    assert_eq!(recorded.messages.lock().unwrap().len(), 1);
}

#[test]
fn a_proposal_that_the_api_refuses_is_refused_from_a_member_too() {
    use node_proto::etcdserverpb::{
        DeleteRangeRequest, PutRequest, RequestOp, TxnRequest, request_op::Request,
    };
    let put = |key: &'static str| PutRequest { key: key.into(), ..PutRequest::default() };
    let txn = |keys: [&'static str; 2]| {
        let put = |key| RequestOp { request: Some(Request::RequestPut(put(key))) };
        Operation::Txn(TxnRequest { success: keys.map(put).into(), ..TxnRequest::default() })
    };
    for (operation, is_taken) in [
        (Operation::Put(put("k")), true),
        // A record without a key could not be restored from a snapshot.
        (Operation::Put(put("")), false),
        (Operation::DeleteRange(DeleteRangeRequest::default()), false),
        (txn(["a", "b"]), true),
        (txn(["a", "a"]), false),
        (txn(["a", ""]), false),
    ] {
        let data = command::encode(1, None, operation.clone());
        let checked = check_proposal(&Entry { data, ..Entry::default() });
        assert_eq!(checked.is_ok(), is_taken, "{operation:?}: {checked:?}");
    }
}

#[test]
fn a_joining_member_is_not_sent_operation_ids() {
    let id = node_state::identity::OperationId([7; 16]);
    let operations =
        (1..100_000).map(|index| node_state::membership::CompletedOperation { id, index });
    let member = Member { operations: operations.collect(), ..member(1, "one") };
    assert!(shown_to_joiner(&member).encoded_len() < 1_000);
}

#[tokio::test]
async fn a_vote_is_delivered_only_after_it_is_recorded_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let (inbox, recorded) = test_inbox::inbox();
    let marks = open_witness_file(dir.path());
    let member = |boot, last| ProcessClaim {
        incarnation: Incarnation([2; 16]),
        boot,
        run: boot,
        disk: DiskState { term: 1, vote: 0, last },
    };
    marks.admit(MemberId(2), &member(1, 0)).unwrap();
    let inbound = PeerMessageReceiver::new(
        inbox,
        dir.path().to_owned(),
        report_channels().0,
        Arc::clone(&marks),
        Vec::new(),
    );
    let counted = async || {
        for _ in 0..12_000 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            if !recorded.messages.lock().unwrap().is_empty() {
                break;
            }
        }
        recorded.messages.lock().unwrap().drain(..).count()
    };
    let vote = message(MessageKind::RequestVoteResponse, 2);
    assert!(inbound.receive_message(MemberId(2), encoded(&vote)));
    assert_eq!(counted().await, 1);
    let after_a_crash = WitnessFile::open(&dir.path().join("marks")).unwrap();
    assert!(after_a_crash.admit(MemberId(2), &member(2, 0)).is_err(), "the vote is remembered");

    dir.close().unwrap();
    let next = Message { term: 2, ..vote };
    assert!(inbound.receive_message(MemberId(2), encoded(&next)));
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    assert!(recorded.messages.lock().unwrap().is_empty(), "it can't be remembered");
}

#[test]
fn a_member_list_is_accepted_only_in_its_senders_own_name() {
    let dir = tempfile::tempdir().unwrap();
    let (told, mut said) = report_channels();
    let inbound = PeerMessageReceiver::new(
        test_inbox::inbox().0,
        dir.path().to_owned(),
        told,
        open_witness_file(dir.path()),
        Vec::new(),
    );
    let member = (&member(3, "three")).into();
    let census = musterpb::Census {
        cluster_id: 1,
        member_id: 2,
        changed: 7,
        members: vec![member],
        ..Default::default()
    };
    let bytes = Bytes::from(census.encode_to_vec());
    inbound.member_list_received(MemberId(3), bytes.clone());
    inbound.member_list_received(MemberId(2), Bytes::from_static(b"junk"));
    assert!(!said.has_changed().unwrap());
    inbound.member_list_received(MemberId(2), bytes.clone());
    assert!(said.has_changed().unwrap());
    let mut expected = Censuses::default();
    expected.record(MemberId(2), census.try_into().unwrap());
    assert_eq!(*said.borrow_and_update(), expected);
    inbound.member_list_received(MemberId(2), bytes);
    assert!(!said.has_changed().unwrap(), "nothing new");
}

#[test]
fn a_snapshot_is_checked_completely_before_it_is_delivered() {
    let dir = tempfile::tempdir().unwrap();
    let (inbox, recorded) = test_inbox::inbox();
    let inbound = PeerMessageReceiver::new(
        inbox,
        dir.path().to_owned(),
        report_channels().0,
        open_witness_file(dir.path()),
        Vec::new(),
    );
    let at = Position { index: 3, term: 1 };
    let receive = |at: Position, voters: &[u64], body: &[u8]| {
        let members = Some(Members { voters: voters.to_vec(), learners: Vec::new() });
        let header = message(MessageKind::Snapshot, 2);
        let header = encoded(&Message { snapshot: Some(at), members, ..header });
        inbound.receive_snapshot(MemberId(2), header, SnapshotReader::arrived(body))
    };
    let body = whole_store(at);
    for (announced, voters, body) in [
        (Position { index: 1000, term: 1 }, &[1, 2][..], &body[..]),
        (at, &[1, 2, 3], &body[..]),
        (at, &[1, 2], &body[..body.len() / 2]),
        (at, &[1, 2], &b"junk"[..]),
    ] {
        assert!(receive(announced, voters, body).is_err());
        assert!(recorded.snapshots.lock().unwrap().is_empty());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing of it stays");
    }
    receive(at, &[1, 2], &body).unwrap();
    assert_eq!(recorded.snapshots.lock().unwrap().len(), 1);
}

#[test]
fn a_member_that_alone_may_know_its_removal_ignores_a_learners_report() {
    let dir = tempfile::tempdir().unwrap();
    let members = Members { voters: vec![2], learners: vec![3] };
    for (may_alone_know, by, ends) in [(true, 3, false), (true, 2, true), (false, 3, true)] {
        let members = Arc::new(members.clone());
        let status = NodeStatus {
            members,
            may_be_only_one_to_know_removal: may_alone_know,
            ..test_inbox::status()
        };
        let (told, verdict, _) = PeerReports::channels();
        let inbox = test_inbox::inbox_of(status).0;
        let marks = open_witness_file(dir.path());
        let inbound =
            PeerMessageReceiver::new(inbox, dir.path().to_owned(), told, marks, Vec::new());
        inbound.removal_reported(MemberId(by));
        assert_eq!(verdict.borrow().is_some(), ends, "{by}");
    }
}
