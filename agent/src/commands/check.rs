//! `run --check`: tells whether a start would work, and changes nothing. It uses the steps of a
//! start, apart from those that write.

use std::net::SocketAddr;
use std::time::Duration;

use discovery_formation::Rules;
use discovery_formation::agent::{MAX_CLOCK_SKEW, StartDecision, decide_at_start};
use discovery_types::client::{ClientConfig, DiscoveryClient};
use discovery_types::url::{ServiceUrl, UrlHost};
use muster_checks::CheckReport;

use crate::backup::store::BackupStore;
use crate::cli;
use crate::cli::addressing::is_lost;
use crate::cli::settings::{BundleSource, RunSettings};
use crate::commands::adopt;
use crate::commands::printer::Printer;
use crate::commands::run::half_made_error;
use crate::enrol::bootstrap::record;
use crate::enrol::bundle::{cluster_to_join, read_bundle};
use crate::exit::{ExitError, error_chain};
use crate::host::Host;
use crate::host::local::LocalHost;
use crate::launch::node_command::detect_kind;
use crate::operate::addresses::{current_addresses, usable_addresses};
use crate::state::addresses::Addresses;
use crate::state::journal::{self, Join, JournalExtras, VerifiedJournal};
use crate::state::{Layout, lock, node_dir};

/// Time limit for the request to one URL of discovery.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(10);
/// Free space in bytes that a node must keep when it receives a snapshot from its leader. With
/// less, it can't catch up by a snapshot.
const MIN_FREE_BYTES: u64 = 256 << 20;
/// Free space in bytes below which a person is warned.
const LOW_FREE_BYTES: u64 = 1 << 30;

/// Checks the set-up, and prints what was found.
pub(crate) async fn run(
    typed: cli::RunArguments,
    printer: &mut Printer<'_>,
) -> Result<(), ExitError> {
    let json = typed.json;
    let own_program = super::run::own_program()?;
    let path = std::env::var_os("PATH");
    let settings = RunSettings::resolve(typed, &own_program, path.as_deref())?;
    let report = check(&settings).await;
    let document = report.document();
    let text = match json {
        true => serde_json::to_string_pretty(&document).expect("texts always serialise"),
        false => report.to_text().trim_end().to_owned(),
    };
    printer
        .line(&text)
        .map_err(|error| ExitError::Failed(format!("can't print the result: {error}")))?;
    match report.failures() {
        0 => Ok(()),
        failures => Err(ExitError::Failed(format!(
            "{failures} of {} checks failed: see the lines with FAIL",
            report.checks().len()
        ))),
    }
}

/// State of `run --check`: the report so far, and facts that several checks need.
struct SetupChecker<'a> {
    settings: &'a RunSettings,
    layout: Layout,
    host: LocalHost,
    report: CheckReport,
    /// Whether an agent or a node runs with this data directory.
    is_running: bool,
}

async fn check(settings: &RunSettings) -> CheckReport {
    let mut checker = SetupChecker {
        settings,
        layout: settings.layout.clone(),
        host: LocalHost { machine_id_file: settings.machine_id_file.clone() },
        report: CheckReport::default(),
        is_running: false,
    };
    checker.check_node_program().await;
    if !checker.check_data_directory() {
        return checker.report;
    }
    checker.check_locks();
    checker.check_backups().await;
    let Some(state) = checker.check_state() else { return checker.report };
    let join = checker.check_bundle(&state).await;
    checker.check_addresses(&state, join.as_ref()).await;
    if let Some(join) = &join {
        checker.check_discovery(join, state.is_member).await;
    }
    checker.report
}

/// The state on disk, as a start would find it.
struct DiskState {
    loaded: Option<VerifiedJournal>,
    /// Whether the node starts from its data, without discovery.
    is_member: bool,
    /// Whether a start needs a bundle.
    needs_bundle: bool,
}

impl SetupChecker<'_> {
    async fn check_node_program(&mut self) {
        let program = &self.settings.node_binary;
        match detect_kind(program).await {
            Ok(kind) => self.report.ok("node", format!("{} is {kind}", program.display())),
            Err(error) => {
                self.report.fail("node", error, "name another program with --node-binary");
            }
        }
    }

    /// Checks the data directory and its free space. Returns false if nothing in the directory can
    /// be read.
    fn check_data_directory(&mut self) -> bool {
        let root = self.layout.root().to_owned();
        match muster_files::inspect_data_folder(&root) {
            Ok(None) => {
                let text = format!("{} doesn't exist yet: the start makes it", root.display());
                self.report.ok("data-dir", text);
            }
            Ok(Some(folder)) => {
                match folder.exposure {
                    Some(exposure) => self.report.warn(
                        "data-dir",
                        format!("other users can delete or replace this host's state: {exposure}"),
                        "let the folder and those above it belong to this user alone",
                    ),
                    None => self.report.ok("data-dir", folder.path.display().to_string()),
                }
                self.layout = Layout::new(&folder.path).unwrap_or_else(|_| self.layout.clone());
            }
            Err(error) => {
                self.report.fail_with("data-dir", &error);
                return false;
            }
        }
        self.check_space(&root);
        true
    }

    fn check_space(&mut self, root: &std::path::Path) {
        let Ok(system) = rustix::fs::statvfs(muster_files::existing_ancestor(root)) else { return };
        let free = system.f_bavail.saturating_mul(system.f_frsize);
        let text = format!("{} MiB are free", free >> 20);
        let next = "free space or enlarge the volume: see docs/space.md";
        match free {
            free if free < MIN_FREE_BYTES => self.report.fail("space", text, next),
            free if free < LOW_FREE_BYTES => self.report.warn("space", text, next),
            _ => self.report.ok("space", text),
        }
    }

    /// Writes a small file to the store of backups, and deletes it.
    async fn check_backups(&mut self) {
        let Some(backup) = &self.settings.backup else { return };
        for warning in backup.warnings() {
            self.report.warn("backup", warning, "see docs/cluster-backups.md");
        }
        let next = "correct --backup-to and its credentials: see docs/cluster-backups.md";
        let probed = async { BackupStore::open(&backup.store).await?.probe().await };
        match probed.await {
            Ok(()) => {
                let text = format!("{} takes backups", backup.store);
                self.report.ok("backup", text);
            }
            Err(error) => self.report.fail("backup", error_chain(&error), next),
        }
    }

    /// Finds out whether an agent or a node runs with this data directory.
    fn check_locks(&mut self) {
        for (path, next) in [
            (self.layout.agent_lock(), "stop it before another agent is started here"),
            (self.layout.node_lock(), "ignore this: the agent adopts it"),
        ] {
            match lock::holder(&path) {
                Ok(None) => {}
                Ok(Some(holder)) => {
                    self.is_running = true;
                    self.report.warn(
                        "lock",
                        format!("{} is held by {holder}", path.display()),
                        next,
                    );
                }
                Err(error) => self.report.fail_with("lock", &error),
            }
        }
    }

    /// Reads the journal and the node's directory, and decides as a start does. Returns `None` if a
    /// start would end here.
    fn check_state(&mut self) -> Option<DiskState> {
        let (layout, node) = (&self.layout, self.layout.node());
        if node.join(node_dir::FORCING_FILE).exists() {
            self.report.fail_with("state", &half_made_error(&node));
            return None;
        }
        if let Err(end) = adopt::check_may_run(layout) {
            self.report.fail_with("state", &end);
            return None;
        }
        let machine = match self.host.facts() {
            Ok(machine) => machine,
            Err(error) => {
                let next = "name a readable file with --machine-id-file";
                self.report.fail("machine-id", error.to_string(), next);
                return None;
            }
        };
        let read = journal::read(layout).and_then(|found| Ok((found, layout.classify_node()?)));
        let (found, directory) = match read {
            Ok(read) => read,
            Err(error) => {
                self.report.fail_with("state", &error);
                return None;
            }
        };
        let loaded = found.map(|(_, loaded)| loaded);
        let journal = loaded.as_ref().map(VerifiedJournal::for_directory);
        let decision = decide_at_start(&Rules::ALL, journal.as_ref(), &machine, &directory);
        self.judge(&decision, loaded)
    }

    /// Reports what a start would decide. Returns `None` if a start would then neither run a node
    /// nor join a cluster.
    fn judge(
        &mut self,
        decision: &StartDecision,
        loaded: Option<VerifiedJournal>,
    ) -> Option<DiskState> {
        let has_record = loaded.as_ref().is_some_and(|loaded| loaded.journal.record.is_some());
        let mut state = DiskState { loaded, is_member: false, needs_bundle: !has_record };
        match decision {
            StartDecision::BeginNew => self.report.ok("state", "this host begins as a new one"),
            StartDecision::SetAsideAndBeginNew => {
                let next = "if this host is no clone, see --machine-id-file";
                let text = "the state was made on another machine: the start puts it aside";
                self.report.warn("state", text, next);
                (state.loaded, state.needs_bundle) = (None, true);
            }
            StartDecision::Resume => self.report.ok("state", "this host goes on where it was"),
            StartDecision::ResumeToLaunch | StartDecision::StartNode(_) => {
                (state.is_member, state.needs_bundle) = (true, false);
                self.report.ok("state", "this host is a member: the start runs its node");
            }
            StartDecision::RequestReplacement { why } => {
                let next =
                    "mount the volume, or replace this member: muster-agent reset, and a ticket";
                self.report.fail("state", format!("the node's data is lost: {why}"), next);
                return None;
            }
            StartDecision::Refuse { why } => {
                let next = "mount the volume, or move the data away if it is not wanted";
                self.report.fail("state", why.as_str(), next);
                return None;
            }
            StartDecision::Removed => {
                let text =
                    "this member was removed from its cluster: a start ends with exit code 3";
                let next = "muster-agent reset, and a join ticket, let this host come back";
                self.report.fail("state", text, next);
                return None;
            }
        }
        Some(state)
    }

    /// Reads the bundle, unless the node starts from its data and needs none. Returns the cluster
    /// that this host joins, or has joined.
    async fn check_bundle(&mut self, state: &DiskState) -> Option<Join> {
        let extras = state.loaded.as_ref().map(|loaded| loaded.extras.clone());
        let extras: JournalExtras = extras.unwrap_or_default();
        let bundle = match state.is_member {
            true => Ok(None),
            false => read_bundle(self.settings).await,
        };
        let bundle = match bundle {
            Ok(bundle) => bundle,
            Err(ExitError::NeedsTicket(why)) => {
                self.report.warn("bundle", why, "the start waits for a join ticket in this file");
                return None;
            }
            Err(error) if state.needs_bundle => {
                let next = "an admin makes a bundle with muster-discovery token create";
                self.report.fail("bundle", error.to_string(), next);
                return None;
            }
            Err(error) => {
                self.report.warn("bundle", error.to_string(), "the start goes on without it");
                None
            }
        };
        match cluster_to_join(&extras, bundle.as_ref()) {
            Ok(join) => {
                if bundle.is_some() {
                    let from = match &self.settings.bundle {
                        Some(BundleSource::File(path)) => path.display().to_string(),
                        Some(BundleSource::Stdin) | None => "standard input".to_owned(),
                    };
                    let text = format!("{from} is for the cluster {}", join.cluster);
                    self.report.ok("bundle", text);
                }
                Some(join)
            }
            Err(error) => {
                self.report.fail_with("bundle", &error);
                None
            }
        }
    }

    async fn check_addresses(&mut self, state: &DiskState, join: Option<&Join>) {
        match self.addresses(state, join).await {
            Ok(Some(addresses)) => {
                self.check_advertised(&addresses);
                let listen = addresses.listen;
                let own = usable_addresses(&self.host, &[listen.peer.ip(), listen.client.ip()]);
                for (check, at) in [("peer-port", listen.peer), ("client-port", listen.client)] {
                    if state.is_member && is_lost(at.ip(), &own) {
                        let text = format!("{at}: this host doesn't have the address now");
                        let next = "the start waits for it, or moves this member to another one";
                        self.report.warn(check, text, next);
                    } else {
                        self.check_bind(check, at);
                    }
                }
            }
            Ok(None) => {}
            Err(error) => self.report.fail_with("addresses", &error),
        }
        if let Some(at) = self.settings.metrics_listen {
            self.check_bind("metrics-listen", at);
        }
    }

    /// Returns the addresses at which a start would listen and be reached. A member's addresses are
    /// in its journal. Otherwise they follow from the flags, or from the route to discovery.
    /// Returns `None` if the route is needed, but the cluster to join isn't known.
    async fn addresses(
        &self,
        state: &DiskState,
        join: Option<&Join>,
    ) -> Result<Option<Addresses>, ExitError> {
        let own = self.host.addresses();
        if let Some(loaded) = state.loaded.as_ref().filter(|_| state.is_member) {
            return current_addresses(loaded, self.settings, &own).map(Some);
        }
        let addressing = &self.settings.addressing;
        if addressing.is_complete() {
            return addressing.addresses(None, &own).map(Some);
        }
        let Some(join) = join else { return Ok(None) };
        let route = record::local_address(&self.host, &join.urls).await.map_err(|error| {
            ExitError::Failed(format!("{error}: give --advertise-address, or correct the route"))
        })?;
        addressing.addresses(Some(route), &own).map(Some)
    }

    fn check_advertised(&mut self, addresses: &Addresses) {
        let own = self.host.addresses();
        for url in [&addresses.peer_url, &addresses.client_url] {
            match url.host() {
                UrlHost::Address(address) if !address.is_loopback() && !own.contains(address) => {
                    let text = format!("{url}: this host doesn't have the address");
                    let next = "ignore this behind NAT; otherwise correct --advertise-address";
                    self.report.warn("addresses", text, next);
                }
                UrlHost::Address(_) | UrlHost::Dns(_) => {
                    let text = format!(
                        "this host advertises {url}; whether others reach it isn't checked"
                    );
                    self.report.ok("addresses", text);
                }
            }
        }
    }

    /// Checks that a program can listen on the address, by listening for a moment.
    fn check_bind(&mut self, check: &'static str, at: SocketAddr) {
        match self.host.test_bind(at) {
            Ok(()) => self.report.ok(check, format!("{at} is free")),
            Err(error) if self.is_running => self.report.warn(
                check,
                format!("{at}: {error}"),
                "ignore this if this host's own agent or node listens there",
            ),
            Err(error) => self.report.fail(
                check,
                format!("can't listen on {at}: {error}"),
                "end the program that listens there, or give another address or port",
            ),
        }
    }

    /// Requests the service's public context from each URL of discovery. For a member, a silent
    /// discovery is only a warning, because its node starts without discovery.
    async fn check_discovery(&mut self, join: &Join, is_member: bool) {
        for url in &join.urls {
            match ask(url, join).await {
                Ok(offset_ms) => {
                    self.report.ok("discovery", format!("{url} answers, and has a pinned key"));
                    check_clock(&mut self.report, url, offset_ms);
                }
                Err(error) => {
                    let text = format!("{url}: {error}");
                    let next = "check the network path, and whether the service runs or has moved";
                    match is_member {
                        true => self.report.warn("discovery", text, next),
                        false => self.report.fail("discovery", text, next),
                    }
                }
            }
        }
    }
}

fn check_clock(report: &mut CheckReport, url: &ServiceUrl, offset_ms: i64) {
    let limit = MAX_CLOCK_SKEW.0;
    let text = format!(
        "the clock of {url} differs from this host's by {offset_ms:+} ms (positive: it is ahead)"
    );
    if offset_ms.unsigned_abs() > limit {
        let next = "set this host's clock (chronyc tracking, timedatectl)";
        return report.fail("clock", format!("{text}; at most {limit} ms are allowed"), next);
    }
    report.ok("clock", text);
}

/// Makes one request to a URL of discovery. Returns how far the service's clock is ahead of this
/// host's, in milliseconds.
async fn ask(url: &ServiceUrl, join: &Join) -> Result<i64, String> {
    let config = ClientConfig { urls: vec![url.clone()], pins: join.pins.clone(), key: None };
    let client = DiscoveryClient::new(config).map_err(|error| error.with_causes())?;
    let asked = tokio::time::timeout(DISCOVERY_TIMEOUT, client.context()).await;
    let late = || format!("no answer within {} s", DISCOVERY_TIMEOUT.as_secs());
    asked.map_err(|_| late())?.map_err(|error| error.with_causes())?;
    Ok(client.clock_offset_ms())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_differs_too_much_fails_in_both_directions() {
        let url = "https://192.0.2.1:8443".parse().unwrap();
        for (offset_ms, failures) in [(0, 0), (29_999, 0), (-30_000, 0), (30_001, 1), (-30_001, 1)]
        {
            let mut report = CheckReport::default();
            check_clock(&mut report, &url, offset_ms);
            assert_eq!(report.failures(), failures, "{offset_ms}: {}", report.to_text());
        }
    }
}
