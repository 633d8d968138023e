//! Parser for the file in which a member keeps the promises of its peers.
#![no_main]

use muster_fuzz as _;
use node_engine::witness::Witness;

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(known) = Witness::decode(text) {
        let again = Witness::decode(&known.encode()).expect("it was understood");
        assert_eq!(again.encode(), known.encode());
    }
});
