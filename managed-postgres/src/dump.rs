//! Dumps the managed server's database while it runs, and loads a dump into a new one. Uses
//! Postgres' own programs over the server's socket. The socket needs no password, so none appears
//! in an argument list.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;

use super::account::UnixAccount;
use super::install::{Installation, ending};
use super::{ManagedPostgresError, ManagedPostgresSettings, PORT, SUPERUSER, run_dir};

/// Dumps all of `database` to `to`, in one snapshot and in pg_dump's custom format.
pub fn dump(
    settings: &ManagedPostgresSettings,
    database: &str,
    to: File,
) -> Result<(), ManagedPostgresError> {
    let format = ["--format=custom", "--no-owner"];
    run(settings, "pg_dump", &format, database, Stdio::null(), Stdio::from(to))
}

/// Loads a dump into the empty `database`, in one transaction.
pub fn load(
    settings: &ManagedPostgresSettings,
    database: &str,
    from: File,
) -> Result<(), ManagedPostgresError> {
    let whole = ["--exit-on-error", "--single-transaction", "--no-owner"];
    run(settings, "pg_restore", &whole, database, Stdio::from(from), Stdio::null())
}

fn run(
    settings: &ManagedPostgresSettings,
    program: &str,
    arguments: &[&str],
    database: &str,
    input: Stdio,
    output: Stdio,
) -> Result<(), ManagedPostgresError> {
    let account = UnixAccount::find(&settings.user)?;
    let data = settings.dir.join("data");
    let installation = Installation::find(settings.binaries.as_deref(), &data)?;
    let ended = account
        .command(&installation.program(program), Path::new("/"), true)
        .args(arguments)
        .args(["--no-password", "--username", SUPERUSER, "--port", &PORT.to_string()])
        .arg("--host")
        .arg(run_dir(&settings.dir))
        .args(["--dbname", database])
        .stdin(input)
        .stdout(output)
        .output()
        .map_err(ManagedPostgresError::io(format!(
            "can't run setpriv (util-linux) and {program}"
        )))?;
    if ended.status.success() {
        return Ok(());
    }
    Err(ManagedPostgresError::Program {
        program: program.to_owned(),
        status: ended.status.to_string(),
        said: ending(&String::from_utf8_lossy(&ended.stderr)).to_owned(),
    })
}
