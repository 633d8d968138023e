//! What a cluster's members say that it is, and when that is believed. Pure.
//!
//! A report is believed once a quorum of those say the same who had a vote in what was believed
//! before; the first of these lists is the commit document's. So no minority, and nobody who was
//! removed, makes the directory say anything; and what it says never goes back.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use discovery_types::api::{DirectoryView, ListedMember, MAX_MEMBER_NAME, MAX_MEMBERS, Membership};
use discovery_types::digest::MemberId;

use crate::store::intents::Said;

/// Most URLs of one member in a report, and longest of them.
const MAX_URLS: usize = 8;
const MAX_URL: usize = 300;

impl Said {
    /// What tells an older list from a newer one: the index of the last change of members where
    /// the node says it, then where in the log the node was.
    fn position(&self) -> (u64, u64, u64) {
        (self.membership.configuration.unwrap_or(0), self.term, self.index)
    }

    /// Whether `other` was said earlier, or at the same place.
    pub(super) fn follows(&self, other: &Said) -> bool {
        self.position() >= other.position()
    }

    /// Whether both say that the cluster is the same: who is in it, with which vote, where.
    fn agrees(&self, other: &Said) -> bool {
        let list = |said: &Said| -> BTreeSet<(MemberId, bool, Vec<String>)> {
            let member = |member: &ListedMember| {
                let mut urls = member.peer_urls.clone();
                urls.sort_unstable();
                (member.id, member.is_learner, urls)
            };
            said.membership.members.iter().map(member).collect()
        };
        self.membership.configuration == other.membership.configuration && list(self) == list(other)
    }

    fn voters(&self) -> BTreeSet<MemberId> {
        let voters = self.membership.members.iter().filter(|member| !member.is_learner);
        voters.map(|member| member.id).collect()
    }
}

/// The newest report that is believed after `confirmed` (or after the `founders`, where nothing was
/// confirmed yet), if there is one.
pub(super) fn newly_confirmed(
    confirmed: Option<&Said>,
    founders: &BTreeSet<MemberId>,
    said: &[(MemberId, Said)],
) -> Option<Said> {
    let voters = confirmed.map_or_else(|| founders.clone(), Said::voters);
    let quorum = voters.len() / 2 + 1;
    let newer = |report: &&Said| match confirmed {
        Some(confirmed) => report.position() > confirmed.position() && !report.agrees(confirmed),
        None => true,
    };
    let mut reports: Vec<&Said> = said
        .iter()
        .filter(|(member, _)| voters.contains(member))
        .map(|(_, report)| report)
        .filter(newer)
        .collect();
    reports.sort_by_key(|report| Reverse(report.position()));
    let supporters = |wanted: &Said| reports.iter().filter(|report| report.agrees(wanted)).count();
    reports.iter().find(|report| supporters(report) >= quorum).map(|report| (*report).clone())
}

/// What is shown: the confirmed list; before that the newest that anybody said.
pub(super) fn view(confirmed: Option<&Said>, said: &[(MemberId, Said)]) -> Option<DirectoryView> {
    let newest = said.iter().map(|(_, report)| report).max_by_key(|report| report.position());
    let shown = confirmed.or(newest)?;
    let same: Vec<&Said> =
        said.iter().map(|(_, report)| report).filter(|report| report.agrees(shown)).collect();
    let mut view = shown.view(confirmed.is_some(), same.len());
    if let Some(last) = same.iter().max_by_key(|report| report.at_us) {
        view.leader = last.leader;
        view.at_ms = view.at_ms.max(last.at_us / 1_000);
    }
    Some(view)
}

/// Why a list can't be taken from a report, if it can't.
pub(super) fn objection(membership: &Membership) -> Option<&'static str> {
    let members = &membership.members;
    let ids: BTreeSet<MemberId> = members.iter().map(|member| member.id).collect();
    let plain = |text: &str, most: usize| text.len() <= most && !text.contains(char::is_control);
    let fits = |member: &ListedMember| {
        let urls = [&member.peer_urls, &member.client_urls];
        plain(&member.name, MAX_MEMBER_NAME)
            && urls.iter().all(|urls| urls.len() <= MAX_URLS)
            && urls.into_iter().flatten().all(|url| plain(url, MAX_URL))
    };
    if members.is_empty() || members.len() > MAX_MEMBERS {
        Some("A cluster has 1 to 64 members.")
    } else if ids.len() != members.len() {
        Some("A member stands there twice.")
    } else if members.iter().all(|member| member.is_learner) {
        Some("A cluster has a voter.")
    } else if !members.iter().all(fits) {
        Some("A member's name or URLs are too long, too many, or not printable.")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Voters as digits, learners as letters: `12a` are two voters and a learner.
    fn said(configuration: Option<u64>, index: u64, members: &str) -> Said {
        let member = |c: char| ListedMember {
            id: MemberId::new(u64::from(c)),
            name: c.to_string(),
            peer_urls: vec![format!("https://{c}:2380")],
            client_urls: Vec::new(),
            is_learner: c.is_alphabetic(),
        };
        let members = members.chars().map(member).collect();
        Said {
            membership: Membership { configuration, members },
            term: 2,
            index,
            leader: None,
            at_us: 0,
        }
    }

    fn ids(members: &str) -> BTreeSet<MemberId> {
        members.chars().map(|c| MemberId::new(u64::from(c))).collect()
    }

    fn by(who: char, said: Said) -> (MemberId, Said) {
        (MemberId::new(u64::from(who)), said)
    }

    fn names(said: Option<Said>) -> Option<String> {
        Some(said?.membership.members.into_iter().map(|member| member.name).collect())
    }

    #[test]
    fn the_founders_quorum_confirms_first() {
        let one = [by('1', said(None, 5, "123"))];
        assert_eq!(newly_confirmed(None, &ids("123"), &one), None);
        let two = [by('1', said(None, 5, "123")), by('3', said(None, 9, "123"))];
        let found = newly_confirmed(None, &ids("123"), &two).unwrap();
        assert_eq!(found.index, 9);
    }

    #[test]
    fn nobody_without_a_vote_in_the_last_list_confirms_the_next() {
        let last = said(Some(5), 5, "123a");
        let next = |who| by(who, said(Some(7), 7, "14a"));
        // One voter, the learner, a stranger, and the one that comes new.
        let reports = [next('1'), next('a'), next('9'), next('4')];
        assert_eq!(newly_confirmed(Some(&last), &ids("123"), &reports), None);
        let reports = [next('1'), next('2')];
        assert_eq!(
            names(newly_confirmed(Some(&last), &ids("123"), &reports)).as_deref(),
            Some("14a")
        );
    }

    #[test]
    fn who_differs_counts_for_nothing() {
        let last = said(Some(5), 5, "123");
        let reports = [by('1', said(Some(7), 7, "12")), by('2', said(Some(7), 7, "13"))];
        assert_eq!(newly_confirmed(Some(&last), &ids("123"), &reports), None);
        // The same members at another configuration are another list.
        let reports = [by('1', said(Some(7), 7, "12")), by('2', said(Some(9), 9, "12"))];
        assert_eq!(newly_confirmed(Some(&last), &ids("123"), &reports), None);
        // A learner is no voter.
        let (voter, learner) = (said(None, 7, "1234"), said(None, 7, "123"));
        let mut learner = learner;
        learner.membership.members.push(voter.membership.members[3].clone());
        learner.membership.members[3].is_learner = true;
        let reports = [by('1', voter), by('2', learner)];
        assert_eq!(newly_confirmed(None, &ids("123"), &reports), None);
    }

    #[test]
    fn what_is_older_never_comes_back() {
        let last = said(Some(9), 20, "12");
        let reports = [by('1', said(Some(5), 90, "123")), by('2', said(Some(5), 90, "123"))];
        assert_eq!(newly_confirmed(Some(&last), &ids("123"), &reports), None);
        assert!(!said(Some(5), 90, "1").follows(&last));
        assert!(said(Some(9), 21, "1").follows(&last));
        assert!(last.follows(&last));
    }

    #[test]
    fn the_newest_list_that_a_quorum_says_is_taken() {
        let last = said(Some(1), 1, "123");
        let reports = [
            by('1', said(Some(9), 9, "12")),
            by('2', said(Some(7), 7, "1234")),
            by('3', said(Some(7), 7, "1234")),
        ];
        let found = newly_confirmed(Some(&last), &ids("123"), &reports);
        assert_eq!(names(found).as_deref(), Some("1234"));
    }

    #[test]
    fn what_is_shown_is_confirmed_or_says_that_it_is_not() {
        assert!(view(None, &[]).is_none());
        let reports = [by('1', said(Some(5), 5, "12")), by('2', said(Some(7), 7, "1"))];
        let unsure = view(None, &reports).unwrap();
        assert_eq!((unsure.confirmed, unsure.reporters, unsure.raft_index), (false, 1, 7));
        let sure = view(Some(&said(Some(5), 5, "12")), &reports).unwrap();
        assert_eq!((sure.confirmed, sure.reporters, sure.raft_index), (true, 1, 5));
    }

    #[test]
    fn lists_are_bounded() {
        assert_eq!(objection(&said(None, 1, "12a").membership), None);
        for bad in ["", "11", "ab"] {
            assert!(objection(&said(None, 1, bad).membership).is_some(), "{bad}");
        }
        let mut many = said(None, 1, "1").membership;
        many.members = (0..65)
            .map(|id| ListedMember { id: MemberId::new(id), ..many.members[0].clone() })
            .collect();
        assert!(objection(&many).is_some());
        for (name, url) in [
            ("x".repeat(256), String::new()),
            ("a\nb".into(), String::new()),
            ("a".into(), "u".repeat(301)),
            ("a".into(), "https://\u{1b}[31m".into()),
        ] {
            let mut membership = said(None, 1, "1").membership;
            membership.members[0].name = name;
            membership.members[0].peer_urls = vec![url];
            assert!(objection(&membership).is_some());
        }
    }
}
