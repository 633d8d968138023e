//! A one-member cluster of stock etcd and one of `muster-node`, and their results for a line of the
//! script.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};
use muster_tests::harness::nodes::client_url;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::{Network, NodeProcess, wait_for};
use muster_tests::stock_etcd;
use tempfile::TempDir;

use crate::mask;
use crate::running_program::{LIMIT, ProgramOutput, RunningProgram, distinct_lines};
use crate::script::{RunMode, ScriptLine};

/// Masked result of a line.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CommandResult {
    /// Exit code; `None` if the command was killed.
    code: Option<i32>,
    out: String,
    err: String,
}

pub(crate) struct ClusterPair {
    pub(crate) theirs: TranscriptCluster,
    pub(crate) ours: TranscriptCluster,
}

impl ClusterPair {
    /// Starts both clusters. Returns `None` without a stock etcd to compare with.
    pub(crate) fn start(etcdctl: &Path) -> Result<Option<Self>> {
        let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let (Some(etcd), Some(etcdutl)) =
            (stock_etcd::newest(work), stock_etcd::newest_etcdutl(work))
        else {
            return Ok(None);
        };
        let network = Network::loopback(2);
        let muster_node = program_path("muster-node")?;
        let start = |at: usize, server: &Path| -> Result<TranscriptCluster> {
            let [host, other] = [at, 1 - at].map(|n| &network.hosts[n]);
            let folder = tempfile::tempdir()?;
            let mut node = NodeProcess::new(host, "one", server, folder.path());
            node.flags.push("--name=one".to_owned());
            node.flags.push(format!("--initial-cluster=one=http://{}:2380", host.address));
            node.flags.push("--bcrypt-cost=4".to_owned());
            node.start()?;
            node.wait_ready(LIMIT)?;
            Ok(TranscriptCluster {
                node,
                other: client_url(other),
                lease: String::new(),
                background: None,
                programs: [etcdctl, &etcdutl, &muster_node].map(Path::to_owned),
                folder,
            })
        };
        Ok(Some(Self { theirs: start(0, &etcd)?, ours: start(1, &muster_node)? }))
    }

    /// Runs a line on both clusters at the same time, and returns both results.
    pub(crate) fn run_line(&mut self, line: &ScriptLine<'_>) -> Result<[CommandResult; 2]> {
        self.on_both(|cluster| cluster.run_line(line))
    }

    pub(crate) fn on_both<T: Send>(
        &mut self,
        ask: impl Fn(&mut TranscriptCluster) -> Result<T> + Sync,
    ) -> Result<[T; 2]> {
        let Self { theirs, ours } = self;
        let (theirs, ours) = std::thread::scope(|scope| {
            let ours = scope.spawn(|| ask(ours));
            (ask(theirs), ours.join())
        });
        let ours = ours.map_err(|_| anyhow!("it panicked")).flatten();
        Ok([theirs.context("etcd")?, ours.context("muster-node")?])
    }
}

pub(crate) struct TranscriptCluster {
    pub(crate) node: NodeProcess,
    /// Client URL of the other cluster.
    other: String,
    /// Id of the lease that this cluster granted last.
    lease: String,
    /// Background command, which runs while further lines are run.
    background: Option<RunningProgram>,
    /// Paths of `etcdctl`, `etcdutl` and `muster-node`.
    programs: [PathBuf; 3],
    folder: TempDir,
}

impl TranscriptCluster {
    fn run_line(&mut self, line: &ScriptLine<'_>) -> Result<CommandResult> {
        let output = match line.mode {
            RunMode::UntilExit => self.start(line)?.end()?,
            RunMode::KillAfterLines(lines) => {
                let mut running = self.start(line)?;
                running.wait_lines(lines)?;
                running.kill_and_output()?
            }
            RunMode::RepeatUntilLines(lines) => wait_for(line.text, LIMIT, || {
                let output = self.start(line).and_then(RunningProgram::end);
                let other = |output: &ProgramOutput| output.out.lines().count() != lines;
                (!output.as_ref().is_ok_and(other)).then_some(output)
            })??,
            RunMode::StartBackground => {
                ensure!(self.background.is_none(), "a background command runs already");
                self.background = Some(self.start(line)?);
                return Ok(CommandResult::default());
            }
            RunMode::AwaitBackgroundLines(lines) => {
                let background = self.background.as_mut().context("no background command runs")?;
                background.wait_distinct_lines(lines)?;
                return Ok(CommandResult::default());
            }
            RunMode::EndBackground => {
                let background = self.background.take().context("no background command runs")?;
                let output = background.kill_and_output()?;
                // Timing decides whether the command was killed or ended by itself, so the exit
                // code is left out.
                ProgramOutput {
                    code: None,
                    out: distinct_lines(&output.out).concat(),
                    err: String::new(),
                }
            }
        };
        let granted =
            output.out.strip_prefix("lease ").and_then(|rest| rest.split_once(" granted"));
        if let Some((lease, _)) = granted {
            lease.clone_into(&mut self.lease);
        }
        let masked = |text: &str| self.masked(text);
        Ok(CommandResult { code: output.code, out: masked(&output.out), err: masked(&output.err) })
    }

    fn start(&self, line: &ScriptLine<'_>) -> Result<RunningProgram> {
        let mut running = RunningProgram::start(self.command(&line.words))?;
        running.run_input_steps(&line.input)?;
        Ok(running)
    }

    /// Returns the command of these words, with the placeholders replaced.
    pub(crate) fn command(&self, words: &[String]) -> Command {
        let url = client_url(&self.node.host);
        let says_where = ["--endpoints=", "ETCDCTL_ENDPOINTS="];
        let says_where = |word: &String| says_where.iter().any(|flag| word.starts_with(flag));
        let says_where = words.iter().any(says_where);
        let folder = self.folder.path().to_string_lossy();
        let filled = |word: &String| {
            word.replace("$URL", &url)
                .replace("$OTHER", &self.other)
                .replace("$LEASE", &self.lease)
                .replace("$DIR", &folder)
        };
        let environment = words.iter().take_while(|word| word.starts_with("ETCDCTL_")).count();
        let (environment, words) = words.split_at(environment);
        let [etcdctl, etcdutl, muster_node] = &self.programs;
        let (program, words) = match words.first().map(String::as_str) {
            Some("etcdutl") => (etcdutl, &words[1..]),
            Some("muster-node") => (muster_node, &words[1..]),
            _ => (etcdctl, words),
        };
        let mut command = Command::new(program);
        if program == etcdctl && !says_where {
            command.arg(format!("--endpoints={url}"));
        }
        let environment = environment.iter().map(filled);
        command.envs(environment.filter_map(|set| {
            set.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()))
        }));
        command.args(words.iter().map(filled));
        command
    }

    fn masked(&self, text: &str) -> String {
        let address = self.node.host.address.to_string();
        let other = self.other.trim_start_matches("http://").trim_end_matches(":2379");
        let folder = self.folder.path().to_string_lossy();
        mask::masked(&text.replace(other, "OTHER").replace(&*folder, "DIR"), &address)
    }
}
