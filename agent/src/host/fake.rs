//! A machine for tests, whose facts and addresses the test sets.

use std::io;
use std::net::{IpAddr, SocketAddr};

use super::Host;
use discovery_formation::MachineIdentity;

/// A machine for tests. Its facts, its address and its taken addresses are set by the test.
#[derive(Clone, Debug)]
pub(crate) struct FakeHost {
    /// Facts that [`Host::facts`] returns.
    pub facts: MachineIdentity,
    /// Address that [`Host::route_to`] returns, and the only one in [`Host::addresses`].
    pub address: IpAddr,
    /// Addresses that can't be bound.
    pub taken: Vec<SocketAddr>,
}

impl Default for FakeHost {
    fn default() -> Self {
        Self {
            facts: crate::host::machine::from_texts(None, Some("paper")),
            address: IpAddr::from([10, 0, 0, 7]),
            taken: Vec::new(),
        }
    }
}

impl Host for FakeHost {
    fn facts(&self) -> io::Result<MachineIdentity> {
        Ok(self.facts.clone())
    }

    fn name(&self) -> String {
        "Paper_Host.example".to_owned()
    }

    fn route_to(&self, _peer: SocketAddr) -> io::Result<IpAddr> {
        Ok(self.address)
    }

    fn addresses(&self) -> Vec<IpAddr> {
        vec![self.address]
    }

    fn test_bind(&self, at: SocketAddr) -> io::Result<()> {
        if self.taken.contains(&at) { Err(io::ErrorKind::AddrInUse.into()) } else { Ok(()) }
    }

    fn now(&self) -> jiff::Timestamp {
        jiff::Timestamp::UNIX_EPOCH
    }
}
