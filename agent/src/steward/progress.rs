//! Tracks whether a newcomer catches up with the leader.

use std::time::Duration;

use discovery_types::record::VerifiedRecord;
use discovery_types::url::NodeUrl;
use tokio::time::Instant;

use crate::cluster::{ClusterApiClient, MemberList, NodeStatus};
use crate::plan::MemberState;

/// How long a newcomer may make no progress before it is removed again.
const STALLED_AFTER: Duration = Duration::from_secs(300);

/// A newcomer's progress in applying the log.
#[derive(Debug)]
pub(super) struct NewcomerProgress {
    /// The newcomer's highest known applied index; `None` if its node was never reached.
    applied_index: Option<u64>,
    /// State of the newcomer's node when it was asked last.
    state: MemberState,
    /// When `applied_index` last advanced.
    since: Instant,
    /// Text of the cluster's last refusal to promote the newcomer.
    last_refusal: String,
}

impl Default for NewcomerProgress {
    fn default() -> Self {
        Self {
            applied_index: None,
            state: MemberState::NotStarted,
            since: Instant::now(),
            last_refusal: String::new(),
        }
    }
}

impl NewcomerProgress {
    /// Asks the newcomer's node for its status, and records its state and progress.
    pub(super) async fn observe(
        &mut self,
        node: &ClusterApiClient,
        record: &VerifiedRecord,
        members: &MemberList,
        leader: &NodeStatus,
    ) {
        let urls: Vec<String> = record.peer_urls.iter().map(NodeUrl::to_string).collect();
        let newcomer = members.of_peer_urls(&urls).filter(|member| member.is_started());
        let said = match newcomer {
            Some(member) => node.status_of(member).await.ok(),
            None => None,
        };
        self.state = match (newcomer, &said) {
            (None, _) => MemberState::NotStarted,
            (Some(_), None) => MemberState::Silent,
            (Some(_), Some(said)) => {
                let behind = leader.raft_index.saturating_sub(said.applied_index);
                MemberState::Answers { behind: Some(behind) }
            }
        };
        self.record_applied_index(
            said.map(|said| said.applied_index),
            leader.applied_index,
            Instant::now(),
        );
    }

    /// Records the newcomer's applied index. A newcomer that has all of the leader's entries makes
    /// no progress, but is not stalled.
    fn record_applied_index(&mut self, applied: Option<u64>, leader: u64, now: Instant) {
        if applied > self.applied_index || applied.is_some_and(|applied| applied >= leader) {
            self.applied_index = applied.max(self.applied_index);
            self.since = now;
        }
    }

    /// Returns the state of the newcomer's node when it was asked last.
    pub(super) fn state(&self) -> MemberState {
        self.state
    }

    pub(super) fn record_refusal(&mut self, text: &str) {
        text.clone_into(&mut self.last_refusal);
    }

    /// Returns whether the newcomer has made no progress for too long.
    pub(super) fn is_stalled(&self) -> bool {
        self.since.elapsed() >= stalled_after()
    }

    /// Returns the reason of a stall, for people.
    pub(super) fn why_stalled(&self) -> String {
        let far = match self.applied_index {
            None => "its node was not heard of".to_owned(),
            Some(index) => format!("its node stood still at entry {index}"),
        };
        let seconds = stalled_after().as_secs();
        let text = format!("{far} for {seconds} s: see muster-agent status on that host");
        if self.last_refusal.is_empty() { text } else { format!("{text} ({})", self.last_refusal) }
    }
}

/// Returns the time without progress after which a newcomer counts as stalled. Tests shorten it
/// with the variable `MUSTER_STALLED_AFTER`, in seconds, which a release build doesn't read.
#[cfg(debug_assertions)]
fn stalled_after() -> Duration {
    let seconds = std::env::var("MUSTER_STALLED_AFTER").ok().and_then(|text| text.parse().ok());
    seconds.map_or(STALLED_AFTER, Duration::from_secs)
}

#[cfg(not(debug_assertions))]
fn stalled_after() -> Duration {
    STALLED_AFTER
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_newcomer_that_advances_or_is_complete_is_not_stalled() {
        let mut progress = NewcomerProgress::default();
        let step = Duration::from_secs(200);
        for applied in [Some(1), Some(2), Some(3)] {
            tokio::time::advance(step).await;
            progress.record_applied_index(applied, 1_000, Instant::now());
            assert!(!progress.is_stalled());
        }
        for _ in 0..3 {
            tokio::time::advance(step).await;
            progress.record_applied_index(Some(1_000), 1_000, Instant::now());
            assert!(!progress.is_stalled(), "it waits for the others");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_newcomer_that_stops_or_is_unreachable_is_stalled() {
        let mut progress = NewcomerProgress::default();
        progress.record_applied_index(Some(7), 1_000, Instant::now());
        for applied in [Some(7), None, Some(6)] {
            tokio::time::advance(Duration::from_secs(100)).await;
            assert_eq!(progress.is_stalled(), applied == Some(6));
            progress.record_applied_index(applied, 1_000, Instant::now());
        }
        assert!(progress.why_stalled().contains("entry 7"));
        let silent = NewcomerProgress::default();
        tokio::time::advance(STALLED_AFTER).await;
        assert!(silent.is_stalled() && silent.why_stalled().contains("not heard of"));
    }
}
