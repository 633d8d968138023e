//! Edge cases of the agent's rules: limits, other incarnations, other keys, repeated starts.

use super::*;

#[test]
fn an_agent_signs_if_its_clock_is_off_by_exactly_the_limit() {
    let mut agent = joined(1);
    let output =
        offered(&mut agent, ExaminedProposal { skew: Millis(30_000), ..offer(1, &[1, 2, 3]) });
    assert_eq!(nacked(&output), None);
}

#[test]
fn a_wrong_clock_is_reported_before_the_faults_that_it_causes() {
    const DAY: Millis = Millis(86_400_000);
    for (skew, is_behind, words) in [
        (DAY, true, "this host's clock is 24 h behind the service's"),
        (DAY, false, "this host's clock is 24 h ahead of the service's"),
        (Millis(30_001), false, "this host's clock is 31 s ahead of the service's"),
        (Millis(600_000), true, "this host's clock is 10 min behind the service's"),
    ] {
        let mut agent = joined(1);
        let mut offer = ExaminedProposal { skew, is_behind, ..offer(1, &[1, 2, 3]) };
        offer.invalid_records.insert(1, "its token is issued in the future".into());
        let output = offered(&mut agent, offer);
        let reason = output.actions.iter().find_map(|action| match action {
            AgentAction::Nack { reason, .. } => Some(reason.to_string()),
            _ => None,
        });
        assert!(reason.as_ref().is_some_and(|reason| reason.contains(words)), "{reason:?}");
    }
}

#[test]
fn a_list_of_another_size_or_with_another_token_for_this_host_is_not_signed() {
    let mut agent = joined(1);
    let short = ExaminedProposal { size: 3, ..offer(1, &[1, 2]) };
    assert_eq!(nacked(&offered(&mut agent, short)).as_deref(), Some("ForeignList"));
    let mut other = offer(2, &[1, 2, 3]);
    let record = AgentRecord { token_hash: Hash([42; 32]), ..plain_record(1) };
    other.proposal.records[0] = Arc::new(record);
    assert_eq!(nacked(&offered(&mut agent, other)).as_deref(), Some("NotMyRecord"));
}

#[test]
fn every_earlier_list_must_be_released_and_not_only_the_newest() {
    let mut agent = signed();
    let _ = agent.step(&RULES, AgentEvent::ReleaseSeen { key: key(2), epoch: 1 });
    let _ = offered(&mut agent, offer(2, &[1, 4, 5]));
    let _ = reach(&mut agent, 2, 4);
    let _ = reach(&mut agent, 2, 5);
    assert_eq!(agent.journal.signed_lists.len(), 2);
    // A restarted agent has forgotten the releases of other agents, because it keeps them in memory
    // only.
    let mut agent = Agent::new(agent.journal.with_next_boot(), 2);
    let _ = offered(&mut agent, offer(3, &[1, 6, 7]));
    let _ = agent.step(&RULES, AgentEvent::ReleaseSeen { key: key(4), epoch: 2 });
    let _ = reach(&mut agent, 3, 6);
    let output = reach(&mut agent, 3, 7);
    assert!(matches!(output.actions[..], [AgentAction::SendProbeResults { .. }]), "{output:?}");
    let waits_for =
        agent.unmet_release_condition(&RULES).expect("list 1 is not released").to_string();
    assert!(waits_for.contains("the list of epoch 1"), "{waits_for}");
    let output = agent.step(&RULES, AgentEvent::ReleaseSeen { key: key(3), epoch: 2 });
    assert!(matches!(output.actions[..], [AgentAction::SignAck { epoch: 3, .. }]), "{output:?}");
}

#[test]
fn a_probe_counts_for_its_own_epoch_and_key_only() {
    let mut agent = joined(1);
    let _ = offered(&mut agent, offer(2, &[1, 2, 3]));
    let _ = reach(&mut agent, 2, 2);
    assert_eq!(reach(&mut agent, 1, 3), AgentOutput::default(), "an answer to an older question");
    let impostor = ProbeAnswer { key: key(9), incarnation: Incarnation(3), released_epoch: 0 };
    let probed = AgentEvent::ProbeEnded { epoch: 2, peer: key(3), result: Ok(impostor) };
    let output = agent.step(&RULES, probed);
    assert!(matches!(output.actions[..], [AgentAction::SendProbeResults { .. }]), "{output:?}");
    assert!(agent.journal.signed_lists.is_empty());
}

#[test]
fn a_document_with_another_record_of_this_host_is_not_held() {
    let mut agent = signed();
    let mut other = (*document(1, &[1, 2, 3])).clone();
    other.proposal.records[0] = other_record(1, 42);
    let output = show_document(&mut agent, Arc::new(other));
    assert!(matches!(output.actions[..], [AgentAction::RequestReplacement { .. }]), "{output:?}");
}

#[test]
fn no_node_is_launched_without_a_document_or_with_a_foreign_marker() {
    let mut agent = signed();
    assert_eq!(agent.step(&RULES, AgentEvent::MarkerWritten), AgentOutput::default());
    assert_eq!(
        agent.step(&RULES, AgentEvent::DirectoryExamined(DirectoryKind::Blank)),
        AgentOutput::default()
    );
    let _ = show_document(&mut agent, document(1, &[1, 2, 3]));
    let output =
        agent.step(&RULES, AgentEvent::DirectoryExamined(DirectoryKind::Marked(Incarnation(2))));
    assert!(matches!(output.actions[..], [AgentAction::Stop { exit: 1, .. }]), "{output:?}");
    assert_eq!(agent.journal.launch_state, LaunchState::NotStarted);
}

#[test]
fn an_agent_ignores_refusals_after_the_launch() {
    let mut agent = signed();
    let _ = show_document(&mut agent, document(1, &[1, 2, 3]));
    let _ = agent.step(&RULES, AgentEvent::MarkerWritten);
    let refused =
        AgentEvent::RequestRefused { code: Some(RefusalCode::BootClosed), retryable: false };
    assert_eq!(agent.step(&RULES, refused), AgentOutput::default());
}

#[test]
fn each_start_is_counted_and_a_removed_incarnation_never_starts() {
    let journal = signed().journal.with_next_boot();
    assert_eq!((journal.boot, journal.clone().with_next_boot().boot), (2, 3));
    let mut agent = Agent::new(journal, 2);
    let output = agent.step(&RULES, AgentEvent::TombstoneSeen);
    assert!(matches!(output.actions[..], [AgentAction::Stop { exit: 3, .. }]), "{output:?}");
    let journal = *output.journal.expect("it must never forget");
    let decision = decide_at_start(&RULES, Some(&journal), &machine(1), &DirectoryKind::Blank);
    assert_eq!(decision, StartDecision::Removed, "whatever became of the directory");
}
