//! Tests of etcd tokens: what the protocol v2 answers, byte by byte, and which requests are
//! refused. Stock etcd itself runs in the end-to-end tests.

use std::time::Duration;

use discovery_types::api::{EtcdTokenQuery, EtcdTokenRequest, EtcdTokenState, EventQuery};
use discovery_types::client::DiscoveryClient;
use discovery_types::etcd_token::{EtcdPeers, EtcdProtocol, EtcdToken};
use discovery_types::problem::Code;
use secrecy::ExposeSecret;
use serde_json::{Value, json};
use uuid::Uuid;

use super::support::{TestInstallation, age_last_change, exchange};
use crate::etcd_tokens::format_id;
use crate::server::{RunningService, start};

/// Host header of the raw requests, which is a part of each member's id.
const HOST: &str = "disco:8443";

/// Status, `X-Etcd-Index` and body of an answer.
#[derive(Debug, PartialEq)]
pub(super) struct KeyAnswer {
    pub(super) status: u16,
    index: Option<u64>,
    body: Value,
}

/// A client of the protocol v2.
pub(super) struct V2Client<'a> {
    pub(super) world: &'a TestInstallation,
    pub(super) service: &'a RunningService,
    pub(super) token: String,
}

impl V2Client<'_> {
    pub(super) async fn send(&self, method: &str, key: &str, form: Option<&str>) -> KeyAnswer {
        let body = form.unwrap_or_default();
        let text = format!(
            "{method} /v2/{}{key} HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n\
             content-type: application/x-www-form-urlencoded\r\ncontent-length: {}\r\n\r\n{body}",
            self.token,
            body.len()
        );
        let answer = exchange(self.world, self.service, None, text.as_bytes()).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let header =
            |name: &str| head.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        KeyAnswer {
            status: head.split(' ').nth(1).unwrap().parse().unwrap(),
            index: header("x-etcd-index").map(|index| index.parse().unwrap()),
            body: serde_json::from_str(body).unwrap_or(Value::Null),
        }
    }

    async fn get(&self, key: &str) -> KeyAnswer {
        self.send("GET", key, None).await
    }

    /// Returns the path of a member's key, and the form that registers it.
    pub(super) fn registration(&self, name: &str, url: &str) -> (String, String) {
        let value = format!("{name}={url}");
        let directory = format!("https://{HOST}/v2/{}", self.token);
        let id = format_id(value.parse::<EtcdPeers>().unwrap().member_id(&directory));
        let value = value.replace('=', "%3D").replace(':', "%3A").replace('/', "%2F");
        (format!("/{id}"), format!("value={value}"))
    }

    /// Registers a member as etcd does.
    async fn register(&self, name: &str, url: &str) -> KeyAnswer {
        let (path, form) = self.registration(name, url);
        self.send("PUT", &format!("{path}?prevExist=false"), Some(&form)).await
    }
}

async fn make(admin: &DiscoveryClient, size: u8) -> (EtcdToken, EtcdTokenRequest) {
    let token = EtcdToken::generate();
    let request = EtcdTokenRequest {
        id: token.id(),
        secret_hash: token.secret_hash(),
        name: "demo".parse().unwrap(),
        protocol: EtcdProtocol::V2,
        size,
        lifetime_seconds: 3_600,
        cidrs: Vec::new(),
    };
    admin.put_etcd_token(&request).await.unwrap();
    (token, request)
}

fn client<'a>(
    world: &'a TestInstallation,
    service: &'a RunningService,
    token: &EtcdToken,
) -> V2Client<'a> {
    V2Client { world, service, token: token.expose().expose_secret().to_owned() }
}

#[tokio::test]
async fn the_protocol_v2_answers_as_etcd_does() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let (token, _) = make(&admin, 2).await;
    let etcd = client(&world, &service, &token);
    let root = format!("/_etcd/registry/{}", token.id());

    let size = etcd.get("/_config/size?quorum=false&recursive=false&sorted=false").await;
    let node = json!({
        "key": format!("{root}/_config/size"), "value": "2",
        "modifiedIndex": 1, "createdIndex": 1,
    });
    let get = |node: &Value| json!({ "action": "get", "node": node });
    assert_eq!(size, KeyAnswer { status: 200, index: Some(2), body: get(&node) });
    let directory = json!({ "key": root, "dir": true, "modifiedIndex": 1, "createdIndex": 1 });
    // The path may end in a slash.
    for path in ["?quorum=false", "/?quorum=false"] {
        let empty = etcd.get(path).await;
        assert_eq!(empty, KeyAnswer { status: 200, index: Some(2), body: get(&directory) });
    }

    let first = etcd.register("n0", "http://10.0.0.1:2380").await;
    assert_eq!((first.status, first.index), (201, Some(3)));
    let node = first.body["node"].clone();
    assert_eq!(
        (&first.body["action"], &node["value"], &node["createdIndex"]),
        (&json!("create"), &json!("n0=http://10.0.0.1:2380"), &json!(3))
    );
    let key = node["key"].as_str().unwrap();
    let id = key.strip_prefix(&format!("{root}/")).unwrap();
    // A wait from an index in the past is answered at once, here with the member's own
    // registration.
    let own = etcd.get(&format!("/{id}?recursive=false&wait=true&waitIndex=3")).await;
    assert_eq!((own.status, &own.body["node"]), (200, &node));
    let listed = etcd.get("?recursive=true").await;
    assert_eq!(listed.body["node"]["nodes"], json!([node]));

    // A wait returns the first registration whose index is at least `waitIndex`, whether it comes
    // later or was made before.
    let waiting = etcd.get("?recursive=true&wait=true&waitIndex=4");
    let (woken, second) = tokio::join!(waiting, async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        etcd.register("n1", "http://10.0.0.2:2380").await
    });
    assert_eq!((woken.status, &woken.body), (200, &second.body));
    assert_eq!(woken.index, Some(4));
    let past = etcd.get("?recursive=true&wait=true&waitIndex=1").await;
    assert_eq!(past.body["node"], node);

    let full = etcd.register("n2", "http://10.0.0.3:2380").await;
    assert_eq!(full.status, 403);
    assert!(full.body["cause"].as_str().unwrap().contains("the cluster is full"), "{full:?}");
    let view = admin.show_etcd_token(token.id()).await.unwrap();
    assert_eq!((view.state, view.members.len()), (EtcdTokenState::Complete, 2));
    service.stop().await;
}

/// etcd doesn't send a registration again after an error, so a registration waits for its turn.
#[tokio::test]
async fn registrations_over_the_rate_limit_are_answered_a_little_later() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let (token, _) = make(&world.owner(&service), 3).await;
    service.stop().await;
    let mut args = world.args("ledger");
    (args.limits.rate, args.limits.burst) = (1, 1);
    let service = start(args).await.unwrap();
    let etcd = client(&world, &service, &token);
    for host in 1..=3 {
        let (name, url) = (format!("n{host}"), format!("http://10.0.0.{host}:2380"));
        let registered = etcd.register(&name, &url).await;
        assert_eq!(registered.status, 201, "{registered:?}");
    }
    service.stop().await;
}

/// A registration is tried again while the database can't answer.
#[tokio::test]
async fn a_registration_outlasts_a_short_fault_of_the_database() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let (token, _) = make(&world.owner(&service), 3).await;
    let etcd = client(&world, &service, &token);
    let mut database = world.database.connect().await;
    sqlx::query("ALTER TABLE etcd_tokens RENAME TO hidden_tokens")
        .execute(&mut database)
        .await
        .unwrap();
    assert_eq!(etcd.get("").await.status, 503, "a GET is answered at once: etcd tries it again");
    let (registered, ()) = tokio::join!(etcd.register("n0", "http://10.0.0.1:2380"), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        sqlx::query("ALTER TABLE hidden_tokens RENAME TO etcd_tokens")
            .execute(&mut database)
            .await
            .unwrap();
    });
    assert_eq!(registered.status, 201, "{registered:?}");
    service.stop().await;
}

#[tokio::test]
async fn bad_requests_of_the_protocol_v2_are_refused_in_its_own_form() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let (token, _) = make(&admin, 3).await;
    let etcd = client(&world, &service, &token);
    etcd.register("n0", "http://10.0.0.1:2380").await;
    let wrong_secret = client(&world, &service, &token.with_other_secret());
    let unknown = client(&world, &service, &EtcdToken::generate());
    let (v3, mut request) = (EtcdToken::generate(), make(&admin, 3).await.1);
    (request.id, request.secret_hash) = (v3.id(), v3.secret_hash());
    request.cidrs = vec!["10.0.0.0/8".parse().unwrap()];
    admin.put_etcd_token(&request).await.unwrap();
    let foreign = client(&world, &service, &v3);
    let put = "value=n1%3Dhttp%3A%2F%2F10.0.0.2%3A2380";
    for (etcd, method, key, form, status, code, cause) in [
        (&unknown, "GET", "", None, 404, 100, "unknown, expired"),
        (&wrong_secret, "GET", "", None, 404, 100, "unknown, expired"),
        (&foreign, "GET", "", None, 403, 110, "other networks"),
        (&etcd, "GET", "/xyz", None, 404, 100, "no such key"),
        (&etcd, "GET", "/a/b/c", None, 404, 100, "no such key"),
        (&etcd, "GET", "/1", None, 404, 100, "no member with this id"),
        (&etcd, "GET", "?wait=perhaps", None, 400, 209, "query"),
        (&etcd, "GET", "?wait=true&waitIndex=-1", None, 400, 209, "query"),
        (&etcd, "PUT", "", Some(put), 403, 107, "only members"),
        (&etcd, "PUT", "/_config/size", Some("value=0"), 403, 107, "only members"),
        (&etcd, "PUT", "/1", Some("value=0"), 400, 209, "name=url"),
        (&etcd, "PUT", "/1", Some("other=0"), 400, 209, "value"),
        (&etcd, "PUT", "/1", Some(put), 403, 107, "give every member exactly the same one"),
        (&etcd, "DELETE", "", None, 405, 107, "etcdctl member"),
        (&etcd, "POST", "/1", Some(put), 405, 107, "etcdctl member"),
    ] {
        let answer = etcd.send(method, key, form).await;
        assert_eq!((answer.status, &answer.body["errorCode"]), (status, &json!(code)), "{key}");
        let text = answer.body["cause"].as_str().unwrap();
        assert!(text.contains(cause), "{key}: {text}");
        assert!(answer.index.is_some(), "{key}");
    }
    let duplicate = V2Client { token: etcd.token.clone(), ..client(&world, &service, &token) };
    let duplicate = duplicate.register("other", "http://10.0.0.1:2380").await;
    assert_eq!((duplicate.status, &duplicate.body["errorCode"]), (412, &json!(105)));
    let view = admin.show_etcd_token(token.id()).await.unwrap();
    assert_eq!(view.members.len(), 1, "nothing was changed");
    service.stop().await;
}

#[tokio::test]
async fn bad_tokens_are_refused() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let (_, good) = make(&admin, 3).await;
    assert!(admin.put_etcd_token(&good).await.is_ok(), "the same request again changes nothing");
    type Change = fn(&mut EtcdTokenRequest);
    let changes: [(Change, Code); 7] = [
        (|bad| bad.size = 0, Code::InvalidRequest),
        (|bad| bad.size = 10, Code::InvalidRequest),
        (|bad| bad.lifetime_seconds = 0, Code::InvalidRequest),
        (|bad| bad.lifetime_seconds = u64::MAX, Code::InvalidRequest),
        (|bad| bad.cidrs = vec!["10.0.0.0/8".parse().unwrap(); 9], Code::InvalidRequest),
        (|bad| bad.secret_hash = EtcdToken::generate().secret_hash(), Code::Conflict),
        (|bad| bad.protocol = EtcdProtocol::V3, Code::WrongState),
    ];
    for (change, code) in changes {
        let mut bad = good.clone();
        change(&mut bad);
        let refused = admin.put_etcd_token(&bad).await.unwrap_err();
        assert_eq!(refused.code(), Some(code), "{bad:?}");
    }
    let unknown = EtcdToken::generate().id();
    for refused in [admin.show_etcd_token(unknown).await, admin.revoke_etcd_token(unknown).await] {
        assert_eq!(refused.unwrap_err().code(), Some(Code::NotFound));
    }
    let (newer, _) = make(&admin, 3).await;
    let query = EtcdTokenQuery { after: None, limit: Some(1) };
    let first = admin.list_etcd_tokens(&query).await.unwrap();
    assert_eq!(first.tokens[0].id, newer.id());
    let query = EtcdTokenQuery { after: first.next, limit: Some(1) };
    let second = admin.list_etcd_tokens(&query).await.unwrap();
    assert_eq!((second.tokens[0].id, second.next), (good.id, None));
    service.stop().await;
}

#[tokio::test]
async fn a_token_ends_by_its_time_by_revocation_and_by_a_change_of_the_database() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let state = async |token: &EtcdToken| admin.show_etcd_token(token.id()).await.unwrap().state;
    let usable =
        async |token: &EtcdToken| client(&world, &service, token).get("").await.status == 200;
    let [revoked, expired, void] =
        [make(&admin, 3).await.0, make(&admin, 3).await.0, make(&admin, 3).await.0];
    assert!(usable(&revoked).await && usable(&expired).await && usable(&void).await);

    admin.revoke_etcd_token(revoked.id()).await.unwrap();
    admin.revoke_etcd_token(revoked.id()).await.unwrap();
    assert!(!usable(&revoked).await);
    assert_eq!(state(&revoked).await, EtcdTokenState::Revoked);

    let mut database = world.database.connect().await;
    sqlx::query("UPDATE etcd_tokens SET expires_us = now_us() WHERE id = $1")
        .bind(expired.id().to_string())
        .execute(&mut database)
        .await
        .unwrap();
    assert!(!usable(&expired).await);
    assert_eq!(state(&expired).await, EtcdTokenState::Expired);

    // A restored database may have lost registrations: other members could form a second cluster.
    sqlx::query("UPDATE generation SET settled = false").execute(&mut database).await.unwrap();
    assert!(!usable(&void).await, "not while the change isn't over");
    sqlx::query("UPDATE generation SET settled = true, void_before_us = now_us()")
        .execute(&mut database)
        .await
        .unwrap();
    assert!(!usable(&void).await);
    assert_eq!(state(&void).await, EtcdTokenState::Void);
    age_last_change(&world.database).await;
    let (new, _) = make(&admin, 3).await;
    assert!(usable(&new).await);

    let query = EventQuery { stream: Uuid::nil(), after: None, limit: None };
    let events = admin.events(&query).await.unwrap().events;
    let count = |kind: &str| events.iter().filter(|event| event.kind == kind).count();
    assert_eq!((count("etcd_token_made"), count("etcd_token_revoked")), (4, 1));
    service.stop().await;
}

#[tokio::test]
async fn a_wrong_secret_for_a_known_token_raises_the_alarm() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let (token, _) = make(&admin, 3).await;
    let wrong = client(&world, &service, &token.with_other_secret());
    for _ in 0..5 {
        assert_eq!(wrong.get("").await.status, 404);
    }
    let alarms = service.app().metrics.text();
    assert!(alarms.contains("alarms_total{kind=\"token_guessed\"} 1"), "{alarms}");
    let refused = service.app().refusals.take();
    assert_eq!((refused.len(), &refused[0]["count"]), (1, &json!(5)), "{refused:?}");
    service.stop().await;
}

/// Two processes serve one list: a wait at one process is answered when a member registers at the
/// other. A member whose host waits nowhere loses its place. Clients whose list contains this
/// member are told to read the list again.
#[tokio::test]
async fn two_processes_serve_one_list() {
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    (args.times.lease, args.times.prepare) = (Duration::from_secs(2), Duration::from_secs(2));
    let one = start(args.clone()).await.unwrap();
    args.ledger = world.folder.path().join("ledger-2");
    let two = start(args).await.unwrap();
    let admin = world.owner(&one);
    let (token, _) = make(&admin, 3).await;
    let (at_one, at_two) = (client(&world, &one, &token), client(&world, &two, &token));
    assert_eq!(at_one.register("n0", "http://10.0.0.1:2380").await.index, Some(3));
    let (woken, second) = tokio::join!(at_one.get("?wait=true&waitIndex=4"), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        at_two.register("n1", "http://10.0.0.2:2380").await
    });
    assert_eq!(woken.body, second.body);
    // No etcd waits now, so both members lose their places.
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    let directory = at_one.get("").await;
    assert_eq!((directory.index, &directory.body["node"]["nodes"]), (Some(5), &Value::Null));
    // A wait from an earlier index gets a status that makes etcd read the list again. This wait
    // comes from the members' address, so both members get their places back.
    let stale = at_two.get("?wait=true&waitIndex=5").await;
    assert_eq!((stale.status, &stale.body["errorCode"]), (503, &json!(300)));
    let again = at_two.get("").await;
    assert_eq!(again.body["node"]["nodes"].as_array().map(Vec::len), Some(2));
    // Without news, a wait ends with an empty body.
    let nothing = at_two.get("?wait=true&waitIndex=8").await;
    assert_eq!((nothing.status, nothing.body), (200, Value::Null));
    let view = admin.show_etcd_token(token.id()).await.unwrap();
    assert_eq!(view.members.iter().filter(|member| member.lapsed).count(), 0);
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn the_database_keeps_a_complete_list() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let (token, _) = make(&admin, 1).await;
    client(&world, &service, &token).register("n0", "http://10.0.0.1:2380").await;
    let mut database = world.database.connect().await;
    for sql in [
        "DELETE FROM etcd_members",
        "UPDATE etcd_members SET value = 'n1=http://10.0.0.9:2380'",
        "INSERT INTO etcd_members SELECT token, member_id, value, address, 9, 0, false, 0
         FROM etcd_members",
    ] {
        let error = sqlx::query(sql).execute(&mut database).await.unwrap_err();
        assert!(error.to_string().contains("complete"), "{error}");
    }
    // The list is deleted together with its token, a week after the token has expired.
    sqlx::query("UPDATE etcd_tokens SET expires_us = now_us() - 8::bigint * 86400 * 1000000")
        .execute(&mut database)
        .await
        .unwrap();
    service.app().store.delete_old_etcd_tokens().await.unwrap();
    let left: i64 = sqlx::query_scalar("SELECT count(*) FROM etcd_members")
        .fetch_one(&mut database)
        .await
        .unwrap();
    assert_eq!(left, 0);
    service.stop().await;
}
