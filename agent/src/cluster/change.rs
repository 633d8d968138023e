//! Changes of the members, each carried out at most once although its answer may be lost.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};

use super::{Cluster, ClusterError, MemberId, Members};

/// gRPC metadata keys: the operation id and planned configuration of a request, and the incarnation
/// and key that a new member is bound to.
const OPERATION: &str = "muster-operation";
const PLANNED_AT: &str = "muster-planned-at";
const INCARNATION: &str = "muster-incarnation";
const NODE_KEY: &str = "muster-node-key";

/// How long the list of members is requested after an answer was lost, and the pause between
/// attempts.
const LOOK_LIMIT: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Maximum number of times that one change is sent.
const MOST_TRIES: u32 = 3;

/// One change of the members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Add a new member to the cluster.
    Add(NewMember),
    /// Make a learner a voter.
    Promote(MemberId),
    /// Remove a member for ever.
    Remove(MemberId),
    /// Set a member's peer URLs.
    Update(MemberId, Vec<String>),
}

/// A member to be added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NewMember {
    /// Peer URLs of the new member.
    pub peer_urls: Vec<String>,
    /// Whether the member begins without a vote.
    pub is_learner: bool,
    /// The only incarnation that may act as this member, 32 hex digits.
    pub incarnation: Option<String>,
    /// The only key that may speak for this member, 64 hex digits.
    pub node_key: Option<String>,
}

/// Metadata of a change, for clusters that understand it (muster-node).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Carrying {
    /// Id of the operation, which the cluster carries out at most once.
    pub operation: [u8; 16],
    /// Configuration for which the change was planned; on any other one the cluster refuses it.
    pub planned_at: Option<u64>,
}

impl Change {
    /// Returns the change's name as operators type it.
    pub(crate) fn what(&self) -> &'static str {
        match self {
            Self::Add(_) => "member add",
            Self::Promote(_) => "member promote",
            Self::Remove(_) => "member remove",
            Self::Update(..) => "member update",
        }
    }

    /// Returns whether the members show this change as made.
    pub(crate) fn is_shown_by(&self, members: &Members) -> bool {
        let of = |id: &MemberId| members.of_id(*id);
        match self {
            Self::Add(new) => members.of_peer_urls(&new.peer_urls).is_some(),
            Self::Promote(id) => of(id).is_some_and(|member| !member.is_learner),
            Self::Remove(id) => of(id).is_none(),
            Self::Update(id, urls) => {
                let same = |found: &Vec<String>| {
                    urls.len() == found.len() && urls.iter().all(|url| found.contains(url))
                };
                of(id).is_some_and(|member| same(&member.peer_urls))
            }
        }
    }
}

impl Change {
    /// Returns whether the members show that this very change was made. Another operation may have
    /// added a member with equal URLs. If the cluster keeps operation ids, sending the addition
    /// again tells, so the list alone doesn't count.
    fn is_surely_shown_by(&self, members: &Members) -> bool {
        let knows_operations = members.configuration.is_some();
        self.is_shown_by(members) && !(matches!(self, Self::Add(_)) && knows_operations)
    }
}

impl NewMember {
    pub(super) fn metadata(&self, mut metadata: MetadataMap) -> MetadataMap {
        for (name, value) in [(INCARNATION, &self.incarnation), (NODE_KEY, &self.node_key)] {
            if let Some(value) = value {
                metadata.insert(name, ascii(value));
            }
        }
        metadata
    }
}

impl Carrying {
    pub(super) fn metadata(&self) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        let operation = data_encoding::HEXLOWER.encode(&self.operation);
        metadata.insert(OPERATION, ascii(&operation));
        if let Some(index) = self.planned_at {
            metadata.insert(PLANNED_AT, index.into());
        }
        metadata
    }
}

fn ascii(digits: &str) -> MetadataValue<Ascii> {
    digits.parse().expect("digits are ASCII")
}

impl Cluster {
    /// Makes a change, and returns the members after it. If the answer is lost, the list of members
    /// is read before the change is sent again, with the same operation id. `muster-node` carries
    /// out an operation id once. Stock etcd knows no such ids. There an addition counts as made if
    /// its URLs are in the list, and every other change can be repeated.
    pub(crate) async fn carry_out(
        &self,
        change: &Change,
        carrying: &Carrying,
    ) -> Result<Members, ClusterError> {
        let mut tries = 1;
        loop {
            let lost = match self.send(change, carrying).await {
                // An earlier attempt, whose answer was lost, has made the change.
                Err(ClusterError::CarriedOut { .. }) if tries > 1 => return self.look().await,
                Err(lost) if lost.is_ambiguous() => lost,
                // The attempt whose answer was lost may have made the change, which would cause
                // this refusal.
                Err(ClusterError::Refused { code, text }) if tries > 1 => {
                    let members = self.look().await?;
                    return if change.is_surely_shown_by(&members) {
                        Ok(members)
                    } else {
                        Err(ClusterError::Refused { code, text })
                    };
                }
                // This attempt did nothing, but the earlier one may have made the change.
                Err(error) if tries > 1 && error.is_silence() => {
                    ClusterError::Ambiguous { what: change.what(), text: error.to_string() }
                }
                answer => return answer,
            };
            tracing::debug!(error = %lost, "looking what became of a change");
            let members = self.look().await.map_err(|_| lost_again(&lost))?;
            if change.is_surely_shown_by(&members) {
                return Ok(members);
            }
            if tries == MOST_TRIES {
                return Err(lost);
            }
            tries += 1;
        }
    }

    /// Reads the list of members, retrying until one answers or [`LOOK_LIMIT`] has passed.
    async fn look(&self) -> Result<Members, ClusterError> {
        let start = Instant::now();
        loop {
            match self.list().await {
                Err(error) if error.is_silence() && start.elapsed() < LOOK_LIMIT => {
                    sleep(LOOK_AGAIN).await;
                }
                answer => return answer,
            }
        }
    }
}

/// Adds to the error of a lost answer that the list of members could not be read either.
fn lost_again(lost: &ClusterError) -> ClusterError {
    match lost {
        ClusterError::Ambiguous { what, text } => ClusterError::Ambiguous {
            what,
            text: format!("{text}; nor does anybody give the list of members now"),
        },
        other => ClusterError::Unavailable { text: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::super::Member;
    use super::*;

    fn members(list: &[(u64, &str, bool)]) -> Members {
        let member = |&(id, url, is_learner): &(u64, &str, bool)| Member {
            id: MemberId(id),
            peer_urls: vec![url.to_owned()],
            is_learner,
            ..Member::default()
        };
        Members { list: list.iter().map(member).collect(), ..Members::default() }
    }

    #[test]
    fn a_list_shows_what_became_of_a_change() {
        let before = members(&[(1, "a", false), (2, "b", true)]);
        let url = |url: &str| vec![url.to_owned()];
        let add = Change::Add(NewMember { peer_urls: url("c"), ..NewMember::default() });
        for (change, after) in [
            (add, members(&[(1, "a", false), (2, "b", true), (3, "c", true)])),
            (Change::Promote(MemberId(2)), members(&[(1, "a", false), (2, "b", false)])),
            (Change::Remove(MemberId(2)), members(&[(1, "a", false)])),
            (Change::Update(MemberId(1), url("z")), members(&[(1, "z", false), (2, "b", true)])),
        ] {
            assert!(!change.is_shown_by(&before), "{change:?}");
            assert!(change.is_shown_by(&after), "{change:?}");
        }
        // A member that is gone doesn't count as promoted.
        assert!(!Change::Promote(MemberId(2)).is_shown_by(&members(&[(1, "a", false)])));
    }
}
