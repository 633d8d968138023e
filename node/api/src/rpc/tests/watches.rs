//! Tests of watches over the wire.

use super::*;

#[tokio::test]
async fn many_watches_share_a_stream_and_are_cancelled_one_by_one() {
    let node = ApiTestNode::start().await;
    let mut watching = WatchClientStream::open(&node).await;
    assert_eq!(watching.create(watch("a")).await.watch_id, 0);
    assert_eq!(watching.create(watch("b")).await.watch_id, 1);
    let own = WatchCreateRequest { watch_id: 2, ..watch("c") };
    assert_eq!(watching.create(own.clone()).await.watch_id, 2);
    let again = watching.create(own).await;
    assert!(again.canceled && again.watch_id == -1);
    assert_eq!(again.cancel_reason, "mvcc: duplicate watch ID provided on the WatchStream");
    assert_eq!(watching.create(watch("d")).await.watch_id, 3);
    node.put("b", "v").await;
    let response = watching.events().await;
    assert_eq!((response.watch_id, response.events.len()), (1, 1));
    assert_eq!(response.events[0].kv.as_ref().unwrap().value, bytes("v"));
    watching.ask(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 1 })).await;
    let response = watching.next().await;
    assert!(response.canceled && response.watch_id == 1);
    node.put("b", "v").await;
    node.put("a", "v").await;
    assert_eq!(watching.events().await.watch_id, 0);
}

#[tokio::test]
async fn an_impossible_watch_is_refused_with_etcds_text() {
    let node = ApiTestNode::start().await;
    let mut watching = WatchClientStream::open(&node).await;
    let empty = WatchCreateRequest { range_end: bytes("a"), ..watch("b") };
    let refused = watching.create(empty).await;
    assert!(refused.canceled && refused.watch_id == -1);
    assert_eq!(refused.cancel_reason, "mvcc: watcher range is empty");
    let early = WatchCreateRequest { start_revision: -1, ..watch("k") };
    let refused = watching.create(early).await;
    assert!(refused.canceled && refused.watch_id == -1);
    let compacted = "etcdserver: mvcc: required revision has been compacted";
    assert_eq!(refused.cancel_reason, compacted);
}

#[tokio::test]
async fn a_watch_gets_only_events_that_pass_its_filters() {
    use node_proto::etcdserverpb::watch_create_request::FilterType::{Nodelete, Noput};
    let node = ApiTestNode::start().await;
    let mut watching = WatchClientStream::open(&node).await;
    for filters in [vec![Noput, Nodelete], vec![Noput], vec![Nodelete]] {
        let filters = filters.into_iter().map(i32::from).collect();
        watching.create(WatchCreateRequest { filters, ..watch("k") }).await;
    }
    let put = node.put("k", "v").await;
    let gone = DeleteRangeRequest { key: bytes("k"), ..DeleteRangeRequest::default() };
    node.kv().delete_range(gone).await.unwrap();
    let mut told = Vec::new();
    for _ in 0..2 {
        let response = watching.events().await;
        let revisions = response.events.iter().map(|event| event.kv.as_ref().unwrap().mod_revision);
        told.push((response.watch_id, revisions.collect::<Vec<_>>()));
    }
    told.sort_unstable();
    assert_eq!(told, [(1, vec![put + 1]), (2, vec![put])]);
}

#[tokio::test]
async fn the_key_bytes_of_a_streams_watches_are_limited_until_watches_end() {
    let node = ApiTestNode::start().await;
    let mut watching = WatchClientStream::open(&node).await;
    let large = "k".repeat(1 << 20);
    for _ in 0..16 {
        assert!(!watching.create(watch(&large)).await.canceled);
    }
    let refused = watching.create(watch(&large)).await;
    assert!(refused.created && refused.canceled && refused.watch_id == -1);
    assert_eq!(refused.cancel_reason, "etcdserver: too many requests");
    watching.ask(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 3 })).await;
    assert!(watching.next().await.canceled);
    assert!(!watching.create(watch(&large)).await.canceled);
}

#[tokio::test]
async fn a_watch_from_a_compacted_revision_is_created_and_then_cancelled() {
    let node = ApiTestNode::start().await;
    for _ in 0..5 {
        node.put("k", "v").await;
    }
    node.compact(4).await.unwrap();
    let mut watching = WatchClientStream::open(&node).await;
    let created = watching.create(WatchCreateRequest { start_revision: 3, ..watch("k") }).await;
    assert!(!created.canceled);
    let ended = watching.next().await;
    assert!(ended.canceled && ended.compact_revision == 4);
    assert_eq!(ended.header.unwrap().revision, 0);
}

#[tokio::test]
async fn watches_ended_by_a_compaction_count_until_they_are_cancelled() {
    let node = ApiTestNode::start().await;
    for _ in 0..5 {
        node.put("k", "v").await;
    }
    node.compact(4).await.unwrap();
    let mut watching = WatchClientStream::open(&node).await;
    let large = WatchCreateRequest { start_revision: 3, ..watch(&"k".repeat(1 << 20)) };
    for id in 0..16 {
        assert_eq!(watching.create(large.clone()).await.watch_id, id);
        let overtaken = watching.next().await;
        assert_eq!((overtaken.watch_id, overtaken.compact_revision), (id, 4));
    }
    let refused = watching.create(large.clone()).await;
    assert!(refused.canceled && refused.watch_id == -1);
    assert_eq!(refused.cancel_reason, "etcdserver: too many requests");
    watching.ask(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 3 })).await;
    assert!(watching.next().await.canceled);
    assert_eq!(watching.create(large).await.watch_id, 16);
}

#[tokio::test]
async fn progress_is_sent_periodically_and_on_request() {
    let node = ApiTestNode::start().await;
    let last = node.put("other", "v").await;
    let mut watching = WatchClientStream::open(&node).await;
    let notify = WatchCreateRequest { progress_notify: true, ..watch("k") };
    watching.create(notify).await;
    let response = watching.next().await;
    assert!(response.events.is_empty() && response.watch_id == 0);
    assert_eq!(response.header.unwrap().revision, last);
    watching.ask(RequestUnion::ProgressRequest(WatchProgressRequest {})).await;
    let mut response = watching.next().await;
    while response.watch_id != -1 {
        response = watching.next().await;
    }
    assert_eq!(response.header.unwrap().revision, last);
}

#[tokio::test]
async fn a_large_response_is_fragmented_if_the_client_asked_for_it() {
    let node = ApiTestNode::start().await;
    for key in ["k0", "k1", "k2", "k3"] {
        node.put(key, &"x".repeat(900_000)).await;
    }
    let all = DeleteRangeRequest { key: bytes("k"), range_end: bytes("l"), prev_kv: false };
    let deleted = node.kv().delete_range(all).await.unwrap().into_inner();
    let revision = deleted.header.unwrap().revision;
    let mut watching = WatchClientStream::open(&node).await;
    let fragment = WatchCreateRequest {
        range_end: bytes("l"),
        start_revision: revision,
        fragment: true,
        prev_kv: true,
        ..watch("k")
    };
    watching.create(fragment).await;
    let (mut parts, mut revisions) = (0, Vec::new());
    loop {
        let response = watching.events().await;
        parts += 1;
        revisions.extend(response.events.iter().map(|e| e.kv.as_ref().unwrap().mod_revision));
        if !response.fragment {
            break;
        }
    }
    assert!(parts > 1);
    assert_eq!(revisions, [revision; 4]);
}

#[tokio::test]
async fn open_watches_end_when_the_node_stops() {
    let node = ApiTestNode::start().await;
    let mut watching = WatchClientStream::open(&node).await;
    watching.create(watch("k")).await;
    node.stop.cancel();
    let ended = watching.responses.message().await;
    assert_eq!(code_and_text(ended), (Code::Unavailable, "etcdserver: server stopped".to_owned()));
}
