//! Checks that each command in the documents, and in the programs' own texts, exists: its
//! subcommand, its flags, and for a whole command line also its arguments.
//!
//! Nothing is run here. The tests of the workspace run most commands of the book; see
//! `tests/tests/book/`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::Command;
use clap::error::ErrorKind;

use super::programs;

/// Names of the programs.
const PROGRAMS: [&str; 3] = ["muster-discovery", "muster-agent", "muster-node"];
/// Mark for words that a reader adds: `muster-discovery serve … --console-listen ADDRESS`.
const LEFT_OUT: &str = "…";

/// A command as a document has it.
struct Documented {
    place: String,
    words: Vec<String>,
    /// Whether a reader can type the command as it is. Otherwise it is only named in a text.
    is_whole: bool,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the files below `folder` with this extension, without build results.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if !path.ends_with("target") && !path.ends_with("corpus") {
                found.extend(files(&path, extension));
            }
        } else if path.extension().is_some_and(|this| this == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn place(path: &Path, line: usize) -> String {
    format!("{}:{line}", path.strip_prefix(root()).unwrap_or(path).display())
}

/// Splits a line into words as a shell does. Ends at an operator or a comment of the shell.
fn words(line: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, ' ' | '\n' | '\t') => found.extend(word.take()),
            (None, '|' | '&' | ';' | '<' | '>' | ')') => break,
            (None, '#') if word.is_none() => break,
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    found.extend(word);
    found
}

/// Returns the command lines of one of our programs in a line that somebody types: also those in a
/// command substitution, or after `sudo -u postgres`.
fn typed(line: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for name in PROGRAMS {
        for (at, _) in line.match_indices(&format!("{name} ")) {
            let is_word = line[..at].chars().next_back().is_none_or(|c| " (`$".contains(c));
            // Comments, and names of packages and of the node's program, are no commands.
            let before = &line[..at];
            let is_argument = ["--node-binary ", "install ", "systemctl ", "--agent-unit "]
                .iter()
                .any(|word| before.contains(word));
            if is_word && !is_argument && !before.contains("# ") {
                found.push(words(&line[at..]));
            }
        }
    }
    found
}

/// Returns the commands in the fenced blocks of a document. A line that ends in a backslash goes
/// on in the next one.
fn commands_in_blocks(path: &Path, text: &str) -> Vec<Documented> {
    let mut found = Vec::new();
    let mut block: Option<bool> = None;
    let mut joined: Option<(usize, String)> = None;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim_start();
        if let Some(language) = line.strip_prefix("```") {
            let has_commands = ["", "console", "sh"].contains(&language);
            block = if block.is_some() { None } else { Some(has_commands) };
            continue;
        }
        if block != Some(true) {
            continue;
        }
        let (start, before) = joined.take().unwrap_or((number, String::new()));
        let line = before + line.strip_prefix("> ").unwrap_or(line);
        if let Some(goes_on) = line.strip_suffix('\\') {
            joined = Some((start, goes_on.to_owned()));
            continue;
        }
        let commands = typed(&line).into_iter();
        found.extend(commands.map(|words| Documented {
            place: place(path, start),
            words,
            is_whole: true,
        }));
    }
    found
}

/// Returns the commands that a text names in backticks. In a program's source, a backslash at the
/// end of a line continues a string.
fn commands_in_backticks(path: &Path, text: &str) -> Vec<Documented> {
    let mut found = Vec::new();
    let mut line = 1;
    let parts: Vec<&str> = text.split('`').collect();
    for (at, part) in parts.iter().enumerate() {
        let is_named = PROGRAMS
            .iter()
            .any(|name| part.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
        // Text after the last backtick isn't in backticks. Neither is text that contains the end of
        // a string literal.
        let is_closed = at + 1 < parts.len() && part.len() < 200 && !part.contains(['"', ';']);
        if is_named && is_closed {
            let comment_signs = part.replace("\\\n", " ").replace("//!", " ").replace("///", " ");
            let words = words(&comment_signs);
            found.push(Documented { place: place(path, line), words, is_whole: false });
        }
        line += part.matches('\n').count();
    }
    found
}

fn has_flag(levels: &[&Command], flag: &str) -> bool {
    let name = flag.trim_start_matches('-').split('=').next().unwrap_or_default();
    let is_help = ["help", "version", "h", "V"].contains(&name);
    let long = flag.starts_with("--");
    let mut arguments = levels.iter().enumerate().flat_map(|(depth, level)| {
        let is_last = depth + 1 == levels.len();
        level.get_arguments().filter(move |argument| is_last || argument.is_global_set())
    });
    is_help
        || arguments.any(|argument| match long {
            true => {
                argument.get_long() == Some(name)
                    || argument.get_all_aliases().is_some_and(|all| all.contains(&name))
            }
            false => argument.get_short().is_some_and(|short| name.starts_with(short)),
        })
}

/// Returns what is wrong with a command that a text names: an unknown subcommand or flag.
fn fault(command: &Documented, programs: &[Command]) -> Option<String> {
    let name = command.words.first()?;
    let program = programs.iter().find(|program| program.get_name() == name)?;
    let mut levels = vec![program];
    let mut takes_subcommand = true;
    let mut after_flag = false;
    for word in &command.words[1..] {
        if word == "--" {
            break;
        }
        let may_be_value = std::mem::replace(&mut after_flag, word.starts_with('-'));
        let this = *levels.last()?;
        if word.starts_with('-') && word.len() > 1 {
            if !has_flag(&levels, word) {
                return Some(format!("no flag {word}"));
            }
            continue;
        }
        match this.find_subcommand(word) {
            Some(below) if takes_subcommand => levels.push(below),
            _ => {
                let is_placeholder =
                    word.chars().any(|c| c.is_uppercase() || "{}…[]<>|".contains(c));
                let is_value =
                    is_placeholder || may_be_value || this.get_positionals().next().is_some();
                if takes_subcommand && this.has_subcommands() && !is_value {
                    return Some(format!("no subcommand {word}"));
                }
                takes_subcommand = false;
            }
        }
    }
    None
}

/// Returns what is wrong with a whole command line. Values may be placeholders, so they aren't
/// judged.
fn fault_of_whole(command: &Documented, programs: &[Command]) -> Option<String> {
    if command.words.iter().any(|word| word.contains(LEFT_OUT)) {
        return None;
    }
    let program = programs.iter().find(|program| program.get_name() == command.words[0])?;
    let error = program.clone().try_get_matches_from(&command.words).err()?;
    match error.kind() {
        ErrorKind::ValueValidation | ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => None,
        _ => Some(error.to_string().lines().next().unwrap_or_default().to_owned()),
    }
}

fn documents() -> Vec<PathBuf> {
    let mut found = files(&root().join("docs"), "md");
    found.extend(files(&root().join("examples"), "md"));
    for name in ["README.md", "SECURITY.md", "CHANGELOG.md", "ARCHITECTURE.md"] {
        found.push(root().join(name));
    }
    found
}

fn built_programs() -> Vec<Command> {
    let mut all = programs();
    all.iter_mut().for_each(Command::build);
    all.into()
}

/// Fails if any of the commands has a fault, or if there are implausibly few.
fn check(commands: &[Documented], at_least: usize) {
    let programs = built_programs();
    let faults: BTreeSet<String> = commands
        .iter()
        .filter_map(|command| {
            let whole = command.is_whole.then(|| fault_of_whole(command, &programs)).flatten();
            let fault = fault(command, &programs).or(whole)?;
            Some(format!("{}: {}: {fault}", command.place, command.words.join(" ")))
        })
        .collect();
    assert!(faults.is_empty(), "{}", faults.into_iter().collect::<Vec<_>>().join("\n"));
    assert!(commands.len() >= at_least, "only {} commands were found", commands.len());
}

#[test]
fn each_command_in_a_block_of_the_documents_is_accepted_by_its_program() {
    let read = |path: &PathBuf| commands_in_blocks(path, &fs_err::read_to_string(path).unwrap());
    check(&documents().iter().flat_map(read).collect::<Vec<_>>(), 120);
}

#[test]
fn each_command_that_the_documents_name_exists() {
    let read = |path: &PathBuf| commands_in_backticks(path, &fs_err::read_to_string(path).unwrap());
    check(&documents().iter().flat_map(read).collect::<Vec<_>>(), 100);
}

#[test]
fn each_command_that_a_program_names_exists() {
    let folders = ["agent/src", "discovery/src", "discovery/types/src", "node", "files/src"];
    let sources = folders.iter().flat_map(|folder| files(&root().join(folder), "rs"));
    let read =
        |path: PathBuf| commands_in_backticks(&path, &fs_err::read_to_string(&path).unwrap());
    check(&sources.flat_map(read).collect::<Vec<_>>(), 60);
}

#[test]
fn unknown_flags_and_subcommands_are_found() {
    let programs = built_programs();
    let named = |line: &str| fault(&commands_in_backticks(Path::new("x"), line)[0], &programs);
    assert_eq!(named("`muster-agent status --ready`, "), None);
    assert_eq!(named("`muster-agent status --reddy`, ").unwrap(), "no flag --reddy");
    assert_eq!(named("`muster-agent statos`, ").unwrap(), "no subcommand statos");
    assert_eq!(named("`muster-discovery cluster show NAME --json`, "), None);
    assert_eq!(named("`muster-discovery cluster shaw NAME`, ").unwrap(), "no subcommand shaw");
    let block = |line: &str| {
        let found = commands_in_blocks(Path::new("x"), &format!("```console\n{line}\n```\n"));
        fault_of_whole(&found[0], &programs)
    };
    assert_eq!(block("db-1$ muster-agent member remove db-2   # for good"), None);
    assert!(block("$ muster-agent member remove").unwrap().contains("required"));
    assert_eq!(block("$ x=$(muster-discovery cluster list \\\n      --json)"), None);
}
