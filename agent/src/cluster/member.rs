//! What a cluster says of itself.

use std::fmt;
use std::str::FromStr;

use discovery_types::text::printable;
use node_proto::etcdserverpb as pb;
use serde::{Serialize, Serializer};

/// A member's id: hexadecimal wherever people see it.
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

/// One member, as the cluster lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Member {
    /// Its id.
    pub id: MemberId,
    /// Its name; empty until it has started.
    pub name: String,
    /// Where its peers reach it.
    pub peer_urls: Vec<String>,
    /// Where clients reach it; empty until it has started.
    pub client_urls: Vec<String>,
    /// It receives, and has no vote.
    pub is_learner: bool,
}

impl Member {
    /// Whether it has ever run: it says its name when it does.
    pub(crate) fn is_started(&self) -> bool {
        !self.name.is_empty()
    }
}

/// A member says its name and its URLs itself, and people will read them.
impl From<pb::Member> for Member {
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

/// All members, at one configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Members {
    /// Which cluster.
    pub cluster_id: u64,
    /// The configuration that they are, by the entry that made it; `None` from stock etcd.
    pub configuration: Option<u64>,
    /// They, by id.
    pub list: Vec<Member>,
}

impl Members {
    /// The member of this id.
    pub(crate) fn of_id(&self, id: MemberId) -> Option<&Member> {
        self.list.iter().find(|member| member.id == id)
    }

    /// The member that is reached at any of these.
    pub(crate) fn of_peer_urls(&self, urls: &[String]) -> Option<&Member> {
        self.list.iter().find(|member| member.peer_urls.iter().any(|url| urls.contains(url)))
    }
}

/// What a node says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeStatus {
    /// Which cluster.
    pub cluster_id: u64,
    /// Which member answered.
    pub member_id: MemberId,
    /// Who leads, as far as it knows.
    pub leader: Option<MemberId>,
    /// Its term.
    pub raft_term: u64,
    /// The last entry that it knows to be committed.
    pub raft_index: u64,
    /// The last entry that it has applied.
    pub applied_index: u64,
    /// Its version of etcd's API.
    pub version: String,
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_member_says_of_itself_steers_no_terminal() {
        let odd = "a\u{1b}[2J\nb".to_owned();
        let member = pb::Member {
            name: odd.clone(),
            peer_ur_ls: vec![odd.clone()],
            client_ur_ls: vec![odd],
            ..pb::Member::default()
        };
        let Member { name, peer_urls, client_urls, .. } = member.into();
        for said in [&name, &peer_urls[0], &client_urls[0]] {
            assert!(!said.contains(char::is_control), "{said:?}");
        }
    }
}
