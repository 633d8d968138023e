//! Finds which operation removed a member, so that an interrupted replacement can go on.
//!
//! For each removed member, `muster-node` keeps the id of the operation that removed it. So an
//! operation can send its removal again: the answer shows whether this operation removed the
//! member, and the repetition changes nothing. Stock etcd keeps no such ids. With stock etcd, an
//! operation announces a removal in the cluster's own store before it removes a member.
//!
//! A newcomer takes the place of a removed member only if its own operation removed that member.
//! Otherwise two replacements of one member would make the cluster grow.

use super::{
    ChangeMetadata, ClusterApiClient, ClusterError, ClusterMemberChange, ClusterRefusal, MemberId,
    MemberList,
};

/// Prefix of a key in the cluster's store, which ends with a member's id. The value is the id of
/// the operation that last announced the replacement of that member.
const REPLACED: &str = "muster/v1/replaced/";

/// Origin of the removal of a member that is being replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RemovalOrigin {
    /// This agent has not yet asked the cluster which operation removed the member.
    #[default]
    Unknown,
    /// The replacement itself removed the member, so the newcomer takes the free place.
    Own,
    /// Another operation removed the member, so the newcomer would make the cluster larger than
    /// intended.
    Foreign,
}

impl ClusterApiClient {
    /// Announces in the store that `operation` will remove `old`. Does nothing if the cluster keeps
    /// operation ids.
    pub(crate) async fn announce_removal(
        &self,
        old: MemberId,
        operation: &[u8; 16],
        members: &MemberList,
    ) -> Result<(), ClusterError> {
        if members.configuration.is_some() {
            return Ok(());
        }
        let key = format!("{REPLACED}{old}");
        let stored = self.read_key(&key).await?;
        let own = data_encoding::HEXLOWER.encode(operation).into_bytes();
        if stored.value.as_ref() == Some(&own)
            || self.replace_key_if_unchanged(&key, &stored, &own).await?
        {
            return Ok(());
        }
        let text = format!("another operation is about to remove member {old}, too");
        Err(ClusterError::Unavailable { text })
    }

    /// Returns whether `operation` or another operation has removed `old`, which is no longer among
    /// `members`.
    pub(crate) async fn removal_origin(
        &self,
        old: MemberId,
        operation: &[u8; 16],
        members: &MemberList,
    ) -> Result<RemovalOrigin, ClusterError> {
        if members.configuration.is_none() {
            let stored = self.read_key(&format!("{REPLACED}{old}")).await?;
            let own = data_encoding::HEXLOWER.encode(operation).into_bytes();
            let is_own = stored.value == Some(own);
            return Ok(if is_own { RemovalOrigin::Own } else { RemovalOrigin::Foreign });
        }
        let carrying = ChangeMetadata {
            operation: *operation,
            planned_at: members.configuration,
            send_before: None,
        };
        match self.send_change(&ClusterMemberChange::Remove(old), &carrying).await {
            Err(error) if error.refusal() == Some(ClusterRefusal::MemberNotFound) => {
                Ok(RemovalOrigin::Foreign)
            }
            // A member's id is never reused, so an answer can't mean that another member was
            // removed.
            Err(ClusterError::CarriedOut { .. }) | Ok(_) => Ok(RemovalOrigin::Own),
            Err(error) => Err(error),
        }
    }
}
