use bytes::Bytes;

use super::*;
use crate::{ConfChange, Members};

/// Returns a follower, member 2 of three, that was sent a snapshot which is not installed yet.
fn restoring() -> Consensus {
    let members = Members { voters: vec![1, 2, 3], learners: Vec::new() };
    let initial = InitialState { members: members.clone(), ..InitialState::default() };
    let mut follower = Consensus::new(&Config::new(2, 1, 7), &initial).unwrap();
    let at = Position { index: 38, term: 3 };
    follower
        .step(Message {
            term: 3,
            snapshot: Some(at),
            members: Some(members),
            ..Message::new(MessageKind::Snapshot, 1, 2)
        })
        .unwrap();
    assert_eq!(follower.ready().persist.snapshot, Some(at));
    follower
}

#[test]
fn a_member_does_not_campaign_while_it_installs_a_snapshot() {
    let mut follower = restoring();
    // No message of a leader arrives for many election time-outs. Then the follower is asked to
    // take over the leadership, and `campaign` is called.
    for _ in 0..100 {
        follower.tick();
    }
    let term = follower.status().term;
    follower.step(Message { term, ..Message::new(MessageKind::TimeoutNow, 1, 2) }).unwrap();
    follower.campaign();
    assert_eq!(follower.status().role, Role::Follower);

    follower.report_persisted(1);
    follower.report_applied(38);
    for _ in 0..100 {
        follower.tick();
    }
    assert_eq!(follower.status().role, Role::PreCandidate, "then it does again");
}

/// Carries out all work of `member`, with a disk and store that are instant. Returns its messages.
fn run(member: &mut Consensus) -> Vec<Message> {
    let mut messages = Vec::new();
    while member.has_ready() {
        let ready = member.ready();
        messages.extend(ready.messages.into_iter().chain(ready.after_persist));
        member.report_persisted(ready.number);
        if let Some(last) = ready.committed.last() {
            member.report_applied(last.index);
        }
    }
    messages
}

/// Returns the answer of a peer that agrees to every request.
fn agrees(to: &Message) -> Option<Message> {
    let kind = match to.kind {
        MessageKind::RequestPreVote => MessageKind::RequestPreVoteResponse,
        MessageKind::RequestVote => MessageKind::RequestVoteResponse,
        MessageKind::Append => MessageKind::AppendResponse,
        _ => return None,
    };
    let index = to.index + to.entries.len() as u64;
    Some(Message { term: to.term, index, ..Message::new(kind, to.to, to.from) })
}

/// Returns member 1 as the leader of a cluster of two, after its barrier entry is committed.
fn leader() -> Consensus {
    let members = Members { voters: vec![1, 2], learners: Vec::new() };
    let initial = InitialState { members, ..InitialState::default() };
    let mut leader = Consensus::new(&Config::new(1, 1, 7), &initial).unwrap();
    leader.campaign();
    loop {
        let answers: Vec<_> = run(&mut leader).iter().filter_map(agrees).collect();
        if answers.is_empty() {
            assert!(leader.may_change_members(), "{:?}", leader.status());
            return leader;
        }
        answers.into_iter().for_each(|answer| leader.step(answer).unwrap());
    }
}

/// One of two members is removed, and ends for good when it learns of that. If the leader then
/// forgot the commit, it would wait for ever for the removed member's vote.
#[test]
fn no_member_learns_of_a_committed_change_before_it_is_durable_on_the_leader() {
    let mut leader = leader();
    leader.propose_many(EntryKind::ConfChange, vec![Bytes::from_static(b"remove 2")], 0).unwrap();
    let appended = run(&mut leader);
    assert_eq!(appended.len(), 1);
    let change = leader.status().last;
    leader.step(agrees(&appended[0]).unwrap()).unwrap();

    let ready = leader.ready();
    assert_eq!(ready.messages, []);
    assert_eq!(ready.committed, [], "whom it refuses hears of it, too");
    assert!(ready.persist.urgent);
    assert_eq!(ready.persist.hard_state.map(|state| state.commit), Some(change));
    (0..5).for_each(|_| leader.tick());
    assert!(!leader.has_ready(), "nor by what it says next");

    leader.report_persisted(ready.number);
    assert!(ready.after_persist.iter().any(|message| message.commit == change));
    let committed = leader.ready().committed;
    assert_eq!(committed.iter().map(|entry| entry.index).collect::<Vec<_>>(), [change]);
}

#[test]
fn normal_entries_are_committed_before_the_commit_index_is_durable() {
    let mut leader = leader();
    leader.propose_many(EntryKind::Normal, vec![Bytes::from_static(b"x")], 0).unwrap();
    let appended = run(&mut leader);
    leader.step(agrees(&appended[0]).unwrap()).unwrap();
    let ready = leader.ready();
    assert!(!ready.persist.urgent);
    assert_eq!((ready.messages.len(), ready.committed.len()), (0, 1));
}

/// Lets the leader append `data`, and returns the append with it.
fn append(leader: &mut Consensus, data: &'static [u8]) -> Message {
    leader.propose_many(EntryKind::Normal, vec![Bytes::from_static(data)], 0).unwrap();
    let mut messages = run(leader);
    assert_eq!(messages.len(), 1, "{messages:?}");
    messages.remove(0)
}

#[test]
fn a_commit_index_goes_to_a_peer_with_the_next_append() {
    let mut leader = leader();
    let first = append(&mut leader, b"x");
    leader.step(agrees(&first).unwrap()).unwrap();
    assert_eq!(run(&mut leader), []);
    assert!(leader.has_unsent_commit());
    let commit = leader.status().commit;
    assert_eq!(append(&mut leader, b"y").commit, commit);
    assert!(!leader.has_unsent_commit());
    assert!(!leader.send_commit_index(false));
}

#[test]
fn a_commit_index_without_a_next_append_goes_alone_and_once() {
    let mut leader = leader();
    let first = append(&mut leader, b"x");
    leader.step(agrees(&first).unwrap()).unwrap();
    run(&mut leader);
    assert!(!leader.send_commit_index(true), "the peer forwarded nothing");
    assert!(leader.send_commit_index(false));
    let sent = run(&mut leader);
    assert_eq!(sent.len(), 1);
    assert_eq!((sent[0].kind, sent[0].entries.len()), (MessageKind::Append, 0));
    assert_eq!(sent[0].commit, leader.status().commit);
    assert!(!leader.has_unsent_commit() && !leader.send_commit_index(false));
}

#[test]
fn a_peer_that_forwarded_a_proposal_is_sent_its_commit_index_at_once() {
    let mut leader = leader();
    leader.propose_many(EntryKind::Normal, vec![Bytes::from_static(b"x")], 1).unwrap();
    leader.expect_commit_notice(2);
    let sent = run(&mut leader);
    assert!(!leader.send_commit_index(true), "nothing is committed yet");
    leader.step(agrees(&sent[0]).unwrap()).unwrap();
    run(&mut leader);
    assert!(leader.send_commit_index(true));
    assert_eq!(run(&mut leader)[0].commit, leader.status().commit);
    let own = append(&mut leader, b"y");
    leader.step(agrees(&own).unwrap()).unwrap();
    run(&mut leader);
    assert!(!leader.send_commit_index(true), "this proposal is the leader's own");
}

/// A lost append may have been the only message with the commit index. The library probes such a
/// peer, and takes no notice of commits for it. The next heartbeat has the commit index.
#[test]
fn a_peer_that_is_probed_learns_the_commit_index_by_a_heartbeat() {
    let mut leader = leader();
    let first = append(&mut leader, b"x");
    leader.step(agrees(&first).unwrap()).unwrap();
    run(&mut leader);
    leader.report_unreachable(2);
    assert!(!leader.has_unsent_commit() && !leader.send_commit_index(false));
    (0..Config::new(1, 1, 7).heartbeat_ticks).for_each(|_| leader.tick());
    let commit = leader.status().commit;
    assert!(run(&mut leader).iter().any(|sent| sent.commit == commit));
}

#[test]
fn no_commit_index_is_sent_alone_before_a_change_of_members_is_durable() {
    let mut leader = leader();
    leader.propose_many(EntryKind::ConfChange, vec![Bytes::from_static(b"remove 2")], 0).unwrap();
    let appended = run(&mut leader);
    leader.step(agrees(&appended[0]).unwrap()).unwrap();
    let ready = leader.ready();
    assert!(leader.awaits_durability());
    assert!(!leader.has_unsent_commit() && !leader.send_commit_index(false));
    leader.report_persisted(ready.number);
}

/// The only voter needs no other vote to lead. If it sent entries of a term that isn't durable,
/// then after a crash it could lead in that term again. It would then write other entries in places
/// where a learner has the earlier ones.
#[test]
fn an_only_voter_sends_nothing_of_a_term_before_the_term_is_durable() {
    let members = Members { voters: vec![1], learners: vec![2] };
    let initial = InitialState { members, ..InitialState::default() };
    let mut leader = Consensus::new(&Config::new(1, 1, 7), &initial).unwrap();
    leader.campaign();
    let ready = leader.ready();
    assert_eq!(ready.messages, []);
    assert_eq!(ready.persist.hard_state.map(|state| (state.term, state.vote)), Some((1, 1)));
    let probed = ready.after_persist.iter().find_map(agrees).unwrap();

    leader.propose_many(EntryKind::Normal, vec![Bytes::from_static(b"x")], 0).unwrap();
    (0..5).for_each(|_| leader.tick());
    assert!(!leader.has_ready(), "{:?}", leader.ready().messages);
    leader.report_persisted(ready.number);
    leader.step(probed).unwrap();
    let shown = run(&mut leader);
    assert!(shown.iter().any(|message| message.to == 2 && !message.entries.is_empty()));
}

/// The member has a slow disk. It led a cluster of two, and is a follower again when it applies the
/// removal of the other member.
#[test]
fn an_only_voter_campaigns_only_after_its_log_is_durable() {
    let mut member = leader();
    member.propose_many(EntryKind::Normal, vec![Bytes::from_static(b"x")], 0).unwrap();
    let ready = member.ready();
    assert_eq!(ready.persist.entries.len(), 1);
    let term = member.status().term + 1;
    member.step(Message { term, ..Message::new(MessageKind::RequestVote, 2, 1) }).unwrap();
    (0..100).for_each(|_| member.tick());
    member.step(Message { term, ..Message::new(MessageKind::Heartbeat, 2, 1) }).unwrap();
    member.change_members(ConfChange::Remove(2));
    (0..100).for_each(|_| member.tick());
    member.campaign();
    assert_ne!(member.status().role, Role::Leader);
    member.report_persisted(ready.number);
    run(&mut member);
    (0..100).for_each(|_| member.tick());
    assert_eq!(member.status().role, Role::Leader);
}

/// The leader of a cluster of two removes itself. Only the leader knows that the entry is
/// committed, and the other member needs the leader's vote.
#[test]
fn a_removed_leader_stays_until_another_member_knows_of_the_removal() {
    let mut removed = leader();
    let (term, last) = (removed.status().term, removed.status().last);
    removed.change_members(ConfChange::Remove(1));
    assert_eq!((removed.status().role, removed.has_left()), (Role::Follower, false));
    run(&mut removed);
    (0..100).for_each(|_| removed.tick());
    assert!(!removed.has_ready(), "it asks nobody for a vote");

    let vote_request = Message {
        term: term + 1,
        log_term: term,
        index: last,
        ..message(MessageKind::RequestVote)
    };
    removed.step(vote_request).unwrap();
    let messages = run(&mut removed);
    assert!(messages.iter().any(|it| it.kind == MessageKind::RequestVoteResponse && !it.reject));
    let entry = Entry { index: last + 1, term: term + 1, ..Entry::default() };
    let append = message(MessageKind::Append);
    let append =
        Message { term: term + 1, log_term: term, index: last, entries: vec![entry], ..append };
    removed.step(append).unwrap();
    let messages = run(&mut removed);
    assert!(
        messages.iter().any(|it| it.kind == MessageKind::AppendResponse && it.index == last + 1)
    );
}

/// The leader of a cluster of two gets no answers and steps down. Only then does it apply its own
/// removal.
#[test]
fn a_leader_that_stepped_down_before_it_applied_its_removal_stays_too() {
    let mut removed = leader();
    let (term, last) = (removed.status().term, removed.status().last);
    (0..100).for_each(|_| removed.tick());
    assert_ne!(removed.status().role, Role::Leader);
    run(&mut removed);
    removed.change_members(ConfChange::Remove(1));
    assert!(!removed.has_left());
    let term = term + 1;
    let vote_request =
        Message { term, log_term: 1, index: last, ..message(MessageKind::RequestVote) };
    removed.step(vote_request).unwrap();
    let messages = run(&mut removed);
    assert!(messages.iter().any(|it| it.kind == MessageKind::RequestVoteResponse && !it.reject));
}

/// The leader of a cluster of two restarts after its own removal is committed, and before it has
/// applied that entry.
#[test]
fn a_leader_that_restarts_before_it_applied_its_removal_stays() {
    let members = Members { voters: vec![1, 2], learners: Vec::new() };
    let entry = |index| Entry { index, term: 1, ..Entry::default() };
    let mut initial = InitialState {
        members,
        hard_state: HardState { term: 1, vote: 1, commit: 2 },
        entries: vec![entry(1), entry(2)],
        ..InitialState::default()
    };
    (1..=2).for_each(|index| initial.terms.push(index, 1));
    let mut member = Consensus::new(&Config::new(1, 1, 7), &initial).unwrap();
    member.change_members(ConfChange::Remove(1));
    assert!(!member.has_left());
}

/// The leader of a cluster of two restarts after it has applied its own removal. It can't vote for
/// a candidate whose log is shorter than its own, and sends its commit index in the refusal.
#[test]
fn a_leader_that_restarts_after_it_applied_its_removal_stays() {
    let mut initial = InitialState {
        members: Members { voters: vec![2], learners: Vec::new() },
        hard_state: HardState { term: 1, vote: 1, commit: 2 },
        applied: Position { index: 2, term: 1 },
        entries: vec![Entry { index: 3, term: 1, ..Entry::default() }],
        ..InitialState::default()
    };
    (1..=3).for_each(|index| initial.terms.push(index, 1));
    let mut member = Consensus::new(&Config::new(1, 1, 7), &initial).unwrap();
    assert!(!member.has_left());
    (0..100).for_each(|_| member.tick());
    assert!(!member.has_ready(), "it asks nobody for a vote");
    let vote_request =
        Message { term: 2, log_term: 1, index: 2, ..message(MessageKind::RequestVote) };
    member.step(vote_request).unwrap();
    let messages = run(&mut member);
    let is_commit_answer = |it: &&Message| it.reject && (it.commit, it.commit_term) == (2, 1);
    assert_eq!(messages.iter().filter(is_commit_answer).count(), 1, "{messages:?}");
}

#[test]
fn a_removed_follower_leaves_at_once() {
    let mut member = leader();
    let (term, last) = (member.status().term + 1, member.status().last);
    let entries = vec![Entry { index: last + 1, term, ..Entry::default() }];
    let append = message(MessageKind::Append);
    let append = Message { term, log_term: 1, index: last, commit: last + 1, entries, ..append };
    member.step(append).unwrap();
    run(&mut member);
    assert!(!member.has_left());
    member.change_members(ConfChange::Remove(1));
    assert!(member.has_left());
}

/// Returns a follower, member 1 of three, that was sent a committed change of members, and the
/// change's index.
fn with_a_change() -> (Consensus, u64) {
    let members = Members { voters: vec![1, 2, 3], learners: Vec::new() };
    let initial = InitialState { members, ..InitialState::default() };
    let mut member = Consensus::new(&Config::new(1, 1, 7), &initial).unwrap();
    let entry = |index, kind, data| Entry { index, term: 1, kind, data };
    let change = Bytes::from_static(b"a learner");
    let entries =
        vec![entry(1, EntryKind::NoOp, Bytes::new()), entry(2, EntryKind::ConfChange, change)];
    member.step(Message { term: 1, commit: 2, entries, ..message(MessageKind::Append) }).unwrap();
    (member, 2)
}

/// Returns a follower that has stored a committed change of members and not applied it, and the
/// change's index.
fn behind_a_change() -> (Consensus, u64) {
    let (mut member, change) = with_a_change();
    while member.has_ready() {
        let number = member.ready().number;
        member.report_persisted(number);
    }
    assert_eq!(member.status().commit, change);
    (member, change)
}

/// A follower that has applied a change refuses the removed member, which then ends for good. So
/// the follower must not restart in a state where it needs that member.
#[test]
fn a_follower_applies_a_change_only_after_its_commit_index_is_durable() {
    let (mut member, change) = with_a_change();
    let mut known = 0;
    while member.has_ready() {
        let ready = member.ready();
        assert!(ready.committed.iter().all(|entry| entry.index <= known), "{ready:?}");
        if ready.persist.urgent {
            known = ready.persist.hard_state.map_or(known, |state| state.commit);
        }
        member.report_persisted(ready.number);
        if let Some(last) = ready.committed.last() {
            member.report_applied(last.index);
        }
    }
    assert_eq!((known, member.status().applied), (change, change));
}

/// A leader that transfers its leadership asks the target only once, and accepts no proposals until
/// it gives up. So the target must not forget the request.
#[test]
fn a_request_to_take_over_is_kept_until_the_committed_change_is_applied() {
    let (mut member, change) = behind_a_change();
    member.step(Message { term: 1, ..message(MessageKind::TimeoutNow) }).unwrap();
    assert_eq!(member.status().role, Role::Follower);
    member.report_applied(change - 1);
    assert_eq!(member.status().role, Role::Follower);
    member.change_members(ConfChange::Learner(4));
    member.report_applied(change);
    assert_eq!((member.status().role, member.status().term), (Role::Candidate, 2));
}

#[test]
fn a_request_to_take_over_expires_after_the_election_timeout() {
    let (mut member, change) = behind_a_change();
    member.step(Message { term: 1, ..message(MessageKind::TimeoutNow) }).unwrap();
    for _ in 0..=Config::new(1, 1, 7).election_ticks {
        member.tick();
        member.step(Message { term: 1, ..message(MessageKind::Heartbeat) }).unwrap();
    }
    member.change_members(ConfChange::Learner(4));
    member.report_applied(change);
    assert_eq!(member.status().role, Role::Follower);
}

/// Returns a message from member 2 to member 1.
fn message(kind: MessageKind) -> Message {
    Message::new(kind, 2, 1)
}
