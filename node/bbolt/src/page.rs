//! Branch and leaf pages as raw bytes, checked once when a page is read.

use crate::BboltReadError;

/// Bytes of a page header: page number (8), page type (2), element count (2), overflow pages (4).
pub(crate) const HEADER_BYTES: usize = 16;
/// Bytes of an element header. In a leaf: flags (4), offset (4), key length (4), value length (4).
/// In a branch: offset (4), key length (4), page number (8). Offsets count from the start of the
/// element header.
pub(crate) const ELEMENT_BYTES: usize = 16;
/// Flag of a leaf element whose value is a bucket.
pub(crate) const BUCKET_FLAG: u32 = 1;

/// Page type of a branch, as the page header gives it.
pub(crate) const BRANCH: u16 = 0x01;
/// Page type of a leaf.
pub(crate) const LEAF: u16 = 0x02;
/// Page type of a meta page.
pub(crate) const META: u16 = 0x04;
/// Page type of the list of free pages.
pub(crate) const FREELIST: u16 = 0x10;

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|word| u16::from_le_bytes(*word))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_le_bytes(*word))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|word| u64::from_le_bytes(*word))
}

/// Converts a number of the file to a length in memory. A number that doesn't fit becomes
/// `usize::MAX`, which is larger than any page.
pub(crate) fn to_usize(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Offsets of an element's key and value within its page.
#[derive(Clone, Copy)]
struct Element {
    /// Flags of a leaf element; 0 for a branch element.
    flags: u32,
    /// Number of the child page of a branch element; 0 for a leaf element.
    child: u64,
    key: usize,
    value: usize,
    end: usize,
}

/// A branch or leaf page whose elements lie within the page and are in key order.
pub(crate) struct Page {
    number: u64,
    is_leaf: bool,
    count: usize,
    bytes: Vec<u8>,
}

impl Page {
    /// Checks a page. `bytes` is the page together with its overflow pages.
    pub(crate) fn new(number: u64, bytes: Vec<u8>) -> Result<Self, BboltReadError> {
        let damaged = |what| BboltReadError::Page { page: number, what };
        let kind = u16_at(&bytes, 8).ok_or(damaged("it has no header"))?;
        let is_leaf = match kind {
            LEAF => true,
            BRANCH => false,
            _ => return Err(damaged("it is neither branch nor leaf")),
        };
        let count = u16_at(&bytes, 10).ok_or(damaged("it has no header"))?.into();
        let page = Self { number, is_leaf, count, bytes };
        page.check().map_err(damaged)?;
        Ok(page)
    }

    fn check(&self) -> Result<(), &'static str> {
        let elements_end = HEADER_BYTES + self.count * ELEMENT_BYTES;
        let mut before: Option<&[u8]> = None;
        for at in 0..self.count {
            let element = self.element(at).ok_or("an element lies outside of it")?;
            if element.key < elements_end || element.end > self.bytes.len() {
                return Err("an element lies outside of it");
            }
            let key = &self.bytes[element.key..element.value];
            if key.is_empty() {
                return Err("a key is empty");
            }
            if before.is_some_and(|before| before >= key) {
                return Err("its keys are not in order");
            }
            before = Some(key);
        }
        Ok(())
    }

    /// Decodes the element header `at`. Returns `None` if its numbers overflow. The offsets can
    /// still lie outside the page.
    fn element(&self, at: usize) -> Option<Element> {
        let start = HEADER_BYTES + at * ELEMENT_BYTES;
        let word = |word: usize| u32_at(&self.bytes, start + word * 4);
        let (flags, child, offset, key_length, value_length) = if self.is_leaf {
            (word(0)?, 0, word(1)?, word(2)?, word(3)?)
        } else {
            (0, u64_at(&self.bytes, start + 8)?, word(0)?, word(1)?, 0)
        };
        let key = start.checked_add(to_usize(offset))?;
        let value = key.checked_add(to_usize(key_length))?;
        let end = value.checked_add(to_usize(value_length))?;
        Some(Element { flags, child, key, value, end })
    }

    fn checked_element(&self, at: usize) -> Element {
        self.element(at).expect("checked when the page was read")
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn is_leaf(&self) -> bool {
        self.is_leaf
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn key(&self, at: usize) -> &[u8] {
        let element = self.checked_element(at);
        &self.bytes[element.key..element.value]
    }

    /// Returns the value of element `at`, which is empty for a branch.
    pub(crate) fn value(&self, at: usize) -> &[u8] {
        let element = self.checked_element(at);
        &self.bytes[element.value..element.end]
    }

    /// Whether the value of leaf element `at` is a bucket.
    pub(crate) fn is_bucket(&self, at: usize) -> bool {
        self.checked_element(at).flags & BUCKET_FLAG != 0
    }

    /// Returns the number of the child page of branch element `at`.
    pub(crate) fn child(&self, at: usize) -> u64 {
        self.checked_element(at).child
    }

    /// Whether all keys are at least `lower` and less than `upper` (unbounded if `None`).
    pub(crate) fn has_all_keys_in(&self, lower: &[u8], upper: Option<&[u8]>) -> bool {
        let Some(last) = self.count.checked_sub(1) else { return true };
        self.key(0) >= lower && upper.is_none_or(|upper| self.key(last) < upper)
    }
}
