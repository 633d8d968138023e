//! `muster-node move` between stock etcd and `muster-node`, in both directions, as an operator runs
//! it. The restore commands that it prints are run as they are.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::nodes::{client_url, last_log_lines, peer_url};
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::path_text;
use muster_tests::harness::{ChildProcess, Network, NodeProcess, TestHost, poll_slowly};
use muster_tests::stock_etcd::{self, oldest, oldest_etcdctl};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(90);
/// Text of `move` once it waits for the target. The restore commands are printed before it.
const WAITS: &str = "4 target:";

/// Members of one cluster on loopback hosts.
struct TestCluster {
    nodes: Vec<NodeProcess>,
    initial_cluster: String,
}

impl TestCluster {
    /// Returns members that are not started. The member NAME has the data directory `NAME.etcd`, as
    /// a restore makes it.
    fn new(hosts: &[TestHost], prefix: &str, program: &Path, folder: &Path) -> Self {
        let names: Vec<String> = (1..=hosts.len()).map(|n| format!("{prefix}{n}")).collect();
        let initial: Vec<String> = names
            .iter()
            .zip(hosts)
            .map(|(name, host)| format!("{name}={}", peer_url(host)))
            .collect();
        let initial_cluster = initial.join(",");
        let make_node = |(name, host): (&String, &TestHost)| {
            let mut node = NodeProcess::new(host, &format!("{name}.etcd"), program, folder);
            node.flags.push(format!("--name={name}"));
            node.flags.push(format!("--initial-cluster={initial_cluster}"));
            node
        };
        let nodes = names.iter().zip(hosts).map(make_node).collect();
        Self { nodes, initial_cluster }
    }

    fn start(&mut self) -> Result<()> {
        for node in &mut self.nodes {
            node.start()?;
        }
        for node in &mut self.nodes {
            node.wait_ready(LIMIT)?;
        }
        Ok(())
    }

    fn urls(&self) -> String {
        let urls: Vec<String> = self.nodes.iter().map(|node| client_url(&node.host)).collect();
        urls.join(",")
    }

    fn etcdctl(&self, args: &[&str]) -> Result<Output> {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["--command-timeout=60s", "--dial-timeout=10s"]);
        Ok(command.args(["--endpoints", &self.urls()]).args(args).output()?)
    }

    /// Runs `etcdctl`, which must succeed, and returns its output.
    fn run(&self, args: &[&str]) -> Result<String> {
        let output = self.etcdctl(args)?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "etcdctl {}: {error}\n{}",
            args.join(" "),
            last_log_lines(&self.nodes)
        );
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    }

    /// Makes the user `root`, with the role `root` and the password `secret`.
    fn add_root(&self) -> Result<()> {
        self.run(&["user", "add", "root:secret"])?;
        self.run(&["role", "add", "root"])?;
        self.run(&["user", "grant-role", "root", "root"])?;
        Ok(())
    }

    /// Writes keys with several versions, deleted keys, and keys with a long and a short lease.
    fn fill(&self) -> Result<()> {
        for n in 0..60 {
            let value = "v".repeat(n * 311 % 9_000);
            self.run(&["put", &format!("k{:02}", n % 23), &value])?;
        }
        self.run(&["del", "k03"])?;
        self.run(&["put", "k03", "again"])?;
        self.run(&["del", "k04"])?;
        for (key, ttl) in [("long", "600"), ("short", "3")] {
            // On a busy machine, the short lease may end before the key is put.
            poll_slowly("a key with a lease", LIMIT, || {
                let granted = self.run(&["lease", "grant", ttl]).ok()?;
                let id = granted.split(' ').nth(1)?;
                self.run(&["put", key, "leased", &format!("--lease={id}")]).ok()
            })?;
        }
        Ok(())
    }
}

/// Starts `muster-node move` with the snapshot file `file` in `folder`. Its output goes to
/// `log` there.
fn start_move(
    [source, target]: [&TestCluster; 2],
    folder: &Path,
    [file, log]: [&str; 2],
    more: &[&str],
) -> Result<ChildProcess> {
    let mut command = Command::new(program_path("muster-node")?);
    command.current_dir(folder).args(["move", file, "--json", "--wait-seconds", "120"]);
    command.args(["--source", &source.urls(), "--target", &target.urls()]);
    command.args(["--initial-cluster", &target.initial_cluster]).args(more);
    ChildProcess::spawn("move", command, &folder.join(log))
}

/// Waits until `move` has printed its restore commands, and runs them. `etcdutl` is replaced by
/// `tool`.
fn run_restores(moving: &mut ChildProcess, folder: &Path, tool: &Path) -> Result<()> {
    moving.wait_for_output(WAITS, LIMIT)?;
    let programs = program_path("muster-node")?;
    let programs = programs.parent().context("a program has a folder")?;
    let path = std::env::var("PATH").unwrap_or_default();
    let printed = moving.output();
    let commands: Vec<&str> =
        printed.lines().filter(|line| line.contains(" snapshot restore ")).collect();
    ensure!(!commands.is_empty(), "{printed}");
    for line in commands {
        let line = line.trim().replace("etcdutl ", &format!("{} ", path_text(tool)?));
        let mut shell = Command::new("sh");
        shell.env("PATH", format!("{}:{path}", programs.display())).env("ETCDCTL_API", "3");
        let output = shell.current_dir(folder).args(["-c", &line]).output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{line}: {error}");
    }
    Ok(())
}

/// Waits until `move` ends with this code. Returns its result, which is the last line.
fn result_of_move(moving: &mut ChildProcess, code: i32) -> Result<Value> {
    let ended = moving.exit_code(LIMIT)?;
    let printed = moving.output();
    ensure!(ended == code, "exit code {ended}: {printed}");
    let last = printed.lines().last().unwrap_or_default();
    Ok(serde_json::from_str(last).unwrap_or(Value::Null))
}

/// Runs `muster-node compare`. Returns the exit code and the result.
fn compare(
    source: &TestCluster,
    target: &TestCluster,
    more: &[&str],
) -> Result<(Option<i32>, Value)> {
    let mut command = Command::new(program_path("muster-node")?);
    command.args(["compare", "--json", "--source", &source.urls(), "--target", &target.urls()]);
    let output = command.args(more).output()?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let result = serde_json::from_slice(&output.stdout).with_context(|| error)?;
    Ok((output.status.code(), result))
}

/// Moves a cluster with its writes stopped by the alarm, and checks the result.
fn check_move(
    [source, target]: [&mut TestCluster; 2],
    folder: &Path,
    file: &str,
    tool: &Path,
    more: &[&str],
) -> Result<Value> {
    let more = [&["--freeze"], more].concat();
    let mut moving =
        start_move([&*source, &*target], folder, [file, &format!("{file}.log")], &more)?;
    run_restores(&mut moving, folder, tool)?;
    let refused = source.etcdctl(&["put", "frozen", ""])?;
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success() && text.contains("database space exceeded"), "{text}");
    target.start()?;
    let result = result_of_move(&mut moving, 0)?;
    ensure!(result["comparison"]["equal"] == true, "{result}");
    ensure!(result["comparison"]["source"]["keys"].as_u64() > Some(20), "{result}");
    let seconds = result["read_only_seconds"].as_f64().context("a number of seconds")?;
    ensure!((0.01..600.0).contains(&seconds), "{result}");
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &fs_err::metadata(folder.join(file))?.permissions(),
    );
    ensure!(mode & 0o777 == 0o600, "{mode:o}");
    ensure!(target.run(&["put", "after-the-move", "taken"])? == "OK");
    Ok(result)
}

fn check_round_trip(etcd: &Path, tool: &Path) -> Result<()> {
    let (network, folder) = (Network::loopback(7), tempfile::tempdir()?);
    let (hosts, folder) = (&network.hosts, folder.path());
    let mut old = TestCluster::new(&hosts[..3], "old", etcd, folder);
    let mut new = TestCluster::new(&hosts[3..6], "new", &program_path("muster-node")?, folder);
    let mut back = TestCluster::new(&hosts[6..7], "back", etcd, folder);
    old.start()?;
    old.fill()?;
    let result = check_move([&mut old, &mut new], folder, "moved.db", tool, &[])?;
    // `move` may have ended before all members of the target ran. They run now, and the same
    // command compares all of them.
    let mut again = start_move([&old, &new], folder, ["moved.db", "again.log"], &["--freeze"])?;
    let again = result_of_move(&mut again, 0)?;
    ensure!(again["members_not_compared"] == serde_json::json!([]), "{again}");

    let (code, differs) = compare(&old, &new, &[])?;
    ensure!(code == Some(1) && differs["equal"] == false, "{differs}");
    new.run(&["put", "k05", "planted"])?;
    new.run(&["del", "k06"])?;
    let revision = result["snapshot_revision"].to_string();
    let (code, same) = compare(&old, &new, &["--revision", &revision])?;
    ensure!(code == Some(0) && same["equal"] == true, "{same}");
    let (code, differs) = compare(&old, &new, &[])?;
    let found = differs["first_differences"].as_array().context("differences")?;
    let mut keys: Vec<&str> = found.iter().filter_map(|one| one["key"].as_str()).collect();
    // The short lease may have ended in one cluster before it ends in the other one.
    keys.retain(|key| *key != "short");
    ensure!(code == Some(1) && keys == ["after-the-move", "k05", "k06"], "{differs}");

    let more = ["--target-program", "etcd"];
    check_move([&mut new, &mut back], folder, "back.db", tool, &more)?;
    ensure!(back.run(&["get", "k05", "--print-value-only"])? == "planted");
    ensure!(back.run(&["get", "k06", "--print-value-only"])?.is_empty());
    ensure!(back.run(&["get", "long", "--print-value-only"])? == "leased");
    Ok(())
}

#[test]
fn a_move_from_etcd_3_4_and_back_keeps_every_key() -> Result<()> {
    let (Some(etcd), Some(etcdctl)) = (oldest(), oldest_etcdctl()) else { return Ok(()) };
    check_round_trip(&etcd, &etcdctl)
}

#[test]
fn a_move_from_the_newest_etcd_and_back_keeps_every_key() -> Result<()> {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (Some(etcd), Some(etcdutl)) = (stock_etcd::newest(work), stock_etcd::newest_etcdutl(work))
    else {
        return Ok(());
    };
    check_round_trip(&etcd, &etcdutl)
}

/// Returns an etcd of one member that runs with some keys, and a `muster-node` of one member that
/// isn't started. Returns `None` if the etcd of the Debian package isn't installed.
fn small_clusters(network: &Network, folder: &Path) -> Result<Option<(TestCluster, TestCluster)>> {
    let (Some(etcd), Some(_)) = (oldest(), oldest_etcdctl()) else { return Ok(None) };
    let mut old = TestCluster::new(&network.hosts[..1], "old", &etcd, folder);
    let node: PathBuf = program_path("muster-node")?;
    let new = TestCluster::new(&network.hosts[1..2], "new", &node, folder);
    old.start()?;
    old.run(&["put", "a", "1"])?;
    old.run(&["put", "b", "2"])?;
    Ok(Some((old, new)))
}

#[test]
fn a_write_after_the_snapshot_fails_the_move_which_names_the_key() -> Result<()> {
    let (network, folder) = (Network::loopback(2), tempfile::tempdir()?);
    let folder = folder.path();
    let Some((old, mut new)) = small_clusters(&network, folder)? else { return Ok(()) };
    let mut moving = start_move([&old, &new], folder, ["moved.db", "first.log"], &[])?;
    run_restores(&mut moving, folder, Path::new("none"))?;
    old.run(&["put", "late", "3"])?;
    new.start()?;
    result_of_move(&mut moving, 1)?;
    let printed = moving.output();
    ensure!(printed.contains("for example key late"), "{printed}");
    let mut again = start_move([&old, &new], folder, ["moved.db", "second.log"], &[])?;
    result_of_move(&mut again, 1)?;
    ensure!(again.output().contains("for example key late"), "{}", again.output());
    Ok(())
}

#[test]
fn a_move_reads_the_source_through_another_member_once_the_first_has_stopped() -> Result<()> {
    let (network, folder) = (Network::loopback(4), tempfile::tempdir()?);
    let folder = folder.path();
    let (Some(etcd), Some(_)) = (oldest(), oldest_etcdctl()) else { return Ok(()) };
    let mut old = TestCluster::new(&network.hosts[..3], "old", &etcd, folder);
    let node = program_path("muster-node")?;
    let mut new = TestCluster::new(&network.hosts[3..], "new", &node, folder);
    old.start()?;
    old.run(&["put", "a", "1"])?;
    let mut moving = start_move([&old, &new], folder, ["moved.db", "move.log"], &["--freeze"])?;
    run_restores(&mut moving, folder, Path::new("none"))?;
    // Kill the first member of the source, through which `move` has read until now.
    old.nodes[0].kill();
    poll_slowly("the other members of the source to serve reads", LIMIT, || {
        old.run(&["get", "a"]).ok()
    })?;
    new.start()?;
    let result = result_of_move(&mut moving, 0)?;
    ensure!(result["comparison"]["equal"] == true, "{result}");
    let stopped = client_url(&old.nodes[0].host);
    ensure!(result["comparison"]["source"]["url"] != stopped.as_str(), "{result}");
    Ok(())
}

#[test]
fn a_move_does_not_begin_while_clients_write() -> Result<()> {
    let (network, folder) = (Network::loopback(2), tempfile::tempdir()?);
    let folder = folder.path();
    let Some((old, new)) = small_clusters(&network, folder)? else { return Ok(()) };
    let more = ["--quiet-seconds", "5"];
    let mut moving = start_move([&old, &new], folder, ["moved.db", "move.log"], &more)?;
    // Write until `move` ends. On a busy machine, `move` may look for writes later than usual.
    poll_slowly("the move to end", LIMIT, || {
        old.run(&["put", "busy", ""]).ok()?;
        (!moving.is_running()).then_some(())
    })?;
    result_of_move(&mut moving, 1)?;
    let printed = moving.output();
    ensure!(printed.contains("clients write to the source, for example key busy"), "{printed}");
    ensure!(!folder.join("moved.db").exists(), "a snapshot was saved");
    Ok(())
}

#[test]
fn a_target_of_an_earlier_snapshot_is_refused_even_if_its_keys_are_equal() -> Result<()> {
    let (network, folder) = (Network::loopback(2), tempfile::tempdir()?);
    let folder = folder.path();
    let Some((old, mut new)) = small_clusters(&network, folder)? else { return Ok(()) };
    let mut early = start_move([&old, &new], folder, ["early.db", "early.log"], &[])?;
    run_restores(&mut early, folder, Path::new("none"))?;
    early.kill();
    old.run(&["put", "brief", ""])?;
    old.run(&["del", "brief"])?;
    new.start()?;
    let mut moving = start_move([&old, &new], folder, ["moved.db", "move.log"], &[])?;
    result_of_move(&mut moving, 1)?;
    let printed = moving.output();
    ensure!(
        printed.contains("the target is at revision 3, but the snapshot ends at 5"),
        "{printed}"
    );
    Ok(())
}

#[test]
fn a_file_of_other_data_is_refused_before_the_writes_are_stopped() -> Result<()> {
    let (network, folder) = (Network::loopback(2), tempfile::tempdir()?);
    let folder = folder.path();
    let Some((mut old, new)) = small_clusters(&network, folder)? else { return Ok(()) };
    old.run(&["snapshot", "save", path_text(&folder.join("outdated.db"))?])?;
    old.run(&["put", "later", ""])?;
    old.run(&["snapshot", "save", path_text(&folder.join("ahead.db"))?])?;
    fs_err::write(folder.join("text.db"), "no snapshot")?;
    let refuse = |old: &TestCluster, file: &str, text: &str| -> Result<()> {
        let log = format!("{file}.log");
        let mut moving = start_move([old, &new], folder, [file, &log], &["--freeze"])?;
        result_of_move(&mut moving, 1)?;
        let printed = moving.output();
        ensure!(printed.contains(text), "{file}: {printed}");
        ensure!(old.run(&["put", "later", "still taken"])? == "OK");
        Ok(())
    };
    refuse(&old, "outdated.db", "for example key later")?;
    refuse(&old, "text.db", "text.db exists and is no whole snapshot")?;
    // A new etcd with the same URLs gets the same cluster id, but begins at the first revision. So
    // the snapshot file has a higher revision than this etcd.
    old.nodes[0].kill();
    fs_err::remove_dir_all(folder.join("old1.etcd"))?;
    old.start()?;
    refuse(&old, "ahead.db", "is another cluster's")
}

#[test]
fn a_move_of_a_cluster_to_itself_is_refused_before_the_writes_are_stopped() -> Result<()> {
    let (network, folder) = (Network::loopback(2), tempfile::tempdir()?);
    let folder = folder.path();
    let Some((old, new)) = small_clusters(&network, folder)? else { return Ok(()) };
    let same_url = old.urls();
    // Only the member's answer shows that this URL belongs to the source cluster.
    let other_url = format!("{same_url}/");
    for (target, log, text) in [
        (&same_url, "same.log", "belongs to both --source and --target"),
        (&other_url, "other.log", "source and target are the same cluster"),
    ] {
        let more = ["--freeze", "--target", target];
        let mut moving = start_move([&old, &new], folder, ["moved.db", log], &more)?;
        result_of_move(&mut moving, 2)?;
        let printed = moving.output();
        ensure!(printed.contains(text), "{printed}");
        ensure!(old.run(&["put", "a", "still taken"])? == "OK");
    }
    ensure!(!folder.join("moved.db").exists(), "a snapshot was saved");
    Ok(())
}

#[test]
fn users_and_roles_are_compared_after_a_move() -> Result<()> {
    let (network, folder) = (Network::loopback(2), tempfile::tempdir()?);
    let folder = folder.path();
    let Some((old, mut new)) = small_clusters(&network, folder)? else { return Ok(()) };
    old.run(&["user", "add", "alice:secret"])?;
    old.run(&["role", "add", "reader"])?;
    old.run(&["role", "grant-permission", "reader", "read", "a", "b"])?;
    old.run(&["user", "grant-role", "alice", "reader"])?;
    let mut moving = start_move([&old, &new], folder, ["moved.db", "first.log"], &["--freeze"])?;
    run_restores(&mut moving, folder, Path::new("none"))?;
    new.start()?;
    let result = result_of_move(&mut moving, 0)?;
    let auth = &result["comparison"]["auth"];
    ensure!(auth["users"] == 1 && auth["roles"] == 1 && auth["enabled"] == false, "{result}");
    ensure!(auth["differences"] == 0 && auth["not_compared"].is_null(), "{result}");

    new.run(&["user", "revoke-role", "alice", "reader"])?;
    new.run(&["role", "grant-permission", "reader", "write", "c"])?;
    let (code, differs) = compare(&old, &new, &[])?;
    let expected = serde_json::json!([
        "user alice: role reader only in the source",
        "role reader: write of c only in the target",
    ]);
    ensure!(code == Some(1) && differs["equal"] == false, "{differs}");
    ensure!(differs["differences"] == 0, "{differs}");
    ensure!(differs["auth"]["first_differences"] == expected, "{differs}");
    let mut again = start_move([&old, &new], folder, ["moved.db", "again.log"], &["--freeze"])?;
    result_of_move(&mut again, 1)?;
    Ok(())
}

/// etcd 3.4 shows the role `root` without permissions, and `muster-node` with the one for all keys.
#[test]
fn a_move_from_etcd_3_4_with_the_role_root_succeeds() -> Result<()> {
    let (network, folder) = (Network::loopback(2), tempfile::tempdir()?);
    let folder = folder.path();
    let Some((old, mut new)) = small_clusters(&network, folder)? else { return Ok(()) };
    old.add_root()?;
    let mut moving = start_move([&old, &new], folder, ["moved.db", "move.log"], &["--freeze"])?;
    run_restores(&mut moving, folder, Path::new("none"))?;
    new.start()?;
    let result = result_of_move(&mut moving, 0)?;
    let auth = &result["comparison"]["auth"];
    ensure!(auth["users"] == 1 && auth["roles"] == 1 && auth["differences"] == 0, "{result}");
    Ok(())
}

#[test]
fn a_source_that_does_not_show_its_users_is_refused_before_the_writes_are_stopped() -> Result<()> {
    let (network, folder) = (Network::loopback(2), tempfile::tempdir()?);
    let folder = folder.path();
    let Some((old, new)) = small_clusters(&network, folder)? else { return Ok(()) };
    old.add_root()?;
    old.run(&["auth", "enable"])?;
    let mut moving = start_move([&old, &new], folder, ["moved.db", "move.log"], &["--freeze"])?;
    result_of_move(&mut moving, 1)?;
    let printed = moving.output();
    let expected = "--source-cert must be the certificate of a user with the role root: ";
    ensure!(printed.contains(expected), "{printed}");
    ensure!(old.run(&["--user", "root:secret", "put", "a", "still taken"])? == "OK");
    ensure!(!folder.join("moved.db").exists(), "a snapshot was saved");
    Ok(())
}

#[test]
fn urls_of_two_clusters_in_one_list_are_refused_before_the_writes_are_stopped() -> Result<()> {
    let (network, folder) = (Network::loopback(3), tempfile::tempdir()?);
    let folder = folder.path();
    let Some((old, mut new)) = small_clusters(&network, folder)? else { return Ok(()) };
    let node = program_path("muster-node")?;
    let mut other = TestCluster::new(&network.hosts[2..], "other", &node, folder);
    new.start()?;
    other.start()?;
    let wrong_source = format!("{},{}", old.urls(), other.urls());
    let wrong_target = format!("{},{}", new.urls(), other.urls());
    for (flag, urls, log) in
        [("--source", &wrong_source, "source.log"), ("--target", &wrong_target, "target.log")]
    {
        let more = ["--freeze", flag, urls];
        let mut moving = start_move([&old, &new], folder, ["moved.db", log], &more)?;
        result_of_move(&mut moving, 2)?;
        let printed = moving.output();
        let (first, second) = urls.split_once(',').context("two URLs")?;
        ensure!(printed.contains(&format!("{first} is of cluster ")), "{printed}");
        ensure!(printed.contains(&format!("but {second} of cluster ")), "{printed}");
        ensure!(old.run(&["put", "a", "still taken"])? == "OK");
        let mut command = Command::new(&node);
        command.args(["compare", "--source", &old.urls(), "--target", &new.urls(), flag, urls]);
        let compared = command.output()?;
        let error = String::from_utf8_lossy(&compared.stderr).into_owned();
        ensure!(compared.status.code() == Some(2) && error.contains("of one cluster"), "{error}");
    }
    ensure!(!folder.join("moved.db").exists(), "a snapshot was saved");
    Ok(())
}

#[test]
fn an_interrupted_move_goes_on_with_its_snapshot_file() -> Result<()> {
    let (network, folder) = (Network::loopback(2), tempfile::tempdir()?);
    let folder = folder.path();
    let Some((old, mut new)) = small_clusters(&network, folder)? else { return Ok(()) };
    let mut moving = start_move([&old, &new], folder, ["moved.db", "first.log"], &["--freeze"])?;
    run_restores(&mut moving, folder, Path::new("none"))?;
    moving.kill();
    // The second run doesn't freeze the source, and so has not raised the alarm. The target, which
    // has the alarm from the snapshot, must take writes nevertheless.
    let mut again = start_move([&old, &new], folder, ["moved.db", "second.log"], &[])?;
    again.wait_for_output("not yet: no member can serve requests: ", LIMIT)?;
    new.start()?;
    let result = result_of_move(&mut again, 0)?;
    ensure!(again.output().contains("found at moved.db"), "{}", again.output());
    ensure!(result["comparison"]["target"]["keys"] == 2, "{result}");
    ensure!(new.run(&["get", "b", "--print-value-only"])? == "2");
    ensure!(new.run(&["put", "after-the-move", "taken"])? == "OK");
    Ok(())
}
