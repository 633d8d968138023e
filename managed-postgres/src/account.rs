//! The operating system account of Postgres: our own or, if we are root, an unprivileged one.

use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use rustix::fs::OFlags;

use super::ManagedPostgresError;

/// User id of root.
const ROOT: u32 = 0;

/// Account that programs are started as.
#[derive(Clone, Debug)]
pub(super) enum UnixAccount {
    /// The user of this process.
    Own,
    /// Another, unprivileged user, because this process runs as root.
    Other { user: String, uid: u32, gid: u32 },
}

impl UnixAccount {
    /// Looks `user` up if this process runs as root.
    pub(super) fn find(user: &str) -> Result<Self, ManagedPostgresError> {
        if !rustix::process::geteuid().is_root() {
            return Ok(UnixAccount::Own);
        }
        let no_user = || ManagedPostgresError::NoUser { user: user.to_owned() };
        let (uid, gid) = (id("-u", user).ok_or_else(no_user)?, id("-g", user).ok_or_else(no_user)?);
        if uid == ROOT {
            return Err(no_user());
        }
        Ok(UnixAccount::Other { user: user.to_owned(), uid, gid })
    }

    /// Makes a command that runs `program` as this account, in `dir`, with an environment of its
    /// own. With `die_with_us` the kernel sends SIGINT (a fast shutdown) when the thread that
    /// started the program ends.
    pub(super) fn command(&self, program: &Path, dir: &Path, die_with_us: bool) -> Command {
        let mut command = Command::new("setpriv");
        if let UnixAccount::Other { uid, gid, .. } = self {
            command.arg(format!("--reuid={uid}")).arg(format!("--regid={gid}"));
            command.arg("--init-groups").arg("--no-new-privs");
        }
        if die_with_us {
            // Set the parent-death signal after the ids: a change of credentials clears it
            // (prctl(2)).
            command.args(["--pdeathsig", "INT"]);
        } else {
            command.args(["--pdeathsig", "clear"]);
        }
        command.arg("--").arg(program).current_dir(dir).env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("LC_ALL", "C");
        command
    }

    /// Makes `dir` and its parents if they don't exist. `dir` belongs to this process's user. If
    /// Postgres has another account, that user is root, and `dir` has mode 0711. The account can
    /// then enter `dir`, but can't replace anything in it.
    pub(super) fn make_base(&self, dir: &Path) -> Result<(), ManagedPostgresError> {
        // The parent isn't made private, because the account has to pass through it to reach `dir`.
        let parent = dir.parent().unwrap_or(Path::new("/"));
        let what = format!("can't make the folder of {}", dir.display());
        fs_err::create_dir_all(parent).map_err(ManagedPostgresError::io(what))?;
        let mode = match self {
            UnixAccount::Own => 0o700,
            UnixAccount::Other { .. } => 0o711,
        };
        let opened = muster_files::open_own_folder(dir)?;
        let closed = opened.set_permissions(std::fs::Permissions::from_mode(mode));
        closed.map_err(ManagedPostgresError::io(format!("can't close {}", dir.display())))
    }

    /// Makes `dir` in the folder of the managed Postgres, with mode 0700 and owned by the account.
    pub(super) fn make_dir(&self, dir: &Path) -> Result<(), ManagedPostgresError> {
        match self {
            UnixAccount::Own => make_owned_dir(dir, None, 0o700),
            UnixAccount::Other { uid, gid, .. } => make_owned_dir(dir, Some((*uid, *gid)), 0o700),
        }
    }

    /// Checks that the account can reach `dir`: owning a directory doesn't give access to its
    /// parents.
    pub(super) fn check_reach(&self, dir: &Path) -> Result<(), ManagedPostgresError> {
        let UnixAccount::Other { user, .. } = self else { return Ok(()) };
        let status = self
            .command(Path::new("test"), Path::new("/"), false)
            .arg("-w")
            .arg(dir)
            .status()
            .map_err(ManagedPostgresError::io("can't run setpriv (util-linux)"))?;
        if status.success() {
            return Ok(());
        }
        Err(ManagedPostgresError::Unreachable { user: user.clone(), dir: dir.to_owned() })
    }
}

/// Makes `dir` unless it exists, then sets owner and mode. Uses a descriptor opened without
/// following symbolic links.
fn make_owned_dir(
    dir: &Path,
    owner: Option<(u32, u32)>,
    mode: u32,
) -> Result<(), ManagedPostgresError> {
    let what = |what: &str| ManagedPostgresError::io(format!("can't {what} {}", dir.display()));
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(what("make")(error)),
    }
    let opened = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags((OFlags::NOFOLLOW | OFlags::DIRECTORY).bits().cast_signed())
        .open(dir)
        .map_err(what("open"))?;
    let metadata = opened.metadata().map_err(what("look at"))?;
    if let Some((uid, gid)) = owner
        && (metadata.uid(), metadata.gid()) != (uid, gid)
    {
        std::os::unix::fs::fchown(&opened, Some(uid), Some(gid)).map_err(what("give away"))?;
    }
    if metadata.permissions().mode() & 0o7777 != mode {
        let permissions = std::fs::Permissions::from_mode(mode);
        opened.set_permissions(permissions).map_err(what("close"))?;
    }
    Ok(())
}

fn id(flag: &str, user: &str) -> Option<u32> {
    let output = Command::new("id").args([flag, "--", user]).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}
