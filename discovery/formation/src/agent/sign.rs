//! The signing rules S1 to S7: an agent signs a proposed list only if all of them hold.
//!
//! * S1: every record in the list is valid, and the agent's own is the one that it sent.
//! * S2: no two seats share a name, URL, key, incarnation or machine.
//! * S3: the agent has probed all other members. A failed probe is no reason to refuse the list: it
//!   is reported to the service.
//! * S4: the agent's clock and the service's differ by no more than [`MAX_CLOCK_SKEW`].
//! * S5: the list's epoch is above every one that the agent has signed or released.
//! * S6: enough members of each list that the agent has signed have released it.
//! * S7: the agent holds no commit document, its node's directory is blank, and the machine is the
//!   one on which its key was made.
//!
//! All except S3 and S6 are judged once, when the proposal arrives, and a failure is a nack. S6 can
//! become true while the agent waits, because other agents can still sign their releases.

use std::collections::BTreeMap;

use crate::agent::directory::DirectoryKind;
use crate::agent::event::{ExaminedProposal, ProposalObjection};
use crate::agent::journal::{Journal, SignedList, SignedListMember};
use crate::agent::step::MAX_CLOCK_SKEW;
use crate::fitness;
use crate::rules::{Rule, Rules};
use crate::values::{AgentKey, AgentRecord, Epoch, Seat};

/// Checks the signing rules S4, S1, S2, S5 and S7, in this order. With a wrong clock records seem
/// to be wrong too, so S4 comes first.
pub(super) fn check_proposal(
    rules: &Rules,
    journal: &Journal,
    offer: &ExaminedProposal,
) -> Result<(), ProposalObjection> {
    check_s4_clock_skew(offer)?;
    check_s1_records(journal, offer)?;
    check_s2_duplicates(offer)?;
    check_s5_epoch(rules, journal, offer)?;
    check_s7_fresh_start(rules, journal, offer)
}

/// S1: every record is valid under statement and grant, and this agent's own is the one that it
/// sent.
fn check_s1_records(journal: &Journal, offer: &ExaminedProposal) -> Result<(), ProposalObjection> {
    if let Some((&seat, why)) = offer.invalid_records.iter().next() {
        return Err(ProposalObjection::InvalidRecord { seat, why: why.clone() });
    }
    let mine = journal.record.as_ref().ok_or(ProposalObjection::NotMyRecord)?;
    let proposal = &offer.proposal;
    if proposal.statement != offer.statement
        || proposal.cluster != mine.cluster
        || proposal.records.len() != usize::from(offer.size)
    {
        return Err(ProposalObjection::ForeignList);
    }
    // `hash` covers the record's bytes as received, so equal hashes mean equal bytes.
    let listed = proposal.record_of(journal.key).ok_or(ProposalObjection::NotMyRecord)?;
    if listed.hash != mine.hash || listed.token_hash != mine.token_hash {
        return Err(ProposalObjection::NotMyRecord);
    }
    Ok(())
}

/// S2: every record is fit for a list of members, and no two share a name, URL, key, incarnation or
/// machine. If the statement spreads the members over zones, no zone has a majority.
fn check_s2_duplicates(offer: &ExaminedProposal) -> Result<(), ProposalObjection> {
    let seats: Vec<(Seat, &AgentRecord)> =
        (1..).zip(offer.proposal.records.iter().map(AsRef::as_ref)).collect();
    for (place, &(seat, record)) in seats.iter().enumerate() {
        fitness::check_record(record, offer.permissions)
            .map_err(|why| ProposalObjection::Unfit { seat, why })?;
        if offer.spreads_zones {
            let before = seats[..place].iter().map(|(_, other)| other.zone.as_deref());
            fitness::check_zone(record.zone.as_deref(), before, seats.len())
                .map_err(|why| ProposalObjection::Zone { seat, why })?;
        }
        for &(other, second) in &seats[place + 1..] {
            fitness::check_pair(record, second, offer.permissions)
                .map_err(|clash| ProposalObjection::Duplicate { one: seat, other, clash })?;
        }
    }
    Ok(())
}

fn check_s4_clock_skew(offer: &ExaminedProposal) -> Result<(), ProposalObjection> {
    if offer.skew > MAX_CLOCK_SKEW {
        let ExaminedProposal { skew, is_behind, .. } = *offer;
        return Err(ProposalObjection::Skew { skew, is_behind, allowed: MAX_CLOCK_SKEW });
    }
    Ok(())
}

/// S5: the epoch is above every epoch of which the agent signed a list or a release, and at most
/// [`Journal::epoch_limit`]. A list that the agent has already signed passes again, unless the
/// agent has released it.
fn check_s5_epoch(
    rules: &Rules,
    journal: &Journal,
    offer: &ExaminedProposal,
) -> Result<(), ProposalObjection> {
    let epoch = offer.proposal.epoch;
    if is_signed(journal, offer) || !rules.is_on(Rule::OneListPerEpoch) {
        return Ok(());
    }
    let (highest, limit) = (journal.highest_epoch(), journal.epoch_limit());
    if epoch <= highest {
        return Err(ProposalObjection::OldEpoch { epoch, highest });
    }
    if epoch > limit { Err(ProposalObjection::EpochTooFar { epoch, limit }) } else { Ok(()) }
}

/// Whether the agent has signed exactly this list of members before and has not released it since.
pub(super) fn is_signed(journal: &Journal, offer: &ExaminedProposal) -> bool {
    let epoch = offer.proposal.epoch;
    journal.signed_lists.get(&epoch).is_some_and(|bound| bound.proposal_hash == offer.proposal_hash)
        && epoch > journal.released_epoch
}

/// S6: of each earlier list that the agent signed, enough members have released that list. Then no
/// quorum of that list's members can ever hold its commit document. A running node at a member's
/// address doesn't count as a release.
pub(super) fn check_s6_releases(
    rules: &Rules,
    journal: &Journal,
    offer: &ExaminedProposal,
    releases: &BTreeMap<AgentKey, Epoch>,
) -> Result<(), ProposalObjection> {
    if !rules.is_on(Rule::ReleasesFirst) {
        return Ok(());
    }
    for (&epoch, bound) in &journal.signed_lists {
        if bound.proposal_hash == offer.proposal_hash {
            continue;
        }
        let missing = members_without_release(journal, epoch, bound, releases);
        let (need, have) = (bound.releases_needed(rules), bound.members.len() - missing.len());
        if have < need {
            return Err(ProposalObjection::Unreleased {
                epoch,
                have,
                need,
                missing: format_members(&missing),
            });
        }
    }
    Ok(())
}

/// Names the missing members with their addresses, as many as fit into a sentence.
fn format_members(missing: &[&SignedListMember]) -> String {
    const MAX_NAMED_MEMBERS: usize = 3;
    let name = |member: &&SignedListMember| {
        let at = member.peer_urls.first().map_or("", |url| url.trim_start_matches("https://"));
        format!("{} at {at}", member.key)
    };
    let names: Vec<String> = missing.iter().take(MAX_NAMED_MEMBERS).map(name).collect();
    match missing.len().saturating_sub(MAX_NAMED_MEMBERS) {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

/// Returns the members of a signed list that have not released the list, as far as this agent
/// knows.
fn members_without_release<'a>(
    journal: &Journal,
    epoch: Epoch,
    bound: &'a SignedList,
    releases: &BTreeMap<AgentKey, Epoch>,
) -> Vec<&'a SignedListMember> {
    let released = |key: AgentKey| {
        let known = if key == journal.key {
            journal.released_epoch
        } else {
            releases.get(&key).copied().unwrap_or(0)
        };
        known >= epoch
    };
    bound.members.iter().filter(|member| !released(member.key)).collect()
}

fn check_s7_fresh_start(
    rules: &Rules,
    journal: &Journal,
    offer: &ExaminedProposal,
) -> Result<(), ProposalObjection> {
    if let Some(held) = &journal.held_document {
        return Err(ProposalObjection::Holding { epoch: held.proposal.epoch });
    }
    if rules.is_on(Rule::SameMachine) && journal.machine.differs_from(&offer.machine) {
        return Err(ProposalObjection::OtherMachine);
    }
    match &offer.directory {
        DirectoryKind::Blank => Ok(()),
        other => Err(ProposalObjection::NotBlank { what: other.to_string() }),
    }
}
