//! Record of a peer, and the streams to and from its processes.
//!
//! A stream is accepted for what its process proved when it was opened. When the record changes,
//! each stream is checked against the new one. If its process has proven what the record now binds,
//! the stream and the work on it continue, whatever else has changed. Otherwise the stream ends.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

use super::Peer;
use crate::identity::{Incarnation, NodeKey};

/// Identity that the process at the other end of a stream has proven in its hello and its
/// certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Proof {
    pub incarnation: Incarnation,
    /// Random number of the process.
    pub run: u64,
    pub key: Option<NodeKey>,
}

impl Proof {
    /// Returns whether a process with this proof may act as the member of `record`.
    fn fits(&self, record: &Peer) -> bool {
        record.incarnation.is_none_or(|bound| bound == self.incarnation)
            && (record.node_key.is_none() || record.node_key == self.key)
    }
}

/// Record and streams of one peer.
pub(super) struct Registry {
    state: Mutex<State>,
    /// Token that ends everything of the peer.
    gone: CancellationToken,
}

struct State {
    record: Arc<Peer>,
    next: u64,
    streams: BTreeMap<u64, (Proof, CancellationToken)>,
}

impl Registry {
    pub(super) fn new(record: Peer, gone: CancellationToken) -> Self {
        let state = State { record: Arc::new(record), next: 0, streams: BTreeMap::new() };
        Self { state: Mutex::new(state), gone }
    }

    /// Returns the current record.
    pub(super) fn record(&self) -> Arc<Peer> {
        Arc::clone(&self.lock().record)
    }

    /// Replaces the record, and ends the streams that don't fit the new one. Returns false if
    /// nothing changed.
    pub(super) fn update(&self, record: Peer) -> bool {
        let mut state = self.lock();
        if *state.record == record {
            return false;
        }
        for (proof, ends) in state.streams.values() {
            if !proof.fits(&record) {
                ends.cancel();
            }
        }
        state.record = Arc::new(record);
        true
    }

    /// Registers a stream whose hello was accepted. Returns `None` if the record has changed
    /// meanwhile, and the hello would now be refused.
    pub(super) fn enter(&self, proof: Proof) -> Option<Registered<'_>> {
        let mut state = self.lock();
        if !proof.fits(&state.record) {
            return None;
        }
        let (number, ends) = (state.next, self.gone.child_token());
        state.next += 1;
        state.streams.insert(number, (proof, ends.clone()));
        Some(Registered { registry: self, number, ends })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Guard that keeps a stream registered.
pub(super) struct Registered<'a> {
    registry: &'a Registry,
    number: u64,
    /// Token that is cancelled when the stream must end: the peer is gone, or the stream no longer
    /// fits its record.
    pub ends: CancellationToken,
}

impl Registered<'_> {
    /// Returns the stream's number, which no other stream of the peer has had.
    pub(super) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.registry.lock().streams.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::PeerUrl, identity::MemberId};

    const PROOF: Proof =
        Proof { incarnation: Incarnation([1; 16]), run: 1, key: Some(NodeKey([1; 32])) };

    fn record() -> Peer {
        Peer { id: MemberId(1), urls: Vec::new(), incarnation: None, node_key: None }
    }

    #[test]
    fn a_stream_goes_on_under_each_record_that_its_process_has_proven() {
        let registry = Registry::new(record(), CancellationToken::new());
        let stream = registry.enter(PROOF).unwrap();
        let urls = vec![PeerUrl::parse("http://127.0.0.1:1").unwrap()];
        let moved = Peer { urls, ..record() };
        let bound = Peer { incarnation: Some(PROOF.incarnation), node_key: PROOF.key, ..record() };
        for record in [moved, bound] {
            assert!(registry.update(record.clone()) && !registry.update(record));
            assert!(!stream.ends.is_cancelled());
        }
    }

    #[test]
    fn a_stream_ends_with_the_first_record_that_its_process_does_not_fit() {
        let another = [
            Peer { incarnation: Some(Incarnation([9; 16])), ..record() },
            Peer { node_key: Some(NodeKey([9; 32])), ..record() },
        ];
        for record_of_another in another {
            let registry = Registry::new(record(), CancellationToken::new());
            let stream = registry.enter(PROOF).unwrap();
            registry.update(record_of_another);
            assert!(stream.ends.is_cancelled());
            assert!(registry.enter(PROOF).is_none(), "its hello was accepted a moment before");
        }
    }

    #[test]
    fn a_stream_that_ended_is_forgotten_and_all_end_with_the_peer() {
        let gone = CancellationToken::new();
        let registry = Registry::new(record(), gone.clone());
        let (first, second) = (registry.enter(PROOF).unwrap(), registry.enter(PROOF).unwrap());
        drop(first);
        assert_eq!(registry.lock().streams.len(), 1);
        gone.cancel();
        assert!(second.ends.is_cancelled());
    }
}
