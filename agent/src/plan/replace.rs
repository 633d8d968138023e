//! Replacing a member: the order of the steps, and the next one.
//!
//! Where possible, the new member is added first: as a learner, which lowers no tolerance, then as
//! a voter. Only then is the old one removed, so the cluster never has fewer copies than before. If
//! the old member has failed, the cluster may refuse an addition (two of three voters are no quorum
//! of four). The failed member is removed first then. This costs nothing either, since no quorum
//! counts on it now.
//!
//! The next step follows from the list of members alone. So a command that was killed halfway can
//! be run again and goes on where it stopped.

use super::{
    IN_SYNC_ENTRIES, MemberState, ObservedCluster, ObservedMember, PlanObjection, PlanStep,
    VoterCounts, removal_steps, rules, with_new_voter, without_member,
};
use crate::cluster::MemberId;

/// The next step of a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplacementStep {
    /// Add the new member, as a learner.
    Add,
    /// Wait until a person starts the new member.
    AwaitStart(MemberId),
    /// Wait until the new member has caught up.
    AwaitSync(MemberId, MemberState),
    /// Make the new member a voter.
    Promote(MemberId),
    /// Remove the old member.
    Remove(MemberId),
    /// The replacement is complete; this is the new member.
    Done(MemberId),
}

/// Returns the next step of replacing `old` by a member at `peer_urls`. `old` is `None` once it has
/// been removed.
pub(crate) fn next_step(
    sight: &ObservedCluster,
    old: Option<MemberId>,
    peer_urls: &[String],
) -> ReplacementStep {
    let Some(new) = sight.find_by_peer_urls(peer_urls, old) else {
        return match old {
            Some(old) if why_remove_first(sight, old, peer_urls).is_some() => {
                ReplacementStep::Remove(old)
            }
            _ => ReplacementStep::Add,
        };
    };
    let id = new.member.id;
    match (new.state, old) {
        (MemberState::NotStarted, _) => ReplacementStep::AwaitStart(id),
        (MemberState::Answers { behind: Some(behind) }, _)
            if new.member.is_learner && behind <= IN_SYNC_ENTRIES =>
        {
            ReplacementStep::Promote(id)
        }
        (state, _) if new.member.is_learner => ReplacementStep::AwaitSync(id, state),
        (_, Some(old)) => ReplacementStep::Remove(old),
        (_, None) => ReplacementStep::Done(id),
    }
}

/// Returns why the old member has to be removed before the new one is added, or `None` if not.
pub(super) fn why_remove_first(
    sight: &ObservedCluster,
    old: MemberId,
    peer_urls: &[String],
) -> Option<&'static str> {
    let seen = sight.of_id(old)?;
    if sight.find_by_peer_urls(peer_urls, Some(old)).is_some() {
        // The new member is added already, so the order is decided.
        return None;
    }
    if seen.member.peer_urls.iter().any(|url| peer_urls.contains(url)) {
        return Some("the new one is to have its URL");
    }
    if !seen.is_voter() {
        return Some("it is a learner, and there is room for one");
    }
    let refused = rules::addition_objections(sight, true)
        .iter()
        .any(|objection| matches!(objection, PlanObjection::Unhealthy { .. }));
    (refused && !seen.is_answering() && rules::removal_objection(sight, old).is_none()).then_some(
        "it doesn't answer, and the cluster takes nobody in while too few answer for one member more",
    )
}

/// Returns the shape after the replacement, and its steps.
pub(super) fn steps(
    sight: &ObservedCluster,
    old: MemberId,
    peer_urls: &[String],
) -> (VoterCounts, Vec<PlanStep>) {
    let comes =
        [PlanStep::Add { is_voter: false }, PlanStep::Start, PlanStep::CatchUp, PlanStep::Promote];
    let goes = removal_steps(sight, old);
    let left = without_member(sight, old);
    let after = with_new_voter(left);
    let new = sight.find_by_peer_urls(peer_urls, Some(old));
    let steps = match new {
        // An earlier run has added the new member: skip the steps that it completed.
        Some(ObservedMember { state: MemberState::NotStarted, .. }) => {
            [&comes[1..], &goes].concat()
        }
        Some(seen) if !seen.is_voter() => [&comes[2..], &goes].concat(),
        Some(_) => goes,
        None if why_remove_first(sight, old, peer_urls).is_some() => [&goes[..], &comes].concat(),
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
    sight: &ObservedCluster,
    old: MemberId,
    name: &str,
    peer_urls: &[String],
) -> Vec<PlanObjection> {
    if sight.find_by_peer_urls(peer_urls, Some(old)).is_some() {
        return Vec::new();
    }
    let goes_first = why_remove_first(sight, old, peer_urls).is_some();
    // If the old member is removed first, its name is free when the new one is added.
    let taken = rules::name_objection(sight, name, peer_urls, goes_first.then_some(old));
    let refused = if goes_first {
        rules::removal_objection(sight, old).into_iter().collect()
    } else {
        rules::addition_objections(sight, true)
    };
    taken.into_iter().chain(refused).collect()
}
