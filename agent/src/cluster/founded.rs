//! Which Raft cluster a commit document makes, by etcd's formula.

use discovery_types::digest::MemberId;
use discovery_types::document::VerifiedDocument;
use discovery_types::raft_id;
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY};

/// The id of the cluster that was founded on `document`.
pub(crate) fn founded(document: &VerifiedDocument) -> u64 {
    let h = document.hash();
    let records = document.records().iter();
    of(records.map(|record| raft_id::of_founder(&h, &record.peer_urls)).collect())
}

/// The first eight bytes of SHA-1 over the founders' ids, in order (etcd `membership.genID`).
fn of(mut founders: Vec<MemberId>) -> u64 {
    founders.sort_unstable_by_key(|id| id.get());
    let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    for id in founders {
        context.update(id.as_bytes());
    }
    let digest = context.finish();
    let mut first = [0; 8];
    first.copy_from_slice(&digest.as_ref()[..8]);
    u64::from_be_bytes(first)
}
