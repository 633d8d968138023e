//! A short run of the same random requests to stock etcd and to muster-node; `make fuzz-etcd` is
//! the long one.

use anyhow::{Context, Result};
use muster_tests::harness::programs::program;
use muster_tests::{fuzz_etcd, stock};

const SEED: u64 = 1;
const REQUESTS: u64 = 1_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn muster_node_answers_as_stock_etcd_does() -> Result<()> {
    let node = program("muster-node")?;
    let profile = node.parent().context("a program has a folder")?;
    let work = profile.parent().context("the folder lies in target")?;
    let Some(etcd) = stock::present(work) else {
        eprintln!("SKIPPED: no stock etcd is installed or built (make fuzz-etcd builds one)");
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let report = fuzz_etcd::run(&etcd, &node, dir.path(), SEED, REQUESTS).await?;
    assert_eq!(report.requests + report.allowed.values().sum::<u64>(), REQUESTS);
    Ok(())
}
