//! Stock etcd, with which tests compare. It is built from its Go module, which the Go module proxy
//! serves.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::Result;

use crate::go_program::GoProgram;
use crate::harness::skip;

/// Newest release of etcd.
pub const NEWEST_VERSION: &str = "v3.7.3";
/// Newest release of the previous minor version of etcd. Upgrade tests start from it.
const PREVIOUS_VERSION: &str = "v3.6.16";
const SERVER_MODULE: &str = "go.etcd.io/etcd/server/v3";
/// Go module of `etcdctl`, etcd's command-line client.
const ETCDCTL_MODULE: &str = "go.etcd.io/etcd/etcdctl/v3";
/// Go module of `etcdutl`, etcd's tool for data files and directories.
const ETCDUTL_MODULE: &str = "go.etcd.io/etcd/etcdutl/v3";
/// Path of the etcd that the Debian package installs.
pub const DEBIAN_ETCD_PATH: &str = "/usr/bin/etcd";

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
    etcd_program(NEWEST_VERSION, SERVER_MODULE, "etcd").build_once(work, say).await
}

/// Returns a program of one etcd release.
const fn etcd_program(
    version: &'static str,
    module: &'static str,
    name: &'static str,
) -> GoProgram {
    GoProgram { folder: "stock-etcd", version, module, package: module, name }
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
    etcd_program(NEWEST_VERSION, SERVER_MODULE, "etcd").build_for_test(&BUILT, work)
}

/// Returns the path of stock etcd of the minor version before [`NEWEST_VERSION`], as [`newest`]
/// does.
#[must_use]
pub fn previous(work: &Path) -> Option<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf>> = OnceLock::new();
    etcd_program(PREVIOUS_VERSION, SERVER_MODULE, "etcd").build_for_test(&BUILT, work)
}

/// Returns the path of [`NEWEST_VERSION`]'s `etcdctl`, built beside the server as [`newest`] does.
#[must_use]
pub fn newest_etcdctl(work: &Path) -> Option<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf>> = OnceLock::new();
    etcd_program(NEWEST_VERSION, ETCDCTL_MODULE, "etcdctl").build_for_test(&BUILT, work)
}

/// Returns the path of [`NEWEST_VERSION`]'s `etcdutl`, built beside the server as [`newest`] does.
#[must_use]
pub fn newest_etcdutl(work: &Path) -> Option<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf>> = OnceLock::new();
    etcd_program(NEWEST_VERSION, ETCDUTL_MODULE, "etcdutl").build_for_test(&BUILT, work)
}
