//! Checkpoints of a cluster's event chain, which its members' agents keep.
//!
//! Each agent remembers the last checkpoint and names its event to the service. The next checkpoint
//! repeats that event's hash. So a service can show only one history to an agent. Two signed
//! checkpoints that contradict each other prove that the service's history was changed, or that its
//! database was set back to an older state.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::Digest;
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::{PublicKey, SigningKey};

/// One event of a chain, by its place and its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChainPosition {
    /// Number of the event, from 1; 0 before the first one.
    pub number: u64,
    /// Hash of the event; zeros before the first one.
    pub hash: Digest,
}

/// Payload of a checkpoint, which is a JWS by the service's signing key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// Cluster whose event chain it is.
    pub cluster: Uuid,
    /// Last event of the chain.
    pub last: ChainPosition,
    /// Event with the number that the agent named. None if the agent named none, or if the chain
    /// has no such event.
    pub earlier: Option<ChainPosition>,
    /// Time of the checkpoint, in seconds since 1970 by the service's clock.
    pub at: u64,
}

/// A checkpoint that the service has signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedCheckpoint {
    jws: Jws,
    checkpoint: Checkpoint,
}

/// Contradiction between two checkpoints of one chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HistoryFault {
    /// The chain is shorter than it was.
    #[error("it had {known} events, and has {found} now")]
    Backwards {
        /// Number of events at the earlier checkpoint.
        known: u64,
        /// Number of events at the later checkpoint.
        found: u64,
    },
    /// The event with this number is another one than at the earlier checkpoint.
    #[error("event {number} is another one than it was")]
    Rewritten {
        /// Number of the event.
        number: u64,
    },
}

impl Checkpoint {
    /// Signs the checkpoint, as the service.
    pub fn sign(&self, service: &SigningKey) -> Jws {
        Jws::sign(JwsType::Checkpoint, service, self)
    }
}

impl VerifiedCheckpoint {
    /// Verifies a checkpoint of the cluster's chain under the service's signing keys.
    pub fn verify<'k>(
        jws: &Jws,
        cluster: Uuid,
        service: impl IntoIterator<Item = &'k PublicKey>,
    ) -> Result<Self, JwsError> {
        let checkpoint: Checkpoint = jws.verify_any(JwsType::Checkpoint, service)?;
        match checkpoint.cluster == cluster {
            true => Ok(Self { jws: jws.clone(), checkpoint }),
            false => Err(JwsError::Payload("it is of another cluster".to_owned())),
        }
    }

    /// Checks that this checkpoint's chain continues the chain of the earlier checkpoint `known`.
    /// When the agent asked for this checkpoint, it must have named the number of the last event in
    /// `known`.
    pub fn check_continues(&self, known: &Checkpoint) -> Result<(), HistoryFault> {
        let (then, now) = (known.last, self.checkpoint.last);
        if now.number < then.number {
            return Err(HistoryFault::Backwards { known: then.number, found: now.number });
        }
        let same = match now.number == then.number {
            true => Some(now),
            false if then.number == 0 => Some(then),
            false => self.checkpoint.earlier,
        };
        match same == Some(then) {
            true => Ok(()),
            false => Err(HistoryFault::Rewritten { number: then.number }),
        }
    }

    /// Returns the signed form, as received.
    pub fn jws(&self) -> &Jws {
        &self.jws
    }
}

impl std::ops::Deref for VerifiedCheckpoint {
    type Target = Checkpoint;

    fn deref(&self) -> &Checkpoint {
        &self.checkpoint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: Uuid = Uuid::from_u128(7);

    fn position(number: u64, hash: u8) -> ChainPosition {
        ChainPosition { number, hash: Digest([hash; 32]) }
    }

    fn checkpoint(last: ChainPosition, earlier: Option<ChainPosition>) -> Checkpoint {
        Checkpoint { cluster: CLUSTER, last, earlier, at: 1 }
    }

    #[test]
    fn only_the_services_signature_over_the_clusters_chain_counts() {
        let (service, other) = (SigningKey::generate(), SigningKey::generate());
        let jws = checkpoint(position(3, 3), None).sign(&service);
        let verify = |cluster, key: &SigningKey| {
            VerifiedCheckpoint::verify(&jws, cluster, [key.public()]).map(|found| found.last)
        };
        assert_eq!(verify(CLUSTER, &service), Ok(position(3, 3)));
        assert!(matches!(verify(CLUSTER, &other), Err(JwsError::UnknownKey(_))));
        assert!(matches!(verify(Uuid::nil(), &service), Err(JwsError::Payload(_))));
    }

    #[test]
    fn a_chain_that_is_shorter_or_has_another_past_is_noticed() {
        let service = SigningKey::generate();
        let known = checkpoint(position(3, 3), None);
        let check = |last, earlier| {
            let jws = checkpoint(last, earlier).sign(&service);
            let later = VerifiedCheckpoint::verify(&jws, CLUSTER, [service.public()]).unwrap();
            later.check_continues(&known)
        };
        assert_eq!(check(position(3, 3), None), Ok(()));
        assert_eq!(check(position(5, 5), Some(position(3, 3))), Ok(()));
        let backwards = HistoryFault::Backwards { known: 3, found: 2 };
        assert_eq!(check(position(2, 2), None), Err(backwards));
        let rewritten = Err(HistoryFault::Rewritten { number: 3 });
        assert_eq!(check(position(3, 4), Some(position(3, 3))), rewritten);
        assert_eq!(check(position(5, 5), Some(position(3, 4))), rewritten);
        assert_eq!(check(position(5, 5), Some(position(2, 2))), rewritten);
        assert_eq!(check(position(5, 5), None), rewritten);
    }

    #[test]
    fn an_empty_chain_is_continued_by_any() {
        let service = SigningKey::generate();
        let jws = checkpoint(position(5, 5), None).sign(&service);
        let later = VerifiedCheckpoint::verify(&jws, CLUSTER, [service.public()]).unwrap();
        assert_eq!(later.check_continues(&checkpoint(position(0, 0), None)), Ok(()));
    }
}
