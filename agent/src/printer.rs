//! Data goes to standard output through here; everything else goes to standard error.

use std::io::{self, Write};

/// Where a command's result goes.
pub(crate) struct Printer<'a> {
    out: &'a mut dyn Write,
}

impl<'a> Printer<'a> {
    /// Prints to `out`.
    pub(crate) fn new(out: &'a mut dyn Write) -> Self {
        Self { out }
    }

    /// One line for people, or the one JSON document of a `--json`.
    pub(crate) fn line(&mut self, text: &str) -> io::Result<()> {
        match writeln!(self.out, "{text}").and_then(|()| self.out.flush()) {
            // Whoever reads us has had enough (`| head`).
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            written => written,
        }
    }
}
