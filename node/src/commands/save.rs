//! `muster-node snapshot save`: requests a snapshot from a member over the etcd API and writes it
//! to a file.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufReader, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Args;
use hyper_util::rt::TokioIo;
use node_engine::tls::{ClientFiles, TlsError, client_config};
use node_proto::etcdserverpb::{SnapshotRequest, maintenance_client::MaintenanceClient};
use node_state::{
    disk::{Disk as _, RealDisk},
    etcd_file::{EtcdFile, EtcdFileError, HashCheck},
};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint, Uri};

use super::{FAILED, USAGE, print, print_error, print_to_stderr};

/// Timeout of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time to wait for the next chunk of a snapshot. The member determines the snapshot's size
/// before it sends the first chunk, which takes time.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(60);
/// Delay before the first progress line.
const FIRST_PROGRESS_DELAY: Duration = Duration::from_secs(2);
/// Interval between progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum size of a chunk in bytes; etcd's chunks have 32 KiB.
const MAX_CHUNK_BYTES: usize = 16 << 20;

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
enum SaveError {
    #[error("snapshot must be requested to one selected node, not multiple {0:?}")]
    ManyEndpoints(Vec<String>),
    #[error("{0:?} is not the URL of a member: http://HOST:PORT or https://HOST:PORT")]
    Url(String),
    #[error("an https endpoint needs --cacert, which says whose certificate to trust")]
    NoCa,
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("cannot connect to {0}")]
    Connect(String, #[source] tonic::transport::Error),
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
            match error {
                SaveError::ManyEndpoints(_)
                | SaveError::Url(_)
                | SaveError::NoCa
                | SaveError::NotARegularFile(_) => USAGE,
                _ => FAILED,
            }
        }
    }
}

async fn save(command: &SaveArgs) -> Result<(), SaveError> {
    let target = &command.file;
    // A rename would replace a device file by the snapshot, so only regular files and symbolic
    // links may be replaced.
    if target.symlink_metadata().is_ok_and(|found| !found.is_file() && !found.is_symlink()) {
        return Err(SaveError::NotARegularFile(target.clone()));
    }
    let channel = connect(command).await?;
    let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let aside = target.with_file_name(format!(".{name}.part-{}", std::process::id()));
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| SaveError::File { action, path, source }
    };
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(&aside).map_err(failed("make", &aside))?;
    let received = async {
        receive(channel, &mut file, &aside).await?;
        file.sync_all().map_err(failed("sync", &aside))?;
        let whole = File::open(&aside).map_err(failed("read", &aside))?;
        EtcdFile::open(BufReader::new(whole), HashCheck::Required)?;
        std::fs::rename(&aside, target).map_err(failed("give its name to", target))?;
        let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        RealDisk.sync_dir(folder).map_err(failed("sync", folder))
    };
    let received = received.await;
    if received.is_err() {
        // Removes the incomplete snapshot, which is of no use.
        let _ = std::fs::remove_file(&aside);
    }
    received
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
        file.write_all(&chunk.blob).map_err(|source| SaveError::File {
            action: "write",
            path: path.to_owned(),
            source,
        })?;
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

async fn connect(command: &SaveArgs) -> Result<Channel, SaveError> {
    let endpoints: Vec<String> = command.endpoints.split(',').map(str::to_owned).collect();
    let [url] = endpoints.as_slice() else { return Err(SaveError::ManyEndpoints(endpoints)) };
    let url = if url.contains("://") { url.clone() } else { format!("http://{url}") };
    let wrong = || SaveError::Url(url.clone());
    let uri: Uri = url.parse().map_err(|_| wrong())?;
    let host = uri.host().ok_or_else(wrong)?.trim_matches(['[', ']']).to_owned();
    let endpoint = Endpoint::from(uri.clone()).connect_timeout(CONNECT_TIMEOUT);
    let failed = |error| SaveError::Connect(url.clone(), error);
    match uri.scheme_str() {
        Some("http") => endpoint.connect().await.map_err(failed),
        Some("https") => {
            let ca = command.cacert.clone().ok_or(SaveError::NoCa)?;
            let own = command.cert.clone().zip(command.key.clone());
            let config = client_config(&ClientFiles { ca, own }, b"h2")?;
            let address =
                format!("{}:{}", uri.host().unwrap_or_default(), uri.port_u16().unwrap_or(443));
            let name = ServerName::try_from(host).map_err(|_| wrong())?;
            // TLS is added by the connector below. With an https address the library would add TLS
            // a second time.
            let plain = Endpoint::from_shared(format!("http://{address}")).map_err(failed)?;
            let dial = tower::service_fn(move |_: Uri| {
                let (config, address, name) = (Arc::clone(&config), address.clone(), name.clone());
                async move {
                    let stream = TcpStream::connect(address).await?;
                    let tls = tokio_rustls::TlsConnector::from(config);
                    Ok::<_, io::Error>(TokioIo::new(tls.connect(name, stream).await?))
                }
            });
            let plain = plain.connect_timeout(CONNECT_TIMEOUT);
            plain.connect_with_connector(dial).await.map_err(failed)
        }
        _ => Err(wrong()),
    }
}
