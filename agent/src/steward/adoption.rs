//! Keeps newcomers out of an adopted cluster until agents have taken over all of its members.
//!
//! A member that isn't taken over trusts only the CAs that the cluster had before its adoption. It
//! would refuse a newcomer's certificate. Once an owner has dropped these CAs, every member trusts
//! the cluster's own CAs. Then the record of take-overs isn't read any more.

use discovery_types::intent::{IntentChange, IntentStep, VerifiedIntent};

use super::Steward;
use super::decide::StewardAction;
use crate::adopt::record;
use crate::cluster::{MemberId, MemberList};

impl Steward {
    /// Returns why the newcomer of an intent can't be added now. `None` if it can, or if `act`
    /// isn't the addition of the newcomer.
    pub(super) async fn why_not_add(
        &self,
        intent: &VerifiedIntent,
        act: &StewardAction,
        members: &MemberList,
    ) -> Option<String> {
        let StewardAction::Change(_, IntentStep::Add) = act else { return None };
        let replaced = match intent.change() {
            IntentChange::Add { replaces, .. } => (*replaces).map(|id| MemberId(id.get())),
            IntentChange::Remove { .. } | IntentChange::Update { .. } => None,
        };
        self.unfinished_adoption(members, replaced).await.unwrap_or_else(Some)
    }

    /// Returns why no newcomer can be added to an adopted cluster yet: some members aren't taken
    /// over. The member `replaced`, whose place the newcomer takes, doesn't count.
    ///
    /// # Errors
    /// Fails if the record of take-overs can't be read.
    pub(super) async fn unfinished_adoption(
        &self,
        members: &MemberList,
        replaced: Option<MemberId>,
    ) -> Result<Option<String>, String> {
        let chain = self.statements.chain();
        let (Some(adoption), true) = (&chain.newest().adopted, chain.trusts_cas_before_adoption())
        else {
            return Ok(None);
        };
        let read = record::read(&self.node, self.list).await;
        let (_, record) = read.map_err(|error| error.to_string())?;
        let mut unmanaged = record.unmanaged(adoption, members);
        unmanaged.retain(|(id, _)| Some(*id) != replaced);
        let names: Vec<&str> = unmanaged.into_iter().map(|(_, name)| name).collect();
        Ok((!names.is_empty()).then(|| {
            format!(
                "{} would refuse a newcomer's certificate: take over all members first (muster-agent \
                 adopt take-over)",
                names.join(", ")
            )
        }))
    }
}
