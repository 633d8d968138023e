//! The history of a member, according to its data directory, and whether the member may start.

use node_consensus::Guards;

/// Traces of a member's history in its data directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StartEvidence {
    /// Whether there is a tombstone, because the member was removed.
    pub has_tombstone: bool,
    /// Whether there is a log.
    pub has_log: bool,
    /// Whether a log was begun, according to the log mark.
    pub has_log_mark: bool,
}

/// Kind of start that a member makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartKind {
    /// The member has no log yet. It is a first member of a new cluster, or joins a running cluster
    /// and gets the state from it.
    First,
    /// The member continues from its log.
    Restart,
}

/// Why a member may never start again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartRefusal {
    /// The member was removed from its cluster.
    Removed,
    /// The member's log is gone, and with it the votes and acknowledgements that the member sent to
    /// its peers.
    LogMissing,
}

impl StartEvidence {
    /// Returns the kind of start for a member with this history. Only tests pass other `guards`
    /// than [`Guards::ALL`].
    ///
    /// # Errors
    /// Fails if the member must not start. A tombstone or a missing log always prevents a first
    /// start.
    pub fn start_kind(self, guards: Guards) -> Result<StartKind, StartRefusal> {
        if self.has_tombstone {
            return if guards.respect_tombstones() {
                Err(StartRefusal::Removed)
            } else {
                Ok(StartKind::First)
            };
        }
        match (self.has_log, self.has_log_mark) {
            (true, _) => Ok(StartKind::Restart),
            (false, true) => Err(StartRefusal::LogMissing),
            (false, false) => Ok(StartKind::First),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_directory_without_history_allows_a_first_start() {
        let start = |has_tombstone, has_log, had_log| {
            StartEvidence { has_tombstone, has_log, has_log_mark: had_log }.start_kind(Guards::ALL)
        };
        assert_eq!(start(false, false, false), Ok(StartKind::First));
        for had_log in [false, true] {
            assert_eq!(start(false, true, had_log), Ok(StartKind::Restart));
            for has_log in [false, true] {
                assert_eq!(start(true, has_log, had_log), Err(StartRefusal::Removed));
            }
        }
        assert_eq!(start(false, false, true), Err(StartRefusal::LogMissing));
    }
}
