//! One round of the core thread: it passes inputs to the [`DriverCore`], and executes the effects.
//! This module has no clock, no thread and no I/O of its own.
//!
//! The destination of an effect may refuse it. For example, a peer's queue is full, a snapshot's
//! body is gone, or too many fetches wait. Consensus waits for an answer to each effect, so this
//! module reports every loss to it. No other module does.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use node_consensus::{FetchRequest, Message, Position, StepError};
use node_state::state_machine::RequestId;

use super::driver_core::{DriverCore, Effects};
use super::mail::{Mail, Notice, ReadToken};
use super::{ApplyJob, DriverMetrics, LogJob, SendError};

/// Destinations of a round's effects. No method waits for a result. A [`Notice`] reports the result
/// later.
pub trait EffectSink {
    /// Queues a message for the peer `message.to`.
    fn send(&mut self, message: Message) -> Result<(), SendError>;
    /// Starts to send the snapshot that `message` announces; [`Notice::SnapshotSent`] reports the
    /// end. Returns false if the snapshot's body doesn't exist. In that case no notice follows.
    fn send_snapshot(&mut self, message: Message) -> bool;
    /// Queues a job for the log.
    fn log(&mut self, job: LogJob);
    /// Queues a job for the state machine.
    fn apply(&mut self, job: ApplyJob);
    /// Starts to read old entries. Returns false if too many fetches wait already.
    fn fetch(&mut self, fetch: FetchRequest) -> bool;
    /// Removes the snapshot body that was built last.
    fn drop_snapshot(&mut self);
    /// Removes the body of a received snapshot that is not needed.
    fn discard(&mut self, body: &Path);
    /// Queues a notice for the next round.
    fn notice(&mut self, notice: Notice);
    /// Reports that consensus refused a peer's message.
    fn bad_message(&mut self, error: &StepError);
    /// Reports proposals that will never have an effect.
    fn refuse_proposals(&mut self, proposals: Vec<RequestId>);
    /// Reports proposals to a leader whose process has ended. They probably never take effect.
    fn lose_proposals(&mut self, proposals: Vec<RequestId>);
    /// Reports reads that may be answered once the store has applied the given position.
    fn release_reads(&mut self, reads: Vec<(ReadToken, Position)>);
    /// Reports reads that were refused because too many reads wait already.
    fn refuse_reads(&mut self, reads: Vec<ReadToken>);
}

/// Owner of the driver. The core thread runs it in production, and the simulation runs it on
/// simulated events.
#[derive(Debug)]
pub struct RoundRunner {
    driver: DriverCore,
    metrics: Arc<DriverMetrics>,
}

impl RoundRunner {
    /// Wraps `driver`. Call [`round`](Self::round) once without inputs, because the new driver may
    /// already have effects.
    pub fn new(driver: DriverCore, metrics: Arc<DriverMetrics>) -> Self {
        Self { driver, metrics }
    }

    /// Returns the driver, read-only.
    pub fn driver(&self) -> &DriverCore {
        &self.driver
    }

    /// Returns whether the next round has work even without new inputs.
    pub fn has_more(&self) -> bool {
        self.driver.has_more()
    }

    /// Runs one round on `mail`, and on one tick if `tick` is true. A pause of many ticks counts as
    /// one tick. During the pause this member could not receive the leader's heartbeats, so the
    /// pause must not make it campaign.
    pub fn round(&mut self, mail: Mail, tick: bool, out: &mut impl EffectSink) {
        self.metrics.messages_received.fetch_add(mail.messages.len() as u64, Relaxed);
        self.metrics.proposals.fetch_add(mail.proposals.len() as u64, Relaxed);
        for notice in mail.notices {
            self.driver.notice(notice);
        }
        for message in mail.messages {
            self.driver.message(message);
        }
        self.driver.propose(mail.proposals);
        self.driver.read(mail.reads);
        if tick {
            self.driver.tick();
        }
        let effects = self.driver.advance();
        self.execute(effects, out);
    }

    fn execute(&self, effects: Effects, out: &mut impl EffectSink) {
        let metrics = &*self.metrics;
        self.send(effects.send, out);
        for message in effects.send_snapshots {
            let peer = message.to;
            if out.send_snapshot(message) {
                metrics.snapshots_sent.fetch_add(1, Relaxed);
            } else {
                out.notice(Notice::SnapshotSent { peer, arrived: false });
            }
        }
        for (number, batch) in effects.persist {
            out.log(LogJob::Write(number, batch));
        }
        for fetch in effects.fetches {
            if !out.fetch(fetch) {
                out.notice(Notice::Fetched { id: fetch.id, entries: Vec::new() });
            }
        }
        if let Some(through) = effects.compact {
            out.log(LogJob::Compact(through));
        }
        if !effects.apply.is_empty() {
            out.apply(ApplyJob::Apply(effects.apply));
        }
        if let Some((at, body)) = effects.install {
            out.apply(ApplyJob::Install(at, body));
        }
        if effects.build_snapshot {
            out.apply(ApplyJob::Build);
        }
        if effects.drop_snapshot {
            out.drop_snapshot();
        }
        effects.discard.iter().map(PathBuf::as_path).for_each(|body| out.discard(body));
        metrics.messages_refused.fetch_add(effects.bad_messages.len() as u64, Relaxed);
        effects.bad_messages.iter().for_each(|error| out.bad_message(error));
        if !effects.refused_proposals.is_empty() {
            metrics.proposals_refused.fetch_add(effects.refused_proposals.len() as u64, Relaxed);
            out.refuse_proposals(effects.refused_proposals);
        }
        if !effects.lost_proposals.is_empty() {
            out.lose_proposals(effects.lost_proposals);
        }
        if !effects.reads.is_empty() {
            metrics.reads.fetch_add(effects.reads.len() as u64, Relaxed);
            out.release_reads(effects.reads);
        }
        if !effects.refused_reads.is_empty() {
            out.refuse_reads(effects.refused_reads);
        }
        metrics.read_rounds.store(self.driver.read_rounds(), Relaxed);
    }

    /// Sends messages. If messages to a peer were dropped, reports that peer to consensus, once.
    /// Consensus then sends the peer only one append at a time until it answers (Raft's probe
    /// state).
    fn send(&self, messages: Vec<Message>, out: &mut impl EffectSink) {
        let (mut sent, mut dropped) = (0, 0);
        let mut lost = Vec::new();
        for message in messages {
            let to = message.to;
            if out.send(message).is_ok() {
                sent += 1;
            } else {
                dropped += 1;
                if !lost.contains(&to) {
                    lost.push(to);
                }
            }
        }
        self.metrics.messages_sent.fetch_add(sent, Relaxed);
        self.metrics.messages_dropped.fetch_add(dropped, Relaxed);
        for peer in lost {
            out.notice(Notice::Unreachable(peer));
        }
    }
}

#[cfg(test)]
mod tests {
    use node_consensus::{Config, InitialState, Members, MessageKind, PeerState, Role};

    use super::*;
    use crate::driver::DriverOptions;

    /// Records all effects, and refuses those that the test selects.
    #[derive(Default)]
    struct Recorder {
        away: Vec<u64>,
        has_body: bool,
        reads_old_entries: bool,
        sent: Vec<(u64, MessageKind)>,
        log: Vec<LogJob>,
        machine: Vec<ApplyJob>,
        mail: Mail,
    }

    impl EffectSink for Recorder {
        fn send(&mut self, message: Message) -> Result<(), SendError> {
            if self.away.contains(&message.to) {
                return Err(SendError::NotConnected);
            }
            self.sent.push((message.to, message.kind));
            Ok(())
        }

        fn send_snapshot(&mut self, _: Message) -> bool {
            self.has_body
        }

        fn log(&mut self, job: LogJob) {
            self.log.push(job);
        }

        fn apply(&mut self, job: ApplyJob) {
            self.machine.push(job);
        }

        fn fetch(&mut self, _: FetchRequest) -> bool {
            self.reads_old_entries
        }

        fn drop_snapshot(&mut self) {}

        fn discard(&mut self, _: &Path) {}

        fn notice(&mut self, notice: Notice) {
            self.mail.notice(notice);
        }

        fn bad_message(&mut self, _: &StepError) {}

        fn refuse_proposals(&mut self, _: Vec<RequestId>) {}
        fn lose_proposals(&mut self, _: Vec<RequestId>) {}

        fn release_reads(&mut self, _: Vec<(ReadToken, Position)>) {}

        fn refuse_reads(&mut self, _: Vec<ReadToken>) {}
    }

    /// Returns the runner of member 1 of three, just started.
    fn core() -> RoundRunner {
        started(false)
    }

    fn started(campaign_when_connected: bool) -> RoundRunner {
        let members = Members { voters: vec![1, 2, 3], learners: Vec::new() };
        let initial = InitialState { members, ..InitialState::default() };
        let options = DriverOptions {
            campaign_when_connected,
            hasten_first_election: false,
            catch_up_entries: 5,
            proposal_ticks: 100,
            read_retry_ticks: 2,
            min_shared_reads: 4,
            max_backlog_bytes: 128 << 20,
        };
        let driver = DriverCore::new(&Config::new(1, 1, 1), options, &initial).unwrap();
        RoundRunner::new(driver, Arc::default())
    }

    fn notice(notice: Notice) -> Mail {
        let mut mail = Mail::default();
        mail.notice(notice);
        mail
    }

    /// Runs rounds until nothing is left to do. Every write is durable at once.
    fn settle(core: &mut RoundRunner, out: &mut Recorder) {
        loop {
            for job in std::mem::take(&mut out.log) {
                if let LogJob::Write(number, _) = job {
                    out.mail.notice(Notice::Persisted(number));
                }
            }
            let mail = out.mail.take();
            if mail.is_empty() && !core.has_more() {
                return;
            }
            core.round(mail, false, out);
        }
    }

    /// Returns the runner of member 1, which was elected by its own vote and that of member 2.
    fn leader(out: &mut Recorder) -> RoundRunner {
        let mut core = core();
        core.round(notice(Notice::Campaign), false, out);
        settle(&mut core, out);
        for kind in [MessageKind::RequestPreVoteResponse, MessageKind::RequestVoteResponse] {
            out.mail.message(Message { term: 1, ..Message::new(kind, 2, 1) }).unwrap();
            settle(&mut core, out);
        }
        assert_eq!(core.driver().leadership(), (Role::Leader, 1, 1));
        core
    }

    /// The first answers may be lost. A peer sends its answer on a stream that the peer opens. This
    /// stream may be connected later than the one that carried the request.
    #[test]
    fn the_first_member_requests_votes_again_after_lost_answers() {
        let asked = |out: &mut Recorder| {
            let sent = std::mem::take(&mut out.sent).into_iter();
            sent.filter(|(_, kind)| *kind == MessageKind::RequestPreVote)
                .map(|(to, _)| to)
                .collect()
        };
        let mut out = Recorder { away: vec![3], ..Recorder::default() };
        let mut core = started(true);
        core.round(notice(Notice::Connected(2)), false, &mut out);
        settle(&mut core, &mut out);
        assert_eq!(asked(&mut out), [2]);
        out.away.clear();
        core.round(Mail::default(), true, &mut out);
        settle(&mut core, &mut out);
        let mut again: Vec<u64> = asked(&mut out);
        again.sort_unstable();
        assert_eq!(again, [2, 3]);
    }

    #[test]
    fn consensus_is_told_once_of_each_peer_whose_messages_were_dropped() {
        let mut out = Recorder { away: vec![2], ..Recorder::default() };
        let message = |to| Message::new(MessageKind::Append, 1, to);
        let send = vec![message(2), message(3), message(2)];
        let core = core();
        core.execute(Effects { send, ..Effects::default() }, &mut out);
        assert_eq!(out.sent, [(3, MessageKind::Append)]);
        assert!(matches!(out.mail.notices[..], [Notice::Unreachable(2)]));
        assert_eq!(core.metrics.messages_sent.load(Relaxed), 1);
        assert_eq!(core.metrics.messages_dropped.load(Relaxed), 2);
    }

    #[test]
    fn a_leader_that_lost_an_append_goes_back_to_probing() {
        let mut out = Recorder::default();
        let mut core = leader(&mut out);
        let last = core.driver().status().last;
        let ack =
            Message { term: 1, index: last, ..Message::new(MessageKind::AppendResponse, 2, 1) };
        out.mail.message(ack).unwrap();
        settle(&mut core, &mut out);
        let state = |core: &RoundRunner| {
            let peers = core.driver().status().peers;
            peers.iter().find(|peer| peer.member == 2).map(|peer| peer.state)
        };
        assert_eq!(state(&core), Some(PeerState::Replicate));
        out.away.push(2);
        core.round(Mail::default(), true, &mut out);
        settle(&mut core, &mut out);
        assert_eq!(state(&core), Some(PeerState::Probe));
    }

    #[test]
    fn a_snapshot_without_a_body_is_reported_as_not_sent() {
        let announce = || Effects {
            send_snapshots: vec![Message::new(MessageKind::Snapshot, 1, 3)],
            ..Effects::default()
        };
        let core = core();
        let mut out = Recorder::default();
        core.execute(announce(), &mut out);
        let told = &out.mail.notices[..];
        assert!(matches!(told, [Notice::SnapshotSent { peer: 3, arrived: false }]), "{told:?}");
        assert_eq!(core.metrics.snapshots_sent.load(Relaxed), 0);
        let mut out = Recorder { has_body: true, ..Recorder::default() };
        core.execute(announce(), &mut out);
        assert!(out.mail.is_empty(), "whoever sends it tells how that ended");
        assert_eq!(core.metrics.snapshots_sent.load(Relaxed), 1);
    }

    #[test]
    fn a_fetch_that_finds_the_queue_full_is_answered_without_entries() {
        let fetch = FetchRequest { id: 4, low: 1, high: 2, max_bytes: 9 };
        let effects = || Effects { fetches: vec![fetch], ..Effects::default() };
        let mut out = Recorder::default();
        core().execute(effects(), &mut out);
        let told = &out.mail.notices[..];
        assert!(matches!(told, [Notice::Fetched { id: 4, entries }] if entries.is_empty()));
        let mut out = Recorder { reads_old_entries: true, ..Recorder::default() };
        core().execute(effects(), &mut out);
        assert!(out.mail.is_empty());
    }

    #[test]
    fn the_machine_gets_entries_then_an_install_then_a_build() {
        let at = Position { index: 7, term: 1 };
        let entry = node_state::state_machine::CommittedEntry {
            position: Position { index: 1, term: 1 },
            kind: node_state::state_machine::EntryKind::NoOp,
            data: bytes::Bytes::new(),
        };
        let effects = Effects {
            apply: vec![entry],
            install: Some((at, "body".into())),
            build_snapshot: true,
            ..Effects::default()
        };
        let mut out = Recorder::default();
        core().execute(effects, &mut out);
        let jobs = &out.machine[..];
        assert!(
            matches!(jobs, [ApplyJob::Apply(_), ApplyJob::Install(..), ApplyJob::Build]),
            "{jobs:?}"
        );
    }
}
