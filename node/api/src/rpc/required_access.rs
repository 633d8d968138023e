//! Permission that each request needs, and checks of the request's contents.
//!
//! Every request of every unary method is in one of these tables:
//! [`Context::call`](super::ApiContext::call) accepts no other.

use node_proto::etcdserverpb::alarm_request::AlarmAction;
use node_proto::etcdserverpb::{
    AlarmRequest, AuthDisableRequest, AuthEnableRequest, AuthRoleAddRequest, AuthRoleDeleteRequest,
    AuthRoleGetRequest, AuthRoleGrantPermissionRequest, AuthRoleListRequest,
    AuthRoleRevokePermissionRequest, AuthStatusRequest, AuthUserAddRequest,
    AuthUserChangePasswordRequest, AuthUserDeleteRequest, AuthUserGetRequest,
    AuthUserGrantRoleRequest, AuthUserListRequest, AuthUserRevokeRoleRequest, AuthenticateRequest,
    CompactionRequest, DefragmentRequest, DeleteRangeRequest, DowngradeRequest, HashKvRequest,
    HashRequest, LeaseGrantRequest, LeaseLeasesRequest, LeaseRevokeRequest, LeaseTimeToLiveRequest,
    MemberAddRequest, MemberListRequest, MemberPromoteRequest, MemberRemoveRequest,
    MemberUpdateRequest, MoveLeaderRequest, PutRequest, RangeRequest, StatusRequest, TxnRequest,
};
use node_proto::v3electionpb::{
    CampaignRequest, LeaderKey, LeaderRequest, ProclaimRequest, ResignRequest,
};
use node_proto::v3lockpb::{LockRequest, UnlockRequest};
use node_state::apply::{check_delete, check_put, check_range, check_txn};
use node_state::auth::RequestedAccess;
use node_state::membership::PeerUrl;

use super::error::Error;
use super::settings::ApiLimits;

/// A request, with the checks that are made before it is carried out.
pub(crate) trait CheckedRequest {
    /// Returns the permission that the request needs.
    fn access(&self) -> RequestedAccess<'_>;

    /// Checks the contents of the request. The result doesn't depend on the request's sender.
    fn check(&self, _: &ApiLimits) -> Result<(), Error> {
        Ok(())
    }

    /// Whether learners answer the request. A learner does so if its own state is enough for the
    /// answer, even without a leader. To any other request its answer would be outdated.
    fn is_for_learners(&self) -> bool {
        false
    }

    /// Whether the request is about the data. A member whose data differs from the others' refuses
    /// such a request.
    fn is_about_data(&self) -> bool {
        true
    }
}

impl CheckedRequest for RangeRequest {
    fn access(&self) -> RequestedAccess<'_> {
        RequestedAccess::Range(self)
    }

    fn check(&self, _: &ApiLimits) -> Result<(), Error> {
        Ok(check_range(self)?)
    }

    fn is_for_learners(&self) -> bool {
        self.serializable
    }
}

impl CheckedRequest for StatusRequest {
    fn access(&self) -> RequestedAccess<'_> {
        RequestedAccess::AnyUser
    }

    fn is_about_data(&self) -> bool {
        false
    }

    fn is_for_learners(&self) -> bool {
        true
    }
}

impl CheckedRequest for MemberAddRequest {
    fn access(&self) -> RequestedAccess<'_> {
        RequestedAccess::RootRole
    }

    fn check(&self, _: &ApiLimits) -> Result<(), Error> {
        peer_urls(&self.peer_ur_ls).map(|_| ())
    }

    fn is_about_data(&self) -> bool {
        false
    }
}

/// Refuses a request without the leader key, which names the entry in the election's queue.
fn require_leader_key(leader: Option<&LeaderKey>) -> Result<(), Error> {
    leader.map(|_| ()).ok_or(Error::NoLeaderKey)
}

macro_rules! checked {
    ($($request:ident: |$this:pat_param| $access:expr, |$asked:pat_param, $limits:pat_param| $check:expr;)*) => {
        $(impl CheckedRequest for $request {
            fn access(&self) -> RequestedAccess<'_> {
                let $this = self;
                $access
            }

            fn check(&self, $limits: &ApiLimits) -> Result<(), Error> {
                let $asked = self;
                $check?;
                Ok(())
            }
        })*
    };
}

checked! {
    PutRequest: |put| RequestedAccess::Put(put), |put, _| check_put(put);
    DeleteRangeRequest: |delete| RequestedAccess::DeleteRange(delete), |delete, _| check_delete(delete);
    TxnRequest: |txn| RequestedAccess::Txn(txn), |txn, limits| check_txn(txn, limits.max_txn_ops);
    ProclaimRequest: |_| RequestedAccess::AnyUser, |say, _| require_leader_key(say.leader.as_ref());
    ResignRequest: |_| RequestedAccess::AnyUser, |resign, _| require_leader_key(resign.leader.as_ref());
}

macro_rules! asked {
    ($is_about_data:literal: $($request:ident: |$this:pat_param| $access:expr;)*) => {
        $(impl CheckedRequest for $request {
            fn access(&self) -> RequestedAccess<'_> {
                let $this = self;
                $access
            }

            fn is_about_data(&self) -> bool {
                $is_about_data
            }
        })*
    };
}

asked! { true:
    CompactionRequest: |_| RequestedAccess::RootRole;
    LeaseGrantRequest: |_| RequestedAccess::AnyUser;
    LeaseRevokeRequest: |revoke| RequestedAccess::LeaseRevoke(revoke.id);
    LeaseTimeToLiveRequest: |asked| if asked.keys { RequestedAccess::LeaseKeys(asked.id) } else { RequestedAccess::AnyUser };
    LeaseLeasesRequest: |_| RequestedAccess::ListLeases;
    // The permissions for keys are checked later, when these calls read or write the keys.
    LockRequest: |_| RequestedAccess::AnyUser;
    UnlockRequest: |_| RequestedAccess::AnyUser;
    CampaignRequest: |_| RequestedAccess::AnyUser;
    LeaderRequest: |_| RequestedAccess::AnyUser;
}

asked! { false:
    MemberListRequest: |_| RequestedAccess::AnyUser;
    MemberRemoveRequest: |_| RequestedAccess::RootRole;
    MemberUpdateRequest: |_| RequestedAccess::RootRole;
    MemberPromoteRequest: |_| RequestedAccess::RootRole;
    AlarmRequest: |alarm| match AlarmAction::try_from(alarm.action) {
        Ok(AlarmAction::Get) => RequestedAccess::AnyUser,
        Ok(AlarmAction::Activate | AlarmAction::Deactivate) | Err(_) => RequestedAccess::RootRole,
    };
    DefragmentRequest: |_| RequestedAccess::RootRole;
    DowngradeRequest: |_| RequestedAccess::RootRole;
    HashRequest: |_| RequestedAccess::RootRole;
    HashKvRequest: |_| RequestedAccess::RootRole;
    MoveLeaderRequest: |_| RequestedAccess::RootRole;
    AuthEnableRequest: |_| RequestedAccess::RootRole;
    AuthDisableRequest: |_| RequestedAccess::RootRole;
    AuthStatusRequest: |_| RequestedAccess::AnyCaller;
    AuthenticateRequest: |_| RequestedAccess::Authenticate;
    AuthUserAddRequest: |_| RequestedAccess::RootRole;
    AuthUserGetRequest: |get| RequestedAccess::UserGet(&get.name);
    AuthUserListRequest: |_| RequestedAccess::RootRole;
    AuthUserDeleteRequest: |_| RequestedAccess::RootRole;
    AuthUserChangePasswordRequest: |_| RequestedAccess::RootRole;
    AuthUserGrantRoleRequest: |_| RequestedAccess::RootRole;
    AuthUserRevokeRoleRequest: |_| RequestedAccess::RootRole;
    AuthRoleAddRequest: |_| RequestedAccess::RootRole;
    AuthRoleGetRequest: |get| RequestedAccess::RoleGet(&get.role);
    AuthRoleListRequest: |_| RequestedAccess::RootRole;
    AuthRoleDeleteRequest: |_| RequestedAccess::RootRole;
    AuthRoleGrantPermissionRequest: |_| RequestedAccess::RootRole;
    AuthRoleRevokePermissionRequest: |_| RequestedAccess::RootRole;
}

/// Maximum total length of a member's peer URLs. etcd has no limit. Here one frame of the peer
/// protocol holds the descriptions of all members. With longer URLs they might not fit, and then
/// other members could neither see nor remove this member.
const MAX_URL_BYTES: usize = 16 * 1024;

/// Checks peer URLs as etcd does, and returns them sorted. There must be at least one.
pub(super) fn peer_urls(urls: &[String]) -> Result<Vec<String>, Error> {
    let parsed: Result<Vec<_>, _> = urls.iter().map(|url| PeerUrl::parse(url)).collect();
    let parsed = parsed.map_err(|_| Error::BadMemberUrls)?;
    let mut urls: Vec<String> = parsed.iter().map(ToString::to_string).collect();
    urls.sort_unstable();
    let bytes: usize = urls.iter().map(String::len).sum();
    if (1..=MAX_URL_BYTES).contains(&bytes) { Ok(urls) } else { Err(Error::BadMemberUrls) }
}
