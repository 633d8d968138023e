//! Start-up configuration and recovered state of a consensus instance, and the checks on them.

use thiserror::Error;

use crate::{Entry, Guards, HardState, Members, Position, Terms};

/// Tuning parameters of one consensus instance. [`Config::new`] has the product's values.
#[derive(Clone, Debug)]
pub struct Config {
    /// Id of this member; never 0.
    pub member: u64,
    /// Boot counter: how many times this member's log has been opened. Every read context contains
    /// it.
    pub boot: u64,
    /// Seed from which all election time-outs are derived.
    pub seed: u64,
    /// Minimum election time-out in ticks; each time-out is drawn from one to two times this value.
    pub election_ticks: usize,
    /// Ticks between a leader's heartbeats.
    pub heartbeat_ticks: usize,
    /// Maximum bytes of entries in one append message. A single larger entry is sent nevertheless.
    pub max_message_bytes: u64,
    /// Maximum unacknowledged append messages per peer. Multiplied by `max_message_bytes`, this
    /// bounds the bytes in flight.
    pub max_inflight_messages: usize,
    /// Maximum bytes of uncommitted proposals that a leader holds before it refuses more.
    pub max_uncommitted_bytes: u64,
    /// Maximum bytes of committed entries in one [`Ready`](crate::Ready).
    pub max_committed_bytes: u64,
    /// Maximum bytes of applied entries kept in memory. Unapplied entries are always kept too.
    pub cache_bytes: usize,
    /// Safety rules in force: always [`Guards::ALL`] outside tests.
    pub guards: Guards,
}

impl Config {
    /// Returns the product's values: at most 32 MiB in flight to a peer.
    pub fn new(member: u64, boot: u64, seed: u64) -> Self {
        Self {
            member,
            boot,
            seed,
            election_ticks: 10,
            heartbeat_ticks: 1,
            max_message_bytes: 512 * 1024,
            max_inflight_messages: 64,
            max_uncommitted_bytes: 64 * 1024 * 1024,
            max_committed_bytes: 4 * 1024 * 1024,
            cache_bytes: 4 * 1024 * 1024,
            guards: Guards::ALL,
        }
    }
}

/// State that the process recovers from the log and the store when it starts.
#[derive(Clone, Debug, Default)]
pub struct InitialState {
    /// Term, vote and commit index as last persisted.
    pub hard_state: HardState,
    /// Position just before the first entry that the log still has.
    pub base: Position,
    /// Terms of all entries after `base`.
    pub terms: Terms,
    /// All entries after `applied`, in order.
    pub entries: Vec<Entry>,
    /// Position of the last entry that the store has applied.
    pub applied: Position,
    /// Members of the cluster as of `applied`. If this member is not among them, it was removed
    /// earlier.
    pub members: Members,
}

/// A configuration or a recovered state that contradicts itself.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    /// Id 0 is reserved to mean "no member".
    #[error("member id 0 can't be used")]
    ZeroId,
    /// The election time-out is not longer than the heartbeat interval, or that interval is 0.
    #[error(
        "the election time-out ({election} ticks) must be longer than a heartbeat ({heartbeat} ticks)"
    )]
    Timeouts {
        /// Configured election time-out, in ticks.
        election: usize,
        /// Configured heartbeat interval, in ticks.
        heartbeat: usize,
    },
    /// A limit is configured as 0.
    #[error("{name} can't be 0")]
    ZeroBound {
        /// Name of the configuration field.
        name: &'static str,
    },
    /// The store's applied index lies outside the log.
    #[error("the store has applied index {applied}, the log holds {first} to {last}")]
    AppliedOutsideLog { applied: u64, first: u64, last: u64 },
    /// Log and store disagree about the term of one entry.
    #[error("entry {index} has term {log} in the log and {store} in the store")]
    TermMismatch {
        /// Index of the entry on whose term log and store disagree.
        index: u64,
        /// Term that the log has for the entry at `index`.
        log: u64,
        /// Term that the store has for the entry at `index`.
        store: u64,
    },
    /// The given entries are not exactly those after `applied`.
    #[error("entries given start at {found}, not at {expected}, or end early")]
    Entries {
        /// Index of the first of the given entries.
        found: u64,
        /// Index at which the entries should start.
        expected: u64,
    },
    /// The library refused to start for another reason.
    #[error("consensus can't start: {0}")]
    Library(String),
}

pub(crate) fn validate(config: &Config, initial: &InitialState) -> Result<(), ConfigError> {
    let members = &initial.members;
    if config.member == 0 || members.voters.contains(&0) || members.learners.contains(&0) {
        return Err(ConfigError::ZeroId);
    }
    if config.heartbeat_ticks == 0 || config.election_ticks <= config.heartbeat_ticks {
        return Err(ConfigError::Timeouts {
            election: config.election_ticks,
            heartbeat: config.heartbeat_ticks,
        });
    }
    for (name, value) in [
        ("max_message_bytes", config.max_message_bytes),
        ("max_inflight_messages", config.max_inflight_messages as u64),
        ("max_uncommitted_bytes", config.max_uncommitted_bytes),
        ("max_committed_bytes", config.max_committed_bytes),
    ] {
        if value == 0 {
            return Err(ConfigError::ZeroBound { name });
        }
    }
    validate_log(initial)
}

fn validate_log(initial: &InitialState) -> Result<(), ConfigError> {
    let last = initial.terms.last().map_or(initial.base, |last| last);
    let applied = initial.applied;
    if applied.index < initial.base.index || applied.index > last.index {
        return Err(ConfigError::AppliedOutsideLog {
            applied: applied.index,
            first: initial.base.index + 1,
            last: last.index,
        });
    }
    let log = if applied.index == initial.base.index {
        Some(initial.base.term)
    } else {
        initial.terms.get(applied.index)
    };
    if log != Some(applied.term) {
        return Err(ConfigError::TermMismatch {
            index: applied.index,
            log: log.unwrap_or(0),
            store: applied.term,
        });
    }
    let expected = applied.index + 1;
    let found = initial.entries.first().map_or(expected, |entry| entry.index);
    let end = initial.entries.last().map_or(applied.index, |entry| entry.index);
    let contiguous = initial.entries.windows(2).all(|pair| pair[0].index + 1 == pair[1].index);
    if found != expected || end != last.index || !contiguous {
        return Err(ConfigError::Entries { found, expected });
    }
    Ok(())
}
