//! New migrations are part of the program: cargo has to look at them.

use std::io::Write;

fn main() -> std::io::Result<()> {
    std::io::stdout().write_all(b"cargo:rerun-if-changed=../migrations\n")
}
