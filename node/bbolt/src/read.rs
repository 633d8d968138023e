//! Reading a file, bucket by bucket.

use std::io::{Read, Seek, SeekFrom};

use crate::ReadError;
use crate::meta::{self, META_BYTES, Meta, PAGE_SHIFTS};
use crate::page::{HEADER_BYTES, Page, length, u32_at, u64_at};

/// A page with those that go on with it may take so much: bbolt puts up to four entries into one, of
/// which each may be as large as etcd's largest request.
const MAX_RUN_BYTES: u64 = 256 * 1024 * 1024;
/// A branch page holds no values, only keys, and few of them are large.
const MAX_BRANCH_BYTES: u64 = 1024 * 1024;
/// Levels of a tree. Each but the last has at least two pages for each one above it, so that no file
/// needs more.
const MAX_DEPTH: usize = 32;
/// Root page (8) and sequence (8); what follows, if the root is 0, is the only page.
const BUCKET_BYTES: usize = 16;

/// A file that is being read.
pub struct Reader<R> {
    source: R,
    page_bytes: u64,
    pages: u64,
    root: u64,
}

/// Where a bucket's entries are.
#[derive(Clone, Debug)]
pub struct Bucket(Root);

#[derive(Clone, Debug)]
enum Root {
    Page(u64),
    Inline(Vec<u8>),
}

impl Bucket {
    fn parse(value: &[u8]) -> Result<Self, ReadError> {
        let Some(root) = u64_at(value, 0).filter(|_| value.len() >= BUCKET_BYTES) else {
            return Err(ReadError::Bucket("its entry is too short"));
        };
        let inline = || Root::Inline(value[BUCKET_BYTES..].to_vec());
        Ok(Self(if root == 0 { inline() } else { Root::Page(root) }))
    }
}

/// One entry of a bucket.
#[derive(Debug)]
pub struct Entry<'a> {
    /// Its key.
    pub key: &'a [u8],
    /// What it holds.
    pub value: Value<'a>,
}

/// What an entry holds.
#[derive(Debug)]
pub enum Value<'a> {
    /// Bytes.
    Bytes(&'a [u8]),
    /// A bucket within the bucket.
    Bucket(Bucket),
}

impl<R: Read + Seek> Reader<R> {
    /// Looks at the first pages of a file. What lies behind its last page doesn't matter.
    pub fn open(mut source: R) -> Result<Self, ReadError> {
        let bytes = source.seek(SeekFrom::End(0)).map_err(ReadError::Io)?;
        let meta = newest_meta(&mut source, bytes)?;
        let Meta { page_bytes, pages, root, .. } = meta;
        if pages.checked_mul(page_bytes).is_none_or(|needed| needed > bytes) {
            return Err(ReadError::CutOff { pages, page_bytes, bytes });
        }
        Ok(Self { source, page_bytes, pages, root })
    }

    /// Bytes of the file itself, whatever lies behind it.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        // It was checked when the file was opened.
        self.pages * self.page_bytes
    }

    /// The bucket whose entries are the file's buckets.
    #[must_use]
    pub fn root(&self) -> Bucket {
        Bucket(Root::Page(self.root))
    }

    /// The bucket of this name, if there is one.
    pub fn bucket(&mut self, name: &[u8]) -> Result<Option<Bucket>, ReadError> {
        let root = self.root();
        let mut entries = self.entries(&root)?;
        while let Some(entry) = entries.next()? {
            if let (true, Value::Bucket(bucket)) = (entry.key == name, entry.value) {
                return Ok(Some(bucket));
            }
        }
        Ok(None)
    }

    /// Begins to walk over a bucket, in the order of its keys.
    pub fn entries(&mut self, bucket: &Bucket) -> Result<Entries<'_, R>, ReadError> {
        let page = self.root_of(bucket)?;
        if !page.is_leaf() && page.count() == 0 {
            return Err(ReadError::Page { page: page.number(), what: "it is a branch of nothing" });
        }
        Ok(Entries { reader: self, path: vec![Level { page, at: 0, upper: None }] })
    }

    /// The last key of a bucket; `None` if it is empty.
    pub fn last_key(&mut self, bucket: &Bucket) -> Result<Option<Vec<u8>>, ReadError> {
        let mut page = self.root_of(bucket)?;
        for _ in 0..MAX_DEPTH {
            let Some(last) = page.count().checked_sub(1) else { return Ok(None) };
            if page.is_leaf() {
                return Ok(Some(page.key(last).to_vec()));
            }
            page = self.page(page.child(last))?;
        }
        Err(ReadError::Page { page: page.number(), what: "it lies too deep" })
    }

    fn root_of(&mut self, bucket: &Bucket) -> Result<Page, ReadError> {
        match &bucket.0 {
            Root::Page(number) => self.page(*number),
            // Its number is 0 there; it has no place of its own.
            Root::Inline(bytes) => Page::new(0, bytes.clone()).and_then(|page| {
                let what = ReadError::Bucket("its inline page is no leaf");
                if page.is_leaf() { Ok(page) } else { Err(what) }
            }),
        }
    }

    /// Reads a page and those that go on with it.
    fn page(&mut self, number: u64) -> Result<Page, ReadError> {
        let damaged = |what| ReadError::Page { page: number, what };
        if number >= self.pages {
            return Err(damaged("it lies behind the last one"));
        }
        let mut bytes = Vec::new();
        self.append(number, 1, &mut bytes)?;
        if u64_at(&bytes, 0) != Some(number) {
            return Err(damaged("it has another page's number"));
        }
        let more = u64::from(u32_at(&bytes, 12).expect("a page is longer than its header"));
        if more > 0 {
            if more >= self.pages - number {
                return Err(damaged("it goes on behind the last one"));
            }
            let is_branch = bytes.get(8..10) == Some(&crate::page::BRANCH.to_le_bytes());
            let most = if is_branch { MAX_BRANCH_BYTES } else { MAX_RUN_BYTES };
            if (more + 1).saturating_mul(self.page_bytes) > most.max(self.page_bytes) {
                return Err(damaged("it is too long"));
            }
            self.append(number + 1, more, &mut bytes)?;
        }
        Page::new(number, bytes)
    }

    /// Reads so many pages.
    fn append(&mut self, number: u64, pages: u64, to: &mut Vec<u8>) -> Result<(), ReadError> {
        let wanted = length(u32::try_from(pages * self.page_bytes).unwrap_or(u32::MAX));
        let old = to.len();
        to.resize(old + wanted, 0);
        self.source.seek(SeekFrom::Start(number * self.page_bytes)).map_err(ReadError::Io)?;
        self.source.read_exact(&mut to[old..]).map_err(ReadError::Io)
    }
}

/// The valid meta page with the higher transaction id: the other one is of the transaction before, or
/// was being written when the machine stopped.
fn newest_meta(source: &mut (impl Read + Seek), bytes: u64) -> Result<Meta, ReadError> {
    let first = read_meta(source, bytes, 0)?;
    let mut second = None;
    for shift in PAGE_SHIFTS {
        let page_bytes = 1 << shift;
        if second.is_none() && first.is_none_or(|first| first.page_bytes == page_bytes) {
            second = read_meta(source, bytes, page_bytes)?;
            second = second.filter(|second| second.page_bytes == page_bytes);
        }
    }
    first.into_iter().chain(second).max_by_key(|meta| meta.txid).ok_or(ReadError::NoMeta)
}

fn read_meta(
    source: &mut (impl Read + Seek),
    bytes: u64,
    page: u64,
) -> Result<Option<Meta>, ReadError> {
    if bytes < page + (HEADER_BYTES + META_BYTES) as u64 {
        return Ok(None);
    }
    let mut meta = [0; META_BYTES];
    source.seek(SeekFrom::Start(meta::offset(page))).map_err(ReadError::Io)?;
    source.read_exact(&mut meta).map_err(ReadError::Io)?;
    Ok(Meta::parse(&meta))
}

/// A walk over a bucket.
///
/// Each page's keys have to lie between those that the page above names for it, which are apart for
/// any two pages, and no page but an only one is empty. So no page is come to twice, and a file that
/// goes in circles ends the walk.
pub struct Entries<'a, R> {
    reader: &'a mut Reader<R>,
    path: Vec<Level>,
}

struct Level {
    page: Page,
    at: usize,
    /// All keys here lie before it.
    upper: Option<Vec<u8>>,
}

impl<R: Read + Seek> Entries<'_, R> {
    /// The next entry; `None` after the last.
    #[expect(clippy::should_implement_trait, reason = "an entry borrows the page that it lies in")]
    pub fn next(&mut self) -> Result<Option<Entry<'_>>, ReadError> {
        let at = loop {
            let Some(level) = self.path.last_mut() else { return Ok(None) };
            let at = level.at;
            if at == level.page.count() {
                self.path.pop();
                continue;
            }
            level.at += 1;
            if level.page.is_leaf() {
                break at;
            }
            self.descend(at)?;
        };
        let page = &self.path.last().expect("the loop ended at a leaf").page;
        let value = page.value(at);
        let value = if page.is_bucket(at) {
            Value::Bucket(Bucket::parse(value)?)
        } else {
            Value::Bytes(value)
        };
        Ok(Some(Entry { key: page.key(at), value }))
    }

    /// Goes down into the page below the element `at`.
    fn descend(&mut self, at: usize) -> Result<(), ReadError> {
        let depth = self.path.len();
        let Level { page, upper, .. } = self.path.last().expect("the caller stands on a branch");
        let (lower, number) = (page.key(at), page.child(at));
        let upper = if at + 1 < page.count() { Some(page.key(at + 1)) } else { upper.as_deref() };
        let damaged = |what| ReadError::Page { page: number, what };
        if depth == MAX_DEPTH {
            return Err(damaged("it lies too deep"));
        }
        let below = self.reader.page(number)?;
        if below.count() == 0 {
            return Err(damaged("it is empty"));
        }
        if !below.lies_between(lower, upper) {
            return Err(damaged("its keys are not those that the page above it says"));
        }
        let upper = upper.map(<[u8]>::to_vec);
        self.path.push(Level { page: below, at: 0, upper });
        Ok(())
    }
}
