//! Writes the manual pages and the shells' completions of the three programs into a folder. The
//! pages and completions are made from the descriptions of the command lines that `--help` prints.
//!
//! `scripts/dist` runs this program and packs the files. The three programs don't contain its code.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;

#[cfg(test)]
mod documented;

fn main() -> Result<()> {
    let folder = std::env::args_os().nth(1).map(PathBuf::from);
    write_all(&folder.context("usage: muster-manual DIR")?)
}

/// Returns the descriptions of the three command lines.
fn programs() -> [Command; 3] {
    [muster_discovery::cli::command(), muster_agent::command(), muster_node::command()]
}

/// Writes `man1/PROGRAM[-COMMAND…].1`, `bash/PROGRAM`, `zsh/_PROGRAM` and `fish/PROGRAM.fish`.
fn write_all(folder: &Path) -> Result<()> {
    for command in programs() {
        write_program(folder, command).with_context(|| folder.display().to_string())?;
    }
    Ok(())
}

fn write_program(folder: &Path, command: Command) -> Result<()> {
    let mut command = without_help_commands(command);
    command.build();
    let name = command.get_name().to_owned();
    for (shell, file) in [
        (Shell::Bash, format!("bash/{name}")),
        (Shell::Zsh, format!("zsh/_{name}")),
        (Shell::Fish, format!("fish/{name}.fish")),
    ] {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut command, &name, &mut script);
        write(&folder.join(file), &script)?;
    }
    write_pages(&folder.join("man1"), &command)
}

/// Writes the page of a command, and those of its subcommands. After `Command::build`, a command's
/// display name includes the names of its parent commands.
fn write_pages(folder: &Path, command: &Command) -> Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let mut text = Vec::new();
    let page = clap_mangen::Man::new(command.clone());
    page.source(concat!("Muster ", env!("CARGO_PKG_VERSION")))
        .manual("Muster")
        .render(&mut text)?;
    write(&folder.join(format!("{name}.1")), &text)?;
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        write_pages(folder, below)?;
    }
    Ok(())
}

/// Returns the command without its `help` subcommands, which repeat `--help` and the manual pages.
fn without_help_commands(command: Command) -> Command {
    command.disable_help_subcommand(true).mut_subcommands(without_help_commands)
}

fn write(path: &Path, text: &[u8]) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs_err::create_dir_all(folder)?;
    }
    Ok(fs_err::write(path, text)?)
}

#[cfg(test)]
mod tests {
    use std::process::Command as Process;

    use super::*;

    #[test]
    fn each_command_has_a_page_and_each_shell_a_completion() {
        let dir = tempfile::tempdir().unwrap();
        write_all(dir.path()).unwrap();
        let read = |file: &str| fs_err::read_to_string(dir.path().join(file)).unwrap();
        for (page, text) in [
            ("muster-agent", "join bundle"),
            ("muster-agent-member-add", "\\-\\-peer\\-urls"),
            ("muster-discovery-cluster-rotate-ca", "rotate\\-ca demo"),
            ("muster-node", "\\-\\-quota\\-backend\\-bytes"),
            ("muster-node-snapshot-restore", "\\-\\-data\\-dir"),
            ("muster-node-move", "\\-\\-freeze"),
        ] {
            let page = read(&format!("man1/{page}.1"));
            assert!(page.contains(text), "{text}: {page}");
        }
        let pages = fs_err::read_dir(dir.path().join("man1")).unwrap();
        for page in pages {
            let name = page.unwrap().file_name().into_string().unwrap();
            assert!(!name.contains("help") && !name.contains("launch"), "{name}");
        }
        for program in ["muster-discovery", "muster-agent", "muster-node"] {
            let script = dir.path().join("bash").join(program);
            let checked = Process::new("bash").arg("-n").arg(script).status().unwrap();
            assert!(checked.success(), "{program}");
            assert!(read(&format!("zsh/_{program}")).starts_with("#compdef"));
            assert!(read(&format!("fish/{program}.fish")).contains("complete -c"));
        }
        assert!(read("bash/muster-node").contains("--listen-client-urls"));
        assert!(read("bash/muster-agent").contains("move-leader"));
    }
}
