//! A running program: its input, its output so far, and its end.

use std::io::{Read, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use muster_tests::harness::wait_for;
use rustix::process::Signal;

use crate::script::InputStep;

/// Time limit of each wait.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// Output of a program that has ended.
#[derive(Debug)]
pub(crate) struct ProgramOutput {
    /// Exit code; `None` if the program was killed.
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// A running program, killed when this value is dropped.
pub(crate) struct RunningProgram {
    child: Child,
    input: Option<ChildStdin>,
    out: PipeReader,
    err: PipeReader,
}

impl RunningProgram {
    pub(crate) fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("starting {command:?}"))?;
        let input = child.stdin.take();
        let out = PipeReader::new(child.stdout.take().context("a pipe")?);
        let err = PipeReader::new(child.stderr.take().context("a pipe")?);
        Ok(Self { child, input, out, err })
    }

    pub(crate) fn run_input_steps(&mut self, steps: &[InputStep]) -> Result<()> {
        for step in steps {
            match (step, &mut self.input) {
                (InputStep::AwaitLines(lines), _) => self.wait_lines(*lines)?,
                // A program that doesn't read its input may have ended already, so a write error is
                // ignored.
                (InputStep::Write(text), Some(input)) => drop(input.write_all(text.as_bytes())),
                (InputStep::Write(_), None) => {}
            }
        }
        Ok(())
    }

    /// Waits until the program has printed `lines` lines, or has ended.
    pub(crate) fn wait_lines(&mut self, lines: usize) -> Result<()> {
        self.wait_for_lines(lines, |text| whole_lines(text).len())
    }

    /// Waits until the program has printed `lines` lines, or has ended. A line that equals the
    /// previous line isn't counted.
    pub(crate) fn wait_distinct_lines(&mut self, lines: usize) -> Result<()> {
        self.wait_for_lines(lines, |text| distinct_lines(text).len())
    }

    fn wait_for_lines(&mut self, lines: usize, count: impl Fn(&str) -> usize) -> Result<()> {
        let enough = || (count(&self.out.text()) >= lines || self.has_ended()).then_some(());
        let said = wait_for(&format!("{lines} lines"), LIMIT, enough);
        said.with_context(|| format!("it said\n{}", self.out.text()))
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|end| end.is_some())
    }

    /// Closes the input, waits until the program ends, and returns its output.
    pub(crate) fn end(mut self) -> Result<ProgramOutput> {
        self.input = None;
        let heard = self.out.wait_end().and_then(|()| self.err.wait_end());
        heard.with_context(|| format!("it said\n{}", self.out.text()))?;
        let code = self.child.wait()?.code();
        Ok(ProgramOutput { code, out: self.out.text(), err: self.err.text() })
    }

    /// Kills the program unless it has ended, and returns its output so far.
    pub(crate) fn kill_and_output(mut self) -> Result<ProgramOutput> {
        if self.has_ended() {
            return self.end();
        }
        Ok(ProgramOutput { code: None, out: self.out.text(), err: String::new() })
    }

    pub(crate) fn signal(&self, signal: Signal) {
        muster_tests::harness::process::send_signal(self.child.id(), signal);
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The bytes read from a pipe so far, and a channel that reports the pipe's end.
struct PipeReader {
    bytes: Arc<Mutex<Vec<u8>>>,
    ended: Receiver<()>,
}

impl PipeReader {
    fn new(mut pipe: impl Read + Send + 'static) -> Self {
        let (end, ended) = channel();
        let bytes = Arc::<Mutex<Vec<u8>>>::default();
        let hears = Arc::clone(&bytes);
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut piece) {
                let mut bytes = hears.lock().unwrap_or_else(PoisonError::into_inner);
                bytes.extend_from_slice(&piece[..count]);
            }
            // Sending fails if nobody waits for the end of the pipe any more, which needs no
            // handling.
            let _ = end.send(());
        });
        Self { bytes, ended }
    }

    fn text(&self) -> String {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn wait_end(&self) -> Result<()> {
        self.ended.recv_timeout(LIMIT).context("waited in vain for its end")
    }
}

fn whole_lines(text: &str) -> Vec<&str> {
    text.split_inclusive('\n').filter(|line| line.ends_with('\n')).collect()
}

/// Returns the complete lines without those that are equal to the line before.
pub(crate) fn distinct_lines(text: &str) -> Vec<&str> {
    let mut lines = whole_lines(text);
    lines.dedup();
    lines
}
