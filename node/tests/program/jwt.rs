//! Signed tokens (JWT) on three members, with stock `etcdctl`, and how forged or outdated tokens
//! are refused.

use std::path::{Path, PathBuf};

use crate::common::{TestMember, etcdctl, node_command, start_three, three_members};
use data_encoding::BASE64URL_NOPAD;
use node_proto::etcdserverpb::auth_client::AuthClient;
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::{
    AuthEnableRequest, AuthRoleAddRequest, AuthUserAddRequest, AuthUserGrantRoleRequest,
    AuthenticateRequest, RangeRequest,
};
use ring::hmac;
use serde_json::{Value, json};
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Status};

/// Unix time in 2100, as an expiry that no test reaches.
const FAR_FUTURE: i64 = 4_102_444_800;
const KEY: &[u8] = b"a key that every member has";

/// Returns the path of a key file. OpenSSL made these files for the unit tests.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("state/src/auth/jwt/fixtures").join(name)
}

fn signing_flag(private: &Path, method: &str) -> String {
    format!("--auth-token=jwt,priv-key={},sign-method={method},ttl=10m", private.display())
}

/// Creates `root` with all permissions and `u` with none, and enables auth. The passwords are
/// `canary-` and the name.
async fn with_users(member: &TestMember) {
    let mut auth = AuthClient::new(member.channel());
    for name in ["root", "u"] {
        let (name, password) = (name.to_owned(), format!("canary-{name}"));
        let add = AuthUserAddRequest { name, password, ..Default::default() };
        auth.user_add(add).await.unwrap();
    }
    auth.role_add(AuthRoleAddRequest { name: "root".to_owned() }).await.unwrap();
    let (user, role) = ("root".to_owned(), "root".to_owned());
    auth.user_grant_role(AuthUserGrantRoleRequest { user, role }).await.unwrap();
    member.put("k", "v").await.unwrap();
    auth.auth_enable(AuthEnableRequest {}).await.unwrap();
}

async fn authenticate(member: &TestMember, name: &str) -> Result<String, Status> {
    let (name, password) = (name.to_owned(), format!("canary-{name}"));
    let request = AuthenticateRequest { name, password };
    Ok(AuthClient::new(member.channel()).authenticate(request).await?.into_inner().token)
}

/// Reads a key with `token`. Returns code and text of the error if it is refused.
async fn get(member: &TestMember, token: &str) -> Result<(), (Code, String)> {
    let mut request = Request::new(RangeRequest { key: "k".into(), ..Default::default() });
    request.metadata_mut().insert("token", MetadataValue::try_from(token).unwrap());
    let answer = KvClient::new(member.channel()).range(request).await;
    answer.map(drop).map_err(|status| (status.code(), status.message().to_owned()))
}

fn claims(token: &str) -> Value {
    let payload = token.split('.').nth(1).unwrap();
    serde_json::from_slice(&BASE64URL_NOPAD.decode(payload.as_bytes()).unwrap()).unwrap()
}

/// Returns a token signed with `key` by HMAC-SHA256, even if `header` names another algorithm.
fn signed(header: &Value, payload: &Value, key: &[u8]) -> String {
    let part = |part: &Value| BASE64URL_NOPAD.encode(part.to_string().as_bytes());
    let text = format!("{}.{}", part(header), part(payload));
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes());
    format!("{text}.{}", BASE64URL_NOPAD.encode(tag.as_ref()))
}

fn old_revision_error() -> (Code, String) {
    (Code::InvalidArgument, "etcdserver: revision of auth store is old".to_owned())
}

fn invalid_token_error() -> (Code, String) {
    (Code::Unauthenticated, "etcdserver: invalid auth token".to_owned())
}

#[tokio::test]
async fn a_signed_token_counts_on_all_members_but_only_the_private_key_signs() {
    let root = tempfile::tempdir().unwrap();
    let mut members = three_members(root.path());
    let (private, public) = (fixture("rsa.pem"), fixture("rsa-pub.pem"));
    for member in &mut members[..2] {
        member.args.push(signing_flag(&private, "RS256"));
    }
    let checks = format!("--auth-token=jwt,pub-key={},sign-method=RS256", public.display());
    members[2].args.push(checks);
    members.iter_mut().for_each(TestMember::start);
    members.iter_mut().for_each(TestMember::wait_ready);
    with_users(&members[0]).await;
    let token = authenticate(&members[1], "root").await.unwrap();
    for member in &members {
        assert_eq!(get(member, &token).await, Ok(()), "{}", member.name);
        assert_eq!(get(member, &format!("Bearer {token}")).await, Ok(()), "{}", member.name);
    }
    let status = authenticate(&members[2], "root").await.unwrap_err();
    let text = "auth: token signing attempted with verify-only key";
    assert_eq!((status.code(), status.message()), (Code::Unknown, text));
    let said = claims(&token);
    let names: Vec<&String> = said.as_object().unwrap().keys().collect();
    assert_eq!(names, ["exp", "revision", "username"]);
    assert_eq!(said["username"], "root");
    if let Some((true, _)) = etcdctl(&members[0].client_url, &["version"]) {
        let all: Vec<&str> = members[..2].iter().map(|member| &*member.client_url).collect();
        let user = ["--user", "root:canary-root"];
        for args in [&["put", "x", "y"][..], &["user", "add", "other:pw"], &["get", "x"]] {
            let (done, said) = etcdctl(&all.join(","), &[&user, args].concat()).unwrap();
            assert!(done, "{args:?}: {said}");
        }
        // Adding the user has changed the revision of the auth store. So no member accepts the
        // older token.
        for member in &members {
            assert_eq!(get(member, &token).await, Err(old_revision_error()), "{}", member.name);
        }
    }
    for member in &members {
        let log = member.log();
        let key = std::fs::read_to_string(&private).unwrap();
        let secret = key.lines().nth(3).unwrap();
        assert!(
            ![token.as_str(), secret, "canary-root"].iter().any(|it| log.contains(it)),
            "{log}"
        );
    }
}

#[tokio::test]
async fn a_token_with_another_signing_method_or_key_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    let key = root.path().join("key");
    std::fs::write(&key, KEY).unwrap();
    member.args.push(signing_flag(&key, "HS256"));
    member.start();
    member.wait_ready();
    with_users(&member).await;
    let given = authenticate(&member, "root").await.unwrap();
    let revision = claims(&given)["revision"].as_u64().unwrap();
    let header = json!({ "alg": "HS256", "typ": "JWT" });
    let says = |name: &str, revision: u64, exp: i64| json!({ "username": name, "revision": revision, "exp": exp });
    let by_key = |payload: &Value| signed(&header, payload, KEY);
    let good = says("root", revision, FAR_FUTURE);
    for token in [given.clone(), by_key(&good)] {
        assert_eq!(get(&member, &token).await, Ok(()), "{token}");
    }
    let denied = (Code::PermissionDenied, "etcdserver: permission denied".to_owned());
    for name in ["u", "nobody", "Root", "root "] {
        let token = by_key(&says(name, revision, FAR_FUTURE));
        assert_eq!(get(&member, &token).await, Err(denied.clone()), "{name}");
    }
    for other in [0, revision - 1, revision + 7] {
        assert_eq!(
            get(&member, &by_key(&says("root", other, FAR_FUTURE))).await,
            Err(old_revision_error())
        );
    }
    let (body, tag) = given.rsplit_once('.').unwrap();
    let none = signed(&json!({ "alg": "none" }), &good, KEY);
    let (unsigned, _) = none.rsplit_once('.').unwrap();
    let forged = BASE64URL_NOPAD.encode(says("root", revision, FAR_FUTURE).to_string().as_bytes());
    let others = body.split('.').next().unwrap();
    for token in [
        by_key(&says("root", revision, 1)),
        signed(&header, &good, b"another key"),
        signed(&header, &good, b""),
        signed(&json!({ "alg": "HS512" }), &good, KEY),
        none.clone(),
        format!("{unsigned}."),
        format!("{others}.{forged}.{tag}"),
        format!("{body}."),
        body.to_owned(),
        tag.to_owned(),
        "root".to_owned(),
        "abcdefghijklmnop.7".to_owned(),
        String::new(),
        by_key(&json!({ "username": "root", "revision": revision, "exp": "never" })),
        by_key(&json!({ "username": ["root"], "revision": revision })),
        by_key(&json!({ "username": "a".repeat(10_000), "revision": revision, "nbf": FAR_FUTURE })),
    ] {
        assert_eq!(get(&member, &token).await, Err(invalid_token_error()), "{token}");
    }
    // The last two cases are a token that isn't UTF-8, and one that is longer than any allowed
    // header.
    let mut request = Request::new(RangeRequest { key: "k".into(), ..Default::default() });
    let bytes = MetadataValue::try_from(&b"\xff\xfe\x80"[..]).unwrap();
    request.metadata_mut().insert("token", bytes);
    let status = KvClient::new(member.channel()).range(request).await.unwrap_err();
    assert_eq!((status.code(), status.message().to_owned()), invalid_token_error());
    assert!(get(&member, &"a".repeat(20_000)).await.is_err());
    assert_eq!(get(&member, &given).await, Ok(()), "it still serves");
}

#[tokio::test]
async fn simple_tokens_are_refused_where_tokens_are_signed() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    with_users(&members[0]).await;
    let simple = authenticate(&members[0], "root").await.unwrap();
    assert_eq!(get(&members[0], &simple).await, Ok(()));
    // Members restart one after the other, so that the cluster always has a quorum.
    for member in &mut members {
        assert_eq!(member.stop(), Some(0));
        member.args.push(signing_flag(&fixture("ed.pem"), "EdDSA"));
        member.start();
        member.wait_ready();
    }
    assert_eq!(get(&members[0], &simple).await, Err(invalid_token_error()));
    let token = authenticate(&members[0], "root").await.unwrap();
    assert_eq!(get(&members[1], &token).await, Ok(()));
}

#[test]
fn unusable_options_end_the_process_with_code_2_and_advice() {
    let rsa = fixture("rsa.pem").display().to_string();
    for (spec, text) in [
        ("jwt".to_owned(), "sign-method must be one of HS256"),
        ("jwt,sign-method=RS256".to_owned(), "RS256 needs priv-key=FILE"),
        (format!("jwt,sign-method=ES256,priv-key={rsa}"), "give a P-256 key in PEM"),
        ("jwt,sign-method=RS256,priv-key=/nowhere".to_owned(), "cannot read priv-key /nowhere"),
        (format!("jwt,sign-method=RS256,priv-key={rsa},ttl=x"), "ttl is a time"),
        ("paseto".to_owned(), "--auth-token takes simple, or jwt,"),
    ] {
        let output = node_command().arg(format!("--auth-token={spec}")).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{spec}: {said}");
        assert!(said.contains(text), "{spec}: {said}");
    }
}
