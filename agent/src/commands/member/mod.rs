//! `member`: lists the members and changes them.

mod change;
mod list;
mod plan;
mod replace;
pub(in crate::commands) mod survey;
pub(in crate::commands) mod wait;

use std::time::Duration;

use discovery_types::text::printable;
use serde::Serialize;

use self::survey::Survey;
use crate::cli::{ClusterAccess, MemberCommand, MemberSubcommand};
use crate::cluster::{ClusterApiClient, ClusterError, ClusterMember, ClusterRefusal};
use crate::commands::printer::Printer;
use crate::endpoint::{ClientEndpoint, ClientTlsIdentity};
use crate::exit::{ExitError, FailureKind, error_chain};
use crate::observe::status::AgentStatus;
use crate::plan::Warning;
use crate::state::{self, Layout, journal, known};

/// Runs `member` with the subcommand that was typed.
pub(crate) async fn run(typed: &MemberCommand, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    let done = run_subcommand(typed, printer).await;
    done.map_err(|end| explain_missing_scheme(end, &typed.access))
}

/// Adds to an error that an endpoint had no scheme and was taken for http. A member that serves TLS
/// closes such a connection without telling why.
fn explain_missing_scheme(end: ExitError, access: &ClusterAccess) -> ExitError {
    let ExitError::Cluster(kind @ (FailureKind::Unreachable | FailureKind::Unknown), text) = end
    else {
        return end;
    };
    match access.endpoints.iter().map(|url| url.trim()).find(|url| !url.contains("://")) {
        Some(endpoint) if access.cert.is_none() => ExitError::Cluster(
            kind,
            format!(
                "{text}. {endpoint} has no scheme, and http was taken for it: if its member serves TLS, \
                 say --endpoints https://{endpoint} with --cacert, --cert and --key"
            ),
        ),
        _ => ExitError::Cluster(kind, text),
    }
}

async fn run_subcommand(typed: &MemberCommand, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    let mut answers = CommandOutput { printer, json: typed.access.json };
    if let MemberSubcommand::Wait(wait) = &typed.verb {
        let patience = Duration::from_secs(wait.patience.patience);
        return wait::wait_until_healthy(&typed.access, patience, &mut answers).await;
    }
    let cluster = cluster_client(&typed.access)?;
    match &typed.verb {
        MemberSubcommand::List => list::run(&cluster, &mut answers).await,
        MemberSubcommand::Plan(typed) => plan::run(&cluster, typed, &mut answers).await,
        MemberSubcommand::Add(add) => change::add(&cluster, add, &mut answers).await,
        MemberSubcommand::Promote(promote) => {
            change::promote(&cluster, promote, &mut answers).await
        }
        MemberSubcommand::Update(update) => change::update(&cluster, update, &mut answers).await,
        MemberSubcommand::Remove(remove) => change::remove(&cluster, remove, &mut answers).await,
        MemberSubcommand::Replace(replace) => replace::run(&cluster, replace, &mut answers).await,
        MemberSubcommand::Wait(_) => Ok(()),
        MemberSubcommand::MoveLeader(to) => change::move_leader(&cluster, to, &mut answers).await,
    }
}

/// Returns a client of the cluster: at the given endpoints, or this host's own cluster.
pub(crate) fn cluster_client(access: &ClusterAccess) -> Result<ClusterApiClient, ExitError> {
    let layout = Layout::new_read_only(&access.data_dir)
        .map_err(|error| ExitError::Usage(format!("--data-dir: {error}")))?;
    let typed = match (&access.cacert, &access.cert, &access.key) {
        (Some(ca), Some(certificate), Some(key)) => {
            Some(ClientTlsIdentity::load(ca, certificate, key).map_err(usage)?)
        }
        _ => None,
    };
    if access.endpoints.is_empty() {
        if typed.is_some() {
            return Err(ExitError::Usage(
                "--cert says as whom; say where with --endpoints".to_owned(),
            ));
        }
        return own_cluster_client(&layout);
    }
    // Without certificates on the command line, use the certificate of this host's agent, if there
    // is one.
    let identity = match typed {
        Some(identity) => Some(identity),
        None if layout.tls().join("client.crt").exists() => {
            Some(ClientTlsIdentity::load_own(&layout.tls()).map_err(usage)?)
        }
        None => None,
    };
    let endpoints: Result<Vec<ClientEndpoint>, _> = access
        .endpoints
        .iter()
        .map(|url| ClientEndpoint::parse(url.trim(), identity.as_ref()))
        .collect();
    Ok(ClusterApiClient::new(endpoints.map_err(usage)?))
}

/// Returns a client that tries this host's own node first. If that node can't answer (a learner
/// can't), the client tries the members that the cluster confirmed last. After them, it tries those
/// in the journal.
fn own_cluster_client(layout: &Layout) -> Result<ClusterApiClient, ExitError> {
    let unknown = || {
        ExitError::Usage(format!(
            "no node is known in {}: say where the agent's state lies with --data-dir, or which \
             members to ask with --endpoints",
            layout.root().display()
        ))
    };
    let own = own_endpoint(layout)?;
    let identity = match (ClientTlsIdentity::load_own(&layout.tls()), &own) {
        (Err(_), None) => return Err(unknown()),
        (identity, _) => identity.map_err(usage)?,
    };
    let loaded = journal::read(layout).map_err(|error| ExitError::Failed(error_chain(&error)))?;
    let listed = known::read(layout).into_iter().flat_map(|member| member.client_urls);
    let urls = listed.chain(loaded.iter().flat_map(|(_, loaded)| loaded.client_urls()));
    let endpoints = urls.filter_map(|url| ClientEndpoint::of_member(&url, Some(&identity)).ok());
    let others: Vec<ClientEndpoint> = endpoints.collect();
    if own.is_none() && others.is_empty() {
        return Err(unknown());
    }
    let own = ClusterApiClient::new(own.into_iter().collect());
    Ok(own.with_endpoints_of(&ClusterApiClient::new(others)))
}

/// Describes the phase of this host's agent if the agent has no certificate of a cluster yet.
/// Otherwise returns `None`.
fn phase_before_membership(layout: &Layout, status: &AgentStatus) -> Option<String> {
    if layout.tls().join("client.crt").exists() {
        return None;
    }
    let (phase, reason) = (status.phase.as_str(), status.reason.as_deref());
    let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
    Some(format!("this host is no member of a cluster yet; its agent is {phase}{reason}"))
}

/// Returns the endpoint of this host's node. `None` while the agent starts and doesn't know it yet.
fn own_endpoint(layout: &Layout) -> Result<Option<ClientEndpoint>, ExitError> {
    let read =
        state::read(&layout.status()).map_err(|error| ExitError::Failed(error_chain(&error)))?;
    let status: Option<AgentStatus> = read.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    if let Some(why) = status.as_ref().and_then(|status| phase_before_membership(layout, status)) {
        return Err(ExitError::Failed(why));
    }
    let endpoint = status.as_ref().and_then(|status| status.own_node(&layout.tls()));
    endpoint.transpose().map_err(usage)
}

fn usage(error: impl std::error::Error) -> ExitError {
    ExitError::Usage(error_chain(&error))
}

impl From<ClusterError> for ExitError {
    fn from(error: ClusterError) -> Self {
        let kind = match &error {
            ClusterError::Endpoint(_) => return Self::Usage(error_chain(&error)),
            ClusterError::Refused { refusal: ClusterRefusal::NotSupportedForLearner, .. } => {
                let text = "whoever was asked is a learner, which knows too little to answer: ask a \
                            voter, with --endpoints";
                return Self::Cluster(FailureKind::Refused, text.to_owned());
            }
            ClusterError::Refused { .. } => FailureKind::Refused,
            ClusterError::Stale { .. } => FailureKind::Stale,
            ClusterError::CarriedOut { .. } => FailureKind::CarriedOut,
            ClusterError::Unreachable(_) | ClusterError::Unavailable { .. } => {
                FailureKind::Unreachable
            }
            ClusterError::Ambiguous { .. } => FailureKind::Unknown,
        };
        Self::Cluster(kind, error_chain(&error))
    }
}

/// State of the members of this host's cluster, as far as they answer this host.
#[derive(Debug, Default, Serialize)]
pub(crate) struct PeerReport {
    /// If too few members answer for the cluster to serve: which ones are missing, and the next
    /// step.
    pub no_quorum: Option<String>,
    /// The members that don't answer this host, each with the reason.
    #[serde(rename = "silent_members")]
    pub silent: Vec<String>,
    /// The leader, according to a member that answers.
    pub leader: Option<String>,
}

/// Gets the list of members from the node at `endpoint`, and asks each member for its status. Needs
/// no leader.
pub(crate) async fn report_peers(endpoint: &ClientEndpoint) -> PeerReport {
    let Some(survey) =
        Survey::take_without_leader(&ClusterApiClient::new(vec![endpoint.clone()])).await
    else {
        return PeerReport::default();
    };
    let (silent, leader) = survey.silent_members();
    PeerReport { no_quorum: survey.observed_cluster().missing_quorum_advice(), silent, leader }
}

/// Printer of a command's result and notes.
struct CommandOutput<'p, 'o> {
    printer: &'p mut Printer<'o>,
    json: bool,
}

impl CommandOutput<'_, '_> {
    /// Prints the result: as JSON, or as the text that `text` returns.
    fn print_result<T: Serialize>(
        &mut self,
        value: &T,
        text: impl FnOnce() -> String,
    ) -> Result<(), ExitError> {
        let text = if self.json {
            serde_json::to_string_pretty(value).expect("answers are plain structs")
        } else {
            text()
        };
        self.printer.line(&text).map_err(|error| ExitError::Failed(error.to_string()))
    }

    /// Prints a note to standard error: as text, or with `--json` as one JSON document per line.
    fn print_note(&self, text: &str) {
        let lines: Vec<String> = text.lines().map(|line| printable(line).into_owned()).collect();
        let line = if self.json {
            serde_json::json!({ "note": lines.join("\n") }).to_string()
        } else {
            lines.join("\n")
        };
        // If standard error is closed, the note is lost and the command goes on.
        let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{line}\n").as_bytes());
    }

    /// Prints the warnings of a plan as notes.
    fn print_warnings(&self, warnings: &[Warning]) {
        for warning in warnings {
            self.print_note(&format!("note: {warning}"));
        }
    }
}

/// Finds the member that was typed: by its name, or else by its id or a peer URL.
fn find_member<'a>(
    members: &'a [ClusterMember],
    typed: &str,
) -> Result<&'a ClusterMember, ExitError> {
    let mut named = members.iter().filter(|member| member.is_started() && member.name == typed);
    match (named.next(), named.next()) {
        (Some(member), None) => return Ok(member),
        (Some(_), Some(_)) => {
            return Err(ExitError::Usage(format!(
                "several members are called {typed}: say the id"
            )));
        }
        (None, _) => {}
    }
    let id = typed.parse().ok();
    let is_meant = |member: &&ClusterMember| {
        Some(member.id) == id || member.peer_urls.iter().any(|url| url == typed)
    };
    members.iter().find(is_meant).ok_or_else(|| no_such_member(members, typed))
}

/// Returns the usage error for a member that isn't in the list. A member has a name only once its
/// node has started. Before that, its id or one of its peer URLs has to be typed.
fn no_such_member(members: &[ClusterMember], typed: &str) -> ExitError {
    let describe = |member: &ClusterMember| match member.is_started() {
        true => format!("{} ({})", member.id, member.name),
        false => format!("{} (not started, {})", member.id, member.peer_urls.join(",")),
    };
    let known: Vec<String> = members.iter().map(describe).collect();
    let unnamed = members.iter().any(|member| !member.is_started());
    let next =
        if unnamed { "; say the id of one that has not started: it has no name yet" } else { "" };
    ExitError::Usage(format!("no member {typed} here; the members are {}{next}", known.join(", ")))
}
