//! A lease is not ended before its time, by the fastest clock that there is, and not kept twice as long
//! once one member leads and goes on leading.

use std::collections::BTreeMap;

use muster_node::lease::Lease;

use crate::model::leases::LeaseEvent;
use crate::sim::Violation;

/// Virtual microseconds of one second of a lease: an election takes as long, as it does in production.
pub const LEASE_SECOND: u64 = 100_000;
/// Until a leader that looks at its leases every tick has ended one that is over.
const SLACK: u64 = 300_000;

#[derive(Debug)]
struct Life {
    lease: Lease,
    /// Somebody was told that it has all of its TTL from then on.
    told: u64,
    /// A leader may have begun to count anew.
    counted: u64,
}

impl Life {
    fn ttl(&self) -> u64 {
        u64::try_from(self.lease.ttl).expect("it is positive") * LEASE_SECOND
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Leases {
    /// By the entry that granted it.
    lives: BTreeMap<u64, Life>,
    /// Leases that clocks have ended.
    pub expired: u64,
}

impl Leases {
    /// An entry that is applied for the first time did this. `quickest`: what a second of the fastest clock
    /// takes, per mille.
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

    /// A leader has begun to count a lease anew; nobody may be told yet.
    pub fn counts(&mut self, granted: u64, at: u64) {
        if let Some(life) = self.lives.get_mut(&granted) {
            life.counted = life.counted.max(at);
        }
    }

    /// Somebody was told that it did.
    pub fn told(&mut self, granted: u64, at: u64) {
        if let Some(life) = self.lives.get_mut(&granted) {
            life.told = life.told.max(at);
        }
    }

    /// The faults are over, and one member has led since `since`.
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
