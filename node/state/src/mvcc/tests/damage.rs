//! Tests that opening a damaged store file never panics: damage is reported as an error.

use super::*;

/// Returns the file of a store that was closed properly. The file has several pages.
fn closed_store() -> Vec<u8> {
    let disk = disk(1);
    let mut writer = open(&disk, CompactionMode::Inline);
    for n in 1..200 {
        put(&mut writer, n, &format!("key-{n:05}"), &"v".repeat(300));
    }
    writer.checkpoint().unwrap();
    drop(writer);
    let file = disk.open(&Path::new(DIR).join("db"), OpenMode::Existing).unwrap();
    let mut bytes = vec![0; usize::try_from(file.len().unwrap()).unwrap()];
    assert_eq!(file.read_at(0, &mut bytes).unwrap(), bytes.len());
    bytes
}

fn open_bytes(bytes: &[u8]) -> Result<StoreWriter, StoreError> {
    let disk = disk(2);
    let file = disk.open(&Path::new(DIR).join("db"), OpenMode::Existing).unwrap();
    file.write_at(0, bytes).unwrap();
    StoreWriter::open(
        backend(&disk),
        StoreOptions { cache_bytes: 1 << 20, ..StoreOptions::default() },
    )
}

#[test]
fn a_truncated_or_foreign_file_is_reported_as_damaged() {
    let bytes = closed_store();
    assert!(open_bytes(&bytes).is_ok());
    let half = open_bytes(&bytes[..bytes.len() / 2]).err().unwrap();
    assert!(half.is_final(), "{half:?}");
    let mut headless = bytes;
    headless[0] ^= 1;
    let headless = open_bytes(&headless).err().unwrap();
    assert!(headless.is_final(), "{headless:?}");
}

#[test]
fn flipped_bits_are_reported_as_damage_without_a_panic() {
    let whole = closed_store();
    let mut damaged = 0;
    for seed in 0..60_u64 {
        let mut bytes = whole.clone();
        let mut at = seed;
        for _ in 0..200 {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bit = usize::try_from(at >> 16).unwrap() % (bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        if let Err(error) = open_bytes(&bytes) {
            assert!(error.is_final(), "{seed}: {error:?}");
            damaged += 1;
        }
    }
    assert!(damaged > 30, "only {damaged} of 60 were found to be damaged");
}
