//! The users of a recording: `root`, and `part`, who may use the keys of one prefix only.

use std::net::SocketAddr;

use anyhow::Result;
use bytes::Bytes;
use node_proto::authpb::{Permission, UserAddOptions, permission};
use node_proto::etcdserverpb::auth_client::AuthClient;
use node_proto::etcdserverpb::{
    AuthEnableRequest, AuthRoleAddRequest, AuthRoleGrantPermissionRequest, AuthUserAddRequest,
    AuthUserGrantRoleRequest, AuthenticateRequest,
};
use node_state::auth::{AuthOperation, Password};
use tonic::transport::Channel;

use super::generator::{LIMITED_PREFIX, range_end_of_prefix};
use crate::client::channel;

const ROOT: &str = "root";
const LIMITED_USER: &str = "part";
const PASSWORD: &str = "p";
/// Number of clients that run as the limited user `part`.
const LIMITED_CLIENTS: usize = 2;

pub(super) fn root() -> String {
    ROOT.to_owned()
}

pub(super) fn limited_user() -> String {
    LIMITED_USER.to_owned()
}

pub(super) fn user_of_client(client: usize) -> String {
    if client < LIMITED_CLIENTS { limited_user() } else { root() }
}

pub(super) fn password_of(user: &str) -> AuthenticateRequest {
    AuthenticateRequest { name: user.to_owned(), password: PASSWORD.to_owned() }
}

/// Creates the users and roles, enables auth, and waits until every member has applied this.
/// Returns the changes in their order.
pub(super) async fn create_users(members: &[SocketAddr]) -> Result<Vec<AuthOperation>> {
    let mut auth = AuthClient::new(channel(members[0], None)?);
    let mut changes = Vec::new();
    for name in [root(), limited_user()] {
        let hash = Bytes::from_static(b"known to the members alone");
        changes.push(AuthOperation::UserAdd(Password {
            name: name.clone(),
            hash,
            no_password: false,
        }));
        changes.push(AuthOperation::RoleAdd(AuthRoleAddRequest { name: name.clone() }));
        let role = name.clone();
        changes.push(AuthOperation::UserGrantRole(AuthUserGrantRoleRequest { user: name, role }));
    }
    let perm = Some(Permission {
        perm_type: permission::Type::Readwrite.into(),
        key: LIMITED_PREFIX.into(),
        range_end: range_end_of_prefix(LIMITED_PREFIX),
    });
    let grant = AuthRoleGrantPermissionRequest { name: limited_user(), perm };
    changes.push(AuthOperation::RoleGrantPermission(grant));
    changes.push(AuthOperation::Enable(AuthEnableRequest {}));
    for change in changes.clone() {
        apply_change(&mut auth, change).await?;
    }
    // Tokens are assigned through the log, so a member that returns a token has applied all earlier
    // entries.
    for member in members {
        AuthClient::new(channel(*member, None)?).authenticate(password_of(ROOT)).await?;
    }
    Ok(changes)
}

async fn apply_change(auth: &mut AuthClient<Channel>, change: AuthOperation) -> Result<()> {
    match change {
        AuthOperation::UserAdd(Password { name, no_password, .. }) => {
            let (password, hashed_password) = (PASSWORD.to_owned(), String::new());
            let options = Some(UserAddOptions { no_password });
            let request = AuthUserAddRequest { name, password, options, hashed_password };
            auth.user_add(request).await?;
        }
        AuthOperation::RoleAdd(request) => _ = auth.role_add(request).await?,
        AuthOperation::UserGrantRole(request) => _ = auth.user_grant_role(request).await?,
        AuthOperation::RoleGrantPermission(request) => {
            _ = auth.role_grant_permission(request).await?
        }
        AuthOperation::Enable(request) => _ = auth.auth_enable(request).await?,
        other => unreachable!("nobody asks for {other:?}"),
    }
    Ok(())
}
