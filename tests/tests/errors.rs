//! Each error text that an operator can see is in the manual's chapter of errors, with what to do.
//!
//! The texts are read from the sources: `#[error("…")]`, and the errors with which the programs
//! end. A file whose errors need no row is in [`LEFT_OUT`], with the reason.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

/// Source text in front of an error text. The error text is the first string in the parentheses.
const MARKS: [&str; 8] = [
    "#[error(",
    "CliError::Usage(",
    "ExitError::DoNotRestart(",
    "ExitError::Failed(",
    "ExitError::Usage(",
    "ServerError::Usage(",
    "ServerError::failed(",
    "ServerError::permanent_if(",
];

/// Folders without source text of the programs.
const NOT_SEARCHED: [&str; 5] = [".git", "fuzz", "node_modules", "target", "tests"];

const CAUSE: &str = "it appears only as a cause, behind a text that is in the chapter";
const REFUSAL: &str =
    "the service sends it in a refusal, which says what to do and has its code in the chapter";
const CLIENT: &str = "a client gets etcd's text instead, or the text says what was wrong with its \
                      request";

/// Files and folders whose errors need no row in the chapter, each with the reason.
const LEFT_OUT: [(&str, &str); 34] = [
    ("discovery/formation/src/service/", REFUSAL),
    ("discovery/src/auth/", REFUSAL),
    ("discovery/src/ca.rs", REFUSAL),
    ("discovery/src/domain/", CAUSE),
    ("discovery/src/forming/", REFUSAL),
    ("discovery/src/handlers/", REFUSAL),
    ("discovery/src/intents/", REFUSAL),
    ("discovery/types/src/access.rs", REFUSAL),
    ("discovery/types/src/admin.rs", CAUSE),
    ("discovery/types/src/convert.rs", CAUSE),
    ("discovery/types/src/csr.rs", CAUSE),
    ("discovery/types/src/digest.rs", CAUSE),
    ("discovery/types/src/document.rs", CAUSE),
    ("discovery/types/src/features.rs", "a header that describes no build is ignored"),
    ("discovery/types/src/intent.rs", CAUSE),
    ("discovery/types/src/jws/", CAUSE),
    ("discovery/types/src/leaves.rs", CAUSE),
    ("discovery/types/src/order.rs", REFUSAL),
    ("discovery/types/src/proposal.rs", CAUSE),
    ("discovery/types/src/redeem.rs", REFUSAL),
    ("discovery/types/src/retire.rs", REFUSAL),
    ("discovery/types/src/tls.rs", CAUSE),
    ("node/bbolt/src/", CAUSE),
    ("node/consensus/src/", CAUSE),
    ("node/state/src/apply/", CLIENT),
    ("node/state/src/auth/", CLIENT),
    ("node/engine/src/driver/", CLIENT),
    ("node/engine/src/log/", CAUSE),
    ("node/state/src/membership/", CLIENT),
    ("node/state/src/mvcc/", CAUSE),
    ("node/api/src/", CLIENT),
    ("node/engine/src/transport/", CAUSE),
    ("node/proto/src/", CAUSE),
    ("shares/src/admission/", "it is a reason in a metric and in a log line of level debug"),
];

/// Files and folders inside those of [`LEFT_OUT`] whose errors need a row nevertheless.
const COVERED: [&str; 4] = [
    "node/state/src/mvcc/defragment.rs",
    "node/engine/src/transport/dial.rs",
    "node/engine/src/transport/wire/hello.rs",
    "node/engine/src/transport/join.rs",
];

/// Error texts that only a bug in the program itself can cause.
const FAULTS: [&str; 4] = [
    "this is a fault of",
    "… without a journal",
    "an account of peers that can't be",
    "this request needs a key to authenticate with",
];

/// Minimum number of letters of an error text that needs a row. A shorter text only introduces its
/// cause.
const MIN_LETTERS: usize = 8;

struct ErrorText {
    place: String,
    text: String,
}

/// Returns where a string literal that begins at `start` ends: the index of its last quote.
fn literal_end(source: &str, start: usize) -> Option<usize> {
    let mut escaped = false;
    let end = source[start + 1..].char_indices().find(|(_, c)| {
        let ends = *c == '"' && !escaped;
        escaped = *c == '\\' && !escaped;
        ends
    });
    Some(start + 1 + end?.0)
}

/// Returns the first string literal inside the parentheses that are open at `start`, if there is
/// one.
fn first_literal(source: &str, start: usize) -> Option<&str> {
    let mut depth = 1;
    for (at, c) in source[start..].char_indices() {
        match c {
            '"' => return Some(&source[start + at + 1..literal_end(source, start + at)?]),
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return None;
        }
    }
    None
}

/// Converts a string literal to the notation of the manual's error chapter: `…` replaces each
/// value, and backticks are left out.
fn as_in_chapter(literal: &str) -> String {
    let mut lines = literal.split("\\\n");
    let mut whole = lines.next().unwrap_or_default().to_owned();
    lines.for_each(|line| whole.push_str(line.trim_start()));
    let plain = whole.replace("\\\"", "\"").replace("\\n", " ").replace('`', "");
    let mut text = String::new();
    let mut depth = 0;
    for c in plain.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => {
                depth = 0;
                text.push('…');
            }
            _ if depth > 0 => {}
            _ => text.push(c),
        }
    }
    text
}

fn error_texts(file: &Path, source: &str) -> Vec<ErrorText> {
    let production = source.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let mut texts = Vec::new();
    for mark in MARKS {
        for (at, _) in production.match_indices(mark) {
            let Some(literal) = first_literal(production, at + mark.len()) else { continue };
            let line = production[..at].matches('\n').count() + 1;
            let place = format!("{}:{line}", file.display());
            texts.push(ErrorText { place, text: as_in_chapter(literal) });
        }
    }
    texts.retain(|found| {
        let letters = found.text.chars().filter(char::is_ascii_alphabetic).count();
        letters >= MIN_LETTERS && !FAULTS.iter().any(|fault| found.text.contains(fault))
    });
    texts
}

/// Whether `text` contains the fixed parts of `pattern` in their order. Unless `pattern` begins
/// with `…`, `text` must begin with the first part. If `cut` is true, `text` can also end before
/// `pattern` does.
fn contains_parts(pattern: &str, text: &str, cut: bool) -> bool {
    let mut rest = text;
    let mut is_first = true;
    for part in pattern.split('…').filter(|part| !part.is_empty()) {
        match rest.find(part) {
            Some(0) => {}
            Some(_) if !is_first || pattern.starts_with('…') => {}
            Some(_) => return false,
            None => {
                let end = rest.trim_matches('…');
                return cut && !is_first && !end.is_empty() && part.starts_with(end);
            }
        }
        rest = &rest[rest.find(part).map_or(0, |at| at + part.len())..];
        is_first = false;
    }
    true
}

/// Whether a row of the chapter describes `text`. Either of them may abbreviate the other.
fn is_about(row: &str, text: &str) -> bool {
    contains_parts(row, text, false) || contains_parts(text, row, true)
}

/// Returns the texts of the chapter's rows: everything in backticks in the first cell.
fn chapter_rows(chapter: &str) -> Vec<String> {
    let rows = chapter.lines().filter_map(|line| line.strip_prefix('|')?.split('|').next());
    let quoted = rows.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let letters = |text: &&str| text.chars().filter(char::is_ascii_alphabetic).count() >= 6;
    quoted.filter(letters).map(str::to_owned).collect()
}

fn find_sources(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs_err::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).context("a name in UTF-8")?;
        if path.is_dir() {
            if !path.is_symlink() && !NOT_SEARCHED.contains(&name) {
                find_sources(&path, files)?;
            }
        } else if name != "tests.rs" && path.extension().is_some_and(|extension| extension == "rs")
        {
            files.push(path);
        }
    }
    Ok(())
}

/// Returns the error texts of the files for which `is_wanted` holds, by their paths.
fn all_texts(root: &Path, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<ErrorText>> {
    let mut files = Vec::new();
    find_sources(root, &mut files)?;
    files.sort();
    let mut texts = Vec::new();
    for file in files {
        let name = file.strip_prefix(root)?;
        if is_wanted(&name.display().to_string()) {
            texts.extend(error_texts(name, &fs_err::read_to_string(&file)?));
        }
    }
    Ok(texts)
}

fn needs_row(file: &str) -> bool {
    COVERED.contains(&file) || !LEFT_OUT.iter().any(|(left_out, _)| file.starts_with(left_out))
}

#[test]
fn each_error_text_is_in_the_manuals_chapter_of_errors() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the repository")?;
    let rows = chapter_rows(&fs_err::read_to_string(root.join("docs/errors.md"))?);
    let texts = all_texts(root, needs_row)?;
    ensure!(texts.len() > 350, "only {} texts were found", texts.len());
    let missing: Vec<String> = texts
        .iter()
        .filter(|found| !rows.iter().any(|row| is_about(row, &found.text)))
        .map(|found| format!("{}: {}", found.place, found.text))
        .collect();
    ensure!(
        missing.is_empty(),
        "docs/errors.md lacks {} texts (or tests/tests/errors.rs a reason to leave them out):\n{}",
        missing.len(),
        missing.join("\n")
    );
    Ok(())
}

#[test]
fn every_path_that_is_left_out_exists() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the repository")?;
    for (path, reason) in LEFT_OUT {
        ensure!(
            root.join(path).exists(),
            "{path} is left out ({reason}), and there is no such path"
        );
    }
    for path in COVERED {
        ensure!(root.join(path).exists(), "{path} is covered, and there is no such path");
    }
    Ok(())
}

#[test]
fn error_texts_are_read_in_the_notation_of_the_manual() {
    let source = r##"
        #[error("the `file` {} has version {found}, \
                 this program knows {known}")]
        #[error(transparent)]
        #[error("{0}")]
        ExitError::Usage(format!("--machine-id-file {}: {what}", file.display()))
"##;
    let texts = error_texts(Path::new("a.rs"), source);
    let texts: Vec<(&str, &str)> =
        texts.iter().map(|found| (found.place.as_str(), found.text.as_str())).collect();
    let first = "the file … has version …, this program knows …";
    assert_eq!(texts, [("a.rs:2", first), ("a.rs:6", "--machine-id-file …: …")]);
    assert_eq!(chapter_rows("| `first text` |\n| `second text`, `x` | `no text` |").len(), 2);
    assert!(is_about("the file … has version …", first));
    assert!(is_about("the file agent.key has version …, this program knows …", first));
    assert!(!is_about("file … has version …", first), "it begins in the middle");
    assert!(!is_about("the file … has version …, and that is all", first));
    assert!(!is_about("the folder …", first));
}
