//! `key`: makes an admin's own key on the admin's own machine.

use std::path::PathBuf;

use clap::Subcommand;
use discovery_types::key::SigningKey;

use super::printer::Printer;
use super::{CliError, CommonArgs};

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
            let public = out.with_extension("pub");
            if public == out {
                return Err(CliError::Usage(
                    "--out names the private key: .pub is for the public one beside it".into(),
                ));
            }
            if out.is_dir() || out.file_name().is_none() {
                return Err(CliError::Usage("--out names a folder: name a file in it".into()));
            }
            if out.exists() {
                return Err(muster_files::Error::Exists(out).into());
            }
            if public.exists() {
                return Err(muster_files::Error::Exists(public).into());
            }
            let key = SigningKey::generate();
            key.save(&out)?;
            muster_files::create(&public, format!("{}\n", key.public()).as_bytes(), 0o644)?;
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
