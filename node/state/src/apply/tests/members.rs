//! Changes of members are written to the table, passed on to consensus, and carried out once each.

use super::*;

#[test]
fn a_change_of_members_is_in_the_table_and_passed_to_consensus() {
    let mut world = ApplyHarness::new();
    let learner = Member { is_learner: true, ..member(9) };
    let (outcome, changes) = world.change(&MemberChange::Add(learner));
    let Ok(Response::MembersChanged(changed)) = outcome else { panic!("{outcome:?}") };
    assert_eq!(changed.configuration_index, 1);
    assert_eq!(
        changed.members.iter().map(|m| (m.id, m.is_learner)).collect::<Vec<_>>(),
        [(7, false), (9, true)]
    );
    let members = Members { voters: vec![7], learners: vec![9] };
    let change = Some(ConfChange::Learner(9));
    assert_eq!(changes, [AppliedChange { index: 1, change, members: members.clone() }]);
    assert_eq!(world.machine.members(), members);
    assert_eq!(world.revision(), 1, "members are not part of the key space");
}

#[test]
fn a_change_planned_on_an_older_configuration_is_refused() {
    let mut world = ApplyHarness::new();
    let learner = Member { is_learner: true, ..member(9) };
    let added = world.planned(&MemberChange::Add(learner), 0);
    assert!(added.is_ok(), "{added:?}");
    let now = world.machine.store().view().members().configuration_index();
    let promotion = MemberChange::Promote(MemberId(9));
    let stale = world.planned(&promotion, 0);
    assert_eq!(stale, Err(ApplyError::Members(ChangeError::Stale { now })));
    assert!(world.planned(&promotion, now).is_ok());
}

#[test]
fn an_operation_is_carried_out_once_on_every_member_and_after_every_restart() {
    let request = |change, operation| ChangeRequest {
        change,
        operation: Some(OperationId([operation; 16])),
        planned_at: None,
    };
    let learner = Member { is_learner: true, ..member(9) };
    let elsewhere = vec!["http://elsewhere:2380".to_owned()];
    let id = MemberId(9);
    let again = |id, at| Member { id: MemberId(id), peer_urls: vec![at], ..learner.clone() };
    let asked = [
        (request(MemberChange::Add(learner.clone()), 1), Ok(1)),
        // The operation id is that of the first change, although this change adds another member.
        (request(MemberChange::Add(again(10, "http://ten:2380".to_owned())), 1), Err(1)),
        (request(MemberChange::Promote(id), 2), Ok(3)),
        (request(MemberChange::Update(id, elsewhere.clone()), 3), Ok(4)),
        (request(MemberChange::Update(id, vec!["http://third:2380".to_owned()]), 4), Ok(5)),
        // Later operations on this member have followed, but this operation's id is still
        // remembered.
        (request(MemberChange::Update(id, elsewhere), 3), Err(4)),
        (request(MemberChange::Remove(id), 5), Ok(7)),
        // The operation ids of a removed member are still remembered.
        (request(MemberChange::Add(again(11, "http://eleven:2380".to_owned())), 1), Err(1)),
        (request(MemberChange::Remove(MemberId(7)), 5), Err(7)),
    ];
    let mut worlds = [ApplyHarness::new(), ApplyHarness::new()];
    for (asked, expected) in asked {
        for world in &mut worlds {
            world.index += 1;
            let change = Operation::ChangeMember((&asked).into());
            let (outcome, _) = world.apply_as(EntryKind::ConfChange, change);
            let found = match outcome {
                Ok(Response::MembersChanged(changed)) => Ok(changed.configuration_index),
                Err(ApplyError::Members(ChangeError::CarriedOut { at })) => Err(at),
                other => panic!("{other:?}"),
            };
            assert_eq!(found, expected, "{asked:?}");
        }
    }
    let [one, other] = worlds.map(|world| world.machine.store().view());
    assert_eq!(one.members(), other.members());
}

#[test]
fn a_refused_change_of_members_changes_nothing() {
    let mut world = ApplyHarness::new();
    let (outcome, changes) = world.change(&MemberChange::Remove(MemberId(7)));
    assert_eq!(outcome, Err(ApplyError::Members(ChangeError::LastVoter)));
    let members = Members { voters: vec![7], learners: Vec::new() };
    assert_eq!(changes, [AppliedChange { index: 1, change: None, members: members.clone() }]);
    assert_eq!(world.machine.members(), members);
}
