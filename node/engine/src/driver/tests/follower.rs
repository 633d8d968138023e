//! Writes and messages of a follower, step by step, and which of them wait for its disk.

use node_consensus::{Entry, HardState};

use super::*;
use crate::log::Batch;

const FIRST: Position = Position { index: 1, term: 1 };

/// Returns the driver of member 1 of three, whose leader is member 2.
fn follower() -> DriverCore {
    let initial = InitialState { members: three(), ..InitialState::default() };
    DriverCore::new(&Config::new(1, 1, 1), options(128 << 20), &initial).unwrap()
}

fn three() -> Members {
    Members { voters: vec![1, 2, 3], learners: Vec::new() }
}

fn from(leader: u64, kind: MessageKind, term: u64) -> Message {
    Message { term, ..Message::new(kind, leader, 1) }
}

/// Returns an append message with one entry, at position `at`. The previous entry has the same
/// term, and the commit index is `commit`.
fn append(at: Position, commit: u64) -> Message {
    let Position { index, term } = at;
    let entry = Entry { index, term, kind: EntryKind::Normal, data: Bytes::from_static(b"x") };
    let log_term = if index == 1 { 0 } else { term };
    let message = from(2, MessageKind::Append, term);
    Message { index: index - 1, log_term, commit, entries: vec![entry], ..message }
}

fn hard_state(term: u64, commit: u64) -> Option<HardState> {
    Some(HardState { term, vote: 0, commit })
}

#[test]
fn a_new_commit_index_is_written_with_the_next_batch() {
    let mut driver = follower();
    driver.message(append(FIRST, 0));
    let written = driver.advance().persist;
    assert_eq!(written[0].1.hard_state, hard_state(1, 0));
    driver.notice(Notice::Persisted(1));
    driver.message(Message { commit: 1, ..from(2, MessageKind::Heartbeat, 1) });
    assert_eq!(driver.advance().persist, [], "no write for it alone");
    driver.message(append(Position { index: 2, term: 1 }, 1));
    let written = driver.advance().persist;
    assert_eq!(written[0].1.hard_state, hard_state(1, 1));
}

#[test]
fn a_snapshot_takes_three_steps_each_durable_before_the_next() {
    let mut driver = follower();
    driver.message(append(FIRST, 1));
    let written = driver.advance().persist;
    assert_eq!((written[0].0, written[0].1.entries.len()), (1, 1));
    // A snapshot arrives while batch 1 is being written.
    let (at, body) = (Position { index: 50, term: 4 }, PathBuf::from("body"));
    let message = from(2, MessageKind::Snapshot, 4);
    let message = Message { snapshot: Some(at), members: Some(three()), ..message };
    driver.notice(Notice::Snapshot(IncomingSnapshot { message, body: body.clone() }));
    // Batch 2 records that the install begins. The old log is still valid, so the batch keeps its
    // commit index.
    let intent = Batch { hard_state: hard_state(4, 1), installing: Some(at), ..Batch::default() };
    assert_eq!(driver.advance().persist, [(2, intent)]);
    driver.notice(Notice::Persisted(1));
    assert_eq!(driver.advance().install, None, "the intent is not durable");
    driver.notice(Notice::Persisted(2));
    assert_eq!(driver.advance().install, Some((at, body)));
    // During the install, the new leader's term must wait and isn't written.
    driver.message(from(3, MessageKind::Heartbeat, 5));
    assert_eq!(driver.advance().persist, []);
    driver.notice(Notice::Installed { at, members: three() });
    let effects = driver.advance();
    let joined = Batch { hard_state: hard_state(4, 50), snapshot: Some(at), ..Batch::default() };
    let term = Batch { hard_state: hard_state(5, 50), ..Batch::default() };
    assert_eq!(effects.persist, [(3, joined), (4, term)]);
    assert_eq!(effects.send, [], "nobody is told before the log has it");
    driver.notice(Notice::Persisted(3));
    let told = driver.advance().send;
    assert_eq!((told[0].kind, told[0].to, told[0].index), (MessageKind::AppendResponse, 2, 50));
}

/// A snapshot with newer members arrives while the follower is still applying an older change of
/// members.
#[test]
fn a_change_applied_during_an_install_keeps_the_snapshots_members() {
    let mut driver = follower();
    driver.message(append(FIRST, 1));
    driver.advance();
    driver.notice(Notice::Persisted(1));
    assert_eq!(driver.advance().apply.len(), 1);
    let (at, body) = (Position { index: 50, term: 4 }, PathBuf::from("body"));
    let later = Members { learners: vec![9], ..three() };
    let message = from(2, MessageKind::Snapshot, 4);
    let message = Message { snapshot: Some(at), members: Some(later.clone()), ..message };
    driver.notice(Notice::Snapshot(IncomingSnapshot { message, body }));
    driver.advance();
    let members = Members { learners: vec![4], ..three() };
    let change = AppliedChange { index: 1, change: Some(ConfChange::Learner(4)), members };
    driver.notice(Notice::Applied { at: FIRST, changes: vec![change] });
    assert_eq!(**driver.members(), later);
    driver.notice(Notice::Persisted(2));
    assert!(driver.advance().install.is_some());
    driver.notice(Notice::Installed { at, members: later });
}

#[test]
fn a_snapshot_is_discarded_while_the_commit_of_a_change_is_not_durable() {
    let mut driver = follower();
    let change = append(FIRST, 0);
    let entries = change.entries.iter().cloned();
    let entries = entries.map(|entry| Entry { kind: EntryKind::ConfChange, ..entry }).collect();
    driver.message(Message { entries, ..change });
    driver.advance();
    driver.notice(Notice::Persisted(1));
    driver.advance();
    driver.message(Message { commit: 1, ..from(2, MessageKind::Heartbeat, 1) });
    let (at, body) = (Position { index: 50, term: 1 }, PathBuf::from("body"));
    let message = from(2, MessageKind::Snapshot, 1);
    let message = Message { snapshot: Some(at), members: Some(three()), ..message };
    driver.notice(Notice::Snapshot(IncomingSnapshot { message, body: body.clone() }));
    let effects = driver.advance();
    assert_eq!((effects.discard, effects.install), (vec![body], None));
    let [(writes, batch)] = &effects.persist[..] else { panic!("{:?}", effects.persist) };
    assert_eq!(batch.hard_state, hard_state(1, 1), "that the change is committed");
    driver.notice(Notice::Persisted(*writes));
    let effects = driver.advance();
    assert_eq!(effects.apply.len(), 1, "it goes on: {effects:?}");
}

#[test]
fn a_member_that_alone_may_know_its_removal_ends_only_at_a_voters_report() {
    let mut driver = follower();
    assert!(!driver.may_be_only_one_to_know_removal());
    driver.message(append(FIRST, 1));
    driver.advance();
    driver.notice(Notice::Persisted(1));
    let effects = driver.advance();
    assert_eq!(effects.apply.len(), 1, "{effects:?}");
    assert!(driver.may_be_only_one_to_know_removal(), "what it is about to apply may be that");
    driver.notice(Notice::Applied { at: FIRST, changes: Vec::new() });
    driver.advance();
    assert!(!driver.may_be_only_one_to_know_removal());

    let others = Members { voters: vec![2], learners: vec![3] };
    let initial = InitialState { members: others.clone(), ..InitialState::default() };
    let removed = DriverCore::new(&Config::new(1, 1, 1), options(128 << 20), &initial).unwrap();
    assert!(removed.may_be_only_one_to_know_removal(), "it was");
    assert!(accepts_removal_report(2, &others, true));
    assert!(!accepts_removal_report(3, &others, true));
    assert!(accepts_removal_report(3, &others, false));
    assert!(
        accepts_removal_report(4, &others, true),
        "who has come since is no learner that it knows"
    );
}

/// Checkpoints and installs end on different threads, so a report can be late.
#[test]
fn a_late_report_of_an_earlier_checkpoint_is_ignored() {
    let mut driver = follower();
    let at = |index| Position { index, term: 1 };
    driver.notice(Notice::Checkpointed(at(20)));
    assert_eq!(driver.advance().compact, Some(20 - options(1 << 30).catch_up_entries));
    driver.notice(Notice::Checkpointed(at(12)));
    assert_eq!(driver.advance().compact, None);
    assert_eq!(driver.positions().1, at(20));
}
