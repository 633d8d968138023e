//! What the demo prints: numbered chapters, and under each what was done and what was checked.

use std::io::Write;
use std::time::Instant;

/// The teller. Everything goes to stdout, flushed line by line.
#[derive(Debug)]
pub struct Story {
    started: Instant,
    chapter: u8,
}

impl Default for Story {
    fn default() -> Self {
        Self { started: Instant::now(), chapter: 0 }
    }
}

impl Story {
    /// A new chapter.
    pub fn chapter(&mut self, title: &str) {
        self.chapter += 1;
        line(&format!("\n{}. {title}", self.chapter));
    }

    /// Something that was done.
    pub fn say(&self, text: &str) {
        for part in text.lines() {
            line(&format!("   {part}"));
        }
    }

    /// A command as the reader could type it.
    pub fn command(&self, text: &str) {
        line(&format!("   $ {text}"));
    }

    /// Something that was checked and holds.
    pub fn checked(&self, text: &str) {
        line(&format!("   [ok] {text}"));
    }

    /// The last line.
    pub fn end(&self, text: &str) {
        line(&format!("\n{text} ({:.1} s)", self.started.elapsed().as_secs_f64()));
    }

    /// To stderr, for what went wrong.
    pub fn complain(text: &str) {
        // Nobody is left to tell when stderr is closed.
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

fn line(text: &str) {
    let mut out = std::io::stdout().lock();
    // A reader who closed the pipe has seen enough.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}
