//! The managed Postgres of the service: its CPU time, its content, and `pgbench` on it.

use std::io::Write;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::bench::process::{cpu_of, cpu_of_ended_children};

/// SQL that makes clusters.
const FILL: &str = include_str!("../../../discovery/src/tests/fill.sql");
/// SQL that makes the table which [`TRANSACTION`] reads and writes.
const PREPARE: &str = "
DROP TABLE IF EXISTS bench_rows;
CREATE TABLE bench_rows (id int PRIMARY KEY, value bigint NOT NULL, text text NOT NULL);
INSERT INTO bench_rows SELECT n, 0, repeat('x', 500) FROM generate_series(1, 100000) AS n;
";
/// Script of `pgbench`. Like a change of a cluster, its transaction has five round trips and one
/// commit that writes a row.
const TRANSACTION: &str = "\\set id random(1, 100000)
BEGIN;
SELECT value FROM bench_rows WHERE id = :id FOR UPDATE;
SELECT text FROM bench_rows WHERE id = :id;
UPDATE bench_rows SET value = value + 1 WHERE id = :id;
COMMIT;
";
/// Folder with Debian's Postgres programs of all versions.
const PROGRAMS: &str = "/usr/lib/postgresql";
/// Role and database of the service in its managed Postgres.
const ROLE: &str = "muster";

/// Returns the CPU time of the server in `folder` with all its processes, also those that have
/// ended.
pub(super) fn cpu(folder: &Path) -> Result<Duration> {
    let pid_file = fs_err::read_to_string(folder.join("data/postmaster.pid"))?;
    let pid: u32 = pid_file.lines().next().context("a pid")?.parse()?;
    let stat = fs_err::read_to_string(format!("/proc/{pid}/stat"))?;
    let mut total = cpu_of(&stat).context("the kernel's /proc/PID/stat")?
        + cpu_of_ended_children(&stat).context("the kernel's /proc/PID/stat")?;
    let children = fs_err::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    for child in children.split_whitespace() {
        // A child that has just ended has no file any more. The next measurement includes its time
        // in that of the ended children.
        if let Ok(stat) = fs_err::read_to_string(format!("/proc/{child}/stat")) {
            total += cpu_of(&stat).unwrap_or_default();
        }
    }
    Ok(total)
}

/// Fills the database with clusters that have these numbers. `grant` is the signed grant of all
/// their tokens.
pub(super) fn fill(folder: &Path, numbers: RangeInclusive<u64>, grant: &str) -> Result<()> {
    let sql = FILL
        .replace("{first}", &numbers.start().to_string())
        .replace("{last}", &numbers.end().to_string())
        .replace("{grant}", grant);
    psql(folder, &sql)
}

/// Number of transactions per second of `pgbench`, and CPU time of Postgres for one.
pub(super) struct TransactionFigures {
    pub(super) per_second: f64,
    pub(super) cpu: Duration,
}

/// Runs `pgbench`. Each transaction has five round trips and one commit.
pub(super) fn pgbench(folder: &Path, clients: usize, time: Duration) -> Result<TransactionFigures> {
    psql(folder, PREPARE)?;
    let script = folder.with_file_name("transaction.sql");
    fs_err::write(&script, TRANSACTION)?;
    let before = cpu(folder)?;
    let output = command(folder, "pgbench")?
        .args(["--no-vacuum", "--protocol=prepared", "--client", &clients.to_string()])
        .args(["--time", &time.as_secs().to_string(), "--file"])
        .arg(script)
        .arg(ROLE)
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "pgbench: {}", String::from_utf8_lossy(&output.stderr));
    let number = |before: &str| -> Result<f64> {
        let line = text.lines().find_map(|line| line.strip_prefix(before));
        let line = line.with_context(|| format!("pgbench prints {before:?}: {text}"))?;
        let digits = line.split(|c: char| !c.is_ascii_digit() && c != '.').next();
        Ok(digits.context("a number")?.parse()?)
    };
    let transactions = number("number of transactions actually processed: ")?;
    let used = cpu(folder)?.saturating_sub(before);
    Ok(TransactionFigures { per_second: number("tps = ")?, cpu: used.div_f64(transactions) })
}

fn psql(folder: &Path, sql: &str) -> Result<()> {
    let mut child = command(folder, "psql")?
        .args(["--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", ROLE])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()?;
    child.stdin.take().context("a pipe")?.write_all(sql.as_bytes())?;
    let status = child.wait()?;
    ensure!(status.success(), "psql ended with {status}");
    Ok(())
}

/// Makes a command that runs one of Postgres' programs on the server in `folder`.
fn command(folder: &Path, program: &str) -> Result<Command> {
    let mut command = Command::new(find_program(program)?);
    command.arg("--host").arg(folder.join("run")).args(["--port", "5432", "--username", ROLE]);
    Ok(command)
}

/// Returns the path of one of Postgres' programs, of the newest installed version.
fn find_program(name: &str) -> Result<PathBuf> {
    let mut found: Vec<PathBuf> = fs_err::read_dir(PROGRAMS)?
        .flatten()
        .map(|version| version.path().join("bin").join(name))
        .filter(|path| path.exists())
        .collect();
    found.sort();
    found.pop().with_context(|| format!("no {name} in {PROGRAMS}"))
}
