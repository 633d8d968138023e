//! Chooses the survivor from which a new cluster is made, and finds objections to it. Pure.

use std::cmp::Reverse;

use super::Survivor;

/// Returns how far a survivor's log goes, by Raft's own rule: the last entry's term, then its
/// index. `None` if no cluster can be made from it.
fn log_end(survivor: &Survivor) -> Option<(u64, u64)> {
    let log = survivor.observed.log.as_ref()?;
    (survivor.observed.state == "whole").then_some((log.last_term, log.last_index))
}

/// Returns the index of the survivor whose log goes furthest; on a tie, of the member with the
/// lower id. So two hosts that have each other's reports never both make a cluster.
pub(crate) fn best(survivors: &[Survivor]) -> Option<usize> {
    let id = |one: &Survivor| u64::from_str_radix(one.observed.member_id.as_deref()?, 16).ok();
    let whole = survivors
        .iter()
        .enumerate()
        .filter_map(|(n, one)| Some((log_end(one)?, Reverse((id(one), n)), n)));
    whole.max_by_key(|(reach, member, _)| (*reach, *member)).map(|(.., n)| n)
}

/// Returns why no cluster should be made from `survivors[own]`; empty if one may be made.
pub(crate) fn objections(survivors: &[Survivor], own: usize) -> Vec<String> {
    if survivors[own].observed.is_recovery_unfinished() {
        return Vec::new();
    }
    let mut all = Vec::new();
    let place = |one: &Survivor| format!("{} on {}", one.data_dir, one.host);
    let chosen = &survivors[own];
    if log_end(chosen).is_none() {
        let problem = chosen.observed.problem.as_deref().unwrap_or("no member's data");
        all.push(format!("{} is {}: {problem}", place(chosen), chosen.observed.state));
    }
    for one in survivors.iter().filter(|one| one.observed.state == "in-use" && *one != chosen) {
        all.push(format!("a node runs in {}: stop it first, and look again", place(one)));
    }
    let cluster = |one: &Survivor| one.observed.cluster_id.clone();
    let made = |one: &&Survivor| one.observed.forced.is_some() && cluster(one) != cluster(chosen);
    for one in survivors.iter().filter(made) {
        all.push(format!(
            "a new cluster was made already, of {}: let this host join that",
            place(one)
        ));
    }
    for one in survivors.iter().filter(|one| cluster(one).is_some() && !made(one)) {
        if cluster(chosen).is_some() && cluster(one) != cluster(chosen) {
            all.push(format!("{} is of another cluster", place(one)));
        }
    }
    if let Some(best) = best(survivors).map(|best| &survivors[best])
        && best != chosen
        && cluster(best) == cluster(chosen)
    {
        let as_far = log_end(best) == log_end(chosen);
        let how = if as_far { "goes as far, and has the lower member id" } else { "goes further" };
        all.push(format!("{} {how}: make the cluster there", place(best)));
    }
    all
}

/// Returns warnings for an operator who makes a cluster from `survivors[own]`.
pub(crate) fn warnings(survivors: &[Survivor], own: usize) -> Vec<String> {
    let mut all = Vec::new();
    let observed = &survivors[own].observed;
    let (Some(log), Some(store)) = (&observed.log, &observed.store) else { return all };
    let voters: Vec<_> = store.members.iter().filter(|member| !member.is_learner).collect();
    let whole = |id: &str| {
        let of_member = |one: &&Survivor| one.observed.member_id.as_deref() == Some(id);
        survivors.iter().filter(of_member).any(|one| log_end(one).is_some())
    };
    let left = voters.iter().filter(|member| whole(&member.id)).count();
    if left > voters.len() / 2 {
        all.push(format!(
            "{left} of {} voters have their data: if they can run, start them instead, and nothing is lost",
            voters.len()
        ));
    }
    let gone: Vec<&str> = voters
        .iter()
        .filter(|member| !whole(&member.id))
        .map(|member| if member.name.is_empty() { member.id.as_str() } else { &member.name })
        .collect();
    if !gone.is_empty() {
        all.push(format!("what only {} had is lost", gone.join(", ")));
    }
    let unknown = log.last_index.saturating_sub(log.committed);
    let (kept, risk) = match unknown {
        0 => return all,
        1 => ("1 entry is kept".to_owned(), "it may be a write that was"),
        more => (format!("{more} entries are kept"), "some of them may be writes that were"),
    };
    all.push(format!(
        "{kept} that this directory does not know to be committed: {risk} never acknowledged"
    ));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recover::{
        DirectoryReport, ForcedCluster, LogReport, Maker, MemberIdentity, StoreReport, StoredMember,
    };

    fn survivor(id: &str, state: &str, last: (u64, u64)) -> Survivor {
        let member = |id: &str| StoredMember {
            id: id.to_owned(),
            name: format!("db-{id}"),
            is_learner: false,
        };
        Survivor {
            host: format!("h{id}"),
            data_dir: "/d".to_owned(),
            observed: DirectoryReport {
                maker: Maker::MusterNode,
                state: state.to_owned(),
                problem: None,
                cluster_id: Some("c".to_owned()),
                member_id: Some(id.to_owned()),
                incarnation: None,
                name: None,
                log: Some(LogReport { last_term: last.0, last_index: last.1, committed: 5 }),
                store: Some(StoreReport {
                    applied: 5,
                    revision: 9,
                    members: ["1", "2", "3"].map(member).into(),
                }),
                forced: None,
            },
        }
    }

    fn made(rearmed: bool) -> ForcedCluster {
        let bearer = |id: &str| MemberIdentity {
            cluster_id: id.to_owned(),
            member_id: id.to_owned(),
            incarnation: id.to_owned(),
        };
        ForcedCluster { was: bearer("1"), is: bearer("2"), last_index: 7, last_term: 2, rearmed }
    }

    #[test]
    fn a_log_that_ends_in_a_later_term_goes_further_than_a_longer_log() {
        let all = [survivor("1", "whole", (2, 90)), survivor("2", "whole", (3, 7))];
        assert_eq!(best(&all), Some(1));
        assert!(objections(&all, 0)[0].contains("goes further"));
        assert_eq!(objections(&all, 1), Vec::<String>::new());
        let mut equal = [survivor("2", "whole", (2, 7)), survivor("1", "whole", (2, 7))];
        assert_eq!(best(&equal), Some(1));
        assert!(objections(&equal, 1).is_empty());
        assert!(objections(&equal, 0)[0].contains("has the lower member id"));
        equal.reverse();
        assert_eq!(best(&equal), Some(0), "in whatever order they are told");
    }

    #[test]
    fn damaged_removed_or_used_directories_are_not_chosen() {
        for state in ["damaged", "removed", "in-use", "unfinished", "empty"] {
            let all = [survivor("1", state, (9, 9)), survivor("2", "whole", (2, 7))];
            assert_eq!(best(&all), Some(1), "{state}");
            assert!(!objections(&all, 0).is_empty(), "{state}");
            assert_eq!(objections(&all, 1).is_empty(), state != "in-use", "{state}");
        }
        assert_eq!(best(&[]), None);
    }

    #[test]
    fn a_begun_recovery_is_completed_regardless_of_the_others() {
        let mut all = [survivor("1", "whole", (2, 7)), survivor("2", "whole", (9, 9))];
        all[0].observed.cluster_id = Some("new".to_owned());
        all[0].observed.forced = Some(made(false));
        assert!(objections(&all, 0).is_empty());
        all[0].observed.forced = Some(made(true));
        assert!(!objections(&all, 0).is_empty());
    }

    #[test]
    fn only_one_of_two_hosts_with_each_others_reports_may_make_a_cluster() {
        let all = [survivor("1", "whole", (2, 7)), survivor("2", "whole", (2, 7))];
        let may = |own| objections(&all, own).is_empty();
        assert_eq!([may(0), may(1)], [true, false]);
        let mut later = all;
        later[0].observed.cluster_id = Some("new".to_owned());
        later[0].observed.forced = Some(made(false));
        assert!(objections(&later, 1)[0].contains("made already"), "{:?}", objections(&later, 1));
    }

    #[test]
    fn data_of_another_cluster_is_an_objection() {
        let mut all = [survivor("1", "whole", (2, 7)), survivor("2", "whole", (2, 7))];
        all[1].observed.cluster_id = Some("other".to_owned());
        assert!(objections(&all, 0)[0].contains("another cluster"));
    }

    #[test]
    fn warnings_name_what_is_lost_and_a_quorum_that_could_start() {
        let one = [survivor("1", "whole", (2, 7))];
        assert_eq!(warnings(&one, 0)[0], "what only db-2, db-3 had is lost");
        assert!(warnings(&one, 0)[1].starts_with("2 entries are kept"));
        let single = warnings(&[survivor("1", "whole", (2, 6))], 0);
        assert!(single[1].starts_with("1 entry is kept"), "{single:?}");
        assert!(single[1].ends_with("it may be a write that was never acknowledged"));
        let two = [survivor("1", "whole", (2, 7)), survivor("2", "whole", (2, 7))];
        assert!(warnings(&two, 0)[0].starts_with("2 of 3 voters have their data"));
        let damaged = [survivor("1", "whole", (2, 5)), survivor("2", "damaged", (2, 7))];
        assert_eq!(warnings(&damaged, 0), ["what only db-2, db-3 had is lost"]);
        // Two of three voters are a majority; a learner doesn't raise the number of voters to four.
        let mut learning = two;
        for one in &mut learning {
            let store = one.observed.store.as_mut().unwrap();
            store.members.push(StoredMember {
                id: "4".to_owned(),
                name: "db-4".to_owned(),
                is_learner: true,
            });
        }
        assert!(warnings(&learning, 0)[0].starts_with("2 of 3 voters have their data"));
        assert_eq!(warnings(&learning, 0)[1], "what only db-3 had is lost");
    }
}
