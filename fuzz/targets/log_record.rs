//! A record of the log: whatever is understood is written again byte for byte.
#![no_main]

use muster_fuzz as _;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| muster_node::fuzz::log_record(bytes));
