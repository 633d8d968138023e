use super::*;
use crate::fixtures::ClusterFixture;

fn verify(world: &ClusterFixture, document: &Document) -> Result<VerifiedDocument, DocumentError> {
    VerifiedDocument::verify(&document.sign(&world.service), &world.chain())
}

#[test]
fn a_document_that_each_seat_signed_is_valid() {
    let world = ClusterFixture::new(3);
    let document = world.document(7);
    let verified = verify(&world, &document).unwrap();
    assert_eq!((verified.epoch(), verified.hash()), (7, document.proposal.hash()));
    assert_eq!(verified.records().len(), 3);
}

#[test]
fn the_services_signature_is_checked_only_in_a_received_document() {
    let world = ClusterFixture::new(1);
    let other = SigningKey::generate();
    let jws = world.document(1).sign(&other);
    assert!(VerifiedDocument::verify(&jws, &world.chain()).is_ok());
    let keys = [*world.service.public()];
    let received = VerifiedDocument::verify_received(&jws, &world.chain(), &keys);
    let unknown = JwsError::UnknownKey(other.key_id());
    assert_eq!(received.err(), Some(DocumentError::Jws(unknown)));
    let good = world.document(1).sign(&world.service);
    assert!(VerifiedDocument::verify_received(&good, &world.chain(), &keys).is_ok());
}

#[test]
fn a_missing_ack_is_noticed() {
    let world = ClusterFixture::new(3);
    let mut document = world.document(1);
    document.acks.pop();
    let refused = DocumentError::Acks { found: 2, seats: 3 };
    assert_eq!(verify(&world, &document).err(), Some(refused));
}

#[test]
fn an_ack_by_another_seat_is_refused() {
    let world = ClusterFixture::new(3);
    let mut document = world.document(1);
    document.acks.swap(0, 1);
    let refused = verify(&world, &document).err();
    assert!(matches!(refused, Some(DocumentError::Ack { seat: 1, .. })), "{refused:?}");
}

#[test]
fn an_ack_of_another_epoch_or_list_is_refused() {
    let world = ClusterFixture::new(3);
    let mut document = world.document(2);
    document.acks[2] = world.document(1).acks[2].clone();
    assert_eq!(verify(&world, &document).err(), Some(DocumentError::OtherAck(3)));
}

#[test]
fn a_record_that_was_changed_after_the_acks_is_noticed() {
    let mut world = ClusterFixture::new(3);
    let acks = world.document(1).acks;
    world.records[1].name = "mallory".parse().unwrap();
    let document = Document { version: 1, proposal: world.proposal(1), acks };
    assert_eq!(verify(&world, &document).err(), Some(DocumentError::OtherAck(1)));
}

#[test]
fn a_document_under_a_foreign_chain_is_refused() {
    let world = ClusterFixture::new(3);
    let jws = world.document(1).sign(&world.service);
    let refused = VerifiedDocument::verify(&jws, &ClusterFixture::new(3).chain());
    assert!(matches!(refused, Err(DocumentError::Proposal(_))), "{refused:?}");
}

#[test]
fn a_document_claims_a_seat_for_its_members_only() {
    let world = ClusterFixture::new(3);
    let jws = world.document(1).sign(&world.service);
    for agent in &world.agents {
        assert_eq!(VerifiedDocument::claims_seat(&jws, &agent.key_id()), Ok(true));
    }
    assert_eq!(VerifiedDocument::claims_seat(&jws, &world.owner.key_id()), Ok(false));
}

/// The largest commit document has nine seats, each with a record of maximum length and its own
/// grant.
#[test]
fn the_largest_document_fits_the_maximum_length() {
    let typ = |typ: JwsType| typ.max_bytes();
    let seat = typ(JwsType::Record) + 500 + 500 + 900;
    assert!((9 * seat + 1000) * 4 / 3 < JwsType::Document.max_bytes());
    let world = ClusterFixture::new(9);
    let jws = world.document(1).sign(&world.service);
    assert!(jws.as_str().parse::<Jws>().is_ok());
    let sizes = [&world.document(1).acks[0], &world.signed(0).endorsement];
    for jws in sizes {
        assert!(jws.as_str().len() < 500, "{}", jws.as_str().len());
    }
    assert!(world.proposal(1).grants[0].as_str().len() < 900);
}
