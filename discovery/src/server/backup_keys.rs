//! `backup-keys` and `restore-keys`: copy the key directory to one encrypted file, and back.
//!
//! The programs `age` and `gpg` encrypt and decrypt. So an operator can keep the private key where
//! their other private keys are: in a file, on a hardware token, in GPG's keyring. Unencrypted keys
//! are in this process and in pipes only. The encrypted content is a JSON document:
//!
//! ```json
//! {"version": 1, "files": {"service.json": "<base64>", "kek-1.key": "<base64>"}}
//! ```

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use data_encoding::BASE64;
use discovery_types::digest::Digest;
use discovery_types::url::ServiceUrl;
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, Zeroizing};

use super::ServerError;
use super::args::{BackupKeysArgs, RestoreKeysArgs};
use crate::keydir::{KeyDirectory, KeyDirectoryError, KeyFiles, read_key_files};

/// Format version of the encrypted document.
const VERSION: u32 = 1;
/// Maximum size of a backup, in bytes, encrypted or not. One rotation of a key adds 100 bytes.
const MAX_BACKUP: u64 = 1 << 20;
/// First bytes of an age file: in binary form, and as text.
const AGE_STARTS: [&[u8]; 2] = [b"age-encryption.org/", b"-----BEGIN AGE ENCRYPTED FILE-----"];
/// Lengths of a GPG key's fingerprint in hexadecimal digits: of version 4, and of later versions.
const FINGERPRINTS: [usize; 2] = [40, 64];

/// Contents of a backup of the key directory, as far as they are public.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct KeyBackup {
    /// Names of the files in the backup.
    pub files: Vec<String>,
    /// Names of files in the folder that don't belong to a key directory.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// URLs that were given to `init`.
    pub urls: Vec<ServiceUrl>,
    /// SHA-256 of the listener's SPKI, by which agents and admins know the service.
    pub pin: Digest,
}

/// The document that is encrypted.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyDocument {
    version: u32,
    /// Contents of the files in base64, by name.
    files: BTreeMap<String, String>,
}

impl Drop for KeyDocument {
    fn drop(&mut self) {
        self.files.values_mut().for_each(Zeroize::zeroize);
    }
}

/// Program that encrypts to the recipients of a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encryption {
    Age,
    Gpg,
}

impl Encryption {
    /// Chooses the program for a recipient. Errors never repeat the text, which can be a private
    /// key by mistake.
    fn of_recipient(text: &str) -> Option<Self> {
        let is_fingerprint = FINGERPRINTS.contains(&text.len())
            && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        if ["age1", "ssh-ed25519 ", "ssh-rsa "].iter().any(|start| text.starts_with(start)) {
            Some(Encryption::Age)
        } else {
            is_fingerprint.then_some(Encryption::Gpg)
        }
    }

    fn of_backup(bytes: &[u8]) -> Self {
        match AGE_STARTS.iter().any(|start| bytes.starts_with(start)) {
            true => Encryption::Age,
            false => Encryption::Gpg,
        }
    }

    fn program(self) -> &'static str {
        match self {
            Encryption::Age => "age",
            Encryption::Gpg => "gpg",
        }
    }

    fn encrypt(self, recipients: &[String]) -> Command {
        let mut command = Command::new(self.program());
        match self {
            Encryption::Age => command.arg("--encrypt"),
            // The fingerprint names exactly one key, so GPG's web of trust isn't needed.
            Encryption::Gpg => command.args(["--batch", "--trust-model", "always", "--encrypt"]),
        };
        for recipient in recipients {
            command.args(["--recipient", recipient]);
        }
        command
    }

    fn decrypt(self, identity: Option<&Path>) -> Command {
        let mut command = Command::new(self.program());
        command.arg("--decrypt");
        if let Some(path) = identity {
            command.arg("--identity").arg(path);
        }
        command
    }
}

/// Copies a key directory to a new file, encrypted to the recipients.
pub(crate) fn back_up_keys(args: &BackupKeysArgs) -> Result<KeyBackup, ServerError> {
    let encryption = encryption_of(&args.recipients)?;
    if args.out.symlink_metadata().is_ok() {
        let out = args.out.display();
        return Err(ServerError::Usage(format!("--out: {out} exists: name a new file")));
    }
    let refused = |error| refused("--keys", error);
    let keys = KeyDirectory::load(&args.keys).map_err(refused)?;
    let (files, left_out) = read_key_files(&args.keys).map_err(refused)?;
    let document = document(&files);
    if document.len() as u64 > MAX_BACKUP {
        return Err(ServerError::Usage(format!(
            "--keys: a backup would have more than {MAX_BACKUP} bytes: remove signing keys that \
             nothing needs any more"
        )));
    }
    let mut command = encryption.encrypt(&args.recipients);
    let encrypted = pipe_through(&mut command, &document)?;
    muster_files::create(&args.out, &encrypted, 0o600)
        .map_err(|error| ServerError::failed("can't write the backup", error))?;
    Ok(summary(&keys, &files, left_out))
}

/// Decrypts a backup into a new key directory.
pub(crate) fn restore_keys(args: &RestoreKeysArgs) -> Result<KeyBackup, ServerError> {
    let wrong = |what: &dyn std::fmt::Display| {
        ServerError::Usage(format!("--from: {}: {what}", args.from.display()))
    };
    let encrypted = muster_files::read_named(&args.from, MAX_BACKUP).map_err(|e| wrong(&e))?;
    let encryption = Encryption::of_backup(&encrypted);
    match (encryption, &args.identity) {
        (Encryption::Age, None) => {
            return Err(ServerError::Usage(
                "--identity is missing: name the file with the private key of a recipient".into(),
            ));
        }
        (Encryption::Gpg, Some(_)) => {
            return Err(ServerError::Usage(
                "--identity: the backup is none of age's: GPG takes private keys from its own \
                 keyring, import it there and leave --identity out"
                    .into(),
            ));
        }
        _ => {}
    }
    let decrypted = pipe_through(&mut encryption.decrypt(args.identity.as_deref()), &encrypted)?;
    let document: KeyDocument = serde_json::from_slice(&decrypted)
        .map_err(|error| wrong(&format!("it holds no backup of a key directory: {error}")))?;
    if document.version != VERSION {
        return Err(wrong(&format!("made by a newer version of Muster ({})", document.version)));
    }
    let mut files = KeyFiles::new();
    for (name, text) in &document.files {
        let content = BASE64.decode(text.as_bytes());
        let content = content.map_err(|error| wrong(&format!("{name}: {error}")))?;
        files.insert(name.clone(), Zeroizing::new(content));
    }
    let keys =
        KeyDirectory::restore(&args.keys, &files).map_err(|error| refused("--keys", error))?;
    Ok(summary(&keys, &files, Vec::new()))
}

fn encryption_of(recipients: &[String]) -> Result<Encryption, ServerError> {
    let mut programs = Vec::new();
    for (text, place) in recipients.iter().zip(1..) {
        programs.push(Encryption::of_recipient(text).ok_or_else(|| {
            ServerError::Usage(format!(
                "--recipient: number {place} is neither an age recipient (age1…), nor an SSH \
                 public key (ssh-ed25519 …), nor the whole fingerprint of a GPG key (40 \
                 hexadecimal digits, without spaces)"
            ))
        })?);
    }
    let first = programs.first().copied();
    first.filter(|first| programs.iter().all(|other| other == first)).ok_or_else(|| {
        ServerError::Usage(
            "--recipient: age and GPG can't encrypt one file together: make a backup for each"
                .into(),
        )
    })
}

fn document(files: &KeyFiles) -> Zeroizing<Vec<u8>> {
    let files =
        files.iter().map(|(name, content)| (name.clone(), BASE64.encode(content))).collect();
    let document = KeyDocument { version: VERSION, files };
    // Allocate the buffer once: a growing one would leave parts of the keys in freed memory.
    let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_BACKUP as usize));
    serde_json::to_writer(&mut *bytes, &document).expect("names and base64");
    bytes
}

fn summary(keys: &KeyDirectory, files: &KeyFiles, left_out: Vec<String>) -> KeyBackup {
    let names = files.keys().cloned().collect();
    KeyBackup { files: names, left_out, urls: keys.settings.urls.clone(), pin: keys.pin() }
}

/// Runs a program with `input` on its standard input. Returns its standard output, at most
/// [`MAX_BACKUP`] bytes. The operator sees the program's standard error: error messages, or prompts
/// for a hardware token.
fn pipe_through(command: &mut Command, input: &[u8]) -> Result<Zeroizing<Vec<u8>>, ServerError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = spawned.map_err(|error| {
        let package = if program == "gpg" { "gnupg" } else { &program };
        let what = format!("can't run `{program}`: install it (Debian: apt-get install {package})");
        ServerError::failed(what, error)
    })?;
    let mut stdin = child.stdin.take().expect("piped");
    let mut stdout = child.stdout.take().expect("piped").take(MAX_BACKUP + 1);
    let mut output = Zeroizing::new(Vec::with_capacity(MAX_BACKUP as usize + 1));
    let read = std::thread::scope(|scope| {
        // Ignore a write error: a program that ends early reports the reason itself.
        scope.spawn(move || stdin.write_all(input));
        let read = stdout.read_to_end(&mut output);
        // Close the pipe, in case the program has more output than the limit. The program then
        // ends, and with it the thread that writes its input.
        drop(stdout);
        read
    });
    let ended = child.wait();
    let failed = |error| ServerError::failed(format!("can't run `{program}`"), error);
    let status = ended.map_err(failed)?;
    read.map_err(failed)?;
    if output.len() as u64 > MAX_BACKUP {
        let what = format!("`{program}` printed more than {MAX_BACKUP} bytes: this is no backup");
        return Err(ServerError::Failed { message: what, source: None });
    }
    if !status.success() {
        let what = format!("`{program}` failed ({status}); its own message stands above");
        return Err(ServerError::Failed { message: what, source: None });
    }
    Ok(output)
}

fn refused(option: &str, error: KeyDirectoryError) -> ServerError {
    match error.is_permanent() {
        true => ServerError::Usage(format!("{option}: {error}")),
        false => ServerError::failed(option, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipient_says_by_which_program_it_is_encrypted_to() {
        let fingerprint = "0123456789abcdefABCDEF0123456789abcdef01";
        let gpg = Some(Encryption::Gpg);
        for (text, expected) in [
            ("age1yzhwf0p", Some(Encryption::Age)),
            ("age1yubikey1q", Some(Encryption::Age)),
            ("ssh-ed25519 AAAA me@here", Some(Encryption::Age)),
            (fingerprint, gpg),
            (&fingerprint[1..], None),
            ("0123456789ABCDEF", None),
            ("me@example.org", None),
            ("--output", None),
            ("", None),
        ] {
            assert_eq!(Encryption::of_recipient(text), expected, "{text}");
        }
    }

    #[test]
    fn recipients_of_two_programs_and_secrets_are_refused_without_being_repeated() {
        let of = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(ToString::to_string).collect();
            encryption_of(&texts).map_err(|error| error.to_string())
        };
        assert_eq!(of(&["age1x", "ssh-rsa AAAA"]), Ok(Encryption::Age));
        let mixed = of(&["age1x", &"0".repeat(40)]).unwrap_err();
        assert!(mixed.contains("for each"), "{mixed}");
        let secret = of(&["age1x", "AGE-SECRET-KEY-1QQQ"]).unwrap_err();
        assert!(secret.contains("number 2") && !secret.contains("QQQ"), "{secret}");
    }

    #[test]
    fn a_program_that_ends_early_or_prints_without_end_is_an_error() {
        let input = vec![b'x'; MAX_BACKUP as usize];
        let shell = |line: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", line]);
            pipe_through(&mut command, &input)
        };
        assert_eq!(shell("cat").unwrap().len(), input.len());
        let early = shell("exit 3").unwrap_err().to_string();
        assert!(early.contains("exit status: 3"), "{early}");
        let endless = shell("yes").unwrap_err().to_string();
        assert!(endless.contains("more than"), "{endless}");
        let missing = pipe_through(&mut Command::new("muster-no-such-program"), b"").unwrap_err();
        assert!(missing.to_string().contains("install it"), "{missing}");
    }
}
