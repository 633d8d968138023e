//! `muster-node data`: shows the state of a data directory, or makes a new cluster from it.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Subcommand;
use node_state::identity::{DataDir, ForcedCluster};
use rustix::process::{Signal, set_parent_process_death_signal};

use super::{AlignedLines, FAILED, USAGE, print, print_error, print_to_stderr};
use crate::{
    config,
    recovery::{
        DirectoryInspection, DirectoryState, EtcdTools, Maker, inspect_directory, recover_etcd,
    },
    server,
};

/// Exit code: the member can't be started. It was removed from its cluster, or its data is damaged
/// or lost.
const NO_START: u8 = 3;
/// Exit code: a member is running on this directory.
const IN_USE: u8 = 4;
/// Exit code: the directory holds no member's data.
const EMPTY: u8 = 5;

#[derive(Debug, Subcommand)]
pub(super) enum DataCommand {
    /// Show the cluster and member of a data directory, where its log ends, and its problems.
    #[command(
        long_about = "Shows the cluster and member of a data directory, where its log ends, and \
            its problems. Nothing is written, not even a lock's file; while the command runs, no \
            member can start there. The newest revision and the members are those with the whole \
            log applied, as --force-new-cluster would make them.",
        after_long_help = "EXIT CODES\n  \
            0  a member's data, whole (or a half-made new cluster, which the next start finishes)\n  \
            1  the directory can't be read    2  wrong usage\n  \
            3  no start here will do: the member was removed, or its data is damaged or lost\n  \
            4  a member runs there: only what does not change is shown    5  no member's data"
    )]
    Status {
        /// The node's data directory.
        dir: PathBuf,
        /// Print one JSON document.
        #[arg(long)]
        json: bool,
    },
    /// Make a new cluster of one from a member's data, without starting it.
    #[command(
        long_about = "Makes a new cluster of one from a member's data, as a start with \
            --force-new-cluster does, and starts nothing: for when the other members are lost for \
            good. All of the directory's log is kept; what only the others had is lost. Run again \
            before the member was started, the command prints what it made the first time. From an \
            etcd's directory, which an agent looks after, etcd's own programs make the new cluster. \
            They work on a copy, which then takes the place of the original. The original's data is \
            kept as member.of-CLUSTER beside it.",
        after_long_help = "EXIT CODES\n  \
            0  made    1  failed, or a member runs there    2  wrong usage, or no member's data\n  \
            3  no start here will do: the member was removed, or its data is damaged or lost"
    )]
    Recover {
        /// The node's data directory.
        dir: PathBuf,
        /// Accept that data which only the other members had is lost.
        #[arg(long, required = true)]
        i_accept_data_loss: bool,
        /// Only for a data directory that etcd made: the etcd of the release that made it.
        #[arg(long, value_name = "PATH", requires = "etcdutl")]
        etcd: Option<PathBuf>,
        /// Only for a data directory that etcd made: the etcdutl of the same release as --etcd. For
        /// etcd 3.4, its etcdctl.
        #[arg(long, value_name = "PATH", requires = "etcd")]
        etcdutl: Option<PathBuf>,
        /// Print one JSON document.
        #[arg(long)]
        json: bool,
    },
    /// Replace this process by a program that ends when its parent process does.
    #[command(hide = true)]
    RunTied {
        parent: u32,
        program: PathBuf,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

pub(super) fn run(command: &DataCommand) -> u8 {
    match command {
        DataCommand::Status { dir, json } => status(dir, *json),
        DataCommand::Recover { dir, json, etcd: Some(etcd), etcdutl: Some(etcdutl), .. } => {
            let tools = EtcdTools { etcd: etcd.clone(), etcdutl: etcdutl.clone() };
            recover_etcd_directory(dir, &tools, *json)
        }
        DataCommand::Recover { dir, .. } if is_etcd_directory(dir) => {
            print_to_stderr(
                "Error: it holds the data of an etcd: say --etcd and --etcdutl, which make the new cluster",
            );
            USAGE
        }
        DataCommand::Recover { dir, json, .. } => recover(dir, *json),
        DataCommand::RunTied { parent, program, arguments } => {
            print_error(&run_tied(*parent, program, arguments));
            FAILED
        }
    }
}

/// Replaces this process by `program`, which the kernel kills when the process `parent` ends.
/// Returns only if that fails.
fn run_tied(parent: u32, program: &Path, arguments: &[String]) -> io::Error {
    if let Err(errno) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return errno.into();
    }
    // If the parent ended before the kill was requested, no signal would ever come.
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    if now.and_then(|pid| u32::try_from(pid).ok()) != Some(parent) {
        return io::Error::other("whoever started this is gone");
    }
    Command::new(program).args(arguments).exec()
}

fn is_etcd_directory(dir: &Path) -> bool {
    DataDir::open_read_only(dir).is_ok_and(|(dir, _)| dir.is_etcd_directory())
}

fn recover_etcd_directory(dir: &Path, tools: &EtcdTools, json: bool) -> u8 {
    match recover_etcd(dir, tools) {
        Ok(made) => print_forced_cluster(&made, json),
        Err(error) => {
            print_error(&error);
            if error.is_final() { NO_START } else { FAILED }
        }
    }
}

fn print_forced_cluster(made: &ForcedCluster, json: bool) -> u8 {
    if json {
        return print(&serde_json::to_string(made).expect("plain text and numbers"));
    }
    print(&format!(
        "Made cluster {} of member {} of cluster {}, which is member {} now: kept all entries up to {}, {} of them not known to be committed; {} members dropped",
        made.is.cluster_id,
        made.was.member_id,
        made.was.cluster_id,
        made.is.member_id,
        made.last_index,
        made.kept_uncommitted(),
        made.dropped.len()
    ))
}

fn recover(dir: &Path, json: bool) -> u8 {
    let data_dir = format!("--data-dir={}", dir.display());
    let args = ["--name=unused".to_owned(), data_dir, "--force-new-cluster".to_owned()];
    let Ok(config::Invocation::Run(config, _)) = config::parse(args, []) else {
        unreachable!("these flags are right");
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let made = match runtime {
        Ok(runtime) => runtime.block_on(server::force_new_cluster(&config)),
        Err(error) => {
            print_error(&error);
            return FAILED;
        }
    };
    match made {
        Ok(made) => print_forced_cluster(&made, json),
        Err(error) => {
            print_error(&error);
            match error {
                error if error.is_final() => NO_START,
                error if error.is_usage() => USAGE,
                _ => FAILED,
            }
        }
    }
}

fn status(dir: &Path, json: bool) -> u8 {
    let sight = match inspect_directory(dir) {
        Ok(sight) => sight,
        Err(error) => {
            print_error(&error);
            return FAILED;
        }
    };
    let text = if json {
        serde_json::to_string(&sight).expect("text and numbers are JSON")
    } else {
        format_inspection(&sight)
    };
    match (print(text.trim_end()), sight.state) {
        (0, DirectoryState::Whole | DirectoryState::Unfinished) => 0,
        (0, DirectoryState::Removed | DirectoryState::Damaged) => NO_START,
        (0, DirectoryState::InUse) => IN_USE,
        (0, DirectoryState::Empty) => EMPTY,
        (code, _) => code,
    }
}

fn format_inspection(sight: &DirectoryInspection) -> String {
    let mut lines = AlignedLines::default();
    let state = match sight.state {
        DirectoryState::Whole => "whole",
        DirectoryState::InUse => "in use",
        DirectoryState::Unfinished => "unfinished",
        DirectoryState::Empty => "nobody's",
        DirectoryState::Removed => "removed from its cluster",
        DirectoryState::Damaged => "damaged",
    };
    lines.add("data directory", &sight.data_dir);
    lines.add("made by", if sight.maker == Maker::Etcd { "etcd" } else { "muster-node" });
    lines.add("state", state);
    lines.add_if_present("problem", sight.problem.as_ref());
    if let Some(tombstone) = &sight.tombstone {
        lines.add("removed", format!("at {}, told by {}", tombstone.at, tombstone.by));
    }
    lines.add_if_present("cluster", sight.cluster_id.as_ref());
    lines.add_if_present("member", sight.member_id.as_ref());
    lines.add_if_present("incarnation", sight.incarnation.as_ref());
    lines.add_if_present("name", sight.name.as_ref());
    lines.add_if_present("starts", sight.boots);
    if let Some(log) = &sight.log {
        let vote = log.vote.as_deref().unwrap_or("nobody");
        lines.add("term", format!("{}, voted for {vote}", log.term));
        lines.add("last entry", format!("{} of term {}", log.last_index, log.last_term));
        lines.add("known committed", log.committed);
        lines.add_if_present(
            "unfinished write",
            log.torn_at.map(|at| format!("at offset {at}: nobody was told of it")),
        );
    }
    if let Some(store) = &sight.store {
        lines.add("applied", store.applied);
        let stored = store.stored_revision;
        let newest = match sight.maker {
            Maker::MusterNode => {
                format!("{} ({stored} in the store, the rest in the log)", store.revision)
            }
            Maker::Etcd => format!("{stored} in the store, and more where the log goes further"),
        };
        lines.add("newest revision", newest);
        lines.add("compacted revision", store.compacted_revision);
        lines.add_if_present("hash", store.hash.map(|hash| format!("{hash:08x}")));
        for member in &store.members {
            let learner = if member.is_learner { ", learner" } else { "" };
            let name = if member.name.is_empty() { "not started" } else { &member.name };
            let urls = member.peer_urls.join(",");
            lines.add("a member", format!("{} {name} {urls}{learner}", member.id));
        }
    }
    if let Some(made) = &sight.forced {
        let was =
            format!("{} of cluster {}, at {}", made.was.member_id, made.was.cluster_id, made.at);
        lines.add("made of member", was);
    }
    lines.0
}
