//! The way in, for connections that have not said yet who they are.
//!
//! A handshake costs memory and a signature, and anybody may ask for one. So a connection passes
//! two rooms before it is anybody's:
//!
//! 1. *Silent*: nothing has come yet. It costs a socket, and has a short time for its first byte.
//! 2. *Shaking hands*: the first byte is here. There are few of these places, and one network has a
//!    part of them at most; its further connections wait in the first room for their turn.
//!
//! A full room is shared fairly: whoever comes next gets the oldest place of the network that holds
//! the most, unless that is its own. One host that opens connections and says nothing, or a byte and
//! then nothing, keeps itself out and nobody else.
//!
//! What it does not do: bound connections that were admitted, or count how often somebody comes.

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

/// A network of this length is one host: whoever has one IPv6 address has 2⁶⁴ of them.
const IPV6_PREFIX: u32 = 64;
/// How often a connection looks whether it is its turn.
const TURN: Duration = Duration::from_millis(10);

/// How many are let near, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Connections of which no byte has come, or whose turn has not.
    pub silent: usize,
    /// Connections that shake hands.
    pub handshakes: usize,
    /// Of these, for one network.
    pub each: usize,
    /// How long each of the three steps may take: the first byte, the turn, the handshake.
    pub step: Duration,
}

/// The two rooms. Clones are the same door.
#[derive(Clone, Debug)]
pub struct Door {
    silent: Arc<Room>,
    handshakes: Arc<Room>,
    step: Duration,
}

/// A connection that was let near.
#[derive(Debug)]
pub struct Knock {
    door: Door,
    address: IpAddr,
    place: Place,
}

/// Why a connection was not admitted.
#[derive(Debug, thiserror::Error)]
pub enum Turned {
    /// Its place was given to somebody whose network holds fewer.
    #[error("its place was given to another network")]
    Crowded,
    /// It took too long.
    #[error("no handshake in time")]
    Late,
    /// The handshake failed, or the other end left.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

impl Door {
    /// An empty one.
    #[must_use]
    pub fn new(bounds: Bounds) -> Self {
        Self {
            silent: Room::new(bounds.silent, usize::MAX),
            handshakes: Room::new(bounds.handshakes, bounds.each),
            step: bounds.step,
        }
    }

    /// A connection from `address` was accepted. `None`: it is to be closed at once.
    #[must_use]
    pub fn knock(&self, address: IpAddr) -> Option<Knock> {
        let place = self.silent.enter(address)?;
        Some(Knock { door: self.clone(), address, place })
    }

    /// Waits until `address` may shake hands once more.
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
    /// Waits for the first byte, then for a place, then for the handshake.
    ///
    /// # Errors
    /// If one of them took too long, or the connection had to give way to others.
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

/// Does `work` for as long as the place lasts, and `time`.
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

/// What counts as one host: an IPv4 address, or the /64 that one gets of IPv6.
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
