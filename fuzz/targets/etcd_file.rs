//! Reader for etcd's bbolt files. The input changes bytes of a valid file: three bytes give an
//! offset, the fourth the new value.
#![no_main]

use muster_fuzz as _;
use std::io::Cursor;
use std::sync::LazyLock;

use node_state::etcd_file::{EtcdFile, EtcdFileError, HashCheck};
use node_bbolt::{BboltReader, BboltWriteError, Builder, EntryValue, measure, write};

/// Fills a file with etcd's buckets and meaningless rows. The buckets exist so that changed bytes
/// reach the code that reads them.
fn fill(file: &mut Builder<'_>) -> Result<(), BboltWriteError> {
    for bucket in ["alarm", "auth", "authRoles", "authUsers", "cluster", "key", "lease", "meta"] {
        file.begin_bucket(bucket.as_bytes())?;
        for row in 0_u64..40 {
            file.put(&row.to_be_bytes(), &[7; 60])?;
        }
    }
    Ok(())
}

static FILE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let layout = measure(fill).expect("it fits");
    let mut file = Vec::new();
    write(layout, &mut file, fill).expect("it is in memory");
    file
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut file = FILE.clone();
    for change in bytes.chunks_exact(4) {
        let at =
            usize::from(change[0]) << 16 | usize::from(change[1]) << 8 | usize::from(change[2]);
        let at = at % file.len();
        file[at] = change[3];
    }
    if let Ok(mut reader) = BboltReader::open(Cursor::new(&file)) {
        let root = reader.root();
        let mut names = Vec::new();
        if let Ok(mut entries) = reader.entries(&root) {
            while let Ok(Some(entry)) = entries.next() {
                if let EntryValue::Bucket(_) = entry.value {
                    names.push(entry.key.to_vec());
                }
            }
        }
        for name in names {
            let Ok(Some(bucket)) = reader.find_bucket(&name) else { continue };
            let _ = reader.last_key(&bucket);
            let Ok(mut entries) = reader.entries(&bucket) else { continue };
            while let Ok(Some(_)) = entries.next() {}
        }
    }
    if let Ok(mut file) = EtcdFile::open(Cursor::new(&file), HashCheck::Skipped) {
        let _ = file.auth();
        if let Ok(records) = file.records() {
            let _ = records.for_each(|_, _| Ok::<_, EtcdFileError>(()));
        }
    }
});
