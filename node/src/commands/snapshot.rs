//! `muster-node snapshot save|status|restore`, with the flags and texts of etcdctl and etcdutl.

use std::{
    io::BufReader,
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand};
use node_state::etcd_file::{EtcdFile, EtcdFileError, FileStatus, HashCheck};

use super::{FAILED, USAGE, print, print_error, print_to_stderr, save};
use crate::{
    config::restored_cluster,
    recovery::{self, RestoreError, RestoreOptions},
};

#[derive(Debug, Subcommand)]
pub(super) enum SnapshotCommand {
    /// Save a member's data as a snapshot file.
    #[command(
        long_about = "Saves a member's data as a snapshot file that etcd's tools read as well. The \
        file (mode 0600) gets its name once it is complete, its hash is right, and it is on \
        disk."
    )]
    Save(save::SaveArgs),
    /// Show a snapshot file's hash, revision, total keys, total size and version.
    Status {
        /// The snapshot file to examine.
        file: PathBuf,
        /// Print one JSON document, as `etcdutl -w json` does.
        #[arg(long)]
        json: bool,
    },
    /// Make the data directory of a member of a new cluster from a snapshot file.
    #[command(
        long_about = "Makes the data directory of a member of a new cluster from a snapshot file, \
            one that muster-node or etcd saved. Run it once on each of the new cluster's hosts, with \
            the same file, token and --initial-cluster; then start the members. If clients may have \
            seen revisions later than the snapshot, add --bump-revision 1000000000 --mark-compacted: \
            see below. Member and cluster \
            ids are new unless names, URLs and token are the old ones: give a new token, and members \
            of the old cluster can't talk to the new one.",
        after_long_help = "CLIENTS THAT HAVE SEEN LATER REVISIONS\n  \
            The old cluster may have gone on after the snapshot. Clients that saw its later \
            revisions would take the new cluster's for them. --bump-revision 1000000000 \
            --mark-compacted makes all new revisions higher, and tells clients that watch from an \
            old one to read anew."
    )]
    Restore(Box<RestoreArgs>),
}

/// Flags of `snapshot restore`. They are those of etcdutl.
#[derive(Debug, Args)]
pub(super) struct RestoreArgs {
    /// The snapshot file to restore.
    file: PathBuf,
    /// The new data directory: must not exist yet, or must be empty. Default: NAME.etcd
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// The new member's name.
    #[arg(long, default_value = "default")]
    name: String,
    /// Name and peer URL of each of the new cluster's first members.
    #[arg(long, value_name = "NAME=URL,...", default_value = "default=http://localhost:2380")]
    initial_cluster: String,
    /// Token that distinguishes this cluster from another one of the same members. Default: derived
    /// from the file.
    #[arg(long, value_name = "TOKEN")]
    initial_cluster_token: Option<String>,
    /// Peer URLs at which the other members reach this one.
    #[arg(long, value_name = "URLS", default_value = "http://localhost:2380")]
    initial_advertise_peer_urls: String,
    /// How much to increase the latest revision after restore; needs --mark-compacted.
    #[arg(long, value_name = "N", default_value_t = 0)]
    bump_revision: i64,
    /// Mark the latest revision after restore as compacted; needs --bump-revision.
    #[arg(long, num_args = 0..=1, default_value_t = false, default_missing_value = "true", require_equals = true)]
    mark_compacted: bool,
    /// Accept a snapshot file whose hash is wrong or missing. An etcd's own member/snap/db has no
    /// hash.
    #[arg(long, num_args = 0..=1, default_value_t = false, default_missing_value = "true", require_equals = true)]
    skip_hash_check: bool,
    /// Has no effect: etcd's snapshots have the same format.
    #[arg(long)]
    from_etcd: bool,
    /// Leave out users and roles: every client that reaches the new cluster may do everything.
    #[arg(long)]
    drop_auth: bool,
    /// Not supported: the log is in the data directory.
    #[arg(long, hide = true)]
    wal_dir: Option<PathBuf>,
    /// Has no effect: this program maps no memory.
    #[arg(long, hide = true)]
    initial_memory_map_size: Option<u64>,
}

pub(super) fn run(command: &SnapshotCommand) -> u8 {
    match command {
        SnapshotCommand::Save(command) => save::run(command),
        SnapshotCommand::Status { file, json } => status(file, *json),
        SnapshotCommand::Restore(args) => restore(args),
    }
}

fn status(file: &Path, json: bool) -> u8 {
    let read = || -> Result<FileStatus, EtcdFileError> {
        let open = || muster_files::open_named(file).map(BufReader::new).map_err(EtcdFileError::Io);
        // Check the hash, but accept a file without one, such as a member's own database file.
        match EtcdFile::open(open()?, HashCheck::Required) {
            Ok(_) | Err(EtcdFileError::NoHash) => FileStatus::read(open()?),
            Err(error) => Err(error),
        }
    };
    match read() {
        Ok(status) if json => {
            print(&serde_json::to_string(&status).expect("text and numbers are JSON"))
        }
        Ok(FileStatus { hash, revision, total_keys, total_size, version }) => {
            let size = human_bytes(total_size);
            print(&format!("{hash:x}, {revision}, {total_keys}, {size}, {version}"))
        }
        Err(error) => {
            print_error(&error);
            FAILED
        }
    }
}

/// Formats a size like Go's `humanize.Bytes`, in units of powers of 1000. The number is rounded to
/// one decimal. If it is 10 or more, it is rounded again, to a whole number (half to even).
fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["kB", "MB", "GB", "TB", "PB", "EB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let power = bytes.ilog(1000);
    let unit = UNITS[power as usize - 1];
    let one = 1000_u128.pow(power);
    let tenths = (u128::from(bytes) * 20 + one) / (2 * one);
    let (whole, rest) = (tenths / 10, tenths % 10);
    if whole < 10 {
        return format!("{whole}.{rest} {unit}");
    }
    let up = rest > 5 || (rest == 5 && whole % 2 == 1);
    format!("{} {unit}", whole + u128::from(up))
}

fn restore(args: &RestoreArgs) -> u8 {
    if args.wal_dir.is_some() {
        print_to_stderr("Error: --wal-dir is not supported: the log lies in the data directory");
        return USAGE;
    }
    if args.bump_revision < 0 || (args.bump_revision > 0) != args.mark_compacted {
        // `--bump-revision` and `--mark-compacted` need each other. Otherwise clients could see
        // revisions that differ from those they know.
        print_to_stderr("Error: --mark-compacted required if --bump-revision > 0");
        return USAGE;
    }
    let token = match &args.initial_cluster_token {
        Some(token) => Ok(token.clone()),
        None => recovery::token_from_file(&args.file),
    };
    let token = match token {
        Ok(token) => token,
        Err(error) => {
            print_error(&error);
            return FAILED;
        }
    };
    let cluster = restored_cluster(
        &args.name,
        &args.initial_cluster,
        &args.initial_advertise_peer_urls,
        &token,
    );
    let cluster = match cluster {
        Ok(cluster) => cluster,
        Err(error) => {
            print_error(&error);
            return USAGE;
        }
    };
    let data_dir = args.data_dir.clone();
    let wanted = RestoreOptions {
        data_dir: data_dir.unwrap_or_else(|| PathBuf::from(format!("{}.etcd", args.name))),
        name: args.name.clone(),
        cluster,
        bump_revision: args.bump_revision,
        hash_check: if args.skip_hash_check { HashCheck::Skipped } else { HashCheck::Required },
        drop_auth: args.drop_auth,
    };
    match recovery::restore(&args.file, &wanted) {
        Ok(made) => {
            let own = wanted.cluster.member(&wanted.name).expect("it was restored as that");
            let (cluster, dir) = (wanted.cluster.id, wanted.data_dir.display());
            let (revision, compacted) = (made.revision, made.compacted);
            print(&format!(
                "Restored member {} of cluster {cluster} in {dir}: revision {revision}, compacted {compacted}",
                own.id
            ))
        }
        Err(error) => {
            print_error(&error);
            if matches!(error, RestoreError::InvalidTarget(_)) { USAGE } else { FAILED }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_formatted_as_by_go() {
        let shown =
            [0, 999, 1000, 9_949, 9_950, 20_480, 21_500, 99_999, 999_999, 2_100_000, u64::MAX];
        let shown = shown.map(human_bytes);
        assert_eq!(
            shown,
            [
                "0 B", "999 B", "1.0 kB", "9.9 kB", "10 kB", "20 kB", "22 kB", "100 kB", "1000 kB",
                "2.1 MB", "18 EB"
            ]
        );
    }
}
