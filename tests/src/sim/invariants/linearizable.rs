//! Clients see one copy: every request has its place in one order, which agrees with real time.
//!
//! What each request answers at its place is for the model to say ([`super::store`]); revisions
//! make the rest cheap (the order needn't be searched): whoever begins after a revision was known to
//! anybody must end at that revision or above, and above it if he makes one of his own.

use crate::sim::Violation;

/// What a request did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    /// It made a revision.
    Change,
    /// It did not.
    Read,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Linearizable {
    /// Highest revision known to a client.
    known: i64,
    /// The same of users and roles.
    users: u64,
}

impl Linearizable {
    /// What a request that begins now must reach.
    pub fn floor(&self) -> i64 {
        self.known
    }

    /// By which users and roles, or newer ones, a request that begins now is judged.
    pub fn users_floor(&self) -> u64 {
        self.users
    }

    /// A client was told of a change of users and roles by a member that had this revision of them then.
    pub fn users_changed(&mut self, revision: u64) {
        self.users = self.users.max(revision);
    }

    /// Whether a linearizable read that began at `floor` is allowed was judged by users and roles of this
    /// revision.
    pub fn judged(&self, request: u64, floor: u64, revision: u64) -> Result<(), Violation> {
        if revision >= floor {
            return Ok(());
        }
        let what = format!("read {request}, begun at users {floor}, was judged by {revision}");
        Err(Violation::new("linearizable", what))
    }

    /// A request that began at `floor` was answered at `revision`.
    pub fn answered(
        &mut self,
        request: u64,
        answered: Answered,
        floor: i64,
        revision: i64,
    ) -> Result<(), Violation> {
        let least = floor + i64::from(answered == Answered::Change);
        if revision < least {
            let what = format!(
                "request {request} ({answered:?}) was answered at revision {revision} although {floor} was known before it began"
            );
            return Err(Violation::new("linearizable", what));
        }
        self.known = self.known.max(revision);
        Ok(())
    }
}
