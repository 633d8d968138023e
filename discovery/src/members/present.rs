//! A cluster's present members, and what a person should do about silent ones. These functions are
//! pure.
//!
//! The members are those of the list that a quorum of the voters confirmed. Before the first
//! confirmation, they are the founders. The report of a single member never adds or removes a
//! present member.

use std::time::Duration;

use discovery_types::api::{
    Explanation, ListedMember, MemberView, MembersView, RELEASED, SILENT_AFTER, UnknownMember,
};
use discovery_types::digest::MemberId;
use discovery_types::key::PublicKey;
use discovery_types::text::printable;
use ipnet::IpNet;

use super::roster::{Roster, RosterMember};
use crate::store::UnixMicros;
use crate::store::changes::{MembershipChanges, MembershipReport};
use crate::store::present::Trouble;

/// Address from which a member's agent redeemed its token, and the networks that the token is bound
/// to.
#[derive(Clone, Debug, Default)]
pub(crate) struct RedeemSource {
    /// Source address, as the service saw it.
    pub(crate) address: Option<String>,
    /// Networks that the token is bound to. An empty list means any network.
    pub(crate) bound_to: Vec<IpNet>,
}

/// Times from which a member's silence is computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SilenceTimes {
    /// Time at which the cluster's decided list was frozen or adopted. The silence of a member that
    /// never reported is measured from then.
    pub(crate) decided: UnixMicros,
    /// Current database time, in microseconds.
    pub(crate) now: UnixMicros,
    /// How long agents could report to this process. A process that was started a moment ago can
    /// call nobody silent.
    pub(crate) listening_for: Duration,
}

/// Returns the present members, without unknown ones. `source` returns where an agent redeemed its
/// token.
pub(crate) fn present_members(
    roster: &Roster,
    changes: &MembershipChanges,
    troubles: &[Trouble],
    times: SilenceTimes,
    source: impl Fn(&PublicKey) -> RedeemSource,
) -> MembersView {
    let SilenceTimes { decided, now, listening_for } = times;
    let confirmed = changes.confirmed.as_ref();
    let listed: Vec<ListedMember> = match confirmed {
        Some(said) => {
            said.membership.members.iter().map(|m| with_newest_urls(m, said, changes)).collect()
        }
        None => roster.founding_members(),
    };
    let view = |listed: ListedMember| {
        let known = roster.by_id(listed.id);
        let last = changes.reports.iter().find(|(id, _)| *id == listed.id).map(|(_, said)| said);
        let trouble = troubles.iter().find(|trouble| trouble.member == listed.id);
        let reported = last.map(|said| said.at_us);
        let heard = reported.max(trouble.map(|trouble| trouble.at_us));
        let is_overdue = is_overdue(heard.unwrap_or(decided), now);
        let is_silent = is_overdue && listening_for > SILENT_AFTER;
        let is_newest = trouble.filter(|trouble| Some(trouble.at_us) > reported);
        let is_released = is_newest.is_some_and(|trouble| trouble.text == RELEASED);
        let source = known.map(|known| source(&known.key)).unwrap_or_default();
        MemberView {
            id: listed.id,
            name: name_of(&listed, known),
            is_learner: listed.is_learner,
            is_leader: leader(changes) == Some(listed.id),
            client_urls: client_urls_of(&listed, known),
            peer_urls: listed.peer_urls,
            last_heard_ms: heard.map(|at| at / 1_000),
            is_silent: is_silent && !is_released,
            is_awaited: is_overdue && !is_silent && !is_released,
            is_released,
            disagreement: last
                .filter(|_| !is_overdue)
                .and_then(|said| disagreement(said, confirmed)),
            last_error: is_newest.filter(|_| !is_released).map(|trouble| trouble.text.clone()),
            source: source.address,
            bound_to: source.bound_to,
            zone: known.and_then(|known| known.record.zone.clone()),
            agent: None,
        }
    };
    let mut members: Vec<MemberView> = listed.into_iter().map(view).collect();
    members.sort_by_key(|member| member.id);
    MembersView { confirmed: confirmed.is_some(), members, unknown: Vec::new() }
}

/// Returns a member with the name and client URLs that a quorum of the voters reports now. A member
/// that restarts can change its name and client URLs without a membership change. So the confirmed
/// list can hold older values.
fn with_newest_urls(
    listed: &ListedMember,
    confirmed: &MembershipReport,
    changes: &MembershipChanges,
) -> ListedMember {
    let voters = confirmed.voters();
    let reports: Vec<&ListedMember> = changes
        .reports
        .iter()
        .filter(|(id, said)| voters.contains(id) && said.agrees(confirmed))
        .filter_map(|(_, said)| said.membership.members.iter().find(|m| m.id == listed.id))
        .collect();
    let same = |one: &ListedMember, other: &ListedMember| {
        one.name == other.name && one.client_urls == other.client_urls
    };
    let is_agreed = |one: &ListedMember| {
        let count = reports.iter().filter(|other| same(one, other)).count();
        count > voters.len() / 2
    };
    reports.iter().find(|one| is_agreed(one)).map_or_else(|| listed.clone(), |one| (*one).clone())
}

fn is_overdue(heard: UnixMicros, now: UnixMicros) -> bool {
    let limit = UnixMicros::try_from(SILENT_AFTER.as_micros()).unwrap_or(UnixMicros::MAX);
    now.saturating_sub(heard) > limit
}

/// Returns the member's name. A member that has not started yet has none in the cluster's list, so
/// its record's name is used.
fn name_of(listed: &ListedMember, known: Option<&RosterMember>) -> String {
    match known {
        Some(known) if listed.name.is_empty() => known.record.name.to_string(),
        _ => listed.name.clone(),
    }
}

fn client_urls_of(listed: &ListedMember, known: Option<&RosterMember>) -> Vec<String> {
    match known {
        Some(known) if listed.client_urls.is_empty() => {
            known.record.client_urls.iter().map(ToString::to_string).collect()
        }
        _ => listed.client_urls.clone(),
    }
}

/// Returns the leader that the newest report names.
fn leader(changes: &MembershipChanges) -> Option<MemberId> {
    changes.reports.iter().max_by_key(|(_, said)| said.at_us)?.1.leader
}

fn disagreement(said: &MembershipReport, confirmed: Option<&MembershipReport>) -> Option<String> {
    let confirmed = confirmed.filter(|confirmed| !said.agrees(confirmed))?;
    let names: Vec<String> = said
        .membership
        .members
        .iter()
        .map(|member| match member.name.is_empty() {
            true => member.id.to_string(),
            false => member.name.clone(),
        })
        .collect();
    let at = |said: &MembershipReport| said.membership.configuration.map(|at| format!(" at {at}"));
    Some(format!(
        "names {}{}, not the confirmed members{}",
        names.join(", "),
        at(said).unwrap_or_default(),
        at(confirmed).unwrap_or_default()
    ))
}

/// Explains what a person should know and do about the members of the cluster `name`.
pub(crate) fn explain(view: &MembersView, name: &str) -> Vec<Explanation> {
    let voters: Vec<&MemberView> =
        view.members.iter().filter(|member| !member.is_learner).collect();
    let well = voters.iter().filter(|member| member.is_healthy()).count();
    let quorum = voters.len() / 2 + 1;
    let mut lines: Vec<Explanation> = explain_unknown(&view.unknown).into_iter().collect();
    let awaited = voters.iter().filter(|member| member.is_awaited).count();
    let released = voters.iter().filter(|member| member.is_released).count();
    let lacks_quorum = well + awaited + released < quorum && !voters.is_empty();
    // With unknown members, the list is that of an old backup: its silent members may have been
    // removed long ago, and then nobody should start them or recover the cluster.
    let is_outdated = lacks_quorum && !view.unknown.is_empty();
    if lacks_quorum && !is_outdated {
        lines.push(explain_no_quorum(&voters, well, quorum));
    }
    lines.extend(explain_awaited(view));
    let left = well.saturating_sub(quorum);
    for member in view.members.iter().filter(|member| member.is_silent && !is_outdated) {
        lines.push(explain_silent(member, name, (well >= quorum).then_some(left)));
    }
    for member in view.members.iter().filter(|member| !member.is_silent && !member.is_awaited) {
        if member.is_released {
            lines.push(member_explanation(
                "member_released",
                member,
                format!("{} was released: its node runs without an agent", member.display_name()),
                "release the other members, too; after the last one: muster-discovery cluster retire",
            ));
        } else if let Some(error) = &member.last_error {
            lines.push(Explanation {
                last_error: Some(error.clone()),
                ..member_explanation(
                    "member_without_leader",
                    member,
                    format!("the node of {} has no leader", member.display_name()),
                    "look at `muster-agent status` on that host",
                )
            });
        } else if let Some(disagreement) = &member.disagreement {
            lines.push(member_explanation(
                "member_disagrees",
                member,
                format!("{} {disagreement}", member.display_name()),
                "look at `muster-agent member list` on that host; a member that was set back or cut \
                 off has to be replaced",
            ));
        }
    }
    lines
}

pub(super) fn member_explanation(
    code: &str,
    member: &MemberView,
    missing: String,
    command: &str,
) -> Explanation {
    Explanation {
        code: code.into(),
        missing,
        held_by: vec![member.display_name()],
        last_error: None,
        next_retry_ms: None,
        command: Some(command.to_owned()),
    }
}

/// Explains that some members have not reported since this process began to listen. Returns `None`
/// if there are no such members. The service can tell only later whether they are silent.
fn explain_awaited(view: &MembersView) -> Option<Explanation> {
    let awaited: Vec<String> = view
        .members
        .iter()
        .filter(|member| member.is_awaited)
        .map(MemberView::display_name)
        .collect();
    (!awaited.is_empty()).then(|| Explanation {
        code: "members_awaited".into(),
        missing: format!(
            "agents could not report to this service until a moment ago, and these members have not \
             reported since: {}",
            awaited.join(", ")
        ),
        held_by: awaited,
        last_error: None,
        next_retry_ms: None,
        command: Some(
            "wait: agents report every two minutes, and five minutes after the service came back \
             this says who is silent"
                .into(),
        ),
    })
}

/// Explains that members which the database doesn't know have proved that they joined. Returns
/// `None` if there are no such members.
fn explain_unknown(unknown: &[UnknownMember]) -> Option<Explanation> {
    let names: Vec<String> = unknown
        .iter()
        .map(|member| format!("{} ({})", printable(&member.name), member.id))
        .collect();
    let first = unknown.first()?;
    Some(Explanation {
        code: "members_unknown".into(),
        missing: format!(
            "members that this service doesn't know have proved that they joined, so its database is \
             older than that: {}",
            names.join(", ")
        ),
        held_by: vec!["admin".into()],
        last_error: None,
        next_retry_ms: None,
        command: Some(format!(
            "wait for two minutes: the voters shown here report, and a quorum of them confirms the \
             others. If most of these voters were replaced since the backup, restore a newer one. Don't \
             retire or recover the cluster for what is shown here: ask it itself, by `muster-agent \
             member list` on the host of {}",
            printable(&first.name)
        )),
    })
}

fn explain_no_quorum(voters: &[&MemberView], well: usize, quorum: usize) -> Explanation {
    let held_by = voters.iter().filter(|member| !member.is_healthy());
    Explanation {
        code: "no_quorum".into(),
        missing: format!(
            "{well} of {} voters say that they have a leader, and {quorum} are a quorum: without one \
             the cluster takes no write",
            voters.len()
        ),
        held_by: held_by.map(|member| member.display_name()).collect(),
        last_error: None,
        next_retry_ms: None,
        command: Some(
            "start those hosts again; only if most voters are lost for good, run `muster-agent \
             recover examine` on each host that is left, and then `recover make` on one of them"
                .into(),
        ),
    }
}

/// Explains a silent member. `left` is the number of further failures that the quorum tolerates;
/// `None` without a quorum.
fn explain_silent(member: &MemberView, name: &str, left: Option<usize>) -> Explanation {
    let who = member.display_name();
    let kind = if member.is_learner { "learner" } else { "voter" };
    let since = match member.last_heard_ms {
        Some(at) => format!("was last heard at {}", time(at)),
        None => "has never reported that its node runs".to_owned(),
    };
    let then = match left {
        Some(left) => format!("; the others have a quorum, and tolerate {left} more failures"),
        None => String::new(),
    };
    let command = match left {
        Some(_) => format!(
            "start that host's agent again; if the host is gone for good: muster-discovery token \
             create --cluster {name} --kind join --replace {who} --out {who}.bundle, and start \
             muster-agent with it on another host"
        ),
        None => "start that host's agent again".to_owned(),
    };
    let code = if member.last_heard_ms.is_some() { "member_silent" } else { "member_never_heard" };
    Explanation {
        last_error: member.last_error.clone(),
        ..member_explanation(
            code,
            member,
            format!("{kind} {who} ({}) {since}{then}", member.id),
            &command,
        )
    }
}

fn time(ms: i64) -> String {
    match jiff::Timestamp::from_second(ms.div_euclid(1_000)) {
        Ok(time) => time.to_string(),
        Err(_) => format!("{ms} ms"),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn awaited(id: u64) -> MemberView {
        MemberView { is_awaited: true, ..member(id, Some(1), false) }
    }

    pub(in crate::members) fn member(id: u64, heard: Option<i64>, is_silent: bool) -> MemberView {
        MemberView {
            id: MemberId::new(id),
            name: format!("db-{id}"),
            is_learner: false,
            is_leader: false,
            peer_urls: Vec::new(),
            client_urls: Vec::new(),
            last_heard_ms: heard,
            is_silent,
            is_awaited: false,
            is_released: false,
            disagreement: None,
            last_error: None,
            source: None,
            bound_to: Vec::new(),
            zone: None,
            agent: None,
        }
    }

    /// Report of a voter in a cluster of three, in which the first member serves clients at `url`.
    fn said(url: &str) -> MembershipReport {
        let listed = |id: u64| ListedMember {
            id: MemberId::new(id),
            name: format!("db-{id}"),
            peer_urls: vec![format!("https://10.0.0.{id}:2380")],
            client_urls: vec![if id == 1 { url.to_owned() } else { String::new() }],
            is_learner: false,
        };
        let members = (1..=3).map(listed).collect();
        let membership = discovery_types::api::Membership { configuration: Some(3), members };
        MembershipReport { membership, term: 2, index: 9, leader: None, at_us: 0 }
    }

    #[test]
    fn client_urls_are_those_that_a_quorum_reports_now() {
        let shown = |reports: &[&str]| {
            let confirmed = said("https://old:2379");
            let said = (1..).map(MemberId::new).zip(reports.iter().map(|url| said(url)));
            let changes =
                MembershipChanges { reports: said.collect(), ..MembershipChanges::default() };
            let first = &confirmed.membership.members[0];
            with_newest_urls(first, &confirmed, &changes).client_urls.remove(0)
        };
        let (old, new) = ("https://old:2379", "https://new:2379");
        assert_eq!(shown(&[new, new, old]), new);
        assert_eq!(shown(&[new, old, old]), old);
        assert_eq!(shown(&[new]), old, "one member's word moves nobody");
    }

    fn told(members: Vec<MemberView>) -> String {
        told_with(members, Vec::new())
    }

    fn told_with(members: Vec<MemberView>, unknown: Vec<UnknownMember>) -> String {
        let lines = explain(&MembersView { confirmed: true, members, unknown }, "prod");
        let line = |line: &Explanation| {
            let command = line.command.as_deref().unwrap_or_default();
            format!("{}: {} | {}\n  {command}\n", line.code, line.missing, line.held_by.join(","))
        };
        lines.iter().map(line).collect()
    }

    #[test]
    fn a_healthy_cluster_has_no_explanations() {
        let well = |id| member(id, Some(1_000), false);
        assert_eq!(told(vec![well(1), well(2), well(3)]), "");
    }

    #[test]
    fn a_silent_voter_is_named_with_the_command_that_replaces_it() {
        let members = vec![
            member(1, Some(1_000), false),
            member(2, Some(1_000), true),
            member(3, Some(1), false),
        ];
        insta::assert_snapshot!(told(members), @"
        member_silent: voter db-2 (0000000000000002) was last heard at 1970-01-01T00:00:01Z; the others have a quorum, and tolerate 0 more failures | db-2
          start that host's agent again; if the host is gone for good: muster-discovery token create --cluster prod --kind join --replace db-2 --out db-2.bundle, and start muster-agent with it on another host
        ");
    }

    #[test]
    fn members_that_could_not_report_are_neither_silent_nor_a_lost_majority() {
        insta::assert_snapshot!(told(vec![member(1, Some(1), false), awaited(2), awaited(3)]), @"
        members_awaited: agents could not report to this service until a moment ago, and these members have not reported since: db-2, db-3 | db-2,db-3
          wait: agents report every two minutes, and five minutes after the service came back this says who is silent
        ");
        let lost = told(vec![member(1, Some(1), true), member(2, Some(1), true), awaited(3)]);
        assert!(lost.starts_with("no_quorum"), "two of three are silent in any case: {lost}");
    }

    #[test]
    fn a_lost_majority_is_explained_first_with_the_way_to_recover() {
        let members = vec![
            member(1, Some(1_000), false),
            member(2, Some(1_000), true),
            member(3, None, true),
        ];
        insta::assert_snapshot!(told(members), @"
        no_quorum: 1 of 3 voters say that they have a leader, and 2 are a quorum: without one the cluster takes no write | db-2,db-3
          start those hosts again; only if most voters are lost for good, run `muster-agent recover examine` on each host that is left, and then `recover make` on one of them
        member_silent: voter db-2 (0000000000000002) was last heard at 1970-01-01T00:00:01Z | db-2
          start that host's agent again
        member_never_heard: voter db-3 (0000000000000003) has never reported that its node runs | db-3
          start that host's agent again
        ");
    }

    #[test]
    fn nobody_is_told_to_recover_a_cluster_whose_list_is_older_than_its_members() {
        let other = UnknownMember { id: MemberId::new(9), name: "db-9".into(), last_heard_ms: 1 };
        let silent = vec![member(1, Some(1_000), true), member(2, Some(1_000), true)];
        insta::assert_snapshot!(told_with(silent, vec![other.clone()]), @"
        members_unknown: members that this service doesn't know have proved that they joined, so its database is older than that: db-9 (0000000000000009) | admin
          wait for two minutes: the voters shown here report, and a quorum of them confirms the others. If most of these voters were replaced since the backup, restore a newer one. Don't retire or recover the cluster for what is shown here: ask it itself, by `muster-agent member list` on the host of db-9
        ");
        // With a quorum, the list will be confirmed anew, and a silent member is one.
        let two = [member(1, Some(1_000), false), member(2, Some(1_000), false)];
        let told = told_with([&two[..], &[member(3, Some(1), true)]].concat(), vec![other]);
        assert!(told.contains("members_unknown") && told.contains("member_silent"), "{told}");
    }

    #[test]
    fn a_released_member_is_neither_silent_nor_missing() {
        let released = |id| MemberView { is_released: true, ..member(id, Some(1_000), false) };
        insta::assert_snapshot!(told(vec![member(1, Some(1), false), released(2), released(3)]), @"
        member_released: db-2 was released: its node runs without an agent | db-2
          release the other members, too; after the last one: muster-discovery cluster retire
        member_released: db-3 was released: its node runs without an agent | db-3
          release the other members, too; after the last one: muster-discovery cluster retire
        ");
    }

    #[test]
    fn a_report_is_overdue_after_five_minutes() {
        let limit = SILENT_AFTER.as_micros() as UnixMicros;
        assert!(!is_overdue(1_000, 1_000 + limit));
        assert!(is_overdue(1_000, 1_001 + limit));
    }
}
