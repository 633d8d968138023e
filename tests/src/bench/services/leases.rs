//! Measures the memory of many leases, and the revocation of a lease with many keys.

use std::time::Instant;

use anyhow::Result;
use node_proto::etcdserverpb::lease_client::LeaseClient;
use node_proto::etcdserverpb::{LeaseGrantRequest, LeaseRevokeRequest};
use tokio::task::JoinSet;
use tonic::transport::Channel;

use super::{CALL_TIME, FigureRecorder, keys, mib};
use crate::bench::cluster::BenchCluster;
use crate::bench::writer::SteadyWriter;

/// TTL of the leases in seconds: so long that none expires during the run.
const TTL: i64 = 3600;
/// Number of clients that grant leases at the same time.
const CLIENTS: usize = 64;
/// Id of the lease that is revoked.
const REVOKED_LEASE_ID: i64 = i64::MAX;

pub(super) async fn run(
    cluster: BenchCluster,
    leases: usize,
    recorder: &mut FigureRecorder<'_>,
) -> Result<()> {
    let leader = cluster.leader().await?;
    let channel = cluster.channel(leader)?;
    let before = cluster.resident_bytes_of(leader)?;
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        clients.spawn(grant(channel.clone(), client, leases));
    }
    while let Some(done) = clients.join_next().await {
        done??;
    }
    let after = cluster.resident_bytes_of(leader)?;
    recorder.record(format!("RSS with {leases} leases"), mib(after), "MiB");
    recorder.record("of it, by them", mib(after.saturating_sub(before)), "MiB");

    for time in ["first", "second", "third"] {
        revoke(&cluster, leader, &channel, leases, time, recorder).await?;
    }
    Ok(())
}

/// Grants a lease, attaches `keys` keys to it, and revokes it while another client writes. Each
/// call uses the same keys.
async fn revoke(
    cluster: &BenchCluster,
    leader: usize,
    channel: &Channel,
    keys: usize,
    time: &str,
    recorder: &mut FigureRecorder<'_>,
) -> Result<()> {
    let mut service = LeaseClient::new(channel.clone());
    service.lease_grant(LeaseGrantRequest { id: REVOKED_LEASE_ID, ttl: TTL }).await?;
    keys::fill(channel, keys, REVOKED_LEASE_ID).await?;
    let writer = SteadyWriter::start(cluster, &[leader]).await?;
    let (began, cpu) = (Instant::now(), cluster.cpu_of(leader)?);
    let revoked = service.lease_revoke(LeaseRevokeRequest { id: REVOKED_LEASE_ID });
    tokio::time::timeout(CALL_TIME, revoked).await??;
    let (took, cpu) = (began.elapsed(), cluster.cpu_of(leader)?.saturating_sub(cpu));
    let longest = writer.finish().await?.wait;
    let what = format!("revoking a lease with {keys} keys, the {time} time");
    recorder.record(format!("{what}: its answer"), took.as_secs_f64() * 1000.0, "ms");
    recorder.record(format!("{what}: CPU of the leader"), cpu.as_secs_f64() * 1000.0, "ms");
    recorder.record(format!("{what}: longest put"), longest.as_secs_f64() * 1000.0, "ms");
    Ok(())
}

/// Grants one client's share of `leases` leases: every [`CLIENTS`]th, from number `first` on.
async fn grant(channel: Channel, first: usize, leases: usize) -> Result<()> {
    let mut service = LeaseClient::new(channel);
    for _ in (first..leases).step_by(CLIENTS) {
        let answer = service.lease_grant(LeaseGrantRequest { id: 0, ttl: TTL });
        tokio::time::timeout(CALL_TIME, answer).await??;
    }
    Ok(())
}
