//! etcd's rules for when a cluster's members may change, as pure functions.
//!
//! `muster-node` judges each change by these rules. `muster-agent` predicts the verdict from what
//! it sees of the members from outside. The rules are about the quorum of the voters after the
//! change. They use these terms:
//! - A member counts as *started* once it has published its name.
//! - A member counts as *healthy* once it has been connected for [`HEALTHY_AFTER`].
//! - A learner is *in sync* if it lacks at most [`IN_SYNC_ENTRIES`] entries.
//!
//! etcd has the rules in `server/etcdserver/server.go` (`mayAddMember`, `mayRemoveMember`,
//! `mayPromoteMember`) and `server/etcdserver/api/membership/cluster.go`
//! (`IsReadyToAddVotingMember` and its neighbours). Where a rule differs from etcd's, its comment
//! says why.

use std::time::Duration;

/// How long a member must have been connected without interruption to count as healthy
/// (`HealthInterval` in etcd's `server/etcdserver/server.go`).
pub const HEALTHY_AFTER: Duration = Duration::from_secs(5);

/// Maximum number of entries that a learner in sync may lack. A busy leader has about this many
/// entries in flight to a member at any time. etcd requires a share of the log instead
/// (`readyPercentThreshold`). That would allow millions of missing entries in an old cluster, and
/// none in a young one.
pub const IN_SYNC_ENTRIES: u64 = 1_000;

/// Maximum number of learners by default (`--max-learners`; `DefaultMaxLearners` in etcd's package
/// `server/etcdserver/api/membership`).
pub const DEFAULT_MAX_LEARNERS: u64 = 1;

/// Returns the number of voters that have to agree.
#[must_use]
pub const fn quorum(voters: usize) -> usize {
    voters / 2 + 1
}

/// Right of a member to vote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberRole {
    /// The member has a vote.
    Voter,
    /// The member replicates the log without a vote.
    Learner,
    /// The member was requested as a voter, and is a learner until it is in sync. etcd has no such
    /// members: a new voter votes there from the beginning.
    PromisedVoter,
}

/// Connection to a member, as seen by the member that judges the change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connection {
    /// The member is not connected.
    Missing,
    /// The member has been connected for less than [`HEALTHY_AFTER`].
    Fresh,
    /// The member has been connected for at least [`HEALTHY_AFTER`], or is the judging member
    /// itself.
    Healthy,
}

/// Standing of one member, which the rules depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberStanding {
    /// Id of the member.
    pub id: u64,
    /// Right of the member to vote.
    pub role: MemberRole,
    /// Whether the member has published its name.
    pub is_started: bool,
    /// Connection to the member.
    pub connection: Connection,
}

/// Why a change could cost the quorum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuorumObjection {
    /// The change would leave too few started voters.
    NotEnoughStarted {
        /// Number of started voters after the change.
        started: usize,
        /// Number of started voters that the change needs.
        needed: usize,
    },
    /// Too few voters are healthy for the change.
    Unhealthy {
        /// Number of voters that are healthy.
        healthy: usize,
        /// Number of voters that have to be healthy.
        needed: usize,
    },
}

/// All members of a cluster, as one of them or an observer sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MembershipView(Vec<MemberStanding>);

impl FromIterator<MemberStanding> for MembershipView {
    fn from_iter<I: IntoIterator<Item = MemberStanding>>(members: I) -> Self {
        Self(members.into_iter().collect())
    }
}

impl MembershipView {
    /// Returns the objections to adding a member, in the order of etcd's checks (`mayAddMember` and
    /// `IsReadyToAddVotingMember`).
    ///
    /// A promised voter counts as a voter. Until it has its vote, the change that added it is not
    /// complete, so no further voter is added.
    #[must_use]
    pub fn addition_objections(&self, is_learner: bool) -> Vec<QuorumObjection> {
        let voters = || self.0.iter().filter(|member| member.role != MemberRole::Learner);
        let (count, started) = (voters().count(), count_started(voters()));
        let needed = quorum(count + 1);
        let mut objections = Vec::new();
        // As in etcd, a single started voter may add a second voter. The new voter has not started
        // yet, so the rule below would refuse it.
        let is_second = started == 1 && count == 1;
        if !is_learner && !is_second && started < needed {
            objections.push(QuorumObjection::NotEnoughStarted { started, needed });
        }
        let healthy = count_healthy(voters());
        if count > 1 && healthy < needed {
            objections.push(QuorumObjection::Unhealthy { healthy, needed });
        } else if !is_learner && voters().any(|member| member.role == MemberRole::PromisedVoter) {
            objections.push(QuorumObjection::Unhealthy { healthy, needed: healthy + 1 });
        }
        objections
    }

    /// Returns the first objection to removing the member `id`, in the order of etcd's checks
    /// (`mayRemoveMember` and `IsReadyToRemoveVotingMember`). Returns `None` for a member without a
    /// vote. An unknown member counts as an unreachable voter.
    #[must_use]
    pub fn removal_objection(&self, id: u64) -> Option<QuorumObjection> {
        let leaving = self.0.iter().find(|member| member.id == id);
        if leaving.is_some_and(|member| member.role != MemberRole::Voter) {
            return None;
        }
        let left = || self.voters().filter(|member| member.id != id);
        let (majority, started) = (quorum(left().count()), count_started(left()));
        if started < majority {
            return Some(QuorumObjection::NotEnoughStarted { started, needed: majority });
        }
        // An unreachable member may be removed if the remaining reachable members form a quorum.
        // (etcd does not require this. Then the removed member itself may return, commit its own
        // removal, and leave the others without a quorum.)
        let is_reachable = |member: &&MemberStanding| member.connection != Connection::Missing;
        let (healthy, needed) = if leaving.filter(is_reachable).is_none() {
            (left().filter(is_reachable).count(), majority)
        } else {
            (count_healthy(self.voters()), majority + 1)
        };
        (healthy < needed).then_some(QuorumObjection::Unhealthy { healthy, needed })
    }

    /// Returns the objection to promoting one learner to a voter (`mayPromoteMember` and
    /// `IsReadyToPromoteMember`). The learner counts as started, because a learner that hasn't
    /// started can't be in sync.
    #[must_use]
    pub fn promotion_objection(&self) -> Option<QuorumObjection> {
        let (started, needed) =
            (1 + count_started(self.voters()), quorum(self.voters().count() + 1));
        (started < needed).then_some(QuorumObjection::NotEnoughStarted { started, needed })
    }

    /// Returns whether one more learner may be added if `max_learners` are allowed
    /// (`ValidateConfigurationChange` in etcd's `server/etcdserver/api/membership/cluster.go`). A
    /// promised voter does not count, because in etcd it is a voter from the beginning.
    #[must_use]
    pub fn has_room_for_learner(&self, max_learners: u64) -> bool {
        let learners = self.0.iter().filter(|member| member.role == MemberRole::Learner);
        (learners.count() as u64) < max_learners
    }

    fn voters(&self) -> impl Iterator<Item = &MemberStanding> {
        self.0.iter().filter(|member| member.role == MemberRole::Voter)
    }
}

fn count_started<'a>(members: impl Iterator<Item = &'a MemberStanding>) -> usize {
    members.filter(|member| member.is_started).count()
}

fn count_healthy<'a>(members: impl Iterator<Item = &'a MemberStanding>) -> usize {
    members.filter(|member| member.connection == Connection::Healthy).count()
}

#[cfg(test)]
mod tests;
