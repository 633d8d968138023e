//! Decoder for the data of a log entry. Decoded data must be the same after encoding and decoding
//! it again.
#![no_main]

use bytes::Bytes;
use muster_fuzz as _;
use node_proto::command::{decode, encode};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(said) = decode(Bytes::copy_from_slice(bytes)) {
        let again = encode(said.request_id, said.caller.clone(), said.operation.clone());
        let again = decode(again).expect("it was understood");
        assert_eq!(
            (again.request_id, again.caller, again.operation),
            (said.request_id, said.caller, said.operation)
        );
    }
});
