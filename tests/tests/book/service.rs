//! The pages about the discovery service: forming a cluster, backups, and changes of URL and keys.

use super::*;

/// A service that runs by the commands of a page, in the folder of that page.
struct TypedService {
    typed: Typist,
    agents: Vec<AgentProcess>,
    testbed: Testbed,
}

/// Arguments of `serve` that the page doesn't have, because other tests run beside this one.
fn serve_args(testbed: &Testbed, port: u16) -> String {
    let at = testbed.network.hub.at_port(port);
    format!("--listen {at} --rate 1000 --lease 6s --prepare 6s --sweep 1s --poll 2s")
}

impl TypedService {
    /// Opens a page on the machines of a service, of its admin, and of four hosts. Nothing runs
    /// yet.
    fn open(page: &str) -> Result<Self> {
        let testbed = Testbed::prepare(Network::loopback(4), TestbedOptions::default())?;
        let folder = testbed.path("typed");
        let mut typed = Typist::open(page, &[], &folder)?;
        // An unprivileged Postgres must be able to reach its socket in this folder.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs_err::set_permissions(&folder, mode)?;
        let (hub, home) = (testbed.network.hub.clone(), testbed.path("typed-admin"));
        for machine in ["admin", "service", "disco", ""] {
            typed.machine(machine, &hub, &[("MUSTER_ADMIN_HOME", &home)]);
        }
        for (n, host) in (1..).zip(&testbed.network.hosts) {
            let data = testbed.path(&host.name);
            typed.machine(&format!("db-{n}"), host, &[("MUSTER_DATA_DIR", &data)]);
        }
        Ok(Self { typed, agents: Vec::new(), testbed })
    }

    /// Makes owner, keys and service as docs/forming.md does, and forms a cluster of one.
    fn form(page: &str) -> Result<Self> {
        let mut service = Self::open(page)?;
        let url = format!("https://{}", service.testbed.network.hub.at_port(8443));
        let typed = &mut service.typed;
        typed.type_line("", "muster-discovery key new --out owner.pem")?;
        let init = format!(
            "muster-discovery init --owner \"$(cat owner.pub)\" --dir keys --url {url} > context"
        );
        typed.type_line("", &init)?;
        typed.type_line("", "muster-discovery context add context")?;
        for machine in ["admin", ""] {
            let key = typed.path("owner.pem");
            typed.set(machine, "MUSTER_ADMIN_KEY", path_text(&key)?)?;
        }
        service.serve("--keys keys --ledger ledger --managed-postgres pg", 8443)?;
        let create = "muster-discovery cluster create demo --size 1 --allow-loopback";
        service.typed.type_line("", create)?;
        let token = "muster-discovery token create --cluster demo --uses 1 --out h1.bundle";
        service.typed.type_line("", token)?;
        service.start_agent("muster-agent run --bundle-file h1.bundle --name db-1")?;
        service.typed.type_line("", "muster-discovery cluster wait demo --timeout 90s")?;
        Ok(service)
    }

    /// Starts the service by a command that isn't on the page, and waits until it answers.
    fn serve(&mut self, args: &str, port: u16) -> Result<()> {
        let more = serve_args(&self.testbed, port);
        let line = format!("muster-discovery serve {args} {more}");
        self.typed.start_line("", &line, "listening")?;
        self.wait_ready()
    }

    /// Starts the service by the page's next command.
    fn serve_as_written(&mut self, part: &str) -> Result<()> {
        let more = format!("serve {}", serve_args(&self.testbed, 8443));
        self.typed.start(part, &[("serve", &more)], "listening")?;
        self.wait_ready()
    }

    fn wait_ready(&self) -> Result<()> {
        poll_slowly("the service to answer", LIMIT, || {
            self.typed.type_line("", "muster-discovery cluster list").ok()
        })
        .map(drop)
    }

    /// Starts an agent by a command line. The harness adds data directory and address.
    fn start_agent(&mut self, line: &str) -> Result<()> {
        let bundle = self.typed.path(flag_value(line, "--bundle-file")?);
        let name = flag_value(line, "--name")?;
        let args = vec!["--name".to_owned(), name.to_owned()];
        let options = AgentOptions { args, ..AgentOptions::default() };
        let mut agent = self.testbed.agent_with(self.agents.len(), &bundle, options);
        agent.start()?;
        self.agents.push(agent);
        Ok(())
    }
}

#[test]
fn forming() -> Result<()> {
    let mut service = TypedService::open("docs/forming.md")?;
    let hosts = service.testbed.network.hosts.clone();
    let url = format!("https://{}", service.testbed.network.hub.at_port(8443));
    service.typed.replace("https://disco.example.org:8443", url);
    service.typed.replace("https://10.0.0.1:2379", format!("https://{}", hosts[0].at_port(2379)));
    service.typed.run("key new --out owner.pem")?;
    service.typed.run("init --owner")?;
    let more = format!("serve {}", serve_args(&service.testbed, 8443));
    service.typed.start("serve --keys keys", &[("serve", &more)], "listening")?;
    service.typed.run("context add context")?;
    service.typed.run("export MUSTER_ADMIN_KEY=owner.pem")?;
    service.typed.retry("cluster list")?;
    service.typed.type_line("admin", "muster-discovery key new --out alice.pem")?;
    service.typed.run("admin add alice alice.pub --role operator,issuer")?;
    // All hosts of this test are one machine.
    let shared = [("--size 3", "--size 3 --allow-loopback --allow-shared-host")];
    service.typed.run_with("cluster create demo --size 3", &shared)?;
    service
        .typed
        .skip("create demo --size 3 --approve", "another form of the last one: approvals.rs")?;
    service.typed.skip("cluster approve demo", "it asks a person: approvals.rs")?;
    service.typed.run("token create --cluster demo --uses 1 --out h1.bundle")?;
    for n in [2, 3] {
        let token = "muster-discovery token create --cluster demo --uses 1 --out";
        service.typed.type_line("admin", &format!("{token} h{n}.bundle"))?;
    }
    let first = service.typed.take("muster-agent run --bundle-file h1.bundle --name db-1")?;
    service.start_agent(&first)?;
    let explained = service.typed.run("cluster explain demo")?;
    ensure!(explained.contains("seat"), "{explained}");
    for n in [2, 3] {
        service.start_agent(
            &first.replace("h1", &format!("h{n}")).replace("db-1", &format!("db-{n}")),
        )?;
    }
    service.typed.run("cluster show demo")?;
    service.typed.run("muster-agent status --wait")?;
    service.typed.retry("cluster credentials demo --out creds")?;
    service.typed.run("export ETCDCTL_API=3")?;
    let listed = service.typed.retry("member list")?;
    ensure!(listed.lines().filter(|line| line.contains("started")).count() > 1, "{listed}");
    service.typed.run("cluster export demo --out demo.export")?;
    service.typed.finish()
}

/// The restores of the page follow one after the other. In the end the cluster's agent
/// works with the restored service.
#[test]
fn backup_of_the_service() -> Result<()> {
    let mut service = TypedService::form("docs/backup.md")?;
    let Some(recipient) = age_key(&service.typed)? else { return Ok(()) };
    service.typed.replace("age1…", &recipient);
    service.typed.run("backup-keys --keys keys")?;
    let tried = [("--keys keys", "--keys keys-tried")];
    let printed = service.typed.run_with("restore-keys --from", &tried)?;
    let shown = service.typed.type_line("", "muster-discovery context show")?;
    let pin = shown.split("pins=").nth(1).and_then(|rest| rest.split(' ').next());
    ensure!(printed.contains(pin.context("a pin")?), "{printed} {shown}");
    service.typed.run("backup --managed-postgres pg --ledger ledger --out backup-2026-07-01")?;

    service.typed.stop_last()?;
    service.typed.run("restore --from backup-2026-07-01")?;
    service.serve_as_written("serve --keys keys --managed-postgres pg-new --ledger ledger")?;
    service.typed.stop_last()?;

    // The service, its keys and its ledger are lost.
    for lost in ["keys", "pg", "ledger", "pg-new", "ledger-unused"] {
        fs_err::rename(service.typed.path(lost), service.typed.path(&format!("{lost}-lost")))?;
    }
    service.typed.run("restore-keys --from")?;
    service.typed.run("restore --from backup-2026-07-01")?;
    service.serve_as_written("serve --keys keys --managed-postgres pg-new --ledger ledger-new")?;
    service.typed.run("db accept --yes")?;
    let listed = service.typed.run("token list --cluster demo")?;
    ensure!(listed.contains("revoked"), "{listed}");
    service.typed.run("token confirm --all --cluster demo")?;
    poll_slowly("the agent to report to the restored service", LIMIT, || {
        let shown = service.typed.type_line("", "muster-discovery cluster show demo").ok()?;
        shown.lines().any(|line| line.contains("db-1") && line.contains("leader")).then_some(())
    })
    .with_context(|| last_lines(&service.agents[0].output(), 25))?;

    service.typed.replace("$PWD/pg", "$PWD/pg-new");
    if !rustix::process::geteuid().is_root() {
        // The managed Postgres runs as the user of this test then.
        service.typed.replace("runuser -u postgres -- ", "");
    }
    service.typed.run("psql --host")?;
    service.typed.stop_last()?;
    let installed = fs_err::read_dir("/usr/lib/postgresql")?;
    let version = installed.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).max();
    service.typed.replace("postgresql/15", format!("postgresql/{}", version.context("Postgres")?));
    service.typed.start("bin/postgres -D", &[], "ready to accept connections")?;
    service.typed.end_last()?;
    service.typed.finish()
}

/// Makes a key of age in the page's folder, as the page's files are called. Without age, records
/// that the test is skipped and returns `None`.
fn age_key(typed: &Typist) -> Result<Option<String>> {
    if typed.type_line("", "age-keygen -o age-identity.txt").is_err() {
        muster_tests::harness::skip::report_missing_program("age-keygen");
        return Ok(None);
    }
    let printed = typed.type_line("", "age-keygen -y age-identity.txt")?;
    Ok(Some(printed.trim().to_owned()))
}

/// The service moves to another port, is announced by file as well, and changes all of its keys.
#[test]
fn moves_and_keys_of_the_service() -> Result<()> {
    let mut service = TypedService::form("docs/service.md")?;
    let hub = service.testbed.network.hub.clone();
    let shown = service.typed.type_line("", "muster-discovery context show")?;
    let context = shown.lines().find(|line| line.starts_with("muster-context1 "));
    let context = context.with_context(|| shown.clone())?;
    let [old, new] = [8443, 9443].map(|port| format!("https://{}", hub.at_port(port)));
    let moved = context.replace(&old, &new);
    let written = "muster-context1 urls=https://new.example.org:8443 pins=… owners=…";
    service.typed.run_with("service announce --all --to", &[(written, &moved)])?;
    poll_slowly("the agent to have the statement", LIMIT, || {
        let status = service.typed.type_line("db-1", "muster-agent status").ok()?;
        (status.contains("service statement") && status.contains(&new)).then_some(())
    })?;
    service.typed.stop_last()?;
    let args = "--keys keys --ledger ledger --managed-postgres pg";
    let more = serve_args(&service.testbed, 9443);
    service.typed.start_line("", &format!("muster-discovery serve {args} {more}"), "listening")?;
    let replace = format!("muster-discovery context add '{moved}' --replace");
    service.typed.type_line("", &replace)?;
    service.wait_ready()?;

    service.typed.run("service announce demo --out demo.service")?;
    service.typed.run_on("db-1", "muster-agent context set demo.service")?;
    service.typed.run("keys rotate --keys keys --tls --out keys-new")?;
    service.typed.run("keys rotate --keys keys --signing --kek")?;
    service.typed.stop_last()?;
    service.serve("--keys keys --ledger ledger --managed-postgres pg", 9443)?;
    // Without a terminal nobody can be asked.
    service.typed.run_with("keys rewrap --keys keys", &[("rewrap", "rewrap --yes")])?;
    let shown = service.typed.run("admin add safe --recovery")?;
    ensure!(shown.contains("safe"), "{shown}");
    service.typed.run("cluster restate --all")?;
    service.typed.finish()
}
