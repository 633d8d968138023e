//! What is posted to the JSON gateway: the path, a zero byte, the body.
#![no_main]

use muster_fuzz as _;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| muster_node::fuzz::gateway_json(bytes));
