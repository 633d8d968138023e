//! Record of one peer, and the streams of its processes.
//!
//! A stream is accepted by the identity that its process has proven: incarnation and key. When the
//! peer's record changes, each stream is checked again. A stream continues if its process still
//! fits the new record, whatever else has changed. Otherwise the stream ends.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use node_state::identity::{Incarnation, NodeKey};
use tokio_util::sync::CancellationToken;

use super::PeerRecord;

/// Identity that the process at the other end of a stream has proven by its hello and its
/// certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Proof {
    pub incarnation: Incarnation,
    /// Random number that identifies the process.
    pub run: u64,
    pub key: Option<NodeKey>,
}

impl Proof {
    /// Returns whether a process with this proof may act as the member that `record` describes.
    fn fits(&self, record: &PeerRecord) -> bool {
        record.incarnation.is_none_or(|bound| bound == self.incarnation)
            && (record.node_key.is_none() || record.node_key == self.key)
    }
}

/// Record and streams of one peer.
pub(super) struct Registry {
    state: Mutex<State>,
    /// Token that ends all tasks of the peer.
    cancellation: CancellationToken,
}

struct State {
    record: Arc<PeerRecord>,
    next: u64,
    streams: BTreeMap<u64, (Proof, CancellationToken)>,
}

impl Registry {
    pub(super) fn new(record: PeerRecord, gone: CancellationToken) -> Self {
        let state = State { record: Arc::new(record), next: 0, streams: BTreeMap::new() };
        Self { state: Mutex::new(state), cancellation: gone }
    }

    /// Returns the current record.
    pub(super) fn record(&self) -> Arc<PeerRecord> {
        Arc::clone(&self.lock().record)
    }

    /// Replaces the record, and ends the streams that don't fit the new one. Returns false if
    /// nothing changed.
    pub(super) fn update(&self, record: PeerRecord) -> bool {
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

    /// Registers a stream whose hello was accepted. Returns `None` if the peer's record has changed
    /// meanwhile and no longer fits `proof`.
    pub(super) fn register(&self, proof: Proof) -> Option<StreamRegistration<'_>> {
        let mut state = self.lock();
        if !proof.fits(&state.record) {
            return None;
        }
        let (number, ends) = (state.next, self.cancellation.child_token());
        state.next += 1;
        state.streams.insert(number, (proof, ends.clone()));
        Some(StreamRegistration { registry: self, number, cancellation: ends })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Guard that keeps a stream registered.
pub(super) struct StreamRegistration<'a> {
    registry: &'a Registry,
    number: u64,
    /// Token that is cancelled when the stream must end. Either the peer was removed, or the
    /// process no longer fits the peer's record.
    pub cancellation: CancellationToken,
}

impl StreamRegistration<'_> {
    /// Returns the stream's number. No other stream of this peer ever has the same number.
    pub(super) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for StreamRegistration<'_> {
    fn drop(&mut self) {
        self.registry.lock().streams.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use node_state::identity::MemberId;
    use node_state::membership::PeerUrl;

    const PROOF: Proof =
        Proof { incarnation: Incarnation([1; 16]), run: 1, key: Some(NodeKey([1; 32])) };

    fn record() -> PeerRecord {
        PeerRecord { id: MemberId(1), urls: Vec::new(), incarnation: None, node_key: None }
    }

    #[test]
    fn a_stream_continues_while_its_process_fits_the_record() {
        let registry = Registry::new(record(), CancellationToken::new());
        let stream = registry.register(PROOF).unwrap();
        let urls = vec![PeerUrl::parse("http://127.0.0.1:1").unwrap()];
        let moved = PeerRecord { urls, ..record() };
        let bound =
            PeerRecord { incarnation: Some(PROOF.incarnation), node_key: PROOF.key, ..record() };
        for record in [moved, bound] {
            assert!(registry.update(record.clone()) && !registry.update(record));
            assert!(!stream.cancellation.is_cancelled());
        }
    }

    #[test]
    fn a_stream_ends_when_its_process_no_longer_fits_the_record() {
        let another = [
            PeerRecord { incarnation: Some(Incarnation([9; 16])), ..record() },
            PeerRecord { node_key: Some(NodeKey([9; 32])), ..record() },
        ];
        for record_of_another in another {
            let registry = Registry::new(record(), CancellationToken::new());
            let stream = registry.register(PROOF).unwrap();
            registry.update(record_of_another);
            assert!(stream.cancellation.is_cancelled());
            assert!(registry.register(PROOF).is_none(), "its hello was accepted a moment before");
        }
    }

    #[test]
    fn an_ended_stream_is_forgotten_and_all_streams_end_with_the_peer() {
        let gone = CancellationToken::new();
        let registry = Registry::new(record(), gone.clone());
        let (first, second) =
            (registry.register(PROOF).unwrap(), registry.register(PROOF).unwrap());
        drop(first);
        assert_eq!(registry.lock().streams.len(), 1);
        gone.cancel();
        assert!(second.cancellation.is_cancelled());
    }
}
