//! Reads a file, bucket by bucket.

use std::io::{Read, Seek, SeekFrom};

use crate::BboltReadError;
use crate::meta::{self, META_BYTES, MetaPage, PAGE_SHIFTS};
use crate::page::{HEADER_BYTES, Page, to_usize, u32_at, u64_at};

/// Maximum size in bytes of a leaf with its overflow pages. bbolt puts up to four entries into one
/// leaf, whatever their size. Each entry may be as large as etcd's largest request.
const MAX_LEAF_BYTES: u64 = 256 * 1024 * 1024;
/// Maximum size in bytes of a branch with its overflow pages. A branch holds keys but no values,
/// and few keys are large.
const MAX_BRANCH_BYTES: u64 = 1024 * 1024;
/// Maximum number of levels of a tree. Each page above the last level has at least two child pages,
/// so no file needs more.
const MAX_DEPTH: usize = 32;
/// Bytes of a bucket's header: root page number (8), sequence (8). If the root page number is 0,
/// the bucket's only page follows inline.
const BUCKET_BYTES: usize = 16;

/// An open bbolt file.
pub struct BboltReader<R> {
    source: R,
    page_bytes: u64,
    pages: u64,
    root: u64,
}

/// Location of a bucket's root page: a page number, or an inline page.
#[derive(Clone, Debug)]
pub struct Bucket(Root);

#[derive(Clone, Debug)]
enum Root {
    Page(u64),
    Inline(Vec<u8>),
}

impl Bucket {
    fn parse(value: &[u8]) -> Result<Self, BboltReadError> {
        let Some(root) = u64_at(value, 0).filter(|_| value.len() >= BUCKET_BYTES) else {
            return Err(BboltReadError::Bucket("its entry is too short"));
        };
        let inline = || Root::Inline(value[BUCKET_BYTES..].to_vec());
        Ok(Self(if root == 0 { inline() } else { Root::Page(root) }))
    }
}

/// One entry of a bucket.
#[derive(Debug)]
pub struct BucketEntry<'a> {
    pub key: &'a [u8],
    pub value: EntryValue<'a>,
}

/// Value of an entry.
#[derive(Debug)]
pub enum EntryValue<'a> {
    Bytes(&'a [u8]),
    /// A bucket within the bucket.
    Bucket(Bucket),
}

impl<R: Read + Seek> BboltReader<R> {
    /// Opens a file by reading its meta pages. Bytes after its last page are ignored.
    pub fn open(mut source: R) -> Result<Self, BboltReadError> {
        let bytes = source.seek(SeekFrom::End(0)).map_err(BboltReadError::Io)?;
        let meta = newest_meta(&mut source, bytes)?;
        let MetaPage { page_bytes, pages, root, .. } = meta;
        if pages.checked_mul(page_bytes).is_none_or(|needed| needed > bytes) {
            return Err(BboltReadError::CutOff { pages, page_bytes, bytes });
        }
        Ok(Self { source, page_bytes, pages, root })
    }

    /// Size in bytes of the pages of the file, without any bytes that follow them.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        // The product can't overflow, because `open` has checked the number of pages.
        self.pages * self.page_bytes
    }

    /// Returns the root bucket, whose entries are the file's buckets.
    #[must_use]
    pub fn root(&self) -> Bucket {
        Bucket(Root::Page(self.root))
    }

    /// Returns the bucket called `name`, if there is one.
    pub fn find_bucket(&mut self, name: &[u8]) -> Result<Option<Bucket>, BboltReadError> {
        let root = self.root();
        let mut entries = self.entries(&root)?;
        while let Some(entry) = entries.next()? {
            if let (true, EntryValue::Bucket(bucket)) = (entry.key == name, entry.value) {
                return Ok(Some(bucket));
            }
        }
        Ok(None)
    }

    /// Returns an iterator over a bucket's entries, in key order.
    pub fn entries(&mut self, bucket: &Bucket) -> Result<BucketEntries<'_, R>, BboltReadError> {
        let page = self.root_of(bucket)?;
        if !page.is_leaf() && page.count() == 0 {
            return Err(BboltReadError::Page {
                page: page.number(),
                what: "it is a branch of nothing",
            });
        }
        Ok(BucketEntries { reader: self, path: vec![PathLevel { page, at: 0, upper: None }] })
    }

    /// Returns the last key of a bucket, or `None` if the bucket is empty.
    pub fn last_key(&mut self, bucket: &Bucket) -> Result<Option<Vec<u8>>, BboltReadError> {
        let mut page = self.root_of(bucket)?;
        for _ in 0..MAX_DEPTH {
            let Some(last) = page.count().checked_sub(1) else { return Ok(None) };
            if page.is_leaf() {
                return Ok(Some(page.key(last).to_vec()));
            }
            page = self.page(page.child(last))?;
        }
        Err(BboltReadError::Page { page: page.number(), what: "it lies too deep" })
    }

    fn root_of(&mut self, bucket: &Bucket) -> Result<Page, BboltReadError> {
        match &bucket.0 {
            Root::Page(number) => self.page(*number),
            // An inline page is stored in its entry and has no page number; 0 takes its place.
            Root::Inline(bytes) => Page::new(0, bytes.clone()).and_then(|page| {
                let what = BboltReadError::Bucket("its inline page is no leaf");
                if page.is_leaf() { Ok(page) } else { Err(what) }
            }),
        }
    }

    /// Reads a page with its overflow pages, and checks it.
    fn page(&mut self, number: u64) -> Result<Page, BboltReadError> {
        let damaged = |what| BboltReadError::Page { page: number, what };
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
            let most = if is_branch { MAX_BRANCH_BYTES } else { MAX_LEAF_BYTES };
            if (more + 1).saturating_mul(self.page_bytes) > most.max(self.page_bytes) {
                return Err(damaged("it is too long"));
            }
            self.append(number + 1, more, &mut bytes)?;
        }
        Page::new(number, bytes)
    }

    /// Appends `pages` pages, starting with page `number`, to `to`.
    fn append(&mut self, number: u64, pages: u64, to: &mut Vec<u8>) -> Result<(), BboltReadError> {
        let wanted = to_usize(u32::try_from(pages * self.page_bytes).unwrap_or(u32::MAX));
        let old = to.len();
        to.resize(old + wanted, 0);
        self.source.seek(SeekFrom::Start(number * self.page_bytes)).map_err(BboltReadError::Io)?;
        self.source.read_exact(&mut to[old..]).map_err(BboltReadError::Io)
    }
}

/// Returns the valid meta page with the higher transaction id. The other one belongs to the
/// transaction before, or was being written when the machine stopped.
fn newest_meta(source: &mut (impl Read + Seek), bytes: u64) -> Result<MetaPage, BboltReadError> {
    let first = read_meta(source, bytes, 0)?;
    let mut second = None;
    for shift in PAGE_SHIFTS {
        let page_bytes = 1 << shift;
        if second.is_none() && first.is_none_or(|first| first.page_bytes == page_bytes) {
            second = read_meta(source, bytes, page_bytes)?;
            second = second.filter(|second| second.page_bytes == page_bytes);
        }
    }
    first.into_iter().chain(second).max_by_key(|meta| meta.txid).ok_or(BboltReadError::NoMeta)
}

fn read_meta(
    source: &mut (impl Read + Seek),
    bytes: u64,
    page: u64,
) -> Result<Option<MetaPage>, BboltReadError> {
    if bytes < page + (HEADER_BYTES + META_BYTES) as u64 {
        return Ok(None);
    }
    let mut meta = [0; META_BYTES];
    source.seek(SeekFrom::Start(meta::offset(page))).map_err(BboltReadError::Io)?;
    source.read_exact(&mut meta).map_err(BboltReadError::Io)?;
    Ok(MetaPage::parse(&meta))
}

/// An iterator over a bucket's entries, in key order.
///
/// The walk ends even if the pages form a cycle. The keys of a page must lie in the range that its
/// parent gives it, and the ranges of a branch's children are disjoint. A page must have entries
/// unless it is the only page of its bucket. So a page is visited again only below itself, if it is
/// a branch with a single child. The maximum depth ends such a walk.
pub struct BucketEntries<'a, R> {
    reader: &'a mut BboltReader<R>,
    path: Vec<PathLevel>,
}

struct PathLevel {
    page: Page,
    at: usize,
    /// Exclusive upper bound of the keys in this page, from the levels above.
    upper: Option<Vec<u8>>,
}

impl<R: Read + Seek> BucketEntries<'_, R> {
    /// Returns the next entry, or `None` after the last one.
    #[expect(clippy::should_implement_trait, reason = "an entry borrows the page that it lies in")]
    pub fn next(&mut self) -> Result<Option<BucketEntry<'_>>, BboltReadError> {
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
            EntryValue::Bucket(Bucket::parse(value)?)
        } else {
            EntryValue::Bytes(value)
        };
        Ok(Some(BucketEntry { key: page.key(at), value }))
    }

    /// Reads the child page of element `at` of the current branch and makes it the current page.
    fn descend(&mut self, at: usize) -> Result<(), BboltReadError> {
        let depth = self.path.len();
        let PathLevel { page, upper, .. } =
            self.path.last().expect("the caller stands on a branch");
        let (lower, number) = (page.key(at), page.child(at));
        let upper = if at + 1 < page.count() { Some(page.key(at + 1)) } else { upper.as_deref() };
        let damaged = |what| BboltReadError::Page { page: number, what };
        if depth == MAX_DEPTH {
            return Err(damaged("it lies too deep"));
        }
        let below = self.reader.page(number)?;
        if below.count() == 0 {
            return Err(damaged("it is empty"));
        }
        if !below.has_all_keys_in(lower, upper) {
            return Err(damaged("its keys are not those that the page above it says"));
        }
        let upper = upper.map(<[u8]>::to_vec);
        self.path.push(PathLevel { page: below, at: 0, upper });
        Ok(())
    }
}
