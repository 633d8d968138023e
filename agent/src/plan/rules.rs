//! The reasons for which the cluster refuses a single change, as far as an agent can predict them
//! from the members' observed states.

use member_rules::{DEFAULT_MAX_LEARNERS, QuorumObjection};

use super::{ObservedCluster, ObservedMember, PlanObjection};
use crate::cluster::MemberId;

pub(super) fn url_objection(
    observed: &ObservedCluster,
    peer_urls: &[String],
    but: Option<MemberId>,
) -> Option<PlanObjection> {
    observed.find_by_peer_urls(peer_urls, but).map(|seen| PlanObjection::UrlTaken(seen.label()))
}

pub(super) fn name_objection(
    observed: &ObservedCluster,
    name: &str,
    peer_urls: &[String],
    but: Option<MemberId>,
) -> Option<PlanObjection> {
    let seen = observed.find_by_name(name, peer_urls, but)?;
    Some(PlanObjection::NameTaken { name: name.to_owned(), id: seen.member.id })
}

/// Returns the labels of these members.
pub(super) fn labels<'a>(seen: impl Iterator<Item = &'a ObservedMember>) -> Vec<String> {
    seen.map(ObservedMember::label).collect()
}

/// Converts an objection, and adds the labels of the members that cause it.
fn name_members(observed: &ObservedCluster, objection: QuorumObjection) -> PlanObjection {
    let voters = || observed.members.iter().filter(|seen| seen.is_voter());
    match objection {
        QuorumObjection::NotEnoughStarted { started, needed } => {
            let who = labels(voters().filter(|seen| !seen.member.is_started()));
            PlanObjection::NotStarted { started, needed, who }
        }
        QuorumObjection::Unhealthy { healthy, needed } => {
            let who = labels(voters().filter(|seen| !seen.is_answering()));
            PlanObjection::Unhealthy { healthy, needed, who }
        }
    }
}

/// Returns the objections to adding one more member.
pub(super) fn addition_objections(
    observed: &ObservedCluster,
    is_learner: bool,
) -> Vec<PlanObjection> {
    let view = observed.view();
    let named = |objection| name_members(observed, objection);
    let mut objections: Vec<_> =
        view.addition_objections(is_learner).into_iter().map(named).collect();
    let learner = observed.members.iter().find(|seen| !seen.is_voter());
    if let Some(learner) = learner
        && is_learner
        && !view.has_room_for_learner(DEFAULT_MAX_LEARNERS)
    {
        objections.push(PlanObjection::TooManyLearners(learner.label()));
    }
    objections
}

/// Returns the objection to removing this member, if there is one.
pub(super) fn removal_objection(observed: &ObservedCluster, id: MemberId) -> Option<PlanObjection> {
    observed.of_id(id).filter(|seen| seen.is_voter())?;
    if observed.voter_counts().voters == 1 {
        return Some(PlanObjection::LastVoter);
    }
    observed.view().removal_objection(id.0).map(|objection| name_members(observed, objection))
}

/// Returns the objections to making this member a voter.
pub(super) fn promotion_objections(
    observed: &ObservedCluster,
    seen: &ObservedMember,
) -> Vec<PlanObjection> {
    if seen.is_voter() {
        return vec![PlanObjection::NotALearner(seen.label())];
    }
    let is_late = !seen.state.is_in_sync();
    let late = is_late.then(|| PlanObjection::NotInSync(seen.label(), seen.state));
    let quorum = observed.view().promotion_objection();
    late.into_iter().chain(quorum.map(|objection| name_members(observed, objection))).collect()
}
