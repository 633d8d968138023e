//! The plan and record of a single-member cluster that was made by force from a data directory.

use serde::{Deserialize, Serialize};

use super::{ClusterId, Incarnation, MemberId};

/// Ids that a data directory uses: those of its cluster, its member and its incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberIdentity {
    /// Id of the cluster.
    #[serde(with = "as_hex")]
    pub cluster_id: ClusterId,
    /// Id of the member.
    #[serde(with = "as_hex")]
    pub member_id: MemberId,
    /// Incarnation of the data directory.
    #[serde(with = "as_hex")]
    pub incarnation: Incarnation,
}

/// A member of the old cluster that is not in the new one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DroppedMember {
    /// Id of the member.
    #[serde(with = "as_hex")]
    pub member_id: MemberId,
    pub name: String,
    /// URLs under which peers reached the member.
    pub peer_urls: Vec<String>,
    /// Whether the member was a learner, which had no vote.
    pub is_learner: bool,
}

/// A single-member cluster that was made from a member's data. The value is the plan of the cluster
/// before it is made, and the record of the cluster afterwards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForcedCluster {
    version: u64,
    /// Time at which the cluster was planned, in RFC 3339 format.
    pub at: String,
    /// Identity of the directory in the old cluster.
    pub was: MemberIdentity,
    /// Identity of the directory in the new cluster.
    pub is: MemberIdentity,
    /// Incarnations that the directory had before the one in `was`, from earlier forced clusters.
    #[serde(with = "as_hex_list")]
    pub earlier: Vec<Incarnation>,
    /// Index of the last entry that the old member knew to be committed.
    pub committed: u64,
    /// Index of the last entry that was kept. All entries of a muster-node's log were kept. From an
    /// etcd's log, an uncommitted entry that removes the member was dropped, with all later
    /// entries.
    pub last_index: u64,
    /// Term of the last entry that was kept; 0 if an etcd's log does not show it.
    pub last_term: u64,
    /// Index after which the new cluster's log begins.
    pub base_index: u64,
    /// Term of the position with the index [`Self::base_index`].
    pub base_term: u64,
    /// The old cluster's other members.
    pub dropped: Vec<DroppedMember>,
    /// Whether the member has been started without `--force-new-cluster` after this cluster was
    /// made. If so, the flag takes effect again.
    #[serde(default)]
    pub rearmed: bool,
}

impl ForcedCluster {
    /// Version of the file format that this build writes.
    const VERSION: u64 = 1;

    /// Creates a plan made at the time `at`. `before` is the record of an earlier forced cluster,
    /// whose incarnations are kept.
    #[must_use]
    pub fn new(at: String, was: MemberIdentity, is: MemberIdentity, before: Option<&Self>) -> Self {
        let mut earlier = before.map(|forced| forced.earlier.clone()).unwrap_or_default();
        earlier.extend(before.map(|forced| forced.was.incarnation));
        Self {
            version: Self::VERSION,
            at,
            was,
            is,
            earlier,
            committed: 0,
            last_index: 0,
            last_term: 0,
            base_index: 0,
            base_term: 0,
            dropped: Vec::new(),
            rearmed: false,
        }
    }

    /// Returns the record with `rearmed` set, so that `--force-new-cluster` takes effect again.
    #[must_use]
    pub fn rearm(self) -> Self {
        Self { rearmed: true, ..self }
    }

    /// Whether the record has the version that this build knows.
    #[must_use]
    pub(super) fn is_known(&self) -> bool {
        self.version == Self::VERSION
    }

    /// Whether the directory had this incarnation before.
    #[must_use]
    pub fn descends_from(&self, incarnation: Incarnation) -> bool {
        self.was.incarnation == incarnation || self.earlier.contains(&incarnation)
    }

    /// Returns the number of entries that were kept but not known to be committed.
    #[must_use]
    pub fn kept_uncommitted(&self) -> u64 {
        self.last_index.saturating_sub(self.committed)
    }
}

/// Serialises ids as hex digits, as logs and commands show them.
mod as_hex {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(super) trait Hex: Sized {
        fn read(text: &str) -> Option<Self>;
    }

    impl Hex for super::MemberId {
        fn read(text: &str) -> Option<Self> {
            u64::from_str_radix(text, 16).ok().map(Self)
        }
    }

    impl Hex for super::ClusterId {
        fn read(text: &str) -> Option<Self> {
            u64::from_str_radix(text, 16).ok().map(Self)
        }
    }

    impl Hex for super::Incarnation {
        fn read(text: &str) -> Option<Self> {
            text.parse().ok()
        }
    }

    pub(super) fn serialize<S: Serializer>(
        value: &impl ToString,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_str(&value.to_string())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>, T: Hex>(from: D) -> Result<T, D::Error> {
        let text = String::deserialize(from)?;
        T::read(&text).ok_or_else(|| D::Error::custom("it is not an id in hex digits"))
    }
}

mod as_hex_list {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    use super::{Incarnation, as_hex::Hex as _};

    pub(super) fn serialize<S: Serializer>(list: &[Incarnation], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(list.iter().map(ToString::to_string))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<Incarnation>, D::Error> {
        let texts = Vec::<String>::deserialize(from)?;
        let list = texts.iter().map(|text| Incarnation::read(text)).collect::<Option<_>>();
        list.ok_or_else(|| D::Error::custom("an incarnation is not in hex digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(of: u8) -> MemberIdentity {
        let incarnation = Incarnation([of; 16]);
        MemberIdentity {
            cluster_id: ClusterId(of.into()),
            member_id: MemberId(of.into()),
            incarnation,
        }
    }

    #[test]
    fn a_record_survives_json_and_knows_its_earlier_incarnations() {
        let first = ForcedCluster::new("t".to_owned(), bearer(1), bearer(2), None);
        let second = ForcedCluster::new("t".to_owned(), bearer(2), bearer(3), Some(&first));
        let read: ForcedCluster =
            serde_json::from_str(&serde_json::to_string(&second).unwrap()).unwrap();
        assert_eq!(read, second);
        let descends = |of| read.descends_from(bearer(of).incarnation);
        assert_eq!([1, 2, 3, 4].map(descends), [true, true, false, false]);
    }

    #[test]
    fn entries_beyond_the_known_commit_are_counted() {
        let mut made = ForcedCluster::new("t".to_owned(), bearer(1), bearer(2), None);
        (made.committed, made.last_index) = (7, 9);
        assert_eq!(made.kept_uncommitted(), 2);
    }
}
