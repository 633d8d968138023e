//! Invariant: a lease doesn't end before its time, measured by the fastest clock. While one member keeps
//! leading, it doesn't live longer than about twice its TTL.

use std::collections::BTreeMap;

use muster_node::lease::Lease;

use crate::model::leases::LeaseEvent;
use crate::sim::Violation;

/// Virtual microseconds of one second of a lease. An election takes that long, as in production.
pub const LEASE_SECOND: u64 = 100_000;
/// Virtual microseconds in which a leader, which checks its leases at every tick, must end an expired one.
const SLACK: u64 = 300_000;

#[derive(Debug)]
struct Life {
    lease: Lease,
    /// Virtual time at which a client was told that the lease has its whole TTL left.
    told: u64,
    /// Virtual time at which a leader may have set the lease's clock back.
    counted: u64,
}

impl Life {
    fn ttl(&self) -> u64 {
        u64::try_from(self.lease.ttl).expect("it is positive") * LEASE_SECOND
    }
}

/// Leases that exist, and the number of expired ones.
#[derive(Debug, Default)]
pub struct Leases {
    /// Living leases, by the index of the entry that granted each.
    lives: BTreeMap<u64, Life>,
    /// Number of leases that a leader's clock has ended.
    pub expired: u64,
}

impl Leases {
    /// Checks the effect of an entry when it is applied for the first time. `quickest` is the real
    /// duration of a second of the fastest clock, in thousandths of a second.
    pub fn happened(
        &mut self,
        event: LeaseEvent,
        now: u64,
        quickest: u64,
    ) -> Result<(), Violation> {
        match event {
            LeaseEvent::Granted(lease) => {
                self.lives.insert(lease.granted, Life { lease, told: now, counted: now });
            }
            LeaseEvent::Revoked(lease) => {
                self.lives.remove(&lease.granted);
            }
            LeaseEvent::Expired(lease) => {
                self.expired += 1;
                if let Some(life) = self.lives.remove(&lease.granted) {
                    let least = life.told + life.ttl() * quickest / 1000;
                    if now < least {
                        let what = format!("{lease:?} ended at {now}, and could have at {least}");
                        return Err(Violation::new("leases don't end early", what));
                    }
                }
            }
        }
        Ok(())
    }

    /// Records that a leader has set a lease's clock back; its client doesn't know yet.
    pub fn counts(&mut self, granted: u64, at: u64) {
        if let Some(life) = self.lives.get_mut(&granted) {
            life.counted = life.counted.max(at);
        }
    }

    /// Records that a client was told of a renewal that began at `at`.
    pub fn told(&mut self, granted: u64, at: u64) {
        if let Some(life) = self.lives.get_mut(&granted) {
            life.told = life.told.max(at);
        }
    }

    /// Checks after the faults that no lease is overdue; one member has led since `since`.
    pub fn look(&self, now: u64, since: u64) -> Result<(), Violation> {
        let late = |life: &&Life| now > life.counted.max(since) + 2 * life.ttl() + SLACK;
        match self.lives.values().find(late) {
            None => Ok(()),
            Some(life) => {
                let what = format!("{life:?} is alive at {now}, led since {since}");
                Err(Violation::new("leases end", what))
            }
        }
    }
}
