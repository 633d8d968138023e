//! Checks that all members hold the same data, and finds the members whose data differs.
//!
//! Members that applied the same entries must hold the same data. One of them may not: its disk may
//! have returned wrong bytes, or a bug may have made it apply an entry differently. Its clients
//! would get wrong answers for ever, and nothing else would show it. So the leader collects claims
//! about the data of all members, including its own, and judges them:
//!
//! ```text
//! leader: Question (position of its own store) ──► each member waits until its store is there
//!         Claims ◄── the member's data then, each claim under a subject that all members share
//!         judge: for each subject, the claim of a quorum of the voters is right
//! ```
//!
//! Only claims about the same subject are compared. So load, compactions, snapshots and changes of
//! the leader cause no false alarm: at most there is nothing to compare this time. A member that is
//! found to differ is compared once more before anything is done.
//!
//! The CORRUPT alarm of one member stops what that member serves, never what it applies. The alarm
//! of the whole cluster forbids writes where the log is applied, so alike on every member.
//!
//! What this does not do:
//!
//! - Compare the member table, alarms or leases. The hash covers only the lease of each key.
//! - Repair anything.

mod claims;
mod judge;

pub use self::claims::{
    Claim, ClaimSubject, ClaimValue, Question, decode_claims, encode_claims, make_claims,
};
pub use self::judge::{AlarmActions, CorruptionVerdict, Suspicion, judge_claims};

#[cfg(test)]
mod tests;
