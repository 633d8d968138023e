//! `key`: makes an admin's own key on the admin's own machine.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use discovery_types::key::SigningKey;
use zeroize::Zeroizing;

use super::printer::Printer;
use super::{CliError, CommonArgs};

/// Longest typed key that is read, in bytes.
const MAX_TYPED: u64 = 1_024;

#[derive(Debug, clap::Args)]
pub(super) struct KeyArgs {
    #[command(flatten)]
    pub(super) common: CommonArgs,
    #[command(subcommand)]
    command: KeyCommand,
}

#[derive(Debug, Subcommand)]
enum KeyCommand {
    /// Make a private key, and print its public key
    #[command(after_help = "\
Example:
  muster-discovery key new --out owner.pem

The private key goes to FILE (mode 0600) and never leaves this machine. The public key is printed,
and written beside it as FILE with the extension .pub: that is what `init --owner` and `admin add`
take. An existing FILE is never overwritten.")]
    New {
        /// New file for the private key
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Write a private key from paper to a file (admin add --recovery)
    #[command(after_help = "\
Example:
  muster-discovery key restore --out recovery.pem

Type the key as it stands on the paper, on the terminal or on stdin, and end with an empty line. Blanks
and upper case don't matter. The public key is printed: compare it with `admin list --json`.")]
    Restore {
        /// New file for the private key
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Print the public key of a private key
    Show {
        /// File with the private key
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

pub(super) fn run(args: KeyArgs, printer: &mut Printer) -> Result<(), CliError> {
    let (key, file) = match args.command {
        KeyCommand::New { out } => {
            check_new_file(&out)?;
            let key = SigningKey::generate();
            save(&key, &out)?;
            (key, out)
        }
        KeyCommand::Restore { out } => {
            check_new_file(&out)?;
            printer.note("type the key, and end with an empty line:");
            let text = read_typed()?;
            let key = SigningKey::from_paper(&text)
                .map_err(|error| CliError::Usage(format!("the key: {error}")))?;
            save(&key, &out)?;
            (key, out)
        }
        KeyCommand::Show { file } => (SigningKey::load(&file)?, file),
    };
    let public = key.public().to_string();
    let value = serde_json::json!({
        "public_key": public,
        "key_id": key.key_id(),
        "file": file,
    });
    printer.print_value(&value, |out| out.line(&public))
}

/// Checks that a private key can be written to `out`, and its public key beside it.
fn check_new_file(out: &Path) -> Result<(), CliError> {
    let public = out.with_extension("pub");
    if public == out {
        return Err(CliError::Usage(
            "--out names the private key: .pub is for the public one beside it".into(),
        ));
    }
    if out.is_dir() || out.file_name().is_none() {
        return Err(CliError::Usage("--out names a folder: name a file in it".into()));
    }
    match [out.to_owned(), public].into_iter().find(|file| file.exists()) {
        Some(file) => Err(muster_files::Error::Exists(file).into()),
        None => Ok(()),
    }
}

/// Writes a private key to `out`, and its public key beside it.
fn save(key: &SigningKey, out: &Path) -> Result<(), CliError> {
    key.save(out)?;
    let public = format!("{}\n", key.public());
    Ok(muster_files::create(&out.with_extension("pub"), public.as_bytes(), 0o644)?)
}

/// Reads what was typed, up to an empty line or the end.
fn read_typed() -> Result<Zeroizing<String>, CliError> {
    let mut typed = Zeroizing::new(String::new());
    let mut input = std::io::stdin().lock().take(MAX_TYPED);
    loop {
        let before = typed.len();
        let read = input.read_line(&mut typed);
        read.map_err(|error| CliError::io("reading stdin", error))?;
        if typed[before..].trim().is_empty() {
            return Ok(typed);
        }
    }
}
