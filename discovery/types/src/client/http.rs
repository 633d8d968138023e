//! Sends one request: tries the URLs in turn, with time limits and authentication.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use reqwest::Method;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Mutex, watch};

use super::contact::ServiceContact;
use super::date::http_date_seconds;
use super::error::{ClientError, pin_mismatch};
use super::pinned::client_tls_config;
use crate::access::{Assertion, JWT_BEARER, MAX_ACCESS_SECONDS};
use crate::api::{ContextResponse, MAX_RESPONSE, PREFER, RETURN_MINIMAL, TokenResponse};
use crate::digest::Digest;
use crate::features::{AGENT_BUILD, AgentBuild};
use crate::jws::Jws;
use crate::key::SigningKey;
use crate::problem::{Code, Problem};
use crate::url::ServiceUrl;

/// HTTP status code 204 No Content.
const NO_CONTENT: u16 = 204;
/// How long an idle connection is kept for the next request. The service closes an idle connection
/// after five seconds. A request that is sent at that moment fails, although the service may have
/// carried it out.
const IDLE_LIMIT: Duration = Duration::from_secs(3);
/// Time limit for establishing a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Time limit of a request that doesn't wait at the service.
pub(super) const REQUEST_LIMIT: Duration = Duration::from_secs(20);
/// How long before its end an access token is renewed.
const RENEW_BEFORE: Duration = Duration::from_secs(60);

/// Configuration of a client: the service to call, and the key to authenticate with.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// URLs of the service. The client tries them in turn, beginning with the last one that
    /// answered.
    pub urls: Vec<ServiceUrl>,
    /// SHA-256 of the service's TLS key (SPKI).
    pub pins: Vec<Digest>,
    /// Key of the admin or agent. A client without a key can use only public routes.
    pub key: Option<Arc<SigningKey>>,
}

/// A client of one discovery service. Cheap to share behind an [`Arc`].
#[derive(Debug)]
pub struct DiscoveryClient {
    /// URLs, pins and access token for new requests. [`DiscoveryClient::set_service`] replaces
    /// them.
    endpoint: watch::Sender<Arc<ServiceEndpoint>>,
    /// Difference between the service's clock and ours in milliseconds, according to the latest
    /// answers.
    offset_ms: AtomicI64,
    contact: watch::Sender<ServiceContact>,
    /// Number of times that [`DiscoveryClient::set_service`] was called.
    moves: watch::Sender<u64>,
}

/// URLs, pins and access token of the service, until another endpoint replaces them.
#[derive(Debug)]
struct ServiceEndpoint {
    config: ClientConfig,
    http: reqwest::Client,
    preferred: AtomicUsize,
    /// Whether the last request broke after it was sent.
    interrupted: AtomicBool,
    token_cache: Mutex<TokenCache>,
}

/// Cached access token. The lock is held while a token is fetched, so concurrent requests fetch
/// only one.
#[derive(Debug, Default)]
struct TokenCache {
    issuer: Option<String>,
    token: Option<(Jws, Instant)>,
}

/// One request to the service, before a URL is chosen.
pub(super) struct Request<'b> {
    pub method: Method,
    pub path: String,
    pub body: RequestBody<'b>,
    pub authenticated: bool,
    pub limit: Duration,
}

pub(super) enum RequestBody<'b> {
    None,
    Json(&'b [u8]),
    /// JSON body. The answer may come without a body if there is nothing new (`RETURN_MINIMAL`).
    JsonPreferringMinimal(&'b [u8]),
    /// JSON, with the build of the agent in a header.
    JsonFromAgent(&'b [u8], &'b AgentBuild),
    Form(&'b [u8]),
}

struct Answer {
    status: u16,
    json: bool,
    problem: bool,
    body: Vec<u8>,
}

impl DiscoveryClient {
    /// Builds a client, without connecting to the service.
    pub fn new(config: ClientConfig) -> Result<Self, ClientError> {
        Ok(Self {
            endpoint: watch::Sender::new(Arc::new(ServiceEndpoint::new(config)?)),
            offset_ms: AtomicI64::new(0),
            contact: watch::Sender::default(),
            moves: watch::Sender::new(0),
        })
    }

    /// Calls the service at other URLs and with other pins from now on. Requests in flight keep the
    /// old URLs and pins.
    pub fn set_service(&self, urls: Vec<ServiceUrl>, pins: Vec<Digest>) -> Result<(), ClientError> {
        let key = self.endpoint().config.key.clone();
        let next = ServiceEndpoint::new(ClientConfig { urls, pins, key })?;
        self.endpoint.send_replace(Arc::new(next));
        self.moves.send_modify(|moves| *moves += 1);
        Ok(())
    }

    /// Subscribes to the number of calls of [`DiscoveryClient::set_service`].
    pub fn moves(&self) -> watch::Receiver<u64> {
        self.moves.subscribe()
    }

    /// Subscribes to whether the last request reached the service.
    pub fn contact(&self) -> watch::Receiver<ServiceContact> {
        self.contact.subscribe()
    }

    fn endpoint(&self) -> Arc<ServiceEndpoint> {
        Arc::clone(&self.endpoint.borrow())
    }

    /// Notes the result of a request, unless [`DiscoveryClient::set_service`] has replaced the
    /// endpoint since. A single broken connection is no outage: a proxy may end long polls early.
    fn note_contact<T>(&self, endpoint: &Arc<ServiceEndpoint>, result: &Result<T, ClientError>) {
        let error = match result {
            Ok(_) | Err(ClientError::Problem(_)) => {
                endpoint.interrupted.store(false, Ordering::Relaxed);
                None
            }
            Err(ClientError::Interrupted { .. })
                if !endpoint.interrupted.swap(true, Ordering::Relaxed) =>
            {
                return;
            }
            // A request with one of these errors was never sent, so it says nothing about the
            // contact.
            Err(ClientError::NoKey | ClientError::Setup(_)) => return,
            Err(error) => Some(error.with_causes()),
        };
        if Arc::ptr_eq(endpoint, &self.endpoint()) {
            self.contact.send_if_modified(|contact| contact.note(error, SystemTime::now()));
        }
    }
}

impl ServiceEndpoint {
    fn new(config: ClientConfig) -> Result<Self, ClientError> {
        let tls = client_tls_config(&config.pins, config.key.as_deref());
        let http = reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .https_only(true)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_LIMIT)
            .pool_idle_timeout(IDLE_LIMIT)
            .user_agent(concat!("muster/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| ClientError::Setup(error.into()))?;
        Ok(Self {
            config,
            http,
            preferred: AtomicUsize::new(0),
            interrupted: AtomicBool::new(false),
            token_cache: Mutex::default(),
        })
    }
}

impl DiscoveryClient {
    /// Returns the service's time in milliseconds since 1970: the local clock, corrected by the
    /// service's answers. An answer has the time in its body, or else in its `Date` header. Before
    /// the first answer this is the local clock's time.
    pub fn service_now_ms(&self) -> i64 {
        local_now_ms().saturating_add(self.offset_ms.load(Ordering::Relaxed))
    }

    /// Returns how far the service's clock is ahead of ours, in milliseconds. The value comes from
    /// the answers received so far; it is 0 before the first one.
    pub fn clock_offset_ms(&self) -> i64 {
        self.offset_ms.load(Ordering::Relaxed)
    }

    /// Fetches the public facts about the service.
    pub async fn context(&self) -> Result<ContextResponse, ClientError> {
        self.get_public("/v1/context").await
    }

    /// Caches an access token that came in the answer to another request, such as a redeem.
    pub async fn remember_token(&self, issuer: &str, token: &TokenResponse) {
        let endpoint = self.endpoint();
        let mut access = endpoint.token_cache.lock().await;
        access.issuer = Some(issuer.to_owned());
        access.token = Some(token_with_renewal(token));
    }

    pub(super) async fn get_public<T: DeserializeOwned>(
        &self,
        path: &str,
    ) -> Result<T, ClientError> {
        self.send_request(Request {
            method: Method::GET,
            path: path.to_owned(),
            body: RequestBody::None,
            authenticated: false,
            limit: REQUEST_LIMIT,
        })
        .await
    }

    pub(super) async fn get<T: DeserializeOwned>(&self, path: String) -> Result<T, ClientError> {
        self.get_within(path, REQUEST_LIMIT).await
    }

    pub(super) async fn get_within<T: DeserializeOwned>(
        &self,
        path: String,
        limit: Duration,
    ) -> Result<T, ClientError> {
        let (method, body) = (Method::GET, RequestBody::None);
        self.send_request(Request { method, path, body, authenticated: true, limit }).await
    }

    pub(super) async fn send<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: String,
        body: &B,
    ) -> Result<T, ClientError> {
        self.send_within(method, path, body, REQUEST_LIMIT).await
    }

    pub(super) async fn send_within<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: String,
        body: &B,
        limit: Duration,
    ) -> Result<T, ClientError> {
        let json = serde_json::to_vec(body).expect("bodies are plain structs");
        let body = RequestBody::Json(&json);
        self.send_request(Request { method, path, body, authenticated: true, limit }).await
    }

    /// Posts a body, and prefers an answer without a body if there is nothing new. Such an answer
    /// is `None`. A service that doesn't know the preference answers in full.
    pub(super) async fn send_for_changes<B: Serialize, T: DeserializeOwned>(
        &self,
        path: String,
        body: &B,
        limit: Duration,
    ) -> Result<Option<T>, ClientError> {
        let json = serde_json::to_vec(body).expect("bodies are plain structs");
        let (method, body) = (Method::POST, RequestBody::JsonPreferringMinimal(&json));
        let request = Request { method, path, body, authenticated: true, limit };
        self.exchange(&request, read_changes).await
    }

    /// Sends a request, and parses the answer as `T`.
    pub(super) async fn send_request<T: DeserializeOwned>(
        &self,
        request: Request<'_>,
    ) -> Result<T, ClientError> {
        self.exchange(&request, read_answer).await
    }

    /// Sends a request, and parses the answer with `read`, which also gets the URL that answered.
    ///
    /// If the service refuses the access token or the assertion, this fetches a new token and
    /// repeats the request once. The service's clock decides when a token ends, so a token can end
    /// earlier than expected. An assertion can be refused because the local clock was changed. The
    /// refusal also contains the service's time, so the next assertion has the right time.
    async fn exchange<T>(
        &self,
        request: &Request<'_>,
        read: fn(&str, &Answer) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let endpoint = self.endpoint();
        let first = self.exchange_once(&endpoint, request, read).await;
        let code = first.as_ref().err().and_then(ClientError::code);
        if request.authenticated
            && matches!(code, Some(Code::TokenInvalid | Code::AssertionRefused))
        {
            endpoint.token_cache.lock().await.token = None;
            return self.exchange_once(&endpoint, request, read).await;
        }
        first
    }

    async fn exchange_once<T>(
        &self,
        endpoint: &Arc<ServiceEndpoint>,
        request: &Request<'_>,
        read: fn(&str, &Answer) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let sent = async {
            let token = match request.authenticated {
                true => Some(self.access_token(endpoint).await?),
                false => None,
            };
            let (url, answer) = self.try_urls(endpoint, request, token.as_ref()).await?;
            read(&url, &answer)
        };
        let result = sent.await;
        self.note_contact(endpoint, &result);
        result
    }

    /// Tries the URLs in turn, beginning with the last one that answered. Tries the next URL only
    /// if the request can't have reached the service.
    async fn try_urls(
        &self,
        endpoint: &ServiceEndpoint,
        request: &Request<'_>,
        token: Option<&Jws>,
    ) -> Result<(String, Answer), ClientError> {
        let first = endpoint.preferred.load(Ordering::Relaxed);
        let count = endpoint.config.urls.len();
        let mut last = None;
        for i in 0..count {
            let index = (first + i) % count;
            let url = endpoint.config.urls[index].to_string();
            match self.try_url(&endpoint.http, &url, request, token).await {
                Ok(answer) => {
                    endpoint.preferred.store(index, Ordering::Relaxed);
                    return Ok((url, answer));
                }
                Err(error @ (ClientError::Unreachable { .. } | ClientError::Pin { .. })) => {
                    // An operator must see a pin mismatch, so a later error doesn't replace it.
                    if !matches!(last, Some(ClientError::Pin { .. })) {
                        last = Some(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap_or_else(|| ClientError::Setup("no URL of the service is known".into())))
    }

    async fn try_url(
        &self,
        http: &reqwest::Client,
        url: &str,
        request: &Request<'_>,
        token: Option<&Jws>,
    ) -> Result<Answer, ClientError> {
        let mut builder = http
            .request(request.method.clone(), format!("{url}{}", request.path))
            .timeout(request.limit);
        if let Some(token) = token {
            let mut value = reqwest::header::HeaderValue::from_str(&format!("Bearer {token}"))
                .expect("a compact JWS is ASCII");
            value.set_sensitive(true);
            builder = builder.header(AUTHORIZATION, value);
        }
        builder = match request.body {
            RequestBody::None => builder,
            RequestBody::Json(json) => {
                builder.header(CONTENT_TYPE, "application/json").body(json.to_vec())
            }
            RequestBody::JsonPreferringMinimal(json) => builder
                .header(CONTENT_TYPE, "application/json")
                .header(PREFER, RETURN_MINIMAL)
                .body(json.to_vec()),
            RequestBody::JsonFromAgent(json, build) => builder
                .header(CONTENT_TYPE, "application/json")
                .header(AGENT_BUILD, build.to_string())
                .body(json.to_vec()),
            RequestBody::Form(form) => builder
                .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
                .body(form.to_vec()),
        };
        let response = builder.send().await.map_err(|error| request_error(url, error))?;
        self.read_date(response.headers());
        let status = response.status().as_u16();
        let kind = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let kind = kind.unwrap_or_default().split(';').next().unwrap_or_default().trim();
        let (json, problem) = (kind == "application/json", kind == crate::problem::PROBLEM_JSON);
        let body = read_body(url, status, response).await?;
        Ok(Answer { status, json, problem, body })
    }

    /// Corrects the clock offset by the `Date` header of an answer. The service sets `Date` when it
    /// answers, and that can be long after a long poll was sent. So `Date` is compared with the
    /// local time at which the answer arrives.
    fn read_date(&self, headers: &HeaderMap) {
        /// Largest difference in milliseconds that two equal clocks can show here. It comes from
        /// whole seconds in `Date` and from the transmission time.
        const DATE_TOLERANCE_MS: u64 = 1_500;
        let date = headers.get(reqwest::header::DATE).and_then(|value| value.to_str().ok());
        let Some(date) = date.and_then(http_date_seconds) else { return };
        // `Date` has whole seconds, rounded down. So the true time is half a second later on
        // average.
        let offset = date * 1000 + 500 - local_now_ms();
        if offset.abs_diff(self.clock_offset_ms()) >= DATE_TOLERANCE_MS {
            self.offset_ms.store(offset, Ordering::Relaxed);
        }
    }

    /// Sets the clock offset by the time in the body of an answer that has just arrived. That time
    /// has millisecond precision.
    pub(super) fn note_now_ms(&self, now_ms: i64) {
        self.offset_ms.store(now_ms.saturating_sub(local_now_ms()), Ordering::Relaxed);
    }

    /// Returns a valid access token. Fetches one if the cached token is missing or about to end.
    async fn access_token(&self, endpoint: &ServiceEndpoint) -> Result<Jws, ClientError> {
        let key = endpoint.config.key.as_ref().ok_or(ClientError::NoKey)?;
        let mut access = endpoint.token_cache.lock().await;
        if let Some((token, until)) = &access.token
            && Instant::now() < *until
        {
            return Ok(token.clone());
        }
        let issuer = match &access.issuer {
            Some(issuer) => issuer.clone(),
            None => {
                let context = Box::pin(self.fetch_context(endpoint)).await?;
                access.issuer.insert(context.issuer).clone()
            }
        };
        let now = u64::try_from(self.service_now_ms() / 1000).unwrap_or_default();
        let assertion = Assertion::sign(key, &issuer, now);
        // Of all characters in these two values, only colons must be escaped in a form.
        let form = format!("grant_type={}&assertion={assertion}", JWT_BEARER.replace(':', "%3A"));
        let request = Request {
            method: Method::POST,
            path: "/v1/token".into(),
            body: RequestBody::Form(form.as_bytes()),
            authenticated: false,
            limit: REQUEST_LIMIT,
        };
        let (url, answer) = self.try_urls(endpoint, &request, None).await?;
        let token: TokenResponse = read_answer(&url, &answer)?;
        access.token = Some(token_with_renewal(&token));
        Ok(token.access_token)
    }

    async fn fetch_context(
        &self,
        endpoint: &ServiceEndpoint,
    ) -> Result<ContextResponse, ClientError> {
        let request = Request {
            method: Method::GET,
            path: "/v1/context".into(),
            body: RequestBody::None,
            authenticated: false,
            limit: REQUEST_LIMIT,
        };
        let (url, answer) = self.try_urls(endpoint, &request, None).await?;
        read_answer(&url, &answer)
    }
}

/// Returns an access token, and the time at which to renew it. No token is kept longer than the
/// protocol allows, even if the answer allows more.
fn token_with_renewal(token: &TokenResponse) -> (Jws, Instant) {
    let life = Duration::from_secs(token.expires_in.min(MAX_ACCESS_SECONDS));
    let life = life.saturating_sub(RENEW_BEFORE);
    (token.access_token.clone(), Instant::now() + life)
}

fn request_error(url: &str, error: reqwest::Error) -> ClientError {
    let url = url.to_owned();
    if let Some(mismatch) = pin_mismatch(&error) {
        return ClientError::Pin { url, mismatch };
    }
    let connecting = error.is_connect();
    // The text of the error already contains the URL, so remove it.
    let source = Box::new(error.without_url());
    match connecting {
        true => ClientError::Unreachable { url, source },
        false => ClientError::Interrupted { url, source },
    }
}

async fn read_body(
    url: &str,
    status: u16,
    mut response: reqwest::Response,
) -> Result<Vec<u8>, ClientError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| request_error(url, error))? {
        if body.len() + chunk.len() > MAX_RESPONSE {
            let reason = format!("the answer is longer than {MAX_RESPONSE} bytes");
            return Err(ClientError::Foreign { url: url.into(), status, reason });
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

fn read_answer<T: DeserializeOwned>(url: &str, answer: &Answer) -> Result<T, ClientError> {
    let foreign = |reason| ClientError::Foreign { url: url.into(), status: answer.status, reason };
    if answer.problem {
        let problem: Problem =
            serde_json::from_slice(&answer.body).map_err(|error| foreign(error.to_string()))?;
        return Err(ClientError::Problem(Box::new(problem)));
    }
    if !(200..300).contains(&answer.status) || !answer.json {
        return Err(foreign("expected JSON".into()));
    }
    serde_json::from_slice(&answer.body).map_err(|error| foreign(error.to_string()))
}

/// Parses an answer that has no body if there is nothing new.
fn read_changes<T: DeserializeOwned>(url: &str, answer: &Answer) -> Result<Option<T>, ClientError> {
    match answer.status {
        NO_CONTENT => Ok(None),
        _ => read_answer(url, answer).map(Some),
    }
}

fn local_now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
