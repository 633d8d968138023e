//! Parsers for the texts that an operator pastes on a host: a bundle or join ticket, and the signed
//! values in it.
#![no_main]

use discovery_types::bundle::Bundle;
use discovery_types::grant::GrantId;
use discovery_types::jws::Jws;
use muster_fuzz as _;

libfuzzer_sys::fuzz_target!(|text: &str| {
    let _ = text.parse::<Bundle>();
    let _ = text.parse::<GrantId>();
    let _ = text.parse::<Jws>();
});
