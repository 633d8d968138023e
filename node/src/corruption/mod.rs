//! Whether all members hold the same, and whose data is another than the others'.
//!
//! Members that applied the same entries must hold the same; where one of them doesn't (a disk that
//! returned other bytes than were written, a bug that made its apply take another turn), clients of it
//! would be answered wrongly for ever, and nothing else would show. So the leader has everybody say
//! what they hold, its own store included, and judges that:
//!
//! ```text
//! leader: Question (how far its own store is) ──► each member waits until it is as far
//!         Claims ◄── what it holds then, each under a subject that is the same for all
//!         judge: under one subject, what a quorum of the voters says is right
//! ```
//!
//! Only what is said under the same subject is ever compared, so that load, compactions, snapshots and
//! changes of the leader make no difference: at most there is nothing to compare this time. A member
//! that is found to differ is asked once more before anything is done about it.
//!
//! What this does not do: look at the member table, alarms or leases, of which the checksum knows
//! nothing but each key's lease; nor repair anything.

mod claims;
mod judge;

pub use self::claims::{Claim, Question, Subject, Value, claims, from_wire, to_wire};
pub use self::judge::{Measures, Suspicion, Verdict, judge};

#[cfg(test)]
mod tests;
