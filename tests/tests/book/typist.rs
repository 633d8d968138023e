//! Types the commands of a page of the manual, one after the other, as a reader would.
//!
//! All machines of a page share one folder, so what a page copies from machine to machine is there
//! already. Addresses and paths of the page are replaced by those of the test; a test may also
//! replace other parts of a command, and says so.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::process::Output;

use anyhow::{Context, Result, bail, ensure};
use muster_tests::harness::process::last_lines;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::{ChildProcess, TestHost, poll_slowly};

use super::page::{Command, commands};

/// Time limit of a command in seconds, as an argument of timeout(1).
const COMMAND_LIMIT: &str = "150";

/// A machine of a page.
struct Machine {
    host: TestHost,
    env: Vec<(String, String)>,
    /// Lines that change the shell, such as `export`: they precede each later command.
    shell_state: Vec<String>,
}

/// The rest of a page's commands, and the machines that they are typed on.
pub(crate) struct Typist {
    page: String,
    rest: VecDeque<Command>,
    folder: PathBuf,
    machines: BTreeMap<String, Machine>,
    replaced: Vec<(String, String)>,
    /// Programs that go on running, by the name of their machine.
    running: Vec<ChildProcess>,
    /// Number of programs that were started and went on running.
    started: u32,
}

impl Typist {
    /// Opens a page at these sections, or as a whole if there are none. Its commands are run in
    /// `folder`.
    pub(crate) fn open(page: &str, sections: &[&str], folder: &Path) -> Result<Self> {
        fs_err::create_dir_all(folder)?;
        let mut rest = commands(page)?;
        for section in sections {
            ensure!(rest.iter().any(|it| it.section == *section), "{page} has no {section:?}");
        }
        rest.retain(|it| sections.is_empty() || sections.contains(&it.section.as_str()));
        Ok(Self {
            page: page.to_owned(),
            rest: rest.into(),
            folder: folder.to_owned(),
            machines: BTreeMap::new(),
            replaced: Vec::new(),
            running: Vec::new(),
            started: 0,
        })
    }

    /// Says which host a machine of the page is, and with which variables commands run there. The
    /// machine without a name is the one of lines without a prompt.
    pub(crate) fn machine(&mut self, name: &str, host: &TestHost, env: &[(&str, &Path)]) {
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), value.display().to_string()));
        let machine = Machine { host: host.clone(), env: env.collect(), shell_state: Vec::new() };
        self.machines.insert(name.to_owned(), machine);
    }

    /// Replaces a text in all further commands of the page.
    pub(crate) fn replace(&mut self, text: &str, by: impl ToString) {
        self.replaced.push((text.to_owned(), by.to_string()));
    }

    /// Sets a variable for all further commands on a machine.
    pub(crate) fn set(&mut self, machine: &str, name: &str, value: &str) -> Result<()> {
        let machine = self.machines.get_mut(machine).context("an unknown machine")?;
        machine.env.push((name.to_owned(), value.to_owned()));
        Ok(())
    }

    /// Returns the page's next command, which has to contain `part`.
    fn next(&mut self, part: &str) -> Result<Command> {
        let command = self.rest.pop_front();
        let command = command.with_context(|| format!("{}: no command is left", self.page))?;
        ensure!(
            command.line.contains(part),
            "{}: the next command is {:?}, and not {part:?}",
            self.page,
            command.line
        );
        Ok(command)
    }

    /// Leaves the page's next command out, which has to contain `part`. `reason` says who runs it,
    /// or why nobody does.
    pub(crate) fn skip(&mut self, part: &str, reason: &str) -> Result<()> {
        ensure!(!reason.is_empty());
        self.next(part).map(drop)
    }

    /// Types the page's next command, which has to contain `part` and to succeed. Returns what it
    /// printed.
    pub(crate) fn run(&mut self, part: &str) -> Result<String> {
        self.run_with(part, &[])
    }

    /// Types the next command as [`Typist::run`] does, with parts of it replaced.
    pub(crate) fn run_with(&mut self, part: &str, replaced: &[(&str, &str)]) -> Result<String> {
        let command = self.next(part)?;
        let line = self.line(&command, replaced)?;
        if changes_shell(&line) {
            let machine = self.machines.get_mut(&command.machine).context("a machine")?;
            machine.shell_state.push(line);
            return self.type_line(&command.machine, "true");
        }
        self.type_line(&command.machine, &line)
    }

    /// Types the next command as [`Typist::run`] does, on a machine that the page names in its
    /// text.
    pub(crate) fn run_on(&mut self, machine: &str, part: &str) -> Result<String> {
        self.run_on_with(machine, part, &[])
    }

    /// Types the next command as [`Typist::run_on`] does, with parts of it replaced.
    pub(crate) fn run_on_with(
        &mut self,
        machine: &str,
        part: &str,
        replaced: &[(&str, &str)],
    ) -> Result<String> {
        let command = self.next(part)?;
        self.type_line(machine, &self.line(&command, replaced)?)
    }

    /// Types the next command as [`Typist::run`] does, again and again until it succeeds, as a
    /// reader does while something isn't ready yet.
    pub(crate) fn retry(&mut self, part: &str) -> Result<String> {
        self.retry_with(part, &[])
    }

    /// Types the next command as [`Typist::retry`] does, with parts of it replaced.
    pub(crate) fn retry_with(&mut self, part: &str, replaced: &[(&str, &str)]) -> Result<String> {
        let command = self.next(part)?;
        let line = self.line(&command, replaced)?;
        let mut last = Ok(String::new());
        let done = poll_slowly(&line, super::LIMIT, || {
            last = self.type_line(&command.machine, &line);
            last.as_ref().ok().cloned()
        });
        done.with_context(|| format!("{last:?}"))
    }

    /// Types a command that isn't on the page, and returns what it printed. It has to succeed.
    pub(crate) fn type_line(&self, machine: &str, line: &str) -> Result<String> {
        let output = self.type_in(machine, line)?;
        let [out, error] =
            [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        ensure!(
            output.status.success(),
            "{}: {machine}$ {line}\nended with {}: {out}{error}\n{}",
            self.page,
            output.status,
            self.logs()
        );
        Ok(format!("{out}{error}"))
    }

    /// Types the next command, which goes on running, and waits until it prints `text`.
    pub(crate) fn start(
        &mut self,
        part: &str,
        replaced: &[(&str, &str)],
        text: &str,
    ) -> Result<()> {
        let command = self.next(part)?;
        let line = self.line(&command, replaced)?;
        self.start_line(&command.machine, &line, text)
    }

    /// Types a command that isn't on the page and goes on running. Waits until it prints `text`.
    pub(crate) fn start_line(&mut self, machine: &str, line: &str, text: &str) -> Result<()> {
        let shell = self.shell(machine, &format!("exec {line}"))?;
        self.started += 1;
        let log = self.folder.join(format!("running-{}.log", self.started));
        let mut process = ChildProcess::spawn(line, shell, &log)?;
        process.wait_for_output(text, super::LIMIT)?;
        self.running.push(process);
        Ok(())
    }

    /// Stops the program that was started last, and waits for its end.
    pub(crate) fn stop_last(&mut self) -> Result<()> {
        let mut process = self.running.pop().context("nothing runs")?;
        let status = process.terminate(super::LIMIT)?;
        ensure!(status.success(), "{status}: {}", process.output());
        Ok(())
    }

    /// Sends SIGTERM to the program that was started last, and waits for its end. Use this for a
    /// command that runs a program by another one, such as `runuser`, which ends with a status of
    /// its own.
    pub(crate) fn end_last(&mut self) -> Result<()> {
        let mut process = self.running.pop().context("nothing runs")?;
        process.terminate(super::LIMIT).map(drop)
    }

    /// Waits until the program that was started last has ended by itself. It has to succeed.
    /// Returns its output.
    pub(crate) fn wait_last(&mut self) -> Result<String> {
        let mut process = self.running.pop().context("nothing runs")?;
        let code = process.exit_code(super::LIMIT)?;
        ensure!(code == 0, "{code}: {}", process.output());
        Ok(process.output())
    }

    /// Returns the page's next command with replaced parts, without running it. It has to contain
    /// `part`.
    pub(crate) fn take(&mut self, part: &str) -> Result<String> {
        let command = self.next(part)?;
        self.line(&command, &[])
    }

    /// Checks that no command of the page is left.
    pub(crate) fn finish(self) -> Result<()> {
        let Some(left) = self.rest.front() else { return Ok(()) };
        bail!("{}: {} commands are left, first: {}", self.page, self.rest.len(), left.line)
    }

    /// Returns a path in the folder in which commands are run.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn line(&self, command: &Command, replaced: &[(&str, &str)]) -> Result<String> {
        let mut line = command.line.clone();
        for (text, by) in replaced {
            ensure!(line.contains(text), "{}: {text:?} is not in {line}", self.page);
            line = line.replace(text, by);
        }
        for (text, by) in &self.replaced {
            line = line.replace(text, by);
        }
        Ok(line)
    }

    fn shell(&self, machine: &str, line: &str) -> Result<std::process::Command> {
        let found = self.machines.get(machine);
        let found = found.with_context(|| format!("{}: no machine {machine:?}", self.page))?;
        let programs = program_path("muster-agent")?;
        let programs = programs.parent().context("a program has a folder")?;
        let path = std::env::var("PATH").unwrap_or_default();
        let script =
            [&["set -e -o pipefail".to_owned()], &found.shell_state[..]].concat().join("\n");
        let mut shell = found.host.command("bash");
        shell
            .args(["-c", &format!("{script}\n{line}")])
            .env("PATH", format!("{}:{}:{path}", self.folder.display(), programs.display()))
            .env("ETCDCTL_API", "3")
            .envs(found.env.iter().map(|(name, value)| (name, value)))
            .current_dir(&self.folder);
        Ok(shell)
    }

    fn type_in(&self, machine: &str, line: &str) -> Result<Output> {
        let mut shell = self.shell(machine, line)?;
        let program = shell.get_program().to_owned();
        let args: Vec<_> = shell.get_args().map(std::ffi::OsStr::to_owned).collect();
        let mut limited = std::process::Command::new("timeout");
        limited.args(["--kill-after=5", COMMAND_LIMIT]).arg(program).args(args);
        limited.envs(shell.get_envs().filter_map(|(name, value)| Some((name, value?))));
        limited.current_dir(&self.folder).stdin(std::process::Stdio::null());
        shell = limited;
        shell.output().with_context(|| line.to_owned())
    }

    fn logs(&self) -> String {
        self.running.iter().map(|process| last_lines(&process.output(), 15)).collect()
    }
}

/// Whether the line changes the shell itself, so that later commands on this machine need it.
fn changes_shell(line: &str) -> bool {
    ["export ", "cd ", "set ", ". "].iter().any(|word| line.starts_with(word))
}
