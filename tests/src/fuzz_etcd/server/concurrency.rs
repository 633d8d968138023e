//! Execution of requests about locks and elections.

use bytes::Bytes;
use node_proto::etcdserverpb::LeaseRevokeRequest;
use node_proto::etcdserverpb::lease_client::LeaseClient;
use node_proto::v3electionpb::election_client::ElectionClient;
use node_proto::v3electionpb::{
    CampaignRequest, LeaderKey, LeaderRequest, ProclaimRequest, ResignRequest,
};
use node_proto::v3lockpb::lock_client::LockClient;
use node_proto::v3lockpb::{LockRequest, LockResponse, UnlockRequest};
use tonic::Status;

use super::{Answer, TokenChannel, anonymise_header, answer};
use crate::fuzz_etcd::concurrency::ConcurrencyCall;

/// Name of a lock that no other request uses.
const SEPARATE_LOCK: &str = "o";

/// Sends a request about a lock or an election, and returns its answer.
pub(in crate::fuzz_etcd) async fn send_concurrency_call(
    call: ConcurrencyCall,
    service: TokenChannel,
) -> Answer {
    let mut lock = LockClient::new(service.clone());
    let mut election = ElectionClient::new(service.clone());
    let leader = |name: &str, key, rev, lease| {
        Some(LeaderKey { name: Bytes::copy_from_slice(name.as_bytes()), key, rev, lease })
    };
    match call {
        ConcurrencyCall::Lock { name, lease } => {
            let request = LockRequest { name: name.into(), lease };
            answer(lock.lock(request).await, |a| &mut a.header)
        }
        ConcurrencyCall::LockOnOwnLease => {
            let done = lock_on_own_lease(service).await;
            let done = done.map(tonic::Response::new);
            answer(done, |a| &mut a.header)
        }
        ConcurrencyCall::Unlock(key) => {
            answer(lock.unlock(UnlockRequest { key }).await, |a| &mut a.header)
        }
        ConcurrencyCall::Campaign { name, lease, value } => {
            let request = CampaignRequest { name: name.into(), lease, value: value.into() };
            answer(election.campaign(request).await, |a| &mut a.header)
        }
        ConcurrencyCall::Proclaim { name, key, revision, lease, value } => {
            let leader = leader(name, key, revision, lease);
            let request = ProclaimRequest { leader, value: value.into() };
            answer(election.proclaim(request).await, |a| &mut a.header)
        }
        ConcurrencyCall::ProclaimNothing => {
            answer(election.proclaim(ProclaimRequest::default()).await, |a| &mut a.header)
        }
        ConcurrencyCall::Resign { name, key, revision, lease } => {
            let request = ResignRequest { leader: leader(name, key, revision, lease) };
            answer(election.resign(request).await, |a| &mut a.header)
        }
        ConcurrencyCall::Leader(name) => {
            let request = LeaderRequest { name: name.into() };
            answer(election.leader(request).await, |a| &mut a.header)
        }
    }
}

/// Takes a lock on a lease that the server creates, then releases the lock and revokes the lease.
/// Returns the answer to the lock request. The lock's key contains a random id, so the answer gets
/// the revisions of the other two answers in place of the key.
async fn lock_on_own_lease(service: TokenChannel) -> Result<LockResponse, Status> {
    let mut lock = LockClient::new(service.clone());
    let mut lease = LeaseClient::new(service);
    let name = Bytes::from_static(SEPARATE_LOCK.as_bytes());
    let mut answer = lock.lock(LockRequest { name, lease: 0 }).await?.into_inner();
    let key = std::mem::take(&mut answer.key);
    let id = std::str::from_utf8(&key).ok().and_then(|key| key.strip_prefix("o/"));
    let id = id.and_then(|id| i64::from_str_radix(id, 16).ok());
    let id = id.ok_or_else(|| Status::internal(format!("a key like {key:?}")))?;
    let mut unlocked = lock.unlock(UnlockRequest { key }).await?.into_inner();
    let mut revoked = lease.lease_revoke(LeaseRevokeRequest { id }).await?.into_inner();
    let (unlocked, revoked) =
        (anonymise_header(&mut unlocked.header), anonymise_header(&mut revoked.header));
    answer.key = format!("unlocked {unlocked:?}, revoked {revoked:?}").into();
    Ok(answer)
}
