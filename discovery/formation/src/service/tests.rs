//! Transcripts of the table of phases and events, row by row.

mod approvals;
mod bounds;
mod clock;
mod links;
mod zones;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::fixtures::{
    CLUSTER, START, hash_of, key, plain_record, proposal, record, seconds, statement, variant,
};
use crate::rules::Rules;
use crate::service::{
    AgentStanding, Alarm, Answer, Cluster, ClusterChange, ClusterEvent, EndCause,
    FormationSettings, Grant, MAX_EPOCH, MAX_EPOCH_DISTANCE, Phase, Poll, ProbeOutcome,
    ProbeResults, Redeem, Refusal, RefusalCode, ReopenReason, Seating, StepContext, StepOutcome,
    WaitReason, explain, next_deadline, step,
};
use crate::values::{
    AgentRecord, AgentSession, ClusterId, CommitDocument, GrantId, Hash, Release, UnixMicros,
};

struct Service {
    cluster: Cluster,
    now: UnixMicros,
    steady: bool,
}

impl Service {
    fn of_size(size: u8) -> Service {
        Service {
            cluster: Cluster::opened(statement(size), START.after(seconds(86_400))),
            now: START,
            steady: true,
        }
    }

    fn step(&mut self, event: ClusterEvent) -> StepOutcome {
        let settings = FormationSettings::DEFAULT;
        let context = StepContext {
            rules: &Rules::ALL,
            settings: &settings,
            is_clock_steady: self.steady,
            hash: &hash_of,
        };
        step(&mut self.cluster, &context, self.now, event)
    }

    fn accepted(&mut self, event: ClusterEvent) -> Answer {
        self.step(event).answer.expect("not refused")
    }

    fn refused(&mut self, event: ClusterEvent) -> Refusal {
        self.step(event).answer.expect_err("refused")
    }

    fn pass_seconds(&mut self, count: u64) {
        self.now = self.now.after(seconds(count));
    }

    fn expire(&mut self) {
        self.now = self.cluster.deadline;
        let _ = self.accepted(ClusterEvent::Tick);
        assert_eq!(self.cluster.phase, Phase::Expired);
    }

    fn joined(size: u8, hosts: &[u8]) -> Service {
        let mut service = Service::of_size(size);
        for &host in hosts {
            let _ = service.accepted(redeem(host));
        }
        service
    }

    fn committed() -> Service {
        let mut service = Service::joined(3, &[1, 2, 3]);
        for host in [1, 2, 3] {
            let _ = service.accepted(ack(host, 1, &[1, 2, 3]));
        }
        assert_eq!(service.cluster.phase, Phase::Committed);
        service
    }
}

fn grant() -> Grant {
    Grant {
        id: GrantId(Arc::from("boot")),
        uses: 3,
        expires: START.after(seconds(3_600)),
        revoked: false,
    }
}

fn redeem_with(
    record: Arc<AgentRecord>,
    session: AgentSession,
    highest_epoch: u64,
) -> ClusterEvent {
    ClusterEvent::Redeem(Redeem { record, session, highest_epoch, grant: grant() })
}

fn session(host: u8, boot: u64) -> AgentSession {
    AgentSession { boot, nonce: u128::from(host) * 100 + u128::from(boot) }
}

fn redeem(host: u8) -> ClusterEvent {
    redeem_with(record(host), session(host, 1), 0)
}

fn poll(host: u8) -> ClusterEvent {
    poll_of(host, 0)
}

fn poll_of(host: u8, highest_epoch: u64) -> ClusterEvent {
    ClusterEvent::Poll(Poll { key: key(host), session: session(host, 1), highest_epoch })
}

fn ack(host: u8, epoch: u64, list: &[u8]) -> ClusterEvent {
    let h = hash_of(&proposal(epoch, list));
    ClusterEvent::Ack { key: key(host), epoch, h, jws: Arc::from("ack") }
}

fn document(epoch: u64, list: &[u8]) -> CommitDocument {
    let proposal = proposal(epoch, list);
    CommitDocument { proposal_hash: hash_of(&proposal), proposal, text: Arc::from("document") }
}

fn nack(host: u8, epoch: u64) -> ClusterEvent {
    ClusterEvent::Nack { key: key(host), epoch, reason: "S4: my clock is off".to_owned() }
}

#[test]
fn three_hosts_take_three_seats_and_a_fourth_waits() {
    let mut service = Service::of_size(3);
    assert_eq!(service.accepted(redeem(1)).standing, Some(AgentStanding::Seat(1)));
    assert_eq!(service.accepted(redeem(2)).standing, Some(AgentStanding::Seat(2)));
    let third = service.accepted(redeem(3));
    assert_eq!((third.standing, third.phase), (Some(AgentStanding::Seat(3)), Phase::Preparing));
    assert!(third.proposal.is_some(), "whoever fills the last seat sees the list at once");
    let fourth = service.accepted(redeem(4));
    assert_eq!(fourth.standing, Some(AgentStanding::Standby { ahead: 0 }));
    assert_eq!(fourth.proposal, None);
}

#[test]
fn the_last_ack_commits_and_later_ones_get_the_document() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let list = [1, 2, 3];
    assert_eq!(service.step(ack(1, 1, &list)).committed, None);
    assert_eq!(service.step(ack(2, 1, &list)).committed, None);
    let last = service.step(ack(3, 1, &list));
    assert_eq!(last.committed, Some(hash_of(&proposal(1, &list))));
    assert!(last.carries_document());
    let again = service.step(ack(1, 1, &list));
    assert_eq!(again.committed, None, "committed once");
    assert!(again.carries_document());
}

#[test]
fn acks_of_another_epoch_list_or_host_are_refused() {
    let mut service = Service::joined(3, &[1, 2, 3, 4]);
    assert_eq!(variant(&service.refused(ack(1, 2, &[1, 2, 3]))), "StaleEpoch");
    assert_eq!(variant(&service.refused(ack(1, 1, &[1, 2, 4]))), "OtherProposal");
    assert_eq!(variant(&service.refused(ack(4, 1, &[1, 2, 3]))), "NotSeated");
    assert!(service.cluster.frozen.as_ref().is_some_and(|frozen| frozen.acks.is_empty()));
    let mut open = Service::joined(3, &[1]);
    assert_eq!(variant(&open.refused(ack(1, 1, &[1, 2, 3]))), "StaleEpoch");
}

#[test]
fn a_late_host_is_refused_because_the_members_are_decided() {
    let mut service = Service::committed();
    let refusal = service.refused(redeem(4));
    assert_eq!(refusal.code(), RefusalCode::BootClosed);
}

#[test]
fn a_standby_is_refused_because_the_members_are_decided() {
    let mut service = Service::joined(3, &[1, 2, 3, 4]);
    for host in [1, 2, 3] {
        let _ = service.accepted(ack(host, 1, &[1, 2, 3]));
    }
    assert_eq!(variant(&service.refused(poll(4))), "BootClosed");
    assert!(service.accepted(poll(2)).document.is_some());
}

#[test]
fn a_seat_whose_lease_lapses_goes_to_the_standby() {
    let mut service = Service::joined(3, &[1, 2, 3, 4]);
    service.pass_seconds(50);
    for host in [1, 2, 4] {
        let _ = service.accepted(poll(host));
    }
    service.pass_seconds(41);
    let _ = service.accepted(ClusterEvent::Tick);
    assert_eq!(service.cluster.seats()[&3], key(4));
    assert_eq!((service.cluster.phase, service.cluster.epoch), (Phase::Preparing, 2));
    let late = service.accepted(poll(3));
    assert_eq!(late.standing, Some(AgentStanding::Standby { ahead: 0 }), "the late key queues");
}

#[test]
fn the_last_ack_commits_no_list_with_a_lapsed_member() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let list = [1, 2, 3];
    let _ = service.accepted(ack(1, 1, &list));
    let _ = service.accepted(ack(2, 1, &list));
    service.pass_seconds(50);
    let _ = service.accepted(poll(3));
    service.pass_seconds(41);
    let outcome = service.step(ack(3, 1, &list));
    assert_eq!(variant(&outcome.answer.expect_err("too late")), "StaleEpoch");
    assert_eq!((service.cluster.phase, service.cluster.epoch), (Phase::Open, 2));
}

#[test]
fn a_renewed_lease_does_not_change_the_revision() {
    let mut service = Service::joined(3, &[1, 2]);
    let before = service.cluster.rev;
    service.pass_seconds(10);
    let outcome = service.step(poll(1));
    assert!(outcome.changed && !outcome.has_new_revision());
    assert_eq!(service.cluster.rev, before);
}

#[test]
fn a_second_holder_of_a_key_is_refused_and_raises_an_alarm() {
    let mut service = Service::joined(3, &[1]);
    let other = AgentSession { boot: 1, nonce: 999 };
    let outcome = service.step(redeem_with(record(1), other, 0));
    assert_eq!(variant(&outcome.answer.expect_err("another nonce")), "KeyElsewhere");
    assert_eq!(outcome.alarms, [Alarm::KeyElsewhere { key: key(1) }]);
    let higher = AgentSession { boot: 2, nonce: 999 };
    let _ = service.accepted(redeem_with(record(1), higher, 0));
    assert_eq!(
        variant(&service.refused(poll(1))),
        "KeyElsewhere",
        "the older session has lost the key"
    );
}

#[test]
fn a_restarted_agent_replaces_its_record_and_the_list_is_frozen_anew() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let moved = AgentRecord {
        hash: Hash([42; 32]),
        peer_urls: vec!["https://10.0.0.42:2380".to_owned()],
        ..plain_record(1)
    };
    let same_session = redeem_with(Arc::new(moved.clone()), session(1, 1), 0);
    assert_eq!(variant(&service.refused(same_session)), "RecordChanged");
    let _ = service.accepted(redeem_with(Arc::new(moved), session(1, 2), 0));
    assert_eq!((service.cluster.phase, service.cluster.epoch), (Phase::Preparing, 2));
    let frozen = service.cluster.frozen.as_ref().expect("frozen anew");
    assert_eq!(frozen.proposal.records[0].hash, Hash([42; 32]));
}

#[test]
fn a_nack_reopens_the_cluster_and_starts_a_backoff_of_its_sender() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let _ = service.accepted(nack(2, 1));
    assert_eq!((service.cluster.phase, service.cluster.epoch), (Phase::Open, 2));
    assert_eq!(service.cluster.seats().len(), 3, "it keeps its seat");
    let until = next_deadline(&service.cluster, &FormationSettings::DEFAULT, service.now);
    assert_eq!(until, Some(service.now.after(seconds(2))));
    service.pass_seconds(2);
    let _ = service.accepted(ClusterEvent::Tick);
    assert_eq!((service.cluster.phase, service.cluster.epoch), (Phase::Preparing, 2));
}

#[test]
fn an_agent_that_refuses_twice_goes_behind_the_standby() {
    let mut service = Service::joined(3, &[1, 2, 3, 4]);
    let _ = service.accepted(nack(2, 1));
    service.pass_seconds(2);
    let _ = service.accepted(ClusterEvent::Tick);
    let _ = service.accepted(nack(2, 2));
    assert_eq!(service.cluster.seats()[&2], key(4));
    assert!(matches!(service.cluster.agents[&key(2)].seating, Seating::Standby(_)));
    assert_eq!((service.cluster.phase, service.cluster.epoch), (Phase::Preparing, 3));
}

#[test]
fn a_timed_out_list_counts_against_unreachable_and_silent_members() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let row = |down: u8, up: u8| {
        BTreeMap::from([
            (key(down), ProbeOutcome::Failed("timed out".to_owned())),
            (key(up), ProbeOutcome::Reached),
        ])
    };
    let _ = service.accepted(ClusterEvent::Probes { key: key(1), epoch: 1, row: row(3, 2) });
    let _ = service.accepted(ClusterEvent::Probes { key: key(2), epoch: 1, row: row(3, 1) });
    let reached =
        BTreeMap::from([(key(1), ProbeOutcome::Reached), (key(2), ProbeOutcome::Reached)]);
    let _ = service.accepted(ClusterEvent::Probes { key: key(3), epoch: 1, row: reached });
    service.pass_seconds(60);
    let _ = service.accepted(ClusterEvent::Tick);
    let counts: Vec<u32> =
        service.cluster.agents.values().map(|agent| agent.failed_lists).collect();
    assert_eq!(counts, [0, 0, 1], "two of two miss host 3");
    service.pass_seconds(2);
    let _ = service.accepted(ClusterEvent::Tick);
    service.pass_seconds(60 - 35);
    for host in [1, 2, 3] {
        let _ = service.accepted(poll(host));
    }
    service.pass_seconds(36);
    let _ = service.accepted(ClusterEvent::Tick);
    let counts: Vec<u32> =
        service.cluster.agents.values().map(|agent| agent.failed_lists).collect();
    assert_eq!(counts, [1, 1, 2], "nobody has answered anything");
}

#[test]
fn backoffs_double_up_to_a_minute() {
    let held: Vec<u64> =
        (1..=8).map(|count| FormationSettings::DEFAULT.backoff_after(count).0).collect();
    assert_eq!(held, [2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000, 60_000]);
}

#[test]
fn the_next_list_is_frozen_above_every_signed_epoch() {
    let mut service = Service::of_size(2);
    let _ = service.accepted(redeem_with(record(1), session(1, 1), 2));
    let last = service.accepted(redeem(2));
    assert_eq!((last.phase, last.epoch), (Phase::Preparing, 3));
}

#[test]
fn an_epoch_far_above_the_clusters_own_is_refused() {
    let far = [MAX_EPOCH_DISTANCE + 2, MAX_EPOCH, u64::MAX - 1, u64::MAX];
    let mut service = Service::joined(3, &[1]);
    for epoch in far {
        let release = ClusterEvent::Release {
            key: key(1),
            release: Release { epoch, jws: Arc::from("release") },
        };
        for event in [redeem_with(record(2), session(2, 1), epoch), poll_of(1, epoch), release] {
            assert_eq!(variant(&service.refused(event)), "EpochTooFar", "{epoch}");
        }
    }
    assert_eq!((service.cluster.floor, service.cluster.agents.len()), (0, 1));
    let _ = service.accepted(poll_of(1, MAX_EPOCH_DISTANCE + 1));
    let _ = service.accepted(redeem(2));
    let last = service.accepted(redeem(3));
    assert_eq!((last.phase, last.epoch), (Phase::Preparing, MAX_EPOCH_DISTANCE + 2));
    // From the commit on, an epoch that an agent names has no effect.
    let mut service = Service::committed();
    assert!(service.accepted(poll_of(1, u64::MAX)).document.is_some());
    let mut service = Service::joined(3, &[1]);
    let far = CommitDocument {
        proposal: crate::values::ProposedList { epoch: u64::MAX, ..proposal(1, &[1, 2, 3]) },
        ..document(1, &[1, 2, 3])
    };
    assert_eq!(variant(&service.refused(ClusterEvent::Adopt(far))), "EpochTooFar");
}

#[test]
fn any_first_message_of_a_restarted_agent_takes_its_key_over() {
    let speaks = |boot, nonce| ClusterEvent::SessionSeen {
        key: key(1),
        session: AgentSession { boot, nonce },
    };
    for mut service in [Service::joined(3, &[1]), Service::committed()] {
        let _ = service.accepted(speaks(2, 7));
        assert_eq!(
            service.cluster.agents[&key(1)].session,
            Some(AgentSession { boot: 2, nonce: 7 })
        );
        assert_eq!(variant(&service.refused(speaks(1, 101))), "KeyElsewhere");
        let outcome = service.step(speaks(2, 8));
        assert_eq!(outcome.alarms, [Alarm::KeyElsewhere { key: key(1) }]);
        let _ = service.accepted(speaks(2, 7));
        let stranger = ClusterEvent::SessionSeen { key: key(9), session: session(9, 1) };
        assert_eq!(variant(&service.refused(stranger)), "UnknownKey");
    }
}

#[test]
fn a_release_is_stored_at_any_time_and_never_lowered() {
    let mut service = Service::joined(3, &[1]);
    let release = |epoch| ClusterEvent::Release {
        key: key(1),
        release: Release { epoch, jws: Arc::from("release") },
    };
    let _ = service.accepted(release(2));
    let _ = service.accepted(release(1));
    let stored = service.cluster.agents[&key(1)].release.as_ref().map(|release| release.epoch);
    assert_eq!((stored, service.cluster.floor), (Some(2), 2));
}

#[test]
fn a_record_is_refused_while_a_live_agent_has_its_name_url_or_machine() {
    let mut service = Service::joined(3, &[1]);
    let like = |change: fn(&mut AgentRecord)| {
        let mut record = plain_record(2);
        change(&mut record);
        redeem_with(Arc::new(record), session(2, 1), 0)
    };
    type Change = fn(&mut AgentRecord);
    let cases: [(Change, RefusalCode); 4] = [
        (|record| record.name = "host-1".to_owned(), RefusalCode::Conflict),
        (|record| record.peer_urls = plain_record(1).peer_urls, RefusalCode::Conflict),
        (|record| record.machine = plain_record(1).machine, RefusalCode::Conflict),
        (
            |record| record.peer_urls = vec!["https://127.0.0.1:2380".into()],
            RefusalCode::RecordRefused,
        ),
    ];
    for (change, code) in cases {
        assert_eq!(service.refused(like(change)).code(), code);
    }
    assert_eq!(service.cluster.agents.len(), 1, "nothing is consumed");
    service.pass_seconds(90);
    let _ = service.accepted(like(|record| record.name = "host-1".to_owned()));
}

#[test]
fn a_token_admits_no_new_key_once_expired_revoked_or_full() {
    let mut service = Service::joined(1, &[1]);
    service.pass_seconds(3_600);
    assert_eq!(variant(&service.refused(redeem(2))), "GrantExpired");
    let _ = service.accepted(redeem(1));
    let mut service = Service::joined(1, &[1]);
    let _ = service.accepted(ClusterEvent::GrantRevoked {
        grant: GrantId(Arc::from("boot")),
        frees_seats: false,
    });
    assert_eq!(variant(&service.refused(redeem(2))), "GrantRevoked");
    let mut service = Service::joined(1, &[1, 2, 3]);
    assert_eq!(variant(&service.refused(redeem(4))), "TooManyKeys");
}

fn free_seats() -> ClusterEvent {
    ClusterEvent::GrantRevoked { grant: grant().id, frees_seats: true }
}

/// Redeems a second token, other than [`grant`]'s, with the host's key.
fn redeem_another_token(host: u8, boot: u64) -> ClusterEvent {
    let id = GrantId(Arc::from("another"));
    let record = AgentRecord { grant: id.clone(), hash: Hash([host; 32]), ..plain_record(host) };
    ClusterEvent::Redeem(Redeem {
        record: Arc::new(record),
        session: session(host, boot),
        highest_epoch: 0,
        grant: Grant { id, ..grant() },
    })
}

#[test]
fn freed_seats_are_for_hosts_with_another_token() {
    let mut service = Service::joined(3, &[1, 2, 3, 4]);
    assert_eq!(service.cluster.phase, Phase::Preparing);
    let freed = service.step(free_seats());
    assert!(freed.changes.contains(&ClusterChange::SeatFreed { key: key(4) }));
    let reopened = freed.changes.iter().any(|change| {
        matches!(change, ClusterChange::Reopened { epoch: 2, why: ReopenReason::SeatFreed(_) })
    });
    assert!(reopened, "{:?}", freed.changes);
    assert!(service.cluster.seats().is_empty() && service.cluster.standbys().is_empty());
    assert_eq!(variant(&service.refused(ack(1, 1, &[1, 2, 3]))), "StaleEpoch");
    for host in [1, 4] {
        assert_eq!(variant(&service.refused(poll(host))), "GrantRevoked");
        assert_eq!(variant(&service.refused(redeem(host))), "GrantRevoked");
    }
    // Freeing the seats a second time changes nothing.
    assert!(service.step(free_seats()).changes.is_empty());
    // A new host and one of the earlier hosts redeem another token.
    let fifth = service.accepted(redeem_another_token(5, 1));
    assert_eq!(fifth.standing, Some(AgentStanding::Seat(1)));
    let first = service.accepted(redeem_another_token(1, 2));
    assert_eq!(first.standing, Some(AgentStanding::Seat(2)));
    assert_eq!(variant(&service.refused(poll(2))), "GrantRevoked");
}

/// A known key that comes with another token is judged like a new key.
#[test]
fn a_known_key_gets_nothing_from_a_token_that_admits_no_new_key() {
    let mut service = Service::joined(3, &[1, 2]);
    let another = GrantId(Arc::from("another"));
    let revoked = ClusterEvent::GrantRevoked { grant: another, frees_seats: false };
    let _ = service.accepted(revoked);
    assert_eq!(variant(&service.refused(redeem_another_token(1, 2))), "GrantRevoked");
    let _ = service.accepted(free_seats());
    assert_eq!(variant(&service.refused(redeem_another_token(1, 2))), "GrantRevoked");
    let mut late = Service::joined(3, &[1, 2]);
    late.pass_seconds(3_600);
    assert_eq!(variant(&late.refused(redeem_another_token(1, 2))), "GrantExpired");
}

#[test]
fn seats_of_a_decided_list_are_not_freed() {
    let mut service = Service::committed();
    let before = service.cluster.clone();
    let freed = service.step(free_seats());
    assert_eq!(freed.changes, [ClusterChange::GrantRevoked]);
    assert_eq!(service.cluster.agents, before.agents);
    assert!(service.accepted(poll(1)).document.is_some());
    assert!(service.accepted(redeem(2)).document.is_some());
}

#[test]
fn abandon_ends_a_forming_cluster_and_is_refused_after_the_commit() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let _ = service.accepted(ClusterEvent::Abandon { by: "ann".to_owned() });
    let refusal = service.refused(ack(1, 1, &[1, 2, 3]));
    assert_eq!(refusal.code(), RefusalCode::Abandoned);
    let mut service = Service::committed();
    let refusal = service.refused(ClusterEvent::Abandon { by: "ann".to_owned() });
    assert_eq!(variant(&refusal), "AlreadyCommitted");
    assert!(refusal.remedy(FormationSettings::DEFAULT.lease).contains("retire"));
    let _ = service.accepted(ClusterEvent::Retire { by: "ann".to_owned() });
    assert_eq!(service.cluster.phase, Phase::Retired);
}

#[test]
fn the_deadline_ends_a_cluster_that_is_not_committed() {
    let mut service = Service::joined(3, &[1, 2]);
    service.pass_seconds(86_400);
    assert_eq!(variant(&service.refused(poll(1))), "Ended");
    let mut service = Service::committed();
    service.pass_seconds(86_400);
    assert!(service.accepted(poll(1)).document.is_some());
}

#[test]
fn explain_shows_the_trouble_that_members_report_and_no_other() {
    let trouble =
        |host| ClusterEvent::Trouble { key: key(host), text: "no route to db-2".to_owned() };
    let mut service = Service::joined(3, &[1]);
    assert!(matches!(service.refused(trouble(1)), Refusal::NotCommitted { .. }));
    let mut service = Service::committed();
    assert!(matches!(service.refused(trouble(9)), Refusal::BootClosed { .. }));
    let _ = service.accepted(trouble(1));
    let lines = explain(&service.cluster, &FormationSettings::DEFAULT, service.now);
    let told = lines[0].last_error.as_deref().unwrap_or_default();
    assert!(told.contains("no route to db-2") && told.starts_with("host-1"), "{lines:?}");
}

#[test]
fn explain_names_an_agent_that_waits_for_releases_first() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let reason = "unreleased: S6: of the 2 releases that end the list of epoch 1, 1 are here";
    let _ =
        service.accepted(ClusterEvent::Nack { key: key(2), epoch: 1, reason: reason.to_owned() });
    let lines = explain(&service.cluster, &FormationSettings::DEFAULT, service.now);
    assert!(!lines.is_empty());
    for line in lines {
        let told = &line.remedy;
        assert!(
            told.contains("run `muster-agent reset` on it") && told.contains("host-2"),
            "{told}"
        );
    }
    let mut service = Service::joined(3, &[1, 2, 3]);
    let _ = service.accepted(nack(2, 1));
    let lines = explain(&service.cluster, &FormationSettings::DEFAULT, service.now);
    assert!(lines.iter().all(|line| !line.remedy.contains("reset")), "{lines:?}");
}

#[test]
fn a_cluster_is_formed_once_a_majority_reports_one_raft_cluster() {
    let mut service = Service::committed();
    let report = |host, raft_cluster| ClusterEvent::Report { key: key(host), raft_cluster };
    assert_eq!(service.accepted(report(1, 7)).phase, Phase::Committed);
    assert_eq!(service.accepted(report(2, 8)).phase, Phase::Committed, "another Raft cluster");
    assert_eq!(service.accepted(report(3, 7)).phase, Phase::Formed);
    assert_eq!(variant(&service.refused(report(4, 7))), "BootClosed");
}

#[test]
fn a_next_statement_reopens_the_cluster_if_it_keeps_size_and_sequence() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let mut next = statement(3);
    next.hash = Hash([201; 32]);
    next.sequence = 3;
    assert_eq!(
        variant(&service.refused(ClusterEvent::StatementAdded(next.clone()))),
        "StatementOutOfOrder"
    );
    next.sequence = 2;
    let larger = crate::values::Statement { size: 5, ..next.clone() };
    assert_eq!(variant(&service.refused(ClusterEvent::StatementAdded(larger))), "StatementFixed");
    let _ = service.accepted(ClusterEvent::StatementAdded(next));
    assert_eq!((service.cluster.phase, service.cluster.epoch), (Phase::Preparing, 2));
}

#[test]
fn no_list_is_frozen_in_a_changed_database_until_it_is_settled() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    let _ = service.accepted(ClusterEvent::DatabaseChanged);
    assert_eq!((service.cluster.phase, service.cluster.epoch), (Phase::Open, 2));
    assert_eq!(service.accepted(poll(1)).phase, Phase::Open);
    let lines = explain(&service.cluster, &FormationSettings::DEFAULT, service.now);
    assert_eq!(lines[0].code, "database_changed");
    assert_eq!(
        variant(&service.refused(ClusterEvent::Abandon { by: "ann".to_owned() })),
        "Unsettled"
    );
    let _ = service.accepted(ClusterEvent::DatabaseSettled);
    assert_eq!(service.cluster.phase, Phase::Preparing);
}

#[test]
fn a_shown_document_is_adopted_and_a_second_one_stops_everything() {
    let mut service = Service::joined(3, &[1, 4]);
    let outcome = service.step(ClusterEvent::Adopt(document(1, &[1, 2, 3])));
    assert_eq!(outcome.committed, Some(document(1, &[1, 2, 3]).proposal_hash));
    assert!(service.accepted(poll(1)).document.is_some());
    assert_eq!(variant(&service.refused(poll(4))), "BootClosed");
    let _ = service.accepted(ClusterEvent::Adopt(document(1, &[1, 2, 3])));
    let second = service.step(ClusterEvent::Adopt(document(2, &[3, 4, 5])));
    assert_eq!(variant(&second.answer.expect_err("a second one")), "Split");
    assert!(matches!(second.alarms[..], [Alarm::Split { .. }]));
    assert_eq!(variant(&service.refused(poll(1))), "Split");
    let _ = service.accepted(ClusterEvent::Retire { by: "ann".to_owned() });
}

#[test]
fn a_document_undoes_db_accept_and_no_other_end() {
    let mut service = Service::joined(3, &[1]);
    let _ = service.accepted(ClusterEvent::DatabaseAccepted { by: "ann".to_owned() });
    let cause = service.cluster.ended.as_ref().map(|ended| ended.cause);
    assert_eq!(cause, Some(EndCause::DatabaseAccepted));
    // The cluster may still come back, so the service must not confirm that it was abandoned.
    assert_eq!(variant(&service.refused(ClusterEvent::Abandon { by: "ann".to_owned() })), "Ended");
    let _ = service.accepted(ClusterEvent::Adopt(document(1, &[1, 2, 3])));
    assert_eq!(service.cluster.phase, Phase::Committed);
    let mut service = Service::joined(3, &[1]);
    let _ = service.accepted(ClusterEvent::Abandon { by: "ann".to_owned() });
    assert_eq!(variant(&service.refused(ClusterEvent::Adopt(document(1, &[1, 2, 3])))), "Ended");
}

#[test]
fn every_wait_has_a_reason_and_a_way_out() {
    let mut waits =
        vec![Service::joined(3, &[1]), Service::joined(3, &[1, 2, 3]), Service::committed()];
    let mut held = Service::joined(3, &[1, 2, 3]);
    let _ = held.accepted(nack(2, 1));
    waits.push(held);
    let mut ended = Service::joined(3, &[1]);
    let _ = ended.accepted(ClusterEvent::Abandon { by: "ann".to_owned() });
    waits.push(ended);
    let mut codes = Vec::new();
    for service in &waits {
        let lines = explain(&service.cluster, &FormationSettings::DEFAULT, service.now);
        assert!(!lines.is_empty(), "{:?}", service.cluster.phase);
        assert!(lines.iter().all(|line| !line.explanation.is_empty() && !line.remedy.is_empty()));
        codes.push(lines[0].code);
    }
    let expected = ["seats_free", "acks_missing", "nodes_not_reported", "held_back", "abandoned"];
    assert_eq!(codes, expected);
    assert_eq!(waits[0].cluster.id, CLUSTER);
}
