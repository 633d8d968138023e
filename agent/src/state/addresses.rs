//! The addresses of a host's node, as the journal keeps them.

use std::net::SocketAddr;

use discovery_types::url::NodeUrl;
use serde::{Deserialize, Serialize};

/// Addresses on which the node listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenAddresses {
    /// Address on which the node listens for the other members.
    pub peer: SocketAddr,
    /// Address on which the node listens for clients.
    pub client: SocketAddr,
}

/// The addresses of a host's node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addresses {
    /// URL that the other members use.
    pub peer_url: NodeUrl,
    /// URL that clients use.
    pub client_url: NodeUrl,
    pub listen: ListenAddresses,
}
