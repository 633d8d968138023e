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
    ledger.ensure(commit(id, "aa")).await.unwrap();
    let refused = ledger.ensure(commit(id, "bb")).await;
    assert!(matches!(refused, Err(LedgerError::Contradiction { .. })), "{refused:?}");
    let text = std::fs::read_to_string(dir.path().join("ledger.jsonl")).unwrap();
    assert_eq!(text.matches(r#""kind":"commit""#).count(), 1);
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
    // Up to the end of its line; what follows is its seal.
    let end = bytes[..bytes.len() - 1].iter().rposition(|byte| *byte == b'\n').unwrap();
    for cut in whole as usize..=end {
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
    // Up to the last seal: one that is torn itself seals nothing.
    let end = bytes[..bytes.len() - 1].iter().rposition(|byte| *byte == b'\n').unwrap();
    for at in 0..end {
        let mut changed = bytes.clone();
        changed[at] ^= 0x01;
        let other = tempfile::tempdir().unwrap();
        std::fs::write(other.path().join("ledger.jsonl"), &changed).unwrap();
        let refused = Ledger::open(other.path());
        assert!(matches!(refused, Err(LedgerError::Damaged { .. })), "byte {at}: {refused:?}");
    }
}

fn seen(wal: u64) -> Seen {
    Seen {
        system_identifier: "7".into(),
        timeline: 1,
        wal,
        generation: 1,
        processes: vec![Uuid::nil()],
    }
}

#[tokio::test]
async fn pages_of_a_last_batch_that_reached_the_disk_out_of_order_are_cut() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    let (first, second) = (Uuid::now_v7(), Uuid::now_v7());
    ledger.ensure(commit(first, "aa")).await.unwrap();
    drop(reopened(dir.path(), ledger).await.unwrap());
    let path = dir.path().join("ledger.jsonl");
    let sealed = std::fs::read(&path).unwrap();
    // A batch of two lines: the start of the first never came, the second did.
    let line = file::encode(&Line::Commit(Box::new(commit(second, "bb")))).unwrap();
    let mut torn = line.clone();
    torn[..20].fill(0);
    let batch = [torn, line].concat();
    std::fs::write(&path, [&sealed[..], &batch].concat()).unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    assert_eq!(ledger.len(), 1);
    assert!(ledger.committed(first).is_some(), "what was sealed stays");
    drop(reopened(dir.path(), ledger).await.unwrap());
    // The same with a seal behind it was durable once: that is damage.
    let seal = file::encode(&Line::Seal).unwrap();
    std::fs::write(&path, [&sealed[..], &batch, &seal].concat()).unwrap();
    let refused = Ledger::open(dir.path());
    assert!(matches!(refused, Err(LedgerError::Damaged { .. })), "{refused:?}");
}

#[tokio::test]
async fn how_far_the_log_had_come_outlives_a_restart_without_making_the_ledger_grow() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    ledger.note(seen(1), true).await.unwrap();
    let ledger = reopened(dir.path(), ledger).await.unwrap();
    let length = || std::fs::metadata(dir.path().join("ledger.jsonl")).unwrap().len();
    let before = length();
    for step in 1..=3 {
        ledger.note(seen(1 + step * POSITION_STEP), false).await.unwrap();
    }
    // Less than a step: in memory, until a clean stop.
    ledger.note(seen(4 * POSITION_STEP), false).await.unwrap();
    let killed = reopened(dir.path(), ledger).await.unwrap();
    assert_eq!(killed.seen().unwrap().wal, 1 + 3 * POSITION_STEP);
    killed.note(seen(4 * POSITION_STEP), false).await.unwrap();
    killed.keep_position().await.unwrap();
    let stopped = reopened(dir.path(), killed).await.unwrap();
    assert_eq!(stopped.seen().unwrap().wal, 4 * POSITION_STEP);
    assert_eq!(length(), before);
    // Of another generation it says nothing.
    let next = Seen { generation: 2, ..seen(5) };
    stopped.note(next.clone(), false).await.unwrap();
    let reset = reopened(dir.path(), stopped).await.unwrap();
    assert_eq!(reset.seen(), Some(next));
}

#[tokio::test]
async fn admins_are_kept_in_their_order_and_another_chain_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    let chain = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    ledger.ensure_admins(&chain(&["a", "b"])).await.unwrap();
    ledger.ensure_admins(&chain(&["a", "b", "c"])).await.unwrap();
    ledger.ensure_admins(&chain(&["a"])).await.unwrap();
    ledger.ensure_admins(&chain(&["a", "x", "y", "z"])).await.unwrap();
    let ledger = reopened(dir.path(), ledger).await.unwrap();
    assert_eq!(ledger.admins(), ["a", "b", "c"]);
}
