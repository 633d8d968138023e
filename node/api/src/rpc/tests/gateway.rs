//! Tests of the JSON gateway over the wire. Expected answers are those of etcd 3.7.3, unless stated
//! otherwise.

use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::*;

/// Sends a request as HTTP/1.0. So the answer ends with the connection, and isn't sent in chunks.
async fn send(node: &ApiTestNode, verb: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(node.address).await.unwrap();
    let length = body.len();
    let head = format!("{verb} {path} HTTP/1.0\r\n{headers}content-length: {length}\r\n\r\n");
    // Send the request in one write, since the server may close the connection before it has
    // received the body.
    let _ = stream.write_all(&[head.as_bytes(), body].concat()).await;
    stream
}

/// Returns the status and the JSON values of the body. Removes the header's term, which depends on
/// elections.
async fn answer(mut stream: TcpStream) -> (u16, Vec<Value>) {
    let mut answer = String::new();
    soon(stream.read_to_string(&mut answer)).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    assert!(head.contains("access-control-allow-origin: *"), "{head}");
    let values = serde_json::Deserializer::from_str(body).into_iter::<Value>();
    let values = values.map(|value| {
        let mut value = value.expect(body);
        for place in ["/header", "/result/header"] {
            if let Some(Value::Object(header)) = value.pointer_mut(place) {
                header.remove("raft_term");
            }
        }
        value
    });
    (status, values.collect())
}

async fn post(node: &ApiTestNode, path: &str, body: &Value) -> (u16, Value) {
    let body = body.to_string();
    let (status, mut values) = answer(send(node, "POST", path, "", body.as_bytes()).await).await;
    (status, values.pop().unwrap_or_default())
}

async fn done(node: &ApiTestNode, path: &str, body: &Value) -> Value {
    let (status, value) = post(node, path, body).await;
    assert_eq!(status, 200, "{path} {body}: {value}");
    value
}

fn header(revision: i64) -> Value {
    json!({ "cluster_id": "9", "member_id": MEMBER.to_string(), "revision": revision.to_string() })
}

fn refusal(code: i32, message: &str) -> Value {
    json!({ "code": code, "message": message })
}

#[tokio::test]
async fn keys_are_written_and_read_in_json() {
    let node = ApiTestNode::start().await;
    let put = json!({ "key": "YQ==", "value": "MQ==", "unknown": [{}] });
    assert_eq!(done(&node, "/v3/kv/put", &put).await, json!({ "header": header(2) }));
    let kv = json!({ "key": "YQ==", "create_revision": "2", "mod_revision": "2", "version": "1", "value": "MQ==" });
    let found = json!({ "header": header(2), "kvs": [kv], "count": "1" });
    for range in [
        json!({ "key": "YQ==" }),
        json!({ "key": "YQ" }),
        json!({ "key": "YQ==", "limit": 1 }),
        json!({ "key": "YQ==", "limit": "1", "sort_order": "DESCEND", "sortTarget": 2 }),
        json!({ "key": "YQ==", "sort_order": "NO SUCH ORDER" }),
    ] {
        for path in ["/v3/kv/range", "/v3beta/kv/range"] {
            assert_eq!(done(&node, path, &range).await, found, "{range}");
        }
    }
    let txn = json!({
        "compare": [{ "result": "EQUAL", "target": "CREATE", "key": "YQ==", "create_revision": "2" }],
        "success": [
            { "request_range": { "key": "YQ==" } },
            { "requestDeleteRange": { "key": "Yg==" } },
            { "request_txn": {} },
        ],
    });
    let inner = json!({ "header": { "revision": "2" }, "kvs": [kv], "count": "1" });
    let responses = json!([
        { "response_range": inner },
        { "response_delete_range": { "header": { "revision": "2" } } },
        { "response_txn": { "header": {}, "succeeded": true } },
    ]);
    let expected = json!({ "header": header(2), "succeeded": true, "responses": responses });
    assert_eq!(done(&node, "/v3/kv/txn", &txn).await, expected);
    let delete = json!({ "key": "YQ==", "prev_kv": true });
    let deleted = json!({ "header": header(3), "deleted": "1", "prev_kvs": [kv] });
    assert_eq!(done(&node, "/v3/kv/deleterange", &delete).await, deleted);
    let members = done(&node, "/v3/cluster/member/list", &json!({})).await;
    assert_eq!(members["members"][0]["ID"], MEMBER.to_string());
    let hash = done(&node, "/v3/maintenance/hashkv", &json!({})).await;
    assert!(hash["hash"].is_u64(), "32 bits are a number: {hash}");
    assert_eq!(done(&node, "/v3/maintenance/defragment", &json!({})).await, json!({}));
}

#[tokio::test]
async fn errors_are_json_objects_with_the_closest_http_status() {
    let node = ApiTestNode::start().await;
    for (path, body, status, refused) in [
        ("kv/range", json!({}), 400, refusal(3, "etcdserver: key is not provided")),
        ("kv/range", json!({ "key": null }), 400, refusal(3, "etcdserver: key is not provided")),
        (
            "kv/range",
            json!({ "key": "YQ==", "sort_order": 77 }),
            400,
            refusal(3, "etcdserver: invalid sort option"),
        ),
        (
            "kv/compaction",
            json!({ "revision": 9 }),
            400,
            refusal(11, "etcdserver: mvcc: required revision is a future revision"),
        ),
        (
            "lease/revoke",
            json!({ "ID": 5 }),
            404,
            refusal(5, "etcdserver: requested lease not found"),
        ),
        (
            "maintenance/transfer-leadership",
            json!({}),
            400,
            refusal(9, "etcdserver: bad leader transferee"),
        ),
        ("election/resign", json!({}), 500, refusal(2, "\"leader\" field must be provided")),
        ("nothing", json!({}), 404, refusal(5, "Not Found")),
    ] {
        let told = post(&node, &format!("/v3/{path}"), &body).await;
        assert_eq!(told, (status, refused), "{path} {body}");
    }
    for (verb, path, status, code) in [
        ("GET", "/v3/kv/range", 501, 12),
        ("PUT", "/v3/kv/range", 501, 12),
        ("GET", "/v3/nothing", 404, 5),
        ("POST", "/v3/", 404, 5),
        ("POST", "/v3/kv/range/", 404, 5),
    ] {
        let (told, body) = answer(send(&node, verb, path, "", b"{}").await).await;
        assert_eq!((told, &body[0]["code"]), (status, &json!(code)), "{verb} {path}");
    }
    let (status, body) = answer(send(&node, "OPTIONS", "/v3/kv/range", "", b"").await).await;
    assert_eq!((status, body.len()), (200, 0));
}

/// The error texts are our own, so only the codes are checked.
#[tokio::test]
async fn a_body_that_is_no_json_message_is_refused() {
    let node = ApiTestNode::start().await;
    for body in [
        &b"nonsense"[..],
        b"[]",
        b"{",
        b"{]}",
        b"{\"key\":12}",
        b"{\"key\":\"!!\"}",
        b"{\"key\":\"a\"}",
        b"{\"limit\":\"x\"}",
        b"{\"limit\":1.5}",
        b"{\"limit\":99999999999999999999}",
        b"{\"limit\":true}",
        b"{\"count_only\":\"true\"}",
        b"{\"key\":\"YQ==\",}",
        b"{\"key\":\"\xff\"}",
        b"\xef\xbb\xbf{}",
        b"{\"max_create_revision\":\"-\"}",
    ] {
        let (status, told) = answer(send(&node, "POST", "/v3/kv/range", "", body).await).await;
        assert_eq!(
            (status, &told[0]["code"]),
            (400, &json!(3)),
            "{} {told:?}",
            body.escape_ascii()
        );
    }
    let both = json!({ "success": [{ "request_range": {}, "request_put": {} }] });
    assert_eq!(post(&node, "/v3/kv/txn", &both).await.0, 400, "one of the two");
}

#[tokio::test]
async fn a_json_request_can_be_as_large_as_in_grpc() {
    let node = ApiTestNode::start().await;
    let value = |size: usize| data_encoding::BASE64.encode(&vec![7; size]);
    let put = json!({ "key": "YQ==", "value": value(1_500_000) });
    done(&node, "/v3/kv/put", &put).await;
    let found = done(&node, "/v3/kv/range", &json!({ "key": "YQ==" })).await;
    assert_eq!(found["kvs"][0]["value"], put["value"]);
    let too_large = json!({ "key": "YQ==", "value": value(1_600_000) });
    let refused = (400, refusal(3, "etcdserver: request is too large"));
    assert_eq!(post(&node, "/v3/kv/put", &too_large).await, refused);
    let far_too_large = json!({ "key": "YQ==", "value": value(2_300_000) });
    let (status, refused) = post(&node, "/v3/kv/put", &far_too_large).await;
    assert_eq!((status, &refused["code"]), (429, &json!(8)), "{refused}");
}

#[tokio::test]
async fn a_watch_sends_one_line_for_each_answer_until_the_client_leaves() {
    let node = ApiTestNode::start().await;
    node.put("a", "1").await;
    let create =
        br#"{"create_request":{"key":"YQ==","start_revision":2}} {"createRequest":{"key":"Yg=="}}"#;
    let mut stream = send(&node, "POST", "/v3/watch", "", create).await;
    let mut seen = String::new();
    let mut until = async |wanted: &str| {
        let mut piece = [0; 1_024];
        while !seen.contains(wanted) {
            let count = soon(stream.read(&mut piece)).await.unwrap();
            assert!(count > 0, "no {wanted}: {seen}");
            seen.push_str(std::str::from_utf8(&piece[..count]).unwrap());
        }
    };
    until("\"created\":true").await;
    until("\"watch_id\":\"1\",\"created\":true").await;
    until("\"events\":[{\"kv\":{\"key\":\"YQ==\",\"create_revision\":\"2\",\"mod_revision\":\"2\",\"version\":\"1\",\"value\":\"MQ==\"}}]").await;
    let request = DeleteRangeRequest { key: bytes("a"), ..DeleteRangeRequest::default() };
    node.kv().delete_range(request).await.unwrap();
    until("\"events\":[{\"type\":\"DELETE\",\"kv\":{\"key\":\"YQ==\",\"mod_revision\":\"3\"}}]")
        .await;
    let (head, body) = seen.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.0 200") && head.contains("application/json"), "{head}");
    assert!(body.lines().all(|line| line.starts_with("{\"result\":{\"header\":{")), "{body}");
    drop(stream);
    let gone = "\netcd_debugging_mvcc_watcher_total 0\n";
    let ended = async {
        while !node.get("/metrics").await.1.contains(gone) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(ended).await;
}

#[tokio::test]
async fn a_stream_with_an_invalid_request_ends_with_an_error() {
    let node = ApiTestNode::start().await;
    let asked =
        async |path: &str, body: &[u8]| answer(send(&node, "POST", path, "", body).await).await;
    let (status, told) = asked("/v3/watch", b"nonsense").await;
    assert_eq!((status, &told[0]["code"]), (400, &json!(3)));
    let (status, told) =
        asked("/v3/watch", b"{\"create_request\":{\"key\":\"YQ==\"}} nonsense").await;
    assert_eq!(status, 200);
    assert_eq!(told.last().unwrap()["error"]["code"], 3, "{told:?}");
    done(&node, "/v3/lease/grant", &json!({ "TTL": 100, "ID": "77" })).await;
    let alive = json!({ "result": { "header": header(1), "ID": "77", "TTL": "100" } });
    let gone = json!({ "result": { "header": header(1), "ID": "78" } });
    let kept = asked("/v3/lease/keepalive", b"{\"ID\":\"77\"}{\"ID\":77}\n{\"ID\":\"78\"}").await;
    assert_eq!(kept, (200, vec![alive.clone(), alive, gone]));
    assert_eq!(asked("/v3/lease/keepalive", b"").await, (200, vec![]));
    let (status, snapshot) = asked("/v3/maintenance/snapshot", b"").await;
    assert_eq!(status, 200);
    assert!(snapshot.iter().all(|part| part["result"]["blob"].is_string()), "{snapshot:?}");
}

#[tokio::test]
async fn a_call_with_a_timeout_ends_with_an_error_at_its_deadline() {
    let node = ApiTestNode::start().await;
    let body = br#"{"key":"YQ=="}"#;
    let asked = async |path: &str, headers: &str| {
        answer(send(&node, "POST", path, headers, body).await).await
    };
    let late = vec![refusal(4, "context deadline exceeded")];
    assert_eq!(asked("/v3/kv/range", "Grpc-Timeout: 0n\r\n").await, (504, late.clone()));
    assert_eq!(asked("/v3/kv/range", "Grpc-Timeout: 99999999H\r\n").await.0, 200);
    let wrong = vec![refusal(3, "invalid grpc-timeout: x")];
    assert_eq!(asked("/v3/kv/range", "Grpc-Timeout: x\r\n").await, (400, wrong));
    let (status, told) = asked("/v3/election/observe", "Grpc-Timeout: 50m\r\n").await;
    assert_eq!((status, told), (504, vec![json!({ "error": late[0] })]));
}
