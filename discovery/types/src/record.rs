//! The record of one seat: its agent, its keys and its addresses.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::csr::{Csr, CsrError};
use crate::digest::{Digest, Incarnation};
use crate::grant::{GrantId, VerifiedGrant};
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::{KeyId, PublicKey, SigningKey};
use crate::machine::MachineFacts;
use crate::name::Name;
use crate::statement::{Permissions, Statement};
use crate::url::{LOWEST_OPEN_PORT, NodeUrl, UrlHost};

/// Largest number of peer URLs of one seat, and also of client URLs.
pub const MAX_SEAT_URLS: usize = 3;

/// Payload of a record, which is a JWS by the agent's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Version of the format, always 1.
    pub version: u32,
    /// Cluster that the record is for.
    pub cluster: Uuid,
    /// Grant whose token the agent redeems with this record.
    pub grant: GrantId,
    /// Public key of the agent.
    pub agent_key: PublicKey,
    /// Incarnation of the member.
    pub incarnation: Incarnation,
    /// Name of the member.
    pub name: Name,
    /// URLs at which peers reach the member's node.
    pub peer_urls: Vec<NodeUrl>,
    /// URLs at which clients reach the member's node.
    pub client_urls: Vec<NodeUrl>,
    /// Signing request for the node's key. It contains the public key.
    pub csr: Csr,
    /// Machine that the agent runs on.
    pub machine: MachineFacts,
    /// Zone of the machine, if it is known.
    pub zone: Option<Name>,
}

/// Payload of an endorsement, which is a JWS by the token's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Endorsement {
    /// Cluster of the record.
    pub cluster: Uuid,
    /// Grant of the token.
    pub grant: GrantId,
    /// Hash of the record's JWS.
    pub record: Digest,
}

/// A record together with the token's endorsement, as proposals contain it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignedRecord {
    /// Record, signed by the agent's key.
    pub record: Jws,
    /// Endorsement of the record, signed by the token's key.
    pub endorsement: Jws,
}

/// Reason why a record is refused. `Record`, `Endorsement` and `Mismatch` come from a forgery or a
/// bug; the others come from a host's settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The signature, kind or form of the record is wrong.
    #[error("the record: {0}")]
    Record(#[source] JwsError),
    /// The signature, kind or form of the endorsement is wrong.
    #[error("the token's endorsement: {0}")]
    Endorsement(#[source] JwsError),
    /// Record, endorsement and grant don't belong together.
    #[error("record, endorsement and grant don't belong together: {0}")]
    Mismatch(&'static str),
    /// The signing request of the node's key isn't valid.
    #[error("the node's key: {0}")]
    Csr(#[from] CsrError),
    /// The record has no peer URL or no client URL, too many of either, or one URL twice.
    #[error("a seat needs 1 to {MAX_SEAT_URLS} peer URLs and as many client URLs, none twice")]
    Urls,
    /// The URL has a loopback address, which the statement doesn't allow.
    #[error(
        "{0} is a loopback address, which other machines can't reach: give the agent another \
         address, or create the cluster with --allow-loopback"
    )]
    Loopback(NodeUrl),
    /// The URL has a port below 1024, which the statement doesn't allow.
    #[error(
        "{0} has a port below {LOWEST_OPEN_PORT}: use a higher one, or create the cluster with \
         --allow-low-ports"
    )]
    LowPort(NodeUrl),
    /// The grant is bound to another name.
    #[error("the token is for the member `{expected}`, this one calls itself `{found}`")]
    OtherName {
        /// Name that the grant is bound to.
        expected: Name,
        /// Name in the record.
        found: Name,
    },
    /// The grant is bound to another zone.
    #[error("the token is for the zone `{0}`, where this member isn't")]
    OtherZone(Name),
    /// A peer URL is outside of the address blocks that the grant is bound to.
    #[error(
        "the token is for members in {blocks}, and {url} is not there: a token's --cidr has to hold \
         the members' own addresses as well as those that discovery sees them come from"
    )]
    OtherAddress {
        /// URL in the record that is outside of the grant's address blocks.
        url: NodeUrl,
        /// Address blocks that the grant is bound to.
        blocks: String,
    },
    /// No member of the adopted etcd cluster has the record's name and URLs.
    #[error(
        "`{0}` with these URLs is no member of the etcd cluster that the owner signed: the name has to \
         be the signed one, and the URLs those that the cluster lists"
    )]
    NotAdopted(Name),
    /// A machine fact is empty, too long or not printable.
    #[error("a machine fact is empty, too long, or has other than printable characters")]
    Machine,
}

/// A record with verified signatures of its agent and its token, under a verified grant.
#[derive(Clone, Debug)]
pub struct VerifiedRecord {
    signed: SignedRecord,
    record: Record,
    node_key: Digest,
    hash: Digest,
}

impl Record {
    /// Signs the record with the agent's key, and endorses it with the token's key.
    pub fn sign(&self, agent: &SigningKey, token: &SigningKey) -> SignedRecord {
        let record = Jws::sign(JwsType::Record, agent, self);
        let endorsement =
            Endorsement { cluster: self.cluster, grant: self.grant, record: record.hash() };
        let endorsement = Jws::sign(JwsType::Endorsement, token, &endorsement);
        SignedRecord { record, endorsement }
    }

    /// Checks the values that a host's settings determine, but no signature. An agent calls it
    /// before it signs the record.
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
    /// Verifies a record and its endorsement, under the record's grant and the newest statement's
    /// permissions. The grant's times are not checked.
    pub fn verify(
        signed: &SignedRecord,
        grant: &VerifiedGrant,
        permissions: &Permissions,
    ) -> Result<Self, RecordError> {
        let claimed: Record = match signed.record.claims_unverified(JwsType::Record) {
            // The record's payload can't be read, so the agent's key isn't known. Only the token's
            // endorsement can prove that a newer program made the record.
            Err(newer @ JwsError::Newer { .. }) => {
                let endorsement: Endorsement = signed
                    .endorsement
                    .verify(JwsType::Endorsement, &grant.key)
                    .map_err(RecordError::Endorsement)?;
                if endorsement.record != signed.record.hash() {
                    return Err(RecordError::Mismatch("the endorsement is of another record"));
                }
                return Err(RecordError::Record(newer));
            }
            claimed => claimed.map_err(RecordError::Record)?,
        };
        let record: Record = signed
            .record
            .verify(JwsType::Record, &claimed.agent_key)
            .map_err(RecordError::Record)?;
        let endorsement: Endorsement = signed
            .endorsement
            .verify(JwsType::Endorsement, &grant.key)
            .map_err(RecordError::Endorsement)?;
        let hash = signed.record.hash();
        let same = [
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

    /// Checks that the record can have a seat under the statement. In a cluster that came under
    /// management, each seat belongs to one signed member.
    pub fn check_founder(&self, statement: &Statement) -> Result<(), RecordError> {
        match &statement.adopted {
            Some(adopted) if adopted.member_of(&self.record).is_none() => {
                Err(RecordError::NotAdopted(self.record.name.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Returns the record's signed form, as received.
    pub fn signed(&self) -> &SignedRecord {
        &self.signed
    }

    /// Returns the SHA-256 of the SubjectPublicKeyInfo of the node's key.
    pub fn node_key(&self) -> &Digest {
        &self.node_key
    }

    /// Returns the hash of the record's JWS.
    pub fn hash(&self) -> Digest {
        self.hash
    }

    /// Returns the id of the agent's key.
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

/// Checks that the statement's permissions allow the addresses and ports of these URLs.
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
    // A URL with a DNS name is never refused here: only the hosts that resolve the name know its
    // addresses.
    let outside = |url: &&NodeUrl| match url.host() {
        UrlHost::Address(address) => !grant.cidrs.iter().any(|block| block.contains(address)),
        UrlHost::Dns(_) => false,
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
