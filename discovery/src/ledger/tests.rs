use super::*;

fn authority() -> Authority {
    Authority { certificate: "AAAA".into(), wrapped_key: Some("BBBB".into()) }
}

fn commit(cluster_id: Uuid, h: &str) -> Commit {
    Commit {
        cluster_id,
        h: h.into(),
        document: "{\"a\":\"line\\nbreak\"}".into(),
        statements: vec!["a.b.c".into()],
        peer_ca: authority(),
        client_ca: authority(),
    }
}

async fn reopened(dir: &Path, old: Ledger) -> Result<Ledger, LedgerError> {
    let failed = old.failed.clone();
    drop(old);
    // The writer lets go of the lock when it has seen that nobody is left.
    while failed.has_changed().is_ok() {
        tokio::task::yield_now().await;
    }
    for _ in 0..1_000 {
        match Ledger::open(dir) {
            Err(LedgerError::InUse { .. }) => {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            other => return other,
        }
    }
    Ledger::open(dir)
}

#[tokio::test]
async fn what_was_ensured_is_there_after_a_restart_under_the_same_process_id() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    let (id, process) = (Uuid::now_v7(), ledger.process());
    ledger.ensure(commit(id, "aa")).await.unwrap();
    let seen = Seen {
        system_identifier: "7".into(),
        timeline: 1,
        wal: 10,
        generation: 1,
        processes: vec![process],
    };
    ledger.note(seen.clone(), false).await.unwrap();

    let ledger = reopened(dir.path(), ledger).await.unwrap();
    assert_eq!(ledger.process(), process);
    assert_eq!(*ledger.committed(id).unwrap(), commit(id, "aa"));
    assert_eq!(ledger.seen(), Some(seen));
}

#[tokio::test]
async fn a_second_commit_of_a_cluster_is_refused_and_the_same_one_is_not_written_twice() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    let id = Uuid::now_v7();
    ledger.ensure(commit(id, "aa")).await.unwrap();
    let length = std::fs::metadata(dir.path().join("ledger.jsonl")).unwrap().len();
    ledger.ensure(commit(id, "aa")).await.unwrap();
    let refused = ledger.ensure(commit(id, "bb")).await;
    assert!(matches!(refused, Err(LedgerError::Contradiction { .. })), "{refused:?}");
    assert_eq!(std::fs::metadata(dir.path().join("ledger.jsonl")).unwrap().len(), length);
}

#[tokio::test]
async fn one_ledger_serves_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let _first = Ledger::open(dir.path()).unwrap();
    let second = Ledger::open(dir.path());
    assert!(matches!(second, Err(LedgerError::InUse { .. })), "{second:?}");
}

#[tokio::test]
async fn a_torn_end_is_cut_and_everything_before_it_kept() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    let (first, second) = (Uuid::now_v7(), Uuid::now_v7());
    ledger.ensure(commit(first, "aa")).await.unwrap();
    let path = dir.path().join("ledger.jsonl");
    let whole = std::fs::metadata(&path).unwrap().len();
    ledger.ensure(commit(second, "bb")).await.unwrap();
    drop(reopened(dir.path(), ledger).await.unwrap());
    let bytes = std::fs::read(&path).unwrap();
    for cut in whole as usize..bytes.len() {
        let torn = tempfile::tempdir().unwrap();
        std::fs::write(torn.path().join("ledger.jsonl"), &bytes[..cut]).unwrap();
        let ledger = Ledger::open(torn.path()).unwrap();
        assert_eq!(ledger.len(), 1, "cut at {cut}");
        assert!(ledger.committed(first).is_some());
    }
}

#[tokio::test]
async fn a_changed_byte_in_the_middle_refuses_to_start_and_says_where() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    ledger.ensure(commit(Uuid::now_v7(), "aa")).await.unwrap();
    drop(reopened(dir.path(), ledger).await.unwrap());
    let bytes = std::fs::read(dir.path().join("ledger.jsonl")).unwrap();
    for at in 0..bytes.len() - 1 {
        let mut changed = bytes.clone();
        changed[at] ^= 0x01;
        let other = tempfile::tempdir().unwrap();
        std::fs::write(other.path().join("ledger.jsonl"), &changed).unwrap();
        let refused = Ledger::open(other.path());
        assert!(matches!(refused, Err(LedgerError::Damaged { .. })), "byte {at}: {refused:?}");
    }
}
