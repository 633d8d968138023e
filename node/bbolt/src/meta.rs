//! Meta pages: they give the number of pages and the page of the root bucket.

use crate::page::{HEADER_BYTES, u32_at, u64_at};

const MAGIC: u32 = 0xED0C_DAED;
const VERSION: u32 = 2;
/// Length in bytes of the part of a meta that its checksum covers.
const CHECKED_BYTES: usize = 56;
/// Length in bytes of a meta, which follows the page header.
pub(crate) const META_BYTES: usize = CHECKED_BYTES + 8;
/// Base-2 logarithms of the valid page sizes, 1 KiB to 16 MiB. bbolt tries the same sizes when the
/// first meta page is damaged.
pub(crate) const PAGE_SHIFTS: std::ops::RangeInclusive<u32> = 10..=24;

/// Contents of a meta page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MetaPage {
    /// Size of a page in bytes.
    pub(crate) page_bytes: u64,
    /// Page number of the root bucket.
    pub(crate) root: u64,
    /// Page number of the list of free pages.
    pub(crate) freelist: u64,
    /// Number of pages in use; pages from this number on are unused.
    pub(crate) pages: u64,
    /// Id of the transaction that wrote this meta.
    pub(crate) txid: u64,
}

impl MetaPage {
    /// Parses the bytes after the header of a meta page. Returns `None` if they are no valid meta.
    pub(crate) fn parse(bytes: &[u8; META_BYTES]) -> Option<Self> {
        let page_bytes = u32_at(bytes, 8)?;
        let is_one = u32_at(bytes, 0)? == MAGIC
            && u32_at(bytes, 4)? == VERSION
            && u64_at(bytes, CHECKED_BYTES)? == fnv64a(&bytes[..CHECKED_BYTES])
            && page_bytes.is_power_of_two()
            && PAGE_SHIFTS.contains(&page_bytes.ilog2());
        is_one.then_some(Self {
            page_bytes: page_bytes.into(),
            root: u64_at(bytes, 16)?,
            freelist: u64_at(bytes, 32)?,
            pages: u64_at(bytes, 40)?,
            txid: u64_at(bytes, 48)?,
        })
    }

    pub(crate) fn encode(self) -> [u8; META_BYTES] {
        let mut bytes = [0; META_BYTES];
        let page_bytes = u32::try_from(self.page_bytes).expect("at most 16 MiB");
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
        bytes[8..12].copy_from_slice(&page_bytes.to_le_bytes());
        // The bytes from 12 to 16 (flags) and from 24 to 32 (the root's sequence) stay 0.
        bytes[16..24].copy_from_slice(&self.root.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.freelist.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.pages.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.txid.to_le_bytes());
        let sum = fnv64a(&bytes[..CHECKED_BYTES]);
        bytes[CHECKED_BYTES..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }
}

/// Returns the file offset of the meta in the page that starts at the byte offset `page`.
pub(crate) fn offset(page: u64) -> u64 {
    page + HEADER_BYTES as u64
}

fn fnv64a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_fnv_1a() {
        // These values are test vectors from the authors of FNV.
        assert_eq!(fnv64a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv64a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn a_meta_survives_a_round_trip_and_is_refused_with_a_flipped_bit() {
        let meta = MetaPage { page_bytes: 4096, root: 7, freelist: 2, pages: 9, txid: 3 };
        let bytes = meta.encode();
        assert_eq!(MetaPage::parse(&bytes), Some(meta));
        for bit in 0..META_BYTES * 8 {
            let mut bytes = bytes;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(MetaPage::parse(&bytes), None, "bit {bit}");
        }
    }

    #[test]
    fn an_invalid_page_size_is_refused() {
        for page_bytes in [0, 512, 4095, 1 << 25] {
            let meta = MetaPage { page_bytes, root: 7, freelist: 2, pages: 9, txid: 3 };
            assert_eq!(MetaPage::parse(&meta.encode()), None, "{page_bytes}");
        }
    }
}
