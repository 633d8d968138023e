//! Encryption in the format of <https://age-encryption.org>, so that anybody can decrypt a backup
//! with the `age` program. Hosts that save backups don't have the private key.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::str::FromStr;

use age::x25519;
use zeroize::Zeroizing;

use super::progress::BackupProgress;

/// Bytes that are copied at once.
const BUFFER_BYTES: usize = 256 << 10;
/// Maximum size in bytes of a file with identities.
const MAX_IDENTITY_FILE: u64 = 64 << 10;
/// Maximum number of identities in a file. Each is tried on each recipient of a backup.
const MAX_IDENTITIES: usize = 64;
/// Maximum length in bytes of an encrypted file's header, which lists the recipients.
const MAX_HEADER_BYTES: usize = 64 << 10;
/// Beginning of the last line of an encrypted file's header.
const HEADER_END: &[u8] = b"\n--- ";

/// A public key for which backups are encrypted: `age1…`.
#[derive(Clone)]
pub(crate) struct BackupRecipient(x25519::Recipient);

impl FromStr for BackupRecipient {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The error must not repeat the text, which can be a private key by mistake.
        text.parse().map(Self).map_err(|_: &str| {
            "no X25519 public key of age, which begins with age1: age-keygen prints it".to_owned()
        })
    }
}

impl std::fmt::Display for BackupRecipient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::fmt::Debug for BackupRecipient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BackupRecipient({self})")
    }
}

/// Private keys that decrypt backups.
pub(crate) struct BackupIdentities(Vec<x25519::Identity>);

/// Why identities can't be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IdentityFileError {
    /// The file can't be read.
    #[error("the file can't be read")]
    File(#[source] io::Error),
    /// The file has a line that is no private key.
    #[error("line {0} is no AGE-SECRET-KEY-1… that age-keygen wrote")]
    Line(usize),
    /// The file has no private key, or too many.
    #[error("it has {0} private keys, and may have 1 to {MAX_IDENTITIES}")]
    Count(usize),
}

/// Reads the private keys in a file that `age-keygen` wrote.
pub(crate) fn read_identities(path: &Path) -> Result<BackupIdentities, IdentityFileError> {
    let bytes =
        muster_files::read_named(path, MAX_IDENTITY_FILE).map_err(IdentityFileError::File)?;
    let bytes = Zeroizing::new(bytes);
    let mut identities = Vec::new();
    for (at, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"#") {
            continue;
        }
        let identity = std::str::from_utf8(line).ok().and_then(|line| line.parse().ok());
        identities.push(identity.ok_or(IdentityFileError::Line(at + 1))?);
    }
    match identities.len() {
        1..=MAX_IDENTITIES => Ok(BackupIdentities(identities)),
        count => Err(IdentityFileError::Count(count)),
    }
}

/// Why a file can't be decrypted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DecryptionError {
    /// The file is not encrypted for any of the identities.
    #[error("it isn't encrypted for this identity: name the file with its private key")]
    WrongIdentity,
    /// The file is damaged, or isn't an age file.
    #[error("it can't be decrypted: it is damaged, or no file of age's")]
    Damaged(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Reading or writing a file failed.
    #[error("the decrypted file can't be written")]
    Io(#[source] io::Error),
}

/// Copies the rest of `from` to `to`, encrypted for all recipients. Without a recipient, copies the
/// bytes unchanged. Returns `to`.
pub(super) fn copy_encrypted<W: Write>(
    mut from: impl Read,
    to: W,
    recipients: &[BackupRecipient],
    progress: &BackupProgress,
) -> io::Result<W> {
    if recipients.is_empty() {
        let mut to = to;
        copy(&mut from, &mut to, progress)?;
        return Ok(to);
    }
    let recipients = recipients.iter().map(|recipient| &recipient.0 as &dyn age::Recipient);
    let encryptor = age::Encryptor::with_recipients(recipients).map_err(io::Error::other)?;
    let mut sink = encryptor.wrap_output(to)?;
    copy(&mut from, &mut sink, progress)?;
    sink.finish()
}

fn copy(from: &mut impl Read, to: &mut impl Write, progress: &BackupProgress) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let read = match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        to.write_all(&buffer[..read])?;
        progress.add(read);
    }
}

/// Decrypts `from` into `to`. The file came from a store and counts as untrusted. After an error,
/// the content of `to` must not be used.
pub(super) fn decrypt(
    from: &mut File,
    to: &mut File,
    identities: &BackupIdentities,
    progress: &BackupProgress,
) -> Result<(), DecryptionError> {
    ensure_short_header(from)?;
    let damaged = |error: age::DecryptError| match error {
        age::DecryptError::NoMatchingKeys => DecryptionError::WrongIdentity,
        error => DecryptionError::Damaged(error.into()),
    };
    let file = BufReader::with_capacity(BUFFER_BYTES, from);
    let decryptor = age::Decryptor::new_buffered(file).map_err(damaged)?;
    let identities = identities.0.iter().map(|identity| identity as &dyn age::Identity);
    let mut plain = decryptor.decrypt(identities).map_err(damaged)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let read =
            plain.read(&mut buffer).map_err(|error| DecryptionError::Damaged(error.into()))?;
        if read == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..read]).map_err(DecryptionError::Io)?;
        progress.add(read);
    }
}

/// Refuses a header longer than [`MAX_HEADER_BYTES`]. The library would read a header of any length
/// into memory.
fn ensure_short_header(file: &mut File) -> Result<(), DecryptionError> {
    let mut start = Vec::new();
    file.seek(SeekFrom::Start(0)).map_err(DecryptionError::Io)?;
    let read = (&mut *file).take(MAX_HEADER_BYTES as u64).read_to_end(&mut start);
    read.map_err(DecryptionError::Io)?;
    file.seek(SeekFrom::Start(0)).map_err(DecryptionError::Io)?;
    match start.windows(HEADER_END.len()).any(|window| window == HEADER_END) {
        true => Ok(()),
        false => Err(DecryptionError::Damaged("it has no header, or one that is too long".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_of(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn identities() -> (BackupIdentities, BackupRecipient) {
        let identity = x25519::Identity::generate();
        let recipient = identity.to_public().to_string().parse().unwrap();
        (BackupIdentities(vec![identity]), recipient)
    }

    fn decrypted(bytes: &[u8], identities: &BackupIdentities) -> Result<Vec<u8>, DecryptionError> {
        let mut plain = tempfile::tempfile().unwrap();
        decrypt(&mut file_of(bytes), &mut plain, identities, &BackupProgress::default())?;
        let mut bytes = Vec::new();
        plain.seek(SeekFrom::Start(0)).unwrap();
        plain.read_to_end(&mut bytes).unwrap();
        Ok(bytes)
    }

    #[test]
    fn each_recipient_alone_can_decrypt_and_nobody_else() {
        let content: Vec<u8> = (0..300_000_u32).map(|at| at as u8).collect();
        let (first, to_first) = identities();
        let (second, to_second) = identities();
        let (stranger, _) = identities();
        let to = [to_first, to_second];
        let sealed =
            copy_encrypted(&content[..], Vec::new(), &to, &BackupProgress::default()).unwrap();
        assert!(sealed.starts_with(b"age-encryption.org/v1\n"));
        assert_eq!(decrypted(&sealed, &first).unwrap(), content);
        assert_eq!(decrypted(&sealed, &second).unwrap(), content);
        let refused = decrypted(&sealed, &stranger);
        assert!(matches!(refused, Err(DecryptionError::WrongIdentity)), "{refused:?}");
        for damaged in [&sealed[..sealed.len() - 1], &sealed[..200_000]] {
            let refused = decrypted(damaged, &first);
            assert!(matches!(refused, Err(DecryptionError::Damaged(_))), "{refused:?}");
        }
        let mut flipped = sealed.clone();
        flipped[150_000] ^= 1;
        assert!(matches!(decrypted(&flipped, &first), Err(DecryptionError::Damaged(_))));
    }

    #[test]
    fn an_endless_header_is_refused() {
        let (identities, _) = identities();
        let mut endless = b"age-encryption.org/v1\n".to_vec();
        endless.extend(b"-> X25519 AAAA\nAAAA\n".repeat(10_000));
        for file in [endless, Vec::new(), b"no file of age's".to_vec()] {
            assert!(matches!(decrypted(&file, &identities), Err(DecryptionError::Damaged(_))));
        }
    }

    #[test]
    fn a_private_key_given_as_a_recipient_is_not_repeated() {
        let typed = "AGE-SECRET-KEY-1QQQQQQ";
        let error = typed.parse::<BackupRecipient>().unwrap_err();
        assert!(!error.contains("QQQ"), "{error}");
    }

    #[test]
    fn an_identity_file_has_comments_and_private_keys() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key.txt");
        let identity = x25519::Identity::generate();
        let key = age::secrecy::ExposeSecret::expose_secret(&identity.to_string()).to_owned();
        std::fs::write(&path, format!("# created: today\n# public key: age1…\n{key}\n")).unwrap();
        assert_eq!(read_identities(&path).unwrap().0.len(), 1);
        std::fs::write(&path, "# nothing\n").unwrap();
        assert!(matches!(read_identities(&path), Err(IdentityFileError::Count(0))));
        std::fs::write(&path, format!("{key}\nage1xyz\n")).unwrap();
        assert!(matches!(read_identities(&path), Err(IdentityFileError::Line(2))));
    }
}
