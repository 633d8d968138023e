//! Tests of all parsers of versioned signed payloads, with a version that they don't know.

use std::error::Error;

use serde_json::{Value, json};

use crate::admin::{Admin, AdminChain, AdminOperation};
use crate::digest::{Incarnation, MemberId, Nonce};
use crate::document::VerifiedDocument;
use crate::fixtures::{ClusterFixture, sign_newer_version};
use crate::grant::VerifiedGrant;
use crate::jws::{Jws, JwsError, JwsType, newer_version};
use crate::key::SigningKey;
use crate::order::{Order, OrderedChange, VerifiedOrder};
use crate::record::{Endorsement, SignedRecord, VerifiedRecord};
use crate::recovery::{NodeIdentity, Recovery};
use crate::role::Role;
use crate::service::{ServiceStatement, VerifiedService};
use crate::statement::{Statement, StatementChain};

type Read<'a> = Box<dyn Fn(&Jws) -> Result<(), Box<dyn Error>> + 'a>;

/// One parser, with a payload of version 1 that it accepts.
struct Reader<'a> {
    name: &'static str,
    typ: JwsType,
    signer: &'a SigningKey,
    payload: Value,
    read: Read<'a>,
}

impl<'a> Reader<'a> {
    fn new<T: serde::Serialize, V, E: Error + 'static>(
        name: &'static str,
        (typ, signer, payload): (JwsType, &'a SigningKey, &T),
        read: impl Fn(&Jws) -> Result<V, E> + 'a,
    ) -> Self {
        let read = move |jws: &Jws| read(jws).map(drop).map_err(Box::from);
        let payload = serde_json::to_value(payload).unwrap();
        Self { name, typ, signer, payload, read: Box::new(read) }
    }

    fn read(&self, payload: &Value) -> Result<(), Box<dyn Error>> {
        (self.read)(&Jws::sign(self.typ, self.signer, payload))
    }
}

fn order(world: &ClusterFixture) -> Order {
    Order {
        version: 1,
        id: Nonce::random(),
        cluster: world.statement.cluster,
        statement: world.chain().newest_hash(),
        change: OrderedChange::Remove { member: MemberId::new(7) },
        planned_at: None,
        issued_at: 1_000,
        expires_at: 1_900,
        reason: String::new(),
    }
}

fn recovery(world: &ClusterFixture) -> Recovery {
    let identity = |of: u8| NodeIdentity {
        cluster_id: format!("c{of}"),
        member_id: format!("a{of}"),
        incarnation: Incarnation([of; 16]),
    };
    Recovery {
        version: 1,
        cluster: world.statement.cluster,
        statement: world.chain().newest_hash(),
        agent: *world.agents[0].public(),
        was: identity(1),
        is: identity(2),
        last_index: 7,
        last_term: 2,
        at: 1_700_000_000,
    }
}

fn service(world: &ClusterFixture) -> ServiceStatement {
    ServiceStatement {
        version: 1,
        cluster: world.statement.cluster,
        sequence: 1,
        urls: vec!["https://a.example:8443".parse().unwrap()],
        pins: vec![world.chain().newest_hash()],
        issued_at: 1_700_000_000,
    }
}

fn readers(world: &ClusterFixture) -> Vec<Reader<'_>> {
    use JwsType::{Document, Grant, Record};
    let (chain, owner) = (world.chain(), &world.owner);
    let next = Statement { seq: 1, previous: Some(chain.newest_hash()), ..world.statement.clone() };
    let endorse = |record: &Jws| SignedRecord {
        record: record.clone(),
        endorsement: Jws::sign(
            JwsType::Endorsement,
            world.token.key(),
            &Endorsement {
                cluster: world.statement.cluster,
                grant: world.grant.id,
                record: record.hash(),
            },
        ),
    };
    let admin = Admin {
        key: *world.issuer.public(),
        name: "ian".parse().unwrap(),
        roles: vec![Role::Issuer],
    };
    let change = AdminChain::root(owner.public()).sign_next(owner, AdminOperation::Add(admin));
    let change: Value = change.claims_unverified(JwsType::Admin).unwrap();
    let document = world.document(1);
    let document = (Document, &world.service, &document);
    vec![
        Reader::new("the first statement", (JwsType::Statement, owner, &world.statement), |jws| {
            StatementChain::verify_links(std::slice::from_ref(jws))
        }),
        Reader::new("a later statement", (JwsType::Statement, owner, &next), |jws| {
            world.chain().append(jws).cloned()
        }),
        Reader::new("a grant", (Grant, &world.issuer, &world.grant), |jws| {
            VerifiedGrant::verify(jws, &world.chain())
        }),
        Reader::new("a record", (Record, &world.agents[0], &world.records[0]), move |jws| {
            let grant = world.verified_grant();
            VerifiedRecord::verify(&endorse(jws), &grant, &world.statement.permissions)
        }),
        Reader::new("a document", document, |jws| VerifiedDocument::verify(jws, &world.chain())),
        Reader::new("a document of the service", document, |jws| {
            VerifiedDocument::verify_received(jws, &world.chain(), &[*world.service.public()])
        }),
        Reader::new("an order", (JwsType::Order, owner, &order(world)), |jws| {
            VerifiedOrder::verify(jws, &world.chain())
        }),
        Reader::new("a recovery", (JwsType::Recovery, owner, &recovery(world)), |jws| {
            Recovery::verify(jws, &world.chain())
        }),
        Reader::new("a service statement", (JwsType::Service, owner, &service(world)), |jws| {
            VerifiedService::verify(jws, &world.chain())
        }),
        Reader::new("a change of the admins", (JwsType::Admin, owner, &change), |jws| {
            AdminChain::root(world.owner.public()).append(jws)
        }),
    ]
}

#[test]
fn a_payload_of_a_newer_version_is_refused_by_its_version_and_not_by_its_new_field() {
    let world = ClusterFixture::new(1);
    for reader in readers(&world) {
        let name = reader.name;
        let known = reader.typ.version().unwrap();
        let found = known + 1;
        assert!(reader.read(&reader.payload).is_ok(), "{name}");
        let newer = sign_newer_version(reader.typ, reader.signer, &reader.payload);
        let kept: Jws = newer.as_str().parse().unwrap();
        assert_eq!(kept, newer, "the bytes are kept");
        let refused = (reader.read)(&newer).expect_err(name);
        let versions = JwsError::Newer { found, known };
        assert_eq!(newer_version(&*refused), Some(&versions), "{name}: {refused}");
        let told = format!(
            "made by a newer Muster (version {found}); this program knows {known}: upgrade it"
        );
        assert!(refused.to_string().ends_with(&told), "{name}: {refused}");
        let known_members = Value::from_iter([("version", found)]);
        let refused = reader.read(&known_members).expect_err(name);
        assert_eq!(newer_version(&*refused), Some(&versions), "{name}: {refused}");
    }
}

#[test]
fn a_payload_with_an_invalid_version_is_not_of_a_newer_program() {
    let world = ClusterFixture::new(1);
    for reader in readers(&world) {
        let with = |name: &str, value: Value| {
            let mut payload = reader.payload.clone();
            payload[name] = value;
            payload
        };
        let mut without = reader.payload.clone();
        without.as_object_mut().unwrap().remove("version");
        let payloads = [
            without,
            with("version", json!(0)),
            with("version", json!("2")),
            with("version", json!(2.5)),
            with("version", json!(-1)),
            with("added_in_version_1", json!(2)),
        ];
        for payload in payloads {
            let refused = reader.read(&payload).expect_err(reader.name);
            assert_eq!(newer_version(&*refused), None, "{}: {refused}", reader.name);
        }
    }
}

#[test]
fn a_later_statement_is_of_a_newer_program_only_if_an_owner_signed_it() {
    let world = ClusterFixture::new(1);
    let next = Statement {
        seq: 1,
        previous: Some(world.chain().newest_hash()),
        ..world.statement.clone()
    };
    let newer = |signer| sign_newer_version(JwsType::Statement, signer, &next);
    let chain = world.chain();
    assert!(chain.is_continued_by(newer(&world.owner).as_str()));
    for stranger in [&world.issuer, &SigningKey::generate()] {
        let jws = newer(stranger);
        assert!(!chain.is_continued_by(jws.as_str()));
        let refused = chain.clone().append(&jws).unwrap_err();
        assert_eq!(newer_version(&refused), None, "{refused}");
    }
    let grant = sign_newer_version(JwsType::Grant, &world.owner, &world.grant);
    assert!(!chain.is_continued_by(grant.as_str()), "an owner's, and no statement");
    let mut long = serde_json::to_value(&next).unwrap();
    long["version"] = json!(2);
    long["more"] = json!("x".repeat(30_000));
    let long = Jws::sign(JwsType::Statement, &world.owner, &long);
    assert!(chain.is_continued_by(long.as_str()), "longer than statements are here");
    let refused = chain.clone().append_text(long.as_str()).unwrap_err();
    assert!(refused.exceeds_this_program(), "{refused}");
}

#[test]
fn a_newer_statement_of_another_cluster_or_position_continues_no_chain() {
    let world = ClusterFixture::new(1);
    let (chain, other) = (world.chain(), ClusterFixture::new(1));
    let next = Statement { seq: 1, previous: Some(chain.newest_hash()), ..world.statement.clone() };
    let elsewhere = Statement { cluster: other.statement.cluster, ..next.clone() };
    let again = Statement { previous: None, ..next };
    for statement in [elsewhere, again] {
        let newer = sign_newer_version(JwsType::Statement, &world.owner, &statement);
        assert!(!chain.is_continued_by(newer.as_str()), "{statement:?}");
    }
}

#[test]
fn a_newer_grant_needs_an_issuers_signature_and_a_newer_record_its_tokens() {
    let world = ClusterFixture::new(1);
    let stranger = SigningKey::generate();
    for reader in readers(&world) {
        if !["a grant", "a record"].contains(&reader.name) {
            continue;
        }
        let newer = sign_newer_version(reader.typ, &stranger, &reader.payload);
        let refused = (reader.read)(&newer);
        // A stranger has signed the payload. For a grant that proves nothing. The record still has
        // an endorsement by its token, as the reader for records endorses each payload.
        let is_newer = refused.is_err_and(|refused| newer_version(&*refused).is_some());
        assert_eq!(is_newer, reader.name == "a record", "{}", reader.name);
    }
    let record = sign_newer_version(JwsType::Record, &stranger, &world.records[0]);
    let endorsement = world.signed(0).endorsement;
    let signed = SignedRecord { record, endorsement };
    let (grant, permissions) = (world.verified_grant(), &world.statement.permissions);
    let refused = VerifiedRecord::verify(&signed, &grant, permissions).unwrap_err();
    assert_eq!(newer_version(&refused), None, "{refused}");
}
