//! Proof that an agent belongs to a member of a running cluster.
//!
//! The proof has two parts. One is the member's certificate, which the cluster's CA issued for a
//! node key. The other one is a signature by that node key over the agent's key. Certificates are
//! public, so neither part proves anything alone. The proof doesn't show whether the member was
//! removed since; only the cluster itself knows that.

use data_encoding::BASE64URL_NOPAD;
use rcgen::SigningKey as _;
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::digest::{Digest, MemberId};
use crate::key::PublicKey;
use crate::leaves::{LeafError, verify_leaf};
use crate::statement::Statement;

/// Start of the text that the node key signs. It distinguishes this signature from all other
/// signatures of the key.
const SIGNED_PREFIX: &str = "muster readmission 1";

/// Certificate of a member, and the signature by which its node key names its agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemberProof {
    /// The member's peer certificate, as a PEM chain with the leaf first. It may have expired.
    pub certificate: String,
    /// ECDSA signature (P-256, SHA-256, in DER) by the node key over cluster and agent key, as
    /// base64url.
    pub signature: String,
}

/// Member that a certificate names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CertifiedMember {
    /// A founder, by the number of its seat.
    Founder(u8),
    /// A member that was added later, by its id in the Raft cluster.
    Added(MemberId),
}

/// Facts that a valid proof shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProvenMember {
    /// Member that the certificate names.
    pub member: CertifiedMember,
    /// SHA-256 of the node key's SubjectPublicKeyInfo.
    pub node_key: Digest,
}

/// Reason why a proof is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemberProofError {
    /// The certificate can't be parsed, or none of the cluster's CAs signed it.
    #[error("{0}")]
    Leaf(#[from] LeafError),
    /// The certificate names no member of this cluster.
    #[error("the peer certificate names no such member of the cluster")]
    NoMember,
    /// The signature by the node key isn't valid.
    #[error("the signature by the node key is wrong")]
    Signature,
}

/// Returns the text that the node key signs.
fn signed_text(cluster: Uuid, agent: &PublicKey) -> Vec<u8> {
    format!("{SIGNED_PREFIX}\n{cluster}\n{agent}\n").into_bytes()
}

/// Signs that the node with this key (PEM PKCS#8) belongs to `agent`'s member. Returns `None` if
/// the text holds no P-256 key.
pub fn sign_as_node(node_key: &str, cluster: Uuid, agent: &PublicKey) -> Option<String> {
    let algorithm = &rcgen::PKCS_ECDSA_P256_SHA256;
    let pair = rcgen::KeyPair::from_pkcs8_pem_and_sign_algo(node_key, algorithm).ok()?;
    let signature = pair.sign(&signed_text(cluster, agent)).ok()?;
    Some(BASE64URL_NOPAD.encode(&signature))
}

impl MemberProof {
    /// Verifies that the agent with the key `agent` belongs to a member of the cluster with this
    /// newest statement.
    pub fn verify(
        &self,
        agent: &PublicKey,
        statement: &Statement,
    ) -> Result<ProvenMember, MemberProofError> {
        self.verify_by_cas(agent, statement.cluster, statement.peer_cas())
    }

    /// Verifies that the agent with the key `agent` belongs to a member of `cluster`, whose
    /// certificate one of the peers' CAs (PEM) has signed.
    pub fn verify_by_cas<'a>(
        &self,
        agent: &PublicKey,
        cluster: Uuid,
        peer_cas: impl Iterator<Item = &'a str>,
    ) -> Result<ProvenMember, MemberProofError> {
        let malformed = || MemberProofError::Leaf(LeafError::Malformed("peer"));
        let leaf = CertificateDer::from_pem_slice(self.certificate.as_bytes());
        let leaf = leaf.map_err(|_| malformed())?;
        let (_, parsed) = X509Certificate::from_der(&leaf).map_err(|_| malformed())?;
        let key = &parsed.tbs_certificate.subject_pki;
        let node_key = Digest::of(key.raw);
        verify_leaf("peer", &self.certificate, &node_key, peer_cas)?;
        let member = certified_member(&parsed, cluster).ok_or(MemberProofError::NoMember)?;
        let signature = BASE64URL_NOPAD.decode(self.signature.as_bytes());
        let signature = signature.map_err(|_| MemberProofError::Signature)?;
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &key.subject_public_key.data)
            .verify(&signed_text(cluster, agent), &signature)
            .map_err(|_| MemberProofError::Signature)?;
        Ok(ProvenMember { member, node_key })
    }
}

/// Returns the member in the SPIFFE name of a certificate: the number of a founder's seat, or the
/// id of an added member.
fn certified_member(certificate: &X509Certificate<'_>, cluster: Uuid) -> Option<CertifiedMember> {
    let names = certificate.subject_alternative_name().ok()??;
    let uris = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    let [uri] = uris.collect::<Vec<_>>()[..] else { return None };
    let (domain, path) = uri.strip_prefix("spiffe://")?.split_once('/')?;
    let id = path.strip_prefix(&format!("cluster/{cluster}/member/"))?;
    if domain.is_empty() {
        return None;
    }
    match id.len() {
        16 => Some(CertifiedMember::Added(MemberId::new(u64::from_str_radix(id, 16).ok()?))),
        _ => id.parse().ok().map(CertifiedMember::Founder),
    }
}
