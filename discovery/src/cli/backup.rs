//! `backup` and `restore`: run on the service's own machine.

use super::printer::Printer;
use super::{CliError, session};
use crate::server::{self, BackupArgs, BackupList, RestoreArgs};

pub(super) fn backup(args: &BackupArgs, printer: &mut Printer) -> Result<(), CliError> {
    let list = server::back_up(args)?;
    show(printer, &list)?;
    printer.note(
        "It holds no key: keep it apart from a copy of the key directory, without which it can't be \
         used.",
    );
    Ok(())
}

pub(super) fn restore(args: &RestoreArgs, printer: &mut Printer) -> Result<(), CliError> {
    let list = session::block_on(async { Ok(server::restore(args).await?) })?;
    show(printer, &list)?;
    printer.note("next: start the service on these folders, with the key directory of then.");
    printer.note(
        "It serves the clusters that had committed, and forms no other one before an owner runs: \
         muster-discovery db accept --yes",
    );
    Ok(())
}

fn show(printer: &mut Printer, list: &BackupList) -> Result<(), CliError> {
    printer.print_value(list, |out| {
        out.fields(&[("made at", list.made_at.clone())]);
        let rows = list
            .files
            .iter()
            .map(|(name, file)| [name.clone(), file.bytes.to_string(), file.sha256.clone()]);
        out.table(["FILE", "BYTES", "SHA-256"], rows);
    })
}
