//! Requests that this member keeps because it can't serve them yet. Otherwise the senders of such
//! requests would have to wait for a time-out.

use std::collections::BTreeMap;
use std::mem;

use raft::StateRole;

use super::Consensus;
use crate::convert::message_to_raft;
use crate::{Message, MessageKind};

/// Maximum number of read requests that wait for a leader's first commit. Further requests are
/// dropped, and their senders retry later.
const MAX_READ_REQUESTS: usize = 64;

/// Ticks for which a member that hears from its leader keeps an ignored pre-vote request. If the
/// member learns in that time that its leader's process has ended, it answers the request.
const KEPT_PRE_VOTE_TICKS: usize = 2;

/// Requests that this member keeps because it can't serve them yet: reads, the leader's request to
/// take over, and pre-votes.
#[derive(Default)]
pub(super) struct DeferredRequests {
    /// Read index requests that reached a leader before it committed an entry in its term. Until
    /// then the leader doesn't know the read index (Raft dissertation 6.4). etcd's raft.go defers
    /// them too.
    read_requests: Vec<Message>,
    /// The leader's request that this member campaign (`TimeoutNow`), and the number of further
    /// ticks for which the leader waits.
    takeover_request: Option<(Message, usize)>,
    /// The last ignored pre-vote request of each member, and the number of further ticks for which
    /// it is kept. Requests are ignored while this member hears from its leader.
    pre_vote_requests: BTreeMap<u64, (Message, usize)>,
}

impl DeferredRequests {
    /// Advances the clock by one tick; requests whose time is up are dropped.
    pub(super) fn tick(&mut self) {
        let waits = |(request, ticks): (Message, usize)| Some((request, ticks.checked_sub(1)?));
        self.takeover_request = self.takeover_request.take().and_then(waits);
        self.pre_vote_requests.retain(|_, (_, ticks)| {
            let is_kept = *ticks > 0;
            *ticks = ticks.saturating_sub(1);
            is_kept
        });
    }

    /// Keeps the pre-vote request of a member.
    pub(super) fn keep_pre_vote_request(&mut self, request: Message) {
        self.pre_vote_requests.insert(request.from, (request, KEPT_PRE_VOTE_TICKS));
    }

    /// Takes the kept pre-vote requests.
    pub(super) fn take_pre_vote_requests(&mut self) -> Vec<Message> {
        mem::take(&mut self.pre_vote_requests).into_values().map(|(request, _)| request).collect()
    }
}

impl Consensus {
    /// Passes a read index request, of this member or of a peer, to the library. A leader that has
    /// not committed an entry in its term yet keeps the request instead.
    pub(super) fn request_read_index(&mut self, request: Message) {
        let raft = &self.raw.raft;
        if raft.state != StateRole::Leader || raft.commit_to_current_term() {
            let _ = self.raw.step(message_to_raft(request));
        } else if self.deferred.read_requests.len() < MAX_READ_REQUESTS {
            self.deferred.read_requests.push(request);
        }
    }

    /// Handles the read requests that waited for the term's first commit. If this member no longer
    /// leads, it drops them, and the requesters ask the next leader.
    pub(super) fn handle_deferred_reads(&mut self) {
        let raft = &self.raw.raft;
        let leads = raft.state == StateRole::Leader;
        if self.deferred.read_requests.is_empty() || (leads && !raft.commit_to_current_term()) {
            return;
        }
        for request in mem::take(&mut self.deferred.read_requests) {
            if leads {
                let _ = self.raw.step(message_to_raft(request));
            }
        }
    }

    /// Campaigns because the leader transfers its leadership to this member. If a change of members
    /// is committed and not applied here, the library refuses to campaign, and the request is kept.
    pub(super) fn take_over(&mut self, request: Message, ticks: usize) {
        debug_assert_eq!(
            request.kind,
            MessageKind::TimeoutNow,
            "only that message asks for a campaign"
        );
        let _ = self.raw.step(message_to_raft(request.clone()));
        let raft = &self.raw.raft;
        let waits = raft.state == StateRole::Follower && raft.term == request.term;
        if waits && raft.promotable() {
            self.deferred.takeover_request = Some((request, ticks));
        }
    }

    /// Retries a kept request to take over, after an entry was applied: that entry may have been
    /// the obstacle.
    pub(super) fn retry_takeover(&mut self) {
        if let Some((request, ticks)) = self.deferred.takeover_request.take() {
            self.take_over(request, ticks);
            self.after_input();
        }
    }
}
