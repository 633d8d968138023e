//! Tests of messages that arrive in pieces.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use muster_shares::memory::{MemoryBounds, MemoryBudget};
use proptest::prelude::*;

use super::*;

const LARGEST: usize = 1 << 16;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap()
}

fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[flag], &length[..], message].concat()
}

/// Returns all bytes that the decompressor passes on for these pieces.
fn read<'a>(
    decompressor: &mut Decompressor,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> Result<Vec<u8>, Status> {
    let mut all = Vec::new();
    for piece in pieces {
        decompressor.add(Bytes::copy_from_slice(piece));
        while let Some(ready) = decompressor.next()? {
            assert!(ready.len() <= MESSAGE_HEADER_BYTES + LARGEST);
            all.extend(ready);
        }
    }
    Ok(all)
}

proptest! {
    #[test]
    fn decompressed_messages_do_not_depend_on_how_the_body_is_split(
        messages in prop::collection::vec((any::<bool>(), prop::collection::vec(0..4_u8, 0..2_000)), 0..6),
        piece in 1..3_000_usize,
    ) {
        let (mut wire, mut plain) = (Vec::new(), Vec::new());
        for (is_compressed, message) in &messages {
            plain.extend(framed(0, message));
            wire.extend(if *is_compressed { framed(1, &gzip(message)) } else { framed(0, message) });
        }
        let mut decompressor = Decompressor::new(LARGEST);
        prop_assert_eq!(read(&mut decompressor, wire.chunks(piece)).unwrap(), plain);
        prop_assert!(decompressor.is_empty());
    }
}

#[test]
fn one_message_is_decompressed_at_a_time() {
    let one = framed(1, &gzip(&[0; LARGEST]));
    let mut decompressor = Decompressor::new(LARGEST);
    decompressor.add(one.repeat(9).into());
    for left in (0..9).rev() {
        let ready = decompressor.next().unwrap().unwrap();
        assert_eq!(
            (ready.len(), decompressor.rest.len()),
            (MESSAGE_HEADER_BYTES + LARGEST, left * one.len())
        );
        assert_eq!(decompressor.is_empty(), left == 0);
    }
    assert!(decompressor.next().unwrap().is_none());
}

#[test]
fn an_incomplete_compressed_message_counts_with_its_stated_length() {
    let message = gzip(&[7; 1_000]);
    let wire = framed(1, &message);
    let mut decompressor = Decompressor::new(LARGEST);
    for (came, held) in [(0, 0), (4, 4), (5, wire.len()), (wire.len() - 1, wire.len())] {
        decompressor = Decompressor::new(LARGEST);
        assert!(read(&mut decompressor, [&wire[..came]]).unwrap().is_empty());
        assert_eq!((decompressor.incomplete_bytes(), decompressor.is_empty()), (held, held == 0));
    }
    assert_eq!(read(&mut decompressor, [&wire[wire.len() - 1..]]).unwrap(), framed(0, &[7; 1_000]));
    assert_eq!(decompressor.incomplete_bytes(), 0);
}

#[test]
fn several_gzip_members_decompress_to_one_message() {
    let message = [gzip(b"one "), gzip(b""), gzip(b"message")].concat();
    let told = read(&mut Decompressor::new(LARGEST), [&framed(1, &message)[..]]).unwrap();
    assert_eq!(told, framed(0, b"one message"));
    let many = gzip(&[0; LARGEST / 8]).repeat(9);
    let refused = read(&mut Decompressor::new(LARGEST), [&framed(1, &many)[..]]).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
}

#[test]
fn a_message_with_too_many_gzip_members_is_refused() {
    let of = |members| framed(1, &gzip(b"").repeat(members));
    for (members, code) in [(MAX_MEMBERS, None), (MAX_MEMBERS + 1, Some(tonic::Code::Internal))] {
        let told = read(&mut Decompressor::new(LARGEST), [&of(members)[..]]);
        assert_eq!(told.err().map(|status| status.code()), code, "{members} members");
    }
}

#[test]
fn decompressed_messages_are_charged_until_the_call_is_answered() {
    let bounds = MemoryBounds { per_connection: 3 * LARGEST, total: usize::MAX, guaranteed: 0 };
    let account = MemoryBudget::new(bounds).open_account(std::net::Ipv4Addr::LOCALHOST.into());
    let wire = framed(1, &gzip(&[0; LARGEST]));
    let call = || {
        let unanswered = DecompressedCharge::new(&account);
        let mut decompressor = Decompressor::new(LARGEST).with_charge(unanswered.clone());
        (read(&mut decompressor, [&wire[..]]).map(|message| message.len()), unanswered)
    };
    let (first, one) = call();
    let (second, two) = call();
    assert_eq!((first.unwrap(), second.unwrap()), (wire_length(), wire_length()));
    assert_eq!(account.held(), 2 * wire_length());
    let (refused, three) = call();
    assert_eq!(refused.unwrap_err().code(), tonic::Code::ResourceExhausted);
    drop((one, three));
    assert_eq!(account.held(), wire_length());
    assert!(call().0.is_ok(), "one was answered");
    drop(two);
    assert_eq!(account.held(), 0);
    // A message that can't be decompressed isn't charged.
    let unanswered = DecompressedCharge::new(&account);
    let mut decompressor = Decompressor::new(LARGEST).with_charge(unanswered.clone());
    assert!(read(&mut decompressor, [&framed(1, b"no gzip")[..]]).is_err());
    assert_eq!(account.held(), 0);
}

fn wire_length() -> usize {
    MESSAGE_HEADER_BYTES + LARGEST
}

#[test]
fn only_a_gzip_encoding_header_is_removed() {
    let mut headers = HeaderMap::new();
    assert!(!take_gzip_encoding(&mut headers));
    headers.insert(ENCODING, "identity".parse().unwrap());
    assert!(!take_gzip_encoding(&mut headers));
    assert_eq!(headers.len(), 1);
    headers.insert(ENCODING, "gzip".parse().unwrap());
    assert!(take_gzip_encoding(&mut headers));
    assert!(headers.is_empty());
}
