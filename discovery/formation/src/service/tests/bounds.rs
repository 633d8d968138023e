//! Edge cases of the service's rules: limits, and lists in which half of the members or none can be
//! reached.

use super::*;

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
    let _ = service.yes(redeem_one_use(1));
    let second = service.yes(redeem_one_use(2));
    assert_eq!(second.standing, Some(AgentStanding::Standby { ahead: 0 }));
    assert_eq!(service.cluster.seats().len(), 1);
    service.pass(50);
    let _ = service.yes(poll(2));
    service.pass(41);
    let _ = service.yes(ClusterEvent::Tick);
    assert_eq!(service.cluster.seats()[&1], key(2), "the use is free with the seat");
}

#[test]
fn whom_half_of_the_matrix_misses_is_not_at_fault_alone() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    // Of the two other members, only host 2 can't reach host 1. The broken link is counted against
    // host 2, which has the higher seat.
    for (host, found) in [
        (1, row(&[(2, true), (3, true)])),
        (2, row(&[(1, false), (3, true)])),
        (3, row(&[(1, true), (2, true)])),
    ] {
        let _ = service.yes(ClusterEvent::Probes { key: key(host), epoch: 1, row: found });
    }
    service.pass(60);
    let _ = service.yes(ClusterEvent::Tick);
    assert_eq!(counts(&service), [0, 1, 0]);
}

#[test]
fn a_standby_that_is_held_back_takes_nobodys_seat() {
    let mut service = Service::joined(3, &[1, 2, 3, 4]);
    // Host 4 is in backoff because it was in an earlier list that failed.
    let held_until = service.now.after(seconds(60));
    service.cluster.agents.get_mut(&key(4)).expect("it waits").backoff_until = held_until;
    for epoch in 1..=2 {
        let _ = service.yes(nack(2, epoch));
        assert_eq!(service.cluster.seats()[&2], key(2), "nothing would be won");
        service.pass(4);
        let _ = service.yes(ClusterEvent::Tick);
    }
    let free = service.yes(redeem(5));
    assert_eq!(free.standing, Some(AgentStanding::Standby { ahead: 1 }));
    let _ = service.yes(nack(2, 3));
    assert_eq!(service.cluster.seats()[&2], key(5), "the first that isn't held back");
}

#[test]
fn a_frozen_list_is_looked_at_when_its_time_is_over() {
    let service = Service::joined(3, &[1, 2, 3]);
    let next = next_deadline(&service.cluster, &FormationSettings::DEFAULT, service.now);
    assert_eq!(
        next,
        Some(START.after(FormationSettings::DEFAULT.ack_timeout)),
        "before any lease ends"
    );
}

#[test]
fn a_standby_that_redeems_again_is_told_that_the_members_are_decided() {
    let mut service = Service::joined(3, &[1, 2, 3, 4]);
    for host in [1, 2, 3] {
        let _ = service.yes(ack(host, 1, &[1, 2, 3]));
    }
    let again = |host| redeem_with(record(host), session(host, 2), 0);
    assert_eq!(variant(&service.no(again(4))), "BootClosed");
    assert!(service.yes(again(3)).document.is_some(), "a member gets it again");
}

#[test]
fn leases_and_holds_end_at_their_time_and_not_after_it() {
    let mut service = Service::joined(3, &[1, 2]);
    service.pass(90);
    let _ = service.yes(ClusterEvent::Tick);
    assert!(service.cluster.seats().is_empty());
    let mut service = Service::joined(3, &[1, 2, 3]);
    let _ = service.yes(nack(3, 1));
    service.pass(1);
    let _ = service.yes(ClusterEvent::Tick);
    assert_eq!(service.cluster.phase, Phase::Open, "held back for two seconds");
}

#[test]
fn a_row_says_nothing_about_oneself_or_a_stranger() {
    let mut service = Service::joined(3, &[1, 2, 3, 4]);
    let found = row(&[(1, false), (2, true), (4, false)]);
    let _ = service.yes(ClusterEvent::Probes { key: key(1), epoch: 1, row: found });
    let frozen = service.cluster.frozen.as_ref().expect("preparing");
    assert_eq!(frozen.probes[&key(1)], row(&[(2, true)]));
}

#[test]
fn what_others_write_is_kept_up_to_a_bound() {
    let mut service = Service::joined(1, &[1]);
    let reason = "é".repeat(1_000);
    let _ = service.step(ClusterEvent::Nack { key: key(1), epoch: 1, reason });
    let kept = service.cluster.last_error.as_ref().map(|error| error.text.len());
    assert_eq!(kept, Some(400), "bytes, between two characters");
}

#[test]
fn a_majority_of_equal_reports_forms_it() {
    let mut service = Service::committed();
    let report = |host, raft_cluster| ClusterEvent::Report { key: key(host), raft_cluster };
    let _ = service.yes(report(1, 7));
    let _ = service.yes(report(2, 8));
    assert_eq!(service.cluster.phase, Phase::Committed, "two that differ are no majority");
    let _ = service.yes(report(3, 7));
    assert_eq!(service.cluster.phase, Phase::Formed);
}

#[test]
fn a_token_that_the_store_knows_as_revoked_and_a_record_of_another_cluster_or_grant_are_refused() {
    let mut service = Service::of_size(3);
    let redeem = |change: &dyn Fn(&mut Redeem)| {
        let ClusterEvent::Redeem(mut event) = redeem(1) else { unreachable!("it is a redeem") };
        change(&mut event);
        ClusterEvent::Redeem(event)
    };
    let revoked = service.no(redeem(&|event| event.grant.revoked = true));
    assert_eq!(variant(&revoked), "GrantRevoked");
    let other = AgentRecord { cluster: ClusterId(8), ..plain_record(1) };
    let foreign = service.no(redeem(&|event| event.record = Arc::new(other.clone())));
    assert_eq!(variant(&foreign), "ForeignRecord");
    let foreign = service.no(redeem(&|event| event.grant.id = GrantId(Arc::from("join"))));
    assert_eq!(variant(&foreign), "ForeignRecord");
    assert!(service.cluster.agents.is_empty());
}

#[test]
fn a_record_under_another_grant_holds_as_many_seats_as_that_one_may() {
    let mut service = Service::joined(3, &[1]);
    let moved = AgentRecord { hash: Hash([42; 32]), ..plain_record(1) };
    let ClusterEvent::Redeem(mut event) = redeem_with(Arc::new(moved), session(1, 2), 0) else {
        unreachable!("it is a redeem")
    };
    event.grant.uses = 1;
    let _ = service.yes(ClusterEvent::Redeem(event));
    assert_eq!(service.cluster.agents[&key(1)].uses, 1);
}

#[test]
fn whose_hold_is_over_keeps_its_seat_however_often_it_was_counted() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    for epoch in 1..=2 {
        let _ = service.yes(nack(2, epoch));
        service.pass(4);
        let _ = service.yes(ClusterEvent::Tick);
    }
    service.cluster.agents.get_mut(&key(3)).expect("seated").lease_until = service.now;
    let _ = service.yes(ClusterEvent::Tick);
    let _ = service.yes(redeem(4));
    assert_eq!(service.cluster.seats()[&2], key(2));
    assert_eq!(service.cluster.seats()[&3], key(4));
}

#[test]
fn a_standby_that_would_clash_with_who_sits_goes_on_waiting() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    service.cluster.agents.get_mut(&key(3)).expect("seated").lease_until = service.now;
    let named = AgentRecord { name: "host-3".to_owned(), ..plain_record(4) };
    let _ = service.yes(redeem_with(Arc::new(named), session(4, 1), 0));
    assert_eq!(service.cluster.seats()[&3], key(4));
    let _ = service.yes(poll(3));
    service.cluster.agents.get_mut(&key(1)).expect("seated").lease_until = service.now;
    let _ = service.yes(ClusterEvent::Tick);
    assert_eq!(service.cluster.seats().len(), 2, "two of one name can't be in one list");
}

#[test]
fn an_ack_over_another_list_is_refused_after_the_commit_too() {
    let mut service = Service::committed();
    assert_eq!(variant(&service.no(ack(1, 1, &[1, 2, 4]))), "OtherProposal");
}

#[test]
fn what_is_not_committed_is_not_retired() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let refusal = service.no(ClusterEvent::Retire { by: "ann".to_owned() });
    assert_eq!(variant(&refusal), "NothingToRetire");
    assert_eq!(service.cluster.phase, Phase::Preparing);
}

fn report(host: u8, raft_cluster: u64) -> ClusterEvent {
    ClusterEvent::Report { key: key(host), raft_cluster }
}

#[test]
fn a_retirement_is_taken_back_within_a_week_with_the_same_document() {
    let mut service = Service::committed();
    let _ = service.yes(report(1, 7));
    let _ = service.yes(report(2, 7));
    assert_eq!(service.cluster.phase, Phase::Formed);
    let before = service.cluster.clone();
    let _ = service.yes(ClusterEvent::Retire { by: "ann".to_owned() });
    assert_eq!(variant(&service.no(poll(1))), "Ended");
    service.pass(6 * 86_400);
    let taken_back = service.step(ClusterEvent::Unretire { by: "ann".to_owned() });
    assert!(taken_back.answer.is_ok());
    assert_eq!(taken_back.committed, None, "nothing is committed a second time");
    assert_eq!(service.cluster, Cluster { rev: service.cluster.rev, ..before.clone() });
    assert_eq!(service.yes(poll(1)).document, before.frozen.map(|frozen| frozen.proposal_hash));
    assert_eq!(variant(&service.no(redeem(4))), "BootClosed", "nobody new is seated");
}

#[test]
fn a_retirement_before_a_majority_reported_leads_back_to_committed() {
    let mut service = Service::committed();
    let _ = service.yes(report(1, 7));
    let _ = service.yes(ClusterEvent::Retire { by: "ann".to_owned() });
    let _ = service.yes(ClusterEvent::Unretire { by: "ann".to_owned() });
    assert_eq!(service.cluster.phase, Phase::Committed);
    let _ = service.yes(report(2, 7));
    assert_eq!(service.cluster.phase, Phase::Formed);
}

#[test]
fn a_retirement_is_not_taken_back_after_a_week_or_where_there_is_none() {
    let mut service = Service::committed();
    let _ = service.yes(ClusterEvent::Unretire { by: "ann".to_owned() });
    assert_eq!(service.cluster.phase, Phase::Committed, "a repeated request changes nothing");
    let _ = service.yes(ClusterEvent::Retire { by: "ann".to_owned() });
    let remedies = |service: &Service| {
        explain(&service.cluster, &FormationSettings::DEFAULT, service.now)[0].remedy.clone()
    };
    assert!(remedies(&service).contains("cluster unretire NAME"));
    service.pass(7 * 86_400 + 1);
    assert!(!remedies(&service).contains("unretire"));
    assert_eq!(
        variant(&service.no(ClusterEvent::Unretire { by: "ann".to_owned() })),
        "UnretireTooLate"
    );
    let mut service = Service::joined(3, &[1, 2, 3]);
    let refusal = service.no(ClusterEvent::Unretire { by: "ann".to_owned() });
    assert_eq!(variant(&refusal), "NothingToUnretire");
    let _ = service.yes(ClusterEvent::Abandon { by: "ann".to_owned() });
    assert_eq!(variant(&service.no(ClusterEvent::Unretire { by: "ann".to_owned() })), "Ended");
}

#[test]
fn two_documents_stay_two_whatever_is_taken_back() {
    let mut service = Service::committed();
    let _ = service.step(ClusterEvent::Adopt(document(2, &[3, 4, 5])));
    let _ = service.yes(ClusterEvent::Retire { by: "ann".to_owned() });
    assert_eq!(variant(&service.no(ClusterEvent::Unretire { by: "ann".to_owned() })), "Split");
}

#[test]
fn an_adopted_document_seats_its_members_and_nobody_else() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let _ = service.yes(ClusterEvent::Adopt(document(5, &[4, 5, 6])));
    assert_eq!(service.cluster.agents[&key(1)].seating, Seating::Absent);
    assert_eq!(service.cluster.seats().into_values().collect::<Vec<_>>(), [4, 5, 6].map(key));
    assert_eq!(service.cluster.floor, 5);
}

#[test]
fn no_epoch_passes_the_ceiling_however_close_the_cluster_is_to_it() {
    let mut service = Service::joined(3, &[1]);
    service.cluster.floor = MAX_EPOCH - 1;
    let _ = service.yes(poll_of(1, MAX_EPOCH));
    assert_eq!(variant(&service.no(poll_of(1, MAX_EPOCH + 1))), "EpochTooFar");
}
