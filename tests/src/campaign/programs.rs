//! Programs that a campaign runs: release programs, test binaries and fuzz targets.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::child::{ChildCommand, ChildEnd, ChildRunner};
use super::plan::SearchKind;
use crate::stock_etcd::{DEBIAN_ETCD_PATH, NEWEST_VERSION};

/// Time limit of each build.
const BUILD_LIMIT: Duration = Duration::from_secs(2 * 3600);
/// Test binaries that a campaign runs. Each name belongs to one package of the workspace.
const TESTS: [&str; 11] = [
    "disk",
    "durability",
    "explore_regressions",
    "histories",
    "journal",
    "maintenance",
    "one_way_connections",
    "partitions",
    "recovery",
    "sim",
    "snapshot",
];

/// A built test binary, and the directory of its package, in which Cargo runs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuiltTest {
    pub program: PathBuf,
    pub directory: PathBuf,
}

/// Paths of all programs that a campaign runs.
#[derive(Clone, Debug, Default)]
pub struct CampaignPrograms {
    /// Root of the workspace.
    pub root: PathBuf,
    /// Folder of the release programs.
    pub folder: PathBuf,
    /// Test binaries by their names.
    pub tests: BTreeMap<String, BuiltTest>,
    /// Fuzz targets, which take a folder of inputs.
    pub decoders: Vec<PathBuf>,
    /// Number of threads for searches that only compute.
    pub threads: usize,
}

impl CampaignPrograms {
    /// Builds the test binaries and the programs that they run, and finds everything else. The
    /// folder with fuzz targets may be missing.
    ///
    /// # Errors
    /// If a build fails.
    pub fn build(
        runner: &ChildRunner<'_>,
        root: &Path,
        folder: &Path,
        decoders: Option<&Path>,
    ) -> Result<Self> {
        // Build the whole workspace. For single packages, Cargo would choose other features of the
        // dependencies, and compile most of them again.
        cargo(runner, root, "build-programs", &["build", "--workspace", "--bins"])?;
        let mut arguments =
            vec!["test", "--no-run", "--workspace", "--message-format=json-render-diagnostics"];
        arguments.extend(TESTS.iter().flat_map(|name| ["--test", *name]));
        let messages = cargo(runner, root, "build-tests", &arguments)?;
        let tests: BTreeMap<String, BuiltTest> = built_tests(&messages).into_iter().collect();
        for name in TESTS {
            ensure!(tests.contains_key(name), "cargo built no test {name}");
        }
        let decoders = decoders.map(|folder| fuzz_targets(root, folder)).transpose()?;
        Ok(Self {
            root: root.to_owned(),
            folder: folder.to_owned(),
            tests,
            decoders: decoders.unwrap_or_default(),
            threads: std::thread::available_parallelism().map_or(2, std::num::NonZero::get),
        })
    }

    /// Returns why a search can't run here, if it can't.
    #[must_use]
    pub fn missing_for(&self, search: SearchKind) -> Option<String> {
        match search {
            SearchKind::Requests => {
                let etcd = format!("target/stock-etcd/{NEWEST_VERSION}/etcd");
                let is_there = self.root.join(etcd).exists()
                    || Path::new(DEBIAN_ETCD_PATH).exists()
                    || runs("go");
                (!is_there).then(|| "there is no stock etcd, and no Go to build it with".to_owned())
            }
            SearchKind::Decoders => self.decoders.is_empty().then(|| {
                "no fuzz target is built: no C++ compiler, or their build failed".to_owned()
            }),
            _ => None,
        }
    }
}

fn runs(program: &str) -> bool {
    let silent = Command::new(program)
        .arg("version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    silent.is_ok_and(|status| status.success())
}

/// Runs cargo, and returns what it printed to standard output.
fn cargo(runner: &ChildRunner<'_>, root: &Path, name: &str, arguments: &[&str]) -> Result<String> {
    (runner.say)(&format!("{name}: cargo {}", arguments.join(" ")));
    let mut arguments: Vec<String> =
        arguments.iter().map(|&argument| argument.to_owned()).collect();
    arguments.push("--locked".to_owned());
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let command = ChildCommand {
        program: PathBuf::from(program),
        arguments,
        directory: root.to_owned(),
        variables: Vec::new(),
    };
    let ended = runner.run(name, &command, BUILD_LIMIT)?;
    ensure!(ended.end == ChildEnd::Succeeded, "cargo failed: {:?}\n{}", ended.end, ended.stderr);
    Ok(ended.stdout)
}

/// Returns the test binaries that cargo's messages name.
fn built_tests(messages: &str) -> Vec<(String, BuiltTest)> {
    let mut found = Vec::new();
    for line in messages.lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
        let is_test = message["profile"]["test"].as_bool() == Some(true);
        let manifest = message["manifest_path"].as_str().map(Path::new);
        let directory = manifest.and_then(Path::parent);
        let name = message["target"]["name"].as_str();
        if let (true, Some(program), Some(directory), Some(name)) =
            (is_test, message["executable"].as_str(), directory, name)
        {
            let program = PathBuf::from(program);
            found.push((name.to_owned(), BuiltTest { program, directory: directory.to_owned() }));
        }
    }
    found
}

/// Returns the programs in `folder` that have the names of fuzz targets.
fn fuzz_targets(root: &Path, folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir(root.join("fuzz/targets"))? {
        let path = entry?.path();
        let name = path.file_stem().context("a source file has a name")?;
        let program = folder.join(name);
        if root.join(&program).is_file() {
            found.push(program);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_binaries_are_found_in_cargos_messages() {
        let library = r#"{"profile":{"test":false},"manifest_path":"/w/a/Cargo.toml",
            "target":{"name":"a"},"executable":null}"#;
        let test = r#"{"profile":{"test":true},"manifest_path":"/w/a/Cargo.toml",
            "target":{"name":"disk"},"executable":"/w/target/debug/deps/disk-1"}"#;
        let messages =
            format!("{}\n{}\nno JSON", library.replace('\n', ""), test.replace('\n', ""));
        let disk =
            BuiltTest { program: "/w/target/debug/deps/disk-1".into(), directory: "/w/a".into() };
        assert_eq!(built_tests(&messages), [("disk".to_owned(), disk)]);
    }

    #[test]
    fn only_built_fuzz_targets_are_found() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["fuzz/targets", "fuzz/built"] {
            fs_err::create_dir_all(root.path().join(folder)).unwrap();
        }
        for file in ["targets/bundle.rs", "targets/command.rs", "built/bundle", "built/other"] {
            fs_err::write(root.path().join("fuzz").join(file), "").unwrap();
        }
        let found = fuzz_targets(root.path(), Path::new("fuzz/built")).unwrap();
        assert_eq!(found, [PathBuf::from("fuzz/built/bundle")]);
    }
}
