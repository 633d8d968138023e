//! Stock etcd, to compare with: built from its own Go module, which the Go module proxy serves.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Result, bail};
use tokio::process::Command;

use crate::harness::skip;

/// Newest release of etcd.
pub const NEWEST_VERSION: &str = "v3.7.3";
/// Minor version before the newest one, from which upgrade tests start.
const PREVIOUS_VERSION: &str = "v3.6.16";
const SERVER_MODULE: &str = "go.etcd.io/etcd/server/v3";
/// Go module of `etcdctl`, etcd's command-line client.
const ETCDCTL_MODULE: &str = "go.etcd.io/etcd/etcdctl/v3";
/// Go module of `etcdutl`, etcd's tool for data files and directories.
const ETCDUTL_MODULE: &str = "go.etcd.io/etcd/etcdutl/v3";
/// Path of the etcd that the Debian package installs.
pub const DEBIAN_ETCD_PATH: &str = "/usr/bin/etcd";
/// Time limit of a build. On two cores a build took a minute or two. It fails after this time if a
/// module proxy doesn't answer.
const BUILD_TIME: Duration = Duration::from_secs(300);

/// Returns the path of a stock etcd: built once under `work`, or the installed one if the build
/// fails.
///
/// # Errors
/// Fails if etcd can't be built and no etcd is installed.
pub async fn newest_or_installed(work: &Path, say: &dyn Fn(&str)) -> Result<PathBuf> {
    match build_newest(work, say).await {
        Ok(binary) => Ok(binary),
        Err(error) if Path::new(DEBIAN_ETCD_PATH).exists() => {
            say(&format!(
                "NOTE: stock etcd {NEWEST_VERSION} could not be built ({error:#}); comparing with {DEBIAN_ETCD_PATH}, which is older"
            ));
            Ok(PathBuf::from(DEBIAN_ETCD_PATH))
        }
        Err(error) => Err(error.context("there is no etcd to compare with")),
    }
}

/// Returns the path of stock etcd [`NEWEST_VERSION`], built once under `work`.
///
/// # Errors
/// Fails if etcd can't be built, for example without Go or without a module proxy.
pub async fn build_newest(work: &Path, say: &dyn Fn(&str)) -> Result<PathBuf> {
    EtcdProgram { version: NEWEST_VERSION, module: SERVER_MODULE, name: "etcd" }
        .build_once(work, say)
        .await
}

/// A program of one etcd release, to be built from its Go module.
#[derive(Clone, Copy)]
struct EtcdProgram {
    version: &'static str,
    module: &'static str,
    name: &'static str,
}

/// Returns the path of the Debian package's etcd 3.4. Without it, records that the test is skipped
/// and returns `None`.
#[must_use]
pub fn oldest() -> Option<PathBuf> {
    installed(DEBIAN_ETCD_PATH)
}

/// Returns the path of the Debian package's `etcdctl`. Without it, records that the test is skipped
/// and returns `None`.
#[must_use]
pub fn oldest_etcdctl() -> Option<PathBuf> {
    installed("/usr/bin/etcdctl")
}

fn installed(path: &str) -> Option<PathBuf> {
    let path = PathBuf::from(path);
    if path.exists() {
        return Some(path);
    }
    skip::report_missing_program(path.display());
    None
}

/// Returns the path of stock etcd [`NEWEST_VERSION`], built once under `work` by the first test
/// that needs it. If the build fails, records that the test is skipped and returns `None`.
#[must_use]
pub fn newest(work: &Path) -> Option<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf>> = OnceLock::new();
    EtcdProgram { version: NEWEST_VERSION, module: SERVER_MODULE, name: "etcd" }
        .build_for_test(&BUILT, work)
}

/// Returns the path of stock etcd of the minor version before [`NEWEST_VERSION`], as [`newest`]
/// does.
#[must_use]
pub fn previous(work: &Path) -> Option<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf>> = OnceLock::new();
    EtcdProgram { version: PREVIOUS_VERSION, module: SERVER_MODULE, name: "etcd" }
        .build_for_test(&BUILT, work)
}

/// Returns the path of [`NEWEST_VERSION`]'s `etcdctl`, built beside the server as [`newest`] does.
#[must_use]
pub fn newest_etcdctl(work: &Path) -> Option<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf>> = OnceLock::new();
    EtcdProgram { version: NEWEST_VERSION, module: ETCDCTL_MODULE, name: "etcdctl" }
        .build_for_test(&BUILT, work)
}

/// Returns the path of [`NEWEST_VERSION`]'s `etcdutl`, built beside the server as [`newest`] does.
#[must_use]
pub fn newest_etcdutl(work: &Path) -> Option<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf>> = OnceLock::new();
    EtcdProgram { version: NEWEST_VERSION, module: ETCDUTL_MODULE, name: "etcdutl" }
        .build_for_test(&BUILT, work)
}

impl EtcdProgram {
    async fn build_once(self, work: &Path, say: &dyn Fn(&str)) -> Result<PathBuf> {
        let dir = work.join("stock-etcd").join(self.version);
        let binary = dir.join(self.name);
        if !binary.exists() {
            say(&format!("building stock {} {} with go, once", self.name, self.version));
            self.build(&dir).await?;
        }
        Ok(binary)
    }

    fn build_for_test(self, cell: &OnceLock<Result<PathBuf>>, work: &Path) -> Option<PathBuf> {
        let build = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(self.build_once(work, &|_| {}))
        };
        match cell.get_or_init(build) {
            Ok(path) => Some(path.clone()),
            Err(error) => {
                let Self { version, name, .. } = self;
                skip::report_skip(format_args!(
                    "no stock {name} {version} could be built: {error:#}"
                ));
                None
            }
        }
    }

    async fn build(self, dir: &Path) -> Result<()> {
        let Self { version, module, name } = self;
        let folder = dir.join(format!("{name}-module"));
        fs_err::create_dir_all(&folder)?;
        fs_err::write(
            folder.join("go.mod"),
            format!("module stock-etcd\n\nrequire {module} {version}\n"),
        )?;
        // Build to a temporary path and rename: an interrupted build must not be taken for a
        // complete binary.
        let part = folder.join("part");
        let mut go = Command::new("go");
        go.current_dir(&folder)
            .args(["build", "-mod=mod", "-trimpath", "-ldflags=-s -w", "-o"])
            .arg(&part)
            .arg(module)
            .env("CGO_ENABLED", "0")
            .kill_on_drop(true);
        let output = tokio::time::timeout(BUILD_TIME, go.output()).await??;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            bail!("go build: {}", text.lines().last().unwrap_or("it failed"));
        }
        fs_err::rename(part, dir.join(name))?;
        Ok(())
    }
}
