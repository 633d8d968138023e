//! Revisions and key ranges, the two dimensions of every read.

use std::ops::Bound;

use bytes::Bytes;

/// A point in the store's history: `main` counts write requests, `sub` the changes within one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision {
    /// Number of the write request; the first one is 2, as in etcd.
    pub main: i64,
    /// Number of the change within the request, from 0.
    pub sub: u32,
}

impl Revision {
    /// Returns the row of the record table for this revision. Rows sort as revisions do.
    pub(crate) fn to_row(self) -> u128 {
        (u128::from(self.main.cast_unsigned()) << 64) | u128::from(self.sub)
    }

    /// Returns the revision of a row made by [`Self::to_row`].
    pub(crate) fn from_row(row: u128) -> Self {
        let low =
            |bits: u128| u64::try_from(bits & u128::from(u64::MAX)).expect("masked to 64 bits");
        Self {
            main: low(row >> 64).cast_signed(),
            sub: u32::try_from(low(row) & u64::from(u32::MAX)).expect("masked to 32 bits"),
        }
    }
}

/// Length of a revision in etcd's format: main, `_`, sub.
const ETCD_BYTES: usize = 8 + 1 + 8;
/// Byte that etcd appends to the revision of a tombstone.
const ETCD_TOMBSTONE: u8 = b't';

/// Key under which etcd stores a change.
#[derive(Clone, Copy)]
pub(crate) struct EtcdKey {
    bytes: [u8; ETCD_BYTES + 1],
    length: usize,
}

impl EtcdKey {
    pub(crate) fn new(at: Revision, is_tombstone: bool) -> Self {
        let mut bytes = [0; ETCD_BYTES + 1];
        bytes[..8].copy_from_slice(&at.main.to_be_bytes());
        bytes[8] = b'_';
        bytes[9..ETCD_BYTES].copy_from_slice(&i64::from(at.sub).to_be_bytes());
        bytes[ETCD_BYTES] = ETCD_TOMBSTONE;
        Self { bytes, length: ETCD_BYTES + usize::from(is_tombstone) }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// Parses a key of etcd's store into the change's revision and whether it is a tombstone.
    /// Returns `None` if etcd never writes such a key.
    pub(crate) fn parse(key: &[u8]) -> Option<(Revision, bool)> {
        let (main, rest) = key.split_first_chunk()?;
        let (sub, mark) = rest.strip_prefix(b"_")?.split_first_chunk()?;
        let main = i64::from_be_bytes(*main);
        let sub = u32::try_from(i64::from_be_bytes(*sub)).ok()?;
        let is_tombstone = match mark {
            [] => false,
            [ETCD_TOMBSTONE] => true,
            _ => return None,
        };
        (main > 0).then_some((Revision { main, sub }, is_tombstone))
    }
}

/// Start and end bounds of a walk over an ordered map.
type Bounds<'a> = (Bound<&'a [u8]>, Bound<&'a [u8]>);

/// Keys selected by a request's `key` and `range_end`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KeyRange {
    /// The key alone; `range_end` is empty.
    One(Bytes),
    /// Keys from the first, inclusive, to the second, exclusive. Empty if the bounds are not in
    /// order.
    Between(Bytes, Bytes),
    /// This key and all keys after it; `range_end` is `"\0"`.
    From(Bytes),
}

impl KeyRange {
    /// Interprets `key` and `range_end` as etcd does.
    #[must_use]
    pub fn new(key: Bytes, range_end: Bytes) -> Self {
        match &range_end[..] {
            [] => Self::One(key),
            [0] => Self::From(key),
            _ => Self::Between(key, range_end),
        }
    }

    #[must_use]
    pub fn contains(&self, key: &[u8]) -> bool {
        match self {
            Self::One(one) => key == one,
            Self::Between(start, end) => key >= start && key < end,
            Self::From(start) => key >= start,
        }
    }

    /// Whether the range can't contain any key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Between(start, end) if start >= end)
    }

    /// Returns the lowest key that the range can contain.
    #[must_use]
    pub fn start(&self) -> &Bytes {
        match self {
            Self::One(start) | Self::Between(start, _) | Self::From(start) => start,
        }
    }

    /// Returns the bounds for an ordered map, beginning after the key `after` if given. `None`
    /// means that no key is left, or that the range is a single key.
    pub(crate) fn bounds<'a>(&'a self, after: Option<&'a [u8]>) -> Option<Bounds<'a>> {
        let from = after.map_or(Bound::Included(&self.start()[..]), Bound::Excluded);
        let begin = after.unwrap_or(self.start());
        match self {
            Self::One(_) => None,
            Self::Between(_, end) => {
                (begin < &end[..]).then_some((from, Bound::Excluded(&end[..])))
            }
            Self::From(_) => Some((from, Bound::Unbounded)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_sort_like_revisions_and_convert_back() {
        let revisions = [(1, 0), (1, 7), (2, 0), (i64::MAX, u32::MAX)]
            .map(|(main, sub)| Revision { main, sub });
        let rows = revisions.map(Revision::to_row);
        assert!(rows.is_sorted());
        assert_eq!(rows.map(Revision::from_row), revisions);
    }

    #[test]
    fn etcds_keys_are_parsed_and_other_bytes_are_refused() {
        for (main, sub, dead) in [(1, 0, false), (1 << 40, 7, true), (i64::MAX, u32::MAX, true)] {
            let at = Revision { main, sub };
            assert_eq!(EtcdKey::parse(EtcdKey::new(at, dead).bytes()), Some((at, dead)));
        }
        let key = EtcdKey::new(Revision { main: 5, sub: 1 }, true);
        assert_eq!(key.bytes(), b"\0\0\0\0\0\0\0\x05_\0\0\0\0\0\0\0\x01t");
        for (at, byte) in [(0, 0x80), (7, 0), (8, b'-'), (9, 0x80), (12, 1), (17, b's')] {
            let mut bytes = key.bytes().to_vec();
            bytes[at] = byte;
            assert_eq!(EtcdKey::parse(&bytes), None, "byte {at}");
        }
        let longer = [key.bytes(), b"t"].concat();
        assert!(EtcdKey::parse(&longer).is_none() && EtcdKey::parse(&longer[..16]).is_none());
    }

    #[test]
    fn a_zero_byte_as_range_end_means_everything_after() {
        let range = KeyRange::new(Bytes::from_static(b"b"), Bytes::from_static(b"\0"));
        assert!(range.contains(b"b") && range.contains(b"zzz") && !range.contains(b"a"));
    }

    #[test]
    fn a_range_with_its_end_before_its_start_is_empty() {
        let range = KeyRange::new(Bytes::from_static(b"b"), Bytes::from_static(b"a"));
        assert!(range.is_empty() && range.bounds(None).is_none());
    }
}
