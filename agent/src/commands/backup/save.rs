//! `backup run`: saves a backup now.

use super::{BackupOutput, BackupSession, own_cluster, show_progress, store_exit_error};
use crate::backup::name::ClusterFolder;
use crate::backup::progress::{BackupProgress, format_bytes};
use crate::backup::save::BackupRound;
use crate::backup::settings::check_recipients;
use crate::backup::signature::BackupSigner;
use crate::cli::BackupRecipientArguments;
use crate::commands::member::cluster_client;
use crate::exit::{ExitError, error_chain};
use crate::observe::status::AgentStatus;
use crate::state::{self, Layout};

/// Saves a backup of the first member that can be reached, and prints its manifest.
pub(super) async fn run(
    session: &BackupSession<'_>,
    recipients: &BackupRecipientArguments,
    output: &mut BackupOutput<'_, '_>,
) -> Result<(), ExitError> {
    let access = &session.typed.access;
    let node = cluster_client(access)?;
    let recipients = check_recipients(&recipients.backup_recipient)?;
    if recipients.is_empty() {
        session.note(
            "the backup will not be encrypted: it holds all data of the cluster. Say \
             --backup-recipient age1…, and keep its private key elsewhere",
        );
    }
    // With --endpoints, the operator may mean another cluster than this host's. Then the node is
    // asked for the id of its cluster.
    let own = access.endpoints.is_empty().then(|| own_cluster(&access.data_dir)).flatten();
    let cluster = match session.typed.cluster.clone().or(own) {
        Some(cluster) => cluster,
        None => ClusterFolder::of_raft_cluster(node.status().await?.cluster_id),
    };
    // Another cluster's backup isn't signed: this host's agent is no member of it.
    let signer = match access.endpoints.is_empty() {
        true => Layout::new_read_only(&access.data_dir).ok().and_then(|l| BackupSigner::read(&l)),
        false => None,
    };
    let round = BackupRound {
        signer,
        cluster,
        cluster_name: own_cluster_name(access),
        recipients,
        spool: session.spool.clone(),
        progress: BackupProgress::default(),
    };
    // List the backups first. If the store can't be reached, the command fails before it streams a
    // snapshot.
    session.listing(&round.cluster).await?;
    let work = round.save(&node, &session.store, |_| true);
    let saved = show_progress(&round.progress, access.json, work).await;
    let saved = saved.map_err(|error| ExitError::Failed(error_chain(&error)))?;
    let Some(manifest) = saved else {
        return Err(ExitError::Failed("no backup was saved".to_owned()));
    };
    // The new backup counts only if the store lists it.
    let listing = session.store.list(&round.cluster).await.map_err(store_exit_error)?;
    if !listing.published.iter().any(|name| name.to_string() == manifest.name) {
        let text = format!("{} doesn't list the backup {}", session.place, manifest.name);
        return Err(ExitError::Failed(text));
    }
    if manifest.signature.is_none() && round.cluster.has_agents() {
        session.note(
            "the backup is not signed: only the agent of a member signs, on its host and without \
             --endpoints",
        );
    }
    let text = format!(
        "saved {} of cluster {} to {}: revision {}, {} keys, {} ({})",
        manifest.name,
        manifest.cluster,
        session.place,
        manifest.snapshot.revision,
        manifest.snapshot.keys,
        format_bytes(manifest.stored.bytes),
        if manifest.stored.encryption.is_some() { "encrypted" } else { "not encrypted" },
    );
    output.print(&manifest, || text)
}

/// Returns the name of this host's cluster, as its agent shows it.
fn own_cluster_name(access: &crate::cli::ClusterAccess) -> Option<String> {
    if !access.endpoints.is_empty() {
        return None;
    }
    let layout = Layout::new_read_only(&access.data_dir).ok()?;
    let bytes = state::read(&layout.status()).ok()??;
    serde_json::from_slice::<AgentStatus>(&bytes).ok()?.cluster_name
}
