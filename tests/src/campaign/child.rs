//! Child processes with a time limit. A child that is stopped ends with everything that it has
//! started.

use std::fs::Permissions;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::guard::GUARD_COMMAND;
use super::process_tree::{end_orphans, remove_namespaces, stop};

/// Interval at which a running child is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Interval between two lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// Number of bytes at the end of a log in which its last line is looked for.
const TAIL_BYTES: u64 = 1024;
/// Maximum length in characters of an output line that is shown as progress.
const MAX_PROGRESS_CHARS: usize = 120;

/// Command that a child process runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChildCommand {
    pub program: PathBuf,
    pub arguments: Vec<String>,
    /// Working directory of the child.
    pub directory: PathBuf,
    /// Environment variables that are added to the inherited ones.
    pub variables: Vec<(String, String)>,
}

/// Reason why a child's run is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildEnd {
    Succeeded,
    Failed,
    /// The child was stopped, because its time limit had passed.
    TimeLimit,
    /// The child was stopped, because the campaign was interrupted.
    Interrupted,
}

/// A child process that has ended.
#[derive(Clone, Debug)]
pub struct EndedChild {
    pub end: ChildEnd,
    pub took: Duration,
    /// Everything that the child wrote to standard output.
    pub stdout: String,
    /// Everything that the child wrote to standard error.
    pub stderr: String,
}

/// Runner of child processes, one after another.
pub struct ChildRunner<'a> {
    /// Folder for the output of all children.
    pub logs: &'a Path,
    /// Becomes true when the campaign must stop.
    pub interrupted: &'a AtomicBool,
    /// Whether processes without a parent become children of this process, which then ends them.
    pub adopts_orphans: bool,
    /// Program of the campaign, which also guards each child. Without it, a child survives the
    /// campaign's SIGKILL.
    pub guard: Option<&'a Path>,
    /// Receives lines of progress.
    pub say: &'a dyn Fn(&str),
}

impl ChildRunner<'_> {
    /// Runs `command` until it ends, its time limit passes, or the campaign is interrupted. The
    /// files with its output are called `name`.
    ///
    /// # Errors
    /// If the command can't be started, or its output can't be read.
    pub fn run(&self, name: &str, command: &ChildCommand, limit: Duration) -> Result<EndedChild> {
        // The child's temporary folder. It is deleted afterwards, with the files that a killed
        // child leaves there.
        let temporary = tempfile::tempdir()?;
        // Tests run servers as other users. Those users must be able to enter this folder.
        fs_err::set_permissions(temporary.path(), Permissions::from_mode(0o755))?;
        let (stdout, stderr) =
            (self.logs.join(format!("{name}.out")), self.logs.join(format!("{name}.err")));
        let mut child = self
            .guarded(command)
            .args(&command.arguments)
            .current_dir(&command.directory)
            .envs(command.variables.iter().cloned())
            .env("TMPDIR", temporary.path())
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(fs_err::File::create(&stdout)?.into_file())
            .stderr(fs_err::File::create(&stderr)?.into_file())
            .spawn()
            .with_context(|| format!("{} can't be started", command.program.display()))?;
        let began = Instant::now();
        let end = self.wait(&mut child, name, limit, [&stderr, &stdout])?;
        remove_namespaces(child.id());
        if self.adopts_orphans {
            end_orphans();
        }
        let text = |path: &Path| -> Result<String> {
            Ok(String::from_utf8_lossy(&fs_err::read(path)?).into_owned())
        };
        Ok(EndedChild {
            end,
            took: began.elapsed(),
            stdout: text(&stdout)?,
            stderr: text(&stderr)?,
        })
    }

    /// Returns a command that starts the child's program, through the guard if there is one. The
    /// caller adds the program's arguments.
    fn guarded(&self, command: &ChildCommand) -> Command {
        let Some(guard) = self.guard else { return Command::new(&command.program) };
        let mut guarded = Command::new(guard);
        guarded.args([GUARD_COMMAND, &std::process::id().to_string(), "--"]);
        guarded.arg(&command.program);
        guarded
    }

    fn wait(
        &self,
        child: &mut Child,
        name: &str,
        limit: Duration,
        logs: [&Path; 2],
    ) -> Result<ChildEnd> {
        let began = Instant::now();
        let mut last_progress = began;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(if status.success() { ChildEnd::Succeeded } else { ChildEnd::Failed });
            }
            if self.interrupted.load(Ordering::Relaxed) {
                stop(child);
                return Ok(ChildEnd::Interrupted);
            }
            if began.elapsed() > limit {
                stop(child);
                return Ok(ChildEnd::TimeLimit);
            }
            if last_progress.elapsed() >= PROGRESS_INTERVAL {
                last_progress = Instant::now();
                let line = logs.into_iter().find_map(last_line).unwrap_or_default();
                let (so_far, most) = (began.elapsed().as_secs(), limit.as_secs());
                (self.say)(&format!("{name}: {so_far} s of at most {most} s  {line}"));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Returns the last non-empty line of a log.
fn last_line(log: &Path) -> Option<String> {
    let mut file = fs_err::File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES))).ok()?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail).ok()?;
    let tail = String::from_utf8_lossy(&tail);
    let line = tail.lines().map(str::trim).rfind(|line| !line.is_empty())?;
    Some(line.chars().take(MAX_PROGRESS_CHARS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::process::is_alive;
    use crate::harness::wait_for;

    /// Runs a shell script as a child with this time limit.
    fn run_script(script: &str, limit: Duration, interrupted: bool) -> EndedChild {
        let logs = tempfile::tempdir().unwrap();
        let interrupted = AtomicBool::new(interrupted);
        let runner = ChildRunner {
            logs: logs.path(),
            interrupted: &interrupted,
            adopts_orphans: false,
            guard: None,
            say: &|_| (),
        };
        let command = ChildCommand {
            program: PathBuf::from("/bin/sh"),
            arguments: vec!["-c".to_owned(), script.to_owned()],
            directory: PathBuf::from("/"),
            variables: vec![("GREETING".to_owned(), "hello".to_owned())],
        };
        runner.run("script", &command, limit).unwrap()
    }

    #[test]
    fn a_child_ends_with_its_result_and_both_outputs() {
        let limit = Duration::from_secs(60);
        let ended = run_script("echo $GREETING; echo no >&2; exit 3", limit, false);
        assert_eq!(ended.end, ChildEnd::Failed);
        assert_eq!((&*ended.stdout, &*ended.stderr), ("hello\n", "no\n"));
        assert_eq!(run_script("true", limit, false).end, ChildEnd::Succeeded);
        assert_eq!(run_script("sleep 60", limit, true).end, ChildEnd::Interrupted);
    }

    #[test]
    fn a_child_over_its_time_limit_ends_with_all_that_it_started() {
        let script = "setsid sleep 60 & echo $!; sleep 60";
        // The time limit is generous: on a busy machine, the shell may take a while until it
        // prints.
        let ended = run_script(script, Duration::from_secs(5), false);
        assert_eq!(ended.end, ChildEnd::TimeLimit);
        let started: u32 = ended.stdout.trim().parse().unwrap();
        let limit = Duration::from_secs(10);
        wait_for("the background process to end", limit, || (!is_alive(started)).then_some(()))
            .unwrap();
    }
}
