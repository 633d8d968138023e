//! Determines which cluster this host joins: by a bundle, by the journal, or by both.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use discovery_types::bundle::Bundle;
use tokio::sync::oneshot;
use tokio::time::timeout;
use zeroize::Zeroizing;

use crate::cli::settings::{BundleSource, RunSettings};
use crate::exit::{ExitError, error_chain};
use crate::state::journal::{Join, JournalExtras};

/// Maximum number of bytes that are read of a bundle.
const BUNDLE_LIMIT: u64 = 16 * 1024;

/// How long a pipe, or a person at a terminal, may take to deliver the bundle.
const BUNDLE_READ_TIMEOUT: Duration = Duration::from_secs(300);

/// Reads the bundle given by `--bundle-file`; `None` if the flag is absent.
///
/// With `--wait-for-ticket`, a missing file or a file without a bundle is the error
/// [`ExitError::NeedsTicket`]. The caller then waits, since the bundle may come later.
///
/// A pipe may stay silent for ever, so a separate thread reads it. Nothing waits for that thread,
/// so the agent can end once this future is dropped.
pub(crate) async fn read_bundle(settings: &RunSettings) -> Result<Option<Bundle>, ExitError> {
    match settings.bundle.clone() {
        Some(source) => read_bundle_from(source, settings.wait_for_ticket).await.map(Some),
        None => Ok(None),
    }
}

/// Reads the bundle from this source. If it `may_come_later`, a missing or unfinished bundle gives
/// the error [`ExitError::NeedsTicket`].
pub(crate) async fn read_bundle_from(
    source: BundleSource,
    may_come_later: bool,
) -> Result<Bundle, ExitError> {
    let name = match &source {
        BundleSource::Stdin => "standard input".to_owned(),
        BundleSource::File(path) => path.display().to_string(),
    };
    let text = |what: String| format!("the join bundle in {name}: {what}");
    let refuse = |what: String| ExitError::Usage(text(what));
    // Wait for a ticket only if the file is missing, or holds no whole bundle yet. After any other
    // failure, the thread below may still read a pipe. Another attempt's thread would then compete
    // with it for the bundle.
    let needs_ticket = |what: String| match may_come_later {
        true => ExitError::NeedsTicket(text(what)),
        false => refuse(what),
    };
    let (tell, told) = oneshot::channel();
    let reader = move || drop(tell.send(read(&source)));
    let thread = std::thread::Builder::new().name("bundle".to_owned()).spawn(reader);
    thread.map_err(|error| refuse(error.to_string()))?;
    let late = || refuse(format!("nothing whole came within {} s", BUNDLE_READ_TIMEOUT.as_secs()));
    let read = timeout(BUNDLE_READ_TIMEOUT, told).await.map_err(|_| late())?;
    let text = read.expect("the reader tells before it ends");
    let text = text.map_err(|error| match error.kind() {
        ErrorKind::NotFound => needs_ticket(error.to_string()),
        _ => refuse(error.to_string()),
    })?;
    text.parse().map_err(|error| needs_ticket(error_chain(&error)))
}

fn read(source: &BundleSource) -> std::io::Result<Zeroizing<String>> {
    let mut text = Zeroizing::new(String::new());
    match source {
        BundleSource::Stdin => std::io::stdin().take(BUNDLE_LIMIT + 1).read_to_string(&mut text)?,
        BundleSource::File(path) => {
            let file = File::open(path)?;
            warn_of_readers(path, &file)?;
            file.take(BUNDLE_LIMIT + 1).read_to_string(&mut text)?
        }
    };
    if text.len() as u64 > BUNDLE_LIMIT {
        let what = format!("longer than {BUNDLE_LIMIT} bytes, which no join bundle is");
        return Err(std::io::Error::new(ErrorKind::FileTooLarge, what));
    }
    Ok(text)
}

/// Warns if other users can read the bundle, which is a secret while the cluster forms.
fn warn_of_readers(path: &Path, file: &File) -> std::io::Result<()> {
    let mode = file.metadata()?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        tracing::warn!(
            "{} can be read by others (mode {mode:o}): chmod 600 it, and if somebody may have read \
             it, revoke the token (muster-discovery token revoke)",
            path.display()
        );
    }
    Ok(())
}

/// Returns the cluster to join, as the bundle describes it. Without a bundle, the journal's
/// description counts. A bundle of another cluster than the journal's is refused.
pub(crate) fn cluster_to_join(
    extras: &JournalExtras,
    bundle: Option<&Bundle>,
) -> Result<Join, ExitError> {
    let known = extras.join.as_ref();
    let told = bundle.map(|bundle| Join {
        urls: bundle.urls.clone(),
        pins: bundle.pins.clone(),
        cluster: bundle.cluster,
        statement: bundle.statement,
        kind: bundle.token.kind(),
    });
    match (known, told) {
        (Some(known), Some(told)) if known.cluster != told.cluster => {
            Err(ExitError::DoNotRestart(format!(
                "the bundle is for the cluster {}, and this host has begun to join {}: give it \
                 that one's bundle, or run muster-agent reset to begin as new",
                told.cluster, known.cluster
            )))
        }
        (_, Some(told)) => Ok(told),
        (Some(known), None) => Ok(known.clone()),
        (None, None) => Err(ExitError::Usage(
            "this host has not redeemed a join bundle yet: say --bundle-file FILE".to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use discovery_types::digest::Digest;
    use discovery_types::grant::TokenKind;
    use discovery_types::token::Token;
    use uuid::Uuid;

    use super::*;

    fn bundle(cluster: Uuid, port: u16) -> Bundle {
        Bundle {
            urls: vec![format!("https://192.0.2.1:{port}").parse().unwrap()],
            pins: vec![Digest([1; 32])],
            cluster,
            statement: Digest([2; 32]),
            token: Token::generate(TokenKind::Boot),
        }
    }

    #[test]
    fn a_bundle_of_another_cluster_is_refused_with_exit_code_3() {
        let first =
            cluster_to_join(&JournalExtras::default(), Some(&bundle(Uuid::now_v7(), 1))).unwrap();
        let extras = JournalExtras { join: Some(first), ..JournalExtras::default() };
        let end = cluster_to_join(&extras, Some(&bundle(Uuid::now_v7(), 1))).unwrap_err();
        assert_eq!(end.code(), 3);
    }

    #[test]
    fn a_newer_bundle_of_the_same_cluster_replaces_the_services_urls() {
        let cluster = Uuid::now_v7();
        let first = cluster_to_join(&JournalExtras::default(), Some(&bundle(cluster, 1))).unwrap();
        let extras = JournalExtras { join: Some(first), ..JournalExtras::default() };
        let moved = cluster_to_join(&extras, Some(&bundle(cluster, 2))).unwrap();
        assert_eq!(moved.urls[0].port(), 2);
        assert_eq!(cluster_to_join(&extras, None).unwrap().urls[0].port(), 1);
    }

    #[test]
    fn without_bundle_and_journal_there_is_no_cluster_to_join() {
        assert_eq!(cluster_to_join(&JournalExtras::default(), None).unwrap_err().code(), 2);
    }
}
