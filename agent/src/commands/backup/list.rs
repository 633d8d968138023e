//! `backup list`: the backups in a store, from their manifests.

use jiff::Timestamp;
use serde::Serialize;

use super::{BackupOutput, BackupSession, format_age, show_progress, store_exit_error};
use crate::backup::examine::read_manifest;
use crate::backup::manifest::Manifest;
use crate::backup::name::{BackupName, ClusterFolder};
use crate::backup::progress::{BackupProgress, BackupStep, format_bytes};
use crate::exit::{ExitError, error_chain};

/// One backup in the output of `backup list --json`.
#[derive(Serialize)]
struct ListedBackup {
    name: String,
    cluster: String,
    /// Age in seconds; negative if the backup is dated in the future.
    age_seconds: i64,
    /// The manifest; `None` if it can't be used.
    manifest: Option<Manifest>,
    /// Why the backup can't be used.
    problem: Option<String>,
}

/// Prints the backups of the cluster that was typed, or of all clusters in the store.
pub(super) async fn run(
    session: &BackupSession<'_>,
    output: &mut BackupOutput<'_, '_>,
) -> Result<(), ExitError> {
    let clusters = match &session.typed.cluster {
        Some(cluster) => vec![cluster.clone()],
        None => session.store.clusters().await.map_err(store_exit_error)?,
    };
    let (now, progress) = (Timestamp::now(), BackupProgress::default());
    progress.begin(BackupStep::Listing);
    let work = describe_all(session, &clusters, now, &progress);
    let listed = show_progress(&progress, output.json, work).await?;
    output.print(&listed, || match listed.is_empty() {
        true => format!("{} has no backup", session.place),
        false => table(&listed, now, clusters.len() > 1),
    })
}

async fn describe_all(
    session: &BackupSession<'_>,
    clusters: &[ClusterFolder],
    now: Timestamp,
    progress: &BackupProgress,
) -> Result<Vec<ListedBackup>, ExitError> {
    let mut listed = Vec::new();
    for cluster in clusters {
        let listing = session.listing(cluster).await?;
        for name in &listing.published {
            listed.push(describe(session, cluster, name, now).await?);
            progress.add(1);
        }
        for name in &listing.incomplete {
            let problem = Some("its snapshot is missing".to_owned());
            listed.push(ListedBackup { problem, ..describe(session, cluster, name, now).await? });
        }
    }
    Ok(listed)
}

async fn describe(
    session: &BackupSession<'_>,
    cluster: &ClusterFolder,
    name: &BackupName,
    now: Timestamp,
) -> Result<ListedBackup, ExitError> {
    let read = read_manifest(&session.store, cluster, name).await;
    let (manifest, problem) = match read {
        Ok(manifest) => (Some(manifest), None),
        Err(error) if error.is_damage() => (None, Some(error_chain(&error))),
        Err(error) => return Err(super::examine_exit_error(name, &error)),
    };
    Ok(ListedBackup {
        name: name.to_string(),
        cluster: cluster.to_string(),
        age_seconds: now.duration_since(name.begun_at()).as_secs(),
        manifest,
        problem,
    })
}

fn table(listed: &[ListedBackup], now: Timestamp, shows_cluster: bool) -> String {
    let mut rows: Vec<Vec<String>> = vec![
        ["NAME", "AGE", "REVISION", "KEYS", "SIZE", "ENCRYPTED", "MEMBER", "CLUSTER"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for backup in listed {
        let number =
            |number: Option<u64>| number.map_or("?".to_owned(), |number| number.to_string());
        let manifest = backup.manifest.as_ref();
        let at = now - jiff::SignedDuration::from_secs(backup.age_seconds);
        rows.push(vec![
            backup.name.clone(),
            format_age(at, now),
            number(manifest.map(|manifest| manifest.snapshot.revision)),
            number(manifest.map(|manifest| manifest.snapshot.keys)),
            manifest.map_or("?".to_owned(), |manifest| format_bytes(manifest.stored.bytes)),
            match manifest.map(|manifest| manifest.stored.encryption.is_some()) {
                Some(true) => "yes",
                Some(false) => "no",
                None => "?",
            }
            .to_owned(),
            manifest.map_or("?".to_owned(), |manifest| {
                discovery_types::text::printable(&manifest.member.name).into_owned()
            }),
            backup.cluster.clone(),
        ]);
    }
    let columns = if shows_cluster { 8 } else { 7 };
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines: Vec<String> = rows.iter().map(line).collect();
    for backup in listed {
        let problem = backup.problem.as_ref();
        lines.extend(problem.map(|problem| format!("{}: {problem}", backup.name)));
    }
    lines.join("\n")
}
