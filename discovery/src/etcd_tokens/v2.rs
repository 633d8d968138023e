//! etcd's discovery protocol v2: keys over HTTP, as `etcd --discovery=https://…/v2/TOKEN` uses
//! them.
//!
//! etcd takes the whole path of its discovery URL for the cluster's directory. The directory
//! contains the key `_config/size`, and one key for each member, which the member creates.
//!
//! Three rules of etcd's client matter here:
//!
//! * It tries a GET again after a status of 500 and above, and gives up after any other error. A
//!   PUT is never tried again.
//! * It needs the header `X-Etcd-Index`, which says from which index on it has to wait for changes.
//! * An empty body with status 200 ends a wait, and the client waits again from the same index.

use std::net::IpAddr;
use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::http::header;
use actix_web::web::{Data, Path, Query};
use actix_web::{HttpRequest, HttpResponse};
use discovery_types::digest::MemberId;
use discovery_types::etcd_token::{EtcdPeers, EtcdProtocol, EtcdToken};
use discovery_types::text::printable;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::registry::{
    EtcdRegistry, RegisteredMember, Registrant, Registration, RegistrationRefusal,
};
use super::{EtcdError, format_id, parse_id};
use crate::app::App;
use crate::auth::peer;
use crate::error::ApiError;
use crate::handlers::body::FormBody;
use crate::limits::AddressLimit;
use crate::store::etcd_tokens::StoredEtcdToken;

/// Beginning of the paths of this protocol.
pub(crate) const V2_PREFIX: &str = "/v2/";
/// Header with the index of the last change.
const INDEX_HEADER: &str = "X-Etcd-Index";
/// Beginning of the keys in answers. etcd reads only their last part.
const KEY_PREFIX: &str = "/_etcd/registry";
/// Index of the key `_config/size` and of the cluster's directory.
const CONFIG_INDEX: u64 = 1;
/// Time for which a registration is retried while the database doesn't answer. etcd waits 5 s, and
/// doesn't register twice.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(4);
/// Maximum time for which a registration waits while its address is over the rate limit.
const TURN_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between two attempts to register a member.
const REGISTRATION_PAUSE: Duration = Duration::from_millis(200);

/// Query of a GET. etcd sends more parameters, which change nothing here.
#[derive(Debug, Deserialize)]
pub(crate) struct KeyQuery {
    /// Whether to wait for a change.
    #[serde(default)]
    wait: bool,
    /// Index of the first change to wait for.
    #[serde(default, rename = "waitIndex")]
    wait_index: u64,
}

/// Body of a PUT.
#[derive(Debug, Deserialize)]
pub(crate) struct ValueForm {
    /// Name and peer URLs of the member.
    value: String,
}

/// An error in the form that etcd's client reads.
#[derive(Debug, Serialize)]
struct KeyError {
    #[serde(skip)]
    status: StatusCode,
    #[serde(rename = "errorCode")]
    code: u32,
    message: &'static str,
    cause: String,
    index: u64,
}

impl KeyError {
    fn new(status: StatusCode, code: u32, message: &'static str, cause: impl ToString) -> Self {
        // The cause may quote the request, so it is made printable.
        let cause = printable(&cause.to_string()).into_owned();
        Self { status, code, message, cause, index: CONFIG_INDEX }
    }

    fn not_found(cause: impl ToString) -> Self {
        Self::new(StatusCode::NOT_FOUND, 100, "Key not found", cause)
    }

    fn unreadable(cause: impl ToString) -> Self {
        Self::new(StatusCode::BAD_REQUEST, 209, "Invalid field", cause)
    }

    fn unavailable(cause: impl ToString) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, 300, "Raft Internal Error", cause)
    }

    fn response(&self) -> HttpResponse {
        HttpResponse::build(self.status).insert_header((INDEX_HEADER, self.index)).json(self)
    }
}

impl From<EtcdError> for KeyError {
    fn from(error: EtcdError) -> Self {
        match &error {
            EtcdError::UnknownToken => KeyError::not_found(error),
            EtcdError::ForeignAddress(_) => KeyError::new(
                StatusCode::FORBIDDEN,
                110,
                "The request requires user authentication",
                error,
            ),
            EtcdError::Refused(RegistrationRefusal::Duplicate(_)) => {
                KeyError::new(StatusCode::PRECONDITION_FAILED, 105, "Key already exists", error)
            }
            EtcdError::Refused(RegistrationRefusal::Unreadable(_)) => KeyError::unreadable(error),
            EtcdError::Refused(_) => {
                KeyError::new(StatusCode::FORBIDDEN, 107, "Registration refused", error)
            }
            EtcdError::Unavailable | EtcdError::Overloaded => KeyError::unavailable(error),
        }
    }
}

/// Waits until the address of a registration may send a request, for at most [`TURN_TIMEOUT`]. etcd
/// doesn't register twice, and ends after an error. The error is the time that the address still
/// has to wait.
pub(crate) async fn wait_for_turn(limit: &AddressLimit, address: IpAddr) -> Result<(), Duration> {
    let started = std::time::Instant::now();
    loop {
        match limit.check(address) {
            Err(wait) if started.elapsed() + wait < TURN_TIMEOUT => tokio::time::sleep(wait).await,
            result => return result,
        }
    }
}

/// Answers a request over the address's rate limit. etcd tries a GET again only after a status of
/// 500 and above.
pub(crate) fn overloaded() -> HttpResponse {
    KeyError::unavailable("too many requests from this address: wait").response()
}

/// Refuses a request with another method than GET, HEAD and PUT.
pub(crate) async fn method_not_allowed() -> HttpResponse {
    let cause =
        "members are changed by the cluster itself: etcdctl member, at one of its client URLs";
    let error = KeyError::new(StatusCode::METHOD_NOT_ALLOWED, 107, "Method not allowed", cause);
    let mut response = error.response();
    let allow = header::HeaderValue::from_static("GET, HEAD, PUT");
    response.headers_mut().insert(header::ALLOW, allow);
    response
}

/// Answers a GET of the directory, of the size, or of one member, and waits for changes.
pub(crate) async fn get(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Vec<String>>,
    query: Result<Query<KeyQuery>, actix_web::Error>,
) -> HttpResponse {
    let read = async {
        let query = query.map_err(|_| KeyError::unreadable("the query can't be read"))?;
        let address = address_of(&request)?;
        let (token, key) = parse_path(&path)?;
        let stored = app.read_etcd_registry(&token, EtcdProtocol::V2, address).await?;
        match (key, query.wait) {
            (Key::Size, _) => Ok(size(&stored)),
            (Key::Directory, false) => Ok(directory(&stored)),
            (Key::Directory, true) => wait(&app, &token, address, query.wait_index).await,
            (Key::Member(id), _) => member(&stored, id),
        }
    };
    read.await.unwrap_or_else(|error: KeyError| error.response())
}

/// Answers a PUT: a member registers.
pub(crate) async fn put(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Vec<String>>,
    body: Result<FormBody<ValueForm>, ApiError>,
) -> HttpResponse {
    let register = async {
        let FormBody(form) = body.map_err(|error| KeyError::unreadable(&error.problem().detail))?;
        let address = address_of(&request)?;
        let (token, key) = parse_path(&path)?;
        let Key::Member(id) = key else {
            let cause = "the size stands in the token, and only members are created here";
            return Err(KeyError::new(StatusCode::FORBIDDEN, 107, "Root is read only", cause));
        };
        let cluster_token = discovery_url(&request, &path, id, &form.value)?;
        let registrant = Registrant { id, value: form.value, cluster_token, address };
        let (stored, registered) = register_with_retries(&app, &token, &registrant).await?;
        let (Registration::Added { created_index } | Registration::Known { created_index }) =
            registered;
        let node = node(&stored, registrant.id, &registrant.value, created_index);
        Ok(answer(StatusCode::CREATED, "create", node, &stored.registry))
    };
    register.await.unwrap_or_else(|error: KeyError| error.response())
}

/// Registers a member. Retries for a while if the database doesn't answer, because etcd doesn't
/// retry a registration.
async fn register_with_retries(
    app: &App,
    token: &EtcdToken,
    registrant: &Registrant,
) -> Result<(StoredEtcdToken, Registration), EtcdError> {
    let started = std::time::Instant::now();
    loop {
        let result = app.register_etcd_member(token, EtcdProtocol::V2, registrant).await;
        let may_wait = started.elapsed() + REGISTRATION_PAUSE < REGISTRATION_TIMEOUT;
        match result {
            Err(EtcdError::Unavailable) if may_wait => {
                tokio::time::sleep(REGISTRATION_PAUSE).await;
            }
            result => return result,
        }
    }
}

/// Waits for a member with an index of at least `from`. Without such a member, ends after a while
/// with an empty body.
async fn wait(
    app: &App,
    token: &EtcdToken,
    address: IpAddr,
    from: u64,
) -> Result<HttpResponse, KeyError> {
    let mut stored = app.renew_etcd_leases(token.id(), address).await?;
    let _slot = app.take_etcd_wait_slot(stored.uuid, address)?;
    let mut changes = app.notifier.subscribe(stored.uuid);
    let end = tokio::time::Instant::now() + app.etcd_wait_time();
    loop {
        if stored.registry.is_stale(from) {
            let cause = "a member stopped waiting before the list was complete: read the list anew";
            return Err(KeyError::unavailable(cause));
        }
        if let Some(member) = stored.registry.listed_from(from).first() {
            let node = node(&stored, member.id, &member.value, member.created_index);
            return Ok(answer(StatusCode::OK, "create", node, &stored.registry));
        }
        tokio::select! {
            () = changes.changed() => {}
            () = tokio::time::sleep_until(end) => return Ok(no_event(&stored.registry)),
            () = app.draining.cancelled() => return Ok(no_event(&stored.registry)),
        }
        stored = app.read_etcd_registry(token, EtcdProtocol::V2, address).await?;
    }
}

fn no_event(registry: &EtcdRegistry) -> HttpResponse {
    HttpResponse::Ok().insert_header((INDEX_HEADER, registry.last_index)).finish()
}

fn size(stored: &StoredEtcdToken) -> HttpResponse {
    let node = json!({
        "key": format!("{KEY_PREFIX}/{}/_config/size", stored.id),
        "value": stored.registry.size.to_string(),
        "modifiedIndex": CONFIG_INDEX,
        "createdIndex": CONFIG_INDEX,
    });
    answer(StatusCode::OK, "get", node, &stored.registry)
}

fn directory(stored: &StoredEtcdToken) -> HttpResponse {
    let listed = stored.registry.listed();
    let one =
        |member: &&RegisteredMember| node(stored, member.id, &member.value, member.created_index);
    let mut directory = json!({
        "key": format!("{KEY_PREFIX}/{}", stored.id),
        "dir": true,
        "modifiedIndex": CONFIG_INDEX,
        "createdIndex": CONFIG_INDEX,
    });
    if !listed.is_empty() {
        directory["nodes"] = listed.iter().map(one).collect();
    }
    answer(StatusCode::OK, "get", directory, &stored.registry)
}

fn member(stored: &StoredEtcdToken, id: MemberId) -> Result<HttpResponse, KeyError> {
    let listed = stored.registry.listed();
    let member = listed.iter().find(|member| member.id == id);
    let member =
        member.ok_or_else(|| KeyError::not_found("no member with this id has registered"))?;
    let node = node(stored, member.id, &member.value, member.created_index);
    Ok(answer(StatusCode::OK, "create", node, &stored.registry))
}

fn node(stored: &StoredEtcdToken, id: MemberId, value: &str, index: u64) -> serde_json::Value {
    json!({
        "key": format!("{KEY_PREFIX}/{}/{}", stored.id, format_id(id)),
        "value": value,
        "modifiedIndex": index,
        "createdIndex": index,
    })
}

fn answer(
    status: StatusCode,
    action: &str,
    node: serde_json::Value,
    registry: &EtcdRegistry,
) -> HttpResponse {
    HttpResponse::build(status)
        .insert_header((INDEX_HEADER, registry.last_index))
        .json(json!({ "action": action, "node": node }))
}

/// Key of a request, below the directory of a token.
enum Key {
    Directory,
    Size,
    Member(MemberId),
}

/// Parses the parts of a path: the token, and the key below its directory.
fn parse_path(parts: &[String]) -> Result<(EtcdToken, Key), KeyError> {
    let unknown = || KeyError::from(EtcdError::UnknownToken);
    let (token, key) = match parts {
        [token] => (token, ""),
        [token, key] => (token, key.trim_end_matches('/')),
        _ => return Err(unknown()),
    };
    let token = token.parse().map_err(|_| unknown())?;
    let key = match key {
        "" => Key::Directory,
        "_config/size" => Key::Size,
        id => {
            let unknown = || KeyError::not_found("there is no such key");
            Key::Member(parse_id(id).ok_or_else(unknown)?)
        }
    };
    Ok((token, key))
}

/// Returns the discovery URL from which the member computed its id. The request doesn't show
/// whether that URL ended with a slash. So the ids that follow from both spellings are compared
/// with the member's id.
fn discovery_url(
    request: &HttpRequest,
    path: &[String],
    id: MemberId,
    value: &str,
) -> Result<String, KeyError> {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let host = host.ok_or_else(|| KeyError::unreadable("the request has no Host header"))?;
    let token = path.first().map(String::as_str).unwrap_or_default();
    let url = format!("https://{host}{V2_PREFIX}{token}");
    let peers: EtcdPeers =
        value.parse().map_err(RegistrationRefusal::from).map_err(EtcdError::from)?;
    let with_slash = format!("{url}/");
    Ok(if peers.member_id(&with_slash) == id { with_slash } else { url })
}

fn address_of(request: &HttpRequest) -> Result<IpAddr, KeyError> {
    let peer = peer(request).map_err(|error| KeyError::unavailable(&error.problem().detail))?;
    Ok(peer.address.ip().to_canonical())
}
