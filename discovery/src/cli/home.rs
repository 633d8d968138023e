//! The admin tool's folder: one file for each context, and the name of the current one.

use std::path::{Path, PathBuf};

use discovery_types::context::Context;
use discovery_types::name::Name;

use super::CliError;

/// Name of a context if none is given.
pub(super) const DEFAULT_CONTEXT: &str = "default";

/// The admin tool's folder.
#[derive(Clone, Debug)]
pub(super) struct Home {
    folder: PathBuf,
}

impl Home {
    /// Uses `folder` or, by default, `~/.config/muster`.
    pub(super) fn new(folder: Option<&Path>) -> Result<Self, CliError> {
        let folder = match folder {
            Some(folder) => folder.to_path_buf(),
            None => default_folder().ok_or_else(|| {
                CliError::Usage("HOME is not set: name a folder with --home DIR".into())
            })?,
        };
        Ok(Self { folder })
    }

    /// Default path of the admin's private key.
    pub(super) fn default_key(&self) -> PathBuf {
        self.folder.join("admin.pem")
    }

    /// Creates this folder if it is missing, and returns the path of a file in it.
    pub(super) fn file_beside_contexts(&self, name: &str) -> Result<PathBuf, CliError> {
        muster_files::open_own_folder(&self.folder)?;
        Ok(self.folder.join(name))
    }

    /// Stores a context. The first one becomes current.
    pub(super) fn put(&self, name: &Name, context: &Context) -> Result<(), CliError> {
        let contexts = self.contexts();
        // Make the folders private, like ~/.ssh: by default, `self.folder` also holds the admin's
        // key.
        muster_files::open_own_folder(&contexts)?;
        muster_files::replace(&self.file(name), format!("{context}\n").as_bytes())?;
        if self.current().is_none() {
            self.set_current(name)?;
        }
        Ok(())
    }

    /// Makes a context the current one.
    pub(super) fn set_current(&self, name: &Name) -> Result<(), CliError> {
        self.get(Some(name.as_str()))?;
        Ok(muster_files::replace(&self.folder.join("current"), format!("{name}\n").as_bytes())?)
    }

    /// Name of the current context, if there is one.
    pub(super) fn current(&self) -> Option<Name> {
        fs_err::read_to_string(self.folder.join("current")).ok()?.trim().parse().ok()
    }

    /// Returns the context with this name, or the current one.
    pub(super) fn get(&self, name: Option<&str>) -> Result<(Name, Context), CliError> {
        let missing =
            |name: &str| CliError::NoContext { name: name.to_owned(), home: self.folder.clone() };
        let name = match name {
            Some(text) => text.parse().map_err(|_| missing(text))?,
            None => match self.current() {
                Some(name) => name,
                None if self.list().is_ok_and(|kept| !kept.is_empty()) => {
                    return Err(CliError::NoCurrentContext);
                }
                None => return Err(missing(DEFAULT_CONTEXT)),
            },
        };
        let file = self.file(&name);
        let text = match fs_err::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(missing(name.as_str()));
            }
            Err(error) => return Err(CliError::file("reading", &file, error)),
        };
        let place = format!("the context in {}", file.display());
        let context = text.parse().map_err(|source| CliError::Context { place, source })?;
        Ok((name, context))
    }

    /// Returns all contexts, ordered by name.
    pub(super) fn list(&self) -> Result<Vec<(Name, Context)>, CliError> {
        let contexts = self.contexts();
        let entries = match fs_err::read_dir(&contexts) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(CliError::file("reading", &contexts, error)),
        };
        let mut names: Vec<Name> = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect();
        names.sort();
        names.iter().map(|name| self.get(Some(name.as_str()))).collect()
    }

    /// Removes a context. If it was the current one, no context is current afterwards.
    pub(super) fn remove(&self, name: &Name) -> Result<(), CliError> {
        self.get(Some(name.as_str()))?;
        let file = self.file(name);
        fs_err::remove_file(&file).map_err(|source| CliError::file("removing", &file, source))?;
        if self.current().as_ref() == Some(name) {
            let current = self.folder.join("current");
            fs_err::remove_file(&current)
                .map_err(|source| CliError::file("removing", &current, source))?;
        }
        Ok(())
    }

    fn contexts(&self) -> PathBuf {
        self.folder.join("contexts")
    }

    fn file(&self, name: &Name) -> PathBuf {
        self.contexts().join(name.as_str())
    }
}

fn default_folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let config = set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")))?;
    Some(config.join("muster"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(url: &str) -> Context {
        Context {
            urls: vec![url.parse().unwrap()],
            pins: vec![discovery_types::digest::Digest::of(b"key")],
            owners: vec![*discovery_types::key::SigningKey::generate().public()],
        }
    }

    #[test]
    fn the_first_context_becomes_current_and_later_ones_dont() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(Some(folder.path())).unwrap();
        assert!(matches!(home.get(None), Err(CliError::NoContext { .. })));
        let (one, two) = (context("https://a:1"), context("https://b:1"));
        home.put(&"one".parse().unwrap(), &one).unwrap();
        home.put(&"two".parse().unwrap(), &two).unwrap();
        assert_eq!(home.get(None).unwrap().1, one);
        assert_eq!(home.get(Some("two")).unwrap().1, two);
        home.set_current(&"two".parse().unwrap()).unwrap();
        assert_eq!(home.get(None).unwrap().1, two);
        assert_eq!(home.list().unwrap().len(), 2);
    }

    #[test]
    fn a_removed_context_is_no_longer_current() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(Some(folder.path())).unwrap();
        let name = "one".parse().unwrap();
        home.put(&name, &context("https://a:1")).unwrap();
        home.remove(&name).unwrap();
        assert!(matches!(home.get(None), Err(CliError::NoContext { .. })));
        assert!(home.list().unwrap().is_empty());
    }

    #[test]
    fn new_folders_are_closed_to_other_users() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(Some(&folder.path().join("config/muster"))).unwrap();
        home.put(&"one".parse().unwrap(), &context("https://a:1")).unwrap();
        for made in ["config/muster", "config/muster/contexts"] {
            let mode = std::fs::metadata(folder.path().join(made)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700, "{made}");
        }
    }

    #[test]
    fn no_context_and_no_current_context_are_different_errors() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(Some(folder.path())).unwrap();
        for name in ["one", "two"] {
            home.put(&name.parse().unwrap(), &context("https://a:1")).unwrap();
        }
        home.remove(&"one".parse().unwrap()).unwrap();
        assert!(matches!(home.get(None), Err(CliError::NoCurrentContext)));
        assert!(matches!(home.get(Some("one")), Err(CliError::NoContext { .. })));
    }

    #[test]
    fn a_context_name_cant_point_outside_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(Some(folder.path())).unwrap();
        assert!(matches!(home.get(Some("../current")), Err(CliError::NoContext { .. })));
    }
}
