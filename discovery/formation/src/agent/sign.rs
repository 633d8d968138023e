//! S1 to S7: the conditions on which an agent signs a proposal.
//!
//! Most are judged once, when the proposal comes, and a failure is a nack. Two may become true
//! while the agent waits:
//!
//! * S3, the probe matrix: failed probes are reported to the service as they are.
//! * S6, the releases of earlier lists: other agents may be about to sign theirs.

use std::collections::BTreeMap;

use crate::agent::directory::Directory;
use crate::agent::event::{Objection, Offer};
use crate::agent::journal::{Bound, Journal, Member};
use crate::agent::step::SKEW_ALLOWED;
use crate::fitness;
use crate::rules::{Rule, Rules};
use crate::values::{Epoch, KeyId, Record, Seat};

/// Checks S4, S1, S2, S5 and S7, in this order. With a wrong clock records seem to be wrong too, so
/// S4 comes first.
pub(super) fn judge(rules: &Rules, journal: &Journal, offer: &Offer) -> Result<(), Objection> {
    s4_skew(offer)?;
    s1_records(journal, offer)?;
    s2_no_duplicates(offer)?;
    s5_epoch(rules, journal, offer)?;
    s7_nothing_begun(rules, journal, offer)
}

/// S1: every record is valid under statement and grant, and this agent's own is the one it sent.
fn s1_records(journal: &Journal, offer: &Offer) -> Result<(), Objection> {
    if let Some((&seat, why)) = offer.invalid.iter().next() {
        return Err(Objection::InvalidRecord { seat, why: why.clone() });
    }
    let mine = journal.record.as_ref().ok_or(Objection::NotMyRecord)?;
    let proposal = &offer.proposal;
    if proposal.statement != offer.statement
        || proposal.cluster != mine.cluster
        || proposal.records.len() != usize::from(offer.size)
    {
        return Err(Objection::ForeignList);
    }
    // `hash` is over the bytes as received: equal hashes are equal bytes.
    let listed = proposal.record_of(journal.key).ok_or(Objection::NotMyRecord)?;
    if listed.hash != mine.hash || listed.token_hash != mine.token_hash {
        return Err(Objection::NotMyRecord);
    }
    Ok(())
}

/// S2: every record may stand in a list, and no two share a name, URL, key, incarnation or machine.
fn s2_no_duplicates(offer: &Offer) -> Result<(), Objection> {
    let seats: Vec<(Seat, &Record)> =
        (1..).zip(offer.proposal.records.iter().map(AsRef::as_ref)).collect();
    for (place, &(seat, record)) in seats.iter().enumerate() {
        fitness::fit(record, offer.permissions).map_err(|why| Objection::Unfit { seat, why })?;
        for &(other, second) in &seats[place + 1..] {
            fitness::together(record, second, offer.permissions)
                .map_err(|clash| Objection::Duplicate { one: seat, other, clash })?;
        }
    }
    Ok(())
}

fn s4_skew(offer: &Offer) -> Result<(), Objection> {
    if offer.skew > SKEW_ALLOWED {
        let Offer { skew, is_behind, .. } = *offer;
        return Err(Objection::Skew { skew, is_behind, allowed: SKEW_ALLOWED });
    }
    Ok(())
}

/// S5: the epoch is above each one that was signed or released, and not beyond the limit. The very
/// list that was signed passes again, unless it was released.
fn s5_epoch(rules: &Rules, journal: &Journal, offer: &Offer) -> Result<(), Objection> {
    let epoch = offer.proposal.epoch;
    if is_signed(journal, offer) || !rules.on(Rule::OneListPerEpoch) {
        return Ok(());
    }
    let (highest, limit) = (journal.highest_epoch(), journal.epoch_limit());
    if epoch <= highest {
        return Err(Objection::OldEpoch { epoch, highest });
    }
    if epoch > limit { Err(Objection::EpochTooFar { epoch, limit }) } else { Ok(()) }
}

/// Whether the agent has signed this very list before and not released it since.
pub(super) fn is_signed(journal: &Journal, offer: &Offer) -> bool {
    let epoch = offer.proposal.epoch;
    journal.bound.get(&epoch).is_some_and(|bound| bound.h == offer.h) && epoch > journal.released
}

/// S6: enough members of each earlier signed list have released it that no quorum of it can ever
/// hold its document. A running node at a member's address doesn't count as a release.
pub(super) fn s6_releases(
    rules: &Rules,
    journal: &Journal,
    offer: &Offer,
    releases: &BTreeMap<KeyId, Epoch>,
) -> Result<(), Objection> {
    if !rules.on(Rule::ReleasesFirst) {
        return Ok(());
    }
    for (&epoch, bound) in &journal.bound {
        if bound.h == offer.h {
            continue;
        }
        let missing = unreleased(journal, epoch, bound, releases);
        let (need, have) = (bound.releases_needed(rules), bound.members.len() - missing.len());
        if have < need {
            return Err(Objection::Unreleased { epoch, have, need, missing: named(&missing) });
        }
    }
    Ok(())
}

/// Names the missing members with their addresses, as many as fit into a sentence.
fn named(missing: &[&Member]) -> String {
    const NAMED: usize = 3;
    let name = |member: &&Member| {
        let at = member.peer_urls.first().map_or("", |url| url.trim_start_matches("https://"));
        format!("{} at {at}", member.key)
    };
    let names: Vec<String> = missing.iter().take(NAMED).map(name).collect();
    match missing.len().saturating_sub(NAMED) {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

/// Returns the members of a signed list whose release of it hasn't come.
fn unreleased<'a>(
    journal: &Journal,
    epoch: Epoch,
    bound: &'a Bound,
    releases: &BTreeMap<KeyId, Epoch>,
) -> Vec<&'a Member> {
    let released = |key: KeyId| {
        let known = if key == journal.key {
            journal.released
        } else {
            releases.get(&key).copied().unwrap_or(0)
        };
        known >= epoch
    };
    bound.members.iter().filter(|member| !released(member.key)).collect()
}

fn s7_nothing_begun(rules: &Rules, journal: &Journal, offer: &Offer) -> Result<(), Objection> {
    if let Some(held) = &journal.held {
        return Err(Objection::Holding { epoch: held.proposal.epoch });
    }
    if rules.on(Rule::SameMachine) && journal.machine.differs_from(&offer.machine) {
        return Err(Objection::OtherMachine);
    }
    match &offer.directory {
        Directory::Blank => Ok(()),
        other => Err(Objection::NotBlank { what: other.to_string() }),
    }
}
