//! Phase two for a new member: it asks the running cluster who its members are, compares that with
//! what it was told, and begins with the whole state of a member that knows it.
//!
//! It can't begin with nothing: what the cluster began with is in no entry of the log. So it fetches
//! a store in which it is a member already, and its log begins there. Until its log has a name it
//! has promised nothing to anybody, and may be started again from the beginning.

use std::{
    fs::File,
    io::{self, BufReader},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use node_proto::musterpb::Census;
use prost::Message as _;
use tokio::task::JoinSet;

use super::{ServerError, peers::receive};
use crate::{
    config::{Config, PeerUrl},
    identity::{ClusterId, MemberId},
    machine::Position,
    membership::Member,
    mvcc,
    tls::PeerTls,
    transport::{self, Local},
};

/// Members that are slower to say who the members are than the first, by more than this, are not
/// waited for.
const LATE: Duration = Duration::from_secs(1);

/// Why this member can't join. Texts are etcd's (`etcdserver/bootstrap.go`,
/// `membership.ValidateClusterAndAssignIDs`).
#[derive(Debug, thiserror::Error)]
pub enum JoinRefusal {
    /// Nobody answered.
    #[error(
        "cannot fetch cluster info from peer urls: could not retrieve cluster information from the given URLs"
    )]
    NobodyAnswers,
    /// Those who answered are members of different clusters.
    #[error("cluster ID mismatch: {0} and {1} answer at the peer URLs of --initial-cluster")]
    Clusters(ClusterId, ClusterId),
    /// `--initial-cluster` has another number of members than the cluster.
    #[error("error validating peerURLs {0}: member count is unequal")]
    Count(String),
    /// A member of the cluster is not in `--initial-cluster`.
    #[error(
        "error validating peerURLs {cluster}: unmatched member while checking PeerURLs: no match found for existing member ({id}, [{urls}])"
    )]
    Unmatched {
        /// The cluster, as etcd shows one.
        cluster: String,
        /// Which member.
        id: MemberId,
        /// Where it is reached.
        urls: String,
    },
    /// It is a member, and nobody gave it the state.
    #[error("cannot fetch the cluster's state from any member: {0}")]
    NoState(String),
}

/// What the cluster has said.
pub(super) struct Joining {
    pub cluster: ClusterId,
    /// Which of its members this one is.
    pub member: MemberId,
    /// Who has answered, the most advanced first.
    sources: Vec<(MemberId, PeerUrl)>,
}

/// Asks the other members of `--initial-cluster`, and compares.
pub(super) async fn ask(
    config: &Config,
    tls: Option<&Arc<PeerTls>>,
) -> Result<Joining, ServerError> {
    config.check_join().map_err(ServerError::Bootstrap)?;
    let others = config.initial_cluster.iter().filter(|(name, _)| *name != config.name);
    let mut asked = JoinSet::new();
    for url in others.flat_map(|(_, urls)| urls).cloned() {
        let tls = tls.cloned();
        asked.spawn(async move {
            let answer = transport::ask_members(&url, tls.as_ref()).await;
            (url, answer)
        });
    }
    let mut answers: Vec<(Census, PeerUrl)> = Vec::new();
    loop {
        let patience = if answers.is_empty() { Duration::MAX } else { LATE };
        let Ok(Some(answer)) = tokio::time::timeout(patience, asked.join_next()).await else {
            break;
        };
        match answer.map_err(|_| JoinRefusal::NobodyAnswers)? {
            (url, Ok(answer)) => match Census::decode(answer) {
                Ok(census) => answers.push((census, url)),
                Err(error) => tracing::warn!(%url, %error, "a member's answer can't be read"),
            },
            (url, Err(error)) => tracing::warn!(%url, %error, "failed to get cluster response"),
        }
    }
    Ok(decide(config, answers)?)
}

/// The most advanced answer is compared with the flags.
fn decide(config: &Config, mut answers: Vec<(Census, PeerUrl)>) -> Result<Joining, JoinRefusal> {
    answers.sort_by_key(|(census, _)| std::cmp::Reverse(census.changed));
    let (census, _) = answers.first().ok_or(JoinRefusal::NobodyAnswers)?;
    let cluster = ClusterId(census.cluster_id);
    let other = answers.iter().find(|(other, _)| other.cluster_id != cluster.0);
    if let Some((other, _)) = other {
        return Err(JoinRefusal::Clusters(cluster, ClusterId(other.cluster_id)));
    }
    let members = census.members.iter().cloned().map(Member::try_from);
    let members: Vec<Member> =
        members.collect::<Result<_, _>>().map_err(|_| JoinRefusal::NobodyAnswers)?;
    let member = own_id(config, cluster, &members)?;
    let sources = answers.iter().map(|(census, url)| (MemberId(census.member_id), url.clone()));
    Ok(Joining { cluster, member, sources: sources.collect() })
}

/// The id of the member that has this one's URLs; every other member must have those of another one
/// of `--initial-cluster`.
fn own_id(
    config: &Config,
    cluster: ClusterId,
    members: &[Member],
) -> Result<MemberId, JoinRefusal> {
    if members.len() != config.initial_cluster.len() {
        return Err(JoinRefusal::Count(shown(cluster, members)));
    }
    let mut own = None;
    for member in members {
        let urls: Result<Vec<_>, _> = member.peer_urls.iter().map(|u| PeerUrl::parse(u)).collect();
        let found = urls.ok().and_then(|urls| {
            config.initial_cluster.iter().find(|(_, expected)| same_places(&urls, expected))
        });
        match found {
            Some((name, _)) if *name == config.name => own = Some(member.id),
            Some(_) => {}
            None => {
                return Err(JoinRefusal::Unmatched {
                    cluster: shown(cluster, members),
                    id: member.id,
                    urls: member.peer_urls.join(" "),
                });
            }
        }
    }
    // As many members as flags, all found, and no URL twice: this one is among them.
    own.ok_or_else(|| JoinRefusal::Count(shown(cluster, members)))
}

fn same_places(one: &[PeerUrl], other: &[PeerUrl]) -> bool {
    let within = |some: &[PeerUrl], all: &[PeerUrl]| {
        some.iter().all(|url| all.iter().any(|other| url.reaches_same(other)))
    };
    one.len() == other.len() && within(one, other) && within(other, one)
}

/// As etcd's log shows a cluster.
fn shown(cluster: ClusterId, members: &[Member]) -> String {
    let members: Vec<String> = members
        .iter()
        .map(|member| {
            let (peers, clients) = (member.peer_urls.join(" "), member.client_urls.join(" "));
            format!(
                "&{{ID:{} RaftAttributes:{{PeerURLs:[{peers}] IsLearner:{}}} Attributes:{{Name:{} ClientURLs:[{clients}]}}}}",
                member.id, member.is_learner, member.name
            )
        })
        .collect();
    format!("{{ClusterID:{cluster} Members:[{}] RemovedMemberIDs:[]}}", members.join(" "))
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
    for (from, url) in &joining.sources {
        let (path, member) = (path.to_owned(), local.member);
        let install = move |body| {
            receive(&path, body)?;
            read_through(path, member)
        };
        match transport::fetch_state(url, tls, local, *from, install).await {
            Ok(at) => return Ok(at),
            Err(error) => {
                tracing::warn!(%url, peer.member.id = %from, %error, "cannot fetch the cluster's state");
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
    let found = mvcc::inspect_snapshot(&mut BufReader::new(File::open(path)?));
    let (at, members) = found.map_err(|error| wrong(error.to_string()))?;
    if members.contains(member.0) {
        Ok(at)
    } else {
        Err(wrong(format!("at {} this one is no member yet", at.index)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Command;

    fn config(cluster: &str) -> Config {
        let args = ["--name=d", "--initial-cluster-state=existing"].map(str::to_owned);
        let args = args.into_iter().chain([format!("--initial-cluster={cluster}")]);
        match crate::config::parse(args, []) {
            Ok(Command::Run(config, _)) => *config,
            other => panic!("{other:?}"),
        }
    }

    fn census(changed: u64, members: &[(u64, &str)]) -> (Census, PeerUrl) {
        let members = members.iter().map(|(id, urls)| {
            let urls = urls.split(' ').map(str::to_owned).collect();
            let member = Member {
                id: MemberId(*id),
                name: String::new(),
                peer_urls: urls,
                client_urls: Vec::new(),
                is_learner: false,
                incarnation: None,
                node_key: None,
                changed: 0,
                vote_when_ready: false,
                operations: Vec::new(),
            };
            (&member).into()
        });
        let census = Census { cluster_id: 0xc1, member_id: 1, changed, members: members.collect() };
        (census, PeerUrl::parse("http://127.0.0.1:1").unwrap())
    }

    const A: (u64, &str) = (0xa, "http://127.0.0.1:1");
    const D: (u64, &str) = (0xd, "http://127.0.0.1:4 http://127.0.0.1:5");

    fn told() -> Config {
        config("a=http://127.0.0.1:1,d=http://127.0.0.1:5,d=http://localhost:4")
    }

    fn refusal(answers: Vec<(Census, PeerUrl)>) -> String {
        decide(&told(), answers).map(|joining| joining.member).unwrap_err().to_string()
    }

    #[test]
    fn a_joiner_is_who_has_its_urls() {
        let joining = decide(&told(), vec![census(7, &[A, D])]).unwrap();
        assert_eq!((joining.cluster, joining.member), (ClusterId(0xc1), MemberId(0xd)));
    }

    #[test]
    fn the_most_advanced_answer_counts() {
        let behind = census(3, &[A]);
        let joining = decide(&told(), vec![behind.clone(), census(7, &[A, D])]).unwrap();
        assert_eq!(joining.member, MemberId(0xd));
        assert!(refusal(vec![behind]).contains("member count is unequal"));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_etcds_words() {
        assert!(refusal(Vec::new()).contains("could not retrieve cluster information"));
        let elsewhere = census(7, &[A, (0xd, "http://127.0.0.1:4")]);
        assert_eq!(
            refusal(vec![elsewhere]),
            "error validating peerURLs {ClusterID:c1 Members:[&{ID:a RaftAttributes:{PeerURLs:[http://127.0.0.1:1] IsLearner:false} Attributes:{Name: ClientURLs:[]}} &{ID:d RaftAttributes:{PeerURLs:[http://127.0.0.1:4] IsLearner:false} Attributes:{Name: ClientURLs:[]}}] RemovedMemberIDs:[]}: unmatched member while checking PeerURLs: no match found for existing member (d, [http://127.0.0.1:4])"
        );
        let mut other = census(7, &[A, D]);
        other.0.cluster_id = 0xc2;
        assert!(
            refusal(vec![census(8, &[A, D]), other]).contains("cluster ID mismatch: c1 and c2")
        );
    }
}
