//! Bytes of a record: a header, a payload, and zeros up to the next block.
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 4 | `MLG1` |
//! | 4 | 4 | payload length |
//! | 8 | 8 | sequence number, over all segments |
//! | 16 | 4 | checksum of the record before |
//! | 20 | 1 | kind |
//! | 21 | 3 | zero |
//! | 24 | 4 | CRC-32C over the first 24 bytes and the payload, seeded |
//!
//! Numbers are little endian.

use super::LogIdentity;

/// Alignment of records in bytes, so that no sector belongs to two records.
pub(super) const BLOCK_BYTES: u64 = 4096;
/// Length of a record's header in bytes.
pub(super) const HEADER_BYTES: usize = 28;

const MAGIC: [u8; 4] = *b"MLG1";
const CHECKSUM_OFFSET: usize = 24;

/// Kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum RecordKind {
    /// First record of a segment.
    Start = 1,
    /// Group of items (hard state, entries and others).
    Group = 2,
    /// Last record of a full segment. It proves that the next segment exists.
    Rolled = 3,
}

/// A header as read, before its checksum is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordHeader {
    pub length: u32,
    pub sequence: u64,
    pub previous: u32,
    pub kind: u8,
    pub checksum: u32,
}

/// Returns the initial value of all checksums of one segment.
pub(super) fn seed(identity: &LogIdentity, segment: u64) -> u32 {
    let mut crc = crc32c::crc32c(b"muster log");
    for part in [identity.cluster, identity.member, segment] {
        crc = crc32c::crc32c_append(crc, &part.to_le_bytes());
    }
    crc32c::crc32c_append(crc, &identity.incarnation.to_be_bytes())
}

/// Returns the bytes that a record with a payload of this length takes on disk, padding included.
pub(super) fn padded_bytes(payload: usize) -> u64 {
    ((HEADER_BYTES + payload) as u64).next_multiple_of(BLOCK_BYTES)
}

/// Turns a buffer into a record. The buffer begins with `HEADER_BYTES` arbitrary bytes, followed by
/// the payload. Returns the record's checksum.
pub(super) fn finish(
    buffer: &mut Vec<u8>,
    seed: u32,
    sequence: u64,
    previous: u32,
    kind: RecordKind,
) -> u32 {
    let payload = buffer.len() - HEADER_BYTES;
    let length = u32::try_from(payload).expect("a record fits a segment, and that is far smaller");
    buffer[..4].copy_from_slice(&MAGIC);
    buffer[4..8].copy_from_slice(&length.to_le_bytes());
    buffer[8..16].copy_from_slice(&sequence.to_le_bytes());
    buffer[16..20].copy_from_slice(&previous.to_le_bytes());
    buffer[20..CHECKSUM_OFFSET].copy_from_slice(&[kind as u8, 0, 0, 0]);
    let checksum = checksum(seed, &buffer[..CHECKSUM_OFFSET], &buffer[HEADER_BYTES..]);
    buffer[CHECKSUM_OFFSET..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    let padded =
        usize::try_from(padded_bytes(payload)).expect("in memory already, but for the padding");
    buffer.resize(padded, 0);
    checksum
}

/// Returns the header if these bytes begin like a record.
pub(super) fn parse(bytes: &[u8]) -> Option<RecordHeader> {
    let bytes = bytes.get(..HEADER_BYTES)?;
    if bytes[..4] != MAGIC || bytes[21..CHECKSUM_OFFSET] != [0; 3] {
        return None;
    }
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let sequence = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
    Some(RecordHeader {
        length: word(4),
        sequence,
        previous: word(16),
        kind: bytes[20],
        checksum: word(CHECKSUM_OFFSET),
    })
}

/// Returns whether header and payload match their checksum. `record` must have as many bytes as the
/// header says.
pub(super) fn is_valid(header: &RecordHeader, seed: u32, record: &[u8]) -> bool {
    let Some(payload) = payload(header, record) else { return false };
    checksum(seed, &record[..CHECKSUM_OFFSET], payload) == header.checksum
}

/// Returns the payload in a record's bytes, or `None` if they are too short.
pub(super) fn payload<'a>(header: &RecordHeader, record: &'a [u8]) -> Option<&'a [u8]> {
    let end = HEADER_BYTES.checked_add(usize::try_from(header.length).ok()?)?;
    record.get(HEADER_BYTES..end)
}

fn checksum(seed: u32, head: &[u8], payload: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c_append(seed, head), payload)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SELF: LogIdentity = LogIdentity { cluster: 1, member: 2, incarnation: 3 };

    fn record(payload: &[u8], segment: u64) -> Vec<u8> {
        let mut bytes = vec![0xff; HEADER_BYTES];
        bytes.extend_from_slice(payload);
        finish(&mut bytes, seed(&SELF, segment), 7, 8, RecordKind::Group);
        bytes
    }

    fn valid(bytes: &[u8], segment: u64) -> bool {
        parse(bytes).is_some_and(|header| is_valid(&header, seed(&SELF, segment), bytes))
    }

    #[test]
    fn a_record_reads_back_and_fills_blocks() {
        let bytes = record(b"payload", 5);
        assert_eq!(bytes.len() as u64, BLOCK_BYTES);
        let header = parse(&bytes).unwrap();
        assert_eq!((header.sequence, header.previous, header.kind), (7, 8, 2));
        assert_eq!(payload(&header, &bytes), Some(&b"payload"[..]));
        assert!(valid(&bytes, 5));
        assert_eq!(record(&[1; 4096], 5).len(), 8192);
    }

    #[test]
    fn a_record_of_another_segment_or_member_never_validates() {
        let bytes = record(b"payload", 5);
        assert!(!valid(&bytes, 6));
        let header = parse(&bytes).unwrap();
        for other in [
            LogIdentity { cluster: 9, ..SELF },
            LogIdentity { member: 9, ..SELF },
            LogIdentity { incarnation: 9, ..SELF },
        ] {
            assert!(!is_valid(&header, seed(&other, 5), &bytes));
        }
    }

    #[test]
    fn any_flipped_bit_of_header_or_payload_is_seen() {
        let good = record(b"payload", 5);
        for bit in 0..(HEADER_BYTES + 7) * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(!valid(&bad, 5), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn random_bytes_are_no_record(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = bytes;
            if bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&MAGIC);
            }
            prop_assert!(!valid(&bytes, 5));
        }
    }
}
