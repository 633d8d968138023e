//! Decoder for log records. A decoded record must encode to the same bytes again.
#![no_main]

use muster_fuzz as _;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| node_engine::log::fuzz::record(bytes));
