//! Tests of the decision about an intent, one for each situation.

use discovery_types::api::IntentState::{Added, Open};
use discovery_types::digest::{Digest, Nonce};
use discovery_types::fixtures::{ClusterFixture, join_fixture};
use discovery_types::intent::{Intent, Verb};
use discovery_types::order::{Order, OrderedChange as Ordered};
use discovery_types::redeem::Redeem;

use super::*;

const OWN: MemberId = MemberId(1);

fn member(id: u64, url: &str, is_learner: bool) -> ClusterMember {
    ClusterMember {
        id: MemberId(id),
        name: format!("m{id}"),
        peer_urls: vec![url.to_owned()],
        is_learner,
        ..ClusterMember::default()
    }
}

/// Returns a list of two voters at `configuration`. `None` stands for stock etcd, which has no
/// configuration index.
fn two_voters(configuration: Option<u64>) -> MemberList {
    let list =
        vec![member(1, "https://10.9.0.1:2380", false), member(2, "https://10.9.0.2:2380", false)];
    MemberList { cluster_id: 5, configuration, list }
}

fn joining(world: &ClusterFixture, planned_at: Option<u64>) -> VerifiedIntent {
    let authority = world.grant.sign(&world.owner);
    let redeem = Redeem {
        service: Digest::of(b"service"),
        cluster: world.statement.cluster,
        statement: world.chain().newest_hash(),
        signed: world.signed(0),
        boot: 1,
        nonce: Nonce::random(),
        highest_epoch: 0,
        identity: None,
    };
    let verb = if world.grant.replaces.is_some() { Verb::Replace } else { Verb::Join };
    let intent = Intent {
        cluster: world.statement.cluster,
        verb,
        operation: digest::OperationId::of(&authority, verb),
        authority,
        redeem: Some(redeem.sign(&world.agents[0])),
        planned_at,
        expires_at: world.grant.issued_at + 600,
    };
    VerifiedIntent::verify(&intent, &world.chain()).unwrap()
}

fn ordered(world: &ClusterFixture, change: Ordered, planned_at: Option<u64>) -> VerifiedIntent {
    let verb = match change {
        Ordered::Remove { .. } => Verb::Remove,
        Ordered::Update { .. } => Verb::Update,
    };
    let order = Order {
        version: 1,
        id: Nonce::random(),
        cluster: world.statement.cluster,
        statement: world.chain().newest_hash(),
        change,
        planned_at,
        issued_at: world.grant.issued_at,
        expires_at: world.grant.issued_at + 600,
        reason: "a test".to_owned(),
    };
    let authority = order.sign(&world.owner);
    let intent = Intent {
        cluster: world.statement.cluster,
        verb,
        operation: digest::OperationId::of(&authority, verb),
        authority,
        redeem: None,
        planned_at,
        expires_at: order.expires_at,
    };
    VerifiedIntent::verify(&intent, &world.chain()).unwrap()
}

fn facts<'a>(
    intent: &'a VerifiedIntent,
    state: IntentState,
    members: &'a MemberList,
) -> IntentFacts<'a> {
    IntentFacts {
        intent,
        state,
        reported_member: None,
        members,
        own: OWN,
        leader: OWN,
        untimely: None,
        is_under_way: false,
        stalled: false,
        added_before: false,
        newcomer_state: MemberState::Answers { behind: Some(0) },
        refused_addition: None,
        removal_origin: RemovalOrigin::Unknown,
        given_up: None,
    }
}

fn own_url(world: &ClusterFixture) -> String {
    world.records[0].peer_urls[0].to_string()
}

fn with_newcomer(mut members: MemberList, world: &ClusterFixture, is_learner: bool) -> MemberList {
    members.list.push(member(9, &own_url(world), is_learner));
    members
}

#[test]
fn a_newcomer_is_added_as_a_learner_bound_to_its_key_and_incarnation() {
    let world = join_fixture();
    let (intent, members) = (joining(&world, None), two_voters(Some(7)));
    let act = facts(&intent, Open, &members).decide();
    let StewardAction::Change(ClusterMemberChange::Add(new), IntentStep::Add) = act else {
        panic!("{act:?}")
    };
    assert!(new.is_learner);
    assert_eq!(new.peer_urls, [own_url(&world)]);
    let record = &world.records[0];
    assert_eq!(new.incarnation, Some(record.incarnation.to_string()));
    assert_eq!(new.node_key, Some(record.csr.verify().unwrap().node_key.to_string()));
}

/// The newcomer is in the list of members already, under its own name. The agent learns that late:
/// it has hung, or discovery's answer is old.
#[test]
fn a_newcomer_that_is_a_member_already_is_not_refused_because_of_its_own_name() {
    let world = join_fixture();
    let intent = joining(&world, None);
    for configuration in [Some(7), None] {
        let mut members = with_newcomer(two_voters(configuration), &world, false);
        members.list[2].name = world.records[0].name.to_string();
        let facts = IntentFacts { is_under_way: true, ..facts(&intent, Open, &members) };
        let act = facts.decide();
        let is_right = match configuration {
            // The answer shows that this operation has added the member.
            Some(_) => matches!(act, StewardAction::Change(_, IntentStep::Add)),
            None => matches!(act, StewardAction::Report(Outcome::Added { .. })),
        };
        assert!(is_right, "{configuration:?}: {act:?}");
    }
}

#[test]
fn a_newcomer_whose_name_is_taken_is_refused() {
    let mut world = join_fixture();
    let mut members = two_voters(Some(7));
    members.list[1].name = world.records[0].name.to_string();
    let intent = joining(&world, None);
    let act = facts(&intent, Open, &members).decide();
    let StewardAction::Report(Outcome::Refused { reason }) = act else { panic!("{act:?}") };
    assert!(reason.contains("is called db-1 already"), "{reason}");
    // A newcomer may have the name of the member that it replaces.
    world.grant.replaces = Some(digest::MemberId::new(2));
    let intent = joining(&world, None);
    let act = facts(&intent, Open, &members).decide();
    assert!(
        matches!(act, StewardAction::Change(ClusterMemberChange::Add(_), IntentStep::Add)),
        "{act:?}"
    );
}

#[test]
fn an_expired_intent_is_not_begun_but_is_completed_if_it_was_begun() {
    let world = join_fixture();
    let (intent, members) = (joining(&world, None), two_voters(Some(7)));
    let over = Some(IntentTimeError::Over);
    let late = IntentFacts { untimely: over, ..facts(&intent, Open, &members) };
    assert!(matches!(late.decide(), StewardAction::Wait(_)));
    let act = IntentFacts { is_under_way: true, ..late }.decide();
    assert!(
        matches!(act, StewardAction::Change(ClusterMemberChange::Add(_), IntentStep::Add)),
        "a use of its policy was counted in time: {act:?}"
    );
    let members = with_newcomer(members.clone(), &world, true);
    let act = IntentFacts { untimely: over, ..facts(&intent, Added, &members) }.decide();
    assert_eq!(
        act,
        StewardAction::Change(ClusterMemberChange::Promote(MemberId(9)), IntentStep::Promote)
    );
}

#[test]
fn nothing_is_changed_by_a_list_of_members_that_is_older_than_discoverys() {
    let world = join_fixture();
    let (intent, members) = (joining(&world, Some(8)), two_voters(Some(7)));
    assert!(matches!(facts(&intent, Open, &members).decide(), StewardAction::Wait(_)));
    let members = two_voters(None);
    let act = facts(&intent, Open, &members).decide();
    assert!(
        matches!(act, StewardAction::Change(..)),
        "stock etcd knows no configurations: {act:?}"
    );
}

#[test]
fn a_newcomer_that_a_failed_leader_has_added_is_recognised() {
    let world = join_fixture();
    let intent = joining(&world, None);
    // With stock etcd, a learner at the newcomer's URL is the newcomer.
    let members = with_newcomer(two_voters(None), &world, true);
    let act = facts(&intent, Open, &members).decide();
    let StewardAction::Report(Outcome::Added { member, initial_cluster, .. }) = act else {
        panic!("{act:?}")
    };
    assert_eq!((member.get(), initial_cluster.len()), (9, 3));
    let own = initial_cluster.iter().find(|m| m.peer_url.to_string() == own_url(&world));
    assert_eq!(own.unwrap().name, world.records[0].name.to_string());
    // With muster-node, the addition is sent again: the answer shows whether this operation made
    // it.
    let members = with_newcomer(two_voters(Some(7)), &world, true);
    let act = facts(&intent, Open, &members).decide();
    assert!(
        matches!(act, StewardAction::Change(ClusterMemberChange::Add(_), IntentStep::Add)),
        "{act:?}"
    );
    let act = IntentFacts { added_before: true, ..facts(&intent, Open, &members) }.decide();
    assert!(matches!(act, StewardAction::Report(Outcome::Added { .. })), "{act:?}");
}

#[test]
fn with_stock_etcd_another_member_at_the_newcomers_url_is_not_the_newcomer() {
    let world = join_fixture();
    let intent = joining(&world, None);
    let voter = with_newcomer(two_voters(None), &world, false);
    let mut elsewhere_too = with_newcomer(two_voters(None), &world, true);
    elsewhere_too.list[2].peer_urls.push("https://10.9.0.9:2380".to_owned());
    for members in [voter, elsewhere_too] {
        let act = facts(&intent, Open, &members).decide();
        assert!(matches!(act, StewardAction::Report(Outcome::Refused { .. })), "{act:?}");
    }
}

#[test]
fn a_newcomer_that_was_removed_is_not_added_again() {
    let world = join_fixture();
    let (intent, members) = (joining(&world, None), two_voters(Some(7)));
    let told = Some(digest::MemberId::new(9));
    let act = IntentFacts { reported_member: told, ..facts(&intent, Added, &members) }.decide();
    assert!(matches!(act, StewardAction::Report(Outcome::Stalled { .. })), "{act:?}");
    let act = IntentFacts { added_before: true, ..facts(&intent, Open, &members) }.decide();
    assert!(matches!(act, StewardAction::Report(Outcome::Refused { .. })), "{act:?}");
}

#[test]
fn a_stalled_learner_is_removed_and_a_voter_is_reported_as_promoted() {
    let world = join_fixture();
    let intent = joining(&world, None);
    let learner = with_newcomer(two_voters(Some(7)), &world, true);
    let stalled = IntentFacts { stalled: true, ..facts(&intent, Added, &learner) };
    let out =
        StewardAction::Change(ClusterMemberChange::Remove(MemberId(9)), IntentStep::RemoveLearner);
    assert_eq!(stalled.decide(), out);
    let voter = with_newcomer(two_voters(Some(7)), &world, false);
    let done = IntentFacts { stalled: true, ..facts(&intent, Added, &voter) };
    let member = digest::MemberId::new(9);
    assert_eq!(done.decide(), StewardAction::Report(Outcome::Promoted { member }));
}

#[test]
fn a_replacement_that_is_given_up_takes_a_learner_out_and_leaves_a_voter() {
    let world = join_fixture();
    let intent = joining(&world, None);
    let why = Some("the dead member is reachable again");
    let members = two_voters(Some(7));
    let before = IntentFacts { given_up: why, ..facts(&intent, Open, &members) };
    let StewardAction::Report(Outcome::Refused { reason }) = before.decide() else { panic!() };
    assert_eq!(Some(reason.as_str()), why);
    let learner = with_newcomer(two_voters(Some(7)), &world, true);
    let added = IntentFacts { given_up: why, ..facts(&intent, Added, &learner) };
    let out =
        StewardAction::Change(ClusterMemberChange::Remove(MemberId(9)), IntentStep::RemoveLearner);
    assert_eq!(added.decide(), out);
    // Discovery has not heard of the learner's removal yet.
    let member = digest::MemberId::new(9);
    let removed = IntentFacts {
        given_up: why,
        reported_member: Some(member),
        ..facts(&intent, Added, &members)
    };
    let act = removed.decide();
    assert!(matches!(act, StewardAction::Report(Outcome::Stalled { .. })), "{act:?}");
    let voter = with_newcomer(two_voters(Some(7)), &world, false);
    let done = IntentFacts { given_up: why, ..facts(&intent, Added, &voter) };
    assert_eq!(done.decide(), StewardAction::Report(Outcome::Promoted { member }));
}

#[test]
fn another_members_agent_reports_a_newcomer_that_leads() {
    let world = join_fixture();
    let (intent, members) = (joining(&world, None), two_voters(Some(7)));
    let members = with_newcomer(members, &world, false);
    let told = Some(digest::MemberId::new(9));
    let newcomer = MemberId(9);
    let by = |own, leader| IntentFacts {
        reported_member: told,
        own,
        leader,
        ..facts(&intent, Added, &members)
    };
    let promoted = StewardAction::Report(Outcome::Promoted { member: digest::MemberId::new(9) });
    assert_eq!(by(OWN, OWN).decide(), promoted);
    assert_eq!(by(OWN, newcomer).decide(), promoted);
    assert!(matches!(by(newcomer, newcomer).decide(), StewardAction::Wait(_)));
    assert!(matches!(by(MemberId(2), OWN).decide(), StewardAction::Wait(_)));
    // The leader's agent makes the remaining changes, even if its own member is the newcomer.
    let members = with_newcomer(two_voters(Some(7)), &world, true);
    let by = |own, leader| IntentFacts {
        reported_member: told,
        own,
        leader,
        ..facts(&intent, Added, &members)
    };
    assert!(matches!(by(newcomer, newcomer).decide(), StewardAction::Change(..)));
    assert!(matches!(by(OWN, newcomer).decide(), StewardAction::Wait(_)));
}

#[test]
fn the_replaced_member_is_removed_last_unless_it_failed_or_the_newcomer_has_its_url() {
    let mut world = join_fixture();
    world.grant.replaces = Some(digest::MemberId::new(2));
    let intent = joining(&world, None);
    let members = two_voters(Some(7));
    let act = facts(&intent, Open, &members).decide();
    assert!(
        matches!(act, StewardAction::Change(ClusterMemberChange::Add(_), IntentStep::Add)),
        "{act:?}"
    );
    let voter = with_newcomer(members.clone(), &world, false);
    let removal =
        StewardAction::Change(ClusterMemberChange::Remove(MemberId(2)), IntentStep::Remove);
    assert_eq!(facts(&intent, Added, &voter).decide(), removal);
    let silent = [MemberId(2)];
    let down = IntentFacts { refused_addition: Some(&silent), ..facts(&intent, Open, &members) };
    assert_eq!(down.decide(), removal);
    let mut same = members.clone();
    same.list[1].peer_urls = vec![own_url(&world)];
    assert_eq!(facts(&intent, Open, &same).decide(), removal);
}

#[test]
fn an_order_is_refused_at_another_configuration_than_it_was_planned_for() {
    let world = join_fixture();
    let remove = Ordered::Remove { member: digest::MemberId::new(2) };
    let members = two_voters(Some(7));
    let act = StewardAction::Change(ClusterMemberChange::Remove(MemberId(2)), IntentStep::Remove);
    for planned in [Some(7), None] {
        let intent = ordered(&world, remove.clone(), planned);
        assert_eq!(facts(&intent, Open, &members).decide(), act);
    }
    let stale = ordered(&world, remove, Some(6));
    let act = facts(&stale, Open, &members).decide();
    assert!(matches!(act, StewardAction::Report(Outcome::Refused { .. })), "{act:?}");
    // A removal that was made already is reported as done, although the plan is stale.
    let mut gone = members;
    gone.list.remove(1);
    let act = facts(&stale, Open, &gone).decide();
    assert!(matches!(act, StewardAction::Report(Outcome::Removed { .. })), "{act:?}");
}

#[test]
fn a_leader_hands_over_the_leadership_before_it_is_removed() {
    let world = join_fixture();
    let remove = Ordered::Remove { member: digest::MemberId::new(OWN.0) };
    let intent = ordered(&world, remove, None);
    let mut members = two_voters(Some(7));
    assert_eq!(facts(&intent, Open, &members).decide(), StewardAction::HandOver);
    members.list.truncate(1);
    let act = facts(&intent, Open, &members).decide();
    assert!(
        matches!(act, StewardAction::Change(ClusterMemberChange::Remove(OWN), _)),
        "the last one: {act:?}"
    );
    members.list.push(member(9, "https://10.9.0.9:2380", true));
    let act = facts(&intent, Open, &members).decide();
    assert!(matches!(act, StewardAction::Change(..)), "no learner can lead: {act:?}");
}

#[test]
fn an_ordered_update_changes_the_members_peer_url() {
    let world = join_fixture();
    let to: NodeUrl = "https://10.9.0.7:2380".parse().unwrap();
    let member = digest::MemberId::new(2);
    let update = Ordered::Update { member, peer_urls: vec![to.clone()] };
    let intent = ordered(&world, update, None);
    let mut members = two_voters(Some(7));
    let change = ClusterMemberChange::Update(MemberId(2), vec![to.to_string()]);
    assert_eq!(
        facts(&intent, Open, &members).decide(),
        StewardAction::Change(change, IntentStep::Update)
    );
    members.list[1].peer_urls = vec![to.to_string()];
    assert_eq!(
        facts(&intent, Open, &members).decide(),
        StewardAction::Report(Outcome::Updated { member })
    );
    members.list.remove(1);
    let act = facts(&intent, Open, &members).decide();
    assert!(matches!(act, StewardAction::Report(Outcome::Refused { .. })), "{act:?}");
}

#[test]
fn the_agent_waits_for_a_newcomer_that_cannot_vote_yet() {
    let world = join_fixture();
    let intent = joining(&world, None);
    let mut members = with_newcomer(two_voters(Some(7)), &world, true);
    let waits = |members: &MemberList, newcomer_state| {
        let act = IntentFacts { newcomer_state, ..facts(&intent, Added, members) }.decide();
        matches!(act, StewardAction::AwaitNewcomer(_))
    };
    assert!(waits(&members, MemberState::Silent));
    assert!(waits(&members, MemberState::Answers { behind: Some(5_000) }));
    assert!(!waits(&members, MemberState::Answers { behind: Some(5) }));
    members.list[2].name = String::new();
    assert!(waits(&members, MemberState::Answers { behind: Some(5) }), "it has not started");
}

/// Returns an intent whose ticket replaces member 2, and a list of members without member 2.
fn replacing(world: &mut ClusterFixture) -> (VerifiedIntent, MemberList) {
    world.grant.replaces = Some(digest::MemberId::new(2));
    let mut members = two_voters(Some(7));
    members.list.remove(1);
    (joining(world, None), members)
}

#[test]
fn a_newcomer_takes_no_place_that_another_operation_freed() {
    let mut world = join_fixture();
    let (intent, members) = replacing(&mut world);
    let by = |departure| {
        IntentFacts { removal_origin: departure, ..facts(&intent, Open, &members) }.decide()
    };
    assert_eq!(
        by(RemovalOrigin::Unknown),
        StewardAction::FindRemover(MemberId(2)),
        "the cluster is asked first"
    );
    let act = by(RemovalOrigin::Own);
    assert!(
        matches!(act, StewardAction::Change(ClusterMemberChange::Add(_), IntentStep::Add)),
        "the ticket goes on: {act:?}"
    );
    let act = by(RemovalOrigin::Foreign);
    let StewardAction::Report(Outcome::Refused { reason }) = act else { panic!("{act:?}") };
    assert!(reason.contains("was removed by another operation"), "{reason}");
}

#[test]
fn a_learner_for_a_place_that_another_operation_freed_is_removed() {
    let mut world = join_fixture();
    let (intent, members) = replacing(&mut world);
    let members = with_newcomer(members, &world, true);
    let by = |state, departure| {
        IntentFacts { removal_origin: departure, ..facts(&intent, state, &members) }.decide()
    };
    assert_eq!(by(Added, RemovalOrigin::Unknown), StewardAction::FindRemover(MemberId(2)));
    let promoted =
        StewardAction::Change(ClusterMemberChange::Promote(MemberId(9)), IntentStep::Promote);
    assert_eq!(by(Added, RemovalOrigin::Own), promoted);
    let out =
        StewardAction::Change(ClusterMemberChange::Remove(MemberId(9)), IntentStep::RemoveLearner);
    assert_eq!(by(Added, RemovalOrigin::Foreign), out);
    // The agent of a failed leader may have added the learner without reporting it. So the addition
    // is sent again, and the cluster's answer shows whether it was made.
    let act = by(Open, RemovalOrigin::Foreign);
    assert!(
        matches!(act, StewardAction::Change(ClusterMemberChange::Add(_), IntentStep::Add)),
        "{act:?}"
    );
}

#[test]
fn a_newcomer_that_votes_is_reported_as_promoted_once_the_old_member_is_gone() {
    let mut world = join_fixture();
    let (intent, members) = replacing(&mut world);
    let members = with_newcomer(members, &world, false);
    let act = facts(&intent, Added, &members).decide();
    assert!(matches!(act, StewardAction::Report(Outcome::Promoted { .. })), "{act:?}");
}
