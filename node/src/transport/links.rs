//! Which message streams of one peer stand, and what follows from that. No clock, no I/O.
//!
//! Each of two members opens a stream to the other. A stream carries messages of its opener; if both
//! ends are of a build that knows it, it carries those of the other end as well. So one stream is
//! enough, whichever side could open it, and where there are two:
//! - one of them carries all that this member sends, until it ends: the *carrier*. The other stands by,
//!   so that messages don't overtake each other.
//! - the peer chooses its carrier likewise. A message on another stream than the last message came on
//!   shows that the peer has lost the last one: that one is ended here too, before the message counts.
//! - a newer stream that the peer opened ends the older one: the peer had lost that.

use std::{collections::BTreeMap, time::Instant};

use tokio_util::sync::CancellationToken;

use super::{Refusal, vitals::Vitals};

/// Who opened a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opener {
    /// This member.
    Local,
    /// The peer.
    Remote,
}

/// One message stream.
#[derive(Debug)]
struct Link {
    opener: Opener,
    /// Whether messages go in both directions.
    is_two_way: bool,
    /// Whether all that this member sends goes here.
    is_carrier: bool,
    vitals: Vitals,
    ends: CancellationToken,
}

impl Link {
    fn takes_messages(&self) -> bool {
        self.is_two_way || self.opener == Opener::Local
    }

    fn brings_messages(&self) -> bool {
        self.is_two_way || self.opener == Opener::Remote
    }
}

/// All message streams of a peer.
#[derive(Debug, Default)]
pub(super) struct Links {
    links: BTreeMap<u64, Link>,
    /// Since when there has been a stream to send on, without a break.
    connected_since: Option<Instant>,
    /// Since when the peer could be sent to although this side, or the peer, had opened no stream.
    missing_since: [Option<Instant>; 2],
    /// Whether the peer counted as reachable when that was told last.
    is_reachable: bool,
    /// The stream that the last message came on.
    source: Option<u64>,
    /// Why this member could not open a stream when it tried last, and whether the peer could be sent
    /// to nevertheless.
    dial_failure: Option<(String, bool)>,
}

/// That the peer is reachable from now on or no longer, to be told in this order. A loss of the carrier
/// that another stream makes up for is told as both: what was under way may be lost.
pub(super) type News = Vec<bool>;

impl Links {
    /// A stream stands, under a number that no other one has.
    pub(super) fn add(
        &mut self,
        number: u64,
        opener: Opener,
        (run, ends): (u64, CancellationToken),
        now: Instant,
    ) -> News {
        match opener {
            Opener::Local => self.dial_failure = None,
            Opener::Remote => {
                let older = self.links.values().filter(|link| link.opener == opener);
                older.for_each(|link| link.ends.cancel());
            }
        }
        let vitals = Vitals::of(run);
        let link = Link { opener, is_two_way: false, is_carrier: false, vitals, ends };
        self.links.insert(number, link);
        self.settle(false, now)
    }

    /// Both ends know that messages go in both directions.
    pub(super) fn make_two_way(&mut self, number: u64, now: Instant) -> News {
        if let Some(link) = self.links.get_mut(&number) {
            link.is_two_way = true;
        }
        self.settle(false, now)
    }

    /// From now on this stream is the carrier.
    pub(super) fn carry_on(&mut self, number: u64) {
        if let Some(link) = self.links.get_mut(&number) {
            link.is_carrier = true;
        }
    }

    /// A stream has ended.
    pub(super) fn remove(&mut self, number: u64, now: Instant) -> News {
        let removed = self.links.remove(&number);
        self.source = self.source.filter(|source| *source != number);
        self.settle(removed.is_some_and(|link| link.is_carrier), now)
    }

    fn settle(&mut self, lost_carrier: bool, now: Instant) -> News {
        let takes = self.links.values().any(Link::takes_messages);
        let brings = self.links.values().any(Link::brings_messages);
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

    /// A message has come on this stream.
    pub(super) fn receive_on(&mut self, number: u64) {
        let before = self.source.replace(number).filter(|before| *before != number);
        if let Some(link) = before.and_then(|before| self.links.get(&before)) {
            link.ends.cancel();
        }
    }

    /// Since when the peer can be sent to.
    pub(super) fn connected_since(&self) -> Option<Instant> {
        self.connected_since
    }

    /// Whether a stream stands that this side opened, or the other.
    pub(super) fn has(&self, opener: Opener) -> bool {
        self.links.values().any(|link| link.opener == opener)
    }

    /// Since when the peer can be sent to although this side, or the other, has opened no stream.
    pub(super) fn missing_since(&self, opener: Opener) -> Option<Instant> {
        self.missing_since[opener as usize]
    }

    /// Whether a two-way stream stands, so that the peer understands invitations.
    pub(super) fn is_two_way(&self) -> bool {
        self.links.values().any(|link| link.is_two_way)
    }

    /// This member could not open a stream. Whether that is news.
    pub(super) fn dial_failed(&mut self, why: &str) -> bool {
        let failure = Some((why.to_owned(), self.connected_since.is_some()));
        let is_news = self.dial_failure != failure;
        self.dial_failure = failure;
        is_news
    }

    /// Why this member could not open a stream when it tried last, if it has none.
    pub(super) fn dial_failure(&self) -> Option<&str> {
        self.dial_failure.as_ref().map(|(why, _)| why.as_str())
    }

    /// The process at the other end of a stream.
    pub(super) fn vitals(&mut self, number: u64) -> Option<&mut Vitals> {
        self.links.get_mut(&number).map(|link| &mut link.vitals)
    }

    /// Why the process `run` can't be let in now, if another one has streams that are pinged.
    pub(super) fn objection_to(&mut self, run: u64, now: Instant) -> Option<Refusal> {
        let pinged = self.links.values_mut().filter(|link| link.takes_messages());
        let objections: Vec<Refusal> =
            pinged.filter_map(|link| link.vitals.objects_to(run, now)).collect();
        objections.iter().copied().find(|why| *why == Refusal::Boot).or(objections.first().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [bool; 0] = [];

    struct Peer {
        links: Links,
        now: Instant,
    }

    impl Peer {
        fn new() -> Self {
            Self { links: Links::default(), now: Instant::now() }
        }

        fn add(&mut self, number: u64, opener: Opener) -> (CancellationToken, News) {
            let ends = CancellationToken::new();
            let news = self.links.add(number, opener, (1, ends.clone()), self.now);
            (ends, news)
        }

        fn two_way(&mut self, number: u64, opener: Opener) -> (CancellationToken, News) {
            let (ends, mut news) = self.add(number, opener);
            news.extend(self.links.make_two_way(number, self.now));
            (ends, news)
        }

        fn remove(&mut self, number: u64) -> News {
            self.links.remove(number, self.now)
        }
    }

    #[test]
    fn one_stream_of_either_side_is_enough_if_it_is_two_way() {
        for opener in [Opener::Local, Opener::Remote] {
            let mut peer = Peer::new();
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
    fn a_peer_of_an_older_build_is_reachable_while_streams_stand_in_both_directions() {
        let mut peer = Peer::new();
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
    fn the_loss_of_the_carrier_is_told_although_another_stream_stands() {
        let mut peer = Peer::new();
        peer.two_way(1, Opener::Local);
        peer.two_way(2, Opener::Remote);
        peer.links.carry_on(2);
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
        let mut peer = Peer::new();
        let (ours, _) = peer.two_way(1, Opener::Local);
        let (older, _) = peer.two_way(2, Opener::Remote);
        let (newer, _) = peer.two_way(3, Opener::Remote);
        let ended = [ours, older, newer].map(|ends| ends.is_cancelled());
        assert_eq!(ended, [false, true, false]);
    }

    #[test]
    fn a_message_on_another_stream_ends_the_one_before() {
        let mut peer = Peer::new();
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
    fn another_process_is_kept_out_by_whichever_stream_is_pinged() {
        let mut peer = Peer::new();
        peer.add(1, Opener::Remote);
        assert_eq!(peer.links.objection_to(2, peer.now), None, "nobody asks whether it lives");
        peer.links.make_two_way(1, peer.now);
        assert_eq!(peer.links.objection_to(2, peer.now), Some(Refusal::Another));
        assert_eq!(peer.links.objection_to(1, peer.now), None);
    }

    #[test]
    fn why_a_dial_failed_is_known_until_one_succeeds() {
        let mut peer = Peer::new();
        assert!(peer.links.dial_failed("refused") && !peer.links.dial_failed("refused"));
        peer.two_way(1, Opener::Remote);
        assert_eq!(peer.links.dial_failure(), Some("refused"));
        assert!(peer.links.dial_failed("refused"), "it matters less now");
        peer.add(2, Opener::Local);
        assert_eq!(peer.links.dial_failure(), None);
        assert!(peer.links.has(Opener::Local) && peer.links.has(Opener::Remote));
    }
}
