//! Tests of the number of round trips to Postgres that frequent requests need.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use discovery_types::api::{Outcome, OutcomeRequest};
use discovery_types::digest::MemberId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

use super::agent::{TestAgent, form};
use super::joining::added;
use super::support::{TestInstallation, socket, wait_until};
use crate::server::{RunningService, start};

/// Time to wait for work that earlier requests have triggered.
const SETTLE_TIME: Duration = Duration::from_millis(300);
/// Maximum number of round trips of a request that changes a cluster. Four are BEGIN with the lock,
/// one read, one write and COMMIT. The fifth is a ping when the pool takes the connection back.
const CHANGE_TRIPS: usize = 5;
/// Number of round trips that tell other processes of a small change, after its COMMIT: the
/// notification, and a ping when the pool takes the connection back. Many changes share them.
const HINT_TRIPS: usize = 2;
/// Maximum number of round trips of a request that reads a cluster. One is the read. The others are
/// pings when the connection leaves the pool and returns to it.
const READ_TRIPS: usize = 3;
/// Maximum number of round trips of each request of a join. Issuing certificates takes a second
/// read, for the CAs, and a write, of the certificates' serial numbers.
const JOIN_TRIPS: [(&str, usize); 6] = [
    ("join", CHANGE_TRIPS),
    ("intents", READ_TRIPS),
    ("outcome added", CHANGE_TRIPS),
    ("outcome promoted", CHANGE_TRIPS),
    ("intent", READ_TRIPS),
    ("leaves", READ_TRIPS + 2),
];

/// Proxy between the service and Postgres. It counts the server's `ReadyForQuery` messages, which
/// end each round trip.
struct Counter(Arc<AtomicUsize>);

impl Counter {
    fn listen(dir: &Path) -> Self {
        let listener = UnixListener::bind(dir.join(".s.PGSQL.5432")).unwrap();
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = UnixStream::connect(socket().join(".s.PGSQL.5432")).await.unwrap();
                let (mut from_client, to_client) = client.into_split();
                let (from_server, mut to_server) = server.into_split();
                tokio::spawn(async move {
                    let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
                });
                tokio::spawn(pass_on(from_server, to_client, counted.clone()));
            }
        });
        Counter(count)
    }

    /// Counts the round trips while `asks` runs, including the ping when the connection returns to
    /// the pool.
    async fn of(&self, service: &RunningService, asks: impl Future<Output = ()>) -> usize {
        settle(service).await;
        let before = self.0.load(Ordering::Relaxed);
        asks.await;
        settle(service).await;
        self.0.load(Ordering::Relaxed) - before
    }
}

/// Waits until Postgres has no more work and a connection is idle.
async fn settle(service: &RunningService) {
    tokio::time::sleep(SETTLE_TIME).await;
    while service.app().store.pool().num_idle() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Forwards the server's messages to the client, and counts those of type `ReadyForQuery`. A
/// message is a type, a length that includes the length field, and a body.
async fn pass_on(
    mut from: tokio::net::unix::OwnedReadHalf,
    mut to: tokio::net::unix::OwnedWriteHalf,
    count: Arc<AtomicUsize>,
) -> std::io::Result<()> {
    loop {
        let kind = from.read_u8().await?;
        let length = from.read_u32().await?;
        let mut body = vec![0; length as usize - 4];
        from.read_exact(&mut body).await?;
        if kind == b'Z' {
            count.fetch_add(1, Ordering::Relaxed);
        }
        to.write_all(&[&[kind][..], &length.to_be_bytes(), &body].concat()).await?;
    }
}

async fn start_counted(world: &TestInstallation) -> (RunningService, Counter) {
    let dir = world.folder.path().join("counted");
    std::fs::create_dir(&dir).unwrap();
    let counter = Counter::listen(&dir);
    let mut args = world.args("ledger");
    let path = dir.display().to_string().replace('/', "%2F");
    args.database.database_url =
        Some(format!("postgres://muster@{path}:5432/{}?sslmode=disable", world.database.name));
    // The listener for notifications uses one connection, so one is left. Without sweeps, only the
    // test's requests cause queries.
    args.database.pool_size = 2;
    args.times.sweep = Duration::from_secs(3_600);
    let service = start(args).await.unwrap();
    // Wait for the sweep at the start, and the count of clusters after it. No other sweep follows.
    wait_until("it has swept", async || {
        service.app().metrics.text().contains("muster_discovery_clusters{")
    })
    .await;
    (service, counter)
}

/// The first three redeems prepare the connection's SQL statements, so the counted redeems don't
/// have to.
#[tokio::test]
async fn a_redeem_takes_five_round_trips() {
    let world = TestInstallation::new().await;
    let (service, counter) = start_counted(&world).await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 5).await;
    let token = world.token(&admin, &statement).await;
    let agents: Vec<TestAgent> =
        (1..=5).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    for agent in &agents[..3] {
        agent.redeem().await.unwrap();
    }
    let trips = counter.of(&service, async { drop(agents[3].redeem().await.unwrap()) }).await;
    println!("a redeem: {trips} round trips");
    assert!(trips <= CHANGE_TRIPS + HINT_TRIPS, "{trips}");
    // The redeem of the last seat also freezes the list and stores its seats, URLs and events.
    let trips = counter.of(&service, async { drop(agents[4].redeem().await.unwrap()) }).await;
    println!("the redeem that freezes: {trips} round trips");
    // One more round trip than usual: this connection writes into these tables for the first time,
    // so it has to prepare the SQL statement.
    assert!(trips <= CHANGE_TRIPS + 1, "{trips}");
    let trips = counter.of(&service, async { drop(agents[4].poll(None).await.unwrap()) }).await;
    println!("a poll: {trips} round trips");
    service.stop().await;
}

/// Counts the round trips of each request of a join, by the newcomer and by the agent that adds it.
#[tokio::test]
async fn each_request_of_a_join_stays_within_its_round_trips() {
    let world = TestInstallation::new().await;
    let (service, counter) = start_counted(&world).await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 1).await;
    let id = statement.cluster;
    let token = world.token(&admin, &statement).await;
    let mut founders = vec![TestAgent::new(&world, &service, &statement, &token, 1)];
    form(&mut founders).await;
    let copied = || service.app().store.ledger().known().map(|known| known.last_copied.number);
    wait_until("the commit is copied", async || copied() == Some(1)).await;
    let founder = &founders[0].client;
    let mut totals = Vec::new();
    // The test checks only the second join, because the first one also prepares the connection's
    // SQL statements.
    for number in [7, 8] {
        let ticket = world.ticket(&admin, &statement).await;
        let newcomer = TestAgent::new(&world, &service, &statement, &ticket, number);
        let member = MemberId::new(u64::from(number));
        let mut trips = Vec::new();
        let mut note = |what, count| {
            println!("{what}: {count} round trips");
            trips.push(count);
        };
        let asks = async { drop(newcomer.join().await.unwrap()) };
        note("join", counter.of(&service, asks).await);
        let list = founder.intents(id, None, false).await.unwrap();
        let operation = list.intents[0].intent.operation;
        let asks = async { drop(founder.intents(id, None, false).await.unwrap()) };
        note("intents", counter.of(&service, asks).await);
        for outcome in [added(member.get()), Outcome::Promoted { member }] {
            let request =
                OutcomeRequest { outcome, raft_term: 2, raft_index: 10 + u64::from(number) };
            let asks = async {
                drop(founder.report_outcome(id, operation, &request).await.unwrap());
            };
            note("outcome", counter.of(&service, asks).await);
        }
        let asks = async { drop(newcomer.client.intent(id, operation, None).await.unwrap()) };
        note("intent", counter.of(&service, asks).await);
        let csr = &newcomer.record.csr;
        let asks = async { drop(newcomer.client.renew_leaves(id, csr).await.unwrap()) };
        note("leaves", counter.of(&service, asks).await);
        totals.push(trips);
    }
    let within = totals[1].iter().zip(JOIN_TRIPS).all(|(count, (_, most))| *count <= most);
    assert!(within, "{totals:?}, and not {JOIN_TRIPS:?}");
    service.stop().await;
}

#[tokio::test]
async fn a_connection_that_died_in_the_pool_fails_no_request_of_an_agent() {
    let world = TestInstallation::new().await;
    let mut args = world.args("ledger");
    // Prevent further sweeps, because a sweep could find the dead connections before the request.
    args.times.sweep = Duration::from_secs(3_600);
    let service = start(args).await.unwrap();
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 2).await;
    let token = world.token(&admin, &statement).await;
    let mut postgres = world.database.connect().await;
    for number in 1..=2 {
        let agent = TestAgent::new(&world, &service, &statement, &token, number);
        agent.redeem().await.unwrap();
        // Concurrent requests leave several idle connections, which are ended next.
        let _ = tokio::join!(agent.redeem(), agent.redeem(), agent.redeem());
        let ended = sqlx::query(
            // The second argument is a timeout, within which the function waits until the backend
            // has ended.
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
             WHERE datname = current_database() AND application_name = 'muster-discovery'",
        );
        let ended = ended.fetch_all(&mut postgres).await.unwrap().len();
        assert!(ended > 1, "{ended}");
        agent.redeem().await.unwrap();
    }
    service.stop().await;
}

/// The cluster's row stays locked for longer than any request waits. A dump, an ALTER TABLE, or a
/// stopped process can cause that.
#[tokio::test]
async fn a_lock_timeout_leaves_no_connection_in_a_transaction() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    let token = world.token(&admin, &statement).await;
    let agents: Vec<TestAgent> =
        (1..=3).map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
    agents[0].redeem().await.unwrap();
    let mut locker = world.database.connect().await;
    let lock = "BEGIN; SELECT 1 FROM clusters FOR UPDATE";
    sqlx::raw_sql(lock).execute(&mut locker).await.unwrap();
    // The first request waits until the lock timeout. The clients of the two others give up
    // earlier.
    let leaves = Duration::from_millis(300);
    let (waited, ..) = tokio::join!(
        agents[0].poll(None),
        tokio::time::timeout(leaves, agents[1].redeem()),
        tokio::time::timeout(leaves, agents[2].redeem()),
    );
    assert!(waited.is_err(), "the row is locked");
    sqlx::raw_sql("ROLLBACK").execute(&mut locker).await.unwrap();
    for _ in 0..20 {
        agents[0].poll(None).await.unwrap();
        admin.explain(statement.cluster).await.unwrap();
    }
    // Background work of the service can be in a transaction for a moment. But no connection may
    // stay in one.
    let in_transactions = "SELECT count(*) FROM pg_stat_activity
         WHERE datname = current_database() AND state LIKE 'idle in transaction%'";
    let mut left: i64 = 1;
    for _ in 0..600 {
        left = sqlx::query_scalar(in_transactions).fetch_one(&mut locker).await.unwrap();
        if left == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(left, 0, "connections in the pool are in transactions");
    service.stop().await;
}
