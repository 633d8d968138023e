//! A program that runs: what it is given, what it has said, and its end.

use std::io::{Read, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use muster_tests::harness::until;
use rustix::process::Signal;

use crate::script::Step;

/// Of everything that is waited for.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// What it has said when it ended.
#[derive(Debug)]
pub(crate) struct Output {
    /// `None` of what was ended.
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// It ends with this.
pub(crate) struct Running {
    child: Child,
    input: Option<ChildStdin>,
    out: Heard,
    err: Heard,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("starting {command:?}"))?;
        let input = child.stdin.take();
        let out = Heard::of(child.stdout.take().context("a pipe")?);
        let err = Heard::of(child.stderr.take().context("a pipe")?);
        Ok(Self { child, input, out, err })
    }

    pub(crate) fn take(&mut self, steps: &[Step]) -> Result<()> {
        for step in steps {
            match (step, &mut self.input) {
                (Step::Said(lines), _) => self.said(*lines)?,
                // Who wants none of it may be gone.
                (Step::Write(text), Some(input)) => drop(input.write_all(text.as_bytes())),
                (Step::Write(_), None) => {}
            }
        }
        Ok(())
    }

    /// Waits until it has said so many lines, or has ended.
    pub(crate) fn said(&mut self, lines: usize) -> Result<()> {
        self.until(lines, |text| whole_lines(text).len())
    }

    /// The same of lines of which those that are repeated count but once.
    pub(crate) fn said_other(&mut self, lines: usize) -> Result<()> {
        self.until(lines, |text| unrepeated(text).len())
    }

    fn until(&mut self, lines: usize, count: impl Fn(&str) -> usize) -> Result<()> {
        let enough = || (count(&self.out.text()) >= lines || self.has_ended()).then_some(());
        let said = until(&format!("{lines} lines"), LIMIT, enough);
        said.with_context(|| format!("it said\n{}", self.out.text()))
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|end| end.is_some())
    }

    /// What it has said once it has ended by itself, at the end of its input at the latest.
    pub(crate) fn end(mut self) -> Result<Output> {
        self.input = None;
        let heard = self.out.whole().and_then(|()| self.err.whole());
        heard.with_context(|| format!("it said\n{}", self.out.text()))?;
        let code = self.child.wait()?.code();
        Ok(Output { code, out: self.out.text(), err: self.err.text() })
    }

    /// What it has said until now, at which it is ended, unless it has ended.
    pub(crate) fn cut_off(mut self) -> Result<Output> {
        if self.has_ended() {
            return self.end();
        }
        Ok(Output { code: None, out: self.out.text(), err: String::new() })
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        muster_tests::harness::process::signal(self.child.id(), signal);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What has come out of a pipe so far, and whether there was an end of it.
struct Heard {
    bytes: Arc<Mutex<Vec<u8>>>,
    ended: Receiver<()>,
}

impl Heard {
    fn of(mut pipe: impl Read + Send + 'static) -> Self {
        let (end, ended) = channel();
        let bytes = Arc::<Mutex<Vec<u8>>>::default();
        let hears = Arc::clone(&bytes);
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut piece) {
                let mut bytes = hears.lock().unwrap_or_else(PoisonError::into_inner);
                bytes.extend_from_slice(&piece[..count]);
            }
            // Nobody may listen any more.
            let _ = end.send(());
        });
        Self { bytes, ended }
    }

    fn text(&self) -> String {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn whole(&self) -> Result<()> {
        self.ended.recv_timeout(LIMIT).context("waited in vain for its end")
    }
}

fn whole_lines(text: &str) -> Vec<&str> {
    text.split_inclusive('\n').filter(|line| line.ends_with('\n')).collect()
}

/// The lines without those that say what the one before says.
pub(crate) fn unrepeated(text: &str) -> Vec<&str> {
    let mut lines = whole_lines(text);
    lines.dedup();
    lines
}
