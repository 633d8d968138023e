//! Phase two for a new member: it asks the running cluster who its members are, compares that with
//! what it was told (`decide`), and begins with the whole state of a member that knows it.
//!
//! It can't begin with nothing: what the cluster began with is in no entry of the log. So it fetches
//! a store in which it is a member already, and its log begins there. Until its log has a name it
//! has promised nothing to anybody, and may be started again from the beginning.

mod decide;

use std::{
    io::{self, BufReader},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use muster_files::data;
use node_proto::musterpb::Census;
use prost::Message as _;
use tokio::task::JoinSet;

pub use self::decide::JoinRefusal;
pub(super) use self::decide::Joining;
use self::decide::{Newcomer, decide, has_run, may_begin};
use super::{ServerError, peers::receive};
use crate::{
    config::{Config, PeerUrl},
    identity::{InitialCluster, MemberId},
    machine::Position,
    mvcc,
    tls::PeerTls,
    transport::{self, Local},
};

/// Members that are slower to say who the members are than the first, by more than this, are not
/// waited for.
const LATE: Duration = Duration::from_secs(1);

/// A member may take as long as its handshake to say who the members are.
const PATIENCE: Duration = Duration::from_secs(10);

/// Asks the other members of `--initial-cluster`, and compares.
pub(super) async fn ask(
    config: &Config,
    tls: Option<&Arc<PeerTls>>,
) -> Result<Joining, ServerError> {
    config.check_join().map_err(ServerError::Bootstrap)?;
    let answers = answers(config, tls, PATIENCE).await;
    let key = tls.and_then(|tls| tls.node_key());
    let version = env!("CARGO_PKG_VERSION");
    Ok(decide(&Newcomer { config, key, version }, answers)?)
}

/// Before a member begins a new cluster with others, it sees that they don't run as another one: a
/// member whose disk was wiped would otherwise wait for a leader for ever. Nor with itself in it:
/// as many as are a quorum, wiped at once, would otherwise begin it again without its data.
pub(super) async fn check_not_begun(
    config: &Config,
    tls: Option<&Arc<PeerTls>>,
    initial: &InitialCluster,
) -> Result<(), ServerError> {
    let answers = answers(config, tls, LATE).await;
    let own = initial.member(&config.name);
    if own.is_some_and(|own| has_run(initial, own, &answers)) {
        return Err(ServerError::Disowned(transport::Refusal::Incarnation));
    }
    Ok(may_begin(initial, &answers)?)
}

/// What the other members of `--initial-cluster` say; the first of them has `patience`.
async fn answers(
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
        let patience = if answers.is_empty() { patience } else { LATE };
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

/// Fetches the whole state into `path`, and returns its position.
pub(super) async fn fetch(
    joining: &Joining,
    local: &Local,
    tls: Option<&Arc<PeerTls>>,
    path: &Path,
) -> Result<Position, ServerError> {
    let mut last = String::new();
    let mut refusals = Vec::new();
    for source in &joining.sources {
        let transport::Source { member: from, url, .. } = source;
        let (body, member) = (path.to_owned(), local.member);
        let install = move |received| {
            receive(&body, received)?;
            read_through(body, member)
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
                // It may be what fills the disk.
                let _ = data::remove(path);
                last = error.to_string();
                if let transport::JoinError::RefusedBy(why) = error {
                    refusals.push(why);
                }
            }
        }
    }
    match refusals.iter().find(|why| why.is_for_good()) {
        // One that errs has no say; all that were asked have.
        Some(why)
            if refusals.iter().filter(|why| why.is_for_good()).count() == joining.sources.len() =>
        {
            Err(ServerError::Disowned(*why))
        }
        _ => Err(JoinRefusal::NoState(last).into()),
    }
}

/// Reads a received state through: it must be whole, and this member one of its members.
fn read_through(path: PathBuf, member: MemberId) -> io::Result<Position> {
    let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let found = mvcc::inspect_snapshot(&mut BufReader::new(data::open(&path, data::Open::Read)?));
    let (at, members) = found.map_err(|error| wrong(error.to_string()))?;
    if members.contains(member.0) {
        Ok(at)
    } else {
        Err(wrong(format!("at {} this one is no member yet", at.index)))
    }
}
