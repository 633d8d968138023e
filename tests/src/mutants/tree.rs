//! Makes a copy of the workspace with all mutants in it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use super::list::Mutant;

/// Function that is appended to each mutated crate.
const SWITCH_FUNCTION: &str = r#"
/// Whether the bug with this number is switched on in this run.
pub fn mutant(id: u32) -> bool {
    static CHOSEN: std::sync::LazyLock<Option<u32>> =
        std::sync::LazyLock::new(|| std::env::var("MUTANT").ok()?.parse().ok());
    *CHOSEN == Some(id)
}
"#;

/// Returns `source` with each mutant's text replaced by its replacement. Every text must occur
/// exactly once, and no two may overlap.
fn mutate(source: &str, mutants: &[&Mutant]) -> Result<String> {
    let mut places = BTreeMap::new();
    for mutant in mutants {
        let mut found = source.match_indices(&mutant.text);
        let (Some((at, _)), None) = (found.next(), found.next()) else {
            let times = source.matches(&mutant.text).count();
            bail!("mutant {}: its text stands {times} times there, not once", mutant.id);
        };
        places.insert(at, *mutant);
    }
    ensure!(places.len() == mutants.len(), "two mutants begin at the same text");
    let (mut out, mut done) = (String::with_capacity(source.len()), 0);
    for (at, mutant) in places {
        ensure!(at >= done, "mutant {}: its text overlaps another one's: choose less", mutant.id);
        out.push_str(&source[done..at]);
        out.push_str(&mutant.replacement);
        done = at + mutant.text.len();
    }
    out.push_str(&source[done..]);
    Ok(out)
}

/// Returns the directory of the crate that a file belongs to.
pub fn crate_of(root: &Path, file: &Path) -> Result<PathBuf> {
    let mut directory = file.parent();
    while let Some(at) = directory {
        if root.join(at).join("Cargo.toml").exists() && at != Path::new("") {
            return Ok(at.to_owned());
        }
        directory = at.parent();
    }
    bail!("{} belongs to no crate", file.display())
}

/// Returns the new content of each file that mutants change, by path. Writes nothing.
pub fn mutated(root: &Path, mutants: &[Mutant]) -> Result<BTreeMap<PathBuf, String>> {
    let mut by_file: BTreeMap<&Path, Vec<&Mutant>> = BTreeMap::new();
    for mutant in mutants {
        by_file.entry(&mutant.file).or_default().push(mutant);
    }
    let mut files = BTreeMap::new();
    let mut crates = BTreeSet::new();
    for (file, mutants) in by_file {
        let source = fs_err::read_to_string(root.join(file))?;
        let changed = mutate(&source, &mutants).with_context(|| file.display().to_string())?;
        files.insert(file.to_owned(), changed);
        crates.insert(crate_of(root, file)?);
    }
    for directory in crates {
        let source = directory.join("src");
        let top = ["lib.rs", "main.rs"].map(|name| source.join(name));
        let top = top.into_iter().find(|path| root.join(path).exists());
        let top = top.with_context(|| format!("{} has no sources", directory.display()))?;
        let text = match files.remove(&top) {
            Some(text) => text,
            None => fs_err::read_to_string(root.join(&top))?,
        };
        files.insert(top, text + SWITCH_FUNCTION);
    }
    Ok(files)
}

/// Makes `scratch` a copy of the workspace's files with all mutants. Unchanged files keep their
/// modification time, so that Cargo rebuilds only what changed.
pub fn copy(root: &Path, scratch: &Path, mutants: &[Mutant]) -> Result<()> {
    let mut mutated = mutated(root, mutants)?;
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("git can't be run")?;
    ensure!(listed.status.success(), "git ls-files failed: {}", listed.status);
    let listed = String::from_utf8(listed.stdout).context("a file's name is not UTF-8")?;
    let mut wanted = BTreeSet::new();
    for name in listed.split_terminator('\0').map(PathBuf::from) {
        if !root.join(&name).is_file() {
            continue;
        }
        let content = match mutated.remove(&name) {
            Some(text) => text.into_bytes(),
            None => fs_err::read(root.join(&name))?,
        };
        let to = scratch.join(&name);
        if fs_err::read(&to).ok().as_deref() != Some(&content) {
            fs_err::create_dir_all(to.parent().context("a file has a directory")?)?;
            fs_err::write(&to, content)?;
            let mode = fs_err::metadata(root.join(&name))?.permissions();
            fs_err::set_permissions(&to, mode)?;
        }
        wanted.insert(name);
    }
    remove_others(scratch, scratch, &wanted)
}

fn remove_others(root: &Path, directory: &Path, wanted: &BTreeSet<PathBuf>) -> Result<()> {
    for entry in fs_err::read_dir(directory)? {
        let path = entry?.path();
        let name = path.strip_prefix(root).context("it lies in there")?;
        if path.is_dir() {
            remove_others(root, &path, wanted)?;
        } else if !wanted.contains(name) {
            fs_err::remove_file(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutants::list::{parse, read_all};

    fn mutant(id: u32, text: &str) -> Mutant {
        let list = format!("mutant {id}: x\nin a.rs\nunit\n<<<<\n{text}\n====\nmutant({id})\n>>>>");
        parse("a", &list).unwrap().remove(0)
    }

    #[test]
    fn a_text_that_is_not_there_exactly_once_is_an_error() {
        let (one, two) = (mutant(1, "b c"), mutant(2, "d"));
        assert_eq!(mutate("a b c d", &[&two, &one]).unwrap(), "a mutant(1) mutant(2)");
        for source in ["a", "b c b c"] {
            assert!(mutate(source, &[&one]).unwrap_err().to_string().contains("not once"));
        }
        let inner = mutant(3, "c");
        assert!(mutate("a b c d", &[&one, &inner]).unwrap_err().to_string().contains("overlaps"));
    }

    /// The lists must follow the sources: a change of a mutated line requires a change of its
    /// mutant.
    #[test]
    fn the_text_of_every_listed_mutant_occurs_in_its_file() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("it has a parent");
        let mutants = read_all(&root.join("tests/mutants")).unwrap();
        assert!(!mutants.is_empty());
        mutated(root, &mutants).unwrap();
    }
}
