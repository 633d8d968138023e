//! Members as bytes, for entries, the store's file and snapshots; and as etcd's clients know them.

use bytes::Bytes;
use node_proto::{etcdserverpb, musterpb};

use super::{ChangeError, Member, MemberChange, RemovedMember};
use crate::identity::{Incarnation, MemberId, NodeKey};

/// A row or frame that is a message, but no member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an incarnation or key has a wrong length")]
pub struct MalformedMember;

impl From<&Member> for musterpb::Member {
    fn from(member: &Member) -> Self {
        Self {
            id: member.id.0,
            name: member.name.clone(),
            peer_urls: member.peer_urls.clone(),
            client_urls: member.client_urls.clone(),
            is_learner: member.is_learner,
            incarnation: optional(member.incarnation.map(|incarnation| incarnation.0)),
            node_key: optional(member.node_key.map(|key| key.0)),
        }
    }
}

impl TryFrom<musterpb::Member> for Member {
    type Error = MalformedMember;

    fn try_from(member: musterpb::Member) -> Result<Self, MalformedMember> {
        Ok(Self {
            id: MemberId(member.id),
            name: member.name,
            peer_urls: member.peer_urls,
            client_urls: member.client_urls,
            is_learner: member.is_learner,
            incarnation: exact(&member.incarnation)?.map(Incarnation),
            node_key: exact(&member.node_key)?.map(NodeKey),
        })
    }
}

impl From<&Member> for etcdserverpb::Member {
    fn from(member: &Member) -> Self {
        Self {
            id: member.id.0,
            name: member.name.clone(),
            peer_ur_ls: member.peer_urls.clone(),
            client_ur_ls: member.client_urls.clone(),
            is_learner: member.is_learner,
        }
    }
}

impl RemovedMember {
    /// Its row.
    #[must_use]
    pub fn encode(&self, id: MemberId) -> musterpb::RemovedMember {
        let incarnation = optional(self.incarnation.map(|incarnation| incarnation.0));
        musterpb::RemovedMember { id: id.0, incarnation, index: self.index }
    }

    /// What [`Self::encode`] gave.
    pub fn decode(row: &musterpb::RemovedMember) -> Result<(MemberId, Self), MalformedMember> {
        let incarnation = exact(&row.incarnation)?.map(Incarnation);
        Ok((MemberId(row.id), Self { incarnation, index: row.index }))
    }
}

impl From<&MemberChange> for musterpb::MemberChange {
    fn from(change: &MemberChange) -> Self {
        use musterpb::member_change::Change;
        Self {
            change: Some(match change {
                MemberChange::Add(member) => Change::Add(member.into()),
                MemberChange::Promote(id) => Change::Promote(id.0),
                MemberChange::Remove(id) => Change::Remove(id.0),
            }),
        }
    }
}

impl TryFrom<musterpb::MemberChange> for MemberChange {
    type Error = ChangeError;

    fn try_from(change: musterpb::MemberChange) -> Result<Self, ChangeError> {
        use musterpb::member_change::Change;
        match change.change {
            Some(Change::Add(member)) => {
                member.try_into().map(Self::Add).map_err(|MalformedMember| ChangeError::Malformed)
            }
            Some(Change::Promote(id)) => Ok(Self::Promote(MemberId(id))),
            Some(Change::Remove(id)) => Ok(Self::Remove(MemberId(id))),
            // Commands without a change are not decoded.
            None => Err(ChangeError::Malformed),
        }
    }
}

fn optional<const N: usize>(bytes: Option<[u8; N]>) -> Bytes {
    bytes.map_or_else(Bytes::new, |bytes| Bytes::copy_from_slice(&bytes))
}

/// Nothing, or exactly so many bytes.
fn exact<const N: usize>(bytes: &Bytes) -> Result<Option<[u8; N]>, MalformedMember> {
    if bytes.is_empty() {
        return Ok(None);
    }
    bytes.as_ref().try_into().map(Some).map_err(|_| MalformedMember)
}
