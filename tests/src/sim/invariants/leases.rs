//! Invariant: a lease doesn't end before its time, measured by the fastest clock. While one member keeps
//! leading, it doesn't live longer than about twice its TTL.

use std::collections::BTreeMap;

use node_state::lease::Lease;

use crate::model::leases::LeaseEvent;
use crate::sim::InvariantViolation;

/// Virtual microseconds of one second of a lease. An election takes that long, as in production.
pub const LEASE_SECOND: u64 = 100_000;
/// Virtual microseconds in which a leader, which checks its leases at every tick, must end an expired one.
const SLACK: u64 = 300_000;

#[derive(Debug)]
struct LeaseTimes {
    lease: Lease,
    /// Virtual time at which a client was told that the lease has its whole TTL left.
    renewal_confirmed_at: u64,
    /// Virtual time at which a leader may have set the lease's clock back.
    clock_set_back_at: u64,
}

impl LeaseTimes {
    fn ttl(&self) -> u64 {
        u64::try_from(self.lease.ttl).expect("it is positive") * LEASE_SECOND
    }
}

/// Leases that exist, and the number of expired ones.
#[derive(Debug, Default)]
pub struct Leases {
    /// Living leases, by the index of the entry that granted each.
    lives: BTreeMap<u64, LeaseTimes>,
    /// Number of leases that a leader's clock has ended.
    pub expired: u64,
}

impl Leases {
    /// Checks the effect of an entry when it is applied for the first time. `quickest` is the real
    /// duration of a second of the fastest clock, in thousandths of a second.
    pub fn check_event(
        &mut self,
        event: LeaseEvent,
        now: u64,
        quickest: u64,
    ) -> Result<(), InvariantViolation> {
        match event {
            LeaseEvent::Granted(lease) => {
                self.lives.insert(
                    lease.grant_index,
                    LeaseTimes { lease, renewal_confirmed_at: now, clock_set_back_at: now },
                );
            }
            LeaseEvent::Revoked(lease) => {
                self.lives.remove(&lease.grant_index);
            }
            LeaseEvent::Expired(lease) => {
                self.expired += 1;
                if let Some(life) = self.lives.remove(&lease.grant_index) {
                    let least = life.renewal_confirmed_at + life.ttl() * quickest / 1000;
                    if now < least {
                        let what = format!("{lease:?} ended at {now}, and could have at {least}");
                        return Err(InvariantViolation::new("leases don't end early", what));
                    }
                }
            }
        }
        Ok(())
    }

    /// Records that a leader has set a lease's clock back; its client doesn't know yet.
    pub fn record_clock_set_back(&mut self, granted: u64, at: u64) {
        if let Some(life) = self.lives.get_mut(&granted) {
            life.clock_set_back_at = life.clock_set_back_at.max(at);
        }
    }

    /// Records that a client was told of a renewal that began at `at`.
    pub fn record_confirmed_renewal(&mut self, granted: u64, at: u64) {
        if let Some(life) = self.lives.get_mut(&granted) {
            life.renewal_confirmed_at = life.renewal_confirmed_at.max(at);
        }
    }

    /// Checks after the faults that no lease is overdue; one member has led since `since`.
    pub fn check_overdue(&self, now: u64, since: u64) -> Result<(), InvariantViolation> {
        let late =
            |life: &&LeaseTimes| now > life.clock_set_back_at.max(since) + 2 * life.ttl() + SLACK;
        match self.lives.values().find(late) {
            None => Ok(()),
            Some(life) => {
                let what = format!("{life:?} is alive at {now}, led since {since}");
                Err(InvariantViolation::new("leases end", what))
            }
        }
    }
}
