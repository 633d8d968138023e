//! Transcripts of S1 to S7, of the journal's order, and of the restart table.

mod edges;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::agent::{
    Action, Agent, Decision, Directory, Event, From, Journal, Listing, Offer, Output, ProbeAnswer,
    Shown, Start, at_start, classify, patience,
};
use crate::fixtures::{
    hash_of, key, machine, plain_record, proposal, record, seconds, statement, variant,
};
use crate::rules::Rules;
use crate::service::{EPOCH_DISTANCE, EPOCH_MAX, Phase, RefusalCode, Settings};
use crate::values::{Document, Hash, Incarnation, Millis, Permissions, Record};

const RULES: Rules = Rules::ALL;

fn joined(host: u8) -> Agent {
    let mut agent =
        Agent::new(Journal::new(key(host), Incarnation(u128::from(host)), machine(host)), 1);
    let output = agent.step(&RULES, Event::RecordReady(record(host)));
    assert!(output.durable.is_some(), "the record is durable before it is sent");
    agent
}

fn offer(epoch: u64, hosts: &[u8]) -> Offer {
    let proposal = proposal(epoch, hosts);
    Offer {
        h: hash_of(&proposal),
        proposal,
        permissions: Permissions::default(),
        statement: statement(3).hash,
        size: u8::try_from(hosts.len()).expect("a short list"),
        invalid: BTreeMap::new(),
        skew: Millis(0),
        is_behind: false,
        directory: Directory::Blank,
        machine: machine(hosts[0]),
    }
}

fn offered(agent: &mut Agent, offer: Offer) -> Output {
    agent.step(&RULES, Event::Offered(Box::new(offer)))
}

fn reach(agent: &mut Agent, epoch: u64, host: u8) -> Output {
    let answer =
        ProbeAnswer { key: key(host), incarnation: Incarnation(u128::from(host)), released: 0 };
    agent.step(&RULES, Event::Probed { epoch, peer: key(host), result: Ok(answer) })
}

fn shown(epoch: u64) -> Event {
    Event::Shown(Shown { phase: Phase::Open, epoch, show_document: false })
}

/// Returns the agent of host 1 after it has signed the list {1, 2, 3} at epoch 1.
fn signed() -> Agent {
    let mut agent = joined(1);
    let _ = offered(&mut agent, offer(1, &[1, 2, 3]));
    let _ = reach(&mut agent, 1, 2);
    let output = reach(&mut agent, 1, 3);
    assert!(matches!(output.then[..], [Action::SignAck { epoch: 1, .. }]));
    agent
}

fn document(epoch: u64, hosts: &[u8]) -> Arc<Document> {
    let proposal = proposal(epoch, hosts);
    Arc::new(Document { h: hash_of(&proposal), proposal, text: Arc::from("document") })
}

fn show_document(agent: &mut Agent, document: Arc<Document>) -> Output {
    agent.step(&RULES, Event::DocumentShown { document, machine: machine(1) })
}

fn nacked(output: &Output) -> Option<String> {
    output.then.iter().find_map(|action| match action {
        Action::Nack { reason, .. } => Some(variant(reason)),
        _ => None,
    })
}

#[test]
fn it_signs_once_the_matrix_is_green_and_is_bound_before() {
    let mut agent = joined(1);
    let output = offered(&mut agent, offer(1, &[1, 2, 3]));
    assert!(matches!(&output.then[..], [Action::Probe { targets, .. }] if targets.len() == 2));
    assert_eq!(reach(&mut agent, 1, 2), Output::default());
    let output = reach(&mut agent, 1, 3);
    let durable = output.durable.expect("bound before the ack is shown");
    assert_eq!(durable.bound[&1].h, hash_of(&proposal(1, &[1, 2, 3])));
    assert!(matches!(output.then[..], [Action::SignAck { epoch: 1, .. }]));
}

#[test]
fn a_peer_out_of_reach_goes_into_the_matrix_not_into_a_nack() {
    let mut agent = joined(1);
    let _ = offered(&mut agent, offer(1, &[1, 2, 3]));
    let _ = reach(&mut agent, 1, 2);
    let failed = Event::Probed { epoch: 1, peer: key(3), result: Err("timed out".to_owned()) };
    let output = agent.step(&RULES, failed);
    assert!(matches!(&output.then[..], [Action::SendRow { row, .. }] if row.len() == 2));
    assert!(matches!(reach(&mut agent, 1, 3).then[..], [Action::SignAck { .. }]), "tried again");
}

#[test]
fn another_agent_at_the_address_is_no_answer() {
    let mut agent = joined(1);
    let _ = offered(&mut agent, offer(1, &[1, 2]));
    let answer = ProbeAnswer { key: key(2), incarnation: Incarnation(99), released: 0 };
    let output = agent.step(&RULES, Event::Probed { epoch: 1, peer: key(2), result: Ok(answer) });
    assert!(matches!(output.then[..], [Action::SendRow { .. }]));
}

#[test]
fn no_service_carries_an_agent_to_where_epochs_end() {
    for far in [EPOCH_DISTANCE + 1, EPOCH_MAX, u64::MAX - 1, u64::MAX] {
        let mut agent = joined(1);
        assert_eq!(agent.step(&RULES, shown(far)), Output::default(), "{far}");
        let output = offered(&mut agent, offer(far, &[1, 2, 3]));
        assert_eq!(nacked(&output).as_deref(), Some("EpochTooFar"), "{far}");
        assert!(output.durable.is_none(), "{far}");
        assert_eq!(agent.journal.highest_epoch(), 0);
    }
    let mut agent = joined(1);
    let output = agent.step(&RULES, shown(EPOCH_DISTANCE));
    assert_eq!(output.durable.map(|journal| journal.released), Some(EPOCH_DISTANCE - 1));
    // However far the agent has come, its limit never passes the highest epoch.
    agent.journal.released = EPOCH_MAX - 1;
    assert_eq!(agent.step(&RULES, shown(EPOCH_MAX + 1)), Output::default());
}

#[test]
fn each_check_refuses_with_its_own_reason() {
    type Change = fn(&mut Offer);
    let changes: [(Change, &str); 9] = [
        (
            |offer| drop(offer.invalid.insert(2, "its token is another cluster's".into())),
            "InvalidRecord",
        ),
        (|offer| offer.proposal.records[0] = other_record(1, 42), "NotMyRecord"),
        (|offer| offer.statement = Hash([9; 32]), "ForeignList"),
        (|offer| offer.proposal.records[2] = named_like(3, 2), "Duplicate"),
        (|offer| offer.skew = Millis(30_001), "Skew"),
        (|offer| offer.directory = Directory::Foreign("data".into()), "NotBlank"),
        (|offer| offer.directory = Directory::Log(None), "NotBlank"),
        (|offer| offer.machine = machine(9), "OtherMachine"),
        (|offer| offer.proposal.records[1] = at_loopback(2), "Unfit"),
    ];
    for (change, code) in changes {
        let mut agent = joined(1);
        let mut offer = offer(1, &[1, 2, 3]);
        change(&mut offer);
        let output = offered(&mut agent, offer);
        assert_eq!(nacked(&output).as_deref(), Some(code));
        assert!(agent.journal.bound.is_empty(), "{code}: nothing is signed");
    }
}

fn other_record(host: u8, hash: u8) -> Arc<Record> {
    Arc::new(Record { hash: Hash([hash; 32]), ..plain_record(host) })
}

fn named_like(host: u8, other: u8) -> Arc<Record> {
    Arc::new(Record { name: plain_record(other).name, ..plain_record(host) })
}

fn at_loopback(host: u8) -> Arc<Record> {
    Arc::new(Record { peer_urls: vec!["https://[::1]:2380".into()], ..plain_record(host) })
}

#[test]
fn s5_no_second_list_in_an_epoch_and_none_below_a_released_one() {
    let mut agent = signed();
    assert_eq!(nacked(&offered(&mut agent, offer(1, &[1, 2, 4]))).as_deref(), Some("OldEpoch"));
    let mut agent = joined(1);
    let output = agent.step(&RULES, shown(3));
    assert_eq!(output.then, [Action::SignRelease { epoch: 2 }]);
    assert_eq!(output.durable.map(|journal| journal.released), Some(2));
    assert_eq!(nacked(&offered(&mut agent, offer(2, &[1, 2, 3]))).as_deref(), Some("OldEpoch"));
}

#[test]
fn s5_the_same_list_is_signed_again() {
    let mut agent = signed();
    let mut again = Agent::new(agent.journal.clone().rebooted(), 2);
    let output = offered(&mut again, offer(1, &[1, 2, 3]));
    assert!(matches!(output.then[..], [Action::SignAck { epoch: 1, .. }]));
    let _ = agent.step(&RULES, shown(2));
    assert_eq!(
        nacked(&offered(&mut agent, offer(1, &[1, 2, 3]))).as_deref(),
        Some("OldEpoch"),
        "released"
    );
}

#[test]
fn s6_a_second_list_waits_for_the_releases_of_the_first() {
    let mut agent = signed();
    let output = offered(&mut agent, offer(2, &[1, 4, 5]));
    assert_eq!(output.then[0], Action::SignRelease { epoch: 1 });
    let Some(Action::Probe { targets, .. }) = output.then.get(1) else { panic!("{output:?}") };
    let asked: Vec<bool> = targets.iter().map(|target| target.in_proposal).collect();
    assert_eq!(asked, [false, false, true, true], "members of the first list are asked as well");
    let _ = reach(&mut agent, 2, 4);
    let row = reach(&mut agent, 2, 5);
    assert!(matches!(row.then[..], [Action::SendRow { .. }]), "green, but not released");
    assert_eq!(
        agent.waits_for(&RULES).expect("it waits").to_string(),
        "S6: of the 2 releases that end the list of epoch 1, which I signed, 1 are here; missing: \
         02020202 at 10.0.0.2:2380, 03030303 at 10.0.0.3:2380. Start the agents there again or, if \
         they are gone for good, run `muster-agent reset` on this host"
    );
    let output = agent.step(&RULES, Event::ReleaseSeen { key: key(2), epoch: 1 });
    assert!(matches!(output.then[..], [Action::SignAck { epoch: 2, .. }]));
    assert_eq!(agent.waits_for(&RULES), None);
}

#[test]
fn s6_a_lower_release_takes_nothing_back() {
    let mut agent = signed();
    let _ = agent.step(&RULES, Event::ReleaseSeen { key: key(2), epoch: 1 });
    let _ = agent.step(&RULES, Event::ReleaseSeen { key: key(3), epoch: 5 });
    let _ = agent.step(&RULES, Event::ReleaseSeen { key: key(3), epoch: 0 });
    let _ = offered(&mut agent, offer(2, &[1, 4, 5]));
    let _ = reach(&mut agent, 2, 4);
    let output = reach(&mut agent, 2, 5);
    assert!(matches!(output.then[..], [Action::SignAck { epoch: 2, .. }]), "{output:?}");
    // Host 4 and the list of epoch 2: its older release of epoch 1 must not lower its newer one.
    let _ = agent.step(&RULES, Event::ReleaseSeen { key: key(4), epoch: 2 });
    let _ = agent.step(&RULES, Event::ReleaseSeen { key: key(4), epoch: 1 });
    let _ = offered(&mut agent, offer(3, &[1, 6, 7]));
    let _ = reach(&mut agent, 3, 6);
    let output = reach(&mut agent, 3, 7);
    assert!(matches!(output.then[..], [Action::SignAck { epoch: 3, .. }]), "{output:?}");
}

#[test]
fn s6_patience_ends_in_a_refusal_that_names_who_is_missing() {
    let mut agent = signed();
    let _ = offered(&mut agent, offer(2, &[1, 4, 5]));
    let output = agent.step(&RULES, Event::Impatient { epoch: 2 });
    assert_eq!(nacked(&output).as_deref(), Some("Unreleased"));
    assert_eq!(agent.step(&RULES, Event::Impatient { epoch: 2 }), Output::default(), "said once");
    assert_eq!(patience(Settings::DEFAULT.prepare), seconds(30), "before the list is given up");
}

#[test]
fn whoever_holds_a_document_releases_nothing_and_signs_nothing() {
    let mut agent = signed();
    let output = show_document(&mut agent, document(1, &[1, 2, 3]));
    assert!(output.durable.is_some_and(|journal| journal.held.is_some()));
    assert_eq!(output.then, [Action::LookAtDirectory]);
    assert_eq!(agent.step(&RULES, shown(5)), Output::default());
    assert_eq!(nacked(&offered(&mut agent, offer(2, &[1, 4, 5]))).as_deref(), Some("Holding"));
}

#[test]
fn a_document_is_refused_if_it_was_released_unsigned_foreign_or_the_second() {
    let mut released = signed();
    let _ = released.step(&RULES, shown(2));
    let mut unsigned = joined(1);
    let mut foreign = signed();
    for (agent, list) in
        [(&mut released, [1, 2, 3]), (&mut unsigned, [1, 2, 3]), (&mut foreign, [2, 3, 4])]
    {
        let output = show_document(agent, document(1, &list));
        assert!(matches!(output.then[..], [Action::ReplacementWanted { .. }]), "{output:?}");
        assert!(agent.journal.held.is_none());
    }
    let mut holder = signed();
    let _ = show_document(&mut holder, document(1, &[1, 2, 3]));
    let output = show_document(&mut holder, document(2, &[1, 4, 5]));
    assert_eq!(output.then, [Action::ShowDocument { h: document(1, &[1, 2, 3]).h }]);
}

#[test]
fn the_first_start_is_marker_then_launching_then_exec_then_ran() {
    let mut agent = signed();
    let _ = show_document(&mut agent, document(1, &[1, 2, 3]));
    let look = agent.step(&RULES, Event::Looked(Directory::Blank));
    assert_eq!(look.then, [Action::WriteMarker { incarnation: Incarnation(1) }]);
    assert!(look.durable.is_none());
    let launch = agent.step(&RULES, Event::MarkerWritten);
    assert_eq!(launch.durable.map(|journal| journal.start), Some(Start::Launching));
    assert_eq!(launch.then, [Action::Launch(From::List)]);
    assert!(!agent.listens(), "the port is the node's now");
    let ran = agent.step(&RULES, Event::LogSeen);
    assert_eq!(ran.durable.map(|journal| journal.start), Some(Start::Ran));
}

#[test]
fn nothing_starts_over_another_incarnations_marker() {
    let strange = [Directory::Marked(Incarnation(2)), Directory::Log(Some(Incarnation(1)))];
    for directory in strange {
        let mut agent = signed();
        let _ = show_document(&mut agent, document(1, &[1, 2, 3]));
        let output = agent.step(&RULES, Event::Looked(directory));
        assert!(matches!(output.then[..], [Action::Stop { exit: 1, .. }]), "{output:?}");
        assert_eq!((output.durable, agent.journal.start), (None, Start::NotYet));
    }
    let mut agent = signed();
    let _ = show_document(&mut agent, document(1, &[1, 2, 3]));
    let output = agent.step(&RULES, Event::Looked(Directory::Marked(Incarnation(1))));
    assert_eq!(output.then, [Action::Launch(From::List)], "it wrote that one itself");
}

#[test]
fn a_journal_that_no_agent_can_have_is_known_as_broken() {
    type Change = fn(&mut Journal);
    let held: Change = |journal| journal.held = Some(document(1, &[1, 2, 3]));
    let changes: [(Change, Option<&str>); 8] = [
        (held, None),
        (
            |j| j.held = Some(document(1, &[1, 2, 4])),
            Some("a document is held that was not signed"),
        ),
        (|j| j.start = Start::Launching, Some("a node was launched from nothing")),
        (|j| (j.start, j.admitted) = (Start::Launching, true), None),
        (
            |j| (j.held, j.admitted) = (Some(document(1, &[1, 2, 3])), true),
            Some("it began with the cluster, and came later"),
        ),
        (|j| j.record = None, Some("a list was signed without a record")),
        (|j| j.boot = 0, Some("it was shown before the first start was counted")),
        (
            |j| (j.held, j.released) = (Some(document(1, &[1, 2, 3])), 1),
            Some("a document is held that was released"),
        ),
    ];
    for (change, broken) in changes {
        let mut journal = signed().journal;
        change(&mut journal);
        assert_eq!(journal.broken(&RULES), broken);
    }
}

#[test]
fn each_start_has_a_higher_boot_counter_than_the_last() {
    let journal = signed().journal;
    let next = journal.clone().rebooted();
    assert_eq!((journal.boot, next.boot), (1, 2));
    assert_eq!(Agent::new(next, 9).session.boot, 2);
}

#[test]
fn only_those_in_its_lists_get_an_answer_to_a_probe() {
    let mut agent = joined(1);
    assert_eq!(agent.answer_probe(key(2)), None);
    let _ = offered(&mut agent, offer(1, &[1, 2, 3]));
    assert!(agent.answer_probe(key(2)).is_some());
    assert_eq!(agent.answer_probe(key(4)), None);
    let later = Agent::new(signed().journal.rebooted(), 2);
    assert!(later.answer_probe(key(3)).is_some(), "in a list that it signed");
}

#[test]
fn refusals_stop_it_for_good_only_where_waiting_can_not_help() {
    let refused = |code, retryable| Event::Refused { code, retryable };
    let exit = |code: Option<RefusalCode>, retryable| {
        let output = joined(1).step(&RULES, refused(code, retryable));
        output.then.iter().find_map(|action| match action {
            Action::Stop { exit, .. } => Some(*exit),
            _ => None,
        })
    };
    assert_eq!(exit(Some(RefusalCode::BootClosed), false), Some(3));
    assert_eq!(exit(Some(RefusalCode::Abandoned), false), Some(3));
    assert_eq!(exit(Some(RefusalCode::KeyElsewhere), false), Some(3));
    assert_eq!(exit(Some(RefusalCode::GrantExpired), false), Some(3));
    assert_eq!(exit(Some(RefusalCode::RecordRefused), false), Some(3));
    assert_eq!(exit(None, false), Some(1));
    assert_eq!(exit(Some(RefusalCode::Conflict), true), None);
    let again = joined(1).step(&RULES, refused(Some(RefusalCode::UnknownKey), true));
    assert_eq!(again.then, [Action::Redeem]);
}

#[test]
fn the_record_is_not_changed_while_an_old_list_may_still_commit() {
    let mut agent = signed();
    let _ = agent.step(&RULES, Event::RecordReady(other_record(1, 42)));
    assert_eq!(agent.journal.record.as_ref().map(|record| record.hash), Some(Hash([1; 32])));
    let _ = agent.step(&RULES, shown(2));
    let _ = agent.step(&RULES, Event::RecordReady(other_record(1, 42)));
    assert_eq!(agent.journal.record.as_ref().map(|record| record.hash), Some(Hash([42; 32])));
}

#[test]
fn the_restart_table() {
    let own = Incarnation(1);
    let other = Incarnation(2);
    let at = |held: bool, start: Start| {
        let mut journal = signed().journal;
        journal.held = held.then(|| document(1, &[1, 2, 3]));
        journal.start = start;
        journal
    };
    let before = at(false, Start::NotYet);
    let held = at(true, Start::NotYet);
    let launching = at(true, Start::Launching);
    let ran = at(true, Start::Ran);
    let rows = [
        (&before, Directory::Blank, "go on"),
        (&before, Directory::Marked(own), "refuse"),
        (&before, Directory::Log(Some(own)), "refuse"),
        (&held, Directory::Blank, "launch"),
        (&held, Directory::Marked(own), "launch"),
        (&held, Directory::Marked(other), "refuse"),
        (&held, Directory::Log(Some(own)), "refuse"),
        (&held, Directory::Foreign("data".into()), "refuse"),
        (&launching, Directory::Marked(own), "list"),
        (&launching, Directory::Log(Some(own)), "log"),
        (&launching, Directory::Blank, "replacement"),
        (&launching, Directory::Log(None), "replacement"),
        (&launching, Directory::Log(Some(other)), "refuse"),
        (&ran, Directory::Log(Some(own)), "log"),
        (&ran, Directory::Marked(own), "replacement"),
        (&ran, Directory::Blank, "replacement"),
        (&ran, Directory::Tombstone, "removed"),
    ];
    for (journal, directory, expected) in rows {
        let decision = at_start(&RULES, Some(journal), &machine(1), &directory);
        let name = match decision {
            Decision::GoOn => "go on",
            Decision::GoOnToLaunch => "launch",
            Decision::Start(From::List) => "list",
            Decision::Start(From::Log) => "log",
            Decision::ReplacementWanted { .. } => "replacement",
            Decision::Refuse { .. } => "refuse",
            Decision::Removed => "removed",
            Decision::BeginNew | Decision::SetAsideAndBeginNew => "new",
        };
        assert_eq!(name, expected, "{:?} and {directory}", journal.start);
    }
}

#[test]
fn a_journal_from_another_machine_is_put_aside_unless_a_log_lies_there() {
    let journal = signed().journal;
    let elsewhere = |directory| at_start(&RULES, Some(&journal), &machine(9), &directory);
    assert_eq!(elsewhere(Directory::Blank), Decision::SetAsideAndBeginNew);
    assert!(matches!(elsewhere(Directory::Log(None)), Decision::Refuse { .. }));
    assert_eq!(at_start(&RULES, None, &machine(9), &Directory::Blank), Decision::BeginNew);
    let log = Directory::Log(Some(Incarnation(1)));
    assert!(matches!(at_start(&RULES, None, &machine(9), &log), Decision::Refuse { .. }));
}

#[test]
fn a_directory_is_blank_if_nothing_or_only_lost_and_found_is_in_it() {
    let listing = |entries: &[&str], marker, log| Listing {
        entries: entries.iter().map(|&entry| entry.to_owned()).collect(),
        marker,
        log,
    };
    let own = Some(Incarnation(1));
    let rows = [
        (listing(&[], None, false), Directory::Blank),
        (listing(&["lost+found"], None, false), Directory::Blank),
        (listing(&["lost+found", "x"], None, false), Directory::Foreign("x".into())),
        (listing(&["muster-incarnation"], own, false), Directory::Marked(Incarnation(1))),
        (listing(&["muster-incarnation", "member"], own, false), Directory::Marked(Incarnation(1))),
        (listing(&["muster-incarnation", "member"], own, true), Directory::Log(own)),
        (listing(&["member"], None, true), Directory::Log(None)),
        (listing(&["member"], None, false), Directory::Foreign("member".into())),
        (listing(&["muster-tombstone.json", "member"], own, true), Directory::Tombstone),
    ];
    for (listing, expected) in rows {
        assert_eq!(classify(&RULES, &listing), expected, "{:?}", listing.entries);
    }
}

#[test]
fn a_newcomer_that_the_cluster_has_added_launches_by_that_alone() {
    let mut agent = joined(1);
    let output = agent.step(&RULES, Event::Looked(Directory::Blank));
    assert_eq!(output, Output::default(), "nobody has added it");
    let output = agent.step(&RULES, Event::Admitted);
    assert!(output.durable.is_some_and(|journal| journal.admitted));
    assert_eq!(output.then, [Action::LookAtDirectory]);
    // The same event again, after a crash, changes nothing.
    assert_eq!(agent.step(&RULES, Event::Admitted).durable, None);
    let output = agent.step(&RULES, Event::Looked(Directory::Blank));
    assert_eq!(output.then, [Action::WriteMarker { incarnation: Incarnation(1) }]);
    let output = agent.step(&RULES, Event::MarkerWritten);
    let durable = output.durable.expect("launching is durable before the node is executed");
    assert_eq!((durable.start, output.then), (Start::Launching, vec![Action::Launch(From::List)]));
    assert!(!agent.journal.may_change_record());
}

#[test]
fn a_newcomers_restarts_follow_the_same_table() {
    let mut journal = joined(1).journal;
    let decide = |journal: &Journal, directory: Directory| {
        at_start(&RULES, Some(journal), &machine(1), &directory)
    };
    assert_eq!(decide(&journal, Directory::Blank), Decision::GoOn);
    journal.admitted = true;
    assert_eq!(decide(&journal, Directory::Blank), Decision::GoOnToLaunch);
    let own = Incarnation(1);
    assert_eq!(decide(&journal, Directory::Marked(own)), Decision::GoOnToLaunch);
    assert!(matches!(decide(&journal, Directory::Log(Some(own))), Decision::Refuse { .. }));
    journal.start = Start::Launching;
    assert_eq!(decide(&journal, Directory::Marked(own)), Decision::Start(From::List));
    journal.start = Start::Ran;
    let lost = decide(&journal, Directory::Blank);
    assert!(matches!(lost, Decision::ReplacementWanted { .. }), "a wiped host: {lost:?}");
}

#[test]
fn whoever_came_later_holds_no_document() {
    let mut agent = signed();
    let _ = agent.step(&RULES, Event::Admitted);
    let output = show_document(&mut agent, document(1, &[1, 2, 3]));
    assert!(output.durable.is_none());
    assert!(matches!(output.then[..], [Action::ReplacementWanted { .. }]), "{output:?}");
    let mut agent = signed();
    let _ = show_document(&mut agent, document(1, &[1, 2, 3]));
    assert_eq!(agent.step(&RULES, Event::Admitted), Output::default());
}
