//! Messages that a leader must not send before its disk has completed a write, step by step.

use super::*;

/// Returns the elected leader of two members, and the number of its last batch, which is durable.
fn leader() -> (DriverCore, u64) {
    let members = Members { voters: vec![1, 2], learners: Vec::new() };
    let initial = InitialState { members, ..InitialState::default() };
    let mut driver = DriverCore::new(&Config::new(1, 1, 1), options(128 << 20), &initial).unwrap();
    driver.notice(Notice::Campaign);
    let mut batch = 0;
    loop {
        let effects = driver.advance();
        if let Some((last, _)) = effects.persist.last() {
            batch = *last;
            driver.notice(Notice::Persisted(batch));
        }
        if let Some(last) = effects.apply.last() {
            driver.notice(Notice::Applied { at: last.position, changes: Vec::new() });
        }
        let answers: Vec<_> = effects.send.iter().filter_map(positive_answer).collect();
        if answers.is_empty() && effects.persist.is_empty() {
            return (driver, batch);
        }
        answers.into_iter().for_each(|answer| driver.message(answer));
    }
}

fn positive_answer(to: &Message) -> Option<Message> {
    let kind = match to.kind {
        MessageKind::RequestPreVote => MessageKind::RequestPreVoteResponse,
        MessageKind::RequestVote => MessageKind::RequestVoteResponse,
        MessageKind::Append => MessageKind::AppendResponse,
        _ => return None,
    };
    let index = to.index + to.entries.len() as u64;
    Some(Message { term: to.term, index, ..Message::new(kind, 2, 1) })
}

/// Returns a leader that has just learned that a change of members is committed, and the number of
/// the batch that records this.
fn committed_change() -> (DriverCore, u64) {
    let (mut driver, batch) = leader();
    let data = Bytes::from_static(b"a change of members");
    driver.propose([ClientProposal { id: RequestId(1), kind: EntryKind::ConfChange, data }]);
    let appended = driver.advance();
    driver.notice(Notice::Persisted(batch + 1));
    driver.message(appended.send.iter().find_map(positive_answer).unwrap());
    let effects = driver.advance();
    let [(writes, batch)] = &effects.persist[..] else { panic!("{effects:?}") };
    assert_eq!(batch.hard_state.map(|state| state.commit), Some(2));
    assert!(effects.send.is_empty() && effects.apply.is_empty(), "{effects:?}");
    (driver, *writes)
}

#[test]
fn a_leader_makes_a_committed_change_durable_before_it_sends_or_applies_it() {
    let (mut driver, writes) = committed_change();
    assert!(driver.may_be_only_one_to_know_removal());
    driver.notice(Notice::Persisted(writes));
    let effects = driver.advance();
    assert_eq!(effects.send.iter().map(|message| message.commit).collect::<Vec<_>>(), [2]);
    assert_eq!(effects.apply.iter().map(|entry| entry.position.index).collect::<Vec<_>>(), [2]);
}

#[test]
fn a_snapshot_is_discarded_while_a_leaders_commit_is_not_durable() {
    let (mut driver, writes) = committed_change();
    let (at, body) = (Position { index: 50, term: 4 }, PathBuf::from("body"));
    let members = Some(Members { voters: vec![1, 2], learners: Vec::new() });
    let message = Message { term: 4, ..Message::new(MessageKind::Snapshot, 2, 1) };
    let message = Message { snapshot: Some(at), members, ..message };
    let snapshot = IncomingSnapshot { message, body: body.clone() };
    driver.notice(Notice::Snapshot(snapshot));
    let effects = driver.advance();
    assert_eq!((effects.discard, effects.install), (vec![body], None));
    driver.notice(Notice::Persisted(writes));
    let effects = driver.advance();
    assert_eq!(effects.apply.len(), 1, "it goes on: {effects:?}");
}
