//! The pages about a running cluster: policies, identity, audit, backups and CAs.

use super::*;

#[test]
fn policies() -> Result<()> {
    let cluster = BookCluster::form(1, 1, &[])?;
    let mut typed = cluster.open("docs/policies.md", &[])?;
    typed.run("policy create --cluster demo --replace-dead")?;
    let user_data = fs_err::read_to_string(typed.path("user-data.yaml"))?;
    ensure!(user_data.contains("--identity-from"), "{user_data}");
    let listed = typed.run("policy list --cluster demo")?;
    let id = listed.lines().nth(1).and_then(|line| line.split_whitespace().next());
    let id = id.context("a policy")?.to_owned();
    typed.replace("2zqkq3s5vdyfa6ai", &id);
    typed.run("cluster show demo")?;
    // The agent has to write the policy to the cluster's store before it can be revoked there.
    poll_slowly("the policy to be in the cluster's store", LIMIT, || {
        typed.type_line("db-1", "muster-agent policy list").ok()?.contains(&id).then_some(())
    })?;
    // Without a terminal nobody can be asked.
    let unasked = [("policy revoke", "policy revoke --yes")];
    typed.run_with("muster-discovery policy revoke", &unasked)?;
    ensure!(typed.run("muster-agent policy list")?.contains(&id));
    typed.run("muster-agent status")?;
    typed.run("muster-agent policy revoke")?;
    typed.finish()
}

#[test]
fn audit() -> Result<()> {
    let cluster = BookCluster::form(1, 1, &[])?;
    let mut typed = cluster.open("docs/audit.md", &[])?;
    typed.replace("~/", "");
    let shown = typed.run("audit tail --cluster demo")?;
    ensure!(shown.contains("formed") || shown.contains("commit"), "{shown}");
    typed.run("audit verify --checkpoint")?;
    typed.run("audit export --out events.jsonl")?;
    ensure!(fs_err::read_to_string(typed.path("events.jsonl"))?.lines().count() > 3);
    // A second verification compares with the checkpoint of the first.
    typed.type_line("auditor", "muster-discovery audit verify --checkpoint muster.checkpoint")?;
    typed.finish()
}

#[test]
fn identity_and_user_data() -> Result<()> {
    let cluster = BookCluster::form(1, 1, &[])?;
    let create = "cluster create other --size 1 --allow-loopback";
    cluster.testbed.admin_command(&create.split(' ').collect::<Vec<_>>())?;
    let mut typed = cluster.open("docs/identity.md", &[])?;
    typed.replace("--cluster demo", "--cluster other");
    let made = typed.run("token create --cluster demo --cidr")?;
    let listed = typed.type_line("admin", "muster-discovery token list --cluster other")?;
    let id = listed.lines().nth(1).and_then(|line| line.split_whitespace().next());
    typed.replace("2zqkq3s5vdyfa6ai", id.with_context(|| format!("{made}{listed}"))?);
    typed.skip("--identity-from aws", "needs a cloud: policies/machines.rs has documents")?;
    typed.run("token show")?;
    typed.skip("mkdir -p /etc/muster/clouds", "changes the machine")?;
    typed.skip("curl", "tests reach no cloud")?;
    typed.skip("curl", "tests reach no cloud")?;
    typed.skip("--identity-keys", "policies/machines.rs")?;
    typed.finish()?;

    let mut typed = cluster.open("docs/systemd.md", &[])?;
    typed.replace("--cluster demo", "--cluster other");
    typed.run("--print-cloud-init --out db-1.yaml")?;
    ensure!(fs_err::read_to_string(typed.path("db-1.yaml"))?.starts_with("#cloud-config"));
    typed.finish()
}

#[test]
fn backups_of_a_cluster() -> Result<()> {
    let cluster = BookCluster::form(1, 1, &[])?;
    let mut typed = cluster.open("docs/cluster-backups.md", &[])?;
    if typed.type_line("", "age-keygen --version").is_err() {
        muster_tests::harness::skip::report_missing_program("age-keygen");
        return Ok(());
    }
    let store = cluster.testbed.path("stored");
    typed.replace("s3://our-backups/muster", store.display());
    typed.replace("--backup-to /backups", format!("--backup-to {}", store.display()));
    typed.replace("/var/lib/muster", cluster.agents[0].data_dir.display());
    // No agent runs on the admin's machine.
    typed.set("admin", "MUSTER_DATA_DIR", "/nonexistent")?;
    let made = typed.run("age-keygen --output backup-key.txt")?;
    let recipient = last_word(&made, "Public key")?.to_owned();
    typed.replace("age1…", recipient);
    typed.run("backup run --backup-to")?;
    let listed = typed.run("backup list")?;
    ensure!(listed.starts_with("NAME ") && listed.contains("db-1"), "{listed}");
    ensure!(typed.run("backup verify --all")?.contains("OK  "));
    ensure!(typed.run("backup verify newest --drill")?.contains("OK  "));
    let ca = cluster.agents[0].data_dir.join("agent/tls/peer-ca.crt");
    fs_err::copy(ca, typed.path("peer-ca.crt"))?;
    for _ in 0..2 {
        let verified = typed.run("backup verify --all --trust peer-ca.crt")?;
        ensure!(verified.contains("signed by the founder of seat 1"), "{verified}");
    }
    typed.run("backup restore newest --to snapshot.db")?;
    let status = "muster-node snapshot status snapshot.db";
    typed.type_line("admin", status)?;
    typed.finish()
}

#[test]
fn certificate_authorities() -> Result<()> {
    let mut cluster = BookCluster::form(3, 3, &[])?;
    let mut typed = cluster.open("docs/cas.md", &[])?;
    typed.type_line("admin", "muster-discovery cluster credentials demo --out app1")?;
    for step in ["1", "2", "3"] {
        // Without a terminal nobody can be asked, so the step has to be named.
        let asked = format!("rotate-ca demo --step {step} --yes");
        typed.retry_with("cluster rotate-ca demo", &[("rotate-ca demo", &asked)])?;
        typed.retry("cluster credentials demo --renew --out app1")?;
    }
    let with_python = "python3 -c 'import json, sys; sys.stdout.write(json.load(sys.stdin)[3])'";
    for (variable, file) in [("CACERT", "ca.crt"), ("CERT", "client.crt"), ("KEY", "client.key")] {
        typed.set(
            "",
            &format!("ETCDCTL_{variable}"),
            path_text(&typed.path("app1").join(file))?,
        )?;
    }
    let hash = typed.retry_with("etcdctl get", &[("jq -j '.[3]'", with_python)])?;
    ensure!(hash.split_whitespace().next().is_some_and(|hash| hash.len() == 64), "{hash}");

    // The third member stands for db-4 of the page.
    let (agent, keys) = (&cluster.agents[2], cluster.testbed.keys_dir());
    typed.machine("db-4", &agent.host, &[]);
    typed.replace("/var/lib/muster", agent.data_dir.display());
    typed.replace("--keys keys", format!("--keys {}", keys.display()));
    typed.replace("-o muster -g muster ", "");
    for port in [2379, 2380] {
        typed.replace(&format!("10.1.0.4:{port}"), agent.host.at_port(port));
    }
    let list = cluster.etcdctl()?.command(&["member", "list"]);
    let mut list = list;
    for (variable, file) in [("CACERT", "ca.crt"), ("CERT", "client.crt"), ("KEY", "client.key")] {
        list.env(format!("ETCDCTL_{variable}"), typed.path("app1").join(file));
    }
    let list = String::from_utf8(list.output()?.stdout)?;
    let id =
        list.lines().find(|line| line.contains("db-3")).and_then(|line| line.split(',').next());
    typed.replace("8e9e05c52164694d", id.with_context(|| list.clone())?);
    typed.type_line("admin", "muster-discovery cluster export demo --out demo.export")?;
    ensure!(typed.take("db-4$ systemctl stop muster-agent".trim_start_matches("db-4$ "))? != "");
    ensure!(cluster.agents[2].terminate(LIMIT)? == 0);
    typed.run("openssl req -new")?;
    typed.run("muster-discovery ca issue --export demo.export")?;
    typed.run("cd db-4-certs")?;
    typed.run("statements.json peer.crt client.crt")?;
    typed.take("systemctl start muster-agent")?;
    cluster.agents[2].start()?;
    cluster.agents[2].wait_for_output("the certificates in", LIMIT)?;
    cluster.wait_members(3)?;
    typed.finish()
}
