//! etcd's discovery protocol v3: etcd's own v3 API over gRPC, as `etcd --discovery-endpoints=…
//! --discovery-token=…` uses it.
//!
//! etcd's client needs four calls: Range of the size and of the members, Put of its own member, and
//! Watch of the members. With `--discovery-user` it authenticates first. Every other call is
//! answered with UNIMPLEMENTED.
//!
//! The discovery token is an etcd token. etcd writes the discovery token into each line of its log,
//! so the discovery token may also be the etcd token's id alone. The whole etcd token is then the
//! password of the user with this id.
//!
//! A watch can't make etcd read the list again or give up: after an error other than UNAVAILABLE,
//! etcd's client watches again at once, for ever. So if a member stops waiting before the list is
//! complete, clients whose list contains this member get entries that aren't valid members. The
//! entries contain the reason as text. A client whose token has ended gets such entries, too. etcd
//! then exits with an error, and its supervisor restarts it.

pub(crate) mod listener;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use discovery_types::SIZES;
use discovery_types::etcd_token::{ETCD_TOKEN_PREFIX, EtcdProtocol, EtcdToken};
use node_proto::etcdserverpb::auth_server::Auth;
use node_proto::etcdserverpb::kv_server::Kv;
use node_proto::etcdserverpb::watch_request::RequestUnion;
use node_proto::etcdserverpb::watch_server::Watch;
use node_proto::etcdserverpb::{
    AuthenticateRequest, AuthenticateResponse, PutRequest, PutResponse, RangeRequest,
    RangeResponse, ResponseHeader, WatchRequest, WatchResponse,
};
use node_proto::mvccpb::{Event, KeyValue, event::EventType};
use tokio::sync::mpsc;
use tonic::codegen::BoxStream;
use tonic::{Code, Request, Response, Status, Streaming};

use super::registry::{EtcdRegistry, RegisteredMember, Registrant, RegistrationRefusal};
use super::{EtcdError, format_id, parse_id};
use crate::app::App;
use crate::store::etcd_tokens::StoredEtcdToken;
use crate::throttle_log::ThrottleKind;
use listener::EtcdClientAddress;

/// Beginning of all keys.
const REGISTRY: &str = "/_etcd/registry/";
/// Key of the cluster's size, below the cluster's key.
const SIZE_KEY: &str = "_config/size";
/// Key of the members, below the cluster's key.
const MEMBERS_KEY: &str = "members";
/// Revision that a client sees for the key [`SIZE_KEY`].
const CONFIG_REVISION: i64 = 1;
/// Header in which a client sends the token that Authenticate returned.
const AUTH_HEADER: &str = "token";
/// Reason in entries that make etcd exit: its list has a member that lost its place. etcd parses an
/// entry as NAME=URL, so the text must contain a `=`.
const STALE_REASON: &str = "a-member-stopped-waiting=start-this-etcd-again";
/// Reason in entries that make etcd exit: its token can't be used any more.
const ENDED_REASON: &str = "the-discovery-token-ended=make-a-new-one";
/// How long a stream may stay without the request that begins the watch.
const WATCH_REQUEST_LIMIT: Duration = Duration::from_secs(10);
/// Maximum number of answers of one watch that wait for the client.
const WATCH_QUEUE: usize = 16;

/// etcd's services, as far as discovery needs them.
#[derive(Clone)]
pub(crate) struct DiscoveryApi {
    app: Arc<App>,
}

impl DiscoveryApi {
    pub(crate) fn new(app: App) -> Self {
        Self { app: Arc::new(app) }
    }

    /// Returns the client's address, if it isn't over its rate limit.
    fn admit<T>(&self, request: &Request<T>) -> Result<IpAddr, Status> {
        let address = request.extensions().get::<EtcdClientAddress>();
        let address = address.ok_or_else(|| Status::internal("the connection has no address"))?;
        let address = address.0.ip().to_canonical();
        self.app.request_limit.check(address).map_err(|_| {
            self.app.throttle_log.note(ThrottleKind::Request, address);
            Status::unavailable("too many requests from this address: wait")
        })?;
        Ok(address)
    }

    async fn read(&self, target: &Target, address: IpAddr) -> Result<StoredEtcdToken, EtcdError> {
        self.app.read_etcd_registry(&target.token, EtcdProtocol::V3, address).await
    }
}

impl From<EtcdError> for Status {
    fn from(error: EtcdError) -> Self {
        let code = match &error {
            EtcdError::UnknownToken => Code::NotFound,
            EtcdError::ForeignAddress(_) => Code::PermissionDenied,
            EtcdError::Refused(_) => Code::FailedPrecondition,
            EtcdError::Unavailable | EtcdError::Overloaded => Code::Unavailable,
        };
        Status::new(code, error.to_string())
    }
}

/// The token and the key of a request.
struct Target {
    token: EtcdToken,
    /// The discovery token that the client was given: the whole etcd token, or its id.
    cluster_token: String,
    /// Rest of the key, below the cluster's key.
    key: String,
}

impl Target {
    /// Parses a key. Returns `None` if no token belongs to it.
    fn parse<T>(key: &[u8], request: &Request<T>) -> Option<Self> {
        let rest = std::str::from_utf8(key).ok()?.strip_prefix(REGISTRY)?;
        let (cluster_token, key) = rest.split_once('/')?;
        let token = match cluster_token.starts_with(ETCD_TOKEN_PREFIX) {
            true => cluster_token.parse().ok()?,
            false => {
                let shown = request.metadata().get(AUTH_HEADER)?.to_str().ok()?;
                let token: EtcdToken = shown.parse().ok()?;
                (token.id().to_string() == cluster_token).then_some(token)?
            }
        };
        Some(Target { token, cluster_token: cluster_token.into(), key: key.into() })
    }

    fn key(&self, rest: &str) -> Vec<u8> {
        format!("{REGISTRY}{}/{rest}", self.cluster_token).into_bytes()
    }

    fn member(&self, member: &RegisteredMember) -> KeyValue {
        let revision = member.created_index as i64;
        self.key_value(&format!("{MEMBERS_KEY}/{}", format_id(member.id)), &member.value, revision)
    }

    fn key_value(&self, key: &str, value: &str, revision: i64) -> KeyValue {
        KeyValue {
            key: self.key(key).into(),
            value: value.as_bytes().to_vec().into(),
            create_revision: revision,
            mod_revision: revision,
            version: 1,
            lease: 0,
        }
    }

    /// Returns entries that etcd takes for members, but can't use. They have the lowest revision,
    /// so they come before all members in every client's list.
    fn invalid_members(&self, reason: &str) -> Vec<KeyValue> {
        (0..*SIZES.end())
            .map(|n| self.key_value(&format!("{MEMBERS_KEY}/no-member-{n}"), reason, 0))
            .collect()
    }
}

fn header(registry: &EtcdRegistry) -> Option<ResponseHeader> {
    let revision = registry.last_index as i64;
    Some(ResponseHeader { cluster_id: 1, member_id: 1, revision, raft_term: 1 })
}

/// Returns the end of the range of keys that begin with `prefix`, as etcd's clients compute it.
fn end_of_prefix(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

#[tonic::async_trait]
impl Kv for DiscoveryApi {
    async fn range(
        &self,
        request: Request<RangeRequest>,
    ) -> Result<Response<RangeResponse>, Status> {
        let address = self.admit(&request)?;
        let key = request.get_ref().key.clone();
        let Some(target) = Target::parse(&key, &request) else {
            return Ok(Response::new(RangeResponse::default()));
        };
        let stored = match self.read(&target, address).await {
            Ok(stored) => stored,
            // With this answer etcd exits at once with "size key not found". After an error it
            // would retry for ever.
            Err(EtcdError::UnknownToken) => return Ok(Response::new(RangeResponse::default())),
            Err(error) => return Err(error.into()),
        };
        let registry = &stored.registry;
        let is_members = request.get_ref().range_end == end_of_prefix(&key);
        let kvs = match &*target.key {
            SIZE_KEY => {
                vec![target.key_value(SIZE_KEY, &registry.size.to_string(), CONFIG_REVISION)]
            }
            MEMBERS_KEY if is_members => {
                registry.listed().into_iter().map(|member| target.member(member)).collect()
            }
            _ => Vec::new(),
        };
        let count = kvs.len() as i64;
        Ok(Response::new(RangeResponse { header: header(registry), kvs, more: false, count }))
    }

    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutResponse>, Status> {
        let address = self.admit(&request)?;
        let target = Target::parse(&request.get_ref().key, &request);
        let target = target.ok_or(EtcdError::UnknownToken)?;
        let id = target.key.strip_prefix(MEMBERS_KEY).and_then(|rest| rest.strip_prefix('/'));
        let id = id.and_then(parse_id).ok_or_else(|| {
            Status::failed_precondition("only members are created here; the size is the token's")
        })?;
        let value = std::str::from_utf8(&request.get_ref().value);
        let value = value.map_err(|_| Status::invalid_argument("the value is no text"))?.to_owned();
        let cluster_token = target.cluster_token.clone();
        let registrant = Registrant { id, value, cluster_token, address };
        let registered =
            self.app.register_etcd_member(&target.token, EtcdProtocol::V3, &registrant).await;
        let stored = match registered {
            Ok((stored, _)) => stored,
            // Answer with success: etcd then reads the list, doesn't find itself, and exits with
            // "cluster is full". After an error it would retry for ever.
            Err(EtcdError::Refused(RegistrationRefusal::Full(_))) => {
                self.read(&target, address).await?
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Response::new(PutResponse { header: header(&stored.registry), prev_kv: None }))
    }
}

#[tonic::async_trait]
impl Auth for DiscoveryApi {
    /// Checks the user name, which is a token's id, and the password, which is the whole token.
    async fn authenticate(
        &self,
        request: Request<AuthenticateRequest>,
    ) -> Result<Response<AuthenticateResponse>, Status> {
        let address = self.admit(&request)?;
        let AuthenticateRequest { name, password, .. } = request.into_inner();
        // etcd logs this text as it is, because it isn't one of etcd's own error texts.
        let failed = || Status::invalid_argument(EtcdError::UnknownToken.to_string());
        let token: EtcdToken = password.parse().map_err(|_| failed())?;
        if token.id().to_string() != name {
            return Err(failed());
        }
        match self.app.read_etcd_registry(&token, EtcdProtocol::V3, address).await {
            Ok(stored) => Ok(Response::new(AuthenticateResponse {
                header: header(&stored.registry),
                token: password,
            })),
            Err(EtcdError::UnknownToken) => Err(failed()),
            Err(error) => Err(error.into()),
        }
    }
}

#[tonic::async_trait]
impl Watch for DiscoveryApi {
    async fn watch(
        &self,
        request: Request<Streaming<WatchRequest>>,
    ) -> Result<Response<BoxStream<WatchResponse>>, Status> {
        let address = self.admit(&request)?;
        let (metadata, extensions, mut requests) = request.into_parts();
        let (sender, mut answers) = mpsc::channel(WATCH_QUEUE);
        let api = self.clone();
        tokio::spawn(async move {
            let first = tokio::time::timeout(WATCH_REQUEST_LIMIT, requests.message()).await;
            let Ok(Ok(Some(WatchRequest {
                request_union: Some(RequestUnion::CreateRequest(create)),
            }))) = first
            else {
                return;
            };
            let request = Request::from_parts(metadata, extensions, ());
            let target = Target::parse(&create.key, &request)
                .filter(|target| target.key == MEMBERS_KEY)
                .filter(|_| create.range_end == end_of_prefix(&create.key));
            let watched = async {
                let target = target.ok_or_else(|| Status::from(EtcdError::UnknownToken))?;
                let from = u64::try_from(create.start_revision).unwrap_or(0);
                match api.watch_members(&target, address, from, &sender).await {
                    Err(EtcdError::UnknownToken) => {
                        send_invalid_members(&target, ENDED_REASON, None, &sender).await;
                        Ok(())
                    }
                    Err(error) => Err(error.into()),
                    Ok(()) => Ok(()),
                }
            };
            let ended = tokio::select! {
                watched = watched => watched,
                // Any further message of the client ends the watch: the client cancels it, or
                // closes the stream.
                _ = requests.message() => return,
            };
            if let Err(status) = ended {
                let _ = sender.send(Err(status)).await;
            }
        });
        let stream = futures_util::stream::poll_fn(move |context| answers.poll_recv(context));
        Ok(Response::new(Box::pin(stream)))
    }
}

impl DiscoveryApi {
    /// Sends the members with an index of at least `from`, as they register. Renews the leases of
    /// the members that registered from the client's address. Ends when the client has closed the
    /// stream, or the process drains.
    async fn watch_members(
        &self,
        target: &Target,
        address: IpAddr,
        from: u64,
        sender: &mpsc::Sender<Result<WatchResponse, Status>>,
    ) -> Result<(), EtcdError> {
        let app = &self.app;
        let mut stored = self.read(target, address).await?;
        let _slot = app.take_etcd_wait_slot(stored.uuid, address)?;
        let mut changes = app.notifier.subscribe(stored.uuid);
        stored = app.renew_etcd_leases(target.token.id(), address).await?;
        let created =
            WatchResponse { header: header(&stored.registry), created: true, ..Default::default() };
        if sender.send(Ok(created)).await.is_err() {
            return Ok(());
        }
        let (mut next, mut renewal) = (from, tokio::time::interval(app.etcd_wait_time()));
        renewal.tick().await;
        loop {
            let registry = &stored.registry;
            if registry.is_stale(from) {
                send_invalid_members(target, STALE_REASON, header(registry), sender).await;
                return Ok(());
            }
            let listed = registry.listed_from(next);
            if !listed.is_empty() {
                let kvs = listed.into_iter().map(|member| target.member(member));
                if sender.send(Ok(events(kvs, header(registry)))).await.is_err() {
                    return Ok(());
                }
                next = registry.last_index + 1;
            }
            tokio::select! {
                () = changes.changed() => stored = self.read(target, address).await?,
                _ = renewal.tick() => {
                    stored = app.renew_etcd_leases(target.token.id(), address).await?;
                }
                () = sender.closed() => return Ok(()),
                // After this error, the client retries at another process, or at this process's
                // successor.
                () = app.draining.cancelled() => return Err(EtcdError::Unavailable),
            }
        }
    }
}

/// Makes the response of a watch, which reports each of `kvs` as put.
fn events(kvs: impl Iterator<Item = KeyValue>, header: Option<ResponseHeader>) -> WatchResponse {
    let event = |kv| Event { r#type: EventType::Put as i32, kv: Some(kv), prev_kv: None };
    WatchResponse { header, events: kvs.map(event).collect(), ..Default::default() }
}

/// Sends entries that make etcd exit, and nothing after them: a later member would complete a list
/// that has ended.
async fn send_invalid_members(
    target: &Target,
    reason: &str,
    header: Option<ResponseHeader>,
    sender: &mpsc::Sender<Result<WatchResponse, Status>>,
) {
    let entries = target.invalid_members(reason).into_iter();
    if sender.send(Ok(events(entries, header))).await.is_ok() {
        sender.closed().await;
    }
}
