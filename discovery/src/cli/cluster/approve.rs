//! `cluster approve`: signs on the issuer's machine that hosts may found a cluster.

use discovery_types::api::{ClusterState, ClusterSummary, SeatView};
use discovery_types::approval::Approval;
use discovery_types::key::PublicKey;
use discovery_types::role::Action;
use serde_json::json;

use crate::cli::CliError;
use crate::cli::printer::{Printer, or_dash};
use crate::cli::session::AdminSession;

/// Approves the agents with these keys. Without keys, asks about each host that waits.
pub(super) async fn approve(
    session: &AdminSession,
    cluster: &str,
    keys: &[PublicKey],
    printer: &mut Printer,
) -> Result<(), CliError> {
    let cluster = session.cluster(cluster).await?;
    let chain = session.chain(cluster.cluster).await?;
    session.check_role_in_statement(&chain, Action::ApproveHost)?;
    if !chain.newest().needs_approval {
        return Err(CliError::Usage(format!(
            "cluster {} needs no approvals: it was not created with --approve",
            cluster.name
        )));
    }
    if !matches!(cluster.state, ClusterState::Open | ClusterState::Preparing) {
        return Err(CliError::Usage(format!(
            "cluster {} is {}: its founders are decided, and later members come with tickets",
            cluster.name, cluster.state
        )));
    }
    let keys = match keys {
        [] => ask_for_each(session, &cluster, printer).await?,
        keys => keys.to_vec(),
    };
    let mut approved = Vec::new();
    for agent in keys {
        let approval = Approval { cluster: cluster.cluster, agent };
        session.client.approve_host(cluster.cluster, &approval.sign(&session.key)).await?;
        approved.push(agent);
    }
    printer.print_value(&json!({ "cluster": cluster.name, "approved": approved }), |out| {
        out.table(["APPROVED"], approved.iter().map(|key| [key.to_string()]));
    })
}

/// Shows the hosts that wait, and asks about each. Returns the keys of those that were approved.
async fn ask_for_each(
    session: &AdminSession,
    cluster: &ClusterSummary,
    printer: &mut Printer,
) -> Result<Vec<PublicKey>, CliError> {
    let waiting: Vec<SeatView> = session
        .client
        .explain(cluster.cluster)
        .await?
        .seats
        .into_iter()
        .filter(|seat| seat.is_approved == Some(false))
        .collect();
    if waiting.is_empty() {
        printer.note("no host waits for an approval");
        return Ok(Vec::new());
    }
    let mut keys = Vec::new();
    for seat in &waiting {
        let Some(key) = seat.agent_key else { continue };
        printer.note(&format!(
            "{}: {key}, from {}, at {}",
            seat.name,
            or_dash(seat.source.as_ref()),
            seat.peer_urls.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        ));
        let question = format!(
            "Does the agent on {0} log this key? Type {0} to approve it, or nothing to pass over it:",
            seat.name
        );
        match printer.ask(&question).as_deref() {
            Some(typed) if typed == seat.name.as_str() => keys.push(key),
            Some(_) => printer.note(&format!("{} is not approved", seat.name)),
            None => {
                return Err(CliError::Usage(
                    "nothing was approved: there is no terminal to ask on. Compare the keys, and name \
                     them by --agent"
                        .into(),
                ));
            }
        }
    }
    Ok(keys)
}
