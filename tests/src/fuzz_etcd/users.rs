//! Requests about users and roles, and other requests by users with tokens, drawn from a seed.
//!
//! Requests that are not drawn:
//! - A permission for a second range with the same first key as another range of the role. If
//!   another permission precedes it, etcd may overlook the existing one, and then stores the range
//!   twice.
//! - An empty new password for `root`: no caller could then authenticate as `root`.
//! - Ranges that end before they begin. What etcd permits for these depends on the shape of its
//!   permission tree.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use node_proto::authpb::{Permission, UserAddOptions};
use node_proto::etcdserverpb::{
    AuthRoleGrantPermissionRequest, AuthRoleRevokePermissionRequest, AuthUserAddRequest,
};

use super::concurrency::ConcurrencyCall;
use super::requests::{CallGenerator, CallWithToken, EtcdCall, ServerState, TokenChoice};
use super::server::Answer;
use crate::rng::Rng;

/// Number of slots for tokens. The first slot is for a token of `root`.
pub(super) const TOKENS: usize = 8;
/// Keys that requests use. With the keys of locks and elections, they are few enough for etcd to
/// sort in a definite order.
pub(super) const KEYS: &[&str] = &["a", "aa", "ab", "b", "b\0", "c", "d", "e", "\0", "z"];
const ROOT: &str = "root";
const USERS: [&str; 3] = [ROOT, "alice", "bob"];
const ROLES: [&str; 3] = [ROOT, "few", "many"];
const PASSWORDS: [&str; 4] = ["p", "q", "", "r"];
/// Password that is longer than bcrypt accepts.
const TOO_LONG_PASSWORD: &str =
    "seventy-three-letters-seventy-three-letters-seventy-three-letters-seventy";
/// Lease of all requests for locks and elections in this module. With a single lease no request has
/// to wait.
const LEASE: i64 = 1;

/// A request about users and roles.
#[derive(Clone, Debug)]
pub(super) enum AuthCall {
    Enable,
    Disable,
    Status,
    /// Authenticates as a user. The token is stored in the slot `token_slot`.
    Authenticate {
        name: &'static str,
        password: &'static str,
        token_slot: usize,
    },
    UserAdd(AuthUserAddRequest),
    UserGet(&'static str),
    UserList,
    UserDelete(&'static str),
    ChangePassword(&'static str, &'static str),
    GrantRole(&'static str, &'static str),
    RevokeRole(&'static str, &'static str),
    RoleAdd(&'static str),
    RoleGet(&'static str),
    RoleList,
    RoleDelete(&'static str),
    GrantPermission(AuthRoleGrantPermissionRequest),
    RevokePermission(AuthRoleRevokePermissionRequest),
}

/// Users and roles that result from the requests so far.
#[derive(Clone, Debug, Default)]
pub(super) struct ExpectedUsers {
    is_enabled: bool,
    passwords: BTreeMap<String, String>,
    /// Users who have the role `root`.
    roots: BTreeSet<String>,
    /// Permissions of each role: the ends of their ranges, by first key.
    roles: BTreeMap<String, BTreeMap<Bytes, Bytes>>,
    /// User whose token is stored in each slot, while that token is valid.
    token_users: [Option<&'static str>; TOKENS],
    /// Lock or election that was last entered, and the revision of the answer. In most cases that
    /// revision created the caller's key.
    last_entry: Option<(&'static str, i64)>,
}

impl ExpectedUsers {
    /// Records the effect of a request that wasn't refused.
    pub(super) fn record_effect(&mut self, call: &EtcdCall, answer: &Answer) {
        match call {
            EtcdCall::Auth(call) => self.record_auth_effect(call),
            EtcdCall::Concurrency(
                ConcurrencyCall::Lock { name, .. } | ConcurrencyCall::Campaign { name, .. },
            ) => {
                self.last_entry = answer.revision.map(|revision| (*name, revision));
            }
            _ => {}
        }
    }

    fn record_auth_effect(&mut self, call: &AuthCall) {
        match call {
            AuthCall::Enable => self.is_enabled = true,
            AuthCall::Disable => (self.is_enabled, self.token_users) = (false, [None; TOKENS]),
            AuthCall::Authenticate { name, token_slot: slot, .. } => {
                self.token_users[*slot] = Some(name)
            }
            AuthCall::UserAdd(add) => {
                self.passwords.insert(add.name.clone(), add.password.clone());
            }
            AuthCall::UserDelete(name) => {
                self.passwords.remove(*name);
                self.roots.remove(*name);
                self.drop_tokens_of(name);
            }
            AuthCall::ChangePassword(name, password) => {
                self.passwords.insert((*name).to_owned(), (*password).to_owned());
                self.drop_tokens_of(name);
            }
            AuthCall::GrantRole(name, ROOT) => {
                self.roots.insert((*name).to_owned());
            }
            AuthCall::RevokeRole(name, ROOT) => {
                self.roots.remove(*name);
            }
            AuthCall::RoleAdd(role) => {
                self.roles.insert((*role).to_owned(), BTreeMap::new());
            }
            AuthCall::RoleDelete(role) => {
                self.roles.remove(*role);
                if *role == ROOT {
                    self.roots.clear();
                }
            }
            AuthCall::GrantPermission(grant) => {
                let role = self.roles.entry(grant.name.clone()).or_default();
                if let Some(perm) = &grant.perm {
                    role.insert(perm.key.clone(), perm.range_end.clone());
                }
            }
            AuthCall::RevokePermission(revoke) => {
                self.roles.entry(revoke.role.clone()).or_default().remove(&revoke.key);
            }
            AuthCall::Status
            | AuthCall::UserGet(_)
            | AuthCall::UserList
            | AuthCall::GrantRole(..)
            | AuthCall::RevokeRole(..)
            | AuthCall::RoleGet(_)
            | AuthCall::RoleList => {}
        }
    }

    fn drop_tokens_of(&mut self, user: &str) {
        for holder in &mut self.token_users {
            *holder = holder.filter(|name| *name != user);
        }
    }
}

pub(super) struct UserCallGenerator<'r> {
    pub(super) rng: &'r mut Rng,
    pub(super) known: &'r ServerState,
    pub(super) users: &'r ExpectedUsers,
}

impl UserCallGenerator<'_> {
    pub(super) fn draw(&mut self) -> CallWithToken {
        let ExpectedUsers { is_enabled, token_users, .. } = self.users;
        if *is_enabled && token_users[0].is_none() && self.rng.chance(300) {
            return CallWithToken {
                token: TokenChoice::NoToken,
                call: EtcdCall::Auth(self.authenticate(ROOT, 0)),
            };
        }
        if !is_enabled && self.rng.chance(300) {
            return CallWithToken {
                token: TokenChoice::NoToken,
                call: EtcdCall::Auth(self.draw_enabling_request()),
            };
        }
        match self.rng.range(0, 100) {
            0..8 => {
                let (name, slot) = (self.user(), self.rng.pick(TOKENS - 1) + 1);
                // The token that an Authenticate request carries has no effect on the answer, so
                // any will do.
                CallWithToken {
                    token: self.draw_token(500),
                    call: EtcdCall::Auth(self.authenticate(name, slot)),
                }
            }
            8..14 => CallWithToken {
                token: self.draw_token(400),
                call: EtcdCall::Auth(self.draw_auth_read()),
            },
            14..38 => CallWithToken {
                token: self.draw_token(850),
                call: EtcdCall::Auth(self.draw_auth_change()),
            },
            38..46 => CallWithToken {
                token: self.draw_token(200),
                call: EtcdCall::Concurrency(self.draw_concurrency_call()),
            },
            _ => {
                let (rng, known) = (&mut *self.rng, self.known);
                let call = CallGenerator { rng, known, keys: KEYS, is_ordered: true }.draw_call();
                CallWithToken { token: self.draw_token(150), call }
            }
        }
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.rng.pick(of.len())]
    }

    /// Draws a token. In `roots` of 1000 cases it is a token of `root`.
    fn draw_token(&mut self, roots: u64) -> TokenChoice {
        if self.rng.chance(roots) {
            return TokenChoice::Stored(0);
        }
        match self.rng.range(0, 20) {
            0 => TokenChoice::NoToken,
            1 => TokenChoice::Invalid,
            _ => TokenChoice::Stored(self.rng.pick(TOKENS)),
        }
    }

    fn user(&mut self) -> &'static str {
        if self.rng.chance(40) { self.one_of(&["", "nobody"]) } else { self.one_of(&USERS) }
    }

    fn role(&mut self) -> &'static str {
        if self.rng.chance(40) { self.one_of(&["", "none"]) } else { self.one_of(&ROLES) }
    }

    /// Draws an authentication, mostly with the right password.
    fn authenticate(&mut self, name: &'static str, slot: usize) -> AuthCall {
        let right_password = self.users.passwords.get(name);
        let right_password = right_password.and_then(|right_password| {
            PASSWORDS.iter().find(|password| *password == right_password)
        });
        let password = match right_password {
            Some(right_password) if self.rng.chance(800) => right_password,
            _ => self.one_of(&["p", "q", "", "x", TOO_LONG_PASSWORD]),
        };
        AuthCall::Authenticate { name, password, token_slot: slot }
    }

    /// Returns the next request that is needed to enable authentication.
    fn draw_enabling_request(&mut self) -> AuthCall {
        if !self.users.passwords.contains_key(ROOT) {
            return AuthCall::UserAdd(self.new_user(ROOT));
        }
        if !self.users.roots.contains(ROOT) {
            return AuthCall::GrantRole(ROOT, ROOT);
        }
        AuthCall::Enable
    }

    fn draw_auth_read(&mut self) -> AuthCall {
        match self.rng.range(0, 5) {
            0 => AuthCall::Status,
            1 => AuthCall::UserGet(self.user()),
            2 => AuthCall::UserList,
            3 => AuthCall::RoleGet(self.role()),
            _ => AuthCall::RoleList,
        }
    }

    fn new_user(&mut self, name: &str) -> AuthUserAddRequest {
        let password = match self.rng.range(0, 40) {
            0 => TOO_LONG_PASSWORD,
            _ => self.one_of(&PASSWORDS),
        };
        let options = match self.rng.range(0, 12) {
            0 => Some(UserAddOptions { no_password: name != ROOT }),
            1 => Some(UserAddOptions { no_password: false }),
            _ => None,
        };
        AuthUserAddRequest {
            name: name.to_owned(),
            password: password.to_owned(),
            options,
            ..AuthUserAddRequest::default()
        }
    }

    fn draw_auth_change(&mut self) -> AuthCall {
        match self.rng.range(0, 100) {
            0..3 => AuthCall::Enable,
            3..5 => AuthCall::Disable,
            5..18 => {
                let name = self.user();
                AuthCall::UserAdd(self.new_user(name))
            }
            18..22 => AuthCall::UserDelete(self.user()),
            22..28 => {
                let (name, password) = (self.user(), self.one_of(&PASSWORDS));
                match password {
                    // With an empty password, nobody could authenticate as `root`.
                    "" if name == ROOT => AuthCall::ChangePassword(name, "p"),
                    "r" if self.rng.chance(100) => {
                        AuthCall::ChangePassword(name, TOO_LONG_PASSWORD)
                    }
                    _ => AuthCall::ChangePassword(name, password),
                }
            }
            28..46 => AuthCall::GrantRole(self.user(), self.role()),
            46..51 => AuthCall::RevokeRole(self.user(), self.role()),
            51..62 => AuthCall::RoleAdd(self.role()),
            62..64 => AuthCall::RoleDelete(self.role()),
            64..90 => AuthCall::GrantPermission(self.grant()),
            _ => AuthCall::RevokePermission(self.revoke()),
        }
    }

    fn grant(&mut self) -> AuthRoleGrantPermissionRequest {
        let name = self.role();
        if self.rng.chance(20) {
            return AuthRoleGrantPermissionRequest { name: name.to_owned(), perm: None };
        }
        let key = if self.rng.chance(20) { "" } else { self.one_of(KEYS) };
        let range_end = self.one_of(&["", "", "\0", "c", "e", "zz", "a"]);
        let (key, mut range_end) = (Bytes::from(key), Bytes::from(range_end));
        if let Some(existing) = self.users.roles.get(name).and_then(|role| role.get(&key)) {
            range_end = existing.clone();
        }
        let perm_type = self.one_of(&[0, 1, 2, 2]);
        let perm = Some(Permission { perm_type, key, range_end });
        AuthRoleGrantPermissionRequest { name: name.to_owned(), perm }
    }

    fn revoke(&mut self) -> AuthRoleRevokePermissionRequest {
        let role = self.role();
        let existing = self.users.roles.get(role).map(|role| role.iter().collect::<Vec<_>>());
        let (key, range_end) = match existing {
            Some(existing) if !existing.is_empty() && self.rng.chance(800) => {
                let (key, range_end) = self.one_of(&existing);
                (key.clone(), range_end.clone())
            }
            _ => (self.one_of(KEYS).into(), self.one_of(&["", "\0", "c"]).into()),
        };
        AuthRoleRevokePermissionRequest { role: role.to_owned(), key, range_end }
    }

    /// Draws a request about a lock or an election. The request names the only lease or one that
    /// doesn't exist, so it never waits.
    fn draw_concurrency_call(&mut self) -> ConcurrencyCall {
        let (name, lease) = (self.one_of(&["a", "d"]), self.one_of(&[LEASE, LEASE, LEASE, 77]));
        let (name_entered, revision) = self.users.last_entry.unwrap_or((name, 1));
        let key = format!("{name_entered}/{LEASE}").into();
        let value = self.one_of(&["x", "y"]);
        match self.rng.range(0, 6) {
            0 => ConcurrencyCall::Lock { name, lease },
            1 => ConcurrencyCall::Campaign { name, lease, value },
            2 => ConcurrencyCall::Unlock(key),
            3 => ConcurrencyCall::Proclaim { name, key, revision, lease, value },
            4 => ConcurrencyCall::Resign { name, key, revision, lease },
            _ => ConcurrencyCall::Leader(name),
        }
    }
}
