//! Signed tokens between stock etcd and `muster-node`. If both have the same key and equal
//! revisions of their auth stores, each must accept the other's tokens.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::nodes::client_url;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::{Network, NodeProcess};
use muster_tests::stock_etcd;
use node_proto::etcdserverpb::auth_client::AuthClient;
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::{AuthenticateRequest, RangeRequest};
use tonic::transport::Channel;
use tonic::{Request, Status};

const LIMIT: Duration = Duration::from_secs(60);

/// One signing method of each kind, with a key in a format that etcd's library accepts.
const METHODS: [(&str, &str); 5] = [
    ("RS256", "rsa.pem"),
    ("PS512", "rsa-pkcs8.pem"),
    ("ES384", "p384.pem"),
    ("EdDSA", "ed.pem"),
    ("HS256", "hmac.key"),
];
const FIRST_COMMANDS: [&str; 6] = [
    "user add root:secret",
    "role add root",
    "user grant-role root root",
    "put k v",
    "auth enable",
    "--user=root:secret put k w",
];

fn work() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

async fn channel(node: &NodeProcess) -> Result<Channel> {
    Ok(Channel::from_shared(client_url(&node.host))?.connect().await?)
}

async fn token(node: &NodeProcess) -> Result<String> {
    let (name, password) = ("root".to_owned(), "secret".to_owned());
    let request = AuthenticateRequest { name, password };
    Ok(AuthClient::new(channel(node).await?).authenticate(request).await?.into_inner().token)
}

async fn get(node: &NodeProcess, token: &str) -> Result<Result<(), Status>> {
    let mut request = Request::new(RangeRequest { key: "k".into(), ..Default::default() });
    request.metadata_mut().insert("token", token.parse()?);
    Ok(KvClient::new(channel(node).await?).range(request).await.map(drop))
}

fn etcdctl(tool: &Path, node: &NodeProcess, line: &str) -> Result<()> {
    let output = Command::new(tool)
        .env("ETCDCTL_API", "3")
        .arg(format!("--endpoints={}", client_url(&node.host)))
        // Hashing a password takes long on a slow machine, and etcdctl must not give up before.
        .arg("--command-timeout=60s")
        .args(line.split(' '))
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "etcdctl {line}: {said}");
    Ok(())
}

#[test]
fn etcd_and_muster_node_accept_each_others_signed_tokens() -> Result<()> {
    let (Some(etcd), Some(tool)) = (stock_etcd::newest(work()), stock_etcd::newest_etcdctl(work()))
    else {
        return Ok(());
    };
    let runtime = tokio::runtime::Runtime::new()?;
    for (method, key) in METHODS {
        runtime.block_on(both_ways(&etcd, &tool, method, key))?;
    }
    Ok(())
}

async fn both_ways(etcd: &Path, tool: &Path, method: &str, key: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let network = Network::loopback(2);
    let key =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../node/state/src/auth/jwt/fixtures").join(key);
    let mut nodes = Vec::new();
    let programs = [("etcd", etcd.to_owned()), ("muster", program_path("muster-node")?)];
    for (host, (name, program)) in network.hosts.iter().zip(programs) {
        let mut node = NodeProcess::new(host, name, &program, folder.path());
        node.flags.push("--name=one".to_owned());
        node.flags.push(format!("--initial-cluster=one=http://{}:2380", host.address));
        let spec = format!("jwt,sign-method={method},priv-key={}", key.display());
        node.flags.push(format!("--auth-token={spec}"));
        node.start()?;
        node.wait_ready(LIMIT)?;
        for line in FIRST_COMMANDS {
            etcdctl(tool, &node, line)?;
        }
        nodes.push(node);
    }
    for (from, to) in [(0, 1), (1, 0)] {
        let given = token(&nodes[from]).await?;
        get(&nodes[to], &given).await?.with_context(|| format!("{method}: {from} to {to}"))?;
    }
    // After a user was added, both nodes must refuse an older token with the same error.
    let before = token(&nodes[0]).await?;
    let mut refusals = Vec::new();
    for node in &nodes {
        etcdctl(tool, node, "--user=root:secret user add more:pw")?;
        let status = get(node, &before).await?.expect_err("it is of before");
        refusals.push((status.code(), status.message().to_owned()));
    }
    ensure!(refusals[0] == refusals[1], "{method}: {refusals:?}");
    Ok(())
}
