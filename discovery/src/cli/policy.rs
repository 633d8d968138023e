//! `policy`: signs beforehand when a member that nobody can reach may be replaced.

use std::time::Duration;

use clap::Subcommand;
use discovery_types::api::GrantView;
use discovery_types::grant::{Grant, GrantId, MAX_CIDRS, ReplacementLimits, TokenKind};
use discovery_types::name::Name;
use discovery_types::role::{Action, roles_allow};
use discovery_types::token::Token;
use ipnet::IpNet;
use serde_json::json;

use super::confirm::IrreversibleAct;
use super::printer::{Printer, duration, or_dash, time_of_seconds};
use super::requirement::{self, RequireArgs, checked};
use super::session::AdminSession;
use super::token::issue::{DeliveryArgs, Issuance};
use super::token::parse_block;
use super::{CliError, RemoteArgs, pages};
use crate::server::parse_duration;

#[derive(Debug, clap::Args)]
pub(super) struct PolicyArgs {
    #[command(flatten)]
    pub(super) remote: RemoteArgs,
    #[command(subcommand)]
    command: PolicyCommand,
}

#[derive(Debug, Subcommand)]
enum PolicyCommand {
    /// Make a replacement policy, and print the join bundle that hosts need
    #[command(after_help = "\
Examples:
  muster-discovery policy create --cluster demo --replace-dead --cidr 10.1.0.0/16 --out demo.bundle
  muster-discovery policy create --cluster demo --replace-dead --after 10m --at-most 3 --per 24h \\
      --expires 90d --cidr 10.1.0.0/16 --require aws:account=123456789012,max-age=1h \\
      --print-cloud-init --out user-data.yaml

You sign now what may happen at night: when a member has been unreachable for --after, for its own
cluster and for a quorum of the members' agents, a host that came with this bundle takes its place.
The cluster's agents do that: they add the host as a learner, make it a voter when it has caught up,
and remove the dead member, which stays removed when it comes back. A use is counted before the first
step. While all members live, hosts with the bundle wait without a vote, as standbys.

One bundle serves an auto-scaling group: hosts that come before the cluster has formed take seats, if
you may mint boot tokens, too. The secret is as dangerous as it lives long: whoever has the bundle, and
comes from an address in --cidr, gets a place in the cluster the next time that a member dies. With
--require, the host must also show that it is a virtual machine of yours: start its agent with
--identity-from (what --print-… prints does that).")]
    Create(PolicyCreateArgs),
    /// List a cluster's replacement policies, the newest first
    List {
        /// Name or id of the cluster [default: all clusters]
        #[arg(long, value_name = "CLUSTER")]
        cluster: Option<String>,
    },
    /// Show a replacement policy
    Show {
        /// The policy's id, as `policy list` prints it
        id: GrantId,
    },
    /// Revoke a replacement policy: it replaces no more members, and members that joined stay
    #[command(after_help = "\
The cluster's agents learn of it within seconds and end the policy in the cluster's own store, for
ever. If they don't reach this service, run `muster-agent policy revoke ID` on one of their hosts.")]
    Revoke {
        /// The policy's id, as `policy list` prints it
        id: GrantId,
        /// Skip the confirmation prompt
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, clap::Args)]
struct PolicyCreateArgs {
    /// Name or id of the cluster
    #[arg(long, value_name = "CLUSTER")]
    cluster: String,
    /// Replace members that nobody can reach
    #[arg(long, required = true)]
    replace_dead: bool,
    /// Time for which a member must have been unreachable before it is replaced
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10m")]
    after: Duration,
    /// Largest number of replacements that may begin within --per
    #[arg(long, value_name = "N", default_value_t = 3)]
    at_most: u8,
    /// Time in which --at-most counts
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "24h")]
    per: Duration,
    /// Time after which the policy ends, at most 366d
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "90d")]
    expires: Duration,
    /// Addresses that may redeem the token and that members may have; may be repeated
    #[arg(long, value_name = "CIDR", value_parser = parse_block)]
    cidr: Vec<IpNet>,
    /// Only name that the new member may have
    #[arg(long, value_name = "NAME")]
    name: Option<Name>,
    /// Only zone that the new member may be in, as its agent says (muster-agent run --zone)
    #[arg(long, value_name = "ZONE")]
    zone: Option<Name>,
    #[command(flatten)]
    require: RequireArgs,
    #[command(flatten)]
    delivery: DeliveryArgs,
}

pub(super) async fn run(args: PolicyArgs, printer: &mut Printer) -> Result<(), CliError> {
    let session = AdminSession::open(&args.remote)?;
    match args.command {
        PolicyCommand::Create(create) => self::create(&session, create, printer).await,
        PolicyCommand::List { cluster } => list(&session, cluster.as_deref(), printer).await,
        PolicyCommand::Show { id } => show(printer, &policy(&session, id).await?),
        PolicyCommand::Revoke { id, yes } => {
            policy(&session, id).await?;
            let ends = format!("Policy {id} replaces no further member. Members stay.");
            IrreversibleAct { consequences: vec![ends], name: &id.to_string() }
                .confirm(yes, printer)?;
            let view = session.client.revoke_grant(id).await?;
            show(printer, &view)
        }
    }
}

async fn create(
    session: &AdminSession,
    args: PolicyCreateArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let limits = limits(&args)?;
    let kind = TokenKind::Heal;
    let issuance = Issuance::prepare(session, &args.cluster, kind, &args.delivery, printer).await?;
    let token = Token::generate(kind);
    let newest = issuance.chain.newest();
    let grant = Grant {
        version: kind.grant_version(),
        id: token.id(),
        kind,
        key: *token.public(),
        cluster: newest.cluster,
        statement: issuance.chain.newest_hash(),
        uses: newest.size,
        issued_at: issuance.now,
        expires_at: issuance.now.saturating_add(args.expires.as_secs()),
        cidrs: args.cidr.clone(),
        name: args.name.clone(),
        zone: args.zone.clone(),
        replaces: None,
        replacement: Some(limits),
        require: checked(&args.require)?,
    };
    issuance.issue(session, token, &grant, &args.delivery, printer).await?;
    printer.note(&terms(&limits));
    printer.warn(&danger(&grant));
    let own = newest.admin(&session.key.key_id());
    if !own.is_some_and(|admin| roles_allow(&admin.roles, Action::PutBootGrant)) {
        printer.note(
            "your role mints no boot tokens: the bundle gives no seat while the cluster forms",
        );
    }
    Ok(())
}

/// Refuses limits that the agents or the service would refuse, before any request.
fn limits(args: &PolicyCreateArgs) -> Result<ReplacementLimits, CliError> {
    let usage = |text: String| Err(CliError::Usage(text));
    let limits = ReplacementLimits {
        after_seconds: args.after.as_secs(),
        at_most: args.at_most,
        per_seconds: args.per.as_secs(),
    };
    let (after, per) = (ReplacementLimits::AFTER, ReplacementLimits::PER);
    if !after.contains(&limits.after_seconds) {
        let (least, most) = (duration(*after.start()), duration(*after.end()));
        return usage(format!("--after must be from {least} to {most}"));
    }
    if !ReplacementLimits::AT_MOST.contains(&limits.at_most) {
        let most = ReplacementLimits::AT_MOST.end();
        return usage(format!("--at-most must be from 1 to {most}"));
    }
    if !per.contains(&limits.per_seconds) {
        let (least, most) = (duration(*per.start()), duration(*per.end()));
        return usage(format!("--per must be from {least} to {most}"));
    }
    let longest = TokenKind::Heal.max_seconds();
    if !(1..=longest).contains(&args.expires.as_secs()) {
        return usage(format!("--expires must be from 1s to {}", duration(longest)));
    }
    if args.cidr.len() > MAX_CIDRS {
        return usage(format!("--cidr can be given {MAX_CIDRS} times at most"));
    }
    Ok(limits)
}

/// Describes the policy's limits in one sentence.
fn terms(limits: &ReplacementLimits) -> String {
    format!(
        "a member that nobody has reached for {} is replaced, at most {} in {}",
        duration(limits.after_seconds),
        limits.at_most,
        duration(limits.per_seconds)
    )
}

/// Describes what somebody else could do with the bundle.
fn danger(grant: &Grant) -> String {
    let from = match grant.cidrs.is_empty() {
        true => "from anywhere: bind it to your network with --cidr",
        false => "from its addresses",
    };
    let beyond = match grant.require.is_empty() {
        true => "; require an identity document of your cloud's machines, too (--require)",
        false => ", on a virtual machine that fulfils --require",
    };
    format!(
        "until {}, whoever holds this bundle gets a place in the cluster, with all of its data, the \
         next time that a member dies, {from}{beyond}",
        time_of_seconds(grant.expires_at)
    )
}

/// Returns the policy with this id.
async fn policy(session: &AdminSession, id: GrantId) -> Result<GrantView, CliError> {
    let view = session.client.show_grant(id).await?;
    match view.grant.kind {
        TokenKind::Heal => Ok(view),
        TokenKind::Boot | TokenKind::Join => Err(CliError::Usage(format!(
            "{id} is no policy's: see muster-discovery token show {id}"
        ))),
    }
}

async fn list(
    session: &AdminSession,
    cluster: Option<&str>,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let cluster = match cluster {
        Some(cluster) => Some(session.cluster(cluster).await?.cluster),
        None => None,
    };
    let list = pages::policies(session, cluster, printer).await?.items;
    printer.print_value(&json!({ "policies": list }), |out| {
        let header = ["ID", "CLUSTER", "STATE", "AFTER", "AT MOST", "PER", "EXPIRES", "HOSTS"];
        out.table(header, list.iter().map(row));
    })
}

fn row(view: &GrantView) -> [String; 8] {
    let grant = &view.grant;
    let name = view.cluster_name.as_ref().map(ToString::to_string);
    let of =
        |value: fn(&ReplacementLimits) -> String| or_dash(grant.replacement.as_ref().map(value));
    [
        grant.id.to_string(),
        name.unwrap_or_else(|| grant.cluster.to_string()),
        view.state.as_str().into(),
        of(|limits| duration(limits.after_seconds)),
        of(|limits| limits.at_most.to_string()),
        of(|limits| duration(limits.per_seconds)),
        time_of_seconds(grant.expires_at),
        view.keys.to_string(),
    ]
}

fn show(printer: &mut Printer, view: &GrantView) -> Result<(), CliError> {
    let grant = &view.grant;
    printer.print_value(view, |out| {
        let cidrs = grant.cidrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        out.fields(&[
            ("id", grant.id.to_string()),
            ("state", view.state.as_str().into()),
            ("cluster", grant.cluster.to_string()),
            ("replaces", or_dash(grant.replacement.as_ref().map(terms))),
            ("issued", time_of_seconds(grant.issued_at)),
            ("expires", time_of_seconds(grant.expires_at)),
            ("issuer", view.issuer.to_string()),
            ("hosts seen", view.keys.to_string()),
            ("addresses", if cidrs.is_empty() { "any".into() } else { cidrs }),
            ("name", or_dash(grant.name.as_ref())),
            ("zone", or_dash(grant.zone.as_ref())),
            ("requires", requirement::typed(grant)),
        ]);
    })
}

#[cfg(test)]
mod tests {
    use discovery_types::digest::Digest;

    use super::*;

    fn policy(cidrs: &[&str], require: &[&str]) -> Grant {
        let token = Token::generate(TokenKind::Heal);
        Grant {
            version: TokenKind::Heal.grant_version(),
            id: token.id(),
            kind: TokenKind::Heal,
            key: *token.public(),
            cluster: uuid::Uuid::nil(),
            statement: Digest::of(b"statement"),
            uses: 3,
            issued_at: 0,
            expires_at: 60,
            cidrs: cidrs.iter().map(|block| block.parse().unwrap()).collect(),
            name: None,
            zone: None,
            replaces: None,
            replacement: None,
            require: require.iter().map(|text| requirement::parse(text).unwrap()).collect(),
        }
    }

    #[test]
    fn the_warning_of_a_policy_names_the_bounds_that_it_lacks() {
        let nothing: &[&str] = &[];
        let (blocks, account) = (&["10.1.0.0/16"][..], &["aws:account=1"][..]);
        for (cidrs, require, asks_for_cidr, asks_for_require) in [
            (nothing, nothing, true, true),
            (blocks, nothing, false, true),
            (nothing, account, true, false),
            (blocks, account, false, false),
        ] {
            let text = danger(&policy(cidrs, require));
            assert!(
                text.contains("whoever holds this bundle gets a place in the cluster"),
                "{text}"
            );
            assert_eq!(text.contains("with --cidr"), asks_for_cidr, "{text}");
            let asked = text.contains("require an identity document");
            assert_eq!(asked, asks_for_require, "{text}");
        }
    }
}
