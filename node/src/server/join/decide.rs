//! Decides whether a new member can join, and with which member id, from the answers of the
//! cluster's members. This code does no I/O.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use node_engine::transport::StateSource;
use node_proto::musterpb::Census;
use node_state::{
    identity::{ClusterId, InitialCluster, InitialMember, MemberId, NodeKey},
    membership::{Member, PeerUrl},
};

use crate::config::Config;

/// Oldest release whose cluster this build can join.
const MIN_CLUSTER_VERSION: Version = Version { major: 0, minor: 1 };

/// Reason why this member can't join. The texts are etcd's (`etcdserver/bootstrap.go`,
/// `membership.ValidateClusterAndAssignIDs`).
#[derive(Debug, thiserror::Error)]
pub enum JoinRefusal {
    /// No other member answered the request.
    #[error(
        "cannot fetch cluster info from peer urls: could not retrieve cluster information from the given URLs"
    )]
    NobodyAnswers,
    /// The answering members are of different clusters, and no cluster has more than half of them.
    #[error(
        "cluster ID mismatch: {0} and {1} answer at the peer URLs of --initial-cluster, and neither is the cluster of most of them; see which members run on another cluster's data, or began a cluster of their own"
    )]
    ConflictingClusters(ClusterId, ClusterId),
    /// Too many of the other members run in another cluster. The rest, with this member, are not a
    /// quorum of the new cluster.
    #[error(
        "cluster {running} runs already at the peer URLs of --initial-cluster, and this member, which has no data, would begin another one, {own}: to become a member of that cluster, have it added there (member add) and start it with --initial-cluster-state=existing; if it was a member before and its disk was lost, remove that member first"
    )]
    RunsAlready {
        /// Cluster of the members that answered.
        running: ClusterId,
        /// Cluster that this member would begin with `--initial-cluster`.
        own: ClusterId,
    },
    /// This build is older than the cluster, or the cluster is older than this build supports.
    #[error(
        "incompatible with current running cluster: this is muster-node {own}, and the cluster's oldest member runs {cluster}; {}",
        version_advice(.own, .cluster)
    )]
    Incompatible {
        /// Version of this build.
        own: Version,
        /// Lowest version among the cluster's members.
        cluster: Version,
    },
    /// No member's answer contains a version.
    #[error("incompatible with current running cluster: no member says which version it runs")]
    NoVersion,
    /// This member's key differs from the one that it was added with.
    #[error(
        "this member was added with the key {bound}, and the certificate in --peer-cert-file has {}: start it with the certificate of that key, or remove the member and add it with the other one",
        shown_key(.own)
    )]
    Key {
        /// Key that the cluster has recorded for this member.
        bound: NodeKey,
        /// Key of this member's certificate, if it has one.
        own: Option<NodeKey>,
    },
    /// `--initial-cluster` and the cluster have different numbers of members.
    #[error("error validating peerURLs {0}: member count is unequal")]
    MemberCountMismatch(String),
    /// A member of the cluster is missing in `--initial-cluster`.
    #[error(
        "error validating peerURLs {cluster}: unmatched member while checking PeerURLs: no match found for existing member ({id}, [{urls}])"
    )]
    Unmatched {
        /// The cluster's members, in etcd's format.
        cluster: String,
        /// ID of the missing member.
        id: MemberId,
        /// Peer URLs of the missing member.
        urls: String,
    },
    /// This member belongs to the cluster, but no member sent it the state.
    #[error("cannot fetch the cluster's state from any member: {0}")]
    NoState(String),
}

fn version_advice(own: &Version, cluster: &Version) -> &'static str {
    if own < cluster {
        "start this member with that version or a later one"
    } else {
        "bring the cluster's members to a later version first"
    }
}

fn shown_key(own: &Option<NodeKey>) -> String {
    own.map_or_else(|| "none".to_owned(), |own| own.to_string())
}

/// The parts of a version that decide whether two builds can be members of one cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    major: u64,
    minor: u64,
}

impl Version {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('.').map(|part| part.parse().ok());
        Some(Self { major: parts.next()??, minor: parts.next()?? })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// This member before it has joined the cluster.
pub(super) struct Newcomer<'a> {
    pub config: &'a Config,
    /// Public key of this member's certificate, if it has one.
    pub key: Option<NodeKey>,
    /// Version of this build.
    pub version: &'a str,
}

/// Decision to join: the cluster, this member's ID, and the members to fetch the state from.
pub(in crate::server) struct JoinDecision {
    pub cluster: ClusterId,
    /// ID of this member in the cluster.
    pub member: MemberId,
    /// Members that answered, those with the newest member list first.
    pub(super) sources: Vec<StateSource>,
}

/// Decides whether this member can join, and with which member id. The cluster is the one to which
/// more than half of the answering members belong. Its newest member list is compared with the
/// flags.
pub(super) fn decide(
    newcomer: &Newcomer<'_>,
    mut answers: Vec<(Census, PeerUrl)>,
) -> Result<JoinDecision, JoinRefusal> {
    let cluster = majority_cluster(&answers)?;
    answers.retain(|(census, url)| {
        let believed = census.cluster_id == cluster.0;
        if !believed {
            tracing::warn!(%url, cluster.id = %ClusterId(census.cluster_id), "a member of another cluster is at one of its peer URLs");
        }
        believed
    });
    check_version(newcomer.version, &answers)?;
    answers.sort_by_key(|(census, _)| Reverse(census.changed));
    let (census, _) = answers.first().ok_or(JoinRefusal::NobodyAnswers)?;
    let members = census.members.iter().cloned().map(Member::try_from);
    let members: Vec<Member> =
        members.collect::<Result<_, _>>().map_err(|_| JoinRefusal::NobodyAnswers)?;
    let own = own_record(newcomer.config, cluster, &members)?;
    if let Some(bound) = own.node_key.filter(|bound| newcomer.key != Some(*bound)) {
        return Err(JoinRefusal::Key { bound, own: newcomer.key });
    }
    let key_of = |id| members.iter().find(|member| member.id == id)?.node_key;
    let sources = answers.iter().map(|(census, url)| {
        let member = MemberId(census.member_id);
        StateSource { member, url: url.clone(), key: key_of(member) }
    });
    Ok(JoinDecision { cluster, member: own.id, sources: sources.collect() })
}

/// Whether `own`, which has no data, has run as a member of `initial` before. If so, it has lost
/// its votes and acknowledgements, even if other members have lost data too.
///
/// A member publishes its client URLs when it runs, so client URLs prove that it has run. etcd's
/// `isMemberBootstrapped` uses the same test. With a member document, the client URLs are known
/// from the beginning and prove nothing. But the document binds each member to its data directory,
/// so the answer is `false`.
pub(super) fn has_run(
    initial: &InitialCluster,
    own: &InitialMember,
    answers: &[(Census, PeerUrl)],
) -> bool {
    if own.incarnation.is_some() {
        return false;
    }
    let same = answers.iter().filter(|(census, _)| census.cluster_id == initial.id.0);
    let mut members = same.flat_map(|(census, _)| &census.members);
    members.any(|member| member.id == own.id.0 && !member.client_urls.is_empty())
}

/// Checks, from the answers of its members, whether `initial` can begin. A member that runs in
/// another cluster can't take part in `initial`. The remaining members must be able to elect a
/// leader.
pub(super) fn check_may_begin(
    initial: &InitialCluster,
    answers: &[(Census, PeerUrl)],
) -> Result<(), JoinRefusal> {
    let elsewhere: BTreeSet<(u64, u64)> = answers
        .iter()
        .filter(|(census, _)| census.cluster_id != initial.id.0)
        .map(|(census, _)| (census.cluster_id, census.member_id))
        .collect();
    let members = initial.members.len();
    match elsewhere.first() {
        Some((running, _)) if elsewhere.len() > members - (members / 2 + 1) => {
            Err(JoinRefusal::RunsAlready { running: ClusterId(*running), own: initial.id })
        }
        _ => Ok(()),
    }
}

/// Returns the cluster to which more than half of the answering members belong. A minority may
/// belong to other clusters: a member that was wiped can have begun a cluster of its own.
fn majority_cluster(answers: &[(Census, PeerUrl)]) -> Result<ClusterId, JoinRefusal> {
    let mut clusters: BTreeMap<ClusterId, BTreeSet<u64>> = BTreeMap::new();
    for (census, _) in answers {
        clusters.entry(ClusterId(census.cluster_id)).or_default().insert(census.member_id);
    }
    let all: usize = clusters.values().map(BTreeSet::len).sum();
    let mut ids = clusters.keys().copied();
    let most = clusters.iter().find(|(_, members)| members.len() * 2 > all);
    match (most, ids.next(), ids.next()) {
        (Some((cluster, _)), ..) => Ok(*cluster),
        (None, Some(one), Some(other)) => Err(JoinRefusal::ConflictingClusters(one, other)),
        _ => Err(JoinRefusal::NobodyAnswers),
    }
}

/// Checks the versions. As in etcd (`isCompatibleWithVers`), a cluster's version is that of its
/// oldest member. Members that state no version are ignored.
fn check_version(own: &str, answers: &[(Census, PeerUrl)]) -> Result<(), JoinRefusal> {
    let said = answers.iter().filter_map(|(census, _)| Version::parse(&census.version));
    let cluster = said.min().ok_or(JoinRefusal::NoVersion)?;
    let own = Version::parse(own).ok_or(JoinRefusal::NoVersion)?;
    if (MIN_CLUSTER_VERSION..=own).contains(&cluster) {
        Ok(())
    } else {
        Err(JoinRefusal::Incompatible { own, cluster })
    }
}

/// Returns the record of the member that has the URLs of this member. Every other member of the
/// cluster must have the URLs of another entry in `--initial-cluster`.
fn own_record<'a>(
    config: &Config,
    cluster: ClusterId,
    members: &'a [Member],
) -> Result<&'a Member, JoinRefusal> {
    if members.len() != config.initial_cluster.len() {
        return Err(JoinRefusal::MemberCountMismatch(format_cluster(cluster, members)));
    }
    let mut own = None;
    for member in members {
        let urls: Result<Vec<_>, _> = member.peer_urls.iter().map(|u| PeerUrl::parse(u)).collect();
        let found = urls.ok().and_then(|urls| {
            config.initial_cluster.iter().find(|(_, expected)| same_urls(&urls, expected))
        });
        match found {
            Some((name, _)) if *name == config.name => own = Some(member),
            Some(_) => {}
            None => {
                return Err(JoinRefusal::Unmatched {
                    cluster: format_cluster(cluster, members),
                    id: member.id,
                    urls: member.peer_urls.join(" "),
                });
            }
        }
    }
    // The cluster has as many members as `--initial-cluster`, each was found there, and no URL
    // occurs twice. So this member is one of the cluster's members.
    own.ok_or_else(|| JoinRefusal::MemberCountMismatch(format_cluster(cluster, members)))
}

fn same_urls(one: &[PeerUrl], other: &[PeerUrl]) -> bool {
    let within = |some: &[PeerUrl], all: &[PeerUrl]| {
        some.iter().all(|url| all.iter().any(|other| url.reaches_same(other)))
    };
    one.len() == other.len() && within(one, other) && within(other, one)
}

/// Formats a cluster as etcd's log does.
fn format_cluster(cluster: ClusterId, members: &[Member]) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Invocation;
    use node_state::identity::Incarnation;

    fn config(cluster: &str) -> Config {
        let args = ["--name=d", "--initial-cluster-state=existing"].map(str::to_owned);
        let args = args.into_iter().chain([format!("--initial-cluster={cluster}")]);
        match crate::config::parse(args, []) {
            Ok(Invocation::Run(config, _)) => *config,
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
                changed_at: 0,
                vote_when_ready: false,
                operations: Vec::new(),
            };
            (&member).into()
        });
        let census = Census {
            cluster_id: 0xc1,
            member_id: 1,
            changed,
            members: members.collect(),
            version: "0.1.0".to_owned(),
            own_peer_urls: Vec::new(),
        };
        (census, PeerUrl::parse("http://127.0.0.1:1").unwrap())
    }

    const A: (u64, &str) = (0xa, "http://127.0.0.1:1");
    const D: (u64, &str) = (0xd, "http://127.0.0.1:4 http://127.0.0.1:5");

    fn own_config() -> Config {
        config("a=http://127.0.0.1:1,d=http://127.0.0.1:5,d=http://localhost:4")
    }

    fn joins(answers: Vec<(Census, PeerUrl)>) -> Result<JoinDecision, JoinRefusal> {
        decide(&Newcomer { config: &own_config(), key: None, version: "0.1.9" }, answers)
    }

    fn refusal(answers: Vec<(Census, PeerUrl)>) -> String {
        joins(answers).map(|joining| joining.member).unwrap_err().to_string()
    }

    #[test]
    fn a_joining_member_is_the_one_with_its_peer_urls() {
        let joining = joins(vec![census(7, &[A, D])]).unwrap();
        assert_eq!((joining.cluster, joining.member), (ClusterId(0xc1), MemberId(0xd)));
    }

    #[test]
    fn the_answer_with_the_newest_member_list_counts() {
        let behind = census(3, &[A]);
        let joining = joins(vec![behind.clone(), census(7, &[A, D])]).unwrap();
        assert_eq!(joining.member, MemberId(0xd));
        assert!(refusal(vec![behind]).contains("member count is unequal"));
    }

    #[test]
    fn a_mismatch_is_refused_with_etcds_text() {
        assert!(refusal(Vec::new()).contains("could not retrieve cluster information"));
        let elsewhere = census(7, &[A, (0xd, "http://127.0.0.1:4")]);
        assert_eq!(
            refusal(vec![elsewhere]),
            "error validating peerURLs {ClusterID:c1 Members:[&{ID:a RaftAttributes:{PeerURLs:[http://127.0.0.1:1] IsLearner:false} Attributes:{Name: ClientURLs:[]}} &{ID:d RaftAttributes:{PeerURLs:[http://127.0.0.1:4] IsLearner:false} Attributes:{Name: ClientURLs:[]}}] RemovedMemberIDs:[]}: unmatched member while checking PeerURLs: no match found for existing member (d, [http://127.0.0.1:4])"
        );
    }

    /// Returns a census as if member `id` of cluster `cluster` had sent it.
    fn census_from(id: u64, cluster: u64) -> (Census, PeerUrl) {
        let (mut census, url) = census(7, &[A, D]);
        (census.member_id, census.cluster_id) = (id, cluster);
        (census, url)
    }

    #[test]
    fn the_cluster_of_more_than_half_of_the_answering_members_counts() {
        let ahead = |(mut census, url): (Census, PeerUrl)| {
            census.changed = 99;
            (census, url)
        };
        let joining =
            joins(vec![ahead(census_from(3, 0xc2)), census_from(1, 0xc1), census_from(2, 0xc1)])
                .unwrap();
        assert_eq!(joining.cluster, ClusterId(0xc1));
        let asked: Vec<u64> = joining.sources.iter().map(|source| source.member.0).collect();
        assert_eq!(asked, [1, 2], "a stranger is not asked for the state");
        for tie in [
            vec![census_from(1, 0xc1), census_from(3, 0xc2)],
            // Member 1 has answered at two of its URLs, and counts once.
            vec![census_from(1, 0xc1), census_from(1, 0xc1), census_from(3, 0xc2)],
            vec![
                census_from(1, 0xc1),
                census_from(2, 0xc1),
                census_from(3, 0xc2),
                census_from(4, 0xc3),
            ],
        ] {
            assert!(refusal(tie).contains("cluster ID mismatch: c1 and c2"));
        }
    }

    #[test]
    fn a_cluster_begins_unless_too_many_of_its_members_run_in_another_one() {
        let names = ["a", "b", "c", "d", "e"].map(str::to_owned);
        let members = names.map(|name| (name.clone(), vec![format!("http://{name}:1")]));
        let of = |n: usize| InitialCluster::new(&members[..n], "t", None);
        let own = |id| census_from(id, of(3).id.0);
        assert!(check_may_begin(&of(1), &[]).is_ok());
        assert!(check_may_begin(&of(3), &[own(1), own(2)]).is_ok());
        assert!(check_may_begin(&of(3), &[own(1), census_from(2, 0xc2)]).is_ok(), "two are left");
        let twice = [census_from(2, 0xc2), census_from(2, 0xc2)];
        assert!(check_may_begin(&of(3), &twice).is_ok(), "a member at two URLs is one");
        let elsewhere = [census_from(1, 0xc1), census_from(2, 0xc1), census_from(3, 0xc2)];
        for (members, answers) in [(2, 1), (3, 2), (4, 2), (5, 3)] {
            let refused =
                check_may_begin(&of(members), &elsewhere[..answers]).unwrap_err().to_string();
            assert!(refused.starts_with("cluster c1 runs already"), "{refused}");
            assert!(check_may_begin(&of(members), &elsewhere[..answers - 1]).is_ok(), "{members}");
        }
    }

    #[test]
    fn a_member_without_data_has_run_if_another_member_lists_its_client_urls() {
        let members = ["a", "b"].map(|n| (n.to_owned(), vec![format!("http://{n}:1")]));
        let initial = InitialCluster::new(&members, "t", None);
        let own = initial.member("a").unwrap();
        let listed = |cluster_id, id: MemberId, client_urls: &[&str]| {
            let (mut census, url) = census(7, &[(id.0, "http://a:1")]);
            census.cluster_id = cluster_id;
            census.members[0].client_urls = client_urls.iter().map(|u| (*u).to_owned()).collect();
            (census, url)
        };
        let (cluster, ran) = (initial.id.0, &["http://a:2"][..]);
        let began = |answers: &[(Census, PeerUrl)]| has_run(&initial, own, answers);
        assert!(!began(&[]));
        assert!(!began(&[listed(cluster, own.id, &[])]), "it was agreed on, and has not run");
        assert!(!began(&[listed(0xc1, own.id, ran)]), "in another cluster");
        assert!(!began(&[listed(cluster, MemberId(1), ran)]), "somebody else");
        let both = [listed(cluster, own.id, &[]), listed(cluster, own.id, ran)];
        assert!(began(&both));
        let bound = InitialMember { incarnation: Some(Incarnation::random()), ..own.clone() };
        assert!(!has_run(&initial, &bound, &both), "a document has said so from the beginning");
    }

    fn of_version(text: &str) -> (Census, PeerUrl) {
        let (mut census, url) = census(7, &[A, D]);
        census.version = text.to_owned();
        (census, url)
    }

    #[test]
    fn a_cluster_has_its_oldest_members_version_and_no_older_build_joins_it() {
        let join = |own, cluster: &[&str]| {
            let answers = cluster.iter().map(|version| of_version(version)).collect();
            let joined =
                decide(&Newcomer { config: &own_config(), key: None, version: own }, answers);
            joined.map(|_| ()).map_err(|refusal| refusal.to_string())
        };
        for (own, cluster) in [
            ("0.1.0", &["0.1.7"][..]),
            ("0.2.0", &["0.1.0"]),
            ("1.0.0", &["0.9.0"]),
            ("0.2.0", &["0.3.0", "0.2.5"]),
            ("0.2.0-rc.1", &["0.2.0"]),
            ("0.2.0", &["", "0.2.0"]),
        ] {
            assert_eq!(join(own, cluster), Ok(()), "{own} {cluster:?}");
        }
        let etcds = "incompatible with current running cluster: ";
        for (own, cluster, said) in [
            ("0.1.9", &["0.2.0"][..], "start this member with that version or a later one"),
            (
                "0.2.0",
                &["1.0.0", "0.3.0"],
                "this is muster-node 0.2, and the cluster's oldest member runs 0.3",
            ),
            ("0.2.0", &["0.0.9"], "bring the cluster's members to a later version first"),
            ("0.2.0", &["", "1", "x.y"], "no member says"),
        ] {
            let refused = join(own, cluster).unwrap_err();
            assert!(refused.starts_with(etcds) && refused.contains(said), "{refused}");
        }
    }

    #[test]
    fn a_joining_member_must_have_its_bound_key_and_learns_the_keys_of_others() {
        let keyed = |own: Option<NodeKey>| {
            let (mut census, url) = census(7, &[A, D]);
            (census.member_id, census.members[0].node_key) = (0xa, vec![7; 32].into());
            census.members[1].node_key = vec![9; 32].into();
            decide(
                &Newcomer { config: &own_config(), key: own, version: "0.1.0" },
                vec![(census, url)],
            )
        };
        let joining = keyed(Some(NodeKey([9; 32]))).unwrap();
        assert_eq!(joining.sources[0].key, Some(NodeKey([7; 32])));
        for other in [None, Some(NodeKey([8; 32]))] {
            let refused = keyed(other).map(|joining| joining.member).unwrap_err();
            assert!(matches!(refused, JoinRefusal::Key { own, .. } if own == other), "{refused}");
        }
        assert!(joins(vec![census(7, &[A, D])]).is_ok(), "without a binding any key will do");
    }
}
