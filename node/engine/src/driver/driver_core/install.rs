//! Installation of a received snapshot, in three steps that are each durable before the next.

use node_consensus::{Entry, HardState, Members, Message, Position};

use super::{DriverCore, SnapshotInstall, compare_members};
use crate::driver::peers::IncomingSnapshot;
use crate::log::Batch;

impl DriverCore {
    /// Passes a received snapshot to consensus. Discards the snapshot if it can't be installed now.
    pub(super) fn receive_snapshot(&mut self, snapshot: IncomingSnapshot) {
        self.handle_all_ready();
        // The snapshot is dropped while another install is pending. It is also dropped while an
        // earlier output of consensus isn't durable.
        if self.install.is_some() || self.consensus.awaits_durability() {
            self.effects.discard.push(snapshot.body);
            return;
        }
        self.incoming = Some(snapshot.body);
        self.step(snapshot.message);
        self.handle_all_ready();
        // If consensus has accepted the snapshot, its install has taken the body out of `incoming`.
        // A body that is still there is not needed, so it must be removed.
        self.effects.discard.extend(self.incoming.take());
    }

    pub(super) fn begin_install(
        &mut self,
        at: Position,
        ready: u64,
        after: Vec<Message>,
        entries: Vec<Entry>,
    ) {
        let body = self.incoming.take().expect("consensus only sees snapshots that have a body");
        let hard_state = self.lazy_hard_state.take();
        // Until the store has installed the snapshot, the old log stays valid. So this batch must
        // keep the old commit index.
        let old = hard_state.map(|state| HardState { commit: self.persisted_commit, ..state });
        let intent = self.next_batch;
        self.queue_batch(
            Batch { hard_state: old, installing: Some(at), ..Batch::default() },
            0,
            Vec::new(),
        );
        let batch = Batch { hard_state, snapshot: Some(at), entries, ..Batch::default() };
        self.install = Some(SnapshotInstall {
            at,
            body: Some(body),
            intent,
            held_batches: vec![(batch, ready, after)],
        });
    }

    pub(super) fn finish_install(&mut self, at: Position, members: &Members) {
        let install = self.install.take().expect("the store installs what it was given");
        assert_eq!(install.at, at, "the store holds another snapshot than it was given");
        compare_members(at.index, self.members(), members);
        self.configurations.clear();
        self.record_members(at.index);
        self.durable = at;
        self.backlog.clear();
        self.backlog_bytes = 0;
        self.applied = at;
        self.snapshot_batch = Some((self.next_batch, at));
        for (batch, ready, after) in install.held_batches {
            if batch == Batch::default() {
                self.complete_without_write(ready, after);
            } else {
                self.record_backlog(&batch.entries);
                self.queue_batch(batch, ready, after);
            }
        }
    }

    /// Compares the members in a finished snapshot with the configuration that was in force at
    /// `index`. The current configuration may be a newer one.
    pub(super) fn compare_snapshot(&self, index: u64, members: &Members) {
        let then = self.configurations.iter().rev().find(|(from, _)| *from <= index);
        if let Some((_, ours)) = then {
            compare_members(index, ours, members);
        }
    }
}
