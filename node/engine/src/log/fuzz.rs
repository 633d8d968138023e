//! Fuzz targets (for `fuzz/`) for the payload of a record.

use bytes::Bytes;

use super::codec::{decode, decode_segment_header, encode, encode_segment_header};

/// Checks that a payload which can be decoded is encoded again to identical bytes.
pub fn record(bytes: &[u8]) {
    let payload = Bytes::copy_from_slice(bytes);
    if let Ok(items) = decode(&payload) {
        let mut out = Vec::new();
        items.iter().for_each(|item| encode(&mut out, item));
        assert_eq!(out, bytes, "{items:?}");
    }
    if let Ok(start) = decode_segment_header(&payload) {
        let mut out = Vec::new();
        encode_segment_header(&mut out, &start);
        assert_eq!(out, bytes, "{start:?}");
    }
}
