//! The members, and what each says of itself.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};

use super::Answers;
use super::wait::SILENT_FOR;
use crate::cluster::{Cluster, ClusterError, Member, MemberId, Members, NodeStatus};
use crate::exit::{End, chain};
use crate::plan::{Seen, Sight, State};

/// How long a cluster that was there a moment ago is looked for, and how often.
const LOOK_LIMIT: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// What one look at a cluster found.
pub(super) struct Survey {
    /// The cluster, by all of its members.
    pub cluster: Cluster,
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
        Ok(Self::asking(cluster, cluster.list().await?).await)
    }

    /// Asks these members, all at once, how they are.
    async fn asking(cluster: &Cluster, members: Members) -> Self {
        let cluster = cluster.reaching(&members);
        let said = join_all(members.list.iter().map(|member| ask(&cluster, member))).await;
        let newest = said.iter().flatten().max_by_key(|status| status.raft_term);
        let leader = newest.and_then(|status| status.leader);
        Self { cluster, members, leader, said }
    }

    /// The same for a command that begins: says so where it takes long, and what to do where too few
    /// answer for the cluster to do so.
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

    /// Who is missing, by the list that any member remembers.
    pub(super) async fn why_silent(cluster: &Cluster) -> Option<String> {
        Self::remembered(cluster).await?.sight().no_quorum()
    }

    /// Asks each member of the list that any member remembers, also where there is no leader.
    pub(super) async fn remembered(cluster: &Cluster) -> Option<Self> {
        let members = cluster.remembered().await.ok()?;
        Some(Self::asking(cluster, members).await)
    }

    /// The same again. The cluster may be between two leaders meanwhile: it is given some time.
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

    /// Each member, and what it says.
    pub(super) fn each(&self) -> impl Iterator<Item = (&Member, &Result<NodeStatus, String>)> {
        self.members.list.iter().zip(&self.said)
    }

    /// What a plan needs to know.
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

    /// The members that don't answer, each with the reason; and who leads, where a member that answers
    /// says so.
    pub(super) fn silent(&self) -> (Vec<String>, Option<String>) {
        let sight = self.sight();
        let silent = sight.members.iter().zip(&self.said).filter_map(|(seen, said)| {
            let why = said.as_ref().err()?;
            Some(format!("{} ({}): {why}", seen.label(), seen.member.id))
        });
        let leader = self.leader.and_then(|id| sight.of_id(id)).map(Seen::label);
        (silent.collect(), leader)
    }

    /// What a member is, in a word.
    pub(super) fn role(&self, member: &Member) -> &'static str {
        match (member.is_learner, Some(member.id) == self.leader) {
            (true, _) => "learner",
            (false, true) => "leader",
            (false, false) => "voter",
        }
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
