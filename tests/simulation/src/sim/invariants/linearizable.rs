//! Invariant: clients see a single copy of the data. All requests have an order that agrees with
//! real time.
//!
//! The model checks what each request answers at its place in that order ([`super::store`]).
//! Revisions make the order known, so that no search is needed. A request that begins after a
//! client knew a revision must be answered at that revision or a later one. If the request makes a
//! revision itself, that revision must be later.

use crate::sim::InvariantViolation;

/// Kind of a request, by its effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestEffect {
    /// The request made a revision.
    Change,
    /// The request made no revision.
    Read,
}

/// Newest revisions known to clients.
#[derive(Debug, Default)]
pub struct Linearizable {
    /// Highest revision of the store known to a client.
    known: i64,
    /// Highest revision of users and roles known to a client.
    users: u64,
}

impl Linearizable {
    /// Returns the lowest revision at which a request that begins now may be answered.
    pub fn floor(&self) -> i64 {
        self.known
    }

    /// Returns the lowest revision of users and roles that may decide on a request which begins
    /// now.
    pub fn users_floor(&self) -> u64 {
        self.users
    }

    /// Records that a member acknowledged a change of users and roles to a client. `revision` is
    /// the member's revision of users and roles.
    pub fn users_changed(&mut self, revision: u64) {
        self.users = self.users.max(revision);
    }

    /// Checks the revision of users and roles with which a member decided whether a linearizable
    /// read is permitted. `floor` was the highest known revision when the read began.
    pub fn check_permission_revision(
        &self,
        request: u64,
        floor: u64,
        revision: u64,
    ) -> Result<(), InvariantViolation> {
        if revision >= floor {
            return Ok(());
        }
        let what = format!("read {request}, begun at users {floor}, was judged by {revision}");
        Err(InvariantViolation::new("linearizable", what))
    }

    /// Checks the revision at which a request was answered. `floor` was the highest known revision
    /// when the request began.
    pub fn check_answer(
        &mut self,
        request: u64,
        answered: RequestEffect,
        floor: i64,
        revision: i64,
    ) -> Result<(), InvariantViolation> {
        let least = floor + i64::from(answered == RequestEffect::Change);
        if revision < least {
            let what = format!(
                "request {request} ({answered:?}) was answered at revision {revision} although {floor} was known before it began"
            );
            return Err(InvariantViolation::new("linearizable", what));
        }
        self.known = self.known.max(revision);
        Ok(())
    }
}
