//! The membership of a running etcd cluster that comes under management.
//!
//! The owner signs it with the cluster's first statement. Cluster and members keep their Raft ids,
//! which etcd has given them, and each seat belongs to one of these members.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::digest::MemberId;
use crate::name::Name;
use crate::record::{MAX_SEAT_URLS, Record};
use crate::statement::CaPair;
use crate::url::NodeUrl;

/// A running etcd cluster, as it listed its members when the owner signed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Adoption {
    /// Id of the Raft cluster: 16 hexadecimal digits.
    pub raft_cluster: String,
    /// Members of the cluster, ordered by id.
    pub members: Vec<AdoptedMember>,
}

/// A member of a running etcd cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdoptedMember {
    /// Id of the member, which the adoption doesn't change.
    pub id: MemberId,
    /// Name of the member at discovery. See [`member_name`].
    pub name: Name,
    /// URL at which the other members reach this one.
    pub peer_url: NodeUrl,
    /// URLs at which clients reach the member.
    pub client_urls: Vec<NodeUrl>,
}

/// A running etcd cluster as `muster-agent adopt survey` found it, for an owner to sign.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdoptionSurvey {
    /// Version of the format, always 1.
    pub version: u32,
    /// The cluster and its members.
    pub adoption: Adoption,
    /// The CAs that signed the members' present certificates.
    pub cas: CaPair,
    /// Version of etcd that each member runs, in the order of the members.
    pub versions: Vec<String>,
}

impl Adoption {
    /// Returns the Raft cluster's id; `None` if it isn't 16 hexadecimal digits, or is 0.
    pub fn raft_cluster_id(&self) -> Option<u64> {
        let id: MemberId = self.raft_cluster.parse().ok()?;
        (id.get() != 0).then(|| id.get())
    }

    /// Checks the cluster's id, the number of members, and each member's id and number of client
    /// URLs. No two members may share an id, name or peer URL. `size` is the statement's. The error
    /// describes the first wrong value.
    pub(crate) fn check(&self, size: u8) -> Result<(), &'static str> {
        let members = &self.members;
        if self.raft_cluster_id().is_none() {
            return Err("the id of the adopted cluster is not 16 hexadecimal digits");
        }
        if members.len() != usize::from(size) {
            return Err("the size is not the number of adopted members");
        }
        if members.iter().any(|member| !(1..=MAX_SEAT_URLS).contains(&member.client_urls.len())) {
            return Err("an adopted member needs 1 to 3 client URLs");
        }
        if members.iter().any(|member| member.id.get() == 0) {
            return Err("an adopted member has no id");
        }
        let is_same = |a: &AdoptedMember, b: &AdoptedMember| {
            a.id == b.id || a.name == b.name || a.peer_url == b.peer_url
        };
        let twice = (1..members.len())
            .any(|i| members[..i].iter().any(|other| is_same(other, &members[i])));
        if twice {
            return Err("two adopted members have one id, name or peer URL between them");
        }
        Ok(())
    }

    /// Returns the member with this name.
    pub fn member(&self, name: &Name) -> Option<&AdoptedMember> {
        self.members.iter().find(|member| member.name == *name)
    }

    /// Returns the member whose name and URLs equal those of the record.
    pub fn member_of(&self, record: &Record) -> Option<&AdoptedMember> {
        self.member(&record.name).filter(|member| {
            record.peer_urls == [member.peer_url.clone()]
                && record.client_urls == member.client_urls
        })
    }
}

/// Returns the name at discovery of a member that etcd calls `etcd_name`. Names at discovery have
/// only lower-case letters, digits and hyphens. `None` if no character is left.
pub fn member_name(etcd_name: &str) -> Option<Name> {
    /// A name has at most 63 characters.
    const MAX_LENGTH: usize = 63;
    let mapped: String = etcd_name
        .to_ascii_lowercase()
        .chars()
        .map(|c| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' })
        .take(MAX_LENGTH)
        .collect();
    mapped.trim_matches('-').parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(id: u64, name: &str, host: u8) -> AdoptedMember {
        AdoptedMember {
            id: MemberId::new(id),
            name: name.parse().unwrap(),
            peer_url: format!("https://10.0.0.{host}:2380").parse().unwrap(),
            client_urls: vec![format!("https://10.0.0.{host}:2379").parse().unwrap()],
        }
    }

    fn adoption() -> Adoption {
        let members = vec![member(1, "a", 1), member(2, "b", 2), member(3, "c", 3)];
        Adoption { raft_cluster: "00000000000000ff".to_owned(), members }
    }

    #[test]
    fn a_membership_with_doubles_or_without_ids_is_refused() {
        assert_eq!(adoption().check(3), Ok(()));
        assert_eq!(adoption().raft_cluster_id(), Some(255));
        let broken: [fn(&mut Adoption); 7] = [
            |it| it.raft_cluster = "ff".to_owned(),
            |it| it.raft_cluster = "0".repeat(16),
            |it| drop(it.members.pop()),
            |it| it.members[0].id = MemberId::new(0),
            |it| it.members[1].id = MemberId::new(1),
            |it| it.members[1].name = it.members[2].name.clone(),
            |it| it.members[0].client_urls.clear(),
        ];
        for (number, breaks) in broken.into_iter().enumerate() {
            let mut adoption = adoption();
            breaks(&mut adoption);
            assert!(adoption.check(3).is_err(), "case {number}");
        }
    }

    #[test]
    fn names_of_etcd_become_names_at_discovery() {
        for (etcd, ours) in [
            ("infra1", Some("infra1")),
            ("Node_1.example.org", Some("node-1-example-org")),
            ("-x-", Some("x")),
            ("...", None),
            ("", None),
        ] {
            assert_eq!(member_name(etcd).map(|name| name.to_string()).as_deref(), ours, "{etcd}");
        }
    }
}
