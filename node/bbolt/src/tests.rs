use std::io::Cursor;

use proptest::prelude::*;

use crate::{BboltReadError, BboltReader, BboltWriteError, Builder, EntryValue, measure, write};

type KeyValuePair = (Vec<u8>, Vec<u8>);
type Buckets = Vec<(Vec<u8>, Vec<KeyValuePair>)>;

fn fill(buckets: &Buckets, builder: &mut Builder<'_>) -> Result<(), BboltWriteError> {
    for (name, entries) in buckets {
        builder.begin_bucket(name)?;
        for (key, value) in entries {
            builder.put(key, value)?;
        }
    }
    Ok(())
}

fn file(buckets: &Buckets) -> Vec<u8> {
    let layout = measure(|builder| fill(buckets, builder)).unwrap();
    let mut out = Vec::new();
    write(layout, &mut out, |builder| fill(buckets, builder)).unwrap();
    assert_eq!(out.len() as u64, layout.bytes());
    out
}

/// Reads all buckets of a file and their entries. Returns on any input.
fn read(file: &[u8]) -> Result<Buckets, BboltReadError> {
    let mut reader = BboltReader::open(Cursor::new(file))?;
    let root = reader.root();
    let mut names = Vec::new();
    let mut entries = reader.entries(&root)?;
    while let Some(entry) = entries.next()? {
        names.push(entry.key.to_vec());
    }
    let mut buckets = Vec::new();
    for name in names {
        let Some(bucket) = reader.find_bucket(&name)? else { continue };
        let last = reader.last_key(&bucket)?;
        let (mut held, mut seen) = (Vec::new(), None);
        let mut entries = reader.entries(&bucket)?;
        while let Some(entry) = entries.next()? {
            seen = Some(entry.key.to_vec());
            if let EntryValue::Bytes(value) = entry.value {
                held.push((entry.key.to_vec(), value.to_vec()));
            }
        }
        assert_eq!(last, seen);
        buckets.push((name, held));
    }
    Ok(buckets)
}

fn bucket(name: &str, entries: usize, value_bytes: usize) -> (Vec<u8>, Vec<KeyValuePair>) {
    let entry = |at: usize| (format!("{at:08}").into_bytes(), vec![b'v'; value_bytes]);
    (name.into(), (0..entries).map(entry).collect())
}

#[test]
fn written_buckets_are_read_again() {
    let buckets = vec![
        bucket("a", 0, 0),
        bucket("b", 1, 0),
        bucket("c", 10, 7),
        bucket("d", 3, 5_000),
        bucket("e", 20_000, 3),
        bucket("f", 1, 1 << 20),
        bucket("g", 200, 1_000),
    ];
    assert_eq!(read(&file(&buckets)).unwrap(), buckets);
    assert_eq!(read(&file(&Vec::new())).unwrap(), Vec::new());
}

/// The keys are so long that a page holds only two, which makes the tree high. The test goes
/// through many numbers of entries, because each number fills the last branches differently.
#[test]
fn a_high_tree_has_no_branch_with_a_single_child() {
    for entries in 1..70 {
        let entry = |at: usize| (format!("{at:02000}").into_bytes(), Vec::new());
        let buckets = vec![(b"key".to_vec(), (0..entries).map(entry).collect::<Vec<_>>())];
        let file = file(&buckets);
        assert_eq!(read(&file).unwrap(), buckets);
        for page in file.chunks(4096).filter(|page| page[8..10] == [1, 0]) {
            assert!(page[10] >= 2, "a branch of {} pages among {entries} keys", page[10]);
        }
    }
}

#[test]
fn keys_out_of_order_or_of_invalid_length_are_refused() {
    let put = |keys: &[&[u8]]| {
        measure(|builder: &mut Builder<'_>| {
            builder.begin_bucket(b"b")?;
            keys.iter().try_for_each(|key| builder.put(key, b"v"))
        })
    };
    assert!(matches!(put(&[b"b", b"a"]), Err(BboltWriteError::KeysOutOfOrder)));
    assert!(matches!(put(&[b"a", b"a"]), Err(BboltWriteError::KeysOutOfOrder)));
    assert!(matches!(put(&[b""]), Err(BboltWriteError::KeySize(0))));
    assert!(matches!(put(&[&[b'k'; 32_769]]), Err(BboltWriteError::KeySize(32_769))));
    assert!(put(&[&[b'k'; 32_768]]).is_ok());
    let buckets = |names: [&[u8]; 2]| {
        measure(|builder: &mut Builder<'_>| {
            names.iter().try_for_each(|name| builder.begin_bucket(name))
        })
    };
    assert!(matches!(buckets([b"b", b"a"]), Err(BboltWriteError::KeysOutOfOrder)));
    assert!(buckets([b"a", b"b"]).is_ok());
    let without = measure(|builder: &mut Builder<'_>| builder.put(b"k", b"v"));
    assert!(matches!(without, Err(BboltWriteError::NoBucket)));
}

#[test]
fn entries_that_change_between_the_two_passes_are_refused() {
    let few = vec![bucket("b", 1_000, 10)];
    let layout = measure(|builder| fill(&few, builder)).unwrap();
    for other in [vec![bucket("b", 2_000, 10)], vec![bucket("b", 100, 10)]] {
        let mut out = Vec::new();
        let written = write(layout, &mut out, |builder| fill(&other, builder));
        assert!(matches!(written, Err(BboltWriteError::LayoutMismatch)));
        assert!(out.len() as u64 <= layout.bytes());
    }
}

#[test]
fn the_newer_of_two_valid_metas_is_used_and_a_torn_one_is_not() {
    let one = vec![bucket("b", 400, 100)];
    let whole = file(&one);
    let (mut torn, mut both) = (whole.clone(), whole.clone());
    torn[20..40].fill(0);
    assert_eq!(read(&torn).unwrap(), one);
    both[20..40].fill(0);
    both[4096 + 20..4096 + 40].fill(0);
    assert!(matches!(read(&both), Err(BboltReadError::NoMeta)));
    // Give the older meta another root, and only three pages. As long as the newer meta is valid,
    // the reader ignores the older one.
    let meta = crate::meta::MetaPage { page_bytes: 4096, root: 99, freelist: 2, pages: 3, txid: 1 };
    let mut other = whole;
    other[4096 + 16..4096 + 80].copy_from_slice(&meta.encode());
    assert_eq!(read(&other).unwrap(), one);
    other[20..40].fill(0);
    assert!(read(&other).is_err());
}

#[test]
fn trailing_bytes_are_ignored_and_a_truncated_file_is_refused() {
    let buckets = vec![bucket("b", 400, 100)];
    let mut bytes = file(&buckets);
    bytes.extend_from_slice(&[0xFF; 32]);
    assert_eq!(read(&bytes).unwrap(), buckets);
    bytes.truncate(bytes.len() - 33);
    assert!(matches!(read(&bytes), Err(BboltReadError::CutOff { .. })));
    assert!(matches!(read(b""), Err(BboltReadError::NoMeta)));
}

/// A file whose pages a test overwrites.
struct CraftedFile(Vec<u8>);

impl CraftedFile {
    /// Makes a file whose second-to-last page is a branch over leaves, and whose last page is a
    /// root.
    fn new() -> Self {
        Self(file(&vec![bucket("b", 1_000, 100)]))
    }

    fn branch(&mut self) -> &mut [u8] {
        let at = self.0.len() - 2 * 4096;
        let page = &mut self.0[at..at + 4096];
        assert_eq!(page[8], 1, "a branch");
        page
    }

    fn error(&self) -> &'static str {
        match read(&self.0) {
            Err(BboltReadError::Page { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn the_walk_through_a_cycle_of_pages_ends_with_an_error() {
    let mut file = CraftedFile::new();
    let branch = file.branch();
    let own = branch[..8].to_vec();
    branch[16 + 8..16 + 16].copy_from_slice(&own);
    assert_eq!(file.error(), "its keys are not those that the page above it says");
    // Now the branch has one child, itself, and its only key lies in the allowed range. So the
    // depth limit ends the walk.
    file.branch()[10] = 1;
    assert_eq!(file.error(), "it lies too deep");
}

#[test]
fn a_page_with_two_parent_entries_is_refused() {
    let mut file = CraftedFile::new();
    let branch = file.branch();
    let first = branch[16 + 8..16 + 16].to_vec();
    branch[32 + 8..32 + 16].copy_from_slice(&first);
    assert_eq!(file.error(), "its keys are not those that the page above it says");
}

/// The last child of a branch takes its upper bound from the branch's parent.
#[test]
fn a_child_page_that_belongs_to_another_branch_is_refused() {
    let entry = |at: usize| (format!("{at:02000}").into_bytes(), Vec::new());
    let mut file = CraftedFile(file(&vec![(b"key".to_vec(), (0..40).map(entry).collect())]));
    let branches = |file: &[u8]| -> Vec<usize> {
        (0..file.len()).step_by(4096).filter(|at| file[at + 8..at + 10] == [1, 0]).collect()
    };
    let [first, second, ..] = branches(&file.0)[..] else { panic!("a tree of three levels") };
    let last = first + 16 * usize::from(file.0[first + 10]);
    file.0.copy_within(second + 24..second + 32, last + 8);
    assert_eq!(file.error(), "its keys are not those that the page above it says");
}

#[test]
fn a_child_beyond_the_last_page_is_refused() {
    let mut file = CraftedFile::new();
    file.branch()[16 + 8..16 + 16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_eq!(file.error(), "it lies behind the last one");
    let mut file = CraftedFile::new();
    file.branch()[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(file.error(), "it goes on behind the last one");
    // Make the branch's child the page with the list of free pages. Such a page, like a meta page,
    // is part of no tree.
    let mut file = CraftedFile::new();
    file.branch()[16 + 8..16 + 16].copy_from_slice(&2_u64.to_le_bytes());
    assert_eq!(file.error(), "it is neither branch nor leaf");
}

#[test]
fn no_flipped_byte_makes_the_reader_panic_or_run_for_ever() {
    let whole = file(&vec![bucket("a", 5, 3), bucket("b", 40, 100), bucket("c", 1, 4_100)]);
    for at in 0..whole.len() {
        for change in [0x01, 0xFF] {
            let mut file = whole.clone();
            file[at] ^= change;
            let _ = read(&file);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_buckets_survive_a_round_trip(
        buckets in prop::collection::btree_map(
            prop::collection::vec(any::<u8>(), 1..20),
            prop::collection::btree_map(
                prop::collection::vec(any::<u8>(), 1..600),
                prop::collection::vec(any::<u8>(), 0..3_000),
                0..60,
            ),
            0..5,
        ),
    ) {
        let buckets: Buckets =
            buckets.into_iter().map(|(name, held)| (name, held.into_iter().collect())).collect();
        prop_assert_eq!(read(&file(&buckets)).unwrap(), buckets);
    }

    /// Random bytes in the pages after the meta pages and the list of free pages.
    #[test]
    fn no_bytes_make_the_reader_panic_or_run_for_ever(
        changes in prop::collection::vec((8192..61_440_usize, any::<u8>()), 1..200),
        words in prop::collection::vec((8192..61_440_usize, 0..16_u8), 0..200),
    ) {
        let mut bytes = file(&vec![bucket("a", 3, 3), bucket("b", 400, 100)]);
        let len = bytes.len();
        for (at, byte) in changes.into_iter().chain(words) {
            bytes[8192 + at % (len - 8192)] = byte;
        }
        let _ = read(&bytes);
    }
}
