//! Arguments of `muster-agent backup`, and the backup flags of `run`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use super::ClusterAccess;
use crate::backup::name::{BackupName, ClusterFolder};
use crate::backup::settings::BackupRecipient;

/// Text below the list of subcommands in the help.
const BACKUP_HELP: &str = "\
A backup is a snapshot that was opened and read before it counted. It is encrypted if a recipient was
given, in the format of age: `age --decrypt --identity key.txt FILE` gives the snapshot, too.

EXAMPLES
  On a member's host, now:
    muster-agent backup run --backup-to /backups --backup-recipient age1…
  On any machine that reaches the store:
    muster-agent backup list --backup-to s3://bucket/prefix
    muster-agent backup verify newest --backup-to s3://bucket/prefix --identity key.txt --drill
    muster-agent backup restore newest --to snapshot.db --backup-to s3://bucket/prefix --identity key.txt

EXIT CODES
  0  done    1  failed, or a backup is damaged    2  wrong usage";

/// Location of the store of backups, and how it is reached.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct BackupStoreArguments {
    /// Store of the backups: a directory, or s3://BUCKET/PREFIX of an S3-compatible store.
    #[arg(long, value_name = "DIR|URL", env = "MUSTER_BACKUP_TO", global = true)]
    pub backup_to: Option<String>,
    /// URL of the S3-compatible service (default: Amazon's, or AWS_ENDPOINT_URL).
    #[arg(long, value_name = "URL", env = "MUSTER_BACKUP_ENDPOINT", global = true)]
    pub backup_endpoint: Option<String>,
    /// CA certificates of the S3-compatible service, PEM (default: those of the system).
    #[arg(long, value_name = "FILE", env = "MUSTER_BACKUP_CA", global = true)]
    pub backup_ca: Option<PathBuf>,
    /// File with aws_access_key_id and aws_secret_access_key (default: AWS_… variables, or the role
    /// of the machine). Keep it 0600.
    #[arg(long, value_name = "FILE", env = "MUSTER_BACKUP_CREDENTIALS", global = true)]
    pub backup_credentials: Option<PathBuf>,
    /// Folder for temporary files, which needs room for a snapshot (default: backup-spool in the
    /// agent's state for run, the system's for commands).
    #[arg(long, value_name = "DIR", env = "MUSTER_BACKUP_SPOOL", global = true)]
    pub backup_spool: Option<PathBuf>,
}

/// The public keys for which backups are encrypted.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct BackupRecipientArguments {
    /// Public key of age (age1…, made by age-keygen) for which backups are encrypted. May be
    /// repeated; then any one of the private keys decrypts.
    #[arg(long, value_name = "AGE1…", env = "MUSTER_BACKUP_RECIPIENT", value_delimiter = ',')]
    pub backup_recipient: Vec<BackupRecipient>,
}

/// The member whose agent saves the scheduled backups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackupBy {
    /// The agent whose node leads; give all agents the same flags.
    #[default]
    Leader,
    /// This host's agent, whether or not its node leads.
    ThisHost,
}

impl BackupBy {
    /// Returns the value as words of a sentence.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Leader => "the agent of the leader",
            Self::ThisHost => "this agent",
        }
    }
}

/// Schedule and retention of backups.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct BackupRetentionArguments {
    /// How often a backup is saved: 90s, 30m, 6h or 1d (default: 6h).
    #[arg(long, value_name = "TIME", env = "MUSTER_BACKUP_EVERY", value_parser = parse_interval)]
    pub backup_every: Option<Duration>,
    /// How often the newest stored backup and an older one are fetched and verified: 1d (default:
    /// never). Encrypted backups are only compared with their checksums.
    #[arg(
        long, value_name = "TIME", env = "MUSTER_BACKUP_VERIFY_EVERY",
        value_parser = parse_interval
    )]
    pub backup_verify_every: Option<Duration>,
    /// Number of newest backups that are kept (default: 30).
    #[arg(
        long, value_name = "NUMBER", env = "MUSTER_BACKUP_KEEP",
        value_parser = clap::value_parser!(u32).range(1..=10_000)
    )]
    pub backup_keep: Option<u32>,
    /// Age above which a backup is deleted even if --backup-keep would keep it: 30d (default:
    /// none).
    #[arg(long, value_name = "TIME", env = "MUSTER_BACKUP_KEEP_FOR", value_parser = parse_interval)]
    pub backup_keep_for: Option<Duration>,
    /// Agent that saves: the leader's, or this host's.
    #[arg(long, value_enum, value_name = "WHO", env = "MUSTER_BACKUP_BY", default_value_t)]
    pub backup_by: BackupBy,
}

impl BackupRetentionArguments {
    /// Number of backups that are kept unless the command line gives another.
    pub(crate) const DEFAULT_KEEP: u32 = 30;
}

/// Parses a time such as `90s`, `30m`, `6h` or `30d`.
fn parse_interval(text: &str) -> Result<Duration, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| "say a time such as 90s, 30m, 6h or 30d")?;
    let seconds = match unit {
        "s" => Some(number),
        "m" => number.checked_mul(60),
        "h" => number.checked_mul(3600),
        "d" => number.checked_mul(86_400),
        _ => return Err("the unit is s, m, h or d, as in 6h".to_owned()),
    };
    match seconds {
        Some(0) => Err("a time must be longer than nothing".to_owned()),
        Some(seconds) => Ok(Duration::from_secs(seconds)),
        None => Err("the time is too long".to_owned()),
    }
}

/// Arguments of `muster-agent backup`.
#[derive(Args, Debug)]
#[command(after_long_help = BACKUP_HELP)]
pub(crate) struct BackupCommand {
    /// Options for the store of backups.
    #[command(flatten)]
    pub store: BackupStoreArguments,
    /// Options for reaching the cluster.
    #[command(flatten)]
    pub access: ClusterAccess,
    /// Id of the cluster, if the store has backups of several clusters (default: this host's
    /// cluster).
    #[arg(long, value_name = "ID", global = true)]
    pub cluster: Option<ClusterFolder>,
    /// The subcommand to run.
    #[command(subcommand)]
    pub verb: BackupSubcommand,
}

/// The subcommands of `muster-agent backup`.
#[derive(Debug, Subcommand)]
pub(crate) enum BackupSubcommand {
    /// Save a backup now, of this host's own node; deletes nothing.
    Run(BackupRecipientArguments),
    /// List the backups in the store, oldest first.
    List,
    /// Prove that backups are whole: fetch, decrypt and open them, and read every row.
    Verify(BackupVerifyArguments),
    /// Prove and decrypt a backup, and write its snapshot to a file.
    Restore(BackupRestoreArguments),
}

/// A backup, as it is named on a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BackupChoice {
    /// The newest backup in the store.
    Newest,
    /// The backup with this name.
    Named(BackupName),
}

impl std::str::FromStr for BackupChoice {
    type Err = crate::backup::name::NoBackupName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "newest" => Ok(Self::Newest),
            name => name.parse().map(Self::Named),
        }
    }
}

/// Arguments for the verification of a backup's signature.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct SignatureArguments {
    /// File by which signatures are verified: statements.json of `muster-discovery ca issue`, the
    /// file of `muster-discovery cluster export`, or peer-ca.crt in agent/tls of a member's data
    /// directory (default: what this host's agent knows, if it is a member).
    #[arg(long, value_name = "FILE")]
    pub trust: Option<PathBuf>,
    /// Take backups without a signature, too, such as those of older versions. Otherwise they are
    /// refused where signatures can be verified.
    #[arg(long)]
    pub allow_unsigned: bool,
}

/// Arguments of `backup verify`.
#[derive(Args, Debug)]
pub(crate) struct BackupVerifyArguments {
    /// The backup's name, or newest.
    #[arg(value_name = "NAME", default_value = "newest")]
    pub backup: BackupChoice,
    /// Verify all backups of the cluster.
    #[arg(long, conflicts_with = "backup")]
    pub all: bool,
    /// File with the private key that decrypts, made by age-keygen. Without it, an encrypted backup
    /// is only checked against its checksum.
    #[arg(long, value_name = "FILE")]
    pub identity: Option<PathBuf>,
    /// Also make a cluster of one member from the backup, start it for a moment on loopback, and
    /// compare its keys and revision. An encrypted backup needs --identity.
    #[arg(long, conflicts_with = "all")]
    pub drill: bool,
    /// The node's program for --drill (default: muster-node beside this program, else in PATH). An
    /// etcd works, with its etcdutl beside it or in PATH (etcdctl before 3.5).
    #[arg(long, value_name = "PATH", requires = "drill")]
    pub node_binary: Option<PathBuf>,
    /// Options for the verification of signatures.
    #[command(flatten)]
    pub signatures: SignatureArguments,
}

/// Arguments of `backup restore`.
#[derive(Args, Debug)]
pub(crate) struct BackupRestoreArguments {
    /// The backup's name, or newest.
    #[arg(value_name = "NAME")]
    pub backup: BackupChoice,
    /// File to be written (0600), which must not exist yet.
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
    /// File with the private key that decrypts, made by age-keygen.
    #[arg(long, value_name = "FILE")]
    pub identity: Option<PathBuf>,
    /// Options for the verification of signatures.
    #[command(flatten)]
    pub signatures: SignatureArguments,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_a_unit() {
        assert_eq!(parse_interval("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_interval("6h"), Ok(Duration::from_hours(6)));
        assert_eq!(parse_interval("30d"), Ok(Duration::from_secs(30 * 86_400)));
        for wrong in
            ["", "6", "0h", "h", "-1h", "1w", "99999999999999999999s", "9999999999999999999d"]
        {
            assert!(parse_interval(wrong).is_err(), "{wrong}");
        }
    }
}
