//! One seat: who sits there, with which keys, at which addresses.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::csr::{Csr, CsrError};
use crate::digest::{Digest, Incarnation};
use crate::grant::{GrantId, VerifiedGrant};
use crate::jws::{Jws, JwsError, Typ};
use crate::key::{KeyId, PublicKey, SigningKey};
use crate::machine::MachineFacts;
use crate::name::Name;
use crate::statement::Permissions;
use crate::url::{Host, LOWEST_OPEN_PORT, NodeUrl};

/// Most peer URLs, and most client URLs, of one seat.
pub const MAX_SEAT_URLS: usize = 3;

/// Payload of a record; a JWS by the agent's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// 1.
    pub version: u32,
    /// The cluster that it is for.
    pub cluster: Uuid,
    /// The grant that it is redeemed under.
    pub grant: GrantId,
    /// The agent's key.
    pub agent_key: PublicKey,
    /// This life of the member.
    pub incarnation: Incarnation,
    /// The member's name.
    pub name: Name,
    /// Where peers reach its node.
    pub peer_urls: Vec<NodeUrl>,
    /// Where clients reach its node.
    pub client_urls: Vec<NodeUrl>,
    /// Signing request of the node's key: it carries the key.
    pub csr: Csr,
    /// The machine that it runs on.
    pub machine: MachineFacts,
    /// Where that machine stands, if anybody said so.
    pub zone: Option<Name>,
}

/// Payload of an endorsement; a JWS by the token's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Endorsement {
    /// The cluster.
    pub cluster: Uuid,
    /// The grant.
    pub grant: GrantId,
    /// Hash of the record's JWS.
    pub record: Digest,
}

/// A record with the token's word for it. What stands in a proposal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignedRecord {
    /// The record, by the agent's key.
    pub record: Jws,
    /// Its endorsement, by the token's key.
    pub endorsement: Jws,
}

/// Why a record is refused. The first three are a forgery or a bug, the others a host's settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Signature, kind or form of the record.
    #[error("the record: {0}")]
    Record(JwsError),
    /// Signature, kind or form of the endorsement.
    #[error("the token's endorsement: {0}")]
    Endorsement(JwsError),
    /// Record, endorsement and grant don't belong together.
    #[error("record, endorsement and grant don't belong together: {0}")]
    Mismatch(&'static str),
    /// The node's signing request.
    #[error("the node's key: {0}")]
    Csr(#[from] CsrError),
    /// No peer or client URL, too many, or one twice.
    #[error("a seat needs 1 to {MAX_SEAT_URLS} peer URLs and as many client URLs, none twice")]
    Urls,
    /// A loopback address.
    #[error(
        "{0} is a loopback address, which other machines can't reach: give the agent another \
         address, or create the cluster with --allow-loopback"
    )]
    Loopback(NodeUrl),
    /// A port below 1024.
    #[error(
        "{0} has a port below {LOWEST_OPEN_PORT}: use a higher one, or create the cluster with \
         --allow-low-ports"
    )]
    LowPort(NodeUrl),
    /// The grant is bound to another name.
    #[error("the token is for the member `{expected}`, this one calls itself `{found}`")]
    OtherName {
        /// The grant's.
        expected: Name,
        /// The record's.
        found: Name,
    },
    /// The grant is bound to another zone.
    #[error("the token is for the zone `{0}`, where this member isn't")]
    OtherZone(Name),
    /// The grant is bound to other addresses.
    #[error(
        "the token is for members in {blocks}, and {url} is not there: a token's --cidr has to hold \
         the members' own addresses as well as those that discovery sees them come from"
    )]
    OtherAddress {
        /// The record's.
        url: NodeUrl,
        /// The grant's.
        blocks: String,
    },
    /// A machine fact that is empty, too long or not printable.
    #[error("a machine fact is empty, too long, or has other than printable characters")]
    Machine,
}

/// A record that its agent and its token signed, under a verified grant.
#[derive(Clone, Debug)]
pub struct VerifiedRecord {
    signed: SignedRecord,
    record: Record,
    node_key: Digest,
    hash: Digest,
}

impl Record {
    /// Signs it by the agent's key and by the token's.
    pub fn sign(&self, agent: &SigningKey, token: &SigningKey) -> SignedRecord {
        let record = Jws::sign(Typ::Record, agent, self);
        let endorsement =
            Endorsement { cluster: self.cluster, grant: self.grant, record: record.hash() };
        let endorsement = Jws::sign(Typ::Endorsement, token, &endorsement);
        SignedRecord { record, endorsement }
    }

    /// Checks what a host's settings can get wrong, without any signature: an agent does so
    /// before it signs.
    pub fn check(&self, permissions: &Permissions) -> Result<(), RecordError> {
        for urls in [&self.peer_urls, &self.client_urls] {
            let twice = (1..urls.len()).any(|i| urls[..i].contains(&urls[i]));
            if !(1..=MAX_SEAT_URLS).contains(&urls.len()) || twice {
                return Err(RecordError::Urls);
            }
        }
        if self.peer_urls.iter().any(|url| self.client_urls.contains(url)) {
            return Err(RecordError::Urls);
        }
        check_urls(self.peer_urls.iter().chain(&self.client_urls), permissions)?;
        if self.machine.is_sane() { Ok(()) } else { Err(RecordError::Machine) }
    }
}

impl VerifiedRecord {
    /// Verifies a record and its endorsement under its grant and the newest statement's
    /// permissions. Whether the grant has expired is not looked at.
    pub fn verify(
        signed: &SignedRecord,
        grant: &VerifiedGrant,
        permissions: &Permissions,
    ) -> Result<Self, RecordError> {
        let claimed: Record =
            signed.record.claims_unverified(Typ::Record).map_err(RecordError::Record)?;
        let record: Record =
            signed.record.verify(Typ::Record, &claimed.agent_key).map_err(RecordError::Record)?;
        let endorsement: Endorsement = signed
            .endorsement
            .verify(Typ::Endorsement, &grant.key)
            .map_err(RecordError::Endorsement)?;
        let hash = signed.record.hash();
        let same = [
            (record.version == 1, "made by a newer version of Muster"),
            (record.cluster == grant.cluster, "the record is of another cluster"),
            (record.grant == grant.id, "the record is of another grant"),
            (endorsement.cluster == grant.cluster, "the endorsement is of another cluster"),
            (endorsement.grant == grant.id, "the endorsement is of another grant"),
            (endorsement.record == hash, "the endorsement is of another record"),
            (record.agent_key != grant.key, "an agent's key can't be the token's"),
        ];
        if let Some((_, what)) = same.into_iter().find(|(same, _)| !same) {
            return Err(RecordError::Mismatch(what));
        }
        record.check(permissions)?;
        check_bindings(&record, grant)?;
        let node_key = record.csr.verify()?.node_key;
        Ok(Self { signed: signed.clone(), record, node_key, hash })
    }

    /// The signed form, as received.
    pub fn signed(&self) -> &SignedRecord {
        &self.signed
    }

    /// SHA-256 of the SubjectPublicKeyInfo of the node's key.
    pub fn node_key(&self) -> &Digest {
        &self.node_key
    }

    /// Hash of the record's JWS.
    pub fn hash(&self) -> Digest {
        self.hash
    }

    /// The agent's key id.
    pub fn agent_id(&self) -> KeyId {
        self.record.agent_key.key_id()
    }
}

impl std::ops::Deref for VerifiedRecord {
    type Target = Record;

    fn deref(&self) -> &Record {
        &self.record
    }
}

/// Whether a statement allows these addresses.
pub(crate) fn check_urls<'u>(
    urls: impl IntoIterator<Item = &'u NodeUrl>,
    permissions: &Permissions,
) -> Result<(), RecordError> {
    for url in urls {
        if url.is_loopback() && !permissions.loopback {
            return Err(RecordError::Loopback(url.clone()));
        }
        if url.port() < LOWEST_OPEN_PORT && !permissions.low_ports {
            return Err(RecordError::LowPort(url.clone()));
        }
    }
    Ok(())
}

fn check_bindings(record: &Record, grant: &VerifiedGrant) -> Result<(), RecordError> {
    match &grant.name {
        Some(expected) if *expected != record.name => {
            let (expected, found) = (expected.clone(), record.name.clone());
            return Err(RecordError::OtherName { expected, found });
        }
        _ => {}
    }
    // A DNS name is for those to check who resolve it.
    let outside = |url: &&NodeUrl| match url.host() {
        Host::Address(address) => !grant.cidrs.iter().any(|block| block.contains(address)),
        Host::Dns(_) => false,
    };
    if !grant.cidrs.is_empty()
        && let Some(url) = record.peer_urls.iter().find(outside)
    {
        let blocks: Vec<String> = grant.cidrs.iter().map(ToString::to_string).collect();
        return Err(RecordError::OtherAddress { url: url.clone(), blocks: blocks.join(", ") });
    }
    match &grant.zone {
        Some(zone) if record.zone.as_ref() != Some(zone) => {
            Err(RecordError::OtherZone(zone.clone()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
