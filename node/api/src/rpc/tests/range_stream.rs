//! Tests of `RangeStream`: the merged parts equal the whole range, and errors end the stream.

use futures_util::StreamExt as _;
use muster_shares::memory::{MemoryBounds, MemoryBudget};
use node_proto::etcdserverpb::range_request::{SortOrder, SortTarget};
use node_proto::etcdserverpb::{RangeResponse, RangeStreamResponse};
use prost::Message as _;

use super::*;

/// Maximum request size in bytes. A part of a range stream is full at half of it.
const REQUEST: usize = 64 << 10;
const KEYS: usize = 400;
/// HTTP/2 window in bytes. It limits the bytes on their way to a client that doesn't read, and is
/// much smaller than the range.
const WINDOW: u32 = 64 << 10;

fn from(key: &str) -> RangeRequest {
    RangeRequest { key: bytes(key), range_end: bytes("\0"), ..RangeRequest::default() }
}

async fn filled() -> ApiTestNode {
    let limits = ApiLimits { max_request_bytes: REQUEST, ..ApiLimits::default() };
    let node = ApiTestNode::start_with(limits).await;
    let value = "x".repeat(8_000);
    for n in 0..KEYS {
        node.put(&format!("k{n:04}"), &value).await;
    }
    node
}

/// Opens a connection with a small flow-control window, so that little is sent before the client
/// reads.
pub(super) async fn narrow(node: &ApiTestNode) -> KvClient<Channel> {
    let endpoint = Channel::from_shared(format!("http://{}", node.address)).unwrap();
    let endpoint =
        endpoint.initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOW);
    KvClient::new(endpoint.connect().await.unwrap())
}

async fn open(
    node: &ApiTestNode,
    request: &RangeRequest,
) -> Result<Streaming<RangeStreamResponse>, Status> {
    Ok(narrow(node).await.range_stream(request.clone()).await?.into_inner())
}

/// Returns the error that ends a stream before its last part.
pub(super) async fn end(stream: &mut Streaming<RangeStreamResponse>) -> (Code, String) {
    loop {
        match soon(stream.message()).await {
            Ok(Some(part)) => assert!(part.range_response.unwrap().header.is_none()),
            end => return code_and_text(end),
        }
    }
}

/// Returns all parts of a stream.
async fn parts(node: &ApiTestNode, request: &RangeRequest) -> Result<Vec<RangeResponse>, Status> {
    let mut stream = open(node, request).await?;
    let mut parts = Vec::new();
    while let Some(part) = stream.message().await? {
        parts.push(part.range_response.unwrap());
    }
    Ok(parts)
}

/// Merges parts by the rules of Protocol Buffers.
fn merged(parts: &[RangeResponse]) -> RangeResponse {
    let mut whole = RangeResponse::default();
    for part in parts {
        whole.merge(&*part.encode_to_vec()).unwrap();
    }
    whole
}

/// Without a sort order etcd sorts in ascending order by any target except the key.
#[tokio::test]
async fn a_sort_target_without_an_order_sorts_in_ascending_order() {
    let limits = ApiLimits { max_request_bytes: REQUEST, ..ApiLimits::default() };
    let node = ApiTestNode::start_with(limits).await;
    for n in 0..40 {
        let value = format!("{:02}{}", (n * 7) % 40, "x".repeat(4_000));
        node.put(&format!("k{n:04}"), &value).await;
    }
    node.put("k0007", "again").await;
    let targets = [SortTarget::Value, SortTarget::Version, SortTarget::Create, SortTarget::Mod];
    for target in targets {
        for (limit, keys_only) in [(0, false), (0, true), (15, false)] {
            let sort_target = target.into();
            let request = RangeRequest { sort_target, limit, keys_only, ..from("k") };
            let whole = node.kv().range(request.clone()).await.unwrap().into_inner();
            let parts = parts(&node, &request).await.unwrap();
            assert_eq!(merged(&parts), whole, "{request:?}");
            assert!(keys_only || parts.len() > 1, "{} parts", parts.len());
            let largest = parts.iter().map(|part| part.encoded_len()).max();
            assert!(largest.unwrap() <= REQUEST, "{largest:?}");
        }
    }
    let by_value = RangeRequest { sort_target: SortTarget::Value.into(), ..from("k") };
    let keys = merged(&parts(&node, &by_value).await.unwrap()).kvs;
    assert!(!keys.is_sorted_by_key(|kv| kv.key.clone()), "another order than that of keys");
}

#[tokio::test]
async fn the_merged_parts_equal_the_whole_range() {
    let node = filled().await;
    let wide = from("k");
    let mut requests = vec![wide.clone(), from("k0399"), from("z"), range("k0001"), range("none")];
    for limit in [1, 10, 255, 256, 257, 399, 400, 401, -1] {
        requests.push(RangeRequest { limit, ..wide.clone() });
    }
    for (count_only, keys_only, serializable, revision) in [
        (true, false, false, 0),
        (false, true, false, 0),
        (false, false, true, 0),
        (false, false, false, 200),
        (false, true, true, 300),
    ] {
        let other = RangeRequest { count_only, keys_only, serializable, revision, ..wide.clone() };
        requests.push(RangeRequest { limit: 150, ..other.clone() });
        requests.push(other);
    }
    let ascending = RangeRequest { sort_order: SortOrder::Ascend.into(), ..wide.clone() };
    requests.push(RangeRequest { limit: 50, ..ascending.clone() });
    requests.push(ascending);
    let sort_target = SortTarget::Value.into();
    requests.push(RangeRequest { sort_target, keys_only: true, ..wide.clone() });
    requests.push(RangeRequest { sort_target: SortTarget::Value.into(), ..wide });
    for request in requests {
        let whole = node.kv().range(request.clone()).await.unwrap().into_inner();
        let parts = parts(&node, &request).await.unwrap();
        assert_eq!(merged(&parts), whole, "{request:?}");
        let (last, others) = parts.split_last().unwrap();
        assert!(last.header.is_some());
        for part in others {
            assert!(part.header.is_none() && part.count == 0 && !part.more && !part.kvs.is_empty());
            assert!(part.encoded_len() < 4 << 20, "{}", part.encoded_len());
        }
    }
}

#[tokio::test]
async fn all_parts_are_of_one_revision_despite_concurrent_writes() {
    let node = filled().await;
    let before = node.kv().range(from("k")).await.unwrap().into_inner();
    let mut stream = open(&node, &from("k")).await.unwrap();
    let mut parts = vec![stream.message().await.unwrap().unwrap().range_response.unwrap()];
    for n in 0..KEYS {
        node.put(&format!("k{n:04}"), "other").await;
    }
    node.put("k9", "new").await;
    while let Some(part) = stream.message().await.unwrap() {
        parts.push(part.range_response.unwrap());
    }
    assert!(parts.len() > 2, "{}", parts.len());
    assert_eq!(merged(&parts), before);
}

#[tokio::test]
async fn a_compaction_between_two_parts_ends_the_stream() {
    let node = filled().await;
    let mut stream = open(&node, &from("k")).await.unwrap();
    stream.message().await.unwrap().unwrap();
    let revision = node.put("k", "new").await;
    node.compact(revision).await.unwrap();
    let compacted = "etcdserver: mvcc: required revision has been compacted".to_owned();
    assert_eq!(end(&mut stream).await, (Code::OutOfRange, compacted));
}

#[tokio::test]
async fn a_stream_ends_if_found_keys_are_compacted_before_they_are_read() {
    let node = ApiTestNode::start().await;
    // The first step of the read finds all keys in the index, but each part has room for only a few
    // values. So most values are read later.
    let names = || (0..100).map(|n| format!("k{n:02}"));
    for name in names() {
        node.put(&name, &"x".repeat(100_000)).await;
    }
    let mut stream = open(&node, &from("k")).await.unwrap();
    stream.message().await.unwrap().unwrap();
    let mut revision = 0;
    for name in names() {
        revision = node.put(&name, "other").await;
    }
    node.compact(revision).await.unwrap();
    let compacted = "etcdserver: mvcc: required revision has been compacted".to_owned();
    assert_eq!(end(&mut stream).await, (Code::OutOfRange, compacted));
}

#[tokio::test]
async fn a_corrupt_alarm_between_two_parts_ends_the_stream() {
    let node = filled().await;
    let mut stream = open(&node, &from("k")).await.unwrap();
    stream.message().await.unwrap().unwrap();
    let corrupt = AlarmRequest { action: 1, member_id: MEMBER, alarm: 2 };
    MaintenanceClient::new(node.channel.clone()).alarm(corrupt).await.unwrap();
    let told = (Code::DataLoss, "etcdserver: corrupt cluster".to_owned());
    assert_eq!(end(&mut stream).await, told);
}

#[tokio::test]
async fn a_member_that_stops_ends_its_range_streams() {
    let node = filled().await;
    let mut stream = open(&node, &from("k")).await.unwrap();
    stream.message().await.unwrap().unwrap();
    node.stop.cancel();
    let told = (Code::Unavailable, "etcdserver: server stopped".to_owned());
    assert_eq!(end(&mut stream).await, told);
}

#[tokio::test]
async fn each_part_is_small_enough_for_clients_with_default_limits() {
    let node = ApiTestNode::start().await;
    // Makes a part as large as possible. The 256 small values of the first read step almost fill
    // it. The next step reads a value of almost 1 MiB, at which a step ends, and one more large
    // value.
    let sizes = std::iter::repeat_n(2_900, 256).chain([1_000_000, 1_500_000]);
    for (n, size) in sizes.chain(std::iter::repeat_n(1_500_000, 4)).enumerate() {
        node.put(&format!("k{n:04}"), &"x".repeat(size)).await;
    }
    let mut large = node.kv().max_decoding_message_size(usize::MAX);
    let whole = large.range(from("k")).await.unwrap().into_inner();
    assert_eq!(merged(&parts(&node, &from("k")).await.unwrap()), whole);
}

#[tokio::test]
async fn a_part_is_charged_to_its_connection_until_it_was_read() {
    let node = filled().await;
    for (per_connection, fits) in [(64 << 10, false), (16 << 20, true)] {
        let bounds = MemoryBounds { per_connection, total: usize::MAX, guaranteed: 0 };
        let account = MemoryBudget::new(bounds).open_account("192.0.2.1".parse().unwrap());
        let mut request = tonic::Request::new(from("k"));
        request.extensions_mut().insert(Arc::clone(&account));
        let answer = crate::rpc::range_stream::answer(node.context.clone(), request).await;
        let mut parts = answer.unwrap().into_inner();
        match parts.next().await.unwrap() {
            Ok(part) => assert!(fits && account.held() >= part.encoded_len()),
            Err(status) => assert!(!fits && status.code() == Code::ResourceExhausted, "{status}"),
        }
        drop(parts);
        assert_eq!(account.held(), 0);
    }
}

#[tokio::test]
async fn an_unsupported_range_stream_is_refused_with_etcds_text() {
    let node = ApiTestNode::start().await;
    let revision = node.put("k", "v").await;
    node.put("k", "w").await;
    node.compact(revision + 1).await.unwrap();
    let wide = || from("k");
    let sorted = "RangeStream does not support custom sort orders";
    let filtered = "RangeStream does not support revision filters";
    let option = "etcdserver: invalid sort option";
    let ascend = SortOrder::Ascend.into();
    for (request, code, text) in [
        (
            RangeRequest { sort_order: SortOrder::Descend.into(), ..wide() },
            Code::Unimplemented,
            sorted,
        ),
        (
            RangeRequest { sort_order: ascend, sort_target: SortTarget::Mod.into(), ..wide() },
            Code::Unimplemented,
            sorted,
        ),
        (RangeRequest { min_mod_revision: 1, ..wide() }, Code::Unimplemented, filtered),
        (RangeRequest { max_mod_revision: 1, ..wide() }, Code::Unimplemented, filtered),
        (RangeRequest { min_create_revision: 1, ..wide() }, Code::Unimplemented, filtered),
        (RangeRequest { max_create_revision: 1, ..wide() }, Code::Unimplemented, filtered),
        (
            RangeRequest { sort_order: 9, min_mod_revision: 1, ..wide() },
            Code::InvalidArgument,
            option,
        ),
        (range(""), Code::InvalidArgument, "etcdserver: key is not provided"),
        (
            RangeRequest { revision: 1_000, ..wide() },
            Code::OutOfRange,
            "etcdserver: mvcc: required revision is a future revision",
        ),
        (
            RangeRequest { revision, ..wide() },
            Code::OutOfRange,
            "etcdserver: mvcc: required revision has been compacted",
        ),
    ] {
        let status = parts(&node, &request).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (code, text), "{request:?}");
    }
    let (_, metrics) = node.get("/metrics").await;
    let method =
        r#"grpc_method="RangeStream",grpc_service="etcdserverpb.KV",grpc_type="server_stream"} "#;
    for (code, count) in [("Unimplemented", 6), ("InvalidArgument", 2), ("OutOfRange", 2)] {
        let line = format!("grpc_server_handled_total{{grpc_code=\"{code}\",{method}{count}");
        assert!(metrics.lines().any(|found| found == line), "{line} in {metrics}");
    }
}
