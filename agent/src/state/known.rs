//! The last list of members that the cluster confirmed, for finding the cluster later.
//!
//! All founders may have been replaced, and this host may have moved since it joined. Then neither
//! its journal nor its own node leads to the cluster, but this file does. The file is only a hint.
//! A server at one of its addresses has to prove by its certificate that it belongs to the cluster.
//! So a file that is missing, damaged or of a newer version only makes the search longer.

use serde::{Deserialize, Serialize};

use super::{Layout, StateError};
use crate::cluster::{ClusterMember, MemberId};

/// Version of the file's format.
const VERSION: u64 = 1;

#[derive(Serialize, Deserialize)]
struct KnownMembersFile {
    version: u64,
    members: Vec<KnownMember>,
}

/// A member as the cluster listed it.
#[derive(Serialize, Deserialize)]
struct KnownMember {
    /// The member's id in hexadecimal.
    id: String,
    name: String,
    peer_urls: Vec<String>,
    client_urls: Vec<String>,
    is_learner: bool,
}

impl From<&ClusterMember> for KnownMember {
    fn from(member: &ClusterMember) -> Self {
        let ClusterMember { id, name, peer_urls, client_urls, is_learner } = member.clone();
        Self { id: id.to_string(), name, peer_urls, client_urls, is_learner }
    }
}

impl KnownMember {
    fn member(self) -> Option<ClusterMember> {
        let Self { id, name, peer_urls, client_urls, is_learner } = self;
        Some(ClusterMember {
            id: id.parse::<MemberId>().ok()?,
            name,
            peer_urls,
            client_urls,
            is_learner,
        })
    }
}

/// Writes the list of members durably.
pub(crate) fn write(layout: &Layout, members: &[ClusterMember]) -> Result<(), StateError> {
    let file = KnownMembersFile {
        version: VERSION,
        members: members.iter().map(KnownMember::from).collect(),
    };
    let text = serde_json::to_vec_pretty(&file).expect("plain structs always serialise");
    Ok(muster_files::replace(&layout.known_members(), &text)?)
}

/// Returns the list of members that was written last; empty if it can't be read.
pub(crate) fn read(layout: &Layout) -> Vec<ClusterMember> {
    let bytes = super::read(&layout.known_members()).ok().flatten();
    let file: Option<KnownMembersFile> =
        bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let file = file.filter(|file| file.version == VERSION);
    file.map(|file| file.members.into_iter().filter_map(KnownMember::member).collect())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_list_is_read_back_and_a_damaged_one_counts_as_empty() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        assert_eq!(read(&layout), []);
        let member = ClusterMember {
            id: MemberId(0xabc),
            name: "db-1".to_owned(),
            peer_urls: vec!["https://10.0.0.1:2380".to_owned()],
            client_urls: vec!["https://10.0.0.1:2379".to_owned()],
            is_learner: true,
        };
        write(&layout, std::slice::from_ref(&member)).unwrap();
        assert_eq!(read(&layout), [member]);
        std::fs::write(layout.known_members(), "{\"version\":2,\"members\":[]}").unwrap();
        assert_eq!(read(&layout), []);
        std::fs::write(layout.known_members(), "junk").unwrap();
        assert_eq!(read(&layout), []);
    }
}
