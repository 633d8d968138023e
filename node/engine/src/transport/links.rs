//! Message streams of one peer: which of them carries messages, and whether the peer is reachable.
//! This code uses no clock and no I/O.
//!
//! Each of two members opens a stream to the other. A stream carries messages of its opener. If
//! both ends' builds know two-way streams, it also carries messages of the other end. So one stream
//! is enough, whichever side could open it. If there are two streams:
//! - Everything that this member sends goes over one of them, the *carrier*, until that stream
//!   ends. The other stream is a standby, so that messages don't overtake each other.
//! - The peer chooses its carrier in the same way. If a message arrives on another stream than the
//!   previous message, the peer has lost the previous stream. That stream is ended here as well,
//!   before the message counts.
//! - A newer stream that the peer opened ends the peer's older one, because the peer must have lost
//!   the older one.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;

use super::{StreamRefusal, process_liveness::ProcessLiveness};

/// Time for which a refused connection shows that no process of the peer listens.
const REFUSAL_COUNTS_FOR: Duration = Duration::from_secs(2);

/// Side that opened a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opener {
    Local,
    Remote,
}

/// A message stream to or from the peer.
#[derive(Debug)]
struct LinkState {
    opener: Opener,
    /// Whether both ends may send messages on this stream.
    is_two_way: bool,
    /// Whether this stream carries everything that this member sends to the peer.
    is_carrier: bool,
    liveness: ProcessLiveness,
    cancellation: CancellationToken,
}

impl LinkState {
    fn sends_messages(&self) -> bool {
        self.is_two_way || self.opener == Opener::Local
    }

    fn receives_messages(&self) -> bool {
        self.is_two_way || self.opener == Opener::Remote
    }
}

/// All message streams of one peer.
#[derive(Debug, Default)]
pub(super) struct Links {
    links: BTreeMap<u64, LinkState>,
    /// Start of the current period in which at least one stream can send; `None` while no stream
    /// can.
    connected_since: Option<Instant>,
    /// For each [`Opener`]: start of the current period in which this member can send to the peer,
    /// but that side has no open stream. `None` if there is no such period now.
    missing_since: [Option<Instant>; 2],
    /// Reachability of the peer, as last reported.
    is_reachable: bool,
    /// Stream on which the last message was received.
    source: Option<u64>,
    /// Error of this member's last failed attempt to open a stream, and whether another stream
    /// could send at that time.
    dial_failure: Option<(String, bool)>,
    /// Whether a process of the peer has had a stream, and the end of that process was not reported
    /// yet.
    has_process: bool,
    /// Time of the last attempt to connect, if the peer's host refused the connections to all URLs.
    refused_at: Option<Instant>,
}

/// Changes of the peer's reachability, in the order in which to report them. If the stream that
/// carried this member's messages is lost and another one replaces it, `[false, true]` is reported,
/// because messages may be lost.
pub(super) type ReachabilityChanges = Vec<bool>;

impl Links {
    /// Adds a stream under a number that was never used before.
    pub(super) fn add(
        &mut self,
        number: u64,
        opener: Opener,
        (run, ends): (u64, CancellationToken),
        now: Instant,
    ) -> ReachabilityChanges {
        (self.has_process, self.refused_at) = (true, None);
        match opener {
            Opener::Local => self.dial_failure = None,
            Opener::Remote => {
                let older = self.links.values().filter(|link| link.opener == opener);
                older.for_each(|link| link.cancellation.cancel());
            }
        }
        let liveness = ProcessLiveness::of(run);
        let link = LinkState {
            opener,
            is_two_way: false,
            is_carrier: false,
            liveness,
            cancellation: ends,
        };
        self.links.insert(number, link);
        self.update_reachability(false, now)
    }

    /// Records that both ends may send messages on a stream, because both know that it is two-way.
    pub(super) fn make_two_way(&mut self, number: u64, now: Instant) -> ReachabilityChanges {
        if let Some(link) = self.links.get_mut(&number) {
            link.is_two_way = true;
        }
        self.update_reachability(false, now)
    }

    /// Makes a stream the carrier: from now on, everything that this member sends to the peer goes
    /// over this stream.
    pub(super) fn make_carrier(&mut self, number: u64) {
        if let Some(link) = self.links.get_mut(&number) {
            link.is_carrier = true;
        }
    }

    /// Removes a stream that has ended.
    pub(super) fn remove(&mut self, number: u64, now: Instant) -> ReachabilityChanges {
        let removed = self.links.remove(&number);
        self.source = self.source.filter(|source| *source != number);
        self.update_reachability(removed.is_some_and(|link| link.is_carrier), now)
    }

    fn update_reachability(&mut self, lost_carrier: bool, now: Instant) -> ReachabilityChanges {
        let takes = self.links.values().any(LinkState::sends_messages);
        let brings = self.links.values().any(LinkState::receives_messages);
        self.connected_since = self.connected_since.or(Some(now)).filter(|_| takes);
        for opener in [Opener::Local, Opener::Remote] {
            let is_missing = takes && !self.has(opener);
            let since = &mut self.missing_since[opener as usize];
            *since = since.or(Some(now)).filter(|_| is_missing);
        }
        let was = std::mem::replace(&mut self.is_reachable, takes && brings);
        match (was, self.is_reachable) {
            (true, true) if lost_carrier => vec![false, true],
            (was, is) if was != is => vec![is],
            _ => Vec::new(),
        }
    }

    /// Records that a message was received on stream `number`. If the previous message came on
    /// another stream, that stream is ended.
    pub(super) fn receive_on(&mut self, number: u64) {
        let before = self.source.replace(number).filter(|before| *before != number);
        if let Some(link) = before.and_then(|before| self.links.get(&before)) {
            link.cancellation.cancel();
        }
    }

    /// Returns since when this member has been able to send to the peer without interruption.
    /// `None` if it can't send now.
    pub(super) fn connected_since(&self) -> Option<Instant> {
        self.connected_since
    }

    /// Returns whether a stream exists that the side `opener` has opened.
    pub(super) fn has(&self, opener: Opener) -> bool {
        self.links.values().any(|link| link.opener == opener)
    }

    /// Returns the start of the current period in which this member can send to the peer, but the
    /// side `opener` has no open stream.
    pub(super) fn missing_since(&self, opener: Opener) -> Option<Instant> {
        self.missing_since[opener as usize]
    }

    /// Returns whether a two-way stream exists. If so, the peer's build knows invitations.
    pub(super) fn is_two_way(&self) -> bool {
        self.links.values().any(|link| link.is_two_way)
    }

    /// Records that this member failed to open a stream. Returns whether that is news: the error
    /// differs from the last one, or the peer has become connected or disconnected since.
    pub(super) fn dial_failed(&mut self, why: &str) -> bool {
        let failure = Some((why.to_owned(), self.connected_since.is_some()));
        let is_news = self.dial_failure != failure;
        self.dial_failure = failure;
        is_news
    }

    /// Records that the peer's host refused the connections to all its URLs.
    pub(super) fn connections_refused(&mut self, now: Instant) {
        self.refused_at = Some(now);
    }

    /// Returns whether the peer's process has ended, and this was not returned before. The process
    /// counts as ended if all its streams have ended and its host refuses connections now.
    pub(super) fn take_process_end(&mut self, now: Instant) -> bool {
        let refuses = self
            .refused_at
            .is_some_and(|at| now.saturating_duration_since(at) <= REFUSAL_COUNTS_FOR);
        let has_ended = self.has_process && self.links.is_empty() && refuses;
        self.has_process &= !has_ended;
        has_ended
    }

    /// Returns the error of the last attempt to open a stream. `None` if this member has opened one
    /// since.
    pub(super) fn dial_failure(&self) -> Option<&str> {
        self.dial_failure.as_ref().map(|(why, _)| why.as_str())
    }

    /// Returns the liveness record of the process at the other end of a stream.
    pub(super) fn liveness(&mut self, number: u64) -> Option<&mut ProcessLiveness> {
        self.links.get_mut(&number).map(|link| &mut link.liveness)
    }

    /// Returns why the process `run` of the peer can't be accepted now. There is a reason only
    /// while this member sends messages, and therefore pings, on a stream of another process of the
    /// peer.
    pub(super) fn objection_to(&mut self, run: u64, now: Instant) -> Option<StreamRefusal> {
        let pinged = self.links.values_mut().filter(|link| link.sends_messages());
        let objections: Vec<StreamRefusal> =
            pinged.filter_map(|link| link.liveness.refusal_of(run, now)).collect();
        objections
            .iter()
            .copied()
            .find(|why| *why == StreamRefusal::Boot)
            .or(objections.first().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [bool; 0] = [];

    struct TestLinks {
        links: Links,
        now: Instant,
    }

    impl TestLinks {
        fn new() -> Self {
            Self { links: Links::default(), now: Instant::now() }
        }

        fn add(&mut self, number: u64, opener: Opener) -> (CancellationToken, ReachabilityChanges) {
            let ends = CancellationToken::new();
            let news = self.links.add(number, opener, (1, ends.clone()), self.now);
            (ends, news)
        }

        fn two_way(
            &mut self,
            number: u64,
            opener: Opener,
        ) -> (CancellationToken, ReachabilityChanges) {
            let (ends, mut news) = self.add(number, opener);
            news.extend(self.links.make_two_way(number, self.now));
            (ends, news)
        }

        fn remove(&mut self, number: u64) -> ReachabilityChanges {
            self.links.remove(number, self.now)
        }
    }

    #[test]
    fn one_stream_of_either_side_is_enough_if_it_is_two_way() {
        for opener in [Opener::Local, Opener::Remote] {
            let mut peer = TestLinks::new();
            assert_eq!(peer.two_way(1, opener).1, [true]);
            assert!(peer.links.connected_since().is_some());
            let missing = [Opener::Local, Opener::Remote].map(|it| peer.links.missing_since(it));
            assert_eq!(
                missing.map(|since| since.is_some()),
                [Opener::Local, Opener::Remote].map(|it| it != opener)
            );
            assert_eq!(peer.remove(1), [false]);
            assert!(peer.links.connected_since().is_none());
        }
    }

    #[test]
    fn an_older_build_is_reachable_while_both_directions_have_a_stream() {
        let mut peer = TestLinks::new();
        assert_eq!(peer.add(1, Opener::Remote).1, NONE);
        assert!(peer.links.connected_since().is_none(), "it can't be sent to yet");
        assert_eq!(peer.add(2, Opener::Local).1, [true]);
        assert_eq!(peer.add(3, Opener::Remote).1, NONE);
        assert_eq!(peer.remove(1), NONE, "the newer stream took its place");
        assert_eq!(peer.remove(2), [false]);
        assert_eq!(peer.add(4, Opener::Local).1, [true]);
        assert_eq!(peer.remove(3), [false]);
    }

    #[test]
    fn the_loss_of_the_carrier_is_reported_although_another_stream_remains() {
        let mut peer = TestLinks::new();
        peer.two_way(1, Opener::Local);
        peer.two_way(2, Opener::Remote);
        peer.links.make_carrier(2);
        assert_eq!(peer.remove(1), NONE, "it only stood by");
        peer.two_way(3, Opener::Local);
        assert_eq!(peer.remove(2), [false, true]);
        assert_eq!(
            peer.links.connected_since(),
            Some(peer.now),
            "it could be sent to all the time"
        );
    }

    #[test]
    fn a_newer_stream_of_the_peer_ends_its_older_one_and_none_of_ours() {
        let mut peer = TestLinks::new();
        let (ours, _) = peer.two_way(1, Opener::Local);
        let (older, _) = peer.two_way(2, Opener::Remote);
        let (newer, _) = peer.two_way(3, Opener::Remote);
        let ended = [ours, older, newer].map(|ends| ends.is_cancelled());
        assert_eq!(ended, [false, true, false]);
    }

    #[test]
    fn a_message_on_another_stream_ends_the_previous_stream() {
        let mut peer = TestLinks::new();
        let (ours, _) = peer.two_way(1, Opener::Local);
        let (theirs, _) = peer.two_way(2, Opener::Remote);
        peer.links.receive_on(2);
        peer.links.receive_on(2);
        assert!(!theirs.is_cancelled());
        peer.links.receive_on(1);
        assert!(theirs.is_cancelled() && !ours.is_cancelled());
        peer.remove(1);
        let (again, _) = peer.two_way(3, Opener::Local);
        peer.links.receive_on(3);
        assert!(!again.is_cancelled());
    }

    #[test]
    fn another_process_is_refused_while_any_stream_is_pinged() {
        let mut peer = TestLinks::new();
        peer.add(1, Opener::Remote);
        assert_eq!(peer.links.objection_to(2, peer.now), None, "nobody asks whether it lives");
        peer.links.make_two_way(1, peer.now);
        assert_eq!(peer.links.objection_to(2, peer.now), Some(StreamRefusal::AnotherProcess));
        assert_eq!(peer.links.objection_to(1, peer.now), None);
    }

    #[test]
    fn a_process_has_ended_if_its_streams_have_and_its_host_refuses_connections() {
        let mut peer = TestLinks::new();
        peer.links.connections_refused(peer.now);
        assert!(!peer.links.take_process_end(peer.now), "it never had a stream");
        peer.two_way(1, Opener::Local);
        peer.two_way(2, Opener::Remote);
        peer.remove(1);
        assert!(!peer.links.take_process_end(peer.now), "the refusal was earlier");
        peer.links.connections_refused(peer.now);
        assert!(!peer.links.take_process_end(peer.now), "a stream remains");
        peer.remove(2);
        assert!(peer.links.take_process_end(peer.now));
        assert!(!peer.links.take_process_end(peer.now), "it is reported once");

        peer.two_way(3, Opener::Local);
        peer.remove(3);
        assert!(!peer.links.take_process_end(peer.now), "the new process may be alive");
        peer.links.connections_refused(peer.now);
        let late = peer.now + REFUSAL_COUNTS_FOR + Duration::from_millis(1);
        assert!(!peer.links.take_process_end(late), "the refusal is old");
        peer.links.connections_refused(late);
        assert!(peer.links.take_process_end(late));
    }

    #[test]
    fn the_error_of_a_failed_dial_is_kept_until_a_dial_succeeds() {
        let mut peer = TestLinks::new();
        assert!(peer.links.dial_failed("refused") && !peer.links.dial_failed("refused"));
        peer.two_way(1, Opener::Remote);
        assert_eq!(peer.links.dial_failure(), Some("refused"));
        assert!(peer.links.dial_failed("refused"), "it matters less now");
        peer.add(2, Opener::Local);
        assert_eq!(peer.links.dial_failure(), None);
        assert!(peer.links.has(Opener::Local) && peer.links.has(Opener::Remote));
    }
}
