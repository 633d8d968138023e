//! `intent`: requests changes of running clusters. Orders are signed on this machine, and a
//! cluster's own agents carry them out.

use clap::Subcommand;
use discovery_types::api::{IntentState, IntentView, Outcome};
use discovery_types::digest::{Nonce, OperationId};
use discovery_types::order::{MAX_ORDER_SECONDS, Order, OrderedChange, VerifiedOrder};
use discovery_types::role::Action;
use discovery_types::url::NodeUrl;

use super::confirm::IrreversibleAct;
use super::members::MemberDirectory;
use super::printer::{Printer, TextOutput, or_dash, time, time_of_seconds, write_explanations};
use super::session::AdminSession;
use super::{CliError, RemoteArgs};

#[derive(Debug, clap::Args)]
pub(super) struct IntentArgs {
    #[command(flatten)]
    pub(super) remote: RemoteArgs,
    #[command(subcommand)]
    command: IntentCommand,
}

#[derive(Debug, Subcommand)]
#[command(after_help = "\
Discovery changes no membership. It hands your signed order to the cluster's own agents. The agent
beside the leader verifies the order and calls the cluster's API, and refuses a change that would
endanger the quorum. While discovery is unreachable, use muster-agent member on a member's host.

A new member, or one in another's place, needs a ticket: muster-discovery token create --kind join.")]
enum IntentCommand {
    /// Order the removal of a member, for good
    #[command(after_help = "\
Example:
  muster-discovery intent remove demo db-2 --reason 'its disk is gone' --wait")]
    Remove {
        #[command(flatten)]
        order: OrderArgs,
        /// Skip the confirmation prompt
        #[arg(long)]
        yes: bool,
    },
    /// Order new peer URLs for a member
    #[command(after_help = "\
Example:
  muster-discovery intent update demo db-2 --peer-urls https://10.1.0.9:2380 --wait

Then restart that member at its new address.")]
    Update {
        #[command(flatten)]
        order: OrderArgs,
        /// New peer URLs of the member, separated by commas
        #[arg(
            long,
            alias = "peer-url",
            value_name = "URLS",
            value_delimiter = ',',
            required = true
        )]
        peer_urls: Vec<NodeUrl>,
    },
    /// List the intents that wait or are under way
    List {
        /// Name or id of the cluster
        cluster: String,
        /// List ended intents, too, that were made within the last day
        #[arg(long)]
        all: bool,
    },
    /// Show an intent and what it waits for
    Show {
        /// Name or id of the cluster
        cluster: String,
        /// Id of the intent, as `intent list` prints it
        operation: OperationId,
        /// Wait until the intent ends; exit code 1 unless it was carried out
        #[arg(long)]
        wait: bool,
    },
    /// Withdraw an intent that no agent has begun
    Withdraw {
        /// Name or id of the cluster
        cluster: String,
        /// Id of the intent, as `intent list` prints it
        operation: OperationId,
    },
}

#[derive(Debug, clap::Args)]
struct OrderArgs {
    /// Name or id of the cluster
    cluster: String,
    /// Name or id of the member, as `cluster show` or `etcdctl member list` prints it
    member: String,
    /// Reason, recorded in the signed order
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    /// Wait until the intent ends; exit code 1 unless it was carried out
    #[arg(long)]
    wait: bool,
}

pub(super) async fn run(args: IntentArgs, printer: &mut Printer) -> Result<(), CliError> {
    let session = AdminSession::open(&args.remote)?;
    match args.command {
        IntentCommand::Remove { order, yes } => {
            let ends = format!(
                "Member {} of {} is removed for good: its data never joins this cluster again.",
                order.member, order.cluster
            );
            IrreversibleAct { consequences: vec![ends], name: &order.member }
                .confirm(yes, printer)?;
            self::order(&session, &order, None, printer).await
        }
        IntentCommand::Update { order, peer_urls } => {
            self::order(&session, &order, Some(peer_urls), printer).await
        }
        IntentCommand::List { cluster, all } => {
            let cluster = session.cluster(&cluster).await?.cluster;
            let list = session.client.intents(cluster, None, all).await?;
            printer.print_value(&list, |out| table(out, &list.intents))
        }
        IntentCommand::Show { cluster, operation, wait } => {
            let cluster = session.cluster(&cluster).await?.cluster;
            let view = session.client.intent(cluster, operation, None).await?;
            show_when_ended(&session, view, wait, printer).await
        }
        IntentCommand::Withdraw { cluster, operation } => {
            let cluster = session.cluster(&cluster).await?.cluster;
            show(printer, &session.client.withdraw_intent(cluster, operation).await?)
        }
    }
}

async fn order(
    session: &AdminSession,
    args: &OrderArgs,
    peer_urls: Option<Vec<NodeUrl>>,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let cluster = session.cluster(&args.cluster).await?.cluster;
    let chain = session.chain(cluster).await?;
    session.check_role_in_statement(&chain, Action::PutOrder)?;
    let members = MemberDirectory::fetch_settled(session, cluster).await?;
    let member = members.find(&args.member)?;
    let change = match peer_urls {
        None => OrderedChange::Remove { member },
        Some(peer_urls) => OrderedChange::Update { member, peer_urls },
    };
    let now_ms = session.client.context().await?.now_ms;
    let now = u64::try_from(now_ms.div_euclid(1_000)).unwrap_or_default();
    let order = Order {
        version: 1,
        id: Nonce::random(),
        cluster,
        statement: chain.newest_hash(),
        change,
        planned_at: members.configuration(),
        issued_at: now,
        expires_at: now.saturating_add(MAX_ORDER_SECONDS),
        reason: args.reason.clone(),
    };
    let signed = order.sign(&session.key);
    VerifiedOrder::verify(&signed, &chain).map_err(|error| CliError::Usage(error.to_string()))?;
    let view = session.client.put_order(&signed).await?;
    if view.intent.authority != signed {
        return Err(CliError::Answer("it stored another order than the one sent".into()));
    }
    show_when_ended(session, view, args.wait, printer).await
}

/// Shows an intent. With `wait`, waits for its end first.
async fn show_when_ended(
    session: &AdminSession,
    mut view: IntentView,
    wait: bool,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let mut said = String::new();
    while wait && view.state.is_live() {
        let progress = describe_progress(&view);
        if progress != said {
            printer.note(&progress);
            said = progress;
        }
        let (cluster, operation) = (view.intent.cluster, view.intent.operation);
        view = session.client.intent(cluster, operation, Some(view.rev)).await?;
    }
    show(printer, &view)?;
    use IntentState::{Added, Open, Promoted, Removed, Updated};
    match view.state {
        Promoted | Removed | Updated => Ok(()),
        Open | Added if !wait => {
            printer
                .note("An agent of the cluster carries it out: `intent show --wait` waits for it.");
            Ok(())
        }
        _ if !wait => Ok(()),
        state => Err(CliError::NotDone(state)),
    }
}

/// Describes the progress of an intent in one line.
fn describe_progress(view: &IntentView) -> String {
    let why = view.explain.first().map(|reason| reason.missing.as_str()).unwrap_or_default();
    format!("{}: {why}", view.state)
}

/// Prints a table with one line for each intent.
pub(super) fn table<'v>(
    out: &mut TextOutput<'_>,
    intents: impl IntoIterator<Item = &'v IntentView>,
) {
    let rows = intents.into_iter().map(|view| {
        [
            view.intent.operation.to_string(),
            view.intent.verb.to_string(),
            view.subject.clone(),
            or_dash(affected_member(view)),
            view.state.to_string(),
            view.by.clone(),
            time(view.made_at_ms),
        ]
    });
    out.table(["INTENT", "CHANGE", "MEMBER", "ABOUT", "STATE", "BY", "MADE"], rows);
}

/// Returns the member that the intent removes, moves or replaces: its name and id.
fn affected_member(view: &IntentView) -> Option<String> {
    let id = view.about?;
    Some(view.about_name.as_ref().map_or(id.to_string(), |name| format!("{name} ({id})")))
}

fn show(printer: &mut Printer, view: &IntentView) -> Result<(), CliError> {
    let intent = &view.intent;
    printer.print_value(view, |out| {
        let id = view.outcome.as_ref().and_then(Outcome::member);
        let mut fields = vec![
            ("intent", intent.operation.to_string()),
            ("change", intent.verb.to_string()),
            ("member", view.subject.clone()),
            ("about", or_dash(affected_member(view))),
            ("state", view.state.to_string()),
            ("by", view.by.clone()),
            ("made", time(view.made_at_ms)),
            ("begun until", time_of_seconds(intent.expires_at)),
            ("planned at", or_dash(intent.planned_at)),
            ("member id", or_dash(id)),
            ("said by", or_dash(view.reported_by.as_ref())),
        ];
        if let Some(Outcome::Refused { reason } | Outcome::Stalled { reason, .. }) = &view.outcome {
            fields.push(("reason", reason.clone()));
        }
        out.fields(&fields);
        write_explanations(out, &view.explain);
    })
}
