//! Has clients and watchers ask a running cluster, and writes down what came of it.
//!
//! All of them run in one thread, on one clock. Each client has one request on its way at a time, at
//! whichever member; each watcher asks for notices of progress all the time, takes silence for a member
//! that is gone, and goes on at another one from the first revision that it was not told of.

mod clients;
mod draw;
mod link;
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

use self::clients::Client;
use self::link::Link;
use self::watchers::Watching;
use super::{Asked, Came, History, Request, Time};
use crate::harness::Host;
use crate::rng::Rng;

/// Nothing takes as long once all members are well.
const LIMIT: Duration = Duration::from_secs(60);
const CLIENTS: usize = 8;
/// How long the last read of all may take, each time.
const LAST_READ: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_millis(50);

/// What is to be recorded.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What clients ask for is drawn from it; when each request is sent, and so what comes of it, is not.
    pub seed: u64,
    /// Where clients and watchers are.
    pub from: Host,
    /// Where members serve clients.
    pub members: Vec<SocketAddr>,
    /// Everybody says who they are, and some may use a part of the keys only.
    pub has_users: bool,
}

/// A recording that goes on until it is [finished](Self::finish).
#[derive(Debug)]
pub struct Recording {
    shared: Arc<Shared>,
    thread: JoinHandle<Result<History>>,
}

/// What all tasks of a recording look at.
#[derive(Debug)]
struct Shared {
    began: Instant,
    stops: AtomicBool,
    answered: AtomicU64,
    lost: AtomicU64,
    /// The newest revision once all requests are over; 0 before.
    last: AtomicI64,
}

impl Shared {
    fn now(&self) -> Time {
        u64::try_from(self.began.elapsed().as_nanos()).expect("a test ends within centuries")
    }

    fn last(&self) -> Option<i64> {
        Some(self.last.load(Ordering::Relaxed)).filter(|last| *last > 0)
    }

    fn stops(&self) -> bool {
        self.stops.load(Ordering::Relaxed)
    }
}

impl Recording {
    /// Starts clients and watchers, on members that serve.
    ///
    /// # Errors
    /// No thread.
    pub fn start(plan: Plan) -> Result<Self> {
        let shared = Arc::new(Shared {
            began: Instant::now(),
            stops: AtomicBool::new(false),
            answered: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            last: AtomicI64::new(0),
        });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("recording".to_owned()).spawn(move || {
            plan.from.enter()?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(record(&plan, &of_thread))
        })?;
        Ok(Self { shared, thread })
    }

    /// How many requests were answered so far.
    pub fn answered(&self) -> u64 {
        self.shared.answered.load(Ordering::Relaxed)
    }

    /// Of how many requests the outcome is unknown so far.
    pub fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// Whether it came to an end by itself, which only an error brings about.
    pub fn has_failed(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends all requests, has every watcher told everything, and gives what was recorded.
    ///
    /// # Errors
    /// Members that don't serve any more, or a watcher that is not told everything.
    pub fn finish(self) -> Result<History> {
        self.shared.stops.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the recording panicked"))?
    }
}

/// Says that it is the user who may do everything, where there are users.
pub fn administrator() -> AuthenticateRequest {
    users::password_of(&users::root())
}

async fn record(plan: &Plan, shared: &Arc<Shared>) -> Result<History> {
    let mut history = History::default();
    if plan.has_users {
        history.users = users::make(&plan.members).await.context("making users")?;
    }
    let mut rng = Rng::new(plan.seed);
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        let user = plan.has_users.then(|| users::of_client(number));
        let client = Client::new(number, user, Rng::new(rng.number()), plan, Arc::clone(shared))?;
        clients.spawn(client.run());
    }
    let mut watchers = JoinSet::new();
    for (user, wants, start) in watchers::all(plan.has_users) {
        let link = Link::new(&plan.members, user)?;
        let random = Rng::new(rng.number());
        let watching = Watching::new(link, wants, start, random, Arc::clone(shared));
        watchers.spawn(watching.run());
    }
    while let Some(requests) = clients.join_next().await {
        history.requests.extend(requests?);
    }
    let last = tokio::time::timeout(LIMIT, last_read(plan, shared)).await;
    let (request, last) = last.context("the cluster answers no more")??;
    history.requests.push(request);
    history.last = last;
    shared.last.store(last, Ordering::Relaxed);
    while let Some(watcher) = watchers.join_next().await {
        history.watchers.push(watcher??);
    }
    Ok(history)
}

/// Reads until there is an answer.
async fn last_read(plan: &Plan, shared: &Shared) -> Result<(Request, i64)> {
    let mut link = Link::new(&plan.members, plan.has_users.then(users::root))?;
    let everything = RangeRequest {
        key: b"\0".to_vec().into(),
        range_end: b"\0".to_vec().into(),
        ..RangeRequest::default()
    };
    for member in (0..plan.members.len()).cycle() {
        if !link.is_known(member).await {
            tokio::time::sleep(AGAIN).await;
            continue;
        }
        let begin = shared.now();
        let asked = Asked::Read(everything.clone());
        let came = link.ask(member, &asked, LAST_READ, || shared.now()).await;
        let user = link.user().map(str::to_owned);
        let request = Request { client: CLIENTS, member, user, begin, asked, came };
        if let Some((_, revision)) = request.answer() {
            return Ok((request, revision));
        }
        if let Came::Refused { .. } = request.came {
            link.forget();
        }
        tokio::time::sleep(AGAIN).await;
    }
    Err(anyhow!("there is no member"))
}
