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
    IN_SYNC_ENTRIES, Objection, Seen, Shape, Sight, State, Step, one_less, one_more, removal, rules,
};
use crate::cluster::MemberId;

/// The next step of a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Add the new member, as a learner.
    Add,
    /// Wait until a person starts the new member.
    AwaitStart(MemberId),
    /// Wait until the new member has caught up.
    AwaitSync(MemberId, State),
    /// Make the new member a voter.
    Promote(MemberId),
    /// Remove the old member.
    Remove(MemberId),
    /// The replacement is complete; this is the new member.
    Done(MemberId),
}

/// Returns the next step of replacing `old` by a member at `peer_urls`. `old` is `None` once it has
/// been removed.
pub(crate) fn next(sight: &Sight, old: Option<MemberId>, peer_urls: &[String]) -> Next {
    let Some(new) = sight.at(peer_urls, old) else {
        return match old {
            Some(old) if why_first(sight, old, peer_urls).is_some() => Next::Remove(old),
            _ => Next::Add,
        };
    };
    let id = new.member.id;
    match (new.state, old) {
        (State::NotStarted, _) => Next::AwaitStart(id),
        (State::Answers { behind: Some(behind) }, _)
            if new.member.is_learner && behind <= IN_SYNC_ENTRIES =>
        {
            Next::Promote(id)
        }
        (state, _) if new.member.is_learner => Next::AwaitSync(id, state),
        (_, Some(old)) => Next::Remove(old),
        (_, None) => Next::Done(id),
    }
}

/// Returns why the old member has to be removed before the new one is added, or `None` if not.
pub(super) fn why_first(
    sight: &Sight,
    old: MemberId,
    peer_urls: &[String],
) -> Option<&'static str> {
    let seen = sight.of_id(old)?;
    if sight.at(peer_urls, Some(old)).is_some() {
        // The new member is added already, so the order is decided.
        return None;
    }
    if seen.member.peer_urls.iter().any(|url| peer_urls.contains(url)) {
        return Some("the new one is to have its URL");
    }
    if !seen.votes() {
        return Some("it is a learner, and there is room for one");
    }
    let refused = rules::may_add(sight, true)
        .iter()
        .any(|objection| matches!(objection, Objection::Unhealthy { .. }));
    (refused && !seen.answers() && rules::may_remove(sight, old).is_none()).then_some(
        "it doesn't answer, and the cluster takes nobody in while too few answer for one member more",
    )
}

/// Returns the shape after the replacement, and its steps.
pub(super) fn steps(sight: &Sight, old: MemberId, peer_urls: &[String]) -> (Shape, Vec<Step>) {
    let comes = [Step::Add { is_voter: false }, Step::Start, Step::CatchUp, Step::Promote];
    let goes = removal(sight, old);
    let left = one_less(sight, old);
    let after = one_more(left);
    let new = sight.at(peer_urls, Some(old));
    let steps = match new {
        // An earlier run has added the new member: skip the steps that it completed.
        Some(Seen { state: State::NotStarted, .. }) => [&comes[1..], &goes].concat(),
        Some(seen) if !seen.votes() => [&comes[2..], &goes].concat(),
        Some(_) => goes,
        None if why_first(sight, old, peer_urls).is_some() => [&goes[..], &comes].concat(),
        None => [&comes[..], &goes].concat(),
    };
    let after = match new {
        None => after,
        Some(seen) if seen.votes() => left,
        Some(_) => Shape { learners: left.learners - 1, ..after },
    };
    (after, steps)
}

/// Returns why the cluster would refuse the replacement.
pub(super) fn objections(
    sight: &Sight,
    old: MemberId,
    name: &str,
    peer_urls: &[String],
) -> Vec<Objection> {
    if sight.at(peer_urls, Some(old)).is_some() {
        return Vec::new();
    }
    let goes_first = why_first(sight, old, peer_urls).is_some();
    // If the old member is removed first, its name is free when the new one is added.
    let taken = rules::name_taken(sight, name, peer_urls, goes_first.then_some(old));
    let refused = if goes_first {
        rules::may_remove(sight, old).into_iter().collect()
    } else {
        rules::may_add(sight, true)
    };
    taken.into_iter().chain(refused).collect()
}
