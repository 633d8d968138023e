//! A request to the JSON gateway. The input is the path, a zero byte and the body.
#![no_main]

use muster_fuzz as _;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| node_api::gateway::fuzz::post(bytes));
