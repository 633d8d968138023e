//! Compares KV calls without the router to calls through it: each request gets the same answer from
//! both.

use std::collections::BTreeMap;
use std::pin::Pin;

use futures_util::stream;
use hyper::body::{Body as _, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message as _;

use super::*;

/// Everything that a client receives: status line, headers and trailers without the date, and the
/// body.
#[derive(Debug, PartialEq, Eq)]
struct Received {
    status: u16,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
    trailers: BTreeMap<String, String>,
}

fn by_name(headers: &http::HeaderMap) -> BTreeMap<String, String> {
    let text = |value: &http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let all = headers.iter().map(|(name, value)| (name.to_string(), text(value)));
    all.filter(|(name, _)| name != "date").collect()
}

async fn send(
    address: SocketAddr,
    method: &str,
    headers: &[(&'static str, &'static str)],
    parts: &[Bytes],
) -> Received {
    // Send the request with a plain HTTP/2 client. The client of a gRPC library would interpret
    // some of the headers and hide them.
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let handshake =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut client, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let mut request = http::Request::post(format!("http://{address}/etcdserverpb.KV/{method}"));
    let has_type = headers.iter().any(|(name, _)| *name == "content-type");
    let usual = [("content-type", "application/grpc")].into_iter().filter(|_| !has_type);
    for (name, value) in usual.chain(headers.iter().copied()) {
        request = request.header(name, value);
    }
    let parts: Vec<_> = parts.iter().cloned().map(Ok::<_, axum::Error>).collect();
    let body = axum::body::Body::from_stream(stream::iter(parts));
    let response = soon(client.send_request(request.body(body).unwrap())).await.unwrap();
    let (head, mut body) = response.into_parts();
    let (mut bytes, mut trailers) = (Vec::new(), BTreeMap::new());
    let frame = async |body: &mut Incoming| {
        std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await
    };
    while let Some(frame) = soon(frame(&mut body)).await {
        match frame.unwrap().into_data() {
            Ok(data) => bytes.extend_from_slice(&data),
            Err(frame) => trailers = by_name(&frame.into_trailers().unwrap()),
        }
    }
    let (status, headers) = (head.status.as_u16(), by_name(&head.headers));
    Received { status, headers, body: bytes, trailers }
}

/// Encodes a message with its gRPC header.
fn framed(flag: u8, message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[flag], &length[..], message].concat().into()
}

fn encoded(message: &impl prost::Message) -> Bytes {
    framed(0, &message.encode_to_vec())
}

/// Splits bytes into parts of `length` bytes, which become HTTP/2 frames of their own.
fn split(bytes: &Bytes, length: usize) -> Vec<Bytes> {
    bytes.chunks(length).map(Bytes::copy_from_slice).collect()
}

type Case = (&'static str, &'static str, Vec<(&'static str, &'static str)>, Vec<Bytes>);

/// Requests that change nothing, and so get the same answer twice.
fn unchanging_requests() -> Vec<Case> {
    let found = encoded(&range("k"));
    let serializable = encoded(&RangeRequest { serializable: true, ..range("k") });
    let compare = encoded(&TxnRequest {
        success: vec![RequestOp { request: Some(Op::RequestRange(range("k"))) }],
        ..TxnRequest::default()
    });
    let two = [&found[..], &found[..]].concat().into();
    let huge: Bytes = framed(0, &vec![b'x'; 3 << 20]);
    let long = encoded(&put("", &"v".repeat(1 << 20)));
    let cut = found.slice(..found.len() - 1);
    vec![
        ("a range", "Range", vec![], vec![found.clone()]),
        ("a serializable range", "Range", vec![], vec![serializable.clone()]),
        ("a range in many parts", "Range", vec![], split(&found, 1)),
        ("an empty last part", "Range", vec![], vec![found.clone(), Bytes::new()]),
        ("a read-only transaction", "Txn", vec![], vec![compare]),
        (
            "a delete of nothing",
            "DeleteRange",
            vec![],
            vec![encoded(&DeleteRangeRequest {
                key: bytes("none"),
                ..DeleteRangeRequest::default()
            })],
        ),
        ("a put without key", "Put", vec![], vec![encoded(&put("", "v"))]),
        ("a long put without key", "Put", vec![], split(&long, 10_000)),
        (
            "a future revision",
            "Range",
            vec![],
            vec![encoded(&RangeRequest { revision: 99, ..range("k") })],
        ),
        ("a malformed message", "Range", vec![], vec![framed(0, &[0xff; 9])]),
        ("a message that is too long", "Put", vec![], split(&huge, 1 << 20)),
        ("a truncated message", "Range", vec![], vec![cut]),
        ("a truncated header", "Range", vec![], vec![found.slice(..3)]),
        ("two messages", "Range", vec![], vec![two]),
        ("no message", "Range", vec![], vec![]),
        ("a compressed message without an encoding", "Range", vec![], vec![framed(1, b"x")]),
        ("an unknown flag", "Range", vec![], vec![framed(7, b"x")]),
        ("an identity encoding", "Range", vec![("grpc-encoding", "identity")], vec![found.clone()]),
        ("an unknown encoding", "Range", vec![("grpc-encoding", "br")], vec![found.clone()]),
        (
            "a subtype",
            "Range",
            vec![("content-type", "application/grpc+proto")],
            vec![found.clone()],
        ),
        ("another type", "Range", vec![("content-type", "text/plain")], vec![found.clone()]),
        ("a passed deadline", "Range", vec![("grpc-timeout", "0m")], vec![found.clone()]),
        ("a malformed deadline", "Range", vec![("grpc-timeout", "1x")], vec![found.clone()]),
        ("a long deadline", "Range", vec![("grpc-timeout", "9H")], vec![found.clone()]),
        ("a leader is required", "Range", vec![("hasleader", "true")], vec![found.clone()]),
        ("a token without users", "Range", vec![("token", "x.1")], vec![found.clone()]),
        ("an unknown method", "Rang", vec![], vec![found]),
    ]
}

#[tokio::test]
async fn each_request_gets_the_same_answer_directly_and_by_the_router() {
    let node = ApiTestNode::start().await;
    node.put("k", &"v".repeat(5_000)).await;
    for (name, method, headers, parts) in unchanging_requests() {
        let direct = send(node.address, method, &headers, &parts).await;
        let routed = send(node.routed_address, method, &headers, &parts).await;
        assert_eq!(direct, routed, "{name}");
    }
}

#[tokio::test]
async fn changes_and_large_values_are_answered_directly_as_by_the_router() {
    let node = ApiTestNode::start().await;
    let value = "v".repeat(1_000_000);
    let mut revisions = Vec::new();
    for (n, address) in [node.address, node.routed_address].into_iter().enumerate() {
        let key = format!("key-{n}");
        let written = send(address, "Put", &[], &split(&encoded(&put(&key, &value)), 7_777)).await;
        assert_eq!(written.trailers["grpc-status"], "0");
        let answer = node_proto::etcdserverpb::PutResponse::decode(&written.body[5..]).unwrap();
        revisions.push(answer.header.unwrap().revision);
        let read = send(address, "Range", &[], &[encoded(&range(&key))]).await;
        let answer = node_proto::etcdserverpb::RangeResponse::decode(&read.body[5..]).unwrap();
        assert_eq!(answer.kvs[0].value, bytes(&value));
    }
    assert_eq!(revisions, [2, 3]);
    let counted = node.get("/metrics").await.1;
    let puts = r#"grpc_server_handled_total{grpc_code="OK",grpc_method="Put",grpc_service="etcdserverpb.KV",grpc_type="unary"} 2"#;
    assert!(counted.contains(puts), "{counted}");
}
