//! `release`: ends the agent's management of this host's member. The node continues without an
//! agent, under a unit of its own.
//!
//! The node keeps its present command line. Only paths of the agent's files change: the files are
//! copied to a folder that no agent uses. An interrupted release begins anew, because the agent may
//! have changed its files or the node's command line meanwhile. Once the host is marked as
//! released, no agent runs, and a repeated command continues.

mod plan;

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use discovery_types::api::{RELEASED, Session, TroubleRequest};
use discovery_types::digest::{Digest, Nonce};
use discovery_types::statement::StatementChain;
use muster_files::data::OpenMode;
use serde_json::json;

use self::plan::ReleasePlan;
use super::host::{claim, endpoint_error, lock_agent};
use super::take_over::{move_leadership_away, print_command_on_failure};
use super::{note, print, wait_until, wait_until_all_in_sync};
use crate::adopt::process::{command_line, program_of};
use crate::adopt::{record, systemd};
use crate::cli::ReleaseArguments;
use crate::cluster::{ClusterApiClient, MemberId};
use crate::commands::printer::Printer;
use crate::endpoint::{ClientEndpoint, ClientTlsIdentity};
use crate::exit::{ExitError, error_chain};
use crate::launch::process::ProcessIdentity;
use crate::operate::service::make_client;
use crate::state::lock::{self, FileLock};
use crate::state::{self, Layout, StateError, journal, state_exit_error};

/// Folder of the units that an administrator makes.
const UNIT_FOLDER: &str = "/etc/systemd/system";
/// Name of the unit file, if no unit was named.
const DEFAULT_UNIT: &str = "etcd.service";
/// Name of the plan's file in the `--out` folder. A repeated run reads the last plan from it. So it
/// knows whether the unit file that it finds was written by the last run.
const PLAN_FILE: &str = "release.json";
/// Mode of the `--out` folder if this command makes it: other users may only pass through. The node
/// may run as another user than this command.
const OUT_MODE: u32 = 0o711;
/// Mode bit of a folder that lets all users pass through it.
const PASSABLE_BY_ALL: u32 = 0o001;
/// Largest file that is copied, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// How long all members may take to be in sync before a release begins.
const IN_SYNC_LIMIT: Duration = Duration::from_secs(30);

/// Time limit of the report to discovery. After it, the release continues without the report.
const DISCOVERY_DEADLINE: Duration = Duration::from_secs(5);

/// Runs the command `release`.
pub(crate) async fn run(
    typed: &ReleaseArguments,
    printer: &mut Printer<'_>,
) -> Result<(), ExitError> {
    let layout = claim(&typed.data_dir.data_dir)?;
    let out = open_out(&typed.out)?;
    let release = NodeRelease { typed, layout, out, patience: Duration::from_secs(typed.patience) };
    let plan = match release.read_released_plan()? {
        Some(plan) => plan,
        None => release.end_management().await?,
    };
    let (cluster, id) = (release.cluster()?, plan.id()?);
    release.start(&plan).await?;
    release.wait(&cluster, id).await?;
    record::release(&cluster, release.list()?, id).await?;
    let unit = release.unit_file();
    let text = if typed.json {
        json!({ "member": plan.member, "name": plan.name, "unit_file": unit, "command": plan.command })
            .to_string()
    } else {
        format!(
            "{} runs without an agent. Its unit file is {}. Go on with the next host; after the last one \
             an owner can say muster-discovery cluster retire.",
            plan.name,
            unit.display()
        )
    };
    print(printer, &text)
}

/// Opens the folder for the node's files, and makes it if it is missing. Refuses a folder that
/// other users may change: keys are written there, and root later runs the unit file that lies
/// there. Returns the folder's absolute path without links.
fn open_out(path: &Path) -> Result<PathBuf, ExitError> {
    let is_there = muster_files::inspect_own_folder(path).map_err(failed)?;
    let folder = muster_files::open_own_folder(path).map_err(failed)?;
    if !is_there {
        folder.set_permissions(Permissions::from_mode(OUT_MODE)).map_err(failed)?;
    }
    path.canonicalize().map_err(failed)
}

/// Returns the program of a process. If this user may not read the program's path, returns the path
/// by which the process was called. The kernel hides the path if the process is in another user
/// namespace, for example if the agent's unit has `PrivateUsers=`.
fn program_or_name(program: io::Result<PathBuf>, arguments: &[String]) -> io::Result<PathBuf> {
    program.or_else(|error| {
        let name = arguments.first().map(PathBuf::from);
        let is_usable = |path: &PathBuf| path.is_absolute() && path.is_file();
        let is_hidden = error.kind() == io::ErrorKind::PermissionDenied;
        name.filter(|path| is_hidden && is_usable(path)).ok_or(error)
    })
}

/// Fails if members other than `own` are not taken over.
fn refuse_others(not_taken_over: &[(MemberId, &str)], own: MemberId) -> Result<(), ExitError> {
    let others = not_taken_over.iter().filter(|(id, _)| *id != own);
    let names: Vec<&str> = others.map(|(_, name)| *name).collect();
    if names.is_empty() {
        return Ok(());
    }
    Err(ExitError::Failed(format!(
        "not taken over yet, so they refuse this agent's requests: {}. Take them over first, or \
         give this host's etcd back instead: stop the agent, and say muster-agent adopt take-over \
         --give-back",
        names.join(", ")
    )))
}

fn failed(error: impl std::error::Error) -> ExitError {
    ExitError::Failed(error_chain(&error))
}

struct NodeRelease<'a> {
    typed: &'a ReleaseArguments,
    layout: Layout,
    out: PathBuf,
    patience: Duration,
}

/// How the node runs now, and the plan for its release.
struct RunningNode {
    plan: ReleasePlan,
    /// Arguments of the running node, without the program. They name the agent's own files, not the
    /// copies.
    arguments: Vec<String>,
}

impl NodeRelease<'_> {
    /// Returns the plan by which this host was released; `None` if it isn't released yet.
    fn read_released_plan(&self) -> Result<Option<ReleasePlan>, ExitError> {
        let path = self.layout.released_file();
        let Some(bytes) = state::read(&path).map_err(state_exit_error)? else { return Ok(None) };
        serde_json::from_slice(&bytes).map(Some).map_err(|error| {
            state_exit_error(StateError::Damaged { path, what: error.to_string() })
        })
    }

    /// Returns the plan of the last run with this `--out` folder.
    fn read_last_plan(&self) -> Result<Option<ReleasePlan>, ExitError> {
        let path = self.out.join(PLAN_FILE);
        let Some(bytes) = state::read(&path).map_err(state_exit_error)? else { return Ok(None) };
        let plan: ReleasePlan = serde_json::from_slice(&bytes).map_err(|error| {
            ExitError::Usage(format!("{}: {error}: say an empty folder with --out", path.display()))
        })?;
        Ok(Some(plan))
    }

    /// Makes the plan from the running node, and copies the agent's files.
    async fn inspect_node(&self) -> Result<RunningNode, ExitError> {
        let no_node = || {
            ExitError::Failed(format!(
                "no node runs under {}: start its agent first, so that this command sees how the node \
                 runs",
                self.layout.root().display()
            ))
        };
        if lock::holder(&self.layout.node_lock()).map_err(state_exit_error)?.is_none() {
            return Err(no_node());
        }
        let bytes = state::read(&self.layout.pid_file()).map_err(state_exit_error)?;
        let text = bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let process = text.and_then(|text| ProcessIdentity::from_text(&text));
        let process = process.ok_or_else(no_node)?;
        let pid = process.pid.unsigned_abs();
        let words = command_line(pid).map_err(failed)?;
        let program = program_or_name(program_of(pid), &words).map_err(failed)?;
        let arguments = words.get(1..).unwrap_or_default().to_vec();
        let client = self.own()?;
        // Wait for a leader: the release of another member may just have restarted the leader's
        // node.
        wait_until(IN_SYNC_LIMIT, self.typed.json, async || match client.list_members().await {
            Ok(_) => Ok(None),
            Err(error) if error.is_retryable() => Ok(Some(error_chain(&error))),
            Err(error) => Err(error.into()),
        })
        .await?;
        let status = client.status().await?;
        let members = client.list_members().await?;
        let own = members.of_id(status.member_id).ok_or_else(no_node)?;
        let data = std::fs::metadata(self.layout.node()).map_err(failed)?;
        let owner = (data.uid(), data.gid());
        let mut command = vec![program.display().to_string()];
        command.extend(self.copy_named_files(&arguments, owner)?);
        let plan = ReleasePlan {
            version: 1,
            member: status.member_id.to_string(),
            name: own.name.clone(),
            command,
            owner,
        };
        Ok(RunningNode { plan, arguments })
    }

    fn write_plan(&self, plan: &ReleasePlan) -> Result<(), ExitError> {
        let text = serde_json::to_vec_pretty(plan).expect("plain structs always serialise");
        muster_files::data::replace(&self.out.join(PLAN_FILE), &text).map_err(failed)
    }

    /// Copies all files of the agent that the arguments name. Returns the arguments with the paths
    /// of the copies.
    fn copy_named_files(
        &self,
        arguments: &[String],
        owner: (u32, u32),
    ) -> Result<Vec<String>, ExitError> {
        arguments.iter().map(|argument| self.copy_named_file(argument, owner)).collect()
    }

    /// Copies a file of the agent that an argument names. Returns the argument with the copy's
    /// path.
    fn copy_named_file(&self, argument: &str, owner: (u32, u32)) -> Result<String, ExitError> {
        let (flag, value) = match argument.split_once('=') {
            Some((flag, value)) if flag.starts_with('-') => (format!("{flag}="), value),
            _ => (String::new(), argument),
        };
        let path = Path::new(value);
        let (true, Some(name)) = (path.starts_with(self.layout.agent()), path.file_name()) else {
            return Ok(argument.to_owned());
        };
        let bytes = muster_files::read_named(path, MAX_FILE_BYTES).map_err(failed)?;
        let copy = self.out.join(name);
        muster_files::data::replace(&copy, &zeroize::Zeroizing::new(bytes)).map_err(failed)?;
        self.chown_to_node_user(&copy, owner)?;
        Ok(format!("{flag}{}", copy.display()))
    }

    /// Gives a copied file to the node's user and group, unless that user owns the file. The folder
    /// keeps its owner, because others may use the folder. Fails if the node's user can't pass
    /// through it.
    fn chown_to_node_user(&self, path: &Path, (user, group): (u32, u32)) -> Result<(), ExitError> {
        let file = muster_files::data::open(path, OpenMode::Read).map_err(failed)?;
        if file.metadata().map_err(failed)?.uid() == user {
            return Ok(());
        }
        let folder = std::fs::metadata(&self.out).map_err(failed)?;
        if folder.mode() & PASSABLE_BY_ALL == 0 {
            return Err(ExitError::Usage(format!(
                "the node runs as user {user}, who can't reach files in {}: chmod a+x it, or say \
                 another folder with --out",
                self.out.display()
            )));
        }
        std::os::unix::fs::fchown(&file, Some(user), Some(group)).map_err(failed)
    }

    /// Returns the hash of the signed list of members.
    fn list(&self) -> Result<Digest, ExitError> {
        let loaded = journal::read(&self.layout).map_err(state_exit_error)?;
        let document = loaded.and_then(|(_, loaded)| loaded.document);
        document.map(|document| document.hash()).ok_or_else(|| {
            ExitError::Usage(format!("{}: no member is here", self.layout.root().display()))
        })
    }

    /// Returns a client of this host's own node.
    fn own(&self) -> Result<ClusterApiClient, ExitError> {
        let loaded = journal::read(&self.layout).map_err(state_exit_error)?;
        let extras = loaded.map(|(_, loaded)| loaded.extras).unwrap_or_default();
        let listen = extras.current_listen().ok_or_else(|| {
            ExitError::Usage(format!("{}: no member is here", self.layout.root().display()))
        })?;
        let endpoint = ClientEndpoint::own_node(&self.layout.tls(), listen.client);
        Ok(ClusterApiClient::new(vec![endpoint.map_err(endpoint_error)?]))
    }

    /// Returns a client that asks the members in the journal, this host's own first.
    fn cluster(&self) -> Result<ClusterApiClient, ExitError> {
        let loaded = journal::read(&self.layout).map_err(state_exit_error)?;
        let identity = ClientTlsIdentity::load_own(&self.layout.tls()).map_err(endpoint_error)?;
        let urls = loaded.iter().flat_map(|(_, loaded)| loaded.client_urls());
        let known = state::known::read(&self.layout).into_iter().flat_map(|it| it.client_urls);
        let endpoints = urls
            .chain(known)
            .filter_map(|url| ClientEndpoint::of_member(&url, Some(&identity)).ok());
        Ok(self.own()?.with_endpoints_of(&ClusterApiClient::new(endpoints.collect())))
    }

    /// Makes the plan and the unit, stops the agent with its node, and marks the host as released.
    async fn end_management(&self) -> Result<ReleasePlan, ExitError> {
        let node = self.inspect_node().await?;
        let (cluster, id) = (self.cluster()?, node.plan.id()?);
        self.refuse_before_last_take_over(&cluster, id).await?;
        self.write_unit(&node.plan)?;
        self.write_plan(&node.plan)?;
        let list = self.list()?;
        record::begin(&cluster, list, id, &node.plan.name).await?;
        match self.stop_agent(&node, &cluster, id).await {
            Ok(()) => Ok(node.plan),
            Err(end) => Err(self.give_up(end, &cluster, list, id).await),
        }
    }

    /// Refuses to release a member of an adopted cluster before all members are taken over. A
    /// member that isn't taken over refuses this agent's certificate. So this command couldn't see
    /// whether such a member is in sync.
    async fn refuse_before_last_take_over(
        &self,
        cluster: &ClusterApiClient,
        id: MemberId,
    ) -> Result<(), ExitError> {
        if self.layout.adopted().is_none() {
            return Ok(());
        }
        let loaded = journal::read(&self.layout).map_err(state_exit_error)?;
        let Some((_, loaded)) = loaded else { return Ok(()) };
        let Some(join) = &loaded.extras.join else { return Ok(()) };
        let chain = StatementChain::verify_from_pin(&loaded.extras.statements, &join.statement)
            .map_err(|error| ExitError::DoNotRestart(error_chain(&error)))?;
        let (Some(adoption), true) = (&chain.newest().adopted, chain.trusts_cas_before_adoption())
        else {
            return Ok(());
        };
        let members = cluster.list_members().await?;
        let (_, record) = record::read(cluster, self.list()?).await?;
        refuse_others(&record.unmanaged(adoption, &members), id)
    }

    /// Cleans up after a release that failed before the host was marked as released. If the node
    /// still runs, removes the note "this member is being restarted" from the cluster's store.
    /// Returns the error for the user.
    async fn give_up(
        &self,
        end: ExitError,
        cluster: &ClusterApiClient,
        list: Digest,
        id: MemberId,
    ) -> ExitError {
        if !matches!(lock::holder(&self.layout.node_lock()), Ok(Some(_))) {
            return ExitError::Failed(format!(
                "{end}. The node has stopped: start its agent, and run this command again"
            ));
        }
        if let Err(why) = record::end(cluster, list, id, true).await {
            let text = "the cluster's store goes on saying that this member is being restarted";
            note(&format!("{text}: {why}"), self.typed.json);
        }
        ExitError::Failed(format!(
            "{end}. The member isn't released, and its agent must not be stopped now: run this \
             command again, or leave the member under management"
        ))
    }

    /// Stops the agent and its node once all members are in sync, and marks the host as released.
    async fn stop_agent(
        &self,
        node: &RunningNode,
        cluster: &ClusterApiClient,
        id: MemberId,
    ) -> Result<(), ExitError> {
        let json = self.typed.json;
        wait_until_all_in_sync(cluster, None, IN_SYNC_LIMIT, json).await?;
        move_leadership_away(cluster, id).await;
        match &self.typed.agent_unit {
            Some(unit) => {
                print_command_on_failure(systemd::disable_now(unit).await, "disable", unit, json);
            }
            None => note("stop the agent now with SIGTERM, which stops the node, too", json),
        }
        let mut held: Option<FileLock> = None;
        wait_until(self.patience, json, async || {
            if held.is_none() {
                held = lock_agent(&self.layout).ok();
            }
            let holder = lock::holder(&self.layout.node_lock()).map_err(state_exit_error)?;
            Ok(match (held.is_some(), holder.is_some()) {
                (false, _) => Some("the agent still runs".to_owned()),
                (true, true) => {
                    // Free the agent's lock for the agent that the operator starts again.
                    held = None;
                    Some(
                        "the node still runs: start the agent again, and stop it with SIGTERM"
                            .to_owned(),
                    )
                }
                (true, false) => None,
            })
        })
        .await?;
        // Copy again, because the agent may have renewed certificates until it stopped.
        self.copy_named_files(&node.arguments, node.plan.owner)?;
        let text = serde_json::to_vec(&node.plan).expect("plain structs always serialise");
        muster_files::data::replace(&self.layout.released_file(), &text).map_err(failed)?;
        note("the agent has stopped, and runs this node no more", json);
        let told = tokio::time::timeout(DISCOVERY_DEADLINE, self.report_release()).await;
        if let Err(why) = told.unwrap_or_else(|_| Err("no answer in time".to_owned())) {
            note(&format!("discovery doesn't hear of the release: {why}"), json);
        }
        Ok(())
    }

    /// Tells discovery why this member's agent is silent from now on. `cluster show` and `cluster
    /// explain` print that reason.
    async fn report_release(&self) -> Result<(), String> {
        let loaded = journal::read(&self.layout).map_err(|error| error_chain(&error))?;
        let (key, loaded) = loaded.ok_or("there is no journal")?;
        let journal = loaded.journal.with_next_boot();
        journal::write(&self.layout, &journal, &loaded.extras)
            .map_err(|error| error_chain(&error))?;
        let document = loaded.document.ok_or("there is no list of members")?;
        let join = loaded.extras.join.as_ref().ok_or("no cluster is known")?;
        let chain = StatementChain::verify_from_pin(&loaded.extras.statements, &join.statement)
            .map_err(|error| error_chain(&error))?;
        let known = state::service::read_known(&self.layout, &chain);
        let client = make_client(join, &Arc::new(key), known.as_ref());
        let client = client.ok_or("the service's address is not usable")?;
        let farewell = TroubleRequest {
            session: Session { boot: journal.boot, nonce: Nonce::random() },
            h: document.hash(),
            detail: RELEASED.to_owned(),
        };
        let told = client.report_missing_leader(join.cluster, &farewell).await;
        told.map(drop).map_err(|error| error_chain(&error))
    }

    fn unit_file(&self) -> PathBuf {
        match &self.typed.unit {
            Some(unit) => Path::new(UNIT_FOLDER).join(unit),
            None => self.out.join(DEFAULT_UNIT),
        }
    }

    /// Writes the unit file. Replaces an existing file only if the last run of this command wrote
    /// it.
    fn write_unit(&self, plan: &ReleasePlan) -> Result<(), ExitError> {
        let path = self.unit_file();
        let text = plan.unit();
        let last = self.read_last_plan()?.map(|last| last.unit());
        let found = state::read(&path).map_err(state_exit_error)?;
        let is_own = |own: &String| found.as_deref() == Some(own.as_bytes());
        if found.is_some() && !is_own(&text) && !last.as_ref().is_some_and(is_own) {
            return Err(ExitError::Usage(format!(
                "{} is there already, with another content: say another unit with --unit",
                path.display()
            )));
        }
        muster_files::data::replace(&path, text.as_bytes()).map_err(failed)
    }

    async fn start(&self, plan: &ReleasePlan) -> Result<(), ExitError> {
        match &self.typed.unit {
            Some(unit) => {
                systemd::reload().await?;
                print_command_on_failure(
                    systemd::enable_now(unit).await,
                    "enable",
                    unit,
                    self.typed.json,
                );
                Ok(())
            }
            None => {
                let (unit, command) = (self.unit_file(), plan.command.join(" "));
                let text = format!("start the node now, as {} does: {command}", unit.display());
                note(&text, self.typed.json);
                Ok(())
            }
        }
    }

    async fn wait(&self, cluster: &ClusterApiClient, id: MemberId) -> Result<(), ExitError> {
        let own = self.own()?;
        wait_until(self.patience, self.typed.json, async || {
            Ok(match own.status().await {
                Ok(status) if status.member_id == id => None,
                Ok(status) => Some(format!("the member {} answers here", status.member_id)),
                Err(error) => Some(error_chain(&error)),
            })
        })
        .await?;
        wait_until_all_in_sync(cluster, None, self.patience, self.typed.json).await
    }
}

#[cfg(test)]
mod tests {
    use super::plan::tests::plan;
    use super::*;

    #[test]
    fn a_release_names_the_other_members_that_are_not_taken_over() {
        let [own, b, c] = [1, 2, 3].map(MemberId);
        assert!(refuse_others(&[], own).is_ok());
        assert!(refuse_others(&[(own, "a")], own).is_ok(), "its take-over was interrupted");
        let refused = refuse_others(&[(own, "a"), (b, "b"), (c, "c")], own).unwrap_err();
        assert!(refused.to_string().contains("requests: b, c. Take them over"), "{refused}");
        assert!(refused.to_string().contains("--give-back"), "{refused}");
    }

    /// A host with one certificate of the agent, and an empty folder for copies.
    struct ReleasedHost {
        _folder: tempfile::TempDir,
        typed: ReleaseArguments,
        layout: Layout,
    }

    impl ReleasedHost {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let root = folder.path().canonicalize().unwrap();
            let layout = Layout::new(&root.join("data")).unwrap();
            std::fs::create_dir_all(layout.tls()).unwrap();
            let out = root.join("out");
            std::fs::create_dir(&out).unwrap();
            std::fs::write(layout.tls().join("peer.crt"), "p").unwrap();
            let typed = ReleaseArguments {
                data_dir: crate::cli::DataDir { data_dir: layout.root().to_owned() },
                out,
                unit: None,
                agent_unit: None,
                patience: 1,
                json: false,
            };
            Self { _folder: folder, typed, layout }
        }

        fn release(&self) -> NodeRelease<'_> {
            let (layout, out) = (self.layout.clone(), self.typed.out.clone());
            NodeRelease { typed: &self.typed, layout, out, patience: Duration::ZERO }
        }
    }

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn a_program_that_the_kernel_hides_is_named_by_the_command_line() {
        let hidden = || Err(io::Error::from(io::ErrorKind::PermissionDenied));
        let words = |program: &str| [program.to_owned(), "--name=a".to_owned()];
        let found = program_or_name(hidden(), &words("/bin/sh")).unwrap();
        assert_eq!(found, Path::new("/bin/sh"));
        for unusable in ["sh", "/no/such/program"] {
            assert!(program_or_name(hidden(), &words(unusable)).is_err(), "{unusable}");
        }
        assert!(program_or_name(hidden(), &[]).is_err());
        let gone = Err(io::Error::from(io::ErrorKind::NotFound));
        assert!(program_or_name(gone, &words("/bin/sh")).is_err(), "its program was removed");
        let known = program_or_name(Ok("/usr/bin/etcd".into()), &words("/bin/sh")).unwrap();
        assert_eq!(known, Path::new("/usr/bin/etcd"));
    }

    #[test]
    fn only_files_of_the_agent_are_copied() {
        let host = ReleasedHost::new();
        let (release, out) = (host.release(), &host.typed.out);
        let own = std::fs::metadata(out).unwrap();
        let owner = (own.uid(), own.gid());
        let peer = release.layout.tls().join("peer.crt").display().to_string();
        let copied = out.join("peer.crt").display().to_string();
        for (argument, expected) in [
            (peer.clone(), copied.clone()),
            (format!("--peer-cert-file={peer}"), format!("--peer-cert-file={copied}")),
            ("--name=a".to_owned(), "--name=a".to_owned()),
            ("--data-dir=/var/lib/etcd".to_owned(), "--data-dir=/var/lib/etcd".to_owned()),
            (String::new(), String::new()),
        ] {
            assert_eq!(release.copy_named_file(&argument, owner).unwrap(), expected);
        }
        assert_eq!(std::fs::read(out.join("peer.crt")).unwrap(), b"p");
    }

    #[test]
    fn each_run_copies_the_files_anew() {
        let host = ReleasedHost::new();
        let (release, out) = (host.release(), &host.typed.out);
        let own = std::fs::metadata(out).unwrap();
        let owner = (own.uid(), own.gid());
        let peer = release.layout.tls().join("peer.crt");
        let arguments = ["--name=a".to_owned(), format!("--peer-cert-file={}", peer.display())];
        let first = release.copy_named_files(&arguments, owner).unwrap();
        std::fs::write(&peer, "renewed").unwrap();
        assert_eq!(release.copy_named_files(&arguments, owner).unwrap(), first);
        assert_eq!(std::fs::read(out.join("peer.crt")).unwrap(), b"renewed");
    }

    #[test]
    fn the_unit_of_the_last_run_is_replaced_and_no_other_file() {
        let host = ReleasedHost::new();
        let release = host.release();
        release.write_unit(&plan()).unwrap();
        release.write_plan(&plan()).unwrap();
        let changed = ReleasePlan { command: vec!["/usr/bin/etcd-new".to_owned()], ..plan() };
        for _ in 0..2 {
            release.write_unit(&changed).unwrap();
            assert_eq!(std::fs::read_to_string(release.unit_file()).unwrap(), changed.unit());
        }
        std::fs::write(release.unit_file(), "another service").unwrap();
        assert_eq!(release.write_unit(&changed).unwrap_err().code(), 2);
        assert_eq!(std::fs::read(release.unit_file()).unwrap(), b"another service");
    }

    #[test]
    fn only_a_released_host_goes_on_with_an_earlier_plan() {
        let host = ReleasedHost::new();
        let release = host.release();
        release.write_plan(&plan()).unwrap();
        assert_eq!(release.read_released_plan().unwrap(), None, "it was interrupted");
        let released = ReleasePlan { name: "b".to_owned(), ..plan() };
        let file = release.layout.released_file();
        std::fs::write(&file, serde_json::to_vec(&released).unwrap()).unwrap();
        assert_eq!(release.read_released_plan().unwrap(), Some(released));
        std::fs::write(&file, "{").unwrap();
        assert_eq!(release.read_released_plan().unwrap_err().code(), 3);
    }

    #[test]
    fn a_copy_goes_to_the_nodes_user_and_the_folder_keeps_its_owner() {
        const THEM: u32 = 12_345;
        if !rustix::process::geteuid().is_root() {
            let _ = std::io::Write::write(
                &mut std::io::stderr(),
                b"SKIPPED: only root can give files away\n",
            );
            return;
        }
        let host = ReleasedHost::new();
        let (release, out) = (host.release(), &host.typed.out);
        let peer = release.layout.tls().join("peer.crt").display().to_string();
        set_mode(out, 0o711);
        release.copy_named_file(&peer, (THEM, THEM)).unwrap();
        let copied = std::fs::metadata(out.join("peer.crt")).unwrap();
        assert_eq!((copied.uid(), copied.gid()), (THEM, THEM));
        assert_eq!(std::fs::metadata(out).unwrap().uid(), 0);
        set_mode(out, 0o700);
        let refused = release.copy_named_file(&peer, (THEM, THEM)).unwrap_err();
        assert!(refused.to_string().contains("chmod a+x"), "{refused}");
    }

    #[test]
    fn a_folder_that_others_may_write_to_gets_no_keys_and_an_existing_one_keeps_its_mode() {
        let host = ReleasedHost::new();
        let out = &host.typed.out;
        set_mode(out, 0o750);
        assert_eq!(open_out(out).unwrap(), *out);
        assert_eq!(mode(out), 0o750);
        set_mode(out, 0o770);
        assert!(open_out(out).is_err());
        let new = out.with_file_name("new");
        assert_eq!(open_out(&new).unwrap(), new);
        assert_eq!(mode(&new), OUT_MODE);
    }
}
