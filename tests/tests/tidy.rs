//! Rules of the source text that the compiler doesn't check: CONTRIBUTING.md gives their reasons.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

/// Minimum number of words of a doc comment. A shorter one only repeats the name that it belongs
/// to.
const MIN_WORDS: usize = 4;

/// Words that stand for a noun which the reader has to look for elsewhere.
const STAND_INS: [&str; 19] = [
    "Who", "Whoever", "Whose", "Whom", "What", "Whatever", "Which", "They", "Them", "Their", "It",
    "Its", "Both", "Where", "Those", "These", "He", "She", "None",
];
const STAND_IN_PHRASES: [&str; 3] = ["The same", "The one that", "One that"];

/// Maximum number of files that may define types of one name.
const MAX_OWNERS: usize = 2;

/// Type names that any number of files may define. Callers write the module's name before them.
const COMMON_TYPES: [&str; 3] = ["Error", "Answer", "State"];

/// Folders that have no source text of ours.
const LEFT_OUT: [&str; 3] = ["target", ".git", "node_modules"];

struct DocComment {
    file: PathBuf,
    line: usize,
    text: String,
}

impl DocComment {
    fn fault(&self) -> Option<String> {
        let words: Vec<&str> = self.text.split_whitespace().collect();
        let place = format!("{}:{}", self.file.display(), self.line);
        if words.len() < MIN_WORDS {
            return Some(format!(
                "{place}: {:?} says no more than a name: say contract, unit or reason, or delete it",
                self.text
            ));
        }
        let first = words.first()?.trim_end_matches([',', '.', ':', ';']);
        let stand_in = STAND_INS.contains(&first)
            || STAND_IN_PHRASES.iter().any(|phrase| self.text.starts_with(phrase));
        stand_in.then(|| {
            format!(
                "{place}: {:?} begins with a word that stands for a noun: write the noun",
                self.text
            )
        })
    }
}

/// Appends the path of each Rust file below `folder` to `files`.
fn find_rust_files(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs_err::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).context("a name in UTF-8")?;
        if path.is_dir() && !path.is_symlink() && !LEFT_OUT.contains(&name) {
            find_rust_files(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Splits a line into the mark of a doc comment and the comment's text, if it is one.
fn doc_line(line: &str) -> Option<(&'static str, &str)> {
    let line = line.trim_start();
    ["///", "//!"].into_iter().find_map(|mark| {
        let text = line.strip_prefix(mark)?;
        (!text.starts_with('/')).then_some((mark, text.trim()))
    })
}

fn doc_comments(file: &Path, source: &str) -> Vec<DocComment> {
    let mut comments: Vec<DocComment> = Vec::new();
    let mut open = None;
    for (at, line) in source.lines().enumerate() {
        let Some((mark, text)) = doc_line(line) else {
            open = None;
            continue;
        };
        match comments.last_mut() {
            Some(comment) if open == Some(mark) => {
                comment.text.push(' ');
                comment.text.push_str(text);
            }
            _ => comments.push(DocComment {
                file: file.to_owned(),
                line: at + 1,
                text: text.to_owned(),
            }),
        }
        open = Some(mark);
    }
    comments
}

/// Returns the name of the type that a line begins to define.
fn defined_type(line: &str) -> Option<&str> {
    let words =
        line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
    let mut words = words.skip_while(|word| ["pub", "crate", "super"].contains(word));
    let first = line.trim_start();
    let is_item =
        ["pub", "struct", "enum", "trait", "union"].iter().any(|word| first.starts_with(word));
    let keyword = words.next().filter(|_| is_item)?;
    words.next().filter(|_| ["struct", "enum", "trait", "union"].contains(&keyword))
}

/// Returns all Rust files of the repository, with their paths in it and their texts.
fn sources() -> Result<Vec<(PathBuf, String)>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the repository")?;
    let mut files = Vec::new();
    find_rust_files(root, &mut files)?;
    files.sort();
    ensure!(files.len() > 100, "only {} files were found below {}", files.len(), root.display());
    let read = |file: PathBuf| -> Result<(PathBuf, String)> {
        let source = fs_err::read_to_string(&file)?;
        Ok((file.strip_prefix(root).unwrap_or(&file).to_owned(), source))
    };
    files.into_iter().map(read).collect()
}

#[test]
fn each_doc_comment_can_be_read_alone() -> Result<()> {
    let mut faults = Vec::new();
    for (file, source) in sources()? {
        faults.extend(doc_comments(&file, &source).iter().filter_map(DocComment::fault));
    }
    ensure!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
    Ok(())
}

#[test]
fn no_type_name_has_more_than_two_owners() -> Result<()> {
    let mut owners: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (file, source) in sources()? {
        for name in source.lines().filter_map(defined_type) {
            owners.entry(name.to_owned()).or_default().insert(file.display().to_string());
        }
    }
    ensure!(owners.len() > 1000, "only {} types were found", owners.len());
    owners.retain(|name, files| files.len() > MAX_OWNERS && !COMMON_TYPES.contains(&name.as_str()));
    let faults: Vec<String> = owners
        .iter()
        .map(|(name, files)| {
            format!("{name}: {}", Vec::from_iter(files.iter().cloned()).join(", "))
        })
        .collect();
    ensure!(
        faults.is_empty(),
        "{} type names with too many owners:\n{}",
        faults.len(),
        faults.join("\n")
    );
    Ok(())
}

#[test]
fn the_name_of_a_defined_type_is_found() {
    assert_eq!(defined_type("pub(crate) struct Frame<'a> {"), Some("Frame"));
    assert_eq!(defined_type("    enum Kind {"), Some("Kind"));
    assert_eq!(defined_type("pub trait Disk: Send {"), Some("Disk"));
    assert_eq!(defined_type("pub fn enum_of(x: u8) {"), None);
    assert_eq!(defined_type("// struct Frame"), None);
    assert_eq!(defined_type("impl Frame {"), None);
}

#[test]
fn a_doc_comment_that_repeats_a_name_is_found() {
    let faults = |source: &str| -> Vec<usize> {
        let comments = doc_comments(Path::new("a.rs"), source);
        comments.iter().filter(|one| one.fault().is_some()).map(|one| one.line).collect()
    };
    assert_eq!(faults("/// The index.\nfield: u64,"), [1]);
    assert_eq!(faults("//! The index.\n\n/// Index of the last applied entry.\nx"), [1]);
    assert_eq!(faults("x\n    /// What has no\n    /// other name.\ny"), [2]);
    assert_eq!(
        faults(
            "/// Whatever it is, it counts.\n/// Not this.\n//// nor this\n// What is no doc comment"
        ),
        [1]
    );
    assert_eq!(faults("/// Waits for those that leave.\nfn wait()"), [0; 0]);
}
