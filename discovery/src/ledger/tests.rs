use std::io::Write as _;

use discovery_formation::service::EndCause;

use super::index::pack_commit;
use super::*;

mod model;
mod reader;

const AA: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const BB: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

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

/// Drops the ledger and waits until its writer has closed the file.
async fn close(ledger: Ledger) {
    let failed = ledger.failed();
    drop(ledger);
    while failed.has_changed().is_ok() {
        tokio::task::yield_now().await;
    }
}

async fn reopened(dir: &Path, old: Ledger) -> Result<Ledger, LedgerError> {
    close(old).await;
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
async fn ensured_commits_and_the_process_id_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    let (id, process) = (Uuid::now_v7(), ledger.process());
    ledger.ensure_commit(commit(id, AA)).await.unwrap();
    let seen = DatabasePosition { processes: vec![process], ..seen(10) };
    ledger.record_position(seen.clone()).await.unwrap();

    let ledger = reopened(dir.path(), ledger).await.unwrap();
    assert_eq!(ledger.process(), process);
    assert_eq!(ledger.commit_with_document(id).unwrap(), Some(commit(id, AA)));
    assert_eq!(ledger.position(), Some(seen));
}

#[tokio::test]
async fn a_second_commit_of_a_cluster_is_refused_and_the_same_one_is_not_written_twice() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    let id = Uuid::now_v7();
    ledger.ensure_commit(commit(id, AA)).await.unwrap();
    ledger.ensure_commit(commit(id, AA)).await.unwrap();
    let refused = ledger.ensure_commit(commit(id, BB)).await;
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
    ledger.ensure_commit(commit(first, AA)).await.unwrap();
    let path = dir.path().join("ledger.jsonl");
    let whole = std::fs::metadata(&path).unwrap().len();
    ledger.ensure_commit(commit(second, BB)).await.unwrap();
    drop(reopened(dir.path(), ledger).await.unwrap());
    let bytes = std::fs::read(&path).unwrap();
    // Cut the file at each offset in the second commit's line. Behind that line is only its seal.
    let end = bytes[..bytes.len() - 1].iter().rposition(|byte| *byte == b'\n').unwrap();
    for cut in whole as usize..=end {
        let torn = tempfile::tempdir().unwrap();
        std::fs::write(torn.path().join("ledger.jsonl"), &bytes[..cut]).unwrap();
        let ledger = Ledger::open(torn.path()).unwrap();
        assert_eq!(ledger.commits(), 1, "cut at {cut}");
        assert!(ledger.commit_with_document(first).unwrap().is_some());
    }
}

#[tokio::test]
async fn a_changed_byte_before_the_last_seal_prevents_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    ledger.ensure_commit(commit(Uuid::now_v7(), AA)).await.unwrap();
    drop(reopened(dir.path(), ledger).await.unwrap());
    let bytes = std::fs::read(dir.path().join("ledger.jsonl")).unwrap();
    // Change each byte before the last seal. A changed last seal would be no damage: a line without
    // a seal after it counts as torn.
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

fn seen(wal: u64) -> DatabasePosition {
    DatabasePosition {
        system_identifier: 7,
        timeline: 1,
        database: 20,
        tables: [1, 2, 3, 4],
        generation: 1,
        wal,
        beat: 0,
        processes: vec![Uuid::nil()],
    }
}

fn copied(to: u64, commits: &[(Uuid, &str)]) -> CopiedDecisions {
    let h = |hex: &str| commit(Uuid::nil(), hex).hash().unwrap();
    let commits = commits.iter().map(|(cluster, hex)| pack_commit(*cluster, &h(hex))).collect();
    CopiedDecisions {
        generation: 1,
        to,
        hash: AA.into(),
        commits,
        ends: Vec::new(),
        compared: false,
    }
}

#[tokio::test]
async fn a_last_batch_whose_pages_reached_the_disk_out_of_order_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    let (first, second) = (Uuid::now_v7(), Uuid::now_v7());
    ledger.ensure_commit(commit(first, AA)).await.unwrap();
    drop(reopened(dir.path(), ledger).await.unwrap());
    let path = dir.path().join("ledger.jsonl");
    let sealed = std::fs::read(&path).unwrap();
    // Of a batch of two lines, only the end of the first and the whole second line reached the
    // disk.
    let line = file::encode(&LedgerLine::Commit(Box::new(commit(second, BB)))).unwrap();
    let mut torn = line.clone();
    torn[..20].fill(0);
    let batch = [torn, line].concat();
    std::fs::write(&path, [&sealed[..], &batch].concat()).unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    assert_eq!(ledger.commits(), 1);
    assert!(ledger.commit_with_document(first).unwrap().is_some(), "what was sealed stays");
    drop(reopened(dir.path(), ledger).await.unwrap());
    // A seal after the batch shows that the batch was durable once. So its broken line is damage.
    let seal = file::encode(&LedgerLine::Seal).unwrap();
    std::fs::write(&path, [&sealed[..], &batch, &seal].concat()).unwrap();
    let refused = Ledger::open(dir.path());
    assert!(matches!(refused, Err(LedgerError::Damaged { .. })), "{refused:?}");
}

#[tokio::test]
async fn the_stored_position_survives_a_restart_and_never_goes_back() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    ledger.record_position(seen(1)).await.unwrap();
    let ledger = reopened(dir.path(), ledger).await.unwrap();
    let length = || std::fs::metadata(dir.path().join("ledger.jsonl")).unwrap().len();
    let before = length();
    ledger.record_position(DatabasePosition { beat: 3, ..seen(9) }).await.unwrap();
    // Of two concurrent checks of the database, the one that started first can finish last.
    ledger.record_position(DatabasePosition { beat: 2, ..seen(8) }).await.unwrap();
    let furthest = DatabasePosition { beat: 3, ..seen(9) };
    assert_eq!(ledger.position(), Some(furthest.clone()));
    let killed = reopened(dir.path(), ledger).await.unwrap();
    assert_eq!(killed.position(), Some(furthest));
    assert_eq!(length(), before, "the ledger doesn't grow with time");
    // A position of another generation replaces the old one, even if it is lower.
    let next = DatabasePosition { generation: 2, ..seen(5) };
    killed.record_position(next.clone()).await.unwrap();
    let reset = reopened(dir.path(), killed).await.unwrap();
    assert_eq!(reset.position(), Some(next));
}

#[tokio::test]
async fn another_end_replaces_an_expiry_and_an_expiry_replaces_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    let (abandoned, formed) = (Uuid::now_v7(), Uuid::now_v7());
    ledger.record_position(seen(1)).await.unwrap();
    let ends = |cause: &str| vec![(abandoned, cause.to_owned()), (formed, cause.to_owned())];
    let expired = || CopiedDecisions { ends: ends("deadline"), ..copied(2, &[]) };
    ledger.append_copied(expired()).await.unwrap();
    assert_eq!(ledger.entry(abandoned).unwrap(), Some(LedgerEntry::End(EndCause::Deadline)));
    let more = CopiedDecisions {
        ends: vec![(abandoned, "abandon".to_owned())],
        ..copied(3, &[(formed, AA)])
    };
    ledger.append_copied(more).await.unwrap();
    // A ledger that is filled again gets the earlier decisions, too.
    ledger.append_copied(expired()).await.unwrap();
    let ledger = reopened(dir.path(), ledger).await.unwrap();
    assert_eq!(ledger.entry(abandoned).unwrap(), Some(LedgerEntry::End(EndCause::Abandon)));
    assert!(matches!(ledger.entry(formed).unwrap(), Some(LedgerEntry::Commit { .. })));
    assert_eq!(ledger.commits(), 1);
}

#[tokio::test]
async fn pages_of_entries_hold_commits_and_ends_in_the_order_of_their_clusters() {
    const BATCHES: u64 = 5;
    const IN_BATCH: u64 = 5_000;
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    ledger.record_position(seen(1)).await.unwrap();
    let id = |number: u64| Uuid::from_u128(u128::from(number) << 64);
    for batch in 0..BATCHES {
        let all = batch * IN_BATCH..(batch + 1) * IN_BATCH;
        let commits: Vec<(Uuid, &str)> =
            all.clone().filter(|number| number % 3 > 0).map(|number| (id(number), AA)).collect();
        let ends =
            all.filter(|number| number % 3 == 0).map(|number| (id(number), "abandon".into()));
        let copied = CopiedDecisions { ends: ends.collect(), ..copied(batch + 2, &commits) };
        ledger.append_copied(copied).await.unwrap();
    }
    let check = |ledger: &Ledger| {
        let (mut after, mut next) = (None, 0);
        loop {
            let page = ledger.entries(after, 777).unwrap();
            let Some(&(last, _)) = page.last() else { break };
            after = Some(last);
            for (cluster, entry) in page {
                assert_eq!(cluster, id(next));
                assert_eq!(matches!(entry, LedgerEntry::End(_)), next % 3 == 0);
                assert_eq!(ledger.entry(cluster).unwrap(), Some(entry));
                next += 1;
            }
        }
        assert_eq!(next, BATCHES * IN_BATCH);
    };
    check(&ledger);
    check(&reopened(dir.path(), ledger).await.unwrap());
}

#[tokio::test]
async fn the_first_commit_of_a_cluster_stays_and_gets_its_document_later() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    let (whole, bare, ended) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
    ledger.record_position(seen(1)).await.unwrap();
    ledger.ensure_commit(commit(whole, AA)).await.unwrap();
    let ends = vec![(ended, "abandon".to_owned()), (bare, "abandon".to_owned())];
    ledger.append_copied(CopiedDecisions { ends, ..copied(2, &[]) }).await.unwrap();
    ledger.append_copied(copied(3, &[(whole, BB), (bare, AA)])).await.unwrap();
    ledger.append_copied(copied(4, &[(bare, BB)])).await.unwrap();
    let other = ledger.ensure_commit(commit(bare, BB)).await;
    assert!(matches!(other, Err(LedgerError::Contradiction { .. })), "{other:?}");
    // Append without the check of `ensure_commit`, as a faulty caller would.
    ledger.append(vec![LedgerLine::Commit(Box::new(commit(bare, BB)))]).await.unwrap();
    for _ in 0..2 {
        let h = commit(whole, AA).hash().unwrap();
        assert_eq!(ledger.entry(whole).unwrap(), Some(LedgerEntry::Commit { h, document: true }));
        assert_eq!(ledger.entry(bare).unwrap(), Some(LedgerEntry::Commit { h, document: false }));
        assert_eq!(ledger.entry(ended).unwrap(), Some(LedgerEntry::End(EndCause::Abandon)));
        assert_eq!((ledger.commits(), ledger.known().unwrap().last_copied.number), (2, 4));
    }
    let ledger = reopened(dir.path(), ledger).await.unwrap();
    let h = commit(whole, AA).hash().unwrap();
    assert_eq!(ledger.entry(whole).unwrap(), Some(LedgerEntry::Commit { h, document: true }));
    assert_eq!(ledger.entry(bare).unwrap(), Some(LedgerEntry::Commit { h, document: false }));
    assert_eq!((ledger.commits(), ledger.known().unwrap().last_copied.number), (2, 4));
    ledger.ensure_commit(commit(bare, AA)).await.unwrap();
    assert!(ledger.commit_with_document(bare).unwrap().is_some());
    assert_eq!(ledger.commits(), 2);
    // If decisions are copied once more from the first one on, `last_copied` doesn't go back. In a
    // new generation it begins at the start again.
    ledger.append_copied(copied(1, &[])).await.unwrap();
    assert_eq!(ledger.known().unwrap().last_copied.number, 4);
    ledger.record_position(DatabasePosition { generation: 2, ..seen(1) }).await.unwrap();
    assert_eq!(ledger.known().unwrap().last_copied, HistoryPosition::START);
}

/// Tests which commits are unconfirmed. A process must look those up in the database when it
/// starts.
#[tokio::test]
async fn a_commit_is_unconfirmed_until_a_copy_shows_it_and_a_new_generation_compares_all() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    let unconfirmed = |ledger: &Ledger| -> Vec<Uuid> {
        ledger.unconfirmed(None, 9).unwrap().into_iter().map(|(cluster, _)| cluster).collect()
    };
    let [own, late, others] = [1, 2, 3].map(|_| Uuid::now_v7());
    ledger.record_position(seen(1)).await.unwrap();
    assert!(ledger.is_compared(), "there is nothing to compare");
    ledger.append_copied(copied(1, &[(late, AA), (others, AA)])).await.unwrap();
    ledger.ensure_commit(commit(own, AA)).await.unwrap();
    ledger.ensure_commit(commit(late, AA)).await.unwrap();
    // A copied commit of another list doesn't confirm the commit that this process has sent out.
    ledger.append_copied(copied(2, &[(own, BB)])).await.unwrap();
    assert_eq!(unconfirmed(&ledger), [own]);
    let ledger = reopened(dir.path(), ledger).await.unwrap();
    assert_eq!(unconfirmed(&ledger), [own]);
    ledger.append_copied(copied(3, &[(own, AA)])).await.unwrap();
    assert!(unconfirmed(&ledger).is_empty());
    assert!(ledger.is_compared());

    ledger.record_position(DatabasePosition { generation: 2, ..seen(1) }).await.unwrap();
    assert!(!ledger.is_compared());
    // A comparison in the previous generation doesn't make this generation compared.
    ledger.append_copied(CopiedDecisions { compared: true, ..copied(3, &[]) }).await.unwrap();
    assert!(!ledger.is_compared());
    ledger
        .append_copied(CopiedDecisions { generation: 2, compared: true, ..copied(3, &[]) })
        .await
        .unwrap();
    let ledger = reopened(dir.path(), ledger).await.unwrap();
    assert!(ledger.is_compared());
}

#[tokio::test]
async fn a_copied_commit_takes_little_room() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    let length = || std::fs::metadata(dir.path().join("ledger.jsonl")).unwrap().len();
    let before = length();
    let many: Vec<(Uuid, &str)> = (0..1_000).map(|_| (Uuid::now_v7(), AA)).collect();
    ledger.append_copied(copied(1_000, &many)).await.unwrap();
    let each = (length() - before) / 1_000;
    assert!(each <= 68, "{each} bytes");
}

#[tokio::test]
async fn each_batch_is_sealed_once_it_is_durable() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    ledger.ensure_commit(commit(Uuid::now_v7(), AA)).await.unwrap();
    close(ledger).await;
    let text = std::fs::read_to_string(dir.path().join("ledger.jsonl")).unwrap();
    let last = text.lines().next_back().unwrap();
    assert_eq!(file::parse_line(last.as_bytes()), Some(LedgerLine::Seal));
}

#[tokio::test]
async fn after_a_failed_write_nothing_more_is_accepted() {
    let (appends, queue) = mpsc::channel(QUEUE);
    // The disk is full at the first write. The ledger must refuse further writes even if they would
    // succeed.
    let dir = tempfile::tempdir().unwrap();
    let full = || std::fs::File::create("/dev/full").unwrap();
    let shared = Arc::new(SharedLedger {
        index: RwLock::new(Index::default()),
        reader: LedgerReader::new(Arc::new(full()), dir.path().join(LEDGER_FILE)),
        is_copy: AtomicBool::new(false),
        failed: tokio::sync::watch::Sender::new(false),
    });
    let file = file::LedgerFile::from_file(full(), dir.path());
    let writing = shared.clone();
    let writer = std::thread::spawn(move || run_writer(file, queue, &writing));
    let ledger = Ledger { process: Uuid::nil(), shared, appends };
    let id = Uuid::now_v7();
    let first = ledger.ensure_commit(commit(id, AA)).await;
    assert!(matches!(first, Err(LedgerError::Failed)), "{first:?}");
    assert!(*ledger.failed().borrow());
    assert_eq!(ledger.entry(id).unwrap(), None, "nobody may rely on it");
    let next = ledger.record_position(seen(1)).await;
    assert!(matches!(next, Err(LedgerError::Failed)), "{next:?}");
    writer.join().unwrap();
}

#[tokio::test]
async fn admins_are_kept_in_their_order_and_a_forked_chain_is_ignored() {
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

/// strace, attached to this test process: records the system calls in order.
struct Trace {
    strace: std::process::Child,
    output: std::path::PathBuf,
}

impl Trace {
    fn attach(dir: &Path) -> Option<Self> {
        let output = dir.join("trace");
        let mut strace = std::process::Command::new("strace");
        strace.args(["-f", "-qq", "-y", "-s", "100", "-e"]);
        strace.arg("trace=openat,write,fsync,fdatasync,rename,renameat,renameat2,mkdir");
        strace.arg("-o").arg(&output).arg("-p").arg(std::process::id().to_string());
        let strace = strace.stderr(std::process::Stdio::null()).spawn().ok()?;
        let mut trace = Trace { strace, output };
        // Open a probe file until the trace contains it: from then on every thread is traced.
        for attempt in 0..200 {
            if trace.strace.try_wait().unwrap().is_some() {
                return None;
            }
            let probe = format!("/is-traced-{attempt}");
            let _ = std::fs::File::open(&probe);
            std::thread::sleep(std::time::Duration::from_millis(25));
            if std::fs::read_to_string(&trace.output).is_ok_and(|text| text.contains(&probe)) {
                return Some(trace);
            }
        }
        None
    }

    /// Returns the calls on files in `dir` and those of [`mark`], in order.
    fn calls(mut self, dir: &Path) -> Vec<String> {
        mark("end-of-trace");
        let wanted = |text: &str| text.contains("end-of-trace");
        let read = || std::fs::read_to_string(&self.output).unwrap();
        while !wanted(&read()) {
            std::thread::sleep(std::time::Duration::from_millis(25));
        }
        let text = read();
        let _ = self.strace.kill();
        let _ = self.strace.wait();
        let folder = dir.display().to_string();
        let lines = text.lines().filter(|line| line.contains(&folder) || line.contains("/mark-"));
        let call = |line: &str| line.split_once(' ').map(|(_, call)| call.trim().to_owned());
        // Skip the second half of an interrupted call: its first half names the file.
        lines.filter(|line| !line.contains(" resumed>")).filter_map(call).collect()
    }
}

/// Tries to open a file that doesn't exist, so that strace's output contains `/mark-{what}` at this
/// point.
fn mark(what: &str) {
    let _ = std::fs::File::open(format!("/mark-{what}"));
}

/// Finds the first of `calls`, at or after the index `from`, that starts with `call` and contains
/// `part`. Returns the index after it.
#[track_caller]
fn index_after_call(calls: &[String], from: usize, call: &str, part: &str) -> usize {
    let found =
        calls.iter().skip(from).position(|line| line.starts_with(call) && line.contains(part));
    from + found.unwrap_or_else(|| panic!("no {call} of {part} after {from}: {calls:#?}")) + 1
}

#[tokio::test]
async fn every_write_and_rename_is_durable_before_the_call_returns() {
    let root = tempfile::tempdir().unwrap();
    let Some(trace) = Trace::attach(root.path()) else {
        assert!(std::env::var_os("CI").is_none(), "strace cannot be used");
        // Write to standard error directly: the test runner captures the normal output of passing
        // tests.
        let _ = writeln!(std::io::stderr(), "SKIPPED: strace cannot be used");
        return;
    };
    let dir = root.path().join("traced");
    let ledger = Ledger::open(&dir).unwrap();
    mark("opened");
    ledger.ensure_commit(commit(Uuid::now_v7(), AA)).await.unwrap();
    mark("let-out");
    ledger.append_copied(copied(1, &[(Uuid::now_v7(), AA)])).await.unwrap();
    mark("copied");
    ledger.record_position(seen(1)).await.unwrap();
    mark("noted");
    ledger.record_position(seen(2)).await.unwrap();
    mark("position");
    let calls = trace.calls(root.path());
    let file = "ledger.jsonl";
    let mut at = index_after_call(&calls, 0, "openat", file);
    // The ledger's header and its file name are durable before `Ledger::open` returns.
    at = index_after_call(&calls, at, "write", "header");
    at = index_after_call(&calls, at, "fdatasync", file);
    at = index_after_call(&calls, at, "fsync", "traced>");
    at = index_after_call(&calls, at, "openat", "/mark-opened");
    for (line, done) in [("commit", "let-out"), ("copied", "copied"), ("seen", "noted")] {
        let written = index_after_call(&calls, at, "write", &format!(r#"\"kind\":\"{line}\""#));
        let synced = index_after_call(&calls, written, "fdatasync", file);
        at = index_after_call(&calls, at, "openat", &format!("/mark-{done}"));
        assert!(synced < at, "{done}: {calls:#?}");
    }
    let written = index_after_call(&calls, at, "write", "seen");
    let synced = index_after_call(&calls, written, "fsync", "traced/");
    let renamed = index_after_call(&calls, synced, "rename", "ledger.position");
    let folder = index_after_call(&calls, renamed, "fsync", "traced>");
    assert!(folder < index_after_call(&calls, at, "openat", "/mark-position"), "{calls:#?}");
}
