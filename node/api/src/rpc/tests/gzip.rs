//! Tests of calls with compressed messages, sent as raw bytes. Errors are those of grpc-go, as in
//! etcd.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use http::HeaderMap;
use node_proto::etcdserverpb::{LeaseGrantRequest, LeaseKeepAliveRequest, LeaseKeepAliveResponse};
use prost::Message as _;
use tonic::body::Body;
use tonic::codec::BufferSettings;
use tower::ServiceExt as _;

use super::*;

/// Maximum length of a message: `--max-request-bytes`, plus what gRPC may add.
const MOST: usize = 2 << 20;
const PUT: &str = "/etcdserverpb.KV/Put";

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap()
}

/// Encodes a message with its gRPC header.
fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[flag], &length[..], message].concat()
}

fn compressed(message: &impl prost::Message) -> Vec<u8> {
    framed(1, &gzip(&message.encode_to_vec()))
}

impl ApiTestNode {
    async fn begin_call(
        &self,
        path: &str,
        encoding: &str,
        body: axum::body::Body,
    ) -> http::Response<Body> {
        let request = http::Request::post(format!("http://{}{path}", self.address))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("grpc-encoding", encoding)
            .body(Body::new(body))
            .unwrap();
        self.channel.clone().oneshot(request).await.unwrap()
    }

    /// Sends a whole body, and returns the answers or the error.
    async fn gzipped<T: prost::Message + Default + 'static>(
        &self,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Vec<T>, Status> {
        let response = self.begin_call(path, "gzip", body.into()).await;
        let mut answers = answers(response)?;
        let mut all = Vec::new();
        while let Some(answer) = answers.message().await? {
            all.push(answer);
        }
        Ok(all)
    }

    async fn gzipped_one<T: prost::Message + Default + 'static>(
        &self,
        path: &str,
        request: &impl prost::Message,
    ) -> T {
        self.gzipped(path, compressed(request)).await.unwrap().remove(0)
    }
}

fn refused(headers: &HeaderMap) -> Result<(), Status> {
    match Status::from_header_map(headers) {
        Some(status) if status.code() != Code::Ok => Err(status),
        _ => Ok(()),
    }
}

/// Returns the stream of answers, or the error in the response's headers.
fn answers<T: prost::Message + Default + 'static>(
    response: http::Response<Body>,
) -> Result<Streaming<T>, Status> {
    refused(response.headers())?;
    assert!(!response.headers().contains_key("grpc-encoding"), "answers are as they are");
    let (decoder, ok) =
        (tonic_prost::ProstDecoder::new(BufferSettings::default()), response.status());
    Ok(Streaming::new_response(decoder, response.into_body(), ok, None, Some(usize::MAX)))
}

#[tokio::test]
async fn compressed_requests_get_the_same_answers_as_plain_ones() {
    let node = ApiTestNode::start().await;
    let value = "x".repeat(1 << 20);
    let wrote: pb::PutResponse = node.gzipped_one(PUT, &put("k", &value)).await;
    assert_eq!(wrote.header.unwrap().revision, 2);
    let read: pb::RangeResponse = node.gzipped_one("/etcdserverpb.KV/Range", &range("k")).await;
    assert_eq!(read.kvs[0].value, bytes(&value));
    let ops = [Op::RequestPut(put("l", "v")), Op::RequestRange(range("l"))];
    let success = ops.into_iter().map(|op| RequestOp { request: Some(op) }).collect();
    let txn = TxnRequest { success, ..TxnRequest::default() };
    let done: pb::TxnResponse = node.gzipped_one("/etcdserverpb.KV/Txn", &txn).await;
    assert_eq!((done.succeeded, done.responses.len()), (true, 2));
    let members: pb::MemberListResponse =
        node.gzipped_one("/etcdserverpb.Cluster/MemberList", &MemberListRequest::default()).await;
    assert_eq!(members.members.len(), 1);
    let health: tonic_health::pb::HealthCheckResponse =
        node.gzipped_one("/grpc.health.v1.Health/Check", &()).await;
    assert_eq!(health.status, 1);
    // A client that compresses may send small messages uncompressed.
    let plain = framed(0, &range("k").encode_to_vec());
    let read: Vec<pb::RangeResponse> = node.gzipped("/etcdserverpb.KV/Range", plain).await.unwrap();
    assert_eq!(read[0].count, 1);
}

#[tokio::test]
async fn compressed_requests_of_a_stream_are_answered_one_by_one() {
    let node = ApiTestNode::start().await;
    node.put("k", "v").await;
    let created = |request| WatchRequest { request_union: Some(request) };
    let first = created(RequestUnion::CreateRequest(WatchCreateRequest {
        start_revision: 1,
        ..watch("k")
    }));
    let second = created(RequestUnion::CreateRequest(watch("l")));
    let (send, receive) = mpsc::channel::<Vec<u8>>(4);
    let frames = futures_util::stream::unfold(receive, async |mut receive| {
        let next = receive.recv().await?;
        Some((Ok::<_, Status>(Bytes::from(next)), receive))
    });
    let body = axum::body::Body::from_stream(frames);
    // The body arrives in pieces, and one of the messages isn't compressed.
    let wire = [compressed(&first), framed(0, &second.encode_to_vec())].concat();
    let (half, rest) = wire.split_at(20);
    send.send(half.to_vec()).await.unwrap();
    send.send(rest.to_vec()).await.unwrap();
    let response = node.begin_call(WATCH_PATH, "gzip", body).await;
    let mut answers = answers::<WatchResponse>(response).unwrap();
    let mut seen = Vec::new();
    for _ in 0..3 {
        let answer = tokio::time::timeout(Duration::from_secs(30), answers.message());
        let answer = answer.await.expect("an answer").unwrap().unwrap();
        seen.push((answer.created, answer.events.len()));
    }
    seen.sort_unstable();
    assert_eq!(seen, [(false, 1), (true, 0), (true, 0)]);
    // A message that is too large ends the stream with an error.
    send.send(framed(1, &gzip(&vec![0; MOST + 1]))).await.unwrap();
    let end = loop {
        match answers.message().await {
            Ok(answer) => drop(answer.expect("no end without a word")),
            Err(status) => break status,
        }
    };
    assert_eq!((end.code(), end.message()), (Code::ResourceExhausted, &*beyond()));
}

#[tokio::test]
async fn leases_are_kept_alive_by_compressed_requests() {
    let node = ApiTestNode::start().await;
    let grant = LeaseGrantRequest { id: 5, ttl: 60 };
    let _: pb::LeaseGrantResponse =
        node.gzipped_one("/etcdserverpb.Lease/LeaseGrant", &grant).await;
    let wire = compressed(&LeaseKeepAliveRequest { id: 5 }).repeat(3);
    let answers: Vec<LeaseKeepAliveResponse> =
        node.gzipped(KEEP_ALIVE_PATH, wire.clone()).await.unwrap();
    assert_eq!(answers.iter().map(|answer| answer.ttl).collect::<Vec<_>>(), [60; 3]);
    let large = [wire, framed(0, &vec![0; MOST + 1])].concat();
    let (code, text) =
        code_and_text(node.gzipped::<LeaseKeepAliveResponse>(KEEP_ALIVE_PATH, large).await);
    assert_eq!(code, Code::ResourceExhausted);
    assert_eq!(text, "grpc: received message larger than max (2097153 vs. 2097152)");
}

fn beyond() -> String {
    format!("grpc: received message after decompression larger than max {MOST}")
}

#[tokio::test]
async fn a_message_that_is_too_large_after_decompression_is_refused() {
    let node = ApiTestNode::start().await;
    let ask = async |body| code_and_text(node.gzipped::<pb::PutResponse>(PUT, body).await);
    // The message decompresses to a gigabyte, and its compressed form has a megabyte.
    let bomb = framed(1, &gzip(&[0; 1 << 20]).repeat(1 << 10));
    assert!(bomb.len() < MOST);
    assert_eq!(ask(bomb).await, (Code::ResourceExhausted, beyond()));
    // The first message is one byte longer than the limit, after decompression. The second has
    // exactly the maximum length, and is refused only because it isn't a valid request.
    assert_eq!(
        ask(framed(1, &gzip(&vec![0; MOST + 1]))).await,
        (Code::ResourceExhausted, beyond())
    );
    assert_eq!(ask(framed(1, &gzip(&vec![0; MOST]))).await.0, Code::Internal);
    let text = "grpc: received message larger than max (2097153 vs. 2097152)";
    let large = framed(1, &vec![0; MOST + 1]);
    assert_eq!(ask(large).await, (Code::ResourceExhausted, text.to_owned()));
    // The limit for requests applies to the decompressed length.
    let value = "x".repeat(ApiLimits::default().max_request_bytes);
    assert_eq!(ask(compressed(&put("k", &value))).await.1, "etcdserver: request is too large");
}

#[tokio::test]
async fn malformed_gzip_is_refused_as_by_grpc_go() {
    let node = ApiTestNode::start().await;
    let ask = async |body| code_and_text(node.gzipped::<pb::PutResponse>(PUT, body).await);
    let whole = gzip(&put("k", "v").encode_to_vec());
    let mut wrong = whole.clone();
    let at = wrong.len() - 8;
    wrong[at] ^= 1;
    let header = "grpc: failed to decompress the message: ";
    let body = "grpc: failed to read decompressed data: ";
    for (message, text) in [
        (&b""[..], format!("{header}EOF")),
        (b"no gzip at all", format!("{header}gzip: invalid header")),
        (&whole[..5], format!("{header}unexpected EOF")),
        (&whole[..whole.len() - 1], format!("{body}unexpected EOF")),
        (&[&whole[..], b"and something else"].concat(), format!("{body}gzip: invalid header")),
    ] {
        assert_eq!(ask(framed(1, message)).await, (Code::Internal, text));
    }
    let text = format!("{body}gzip: invalid checksum");
    assert_eq!(ask(framed(1, &wrong)).await, (Code::Internal, text));
    // A message that ends too early is an error.
    let mut half = framed(1, &whole);
    half.pop();
    assert_eq!(ask(half).await.0, Code::Internal);
}

#[tokio::test]
async fn another_compression_is_refused_with_a_list_of_supported_ones() {
    let node = ApiTestNode::start().await;
    for path in [PUT, WATCH_PATH] {
        let response = node.begin_call(path, "snappy", axum::body::Body::empty()).await;
        let status = refused(response.headers()).unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented);
        let text = "grpc: Decompressor is not installed for grpc-encoding \"snappy\"";
        assert_eq!(status.message(), text);
        assert_eq!(response.headers()["grpc-accept-encoding"], "gzip,identity");
    }
    // The message's flag byte says that it is compressed, but the header `grpc-encoding` names no
    // compression.
    let response = node.begin_call(PUT, "identity", compressed(&put("k", "v")).into()).await;
    assert_eq!(refused(response.headers()).unwrap_err().code(), Code::Internal);
}
