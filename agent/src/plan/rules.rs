//! Predicts the cluster's verdict on a change (the strict check of `muster-node` and etcd), and the
//! risks that the cluster doesn't mention.

use super::{IN_SYNC_ENTRIES, Objection, Seen, Shape, Sight, State, Wanted, Warning, replace};
use crate::cluster::MemberId;

fn quorum(voters: usize) -> usize {
    voters / 2 + 1
}

/// Returns why the cluster would refuse `wanted`.
pub(super) fn objections(sight: &Sight, wanted: &Wanted) -> Vec<Objection> {
    if let Wanted::Add { peer_urls, .. }
    | Wanted::Update(_, peer_urls)
    | Wanted::Replace { peer_urls, .. } = wanted
        && let Some(bad) = peer_urls.iter().find(|url| !is_peer_url(url))
    {
        return vec![Objection::BadUrl(bad.clone())];
    }
    match wanted {
        Wanted::Add { name, peer_urls, is_voter } => {
            let taken = name_taken(sight, name, peer_urls, None)
                .into_iter()
                .chain(taken(sight, peer_urls, None));
            taken.chain(may_add(sight, !is_voter)).collect()
        }
        Wanted::Promote(id) => {
            sight.of_id(*id).map(|seen| may_promote(sight, seen)).unwrap_or_default()
        }
        Wanted::Update(id, peer_urls) => taken(sight, peer_urls, Some(*id)).into_iter().collect(),
        Wanted::Remove(id) => may_remove(sight, *id).into_iter().collect(),
        Wanted::Replace { old, name, peer_urls } => {
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

pub(super) fn taken(
    sight: &Sight,
    peer_urls: &[String],
    but: Option<MemberId>,
) -> Option<Objection> {
    sight.at(peer_urls, but).map(|seen| Objection::UrlTaken(seen.label()))
}

pub(super) fn name_taken(
    sight: &Sight,
    name: &str,
    peer_urls: &[String],
    but: Option<MemberId>,
) -> Option<Objection> {
    let seen = sight.named(name, peer_urls, but)?;
    Some(Objection::NameTaken { name: name.to_owned(), id: seen.member.id })
}

/// Warns of a URL without TLS if another member's URL has TLS.
fn plain(sight: &Sight, wanted: &Wanted) -> Option<Warning> {
    let (Wanted::Add { peer_urls, .. }
    | Wanted::Update(_, peer_urls)
    | Wanted::Replace { peer_urls, .. }) = wanted
    else {
        return None;
    };
    let mut known = sight.members.iter().flat_map(|seen| &seen.member.peer_urls);
    let url = peer_urls.iter().find(|url| url.starts_with("http:"))?;
    known.any(|url| url.starts_with("https:")).then(|| Warning::Plain(url.clone()))
}

fn labels<'a>(seen: impl Iterator<Item = &'a Seen>) -> Vec<String> {
    seen.map(Seen::label).collect()
}

fn unhealthy(sight: &Sight, needed: usize) -> Option<Objection> {
    let healthy = sight.shape().answering;
    let who = labels(sight.members.iter().filter(|seen| seen.votes() && !seen.answers()));
    (healthy < needed).then_some(Objection::Unhealthy { healthy, needed, who })
}

fn not_started(sight: &Sight, started: usize, needed: usize) -> Option<Objection> {
    let waits = |seen: &&Seen| seen.votes() && !seen.member.is_started();
    let who = labels(sight.members.iter().filter(waits));
    (started < needed).then_some(Objection::NotStarted { started, needed, who })
}

/// Returns the objections to adding one more member.
pub(super) fn may_add(sight: &Sight, is_learner: bool) -> Vec<Objection> {
    let voters = sight.shape().voters;
    let started = sight.started_voters(None);
    let mut objections = Vec::new();
    // A second member may always join a single one, although it has not started yet.
    let is_second = started == 1 && voters == 1;
    if !(is_learner || is_second) {
        objections.extend(not_started(sight, started, quorum(voters + 1)));
    }
    if voters > 1 {
        objections.extend(unhealthy(sight, quorum(voters + 1)));
    }
    if is_learner && let Some(learner) = sight.members.iter().find(|seen| !seen.votes()) {
        objections.push(Objection::TooManyLearners(learner.label()));
    }
    objections
}

/// Returns the objection to removing this member, if there is one.
pub(super) fn may_remove(sight: &Sight, id: MemberId) -> Option<Objection> {
    let seen = sight.of_id(id).filter(|seen| seen.votes())?;
    let left = sight.shape().voters - 1;
    if left == 0 {
        return Some(Objection::LastVoter);
    }
    let started = sight.started_voters(Some(id));
    not_started(sight, started, quorum(left)).or_else(|| {
        // An unreachable voter is in no quorum now, so its removal can't cost one.
        if seen.answers() { unhealthy(sight, quorum(left) + 1) } else { None }
    })
}

fn may_promote(sight: &Sight, seen: &Seen) -> Vec<Objection> {
    if seen.votes() {
        return vec![Objection::NotALearner(seen.label())];
    }
    let in_sync =
        matches!(seen.state, State::Answers { behind: Some(behind) } if behind <= IN_SYNC_ENTRIES);
    let late = (!in_sync).then(|| Objection::NotInSync(seen.label(), seen.state));
    let started = 1 + sight.started_voters(None);
    late.into_iter().chain(not_started(sight, started, quorum(sight.shape().voters + 1))).collect()
}

/// Returns the risks of `wanted`, which leads to `after`, apart from the reasons to refuse it.
pub(super) fn warnings(sight: &Sight, wanted: &Wanted, after: Shape) -> Vec<Warning> {
    let before = sight.shape();
    let mut warnings = Vec::new();
    let silent = |but: MemberId| {
        let others = sight.members.iter().filter(|seen| seen.member.id != but && seen.votes());
        labels(others.filter(|seen| !seen.answers()))
    };
    match wanted {
        Wanted::Add { is_voter: true, .. } => {
            let waiting = Shape { answering: before.answering, ..after };
            warnings.push(Warning::CountsAsFailed { spare: waiting.spare() });
        }
        Wanted::Remove(id) if sight.of_id(*id).is_some_and(Seen::votes) => {
            let silent = silent(*id);
            if sight.of_id(*id).is_some_and(Seen::answers) && !silent.is_empty() {
                warnings.push(Warning::RemovesHealthy { silent });
            }
            if before.voters == 2 {
                warnings.push(Warning::OneOfTwo);
            }
        }
        Wanted::Update(..) => {
            let restarting = Shape { answering: before.answering.saturating_sub(1), ..before };
            warnings.push(Warning::RestartCosts { spare: restarting.spare() });
        }
        Wanted::Replace { old, peer_urls, .. } => {
            warnings.extend(replace::why_first(sight, *old, peer_urls).map(Warning::RemovesFirst));
        }
        Wanted::Add { .. } | Wanted::Promote(_) | Wanted::Remove(_) => {}
    }
    warnings.extend(plain(sight, wanted));
    if after.tolerance() < before.tolerance() {
        warnings.push(Warning::LessTolerance(before.tolerance(), after.tolerance()));
    }
    if after.voters > 0 && after.voters.is_multiple_of(2) && after.voters != before.voters {
        warnings.push(Warning::EvenSize(after.voters));
    }
    let meant = match wanted {
        Wanted::Promote(id) | Wanted::Remove(id) | Wanted::Replace { old: id, .. } => Some(*id),
        Wanted::Add { .. } | Wanted::Update(..) => None,
    };
    let waits = |seen: &&Seen| !seen.votes() && Some(seen.member.id) != meant;
    warnings
        .extend(sight.members.iter().filter(waits).map(|seen| Warning::LearnerWaits(seen.label())));
    warnings
}
