//! Runs the finders of a mutant.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process_group};

use super::build::{TestProgram, program_of_finder};
use super::list::{Finder, Mutant};

/// Maximum length in characters of a finder's reported result.
const MAX_HEADLINE_CHARS: usize = 160;
/// Interval at which a running test is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Result of a finder, the tests that should find one mutant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinderResult {
    /// The finder's tests all passed, although the mutant was on.
    NotFound,
    /// Name of the failed test, or the violation that the simulation found.
    FoundBy(String),
    /// Reason why the finder has no result.
    Inconclusive(String),
}

/// Everything that is needed to run finders.
pub struct MutantRunner<'a> {
    /// Folder with the mutated copy of the workspace.
    pub scratch: &'a Path,
    /// Paths of the built test programs.
    pub programs: &'a BTreeMap<TestProgram, PathBuf>,
    /// Time limit of one finder.
    pub limit: Duration,
}

impl MutantRunner<'_> {
    /// Runs a finder, with the mutant switched on or off. A finder must pass if the mutant is off.
    pub fn run(&self, mutant: &Mutant, finder: &Finder, switched_on: bool) -> Result<FinderResult> {
        let which = program_of_finder(self.scratch, mutant, finder)?;
        let path = self.programs.get(&which).context("it was built")?;
        let log = tempfile::NamedTempFile::new()?;
        // A killed test can't delete its temporary files. They are deleted with this folder.
        let temporary = tempfile::tempdir()?;
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
            TestProgram::Unit(name) | TestProgram::Test(name, _) => Some(name.as_str()),
            TestProgram::Sim => None,
        };
        let directory = package.and_then(|name| directory_of(self.scratch, name));
        command
            .current_dir(directory.unwrap_or_else(|| self.scratch.to_owned()))
            .env_remove("MUTANT")
            .env("TMPDIR", temporary.path())
            .process_group(0)
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
                kill_group(&mut child)?;
                return Ok(FinderResult::Inconclusive(format!(
                    "not done after {} s",
                    self.limit.as_secs()
                )));
            }
            std::thread::sleep(POLL_INTERVAL);
        };
        let output = String::from_utf8_lossy(&fs_err::read(log.path())?).into_owned();
        if status.success() {
            let ran_nothing =
                output.contains("running 0 tests") && !output.contains("; 0 filtered out");
            return Ok(if ran_nothing {
                FinderResult::Inconclusive("no such test".into())
            } else {
                FinderResult::NotFound
            });
        }
        Ok(FinderResult::FoundBy(headline(&output)))
    }
}

/// Kills a test and the programs that it has started.
fn kill_group(child: &mut Child) -> Result<()> {
    let id = i32::try_from(child.id())?;
    kill_process_group(Pid::from_raw(id).context("a child has a number")?, Signal::KILL)?;
    child.wait()?;
    Ok(())
}

/// Returns the name of the first failed test, or the simulation's violation.
fn headline(output: &str) -> String {
    let failed = output.lines().find_map(|line| {
        let test = line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?;
        Some(test.to_owned())
    });
    let seed = output.lines().find(|line| line.starts_with("seed ")).map(str::to_owned);
    let found = failed.or(seed).unwrap_or_else(|| "the process ended".to_owned());
    found.chars().take(MAX_HEADLINE_CHARS).collect()
}

/// Returns the directory of a package, in which Cargo runs its tests.
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
    use crate::mutants::list::parse;

    #[test]
    fn the_headline_names_the_failed_test_or_the_violation() {
        assert_eq!(headline("test a::b ... ok\ntest a::c ... FAILED\n"), "a::c");
        assert_eq!(headline("3 histories\nseed 4: monotone: x\n"), "seed 4: monotone: x");
        assert_eq!(headline("aborted"), "the process ended");
        assert_eq!(headline(&format!("seed 4: {}", "x".repeat(9_999))).len(), MAX_HEADLINE_CHARS);
    }

    /// Returns the result of a shell script that runs in place of a test program.
    fn result_of_script(script: &str) -> FinderResult {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("test");
        crate::harness::write_script(&path, &format!("#!/bin/sh\n{script}\n")).unwrap();
        let which = TestProgram::Unit("p".into());
        let programs = BTreeMap::from([(which, path)]);
        let limit = Duration::from_millis(500);
        let bench = MutantRunner { scratch: scratch.path(), programs: &programs, limit };
        let list = "mutant 7: x\nin a.rs\nunit-of p\n<<<<\na\n====\nmutant(7)\n>>>>";
        let mutant = parse("a", list).unwrap().remove(0);
        fs_err::write(scratch.path().join("Cargo.toml"), "members = []").unwrap();
        bench.run(&mutant, &mutant.finders[0], true).unwrap()
    }

    #[test]
    fn only_a_failing_finder_finds_a_mutant() {
        assert_eq!(result_of_script("echo 'test result: ok. 1 passed'"), FinderResult::NotFound);
        assert_eq!(
            result_of_script("[ $MUTANT != 7 ]"),
            FinderResult::FoundBy("the process ended".into())
        );
        let ran_nothing = "echo 'running 0 tests'; echo '0 passed; 9 filtered out'";
        assert_eq!(
            result_of_script(ran_nothing),
            FinderResult::Inconclusive("no such test".into())
        );
    }

    #[test]
    fn a_hanging_finder_finds_nothing_and_is_killed_with_its_children() {
        let began = Instant::now();
        assert_eq!(
            result_of_script("sleep 60 & sleep 60"),
            FinderResult::Inconclusive("not done after 0 s".into())
        );
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}
