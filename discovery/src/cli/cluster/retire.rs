//! `cluster retire` and `cluster unretire`: sign an owner's decision on the owner's machine.

use discovery_types::api::{ClusterView, MemberView};
use discovery_types::retire::{Retire, Unretire};
use discovery_types::role::Action;

use super::show;
use crate::cli::CliError;
use crate::cli::confirm::Irreversible;
use crate::cli::printer::{Printer, or_dash, time};
use crate::cli::session::Session;

/// Arguments of `cluster retire`.
pub(super) struct Wanted {
    /// Reason, for people who look at the cluster later.
    pub(super) reason: String,
    /// Whether to retire the cluster even if members still report.
    pub(super) force: bool,
    /// Whether to skip the confirmation.
    pub(super) yes: bool,
}

pub(super) async fn retire(
    session: &Session,
    cluster: &str,
    wanted: Wanted,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let Wanted { reason, force, yes } = wanted;
    let cluster = session.cluster(cluster).await?;
    let chain = session.chain(cluster.cluster).await?;
    session.needs_in_statement(&chain, Action::RetireCluster)?;
    let view = session.client.show_cluster(cluster.cluster).await?;
    let reporting: Vec<String> = view
        .present
        .members
        .iter()
        .filter(|member| reports(member))
        .map(MemberView::called)
        .collect();
    if !force && !reporting.is_empty() {
        for sentence in ends(&view) {
            printer.note(&sentence);
        }
        return Err(CliError::MembersReport { members: reporting.join(", ") });
    }
    let act = Irreversible { ends: ends(&view), name: cluster.name.as_str() };
    act.confirm(yes, printer)?;
    let statement = chain.newest_hash();
    let retire = Retire { cluster: cluster.cluster, statement, reason, force };
    let after = session.client.retire(cluster.cluster, &retire.sign(&session.key)).await?;
    show::summary(printer, &after)?;
    printer.note(&format!(
        "For a week an owner can take it back: muster-discovery cluster unretire {}",
        cluster.cluster
    ));
    Ok(())
}

pub(super) async fn unretire(
    session: &Session,
    cluster: &str,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let cluster = session.cluster(cluster).await?;
    let chain = session.chain(cluster.cluster).await?;
    session.needs_in_statement(&chain, Action::RetireCluster)?;
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
    show::summary(printer, &after)?;
    if after.name != cluster.name {
        printer.warn(&format!(
            "another cluster is called {} by now: this one is called {} from now on",
            cluster.name, after.name
        ));
    }
    Ok(())
}

fn reports(member: &MemberView) -> bool {
    member.last_heard_ms.is_some() && !member.is_silent
}

/// Describes what a retirement ends: the cluster and its members.
fn ends(view: &ClusterView) -> Vec<String> {
    let summary = &view.summary;
    let members = view.present.members.iter().map(|member| {
        let role = if member.is_learner { "learner" } else { "voter" };
        format!(
            "  {role} {} at {}, last heard {}",
            member.called(),
            member.client_urls.join(","),
            or_dash(member.last_heard_ms.map(time))
        )
    });
    let first = format!("Cluster {} ({}) is {}:", summary.name, summary.cluster, summary.state);
    let last =
        "Discovery forgets it: no ticket, no certificate, no order. Its nodes are not touched.";
    std::iter::once(first).chain(members).chain([last.to_owned()]).collect()
}
