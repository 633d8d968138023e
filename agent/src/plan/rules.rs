//! Predicts the cluster's verdict on a change (the strict check of `muster-node` and etcd), and the
//! risks that the cluster doesn't mention.

use super::{
    IN_SYNC_ENTRIES, MemberState, ObservedCluster, ObservedMember, PlanObjection, RequestedChange,
    VoterCounts, Warning, replace,
};
use crate::cluster::MemberId;

fn quorum(voters: usize) -> usize {
    voters / 2 + 1
}

/// Returns why the cluster would refuse `wanted`.
pub(super) fn objections(sight: &ObservedCluster, wanted: &RequestedChange) -> Vec<PlanObjection> {
    if let RequestedChange::Add { peer_urls, .. }
    | RequestedChange::Update(_, peer_urls)
    | RequestedChange::Replace { peer_urls, .. } = wanted
        && let Some(bad) = peer_urls.iter().find(|url| !is_peer_url(url))
    {
        return vec![PlanObjection::BadUrl(bad.clone())];
    }
    match wanted {
        RequestedChange::Add { name, peer_urls, is_voter } => {
            let taken = name_objection(sight, name, peer_urls, None)
                .into_iter()
                .chain(url_objection(sight, peer_urls, None));
            taken.chain(addition_objections(sight, !is_voter)).collect()
        }
        RequestedChange::Promote(id) => {
            sight.of_id(*id).map(|seen| promotion_objections(sight, seen)).unwrap_or_default()
        }
        RequestedChange::Update(id, peer_urls) => {
            url_objection(sight, peer_urls, Some(*id)).into_iter().collect()
        }
        RequestedChange::Remove(id) => removal_objection(sight, *id).into_iter().collect(),
        RequestedChange::Replace { old, name, peer_urls } => {
            replace::objections(sight, *old, name, peer_urls)
        }
    }
}

/// Returns whether etcd and `muster-node` accept this as a peer URL: scheme, host and port, no
/// path.
fn is_peer_url(text: &str) -> bool {
    let Some((scheme, rest)) = text.trim().split_once("://") else { return false };
    match scheme {
        // Stock etcd accepts Unix sockets; muster-node refuses them with an error of its own.
        "unix" | "unixs" => !rest.is_empty(),
        "http" | "https" => rest.rsplit_once(':').is_some_and(|(host, port)| {
            let is_address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            let is_host = match is_address {
                Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
                None => {
                    !host.is_empty() && !host.contains([':', '/', '?', '#', '@', ' ', '[', ']'])
                }
            };
            is_host && port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok()
        }),
        _ => false,
    }
}

pub(super) fn url_objection(
    sight: &ObservedCluster,
    peer_urls: &[String],
    but: Option<MemberId>,
) -> Option<PlanObjection> {
    sight.find_by_peer_urls(peer_urls, but).map(|seen| PlanObjection::UrlTaken(seen.label()))
}

pub(super) fn name_objection(
    sight: &ObservedCluster,
    name: &str,
    peer_urls: &[String],
    but: Option<MemberId>,
) -> Option<PlanObjection> {
    let seen = sight.find_by_name(name, peer_urls, but)?;
    Some(PlanObjection::NameTaken { name: name.to_owned(), id: seen.member.id })
}

/// Warns of a URL without TLS if another member's URL has TLS.
fn plain_url_warning(sight: &ObservedCluster, wanted: &RequestedChange) -> Option<Warning> {
    let (RequestedChange::Add { peer_urls, .. }
    | RequestedChange::Update(_, peer_urls)
    | RequestedChange::Replace { peer_urls, .. }) = wanted
    else {
        return None;
    };
    let mut known = sight.members.iter().flat_map(|seen| &seen.member.peer_urls);
    let url = peer_urls.iter().find(|url| url.starts_with("http:"))?;
    known.any(|url| url.starts_with("https:")).then(|| Warning::WithoutTls(url.clone()))
}

fn labels<'a>(seen: impl Iterator<Item = &'a ObservedMember>) -> Vec<String> {
    seen.map(ObservedMember::label).collect()
}

fn health_objection(sight: &ObservedCluster, needed: usize) -> Option<PlanObjection> {
    let healthy = sight.voter_counts().answering;
    let who = labels(sight.members.iter().filter(|seen| seen.is_voter() && !seen.is_answering()));
    (healthy < needed).then_some(PlanObjection::Unhealthy { healthy, needed, who })
}

fn start_objection(
    sight: &ObservedCluster,
    started: usize,
    needed: usize,
) -> Option<PlanObjection> {
    let waits = |seen: &&ObservedMember| seen.is_voter() && !seen.member.is_started();
    let who = labels(sight.members.iter().filter(waits));
    (started < needed).then_some(PlanObjection::NotStarted { started, needed, who })
}

/// Returns the objections to adding one more member.
pub(super) fn addition_objections(sight: &ObservedCluster, is_learner: bool) -> Vec<PlanObjection> {
    let voters = sight.voter_counts().voters;
    let started = sight.started_voters(None);
    let mut objections = Vec::new();
    // A second member may always join a single one, although it has not started yet.
    let is_second = started == 1 && voters == 1;
    if !(is_learner || is_second) {
        objections.extend(start_objection(sight, started, quorum(voters + 1)));
    }
    if voters > 1 {
        objections.extend(health_objection(sight, quorum(voters + 1)));
    }
    if is_learner && let Some(learner) = sight.members.iter().find(|seen| !seen.is_voter()) {
        objections.push(PlanObjection::TooManyLearners(learner.label()));
    }
    objections
}

/// Returns the objection to removing this member, if there is one.
pub(super) fn removal_objection(sight: &ObservedCluster, id: MemberId) -> Option<PlanObjection> {
    let seen = sight.of_id(id).filter(|seen| seen.is_voter())?;
    let left = sight.voter_counts().voters - 1;
    if left == 0 {
        return Some(PlanObjection::LastVoter);
    }
    let started = sight.started_voters(Some(id));
    start_objection(sight, started, quorum(left)).or_else(|| {
        // An unreachable voter is in no quorum now, so its removal can't cost one.
        if seen.is_answering() { health_objection(sight, quorum(left) + 1) } else { None }
    })
}

fn promotion_objections(sight: &ObservedCluster, seen: &ObservedMember) -> Vec<PlanObjection> {
    if seen.is_voter() {
        return vec![PlanObjection::NotALearner(seen.label())];
    }
    let in_sync = matches!(seen.state, MemberState::Answers { behind: Some(behind) } if behind <= IN_SYNC_ENTRIES);
    let late = (!in_sync).then(|| PlanObjection::NotInSync(seen.label(), seen.state));
    let started = 1 + sight.started_voters(None);
    late.into_iter()
        .chain(start_objection(sight, started, quorum(sight.voter_counts().voters + 1)))
        .collect()
}

/// Returns the risks of `wanted`, which leads to `after`, apart from the reasons to refuse it.
pub(super) fn warnings(
    sight: &ObservedCluster,
    wanted: &RequestedChange,
    after: VoterCounts,
) -> Vec<Warning> {
    let before = sight.voter_counts();
    let mut warnings = Vec::new();
    let silent = |but: MemberId| {
        let others = sight.members.iter().filter(|seen| seen.member.id != but && seen.is_voter());
        labels(others.filter(|seen| !seen.is_answering()))
    };
    match wanted {
        RequestedChange::Add { is_voter: true, .. } => {
            let waiting = VoterCounts { answering: before.answering, ..after };
            warnings.push(Warning::CountsAsFailed { spare: waiting.spare_voters() });
        }
        RequestedChange::Remove(id) if sight.of_id(*id).is_some_and(ObservedMember::is_voter) => {
            let silent = silent(*id);
            if sight.of_id(*id).is_some_and(ObservedMember::is_answering) && !silent.is_empty() {
                warnings.push(Warning::RemovesHealthy { silent });
            }
            if before.voters == 2 {
                warnings.push(Warning::OneOfTwo);
            }
        }
        RequestedChange::Update(..) => {
            let restarting =
                VoterCounts { answering: before.answering.saturating_sub(1), ..before };
            warnings.push(Warning::RestartCosts { spare: restarting.spare_voters() });
        }
        RequestedChange::Replace { old, peer_urls, .. } => {
            warnings.extend(
                replace::why_remove_first(sight, *old, peer_urls).map(Warning::RemovesFirst),
            );
        }
        RequestedChange::Add { .. } | RequestedChange::Promote(_) | RequestedChange::Remove(_) => {}
    }
    warnings.extend(plain_url_warning(sight, wanted));
    if after.tolerance() < before.tolerance() {
        warnings.push(Warning::LessTolerance(before.tolerance(), after.tolerance()));
    }
    if after.voters > 0 && after.voters.is_multiple_of(2) && after.voters != before.voters {
        warnings.push(Warning::EvenSize(after.voters));
    }
    let meant = match wanted {
        RequestedChange::Promote(id)
        | RequestedChange::Remove(id)
        | RequestedChange::Replace { old: id, .. } => Some(*id),
        RequestedChange::Add { .. } | RequestedChange::Update(..) => None,
    };
    let waits = |seen: &&ObservedMember| !seen.is_voter() && Some(seen.member.id) != meant;
    warnings
        .extend(sight.members.iter().filter(waits).map(|seen| Warning::LearnerWaits(seen.label())));
    warnings
}
