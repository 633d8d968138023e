//! `token`: makes tokens on the admin's machine. A token's secret is sent to nobody but the host.

mod compromised;
mod confirm;
mod host_files;
pub(super) mod issue;

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::Subcommand;
use discovery_types::api::{GrantState, GrantView, Redemption};
use discovery_types::grant::{
    DEFAULT_BOOT_SECONDS, Grant, GrantId, MAX_CIDRS, MAX_JOIN_SECONDS, TokenKind,
};
use discovery_types::name::Name;
use discovery_types::statement::StatementChain;
use discovery_types::token::Token;
use ipnet::IpNet;
use serde_json::json;

use self::issue::{DeliveryArgs, Issuance};
use super::confirm::IrreversibleAct;
use super::members::MemberDirectory;
use super::pages;
use super::printer::{Printer, TextOutput, duration, or_dash, time, time_of_seconds};
use super::requirement::{self, RequireArgs, checked};
use super::session::AdminSession;
use super::{CliError, RemoteArgs};
use crate::server::parse_duration;

#[derive(Debug, clap::Args)]
pub(super) struct TokenArgs {
    #[command(flatten)]
    pub(super) remote: RemoteArgs,
    #[command(subcommand)]
    command: TokenCommand,
}

#[derive(Debug, Subcommand)]
enum TokenCommand {
    /// Make a token and print the join bundle that a host needs
    #[command(after_help = "\
Examples:
  muster-discovery token create --cluster demo --uses 1 --name db-1 --out db-1.bundle
  muster-discovery token create --cluster demo --uses 1 --cidr 10.1.0.7 --out db-2.bundle
  muster-discovery token create --cluster demo --ttl 10m --cidr 10.1.0.0/16 --out demo.bundle
  muster-discovery token create --cluster demo --kind join --name db-4 --out db-4.bundle
  muster-discovery token create --cluster demo --kind join --replace db-2 --out db-5.bundle
  muster-discovery token create --cluster demo --uses 1 --print-cloud-init --out db-1.yaml
  muster-discovery token create --cluster demo --require aws:account=123456789012,max-age=15m

A boot token is for a cluster that forms, a join ticket (--kind join) for one that runs: it is worth
one new member, for 15 minutes at most, and belongs to the first host that redeems it. The cluster's
own agents add that host as a learner and make it a voter when it has caught up; with --replace they
remove the member that it comes for.

The token's secret is made on this machine; the service gets only its public half. Until the cluster
commits, whoever has the bundle can take as many seats as it has uses: with a bundle for all of them
(the third example), the whole cluster. Where each host can be handed a bundle of its own, make each
worth one use and bind it to a name or an address. Hand it over as you would a password, and revoke
it with `token revoke` if it went astray.

With --require, a host must also show an identity document that its cloud has signed: start its agent
with --identity-from. The service needs the cloud's keys for that (serve --identity-keys).")]
    Create(CreateArgs),
    /// List tokens, the newest first
    List {
        /// Name or id of the cluster [default: all clusters]
        #[arg(long, value_name = "CLUSTER")]
        cluster: Option<String>,
        /// List at most this many tokens [default: all]
        #[arg(long, value_name = "N")]
        limit: Option<NonZeroUsize>,
    },
    /// Show a token's grant, and the hosts that have redeemed it
    Show {
        /// The token's id, as `token list` prints it
        id: GrantId,
    },
    /// Confirm tokens that a change of the database has made void
    #[command(after_help = "\
Examples:
  muster-discovery token confirm 2zqkq3s5vdyfa6ai
  muster-discovery token confirm --all --cluster demo

When Postgres fails over, or an older copy of its data is put back, the service can't know which
tokens were revoked in what was lost. So all earlier tokens are void, and hosts with such a bundle
wait. The issuer knows: what is confirmed here admits hosts again, until the next such change. A join
ticket isn't confirmed; make another one.")]
    Confirm(confirm::ConfirmArgs),
    /// Revoke a token that somebody else may have, and say what to do about the hosts that used it
    #[command(after_help = "\
Examples:
  muster-discovery token compromised 2zqkq3s5vdyfa6ai

The token is revoked first. Then this lists every host that has redeemed it: name, key, address, zone,
time, seat or member, and its certificates with serial number and end. While the cluster forms, all of
them lose their seats, and get others only with another token. For those that are not yours, it prints the commands that take back what else they have:
a change that waits, a membership and the certificates with it. It does none of that by itself, for only
you know which hosts are yours.")]
    Compromised {
        /// The token's id, as `token list` prints it
        id: GrantId,
        /// Skip the confirmation prompt
        #[arg(long)]
        yes: bool,
    },
    /// Revoke a token: no new host can redeem it, and hosts keep the seats that they took with it
    Revoke {
        /// The token's id, as `token list` prints it
        id: GrantId,
        /// Skip the confirmation prompt
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, clap::Args)]
struct CreateArgs {
    /// Name or id of the cluster
    #[arg(long, value_name = "CLUSTER")]
    cluster: String,
    /// Kind of token: for a cluster that forms (boot), or for a new member of a running one (join)
    #[arg(long, value_name = "KIND", value_enum, default_value_t = TokenKindArgument::Boot)]
    kind: TokenKindArgument,
    /// Name or id of the member that the new one replaces, with --kind join
    #[arg(long, value_name = "MEMBER")]
    replace: Option<String>,
    /// Time in which the token can be redeemed [default: 1h, at most 24h; join: 15m, which is the
    /// most]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    ttl: Option<Duration>,
    /// Addresses that may redeem the token and that members may have; may be repeated
    #[arg(long, value_name = "CIDR", value_parser = parse_block)]
    cidr: Vec<IpNet>,
    /// Only name that the member may have
    #[arg(long, value_name = "NAME")]
    name: Option<Name>,
    /// Only zone that the member may be in, as its agent says (muster-agent run --zone)
    #[arg(long, value_name = "ZONE")]
    zone: Option<Name>,
    /// Number of seats that the token is worth [default: the cluster's size; 1 with --name or
    /// --kind join]
    #[arg(long, value_name = "N")]
    uses: Option<u8>,
    #[command(flatten)]
    require: RequireArgs,
    #[command(flatten)]
    delivery: DeliveryArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum TokenKindArgument {
    Boot,
    Join,
}

impl From<TokenKindArgument> for TokenKind {
    fn from(kind: TokenKindArgument) -> Self {
        match kind {
            TokenKindArgument::Boot => TokenKind::Boot,
            TokenKindArgument::Join => TokenKind::Join,
        }
    }
}

pub(super) async fn run(args: TokenArgs, printer: &mut Printer) -> Result<(), CliError> {
    let session = AdminSession::open(&args.remote)?;
    match args.command {
        TokenCommand::Create(create) => self::create(&session, create, printer).await,
        TokenCommand::List { cluster, limit } => {
            let cluster = match cluster {
                Some(cluster) => Some(session.cluster(&cluster).await?.cluster),
                None => None,
            };
            let limit = limit.map(NonZeroUsize::get);
            let list = pages::grants(&session, cluster, limit, printer).await?;
            let output = json!({ "grants": list.items, "has_more": list.has_more });
            printer.print_value(&output, |out| {
                let header =
                    ["ID", "CLUSTER", "KIND", "STATE", "KEYS", "USES", "EXPIRES", "ISSUER"];
                let rows = list.items.iter().map(|view| {
                    let name = view.cluster_name.as_ref().map(ToString::to_string);
                    row(view, name.unwrap_or_else(|| view.grant.cluster.to_string()))
                });
                out.table(header, rows);
            })?;
            list.note_if_cut(printer);
            note_void(&list.items, printer);
            Ok(())
        }
        TokenCommand::Show { id } => {
            let view = session.client.show_grant(id).await?;
            let hosts = session.client.redemptions(id).await?.redemptions;
            show_with_hosts(printer, &view, &hosts)?;
            note_void(&[view], printer);
            Ok(())
        }
        TokenCommand::Compromised { id, yes } => compromised::run(&session, id, yes, printer).await,
        TokenCommand::Confirm(args) => confirm::confirm(&session, args, printer).await,
        TokenCommand::Revoke { id, yes } => {
            let ends = format!("Token {id} admits no further host. Seats that are taken stay.");
            IrreversibleAct { consequences: vec![ends], name: &id.to_string() }
                .confirm(yes, printer)?;
            let view = session.client.revoke_grant(id).await?;
            show(printer, &view)
        }
    }
}

/// Says what to do about void tokens, if there are any.
fn note_void(views: &[GrantView], printer: &mut Printer) {
    if let Some(view) = views.iter().find(|view| view.state == GrantState::Void) {
        printer.note(&format!(
            "void: the database was changed after the token was made, and can have lost its \
             revocation. If it was never revoked: muster-discovery token confirm {}",
            view.grant.id
        ));
    }
}

async fn create(
    session: &AdminSession,
    args: CreateArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let kind = TokenKind::from(args.kind);
    let issuance = Issuance::prepare(session, &args.cluster, kind, &args.delivery, printer).await?;
    let replaces = match &args.replace {
        None => None,
        Some(_) if kind == TokenKind::Boot => {
            return Err(CliError::Usage("--replace needs --kind join".into()));
        }
        Some(member) => {
            let cluster = issuance.chain.newest().cluster;
            Some(MemberDirectory::fetch(session, cluster).await?.find(member)?)
        }
    };
    let token = Token::generate(kind);
    let mut grant = grant(&issuance.chain, &token, &args, issuance.now)?;
    grant.replaces = replaces;
    let view = issuance.issue(session, token, &grant, &args.delivery, printer).await?;
    if let Some(danger) = danger(&view.grant) {
        printer.warn(&danger);
    }
    Ok(())
}

/// Describes what somebody else could do with the bundle before the cluster commits.
fn danger(grant: &Grant) -> Option<String> {
    let from = match grant.cidrs.is_empty() {
        true => "from anywhere",
        false => "from its addresses",
    };
    (grant.uses > 1).then(|| {
        format!(
            "until the commit, whoever holds this bundle can take {} seats {from}, and a majority \
             of seats is the cluster: hand it over as you would its root password. Safer: a bundle \
             for each host (--uses 1 with --name or --cidr)",
            grant.uses
        )
    })
}

/// Makes the grant of a token, after every check that needs no service.
fn grant(
    chain: &StatementChain,
    token: &Token,
    args: &CreateArgs,
    now: u64,
) -> Result<Grant, CliError> {
    let (most, life) = match args.kind {
        TokenKindArgument::Boot => (chain.newest().size, DEFAULT_BOOT_SECONDS),
        TokenKindArgument::Join => (1, MAX_JOIN_SECONDS),
    };
    let uses = args.uses.unwrap_or(if args.name.is_some() { 1 } else { most });
    if !(1..=most).contains(&uses) {
        return Err(CliError::Usage(match args.kind {
            TokenKindArgument::Boot => {
                format!("--uses must be from 1 to the cluster's size, {most}")
            }
            TokenKindArgument::Join => "a join ticket is worth one new member: --uses 1".into(),
        }));
    }
    let ttl = args.ttl.map_or(life, |ttl| ttl.as_secs());
    let longest = token.kind().max_seconds();
    if !(1..=longest).contains(&ttl) {
        return Err(CliError::Usage(format!("--ttl must be from 1s to {}", duration(longest))));
    }
    if args.cidr.len() > MAX_CIDRS {
        return Err(CliError::Usage(format!("--cidr can be given {MAX_CIDRS} times at most")));
    }
    Ok(Grant {
        version: 1,
        id: token.id(),
        kind: token.kind(),
        key: *token.public(),
        cluster: chain.newest().cluster,
        statement: chain.newest_hash(),
        uses,
        issued_at: now,
        expires_at: now.saturating_add(ttl),
        cidrs: args.cidr.clone(),
        name: args.name.clone(),
        zone: args.zone.clone(),
        replaces: None,
        replacement: None,
        require: checked(&args.require)?,
    })
}

/// Parses a network such as `10.1.0.0/16`. A single address becomes a network of one.
pub(super) fn parse_block(text: &str) -> Result<IpNet, String> {
    let alone = || text.parse::<std::net::IpAddr>().ok().map(IpNet::from);
    let block = text.parse().ok().or_else(alone);
    block.ok_or_else(|| format!("`{text}` is no block of addresses, such as 10.1.0.0/16"))
}

fn row(view: &GrantView, cluster: String) -> [String; 8] {
    let grant = &view.grant;
    [
        grant.id.to_string(),
        cluster,
        grant.kind.to_string(),
        view.state.as_str().into(),
        view.keys.to_string(),
        grant.uses.to_string(),
        time_of_seconds(grant.expires_at),
        view.issuer.to_string(),
    ]
}

fn show(printer: &mut Printer, view: &GrantView) -> Result<(), CliError> {
    printer.print_value(view, |out| write_grant(out, view))
}

fn show_with_hosts(
    printer: &mut Printer,
    view: &GrantView,
    hosts: &[Redemption],
) -> Result<(), CliError> {
    let mut value = json!(view);
    value["redemptions"] = json!(hosts);
    printer.print_value(&value, |out| {
        write_grant(out, view);
        write_hosts(out, hosts);
    })
}

fn write_grant(out: &mut TextOutput<'_>, view: &GrantView) {
    let grant = &view.grant;
    let cidrs = grant.cidrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    out.fields(&[
        ("id", grant.id.to_string()),
        ("kind", grant.kind.to_string()),
        ("state", view.state.as_str().into()),
        ("cluster", grant.cluster.to_string()),
        ("uses", grant.uses.to_string()),
        ("keys seen", view.keys.to_string()),
        ("issued", time_of_seconds(grant.issued_at)),
        ("expires", time_of_seconds(grant.expires_at)),
        ("issuer", view.issuer.to_string()),
        ("addresses", if cidrs.is_empty() { "any".into() } else { cidrs }),
        ("name", or_dash(grant.name.as_ref())),
        ("zone", or_dash(grant.zone.as_ref())),
        ("replaces", or_dash(grant.replaces)),
        ("requires", requirement::typed(grant)),
    ]);
}

/// Writes the hosts that have redeemed a token.
fn write_hosts(out: &mut TextOutput<'_>, hosts: &[Redemption]) {
    if hosts.is_empty() {
        return;
    }
    out.line("");
    let rows = hosts.iter().map(|host| {
        [
            host.name.to_string(),
            host.agent.to_string(),
            or_dash(host.address.as_ref()),
            or_dash(host.instance.as_ref()),
            or_dash(host.zone.as_ref()),
            time(host.at_ms),
            or_dash(host.seat),
            or_dash(host.change),
            or_dash(host.member),
        ]
    });
    let header =
        ["HOST", "KEY ID", "FROM", "INSTANCE", "ZONE", "FIRST", "SEAT", "CHANGE", "MEMBER"];
    out.table(header, rows);
}

#[cfg(test)]
mod tests;
