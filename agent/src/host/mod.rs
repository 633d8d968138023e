//! The host behind one small trait: what the agent asks of the machine that it runs on, apart
//! from files under its own data directory. One implementation is real, one is for tests.

#[cfg(test)]
pub(crate) mod fake;
pub(crate) mod local;

use std::io;
use std::net::{IpAddr, SocketAddr};

use discovery_formation::Machine;

/// What the agent asks of its machine.
pub(crate) trait Host: Send + Sync + 'static {
    /// What makes it this machine.
    fn facts(&self) -> io::Result<Machine>;
    /// Its name, for a default.
    fn name(&self) -> String;
    /// The local address that packets to `peer` leave from.
    fn route_to(&self, peer: SocketAddr) -> io::Result<IpAddr>;
    /// All of its addresses, loopback last.
    fn addresses(&self) -> Vec<IpAddr>;
    /// Whether `at` can be listened on just now.
    fn test_bind(&self, at: SocketAddr) -> io::Result<()>;
    /// The wall clock: for names, log lines and the comparison of clocks, never for a decision
    /// about order.
    fn now(&self) -> jiff::Timestamp;
}
