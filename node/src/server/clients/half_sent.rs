//! Bytes of requests that have begun and not ended.
//!
//! A message is gathered in memory before anybody looks at it, on each of the streams that a
//! connection may have open: a client that never ends what it begins could fill all memory. So what a
//! request holds is counted, from a size on that ordinary ones stay below, and what would be too much
//! is refused as a full queue refuses: one connection holds so much, and one network an equal share of
//! what all of them may hold. Whoever fills his share keeps nobody else from theirs.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use axum::BoxError;
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tonic::Status;

use crate::rpc;

/// For one connection.
const CONNECTION_BYTES: usize = 16 << 20;
/// For all of them; a network has an equal share of it, and that is never less than the largest
/// request takes.
const ALL_BYTES: usize = 64 << 20;
/// A request that holds no more than this is not counted.
const SMALL_BYTES: usize = 4 << 10;
/// A message's flag and length.
const HEADER: usize = 5;

/// What all connections hold.
#[derive(Debug)]
pub(super) struct HalfSent {
    largest_request: usize,
    networks: Mutex<BTreeMap<IpAddr, usize>>,
}

impl HalfSent {
    pub(super) fn new(largest_request: usize) -> Arc<Self> {
        Arc::new(Self { largest_request, networks: Mutex::default() })
    }

    /// The account of one connection.
    pub(super) fn open(self: &Arc<Self>, address: IpAddr) -> Arc<Account> {
        let network = muster_door::network(address);
        Arc::new(Account { all: Arc::clone(self), network, held: AtomicUsize::new(0) })
    }

    fn charge(&self, network: IpAddr, bytes: usize) -> bool {
        let mut networks = self.networks.lock().unwrap_or_else(PoisonError::into_inner);
        let own = networks.get(&network).copied();
        let holders = networks.len() + usize::from(own.is_none());
        let held = own.unwrap_or(0) + bytes;
        let fits = held <= self.largest_request.max(ALL_BYTES / holders);
        if fits {
            networks.insert(network, held);
        }
        fits
    }

    fn release(&self, network: IpAddr, bytes: usize) {
        let mut networks = self.networks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = networks.get_mut(&network) {
            *held -= bytes;
            if *held == 0 {
                networks.remove(&network);
            }
        }
    }
}

/// What one connection holds.
#[derive(Debug)]
pub(super) struct Account {
    all: Arc<HalfSent>,
    network: IpAddr,
    held: AtomicUsize,
}

impl Account {
    fn charge(&self, bytes: usize) -> bool {
        let most = self.all.largest_request.max(CONNECTION_BYTES);
        if self.held.fetch_add(bytes, Ordering::Relaxed) + bytes <= most
            && self.all.charge(self.network, bytes)
        {
            return true;
        }
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        false
    }

    fn release(&self, bytes: usize) {
        if bytes > 0 {
            self.held.fetch_sub(bytes, Ordering::Relaxed);
            self.all.release(self.network, bytes);
        }
    }
}

/// A request's body, counted while it comes.
#[derive(Debug)]
pub(super) struct Counted<B> {
    inner: B,
    account: Arc<Account>,
    message: Message,
    charged: usize,
    refused: bool,
}

/// The message that is coming, or came last: until another begins, or the request ends, somebody
/// may be holding it.
#[derive(Debug)]
struct Message {
    /// Whether messages are told apart; else the whole body is one.
    framed: bool,
    header: [u8; HEADER],
    header_seen: usize,
    left: usize,
    held: usize,
}

impl Message {
    /// Goes on by `data`. Whether another message has begun in it.
    fn advance(&mut self, mut data: &[u8]) -> bool {
        if !self.framed {
            self.held += data.len();
            return false;
        }
        let mut begun = false;
        while let Some(first) = data.first() {
            if self.header_seen < HEADER {
                if self.header_seen == 0 {
                    begun = true;
                    self.held = 0;
                }
                self.header[self.header_seen] = *first;
                self.header_seen += 1;
                self.held += 1;
                data = &data[1..];
                if self.header_seen == HEADER {
                    let [_, a, b, c, d] = self.header;
                    self.left = u32::from_be_bytes([a, b, c, d]) as usize;
                }
            } else {
                let part = self.left.min(data.len());
                self.left -= part;
                self.held += part;
                data = &data[part..];
            }
            if self.header_seen == HEADER && self.left == 0 {
                self.header_seen = 0;
            }
        }
        begun
    }
}

impl<B> Counted<B> {
    /// Counts `inner` to `account`; `framed` if it is gRPC's.
    pub(super) fn new(inner: B, account: Arc<Account>, framed: bool) -> Self {
        let message = Message { framed, header: [0; HEADER], header_seen: 0, left: 0, held: 0 };
        Self { inner, account, message, charged: 0, refused: false }
    }

    /// False if what came is too much.
    fn count(&mut self, data: &[u8]) -> bool {
        if self.message.advance(data) {
            self.account.release(std::mem::take(&mut self.charged));
        }
        if self.message.held <= SMALL_BYTES {
            return true;
        }
        let more = self.message.held - self.charged;
        let fits = self.account.charge(more);
        if fits {
            self.charged += more;
        }
        fits
    }
}

impl<B> Body for Counted<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.refused {
            return Poll::Ready(None);
        }
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(context));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
            && !self.count(data)
        {
            self.refused = true;
            return Poll::Ready(Some(Err(Status::from(rpc::Error::TooManyRequests).into())));
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.refused || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl<B> Drop for Counted<B> {
    fn drop(&mut self) {
        self.account.release(self.charged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: usize = 2 << 20;

    fn ip(last: u16) -> IpAddr {
        let [high, low] = last.to_be_bytes();
        [10, 0, high, low].into()
    }

    fn message(bytes: usize) -> Vec<u8> {
        let mut message = vec![0; HEADER + bytes];
        message[1..HEADER].copy_from_slice(&u32::try_from(bytes).unwrap().to_be_bytes());
        message
    }

    fn body(account: &Arc<Account>) -> Counted<()> {
        Counted::new((), Arc::clone(account), true)
    }

    fn held(all: &HalfSent) -> usize {
        all.networks.lock().unwrap().values().sum()
    }

    #[test]
    fn one_connection_holds_so_much_and_gets_it_back() {
        let all = HalfSent::new(REQUEST);
        let account = all.open(ip(1));
        let half = &message(1 << 20)[..1 << 19];
        let mut bodies: Vec<_> = (0..100).map(|_| body(&account)).collect();
        let taken = bodies.iter_mut().filter_map(|body| body.count(half).then_some(())).count();
        assert_eq!(taken, CONNECTION_BYTES / half.len());
        assert!(held(&all) <= CONNECTION_BYTES);
        drop(bodies);
        assert_eq!((held(&all), account.held.load(Ordering::Relaxed)), (0, 0));
        assert!(body(&account).count(half));
    }

    #[test]
    fn one_network_with_many_connections_leaves_others_their_share() {
        let all = HalfSent::new(REQUEST);
        let half = &message(REQUEST)[..REQUEST - 1];
        let mut bodies = Vec::new();
        for _ in 0..200 {
            let mut body = body(&all.open(ip(1)));
            body.count(half);
            bodies.push(body);
        }
        assert!(held(&all) <= ALL_BYTES);
        // However many there are, each may send its largest request.
        for other in 2..100 {
            let mut body = body(&all.open(ip(other)));
            assert!(body.count(half), "{other}");
            bodies.push(body);
        }
    }

    #[test]
    fn a_message_is_held_until_the_next_one_begins_however_it_is_cut() {
        let all = HalfSent::new(REQUEST);
        let mut body = body(&all.open(ip(1)));
        let mut wire = [message(10_000), message(0), message(20_000), message(5)].concat();
        let rest = wire.split_off(10_000 + HEADER);
        for piece in wire.chunks(777) {
            assert!(body.count(piece));
        }
        assert_eq!(held(&all), 10_000 + HEADER, "whoever waits for the request's end has it");
        for piece in rest[..HEADER + HEADER + 20_000].chunks(3) {
            assert!(body.count(piece));
        }
        assert_eq!(held(&all), 20_000 + HEADER);
        assert!(body.count(&rest[HEADER + HEADER + 20_000..]));
        assert_eq!(held(&all), 0, "small ones are not counted");
    }

    #[test]
    fn a_body_that_is_not_grpc_is_one_message() {
        let all = HalfSent::new(REQUEST);
        let mut body = Counted::new((), all.open(ip(1)), false);
        assert!(body.count(&[0; 5_000]) && body.count(&[0; 5_000]));
        assert_eq!(held(&all), 10_000);
    }
}
