//! Who belongs to the cluster, as the cluster has agreed: one table, in the store.
//!
//! The table changes only by committed entries, in the transaction that applies them, so that it is
//! always that of the store's applied index. Whoever wants to know who is a member asks it: consensus
//! at its start, the transport, the Cluster service. Consensus keeps a configuration of its own from
//! then on, and the two are compared after each change and on each snapshot.
//!
//! Before a change is proposed it is judged (`ruling`, by the rules in `judge`): whether a quorum would
//! be left. It then names the configuration that it was judged on, and is refused on another one.
//!
//! A member that was away has an old table; what the others tell it of the members (`census`) lets it
//! hear those that came meanwhile, and no more.
//!
//! A member that was removed is remembered for ever, with its incarnation: neither comes back. So are
//! the operations that made the members what they are, each with the member that it was on: a change
//! that was lost from sight can be asked for again, and is carried out once.

mod census;
mod change;
mod codec;
mod judge;
mod ruling;
mod table;

pub(crate) use self::table::Published;
pub use self::{
    census::{Census, Censuses, Neighbour},
    change::{ChangeError, ChangeRequest, MemberChange},
    codec::MalformedMember,
    judge::Objection,
    ruling::{Judge, Refused, Rules, Ruling},
    table::{Member, MemberTable, Operation, RemovedMember},
};

#[cfg(test)]
mod tests;
