//! What a directory remembers of having been made a cluster of its own, by force.

use serde::{Deserialize, Serialize};

use super::{ClusterId, Incarnation, MemberId};

/// Who a data directory acts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bearer {
    /// The cluster.
    #[serde(with = "as_hex")]
    pub cluster_id: ClusterId,
    /// The member of it.
    #[serde(with = "as_hex")]
    pub member_id: MemberId,
    /// Its incarnation.
    #[serde(with = "as_hex")]
    pub incarnation: Incarnation,
}

/// A member of the old cluster that is none of the new one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dropped {
    /// Its id.
    #[serde(with = "as_hex")]
    pub member_id: MemberId,
    /// Its name.
    pub name: String,
    /// Where its peers reached it.
    pub peer_urls: Vec<String>,
    /// It had no vote.
    pub is_learner: bool,
}

/// A cluster of one, made of a member's data: the plan before it is carried out, and the record of
/// it ever after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forced {
    version: u64,
    /// When, RFC 3339.
    pub at: String,
    /// Who the directory was.
    pub was: Bearer,
    /// Who it is.
    pub is: Bearer,
    /// Incarnations that the directory had before `was`.
    #[serde(with = "as_hex_list")]
    pub earlier: Vec<Incarnation>,
    /// The entry up to which the old member knew its log to be committed.
    pub committed: u64,
    /// The last entry of the old log: all of it was kept.
    pub last_index: u64,
    /// Its term.
    pub last_term: u64,
    /// Where the new log begins.
    pub base_index: u64,
    /// In this term.
    pub base_term: u64,
    /// The old cluster's other members.
    pub dropped: Vec<Dropped>,
    /// The member has been started without the flag since: the next one that has it counts again.
    #[serde(default)]
    pub rearmed: bool,
}

impl Forced {
    /// The format of the file.
    const VERSION: u64 = 1;

    /// A plan that is `at` this version of the file.
    #[must_use]
    pub fn new(at: String, was: Bearer, is: Bearer, before: Option<&Self>) -> Self {
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

    /// The same, with the flag counting again.
    #[must_use]
    pub fn rearm(self) -> Self {
        Self { rearmed: true, ..self }
    }

    /// Whether a build that knows this version wrote it.
    #[must_use]
    pub(super) fn is_known(&self) -> bool {
        self.version == Self::VERSION
    }

    /// Whether the directory once was this incarnation.
    #[must_use]
    pub fn descends_from(&self, incarnation: Incarnation) -> bool {
        self.was.incarnation == incarnation || self.earlier.contains(&incarnation)
    }

    /// Entries that it kept though nothing in its directory said that they were committed.
    #[must_use]
    pub fn kept_unknown(&self) -> u64 {
        self.last_index.saturating_sub(self.committed)
    }
}

/// Ids as they stand in logs and commands.
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

    fn bearer(of: u8) -> Bearer {
        let incarnation = Incarnation([of; 16]);
        Bearer { cluster_id: ClusterId(of.into()), member_id: MemberId(of.into()), incarnation }
    }

    #[test]
    fn a_record_reads_back_and_knows_whom_it_descends_from() {
        let first = Forced::new("t".to_owned(), bearer(1), bearer(2), None);
        let second = Forced::new("t".to_owned(), bearer(2), bearer(3), Some(&first));
        let read: Forced = serde_json::from_str(&serde_json::to_string(&second).unwrap()).unwrap();
        assert_eq!(read, second);
        let descends = |of| read.descends_from(bearer(of).incarnation);
        assert_eq!([1, 2, 3, 4].map(descends), [true, true, false, false]);
    }

    #[test]
    fn entries_beyond_the_known_commit_are_counted() {
        let mut made = Forced::new("t".to_owned(), bearer(1), bearer(2), None);
        (made.committed, made.last_index) = (7, 9);
        assert_eq!(made.kept_unknown(), 2);
    }
}
