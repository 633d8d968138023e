//! Users in the simulation: requests that change users and roles, and the users of all other
//! requests. As in the API, a member identifies a user by its own store, which may be behind.

use std::time::Duration;

use bytes::Bytes;
use node_proto::authpb::{Permission, permission};
use node_proto::command::{self, AssignToken, AuthChange, Operation};
use node_proto::etcdserverpb::{
    AuthDisableRequest, AuthEnableRequest, AuthRoleAddRequest, AuthRoleDeleteRequest,
    AuthRoleGrantPermissionRequest, AuthRoleRevokePermissionRequest, AuthUserDeleteRequest,
    AuthUserGrantRoleRequest, AuthUserRevokeRoleRequest, RangeRequest,
};
use node_state::auth::{AuthOperation, Caller, Password, RequestedAccess, authorise};
use node_state::lease::LeaseTable;
use node_state::mvcc::View;

use super::InvariantViolation;
use super::clients::{ClientRequest, ClientRequestGenerator};
use super::simulation::{Simulation, index_of};

pub(super) const ROOT: &str = "root";
/// Names of users. The last name never belongs to a user.
const NAMES: [&str; 4] = [ROOT, "ann", "bob", "eve"];
const ROLES: [&str; 3] = [ROOT, "r1", "r2"];
/// Lifetime of tokens, which is longer than any history.
const TTL: Duration = Duration::from_secs(3600);

/// A token that a client has received.
#[derive(Clone, Debug)]
pub(super) struct AssignedToken {
    pub entry: u64,
    pub shown: String,
}

/// User that a client makes a request as.
#[derive(Clone, Debug)]
pub(super) enum RequestUser {
    Anonymous,
    /// User named by a client certificate.
    Certificate(&'static str),
    /// User whom the member finds by this token.
    WithToken(AssignedToken),
}

/// Returns the random part of the token that `request` asks for.
fn token_prefix(request: u64) -> String {
    format!("letters-{request}")
}

impl AssignedToken {
    /// Returns the token that log entry `entry` assigned for `request`.
    pub(super) fn new(request: u64, entry: u64) -> Self {
        Self { entry, shown: format!("{}.{entry}", token_prefix(request)) }
    }
}

impl ClientRequestGenerator<'_> {
    fn pick_name<const N: usize>(&mut self, names: [&'static str; N]) -> &'static str {
        names[self.rng.pick(N)]
    }

    fn grant_role(&mut self, role: &str) -> AuthOperation {
        let (user, role) = (self.pick_name(["ann", "bob"]).to_owned(), role.to_owned());
        AuthOperation::UserGrantRole(AuthUserGrantRoleRequest { user, role })
    }

    /// Draws a change of users and roles. Most changes lead towards users who have some
    /// permissions.
    pub(super) fn draw_user_change(&mut self, id: u64) -> Operation {
        let hash = Bytes::copy_from_slice(&id.to_be_bytes());
        let change = match self.rng.range(0, 100) {
            0..16 => {
                let name = self.pick_name([ROOT, "ann", "bob"]).to_owned();
                let no_password = self.rng.chance(250);
                AuthOperation::UserAdd(Password { name, hash, no_password })
            }
            16..28 => {
                let (user, role) = (ROOT.to_owned(), ROOT.to_owned());
                AuthOperation::UserGrantRole(AuthUserGrantRoleRequest { user, role })
            }
            28..36 => AuthOperation::RoleAdd(AuthRoleAddRequest {
                name: self.pick_name(ROLES).to_owned(),
            }),
            36..48 => {
                let role = self.pick_name(["r1", "r2"]);
                self.grant_role(role)
            }
            48..49 => self.grant_role(ROOT),
            49..64 => {
                let (key, range_end) = self.keys();
                let perm_type =
                    [permission::Type::Read, permission::Type::Write, permission::Type::Readwrite]
                        [self.rng.pick(3)];
                let perm = Some(Permission { perm_type: perm_type.into(), key, range_end });
                let name = self.pick_name(["r1", "r2"]).to_owned();
                AuthOperation::RoleGrantPermission(AuthRoleGrantPermissionRequest { name, perm })
            }
            64..82 => AuthOperation::Enable(AuthEnableRequest {}),
            82..84 => AuthOperation::Disable(AuthDisableRequest {}),
            84..87 => AuthOperation::UserDelete(AuthUserDeleteRequest {
                name: self.pick_name(NAMES).to_owned(),
            }),
            87..91 => {
                let name = self.pick_name(NAMES).to_owned();
                AuthOperation::UserChangePassword(Password { name, hash, no_password: false })
            }
            91..94 => {
                let (name, role) =
                    (self.pick_name(NAMES).to_owned(), self.pick_name(ROLES).to_owned());
                AuthOperation::UserRevokeRole(AuthUserRevokeRoleRequest { name, role })
            }
            94..96 => AuthOperation::RoleDelete(AuthRoleDeleteRequest {
                role: self.pick_name(ROLES).to_owned(),
            }),
            _ => {
                let (key, range_end) = self.keys();
                let role = self.pick_name(["r1", "r2"]).to_owned();
                AuthOperation::RoleRevokePermission(AuthRoleRevokePermissionRequest {
                    role,
                    key,
                    range_end,
                })
            }
        };
        Operation::ChangeAuth(AuthChange { change: Some(change) })
    }

    /// Draws the user of a request by a client that may have a token.
    pub(super) fn draw_user(
        &mut self,
        operation: Option<&Operation>,
        token: Option<&AssignedToken>,
    ) -> RequestUser {
        let needs_root =
            matches!(operation, Some(Operation::ChangeAuth(_) | Operation::Compact(_)));
        match token {
            Some(token) if self.rng.chance(500) => RequestUser::WithToken(token.clone()),
            _ if self.rng.chance(if needs_root { 850 } else { 450 }) => {
                RequestUser::Certificate(ROOT)
            }
            _ if self.rng.chance(150) => RequestUser::Anonymous,
            _ => RequestUser::Certificate(self.pick_name(NAMES)),
        }
    }
}

impl Simulation {
    /// Identifies the caller by the member's users and tokens. Returns `None` if the member finds
    /// the token invalid.
    pub(super) fn identify_caller(
        &mut self,
        node: u64,
        user: &RequestUser,
    ) -> Result<Option<Caller>, InvariantViolation> {
        let Some(process) = &self.nodes[index_of(node)].process else { return Ok(None) };
        let view = process.store.view();
        let revision = view.auth().revision();
        if !view.auth().is_enabled() {
            return Ok(Some(Caller::Unauthenticated));
        }
        match user {
            RequestUser::Anonymous => Ok(Some(Caller::Unauthenticated)),
            RequestUser::Certificate(name) => {
                Ok(Some(Caller::User { name: (*name).into(), revision }))
            }
            RequestUser::WithToken(token) => {
                let mut tokens = process.store.tokens().lock().expect("nobody panics");
                let name = tokens.find(&token.shown, Duration::ZERO, TTL);
                self.invariants.stores.check_token(node, &view, token.entry, name.as_deref())?;
                self.report.tokens_used += u64::from(name.is_some());
                Ok(name.map(|name| Caller::User { name, revision }))
            }
        }
    }

    /// Now and then replaces a request by a change of users and roles, or by a request for a token.
    /// Does nothing in a history without users.
    pub(super) fn replace_by_user_change(
        &mut self,
        node: u64,
        id: u64,
        kind: ClientRequest,
    ) -> ClientRequest {
        let process = self.nodes[index_of(node)].process.as_ref();
        let is_enabled = process.is_some_and(|process| process.store.is_auth_enabled());
        let chance = if is_enabled {
            self.plan.user_change_chance / 4
        } else {
            self.plan.user_change_chance
        };
        if !self.rng.chance(chance) {
            return kind;
        }
        let operation = if is_enabled && self.rng.chance(400) {
            self.draw_token_request(node, id)
        } else {
            let mut draw =
                ClientRequestGenerator { rng: &mut self.rng, keys: self.plan.keys, known: 1 };
            draw.draw_user_change(id)
        };
        ClientRequest::Write { operation, grows: false }
    }

    /// Returns a request that exchanges a password for a token, as the member would propose it.
    fn draw_token_request(&mut self, node: u64, id: u64) -> Operation {
        let user = NAMES[self.rng.pick(NAMES.len())].to_owned();
        let revision = self.users_revision(node).unwrap_or_default();
        let secret = ring::digest::digest(&ring::digest::SHA256, token_prefix(id).as_bytes());
        let secret = Bytes::copy_from_slice(secret.as_ref());
        Operation::AssignToken(AssignToken { user, revision, secret })
    }

    /// Returns the revision of users and roles that a member knows.
    pub(super) fn users_revision(&self, node: u64) -> Option<u64> {
        let process = self.nodes[index_of(node)].process.as_ref();
        Some(process?.store.view().auth().revision())
    }

    /// Returns whether a member permits a read of its view. Before that, compares the member's
    /// decision with the model's.
    pub(super) fn is_read_permitted(
        &mut self,
        node: u64,
        view: &View,
        user: &RequestUser,
        request: &RangeRequest,
    ) -> Result<bool, InvariantViolation> {
        let Some(caller) = self.identify_caller(node, user)? else { return Ok(false) };
        let decision = authorise(
            view.auth(),
            &caller,
            RequestedAccess::Range(request),
            &LeaseTable::default(),
        );
        let caller: Option<command::Caller> = caller.into();
        self.invariants.stores.check_permission(node, view, caller.as_ref(), request, decision)?;
        self.report.denied += u64::from(decision.is_err());
        Ok(decision.is_ok())
    }
}
