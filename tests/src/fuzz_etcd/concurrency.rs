//! Requests about locks and elections, drawn from a seed: few names and few leases. Callers stay in
//! a queue while other requests are made.
//!
//! Requests that are not drawn:
//! - A caller that waits with a lease that the server creates, because its key would have a random
//!   id. `LockOnOwnLease` has such a lease, but gets its lock at once and then releases both.
//! - Ending a caller that waits for a lock and has lost its key, while another caller waits with a
//!   key of the same name. etcd also deletes that second key.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use node_proto::etcdserverpb::{
    CompactionRequest, DeleteRangeRequest, LeaseGrantRequest, PutRequest, RangeRequest,
};
use node_proto::mvccpb::KeyValue;

use super::pending_calls::AnswersByCall;
use super::requests::{CallWithToken, EtcdCall, TokenChoice};
use crate::rng::Rng;

const NAMES: [&str; 2] = ["l", "m"];
const LEASES: [i64; 3] = [1, 2, -4];
/// Lease id that is never granted.
const UNGRANTED_LEASE: i64 = 77;
/// TTL of leases in seconds, longer than any run.
const TTL: i64 = 100_000;
/// Maximum number of waiting callers.
const MAX_WAITING: usize = 5;
/// Maximum number of streams that observe leaders.
const MAX_OBSERVERS: usize = 3;
/// Maximum number of queue entries that later requests may name.
const MAX_QUEUE_ENTRIES: usize = 4;

/// Reason of an intended difference: etcd may grant a lock to a caller whose key is gone.
pub(super) const GRANTED_TOO_LATE: &str = "etcd grants a lock or an election to a caller whose queue key is gone, so perhaps to several \
     callers at once";
/// For each kind of call whose caller's queue key is gone: the beginning of etcd's answer, which
/// grants the request, and this node's answer, which refuses it.
const LATE_ANSWERS: [(&str, &str); 2] = [
    ("CampaignResponse ", "Unknown: election: not leader"),
    ("LockResponse ", "Unknown: mutex: session is expired"),
];

/// A request about a lock or an election.
#[derive(Clone, Debug)]
pub(super) enum ConcurrencyCall {
    Lock {
        name: &'static str,
        lease: i64,
    },
    /// Takes a lock on a lease that the server creates, then releases the lock and revokes the
    /// lease.
    LockOnOwnLease,
    Unlock(Bytes),
    Campaign {
        name: &'static str,
        lease: i64,
        value: &'static str,
    },
    Proclaim {
        name: &'static str,
        key: Bytes,
        revision: i64,
        lease: i64,
        value: &'static str,
    },
    /// Makes a Proclaim request that names no leader.
    ProclaimNothing,
    Resign {
        name: &'static str,
        key: Bytes,
        revision: i64,
        lease: i64,
    },
    Leader(&'static str),
}

/// An entry in the queue of a lock or an election.
#[derive(Clone, Debug)]
struct LockQueueEntry {
    name: &'static str,
    key: Bytes,
    revision: i64,
    lease: i64,
}

/// A caller that waits in the queue of a lock or an election.
#[derive(Clone, Debug)]
struct Waiter {
    name: &'static str,
    lease: i64,
    /// Revision that created the caller's key, once that was observed.
    created: Option<i64>,
}

/// Expected state of the queues of locks and elections: calls and observer streams under way, queue
/// entries, and existing keys.
#[derive(Clone, Debug, Default)]
pub(super) struct QueueState {
    next: u64,
    waiters: BTreeMap<u64, Waiter>,
    observers: BTreeSet<u64>,
    /// Key of the caller that was just dropped, and the revision that created it.
    leaving: Option<(Bytes, i64)>,
    entries: Vec<LockQueueEntry>,
    /// Existing keys, with the revisions that created them.
    keys: BTreeMap<Bytes, i64>,
}

/// Returns the key of the queue entry for a name and a lease.
fn key_of(name: &str, lease: i64) -> Bytes {
    let sign = if lease < 0 { "-" } else { "" };
    format!("{name}/{sign}{:x}", lease.unsigned_abs()).into()
}

impl QueueState {
    /// Records the effect of a request.
    pub(super) fn record_effect(&mut self, call: &EtcdCall) {
        self.leaving = None;
        match call {
            EtcdCall::Begin(number, call) => {
                self.next = number + 1;
                if let ConcurrencyCall::Lock { name, lease }
                | ConcurrencyCall::Campaign { name, lease, .. } = call
                {
                    let waiter = Waiter { name, lease: *lease, created: None };
                    self.waiters.insert(*number, waiter);
                }
            }
            EtcdCall::Observe(number, _) => {
                self.next = number + 1;
                self.observers.insert(*number);
            }
            EtcdCall::Abandon(number) => {
                let waiter = self.waiters.remove(number);
                self.leaving = waiter.and_then(|w| Some((key_of(w.name, w.lease), w.created?)));
                self.observers.remove(number);
            }
            _ => {}
        }
    }

    /// Returns whether every call that must have ended by now has ended, and every waiting call has
    /// its key.
    pub(super) fn is_settled(&mut self, keys: &[KeyValue], ended: &BTreeSet<u64>) -> bool {
        let mut settled = true;
        for (_, waiter) in self.waiters.iter_mut().filter(|(number, _)| !ended.contains(number)) {
            let own = key_of(waiter.name, waiter.lease);
            let found = keys.iter().find(|kv| kv.key == own);
            let created = waiter.created.or(found.map(|kv| kv.create_revision));
            waiter.created = created;
            let prefix = format!("{}/", waiter.name);
            let mut before = keys.iter().filter(|kv| kv.key.starts_with(prefix.as_bytes()));
            // A caller that has no key yet, or is first in its queue, will still be answered.
            settled &= created.is_some_and(|created| before.any(|kv| kv.create_revision < created));
        }
        settled
    }

    /// Returns whether the key of the dropped caller still exists. If the call had arrived, the
    /// server deletes the key once it notices the disconnection.
    pub(super) fn is_leaving(&self, keys: &[KeyValue]) -> bool {
        let Some((key, created)) = &self.leaving else { return false };
        keys.iter().any(|kv| kv.key == *key && kv.create_revision == *created)
    }

    /// Replaces late answers of etcd by this node's refusal, and returns their number. An answer is
    /// late if it grants a lock or an election although the caller's key is gone. Only calls that
    /// the node has refused are considered.
    pub(super) fn replace_late_grants(
        &self,
        keys: &[KeyValue],
        etcd: &mut AnswersByCall,
        node: &AnswersByCall,
    ) -> u64 {
        let mut found = 0;
        for (number, answers) in etcd {
            let created = self.waiters.get(number).and_then(|waiter| waiter.created);
            let is_key_gone =
                created.is_some_and(|at| keys.iter().all(|kv| kv.create_revision != at));
            let [answer] = &mut answers[..] else { continue };
            let late = LATE_ANSWERS.iter().find(|(late, refused)| {
                answer.starts_with(late)
                    && node.get(number).is_some_and(|answers| *answers == [*refused])
            });
            if let (true, Some((_, refused))) = (is_key_gone, late) {
                (*refused).clone_into(answer);
                found += 1;
            }
        }
        found
    }

    /// Removes the calls that have ended on both sides.
    pub(super) fn remove_ended(&mut self, ended: &BTreeSet<u64>) {
        for number in ended {
            self.observers.remove(number);
            self.waiters.remove(number);
        }
    }

    /// Records all keys that exist now. Keys of the queues become entries that later requests may
    /// name.
    pub(super) fn record_keys(&mut self, keys: &[KeyValue]) {
        self.keys = keys.iter().map(|kv| (kv.key.clone(), kv.create_revision)).collect();
        for kv in keys {
            for name in NAMES {
                for lease in LEASES {
                    let is_known = |place: &LockQueueEntry| place.revision == kv.create_revision;
                    if kv.key == key_of(name, lease) && !self.entries.iter().any(is_known) {
                        let (key, revision) = (kv.key.clone(), kv.create_revision);
                        self.entries.push(LockQueueEntry { name, key, revision, lease });
                    }
                }
            }
        }
        let excess = self.entries.len().saturating_sub(MAX_QUEUE_ENTRIES);
        self.entries.drain(..excess);
    }

    /// Returns the calls and streams whose client may be dropped.
    fn droppable_calls(&self) -> Vec<u64> {
        let waiters = self.waiters.iter().filter(|(_, waiter)| {
            let existing = self.keys.get(&key_of(waiter.name, waiter.lease));
            existing.is_none() || existing == waiter.created.as_ref()
        });
        waiters.map(|(number, _)| number).chain(&self.observers).copied().collect()
    }

    /// Returns whether a stream observes an election. Such a stream may still receive a leader.
    pub(super) fn has_observers(&self) -> bool {
        !self.observers.is_empty()
    }
}

pub(super) struct ConcurrencyCallGenerator<'r> {
    pub(super) rng: &'r mut Rng,
    pub(super) queues: &'r QueueState,
    /// Newest revision of the store.
    pub(super) revision: i64,
}

impl ConcurrencyCallGenerator<'_> {
    pub(super) fn draw(&mut self) -> CallWithToken {
        CallWithToken { token: TokenChoice::NoToken, call: self.draw_call() }
    }

    fn one_of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.rng.pick(choices.len())].clone()
    }

    fn draw_call(&mut self) -> EtcdCall {
        let (waiting, observers) = (self.queues.waiters.len(), self.queues.observers.len());
        match self.rng.range(0, 100) {
            0..12 => {
                let (id, ttl) = (self.one_of(&LEASES), TTL);
                EtcdCall::LeaseGrant(LeaseGrantRequest { id, ttl })
            }
            12..18 => EtcdCall::LeaseRevoke(self.one_of(&LEASES)),
            18..44 if waiting < MAX_WAITING => {
                EtcdCall::Begin(self.queues.next, self.draw_waiting_call())
            }
            44..50 if observers < MAX_OBSERVERS => {
                EtcdCall::Observe(self.queues.next, self.one_of(&NAMES))
            }
            50..56 if !self.queues.droppable_calls().is_empty() => {
                let droppable = self.queues.droppable_calls();
                EtcdCall::Abandon(self.one_of(&droppable))
            }
            56..60 => {
                let LockQueueEntry { key, lease, .. } = self.draw_queue_entry();
                let lease = if self.rng.chance(500) { lease } else { 0 };
                let value = Bytes::from_static(b"put");
                EtcdCall::Put(PutRequest { key, value, lease, ..PutRequest::default() })
            }
            60..66 => {
                let key = self.draw_queue_entry().key;
                EtcdCall::Delete(DeleteRangeRequest { key, ..DeleteRangeRequest::default() })
            }
            66..69 => {
                let (key, range_end) = ("l".into(), "n".into());
                EtcdCall::Range(RangeRequest { key, range_end, ..RangeRequest::default() })
            }
            69..71 => {
                let back = i64::try_from(self.rng.range(0, 5)).unwrap_or(0);
                let revision = self.revision - back;
                EtcdCall::Compact(CompactionRequest { revision, physical: true })
            }
            _ => EtcdCall::Concurrency(self.draw_immediate_call()),
        }
    }

    fn draw_waiting_call(&mut self) -> ConcurrencyCall {
        let name = self.one_of(&NAMES);
        let lease = if self.rng.chance(30) { UNGRANTED_LEASE } else { self.one_of(&LEASES) };
        if self.rng.chance(500) {
            ConcurrencyCall::Lock { name, lease }
        } else {
            ConcurrencyCall::Campaign { name, lease, value: self.one_of(&["", "x", "y"]) }
        }
    }

    /// Draws a queue entry that exists or existed, or one that never did.
    fn draw_queue_entry(&mut self) -> LockQueueEntry {
        if !self.queues.entries.is_empty() && self.rng.chance(850) {
            return self.one_of(&self.queues.entries);
        }
        let (name, lease) = (self.one_of(&NAMES), self.one_of(&LEASES));
        let revision = self.one_of(&[-1, 0, 1, self.revision]);
        LockQueueEntry { name, key: key_of(name, lease), revision, lease }
    }

    fn draw_immediate_call(&mut self) -> ConcurrencyCall {
        let LockQueueEntry { name, mut key, revision, mut lease } = self.draw_queue_entry();
        if self.rng.chance(30) {
            key = Bytes::new();
        }
        if self.rng.chance(50) {
            lease = UNGRANTED_LEASE;
        }
        match self.rng.range(0, 100) {
            0..25 => ConcurrencyCall::Unlock(key),
            25..50 => ConcurrencyCall::Proclaim {
                name,
                key,
                revision,
                lease,
                value: self.one_of(&["", "v", "w"]),
            },
            50..53 => ConcurrencyCall::ProclaimNothing,
            53..75 => ConcurrencyCall::Resign { name, key, revision, lease },
            75..92 => ConcurrencyCall::Leader(name),
            _ => ConcurrencyCall::LockOnOwnLease,
        }
    }
}
