use super::*;
use crate::fixtures::ClusterFixture;

fn verify(world: &ClusterFixture, signed: &SignedRecord) -> Result<VerifiedRecord, RecordError> {
    VerifiedRecord::verify(signed, &world.verified_grant(), &world.statement.permissions)
}

fn changed(change: impl Fn(&mut Record)) -> Result<VerifiedRecord, RecordError> {
    let mut world = ClusterFixture::new(1);
    change(&mut world.records[0]);
    verify(&world, &world.signed(0))
}

#[test]
fn a_record_with_both_signatures_is_accepted() {
    let world = ClusterFixture::new(1);
    let verified = verify(&world, &world.signed(0)).unwrap();
    assert_eq!(verified.agent_id(), world.agents[0].key_id());
    assert_eq!(verified.hash(), world.signed(0).record.hash());
    assert_eq!(*verified.node_key(), world.records[0].csr.verify().unwrap().node_key);
}

#[test]
fn an_endorsement_by_another_key_than_the_tokens_is_refused() {
    let world = ClusterFixture::new(1);
    let thief = SigningKey::generate();
    let signed = world.records[0].sign(&world.agents[0], &thief);
    let unknown = JwsError::UnknownKey(thief.key_id());
    assert_eq!(verify(&world, &signed).err(), Some(RecordError::Endorsement(unknown)));
}

#[test]
fn a_record_must_be_signed_by_the_key_in_it() {
    let world = ClusterFixture::new(1);
    let thief = SigningKey::generate();
    let signed = world.records[0].sign(&thief, world.token.key());
    let unknown = JwsError::UnknownKey(thief.key_id());
    assert_eq!(verify(&world, &signed).err(), Some(RecordError::Record(unknown)));
}

#[test]
fn an_endorsement_of_another_record_is_refused() {
    let world = ClusterFixture::new(2);
    let mixed =
        SignedRecord { record: world.signed(0).record, endorsement: world.signed(1).endorsement };
    assert_eq!(
        verify(&world, &mixed).err(),
        Some(RecordError::Mismatch("the endorsement is of another record"))
    );
}

#[test]
fn a_record_under_another_grant_or_cluster_is_refused() {
    let other = changed(|r| r.grant = GrantId::random());
    assert!(matches!(other, Err(RecordError::Mismatch(_))), "{other:?}");
    let other = changed(|r| r.cluster = Uuid::now_v7());
    assert!(matches!(other, Err(RecordError::Mismatch(_))), "{other:?}");
}

#[test]
fn the_key_of_a_token_can_not_be_an_agents_key() {
    let mut world = ClusterFixture::new(1);
    world.records[0].agent_key = *world.token.public();
    let signed = world.records[0].sign(world.token.key(), world.token.key());
    let refused = verify(&world, &signed);
    assert!(matches!(refused, Err(RecordError::Mismatch(_))), "{refused:?}");
}

#[test]
fn loopback_and_low_ports_need_permission() {
    let url: NodeUrl = "https://127.0.0.2:2380".parse().unwrap();
    let refused = changed(|r| r.peer_urls = vec![url.clone()]);
    assert_eq!(refused.err(), Some(RecordError::Loopback(url.clone())));
    let low: NodeUrl = "https://10.0.0.1:443".parse().unwrap();
    let refused = changed(|r| r.client_urls = vec![low.clone()]);
    assert_eq!(refused.err(), Some(RecordError::LowPort(low.clone())));
    let mut world = ClusterFixture::new(1);
    world.records[0].peer_urls = vec![url];
    world.records[0].client_urls = vec![low];
    let all = Permissions { loopback: true, low_ports: true, ..Default::default() };
    assert!(VerifiedRecord::verify(&world.signed(0), &world.verified_grant(), &all).is_ok());
}

#[test]
fn the_urls_of_a_record_are_limited_in_number_and_differ() {
    let url = |i: u8| -> NodeUrl { format!("https://10.0.0.{i}:2380").parse().unwrap() };
    let bad: [(Vec<NodeUrl>, Vec<NodeUrl>); 4] = [
        (vec![], vec![url(1)]),
        (vec![url(1), url(1)], vec![url(2)]),
        (vec![url(1)], vec![url(1)]),
        ((1..=4).map(url).collect(), vec![url(9)]),
    ];
    for (peers, clients) in bad {
        let refused = changed(|r| {
            r.peer_urls.clone_from(&peers);
            r.client_urls.clone_from(&clients);
        });
        assert_eq!(refused.err(), Some(RecordError::Urls), "{peers:?} {clients:?}");
    }
}

#[test]
fn a_bound_grant_accepts_only_its_name_and_zone() {
    let mut world = ClusterFixture::new(1);
    world.grant.name = Some("db-9".parse().unwrap());
    let refused = verify(&world, &world.signed(0));
    assert!(matches!(refused, Err(RecordError::OtherName { .. })), "{refused:?}");
    world.grant.name = Some("db-1".parse().unwrap());
    world.grant.zone = Some("eu-1".parse().unwrap());
    let refused = verify(&world, &world.signed(0));
    assert!(matches!(refused, Err(RecordError::OtherZone(_))), "{refused:?}");
    world.records[0].zone = Some("eu-1".parse().unwrap());
    assert!(verify(&world, &world.signed(0)).is_ok());
}

#[test]
fn a_foreign_kind_of_node_key_is_refused() {
    let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let refused = changed(|r| r.csr = Csr::new(&pair));
    assert_eq!(refused.err(), Some(RecordError::Csr(CsrError::NotP256)));
}

#[test]
fn machine_facts_are_short_and_printable() {
    for fact in ["", "a b", "\u{1b}[31m", &"x".repeat(129)] {
        let refused = changed(|r| r.machine.machine_id = Some(fact.into()));
        assert_eq!(refused.err(), Some(RecordError::Machine), "{fact:?}");
    }
}

#[test]
fn the_largest_record_fits_the_maximum_length() {
    let mut world = ClusterFixture::new(1);
    let record = &mut world.records[0];
    let long = "a".repeat(59);
    let url = |i: usize| -> NodeUrl {
        format!("https://{long}.{long}.{long}.x{i}{long}:65535").parse().unwrap()
    };
    record.peer_urls = (0..MAX_SEAT_URLS).map(url).collect();
    record.client_urls = (10..10 + MAX_SEAT_URLS).map(url).collect();
    record.name = "n".repeat(63).parse().unwrap();
    record.zone = Some("z".repeat(63).parse().unwrap());
    record.machine =
        MachineFacts { dmi_uuid: Some("d".repeat(128)), machine_id: Some("m".repeat(128)) };
    let jws = world.signed(0).record;
    assert!(jws.as_str().parse::<Jws>().is_ok(), "{} bytes", jws.as_str().len());
}

#[test]
fn a_token_for_some_addresses_gives_no_seat_to_others() {
    let mut world = ClusterFixture::new(1);
    for (block, taken) in [("10.0.0.0/24", true), ("10.0.1.0/24", false), ("fd00::/8", false)] {
        world.grant.cidrs = vec![block.parse().unwrap()];
        let verified = verify(&world, &world.signed(0));
        let other = matches!(verified, Err(RecordError::OtherAddress { .. }));
        assert_eq!((verified.is_ok(), other), (taken, !taken), "{block}");
    }
    world.records[0].peer_urls = vec!["https://db-1.example.org:2380".parse().unwrap()];
    assert!(verify(&world, &world.signed(0)).is_ok());
}
