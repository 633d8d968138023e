//! Inspects an etcd's directory without changing it.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use node_etcd_wal::EtcdLog;
use node_state::etcd_file::{EtcdFile, FileSummary, HashCheck};
use node_state::identity::{ClusterId, DataDir, ForcedCluster, Incarnation, MemberId};
use rustix::fs::{FlockOperation, flock};

use super::super::inspection::{
    DirectoryInspection, DirectoryState, InspectedMember, InspectionStop, LogInspection,
    StoreInspection, damaged_stop,
};

/// Folder of the log in the data directory.
pub(super) const WAL: &str = "member/wal";
/// Path of the store in the data directory.
pub(super) const STORE: &str = "member/snap/db";

/// Opens the store, and tries to take a shared lock on it. The returned flag is true if another
/// process, such as a running etcd, has locked the file.
pub(super) fn open_store(path: &Path) -> Result<(File, bool), std::io::Error> {
    let file = File::open(path)?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok((file, false)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok((file, true)),
        Err(errno) => Err(errno.into()),
    }
}

pub(super) fn summary(path: &Path) -> Result<FileSummary, node_state::etcd_file::EtcdFileError> {
    let file = File::open(path).map_err(node_state::etcd_file::EtcdFileError::Io)?;
    Ok(EtcdFile::open(BufReader::new(file), HashCheck::Skipped)?.summary().clone())
}

pub(in super::super) fn inspect(
    dir: &DataDir,
    marker: Option<Incarnation>,
    in_use: bool,
    sight: &mut DirectoryInspection,
) -> Result<(), InspectionStop> {
    let (_lock, runs) = open_store(&dir.join(STORE)).map_err(|error| damaged_stop(&error))?;
    sight.incarnation = marker.map(|incarnation| incarnation.to_string());
    let log = match EtcdLog::read(&dir.join(WAL)) {
        Ok(log) => log,
        Err(_) if runs || in_use => return Err(in_use_stop()),
        Err(error) => return Err(damaged_stop(&error)),
    };
    sight.cluster_id = Some(ClusterId(log.cluster).to_string());
    sight.member_id = Some(MemberId(log.member).to_string());
    // Returns whether etcd has run since the new cluster was made. etcd leaves no record of a
    // start, but each start changes the term of its log.
    let since = |made: &ForcedCluster| {
        log.cluster != made.is.cluster_id.0 || log.state.term != Some(made.base_term)
    };
    sight.forced = sight.forced.take().map(|made| if since(&made) { made.rearm() } else { made });
    if runs || in_use {
        return Err(in_use_stop());
    }
    let summary = summary(&dir.join(STORE)).map_err(|error| damaged_stop(&error))?;
    let own = summary.members.iter().find(|member| member.id == log.member);
    sight.name = own.map(|member| member.name.clone());
    let (end, applied) = (log.last_position(), summary.applied.index);
    let vote = log.state.vote.filter(|vote| *vote != 0);
    sight.log = Some(LogInspection {
        term: log.state.term.unwrap_or_default(),
        vote: vote.map(|vote| MemberId(vote).to_string()),
        base_index: log.base,
        last_index: end.index,
        last_term: end.term,
        committed: log.state.commit.unwrap_or_default().max(applied),
        torn_at: log.tail.torn.then_some(log.tail.offset),
    });
    let members = summary.members.iter().map(|member| InspectedMember {
        id: MemberId(member.id).to_string(),
        name: member.name.clone(),
        peer_urls: member.peer_urls.clone(),
        client_urls: member.client_urls.clone(),
        is_learner: member.is_learner,
    });
    sight.store = Some(StoreInspection {
        applied,
        stored_revision: summary.revision,
        revision: summary.revision,
        compacted_revision: summary.compacted,
        hash: None,
        members: members.collect(),
    });
    if sight.tombstone.is_some() {
        return Err((DirectoryState::Removed, None));
    }
    if applied > end.index {
        let problem = format!(
            "the store holds entries up to {applied}, and the log ends with {}: they are not of one moment",
            end.index
        );
        return Err((DirectoryState::Damaged, Some(problem)));
    }
    Ok(())
}

fn in_use_stop() -> InspectionStop {
    (DirectoryState::InUse, Some("an etcd runs here: stop it to see the rest".to_owned()))
}
