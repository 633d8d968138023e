//! Decisions on the list of members that register with one etcd token. Pure: no clock, no database.
//!
//! Each etcd decides by itself when the list is complete. It reads the list, then waits for further
//! members, and starts as soon as it knows `size` of them. Two rules prevent that two members start
//! with different lists:
//!
//! * A complete list never changes.
//! * A member that stops waiting loses its place after a while, so that another host can take it.
//!   Like every change, this one increments the list's index. A client that read the list before
//!   that index gets no further member from its wait, and has to read the list again.

use std::net::IpAddr;

use discovery_types::digest::{Digest, MemberId};
use discovery_types::etcd_token::{EtcdPeers, EtcdProtocol};

use crate::store::UnixMicros;

/// Index at which a list gives no further places. It limits hosts that repeatedly come and go.
/// Getting a place adds one to the list's index, and losing places adds one too.
pub(crate) const MAX_INDEX: u64 = 256;
/// Index of the list before the first member registers. The key `_config/size` has index 1.
pub(crate) const FIRST_INDEX: u64 = 2;

/// The members that have registered with one etcd token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EtcdRegistry {
    /// Protocol by which the members register.
    pub protocol: EtcdProtocol,
    /// Number of members that form the cluster.
    pub size: u8,
    /// Index of the last change. Each change adds one.
    pub last_index: u64,
    /// Index of the last change by which a member lost its place; 0 if there is none.
    pub lapse_index: u64,
    /// Whether all members have registered.
    pub is_complete: bool,
    /// Hash of the cluster token of the first member that registered. Each member's id is computed
    /// from the cluster token.
    pub cluster_token: Option<Digest>,
    /// Members in no particular order, including those that have lost their places.
    pub members: Vec<RegisteredMember>,
}

/// A member in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegisteredMember {
    /// Id of the member in its cluster.
    pub id: MemberId,
    /// Name and peer URLs as the member sent them.
    pub value: String,
    /// Source address of the registration.
    pub address: IpAddr,
    /// Index of the list's change that gave the member its place.
    pub created_index: u64,
    /// When the member loses its place, unless a request comes from its address before.
    pub lease_until: UnixMicros,
    /// Whether the member has lost its place.
    pub has_lapsed: bool,
    /// Time of the registration.
    pub at_us: UnixMicros,
}

/// A member that asks for a place.
#[derive(Clone, Debug)]
pub(crate) struct Registrant {
    /// Id that the member computed for itself.
    pub id: MemberId,
    /// Name and peer URLs as the member sent them.
    pub value: String,
    /// Cluster token from which the id was computed.
    pub cluster_token: String,
    /// Source address of the request.
    pub address: IpAddr,
}

/// Result of a registration that isn't refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Registration {
    /// The member has a place now.
    Added {
        /// Index of the list's change that gave the member its place.
        created_index: u64,
    },
    /// The member had this place already.
    Known {
        /// Index of the list's change that gave the member its place.
        created_index: u64,
    },
}

/// Reason why a member gets no place. The message is shown to whoever operates that etcd.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RegistrationRefusal {
    /// The registration has no usable name or URLs.
    #[error("{0}")]
    Unreadable(#[from] discovery_types::etcd_token::EtcdPeersError),
    /// The member's id wasn't computed from its URLs and the cluster token.
    #[error(
        "this member's id was computed from other peer URLs or from another discovery URL or token: \
         give every member exactly the same one"
    )]
    WrongId,
    /// Earlier members had another cluster token, so their ids belong to another cluster.
    #[error(
        "the first member came with another form of the discovery URL or token: give every member \
         exactly the same one"
    )]
    OtherClusterToken,
    /// Another host has registered these peer URLs, or this host has registered them under another
    /// name.
    #[error(
        "a member with these peer URLs has registered from {0} already: if its etcd has stopped, \
         its place is free within two minutes"
    )]
    Duplicate(IpAddr),
    /// Another host has registered the same name.
    #[error(
        "the name {name} belongs to a member that registered from {address}: give each member a \
         --name of its own; if that etcd has stopped, the name is free within two minutes"
    )]
    NameTaken {
        /// Name that is taken.
        name: String,
        /// Address of the host that has the name.
        address: IpAddr,
    },
    /// All places are taken.
    #[error("the cluster is full: {0} members have registered")]
    Full(u8),
    /// The list has reached the index [`MAX_INDEX`].
    #[error(
        "the list of members has changed too often: its index has reached {MAX_INDEX}; make a new \
         etcd token"
    )]
    TooManyChanges,
}

impl EtcdRegistry {
    /// Makes an empty list.
    pub(crate) fn new(protocol: EtcdProtocol, size: u8) -> Self {
        EtcdRegistry {
            protocol,
            size,
            last_index: FIRST_INDEX,
            lapse_index: 0,
            is_complete: false,
            cluster_token: None,
            members: Vec::new(),
        }
    }

    /// Returns the members that have a place, in the order in which they got it.
    pub(crate) fn listed(&self) -> Vec<&RegisteredMember> {
        let mut listed: Vec<_> = self.members.iter().filter(|member| !member.has_lapsed).collect();
        listed.sort_by_key(|member| member.created_index);
        listed
    }

    /// Returns the listed members whose index is at least `from`, in order.
    pub(crate) fn listed_from(&self, from: u64) -> Vec<&RegisteredMember> {
        let mut listed = self.listed();
        listed.retain(|member| member.created_index >= from);
        listed
    }

    /// Whether a client that waits for changes from the index `from` on has read an outdated list.
    /// That is so if a member has lost its place at this index or a later one.
    pub(crate) fn is_stale(&self, from: u64) -> bool {
        from <= self.lapse_index
    }

    /// Whether a member's lease has ended, so that [`EtcdRegistry::lapse`] would change the list.
    pub(crate) fn has_ended_lease(&self, now: UnixMicros) -> bool {
        !self.is_complete && self.members.iter().any(|member| has_ended(member, now))
    }

    /// Marks members whose lease has ended as lapsed. Returns the ids of these members.
    pub(crate) fn lapse(&mut self, now: UnixMicros) -> Vec<MemberId> {
        if self.is_complete {
            return Vec::new();
        }
        let mut lapsed = Vec::new();
        for member in self.members.iter_mut().filter(|member| has_ended(member, now)) {
            member.has_lapsed = true;
            lapsed.push(member.id);
        }
        if !lapsed.is_empty() {
            self.last_index += 1;
            self.lapse_index = self.last_index;
        }
        lapsed
    }

    /// Renews the leases of the members that registered from `address`, because an etcd waits
    /// there. Lapsed members of this address get places again while places are free, because etcd
    /// doesn't register twice.
    ///
    /// Returns whether the list has changed.
    pub(crate) fn renew(&mut self, address: IpAddr, now: UnixMicros, lease: UnixMicros) -> bool {
        if self.is_complete {
            return false;
        }
        for member in self.members.iter_mut().filter(|member| member.address == address) {
            if !member.has_lapsed {
                member.lease_until = now + lease;
            }
        }
        let mut lapsed: Vec<_> = (0..self.members.len())
            .filter(|&i| self.members[i].has_lapsed && self.members[i].address == address)
            .collect();
        lapsed.sort_by_key(|&i| self.members[i].created_index);
        let before = self.last_index;
        for i in lapsed {
            let peers = self.members[i].value.parse();
            let Ok(peers) = peers else { continue };
            if self.last_index < MAX_INDEX && self.check_free(&peers).is_ok() {
                self.last_index += 1;
                let member = &mut self.members[i];
                (member.has_lapsed, member.created_index) = (false, self.last_index);
                member.lease_until = now + lease;
                self.complete_if_full();
            }
        }
        self.last_index != before
    }

    /// Gives a member a place.
    ///
    /// A member whose answer was lost, or whose etcd was restarted before the list was complete,
    /// gets its place again.
    pub(crate) fn register(
        &mut self,
        registrant: &Registrant,
        now: UnixMicros,
        lease: UnixMicros,
    ) -> Result<Registration, RegistrationRefusal> {
        let peers: EtcdPeers = registrant.value.parse()?;
        if peers.member_id(&registrant.cluster_token) != registrant.id {
            return Err(RegistrationRefusal::WrongId);
        }
        let cluster_token = Digest::of(registrant.cluster_token.as_bytes());
        if self.cluster_token.is_some_and(|first| first != cluster_token) {
            return Err(RegistrationRefusal::OtherClusterToken);
        }
        let same = |member: &RegisteredMember| {
            member.id == registrant.id
                && member.address == registrant.address
                && member.value == registrant.value
        };
        let known = self.members.iter_mut().find(|member| same(member) && !member.has_lapsed);
        if let Some(known) = known {
            if !self.is_complete {
                known.lease_until = now + lease;
            }
            return Ok(Registration::Known { created_index: known.created_index });
        }
        if self.last_index >= MAX_INDEX {
            return Err(RegistrationRefusal::TooManyChanges);
        }
        let mut changed = self.clone();
        // Drop this host's lapsed registrations. The new etcd waits for its own registration only,
        // so `renew` must not restore an old registration.
        changed.members.retain(|member| !member.has_lapsed || member.address != registrant.address);
        changed.check_free(&peers)?;
        changed.last_index += 1;
        let created_index = changed.last_index;
        changed.members.push(RegisteredMember {
            id: registrant.id,
            value: registrant.value.clone(),
            address: registrant.address,
            created_index,
            lease_until: now + lease,
            has_lapsed: false,
            at_us: now,
        });
        changed.cluster_token = Some(cluster_token);
        changed.complete_if_full();
        *self = changed;
        Ok(Registration::Added { created_index })
    }

    /// Checks that the list has a free place, and that no listed member has the name or one of the
    /// URLs.
    fn check_free(&self, peers: &EtcdPeers) -> Result<(), RegistrationRefusal> {
        for other in self.listed() {
            let Ok(listed) = other.value.parse::<EtcdPeers>() else { continue };
            if listed.urls.iter().any(|url| peers.urls.contains(url)) {
                return Err(RegistrationRefusal::Duplicate(other.address));
            }
            if listed.name == peers.name {
                let (name, address) = (listed.name, other.address);
                return Err(RegistrationRefusal::NameTaken { name, address });
            }
        }
        match self.listed().len() < usize::from(self.size) {
            true => Ok(()),
            false => Err(RegistrationRefusal::Full(self.size)),
        }
    }

    fn complete_if_full(&mut self) {
        self.is_complete = self.listed().len() >= usize::from(self.size);
    }
}

fn has_ended(member: &RegisteredMember, now: UnixMicros) -> bool {
    !member.has_lapsed && member.lease_until <= now
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: UnixMicros = 90_000_000;
    const TOKEN: &str = "https://disco:8443/v2/token";

    fn host(n: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, n])
    }

    fn registrant(n: u8) -> Registrant {
        named(n, &format!("n{n}"))
    }

    fn named(n: u8, name: &str) -> Registrant {
        let value = format!("{name}=http://10.0.0.{n}:2380");
        let id = value.parse::<EtcdPeers>().unwrap().member_id(TOKEN);
        Registrant { id, value, cluster_token: TOKEN.into(), address: host(n) }
    }

    fn registry() -> EtcdRegistry {
        EtcdRegistry::new(EtcdProtocol::V2, 3)
    }

    fn listed(registry: &EtcdRegistry) -> Vec<(u64, IpAddr)> {
        registry.listed().iter().map(|member| (member.created_index, member.address)).collect()
    }

    #[test]
    fn the_first_members_fill_the_list_and_it_never_changes_again() {
        let mut registry = registry();
        for n in 1..=3 {
            let added = registry.register(&registrant(n), 0, LEASE);
            assert_eq!(added, Ok(Registration::Added { created_index: u64::from(n) + 2 }));
        }
        assert!(registry.is_complete);
        let complete = registry.clone();
        assert_eq!(registry.register(&registrant(4), 0, LEASE), Err(RegistrationRefusal::Full(3)));
        assert!(!registry.has_ended_lease(10 * LEASE));
        assert_eq!(registry.lapse(10 * LEASE), []);
        assert!(!registry.renew(host(1), 10 * LEASE, LEASE));
        assert_eq!(registry, complete);
        let again = registry.register(&registrant(2), 10 * LEASE, LEASE);
        assert_eq!(again, Ok(Registration::Known { created_index: 4 }));
        assert_eq!(registry, complete);
        assert_eq!(listed(&registry), [(3, host(1)), (4, host(2)), (5, host(3))]);
    }

    #[test]
    fn a_lapsed_member_makes_older_lists_stale() {
        let mut registry = registry();
        registry.register(&registrant(1), 0, LEASE).unwrap();
        registry.register(&registrant(2), 0, LEASE).unwrap();
        // The first member has read the list at index 4, and waits for index 5.
        assert!(!registry.is_stale(5));
        assert!(!registry.renew(host(1), LEASE / 2, LEASE));
        assert!(registry.has_ended_lease(LEASE));
        assert_eq!(registry.lapse(LEASE), [registrant(2).id]);
        assert_eq!((registry.last_index, registry.lapse_index), (5, 5));
        assert!(registry.is_stale(5) && !registry.is_stale(6));
        registry.register(&registrant(3), LEASE, LEASE).unwrap();
        assert_eq!(listed(&registry), [(3, host(1)), (6, host(3))]);
        assert_eq!(registry.listed_from(6).len(), 1);
    }

    #[test]
    fn a_member_whose_lease_lapsed_while_it_waited_gets_a_place_again() {
        let mut registry = registry();
        registry.register(&registrant(1), 0, LEASE).unwrap();
        registry.lapse(LEASE);
        assert!(registry.renew(host(1), LEASE, LEASE));
        assert_eq!(
            listed(&registry),
            [(5, host(1))],
            "with an index of its own, for those who wait"
        );
        assert_eq!(registry.lapse(2 * LEASE - 1), []);
    }

    #[test]
    fn a_lapsed_member_does_not_come_back_into_a_full_list() {
        let mut registry = registry();
        registry.register(&registrant(1), 0, LEASE).unwrap();
        registry.lapse(LEASE);
        for n in 2..=4 {
            registry.register(&registrant(n), LEASE, LEASE).unwrap();
        }
        assert!(!registry.renew(host(1), LEASE, LEASE));
        assert_eq!(listed(&registry).len(), 3);
        let late = registry.register(&registrant(1), LEASE, LEASE);
        assert_eq!(late, Err(RegistrationRefusal::Full(3)));
    }

    #[test]
    fn a_restarted_member_gets_its_place_again_and_no_second_one() {
        let mut registry = registry();
        registry.register(&registrant(1), 0, LEASE).unwrap();
        let again = registry.register(&registrant(1), LEASE / 2, LEASE);
        assert_eq!(again, Ok(Registration::Known { created_index: 3 }));
        assert_eq!(registry.lapse(LEASE), [], "and its lease is renewed");
        registry.lapse(2 * LEASE);
        let later = registry.register(&registrant(1), 2 * LEASE, LEASE);
        assert_eq!(later, Ok(Registration::Added { created_index: 5 }));
        assert_eq!(registry.members.len(), 1);
    }

    #[test]
    fn a_name_or_url_of_another_member_is_refused() {
        let mut registry = registry();
        registry.register(&registrant(1), 0, LEASE).unwrap();
        let before = registry.clone();
        let taken = RegistrationRefusal::NameTaken { name: "n1".into(), address: host(1) };
        assert_eq!(registry.register(&named(2, "n1"), 0, LEASE), Err(taken));
        let duplicate = Err(RegistrationRefusal::Duplicate(host(1)));
        let elsewhere = Registrant { address: host(7), ..registrant(1) };
        assert_eq!(registry.register(&elsewhere, 0, LEASE), duplicate);
        assert_eq!(registry.register(&named(1, "other"), 0, LEASE), duplicate);
        assert_eq!(registry, before, "a refusal changes nothing");
        registry.lapse(LEASE);
        assert!(
            registry.register(&named(1, "other"), LEASE, LEASE).is_ok(),
            "its etcd has stopped"
        );
        assert_eq!(registry.members.len(), 1, "and the earlier one can't come back");
    }

    #[test]
    fn an_id_of_another_discovery_url_is_refused() {
        let mut registry = registry();
        let wrong = Registrant { cluster_token: format!("{TOKEN}/"), ..registrant(1) };
        assert_eq!(registry.register(&wrong, 0, LEASE), Err(RegistrationRefusal::WrongId));
        registry.register(&registrant(1), 0, LEASE).unwrap();
        let mut other = registrant(2);
        other.cluster_token = format!("{TOKEN}/");
        other.id = other.value.parse::<EtcdPeers>().unwrap().member_id(&other.cluster_token);
        let refused = registry.register(&other, 0, LEASE);
        assert_eq!(refused, Err(RegistrationRefusal::OtherClusterToken));
    }

    #[test]
    fn a_host_that_comes_and_goes_is_refused_in_the_end() {
        let mut registry = registry();
        let mut now = 0;
        while registry.register(&registrant(1), now, LEASE).is_ok() {
            now += LEASE;
            registry.lapse(now);
            assert!(registry.members.len() <= 1);
        }
        let refused = registry.register(&registrant(2), now, LEASE);
        assert_eq!(refused, Err(RegistrationRefusal::TooManyChanges));
        assert!(registry.last_index <= MAX_INDEX + 1);
    }

    /// Explores every interleaving of three etcds that register, wait and time out. Each etcd that
    /// starts must start with the complete list. Clients behave as etcd does: they read the list,
    /// then add each member that a wait returns.
    #[test]
    fn each_etcd_that_starts_knows_the_complete_list() {
        /// The list that a client has read, by the members' indexes, and the index from which the
        /// client waits.
        #[derive(Clone, Default)]
        struct Client {
            known: Vec<MemberId>,
            from: u64,
        }
        fn explore(registry: &EtcdRegistry, clients: &[Client; 4], depth: u8, begun: &mut usize) {
            for client in clients.iter().filter(|client| client.known.len() == 2) {
                let list: Vec<_> = registry.listed().iter().map(|member| member.id).collect();
                assert!(registry.is_complete && list == client.known, "{registry:?}");
                *begun += 1;
            }
            if depth == 0 {
                return;
            }
            for n in 0..4_usize {
                if clients[n].known.len() == 2 {
                    continue;
                }
                let address = n as u8 + 1;
                // The client registers, or registers again, and reads the list.
                let mut next = registry.clone();
                let mut then = clients.clone();
                if next.register(&registrant(address), 0, LEASE).is_ok() {
                    then[n].known = next.listed().iter().map(|member| member.id).collect();
                    then[n].from = next.last_index + 1;
                    explore(&next, &then, depth - 1, begun);
                }
                if clients[n].from == 0 {
                    continue;
                }
                // The client waits for a change, which renews its member's lease. It then learns
                // the next member, or that it must read the list again.
                let (mut next, mut then) = (registry.clone(), clients.clone());
                next.renew(host(address), 0, LEASE);
                if next.is_stale(then[n].from) {
                    then[n].known = next.listed().iter().map(|member| member.id).collect();
                    then[n].from = next.last_index + 1;
                } else if let Some(member) = next.listed_from(then[n].from).first() {
                    then[n].known.push(member.id);
                    then[n].from = member.created_index + 1;
                }
                explore(&next, &then, depth - 1, begun);
                // The client's lease ends.
                let mut next = registry.clone();
                for member in &mut next.members {
                    if member.address == host(address) {
                        member.lease_until = -1;
                    }
                }
                next.lapse(-1);
                explore(&next, clients, depth - 1, begun);
            }
        }
        let registry = EtcdRegistry::new(EtcdProtocol::V2, 2);
        let mut begun = 0;
        explore(&registry, &Default::default(), 6, &mut begun);
        assert!(begun > 1_000, "{begun}");
    }
}
