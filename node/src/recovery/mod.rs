//! Makes a new cluster from the remaining data of a cluster that is lost for good.
//!
//! # A new cluster of one from a survivor's directory (`--force-new-cluster`)
//!
//! *What is kept.* The whole log is kept. A directory does not say which of its last entries were
//! committed: a member learns this late, and writes it to disk later still. Dropping these entries
//! would lose writes that a majority with this member had acknowledged. Keeping them is what Raft
//! itself does: a member that is elected with this log commits all of it. A client whose entry
//! reached no majority got no error for it, so the entry may still take effect. In effect, the new
//! cluster is the result of an election in which only this member could vote. Entries that only
//! lost members had can't be known here.
//!
//! *What is new.* Cluster id, member id and incarnation are all derived from one random number. So
//! members of the old cluster can't talk to the new one. Two survivors that were both made a
//! single-member cluster do not accept each other. Votes and acknowledgements of the old member
//! that its peers have recorded do not bind the new one. All old ids and incarnations count as
//! removed.
//!
//! The revision is raised by [`REVISION_BUMP`], and everything before it is compacted. The lost
//! members may have shown clients revisions that this member never had. A client that watches from
//! such a revision has to read all data again.
//!
//! *When it takes effect.* The plan (`muster-forcing.json`) contains the new ids. Then the store
//! applies the rest of the log and becomes the new cluster's store, in one durable commit. Before
//! this commit the directory belongs to the old member, and after it to the new one, with or
//! without the flag. The remaining steps (log, marker, record) follow from plan and store, and each
//! start finishes them.
//!
//! *How often.* The flag takes effect once. If it is left in a unit file, it must not make another
//! new cluster at each restart, as it does with etcd. The record (`muster-forced.json`) marks the
//! flag as used. A start without the flag allows it to take effect again.

mod etcd;
mod finish;
mod force;
mod inspection;
mod restore;

pub use self::{
    etcd::{EtcdError, EtcdTools, recover as recover_etcd},
    force::{ForceError, REVISION_BUMP},
    inspection::{
        DirectoryInspection, DirectoryState, InspectedMember, LogInspection, Maker,
        StoreInspection, inspect_directory,
    },
    restore::{RestoreError, RestoreOptions, RestoreResult, restore, token_from_file},
};
pub(crate) use self::{
    finish::resume_forced_cluster,
    force::{SurvivingMember, force_new_cluster},
};
