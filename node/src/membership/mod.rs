//! Who belongs to the cluster, as the cluster has agreed: one table, in the store.
//!
//! The table changes only by committed entries, in the transaction that applies them, so that it is
//! always that of the store's applied index. Whoever wants to know who is a member asks it: consensus
//! at its start, the transport, the Cluster service. Consensus keeps a configuration of its own from
//! then on, and the two are compared after each change and on each snapshot.
//!
//! A member that was removed is remembered for ever, with its incarnation: neither comes back.

mod change;
mod codec;
mod table;

pub use self::{
    change::{ChangeError, MemberChange},
    codec::MalformedMember,
    table::{Member, MemberTable, RemovedMember},
};

#[cfg(test)]
mod tests;
