//! Tests of reading single entries from a file that changes while the ledger is open.

use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use super::*;

/// An open ledger with a commit whose document it has, and a copied commit.
struct OpenLedger {
    _dir: tempfile::TempDir,
    ledger: Ledger,
    path: PathBuf,
    own: Uuid,
    copied: Uuid,
}

impl OpenLedger {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(dir.path()).unwrap();
        let (own, other) = (Uuid::now_v7(), Uuid::now_v7());
        ledger.ensure_commit(commit(own, AA)).await.unwrap();
        ledger.append_copied(copied(1, &[(other, BB)])).await.unwrap();
        let path = dir.path().join(LEDGER_FILE);
        OpenLedger { _dir: dir, ledger, path, own, copied: other }
    }

    /// Returns the range of bytes that `text` has in the file.
    fn range_of(&self, text: &str) -> std::ops::Range<usize> {
        let start = std::fs::read_to_string(&self.path).unwrap().find(text).unwrap();
        start..start + text.len()
    }

    /// Changes a byte of the file, runs `check`, and restores the byte.
    fn with_changed_byte(&self, at: usize, check: impl FnOnce()) {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&self.path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at as u64).unwrap();
        file.write_all_at(&[byte[0] ^ 0x01], at as u64).unwrap();
        check();
        file.write_all_at(&byte, at as u64).unwrap();
    }
}

fn is_damaged<T>(found: Result<T, LedgerError>) -> bool {
    matches!(found, Err(LedgerError::Damaged { .. }))
}

#[tokio::test]
async fn a_byte_of_an_entry_that_changes_while_the_ledger_is_open_is_noticed() {
    let open = OpenLedger::new().await;
    let ledger = &open.ledger;
    let h = commit(open.copied, BB).hash().unwrap();
    for at in open.range_of(&pack_commit(open.copied, &h)) {
        open.with_changed_byte(at, || {
            assert!(is_damaged(ledger.entry(open.copied)), "byte {at}");
            assert!(is_damaged(ledger.entries(None, 9)), "byte {at}");
        });
    }
    let start = format!(r#"{{"kind":"commit","cluster_id":"{}","h":"{AA}"#, open.own);
    for at in open.range_of(&start) {
        open.with_changed_byte(at, || {
            assert!(is_damaged(ledger.entry(open.own)), "byte {at}");
            assert!(is_damaged(ledger.commit_with_document(open.own)), "byte {at}");
        });
    }
    // A changed byte of the document is found, because a document is read together with its line's
    // checksum.
    for at in open.range_of(r#""document":"{\"a\":\"line\\nbreak\"}"#) {
        open.with_changed_byte(at, || {
            assert!(is_damaged(ledger.commit_with_document(open.own)), "byte {at}");
        });
    }
    assert!(ledger.entry(open.own).unwrap().is_some());
    assert_eq!(ledger.entries(None, 9).unwrap().len(), 2);
}

#[tokio::test]
async fn a_process_whose_ledger_cannot_be_read_stops() {
    let open = OpenLedger::new().await;
    let failed = open.ledger.failed();
    assert!(!*failed.borrow());
    std::fs::OpenOptions::new().write(true).open(&open.path).unwrap().set_len(0).unwrap();
    let read = open.ledger.entry(open.copied);
    assert!(matches!(read, Err(LedgerError::Io { .. })), "{read:?}");
    assert!(*failed.borrow());
}

#[tokio::test]
async fn a_document_larger_than_one_read_comes_back_whole() {
    let open = OpenLedger::new().await;
    for length in [1, 5_000, 16_384, 40_000, 100_000] {
        let cluster = Uuid::now_v7();
        let large = Commit { document: "x".repeat(length), ..commit(cluster, AA) };
        open.ledger.ensure_commit(large.clone()).await.unwrap();
        assert_eq!(open.ledger.commit_with_document(cluster).unwrap(), Some(large));
    }
}
