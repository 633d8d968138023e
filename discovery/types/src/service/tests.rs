use super::*;
use crate::admin::Admin;
use crate::fixtures::ClusterFixture;
use crate::role::Role;
use crate::statement::Statement;

fn says(world: &ClusterFixture, sequence: u64) -> ServiceStatement {
    ServiceStatement {
        version: 1,
        cluster: world.statement.cluster,
        sequence,
        urls: vec!["https://new.example:8443".parse().unwrap()],
        pins: vec![Digest::of(b"key")],
        issued_at: 1_700_000_000,
    }
}

fn verified(said: &ServiceStatement, by: &SigningKey, chain: &StatementChain) -> VerifiedService {
    VerifiedService::verify(&said.sign(by), chain).unwrap()
}

/// Chain of `world` with a second statement, in which only `owner` is an admin.
fn with_other_owner(world: &ClusterFixture, owner: &SigningKey) -> StatementChain {
    let admin =
        Admin { key: *owner.public(), name: "eve".parse().unwrap(), roles: vec![Role::Owner] };
    let mut chain = world.chain();
    let next = Statement {
        seq: 1,
        previous: Some(chain.newest_hash()),
        admins: vec![admin],
        ..world.statement.clone()
    };
    chain.append(&next.sign(&world.owner)).unwrap();
    chain
}

#[test]
fn only_an_owner_of_the_newest_statement_signs_a_service_statement() {
    let world = ClusterFixture::new(1);
    let (said, chain) = (says(&world, 1), world.chain());
    assert_eq!(verified(&said, &world.owner, &chain).statement(), &said);
    for other in [&world.issuer, &world.agents[0], &world.service, &SigningKey::generate()] {
        let refused = VerifiedService::verify(&said.sign(other), &chain).unwrap_err();
        let unknown = JwsError::UnknownKey(other.key_id());
        assert_eq!(refused, ServiceStatementError::Jws(unknown));
        assert!(VerifiedService::verify_kept(&said.sign(other), &chain).is_err());
    }
    let other_kind = Jws::sign(JwsType::Retire, &world.owner, &said);
    assert!(VerifiedService::verify(&other_kind, &chain).is_err());
}

#[test]
fn a_service_statement_of_another_cluster_or_outside_the_limits_is_refused() {
    let world = ClusterFixture::new(1);
    let (said, chain) = (says(&world, 1), world.chain());
    let refused = |said: ServiceStatement| {
        VerifiedService::verify(&said.sign(&world.owner), &chain).unwrap_err()
    };
    let cluster = Uuid::now_v7();
    let elsewhere = refused(ServiceStatement { cluster, ..said.clone() });
    assert_eq!(elsewhere, ServiceStatementError::OtherCluster(cluster));
    let (url, pin) = (said.urls[0].clone(), said.pins[0]);
    for wrong in [
        ServiceStatement { urls: Vec::new(), ..said.clone() },
        ServiceStatement { urls: vec![url; MAX_URLS + 1], ..said.clone() },
        ServiceStatement { pins: Vec::new(), ..said.clone() },
        ServiceStatement { pins: vec![pin; MAX_PINS + 1], ..said.clone() },
        ServiceStatement { sequence: 0, ..said.clone() },
        ServiceStatement { sequence: MAX_SEQUENCE + 1, ..said.clone() },
    ] {
        assert_eq!(refused(wrong), ServiceStatementError::Limits);
    }
}

#[test]
fn the_longest_service_statement_fits_its_limit_and_its_line() {
    let world = ClusterFixture::new(1);
    let long = |n: usize| format!("https://{}{n}.example:65535", ["a"; 62].concat());
    let name = |n: usize| {
        let label = ["a"; 60].concat();
        format!("https://{label}{n}.{label}.{label}.{label}.example:65535")
    };
    assert!(name(1).len() > long(1).len());
    let said = ServiceStatement {
        sequence: MAX_SEQUENCE,
        urls: (0..MAX_URLS).map(|n| name(n).parse().unwrap()).collect(),
        pins: vec![Digest::of(b"a"); MAX_PINS],
        issued_at: u64::MAX,
        ..says(&world, 1)
    };
    let service = verified(&said, &world.owner, &world.chain());
    let again = find_service_line(&service.to_string(), said.cluster).unwrap();
    assert_eq!(&again, service.jws());
    assert!(again.as_str().len() <= JwsType::Service.max_bytes());
}

#[test]
fn the_higher_number_wins_and_of_equal_numbers_the_first() {
    let world = ClusterFixture::new(1);
    let chain = world.chain();
    let service = |said: &ServiceStatement| verified(said, &world.owner, &chain);
    let (first, second) = (service(&says(&world, 1)), service(&says(&world, 2)));
    assert_eq!(first.compare(None, &chain), ServiceOrder::Newer);
    assert_eq!(second.compare(Some(&first), &chain), ServiceOrder::Newer);
    assert_eq!(first.compare(Some(&second), &chain), ServiceOrder::Older);
    assert_eq!(first.compare(Some(&first), &chain), ServiceOrder::Same);
    let other = ServiceStatement { issued_at: 7, ..says(&world, 1) };
    assert_eq!(service(&other).compare(Some(&first), &chain), ServiceOrder::Conflict);
}

#[test]
fn a_former_owners_statement_stays_until_an_owner_of_today_signs_another() {
    let world = ClusterFixture::new(1);
    let owner = SigningKey::generate();
    let old = verified(&says(&world, MAX_SEQUENCE), &world.owner, &world.chain());
    let chain = with_other_owner(&world, &owner);
    assert_eq!(VerifiedService::verify_kept(old.jws(), &chain), Ok(old.clone()));
    assert!(VerifiedService::verify(old.jws(), &chain).is_err(), "no agent takes it anew");
    let new = verified(&says(&world, 1), &owner, &chain);
    assert_eq!(new.compare(Some(&old), &chain), ServiceOrder::Newer);
}

#[test]
fn the_newest_line_of_the_cluster_is_found_among_others() {
    let (world, other) = (ClusterFixture::new(1), ClusterFixture::new(1));
    let line = |world: &ClusterFixture, number| {
        verified(&says(world, number), &world.owner, &world.chain()).to_string()
    };
    let text = [line(&other, 9), line(&world, 1), String::new(), line(&world, 2)].join("\n");
    let found = find_service_line(&text, world.statement.cluster).unwrap();
    assert!(text.ends_with(found.as_str()));
    let none = Uuid::now_v7();
    assert_eq!(find_service_line(&text, none), Err(ServiceLineError::NoLine(none)));
    assert_eq!(find_service_line("", none), Err(ServiceLineError::NoLine(none)));
}

#[test]
fn a_line_of_another_kind_is_named() {
    let world = ClusterFixture::new(1);
    let refused = |text: &str| find_service_line(text, world.statement.cluster).unwrap_err();
    let told = |text: &str| refused(text).to_string();
    assert!(told("muster1 urls=x").contains("this is a join bundle"));
    assert!(told("muster-context1 urls=x").contains("service announce"));
    assert!(told("\nmuster-service9 x").contains("line 2: expected"));
    let statement = world.statement.sign(&world.owner);
    assert!(told(&format!("{SERVICE_WORD} {statement}")).contains("expected a muster-service+jwt"));
    for text in [SERVICE_WORD.to_owned(), format!("{SERVICE_WORD} x y")] {
        assert_eq!(refused(&text), ServiceLineError::Jws { line: 1, source: JwsError::Malformed });
    }
}

#[test]
fn the_urls_of_a_statement_come_before_those_of_the_bundle() {
    let world = ClusterFixture::new(1);
    let service = verified(&says(&world, 1), &world.owner, &world.chain());
    let old: ServiceUrl = "https://old.example:8443".parse().unwrap();
    let new = service.statement().urls[0].clone();
    assert_eq!(service.urls_before(&[new.clone(), old.clone()]), [new, old]);
}
