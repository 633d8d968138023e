//! Tests of clients that request much and read none of it.

use node_proto::etcdserverpb::range_request::{SortOrder, SortTarget};

use super::*;

const KEYS: usize = 20;
const VALUE_BYTES: usize = 1 << 20;
/// Time limit after which a test fails.
const PATIENCE: Duration = Duration::from_secs(30);

async fn filled() -> ApiTestNode {
    let node = ApiTestNode::start().await;
    for key in 0..KEYS {
        node.put(&format!("k{key:02}"), &"x".repeat(VALUE_BYTES)).await;
    }
    node
}

fn everything() -> RangeRequest {
    RangeRequest { serializable: true, ..all_from("\0") }
}

fn all_from(key: &str) -> RangeRequest {
    RangeRequest { key: bytes(key), range_end: bytes("\0"), ..RangeRequest::default() }
}

/// Opens a connection whose flow-control window allows no byte of an answer.
async fn connect_without_reading(node: &ApiTestNode) -> Channel {
    let endpoint = Channel::from_shared(format!("http://{}", node.address)).unwrap();
    endpoint.initial_stream_window_size(0).connect().await.unwrap()
}

#[tokio::test]
async fn a_client_that_reads_no_answer_is_refused_more() {
    let node = filled().await;
    let channel = connect_without_reading(&node).await;
    let mut asked = tokio::task::JoinSet::new();
    for _ in 0..40 {
        let mut kv = KvClient::new(channel.clone());
        asked.spawn(async move { kv.range(everything()).await.map(|_| ()) });
    }
    // The requested answers have 800 MB in total. Of the 256 MiB for a connection's unread answers,
    // large answers may fill seven eighths.
    let refused = async {
        for _ in 0..29 {
            let (code, text) = code_and_text(asked.join_next().await.unwrap().unwrap());
            assert_eq!(code, Code::ResourceExhausted, "{text}");
            assert!(text.contains("wait to be read"), "{text}");
        }
    };
    tokio::time::timeout(PATIENCE, refused).await.expect("most are refused");
    let mut other = node.kv().max_decoding_message_size(usize::MAX);
    let whole = other.range(everything()).await.unwrap().into_inner();
    assert_eq!(whole.kvs.len(), KEYS, "others are served");
    // Closing the connection frees the memory of its unread answers.
    asked.shutdown().await;
    drop(channel);
    let channel = connect_without_reading(&node).await;
    let fits = async {
        loop {
            let mut asked = tokio::task::JoinSet::new();
            for _ in 0..10 {
                let mut kv = KvClient::new(channel.clone());
                asked.spawn(async move { kv.range(everything()).await.map(|_| ()) });
            }
            let refused = tokio::time::timeout(Duration::from_secs(1), asked.join_next()).await;
            if refused.is_err() {
                return;
            }
            asked.shutdown().await;
        }
    };
    tokio::time::timeout(PATIENCE, fits).await.expect("ten of them have room");
}

#[tokio::test]
async fn a_connections_watches_leave_room_for_its_answers() {
    let node = filled().await;
    let large = "k".repeat(1 << 20);
    let mut streams = Vec::new();
    let mut taken = 0;
    let (refused, mut last) = 'full: loop {
        let mut watching = WatchClientStream::open(&node).await;
        // The 16 keys have 1 MiB each. That is the maximum total length of the keys of one stream's
        // watches.
        for _ in 0..16 {
            let created = watching.create(watch(&large)).await;
            if created.canceled {
                break 'full (created, watching);
            }
            taken += 1;
        }
        streams.push(watching);
    };
    assert_eq!(refused.cancel_reason, "etcdserver: too many requests");
    // Watches may fill half of the connection's 256 MiB. Room for one more mebibyte may be missing
    // while an answer is in transit.
    assert!((127..=128).contains(&taken), "{taken} MiB of keys");
    // Each watch costs memory, however short its key is. So the remaining memory is enough for a
    // limited number of watches only.
    let mut small = 0;
    while !last.create(watch("k")).await.canceled {
        small += 1;
    }
    assert!((1..1_400).contains(&small), "{small} more");
    let mut kv = node.kv().max_decoding_message_size(usize::MAX);
    let whole = kv.range(everything()).await.unwrap().into_inner();
    assert_eq!(whole.kvs.len(), KEYS);
    // Ending a stream frees the memory of its keys.
    streams.pop();
    let again = async {
        while WatchClientStream::open(&node).await.create(watch(&large)).await.canceled {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, again).await.expect("there is room again");
}

fn txn(operations: impl IntoIterator<Item = Op>) -> TxnRequest {
    let success = operations.into_iter().map(|op| RequestOp { request: Some(op) }).collect();
    TxnRequest { success, ..TxnRequest::default() }
}

#[tokio::test]
async fn an_answer_is_refused_before_it_is_gathered_if_there_is_no_room() {
    let node = filled().await;
    let reads = |times: usize| std::iter::repeat_n(Op::RequestRange(everything()), times);
    let mut kv = node.kv().max_decoding_message_size(usize::MAX);
    let whole = kv.txn(txn(reads(3))).await.unwrap().into_inner();
    assert_eq!(whole.responses.len(), 3);
    let (code, text) = code_and_text(kv.txn(txn(reads(100))).await);
    assert_eq!(code, Code::ResourceExhausted);
    assert_eq!(text, Error::TooMuchUnread.text());
    // A transaction that writes is carried out on every member, although its answer is dropped.
    let writes = reads(100).chain([Op::RequestPut(put("new", "v"))]);
    let (code, text) = code_and_text(kv.txn(txn(writes)).await);
    assert_eq!((code, text), (Code::ResourceExhausted, Error::AnswerDropped.text().into_owned()));
    assert_eq!(kv.range(range("new")).await.unwrap().into_inner().kvs.len(), 1);
    let delete = DeleteRangeRequest { key: bytes("k"), range_end: bytes("l"), prev_kv: true };
    let deleted = kv.delete_range(delete).await.unwrap().into_inner();
    assert_eq!((deleted.deleted, deleted.prev_kvs.len()), (20, 20));
}

#[tokio::test]
async fn pairs_that_are_read_but_not_returned_need_no_room() {
    let node = filled().await;
    let one = RangeRequest {
        limit: 1,
        sort_order: SortOrder::Descend.into(),
        sort_target: SortTarget::Mod.into(),
        ..everything()
    };
    let reads = || std::iter::repeat_n(Op::RequestRange(one.clone()), KEYS);
    let mut kv = node.kv().max_decoding_message_size(usize::MAX);
    let read = kv.txn(txn(reads())).await.unwrap().into_inner();
    assert_eq!(read.responses.len(), KEYS);
    let writes = reads().chain([Op::RequestPut(put("new", "v"))]);
    let wrote = kv.txn(txn(writes)).await.unwrap().into_inner();
    assert_eq!(wrote.responses.len(), KEYS + 1);
}

#[tokio::test]
async fn a_range_in_many_steps_has_the_right_answer() {
    let node = filled().await;
    let mut kv = node.kv().max_decoding_message_size(usize::MAX);
    let answer = kv.range(everything()).await.unwrap().into_inner();
    assert!(answer.kvs.iter().all(|kv| kv.value.len() == VALUE_BYTES));
    assert_eq!((answer.count, answer.more), (20, false));
    let some = RangeRequest { limit: 7, ..everything() };
    let some = kv.range(some).await.unwrap().into_inner();
    assert_eq!((some.kvs.len(), some.count, some.more), (7, 20, true));
    assert!(some.kvs.iter().zip(&answer.kvs).all(|(a, b)| a.key == b.key));
    let keys = RangeRequest { keys_only: true, ..everything() };
    let keys = kv.range(keys).await.unwrap().into_inner();
    assert!(keys.kvs.iter().zip(&answer.kvs).all(|(a, b)| a.key == b.key && a.value.is_empty()));
}
