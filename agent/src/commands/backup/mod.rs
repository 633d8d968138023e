//! `backup`: saves, lists, proves and restores backups of the cluster.

mod list;
mod restore;
mod save;
mod verify;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use discovery_types::text::printable;
use jiff::Timestamp;
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

use crate::backup::examine::{ExamineError, Examiner, read_manifest};
use crate::backup::listing::BackupListing;
use crate::backup::manifest::Manifest;
use crate::backup::name::{BackupName, ClusterFolder};
use crate::backup::progress::BackupProgress;
use crate::backup::settings::{StoreSettings, command_spool};
use crate::backup::signature::resolve_policy;
use crate::backup::store::{BackupStore, BackupStoreError};
use crate::backup::{Spool, read_identities};
use crate::cli::{BackupChoice, BackupCommand, BackupSubcommand, SignatureArguments};
use crate::commands::printer::Printer;
use crate::exit::{ExitError, error_chain};
use crate::state::{Layout, journal};

/// How often the progress of long work is shown.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

/// Runs `backup` with the subcommand that was typed.
pub(crate) async fn run(typed: &BackupCommand, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    let Some(settings) = StoreSettings::resolve(&typed.store)? else {
        let text = "say where the backups are: --backup-to DIR, or s3://BUCKET/PREFIX";
        return Err(ExitError::Usage(text.to_owned()));
    };
    let session = BackupSession {
        store: BackupStore::open(&settings).await.map_err(store_exit_error)?,
        spool: command_spool(&typed.store)?,
        place: settings.to_string(),
        typed,
    };
    if let Some(exposure) = settings.exposure() {
        session.note(&exposure);
    }
    let mut output = BackupOutput { printer, json: typed.access.json };
    // Dropping the subcommand's future removes its temporary files and ends the drill's member.
    tokio::select! {
        done = run_subcommand(session, &mut output) => done,
        stopped = wait_for_signal() => Err(stopped),
    }
}

async fn run_subcommand(
    session: BackupSession<'_>,
    output: &mut BackupOutput<'_, '_>,
) -> Result<(), ExitError> {
    match &session.typed.verb {
        BackupSubcommand::Run(recipients) => save::run(&session, recipients, output).await,
        BackupSubcommand::List => list::run(&session, output).await,
        BackupSubcommand::Verify(verify) => verify::run(session, verify, output).await,
        BackupSubcommand::Restore(restore) => restore::run(session, restore, output).await,
    }
}

/// Waits until the command is told to stop.
async fn wait_for_signal() -> ExitError {
    let failed = |error| ExitError::Failed(format!("can't listen for signals: {error}"));
    let signals = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
    let [interrupt, terminate] = signals;
    let (mut interrupt, mut terminate) = match (interrupt, terminate) {
        (Ok(interrupt), Ok(terminate)) => (interrupt, terminate),
        (Err(error), _) | (_, Err(error)) => return failed(error),
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    ExitError::Failed("told to stop before the end: nothing is left behind".to_owned())
}

/// Settings that the subcommands have in common.
struct BackupSession<'a> {
    typed: &'a BackupCommand,
    store: BackupStore,
    spool: Spool,
    /// Location of the store of backups, for messages: a directory, or the URL of bucket and
    /// prefix.
    place: String,
}

/// Printer of a subcommand's result and notes.
struct BackupOutput<'p, 'o> {
    printer: &'p mut Printer<'o>,
    json: bool,
}

impl BackupOutput<'_, '_> {
    /// Prints the result: as JSON, or as the text that `text` returns.
    fn print<T: Serialize>(
        &mut self,
        value: &T,
        text: impl FnOnce() -> String,
    ) -> Result<(), ExitError> {
        let text = match self.json {
            true => serde_json::to_string_pretty(value).expect("results are plain structs"),
            false => text(),
        };
        self.print_line(&text)
    }

    fn print_line(&mut self, text: &str) -> Result<(), ExitError> {
        self.printer.line(text).map_err(|error| ExitError::Failed(error.to_string()))
    }
}

impl BackupSession<'_> {
    /// Prints a note to standard error, with `--json` as a JSON document.
    fn note(&self, text: &str) {
        match self.typed.access.json {
            true => print_note(text, true),
            false => print_note(&format!("note: {text}"), false),
        }
    }

    /// Returns the cluster that was typed, otherwise this host's cluster, otherwise the only
    /// cluster in the store.
    async fn cluster(&self) -> Result<ClusterFolder, ExitError> {
        if let Some(cluster) = &self.typed.cluster {
            return Ok(cluster.clone());
        }
        if let Some(cluster) = own_cluster(&self.typed.access.data_dir) {
            return Ok(cluster);
        }
        let mut clusters = self.store.clusters().await.map_err(store_exit_error)?;
        match clusters.len() {
            0 => Err(ExitError::Failed(format!("{} has no backup", self.place))),
            1 => Ok(clusters.remove(0)),
            _ => {
                let names: Vec<String> = clusters.iter().map(ToString::to_string).collect();
                let text = format!("{} has backups of several clusters", self.place);
                Err(ExitError::Usage(format!(
                    "{text}: say --cluster with one of {}",
                    names.join(", ")
                )))
            }
        }
    }

    async fn listing(&self, cluster: &ClusterFolder) -> Result<BackupListing, ExitError> {
        self.store.list(cluster).await.map_err(store_exit_error)
    }

    /// Returns the name of the backup that was typed.
    async fn choose(
        &self,
        cluster: &ClusterFolder,
        choice: &BackupChoice,
    ) -> Result<BackupName, ExitError> {
        match choice {
            BackupChoice::Named(name) => Ok(name.clone()),
            BackupChoice::Newest => {
                let mut listing = self.listing(cluster).await?;
                listing.published.pop().ok_or_else(|| {
                    ExitError::Failed(format!("{} has no backup of cluster {cluster}", self.place))
                })
            }
        }
    }

    fn into_examiner(
        self,
        cluster: ClusterFolder,
        identity: Option<&Path>,
        signatures: &SignatureArguments,
    ) -> Result<Examiner, ExitError> {
        let SignatureArguments { trust, allow_unsigned } = signatures;
        let data_dir = &self.typed.access.data_dir;
        let policy = resolve_policy(trust.as_deref(), *allow_unsigned, data_dir, &cluster);
        let policy = policy.map_err(|error| {
            let path = trust.as_deref().unwrap_or(data_dir.as_path()).display();
            ExitError::Usage(format!("--trust {path}: {}", error_chain(&error)))
        })?;
        if policy.trust.is_none() && cluster.has_agents() {
            self.note(
                "nobody's signature is checked: say --trust with statements.json of \
                 `muster-discovery ca issue`, or with peer-ca.crt of a member",
            );
        }
        let identities = identity.map(|path| {
            read_identities(path).map_err(|error| {
                ExitError::Usage(format!("--identity {}: {}", path.display(), error_chain(&error)))
            })
        });
        Ok(Examiner {
            store: self.store,
            cluster,
            identities: identities.transpose()?.map(Arc::new),
            signatures: policy,
            spool: self.spool,
            progress: BackupProgress::default(),
        })
    }
}

/// Returns the cluster of the agent whose state lies in this directory, if there is one.
fn own_cluster(data_dir: &Path) -> Option<ClusterFolder> {
    let layout = Layout::new_read_only(data_dir).ok()?;
    let (_, loaded) = journal::read(&layout).ok()??;
    loaded.extras.join.map(|join| ClusterFolder::of_cluster(join.cluster))
}

fn print_note(text: &str, json: bool) {
    let text = printable(text);
    let line = match json {
        true => serde_json::json!({ "note": text }).to_string(),
        false => text.into_owned(),
    };
    // If standard error is closed, the note is lost and the command goes on.
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{line}\n").as_bytes());
}

/// Shows the progress of long work on standard error until the work ends.
async fn show_progress<T>(
    progress: &BackupProgress,
    json: bool,
    work: impl Future<Output = T>,
) -> T {
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            ended = &mut work => return ended,
            () = sleep(PROGRESS_INTERVAL) => {
                print_note(&progress.to_text(), json);
            }
        }
    }
}

/// Returns a usage error if the backup is encrypted and no private key was typed. Ignores a
/// manifest that can't be used: the command reports it when it examines the backup.
async fn ensure_identity(
    store: &BackupStore,
    cluster: &ClusterFolder,
    name: &BackupName,
    identity: Option<&Path>,
) -> Result<(), ExitError> {
    if identity.is_some() {
        return Ok(());
    }
    match read_manifest(store, cluster, name).await {
        Ok(manifest) if manifest.stored.encryption.is_some() => {
            Err(missing_identity(name, &manifest))
        }
        _ => Ok(()),
    }
}

fn missing_identity(name: &BackupName, manifest: &Manifest) -> ExitError {
    let keys = manifest.stored.recipients.join(" or ");
    ExitError::Usage(format!(
        "{name} is encrypted: say --identity with the file of the private key of {keys}"
    ))
}

fn store_exit_error(error: BackupStoreError) -> ExitError {
    match error {
        BackupStoreError::Settings(text) => ExitError::Usage(text),
        error => ExitError::Failed(error_chain(&error)),
    }
}

fn examine_exit_error(name: &BackupName, error: &ExamineError) -> ExitError {
    ExitError::Failed(format!("{name}: {}", error_chain(error)))
}

/// Formats the age of a backup for people.
fn format_age(at: Timestamp, now: Timestamp) -> String {
    crate::observe::backup::format_age(now.duration_since(at).as_secs())
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[tokio::test]
    async fn an_encrypted_backup_without_an_identity_is_a_usage_error_that_names_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let settings = StoreSettings::Directory(folder.path().to_owned());
        let store = BackupStore::open(&settings).await.unwrap();
        let cluster = ClusterFolder::of_cluster(Uuid::from_u128(7));
        let (plain, encrypted) =
            (BackupName::new(Timestamp::now(), 42), BackupName::new(Timestamp::now(), 43));
        std::fs::create_dir(folder.path().join(cluster.as_str())).unwrap();
        for (name, recipient) in [(&plain, None), (&encrypted, Some("age1x"))] {
            let file = folder.path().join(cluster.as_str()).join(name.manifest_file());
            std::fs::write(file, Manifest::fixture(name, &cluster, recipient).to_bytes()).unwrap();
        }
        let refused = ensure_identity(&store, &cluster, &encrypted, None).await.unwrap_err();
        assert_eq!(refused.code(), 2);
        let text = refused.to_string();
        assert!(text.contains("--identity") && text.contains("age1x"), "{text}");
        let identity = Some(Path::new("key.txt"));
        assert!(ensure_identity(&store, &cluster, &encrypted, identity).await.is_ok());
        assert!(ensure_identity(&store, &cluster, &plain, None).await.is_ok());
        let missing = BackupName::new(Timestamp::now(), 44);
        assert!(ensure_identity(&store, &cluster, &missing, None).await.is_ok());
    }
}
