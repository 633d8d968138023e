//! The end of a committed cluster by an owner's signature, and its undoing by another one.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::Digest;
use crate::jws::{Jws, JwsError, Typ};
use crate::key::SigningKey;
use crate::role::Action;
use crate::statement::StatementChain;

/// Longest reason.
pub const MAX_REASON: usize = 500;

/// Payload of a retirement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Retire {
    /// The cluster.
    pub cluster: Uuid,
    /// Hash of its newest statement.
    pub statement: Digest,
    /// Why, for those who come later.
    pub reason: String,
    /// Retire it although members still report. Left out of the signed bytes where it is false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// Payload that takes a retirement back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Unretire {
    /// The cluster.
    pub cluster: Uuid,
    /// Hash of its newest statement.
    pub statement: Digest,
    /// When it was retired, in milliseconds since 1970: a later retirement needs another signature.
    pub retired_at_ms: i64,
}

/// Why a retirement is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RetireError {
    /// Not by an owner, or signature, kind or form.
    #[error("the retirement, or what takes it back: {0}")]
    Jws(#[from] JwsError),
    /// Of another cluster or statement.
    #[error("it is of another cluster, or was signed before the cluster's newest statement")]
    Other,
    /// The reason is too long or not printable.
    #[error("the reason has more than {MAX_REASON} characters or control characters")]
    Reason,
}

impl Retire {
    /// Signs it.
    pub fn sign(&self, owner: &SigningKey) -> Jws {
        Jws::sign(Typ::Retire, owner, self)
    }

    /// Verifies that an owner of the newest statement signed it.
    pub fn verify(jws: &Jws, chain: &StatementChain) -> Result<Self, RetireError> {
        let newest = chain.newest();
        let retire: Self = jws.verify_any(Typ::Retire, newest.keys_for(Action::RetireCluster))?;
        if retire.cluster != newest.cluster || retire.statement != chain.newest_hash() {
            return Err(RetireError::Other);
        }
        if retire.reason.len() > MAX_REASON || retire.reason.contains(char::is_control) {
            return Err(RetireError::Reason);
        }
        Ok(retire)
    }
}

impl Unretire {
    /// Signs it.
    pub fn sign(&self, owner: &SigningKey) -> Jws {
        Jws::sign(Typ::Unretire, owner, self)
    }

    /// Verifies that an owner of the newest statement signed it.
    pub fn verify(jws: &Jws, chain: &StatementChain) -> Result<Self, RetireError> {
        let newest = chain.newest();
        let unretire: Self =
            jws.verify_any(Typ::Unretire, newest.keys_for(Action::RetireCluster))?;
        if unretire.cluster != newest.cluster || unretire.statement != chain.newest_hash() {
            return Err(RetireError::Other);
        }
        Ok(unretire)
    }
}
