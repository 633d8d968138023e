//! Service statements: with one, an owner says where a cluster's agents find the discovery service,
//! and by which TLS keys they know it.
//!
//! An agent may get a service statement from anywhere: from discovery, from the cluster's own
//! store, or from a file. Only the signature of an owner of the cluster's newest statement counts.
//! The statement with the highest sequence number is in force. Of two statements with the same
//! number, a program keeps the one that it saw first.
//!
//! A service statement stays in force after the owner who signed it has left. Any statement that a
//! current owner signs then replaces it, whatever its number. So a former owner can't keep a
//! cluster by a high number.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::bundle::{BUNDLE_WORD, MAX_PINS, MAX_URLS};
use crate::context::CONTEXT_WORD;
use crate::digest::Digest;
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::SigningKey;
use crate::role::Action;
use crate::statement::StatementChain;
use crate::url::ServiceUrl;

/// First word of a line that holds a service statement.
pub const SERVICE_WORD: &str = "muster-service1";
/// Longest file of service statements that is read, in bytes. It has room for the lines of at least
/// 250 clusters.
pub const MAX_SERVICE_FILE: u64 = 1024 * 1024;
/// Highest sequence number of a service statement.
pub const MAX_SEQUENCE: u64 = i64::MAX as u64;

/// Payload of a service statement, which is a JWS by an owner's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceStatement {
    /// Version of the format, always 1.
    pub version: u32,
    /// Cluster whose agents the statement is for.
    pub cluster: Uuid,
    /// Number of the statement, from 1 to [`MAX_SEQUENCE`]. A higher number replaces a lower one.
    pub sequence: u64,
    /// URLs of the service, in order of preference: 1 to [`MAX_URLS`].
    pub urls: Vec<ServiceUrl>,
    /// SHA-256 of the service's TLS key (SPKI): 1 to [`MAX_PINS`], two while the key is being
    /// changed.
    pub pins: Vec<Digest>,
    /// Time of the signature, in seconds since 1970 by the clock of the owner's machine.
    pub issued_at: u64,
}

/// Reason why a service statement is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServiceStatementError {
    /// The signature, kind or form is wrong, or the signer is no owner.
    #[error("the service statement: {0}")]
    Jws(#[from] JwsError),
    /// The statement is of another cluster.
    #[error("the service statement is of the cluster {0}")]
    OtherCluster(Uuid),
    /// The number of URLs or of pins, or the sequence number, is outside its limits.
    #[error(
        "a service statement has 1 to {MAX_URLS} URLs, 1 to {MAX_PINS} pins, and a number from 1 \
         to {MAX_SEQUENCE}"
    )]
    Limits,
}

/// Result of comparing a service statement with the one that the program knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceOrder {
    /// The statement replaces the known one, or none is known.
    Newer,
    /// The known statement has the same content.
    Same,
    /// The known statement has a higher number.
    Older,
    /// The known statement has the same number and another content.
    Conflict,
}

impl ServiceStatement {
    /// Signs the service statement, as an owner.
    pub fn sign(&self, owner: &SigningKey) -> Jws {
        Jws::sign(JwsType::Service, owner, self)
    }

    fn check(&self, chain: &StatementChain) -> Result<(), ServiceStatementError> {
        if self.cluster != chain.newest().cluster {
            return Err(ServiceStatementError::OtherCluster(self.cluster));
        }
        let in_limits = (1..=MAX_URLS).contains(&self.urls.len())
            && (1..=MAX_PINS).contains(&self.pins.len())
            && (1..=MAX_SEQUENCE).contains(&self.sequence);
        in_limits.then_some(()).ok_or(ServiceStatementError::Limits)
    }
}

/// A service statement with an owner's verified signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedService {
    jws: Jws,
    statement: ServiceStatement,
}

impl VerifiedService {
    /// Verifies that an owner of the cluster's newest statement signed the service statement.
    pub fn verify(jws: &Jws, chain: &StatementChain) -> Result<Self, ServiceStatementError> {
        Self::verify_by(jws, chain, chain)
    }

    /// Verifies the service statement as [`VerifiedService::verify`] does, and accepts the
    /// signature of a former owner, too. **Only for a statement that this program has verified
    /// before**, and has kept since.
    pub fn verify_kept(jws: &Jws, chain: &StatementChain) -> Result<Self, ServiceStatementError> {
        let mut refused = None;
        for link in chain.jws().iter().rev() {
            let Some(past) = chain.up_to(&link.hash()) else { continue };
            match Self::verify_by(jws, &past, chain) {
                Err(ServiceStatementError::Jws(JwsError::UnknownKey(kid))) => {
                    refused = Some(JwsError::UnknownKey(kid));
                }
                verified => return verified,
            }
        }
        Err(refused.unwrap_or(JwsError::BadSignature).into())
    }

    fn verify_by(
        jws: &Jws,
        owners: &StatementChain,
        chain: &StatementChain,
    ) -> Result<Self, ServiceStatementError> {
        let keys = owners.newest().keys_for(Action::AnnounceService);
        let statement: ServiceStatement = jws.verify_any(JwsType::Service, keys)?;
        statement.check(chain)?;
        Ok(Self { jws: jws.clone(), statement })
    }

    /// Compares this statement with the known one. A known statement whose signer is no owner any
    /// more is older, whatever its number.
    pub fn compare(&self, known: Option<&Self>, chain: &StatementChain) -> ServiceOrder {
        let Some(known) = known else { return ServiceOrder::Newer };
        if self.statement == known.statement {
            return ServiceOrder::Same;
        }
        let is_owner =
            |service: &Self| Self::verify(service.jws(), chain).map(|_| service.sequence()).ok();
        match is_owner(known) {
            None => ServiceOrder::Newer,
            Some(number) if number < self.sequence() => ServiceOrder::Newer,
            Some(number) if number > self.sequence() => ServiceOrder::Older,
            Some(_) => ServiceOrder::Conflict,
        }
    }

    /// Returns the statement as it was signed.
    pub fn jws(&self) -> &Jws {
        &self.jws
    }

    /// Returns the payload of the statement.
    pub fn statement(&self) -> &ServiceStatement {
        &self.statement
    }

    /// Returns the number of the statement.
    pub fn sequence(&self) -> u64 {
        self.statement.sequence
    }

    /// Returns the statement's URLs, followed by those of `others` that it lacks.
    pub fn urls_before(&self, others: &[ServiceUrl]) -> Vec<ServiceUrl> {
        let mut urls = self.statement.urls.clone();
        for other in others {
            if !urls.contains(other) {
                urls.push(other.clone());
            }
        }
        urls
    }
}

impl fmt::Display for VerifiedService {
    /// Formats the statement as the line that a person gives to an agent.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SERVICE_WORD} {}", self.jws)
    }
}

/// Reason why a text holds no service statement for a cluster.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServiceLineError {
    /// A line begins with another word than expected.
    #[error("line {line}: expected one that begins with `{SERVICE_WORD}`{hint}")]
    FirstWord {
        /// Number of the line, from 1.
        line: usize,
        /// Guess at the kind of the line; empty if there is no guess.
        hint: &'static str,
    },
    /// The signed message in a line can't be read.
    #[error("line {line}: {source}")]
    Jws {
        /// Number of the line, from 1.
        line: usize,
        /// Reason why the message is refused.
        source: JwsError,
    },
    /// No line is of this cluster.
    #[error(
        "no line is of the cluster {0}: an owner makes one with muster-discovery service announce \
         … --out FILE"
    )]
    NoLine(Uuid),
}

/// Returns the newest service statement of `cluster` in a text that has one in each line. The
/// statement is unverified.
pub fn find_service_line(text: &str, cluster: Uuid) -> Result<Jws, ServiceLineError> {
    let mut newest: Option<(u64, Jws)> = None;
    for (line, content) in (1..).zip(text.lines()) {
        let mut words = content.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        let hint = match first {
            SERVICE_WORD => "",
            BUNDLE_WORD => ": this is a join bundle",
            CONTEXT_WORD => {
                ": this is an admin's context; an owner signs it with muster-discovery service \
                 announce"
            }
            word if word.starts_with("muster") => ": it is of another version of Muster",
            _ => "",
        };
        if first != SERVICE_WORD {
            return Err(ServiceLineError::FirstWord { line, hint });
        }
        let refused = |source| ServiceLineError::Jws { line, source };
        let jws: Jws = match (words.next(), words.next()) {
            (Some(word), None) => word.parse().map_err(refused)?,
            _ => return Err(refused(JwsError::Malformed)),
        };
        let claims: ServiceStatement = jws.claims_unverified(JwsType::Service).map_err(refused)?;
        let is_newer = newest.as_ref().is_none_or(|(number, _)| *number < claims.sequence);
        if claims.cluster == cluster && is_newer {
            newest = Some((claims.sequence, jws));
        }
    }
    newest.map(|(_, jws)| jws).ok_or(ServiceLineError::NoLine(cluster))
}

#[cfg(test)]
mod tests;
