//! The commands of a page of the manual.

use std::path::Path;

use anyhow::{Result, ensure};

/// Words with which a command line begins in a block without prompts.
const PROGRAMS: [&str; 7] =
    ["muster-", "etcdctl ", "etcdutl ", "systemctl ", "sudo ", "runuser ", "make "];

/// A command as a page prints it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Command {
    /// Heading of the second level above the command. Empty above the first one.
    pub(crate) section: String,
    /// Machine before the prompt. Empty if there is no name, or no prompt.
    pub(crate) machine: String,
    /// The command, with all lines that continue it.
    pub(crate) line: String,
}

/// Returns the commands in the blocks of a page, in order. Output in a block is left out. A page
/// may have none.
pub(crate) fn commands_if_any(page: &str) -> Result<Vec<Command>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    Ok(parse(&fs_err::read_to_string(root.join(page))?))
}

/// Returns the commands of a page, which must have some: see [`commands_if_any`].
pub(crate) fn commands(page: &str) -> Result<Vec<Command>> {
    let found = commands_if_any(page)?;
    ensure!(!found.is_empty(), "{page} has no commands");
    Ok(found)
}

fn parse(text: &str) -> Vec<Command> {
    let mut found: Vec<Command> = Vec::new();
    let (mut block, mut goes_on) = (None, false);
    let mut section = String::new();
    for line in text.lines() {
        if let (None, Some(heading)) = (&block, line.strip_prefix("## ")) {
            section = heading.to_owned();
        }
        let line = line.trim_start();
        if let Some(language) = line.strip_prefix("```") {
            block = match block {
                Some(_) => None,
                None => Some(language.to_owned()),
            };
            goes_on = false;
            continue;
        }
        let Some(language) = &block else { continue };
        if !["", "console", "sh"].contains(&language.as_str()) {
            continue;
        }
        let continuation = line.strip_prefix("> ").filter(|_| language == "console");
        match (found.last_mut(), continuation) {
            (Some(last), more) if goes_on || more.is_some() => {
                last.line = format!("{}\n{}", last.line, more.unwrap_or(line));
                goes_on = line.ends_with('\\');
            }
            _ => {
                if let Some((machine, line)) = first_line(line) {
                    goes_on = line.ends_with('\\');
                    let (machine, line) = (machine.to_owned(), line.to_owned());
                    found.push(Command { section: section.clone(), machine, line });
                }
            }
        }
    }
    found
}

/// Parses the first line of a command: the machine and the line. `None` if the line is output, or a
/// comment.
fn first_line(line: &str) -> Option<(&str, &str)> {
    for sign in ["$ ", "# "] {
        let Some((machine, line)) = line.split_once(sign) else { continue };
        let is_name =
            machine.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
        if is_name && (sign == "$ " || !machine.is_empty()) {
            return Some((machine, line.trim()));
        }
    }
    let is_command = PROGRAMS.iter().any(|program| line.starts_with(program));
    is_command.then(|| ("", line.trim_end()))
}

#[test]
fn commands_are_told_from_output_and_continued_over_lines() {
    let page = "text `x$ y`\n```console\nadmin$ muster-discovery x \\\n      --y\nOK  done\n$ for a in b; do\n\
                >   echo $a\n> done\n# A comment.\nroot# ls\n```\n## Later\n```\n\
                muster-agent status   (says)\nNAME  AGE\n## no heading\n```\n```yaml\nmuster-agent: x\n```\n";
    let expected = [
        ("", "admin", "muster-discovery x \\\n--y"),
        ("", "", "for a in b; do\n  echo $a\ndone"),
        ("", "root", "ls"),
        ("Later", "", "muster-agent status   (says)"),
    ];
    let expected = expected.map(|(section, machine, line)| Command {
        section: section.to_owned(),
        machine: machine.to_owned(),
        line: line.to_owned(),
    });
    assert_eq!(parse(page), expected);
}
