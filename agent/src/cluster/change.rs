//! Changes of the members, each carried out at most once, even if its answer is lost.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};

use super::{ClusterApiClient, ClusterError, MemberId, MemberList};

/// gRPC metadata key of a change's operation id.
const OPERATION: &str = "muster-operation";
/// gRPC metadata key of the configuration for which a change was planned.
const PLANNED_AT: &str = "muster-planned-at";
/// gRPC metadata key of the incarnation that a new member is bound to.
const INCARNATION: &str = "muster-incarnation";
/// gRPC metadata key of the public key that a new member is bound to.
const NODE_KEY: &str = "muster-node-key";

/// How long the list of members is requested again and again after an answer was lost.
const LIST_RETRY_LIMIT: Duration = Duration::from_secs(30);
/// Pause between two requests for the list of members.
const LIST_RETRY_PAUSE: Duration = Duration::from_millis(200);
/// Maximum number of times that one change is sent.
const MAX_ATTEMPTS: u32 = 3;

/// One change of the members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ClusterMemberChange {
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
pub(crate) struct ChangeMetadata {
    /// Id of the operation, which the cluster carries out at most once.
    pub operation: [u8; 16],
    /// Index of the configuration for which the change was planned. At any other configuration, the
    /// cluster refuses the change.
    pub planned_at: Option<u64>,
    /// Time after which the change must not be sent, because the facts that led to it are then too
    /// old.
    pub send_before: Option<Instant>,
}

impl ClusterMemberChange {
    /// Returns the change's name as operators type it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Add(_) => "member add",
            Self::Promote(_) => "member promote",
            Self::Remove(_) => "member remove",
            Self::Update(..) => "member update",
        }
    }

    /// Returns whether the list of members shows this change as made.
    pub(crate) fn is_visible_in(&self, members: &MemberList) -> bool {
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

impl ClusterMemberChange {
    /// Returns whether the list of members proves that this operation made the change. If the
    /// cluster keeps operation ids, the list proves no addition: another operation may have added a
    /// member with equal URLs. Sending the addition again then shows which operation added it.
    fn is_certainly_visible_in(&self, members: &MemberList) -> bool {
        let knows_operations = members.configuration.is_some();
        self.is_visible_in(members) && !(matches!(self, Self::Add(_)) && knows_operations)
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

impl ChangeMetadata {
    /// Whether the facts that led to the change are too old by now.
    fn is_too_late(&self) -> bool {
        self.send_before.is_some_and(|limit| Instant::now() > limit)
    }

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

impl ClusterApiClient {
    /// Makes a change, and returns the members after it. If the answer is lost, reads the list of
    /// members before it sends the change again, with the same operation id. `muster-node` carries
    /// out each operation id once. Stock etcd knows no operation ids. With stock etcd, an addition
    /// counts as made if its URLs are in the list. Every other change can be repeated. No change is
    /// sent after [`ChangeMetadata::send_before`].
    pub(crate) async fn carry_out(
        &self,
        change: &ClusterMemberChange,
        carrying: &ChangeMetadata,
    ) -> Result<MemberList, ClusterError> {
        let mut tries = 1;
        if carrying.is_too_late() {
            let text = format!("too much time has passed since {} was planned", change.name());
            return Err(ClusterError::Unavailable { text });
        }
        loop {
            let lost = match self.send_change(change, carrying).await {
                // An earlier attempt, whose answer was lost, has made the change.
                Err(ClusterError::CarriedOut { .. }) if tries > 1 => {
                    return self.list_members_with_retries().await;
                }
                Err(lost) if lost.is_ambiguous() => lost,
                // The attempt whose answer was lost may have made the change, which would cause
                // this refusal.
                Err(error @ ClusterError::Refused { .. }) if tries > 1 => {
                    let members = self.list_members_with_retries().await?;
                    return if change.is_certainly_visible_in(&members) {
                        Ok(members)
                    } else {
                        Err(error)
                    };
                }
                // This attempt changed nothing, but an earlier attempt may have made the change.
                Err(error) if tries > 1 && error.is_retryable() => {
                    ClusterError::Ambiguous { what: change.name(), text: error.to_string() }
                }
                answer => return answer,
            };
            tracing::debug!(error = %lost, "looking what became of a change");
            let members =
                self.list_members_with_retries().await.map_err(|_| add_unread_list(&lost))?;
            if change.is_certainly_visible_in(&members) {
                return Ok(members);
            }
            if tries == MAX_ATTEMPTS || carrying.is_too_late() {
                return Err(lost);
            }
            tries += 1;
        }
    }

    /// Reads the list of members, retrying until a member answers or [`LIST_RETRY_LIMIT`] has
    /// passed.
    async fn list_members_with_retries(&self) -> Result<MemberList, ClusterError> {
        let start = Instant::now();
        loop {
            match self.list_members().await {
                Err(error) if error.is_retryable() && start.elapsed() < LIST_RETRY_LIMIT => {
                    sleep(LIST_RETRY_PAUSE).await;
                }
                answer => return answer,
            }
        }
    }
}

/// Extends the error of a lost answer: the list of members could not be read either.
fn add_unread_list(lost: &ClusterError) -> ClusterError {
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
    use super::super::ClusterMember;
    use super::*;

    fn members(list: &[(u64, &str, bool)]) -> MemberList {
        let member = |&(id, url, is_learner): &(u64, &str, bool)| ClusterMember {
            id: MemberId(id),
            peer_urls: vec![url.to_owned()],
            is_learner,
            ..ClusterMember::default()
        };
        MemberList { list: list.iter().map(member).collect(), ..MemberList::default() }
    }

    #[test]
    fn a_list_shows_what_became_of_a_change() {
        let before = members(&[(1, "a", false), (2, "b", true)]);
        let url = |url: &str| vec![url.to_owned()];
        let add =
            ClusterMemberChange::Add(NewMember { peer_urls: url("c"), ..NewMember::default() });
        for (change, after) in [
            (add, members(&[(1, "a", false), (2, "b", true), (3, "c", true)])),
            (
                ClusterMemberChange::Promote(MemberId(2)),
                members(&[(1, "a", false), (2, "b", false)]),
            ),
            (ClusterMemberChange::Remove(MemberId(2)), members(&[(1, "a", false)])),
            (
                ClusterMemberChange::Update(MemberId(1), url("z")),
                members(&[(1, "z", false), (2, "b", true)]),
            ),
        ] {
            assert!(!change.is_visible_in(&before), "{change:?}");
            assert!(change.is_visible_in(&after), "{change:?}");
        }
        // A member that is missing in the list doesn't count as promoted.
        assert!(
            !ClusterMemberChange::Promote(MemberId(2)).is_visible_in(&members(&[(1, "a", false)]))
        );
    }
}
