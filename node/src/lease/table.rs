//! Which leases there are, and which keys are attached to each.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use node_proto::musterpb;

/// What is told to the clock at most before it looks; after more it looks at all leases again.
const MAX_NEWS: usize = 1 << 16;
/// A lease that has more keys than one of so many places of the table is taken out in a pass over all of
/// them, which costs less for each than a search.
const WORTH_A_PASS: usize = 8;

/// Upper bounds of the TTLs that are counted together: 1 s, 2 s, 4 s, up to three months.
pub const TTL_BUCKETS: usize = 24;

/// One lease, without its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Its name; never 0.
    pub id: i64,
    /// Seconds that it lives after it was granted or kept alive.
    pub ttl: i64,
    /// Seconds that it had left when that was last noted; 0: all of them.
    pub left: i64,
    /// The log entry that granted it, which tells it from one of the same name before or after it; 0 if it
    /// came with another cluster's data.
    pub granted: u64,
}

impl Lease {
    /// Seconds that it may have left, as far as the log says.
    #[must_use]
    pub fn seconds(&self) -> i64 {
        if self.left > 0 { self.left } else { self.ttl }
    }
}

impl From<Lease> for musterpb::Lease {
    fn from(Lease { id, ttl, left, granted }: Lease) -> Self {
        Self { id, ttl, left, granted }
    }
}

impl From<musterpb::Lease> for Lease {
    fn from(musterpb::Lease { id, ttl, left, granted }: musterpb::Lease) -> Self {
        Self { id, ttl, left, granted }
    }
}

/// What the clock has to hear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    Granted(Lease),
    Revoked(i64),
}

/// What has been granted and revoked by this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeaseCounters {
    /// Leases granted.
    pub granted: u64,
    /// Leases revoked, by clients and by the clock.
    pub revoked: u64,
    /// Of those granted, how many had a TTL of up to 1 s, 2 s, 4 s, ...; the last: a longer one.
    pub ttls: [u64; TTL_BUCKETS + 1],
    /// The sum of their TTLs, in seconds.
    pub ttl_sum: i64,
}

#[derive(Debug)]
struct Entry {
    ttl: i64,
    left: i64,
    granted: u64,
    keys: BTreeSet<Arc<[u8]>>,
}

impl Entry {
    fn lease(&self, id: i64) -> Lease {
        Lease { id, ttl: self.ttl, left: self.left, granted: self.granted }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct LeaseTable {
    leases: BTreeMap<i64, Entry>,
    /// The lease of each key that has one.
    attached: HashMap<Arc<[u8]>, i64>,
    /// What the clock has yet to hear; `None` while it does not listen.
    news: Option<Vec<News>>,
    counters: LeaseCounters,
}

impl LeaseTable {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Whether there is one of this name.
    #[must_use]
    pub fn has(&self, id: i64) -> bool {
        self.leases.contains_key(&id)
    }

    /// The one of this name.
    #[must_use]
    pub fn get(&self, id: i64) -> Option<Lease> {
        Some(self.leases.get(&id)?.lease(id))
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = Lease> {
        self.leases.iter().map(|(&id, entry)| entry.lease(id))
    }

    /// The keys that are attached to one, in their order.
    pub fn keys(&self, id: i64) -> impl Iterator<Item = &Arc<[u8]>> {
        self.leases.get(&id).into_iter().flat_map(|entry| &entry.keys)
    }

    /// How many keys have a lease.
    #[cfg(test)]
    pub(crate) fn attached(&self) -> usize {
        self.attached.len()
    }

    /// Since this process began.
    #[must_use]
    pub fn counters(&self) -> LeaseCounters {
        self.counters
    }

    /// Puts one back when the store is opened.
    pub(crate) fn restore(&mut self, lease: Lease) {
        let Lease { id, ttl, left, granted } = lease;
        self.leases.insert(id, Entry { ttl, left, granted, keys: BTreeSet::new() });
    }

    /// Adds one that is not there.
    pub(crate) fn grant(&mut self, lease: Lease) {
        self.restore(lease);
        self.counters.granted += 1;
        self.counters.ttl_sum = self.counters.ttl_sum.saturating_add(lease.ttl);
        let bucket = (0..TTL_BUCKETS).find(|n| lease.ttl <= 1 << n).unwrap_or(TTL_BUCKETS);
        self.counters.ttls[bucket] += 1;
        self.tell(News::Granted(lease));
    }

    /// Notes what one has left, 0 for all; the lease as it is then, if it is there.
    pub(crate) fn note(&mut self, id: i64, left: i64) -> Option<Lease> {
        let entry = self.leases.get_mut(&id)?;
        entry.left = left.clamp(0, entry.ttl);
        Some(entry.lease(id))
    }

    /// Takes one away; its keys, which belong to none from now on, in their order.
    pub(crate) fn revoke(&mut self, id: i64) -> Option<Vec<Arc<[u8]>>> {
        let entry = self.leases.remove(&id)?;
        if entry.keys.len() > self.attached.capacity() / WORTH_A_PASS {
            self.attached.retain(|_, owner| *owner != id);
        } else {
            for key in &entry.keys {
                self.attached.remove(key);
            }
        }
        self.counters.revoked += 1;
        self.tell(News::Revoked(id));
        Some(entry.keys.into_iter().collect())
    }

    /// From now on `key` belongs to this lease and to no other; to none, if it is not there, as 0 never is.
    pub(crate) fn attach(&mut self, key: &[u8], id: i64) {
        self.detach(key);
        if let Some(entry) = self.leases.get_mut(&id) {
            let key: Arc<[u8]> = key.into();
            entry.keys.insert(Arc::clone(&key));
            self.attached.insert(key, id);
        }
    }

    /// From now on `key` belongs to no lease.
    pub(crate) fn detach(&mut self, key: &[u8]) {
        if self.attached.is_empty() {
            return;
        }
        if let Some(id) = self.attached.remove(key)
            && let Some(entry) = self.leases.get_mut(&id)
        {
            entry.keys.remove(key);
        }
    }

    /// From now on, what happens is kept for the clock.
    pub(crate) fn listen(&mut self) {
        self.news = Some(Vec::new());
    }

    /// What has happened; `None` if that was too much to be kept, or if nobody listened.
    pub(crate) fn take_news(&mut self) -> Option<Vec<News>> {
        self.news.as_mut().map(std::mem::take)
    }

    /// Whether somebody has to hear of something.
    pub(crate) fn has_news(&self) -> bool {
        self.news.as_ref().is_none_or(|news| !news.is_empty())
    }

    /// Nobody listens any more.
    pub(crate) fn stop_listening(&mut self) {
        self.news = None;
    }

    fn tell(&mut self, one: News) {
        match &mut self.news {
            Some(news) if news.len() < MAX_NEWS => news.push(one),
            _ => self.news = None,
        }
    }
}
