//! Remaining time of leases, which only the leader's clock knows. Other members send questions
//! about leases to the leader.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{join, join_all};
use node_engine::driver::Role;
use node_proto::command::{LeaseCheckpoint, LeaseExpire, Operation};
use node_proto::musterpb::{LeaseAnswer, LeaseQuestion};
use node_state::identity::MemberId;
use node_state::lease::{Lease, LeaseTable, Lessor, RaftStatus, Renewal, full_ttl_checkpoint};
use prost::Message as _;
use std::sync::atomic::Ordering;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};

use super::context::ApiContext;
use super::error::Error;

/// Interval of checks for expired leases.
const LEASE_EXPIRY_INTERVAL: Duration = Duration::from_millis(100);
/// Answer for a lease that can't be renewed at the moment.
pub(super) const LEASE_BUSY: i64 = -2;
/// Answer for the remaining time of a lease that doesn't exist.
pub(super) const LEASE_UNKNOWN: i64 = -1;

/// The leader's lease clock.
pub(crate) struct LeaseClock {
    lessor: Mutex<Lessor>,
    began: Instant,
}

impl LeaseClock {
    pub(super) fn new(election_timeout: Duration) -> Self {
        Self { lessor: Mutex::new(Lessor::new(election_timeout)), began: Instant::now() }
    }

    fn lock(&self) -> MutexGuard<'_, Lessor> {
        self.lessor.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Result of asking the leader's clock about leases.
struct LeaseReadings {
    term: u64,
    /// TTL or remaining seconds of each lease in the question.
    seconds: Vec<i64>,
    /// Renewed leases for which an entry must first record that their whole TTL is left, from `at`
    /// on.
    to_checkpoint: Vec<Lease>,
    at: Duration,
}

impl ApiContext {
    /// Locks the lease clock, after updating it to the current term and leases. Also returns the
    /// clock's time.
    pub(super) fn clock(&self) -> (MutexGuard<'_, Lessor>, Duration) {
        let seat = {
            let status = self.status.borrow();
            let leads = status.role == Role::Leader;
            RaftStatus { is_leader: leads, term: status.term, applied_term: status.applied.term }
        };
        let (mut lessor, now) = (self.clock.lock(), self.clock.began.elapsed());
        lessor.update(seat, self.store.leases(), now);
        (lessor, now)
    }

    /// Returns the leases as of the last entry applied by this member.
    pub(super) fn leases(&self) -> std::sync::RwLockReadGuard<'_, LeaseTable> {
        self.store.leases().read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a question about leases to the leader. Returns `NotLeader` if the supposed leader
    /// isn't one.
    pub(super) async fn ask_leader_about_leases(
        &self,
        question: LeaseQuestion,
        deadline: Instant,
    ) -> Result<Vec<i64>, Error> {
        let leader = self.wait_for_leader(deadline).await?;
        if leader == self.identity.member_id {
            return self.answer_lease_question(&question).await;
        }
        let Some(peers) = &self.peers else { return Err(Error::NotLeader) };
        // The wait is short: if the leader is unreachable, it may soon have a successor.
        let patience = deadline.min(Instant::now() + self.limits.election_timeout * 2);
        let asked = peers.ask(MemberId(leader), question.encode_to_vec().into());
        let Ok(Ok(answer)) = timeout_at(patience, asked).await else {
            return Err(Error::NotLeader);
        };
        let answer = LeaseAnswer::decode(answer).map_err(|_| Error::NotLeader)?;
        if !answer.refused.is_empty() {
            return Err(Error::from_text(&answer.refused, 0).unwrap_or(Error::NotLeader));
        }
        if answer.seconds.len() != question.ids.len() {
            return Err(Error::NotLeader);
        }
        Ok(answer.seconds)
    }

    /// Answers another member's question about leases. Returns `None` if the request isn't one.
    async fn answer_leases(&self, request: Bytes) -> Option<Bytes> {
        let question = LeaseQuestion::decode(request).ok()?;
        if question.ids.is_empty() {
            return None;
        }
        let answer = match self.answer_lease_question(&question).await {
            Ok(seconds) => LeaseAnswer { refused: String::new(), seconds },
            Err(error) => LeaseAnswer { refused: error.text().into_owned(), seconds: Vec::new() },
        };
        Some(answer.encode_to_vec().into())
    }

    /// Answers a request of another member, of any kind.
    pub async fn answer_member(&self, from: MemberId, request: Bytes) -> Option<Bytes> {
        if let Some(answer) = self.answer_leases(request.clone()).await {
            return Some(answer);
        }
        match self.answer_store(from, request.clone()).await {
            Some(answer) => Some(answer),
            None => self.answer_change(request).await,
        }
    }

    /// Answers a question as the leader. A quorum confirms the leadership after the answer was
    /// determined.
    async fn answer_lease_question(&self, question: &LeaseQuestion) -> Result<Vec<i64>, Error> {
        if !self.leads() {
            return Err(Error::NotLeader);
        }
        let knows_all = {
            let leases = self.leases();
            question.ids.iter().all(|id| leases.has(*id))
        };
        if !knows_all {
            // A lease may have been granted, but the entry isn't applied here yet.
            self.barrier(false).await?;
        }
        let found = self.look_at_clock(question)?;
        if !found.to_checkpoint.is_empty() {
            let said = full_ttl_checkpoint(found.term, found.to_checkpoint.iter().copied());
            match self.propose_as_member(Operation::LeaseCheckpoint(said)).await {
                Ok(_) => {}
                Err(Error::LeaderChanged) => return Err(Error::NotLeader),
                Err(error) => return Err(error),
            }
            let mut lessor = self.clock.lock();
            if lessor.term() == Some(found.term) {
                found
                    .to_checkpoint
                    .iter()
                    .for_each(|lease| lessor.record_full_ttl(lease.id, found.at));
            }
        }
        self.barrier(false).await?;
        let still_leads = {
            let status = self.status.borrow();
            status.role == Role::Leader && status.term == found.term
        };
        if still_leads { Ok(found.seconds) } else { Err(Error::NotLeader) }
    }

    fn look_at_clock(&self, question: &LeaseQuestion) -> Result<LeaseReadings, Error> {
        let (mut lessor, at) = self.clock();
        let term = lessor.term().ok_or(Error::NotLeader)?;
        let mut found = LeaseReadings { term, seconds: Vec::new(), to_checkpoint: Vec::new(), at };
        let mut renewed = 0;
        for id in &question.ids {
            found.seconds.push(if question.renew {
                match lessor.renew(*id, at) {
                    Renewal::Renewed { lease, needs_checkpoint: note } => {
                        renewed += 1;
                        found.to_checkpoint.extend(note.then_some(lease));
                        lease.ttl
                    }
                    Renewal::Busy => LEASE_BUSY,
                    Renewal::Unknown => 0,
                }
            } else {
                let left = lessor.left(*id, at).map(|left| left.as_secs());
                left.map_or(LEASE_UNKNOWN, |left| i64::try_from(left).unwrap_or(i64::MAX))
            });
        }
        self.metrics.leases_renewed.fetch_add(renewed, Ordering::Relaxed);
        Ok(found)
    }

    async fn expire(&self, over: LeaseExpire) {
        let id = over.id;
        if let Err(error) = self.propose_as_member(Operation::LeaseExpire(over)).await {
            tracing::debug!(lease.id = id, error = %error.text(), "a lease that is over was not ended yet");
        }
    }

    async fn propose_checkpoint(&self, noted: Option<LeaseCheckpoint>) {
        let Some(noted) = noted else { return };
        if let Err(error) = self.propose_as_member(Operation::LeaseCheckpoint(noted)).await {
            tracing::debug!(error = %error.text(), "what leases have left was not noted");
        }
    }
}

/// Revokes expired leases and records the remaining time of others, while this member leads. Runs
/// as long as the node.
pub(super) async fn run_lease_clock(context: Arc<ApiContext>) {
    let mut leader = context.leader.clone();
    let mut look = interval(LEASE_EXPIRY_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let changed = tokio::select! {
            _ = look.tick() => Ok(()),
            changed = leader.changed() => changed,
        };
        if changed.is_err() {
            return;
        }
        let (over, noted) = {
            let (mut lessor, now) = context.clock();
            (lessor.expire(now), lessor.due_checkpoint(now))
        };
        if over.is_empty() && noted.is_none() {
            continue;
        }
        context.metrics.leases_expired.fetch_add(over.len() as u64, Ordering::Relaxed);
        let ended = join_all(over.into_iter().map(|over| context.expire(over)));
        // Under another leader these proposals have no effect.
        tokio::select! {
            _ = join(ended, context.propose_checkpoint(noted.clone())) => {}
            changed = leader.changed() => if changed.is_err() { return },
        }
        if let Some(noted) = noted {
            context.clock.lock().finish_checkpoint(&noted);
        }
    }
}
