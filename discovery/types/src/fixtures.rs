//! Test fixtures for this crate and the crates that use it: an owner, a cluster, a token, and
//! agents with records.

#![allow(missing_docs, clippy::unwrap_used, reason = "for tests; a failed step fails the test")]

use uuid::Uuid;

use crate::admin::Admin;
use crate::csr::{Csr, NodeKey};
use crate::digest::Incarnation;
use crate::document::Document;
use crate::grant::{Grant, ReplacementLimits, TokenKind, VerifiedGrant};
use crate::jws::{Jws, JwsType};
use crate::key::SigningKey;
use crate::leaves::Leaves;
use crate::machine::MachineFacts;
use crate::member_proof::{MemberProof, sign_as_node};
use crate::proposal::{Ack, Proposal};
use crate::record::{Record, SignedRecord};
use crate::role::Role;
use crate::statement::{CaPair, Permissions, Statement, StatementChain};
use crate::token::Token;

pub struct TestCa {
    pub issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
    pub pem: String,
}

impl TestCa {
    pub fn new(name: &str) -> Self {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: rcgen::Issuer::new(params, key), pem }
    }

    pub fn issue(&self, csr: &Csr) -> String {
        self.issue_as(csr, rcgen::CertificateParams::default())
    }

    /// Issues a certificate for `host`, which is an address or a name.
    pub fn issue_for(&self, csr: &Csr, host: &str) -> String {
        self.issue_as(csr, rcgen::CertificateParams::new(vec![host.to_owned()]).unwrap())
    }

    /// Issues a certificate that lasts until the first day of `year`.
    pub fn issue_until(&self, csr: &Csr, year: i32) -> String {
        let mut params = rcgen::CertificateParams::default();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        self.issue_as(csr, params)
    }

    fn issue_as(&self, csr: &Csr, params: rcgen::CertificateParams) -> String {
        let key = csr.verify().unwrap().public_key;
        params.signed_by(&key, &self.issuer).unwrap().pem()
    }
}

pub struct ClusterFixture {
    pub owner: SigningKey,
    pub issuer: SigningKey,
    pub service: SigningKey,
    pub peer_ca: TestCa,
    pub client_ca: TestCa,
    pub statement: Statement,
    pub token: Token,
    pub grant: Grant,
    pub agents: Vec<SigningKey>,
    pub node_keys: Vec<NodeKey>,
    pub records: Vec<Record>,
}

impl ClusterFixture {
    pub fn new(size: u8) -> Self {
        let (owner, issuer) = (SigningKey::generate(), SigningKey::generate());
        let (peer_ca, client_ca) = (TestCa::new("peers"), TestCa::new("clients"));
        let admin = |key: &SigningKey, name: &str, role| Admin {
            key: *key.public(),
            name: name.parse().unwrap(),
            roles: vec![role],
        };
        let statement = Statement {
            version: 1,
            cluster: Uuid::now_v7(),
            name: "demo".parse().unwrap(),
            size,
            seq: 0,
            previous: None,
            peer_ca: peer_ca.pem.clone(),
            client_ca: client_ca.pem.clone(),
            admins: vec![admin(&owner, "ada", Role::Owner), admin(&issuer, "ian", Role::Issuer)],
            permissions: Permissions { even_size: true, ..Default::default() },
            deadline_seconds: 3600,
            spread: None,
            needs_approval: false,
            also_trusted: None,
            adopted: None,
        };
        let token = Token::generate(TokenKind::Boot);
        let grant = Grant {
            version: 1,
            id: token.id(),
            kind: TokenKind::Boot,
            key: *token.public(),
            cluster: statement.cluster,
            statement: statement.sign(&owner).hash(),
            uses: size,
            issued_at: 1_000,
            expires_at: 4_600,
            cidrs: Vec::new(),
            name: None,
            zone: None,
            replaces: None,
            replacement: None,
            require: Vec::new(),
        };
        let agents: Vec<_> = (0..size).map(|_| SigningKey::generate()).collect();
        let node_keys: Vec<_> = (0..size).map(|_| NodeKey::generate()).collect();
        let keys = agents.iter().zip(&node_keys).zip(1..);
        let records = keys.map(|((key, node), i)| record(&grant, key, node, i)).collect();
        let service = SigningKey::generate();
        Self {
            owner,
            issuer,
            service,
            peer_ca,
            client_ca,
            statement,
            token,
            grant,
            agents,
            node_keys,
            records,
        }
    }

    pub fn chain(&self) -> StatementChain {
        let first = self.statement.sign(&self.owner);
        StatementChain::verify_from_owners(&[first], &[*self.owner.public()]).unwrap()
    }

    /// Appends a statement to the chain. In it the CAs `issuing` issue certificates, and the CAs
    /// `other` are trusted in addition.
    pub fn append_cas(&self, chain: &mut StatementChain, issuing: &CaPair, other: Option<&CaPair>) {
        let next = Statement {
            seq: chain.newest().seq + 1,
            previous: Some(chain.newest_hash()),
            peer_ca: issuing.peer.clone(),
            client_ca: issuing.client.clone(),
            also_trusted: other.cloned(),
            ..self.statement.clone()
        };
        let next = Statement { version: next.format_version(), ..next };
        chain.append(&next.sign(&self.owner)).unwrap();
    }

    pub fn verified_grant(&self) -> VerifiedGrant {
        VerifiedGrant::verify(&self.grant.sign(&self.issuer), &self.chain()).unwrap()
    }

    pub fn signed(&self, i: usize) -> SignedRecord {
        self.records[i].sign(&self.agents[i], self.token.key())
    }

    pub fn proposal(&self, epoch: u64) -> Proposal {
        Proposal {
            cluster: self.statement.cluster,
            statement: self.chain().newest_hash(),
            epoch,
            seats: (0..self.records.len()).map(|i| self.signed(i)).collect(),
            grants: vec![self.grant.sign(&self.issuer)],
        }
    }

    pub fn acks(&self, proposal: &Proposal) -> Vec<Jws> {
        let (cluster, epoch, h) = (proposal.cluster, proposal.epoch, proposal.hash());
        self.agents.iter().map(|agent| Ack { cluster, epoch, h }.sign(agent)).collect()
    }

    pub fn document(&self, epoch: u64) -> Document {
        let proposal = self.proposal(epoch);
        Document { version: 1, acks: self.acks(&proposal), proposal }
    }

    pub fn leaves(&self, i: usize) -> Leaves {
        let Record { csr, peer_urls, .. } = &self.records[i];
        let host = peer_urls[0].host().to_string();
        Leaves {
            peer: self.peer_ca.issue_for(csr, &host),
            client: self.client_ca.issue_for(csr, &host),
        }
    }

    /// Returns the proof that the agent of member `i` belongs to that member, which is the founder
    /// in seat `i + 1`.
    pub fn member_proof(&self, i: usize) -> MemberProof {
        self.member_proof_with(i, rcgen::CertificateParams::default())
    }

    /// Returns the proof that the agent of member `i` belongs to that member. The member's
    /// certificate lasts until the first day of `year`.
    pub fn member_proof_until(&self, i: usize, year: i32) -> MemberProof {
        let mut params = rcgen::CertificateParams::default();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        self.member_proof_with(i, params)
    }

    fn member_proof_with(&self, i: usize, mut params: rcgen::CertificateParams) -> MemberProof {
        let cluster = self.statement.cluster;
        let uri = format!("spiffe://muster/cluster/{cluster}/member/{}", i + 1);
        params.subject_alt_names = vec![rcgen::SanType::URI(uri.try_into().unwrap())];
        let certificate = self.peer_ca.issue_as(&self.records[i].csr, params);
        let key = &self.node_keys[i].key_pem;
        let signature = sign_as_node(key, cluster, self.agents[i].public()).unwrap();
        MemberProof { certificate, signature }
    }

    /// Issues certificates to member `i` that last until the first day of `year`.
    pub fn leaves_until(&self, i: usize, year: i32) -> Leaves {
        let csr = &self.records[i].csr;
        let (peer, client) = (&self.peer_ca, &self.client_ca);
        Leaves { peer: peer.issue_until(csr, year), client: client.issue_until(csr, year) }
    }
}

fn record(grant: &Grant, key: &SigningKey, node_key: &NodeKey, i: u8) -> Record {
    Record {
        version: 1,
        cluster: grant.cluster,
        grant: grant.id,
        agent_key: *key.public(),
        incarnation: Incarnation::random(),
        name: format!("db-{i}").parse().unwrap(),
        peer_urls: vec![format!("https://10.0.0.{i}:2380").parse().unwrap()],
        client_urls: vec![format!("https://10.0.0.{i}:2379").parse().unwrap()],
        csr: node_key.csr.clone(),
        machine: MachineFacts { dmi_uuid: Some(format!("machine-{i}")), machine_id: None },
        zone: None,
    }
}

/// Signs `payload` as a newer program could: with the next version, and with an additional field.
pub fn sign_newer_version<T: serde::Serialize>(typ: JwsType, key: &SigningKey, payload: &T) -> Jws {
    let mut newer = serde_json::to_value(payload).unwrap();
    let known = typ.version().expect("payloads of this kind have a version");
    newer["version"] = (known + 1).into();
    newer["added_in_that_version"] = "anything".into();
    Jws::sign(typ, key, &newer)
}

/// Returns a fixture with one agent and a join ticket. Only the owner may sign the ticket's grant.
pub fn join_fixture() -> ClusterFixture {
    fixture_with_token(Token::generate(TokenKind::Join), 900)
}

/// Returns a cluster of one host, with the token of a replacement policy.
pub fn policy_fixture() -> ClusterFixture {
    let mut world = fixture_with_token(Token::generate(TokenKind::Heal), 86_400);
    world.grant.replacement =
        Some(ReplacementLimits { after_seconds: 600, at_most: 3, per_seconds: 86_400 });
    world
}

fn fixture_with_token(token: Token, seconds: u64) -> ClusterFixture {
    let mut world = ClusterFixture::new(1);
    world.grant.id = token.id();
    world.grant.version = token.kind().grant_version();
    world.grant.kind = token.kind();
    world.grant.key = *token.public();
    world.grant.expires_at = world.grant.issued_at + seconds;
    world.records[0].grant = token.id();
    world.token = token;
    world
}
