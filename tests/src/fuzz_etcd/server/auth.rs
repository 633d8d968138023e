//! Execution of requests about users and roles.

use node_proto::etcdserverpb::auth_client::AuthClient;
use node_proto::etcdserverpb::{
    AuthDisableRequest, AuthEnableRequest, AuthRoleAddRequest, AuthRoleDeleteRequest,
    AuthRoleGetRequest, AuthRoleListRequest, AuthStatusRequest, AuthUserChangePasswordRequest,
    AuthUserDeleteRequest, AuthUserGetRequest, AuthUserGrantRoleRequest, AuthUserListRequest,
    AuthUserRevokeRoleRequest, AuthenticateRequest,
};
use tonic::metadata::AsciiMetadataValue;

use super::{Answer, TokenChannel, answer};
use crate::fuzz_etcd::users::{AuthCall, TOKENS};

/// Sends a request about users and roles. A token in the answer is stored, and removed before
/// comparison.
pub(super) async fn auth(
    call: AuthCall,
    service: TokenChannel,
    tokens: &mut [Option<AsciiMetadataValue>; TOKENS],
) -> Answer {
    let mut client = AuthClient::new(service);
    macro_rules! ask {
        ($method:ident, $request:expr) => {
            answer(client.$method($request).await, |a| &mut a.header)
        };
    }
    match call {
        AuthCall::Enable => ask!(auth_enable, AuthEnableRequest {}),
        AuthCall::Disable => ask!(auth_disable, AuthDisableRequest {}),
        AuthCall::Status => ask!(auth_status, AuthStatusRequest {}),
        AuthCall::Authenticate { name, password, token_slot: slot } => {
            let (name, password) = (name.to_owned(), password.to_owned());
            let mut response = client.authenticate(AuthenticateRequest { name, password }).await;
            if let Ok(response) = &mut response {
                let token = std::mem::take(&mut response.get_mut().token);
                tokens[slot] = token.parse().ok();
            }
            answer(response, |a| &mut a.header)
        }
        AuthCall::UserAdd(request) => ask!(user_add, request),
        AuthCall::UserGet(name) => ask!(user_get, AuthUserGetRequest { name: name.to_owned() }),
        AuthCall::UserList => ask!(user_list, AuthUserListRequest {}),
        AuthCall::UserDelete(name) => {
            ask!(user_delete, AuthUserDeleteRequest { name: name.to_owned() })
        }
        AuthCall::ChangePassword(name, password) => {
            let (name, password) = (name.to_owned(), password.to_owned());
            let request = AuthUserChangePasswordRequest {
                name,
                password,
                ..AuthUserChangePasswordRequest::default()
            };
            ask!(user_change_password, request)
        }
        AuthCall::GrantRole(user, role) => {
            let (user, role) = (user.to_owned(), role.to_owned());
            ask!(user_grant_role, AuthUserGrantRoleRequest { user, role })
        }
        AuthCall::RevokeRole(name, role) => {
            let (name, role) = (name.to_owned(), role.to_owned());
            ask!(user_revoke_role, AuthUserRevokeRoleRequest { name, role })
        }
        AuthCall::RoleAdd(name) => ask!(role_add, AuthRoleAddRequest { name: name.to_owned() }),
        AuthCall::RoleGet(role) => ask!(role_get, AuthRoleGetRequest { role: role.to_owned() }),
        AuthCall::RoleList => ask!(role_list, AuthRoleListRequest {}),
        AuthCall::RoleDelete(role) => {
            ask!(role_delete, AuthRoleDeleteRequest { role: role.to_owned() })
        }
        AuthCall::GrantPermission(request) => ask!(role_grant_permission, request),
        AuthCall::RevokePermission(request) => ask!(role_revoke_permission, request),
    }
}
