//! `audit`: reads the event chains, and verifies that nobody has changed them.
//!
//! Each event's hash covers the event and the hash before it. Anybody who can write to the database
//! can compute a whole new chain, so a chain alone proves little. An auditor therefore keeps a
//! *checkpoint* elsewhere. A chain that is read later has to continue it.

mod chain;

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Subcommand;
use discovery_types::api::{ClusterQuery, EventQuery, EventView, MAX_PAGE};
use serde::Serialize;
use serde_json::json;
use uuid::Uuid;

pub(super) use self::chain::AuditError;
use self::chain::{ChainHead, ChainVerifier, Checkpoint};
use super::printer::{Printer, time};
use super::session::{AdminSession, repeat_while_busy};
use super::{CliError, RemoteArgs, pages};

/// Interval between two lines that report how many chains are done.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

#[derive(Debug, clap::Args)]
pub(super) struct AuditArgs {
    #[command(flatten)]
    pub(super) remote: RemoteArgs,
    #[command(subcommand)]
    command: AuditCommand,
}

#[derive(Debug, Subcommand)]
enum AuditCommand {
    /// Show the newest events of a cluster, or of the service itself
    Tail {
        /// Name or id of the cluster [default: the service's own events]
        #[arg(long, value_name = "CLUSTER")]
        cluster: Option<String>,
        /// Show this many events
        #[arg(long, value_name = "N", default_value_t = 20,
              value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_PAGE)))]
        limit: u16,
    },
    /// Verify the hashes of all events, and that they continue those of the last verification
    #[command(after_help = "\
Examples:
  muster-discovery audit verify --checkpoint ~/muster.checkpoint
  muster-discovery audit verify --cluster demo

Each event's hash covers the event and the one before it. With --checkpoint, the end of each chain is
kept in a file on this machine. A later run with that file fails if a chain has lost or changed any
event since: keep it where whoever has the service can't write.")]
    Verify {
        /// Name or id of the cluster [default: the service's own events and those of all clusters]
        #[arg(long, value_name = "CLUSTER")]
        cluster: Option<String>,
        /// File with the ends of the chains; made if it is missing, and renewed after success
        #[arg(long, value_name = "FILE")]
        checkpoint: Option<PathBuf>,
    },
    /// Print events as JSON lines, after verifying them
    Export {
        /// Name or id of the cluster [default: the service's own events and those of all clusters]
        #[arg(long, value_name = "CLUSTER")]
        cluster: Option<String>,
        /// Write the lines to a new file (mode 0600) instead of stdout
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
}

/// A chain to be read: the id of its stream, and a name for people.
struct NamedChain {
    stream: Uuid,
    name: String,
}

impl NamedChain {
    /// Returns the chain of the service itself.
    fn of_service() -> Self {
        Self { stream: Uuid::nil(), name: "the service".to_owned() }
    }
}

pub(super) async fn run(args: AuditArgs, printer: &mut Printer) -> Result<(), CliError> {
    let session = AdminSession::open(&args.remote)?;
    match args.command {
        AuditCommand::Tail { cluster, limit } => {
            tail(&session, cluster.as_deref(), limit, printer).await
        }
        AuditCommand::Verify { cluster, checkpoint } => {
            verify(&session, cluster.as_deref(), checkpoint.as_deref(), printer).await
        }
        AuditCommand::Export { cluster, out } => {
            export(&session, cluster.as_deref(), out.as_deref(), printer).await
        }
    }
}

/// Returns the chain of the named cluster, or those of the service and of all clusters.
async fn chains(
    session: &AdminSession,
    cluster: Option<&str>,
    printer: &mut Printer,
) -> Result<Vec<NamedChain>, CliError> {
    if let Some(cluster) = cluster {
        let found = session.cluster(cluster).await?;
        return Ok(vec![NamedChain { stream: found.cluster, name: found.name.to_string() }]);
    }
    let all = pages::clusters(session, &ClusterQuery::default(), None, printer).await?;
    let named = all
        .items
        .into_iter()
        .map(|found| NamedChain { stream: found.cluster, name: found.name.to_string() });
    Ok([NamedChain::of_service()].into_iter().chain(named).collect())
}

/// Reads a whole chain, verifies it, and passes each event to `visit`. Returns the chain's end.
async fn read_chain(
    session: &AdminSession,
    chain: &NamedChain,
    known: Option<&ChainHead>,
    mut visit: impl FnMut(&EventView),
) -> Result<ChainHead, CliError> {
    let mut verifier = ChainVerifier::new(chain.stream, chain.name.clone(), known.copied());
    loop {
        let query = EventQuery {
            stream: chain.stream,
            after: Some(verifier.last()),
            limit: Some(MAX_PAGE),
        };
        let page = repeat_while_busy(async || Ok(session.client.events(&query).await?)).await?;
        for event in &page.events {
            verifier.add(event)?;
            visit(event);
        }
        if page.events.is_empty() || verifier.last() >= page.last {
            return Ok(verifier.end()?);
        }
    }
}

async fn tail(
    session: &AdminSession,
    cluster: Option<&str>,
    limit: u16,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let stream = match cluster {
        Some(cluster) => session.cluster(cluster).await?.cluster,
        None => Uuid::nil(),
    };
    let query = |after, limit| EventQuery { stream, after, limit: Some(limit) };
    let last = session.client.events(&query(None, 1)).await?.last;
    let after = last.saturating_sub(u64::from(limit));
    let events = session.client.events(&query(Some(after), limit)).await?.events;
    printer.print_value(&json!({ "stream": stream, "events": events }), |out| {
        let row = |event: &EventView| {
            [
                event.number.to_string(),
                time(event.at_us / 1_000),
                event.kind.clone(),
                event.body.clone(),
            ]
        };
        out.table(["NUMBER", "AT", "EVENT", "DETAILS"], events.iter().map(row));
    })
}

/// Result of the verification of one chain, as the command prints it.
#[derive(Serialize)]
struct VerifiedChain {
    stream: Uuid,
    name: String,
    #[serde(flatten)]
    head: ChainHead,
}

async fn verify(
    session: &AdminSession,
    cluster: Option<&str>,
    file: Option<&Path>,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let mut checkpoint = match file {
        Some(file) => Checkpoint::read(file)?,
        None => Checkpoint::default(),
    };
    let chains = chains(session, cluster, printer).await?;
    if cluster.is_none()
        && let Some(gone) = checkpoint.missing(chains.iter().map(|chain| chain.stream))
    {
        return Err(AuditError::Gone { stream: gone }.into());
    }
    let mut verified = Vec::new();
    let mut progress = Progress::new(chains.len());
    for chain in chains {
        progress.note(verified.len(), printer);
        let head = read_chain(session, &chain, checkpoint.head(chain.stream), |_| {}).await?;
        checkpoint.set_head(chain.stream, head);
        verified.push(VerifiedChain { stream: chain.stream, name: chain.name, head });
    }
    if let Some(file) = file {
        checkpoint.write(file)?;
    }
    printer.print_value(&json!({ "chains": verified }), |out| {
        let row = |chain: &VerifiedChain| {
            [chain.name.clone(), chain.head.number.to_string(), chain.head.hash.to_string()]
        };
        out.table(["CHAIN", "EVENTS", "LAST HASH"], verified.iter().map(row));
    })
}

async fn export(
    session: &AdminSession,
    cluster: Option<&str>,
    out: Option<&Path>,
    printer: &mut Printer,
) -> Result<(), CliError> {
    if let Some(out) = out
        && out.exists()
    {
        // Refuse an existing file before the first request, so that nothing is read in vain.
        return Err(muster_files::Error::Exists(out.to_owned()).into());
    }
    let chains = chains(session, cluster, printer).await?;
    let mut file = match out {
        Some(out) => Some(new_file(out)?),
        None => None,
    };
    let (mut total, mut progress) = (0, Progress::new(chains.len()));
    for (done, chain) in chains.iter().enumerate() {
        progress.note(done, printer);
        // Hold the lines of one chain at a time: the history of all clusters can be larger than
        // memory.
        let mut lines = String::new();
        let head = read_chain(session, chain, None, |event| {
            let mut line = json!(event);
            line["stream"] = json!(chain.stream);
            line["cluster"] = json!((!chain.stream.is_nil()).then_some(&chain.name));
            lines.push_str(&line.to_string());
            lines.push('\n');
        });
        total += head.await?.number;
        match (&mut file, out) {
            (Some(file), Some(out)) => file
                .write_all(lines.as_bytes())
                .map_err(|source| CliError::file("writing", out, source))?,
            _ => printer.print_lines(&lines)?,
        }
    }
    if let (Some(mut file), Some(out)) = (file, out) {
        let synced = file.flush().and_then(|()| file.get_ref().sync_all());
        synced.map_err(|source| CliError::file("writing", out, source))?;
        printer.print_value(&json!({ "file": out, "events": total }), |text| {
            text.line(&out.display().to_string());
        })?;
    }
    printer.note(&format!("{total} events of {} chains", chains.len()));
    Ok(())
}

/// Makes a new file that only this user can read.
fn new_file(path: &Path) -> Result<BufWriter<File>, CliError> {
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    made.map(BufWriter::new).map_err(|source| CliError::file("creating", path, source))
}

/// Tells a person how far a run over many chains is.
struct Progress {
    total: usize,
    printed_at: Instant,
}

impl Progress {
    fn new(total: usize) -> Self {
        Self { total, printed_at: Instant::now() }
    }

    /// Prints how many chains are done, at most once in each [`PROGRESS_INTERVAL`].
    fn note(&mut self, done: usize, printer: &mut Printer) {
        if self.printed_at.elapsed() >= PROGRESS_INTERVAL {
            self.printed_at = Instant::now();
            printer.note(&format!("{done} of {} chains so far", self.total));
        }
    }
}
