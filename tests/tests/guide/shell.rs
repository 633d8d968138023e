//! A shell for transcripts, in which an operator manages a cluster of one program.
//!
//! A line that begins with `>` is typed. It uses the guide's own addresses, which are replaced by
//! loopback ones. `$infra0` stands for the id of that member, which is random. A typed line with
//! the tag `[retried]` is repeated while the answer says that it is too early. The other commands
//! are events on machines; see `Shell::apply_event`.

use std::collections::BTreeMap;
use std::error::Error;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::Command as Process;
use std::time::Duration;

use goldenscript::{Command, Context, Runner};
use muster_tests::harness::{Network, NodeProcess, TestHost, nodes, poll_slowly};

use crate::texts;

type BoxedError = Box<dyn Error>;

/// Time limit of each wait; a test that passes waits much less.
const LIMIT: Duration = Duration::from_secs(60);
/// Pause between additions. etcd derives ids from URLs and the time in seconds, so additions within
/// one second get the same id.
const ADDITION_PAUSE: Duration = Duration::from_millis(1_100);
/// Exit code of a Go program that panics.
const PANIC_EXIT_CODE: i32 = 2;

/// An operator's shell, and the machines that it controls.
pub(crate) struct Shell {
    program: PathBuf,
    folder: tempfile::TempDir,
    network: Network,
    nodes: BTreeMap<String, NodeProcess>,
    exports: BTreeMap<String, String>,
    /// Ids and the names that replace them in transcripts, newest first.
    ids: Vec<(String, String)>,
}

impl Shell {
    pub(crate) fn new(program: PathBuf) -> Result<Self, BoxedError> {
        let folder = tempfile::tempdir()?;
        Ok(Self {
            program,
            folder,
            network: Network::loopback(0),
            nodes: BTreeMap::new(),
            exports: BTreeMap::new(),
            ids: Vec::new(),
        })
    }

    /// Returns the host of `infraN`, whose address ends in 1N.
    fn host(&self, name: &str) -> Result<TestHost, BoxedError> {
        let number: u8 = name.strip_prefix("infra").ok_or("hosts are called infraN")?.parse()?;
        let IpAddr::V4(hub) = self.network.hub.address else { return Err("IPv4 only".into()) };
        let [a, b, c, _] = hub.octets();
        let address = IpAddr::V4(Ipv4Addr::new(a, b, c, 10 + number));
        let mut host = self.network.hub.clone();
        (host.name, host.address) = (name.to_owned(), address);
        Ok(host)
    }

    /// Returns the prefix that all addresses share, such as `127.2.0.`.
    fn net(&self) -> String {
        let hub = self.network.hub.address.to_string();
        hub.trim_end_matches(|c| c != '.').to_owned()
    }

    /// Replaces the guide's addresses and names by real addresses and ids.
    fn to_real_names(&self, text: &str) -> String {
        let mut text = text.replace("10.0.1.", &self.net());
        for (id, name) in &self.ids {
            text = text.replace(name, id);
        }
        text
    }

    /// Replaces real addresses and ids by the guide's addresses and names.
    fn to_guide_names(&self, text: &str) -> String {
        let mut text = text.replace(&self.net(), "10.0.1.");
        for (id, name) in &self.ids {
            text = text.replace(id, name);
        }
        text.replace(&self.folder.path().display().to_string(), "/var/lib")
    }

    fn etcdctl(&self, args: &[String]) -> Result<std::process::Output, BoxedError> {
        let mut command = Process::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(args);
        // etcdctl's default timeout is shorter than the server's. With it, the outcome of a change
        // could stay unknown.
        if !args.iter().any(|arg| arg.starts_with("--command-timeout")) {
            command.arg("--command-timeout=30s");
        }
        // Set the variable only if there is no flag `--endpoints`, because etcdctl refuses both
        // together.
        if !args.iter().any(|arg| arg.starts_with("--endpoints")) {
            command.env("ETCDCTL_ENDPOINTS", self.to_real_names("http://10.0.1.10:2379"));
        }
        Ok(command.output()?)
    }

    /// Records the ids of the cluster and its members.
    fn record_ids(&mut self) -> Result<(), BoxedError> {
        let args = ["member", "list", "-w", "json"].map(str::to_owned);
        let list = self.etcdctl(&args)?;
        let Ok(list) = serde_json::from_slice::<serde_json::Value>(&list.stdout) else {
            return Ok(());
        };
        let mut learned = vec![(list["header"]["cluster_id"].as_u64(), "$cluster".to_owned())];
        for member in list["members"].as_array().into_iter().flatten() {
            // A member is identified by its name, because it may have moved. A member that has not
            // started has no name, and is identified by its address.
            let name = match member["name"].as_str() {
                Some(name) => name.to_owned(),
                None => {
                    let url =
                        self.to_guide_names(member["peerURLs"][0].as_str().unwrap_or_default());
                    let host = url.trim_start_matches("http://10.0.1.1").chars().next();
                    format!("infra{}", host.unwrap_or('?'))
                }
            };
            learned.push((member["ID"].as_u64(), format!("${name}")));
        }
        for (id, name) in learned {
            let id = format!("{:x}", id.ok_or("an id")?);
            if !self.ids.iter().any(|(known, _)| *known == id) {
                self.ids.insert(0, (id, name));
            }
        }
        Ok(())
    }

    /// Runs a typed line, and returns its output.
    fn typed(&mut self, line: &str, retried: bool) -> Result<String, BoxedError> {
        let line = self.to_real_names(line);
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let (program, args) = words.split_first().ok_or("an empty line")?;
        match program.as_str() {
            "export" => {
                let (name, value) = args.first().and_then(|a| a.split_once('=')).ok_or("X=y")?;
                self.exports.insert(name.to_owned(), value.trim_matches('"').to_owned());
                Ok(String::new())
            }
            "etcd" => self.start(args),
            "etcdctl" => {
                if args.iter().any(|word| word == "add") {
                    std::thread::sleep(ADDITION_PAUSE);
                }
                let printed = poll_slowly("an answer that is no temporary refusal", LIMIT, || {
                    let printed = self.etcdctl(args).ok()?;
                    (!retried || !texts::is_retryable(&String::from_utf8_lossy(&printed.stderr)))
                        .then_some(printed)
                })?;
                self.record_ids()?;
                let text = [printed.stdout, printed.stderr].concat();
                let text = self.to_guide_names(&String::from_utf8_lossy(&text));
                Ok(texts::normalize_output(&text, printed.status.code()))
            }
            other => Err(format!("there is no {other} here").into()),
        }
    }

    /// Returns the name of the member that these flags and the exported variables start.
    fn started_name(&self, args: &[String]) -> Option<String> {
        let flag = args.iter().position(|arg| arg == "--name").and_then(|at| args.get(at + 1));
        flag.or_else(|| self.exports.get("ETCD_NAME")).cloned()
    }

    /// Starts a member, and waits until it serves or has ended.
    fn start(&mut self, args: &[String]) -> Result<String, BoxedError> {
        let name = self.started_name(args).ok_or("which member?")?;
        let mut node =
            NodeProcess::new(&self.host(&name)?, &name, &self.program, self.folder.path());
        if self.is_etcd() {
            // etcd 3.4 logs plain text by default; the JSON of zap can be parsed.
            node.flags.push("--logger=zap".to_owned());
        }
        node.flags.extend_from_slice(args);
        node.env = self.exports.clone().into_iter().collect();
        self.nodes.remove(&name);
        node.start()?;
        let served = node.wait_ready(LIMIT).is_ok();
        let printed = if served {
            self.record_ids()?;
            "ready to serve client requests".to_owned()
        } else {
            let code = node.exit_code(LIMIT)?;
            let why = self.to_guide_names(&texts::last_error(&node.output()));
            match code {
                // etcd has panicked. Leave its last error message out, because it depends on
                // timing.
                PANIC_EXIT_CODE if self.is_etcd() => texts::normalize_output("", Some(code)),
                // A removed etcd exits with 0 or 1, depending on timing. So leave the code out.
                _ if self.is_etcd() && why.contains("permanently removed") => {
                    texts::normalize_output(&why, None)
                }
                _ => texts::normalize_output(&why, Some(code)),
            }
        };
        self.nodes.insert(name, node);
        Ok(printed)
    }

    fn node(&mut self, name: &str) -> Result<&mut NodeProcess, BoxedError> {
        Ok(self.nodes.get_mut(name).ok_or("no such machine")?)
    }

    /// Makes an event happen on a machine.
    fn apply_event(&mut self, what: &str, args: &[&str]) -> Result<String, BoxedError> {
        match (what, args) {
            // `cluster NAME...`: starts a new cluster of these members.
            ("cluster", names) => self.start_cluster(names),
            // `stop NAME`: ends a member with SIGTERM, as an init system would.
            ("stop", [name]) => {
                self.node(name)?.stop(LIMIT)?;
                Ok(String::new())
            }
            // `loses NAME`: kills a member and deletes its data.
            ("loses", [name]) => {
                self.nodes.remove(*name);
                fs_err::remove_dir_all(self.folder.path().join(name))?;
                Ok(String::new())
            }
            // `ends NAME`: waits until a member's process ends, without a signal. The last messages
            // of etcd depend on timing, so they are left out.
            ("ends", [name]) => {
                let etcd = self.is_etcd();
                let node = self.node(name)?;
                let code = node.exit_code(LIMIT)?;
                let printed = if etcd { String::new() } else { texts::last_error(&node.output()) };
                Ok(format!("{printed}\nexit {code}").trim_start().to_owned())
            }
            // `listed TEXT`: waits until the member list contains the text.
            ("listed", [text]) => {
                let text = self.to_real_names(text);
                let list = ["member", "list"].map(str::to_owned);
                poll_slowly("the member list to contain the text", LIMIT, || {
                    let printed = self.etcdctl(&list).ok()?;
                    String::from_utf8_lossy(&printed.stdout).contains(&text).then_some(())
                })?;
                self.record_ids()?;
                Ok(String::new())
            }
            _ => Err(format!("{what} doesn't happen").into()),
        }
    }

    fn start_cluster(&mut self, names: &[&str]) -> Result<String, BoxedError> {
        let mut initial = Vec::new();
        for name in names {
            initial.push(format!("{name}={}", nodes::peer_url(&self.host(name)?)));
        }
        for name in names {
            let host = self.host(name)?;
            let mut node = NodeProcess::new(&host, name, &self.program, self.folder.path());
            node.flags.push(format!("--name={name}"));
            node.flags.push(format!("--initial-cluster={}", initial.join(",")));
            node.start()?;
            self.nodes.insert((*name).to_owned(), node);
        }
        for name in names {
            self.node(name)?.wait_ready(LIMIT)?;
        }
        for name in names {
            self.apply_event("listed", &[&format!(" {name}, ")])?;
        }
        self.lead(names)
    }

    /// Moves leadership to the first member, so that the duration of a membership change doesn't
    /// depend on chance.
    fn lead(&mut self, names: &[&str]) -> Result<String, BoxedError> {
        let hosts: Result<Vec<TestHost>, BoxedError> =
            names.iter().map(|name| self.host(name)).collect();
        let endpoints: Vec<String> = hosts?.iter().map(nodes::client_url).collect();
        let leads = |endpoint: &str| {
            let args = ["endpoint", "status", "-w", "json", "--endpoints", endpoint];
            let printed = self.etcdctl(&args.map(str::to_owned)).ok()?;
            let status: serde_json::Value = serde_json::from_slice(&printed.stdout).ok()?;
            let status = &status[0]["Status"];
            (status["leader"] == status["header"]["member_id"]).then_some(())
        };
        let first = self.to_real_names(&format!("${}", names[0]));
        poll_slowly("the first member to lead", LIMIT, || {
            if let Some(leader) = endpoints.iter().find(|endpoint| leads(endpoint).is_some()) {
                let args = ["move-leader", &first, "--endpoints", leader].map(str::to_owned);
                self.etcdctl(&args).ok()?;
            }
            leads(&endpoints[0])
        })?;
        Ok(String::new())
    }

    fn is_etcd(&self) -> bool {
        self.program.ends_with("etcd")
    }
}

impl Runner for Shell {
    type Command = Command;

    fn run(&mut self, command: &Command, context: &Context) -> Result<String, BoxedError> {
        // goldenscript parses a typed line as the name of a command, however many words it has.
        if command.name.contains(' ') {
            return self.typed(&command.name, context.tags.contains("retried"));
        }
        let mut consumed = command.consume_args();
        let mut args = Vec::new();
        while let Some(arg) = consumed.next_pos() {
            args.push(arg);
        }
        consumed.reject_next()?;
        self.apply_event(&command.name, &args)
    }
}
