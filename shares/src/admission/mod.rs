//! Admission of connections whose peer is not authenticated yet.
//!
//! A TLS handshake costs memory and a signature, and any host may start one. So a connection passes
//! two pools of slots before it is admitted:
//!
//! 1. *Silent*: no byte has arrived. The connection costs a socket, and has a short time to send
//!    its first byte.
//! 2. *Handshake*: the first byte has arrived. There are few of these slots, and one network may
//!    hold only some of them. Further connections of that network stay in the silent pool until a
//!    handshake slot is free.
//!
//! If a pool is full, a new connection can evict a connection of another network, as
//! [`SlotPool::take_or_evict`] describes. A host that opens many connections and sends nothing, or
//! one byte on each, therefore blocks only itself.
//!
//! Admitted connections are not limited here, nor is the rate of connection attempts.

use std::{io, net::IpAddr, time::Duration};

use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};

use crate::{
    network_of,
    slots::{Slot, SlotPool},
};

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
    silent: SlotPool<IpAddr>,
    handshakes: SlotPool<IpAddr>,
    step_timeout: Duration,
}

/// An accepted connection that holds a slot of the silent pool.
#[derive(Debug)]
pub struct PendingConnection {
    admission: AdmissionControl,
    network: IpAddr,
    slot: Slot<IpAddr>,
}

/// Why a connection was not admitted.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// The connection's slot was given to a connection of a network that holds fewer slots.
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
    /// Creates both pools, with all slots free.
    #[must_use]
    pub fn new(limits: AdmissionLimits) -> Self {
        Self {
            silent: SlotPool::new(limits.silent, usize::MAX),
            handshakes: SlotPool::new(limits.handshakes, limits.max_handshakes_per_network),
            step_timeout: limits.step_timeout,
        }
    }

    /// Gives a newly accepted connection from `address` a silent slot. Returns `None` if the caller
    /// must close the connection at once.
    #[must_use]
    pub fn register(&self, address: IpAddr) -> Option<PendingConnection> {
        let network = network_of(address);
        let slot = self.silent.take_or_evict(network)?;
        Some(PendingConnection { admission: self.clone(), network, slot })
    }

    /// Waits for a free handshake slot for `network`.
    async fn wait_for_handshake_slot(&self, network: IpAddr) -> Slot<IpAddr> {
        loop {
            if let Some(slot) = self.handshakes.take_or_evict(network) {
                return slot;
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
        let Self { admission, network, slot } = self;
        let limit = admission.step_timeout;
        run_in_slot(&slot, limit, first_byte(&tcp)).await?;
        let wait = async { Ok(admission.wait_for_handshake_slot(network).await) };
        let handshake_slot = run_in_slot(&slot, limit, wait).await?;
        drop(slot);
        run_in_slot(&handshake_slot, limit, handshake(tcp)).await
    }
}

/// Runs `work` until it ends, `time` has passed, or the slot is given to another connection.
async fn run_in_slot<T>(
    slot: &Slot<IpAddr>,
    time: Duration,
    work: impl Future<Output = io::Result<T>>,
) -> Result<T, AdmissionError> {
    tokio::select! {
        () = slot.evicted() => Err(AdmissionError::Evicted),
        done = timeout(time, work) => Ok(done.map_err(|_| AdmissionError::TimedOut)??),
    }
}

async fn first_byte(tcp: &TcpStream) -> io::Result<()> {
    match tcp.peek(&mut [0]).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
