//! The members, and what each says of itself.

use futures_util::future::join_all;

use crate::cluster::{Cluster, ClusterError, Member, MemberId, Members, NodeStatus};
use crate::exit::chain;

/// What one look at a cluster found.
pub(super) struct Survey {
    /// The members, as the cluster knows them for certain.
    pub members: Members,
    /// Who leads.
    pub leader: Option<MemberId>,
    /// What each member says, in the members' order; or why nothing is heard of it.
    pub said: Vec<Result<NodeStatus, String>>,
}

impl Survey {
    /// Asks the cluster for its members, and then all of them at once how they are.
    pub(super) async fn of(cluster: &Cluster) -> Result<Self, ClusterError> {
        let members = cluster.list().await?;
        let said = join_all(members.list.iter().map(|member| ask(cluster, member))).await;
        let newest = said.iter().flatten().max_by_key(|status| status.raft_term);
        let leader = newest.and_then(|status| status.leader);
        Ok(Self { members, leader, said })
    }

    /// Each member, and what it says.
    pub(super) fn each(&self) -> impl Iterator<Item = (&Member, &Result<NodeStatus, String>)> {
        self.members.list.iter().zip(&self.said)
    }

    /// What the leader says.
    pub(super) fn leaders_status(&self) -> Option<&NodeStatus> {
        self.said.iter().flatten().find(|status| Some(status.member_id) == self.leader)
    }

    /// How many entries this member has to fetch still, as far as it and the leader say.
    pub(super) fn behind(&self, status: &NodeStatus) -> Option<u64> {
        self.leaders_status().map(|leader| leader.raft_index.saturating_sub(status.applied_index))
    }
}

async fn ask(cluster: &Cluster, member: &Member) -> Result<NodeStatus, String> {
    if !member.is_started() {
        return Err("not started".to_owned());
    }
    cluster.status_of(member).await.map_err(|error| chain(&error))
}
