//! `muster-node move`: guides an operator who moves a running cluster's data to another cluster.
//!
//! The steps are:
//!
//! 1. The source stops taking writes.
//! 2. Its snapshot is saved.
//! 3. The operator restores the snapshot on the target's hosts and starts them.
//! 4. Every key, user and role is compared.
//!
//! The command keeps no state of its own. After an interruption the same command continues: it
//! finds the snapshot file.
//!
//! # Stopping the writes
//!
//! `--freeze` raises the NOSPACE alarm of the source. The alarm goes through the log. So there is
//! one entry after which no member applies a put, a lease's grant, or a transaction with a put.
//! Reads and keep-alives continue, and `etcdctl alarm disarm` undoes it. Deletions, compactions,
//! ends of leases, and changes of users and members are not stopped. So at the end the changes
//! after the snapshot's revision are read, and one change by a client fails the move. Ends of
//! leases are no failure, because the target ends these leases too.
//!
//! The snapshot contains the alarm. So the target takes no puts either, until this command lowers
//! its alarm after the comparison. The source stays as it is: late clients can't write to it.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use jiff::Timestamp;
use node_engine::causes::error_chain;
use node_proto::etcdserverpb::AlarmType;
use node_state::etcd_file::EtcdFileError;
use serde::Serialize;

use super::{
    FAILED, USAGE,
    cluster::{ClusterAddress, ClusterReadError, ClusterReader, LaterChanges, ensure_equal_ids},
    compare::{ClusterPairArgs, CompareError, CompareReport, compare_clusters},
    comparison::shown_key,
    connection::{ClientTls, check_url_and_files, full_url},
    print, print_error, print_to_stderr,
    save::{SaveError, ensure_regular_file, save_to, snapshot_revision},
    users::{needs_root_role, read_auth},
};

/// Interval between two attempts to reach the target.
const TARGET_INTERVAL: Duration = Duration::from_millis(500);
/// Interval between two lines that say why the target can't serve reads yet.
const REASON_INTERVAL: Duration = Duration::from_secs(30);

/// Program that runs on the target's hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TargetProgram {
    MusterNode,
    Etcd,
}

/// Flags of `muster-node move`.
#[derive(Debug, Args)]
pub(super) struct MoveArgs {
    /// The snapshot file to make. If it exists, it is taken as the snapshot of an earlier run.
    file: PathBuf,
    #[command(flatten)]
    clusters: ClusterPairArgs,
    /// Name and peer URL of each of the target's members.
    #[arg(long, value_name = "NAME=URL,...")]
    initial_cluster: String,
    /// The program that the target's hosts run.
    #[arg(long, value_enum, value_name = "PROGRAM", default_value = "muster-node")]
    target_program: TargetProgram,
    /// The target's data directories, for the restore commands. Default: NAME.etcd
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Stop the source's puts by its NOSPACE alarm. Without this flag, stop the writers yourself.
    #[arg(long)]
    freeze: bool,
    /// How long the source must be without writes before its snapshot is saved.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, conflicts_with = "freeze")]
    quiet_seconds: u64,
    /// How long to wait until the target serves reads.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    wait_seconds: u64,
    /// When the writes stopped. Default: when this run began to check or freeze the source; for a
    /// snapshot of an earlier run, the file's time.
    #[arg(long, value_name = "TIME")]
    since: Option<Timestamp>,
    /// Print the result as one JSON document, and the steps on standard error.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, thiserror::Error)]
enum MoveError {
    #[error(transparent)]
    Save(#[from] SaveError),
    #[error(transparent)]
    Compare(#[from] CompareError),
    #[error("--initial-cluster: {0:?} is not NAME=URL")]
    InitialCluster(String),
    #[error("source and target are the same cluster, {0:x}: name the members of two clusters")]
    SameCluster(u64),
    #[error("{0} belongs to both --source and --target: name the members of two clusters")]
    SameUrl(String),
    #[error("{0} must be the certificate of a user with the role root")]
    NeedsRootRole(&'static str, #[source] CompareError),
    #[error("the source has a CORRUPT alarm: repair it before you move its data")]
    Corrupt,
    #[error("clients write to the source, for example key {0}: stop them, or add --freeze")]
    Writers(String),
    #[error(
        "clients changed the source after its snapshot, for example key {key}: stop them, delete {}, and begin again",
        file.display()
    )]
    Outdated { key: String, file: PathBuf },
    #[error(
        "the snapshot ends at revision {found}, but the source was at {wanted}: delete {}, and begin again",
        file.display()
    )]
    Behind { found: i64, wanted: i64, file: PathBuf },
    #[error("{} exists and is no whole snapshot: delete it, or name another file", file.display())]
    NotASnapshot {
        file: PathBuf,
        #[source]
        source: EtcdFileError,
    },
    #[error(
        "the snapshot ends at revision {found}, but the source is only at {newest}: {} is another cluster's, so name another file",
        file.display()
    )]
    Ahead { found: i64, newest: i64, file: PathBuf },
    #[error(
        "the target is at revision {found}, but the snapshot ends at {wanted}: restore this snapshot on its hosts"
    )]
    TargetBehind { found: i64, wanted: i64 },
    #[error("{0} has other data than the target's other members: restore the snapshot there again")]
    OtherData(String),
    #[error("the target did not answer within {0} s")]
    NoTarget(u64, #[source] ClusterReadError),
}

impl MoveError {
    /// Whether a wrong command line caused the error. The command then exits with the code for
    /// wrong usage.
    fn is_usage(&self) -> bool {
        match self {
            Self::Save(error) => error.is_usage(),
            Self::Compare(error) => error.is_usage(),
            Self::InitialCluster(_) | Self::SameCluster(_) | Self::SameUrl(_) => true,
            Self::NeedsRootRole(..)
            | Self::Corrupt
            | Self::Writers(_)
            | Self::Outdated { .. }
            | Self::Behind { .. }
            | Self::NotASnapshot { .. }
            | Self::Ahead { .. }
            | Self::TargetBehind { .. }
            | Self::OtherData(_)
            | Self::NoTarget(..) => false,
        }
    }
}

/// Result of a move.
#[derive(Debug, Serialize)]
struct MoveReport {
    /// When the source's writes stopped, as far as this run knows: see `--since`.
    read_only_since: Timestamp,
    /// Seconds from `read_only_since` until the target was compared and took writes.
    read_only_seconds: f64,
    snapshot_revision: i64,
    comparison: CompareReport,
    /// Client URLs of the target's members that could not be compared with the others.
    members_not_compared: Vec<String>,
}

impl MoveReport {
    fn to_text(&self) -> String {
        let comparison = self.comparison.to_text();
        let (seconds, since) = (self.read_only_seconds, self.read_only_since);
        let end = if self.comparison.equal {
            "moved: send the clients to the target, and keep the source until you need no way back"
        } else {
            "not moved: not all was found equal, so don't send clients to the target"
        };
        let mut text = format!("{comparison}\nread-only for {seconds:.1} s, since {since}\n{end}");
        if !self.members_not_compared.is_empty() {
            let urls = self.members_not_compared.join(", ");
            text += &format!(
                "\nnot compared: the data of {urls}; once these members run, run this command again"
            );
        }
        text
    }
}

/// A host of the target, as `--initial-cluster` gives it.
#[derive(Debug, PartialEq, Eq)]
struct TargetHost {
    name: String,
    /// Peer URLs, separated by commas.
    peer_urls: String,
}

/// Prints the steps of a move.
struct StepPrinter {
    to_stderr: bool,
}

impl StepPrinter {
    fn line(&self, text: &str) {
        if self.to_stderr {
            print_to_stderr(text);
        } else {
            // If the reader of standard output has gone away, the move goes on nevertheless.
            let _ = print(text);
        }
    }
}

pub(super) fn run(args: &MoveArgs) -> u8 {
    let steps = StepPrinter { to_stderr: args.json };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let moved = match runtime {
        Ok(runtime) => runtime.block_on(move_cluster(args, &steps)),
        Err(error) => {
            print_error(&error);
            return FAILED;
        }
    };
    let code = match moved {
        Ok(report) => {
            let text = if args.json {
                serde_json::to_string(&report).expect("text and numbers are JSON")
            } else {
                report.to_text()
            };
            match print(&text) {
                0 if !report.comparison.equal => FAILED,
                code => code,
            }
        }
        Err(error) => {
            print_error(&error);
            if error.is_usage() { USAGE } else { FAILED }
        }
    };
    if code != 0 && args.freeze {
        print_to_stderr(
            "The source may be read-only now: `etcdctl alarm disarm` there lets it take writes again.",
        );
    }
    code
}

async fn move_cluster(args: &MoveArgs, steps: &StepPrinter) -> Result<MoveReport, MoveError> {
    let hosts = target_hosts(&args.initial_cluster)?;
    ensure_regular_file(&args.file)?;
    check_target(&args.clusters.source(), &args.clusters.target())?;
    let source = connect_to_source(&args.clusters.source(), steps).await?;
    // The target may run already. Find out now whether its URLs lead to several clusters, or to the
    // source.
    args.clusters.target().ensure_one_cluster().await.map_err(CompareError::Target)?;
    if let Ok(target) = ClusterReader::connect(&args.clusters.target()).await {
        ensure_other_cluster(&source, &target)?;
    }
    read_auth(&source).await.map_err(CompareError::Source).map_err(auth_error)?;
    let found = find_snapshot(&args.file, &source).await?;
    let quiet_since = stop_writes(args, &source, steps).await?;
    let (revision, saved_at) = take_snapshot(args, &source, found, steps).await?;
    let read_only_since = args.since.or(saved_at).unwrap_or(quiet_since);
    steps.line(&format!(
        "3 restore: copy {} to each host of the target, run its command there, and start its member",
        args.file.display()
    ));
    for host in &hosts {
        steps.line(&restore_command(args, host));
    }
    steps.line(&format!(
        "           (if this command is interrupted, run it again with --since {read_only_since})"
    ));
    let target = wait_for_target(args, steps).await?;
    // Connect again: while the target was restored, the source's member may have been restarted, or
    // a firewall may have forgotten the idle connection.
    let source = ClusterReader::connect(&args.clusters.source()).await;
    let source = source.map_err(CompareError::Source)?;
    ensure_other_cluster(&source, &target)?;
    let found = target.revision().await.map_err(CompareError::Target)?;
    // A lower revision means that the target was restored from an older snapshot. The comparison of
    // keys wouldn't always notice that: if the last changes were deletions, the keys can be equal.
    if found < revision {
        return Err(MoveError::TargetBehind { found, wanted: revision });
    }
    read_auth(&target).await.map_err(CompareError::Target).map_err(auth_error)?;
    steps.line(&format!("5 compare: every key at revision {revision}"));
    let comparison = compare_clusters((&source, revision), (&target, revision)).await?;
    if let Some(key) = comparison.source.first_changed_key.clone() {
        return Err(MoveError::Outdated { key, file: args.file.clone() });
    }
    let mut members_not_compared = Vec::new();
    if comparison.equal {
        let address = args.clusters.target();
        members_not_compared = compare_members(&address, &target, revision, steps).await?;
        // Without --freeze the snapshot may contain a NOSPACE alarm too: from an earlier run with
        // the flag, or because the source was full. A target that is full raises the alarm again.
        target.lower_nospace().await.map_err(CompareError::Target)?;
        steps.line("           the target takes writes");
    }
    let read_only_seconds = Timestamp::now().duration_since(read_only_since).as_secs_f64();
    Ok(MoveReport {
        read_only_since,
        read_only_seconds,
        snapshot_revision: revision,
        comparison,
        members_not_compared,
    })
}

/// Refuses a target that has a URL of the source, or whose TLS files can't be read. These errors
/// must be found before the source's writes are stopped.
fn check_target(source: &ClusterAddress, target: &ClusterAddress) -> Result<(), MoveError> {
    let source_urls: Vec<String> = source.urls.iter().map(|url| full_url(url)).collect();
    for url in &target.urls {
        if source_urls.contains(&full_url(url)) {
            return Err(MoveError::SameUrl(url.clone()));
        }
        check_url_and_files(url, &target.tls)
            .map_err(|error| CompareError::Target(ClusterReadError::Connect(error)))?;
    }
    Ok(())
}

fn ensure_other_cluster(source: &ClusterReader, target: &ClusterReader) -> Result<(), MoveError> {
    if target.cluster_id == source.cluster_id {
        return Err(MoveError::SameCluster(source.cluster_id));
    }
    Ok(())
}

/// Returns the error for a cluster whose users and roles could not be read. If the certificate's
/// user lacks permissions, the error names the flag to correct.
fn auth_error(error: CompareError) -> MoveError {
    let (flag, cause) = match &error {
        CompareError::Source(cause) => ("--source-cert", cause),
        CompareError::Target(cause) => ("--target-cert", cause),
    };
    if needs_root_role(cause) { MoveError::NeedsRootRole(flag, error) } else { error.into() }
}

/// Shows the state of each of the source's members, and connects to one that can be read. Members
/// of two clusters are refused.
async fn connect_to_source(
    address: &ClusterAddress,
    steps: &StepPrinter,
) -> Result<ClusterReader, MoveError> {
    steps.line("1 source:  its members");
    let mut members = Vec::new();
    for url in &address.urls {
        let state = match ClusterReader::connect_to(url, &address.tls).await {
            Ok((member, status)) => {
                members.push((url.clone(), member.cluster_id));
                let role = match status.leader {
                    0 => "knows no leader",
                    leader if leader == member.member_id => "leader",
                    _ if status.is_learner => "learner",
                    _ => "follower",
                };
                let revision = status.header.as_ref().map_or(0, |header| header.revision);
                format!("version {}, {role}, revision {revision}", status.version)
            }
            Err(error) if error.is_usage() => return Err(CompareError::Source(error).into()),
            Err(error) => error_chain(&error),
        };
        steps.line(&format!("           {url}: {state}"));
    }
    ensure_equal_ids(&members).map_err(CompareError::Source)?;
    Ok(ClusterReader::connect(address).await.map_err(CompareError::Source)?)
}

/// Makes sure that no client puts keys at the source. Returns the time at which it began. With
/// `--freeze`, that is just before the alarm was raised. Otherwise no client has changed a key
/// since then.
async fn stop_writes(
    args: &MoveArgs,
    source: &ClusterReader,
    steps: &StepPrinter,
) -> Result<Timestamp, MoveError> {
    let alarms = source.alarms().await.map_err(CompareError::Source)?;
    if alarms.iter().any(|alarm| alarm.alarm() == AlarmType::Corrupt) {
        return Err(MoveError::Corrupt);
    }
    let since = Timestamp::now();
    if args.freeze {
        source.raise_nospace().await.map_err(CompareError::Source)?;
        steps.line("           its NOSPACE alarm is raised: it takes no puts");
        return Ok(since);
    }
    let revision = source.revision().await.map_err(CompareError::Source)?;
    tokio::time::sleep(Duration::from_secs(args.quiet_seconds)).await;
    let changes = source.changes_after(revision).await.map_err(CompareError::Source)?;
    if let Some(key) = first_changed_key(&changes) {
        return Err(MoveError::Writers(key));
    }
    let seconds = args.quiet_seconds;
    steps.line(&format!("           no client has changed a key for {seconds} s"));
    Ok(since)
}

/// Returns the revision of the snapshot file that an earlier run has saved, if there is one. Fails
/// if a client has changed the source since then. That must be found before the writes are stopped.
async fn find_snapshot(file: &Path, source: &ClusterReader) -> Result<Option<i64>, MoveError> {
    if !file.exists() {
        return Ok(None);
    }
    let found = snapshot_revision(file).map_err(|error| match error {
        SaveError::Damaged(source) => MoveError::NotASnapshot { file: file.to_owned(), source },
        error => MoveError::Save(error),
    })?;
    let newest = source.revision().await.map_err(CompareError::Source)?;
    if found > newest {
        return Err(MoveError::Ahead { found, newest, file: file.to_owned() });
    }
    ensure_unchanged(source, found, file).await?;
    Ok(Some(found))
}

/// Saves the source's snapshot, unless an earlier run has saved it at revision `found`. Returns the
/// snapshot's revision, and the time of an earlier run's file.
async fn take_snapshot(
    args: &MoveArgs,
    source: &ClusterReader,
    found: Option<i64>,
    steps: &StepPrinter,
) -> Result<(i64, Option<Timestamp>), MoveError> {
    let file = &args.file;
    let revision = if let Some(found) = found {
        found
    } else {
        let wanted = source.revision().await.map_err(CompareError::Source)?;
        let saved = save_to(source.channel(), file).await?;
        if saved < wanted {
            return Err(MoveError::Behind { found: saved, wanted, file: file.clone() });
        }
        saved
    };
    ensure_unchanged(source, revision, file).await?;
    let saved_at = found.and_then(|_| modification_time(file));
    let origin = if found.is_some() { "found" } else { "saved" };
    steps.line(&format!("2 snapshot: {origin} at {}: revision {revision}", file.display()));
    Ok((revision, saved_at))
}

/// Makes sure that no client has changed the source after the snapshot's revision.
async fn ensure_unchanged(
    source: &ClusterReader,
    revision: i64,
    file: &Path,
) -> Result<(), MoveError> {
    let changes = source.changes_after(revision).await.map_err(CompareError::Source)?;
    first_changed_key(&changes)
        .map_or(Ok(()), |key| Err(MoveError::Outdated { key, file: file.to_owned() }))
}

fn first_changed_key(changes: &LaterChanges) -> Option<String> {
    changes.first_key.as_deref().map(shown_key)
}

fn modification_time(file: &Path) -> Option<Timestamp> {
    Timestamp::try_from(file.metadata().ok()?.modified().ok()?).ok()
}

/// Waits until the target has a leader and serves reads.
async fn wait_for_target(args: &MoveArgs, steps: &StepPrinter) -> Result<ClusterReader, MoveError> {
    let address = args.clusters.target();
    steps.line(&format!("4 target:  waiting for {}", address.urls.join(", ")));
    let (started, limit) = (Instant::now(), Duration::from_secs(args.wait_seconds));
    let mut reason_at = started;
    loop {
        let error = match ClusterReader::connect(&address).await {
            Ok(target) => match target.revision().await {
                Ok(revision) => {
                    let url = &target.url;
                    steps.line(&format!("           {url} serves reads, at revision {revision}"));
                    return Ok(target);
                }
                Err(error) => error,
            },
            Err(error) if error.is_usage() => return Err(CompareError::Target(error).into()),
            Err(error) => error,
        };
        if started.elapsed() >= limit {
            return Err(MoveError::NoTarget(args.wait_seconds, error));
        }
        if Instant::now() >= reason_at {
            steps.line(&format!("           not yet: {}", error_chain(&error)));
            reason_at = Instant::now() + REASON_INTERVAL;
        }
        tokio::time::sleep(TARGET_INTERVAL).await;
    }
}

/// Data of one of the target's members, as the member itself describes it.
struct MemberData {
    cluster_id: u64,
    /// Newest revision that the member has applied.
    revision: i64,
    /// Hash up to the snapshot's revision, and the compacted revision; or why there is no hash.
    hash: Result<(u32, i64), String>,
}

impl MemberData {
    async fn read(url: &str, tls: &ClientTls, revision: i64) -> Result<Self, ClusterReadError> {
        let (member, status) = ClusterReader::connect_to(url, tls).await?;
        let hash = member.hash(revision).await.map_err(|error| error_chain(&error));
        let newest = status.header.as_ref().map_or(0, |header| header.revision);
        Ok(Self { cluster_id: member.cluster_id, revision: newest, hash })
    }
}

#[derive(Debug, PartialEq, Eq)]
enum MemberComparison {
    Same,
    Other,
    /// The data can't be compared, for this reason.
    Impossible(String),
}

/// Compares a member's data with that of the member through which all keys were compared.
fn compare_member(
    expected: &MemberData,
    found: &MemberData,
    snapshot_revision: i64,
) -> MemberComparison {
    // From its first start on, a member has all revisions of the snapshot that was restored. So a
    // member with a lower revision was restored from another file.
    if found.cluster_id != expected.cluster_id || found.revision < snapshot_revision {
        return MemberComparison::Other;
    }
    match (&expected.hash, &found.hash) {
        (Ok(expected), Ok(found)) if expected == found => MemberComparison::Same,
        // A hash covers only the revisions that compaction has left. If the members are compacted
        // at different revisions, equal data has different hashes.
        (Ok((_, expected)), Ok((_, found))) if expected != found => MemberComparison::Impossible(
            "compacted at another revision, so its hash can't be compared".to_owned(),
        ),
        (Ok(_), Ok(_)) => MemberComparison::Other,
        // There is no hash. For example, etcd 3.4 computes none at the compacted revision.
        (Err(reason), _) | (_, Err(reason)) => MemberComparison::Impossible(reason.clone()),
    }
}

/// Compares the data of the target's members with each other. The source was compared with only one
/// of them, but another host may have got another snapshot file. Returns the members that can't be
/// compared.
async fn compare_members(
    address: &ClusterAddress,
    target: &ClusterReader,
    revision: i64,
    steps: &StepPrinter,
) -> Result<Vec<String>, MoveError> {
    let hash = target.hash(revision).await.map_err(|error| error_chain(&error));
    let expected = MemberData { cluster_id: target.cluster_id, revision, hash };
    let mut not_compared = Vec::new();
    for url in address.urls.iter().filter(|url| **url != target.url) {
        let compared = match MemberData::read(url, &address.tls, revision).await {
            Ok(found) => compare_member(&expected, &found, revision),
            Err(error) => MemberComparison::Impossible(error_chain(&error)),
        };
        let state = match compared {
            MemberComparison::Same => "same data".to_owned(),
            MemberComparison::Other => return Err(MoveError::OtherData(url.clone())),
            MemberComparison::Impossible(reason) => {
                not_compared.push(url.clone());
                format!("not compared: {reason}")
            }
        };
        steps.line(&format!("           {url}: {state}"));
    }
    Ok(not_compared)
}

/// Reads the value of `--initial-cluster`. A member with several peer URLs is named several times.
fn target_hosts(initial_cluster: &str) -> Result<Vec<TargetHost>, MoveError> {
    let mut hosts: Vec<TargetHost> = Vec::new();
    for entry in initial_cluster.split(',') {
        let parts = entry.trim().split_once('=');
        let parts = parts.filter(|(name, url)| !name.is_empty() && url.contains("://"));
        let (name, url) = parts.ok_or_else(|| MoveError::InitialCluster(entry.to_owned()))?;
        match hosts.iter_mut().find(|host| host.name == name) {
            Some(host) => host.peer_urls.extend([",", url]),
            None => hosts.push(TargetHost { name: name.to_owned(), peer_urls: url.to_owned() }),
        }
    }
    Ok(hosts)
}

/// Returns the command that makes the data directory of one of the target's members.
fn restore_command(args: &MoveArgs, host: &TargetHost) -> String {
    let program = match args.target_program {
        TargetProgram::MusterNode => "muster-node",
        TargetProgram::Etcd => "etcdutl",
    };
    let mut words = vec![program.to_owned(), "snapshot".to_owned(), "restore".to_owned()];
    words.push(shell_word(&args.file.display().to_string()));
    words.extend(["--name".to_owned(), shell_word(&host.name)]);
    if let Some(dir) = &args.data_dir {
        words.extend(["--data-dir".to_owned(), shell_word(&dir.display().to_string())]);
    }
    let entries: Vec<&str> = args.initial_cluster.split(',').map(str::trim).collect();
    words.extend(["--initial-cluster".to_owned(), shell_word(&entries.join(","))]);
    words.extend(["--initial-advertise-peer-urls".to_owned(), shell_word(&host.peer_urls)]);
    format!("  {}", words.join(" "))
}

/// Quotes a word for a POSIX shell, if it needs that.
fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests;
