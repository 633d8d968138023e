//! The cluster itself is asked, over mutual TLS: whether it is the right one, and lists this host.

use std::collections::BTreeSet;

use discovery_types::api::InitialMember;
use discovery_types::digest::MemberId;
use discovery_types::record::Record;
use discovery_types::url::NodeUrl;

use super::{Newcomer, Ticket};
use crate::cluster::{self, Cluster, ClusterError, Members};
use crate::door::{Door, Identity};
use crate::exit::{End, chain};
use crate::state::Layout;
use crate::state::journal::Admission;

/// The list that a newcomer begins with.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    /// The members, itself among them.
    pub initial: Vec<InitialMember>,
    /// Where clients reach the others.
    pub client_urls: Vec<String>,
}

/// Why a cluster's list has no place for this host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Unlisted {
    /// Not the cluster of the document.
    #[error(
        "the cluster at these addresses is {found:016x}, and the one that this ticket is for was founded as {expected:016x}"
    )]
    OtherCluster {
        /// What it says.
        found: u64,
        /// The document's.
        expected: u64,
    },
    /// It isn't there.
    #[error(
        "discovery says that the cluster has added this host as {0}, and the cluster doesn't list it: it was taken out again, or discovery is wrong. Ask for a new ticket, after muster-agent reset"
    )]
    Absent(MemberId),
    /// It is there as somebody else.
    #[error("the cluster lists member {0} at other addresses than this host's")]
    Elsewhere(MemberId),
    /// A name or URL that no flag can hold.
    #[error("the cluster lists a member at {0:?}, which is no address")]
    Url(String),
}

impl Newcomer<'_> {
    /// Asks until a member answers.
    pub(super) async fn ask_cluster(
        &mut self,
        ticket: &Ticket,
        member: MemberId,
    ) -> Result<Listed, End> {
        let founders = ticket.document.records().iter();
        let founders =
            founders.flat_map(|record| record.client_urls.iter().map(NodeUrl::to_string));
        let founders: BTreeSet<String> = founders.collect();
        let expected = cluster::founded(&ticket.document);
        loop {
            let mut urls = founders.clone();
            // Members that came later. A hint: whoever answers has to prove where it belongs.
            if let Ok(directory) = self.client.directory(self.join.cluster).await {
                let members = directory.view.into_iter().flat_map(|view| view.membership.members);
                urls.extend(members.flat_map(|member| member.client_urls));
            }
            match ask(&self.protocol.layout, &urls).await {
                Ok(members) => {
                    return listed(&members, expected, member, &self.record)
                        .map_err(|error| End::DoNotRestart(chain(&error)));
                }
                Err(error) => {
                    self.later(format!("waiting for an answer of the cluster: {}", chain(&error)))
                        .await;
                }
            }
        }
    }
}

/// The cluster, by these client URLs, as this host's member.
pub(crate) fn reach(layout: &Layout, urls: &BTreeSet<String>) -> Result<Cluster, ClusterError> {
    let identity = Identity::own(&layout.tls())?;
    let doors = urls.iter().filter_map(|url| Door::of_member(url, Some(&identity)).ok());
    Ok(Cluster::new(doors.collect()))
}

async fn ask(layout: &Layout, urls: &BTreeSet<String>) -> Result<Members, ClusterError> {
    reach(layout, urls)?.list().await
}

/// The members as the cluster lists them now, for a first start that was long in coming; nothing if
/// nobody answers, or this host is not among them.
pub(crate) async fn now_listed(
    layout: &Layout,
    admission: &Admission,
    own: &Record,
) -> Option<Vec<InitialMember>> {
    let urls = admission.client_urls.iter().cloned().collect();
    let members = ask(layout, &urls).await.ok()?;
    listed(&members, members.cluster_id, admission.member, own).ok().map(|listed| listed.initial)
}

/// Whether the cluster, asked at `urls`, lists a member of this id.
pub(crate) async fn is_listed(layout: &Layout, urls: &BTreeSet<String>, id: MemberId) -> bool {
    let members = ask(layout, urls).await;
    members.is_ok_and(|members| members.list.iter().any(|member| member.id.0 == id.get()))
}

fn listed(
    members: &Members,
    expected: u64,
    own_id: MemberId,
    own: &Record,
) -> Result<Listed, Unlisted> {
    if members.cluster_id != expected {
        return Err(Unlisted::OtherCluster { found: members.cluster_id, expected });
    }
    let of_id = |member: &&cluster::Member| member.id.0 == own_id.get();
    let found = members.list.iter().find(of_id).ok_or(Unlisted::Absent(own_id))?;
    let urls: BTreeSet<String> = own.peer_urls.iter().map(NodeUrl::to_string).collect();
    if found.peer_urls.iter().cloned().collect::<BTreeSet<_>>() != urls {
        return Err(Unlisted::Elsewhere(own_id));
    }
    let mut initial = Vec::new();
    for member in &members.list {
        let name = name_for_flag(member, &members.list, own_id, own);
        for url in &member.peer_urls {
            let peer_url = url.parse().map_err(|_| Unlisted::Url(url.clone()))?;
            initial.push(InitialMember { name: name.clone(), peer_url });
        }
    }
    let others = members.list.iter().filter(|member| member.id.0 != own_id.get());
    let client_urls = others.flat_map(|member| member.client_urls.iter().cloned()).collect();
    Ok(Listed { initial, client_urls })
}

/// etcd's flag needs a name for each member, and takes members of one name for one. It compares
/// addresses alone, so that another name does as well.
fn name_for_flag(
    member: &cluster::Member,
    all: &[cluster::Member],
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
    use discovery_types::fixtures::join_world;

    use super::*;
    use crate::cluster::Member;

    const CLUSTER: u64 = 5;
    const OWN: MemberId = MemberId([0, 0, 0, 0, 0, 0, 0, 9]);

    fn member(id: u64, name: &str, url: &str) -> Member {
        Member {
            id: cluster::MemberId(id),
            name: name.to_owned(),
            peer_urls: vec![url.to_owned()],
            client_urls: vec![format!("https://client-{id}:2379")],
            is_learner: id == 9,
        }
    }

    fn own() -> Record {
        join_world().records.swap_remove(0)
    }

    fn members(own: &Record) -> Members {
        let list = vec![
            member(1, "a", "https://10.9.0.1:2380"),
            member(2, "", "https://10.9.0.2:2380"),
            member(9, "", &own.peer_urls[0].to_string()),
        ];
        Members { cluster_id: CLUSTER, configuration: None, list }
    }

    #[test]
    fn a_listed_host_begins_with_the_members_that_there_are() {
        let own = own();
        let listed = listed(&members(&own), CLUSTER, OWN, &own).unwrap();
        let names: Vec<&str> = listed.initial.iter().map(|member| member.name.as_str()).collect();
        assert_eq!(names, ["a", "member-2", own.name.as_str()]);
        assert_eq!(listed.client_urls, ["https://client-1:2379", "https://client-2:2379"]);
    }

    #[test]
    fn names_that_a_flag_cant_hold_or_that_are_not_one_members_are_replaced() {
        let own = own();
        for name in ["b,x=https://evil:1", own.name.as_str(), "a"] {
            let mut members = members(&own);
            members.list[1].name = name.to_owned();
            let listed = listed(&members, CLUSTER, OWN, &own).unwrap();
            assert_eq!(listed.initial[1].name, "member-2", "{name}");
        }
    }

    #[test]
    fn whoever_is_not_in_the_list_as_itself_does_not_start() {
        let own = own();
        let refused = |members: &Members| listed(members, CLUSTER, OWN, &own).unwrap_err();
        let other = Members { cluster_id: 6, ..members(&own) };
        assert!(matches!(refused(&other), Unlisted::OtherCluster { found: 6, expected: CLUSTER }));
        let mut absent = members(&own);
        absent.list.pop();
        assert_eq!(refused(&absent), Unlisted::Absent(OWN));
        let mut elsewhere = members(&own);
        elsewhere.list[2].peer_urls.push("https://10.9.0.8:2380".to_owned());
        assert_eq!(refused(&elsewhere), Unlisted::Elsewhere(OWN));
        let mut junk = members(&own);
        junk.list[0].peer_urls = vec!["junk".to_owned()];
        assert_eq!(refused(&junk), Unlisted::Url("junk".to_owned()));
    }
}
