//! The pages about changes of members, with agents and by hand.

use muster_tests::harness::AgentlessCluster;
use muster_tests::harness::programs::program_path;
use serde_json::Value;

use super::*;

#[test]
fn members() -> Result<()> {
    let mut cluster = BookCluster::form(3, 5, &[])?;
    let hosts = cluster.testbed.network.hosts.clone();
    let sections = [
        "Tickets",
        "Orders",
        "Move a member to another address",
        "Restart or upgrade, one member at a time",
    ];
    let mut typed = cluster.open("docs/members.md", &sections)?;
    typed.run("token create --cluster demo --kind join --out db-4.bundle")?;
    let line = typed.take("muster-agent run --bundle-file db-4.bundle --name db-4")?;
    let bundle = typed.path(flag_value(&line, "--bundle-file")?);
    cluster.start(3, &bundle, &[])?;
    cluster.wait_members(4)?;

    typed.replace("10.1.0.3:2380", hosts[4].at_port(2380));
    typed.replace("10.1.0.3", hosts[4].address);
    typed.retry("intent remove demo db-2 --yes --wait")?;
    ensure!(cluster.agents[1].exit_code(LIMIT)? == 3, "{}", cluster.agents[1].output());
    typed.retry("intent update demo db-3 --peer-urls")?;
    ensure!(typed.run("intent list demo --all")?.contains("updated"));
    restart_at(&mut cluster.agents[2], &hosts[4])?;
    wait_healthy(&typed)?;

    // All three members exchange the files, though none of them needs one now.
    typed.run_on("db-1", "muster-agent address show > db-1.address")?;
    typed.machine(
        "db-4",
        &cluster.agents[3].host,
        &[("MUSTER_DATA_DIR", &cluster.agents[3].data_dir)],
    );
    for machine in ["db-3", "db-4"] {
        typed.type_line(machine, &format!("muster-agent address show > {machine}.address"))?;
    }
    let files = "db-2.address db-3.address";
    typed.run_on_with(
        "db-1",
        "muster-agent address add",
        &[(files, "db-3.address db-4.address")],
    )?;
    // The member goes back to its first address.
    let back = [(hosts[4].address.to_string(), hosts[2].address.to_string())];
    let back: Vec<(&str, &str)> =
        back.iter().map(|(from, to)| (from.as_str(), to.as_str())).collect();
    let update = typed.take("muster-agent member update db-3 --peer-urls")?;
    typed.type_line("", &update.replace(back[0].0, back[0].1))?;
    typed.take("muster-agent run --advertise-address")?;
    restart_at(&mut cluster.agents[2], &hosts[2])?;
    typed.run("muster-agent member wait")?;

    typed.run("muster-agent member move-leader --from db-1")?;
    typed.take("systemctl stop muster-agent")?;
    ensure!(cluster.agents[0].terminate(LIMIT)? == 0);
    typed.take("systemctl start muster-agent")?;
    cluster.agents[0].start()?;
    typed.run("muster-agent member wait")?;
    typed.finish()
}

/// Starts a member's agent at another address, after its stop.
fn restart_at(agent: &mut AgentProcess, host: &muster_tests::harness::TestHost) -> Result<()> {
    ensure!(agent.terminate(LIMIT)? == 0, "{}", agent.output());
    agent.host = host.clone();
    agent.start()
}

fn wait_healthy(typed: &Typist) -> Result<()> {
    typed.type_line("", "muster-agent member wait --patience 90").map(drop)
}

/// The runbook's commands: what to look at, and how a lost host comes back.
#[test]
fn runbook() -> Result<()> {
    let mut cluster = BookCluster::form(3, 3, &[])?;
    let mut typed = cluster.open("docs/runbook.md", &[])?;
    // On the hosts, `etcdctl` asks the first member. Its own host is lost later.
    for (variable, file) in [("CACERT", "ca.crt"), ("CERT", "client.crt"), ("KEY", "client.key")] {
        let file = cluster.etcdctl()?.credentials().join(file);
        typed.set("db-1", &format!("ETCDCTL_{variable}"), path_text(&file)?)?;
    }
    let first = format!("https://{}", cluster.agents[0].host.at_port(2379));
    typed.set("db-1", "ETCDCTL_ENDPOINTS", &first)?;
    typed.run("muster-agent status")?;
    typed.run("muster-agent member list")?;
    typed.run("muster-agent member list")?;
    let status = typed.run("etcdctl endpoint status --cluster")?;
    ensure!(status.matches("https://").count() == 3, "{status}");

    typed.take("systemctl stop muster-agent")?;
    ensure!(cluster.agents[0].terminate(LIMIT)? == 0);
    typed.run_with("muster-agent reset --yes", &[("runuser -u muster -- ", "")])?;
    typed.run("token create --cluster demo --kind join --replace db-1")?;
    let store = typed.path("muster-join.bundle");
    typed.run_with(
        "install -m 600 db-1.bundle",
        &[("/etc/credstore/muster-join.bundle", path_text(&store)?)],
    )?;
    typed.take("systemctl start muster-agent")?;
    let gone = cluster.agents.remove(0);
    drop(gone);
    cluster.start(0, &store, &[])?;
    cluster.wait_members(3)?;
    for part in [
        "process list",
        "cluster explain demo",
        "cluster list --state open,preparing",
        "cluster explain demo",
        "cluster list",
        "cluster explain demo",
    ] {
        typed.run(part)?;
    }
    typed.machine("disco", &cluster.testbed.network.hub, &[]);
    typed.replace("keys/", format!("{}/", cluster.testbed.keys_dir().display()));
    typed.run("openssl req -x509")?;
    typed.finish()
}

/// Members without agents. Their names are n1, n2 and so on, in place of db-1 and db-2.
#[test]
fn members_by_hand_and_corruption() -> Result<()> {
    let mut machines = AgentlessCluster::start_three(&program_path("muster-node")?, 6)?;
    for _ in 0..3 {
        machines.add_machine();
    }
    let folder = tempfile::tempdir()?;
    let network = Network::loopback(1);
    let endpoints = machines.endpoints();
    let urls: Vec<String> = machines.all.iter().map(|node| node.peer_url.clone()).collect();
    let open = |page: &str, sections: &[&str]| -> Result<Typist> {
        let mut typed = Typist::open(page, sections, &folder.path().join(&page[5..]))?;
        typed.machine("", &network.hub, &[]);
        typed.set("", "ETCDCTL_ENDPOINTS", &endpoints)?;
        typed.set("", "MUSTER_DATA_DIR", "/nonexistent")?;
        for (verb, n) in [("add", 4), ("replace", 5)] {
            typed.replace(&format!("https://10.0.0.{n}:2380"), &urls[n - 1]);
            typed.replace(
                &format!("member {verb} "),
                format!("member {verb} --endpoints {endpoints} "),
            );
        }
        for verb in ["promote", "remove", "move-leader"] {
            typed.replace(
                &format!("member {verb} "),
                format!("member {verb} --endpoints {endpoints} "),
            );
        }
        typed.replace("db-", "n");
        Ok(typed)
    };
    let mut typed = open("docs/members.md", &["By hand: change"])?;
    let printed = typed.run_with("member add db-4", &[("member add", "member add --json")])?;
    machines.join(3, &last_json(&printed)?)?;
    typed.retry("member promote db-4")?;
    typed.retry("member remove db-1")?;
    ensure!(machines.all[0].exit_code()? == 3);
    typed.start("member replace db-2 db-5", &[], "n5")?;
    wait_listed(&machines, 4)?;
    machines.join_by_list(4)?;
    typed.wait_last()?;
    ensure!(machines.all[1].exit_code()? == 3);
    typed.retry("member move-leader --from db-3")?;
    typed.finish()?;
    machines.wait_voters(&["n3", "n4", "n5"])?;

    let mut typed = open("docs/corruption.md", &[])?;
    typed.run("etcdctl alarm list")?;
    let change = [("OLD NEW", "n4 n6"), ("https://10.0.0.5:2380", urls[5].as_str())];
    typed.start("member replace OLD NEW", &change, "n6")?;
    wait_listed(&machines, 4)?;
    machines.join_by_list(5)?;
    typed.wait_last()?;
    typed.run("etcdctl alarm disarm")?;
    typed.finish()?;
    machines.wait_voters(&["n3", "n5", "n6"])
}

/// Waits until the cluster has `count` members.
fn wait_listed(machines: &AgentlessCluster, count: usize) -> Result<()> {
    poll_slowly(&format!("{count} members"), LIMIT, || {
        let list = machines.run_member_command(&["list"]).ok()?;
        (list["members"].as_array()?.len() == count).then_some(())
    })
}

/// Returns the JSON document that a command printed beside its notes.
fn last_json(printed: &str) -> Result<Value> {
    let mut documents = printed.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let found = documents.rfind(|document| document["environment"].is_object());
    let whole = || {
        let start = printed.find('{')?;
        serde_json::Deserializer::from_str(&printed[start..]).into_iter::<Value>().next()?.ok()
    };
    found.or_else(whole).with_context(|| printed.to_owned())
}
