//! Compares the output and exit code of `etcdctl` on stock etcd and on `muster-node`. The lines of
//! `etcdctl.txt` are run one after another on a one-member cluster of each. Values that always
//! differ are masked: ids, addresses, terms and times. Every other difference must be listed in
//! `etcdctl.txt` with its reason, and must occur.

mod checks;
mod mask;
mod pair;
mod running_program;
mod script;

use std::path::Path;

use anyhow::{Result, ensure};
use muster_tests::stock_etcd;

use self::pair::ClusterPair;
use self::script::lines;

const SCRIPT: &str = include_str!("etcdctl.txt");

#[test]
fn the_newest_etcdctl_prints_the_same() -> Result<()> {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    stock_etcd::newest_etcdctl(work).map_or(Ok(()), |etcdctl| compare(&etcdctl, true))
}

/// The oldest etcdctl lacks some of the commands, and must refuse them alike on both clusters.
#[test]
fn the_oldest_etcdctl_prints_the_same() -> Result<()> {
    stock_etcd::oldest_etcdctl().map_or(Ok(()), |etcdctl| compare(&etcdctl, false))
}

/// Runs the script on both programs. If `newest` is set, a line that is listed as different must
/// differ.
fn compare(etcdctl: &Path, newest: bool) -> Result<()> {
    let Some(mut pair) = ClusterPair::start(etcdctl)? else { return Ok(()) };
    let mut wrong = Vec::new();
    for line in lines(SCRIPT).filter(|line| newest || !line.newest_only) {
        let about = match (pair.run_line(&line), line.differs) {
            (Ok([theirs, ours]), None) if theirs != ours => {
                format!("\netcd: {theirs:#?}\nmuster-node: {ours:#?}")
            }
            (Ok([theirs, ours]), Some(why)) if theirs == ours && newest => {
                format!("is listed as other ({why})")
            }
            (Ok(_), _) => continue,
            (Err(error), _) => format!("{error:#}"),
        };
        wrong.push(format!("{}: {about}", line.text));
    }
    ensure!(wrong.is_empty(), "{} lines:\n{}", wrong.len(), wrong.join("\n\n"));
    Ok(())
}

#[test]
fn the_script_is_long_and_few_of_its_lines_differ() {
    let all: Vec<_> = lines(SCRIPT).collect();
    let differ = all.iter().filter(|line| line.differs.is_some()).count();
    assert!(all.len() >= 400 && differ * 10 < all.len(), "{differ} of {}", all.len());
}
