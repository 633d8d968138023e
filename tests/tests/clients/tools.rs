//! Runtimes and libraries for the programs in `tests/clients`. Each language's own tool fetches the
//! pinned versions once, into a folder below cargo's target folder.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use muster_tests::harness::process::last_lines;

/// Number of output lines shown when a tool fails.
const SHOWN_LINES: usize = 30;
/// Name of the file that records which list of versions was fetched.
const FETCHED_LIST: &str = "fetched";
/// Serializes fetches, since two tests may need the same folder.
static FETCH_LOCK: Mutex<()> = Mutex::new(());

/// Returns the folder for everything that tests build and fetch.
pub(crate) fn work() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// Returns a path below `tests/clients`.
pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("clients").join(name)
}

/// Returns the Python of a virtual environment, with the packages that `requirements.txt` of the
/// folder `tests/clients/NAME` lists.
pub(crate) fn python(name: &str) -> Result<PathBuf> {
    let list = folder(name).join("requirements.txt");
    let env = fetched(name, &list, |env| {
        run("python3", |python| python.args(["-m", "venv", "--clear"]).arg(env))?;
        let pip = env.join("bin/pip");
        run(&pip, |pip| pip.args(["install", "--quiet", "--no-deps", "--requirement"]).arg(&list))
    })?;
    Ok(env.join("bin/python"))
}

/// Returns the folder of the Node modules that `package-lock.json` of the folder
/// `tests/clients/NAME` lists.
pub(crate) fn node_modules(name: &str) -> Result<PathBuf> {
    let list = folder(name).join("package-lock.json");
    let place = fetched(name, &list, |place| {
        for file in ["package.json", "package-lock.json"] {
            fs_err::copy(folder(name).join(file), place.join(file))?;
        }
        let how = ["ci", "--ignore-scripts", "--no-audit", "--no-fund"];
        run("npm", |npm| npm.current_dir(place).args(how))
    })?;
    Ok(place.join("node_modules"))
}

/// Builds the crate in the folder `tests/clients/NAME`, and returns the path of its executable
/// `program`.
pub(crate) fn build_crate(name: &str, program: &str) -> Result<PathBuf> {
    let target = work().join("clients").join(name);
    run("cargo", |cargo| {
        let manifest = folder(name).join("Cargo.toml");
        cargo.args(["build", "--locked", "--quiet", "--manifest-path"]).arg(manifest);
        cargo.arg("--target-dir").arg(&target)
    })?;
    Ok(target.join("debug").join(program))
}

/// Returns a folder in which `fetch` has run for the current content of `list`.
fn fetched(name: &str, list: &Path, fetch: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let _one = FETCH_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let place = work().join("clients").join(name);
    let wanted = fs_err::read(list)?;
    if fs_err::read(place.join(FETCHED_LIST)).ok().as_ref() != Some(&wanted) {
        if place.exists() {
            fs_err::remove_dir_all(&place)?;
        }
        fs_err::create_dir_all(&place)?;
        fetch(&place)?;
        // The file is written last, so that an interrupted fetch is repeated.
        fs_err::write(place.join(FETCHED_LIST), wanted)?;
    }
    Ok(place)
}

/// Runs a tool that `scripts/setup tests` installs, and that may use the network.
fn run(program: impl AsRef<OsStr>, with: impl FnOnce(&mut Command) -> &mut Command) -> Result<()> {
    let mut command = Command::new(program);
    let output = with(&mut command).output();
    let needs = "`scripts/setup tests` installs what it needs; what it fetches needs the network";
    let output = output.with_context(|| format!("starting {command:?}: {needs}"))?;
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed);
    ensure!(output.status.success(), "{command:?}: {needs}\n{}", last_lines(&printed, SHOWN_LINES));
    Ok(())
}
