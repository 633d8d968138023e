//! What a data directory says of its member's past, and whether the member may start.

use node_consensus::Guards;

/// What stands in a data directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Past {
    /// Its member was removed.
    pub has_tombstone: bool,
    /// There is a log.
    pub has_log: bool,
    /// A log was begun, as its mark says.
    pub had_log: bool,
}

/// How a member starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// It begins: with the others of a new cluster, or with the state of one that runs.
    First,
    /// It goes on from its log.
    Again,
}

/// Why it doesn't, ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoStart {
    /// It was removed.
    Removed,
    /// It had a log, and with it what it promised.
    LogGone,
}

impl Past {
    /// How a member of this past starts. `guards` are [`Guards::ALL`] but in tests.
    ///
    /// # Errors
    /// If it may not: no way leads from a tombstone, or from a log that is gone, to a beginning.
    pub fn start(self, guards: Guards) -> Result<Start, NoStart> {
        if self.has_tombstone {
            return if guards.tombstones_hold() { Err(NoStart::Removed) } else { Ok(Start::First) };
        }
        match (self.has_log, self.had_log) {
            (true, _) => Ok(Start::Again),
            (false, true) => Err(NoStart::LogGone),
            (false, false) => Ok(Start::First),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_empty_directory_is_a_beginning() {
        let start = |has_tombstone, has_log, had_log| {
            Past { has_tombstone, has_log, had_log }.start(Guards::ALL)
        };
        assert_eq!(start(false, false, false), Ok(Start::First));
        for had_log in [false, true] {
            assert_eq!(start(false, true, had_log), Ok(Start::Again));
            for has_log in [false, true] {
                assert_eq!(start(true, has_log, had_log), Err(NoStart::Removed));
            }
        }
        assert_eq!(start(false, false, true), Err(NoStart::LogGone));
    }
}
