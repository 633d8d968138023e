//! Decoder for a peer stream: frames, and the messages in them.
#![no_main]

use muster_fuzz as _;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| node_engine::transport::fuzz::frames(bytes));
