//! Reader for a member's snapshot. The input follows a valid magic number and version.
#![no_main]

use muster_fuzz as _;
use node_state::mvcc::inspect_snapshot;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let snapshot = [b"MUSTERKV\x02\0\0\0", bytes].concat();
    let _ = inspect_snapshot(&mut &snapshot[..]);
});
