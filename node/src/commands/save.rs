//! `muster-node snapshot save`: requests a snapshot from a member over the etcd API and writes it
//! to a file.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufReader, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::Args;
use node_proto::etcdserverpb::{SnapshotRequest, maintenance_client::MaintenanceClient};
use node_state::{
    disk::{Disk as _, RealDisk},
    etcd_file::{EtcdFile, EtcdFileError, HashCheck},
};
use tonic::transport::Channel;

use super::{
    FAILED, USAGE,
    connection::{ClientTls, ConnectError, connect},
    print, print_error, print_to_stderr,
};

/// Maximum time to wait for the next chunk of a snapshot. The member determines the snapshot's size
/// before it sends the first chunk, which takes time.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(60);
/// Delay before the first progress line.
const FIRST_PROGRESS_DELAY: Duration = Duration::from_secs(2);
/// Interval between progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum size of a chunk in bytes; etcd's chunks have 32 KiB.
const MAX_CHUNK_BYTES: usize = 16 << 20;
/// Maximum number of incomplete files for one snapshot file and process ID.
const MAX_LEFT_FILES: u32 = 100;

/// Flags and environment variables of `snapshot save`. They are those of etcdctl.
#[derive(Debug, Args)]
pub(super) struct SaveArgs {
    /// The snapshot file to make.
    file: PathBuf,
    /// Client URL of the one member to ask.
    #[arg(
        long,
        value_name = "URL",
        env = "ETCDCTL_ENDPOINTS",
        default_value = "http://127.0.0.1:2379"
    )]
    endpoints: String,
    /// The CA that must have signed the member's certificate, PEM.
    #[arg(long, value_name = "FILE", env = "ETCDCTL_CACERT")]
    cacert: Option<PathBuf>,
    /// The client certificate to present, PEM.
    #[arg(long, value_name = "FILE", env = "ETCDCTL_CERT", requires = "key")]
    cert: Option<PathBuf>,
    /// The client certificate's private key, PEM.
    #[arg(long, value_name = "FILE", env = "ETCDCTL_KEY", requires = "cert")]
    key: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum SaveError {
    #[error("snapshot must be requested to one selected node, not multiple {0:?}")]
    ManyEndpoints(Vec<String>),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("{0}: {1}")]
    Rpc(tonic::Code, String),
    #[error("nothing came for {} s", CHUNK_TIMEOUT.as_secs())]
    Stalled,
    #[error("what came is no whole snapshot")]
    Damaged(#[from] EtcdFileError),
    #[error("{} is there and no regular file: name a file", .0.display())]
    NotARegularFile(PathBuf),
    #[error("cannot {action} {}", path.display())]
    File {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl SaveError {
    /// Whether a wrong command line caused the error. The command then exits with the code for
    /// wrong usage.
    pub(super) fn is_usage(&self) -> bool {
        match self {
            Self::ManyEndpoints(_) | Self::NotARegularFile(_) => true,
            Self::Connect(error) => error.is_usage(),
            Self::Rpc(..) | Self::Stalled | Self::Damaged(_) | Self::File { .. } => false,
        }
    }
}

impl From<tonic::Status> for SaveError {
    fn from(status: tonic::Status) -> Self {
        Self::Rpc(status.code(), status.message().to_owned())
    }
}

pub(super) fn run(command: &SaveArgs) -> u8 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let saved = match runtime {
        Ok(runtime) => runtime.block_on(save(command)),
        Err(error) => {
            print_error(&error);
            return FAILED;
        }
    };
    match saved {
        Ok(()) => print(&format!("Snapshot saved at {}", command.file.display())),
        Err(error) => {
            print_error(&error);
            if error.is_usage() { USAGE } else { FAILED }
        }
    }
}

async fn save(command: &SaveArgs) -> Result<(), SaveError> {
    ensure_regular_file(&command.file)?;
    let endpoints: Vec<String> = command.endpoints.split(',').map(str::to_owned).collect();
    let [url] = endpoints.as_slice() else { return Err(SaveError::ManyEndpoints(endpoints)) };
    let tls = ClientTls {
        ca_flag: "--cacert",
        ca: command.cacert.clone(),
        own: command.cert.clone().zip(command.key.clone()),
    };
    save_to(connect(url, &tls).await?, &command.file).await?;
    Ok(())
}

/// Refuses a target that exists and is neither a regular file nor a symbolic link. A rename would
/// replace a device file by the snapshot.
pub(super) fn ensure_regular_file(target: &Path) -> Result<(), SaveError> {
    if target.symlink_metadata().is_ok_and(|found| !found.is_file() && !found.is_symlink()) {
        return Err(SaveError::NotARegularFile(target.to_owned()));
    }
    Ok(())
}

/// Saves a snapshot of the member behind `channel` as the file `target`. Returns the snapshot's
/// newest revision.
pub(super) async fn save_to(channel: Channel, target: &Path) -> Result<i64, SaveError> {
    let (mut file, aside) = make_aside(target)?;
    let received = async {
        receive(channel, &mut file, &aside).await?;
        file.sync_all().map_err(failed("sync", &aside))?;
        let revision = snapshot_revision(&aside)?;
        std::fs::rename(&aside, target).map_err(failed("give its name to", target))?;
        let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        RealDisk.sync_dir(folder).map_err(failed("sync", folder))?;
        Ok::<_, SaveError>(revision)
    };
    let received = received.await;
    if received.is_err() {
        // Remove the incomplete file: it is of no use.
        let _ = std::fs::remove_file(&aside);
    }
    received
}

/// Makes a new file beside `target`, for a snapshot that isn't whole yet. Returns its path too.
fn make_aside(target: &Path) -> Result<(File, PathBuf), SaveError> {
    let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut attempt = 1;
    loop {
        let aside = format!(".{name}.part-{}-{attempt}", std::process::id());
        let aside = target.with_file_name(aside);
        match options.open(&aside) {
            // The name is taken: a killed command leaves its incomplete file behind. In a
            // container, the next command can have the same process ID. So try the next number.
            Err(error)
                if error.kind() == io::ErrorKind::AlreadyExists && attempt < MAX_LEFT_FILES =>
            {
                attempt += 1;
            }
            made => return made.map_err(failed("make", &aside)).map(|file| (file, aside)),
        }
    }
}

/// Checks the hash of a snapshot file, and returns its newest revision.
pub(super) fn snapshot_revision(file: &Path) -> Result<i64, SaveError> {
    let whole = muster_files::open_named(file).map_err(failed("read", file))?;
    Ok(EtcdFile::open(BufReader::new(whole), HashCheck::Required)?.summary().revision)
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SaveError + use<> {
    let path = path.to_owned();
    move |source| SaveError::File { action, path, source }
}

async fn receive(channel: Channel, file: &mut File, path: &Path) -> Result<(), SaveError> {
    let mut client = MaintenanceClient::new(channel).max_decoding_message_size(MAX_CHUNK_BYTES);
    let next = tokio::time::timeout(CHUNK_TIMEOUT, client.snapshot(SnapshotRequest {})).await;
    let mut chunks = next.map_err(|_| SaveError::Stalled)??.into_inner();
    let started = Instant::now();
    let (mut told, mut bytes) = (started + FIRST_PROGRESS_DELAY, 0_u64);
    loop {
        let next = tokio::time::timeout(CHUNK_TIMEOUT, chunks.message()).await;
        let Some(chunk) = next.map_err(|_| SaveError::Stalled)?? else { return Ok(()) };
        file.write_all(&chunk.blob).map_err(failed("write", path))?;
        bytes += chunk.blob.len() as u64;
        if Instant::now() >= told {
            told = Instant::now() + PROGRESS_INTERVAL;
            let mib = |bytes: u64| bytes >> 20;
            print_to_stderr(&format!(
                "{} MiB, {} MiB to come",
                mib(bytes),
                mib(chunk.remaining_bytes)
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_incomplete_file_of_a_killed_command_with_the_same_process_id_is_no_obstacle() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("moved.db");
        let (_, first) = make_aside(&target).unwrap();
        let (_, second) = make_aside(&target).unwrap();
        assert!(first != second && first.exists() && second.exists());
        assert!(!target.exists());
        let nowhere = make_aside(&folder.path().join("nowhere/moved.db"));
        assert!(matches!(nowhere, Err(SaveError::File { action: "make", .. })), "{nowhere:?}");
    }
}
