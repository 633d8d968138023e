//! Requests that come too early, and are kept until they can be served. The sender doesn't repeat
//! such a request, and would learn from a time-out only that it failed.

use std::mem;

use raft::StateRole;

use super::Consensus;
use crate::convert::message_to_raft;
use crate::{Message, MessageKind};

/// Maximum number of read requests that wait for a leader's first commit. Further ones are dropped,
/// and their senders retry later.
const MAX_READ_REQUESTS: usize = 64;

/// Requests that came too early.
#[derive(Default)]
pub(super) struct DeferredRequests {
    /// Read index requests that reached a leader before it committed an entry in its term. Until
    /// then it doesn't know the read index (Raft dissertation 6.4). etcd's raft.go keeps them as
    /// well.
    questions: Vec<Message>,
    /// A leader's request that this member take over, and for how many more ticks that leader
    /// waits.
    takeover_request: Option<(Message, usize)>,
}

impl DeferredRequests {
    /// Advances the clock by one tick; a request to take over is dropped once its time is up.
    pub(super) fn tick(&mut self) {
        let waits = |(told, ticks): (Message, usize)| Some((told, ticks.checked_sub(1)?));
        self.takeover_request = self.takeover_request.take().and_then(waits);
    }
}

impl Consensus {
    /// Asks the leader for its commit index, on behalf of this member or of a peer.
    pub(super) fn request_read_index(&mut self, question: Message) {
        let raft = &self.raw.raft;
        if raft.state != StateRole::Leader || raft.commit_to_current_term() {
            let _ = self.raw.step(message_to_raft(question));
        } else if self.deferred.questions.len() < MAX_READ_REQUESTS {
            self.deferred.questions.push(question);
        }
    }

    /// Handles the read requests that waited for the term's first commit. If this member is no
    /// longer the leader, they are dropped, and the requesters ask the next leader.
    pub(super) fn handle_deferred_reads(&mut self) {
        let raft = &self.raw.raft;
        let leads = raft.state == StateRole::Leader;
        if self.deferred.questions.is_empty() || (leads && !raft.commit_to_current_term()) {
            return;
        }
        for question in mem::take(&mut self.deferred.questions) {
            if leads {
                let _ = self.raw.step(message_to_raft(question));
            }
        }
    }

    /// Campaigns because the leader transfers its leadership to this member. If a change of members
    /// is committed and not applied here, the library refuses to campaign, and the request is kept.
    pub(super) fn take_over(&mut self, told: Message, ticks: usize) {
        debug_assert_eq!(told.kind, MessageKind::TimeoutNow, "nothing else tells it to");
        let _ = self.raw.step(message_to_raft(told.clone()));
        let raft = &self.raw.raft;
        let waits = raft.state == StateRole::Follower && raft.term == told.term;
        if waits && raft.promotable() {
            self.deferred.takeover_request = Some((told, ticks));
        }
    }

    /// Retries a kept request to take over, after an entry was applied: that entry may have been
    /// the obstacle.
    pub(super) fn retry_takeover(&mut self) {
        if let Some((told, ticks)) = self.deferred.takeover_request.take() {
            self.take_over(told, ticks);
            self.after_input();
        }
    }
}
