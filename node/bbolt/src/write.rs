//! Writes a file from front to back.
//!
//! A leaf is written when it is full, and an entry for it is added to the branch above. A branch is
//! likewise written when it is full, so a tree needs one open page of each level. The two meta
//! pages come first, but they must contain the number of the root page, which comes last.
//! [`measure`] finds that number before the file is written.

use std::io::{self, Write};

use crate::BboltWriteError;
use crate::meta::MetaPage;
use crate::page::{BRANCH, BUCKET_FLAG, ELEMENT_BYTES, FREELIST, HEADER_BYTES, LEAF, META};

/// Page size in bytes, as on the machines that etcd runs on.
const PAGE_BYTES: usize = 4096;
/// Number of the first data page, after two meta pages and an empty list of free pages.
const FIRST_PAGE: u64 = 3;
const FREELIST_PAGE: u64 = 2;
/// Maximum size in bytes of a bucket that is stored inline: a quarter of a page, as in bbolt.
const MAX_INLINE_BYTES: usize = PAGE_BYTES / 4;
/// Length in bytes of the longest key that bbolt accepts.
pub const MAX_KEY_BYTES: usize = 32_768;
/// Length in bytes of the longest value that bbolt accepts.
const MAX_VALUE_BYTES: usize = (1 << 31) - 2;
/// Maximum number of elements in a page. In a list of free pages, the count 0xFFFF has a special
/// meaning.
const MAX_PAGE_ELEMENTS: usize = 0xFFFE;

/// Size of a file, and the number of its root page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    root: u64,
    pages: u64,
}

impl Layout {
    /// Size of the file in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.pages * PAGE_BYTES as u64
    }
}

/// Runs `fill` without writing anything, and returns the layout of the resulting file.
pub fn measure<E: From<BboltWriteError>>(
    fill: impl FnOnce(&mut Builder<'_>) -> Result<(), E>,
) -> Result<Layout, E> {
    let mut nowhere = io::sink();
    let mut builder = Builder::new(&mut nowhere, u64::MAX);
    fill(&mut builder)?;
    Ok(builder.finish()?)
}

/// Writes the file. `layout` is the result of [`measure`], and `fill` must add the same entries
/// again.
pub fn write<E: From<BboltWriteError>>(
    layout: Layout,
    out: &mut dyn Write,
    fill: impl FnOnce(&mut Builder<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let mut builder = Builder::new(out, layout.pages);
    builder.pages.write_first_pages(layout)?;
    fill(&mut builder)?;
    if builder.finish()? != layout {
        return Err(BboltWriteError::LayoutMismatch.into());
    }
    Ok(())
}

/// Receives the buckets and entries of a file, in order.
pub struct Builder<'a> {
    pages: PageWriter<'a>,
    /// Name and tree of the open bucket, to which entries are added.
    open_bucket: Option<(Vec<u8>, Tree)>,
    root: Tree,
}

impl<'a> Builder<'a> {
    fn new(out: &'a mut dyn Write, limit: u64) -> Self {
        let pages = PageWriter { out, next: FIRST_PAGE, limit };
        Self { pages, open_bucket: None, root: Tree::default() }
    }

    /// Begins the bucket `name` and ends the one before it. Names must be in ascending order.
    pub fn begin_bucket(&mut self, name: &[u8]) -> Result<(), BboltWriteError> {
        self.end_bucket()?;
        self.open_bucket = Some((name.to_vec(), Tree::default()));
        Ok(())
    }

    /// Appends an entry to the open bucket. Keys must be in ascending order.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), BboltWriteError> {
        let Some((_, tree)) = &mut self.open_bucket else { return Err(BboltWriteError::NoBucket) };
        tree.put(key, &ElementBody::Value(value), &mut self.pages)
    }

    fn end_bucket(&mut self) -> Result<(), BboltWriteError> {
        let Some((name, tree)) = self.open_bucket.take() else { return Ok(()) };
        let inline = tree.as_inline();
        let (root, page) = match inline {
            Some(page) => (0, page),
            None => (tree.finish(&mut self.pages)?, Vec::new()),
        };
        let mut value = Vec::with_capacity(16 + page.len());
        value.extend_from_slice(&root.to_le_bytes());
        // After the root's page number comes the bucket's sequence. etcd doesn't use it, so it is
        // 0.
        value.extend_from_slice(&[0; 8]);
        value.extend_from_slice(&page);
        self.root.put(&name, &ElementBody::Bucket(&value), &mut self.pages)
    }

    fn finish(mut self) -> Result<Layout, BboltWriteError> {
        self.end_bucket()?;
        let root = self.root.finish(&mut self.pages)?;
        Ok(Layout { root, pages: self.pages.next })
    }
}

/// Value of a leaf element, or child of a branch element.
enum ElementBody<'a> {
    Value(&'a [u8]),
    Bucket(&'a [u8]),
    /// Page number of a branch element's child.
    Child(u64),
}

impl ElementBody<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Value(bytes) | Self::Bucket(bytes) => bytes,
            Self::Child(_) => &[],
        }
    }
}

/// A bucket's tree: the nodes that have not been written yet.
#[derive(Default)]
struct Tree {
    /// Levels of the tree, leaves first.
    levels: Vec<TreeLevel>,
    last_key: Vec<u8>,
}

struct TreeLevel {
    /// A full branch that has not been written. If the branch after it gets only one element, this
    /// branch takes that element over.
    full: Option<PageBuilder>,
    open: PageBuilder,
    /// Whether a page of this level has been written.
    has_written_pages: bool,
}

impl Tree {
    fn put(
        &mut self,
        key: &[u8],
        body: &ElementBody<'_>,
        pages: &mut PageWriter<'_>,
    ) -> Result<(), BboltWriteError> {
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            return Err(BboltWriteError::KeySize(key.len()));
        }
        if body.bytes().len() > MAX_VALUE_BYTES {
            return Err(BboltWriteError::ValueSize(body.bytes().len()));
        }
        if key <= &self.last_key[..] {
            return Err(BboltWriteError::KeysOutOfOrder);
        }
        self.last_key.clear();
        self.last_key.extend_from_slice(key);
        self.push(0, key, body, pages)
    }

    fn push(
        &mut self,
        level: usize,
        key: &[u8],
        body: &ElementBody<'_>,
        pages: &mut PageWriter<'_>,
    ) -> Result<(), BboltWriteError> {
        if level == self.levels.len() {
            let open = PageBuilder::new(level == 0);
            self.levels.push(TreeLevel { full: None, open, has_written_pages: false });
        }
        let room = key.len() + body.bytes().len();
        if let Some(node) = self.levels[level].make_room(room) {
            self.emit(level, &node, pages)?;
        }
        self.levels[level].open.add(key, body);
        Ok(())
    }

    /// Writes a page and adds an entry for it to the level above.
    fn emit(
        &mut self,
        level: usize,
        node: &PageBuilder,
        pages: &mut PageWriter<'_>,
    ) -> Result<(), BboltWriteError> {
        let number = pages.write(node)?;
        self.levels[level].has_written_pages = true;
        self.push(level + 1, node.first_key(), &ElementBody::Child(number), pages)
    }

    /// Writes all open nodes and returns the page number of the root.
    fn finish(mut self, pages: &mut PageWriter<'_>) -> Result<u64, BboltWriteError> {
        let mut level = 0;
        while level < self.levels.len() {
            let here = &mut self.levels[level];
            let (full, last) = here.take_unwritten();
            if full.is_none() && !here.has_written_pages {
                return pages.write(&last);
            }
            for node in full.into_iter().chain([last]) {
                self.emit(level, &node, pages)?;
            }
            level += 1;
        }
        // The loop has found no node, so the bucket has no entry. It gets an empty leaf.
        pages.write(&PageBuilder::new(true))
    }

    /// Returns the tree's only page if it is small enough to be stored inline.
    fn as_inline(&self) -> Option<Vec<u8>> {
        let empty = PageBuilder::new(true);
        let node = match &self.levels[..] {
            [] => &empty,
            [only] if !only.has_written_pages && only.open.bytes() <= MAX_INLINE_BYTES => {
                &only.open
            }
            _ => return None,
        };
        let mut page = Vec::with_capacity(node.bytes());
        node.encode(0, 0, &mut page);
        Some(page)
    }
}

impl TreeLevel {
    /// Makes room for an element in the open node. Returns the node that has to be written now, if
    /// any.
    fn make_room(&mut self, bytes: usize) -> Option<PageBuilder> {
        if self.open.has_room(bytes) {
            return None;
        }
        let next = PageBuilder::new(self.open.is_leaf);
        let node = std::mem::replace(&mut self.open, next);
        if self.open.is_leaf { Some(node) } else { self.full.replace(node) }
    }

    /// Takes the nodes that have not been written. A last branch with a single child is merged into
    /// the branch before it. bbolt can't handle such a branch when it removes entries.
    fn take_unwritten(&mut self) -> (Option<PageBuilder>, PageBuilder) {
        let last = std::mem::replace(&mut self.open, PageBuilder::new(true));
        match self.full.take() {
            Some(mut full) if last.elements.len() == 1 => {
                full.append(last);
                (None, full)
            }
            full => (full, last),
        }
    }
}

struct ElementHeader {
    flags: u32,
    child: u64,
    key: u32,
    value: u32,
}

/// A page that is being filled.
struct PageBuilder {
    is_leaf: bool,
    elements: Vec<ElementHeader>,
    /// Keys and values of all elements, in order.
    data: Vec<u8>,
}

impl PageBuilder {
    fn new(is_leaf: bool) -> Self {
        Self { is_leaf, elements: Vec::new(), data: Vec::new() }
    }

    fn bytes(&self) -> usize {
        HEADER_BYTES + self.elements.len() * ELEMENT_BYTES + self.data.len()
    }

    /// Returns the number of pages that the node takes, rounded up.
    fn pages(&self) -> usize {
        self.bytes().div_ceil(PAGE_BYTES)
    }

    /// Whether an element with `bytes` bytes of key and value fits. A leaf takes as many elements
    /// as fit into the pages that its first element needs. A branch takes at least two children,
    /// however large their keys are.
    fn has_room(&self, bytes: usize) -> bool {
        let least = if self.is_leaf { 1 } else { 2 };
        let fits = self.bytes() + ELEMENT_BYTES + bytes <= self.pages() * PAGE_BYTES;
        self.elements.len() < least || (fits && self.elements.len() < MAX_PAGE_ELEMENTS)
    }

    fn add(&mut self, key: &[u8], body: &ElementBody<'_>) {
        let (flags, child) = match body {
            ElementBody::Value(_) => (0, 0),
            ElementBody::Bucket(_) => (BUCKET_FLAG, 0),
            ElementBody::Child(page) => (0, *page),
        };
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).expect("checked by put");
        let (key_length, value_length) = (length(key), length(body.bytes()));
        self.elements.push(ElementHeader { flags, child, key: key_length, value: value_length });
        self.data.extend_from_slice(key);
        self.data.extend_from_slice(body.bytes());
    }

    fn append(&mut self, other: Self) {
        self.elements.extend(other.elements);
        self.data.extend(other.data);
    }

    fn first_key(&self) -> &[u8] {
        let length = self.elements.first().map_or(0, |element| element.key);
        &self.data[..crate::page::to_usize(length)]
    }

    /// Appends the encoded node, without padding to a whole page.
    fn encode(&self, number: u64, more: u32, out: &mut Vec<u8>) {
        let count = u16::try_from(self.elements.len()).expect("there is room for no more");
        write_header(number, if self.is_leaf { LEAF } else { BRANCH }, count, more, out);
        let mut offset = self.elements.len() * ELEMENT_BYTES;
        for element in &self.elements {
            let at = u32::try_from(offset).expect("a page has one large element at most");
            if self.is_leaf {
                for word in [element.flags, at, element.key, element.value] {
                    out.extend_from_slice(&word.to_le_bytes());
                }
            } else {
                out.extend_from_slice(&at.to_le_bytes());
                out.extend_from_slice(&element.key.to_le_bytes());
                out.extend_from_slice(&element.child.to_le_bytes());
            }
            offset += crate::page::to_usize(element.key) + crate::page::to_usize(element.value);
            // An element's offset counts from its own header. The next header begins
            // `ELEMENT_BYTES` later, so its offset is that much smaller.
            offset -= ELEMENT_BYTES;
        }
        out.extend_from_slice(&self.data);
    }
}

fn write_header(number: u64, kind: u16, count: u16, more: u32, out: &mut Vec<u8>) {
    out.extend_from_slice(&number.to_le_bytes());
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&count.to_le_bytes());
    out.extend_from_slice(&more.to_le_bytes());
}

/// The output, and the number of the next page to be written.
struct PageWriter<'a> {
    out: &'a mut dyn Write,
    next: u64,
    /// Maximum number of pages, from the measured layout.
    limit: u64,
}

impl PageWriter<'_> {
    fn write(&mut self, node: &PageBuilder) -> Result<u64, BboltWriteError> {
        let pages = node.pages();
        let number = self.next;
        self.next += pages as u64;
        if self.next > self.limit {
            return Err(BboltWriteError::LayoutMismatch);
        }
        let mut bytes = Vec::with_capacity(pages * PAGE_BYTES);
        let more = u32::try_from(pages - 1).expect("a page has one large element at most");
        node.encode(number, more, &mut bytes);
        bytes.resize(pages * PAGE_BYTES, 0);
        self.out.write_all(&bytes).map_err(BboltWriteError::Io)?;
        Ok(number)
    }

    fn write_first_pages(&mut self, layout: Layout) -> Result<(), BboltWriteError> {
        let Layout { root, pages } = layout;
        let mut bytes = Vec::with_capacity(3 * PAGE_BYTES);
        // bbolt writes a transaction's meta to the page with the number of the transaction id
        // modulo 2.
        for (number, txid) in [(0, 2), (1, 1)] {
            write_header(number, META, 0, 0, &mut bytes);
            let page_bytes = PAGE_BYTES as u64;
            let meta = MetaPage { page_bytes, root, freelist: FREELIST_PAGE, pages, txid };
            bytes.extend_from_slice(&meta.encode());
            bytes.resize(bytes.len().next_multiple_of(PAGE_BYTES), 0);
        }
        write_header(FREELIST_PAGE, FREELIST, 0, 0, &mut bytes);
        bytes.resize(3 * PAGE_BYTES, 0);
        self.out.write_all(&bytes).map_err(BboltWriteError::Io)
    }
}
