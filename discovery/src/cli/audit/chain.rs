//! Verification of an event chain against its own hashes, and against a checkpoint. Pure, but for
//! the checkpoint's file.

use std::collections::BTreeMap;
use std::path::Path;

use discovery_types::api::EventView;
use discovery_types::digest::Digest;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::cli::CliError;

/// Version of the checkpoint's format.
const VERSION: u32 = 1;
/// Maximum length of a checkpoint's file, in bytes: a million chains.
const MAX_FILE_BYTES: u64 = 160 << 20;

/// Why the verification of an event chain failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuditError {
    /// An event's content doesn't have the event's hash.
    #[error("event {number} of {chain} has another hash than its content: somebody changed it")]
    Changed {
        chain: String,
        /// Number of the event.
        number: u64,
    },
    /// An event doesn't continue the event before it.
    #[error(
        "event {number} of {chain} doesn't continue the one before it: events were removed or changed"
    )]
    Broken {
        chain: String,
        /// Number of the event.
        number: u64,
    },
    /// The chain has another event than at the last verification.
    #[error(
        "event {number} of {chain} is another one than at the last verification: its history was \
         rewritten"
    )]
    Rewritten {
        chain: String,
        /// Number of the event.
        number: u64,
    },
    /// The chain is shorter than at the last verification.
    #[error(
        "{chain} had {known} events at the last verification, and has {found} now: its history went \
         backwards"
    )]
    Backwards {
        chain: String,
        /// Number of events at the last verification.
        known: u64,
        /// Number of events that the chain has now.
        found: u64,
    },
    /// The service doesn't list a cluster that was there at the last verification.
    #[error("the cluster {stream} was there at the last verification, and isn't any more")]
    Gone {
        /// Id of the cluster.
        stream: Uuid,
    },
    /// The checkpoint's file can't be read.
    #[error("the checkpoint can't be read: {0}")]
    Checkpoint(String),
}

/// End of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ChainHead {
    /// Number of the last event; 0 without any.
    pub number: u64,
    /// Hash of the last event; zeros without any.
    pub hash: Digest,
}

/// Verifies a chain, one event after the other.
pub(super) struct ChainVerifier {
    stream: Uuid,
    name: String,
    known: Option<ChainHead>,
    head: ChainHead,
}

impl ChainVerifier {
    /// Begins the verification of a chain at its start. `known` is the chain's end at the last
    /// verification.
    pub(super) fn new(stream: Uuid, name: String, known: Option<ChainHead>) -> Self {
        let head = ChainHead { number: 0, hash: Digest([0; 32]) };
        Self { stream, name, known, head }
    }

    /// Returns the number of the last event.
    pub(super) fn last(&self) -> u64 {
        self.head.number
    }

    /// Verifies the next event.
    pub(super) fn add(&mut self, event: &EventView) -> Result<(), AuditError> {
        let (chain, number) = (self.name.clone(), event.number);
        if number != self.head.number + 1 || event.previous != self.head.hash {
            return Err(AuditError::Broken { chain, number });
        }
        if event.computed_hash(&self.stream) != event.hash {
            return Err(AuditError::Changed { chain, number });
        }
        if self.known.is_some_and(|known| known.number == number && known.hash != event.hash) {
            return Err(AuditError::Rewritten { chain, number });
        }
        self.head = ChainHead { number, hash: event.hash };
        Ok(())
    }

    /// Returns the chain's end.
    pub(super) fn end(self) -> Result<ChainHead, AuditError> {
        match self.known {
            Some(known) if known.number > self.head.number => Err(AuditError::Backwards {
                chain: self.name,
                known: known.number,
                found: self.head.number,
            }),
            _ => Ok(self.head),
        }
    }
}

/// Ends of all chains at the last verification.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Checkpoint {
    version: u32,
    chains: BTreeMap<Uuid, ChainHead>,
}

impl Default for Checkpoint {
    fn default() -> Self {
        Self { version: VERSION, chains: BTreeMap::new() }
    }
}

impl Checkpoint {
    /// Reads a checkpoint. A missing file counts as a checkpoint without chains.
    pub(super) fn read(file: &Path) -> Result<Self, CliError> {
        if !file.exists() {
            return Ok(Self::default());
        }
        let bytes = muster_files::read_named(file, MAX_FILE_BYTES)
            .map_err(|error| AuditError::Checkpoint(error.to_string()))?;
        let found: Self = serde_json::from_slice(&bytes)
            .map_err(|error| AuditError::Checkpoint(error.to_string()))?;
        match found.version {
            VERSION => Ok(found),
            other => Err(AuditError::Checkpoint(format!("its version is {other}")).into()),
        }
    }

    /// Writes the checkpoint to `file`. The file is replaced as a whole, so a crash can't leave a
    /// part of a checkpoint.
    pub(super) fn write(&self, file: &Path) -> Result<(), CliError> {
        let text = serde_json::to_string(self).expect("texts always serialise");
        Ok(muster_files::replace(file, format!("{text}\n").as_bytes())?)
    }

    pub(super) fn head(&self, stream: Uuid) -> Option<&ChainHead> {
        self.chains.get(&stream)
    }

    pub(super) fn set_head(&mut self, stream: Uuid, head: ChainHead) {
        self.chains.insert(stream, head);
    }

    /// Returns a chain of the checkpoint that isn't among `present`.
    pub(super) fn missing(&self, present: impl Iterator<Item = Uuid>) -> Option<Uuid> {
        let present: std::collections::BTreeSet<Uuid> = present.collect();
        self.chains.keys().find(|stream| !present.contains(stream)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: Uuid = Uuid::from_u128(7);

    /// Returns a chain of three events.
    fn events() -> Vec<EventView> {
        let mut previous = Digest([0; 32]);
        let event = |number| {
            let mut event = EventView {
                number,
                at_us: 1_000,
                kind: "granted".to_owned(),
                body: format!(r#"{{"n":{number}}}"#),
                previous,
                hash: previous,
            };
            event.hash = event.computed_hash(&STREAM);
            previous = event.hash;
            event
        };
        (1..=3).map(event).collect()
    }

    fn verify(events: &[EventView], known: Option<ChainHead>) -> Result<ChainHead, AuditError> {
        let mut verifier = ChainVerifier::new(STREAM, "demo".to_owned(), known);
        for event in events {
            verifier.add(event)?;
        }
        verifier.end()
    }

    #[test]
    fn a_whole_chain_is_verified_up_to_its_end() {
        let chain = events();
        let head = verify(&chain, None).unwrap();
        assert_eq!(head, ChainHead { number: 3, hash: chain[2].hash });
        assert_eq!(verify(&chain, Some(head)), Ok(head));
        assert_eq!(verify(&[], None).unwrap().number, 0);
    }

    #[test]
    fn a_changed_removed_or_moved_event_is_noticed() {
        let chain = "demo".to_owned();
        for number in 1..=3 {
            let mut changed = events();
            changed[number - 1].body.push(' ');
            let number = number as u64;
            let error = AuditError::Changed { chain: chain.clone(), number };
            assert_eq!(verify(&changed, None), Err(error));
        }
        let mut removed = events();
        removed.remove(1);
        assert_eq!(
            verify(&removed, None),
            Err(AuditError::Broken { chain: chain.clone(), number: 3 })
        );
        let mut foreign = ChainVerifier::new(Uuid::nil(), chain.clone(), None);
        assert_eq!(foreign.add(&events()[0]), Err(AuditError::Changed { chain, number: 1 }));
    }

    #[test]
    fn a_checkpoint_notices_a_chain_that_was_computed_anew_or_cut() {
        let chain = "demo".to_owned();
        let head = verify(&events(), None).unwrap();
        let known = ChainHead { hash: Digest([9; 32]), ..head };
        let error = AuditError::Rewritten { chain: chain.clone(), number: 3 };
        assert_eq!(verify(&events(), Some(known)), Err(error));
        let cut = verify(&events()[..2], Some(head));
        assert_eq!(cut, Err(AuditError::Backwards { chain, known: 3, found: 2 }));
    }

    #[test]
    fn a_checkpoint_is_kept_in_a_file_and_misses_chains_that_are_gone() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("checkpoint");
        let mut checkpoint = Checkpoint::read(&file).unwrap();
        assert_eq!(checkpoint, Checkpoint::default());
        checkpoint.set_head(STREAM, verify(&events(), None).unwrap());
        checkpoint.write(&file).unwrap();
        checkpoint.write(&file).unwrap();
        assert_eq!(Checkpoint::read(&file).unwrap(), checkpoint);
        assert_eq!(checkpoint.missing([Uuid::nil()].into_iter()), Some(STREAM));
        assert_eq!(checkpoint.missing([STREAM, Uuid::nil()].into_iter()), None);
        std::fs::write(&file, "{}").unwrap();
        assert!(Checkpoint::read(&file).is_err());
    }
}
