//! Who takes part in consensus, and how that changes.

/// Who votes and who only receives, both ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// Members that vote and campaign.
    pub voters: Vec<u64>,
    /// Members that only receive.
    pub learners: Vec<u64>,
}

impl Members {
    pub(crate) fn sorted(&self) -> Self {
        let mut members = self.clone();
        members.voters.sort_unstable();
        members.learners.sort_unstable();
        members
    }

    /// Whether this one is a voter or a learner.
    pub fn contains(&self, id: u64) -> bool {
        self.voters.contains(&id) || self.learners.contains(&id)
    }
}

/// One step from one configuration to the next: their majorities have a member in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfChange {
    /// A new member that votes, or a learner that does from now on.
    Voter(u64),
    /// A new member that only receives.
    Learner(u64),
    /// A member less.
    Remove(u64),
}
