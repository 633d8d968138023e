//! Joining of a new member. It asks the running cluster for its members and compares them with its
//! flags (`decide`). Then it fetches the whole state from another member. The member table in that
//! state already contains the new member.
//!
//! A new member can't begin without data, because the cluster's initial state isn't in the log. Its
//! own log begins at the position of the fetched state. Until that log has its final name, the
//! member has sent no vote or acknowledgement, and may start again from the beginning.

mod decide;

use std::{
    io::{self, BufReader},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use muster_files::data;
use node_engine::{
    tls::PeerTls,
    transport::{self, LocalMember},
};
use node_proto::musterpb::Census;
use node_state::{
    identity::{InitialCluster, MemberId},
    membership::PeerUrl,
    mvcc,
    state_machine::Position,
};
use prost::Message as _;
use tokio::task::JoinSet;

pub(super) use self::decide::JoinDecision;
pub use self::decide::JoinRefusal;
use self::decide::{Newcomer, check_may_begin, decide, has_run};
use super::{ServerError, peers::receive};
use crate::config::Config;

/// Time to wait for further answers about the members after the first one. A member that begins a
/// new cluster waits this long for the first answer, too.
const LATE_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit for the first answer about the members, as long as a handshake may take.
const FIRST_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Asks the other members of `--initial-cluster`, and decides whether this member can join, and
/// with which member id.
pub(super) async fn decide_join(
    config: &Config,
    tls: Option<&Arc<PeerTls>>,
) -> Result<JoinDecision, ServerError> {
    config.check_join().map_err(ServerError::Bootstrap)?;
    let answers = fetch_member_lists(config, tls, FIRST_ANSWER_TIMEOUT).await;
    let key = tls.and_then(|tls| tls.node_key());
    let version = env!("CARGO_PKG_VERSION");
    Ok(decide(&Newcomer { config, key, version }, answers)?)
}

/// Checks, before a member begins a new cluster, that the cluster doesn't run already.
///
/// - Too many of the other members may run in another cluster. Without this check, a member whose
///   disk was wiped would then wait for a leader for ever.
/// - If the other members know that this member has run, it has lost its data. Without this check,
///   a quorum of wiped members could begin the cluster again without the data.
pub(super) async fn check_not_begun(
    config: &Config,
    tls: Option<&Arc<PeerTls>>,
    initial: &InitialCluster,
) -> Result<(), ServerError> {
    let answers = fetch_member_lists(config, tls, LATE_ANSWER_TIMEOUT).await;
    let own = initial.member(&config.name);
    if own.is_some_and(|own| has_run(initial, own, &answers)) {
        return Err(ServerError::Disowned(transport::StreamRefusal::Incarnation));
    }
    Ok(check_may_begin(initial, &answers)?)
}

/// Asks the other members of `--initial-cluster` for their member lists. Waits up to `patience` for
/// the first answer.
async fn fetch_member_lists(
    config: &Config,
    tls: Option<&Arc<PeerTls>>,
    patience: Duration,
) -> Vec<(Census, PeerUrl)> {
    let others = config.initial_cluster.iter().filter(|(name, _)| *name != config.name);
    let mut asked = JoinSet::new();
    for url in others.flat_map(|(_, urls)| urls).cloned() {
        let tls = tls.cloned();
        asked.spawn(async move {
            let answer = transport::ask_members(&url, tls.as_ref()).await;
            (url, answer)
        });
    }
    let mut answers = Vec::new();
    loop {
        let patience = if answers.is_empty() { patience } else { LATE_ANSWER_TIMEOUT };
        let Ok(Some(Ok((url, answer)))) = tokio::time::timeout(patience, asked.join_next()).await
        else {
            return answers;
        };
        match answer.map(Census::decode) {
            Ok(Ok(census)) => answers.push((census, url)),
            Ok(Err(error)) => tracing::warn!(%url, %error, "a member's answer can't be read"),
            Err(error) => tracing::info!(%url, %error, "failed to get cluster response"),
        }
    }
}

/// Fetches the whole state into `path`, and returns its log position. Asks one member after the
/// other until one sends it.
pub(super) async fn fetch(
    joining: &JoinDecision,
    local: &LocalMember,
    tls: Option<&Arc<PeerTls>>,
    path: &Path,
) -> Result<Position, ServerError> {
    let mut last = String::new();
    let mut refusals = Vec::new();
    for source in &joining.sources {
        let transport::StateSource { member: from, url, .. } = source;
        let (body, member) = (path.to_owned(), local.member);
        let install = move |received| {
            receive(&body, received)?;
            check_state(body, member)
        };
        let started = Instant::now();
        match transport::fetch_state(source, tls, local, install).await {
            Ok(at) => {
                let duration_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
                tracing::info!(%url, peer.member.id = %from, index = at.index, duration_ms, "fetched the cluster's state");
                return Ok(at);
            }
            Err(error) => {
                tracing::warn!(%url, peer.member.id = %from, %error, "cannot fetch the cluster's state");
                // The partial file is removed at once, because it may have filled the disk.
                let _ = data::remove(path);
                last = error.to_string();
                if let transport::JoinError::RefusedBy(why) = error {
                    refusals.push(why);
                }
            }
        }
    }
    match refusals.iter().find(|why| why.is_permanent()) {
        // `Disowned` is returned only if every member that was asked refuses this one for good. A
        // single member may be wrong.
        Some(why)
            if refusals.iter().filter(|why| why.is_permanent()).count()
                == joining.sources.len() =>
        {
            Err(ServerError::Disowned(*why))
        }
        _ => Err(JoinRefusal::NoState(last).into()),
    }
}

/// Checks a received state: it must be complete, and this member must be one of its members.
fn check_state(path: PathBuf, member: MemberId) -> io::Result<Position> {
    let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let found =
        mvcc::inspect_snapshot(&mut BufReader::new(data::open(&path, data::OpenMode::Read)?));
    let (at, members) = found.map_err(|error| wrong(error.to_string()))?;
    if members.contains(member.0) {
        Ok(at)
    } else {
        Err(wrong(format!("at {} this one is no member yet", at.index)))
    }
}
