//! What a consensus instance is told at its start, and the relations that must hold.

use thiserror::Error;

use crate::{Entry, Guards, HardState, Members, Position, Terms};

/// Knobs. [`Config::new`] has the product's values.
#[derive(Clone, Debug)]
pub struct Config {
    /// This member; never 0.
    pub member: u64,
    /// How often this member's log has been opened; part of every read context.
    pub boot: u64,
    /// Where election time-outs come from.
    pub seed: u64,
    /// Ticks without a leader before an election; the time-out is drawn from one to two times this.
    pub election_ticks: usize,
    /// Ticks between a leader's heartbeats.
    pub heartbeat_ticks: usize,
    /// Bytes of entries in one append message (one entry always fits).
    pub max_message_bytes: u64,
    /// Append messages on their way to one peer; times `max_message_bytes` is the bound in bytes.
    pub max_inflight_messages: usize,
    /// Bytes of proposals that a leader holds uncommitted before it refuses more.
    pub max_uncommitted_bytes: u64,
    /// Bytes of committed entries in one [`Ready`](crate::Ready).
    pub max_committed_bytes: u64,
    /// Bytes of entries kept in memory besides those not yet applied.
    pub cache_bytes: usize,
    /// Always [`Guards::ALL`] outside tests.
    pub guards: Guards,
}

impl Config {
    /// The product's values: at most 32 MiB in flight to a peer.
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

/// What the log and the store hold when the process starts.
#[derive(Clone, Debug, Default)]
pub struct Initial {
    /// Term, vote and commit index as last persisted.
    pub hard_state: HardState,
    /// The position before the first entry that the log still has.
    pub base: Position,
    /// Terms of all entries after `base`.
    pub terms: Terms,
    /// The entries after `applied`, all of them, in order.
    pub entries: Vec<Entry>,
    /// The last entry that the store has applied.
    pub applied: Position,
    /// Who belongs to the cluster once `applied` is. A member that is none of them was removed before.
    pub members: Members,
}

/// A configuration or a recovered state that contradicts itself.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    /// Id 0 means "nobody".
    #[error("member id 0 can't be used")]
    ZeroId,
    /// Time-outs that can't work.
    #[error(
        "the election time-out ({election} ticks) must be longer than a heartbeat ({heartbeat} ticks)"
    )]
    Timeouts {
        /// Configured.
        election: usize,
        /// Configured.
        heartbeat: usize,
    },
    /// A bound of 0.
    #[error("{name} can't be 0")]
    ZeroBound {
        /// Which.
        name: &'static str,
    },
    /// The store is not within the log.
    #[error("the store has applied index {applied}, the log holds {first} to {last}")]
    AppliedOutsideLog {
        /// The store's applied index.
        applied: u64,
        /// The log's first index.
        first: u64,
        /// The log's last index.
        last: u64,
    },
    /// Log and store disagree about one entry.
    #[error("entry {index} has term {log} in the log and {store} in the store")]
    TermMismatch {
        /// Where.
        index: u64,
        /// According to the log.
        log: u64,
        /// According to the store.
        store: u64,
    },
    /// The entries given are not those after `applied`.
    #[error("entries given start at {found}, not at {expected}, or end early")]
    Entries {
        /// First index given.
        found: u64,
        /// First index due.
        expected: u64,
    },
    /// The library found something else.
    #[error("consensus can't start: {0}")]
    Library(String),
}

pub(crate) fn validate(config: &Config, initial: &Initial) -> Result<(), ConfigError> {
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

fn validate_log(initial: &Initial) -> Result<(), ConfigError> {
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
