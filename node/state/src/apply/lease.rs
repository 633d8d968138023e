//! Entries about leases. Clients grant and revoke leases. The leader's lease clock ends leases and
//! records their remaining time.

use node_proto::command::{LeaseCheckpoint, LeaseExpire};
use node_proto::etcdserverpb::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseRevokeRequest, LeaseRevokeResponse,
};

use super::outcome::{ApplyError, ApplyFailure, Response};
use super::txn::response_header;
use crate::lease::{Lease, MAX_TTL};
use crate::mvcc::Batch;
use crate::state_machine::Position;

pub(super) fn grant(
    batch: &mut Batch<'_>,
    &LeaseGrantRequest { id, ttl }: &LeaseGrantRequest,
    at: Position,
) -> Result<Response, ApplyFailure> {
    if id == 0 || ttl <= 0 {
        // This can't happen: no member proposes a grant with id 0 or without a positive TTL.
        return Err(ApplyError::LeaseNotFound.into());
    }
    if ttl > MAX_TTL {
        return Err(ApplyError::LeaseTtlTooLarge.into());
    }
    if batch.lease(id).is_some() {
        return Err(ApplyError::LeaseExists.into());
    }
    batch.grant(Lease { id, ttl, remaining_ttl: 0, grant_index: at.index });
    let (header, error) = (response_header(batch.revision()), String::new());
    Ok(Response::LeaseGrant(LeaseGrantResponse { header, id, ttl, error }))
}

pub(super) fn revoke(
    batch: &mut Batch<'_>,
    request: &LeaseRevokeRequest,
) -> Result<Response, ApplyFailure> {
    if !batch.revoke(request.id) {
        return Err(ApplyError::LeaseNotFound.into());
    }
    Ok(Response::LeaseRevoke(LeaseRevokeResponse { header: response_header(batch.revision()) }))
}

/// Revokes a lease that has expired by a leader's lease clock. The entry is refused if it is
/// applied in another term than that leader's. It is also refused if the lease was granted by
/// another entry than `over.granted`, because an ID can be granted again later.
pub(super) fn expire(
    batch: &mut Batch<'_>,
    over: &LeaseExpire,
    at: Position,
) -> Result<Response, ApplyFailure> {
    if over.term != at.term && batch.guards().lease_clock_per_term() {
        return Err(ApplyError::LeaderChanged.into());
    }
    match batch.lease(over.id) {
        Some(lease) if lease.grant_index == over.granted => {
            revoke(batch, &LeaseRevokeRequest { id: over.id })
        }
        _ => Err(ApplyError::LeaseNotFound.into()),
    }
}

/// Records the remaining time of leases, as a leader's lease clock measured it. The entry is
/// refused if it is applied in another term than that leader's. A lease that was granted by another
/// entry than the named one is left unchanged, because an ID can be granted again later.
pub(super) fn checkpoint(
    batch: &mut Batch<'_>,
    noted: &LeaseCheckpoint,
    at: Position,
) -> Result<Response, ApplyFailure> {
    if noted.term != at.term {
        return Err(ApplyError::LeaderChanged.into());
    }
    for one in &noted.leases {
        if batch.lease(one.id).is_some_and(|lease| lease.grant_index == one.granted) {
            batch.set_remaining_ttl(one.id, one.left);
        }
    }
    Ok(Response::LeasesCheckpointed)
}
