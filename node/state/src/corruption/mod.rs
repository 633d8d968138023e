//! Checks that all members hold the same data, and finds the members whose data differs.
//!
//! Members that applied the same entries must hold the same data. Still, the data of a member can
//! differ: its disk returned wrong bytes, or a bug made it apply an entry differently. Its clients
//! would get wrong answers for ever, and nothing else would show it. So the leader collects claims
//! about the data of all members, including its own, and judges them:
//!
//! ```text
//! leader: Question (position of its own store) ──► each member waits for that position
//!         Claims ◄── about the member's data then, each under a subject that all members share
//!         judge: the claim of a quorum of the voters about a subject is the right one
//! ```
//!
//! Only claims about the same subject are compared. So load, compactions, snapshots and changes of
//! the leader cause no false alarm: at worst, a comparison finds no common subject. Before a member
//! gets the alarm, a second comparison must find that its data differs.
//!
//! While one member has the CORRUPT alarm, that member serves no clients, but still applies the
//! log. While the whole cluster has the alarm, every member refuses writes when it applies them.
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
pub use self::judge::{AlarmActions, CorruptionVerdict, SuspectCounts, judge_claims};

#[cfg(test)]
mod tests;
