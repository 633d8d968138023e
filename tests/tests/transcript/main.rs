//! What `etcdctl` prints, and its exit code, of stock etcd and of muster-node: the lines of `etcdctl.txt`, one
//! after the other, said to a cluster of one of each. What differs by nature is masked: ids, addresses,
//! terms, times. What differs besides is listed there with its reason, and has to.

mod checks;
mod mask;
mod pair;
mod running;
mod script;

use std::path::Path;

use anyhow::{Result, ensure};
use muster_tests::stock;

use self::pair::Pair;
use self::script::lines;

const SCRIPT: &str = include_str!("etcdctl.txt");

#[test]
fn the_newest_etcdctl_prints_the_same() -> Result<()> {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    stock::newest_etcdctl(work).map_or(Ok(()), |etcdctl| compare(&etcdctl, true))
}

/// It lacks some of the commands: those are refused alike.
#[test]
fn the_oldest_etcdctl_prints_the_same() -> Result<()> {
    stock::oldest_etcdctl().map_or(Ok(()), |etcdctl| compare(&etcdctl, false))
}

/// To the `newest`, what is listed as other has to be.
fn compare(etcdctl: &Path, newest: bool) -> Result<()> {
    let Some(mut pair) = Pair::start(etcdctl)? else { return Ok(()) };
    let mut wrong = Vec::new();
    for line in lines(SCRIPT).filter(|line| newest || !line.newest_only) {
        let about = match (pair.said(&line), line.differs) {
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
fn the_script_is_long_and_what_differs_is_little() {
    let all: Vec<_> = lines(SCRIPT).collect();
    let differ = all.iter().filter(|line| line.differs.is_some()).count();
    assert!(all.len() >= 400 && differ * 10 < all.len(), "{differ} of {}", all.len());
}
