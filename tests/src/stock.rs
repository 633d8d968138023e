//! A stock etcd to compare with, built from its own module through the Go proxy.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Result, bail};
use tokio::process::Command;

use crate::harness::skip;

/// The newest that there is.
pub const NEWEST: &str = "v3.7.3";
/// What an upgrade to the newest begins with.
const BEFORE: &str = "v3.6.16";
const SERVER: &str = "go.etcd.io/etcd/server/v3";
/// Its clients' tool.
const CLIENT: &str = "go.etcd.io/etcd/etcdctl/v3";
/// Its tool for files and directories.
const TOOL: &str = "go.etcd.io/etcd/etcdutl/v3";
/// The Debian package's.
pub const INSTALLED: &str = "/usr/bin/etcd";
/// It took a minute or two on two cores; a module proxy that doesn't answer is not waited for longer.
const BUILD_TIME: Duration = Duration::from_secs(300);

/// The path of a stock etcd: built once under `work`, else the installed one.
///
/// # Errors
/// When it can't be built and none is installed.
pub async fn etcd(work: &Path, say: &dyn Fn(&str)) -> Result<PathBuf> {
    match built(work, say).await {
        Ok(binary) => Ok(binary),
        Err(error) if Path::new(INSTALLED).exists() => {
            say(&format!(
                "NOTE: stock etcd {NEWEST} could not be built ({error:#}); comparing with {INSTALLED}, which is older"
            ));
            Ok(PathBuf::from(INSTALLED))
        }
        Err(error) => Err(error.context("there is no etcd to compare with")),
    }
}

/// The path of a stock etcd of this version, built once under `work`.
///
/// # Errors
/// Where it can't be built: no go, or no module proxy.
pub async fn built(work: &Path, say: &dyn Fn(&str)) -> Result<PathBuf> {
    Program { version: NEWEST, module: SERVER, name: "etcd" }.built(work, say).await
}

/// What is built.
#[derive(Clone, Copy)]
struct Program {
    version: &'static str,
    module: &'static str,
    name: &'static str,
}

/// The Debian package's, 3.4, for a test that is skipped without it.
#[must_use]
pub fn oldest() -> Option<PathBuf> {
    installed(INSTALLED)
}

/// Its `etcdctl`.
#[must_use]
pub fn oldest_etcdctl() -> Option<PathBuf> {
    installed("/usr/bin/etcdctl")
}

fn installed(path: &str) -> Option<PathBuf> {
    let path = PathBuf::from(path);
    if path.exists() {
        return Some(path);
    }
    skip::not_installed(path.display());
    None
}

/// Built once under `work`, for whichever test asks first; the test is skipped without it.
#[must_use]
pub fn newest(work: &Path) -> Option<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf>> = OnceLock::new();
    Program { version: NEWEST, module: SERVER, name: "etcd" }.once(&BUILT, work)
}

/// The minor version before it.
#[must_use]
pub fn before(work: &Path) -> Option<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf>> = OnceLock::new();
    Program { version: BEFORE, module: SERVER, name: "etcd" }.once(&BUILT, work)
}

/// Its `etcdctl`, beside it.
#[must_use]
pub fn newest_etcdctl(work: &Path) -> Option<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf>> = OnceLock::new();
    Program { version: NEWEST, module: CLIENT, name: "etcdctl" }.once(&BUILT, work)
}

/// Its `etcdutl`, beside it.
#[must_use]
pub fn newest_etcdutl(work: &Path) -> Option<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf>> = OnceLock::new();
    Program { version: NEWEST, module: TOOL, name: "etcdutl" }.once(&BUILT, work)
}

impl Program {
    async fn built(self, work: &Path, say: &dyn Fn(&str)) -> Result<PathBuf> {
        let dir = work.join("stock-etcd").join(self.version);
        let binary = dir.join(self.name);
        if !binary.exists() {
            say(&format!("building stock {} {} with go, once", self.name, self.version));
            self.build(&dir).await?;
        }
        Ok(binary)
    }

    fn once(self, cell: &OnceLock<Result<PathBuf>>, work: &Path) -> Option<PathBuf> {
        let build = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(self.built(work, &|_| {}))
        };
        match cell.get_or_init(build) {
            Ok(path) => Some(path.clone()),
            Err(error) => {
                let Self { version, name, .. } = self;
                skip::skipped(format_args!("no stock {name} {version} could be built: {error:#}"));
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
        // Into place only when whole: a build that was cut off must not be taken for a good one.
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
