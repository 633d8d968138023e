//! Entries of users who have permission, who have none, and whose permission was checked at an
//! older revision.

use std::time::Duration;

use node_proto::authpb::{Permission, permission::Type};
use node_proto::command::{AssignToken, AuthChange, Caller};
use node_proto::etcdserverpb::{
    AuthDisableRequest, AuthEnableRequest, AuthRoleAddRequest, AuthRoleGrantPermissionRequest,
    AuthUserGrantRoleRequest,
};

use super::*;
use crate::auth::{AuthError, AuthOperation, Password, TokenSecret};

const TTL: Duration = Duration::from_secs(300);

fn user(name: &str) -> AuthOperation {
    let (name, hash) = (name.to_owned(), format!("hash-{name}").into());
    AuthOperation::UserAdd(Password { name, hash, no_password: false })
}

fn give(user: &str, role: &str) -> AuthOperation {
    let (user, role) = (user.to_owned(), role.to_owned());
    AuthOperation::UserGrantRole(AuthUserGrantRoleRequest { user, role })
}

fn refused(why: AuthError) -> Outcome {
    Err(ApplyError::Auth(why))
}

impl ApplyHarness {
    /// Creates a harness with the users `root`, and `some`, who may write the key `w`.
    fn with_users() -> Self {
        let mut world = Self::new();
        let (key, perm_type) = ("w".into(), Type::Write.into());
        let perm = Some(Permission { perm_type, key, range_end: Bytes::new() });
        let name = "little".to_owned();
        for change in [
            user("root"),
            give("root", "root"),
            user("some"),
            AuthOperation::RoleAdd(AuthRoleAddRequest { name: name.clone() }),
            AuthOperation::RoleGrantPermission(AuthRoleGrantPermissionRequest { name, perm }),
            give("some", "little"),
            AuthOperation::Enable(AuthEnableRequest {}),
        ] {
            world.change_auth(None, change).unwrap();
        }
        world
    }

    fn change_auth(&mut self, caller: Option<Caller>, change: AuthOperation) -> Outcome {
        let change = Some(change);
        self.apply_for(caller, Operation::ChangeAuth(AuthChange { change }))
    }

    fn auth_revision(&self) -> u64 {
        self.machine.store().view().auth().revision()
    }

    fn by(&self, name: &str) -> Option<Caller> {
        Some(Caller { user: name.to_owned(), revision: self.auth_revision(), member: false })
    }

    fn assign(&mut self, user: &str, revision: u64) -> (Outcome, TokenSecret) {
        let secret = TokenSecret::random();
        let (user, hash) = (user.to_owned(), secret.hash().to_vec().into());
        let assign = AssignToken { user, revision, secret: hash };
        (self.apply_for(command::member_caller(), Operation::AssignToken(assign)), secret)
    }

    fn is_known(&self, token: &str) -> bool {
        let store = self.machine.store();
        store.tokens().lock().unwrap().find(token, Duration::ZERO, TTL).is_some()
    }
}

#[test]
fn an_entry_is_authorised_by_its_caller() {
    let mut world = ApplyHarness::with_users();
    let write = |key: &str| Operation::Put(put(key, "v"));
    assert_eq!(world.apply_for(None, write("w")), refused(AuthError::UserEmpty));
    assert_eq!(world.apply_for(world.by("some"), write("x")), refused(AuthError::Denied));
    assert_eq!(world.apply_for(world.by("gone"), write("w")), refused(AuthError::Denied));
    assert!(world.keys().is_empty());
    assert!(world.apply_for(world.by("some"), write("w")).is_ok());
    assert!(world.apply_for(world.by("root"), write("x")).is_ok());
    assert!(world.apply_for(command::member_caller(), write("m")).is_ok());
    assert_eq!(world.keys(), ["m=v", "w=v", "x=v"]);
    let compact = || Operation::Compact(CompactionRequest { revision: 2, physical: false });
    let alarm = || {
        let action = AlarmAction::Activate.into();
        let alarm = AlarmType::Nospace.into();
        Operation::Alarm(AlarmRequest { action, member_id: 7, alarm })
    };
    let grant = |id| Operation::LeaseGrant(LeaseGrantRequest { id, ttl: 10 });
    let some = world.by("some");
    assert_eq!(world.apply_for(some.clone(), compact()), refused(AuthError::Denied));
    assert_eq!(world.apply_for(some.clone(), alarm()), refused(AuthError::Denied));
    assert_eq!(world.apply_for(None, grant(1)), refused(AuthError::UserEmpty));
    assert!(world.apply_for(some.clone(), grant(1)).is_ok());
    assert_eq!(world.change_auth(some, user("other")), refused(AuthError::Denied));
    assert_eq!(world.change_auth(None, user("other")), refused(AuthError::UserEmpty));
}

#[test]
fn an_entry_that_was_permitted_before_users_changed_is_refused() {
    let mut world = ApplyHarness::with_users();
    let before = world.by("some");
    world.change_auth(world.by("root"), user("other")).unwrap();
    let write = || Operation::Put(put("w", "v"));
    assert_eq!(world.apply_for(before, write()), refused(AuthError::OldRevision));
    assert!(world.apply_for(world.by("some"), write()).is_ok());
    let old_root = world.by("root");
    world.change_auth(world.by("root"), user("third")).unwrap();
    assert_eq!(world.apply_for(old_root, write()), refused(AuthError::OldRevision));
}

#[test]
fn revoking_a_lease_needs_write_permission_on_its_keys() {
    let mut world = ApplyHarness::with_users();
    let root = world.by("root");
    let grant = Operation::LeaseGrant(LeaseGrantRequest { id: 5, ttl: 10 });
    world.apply_for(root.clone(), grant).unwrap();
    let attached = |key: &str| Operation::Put(PutRequest { lease: 5, ..put(key, "v") });
    world.apply_for(root, attached("x")).unwrap();
    let some = world.by("some");
    assert_eq!(world.apply_for(some.clone(), attached("w")), refused(AuthError::Denied));
    let revoke = || Operation::LeaseRevoke(LeaseRevokeRequest { id: 5 });
    assert_eq!(world.apply_for(some, revoke()), refused(AuthError::Denied));
    // The leader's lease clock acts on a member's behalf and needs no permission.
    let over = LeaseExpire { id: 5, term: 1, granted: 8 };
    assert!(world.apply_for(command::member_caller(), Operation::LeaseExpire(over)).is_ok());
    assert!(world.keys().is_empty());
}

#[test]
fn a_token_is_assigned_and_valid_only_while_the_password_is_unchanged() {
    let mut world = ApplyHarness::with_users();
    let now = world.auth_revision();
    assert_eq!(world.assign("some", now - 1).0, refused(AuthError::OldRevision));
    assert_eq!(world.assign("gone", now).0, refused(AuthError::Failed));
    let (given, secret) = world.assign("some", now);
    let index = world.index;
    assert!(matches!(given, Ok(Response::TokenAssigned { index: at, .. }) if at == index));
    let (_, other) = world.assign("root", now);
    let (token, other) = (secret.token(index), other.token(world.index));
    assert!(world.is_known(&token) && world.is_known(&other));
    assert!(!world.is_known(&secret.token(index + 1)));
    let (name, hash) = ("some".to_owned(), "new".into());
    let password = AuthOperation::UserChangePassword(Password { name, hash, no_password: false });
    world.change_auth(world.by("root"), password).unwrap();
    assert!(!world.is_known(&token) && world.is_known(&other));
    let disable = AuthOperation::Disable(AuthDisableRequest {});
    world.change_auth(world.by("root"), disable).unwrap();
    assert!(!world.is_known(&other));
    assert_eq!(world.assign("some", world.auth_revision()).0, refused(AuthError::NotEnabled));
}

#[test]
fn a_user_without_a_password_gets_no_token() {
    let mut world = ApplyHarness::with_users();
    let certified = Password { name: "host".to_owned(), hash: Bytes::new(), no_password: true };
    world.change_auth(world.by("root"), AuthOperation::UserAdd(certified)).unwrap();
    assert_eq!(world.assign("host", world.auth_revision()).0, refused(AuthError::Failed));
}

#[test]
fn users_can_be_changed_under_any_alarm() {
    let mut world = ApplyHarness::with_users();
    for alarm in [AlarmType::Nospace, AlarmType::Corrupt] {
        let (action, alarm) = (AlarmAction::Activate.into(), alarm.into());
        let raise = Operation::Alarm(AlarmRequest { action, member_id: 7, alarm });
        world.apply_for(world.by("root"), raise).unwrap();
    }
    assert!(world.change_auth(world.by("root"), user("other")).is_ok());
    assert!(world.assign("other", world.auth_revision()).0.is_ok());
}
