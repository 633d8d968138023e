//! Builds the mutated copy once, and finds the paths of its programs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::list::{Finder, Mutant};
use super::tree::crate_of;

/// A test program of a package.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TestProgram {
    /// Unit tests of a package's library, or of its program if it has no library.
    Unit(String),
    /// An integration test: its package and its name.
    Test(String, String),
    /// The simulation of nodes.
    Sim,
}

/// Returns the name of the package in `directory`, from its Cargo.toml.
pub fn package_name(root: &Path, directory: &Path) -> Result<String> {
    let manifest = fs_err::read_to_string(root.join(directory).join("Cargo.toml"))?;
    let name = manifest.lines().find_map(|line| line.strip_prefix("name = \""));
    let name = name.and_then(|rest| rest.strip_suffix('"'));
    Ok(name.with_context(|| format!("{}: no name", directory.display()))?.to_owned())
}

/// Returns the test program that contains the tests of `finder`, which should find `mutant`.
pub fn program_of_finder(root: &Path, mutant: &Mutant, finder: &Finder) -> Result<TestProgram> {
    Ok(match finder {
        Finder::Sim { .. } => TestProgram::Sim,
        Finder::Test { package, name, .. } => TestProgram::Test(package.clone(), name.clone()),
        Finder::Unit { package: Some(package), .. } => TestProgram::Unit(package.clone()),
        Finder::Unit { package: None, .. } => {
            TestProgram::Unit(package_name(root, &crate_of(root, &mutant.file)?)?)
        }
    })
}

fn cargo(scratch: &Path, target: &Path, arguments: &[&str]) -> Result<Vec<Value>> {
    let done = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(arguments)
        .arg("--message-format=json-render-diagnostics")
        .current_dir(scratch)
        .env("CARGO_TARGET_DIR", target)
        .stderr(Stdio::inherit())
        .output()
        .context("cargo can't be run")?;
    ensure!(done.status.success(), "the mutated tree does not compile");
    let lines = String::from_utf8(done.stdout).context("cargo's messages are UTF-8")?;
    Ok(lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// Builds the wanted programs, and returns the path of each.
pub fn build(
    scratch: &Path,
    target: &Path,
    wanted: &BTreeSet<TestProgram>,
) -> Result<BTreeMap<TestProgram, PathBuf>> {
    let ends =
        |program: &TestProgram| matches!(program, TestProgram::Test(p, _) if p == "muster-tests");
    if wanted.iter().any(ends) {
        // The tests of `muster-tests` run the three programs as a user would, so build these, too.
        let programs = ["-p", "muster-node", "-p", "muster-agent", "-p", "muster-discovery"];
        cargo(scratch, target, &[&["build", "-q", "--bins"][..], &programs].concat())?;
    }
    let mut found = BTreeMap::new();
    for program in wanted {
        let messages = match program {
            TestProgram::Sim => {
                cargo(scratch, target, &["build", "-q", "-p", "muster-tests", "--bin", "sim"])?
            }
            TestProgram::Unit(package) => {
                cargo(scratch, target, &["test", "-q", "--no-run", "-p", package, "--lib"])?
            }
            TestProgram::Test(package, name) => {
                let arguments = ["test", "-q", "--no-run", "-p", package, "--test", name];
                cargo(scratch, target, &arguments)?
            }
        };
        let executables = messages.iter().filter_map(|message| message["executable"].as_str());
        let path = match program {
            TestProgram::Sim => executables.into_iter().find(|path| path.ends_with("/sim")),
            TestProgram::Unit(_) | TestProgram::Test(..) => {
                executables.into_iter().find(|path| path.contains("/deps/"))
            }
        };
        let path = path.with_context(|| format!("cargo built no {program:?}"))?;
        found.insert(program.clone(), PathBuf::from(path));
    }
    Ok(found)
}
