//! Credentials of an S3-compatible store, from a file in the format of the `aws` tool.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use zeroize::Zeroizing;

/// Maximum size in bytes of the file.
const MAX_CREDENTIALS_FILE: u64 = 64 << 10;
/// Header of the section that is read.
const PROFILE: &str = "[default]";

/// An access key. Its parts never appear in a log or an error.
pub(super) struct S3Credentials {
    pub access_key_id: String,
    pub secret_access_key: Zeroizing<String>,
    /// Token of temporary credentials.
    pub session_token: Option<Zeroizing<String>>,
}

impl S3Credentials {
    /// Reads the lines before the first section, and those of the section `[default]`. The error is
    /// a text for people.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        let failed = |what: String| format!("--backup-credentials {}: {what}", path.display());
        let read = muster_files::open_named(path).and_then(|file| file.metadata());
        let mode = read.map_err(|error| failed(error.to_string()))?.permissions().mode() & 0o777;
        // Access for the group is allowed: a service manager may give the file to the service's
        // group.
        if mode & 0o007 != 0 {
            let text = format!("it can be read by others (mode {mode:o}): chmod 600 it");
            return Err(failed(text));
        }
        let bytes = muster_files::read_named(path, MAX_CREDENTIALS_FILE);
        let bytes = Zeroizing::new(bytes.map_err(|error| failed(error.to_string()))?);
        let text = std::str::from_utf8(&bytes).map_err(|_| failed("it is no text".to_owned()))?;
        Self::parse(text).map_err(|missing| {
            failed(format!(
                "it has no {missing}: write aws_access_key_id=… and aws_secret_access_key=… on lines of \
                 their own, below [default]"
            ))
        })
    }

    fn parse(text: &str) -> Result<Self, &'static str> {
        let mut is_ours = true;
        let (mut id, mut secret, mut token) = (None, None, None);
        for line in text.lines().map(str::trim) {
            if line.starts_with('[') {
                is_ours = line == PROFILE;
                continue;
            }
            let Some((name, value)) = line.split_once('=').filter(|_| is_ours) else { continue };
            let value = value.trim().to_owned();
            match name.trim() {
                "aws_access_key_id" => id = Some(value),
                "aws_secret_access_key" => secret = Some(Zeroizing::new(value)),
                "aws_session_token" => token = Some(Zeroizing::new(value)),
                _ => {}
            }
        }
        Ok(Self {
            access_key_id: id.ok_or("aws_access_key_id")?,
            secret_access_key: secret.ok_or("aws_secret_access_key")?,
            session_token: token,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_profile_is_read() {
        let text = "# ours\n[other]\naws_access_key_id = OTHER\n[default]\naws_access_key_id = AK\n\
                    aws_secret_access_key=a/b+c=\n";
        let read = S3Credentials::parse(text).unwrap();
        assert_eq!(
            (read.access_key_id.as_str(), read.secret_access_key.as_str()),
            ("AK", "a/b+c=")
        );
        assert!(read.session_token.is_none());
        let bare = "aws_access_key_id=AK\naws_secret_access_key=s\naws_session_token=t\n";
        assert_eq!(S3Credentials::parse(bare).unwrap().session_token.unwrap().as_str(), "t");
        assert_eq!(S3Credentials::parse("[default]\n").err(), Some("aws_access_key_id"));
    }

    #[test]
    fn a_file_that_others_can_read_is_refused_without_its_content() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "aws_access_key_id=AK\naws_secret_access_key=hush\n").unwrap();
        let set = |mode| {
            std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        };
        set(0o644);
        let error = S3Credentials::read(file.path()).err().unwrap();
        assert!(error.contains("chmod 600") && !error.contains("hush"), "{error}");
        set(0o600);
        assert!(S3Credentials::read(file.path()).is_ok());
    }
}
