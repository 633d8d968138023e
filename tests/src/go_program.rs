//! Go programs that tests need, such as stock etcd. They are built from their Go modules, which the
//! Go module proxy serves.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use tokio::process::Command;

use crate::harness::skip;

/// Time limit of a build. On two idle cores a build took a minute or two; other tests run beside it.
/// It fails after this time if a module proxy doesn't answer.
const BUILD_TIME: Duration = Duration::from_secs(900);

/// A program of one release of a Go module.
#[derive(Clone, Copy, Debug)]
pub struct GoProgram {
    /// Folder for builds of this and related programs.
    pub folder: &'static str,
    /// Release of the module, as in `v1.2.3`.
    pub version: &'static str,
    /// Go module that contains the program.
    pub module: &'static str,
    /// Package of the program in that module.
    pub package: &'static str,
    /// File name of the program.
    pub name: &'static str,
}

impl GoProgram {
    /// Returns the path of the program, built under `work` unless it is there. Another test program
    /// may need it at the same time: the second one waits for the build of the first one, which has
    /// a time limit.
    ///
    /// # Errors
    /// Fails if the program can't be built, for example without Go or without a module proxy.
    pub async fn build_once(self, work: &Path, say: &dyn Fn(&str)) -> Result<PathBuf> {
        let dir = work.join(self.folder).join(self.version);
        let binary = dir.join(self.name);
        if binary.exists() {
            return Ok(binary);
        }
        fs_err::create_dir_all(&dir)?;
        let lock = fs_err::File::create(dir.join(format!("{}.lock", self.name)))?;
        flock(&lock, FlockOperation::LockExclusive).context("locking a build")?;
        if !binary.exists() {
            say(&format!("building {} {} with go, once", self.name, self.version));
            self.build(&dir).await?;
        }
        Ok(binary)
    }

    /// Returns the path of the program, built once under `work` by the first test that needs it. If
    /// the build fails, records that the test is skipped and returns `None`.
    #[must_use]
    pub fn build_for_test(self, cell: &OnceLock<Result<PathBuf>>, work: &Path) -> Option<PathBuf> {
        let build = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(self.build_once(work, &|_| {}))
        };
        match cell.get_or_init(build) {
            Ok(path) => Some(path.clone()),
            Err(error) => {
                let Self { version, name, .. } = self;
                skip::report_skip(format_args!("no {name} {version} could be built: {error:#}"));
                None
            }
        }
    }

    async fn build(self, dir: &Path) -> Result<()> {
        let Self { version, module, package, name, .. } = self;
        let folder = dir.join(format!("{name}-module"));
        fs_err::create_dir_all(&folder)?;
        fs_err::write(
            folder.join("go.mod"),
            format!("module built-for-tests\n\nrequire {module} {version}\n"),
        )?;
        // Build to a temporary path and rename: an interrupted build must not be taken for a
        // complete binary.
        let part = folder.join("part");
        let mut go = Command::new("go");
        go.current_dir(&folder)
            .args(["build", "-mod=mod", "-trimpath", "-ldflags=-s -w", "-o"])
            .arg(&part)
            .arg(package)
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
