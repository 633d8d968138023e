//! Transcripts of the signing rules S1 to S7 (`sign.rs`), of the journal's order, and of the
//! restart table.

mod edges;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::agent::{
    Agent, AgentAction, AgentEvent, AgentOutput, ClusterStatus, DirectoryKind, DirectoryListing,
    ExaminedProposal, Journal, LaunchState, ProbeAnswer, StartDecision, StartSource, classify,
    decide_at_start, release_wait_limit,
};
use crate::fixtures::{
    hash_of, key, machine, plain_record, proposal, record, seconds, statement, variant,
};
use crate::rules::Rules;
use crate::service::{FormationSettings, MAX_EPOCH, MAX_EPOCH_DISTANCE, Phase, RefusalCode};
use crate::values::{AgentRecord, CommitDocument, Hash, Incarnation, Millis, Permissions};

const RULES: Rules = Rules::ALL;

fn joined(host: u8) -> Agent {
    let mut agent =
        Agent::new(Journal::new(key(host), Incarnation(u128::from(host)), machine(host)), 1);
    let output = agent.step(&RULES, AgentEvent::RecordReady(record(host)));
    assert!(output.journal.is_some(), "the record is durable before it is sent");
    agent
}

fn offer(epoch: u64, hosts: &[u8]) -> ExaminedProposal {
    let proposal = proposal(epoch, hosts);
    ExaminedProposal {
        proposal_hash: hash_of(&proposal),
        proposal,
        permissions: Permissions::default(),
        spreads_zones: false,
        statement: statement(3).hash,
        size: u8::try_from(hosts.len()).expect("a short list"),
        invalid_records: BTreeMap::new(),
        skew: Millis(0),
        is_behind: false,
        directory: DirectoryKind::Blank,
        machine: machine(hosts[0]),
    }
}

fn offered(agent: &mut Agent, offer: ExaminedProposal) -> AgentOutput {
    agent.step(&RULES, AgentEvent::ProposalReceived(Box::new(offer)))
}

fn reach(agent: &mut Agent, epoch: u64, host: u8) -> AgentOutput {
    let answer = ProbeAnswer {
        key: key(host),
        incarnation: Incarnation(u128::from(host)),
        released_epoch: 0,
    };
    agent.step(&RULES, AgentEvent::ProbeEnded { epoch, peer: key(host), result: Ok(answer) })
}

fn shown(epoch: u64) -> AgentEvent {
    AgentEvent::StatusReceived(ClusterStatus { phase: Phase::Open, epoch, wants_document: false })
}

/// Returns the agent of host 1 after it has signed the list {1, 2, 3} at epoch 1.
fn signed() -> Agent {
    let mut agent = joined(1);
    let _ = offered(&mut agent, offer(1, &[1, 2, 3]));
    let _ = reach(&mut agent, 1, 2);
    let output = reach(&mut agent, 1, 3);
    assert!(matches!(output.actions[..], [AgentAction::SignAck { epoch: 1, .. }]));
    agent
}

fn document(epoch: u64, hosts: &[u8]) -> Arc<CommitDocument> {
    let proposal = proposal(epoch, hosts);
    Arc::new(CommitDocument {
        proposal_hash: hash_of(&proposal),
        proposal,
        text: Arc::from("document"),
    })
}

fn show_document(agent: &mut Agent, document: Arc<CommitDocument>) -> AgentOutput {
    agent.step(&RULES, AgentEvent::DocumentReceived { document, machine: machine(1) })
}

fn nacked(output: &AgentOutput) -> Option<String> {
    output.actions.iter().find_map(|action| match action {
        AgentAction::Nack { reason, .. } => Some(variant(reason)),
        _ => None,
    })
}

#[test]
fn an_agent_journals_the_list_and_signs_once_all_probes_succeed() {
    let mut agent = joined(1);
    let output = offered(&mut agent, offer(1, &[1, 2, 3]));
    assert!(
        matches!(&output.actions[..], [AgentAction::Probe { targets, .. }] if targets.len() == 2)
    );
    assert_eq!(reach(&mut agent, 1, 2), AgentOutput::default());
    let output = reach(&mut agent, 1, 3);
    let durable = output.journal.expect("bound before the ack is shown");
    assert_eq!(durable.signed_lists[&1].proposal_hash, hash_of(&proposal(1, &[1, 2, 3])));
    assert!(matches!(output.actions[..], [AgentAction::SignAck { epoch: 1, .. }]));
}

#[test]
fn an_unreachable_peer_is_reported_in_the_matrix_and_not_by_a_nack() {
    let mut agent = joined(1);
    let _ = offered(&mut agent, offer(1, &[1, 2, 3]));
    let _ = reach(&mut agent, 1, 2);
    let failed =
        AgentEvent::ProbeEnded { epoch: 1, peer: key(3), result: Err("timed out".to_owned()) };
    let output = agent.step(&RULES, failed);
    assert!(
        matches!(&output.actions[..], [AgentAction::SendProbeResults { row, .. }] if row.len() == 2)
    );
    assert!(
        matches!(reach(&mut agent, 1, 3).actions[..], [AgentAction::SignAck { .. }]),
        "tried again"
    );
}

#[test]
fn an_answer_by_another_incarnation_is_a_failed_probe() {
    let mut agent = joined(1);
    let _ = offered(&mut agent, offer(1, &[1, 2]));
    let answer = ProbeAnswer { key: key(2), incarnation: Incarnation(99), released_epoch: 0 };
    let output =
        agent.step(&RULES, AgentEvent::ProbeEnded { epoch: 1, peer: key(2), result: Ok(answer) });
    assert!(matches!(output.actions[..], [AgentAction::SendProbeResults { .. }]));
}

#[test]
fn an_agent_neither_releases_nor_signs_an_epoch_above_its_limit() {
    for far in [MAX_EPOCH_DISTANCE + 1, MAX_EPOCH, u64::MAX - 1, u64::MAX] {
        let mut agent = joined(1);
        assert_eq!(agent.step(&RULES, shown(far)), AgentOutput::default(), "{far}");
        let output = offered(&mut agent, offer(far, &[1, 2, 3]));
        assert_eq!(nacked(&output).as_deref(), Some("EpochTooFar"), "{far}");
        assert!(output.journal.is_none(), "{far}");
        assert_eq!(agent.journal.highest_epoch(), 0);
    }
    let mut agent = joined(1);
    let output = agent.step(&RULES, shown(MAX_EPOCH_DISTANCE));
    assert_eq!(output.journal.map(|journal| journal.released_epoch), Some(MAX_EPOCH_DISTANCE - 1));
    // The agent's epoch limit never exceeds `MAX_EPOCH`, even if it has released almost every
    // epoch.
    agent.journal.released_epoch = MAX_EPOCH - 1;
    assert_eq!(agent.step(&RULES, shown(MAX_EPOCH + 1)), AgentOutput::default());
}

#[test]
fn a_list_whose_members_are_spread_over_zones_is_signed() {
    let mut agent = joined(1);
    let mut offer = offer(1, &[1, 2, 3]);
    offer.spreads_zones = true;
    for (host, zone) in [(1, "a"), (2, "b"), (3, "c")] {
        offer.proposal.records[usize::from(host) - 1] = in_zone(host, zone);
    }
    let output = offered(&mut agent, offer);
    assert_eq!(nacked(&output), None);
}

#[test]
fn each_signing_check_refuses_with_its_own_reason() {
    type Change = fn(&mut ExaminedProposal);
    let changes: [(Change, &str); 11] = [
        (
            |offer| drop(offer.invalid_records.insert(2, "its token is another cluster's".into())),
            "InvalidRecord",
        ),
        (|offer| offer.proposal.records[0] = other_record(1, 42), "NotMyRecord"),
        (|offer| offer.statement = Hash([9; 32]), "ForeignList"),
        (|offer| offer.proposal.records[2] = named_like(3, 2), "Duplicate"),
        (|offer| offer.skew = Millis(30_001), "Skew"),
        (|offer| offer.directory = DirectoryKind::Foreign("data".into()), "NotBlank"),
        (|offer| offer.directory = DirectoryKind::Log(None), "NotBlank"),
        (|offer| offer.machine = machine(9), "OtherMachine"),
        (|offer| offer.proposal.records[1] = at_loopback(2), "Unfit"),
        (|offer| offer.spreads_zones = true, "Zone"),
        (
            |offer| {
                offer.spreads_zones = true;
                for (host, zone) in [(1, "b"), (2, "a"), (3, "a")] {
                    offer.proposal.records[usize::from(host) - 1] = in_zone(host, zone);
                }
            },
            "Zone",
        ),
    ];
    for (change, code) in changes {
        let mut agent = joined(1);
        let mut offer = offer(1, &[1, 2, 3]);
        change(&mut offer);
        let output = offered(&mut agent, offer);
        assert_eq!(nacked(&output).as_deref(), Some(code));
        assert!(agent.journal.signed_lists.is_empty(), "{code}: nothing is signed");
    }
}

fn other_record(host: u8, hash: u8) -> Arc<AgentRecord> {
    Arc::new(AgentRecord { hash: Hash([hash; 32]), ..plain_record(host) })
}

fn in_zone(host: u8, zone: &str) -> Arc<AgentRecord> {
    Arc::new(AgentRecord { zone: Some(zone.to_owned()), ..plain_record(host) })
}

fn named_like(host: u8, other: u8) -> Arc<AgentRecord> {
    Arc::new(AgentRecord { name: plain_record(other).name, ..plain_record(host) })
}

fn at_loopback(host: u8) -> Arc<AgentRecord> {
    Arc::new(AgentRecord { peer_urls: vec!["https://[::1]:2380".into()], ..plain_record(host) })
}

#[test]
fn rule_s5_refuses_a_second_list_in_an_epoch_and_any_list_of_a_released_epoch() {
    let mut agent = signed();
    assert_eq!(nacked(&offered(&mut agent, offer(1, &[1, 2, 4]))).as_deref(), Some("OldEpoch"));
    let mut agent = joined(1);
    let output = agent.step(&RULES, shown(3));
    assert_eq!(output.actions, [AgentAction::SignRelease { epoch: 2 }]);
    assert_eq!(output.journal.map(|journal| journal.released_epoch), Some(2));
    assert_eq!(nacked(&offered(&mut agent, offer(2, &[1, 2, 3]))).as_deref(), Some("OldEpoch"));
}

#[test]
fn rule_s5_signs_the_same_list_again_until_it_is_released() {
    let mut agent = signed();
    let mut again = Agent::new(agent.journal.clone().with_next_boot(), 2);
    let output = offered(&mut again, offer(1, &[1, 2, 3]));
    assert!(matches!(output.actions[..], [AgentAction::SignAck { epoch: 1, .. }]));
    let _ = agent.step(&RULES, shown(2));
    assert_eq!(
        nacked(&offered(&mut agent, offer(1, &[1, 2, 3]))).as_deref(),
        Some("OldEpoch"),
        "released"
    );
}

#[test]
fn rule_s6_a_second_list_waits_for_the_releases_of_the_first() {
    let mut agent = signed();
    let output = offered(&mut agent, offer(2, &[1, 4, 5]));
    assert_eq!(output.actions[0], AgentAction::SignRelease { epoch: 1 });
    let Some(AgentAction::Probe { targets, .. }) = output.actions.get(1) else {
        panic!("{output:?}")
    };
    let asked: Vec<bool> = targets.iter().map(|target| target.is_in_proposal).collect();
    assert_eq!(asked, [false, false, true, true], "members of the first list are asked as well");
    let _ = reach(&mut agent, 2, 4);
    let row = reach(&mut agent, 2, 5);
    assert!(
        matches!(row.actions[..], [AgentAction::SendProbeResults { .. }]),
        "green, but not released"
    );
    assert_eq!(
        agent.unmet_release_condition(&RULES).expect("it waits").to_string(),
        "S6: of the 2 releases that end the list of epoch 1, which I signed, 1 are here; missing: \
         02020202 at 10.0.0.2:2380, 03030303 at 10.0.0.3:2380. Start the agents there again or, if \
         they are gone for good, run `muster-agent reset` on this host"
    );
    let output = agent.step(&RULES, AgentEvent::ReleaseSeen { key: key(2), epoch: 1 });
    assert!(matches!(output.actions[..], [AgentAction::SignAck { epoch: 2, .. }]));
    assert_eq!(agent.unmet_release_condition(&RULES), None);
}

#[test]
fn rule_s6_a_lower_release_does_not_replace_a_higher_one() {
    let mut agent = signed();
    let _ = agent.step(&RULES, AgentEvent::ReleaseSeen { key: key(2), epoch: 1 });
    let _ = agent.step(&RULES, AgentEvent::ReleaseSeen { key: key(3), epoch: 5 });
    let _ = agent.step(&RULES, AgentEvent::ReleaseSeen { key: key(3), epoch: 0 });
    let _ = offered(&mut agent, offer(2, &[1, 4, 5]));
    let _ = reach(&mut agent, 2, 4);
    let output = reach(&mut agent, 2, 5);
    assert!(matches!(output.actions[..], [AgentAction::SignAck { epoch: 2, .. }]), "{output:?}");
    // A late release of epoch 1 by host 4 must not replace its release of epoch 2.
    let _ = agent.step(&RULES, AgentEvent::ReleaseSeen { key: key(4), epoch: 2 });
    let _ = agent.step(&RULES, AgentEvent::ReleaseSeen { key: key(4), epoch: 1 });
    let _ = offered(&mut agent, offer(3, &[1, 6, 7]));
    let _ = reach(&mut agent, 3, 6);
    let output = reach(&mut agent, 3, 7);
    assert!(matches!(output.actions[..], [AgentAction::SignAck { epoch: 3, .. }]), "{output:?}");
}

#[test]
fn rule_s6_the_list_is_refused_if_releases_are_missing_at_the_time_limit() {
    let mut agent = signed();
    let _ = offered(&mut agent, offer(2, &[1, 4, 5]));
    let output = agent.step(&RULES, AgentEvent::ReleaseTimeout { epoch: 2 });
    assert_eq!(nacked(&output).as_deref(), Some("Unreleased"));
    assert_eq!(
        agent.step(&RULES, AgentEvent::ReleaseTimeout { epoch: 2 }),
        AgentOutput::default(),
        "said once"
    );
    assert_eq!(
        release_wait_limit(FormationSettings::DEFAULT.ack_timeout),
        seconds(30),
        "before the list is given up"
    );
}

#[test]
fn an_agent_that_holds_a_document_releases_and_signs_nothing() {
    let mut agent = signed();
    let output = show_document(&mut agent, document(1, &[1, 2, 3]));
    assert!(output.journal.is_some_and(|journal| journal.held_document.is_some()));
    assert_eq!(output.actions, [AgentAction::ExamineDirectory]);
    assert_eq!(agent.step(&RULES, shown(5)), AgentOutput::default());
    assert_eq!(nacked(&offered(&mut agent, offer(2, &[1, 4, 5]))).as_deref(), Some("Holding"));
}

#[test]
fn a_released_unsigned_foreign_or_second_document_is_refused() {
    let mut released = signed();
    let _ = released.step(&RULES, shown(2));
    let mut unsigned = joined(1);
    let mut foreign = signed();
    for (agent, list) in
        [(&mut released, [1, 2, 3]), (&mut unsigned, [1, 2, 3]), (&mut foreign, [2, 3, 4])]
    {
        let output = show_document(agent, document(1, &list));
        assert!(
            matches!(output.actions[..], [AgentAction::RequestReplacement { .. }]),
            "{output:?}"
        );
        assert!(agent.journal.held_document.is_none());
    }
    let mut holder = signed();
    let _ = show_document(&mut holder, document(1, &[1, 2, 3]));
    let output = show_document(&mut holder, document(2, &[1, 4, 5]));
    assert_eq!(
        output.actions,
        [AgentAction::SendDocument { h: document(1, &[1, 2, 3]).proposal_hash }]
    );
}

#[test]
fn the_first_start_writes_the_marker_then_launches_then_waits_for_the_log() {
    let mut agent = signed();
    let _ = show_document(&mut agent, document(1, &[1, 2, 3]));
    let look = agent.step(&RULES, AgentEvent::DirectoryExamined(DirectoryKind::Blank));
    assert_eq!(look.actions, [AgentAction::WriteMarker { incarnation: Incarnation(1) }]);
    assert!(look.journal.is_none());
    let launch = agent.step(&RULES, AgentEvent::MarkerWritten);
    assert_eq!(launch.journal.map(|journal| journal.launch_state), Some(LaunchState::Launching));
    assert_eq!(launch.actions, [AgentAction::Launch(StartSource::List)]);
    assert!(!agent.is_listening(), "the port is the node's now");
    let ran = agent.step(&RULES, AgentEvent::LogSeen);
    assert_eq!(ran.journal.map(|journal| journal.launch_state), Some(LaunchState::Ran));
}

#[test]
fn no_node_starts_in_a_directory_with_a_log_or_another_incarnations_marker() {
    let strange = [DirectoryKind::Marked(Incarnation(2)), DirectoryKind::Log(Some(Incarnation(1)))];
    for directory in strange {
        let mut agent = signed();
        let _ = show_document(&mut agent, document(1, &[1, 2, 3]));
        let output = agent.step(&RULES, AgentEvent::DirectoryExamined(directory));
        assert!(matches!(output.actions[..], [AgentAction::Stop { exit: 1, .. }]), "{output:?}");
        assert_eq!((output.journal, agent.journal.launch_state), (None, LaunchState::NotStarted));
    }
    let mut agent = signed();
    let _ = show_document(&mut agent, document(1, &[1, 2, 3]));
    let output =
        agent.step(&RULES, AgentEvent::DirectoryExamined(DirectoryKind::Marked(Incarnation(1))));
    assert_eq!(
        output.actions,
        [AgentAction::Launch(StartSource::List)],
        "it wrote that one itself"
    );
}

#[test]
fn a_journal_that_no_agent_can_have_violates_an_invariant() {
    type Change = fn(&mut Journal);
    let held: Change = |journal| journal.held_document = Some(document(1, &[1, 2, 3]));
    let changes: [(Change, Option<&str>); 8] = [
        (held, None),
        (
            |j| j.held_document = Some(document(1, &[1, 2, 4])),
            Some("a document is held that was not signed"),
        ),
        (|j| j.launch_state = LaunchState::Launching, Some("a node was launched from nothing")),
        (|j| (j.launch_state, j.is_admitted) = (LaunchState::Launching, true), None),
        (
            |j| (j.held_document, j.is_admitted) = (Some(document(1, &[1, 2, 3])), true),
            Some("it began with the cluster, and came later"),
        ),
        (|j| j.record = None, Some("a list was signed without a record")),
        (|j| j.boot = 0, Some("it was shown before the first start was counted")),
        (
            |j| (j.held_document, j.released_epoch) = (Some(document(1, &[1, 2, 3])), 1),
            Some("a document is held that was released"),
        ),
    ];
    for (change, broken) in changes {
        let mut journal = signed().journal;
        change(&mut journal);
        assert_eq!(journal.violated_invariant(&RULES), broken);
    }
}

#[test]
fn each_start_has_a_higher_boot_counter_than_the_last() {
    let journal = signed().journal;
    let next = journal.clone().with_next_boot();
    assert_eq!((journal.boot, next.boot), (1, 2));
    assert_eq!(Agent::new(next, 9).session.boot, 2);
}

#[test]
fn an_agent_answers_probes_by_members_of_its_lists_only() {
    let mut agent = joined(1);
    assert_eq!(agent.answer_probe(key(2)), None);
    let _ = offered(&mut agent, offer(1, &[1, 2, 3]));
    assert!(agent.answer_probe(key(2)).is_some());
    assert_eq!(agent.answer_probe(key(4)), None);
    let later = Agent::new(signed().journal.with_next_boot(), 2);
    assert!(later.answer_probe(key(3)).is_some(), "in a list that it signed");
}

#[test]
fn a_refusal_stops_an_agent_for_good_only_if_waiting_can_not_help() {
    let refused = |code, retryable| AgentEvent::RequestRefused { code, retryable };
    let exit = |code: Option<RefusalCode>, retryable| {
        let output = joined(1).step(&RULES, refused(code, retryable));
        output.actions.iter().find_map(|action| match action {
            AgentAction::Stop { exit, .. } => Some(*exit),
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
    assert_eq!(again.actions, [AgentAction::Redeem]);
}

#[test]
fn the_record_is_not_replaced_while_a_signed_list_can_still_commit() {
    let mut agent = signed();
    let _ = agent.step(&RULES, AgentEvent::RecordReady(other_record(1, 42)));
    assert_eq!(agent.journal.record.as_ref().map(|record| record.hash), Some(Hash([1; 32])));
    let _ = agent.step(&RULES, shown(2));
    let _ = agent.step(&RULES, AgentEvent::RecordReady(other_record(1, 42)));
    assert_eq!(agent.journal.record.as_ref().map(|record| record.hash), Some(Hash([42; 32])));
}

#[test]
fn decisions_at_a_restart_follow_the_table() {
    let own = Incarnation(1);
    let other = Incarnation(2);
    let at = |held: bool, start: LaunchState| {
        let mut journal = signed().journal;
        journal.held_document = held.then(|| document(1, &[1, 2, 3]));
        journal.launch_state = start;
        journal
    };
    let before = at(false, LaunchState::NotStarted);
    let held = at(true, LaunchState::NotStarted);
    let launching = at(true, LaunchState::Launching);
    let ran = at(true, LaunchState::Ran);
    let rows = [
        (&before, DirectoryKind::Blank, "go on"),
        (&before, DirectoryKind::Marked(own), "refuse"),
        (&before, DirectoryKind::Log(Some(own)), "refuse"),
        (&held, DirectoryKind::Blank, "launch"),
        (&held, DirectoryKind::Marked(own), "launch"),
        (&held, DirectoryKind::Marked(other), "refuse"),
        (&held, DirectoryKind::Log(Some(own)), "refuse"),
        (&held, DirectoryKind::Foreign("data".into()), "refuse"),
        (&launching, DirectoryKind::Marked(own), "list"),
        (&launching, DirectoryKind::Log(Some(own)), "log"),
        (&launching, DirectoryKind::Blank, "replacement"),
        (&launching, DirectoryKind::Log(None), "replacement"),
        (&launching, DirectoryKind::Log(Some(other)), "refuse"),
        (&ran, DirectoryKind::Log(Some(own)), "log"),
        (&ran, DirectoryKind::Marked(own), "replacement"),
        (&ran, DirectoryKind::Blank, "replacement"),
        (&ran, DirectoryKind::Tombstone, "removed"),
    ];
    for (journal, directory, expected) in rows {
        let decision = decide_at_start(&RULES, Some(journal), &machine(1), &directory);
        let name = match decision {
            StartDecision::Resume => "go on",
            StartDecision::ResumeToLaunch => "launch",
            StartDecision::StartNode(StartSource::List) => "list",
            StartDecision::StartNode(StartSource::Log) => "log",
            StartDecision::RequestReplacement { .. } => "replacement",
            StartDecision::Refuse { .. } => "refuse",
            StartDecision::Removed => "removed",
            StartDecision::BeginNew | StartDecision::SetAsideAndBeginNew => "new",
        };
        assert_eq!(name, expected, "{:?} and {directory}", journal.launch_state);
    }
}

#[test]
fn a_journal_of_another_machine_is_set_aside_unless_the_directory_has_a_log() {
    let journal = signed().journal;
    let elsewhere = |directory| decide_at_start(&RULES, Some(&journal), &machine(9), &directory);
    assert_eq!(elsewhere(DirectoryKind::Blank), StartDecision::SetAsideAndBeginNew);
    assert!(matches!(elsewhere(DirectoryKind::Log(None)), StartDecision::Refuse { .. }));
    assert_eq!(
        decide_at_start(&RULES, None, &machine(9), &DirectoryKind::Blank),
        StartDecision::BeginNew
    );
    let log = DirectoryKind::Log(Some(Incarnation(1)));
    assert!(matches!(
        decide_at_start(&RULES, None, &machine(9), &log),
        StartDecision::Refuse { .. }
    ));
}

#[test]
fn a_directory_is_blank_if_nothing_or_only_lost_and_found_is_in_it() {
    let listing = |entries: &[&str], marker, log| DirectoryListing {
        entries: entries.iter().map(|&entry| entry.to_owned()).collect(),
        marker,
        has_log: log,
    };
    let own = Some(Incarnation(1));
    let rows = [
        (listing(&[], None, false), DirectoryKind::Blank),
        (listing(&["lost+found"], None, false), DirectoryKind::Blank),
        (listing(&["lost+found", "x"], None, false), DirectoryKind::Foreign("x".into())),
        (listing(&["muster-incarnation"], own, false), DirectoryKind::Marked(Incarnation(1))),
        (
            listing(&["muster-incarnation", "member"], own, false),
            DirectoryKind::Marked(Incarnation(1)),
        ),
        (listing(&["muster-incarnation", "member"], own, true), DirectoryKind::Log(own)),
        (listing(&["member"], None, true), DirectoryKind::Log(None)),
        (listing(&["member"], None, false), DirectoryKind::Foreign("member".into())),
        (listing(&["muster-tombstone.json", "member"], own, true), DirectoryKind::Tombstone),
    ];
    for (listing, expected) in rows {
        assert_eq!(classify(&RULES, &listing), expected, "{:?}", listing.entries);
    }
}

#[test]
fn a_newcomer_that_the_cluster_has_added_launches_without_a_document() {
    let mut agent = joined(1);
    let output = agent.step(&RULES, AgentEvent::DirectoryExamined(DirectoryKind::Blank));
    assert_eq!(output, AgentOutput::default(), "nobody has added it");
    let output = agent.step(&RULES, AgentEvent::Admitted);
    assert!(output.journal.is_some_and(|journal| journal.is_admitted));
    assert_eq!(output.actions, [AgentAction::ExamineDirectory]);
    // After a crash the agent gets the `Admitted` event again. The event then changes nothing.
    assert_eq!(agent.step(&RULES, AgentEvent::Admitted).journal, None);
    let output = agent.step(&RULES, AgentEvent::DirectoryExamined(DirectoryKind::Blank));
    assert_eq!(output.actions, [AgentAction::WriteMarker { incarnation: Incarnation(1) }]);
    let output = agent.step(&RULES, AgentEvent::MarkerWritten);
    let durable = output.journal.expect("launching is durable before the node is executed");
    assert_eq!(
        (durable.launch_state, output.actions),
        (LaunchState::Launching, vec![AgentAction::Launch(StartSource::List)])
    );
    assert!(!agent.journal.may_change_record());
}

#[test]
fn decisions_at_a_newcomers_restart_follow_the_same_table() {
    let mut journal = joined(1).journal;
    let decide = |journal: &Journal, directory: DirectoryKind| {
        decide_at_start(&RULES, Some(journal), &machine(1), &directory)
    };
    assert_eq!(decide(&journal, DirectoryKind::Blank), StartDecision::Resume);
    journal.is_admitted = true;
    assert_eq!(decide(&journal, DirectoryKind::Blank), StartDecision::ResumeToLaunch);
    let own = Incarnation(1);
    assert_eq!(decide(&journal, DirectoryKind::Marked(own)), StartDecision::ResumeToLaunch);
    assert!(matches!(
        decide(&journal, DirectoryKind::Log(Some(own))),
        StartDecision::Refuse { .. }
    ));
    journal.launch_state = LaunchState::Launching;
    assert_eq!(
        decide(&journal, DirectoryKind::Marked(own)),
        StartDecision::StartNode(StartSource::List)
    );
    journal.launch_state = LaunchState::Ran;
    let lost = decide(&journal, DirectoryKind::Blank);
    assert!(matches!(lost, StartDecision::RequestReplacement { .. }), "a wiped host: {lost:?}");
}

#[test]
fn an_admitted_newcomer_holds_no_document() {
    let mut agent = signed();
    let _ = agent.step(&RULES, AgentEvent::Admitted);
    let output = show_document(&mut agent, document(1, &[1, 2, 3]));
    assert!(output.journal.is_none());
    assert!(matches!(output.actions[..], [AgentAction::RequestReplacement { .. }]), "{output:?}");
    let mut agent = signed();
    let _ = show_document(&mut agent, document(1, &[1, 2, 3]));
    assert_eq!(agent.step(&RULES, AgentEvent::Admitted), AgentOutput::default());
}
