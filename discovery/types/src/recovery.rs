//! A cluster that was lost for good goes on as another one, by an operator's word.
//!
//! The statement names the old member and the new one that was made of its data. It is no request to
//! anybody: the agent of that host runs the new member because of it, and never the old one again.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::digest::{Digest, Incarnation};
use crate::jws::{Jws, JwsError, Typ};
use crate::key::{PublicKey, SigningKey};
use crate::role::Action;
use crate::statement::StatementChain;

/// A member, as nodes know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeIdentity {
    /// Raft cluster id, hex.
    pub cluster_id: String,
    /// Raft member id, hex.
    pub member_id: String,
    /// Its incarnation.
    pub incarnation: Incarnation,
}

/// Payload of a recovery statement; a JWS by an operator's or owner's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recovery {
    /// 1.
    pub version: u32,
    /// The cluster.
    pub cluster: Uuid,
    /// Hash of the newest statement of it that the host had.
    pub statement: Digest,
    /// The agent of the host whose data it is.
    pub agent: PublicKey,
    /// Who the data was.
    pub was: NodeIdentity,
    /// Who it is: the one member of the new cluster.
    pub is: NodeIdentity,
    /// The last entry of the old log, which was kept.
    pub last_index: u64,
    /// Its term.
    pub last_term: u64,
    /// When, in seconds since 1970 by that host's clock.
    pub at: u64,
}

/// Why a recovery statement doesn't count.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecoveryError {
    /// Not by an operator, or signature, kind or form.
    #[error("the recovery statement: {0}")]
    Jws(#[from] JwsError),
    /// Of another cluster or host, or signed when another statement was the newest.
    #[error("the recovery statement is of another cluster, host or statement")]
    Other,
    /// A version that this program doesn't know.
    #[error("the recovery statement has version {0}, this program knows 1")]
    Version(u32),
    /// Nothing would be new.
    #[error("the recovery statement gives the new cluster an identity of the old one")]
    Same,
}

impl Recovery {
    /// Signs it.
    pub fn sign(&self, operator: &SigningKey) -> Jws {
        Jws::sign(Typ::Recovery, operator, self)
    }

    /// Verifies that an operator or owner of the chain's newest statement signed it for this host.
    pub fn verify(
        jws: &Jws,
        chain: &StatementChain,
        agent: &PublicKey,
    ) -> Result<Self, RecoveryError> {
        let newest = chain.newest();
        // Whoever may order that members go may say that they are gone.
        let recovery: Self = jws.verify_any(Typ::Recovery, newest.keys_for(Action::PutOrder))?;
        if recovery.version != 1 {
            return Err(RecoveryError::Version(recovery.version));
        }
        if recovery.cluster != newest.cluster
            || recovery.statement != chain.newest_hash()
            || recovery.agent != *agent
        {
            return Err(RecoveryError::Other);
        }
        let (was, is) = (&recovery.was, &recovery.is);
        if was.cluster_id == is.cluster_id || was.incarnation == is.incarnation {
            return Err(RecoveryError::Same);
        }
        Ok(recovery)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::World;

    fn recovery(world: &World) -> Recovery {
        let identity = |of: u8| NodeIdentity {
            cluster_id: format!("c{of}"),
            member_id: format!("a{of}"),
            incarnation: Incarnation([of; 16]),
        };
        Recovery {
            version: 1,
            cluster: world.statement.cluster,
            statement: world.chain().newest_hash(),
            agent: *world.agents[0].public(),
            was: identity(1),
            is: identity(2),
            last_index: 7,
            last_term: 2,
            at: 1_700_000_000,
        }
    }

    #[test]
    fn an_owners_word_counts_and_an_agents_or_strangers_does_not() {
        let world = World::new(3);
        let (said, chain) = (recovery(&world), world.chain());
        let own = world.agents[0].public();
        assert_eq!(Recovery::verify(&said.sign(&world.owner), &chain, own), Ok(said.clone()));
        for other in [&world.agents[0], &SigningKey::generate()] {
            let refused = Recovery::verify(&said.sign(other), &chain, own);
            assert!(matches!(refused, Err(RecoveryError::Jws(_))), "{refused:?}");
        }
        let elsewhere =
            Recovery::verify(&said.sign(&world.owner), &chain, world.agents[1].public());
        assert_eq!(elsewhere, Err(RecoveryError::Other));
    }

    #[test]
    fn what_is_not_new_or_not_known_is_refused() {
        let world = World::new(3);
        let (said, chain, own) = (recovery(&world), world.chain(), world.agents[0].public());
        let verify = |said: &Recovery| Recovery::verify(&said.sign(&world.owner), &chain, own);
        let same = Recovery { is: said.was.clone(), ..said.clone() };
        assert_eq!(verify(&same), Err(RecoveryError::Same));
        let later = Recovery { version: 2, ..said.clone() };
        assert_eq!(verify(&later), Err(RecoveryError::Version(2)));
        let other = Recovery { cluster: Uuid::from_u128(9), ..said };
        assert_eq!(verify(&other), Err(RecoveryError::Other));
    }
}
