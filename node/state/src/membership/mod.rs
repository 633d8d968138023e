//! The members of the cluster, as the cluster has agreed: one table, in the store.
//!
//! The table changes only by committed entries, in the transaction that applies them. So it always
//! corresponds to the store's applied index. Consensus at its start, the transport and the Cluster
//! service all take the members from it. After its start, consensus keeps a configuration of its
//! own. The two are compared after each change and on each snapshot. A difference ends the process.
//! The command line and the member document count at a bootstrap only.
//!
//! Before a change is proposed, the leader judges whether it would leave a quorum (`ruling`, with
//! the rules in the crate `member_rules`). The proposed change names the configuration on which it was judged, and
//! is refused on any other. The next change is proposed only once the last one has settled: a
//! quorum has a later entry on disk. The leader has the commit of a change on its own disk before
//! anybody else hears of it.
//!
//! A member that was unreachable has an old table. Other members send it their view of the members
//! (`census`). It only lets that member accept connections from newer members.
//!
//! A removed member is remembered for ever, with its incarnation, and neither can be added again.
//! The same holds for its key. A key that is bound in a member's record never changes. Only a
//! member's first start can bind a key where none was bound.
//!
//! Operation ids are remembered too, each with the member that the operation was on. So a change
//! whose outcome is unknown can be requested again, and is carried out once.

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
