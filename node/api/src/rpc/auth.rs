//! The Auth service: users, roles, and tokens in exchange for a password.

use std::sync::Arc;

use data_encoding::BASE64;
use node_proto::authpb::UserAddOptions;
use node_proto::command::{AssignToken, AuthChange, Operation};
use node_proto::etcdserverpb::auth_server;
use node_proto::etcdserverpb::{
    AuthDisableRequest, AuthDisableResponse, AuthEnableRequest, AuthEnableResponse,
    AuthRoleAddRequest, AuthRoleAddResponse, AuthRoleDeleteRequest, AuthRoleDeleteResponse,
    AuthRoleGetRequest, AuthRoleGetResponse, AuthRoleGrantPermissionRequest,
    AuthRoleGrantPermissionResponse, AuthRoleListRequest, AuthRoleListResponse,
    AuthRoleRevokePermissionRequest, AuthRoleRevokePermissionResponse, AuthStatusRequest,
    AuthStatusResponse, AuthUserAddRequest, AuthUserAddResponse, AuthUserChangePasswordRequest,
    AuthUserChangePasswordResponse, AuthUserDeleteRequest, AuthUserDeleteResponse,
    AuthUserGetRequest, AuthUserGetResponse, AuthUserGrantRoleRequest, AuthUserGrantRoleResponse,
    AuthUserListRequest, AuthUserListResponse, AuthUserRevokeRoleRequest,
    AuthUserRevokeRoleResponse, AuthenticateRequest, AuthenticateResponse, ResponseHeader,
};
use node_state::apply::Response;
use node_state::auth::{AuthOperation, Password, TokenSecret};
use node_state::mvcc::View;
use tokio::time::Instant;
use tonic::{Request, Status};
use zeroize::Zeroizing;

use super::context::{ApiContext, CallContext, header};
use super::error::Error;
use super::metrics::Method;
use super::passwords::PasswordHasher;
use super::required_access::CheckedRequest;

type Answer<T> = Result<tonic::Response<T>, Status>;

pub(super) struct AuthService {
    context: Arc<ApiContext>,
    passwords: PasswordHasher,
}

impl AuthService {
    pub(super) fn new(context: Arc<ApiContext>) -> Self {
        let passwords = PasswordHasher::new(context.limits.bcrypt_cost);
        Self { context, passwords }
    }

    /// Proposes a change of users or roles, and returns the header of its answer.
    async fn change(
        &self,
        change: AuthOperation,
        call: &CallContext,
    ) -> Result<Option<ResponseHeader>, Error> {
        let name = match &change {
            AuthOperation::UserAdd(user) => user.name.as_str(),
            AuthOperation::RoleAdd(role) => role.name.as_str(),
            _ => "",
        };
        if name.len() > node_bbolt::MAX_KEY_BYTES {
            return Err(Error::NameTooLong);
        }
        let change = AuthChange { change: Some(change) };
        match self.context.propose_as_caller(call, Operation::ChangeAuth(change)).await? {
            Response::AuthChanged(header) => Ok(header),
            other => unreachable!("apply answers a change of users in kind, not with {other:?}"),
        }
    }

    /// Returns a view of the store, if the caller may read it. The view includes every write that
    /// was acknowledged before the request arrived.
    async fn read_view(
        &self,
        request: &impl CheckedRequest,
        call: &CallContext,
    ) -> Result<Arc<View>, Error> {
        self.context.barrier(false).await?;
        let view = self.context.store.view();
        self.context.access.authorise_on(call.credentials(), &view, request.access())?;
        Ok(view)
    }

    /// Returns the user's password hash, which is then proposed. The password itself never gets
    /// into the log.
    async fn hash_password(
        &self,
        name: String,
        password: String,
        options: Option<UserAddOptions>,
    ) -> Result<Password, Error> {
        let password = Zeroizing::new(password);
        if options.is_some_and(|options| options.no_password) {
            return Ok(Password { name, no_password: true, ..Password::default() });
        }
        let hash = self.passwords.hash(password).await?.into();
        Ok(Password { name, hash, no_password: false })
    }

    /// Returns the user's new password hash. As in etcd, the client may send a hash in base64
    /// instead of a password. If the client sends neither, no password is valid for the user until
    /// the next change.
    async fn hash_new_password(
        &self,
        AuthUserChangePasswordRequest { name, password, hashed_password }: AuthUserChangePasswordRequest,
    ) -> Result<Password, Error> {
        if password.is_empty() {
            let hash = BASE64.decode(hashed_password.as_bytes());
            let hash = hash.map_err(|_| Error::NoPasswordUser)?.into();
            return Ok(Password { name, hash, no_password: false });
        }
        self.hash_password(name, password, None).await
    }

    async fn authenticate(
        &self,
        request: AuthenticateRequest,
    ) -> Result<AuthenticateResponse, Error> {
        let AuthenticateRequest { name, password } = request;
        let password = Zeroizing::new(password);
        let deadline = self.context.deadline();
        self.context.barrier(false).await?;
        loop {
            let view = self.context.store.view();
            let auth = view.auth();
            if !auth.is_enabled() {
                return Err(Error::AuthNotEnabled);
            }
            let (user, revision) = (auth.user(&name), auth.revision());
            if user.is_some_and(|user| user.hash().is_none()) {
                return Err(Error::NoPasswordUser);
            }
            let hash = user.and_then(|user| user.hash().cloned());
            // Drop the view, so that the store's file can reuse its pages during the slow check.
            drop(view);
            if !self.passwords.verify(password.clone(), hash).await? {
                tracing::warn!(user = ?name, "somebody gave a wrong user name or password");
                return Err(Error::AuthFailed);
            }
            if let Some(jwt) = &self.context.access.signed_tokens {
                // If users have changed since `view`, the token is invalid from the start, and the
                // client has to authenticate again.
                let jwt = Arc::clone(jwt);
                let now = jiff::Timestamp::now().as_second();
                let signed = tokio::task::spawn_blocking(move || jwt.sign(&name, revision, now));
                let token = signed.await.map_err(|_| Error::Stopped)?.ok_or(Error::VerifyOnly)?;
                let header = header(self.context.store.view().revision());
                return Ok(AuthenticateResponse { header, token: token.to_string() });
            }
            let secret = TokenSecret::random();
            let (user, hash) = (name.clone(), secret.hash());
            let assign = AssignToken { user, revision, secret: hash.to_vec().into() };
            match self.context.propose_as_member(Operation::AssignToken(assign)).await {
                Ok(Response::TokenAssigned { header, index }) => {
                    return Ok(AuthenticateResponse { header, token: secret.token(index) });
                }
                Ok(other) => unreachable!("apply answers for a token in kind, not with {other:?}"),
                // Users or roles have changed since the check, and perhaps this password. So the
                // loop checks the password again.
                Err(Error::AuthOldRevision) if Instant::now() < deadline => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn status(
        &self,
        request: AuthStatusRequest,
        call: &CallContext,
    ) -> Result<AuthStatusResponse, Error> {
        let view = self.read_view(&request, call).await?;
        let (enabled, auth_revision) = (view.auth().is_enabled(), view.auth().revision());
        Ok(AuthStatusResponse { header: header(view.revision()), enabled, auth_revision })
    }

    async fn user_get(
        &self,
        request: AuthUserGetRequest,
        call: &CallContext,
    ) -> Result<AuthUserGetResponse, Error> {
        let view = self.read_view(&request, call).await?;
        let user = view.auth().user(&request.name).ok_or(Error::UserNotFound)?;
        Ok(AuthUserGetResponse { header: header(view.revision()), roles: user.roles().to_vec() })
    }

    async fn user_list(
        &self,
        request: AuthUserListRequest,
        call: &CallContext,
    ) -> Result<AuthUserListResponse, Error> {
        let view = self.read_view(&request, call).await?;
        let users = view.auth().users().map(str::to_owned).collect();
        Ok(AuthUserListResponse { header: header(view.revision()), users })
    }

    async fn role_get(
        &self,
        request: AuthRoleGetRequest,
        call: &CallContext,
    ) -> Result<AuthRoleGetResponse, Error> {
        let view = self.read_view(&request, call).await?;
        let perm = view.auth().role_permissions(&request.role).ok_or(Error::RoleNotFound)?;
        Ok(AuthRoleGetResponse { header: header(view.revision()), perm })
    }

    async fn role_list(
        &self,
        request: AuthRoleListRequest,
        call: &CallContext,
    ) -> Result<AuthRoleListResponse, Error> {
        let view = self.read_view(&request, call).await?;
        let roles = view.auth().roles().map(str::to_owned).collect();
        Ok(AuthRoleListResponse { header: header(view.revision()), roles })
    }
}

/// Implements methods that make one change and answer with only a header.
macro_rules! changes {
    ($($method:ident: $counted:ident, $request:ident => $answer:ident, |$asked:pat_param, $this:pat_param| $change:expr;)*) => {
        #[tonic::async_trait]
        impl auth_server::Auth for AuthService {
            $(async fn $method(&self, request: Request<$request>) -> Answer<$answer> {
                let $this = self;
                let work = async |$asked: $request, call: &mut CallContext| {
                    let header = self.change($change, call).await?;
                    Ok::<_, Error>($answer { header })
                };
                self.context.call(Method::$counted, request, work).await
            })*

            async fn auth_status(&self, request: Request<AuthStatusRequest>) -> Answer<AuthStatusResponse> {
                let work = async |request, call: &mut CallContext| self.status(request, call).await;
                self.context.call(Method::AuthStatus, request, work).await
            }

            async fn authenticate(&self, request: Request<AuthenticateRequest>) -> Answer<AuthenticateResponse> {
                let work = async |request, _: &mut CallContext| self.authenticate(request).await;
                self.context.call(Method::Authenticate, request, work).await
            }

            async fn user_get(&self, request: Request<AuthUserGetRequest>) -> Answer<AuthUserGetResponse> {
                let work = async |request, call: &mut CallContext| self.user_get(request, call).await;
                self.context.call(Method::UserGet, request, work).await
            }

            async fn user_list(&self, request: Request<AuthUserListRequest>) -> Answer<AuthUserListResponse> {
                let work = async |request, call: &mut CallContext| self.user_list(request, call).await;
                self.context.call(Method::UserList, request, work).await
            }

            async fn role_get(&self, request: Request<AuthRoleGetRequest>) -> Answer<AuthRoleGetResponse> {
                let work = async |request, call: &mut CallContext| self.role_get(request, call).await;
                self.context.call(Method::RoleGet, request, work).await
            }

            async fn role_list(&self, request: Request<AuthRoleListRequest>) -> Answer<AuthRoleListResponse> {
                let work = async |request, call: &mut CallContext| self.role_list(request, call).await;
                self.context.call(Method::RoleList, request, work).await
            }
        }
    };
}

changes! {
    auth_enable: AuthEnable, AuthEnableRequest => AuthEnableResponse,
        |asked, _| AuthOperation::Enable(asked);
    auth_disable: AuthDisable, AuthDisableRequest => AuthDisableResponse,
        |asked, _| AuthOperation::Disable(asked);
    user_add: UserAdd, AuthUserAddRequest => AuthUserAddResponse,
        |asked, this| AuthOperation::UserAdd(
            this.hash_password(asked.name, asked.password, asked.options).await?);
    user_delete: UserDelete, AuthUserDeleteRequest => AuthUserDeleteResponse,
        |asked, _| AuthOperation::UserDelete(asked);
    user_change_password: UserChangePassword,
        AuthUserChangePasswordRequest => AuthUserChangePasswordResponse,
        |asked, this| AuthOperation::UserChangePassword(this.hash_new_password(asked).await?);
    user_grant_role: UserGrantRole, AuthUserGrantRoleRequest => AuthUserGrantRoleResponse,
        |asked, _| AuthOperation::UserGrantRole(asked);
    user_revoke_role: UserRevokeRole, AuthUserRevokeRoleRequest => AuthUserRevokeRoleResponse,
        |asked, _| AuthOperation::UserRevokeRole(asked);
    role_add: RoleAdd, AuthRoleAddRequest => AuthRoleAddResponse,
        |asked, _| AuthOperation::RoleAdd(asked);
    role_delete: RoleDelete, AuthRoleDeleteRequest => AuthRoleDeleteResponse,
        |asked, _| AuthOperation::RoleDelete(asked);
    role_grant_permission: RoleGrantPermission,
        AuthRoleGrantPermissionRequest => AuthRoleGrantPermissionResponse,
        |asked, _| AuthOperation::RoleGrantPermission(asked);
    role_revoke_permission: RoleRevokePermission,
        AuthRoleRevokePermissionRequest => AuthRoleRevokePermissionResponse,
        |asked, _| AuthOperation::RoleRevokePermission(asked);
}
