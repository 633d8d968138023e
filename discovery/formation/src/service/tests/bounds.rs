//! Edge cases of the service's rules: limits, and lists in which half of the members or none can be
//! reached.

use super::*;
use crate::Millis;

fn redeem_one_use(host: u8) -> ClusterEvent {
    let ClusterEvent::Redeem(mut event) = redeem(host) else { unreachable!("it is a redeem") };
    event.grant.uses = 1;
    ClusterEvent::Redeem(event)
}

fn row(found: &[(u8, bool)]) -> ProbeResults {
    let probe = |works| match works {
        true => ProbeOutcome::Reached,
        false => ProbeOutcome::Failed("timed out".to_owned()),
    };
    found.iter().map(|&(peer, works)| (key(peer), probe(works))).collect()
}

fn counts(service: &Service) -> Vec<u32> {
    service.cluster.agents.values().map(|agent| agent.failed_lists).collect()
}

#[test]
fn a_token_of_one_use_holds_one_seat_and_its_other_keys_wait() {
    let mut service = Service::of_size(3);
    let _ = service.accepted(redeem_one_use(1));
    let second = service.accepted(redeem_one_use(2));
    assert_eq!(second.standing, Some(AgentStanding::Standby { ahead: 0 }));
    assert_eq!(service.cluster.seats().len(), 1);
    service.pass_seconds(50);
    let _ = service.accepted(poll(2));
    service.pass_seconds(41);
    let _ = service.accepted(ClusterEvent::Tick);
    assert_eq!(service.cluster.seats()[&1], key(2), "the use is free with the seat");
}

#[test]
fn a_member_that_only_half_of_the_others_miss_is_not_at_fault() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    // Of hosts 2 and 3, only host 2 can't reach host 1. The broken link is counted against host 2,
    // which has a higher seat than host 1.
    for (host, found) in [
        (1, row(&[(2, true), (3, true)])),
        (2, row(&[(1, false), (3, true)])),
        (3, row(&[(1, true), (2, true)])),
    ] {
        let _ = service.accepted(ClusterEvent::Probes { key: key(host), epoch: 1, row: found });
    }
    service.pass_seconds(60);
    let _ = service.accepted(ClusterEvent::Tick);
    assert_eq!(counts(&service), [0, 1, 0]);
}

#[test]
fn a_standby_in_backoff_takes_nobodys_seat() {
    let mut service = Service::joined(3, &[1, 2, 3, 4]);
    // Host 4 is in backoff because it was in an earlier list that failed.
    let held_until = service.now.after(seconds(60));
    service.cluster.agents.get_mut(&key(4)).expect("it waits").backoff_until = held_until;
    for epoch in 1..=2 {
        let _ = service.accepted(nack(2, epoch));
        assert_eq!(service.cluster.seats()[&2], key(2), "nothing would be won");
        service.pass_seconds(4);
        let _ = service.accepted(ClusterEvent::Tick);
    }
    let free = service.accepted(redeem(5));
    assert_eq!(free.standing, Some(AgentStanding::Standby { ahead: 1 }));
    let _ = service.accepted(nack(2, 3));
    assert_eq!(service.cluster.seats()[&2], key(5), "the first that isn't held back");
}

#[test]
fn the_next_deadline_of_a_frozen_list_is_its_ack_timeout() {
    let service = Service::joined(3, &[1, 2, 3]);
    let next = next_deadline(&service.cluster, &FormationSettings::DEFAULT, service.now);
    assert_eq!(
        next,
        Some(START.after(FormationSettings::DEFAULT.ack_timeout)),
        "before any lease ends"
    );
}

#[test]
fn a_standby_that_redeems_again_is_refused_because_the_members_are_decided() {
    let mut service = Service::joined(3, &[1, 2, 3, 4]);
    for host in [1, 2, 3] {
        let _ = service.accepted(ack(host, 1, &[1, 2, 3]));
    }
    let again = |host| redeem_with(record(host), session(host, 2), 0);
    assert_eq!(variant(&service.refused(again(4))), "BootClosed");
    assert!(service.accepted(again(3)).document.is_some(), "a member gets it again");
}

#[test]
fn leases_and_backoffs_end_exactly_at_their_time() {
    let mut service = Service::joined(3, &[1, 2]);
    service.pass_seconds(90);
    let _ = service.accepted(ClusterEvent::Tick);
    assert!(service.cluster.seats().is_empty());
    let mut service = Service::joined(3, &[1, 2, 3]);
    let _ = service.accepted(nack(3, 1));
    service.pass_seconds(1);
    let _ = service.accepted(ClusterEvent::Tick);
    assert_eq!(service.cluster.phase, Phase::Open, "held back for two seconds");
}

#[test]
fn a_matrix_row_has_no_result_for_its_sender_or_for_a_stranger() {
    let mut service = Service::joined(3, &[1, 2, 3, 4]);
    let found = row(&[(1, false), (2, true), (4, false)]);
    let _ = service.accepted(ClusterEvent::Probes { key: key(1), epoch: 1, row: found });
    let frozen = service.cluster.frozen.as_ref().expect("preparing");
    assert_eq!(frozen.probes[&key(1)], row(&[(2, true)]));
}

#[test]
fn a_nack_reason_is_cut_to_its_maximum_length() {
    let mut service = Service::joined(1, &[1]);
    let reason = "é".repeat(1_000);
    let _ = service.step(ClusterEvent::Nack { key: key(1), epoch: 1, reason });
    let kept = service.cluster.last_error.as_ref().map(|error| error.text.len());
    assert_eq!(kept, Some(400), "bytes, between two characters");
}

#[test]
fn two_different_reports_do_not_form_a_cluster_and_two_equal_ones_do() {
    let mut service = Service::committed();
    let report = |host, raft_cluster| ClusterEvent::Report { key: key(host), raft_cluster };
    let _ = service.accepted(report(1, 7));
    let _ = service.accepted(report(2, 8));
    assert_eq!(service.cluster.phase, Phase::Committed, "two that differ are no majority");
    let _ = service.accepted(report(3, 7));
    assert_eq!(service.cluster.phase, Phase::Formed);
}

#[test]
fn a_revoked_token_and_a_record_of_another_cluster_or_grant_are_refused() {
    let mut service = Service::of_size(3);
    let redeem = |change: &dyn Fn(&mut Redeem)| {
        let ClusterEvent::Redeem(mut event) = redeem(1) else { unreachable!("it is a redeem") };
        change(&mut event);
        ClusterEvent::Redeem(event)
    };
    let revoked = service.refused(redeem(&|event| event.grant.revoked = true));
    assert_eq!(variant(&revoked), "GrantRevoked");
    let other = AgentRecord { cluster: ClusterId(8), ..plain_record(1) };
    let foreign = service.refused(redeem(&|event| event.record = Arc::new(other.clone())));
    assert_eq!(variant(&foreign), "ForeignRecord");
    let foreign = service.refused(redeem(&|event| event.grant.id = GrantId(Arc::from("join"))));
    assert_eq!(variant(&foreign), "ForeignRecord");
    assert!(service.cluster.agents.is_empty());
}

#[test]
fn a_record_under_another_grant_has_the_uses_of_that_grant() {
    let mut service = Service::joined(3, &[1]);
    let moved = AgentRecord { hash: Hash([42; 32]), ..plain_record(1) };
    let ClusterEvent::Redeem(mut event) = redeem_with(Arc::new(moved), session(1, 2), 0) else {
        unreachable!("it is a redeem")
    };
    event.grant.uses = 1;
    let _ = service.accepted(ClusterEvent::Redeem(event));
    assert_eq!(service.cluster.agents[&key(1)].uses, 1);
}

#[test]
fn an_agent_whose_backoff_is_over_keeps_its_seat_despite_failed_lists() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    for epoch in 1..=2 {
        let _ = service.accepted(nack(2, epoch));
        service.pass_seconds(4);
        let _ = service.accepted(ClusterEvent::Tick);
    }
    service.cluster.agents.get_mut(&key(3)).expect("seated").lease_until = service.now;
    let _ = service.accepted(ClusterEvent::Tick);
    let _ = service.accepted(redeem(4));
    assert_eq!(service.cluster.seats()[&2], key(2));
    assert_eq!(service.cluster.seats()[&3], key(4));
}

#[test]
fn a_standby_that_conflicts_with_a_seated_agent_keeps_waiting() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    service.cluster.agents.get_mut(&key(3)).expect("seated").lease_until = service.now;
    let named = AgentRecord { name: "host-3".to_owned(), ..plain_record(4) };
    let _ = service.accepted(redeem_with(Arc::new(named), session(4, 1), 0));
    assert_eq!(service.cluster.seats()[&3], key(4));
    let _ = service.accepted(poll(3));
    service.cluster.agents.get_mut(&key(1)).expect("seated").lease_until = service.now;
    let _ = service.accepted(ClusterEvent::Tick);
    assert_eq!(service.cluster.seats().len(), 2, "two of one name can't be in one list");
}

#[test]
fn an_ack_over_another_list_is_refused_after_the_commit_too() {
    let mut service = Service::committed();
    assert_eq!(variant(&service.refused(ack(1, 1, &[1, 2, 4]))), "OtherProposal");
}

#[test]
fn a_cluster_that_is_not_committed_can_not_be_retired() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let refusal = service.refused(ClusterEvent::Retire { by: "ann".to_owned() });
    assert_eq!(variant(&refusal), "NothingToRetire");
    assert_eq!(service.cluster.phase, Phase::Preparing);
}

fn report(host: u8, raft_cluster: u64) -> ClusterEvent {
    ClusterEvent::Report { key: key(host), raft_cluster }
}

#[test]
fn a_retirement_is_taken_back_within_a_week_with_the_same_document() {
    let mut service = Service::committed();
    let _ = service.accepted(report(1, 7));
    let _ = service.accepted(report(2, 7));
    assert_eq!(service.cluster.phase, Phase::Formed);
    let before = service.cluster.clone();
    let _ = service.accepted(ClusterEvent::Retire { by: "ann".to_owned() });
    assert_eq!(variant(&service.refused(poll(1))), "Ended");
    service.pass_seconds(6 * 86_400);
    let taken_back = service.step(ClusterEvent::Unretire { by: "ann".to_owned() });
    assert!(taken_back.answer.is_ok());
    assert_eq!(taken_back.committed, None, "nothing is committed a second time");
    assert_eq!(service.cluster, Cluster { rev: service.cluster.rev, ..before.clone() });
    assert_eq!(
        service.accepted(poll(1)).document,
        before.frozen.map(|frozen| frozen.proposal_hash)
    );
    assert_eq!(variant(&service.refused(redeem(4))), "BootClosed", "nobody new is seated");
}

#[test]
fn a_retirement_before_a_majority_reported_leads_back_to_committed() {
    let mut service = Service::committed();
    let _ = service.accepted(report(1, 7));
    let _ = service.accepted(ClusterEvent::Retire { by: "ann".to_owned() });
    let _ = service.accepted(ClusterEvent::Unretire { by: "ann".to_owned() });
    assert_eq!(service.cluster.phase, Phase::Committed);
    let _ = service.accepted(report(2, 7));
    assert_eq!(service.cluster.phase, Phase::Formed);
}

#[test]
fn a_retirement_can_not_be_taken_back_after_a_week_or_if_there_is_none() {
    let mut service = Service::committed();
    let _ = service.accepted(ClusterEvent::Unretire { by: "ann".to_owned() });
    assert_eq!(service.cluster.phase, Phase::Committed, "a repeated request changes nothing");
    let _ = service.accepted(ClusterEvent::Retire { by: "ann".to_owned() });
    let remedies = |service: &Service| {
        explain(&service.cluster, &FormationSettings::DEFAULT, service.now)[0].remedy.clone()
    };
    assert!(remedies(&service).contains("cluster unretire NAME"));
    service.pass_seconds(7 * 86_400 + 1);
    assert!(!remedies(&service).contains("unretire"));
    assert_eq!(
        variant(&service.refused(ClusterEvent::Unretire { by: "ann".to_owned() })),
        "UnretireTooLate"
    );
    let mut service = Service::joined(3, &[1, 2, 3]);
    let refusal = service.refused(ClusterEvent::Unretire { by: "ann".to_owned() });
    assert_eq!(variant(&refusal), "NothingToUnretire");
    let _ = service.accepted(ClusterEvent::Abandon { by: "ann".to_owned() });
    assert_eq!(variant(&service.refused(ClusterEvent::Unretire { by: "ann".to_owned() })), "Ended");
}

fn reopen(service: &Service) -> ClusterEvent {
    let deadline = service.now.after(MORE_TIME);
    ClusterEvent::Reopen { by: "ann".to_owned(), deadline }
}

/// Time for which a reopened cluster may form in these tests.
const MORE_TIME: Millis = Millis(3_600_000);

#[test]
fn a_cluster_that_expired_while_a_list_was_signed_forms_after_an_owner_reopened_it() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let _ = service.accepted(ack(1, 1, &[1, 2, 3]));
    service.expire();
    assert_eq!(variant(&service.refused(poll(1))), "Ended");
    let remedy = explain(&service.cluster, &FormationSettings::DEFAULT, service.now)[0].clone();
    assert!(remedy.remedy.contains("cluster reopen NAME"), "{}", remedy.remedy);
    assert_eq!(remedy.next_try, service.cluster.undo_until(&FormationSettings::DEFAULT));

    service.pass_seconds(86_400);
    let event = reopen(&service);
    let _ = service.accepted(event);
    assert_eq!(service.cluster.phase, Phase::Open);
    assert_eq!(service.cluster.epoch, 2, "an agent signed the list of epoch 1");
    assert_eq!(service.cluster.ended, None);
    let again = reopen(&service);
    let before = service.cluster.clone();
    let _ = service.accepted(again);
    assert_eq!(service.cluster, before, "a repeated request changes nothing");
    for host in 1..=3 {
        let _ = service.accepted(poll(host));
    }
    assert_eq!((service.cluster.phase, service.cluster.epoch), (Phase::Preparing, 2));
    service.pass_seconds(MORE_TIME.0 / 1_000 - 1);
    let _ = service.accepted(ClusterEvent::Tick);
    assert_eq!(service.cluster.phase, Phase::Open, "the leases have lapsed, and that is all");
    service.pass_seconds(1);
    let _ = service.accepted(ClusterEvent::Tick);
    assert_eq!(service.cluster.phase, Phase::Expired, "the new deadline ends it, too");
}

#[test]
fn only_an_expired_cluster_is_reopened_and_only_for_a_week() {
    let mut service = Service::joined(3, &[1, 2]);
    service.expire();
    service.pass_seconds(7 * 86_400 + 1);
    let event = reopen(&service);
    assert_eq!(variant(&service.refused(event)), "ReopenTooLate");
    let remedy = explain(&service.cluster, &FormationSettings::DEFAULT, service.now)[0].clone();
    assert!(!remedy.remedy.contains("reopen"), "{}", remedy.remedy);

    let mut service = Service::committed();
    let event = reopen(&service);
    assert_eq!(variant(&service.refused(event.clone())), "NothingToReopen");
    let _ = service.accepted(ClusterEvent::Retire { by: "ann".to_owned() });
    assert_eq!(variant(&service.refused(event)), "Ended");
    let mut service = Service::joined(3, &[1, 2]);
    let _ = service.accepted(ClusterEvent::Abandon { by: "ann".to_owned() });
    let event = reopen(&service);
    assert_eq!(variant(&service.refused(event)), "Ended");
}

#[test]
fn a_split_cluster_refuses_to_take_its_retirement_back() {
    let mut service = Service::committed();
    let _ = service.step(ClusterEvent::Adopt(document(2, &[3, 4, 5])));
    let _ = service.accepted(ClusterEvent::Retire { by: "ann".to_owned() });
    assert_eq!(variant(&service.refused(ClusterEvent::Unretire { by: "ann".to_owned() })), "Split");
}

#[test]
fn an_adopted_document_gives_the_seats_to_its_members_only() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let _ = service.accepted(ClusterEvent::Adopt(document(5, &[4, 5, 6])));
    assert_eq!(service.cluster.agents[&key(1)].seating, Seating::Absent);
    assert_eq!(service.cluster.seats().into_values().collect::<Vec<_>>(), [4, 5, 6].map(key));
    assert_eq!(service.cluster.floor, 5);
}

#[test]
fn no_epoch_above_the_maximum_is_accepted_even_from_just_below_it() {
    let mut service = Service::joined(3, &[1]);
    service.cluster.floor = MAX_EPOCH - 1;
    let _ = service.accepted(poll_of(1, MAX_EPOCH));
    assert_eq!(variant(&service.refused(poll_of(1, MAX_EPOCH + 1))), "EpochTooFar");
}
