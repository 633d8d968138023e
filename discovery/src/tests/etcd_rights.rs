//! Every request of etcd's discovery protocols with every kind of token, as the running service
//! answers.
//!
//! In the tables, `yes` means that the request was served, and `-` that it was refused. Kinds of
//! tokens:
//!
//! - `none`: no token, or the id of a token without its secret.
//! - `guess`: the id of a token with another secret.
//! - `unknown`: a token that the service never stored.
//! - `expired`, `revoked`: a token that has ended.
//! - `protocol`: a token of the other protocol.
//! - `foreign`: a token that is bound to other networks.
//! - `other`: the id of one token with the secret of another one that is valid.
//! - `right`: a valid token, in the protocol v2.
//! - `user`: a valid token, in the protocol v3. The key contains the token's id, and the password
//!   is the whole token.
//! - `whole`: a valid token, in the protocol v3. The key contains the whole token.

use std::sync::Arc;
use std::time::Duration;

use discovery_types::api::EtcdTokenRequest;
use discovery_types::client::{DiscoveryClient, client_tls_config};
use discovery_types::etcd_token::{EtcdPeers, EtcdProtocol, EtcdToken};
use futures_util::StreamExt;
use hyper_util::rt::TokioIo;
use node_proto::etcdserverpb::auth_client::AuthClient;
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::watch_client::WatchClient;
use node_proto::etcdserverpb::watch_request::RequestUnion;
use node_proto::etcdserverpb::{
    AuthenticateRequest, PutRequest, RangeRequest, WatchCreateRequest, WatchRequest,
};
use prost_reflect::DescriptorPool;
use secrecy::ExposeSecret;
use tonic::codegen::http::Uri;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use super::etcd_tokens::V2Client;
use super::rights::{RightsRow, format_rights};
use super::support::{TestInstallation, etcd_address};
use crate::etcd_tokens::format_id;
use crate::server::{RunningService, start};

/// Peer URL of the member that each caller registers.
const PEER_URL: &str = "http://10.0.0.1:2380";
/// Limit for the first answer of a watch.
const WATCH_LIMIT: Duration = Duration::from_secs(60);

/// Starts a service that serves both protocols.
pub(super) async fn serve(world: &TestInstallation) -> RunningService {
    let mut args = world.args("ledger");
    args.etcd_listen = vec!["127.0.0.1:0".parse().unwrap()];
    start(args).await.unwrap()
}

fn text_of(token: &EtcdToken) -> String {
    token.expose().expose_secret().to_owned()
}

async fn stored(admin: &DiscoveryClient, protocol: EtcdProtocol, cidrs: &[&str]) -> EtcdToken {
    let token = EtcdToken::generate();
    let request = EtcdTokenRequest {
        id: token.id(),
        secret_hash: token.secret_hash(),
        name: "demo".parse().unwrap(),
        protocol,
        size: 3,
        lifetime_seconds: 3_600,
        cidrs: cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect(),
    };
    admin.put_etcd_token(&request).await.unwrap();
    token
}

/// Makes a token of each kind that is refused.
async fn refused_tokens(
    world: &TestInstallation,
    admin: &DiscoveryClient,
    protocol: EtcdProtocol,
) -> [(&'static str, EtcdToken); 6] {
    let other_protocol = match protocol {
        EtcdProtocol::V2 => EtcdProtocol::V3,
        EtcdProtocol::V3 => EtcdProtocol::V2,
    };
    let expired = stored(admin, protocol, &[]).await;
    sqlx::query("UPDATE etcd_tokens SET expires_us = now_us() WHERE id = $1")
        .bind(expired.id().to_string())
        .execute(&mut world.database.connect().await)
        .await
        .unwrap();
    let revoked = stored(admin, protocol, &[]).await;
    admin.revoke_etcd_token(revoked.id()).await.unwrap();
    [
        ("guess", stored(admin, protocol, &[]).await.with_other_secret()),
        ("unknown", EtcdToken::generate()),
        ("expired", expired),
        ("revoked", revoked),
        ("protocol", stored(admin, other_protocol, &[]).await),
        ("foreign", stored(admin, protocol, &["10.0.0.0/8"]).await),
    ]
}

#[tokio::test]
async fn protocol_v2_serves_holders_of_a_valid_token_alone() {
    let world = TestInstallation::new().await;
    let service = serve(&world).await;
    let admin = world.owner(&service);
    let mut callers = vec![("none", "x".to_owned())];
    let refused = refused_tokens(&world, &admin, EtcdProtocol::V2).await;
    callers.extend(refused.iter().map(|(name, token)| (*name, text_of(token))));
    let (one, two) =
        (stored(&admin, EtcdProtocol::V2, &[]).await, stored(&admin, EtcdProtocol::V2, &[]).await);
    let (one, two) = (text_of(&one), text_of(&two));
    // A token's text is `mst_etcd_<id>_<secret>_<checksum>`.
    let parts = |text: &str| text.split('_').map(str::to_owned).collect::<Vec<_>>();
    let mut mixed = parts(&two);
    mixed[2] = parts(&one)[2].clone();
    callers.extend([("other", mixed.join("_")), ("right", one)]);

    // The first request registers the member that the other requests read.
    let requests = [
        ("PUT", "{member}", "PUT    /v2/{token}/{member}"),
        ("GET", "", "GET    /v2/{token}"),
        ("HEAD", "", "HEAD   /v2/{token}"),
        ("GET", "?wait=true&waitIndex=1", "GET    /v2/{token}?wait=true"),
        ("GET", "/_config/size", "GET    /v2/{token}/_config/size"),
        ("GET", "{member}", "GET    /v2/{token}/{member}"),
        ("HEAD", "{member}", "HEAD   /v2/{token}/{member}"),
        ("PUT", "", "PUT    /v2/{token}"),
        ("PUT", "/_config/size", "PUT    /v2/{token}/_config/size"),
        ("POST", "", "POST   /v2/{token}"),
        ("POST", "{member}", "POST   /v2/{token}/{member}"),
        ("DELETE", "", "DELETE /v2/{token}"),
        ("DELETE", "{member}", "DELETE /v2/{token}/{member}"),
    ];
    let mut rows = Vec::new();
    for (method, key, shown) in requests {
        let mut cells = Vec::new();
        for (name, token) in &callers {
            let etcd = V2Client { world: &world, service: &service, token: token.clone() };
            let (member, form) = etcd.registration("n0", PEER_URL);
            let form = matches!(method, "PUT" | "POST").then_some(&*form);
            let answer = etcd.send(method, &key.replace("{member}", &member), form).await;
            cells.push(match answer.status {
                200 | 201 => "yes",
                403..=405 => "-",
                other => panic!("{shown} with {name}: {other} {answer:?}"),
            });
        }
        rows.push(RightsRow { method: method.into(), path: shown[7..].into(), cells });
    }
    let names: Vec<&str> = callers.iter().map(|(name, _)| *name).collect();
    insta::assert_snapshot!(format_rights(&names, rows));
    service.stop().await;
}

/// A caller of the protocol v3.
struct V3Caller {
    name: &'static str,
    /// The discovery token, which is a part of each key.
    cluster_token: String,
    /// The token that Authenticate returned.
    auth_token: Option<String>,
    user: String,
    password: String,
}

impl V3Caller {
    /// Makes a caller that names a token by its id, and shows the whole token as a password.
    fn with_password(name: &'static str, token: &EtcdToken, password: &EtcdToken) -> Self {
        let id = token.id().to_string();
        let password = text_of(password);
        let auth_token = Some(password.clone());
        V3Caller { name, cluster_token: id.clone(), auth_token, user: id, password }
    }

    fn key(&self, rest: &str) -> Vec<u8> {
        format!("/_etcd/registry/{}/{rest}", self.cluster_token).into_bytes()
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = &self.auth_token {
            request.metadata_mut().insert("token", token.parse().unwrap());
        }
        request
    }

    fn put(&self) -> PutRequest {
        let value = format!("n0={PEER_URL}");
        let peers: EtcdPeers = value.parse().unwrap();
        let id = format_id(peers.member_id(&self.cluster_token));
        let key = self.key(&format!("members/{id}")).into();
        PutRequest { key, value: value.into_bytes().into(), ..Default::default() }
    }

    fn watch(&self) -> WatchRequest {
        let create = WatchCreateRequest {
            key: self.key("members").into(),
            range_end: self.key("membert").into(),
            start_revision: 1,
            ..Default::default()
        };
        WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) }
    }
}

/// Connects to the listener of the protocol v3, without a client certificate.
pub(super) async fn connect(world: &TestInstallation, service: &RunningService) -> Channel {
    let address = etcd_address(service);
    let mut tls = client_tls_config(&world.context.pins, None);
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let connector = tokio_rustls::TlsConnector::from(Arc::new(tls));
    let dial = tower::service_fn(move |_: Uri| {
        let connector = connector.clone();
        async move {
            let socket = tokio::net::TcpStream::connect(address).await?;
            let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
            connector.connect(name, socket).await.map(TokioIo::new)
        }
    });
    Endpoint::from_static("http://127.0.0.1").connect_with_connector(dial).await.unwrap()
}

/// Returns whether the service served the request. Panics at an error for which the caller isn't to
/// blame.
fn is_served<T>(answer: Result<T, Status>, serves: impl FnOnce(T) -> bool) -> bool {
    match answer {
        Ok(answer) => serves(answer),
        Err(status) => match status.code() {
            Code::NotFound
            | Code::PermissionDenied
            | Code::InvalidArgument
            | Code::Unimplemented => false,
            _ => panic!("{status}"),
        },
    }
}

/// Sends a request of the protocol v3. `method` is one of the methods that the service has.
async fn is_served_by_v3(channel: &Channel, caller: &V3Caller, method: &str) -> bool {
    let (mut kv, mut watch, mut auth) = (
        KvClient::new(channel.clone()),
        WatchClient::new(channel.clone()),
        AuthClient::new(channel.clone()),
    );
    match method {
        "etcdserverpb.KV/Put" => is_served(kv.put(caller.request(caller.put())).await, |_| true),
        "etcdserverpb.KV/Range size" => {
            let key = caller.key("_config/size").into();
            let request = RangeRequest { key, ..Default::default() };
            // A range without keys makes etcd exit, so it counts as a refusal.
            is_served(kv.range(caller.request(request)).await, |found| {
                !found.get_ref().kvs.is_empty()
            })
        }
        "etcdserverpb.KV/Range members" => {
            let (key, range_end) = (caller.key("members").into(), caller.key("membert").into());
            let request = RangeRequest { key, range_end, ..Default::default() };
            is_served(kv.range(caller.request(request)).await, |found| {
                !found.get_ref().kvs.is_empty()
            })
        }
        "etcdserverpb.Watch/Watch" => {
            // The service ends a watch whose client sends nothing more.
            let requests = futures_util::stream::iter([caller.watch()]);
            let requests = requests.chain(futures_util::stream::pending());
            let mut answers = match watch.watch(caller.request(requests)).await {
                Ok(answers) => answers.into_inner(),
                refused => return is_served(refused, |_| true),
            };
            let first = tokio::time::timeout(WATCH_LIMIT, answers.message()).await.unwrap();
            // Only a served client is told that its watch is created. A refused client gets entries
            // that make etcd exit.
            is_served(first, |answer| answer.unwrap().created)
        }
        "etcdserverpb.Auth/Authenticate" => {
            let (name, password) = (caller.user.clone(), caller.password.clone());
            is_served(auth.authenticate(AuthenticateRequest { name, password }).await, |_| true)
        }
        _ => {
            let path = format!("/{method}").parse::<PathAndQuery>().unwrap();
            let mut grpc = tonic::client::Grpc::new(channel.clone());
            grpc.ready().await.unwrap();
            let codec = tonic_prost::ProstCodec::<(), ()>::default();
            is_served(grpc.unary(caller.request(()), path, codec).await, |_| true)
        }
    }
}

/// Returns every method of etcd's API. `KV/Range` is there twice: for the size, and for the
/// members. The first method registers the member that the other methods read.
fn methods() -> Vec<String> {
    let pool = DescriptorPool::decode(node_proto::API).unwrap();
    let mut methods = Vec::new();
    for service in pool.services() {
        for method in service.methods() {
            methods.push(format!("{}/{}", service.full_name(), method.name()));
        }
    }
    let range = methods.iter().position(|method| method == "etcdserverpb.KV/Range").unwrap();
    methods[range] = "etcdserverpb.KV/Range size".into();
    methods.push("etcdserverpb.KV/Range members".into());
    methods.sort_by_key(|method| method != "etcdserverpb.KV/Put");
    assert!(methods.len() > 40, "{methods:?}");
    methods
}

#[tokio::test]
async fn protocol_v3_serves_holders_of_a_valid_token_alone() {
    let world = TestInstallation::new().await;
    let service = serve(&world).await;
    let admin = world.owner(&service);
    let (user, whole) =
        (stored(&admin, EtcdProtocol::V3, &[]).await, stored(&admin, EtcdProtocol::V3, &[]).await);
    let mut callers = vec![V3Caller {
        auth_token: None,
        password: String::new(),
        ..V3Caller::with_password("none", &user, &user)
    }];
    let refused = refused_tokens(&world, &admin, EtcdProtocol::V3).await;
    callers.extend(refused.iter().map(|(name, token)| V3Caller::with_password(name, token, token)));
    callers.push(V3Caller::with_password("other", &user, &whole));
    callers.push(V3Caller::with_password("user", &user, &user));
    callers.push(V3Caller {
        cluster_token: text_of(&whole),
        auth_token: None,
        ..V3Caller::with_password("whole", &whole, &whole)
    });

    let channel = connect(&world, &service).await;
    let mut rows = Vec::new();
    for path in methods() {
        let mut cells = Vec::new();
        for caller in &callers {
            let is_served = is_served_by_v3(&channel, caller, &path).await;
            cells.push(if is_served { "yes" } else { "-" });
        }
        rows.push(RightsRow { method: "call".into(), path, cells });
    }
    drop(channel);
    let names: Vec<&str> = callers.iter().map(|caller| caller.name).collect();
    insta::assert_snapshot!(format_rights(&names, rows));
    service.stop().await;
}
