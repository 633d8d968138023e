//! Tables of verdicts. Each table names the place of its rule in etcd's sources.

use super::*;

/// Makes the members from a string with one letter for each; ids count from 1:
/// - `V` is a voter, `v` a voter that has not started;
/// - `L` is a learner;
/// - `W` is a promised voter, `w` one that has not started.
///
/// The members in `away` are not connected; those in `fresh` have been connected for a short time
/// only.
fn view(members: &str, away: &[u64], fresh: &[u64]) -> MembershipView {
    let standing = |(id, kind): (u64, char)| MemberStanding {
        id,
        role: match kind {
            'L' => MemberRole::Learner,
            'W' | 'w' => MemberRole::PromisedVoter,
            _ => MemberRole::Voter,
        },
        is_started: kind.is_uppercase(),
        connection: match id {
            _ if away.contains(&id) => Connection::Missing,
            _ if fresh.contains(&id) => Connection::Fresh,
            _ => Connection::Healthy,
        },
    };
    (1..).zip(members.chars()).map(standing).collect()
}

fn not_started(started: usize, needed: usize) -> Option<QuorumObjection> {
    Some(QuorumObjection::NotEnoughStarted { started, needed })
}

fn unhealthy(healthy: usize, needed: usize) -> Option<QuorumObjection> {
    Some(QuorumObjection::Unhealthy { healthy, needed })
}

/// Follows etcd's `mayAddMember` (`server/etcdserver/server.go`) and `IsReadyToAddVotingMember`
/// (`server/etcdserver/api/membership/cluster.go`). The verdicts are those of etcd 3.5 and 3.7, as
/// measured. The exceptions are the cases with promised voters.
#[test]
fn adding_a_voter_needs_a_quorum_of_the_resulting_voters() {
    for (members, away, fresh, expected) in [
        ("V", &[][..], &[][..], None),
        ("Vv", &[2], &[], not_started(1, 2)),
        ("VV", &[], &[], None),
        ("VV", &[], &[2], unhealthy(1, 2)),
        ("VVV", &[], &[], None),
        ("VVV", &[3], &[], unhealthy(2, 3)),
        ("VVVv", &[4], &[], None),
        ("VVVVV", &[5], &[], None),
        ("VVVVV", &[4, 5], &[], unhealthy(3, 4)),
        ("VVvv", &[3, 4], &[], not_started(2, 3)),
        ("VVVL", &[4], &[], None),
        ("Vw", &[2], &[], not_started(1, 2)),
        ("VW", &[], &[], unhealthy(2, 3)),
        ("VVVW", &[4], &[], unhealthy(3, 4)),
    ] {
        let found = view(members, away, fresh).addition_objections(false);
        let found = found.first().copied();
        assert_eq!(found, expected, "{members} without {away:?}, just back {fresh:?}");
    }
}

#[test]
fn all_objections_to_an_addition_are_returned_in_etcds_order() {
    let found = view("VVvv", &[3, 4], &[]).addition_objections(false);
    assert_eq!(found, [not_started(2, 3).unwrap(), unhealthy(2, 3).unwrap()]);
}

/// Follows etcd's `mayAddMember` (`server/etcdserver/server.go`) for a learner.
#[test]
fn adding_a_learner_needs_healthy_members_only() {
    for (members, away, expected) in [
        ("V", &[][..], None),
        ("VVV", &[3], unhealthy(2, 3)),
        ("VVV", &[], None),
        ("VVVvv", &[4, 5], unhealthy(3, 4)),
        ("VVVVvv", &[5, 6], None),
        ("VW", &[], None),
    ] {
        let found = view(members, away, &[]).addition_objections(true);
        assert_eq!(found.first().copied(), expected, "{members} without {away:?}");
    }
}

/// Follows etcd's `mayRemoveMember` (`server/etcdserver/server.go`) and
/// `IsReadyToRemoveVotingMember` (`server/etcdserver/api/membership/cluster.go`). One rule is our
/// own: the members that stay and are reachable must be a quorum.
#[test]
fn a_removal_must_leave_a_reachable_quorum() {
    for (members, away, id, expected) in [
        ("V", &[][..], 1, not_started(0, 1)),
        ("VV", &[], 2, None),
        ("VV", &[2], 2, None),
        ("VV", &[2], 1, unhealthy(1, 2)),
        ("Vv", &[2], 1, not_started(0, 1)),
        ("Vv", &[2], 2, None),
        ("VVV", &[3], 3, None),
        ("VVV", &[3], 2, unhealthy(2, 3)),
        ("VVV", &[2, 3], 3, unhealthy(1, 2)),
        ("VVV", &[], 1, None),
        ("VVVL", &[2, 3, 4], 4, None),
        ("VW", &[2], 2, None),
        ("VVVVV", &[5], 4, None),
        ("VVVVV", &[4, 5], 3, unhealthy(3, 4)),
        ("VVVV", &[3, 4], 4, None),
        ("VVVVV", &[3, 4, 5], 5, unhealthy(2, 3)),
        ("VVV", &[], 9, None),
        ("VVV", &[2, 3], 9, unhealthy(1, 2)),
    ] {
        let found = view(members, away, &[]).removal_objection(id);
        assert_eq!(found, expected, "{members} without {away:?}, remove {id}");
    }
}

/// Follows etcd's `mayPromoteMember` (`server/etcdserver/server.go`) and `IsReadyToPromoteMember`
/// (`server/etcdserver/api/membership/cluster.go`).
#[test]
fn a_promotion_must_not_cost_the_quorum() {
    for (members, expected) in
        [("VL", None), ("VVvvvL", not_started(3, 4)), ("VvL", None), ("VvvL", not_started(2, 3))]
    {
        assert_eq!(view(members, &[], &[]).promotion_objection(), expected, "{members}");
    }
}

/// Follows etcd's `ValidateConfigurationChange` (`server/etcdserver/api/membership/cluster.go`).
#[test]
fn learners_are_limited() {
    for (members, max_learners, expected) in [
        ("VVV", 1, true),
        ("VVVL", 1, false),
        ("VW", 1, true),
        ("VWL", 1, false),
        ("VVVL", 2, true),
        ("VVV", 0, false),
    ] {
        let found = view(members, &[], &[]).has_room_for_learner(max_learners);
        assert_eq!(found, expected, "{members} with at most {max_learners}");
    }
}

#[test]
fn more_than_half_of_the_voters_are_a_quorum() {
    for (voters, expected) in [(0, 1), (1, 1), (2, 2), (3, 2), (4, 3), (5, 3)] {
        assert_eq!(quorum(voters), expected, "{voters}");
    }
}
