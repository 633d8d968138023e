//! Another member in the place of one: in which order, and what comes next.
//!
//! The new one comes first wherever that is possible: as a learner, which costs nothing, then with a
//! vote; then the old one goes. So at no time are there fewer copies than before. Where one has
//! failed, the cluster may refuse to be added to (of three, two are no quorum of four); then the
//! failed one goes first, which costs nothing either, since it is in no quorum that is needed now.
//!
//! What comes next is read off the list of members alone, so that whoever is killed in the middle
//! goes on where it stopped.

use super::{
    IN_SYNC_ENTRIES, Objection, Seen, Shape, Sight, State, Step, one_less, one_more, removal, rules,
};
use crate::cluster::MemberId;

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The new one is added, as a learner.
    Add,
    /// Somebody has to start it.
    AwaitStart(MemberId),
    /// It has to catch up.
    AwaitSync(MemberId, State),
    /// It gets its vote.
    Promote(MemberId),
    /// The old one goes.
    Remove(MemberId),
    /// Everything is done.
    Done(MemberId),
}

/// What comes next, where `old` is to be replaced by a member at `peer_urls`. `old` is absent once it
/// has been removed.
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

/// Why the old one has to go first, if it has to.
pub(super) fn why_first(
    sight: &Sight,
    old: MemberId,
    peer_urls: &[String],
) -> Option<&'static str> {
    let seen = sight.of_id(old)?;
    if sight.at(peer_urls, Some(old)).is_some() {
        // The new one is there already.
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

/// The shape in the end, and how it is come to.
pub(super) fn steps(sight: &Sight, old: MemberId, peer_urls: &[String]) -> (Shape, Vec<Step>) {
    let comes = [Step::Add { is_voter: false }, Step::Start, Step::CatchUp, Step::Promote];
    let goes = removal(sight, old);
    let left = one_less(sight, old);
    let after = one_more(left);
    let new = sight.at(peer_urls, Some(old));
    let steps = match new {
        // A run before this one has come so far.
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

/// Why it would be refused.
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
    // Where the old one goes first, its name is free by the time that it is taken.
    let taken = rules::name_taken(sight, name, peer_urls, goes_first.then_some(old));
    let refused = if goes_first {
        rules::may_remove(sight, old).into_iter().collect()
    } else {
        rules::may_add(sight, true)
    };
    taken.into_iter().chain(refused).collect()
}
