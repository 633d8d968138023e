//! Tests that users and roles survive checkpoints and are part of snapshots, like all other data.

use std::time::Duration;

use node_proto::authpb::{Permission, permission::Type};
use node_proto::command::AuthChange;
use node_proto::etcdserverpb::{
    AuthEnableRequest, AuthRoleAddRequest, AuthRoleGrantPermissionRequest, AuthUserDeleteRequest,
    AuthUserGrantRoleRequest,
};
use redb::ReadableDatabase as _;

use super::*;
use crate::auth::{AuthOperation, AuthState, Password, TokenSecret};

fn change(writer: &mut StoreWriter, index: u64, change: AuthOperation) {
    write(writer, index, |batch| {
        let mut auth = batch.auth().clone();
        let revoked = auth.change(AuthChange { change: Some(change) }).unwrap();
        batch.set_auth(auth);
        batch.revoke_tokens(revoked);
    });
}

fn user(name: &str) -> AuthOperation {
    let (name, hash) = (name.to_owned(), format!("hash-{name}").into());
    AuthOperation::UserAdd(Password { name, hash, no_password: false })
}

/// Makes a store with users. Its last entry has index 6.
fn with_users(disk: &SimulatedDisk) -> StoreWriter {
    let mut writer = open(disk, CompactionMode::Background);
    let (role, perm_type) = ("r".to_owned(), Type::Read.into());
    let perm = Some(Permission { perm_type, key: bytes("a"), range_end: bytes("c") });
    for (index, what) in [
        user("root"),
        user("u"),
        AuthOperation::RoleAdd(AuthRoleAddRequest { name: role.clone() }),
        AuthOperation::RoleGrantPermission(AuthRoleGrantPermissionRequest { name: role, perm }),
        AuthOperation::UserGrantRole(AuthUserGrantRoleRequest {
            user: "root".into(),
            role: "root".into(),
        }),
        AuthOperation::Enable(AuthEnableRequest {}),
    ]
    .into_iter()
    .enumerate()
    {
        change(&mut writer, index as u64 + 1, what);
    }
    writer
}

fn auth(writer: &StoreWriter) -> AuthState {
    writer.store().view().auth().clone()
}

#[test]
fn users_and_deletions_of_users_survive_a_power_cut() {
    let disk = disk(1);
    let mut writer = with_users(&disk);
    change(&mut writer, 7, user("gone"));
    change(
        &mut writer,
        8,
        AuthOperation::UserDelete(AuthUserDeleteRequest { name: "gone".to_owned() }),
    );
    writer.checkpoint().unwrap();
    let before = auth(&writer);
    disk.crash();
    drop(writer);
    let again = auth(&open(&disk, CompactionMode::Background));
    assert_eq!(again, before);
    assert!(again.is_enabled() && again.user("u").is_some() && again.user("gone").is_none());
    assert_eq!((again.revision(), again.user("u").unwrap().hash()), (8, Some(&bytes("hash-u"))));
}

#[test]
fn installing_a_snapshot_replaces_users_and_drops_tokens() {
    let source = with_users(&disk(1));
    let target = disk(2);
    let mut other = open(&target, CompactionMode::Background);
    change(&mut other, 1, user("old"));
    let secret = TokenSecret::random();
    write(&mut other, 2, |batch| batch.assign_token(2, secret.hash(), "old"));
    let find = |writer: &StoreWriter| {
        let (token, ttl) = (secret.token(2), Duration::from_secs(1));
        writer.store().tokens().lock().unwrap().find(&token, Duration::ZERO, ttl)
    };
    assert_eq!(find(&other).as_deref(), Some("old"));
    let mut stream = Vec::new();
    source.store().view().write_snapshot(&mut stream).unwrap();
    other.install_snapshot(&mut &stream[..]).unwrap();
    assert_eq!(find(&other), None);
    assert_eq!(auth(&other), auth(&source));
    let sums = [&source, &other].map(|writer| writer.store().view().checksum().unwrap());
    assert_eq!(sums[0], sums[1]);
    target.crash();
    drop(other);
    assert_eq!(auth(&open(&target, CompactionMode::Background)), auth(&source));
    // A snapshot of a store without users removes the users of the store that installs it.
    let nobody = StoreWriter::open(backend(&disk(3)), StoreOptions::default()).unwrap();
    let mut stream = Vec::new();
    nobody.store().view().write_snapshot(&mut stream).unwrap();
    let mut other = open(&target, CompactionMode::Background);
    other.install_snapshot(&mut &stream[..]).unwrap();
    assert_eq!(auth(&other), AuthState::default());
}

#[test]
fn the_checksum_includes_users() {
    let mut writer = with_users(&disk(1));
    let before = writer.store().view().checksum().unwrap();
    change(&mut writer, 7, user("other"));
    assert_ne!(writer.store().view().checksum().unwrap(), before);
}

#[test]
fn a_store_of_an_older_format_is_upgraded() {
    for format in tables::UPGRADABLE_FORMATS {
        let disk = disk(1);
        let mut writer = open(&disk, CompactionMode::Background);
        put(&mut writer, 1, "k", "v");
        writer.checkpoint().unwrap();
        drop(writer);
        {
            let db = redb::Builder::new().create_with_backend(backend(&disk)).unwrap();
            let txn = db.begin_write().unwrap();
            txn.delete_table(tables::USERS).unwrap();
            txn.delete_table(tables::ROLES).unwrap();
            if format == 2 {
                txn.delete_table(tables::LEASES).unwrap();
            }
            let mut meta = txn.open_table(tables::META).unwrap();
            meta.insert("format", &format.to_le_bytes()[..]).unwrap();
            drop(meta);
            txn.commit().unwrap();
        }
        let mut writer = open(&disk, CompactionMode::Background);
        assert_eq!(
            (show(&writer.store(), 0), auth(&writer)),
            (vec!["k=v@1".to_owned()], AuthState::default())
        );
        change(&mut writer, 2, user("u"));
        writer.checkpoint().unwrap();
        drop(writer);
        assert_eq!(auth(&open(&disk, CompactionMode::Background)).revision(), 2);
        let db = redb::Builder::new().create_with_backend(backend(&disk)).unwrap();
        let txn = db.begin_read().unwrap();
        assert!(txn.open_table(tables::LEASES).is_ok());
        let now = tables::read_format(&txn.open_table(tables::META).unwrap()).unwrap();
        assert_eq!(now, Some(tables::FORMAT), "an older build refuses it from now on");
    }
}
