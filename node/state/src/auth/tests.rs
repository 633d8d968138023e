//! Tests of permissions. Changes are written in words, as an operator would state them.

use std::collections::BTreeSet;

use bytes::Bytes;
use node_proto::authpb::{Permission, permission::Type};
use node_proto::command::AuthChange;
use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::{
    AuthDisableRequest, AuthEnableRequest, AuthRoleAddRequest, AuthRoleDeleteRequest,
    AuthRoleGrantPermissionRequest, AuthRoleRevokePermissionRequest, AuthUserDeleteRequest,
    AuthUserGrantRoleRequest, AuthUserRevokeRoleRequest, Compare, DeleteRangeRequest, PutRequest,
    RangeRequest, RequestOp, TxnRequest, WatchCreateRequest,
};

use super::state::MAX_BYTES;
use super::*;
use crate::lease::{Lease, LeaseTable};

const READ: Type = Type::Read;
const WRITE: Type = Type::Write;

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

/// Parses a change from words separated by spaces. Ranges are written `key..end`.
fn change(words: &str) -> AuthOperation {
    let words: Vec<&str> = words.split(' ').collect();
    let text = |n: usize| words.get(n).copied().unwrap_or_default().to_owned();
    let range = |n: usize| match text(n).split_once("..") {
        Some((key, "")) => (bytes(key), Bytes::from_static(b"\0")),
        Some((key, end)) => (bytes(key), bytes(end)),
        None => (bytes(&text(n)), Bytes::new()),
    };
    let password = || Password { name: text(1), hash: bytes(&text(2)), no_password: false };
    match words[0] {
        "enable" => AuthOperation::Enable(AuthEnableRequest {}),
        "disable" => AuthOperation::Disable(AuthDisableRequest {}),
        "user" => AuthOperation::UserAdd(password()),
        "certified" => AuthOperation::UserAdd(Password { no_password: true, ..password() }),
        "password" => AuthOperation::UserChangePassword(password()),
        "no-user" => AuthOperation::UserDelete(AuthUserDeleteRequest { name: text(1) }),
        "give" => {
            AuthOperation::UserGrantRole(AuthUserGrantRoleRequest { user: text(1), role: text(2) })
        }
        "take" => AuthOperation::UserRevokeRole(AuthUserRevokeRoleRequest {
            name: text(1),
            role: text(2),
        }),
        "role" => AuthOperation::RoleAdd(AuthRoleAddRequest { name: text(1) }),
        "no-role" => AuthOperation::RoleDelete(AuthRoleDeleteRequest { role: text(1) }),
        "forbid" => {
            let (key, range_end) = range(2);
            let role = text(1);
            AuthOperation::RoleRevokePermission(AuthRoleRevokePermissionRequest {
                role,
                key,
                range_end,
            })
        }
        kind => {
            let perm_type = match kind {
                "read" => READ,
                "write" => WRITE,
                "both" => Type::Readwrite,
                other => panic!("{other}?"),
            };
            let (key, range_end) = range(2);
            let perm = Some(Permission { perm_type: perm_type.into(), key, range_end });
            let name = text(1);
            AuthOperation::RoleGrantPermission(AuthRoleGrantPermissionRequest { name, perm })
        }
    }
}

fn apply_words(state: &mut AuthState, words: &str) -> Result<RevokedTokens, AuthError> {
    state.change(AuthChange { change: Some(change(words)) })
}

fn state_with(all: &[&str]) -> AuthState {
    let mut state = AuthState::default();
    for words in all {
        apply_words(&mut state, words).unwrap_or_else(|why| panic!("{words}: {why}"));
    }
    state
}

/// Creates three users: `root`, `some` who may do little, and `none` who may do nothing.
fn state_with_three_users() -> AuthState {
    state_with(&[
        "user root r",
        "role root",
        "give root root",
        "user some s",
        "user none n",
        "role little",
        "read little a..c",
        "read little r",
        "write little w",
        "both little b",
        "give some little",
        "enable",
    ])
}

fn caller(state: &AuthState, name: &str) -> Caller {
    Caller::User { name: name.into(), revision: state.revision() }
}

fn may(state: &AuthState, caller: &Caller, access: RequestedAccess<'_>) -> Result<(), AuthError> {
    authorise(state, caller, access, &LeaseTable::default())
}

fn range(key: &str, end: &str) -> RangeRequest {
    RangeRequest { key: bytes(key), range_end: bytes(end), ..RangeRequest::default() }
}

fn put(key: &str) -> PutRequest {
    PutRequest { key: bytes(key), ..PutRequest::default() }
}

fn delete(key: &str, end: &str) -> DeleteRangeRequest {
    DeleteRangeRequest { key: bytes(key), range_end: bytes(end), prev_kv: false }
}

fn txn(operations: Vec<Request>) -> TxnRequest {
    let success = operations.into_iter().map(|one| RequestOp { request: Some(one) }).collect();
    TxnRequest { success, ..TxnRequest::default() }
}

/// Nests an operation in the failure branches of `depth` transactions.
fn buried(operation: Request, depth: usize) -> TxnRequest {
    let mut inner = operation;
    for _ in 0..depth {
        let failure = vec![RequestOp { request: Some(inner) }];
        inner = Request::RequestTxn(TxnRequest { failure, ..TxnRequest::default() });
    }
    TxnRequest { failure: vec![RequestOp { request: Some(inner) }], ..TxnRequest::default() }
}

#[test]
fn changes_are_made_or_refused_as_in_etcd() {
    use AuthError::{
        InvalidManagement, NoRootRole, NoRootUser, PermissionNotGiven, PermissionNotGranted,
        RoleEmpty, RoleExists, RoleNotFound, RoleNotGranted, UserEmpty, UserExists, UserNotFound,
    };
    let mut state = AuthState::default();
    let nobody = || Ok(RevokedTokens::NoUser);
    let forget = |name: &str| Ok(RevokedTokens::User(name.to_owned()));
    let steps: Vec<(&str, Result<RevokedTokens, AuthError>, u64)> = vec![
        ("enable", Err(NoRootUser), 1),
        ("disable", nobody(), 1),
        ("user root r", nobody(), 2),
        ("enable", Err(NoRootRole), 2),
        ("give root root", nobody(), 3),
        ("give root root", nobody(), 3),
        ("take root root", nobody(), 4),
        ("give root other", Err(RoleNotFound), 4),
        ("give other root", Err(UserNotFound), 4),
        ("role root", nobody(), 5),
        ("give root root", nobody(), 6),
        ("user ", Err(UserEmpty), 6),
        ("user root x", Err(UserExists), 6),
        ("role ", Err(RoleEmpty), 6),
        ("role root", Err(RoleExists), 6),
        ("enable", nobody(), 6),
        ("enable", nobody(), 6),
        ("no-user root", Err(InvalidManagement), 6),
        ("no-role root", Err(InvalidManagement), 6),
        ("take root root", Err(InvalidManagement), 6),
        ("user u p", nobody(), 7),
        ("password u q", forget("u"), 8),
        ("password v q", Err(UserNotFound), 8),
        ("read r k", Err(RoleNotFound), 8),
        ("role r", nobody(), 9),
        ("read r ", Err(InvalidManagement), 9),
        ("read r b..a", Err(InvalidManagement), 9),
        ("read r a..a", Err(InvalidManagement), 9),
        ("read r k", nobody(), 10),
        ("read r z..", nobody(), 11),
        ("forbid r k..z", Err(PermissionNotGranted), 11),
        ("forbid q k", Err(RoleNotFound), 11),
        ("forbid r k", nobody(), 12),
        ("take u r", Err(RoleNotGranted), 12),
        ("give u r", nobody(), 13),
        ("no-role r", nobody(), 14),
        ("take u r", Err(RoleNotGranted), 14),
        ("no-role r", Err(RoleNotFound), 14),
        ("no-user u", forget("u"), 15),
        ("no-user u", Err(UserNotFound), 15),
        ("disable", Ok(RevokedTokens::AllUsers), 16),
        ("disable", nobody(), 16),
        ("no-user root", forget("root"), 17),
    ];
    for (words, expected, revision) in steps {
        let before = state.clone();
        let done = apply_words(&mut state, words);
        assert_eq!((done.clone(), state.revision()), (expected, revision), "{words}");
        if done.is_err() {
            assert_eq!(state, before, "{words}");
        }
    }
    let nothing = AuthRoleGrantPermissionRequest { name: "root".to_owned(), perm: None };
    let nothing = AuthChange { change: Some(AuthOperation::RoleGrantPermission(nothing)) };
    assert_eq!(state.change(nothing), Err(PermissionNotGiven));
    assert_eq!(state.change(AuthChange { change: None }), Err(InvalidManagement));
}

#[test]
fn the_user_root_cannot_lose_the_role_root_while_authentication_is_enabled() {
    let mut state = state_with_three_users();
    for words in ["give root little", "give some root", "take root little", "take some root"] {
        assert_eq!(apply_words(&mut state, words), Ok(RevokedTokens::NoUser), "{words}");
    }
    assert_eq!(apply_words(&mut state, "take root root"), Err(AuthError::InvalidManagement));
}

#[test]
fn a_user_added_without_a_password_stays_without_one() {
    let mut state = state_with(&["certified host", "user u p"]);
    for (words, hash) in [("password host q", None), ("password u q", Some(bytes("q")))] {
        let name = words.split(' ').nth(1).unwrap();
        assert_eq!(apply_words(&mut state, words), Ok(RevokedTokens::User(name.to_owned())));
        assert_eq!(state.user(name).unwrap().hash(), hash.as_ref(), "{words}");
    }
}

#[test]
fn a_permission_replaces_another_one_of_the_same_range() {
    let mut state = state_with(&["role r", "read r k", "read r k..z", "write r a"]);
    apply_words(&mut state, "write r k..z").unwrap();
    let shown: Vec<_> = state
        .role_permissions("r")
        .unwrap()
        .into_iter()
        .map(|one| (one.key, one.perm_type))
        .collect();
    assert_eq!(shown, [(bytes("a"), 1), (bytes("k"), 0), (bytes("k"), 1)]);
}

#[test]
fn rows_restore_the_whole_state_and_invalid_rows_are_refused() {
    let mut state = state_with_three_users();
    apply_words(&mut state, "certified host").unwrap();
    let users: Vec<_> = state.user_rows().map(|(_, row)| row).collect();
    let roles: Vec<_> = state.role_rows().map(|(_, row)| row).collect();
    let again = AuthState::from_rows(true, state.revision(), users.clone(), roles.clone());
    assert_eq!(again.as_ref(), Ok(&state));
    assert_eq!(again.unwrap().bytes, state.bytes);
    assert_eq!(state.user("host").unwrap().hash(), None);
    for name in [Bytes::new(), Bytes::from_static(&[0xff])] {
        let mut wrong = users.clone();
        wrong[0].name = name;
        assert!(AuthState::from_rows(true, 1, wrong, roles.clone()).is_err());
    }
}

#[test]
fn the_size_of_users_and_roles_is_limited() {
    let mut state = AuthState::default();
    let long = "x".repeat(MAX_BYTES / 2);
    apply_words(&mut state, &format!("role {long}")).unwrap();
    apply_words(&mut state, "user u p").unwrap();
    assert_eq!(apply_words(&mut state, &format!("read {long} {long}")), Err(AuthError::TooLarge));
    assert_eq!(apply_words(&mut state, &format!("give u {long}")), Err(AuthError::TooLarge));
    apply_words(&mut state, &format!("role y{long}")).unwrap_err();
    apply_words(&mut state, &format!("no-role {long}")).unwrap();
    apply_words(&mut state, &format!("role y{long}")).unwrap();
    apply_words(&mut state, &format!("no-role y{long}")).unwrap();
    apply_words(&mut state, "no-user u").unwrap();
    assert_eq!(state.bytes, 0);
}

#[test]
fn without_authentication_everybody_may_do_everything() {
    let state = state_with(&["user root r", "give root root"]);
    for access in [
        RequestedAccess::RootRole,
        RequestedAccess::AnyUser,
        RequestedAccess::ListLeases,
        RequestedAccess::Put(&put("k")),
    ] {
        assert_eq!(may(&state, &Caller::Unauthenticated, access), Ok(()));
    }
}

#[test]
fn whether_an_access_is_allowed_depends_on_the_caller() {
    use AuthError::{Denied, OldRevision, UserEmpty, UserNotFound};
    let state = state_with_three_users();
    let (read, write) = (range("a", ""), put("w"));
    let old = Caller::User { name: "some".into(), revision: state.revision() - 1 };
    let old_root = Caller::User { name: "root".into(), revision: state.revision() - 1 };
    let accesses = [
        RequestedAccess::Range(&read),
        RequestedAccess::Put(&write),
        RequestedAccess::AnyUser,
        RequestedAccess::RootRole,
    ];
    let expected: [(Caller, [Result<(), AuthError>; 4]); 8] = [
        (Caller::Unauthenticated, [Err(UserEmpty); 4]),
        (Caller::Member, [Ok(()); 4]),
        (caller(&state, "root"), [Ok(()); 4]),
        (caller(&state, "some"), [Ok(()), Ok(()), Ok(()), Err(Denied)]),
        (caller(&state, "none"), [Err(Denied), Err(Denied), Ok(()), Err(Denied)]),
        (caller(&state, "gone"), [Err(Denied), Err(Denied), Ok(()), Err(UserNotFound)]),
        (old, [Err(OldRevision), Err(OldRevision), Ok(()), Err(Denied)]),
        (old_root, [Err(OldRevision), Err(OldRevision), Ok(()), Ok(())]),
    ];
    for (caller, expected) in expected {
        for (access, expected) in accesses.into_iter().zip(expected) {
            assert_eq!(may(&state, &caller, access), expected, "{caller:?} {access:?}");
        }
        for open in [RequestedAccess::AnyCaller, RequestedAccess::Authenticate] {
            assert_eq!(may(&state, &caller, open), Ok(()));
        }
    }
}

#[test]
fn keys_can_be_read_and_written_as_far_as_roles_permit() {
    let state = state_with_three_users();
    let some = caller(&state, "some");
    let ranges = [
        ("a", "", true),
        ("a", "c", true),
        ("a", "d", false),
        ("a", "\0", false),
        ("r", "", true),
        ("r", "s", false),
        ("w", "", false),
        ("b", "", true),
    ];
    for (key, end, allowed) in ranges {
        let (range, key, range_end) = (range(key, end), bytes(key), bytes(end));
        let watch = WatchCreateRequest { key, range_end, ..WatchCreateRequest::default() };
        for access in [RequestedAccess::Range(&range), RequestedAccess::Watch(&watch)] {
            assert_eq!(may(&state, &some, access).is_ok(), allowed, "{access:?}");
        }
    }
    for (key, allowed) in [("w", true), ("b", true), ("a", false), ("r", false), ("x", false)] {
        let put = put(key);
        assert_eq!(may(&state, &some, RequestedAccess::Put(&put)).is_ok(), allowed, "{key}");
    }
    for (key, end, allowed) in
        [("w", "", true), ("w", "x", false), ("b", "w", false), ("w", "\0", false)]
    {
        let delete = delete(key, end);
        let done = may(&state, &some, RequestedAccess::DeleteRange(&delete));
        assert_eq!(done.is_ok(), allowed, "{key} {end}");
    }
}

#[test]
fn changing_a_role_changes_the_permissions_of_its_users() {
    let mut state = state_with_three_users();
    let asked = put("k");
    let allowed = |state: &AuthState| {
        may(state, &caller(state, "some"), RequestedAccess::Put(&asked)).is_ok()
    };
    for (words, after) in [
        ("write little k", true),
        ("read little k", false),
        ("both little k", true),
        ("forbid little k", false),
        ("write little k..l", true),
        ("take some little", false),
        ("give some little", true),
        ("no-role little", false),
        ("role little", false),
    ] {
        apply_words(&mut state, words).unwrap();
        assert_eq!(allowed(&state), after, "{words}");
    }
}

#[test]
fn returning_the_previous_value_needs_read_permission() {
    let state = state_with_three_users();
    let some = caller(&state, "some");
    for (key, allowed) in [("w", false), ("b", true)] {
        let put = PutRequest { prev_kv: true, ..put(key) };
        let delete = DeleteRangeRequest { prev_kv: true, ..delete(key, "") };
        assert_eq!(may(&state, &some, RequestedAccess::Put(&put)).is_ok(), allowed, "{key}");
        assert_eq!(
            may(&state, &some, RequestedAccess::DeleteRange(&delete)).is_ok(),
            allowed,
            "{key}"
        );
    }
    // Returning the deleted values of a range needs read permission for all of it.
    let root = ["user root r", "give root root"];
    let role = ["role r", "write r a..d", "read r a..c", "user some s", "give some r", "enable"];
    let state = state_with(&[&root[..], &role].concat());
    for (end, allowed) in [("c", true), ("d", false)] {
        let delete = DeleteRangeRequest { prev_kv: true, ..delete("a", end) };
        let done = may(&state, &caller(&state, "some"), RequestedAccess::DeleteRange(&delete));
        assert_eq!(done.is_ok(), allowed, "a..{end}");
    }
}

#[test]
fn a_forbidden_operation_at_any_depth_makes_a_transaction_forbidden() {
    let state = state_with_three_users();
    let some = caller(&state, "some");
    let with_previous = PutRequest { prev_kv: true, ..put("w") };
    let deleted = DeleteRangeRequest { prev_kv: true, ..delete("w", "") };
    let forbidden = [
        Request::RequestRange(range("w", "")),
        Request::RequestRange(range("a", "d")),
        Request::RequestPut(put("a")),
        Request::RequestPut(with_previous),
        Request::RequestDeleteRange(delete("a", "")),
        Request::RequestDeleteRange(delete("w", "\0")),
        Request::RequestDeleteRange(deleted),
    ];
    for operation in forbidden {
        for depth in 0..4 {
            let hidden = buried(operation.clone(), depth);
            let done = may(&state, &some, RequestedAccess::Txn(&hidden));
            assert_eq!(done, Err(AuthError::Denied), "{depth} {operation:?}");
            assert_eq!(may(&state, &caller(&state, "root"), RequestedAccess::Txn(&hidden)), Ok(()));
            assert_eq!(
                may(&state, &Caller::Unauthenticated, RequestedAccess::Txn(&hidden)),
                Err(AuthError::UserEmpty)
            );
        }
    }
    for depth in 0..4 {
        let allowed = buried(Request::RequestPut(put("w")), depth);
        assert_eq!(may(&state, &some, RequestedAccess::Txn(&allowed)), Ok(()));
    }
    let guess = Compare { key: bytes("w"), ..Compare::default() };
    let mut compared = txn(vec![Request::RequestPut(put("w"))]);
    assert_eq!(may(&state, &some, RequestedAccess::Txn(&compared)), Ok(()));
    compared.compare.push(guess.clone());
    assert_eq!(may(&state, &some, RequestedAccess::Txn(&compared)), Err(AuthError::Denied));
    for (end, allowed) in [("c", true), ("d", false), ("\0", false)] {
        let compare = vec![Compare { key: bytes("b"), range_end: bytes(end), ..guess.clone() }];
        let compared = TxnRequest { compare, ..TxnRequest::default() };
        assert_eq!(may(&state, &some, RequestedAccess::Txn(&compared)).is_ok(), allowed, "{end:?}");
    }
    let inner = TxnRequest { compare: vec![guess], ..TxnRequest::default() };
    let nested = txn(vec![Request::RequestTxn(inner)]);
    assert_eq!(may(&state, &some, RequestedAccess::Txn(&nested)), Err(AuthError::Denied));
    let empty = TxnRequest::default();
    assert_eq!(
        may(&state, &Caller::Unauthenticated, RequestedAccess::Txn(&empty)),
        Err(AuthError::UserEmpty)
    );
    assert_eq!(may(&state, &some, RequestedAccess::Txn(&empty)), Ok(()));
}

#[test]
fn using_a_lease_needs_permission_for_its_attached_keys() {
    let state = state_with_three_users();
    let (some, root) = (caller(&state, "some"), caller(&state, "root"));
    let mut leases = LeaseTable::default();
    for (id, keys) in [(1, ["w", "b"].as_slice()), (2, &["w", "a"]), (3, &[]), (4, &["r", "b"])] {
        leases.restore(Lease { id, ttl: 10, remaining_ttl: 0, grant_index: 1 });
        keys.iter().for_each(|key| leases.attach(key.as_bytes(), id));
    }
    fn asked(
        (state, leases): (&AuthState, &LeaseTable),
        caller: &Caller,
        access: RequestedAccess<'_>,
    ) -> Result<(), AuthError> {
        authorise(state, caller, access, leases)
    }
    let all = (&state, &leases);
    let attached = |id| PutRequest { lease: id, ..put("w") };
    // A key is attached to one lease only: `w` was moved to the second lease, and `b` to the
    // fourth.
    for (id, own, readable) in
        [(1, true, true), (2, false, false), (3, true, true), (4, false, true), (9, true, true)]
    {
        let put = attached(id);
        let hidden = buried(Request::RequestPut(put.clone()), 2);
        for access in [
            RequestedAccess::LeaseRevoke(id),
            RequestedAccess::LeaseKeepAlive(id),
            RequestedAccess::Put(&put),
            RequestedAccess::Txn(&hidden),
        ] {
            assert_eq!(asked(all, &some, access).is_ok(), own, "{access:?}");
            assert_eq!(asked(all, &root, access), Ok(()), "{access:?}");
            assert_eq!(
                asked(all, &Caller::Unauthenticated, access),
                Err(AuthError::UserEmpty),
                "{access:?}"
            );
        }
        assert_eq!(asked(all, &some, RequestedAccess::LeaseKeys(id)).is_ok(), readable, "{id}");
    }
    assert_eq!(asked(all, &some, RequestedAccess::ListLeases), Err(AuthError::Denied));
    assert_eq!(asked(all, &root, RequestedAccess::ListLeases), Ok(()));
    assert_eq!(
        asked(all, &Caller::Unauthenticated, RequestedAccess::ListLeases),
        Err(AuthError::UserEmpty)
    );
}

#[test]
fn each_lease_of_a_transaction_is_checked() {
    let (state, mut leases) = (state_with_three_users(), LeaseTable::default());
    for (id, key) in [(1, "w"), (2, "other")] {
        leases.restore(Lease { id, ttl: 10, remaining_ttl: 0, grant_index: 1 });
        leases.attach(key.as_bytes(), id);
    }
    let some = caller(&state, "some");
    let attached = |id| Request::RequestPut(PutRequest { lease: id, ..put("w") });
    let asked = |ids: &[i64]| {
        let txn = txn(ids.iter().map(|id| attached(*id)).collect());
        authorise(&state, &some, RequestedAccess::Txn(&txn), &leases)
    };
    assert_eq!(asked(&[1, 1, 0, 1]), Ok(()));
    assert_eq!(asked(&[1, 2]), Err(AuthError::Denied));
    assert_eq!(asked(&[1, 0, 2, 1]), Err(AuthError::Denied));
}

#[test]
fn listing_leases_needs_read_permission_for_all_attached_keys() {
    let state = state_with_three_users();
    let some = caller(&state, "some");
    for (keys, allowed) in [(["r", "a"], true), (["r", "w"], false), (["b", "x"], false)] {
        let mut leases = LeaseTable::default();
        for (id, key) in (1..).zip(keys) {
            leases.restore(Lease { id, ttl: 10, remaining_ttl: 0, grant_index: 1 });
            leases.attach(key.as_bytes(), id);
        }
        let asked = authorise(&state, &some, RequestedAccess::ListLeases, &leases);
        assert_eq!(asked.is_ok(), allowed, "{keys:?}");
    }
}

#[test]
fn users_can_get_themselves_and_their_own_roles() {
    let state = state_with_three_users();
    let (some, none) = (caller(&state, "some"), caller(&state, "none"));
    assert_eq!(may(&state, &some, RequestedAccess::UserGet("some")), Ok(()));
    assert_eq!(may(&state, &some, RequestedAccess::UserGet("none")), Err(AuthError::Denied));
    assert_eq!(may(&state, &some, RequestedAccess::RoleGet("little")), Ok(()));
    assert_eq!(may(&state, &none, RequestedAccess::RoleGet("little")), Err(AuthError::Denied));
    assert_eq!(may(&state, &some, RequestedAccess::RoleGet("root")), Err(AuthError::Denied));
    assert_eq!(
        may(&state, &Caller::Unauthenticated, RequestedAccess::UserGet("")),
        Err(AuthError::UserEmpty)
    );
    let root = caller(&state, "root");
    for access in [
        RequestedAccess::UserGet("some"),
        RequestedAccess::UserGet("who"),
        RequestedAccess::RoleGet("what"),
    ] {
        assert_eq!(may(&state, &root, access), Ok(()));
    }
}

#[test]
fn the_role_root_has_permission_for_all_keys() {
    let state = state_with_three_users();
    let all = state.role_permissions("root").unwrap();
    assert_eq!((all.len(), &all[0].key[..], &all[0].range_end[..]), (1, &b""[..], &b"\0"[..]));
    assert_eq!(state.role_permissions("nobody"), None);
    let users: BTreeSet<_> = state.users().collect();
    assert_eq!(users, ["none", "root", "some"].into());
    assert_eq!(state.roles().collect::<Vec<_>>(), ["little", "root"]);
}

#[test]
fn the_debug_output_of_users_shows_no_hash() {
    let shown = format!("{:?}", state_with(&["user u canary"]));
    assert!(shown.contains("\"u\"") && !shown.contains("canary"), "{shown}");
}
