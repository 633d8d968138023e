//! Censuses: copies of the member table that members send to each other. With these copies, a
//! member that was unreachable finds the current members.
//!
//! A member that was unreachable knows only its own table, which can be outdated. For example,
//! another member may have joined and become the leader, or a member may have moved. A leader can't
//! bring the unreachable member up to date if that member refuses the leader's connection, or does
//! not know its new address. So each member sends the other members a census of its applied table.
//!
//! etcd solves the same problem with `AddRemote` and `X-PeerURLs` (server/etcdserver/api/rafthttp).
//! etcd accepts every peer with a valid certificate and the cluster's id. Here, the census of a
//! known member must contain the peer.
//!
//! - A census is used only while its sender is in the receiver's own table. So a member that was
//!   accepted because of a census can't add others.
//! - Of all censuses, only the one with the latest configuration is used, and only if it is later
//!   than the receiver's own.
//! - The URLs that a member of the receiver's own table sends for itself are always used. After a
//!   move, the moved member is possibly the only one left that knows them.
//! - A census adds peers from which connections are accepted, and addresses that are dialled. These
//!   additions are kept in memory until the receiver's own table has caught up. A census changes no
//!   table, quorum or binding. It removes no member and never readmits a removed one.

use std::collections::BTreeMap;

use node_proto::musterpb;

use super::{MalformedMember, Member, MemberTable};
use crate::identity::{Incarnation, MemberId, NodeKey};

/// Maximum number of members that are accepted because of a census; further ones are ignored.
const MAX_CENSUS_NEWCOMERS: usize = 16;
/// Maximum number of addresses of one member that are taken from a census; further ones are
/// ignored.
const MAX_CENSUS_URLS: usize = 8;
/// Maximum number of peers whose last census is kept. If there are more, the census with the
/// earliest configuration is dropped.
const MAX_CENSUSES: usize = 128;

/// Table of members, as one member sends it to the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Census {
    /// Configuration of the table, as in [`MemberTable::configuration_index`].
    pub configuration_index: u64,
    /// All members in the configuration `configuration_index`.
    pub members: Vec<Member>,
    /// Peer URLs of the sender itself, according to its flags.
    pub own_urls: Vec<String>,
}

/// The last census of each peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Censuses {
    by_peer: BTreeMap<MemberId, Census>,
}

/// Another member, with what is needed to open or accept connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Member id of the neighbour.
    pub id: MemberId,
    /// URLs to try when a connection to the member is opened.
    pub urls: Vec<String>,
    /// The only incarnation that may act as this member, if one is bound.
    pub incarnation: Option<Incarnation>,
    /// The only key that may authenticate as this member, if one is bound.
    pub node_key: Option<NodeKey>,
    /// Whether the member is known only from a census, and is not in the receiver's own table.
    pub is_from_census: bool,
}

impl From<&MemberTable> for Census {
    fn from(table: &MemberTable) -> Self {
        let members = table.members().cloned().collect();
        Self { configuration_index: table.configuration_index(), members, own_urls: Vec::new() }
    }
}

impl TryFrom<musterpb::Census> for Census {
    type Error = MalformedMember;

    fn try_from(census: musterpb::Census) -> Result<Self, MalformedMember> {
        let members = census.members.into_iter().map(Member::try_from).collect::<Result<_, _>>()?;
        Ok(Self { configuration_index: census.changed, members, own_urls: census.own_peer_urls })
    }
}

impl Censuses {
    /// Stores the census of the peer `by`. Returns whether it differs from the peer's last one.
    pub fn record(&mut self, by: MemberId, census: Census) -> bool {
        if self.by_peer.get(&by) == Some(&census) {
            return false;
        }
        self.by_peer.insert(by, census);
        if self.by_peer.len() > MAX_CENSUSES {
            let earliest = self.by_peer.iter().min_by_key(|(_, census)| census.configuration_index);
            let earliest = earliest.map(|(by, _)| *by);
            earliest.and_then(|by| self.by_peer.remove(&by));
        }
        true
    }

    /// Returns the members with which the member `own` exchanges messages, ordered by id. `table`
    /// is the table of `own`.
    #[must_use]
    pub fn neighbours(&self, table: &MemberTable, own: MemberId) -> Vec<Neighbour> {
        let latest = self.latest(table);
        let told = |id| latest.and_then(|census| census.members.iter().find(|told| told.id == id));
        let others = table.members().filter(|member| member.id != own);
        let mut neighbours: Vec<Neighbour> =
            others.map(|member| Neighbour::new(member, told(member.id), false)).collect();
        let is_new = |told: &&Member| {
            told.id != own && table.member(told.id).is_none() && !table.is_removed(told.id)
        };
        let newcomers = latest.into_iter().flat_map(|census| &census.members).filter(is_new);
        neighbours.extend(
            newcomers
                .take(MAX_CENSUS_NEWCOMERS)
                .map(|member| Neighbour::new(member, Some(member), true)),
        );
        for neighbour in neighbours.iter_mut().filter(|neighbour| !neighbour.is_from_census) {
            let itself = self.by_peer.get(&neighbour.id);
            neighbour.add_urls(itself.into_iter().flat_map(|census| &census.own_urls));
        }
        neighbours.sort_by_key(|neighbour| neighbour.id);
        neighbours.dedup_by_key(|neighbour| neighbour.id);
        neighbours
    }

    /// Returns the latest census that a member of `table` has sent, if its configuration is later
    /// than that of `table`.
    fn latest(&self, table: &MemberTable) -> Option<&Census> {
        let believed = self.by_peer.iter().filter(|(by, _)| table.member(**by).is_some());
        let latest =
            believed.map(|(_, census)| census).max_by_key(|census| census.configuration_index);
        latest.filter(|census| census.configuration_index > table.configuration_index())
    }
}

impl Neighbour {
    fn new(member: &Member, told: Option<&Member>, is_told: bool) -> Self {
        let urls = if is_told { Vec::new() } else { member.peer_urls.clone() };
        let Member { id, incarnation, node_key, .. } = *member;
        let mut neighbour = Self { id, urls, incarnation, node_key, is_from_census: is_told };
        neighbour.add_urls(told.into_iter().flat_map(|told| &told.peer_urls));
        neighbour
    }

    fn add_urls<'a>(&mut self, urls: impl Iterator<Item = &'a String>) {
        for url in urls.take(MAX_CENSUS_URLS) {
            if !self.urls.contains(url) {
                self.urls.push(url.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::MemberChange;

    fn member(id: u64) -> Member {
        Member {
            id: MemberId(id),
            name: format!("m{id}"),
            peer_urls: vec![format!("http://m{id}:2380")],
            client_urls: Vec::new(),
            is_learner: false,
            incarnation: Some(Incarnation([u8::try_from(id).unwrap(); 16])),
            node_key: None,
            changed_at: 0,
            vote_when_ready: false,
            operations: Vec::new(),
        }
    }

    const ME: MemberId = MemberId(1);

    fn three() -> MemberTable {
        MemberTable::new((1..=3).map(member))
    }

    fn changed(changes: impl IntoIterator<Item = (u64, MemberChange)>) -> MemberTable {
        let mut table = three();
        for (index, change) in changes {
            table.apply_change(change, index).unwrap();
        }
        table
    }

    fn shown(neighbours: &[Neighbour]) -> Vec<(u64, bool, String)> {
        let of = |one: &Neighbour| (one.id.0, one.is_from_census, one.urls.join(" "));
        neighbours.iter().map(of).collect()
    }

    fn known(id: u64) -> (u64, bool, String) {
        (id, false, format!("http://m{id}:2380"))
    }

    #[test]
    fn a_census_of_a_known_member_adds_a_newcomer() {
        let mut censuses = Censuses::default();
        assert_eq!(shown(&censuses.neighbours(&three(), ME)), [known(2), known(3)]);
        let grown = changed([(7, MemberChange::Add(member(4)))]);
        assert!(censuses.record(MemberId(2), (&grown).into()));
        assert!(!censuses.record(MemberId(2), (&grown).into()), "it is no news");
        let four = (4, true, "http://m4:2380".to_owned());
        let neighbours = censuses.neighbours(&three(), ME);
        assert_eq!(shown(&neighbours), [known(2), known(3), four]);
        assert_eq!(neighbours[2].incarnation, member(4).incarnation);
        assert_eq!(shown(&censuses.neighbours(&grown, ME)), [known(2), known(3), known(4)]);
    }

    #[test]
    fn a_moved_member_has_its_old_and_its_new_urls() {
        let moved = vec!["http://elsewhere:2380".to_owned()];
        let moved = changed([(7, MemberChange::Update(MemberId(3), moved))]);
        let mut censuses = Censuses::default();
        censuses.record(MemberId(3), (&moved).into());
        let three_of = (3, false, "http://m3:2380 http://elsewhere:2380".to_owned());
        assert_eq!(shown(&censuses.neighbours(&three(), ME)), [known(2), three_of]);
    }

    /// The leader that made the change is lost. So is every other member that knew that the change
    /// was committed.
    #[test]
    fn a_moved_member_is_found_by_the_urls_that_it_sends_itself() {
        let own_urls = vec!["http://elsewhere:2380".to_owned()];
        let census = Census { own_urls, ..Census::from(&three()) };
        let mut censuses = Censuses::default();
        censuses.record(MemberId(3), census);
        let three_of = (3, false, "http://m3:2380 http://elsewhere:2380".to_owned());
        assert_eq!(shown(&censuses.neighbours(&three(), ME)), [known(2), three_of]);
    }

    #[test]
    fn only_the_latest_census_counts_if_newer_than_the_own_table() {
        let grown = changed([(7, MemberChange::Add(member(4)))]);
        let shrunk =
            changed([(7, MemberChange::Add(member(4))), (8, MemberChange::Remove(MemberId(4)))]);
        let mut censuses = Censuses::default();
        censuses.record(MemberId(2), (&grown).into());
        censuses.record(MemberId(3), (&shrunk).into());
        assert_eq!(shown(&censuses.neighbours(&three(), ME)), [known(2), known(3)]);
        assert_eq!(shown(&censuses.neighbours(&shrunk, ME)), [known(2), known(3)]);
        // A census of an older configuration removes no member, and does not bring back an address
        // from before a move.
        censuses.record(MemberId(3), (&three()).into());
        assert_eq!(shown(&censuses.neighbours(&grown, ME)), [known(2), known(3), known(4)]);
        let elsewhere = "http://elsewhere:2380".to_owned();
        let moved = MemberChange::Update(MemberId(3), vec![elsewhere.clone()]);
        let neighbours = censuses.neighbours(&changed([(9, moved)]), ME);
        assert_eq!(shown(&neighbours), [known(2), (3, false, elsewhere)]);
    }

    #[test]
    fn a_census_counts_only_while_its_sender_is_a_member() {
        let grown = changed([(7, MemberChange::Add(member(4)))]);
        let mut censuses = Censuses::default();
        censuses.record(MemberId(4), (&grown).into());
        assert_eq!(shown(&censuses.neighbours(&three(), ME)), [known(2), known(3)]);
        let liar = Census {
            configuration_index: u64::MAX,
            members: vec![member(9)],
            own_urls: Vec::new(),
        };
        censuses.record(MemberId(2), liar);
        assert_eq!(censuses.neighbours(&three(), ME).len(), 3);
        let without = changed([(6, MemberChange::Remove(MemberId(2)))]);
        assert_eq!(shown(&censuses.neighbours(&without, ME)), [known(3)]);
    }

    #[test]
    fn a_census_neither_readmits_members_nor_changes_bindings() {
        let without = changed([(6, MemberChange::Remove(MemberId(2)))]);
        let other = Member { incarnation: Some(Incarnation([99; 16])), ..member(3) };
        let members = vec![member(1), member(2), other];
        let liar = Census { configuration_index: 99, members, own_urls: Vec::new() };
        let mut censuses = Censuses::default();
        censuses.record(MemberId(3), liar);
        let neighbours = censuses.neighbours(&without, ME);
        assert_eq!(shown(&neighbours), [known(3)]);
        assert_eq!(neighbours[0].incarnation, member(3).incarnation);
    }

    #[test]
    fn the_newcomers_and_urls_of_a_census_are_limited() {
        let urls = (0..100).map(|port| format!("http://m3:{port}")).collect();
        let crowd = (4..100).map(member).chain([Member { peer_urls: urls, ..member(3) }]);
        let mut censuses = Censuses::default();
        let (members, own_urls) = (crowd.collect(), Vec::new());
        censuses.record(MemberId(2), Census { configuration_index: 9, members, own_urls });
        let neighbours = censuses.neighbours(&three(), ME);
        assert_eq!(neighbours.len(), 2 + MAX_CENSUS_NEWCOMERS);
        assert_eq!(neighbours[1].urls.len(), 1 + MAX_CENSUS_URLS);
    }

    #[test]
    fn the_censuses_with_the_earliest_configurations_are_dropped() {
        let mut censuses = Censuses::default();
        let grown = changed([(7, MemberChange::Add(member(4)))]);
        censuses.record(MemberId(2), (&grown).into());
        for by in 10..1_000 {
            censuses.record(
                MemberId(by),
                Census { configuration_index: by % 7, members: Vec::new(), own_urls: Vec::new() },
            );
        }
        assert_eq!(censuses.by_peer.len(), MAX_CENSUSES);
        assert_eq!(censuses.neighbours(&three(), ME).len(), 3, "the latest word is kept");
    }
}
