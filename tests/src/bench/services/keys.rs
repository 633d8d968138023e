//! Measures the memory that many keys take.

use std::time::Duration;

use anyhow::Result;
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::{PutRequest, RequestOp, TxnRequest};
use tonic::transport::Channel;

use super::{CALL_TIME, FigureRecorder, mib};
use crate::bench::cluster::BenchCluster;

const VALUE_BYTES: usize = 256;
/// Number of puts in one transaction. etcd's `--max-txn-ops` allows this many.
const PUTS_PER_TXN: usize = 100;
/// Time for the server to free temporary memory of the writes.
const SETTLE_TIME: Duration = Duration::from_secs(5);

pub(super) async fn run(
    cluster: BenchCluster,
    keys: usize,
    recorder: &mut FigureRecorder<'_>,
) -> Result<()> {
    let leader = cluster.leader().await?;
    fill(&cluster.channel(leader)?, keys, 0).await?;
    tokio::time::sleep(SETTLE_TIME).await;
    let resident = mib(cluster.resident_bytes_of(leader)?);
    recorder.record(format!("RSS with {keys} keys of {VALUE_BYTES} B"), resident, "MiB");
    Ok(())
}

/// Writes `keys` keys, and attaches them to `lease` unless that is 0.
pub(super) async fn fill(channel: &Channel, keys: usize, lease: i64) -> Result<()> {
    let mut kv = KvClient::new(channel.clone());
    for first in (0..keys).step_by(PUTS_PER_TXN) {
        let put = |n| PutRequest {
            key: format!("/many/{lease}/{n:08}").into(),
            value: vec![b'v'; VALUE_BYTES].into(),
            lease,
            ..PutRequest::default()
        };
        let puts = (first..keys.min(first + PUTS_PER_TXN)).map(|n| Request::RequestPut(put(n)));
        let success = puts.map(|put| RequestOp { request: Some(put) }).collect();
        let txn = TxnRequest { success, ..TxnRequest::default() };
        tokio::time::timeout(CALL_TIME, kv.txn(txn)).await??;
    }
    Ok(())
}
