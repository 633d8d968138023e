//! What each request needs to be allowed, and what it can be refused for by itself.
//!
//! Every request of every unary method is in one of these tables: [`Context::call`](super::Context::call)
//! takes no other.

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

/// A request, before anything is done for it.
pub(crate) trait Ask {
    /// What it needs to be allowed.
    fn access(&self) -> Access<'_>;

    /// What it can be refused for, whoever makes it.
    fn check(&self, _: &Limits) -> Result<(), Error> {
        Ok(())
    }

    /// Whether learners answer it: of most requests they could only give old answers. Whoever makes one of
    /// these is content with what this member shows, also if nobody leads.
    fn is_for_learners(&self) -> bool {
        false
    }

    /// Whether it is about the data, which a member serves only as long as it holds the same as the
    /// others.
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

/// Whose place in line it is has to be said.
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
    // What these ask in their turn, of keys, is looked at where they ask it.
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
