//! Finds Postgres' programs, and makes a data directory with them.

use std::path::{Path, PathBuf};

use super::account::UnixAccount;
use super::{ManagedPostgresError, SUPERUSER};

const PACKAGED: &str = "/usr/lib/postgresql";
/// Maximum number of bytes of a failed program's output that an error shows.
pub(super) const MAX_OUTPUT_BYTES: usize = 600;

/// A directory that contains the programs `initdb` and `postgres`.
#[derive(Clone, Debug)]
pub(super) struct Installation {
    binaries: PathBuf,
}

impl Installation {
    /// Finds an installation. If `named` is given, it is the only candidate. Otherwise the
    /// directories in PATH come first, then those of the installed packages, newest version first.
    /// An existing `data` directory needs the version that made it.
    pub(super) fn find(named: Option<&Path>, data: &Path) -> Result<Self, ManagedPostgresError> {
        let wanted = std::fs::read_to_string(data.join("PG_VERSION")).ok();
        let wanted = wanted.as_deref().map(str::trim);
        let mut candidates: Vec<PathBuf> = Vec::new();
        match named {
            Some(named) => candidates.push(named.to_owned()),
            None => {
                let path = std::env::var_os("PATH").unwrap_or_default();
                candidates.extend(std::env::split_paths(&path));
                candidates.extend(packaged_directories(Path::new(PACKAGED)));
            }
        }
        let complete =
            |dir: &&PathBuf| dir.join("initdb").is_file() && dir.join("postgres").is_file();
        let installed: Vec<&PathBuf> = candidates.iter().filter(complete).collect();
        let Some(first) = installed.first() else {
            let searched = match named {
                Some(named) => named.display().to_string(),
                None => format!("PATH or {PACKAGED}/*/bin"),
            };
            return Err(ManagedPostgresError::NotInstalled { searched });
        };
        let Some(wanted) = wanted else {
            return Ok(Installation { binaries: (*first).clone() });
        };
        let mut found = Vec::new();
        for dir in installed {
            match major_version(&dir.join("postgres")) {
                Some(version) if version == wanted => {
                    return Ok(Installation { binaries: dir.clone() });
                }
                version => found.push(version.unwrap_or_else(|| "an unknown version".into())),
            }
        }
        Err(ManagedPostgresError::Version {
            dir: data.to_owned(),
            wanted: wanted.to_owned(),
            found: found.join(", "),
        })
    }

    pub(super) fn postgres(&self) -> PathBuf {
        self.binaries.join("postgres")
    }

    /// Returns the path of another Postgres program of the same version. If `postgres` is a
    /// symbolic link without that program beside it, the program is looked for beside the link's
    /// target.
    pub(super) fn program(&self, name: &str) -> PathBuf {
        let beside = self.binaries.join(name);
        match self.postgres().canonicalize() {
            Ok(target) if !beside.exists() => target.with_file_name(name),
            _ => beside,
        }
    }

    /// Makes `dir/data` if it doesn't exist. It is made under another name first, so a crash in
    /// between leaves nothing that looks like a database.
    pub(super) fn initialise(
        &self,
        dir: &Path,
        account: &UnixAccount,
    ) -> Result<(), ManagedPostgresError> {
        let (data, unfinished) = (dir.join("data"), dir.join("data.new"));
        if data.exists() {
            return Ok(());
        }
        if unfinished.exists() {
            fs_err::remove_dir_all(&unfinished)
                .map_err(ManagedPostgresError::io("can't remove an unfinished database"))?;
        }
        account.make_dir(&unfinished)?;
        let output = account
            .command(&self.binaries.join("initdb"), dir, true)
            .arg("-D")
            .arg(&unfinished)
            .args(["-U", SUPERUSER, "-E", "UTF8", "--locale=C", "--data-checksums"])
            .args(["--auth-local=trust", "--auth-host=reject"])
            .output()
            .map_err(ManagedPostgresError::io("can't run setpriv (util-linux) and initdb"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(ManagedPostgresError::Program {
                program: "initdb".into(),
                status: output.status.to_string(),
                said: ending(&said).to_owned(),
            });
        }
        Ok(muster_files::rename(&unfinished, &data)?)
    }
}

/// Returns the end of a program's output, at most [`MAX_OUTPUT_BYTES`] bytes.
pub(super) fn ending(text: &str) -> &str {
    let text = text.trim_end();
    let mut from = text.len().saturating_sub(MAX_OUTPUT_BYTES);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..]
}

/// Returns the directories `root/*/bin`, newest version first.
fn packaged_directories(root: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(root) else { return Vec::new() };
    let mut versions: Vec<(u32, PathBuf)> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let version = entry.file_name().to_str()?.parse().ok()?;
            Some((version, entry.path().join("bin")))
        })
        .collect();
    versions.sort_by_key(|(version, _)| std::cmp::Reverse(*version));
    versions.into_iter().map(|(_, path)| path).collect()
}

/// Returns the major version: "postgres (PostgreSQL) 15.18 (Debian …)" → "15".
fn major_version(postgres: &Path) -> Option<String> {
    let output = std::process::Command::new(postgres).arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let version = text.split_whitespace().nth(2)?;
    Some(version.split('.').next()?.to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed step fails the test")]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_beside_the_target_of_a_linked_server() {
        let root = tempfile::tempdir().unwrap();
        let (packaged, linked) = (root.path().join("packaged"), root.path().join("linked"));
        std::fs::create_dir(&packaged).unwrap();
        std::fs::create_dir(&linked).unwrap();
        for name in ["postgres", "pg_dump"] {
            std::fs::write(packaged.join(name), "").unwrap();
        }
        std::os::unix::fs::symlink(packaged.join("postgres"), linked.join("postgres")).unwrap();
        let target = packaged.canonicalize().unwrap();
        let mut installation = Installation { binaries: linked.clone() };
        assert_eq!(installation.program("pg_dump"), target.join("pg_dump"));
        // A `pg_dump` beside the `postgres` link is preferred to the one beside the link's target.
        std::os::unix::fs::symlink(packaged.join("pg_dump"), linked.join("pg_dump")).unwrap();
        assert_eq!(installation.program("pg_dump"), linked.join("pg_dump"));
        installation.binaries = packaged.clone();
        assert_eq!(installation.program("pg_restore"), target.join("pg_restore"));
    }
}
