//! Features used one after the other on an adopted cluster: policies, the replacement of the CAs, a
//! move to `muster-node`, and backups.

use std::path::PathBuf;
use std::process::Command;

use muster_tests::harness::nodes::client_url;
use muster_tests::harness::process::last_lines;

use super::*;

/// Time after which these agents consider a member dead.
const AFTER: (&str, &str) = ("MUSTER_UNREACHABLE_AFTER", "6");
/// Time for which a dead member is watched, though it must not be replaced. It suffices for the
/// observations of a death.
const OBSERVATION_TIME: Duration = Duration::from_secs(25);
/// Time limit of a replacement, including the observations of the death.
const REPLACED: Duration = Duration::from_secs(180);

/// Runs one of our programs on the machine of the service, and returns its standard output.
fn run(adoption: &AdoptionTestbed, program: &str, words: &[&str]) -> Result<String> {
    let mut command = adoption.testbed.network.hub.command(program_path(program)?);
    let output = command.args(words).output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {error}", words.join(" "));
    Ok(String::from_utf8(output.stdout)?)
}

/// Takes all members over, exchanges their certificates, and drops the CA that the etcds used.
fn adopt_all(adoption: &mut AdoptionTestbed) -> Result<()> {
    adoption.sign()?;
    let out = adoption.testbed.path("demo-new");
    let credentials = ["cluster", "credentials", "demo", "--out", path_text(&out)?, "--yes"];
    adoption.testbed.admin_command(&credentials)?;
    adoption.enrol()?;
    for index in 0..3 {
        adoption.take_over(index)?;
    }
    adoption.testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    for index in 0..3 {
        let (code, text) = adoption.run(index, &["adopt", "certificates"])?;
        ensure!(code == 0, "{code}: {text}");
    }
    rotate(adoption, &["--step", "3"])?;
    restart_for_cas(adoption)
}

/// Takes a step of the replacement of the CAs, and gives the client the present CAs.
fn rotate(adoption: &AdoptionTestbed, more: &[&str]) -> Result<()> {
    let step = ["cluster", "rotate-ca", "demo", "--yes", "--timeout", "1m"];
    adoption.testbed.admin_command(&[&step[..], more].concat())?;
    let out = adoption.testbed.path("demo-new");
    let renew = ["cluster", "credentials", "demo", "--renew", "--yes", "--out", path_text(&out)?];
    adoption.testbed.admin_command(&renew).map(drop)
}

/// Returns a `muster-node` on host `index` that serves clients without TLS. It isn't started yet.
fn plain_node(adoption: &AdoptionTestbed, index: usize, name: &str) -> Result<NodeProcess> {
    let host = &adoption.testbed.network.hosts[index];
    let folder = adoption.testbed.path("");
    let mut node = NodeProcess::new(host, name, &program_path("muster-node")?, &folder);
    node.flags.push(format!("--name={name}"));
    node.flags.push(format!("--initial-cluster={}", initial_cluster(&node, name)));
    Ok(node)
}

fn initial_cluster(node: &NodeProcess, name: &str) -> String {
    format!("{name}=http://{}", node.host.at_port(2380))
}

/// Moves the adopted cluster to a `muster-node`, by the commands that `muster-node move` prints.
fn move_to(adoption: &AdoptionTestbed, node: &mut NodeProcess, name: &str) -> Result<Value> {
    let tls = adoption.testbed.path("demo-new");
    let [ca, certificate, key] = ["ca.crt", "client.crt", "client.key"].map(|file| tls.join(file));
    let snapshot = adoption.testbed.path("moved.db");
    let mut command = Command::new(program_path("muster-node")?);
    command
        .current_dir(adoption.testbed.path(""))
        .args(["move", path_text(&snapshot)?, "--freeze", "--json", "--wait-seconds", "120"])
        .args(["--source", &adoption.endpoints().join(",")])
        .args(["--source-cacert", path_text(&ca)?, "--source-cert", path_text(&certificate)?])
        .args(["--source-key", path_text(&key)?, "--target", &client_url(&node.host)])
        .args(["--initial-cluster", &initial_cluster(node, name)])
        .args(["--data-dir", path_text(&node.data_dir)?]);
    let mut moving = ChildProcess::spawn("move", command, &adoption.testbed.path("move.log"))?;
    moving.wait_for_output("4 target:", LIMIT)?;
    let printed = moving.output();
    let restore = printed.lines().find_map(|line| {
        line.trim().strip_prefix("muster-node ").filter(|line| line.contains("snapshot restore"))
    });
    let restore = restore.with_context(|| printed.clone())?;
    let words: Vec<&str> = restore.split_whitespace().collect();
    run(adoption, "muster-node", &words)?;
    node.start()?;
    node.wait_ready(LIMIT)?;
    let code = moving.exit_code(LIMIT)?;
    let printed = moving.output();
    ensure!(code == 0, "{code}: {printed}");
    Ok(serde_json::from_str(printed.lines().last().unwrap_or_default())?)
}

/// The cluster is adopted, its CAs are replaced once more, and its data moves to a `muster-node`. A
/// backup of the `muster-node` is verified and restored: the restored data equals its data.
#[test]
fn an_adopted_cluster_with_new_cas_moves_to_muster_node_whose_backup_is_restored() -> Result<()> {
    let Some(etcd) = oldest() else { return Ok(()) };
    let mut adoption = AdoptionTestbed::start_on(Network::loopback(5), &etcd)?;
    adopt_all(&mut adoption)?;
    let etcdctl = adoption.etcdctl("demo-new");
    etcdctl.run(&["put", "before", "the rotation"])?;
    rotate(&adoption, &["--step", "1", "--again"])?;
    restart_for_cas(&mut adoption)?;
    rotate(&adoption, &["--step", "2"])?;
    rotate(&adoption, &["--step", "3"])?;
    restart_for_cas(&mut adoption)?;
    etcdctl.run(&["put", "after", "the rotation"])?;
    etcdctl.run(&["del", "before"])?;

    let mut node = plain_node(&adoption, 3, "moved")?;
    let result = move_to(&adoption, &mut node, "moved")?;
    ensure!(result["comparison"]["equal"] == true, "{result}");
    let url = client_url(&node.host);
    let put = |key: &str| -> Result<()> {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["--endpoints", &url, "put", key, "x"]);
        ensure!(command.output()?.status.success(), "the target takes no writes");
        Ok(())
    };
    put("new")?;

    let (store, restored) = (adoption.testbed.path("backups"), adoption.testbed.path("back.db"));
    let nowhere = adoption.testbed.path("no-agent");
    let backup = |words: &[&str]| {
        let own = ["backup", "--data-dir", path_text(&nowhere)?];
        let to = ["--backup-to", path_text(&store)?];
        run(&adoption, "muster-agent", &[&own[..], words, &to].concat())
    };
    backup(&["run", "--endpoints", &url])?;
    let verified = backup(&["verify", "newest", "--drill"])?;
    ensure!(verified.starts_with("OK "), "{verified}");
    backup(&["restore", "newest", "--to", path_text(&restored)?])?;
    let mut second = plain_node(&adoption, 4, "restored")?;
    let (peer, dir) = (initial_cluster(&second, "restored"), second.data_dir.clone());
    let own_url = peer.trim_start_matches("restored=");
    let restore = ["snapshot", "restore", path_text(&restored)?, "--name", "restored"];
    let more = ["--initial-cluster", &peer, "--initial-advertise-peer-urls", own_url];
    let dir = ["--data-dir", path_text(&dir)?];
    run(&adoption, "muster-node", &[&restore[..], &more, &dir].concat())?;
    second.start()?;
    second.wait_ready(LIMIT)?;
    let compare = ["compare", "--source", &url, "--target", &client_url(&second.host)];
    run(&adoption, "muster-node", &compare)?;
    put("newer")?;
    let output = Command::new(program_path("muster-node")?).args(compare).output()?;
    let differs = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.code() == Some(1) && differs.contains("newer"), "{differs}");
    Ok(())
}

/// Makes a replacement policy of the adopted cluster, and returns its bundle.
fn policy(adoption: &AdoptionTestbed) -> Result<PathBuf> {
    let file = adoption.testbed.path("policy.bundle");
    let create = ["policy", "create", "--cluster", "demo", "--replace-dead", "--at-most", "2"];
    adoption.testbed.admin_command(&[&create[..], &["--out", path_text(&file)?]].concat())?;
    Ok(file)
}

/// Starts a host that waits under the policy.
fn start_standby(adoption: &AdoptionTestbed, bundle: &Path) -> Result<AgentProcess> {
    let args = ["--node-binary", path_text(&adoption.etcd)?, "--name", "fourth"];
    let env = vec![(AFTER.0.to_owned(), AFTER.1.to_owned())];
    let args = args.map(str::to_owned).to_vec();
    let options = AgentOptions { args, env, ..AgentOptions::default() };
    let mut agent = adoption.testbed.agent_with(3, bundle, options);
    agent.start()?;
    Ok(agent)
}

/// A host comes with a policy's bundle before the members are enrolled, and waits. Then a member's
/// host dies while two of three members are taken over. The waiting host must not take the place:
/// the third member would refuse it, and the take-over goes on when the dead host comes back.
/// Afterwards the same policy replaces a dead member.
#[test]
fn a_policy_replaces_nobody_in_the_middle_of_an_adoption_and_a_dead_member_after_it() -> Result<()>
{
    let Some(etcd) = oldest() else { return Ok(()) };
    let mut adoption = AdoptionTestbed::start(&etcd)?;
    adoption.sign()?;
    let bundle = policy(&adoption)?;
    let mut standby = start_standby(&adoption, &bundle)?;
    standby.wait_for_output("can be a standby once", LIMIT)?;
    let writer = adoption.writer()?;
    adoption.enrol()?;
    for agent in &mut adoption.agents {
        agent.options.env.push((AFTER.0.to_owned(), AFTER.1.to_owned()));
    }
    for index in 0..2 {
        adoption.take_over(index)?;
    }
    standby.wait_for_output("waiting for the cluster to add this host", LIMIT)?;
    let before = member_ids(&adoption.etcdctl("old"))?;
    adoption.agents[1].kill();
    adoption.agents[1].kill_node()?;
    std::thread::sleep(OBSERVATION_TIME);
    let beside = adoption.etcdctl("old").with_endpoint(&adoption.testbed.network.hosts[0]);
    ensure!(member_ids(&beside)? == before, "{}", last_lines(&standby.output(), 25));
    // The take-over of the third member would stop the cluster now.
    let (code, text) = adoption.run(2, &["adopt", "take-over", "--patience", "5"])?;
    ensure!(code == 1 && adoption.etcds[2].is_running(), "{code}: {text}");
    ensure!(text.contains("nfra.2") || text.contains("infra-2"), "it names the dead one: {text}");

    adoption.agents[1].start()?;
    adoption.take_over(2)?;
    adoption.testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let mut dead = adoption.agents.remove(1);
    dead.kill_node()?;
    dead.kill();
    poll_slowly("the standby to take the dead member's place", REPLACED, || {
        let shown = adoption.testbed.admin_command(&["cluster", "show", "demo"]).ok()?;
        (newcomer_votes(&adoption).ok()? && !shown.contains("Infra.2 ")).then_some(())
    })
    .with_context(|| {
        let others = adoption.agents.iter().map(|agent| last_lines(&agent.output(), 20));
        format!("{}\n{}", last_lines(&standby.output(), 25), others.collect::<Vec<_>>().join("\n"))
    })?;
    writer.stop_and_check(&adoption.endpoints()[0])
}
