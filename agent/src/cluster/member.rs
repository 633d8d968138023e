//! Members and node status, as a cluster reports them.

use std::fmt;
use std::str::FromStr;

use discovery_types::text::printable;
use node_proto::etcdserverpb as pb;
use serde::{Serialize, Serializer};

/// A member's id, shown in hexadecimal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct MemberId(pub u64);

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl FromStr for MemberId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u64::from_str_radix(text, 16).map(Self)
    }
}

impl Serialize for MemberId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A member, as the cluster lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct ClusterMember {
    pub id: MemberId,
    /// The member's name; empty until it has started.
    pub name: String,
    /// URLs at which the other members reach this member.
    pub peer_urls: Vec<String>,
    /// URLs at which clients reach this member; empty until it has started.
    pub client_urls: Vec<String>,
    /// Whether the member replicates the log without a vote.
    pub is_learner: bool,
}

impl ClusterMember {
    /// Returns whether the member has ever run. A member publishes its name when it starts.
    pub(crate) fn is_started(&self) -> bool {
        !self.name.is_empty()
    }
}

/// Names and URLs come from the members themselves, so control characters are replaced before
/// people see them.
impl From<pb::Member> for ClusterMember {
    fn from(member: pb::Member) -> Self {
        let shown = |text: &String| printable(text).into_owned();
        Self {
            id: MemberId(member.id),
            name: shown(&member.name),
            peer_urls: member.peer_ur_ls.iter().map(shown).collect(),
            client_urls: member.client_ur_ls.iter().map(shown).collect(),
            is_learner: member.is_learner,
        }
    }
}

/// All members at one configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemberList {
    /// The Raft cluster's id.
    pub cluster_id: u64,
    /// Index of the log entry that made this configuration; `None` from stock etcd.
    pub configuration: Option<u64>,
    /// Members, ordered by id.
    pub list: Vec<ClusterMember>,
}

impl MemberList {
    /// Returns the member with this id.
    pub(crate) fn of_id(&self, id: MemberId) -> Option<&ClusterMember> {
        self.list.iter().find(|member| member.id == id)
    }

    /// Returns the member with any of these peer URLs.
    pub(crate) fn of_peer_urls(&self, urls: &[String]) -> Option<&ClusterMember> {
        self.list.iter().find(|member| member.peer_urls.iter().any(|url| urls.contains(url)))
    }
}

/// A node's answer to a status request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeStatus {
    /// The Raft cluster's id.
    pub cluster_id: u64,
    /// The member that answered.
    pub member_id: MemberId,
    /// The leader that this member knows, if any.
    pub leader: Option<MemberId>,
    /// The member's current term.
    pub raft_term: u64,
    /// Highest index that the member knows to be committed.
    pub raft_index: u64,
    /// Highest index that the member has applied.
    pub applied_index: u64,
    /// The member's version of etcd's API.
    pub version: String,
    /// Newest revision of the member's store.
    pub revision: u64,
    /// Size in bytes of the member's database.
    pub database_bytes: u64,
    /// Whether the member is a learner. Stock etcd then refuses to read its store.
    pub is_learner: bool,
}

impl From<pb::StatusResponse> for NodeStatus {
    fn from(status: pb::StatusResponse) -> Self {
        let header = status.header.unwrap_or_default();
        Self {
            cluster_id: header.cluster_id,
            member_id: MemberId(header.member_id),
            leader: (status.leader != 0).then_some(MemberId(status.leader)),
            raft_term: status.raft_term,
            raft_index: status.raft_index,
            applied_index: status.raft_applied_index,
            version: status.version,
            revision: u64::try_from(header.revision).unwrap_or_default(),
            database_bytes: u64::try_from(status.db_size).unwrap_or_default(),
            is_learner: status.is_learner,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_in_a_members_name_are_replaced() {
        let odd = "a\u{1b}[2J\nb".to_owned();
        let member = pb::Member {
            name: odd.clone(),
            peer_ur_ls: vec![odd.clone()],
            client_ur_ls: vec![odd],
            ..pb::Member::default()
        };
        let ClusterMember { name, peer_urls, client_urls, .. } = member.into();
        for said in [&name, &peer_urls[0], &client_urls[0]] {
            assert!(!said.contains(char::is_control), "{said:?}");
        }
    }
}
