//! Output of the demo: numbered chapters, and in each what was done and checked.

use std::io::Write;
use std::time::Instant;

/// Prints the demo's output to stdout, flushed line by line.
#[derive(Debug)]
pub struct DemoPrinter {
    started: Instant,
    chapter: u8,
}

impl Default for DemoPrinter {
    fn default() -> Self {
        Self { started: Instant::now(), chapter: 0 }
    }
}

impl DemoPrinter {
    /// Begins a new chapter.
    pub fn chapter(&mut self, title: &str) {
        self.chapter += 1;
        print_line(&format!("\n{}. {title}", self.chapter));
    }

    /// Prints a step that was done.
    pub fn print_step(&self, text: &str) {
        for part in text.lines() {
            print_line(&format!("   {part}"));
        }
    }

    /// Prints a command as the reader could type it.
    pub fn command(&self, text: &str) {
        print_line(&format!("   $ {text}"));
    }

    /// Prints a claim that was checked and holds.
    pub fn print_checked(&self, text: &str) {
        print_line(&format!("   [ok] {text}"));
    }

    /// Prints the last line, with the total time.
    pub fn end(&self, text: &str) {
        print_line(&format!("\n{text} ({:.1} s)", self.started.elapsed().as_secs_f64()));
    }

    /// Prints an error to stderr.
    pub fn print_error(text: &str) {
        // If stderr is closed there is no place left to report the error.
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

fn print_line(text: &str) {
    let mut out = std::io::stdout().lock();
    // If stdout is closed the demo goes on without output.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}
