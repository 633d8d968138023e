//! Messages with which a leader confirms reads, some of which are held back at first.

use std::mem;

use node_consensus::{MessageKind, Ready, Role};

use super::DriverCore;

impl DriverCore {
    /// Sends the messages of `ready`, except heartbeats for reads that are held back because the
    /// quickest quorum probably answers without them.
    pub(super) fn send_ready_messages(&mut self, ready: &mut Ready) {
        for state in &ready.reads {
            self.read_heartbeats.confirm(&state.context.to_bytes());
        }
        for message in mem::take(&mut ready.messages) {
            if message.kind == MessageKind::ReadIndexResponse
                && let Some(request) = message.entries.first()
            {
                // The only entry is that of the follower's request, which carries the context.
                self.read_heartbeats.confirm(&request.data);
            }
            if self.has_ticked {
                // The heartbeats of the tick are among these messages.
                self.send(message);
                continue;
            }
            let (members, connected) = (self.consensus.members(), &self.connected);
            if let Some(message) =
                self.read_heartbeats.pass(message, self.member, members, connected)
            {
                self.send(message);
            }
        }
    }

    /// Sends all heartbeats for reads that were held back. From now on, other voters than `peer`
    /// are asked first, because `peer` might not get or answer a message.
    pub(super) fn stop_waiting_for_read_answer(&mut self, peer: u64) {
        self.read_heartbeats.record_loss(peer);
        self.send_held_heartbeats();
    }

    /// Sends all heartbeats for reads that were held back in the current term.
    pub(super) fn send_held_heartbeats(&mut self) {
        let (role, _, term) = self.consensus.leadership();
        self.read_heartbeats.keep_term((role == Role::Leader).then_some(term));
        for message in self.read_heartbeats.take_held() {
            self.send(message);
        }
    }

    /// Returns the number of the last read round if the start of the next one is delayed, so that
    /// more reads share it. If the number stays the same for
    /// [`READ_ROUND_DELAY`](crate::driver::READ_ROUND_DELAY), the caller passes
    /// [`Notice::StartReadRound`](crate::driver::Notice::StartReadRound).
    pub fn delayed_read_round(&self) -> Option<u64> {
        self.reads.delayed_round()
    }

    /// Returns a number for the oldest read round some of whose heartbeats are held back. If the
    /// same round is the oldest for [`READ_HEARTBEAT_DELAY`](crate::driver::READ_HEARTBEAT_DELAY),
    /// the caller passes [`Notice::SendHeldHeartbeats`](crate::driver::Notice::SendHeldHeartbeats).
    pub fn oldest_held_heartbeats(&self) -> Option<u64> {
        self.read_heartbeats.oldest_held()
    }
}
