//! Tests of permissions over the wire, for each method and each kind of caller.

use futures_util::StreamExt as _;
use node_proto::authpb::{Permission, UserAddOptions, permission::Type};
use node_proto::command::{AssignToken, AuthChange, Operation};
use node_proto::etcdserverpb::auth_client::AuthClient;
use node_proto::etcdserverpb::cluster_client::ClusterClient;
use node_proto::etcdserverpb::lease_client::LeaseClient;
use node_proto::etcdserverpb::{
    AuthDisableRequest, AuthEnableRequest, AuthRoleAddRequest, AuthRoleGrantPermissionRequest,
    AuthRoleRevokePermissionRequest, AuthStatusRequest, AuthUserAddRequest,
    AuthUserChangePasswordRequest, AuthUserDeleteRequest, AuthUserGrantRoleRequest,
    AuthUserListRequest, AuthenticateRequest, LeaseGrantRequest, LeaseKeepAliveRequest,
    LeaseRevokeRequest, LeaseTimeToLiveRequest, MemberAddRequest,
};
use node_state::apply::Response;
use node_state::auth::{
    self, AuthOperation, Jwt, JwtOptions, Password, RequestedAccess, TokenSecret,
};
use tonic::Request;
use tonic::metadata::MetadataValue;
use tonic_prost::ProstCodec;

use super::*;
use crate::rpc::Method;
use crate::rpc::access::{Credentials, PresentedToken};

mod lock_queues;

/// Error that a caller receives: code and text.
type CodeAndText = (Code, String);

fn refused(code: Code, text: &str) -> CodeAndText {
    (code, format!("etcdserver: {text}"))
}

fn empty() -> CodeAndText {
    refused(Code::InvalidArgument, "user name is empty")
}

fn denied() -> CodeAndText {
    refused(Code::PermissionDenied, "permission denied")
}

fn invalid() -> CodeAndText {
    refused(Code::Unauthenticated, "invalid auth token")
}

/// Makes a request with the token, if one is given.
fn with_token<T>(token: Option<&str>, message: T) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("token", MetadataValue::try_from(token).unwrap());
    }
    request
}

fn result<T>(answer: Result<T, Status>) -> Result<T, CodeAndText> {
    answer.map_err(|status| (status.code(), status.message().to_owned()))
}

impl ApiTestNode {
    fn auth(&self) -> AuthClient<Channel> {
        AuthClient::new(self.channel.clone())
    }

    async fn token(&self, name: &str, password: &str) -> Result<String, CodeAndText> {
        let (name, password) = (name.to_owned(), password.to_owned());
        let answer = self.auth().authenticate(AuthenticateRequest { name, password }).await;
        result(answer).map(|answer| answer.into_inner().token)
    }

    async fn add_user(&self, root: Option<&str>, name: &str) {
        let (user, password) = (name.to_owned(), format!("pw-{name}"));
        let add = AuthUserAddRequest { name: user, password, ..Default::default() };
        self.auth().user_add(with_token(root, add)).await.unwrap();
    }

    async fn give(&self, root: Option<&str>, user: &str, role: &str) {
        let (user, role) = (user.to_owned(), role.to_owned());
        let grant = AuthUserGrantRoleRequest { user, role };
        self.auth().user_grant_role(with_token(root, grant)).await.unwrap();
    }

    async fn allow(&self, root: Option<&str>, role: &str, kind: Type, key: &str) {
        self.allow_range(root, role, kind, (key, "")).await;
    }

    async fn allow_range(
        &self,
        root: Option<&str>,
        role: &str,
        kind: Type,
        (key, range_end): (&str, &str),
    ) {
        let (key, range_end) = (bytes(key), bytes(range_end));
        let perm = Some(Permission { perm_type: kind.into(), key, range_end });
        let grant = AuthRoleGrantPermissionRequest { name: role.to_owned(), perm };
        self.auth().role_grant_permission(with_token(root, grant)).await.unwrap();
    }

    /// Starts a node with authentication and the users `root`, `some` and `none`, and returns their
    /// tokens. `some` may read `r`, write `w`, and do both with `b`.
    async fn with_users() -> (Self, [String; 3]) {
        // A short lease would expire during the test, by a log entry that tests don't expect.
        let limits = ApiLimits { min_lease_ttl: 1_000, ..ApiLimits::default() };
        let node = Self::start_with(limits).await;
        for name in ["root", "some", "none"] {
            node.add_user(None, name).await;
        }
        node.give(None, "root", "root").await;
        let role = AuthRoleAddRequest { name: "little".to_owned() };
        node.auth().role_add(role).await.unwrap();
        for (kind, key) in [(Type::Read, "r"), (Type::Write, "w"), (Type::Readwrite, "b")] {
            node.allow(None, "little", kind, key).await;
        }
        node.give(None, "some", "little").await;
        for key in ["r", "w", "b", "x"] {
            node.put(key, "old").await;
        }
        node.auth().auth_enable(AuthEnableRequest {}).await.unwrap();
        let mut tokens = Vec::new();
        for name in ["root", "some", "none"] {
            tokens.push(node.token(name, &format!("pw-{name}")).await.unwrap());
        }
        (node, tokens.try_into().unwrap())
    }

    /// Returns the applied index, after a read barrier.
    async fn applied(&self) -> u64 {
        self.context.barrier(false).await.unwrap();
        self.context.store.view().applied().index
    }

    /// Calls a method of any service with an empty request.
    async fn ask(&self, method: Method, token: Option<&str>) -> Result<(), CodeAndText> {
        let (service, name, kind) = method.labels();
        let path = format!("/{service}/{name}").parse().unwrap();
        let mut grpc = tonic::client::Grpc::new(self.channel.clone());
        grpc.ready().await.unwrap();
        let codec = ProstCodec::<(), ()>::default();
        result(match kind {
            "unary" => grpc.unary(with_token(token, ()), path, codec).await.map(|_| ()),
            _ => {
                let asked = with_token(token, all_of([()]));
                match grpc.streaming(asked, path, codec).await {
                    Ok(answer) => answer.into_inner().message().await.map(|_| ()),
                    Err(status) => Err(status),
                }
            }
        })
    }
}

fn all_of<T: Send + 'static, const N: usize>(
    all: [T; N],
) -> impl futures_util::Stream<Item = T> + Send + 'static {
    futures_util::stream::iter(all)
}

/// Converts an expected error for Lock and Election methods, which always have the code `Unknown`.
fn error_as_sent_by(method: Method, (code, text): CodeAndText) -> CodeAndText {
    let (service, ..) = method.labels();
    (if service.starts_with("v3") { Code::Unknown } else { code }, text)
}

/// Returns whether an anonymous caller, and whether a user without roles, may make an empty call.
/// `None` means that another test covers the method, since its empty request is invalid.
fn expected(method: Method) -> Option<(bool, bool)> {
    Some(match method {
        Method::Range
        | Method::RangeStream
        | Method::Put
        | Method::DeleteRange
        | Method::MemberAdd
        | Method::Watch => return None,
        Method::Proclaim | Method::Resign => return None,
        // The missing key is noticed only when the key's permission is checked.
        Method::Unlock => (false, true),
        Method::AuthStatus | Method::Authenticate => (true, true),
        Method::LeaseGrant
        | Method::LeaseRevoke
        | Method::LeaseKeepAlive
        | Method::LeaseTimeToLive
        | Method::LeaseLeases
        | Method::MemberList
        | Method::Status
        // The empty request only lists the alarms.
        | Method::Alarm => (false, true),
        // The first two empty requests name no user and no role. The third is an empty transaction.
        Method::UserGet | Method::RoleGet => (false, false),
        Method::Txn => (false, true),
        _ => (false, false),
    })
}

#[tokio::test]
async fn every_method_accepts_only_callers_with_permission() {
    let (node, [_, _, none]) = ApiTestNode::with_users().await;
    for method in Method::ALL.iter().copied() {
        let Some((anybody, user)) = expected(method) else { continue };
        let told = |told: CodeAndText| Err(error_as_sent_by(method, told));
        let wrong = node.ask(method, Some("abcdefghijklmnop.7")).await;
        if method == Method::Authenticate {
            assert_ne!(wrong, told(invalid()), "{method:?}");
        } else {
            assert_eq!(wrong, told(invalid()), "{method:?}");
        }
        let nobody = node.ask(method, None).await;
        assert_eq!(nobody != told(empty()), anybody, "{method:?}: {nobody:?}");
        let before = node.applied().await;
        let asked = node.ask(method, Some(&none)).await;
        assert_eq!(asked != told(denied()), user, "{method:?}: {asked:?}");
        // A lock or campaign without a lease first grants one, which needs a log entry.
        let proposes = user || matches!(method, Method::Lock | Method::Campaign);
        assert!(proposes || node.applied().await == before, "{method:?}: by a log entry");
        let known = ![told(empty()), told(invalid())].contains(&asked);
        assert!(known, "{method:?}: {asked:?}");
    }
}

#[tokio::test]
async fn keys_can_be_read_and_written_only_with_permission() {
    let (node, [root, some, none]) = ApiTestNode::with_users().await;
    let mut kv = node.kv();
    // The columns are caller, key, and whether the caller may read and write the key.
    for (who, key, reads, writes) in [
        (&root, "x", true, true),
        (&some, "r", true, false),
        (&some, "w", false, true),
        (&some, "b", true, true),
        (&some, "x", false, false),
        (&none, "b", false, false),
    ] {
        let who = Some(who.as_str());
        for serializable in [false, true] {
            let request = RangeRequest { serializable, ..range(key) };
            let read = result(kv.range(with_token(who, request)).await).map(|_| ());
            assert_eq!(read, if reads { Ok(()) } else { Err(denied()) }, "{key}");
        }
        let written = result(kv.put(with_token(who, put(key, "new"))).await).map(|_| ());
        assert_eq!(written, if writes { Ok(()) } else { Err(denied()) }, "{key}");
        let all = PutRequest { prev_kv: true, ..put(key, "new") };
        let written = result(kv.put(with_token(who, all)).await).map(|_| ());
        assert_eq!(written, if reads && writes { Ok(()) } else { Err(denied()) }, "{key}");
    }
    let wide = RangeRequest { range_end: Bytes::from_static(b"\0"), ..range("b") };
    assert_eq!(result(kv.range(with_token(Some(&some), wide)).await).map(|_| ()), Err(denied()));
    assert_eq!(result(kv.range(range("r")).await).map(|_| ()), Err(empty()));
    assert_eq!(result(kv.put(put("w", "v")).await).map(|_| ()), Err(empty()));
    // An invalid request gets its own error, even from a client without permission: the request is
    // checked first.
    let none = result(kv.put(put("", "v")).await).map(|_| ());
    assert_eq!(none, Err(refused(Code::InvalidArgument, "key is not provided")));
    let mut cluster = ClusterClient::new(node.channel.clone());
    let add = MemberAddRequest { peer_ur_ls: vec!["http://x:1".to_owned()], is_learner: true };
    assert_eq!(result(cluster.member_add(add.clone()).await).map(|_| ()), Err(empty()));
    assert_eq!(
        result(cluster.member_add(with_token(Some(&some), add)).await).map(|_| ()),
        Err(denied())
    );
}

#[tokio::test]
async fn a_transaction_is_refused_for_any_forbidden_operation_in_it() {
    let (node, [_, some, _]) = ApiTestNode::with_users().await;
    let previous = PutRequest { prev_kv: true, ..put("w", "v") };
    let key = |key: &str| Bytes::copy_from_slice(key.as_bytes());
    let delete =
        |of: &str, prev_kv| DeleteRangeRequest { key: key(of), range_end: Bytes::new(), prev_kv };
    for forbidden in [
        Op::RequestRange(range("x")),
        Op::RequestPut(put("x", "v")),
        Op::RequestPut(previous),
        Op::RequestDeleteRange(delete("x", false)),
        Op::RequestDeleteRange(delete("w", true)),
    ] {
        let mut inner = forbidden;
        for depth in 0..3 {
            let failure = vec![RequestOp { request: Some(inner) }];
            let success = vec![RequestOp { request: Some(Op::RequestPut(put("b", "v"))) }];
            let hidden = TxnRequest { success, failure, ..TxnRequest::default() };
            let asked = node.kv().txn(with_token(Some(&some), hidden.clone())).await;
            assert_eq!(result(asked).map(|_| ()), Err(denied()), "{depth}: {hidden:?}");
            inner = Op::RequestTxn(hidden);
        }
    }
    let success = vec![RequestOp { request: Some(Op::RequestRange(range("b"))) }];
    let read = TxnRequest { success, ..TxnRequest::default() };
    let got = node.kv().txn(with_token(Some(&some), read)).await.unwrap().into_inner();
    assert!(format!("{got:?}").contains("old"), "nothing was changed: {got:?}");
}

#[tokio::test]
async fn a_watch_needs_read_permission_for_its_whole_range() {
    let (node, [_, some, none]) = ApiTestNode::with_users().await;
    let create = |key: &str, end: &'static [u8]| {
        let (key, range_end) = (Bytes::copy_from_slice(key.as_bytes()), Bytes::from_static(end));
        let create = WatchCreateRequest { key, range_end, ..WatchCreateRequest::default() };
        WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) }
    };
    let told = async |token: Option<&str>, request: WatchRequest| {
        let mut watch = WatchClient::new(node.channel.clone());
        let (sender, requests) = mpsc::channel(1);
        sender.send(request).await.unwrap();
        let requests = request_stream(requests);
        let mut answers = watch.watch(with_token(token, requests)).await.unwrap().into_inner();
        let answer = answers.message().await.unwrap().unwrap();
        assert!(answer.created);
        (answer.canceled, answer.watch_id, answer.cancel_reason)
    };
    let (some, none) = (Some(some.as_str()), Some(none.as_str()));
    assert_eq!(told(some, create("r", b"")).await, (false, 0, String::new()));
    let denied = "rpc error: code = PermissionDenied desc = etcdserver: permission denied";
    // Permission for a key gives none for the keys after it.
    for (who, key, end) in [
        (some, "r", b"\0".as_slice()),
        (some, "r", b"s"),
        (some, "w", b""),
        (none, "r", b""),
        (some, "", b"\0"),
    ] {
        assert_eq!(told(who, create(key, end)).await, (true, -1, denied.to_owned()), "{key}");
    }
    let empty = "rpc error: code = InvalidArgument desc = etcdserver: user name is empty";
    assert_eq!(told(None, create("r", b"")).await, (true, -1, empty.to_owned()));
    let invalid = "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token";
    assert_eq!(told(Some("x.1"), create("r", b"")).await, (true, -1, invalid.to_owned()));
}

#[tokio::test]
async fn a_lease_with_forbidden_keys_cannot_be_used_or_revoked() {
    let (node, [root, some, none]) = ApiTestNode::with_users().await;
    let mut leases = LeaseClient::new(node.channel.clone());
    for id in [1, 2] {
        leases
            .lease_grant(with_token(Some(&none), LeaseGrantRequest { id, ttl: 1_000 }))
            .await
            .unwrap();
    }
    for (lease, key) in [(1, "x"), (2, "w")] {
        node.kv()
            .put(with_token(Some(&root), PutRequest { lease, ..put(key, "v") }))
            .await
            .unwrap();
    }
    let some = Some(some.as_str());
    let attach = PutRequest { lease: 1, ..put("b", "v") };
    assert_eq!(result(node.kv().put(with_token(some, attach)).await).map(|_| ()), Err(denied()));
    let mut keep_alive = async |token, id| {
        let wishes = all_of([LeaseKeepAliveRequest { id }]);
        let mut answers =
            leases.lease_keep_alive(with_token(token, wishes)).await.unwrap().into_inner();
        result(answers.message().await).map(|answer| answer.unwrap().ttl)
    };
    assert_eq!(keep_alive(some, 1).await, Err(denied()));
    assert_eq!(keep_alive(some, 2).await, Ok(1_000));
    assert_eq!(keep_alive(some, 3).await, Ok(0));
    assert_eq!(keep_alive(Some(&root), 1).await, Ok(1_000));
    // The permission is also checked for requests that the stream serves together.
    let wishes = [2; 100].map(|id| LeaseKeepAliveRequest { id });
    let wishes = all_of(wishes).chain(all_of([LeaseKeepAliveRequest { id: 1 }]));
    let mut answers = leases.lease_keep_alive(with_token(some, wishes)).await.unwrap().into_inner();
    let last = loop {
        match result(answers.message().await) {
            Ok(Some(answer)) => assert_eq!(answer.id, 2),
            last => break last.map(drop),
        }
    };
    assert_eq!(last, Err(denied()));
    let mut leases = LeaseClient::new(node.channel.clone());
    for (id, keys, allowed) in [(1, true, false), (1, false, true), (2, true, false)] {
        let asked = with_token(some, LeaseTimeToLiveRequest { id, keys });
        assert_eq!(result(leases.lease_time_to_live(asked).await).is_ok(), allowed, "{id} {keys}");
    }
    let revoke = |id| LeaseRevokeRequest { id };
    let ended = result(leases.lease_revoke(with_token(some, revoke(1))).await).map(|_| ());
    assert_eq!(ended, Err(denied()));
    leases.lease_revoke(with_token(some, revoke(2))).await.unwrap();
}

#[tokio::test]
async fn no_password_is_valid_after_a_change_to_an_empty_one() {
    let (node, [root, ..]) = ApiTestNode::with_users().await;
    let change = async |password: &str| {
        let (name, password) = ("some".to_owned(), password.to_owned());
        let change = AuthUserChangePasswordRequest { name, password, ..Default::default() };
        node.auth().user_change_password(with_token(Some(&root), change)).await.unwrap();
    };
    change("").await;
    let failed =
        refused(Code::InvalidArgument, "authentication failed, invalid user ID or password");
    for password in ["", "pw-some"] {
        assert_eq!(node.token("some", password).await, Err(failed.clone()), "{password:?}");
    }
    change("new").await;
    node.token("some", "new").await.unwrap();
    // A user that was created with an empty password can authenticate with an empty password.
    let (name, password) = ("open".to_owned(), String::new());
    let add = AuthUserAddRequest { name, password, ..Default::default() };
    node.auth().user_add(with_token(Some(&root), add)).await.unwrap();
    node.token("open", "").await.unwrap();
    // A user that was created without a password can't authenticate. The error says so, whatever
    // password is tried.
    let options = Some(UserAddOptions { no_password: true });
    let add = AuthUserAddRequest { name: "host".to_owned(), options, ..Default::default() };
    node.auth().user_add(with_token(Some(&root), add)).await.unwrap();
    let text = "auth: authentication failed, password was given for no password user";
    for password in ["", "x"] {
        assert_eq!(node.token("host", password).await, Err((Code::Unknown, text.to_owned())));
    }
}

#[tokio::test]
async fn a_password_can_be_changed_by_its_hash() {
    let (node, [root, ..]) = ApiTestNode::with_users().await;
    // Made with `golang.org/x/crypto/bcrypt` from the password `r`.
    let hash = b"$2a$10$YNOWTowaZNX0FTrZtdwAFuZT8mJkX1hxAtV/QgIqXC7GN4rIfWMqm";
    let change = async |hashed_password: String| {
        let (name, password) = ("some".to_owned(), String::new());
        let change = AuthUserChangePasswordRequest { name, password, hashed_password };
        result(node.auth().user_change_password(with_token(Some(&root), change)).await).map(|_| ())
    };
    let text = "auth: authentication failed, password was given for no password user";
    assert_eq!(change("!!!!".to_owned()).await, Err((Code::Unknown, text.to_owned())));
    node.token("some", "pw-some").await.unwrap();
    assert_eq!(change(data_encoding::BASE64.encode(hash)).await, Ok(()));
    node.token("some", "r").await.unwrap();
    assert!(node.token("some", "pw-some").await.is_err());
}

#[tokio::test]
async fn the_names_of_users_and_roles_have_a_maximum_length() {
    let (node, [root, ..]) = ApiTestNode::with_users().await;
    for (length, taken) in [(32_768, true), (32_769, false)] {
        let name = "n".repeat(length);
        let role = AuthRoleAddRequest { name: name.clone() };
        let role = result(node.auth().role_add(with_token(Some(&root), role)).await);
        let user = AuthUserAddRequest { name, password: "p".to_owned(), ..Default::default() };
        let user = result(node.auth().user_add(with_token(Some(&root), user)).await);
        assert_eq!((role.is_ok(), user.is_ok()), (taken, taken), "{length}");
    }
}

#[tokio::test]
async fn a_token_is_valid_until_its_user_changes() {
    let (node, [root, some, none]) = ApiTestNode::with_users().await;
    let failed =
        refused(Code::InvalidArgument, "authentication failed, invalid user ID or password");
    for (name, password) in [("some", "x"), ("some", ""), ("who", "pw-some"), ("", "")] {
        assert_eq!(node.token(name, password).await, Err(failed.clone()), "{name}");
    }
    let read = async |token: &str| {
        let asked = node.kv().range(with_token(Some(token), range("b"))).await;
        result(asked).map(|_| ())
    };
    let other = node.token("some", "pw-some").await.unwrap();
    assert_eq!((read(&some).await, read(&other).await), (Ok(()), Ok(())));
    let (name, password) = ("some".to_owned(), "new".to_owned());
    let change = AuthUserChangePasswordRequest { name, password, ..Default::default() };
    node.auth().user_change_password(with_token(Some(&root), change)).await.unwrap();
    assert_eq!((read(&some).await, read(&other).await), (Err(invalid()), Err(invalid())));
    assert_eq!(node.token("some", "pw-some").await, Err(failed.clone()));
    let mut request = Request::new(range("b"));
    request.metadata_mut().insert("token", MetadataValue::try_from(&b"\xff"[..]).unwrap());
    let asked = node.kv().range(request).await;
    assert_eq!(result(asked).map(drop), Err(invalid()), "what is no text is not nothing");
    let again = node.token("some", "new").await.unwrap();
    assert_eq!(read(&again).await, Ok(()));
    // Over HTTP, the token may be sent as a bearer token.
    let mut request = Request::new(range("b"));
    let bearer = MetadataValue::try_from(format!("Bearer {again}")).unwrap();
    request.metadata_mut().insert("authorization", bearer);
    node.kv().range(request).await.unwrap();
    let delete = AuthUserDeleteRequest { name: "some".to_owned() };
    node.auth().user_delete(with_token(Some(&root), delete)).await.unwrap();
    assert_eq!(read(&again).await, Err(invalid()));
    assert_eq!(read(&none).await, Err(denied()), "another user's is as good as it was");
    node.auth().auth_disable(with_token(Some(&root), AuthDisableRequest {})).await.unwrap();
    assert_eq!(read("anything").await, Ok(()), "nobody is asked any more");
    let text = "authentication is not enabled";
    assert_eq!(node.token("root", "pw-root").await, Err(refused(Code::FailedPrecondition, text)));
    let status = node.auth().auth_status(AuthStatusRequest {}).await.unwrap().into_inner();
    assert_eq!((status.enabled, status.auth_revision), (false, 13));
    node.auth().auth_enable(AuthEnableRequest {}).await.unwrap();
    assert_eq!(read(&root).await, Err(invalid()), "tokens ended with what they were for");
}

#[tokio::test]
async fn an_unused_token_expires() {
    let limits = ApiLimits { auth_token_ttl: Duration::from_millis(300), ..ApiLimits::default() };
    let node = ApiTestNode::start_with(limits).await;
    node.add_user(None, "root").await;
    node.give(None, "root", "root").await;
    node.auth().auth_enable(AuthEnableRequest {}).await.unwrap();
    let token = node.token("root", "pw-root").await.unwrap();
    let mut wait = Duration::from_millis(100);
    loop {
        tokio::time::sleep(wait).await;
        match result(node.kv().range(with_token(Some(&token), range("k"))).await) {
            Ok(_) => wait *= 2,
            Err(told) => return assert_eq!(told, invalid()),
        }
    }
}

#[tokio::test]
async fn a_token_takes_precedence_over_a_certificate() {
    let (node, [root, _, none]) = ApiTestNode::with_users().await;
    let may = async |token: Option<&str>, name: Option<&str>, access: RequestedAccess<'_>| {
        let token = token.map(PresentedToken::new);
        let who = Credentials::Client { token, name: name.map(Into::into) };
        node.context.authorise_call(&who, access, false).await.map(|_| ())
    };
    let root_key = range("x");
    let (key, all) = (RequestedAccess::Range(&root_key), RequestedAccess::RootRole);
    for (token, name, told) in [
        (None, Some("root"), (Ok(()), Ok(()))),
        (None, Some("some"), (Err(Error::PermissionDenied), Err(Error::PermissionDenied))),
        (None, Some("who"), (Err(Error::PermissionDenied), Err(Error::UserNotFound))),
        (None, Some(""), (Err(Error::PermissionDenied), Err(Error::UserEmpty))),
        (None, None, (Err(Error::UserEmpty), Err(Error::UserEmpty))),
        (Some(&*root), Some("some"), (Ok(()), Ok(()))),
        (Some(&none), Some("root"), (Err(Error::PermissionDenied), Err(Error::PermissionDenied))),
        (Some("x.1"), Some("root"), (Err(Error::InvalidAuthToken), Err(Error::InvalidAuthToken))),
    ] {
        assert_eq!((may(token, name, key).await, may(token, name, all).await), told, "{name:?}");
    }
    // A certificate identifies its holder, even if the cluster has no user of that name.
    assert_eq!(may(None, Some("who"), RequestedAccess::AnyUser).await, Ok(()));
    assert_eq!(may(None, None, RequestedAccess::AnyUser).await, Err(Error::UserEmpty));
}

#[tokio::test]
async fn a_range_stream_needs_read_permission_for_the_whole_range() {
    let (node, [root, some, none]) = ApiTestNode::with_users().await;
    let all = || RangeRequest { key: bytes("a"), range_end: bytes("z"), ..RangeRequest::default() };
    let read = async |token: Option<&str>, request: RangeRequest| {
        let mut stream =
            result(node.kv().range_stream(with_token(token, request)).await)?.into_inner();
        while result(stream.message().await)?.is_some() {}
        Ok(())
    };
    let denied = || (Code::PermissionDenied, "etcdserver: permission denied".to_owned());
    assert_eq!(read(Some(&root), all()).await, Ok(()));
    assert_eq!(read(Some(&some), range("r")).await, Ok(()));
    assert_eq!(read(Some(&some), all()).await, Err(denied()));
    assert_eq!(read(Some(&none), range("r")).await, Err(denied()));
    assert_eq!(read(Some("x.1"), range("r")).await, Err(invalid()));
    let empty = (Code::InvalidArgument, "etcdserver: user name is empty".to_owned());
    assert_eq!(read(None, range("r")).await, Err(empty));
}

#[tokio::test]
async fn a_range_stream_ends_when_its_caller_loses_the_permission() {
    let (node, [root, some, _]) = ApiTestNode::with_users().await;
    node.allow_range(Some(&root), "little", Type::Read, ("k", "l")).await;
    for n in 0..8 {
        let value = "x".repeat(1 << 20);
        node.kv().put(with_token(Some(&root), put(&format!("k{n}"), &value))).await.unwrap();
    }
    let (key, range_end) = (bytes("k"), bytes("l"));
    let wide = RangeRequest { key: key.clone(), range_end: range_end.clone(), ..range("") };
    let mut kv = range_stream::narrow(&node).await;
    let mut stream = kv.range_stream(with_token(Some(&some), wide)).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    let revoke = AuthRoleRevokePermissionRequest { role: "little".to_owned(), key, range_end };
    node.auth().role_revoke_permission(with_token(Some(&root), revoke)).await.unwrap();
    assert_eq!(range_stream::end(&mut stream).await, denied());
}

/// Starts a node with tokens that are signed, and valid for `seconds`. The key is one that OpenSSL
/// made for the tests of signed tokens.
async fn signing(seconds: u64) -> ApiTestNode {
    let folder =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../state/src/auth/jwt/fixtures");
    let options = JwtOptions {
        method: auth::Algorithm::HS256,
        public_key: None,
        private_key: Some(folder.join("hmac.key")),
        ttl: Duration::from_secs(seconds),
    };
    let jwt = Arc::new(Jwt::load(&options).unwrap());
    let node = ApiTestNode::start_signing(ApiLimits::default(), Some(jwt)).await;
    node.add_user(None, "root").await;
    node.give(None, "root", "root").await;
    node.auth().auth_enable(AuthEnableRequest {}).await.unwrap();
    node
}

#[tokio::test]
async fn a_long_call_ends_when_its_signed_token_expires() {
    let mut seconds = 2;
    loop {
        let node = signing(seconds).await;
        let token = node.token("root", "pw-root").await.unwrap();
        let who = Credentials::Client { token: Some(PresentedToken::new(&token)), name: None };
        let may = async || {
            node.context.authorise_call(&who, RequestedAccess::RootRole, false).await.map(drop)
        };
        // On a slow machine the token may expire before its first use. Then try again with twice
        // the lifetime.
        if may().await.is_err() {
            seconds *= 2;
            continue;
        }
        let over = async {
            while may().await.is_ok() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        soon(over).await;
        return assert_eq!(may().await, Err(Error::InvalidAuthToken));
    }
}

#[tokio::test]
async fn a_signed_token_is_invalid_if_the_password_changed_while_it_was_issued() {
    let node = signing(300).await;
    // Verifying this hash takes long enough to change the password meanwhile.
    let slow = bcrypt::hash("old", 9).unwrap();
    let change = async |hash: String| {
        let password = Password { name: "root".to_owned(), hash: hash.into(), no_password: false };
        let change = AuthChange { change: Some(AuthOperation::UserChangePassword(password)) };
        node.context.propose_as_member(Operation::ChangeAuth(change)).await.unwrap();
    };
    let mut wait = Duration::from_millis(20);
    let token = loop {
        change(slow.clone()).await;
        let other = async {
            tokio::time::sleep(wait).await;
            change(String::new()).await;
        };
        // There is no token if the password was changed before it was verified.
        if let (Ok(token), ()) = tokio::join!(node.token("root", "old"), other) {
            break token;
        }
        wait *= 2;
    };
    let old = refused(Code::InvalidArgument, "revision of auth store is old");
    assert_eq!(
        result(node.kv().range(with_token(Some(&token), range("k"))).await).map(drop),
        Err(old)
    );
}

#[tokio::test]
async fn a_simple_token_is_refused_by_a_member_with_signed_tokens() {
    let node = signing(300).await;
    let secret = TokenSecret::random();
    let revision = node.context.store.view().auth().revision();
    let (user, hash) = ("root".to_owned(), secret.hash().to_vec().into());
    let assign = AssignToken { user, revision, secret: hash };
    let given = node.context.propose_as_member(Operation::AssignToken(assign)).await.unwrap();
    let Response::TokenAssigned { index, .. } = given else { panic!("{given:?}") };
    let asked = node.kv().range(with_token(Some(&secret.token(index)), range("k"))).await;
    assert_eq!(result(asked).map(drop), Err(invalid()));
}

#[tokio::test]
async fn a_signed_token_with_a_newer_auth_revision_is_refused_until_it_is_reached() {
    let node = signing(300).await;
    let signed = |later| {
        let revision = node.context.store.view().auth().revision() + later;
        let now = jiff::Timestamp::now().as_second();
        node.context.access.signed_tokens.as_ref().unwrap().sign("root", revision, now).unwrap()
    };
    let (token, now) = (signed(1), signed(0));
    let ask = async |token: &str| {
        let mut told = Vec::new();
        for serializable in [true, false] {
            let range = RangeRequest { serializable, ..range("k") };
            told.push(result(node.kv().range(with_token(Some(token), range)).await).map(drop));
        }
        told.push(result(node.kv().put(with_token(Some(token), put("k", "v"))).await).map(drop));
        let status = node.auth().user_list(with_token(Some(token), AuthUserListRequest {})).await;
        told.push(result(status).map(drop));
        told
    };
    let old = refused(Code::InvalidArgument, "revision of auth store is old");
    assert_eq!(ask(&now).await, vec![Ok(()); 4]);
    assert_eq!(ask(&token).await, vec![Err(old.clone()); 4]);
    node.add_user(Some(&now), "other").await;
    assert_eq!(ask(&now).await, vec![Err(old); 4]);
    assert_eq!(ask(&token).await, vec![Ok(()); 4]);
}
