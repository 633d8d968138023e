//! By which operation a member was removed, for a replacement that goes on where it was interrupted.
//!
//! `muster-node` keeps an operation's id with the member that it removed: asking for the removal again
//! tells whether this operation has made it, and changes nothing. Stock etcd keeps no such ids. There
//! an operation writes into the cluster's own store, before it removes a member, that it is about to.

use tonic::Code;

use super::{Carrying, Change, Cluster, ClusterError, MemberId, Members};

/// Below this key stands, by a member's id, the last operation that was about to replace that member.
const REPLACED: &str = "muster/v1/replaced/";

impl Cluster {
    /// Writes down that `operation` is about to remove `old`, where the cluster keeps no operation ids.
    pub(crate) async fn announce_removal(
        &self,
        old: MemberId,
        operation: &[u8; 16],
        members: &Members,
    ) -> Result<(), ClusterError> {
        if members.configuration.is_some() {
            return Ok(());
        }
        let key = format!("{REPLACED}{old}");
        let stored = self.read(&key).await?;
        let own = data_encoding::HEXLOWER.encode(operation).into_bytes();
        if stored.value.as_ref() == Some(&own) || self.replace(&key, &stored, &own).await? {
            return Ok(());
        }
        let text = format!("another operation is about to remove member {old}, too");
        Err(ClusterError::Unavailable { text })
    }

    /// Whether `operation` has removed `old`, which is not among `members` any more.
    pub(crate) async fn has_removed(
        &self,
        old: MemberId,
        operation: &[u8; 16],
        members: &Members,
    ) -> Result<bool, ClusterError> {
        if members.configuration.is_none() {
            let stored = self.read(&format!("{REPLACED}{old}")).await?;
            let own = data_encoding::HEXLOWER.encode(operation).into_bytes();
            return Ok(stored.value == Some(own));
        }
        let carrying = Carrying { operation: *operation, planned_at: members.configuration };
        match self.send(&Change::Remove(old), &carrying).await {
            Err(ClusterError::CarriedOut { .. }) => Ok(true),
            Err(ClusterError::Refused { code: Code::NotFound, .. }) => Ok(false),
            Err(error) => Err(error),
            // A member's id is never given to another one, so this can't remove anybody else.
            Ok(_) => Ok(true),
        }
    }
}
