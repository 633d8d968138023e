use super::*;
use crate::fixtures::ClusterFixture;
use crate::grant::TokenKind;

fn verify(world: &ClusterFixture, proposal: &Proposal) -> Result<VerifiedProposal, ProposalError> {
    VerifiedProposal::verify(proposal, &world.chain())
}

#[test]
fn a_proposal_of_valid_records_is_accepted() {
    let world = ClusterFixture::new(3);
    let verified = verify(&world, &world.proposal(1)).unwrap();
    assert_eq!(verified.seat_of(world.agents[2].public()), Some(3));
    assert_eq!(verified.seat_of(world.owner.public()), None);
}

/// Builds the input of the hash byte by byte, as the protocol defines it.
#[test]
fn the_hash_covers_statement_epoch_and_both_signatures_of_each_seat() {
    let world = ClusterFixture::new(2);
    let proposal = world.proposal(258);
    let mut input = b"muster-proposal-1".to_vec();
    input.extend(world.statement.sign(&world.owner).hash().0);
    input.extend([0, 0, 0, 0, 0, 0, 1, 2]);
    for seat in &proposal.seats {
        input.extend(Digest::of(seat.record.as_str().as_bytes()).0);
        input.extend(Digest::of(seat.endorsement.as_str().as_bytes()).0);
    }
    assert_eq!(proposal.hash(), Digest::of(&input));
    let plain = crate::convert::proposal(&verify(&world, &proposal).unwrap());
    assert_eq!(crate::convert::proposal_hash(&plain), crate::convert::hash(&proposal.hash()));
}

#[test]
fn order_and_epoch_change_the_hash() {
    let world = ClusterFixture::new(3);
    let proposal = world.proposal(1);
    let mut swapped = proposal.clone();
    swapped.seats.swap(0, 1);
    let later = Proposal { epoch: 2, ..proposal.clone() };
    assert_ne!(proposal.hash(), swapped.hash());
    assert_ne!(proposal.hash(), later.hash());
}

#[test]
fn the_error_for_a_record_of_a_foreign_token_names_the_seat() {
    let world = ClusterFixture::new(3);
    let mut proposal = world.proposal(1);
    proposal.seats[1] = world.records[1].sign(&world.agents[1], &SigningKey::generate());
    let refused = verify(&world, &proposal);
    assert!(matches!(refused, Err(ProposalError::Record { seat: 2, .. })), "{refused:?}");
}

#[test]
fn a_key_with_two_seats_is_refused() {
    let world = ClusterFixture::new(3);
    let mut proposal = world.proposal(1);
    proposal.seats[2] = proposal.seats[0].clone();
    assert_eq!(verify(&world, &proposal).err(), Some(ProposalError::SameKey(1, 3)));
}

#[test]
fn a_proposal_must_have_as_many_seats_as_the_size() {
    let world = ClusterFixture::new(3);
    let mut proposal = world.proposal(1);
    proposal.seats.pop();
    let refused = ProposalError::Seats { found: 2, size: 3, epoch: 1 };
    assert_eq!(verify(&world, &proposal).err(), Some(refused));
    let refused = verify(&world, &world.proposal(0)).err();
    assert_eq!(refused, Some(ProposalError::Seats { found: 3, size: 3, epoch: 0 }));
}

#[test]
fn a_proposal_must_have_exactly_the_grants_that_its_records_name() {
    let world = ClusterFixture::new(3);
    let missing = Proposal { grants: vec![], ..world.proposal(1) };
    assert_eq!(verify(&world, &missing).err(), Some(ProposalError::Grants));
    let mut twice = world.proposal(1);
    twice.grants.push(twice.grants[0].clone());
    assert_eq!(verify(&world, &twice).err(), Some(ProposalError::Grants));
    let mut foreign = world.proposal(1);
    foreign.grants = vec![world.grant.sign(&SigningKey::generate())];
    assert!(matches!(verify(&world, &foreign), Err(ProposalError::Grant(_))));
}

#[test]
fn a_join_ticket_gives_no_seat_in_a_list_that_forms() {
    let mut world = ClusterFixture::new(1);
    let mut grant = world.grant.clone();
    (grant.kind, grant.expires_at) = (TokenKind::Join, grant.issued_at + 900);
    // An owner may sign grants for boot tokens and for join tickets, so the grant itself is valid.
    // The proposal is refused only because the grant is a join ticket.
    let valid = VerifiedGrant::verify(&grant.sign(&world.owner), &world.chain());
    assert!(valid.is_ok(), "{valid:?}");
    world.grant = grant;
    let ticket = Proposal { grants: vec![world.grant.sign(&world.owner)], ..world.proposal(1) };
    let refused = verify(&world, &ticket);
    assert!(matches!(refused, Err(ProposalError::Grant(GrantError::Invalid(_)))), "{refused:?}");
}

#[test]
fn a_proposal_of_another_cluster_or_statement_is_refused() {
    let world = ClusterFixture::new(3);
    let other = Proposal { cluster: Uuid::now_v7(), ..world.proposal(1) };
    assert_eq!(verify(&world, &other).err(), Some(ProposalError::OtherCluster));
    let other = Proposal { statement: Digest::of(b"x"), ..world.proposal(1) };
    assert_eq!(verify(&world, &other).err(), Some(ProposalError::OtherStatement));
}

#[test]
fn an_ack_is_no_release() {
    let agent = SigningKey::generate();
    let cluster = Uuid::now_v7();
    let release = Release { cluster, epoch: 4 }.sign(&agent);
    assert!(matches!(Ack::verify(&release, agent.public()), Err(JwsError::WrongType { .. })));
    let verified = Release::verify(&release, agent.public());
    assert_eq!(verified, Ok(Release { cluster, epoch: 4 }));
}

#[test]
fn more_seats_than_a_token_allows_are_refused() {
    let mut world = ClusterFixture::new(3);
    world.grant.uses = 2;
    assert!(matches!(
        verify(&world, &world.proposal(1)),
        Err(ProposalError::Uses { uses: 2, seats: 3, .. })
    ));
}

#[test]
fn a_seat_outlives_its_token_until_the_clusters_deadline_and_no_longer() {
    let world = ClusterFixture::new(3);
    let verified = verify(&world, &world.proposal(1)).unwrap();
    let (from, to) = (world.grant.issued_at, world.grant.expires_at);
    let deadline = world.statement.deadline_seconds;
    for now in [from - 60, from, to, to + deadline] {
        assert_eq!(verified.seat_with_time_error(now), None, "{now}");
    }
    assert_eq!(verified.seat_with_time_error(from - 600), Some((1, GrantTimeError::NotYet)));
    assert_eq!(
        verified.seat_with_time_error(to + deadline + 600),
        Some((1, GrantTimeError::LongOver))
    );
    assert_eq!(verified.seat_with_time_error(u64::MAX), Some((1, GrantTimeError::LongOver)));
}
