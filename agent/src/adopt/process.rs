//! Finds out how a running etcd was started, from `/proc` and its configuration file.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use super::config::{EtcdConfig, flags_in_help};
use super::config_file::FileSettings;
use super::container::ContainerKind;
use crate::exit::{ExitError, error_chain};
use crate::launch::environment;

/// How long a program may take to print its help or its version.
const HELP_DEADLINE: Duration = Duration::from_secs(10);
/// File in etcd's data directory that a running etcd keeps locked.
pub(super) const DATABASE: &str = "member/snap/db";

/// Maximum size of a configuration file, in bytes.
const MAX_CONFIG_FILE_BYTES: u64 = 1 << 20;

/// Suffix that Linux adds to `/proc/PID/exe` if the program's file was deleted.
const DELETED: &str = " (deleted)";

/// A running etcd process, and how it was started.
pub(crate) struct EtcdProcess {
    /// The program that the process executes.
    pub program: PathBuf,
    pub config: EtcdConfig,
    /// Keys of the configuration file for which the etcd program has no flag. The agent starts the
    /// etcd with flags, so it can't keep these settings.
    pub keys_without_flag: Vec<String>,
}

impl EtcdProcess {
    /// Reads how the process with this id was started.
    pub(crate) async fn read(pid: u32) -> Result<Self, ExitError> {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let failed = |error: io::Error| {
            ExitError::Failed(format!(
                "can't read how process {pid} was started: {error}. Run this command as the etcd's \
                 user or as root, and say the etcd's own process id"
            ))
        };
        if let Some(container) = ContainerKind::of(pid).map_err(failed)? {
            return Err(container.refusal(pid));
        }
        let program = program_of(pid).map_err(failed)?;
        let working_directory = std::fs::read_link(folder.join("cwd")).map_err(failed)?;
        let arguments = command_line(pid).map_err(failed)?;
        let environment = read_texts(&folder.join("environ")).map_err(failed)?;
        let variables = environment
            .iter()
            .filter_map(|text| text.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()));
        let known = flags_in_help(&help(&program).await?);
        if !known.iter().any(|flag| flag == "data-dir") {
            return Err(ExitError::Usage(format!(
                "process {pid} runs {}, which is no etcd: say the etcd's own process id",
                program.display()
            )));
        }
        let own = arguments.get(1..).unwrap_or_default();
        let config = EtcdConfig::new(own, variables, &known, &working_directory);
        let Some(path) = config.config_file() else {
            return Ok(Self { program, config, keys_without_flag: Vec::new() });
        };
        let FileSettings { flags, misplaced, .. } = read_config_file(&path)?;
        let (flags, mut keys_without_flag) = choose_flags(&program, &known, flags).await?;
        keys_without_flag.extend(misplaced);
        Ok(Self { program, config: config.with_flags(flags), keys_without_flag })
    }
}

/// Reads the configuration file of an etcd. Fails if the file limits which clients the etcd serves,
/// and no flag can keep that limit.
fn read_config_file(path: &Path) -> Result<FileSettings, ExitError> {
    let failed = |what: String| {
        ExitError::Failed(format!(
            "can't read the etcd's configuration file {}: {what}",
            path.display()
        ))
    };
    let bytes = muster_files::read_named(path, MAX_CONFIG_FILE_BYTES);
    let bytes = bytes.map_err(|error| failed(error_chain(&error)))?;
    let text = String::from_utf8(bytes).map_err(|error| failed(error.to_string()))?;
    let settings = FileSettings::parse(&text)
        .map_err(|problem| failed(format!("line {}: {}", problem.line, problem.text)))?;
    if let Some(key) = &settings.client_limit {
        return Err(ExitError::Usage(format!(
            "the etcd's configuration file {} sets {key}, so this etcd can't come under \
             management: no flag can say it, and without it the etcd would serve more clients. \
             Remove the key, and restart the etcd",
            path.display()
        )));
    }
    Ok(settings)
}

/// Divides the settings of a configuration file: returns those for which the etcd `program` has
/// flags, and the names of the others. etcd's help doesn't list all flags. So the program is run
/// with each flag that the help lacks, to see whether it accepts the flag.
async fn choose_flags(
    program: &Path,
    known: &[String],
    settings: BTreeMap<String, String>,
) -> Result<(BTreeMap<String, String>, Vec<String>), ExitError> {
    let (mut flags, mut others) = (BTreeMap::new(), Vec::new());
    for (name, value) in settings {
        if known.contains(&name) || is_flag(program, &name, &value).await? {
            flags.insert(name, value);
        } else {
            others.push(name);
        }
    }
    Ok((flags, others))
}

/// Whether the program has this flag, and accepts the value. etcd parses all flags before it prints
/// its version, so an unknown flag makes the program fail.
async fn is_flag(program: &Path, name: &str, value: &str) -> Result<bool, ExitError> {
    let flag = format!("--{name}={value}");
    Ok(output_of(program, &[&flag, "--version"]).await?.status.success())
}

/// Runs the program with `--help`, and returns its output.
async fn help(program: &Path) -> Result<String, ExitError> {
    let output = output_of(program, &["--help"]).await?;
    let text = [output.stdout, output.stderr].concat();
    Ok(String::from_utf8_lossy(&text).into_owned())
}

async fn output_of(program: &Path, arguments: &[&str]) -> Result<Output, ExitError> {
    let shown = format!("{} {}", program.display(), arguments.join(" "));
    let failed = |what: String| ExitError::Failed(format!("{shown}: {what}"));
    let asked = tokio::process::Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(environment::node_variables())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    tokio::time::timeout(HELP_DEADLINE, asked)
        .await
        .map_err(|_| failed(format!("no answer within {} s", HELP_DEADLINE.as_secs())))?
        .map_err(|error| failed(error.to_string()))
}

/// Returns the arguments of a process, its program first.
pub(crate) fn command_line(pid: u32) -> io::Result<Vec<String>> {
    read_texts(Path::new(&format!("/proc/{pid}/cmdline")))
}

/// Reads a file of NUL-terminated strings, such as `/proc/PID/cmdline`.
fn read_texts(path: &Path) -> io::Result<Vec<String>> {
    Ok(split_texts(&std::fs::read(path)?))
}

/// Splits NUL-terminated strings. Keeps empty ones, because an argument may be empty.
fn split_texts(bytes: &[u8]) -> Vec<String> {
    let texts = bytes.split_inclusive(|byte| *byte == 0);
    let texts = texts.map(|text| text.strip_suffix(b"\0").unwrap_or(text));
    texts.map(|text| String::from_utf8_lossy(text).into_owned()).collect()
}

/// Returns the path of the program that a process executes. If the file was replaced since the
/// process began, for example by a package upgrade, returns the path of the new file.
pub(crate) fn program_of(pid: u32) -> io::Result<PathBuf> {
    let executed = std::fs::read_link(format!("/proc/{pid}/exe"))?;
    let replaced = executed.to_str().and_then(|path| path.strip_suffix(DELETED));
    let candidates = [Some(&*executed), replaced.map(Path::new)];
    let present = candidates.into_iter().flatten().find(|path| path.is_file());
    present.map(Path::to_owned).ok_or_else(|| {
        let gone = format!("its program {} is gone: install it again", executed.display());
        io::Error::new(io::ErrorKind::NotFound, gone)
    })
}

/// Whether an etcd runs on this data directory: a running etcd keeps its database locked.
pub(crate) fn is_in_use(directory: &Path) -> io::Result<bool> {
    let file = match std::fs::File::open(directory.join(DATABASE)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_in_use_while_its_database_is_locked() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_in_use(dir.path()).unwrap(), "there is no database");
        let path = dir.path().join(DATABASE);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = std::fs::File::create(&path).unwrap();
        assert!(!is_in_use(dir.path()).unwrap());
        flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(is_in_use(dir.path()).unwrap());
    }

    #[tokio::test]
    async fn a_process_that_is_no_etcd_is_refused() {
        let refused = EtcdProcess::read(std::process::id()).await;
        assert!(refused.is_err());
    }

    #[tokio::test]
    async fn a_setting_that_is_no_flag_of_the_program_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let etcd = dir.path().join("etcd");
        // A child process writes the file. If this process wrote it, a child of another test could
        // inherit the open descriptor, and executing the file would fail with ETXTBSY.
        let script = "#!/bin/sh\ncase $1 in --hidden=5) ;; *) exit 2 ;; esac\n";
        let write = r#"printf %s "$0" >"$1" && chmod +x "$1""#;
        let made = std::process::Command::new("sh").args(["-c", write, script]).arg(&etcd).status();
        assert!(made.unwrap().success());
        let pairs = [("name", "a"), ("hidden", "5"), ("discovery-fallback", "proxy")];
        let settings = pairs.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let known = ["name".to_owned()];
        let (flags, others) = choose_flags(&etcd, &known, settings.into()).await.unwrap();
        assert_eq!(flags.keys().collect::<Vec<_>>(), ["hidden", "name"]);
        assert_eq!(others, ["discovery-fallback"]);
    }

    #[test]
    fn an_unreadable_configuration_file_is_named_in_the_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("etcd.yml");
        let refused = || read_config_file(&path).unwrap_err().to_string();
        assert!(refused().contains("etcd.yml"), "{}", refused());
        std::fs::write(&path, "just text").unwrap();
        assert!(refused().contains("line 1: "), "{}", refused());
        std::fs::write(&path, "name: a").unwrap();
        assert_eq!(read_config_file(&path).unwrap().flags["name"], "a");
        std::fs::write(&path, "client-transport-security: {allowed-cn: [client]}").unwrap();
        assert!(refused().contains("client-transport-security: allowed-cn"), "{}", refused());
    }

    #[test]
    fn the_own_command_line_begins_with_the_program() {
        let own = command_line(std::process::id()).unwrap();
        assert!(!own.is_empty());
    }

    #[test]
    fn an_empty_argument_of_a_process_is_kept() {
        let texts = split_texts(b"etcd\0--listen-metrics-urls\0\0--name\0a\0");
        assert_eq!(texts, ["etcd", "--listen-metrics-urls", "", "--name", "a"]);
        assert_eq!(split_texts(b"etcd\0--auto-tls\0\0"), ["etcd", "--auto-tls", ""]);
        assert!(split_texts(b"").is_empty(), "a process that has ended has no command line");
    }

    #[test]
    fn a_program_that_was_replaced_while_it_runs_is_found_at_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        let install = || {
            // A child process makes the copy. If this process wrote it, a child of another test
            // could inherit the open descriptor, and executing the file would fail with ETXTBSY.
            let copied = std::process::Command::new("cp")
                .arg("/bin/sleep")
                .arg(dir.path().join("new"))
                .status();
            assert!(copied.unwrap().success());
            std::fs::rename(dir.path().join("new"), &path).unwrap();
        };
        install();
        let mut child = std::process::Command::new(&path).arg("60").spawn().unwrap();
        let before = program_of(child.id());
        install();
        let replaced = program_of(child.id());
        std::fs::remove_file(&path).unwrap();
        let gone = program_of(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((before.unwrap(), replaced.unwrap()), (path.clone(), path));
        assert_eq!(gone.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
