//! The thread that owns the server process: starts it, restarts it with a growing pause, and stops
//! it.

use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tokio::sync::watch;

use super::account::UnixAccount;
use super::install::{Installation, MAX_OUTPUT_BYTES, ending};
use super::{
    ManagedPostgresError, ManagedPostgresSettings, PORT, PostgresState, START_TIMEOUT, prepare,
    run_dir, stale,
};

const CHECK_INTERVAL: Duration = Duration::from_millis(50);
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Run time after which the next restart begins with the shortest pause again.
const STEADY_RUN_TIME: Duration = Duration::from_secs(60);
/// How long a fast shutdown may take before an immediate one follows.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);
/// Size in bytes above which the log is renamed at a start of the server. One old log is kept.
const LOG_MAX: u64 = 16 * 1024 * 1024;

/// Why one run of the server ended.
enum RunEnd {
    Stopped,
    Died(ManagedPostgresError),
}

/// Runs the server until a message arrives on `stop` or its sender is dropped.
pub(super) fn supervise(
    settings: &ManagedPostgresSettings,
    state: &watch::Sender<PostgresState>,
    stop: &Receiver<()>,
) {
    let end = |error: Option<ManagedPostgresError>| {
        let _ = state.send(PostgresState::Ended(error.map(Arc::new)));
    };
    let (installation, account, _lock) = match prepare(settings) {
        Ok(prepared) => prepared,
        Err(error) => return end(Some(error)),
    };
    let mut pause = FIRST_PAUSE;
    let mut was_ready = false;
    loop {
        let started = Instant::now();
        let ended = run_once(settings, &installation, &account, state, stop, &mut was_ready);
        let error = match ended {
            RunEnd::Stopped => return end(None),
            // The server was never ready, so `start` returns the error, and there is no retry.
            RunEnd::Died(error) if !was_ready => return end(Some(error)),
            RunEnd::Died(error) => error,
        };
        if started.elapsed() > STEADY_RUN_TIME {
            pause = FIRST_PAUSE;
        }
        let pause_ms = pause.as_millis();
        tracing::error!(%error, pause_ms, "Postgres died; starting it again");
        let _ = state.send(PostgresState::Restarting);
        match stop.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return end(None),
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
        if let Err(error) = stale::clear(&settings.dir.join("data")) {
            tracing::error!(%error, "can't clear what the dead Postgres left");
        }
    }
}

fn run_once(
    settings: &ManagedPostgresSettings,
    installation: &Installation,
    account: &UnixAccount,
    state: &watch::Sender<PostgresState>,
    stop: &Receiver<()>,
    was_ready: &mut bool,
) -> RunEnd {
    let mut child = match spawn(&settings.dir, installation, account) {
        Ok(child) => child,
        Err(error) => return RunEnd::Died(error),
    };
    let pid = child.id();
    let pid_file = settings.dir.join("data/postmaster.pid");
    let started = Instant::now();
    let mut ready = false;
    loop {
        match stop.recv_timeout(CHECK_INTERVAL) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => {
                stop_child(&mut child);
                return RunEnd::Stopped;
            }
        }
        match child.try_wait() {
            Ok(None) => {}
            Ok(Some(status)) => return RunEnd::Died(exit_error(&settings.dir, status.to_string())),
            Err(error) => {
                return RunEnd::Died(ManagedPostgresError::io("can't wait for Postgres")(error));
            }
        }
        if !ready && is_ready(&pid_file, pid) {
            (ready, *was_ready) = (true, true);
            tracing::info!(pid, dir = %settings.dir.display(), "Postgres is ready");
            let _ = state.send(PostgresState::Ready { pid });
        }
        if !ready && started.elapsed() > START_TIMEOUT {
            stop_child(&mut child);
            return RunEnd::Died(ManagedPostgresError::NotReady {
                said: log_ending(&settings.dir),
            });
        }
    }
}

fn spawn(
    dir: &Path,
    installation: &Installation,
    account: &UnixAccount,
) -> Result<Child, ManagedPostgresError> {
    let log_path = dir.join("postgres.log");
    if std::fs::symlink_metadata(&log_path).is_ok_and(|metadata| metadata.len() > LOG_MAX) {
        fs_err::rename(&log_path, dir.join("postgres.log.1"))
            .map_err(ManagedPostgresError::io("can't put the log aside"))?;
    }
    let log = super::open_own(&log_path)?;
    let copy = log.try_clone().map_err(ManagedPostgresError::io("can't open the log"))?;
    let mut command = account.command(&installation.postgres(), dir, true);
    command.arg("-D").arg(dir.join("data"));
    let sockets = run_dir(dir).display().to_string();
    for (name, value) in [
        ("listen_addresses", ""),
        ("port", &PORT.to_string()),
        ("unix_socket_directories", &sockets),
        ("unix_socket_permissions", "0700"),
        // After a restore, accept connections only once recovery has ended. Until then the server
        // would look like a replica.
        ("hot_standby", "off"),
        ("fsync", "on"),
        ("synchronous_commit", "on"),
        ("full_page_writes", "on"),
        ("data_sync_retry", "off"),
        ("max_connections", "200"),
        ("logging_collector", "off"),
        ("log_destination", "stderr"),
        ("log_line_prefix", "%m [%p] "),
    ] {
        command.arg("-c").arg(format!("{name}={value}"));
    }
    // The server gets its own process group. So Ctrl-C at a terminal signals only this process,
    // which then shuts the server down cleanly.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command.stdin(Stdio::null()).stdout(log).stderr(copy);
    command.spawn().map_err(ManagedPostgresError::io("can't run setpriv (util-linux)"))
}

/// Whether the server accepts connections. Postgres writes its state into line 8 of the pid file
/// (`LOCK_FILE_LINE_PM_STATUS` in its pidfile.h).
fn is_ready(pid_file: &Path, pid: u32) -> bool {
    let Ok(text) = std::fs::read_to_string(pid_file) else { return false };
    let lines: Vec<&str> = text.lines().collect();
    lines.first().and_then(|line| line.trim().parse().ok()) == Some(pid)
        && lines.get(7).is_some_and(|line| line.trim() == "ready")
}

fn stop_child(child: &mut Child) {
    // Try a fast shutdown, then an immediate shutdown, then SIGKILL.
    for signal in [Signal::INT, Signal::QUIT, Signal::KILL] {
        let _ = rustix::process::kill_process(Pid::from_child(child), signal);
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline {
            match child.try_wait() {
                Ok(None) => std::thread::sleep(CHECK_INTERVAL),
                Ok(Some(_)) | Err(_) => return,
            }
        }
    }
}

fn exit_error(dir: &Path, status: String) -> ManagedPostgresError {
    ManagedPostgresError::Program { program: "postgres".into(), status, said: log_ending(dir) }
}

fn log_ending(dir: &Path) -> String {
    use std::io::{Read, Seek, SeekFrom};
    let read = || -> std::io::Result<String> {
        let mut file = std::fs::File::open(dir.join("postgres.log"))?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(MAX_OUTPUT_BYTES as u64)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().map(|text| ending(&text).to_owned()).unwrap_or_default()
}
