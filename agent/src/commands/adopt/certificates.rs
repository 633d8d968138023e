//! `adopt certificates`: lets this host's etcd serve certificates of the cluster's own CAs.
//!
//! That is safe once every member trusts these CAs. Each member trusts them from its take-over on.
//! etcd reads the files at each handshake, so nothing is restarted.

use serde_json::json;

use super::host::EnrolledHost;
use super::print;
use crate::adopt::record;
use crate::cli::CertificatesArguments;
use crate::cluster::ClusterApiClient;
use crate::commands::printer::Printer;
use crate::endpoint::ClientEndpoint;
use crate::exit::{ExitError, error_chain};
use crate::state::adopted::{AdoptionStage, ServedFiles, write_adopted};
use crate::state::state_exit_error;

pub(super) async fn run(
    typed: &CertificatesArguments,
    printer: &mut Printer<'_>,
) -> Result<(), ExitError> {
    let mut host = EnrolledHost::read(&typed.data_dir.data_dir)?;
    if host.node.stage != AdoptionStage::TakenOver {
        return Err(ExitError::Usage(
            "this host's etcd is not taken over yet: say muster-agent adopt take-over first"
                .to_owned(),
        ));
    }
    let listen = host.extras.current_listen().ok_or_else(|| {
        ExitError::DoNotRestart(
            "the journal holds no listen address: the node can't be started from it".to_owned(),
        )
    })?;
    // Make a client with the agent's own certificate. The etcd accepts that certificate since its
    // take-over.
    let own = async || -> Result<ClusterApiClient, ExitError> {
        let endpoint = ClientEndpoint::own_node(&host.layout.tls(), listen.client);
        Ok(ClusterApiClient::new(vec![endpoint.map_err(super::host::endpoint_error)?]))
    };
    let cluster = own().await?;
    refuse_unmanaged(&host, &cluster).await?;
    let leaves =
        host.extras.leaves.clone().ok_or_else(|| {
            ExitError::DoNotRestart("the journal holds no certificates".to_owned())
        })?;
    ServedFiles::of(&host.layout).write_own(&host.layout, &leaves).map_err(state_exit_error)?;
    let status = own().await?.status().await;
    host.node.has_new_certificates = true;
    write_adopted(&host.layout, &host.node).map_err(state_exit_error)?;
    let status = status.map_err(|error| {
        ExitError::Failed(format!(
            "the new certificates are in place, and the etcd doesn't answer with them yet: {}",
            error_chain(&error)
        ))
    })?;
    let text = if typed.json {
        json!({ "member": status.member_id, "name": host.name, "state": "certified" }).to_string()
    } else {
        format!(
            "{} serves certificates of the cluster's own CAs. Once all members do, an owner drops the \
             old CAs: muster-discovery cluster rotate-ca {}",
            host.name, host.statement.name
        )
    };
    print(printer, &text)
}

/// Returns an error if there is a member that no agent runs, because such a member doesn't trust
/// the cluster's own CAs.
async fn refuse_unmanaged(
    host: &EnrolledHost,
    cluster: &ClusterApiClient,
) -> Result<(), ExitError> {
    let members = cluster.list_members().await?;
    let (_, record) = record::read(cluster, host.list()).await?;
    let adoption = host.statement.adopted.iter();
    let missing: Vec<&str> = adoption
        .flat_map(|adoption| record.unmanaged(adoption, &members))
        .map(|(_, name)| name)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(ExitError::Failed(format!(
        "not taken over yet, so they wouldn't accept the new certificates: {}. Take them over first",
        missing.join(", ")
    )))
}
