//! Whom Postgres runs as: ourselves, or, when we are root, an unprivileged user.

use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use super::ManagedPostgresError;

/// Root's user id.
const ROOT: u32 = 0;

/// Whom programs are started as.
#[derive(Clone, Debug)]
pub(super) enum Account {
    /// As the user that we are.
    Own,
    /// As this one, since we are root.
    Other { user: String, uid: u32, gid: u32 },
}

impl Account {
    /// Looks `user` up if we are root.
    pub(super) fn find(user: &str) -> Result<Self, ManagedPostgresError> {
        if !rustix::process::geteuid().is_root() {
            return Ok(Account::Own);
        }
        let no_user = || ManagedPostgresError::NoUser { user: user.to_owned() };
        let (uid, gid) = (id("-u", user).ok_or_else(no_user)?, id("-g", user).ok_or_else(no_user)?);
        if uid == ROOT {
            return Err(no_user());
        }
        Ok(Account::Other { user: user.to_owned(), uid, gid })
    }

    /// A command that runs `program` as this account, in `dir`, with an environment of its own.
    /// With `die_with_us` the kernel interrupts it (a fast shutdown) when our thread goes away.
    pub(super) fn command(&self, program: &Path, dir: &Path, die_with_us: bool) -> Command {
        let mut command = Command::new("setpriv");
        if let Account::Other { uid, gid, .. } = self {
            command.arg(format!("--reuid={uid}")).arg(format!("--regid={gid}"));
            command.arg("--init-groups").arg("--no-new-privs");
        }
        if die_with_us {
            // After the ids: a change of credentials clears the signal (prctl(2)).
            command.args(["--pdeathsig", "INT"]);
        } else {
            command.args(["--pdeathsig", "clear"]);
        }
        command.arg("--").arg(program).current_dir(dir).env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("LC_ALL", "C");
        command
    }

    /// Makes `dir` (and what is above it) if need be, gives it to the account, mode 0700.
    pub(super) fn make_dir(&self, dir: &Path) -> Result<(), ManagedPostgresError> {
        let what = |what: &str| ManagedPostgresError::io(format!("can't {what} {}", dir.display()));
        if let Some(parent) = dir.parent() {
            fs_err::create_dir_all(parent).map_err(what("make the folder of"))?;
        }
        match std::fs::DirBuilder::new().mode(0o700).create(dir) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(what("make")(error)),
        }
        let metadata = fs_err::metadata(dir).map_err(what("look at"))?;
        if let Account::Other { uid, gid, .. } = self
            && metadata.uid() != *uid
        {
            std::os::unix::fs::chown(dir, Some(*uid), Some(*gid)).map_err(what("give away"))?;
        }
        if metadata.permissions().mode() & 0o777 != 0o700 {
            fs_err::set_permissions(dir, std::fs::Permissions::from_mode(0o700))
                .map_err(what("close"))?;
        }
        Ok(())
    }

    /// An unprivileged user may own a directory and still not get to it.
    pub(super) fn check_reach(&self, dir: &Path) -> Result<(), ManagedPostgresError> {
        let Account::Other { user, .. } = self else { return Ok(()) };
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

fn id(flag: &str, user: &str) -> Option<u32> {
    let output = Command::new("id").args([flag, "--", user]).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}
