//! A Postgres that lives and dies with the service: for demos, tests, and small installations
//! that want no database server of their own.
//!
//! Its directory holds `data/`, `run/` (the socket; there is no network port), `postgres.log` and
//! a lock, and it takes no folder that holds anything else. Whoever may enter `run/` may connect,
//! so it is 0700. As root the server runs as an unprivileged user, to whom `data/` and `run/` are
//! given and nothing else: what root opens or gives away at the next start must not be what that
//! user has put there.
//!
//! One thread owns the child from start to stop: Linux sends the parent-death signal when the
//! *thread* that forked goes away, so that a pool's thread would take Postgres with it.

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

use account::Account;
use install::Installation;

pub(crate) use dump::{dump, load};

/// The superuser that `initdb` makes, and whom the service connects as.
pub(crate) const SUPERUSER: &str = "muster";
/// `sun_path` has 108 bytes, the last of which ends the string (unix(7)).
const SOCKET_PATH_MAX: usize = 107;
/// Names the socket; nothing listens on a port.
const PORT: u16 = 5432;
/// Recovery after a crash may replay a lot of log.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// What to run, where.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Directory of the server; made if it doesn't exist.
    pub dir: PathBuf,
    /// Directory of `initdb` and `postgres`; `None` looks for them.
    pub binaries: Option<PathBuf>,
    /// Whom to run as when we are root.
    pub user: String,
}

/// Why there is no Postgres.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ManagedPostgresError {
    /// No binaries.
    #[error(
        "PostgreSQL isn't installed here: no `initdb` and `postgres` in {searched}. Install it \
         (on Debian: apt-get install postgresql), name its directory with --postgres-bin, or use \
         another server with --database-url"
    )]
    NotInstalled {
        /// Where we looked.
        searched: String,
    },
    /// The data directory was made by a version whose binaries aren't here.
    #[error(
        "{dir} was made by PostgreSQL {wanted}, but the binaries here are of {found}: install \
         PostgreSQL {wanted}, or move the data with pg_upgrade"
    )]
    Version {
        /// The data directory.
        dir: PathBuf,
        /// Its major version.
        wanted: String,
        /// What is installed.
        found: String,
    },
    /// The socket's path doesn't fit.
    #[error(
        "the socket {path} would have {length} bytes, but a Unix socket's path may have {max}: \
         choose a shorter directory for --managed-postgres",
        max = SOCKET_PATH_MAX
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
    },
    /// Root, and nobody to drop to.
    #[error(
        "Postgres doesn't run as root, and there is no user `{user}` to run it as: make one, or \
         name another with --postgres-user"
    )]
    NoUser {
        /// The name.
        user: String,
    },
    /// The unprivileged user can't get to the directory.
    #[error(
        "user `{user}` can't write to {dir}: each folder above it must let that user pass \
         (chmod o+x), or choose another directory for --managed-postgres"
    )]
    Unreachable {
        /// The user.
        user: String,
        /// The directory.
        dir: PathBuf,
    },
    /// A folder that is somebody else's: it would be given to the server's user and closed to others.
    #[error(
        "{dir} {why}: name a folder that doesn't exist yet, an empty one, or the one that \
         --managed-postgres had before; it is given to Postgres alone"
    )]
    Foreign {
        /// The folder.
        dir: PathBuf,
        /// What stands there.
        why: String,
    },
    /// Another process runs it.
    #[error("{dir} is in use by another muster-discovery")]
    InUse {
        /// The directory.
        dir: PathBuf,
    },
    /// A program failed; `said` is the end of what it printed.
    #[error("{program} failed ({status}): {said}")]
    Program {
        /// Which.
        program: String,
        /// How it ended.
        status: String,
        /// The end of its output.
        said: String,
    },
    /// It runs, but doesn't get ready.
    #[error("Postgres didn't get ready within {} s; its log: {said}", START_TIMEOUT.as_secs())]
    NotReady {
        /// The end of its log.
        said: String,
    },
    /// A file or folder.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// A file or folder.
    #[error("{what}")]
    Io {
        /// What didn't work.
        what: String,
        /// Why.
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

/// What the child does.
#[derive(Clone, Debug)]
enum State {
    Starting,
    Ready {
        pid: u32,
    },
    Restarting,
    /// It never got ready, or was told to stop.
    Ended(Option<std::sync::Arc<ManagedPostgresError>>),
}

/// A running Postgres. Dropping it stops the server as well, but without waiting for it.
#[derive(Debug)]
pub(crate) struct ManagedPostgres {
    socket_dir: PathBuf,
    #[cfg(test)]
    state: watch::Receiver<State>,
    stop: Option<mpsc::SyncSender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl ManagedPostgres {
    /// Makes the database if there is none, starts the server, waits until it takes connections,
    /// and keeps it running. A server left over from a killed service is stopped in order first.
    pub(crate) async fn start(
        settings: Settings,
    ) -> Result<Self, std::sync::Arc<ManagedPostgresError>> {
        let (state_sender, mut state) = watch::channel(State::Starting);
        // One place: the only message is "stop", and it is sent once.
        let (stop, stopped) = mpsc::sync_channel(1);
        let socket_dir = run_dir(&settings.dir);
        let thread = std::thread::Builder::new()
            .name("postgres".into())
            .spawn(move || child::supervise(&settings, &state_sender, &stopped))
            .map_err(ManagedPostgresError::io("can't start a thread"))?;
        loop {
            match &*state.borrow_and_update() {
                State::Ready { pid } => {
                    tracing::info!(pid, "Postgres takes connections");
                    break;
                }
                State::Ended(Some(error)) => return Err(error.clone()),
                State::Ended(None) | State::Starting | State::Restarting => {}
            }
            if state.changed().await.is_err() {
                let source = std::io::Error::other("its thread ended");
                let what = "Postgres can't be supervised".to_owned();
                return Err(ManagedPostgresError::Io { what, source }.into());
            }
        }
        Ok(ManagedPostgres {
            socket_dir,
            #[cfg(test)]
            state,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// How to connect to `database`.
    pub(crate) fn connect_options(&self, database: &str) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .socket(&self.socket_dir)
            .port(PORT)
            .username(SUPERUSER)
            .database(database)
    }

    /// Process id of the postmaster, while it runs.
    #[cfg(test)]
    pub(crate) fn pid(&self) -> Option<u32> {
        match &*self.state.borrow() {
            State::Ready { pid } => Some(*pid),
            State::Starting | State::Restarting | State::Ended(_) => None,
        }
    }

    /// Stops the server in order (fast shutdown) and waits for it.
    pub(crate) async fn stop(mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

/// Where the socket is.
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

/// Everything that has to stand before the server can be started: directories, rights, database.
/// The returned file holds the lock.
fn prepare(
    settings: &Settings,
) -> Result<(Installation, Account, std::fs::File), ManagedPostgresError> {
    check_socket_path(&settings.dir)?;
    let account = Account::find(&settings.user)?;
    let installation =
        Installation::find(settings.binaries.as_deref(), &settings.dir.join("data"))?;
    claim::check(&settings.dir)?;
    account.make_base(&settings.dir)?;
    let lock = lock(&settings.dir)?;
    account.make_dir(&run_dir(&settings.dir))?;
    account.check_reach(&run_dir(&settings.dir))?;
    stale::clear(&settings.dir.join("data"))?;
    installation.initialise(&settings.dir, &account)?;
    Ok((installation, account, lock))
}

/// Opens a file of ours for writing at its end, making it if need be.
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
