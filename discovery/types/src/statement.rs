//! Statements and chains of statements. A statement defines a cluster, and an owner signs it.
//!
//! A chain is an ordered list. Each statement names the hash of the previous one, and is signed by
//! an owner whom the previous one names. A reader must trust one statement of the chain:
//!
//! * An admin trusts the first statement, if one of the owner keys in the context signed it.
//! * An agent trusts the statement whose hash is in the join bundle.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::SIZES;
use crate::admin::{Admin, MAX_ADMINS};
use crate::adoption::Adoption;
use crate::digest::{Digest, MemberId};
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::{KeyId, PublicKey, SigningKey};
use crate::name::Name;
use crate::raft_id;
use crate::record::Record;
use crate::role::{Action, roles_allow};

/// Largest number of statements in a chain that is verified.
pub const MAX_CHAIN: usize = 64;
/// Longest deadline in seconds: 30 days.
pub const MAX_DEADLINE_SECONDS: u64 = 30 * 86_400;

/// Exceptions that a statement makes to the strict defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Permissions {
    /// Seats may have loopback addresses.
    pub loopback: bool,
    /// Two seats may be on one machine.
    pub shared_host: bool,
    /// The size may be even.
    pub even_size: bool,
    /// Seats may have ports below 1024.
    pub low_ports: bool,
}

/// Payload of a statement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Statement {
    /// Version of the format, see [`Statement::format_version`].
    pub version: u32,
    /// Id of the cluster in discovery (UUIDv7). Every statement of a chain has the same one.
    pub cluster: Uuid,
    /// Name of the cluster. Every statement of a chain has the same one.
    pub name: Name,
    /// Number of members that form the cluster. Every statement of a chain has the same one.
    pub size: u8,
    /// Position in the chain, counted from 0.
    pub seq: u64,
    /// Hash of the statement before; `None` for the first.
    pub previous: Option<Digest>,
    /// CA that issues the members' peer certificates, PEM.
    pub peer_ca: String,
    /// CA that issues client certificates, PEM.
    pub client_ca: String,
    /// Admins of this cluster, with their roles.
    pub admins: Vec<Admin>,
    /// Permissions beyond the defaults.
    pub permissions: Permissions,
    /// Time in seconds that the cluster may take to form. The service counts from the time at which
    /// the cluster was opened.
    pub deadline_seconds: u64,
    /// Places over which the members are spread; none if absent. Every statement of a chain has the
    /// same ones. A program that doesn't know this field refuses a statement that has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
    /// Whether an issuer has to approve each host before it can be a founder. Every statement of a
    /// chain has the same value. A program that doesn't know this field refuses a statement that
    /// has it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub needs_approval: bool,
    /// Additional trusted CAs, while the cluster's CAs are being replaced; none if absent. See
    /// [`RotationStep`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub also_trusted: Option<CaPair>,
    /// The running etcd cluster that came under management; none if the cluster forms by this
    /// statement. Every statement of a chain has the same one. A program that doesn't know this
    /// field refuses a statement that has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adopted: Option<Adoption>,
}

/// The two CAs of a cluster. With a single CA, any client could pass for a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CaPair {
    /// CA of the members' peer certificates, PEM.
    pub peer: String,
    /// CA of client certificates, PEM.
    pub client: String,
}

/// Step by which a statement replaces the cluster's CAs.
///
/// Three statements replace the CAs, so that members and clients always trust each other's
/// certificates. `Begin` makes the new CAs trusted, `Switch` makes them issue, and `End` makes the
/// old CAs untrusted. Another `Switch` undoes a `Switch`. An `End` before the `Switch` drops the
/// new CAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationStep {
    /// The new CAs are trusted from now on, in addition to the issuing CAs.
    Begin,
    /// The other trusted CAs issue from now on. The CAs that issued until now stay trusted.
    Switch,
    /// Only the issuing CAs are trusted from now on.
    End,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Places over which the members of a cluster are spread, so that no single one can end the
/// cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Spread {
    /// No zone has a majority of the members.
    Zone,
}

/// A text that isn't the name of a [`Spread`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("members can be spread over zones alone: --spread zone")]
pub struct UnknownSpread;

impl FromStr for Spread {
    type Err = UnknownSpread;

    fn from_str(text: &str) -> Result<Self, UnknownSpread> {
        match text {
            "zone" => Ok(Spread::Zone),
            _ => Err(UnknownSpread),
        }
    }
}

/// Reason why a statement or a chain is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StatementError {
    /// The chain has no statement, or more than [`MAX_CHAIN`].
    #[error("a chain has 1 to {MAX_CHAIN} statements")]
    Length,
    /// The signature, kind or form of a statement is wrong.
    #[error("statement {seq}: {source}")]
    Jws {
        /// Position of the statement in the chain.
        seq: u64,
        /// Reason why the statement's JWS is refused.
        source: JwsError,
    },
    /// The statement doesn't follow the previous one, or changes a value that must stay the same.
    #[error("statement {seq} doesn't follow the one before it: {what}")]
    Broken {
        /// Position of the statement in the chain.
        seq: u64,
        /// Name of the value that differs.
        what: &'static str,
    },
    /// The statement has values that no cluster can have.
    #[error("statement {seq}: {what}")]
    Invalid {
        /// Position of the statement in the chain.
        seq: u64,
        /// Description of the bad value.
        what: &'static str,
    },
    /// The key that signed the first statement isn't a trusted owner key.
    #[error(
        "the chain begins with key {0}, which is no owner key of your context: \
         either the service is not the one that you trust, or the context is out of date"
    )]
    ForeignRoot(KeyId),
    /// The pinned statement isn't in the chain.
    #[error("the chain doesn't contain the statement that the join bundle pins")]
    NotPinned,
}

impl StatementError {
    /// Whether this program can't read the statement because of its version, its length, or its
    /// position in the chain. A newer program may be able to.
    pub fn exceeds_this_program(&self) -> bool {
        match self {
            Self::Length => true,
            Self::Jws { source, .. } => {
                matches!(source, JwsError::Newer { .. } | JwsError::TooLong { .. })
            }
            Self::Broken { .. } | Self::Invalid { .. } | Self::ForeignRoot(_) | Self::NotPinned => {
                false
            }
        }
    }
}

impl Statement {
    /// Checks the statement's values. Neither its signature nor the chain is checked.
    pub fn check(&self) -> Result<(), StatementError> {
        let bad = |what| Err(StatementError::Invalid { seq: self.seq, what });
        if self.version != self.format_version() {
            return bad("its version is not that of its content");
        }
        if self.cluster.get_version_num() != 7 {
            return bad("the cluster's id is not a UUIDv7");
        }
        if !SIZES.contains(&self.size) {
            return bad("the size must be from 1 to 9");
        }
        if self.size.is_multiple_of(2) && !self.permissions.even_size {
            return bad("an even size tolerates no more failures than one less: use an odd one, \
                        or --allow-even");
        }
        if !(1..=MAX_DEADLINE_SECONDS).contains(&self.deadline_seconds) {
            return bad("the deadline must be from 1 second to 30 days");
        }
        let authorities: Vec<&str> = self.peer_cas().chain(self.client_cas()).collect();
        if authorities.iter().any(|pem| ca_der(pem).is_none()) {
            return bad("a CA is not one PEM certificate of a CA");
        }
        if !self.has_distinct_cas() {
            return bad(
                "peers and clients need different CAs: with one, any client could pass for a \
                        peer",
            );
        }
        if let Some(adopted) = &self.adopted
            && let Err(what) = adopted.check(self.size)
        {
            return bad(what);
        }
        if self.spreads_zones() && self.size == 1 {
            return bad("a single member can't be spread over zones");
        }
        if self.admins.len() > MAX_ADMINS || !self.admins.iter().any(Admin::is_owner) {
            return bad("there must be at least one owner, and at most 32 admins");
        }
        for (i, admin) in self.admins.iter().enumerate() {
            let twice = |other: &Admin| other.key == admin.key || other.name == admin.name;
            if self.admins[..i].iter().any(twice) || admin.roles.is_empty() {
                return bad("each admin needs a key and a name of its own, and a role");
            }
        }
        Ok(())
    }

    /// Whether all CAs differ, with one exception. The two additional CAs of an adopted cluster may
    /// be the same, because an etcd cluster can use one CA for peers and clients.
    fn has_distinct_cas(&self) -> bool {
        let issuing = [ca_der(&self.peer_ca), ca_der(&self.client_ca)];
        let other = self.also_trusted.as_ref();
        let other = other.map(|other| [ca_der(&other.peer), ca_der(&other.client)]);
        let is_shared = |pair: &[Option<Vec<u8>>; 2]| pair[0] == pair[1];
        let crosses = |pair: &[Option<Vec<u8>>; 2]| pair.iter().any(|ca| issuing.contains(ca));
        !is_shared(&issuing)
            && other.is_none_or(|other| {
                !crosses(&other) && (self.adopted.is_some() || !is_shared(&other))
            })
    }

    /// Returns the Raft id of the member that founds the cluster with the record. `document` is the
    /// commit document's hash. `None` if the record is of no member of the adopted cluster.
    pub fn founder_id(&self, document: &Digest, record: &Record) -> Option<MemberId> {
        match &self.adopted {
            Some(adopted) => adopted.member_of(record).map(|member| member.id),
            None => Some(raft_id::of_founder(document, &record.peer_urls)),
        }
    }

    /// Returns the version of the statement's format: 2 with additional CAs, else 1. An older
    /// program refuses version 2 as too new, instead of calling the additional CAs invalid.
    pub fn format_version(&self) -> u32 {
        if self.also_trusted.is_some() { 2 } else { 1 }
    }

    /// Returns the CAs whose peer certificates are trusted, in PEM. The first CA issues new peer
    /// certificates.
    pub fn peer_cas(&self) -> impl Iterator<Item = &str> {
        let other = self.also_trusted.as_ref().map(|other| other.peer.as_str());
        std::iter::once(self.peer_ca.as_str()).chain(other)
    }

    /// Returns the CAs whose client certificates are trusted, in PEM. The first CA issues new
    /// client certificates.
    pub fn client_cas(&self) -> impl Iterator<Item = &str> {
        let other = self.also_trusted.as_ref().map(|other| other.client.as_str());
        std::iter::once(self.client_ca.as_str()).chain(other)
    }

    /// Returns the content of a file with all CAs whose peer certificates are trusted, PEM.
    pub fn peer_bundle(&self) -> String {
        bundle(self.peer_cas())
    }

    /// Returns the content of a file with all CAs whose client certificates are trusted, PEM.
    pub fn client_bundle(&self) -> String {
        bundle(self.client_cas())
    }

    /// Returns the CAs that issue certificates.
    pub fn issuing_cas(&self) -> CaPair {
        CaPair { peer: self.peer_ca.clone(), client: self.client_ca.clone() }
    }

    /// Whether both statements name the same CAs, in the same roles.
    pub fn has_same_cas(&self, other: &Self) -> bool {
        self.issuing_cas() == other.issuing_cas() && self.also_trusted == other.also_trusted
    }

    /// Whether both statements trust the same CAs, whichever of them issue.
    fn trusts_same_cas(&self, other: &Self) -> bool {
        self.has_same_cas(other) || self.is_swapped(other)
    }

    /// Whether one statement's issuing CAs are the other statement's additional CAs.
    fn is_swapped(&self, other: &Self) -> bool {
        self.also_trusted.as_ref() == Some(&other.issuing_cas())
            && other.also_trusted.as_ref() == Some(&self.issuing_cas())
    }

    /// Returns the step by which this statement changes the CAs of `last`, the statement before it.
    /// `None` if the CAs stay the same.
    ///
    /// # Errors
    /// The name of the CA field that may not change in this way.
    pub fn rotation_step(&self, last: &Self) -> Result<Option<RotationStep>, &'static str> {
        if self.has_same_cas(last) {
            return Ok(None);
        }
        if self.is_swapped(last) {
            return Ok(Some(RotationStep::Switch));
        }
        if self.peer_ca != last.peer_ca {
            return Err("the peers' CA");
        }
        if self.client_ca != last.client_ca {
            return Err("the clients' CA");
        }
        match (&last.also_trusted, &self.also_trusted) {
            (None, Some(_)) => Ok(Some(RotationStep::Begin)),
            (Some(_), None) => Ok(Some(RotationStep::End)),
            _ => Err("the additional trusted CAs"),
        }
    }

    /// Whether the members are spread over zones, so that no zone has a majority of them.
    pub fn spreads_zones(&self) -> bool {
        self.spread == Some(Spread::Zone)
    }

    /// Returns the admin whose key has this id, if there is one.
    pub fn admin(&self, kid: &KeyId) -> Option<&Admin> {
        self.admins.iter().find(|admin| admin.key.key_id() == *kid)
    }

    /// Returns the keys that may sign a message for which `action` is needed.
    pub fn keys_for(&self, action: Action) -> impl Iterator<Item = &PublicKey> {
        let may = move |admin: &&Admin| roles_allow(&admin.roles, action);
        self.admins.iter().filter(may).map(|admin| &admin.key)
    }

    /// Signs the statement, as an owner.
    pub fn sign(&self, owner: &SigningKey) -> Jws {
        Jws::sign(JwsType::Statement, owner, self)
    }
}

fn bundle<'a>(cas: impl Iterator<Item = &'a str>) -> String {
    cas.map(|pem| format!("{}\n", pem.trim_end())).collect()
}

/// Returns the DER of the one CA certificate in a PEM text; `None` if there isn't exactly one.
pub fn ca_der(pem: &str) -> Option<Vec<u8>> {
    use rustls::pki_types::{CertificateDer, pem::PemObject};
    let mut found = CertificateDer::pem_slice_iter(pem.as_bytes());
    let (Some(Ok(certificate)), None) = (found.next(), found.next()) else { return None };
    let (rest, parsed) = X509Certificate::from_der(&certificate).ok()?;
    (rest.is_empty() && parsed.is_ca()).then(|| certificate.to_vec())
}

/// The parts of a statement that link it to the one before, in every version of the format.
#[derive(Deserialize)]
struct NextLink {
    cluster: Uuid,
    previous: Option<Digest>,
}

/// A verified statement chain, with its statements in order.
#[derive(Clone, Debug)]
pub struct StatementChain {
    links: Vec<(Jws, Digest, Statement)>,
}

impl StatementChain {
    /// Verifies a chain whose first statement one of `owners` signed. An admin's tool uses it.
    pub fn verify_from_owners(chain: &[Jws], owners: &[PublicKey]) -> Result<Self, StatementError> {
        Self::verify_from(chain, |root| owners.iter().any(|owner| owner.key_id() == *root))
    }

    /// Verifies a chain whose first signer satisfies `may_begin`. The service uses it. The first
    /// signer's key id is checked before any signature, so refusing a foreign chain is cheap.
    pub fn verify_from(
        chain: &[Jws],
        may_begin: impl FnOnce(&KeyId) -> bool,
    ) -> Result<Self, StatementError> {
        let root = chain.first().ok_or(StatementError::Length)?.kid();
        if !may_begin(root) {
            return Err(StatementError::ForeignRoot(*root));
        }
        Self::verify_links(chain)
    }

    /// Verifies a chain that contains the statement with the hash `pinned`. An agent uses it. The
    /// pinned hash covers the earlier statements, and signatures connect the later ones.
    pub fn verify_from_pin(chain: &[Jws], pinned: &Digest) -> Result<Self, StatementError> {
        let verified = Self::verify_links(chain)?;
        match verified.position(pinned) {
            Some(_) => Ok(verified),
            None => Err(StatementError::NotPinned),
        }
    }

    /// Verifies only the links between the statements, without a trusted start. **Only for the
    /// service**, for chains that it has stored or compares with stored ones. In other programs the
    /// result proves nothing.
    pub fn verify_links(chain: &[Jws]) -> Result<Self, StatementError> {
        let (Some(first), true) = (chain.first(), chain.len() <= MAX_CHAIN) else {
            return Err(StatementError::Length);
        };
        let mut links: Self = Self { links: vec![first_link(first)?] };
        for next in &chain[1..] {
            links.append(next)?;
        }
        Ok(links)
    }

    /// Verifies the next statement and appends it. The chain is unchanged if this fails.
    pub fn append(&mut self, next: &Jws) -> Result<&Statement, StatementError> {
        if self.links.len() >= MAX_CHAIN {
            return Err(StatementError::Length);
        }
        let (_, last_hash, last) = &self.links[self.links.len() - 1];
        let seq = last.seq + 1;
        let statement: Statement = next
            .verify_any(JwsType::Statement, last.keys_for(Action::PutStatement))
            .map_err(|source| StatementError::Jws { seq, source })?;
        let fixed = [
            (statement.seq == seq, "its number"),
            (statement.previous == Some(*last_hash), "the hash of the one before"),
            (statement.cluster == last.cluster, "the cluster's id"),
            (statement.name == last.name, "the cluster's name"),
            (statement.size == last.size, "the cluster's size"),
            (statement.spread == last.spread, "the spread of its members"),
            (statement.needs_approval == last.needs_approval, "the need for approvals"),
            (statement.adopted == last.adopted, "the adopted members"),
        ];
        if let Some((_, what)) = fixed.into_iter().find(|(same, _)| !same) {
            return Err(StatementError::Broken { seq, what });
        }
        statement.rotation_step(last).map_err(|what| StatementError::Broken { seq, what })?;
        statement.check()?;
        self.links.push((next.clone(), next.hash(), statement));
        Ok(self.newest())
    }

    /// Verifies and appends the next statement as [`StatementChain::append`] does, from a text that
    /// isn't parsed yet.
    pub fn append_text(&mut self, next: &str) -> Result<&Statement, StatementError> {
        let seq = self.newest().seq + 1;
        let next = next.parse().map_err(|source| StatementError::Jws { seq, source })?;
        self.append(&next)
    }

    /// Whether an owner signed `next` as the next statement, even if this program can't read it.
    /// See [`StatementError::exceeds_this_program`].
    pub fn is_continued_by(&self, next: &str) -> bool {
        let last = self.newest();
        let keys = last.keys_for(Action::PutStatement);
        Jws::verify_any_version(next, JwsType::Statement, keys).is_some_and(|next: NextLink| {
            next.cluster == last.cluster && next.previous == Some(self.newest_hash())
        })
    }

    /// Returns the newest statement, which decides the admins' roles.
    pub fn newest(&self) -> &Statement {
        &self.links[self.links.len() - 1].2
    }

    /// Returns the statements, in order.
    pub fn statements(&self) -> impl Iterator<Item = &Statement> {
        self.links.iter().map(|(_, _, statement)| statement)
    }

    /// Returns the hash of the newest statement.
    pub fn newest_hash(&self) -> Digest {
        self.links[self.links.len() - 1].1
    }

    /// Returns the position of the statement with this hash in the chain.
    pub fn position(&self, hash: &Digest) -> Option<usize> {
        self.links.iter().position(|(_, own, _)| own == hash)
    }

    /// Returns the chain up to and including the statement with this hash.
    pub fn up_to(&self, hash: &Digest) -> Option<Self> {
        let end = self.position(hash)?;
        Some(Self { links: self.links[..=end].to_vec() })
    }

    /// Returns the signed statements, in order.
    pub fn jws(&self) -> Vec<Jws> {
        self.links.iter().map(|(jws, ..)| jws.clone()).collect()
    }

    /// Returns the number of the earliest statement from which on the set of trusted CAs has not
    /// changed. Which of these CAs issue certificates may have changed.
    pub fn trusted_since(&self) -> u64 {
        let newest = self.newest();
        self.since(|statement| statement.trusts_same_cas(newest))
    }

    /// Returns the number of the earliest statement from which on the issuing CAs have not changed.
    pub fn issuing_since(&self) -> u64 {
        let issuing = self.newest().issuing_cas();
        self.since(|statement| statement.issuing_cas() == issuing)
    }

    /// Whether the CAs that an adopted etcd cluster had before its adoption are still trusted. An
    /// owner drops them with a later statement. CAs that are added after that belong to a
    /// replacement.
    pub fn trusts_cas_before_adoption(&self) -> bool {
        self.newest().adopted.is_some()
            && self.statements().all(|statement| statement.also_trusted.is_some())
    }

    /// Returns the number of the earliest statement such that `is_same` holds for it and all later
    /// ones.
    fn since(&self, is_same: impl Fn(&Statement) -> bool) -> u64 {
        let others = self.statements().filter(|statement| !is_same(statement));
        others.last().map_or(0, |last| last.seq + 1)
    }

    /// Returns the id of the key that signed the first statement.
    pub fn root(&self) -> &KeyId {
        self.links[0].0.kid()
    }
}

fn first_link(first: &Jws) -> Result<(Jws, Digest, Statement), StatementError> {
    let jws = |source| StatementError::Jws { seq: 0, source };
    let claimed: Statement = first.claims_unverified(JwsType::Statement).map_err(jws)?;
    // The first statement itself names its signer as an admin, so this signature alone gives no
    // trust. The caller must check that it trusts the signer.
    let statement: Statement = first
        .verify_any(JwsType::Statement, claimed.keys_for(Action::PutStatement))
        .map_err(jws)?;
    if statement.seq != 0 || statement.previous.is_some() {
        return Err(StatementError::Broken { seq: 0, what: "it is not the first one" });
    }
    statement.check()?;
    Ok((first.clone(), first.hash(), statement))
}

#[cfg(test)]
mod tests;
