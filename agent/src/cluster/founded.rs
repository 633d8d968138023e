//! Computes the Raft cluster id that follows from a commit document.

use discovery_types::document::VerifiedDocument;
use discovery_types::raft_id;

/// Returns the Raft cluster id of the cluster that was founded with `document`.
pub(crate) fn founded_cluster_id(document: &VerifiedDocument) -> u64 {
    let h = document.hash();
    let records = document.records().iter();
    raft_id::of_cluster(records.map(|record| raft_id::of_founder(&h, &record.peer_urls)))
}
