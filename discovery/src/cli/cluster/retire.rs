//! `cluster retire`, `cluster unretire` and `cluster reopen`: an owner ends a cluster, or undoes
//! its end. A retirement and its undoing are signed on the owner's machine. A reopening isn't
//! signed.

use discovery_types::api::{ClusterState, ClusterSummary, ClusterView, MemberView};
use discovery_types::retire::{Retire, Unretire};
use discovery_types::role::Action;

use super::show;
use crate::cli::CliError;
use crate::cli::confirm::IrreversibleAct;
use crate::cli::printer::{Printer, or_dash, time};
use crate::cli::session::AdminSession;

/// Arguments of `cluster retire`.
pub(super) struct RetireArguments {
    /// Reason, for people who look at the cluster later.
    pub(super) reason: String,
    /// Whether to retire the cluster even if members still report.
    pub(super) force: bool,
    /// Whether to skip the confirmation.
    pub(super) yes: bool,
}

pub(super) async fn retire(
    session: &AdminSession,
    cluster: &str,
    wanted: RetireArguments,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let RetireArguments { reason, force, yes } = wanted;
    let cluster = session.cluster(cluster).await?;
    let chain = session.chain(cluster.cluster).await?;
    session.check_role_in_statement(&chain, Action::RetireCluster)?;
    let view = session.client.show_cluster(cluster.cluster).await?;
    let reporting: Vec<String> = view
        .present
        .members
        .iter()
        .filter(|member| is_reporting(member))
        .map(MemberView::display_name)
        .collect();
    if !force && !reporting.is_empty() {
        for sentence in describe_retirement(&view) {
            printer.note(&sentence);
        }
        return Err(CliError::MembersReport { members: reporting.join(", ") });
    }
    let act =
        IrreversibleAct { consequences: describe_retirement(&view), name: cluster.name.as_str() };
    act.confirm(yes, printer)?;
    let statement = chain.newest_hash();
    let retire = Retire { cluster: cluster.cluster, statement, reason, force };
    let after = session.client.retire(cluster.cluster, &retire.sign(&session.key)).await?;
    show::print_summary(printer, &after)?;
    printer.note(&format!(
        "For a week an owner can take it back: muster-discovery cluster unretire {}",
        cluster.cluster
    ));
    Ok(())
}

pub(super) async fn unretire(
    session: &AdminSession,
    cluster: &str,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let cluster = session.cluster(cluster).await?;
    let chain = session.chain(cluster.cluster).await?;
    session.check_role_in_statement(&chain, Action::RetireCluster)?;
    let view = session.client.show_cluster(cluster.cluster).await?;
    let Some(ended) = &view.ended else {
        return Err(CliError::Usage(format!(
            "cluster {} ({}) is {}, not retired: name a retired one by its id (cluster list --all)",
            cluster.name, cluster.cluster, cluster.state
        )));
    };
    let unretire = Unretire {
        cluster: cluster.cluster,
        statement: chain.newest_hash(),
        retired_at_ms: ended.at_ms,
    };
    let after = session.client.unretire(cluster.cluster, &unretire.sign(&session.key)).await?;
    print_live_again(&cluster, &after, printer)
}

pub(super) async fn reopen(
    session: &AdminSession,
    cluster: &str,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let cluster = session.cluster(cluster).await?;
    let chain = session.chain(cluster.cluster).await?;
    session.check_role_in_statement(&chain, Action::ReopenCluster)?;
    if cluster.state != ClusterState::Expired {
        return Err(CliError::Usage(format!(
            "cluster {} ({}) is {}, not expired: name an expired one by its id (cluster list --all)",
            cluster.name, cluster.cluster, cluster.state
        )));
    }
    let after = session.client.reopen(cluster.cluster).await?;
    print_live_again(&cluster, &after, printer)?;
    printer.note(&format!(
        "It may form until {}. Start the agents again that have given up: they exited with 3.",
        or_dash(after.deadline_at_ms.map(time))
    ));
    Ok(())
}

/// Prints a cluster whose end was undone, with a warning if it had to be renamed.
fn print_live_again(
    before: &ClusterSummary,
    after: &ClusterSummary,
    printer: &mut Printer,
) -> Result<(), CliError> {
    show::print_summary(printer, after)?;
    if after.name != before.name {
        printer.warn(&format!(
            "another cluster is called {} by now: this one is called {} from now on",
            before.name, after.name
        ));
    }
    Ok(())
}

fn is_reporting(member: &MemberView) -> bool {
    member.last_heard_ms.is_some() && !member.is_silent && !member.is_released
}

/// Describes what a retirement ends: the cluster and its members.
fn describe_retirement(view: &ClusterView) -> Vec<String> {
    let summary = &view.summary;
    let members = view.present.members.iter().map(|member| {
        let role = if member.is_learner { "learner" } else { "voter" };
        format!(
            "  {role} {} at {}, last heard {}",
            member.display_name(),
            member.client_urls.join(","),
            or_dash(member.last_heard_ms.map(time))
        )
    });
    let first = format!("Cluster {} ({}) is {}:", summary.name, summary.cluster, summary.state);
    let last =
        "Discovery forgets it: no ticket, no certificate, no order. Its nodes are not touched.";
    std::iter::once(first).chain(members).chain([last.to_owned()]).collect()
}
