//! What is done when a cluster is lost for good: another one is made of what is left.
//!
//! # A cluster of one, of a survivor's directory (`--force-new-cluster`)
//!
//! *What is kept.* The whole log. Of its last entries nothing in one directory says which were
//! committed: a member learns that late, and writes it down later still. To cut them off would lose
//! writes that a majority, this member among it, had acknowledged. To keep them is what Raft itself
//! does: a member that is elected with this log commits all of it, and the clients of the entries
//! that no majority had were never told that they had failed. So the new cluster is what an election
//! would have made that only this member could vote in. What a member has that is gone, and this one
//! never had, nobody here can know.
//!
//! *What is new.* Cluster id, member id and incarnation, all from one random number: members of the
//! old cluster can't talk to the new one, nor can two survivors that were both made one take each
//! other for their own, and what peers remember of the old member is not about the new one. All old
//! ids and incarnations count as removed. The revision is higher by [`REVISION_BUMP`] and everything
//! before it is compacted: the lost members may have shown revisions to clients that this one never
//! had, and whoever watches from one of those has to read anew.
//!
//! *When it is done.* The plan (`muster-forcing.json`) holds the new ids. Then the store applies the
//! rest of the log and becomes the new cluster's, in what is one durable commit: up to there the
//! directory is the old member, and from there on the new one, with or without the flag. The rest
//! (log, marker, record) follows from plan and store, and each start finishes it.
//!
//! *How often.* Once. A flag that is left in a unit file must not unmake the cluster at each restart,
//! as it does with etcd: the record (`muster-forced.json`) spends it, and a start without the flag
//! makes it count again.

mod etcd;
mod finish;
mod force;
mod look;
mod restore;

pub use self::{
    etcd::{EtcdError, EtcdTools, WalError, recover as recover_etcd},
    force::{ForceError, REVISION_BUMP},
    look::{LogSight, Maker, MemberSight, Sight, State, StoreSight, look},
    restore::{Restore, RestoreError, Restored, restore, token_of},
};
pub(crate) use self::{
    finish::resume,
    force::{Survivor, force},
};
