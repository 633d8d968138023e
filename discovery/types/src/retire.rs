//! Retirement, with which an owner ends a committed cluster, and its undoing. An owner signs both.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::Digest;
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::SigningKey;
use crate::role::Action;
use crate::statement::StatementChain;

/// Longest reason of a retirement, in bytes.
pub const MAX_REASON: usize = 500;

/// Payload of a retirement, which is a JWS by an owner's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Retire {
    /// Cluster that is retired.
    pub cluster: Uuid,
    /// Hash of the cluster's newest statement.
    pub statement: Digest,
    /// Reason for the retirement, for people who read it later.
    pub reason: String,
    /// Whether to retire the cluster even if members still report. The signed JSON omits this field
    /// if it is false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// Payload that undoes a retirement, which is a JWS by an owner's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Unretire {
    /// Cluster that was retired.
    pub cluster: Uuid,
    /// Hash of the cluster's newest statement.
    pub statement: Digest,
    /// Time of the retirement, in milliseconds since 1970. The signature covers it, so it can't
    /// undo a later retirement.
    pub retired_at_ms: i64,
}

/// Reason why a retirement, or its undoing, is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RetireError {
    /// The signature, kind or form is wrong, or the signer is no owner.
    #[error("the retirement, or what takes it back: {0}")]
    Jws(#[from] JwsError),
    /// The payload names another cluster, or a statement that isn't the newest.
    #[error("it is of another cluster, or was signed before the cluster's newest statement")]
    OtherStatement,
    /// The reason is too long or not printable.
    #[error("the reason has more than {MAX_REASON} bytes, or control characters")]
    Reason,
}

impl Retire {
    /// Signs the retirement, as an owner.
    pub fn sign(&self, owner: &SigningKey) -> Jws {
        Jws::sign(JwsType::Retire, owner, self)
    }

    /// Verifies that an owner of the newest statement signed the retirement.
    pub fn verify(jws: &Jws, chain: &StatementChain) -> Result<Self, RetireError> {
        let newest = chain.newest();
        let retire: Self =
            jws.verify_any(JwsType::Retire, newest.keys_for(Action::RetireCluster))?;
        if retire.cluster != newest.cluster || retire.statement != chain.newest_hash() {
            return Err(RetireError::OtherStatement);
        }
        if retire.reason.len() > MAX_REASON || retire.reason.contains(char::is_control) {
            return Err(RetireError::Reason);
        }
        Ok(retire)
    }
}

impl Unretire {
    /// Signs the undoing of a retirement, as an owner.
    pub fn sign(&self, owner: &SigningKey) -> Jws {
        Jws::sign(JwsType::Unretire, owner, self)
    }

    /// Verifies that an owner of the newest statement signed the undoing of a retirement.
    pub fn verify(jws: &Jws, chain: &StatementChain) -> Result<Self, RetireError> {
        let newest = chain.newest();
        let unretire: Self =
            jws.verify_any(JwsType::Unretire, newest.keys_for(Action::RetireCluster))?;
        if unretire.cluster != newest.cluster || unretire.statement != chain.newest_hash() {
            return Err(RetireError::OtherStatement);
        }
        Ok(unretire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::ClusterFixture;

    #[test]
    fn the_limit_of_a_reason_is_in_bytes_as_the_error_says() {
        let world = ClusterFixture::new(1);
        let retire = |reason: String| {
            let (cluster, statement) = (world.statement.cluster, world.chain().newest_hash());
            let retire = Retire { cluster, statement, reason, force: false };
            Retire::verify(&retire.sign(&world.owner), &world.chain())
        };
        assert!(retire("ü".repeat(MAX_REASON / 2)).is_ok());
        let refused = retire("ü".repeat(MAX_REASON / 2 + 1)).unwrap_err();
        assert_eq!(refused, RetireError::Reason);
        let told = "the reason has more than 500 bytes, or control characters";
        assert_eq!(refused.to_string(), told);
    }
}
