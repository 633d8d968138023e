//! Addresses that the member table doesn't have, at which peers may be found.
//!
//! All members of a cluster may get other addresses at once. Then no member can reach another one
//! by the table, and without a majority the table can't be changed. An agent or an operator may
//! then write the new addresses to a file. This member dials them, too, and the cluster records the
//! new addresses once it has a majority again.
//!
//! The file needs no protection beyond that of the data directory. The file names public keys, and
//! a peer that is dialled at such an address has to prove its key by its certificate. A wrong
//! address costs a failed attempt. A peer without a key in the member table, or without TLS, has no
//! hints.
//!
//! The first line of the file is [`HEADER`]. Each other line is the SHA-256 of a peer's public key
//! (SubjectPublicKeyInfo) in hexadecimal, then URLs, separated by spaces. Other lines are ignored.

use std::collections::HashMap;
use std::io::{self, Read as _};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use node_state::identity::NodeKey;
use node_state::membership::PeerUrl;
use tokio::time::timeout;

use super::PeerRecord;
use crate::causes::error_chain;

/// First line of the file with address hints.
pub const HEADER: &str = "muster-peer-addresses 1";

/// Maximum size of the file in bytes. A larger file is ignored.
const MAX_FILE_BYTES: u64 = 64 * 1024;

/// Maximum number of URLs for one peer. Further ones are ignored.
const MAX_URLS: usize = 4;

/// Time limit of reading the file when a peer is dialled.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

type Hints = HashMap<NodeKey, Vec<PeerUrl>>;

/// The file of peer addresses that are not in the member table. It is read again whenever it has
/// changed.
#[derive(Clone, Debug, Default)]
pub(super) struct AddressHints(Option<Arc<HintsFile>>);

#[derive(Debug)]
struct HintsFile {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Modification time and size of the file that was read last.
    stamp: Option<(SystemTime, u64)>,
    hints: Arc<Hints>,
}

impl AddressHints {
    /// Creates the hints of the file at `path`. Without a path there are no hints.
    pub(super) fn new(path: Option<PathBuf>) -> Self {
        Self(path.map(|path| Arc::new(HintsFile { path, state: Mutex::default() })))
    }

    /// Returns the URLs to dial for a peer. The file's URLs come first, because the file is written
    /// only after peers have moved. If the disk hangs, uses the hints that were read last.
    pub(super) async fn candidates(&self, record: &PeerRecord) -> Vec<PeerUrl> {
        let (Some(file), Some(key)) = (&self.0, record.node_key) else {
            return record.urls.clone();
        };
        let read = tokio::task::spawn_blocking({
            let file = Arc::clone(file);
            move || file.read_if_changed()
        });
        let hints = match timeout(READ_TIMEOUT, read).await {
            Ok(Ok(hints)) => hints,
            Ok(Err(_)) | Err(_) => file.known(),
        };
        let hinted = hints.get(&key).into_iter().flatten();
        let is_new = |url: &&PeerUrl| url.is_https() && !record.urls.contains(url);
        hinted.filter(is_new).chain(&record.urls).cloned().collect()
    }
}

impl HintsFile {
    /// Returns the hints that were read last.
    fn known(&self) -> Arc<Hints> {
        Arc::clone(&self.lock().hints)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the hints in the file. If the file can't be read, there are no hints until it
    /// changes again.
    fn read_if_changed(&self) -> Arc<Hints> {
        let path = &self.path;
        let stamp = std::fs::metadata(path)
            .and_then(|metadata| Ok((metadata.modified()?, metadata.len())))
            .ok();
        if self.lock().stamp == stamp {
            return self.known();
        }
        let read = if stamp.is_some() { read(path) } else { Ok(Hints::new()) };
        let hints = read.unwrap_or_else(|error| {
            tracing::warn!(file = %path.display(), error = %error_chain(&error), "the file of further peer addresses is ignored");
            Hints::new()
        });
        if !hints.is_empty() {
            tracing::info!(file = %path.display(), peers = hints.len(), "further peer addresses are dialled beside those in the member table");
        }
        let hints = Arc::new(hints);
        *self.lock() = State { stamp, hints: Arc::clone(&hints) };
        hints
    }
}

fn read(path: &std::path::Path) -> io::Result<Hints> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(io::Error::other(format!("it is longer than {MAX_FILE_BYTES} bytes")));
    }
    let Some(lines) = text.strip_prefix(HEADER).and_then(|rest| rest.strip_prefix('\n')) else {
        return Err(io::Error::other(format!("its first line is not {HEADER:?}")));
    };
    Ok(lines.lines().filter_map(parse_line).collect())
}

fn parse_line(line: &str) -> Option<(NodeKey, Vec<PeerUrl>)> {
    let mut words = line.split_ascii_whitespace();
    let key = words.next()?.parse().ok()?;
    Some((key, words.filter_map(|url| PeerUrl::parse(url).ok()).take(MAX_URLS).collect()))
}

#[cfg(test)]
mod tests {
    use node_state::identity::MemberId;

    use super::*;

    const KEY: NodeKey = NodeKey([7; 32]);

    fn url(text: &str) -> PeerUrl {
        PeerUrl::parse(text).unwrap()
    }

    fn record(node_key: Option<NodeKey>) -> PeerRecord {
        let urls = vec![url("https://10.0.0.1:2380")];
        PeerRecord { id: MemberId(1), urls, incarnation: None, node_key }
    }

    async fn candidates(hints: &AddressHints, key: Option<NodeKey>) -> Vec<String> {
        hints.candidates(&record(key)).await.iter().map(ToString::to_string).collect()
    }

    #[tokio::test]
    async fn hints_come_before_the_member_table_and_count_only_for_a_bound_key_and_https() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hints");
        let hints = AddressHints::new(Some(path.clone()));
        let table = "https://10.0.0.1:2380";
        assert_eq!(candidates(&hints, Some(KEY)).await, [table], "there is no file");
        let line = format!("{KEY} https://10.1.0.1:2380 http://10.2.0.1:2380 {table} junk");
        std::fs::write(&path, format!("{HEADER}\nnonsense\n{line}\n")).unwrap();
        assert_eq!(candidates(&hints, Some(KEY)).await, ["https://10.1.0.1:2380", table]);
        assert_eq!(candidates(&hints, Some(NodeKey([8; 32]))).await, [table], "another peer");
        assert_eq!(candidates(&hints, None).await, [table], "its key isn't known");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(candidates(&hints, Some(KEY)).await, [table], "the file is gone");
    }

    #[tokio::test]
    async fn a_file_of_another_format_or_too_large_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hints");
        let hints = AddressHints::new(Some(path.clone()));
        let line = format!("{KEY} https://10.1.0.1:2380\n");
        let filler = "x\n".repeat(MAX_FILE_BYTES as usize / 2);
        for text in [
            format!("muster-peer-addresses 2\n{line}"),
            line.clone(),
            format!("{HEADER}\n{line}{filler}"),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(candidates(&hints, Some(KEY)).await, ["https://10.0.0.1:2380"]);
        }
        std::fs::write(&path, format!("{HEADER}\n{line}")).unwrap();
        assert_eq!(candidates(&hints, Some(KEY)).await.len(), 2);
    }
}
