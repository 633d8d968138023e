//! Tests with files that stock etcd wrote, with files that etcd never writes, and with our own.
//!
//! The fixtures were saved by `etcdctl snapshot save` from etcd 3.4.23 and 3.7.3 after the same
//! requests. These were puts, deletes, a transaction, a compaction at revision 12, and a value
//! larger than a page. The file of 3.6.16 was saved after a shorter sequence of such requests, with
//! a compaction at 6. The checksums are what those servers answered to `etcdctl endpoint hashkv
//! --rev`.

use std::io::Cursor;

use node_bbolt::{BboltWriteError, Builder};
use node_proto::etcdserverpb::{AlarmMember, RangeRequest};
use node_proto::mvccpb::KeyValue;
use prost::Message as _;

use super::names::{KEY, META};
use super::*;
use crate::identity::MemberId;
use crate::membership::{MemberChange, MemberTable};
use crate::mvcc::tests::{backend, disk, member};
use crate::mvcc::{CompactionMode, Contents, EtcdKey, Revision, StoreOptions, StoreWriter};
use crate::state_machine::Position;

const ETCD_3_4: &[u8] = include_bytes!("fixtures/etcd-3.4.db");
const ETCD_3_6: &[u8] = include_bytes!("fixtures/etcd-3.6.db");
const ETCD_3_7: &[u8] = include_bytes!("fixtures/etcd-3.7.db");
/// File of etcd 3.7.3 after the requests that the module's documentation lists, and some more. Two
/// leases were granted and three keys attached to them. One of these keys was then put again
/// without a lease. Authentication is enabled, with one user and two roles.
const WITH_AUTH: &[u8] = include_bytes!("fixtures/etcd-3.7-auth-and-leases.db");

const CHECKSUMS: [(i64, u32); 9] = [
    (13, 945_523_483),
    (15, 2_864_565_636),
    (17, 1_286_175_960),
    (18, 3_453_934_592),
    (19, 3_373_182_795),
    (21, 3_838_875_603),
    (24, 31_297_093),
    (26, 2_794_703_486),
    (27, 1_820_425_907),
];

const SHORTER: [(i64, u32); 4] =
    [(8, 1_896_003_947), (15, 3_435_580_366), (17, 3_364_439_187), (18, 2_473_428_273)];

type OpenedFile = EtcdFile<Cursor<Vec<u8>>>;

fn open(file: &[u8]) -> Result<OpenedFile, EtcdFileError> {
    EtcdFile::open(Cursor::new(file.to_vec()), HashCheck::Required)
}

fn unhashed(file: &[u8]) -> Result<OpenedFile, EtcdFileError> {
    EtcdFile::open(Cursor::new(file.to_vec()), HashCheck::Skipped)
}

/// Imports the contents of a file into a new store.
fn import(file: &mut OpenedFile) -> Result<StoreWriter, EtcdFileError> {
    import_into(CompactionMode::Inline, file)
}

fn import_into(
    compaction: CompactionMode,
    file: &mut OpenedFile,
) -> Result<StoreWriter, EtcdFileError> {
    let disk = disk(1);
    let options = StoreOptions { cache_bytes: 1 << 20, compaction, ..StoreOptions::default() };
    let mut writer = StoreWriter::open(backend(&disk), options).unwrap();
    let summary = file.summary().clone();
    let contents = Contents {
        applied: Position { index: 7, term: 3 },
        revision: summary.revision,
        compact_revision: summary.compacted,
        members: MemberTable::new([member(1, "a")]),
        alarms: summary.alarms,
        leases: file.leases()?,
        auth: file.auth()?,
    };
    let records = file.records()?;
    writer.import(contents, |take| {
        records.for_each(|at, record| Ok::<_, EtcdFileError>(take(at, record)?))
    })?;
    Ok(writer)
}

fn export(writer: &StoreWriter) -> Vec<u8> {
    let export = Export::new(&writer.store(), &|| true).unwrap();
    let mut file = Vec::new();
    export.write(&mut file).unwrap();
    assert_eq!(file.len() as u64, export.file_bytes() + 32);
    file
}

fn everything(writer: &StoreWriter, revision: i64) -> Vec<KeyValue> {
    let from = b"\0".as_slice().into();
    let request = RangeRequest {
        key: from,
        range_end: b"\0".as_slice().into(),
        revision,
        ..Default::default()
    };
    let store = writer.store();
    store.range(&store.view(), &request).unwrap().kvs
}

fn checksum(writer: &StoreWriter, revision: i64) -> u32 {
    let store = writer.store();
    store.hash_kv(&store.view(), revision).unwrap().hash
}

#[test]
fn a_store_imported_from_etcds_file_has_etcds_checksums() {
    for file in [ETCD_3_4, ETCD_3_7] {
        let writer = import(&mut open(file).unwrap()).unwrap();
        let view = writer.store().view();
        assert_eq!((view.revision(), view.compact_revision(), view.applied().index), (28, 12, 7));
        for (revision, hash) in CHECKSUMS {
            assert_eq!(checksum(&writer, revision), hash, "at {revision}");
        }
        let all = everything(&writer, 0);
        let keys: Vec<_> = all.iter().map(|kv| std::str::from_utf8(&kv.key).unwrap()).collect();
        assert_eq!(
            keys,
            ["a/1", "a/10", "a/11", "a/12", "a/2", "a/3", "a/8", "a/9", "b/2", "large", "z"]
        );
        assert_eq!(all[5].value, "reborn");
        assert_eq!(all[9].value.len(), 5_000);
        // The old cluster's members are not imported; the new cluster has its own.
        assert_eq!(view.members().members().count(), 1);
    }
}

#[test]
fn a_store_imported_from_a_file_of_etcd_3_6_has_etcds_checksums() {
    for (file, version) in [(ETCD_3_6, Some("3.6.0"))] {
        let mut file = open(file).unwrap();
        assert_eq!(file.summary().storage_version.as_deref(), version);
        let writer = import(&mut file).unwrap();
        let view = writer.store().view();
        assert_eq!((view.revision(), view.compact_revision()), (18, 6));
        for (revision, hash) in SHORTER {
            assert_eq!(checksum(&writer, revision), hash, "at {revision}");
        }
        let all = everything(&writer, 0);
        let keys: Vec<_> = all.iter().map(|kv| std::str::from_utf8(&kv.key).unwrap()).collect();
        assert_eq!(keys, ["k0", "k2", "k3", "k4", "last", "t1", "t2"]);
    }
}

#[test]
fn the_summary_of_a_file_describes_its_cluster() {
    let file = open(ETCD_3_7).unwrap();
    let summary = file.summary();
    assert_eq!(summary.storage_version.as_deref(), Some("3.7.0"));
    assert_eq!(summary.cluster_version.as_deref(), Some("3.7.0"));
    let [member] = &summary.members[..] else { panic!("{:?}", summary.members) };
    assert_eq!((member.id, &member.name[..]), (2_132_960_513_972_957_892, "default"));
    assert_eq!(member.peer_urls, ["http://127.0.0.1:24021"]);
    assert_eq!(summary.applied.term, 2);
    assert_eq!((summary.leases, summary.auth, summary.removed), (0, AuthSummary::default(), 0));
    let old = open(ETCD_3_4).unwrap();
    assert_eq!((&old.summary().storage_version, old.summary().applied.term), (&None, 0));
    assert_eq!(old.file_bytes(), ETCD_3_4.len() as u64 - 32);
}

#[test]
fn a_changed_or_truncated_file_is_refused() {
    let wrong = |file: &[u8]| matches!(open(file), Err(EtcdFileError::WrongHash { .. }));
    let last = ETCD_3_7.len() - 1;
    for at in [0, 30_000, last] {
        let mut file = ETCD_3_7.to_vec();
        file[at] ^= 1;
        assert!(wrong(&file), "byte {at}");
    }
    assert!(wrong(&ETCD_3_7[512..]));
    let bare = &ETCD_3_7[..ETCD_3_7.len() - 32];
    assert!(matches!(open(bare), Err(EtcdFileError::NoHash)));
    assert_eq!(unhashed(bare).unwrap().summary(), open(ETCD_3_7).unwrap().summary());
    assert!(unhashed(&bare[..40_000]).is_err_and(|error| matches!(error, EtcdFileError::Bbolt(_))));
    assert!(matches!(open(b""), Err(EtcdFileError::NoHash)));
    assert!(matches!(unhashed(b""), Err(EtcdFileError::Bbolt(_))));
}

#[test]
fn users_and_leases_are_imported_and_exported() {
    let mut file = open(WITH_AUTH).unwrap();
    assert_eq!(file.summary().auth, AuthSummary { enabled: true, users: 1, roles: 2 });
    let writer = import(&mut file).unwrap();
    let view = writer.store().view();
    let auth = view.auth();
    assert!(auth.is_enabled() && auth.revision() > 1);
    assert!(auth.user("root").unwrap().hash().unwrap().starts_with(b"$2a$"));
    let rows = |auth: &crate::auth::AuthState| -> Vec<_> {
        auth.role_rows().map(|(_, role)| (role.name, role.key_permission)).collect()
    };
    assert_eq!(rows(auth).len(), 2);
    let again = import(&mut open(&export(&writer)).unwrap()).unwrap();
    assert_eq!(again.store().view().auth(), auth);
    let store = writer.store();
    let leases = store.leases().read().unwrap();
    assert_eq!(leases.len(), 2);
    let leased = everything(&writer, 0).into_iter().filter(|kv| kv.lease != 0);
    let leased: Vec<_> = leased.map(|kv| (kv.lease, kv.key)).collect();
    assert_eq!(leased.len(), 2);
    for (lease, key) in leased {
        assert!(leases.keys(lease).any(|attached| attached[..] == key[..]), "{key:?}");
    }
    drop(leases);
    // Leases survive an export and another import.
    let again = import(&mut open(&export(&writer)).unwrap()).unwrap();
    assert_eq!(again.store().view().leases().unwrap(), store.view().leases().unwrap());
    // The next file contains no lease. Lease ids in its records belong to leases that have ended,
    // and are imported unchanged.
    let leased = KeyValue { lease: 5, ..put(2) };
    let mut file = crafted(&[(at(2, false).bytes(), leased.encode_to_vec())], &[]);
    let history = import(&mut file).unwrap();
    assert_eq!(everything(&history, 0), [leased]);
    // Both files begin with the same requests. So this revision has the checksum that it has in the
    // file without leases.
    assert_eq!(checksum(&writer, 27), CHECKSUMS[8].1);
}

#[test]
fn our_own_file_is_imported_unchanged() {
    let mut writer = import(&mut open(ETCD_3_7).unwrap()).unwrap();
    let alarms = [AlarmMember { member_id: 300, alarm: 1 }, AlarmMember { member_id: 2, alarm: 2 }];
    let applied = Position { index: 9, term: 5 };
    let work = |batch: &mut crate::mvcc::Batch<'_>| {
        let mut learner = member(3, "c");
        learner.is_learner = true;
        let (added, removed) =
            (MemberChange::Add(member(2, "b")), MemberChange::Remove(MemberId(2)));
        for change in [added, MemberChange::Add(learner), removed] {
            batch.members_mut().apply_change(change, 9).unwrap();
        }
        alarms.into_iter().for_each(|alarm| batch.raise_alarm(alarm));
        batch.compact(20).unwrap();
        Ok(())
    };
    writer.batch(applied, work).unwrap();
    let mut file = open(&export(&writer)).unwrap();
    let summary = file.summary();
    assert_eq!((summary.revision, summary.compacted, summary.applied), (28, 20, applied));
    assert_eq!(summary.storage_version.as_deref(), Some("3.6.0"));
    let members = summary.members.iter().map(|member| (member.id, member.is_learner));
    assert_eq!(members.collect::<Vec<_>>(), [(1, false), (3, true)]);
    assert_eq!(summary.removed, 1);
    let mut raised = summary.alarms.clone();
    raised.sort_unstable_by_key(|alarm| alarm.member_id);
    assert_eq!(raised, [alarms[1], alarms[0]]);
    let again = import(&mut file).unwrap();
    // Revision 20 is left out: there, the first store returns the checksum from before its
    // compaction, as etcd does.
    for revision in [0, 21, 24, 26, 27] {
        assert_eq!(checksum(&again, revision), checksum(&writer, revision), "at {revision}");
        assert_eq!(everything(&again, revision), everything(&writer, revision), "at {revision}");
    }
}

#[test]
fn an_empty_store_can_be_exported() {
    let disk = disk(1);
    let options = StoreOptions { cache_bytes: 1 << 20, ..StoreOptions::default() };
    let writer = StoreWriter::open(backend(&disk), options).unwrap();
    let mut file = open(&export(&writer)).unwrap();
    assert_eq!((file.summary().revision, file.summary().compacted), (1, -1));
    let again = import(&mut file).unwrap();
    assert_eq!(checksum(&again, 0), checksum(&writer, 0));
}

/// Returns the value of the row `name` in the bucket `meta` of a file.
fn meta_row(file: &[u8], name: &[u8]) -> Option<Vec<u8>> {
    let mut reader = node_bbolt::BboltReader::open(Cursor::new(file)).unwrap();
    let bucket = reader.find_bucket(META.as_bytes()).unwrap().unwrap();
    let mut rows = reader.entries(&bucket).unwrap();
    while let Some(row) = rows.next().unwrap() {
        if let (true, node_bbolt::EntryValue::Bytes(value)) = (row.key == name, row.value) {
            return Some(value.to_vec());
        }
    }
    None
}

#[test]
fn a_compaction_that_is_under_way_is_not_written_as_done() {
    let mut file = open(ETCD_3_7).unwrap();
    let writer = import_into(CompactionMode::Background, &mut file).unwrap();
    let (scheduled, finished) = (b"scheduledCompactRev", b"finishedCompactRev");
    let twelve = Some(at(12, false).bytes().to_vec());
    let under_way = export(&writer);
    assert_eq!(meta_row(&under_way, scheduled), twelve);
    assert_eq!(meta_row(&under_way, finished), None);
    writer.store().compact_all().unwrap();
    assert_eq!(meta_row(&export(&writer), finished), twelve);
}

/// Creates a file with these rows in the buckets `key` and `meta`.
fn crafted(keys: &[(&[u8], Vec<u8>)], meta: &[(&[u8], &[u8])]) -> OpenedFile {
    unhashed(&written(keys, meta)).unwrap()
}

fn written(keys: &[(&[u8], Vec<u8>)], meta: &[(&[u8], &[u8])]) -> Vec<u8> {
    let fill = |builder: &mut Builder<'_>| {
        builder.begin_bucket(KEY.as_bytes())?;
        keys.iter().try_for_each(|(key, record)| builder.put(key, record))?;
        builder.begin_bucket(META.as_bytes())?;
        meta.iter().try_for_each(|(key, value)| builder.put(key, value))
    };
    let layout = node_bbolt::measure::<BboltWriteError>(fill).unwrap();
    let mut file = Vec::new();
    node_bbolt::write::<BboltWriteError>(layout, &mut file, fill).unwrap();
    file
}

fn at(main: i64, is_tombstone: bool) -> EtcdKey {
    EtcdKey::new(Revision { main, sub: 0 }, is_tombstone)
}

fn put(revision: i64) -> KeyValue {
    let key = b"k".as_slice().into();
    KeyValue { key, create_revision: 2, mod_revision: revision, version: 1, ..Default::default() }
}

#[test]
fn a_bumped_revision_is_imported_without_a_key() {
    let (first, bumped) = (at(2, false), at(1_000, false));
    let compacted = at(1_000, false);
    let mut file = crafted(
        &[(first.bytes(), put(2).encode_to_vec()), (bumped.bytes(), Vec::new())],
        &[(b"scheduledCompactRev", compacted.bytes())],
    );
    let writer = import(&mut file).unwrap();
    let view = writer.store().view();
    assert_eq!((view.revision(), view.compact_revision()), (1_000, 1_000));
    assert_eq!(everything(&writer, 0), [put(2)]);
}

#[test]
fn a_record_that_etcd_would_not_write_is_refused() {
    let refused = |key: &[u8], record: Vec<u8>| {
        let mut file = crafted(&[(key, record)], &[]);
        match import(&mut file) {
            Err(EtcdFileError::DamagedRow { what, .. }) => what,
            other => panic!("{:?}", other.map(drop)),
        }
    };
    let (put_at, dead_at) = (at(5, false), at(5, true));
    let tombstone = KeyValue { key: b"k".as_slice().into(), ..Default::default() };
    assert!(refused(put_at.bytes(), vec![0xFF]).contains("decode"));
    assert!(refused(put_at.bytes(), tombstone.encode_to_vec()).contains("tombstone by its value"));
    assert!(refused(dead_at.bytes(), put(5).encode_to_vec()).contains("tombstone by its value"));
    assert!(refused(put_at.bytes(), put(6).encode_to_vec()).contains("another revision"));
    let nameless = KeyValue { key: Default::default(), ..put(5) };
    assert!(refused(put_at.bytes(), nameless.encode_to_vec()).contains("has no key"));
    for odd in [
        KeyValue { create_revision: 6, ..put(5) },
        KeyValue { create_revision: -1, ..put(5) },
        KeyValue { version: 0, ..put(5) },
    ] {
        assert!(refused(put_at.bytes(), odd.encode_to_vec()).contains("another revision"));
    }
    // A put and a tombstone have the same revision.
    let rows =
        [(put_at.bytes(), put(5).encode_to_vec()), (dead_at.bytes(), tombstone.encode_to_vec())];
    let twice = import(&mut crafted(&rows, &[]));
    assert!(twice.is_err_and(|error| error.to_string().contains("twice")));
}

#[test]
fn a_bbolt_file_of_something_else_is_refused() {
    let fill = |builder: &mut Builder<'_>| builder.begin_bucket(b"widgets");
    let layout = node_bbolt::measure::<BboltWriteError>(fill).unwrap();
    let mut file = Vec::new();
    node_bbolt::write::<BboltWriteError>(layout, &mut file, fill).unwrap();
    assert!(matches!(unhashed(&file), Err(EtcdFileError::MissingBucket("key"))));
}

#[test]
fn a_misplaced_page_is_reported_as_damage_without_a_panic() {
    const PAGE: usize = 4096;
    let keys: Vec<EtcdKey> = (2..150).map(|revision| at(revision, false)).collect();
    let long = |revision| KeyValue { value: vec![b'v'; 100].into(), ..put(revision) };
    let rows = keys.iter().zip(2..).map(|(key, revision)| (key.bytes(), long(revision)));
    let rows: Vec<_> = rows.map(|(key, record)| (key, record.encode_to_vec())).collect();
    let whole = written(&rows, &[]);
    let pages = whole.len() / PAGE;
    let mut newer = 0;
    for (to, from) in (2..pages).flat_map(|to| (2..pages).map(move |from| (to, from))) {
        let mut file = whole.clone();
        file.copy_within(from * PAGE..(from + 1) * PAGE, to * PAGE);
        file[to * PAGE..to * PAGE + 8].copy_from_slice(&(to as u64).to_le_bytes());
        let Ok(mut file) = unhashed(&file) else { continue };
        let refused = import(&mut file).map(drop);
        newer += usize::from(refused.is_err_and(|error| error.to_string().contains("the last is")));
    }
    assert!(newer > 0, "an older page in the last one's place");
}

#[test]
fn no_flipped_byte_makes_the_reader_panic() {
    let whole = export(&import(&mut open(ETCD_3_7).unwrap()).unwrap());
    for at in 0..whole.len() {
        let mut file = whole.clone();
        file[at] ^= 0x81;
        let Ok(mut file) = unhashed(&file) else { continue };
        let Ok(records) = file.records() else { continue };
        let _ = records.for_each(|_, _| Ok::<_, EtcdFileError>(()));
    }
}
