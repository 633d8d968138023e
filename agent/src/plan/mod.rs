//! Computes what a membership change would do, from the members' observed state, before anything is
//! done. Pure.
//!
//! The cluster judges every change itself, and more exactly than is possible from outside: it knows
//! for how long each member has been connected. A plan predicts the cluster's refusals. It also
//! warns of changes that the cluster allows although they make the cluster less safe.

mod progress;
mod replace;
mod rules;
#[cfg(test)]
mod tests;
mod verdict;
mod words;

use member_rules::{
    Connection, IN_SYNC_ENTRIES, MemberRole, MemberStanding, MembershipView, quorum,
};

pub(crate) use self::progress::{CatchUpProgress, CatchUpRate};
pub(crate) use self::replace::{EarlyRemovalReason, ReplacementFacts, ReplacementStep};
use crate::cluster::{ClusterMember, MemberId};

/// Observed state of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemberState {
    /// The member was added and has never run.
    NotStarted,
    /// The member has started, but doesn't answer.
    Silent,
    /// The member answers a status request.
    Answers {
        /// Number of entries that the member lacks, if it is known.
        behind: Option<u64>,
    },
}

impl MemberState {
    /// Returns whether the member answers, and lacks few enough entries to become a voter.
    pub(crate) fn is_in_sync(self) -> bool {
        matches!(self, Self::Answers { behind: Some(behind) } if behind <= IN_SYNC_ENTRIES)
    }
}

/// A member and its observed state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObservedMember {
    /// The member as the cluster lists it.
    pub member: ClusterMember,
    pub state: MemberState,
}

impl ObservedMember {
    fn is_voter(&self) -> bool {
        !self.member.is_learner
    }

    fn is_answering(&self) -> bool {
        matches!(self.state, MemberState::Answers { .. })
    }

    /// Returns the member's name, or its id and peer URLs if it has not started and so has no name.
    pub(crate) fn label(&self) -> String {
        if self.member.is_started() {
            self.member.name.clone()
        } else {
            format!("{} ({})", self.member.id, self.member.peer_urls.join(","))
        }
    }
}

/// The cluster's members and their observed states.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObservedCluster {
    /// All members of the cluster.
    pub members: Vec<ObservedMember>,
    /// The leader, if there is one.
    pub leader: Option<MemberId>,
}

impl ObservedCluster {
    /// Returns the member with this id.
    pub(crate) fn of_id(&self, id: MemberId) -> Option<&ObservedMember> {
        self.members.iter().find(|seen| seen.member.id == id)
    }

    /// Returns a member other than `but` that has any of these peer URLs.
    fn find_by_peer_urls(
        &self,
        peer_urls: &[String],
        but: Option<MemberId>,
    ) -> Option<&ObservedMember> {
        self.members.iter().find(|seen| {
            Some(seen.member.id) != but
                && seen.member.peer_urls.iter().any(|url| peer_urls.contains(url))
        })
    }

    /// Returns a member other than `but` that has this name. Skips a member at any of `peer_urls`,
    /// because the change is about that member.
    fn find_by_name(
        &self,
        name: &str,
        peer_urls: &[String],
        but: Option<MemberId>,
    ) -> Option<&ObservedMember> {
        self.members.iter().find(|seen| {
            seen.member.name == name
                && Some(seen.member.id) != but
                && !seen.member.peer_urls.iter().any(|url| peer_urls.contains(url))
        })
    }

    fn voter_counts(&self) -> VoterCounts {
        let voters = || self.members.iter().filter(|seen| seen.is_voter());
        VoterCounts {
            voters: voters().count(),
            learners: self.members.len() - voters().count(),
            answering: voters().filter(|seen| seen.is_answering()).count(),
        }
    }

    /// Returns whether a quorum of voters answers.
    pub(crate) fn has_quorum(&self) -> bool {
        self.voter_counts().spare_voters().is_some()
    }

    /// If there is no quorum, returns advice on what to do.
    pub(crate) fn missing_quorum_advice(&self) -> Option<String> {
        let shape = self.voter_counts();
        let away = self.members.iter().filter(|seen| seen.is_voter() && !seen.is_answering());
        let away = away.map(ObservedMember::label).collect::<Vec<_>>().join(", ");
        shape.spare_voters().is_none().then(|| {
            format!(
                "{}. Silent: {away}. Start what can be started of them; if most are lost for good: \
                 muster-agent recover --help",
                PlanObjection::NoQuorum(shape)
            )
        })
    }

    /// Returns the other voters that are unreachable or behind, if the cluster would lose its
    /// quorum without this member. `None` if it would not. Also `None` for one or two voters: such
    /// a cluster can't spare a voter in any case.
    pub(crate) fn why_indispensable(&self, id: MemberId) -> Option<Vec<String>> {
        let shape = self.voter_counts();
        let votes = self.of_id(id).is_some_and(ObservedMember::is_voter);
        let others = self.members.iter().filter(|seen| seen.is_voter() && seen.member.id != id);
        let (well, away): (Vec<&ObservedMember>, Vec<&ObservedMember>) =
            others.partition(|seen| seen.state.is_in_sync());
        let stops = votes && shape.tolerance() > 0 && well.len() < shape.quorum();
        stops.then(|| away.into_iter().map(ObservedMember::label).collect())
    }

    /// Returns whether this member has to hand its leadership to another voter before it is
    /// removed.
    pub(crate) fn must_hand_over(&self, id: MemberId) -> bool {
        self.leader == Some(id) && self.voter_counts().voters > 1
    }

    /// Returns the members in the form that the rules for membership changes (crate `member-rules`)
    /// take. A member that answers counts as healthy, since only the cluster knows how long it has
    /// been connected.
    fn view(&self) -> MembershipView {
        let standing = |seen: &ObservedMember| MemberStanding {
            id: seen.member.id.0,
            role: if seen.is_voter() { MemberRole::Voter } else { MemberRole::Learner },
            is_started: seen.member.is_started(),
            connection: if seen.is_answering() { Connection::Healthy } else { Connection::Missing },
        };
        self.members.iter().map(standing).collect()
    }
}

/// Numbers of voters, learners, and voters that answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VoterCounts {
    /// Number of members with a vote.
    pub voters: usize,
    /// Number of members without a vote.
    pub learners: usize,
    /// Number of voters that answer.
    pub answering: usize,
}

impl VoterCounts {
    /// Returns the number of voters that have to agree.
    pub(crate) fn quorum(self) -> usize {
        quorum(self.voters)
    }

    /// Returns the number of voters that can fail without loss of the quorum, if all work now.
    pub(crate) fn tolerance(self) -> usize {
        self.voters.saturating_sub(self.quorum())
    }

    /// Returns how many more voters can fail now without loss of the quorum. `None` if there is no
    /// quorum.
    pub(crate) fn spare_voters(self) -> Option<usize> {
        self.answering.checked_sub(self.quorum())
    }
}

/// A change that an operator wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RequestedChange {
    /// Add a new member to the cluster.
    Add {
        /// Name of the new member.
        name: String,
        /// Peer URLs of the new member.
        peer_urls: Vec<String>,
        /// Whether the member votes from the beginning.
        is_voter: bool,
    },
    /// Make a learner a voter.
    Promote(MemberId),
    /// Change a member's peer URLs.
    Update(MemberId, Vec<String>),
    /// Remove a member for ever.
    Remove(MemberId),
    /// Replace a member by a new one.
    Replace {
        /// The member to replace.
        old: MemberId,
        /// Name of the new member.
        name: String,
        /// Peer URLs of the new member.
        peer_urls: Vec<String>,
    },
}

/// One step of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlanStep {
    /// The cluster adds a member.
    Add {
        /// Whether the member votes from the beginning.
        is_voter: bool,
    },
    /// A person starts the new member's node.
    Start,
    /// The new member catches up with the log.
    CatchUp,
    /// The learner becomes a voter.
    Promote,
    /// The leader hands its leadership over.
    HandOver,
    /// The cluster removes a member.
    Remove,
    /// The cluster changes a member's peer URLs.
    Update,
    /// A person restarts the member with its new peer URLs.
    Restart,
}

/// Why the cluster will refuse a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PlanObjection {
    /// Too few voters answer for a quorum.
    NoQuorum(VoterCounts),
    /// The change would leave too few started voters.
    NotStarted {
        /// Number of started voters after the change.
        started: usize,
        /// Number of started voters that the change needs.
        needed: usize,
        /// Voters that have not started.
        who: Vec<String>,
    },
    /// Too few voters answer for this change.
    Unhealthy {
        /// Number of voters that answer.
        healthy: usize,
        /// Number of voters that must answer.
        needed: usize,
        /// Voters that don't answer.
        who: Vec<String>,
    },
    /// There is a learner already, and only one is allowed by default.
    TooManyLearners(String),
    /// This is not a peer URL by etcd's rules.
    BadUrl(String),
    /// Another member has this peer URL.
    UrlTaken(String),
    /// Another member has this name, so the name would be ambiguous. The cluster itself allows
    /// equal names.
    NameTaken {
        /// Name of the new member.
        name: String,
        /// The member that has the name.
        id: MemberId,
    },
    /// The member to promote is a voter already.
    NotALearner(String),
    /// The learner lacks too many entries, or doesn't answer.
    NotInSync(String, MemberState),
    /// The member is the last voter: the cluster would have none left.
    LastVoter,
}

/// A risk of a change that the cluster allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Warning {
    /// An even number N of voters tolerates no more failures than N-1 voters do.
    EvenSize(usize),
    /// The new member stays a learner, without a vote, until a person promotes it.
    LearnerWaits(String),
    /// The URL is without TLS, while other members use TLS.
    WithoutTls(String),
    /// A voter that has not started counts as failed until it serves.
    CountsAsFailed {
        /// How many more voters may fail until the new voter serves; `None` if there is no quorum.
        spare: Option<usize>,
    },
    /// The member to remove works, while others don't.
    RemovesHealthy {
        /// Voters that don't answer.
        silent: Vec<String>,
    },
    /// The cluster has two voters: both must work until the removal is committed.
    OneOfTwo,
    /// The change lowers the number of tolerated failures, from the first value to the second
    /// value.
    LessTolerance(usize, usize),
    /// The member counts as failed while it restarts.
    RestartCosts {
        /// How many more voters may fail during the restart; `None` if there is no quorum.
        spare: Option<usize>,
    },
    /// The replaced member is removed first, for this reason.
    RemovesFirst(EarlyRemovalReason),
}

/// The effect of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChangePlan {
    /// Numbers of voters and learners before the change.
    pub before: VoterCounts,
    /// Numbers of voters and learners after the change, with the new member started.
    pub after: VoterCounts,
    /// The steps of the change, in order.
    pub steps: Vec<PlanStep>,
    /// Why the cluster would refuse the change.
    pub objections: Vec<PlanObjection>,
    /// Risks of the change.
    pub warnings: Vec<Warning>,
}

/// Computes the plan of the change `wanted`.
pub(crate) fn plan(observed: &ObservedCluster, wanted: &RequestedChange) -> ChangePlan {
    let before = observed.voter_counts();
    let (after, steps) = match wanted {
        RequestedChange::Add { is_voter: true, .. } => {
            let steps = vec![PlanStep::Add { is_voter: true }, PlanStep::Start];
            (with_new_voter(before), steps)
        }
        RequestedChange::Add { is_voter: false, .. } => {
            let steps = vec![
                PlanStep::Add { is_voter: false },
                PlanStep::Start,
                PlanStep::CatchUp,
                PlanStep::Promote,
            ];
            (with_new_voter(before), steps)
        }
        RequestedChange::Promote(id) => {
            (with_promoted(observed, *id), vec![PlanStep::CatchUp, PlanStep::Promote])
        }
        RequestedChange::Update(..) => (before, vec![PlanStep::Update, PlanStep::Restart]),
        RequestedChange::Remove(id) => {
            (without_member(observed, *id), removal_steps(observed, *id))
        }
        RequestedChange::Replace { old, peer_urls, .. } => {
            replace::steps(observed, *old, peer_urls)
        }
    };
    let mut objections = verdict::objections(observed, wanted);
    if before.spare_voters().is_none() {
        // Without a quorum nothing else can be done, so this objection comes first.
        objections.insert(0, PlanObjection::NoQuorum(before));
    }
    let warnings = verdict::warnings(observed, wanted, after);
    ChangePlan { before, after, steps, objections, warnings }
}

fn with_new_voter(shape: VoterCounts) -> VoterCounts {
    VoterCounts { voters: shape.voters + 1, answering: shape.answering + 1, ..shape }
}

fn with_promoted(observed: &ObservedCluster, id: MemberId) -> VoterCounts {
    let shape = observed.voter_counts();
    match observed.of_id(id) {
        Some(seen) if !seen.is_voter() => {
            VoterCounts { learners: shape.learners - 1, ..with_new_voter(shape) }
        }
        _ => shape,
    }
}

fn without_member(observed: &ObservedCluster, id: MemberId) -> VoterCounts {
    let left = observed.members.iter().filter(|seen| seen.member.id != id).cloned().collect();
    ObservedCluster { members: left, leader: observed.leader }.voter_counts()
}

fn removal_steps(observed: &ObservedCluster, id: MemberId) -> Vec<PlanStep> {
    observed
        .must_hand_over(id)
        .then_some(PlanStep::HandOver)
        .into_iter()
        .chain([PlanStep::Remove])
        .collect()
}
