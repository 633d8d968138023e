//! Admission of connections whose peer is not authenticated yet.
//!
//! A TLS handshake costs memory and a signature, and any host may start one. So a connection passes
//! two pools of slots (`Room`) before it is admitted:
//!
//! 1. *Silent*: no byte has arrived. The connection costs a socket, and has a short time to send
//!    its first byte.
//! 2. *Handshake*: the first byte has arrived. There are few of these slots, and one network may
//!    hold only some of them. Further connections of that network stay in the silent pool until a
//!    handshake slot is free.
//!
//! A full pool is shared fairly between networks. A new connection evicts the oldest connection of
//! the network that holds the most slots, unless that is its own network. A host that opens many
//! connections and sends nothing, or one byte on each, therefore blocks only itself.
//!
//! This crate does not limit admitted connections, and does not limit the rate of connection
//! attempts.

mod room;

use std::{
    io,
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};

use room::{Place, Room};

/// Prefix length of an IPv6 network that counts as one host: a host usually gets a whole /64, that
/// is 2⁶⁴ addresses.
const IPV6_PREFIX: u32 = 64;
/// How often a waiting connection tries again to get a handshake slot.
const TURN: Duration = Duration::from_millis(10);

/// Limits on connections that are not admitted yet.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Maximum number of silent connections, including those that wait for a handshake slot.
    pub silent: usize,
    /// Maximum number of handshakes at the same time.
    pub handshakes: usize,
    /// Maximum number of handshakes at the same time for one network.
    pub each: usize,
    /// Time limit of each of the three steps: first byte, wait for a handshake slot, handshake.
    pub step: Duration,
}

/// The two pools of slots. Clones share them.
#[derive(Clone, Debug)]
pub struct Door {
    silent: Arc<Room>,
    handshakes: Arc<Room>,
    step: Duration,
}

/// An accepted connection that holds a slot of the silent pool.
#[derive(Debug)]
pub struct Knock {
    door: Door,
    address: IpAddr,
    place: Place,
}

/// Why a connection was not admitted.
#[derive(Debug, thiserror::Error)]
pub enum Turned {
    /// The slot was given to a connection of a network that holds fewer slots.
    #[error("its place was given to another network")]
    Crowded,
    /// One of the three steps exceeded [`Bounds::step`].
    #[error("no handshake in time")]
    Late,
    /// The handshake failed, or the peer closed the connection.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

impl Door {
    /// Returns a door with all slots free.
    #[must_use]
    pub fn new(bounds: Bounds) -> Self {
        Self {
            silent: Room::new(bounds.silent, usize::MAX),
            handshakes: Room::new(bounds.handshakes, bounds.each),
            step: bounds.step,
        }
    }

    /// Gives a newly accepted connection from `address` a silent slot. Returns `None` if the caller
    /// must close the connection at once.
    #[must_use]
    pub fn knock(&self, address: IpAddr) -> Option<Knock> {
        let place = self.silent.enter(address)?;
        Some(Knock { door: self.clone(), address, place })
    }

    /// Waits for a free handshake slot for `address`.
    async fn turn(&self, address: IpAddr) -> Place {
        loop {
            if let Some(place) = self.handshakes.enter(address) {
                return place;
            }
            sleep(TURN).await;
        }
    }
}

impl Knock {
    /// Waits for the first byte, then for a handshake slot, then runs `handshake`.
    ///
    /// # Errors
    /// If a step takes too long or fails, or if the connection is evicted from its slot.
    pub async fn admit<T>(
        self,
        tcp: TcpStream,
        handshake: impl AsyncFnOnce(TcpStream) -> io::Result<T>,
    ) -> Result<T, Turned> {
        let Self { door, address, place } = self;
        hold(&place, door.step, first_byte(&tcp)).await?;
        let inside = hold(&place, door.step, async { Ok(door.turn(address).await) }).await?;
        drop(place);
        hold(&inside, door.step, handshake(tcp)).await
    }
}

/// Runs `work` until it ends, `time` has passed, or the slot is given to another connection.
async fn hold<T>(
    place: &Place,
    time: Duration,
    work: impl Future<Output = io::Result<T>>,
) -> Result<T, Turned> {
    tokio::select! {
        () = place.lost.cancelled() => Err(Turned::Crowded),
        done = timeout(time, work) => Ok(done.map_err(|_| Turned::Late)??),
    }
}

async fn first_byte(tcp: &TcpStream) -> io::Result<()> {
    match tcp.peek(&mut [0]).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

/// Returns the address that stands for the whole network: an IPv4 address itself, or the /64 prefix
/// of an IPv6 address. One such network counts as one host.
#[must_use]
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let mask = u128::MAX << (128 - IPV6_PREFIX);
            IpAddr::V6(Ipv6Addr::from(u128::from(address) & mask))
        }
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests;
