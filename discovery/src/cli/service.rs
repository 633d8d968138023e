//! `service`: signs where the discovery service is, for the agents of running clusters.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use discovery_types::api::{ClusterQuery, ClusterState, ClusterStates, ClusterSummary};
use discovery_types::client::{ClientConfig, DiscoveryClient};
use discovery_types::context::Context;
use discovery_types::name::Name;
use discovery_types::role::Action;
use discovery_types::service::{MAX_SEQUENCE, ServiceStatement, VerifiedService};
use discovery_types::statement::StatementChain;
use serde::Serialize;
use uuid::Uuid;

use super::printer::{Printer, time_of_seconds};
use super::session::{AdminSession, repeat_while_busy};
use super::{CliError, RemoteArgs, context, pages};

#[derive(Debug, clap::Args)]
pub(super) struct ServiceArgs {
    #[command(flatten)]
    pub(super) remote: RemoteArgs,
    #[command(subcommand)]
    command: ServiceCommand,
}

#[derive(Debug, Subcommand)]
enum ServiceCommand {
    /// Tell a cluster's agents the service's URLs and TLS keys, with an owner's signature
    #[command(after_help = "\
Examples:
  muster-discovery service announce --all
  muster-discovery service announce --all --to 'muster-context1 urls=… pins=…,… owners=…'
  muster-discovery service announce demo --to new-context.txt --out demo.service

Without --to, the URLs and pins of the context in use are announced. Agents that reach this service
take them within seconds, and put them into their cluster's own store for the others. If no agent of
a cluster reaches the service any more, take FILE to one of its hosts:
  muster-agent context set FILE

Two pins let agents accept two TLS keys: announce the old and the new one, change the service's key,
and announce the new one alone. Clusters that are still forming need new bundles instead.")]
    Announce(AnnounceArgs),
    /// Show what was announced last to a cluster's agents
    Show {
        /// Name or id of the cluster
        cluster: String,
    },
}

#[derive(Debug, clap::Args)]
struct AnnounceArgs {
    /// Name or id of the cluster
    #[arg(required_unless_present = "all")]
    cluster: Option<String>,
    /// Announce to every running cluster, and print a line for each
    #[arg(long, conflicts_with = "cluster")]
    all: bool,
    /// Context line with the URLs and pins to announce, a file that holds it, or - for stdin
    /// [default: the context in use]
    #[arg(long, value_name = "LINE|FILE|-")]
    to: Option<String>,
    /// New file to write the signed statements to, for `muster-agent context set`
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// A cluster's service statement, as the commands print it.
#[derive(Serialize)]
struct Announcement {
    cluster: Uuid,
    name: Name,
    #[serde(flatten)]
    statement: ServiceStatement,
    /// Line for `muster-agent context set`.
    line: String,
    /// Whether this command signed the statement.
    is_new: bool,
}

impl Announcement {
    fn new(cluster: &ClusterSummary, service: &VerifiedService, is_new: bool) -> Self {
        Self {
            cluster: cluster.cluster,
            name: cluster.name.clone(),
            statement: service.statement().clone(),
            line: service.to_string(),
            is_new,
        }
    }
}

pub(super) async fn run(args: ServiceArgs, printer: &mut Printer) -> Result<(), CliError> {
    let session = AdminSession::open(&args.remote)?;
    match args.command {
        ServiceCommand::Announce(args) => announce(&session, &args, printer).await,
        ServiceCommand::Show { cluster } => show(&session, &cluster, printer).await,
    }
}

async fn announce(
    session: &AdminSession,
    args: &AnnounceArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let to = args.to.as_deref().map_or_else(|| Ok(session.context.clone()), context::read)?;
    if let Some(out) = &args.out
        && out.exists()
    {
        // Refuse an existing file before the first request. Otherwise a statement could be sent and
        // then not be written to its file.
        return Err(muster_files::Error::Exists(out.clone()).into());
    }
    warn_if_silent(&to, printer).await;
    let clusters = match &args.cluster {
        Some(cluster) => vec![session.cluster(cluster).await?],
        None => running_clusters(session, printer).await?,
    };
    let (mut done, mut failed) = (Vec::new(), None);
    for cluster in &clusters {
        match repeat_while_busy(async || announce_one(session, cluster, &to).await).await {
            Ok(announced) => done.push(announced),
            Err(error) if args.all => {
                let name = &cluster.name;
                printer.warn(&format!("nothing was announced to cluster {name}: {error}"));
                failed.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    if let Some(out) = &args.out {
        write_lines(out, &done)?;
    }
    printer.print_value(&done, |out| {
        let rows = done.iter().map(|announced| {
            let what = if announced.is_new { "announced" } else { "unchanged" };
            let number = announced.statement.sequence.to_string();
            [announced.name.to_string(), what.to_owned(), number]
        });
        out.table(["CLUSTER", "SERVICE", "NUMBER"], rows);
    })?;
    if let Some(out) = &args.out {
        printer.note(&format!(
            "on a host whose agent can't reach the service: muster-agent context set {}",
            out.display()
        ));
    }
    failed.map_or(Ok(()), Err)
}

/// Warns if no service with a pinned key answers at the URLs. This is no error, because the service
/// may start there later.
async fn warn_if_silent(to: &Context, printer: &mut Printer) {
    let config = ClientConfig { urls: to.urls.clone(), pins: to.pins.clone(), key: None };
    let answer = match DiscoveryClient::new(config) {
        Ok(client) => client.context().await.map(drop),
        Err(error) => Err(error),
    };
    if let Err(error) = answer {
        printer.warn(&format!(
            "no service answers there yet with such a key, and agents that take this look for it \
             there: {}",
            error.with_causes()
        ));
    }
}

async fn running_clusters(
    session: &AdminSession,
    printer: &mut Printer,
) -> Result<Vec<ClusterSummary>, CliError> {
    let states = ClusterStates::new([ClusterState::Committed, ClusterState::Formed]);
    let query = ClusterQuery { state: Some(states), ..ClusterQuery::default() };
    Ok(pages::clusters(session, &query, None, printer).await?.items)
}

/// Returns the cluster's statements, and the service statement that was announced last.
async fn announced(
    session: &AdminSession,
    cluster: Uuid,
) -> Result<(StatementChain, Option<VerifiedService>), CliError> {
    let (chain, service) = session.statements(cluster).await?;
    let service = service.and_then(|jws| VerifiedService::verify_kept(&jws, &chain).ok());
    Ok((chain, service))
}

async fn announce_one(
    session: &AdminSession,
    cluster: &ClusterSummary,
    to: &Context,
) -> Result<Announcement, CliError> {
    let (chain, known) = announced(session, cluster.cluster).await?;
    session.check_role_in_statement(&chain, Action::AnnounceService)?;
    if let Some(known) = &known
        && (&known.statement().urls, &known.statement().pins) == (&to.urls, &to.pins)
        && VerifiedService::verify(known.jws(), &chain).is_ok()
    {
        return Ok(Announcement::new(cluster, known, false));
    }
    let now = session.client.service_now_ms().max(0).unsigned_abs() / 1_000;
    // The statement's number is at least the time in seconds. So it exceeds the number of any
    // statement that a restored database has forgotten.
    let next = known.map_or(1, |known| known.sequence().saturating_add(1)).max(now);
    let statement = ServiceStatement {
        version: 1,
        cluster: cluster.cluster,
        sequence: next.min(MAX_SEQUENCE),
        urls: to.urls.clone(),
        pins: to.pins.clone(),
        issued_at: now,
    };
    let jws = statement.sign(&session.key);
    let service = VerifiedService::verify(&jws, &chain).map_err(CliError::Service)?;
    session.client.put_service(cluster.cluster, &jws).await?;
    Ok(Announcement::new(cluster, &service, true))
}

fn write_lines(out: &Path, announced: &[Announcement]) -> Result<(), CliError> {
    let lines: Vec<&str> = announced.iter().map(|announced| announced.line.as_str()).collect();
    let text = lines.join("\n") + "\n";
    Ok(muster_files::create(out, text.as_bytes(), 0o600)?)
}

async fn show(
    session: &AdminSession,
    cluster: &str,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let cluster = session.cluster(cluster).await?;
    let (chain, Some(service)) = announced(session, cluster.cluster).await? else {
        printer.note("nothing was announced: the agents use the URLs and pins of their bundles");
        return printer.print_value(&serde_json::Value::Null, |_| {});
    };
    let signer = service.jws().kid();
    let by = chain.newest().admin(signer).map_or_else(
        || format!("{signer}, who is no admin any more"),
        |admin| admin.name.to_string(),
    );
    let said = service.statement();
    let list = |items: Vec<String>| items.join(",");
    printer.print_value(&Announcement::new(&cluster, &service, false), |out| {
        out.fields(&[
            ("cluster", format!("{} ({})", cluster.name, cluster.cluster)),
            ("number", said.sequence.to_string()),
            ("urls", list(said.urls.iter().map(ToString::to_string).collect())),
            ("pins", list(said.pins.iter().map(ToString::to_string).collect())),
            ("signed", format!("{} by {by}", time_of_seconds(said.issued_at))),
        ]);
    })
}
