//! Decides which list of members discovery believes, given the members' reports. These functions
//! are pure.
//!
//! A list is confirmed once a quorum reports it. This is a quorum of the voters in the last
//! confirmed list or, before the first confirmation, of the founders. A confirmed list has the
//! position in the cluster's log that a quorum has reached. It is never replaced by an older one.
//!
//! False reports, by mistake or on purpose, can do the following:
//!
//! * From a minority of the voters, a learner, or a removed member: nothing. Their reports confirm
//!   no list and don't move the position that later reports have to exceed. Before the first list
//!   is confirmed, discovery shows the list with the most reports.
//! * From one reporter about itself: nothing that lasts. A report with a position that no quorum
//!   has reached is replaced by the reporter's next report, even by one with a lower position.
//! * From a quorum: everything, as in the cluster itself.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use discovery_types::api::{DirectoryView, ListedMember, MAX_MEMBER_NAME, MAX_MEMBERS, Membership};
use discovery_types::digest::MemberId;

use crate::store::changes::MembershipReport;

/// Maximum number of URLs of one member in a report; `MAX_URL` limits the length of each, in bytes.
const MAX_URLS: usize = 8;
const MAX_URL: usize = 300;
/// Maximum term, index or configuration in a report. A log with a million entries a second reaches
/// it after 285 years.
const MAX_POSITION: u64 = 1 << 53;

/// Position in a cluster's log at which a list was read: configuration, term and index. The
/// configuration is the index of the last change of members, or 0 if the node doesn't report it.
/// Positions order lists by age.
type ListPosition = (u64, u64, u64);

impl MembershipReport {
    fn position(&self) -> ListPosition {
        (self.membership.configuration.unwrap_or(0), self.term, self.index)
    }

    /// Whether this report replaces `last`, the last report of the same member. A report with a
    /// lower position arrived late and replaces nothing. The exception is a wrong last report: its
    /// position is beyond the one that a quorum has `reached`.
    pub(crate) fn replaces(&self, last: &MembershipReport, reached: Option<ListPosition>) -> bool {
        let was_wrong = reached.is_none_or(|reached| last.position() > reached);
        self.position() >= last.position() || was_wrong
    }

    /// Whether the two reports contain the same configuration and the same members, with the same
    /// votes and peer URLs.
    pub(crate) fn agrees(&self, other: &MembershipReport) -> bool {
        let list = |said: &MembershipReport| -> BTreeSet<(MemberId, bool, Vec<String>)> {
            let member = |member: &ListedMember| {
                let mut urls = member.peer_urls.clone();
                urls.sort_unstable();
                (member.id, member.is_learner, urls)
            };
            said.membership.members.iter().map(member).collect()
        };
        self.membership.configuration == other.membership.configuration && list(self) == list(other)
    }

    pub(crate) fn voters(&self) -> BTreeSet<MemberId> {
        let voters = self.membership.members.iter().filter(|member| !member.is_learner);
        voters.map(|member| member.id).collect()
    }
}

/// Returns the members whose reports confirm the next list: the voters of `confirmed`, or the
/// `founders` before any list was confirmed.
pub(crate) fn electors(
    confirmed: Option<&MembershipReport>,
    founders: &BTreeSet<MemberId>,
) -> BTreeSet<MemberId> {
    confirmed.map_or_else(|| founders.clone(), MembershipReport::voters)
}

fn quorum(electors: &BTreeSet<MemberId>) -> usize {
    electors.len() / 2 + 1
}

/// Returns the highest position that a quorum of the electors reports to have reached, or `None` if
/// no quorum has reported. At least one of these reports is true unless a majority lies.
fn position_of_quorum<P: Ord>(
    electors: &BTreeSet<MemberId>,
    said: &[(MemberId, MembershipReport)],
    position: impl Fn(&MembershipReport) -> P,
) -> Option<P> {
    let own = said.iter().filter(|(member, _)| electors.contains(member));
    let mut positions: Vec<P> = own.map(|(_, report)| position(report)).collect();
    positions.sort_unstable_by(|a, b| b.cmp(a));
    positions.into_iter().nth(quorum(electors) - 1)
}

/// Returns the highest list position that a quorum of the electors reports, or `None` if no
/// quorum has reported. Uses [`position_of_quorum`].
pub(crate) fn quorum_list_position(
    electors: &BTreeSet<MemberId>,
    said: &[(MemberId, MembershipReport)],
) -> Option<ListPosition> {
    position_of_quorum(electors, said, MembershipReport::position)
}

/// Returns the highest term and index that a quorum of the electors reports to have reached, or
/// `None` if no quorum has reported. Uses [`position_of_quorum`].
pub(crate) fn quorum_log_position(
    electors: &BTreeSet<MemberId>,
    said: &[(MemberId, MembershipReport)],
) -> Option<(u64, u64)> {
    position_of_quorum(electors, said, |report| (report.term, report.index))
}

/// Returns the newest list that a quorum reports and that is newer than `confirmed`, if there is
/// one.
pub(crate) fn newly_confirmed(
    confirmed: Option<&MembershipReport>,
    founders: &BTreeSet<MemberId>,
    said: &[(MemberId, MembershipReport)],
) -> Option<MembershipReport> {
    let electors = electors(confirmed, founders);
    let quorum = quorum(&electors);
    let newer = |report: &&MembershipReport| match confirmed {
        Some(confirmed) => report.position() > confirmed.position() && !report.agrees(confirmed),
        None => true,
    };
    let mut reports: Vec<&MembershipReport> = said
        .iter()
        .filter(|(member, _)| electors.contains(member))
        .map(|(_, report)| report)
        .filter(newer)
        .collect();
    reports.sort_by_key(|report| Reverse(report.position()));
    let supporters = |wanted: &MembershipReport| -> Vec<&MembershipReport> {
        reports.iter().copied().filter(|report| report.agrees(wanted)).collect()
    };
    let mut lists = reports.iter().map(|report| supporters(report));
    let supporters = lists.find(|supporters| supporters.len() >= quorum)?;
    // The confirmed list gets the highest position that a quorum of the electors reports together
    // with this list. Its names and client URLs are those that most of these reports contain.
    let reached = supporters.get(quorum - 1)?;
    let alike = |wanted: &&&MembershipReport| {
        supporters.iter().filter(|report| report.membership == wanted.membership).count()
    };
    let usual = supporters.iter().max_by_key(alike)?;
    Some(MembershipReport { membership: usual.membership.clone(), ..(*reached).clone() })
}

/// Returns the list to show: the confirmed list or, before the first confirmation, the list that
/// most members report. Of several lists with equally many reports it is the newest.
pub(crate) fn view(
    confirmed: Option<&MembershipReport>,
    said: &[(MemberId, MembershipReport)],
) -> Option<DirectoryView> {
    let reports = || said.iter().map(|(_, report)| report);
    let usual = reports().max_by_key(|wanted| {
        (reports().filter(|report| report.agrees(wanted)).count(), wanted.position())
    });
    let shown = confirmed.or(usual)?;
    let same: Vec<&MembershipReport> = reports().filter(|report| report.agrees(shown)).collect();
    let mut view = shown.view(confirmed.is_some(), same.len());
    if let Some(last) = same.iter().max_by_key(|report| report.at_us) {
        let is_listed = |id: &MemberId| shown.membership.members.iter().any(|m| m.id == *id);
        view.leader = last.leader.filter(is_listed);
        view.at_ms = view.at_ms.max(last.at_us / 1_000);
    }
    Some(view)
}

/// Returns an objection if one of the numbers is too large for a position in a log.
pub(crate) fn objection_to_position(numbers: &[u64]) -> Option<String> {
    let wrong = numbers.iter().find(|number| **number > MAX_POSITION)?;
    Some(format!(
        "No log has come to {wrong}: a term, index or configuration is at most {MAX_POSITION}."
    ))
}

/// Returns an objection if a report's list can't be accepted.
pub(crate) fn objection(membership: &Membership) -> Option<&'static str> {
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

    /// Report of a list that is written as characters: voters as digits, learners as letters. `12a`
    /// has two voters and a learner.
    fn report_of(configuration: Option<u64>, index: u64, members: &str) -> MembershipReport {
        let member = |c: char| ListedMember {
            id: MemberId::new(u64::from(c)),
            name: c.to_string(),
            peer_urls: vec![format!("https://{c}:2380")],
            client_urls: Vec::new(),
            is_learner: c.is_alphabetic(),
        };
        let members = members.chars().map(member).collect();
        MembershipReport {
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

    fn by(who: char, said: MembershipReport) -> (MemberId, MembershipReport) {
        (MemberId::new(u64::from(who)), said)
    }

    fn names(said: Option<MembershipReport>) -> Option<String> {
        Some(said?.membership.members.into_iter().map(|member| member.name).collect())
    }

    #[test]
    fn a_quorum_of_the_founders_confirms_the_first_list() {
        let one = [by('1', report_of(None, 5, "123"))];
        assert_eq!(newly_confirmed(None, &ids("123"), &one), None);
        let two = [by('1', report_of(None, 5, "123")), by('3', report_of(None, 9, "123"))];
        let found = newly_confirmed(None, &ids("123"), &two).unwrap();
        assert_eq!(found.index, 5, "as far as both have come");
    }

    #[test]
    fn nobody_without_a_vote_in_the_last_list_confirms_the_next() {
        let last = report_of(Some(5), 5, "123a");
        let next = |who| by(who, report_of(Some(7), 7, "14a"));
        // The reporters are one voter, the learner, an unknown member, and the new member.
        let reports = [next('1'), next('a'), next('9'), next('4')];
        assert_eq!(newly_confirmed(Some(&last), &ids("123"), &reports), None);
        let reports = [next('1'), next('2')];
        assert_eq!(
            names(newly_confirmed(Some(&last), &ids("123"), &reports)).as_deref(),
            Some("14a")
        );
    }

    #[test]
    fn reports_of_different_lists_confirm_none() {
        let last = report_of(Some(5), 5, "123");
        let reports = [by('1', report_of(Some(7), 7, "12")), by('2', report_of(Some(7), 7, "13"))];
        assert_eq!(newly_confirmed(Some(&last), &ids("123"), &reports), None);
        // Lists with the same members and different configurations count as different lists.
        let reports = [by('1', report_of(Some(7), 7, "12")), by('2', report_of(Some(9), 9, "12"))];
        assert_eq!(newly_confirmed(Some(&last), &ids("123"), &reports), None);
        // Lists differ if a member is a voter in one of them and a learner in the other.
        let (voter, learner) = (report_of(None, 7, "1234"), report_of(None, 7, "123"));
        let mut learner = learner;
        learner.membership.members.push(voter.membership.members[3].clone());
        learner.membership.members[3].is_learner = true;
        let reports = [by('1', voter), by('2', learner)];
        assert_eq!(newly_confirmed(None, &ids("123"), &reports), None);
    }

    #[test]
    fn an_older_list_is_never_confirmed_again() {
        let last = report_of(Some(9), 20, "12");
        let reports =
            [by('1', report_of(Some(5), 90, "123")), by('2', report_of(Some(5), 90, "123"))];
        assert_eq!(newly_confirmed(Some(&last), &ids("123"), &reports), None);
    }

    /// Reports of three voters, all at `index`.
    fn all_at(index: u64) -> Vec<(MemberId, MembershipReport)> {
        ['1', '2', '3'].map(|who| by(who, report_of(Some(5), index, "123"))).to_vec()
    }

    #[test]
    fn a_late_report_does_not_replace_its_reporters_last_one() {
        let last = report_of(Some(9), 20, "12");
        let reached = Some(last.position());
        assert!(!report_of(Some(5), 90, "1").replaces(&last, reached));
        assert!(report_of(Some(9), 21, "1").replaces(&last, reached));
        assert!(last.replaces(&last, reached));
    }

    #[test]
    fn a_wrong_report_is_replaced_by_its_reporters_next_one() {
        const MAX: u64 = i64::MAX as u64;
        let electors = ids("123");
        for (configuration, index) in [(Some(MAX), MAX), (Some(5), MAX), (Some(MAX), 30)] {
            let mut reports = all_at(30);
            reports[2].1 = report_of(configuration, index, "123");
            let reached = quorum_list_position(&electors, &reports);
            assert_eq!(
                reached,
                Some(report_of(Some(5), 30, "").position()),
                "as the two others say"
            );
            let next = report_of(Some(5), 31, "123");
            assert!(next.replaces(&reports[2].1, reached), "{configuration:?} {index}");
        }
        // No other member has reported, so no quorum has reached any position. The newer report
        // then always replaces the last one.
        let alone = [by('3', report_of(Some(MAX), MAX, "123"))];
        assert!(
            report_of(Some(5), 31, "123")
                .replaces(&alone[0].1, quorum_list_position(&electors, &alone))
        );
    }

    #[test]
    fn one_members_false_position_does_not_block_later_lists() {
        const MAX: u64 = i64::MAX as u64;
        // The second member reports the true list, but at a false position that the others never
        // reach.
        let mut liar = report_of(None, MAX, "123");
        liar.term = MAX;
        let reports = [by('1', report_of(None, 5, "123")), by('2', liar.clone())];
        let first = newly_confirmed(None, &ids("123"), &reports).unwrap();
        assert_eq!((first.term, first.index), (2, 5));
        let next = |who| by(who, report_of(None, 9, "13"));
        let reports = [next('1'), by('2', liar), next('3')];
        let second = newly_confirmed(Some(&first), &ids("123"), &reports);
        assert_eq!(names(second).as_deref(), Some("13"));
    }

    #[test]
    fn two_false_reports_of_five_move_no_position() {
        const MAX: u64 = i64::MAX as u64;
        let lie = |who| by(who, report_of(Some(MAX), MAX, "12345"));
        let tell = |who, index| by(who, report_of(Some(5), index, "12345"));
        let reports = [lie('1'), lie('2'), tell('3', 7), tell('4', 8), tell('5', 9)];
        let found = newly_confirmed(None, &ids("12345"), &reports).unwrap();
        assert_eq!((found.membership.configuration, found.index), (Some(5), 7));
        assert_eq!(quorum_log_position(&ids("12345"), &reports), Some((2, 9)));
    }

    #[test]
    fn names_and_client_urls_are_those_that_most_supporters_report() {
        let mut liar = report_of(Some(5), 9, "123");
        liar.membership.members[0].client_urls = vec!["https://elsewhere:2379".into()];
        let reports = [
            by('1', report_of(Some(5), 5, "123")),
            by('2', liar),
            by('3', report_of(Some(5), 6, "123")),
        ];
        let found = newly_confirmed(None, &ids("123"), &reports).unwrap();
        assert_eq!(found.membership, report_of(Some(5), 0, "123").membership);
    }

    #[test]
    fn numbers_that_no_log_reaches_are_refused() {
        assert_eq!(objection_to_position(&[1, 2, MAX_POSITION]), None);
        for wrong in [MAX_POSITION + 1, i64::MAX as u64, u64::MAX] {
            assert!(objection_to_position(&[1, wrong]).unwrap().contains(&wrong.to_string()));
        }
    }

    #[test]
    fn the_newest_list_that_a_quorum_reports_is_confirmed() {
        let last = report_of(Some(1), 1, "123");
        let reports = [
            by('1', report_of(Some(9), 9, "12")),
            by('2', report_of(Some(7), 7, "1234")),
            by('3', report_of(Some(7), 7, "1234")),
        ];
        let found = newly_confirmed(Some(&last), &ids("123"), &reports);
        assert_eq!(names(found).as_deref(), Some("1234"));
    }

    #[test]
    fn the_shown_list_says_whether_it_is_confirmed() {
        assert!(view(None, &[]).is_none());
        let reports = [by('1', report_of(Some(5), 5, "12")), by('2', report_of(Some(7), 7, "1"))];
        let unsure = view(None, &reports).unwrap();
        assert_eq!((unsure.confirmed, unsure.reporters, unsure.raft_index), (false, 1, 7));
        // The list that more members report is shown, although another report has a later position.
        let reports3 =
            [reports[0].clone(), by('3', report_of(Some(5), 6, "12")), reports[1].clone()];
        let unsure = view(None, &reports3).unwrap();
        assert_eq!((unsure.confirmed, unsure.reporters, unsure.raft_index), (false, 2, 6));
        let sure = view(Some(&report_of(Some(5), 5, "12")), &reports).unwrap();
        assert_eq!((sure.confirmed, sure.reporters, sure.raft_index), (true, 1, 5));
    }

    #[test]
    fn a_list_that_breaks_a_limit_is_refused() {
        assert_eq!(objection(&report_of(None, 1, "12a").membership), None);
        for bad in ["", "11", "ab"] {
            assert!(objection(&report_of(None, 1, bad).membership).is_some(), "{bad}");
        }
        let mut many = report_of(None, 1, "1").membership;
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
            let mut membership = report_of(None, 1, "1").membership;
            membership.members[0].name = name;
            membership.members[0].peer_urls = vec![url];
            assert!(objection(&membership).is_some());
        }
    }
}
