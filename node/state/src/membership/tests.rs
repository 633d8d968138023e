use node_consensus::{ConfChange, Members};
use node_proto::musterpb;

use super::*;
use crate::identity::{Incarnation, MemberId, NodeKey, OperationId};

fn member(id: u64) -> Member {
    Member {
        id: MemberId(id),
        name: format!("m{id}"),
        peer_urls: vec![format!("http://m{id}:2380")],
        client_urls: Vec::new(),
        is_learner: false,
        incarnation: Some(Incarnation([u8::try_from(id).unwrap(); 16])),
        node_key: Some(NodeKey([u8::try_from(id).unwrap(); 32])),
        changed_at: 0,
        vote_when_ready: false,
        operations: Vec::new(),
    }
}

fn learner(id: u64) -> Member {
    Member { is_learner: true, ..member(id) }
}

fn three() -> MemberTable {
    MemberTable::new([member(3), member(1), member(2)])
}

#[test]
fn a_learner_is_added_promoted_and_removed() {
    let mut table = three();
    assert_eq!(
        table.apply_change(MemberChange::Add(learner(4)), 5),
        Ok(Some(ConfChange::Learner(4)))
    );
    let expected = Members { voters: vec![1, 2, 3], learners: vec![4] };
    assert_eq!(table.voters_and_learners(), expected);
    assert_eq!(
        table.apply_change(MemberChange::Promote(MemberId(4)), 6),
        Ok(Some(ConfChange::Voter(4)))
    );
    assert_eq!(table.voters_and_learners().voters, [1, 2, 3, 4]);
    assert_eq!(
        table.apply_change(MemberChange::Remove(MemberId(4)), 7),
        Ok(Some(ConfChange::Remove(4)))
    );
    let Member { incarnation, node_key, .. } = member(4);
    let gone = RemovedMember { incarnation, node_key, index: 7, operations: Vec::new() };
    assert_eq!(table.removed().collect::<Vec<_>>(), [(MemberId(4), &gone)]);
}

#[test]
fn an_update_of_a_member_changes_only_its_peer_urls() {
    let mut table = three();
    let asked_for_a_voter = Member { vote_when_ready: true, ..learner(4) };
    table.apply_change(MemberChange::Add(asked_for_a_voter.clone()), 5).unwrap();
    let urls = vec!["http://elsewhere:2380".to_owned(), "http://m4:2380".to_owned()];
    assert_eq!(table.apply_change(MemberChange::Update(MemberId(4), urls.clone()), 6), Ok(None));
    let moved = Member { peer_urls: urls, changed_at: 6, ..asked_for_a_voter };
    assert_eq!(table.member(MemberId(4)), Some(&moved));
    assert_eq!(table.voters_and_learners().learners, [4]);
}

#[test]
fn the_configuration_index_is_that_of_the_last_change() {
    let mut table = three();
    assert_eq!(table.configuration_index(), 0);
    for (change, index) in [
        (MemberChange::Add(learner(4)), 5),
        (MemberChange::Promote(MemberId(4)), 6),
        (MemberChange::Update(MemberId(1), vec!["http://x:1".to_owned()]), 7),
        (MemberChange::Remove(MemberId(4)), 8),
    ] {
        table.apply_change(change, index).unwrap();
        assert_eq!(table.configuration_index(), index);
    }
    table.publish(MemberId(1), said("n")).unwrap();
    assert_eq!(
        table.configuration_index(),
        8,
        "what a member says of itself is no change of members"
    );
}

#[test]
fn a_refused_change_leaves_the_table_unchanged() {
    let mut table = three();
    table.apply_change(MemberChange::Remove(MemberId(3)), 5).unwrap();
    let before = table.clone();
    let fresh = |id| Member { incarnation: None, ..learner(id) };
    for (change, why) in [
        (MemberChange::Add(member(1)), ChangeError::IdExists),
        (MemberChange::Add(Member { id: MemberId(9), ..member(1) }), ChangeError::IdExists),
        (
            MemberChange::Add(Member { peer_urls: member(2).peer_urls, ..fresh(9) }),
            ChangeError::PeerUrlExists,
        ),
        (MemberChange::Add(fresh(3)), ChangeError::Removed),
        (
            MemberChange::Add(Member { incarnation: member(3).incarnation, ..fresh(9) }),
            ChangeError::Removed,
        ),
        (MemberChange::Add(fresh(0)), ChangeError::Malformed),
        (MemberChange::Add(Member { peer_urls: Vec::new(), ..fresh(9) }), ChangeError::Malformed),
        (MemberChange::Promote(MemberId(1)), ChangeError::NotALearner),
        (MemberChange::Promote(MemberId(9)), ChangeError::NotFound),
        (MemberChange::Remove(MemberId(3)), ChangeError::NotFound),
        (MemberChange::Update(MemberId(3), member(3).peer_urls), ChangeError::NotFound),
        (MemberChange::Update(MemberId(1), member(2).peer_urls), ChangeError::PeerUrlExists),
        (MemberChange::Update(MemberId(1), Vec::new()), ChangeError::Malformed),
    ] {
        assert_eq!(table.apply_change(change.clone(), 6), Err(why), "{change:?}");
        assert_eq!(table, before);
    }
}

#[test]
fn no_two_members_can_share_a_peer_url() {
    let urls = |names: &[&str]| names.iter().map(|name| format!("http://{name}:2380")).collect();
    let mut table = MemberTable::new([Member { peer_urls: urls(&["a", "b"]), ..member(1) }]);
    let added = |names| MemberChange::Add(Member { peer_urls: urls(names), ..learner(2) });
    for taken in [&["a"][..], &["b"], &["c", "a"], &["c", "b"]] {
        assert_eq!(
            table.apply_change(added(taken), 5),
            Err(ChangeError::PeerUrlExists),
            "{taken:?}"
        );
    }
    table.apply_change(added(&["c", "d"]), 5).unwrap();
}

#[test]
fn the_last_voter_cannot_be_removed() {
    let mut table = MemberTable::new([member(1), learner(2)]);
    let refused = table.apply_change(MemberChange::Remove(MemberId(1)), 5);
    assert_eq!(refused, Err(ChangeError::LastVoter));
    table.apply_change(MemberChange::Remove(MemberId(2)), 6).unwrap();
}

#[test]
fn publishing_leaves_a_learner_a_learner() {
    let mut table = MemberTable::new([member(1), learner(2)]);
    table.publish(MemberId(2), said("new")).unwrap();
    let found = table.member(MemberId(2)).unwrap();
    assert!(found.is_learner && found.name == "new" && found.incarnation.is_some());
    assert_eq!(table.publish(MemberId(9), said("n")), Err(ChangeError::NotFound));
}

fn said(name: &str) -> MemberAttributes {
    let client_urls = vec!["http://c:2379".to_owned()];
    MemberAttributes { name: name.to_owned(), client_urls, ..MemberAttributes::default() }
}

/// Returns a member as it was added: without a binding, and not started.
fn unbound(id: u64) -> Member {
    Member { name: String::new(), incarnation: None, node_key: None, ..learner(id) }
}

/// Returns what member `id` publishes when it starts with its own directory and key.
fn starts(id: u64) -> MemberAttributes {
    let Member { incarnation, node_key, .. } = member(id);
    MemberAttributes { incarnation, node_key, ..said("d") }
}

fn bindings(table: &MemberTable, id: u64) -> (Option<Incarnation>, Option<NodeKey>) {
    let member = table.member(MemberId(id)).unwrap();
    (member.incarnation, member.node_key)
}

#[test]
fn a_member_is_bound_at_its_first_start_if_all_others_are_bound() {
    let mut table = MemberTable::new([member(1), unbound(4), unbound(5)]);
    table.publish(MemberId(4), starts(4)).unwrap();
    let bound = (member(4).incarnation, member(4).node_key);
    assert_eq!(bindings(&table, 4), bound, "member 5 has no say yet");
    let renewed = MemberAttributes { node_key: member(6).node_key, ..starts(4) };
    table.publish(MemberId(4), renewed).unwrap();
    assert_eq!(bindings(&table, 4), bound, "bound once");
    for other in [member(5).incarnation, member(1).incarnation] {
        let wiped = MemberAttributes { incarnation: other, ..starts(4) };
        let refused = table.publish(MemberId(4), wiped);
        assert_eq!(refused, Err(ChangeError::OtherIncarnation));
    }
}

#[test]
fn a_member_added_with_a_key_keeps_that_key() {
    let mut table = MemberTable::new([member(1), Member { name: String::new(), ..learner(4) }]);
    table
        .publish(MemberId(4), MemberAttributes { node_key: member(6).node_key, ..starts(4) })
        .unwrap();
    assert_eq!(bindings(&table, 4), (member(4).incarnation, member(4).node_key));
}

#[test]
fn a_start_binds_no_member_while_any_started_member_is_unbound() {
    let plain = |id| Member { name: format!("m{id}"), is_learner: false, ..unbound(id) };
    let mut table = MemberTable::new([plain(1), unbound(4)]);
    table.publish(MemberId(4), starts(4)).unwrap();
    assert_eq!(bindings(&table, 4), (None, None));
    // Member 3 is bound to a key, and the others run without a binding. So a start binds neither a
    // member that has already run nor a new one.
    let mut table = MemberTable::new([plain(1), plain(2), member(3), unbound(4)]);
    for id in [1, 4] {
        table.publish(MemberId(id), starts(id)).unwrap();
        assert_eq!(bindings(&table, id), (None, None));
    }
    // A member that has already run is not bound even if all other members are.
    let mut table = MemberTable::new([plain(1), member(3)]);
    table.publish(MemberId(1), starts(1)).unwrap();
    assert_eq!(bindings(&table, 1), (None, None));
}

#[test]
fn members_and_changes_survive_encoding_and_decoding() {
    let bare = Member {
        incarnation: None,
        node_key: None,
        changed_at: 7,
        vote_when_ready: true,
        ..learner(2)
    };
    for member in [member(1), bare] {
        assert_eq!(Member::try_from(musterpb::Member::from(&member)), Ok(member.clone()));
        for change in [
            MemberChange::Add(member),
            MemberChange::Promote(MemberId(1)),
            MemberChange::Remove(MemberId(1)),
            MemberChange::Update(MemberId(1), vec!["http://x:1".to_owned()]),
        ] {
            let bytes = musterpb::MemberChange::from(&change);
            assert_eq!(MemberChange::try_from(bytes), Ok(change));
        }
    }
    for node_key in [None, Some(NodeKey([6; 32]))] {
        let gone = RemovedMember { incarnation: None, node_key, index: 7, operations: Vec::new() };
        assert_eq!(RemovedMember::decode(&gone.encode(MemberId(3))), Ok((MemberId(3), gone)));
    }
}

#[test]
fn the_key_of_a_removed_member_is_remembered_and_refused() {
    let key = |key: u8| Some(NodeKey([key; 32]));
    let with = |id, node_key| Member { node_key, ..learner(id) };
    let mut table = three();
    table.apply_change(MemberChange::Add(with(4, key(4))), 5).unwrap();
    assert!(table.removed_keys().is_empty(), "a member's");
    table.apply_change(MemberChange::Remove(MemberId(4)), 6).unwrap();
    assert_eq!(table.removed_keys(), [NodeKey([4; 32])].into());
    let again = table.apply_change(MemberChange::Add(with(5, key(4))), 7);
    assert_eq!(again, Err(ChangeError::Removed));
    table.apply_change(MemberChange::Add(with(6, key(6))), 7).unwrap();
    // The founder of a new cluster keeps its key, and all other keys count as removed.
    let recovered = table.with_only_founder(with(9, key(6)), 20);
    assert_eq!(recovered.removed_keys(), [1, 2, 3, 4].map(|key| NodeKey([key; 32])).into());
}

#[test]
fn an_incarnation_of_wrong_length_is_refused() {
    let mut bytes = musterpb::Member::from(&member(1));
    bytes.incarnation = bytes.incarnation.slice(1..);
    assert_eq!(Member::try_from(bytes.clone()), Err(MalformedMember));
    let change = musterpb::member_change::Change::Add(bytes);
    let change = musterpb::MemberChange { change: Some(change), ..Default::default() };
    assert_eq!(MemberChange::try_from(change), Err(ChangeError::Malformed));
}

#[test]
fn operations_survive_in_the_rows_of_current_and_removed_members() {
    let asked = |change, operation: u8| ChangeRequest {
        change,
        operation: Some(OperationId([operation; 16])),
        planned_at: None,
    };
    let mut table = three();
    table.apply_change(asked(MemberChange::Add(learner(4)), 1), 5).unwrap();
    table.apply_change(asked(MemberChange::Promote(MemberId(4)), 2), 6).unwrap();
    let row = musterpb::Member::from(table.member(MemberId(4)).unwrap());
    assert_eq!(Member::try_from(row).as_ref(), Ok(table.member(MemberId(4)).unwrap()));
    table.apply_change(asked(MemberChange::Remove(MemberId(4)), 3), 7).unwrap();
    let (id, gone) = table.removed().next().unwrap();
    let operation = |id: u8, index| CompletedOperation { id: OperationId([id; 16]), index };
    assert_eq!(gone.operations, [operation(1, 5), operation(2, 6), operation(3, 7)]);
    assert_eq!(RemovedMember::decode(&gone.encode(id)), Ok((id, gone.clone())));
    let mut torn = gone.encode(id);
    torn.operations[1].id.truncate(15);
    assert_eq!(RemovedMember::decode(&torn), Err(MalformedMember));
}

#[test]
fn a_change_request_survives_encoding_and_decoding() {
    let change = MemberChange::Remove(MemberId(4));
    let asked =
        ChangeRequest { change, operation: Some(OperationId([7; 16])), planned_at: Some(9) };
    assert_eq!(ChangeRequest::try_from(musterpb::MemberChange::from(&asked)), Ok(asked));
}
