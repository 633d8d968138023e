//! Raft ids of a founding member and of its cluster, by etcd's formulas.

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY};

use crate::digest::{Digest, MemberId};
use crate::url::NodeUrl;

/// Computes a founding member's id: the first eight bytes of SHA-1 over the sorted peer URLs and
/// the cluster token (etcd `membership.NewMember`). The cluster token is the commit document's hash
/// in hexadecimal. etcd's formula uses SHA-1; Muster relies on no collision resistance here.
pub fn of_founder(document: &Digest, peer_urls: &[NodeUrl]) -> MemberId {
    let mut urls: Vec<String> = peer_urls.iter().map(NodeUrl::to_string).collect();
    urls.sort_unstable();
    member_id(&urls, &document.to_string())
}

/// Computes the id of a founding member from its sorted peer URLs and the cluster token.
pub(crate) fn member_id(sorted_urls: &[String], token: &str) -> MemberId {
    let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    for url in sorted_urls {
        context.update(url.as_bytes());
    }
    context.update(token.as_bytes());
    MemberId(first_eight(context))
}

/// Computes the Raft cluster id: the first eight bytes of SHA-1 over the founding members' sorted
/// ids (etcd `membership.genID`).
pub fn of_cluster(founders: impl IntoIterator<Item = MemberId>) -> u64 {
    let mut founders: Vec<MemberId> = founders.into_iter().collect();
    founders.sort_unstable_by_key(|id| id.get());
    let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    for id in founders {
        context.update(id.as_bytes());
    }
    u64::from_be_bytes(first_eight(context))
}

fn first_eight(context: Context) -> [u8; 8] {
    let digest = context.finish();
    let mut first = [0; 8];
    first.copy_from_slice(&digest.as_ref()[..8]);
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected id was computed by etcd 3.5.
    #[test]
    fn the_id_of_a_founder_equals_etcds() {
        let id = member_id(&["http://127.0.0.1:23201".to_owned()], "etcd-cluster");
        assert_eq!(id.to_string(), "c8d9246ced7969c0");
    }

    #[test]
    fn the_order_of_urls_does_not_change_the_id() {
        let urls: [NodeUrl; 2] =
            ["https://10.0.0.1:2380", "https://10.0.0.2:2380"].map(|u| u.parse().unwrap());
        let swapped = [urls[1].clone(), urls[0].clone()];
        let h = Digest::of(b"h");
        assert_eq!(of_founder(&h, &urls), of_founder(&h, &swapped));
        assert_ne!(of_founder(&h, &urls), of_founder(&Digest::of(b"g"), &urls));
    }
}
