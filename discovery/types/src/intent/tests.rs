use super::*;
use crate::digest::Nonce;
use crate::fixtures::{ClusterFixture, join_fixture, policy_fixture, sign_newer_version};
use crate::jws::newer_version;
use crate::key::SigningKey;
use crate::order::Order;
use crate::role::Role;
use crate::token::Token;

/// Returns a redeem of the fixture's ticket by the fixture's first agent.
fn redeem(world: &ClusterFixture) -> Redeem {
    Redeem {
        service: Digest::of(b"service"),
        cluster: world.statement.cluster,
        statement: world.chain().newest_hash(),
        signed: world.signed(0),
        boot: 1,
        nonce: Nonce::random(),
        highest_epoch: 0,
        identity: None,
    }
}

fn joining(world: &ClusterFixture) -> Intent {
    let authority = world.grant.sign(&world.owner);
    let verb = if world.grant.replaces.is_some() { Verb::Replace } else { Verb::Join };
    Intent {
        cluster: world.statement.cluster,
        verb,
        operation: OperationId::of(&authority, verb),
        authority,
        redeem: Some(redeem(world).sign(&world.agents[0])),
        planned_at: Some(12),
        expires_at: world.grant.expires_at + MAX_INTENT_SECONDS,
    }
}

fn ordered(world: &ClusterFixture, change: OrderedChange) -> Intent {
    let verb = match change {
        OrderedChange::Remove { .. } => Verb::Remove,
        OrderedChange::Update { .. } => Verb::Update,
    };
    let order = Order {
        version: 1,
        id: Nonce::random(),
        cluster: world.statement.cluster,
        statement: world.chain().newest_hash(),
        change,
        planned_at: Some(12),
        issued_at: 1_000,
        expires_at: 1_900,
        reason: String::new(),
    };
    let authority = order.sign(&world.owner);
    Intent {
        cluster: world.statement.cluster,
        verb,
        operation: OperationId::of(&authority, verb),
        authority,
        redeem: None,
        planned_at: Some(12),
        expires_at: 1_900,
    }
}

fn remove() -> OrderedChange {
    OrderedChange::Remove { member: MemberId::new(7) }
}

fn refused(intent: &Intent, world: &ClusterFixture) -> IntentError {
    VerifiedIntent::verify(intent, &world.chain()).expect_err("a forgery passed")
}

#[test]
fn a_redeemed_ticket_makes_a_valid_intent_for_its_newcomer() {
    let world = join_fixture();
    let verified = VerifiedIntent::verify(&joining(&world), &world.chain()).unwrap();
    let IntentChange::Add { record, replaces: None } = verified.change() else {
        panic!("{verified:?}")
    };
    assert_eq!(record.agent_key, world.records[0].agent_key);
    assert_eq!((verified.verb, verified.leaving_member()), (Verb::Join, None));
}

#[test]
fn a_replacement_ticket_names_the_member_that_it_replaces() {
    let mut world = join_fixture();
    world.grant.replaces = Some(MemberId::new(7));
    let intent = joining(&world);
    let verified = VerifiedIntent::verify(&intent, &world.chain()).unwrap();
    assert_eq!((verified.verb, verified.leaving_member()), (Verb::Replace, Some(MemberId::new(7))));
    // The service can't turn a replacement into a plain join.
    let plain = Intent {
        verb: Verb::Join,
        operation: OperationId::of(&intent.authority, Verb::Join),
        ..intent
    };
    assert!(matches!(refused(&plain, &world), IntentError::Mismatch(_)));
}

#[test]
fn an_order_makes_a_valid_intent() {
    let world = ClusterFixture::new(3);
    let verified = VerifiedIntent::verify(&ordered(&world, remove()), &world.chain()).unwrap();
    assert!(matches!(verified.change(), IntentChange::Remove { member } if member.get() == 7));
    let peer_urls = vec!["https://10.0.0.9:2380".parse().unwrap()];
    let update = OrderedChange::Update { member: MemberId::new(7), peer_urls };
    let verified = VerifiedIntent::verify(&ordered(&world, update), &world.chain()).unwrap();
    assert!(
        matches!(verified.change(), IntentChange::Update { peer_urls, .. } if peer_urls.len() == 1)
    );
    assert_eq!(verified.leaving_member(), None);
}

#[test]
fn a_boot_token_is_no_ticket() {
    let world = ClusterFixture::new(3);
    let intent = Intent { expires_at: 1, ..joining(&world) };
    assert!(matches!(refused(&intent, &world), IntentError::Mismatch(_)));
}

#[test]
fn a_ticket_is_valid_only_if_an_operator_or_owner_signed_it() {
    let mut world = join_fixture();
    for key in [&world.issuer, &world.service, &world.agents[0]] {
        let authority = world.grant.sign(key);
        let operation = OperationId::of(&authority, Verb::Join);
        let intent = Intent { authority, operation, ..joining(&world) };
        assert!(matches!(refused(&intent, &world), IntentError::Grant(GrantError::Jws(_))));
    }
    // A newer statement takes the operator role from the signer.
    world.statement.admins[1].roles = vec![Role::Operator];
    world.grant.statement = world.chain().newest_hash();
    let authority = world.grant.sign(&world.issuer);
    let operation = OperationId::of(&authority, Verb::Join);
    let intent = Intent { authority, operation, ..joining(&world) };
    let mut chain = world.chain();
    assert!(VerifiedIntent::verify(&intent, &chain).is_ok());
    let mut next = world.statement.clone();
    next.admins.pop();
    (next.seq, next.previous) = (1, Some(chain.newest_hash()));
    chain.append(&next.sign(&world.owner)).unwrap();
    assert!(matches!(VerifiedIntent::verify(&intent, &chain), Err(IntentError::Grant(_))));
}

#[test]
fn another_clusters_intent_is_refused() {
    let (world, other) = (join_fixture(), join_fixture());
    assert_eq!(refused(&joining(&other), &world), IntentError::OtherCluster);
    let renamed = Intent { cluster: world.statement.cluster, ..joining(&other) };
    assert!(matches!(refused(&renamed, &world), IntentError::Grant(_)));
    let renamed = Intent { cluster: world.statement.cluster, ..ordered(&other, remove()) };
    assert!(matches!(refused(&renamed, &world), IntentError::Order(_)));
}

#[test]
fn only_the_holder_of_ticket_and_key_is_the_newcomer() {
    let world = join_fixture();
    // Case: another key signs the envelope around the newcomer's record.
    let thief = SigningKey::generate();
    let intent = Intent { redeem: Some(redeem(&world).sign(&thief)), ..joining(&world) };
    assert!(matches!(refused(&intent, &world), IntentError::Redeem(_)));
    // Case: another token endorses the newcomer's record.
    let mut stolen = redeem(&world);
    let token = Token::generate(TokenKind::Join);
    stolen.signed = world.records[0].sign(&world.agents[0], token.key());
    let intent = Intent { redeem: Some(stolen.sign(&world.agents[0])), ..joining(&world) };
    assert!(matches!(refused(&intent, &world), IntentError::Record(RecordError::Endorsement(_))));
    // Case: the record names another grant of the same cluster.
    let mut other = redeem(&world);
    let mut record = world.records[0].clone();
    record.grant = Token::generate(TokenKind::Join).id();
    other.signed = record.sign(&world.agents[0], world.token.key());
    let intent = Intent { redeem: Some(other.sign(&world.agents[0])), ..joining(&world) };
    assert!(matches!(refused(&intent, &world), IntentError::Record(RecordError::Mismatch(_))));
    // Cases: the envelope names another cluster, or a statement outside of the chain.
    let other = Redeem { cluster: Uuid::now_v7(), ..redeem(&world) };
    let intent = Intent { redeem: Some(other.sign(&world.agents[0])), ..joining(&world) };
    assert!(matches!(refused(&intent, &world), IntentError::Mismatch(_)));
    let other = Redeem { statement: Digest::of(b"other"), ..redeem(&world) };
    let intent = Intent { redeem: Some(other.sign(&world.agents[0])), ..joining(&world) };
    assert!(matches!(refused(&intent, &world), IntentError::Mismatch(_)));
}

#[test]
fn a_newcomer_outside_its_tickets_bindings_is_refused() {
    let mut world = join_fixture();
    world.grant.name = Some("db-9".parse().unwrap());
    let name = refused(&joining(&world), &world);
    assert!(matches!(name, IntentError::Record(RecordError::OtherName { .. })), "{name}");
    world.grant.name = None;
    world.grant.cidrs = vec!["192.168.0.0/16".parse().unwrap()];
    let address = refused(&joining(&world), &world);
    assert!(matches!(address, IntentError::Record(RecordError::OtherAddress { .. })), "{address}");
}

#[test]
fn an_intent_with_parts_that_were_not_signed_together_is_refused() {
    let world = join_fixture();
    let without = Intent { redeem: None, ..joining(&world) };
    assert!(matches!(refused(&without, &world), IntentError::Mismatch(_)));
    let with = Intent { redeem: joining(&world).redeem, ..ordered(&world, remove()) };
    assert!(matches!(refused(&with, &world), IntentError::Mismatch(_)));
    let replanned = Intent { planned_at: Some(13), ..ordered(&world, remove()) };
    assert!(matches!(refused(&replanned, &world), IntentError::Mismatch(_)));
    let unplanned = Intent { planned_at: None, ..ordered(&world, remove()) };
    assert!(matches!(refused(&unplanned, &world), IntentError::Mismatch(_)));
    let mut swapped = ordered(&world, remove());
    swapped.verb = Verb::Update;
    swapped.operation = OperationId::of(&swapped.authority, Verb::Update);
    assert!(matches!(refused(&swapped, &world), IntentError::Mismatch(_)));
    let no_authority = Intent { authority: joining(&world).redeem.unwrap(), ..joining(&world) };
    assert!(matches!(refused(&no_authority, &world), IntentError::Mismatch(_)));
}

#[test]
fn an_intent_with_another_operation_id_than_its_signed_bytes_give_is_refused() {
    let world = join_fixture();
    let other = Intent { operation: OperationId([7; 16]), ..joining(&world) };
    assert_eq!(refused(&other, &world), IntentError::OtherOperation);
    let of_step = OperationId::of_step(&joining(&world).authority, IntentStep::Add);
    assert_eq!(
        refused(&Intent { operation: of_step, ..joining(&world) }, &world),
        IntentError::OtherOperation
    );
}

#[test]
fn each_verb_and_step_has_its_own_operation_id() {
    let world = join_fixture();
    let (first, second) = (joining(&world).authority, ordered(&world, remove()).authority);
    let steps = [
        IntentStep::Add,
        IntentStep::Promote,
        IntentStep::Remove,
        IntentStep::Update,
        IntentStep::RemoveLearner,
    ];
    let mut names = Vec::new();
    for authority in [&first, &second] {
        names.extend(Verb::ALL.map(|verb| OperationId::of(authority, verb)));
        names.extend(steps.map(|step| OperationId::of_step(authority, step)));
    }
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}

#[test]
fn a_service_can_not_extend_the_validity_of_an_intent() {
    let world = join_fixture();
    let long = Intent { expires_at: joining(&world).expires_at + 1, ..joining(&world) };
    assert_eq!(refused(&long, &world), IntentError::TooLong);
    let long = Intent { expires_at: 1_901, ..ordered(&world, remove()) };
    assert_eq!(refused(&long, &world), IntentError::TooLong);
}

#[test]
fn an_intent_is_begun_only_within_its_validity() {
    let world = join_fixture();
    let intent = Intent { expires_at: 1_500, ..joining(&world) };
    let verified = VerifiedIntent::verify(&intent, &world.chain()).unwrap();
    let at = |service| verified.time_error(service, 1_000);
    assert_eq!(at(1_000), None);
    assert_eq!(at(1_499), None);
    assert_eq!(at(1_500), Some(IntentTimeError::Over));
    assert_eq!(at(1_000 - ISSUER_SKEW_SECONDS), None);
    assert_eq!(at(999 - ISSUER_SKEW_SECONDS), Some(IntentTimeError::NotYet));
}

#[test]
fn a_service_with_its_clock_set_back_revives_no_intent() {
    let world = join_fixture();
    let intent = Intent { expires_at: 1_500, ..joining(&world) };
    let verified = VerifiedIntent::verify(&intent, &world.chain()).unwrap();
    let own = |own| verified.time_error(1_000, own);
    let ahead = IntentTimeError::ClockAhead { seconds: 500 + ISSUER_SKEW_SECONDS };
    assert_eq!(own(1_500 + ISSUER_SKEW_SECONDS), Some(ahead));
    assert!(ahead.to_string().contains("clock is 620 s ahead"), "{ahead}");
    assert_eq!(own(1_499 + ISSUER_SKEW_SECONDS), None, "clocks differ a little");
    assert_eq!(own(0), None, "a clock that is behind stops nobody");
}

/// Operation ids must never change, because nodes store them in their logs. With another id, a node
/// would make the same change again.
#[test]
fn operation_ids_stay_as_they_are() {
    let jws = Jws::sign(JwsType::Order, &SigningKey::from_seed(&[7; 32]), &());
    let names =
        [OperationId::of(&jws, Verb::Remove), OperationId::of_step(&jws, IntentStep::Remove)];
    let names = names.map(|name| name.to_string());
    assert_eq!(names, ["18429f1f2b145fbddc1754084c882159", "988a18cf998369bd11215ff8cce4c23b"]);
}

#[test]
fn an_order_of_a_newer_program_is_distinguished_from_a_forbidden_one() {
    let world = ClusterFixture::new(3);
    let intent = ordered(&world, OrderedChange::Remove { member: MemberId::new(7) });
    let order: Order = intent.authority.claims_unverified(JwsType::Order).unwrap();
    let with = |authority: Jws| {
        let operation = OperationId::of(&authority, Verb::Remove);
        Intent { authority, operation, ..intent.clone() }
    };
    let refused = |intent: &Intent| VerifiedIntent::verify(intent, &world.chain()).unwrap_err();
    let newer = refused(&with(sign_newer_version(JwsType::Order, &world.owner, &order)));
    assert!(newer_version(&newer).is_some(), "{newer}");
    let forged =
        refused(&with(sign_newer_version(JwsType::Order, &SigningKey::generate(), &order)));
    assert_eq!(newer_version(&forged), None, "{forged}");
}

#[test]
fn each_newcomer_under_a_policy_has_a_change_of_its_own_and_names_no_member() {
    let world = policy_fixture();
    let authority = world.grant.sign(&world.owner);
    let record = world.signed(0).record.hash();
    let intent = Intent {
        verb: Verb::Replace,
        operation: OperationId::of_newcomer(&authority, &record),
        ..joining(&world)
    };
    let verified = VerifiedIntent::verify(&intent, &world.chain()).unwrap();
    assert_eq!(verified.policy().unwrap().id, world.grant.id);
    assert_eq!(verified.leaving_member(), None);
    let steps = [IntentStep::Add, IntentStep::Promote, IntentStep::Remove];
    for step in steps {
        let by_policy_alone = OperationId::of_step(&authority, step);
        assert_ne!(verified.step_operation(step), by_policy_alone, "another newcomer has it too");
    }
    let dead = MemberId::new(7);
    assert_eq!(verified.with_replaced_member(dead).leaving_member(), Some(dead));

    for operation in [
        OperationId::of(&authority, Verb::Replace),
        OperationId::of_newcomer(&authority, &Digest::of(b"another record")),
    ] {
        let renamed = Intent { operation, ..intent.clone() };
        let refused = VerifiedIntent::verify(&renamed, &world.chain()).unwrap_err();
        assert_eq!(refused, IntentError::OtherOperation);
    }
    // Case: the intent comes from a join ticket. The ticket's signer has decided which member it
    // replaces, if any, so the agents can't choose one.
    let ticket = join_fixture();
    let verified = VerifiedIntent::verify(&joining(&ticket), &ticket.chain()).unwrap();
    assert_eq!(verified.with_replaced_member(dead).leaving_member(), None);
}
