//! Computes the Raft cluster id that follows from a commit document.

use discovery_types::document::VerifiedDocument;

/// Returns the Raft cluster id of the cluster that was founded with `document`.
pub(crate) fn founded_cluster_id(document: &VerifiedDocument) -> u64 {
    document.raft_cluster_id()
}
