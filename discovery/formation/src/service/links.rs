//! Broken links between the members of a frozen list, and the members that the list is counted
//! against.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::rules::{Rule, Rules};
use crate::service::cluster::{FrozenList, ProbeOutcome};
use crate::values::{AgentKey, AgentRecord};

/// Number of broken links that one sentence names.
const MAX_NAMED_LINKS: usize = 3;

/// Part of the error text of a probe that an agent with another key answered. Such an answer shows
/// that the port is open.
const OTHER_AGENT: &str = "is not the agent that signed for it";

/// Two members of a list. At least one of them doesn't reach the other.
pub(super) struct BrokenLink<'a> {
    one: &'a AgentRecord,
    other: &'a AgentRecord,
    /// Result of the first member's probe of the second, if it was reported.
    from_one: Option<&'a ProbeOutcome>,
    /// Result of the second member's probe of the first, if it was reported.
    from_other: Option<&'a ProbeOutcome>,
}

/// Returns the error of a probe that failed.
fn failure(probe: Option<&ProbeOutcome>) -> Option<&str> {
    match probe? {
        ProbeOutcome::Reached => None,
        ProbeOutcome::Failed(why) => Some(why),
    }
}

/// Returns every link of the list that a probe has found broken.
pub(super) fn find_broken_links(frozen: &FrozenList) -> Vec<BrokenLink<'_>> {
    let probe =
        |prober: &AgentRecord, peer: &AgentRecord| frozen.probes.get(&prober.key)?.get(&peer.key);
    let records = &frozen.proposal.records;
    let mut links = Vec::new();
    for (place, one) in records.iter().enumerate() {
        for other in &records[place + 1..] {
            let (from_one, from_other) = (probe(one, other), probe(other, one));
            if failure(from_one).is_some() || failure(from_other).is_some() {
                links.push(BrokenLink { one, other, from_one, from_other });
            }
        }
    }
    links
}

/// Returns the members that a timed-out list of members is counted against: those that most others
/// can't reach, and those that sent neither ack nor probes. If there are no such members, but pairs
/// of members can't reach each other, returns the fewest members that together touch every such
/// pair. Otherwise the same list would meet the same broken link for ever.
pub(super) fn find_members_at_fault(
    rules: &Rules,
    frozen: &FrozenList,
    counts: impl Fn(AgentKey) -> u32,
) -> Vec<AgentKey> {
    let members = || frozen.proposal.records.iter().map(|record| record.key);
    let others = frozen.proposal.records.len().saturating_sub(1);
    let missed_by_most = |key: AgentKey| {
        let misses = |(prober, row): (&AgentKey, &BTreeMap<AgentKey, ProbeOutcome>)| {
            *prober != key && matches!(row.get(&key), Some(ProbeOutcome::Failed(_)))
        };
        frozen.probes.iter().filter(|&row| misses(row)).count() * 2 > others
    };
    let silent = |key| !frozen.acks.contains_key(&key) && !frozen.probes.contains_key(&key);
    let alone: Vec<AgentKey> =
        members().filter(|&key| silent(key) || missed_by_most(key)).collect();
    if !alone.is_empty() || !rules.is_on(Rule::PairsAreCounted) {
        return alone;
    }
    let seats: Vec<(AgentKey, u32)> = members().map(|key| (key, counts(key))).collect();
    let pairs: Vec<[AgentKey; 2]> =
        find_broken_links(frozen).iter().map(|link| [link.one.key, link.other.key]).collect();
    smallest_cover(&seats, &pairs)
}

/// Returns the smallest set of `seats` that touches every pair. Each entry of `seats`, seat 1
/// first, holds the number of failed lists that were counted against the agent. Among sets of equal
/// size, the set with the lowest sum of these numbers wins, then the set with the higher seats.
fn smallest_cover(seats: &[(AgentKey, u32)], pairs: &[[AgentKey; 2]]) -> Vec<AgentKey> {
    let chosen = |set: u32| {
        seats
            .iter()
            .enumerate()
            .filter(move |(place, _)| set >> place & 1 == 1)
            .map(|(_, seat)| *seat)
    };
    let touches_all = |set: &u32| {
        let keys: BTreeSet<AgentKey> = chosen(*set).map(|(key, _)| key).collect();
        pairs.iter().all(|pair| pair.iter().any(|key| keys.contains(key)))
    };
    // A list of members has nine seats at most, so at most 512 sets of seats are tried.
    let sets = (0..1 << seats.len()).filter(touches_all);
    let best = sets.min_by_key(|&set| {
        let counted: u32 = chosen(set).map(|(_, counts)| counts).sum();
        (set.count_ones(), counted, Reverse(set))
    });
    best.map(|set| chosen(set).map(|(key, _)| key).collect()).unwrap_or_default()
}

/// Describes the broken links with both addresses; `None` if there are none.
pub(super) fn describe_links(links: &[BrokenLink<'_>]) -> Option<String> {
    let named: Vec<String> = links.iter().take(MAX_NAMED_LINKS).map(ToString::to_string).collect();
    let more = match links.len().saturating_sub(MAX_NAMED_LINKS) {
        0 => String::new(),
        more => format!("; and {more} more broken links"),
    };
    (!named.is_empty()).then(|| named.join("; ") + &more)
}

/// Returns advice on the broken links: which ports to open, and which host was replaced.
pub(super) fn suggest_remedy(links: &[BrokenLink<'_>]) -> String {
    let (mut ports, mut replaced) = (BTreeSet::new(), BTreeSet::new());
    for link in links {
        let tried = [(failure(link.from_one), link.other), (failure(link.from_other), link.one)];
        for (why, peer) in tried.iter().filter_map(|(failed, peer)| Some(((*failed)?, *peer))) {
            if why.contains(OTHER_AGENT) {
                replaced.insert(peer.name.as_str());
                continue;
            }
            ports.extend(
                peer.peer_urls.iter().filter_map(|url| url.rsplit_once(':')).map(|at| at.1),
            );
        }
    }
    let mut ways = Vec::new();
    if !replaced.is_empty() {
        let names: Vec<&str> = replaced.into_iter().collect();
        ways.push(format!(
            "another agent answers at the address of {}, as after a host was made anew: wait until \
             the old one's seat has lapsed and the new one is seated, or start the agent again with \
             its old state",
            names.join(" and ")
        ));
    }
    if !ports.is_empty() {
        let ports: Vec<&str> = ports.into_iter().collect();
        ways.push(format!(
            "open TCP port {} between these addresses, or restart the agent with the address under \
             which the others reach it",
            ports.join(" and ")
        ));
    }
    ways.join("; ")
}

impl BrokenLink<'_> {
    /// Returns the keys of the two members.
    pub(super) fn ends(&self) -> [AgentKey; 2] {
        [self.one.key, self.other.key]
    }
}

impl std::fmt::Display for BrokenLink<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let end = |record: &AgentRecord| {
            let at: Vec<&str> =
                record.peer_urls.iter().map(|url| url.trim_start_matches("https://")).collect();
            format!("{} ({}) at {}", record.name, record.key, at.join(" and "))
        };
        let (one, other) = (end(self.one), end(self.other));
        let ((from, why), (to, back)) = match (failure(self.from_one), failure(self.from_other)) {
            (Some(why), Some(_)) => {
                return write!(f, "{one} and {other} can't reach each other: {why}");
            }
            (Some(why), None) => ((one, why), (other, self.from_other)),
            (None, Some(why)) => ((other, why), (one, self.from_one)),
            (None, None) => return write!(f, "{one} and {other} reach each other"),
        };
        let direction = match back {
            Some(_) => ", but is reached from there",
            None => "",
        };
        write!(f, "{from} can't reach {to}{direction}: {why}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{key, plain_record};

    /// Returns the hosts that a timed-out list with these broken pairs is counted against. `counts`
    /// holds the number of earlier failed lists that were counted against each host, seat 1 first.
    fn cover(counts: &[u32], pairs: &[(u8, u8)]) -> Vec<u8> {
        let seats: Vec<_> = (1..).map(key).zip(counts.iter().copied()).collect();
        let pairs: Vec<_> = pairs.iter().map(|&(one, other)| [key(one), key(other)]).collect();
        smallest_cover(&seats, &pairs).into_iter().map(|key| key.0[0]).collect()
    }

    #[test]
    fn of_one_pair_the_member_with_fewer_failed_lists_is_chosen_then_the_higher_seat() {
        assert_eq!(cover(&[0, 0, 0], &[(1, 2)]), [2]);
        assert_eq!(cover(&[0, 1, 0], &[(1, 2)]), [1]);
        assert_eq!(cover(&[1, 1, 0], &[(1, 2)]), [2]);
    }

    #[test]
    fn the_chosen_set_is_the_smallest_that_touches_every_pair() {
        assert_eq!(cover(&[0; 5], &[]), [] as [u8; 0]);
        assert_eq!(cover(&[9, 0, 0, 0, 0], &[(1, 2), (1, 3)]), [1], "one, however often counted");
        assert_eq!(cover(&[0; 5], &[(1, 2), (3, 4)]), [2, 4]);
        assert_eq!(cover(&[0; 5], &[(1, 2), (2, 3), (1, 3)]), [2, 3]);
        assert_eq!(cover(&[0, 0, 1, 0, 0], &[(1, 2), (2, 3), (1, 3)]), [1, 2]);
    }

    fn failed(why: &str) -> ProbeOutcome {
        ProbeOutcome::Failed(why.to_owned())
    }

    #[test]
    fn a_one_way_link_is_described_with_its_direction_and_the_port_to_open() {
        let at = |host, port| {
            let peer_urls = vec![format!("https://10.0.0.{host}:{port}")];
            AgentRecord { peer_urls, ..plain_record(host) }
        };
        let (one, other) = (at(1, 1111), at(2, 2222));
        let link =
            |from_one, from_other| BrokenLink { one: &one, other: &other, from_one, from_other };
        let (failed, reached) = (failed("refused"), ProbeOutcome::Reached);
        let back = ", but is reached from there: refused";
        for (link, first, second, end, port) in [
            (link(Some(&failed), None), "host-1", "host-2", ":2222: refused", "port 2222 between"),
            (link(None, Some(&failed)), "host-2", "host-1", ":1111: refused", "port 1111 between"),
            (link(Some(&failed), Some(&reached)), "host-1", "host-2", back, "port 2222 between"),
            (link(Some(&reached), Some(&failed)), "host-2", "host-1", back, "port 1111 between"),
        ] {
            let description = link.to_string();
            assert!(description.starts_with(first), "{description}");
            assert!(description.contains(&format!("can't reach {second}")), "{description}");
            assert!(description.ends_with(end), "{description}");
            let open = suggest_remedy(&[link]);
            assert!(open.contains(port), "{open}");
        }
    }

    #[test]
    fn no_port_is_to_be_opened_if_another_agent_answers() {
        let (one, other) = (plain_record(1), plain_record(2));
        let link =
            |why| BrokenLink { one: &one, other: &other, from_one: Some(why), from_other: None };
        let refused = failed("can't connect to 10.0.0.2:2380: Connection refused");
        let foreign = failed("10.0.0.2:2380 is not the agent that signed for it: bad signature");
        let remedy = suggest_remedy(&[link(&foreign)]);
        assert!(remedy.contains("address of host-2") && remedy.contains("lapsed"), "{remedy}");
        assert!(!remedy.contains("open TCP port"), "{remedy}");
        let both = suggest_remedy(&[link(&foreign), link(&refused)]);
        assert!(both.contains("lapsed") && both.contains("open TCP port"), "{both}");
    }

    #[test]
    fn a_description_names_three_links_and_counts_the_others() {
        let (one, other) = (plain_record(1), plain_record(2));
        let why = failed("x");
        let broken = |count: usize| {
            let link =
                || BrokenLink { one: &one, other: &other, from_one: Some(&why), from_other: None };
            describe_links(&(0..count).map(|_| link()).collect::<Vec<_>>())
        };
        assert_eq!(broken(0), None);
        let description = |count| broken(count).expect("there are some");
        assert!(!description(MAX_NAMED_LINKS).contains("more"));
        assert!(description(MAX_NAMED_LINKS + 1).ends_with("; and 1 more broken links"));
    }
}
