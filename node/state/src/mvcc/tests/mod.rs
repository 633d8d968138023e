//! Tests of the store against a simple model, on a disk that loses and tears unsynced writes.

mod auth;
mod damage;
mod defragment;
mod flush;
mod model;
mod rows;
mod snapshot;
mod store;

use std::path::Path;

use bytes::Bytes;
use node_proto::etcdserverpb::{RangeRequest, RangeResponse};

use super::*;
use crate::disk::simulated::SimulatedDisk;
use crate::disk::{Disk as _, OpenMode, RedbBackend};
use crate::identity::{Incarnation, MemberId, NodeKey};
use crate::membership::Member;
use crate::state_machine::Position;

const DIR: &str = "/store";

/// Makes a disk with a directory and an empty store file that survive any crash.
pub(crate) fn disk(seed: u64) -> SimulatedDisk {
    let disk = SimulatedDisk::new(seed);
    disk.create_dir(Path::new(DIR)).unwrap();
    disk.sync_dir(Path::new("/")).unwrap();
    disk.open(&Path::new(DIR).join("db"), OpenMode::New).unwrap().sync_data().unwrap();
    disk.sync_dir(Path::new(DIR)).unwrap();
    disk
}

pub(crate) fn backend(disk: &SimulatedDisk) -> RedbBackend {
    RedbBackend::new(disk.open(&Path::new(DIR).join("db"), OpenMode::Existing).unwrap()).unwrap()
}

/// Makes a member that is bound to an incarnation and a key.
pub(crate) fn member(id: u64, name: &str) -> Member {
    Member {
        id: MemberId(id),
        name: name.to_owned(),
        peer_urls: vec![format!("http://{name}:2380")],
        client_urls: Vec::new(),
        is_learner: false,
        incarnation: Some(Incarnation([u8::try_from(id).unwrap(); 16])),
        node_key: Some(NodeKey([u8::try_from(id).unwrap(); 32])),
        changed_at: 0,
        vote_when_ready: false,
        operations: Vec::new(),
    }
}

fn open(disk: &SimulatedDisk, compaction: CompactionMode) -> StoreWriter {
    open_with(disk, StoreOptions { compaction, ..StoreOptions::default() })
}

fn open_with(disk: &SimulatedDisk, options: StoreOptions) -> StoreWriter {
    StoreWriter::open(backend(disk), StoreOptions { cache_bytes: 1 << 20, ..options }).unwrap()
}

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

/// Applies `work` as one write request at log index `index`.
fn write(writer: &mut StoreWriter, index: u64, work: impl FnOnce(&mut Batch<'_>)) -> EventBatch {
    let position = Position { index, term: 1 };
    let ((), events) = writer
        .batch(position, |batch| {
            work(batch);
            batch.end_request();
            Ok(())
        })
        .unwrap();
    events
}

fn put(writer: &mut StoreWriter, index: u64, key: &str, value: &str) {
    write(writer, index, |batch| {
        batch.put(bytes(key), bytes(value), 0);
    });
}

fn everything() -> RangeRequest {
    RangeRequest { key: bytes("\0"), range_end: bytes("\0"), ..RangeRequest::default() }
}

fn range(store: &Store, request: &RangeRequest) -> Result<RangeResponse, ReadError> {
    store.range(&store.view(), request)
}

/// Formats each key at `revision` as `key=value@version`.
fn show(store: &Store, revision: i64) -> Vec<String> {
    let request = RangeRequest { revision, ..everything() };
    let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).unwrap();
    let kvs = range(store, &request).unwrap().kvs;
    kvs.iter().map(|kv| format!("{}={}@{}", text(&kv.key), text(&kv.value), kv.version)).collect()
}
