//! A follower passes its clients' proposals on to a leader, and the connection breaks.

use node_consensus::Entry;

use super::*;

/// Member 1 of three; 2 leads in term 1, and there is a connection to it.
fn follower() -> Driver {
    let members = Members { voters: vec![1, 2, 3], learners: Vec::new() };
    let initial = Initial { members, ..Initial::default() };
    let mut driver = Driver::new(&Config::new(1, 1, 1), options(128 << 20), &initial).unwrap();
    driver.notice(Notice::Connected(2));
    follow(&mut driver, 2, 1);
    driver
}

/// From now on `leader` leads, in this term.
fn follow(driver: &mut Driver, leader: u64, term: u64) {
    driver.message(Message { term, ..Message::new(MessageKind::Heartbeat, leader, 1) });
    let effects = driver.advance();
    if let Some((last, _)) = effects.persist.last() {
        driver.notice(Notice::Persisted(*last));
    }
    driver.advance();
}

fn propose(driver: &mut Driver, id: u64) -> Vec<Message> {
    let proposal = Proposal { id: RequestId(id), kind: EntryKind::Normal, data: payload(id, 0) };
    driver.propose([proposal]);
    passed_on(driver.advance())
}

fn passed_on(effects: Effects) -> Vec<Message> {
    assert_eq!((&effects.refused, &effects.given_up), (&Vec::new(), &Vec::new()));
    effects.send.into_iter().filter(|message| message.kind == MessageKind::Propose).collect()
}

/// This entry comes from `leader`, which leads in `term`, and is applied; with it these requests.
fn applied(driver: &mut Driver, leader: u64, term: u64, at: Position, answered: &[u64]) -> Effects {
    let Position { index, term: entry_term } = at;
    let (kind, data) = (EntryKind::Normal, Bytes::from_static(b"x"));
    let entries = vec![Entry { index, term: entry_term, kind, data }];
    let log_term = u64::from(index > 1);
    let message = Message::new(MessageKind::Append, leader, 1);
    driver.message(Message { term, index: index - 1, log_term, commit: index, entries, ..message });
    let (last, _) = driver.advance().persist.pop().unwrap();
    driver.notice(Notice::Persisted(last));
    driver.advance();
    let answered = answered.iter().map(|id| RequestId(*id)).collect();
    driver.notice(Notice::Applied { at, changes: Vec::new(), answered });
    driver.advance()
}

fn requests(messages: &[Message]) -> Vec<(u64, u64, Bytes)> {
    messages.iter().map(|it| (it.to, it.index, it.entries[0].data.clone())).collect()
}

#[test]
fn what_was_passed_on_is_sent_again_to_the_same_leader_under_its_number_and_in_order() {
    let mut driver = follower();
    let first: Vec<_> = (1..=3).flat_map(|id| propose(&mut driver, id)).collect();
    assert_eq!(first.len(), 3);
    applied(&mut driver, 2, 1, Position { index: 1, term: 1 }, &[2]);
    driver.notice(Notice::Disconnected(2));
    let unsent = propose(&mut driver, 4);
    assert!(driver.forward_failed(unsent[0].index, SendError::NotConnected).is_empty());
    driver.notice(Notice::Connected(3));
    assert_eq!(passed_on(driver.advance()), [], "the leader is away still");
    driver.notice(Notice::Connected(2));
    let newer = Proposal { id: RequestId(5), kind: EntryKind::Normal, data: payload(5, 0) };
    driver.propose([newer]);
    let again = passed_on(driver.advance());
    let in_its_term = |message: &Message| Message { term: 1, ..message.clone() };
    let expected = [in_its_term(&first[0]), in_its_term(&first[2]), unsent[0].clone()];
    assert_eq!(again[..3], expected, "what never left may be taken by anybody");
    assert_eq!(requests(&again)[3..], [(2, 5, payload(5, 0))]);
}

#[test]
fn a_leader_takes_what_was_sent_again_once() {
    let mut proposals = super::super::proposals::Proposals::default();
    let message = propose(&mut follower(), 1).remove(0);
    proposals.push_forwarded(message.clone(), 1);
    proposals.push_forwarded(message, 2);
    assert_eq!(proposals.take(true).map(|group| group.data.len()), Some(1));
}

/// What a member writes once this has come, and who leads then. Its disk is quick.
fn written(driver: &mut Driver, message: Option<Message>) -> (Vec<Bytes>, (Role, u64, u64)) {
    message.into_iter().for_each(|message| driver.message(message));
    let mut all = Vec::new();
    loop {
        let persist = driver.advance().persist;
        let Some((last, _)) = persist.last() else { return (all, driver.leadership()) };
        driver.notice(Notice::Persisted(*last));
        let entries = persist.into_iter().flat_map(|(_, batch)| batch.entries);
        all.extend(entries.map(|entry| entry.data));
    }
}

#[test]
fn what_is_sent_again_is_taken_by_the_leader_of_its_term_only() {
    let only = Members { voters: vec![1], learners: vec![2] };
    let initial = Initial { members: only, ..Initial::default() };
    let mut leader = Driver::new(&Config::new(1, 1, 1), options(128 << 20), &initial).unwrap();
    let (_, (role, _, term)) = written(&mut leader, None);
    assert_eq!(role, Role::Leader);
    for (index, sent_in, is_taken) in [(1, term + 1, false), (2, term, true), (3, 0, true)] {
        let data = payload(index, 0);
        let entries =
            vec![Entry { kind: EntryKind::Normal, data: data.clone(), ..Entry::default() }];
        let message = Message::new(MessageKind::Propose, 2, 1);
        let (log_term, commit) = (1, 1);
        let message = Message { term: sent_in, index, log_term, commit, entries, ..message };
        let (entries, _) = written(&mut leader, Some(message));
        assert_eq!(entries.contains(&data), is_taken, "term {sent_in} in {term}");
    }
    let mut follower = follower();
    let entries = vec![Entry { kind: EntryKind::Normal, data: payload(9, 0), ..Entry::default() }];
    let message = Message::new(MessageKind::Propose, 3, 1);
    follower.message(Message { term: 1, index: 9, log_term: 1, commit: 1, entries, ..message });
    assert_eq!(passed_on(follower.advance()), [], "it may have taken it before it was restarted");
}

#[test]
fn what_may_have_arrived_is_given_up_once_a_later_term_shows_that_it_was_lost() {
    let mut driver = follower();
    propose(&mut driver, 1);
    propose(&mut driver, 2);
    driver.notice(Notice::Disconnected(2));
    driver.notice(Notice::Connected(3));
    follow(&mut driver, 3, 2);
    assert_eq!(passed_on(driver.advance()), [], "it may be in the new leader's log");
    let effects = applied(&mut driver, 3, 2, Position { index: 1, term: 1 }, &[]);
    assert!(effects.given_up.is_empty(), "an entry of the earlier term");
    let effects = applied(&mut driver, 3, 2, Position { index: 2, term: 2 }, &[2]);
    assert_eq!(effects.given_up, [RequestId(1)]);
    driver.notice(Notice::Connected(3));
    assert_eq!(passed_on(driver.advance()), []);
}

#[test]
fn nothing_is_sent_again_to_the_same_leader_in_another_term() {
    let mut driver = follower();
    propose(&mut driver, 1);
    driver.notice(Notice::Disconnected(2));
    follow(&mut driver, 2, 2);
    driver.notice(Notice::Connected(2));
    assert_eq!(passed_on(driver.advance()), [], "it may have been restarted and remember nothing");
}

#[test]
fn what_went_over_a_connection_that_stands_is_not_given_up() {
    let mut driver = follower();
    propose(&mut driver, 1);
    follow(&mut driver, 3, 2);
    let effects = applied(&mut driver, 3, 2, Position { index: 1, term: 2 }, &[]);
    assert!(effects.given_up.is_empty(), "the old leader hands it on");
}

#[test]
fn what_never_left_goes_to_the_next_leader_under_a_number_of_its_own() {
    let mut driver = follower();
    driver.notice(Notice::Disconnected(2));
    let unsent = propose(&mut driver, 1);
    assert!(driver.forward_failed(unsent[0].index, SendError::NotConnected).is_empty());
    driver.notice(Notice::Connected(3));
    driver.message(Message { term: 2, ..Message::new(MessageKind::Heartbeat, 3, 1) });
    let mut sent = passed_on(driver.advance());
    sent.extend(passed_on(driver.advance()));
    assert_eq!(requests(&sent), [(3, unsent[0].index + 1, payload(1, 0))]);
}

#[test]
fn what_finds_the_queue_full_is_refused_at_once_unless_it_was_sent_before() {
    let mut driver = follower();
    let full = propose(&mut driver, 1).remove(0);
    assert_eq!(driver.forward_failed(full.index, SendError::Full), [RequestId(1)]);
    let sent = propose(&mut driver, 2).remove(0);
    driver.notice(Notice::Disconnected(2));
    driver.notice(Notice::Connected(2));
    assert_eq!(passed_on(driver.advance()).len(), 1);
    assert!(driver.forward_failed(sent.index, SendError::Full).is_empty());
}

#[test]
fn what_nobody_waits_for_any_more_is_not_sent_again() {
    let mut driver = follower();
    propose(&mut driver, 1);
    driver.notice(Notice::Disconnected(2));
    for _ in 0..=options(1).proposal_ticks + 1 {
        driver.message(Message { term: 1, ..Message::new(MessageKind::Heartbeat, 2, 1) });
        driver.tick();
        driver.advance();
    }
    driver.notice(Notice::Connected(2));
    assert_eq!(passed_on(driver.advance()), []);
}
