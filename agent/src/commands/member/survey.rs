//! A survey of the cluster: its members, and the status that each reports.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};

use super::Answers;
use super::wait::SILENT_FOR;
use crate::cluster::{Cluster, ClusterError, Member, MemberId, Members, NodeStatus};
use crate::exit::{End, chain};
use crate::plan::{Seen, Sight, State};

/// How long a survey is repeated while the cluster doesn't answer, and the pause between attempts.
const LOOK_LIMIT: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Result of one survey of a cluster.
pub(super) struct Survey {
    /// Client that reaches the cluster through all of its members.
    pub cluster: Cluster,
    /// The members, from a linearizable read.
    pub members: Members,
    /// The leader, if there is one.
    pub leader: Option<MemberId>,
    /// Status of each member, in the order of `members`, or why it didn't answer.
    pub said: Vec<Result<NodeStatus, String>>,
}

impl Survey {
    /// Reads the members from the cluster, then asks each for its status concurrently.
    pub(super) async fn of(cluster: &Cluster) -> Result<Self, ClusterError> {
        Ok(Self::asking(cluster, cluster.list().await?).await)
    }

    /// Asks each of these members for its status concurrently.
    async fn asking(cluster: &Cluster, members: Members) -> Self {
        let cluster = cluster.reaching(&members);
        let said = join_all(members.list.iter().map(|member| ask(&cluster, member))).await;
        let newest = said.iter().flatten().max_by_key(|status| status.raft_term);
        let leader = newest.and_then(|status| status.leader);
        Self { cluster, members, leader, said }
    }

    /// First survey of a command. Prints a note if it is slow. Fails with advice if there is no
    /// quorum.
    pub(super) async fn first(cluster: &Cluster, answers: &Answers<'_, '_>) -> Result<Self, End> {
        let mut look = pin!(Self::of(cluster));
        let looked = match timeout(SILENT_FOR, &mut look).await {
            Ok(looked) => looked,
            Err(_) => {
                answers.note("waiting for the cluster to answer");
                look.await
            }
        };
        match looked {
            Err(error @ ClusterError::Unavailable { .. }) => {
                let why = Self::why_silent(cluster).await;
                Err(why.map_or_else(|| error.into(), End::Failed))
            }
            looked => Ok(looked?),
        }
    }

    /// Returns which members are missing, by any member's own list. `None` if there is a quorum, or
    /// if no member answers.
    pub(super) async fn why_silent(cluster: &Cluster) -> Option<String> {
        Self::remembered(cluster).await?.sight().no_quorum()
    }

    /// Surveys the members in any member's own list, which needs no leader.
    pub(super) async fn remembered(cluster: &Cluster) -> Option<Self> {
        let members = cluster.remembered().await.ok()?;
        Some(Self::asking(cluster, members).await)
    }

    /// Repeats the survey, retrying for a while, since the cluster may have no leader for a moment.
    pub(super) async fn again(&self) -> Result<Self, ClusterError> {
        let start = Instant::now();
        loop {
            match Self::of(&self.cluster).await {
                Err(error) if error.is_silence() && start.elapsed() < LOOK_LIMIT => {
                    sleep(LOOK_AGAIN).await;
                }
                answer => return answer,
            }
        }
    }

    /// Iterates over the members and their statuses.
    pub(super) fn each(&self) -> impl Iterator<Item = (&Member, &Result<NodeStatus, String>)> {
        self.members.list.iter().zip(&self.said)
    }

    /// Returns the observed states that a plan is made from.
    pub(super) fn sight(&self) -> Sight {
        let see = |(member, said): (&Member, &Result<NodeStatus, String>)| {
            let state = match said {
                _ if !member.is_started() => State::NotStarted,
                Ok(status) => State::Answers { behind: self.behind(status) },
                Err(_) => State::Silent,
            };
            Seen { member: member.clone(), state }
        };
        Sight { members: self.each().map(see).collect(), leader: self.leader }
    }

    /// Returns the members that don't answer, each with the reason. Also returns the leader, if a
    /// member that answers knows it.
    pub(super) fn silent(&self) -> (Vec<String>, Option<String>) {
        let sight = self.sight();
        let silent = sight.members.iter().zip(&self.said).filter_map(|(seen, said)| {
            let why = said.as_ref().err()?;
            Some(format!("{} ({}): {why}", seen.label(), seen.member.id))
        });
        let leader = self.leader.and_then(|id| sight.of_id(id)).map(Seen::label);
        (silent.collect(), leader)
    }

    /// Returns a member's role: learner, leader or voter.
    pub(super) fn role(&self, member: &Member) -> &'static str {
        match (member.is_learner, Some(member.id) == self.leader) {
            (true, _) => "learner",
            (false, true) => "leader",
            (false, false) => "voter",
        }
    }

    /// Returns the leader's status, if it answered.
    pub(super) fn leaders_status(&self) -> Option<&NodeStatus> {
        self.said.iter().flatten().find(|status| Some(status.member_id) == self.leader)
    }

    /// Returns how many entries a member lacks, if the leader answered.
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
