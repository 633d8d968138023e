//! A survey of the cluster: its members, and the status that each reports.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};

use super::CommandOutput;
use super::wait::FIRST_NOTE_DELAY;
use crate::cluster::{
    ClusterApiClient, ClusterError, ClusterMember, MemberId, MemberList, NodeStatus,
};
use crate::exit::{ExitError, error_chain};
use crate::plan::{MemberState, ObservedCluster, ObservedMember};

/// How long a survey is repeated while the cluster doesn't answer.
const SURVEY_RETRY_LIMIT: Duration = Duration::from_secs(30);
/// Pause between two attempts to survey the cluster.
const SURVEY_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Result of one survey of a cluster.
pub(in crate::commands) struct Survey {
    /// Client that reaches the cluster through all of its members.
    pub cluster: ClusterApiClient,
    /// The members, from a linearizable read.
    pub members: MemberList,
    /// The leader, if there is one.
    pub leader: Option<MemberId>,
    /// Status of each member, in the order of `members`, or why it didn't answer.
    pub statuses: Vec<Result<NodeStatus, String>>,
}

impl Survey {
    /// Reads the members from the cluster, then asks each for its status concurrently.
    pub(in crate::commands) async fn take(
        cluster: &ClusterApiClient,
    ) -> Result<Self, ClusterError> {
        Ok(Self::ask_members(cluster, cluster.list_members().await?).await)
    }

    /// Asks each of these members for its status concurrently.
    async fn ask_members(cluster: &ClusterApiClient, members: MemberList) -> Self {
        let cluster = cluster.with_members(&members);
        let said = join_all(members.list.iter().map(|member| ask_status(&cluster, member))).await;
        let newest = said.iter().flatten().max_by_key(|status| status.raft_term);
        let leader = newest.and_then(|status| status.leader);
        Self { cluster, members, leader, statuses: said }
    }

    /// Makes the first survey of a command. Prints a note if the survey is slow. Fails with advice
    /// if there is no quorum.
    pub(super) async fn take_first(
        cluster: &ClusterApiClient,
        answers: &CommandOutput<'_, '_>,
    ) -> Result<Self, ExitError> {
        let mut look = pin!(Self::take(cluster));
        let looked = match timeout(FIRST_NOTE_DELAY, &mut look).await {
            Ok(looked) => looked,
            Err(_) => {
                answers.print_note("waiting for the cluster to answer");
                look.await
            }
        };
        match looked {
            Err(error @ ClusterError::Unavailable { .. }) => {
                let why = Self::missing_quorum_advice(cluster).await;
                Err(why.map_or_else(|| error.into(), ExitError::Failed))
            }
            looked => Ok(looked?),
        }
    }

    /// Returns which members are missing for a quorum, by the list of a member that answers. `None`
    /// if there is a quorum, or if no member answers.
    pub(super) async fn missing_quorum_advice(cluster: &ClusterApiClient) -> Option<String> {
        Self::take_without_leader(cluster).await?.observed_cluster().missing_quorum_advice()
    }

    /// Surveys the members in the list of the first member that answers. Needs no leader. `None` if
    /// no member answers.
    pub(super) async fn take_without_leader(cluster: &ClusterApiClient) -> Option<Self> {
        let members = cluster.list_members_serializable().await.ok()?;
        Some(Self::ask_members(cluster, members).await)
    }

    /// Repeats the survey, retrying for a while, since the cluster may have no leader for a moment.
    pub(super) async fn repeat(&self) -> Result<Self, ClusterError> {
        let start = Instant::now();
        loop {
            match Self::take(&self.cluster).await {
                Err(error) if error.is_retryable() && start.elapsed() < SURVEY_RETRY_LIMIT => {
                    sleep(SURVEY_RETRY_PAUSE).await;
                }
                answer => return answer,
            }
        }
    }

    /// Iterates over the members and their statuses.
    pub(in crate::commands) fn members_with_status(
        &self,
    ) -> impl Iterator<Item = (&ClusterMember, &Result<NodeStatus, String>)> {
        self.members.list.iter().zip(&self.statuses)
    }

    /// Returns the observed states that a plan is made from.
    pub(in crate::commands) fn observed_cluster(&self) -> ObservedCluster {
        let see = |(member, said): (&ClusterMember, &Result<NodeStatus, String>)| {
            let state = match said {
                _ if !member.is_started() => MemberState::NotStarted,
                Ok(status) => MemberState::Answers { behind: self.behind(status) },
                Err(_) => MemberState::Silent,
            };
            ObservedMember { member: member.clone(), state }
        };
        ObservedCluster {
            members: self.members_with_status().map(see).collect(),
            leader: self.leader,
        }
    }

    /// Returns the members that don't answer, each with the reason. Also returns the leader, if a
    /// member that answers knows it.
    pub(super) fn silent_members(&self) -> (Vec<String>, Option<String>) {
        let observed = self.observed_cluster();
        let silent = observed.members.iter().zip(&self.statuses).filter_map(|(seen, said)| {
            let why = said.as_ref().err()?;
            Some(format!("{} ({}): {why}", seen.label(), seen.member.id))
        });
        let leader = self.leader.and_then(|id| observed.of_id(id)).map(ObservedMember::label);
        (silent.collect(), leader)
    }

    /// Returns a member's role: learner, leader or voter.
    pub(super) fn role(&self, member: &ClusterMember) -> &'static str {
        match (member.is_learner, Some(member.id) == self.leader) {
            (true, _) => "learner",
            (false, true) => "leader",
            (false, false) => "voter",
        }
    }

    /// Returns the leader's status, if it answered.
    pub(super) fn leaders_status(&self) -> Option<&NodeStatus> {
        self.statuses.iter().flatten().find(|status| Some(status.member_id) == self.leader)
    }

    /// Returns how many entries a member lacks, if the leader answered.
    pub(super) fn behind(&self, status: &NodeStatus) -> Option<u64> {
        self.leaders_status().map(|leader| leader.raft_index.saturating_sub(status.applied_index))
    }
}

async fn ask_status(
    cluster: &ClusterApiClient,
    member: &ClusterMember,
) -> Result<NodeStatus, String> {
    if !member.is_started() {
        return Err("not started".to_owned());
    }
    cluster.status_of(member).await.map_err(|error| error_chain(&error))
}
