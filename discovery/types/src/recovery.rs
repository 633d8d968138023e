//! Recovery statements: with one, an operator declares that another cluster continues a cluster
//! that was lost for good.
//!
//! The statement names the old member, and the new member that was made from the old member's data.
//! It records a decision and commands nothing. The agent on the host with that data reads the
//! statement, and from then on runs only the new member. Hosts that join later learn from it that
//! the new Raft cluster replaces the founded one.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::digest::{Digest, Incarnation};
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::{PublicKey, SigningKey};
use crate::role::Action;
use crate::statement::StatementChain;

/// Identity of a member, as its node knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeIdentity {
    /// Raft cluster id in hexadecimal.
    pub cluster_id: String,
    /// Raft member id in hexadecimal.
    pub member_id: String,
    /// Incarnation of the member.
    pub incarnation: Incarnation,
}

/// Payload of a recovery statement, which is a JWS by an operator's or owner's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recovery {
    /// Version of the format, always 1.
    pub version: u32,
    /// Cluster that was recovered.
    pub cluster: Uuid,
    /// Hash of the newest statement of the cluster that the host had.
    pub statement: Digest,
    /// Key of the agent on the host whose data was kept.
    pub agent: PublicKey,
    /// Identity of the old member, which wrote the kept data.
    pub was: NodeIdentity,
    /// Identity of the new member, which is the only member of the new Raft cluster.
    pub is: NodeIdentity,
    /// Raft index of the last entry that was kept from the old log.
    pub last_index: u64,
    /// Raft term of the last entry that was kept from the old log.
    pub last_term: u64,
    /// Time of the recovery, in seconds since 1970 by the clock of the host whose data was kept.
    pub at: u64,
}

/// Largest number of recoveries of one cluster.
pub const MAX_RECOVERIES: usize = 64;

/// Reason why a recovery statement is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecoveryError {
    /// The signature, kind or form is wrong, or the signer is neither operator nor owner.
    #[error("the recovery statement: {0}")]
    Jws(#[from] JwsError),
    /// The recovery is of another cluster, or names a statement that this cluster doesn't have.
    #[error("the recovery statement is of another cluster or statement")]
    OtherCluster,
    /// The recovery begins with another Raft cluster than the one with which the previous recovery
    /// ended.
    #[error(
        "the recovery statement is about cluster {found}, and what it follows ended with {expected:016x}"
    )]
    Broken {
        /// Raft cluster with which the recovery begins, in hexadecimal.
        found: String,
        /// Raft cluster id that was expected: the founded cluster's, or the one after the previous
        /// recovery.
        expected: u64,
    },
    /// There are more recoveries than [`MAX_RECOVERIES`].
    #[error("a cluster is recovered at most {MAX_RECOVERIES} times")]
    TooMany,
    /// The new member has the Raft cluster id or the incarnation of the old one.
    #[error("the recovery statement gives the new cluster an identity of the old one")]
    SameIdentity,
}

impl NodeIdentity {
    /// Returns the Raft cluster id; `None` if it isn't hexadecimal.
    pub fn raft_cluster(&self) -> Option<u64> {
        u64::from_str_radix(&self.cluster_id, 16).ok()
    }
}

impl Recovery {
    /// Signs the recovery statement, as an operator or owner.
    pub fn sign(&self, operator: &SigningKey) -> Jws {
        Jws::sign(JwsType::Recovery, operator, self)
    }

    /// Verifies that an operator or owner signed the recovery. The recovery names a cluster
    /// statement, and that statement decides who was operator or owner at that time. So the
    /// signature stays valid even if a newer statement no longer names the signer.
    ///
    /// Nothing proves when the recovery was signed. A program that learns of it for the first time
    /// should call [`Recovery::verify_now`].
    pub fn verify(jws: &Jws, chain: &StatementChain) -> Result<Self, RecoveryError> {
        let claimed: Self = jws.claims_unverified(JwsType::Recovery)?;
        let chain = chain.up_to(&claimed.statement).ok_or(RecoveryError::OtherCluster)?;
        let newest = chain.newest();
        // An admin who may order a member's removal may also declare members lost.
        let recovery: Self =
            jws.verify_any(JwsType::Recovery, newest.keys_for(Action::PutOrder))?;
        if recovery.cluster != newest.cluster {
            return Err(RecoveryError::OtherCluster);
        }
        let (was, is) = (&recovery.was, &recovery.is);
        if was.raft_cluster() == is.raft_cluster() || was.incarnation == is.incarnation {
            return Err(RecoveryError::SameIdentity);
        }
        Ok(recovery)
    }

    /// Verifies the recovery as [`Recovery::verify`] does. The signer must also be an operator or
    /// owner by the newest statement. So a former operator can't sign a recovery with an old date.
    pub fn verify_now(jws: &Jws, chain: &StatementChain) -> Result<Self, RecoveryError> {
        let recovery = Self::verify(jws, chain)?;
        let _: Self =
            jws.verify_any(JwsType::Recovery, chain.newest().keys_for(Action::PutOrder))?;
        Ok(recovery)
    }

    /// Whether this recovery and `other` have the same old member, new member and agent. Signer and
    /// time may differ.
    pub fn is_same_step(&self, other: &Self) -> bool {
        (&self.was, &self.is, &self.agent) == (&other.was, &other.is, &other.agent)
    }
}

/// Verified chain of all recoveries of one cluster, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveryChain(Vec<(Jws, Recovery)>);

impl RecoveryChain {
    /// Verifies that the recoveries lead from the Raft cluster `founded` to a later one, each
    /// beginning where the previous one ended.
    pub fn verify(
        all: &[Jws],
        chain: &StatementChain,
        founded: u64,
    ) -> Result<Self, RecoveryError> {
        if all.len() > MAX_RECOVERIES {
            return Err(RecoveryError::TooMany);
        }
        let mut verified = Self::default();
        for jws in all {
            let recovery = Recovery::verify(jws, chain)?;
            let expected = verified.raft_cluster().unwrap_or(founded);
            if recovery.was.raft_cluster() != Some(expected) {
                let found = recovery.was.cluster_id.clone();
                return Err(RecoveryError::Broken { found, expected });
            }
            verified.0.push((jws.clone(), recovery));
        }
        Ok(verified)
    }

    /// Returns the Raft cluster id after the last recovery; `None` if there was no recovery.
    pub fn raft_cluster(&self) -> Option<u64> {
        self.newest()?.is.raft_cluster()
    }

    /// Returns the last recovery of the chain.
    pub fn newest(&self) -> Option<&Recovery> {
        self.0.last().map(|(_, recovery)| recovery)
    }

    /// Returns each signed statement with its payload, in order.
    pub fn all(&self) -> &[(Jws, Recovery)] {
        &self.0
    }

    /// Returns the statements as they were signed.
    pub fn jws(&self) -> Vec<Jws> {
        self.0.iter().map(|(jws, _)| jws.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::ClusterFixture;
    use crate::statement::Statement;

    fn recovery(world: &ClusterFixture) -> Recovery {
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
    fn a_recovery_signed_by_an_owner_is_accepted_and_by_an_agent_or_stranger_refused() {
        let world = ClusterFixture::new(3);
        let (said, chain) = (recovery(&world), world.chain());
        assert_eq!(Recovery::verify(&said.sign(&world.owner), &chain), Ok(said.clone()));
        for other in [&world.agents[0], &SigningKey::generate()] {
            let refused = Recovery::verify(&said.sign(other), &chain);
            assert!(matches!(refused, Err(RecoveryError::Jws(_))), "{refused:?}");
        }
        let elsewhere = Recovery { statement: Digest::of(b"another"), ..said };
        let refused = Recovery::verify(&elsewhere.sign(&world.owner), &chain);
        assert_eq!(refused, Err(RecoveryError::OtherCluster));
    }

    #[test]
    fn a_former_operator_can_not_sign_a_recovery_with_an_old_date() {
        let world = ClusterFixture::new(3);
        let operator = SigningKey::generate();
        let mut with = world.statement.clone();
        with.admins.push(crate::admin::Admin {
            key: *operator.public(),
            name: "operator".parse().unwrap(),
            roles: vec![crate::role::Role::Operator],
        });
        let first = with.sign(&world.owner);
        let without = Statement { seq: 1, previous: Some(first.hash()), ..world.statement.clone() };
        let before = StatementChain::verify_links(std::slice::from_ref(&first)).unwrap();
        let after = [first, without.sign(&world.owner)];
        let after = StatementChain::verify_links(&after).unwrap();
        let said = Recovery { statement: before.newest_hash(), ..recovery(&world) };
        let jws = said.sign(&operator);
        assert_eq!(Recovery::verify_now(&jws, &before), Ok(said.clone()));
        assert_eq!(Recovery::verify(&jws, &after), Ok(said.clone()), "it was one then");
        let refused = Recovery::verify_now(&jws, &after);
        assert!(matches!(refused, Err(RecoveryError::Jws(_))), "{refused:?}");
        let again = said.sign(&world.owner);
        assert_eq!(Recovery::verify_now(&again, &after), Ok(said.clone()));
        assert!(said.is_same_step(&Recovery { at: 9, last_index: 8, ..said.clone() }));
        let other = Recovery { agent: *world.agents[1].public(), ..said.clone() };
        assert!(!said.is_same_step(&other));
    }

    #[test]
    fn a_recovery_without_a_new_member_or_of_an_unknown_version_is_refused() {
        let world = ClusterFixture::new(3);
        let (said, chain) = (recovery(&world), world.chain());
        let verify = |said: &Recovery| Recovery::verify(&said.sign(&world.owner), &chain);
        let same = Recovery { is: said.was.clone(), ..said.clone() };
        assert_eq!(verify(&same), Err(RecoveryError::SameIdentity));
        let mut zero = said.clone();
        zero.is.cluster_id = format!("0{}", said.was.cluster_id);
        assert_eq!(
            verify(&zero),
            Err(RecoveryError::SameIdentity),
            "the same number in other digits"
        );
        let later = Recovery { version: 2, ..said.clone() };
        let newer = JwsError::Newer { found: 2, known: 1 };
        assert_eq!(verify(&later), Err(RecoveryError::Jws(newer)));
        let other = Recovery { cluster: Uuid::from_u128(9), ..said };
        assert_eq!(verify(&other), Err(RecoveryError::OtherCluster));
    }

    #[test]
    fn recoveries_lead_from_the_founded_cluster_to_the_last_without_a_gap() {
        let world = ClusterFixture::new(3);
        let (first, chain) = (recovery(&world), world.chain());
        let next = NodeIdentity {
            cluster_id: "c3".to_owned(),
            member_id: "a3".to_owned(),
            incarnation: Incarnation([3; 16]),
        };
        let second = Recovery { was: first.is.clone(), is: next, ..first.clone() };
        let [first, second] = [first, second].map(|said| said.sign(&world.owner));
        let ends = |all: &[&Jws], founded| {
            let all: Vec<Jws> = all.iter().map(|jws| (*jws).clone()).collect();
            RecoveryChain::verify(&all, &chain, founded).map(|all| all.raft_cluster())
        };
        assert_eq!(ends(&[], 0xc1), Ok(None));
        assert_eq!(ends(&[&first], 0xc1), Ok(Some(0xc2)));
        assert_eq!(ends(&[&first, &second], 0xc1), Ok(Some(0xc3)));
        let broken = |found: &str, expected| {
            Err(RecoveryError::Broken { found: found.to_owned(), expected })
        };
        assert_eq!(ends(&[&first], 0xc2), broken("c1", 0xc2));
        assert_eq!(ends(&[&second], 0xc1), broken("c2", 0xc1));
        assert_eq!(ends(&[&first, &first], 0xc1), broken("c1", 0xc2));
        assert_eq!(ends(&vec![&first; MAX_RECOVERIES + 1], 0xc1), Err(RecoveryError::TooMany));
    }
}
