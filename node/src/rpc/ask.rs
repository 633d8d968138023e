//! Permission that each request needs, and checks of the request by itself.
//!
//! Every request of every unary method is in one of these tables:
//! [`Context::call`](super::Context::call) accepts no other.

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

use super::Limits;
use super::cluster::peer_urls;
use super::error::Error;
use crate::apply::{check_delete, check_put, check_range, check_txn};
use crate::auth::Access;

/// A request, with the checks made before anything is done for it.
pub(crate) trait Ask {
    /// Returns the permission that the request needs.
    fn access(&self) -> Access<'_>;

    /// Checks the request by itself, whoever sent it.
    fn check(&self, _: &Limits) -> Result<(), Error> {
        Ok(())
    }

    /// Whether learners answer the request. To most requests a learner could only give outdated
    /// answers. A request that learners answer accepts this member's state, even without a leader.
    fn is_for_learners(&self) -> bool {
        false
    }

    /// Whether the request is about the data. A member whose data differs from the others' refuses
    /// it.
    fn is_about_data(&self) -> bool {
        true
    }
}

impl Ask for RangeRequest {
    fn access(&self) -> Access<'_> {
        Access::Range(self)
    }

    fn check(&self, _: &Limits) -> Result<(), Error> {
        Ok(check_range(self)?)
    }

    fn is_for_learners(&self) -> bool {
        self.serializable
    }
}

impl Ask for StatusRequest {
    fn access(&self) -> Access<'_> {
        Access::Known
    }

    fn is_about_data(&self) -> bool {
        false
    }

    fn is_for_learners(&self) -> bool {
        true
    }
}

impl Ask for MemberAddRequest {
    fn access(&self) -> Access<'_> {
        Access::Root
    }

    fn check(&self, _: &Limits) -> Result<(), Error> {
        peer_urls(&self.peer_ur_ls).map(|_| ())
    }

    fn is_about_data(&self) -> bool {
        false
    }
}

/// Refuses a request without the leader key, which names the entry in the election's queue.
fn whose(leader: Option<&LeaderKey>) -> Result<(), Error> {
    leader.map(|_| ()).ok_or(Error::NoLeaderKey)
}

macro_rules! checked {
    ($($request:ident: |$this:pat_param| $access:expr, |$asked:pat_param, $limits:pat_param| $check:expr;)*) => {
        $(impl Ask for $request {
            fn access(&self) -> Access<'_> {
                let $this = self;
                $access
            }

            fn check(&self, $limits: &Limits) -> Result<(), Error> {
                let $asked = self;
                $check?;
                Ok(())
            }
        })*
    };
}

checked! {
    PutRequest: |put| Access::Put(put), |put, _| check_put(put);
    DeleteRangeRequest: |delete| Access::DeleteRange(delete), |delete, _| check_delete(delete);
    TxnRequest: |txn| Access::Txn(txn), |txn, limits| check_txn(txn, limits.max_txn_ops);
    ProclaimRequest: |_| Access::Known, |say, _| whose(say.leader.as_ref());
    ResignRequest: |_| Access::Known, |resign, _| whose(resign.leader.as_ref());
}

macro_rules! asked {
    ($is_about_data:literal: $($request:ident: |$this:pat_param| $access:expr;)*) => {
        $(impl Ask for $request {
            fn access(&self) -> Access<'_> {
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
    CompactionRequest: |_| Access::Root;
    LeaseGrantRequest: |_| Access::Known;
    LeaseRevokeRequest: |revoke| Access::LeaseRevoke(revoke.id);
    LeaseTimeToLiveRequest: |asked| if asked.keys { Access::LeaseKeys(asked.id) } else { Access::Known };
    LeaseLeasesRequest: |_| Access::Leases;
    // The key operations of these calls are checked where they are made.
    LockRequest: |_| Access::Known;
    UnlockRequest: |_| Access::Known;
    CampaignRequest: |_| Access::Known;
    LeaderRequest: |_| Access::Known;
}

asked! { false:
    MemberListRequest: |_| Access::Known;
    MemberRemoveRequest: |_| Access::Root;
    MemberUpdateRequest: |_| Access::Root;
    MemberPromoteRequest: |_| Access::Root;
    AlarmRequest: |alarm| match AlarmAction::try_from(alarm.action) {
        Ok(AlarmAction::Get) => Access::Known,
        Ok(AlarmAction::Activate | AlarmAction::Deactivate) | Err(_) => Access::Root,
    };
    DefragmentRequest: |_| Access::Root;
    DowngradeRequest: |_| Access::Root;
    HashRequest: |_| Access::Root;
    HashKvRequest: |_| Access::Root;
    MoveLeaderRequest: |_| Access::Root;
    AuthEnableRequest: |_| Access::Root;
    AuthDisableRequest: |_| Access::Root;
    AuthStatusRequest: |_| Access::Anybody;
    AuthenticateRequest: |_| Access::Authenticate;
    AuthUserAddRequest: |_| Access::Root;
    AuthUserGetRequest: |get| Access::UserGet(&get.name);
    AuthUserListRequest: |_| Access::Root;
    AuthUserDeleteRequest: |_| Access::Root;
    AuthUserChangePasswordRequest: |_| Access::Root;
    AuthUserGrantRoleRequest: |_| Access::Root;
    AuthUserRevokeRoleRequest: |_| Access::Root;
    AuthRoleAddRequest: |_| Access::Root;
    AuthRoleGetRequest: |get| Access::RoleGet(&get.role);
    AuthRoleListRequest: |_| Access::Root;
    AuthRoleDeleteRequest: |_| Access::Root;
    AuthRoleGrantPermissionRequest: |_| Access::Root;
    AuthRoleRevokePermissionRequest: |_| Access::Root;
}
