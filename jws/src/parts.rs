//! The text of a compact JWS.

use data_encoding::BASE64URL_NOPAD;

/// The three parts of a compact JWS, still encoded. The methods `header`, `payload` and `signature`
/// decode their part, and return `None` if it is not unpadded base64url.
#[derive(Clone, Copy, Debug)]
pub struct CompactParts<'a> {
    signed: &'a str,
    header: &'a str,
    payload: &'a str,
    signature: &'a str,
}

impl<'a> CompactParts<'a> {
    /// Splits a text at its dots. Returns `None` if the number of parts is not three.
    #[must_use]
    pub fn split(text: &'a str) -> Option<Self> {
        let (signed, signature) = text.rsplit_once('.')?;
        let (header, payload) = signed.split_once('.')?;
        (!payload.contains('.')).then_some(Self { signed, header, payload, signature })
    }

    /// Returns the bytes that the signature covers: header and payload, still encoded.
    #[must_use]
    pub fn signed(&self) -> &'a [u8] {
        self.signed.as_bytes()
    }

    /// Returns the bytes of the header.
    #[must_use]
    pub fn header(&self) -> Option<Vec<u8>> {
        decode_part(self.header)
    }

    /// Returns the bytes of the payload.
    #[must_use]
    pub fn payload(&self) -> Option<Vec<u8>> {
        decode_part(self.payload)
    }

    /// Returns the bytes of the signature.
    #[must_use]
    pub fn signature(&self) -> Option<Vec<u8>> {
        decode_part(self.signature)
    }
}

fn decode_part(part: &str) -> Option<Vec<u8>> {
    BASE64URL_NOPAD.decode(part.as_bytes()).ok()
}
