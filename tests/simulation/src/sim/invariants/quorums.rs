//! Invariant: any quorum of a configuration overlaps with any quorum of the next one (Raft
//! dissertation, section 4.1).

use node_consensus::Members;

use crate::sim::InvariantViolation;

/// Checks two consecutive configurations.
pub fn check_overlap(before: &Members, after: &Members) -> Result<(), InvariantViolation> {
    let both = before.voters.iter().filter(|id| after.voters.contains(id)).count();
    // Returns the smallest number of voters of both configurations that a quorum of `members` can
    // have.
    let shared = |members: &Members| {
        let quorum = members.voters.len() / 2 + 1;
        quorum.saturating_sub(members.voters.len() - both)
    };
    if shared(before) + shared(after) > both {
        return Ok(());
    }
    let what = format!("{:?}, then {:?}", before.voters, after.voters);
    Err(InvariantViolation::new("consecutive quorums meet", what))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn voters(voters: &[u64]) -> Members {
        Members { voters: voters.to_vec(), learners: Vec::new() }
    }

    #[test]
    fn quorums_overlap_if_one_voter_changes_at_a_time() {
        for (before, after, good) in [
            (&[1, 2, 3][..], &[1, 2, 3, 4][..], true),
            (&[1, 2, 3, 4], &[1, 2, 3], true),
            (&[1], &[1, 2], true),
            (&[1, 2, 3], &[1, 2, 3, 4, 5], false),
            (&[1, 2, 3], &[1], false),
            (&[1, 2, 3], &[1, 2, 4], false),
            (&[1], &[2], false),
        ] {
            assert_eq!(
                check_overlap(&voters(before), &voters(after)).is_ok(),
                good,
                "{before:?} {after:?}"
            );
            assert_eq!(
                check_overlap(&voters(after), &voters(before)).is_ok(),
                good,
                "{after:?} {before:?}"
            );
        }
    }
}
