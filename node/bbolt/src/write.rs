//! Writing a file from front to back.
//!
//! Leaves are written as they fill up, and with each one an entry goes to the branch above it, which
//! is written when it is full in turn: so a tree needs one open page of each level. The two meta
//! pages come first and have to name the root, which comes last; that is what [`measure`] is for.

use std::io::{self, Write};

use crate::WriteError;
use crate::meta::Meta;
use crate::page::{BRANCH, ELEMENT_BYTES, FREELIST, HEADER_BYTES, IS_BUCKET, LEAF, META};

/// What etcd's machines have.
const PAGE_BYTES: usize = 4096;
/// Two meta pages and an empty list of free pages.
const FIRST_PAGE: u64 = 3;
const FREELIST_PAGE: u64 = 2;
/// A bucket that takes no more lies inline: as in bbolt, a quarter of a page.
const MAX_INLINE_BYTES: usize = PAGE_BYTES / 4;
/// The longest key that bbolt takes.
pub const MAX_KEY_BYTES: usize = 32_768;
/// The longest value.
const MAX_VALUE_BYTES: usize = (1 << 31) - 2;
/// Elements of one page; a count of 0xFFFF means something else in lists of free pages.
const MAX_COUNT: usize = 0xFFFE;

/// How large a file gets, and where its root is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    root: u64,
    pages: u64,
}

impl Layout {
    /// Bytes of the file.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.pages * PAGE_BYTES as u64
    }
}

/// Finds out what file `fill` makes.
pub fn measure<E: From<WriteError>>(
    fill: impl FnOnce(&mut Builder<'_>) -> Result<(), E>,
) -> Result<Layout, E> {
    let mut nowhere = io::sink();
    let mut builder = Builder::new(&mut nowhere, u64::MAX);
    fill(&mut builder)?;
    Ok(builder.finish()?)
}

/// Writes the file that [`measure`] found `layout` for: `fill` has to do the same again.
pub fn write<E: From<WriteError>>(
    layout: Layout,
    out: &mut dyn Write,
    fill: impl FnOnce(&mut Builder<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let mut builder = Builder::new(out, layout.pages);
    builder.pages.write_head(layout)?;
    fill(&mut builder)?;
    if builder.finish()? != layout {
        return Err(WriteError::Changed.into());
    }
    Ok(())
}

/// Takes the entries of a file, in order.
pub struct Builder<'a> {
    pages: Pages<'a>,
    /// The bucket that entries go to now, by its name.
    bucket: Option<(Vec<u8>, Tree)>,
    root: Tree,
}

impl<'a> Builder<'a> {
    fn new(out: &'a mut dyn Write, limit: u64) -> Self {
        let pages = Pages { out, next: FIRST_PAGE, limit };
        Self { pages, bucket: None, root: Tree::default() }
    }

    /// Ends the bucket before, if any, and begins this one, which comes after it.
    pub fn bucket(&mut self, name: &[u8]) -> Result<(), WriteError> {
        self.end_bucket()?;
        self.bucket = Some((name.to_vec(), Tree::default()));
        Ok(())
    }

    /// Adds an entry to the bucket, behind all others.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), WriteError> {
        let Some((_, tree)) = &mut self.bucket else { return Err(WriteError::NoBucket) };
        tree.put(key, &Body::Value(value), &mut self.pages)
    }

    fn end_bucket(&mut self) -> Result<(), WriteError> {
        let Some((name, tree)) = self.bucket.take() else { return Ok(()) };
        let inline = tree.as_inline();
        let (root, page) = match inline {
            Some(page) => (0, page),
            None => (tree.finish(&mut self.pages)?, Vec::new()),
        };
        let mut value = Vec::with_capacity(16 + page.len());
        value.extend_from_slice(&root.to_le_bytes());
        // Its sequence, which etcd doesn't use.
        value.extend_from_slice(&[0; 8]);
        value.extend_from_slice(&page);
        self.root.put(&name, &Body::Bucket(&value), &mut self.pages)
    }

    fn finish(mut self) -> Result<Layout, WriteError> {
        self.end_bucket()?;
        let root = self.root.finish(&mut self.pages)?;
        Ok(Layout { root, pages: self.pages.next })
    }
}

/// What an element holds.
enum Body<'a> {
    Value(&'a [u8]),
    Bucket(&'a [u8]),
    /// The page below, of a branch.
    Child(u64),
}

impl Body<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Value(bytes) | Self::Bucket(bytes) => bytes,
            Self::Child(_) => &[],
        }
    }
}

/// One bucket, as far as it has not been written.
#[derive(Default)]
struct Tree {
    /// Leaves first.
    levels: Vec<Level>,
    last_key: Vec<u8>,
}

struct Level {
    /// A branch that is full, and waits until the one after it is worth a page.
    full: Option<Node>,
    open: Node,
    /// A page of this level has been written.
    written: bool,
}

impl Tree {
    fn put(
        &mut self,
        key: &[u8],
        body: &Body<'_>,
        pages: &mut Pages<'_>,
    ) -> Result<(), WriteError> {
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            return Err(WriteError::KeySize(key.len()));
        }
        if body.bytes().len() > MAX_VALUE_BYTES {
            return Err(WriteError::ValueSize(body.bytes().len()));
        }
        if key <= &self.last_key[..] {
            return Err(WriteError::Order);
        }
        self.last_key.clear();
        self.last_key.extend_from_slice(key);
        self.push(0, key, body, pages)
    }

    fn push(
        &mut self,
        level: usize,
        key: &[u8],
        body: &Body<'_>,
        pages: &mut Pages<'_>,
    ) -> Result<(), WriteError> {
        if level == self.levels.len() {
            let open = Node::new(level == 0);
            self.levels.push(Level { full: None, open, written: false });
        }
        let room = key.len() + body.bytes().len();
        if let Some(node) = self.levels[level].make_room(room) {
            self.emit(level, &node, pages)?;
        }
        self.levels[level].open.add(key, body);
        Ok(())
    }

    /// Writes a page, and tells the level above.
    fn emit(&mut self, level: usize, node: &Node, pages: &mut Pages<'_>) -> Result<(), WriteError> {
        let number = pages.write(node)?;
        self.levels[level].written = true;
        self.push(level + 1, node.first_key(), &Body::Child(number), pages)
    }

    /// Writes what is left; gives the root's page.
    fn finish(mut self, pages: &mut Pages<'_>) -> Result<u64, WriteError> {
        let mut level = 0;
        while level < self.levels.len() {
            let here = &mut self.levels[level];
            let (full, last) = here.rest();
            if full.is_none() && !here.written {
                return pages.write(&last);
            }
            for node in full.into_iter().chain([last]) {
                self.emit(level, &node, pages)?;
            }
            level += 1;
        }
        // No entry at all.
        pages.write(&Node::new(true))
    }

    /// The only page, if it is small enough to lie in the bucket's entry.
    fn as_inline(&self) -> Option<Vec<u8>> {
        let empty = Node::new(true);
        let node = match &self.levels[..] {
            [] => &empty,
            [only] if !only.written && only.open.bytes() <= MAX_INLINE_BYTES => &only.open,
            _ => return None,
        };
        let mut page = Vec::with_capacity(node.bytes());
        node.encode(0, 0, &mut page);
        Some(page)
    }
}

impl Level {
    /// Room for an element in the open page. The page that has to be written for it, if any.
    fn make_room(&mut self, bytes: usize) -> Option<Node> {
        if self.open.has_room(bytes) {
            return None;
        }
        let next = Node::new(self.open.is_leaf);
        let node = std::mem::replace(&mut self.open, next);
        if self.open.is_leaf { Some(node) } else { self.full.replace(node) }
    }

    /// What has not been written. A branch of a single page is put to the one before it: bbolt, when
    /// it takes entries away, can't do with one.
    fn rest(&mut self) -> (Option<Node>, Node) {
        let last = std::mem::replace(&mut self.open, Node::new(true));
        match self.full.take() {
            Some(mut full) if last.elements.len() == 1 => {
                full.append(last);
                (None, full)
            }
            full => (full, last),
        }
    }
}

struct Element {
    flags: u32,
    child: u64,
    key: u32,
    value: u32,
}

/// A page that is being filled.
struct Node {
    is_leaf: bool,
    elements: Vec<Element>,
    /// Keys and values, in order.
    data: Vec<u8>,
}

impl Node {
    fn new(is_leaf: bool) -> Self {
        Self { is_leaf, elements: Vec::new(), data: Vec::new() }
    }

    fn bytes(&self) -> usize {
        HEADER_BYTES + self.elements.len() * ELEMENT_BYTES + self.data.len()
    }

    /// With what lies behind its end in its last page.
    fn pages(&self) -> usize {
        self.bytes().div_ceil(PAGE_BYTES)
    }

    /// A leaf takes what fits into the pages that its first element needs; a branch takes two pages
    /// at least, since it would be none else.
    fn has_room(&self, bytes: usize) -> bool {
        let least = if self.is_leaf { 1 } else { 2 };
        let fits = self.bytes() + ELEMENT_BYTES + bytes <= self.pages() * PAGE_BYTES;
        self.elements.len() < least || (fits && self.elements.len() < MAX_COUNT)
    }

    fn add(&mut self, key: &[u8], body: &Body<'_>) {
        let (flags, child) = match body {
            Body::Value(_) => (0, 0),
            Body::Bucket(_) => (IS_BUCKET, 0),
            Body::Child(page) => (0, *page),
        };
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).expect("checked by put");
        let (key_length, value_length) = (length(key), length(body.bytes()));
        self.elements.push(Element { flags, child, key: key_length, value: value_length });
        self.data.extend_from_slice(key);
        self.data.extend_from_slice(body.bytes());
    }

    fn append(&mut self, other: Self) {
        self.elements.extend(other.elements);
        self.data.extend(other.data);
    }

    fn first_key(&self) -> &[u8] {
        let length = self.elements.first().map_or(0, |element| element.key);
        &self.data[..crate::page::length(length)]
    }

    /// The page, without what lies behind its end.
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
            offset += crate::page::length(element.key) + crate::page::length(element.value);
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

/// Where pages go.
struct Pages<'a> {
    out: &'a mut dyn Write,
    next: u64,
    /// Pages that there may be.
    limit: u64,
}

impl Pages<'_> {
    fn write(&mut self, node: &Node) -> Result<u64, WriteError> {
        let pages = node.pages();
        let number = self.next;
        self.next += pages as u64;
        if self.next > self.limit {
            return Err(WriteError::Changed);
        }
        let mut bytes = Vec::with_capacity(pages * PAGE_BYTES);
        let more = u32::try_from(pages - 1).expect("a page has one large element at most");
        node.encode(number, more, &mut bytes);
        bytes.resize(pages * PAGE_BYTES, 0);
        self.out.write_all(&bytes).map_err(WriteError::Io)?;
        Ok(number)
    }

    fn write_head(&mut self, layout: Layout) -> Result<(), WriteError> {
        let Layout { root, pages } = layout;
        let mut bytes = Vec::with_capacity(3 * PAGE_BYTES);
        // As bbolt has it: the page is the transaction's id modulo 2.
        for (number, txid) in [(0, 2), (1, 1)] {
            write_header(number, META, 0, 0, &mut bytes);
            let page_bytes = PAGE_BYTES as u64;
            let meta = Meta { page_bytes, root, freelist: FREELIST_PAGE, pages, txid };
            bytes.extend_from_slice(&meta.encode());
            bytes.resize(bytes.len().next_multiple_of(PAGE_BYTES), 0);
        }
        write_header(FREELIST_PAGE, FREELIST, 0, 0, &mut bytes);
        bytes.resize(3 * PAGE_BYTES, 0);
        self.out.write_all(&bytes).map_err(WriteError::Io)
    }
}
