//! Rebuilds the crate when a migration changes: `sqlx::migrate!` embeds the migrations.

use std::io::Write;

fn main() -> std::io::Result<()> {
    std::io::stdout().write_all(b"cargo:rerun-if-changed=../migrations\n")
}
