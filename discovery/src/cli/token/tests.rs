use clap::Parser;
use discovery_types::admin::Admin;
use discovery_types::digest::Digest;
use discovery_types::grant::VerifiedGrant;
use discovery_types::key::SigningKey;
use discovery_types::role::Role;
use discovery_types::service::{ServiceStatement, VerifiedService};
use discovery_types::statement::{Permissions, Statement};

use super::issue::{clock_warning, pin_warning};
use super::*;

#[derive(Parser)]
struct CreateCommandLine {
    #[command(flatten)]
    args: CreateArgs,
}

fn typed(line: &str) -> CreateArgs {
    let words = ["create", "--cluster", "demo"].into_iter().chain(line.split_whitespace());
    CreateCommandLine::parse_from(words).args
}

fn ca() -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.self_signed(&key).unwrap().pem()
}

fn chain(owner: &SigningKey) -> StatementChain {
    let name: Name = "demo".parse().unwrap();
    let statement = Statement {
        version: 1,
        cluster: uuid::Uuid::now_v7(),
        name: name.clone(),
        size: 3,
        seq: 0,
        previous: None,
        peer_ca: ca(),
        client_ca: ca(),
        admins: vec![Admin { key: *owner.public(), name, roles: vec![Role::Owner] }],
        permissions: Permissions::default(),
        deadline_seconds: 60,
        spread: None,
        needs_approval: false,
        also_trusted: None,
        adopted: None,
    };
    StatementChain::verify_from_owners(&[statement.sign(owner)], &[*owner.public()]).unwrap()
}

#[test]
fn a_grant_made_from_the_command_line_is_valid() {
    let owner = SigningKey::generate();
    let chain = chain(&owner);
    let token = Token::generate(TokenKind::Boot);
    for line in ["", "--ttl 24h --uses 1", "--name db-1 --cidr 10.0.0.0/8 --cidr ::/0"] {
        let grant = grant(&chain, &token, &typed(line), 1000).unwrap();
        assert!(VerifiedGrant::verify(&grant.sign(&owner), &chain).is_ok(), "{line}");
    }
}

#[test]
fn a_ticket_is_for_one_member_and_for_at_most_a_quarter_of_an_hour() {
    let owner = SigningKey::generate();
    let chain = chain(&owner);
    let token = Token::generate(TokenKind::Join);
    for line in ["--kind join", "--kind join --ttl 5m --uses 1 --name db-4"] {
        let mut grant = grant(&chain, &token, &typed(line), 1000).unwrap();
        assert_eq!(grant.uses, 1);
        grant.replaces = Some(discovery_types::digest::MemberId::new(7));
        assert!(VerifiedGrant::verify(&grant.sign(&owner), &chain).is_ok(), "{line}");
    }
    for line in ["--kind join --ttl 16m", "--kind join --uses 2"] {
        let refused = grant(&chain, &token, &typed(line), 1000).unwrap_err();
        assert_eq!(refused.exit_code(), 2, "{line}");
    }
}

#[test]
fn an_address_alone_is_a_block_of_one() {
    let blocks = typed("--cidr 10.0.0.1 --cidr fd00::1 --cidr 10.0.0.0/8").cidr;
    let text: Vec<_> = blocks.iter().map(ToString::to_string).collect();
    assert_eq!(text, ["10.0.0.1/32", "fd00::1/128", "10.0.0.0/8"]);
}

#[test]
fn uses_default_to_the_size_or_to_one_for_a_named_member() {
    let chain = chain(&SigningKey::generate());
    let token = Token::generate(TokenKind::Boot);
    let uses = |line| grant(&chain, &token, &typed(line), 1000).unwrap().uses;
    assert_eq!((uses(""), uses("--name db-1"), uses("--uses 2")), (3, 1, 2));
}

#[test]
fn a_bundle_for_more_than_one_seat_comes_with_a_warning() {
    let chain = chain(&SigningKey::generate());
    let token = Token::generate(TokenKind::Boot);
    let warning = |line| danger(&grant(&chain, &token, &typed(line), 1000).unwrap());
    assert_eq!(warning("--uses 1"), None);
    assert_eq!(warning("--name db-1"), None);
    assert!(warning("").unwrap().contains("3 seats from anywhere"));
    assert!(warning("--cidr 10.1.0.0/16").unwrap().contains("3 seats from its addresses"));
}

#[test]
fn a_grant_that_would_be_invalid_is_a_usage_error() {
    let chain = chain(&SigningKey::generate());
    let token = Token::generate(TokenKind::Boot);
    for line in ["--uses 0", "--uses 4", "--ttl 25h", "--ttl 999ms"] {
        let refused = grant(&chain, &token, &typed(line), 1000);
        assert!(matches!(refused, Err(CliError::Usage(_))), "{line}: {refused:?}");
    }
}

#[test]
fn a_service_clock_that_differs_from_the_admins_is_warned_of() {
    assert_eq!(clock_warning(1_000_000, 1_029_999), None);
    let ahead = clock_warning(4_600_000, 1_000_000).unwrap();
    assert!(ahead.contains("is 3600 s ahead of this machine's"), "{ahead}");
    let behind = clock_warning(1_000_000, 1_031_000).unwrap();
    assert!(behind.contains("is 31 s behind this machine's"), "{behind}");
}

#[test]
fn a_bundle_whose_pins_were_not_announced_is_warned_of() {
    let owner = SigningKey::generate();
    let chain = chain(&owner);
    let (old, new) = (Digest::of(b"old"), Digest::of(b"new"));
    let statement = ServiceStatement {
        version: 1,
        cluster: chain.newest().cluster,
        sequence: 7,
        urls: vec!["https://a.example:8443".parse().unwrap()],
        pins: vec![old],
        issued_at: 1_700_000_000,
    };
    let service = VerifiedService::verify(&statement.sign(&owner), &chain).unwrap();
    assert_eq!(pin_warning(&[old], &service), None);
    assert_eq!(pin_warning(&[old, new], &service), None);
    let warning = pin_warning(&[new], &service).unwrap();
    assert!(warning.contains("number 7") && warning.contains("service announce"), "{warning}");
}
