//! A Postgres server that starts and stops with the program that uses it. It is for demos, tests
//! and small installations without a database server.
//!
//! Its directory holds `data/`, `run/` (the socket; there is no network port), `postgres.log` and a
//! lock. At the first start, a folder with anything else is refused. Everybody who can enter `run/`
//! can connect, so its mode is 0700. As root the server runs as an unprivileged user. That user
//! gets `data/` and `run/` and nothing else. Otherwise it could place files that root opens or
//! gives away at the next start.
//!
//! One thread owns the child from start to stop. Linux sends the parent-death signal when the
//! *thread* that forked ends, so the end of a pool's thread would stop Postgres.

mod account;
mod child;
mod claim;
mod dump;
mod install;
mod stale;

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use tokio::sync::watch;

pub use self::dump::{dump, load};

use self::account::UnixAccount;
use self::install::Installation;

/// The superuser that `initdb` makes and that connections use.
pub const SUPERUSER: &str = "muster";
/// Maximum length of a socket's path. `sun_path` has 108 bytes, including the final NUL (unix(7)).
const SOCKET_PATH_MAX: usize = 107;
/// Port number in the socket's name. Nothing listens on a TCP port.
const PORT: u16 = 5432;
/// Time limit for a start. Recovery after a crash may have to replay a lot of log.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// Settings of a managed Postgres.
#[derive(Clone, Debug)]
pub struct ManagedPostgresSettings {
    /// Directory of the server; made if it doesn't exist.
    pub dir: PathBuf,
    /// Directory of `initdb` and `postgres`; `None` looks for them.
    pub binaries: Option<PathBuf>,
    /// If this process is root, the server runs as this user.
    pub user: String,
}

/// Why the managed Postgres doesn't run.
#[derive(Debug, thiserror::Error)]
pub enum ManagedPostgresError {
    /// Postgres' programs weren't found.
    #[error(
        "PostgreSQL isn't installed here: no `initdb` and `postgres` in {searched}. Install it \
         (on Debian: apt-get install postgresql), name its directory with --postgres-bin, or use \
         another server with --database-url"
    )]
    NotInstalled {
        /// Directories that were searched.
        searched: String,
    },
    /// The data directory was made by a version that isn't installed.
    #[error(
        "{dir} was made by PostgreSQL {wanted}, but the binaries here are of {found}: install \
         PostgreSQL {wanted}, or move the data with pg_upgrade"
    )]
    Version {
        dir: PathBuf,
        /// Major version that made the data directory.
        wanted: String,
        /// Versions that are installed.
        found: String,
    },
    /// The socket's path is too long.
    #[error(
        "the socket {path} would have {length} bytes, but a Unix socket's path may have {max}: \
         choose a shorter directory for --managed-postgres",
        max = SOCKET_PATH_MAX
    )]
    PathTooLong {
        /// Path of the socket.
        path: PathBuf,
        /// Length of the path, in bytes.
        length: usize,
    },
    /// This process is root, and the unprivileged user doesn't exist.
    #[error(
        "Postgres doesn't run as root, and there is no user `{user}` to run it as: make one, or \
         name another with --postgres-user"
    )]
    NoUser {
        /// Name of the missing user.
        user: String,
    },
    /// The unprivileged user can't reach the directory.
    #[error(
        "user `{user}` can't write to {dir}: each folder above it must let that user pass \
         (chmod o+x), or choose another directory for --managed-postgres"
    )]
    Unreachable {
        /// Name of the unprivileged user.
        user: String,
        dir: PathBuf,
    },
    /// The folder holds somebody else's files. A start would give parts of the folder to the
    /// server's user, and take other users' access away.
    #[error(
        "{dir} {why}: name a folder that doesn't exist yet, an empty one, or the one that \
         --managed-postgres had before; it is given to Postgres alone"
    )]
    Foreign {
        dir: PathBuf,
        /// Reason of the refusal. It continues a sentence that begins with the path: for example
        /// `is no folder`.
        why: String,
    },
    /// Another process runs a server in the directory.
    #[error("{dir} is in use by another muster-discovery")]
    InUse { dir: PathBuf },
    /// A program failed. `said` is the end of its output.
    #[error("{program} failed ({status}): {said}")]
    Program {
        /// Name of the program.
        program: String,
        /// Exit status of the program.
        status: String,
        /// End of the program's output.
        said: String,
    },
    /// The server runs, but doesn't accept connections in time.
    #[error("Postgres didn't get ready within {} s; its log: {said}", START_TIMEOUT.as_secs())]
    NotReady {
        /// End of the server's log.
        said: String,
    },
    /// A file or folder can't be used, or belongs to another user.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// A file or folder couldn't be read or changed.
    #[error("{what}")]
    Io {
        /// The operation that failed.
        what: String,
        #[source]
        source: std::io::Error,
    },
}

impl ManagedPostgresError {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| ManagedPostgresError::Io { what, source }
    }
}

/// State of the server process.
#[derive(Clone, Debug)]
enum PostgresState {
    Starting,
    Ready {
        pid: u32,
    },
    Restarting,
    /// The server was stopped (`None`), or failed before it was ever ready (`Some`).
    Ended(Option<std::sync::Arc<ManagedPostgresError>>),
}

/// A running Postgres. Dropping it stops the server too, but doesn't wait for the server's end.
#[derive(Debug)]
pub struct ManagedPostgres {
    socket_dir: PathBuf,
    state: watch::Receiver<PostgresState>,
    stop: Option<mpsc::SyncSender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// Returns the options for a connection to `database` of a server that another process runs in
/// `dir`. `None` if no server runs there. The caller must be the user that the server's process
/// belongs to, or root.
pub fn running_connect_options(dir: &Path, database: &str) -> Option<PgConnectOptions> {
    let is_running = dir.join("data/postmaster.pid").exists();
    is_running.then(|| options_at(&run_dir(dir), database))
}

fn options_at(socket_dir: &Path, database: &str) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass()
        .socket(socket_dir)
        .port(PORT)
        .username(SUPERUSER)
        .database(database)
}

impl ManagedPostgres {
    /// Makes the data directory if there is none, starts the server, and waits until it accepts
    /// connections. Restarts the server if it dies. First shuts down a server that a killed program
    /// has left.
    pub async fn start(
        settings: ManagedPostgresSettings,
    ) -> Result<Self, std::sync::Arc<ManagedPostgresError>> {
        let (state_sender, mut state) = watch::channel(PostgresState::Starting);
        // Capacity 1 is enough: "stop" is the only message.
        let (stop, stopped) = mpsc::sync_channel(1);
        let socket_dir = run_dir(&settings.dir);
        let thread = std::thread::Builder::new()
            .name("postgres".into())
            .spawn(move || child::supervise(&settings, &state_sender, &stopped))
            .map_err(ManagedPostgresError::io("can't start a thread"))?;
        loop {
            match &*state.borrow_and_update() {
                PostgresState::Ready { pid } => {
                    tracing::info!(pid, "Postgres takes connections");
                    break;
                }
                PostgresState::Ended(Some(error)) => return Err(error.clone()),
                PostgresState::Ended(None)
                | PostgresState::Starting
                | PostgresState::Restarting => {}
            }
            if state.changed().await.is_err() {
                let source = std::io::Error::other("its thread ended");
                let what = "Postgres can't be supervised".to_owned();
                return Err(ManagedPostgresError::Io { what, source }.into());
            }
        }
        Ok(ManagedPostgres { socket_dir, state, stop: Some(stop), thread: Some(thread) })
    }

    /// Returns the options for a connection to `database`.
    pub fn connect_options(&self, database: &str) -> PgConnectOptions {
        options_at(&self.socket_dir, database)
    }

    /// Returns the process id of the postmaster while it runs.
    pub fn pid(&self) -> Option<u32> {
        match &*self.state.borrow() {
            PostgresState::Ready { pid } => Some(*pid),
            PostgresState::Starting | PostgresState::Restarting | PostgresState::Ended(_) => None,
        }
    }

    /// Stops the server (fast shutdown) and waits for its end.
    pub async fn stop(mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

/// Returns the folder of the server's socket.
fn run_dir(dir: &Path) -> PathBuf {
    dir.join("run")
}

fn check_socket_path(dir: &Path) -> Result<(), ManagedPostgresError> {
    let path = run_dir(dir).join(format!(".s.PGSQL.{PORT}"));
    let length = path.as_os_str().len();
    if length > SOCKET_PATH_MAX {
        return Err(ManagedPostgresError::PathTooLong { path, length });
    }
    Ok(())
}

/// Checks whether a server could be started with these settings. Changes nothing.
pub fn check(settings: &ManagedPostgresSettings) -> Result<(), ManagedPostgresError> {
    find(settings).map(drop)
}

/// Finds Postgres' programs and the account that they run as. Returns an error if the folder holds
/// somebody else's files.
fn find(
    settings: &ManagedPostgresSettings,
) -> Result<(Installation, UnixAccount), ManagedPostgresError> {
    check_socket_path(&settings.dir)?;
    let account = UnixAccount::find(&settings.user)?;
    let installation =
        Installation::find(settings.binaries.as_deref(), &settings.dir.join("data"))?;
    claim::check(&settings.dir)?;
    Ok((installation, account))
}

/// Prepares directories, permissions and the data directory for the server's start. The returned
/// file holds the lock.
fn prepare(
    settings: &ManagedPostgresSettings,
) -> Result<(Installation, UnixAccount, std::fs::File), ManagedPostgresError> {
    let (installation, account) = find(settings)?;
    account.make_base(&settings.dir)?;
    let lock = lock(&settings.dir)?;
    account.make_dir(&run_dir(&settings.dir))?;
    account.check_reach(&run_dir(&settings.dir))?;
    stale::clear(&settings.dir.join("data"))?;
    installation.initialise(&settings.dir, &account)?;
    Ok((installation, account, lock))
}

/// Opens one of the managed Postgres' own files for appending. Makes the file if it doesn't exist.
fn open_own(path: &Path) -> Result<std::fs::File, ManagedPostgresError> {
    Ok(muster_files::open(path, std::fs::OpenOptions::new().create(true).append(true))?)
}

fn lock(dir: &Path) -> Result<std::fs::File, ManagedPostgresError> {
    let file = open_own(&dir.join("lock"))?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(ManagedPostgresError::InUse { dir: dir.to_owned() })
        }
        Err(error) => Err(ManagedPostgresError::io("can't lock")(error.into())),
    }
}

#[cfg(test)]
mod tests;
