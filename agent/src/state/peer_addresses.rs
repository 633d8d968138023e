//! The file in which the agent tells its node the addresses of peers that have moved.
//!
//! `muster-node` dials these addresses besides those in its member table. It accepts only peers
//! whose keys the table binds. `node/engine/src/transport/address_hints.rs` documents the file's
//! format.

use std::collections::BTreeMap;

use discovery_types::digest::Digest;
use discovery_types::url::NodeUrl;

use super::{Layout, StateError};

/// First line of the file with peers' addresses.
const HEADER: &str = "muster-peer-addresses 1";

/// Peer URLs by the SHA-256 of each peer's public key.
pub(crate) type PeerAddresses = BTreeMap<Digest, Vec<NodeUrl>>;

/// Returns the addresses in the file. Skips lines that can't be parsed; a missing file has none.
pub(crate) fn read(layout: &Layout) -> PeerAddresses {
    let bytes = super::read(&layout.peer_addresses()).ok().flatten().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let Some(lines) = text.strip_prefix(HEADER) else { return PeerAddresses::new() };
    let parse = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let key = words.next()?.parse().ok()?;
        Some((key, words.filter_map(|url| url.parse().ok()).collect()))
    };
    lines.lines().filter_map(parse).collect()
}

/// Writes the addresses to the file. Without addresses, removes the file.
pub(crate) fn write(layout: &Layout, addresses: &PeerAddresses) -> Result<(), StateError> {
    let path = layout.peer_addresses();
    if addresses.is_empty() {
        return Ok(muster_files::data::remove(&path)?);
    }
    let mut text = format!("{HEADER}\n");
    for (key, urls) in addresses {
        let urls: Vec<String> = urls.iter().map(ToString::to_string).collect();
        text.push_str(&format!("{key} {}\n", urls.join(" ")));
    }
    Ok(muster_files::data::replace_volatile(&path, text.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_back_and_an_empty_list_removes_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        std::fs::create_dir(layout.node()).unwrap();
        assert_eq!(read(&layout), PeerAddresses::new());
        let url = |text: &str| text.parse::<NodeUrl>().unwrap();
        let urls = vec![url("https://10.1.0.1:2380"), url("https://[fd00::1]:2380")];
        let addresses = PeerAddresses::from([(Digest::of(b"key"), urls)]);
        write(&layout, &addresses).unwrap();
        assert_eq!(read(&layout), addresses);
        write(&layout, &PeerAddresses::new()).unwrap();
        assert!(!layout.peer_addresses().exists());
        std::fs::write(layout.peer_addresses(), "junk").unwrap();
        assert_eq!(read(&layout), PeerAddresses::new());
    }
}
