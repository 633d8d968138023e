//! Notices by which a leader tells its peers a new commit index.
//!
//! The next append or heartbeat to a peer carries the commit index anyway. So the library sends no
//! message for a new commit index alone ([`raft::Config::skip_bcast_commit`]); without that, each
//! write by a single client would cost every follower two messages instead of one. If no append
//! follows soon, the caller sends notices, see [`Consensus::send_commit_index`].
//!
//! A lost notice isn't repeated: the next heartbeat carries the commit index too.

use std::collections::BTreeMap;

use raft::{Progress, ProgressState, StateRole};

use super::Consensus;
use crate::{Message, MessageKind};

/// Commit indexes that a leader has sent to its peers in one term.
#[derive(Debug, Default)]
pub(super) struct SentCommits {
    term: u64,
    peers: BTreeMap<u64, PeerCommit>,
}

#[derive(Clone, Copy, Debug, Default)]
struct PeerCommit {
    /// Highest commit index that was sent to the peer.
    sent: u64,
    /// Index of the last entry that was appended for a proposal which the peer had forwarded. The
    /// peer's clients wait until the peer learns that this entry is committed.
    awaited: u64,
}

impl SentCommits {
    fn peer(&self, term: u64, peer: u64) -> PeerCommit {
        let current = self.peers.get(&peer).filter(|_| self.term == term);
        current.copied().unwrap_or_default()
    }

    fn peer_mut(&mut self, term: u64, peer: u64) -> &mut PeerCommit {
        if self.term != term {
            *self = Self { term, ..Self::default() };
        }
        self.peers.entry(peer).or_default()
    }

    /// Records the commit index in an outgoing message, if the message carries one.
    pub(super) fn record(&mut self, message: &Message) {
        if matches!(message.kind, MessageKind::Append | MessageKind::Heartbeat) {
            let peer = self.peer_mut(message.term, message.to);
            peer.sent = peer.sent.max(message.commit);
        }
    }

    /// Forgets the peers for which `is_member` returns false.
    pub(super) fn retain(&mut self, is_member: impl Fn(u64) -> bool) {
        self.peers.retain(|peer, _| is_member(*peer));
    }
}

impl Consensus {
    /// Records that `peer` forwarded proposals which are among the entries appended last. Once they
    /// are committed, [`Self::send_commit_index`] with `only_awaited` includes this peer.
    pub fn expect_commit_notice(&mut self, peer: u64) {
        let raft = &self.raw.raft;
        if raft.state == StateRole::Leader && self.members.contains(peer) {
            let (term, last) = (raft.term, raft.raft_log.last_index());
            self.sent_commits.peer_mut(term, peer).awaited = last;
        }
    }

    /// Returns whether a peer lacks this leader's commit index, although no message that carries
    /// the index is on its way. Messages that [`Self::ready`] has yet to yield don't count as sent.
    pub fn has_unsent_commit(&self) -> bool {
        self.peers_without_commit(false).next().is_some()
    }

    /// Makes notices, which are appends without entries, for peers that lack this leader's commit
    /// index. If `only_awaited`, only a peer with newly committed proposals of its own gets one.
    /// Returns whether any notice was made.
    pub fn send_commit_index(&mut self, only_awaited: bool) -> bool {
        let mut peers: Vec<u64> = self.peers_without_commit(only_awaited).collect();
        peers.sort_unstable();
        for peer in &peers {
            self.raw.raft.send_append(*peer);
        }
        !peers.is_empty()
    }

    /// Returns the peers that lack this leader's commit index, and accept a notice of it. A peer
    /// that lacks entries gets the commit index with those entries. A peer that is probed, or is
    /// sent a snapshot, gets it afterwards, or with a heartbeat.
    fn peers_without_commit(&self, only_awaited: bool) -> impl Iterator<Item = u64> {
        let raft = &self.raw.raft;
        let (commit, last) = (raft.raft_log.committed, raft.raft_log.last_index());
        let leads = raft.state == StateRole::Leader && !self.awaits_durability();
        let takes_notice = move |progress: &Progress| {
            progress.state == ProgressState::Replicate
                && progress.next_idx > last
                && !progress.is_paused()
        };
        let lacks_commit = move |peer: u64| {
            let PeerCommit { sent, awaited } = self.sent_commits.peer(raft.term, peer);
            sent < commit && (!only_awaited || (sent < awaited && awaited <= commit))
        };
        raft.prs()
            .iter()
            .filter(move |(peer, progress)| {
                leads && **peer != self.member && takes_notice(progress) && lacks_commit(**peer)
            })
            .map(|(peer, _)| *peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_index_of_an_earlier_term_does_not_count_as_sent() {
        let mut sent = SentCommits::default();
        let append =
            |term, commit| Message { term, commit, ..Message::new(MessageKind::Append, 1, 2) };
        sent.record(&append(1, 9));
        assert_eq!((sent.peer(1, 2).sent, sent.peer(2, 2).sent), (9, 0));
        sent.record(&append(2, 5));
        assert_eq!((sent.peer(1, 2).sent, sent.peer(2, 2).sent), (0, 5));
    }
}
