//! Members whose connections can be made in one direction only. Firewall rules drop only the first
//! packet (SYN) of each connection in one direction. The connections in the other direction must be
//! enough.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use muster_tests::client::{EtcdClient, channel};
use muster_tests::harness::{Network, NodeProcess, TestHost, nodes, programs};
use node_proto::etcdserverpb::maintenance_client::MaintenanceClient;
use node_proto::etcdserverpb::{MoveLeaderRequest, StatusResponse};

/// Time limit of each wait; a test that passes waits much less.
const LIMIT: Duration = Duration::from_secs(90);
/// Time limit of one call before it is repeated.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// Number of writes of 1 MiB that more than fill a log segment of 64 MiB. The log drops old entries
/// by whole segments.
const WRITES: usize = 90;
const VALUE_BYTES: usize = 1 << 20;

/// Direction in which connections between host 0 and the others fail.
#[derive(Clone, Copy, Debug)]
enum BlockedDirection {
    /// No host can connect to host 0.
    Inbound,
    /// Host 0 can connect to no host.
    Outbound,
}

#[test]
fn a_member_that_nobody_can_connect_to_works_over_its_own_connections() -> Result<()> {
    check_cluster_works(BlockedDirection::Inbound)
}

#[test]
fn a_member_that_can_connect_to_nobody_works_over_the_others_connections() -> Result<()> {
    check_cluster_works(BlockedDirection::Outbound)
}

fn check_cluster_works(blocked: BlockedDirection) -> Result<()> {
    if !Network::can_be_cut() {
        return Ok(());
    }
    let network = Network::namespaces(3)?;
    network.hub.enter_namespace()?;
    for other in 1..3 {
        match blocked {
            BlockedDirection::Inbound => network.refuse_connections(other, 0, 2380)?,
            BlockedDirection::Outbound => network.refuse_connections(0, other, 2380)?,
        }
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut cluster = OneWayCluster::start(&network)?;
        let result = cluster.works(blocked).await;
        result.with_context(|| nodes::last_log_lines(&cluster.nodes))
    })
}

struct OneWayCluster {
    nodes: Vec<NodeProcess>,
    _folder: tempfile::TempDir,
}

impl OneWayCluster {
    fn start(network: &Network) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let program = programs::program_path("muster-node")?;
        let member = |host: &TestHost| format!("{}={}", host.name, nodes::peer_url(host));
        let initial = network.hosts.iter().map(member).collect::<Vec<_>>().join(",");
        let mut nodes: Vec<NodeProcess> = Vec::new();
        for host in &network.hosts {
            let mut node = NodeProcess::new(host, &host.name, &program, folder.path());
            node.flags.push(format!("--name={}", host.name));
            node.flags.push(format!("--initial-cluster={initial}"));
            node.flags.push("--snapshot-catchup-entries=1".to_owned());
            node.start()?;
            nodes.push(node);
        }
        for node in &mut nodes {
            node.wait_ready(LIMIT)?;
        }
        Ok(Self { nodes, _folder: folder })
    }

    async fn works(&mut self, blocked: BlockedDirection) -> Result<()> {
        for leader in [0, 1] {
            self.lead(leader).await?;
            for host in 0..3 {
                self.write(host).await?;
            }
        }
        self.wait_direction_named(blocked).await?;
        // A snapshot must arrive in both directions: from the leader at host 0, and from host 0 as
        // the leader.
        self.check_snapshot_catch_up(0, 1).await?;
        self.lead(0).await?;
        self.check_snapshot_catch_up(1, 0).await?;
        // After the kill of the third member, the other two must work over the only connection
        // between them.
        self.nodes[2].kill();
        self.write(0).await?;
        self.write(1).await
    }

    /// Stops a member, lets another member write more than the log keeps, and restarts the stopped
    /// member. That member must then get a snapshot.
    async fn check_snapshot_catch_up(&mut self, away: usize, other: usize) -> Result<()> {
        self.nodes[away].kill();
        for _ in 0..WRITES {
            self.write_value_of_size(other, VALUE_BYTES).await?;
        }
        self.nodes[away].start()?;
        self.nodes[away].wait_ready(LIMIT)?;
        self.write(away).await?;
        let output = self.nodes[away].output();
        ensure!(output.contains("installed a snapshot"), "{away} caught up without a snapshot");
        Ok(())
    }

    /// Waits until log, metrics and status of host 0 name the direction in which its connections
    /// fail.
    async fn wait_direction_named(&self, blocked: BlockedDirection) -> Result<()> {
        let (fails, status) = match blocked {
            BlockedDirection::Inbound => ("inbound", "has not connected to this member"),
            BlockedDirection::Outbound => ("outbound", "this member cannot connect to peer"),
        };
        let start = Instant::now();
        loop {
            let errors = self.status(0).await?.errors;
            let logged = self.nodes[0].output().contains(fails);
            let metrics = self.metrics(0)?;
            let down = metrics.lines().filter(|line| {
                line.starts_with("muster_peer_connections{")
                    && line.contains(fails)
                    && line.ends_with(" 0")
            });
            let named = errors.iter().filter(|error| error.contains(status)).count();
            if named == 2 && logged && down.count() == 2 {
                return Ok(());
            }
            ensure!(start.elapsed() < LIMIT, "never named: {errors:?}, {logged}, {metrics}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    fn metrics(&self, host: usize) -> Result<String> {
        use std::io::{Read as _, Write as _};
        let mut stream = std::net::TcpStream::connect(self.address(host))?;
        stream.set_read_timeout(Some(CALL_LIMIT))?;
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    async fn write(&self, host: usize) -> Result<()> {
        self.write_value_of_size(host, 1).await
    }

    /// Writes a value of `bytes` bytes through this member. Repeats the write until it is
    /// acknowledged.
    async fn write_value_of_size(&self, host: usize, bytes: usize) -> Result<()> {
        let value = vec![7; bytes];
        let start = Instant::now();
        loop {
            let written =
                EtcdClient::new(self.address(host), None)?.put(b"k", &value, CALL_LIMIT).await;
            match written {
                Ok(_) => return Ok(()),
                Err(error) if start.elapsed() > LIMIT => {
                    return Err(error.context(format!("a write at host {host}")));
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Moves leadership to this host.
    async fn lead(&self, to: usize) -> Result<()> {
        let start = Instant::now();
        let target_id = header(&self.status(to).await?)?;
        while start.elapsed() < LIMIT {
            match self.leader(&[0, 1, 2]).await? {
                Some(leader) if leader == to => return Ok(()),
                Some(leader) => {
                    let mut api = MaintenanceClient::new(channel(self.address(leader), None)?);
                    // The member may no longer be the leader, so the result doesn't matter.
                    let moved = api.move_leader(MoveLeaderRequest { target_id });
                    let _ = tokio::time::timeout(CALL_LIMIT, moved).await;
                }
                None => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
        bail!("host {to} never leads")
    }

    /// Returns the leader, if all these hosts agree on it.
    async fn leader(&self, hosts: &[usize]) -> Result<Option<usize>> {
        let mut leaders = Vec::new();
        let mut leads = None;
        for host in hosts {
            let status = self.status(*host).await?;
            if status.leader == header(&status)? {
                leads = Some(*host);
            }
            leaders.push((status.leader, status.raft_term));
        }
        leaders.dedup();
        Ok(leads.filter(|_| leaders.len() == 1))
    }

    async fn status(&self, host: usize) -> Result<StatusResponse> {
        EtcdClient::new(self.address(host), None)?.status(CALL_LIMIT).await
    }

    fn address(&self, host: usize) -> SocketAddr {
        SocketAddr::new(self.nodes[host].host.address, 2379)
    }
}

fn header(status: &StatusResponse) -> Result<u64> {
    Ok(status.header.context("an answer has a header")?.member_id)
}
