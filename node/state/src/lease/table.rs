//! The replicated table of leases and of the keys attached to each.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use node_proto::musterpb;

/// Maximum number of changes that are kept for the lease clock. If there are more, the clock reads
/// all leases again.
const MAX_PENDING_CHANGES: usize = 1 << 16;
/// Selects how the keys of a revoked lease are removed from the map of attached keys. If there are
/// more of them than the map's capacity divided by this number, one pass over the whole map is
/// made. Otherwise a lookup for each key is cheaper.
const FULL_SCAN_RATIO: usize = 8;

/// Number of TTL buckets, with upper bounds of 1 s, 2 s, 4 s, up to about three months.
pub const TTL_BUCKETS: usize = 24;

/// A lease without its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Lease id, which is never 0.
    pub id: i64,
    /// Time to live in seconds, counted from the grant or the last renewal.
    pub ttl: i64,
    /// Remaining time in seconds, from the lease's last checkpoint; 0 for the full TTL.
    pub remaining_ttl: i64,
    /// Index of the entry that granted the lease, which distinguishes it from other leases with the
    /// same id. The index is 0 if the lease was restored or imported from another cluster's data.
    pub grant_index: u64,
}

impl Lease {
    /// Returns the most seconds that the lease can have left, according to the log.
    #[must_use]
    pub fn seconds(&self) -> i64 {
        if self.remaining_ttl > 0 { self.remaining_ttl } else { self.ttl }
    }
}

impl From<Lease> for musterpb::Lease {
    fn from(Lease { id, ttl, remaining_ttl: left, grant_index: granted }: Lease) -> Self {
        Self { id, ttl, left, granted }
    }
}

impl From<musterpb::Lease> for Lease {
    fn from(musterpb::Lease { id, ttl, left, granted }: musterpb::Lease) -> Self {
        Self { id, ttl, remaining_ttl: left, grant_index: granted }
    }
}

/// A change of the lease table that the lease clock has to follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaseChange {
    Granted(Lease),
    Revoked(i64),
}

/// Counters of leases granted and revoked by this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeaseCounters {
    /// Number of leases granted.
    pub granted: u64,
    /// Number of leases revoked, by clients and by the lease clock.
    pub revoked: u64,
    /// Number of granted leases by TTL: up to 1 s, 2 s, 4 s, and so on. The last number counts the
    /// leases with a longer TTL.
    pub ttls: [u64; TTL_BUCKETS + 1],
    /// Sum of the TTLs of granted leases, in seconds.
    pub ttl_sum: i64,
}

#[derive(Debug)]
struct LeaseEntry {
    ttl: i64,
    remaining_ttl: i64,
    grant_index: u64,
    keys: BTreeSet<Arc<[u8]>>,
}

impl LeaseEntry {
    fn lease(&self, id: i64) -> Lease {
        Lease {
            id,
            ttl: self.ttl,
            remaining_ttl: self.remaining_ttl,
            grant_index: self.grant_index,
        }
    }
}

/// The replicated leases and the keys attached to them, described in the module's documentation.
#[derive(Debug, Default)]
pub struct LeaseTable {
    leases: BTreeMap<i64, LeaseEntry>,
    /// Lease id of each key that is attached to a lease.
    lease_by_key: HashMap<Arc<[u8]>, i64>,
    /// Changes that the lease clock has not read yet. `None` if the clock does not run here, or has
    /// to read all leases again.
    changes: Option<Vec<LeaseChange>>,
    counters: LeaseCounters,
}

impl LeaseTable {
    /// Returns the number of leases.
    #[must_use]
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Whether there are no leases.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Whether a lease with this id exists.
    #[must_use]
    pub fn has(&self, id: i64) -> bool {
        self.leases.contains_key(&id)
    }

    /// Returns the lease with this id, if there is one.
    #[must_use]
    pub fn get(&self, id: i64) -> Option<Lease> {
        Some(self.leases.get(&id)?.lease(id))
    }

    /// Returns all leases, ordered by id.
    pub fn iter(&self) -> impl Iterator<Item = Lease> {
        self.leases.iter().map(|(&id, entry)| entry.lease(id))
    }

    /// Returns the keys that are attached to a lease, in order.
    pub fn keys(&self, id: i64) -> impl Iterator<Item = &Arc<[u8]>> {
        self.leases.get(&id).into_iter().flat_map(|entry| &entry.keys)
    }

    /// Returns the number of keys that are attached to any lease.
    #[cfg(test)]
    pub(crate) fn attached_key_count(&self) -> usize {
        self.lease_by_key.len()
    }

    /// Returns the counters since this process began.
    #[must_use]
    pub fn counters(&self) -> LeaseCounters {
        self.counters
    }

    /// Adds a lease that was read from the store when it was opened.
    pub(crate) fn restore(&mut self, lease: Lease) {
        let Lease { id, ttl, remaining_ttl: left, grant_index: granted } = lease;
        self.leases.insert(
            id,
            LeaseEntry { ttl, remaining_ttl: left, grant_index: granted, keys: BTreeSet::new() },
        );
    }

    /// Adds a new lease, counts it, and notifies the lease clock.
    pub(crate) fn grant(&mut self, lease: Lease) {
        self.restore(lease);
        self.counters.granted += 1;
        self.counters.ttl_sum = self.counters.ttl_sum.saturating_add(lease.ttl);
        let bucket = (0..TTL_BUCKETS).find(|n| lease.ttl <= 1 << n).unwrap_or(TTL_BUCKETS);
        self.counters.ttls[bucket] += 1;
        self.record_change(LeaseChange::Granted(lease));
    }

    /// Records the remaining time of a lease; 0 stands for the full TTL. Returns the changed lease,
    /// if it exists.
    pub(crate) fn checkpoint(&mut self, id: i64, left: i64) -> Option<Lease> {
        let entry = self.leases.get_mut(&id)?;
        entry.remaining_ttl = left.clamp(0, entry.ttl);
        Some(entry.lease(id))
    }

    /// Removes a lease. Returns its keys, which are detached, in order.
    pub(crate) fn revoke(&mut self, id: i64) -> Option<Vec<Arc<[u8]>>> {
        let entry = self.leases.remove(&id)?;
        if entry.keys.len() > self.lease_by_key.capacity() / FULL_SCAN_RATIO {
            self.lease_by_key.retain(|_, owner| *owner != id);
        } else {
            for key in &entry.keys {
                self.lease_by_key.remove(key);
            }
        }
        self.counters.revoked += 1;
        self.record_change(LeaseChange::Revoked(id));
        Some(entry.keys.into_iter().collect())
    }

    /// Attaches `key` to the lease `id`, and detaches it from any other lease. If the lease `id`
    /// does not exist, as for id 0, the key stays detached.
    pub(crate) fn attach(&mut self, key: &[u8], id: i64) {
        self.detach(key);
        if let Some(entry) = self.leases.get_mut(&id) {
            let key: Arc<[u8]> = key.into();
            entry.keys.insert(Arc::clone(&key));
            self.lease_by_key.insert(key, id);
        }
    }

    /// Detaches `key` from its lease, if it has one.
    pub(crate) fn detach(&mut self, key: &[u8]) {
        if self.lease_by_key.is_empty() {
            return;
        }
        if let Some(id) = self.lease_by_key.remove(key)
            && let Some(entry) = self.leases.get_mut(&id)
        {
            entry.keys.remove(key);
        }
    }

    /// Begins to keep changes for the lease clock.
    pub(crate) fn start_recording(&mut self) {
        self.changes = Some(Vec::new());
    }

    /// Takes the changes for the lease clock. Returns `None` if there were too many changes to be
    /// kept, or if changes are not recorded.
    pub(crate) fn take_changes(&mut self) -> Option<Vec<LeaseChange>> {
        self.changes.as_mut().map(std::mem::take)
    }

    /// Whether the lease clock has changes to read, or has to read all leases again.
    pub(crate) fn has_changes(&self) -> bool {
        self.changes.as_ref().is_none_or(|news| !news.is_empty())
    }

    /// Stops keeping changes for the lease clock, because this member no longer leads.
    pub(crate) fn stop_recording(&mut self) {
        self.changes = None;
    }

    fn record_change(&mut self, one: LeaseChange) {
        match &mut self.changes {
            Some(news) if news.len() < MAX_PENDING_CHANGES => news.push(one),
            _ => self.changes = None,
        }
    }
}
