//! Command-line arguments of `init`, `serve`, `backup` and `restore`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use discovery_types::key::{KeyError, PublicKey};
use discovery_types::url::ServiceUrl;
use zeroize::Zeroizing;

/// Maximum size of a public key's file, in bytes. A public key is one line.
const MAX_PUBLIC_KEY_FILE: u64 = 4096;
/// Maximum size of a file with a database's URL, in bytes. The URL is one line.
pub(super) const MAX_URL_FILE: u64 = 4096;

/// Makes the key directory of a new discovery service.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct InitArgs {
    /// Public key of the first owner, as `muster-discovery key new` prints it, or the .pub file
    /// that holds it
    #[arg(long, value_name = "PUBLIC_KEY|FILE", value_parser = read_public_key)]
    pub owner: PublicKey,
    /// Directory to make; must not exist, or must be empty
    #[arg(long, value_name = "KEYDIR")]
    pub dir: PathBuf,
    /// URL under which admins and agents reach the service; may be repeated
    #[arg(long = "url", value_name = "URL", required = true)]
    pub urls: Vec<String>,
    /// Trust domain of the members' SPIFFE names
    #[arg(long, value_name = "NAME", default_value = "muster")]
    pub trust_domain: String,
}

/// Arguments of the `serve` command.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ServeArgs {
    /// Key directory made by `init`
    #[arg(long, value_name = "DIR")]
    pub keys: PathBuf,
    /// Address to listen on; may be repeated
    #[arg(long, value_name = "ADDR:PORT", default_value = "0.0.0.0:8443")]
    pub listen: Vec<SocketAddr>,
    /// Address on which stock etcd reaches its discovery protocol v3 (gRPC, etcd 3.6 and newer);
    /// may be repeated. Without it, etcd tokens for v3 can't be made here
    #[arg(long, value_name = "ADDR:PORT")]
    pub etcd_listen: Vec<SocketAddr>,
    /// Directory of this process's ledger of commits: outside Postgres, not in the key directory,
    /// one per process, on a disk that outlives the database's. A ledger from a backup is
    /// recognised as a copy: together with a restored database it waits for an owner's `db accept`
    #[arg(long, value_name = "DIR")]
    pub ledger: PathBuf,
    /// Folder with the clouds' keys, for tokens that require an identity document of the host
    /// (`token create --require`): aws.pem has AWS' certificates, gcp.json and azure.json are JWKS.
    /// It is read again each minute
    #[arg(long, value_name = "DIR")]
    pub identity_keys: Option<PathBuf>,
    #[command(flatten)]
    pub console: ConsoleArgs,
    #[command(flatten)]
    pub database: DatabaseArgs,
    #[command(flatten)]
    pub times: TimeArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Check the set-up and exit: keys, certificate, database, ledger, addresses, console. Starts
    /// and changes nothing. Exit code 0 if a start would work, 1 if not. --json prints one document
    #[arg(long)]
    pub check: bool,
}

/// Options of the console: read-only pages for browsers.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
pub(crate) struct ConsoleArgs {
    /// Address on which browsers reach the console; may be repeated. Without it there is no console
    #[arg(long, value_name = "ADDR:PORT")]
    pub console_listen: Vec<SocketAddr>,
    /// Certificate that the console shows to browsers: a PEM chain, leaf first [default: the
    /// service's own, which browsers don't trust]
    #[arg(long, value_name = "FILE", requires_all = ["console_key", "console_listen"])]
    pub console_cert: Option<PathBuf>,
    /// Private key of the certificate in --console-cert, PEM (mode 0600)
    #[arg(long, value_name = "FILE", requires = "console_cert")]
    pub console_key: Option<PathBuf>,
    /// URL under which browsers reach the console [default: the first --console-listen; if that is
    /// 0.0.0.0 or ::, its port at the host of the service's first URL]
    #[arg(long, value_name = "URL", requires = "console_listen")]
    pub console_url: Option<ServiceUrl>,
}

/// Environment variable with the database's URL. It is read only if no option names a database: a
/// value set for every command must not contradict the command line.
pub(super) const DATABASE_URL: &str = "MUSTER_DATABASE_URL";

/// Options that choose the Postgres server.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub(crate) struct DatabaseArgs {
    /// Run a managed Postgres in this directory
    #[arg(long, value_name = "DIR", conflicts_with = "database_url")]
    pub managed_postgres: Option<PathBuf>,
    /// Use this Postgres (13 or newer). A URL with a password is refused here: it belongs in the
    /// environment variable or a file [env: MUSTER_DATABASE_URL, if no option names a database]
    #[arg(long, value_name = "URL")]
    pub database_url: Option<String>,
    /// Use the Postgres whose URL stands in this file (mode 0600)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["database_url", "managed_postgres"])]
    pub database_url_file: Option<PathBuf>,
    /// Folder with `initdb` and `postgres`, if not in PATH or /usr/lib/postgresql/*/bin
    #[arg(long, value_name = "DIR")]
    pub postgres_bin: Option<PathBuf>,
    /// User that the managed Postgres runs as when this process is root
    #[arg(long, value_name = "USER", default_value = "postgres")]
    pub postgres_user: String,
    /// Maximum number of connections to Postgres
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=500))]
    pub pool_size: u32,
}

/// The managed Postgres that is backed up, or restored.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub(crate) struct PostgresArgs {
    /// The folder that `serve --managed-postgres` names
    #[arg(long, value_name = "DIR")]
    pub managed_postgres: PathBuf,
    /// Folder with `pg_dump` and `pg_restore`, if not in PATH or /usr/lib/postgresql/*/bin
    #[arg(long, value_name = "DIR")]
    pub postgres_bin: Option<PathBuf>,
    /// User that the managed Postgres runs as when this process is root
    #[arg(long, value_name = "USER", default_value = "postgres")]
    pub postgres_user: String,
}

/// Makes a backup while the service runs.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Example, on the service's machine, as the user that it runs as:
  muster-discovery backup --managed-postgres pg --ledger ledger --out backup-2026-07-01

DIR (mode 0700) gets the database, the ledger, and a list with their hashes. The key directory isn't
in it: `backup-keys` copies that, once. With a Postgres of your own, use pg_dump for the database.")]
pub(crate) struct BackupArgs {
    #[command(flatten)]
    pub postgres: PostgresArgs,
    /// The folder that `serve --ledger` names
    #[arg(long, value_name = "DIR")]
    pub ledger: PathBuf,
    /// New folder for the backup
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

/// Puts a backup into new folders.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Example:
  muster-discovery restore --from backup-2026-07-01 --managed-postgres pg-new --ledger ledger-new
  muster-discovery serve --keys keys --managed-postgres pg-new --ledger ledger-new
  muster-discovery db accept --yes                                   (an owner, on their machine)

`db accept` is needed only if database and ledger are both lost: with the ledger of today nothing has
to be accepted.")]
pub(crate) struct RestoreArgs {
    /// The folder that `backup --out` has made
    #[arg(long, value_name = "DIR")]
    pub from: PathBuf,
    #[command(flatten)]
    pub postgres: PostgresArgs,
    /// A new folder for the ledger
    #[arg(long, value_name = "DIR")]
    pub ledger: PathBuf,
}

/// Copies the key directory to one encrypted file.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples, on the service's machine, as the user that it runs as:
  muster-discovery backup-keys --keys keys --recipient age1… --out keys.age
  muster-discovery backup-keys --keys keys --recipient 0123456789ABCDEF0123456789ABCDEF01234567 --out keys.gpg

The programs `age` or `gpg` encrypt the file; nothing is written that isn't encrypted. Keep the private
keys of the recipients off this machine, and the file apart from the backups of database and ledger.")]
pub(crate) struct BackupKeysArgs {
    /// The key directory that `serve --keys` names
    #[arg(long, value_name = "DIR")]
    pub keys: PathBuf,
    /// Public key of somebody who may decrypt the file: an age recipient (age1…), an SSH public
    /// key, or the fingerprint of a GPG key; may be given several times
    #[arg(long = "recipient", value_name = "RECIPIENT", required = true)]
    pub recipients: Vec<String>,
    /// New file for the backup
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
}

/// Makes the next keys of the service.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples, on the service's machine, as the user that it runs as:
  muster-discovery keys rotate --keys keys --signing --kek
  muster-discovery keys rotate --keys keys --tls --out keys-new

New signing and key-encryption keys stand beside the old ones, which still verify and open. Copy the
files to all machines of the service, and restart its processes one after the other. Back the directory
up again.

Clients pin the TLS key, so a new one needs an overlap: announce both pins, start the processes with the
new folder, then announce the new pin alone. The command prints both pins.")]
#[group(skip)]
#[command(group(clap::ArgGroup::new("rotated").args(["signing", "kek", "tls"]).required(true).multiple(true)))]
pub(crate) struct RotateKeysArgs {
    /// The key directory that `serve --keys` names
    #[arg(long, value_name = "DIR")]
    pub keys: PathBuf,
    /// Make the next key that signs access tokens and commit documents
    #[arg(long)]
    pub signing: bool,
    /// Make the next key that encrypts the keys of clusters' CAs
    #[arg(long)]
    pub kek: bool,
    /// Make another TLS key, in a copy of the key directory
    #[arg(long, requires = "out")]
    pub tls: bool,
    /// New folder for the copy with the new TLS key
    #[arg(long, value_name = "DIR", requires = "tls")]
    pub out: Option<PathBuf>,
}

/// Wraps the keys of clusters' CAs under the newest key-encryption key.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Example, on the service's machine, as the user that it runs as, while the service runs:
  muster-discovery keys rewrap --keys keys --managed-postgres pg

First give every process of the service the new key (`keys rotate --kek`) and restart it: a process
without it can't open what is wrapped here. Ledgers and backups keep the keys as they were wrapped then,
so old kek-N.key files stay necessary for them.")]
pub(crate) struct RewrapKeysArgs {
    /// The key directory that `serve --keys` names
    #[arg(long, value_name = "DIR")]
    pub keys: PathBuf,
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// Skip the confirmation prompt
    #[arg(long)]
    pub yes: bool,
}

/// Decrypts a backup of the key directory into a new folder.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  muster-discovery restore-keys --from keys.age --identity age-identity.txt --keys keys
  muster-discovery restore-keys --from keys.gpg --keys keys

With GPG, the private key is taken from GPG's own keyring.")]
pub(crate) struct RestoreKeysArgs {
    /// The file that `backup-keys --out` has made
    #[arg(long, value_name = "FILE")]
    pub from: PathBuf,
    /// File with the private key that decrypts the backup: an age identity or an SSH private key
    #[arg(long, value_name = "FILE")]
    pub identity: Option<PathBuf>,
    /// New folder for the key directory
    #[arg(long, value_name = "DIR")]
    pub keys: PathBuf,
}

/// Options for the time limits of protocol and service.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub(crate) struct TimeArgs {
    /// How long a seat is held without a request from its agent
    #[arg(long, value_name = "TIME", default_value = "90s", value_parser = parse_duration)]
    pub lease: Duration,
    /// How long a proposal may take before it is given up
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub prepare: Duration,
    /// Interval between two sweeps over the clusters that no agent polls
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub sweep: Duration,
    /// How long a long poll is parked at most
    #[arg(long, value_name = "TIME", default_value = "45s", value_parser = parse_duration)]
    pub poll: Duration,
    /// Maximum time for forming that a cluster's statement may set
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_duration)]
    pub deadline: Duration,
    /// How long a draft waits for its statement
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    pub draft: Duration,
    /// How long an answer waits for a client that doesn't read it; then the connection ends
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = parse_duration)]
    pub unread: Duration,
    /// Time limit for each step of a new connection: first byte, start of the TLS handshake, end of
    /// the handshake
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = parse_duration)]
    pub handshake: Duration,
    /// How long running requests get after SIGTERM
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub drain: Duration,
}

/// Options for limits on connections, polls and requests.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub(crate) struct LimitArgs {
    /// Maximum number of open connections
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub max_connections: usize,
    /// Maximum number of open connections of one address (of one /64 with IPv6); further ones are
    /// closed at once
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    pub max_connections_per_address: usize,
    /// Maximum number of long polls parked at a time; further ones get 503 and Retry-After
    #[arg(long, value_name = "N", default_value_t = 8_000)]
    pub max_parked_polls: usize,
    /// Maximum number of requests per second and address; four times as many new connections are
    /// let in
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub rate: u32,
    /// Requests that an address may make at once before `--rate` holds it back
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub burst: u32,
}

/// Reads a public key, given as text or as the path of a file that holds it.
///
/// The error is the sentence that the command line shows. The sentence never repeats the argument,
/// which can be a private key by mistake.
pub(crate) fn read_public_key(text: &str) -> Result<PublicKey, String> {
    let parse = |text: &str| text.trim().parse().map_err(|error: KeyError| error.to_string());
    if text.starts_with("ed25519:") {
        return parse(text);
    }
    let unread = |error: std::io::Error| format!("expected `ed25519:…` or a .pub file: {error}");
    let content = muster_files::read_named(Path::new(text), MAX_PUBLIC_KEY_FILE).map_err(unread)?;
    parse(&String::from_utf8_lossy(&Zeroizing::new(content)))
}

/// Parses a time such as `90s`, `500ms`, `10m` or `24h`. A bare number is seconds.
///
/// The error is the sentence that the command line shows.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| format!("`{text}` is not a time, such as 90s"))?;
    let milliseconds = match unit {
        "ms" => Some(number),
        "" | "s" => number.checked_mul(1_000),
        "m" => number.checked_mul(60_000),
        "h" => number.checked_mul(3_600_000),
        "d" => number.checked_mul(86_400_000),
        _ => return Err(format!("`{unit}` is not a unit of time: use ms, s, m, h or d")),
    };
    match milliseconds {
        Some(0) => Err("a time must be longer than nothing".into()),
        Some(value) => Ok(Duration::from_millis(value)),
        None => Err(format!("`{text}` is too long a time")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_parsed_with_its_unit() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("24h"), Ok(Duration::from_secs(86_400)));
    }

    #[test]
    fn texts_that_are_no_times_are_refused() {
        for text in ["", "s", "-1s", "1.5s", "0s", "3 weeks", "99999999999999999999h"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
