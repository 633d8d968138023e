//! Durability of acknowledged writes. Nodes are killed at random during the writes. Afterwards
//! every acknowledged write must be on every member, and all hashes must be equal.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::client::{EtcdClient, tls_from};
use muster_tests::harness::process::{is_alive, send_signal};
use muster_tests::harness::testbed::TestbedOptions;
use muster_tests::harness::{AgentProcess, Network, TestHost, Testbed, poll_slowly, wait_for};
use muster_tests::rng::Rng;
use node_proto::etcdserverpb::RangeRequest;
use rustix::process::Signal;

const WRITES: usize = 10_000;
const WRITERS: usize = 16;
const KILLS: usize = 6;
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn ten_thousand_acknowledged_writes_survive_random_kills() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(3), TestbedOptions::default())?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let agents = testbed.start_agents(0..3, &bundle)?;
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let hosts: Vec<TestHost> = testbed.network.hosts.clone();
    let etcdctl = testbed.etcdctl("demo", &hosts.iter().collect::<Vec<_>>())?;
    poll_slowly("the cluster to take a write", LIMIT, || etcdctl.run(&["put", "k", "v"]).ok())?;
    let tls = tls_from(etcdctl.credentials())?;
    let addresses: Vec<SocketAddr> =
        hosts.iter().map(|h| SocketAddr::new(h.address, 2379)).collect();

    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // Create the clients within the runtime: a channel belongs to the runtime in which it is
    // created.
    let _entered = runtime.enter();
    let next = Arc::new(AtomicUsize::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let (next, stop) = (next.clone(), stop.clone());
            let clients = addresses.iter().map(|a| EtcdClient::new(*a, Some(tls.clone())));
            let clients = clients.collect::<Result<Vec<_>>>()?;
            Ok(runtime.spawn(write(writer, clients, next, stop)))
        })
        .collect::<Result<Vec<_>>>()?;

    kill_at_random(&agents, &next)?;
    let acknowledged = runtime.block_on(async {
        let mut all = BTreeMap::new();
        for writer in writers {
            all.extend(writer.await??);
        }
        anyhow::Ok(all)
    })?;
    stop.store(true, Ordering::Relaxed);
    ensure!(acknowledged.len() == WRITES, "{} acknowledged", acknowledged.len());

    runtime.block_on(compare(&addresses, &tls, &acknowledged))
}

/// Puts a key for each number that no other writer has taken. Each put is repeated on the next node
/// until it is acknowledged. That is safe, because a key always gets the same value.
async fn write(
    writer: usize,
    mut clients: Vec<EtcdClient>,
    next: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
) -> Result<BTreeMap<String, i64>> {
    let mut mine = BTreeMap::new();
    let mut at = writer % clients.len();
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= WRITES {
            return Ok(mine);
        }
        let key = format!("w/{number:05}");
        loop {
            match clients[at].put(key.as_bytes(), key.as_bytes(), Duration::from_secs(3)).await {
                Ok(revision) => {
                    mine.insert(key, revision);
                    break;
                }
                Err(_) if !stop.load(Ordering::Relaxed) => {
                    at = (at + 1) % clients.len();
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

fn kill_at_random(agents: &[AgentProcess], next: &AtomicUsize) -> Result<()> {
    // The seed is fixed, so that every run kills the nodes in the same order.
    let mut rng = Rng::new(0x5EED_0F4B_1D05);
    for kill in 1..=KILLS {
        let due = kill * WRITES / (KILLS + 1);
        wait_for(&format!("write {due}"), LIMIT, || {
            (next.load(Ordering::Relaxed) >= due).then_some(())
        })?;
        let victim = &agents[rng.pick(agents.len())];
        // Wait until the node runs again: a quorum of three survives only one failed node at a
        // time.
        let pid = wait_for("the victim to run", LIMIT, || victim.node_pid())?;
        send_signal(pid, Signal::KILL);
        wait_for("the victim to die", LIMIT, || (!is_alive(pid)).then_some(()))?;
        victim.wait_new_node(pid, LIMIT)?;
    }
    Ok(())
}

async fn compare(
    addresses: &[SocketAddr],
    tls: &Arc<rustls::ClientConfig>,
    acknowledged: &BTreeMap<String, i64>,
) -> Result<()> {
    let limit = Duration::from_secs(20);
    let mut hashes = BTreeMap::new();
    let mut revision = 0;
    for address in addresses {
        let mut client = EtcdClient::new(*address, Some(tls.clone()))?;
        // The read is linearizable, so this member has applied everything that was acknowledged.
        let all =
            RangeRequest { key: "w/".into(), range_end: "w0".into(), ..RangeRequest::default() };
        let mut answer = client.range(all.clone(), limit).await;
        for _ in 0..20 {
            if answer.is_ok() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
            answer = client.range(all.clone(), limit).await;
        }
        let answer = answer.with_context(|| format!("reading all of {address}"))?;
        let found: BTreeMap<String, i64> = answer
            .kvs
            .iter()
            .map(|kv| (String::from_utf8_lossy(&kv.key).into_owned(), kv.mod_revision))
            .collect();
        for key in acknowledged.keys() {
            ensure!(found.contains_key(key), "{key} was acknowledged, {address} does not have it");
        }
        for (key, written) in acknowledged {
            ensure!(
                found[key] >= *written,
                "{key} was acknowledged at {written}, {address} has it at {}",
                found[key]
            );
        }
        if revision == 0 {
            revision = answer.header.context("an answer has a header")?.revision;
        }
        hashes.insert(address, client.hash_kv(revision, limit).await?.hash);
    }
    let first = hashes.values().next().context("three members")?;
    ensure!(
        hashes.values().all(|h| h == first),
        "hashes differ at revision {revision}: {hashes:?}"
    );
    Ok(())
}
