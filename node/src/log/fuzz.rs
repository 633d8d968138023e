//! Fuzz targets (for `fuzz/`) for the payload of a record.

use bytes::Bytes;

use super::codec::{decode, decode_start, encode, encode_start};

/// Checks that a payload which can be decoded is encoded again to identical bytes.
pub fn record(bytes: &[u8]) {
    let payload = Bytes::copy_from_slice(bytes);
    if let Ok(items) = decode(&payload) {
        let mut out = Vec::new();
        items.iter().for_each(|item| encode(&mut out, item));
        assert_eq!(out, bytes, "{items:?}");
    }
    if let Ok(start) = decode_start(&payload) {
        let mut out = Vec::new();
        encode_start(&mut out, &start);
        assert_eq!(out, bytes, "{start:?}");
    }
}
