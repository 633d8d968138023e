//! The members of the cluster, as the cluster has agreed: one table, in the store.
//!
//! The table changes only by committed entries, in the transaction that applies them. So it always
//! corresponds to the store's applied index. The transport and the Cluster service take the members
//! from this table. Consensus does so only when it starts; after that, it keeps a configuration of
//! its own. Table and configuration are compared after each change and on each snapshot. A
//! difference ends the process. The command line and the member document are used at a bootstrap
//! only.
//!
//! Before a change is proposed, the leader judges whether the change would leave a quorum
//! (`ruling`, with the rules in the crate `member_rules`). The proposed change names the
//! configuration on which it was judged, and is refused on any other. The next change is proposed
//! only once the last one has settled, which means that a quorum has a later entry on disk. The
//! leader has the commit of a change on its own disk before any other member or client can learn of
//! that commit.
//!
//! A member that was unreachable has an old table. Other members send it their view of the members
//! (`census`). A census changes no table. It only lets the receiver exchange messages with newer
//! members and use newer addresses.
//!
//! A removed member is remembered for ever, with its incarnation and its key. No new member can
//! have the id, the incarnation or the key of a removed one. A key that is bound in a member's
//! record never changes. Only a member's first start can bind a key where none was bound.
//!
//! Operation ids are remembered too, each in the record of the member that the operation changed.
//! So a change whose outcome is unknown can be requested again, and is still carried out only once.

mod census;
mod change;
mod codec;
mod judge;
mod peer_url;
mod ruling;
mod table;

pub use self::{
    census::{Census, Censuses, Neighbour},
    change::{ChangeError, ChangeRequest, MemberChange},
    codec::MalformedMember,
    judge::ChangeObjection,
    peer_url::{PeerUrl, UrlError},
    ruling::{ChangeDecision, ChangeJudge, ChangeRefusal, ChangeRules},
    table::{CompletedOperation, Member, MemberAttributes, MemberTable, RemovedMember},
};

#[cfg(test)]
mod tests;
