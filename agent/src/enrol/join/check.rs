//! Asks the cluster itself, over mutual TLS, whether it is the ticket's cluster and lists this
//! host.

use std::collections::BTreeSet;

use discovery_types::api::InitialMember;
use discovery_types::digest::MemberId;
use discovery_types::document::VerifiedDocument;
use discovery_types::jws::Jws;
use discovery_types::record::Record;
use discovery_types::recovery::{RecoveryChain, RecoveryError};
use discovery_types::statement::StatementChain;
use discovery_types::url::NodeUrl;
use futures_util::future::join_all;

use super::{Newcomer, RedeemedTicket};
use crate::cluster::{self, ClusterApiClient, ClusterError, MemberList};
use crate::endpoint::{ClientEndpoint, ClientTlsIdentity};
use crate::exit::{ExitError, error_chain};
use crate::state::Layout;
use crate::state::journal::Admission;
use crate::steward::RECOVERIES;

/// The list of members with which a newcomer's node begins.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InitialCluster {
    /// The members, this host included.
    pub members: Vec<InitialMember>,
    /// Client URLs of the other members.
    pub client_urls: Vec<String>,
    /// The chain of recoveries from the founded cluster to the present one.
    pub recoveries: RecoveryChain,
}

/// Why this host can't become a member of the cluster that has answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum PlacementError {
    /// The cluster at these addresses is not the one of the commit document, and no recovery
    /// statements lead from that one to it.
    #[error(
        "the cluster at these addresses is {found:016x}, and the one that this ticket is for was founded as {founded:016x}; no recovery statement there leads from one to the other"
    )]
    OtherCluster {
        /// Id of the Raft cluster that answered.
        found: u64,
        /// Raft cluster id of the founded cluster, which follows from its commit document.
        founded: u64,
    },
    /// The cluster's store has recovery statements that are invalid or not signed by an operator.
    #[error("the cluster at these addresses, {found:016x}, says that it is a recovered one")]
    Recovery {
        /// Id of the Raft cluster that answered.
        found: u64,
        /// Why the recovery statements are invalid.
        #[source]
        source: RecoveryError,
    },
    /// The cluster doesn't list this host's member id.
    #[error(
        "discovery says that the cluster has added this host as {0}, and the cluster doesn't list it: it was taken out again, or discovery is wrong. Ask for a new ticket, after muster-agent reset"
    )]
    Absent(MemberId),
    /// The cluster lists this host's member id with other addresses.
    #[error("the cluster lists member {0} at other addresses than this host's")]
    OtherAddresses(MemberId),
    /// The cluster lists a member with a peer URL that can't be parsed.
    #[error("the cluster lists a member at {0:?}, which is no address")]
    InvalidUrl(String),
}

impl PlacementError {
    /// Returns whether the problem may be temporary. Every client with write access can damage the
    /// recovery statements in the store; the leader's agent then writes the right statements again.
    fn is_transient(&self) -> bool {
        matches!(self, Self::Recovery { .. })
    }
}

/// One member's answer about its cluster.
#[derive(Clone, Debug)]
struct MemberAnswer {
    members: MemberList,
    /// The recovery statements in the cluster's store.
    recoveries: Vec<Jws>,
}

impl Newcomer<'_> {
    /// Asks the cluster's members until an acceptable answer lists this host. Fails if the answers
    /// can't become acceptable later.
    pub(super) async fn ask_cluster(
        &mut self,
        ticket: &RedeemedTicket,
        member: MemberId,
    ) -> Result<InitialCluster, ExitError> {
        let founders = ticket.document.records().iter();
        let founders =
            founders.flat_map(|record| record.client_urls.iter().map(NodeUrl::to_string));
        let founders: BTreeSet<String> = founders.collect();
        loop {
            let mut urls = founders.clone();
            // These URLs are only hints: a server has to prove that it belongs to the cluster.
            urls.extend(self.host.hints.iter().cloned());
            // Also ask the members that discovery knows: those added later, and those of a
            // recovered cluster.
            if let Ok(directory) = self.client.directory(self.join.cluster).await {
                let members = directory.view.into_iter().flat_map(|view| view.membership.members);
                urls.extend(members.flat_map(|member| member.client_urls));
            }
            let mut next =
                "if its members have moved, say --cluster-address with one's new address"
                    .to_owned();
            let why = match ask_members(&self.protocol.layout, &urls).await {
                Ok(words) => {
                    let found =
                        choose_cluster(&words, &ticket.document, &ticket.chain, |members| {
                            initial_cluster(members, member, &self.record)
                        });
                    match found {
                        Ok(listed) => return Ok(listed),
                        Err(error) if error.is_transient() => error_chain(&error),
                        Err(error) => return Err(ExitError::DoNotRestart(error_chain(&error))),
                    }
                }
                Err(error) => {
                    if matches!(error, ClusterError::Refused { .. }) {
                        next = format!(
                            "if it has users, make this host's: etcdctl user add muster:{member} --no-password, then etcdctl user grant-role muster:{member} root"
                        );
                    }
                    error_chain(&error)
                }
            };
            self.wait_before_retry(format!("waiting for an answer of the cluster: {why}; {next}"))
                .await;
        }
    }
}

/// Returns the client ports at these URLs. Connections to them use this host's member certificate.
fn endpoints_at(
    layout: &Layout,
    urls: &BTreeSet<String>,
) -> Result<Vec<ClientEndpoint>, ClusterError> {
    let identity = ClientTlsIdentity::load_own(&layout.tls())?;
    Ok(urls.iter().filter_map(|url| ClientEndpoint::of_member(url, Some(&identity)).ok()).collect())
}

/// Makes a client for these client URLs, with this host's member certificate.
pub(crate) fn cluster_client(
    layout: &Layout,
    urls: &BTreeSet<String>,
) -> Result<ClusterApiClient, ClusterError> {
    Ok(ClusterApiClient::new(endpoints_at(layout, urls)?))
}

/// Collects the answers of all members at these URLs. After a recovery, members of two clusters may
/// answer: those of the new cluster, and restarted members of the old one.
async fn ask_members(
    layout: &Layout,
    urls: &BTreeSet<String>,
) -> Result<Vec<MemberAnswer>, ClusterError> {
    let words = endpoints_at(layout, urls)?.into_iter().map(|endpoint| async {
        let cluster = ClusterApiClient::new(vec![endpoint]);
        let members = cluster.list_members().await?;
        let stored = cluster.read_key(RECOVERIES).await?;
        let parsed = stored.value.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Ok(MemberAnswer { members, recoveries: parsed.unwrap_or_default() })
    });
    let (mut answers, mut errors) = (Vec::new(), Vec::new());
    for word in join_all(words).await {
        match word {
            Ok(word) => answers.push(word),
            Err(error) => errors.push(error),
        }
    }
    if answers.is_empty() { Err(most_informative_error(errors)) } else { Ok(answers) }
}

/// Returns the error of a member that answered, if there is one. Otherwise returns the reasons why
/// no member could be reached. Founders that have left the cluster stay unreachable, and must not
/// hide a member's answer.
fn most_informative_error(errors: Vec<ClusterError>) -> ClusterError {
    let mut unreachable = Vec::new();
    for error in errors {
        match error {
            ClusterError::Unreachable(reasons) => unreachable.extend(reasons),
            error => return error,
        }
    }
    ClusterError::Unreachable(unreachable)
}

/// Returns the initial cluster for this host, from the first answer that is acceptable. An answer
/// is acceptable if its cluster lists this host, and is the cluster of `document` or one recovered
/// from it. If no answer is acceptable, returns the error of the first one.
fn choose_cluster(
    words: &[MemberAnswer],
    document: &VerifiedDocument,
    chain_of: &StatementChain,
    listed: impl Fn(&MemberList) -> Result<InitialCluster, PlacementError>,
) -> Result<InitialCluster, PlacementError> {
    let founded = cluster::founded_cluster_id(document);
    let mut first = None;
    for MemberAnswer { members, recoveries } in words {
        let found = members.cluster_id;
        let recoveries = if found == founded { &[][..] } else { recoveries };
        let verified = RecoveryChain::verify(recoveries, chain_of, founded)
            .map_err(|source| PlacementError::Recovery { found, source });
        let listed = verified.and_then(|recoveries| {
            if recoveries.raft_cluster().unwrap_or(founded) != found {
                return Err(PlacementError::OtherCluster { found, founded });
            }
            listed(members).map(|listed| InitialCluster { recoveries, ..listed })
        });
        match listed {
            Ok(listed) => return Ok(listed),
            Err(error) => first = first.or(Some(error)),
        }
    }
    Err(first.unwrap_or(PlacementError::OtherCluster { found: 0, founded }))
}

/// Returns the cluster's current members, for a node whose first start comes long after the
/// admission. `None` if no member answers, or this host is not listed.
pub(crate) async fn current_initial_members(
    layout: &Layout,
    admission: &Admission,
    cluster_id: u64,
    own: &Record,
) -> Option<Vec<InitialMember>> {
    let urls = admission.client_urls.iter().cloned().collect();
    let words = ask_members(layout, &urls).await.ok()?;
    let mut same = words.iter().filter(|word| word.members.cluster_id == cluster_id);
    same.find_map(|word| initial_cluster(&word.members, admission.member, own).ok())
        .map(|listed| listed.members)
}

/// Returns whether the cluster at `urls` lists a member with this id.
pub(crate) async fn is_listed(layout: &Layout, urls: &BTreeSet<String>, id: MemberId) -> bool {
    let words = ask_members(layout, urls).await.unwrap_or_default();
    words.iter().any(|word| word.members.list.iter().any(|member| member.id.0 == id.get()))
}

fn initial_cluster(
    members: &MemberList,
    own_id: MemberId,
    own: &Record,
) -> Result<InitialCluster, PlacementError> {
    let of_id = |member: &&cluster::ClusterMember| member.id.0 == own_id.get();
    let found = members.list.iter().find(of_id).ok_or(PlacementError::Absent(own_id))?;
    let urls: BTreeSet<String> = own.peer_urls.iter().map(NodeUrl::to_string).collect();
    if found.peer_urls.iter().cloned().collect::<BTreeSet<_>>() != urls {
        return Err(PlacementError::OtherAddresses(own_id));
    }
    let mut initial = Vec::new();
    for member in &members.list {
        let name = name_for_flag(member, &members.list, own_id, own);
        for url in &member.peer_urls {
            let peer_url = url.parse().map_err(|_| PlacementError::InvalidUrl(url.clone()))?;
            initial.push(InitialMember { name: name.clone(), peer_url });
        }
    }
    let others = members.list.iter().filter(|member| member.id.0 != own_id.get());
    let client_urls = others.flat_map(|member| member.client_urls.iter().cloned()).collect();
    Ok(InitialCluster { members: initial, client_urls, recoveries: RecoveryChain::default() })
}

/// Returns a member's name for the flag `--initial-cluster`. A substitute replaces a real name that
/// is empty, unusable in a flag or not unique, because etcd merges members with equal names. etcd
/// compares addresses only, so a substitute works too.
fn name_for_flag(
    member: &cluster::ClusterMember,
    all: &[cluster::ClusterMember],
    own_id: MemberId,
    own: &Record,
) -> String {
    if member.id.0 == own_id.get() {
        return own.name.to_string();
    }
    let name = member.name.as_str();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    let shared = all.iter().any(|other| other.id != member.id && other.name == name);
    if name.is_empty() || !name.chars().all(plain) || shared || name == own.name.as_str() {
        return format!("member-{}", member.id);
    }
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use discovery_types::digest::Incarnation;
    use discovery_types::fixtures::{ClusterFixture, join_fixture};
    use discovery_types::key::SigningKey;
    use discovery_types::recovery::{NodeIdentity, Recovery};

    use super::*;
    use crate::cluster::{ClusterMember, ClusterRefusal};

    const OWN: MemberId = MemberId([0, 0, 0, 0, 0, 0, 0, 9]);

    fn member(id: u64, name: &str, url: &str) -> ClusterMember {
        ClusterMember {
            id: cluster::MemberId(id),
            name: name.to_owned(),
            peer_urls: vec![url.to_owned()],
            client_urls: vec![format!("https://client-{id}:2379")],
            is_learner: id == 9,
        }
    }

    fn own() -> Record {
        join_fixture().records.swap_remove(0)
    }

    fn members(own: &Record) -> MemberList {
        let list = vec![
            member(1, "a", "https://10.9.0.1:2380"),
            member(2, "", "https://10.9.0.2:2380"),
            member(9, "", &own.peer_urls[0].to_string()),
        ];
        MemberList { cluster_id: 5, configuration: None, list }
    }

    #[test]
    fn an_unreachable_founder_does_not_hide_the_error_of_a_member_that_answered() {
        let gone = |url: &str| ClusterError::Unreachable(vec![url.to_owned()]);
        let refused = || ClusterError::Refused {
            refusal: ClusterRefusal::PermissionDenied,
            text: "permission denied".to_owned(),
        };
        let told =
            most_informative_error(vec![refused(), gone("https://client-3:2379")]).to_string();
        assert_eq!(told, "refused: permission denied");
        let told = most_informative_error(vec![
            gone("https://client-1:2379"),
            gone("https://client-3:2379"),
        ]);
        let told = told.to_string();
        assert!(told.ends_with("https://client-1:2379; https://client-3:2379"), "{told}");
    }

    #[test]
    fn a_listed_host_starts_with_the_clusters_current_members() {
        let own = own();
        let listed = initial_cluster(&members(&own), OWN, &own).unwrap();
        let names: Vec<&str> = listed.members.iter().map(|member| member.name.as_str()).collect();
        assert_eq!(names, ["a", "member-2", own.name.as_str()]);
        assert_eq!(listed.client_urls, ["https://client-1:2379", "https://client-2:2379"]);
    }

    #[test]
    fn names_that_a_flag_cannot_hold_or_that_are_not_unique_are_replaced() {
        let own = own();
        for name in ["b,x=https://evil:1", own.name.as_str(), "a"] {
            let mut members = members(&own);
            members.list[1].name = name.to_owned();
            let listed = initial_cluster(&members, OWN, &own).unwrap();
            assert_eq!(listed.members[1].name, "member-2", "{name}");
        }
    }

    #[test]
    fn a_host_that_is_not_listed_does_not_start() {
        let own = own();
        let refused = |members: &MemberList| initial_cluster(members, OWN, &own).unwrap_err();
        let mut absent = members(&own);
        absent.list.pop();
        assert_eq!(refused(&absent), PlacementError::Absent(OWN));
        let mut elsewhere = members(&own);
        elsewhere.list[2].peer_urls.push("https://10.9.0.8:2380".to_owned());
        assert_eq!(refused(&elsewhere), PlacementError::OtherAddresses(OWN));
        let mut junk = members(&own);
        junk.list[0].peer_urls = vec!["junk".to_owned()];
        assert_eq!(refused(&junk), PlacementError::InvalidUrl("junk".to_owned()));
    }

    /// A founded cluster, and ways to make recovery statements for it.
    struct RecoveryFixture {
        world: ClusterFixture,
        document: VerifiedDocument,
        founded: u64,
        own: Record,
    }

    impl RecoveryFixture {
        fn new() -> Self {
            let (world, own) = (ClusterFixture::new(3), own());
            let jws = world.document(7).sign(&world.service);
            let document = VerifiedDocument::verify(&jws, &world.chain()).unwrap();
            let founded = cluster::founded_cluster_id(&document);
            Self { world, document, founded, own }
        }

        fn recovery(&self, was: u64, is: u64, signer: &SigningKey) -> Jws {
            let identity = |of: u64| NodeIdentity {
                cluster_id: format!("{of:x}"),
                member_id: "1".to_owned(),
                incarnation: Incarnation(u128::from(of).to_be_bytes()),
            };
            let recovery = Recovery {
                version: 1,
                cluster: self.world.statement.cluster,
                statement: self.world.chain().newest_hash(),
                agent: *self.world.agents[0].public(),
                was: identity(was),
                is: identity(is),
                last_index: 7,
                last_term: 2,
                at: 1_700_000_000,
            };
            recovery.sign(signer)
        }

        fn word(&self, cluster_id: u64, recoveries: &[&Jws]) -> MemberAnswer {
            MemberAnswer {
                members: MemberList { cluster_id, ..members(&self.own) },
                recoveries: recoveries.iter().map(|jws| (*jws).clone()).collect(),
            }
        }

        fn place(&self, words: &[MemberAnswer]) -> Result<Option<u64>, PlacementError> {
            let chain_of = self.world.chain();
            let listed = choose_cluster(words, &self.document, &chain_of, |members| {
                initial_cluster(members, OWN, &self.own)
            });
            listed.map(|listed| listed.recoveries.raft_cluster())
        }
    }

    #[test]
    fn only_the_founded_cluster_or_one_that_signed_recoveries_lead_to_is_accepted() {
        let known = RecoveryFixture::new();
        let (founded, owner) = (known.founded, &known.world.owner);
        assert_eq!(known.place(&[known.word(founded, &[])]), Ok(None));
        let other = PlacementError::OtherCluster { found: 6, founded };
        assert_eq!(known.place(&[known.word(6, &[])]), Err(other.clone()));
        assert!(!other.is_transient());
        let first = known.recovery(founded, 6, owner);
        let second = known.recovery(6, 8, owner);
        assert_eq!(known.place(&[known.word(6, &[&first])]), Ok(Some(6)));
        assert_eq!(known.place(&[known.word(8, &[&first, &second])]), Ok(Some(8)));
        // Recovery statements must start from the founded cluster and lead to the cluster that
        // answered.
        let elsewhere = known.place(&[known.word(7, &[&first])]);
        assert_eq!(elsewhere, Err(PlacementError::OtherCluster { found: 7, founded }));
        assert!(known.place(&[known.word(8, &[&second])]).unwrap_err().is_transient());
    }

    #[test]
    fn a_recovery_that_no_operator_signed_is_refused_as_a_temporary_problem() {
        let known = RecoveryFixture::new();
        let agent = &known.world.agents[0];
        for signer in [agent, &SigningKey::generate()] {
            let forged = known.recovery(known.founded, 6, signer);
            let refused = known.place(&[known.word(6, &[&forged])]).unwrap_err();
            assert!(matches!(refused, PlacementError::Recovery { found: 6, .. }), "{refused}");
            assert!(refused.is_transient());
        }
    }

    #[test]
    fn answers_of_the_lost_cluster_do_not_hide_those_of_the_recovered_one() {
        let known = RecoveryFixture::new();
        let recovery = known.recovery(known.founded, 6, &known.world.owner);
        let new = known.word(6, &[&recovery]);
        let mut old = known.word(known.founded, &[]);
        old.members.list.pop();
        assert_eq!(known.place(&[old.clone(), new]), Ok(Some(6)));
        assert_eq!(known.place(&[old]), Err(PlacementError::Absent(OWN)));
    }
}
