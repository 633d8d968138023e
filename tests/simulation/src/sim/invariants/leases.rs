//! Invariant: a lease doesn't end before its time, measured by the fastest clock. While one member
//! stays leader, a lease doesn't last longer than about twice its TTL.

use std::collections::BTreeMap;

use node_state::lease::Lease;

use crate::model::leases::LeaseEvent;
use crate::sim::InvariantViolation;

/// Virtual microseconds of one second of a lease. An election takes that long, as in production.
pub const LEASE_SECOND: u64 = 100_000;
/// Virtual microseconds within which a leader must end an expired lease. A leader checks its leases
/// at every tick.
const SLACK: u64 = 300_000;

#[derive(Debug)]
struct LeaseTimes {
    lease: Lease,
    /// Virtual time of the grant, or of the newest acknowledged renewal. For a renewal, this is the
    /// time at which a leader reset the lease's timer, before the client got the answer.
    renewal_confirmed_at: u64,
    /// Latest virtual time at which a leader has reset the lease's timer to the whole TTL.
    timer_reset_at: u64,
}

impl LeaseTimes {
    fn ttl(&self) -> u64 {
        u64::try_from(self.lease.ttl).expect("it is positive") * LEASE_SECOND
    }
}

/// Leases that exist, and the number of expired ones.
#[derive(Debug, Default)]
pub struct Leases {
    /// Existing leases, by the index of the entry that granted each.
    times_by_grant: BTreeMap<u64, LeaseTimes>,
    /// Number of leases that a leader's clock has ended.
    pub expired: u64,
}

impl Leases {
    /// Checks the effect of an entry when it is applied for the first time. `quickest` is the real
    /// duration of one second on the fastest clock, in thousandths of a second.
    pub fn check_event(
        &mut self,
        event: LeaseEvent,
        now: u64,
        quickest: u64,
    ) -> Result<(), InvariantViolation> {
        match event {
            LeaseEvent::Granted(lease) => {
                self.times_by_grant.insert(
                    lease.grant_index,
                    LeaseTimes { lease, renewal_confirmed_at: now, timer_reset_at: now },
                );
            }
            LeaseEvent::Revoked(lease) => {
                self.times_by_grant.remove(&lease.grant_index);
            }
            LeaseEvent::Expired(lease) => {
                self.expired += 1;
                if let Some(times) = self.times_by_grant.remove(&lease.grant_index) {
                    let earliest = times.renewal_confirmed_at + times.ttl() * quickest / 1000;
                    if now < earliest {
                        let what =
                            format!("{lease:?} ended at {now}, and must not before {earliest}");
                        return Err(InvariantViolation::new("leases don't end early", what));
                    }
                }
            }
        }
        Ok(())
    }

    /// Records that a leader has reset a lease's timer to the whole TTL. The client has no answer
    /// yet.
    pub fn record_timer_reset(&mut self, granted: u64, at: u64) {
        if let Some(times) = self.times_by_grant.get_mut(&granted) {
            times.timer_reset_at = times.timer_reset_at.max(at);
        }
    }

    /// Records that a renewal which began at `at` was acknowledged to a client.
    pub fn record_confirmed_renewal(&mut self, granted: u64, at: u64) {
        if let Some(times) = self.times_by_grant.get_mut(&granted) {
            times.renewal_confirmed_at = times.renewal_confirmed_at.max(at);
        }
    }

    /// Checks after the faults that no lease has been expired for too long. `since` is the time
    /// since which one member has led.
    pub fn check_overdue(&self, now: u64, since: u64) -> Result<(), InvariantViolation> {
        let late =
            |times: &&LeaseTimes| now > times.timer_reset_at.max(since) + 2 * times.ttl() + SLACK;
        match self.times_by_grant.values().find(late) {
            None => Ok(()),
            Some(times) => {
                let what =
                    format!("{times:?} still exists at {now}, under one leader since {since}");
                Err(InvariantViolation::new("leases end", what))
            }
        }
    }
}
