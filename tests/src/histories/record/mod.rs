//! Records a history: clients and watchers send requests to a running cluster and write down the
//! outcomes.
//!
//! All of them run in one thread and use one clock. Each client has one request in flight, at a
//! changing member. Each watcher requests progress notifications all the time, and leaves a member
//! that sends nothing. The watcher continues at another member, from the first revision that it has
//! not received.

mod clients;
mod generator;
mod session;
mod users;
mod watchers;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use node_proto::etcdserverpb::{AuthenticateRequest, RangeRequest};
use tokio::task::JoinSet;

use self::clients::RecordedClient;
use self::session::ClientSession;
use self::watchers::WatcherTask;
use super::{RecordedHistory, Request, RequestOutcome, RequestedOperation, Time};
use crate::harness::TestHost;
use crate::rng::Rng;

/// Time limit of each step in which all members are healthy.
const LIMIT: Duration = Duration::from_secs(60);
const CLIENTS: usize = 8;
/// Time limit of each attempt of the last read.
const LAST_READ_LIMIT: Duration = Duration::from_secs(2);
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Parameters of a recording.
#[derive(Clone, Debug)]
pub struct RecordingPlan {
    /// Seed of the clients' requests. The requests' timing, and so their outcomes, don't depend on
    /// the seed.
    pub seed: u64,
    /// Host that clients and watchers run on.
    pub from: TestHost,
    /// Client addresses of the members.
    pub members: Vec<SocketAddr>,
    /// Whether clients authenticate. If so, some clients run as a user who may use only a part of
    /// the keys.
    pub has_users: bool,
}

/// A recording in progress. [`finish`](Self::finish) ends it.
#[derive(Debug)]
pub struct Recording {
    shared: Arc<RecordingState>,
    thread: JoinHandle<Result<RecordedHistory>>,
}

/// State shared by all tasks of a recording.
#[derive(Debug)]
struct RecordingState {
    began: Instant,
    stop_requested: AtomicBool,
    answered: AtomicU64,
    lost: AtomicU64,
    /// Newest revision after the last request, or 0 while clients still send requests.
    last: AtomicI64,
}

impl RecordingState {
    fn now(&self) -> Time {
        u64::try_from(self.began.elapsed().as_nanos()).expect("a test ends within centuries")
    }

    fn last(&self) -> Option<i64> {
        Some(self.last.load(Ordering::Relaxed)).filter(|last| *last > 0)
    }

    fn is_stopping(&self) -> bool {
        self.stop_requested.load(Ordering::Relaxed)
    }
}

impl Recording {
    /// Starts clients and watchers on a cluster that serves.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(plan: RecordingPlan) -> Result<Self> {
        let shared = Arc::new(RecordingState {
            began: Instant::now(),
            stop_requested: AtomicBool::new(false),
            answered: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            last: AtomicI64::new(0),
        });
        let thread_state = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("recording".to_owned()).spawn(move || {
            plan.from.enter_namespace()?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(record(&plan, &thread_state))
        })?;
        Ok(Self { shared, thread })
    }

    /// Returns the number of requests answered so far.
    pub fn answered(&self) -> u64 {
        self.shared.answered.load(Ordering::Relaxed)
    }

    /// Returns the number of requests so far whose outcome is unknown.
    pub fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// Whether the recording ended early, which only an error causes.
    pub fn has_failed(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends all requests, waits until every watcher has received all changes, and returns the
    /// history.
    ///
    /// # Errors
    /// If the members don't serve any more, or a watcher doesn't receive all changes.
    pub fn finish(self) -> Result<RecordedHistory> {
        self.shared.stop_requested.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the recording panicked"))?
    }
}

/// Returns the credentials of the user with all permissions, for recordings with users.
pub fn administrator() -> AuthenticateRequest {
    users::password_of(&users::root())
}

async fn record(plan: &RecordingPlan, shared: &Arc<RecordingState>) -> Result<RecordedHistory> {
    let mut history = RecordedHistory::default();
    if plan.has_users {
        history.users = users::create_users(&plan.members).await.context("making users")?;
    }
    let mut rng = Rng::new(plan.seed);
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        let user = plan.has_users.then(|| users::user_of_client(number));
        let client =
            RecordedClient::new(number, user, Rng::new(rng.number()), plan, Arc::clone(shared))?;
        clients.spawn(client.run());
    }
    let mut watchers = JoinSet::new();
    for (user, request, start) in watchers::watcher_requests(plan.has_users) {
        let session = ClientSession::new(&plan.members, user)?;
        let random = Rng::new(rng.number());
        let watcher = WatcherTask::new(session, request, start, random, Arc::clone(shared));
        watchers.spawn(watcher.run());
    }
    while let Some(requests) = clients.join_next().await {
        history.requests.extend(requests?);
    }
    let last = tokio::time::timeout(LIMIT, last_read(plan, shared)).await;
    let (request, last) = last.context("the cluster answers no more")??;
    history.requests.push(request);
    history.last_revision = last;
    shared.last.store(last, Ordering::Relaxed);
    while let Some(watcher) = watchers.join_next().await {
        history.watchers.push(watcher??);
    }
    Ok(history)
}

/// Reads all keys, and repeats the read until a member answers. Returns the request, and the
/// revision of the answer.
async fn last_read(plan: &RecordingPlan, shared: &RecordingState) -> Result<(Request, i64)> {
    let mut session = ClientSession::new(&plan.members, plan.has_users.then(users::root))?;
    let everything = RangeRequest {
        key: b"\0".to_vec().into(),
        range_end: b"\0".to_vec().into(),
        ..RangeRequest::default()
    };
    for member in (0..plan.members.len()).cycle() {
        if !session.ensure_token(member).await {
            tokio::time::sleep(RETRY_PAUSE).await;
            continue;
        }
        let begin = shared.now();
        let operation = RequestedOperation::Read(everything.clone());
        let outcome = session.send(member, &operation, LAST_READ_LIMIT, || shared.now()).await;
        let user = session.user().map(str::to_owned);
        let request = Request { client: CLIENTS, member, user, begin, operation, outcome };
        if let Some((_, revision)) = request.answer() {
            return Ok((request, revision));
        }
        if let RequestOutcome::Refused { .. } = request.outcome {
            session.drop_token();
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
    Err(anyhow!("there is no member"))
}
