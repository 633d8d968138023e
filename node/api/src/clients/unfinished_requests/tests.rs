//! Tests of request bodies that begin and don't end, polled by hand.

use std::collections::VecDeque;
use std::task::Waker;

use super::*;

const REQUEST: usize = 2 << 20;

fn ip(last: u16) -> IpAddr {
    let [high, low] = last.to_be_bytes();
    [10, 0, high, low].into()
}

fn message(bytes: usize) -> Vec<u8> {
    let mut message = vec![0; MESSAGE_HEADER_BYTES + bytes];
    message[1..MESSAGE_HEADER_BYTES].copy_from_slice(&u32::try_from(bytes).unwrap().to_be_bytes());
    message
}

/// Received part of a request body, and whether the body has ended.
#[derive(Debug, Default)]
struct PartialBody {
    pieces: VecDeque<Bytes>,
    ended: bool,
}

impl Body for PartialBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.pieces.pop_front() {
            Some(piece) => Poll::Ready(Some(Ok(Frame::data(piece)))),
            None if self.ended => Poll::Ready(None),
            None => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended && self.pieces.is_empty()
    }
}

fn body(sender: &ConnectionAccount, kind: BodyKind) -> Counted<PartialBody> {
    Counted::new(PartialBody::default(), sender, kind)
}

impl Counted<PartialBody> {
    /// Sends `data`, then reads everything that has arrived. Returns false if the request was
    /// refused.
    fn sends(&mut self, data: &[u8]) -> bool {
        if !data.is_empty() {
            self.inner.pieces.push_back(Bytes::copy_from_slice(data));
        }
        self.reads()
    }

    fn reads(&mut self) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        loop {
            match Pin::new(&mut *self).poll_frame(&mut context) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(Some(Err(_))) => return false,
                Poll::Ready(None) => return !self.refused,
                Poll::Pending => return true,
            }
        }
    }
}

fn held(all: &RequestAccounting) -> usize {
    all.room.held()
}

#[test]
fn an_unfinished_request_is_charged_with_its_stated_length() {
    let all = RequestAccounting::new(REQUEST);
    for (came, cost) in [
        (0, 0),
        (1, 1),
        (4, 4),
        (5, MESSAGE_HEADER_BYTES + REQUEST),
        (4_000, MESSAGE_HEADER_BYTES + REQUEST),
    ] {
        let sender = all.open(ip(1));
        let mut bodies: Vec<_> = (0..4096).map(|_| body(&sender, BodyKind::Unary)).collect();
        let taken =
            bodies.iter_mut().filter_map(|b| b.sends(&message(REQUEST)[..came]).then_some(()));
        assert_eq!(taken.count(), CONNECTION_BYTES / (STREAM_BYTES + cost), "{came} bytes came");
        assert!(held(&all) > CONNECTION_BYTES - STREAM_BYTES - MESSAGE_HEADER_BYTES - REQUEST);
        drop(bodies);
        assert_eq!((held(&all), sender.account.held()), (0, 0));
        assert!(body(&sender, BodyKind::Unary).sends(&message(REQUEST)[..came]));
    }
}

#[test]
fn many_connections_of_one_network_leave_room_for_other_networks() {
    let all = RequestAccounting::new(REQUEST);
    let half = &message(REQUEST)[..REQUEST - 1];
    let mut bodies = Vec::new();
    for _ in 0..200 {
        let mut body = body(&all.open(ip(1)), BodyKind::Unary);
        body.sends(half);
        bodies.push(body);
    }
    assert!(held(&all) <= ALL_BYTES);
    // The 198 other networks can still send one request of the largest size each.
    for other in 2..200 {
        let mut body = body(&all.open(ip(other)), BodyKind::Unary);
        assert!(body.sends(half), "{other}");
        bodies.push(body);
    }
}

#[test]
fn no_network_gets_more_than_an_equal_share() {
    let all = RequestAccounting::new(REQUEST);
    // Seven other networks have three requests each, which take less than these networks' shares.
    // But the rest of a share isn't given to the first network.
    let others = (2..=8).flat_map(|other| [other; 3]);
    let mut bodies: Vec<_> =
        others.map(|other| body(&all.open(ip(other)), BodyKind::Unary)).collect();
    assert!(bodies.iter_mut().all(|body| body.sends(&message(REQUEST)[..MESSAGE_HEADER_BYTES])));
    let others = held(&all);
    // There are eight networks, so each gets an eighth of all bytes, however many connections it
    // has.
    for _ in 0..200 {
        let mut large = body(&all.open(ip(1)), BodyKind::Unary);
        large.sends(&message(REQUEST)[..REQUEST - 1]);
        bodies.push(large);
    }
    let one = STREAM_BYTES + MESSAGE_HEADER_BYTES + REQUEST;
    assert_eq!((held(&all) - others) / one, ALL_BYTES / 8 / one);
}

#[test]
fn a_refused_request_stays_refused_when_there_is_room_again() {
    let all = RequestAccounting::new(REQUEST);
    let account = all.open(ip(1));
    let mut others: Vec<_> = (0..4_096).map(|_| body(&account, BodyKind::Unary)).collect();
    let taken = others.iter_mut().filter_map(|o| o.sends(&message(REQUEST)[..4_000]).then_some(()));
    assert!(taken.count() < 4_096);
    let mut refused = body(&account, BodyKind::Unary);
    assert!(!refused.sends(&message(REQUEST)[..4_000]));
    drop(others);
    assert!(!refused.sends(&[0; 4_000]), "half of it is gone");
    assert!(refused.is_end_stream());
    assert_eq!(held(&all), 0);
}

#[test]
fn honest_clients_are_not_refused() {
    let all = RequestAccounting::new(REQUEST);
    // One connection begins a thousand small puts, and sends half of each.
    let one = all.open(ip(1));
    let mut puts: Vec<_> = (0..1_000).map(|_| body(&one, BodyKind::Unary)).collect();
    assert!(puts.iter_mut().all(|put| put.sends(&[]) && put.sends(&message(1_000)[..500])));
    drop(puts);
    // Ten clients on each of seven hosts send 1.5 MB each, about 100 MB in total.
    let mut large = Vec::new();
    for client in 0..70 {
        let mut put = body(&all.open(ip(client % 7)), BodyKind::Unary);
        assert!(put.sends(&message(1_500_000)[..700_000]), "{client}");
        large.push(put);
    }
    drop(large);
    // The requests of all 70 clients now come from one host.
    let ten: Vec<_> = (0..10).map(|_| all.open(ip(1))).collect();
    let mut large: Vec<_> = (0..70).map(|n| body(&ten[n % 10], BodyKind::Unary)).collect();
    assert!(large.iter_mut().all(|put| put.sends(&message(1_500_000)[..700_000])));
}

#[test]
fn a_complete_request_costs_nothing() {
    let all = RequestAccounting::new(REQUEST);
    let sender = all.open(ip(1));
    let mut puts: Vec<_> = (0..4_096).map(|_| body(&sender, BodyKind::Unary)).collect();
    for put in &mut puts {
        put.inner.ended = true;
        assert!(put.sends(&message(1_000)));
    }
    assert_eq!(held(&all), 0);
}

#[test]
fn a_unary_request_is_charged_for_all_of_its_bytes() {
    let all = RequestAccounting::new(REQUEST);
    let mut body = body(&all.open(ip(1)), BodyKind::Unary);
    let wire = [message(10_000), message(0), message(20_000)].concat();
    for piece in wire[..wire.len() - 1].chunks(777) {
        assert!(body.sends(piece));
    }
    assert_eq!(held(&all), STREAM_BYTES + wire.len());
    body.inner.ended = true;
    assert!(body.sends(&wire[wire.len() - 1..]));
    drop(body);
    assert_eq!(held(&all), 0);
}

#[test]
fn a_stream_is_charged_for_an_unfinished_message_and_for_its_largest_one() {
    let all = RequestAccounting::new(REQUEST);
    let mut body = body(&all.open(ip(1)), BodyKind::Stream);
    assert!(body.sends(&[]));
    assert_eq!(held(&all), STREAM_BYTES, "nothing came yet");
    let small = message(1_000);
    assert!(body.sends(&small[..500]));
    assert_eq!(held(&all), STREAM_BYTES + MESSAGE_HEADER_BYTES + 1_000);
    assert!(body.sends(&small[500..]));
    assert_eq!(held(&all), 0, "a small one is its watch's affair");
    let wire = [message(10_000), message(5)].concat();
    for piece in wire.chunks(3) {
        assert!(body.sends(piece));
    }
    assert_eq!(held(&all), 10_000 + MESSAGE_HEADER_BYTES, "the buffer stays");
}

#[test]
fn a_stated_length_above_the_limit_is_not_charged() {
    let all = RequestAccounting::new(REQUEST);
    let mut body = body(&all.open(ip(1)), BodyKind::Unary);
    assert!(body.sends(&[0, 0xff, 0xff, 0xff, 0xff]));
    assert_eq!(held(&all), STREAM_BYTES + MESSAGE_HEADER_BYTES);
}

#[test]
fn a_body_that_is_not_grpc_is_charged_as_one_message() {
    let all = RequestAccounting::new(REQUEST);
    let mut body = body(&all.open(ip(1)), BodyKind::Plain);
    assert!(body.sends(&[0; 5_000]) && body.sends(&[0; 5_000]));
    assert_eq!(held(&all), STREAM_BYTES + 10_000);
}

#[test]
fn json_values_are_charged_up_to_the_size_of_the_largest_one() {
    let all = RequestAccounting::new(REQUEST);
    let mut body = body(&all.open(ip(1)), BodyKind::Values);
    assert!(body.sends(&[b' '; 5_000]));
    assert_eq!(held(&all), STREAM_BYTES + 5_000);
    let part = vec![b' '; 1 << 20];
    assert!((0..64).all(|_| body.sends(&part)));
    assert_eq!(held(&all), STREAM_BYTES + TONIC_MAX_MESSAGE_BYTES * gateway::REQUEST_GROWTH);
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap()
}

/// Encodes a compressed message with its gRPC header.
fn compressed(bytes: &[u8]) -> Vec<u8> {
    let gzip = gzip(bytes);
    let mut wire = message(gzip.len());
    wire[0] = 1;
    wire[MESSAGE_HEADER_BYTES..].copy_from_slice(&gzip);
    wire
}

#[test]
fn a_complete_compressed_request_is_charged_with_its_decompressed_length() {
    let all = RequestAccounting::new(REQUEST);
    let sender = all.open(ip(1));
    let mut one = body(&sender, BodyKind::Unary).with_decompression(&sender);
    let wire = compressed(&[0; REQUEST]);
    assert!(one.sends(&wire[..MESSAGE_HEADER_BYTES]));
    assert_eq!(held(&all), STREAM_BYTES + wire.len());
    assert!(one.sends(&wire[MESSAGE_HEADER_BYTES..]));
    assert_eq!(held(&all), STREAM_BYTES + MESSAGE_HEADER_BYTES + REQUEST);
    drop(one);
    // Each request has two kilobytes, but counts as two megabytes because it is charged with its
    // decompressed length.
    let mut bodies: Vec<_> =
        (0..20).map(|_| body(&sender, BodyKind::Unary).with_decompression(&sender)).collect();
    let taken = bodies.iter_mut().filter_map(|body| body.sends(&wire).then_some(()));
    assert_eq!(taken.count(), CONNECTION_BYTES / (STREAM_BYTES + MESSAGE_HEADER_BYTES + REQUEST));
    drop(bodies);
    assert_eq!(held(&all), 0);
}

#[test]
fn a_stream_of_small_compressed_messages_costs_nothing_between_them() {
    let all = RequestAccounting::new(REQUEST);
    let sender = all.open(ip(1));
    let mut body = body(&sender, BodyKind::Stream).with_decompression(&sender);
    for _ in 0..3 {
        let wire = compressed(&[1; 1_000]);
        assert!(body.sends(&wire[..wire.len() - 1]));
        assert!(held(&all) > STREAM_BYTES);
        assert!(body.sends(&wire[wire.len() - 1..]));
        assert_eq!(held(&all), 0);
    }
    // After a large message, the stream stays charged for that size, because tonic keeps a buffer
    // as large as the largest message.
    assert!(body.sends(&compressed(&[1; REQUEST])));
    assert_eq!(held(&all), MESSAGE_HEADER_BYTES + REQUEST);
}

#[test]
fn a_truncated_compressed_request_is_refused() {
    let all = RequestAccounting::new(REQUEST);
    let sender = all.open(ip(1));
    for (came, broken) in [(0, false), (3, true), (MESSAGE_HEADER_BYTES, true), (20, true)] {
        let mut body = body(&sender, BodyKind::Unary).with_decompression(&sender);
        body.inner.ended = true;
        assert!(body.is_end_stream(), "nothing came");
        assert_eq!(body.sends(&compressed(&[1; 1_000])[..came]), !broken, "{came}");
        assert!(body.is_end_stream());
    }
}
