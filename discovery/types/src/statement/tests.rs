use super::*;
use crate::adoption::AdoptedMember;
use crate::fixtures::{ClusterFixture, TestCa};
use crate::role::Role;

type Change<'a> = (&'static str, Box<dyn Fn(&mut Statement) + 'a>);

fn next(last: &Statement, hash: Digest) -> Statement {
    Statement { seq: last.seq + 1, previous: Some(hash), ..last.clone() }
}

#[test]
fn an_owner_of_the_last_statement_must_sign_the_next_one() {
    let world = ClusterFixture::new(3);
    let heir = SigningKey::generate();
    let first = world.statement.sign(&world.owner);
    let mut second = next(&world.statement, first.hash());
    second.admins[0].key = *heir.public();
    let second_jws = second.sign(&world.owner);
    let third = next(&second, second_jws.hash());
    let good = [first.clone(), second_jws.clone(), third.sign(&heir)];
    let chain = StatementChain::verify_from_owners(&good, &[*world.owner.public()]).unwrap();
    assert_eq!((chain.newest().seq, chain.newest_hash()), (2, good[2].hash()));

    let stale = [first, second_jws, third.sign(&world.owner)];
    let refused = StatementChain::verify_from_owners(&stale, &[*world.owner.public()]);
    let unknown = JwsError::UnknownKey(world.owner.key_id());
    assert_eq!(refused.err(), Some(StatementError::Jws { seq: 2, source: unknown }));
}

#[test]
fn a_chain_of_another_owner_is_foreign() {
    let world = ClusterFixture::new(3);
    let other = SigningKey::generate();
    let chain = world.chain().jws();
    let refused = StatementChain::verify_from_owners(&chain, &[*other.public()]);
    assert_eq!(refused.err(), Some(StatementError::ForeignRoot(world.owner.key_id())));
}

#[test]
fn the_first_signer_of_a_chain_is_checked_before_any_signature() {
    let world = ClusterFixture::new(3);
    let stranger = SigningKey::generate();
    // The signatures of both statements are invalid. So `ForeignRoot` shows that the first signer
    // was checked before any signature.
    let chain = [world.statement.sign(&stranger), world.statement.sign(&stranger)];
    let refused = StatementChain::verify_from_owners(&chain, &[*world.owner.public()]);
    assert_eq!(refused.err(), Some(StatementError::ForeignRoot(stranger.key_id())));
}

#[test]
fn a_statement_signed_by_an_admin_who_is_no_owner_is_refused() {
    let world = ClusterFixture::new(3);
    let chain = [world.statement.sign(&world.issuer)];
    let refused = StatementChain::verify_from_owners(&chain, &[*world.issuer.public()]);
    assert!(matches!(refused, Err(StatementError::Jws { seq: 0, .. })), "{refused:?}");
}

#[test]
fn an_agent_accepts_only_a_chain_that_contains_its_pin() {
    let world = ClusterFixture::new(3);
    let chain = world.chain();
    let pin = chain.newest_hash();
    let mut longer = chain.clone();
    longer.append(&next(&world.statement, pin).sign(&world.owner)).unwrap();
    assert!(StatementChain::verify_from_pin(&chain.jws(), &pin).is_ok());
    assert!(StatementChain::verify_from_pin(&longer.jws(), &pin).is_ok());
    let foreign = ClusterFixture::new(3).chain().jws();
    let refused = StatementChain::verify_from_pin(&foreign, &pin);
    assert_eq!(refused.err(), Some(StatementError::NotPinned));
    let cut = StatementChain::verify_from_pin(&longer.jws()[1..], &pin);
    assert!(matches!(cut, Err(StatementError::Broken { seq: 0, .. })), "{cut:?}");
}

#[test]
fn the_fixed_values_of_a_cluster_can_not_change() {
    let world = ClusterFixture::new(3);
    let chain = world.chain();
    let good = next(&world.statement, chain.newest_hash());
    let other_ca = TestCa::new("other").pem;
    let changes: [Change<'_>; 9] = [
        ("its number", Box::new(|s| s.seq = 5)),
        ("the hash of the one before", Box::new(|s| s.previous = Some(Digest::of(b"x")))),
        ("the cluster's id", Box::new(|s| s.cluster = Uuid::now_v7())),
        ("the cluster's name", Box::new(|s| s.name = "other".parse().unwrap())),
        ("the cluster's size", Box::new(|s| s.size = 5)),
        ("the peers' CA", Box::new(|s| s.peer_ca.clone_from(&other_ca))),
        ("the clients' CA", Box::new(|s| s.client_ca.clone_from(&other_ca))),
        ("the need for approvals", Box::new(|s| s.needs_approval = true)),
        ("the spread of its members", Box::new(|s| s.spread = Some(Spread::Zone))),
    ];
    for (what, change) in changes {
        let mut bad = good.clone();
        change(&mut bad);
        let mut chain = chain.clone();
        let refused = chain.append(&bad.sign(&world.owner)).err();
        assert_eq!(refused, Some(StatementError::Broken { seq: 1, what }));
        assert_eq!(chain.newest().seq, 0);
    }
}

#[test]
fn statements_that_no_cluster_can_have_are_refused() {
    let world = ClusterFixture::new(3);
    let changes: [Change<'_>; 10] = [
        ("uuid", Box::new(|s| s.cluster = Uuid::nil())),
        ("size 0", Box::new(|s| s.size = 0)),
        ("size 10", Box::new(|s| s.size = 10)),
        ("even", Box::new(|s| (s.size, s.permissions.even_size) = (4, false))),
        ("deadline", Box::new(|s| s.deadline_seconds = 0)),
        ("one ca", Box::new(|s| s.peer_ca = s.client_ca.clone())),
        ("no ca", Box::new(|s| s.peer_ca = "junk".into())),
        ("two admins of one name", Box::new(|s| s.admins[1].name = s.admins[0].name.clone())),
        ("one spread member", Box::new(|s| (s.size, s.spread) = (1, Some(Spread::Zone)))),
        ("no role", Box::new(|s| s.admins[1].roles.clear())),
    ];
    for (what, change) in changes {
        let mut bad = world.statement.clone();
        change(&mut bad);
        assert!(matches!(bad.check(), Err(StatementError::Invalid { .. })), "{what}");
    }
    let mut headless = world.statement.clone();
    headless.admins[0].roles = vec![Role::Auditor];
    assert!(headless.check().is_err());
}

/// Older programs refuse a statement with an unknown field, and read one without it.
#[test]
fn a_spread_is_a_field_of_the_statement_only_if_it_is_used() {
    let mut statement = ClusterFixture::new(3).statement;
    let fields = |statement: &Statement| serde_json::to_value(statement).unwrap();
    assert_eq!(fields(&statement).get("spread"), None);
    statement.spread = Some(Spread::Zone);
    assert_eq!(fields(&statement)["spread"], "zone");
    assert!(statement.check().is_ok());
}

/// Returns the statement with other CAs. Each digit of `cas` is the index of a pair in `pairs`:
/// first the issuing pair, then the additional trusted pair, if any.
fn with_cas(statement: &Statement, pairs: &[CaPair], cas: &str) -> Statement {
    let mut digits = cas.chars().map(|digit| digit.to_digit(10).unwrap() as usize);
    let issuing = pairs[digits.next().unwrap()].clone();
    let also_trusted = digits.next().map(|digit| pairs[digit].clone());
    Statement {
        version: if also_trusted.is_some() { 2 } else { 1 },
        peer_ca: issuing.peer,
        client_ca: issuing.client,
        also_trusted,
        ..statement.clone()
    }
}

#[test]
fn cas_are_replaced_by_statements_between_which_each_certificate_is_trusted() {
    let world = ClusterFixture::new(1);
    let pair = |_| CaPair { peer: TestCa::new("peers").pem, client: TestCa::new("clients").pem };
    let pairs: Vec<CaPair> = (0..3).map(pair).collect();
    let step = |from: &str, to: &str| {
        let of = |cas| with_cas(&world.statement, &pairs, cas);
        of(to).rotation_step(&of(from))
    };
    for (from, to, taken) in [
        ("0", "0", None),
        ("01", "01", None),
        ("0", "01", Some(RotationStep::Begin)),
        ("01", "10", Some(RotationStep::Switch)),
        ("10", "1", Some(RotationStep::End)),
        ("10", "01", Some(RotationStep::Switch)),
        ("01", "0", Some(RotationStep::End)),
    ] {
        assert_eq!(step(from, to), Ok(taken), "{from} {to}");
    }
    // In each case, one side of the change uses certificates that the other side doesn't trust.
    for (from, to) in [
        ("0", "1"),
        ("0", "10"),
        ("0", "12"),
        ("01", "1"),
        ("01", "02"),
        ("01", "12"),
        ("01", "20"),
    ] {
        assert!(step(from, to).is_err(), "{from} {to}");
    }
    for twice in ["00", "11"] {
        assert!(with_cas(&world.statement, &pairs, twice).check().is_err(), "{twice}");
    }
    let mut crossed = with_cas(&world.statement, &pairs, "01");
    crossed.also_trusted =
        Some(CaPair { peer: pairs[0].client.clone(), client: pairs[1].client.clone() });
    assert!(crossed.check().is_err(), "a client's CA would be a peer's");
}

#[test]
fn a_chain_knows_since_when_its_cas_are_trusted_and_issue() {
    let world = ClusterFixture::new(1);
    let mut chain = world.chain();
    let first = CaPair { peer: world.peer_ca.pem.clone(), client: world.client_ca.pem.clone() };
    let new = CaPair { peer: TestCa::new("peers").pem, client: TestCa::new("clients").pem };
    let pairs = [first, new];
    let mut since = Vec::new();
    for cas in ["0", "01", "01", "10", "10", "1"] {
        let wanted = with_cas(&next(chain.newest(), chain.newest_hash()), &pairs, cas);
        chain.append(&wanted.sign(&world.owner)).unwrap();
        since.push((chain.trusted_since(), chain.issuing_since()));
    }
    assert_eq!(since, [(0, 0), (2, 0), (2, 0), (2, 4), (2, 4), (6, 4)]);
    let mut skipped = with_cas(&next(chain.newest(), chain.newest_hash()), &pairs, "0");
    skipped.peer_ca.clone_from(&pairs[0].peer);
    let refused = chain.append(&skipped.sign(&world.owner)).err();
    assert_eq!(refused, Some(StatementError::Broken { seq: 7, what: "the peers' CA" }));
}

/// Older programs see by the version that a statement with additional CAs is newer than they are.
#[test]
fn a_statement_with_additional_cas_has_another_version() {
    let mut statement = ClusterFixture::new(3).statement;
    assert_eq!(serde_json::to_value(&statement).unwrap().get("also_trusted"), None);
    let additional = CaPair { peer: TestCa::new("p").pem, client: TestCa::new("c").pem };
    for (also_trusted, version) in [(None, 1), (Some(additional), 2)] {
        statement.also_trusted = also_trusted;
        for other in 1..=2 {
            statement.version = other;
            assert_eq!(statement.check().is_ok(), other == version, "{version} {other}");
        }
    }
}

#[test]
fn a_leaf_certificate_is_no_ca() {
    let world = ClusterFixture::new(1);
    assert_eq!(ca_der(&world.leaves(0).peer), None);
    assert_eq!(ca_der(&format!("{0}{0}", world.statement.peer_ca)), None);
    assert!(ca_der(&world.statement.peer_ca).is_some());
}

#[test]
fn the_length_of_a_chain_is_bounded() {
    let world = ClusterFixture::new(1);
    let first = world.statement.sign(&world.owner);
    assert_eq!(StatementChain::verify_links(&[]).err(), Some(StatementError::Length));
    let many = vec![first; MAX_CHAIN + 1];
    assert_eq!(StatementChain::verify_links(&many).err(), Some(StatementError::Length));
}

#[test]
fn the_largest_statement_fits_the_maximum_length() {
    let mut world = ClusterFixture::new(9);
    let name = |i: usize| format!("{i:0>63}").parse().unwrap();
    let admin = |i| Admin {
        key: *SigningKey::generate().public(),
        name: name(i),
        roles: Role::ALL.to_vec(),
    };
    world.statement.admins.truncate(1);
    world.statement.admins.extend((1..MAX_ADMINS).map(admin));
    let jws = world.statement.sign(&world.owner);
    assert!(jws.as_str().parse::<Jws>().is_ok(), "{} bytes", jws.as_str().len());
}

fn adopted(statement: &Statement) -> Statement {
    let members = (1..=statement.size).map(|host| AdoptedMember {
        id: MemberId::new(u64::from(host)),
        name: format!("db-{host}").parse().unwrap(),
        peer_url: format!("https://10.0.0.{host}:2380").parse().unwrap(),
        client_urls: vec![format!("https://10.0.0.{host}:2379").parse().unwrap()],
    });
    let adoption =
        Adoption { raft_cluster: "00000000000000ff".to_owned(), members: members.collect() };
    let old = TestCa::new("etcd").pem;
    Statement {
        version: 2,
        also_trusted: Some(CaPair { peer: old.clone(), client: old }),
        adopted: Some(adoption),
        ..statement.clone()
    }
}

#[test]
fn an_adopted_cluster_may_have_had_one_ca_for_peers_and_clients() {
    let world = ClusterFixture::new(3);
    let statement = adopted(&world.statement);
    assert_eq!(statement.check(), Ok(()));
    let formed = Statement { adopted: None, ..statement.clone() };
    assert!(formed.check().is_err(), "only an adopted one");
    let mut own = statement.clone();
    own.client_ca.clone_from(&own.peer_ca);
    assert!(own.check().is_err(), "the service's own CAs differ");
    let mut crossed = statement.clone();
    crossed.also_trusted.as_mut().unwrap().client.clone_from(&statement.peer_ca);
    assert!(crossed.check().is_err());
    let smaller = Statement { size: 2, ..statement };
    assert!(smaller.check().is_err(), "each member has a seat");
}

#[test]
fn the_adopted_members_stay_and_keep_their_ids() {
    let world = ClusterFixture::new(3);
    let first = adopted(&world.statement);
    let mut chain = StatementChain::verify_links(&[first.sign(&world.owner)]).unwrap();
    let next = Statement { seq: 1, previous: Some(chain.newest_hash()), ..first.clone() };
    let mut changed = next.clone();
    changed.adopted.as_mut().unwrap().members[0].id = MemberId::new(9);
    let refused = chain.append(&changed.sign(&world.owner)).unwrap_err();
    assert_eq!(refused, StatementError::Broken { seq: 1, what: "the adopted members" });
    // The last step of a replacement drops the old CAs.
    let dropped = Statement { version: 1, also_trusted: None, ..next };
    assert!(chain.append(&dropped.sign(&world.owner)).is_ok());
    let h = Digest::of(b"document");
    let id = |record: &Record| first.founder_id(&h, record);
    assert_eq!(id(&world.records[1]), Some(MemberId::new(2)));
    let elsewhere =
        Record { peer_urls: world.records[0].peer_urls.clone(), ..world.records[1].clone() };
    assert_eq!(id(&elsewhere), None, "the name alone makes no member");
}

#[test]
fn the_cas_before_an_adoption_are_trusted_until_they_are_dropped_once() {
    let world = ClusterFixture::new(3);
    let first = adopted(&world.statement);
    let mut chain = StatementChain::verify_links(&[first.sign(&world.owner)]).unwrap();
    assert!(chain.trusts_cas_before_adoption());
    let replacement = CaPair { peer: TestCa::new("p").pem, client: TestCa::new("c").pem };
    for (also_trusted, is_trusted) in
        [(first.also_trusted.clone(), true), (None, false), (Some(replacement), false)]
    {
        let next = Statement {
            seq: chain.newest().seq + 1,
            previous: Some(chain.newest_hash()),
            also_trusted,
            ..first.clone()
        };
        let next = Statement { version: next.format_version(), ..next };
        chain.append(&next.sign(&world.owner)).unwrap();
        assert_eq!(chain.trusts_cas_before_adoption(), is_trusted, "statement {}", next.seq);
    }
    // This cluster wasn't adopted, so it had no earlier CAs. An additional CA in one of its
    // statements always belongs to a replacement.
    let mut formed = world.chain();
    let issuing = world.statement.issuing_cas();
    let new = CaPair { peer: TestCa::new("q").pem, client: TestCa::new("d").pem };
    world.append_cas(&mut formed, &issuing, Some(&new));
    assert!(!formed.trusts_cas_before_adoption());
}
