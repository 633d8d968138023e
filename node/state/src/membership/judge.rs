//! Reasons against a change of members at this moment, and the check whether a learner may become a
//! voter. The rules about quorums are etcd's; they are in the crate `member_rules`.

use member_rules::QuorumObjection;

/// Why a change of members is not allowed now. The API has its own texts for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeObjection {
    /// The members that have started are too few for a quorum.
    #[error("not enough started members")]
    NotEnoughStarted,
    /// The members that have been healthy for long enough are too few for a quorum.
    #[error("unhealthy cluster")]
    Unhealthy,
    /// The learner lacks too many entries, or is not connected.
    #[error("the learner is not in sync with the leader")]
    LearnerNotReady,
    /// The learner has not answered the last heartbeats. Possibly its answers are just late, so the
    /// change should be judged again soon.
    #[error("the learner has not answered the leader's last heartbeats")]
    LearnerSilent,
    /// The last change of members is not yet known to be on the disks of a quorum of the remaining
    /// voters.
    #[error("no quorum of the members that stay has heard of the last change yet")]
    Unsettled,
    /// The cluster already has the maximum number of learners.
    #[error("too many learner members in cluster")]
    TooManyLearners,
}

impl From<QuorumObjection> for ChangeObjection {
    fn from(objection: QuorumObjection) -> Self {
        match objection {
            QuorumObjection::NotEnoughStarted { .. } => Self::NotEnoughStarted,
            QuorumObjection::Unhealthy { .. } => Self::Unhealthy,
        }
    }
}

/// Replication progress of a learner, as its leader knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LearnerProgress {
    /// Whether the learner is connected, and has answered at least once.
    pub connected: bool,
    /// Whether the learner has answered one of the last heartbeats.
    pub prompt: bool,
    /// Index of the last entry that the learner has on disk.
    pub matched: u64,
    /// Index of the leader's last entry.
    pub last: u64,
}

impl LearnerProgress {
    /// Checks that a learner, added by the entry `added`, lacks at most `most` entries and answers
    /// heartbeats.
    pub(super) fn check_in_sync(self, added: u64, most: u64) -> Result<(), ChangeObjection> {
        let Self { connected, prompt, matched, last } = self;
        let fetched = matched >= added && last.saturating_sub(matched) <= most;
        match (connected && fetched, prompt) {
            (false, _) => Err(ChangeObjection::LearnerNotReady),
            (true, false) => Err(ChangeObjection::LearnerSilent),
            (true, true) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use member_rules::IN_SYNC_ENTRIES;

    use super::*;

    #[test]
    fn a_learner_is_in_sync_if_it_lacks_few_entries() {
        let progress = |connected, prompt, matched, last| {
            LearnerProgress { connected, prompt, matched, last }.check_in_sync(7, IN_SYNC_ENTRIES)
        };
        let ready = |connected, matched, last| progress(connected, true, matched, last);
        assert_eq!(ready(true, 1_000_000, 1_000_000 + IN_SYNC_ENTRIES), Ok(()));
        // The learner has more than nine tenths of the log, but still lacks too many entries.
        let behind = Err(ChangeObjection::LearnerNotReady);
        assert_eq!(ready(true, 1_000_000, 1_000_001 + IN_SYNC_ENTRIES), behind);
        // The learner was just added to a young cluster and has acknowledged nothing yet.
        assert_eq!(ready(true, 0, 9), behind);
        assert_eq!(ready(false, 9, 9), behind);
        assert_eq!(ready(true, 7, 9), Ok(()));
        assert_eq!(progress(true, false, 7, 9), Err(ChangeObjection::LearnerSilent));
        assert_eq!(progress(false, false, 7, 9), behind);
        assert_eq!(progress(true, false, 0, 9), behind);
    }
}
