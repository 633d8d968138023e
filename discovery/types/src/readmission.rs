//! Readmissions: an added member shows a service that was restored from a backup how it joined.
//!
//! The backup can be older than the join. The restored service then knows neither the member's
//! ticket nor its agent's key. The member has three proofs, which only together show that this agent
//! is a member's:
//!
//! - the ticket's grant, signed by an operator, and the record that the ticket's token endorsed;
//! - the member's certificate, which the cluster's CA issued for the node key in that record. A
//!   ticket's token can endorse a second record, so the token alone proves nothing after the join;
//! - a signature by the node key over the agent's key, since certificates are public.
//!
//! Whether that member still is one, its cluster says.

use data_encoding::BASE64URL_NOPAD;
use rcgen::{PublicKeyData, SigningKey as _};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::digest::MemberId;
use crate::grant::{GrantError, TokenKind, VerifiedGrant};
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::PublicKey;
use crate::leaves::{LeafError, verify_leaf};
use crate::record::{RecordError, VerifiedRecord};
use crate::redeem::Redeem;
use crate::statement::StatementChain;

/// Start of the text that the node key signs, so that no other signature of that key fits.
const SIGNED_PREFIX: &str = "muster readmission 1";

/// Body of `POST /v1/clusters/{id}/readmit`: how a member joined, for a service that has lost it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReadmitRequest {
    /// Grant of the join ticket.
    pub ticket: Jws,
    /// Redeem envelope with the member's record, signed by its agent.
    pub redeem: Jws,
    /// The member's peer certificate, as a PEM chain with the leaf first. It may have expired.
    pub certificate: String,
    /// ECDSA signature (P-256, SHA-256, in DER) by the node key over cluster and agent key, as
    /// base64url.
    pub signature: String,
}

/// A readmission whose signatures are all valid.
#[derive(Clone, Debug)]
pub struct VerifiedReadmission {
    /// Grant of the join ticket.
    pub ticket: VerifiedGrant,
    /// The record, which the ticket's token endorsed.
    pub record: VerifiedRecord,
    /// Id of the member in its Raft cluster, from its certificate.
    pub member: MemberId,
}

/// Reason why a readmission is refused.
#[derive(Debug, thiserror::Error)]
pub enum ReadmissionError {
    /// The grant isn't valid.
    #[error("the ticket: {0}")]
    Grant(#[from] GrantError),
    /// The grant is of another kind of token.
    #[error("the ticket is none for a running cluster")]
    NoTicket,
    /// The redeem envelope isn't signed by the caller's key.
    #[error("the redeem: {0}")]
    Redeem(#[from] JwsError),
    /// The record isn't valid, or isn't the caller's.
    #[error("the record: {0}")]
    Record(#[from] RecordError),
    /// The record or the redeem names another cluster or agent.
    #[error("the record is of another cluster or agent")]
    OtherRecord,
    /// The certificate isn't one of the cluster's CA for the record's node key.
    #[error("{0}")]
    Leaf(#[from] LeafError),
    /// The certificate names no member of this cluster that was added by a ticket.
    #[error("the peer certificate names no added member of the cluster")]
    NoMember,
    /// The signature by the node key isn't valid.
    #[error("the signature by the node key is wrong")]
    Signature,
}

/// Returns the text that the node key signs.
fn signed_text(cluster: Uuid, agent: &PublicKey) -> Vec<u8> {
    format!("{SIGNED_PREFIX}\n{cluster}\n{agent}\n").into_bytes()
}

/// Signs that the node with this key (PEM PKCS#8) belongs to `agent`'s member. Returns `None` if the
/// text holds no P-256 key.
pub fn sign_as_node(node_key: &str, cluster: Uuid, agent: &PublicKey) -> Option<String> {
    let algorithm = &rcgen::PKCS_ECDSA_P256_SHA256;
    let pair = rcgen::KeyPair::from_pkcs8_pem_and_sign_algo(node_key, algorithm).ok()?;
    let signature = pair.sign(&signed_text(cluster, agent)).ok()?;
    Some(BASE64URL_NOPAD.encode(&signature))
}

impl ReadmitRequest {
    /// Verifies all proofs of the agent with the key `agent`, which the TLS connection proves. Times
    /// are not checked: they were when the ticket was redeemed.
    pub fn verify(
        &self,
        agent: &PublicKey,
        chain: &StatementChain,
    ) -> Result<VerifiedReadmission, ReadmissionError> {
        let newest = chain.newest();
        let ticket = VerifiedGrant::verify_kept(&self.ticket, chain)?;
        if ticket.kind != TokenKind::Join {
            return Err(ReadmissionError::NoTicket);
        }
        let redeem: Redeem = self.redeem.verify(JwsType::Redeem, agent)?;
        let record = VerifiedRecord::verify(&redeem.signed, &ticket, &newest.permissions)?;
        let is_own = record.agent_key == *agent && record.cluster == newest.cluster;
        if !is_own || redeem.cluster != newest.cluster {
            return Err(ReadmissionError::OtherRecord);
        }
        verify_leaf("peer", &self.certificate, record.node_key(), &newest.peer_ca)?;
        let member = certified_member(&self.certificate, newest.cluster);
        let member = member.ok_or(ReadmissionError::NoMember)?;
        let signature = BASE64URL_NOPAD.decode(self.signature.as_bytes());
        let signature = signature.map_err(|_| ReadmissionError::Signature)?;
        let node = record.csr.verify().map_err(|_| ReadmissionError::Signature)?.public_key;
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, node.der_bytes())
            .verify(&signed_text(newest.cluster, agent), &signature)
            .map_err(|_| ReadmissionError::Signature)?;
        Ok(VerifiedReadmission { ticket, record, member })
    }
}

/// Returns the id in the SPIFFE name of an added member's certificate. A founder's certificate has
/// the number of its seat there.
fn certified_member(pem: &str, cluster: Uuid) -> Option<MemberId> {
    let leaf = CertificateDer::from_pem_slice(pem.as_bytes()).ok()?;
    let (_, parsed) = X509Certificate::from_der(&leaf).ok()?;
    let names = parsed.subject_alternative_name().ok()??;
    let uris = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    let [uri] = uris.collect::<Vec<_>>()[..] else { return None };
    let (domain, path) = uri.strip_prefix("spiffe://")?.split_once('/')?;
    let id = path.strip_prefix(&format!("cluster/{cluster}/member/"))?;
    let number = u64::from_str_radix(id, 16).ok()?;
    (!domain.is_empty() && id.len() == 16).then_some(MemberId::new(number))
}
