//! Adding a member, perhaps in the place of another one: the order of the steps, and the next step.
//!
//! Two drivers take these steps: the operator's `member replace`, and the leader's agent, which
//! carries out join tickets.
//!
//! Where possible, the new member is added first: as a learner, which lowers no tolerance, then as
//! a voter. Only then is the old one removed, so the cluster never has fewer copies than before. If
//! the old member has failed, the cluster may refuse an addition (two of three voters are no quorum
//! of four). The failed member is removed first then. Its removal costs nothing, since it is in no
//! quorum now. This order is taken only if the cluster itself refuses the addition. An old member
//! that doesn't answer here may still answer the leader.
//!
//! The next step follows from the list of members, and from which operation removed the old one. So
//! a driver that was killed halfway can begin again and goes on where it stopped.

use super::{
    MemberState, ObservedCluster, ObservedMember, PlanObjection, PlanStep, VoterCounts,
    removal_steps, rules, with_new_voter, without_member,
};
use crate::cluster::{MemberId, RemovalOrigin};

/// The facts that the next step follows from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplacementFacts<'a> {
    /// The members and their observed states.
    pub observed: &'a ObservedCluster,
    /// The member to be replaced; `None` if the new member replaces nobody.
    pub old: Option<MemberId>,
    /// Peer URLs of the new member.
    pub peer_urls: &'a [String],
    /// Origin of the removal of the old member, once that member is gone.
    pub removal_origin: RemovalOrigin,
    /// Whether the cluster has refused to add the new member because too few voters are healthy.
    pub is_addition_refused: bool,
}

/// The next step of a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplacementStep {
    /// Find out which operation has removed the old member, which is gone.
    FindRemover(MemberId),
    /// Give up: another operation has removed the old member, so the new member would make the
    /// cluster larger than intended.
    GiveUp {
        /// The old member, which is gone.
        old: MemberId,
        /// The new member, if it has been added as a learner.
        learner: Option<MemberId>,
    },
    /// Add the new member, as a learner.
    Add,
    /// Wait until somebody starts the new member.
    AwaitStart(MemberId),
    /// Wait until the new member has caught up.
    AwaitSync(MemberId, MemberState),
    /// Make the new member a voter.
    Promote(MemberId),
    /// Move the leadership from the old member to another voter.
    HandOver(MemberId),
    /// Remove the old member.
    Remove(MemberId),
    /// The replacement is complete; this is the new member.
    Done(MemberId),
}

/// Why the old member is removed before the new one is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EarlyRemovalReason {
    /// The new member is to have a peer URL of the old one, and no two members can have it.
    SharedUrl,
    /// The old member is a learner. It has no vote, and the cluster may have room for only one
    /// learner.
    Learner,
    /// The old member doesn't answer, and the cluster refuses the new one because of that.
    Failed,
}

impl ReplacementFacts<'_> {
    /// Returns the next step.
    pub(crate) fn next_step(&self) -> ReplacementStep {
        let old = self.old.and_then(|id| self.observed.of_id(id)).map(|seen| seen.member.id);
        let new = self.observed.find_by_peer_urls(self.peer_urls, self.old);
        let voter = new.filter(|new| new.is_voter());
        // A new member that is a voter has its place already. Otherwise check that this replacement
        // has freed the old member's place.
        if let Some(gone) = self.old
            && old.is_none()
            && voter.is_none()
        {
            match self.removal_origin {
                RemovalOrigin::Unknown => return ReplacementStep::FindRemover(gone),
                RemovalOrigin::Foreign => {
                    let learner = new.map(|new| new.member.id);
                    return ReplacementStep::GiveUp { old: gone, learner };
                }
                RemovalOrigin::Own => {}
            }
        }
        let Some(new) = new else {
            return match old.filter(|old| self.early_removal_reason(*old).is_some()) {
                Some(old) => self.removal_step(old),
                None => ReplacementStep::Add,
            };
        };
        let id = new.member.id;
        match (new.state, old) {
            (MemberState::NotStarted, _) => ReplacementStep::AwaitStart(id),
            (state, _) if voter.is_none() && state.is_in_sync() => ReplacementStep::Promote(id),
            (state, _) if voter.is_none() => ReplacementStep::AwaitSync(id, state),
            (_, Some(old)) => self.removal_step(old),
            (_, None) => ReplacementStep::Done(id),
        }
    }

    /// Returns whether the old member is removed first if the cluster refuses to add the new one.
    pub(crate) fn is_old_removed_first_if_addition_refused(&self) -> bool {
        let refused = Self { is_addition_refused: true, ..*self };
        refused.next_step() != ReplacementStep::Add
    }

    fn removal_step(&self, old: MemberId) -> ReplacementStep {
        if self.observed.must_hand_over(old) {
            ReplacementStep::HandOver(old)
        } else {
            ReplacementStep::Remove(old)
        }
    }

    fn early_removal_reason(&self, old: MemberId) -> Option<EarlyRemovalReason> {
        let Self { observed, peer_urls, .. } = self;
        let seen = observed.of_id(old)?;
        if observed.find_by_peer_urls(peer_urls, Some(old)).is_some() {
            // The new member has been added already, so the old member isn't removed before that.
            return None;
        }
        if seen.member.peer_urls.iter().any(|url| peer_urls.contains(url)) {
            return Some(EarlyRemovalReason::SharedUrl);
        }
        if !seen.is_voter() {
            return Some(EarlyRemovalReason::Learner);
        }
        let is_failed = !seen.is_answering() && rules::removal_objection(observed, old).is_none();
        (is_failed && self.is_addition_refused).then_some(EarlyRemovalReason::Failed)
    }
}

/// Predicts why the old member will have to be removed before the new one is added. `None` if it
/// won't.
pub(super) fn predict_early_removal(
    observed: &ObservedCluster,
    old: MemberId,
    peer_urls: &[String],
) -> Option<EarlyRemovalReason> {
    let is_addition_refused = rules::addition_objections(observed, true)
        .iter()
        .any(|objection| matches!(objection, PlanObjection::Unhealthy { .. }));
    let removal_origin = RemovalOrigin::Unknown;
    let facts = ReplacementFacts {
        observed,
        old: Some(old),
        peer_urls,
        removal_origin,
        is_addition_refused,
    };
    facts.early_removal_reason(old)
}

/// Returns the numbers of voters and learners after the replacement, and its steps.
pub(super) fn steps(
    observed: &ObservedCluster,
    old: MemberId,
    peer_urls: &[String],
) -> (VoterCounts, Vec<PlanStep>) {
    let comes =
        [PlanStep::Add { is_voter: false }, PlanStep::Start, PlanStep::CatchUp, PlanStep::Promote];
    let goes = removal_steps(observed, old);
    let left = without_member(observed, old);
    let after = with_new_voter(left);
    let new = observed.find_by_peer_urls(peer_urls, Some(old));
    let steps = match new {
        // An earlier run has added the new member: skip the steps that it completed.
        Some(ObservedMember { state: MemberState::NotStarted, .. }) => {
            [&comes[1..], &goes].concat()
        }
        Some(seen) if !seen.is_voter() => [&comes[2..], &goes].concat(),
        Some(_) => goes,
        None if predict_early_removal(observed, old, peer_urls).is_some() => {
            [&goes[..], &comes].concat()
        }
        None => [&comes[..], &goes].concat(),
    };
    let after = match new {
        None => after,
        Some(seen) if seen.is_voter() => left,
        Some(_) => VoterCounts { learners: left.learners - 1, ..after },
    };
    (after, steps)
}

/// Returns why the cluster would refuse the replacement.
pub(super) fn objections(
    observed: &ObservedCluster,
    old: MemberId,
    name: &str,
    peer_urls: &[String],
) -> Vec<PlanObjection> {
    if observed.find_by_peer_urls(peer_urls, Some(old)).is_some() {
        return Vec::new();
    }
    let goes_first = predict_early_removal(observed, old, peer_urls).is_some();
    // If the old member is removed first, its name is free when the new one is added.
    let taken = rules::name_objection(observed, name, peer_urls, goes_first.then_some(old));
    let refused = if goes_first {
        rules::removal_objection(observed, old).into_iter().collect()
    } else {
        rules::addition_objections(observed, true)
    };
    taken.into_iter().chain(refused).collect()
}
