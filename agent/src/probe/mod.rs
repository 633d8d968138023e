//! Probes. A probe checks that a peer's advertised address leads to the agent that signed this
//! address.
//!
//! Until its node starts, an agent listens on the node's peer address and answers probes there. A
//! probe uses TLS 1.3 with both agents' own Ed25519 keys and ALPN `muster-probe/1`. Its answer is
//! one JSON line of at most 4 KiB. The probing agent proves its key by a client certificate. The
//! connection is closed without an answer unless that key is in the proposal or in a list that this
//! agent has signed.
//!
//! Certificates only carry bare keys here. They are self-signed and compared by key; chain, names
//! and dates are ignored.

pub(crate) mod client;
pub(crate) mod server;
pub(crate) mod tls;

use std::time::Duration;

use discovery_types::digest::Incarnation;
use discovery_types::jws::Jws;
use discovery_types::key::PublicKey;
use serde::{Deserialize, Serialize};

pub(crate) use self::tls::ProbeIdentity;

/// The protocol's ALPN name in the TLS handshake.
pub(crate) const ALPN: &[u8] = b"muster-probe/1";
/// Maximum length of an answer in bytes, its newline included.
pub(crate) const ANSWER_LIMIT: usize = 4 * 1024;
/// The longest that a probe may take from connect to answer.
pub(crate) const PROBE_DEADLINE: Duration = Duration::from_secs(3);

/// A probed agent's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// The agent's public key, which the handshake has proved as well.
    pub key: PublicKey,
    /// The incarnation of the agent's node.
    pub incarnation: Incarnation,
    /// The agent's signed release (its promise to be in no list up to an epoch) with the highest
    /// epoch, a compact JWS. `None` if the agent has released nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released: Option<Jws>,
}
