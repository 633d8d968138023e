//! Measures the discovery service: what each kind of request costs the service and its Postgres,
//! with few clusters in the database and with many.
//!
//! The load speaks the real protocol: mutual TLS, real keys and signatures. It runs on the same
//! machine, so rates and wall times tell little about a larger one. CPU times are those that the
//! kernel counted.
//!
//! For comparison, `pgbench` runs transactions on the same Postgres. Each of them has as many round
//! trips and commits as a change of a cluster.

mod agent;
mod attacks;
mod measure;
mod postgres;
mod service;

use std::cell::RefCell;
use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use discovery_types::api::{ClusterQuery, ClusterState, ClusterStates, GrantQuery};
use discovery_types::client::DiscoveryClient;
use futures_util::future::try_join_all;

use self::agent::BenchAgent;
pub use self::attacks::AttackFigures;
use self::attacks::measure_attacks;
pub use self::measure::OperationFigures;
use self::measure::measure;
use self::service::BenchService;

/// Number of seats of a cluster in which agents register. One seat stays free, so that no cluster
/// freezes its list.
const SEATS: u8 = 9;
/// Number of items on a page of a list.
const PAGE: u16 = 100;
/// Options that set the service's limits so high that no measurement reaches them.
const LIMITS: [&str; 10] = [
    "--rate",
    "1000000",
    "--burst",
    "1000000",
    "--max-connections",
    "60000",
    "--max-connections-per-address",
    "60000",
    "--max-parked-polls",
    "60000",
];
/// Time limit for polls. It is short, so that a waiting poll ends soon.
const SHORT_POLL: &str = "2s";
/// Time between the starts of two long polls. Each poll begins with a write.
const BETWEEN_POLLS: Duration = Duration::from_millis(2);
/// The service's time limit for polls while parked polls are measured. A parked poll is a long poll
/// that waits for a change.
const PARKED_POLL: Duration = Duration::from_secs(50);
/// Lease of a seat (`--lease`) while parked polls are measured. It is longer than it takes to seat
/// all their agents.
const PARKED_LEASE: &str = "1200s";
/// Time from a start of the service until its memory is measured before any request.
const BEFORE_MEASURING: Duration = Duration::from_secs(2);
/// Number of connections without a request that are opened at a time to measure their memory.
const IDLE_CONNECTIONS: usize = 2_000;
/// Maximum time in which these connections are opened and measured. After five seconds the service
/// closes a connection that has sent no request.
const MAX_OPEN_TIME: Duration = Duration::from_secs(4);
/// Number of clusters that change while polls are parked, one after the other.
const CHANGED_CLUSTERS: usize = 100;
/// Pause between two changes.
const BETWEEN_CHANGES: Duration = Duration::from_millis(50);
/// Time in which all polls of a changed cluster have to end.
const MAX_WAKE_TIME: Duration = Duration::from_secs(10);
/// Time after the last poll's end until the service's memory is measured again.
const SETTLE_TIME: Duration = Duration::from_secs(15);
/// Time over which the CPU time of an idle service is measured.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// Parameters of a run.
#[derive(Clone, Debug)]
pub struct BenchDiscoveryPlan {
    /// Path of the `muster-discovery` to measure.
    pub program: PathBuf,
    /// Directory for keys, ledger, Postgres and log, on a real disk.
    pub work: PathBuf,
    /// Numbers of clusters in the database, ascending. The requests are measured once with each
    /// number.
    pub clusters: Vec<u64>,
    /// Number of registrations to measure.
    pub registrations: usize,
    /// Number of clusters to form.
    pub formations: usize,
    /// Number of polls to park.
    pub parked: usize,
    /// Maximum number of operations that run at the same time.
    pub concurrency: usize,
    /// Time for which each attack lasts; zero for none.
    pub attack_time: Duration,
}

/// Figures that were measured with a certain number of clusters in the database.
#[derive(Clone, Debug)]
pub struct DatabaseSizeFigures {
    /// Number of clusters in the database during these measurements.
    pub clusters: u64,
    /// Time from a start with an empty ledger until the ledger held all decisions.
    pub ledger_fill: Duration,
    /// Time from a start with a complete ledger until the service answered.
    pub start: Duration,
    /// Resident memory of the idle service in bytes.
    pub idle_bytes: u64,
    /// CPU time that the service uses per second without requests.
    pub idle_service: Duration,
    /// CPU time that Postgres uses per second without requests.
    pub idle_postgres: Duration,
    /// Figures of each kind of request.
    pub operations: Vec<OperationFigures>,
}

/// Memory of parked polls, and how quickly they end when their cluster changes.
#[derive(Clone, Copy, Debug)]
pub struct ParkedFigures {
    /// Number of parked polls.
    pub parked: usize,
    /// Resident memory in bytes for each connection without a request.
    pub idle_connection_bytes: u64,
    /// Additional resident memory in bytes for each parked poll.
    pub poll_bytes: u64,
    /// Number of polls that ended because their cluster changed.
    pub woken: usize,
    /// Median and 99th percentile of the time from the request that changes a cluster until a poll
    /// of that cluster has its answer.
    pub wake_median: Duration,
    pub wake_p99: Duration,
    /// Resident memory in bytes before the clients came.
    pub before_bytes: u64,
    /// Resident memory in bytes after the clients have left.
    pub after_bytes: u64,
}

/// Figures of a whole run.
#[derive(Clone, Debug)]
pub struct BenchDiscoveryReport {
    /// Transactions of `pgbench` per second.
    pub pgbench_per_second: f64,
    /// CPU time of Postgres for a transaction of `pgbench`.
    pub pgbench_cpu: Duration,
    /// Figures for each number of clusters in the database.
    pub fills: Vec<DatabaseSizeFigures>,
    /// Memory of parked polls, and how quickly they end.
    pub parked: Option<ParkedFigures>,
    /// Figures of the attacks, in the order in which they ran.
    pub attacks: Vec<AttackFigures>,
}

/// Runs the measurements. Passes a line to `progress` before each of them. Also passes the figures
/// for each number of clusters, once they are measured.
pub async fn run(
    plan: &BenchDiscoveryPlan,
    progress: impl Fn(&str),
) -> Result<BenchDiscoveryReport> {
    ensure!(plan.clusters.is_sorted(), "--clusters: name the numbers in ascending order");
    let folder = tempfile::tempdir_in(&plan.work)?;
    // Let the user of the managed Postgres enter the folder.
    fs_err::set_permissions(folder.path(), PermissionsExt::from_mode(0o755))?;
    let mut service = BenchService::new(&plan.program, folder.path())?;
    let options = [&LIMITS[..], &["--poll", SHORT_POLL]].concat();
    service.start(&options).await?;
    progress("pgbench");
    let seconds = Duration::from_secs(10);
    let transactions = postgres::pgbench(&service.postgres_folder(), plan.concurrency, seconds)?;
    let (mut fills, mut there) = (Vec::new(), 0);
    for clusters in &plan.clusters {
        progress(&format!("{clusters} clusters: filling the database"));
        service.fill(there + 1..=*clusters).await?;
        there = *clusters;
        let figures = measure_fill(plan, &mut service, *clusters, &options, &progress).await?;
        progress(&figures.to_string());
        fills.push(figures);
    }
    let parked = match plan.parked {
        0 => None,
        parked => {
            progress(&format!("{parked} parked polls"));
            Some(measure_parked(&mut service, parked).await?)
        }
    };
    let attacks = match plan.attack_time {
        Duration::ZERO => Vec::new(),
        time => measure_attacks(&mut service, time, &progress).await?,
    };
    service.stop().await?;
    Ok(BenchDiscoveryReport {
        pgbench_per_second: transactions.per_second,
        pgbench_cpu: transactions.cpu,
        fills,
        parked,
        attacks,
    })
}

/// Measures the service with the clusters that are now in the database. First come a start without
/// a ledger, a start with one, and the idle service; then each kind of request.
async fn measure_fill(
    plan: &BenchDiscoveryPlan,
    service: &mut BenchService,
    clusters: u64,
    options: &[&str],
    progress: &impl Fn(&str),
) -> Result<DatabaseSizeFigures> {
    progress(&format!("{clusters} clusters: starts"));
    service.stop().await?;
    service.forget_ledger()?;
    let began = Instant::now();
    service.start(options).await?;
    service.wait_until_ready().await?;
    let ledger_fill = began.elapsed();
    service.stop().await?;
    let start = service.start(options).await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = service.cpu()?;
    tokio::time::sleep(IDLE_TIME).await;
    let idle = service.cpu()?.since(before);
    let idle_bytes = service.resident_bytes()?;
    progress(&format!("{clusters} clusters: requests"));
    let admin = service.admin()?;
    let mut operations = measure_admin(service, &admin, clusters).await?;
    let name = |part: &str, number: usize| format!("{part}-{clusters}-{number}");
    operations.push(measure_registrations(plan, service, &admin, &name).await?);
    operations.push(measure_formations(plan, service, &admin, &name).await?);
    operations.push(measure_polls(service, &admin, &name).await?);
    let second = |cpu: Duration| cpu.div_f64(IDLE_TIME.as_secs_f64());
    Ok(DatabaseSizeFigures {
        clusters,
        ledger_fill,
        start,
        idle_bytes,
        idle_service: second(idle.service),
        idle_postgres: second(idle.postgres),
        operations,
    })
}

/// Measures the requests of an admin, one at a time.
async fn measure_admin(
    service: &BenchService,
    admin: &DiscoveryClient,
    clusters: u64,
) -> Result<Vec<OperationFigures>> {
    const COUNT: usize = 200;
    let page = ClusterQuery { limit: Some(PAGE), ..ClusterQuery::default() };
    let named =
        ClusterQuery { name: Some(format!("made-{}", clusters / 2).parse()?), ..page.clone() };
    let retired =
        ClusterQuery { state: Some(ClusterStates::new([ClusterState::Retired])), ..page.clone() };
    let tokens = GrantQuery { limit: Some(PAGE), after: None, policies: None };
    let mut figures = Vec::new();
    for (name, query) in [
        ("cluster list, a page of 100", &page),
        ("cluster list --state retired, a page", &retired),
        ("cluster list --name NAME", &named),
    ] {
        let list = || async { Ok(admin.list_clusters(query).await.map(drop)?) };
        figures.push(measure(service, name, 1, (0..COUNT).map(|_| list())).await?);
    }
    let list = || async { Ok(admin.list_grants(None, &tokens).await.map(drop)?) };
    let name = "token list, a page of 100";
    figures.push(measure(service, name, 1, (0..COUNT).map(|_| list())).await?);
    Ok(figures)
}

/// Measures registrations: a new connection with mutual TLS, and a redeem that takes a seat.
/// Registrations that run at the same time belong to different clusters. Registrations of one
/// cluster wait for each other, because each locks the cluster's row until its commit is on disk.
/// The figures of a formation include that wait.
async fn measure_registrations(
    plan: &BenchDiscoveryPlan,
    service: &BenchService,
    admin: &DiscoveryClient,
    name: &impl Fn(&str, usize) -> String,
) -> Result<OperationFigures> {
    let mut clusters = Vec::new();
    let in_cluster = usize::from(SEATS) - 1;
    for number in 0..plan.registrations.div_ceil(in_cluster) {
        clusters.push(service.open(admin, &name("register", number), SEATS).await?);
    }
    let mut agents = Vec::new();
    for seat in 1..SEATS {
        for cluster in &clusters {
            agents.push(BenchAgent::new(service, cluster, seat.into())?);
        }
    }
    let register = |agent: BenchAgent| async move { agent.redeem().await.map(drop) };
    measure(service, "registration", plan.concurrency, agents.into_iter().map(register)).await
}

/// Measures formations of three members, from the first redeem to the last signature.
async fn measure_formations(
    plan: &BenchDiscoveryPlan,
    service: &BenchService,
    admin: &DiscoveryClient,
    name: &impl Fn(&str, usize) -> String,
) -> Result<OperationFigures> {
    let mut formations = Vec::new();
    for number in 0..plan.formations {
        let cluster = service.open(admin, &name("form", number), 3).await?;
        let agents: Result<Vec<_>> =
            (1..=3).map(|seat| BenchAgent::new(service, &cluster, seat)).collect();
        formations.push(form(agents?));
    }
    measure(service, "formation of three", plan.concurrency.div_ceil(3), formations).await
}

async fn form(mut agents: Vec<BenchAgent>) -> Result<()> {
    try_join_all(agents.iter().map(BenchAgent::redeem)).await?;
    try_join_all(agents.iter_mut().map(BenchAgent::sign)).await?;
    Ok(())
}

/// Measures polls that wait until the service's limit, because nothing changes.
async fn measure_polls(
    service: &BenchService,
    admin: &DiscoveryClient,
    name: &impl Fn(&str, usize) -> String,
) -> Result<OperationFigures> {
    const CLUSTERS: usize = 40;
    const POLLS: usize = 3;
    let (agents, _) = seated_agents(service, admin, name, CLUSTERS).await?;
    let mut revisions = Vec::new();
    for agent in &agents {
        revisions.push(agent.poll(None).await?.rev);
    }
    let mut figures = None;
    for _ in 0..POLLS {
        let polls = agents.iter().zip(&mut revisions).map(|(agent, rev)| async move {
            if let Some(changed) = agent.wait_for_change(*rev).await? {
                *rev = changed.rev;
            }
            Ok(())
        });
        figures = Some(measure(service, "poll, nothing changed", agents.len(), polls).await?);
    }
    figures.context("there is more than one round")
}

/// Makes clusters whose last seat is free, and agents that have the other seats. Returns the seated
/// agents, and an agent for the last seat of each cluster.
async fn seated_agents(
    service: &BenchService,
    admin: &DiscoveryClient,
    name: &impl Fn(&str, usize) -> String,
    clusters: usize,
) -> Result<(Vec<BenchAgent>, Vec<BenchAgent>)> {
    let (mut agents, mut last_agents) = (Vec::new(), Vec::new());
    for number in 0..clusters {
        let cluster = service.open(admin, &name("poll", number), SEATS).await?;
        for seat in 1..SEATS {
            let agent = BenchAgent::new(service, &cluster, seat.into())?;
            agent.redeem().await?;
            agents.push(agent);
        }
        last_agents.push(BenchAgent::new(service, &cluster, SEATS.into())?);
    }
    Ok((agents, last_agents))
}

/// Fills the last seat of some clusters, one after the other. In each cluster the other agents wait
/// in polls, which end when the last seat is filled. Returns one time for each poll: from the
/// request that fills the seat to the end of the poll. The polling tasks, which run elsewhere, add
/// the times at which polls end to `woken`.
async fn fill_last_seats(
    last_agents: &[BenchAgent],
    woken: &RefCell<Vec<Instant>>,
) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    for agent in last_agents.iter().take(CHANGED_CLUSTERS) {
        woken.borrow_mut().clear();
        let sent = Instant::now();
        agent.redeem().await?;
        while woken.borrow().len() < usize::from(SEATS) - 1 {
            ensure!(sent.elapsed() < MAX_WAKE_TIME, "some polls of a changed cluster didn't end");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        times.extend(woken.borrow().iter().map(|ended| ended.duration_since(sent)));
        tokio::time::sleep(BETWEEN_CHANGES).await;
    }
    Ok(times)
}

/// Measures the memory of parked polls, each on a connection of its own, and how quickly they end
/// when their cluster changes.
///
/// Each memory figure begins with a new process, whose memory holds nothing of earlier requests.
/// The agents have their seats by then, and their earlier connections are closed.
async fn measure_parked(service: &mut BenchService, parked: usize) -> Result<ParkedFigures> {
    service.stop().await?;
    // The polls wait for longer than the measurement lasts.
    let poll = format!("{}s", PARKED_POLL.as_secs());
    let options = [&LIMITS[..], &["--poll", &poll, "--lease", PARKED_LEASE]].concat();
    service.start(&options).await?;
    let admin = service.admin()?;
    let clusters = parked.div_ceil(usize::from(SEATS) - 1);
    let name = |part: &str, number: usize| format!("{part}-parked-{number}");
    let (agents, last_agents) = seated_agents(service, &admin, &name, clusters).await?;
    let mut revisions = Vec::new();
    for agent in &agents {
        revisions.push(agent.poll(None).await?.rev);
    }
    service.stop().await?;
    service.start(&options).await?;
    let idle_connection_bytes = measure_idle_connections(service).await?;
    service.stop().await?;
    service.start(&options).await?;
    tokio::time::sleep(BEFORE_MEASURING).await;
    let before_bytes = service.resident_bytes()?;
    let woken: RefCell<Vec<Instant>> = RefCell::default();
    let polls = (0..).zip(agents.iter().zip(revisions)).map(|(number, (agent, rev))| {
        let woken = &woken;
        async move {
            tokio::time::sleep(BETWEEN_POLLS * number).await;
            agent.wait_for_change(rev).await?;
            woken.borrow_mut().push(Instant::now());
            anyhow::Ok(())
        }
    });
    let polls = async {
        try_join_all(polls).await?;
        std::future::pending::<Result<_>>().await
    };
    let all_wait = BETWEEN_POLLS * u32::try_from(agents.len())? + Duration::from_secs(5);
    let look = async {
        tokio::time::sleep(all_wait).await;
        let waiting = service.resident_bytes()?;
        ensure!(woken.borrow().is_empty(), "some polls didn't wait");
        Ok((waiting, fill_last_seats(&last_agents, &woken).await?))
    };
    let (waiting, mut times) = tokio::select! {
        ended = polls => ended?,
        looked = look => looked?,
    };
    times.sort();
    let at = |percent: usize| times.get((times.len() * percent).div_ceil(100).max(1) - 1).copied();
    let count = u64::try_from(agents.len())?;
    drop(agents);
    // Wait until all polls have ended. Before that, the service doesn't notice that their clients
    // are gone.
    tokio::time::sleep(PARKED_POLL + SETTLE_TIME).await;
    Ok(ParkedFigures {
        parked: usize::try_from(count)?,
        idle_connection_bytes,
        poll_bytes: (waiting.saturating_sub(before_bytes) / count)
            .saturating_sub(idle_connection_bytes),
        woken: times.len(),
        wake_median: at(50).unwrap_or_default(),
        wake_p99: at(99).unwrap_or_default(),
        before_bytes,
        after_bytes: service.resident_bytes()?,
    })
}

/// Measures the resident memory of a connection that has sent no request.
async fn measure_idle_connections(service: &BenchService) -> Result<u64> {
    tokio::time::sleep(BEFORE_MEASURING).await;
    let before = service.resident_bytes()?;
    let began = Instant::now();
    let connections = service.connect_without_request(IDLE_CONNECTIONS).await?;
    let opened = service.resident_bytes()?;
    ensure!(
        began.elapsed() < MAX_OPEN_TIME,
        "opening {IDLE_CONNECTIONS} connections took too long, so the service closed some of them"
    );
    Ok(opened.saturating_sub(before) / u64::try_from(connections.len())?)
}

impl fmt::Display for BenchDiscoveryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "pgbench, five round trips and a commit: {:.0}/s, Postgres {:.3} ms of CPU each",
            self.pgbench_per_second,
            ms(self.pgbench_cpu)
        )?;
        for fill in &self.fills {
            write!(f, "{fill}")?;
        }
        if let Some(parked) = &self.parked {
            writeln!(
                f,
                "\n{} parked polls: {:.1} KiB for each connection, {:.1} KiB more for its poll;\n  \
                 {} of them ended by a change, after {:.1} ms (median) and {:.1} ms (p99);\n  \
                 the service: {:.0} MiB before they came, {:.0} MiB after they left",
                parked.parked,
                parked.idle_connection_bytes as f64 / 1024.0,
                parked.poll_bytes as f64 / 1024.0,
                parked.woken,
                ms(parked.wake_median),
                ms(parked.wake_p99),
                parked.before_bytes as f64 / MIB,
                parked.after_bytes as f64 / MIB
            )?;
        }
        if !self.attacks.is_empty() {
            writeln!(
                f,
                "\n  {:<28} {:>11} {:>8} {:>7} {:>9} {:>7} {:>12} {:>6}",
                "attack",
                "connections",
                "honest",
                "failed",
                "median ms",
                "p99 ms",
                "CPU ms per s",
                "MiB"
            )?;
        }
        self.attacks.iter().try_for_each(|attack| write!(f, "{attack}"))
    }
}

impl fmt::Display for AttackFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "  {:<28} {:>11} {:>8} {:>7} {:>9.1} {:>7.1} {:>12.0} {:>6.0}",
            self.name,
            self.attacks,
            self.honest,
            self.failed,
            ms(self.median),
            ms(self.p99),
            ms(self.service),
            self.resident_bytes as f64 / MIB
        )
    }
}

impl fmt::Display for DatabaseSizeFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n{} clusters", self.clusters)?;
        writeln!(
            f,
            "  start: {:.2} s; with a new ledger, until it is filled: {:.1} s",
            self.start.as_secs_f64(),
            self.ledger_fill.as_secs_f64()
        )?;
        writeln!(
            f,
            "  idle: {:.0} MiB, service {:.2} ms and Postgres {:.2} ms of CPU a second",
            self.idle_bytes as f64 / MIB,
            ms(self.idle_service),
            ms(self.idle_postgres)
        )?;
        writeln!(
            f,
            "  {:38} {:>7} {:>11} {:>11} {:>10} {:>8} {:>9} {:>9}",
            "request",
            "count",
            "service ms",
            "Postgres ms",
            "clients ms",
            "per s",
            "median ms",
            "p99 ms"
        )?;
        for operation in &self.operations {
            writeln!(
                f,
                "  {:38} {:>7} {:>11.3} {:>11.3} {:>10.3} {:>8.0} {:>9.1} {:>9.1}",
                operation.name,
                operation.count,
                ms(operation.service),
                ms(operation.postgres),
                ms(operation.clients),
                operation.per_second,
                ms(operation.median),
                ms(operation.p99)
            )?;
        }
        Ok(())
    }
}

const MIB: f64 = 1024.0 * 1024.0;

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}
