//! Fuzz targets of `fuzz/` that no other module exports: decoders of bytes that come from outside.

pub use crate::config::fuzz_file as config_file;
pub use crate::log::fuzz::record as log_record;

/// Decodes `bytes` as frames from a peer.
pub fn peer_frames(bytes: &[u8]) {
    crate::transport::fuzz::frames(bytes);
}

/// Handles a request to the JSON gateway. `bytes` is a path, a zero byte, and the body.
pub fn gateway_json(bytes: &[u8]) {
    crate::gateway::fuzz::post(bytes);
}
