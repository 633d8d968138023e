//! The one form of a CMS message (RFC 5652) that AWS signs: `SignedData` with its content, one
//! signer and SHA-256.
//!
//! AWS writes BER, with indefinite lengths and octet strings in pieces. Certificates in the message
//! are skipped: only configured keys count.

use ring::digest::{SHA256, digest};
use x509_parser::asn1_rs::{Any, Class, FromBer, Header, Tag};

/// Contents of the object identifier `id-signedData`: 1.2.840.113549.1.7.2.
const SIGNED_DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 7, 2];
/// Contents of the object identifier `id-data`: 1.2.840.113549.1.7.1.
const DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 7, 1];
/// Contents of the object identifier `id-contentType`: 1.2.840.113549.1.9.3.
const CONTENT_TYPE: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 3];
/// Contents of the object identifier `id-messageDigest`: 1.2.840.113549.1.9.4.
const MESSAGE_DIGEST: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 4];
/// Contents of the object identifier `id-sha256`: 2.16.840.1.101.3.4.2.1.
const ID_SHA256: &[u8] = &[0x60, 0x86, 0x48, 1, 0x65, 3, 4, 2, 1];

/// First byte of a SET's encoding.
const SET_BYTE: u8 = 0x31;
/// First byte of the encoding of a constructed element with the context tag 0.
const CONTEXT_0_BYTE: u8 = 0xa0;

/// Reason why a message doesn't have the form that AWS signs.
type CmsError = &'static str;

/// The parts of a message whose signature is not verified yet. Signed attributes were compared with
/// the content.
#[derive(Debug)]
pub(crate) struct SignedData<'a> {
    /// Content that was signed.
    pub content: Vec<u8>,
    /// Signed bytes: the content, or the attributes that contain its hash.
    pub message: Vec<u8>,
    /// Signature by the cloud's key over `message`, PKCS #1 v1.5.
    pub signature: &'a [u8],
}

/// The elements of a sequence or set that weren't read yet.
struct Elements<'a>(&'a [u8]);

/// One element with all its bytes.
struct Element<'a> {
    header: Header<'a>,
    /// Contents of the element, without its header and its end-of-contents bytes.
    contents: &'a [u8],
    /// Whole encoding of the element.
    whole: &'a [u8],
}

impl<'a> Elements<'a> {
    fn next(&mut self) -> Result<Element<'a>, CmsError> {
        let (rest, any) = Any::from_ber(self.0).map_err(|_| "no BER")?;
        let whole = &self.0[..self.0.len() - rest.len()];
        self.0 = rest;
        Ok(Element { header: any.header, contents: any.data, whole })
    }

    /// Returns the next element if it has the context tag `number`.
    fn next_tagged(&mut self, number: u32) -> Result<Option<Element<'a>>, CmsError> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let mut ahead = Elements(self.0);
        let element = ahead.next()?;
        let is_wanted =
            element.header.class() == Class::ContextSpecific && element.header.tag() == Tag(number);
        Ok(is_wanted.then(|| {
            self.0 = ahead.0;
            element
        }))
    }

    fn expect(&mut self, tag: Tag, fault: CmsError) -> Result<Element<'a>, CmsError> {
        let element = self.next()?;
        let is_expected = element.header.class() == Class::Universal && element.header.tag() == tag;
        is_expected.then_some(element).ok_or(fault)
    }

    /// Reads an object identifier. Fails with `fault` unless the contents are `id`.
    fn expect_id(&mut self, id: &[u8], fault: CmsError) -> Result<(), CmsError> {
        let found = self.expect(Tag::Oid, fault)?;
        if found.contents == id { Ok(()) } else { Err(fault) }
    }
}

impl<'a> Element<'a> {
    fn elements(&self) -> Elements<'a> {
        Elements(self.contents)
    }

    /// Returns the bytes of an octet string, which can be in pieces.
    fn octets(&self) -> Result<Vec<u8>, CmsError> {
        if !self.header.is_constructed() {
            return Ok(self.contents.to_vec());
        }
        let mut pieces = self.elements();
        let mut octets = Vec::new();
        while !pieces.0.is_empty() {
            let piece = pieces.expect(Tag::OctetString, "a piece of the content is no octets")?;
            if piece.header.is_constructed() {
                return Err("a piece of the content is in pieces itself");
            }
            octets.extend_from_slice(piece.contents);
        }
        Ok(octets)
    }
}

impl<'a> SignedData<'a> {
    /// Parses a message, and compares the hash in its signed attributes with the content.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, CmsError> {
        let mut top = Elements(bytes);
        let mut message = top.expect(Tag::Sequence, "no CMS message")?.elements();
        if !top.0.is_empty() {
            return Err("bytes after the message");
        }
        message.expect_id(SIGNED_DATA, "no signed CMS message")?;
        let signed = message.next_tagged(0)?.ok_or("no signed data")?;
        let mut signed = signed.elements().expect(Tag::Sequence, "no signed data")?.elements();
        signed.expect(Tag::Integer, "no version")?;
        signed.expect(Tag::Set, "no digest algorithms")?;
        let mut encapsulated = signed.expect(Tag::Sequence, "no content")?.elements();
        encapsulated.expect_id(DATA, "the content is no data")?;
        let content = encapsulated.next_tagged(0)?.ok_or("the content is detached")?;
        let content = content.elements().expect(Tag::OctetString, "no content")?.octets()?;
        // Skip the certificates and revocation lists, which the sender chooses.
        signed.next_tagged(0)?;
        signed.next_tagged(1)?;
        let mut signers = signed.expect(Tag::Set, "no signers")?.elements();
        let signer = signers.expect(Tag::Sequence, "no signer")?;
        if !signers.0.is_empty() {
            return Err("more than one signer");
        }
        Self::read_signer(&signer, content)
    }

    fn read_signer(signer: &Element<'a>, content: Vec<u8>) -> Result<Self, CmsError> {
        let mut signer = signer.elements();
        signer.expect(Tag::Integer, "the signer has no version")?;
        // Skip the signer's name: every trusted key is tried.
        signer.next()?;
        let mut hash = signer.expect(Tag::Sequence, "the signer has no digest")?.elements();
        hash.expect_id(ID_SHA256, "the digest is not SHA-256")?;
        let attributes = signer.next_tagged(0)?;
        signer.expect(Tag::Sequence, "the signer has no signature algorithm")?;
        let signature = signer.expect(Tag::OctetString, "the signer has no signature")?;
        if signature.header.is_constructed() {
            return Err("the signature is in pieces");
        }
        let message = match attributes {
            Some(attributes) => signed_attributes(&attributes, &content)?,
            None => content.clone(),
        };
        Ok(Self { content, message, signature: signature.contents })
    }
}

/// Checks that the signed attributes belong to this content. Returns the bytes that are signed: the
/// attributes as a SET in DER (RFC 5652, section 5.4).
fn signed_attributes(attributes: &Element<'_>, content: &[u8]) -> Result<Vec<u8>, CmsError> {
    let mut listed = attributes.elements();
    let (mut types, mut hashes) = (0, 0);
    while !listed.0.is_empty() {
        let mut attribute = listed.expect(Tag::Sequence, "no attribute")?.elements();
        let id = attribute.expect(Tag::Oid, "an attribute has no name")?.contents;
        let mut values = attribute.expect(Tag::Set, "an attribute has no values")?.elements();
        if id == CONTENT_TYPE {
            types += 1;
            values.expect_id(DATA, "another type of content was signed")?;
        } else if id == MESSAGE_DIGEST {
            hashes += 1;
            let hash = values.expect(Tag::OctetString, "no digest")?.octets()?;
            if hash != digest(&SHA256, content).as_ref() {
                return Err("another content was signed");
            }
        } else {
            continue;
        }
        if !values.0.is_empty() {
            return Err("a signed attribute has two values");
        }
    }
    if (types, hashes) != (1, 1) {
        return Err("the signed attributes lack the content's type or digest");
    }
    // If the attributes have a definite length and the sender followed RFC 5652, they are already
    // in DER. If they aren't in DER, the signature doesn't verify.
    match attributes.whole.split_first() {
        Some((&CONTEXT_0_BYTE, rest)) if attributes.header.length().is_definite() => {
            Ok([&[SET_BYTE], rest].concat())
        }
        _ => Err("the signed attributes are not in DER"),
    }
}
