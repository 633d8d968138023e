//! An S3-compatible store on loopback: the Versity gateway, which keeps objects as files.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result};

use super::credentials::Credentials;
use super::network::Network;
use super::process::ChildProcess;
use super::testbed::path_text;
use super::wait::wait_for;
use crate::go_program::GoProgram;

/// Name of the bucket that every gateway has.
pub const BUCKET: &str = "backups";
/// Access key id of the gateway's owner.
pub const ACCESS_KEY: &str = "tests-access-key";
/// Secret of the access key [`ACCESS_KEY`].
pub const SECRET_KEY: &str = "tests-secret-key";
/// Port of each gateway.
const PORT: u16 = 9_000;
/// Maximum time that the gateway may take to start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Returns the path of the gateway's program, built once under `work`. If the build fails, records
/// that the test is skipped and returns `None`.
#[must_use]
pub fn program(work: &Path) -> Option<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf>> = OnceLock::new();
    const GATEWAY: GoProgram = GoProgram {
        folder: "s3-gateway",
        version: "v1.8.0",
        module: "github.com/versity/versitygw",
        package: "github.com/versity/versitygw/cmd/versitygw",
        name: "versitygw",
    };
    GATEWAY.build_for_test(&BUILT, work)
}

/// A store that serves HTTPS on loopback. It is killed when this value is dropped.
#[derive(Debug)]
pub struct S3Gateway {
    program: PathBuf,
    folder: PathBuf,
    /// An address that nothing else on this machine uses, so the gateway gets its port again after
    /// it was killed.
    address: SocketAddr,
    credentials: Credentials,
    process: Option<ChildProcess>,
}

impl S3Gateway {
    /// Starts a store with an empty bucket, whose objects are below `folder`.
    ///
    /// # Errors
    /// Fails if the gateway doesn't start.
    pub fn start(program: &Path, folder: &Path) -> Result<Self> {
        fs_err::create_dir_all(folder.join("objects").join(BUCKET))?;
        let address = Network::loopback(0).hub.at_port(PORT);
        let credentials = Credentials::make(&folder.join("tls"), &[address.ip().to_string()])?;
        let (program, folder) = (program.to_owned(), folder.to_owned());
        let mut gateway = Self { program, folder, address, credentials, process: None };
        gateway.restart()?;
        Ok(gateway)
    }

    /// Starts the gateway again, with the objects that it had.
    ///
    /// # Errors
    /// Fails if the gateway doesn't start.
    pub fn restart(&mut self) -> Result<()> {
        let tls = self.folder.join("tls");
        let mut command = Command::new(&self.program);
        command
            .env("ROOT_ACCESS_KEY", ACCESS_KEY)
            .env("ROOT_SECRET_KEY", SECRET_KEY)
            .args(["--port", &self.address.to_string(), "--cert"])
            .arg(tls.join("client.crt"))
            .arg("--key")
            .arg(tls.join("client.key"))
            .arg("posix")
            .arg(self.folder.join("objects"));
        let log = self.folder.join("gateway.log");
        self.process = Some(ChildProcess::spawn("versitygw", command, &log)?);
        let connect = || std::net::TcpStream::connect(self.address).ok();
        wait_for("the S3 gateway", START_LIMIT, connect)
            .map(drop)
            .with_context(|| fs_err::read_to_string(&log).unwrap_or_default())
    }

    /// Kills the gateway; its objects stay.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Returns the gateway's URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Returns the path of an object's file.
    #[must_use]
    pub fn object(&self, name: &str) -> PathBuf {
        self.folder.join("objects").join(BUCKET).join(name)
    }

    /// Returns the flags with which an agent uses this store, below the prefix `clusters`. Writes
    /// the file with the access key.
    ///
    /// # Errors
    /// Fails if the file can't be written.
    pub fn flags(&self) -> Result<Vec<String>> {
        let key = self.folder.join("access-key");
        write_access_key(&key, SECRET_KEY)?;
        let ca = self.credentials.ca();
        let flags = [
            "--backup-to",
            &format!("s3://{BUCKET}/clusters"),
            "--backup-endpoint",
            &self.url(),
            "--backup-ca",
            path_text(&ca)?,
            "--backup-credentials",
            path_text(&key)?,
        ];
        Ok(flags.map(str::to_owned).to_vec())
    }
}

/// Writes a credentials file in the format of the `aws` tool, with mode 0600. It has the gateway's
/// access key id and this secret.
///
/// # Errors
/// Fails if the file can't be written.
pub fn write_access_key(path: &Path, secret: &str) -> Result<()> {
    let text =
        format!("[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {secret}\n");
    fs_err::write(path, text)?;
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    Ok(fs_err::set_permissions(path, private)?)
}
