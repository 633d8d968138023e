//! Encodes members as bytes for log entries, the store's file and snapshots, and converts them to
//! etcd's messages.

use bytes::Bytes;
use node_proto::{etcdserverpb, musterpb};

use super::{
    ChangeError, ChangeRequest, CompletedOperation, Member, MemberAttributes, MemberChange,
    RemovedMember,
};
use crate::identity::{Incarnation, MemberId, NodeKey, OperationId};

/// Error for a message that decodes but describes no valid member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an incarnation, key or operation has a wrong length")]
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
            changed: member.changed_at,
            vote_when_ready: member.vote_when_ready,
            operations: encode_operations(&member.operations),
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
            changed_at: member.changed,
            vote_when_ready: member.vote_when_ready,
            operations: decode_operations(&member.operations)?,
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

impl TryFrom<musterpb::PublishMember> for MemberAttributes {
    type Error = ChangeError;

    fn try_from(published: musterpb::PublishMember) -> Result<Self, ChangeError> {
        let malformed = |MalformedMember| ChangeError::Malformed;
        Ok(Self {
            incarnation: exact(&published.incarnation).map_err(malformed)?.map(Incarnation),
            node_key: exact(&published.node_key).map_err(malformed)?.map(NodeKey),
            name: published.name,
            client_urls: published.client_urls,
        })
    }
}

impl MemberAttributes {
    /// Encodes the command by which the member `id` publishes itself.
    pub fn encode(&self, id: MemberId) -> musterpb::PublishMember {
        musterpb::PublishMember {
            member_id: id.0,
            name: self.name.clone(),
            client_urls: self.client_urls.clone(),
            incarnation: optional(self.incarnation.map(|incarnation| incarnation.0)),
            node_key: optional(self.node_key.map(|key| key.0)),
        }
    }
}

impl RemovedMember {
    /// Encodes the removed member as a row of the store.
    #[must_use]
    pub fn encode(&self, id: MemberId) -> musterpb::RemovedMember {
        let incarnation = optional(self.incarnation.map(|incarnation| incarnation.0));
        let node_key = optional(self.node_key.map(|key| key.0));
        let operations = encode_operations(&self.operations);
        musterpb::RemovedMember { id: id.0, incarnation, node_key, index: self.index, operations }
    }

    /// Decodes a row that [`Self::encode`] returned.
    pub fn decode(row: &musterpb::RemovedMember) -> Result<(MemberId, Self), MalformedMember> {
        let incarnation = exact(&row.incarnation)?.map(Incarnation);
        let node_key = exact(&row.node_key)?.map(NodeKey);
        let operations = decode_operations(&row.operations)?;
        Ok((MemberId(row.id), Self { incarnation, node_key, index: row.index, operations }))
    }
}

impl From<&MemberChange> for musterpb::MemberChange {
    fn from(change: &MemberChange) -> Self {
        use musterpb::member_change::Change;
        let change = match change {
            MemberChange::Add(member) => Change::Add(member.into()),
            MemberChange::Promote(id) => Change::Promote(id.0),
            MemberChange::Remove(id) => Change::Remove(id.0),
            MemberChange::Update(id, urls) => {
                Change::Update(musterpb::MemberUpdate { id: id.0, peer_urls: urls.clone() })
            }
        };
        Self { change: Some(change), planned_at: None, operation: Bytes::new() }
    }
}

impl From<&ChangeRequest> for musterpb::MemberChange {
    fn from(asked: &ChangeRequest) -> Self {
        let operation = optional(asked.operation.map(|operation| operation.0));
        Self { planned_at: asked.planned_at, operation, ..(&asked.change).into() }
    }
}

impl TryFrom<musterpb::MemberChange> for ChangeRequest {
    type Error = ChangeError;

    fn try_from(asked: musterpb::MemberChange) -> Result<Self, ChangeError> {
        let malformed = |MalformedMember| ChangeError::Malformed;
        Ok(Self {
            planned_at: asked.planned_at,
            operation: exact(&asked.operation).map_err(malformed)?.map(OperationId),
            change: asked.try_into()?,
        })
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
            Some(Change::Update(update)) => Ok(Self::Update(MemberId(update.id), update.peer_urls)),
            // This can't happen, because decoding fails earlier for a command without a change.
            None => Err(ChangeError::Malformed),
        }
    }
}

fn encode_operations(operations: &[CompletedOperation]) -> Vec<musterpb::Operation> {
    let encode = |operation: &CompletedOperation| musterpb::Operation {
        id: Bytes::copy_from_slice(&operation.id.0),
        index: operation.index,
    };
    operations.iter().map(encode).collect()
}

fn decode_operations(
    rows: &[musterpb::Operation],
) -> Result<Vec<CompletedOperation>, MalformedMember> {
    let decode = |row: &musterpb::Operation| {
        let id = exact(&row.id)?.map(OperationId).ok_or(MalformedMember)?;
        Ok(CompletedOperation { id, index: row.index })
    };
    rows.iter().map(decode).collect()
}

fn optional<const N: usize>(bytes: Option<[u8; N]>) -> Bytes {
    bytes.map_or_else(Bytes::new, |bytes| Bytes::copy_from_slice(&bytes))
}

/// Converts bytes to an array of the expected length; no bytes at all become `None`.
fn exact<const N: usize>(bytes: &Bytes) -> Result<Option<[u8; N]>, MalformedMember> {
    if bytes.is_empty() {
        return Ok(None);
    }
    bytes.as_ref().try_into().map(Some).map_err(|_| MalformedMember)
}
