//! The machine behind one small trait: everything that the agent needs of it, apart from files in
//! the data directory. There is a real implementation and one for tests.

pub(crate) mod cloud;
#[cfg(test)]
pub(crate) mod fake;
pub(crate) mod local;
pub(crate) mod machine;

use std::io;
use std::net::{IpAddr, SocketAddr};

use discovery_formation::MachineIdentity;

/// Everything that the agent needs of its machine.
pub(crate) trait Host: Send + Sync + 'static {
    /// Returns the facts that identify the machine.
    fn facts(&self) -> io::Result<MachineIdentity>;
    /// Returns the host's name, the basis of the default member name.
    fn name(&self) -> String;
    /// Returns the local address from which packets to `peer` leave.
    fn route_to(&self, peer: SocketAddr) -> io::Result<IpAddr>;
    /// Returns all addresses of the host, loopback last.
    fn addresses(&self) -> Vec<IpAddr>;
    /// Checks whether `at` can be listened on now.
    fn test_bind(&self, at: SocketAddr) -> io::Result<()>;
    /// Returns the wall-clock time. It is for names, log lines and the comparison of clocks, never
    /// for a decision about order.
    fn now(&self) -> jiff::Timestamp;
}
