//! Decides which Raft cluster discovery follows: the founded one, or the one that the last recovery
//! made. These functions are pure.
//!
//! An operator's signature makes a recovery valid, whichever agent sends it. Discovery follows the
//! first chain that it receives, and a longer chain only if it extends that one. A chain that
//! branches off competes with it. Discovery can't know which of the two clusters the operators
//! want, so it stays with the first, and a person has to decide.

use discovery_types::jws::Jws;
use discovery_types::recovery::{Recovery, RecoveryChain, RecoveryError};
use discovery_types::statement::StatementChain;

use crate::store::changes::StoredRecovery;

/// The recoveries of one cluster that discovery follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lineage {
    founded: u64,
    followed: RecoveryChain,
}

/// How a received chain of recoveries relates to the chain that discovery follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LineageRelation {
    /// The received chain is the chain that discovery follows, or a prefix of it.
    Known,
    /// The received chain extends the chain that discovery follows.
    Longer(Lineage),
    /// The received chain branches off from the chain that discovery follows.
    Competing {
        /// Number of the first recovery that differs, counted from 1.
        number: usize,
        /// Statement of the first recovery that differs, from the received chain.
        jws: Jws,
    },
}

impl Lineage {
    /// Verifies the stored recoveries of a cluster that was founded as the Raft cluster `founded`.
    pub(crate) fn of(
        stored: &[StoredRecovery],
        chain: &StatementChain,
        founded: u64,
    ) -> Result<Self, RecoveryError> {
        let followed: Vec<Jws> =
            stored.iter().filter(|one| one.followed).map(|one| one.jws.clone()).collect();
        Ok(Self { founded, followed: RecoveryChain::verify(&followed, chain, founded)? })
    }

    /// Id of the Raft cluster that discovery follows.
    pub(crate) fn raft_cluster(&self) -> u64 {
        self.followed.raft_cluster().unwrap_or(self.founded)
    }

    /// Number of recoveries that were followed.
    pub(crate) fn count(&self) -> usize {
        self.followed.all().len()
    }

    /// Returns the newest recovery that discovery follows. `None` if it still follows the cluster
    /// that was founded.
    pub(crate) fn newest(&self) -> Option<&Recovery> {
        self.followed.newest()
    }

    /// The followed recovery with this number, counted from 1.
    pub(crate) fn recovery(&self, number: usize) -> Option<&(Jws, Recovery)> {
        self.followed.all().get(number.checked_sub(1)?)
    }

    /// The recoveries of a [`LineageRelation::Longer`] that come after the first `known` ones.
    pub(crate) fn since(&self, known: usize) -> &[(Jws, Recovery)] {
        self.followed.all().get(known..).unwrap_or_default()
    }

    /// Verifies a received chain and compares it with the chain that discovery follows. Nothing
    /// proves when a statement was signed, so the signer of the last statement must be an operator
    /// or owner now. The last statement builds on the earlier ones, so its signature confirms them
    /// as well.
    pub(crate) fn compare(
        &self,
        shown: &[Jws],
        chain: &StatementChain,
    ) -> Result<LineageRelation, RecoveryError> {
        let shown = RecoveryChain::verify(shown, chain, self.founded)?;
        let known = self.followed.all();
        let pairs = known.iter().zip(shown.all());
        let same = pairs.take_while(|((_, known), (_, shown))| known.is_same_step(shown)).count();
        let Some((next, _)) = shown.all().get(same) else { return Ok(LineageRelation::Known) };
        if let Some((last, _)) = shown.all().last() {
            Recovery::verify_now(last, chain)?;
        }
        if same < known.len() {
            return Ok(LineageRelation::Competing { number: same + 1, jws: next.clone() });
        }
        // Keep the first signature of each recovery, even if the received chain has another
        // signature of it.
        let kept = known.iter().chain(&shown.all()[same..]).map(|(jws, _)| jws.clone());
        let followed = RecoveryChain::verify(&kept.collect::<Vec<_>>(), chain, self.founded)?;
        Ok(LineageRelation::Longer(Self { founded: self.founded, followed }))
    }
}

#[cfg(test)]
mod tests {
    use discovery_types::digest::Incarnation;
    use discovery_types::fixtures::ClusterFixture;
    use discovery_types::key::SigningKey;
    use discovery_types::recovery::{MAX_RECOVERIES, NodeIdentity};

    use super::*;

    const FOUNDED: u64 = 0xc0;

    fn step(world: &ClusterFixture, was: u64, is: u64, signer: &SigningKey) -> Jws {
        let identity = |of: u64| NodeIdentity {
            cluster_id: format!("{of:x}"),
            member_id: format!("{:x}", of + 0x1000),
            incarnation: Incarnation(u128::from(of).to_be_bytes()),
        };
        let recovery = Recovery {
            version: 1,
            cluster: world.statement.cluster,
            statement: world.chain().newest_hash(),
            agent: *world.agents[0].public(),
            was: identity(was),
            is: identity(is),
            last_index: 7,
            last_term: 2,
            at: 1_700_000_000,
        };
        recovery.sign(signer)
    }

    fn followed(world: &ClusterFixture, steps: &[Jws]) -> Lineage {
        let stored: Vec<StoredRecovery> = (1..)
            .zip(steps)
            .map(|(number, jws)| StoredRecovery { number, jws: jws.clone(), followed: true })
            .collect();
        Lineage::of(&stored, &world.chain(), FOUNDED).unwrap()
    }

    #[test]
    fn a_longer_chain_is_followed_and_a_shorter_one_changes_nothing() {
        let world = ClusterFixture::new(3);
        let owner = &world.owner;
        let first = step(&world, FOUNDED, 0xc1, owner);
        let second = step(&world, 0xc1, 0xc2, owner);
        let nothing = followed(&world, &[]);
        assert_eq!((nothing.raft_cluster(), nothing.count()), (FOUNDED, 0));
        let one = nothing.compare(std::slice::from_ref(&first), &world.chain()).unwrap();
        let LineageRelation::Longer(one) = one else { panic!("{one:?}") };
        assert_eq!((one.raft_cluster(), one.since(0).len()), (0xc1, 1));
        let both = [first.clone(), second];
        let two = one.compare(&both, &world.chain()).unwrap();
        let LineageRelation::Longer(two) = two else { panic!("{two:?}") };
        assert_eq!((two.raft_cluster(), two.since(1).len()), (0xc2, 1));
        for shown in [&both[..], &both[..1], &[]] {
            assert_eq!(two.compare(shown, &world.chain()), Ok(LineageRelation::Known));
        }
    }

    #[test]
    fn a_recovery_that_was_signed_again_is_still_known() {
        let world = ClusterFixture::new(3);
        let known = followed(&world, &[step(&world, FOUNDED, 0xc1, &world.owner)]);
        let again =
            [step(&world, FOUNDED, 0xc1, &world.owner), step(&world, 0xc1, 0xc2, &world.owner)];
        assert_eq!(known.compare(&again[..1], &world.chain()), Ok(LineageRelation::Known));
        let longer = known.compare(&again, &world.chain()).unwrap();
        assert!(matches!(longer, LineageRelation::Longer(_)), "{longer:?}");
    }

    #[test]
    fn a_chain_that_branches_off_competes_whatever_its_length() {
        let world = ClusterFixture::new(3);
        let owner = &world.owner;
        let first = step(&world, FOUNDED, 0xc1, owner);
        let known = followed(&world, &[first.clone(), step(&world, 0xc1, 0xc2, owner)]);
        let other = step(&world, FOUNDED, 0xd1, owner);
        let longer =
            [other.clone(), step(&world, 0xd1, 0xd2, owner), step(&world, 0xd2, 0xd3, owner)];
        for shown in [&longer[..1], &longer[..]] {
            let relation = known.compare(shown, &world.chain()).unwrap();
            assert_eq!(relation, LineageRelation::Competing { number: 1, jws: other.clone() });
        }
        let late = [first, step(&world, 0xc1, 0xe2, owner)];
        let relation = known.compare(&late, &world.chain()).unwrap();
        assert_eq!(relation, LineageRelation::Competing { number: 2, jws: late[1].clone() });
    }

    #[test]
    fn only_operators_and_owners_sign_a_chain_and_only_of_this_cluster() {
        let world = ClusterFixture::new(3);
        let known = followed(&world, &[]);
        let refused = |shown: &[Jws]| known.compare(shown, &world.chain()).unwrap_err();
        for signer in [&world.agents[0], &world.issuer, &SigningKey::generate()] {
            let error = refused(&[step(&world, FOUNDED, 0xc1, signer)]);
            assert!(matches!(error, RecoveryError::Jws(_)), "{error}");
        }
        let gap = refused(&[step(&world, 0xc1, 0xc2, &world.owner)]);
        assert!(matches!(gap, RecoveryError::Broken { expected: FOUNDED, .. }), "{gap}");
        let other = ClusterFixture::new(3);
        let foreign = refused(&[step(&other, FOUNDED, 0xc1, &other.owner)]);
        assert_eq!(foreign, RecoveryError::OtherCluster);
        let many = vec![step(&world, FOUNDED, 0xc1, &world.owner); MAX_RECOVERIES + 1];
        assert_eq!(refused(&many), RecoveryError::TooMany);
    }
}
