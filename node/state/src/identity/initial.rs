//! The first configuration of a cluster, from `--initial-cluster` and the member document.

use super::{ClusterId, Incarnation, MemberDocument, MemberId, NodeKey};
use crate::membership::Member;

/// A member of the first configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitialMember {
    /// Member id, computed by the bootstrap formula.
    pub id: MemberId,
    pub name: String,
    /// URLs under which peers reach the member, sorted.
    pub peer_urls: Vec<String>,
    /// URLs under which clients reach the member. They are empty until the member publishes them,
    /// unless the member document contains them.
    pub client_urls: Vec<String>,
    /// Incarnation to which the member document binds the member, if any.
    pub incarnation: Option<Incarnation>,
    /// Key to which the member document binds the member, if any.
    pub node_key: Option<NodeKey>,
}

/// The first configuration of a cluster, in seat order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitialCluster {
    /// Cluster id, computed by the bootstrap formula.
    pub id: ClusterId,
    /// Members in the order of `--initial-cluster`: the first has seat 1.
    pub members: Vec<InitialMember>,
}

impl InitialMember {
    /// Returns the member's row in the table of a new cluster.
    #[must_use]
    pub fn to_member(&self) -> Member {
        Member {
            id: self.id,
            name: self.name.clone(),
            peer_urls: self.peer_urls.clone(),
            client_urls: self.client_urls.clone(),
            is_learner: false,
            incarnation: self.incarnation,
            node_key: self.node_key,
            changed_at: 0,
            vote_when_ready: false,
            operations: Vec::new(),
        }
    }
}

impl InitialCluster {
    /// Computes the ids from `members` (name and peer URLs, in seat order) and `token`. Each
    /// member's incarnation, key and client URLs come from the member document's member of the same
    /// name. The caller must have checked that `members` and the member document agree.
    #[must_use]
    pub fn new(
        members: &[(String, Vec<String>)],
        token: &str,
        document: Option<&MemberDocument>,
    ) -> Self {
        let members: Vec<InitialMember> = members
            .iter()
            .map(|(name, urls)| {
                let record = document.and_then(|document| document.member(name));
                let mut peer_urls = urls.clone();
                peer_urls.sort_unstable();
                InitialMember {
                    id: MemberId::at_bootstrap(&peer_urls, token),
                    name: name.clone(),
                    peer_urls,
                    client_urls: record.map_or_else(Vec::new, |r| r.client_urls.clone()),
                    incarnation: record.map(|r| r.incarnation),
                    node_key: record.map(|r| r.node_key),
                }
            })
            .collect();
        let ids: Vec<MemberId> = members.iter().map(|member| member.id).collect();
        Self { id: ClusterId::of(&ids), members }
    }

    /// Returns the member called `name`, if there is one.
    #[must_use]
    pub fn member(&self, name: &str) -> Option<&InitialMember> {
        self.members.iter().find(|member| member.name == name)
    }

    /// Returns two members with the same id, if there are any. Two members get the same id if they
    /// have the same URLs.
    #[must_use]
    pub fn identical_ids(&self) -> Option<(&InitialMember, &InitialMember)> {
        self.members.iter().enumerate().find_map(|(n, member)| {
            self.members[..n]
                .iter()
                .find(|earlier| earlier.id == member.id)
                .map(|earlier| (earlier, member))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, url: &str) -> (String, Vec<String>) {
        (name.to_owned(), vec![url.to_owned()])
    }

    #[test]
    fn seat_order_is_kept_and_ids_do_not_depend_on_it() {
        let one =
            InitialCluster::new(&[member("b", "http://b:1"), member("a", "http://a:1")], "t", None);
        let two =
            InitialCluster::new(&[member("a", "http://a:1"), member("b", "http://b:1")], "t", None);
        assert_eq!(one.members[0].name, "b");
        assert_eq!(one.id, two.id);
        assert_eq!(one.member("a"), two.member("a"));
    }

    #[test]
    fn members_with_the_same_urls_are_found() {
        let twins =
            InitialCluster::new(&[member("a", "http://x:1"), member("b", "http://x:1")], "t", None);
        let (first, second) = twins.identical_ids().expect("they share a URL");
        assert_eq!((first.name.as_str(), second.name.as_str()), ("a", "b"));
    }
}
