//! Runs finders against a mutant.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::build::{Program, program};
use super::list::{Finder, Mutant};

/// How often a running test is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// What came of a finder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing: all its tests passed.
    Nothing,
    /// A test failed, or the simulation found a violation: in its own words.
    By(String),
    /// It did not end in time.
    TimeLimit,
}

/// Where things are.
pub struct Bench<'a> {
    /// The mutated tree.
    pub scratch: &'a Path,
    /// Its programs.
    pub programs: &'a BTreeMap<Program, PathBuf>,
    /// How long one finder may take.
    pub limit: Duration,
}

impl Bench<'_> {
    /// Runs one finder, with the mutant switched on or, to see that it passes without, off.
    pub fn run(&self, mutant: &Mutant, finder: &Finder, switched_on: bool) -> Result<Found> {
        let which = program(self.scratch, mutant, finder)?;
        let path = self.programs.get(&which).context("it was built")?;
        let log = tempfile::NamedTempFile::new()?;
        let mut command = Command::new(path);
        match finder {
            Finder::Sim { histories } => {
                command.args(["--threads", "1", "--histories", &histories.to_string()]);
            }
            Finder::Unit { filters, .. } | Finder::Test { filters, .. } => {
                command.args(filters);
            }
        }
        let package = match &which {
            Program::Unit(name) | Program::Test(name, _) => Some(name.as_str()),
            Program::Sim => None,
        };
        let directory = package.and_then(|name| directory_of(self.scratch, name));
        command
            .current_dir(directory.unwrap_or_else(|| self.scratch.to_owned()))
            .env_remove("MUTANT")
            .stdin(Stdio::null())
            .stdout(log.reopen()?)
            .stderr(log.reopen()?);
        if switched_on {
            command.env("MUTANT", mutant.id.to_string());
        }
        let mut child = command.spawn().with_context(|| path.display().to_string())?;
        let began = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if began.elapsed() > self.limit {
                child.kill()?;
                child.wait()?;
                // A history always ends: too many of them for this machine are no find.
                let is_sim = matches!(finder, Finder::Sim { .. });
                return Ok(if is_sim { Found::Nothing } else { Found::TimeLimit });
            }
            std::thread::sleep(LOOK);
        };
        let said = String::from_utf8_lossy(&fs_err::read(log.path())?).into_owned();
        if status.success() {
            let nothing_ran =
                said.contains("running 0 tests") && !said.contains("; 0 filtered out");
            anyhow::ensure!(!nothing_ran, "mutant {}: no test fits {finder:?}", mutant.id);
            return Ok(Found::Nothing);
        }
        Ok(Found::By(headline(&said)))
    }
}

/// The name of the first test that failed, or what the simulation found.
fn headline(said: &str) -> String {
    let failed = said.lines().find_map(|line| {
        let test = line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?;
        Some(test.to_owned())
    });
    let seed = said.lines().find(|line| line.starts_with("seed ")).map(str::to_owned);
    failed.or(seed).unwrap_or_else(|| "the process ended".to_owned())
}

/// The directory of a package, where Cargo runs its tests.
fn directory_of(scratch: &Path, package: &str) -> Option<PathBuf> {
    let manifest = fs_err::read_to_string(scratch.join("Cargo.toml")).ok()?;
    let members = manifest.split("members = [").nth(1)?.split(']').next()?;
    members.split('"').skip(1).step_by(2).find_map(|member| {
        let name = super::build::package_name(scratch, Path::new(member)).ok()?;
        (name == package).then(|| scratch.join(member))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_found_it_is_named() {
        assert_eq!(headline("test a::b ... ok\ntest a::c ... FAILED\n"), "a::c");
        assert_eq!(headline("3 histories\nseed 4: monotone: x\n"), "seed 4: monotone: x");
        assert_eq!(headline("aborted"), "the process ended");
    }
}
