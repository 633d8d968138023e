//! The backup flags, resolved and checked. Nothing here uses the network.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::Spool;
pub(crate) use super::encryption::BackupRecipient;
use super::retention::RetentionPolicy;
use crate::cli::{BackupBy, BackupRetentionArguments, BackupStoreArguments};
use crate::exit::{ExitError, error_chain};
use crate::state::Layout;

/// Shortest interval between two backups, and between two verifications.
const MIN_INTERVAL: Duration = Duration::from_secs(10);
/// Interval between two backups unless the command line gives another.
const DEFAULT_INTERVAL: Duration = Duration::from_hours(6);
/// Maximum number of recipients, each of which makes backups a little longer.
const MAX_RECIPIENTS: usize = 16;

/// Location of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoreSettings {
    /// A directory with this absolute path.
    Directory(PathBuf),
    /// A bucket of an S3-compatible store.
    S3(S3Settings),
}

/// Location of a bucket, and how it is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct S3Settings {
    pub bucket: String,
    /// Prefix of all names, without a slash at either end; may be empty.
    pub prefix: String,
    /// URL of the S3-compatible service. `None` for the URL in the environment variables, or else
    /// Amazon's.
    pub endpoint: Option<String>,
    /// File with the CA certificates by which the S3-compatible service is verified. `None` for the
    /// system's CAs.
    pub ca: Option<PathBuf>,
    /// File with an access key. `None` if the key is in the environment variables, or comes with
    /// the machine's role in its cloud.
    pub credentials: Option<PathBuf>,
}

impl S3Settings {
    /// Returns the URL of bucket and prefix, for people.
    pub(super) fn place(&self) -> String {
        let Self { bucket, prefix, .. } = self;
        let slash = if prefix.is_empty() { "" } else { "/" };
        format!("s3://{bucket}{slash}{prefix}")
    }
}

impl fmt::Display for StoreSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => path.display().fmt(f),
            Self::S3(settings) => f.write_str(&settings.place()),
        }
    }
}

impl StoreSettings {
    /// Resolves the flags about a store; `None` if there is no `--backup-to`.
    pub(crate) fn resolve(typed: &BackupStoreArguments) -> Result<Option<Self>, ExitError> {
        let Some(to) = &typed.backup_to else {
            let others = [
                typed.backup_endpoint.is_some(),
                typed.backup_ca.is_some(),
                typed.backup_credentials.is_some(),
            ];
            return match others.contains(&true) {
                true => Err(usage("--backup-to is missing: say where the backups are")),
                false => Ok(None),
            };
        };
        let Some(place) = to.strip_prefix("s3://") else {
            // `s3:/bucket` and `S3:bucket` are typing errors. Taken as they are, they would name a
            // local folder.
            let is_slip = to.get(..3).is_some_and(|start| start.eq_ignore_ascii_case("s3:"));
            if to.contains("://") || is_slip {
                return Err(usage(&format!(
                    "--backup-to {to}: say a directory, or s3://BUCKET/PREFIX"
                )));
            }
            let path = std::path::absolute(to)
                .map_err(|error| usage(&format!("--backup-to {to}: {error}")))?;
            return Ok(Some(Self::Directory(path)));
        };
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        let prefix = prefix.trim_matches('/');
        let is_name = |name: &str| !name.is_empty() && name != "." && name != "..";
        let is_bucket = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        if !is_name(bucket)
            || !bucket.chars().all(is_bucket)
            || !prefix.is_empty() && !prefix.split('/').all(is_name)
        {
            return Err(usage(&format!("--backup-to {to}: say s3://BUCKET or s3://BUCKET/PREFIX")));
        }
        if let Some(endpoint) = &typed.backup_endpoint
            && !["http://", "https://"].iter().any(|scheme| endpoint.starts_with(scheme))
        {
            return Err(usage(
                "--backup-endpoint: say https://HOST:PORT (or http://, without TLS)",
            ));
        }
        Ok(Some(Self::S3(S3Settings {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
            endpoint: typed.backup_endpoint.clone(),
            ca: typed.backup_ca.clone(),
            credentials: typed.backup_credentials.clone(),
        })))
    }

    /// Returns a warning if the connection to the store is not encrypted.
    pub(crate) fn exposure(&self) -> Option<String> {
        let Self::S3(S3Settings { endpoint: Some(endpoint), .. }) = self else { return None };
        endpoint.starts_with("http://").then(|| {
            format!("--backup-endpoint {endpoint} is without TLS: whoever is on the way reads the backups")
        })
    }
}

/// Settings of scheduled backups.
#[derive(Clone, Debug)]
pub(crate) struct BackupSettings {
    pub store: StoreSettings,
    /// Folder of temporary files; `None` for one in the data directory.
    pub spool: Option<PathBuf>,
    /// Interval between two backups.
    pub every: Duration,
    /// Interval between two verifications of stored backups; `None` for no verification.
    pub verify_every: Option<Duration>,
    pub retention: RetentionPolicy,
    /// The member whose agent saves the backups.
    pub by: BackupBy,
    /// Public keys for which backups are encrypted.
    pub recipients: Vec<BackupRecipient>,
}

impl BackupSettings {
    /// Resolves the flags of `run`; `None` if there is no `--backup-to`.
    pub(crate) fn resolve(
        store: &BackupStoreArguments,
        typed: &BackupRetentionArguments,
        recipients: &[BackupRecipient],
    ) -> Result<Option<Self>, ExitError> {
        let spool = store.backup_spool.clone();
        let Some(store) = StoreSettings::resolve(store)? else {
            let is_typed = typed.backup_every.is_some()
                || typed.backup_verify_every.is_some()
                || typed.backup_keep.is_some()
                || typed.backup_keep_for.is_some()
                || !recipients.is_empty();
            return match is_typed {
                true => Err(usage("--backup-to is missing: say where the backups go")),
                false => Ok(None),
            };
        };
        let every = typed.backup_every.unwrap_or(DEFAULT_INTERVAL);
        if every < MIN_INTERVAL {
            let text = format!("--backup-every: the shortest is {} s", MIN_INTERVAL.as_secs());
            return Err(usage(&text));
        }
        let verify_every = typed.backup_verify_every;
        if verify_every.is_some_and(|every| every < MIN_INTERVAL) {
            let text =
                format!("--backup-verify-every: the shortest is {} s", MIN_INTERVAL.as_secs());
            return Err(usage(&text));
        }
        if typed.backup_keep_for.is_some_and(|age| age < every) {
            return Err(usage("--backup-keep-for: it must not be shorter than --backup-every"));
        }
        let keep = typed.backup_keep.unwrap_or(BackupRetentionArguments::DEFAULT_KEEP);
        let retention = RetentionPolicy {
            keep: usize::try_from(keep).unwrap_or(usize::MAX),
            max_age: typed.backup_keep_for,
        };
        let recipients = check_recipients(recipients)?;
        let by = typed.backup_by;
        Ok(Some(Self { store, spool, every, verify_every, retention, by, recipients }))
    }

    /// Opens the folder of temporary files.
    pub(crate) fn open_spool(&self, layout: &Layout) -> Result<Spool, muster_files::Error> {
        Spool::open(self.spool.as_deref().unwrap_or(&layout.backup_spool()))
    }

    /// Returns a warning for each protection that the settings lack.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let plain = self.recipients.is_empty().then(|| {
            "backups are not encrypted: they hold all data of the cluster, for whoever can read the store. \
             Say --backup-recipient age1…, and keep its private key elsewhere"
                .to_owned()
        });
        self.store.exposure().into_iter().chain(plain).collect()
    }
}

/// Checks the number of recipients.
pub(crate) fn check_recipients(
    recipients: &[BackupRecipient],
) -> Result<Vec<BackupRecipient>, ExitError> {
    match recipients.len() {
        0..=MAX_RECIPIENTS => Ok(recipients.to_vec()),
        _ => Err(usage(&format!(
            "--backup-recipient: it may be said {MAX_RECIPIENTS} times at most"
        ))),
    }
}

/// Opens the folder of temporary files for a command: the one that was typed, or the system's.
pub(crate) fn command_spool(typed: &BackupStoreArguments) -> Result<Spool, ExitError> {
    match &typed.backup_spool {
        Some(folder) => Spool::open(folder)
            .map_err(|error| usage(&format!("--backup-spool: {}", error_chain(&error)))),
        None => Ok(Spool::system()),
    }
}

fn usage(text: &str) -> ExitError {
    ExitError::Usage(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(to: &str) -> BackupStoreArguments {
        BackupStoreArguments { backup_to: Some(to.to_owned()), ..BackupStoreArguments::default() }
    }

    #[test]
    fn a_store_is_a_directory_or_a_bucket() {
        let place =
            |to: &str| StoreSettings::resolve(&typed(to)).map(|store| store.unwrap().to_string());
        assert_eq!(place("/backups").unwrap(), "/backups");
        assert_eq!(place("s3://b").unwrap(), "s3://b");
        assert_eq!(place("s3://b/").unwrap(), "s3://b");
        assert_eq!(place("s3://b/p/q/").unwrap(), "s3://b/p/q");
        for wrong in
            ["gs://b", "s3://", "s3:///p", "s3://b/../c", "s3://b/c//d", "s3://b?x", "file:///b"]
                .into_iter()
                .chain(["s3:/b", "s3:b/p", "S3://b"])
        {
            assert!(matches!(place(wrong), Err(ExitError::Usage(_))), "{wrong}");
        }
        assert_eq!(StoreSettings::resolve(&BackupStoreArguments::default()).unwrap(), None);
    }

    #[test]
    fn flags_without_a_place_are_refused() {
        let endpoint = BackupStoreArguments {
            backup_endpoint: Some("https://s:1".to_owned()),
            ..BackupStoreArguments::default()
        };
        assert!(StoreSettings::resolve(&endpoint).is_err());
        let every = BackupRetentionArguments {
            backup_every: Some(DEFAULT_INTERVAL),
            ..BackupRetentionArguments::default()
        };
        let nowhere = BackupStoreArguments::default();
        assert!(BackupSettings::resolve(&nowhere, &every, &[]).is_err());
        let nothing = BackupRetentionArguments::default();
        assert!(BackupSettings::resolve(&nowhere, &nothing, &[]).unwrap().is_none());
    }

    #[test]
    fn each_missing_protection_gives_a_warning() {
        let plain = BackupStoreArguments {
            backup_endpoint: Some("http://s:1".to_owned()),
            ..typed("s3://b")
        };
        let nothing = BackupRetentionArguments::default();
        let settings = BackupSettings::resolve(&plain, &nothing, &[]).unwrap().unwrap();
        let warnings = settings.warnings().join("\n");
        assert!(
            warnings.contains("without TLS") && warnings.contains("--backup-recipient"),
            "{warnings}"
        );
        assert_eq!((settings.every, settings.retention.keep), (DEFAULT_INTERVAL, 30));
        assert_eq!(settings.verify_every, None);
    }

    #[test]
    fn a_verification_needs_a_store_and_a_long_enough_interval() {
        let verified = |seconds| BackupRetentionArguments {
            backup_verify_every: Some(Duration::from_secs(seconds)),
            ..BackupRetentionArguments::default()
        };
        let nowhere = BackupStoreArguments::default();
        assert!(BackupSettings::resolve(&nowhere, &verified(60), &[]).is_err());
        assert!(BackupSettings::resolve(&typed("/backups"), &verified(9), &[]).is_err());
        let settings = BackupSettings::resolve(&typed("/backups"), &verified(60), &[]);
        let every = settings.unwrap().unwrap().verify_every;
        assert_eq!(every, Some(Duration::from_secs(60)));
    }
}
