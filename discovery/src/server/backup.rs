//! `backup` and `restore`: copy the managed Postgres and the ledger to files, and back.
//!
//! A backup is made while the service runs. The database is dumped first and the ledger is copied
//! afterwards, so the ledger holds every commit that the dump holds. When all files are durable, a
//! list of them with their hashes is written. A folder without that list is not a backup.
//!
//! The service recognises a restored database and ledger. The database runs on another server than
//! the recorded one, and the ledger is not in the place where it was written. The service then
//! serves committed clusters, but forms nothing before an owner runs `db accept`.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use data_encoding::HEXLOWER;
use managed_postgres::{ManagedPostgresSettings, dump, load};
use serde::{Deserialize, Serialize};

use super::ServerError;
use super::args::{BackupArgs, PostgresArgs, RestoreArgs};
use super::run::{DATABASE, make_database, start_postgres};
use crate::ledger::{LEDGER_FILE, POSITION_FILE};

/// File name of the database dump, in pg_dump's custom format.
const DUMP: &str = "database.dump";
/// File name of the backup's list of files, which is written last.
const LIST: &str = "backup.json";
/// Format version of the backup's list of files.
const VERSION: u32 = 1;
/// Maximum size of the backup's list of files, in bytes: far more than three entries need.
const MAX_LIST: u64 = 1 << 16;
/// Size of the copy buffer, in bytes.
const CHUNK: usize = 1 << 16;

/// List of a backup's files, stored as `backup.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackupList {
    version: u32,
    /// When the backup was complete, by this host's clock (RFC 3339).
    pub made_at: String,
    /// The files, by name.
    pub files: BTreeMap<String, BackupFile>,
}

/// Size and hash of one file in a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackupFile {
    /// Length of the file, in bytes.
    pub bytes: u64,
    /// SHA-256 of the file, in hex.
    pub sha256: String,
}

/// Makes a backup of a running managed Postgres, and of the service's ledger.
pub(crate) fn back_up(args: &BackupArgs) -> Result<BackupList, ServerError> {
    let out = &args.out;
    muster_files::open_own_folder(out).map_err(|error| refused("--out", error))?;
    if let Some(entry) = entries(out)?.first() {
        return Err(ServerError::Usage(format!(
            "--out: {} isn't empty, it holds `{entry}`: name a new folder for each backup",
            out.display()
        )));
    }
    let settings = settings(&args.postgres)?;
    if !settings.dir.join("data/postmaster.pid").exists() {
        return Err(ServerError::Usage(format!(
            "--managed-postgres: no Postgres runs in {}: start the service, a backup is made while \
             it runs",
            settings.dir.display()
        )));
    }
    let mut files = BTreeMap::new();
    let (path, mut target) = create(out, DUMP)?;
    let kept = target.try_clone().map_err(|error| failed("open", &path, error))?;
    dump(&settings, DATABASE, kept)
        .map_err(|error| ServerError::failed("can't dump the database", error))?;
    target.sync_all().map_err(|error| failed("sync", &path, error))?;
    files.insert(
        DUMP.to_owned(),
        copy_and_hash(&mut open(out, DUMP)?, &mut std::io::sink(), &path)?,
    );
    // The ledger is copied after the dump, so it holds every commit that the dump holds.
    for name in [LEDGER_FILE, POSITION_FILE] {
        let mut source = open(&args.ledger, name)?;
        (_, target) = create(out, name)?;
        files.insert(name.to_owned(), copy_and_hash(&mut source, &mut target, &out.join(name))?);
        target.sync_all().map_err(|error| failed("sync", &out.join(name), error))?;
    }
    let made_at = jiff::Timestamp::now().to_string();
    let list = BackupList { version: VERSION, made_at, files };
    let text = serde_json::to_vec_pretty(&list).expect("names, numbers and hashes");
    muster_files::create(&out.join(LIST), &text, 0o600)
        .map_err(|error| ServerError::failed("can't end the backup", error))?;
    Ok(list)
}

/// Restores a backup into a new managed Postgres and a new ledger. Doesn't start the service.
pub(crate) async fn restore(args: &RestoreArgs) -> Result<BackupList, ServerError> {
    let list = check_backup(&args.from)?;
    let settings = settings(&args.postgres)?;
    for (option, path) in [
        ("--managed-postgres", settings.dir.join("data")),
        ("--ledger", args.ledger.join(LEDGER_FILE)),
    ] {
        if path.exists() {
            return Err(ServerError::Usage(format!(
                "{option}: {} exists: a backup is put into new folders, beside what is left of the \
                 old ones",
                path.display()
            )));
        }
    }
    muster_files::open_own_folder(&args.ledger).map_err(|error| refused("--ledger", error))?;
    let source = open(&args.from, DUMP)?;
    let postgres = start_postgres(settings.clone()).await?;
    let loaded = match make_database(&postgres).await {
        Err(error) => Err(ServerError::failed("can't make the database", error)),
        Ok(()) => {
            let loads = tokio::task::spawn_blocking(move || load(&settings, DATABASE, source));
            let loaded = loads.await.map_err(|error| ServerError::failed("pg_restore", error))?;
            loaded.map_err(|error| {
                let what = "can't load the database: remove what --managed-postgres names, and \
                            begin anew";
                ServerError::failed(what, error)
            })
        }
    };
    postgres.stop().await;
    loaded?;
    // Copy the position file first. With this file beside it, the restored ledger is recognised as
    // a copy.
    for name in [POSITION_FILE, LEDGER_FILE] {
        let (path, mut target) = create(&args.ledger, name)?;
        copy_and_hash(&mut open(&args.from, name)?, &mut target, &path)?;
        target.sync_all().map_err(|error| failed("sync", &path, error))?;
        muster_files::sync_folder(&path)
            .map_err(|error| ServerError::failed("can't put the ledger back", error))?;
    }
    Ok(list)
}

/// Reads the list of files and checks every file's length and hash.
fn check_backup(from: &Path) -> Result<BackupList, ServerError> {
    let wrong = |what: String| ServerError::Usage(format!("--from: {}: {what}", from.display()));
    let text = muster_files::read(&from.join(LIST), MAX_LIST)
        .map_err(|error| refused("--from", error))?
        .ok_or_else(|| {
            wrong(format!("there is no {LIST}: this is no backup, or not all of one"))
        })?;
    let list: BackupList = serde_json::from_slice(&text)
        .map_err(|error| wrong(format!("{LIST} can't be read: {error}")))?;
    if list.version != VERSION {
        return Err(wrong(format!("made by a newer version of Muster ({})", list.version)));
    }
    for name in [DUMP, LEDGER_FILE, POSITION_FILE] {
        let wanted = list.files.get(name).ok_or_else(|| wrong(format!("{name} isn't listed")))?;
        let found = copy_and_hash(&mut open(from, name)?, &mut std::io::sink(), &from.join(name))?;
        if found != *wanted {
            let next = "it is damaged, take another backup";
            return Err(wrong(format!("{name} isn't as it was written: {next}")));
        }
    }
    Ok(list)
}

fn settings(args: &PostgresArgs) -> Result<ManagedPostgresSettings, ServerError> {
    let dir = std::path::absolute(&args.managed_postgres)
        .map_err(|error| ServerError::failed("--managed-postgres", error))?;
    let (binaries, user) = (args.postgres_bin.clone(), args.postgres_user.clone());
    Ok(ManagedPostgresSettings { dir, binaries, user })
}

fn entries(folder: &Path) -> Result<Vec<String>, ServerError> {
    let read = fs_err::read_dir(folder).and_then(|entries| {
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    });
    read.map_err(|error| ServerError::failed("can't look into the folder", error))
}

fn create(folder: &Path, name: &str) -> Result<(PathBuf, File), ServerError> {
    let path = folder.join(name);
    let file = muster_files::open(&path, OpenOptions::new().create_new(true).write(true));
    let file = file.map_err(|error| ServerError::failed("can't make a file", error))?;
    Ok((path, file))
}

fn open(folder: &Path, name: &str) -> Result<File, ServerError> {
    let file = muster_files::open(&folder.join(name), OpenOptions::new().read(true));
    file.map_err(|error| match error.is_refusal() {
        true => ServerError::Usage(error.to_string()),
        false => ServerError::failed(format!("can't read {name}"), error),
    })
}

/// Copies a file as it is now. Returns its length and hash.
fn copy_and_hash(
    from: &mut File,
    to: &mut impl Write,
    path: &Path,
) -> Result<BackupFile, ServerError> {
    let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
    let (mut chunk, mut bytes) = (vec![0; CHUNK], 0);
    loop {
        let read = from.read(&mut chunk).map_err(|error| failed("read", path, error))?;
        if read == 0 {
            let sha256 = HEXLOWER.encode(hash.finish().as_ref());
            return Ok(BackupFile { bytes, sha256 });
        }
        hash.update(&chunk[..read]);
        to.write_all(&chunk[..read]).map_err(|error| failed("write", path, error))?;
        bytes += read as u64;
    }
}

fn refused(option: &str, error: muster_files::Error) -> ServerError {
    match error.is_refusal() {
        true => ServerError::Usage(format!("{option}: {error}")),
        false => ServerError::failed(option, error),
    }
}

fn failed(what: &str, path: &Path, error: std::io::Error) -> ServerError {
    ServerError::failed(format!("can't {what} {}", path.display()), error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backup(folder: &Path) -> BackupList {
        let mut files = BTreeMap::new();
        for name in [DUMP, LEDGER_FILE, POSITION_FILE] {
            std::fs::write(folder.join(name), name).unwrap();
            let mut file = File::open(folder.join(name)).unwrap();
            files.insert(
                name.to_owned(),
                copy_and_hash(&mut file, &mut std::io::sink(), folder).unwrap(),
            );
        }
        let list = BackupList { version: VERSION, made_at: "2026-01-01T00:00:00Z".into(), files };
        std::fs::write(folder.join(LIST), serde_json::to_vec(&list).unwrap()).unwrap();
        list
    }

    #[test]
    fn a_whole_backup_is_accepted_and_a_damaged_or_partial_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let list = backup(folder.path());
        assert_eq!(check_backup(folder.path()).unwrap(), list);
        std::fs::write(folder.path().join(LEDGER_FILE), "ledger.jsonL").unwrap();
        let refused = check_backup(folder.path()).unwrap_err();
        assert_eq!(refused.exit_code(), 2);
        assert!(refused.to_string().contains(LEDGER_FILE), "{refused}");
        std::fs::remove_file(folder.path().join(LIST)).unwrap();
        let refused = check_backup(folder.path()).unwrap_err().to_string();
        assert!(refused.contains("not all of one"), "{refused}");
    }
}
