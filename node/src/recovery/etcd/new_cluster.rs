//! Makes a new single-member cluster from the directory of an etcd member.
//!
//! All data is made in a work folder within the directory, by etcd's own programs. Then a plan
//! (`muster-forcing.json`) is written. Until then, the directory belongs to the old member. An
//! attempt that fails before leaves files, which the next attempt removes.
//!
//! After the plan is written, the next attempt continues, unless the old member has run meanwhile.
//! One exchange of names puts the new data in place of the old. Then the incarnation marker and the
//! record of the new cluster (`muster-forced.json`) are written, as the plan says.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use node_etcd_wal::{EtcdLog, HardState, WalError};
use node_state::etcd_file::{EtcdFileError, FileMember, FileSummary};
use node_state::identity::{
    ClusterId, DataDir, DataDirError, DroppedMember, ForcedCluster, Incarnation, MemberId,
    MemberIdentity,
};
use node_state::state_machine::Position;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::process::{Pid, Signal, kill_process};

use super::copy::{copy_files, sync_all};
use super::inspection::{STORE, WAL, open_store, summary};

/// Name of the work folder in the data directory, in which the new data is made.
const WORK_FOLDER: &str = "muster-recovering";
/// Maximum time for etcd to apply the end of a log.
const RUN_LIMIT: Duration = Duration::from_secs(300);
/// Maximum time for etcd to stop before it is killed.
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// Interval at which a running etcd is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Messages that etcd logs once it serves clients. By then it has applied its whole log, because
/// the last entry is one that it has just proposed itself. The structured log of etcd 3.4 contains
/// only the second message. (The store can't show that the whole log is applied: before etcd 3.6,
/// it does not contain the true applied index.)
const READY_MESSAGES: [&str; 2] = ["ready to serve client requests", "serving client traffic"];
/// Number of lines of a program's output that an error includes.
const MAX_OUTPUT_LINES: usize = 5;

/// Paths of etcd's programs.
#[derive(Clone, Debug)]
pub struct EtcdTools {
    /// Path of the server `etcd`, in the version that wrote the data.
    pub etcd: PathBuf,
    /// Path of `etcdutl`, or of `etcdctl` for etcd 3.4.
    pub etcdutl: PathBuf,
}

/// Why no cluster was made from an etcd's directory.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// The directory or one of its small files can't be used.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// An etcd is running on the directory.
    #[error("an etcd runs on {}: stop it first", .0.display())]
    InUse(PathBuf),
    /// The log can't be used.
    #[error("the log can't be used")]
    Wal(#[from] WalError),
    /// The store can't be used.
    #[error("the store can't be used")]
    Store(#[from] EtcdFileError),
    /// The directory has no marker, so no agent has managed this etcd.
    #[error(
        "{} has no marker: no muster-agent has run this etcd, and etcdutl snapshot restore makes a cluster of its store",
        .0.display()
    )]
    NoMarker(PathBuf),
    /// The cluster has removed this member.
    #[error("the cluster has removed this member: entry {0} of its log says so, and was committed")]
    Removed(u64),
    /// The member is a learner, from which etcd can't make a cluster.
    #[error(
        "this member is a learner, of which etcd can't make a cluster: take the directory of a member that votes"
    )]
    Learner,
    /// The store does not contain the member to which the log belongs.
    #[error("the store knows no member {0}: store and log belong to different members")]
    NoMember(MemberId),
    /// One of etcd's programs failed.
    #[error("{} failed: {what}", program.display())]
    Program {
        /// Path of the program.
        program: PathBuf,
        /// Description of the failure.
        what: String,
    },
    /// An operation on the disk failed.
    #[error("cannot {action} {}", path.display())]
    Disk {
        /// Operation that was attempted.
        action: &'static str,
        /// Path on which the operation failed.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl EtcdError {
    /// Whether every further attempt would fail in the same way.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::DataDir(error) => error.is_final(),
            Self::Removed(_) | Self::NoMember(_) | Self::Learner => true,
            Self::Wal(error) => !matches!(error, WalError::Disk { .. }),
            Self::Store(error) => !matches!(error, EtcdFileError::Io(_)),
            _ => false,
        }
    }
}

fn disk_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> EtcdError + use<> {
    let path = path.to_owned();
    move |source| EtcdError::Disk { action, path, source }
}

/// Makes a new single-member cluster from the etcd member's directory at `path`. A second call
/// before the new member has started returns the record of the first call.
///
/// # Errors
/// After an error, the directory belongs to the old member, or the next call finishes the new one.
pub fn recover(path: &Path, tools: &EtcdTools) -> Result<ForcedCluster, EtcdError> {
    let dir = DataDir::open_etcd(path)?;
    let work = dir.join(WORK_FOLDER);
    let (_store, runs) =
        open_store(&dir.join(STORE)).map_err(disk_error("open", &dir.join(STORE)))?;
    if runs {
        return Err(EtcdError::InUse(path.to_owned()));
    }
    let log = EtcdLog::read(&dir.join(WAL))?;
    if let Some(plan) = dir.forced_plan()? {
        if belongs_to(&log, &plan.is) {
            finish(&dir, &plan)?;
            return Ok(plan);
        }
        let made = EtcdLog::read(&work.join("new").join(WAL));
        let planned = Position { index: plan.last_index, term: plan.last_term };
        let committed = committed_index(&log, &summary(&dir.join(STORE))?);
        let unchanged = last_kept(&log, committed).is_ok_and(|kept| kept == planned);
        if unchanged && made.is_ok_and(|made| belongs_to(&made, &plan.is)) {
            exchange(&dir)?;
            finish(&dir, &plan)?;
            return Ok(plan);
        }
        tracing::warn!("what was begun here is of an older state of this member: begun anew");
        dir.delete_forced_plan()?;
    }
    if let Some(made) = dir.forced_cluster()?.filter(|made| belongs_to(&log, &made.is))
        && log.state.term == Some(made.base_term)
    {
        return Ok(made);
    }
    remove_folder(&work)?;
    let plan = make(&dir, &log, tools).inspect_err(|_| {
        // Remove the partial copy: it is of no use, and it may have filled the disk.
        let _ = std::fs::remove_dir_all(&work);
    })?;
    dir.write_forced_plan(&plan)?;
    exchange(&dir)?;
    finish(&dir, &plan)?;
    Ok(plan)
}

fn belongs_to(log: &EtcdLog, bearer: &MemberIdentity) -> bool {
    log.cluster == bearer.cluster_id.0 && log.member == bearer.member_id.0
}

/// Makes the new member's data in the work folder, and syncs it.
fn make(dir: &DataDir, log: &EtcdLog, tools: &EtcdTools) -> Result<ForcedCluster, EtcdError> {
    let incarnation = dir.marker()?.ok_or_else(|| EtcdError::NoMarker(dir.path().to_owned()))?;
    let before = summary(&dir.join(STORE))?;
    let own = |summary: &FileSummary| {
        let found = summary.members.iter().find(|member| member.id == log.member).cloned();
        found.ok_or(EtcdError::NoMember(MemberId(log.member)))
    };
    if own(&before)?.is_learner {
        return Err(EtcdError::Learner);
    }
    let committed = committed_index(log, &before);
    let kept = last_kept(log, committed)?;
    let work = dir.join(WORK_FOLDER);
    muster_files::open_data_folder(&work).map_err(DataDirError::from)?;
    let old = work.join("old");
    for folder in ["member/wal", "member/snap"] {
        copy_files(&dir.join(folder), &old.join(folder))
            .map_err(disk_error("copy", &dir.join(folder)))?;
    }
    log.append_state(&old.join(WAL), HardState { commit: Some(kept.index), ..log.state })?;
    apply_log(&work, &tools.etcd, name_of(&own(&before)?))?;
    let after = summary(&old.join(STORE))?;
    let member = own(&after)?;
    let new_incarnation = Incarnation::random();
    restore(&work, &tools.etcdutl, &member, new_incarnation)?;
    let new = work.join("new");
    let made = EtcdLog::read(&new.join(WAL))?;
    sync_all(&new).map_err(disk_error("sync", &new))?;
    let bearer = |log: &EtcdLog, incarnation| MemberIdentity {
        cluster_id: ClusterId(log.cluster),
        member_id: MemberId(log.member),
        incarnation,
    };
    let (was, is) = (bearer(log, incarnation), bearer(&made, new_incarnation));
    let now = jiff::Timestamp::now().to_string();
    let mut plan = ForcedCluster::new(now, was, is, dir.forced_cluster()?.as_ref());
    plan.committed = committed;
    (plan.last_index, plan.last_term) = (kept.index, kept.term);
    plan.base_index = made.last_position().index;
    plan.base_term = made.state.term.unwrap_or_default();
    plan.dropped =
        before.members.iter().filter(|other| other.id != log.member).map(dropped_member).collect();
    Ok(plan)
}

/// Returns the member's name. If it has none, returns a placeholder, because etcd's flags need a
/// name.
fn name_of(member: &FileMember) -> &str {
    if member.name.is_empty() { "recovered" } else { &member.name }
}

/// Returns the index of the last entry that the member knew to be committed.
fn committed_index(log: &EtcdLog, store: &FileSummary) -> u64 {
    log.state.commit.unwrap_or_default().max(store.applied.index)
}

/// Returns the position of the last entry to be kept, which is normally the log's last entry. If an
/// uncommitted entry removes this member, that entry and the later ones are dropped.
fn last_kept(log: &EtcdLog, committed: u64) -> Result<Position, EtcdError> {
    let last = log.last_position();
    match log.own_removal() {
        Some(index) if index <= committed => Err(EtcdError::Removed(index)),
        Some(index) => {
            tracing::warn!(
                index,
                last = last.index,
                "an entry that was not known to be committed removes this very member: it and what follows it is dropped"
            );
            Ok(Position { index: index - 1, term: log.term_at(index - 1) })
        }
        None => Ok(Position { index: last.index.max(committed), ..last }),
    }
}

fn dropped_member(member: &FileMember) -> DroppedMember {
    DroppedMember {
        member_id: MemberId(member.id),
        name: member.name.clone(),
        peer_urls: member.peer_urls.clone(),
        is_learner: member.is_learner,
    }
}

/// Runs etcd as a cluster of its own to apply the copy's log. No other user can connect to etcd,
/// because its sockets are in the work folder, which only this user can access.
fn apply_log(work: &Path, etcd: &Path, name: &str) -> Result<(), EtcdError> {
    let program = |what: String| EtcdError::Program { program: etcd.to_owned(), what };
    let log = work.join("etcd.log");
    let mut command = tied_command(etcd)?;
    command.arg(format!("--name={name}")).args(["--data-dir=old", "--force-new-cluster"]);
    command
        .args(["--listen-client-urls=unix://client:1", "--advertise-client-urls=unix://client:1"]);
    command
        .args(["--listen-peer-urls=unix://peer:1", "--initial-advertise-peer-urls=unix://peer:1"]);
    command.arg(format!("--initial-cluster={name}=unix://peer:1"));
    let mut child = start(command, work, &log, etcd)?;
    let said = || std::fs::read_to_string(&log).unwrap_or_default();
    let until = Instant::now() + RUN_LIMIT;
    loop {
        if let Some(status) = child.try_wait().map_err(disk_error("wait for", etcd))? {
            return Err(program(format!("it ended with {status}: {}", last_lines(&said()))));
        }
        if READY_MESSAGES.iter().any(|text| said().contains(text)) {
            break;
        }
        if Instant::now() >= until {
            let _ = child.kill();
            let _ = child.wait();
            let limit = RUN_LIMIT.as_secs();
            return Err(program(format!("not ready after {limit} s: {}", last_lines(&said()))));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    stop(&mut child).map_err(disk_error("stop", etcd))
}

fn stop(child: &mut Child) -> io::Result<()> {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        kill_process(pid, Signal::TERM)?;
    }
    let until = Instant::now() + STOP_LIMIT;
    while child.try_wait()?.is_none() {
        if Instant::now() >= until {
            child.kill()?;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Runs etcd's tool to make the new member's directory from the store in the copied directory.
fn restore(
    work: &Path,
    etcdutl: &Path,
    member: &FileMember,
    incarnation: Incarnation,
) -> Result<(), EtcdError> {
    let log = work.join("etcdutl.log");
    let mut help = tied_command(etcdutl)?;
    help.args(["snapshot", "restore", "--help"]);
    let asked = run(help, work, &log, etcdutl)?;
    let knows_bump = asked.contains("--bump-revision");
    let name = name_of(member);
    let cluster: Vec<String> = member.peer_urls.iter().map(|url| format!("{name}={url}")).collect();
    let mut command = tied_command(etcdutl)?;
    command.args(["snapshot", "restore", "old/member/snap/db", "--skip-hash-check=true"]);
    command.arg("--data-dir=new").arg(format!("--name={name}"));
    command.arg(format!("--initial-cluster={}", cluster.join(",")));
    command.arg(format!("--initial-cluster-token={incarnation}"));
    command.arg(format!("--initial-advertise-peer-urls={}", member.peer_urls.join(",")));
    if knows_bump {
        command.arg(format!("--bump-revision={}", super::super::REVISION_BUMP));
        command.arg("--mark-compacted=true");
    } else {
        tracing::warn!(
            program = %etcdutl.display(),
            "it can't make revisions higher: clients that saw later ones of the lost members must be started anew"
        );
    }
    run(command, work, &log, etcdutl).map(drop)
}

/// Runs a program until it exits, and returns its output.
fn run(command: Command, work: &Path, log: &Path, program: &Path) -> Result<String, EtcdError> {
    let status =
        start(command, work, log, program)?.wait().map_err(disk_error("wait for", program))?;
    let said = std::fs::read_to_string(log).unwrap_or_default();
    if status.success() {
        return Ok(said);
    }
    let what = format!("it ended with {status}: {}", last_lines(&said));
    Err(EtcdError::Program { program: program.to_owned(), what })
}

/// Returns a command for a program that is killed when this process ends for any reason. So no
/// program still works on the directory when a later attempt begins.
fn tied_command(program: &Path) -> Result<Command, EtcdError> {
    let own = std::env::current_exe().map_err(disk_error("find", Path::new("this program")))?;
    let mut command = Command::new(own);
    command.args(["data", "run-tied", &std::process::id().to_string()]).arg(program);
    Ok(command)
}

fn start(
    mut command: Command,
    work: &Path,
    log: &Path,
    program: &Path,
) -> Result<Child, EtcdError> {
    let open = || OpenOptions::new().create(true).append(true).open(log);
    let output = open().map_err(disk_error("open", log))?;
    let errors = open().map_err(disk_error("open", log))?;
    let path = std::env::var_os("PATH");
    command.current_dir(work).env_clear().envs(path.map(|path| ("PATH", path)));
    command.env("ETCDCTL_API", "3").stdin(Stdio::null()).stdout(output).stderr(errors);
    command.spawn().map_err(disk_error("start", program))
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(MAX_OUTPUT_LINES)..].join(" / ")
}

/// Exchanges the old and the new data in one atomic step.
fn exchange(dir: &DataDir) -> Result<(), EtcdError> {
    let (old, new) = (dir.join("member"), dir.join(WORK_FOLDER).join("new/member"));
    renameat_with(CWD, &new, CWD, &old, RenameFlags::EXCHANGE)
        .map_err(|errno| disk_error("put the new data in the place of", &old)(errno.into()))?;
    sync_folder(&dir.join(WORK_FOLDER).join("new"))?;
    sync_folder(dir.path())
}

/// Renames the old data, then writes the incarnation marker and the record of the new cluster. Each
/// step can be repeated. The plan is deleted last, so that the next call continues if the process
/// ends before then.
fn finish(dir: &DataDir, plan: &ForcedCluster) -> Result<(), EtcdError> {
    let (left, aside) = (
        dir.join(WORK_FOLDER).join("new/member"),
        dir.join(&format!("member.of-{}", plan.was.cluster_id)),
    );
    if left.exists() {
        std::fs::rename(&left, &aside).map_err(disk_error("put aside", &left))?;
        sync_folder(dir.path())?;
    }
    dir.replace_marker(plan.is.incarnation)?;
    dir.write_forced_cluster(plan)?;
    remove_folder(&dir.join(WORK_FOLDER))?;
    Ok(dir.delete_forced_plan()?)
}

fn remove_folder(folder: &Path) -> Result<(), EtcdError> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(disk_error("remove", folder)(error))
        }
        _ => Ok(()),
    }
}

fn sync_folder(folder: &Path) -> Result<(), EtcdError> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(disk_error("sync", folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_kept_up_to_the_removal_of_this_member() {
        let mut log = EtcdLog { member: 7, ..EtcdLog::default() };
        log.last = Some(Position { index: 9, term: 2 });
        log.terms = vec![Position { index: 1, term: 1 }, Position { index: 7, term: 2 }];
        assert!(matches!(last_kept(&log, 5), Ok(Position { index: 9, term: 2 })));
        log.removals = vec![(6, 8), (7, 7)];
        assert!(matches!(last_kept(&log, 5), Ok(Position { index: 6, term: 1 })));
        assert!(matches!(last_kept(&log, 7), Err(EtcdError::Removed(7))));
    }

    #[test]
    fn the_plan_is_kept_until_the_work_folder_is_removed() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("member/snap")).unwrap();
        std::fs::write(root.path().join(STORE), "").unwrap();
        let dir = DataDir::open_etcd(root.path()).unwrap();
        let bearer = |of: u8| MemberIdentity {
            cluster_id: ClusterId(of.into()),
            member_id: MemberId(of.into()),
            incarnation: Incarnation([of; 16]),
        };
        let plan = ForcedCluster::new("now".to_owned(), bearer(1), bearer(2), None);
        dir.write_forced_plan(&plan).unwrap();
        // `finish` can't remove a work folder that is a regular file.
        let work = dir.join(WORK_FOLDER);
        std::fs::write(&work, "").unwrap();
        assert!(matches!(finish(&dir, &plan), Err(EtcdError::Disk { action: "remove", .. })));
        assert_eq!(dir.forced_plan().unwrap(), Some(plan.clone()));
        std::fs::remove_file(&work).unwrap();
        std::fs::create_dir_all(work.join("old/member")).unwrap();
        finish(&dir, &plan).unwrap();
        assert!(!work.exists());
        assert_eq!(dir.forced_plan().unwrap(), None);
        // Simulate an end of the process after the work folder was removed, and before the plan was
        // deleted.
        dir.write_forced_plan(&plan).unwrap();
        finish(&dir, &plan).unwrap();
        assert_eq!(dir.forced_plan().unwrap(), None);
    }

    #[test]
    fn a_missing_store_or_log_and_a_running_etcd_are_refused_first() {
        let root = tempfile::tempdir().unwrap();
        let tools = EtcdTools { etcd: "/no/etcd".into(), etcdutl: "/no/etcdutl".into() };
        let none = recover(root.path(), &tools).unwrap_err();
        assert!(matches!(none, EtcdError::DataDir(DataDirError::NoEtcdData(_))), "{none}");
        std::fs::create_dir_all(root.path().join("member/snap")).unwrap();
        std::fs::create_dir_all(root.path().join("member/wal")).unwrap();
        let store = include_bytes!("../../../state/src/etcd_file/fixtures/etcd-3.4.db");
        std::fs::write(root.path().join(STORE), store).unwrap();
        let no_log = recover(root.path(), &tools).unwrap_err();
        assert!(matches!(no_log, EtcdError::Wal(WalError::Missing { .. })), "{no_log}");
        let runs = File::open(root.path().join(STORE)).unwrap();
        rustix::fs::flock(&runs, rustix::fs::FlockOperation::LockExclusive).unwrap();
        assert!(matches!(recover(root.path(), &tools), Err(EtcdError::InUse(_))));
        assert!(!root.path().join(WORK_FOLDER).exists());
    }
}
