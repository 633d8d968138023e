//! `backup`, `restore`, `backup-keys`, `restore-keys`, `keys rotate`, `keys rewrap`: run on the
//! service's own machine.

use super::confirm::IrreversibleAct;
use super::printer::{Printer, or_dash};
use super::{CliError, session};
use crate::server::{
    self, BackupArgs, BackupKeysArgs, BackupList, KeyBackup, RestoreArgs, RestoreKeysArgs,
    RewrapKeysArgs, RotateKeysArgs,
};
use crate::store::rewrap::RewrapCounts;

pub(super) fn backup(args: &BackupArgs, printer: &mut Printer) -> Result<(), CliError> {
    let list = server::back_up(args)?;
    show(printer, &list)?;
    printer.note(
        "It holds no key: keep it apart from a backup of the key directory (backup-keys), without \
         which it can't be used.",
    );
    Ok(())
}

pub(super) fn restore(args: &RestoreArgs, printer: &mut Printer) -> Result<(), CliError> {
    let list = session::block_on(async { Ok(server::restore(args).await?) })?;
    show(printer, &list)?;
    printer.note("next: start the service on these folders, with the key directory of then.");
    printer.note(
        "It serves the clusters that had committed. Unless it keeps its present ledger, it forms no \
         other one before an owner runs: muster-discovery db accept --yes",
    );
    Ok(())
}

pub(super) fn backup_keys(args: &BackupKeysArgs, printer: &mut Printer) -> Result<(), CliError> {
    let backup = server::back_up_keys(args)?;
    show_keys(printer, &backup)?;
    for name in &backup.left_out {
        printer.note(&format!("warning: {name} is no file of a key directory, and isn't in it"));
    }
    printer.note(
        "Try it now: `restore-keys` into a new folder, on a machine that has a recipient's private \
         key. Back the keys up again when one is added.",
    );
    Ok(())
}

pub(super) fn restore_keys(args: &RestoreKeysArgs, printer: &mut Printer) -> Result<(), CliError> {
    let backup = server::restore_keys(args)?;
    show_keys(printer, &backup)?;
    printer.note(
        "Anybody can encrypt a file to you: compare the pin with the one that \
         `muster-discovery context show` prints on an admin's machine.",
    );
    Ok(())
}

pub(super) fn rotate_keys(args: &RotateKeysArgs, printer: &mut Printer) -> Result<(), CliError> {
    let made = server::rotate_keys(args)?;
    printer.print_value(&made, |out| {
        let file = |name: &str, version: u32| format!("{name}-{version}.key");
        out.fields(&[
            ("signing key", or_dash(made.signing.map(|version| file("signing", version)))),
            ("key-encryption key", or_dash(made.kek.map(|version| file("kek", version)))),
            ("pin", made.pin.to_string()),
            ("new pin", or_dash(made.new_pin)),
        ]);
    })?;
    if made.signing.or(made.kek).is_some() {
        printer.note(
            "next: copy the new files to all machines of the service, restart its processes one after \
             the other, and back the keys up again. Never remove an old kek-N.key.",
        );
    }
    if let Some(new) = made.new_pin {
        printer.note(&format!(
            "next: muster-discovery service announce --all --to 'muster-context1 urls=… pins={},{new} \
             owners=…', then start each process with the new folder, then announce the new pin alone",
            made.pin
        ));
    }
    Ok(())
}

pub(super) async fn rewrap_keys(
    args: &RewrapKeysArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let needed = "A process of the service that hasn't got the newest kek-N.key can't issue certificates \
                  any more.";
    IrreversibleAct { consequences: vec![needed.to_owned()], name: "rewrap" }
        .confirm(args.yes, printer)?;
    let progress = |counts: RewrapCounts| {
        printer.note(&format!("{} keys read, {} wrapped again", counts.all, counts.rewrapped));
    };
    let done = server::rewrap_keys(args, progress).await?;
    printer.print_value(&done, |out| {
        out.fields(&[
            ("key-encryption key", format!("kek-{}.key", done.kek)),
            ("CA keys", done.keys.to_string()),
            ("wrapped again", done.rewrapped.to_string()),
        ]);
    })?;
    printer.note(
        "ledgers and backups keep the keys as they were wrapped: keep the older kek-N.key files with \
         the copies of those",
    );
    Ok(())
}

fn show_keys(printer: &mut Printer, backup: &KeyBackup) -> Result<(), CliError> {
    printer.print_value(backup, |out| {
        let urls: Vec<String> = backup.urls.iter().map(ToString::to_string).collect();
        out.fields(&[
            ("files", backup.files.join(", ")),
            ("urls", urls.join(", ")),
            ("pin", backup.pin.to_string()),
        ]);
    })
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
