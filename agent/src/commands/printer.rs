//! Prints a command's result to standard output. Everything else goes to standard error.

use std::io::{self, Write};

/// Writer of a command's result.
pub(crate) struct Printer<'a> {
    out: &'a mut dyn Write,
}

impl<'a> Printer<'a> {
    /// Makes a printer that writes to `out`.
    pub(crate) fn new(out: &'a mut dyn Write) -> Self {
        Self { out }
    }

    /// Prints one line of text, or the JSON document of `--json`.
    pub(crate) fn line(&mut self, text: &str) -> io::Result<()> {
        match writeln!(self.out, "{text}").and_then(|()| self.out.flush()) {
            // The reader closed the pipe (as in `| head`): not an error.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            written => written,
        }
    }
}
