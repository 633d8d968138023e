//! Membership as consensus sees it, and single steps that change it.

/// Voters and learners of a configuration, each list in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// Members that vote and may become leader.
    pub voters: Vec<u64>,
    /// Members that receive entries without a vote.
    pub learners: Vec<u64>,
}

impl Members {
    pub(crate) fn sorted(&self) -> Self {
        let mut members = self.clone();
        members.voters.sort_unstable();
        members.learners.sort_unstable();
        members
    }

    /// Returns whether member `id` is a voter or a learner.
    pub fn contains(&self, id: u64) -> bool {
        self.voters.contains(&id) || self.learners.contains(&id)
    }
}

/// A single-step change of the configuration. The majorities before and after it always overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfChange {
    /// Adds a voter, or promotes a learner to voter.
    Voter(u64),
    /// Adds a learner: a member that only receives entries.
    Learner(u64),
    /// Removes a voter or learner.
    Remove(u64),
}
