//! Admission of connections whose peer is not authenticated yet.
//!
//! A TLS handshake costs memory and a signature, and any host may start one. So a connection passes
//! two pools of slots (`SlotPool`) before it is admitted:
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

use room::{Slot, SlotPool};

/// Prefix length of an IPv6 network that counts as one host: a host usually gets a whole /64, that
/// is 2⁶⁴ addresses.
const IPV6_PREFIX: u32 = 64;
/// How often a waiting connection tries again to get a handshake slot.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Limits on connections that are not admitted yet.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionLimits {
    /// Maximum number of silent connections, including those that wait for a handshake slot.
    pub silent: usize,
    /// Maximum number of handshakes at the same time.
    pub handshakes: usize,
    /// Maximum number of handshakes at the same time for one network.
    pub max_handshakes_per_network: usize,
    /// Time limit of each of the three steps: first byte, wait for a handshake slot, handshake.
    pub step_timeout: Duration,
}

/// The two pools of slots. Clones share them.
#[derive(Clone, Debug)]
pub struct AdmissionControl {
    silent: Arc<SlotPool>,
    handshakes: Arc<SlotPool>,
    step_timeout: Duration,
}

/// An accepted connection that holds a slot of the silent pool.
#[derive(Debug)]
pub struct PendingConnection {
    admission: AdmissionControl,
    address: IpAddr,
    slot: Slot,
}

/// Why a connection was not admitted.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// The slot was given to a connection of a network that holds fewer slots.
    #[error("its place was given to another network")]
    Evicted,
    /// One of the three steps exceeded [`AdmissionLimits::step_timeout`].
    #[error("no handshake in time")]
    TimedOut,
    /// The handshake failed, or the peer closed the connection.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

impl AdmissionControl {
    /// Returns a door with all slots free.
    #[must_use]
    pub fn new(bounds: AdmissionLimits) -> Self {
        Self {
            silent: SlotPool::new(bounds.silent, usize::MAX),
            handshakes: SlotPool::new(bounds.handshakes, bounds.max_handshakes_per_network),
            step_timeout: bounds.step_timeout,
        }
    }

    /// Gives a newly accepted connection from `address` a silent slot. Returns `None` if the caller
    /// must close the connection at once.
    #[must_use]
    pub fn register(&self, address: IpAddr) -> Option<PendingConnection> {
        let place = self.silent.acquire(address)?;
        Some(PendingConnection { admission: self.clone(), address, slot: place })
    }

    /// Waits for a free handshake slot for `address`.
    async fn wait_for_handshake_slot(&self, address: IpAddr) -> Slot {
        loop {
            if let Some(place) = self.handshakes.acquire(address) {
                return place;
            }
            sleep(RETRY_INTERVAL).await;
        }
    }
}

impl PendingConnection {
    /// Waits for the first byte, then for a handshake slot, then runs `handshake`.
    ///
    /// # Errors
    /// If a step takes too long or fails, or if the connection is evicted from its slot.
    pub async fn admit<T>(
        self,
        tcp: TcpStream,
        handshake: impl AsyncFnOnce(TcpStream) -> io::Result<T>,
    ) -> Result<T, AdmissionError> {
        let Self { admission: door, address, slot: place } = self;
        run_in_slot(&place, door.step_timeout, first_byte(&tcp)).await?;
        let inside = run_in_slot(&place, door.step_timeout, async {
            Ok(door.wait_for_handshake_slot(address).await)
        })
        .await?;
        drop(place);
        run_in_slot(&inside, door.step_timeout, handshake(tcp)).await
    }
}

/// Runs `work` until it ends, `time` has passed, or the slot is given to another connection.
async fn run_in_slot<T>(
    place: &Slot,
    time: Duration,
    work: impl Future<Output = io::Result<T>>,
) -> Result<T, AdmissionError> {
    tokio::select! {
        () = place.evicted.cancelled() => Err(AdmissionError::Evicted),
        done = timeout(time, work) => Ok(done.map_err(|_| AdmissionError::TimedOut)??),
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
pub fn network_of(address: IpAddr) -> IpAddr {
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
