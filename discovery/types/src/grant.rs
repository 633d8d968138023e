//! Grants. When an issuer makes a token, it signs a grant, which allows the token's holder to
//! redeem the token.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use ipnet::IpNet;
use muster_identity::{InvalidRequirement, MAX_REQUIREMENTS, Requirement};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::{Digest, MemberId, random};
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::{PublicKey, SigningKey};
use crate::name::Name;
use crate::role::Action;
use crate::statement::StatementChain;
use crate::text::wire_text;

/// Longest lifetime of a boot token, in seconds: 24 hours.
pub const MAX_BOOT_SECONDS: u64 = 86_400;
/// Default lifetime of a boot token, in seconds: one hour.
pub const DEFAULT_BOOT_SECONDS: u64 = 3_600;
/// Longest lifetime of a join ticket, in seconds: 15 minutes.
pub const MAX_JOIN_SECONDS: u64 = 900;
/// Longest lifetime of a replacement policy, in seconds: 366 days.
pub const MAX_POLICY_SECONDS: u64 = 366 * 86_400;
/// Largest number of CIDR blocks in one grant.
pub const MAX_CIDRS: usize = 8;

/// An issuer's clock may be this many seconds ahead of the clock that judges its grant.
pub const ISSUER_SKEW_SECONDS: u64 = 120;

/// Purpose of a token.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum TokenKind {
    /// The token gives a seat in a cluster that forms.
    Boot,
    /// The token adds one member to a running cluster.
    Join,
    /// The token of a replacement policy. It gives a seat in a cluster that forms, and later the
    /// place of a member that nobody can reach.
    Heal,
}

impl TokenKind {
    /// Every kind, in the order of declaration.
    pub const ALL: [TokenKind; 3] = [TokenKind::Boot, TokenKind::Join, TokenKind::Heal];

    /// Returns the kind's name, as in the token.
    pub fn as_str(self) -> &'static str {
        match self {
            TokenKind::Boot => "boot",
            TokenKind::Join => "join",
            TokenKind::Heal => "heal",
        }
    }

    /// Returns the version of the grants for tokens of this kind. Replacement policies have a
    /// version of their own, so that an older program reports that it is too old for them.
    pub fn grant_version(self) -> u32 {
        match self {
            TokenKind::Boot | TokenKind::Join => 1,
            TokenKind::Heal => 2,
        }
    }

    /// Returns the action that the issuer of a token of this kind must be allowed to do.
    pub fn action(self) -> Action {
        match self {
            TokenKind::Boot => Action::PutBootGrant,
            TokenKind::Join => Action::PutJoinGrant,
            TokenKind::Heal => Action::PutPolicy,
        }
    }

    /// Returns the longest lifetime of a token of this kind, in seconds.
    pub fn max_seconds(self) -> u64 {
        match self {
            TokenKind::Boot => MAX_BOOT_SECONDS,
            TokenKind::Join => MAX_JOIN_SECONDS,
            TokenKind::Heal => MAX_POLICY_SECONDS,
        }
    }
}

impl fmt::Display for TokenKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Id of a grant and its token: ten random bytes, 16 characters of lower-case base32.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantId([u8; 10]);

/// Error for a text that isn't a grant id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a token's id has 16 characters of a-z and 2-7")]
pub struct BadGrantId;

impl GrantId {
    /// Generates a new random id.
    pub fn random() -> Self {
        Self(random())
    }
}

impl fmt::Display for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&crate::token::encode_base32(&self.0))
    }
}

impl fmt::Debug for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for GrantId {
    type Err = BadGrantId;

    fn from_str(text: &str) -> Result<Self, BadGrantId> {
        crate::token::decode_base32(text)
            .and_then(|b| b.try_into().ok())
            .map(Self)
            .ok_or(BadGrantId)
    }
}

wire_text!(GrantId, "^[a-z2-7]{16}$");

/// Payload of a grant, which is a JWS by the issuer's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Grant {
    /// Version of the format: 2 for a replacement policy, else 1.
    pub version: u32,
    /// Id of the grant and its token.
    pub id: GrantId,
    /// Purpose of the token.
    pub kind: TokenKind,
    /// Public half of the token's key.
    pub key: PublicKey,
    /// Cluster that the grant is for.
    pub cluster: Uuid,
    /// Hash of the statement that the issuer saw.
    pub statement: Digest,
    /// Maximum number of seats that the token may hold at the same time.
    pub uses: u8,
    /// Start of the validity, in seconds since 1970 by the service's clock.
    pub issued_at: u64,
    /// End of the validity, in seconds since 1970. At a redeem, the service compares it with its
    /// own clock.
    pub expires_at: u64,
    /// Address blocks for the source address of a redeem, and for the addresses of members. An
    /// empty list allows any address. The service checks the source address at the redeem.
    #[schema(value_type = Vec<String>)]
    pub cidrs: Vec<IpNet>,
    /// The member must have this name, if one is given.
    pub name: Option<Name>,
    /// The member must be in this zone, if one is given.
    pub zone: Option<Name>,
    /// Member that the new one replaces; only in join tickets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<MemberId>,
    /// When a member may be replaced, and how often; only in replacement policies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replacement: Option<ReplacementLimits>,
    /// The host must fulfil one of these requirements. An empty list requires nothing. Only the
    /// service checks them, at the first redeem of a key.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub require: Vec<Requirement>,
}

/// Limits of a replacement policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplacementLimits {
    /// Time in seconds for which a member must have been unreachable before it is replaced.
    pub after_seconds: u64,
    /// Largest number of replacements that may begin within `per_seconds`.
    pub at_most: u8,
    /// Length of the window, in seconds, to which `at_most` applies.
    pub per_seconds: u64,
}

impl ReplacementLimits {
    /// Values that a policy may have for [`ReplacementLimits::after_seconds`].
    pub const AFTER: RangeInclusive<u64> = 30..=7 * 86_400;
    /// Values that a policy may have for [`ReplacementLimits::at_most`].
    pub const AT_MOST: RangeInclusive<u8> = 1..=16;
    /// Values that a policy may have for [`ReplacementLimits::per_seconds`].
    pub const PER: RangeInclusive<u64> = 3_600..=30 * 86_400;

    fn are_valid(&self) -> bool {
        Self::AFTER.contains(&self.after_seconds)
            && Self::AT_MOST.contains(&self.at_most)
            && Self::PER.contains(&self.per_seconds)
    }
}

/// Reason why a grant is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    /// The form or signature is wrong, or the newest statement doesn't allow the key to sign a
    /// grant.
    #[error("the grant: {0}")]
    Jws(#[from] JwsError),
    /// The grant is for another cluster.
    #[error("the grant is for another cluster")]
    OtherCluster,
    /// The grant was made under a statement that is not in the cluster's chain.
    #[error("the grant was made under a statement that is not in this cluster's chain")]
    OtherStatement,
    /// The grant has values that no token may have.
    #[error("the grant: {0}")]
    Invalid(&'static str),
    /// A requirement on the host can't be fulfilled, or doesn't restrict the hosts enough.
    #[error("the grant: {0}")]
    Requirement(#[from] InvalidRequirement),
}

/// Reason why a grant can't justify a seat at this time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantTimeError {
    /// The start of the grant's validity is in the future.
    #[error("its token is issued in the future")]
    NotYet,
    /// The grant has expired, and since then more time has passed than a cluster may take to form.
    #[error("its token expired longer ago than a cluster may take to form")]
    LongOver,
}

/// A grant whose signer was allowed to issue it. The grant may have expired or been revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedGrant {
    jws: Jws,
    grant: Grant,
    gives_seats: bool,
}

impl Grant {
    /// Signs the grant, as its issuer.
    pub fn sign(&self, issuer: &SigningKey) -> Jws {
        Jws::sign(JwsType::Grant, issuer, self)
    }

    fn check(&self, size: u8) -> Result<(), GrantError> {
        let bad = |what| Err(GrantError::Invalid(what));
        let life = self.expires_at.checked_sub(self.issued_at);
        if !life.is_some_and(|life| (1..=self.kind.max_seconds()).contains(&life)) {
            return bad(
                "it lives longer than its kind may (24 h to boot, 15 min to join, 366 days to heal)",
            );
        }
        if self.version != self.kind.grant_version() {
            return bad("its version is another than its kind's");
        }
        if self.replacement.is_some() != (self.kind == TokenKind::Heal) {
            return bad("a replacement policy has limits, and nothing else has");
        }
        if self.replacement.is_some_and(|limits| !limits.are_valid()) {
            return bad(
                "a replacement policy waits from 30 s to 7 days, and allows 1 to 16 replacements in \
                 1 hour to 30 days",
            );
        }
        let most = match self.kind {
            TokenKind::Boot | TokenKind::Heal => size,
            TokenKind::Join => 1,
        };
        if !(1..=most).contains(&self.uses) {
            return bad("its uses are more than the cluster has seats, or none");
        }
        if self.cidrs.len() > MAX_CIDRS {
            return bad("it has more than 8 CIDR blocks");
        }
        if self.replaces.is_some() && self.kind != TokenKind::Join {
            return bad("it replaces a member, which a join ticket alone may");
        }
        if self.require.len() > MAX_REQUIREMENTS {
            return bad("it has more than 4 requirements");
        }
        self.require.iter().try_for_each(Requirement::check)?;
        Ok(())
    }
}

impl VerifiedGrant {
    /// Verifies a grant under a cluster's statement chain. The newest statement decides whether the
    /// signer may issue it.
    pub fn verify(jws: &Jws, chain: &StatementChain) -> Result<Self, GrantError> {
        let newest = chain.newest();
        let claimed: Grant = match jws.claims_unverified(JwsType::Grant) {
            // A grant of a newer version can't be read, but the error is returned only if an issuer
            // has signed the grant. The grant's kind isn't known, so the issuers of every kind are
            // tried.
            Err(newer @ JwsError::Newer { .. }) => {
                let issuers =
                    TokenKind::ALL.into_iter().flat_map(|kind| newest.keys_for(kind.action()));
                let IgnoredAny = jws.verify_any(JwsType::Grant, issuers)?;
                return Err(newer.into());
            }
            claimed => claimed?,
        };
        let grant: Grant =
            jws.verify_any(JwsType::Grant, newest.keys_for(claimed.kind.action()))?;
        if grant.cluster != newest.cluster {
            return Err(GrantError::OtherCluster);
        }
        if chain.position(&grant.statement).is_none() {
            return Err(GrantError::OtherStatement);
        }
        grant.check(newest.size)?;
        let may_form =
            newest.keys_for(TokenKind::Boot.action()).any(|key| key.key_id() == *jws.kid());
        let gives_seats = match grant.kind {
            TokenKind::Boot => true,
            TokenKind::Join => false,
            TokenKind::Heal => may_form,
        };
        Ok(Self { jws: jws.clone(), grant, gives_seats })
    }

    /// Verifies a grant as [`VerifiedGrant::verify`] does, and also accepts a signer whom an
    /// earlier statement of the chain allows. **Only for a grant that was used before**: seats and
    /// members stay, even if the admin who signed for them has left since.
    pub fn verify_kept(jws: &Jws, chain: &StatementChain) -> Result<Self, GrantError> {
        let newest = Self::verify(jws, chain);
        if newest.is_ok() {
            return newest;
        }
        let earlier = chain.jws();
        let mut pasts = earlier.iter().rev().skip(1).filter_map(|past| chain.up_to(&past.hash()));
        pasts.find_map(|past| Self::verify(jws, &past).ok()).map_or(newest, Ok)
    }

    /// Returns the reason why this grant can't justify a seat at `now` (seconds since 1970), if
    /// there is one.
    ///
    /// The service checks a grant's end only at a redeem. A seat that was redeemed in time stays
    /// valid after the grant's end. Such a seat lasts at most until the cluster's deadline,
    /// `deadline_seconds` after the cluster's creation.
    pub fn time_error(&self, now: u64, deadline_seconds: u64) -> Option<GrantTimeError> {
        let latest = self.expires_at.saturating_add(deadline_seconds);
        if self.issued_at > now.saturating_add(ISSUER_SKEW_SECONDS) {
            Some(GrantTimeError::NotYet)
        } else if now > latest.saturating_add(ISSUER_SKEW_SECONDS) {
            Some(GrantTimeError::LongOver)
        } else {
            None
        }
    }

    /// Whether the token gives a seat in a cluster that forms. A replacement policy's token gives
    /// one only if its signer may also mint boot tokens.
    pub fn gives_seats(&self) -> bool {
        self.gives_seats
    }

    /// Whether the token can make a host a member of a running cluster.
    pub fn admits_newcomers(&self) -> bool {
        matches!(self.kind, TokenKind::Join | TokenKind::Heal)
    }

    /// Returns the signed grant.
    pub fn jws(&self) -> &Jws {
        &self.jws
    }
}

impl std::ops::Deref for VerifiedGrant {
    type Target = Grant;

    fn deref(&self) -> &Grant {
        &self.grant
    }
}

#[cfg(test)]
mod tests;
