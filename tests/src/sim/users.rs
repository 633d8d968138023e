//! Users in the simulation: what clients ask to be changed of users and roles, and on whose behalf they ask
//! for everything else. As in the API, a member says who that is by what it knows itself: it may be behind.

use std::time::Duration;

use bytes::Bytes;
use muster_node::auth::{Access, Caller, Change, Password, authorise};
use muster_node::lease::LeaseTable;
use muster_node::mvcc::View;
use node_proto::authpb::{Permission, permission};
use node_proto::command::{self, AssignToken, AuthChange, Operation};
use node_proto::etcdserverpb::{
    AuthDisableRequest, AuthEnableRequest, AuthRoleAddRequest, AuthRoleDeleteRequest,
    AuthRoleGrantPermissionRequest, AuthRoleRevokePermissionRequest, AuthUserDeleteRequest,
    AuthUserGrantRoleRequest, AuthUserRevokeRoleRequest, RangeRequest,
};

use super::Violation;
use super::clients::{Draw, Kind};
use super::world::{World, place};

pub(super) const ROOT: &str = "root";
/// Of users; the last one there never is.
const NAMES: [&str; 4] = [ROOT, "ann", "bob", "eve"];
const ROLES: [&str; 3] = [ROOT, "r1", "r2"];
/// Tokens don't end by time here.
const TTL: Duration = Duration::from_secs(3600);

/// A token, by the entry that gave it.
#[derive(Clone, Debug)]
pub(super) struct Token {
    pub entry: u64,
    pub shown: String,
}

/// On whose behalf a client asks.
#[derive(Clone, Debug)]
pub(super) enum Who {
    Nobody,
    /// Whom a certificate names.
    Named(&'static str),
    /// Whose token it is.
    Shows(Token),
}

/// The letters of the token that a request is to give.
fn letters(request: u64) -> String {
    format!("letters-{request}")
}

impl Token {
    /// What the entry gave that `request` asked for.
    pub(super) fn given(request: u64, entry: u64) -> Self {
        Self { entry, shown: format!("{}.{entry}", letters(request)) }
    }
}

impl Draw<'_> {
    fn of<const N: usize>(&mut self, names: [&'static str; N]) -> &'static str {
        names[self.rng.pick(N)]
    }

    fn role_to(&mut self, role: &str) -> Change {
        let (user, role) = (self.of(["ann", "bob"]).to_owned(), role.to_owned());
        Change::UserGrantRole(AuthUserGrantRoleRequest { user, role })
    }

    /// A change of users and roles, most often one on the way to users who may do some of it.
    pub(super) fn change_of_users(&mut self, id: u64) -> Operation {
        let hash = Bytes::copy_from_slice(&id.to_be_bytes());
        let change = match self.rng.range(0, 100) {
            0..16 => {
                let name = self.of([ROOT, "ann", "bob"]).to_owned();
                let no_password = self.rng.chance(250);
                Change::UserAdd(Password { name, hash, no_password })
            }
            16..28 => {
                let (user, role) = (ROOT.to_owned(), ROOT.to_owned());
                Change::UserGrantRole(AuthUserGrantRoleRequest { user, role })
            }
            28..36 => Change::RoleAdd(AuthRoleAddRequest { name: self.of(ROLES).to_owned() }),
            36..48 => {
                let role = self.of(["r1", "r2"]);
                self.role_to(role)
            }
            48..49 => self.role_to(ROOT),
            49..64 => {
                let (key, range_end) = self.keys();
                let perm_type =
                    [permission::Type::Read, permission::Type::Write, permission::Type::Readwrite]
                        [self.rng.pick(3)];
                let perm = Some(Permission { perm_type: perm_type.into(), key, range_end });
                let name = self.of(["r1", "r2"]).to_owned();
                Change::RoleGrantPermission(AuthRoleGrantPermissionRequest { name, perm })
            }
            64..82 => Change::Enable(AuthEnableRequest {}),
            82..84 => Change::Disable(AuthDisableRequest {}),
            84..87 => Change::UserDelete(AuthUserDeleteRequest { name: self.of(NAMES).to_owned() }),
            87..91 => {
                let name = self.of(NAMES).to_owned();
                Change::UserChangePassword(Password { name, hash, no_password: false })
            }
            91..94 => {
                let (name, role) = (self.of(NAMES).to_owned(), self.of(ROLES).to_owned());
                Change::UserRevokeRole(AuthUserRevokeRoleRequest { name, role })
            }
            94..96 => Change::RoleDelete(AuthRoleDeleteRequest { role: self.of(ROLES).to_owned() }),
            _ => {
                let (key, range_end) = self.keys();
                let role = self.of(["r1", "r2"]).to_owned();
                Change::RoleRevokePermission(AuthRoleRevokePermissionRequest {
                    role,
                    key,
                    range_end,
                })
            }
        };
        Operation::ChangeAuth(AuthChange { change: Some(change) })
    }

    /// On whose behalf something is asked for, by a client that may have a token.
    pub(super) fn who(&mut self, operation: Option<&Operation>, token: Option<&Token>) -> Who {
        let is_roots = matches!(operation, Some(Operation::ChangeAuth(_) | Operation::Compact(_)));
        match token {
            Some(token) if self.rng.chance(500) => Who::Shows(token.clone()),
            _ if self.rng.chance(if is_roots { 850 } else { 450 }) => Who::Named(ROOT),
            _ if self.rng.chance(150) => Who::Nobody,
            _ => Who::Named(self.of(NAMES)),
        }
    }
}

impl World {
    /// Who that is, by what a member knows. None if it is told that its token proves nothing.
    pub(super) fn identify(&mut self, node: u64, who: &Who) -> Result<Option<Caller>, Violation> {
        let Some(live) = &self.nodes[place(node)].live else { return Ok(None) };
        let view = live.store.view();
        let revision = view.auth().revision();
        if !view.auth().is_enabled() {
            return Ok(Some(Caller::Nobody));
        }
        match who {
            Who::Nobody => Ok(Some(Caller::Nobody)),
            Who::Named(name) => Ok(Some(Caller::User { name: (*name).into(), revision })),
            Who::Shows(token) => {
                let mut tokens = live.store.tokens().lock().expect("nobody panics");
                let found = tokens.find(&token.shown, Duration::ZERO, TTL);
                self.invariants.stores.token(node, &view, token.entry, found.as_deref())?;
                self.report.tokens_shown += u64::from(found.is_some());
                Ok(found.map(|name| Caller::User { name, revision }))
            }
        }
    }

    /// In a history with users: now and then a change of them, or a password to be made a token.
    pub(super) fn or_of_users(&mut self, node: u64, id: u64, kind: Kind) -> Kind {
        let live = self.nodes[place(node)].live.as_ref();
        let counts = live.is_some_and(|live| live.store.is_auth_enabled());
        let share = if counts { self.plan.users / 4 } else { self.plan.users };
        if !self.rng.chance(share) {
            return kind;
        }
        let operation = if counts && self.rng.chance(400) {
            self.token_for(node, id)
        } else {
            let mut draw = Draw { rng: &mut self.rng, keys: self.plan.keys, known: 1 };
            draw.change_of_users(id)
        };
        Kind::Write { operation, grows: false }
    }

    /// The change of a password into a token, by what the member knows.
    fn token_for(&mut self, node: u64, id: u64) -> Operation {
        let user = NAMES[self.rng.pick(NAMES.len())].to_owned();
        let revision = self.users_revision(node).unwrap_or_default();
        let secret = ring::digest::digest(&ring::digest::SHA256, letters(id).as_bytes());
        let secret = Bytes::copy_from_slice(secret.as_ref());
        Operation::AssignToken(AssignToken { user, revision, secret })
    }

    /// Of the users and roles that a member knows.
    pub(super) fn users_revision(&self, node: u64) -> Option<u64> {
        let live = self.nodes[place(node)].live.as_ref();
        Some(live?.store.view().auth().revision())
    }

    /// Whether a member lets somebody read what its view has: by the model, too.
    pub(super) fn may_read(
        &mut self,
        node: u64,
        view: &View,
        who: &Who,
        request: &RangeRequest,
    ) -> Result<bool, Violation> {
        let Some(caller) = self.identify(node, who)? else { return Ok(false) };
        let said = authorise(view.auth(), &caller, Access::Range(request), &LeaseTable::default());
        let caller: Option<command::Caller> = caller.into();
        self.invariants.stores.may_read(node, view, caller.as_ref(), request, said)?;
        self.report.denied += u64::from(said.is_err());
        Ok(said.is_ok())
    }
}
