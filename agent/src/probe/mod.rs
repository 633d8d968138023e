//! Probes: does a peer's advertised address lead to the agent that signed for it?
//!
//! Until its node starts, an agent listens on the node's peer address and answers probes there:
//! TLS 1.3 with both agents' own Ed25519 keys, ALPN `muster-probe/1`, and one JSON line of at most
//! 4 KiB. Whoever asks proves a key of its own by its client certificate; a key that stands neither
//! in the proposal nor in a list that this agent has signed gets nothing but a close.
//!
//! Certificates here are wrappings for bare keys: self-signed, compared by key, without chain,
//! names or dates.

pub(crate) mod client;
pub(crate) mod server;
pub(crate) mod tls;

use std::time::Duration;

use discovery_types::digest::Incarnation;
use discovery_types::jws::Jws;
use discovery_types::key::PublicKey;
use serde::{Deserialize, Serialize};

pub(crate) use self::tls::ProbeIdentity;

/// The protocol's name in the TLS handshake.
pub(crate) const ALPN: &[u8] = b"muster-probe/1";
/// The longest answer, with its newline.
pub(crate) const ANSWER_LIMIT: usize = 4 * 1024;
/// The longest that a probe may take from connect to answer.
pub(crate) const PROBE_DEADLINE: Duration = Duration::from_secs(3);

/// What a probed agent says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// Its public key: what the handshake has proved, said again.
    pub key: PublicKey,
    /// Its node's incarnation.
    pub incarnation: Incarnation,
    /// Its highest signed release, a compact JWS, if it has released anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released: Option<Jws>,
}
