//! What `fuzz/` runs of what is nobody else's: decoders of bytes that come from outside.

pub use crate::config::fuzz_file as config_file;
pub use crate::log::fuzz::record as log_record;

/// Frames from a peer.
pub fn peer_frames(bytes: &[u8]) {
    crate::transport::fuzz::frames(bytes);
}

/// What is posted to the JSON gateway: a path, a zero byte, and the body.
pub fn gateway_json(bytes: &[u8]) {
    crate::gateway::fuzz::post(bytes);
}
