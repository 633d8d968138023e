//! What `etcdctl` prints, and its exit code, of stock etcd and of muster-node: the lines of `etcdctl.txt`, one
//! after the other, said to a cluster of one of each. What differs by nature is masked: ids, addresses,
//! terms, times. What differs besides is listed there with its reason, and has to.

mod mask;
mod script;

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::nodes::client_url;
use muster_tests::harness::programs::program;
use muster_tests::harness::{Network, Node, until};
use muster_tests::stock;

use self::script::{Line, lines};

const LIMIT: Duration = Duration::from_secs(60);

/// What became of a line.
#[derive(Clone, Debug, PartialEq)]
struct Said {
    /// `None` of a command that doesn't end by itself.
    code: Option<i32>,
    out: String,
    err: String,
}

fn work() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

#[test]
fn the_newest_etcdctl_prints_the_same() -> Result<()> {
    stock::newest_etcdctl(work()).map_or(Ok(()), |etcdctl| compare(&etcdctl, true))
}

/// It lacks some of the commands: those are refused alike.
#[test]
fn the_oldest_etcdctl_prints_the_same() -> Result<()> {
    stock::oldest_etcdctl().map_or(Ok(()), |etcdctl| compare(&etcdctl, false))
}

/// What is listed as other has to be, if `all_there`.
fn compare(etcdctl: &Path, all_there: bool) -> Result<()> {
    let Some(etcd) = stock::newest(work()) else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let network = Network::loopback(2);
    let mut nodes = Vec::new();
    for (host, (name, program)) in
        network.hosts.iter().zip([("etcd", etcd), ("muster", program("muster-node")?)])
    {
        let mut node = Node::new(host, name, &program, folder.path());
        node.flags.push("--name=one".to_owned());
        node.flags.push(format!("--initial-cluster=one=http://{}:2380", host.address));
        node.start()?;
        node.ready(LIMIT)?;
        nodes.push(node);
    }
    let mut wrong = Vec::new();
    for line in lines(include_str!("etcdctl.txt")) {
        let [theirs, ours] = said(etcdctl, &line, [&nodes[0], &nodes[1]])?;
        let about = match line.differs {
            None if theirs != ours => format!("\netcd: {theirs:#?}\nmuster-node: {ours:#?}"),
            Some(why) if theirs == ours && all_there => format!("is listed as other ({why})"),
            _ => continue,
        };
        wrong.push(format!("{}: {about}", line.text));
    }
    ensure!(wrong.is_empty(), "{} lines:\n{}", wrong.len(), wrong.join("\n\n"));
    Ok(())
}

/// What both say to a line.
fn said(etcdctl: &Path, line: &Line<'_>, nodes: [&Node; 2]) -> Result<[Said; 2]> {
    let commands = nodes.map(|node| {
        let mut command = Command::new(etcdctl);
        command
            .arg(format!("--endpoints={}", client_url(&node.host)))
            .args(&line.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        (command, node.host.address.to_string())
    });
    let [theirs, ours] = commands;
    if line.goes_on {
        return going_on(theirs, ours);
    }
    let input = line.input.clone();
    let other = std::thread::spawn(move || ended(ours, &input));
    let theirs = ended(theirs, &line.input)?;
    Ok([theirs, other.join().map_err(|_| anyhow::anyhow!("the other one panicked"))??])
}

fn ended((mut command, address): (Command, String), input: &str) -> Result<Said> {
    let mut child = command.spawn()?;
    // Who wants none of it may be gone.
    let _ = child.stdin.take().context("a pipe")?.write_all(input.as_bytes());
    let output = child.wait_with_output()?;
    let masked = |bytes: &[u8]| mask::masked(&String::from_utf8_lossy(bytes), &address);
    let (out, err) = (masked(&output.stdout), masked(&output.stderr));
    Ok(Said { code: output.status.code(), out, err })
}

/// Commands that don't end, up to where both have said the same, or for a while.
fn going_on(theirs: (Command, String), ours: (Command, String)) -> Result<[Said; 2]> {
    let mut both = Vec::new();
    for (mut command, address) in [theirs, ours] {
        let mut child = command.spawn()?;
        let heard = hear(child.stdout.take().context("a pipe")?);
        both.push((Ended(child), heard, address));
    }
    let now = || -> Vec<String> {
        let text = |heard: &Heard| heard.lock().unwrap_or_else(PoisonError::into_inner).clone();
        both.iter()
            .map(|(_, heard, address)| {
                mask::masked(&String::from_utf8_lossy(&text(heard)), address)
            })
            .collect()
    };
    let same = || Some(now()).filter(|said| !said[0].is_empty() && said[0] == said[1]);
    let said = until("both to say the same", LIMIT, same).unwrap_or_else(|_| now());
    let mut said = said.into_iter().map(|out| Said { code: None, out, err: String::new() });
    Ok([said.next().context("one")?, said.next().context("two")?])
}

type Heard = Arc<Mutex<Vec<u8>>>;

fn hear(mut pipe: ChildStdout) -> Heard {
    let heard = Heard::default();
    let hears = Arc::clone(&heard);
    std::thread::spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(count @ 1..) = pipe.read(&mut piece) {
            let mut heard = hears.lock().unwrap_or_else(PoisonError::into_inner);
            heard.extend_from_slice(&piece[..count]);
        }
    });
    heard
}

/// A process that ends with this.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_script_is_long_and_what_differs_is_little() {
    let all: Vec<_> = lines(include_str!("etcdctl.txt")).collect();
    let differ = all.iter().filter(|line| line.differs.is_some()).count();
    assert!(all.len() >= 120 && differ * 10 < all.len(), "{differ} of {}", all.len());
}
