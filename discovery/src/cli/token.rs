//! `token`: makes tokens on the admin's machine. A token's secret is sent to nobody but the host.

mod confirm;
mod host_files;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use discovery_types::api::{GrantState, GrantView};
use discovery_types::bundle::Bundle;
use discovery_types::client::ClientError;
use discovery_types::digest::Digest;
use discovery_types::grant::{
    DEFAULT_BOOT_SECONDS, Grant, GrantId, MAX_CIDRS, MAX_JOIN_SECONDS, TokenKind,
};
use discovery_types::name::Name;
use discovery_types::service::VerifiedService;
use discovery_types::statement::StatementChain;
use discovery_types::token::Token;
use ipnet::IpNet;
use secrecy::{ExposeSecret, SecretString};
use serde_json::json;

use self::host_files::HostFilesArgs;
use super::confirm::IrreversibleAct;
use super::members::MemberDirectory;
use super::pages;
use super::printer::{Printer, duration, or_dash, time_of_seconds};
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

A boot token is for a cluster that forms, a join ticket (--kind join) for one that runs: it is worth
one new member, for 15 minutes at most, and belongs to the first host that redeems it. The cluster's
own agents add that host as a learner and make it a voter when it has caught up; with --replace they
remove the member that it comes for.

The token's secret is made on this machine; the service gets only its public half. Until the cluster
commits, whoever has the bundle can take as many seats as it has uses: with a bundle for all of them
(the third example), the whole cluster. Where each host can be handed a bundle of its own, make each
worth one use and bind it to a name or an address. Hand it over as you would a password, and revoke
it with `token revoke` if it went astray.")]
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
    /// Show a token's grant
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
    /// Revoke a token: no new host can redeem it, and taken seats stay
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
    /// Number of seats that the token is worth [default: the cluster's size; 1 with --name or
    /// --kind join]
    #[arg(long, value_name = "N")]
    uses: Option<u8>,
    /// Write what has the bundle in it to a new file (mode 0600) instead of stdout
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    host_files: HostFilesArgs,
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
            show(printer, &view)?;
            note_void(&[view], printer);
            Ok(())
        }
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
    if let Some(out) = &args.out
        && out.exists()
    {
        // Check this before any request.
        return Err(muster_files::Error::Exists(out.clone()).into());
    }
    let cluster = session.cluster(&args.cluster).await?;
    let (chain, service) = session.statements(cluster.cluster).await?;
    let service = service.and_then(|jws| VerifiedService::verify_kept(&jws, &chain).ok());
    if let Some(service) = &service
        && let Some(difference) = pin_warning(&session.context.pins, service)
    {
        printer.warn(&difference);
    }
    let kind = TokenKind::from(args.kind);
    session.check_role_in_statement(&chain, kind.action())?;
    let replaces = match &args.replace {
        None => None,
        Some(_) if kind == TokenKind::Boot => {
            return Err(CliError::Usage("--replace needs --kind join".into()));
        }
        Some(member) => Some(MemberDirectory::fetch(session, cluster.cluster).await?.find(member)?),
    };
    let now_ms = session.client.context().await?.now_ms;
    let own_ms = jiff::Timestamp::now().as_millisecond();
    if let Some(difference) = clock_warning(now_ms, own_ms) {
        printer.warn(&difference);
    }
    let now = now_ms.div_euclid(1000);
    let token = Token::generate(kind);
    let mut grant = grant(&chain, &token, &args, u64::try_from(now).unwrap_or_default())?;
    grant.replaces = replaces;
    let bundle = Bundle {
        urls: session.context.urls.clone(),
        pins: session.context.pins.clone(),
        cluster: cluster.cluster,
        statement: chain.newest_hash(),
        token,
    };
    let text = args.host_files.form().text(&bundle.expose());
    if let Some(out) = &args.out {
        // Write the file first: if that fails, no grant exists for a token that nobody has.
        muster_files::create(out, format!("{}\n", text.expose_secret()).as_bytes(), 0o600)?;
    }
    let put = put_grant(session, &grant).await;
    if let (Err(error), Some(out)) = (&put, &args.out)
        && !matches!(error, CliError::Client(ClientError::Interrupted { .. }))
    {
        fs_err::remove_file(out).map_err(|source| CliError::file("removing", out, source))?;
    }
    print_bundle(&text, &put?, &args, printer)
}

/// Returns a warning if the bundle's pins are others than those announced to the cluster's agents.
/// A host that joins follows the announcement.
fn pin_warning(pins: &[Digest], service: &VerifiedService) -> Option<String> {
    let announced = &service.statement().pins;
    let fits = pins.iter().any(|pin| announced.contains(pin));
    (!fits).then(|| {
        format!(
            "the pins in this context are not those that were announced to the cluster's agents \
             (number {}): a host that joins won't reach this service any more. Announce it: \
             muster-discovery service announce",
            service.sequence()
        )
    })
}

async fn put_grant(session: &AdminSession, grant: &Grant) -> Result<GrantView, CliError> {
    let view = session.client.put_grant(&grant.sign(&session.key)).await?;
    match view.grant == *grant {
        true => Ok(view),
        false => Err(CliError::Answer("it stored another grant than the one sent".into())),
    }
}

/// Prints `text`, which has the bundle in it, or the path of its file.
fn print_bundle(
    text: &SecretString,
    view: &GrantView,
    args: &CreateArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let mut value = json!({
        "id": view.grant.id,
        "cluster": view.grant.cluster,
        "uses": view.grant.uses,
        "expires_at": view.grant.expires_at,
    });
    let expires = time_of_seconds(view.grant.expires_at);
    let about = format!("token {}: {} use(s), until {expires}", view.grant.id, view.grant.uses);
    match (&args.out, args.host_files.unit()) {
        (Some(file), None) => {
            value["file"] = json!(file);
            printer.print_value(&value, |out| out.line(&file.display().to_string()))?;
        }
        (Some(file), Some(unit)) => {
            value["file"] = json!(file);
            value["systemd"] = json!(unit);
            printer.print_value(&value, |out| out.line(unit.trim_end()))?;
            printer.note(&format!(
                "copy {} to /etc/muster/join.bundle on the host (mode 0600), and what is printed to \
                 /etc/systemd/system/muster-agent.service; then: systemctl enable --now muster-agent",
                file.display()
            ));
        }
        (None, _) => {
            value[args.host_files.form().json_name()] = json!(text.expose_secret());
            printer.print_value(&value, |out| out.line(text.expose_secret()))?;
        }
    }
    printer.note(&about);
    if view.state == GrantState::Expired {
        printer.warn(
            "it has expired already: the clock of the service's Postgres was set ahead. Look at that \
             clock, and mint another one once it is right",
        );
    }
    if let Some(danger) = danger(&view.grant) {
        printer.warn(&danger);
    }
    Ok(())
}

/// Maximum clock difference in milliseconds: an agent whose clock differs more signs nothing.
const SKEW_MS: u64 = 30_000;

/// Warns if this machine's clock and the service's differ. Tokens expire by the clock of the
/// service's Postgres. If that clock is wrong, tokens expire at once, or far too late.
fn clock_warning(service_ms: i64, own_ms: i64) -> Option<String> {
    let off = service_ms.saturating_sub(own_ms);
    let way = if off > 0 { "ahead of" } else { "behind" };
    (off.unsigned_abs() > SKEW_MS).then(|| {
        format!(
            "the service's clock (its Postgres') is {} s {way} this machine's: tokens expire by the \
             service's, and hosts that are more than 30 s off it form nothing. Set whichever is \
             wrong",
            off.unsigned_abs() / 1_000
        )
    })
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
    let (most, life) = match token.kind() {
        TokenKind::Boot => (chain.newest().size, DEFAULT_BOOT_SECONDS),
        TokenKind::Join => (1, MAX_JOIN_SECONDS),
    };
    let uses = args.uses.unwrap_or(if args.name.is_some() { 1 } else { most });
    if !(1..=most).contains(&uses) {
        return Err(CliError::Usage(match token.kind() {
            TokenKind::Boot => format!("--uses must be from 1 to the cluster's size, {most}"),
            TokenKind::Join => "a join ticket is worth one new member: --uses 1".into(),
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
        // Agents report no zone, so a token bound to one could never be redeemed.
        zone: None,
        replaces: None,
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
        state(view.state).into(),
        view.keys.to_string(),
        grant.uses.to_string(),
        time_of_seconds(grant.expires_at),
        view.issuer.to_string(),
    ]
}

fn show(printer: &mut Printer, view: &GrantView) -> Result<(), CliError> {
    let grant = &view.grant;
    printer.print_value(view, |out| {
        let cidrs = grant.cidrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        out.fields(&[
            ("id", grant.id.to_string()),
            ("kind", grant.kind.to_string()),
            ("state", state(view.state).into()),
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
        ]);
    })
}

fn state(state: GrantState) -> &'static str {
    match state {
        GrantState::Valid => "valid",
        GrantState::Expired => "expired",
        GrantState::Revoked => "revoked",
        GrantState::Void => "void",
        GrantState::Closed => "closed",
    }
}

#[cfg(test)]
mod tests;
