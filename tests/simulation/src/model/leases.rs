//! Leases of the model. A lease is identified by its id and the index of the entry that granted it.
//! Its keys are all keys whose newest record names the lease.

use std::collections::BTreeMap;

use bytes::Bytes;
use node_proto::command::{LeaseCheckpoint, LeaseExpire};
use node_proto::etcdserverpb::{LeaseGrantRequest, LeaseGrantResponse, LeaseRevokeResponse};
use node_proto::mvccpb::KeyValue;
use node_state::apply::{ApplyError, Outcome, Response};
use node_state::lease::Lease;
use node_state::mvcc::KeyRange;
use node_state::state_machine::Position;

use super::{ReferenceModel, header};

/// A change that a log entry made to a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseEvent {
    Granted(Lease),
    /// A client revoked the lease.
    Revoked(Lease),
    /// The leader proposed to end the lease, because the lease had expired by its clock.
    Expired(Lease),
}

/// The leases that exist, and the changes made to them.
#[derive(Debug, Default)]
pub struct Leases {
    /// Existing leases, by id.
    pub all: BTreeMap<i64, Lease>,
    /// Changes since the caller last took the changes out of this list.
    pub events: Vec<LeaseEvent>,
    /// Number of expiry entries that were committed in a later term than the term of their
    /// proposal.
    pub outdated: u64,
}

impl ReferenceModel {
    pub(super) fn grant(&mut self, request: LeaseGrantRequest, at: Position) -> Outcome {
        let LeaseGrantRequest { id, ttl } = request;
        if self.leases.all.contains_key(&id) {
            return Err(ApplyError::LeaseExists);
        }
        let lease = Lease { id, ttl, remaining_ttl: 0, grant_index: at.index };
        self.leases.all.insert(id, lease);
        self.leases.events.push(LeaseEvent::Granted(lease));
        let (header, error) = (header(self.revision()), String::new());
        Ok(Response::LeaseGrant(LeaseGrantResponse { header, id, ttl, error }))
    }

    pub(super) fn revoke(&mut self, id: i64) -> Outcome {
        let lease = self.leases.all.get(&id).copied().ok_or(ApplyError::LeaseNotFound)?;
        self.leases.events.push(LeaseEvent::Revoked(lease));
        self.end_lease(id)
    }

    pub(super) fn expire(&mut self, expiry: LeaseExpire, at: Position) -> Outcome {
        let outdated = expiry.term != at.term;
        self.leases.outdated += u64::from(outdated);
        if outdated && self.refuses_outdated_expiry {
            return Err(ApplyError::LeaderChanged);
        }
        let lease = self.leases.all.get(&expiry.id).copied().ok_or(ApplyError::LeaseNotFound)?;
        if lease.grant_index != expiry.granted {
            return Err(ApplyError::LeaseNotFound);
        }
        self.leases.events.push(LeaseEvent::Expired(lease));
        self.end_lease(expiry.id)
    }

    pub(super) fn apply_checkpoint(
        &mut self,
        checkpoint: &LeaseCheckpoint,
        at: Position,
    ) -> Outcome {
        if checkpoint.term != at.term {
            return Err(ApplyError::LeaderChanged);
        }
        for noted_lease in &checkpoint.leases {
            if let Some(lease) = self.leases.all.get_mut(&noted_lease.id)
                && lease.grant_index == noted_lease.granted
            {
                lease.remaining_ttl = noted_lease.left;
            }
        }
        Ok(Response::LeasesCheckpointed)
    }

    fn end_lease(&mut self, id: i64) -> Outcome {
        self.leases.all.remove(&id);
        let everything = KeyRange::From(Bytes::from_static(b"\0"));
        let main = self.now.revision + 1;
        for kv in self.records_in(&everything, i64::MAX).into_iter().filter(|kv| kv.lease == id) {
            let tombstone = KeyValue { key: kv.key, mod_revision: main, ..KeyValue::default() };
            self.change(false, tombstone);
        }
        Ok(Response::LeaseRevoke(LeaseRevokeResponse { header: header(self.revision()) }))
    }
}
