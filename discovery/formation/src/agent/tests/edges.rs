//! Edge cases of the agent's rules: limits, other incarnations, other keys, repeated starts.

use super::*;

#[test]
fn a_clock_that_is_off_by_just_what_is_allowed_signs() {
    let mut agent = joined(1);
    let output = offered(&mut agent, Offer { skew: Millis(30_000), ..offer(1, &[1, 2, 3]) });
    assert_eq!(nacked(&output), None);
}

#[test]
fn a_clock_that_is_off_is_named_before_what_only_seems_wrong_by_it() {
    const DAY: Millis = Millis(86_400_000);
    for (skew, is_behind, words) in [
        (DAY, true, "this host's clock is 24 h behind the service's"),
        (DAY, false, "this host's clock is 24 h ahead of the service's"),
        (Millis(30_001), false, "this host's clock is 31 s ahead of the service's"),
        (Millis(600_000), true, "this host's clock is 10 min behind the service's"),
    ] {
        let mut agent = joined(1);
        let mut offer = Offer { skew, is_behind, ..offer(1, &[1, 2, 3]) };
        offer.invalid.insert(1, "its token is issued in the future".into());
        let output = offered(&mut agent, offer);
        let reason = output.then.iter().find_map(|action| match action {
            Action::Nack { reason, .. } => Some(reason.to_string()),
            _ => None,
        });
        assert!(reason.as_ref().is_some_and(|reason| reason.contains(words)), "{reason:?}");
    }
}

#[test]
fn a_list_of_another_size_or_with_another_token_for_this_host_is_not_signed() {
    let mut agent = joined(1);
    let short = Offer { size: 3, ..offer(1, &[1, 2]) };
    assert_eq!(nacked(&offered(&mut agent, short)).as_deref(), Some("ForeignList"));
    let mut other = offer(2, &[1, 2, 3]);
    let record = Record { token_hash: Hash([42; 32]), ..plain_record(1) };
    other.proposal.records[0] = Arc::new(record);
    assert_eq!(nacked(&offered(&mut agent, other)).as_deref(), Some("NotMyRecord"));
}

#[test]
fn every_earlier_list_must_be_released_not_the_newest_alone() {
    let mut agent = signed();
    let _ = agent.step(&RULES, Event::ReleaseSeen { key: key(2), epoch: 1 });
    let _ = offered(&mut agent, offer(2, &[1, 4, 5]));
    let _ = reach(&mut agent, 2, 4);
    let _ = reach(&mut agent, 2, 5);
    assert_eq!(agent.journal.bound.len(), 2);
    // A restart forgets the releases of other agents: they are not on disk.
    let mut agent = Agent::new(agent.journal.rebooted(), 2);
    let _ = offered(&mut agent, offer(3, &[1, 6, 7]));
    let _ = agent.step(&RULES, Event::ReleaseSeen { key: key(4), epoch: 2 });
    let _ = reach(&mut agent, 3, 6);
    let output = reach(&mut agent, 3, 7);
    assert!(matches!(output.then[..], [Action::SendRow { .. }]), "{output:?}");
    let waits_for = agent.waits_for(&RULES).expect("list 1 is not released").to_string();
    assert!(waits_for.contains("the list of epoch 1"), "{waits_for}");
    let output = agent.step(&RULES, Event::ReleaseSeen { key: key(3), epoch: 2 });
    assert!(matches!(output.then[..], [Action::SignAck { epoch: 3, .. }]), "{output:?}");
}

#[test]
fn a_probe_counts_for_its_own_epoch_and_key_only() {
    let mut agent = joined(1);
    let _ = offered(&mut agent, offer(2, &[1, 2, 3]));
    let _ = reach(&mut agent, 2, 2);
    assert_eq!(reach(&mut agent, 1, 3), Output::default(), "an answer to an older question");
    let impostor = ProbeAnswer { key: key(9), incarnation: Incarnation(3), released: 0 };
    let probed = Event::Probed { epoch: 2, peer: key(3), result: Ok(impostor) };
    let output = agent.step(&RULES, probed);
    assert!(matches!(output.then[..], [Action::SendRow { .. }]), "{output:?}");
    assert!(agent.journal.bound.is_empty());
}

#[test]
fn a_document_with_another_record_of_this_host_is_not_held() {
    let mut agent = signed();
    let mut other = (*document(1, &[1, 2, 3])).clone();
    other.proposal.records[0] = other_record(1, 42);
    let output = show_document(&mut agent, Arc::new(other));
    assert!(matches!(output.then[..], [Action::ReplacementWanted { .. }]), "{output:?}");
}

#[test]
fn nothing_is_launched_without_a_document_or_over_anothers_marker() {
    let mut agent = signed();
    assert_eq!(agent.step(&RULES, Event::MarkerWritten), Output::default());
    assert_eq!(agent.step(&RULES, Event::Looked(Directory::Blank)), Output::default());
    let _ = show_document(&mut agent, document(1, &[1, 2, 3]));
    let output = agent.step(&RULES, Event::Looked(Directory::Marked(Incarnation(2))));
    assert!(matches!(output.then[..], [Action::Stop { exit: 1, .. }]), "{output:?}");
    assert_eq!(agent.journal.start, Start::NotYet);
}

#[test]
fn once_launched_no_refusal_says_anything_to_it() {
    let mut agent = signed();
    let _ = show_document(&mut agent, document(1, &[1, 2, 3]));
    let _ = agent.step(&RULES, Event::MarkerWritten);
    let refused = Event::Refused { code: Some(RefusalCode::BootClosed), retryable: false };
    assert_eq!(agent.step(&RULES, refused), Output::default());
}

#[test]
fn each_start_counts_and_a_removed_incarnation_never_starts() {
    let journal = signed().journal.rebooted();
    assert_eq!((journal.boot, journal.clone().rebooted().boot), (2, 3));
    let mut agent = Agent::new(journal, 2);
    let output = agent.step(&RULES, Event::TombstoneSeen);
    assert!(matches!(output.then[..], [Action::Stop { exit: 3, .. }]), "{output:?}");
    let journal = *output.durable.expect("it must never forget");
    let decision = at_start(&RULES, Some(&journal), &machine(1), &Directory::Blank);
    assert_eq!(decision, Decision::Removed, "whatever became of the directory");
}
