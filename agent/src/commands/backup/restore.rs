//! `backup restore`: writes a backup's snapshot to a file, and says what comes next.

use std::fs::File;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{
    BackupOutput, BackupSession, ensure_identity, examine_exit_error, missing_identity,
    show_progress,
};
use crate::backup::manifest::Manifest;
use crate::backup::signature::SignatureFinding;
use crate::cli::BackupRestoreArguments;
use crate::exit::{ExitError, error_chain};

/// The output of `backup restore --json`.
#[derive(Serialize)]
struct RestoredBackup {
    /// Path of the snapshot's file.
    file: PathBuf,
    /// Result of the verification of the signature: `valid`, `unsigned` or `unchecked`.
    signature: &'static str,
    manifest: Manifest,
}

/// Fetches, proves and decrypts the backup that was typed, and writes its snapshot.
pub(super) async fn run(
    session: BackupSession<'_>,
    typed: &BackupRestoreArguments,
    output: &mut BackupOutput<'_, '_>,
) -> Result<(), ExitError> {
    ensure_missing(&typed.to)?;
    let cluster = session.cluster().await?;
    let name = session.choose(&cluster, &typed.backup).await?;
    ensure_identity(&session.store, &cluster, &name, typed.identity.as_deref()).await?;
    let examiner = session.into_examiner(cluster, typed.identity.as_deref(), &typed.signatures)?;
    let work = examiner.examine(&name);
    let examined = show_progress(&examiner.progress, output.json, work).await;
    let examined = examined.map_err(|error| examine_exit_error(&name, &error))?;
    let Some(snapshot) = examined.snapshot else {
        return Err(missing_identity(&name, &examined.manifest));
    };
    let to = typed.to.clone();
    let written = tokio::task::spawn_blocking(move || write_file(snapshot, &to));
    written.await.map_err(|error| ExitError::Failed(error.to_string()))??;
    let signature = examined.signature;
    let restored = RestoredBackup {
        file: typed.to.clone(),
        signature: signature.as_str(),
        manifest: examined.manifest,
    };
    output.print(&restored, || next_steps(&restored, signature))
}

fn ensure_missing(to: &Path) -> Result<(), ExitError> {
    match to.symlink_metadata() {
        Ok(_) => {
            let text = format!("--to {}: it exists already; name another file", to.display());
            Err(ExitError::Usage(text))
        }
        Err(_) => Ok(()),
    }
}

/// Writes the file under another name (0600), syncs it, and renames it.
fn write_file(mut snapshot: File, to: &Path) -> Result<(), ExitError> {
    let failed = |error: &dyn std::error::Error| {
        ExitError::Failed(format!("--to {}: {}", to.display(), error_chain(error)))
    };
    let mut part = to.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    let mut file = muster_files::data::recreate(&part).map_err(|error| failed(&error))?;
    let written = std::io::copy(&mut snapshot, &mut file).and_then(|_| file.sync_all());
    let done = match written {
        Ok(()) => {
            // Another process may have created the file while the snapshot was written.
            ensure_missing(to)?;
            muster_files::rename(&part, to).map_err(|error| failed(&error))
        }
        Err(error) => Err(failed(&error)),
    };
    if done.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    done
}

fn next_steps(restored: &RestoredBackup, signature: SignatureFinding) -> String {
    let RestoredBackup { file, manifest, .. } = restored;
    let (file, facts) = (file.display(), &manifest.snapshot);
    let signature = signature.to_text();
    format!(
        "{file} is the snapshot of {}: revision {}, {} keys, every row read; {signature}.\n\
         If a member's directory is left, use that instead: muster-agent recover examine.\n\
         Otherwise make a new cluster of the file. On each new member's host, with the same file, token and\n\
         --initial-cluster, before any of them is started:\n  \
         muster-node snapshot restore {file} --name one --data-dir DIR --bump-revision 1000000000 \\\n    \
         --mark-compacted --initial-cluster one=https://10.0.1.1:2380 \\\n    \
         --initial-advertise-peer-urls https://10.0.1.1:2380\n  \
         muster-node data status DIR\n\
         With stock etcd it is: etcdutl snapshot restore {file} … (etcdctl before 3.5).\n\
         The file holds all data of the cluster, decrypted: remove it afterwards.",
        manifest.begun_at, facts.revision, facts.keys
    )
}
