//! The verdict on claims: which members' data is wrong.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::claims::{Claim, ClaimSubject, ClaimValue};

/// Result of comparing the claims of all members once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CorruptionVerdict {
    /// Members whose data could be compared with that of others.
    pub compared: BTreeSet<u64>,
    /// Members whose data differs from that of a quorum.
    pub corrupt: BTreeSet<u64>,
    /// Whether members' claims differ and no quorum agrees on one value.
    pub is_undecided: bool,
}

/// Judges the claims of members, given by member id. For each subject, the right value is the one
/// that a majority of all `voters` claims. Learners are compared with that value, but do not count
/// towards the majority.
#[must_use]
pub fn judge_claims(voters: &BTreeSet<u64>, said: &BTreeMap<u64, Vec<Claim>>) -> CorruptionVerdict {
    let mut subjects: BTreeMap<ClaimSubject, BTreeMap<ClaimValue, BTreeSet<u64>>> = BTreeMap::new();
    for (member, claims) in said {
        for Claim { subject, value } in claims {
            subjects.entry(*subject).or_default().entry(*value).or_default().insert(*member);
        }
    }
    let mut verdict = CorruptionVerdict::default();
    // Members whose data was already compared at a newer revision. If only these members make
    // claims about an older revision, that revision is skipped.
    let mut settled = BTreeSet::new();
    // Sets of members that were found equal at a newer revision of their data.
    let mut equal: Vec<BTreeSet<u64>> = Vec::new();
    // Order of the comparison: first progress, then data from the newest revision to the oldest,
    // then entries. Entries come last because few members make a claim about the same entry.
    let rank = |subject: &ClaimSubject| match *subject {
        ClaimSubject::Progress(_) => (0, None),
        ClaimSubject::Data { revision, compacted: before }
        | ClaimSubject::Compaction { revision, previous: before } => {
            (1, Some(Reverse((revision, before))))
        }
        ClaimSubject::Entry(_) => (2, None),
    };
    let mut subjects: Vec<_> = subjects.into_iter().collect();
    subjects.sort_by_key(|(subject, _)| rank(subject));
    for (subject, values) in subjects {
        let is_data =
            matches!(subject, ClaimSubject::Data { .. } | ClaimSubject::Compaction { .. });
        let who: BTreeSet<u64> = values.values().flatten().copied().collect();
        if who.len() < 2 || is_data && who.is_subset(&settled) {
            continue;
        }
        verdict.add_subject(voters, &values, if is_data { &equal } else { &[] });
        if is_data {
            settled.extend(who);
            equal.extend(values.into_values());
        }
    }
    verdict.compared = settled;
    verdict
}

impl CorruptionVerdict {
    /// Adds the claims of all members about one subject to the verdict. `equal` contains sets of
    /// members whose newer data is equal. A difference within such a set does not count any more,
    /// because the data that differed has been overwritten or compacted since.
    fn add_subject(
        &mut self,
        voters: &BTreeSet<u64>,
        values: &BTreeMap<ClaimValue, BTreeSet<u64>>,
        equal: &[BTreeSet<u64>],
    ) {
        let quorum = voters.len() / 2 + 1;
        let said = || values.iter().filter(|(value, _)| **value != ClaimValue::Unreadable);
        let right = said().find(|(_, who)| who.intersection(voters).count() >= quorum);
        if let Some((_, who)) = right {
            let right = with_equal_members(who, equal);
            self.corrupt.extend(values.values().flatten().filter(|id| !right.contains(*id)));
            return;
        }
        // Claims of members that are already known to be corrupt do not make the result undecided.
        let all = said().flat_map(|(_, who)| who).copied();
        let left: BTreeSet<u64> = all.filter(|id| !self.corrupt.contains(id)).collect();
        let agree = |who: &BTreeSet<u64>| left.is_subset(&with_equal_members(who, equal));
        self.is_undecided |= !left.is_empty() && !said().any(|(_, who)| agree(who));
    }
}

/// Returns `who`, together with all members of each set in `equal` that contains a member of `who`.
fn with_equal_members(who: &BTreeSet<u64>, equal: &[BTreeSet<u64>]) -> BTreeSet<u64> {
    let also = equal.iter().filter(|members| !members.is_disjoint(who)).flatten();
    who.iter().chain(also).copied().collect()
}

/// Number of comparisons in a row that must find a member corrupt before its alarm is raised.
const MEMBER_ALARM_ROUNDS: u32 = 2;
/// Number of comparisons in a row without a quorum before the alarm of the whole cluster is raised.
/// This number is higher than that for a member, because missing members can return and make a
/// quorum.
const CLUSTER_ALARM_ROUNDS: u32 = 5;
/// Member id that means the whole cluster, as in an alarm.
const CLUSTER: u64 = 0;

/// Number of comparisons in a row that found each member, or the whole cluster, suspect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SuspectCounts(BTreeMap<u64, u32>);

/// Measures to take after a comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AlarmActions {
    /// Ids of the members whose CORRUPT alarm is due; 0 for the whole cluster's.
    pub alarms: Vec<u64>,
    /// Whether the next comparison should come soon, to confirm or clear a suspicion.
    pub hurry: bool,
}

impl SuspectCounts {
    /// Adds the verdict of the next comparison, and returns the measures that are due.
    pub fn add_verdict(&mut self, verdict: &CorruptionVerdict) -> AlarmActions {
        // A member that could not be compared keeps its number of suspect comparisons in a row.
        self.0.retain(|id, _| match *id {
            CLUSTER => verdict.is_undecided,
            id => verdict.corrupt.contains(&id) || !verdict.compared.contains(&id),
        });
        let mut measures = AlarmActions::default();
        let suspects = verdict.corrupt.iter().copied();
        for id in suspects.chain(verdict.is_undecided.then_some(CLUSTER)) {
            let rounds = self.0.entry(id).or_default();
            *rounds = rounds.saturating_add(1);
            let enough = if id == CLUSTER { CLUSTER_ALARM_ROUNDS } else { MEMBER_ALARM_ROUNDS };
            if *rounds >= enough {
                measures.alarms.push(id);
            } else {
                measures.hurry = true;
            }
        }
        measures
    }
}

#[cfg(test)]
mod tests {
    use super::super::Question;
    use super::*;

    fn hash(revision: i64, compacted: i64, hash: u32) -> Claim {
        Claim { subject: ClaimSubject::Data { revision, compacted }, value: ClaimValue::Hash(hash) }
    }

    fn stands(index: u64, revision: i64) -> Claim {
        Claim { subject: ClaimSubject::Entry(index), value: ClaimValue::Position(revision, -1) }
    }

    fn reached(reached: bool) -> Claim {
        let asked = Question { index: 7, revision: 5, compacted: -1 };
        Claim { subject: ClaimSubject::Progress(asked), value: ClaimValue::Reached(reached) }
    }

    fn verdict(voters: &[u64], said: &[(u64, &[Claim])]) -> CorruptionVerdict {
        let said = said.iter().map(|(id, claims)| (*id, claims.to_vec())).collect();
        judge_claims(&voters.iter().copied().collect(), &said)
    }

    fn corrupt(voters: &[u64], said: &[(u64, &[Claim])]) -> Vec<u64> {
        let verdict = verdict(voters, said);
        assert!(!verdict.is_undecided, "{verdict:?}");
        verdict.corrupt.into_iter().collect()
    }

    #[test]
    fn a_member_that_differs_from_a_quorum_is_corrupt_even_the_leader() {
        let (a, b) = (hash(9, -1, 1), hash(9, -1, 2));
        assert!(corrupt(&[1, 2, 3], &[(1, &[a]), (2, &[a]), (3, &[a])]).is_empty());
        assert_eq!(corrupt(&[1, 2, 3], &[(1, &[a]), (2, &[a]), (3, &[b])]), [3]);
        assert_eq!(corrupt(&[1, 2, 3], &[(1, &[b]), (2, &[a]), (3, &[a])]), [1]);
        let c = hash(9, -1, 3);
        let five: [(u64, &[Claim]); 5] = [(1, &[a]), (2, &[b]), (3, &[a]), (4, &[c]), (5, &[a])];
        assert_eq!(corrupt(&[1, 2, 3, 4, 5], &five), [2, 4]);
    }

    #[test]
    fn a_quorum_is_counted_among_all_voters() {
        let (a, b) = (hash(9, -1, 1), hash(9, -1, 2));
        let two_of_five = verdict(&[1, 2, 3, 4, 5], &[(1, &[a]), (2, &[a]), (3, &[b])]);
        assert!(two_of_five.is_undecided && two_of_five.corrupt.is_empty());
        let two = verdict(&[1, 2], &[(1, &[a]), (2, &[b])]);
        assert!(two.is_undecided && two.corrupt.is_empty());
    }

    #[test]
    fn a_learner_is_compared_but_does_not_count_for_the_quorum() {
        let (a, b) = (hash(9, -1, 1), hash(9, -1, 2));
        assert_eq!(corrupt(&[1], &[(1, &[a]), (2, &[b]), (3, &[b])]), [2, 3]);
        assert!(verdict(&[1, 2, 3], &[(1, &[a]), (2, &[b]), (4, &[a])]).is_undecided);
    }

    #[test]
    fn only_claims_about_the_same_subject_are_compared() {
        let said: [(u64, &[Claim]); 3] =
            [(1, &[hash(9, -1, 1)]), (2, &[hash(9, 4, 2)]), (3, &[hash(8, -1, 3)])];
        assert_eq!(verdict(&[1, 2, 3], &said), CorruptionVerdict::default());
    }

    #[test]
    fn a_member_whose_revision_does_not_match_its_entries_is_corrupt() {
        // Member 2 has applied more entries, so only member 3 makes a claim about the same entry as
        // member 1.
        let said: [(u64, &[Claim]); 3] = [
            (1, &[reached(true), stands(7, 5)]),
            (2, &[reached(true)]),
            (3, &[reached(false), stands(7, 4)]),
        ];
        assert_eq!(corrupt(&[1, 2, 3], &said), [3]);
        // Member 1 has a higher revision than the others after the same entries.
        let said: [(u64, &[Claim]); 3] =
            [(1, &[reached(true), stands(7, 6)]), (2, &[stands(7, 5)]), (3, &[stands(7, 5)])];
        assert_eq!(corrupt(&[1, 2, 3], &said), [1]);
    }

    #[test]
    fn an_old_difference_does_not_count_if_newer_data_is_equal() {
        let now = hash(9, 5, 1);
        let (then, other) = (hash(5, -1, 1), hash(5, -1, 2));
        let said: [(u64, &[Claim]); 3] = [(1, &[then, now]), (2, &[now]), (3, &[other, now])];
        assert!(corrupt(&[1, 2, 3], &said).is_empty());
        // The old difference makes member 3 corrupt, because its present data can't be compared.
        let said: [(u64, &[Claim]); 3] = [(1, &[then, now]), (2, &[then, now]), (3, &[other])];
        assert_eq!(corrupt(&[1, 2, 3], &said), [3]);
    }

    #[test]
    fn an_old_difference_to_a_third_member_does_not_count_if_newer_data_is_equal() {
        let now = hash(9, 5, 1);
        let (then, other) = (hash(5, -1, 1), hash(5, -1, 2));
        // Member 3 can be compared only at the old revision, where it agrees with member 1.
        let said: [(u64, &[Claim]); 3] = [(1, &[then, now]), (2, &[other, now]), (3, &[then])];
        assert!(corrupt(&[1, 2, 3], &said).is_empty());
        // The old claims of members 1 and 2 differ, and have no quorum. Their newer claims are
        // equal, so the old difference doesn't make the result undecided.
        assert!(corrupt(&[1, 2, 3, 4, 5], &said).is_empty());
        // Members 1 and 2 are equal now, but nothing shows that their old difference is gone.
        let said: [(u64, &[Claim]); 5] =
            [(1, &[other, now]), (2, &[other, now]), (3, &[then]), (4, &[then]), (5, &[then])];
        assert_eq!(corrupt(&[1, 2, 3, 4, 5], &said), [1, 2]);
    }

    #[test]
    fn the_claims_of_a_known_corrupt_member_leave_nothing_undecided() {
        let (a, b) = (hash(9, -1, 1), hash(9, -1, 2));
        let said: [(u64, &[Claim]); 3] =
            [(1, &[reached(true), a]), (2, &[reached(true)]), (3, &[reached(false), b])];
        assert_eq!(corrupt(&[1, 2, 3], &said), [3]);
    }

    #[test]
    fn an_alarm_needs_two_comparisons_for_a_member_and_five_for_the_cluster() {
        let compared = || [1, 2, 3].into();
        let bad =
            CorruptionVerdict { compared: compared(), corrupt: [3].into(), is_undecided: false };
        let good = CorruptionVerdict { corrupt: BTreeSet::new(), ..bad.clone() };
        let away = CorruptionVerdict { compared: [1, 2].into(), ..good.clone() };
        let mut counts = SuspectCounts::default();
        let idle = AlarmActions::default();
        let hurry = AlarmActions { hurry: true, ..idle.clone() };
        let due = |id| AlarmActions { alarms: vec![id], hurry: false };
        assert_eq!(counts.add_verdict(&bad), hurry);
        assert_eq!(counts.add_verdict(&good), idle);
        assert_eq!(counts.add_verdict(&bad), hurry);
        assert_eq!(counts.add_verdict(&away), idle, "not compared is not found again");
        assert_eq!(counts.add_verdict(&bad), due(3));
        assert_eq!(counts.add_verdict(&bad), due(3), "there is no hurry any more");
        assert_eq!(counts.add_verdict(&away), idle, "it may have been removed");

        let torn = CorruptionVerdict { is_undecided: true, ..good.clone() };
        let mut counts = SuspectCounts::default();
        for round in 1..5 {
            assert_eq!(counts.add_verdict(&torn), hurry, "{round}");
        }
        assert_eq!(counts.add_verdict(&torn), due(0));
        assert_eq!(counts.add_verdict(&good), idle);
        assert_eq!(counts.add_verdict(&torn), hurry);
    }
}
