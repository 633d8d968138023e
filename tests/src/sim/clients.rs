//! Clients: each does one thing at a time, a put or a linearizable read, on any member.

use bytes::Bytes;
use muster_node::apply::{Outcome, Response};
use muster_node::mvcc::Store;
use node_proto::command::{self, Operation};
use node_proto::etcdserverpb::{PutRequest, RangeRequest};

use super::rng::Rng;

/// A client waits this long, then the fate of its put is unknown.
pub(super) const CLIENT_TIMEOUT: u64 = 1_200_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Put,
    Read,
}

/// One operation on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operating {
    pub key: u64,
    /// Request id of a put, token of a read. Never used twice.
    pub id: u64,
    /// The highest revision that was known to anybody when it began.
    pub floor: i64,
    pub node: u64,
}

#[derive(Debug, Default)]
pub(super) struct Client {
    pub operating: Option<Operating>,
}

pub(super) fn key_name(key: u64) -> Bytes {
    Bytes::from(format!("key-{key}"))
}

/// A value that says which put it is; some are longer than a sector, so that they can be torn.
pub(super) fn put_command(id: u64, key: u64, rng: &mut Rng) -> Bytes {
    let mut value = id.to_be_bytes().to_vec();
    let filler = match rng.range(0, 10) {
        0..7 => rng.range(0, 60),
        7..9 => rng.range(400, 1500),
        _ => rng.range(1500, 6000),
    };
    let fill = u8::try_from(id % 250).expect("below 250") + 1;
    value.resize(8 + usize::try_from(filler).expect("small"), fill);
    let put = PutRequest { key: key_name(key), value: value.into(), ..PutRequest::default() };
    command::encode(id, Operation::Put(put))
}

/// The revision that a put was given; None if it was refused.
pub(super) fn put_revision(outcome: &Outcome) -> Option<i64> {
    match outcome {
        Ok(Response::Put(put)) => put.header.as_ref().map(|header| header.revision),
        _ => None,
    }
}

/// What a key holds: the put's id and its revision.
pub(super) fn read_key(store: &Store, key: u64) -> Result<Option<(u64, i64)>, String> {
    let request = RangeRequest { key: key_name(key), ..RangeRequest::default() };
    let response = store
        .range(&store.view(), &request)
        .map_err(|error| format!("a read failed: {error:?}"))?;
    let Some(found) = response.kvs.first() else { return Ok(None) };
    let id = found.value.first_chunk().ok_or("a value was cut short")?;
    let id = u64::from_be_bytes(*id);
    let fill = u8::try_from(id % 250).expect("below 250") + 1;
    if found.value[8..].iter().any(|byte| *byte != fill) {
        return Err(format!("the value of put {id} was changed"));
    }
    Ok(Some((id, found.mod_revision)))
}
