//! Predicts the cluster's verdict on a change (the strict check of `muster-node` and etcd), and the
//! risks that the cluster doesn't mention.

use super::{
    ObservedCluster, ObservedMember, PlanObjection, RequestedChange, VoterCounts, Warning, replace,
    rules,
};
use crate::cluster::MemberId;

/// Returns why the cluster would refuse `wanted`.
pub(super) fn objections(
    observed: &ObservedCluster,
    wanted: &RequestedChange,
) -> Vec<PlanObjection> {
    if let RequestedChange::Add { peer_urls, .. }
    | RequestedChange::Update(_, peer_urls)
    | RequestedChange::Replace { peer_urls, .. } = wanted
        && let Some(bad) = peer_urls.iter().find(|url| !is_peer_url(url))
    {
        return vec![PlanObjection::BadUrl(bad.clone())];
    }
    match wanted {
        RequestedChange::Add { name, peer_urls, is_voter } => {
            let taken = rules::name_objection(observed, name, peer_urls, None)
                .into_iter()
                .chain(rules::url_objection(observed, peer_urls, None));
            taken.chain(rules::addition_objections(observed, !is_voter)).collect()
        }
        RequestedChange::Promote(id) => observed
            .of_id(*id)
            .map(|seen| rules::promotion_objections(observed, seen))
            .unwrap_or_default(),
        RequestedChange::Update(id, peer_urls) => {
            rules::url_objection(observed, peer_urls, Some(*id)).into_iter().collect()
        }
        RequestedChange::Remove(id) => {
            rules::removal_objection(observed, *id).into_iter().collect()
        }
        RequestedChange::Replace { old, name, peer_urls } => {
            replace::objections(observed, *old, name, peer_urls)
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

/// Warns of a new URL without TLS if any present URL of a member has TLS.
fn plain_url_warning(observed: &ObservedCluster, wanted: &RequestedChange) -> Option<Warning> {
    let (RequestedChange::Add { peer_urls, .. }
    | RequestedChange::Update(_, peer_urls)
    | RequestedChange::Replace { peer_urls, .. }) = wanted
    else {
        return None;
    };
    let updated = match wanted {
        RequestedChange::Update(id, _) => Some(*id),
        _ => None,
    };
    let others = observed.members.iter().filter(|seen| Some(seen.member.id) != updated);
    let mut known = others.flat_map(|seen| &seen.member.peer_urls);
    let url = peer_urls.iter().find(|url| url.starts_with("http:"))?;
    known.any(|url| url.starts_with("https:")).then(|| Warning::WithoutTls(url.clone()))
}

/// Returns the risks of the change `wanted`, without the reasons to refuse it. `after` are the
/// numbers of voters and learners after the change.
pub(super) fn warnings(
    observed: &ObservedCluster,
    wanted: &RequestedChange,
    after: VoterCounts,
) -> Vec<Warning> {
    let before = observed.voter_counts();
    let mut warnings = Vec::new();
    let silent = |but: MemberId| {
        let others =
            observed.members.iter().filter(|seen| seen.member.id != but && seen.is_voter());
        rules::labels(others.filter(|seen| !seen.is_answering()))
    };
    match wanted {
        RequestedChange::Add { is_voter: true, .. } => {
            let waiting = VoterCounts { answering: before.answering, ..after };
            warnings.push(Warning::CountsAsFailed { spare: waiting.spare_voters() });
        }
        RequestedChange::Remove(id)
            if observed.of_id(*id).is_some_and(ObservedMember::is_voter) =>
        {
            let silent = silent(*id);
            if observed.of_id(*id).is_some_and(ObservedMember::is_answering) && !silent.is_empty() {
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
                replace::predict_early_removal(observed, *old, peer_urls)
                    .map(Warning::RemovesFirst),
            );
        }
        RequestedChange::Add { .. } | RequestedChange::Promote(_) | RequestedChange::Remove(_) => {}
    }
    warnings.extend(plain_url_warning(observed, wanted));
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
    warnings.extend(
        observed.members.iter().filter(waits).map(|seen| Warning::LearnerWaits(seen.label())),
    );
    warnings
}
