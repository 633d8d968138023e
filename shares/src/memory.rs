//! Bounds on the memory that clients make a server hold.
//!
//! One connection may hold a fixed amount. All connections together may hold a total, and each
//! network gets an equal share of it. So a network that fills its share takes nothing from the
//! others. The total is shared only between networks that hold more than a minimum, because the
//! others are many and change with each request.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bounds on held memory, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct MemoryBounds {
    /// Maximum for one connection, in bytes.
    pub per_connection: usize,
    /// Maximum for all connections together, in bytes. Each network has an equal share of it.
    pub total: usize,
    /// Minimum in bytes that every connection and network may hold, however much the others hold. A
    /// network that holds no more than this is not counted among the networks that share the total.
    pub guaranteed: usize,
}

/// Part of the memory bounds that a charge may fill, in eighths. Charges that must not wait get a
/// larger part, so they still find room when other charges find none.
#[derive(Clone, Copy, Debug)]
pub struct BudgetShare(pub usize);

impl BudgetShare {
    /// The whole of the memory bounds.
    pub const WHOLE: Self = Self(8);

    fn of_bound(self, bound: usize) -> usize {
        bound / 8 * self.0
    }
}

/// Memory held by all connections, and its bounds.
#[derive(Debug)]
pub struct MemoryBudget {
    bounds: MemoryBounds,
    networks: Mutex<Networks>,
}

#[derive(Debug, Default)]
struct Networks {
    held: BTreeMap<IpAddr, usize>,
    /// Number of networks that hold more than `MemoryBounds::guaranteed`, and share the total.
    sharers: usize,
}

impl Networks {
    /// Sets the number of bytes that `network` holds. A network that holds more than `least` bytes
    /// is counted among the networks that share the total.
    fn set(&mut self, network: IpAddr, bytes: usize, least: usize) {
        let before = match bytes {
            0 => self.held.remove(&network),
            _ => self.held.insert(network, bytes),
        };
        self.sharers += usize::from(bytes > least);
        self.sharers -= usize::from(before.unwrap_or(0) > least);
    }
}

impl MemoryBudget {
    /// Creates a budget for all connections, from which nothing is used yet.
    #[must_use]
    pub fn new(bounds: MemoryBounds) -> Arc<Self> {
        Arc::new(Self { bounds, networks: Mutex::default() })
    }

    /// Opens the account of a connection from `address`.
    #[must_use]
    pub fn open_account(self: &Arc<Self>, address: IpAddr) -> Arc<MemoryAccount> {
        let network = crate::network_of(address);
        Arc::new(MemoryAccount { budget: Arc::clone(self), network, held: AtomicUsize::new(0) })
    }

    /// Returns the number of bytes that all connections hold.
    #[must_use]
    pub fn held(&self) -> usize {
        self.networks.lock().unwrap_or_else(PoisonError::into_inner).held.values().sum()
    }

    fn charge(&self, network: IpAddr, bytes: usize, part: Option<BudgetShare>) -> bool {
        let MemoryBounds { total: all, guaranteed: least, .. } = self.bounds;
        let mut networks = self.networks.lock().unwrap_or_else(PoisonError::into_inner);
        let own = networks.held.get(&network).copied().unwrap_or(0);
        let held = own.saturating_add(bytes);
        let sharers = networks.sharers + usize::from(own <= least);
        let fits = part.is_none_or(|part| held <= least.max(part.of_bound(all / sharers)));
        if fits {
            networks.set(network, held, least);
        }
        fits
    }

    fn release(&self, network: IpAddr, bytes: usize) {
        let mut networks = self.networks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = networks.held.get(&network).copied() {
            networks.set(network, held - bytes, self.bounds.guaranteed);
        }
    }
}

/// Memory held by one connection.
#[derive(Debug)]
pub struct MemoryAccount {
    budget: Arc<MemoryBudget>,
    network: IpAddr,
    held: AtomicUsize,
}

impl MemoryAccount {
    /// Creates an account without bounds, for requests that come over no connection.
    #[must_use]
    pub fn unbounded() -> Arc<Self> {
        let bounds =
            MemoryBounds { per_connection: usize::MAX, total: usize::MAX, guaranteed: usize::MAX };
        MemoryBudget::new(bounds).open_account(std::net::Ipv4Addr::UNSPECIFIED.into())
    }

    /// Returns the number of bytes that the connection holds.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn charge(&self, bytes: usize, part: Option<BudgetShare>) -> bool {
        let MemoryBounds { per_connection: connection, guaranteed: least, .. } = self.budget.bounds;
        let held = self.held.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let fits = part.is_none_or(|part| held <= least.max(part.of_bound(connection)));
        if fits && self.budget.charge(self.network, bytes, part) {
            return true;
        }
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        false
    }

    fn release(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        self.budget.release(self.network, bytes);
    }
}

/// Memory charged to an account, which is released on drop.
#[derive(Debug)]
pub struct MemoryCharge {
    account: Arc<MemoryAccount>,
    bytes: usize,
}

impl MemoryCharge {
    /// Creates a charge of 0 bytes.
    #[must_use]
    pub fn new(account: &Arc<MemoryAccount>) -> Self {
        Self { account: Arc::clone(account), bytes: 0 }
    }

    /// Creates another charge of 0 bytes to the same account.
    #[must_use]
    pub fn another_empty(&self) -> Self {
        Self::new(&self.account)
    }

    /// Returns the size of the charge in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Changes the charge to `bytes`. If that is more than before and exceeds `part` of the bounds,
    /// the charge stays as it is and the result is `false`.
    #[must_use]
    pub fn try_set(&mut self, bytes: usize, part: BudgetShare) -> bool {
        self.change(bytes, Some(part))
    }

    /// Changes the charge to `bytes`, even if that exceeds the bounds.
    pub fn force(&mut self, bytes: usize) {
        self.change(bytes, None);
    }

    fn change(&mut self, bytes: usize, part: Option<BudgetShare>) -> bool {
        if bytes < self.bytes {
            self.account.release(self.bytes - bytes);
        } else if bytes > self.bytes && !self.account.charge(bytes - self.bytes, part) {
            return false;
        }
        self.bytes = bytes;
        true
    }
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        self.force(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: MemoryBounds = MemoryBounds { per_connection: 400, total: 800, guaranteed: 10 };

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// Charges as much as fits, in steps of ten bytes.
    fn fill(account: &Arc<MemoryAccount>, part: BudgetShare) -> (MemoryCharge, usize) {
        let mut charge = MemoryCharge::new(account);
        let mut held = 0;
        while charge.try_set(held + 10, part) {
            held += 10;
        }
        (charge, held)
    }

    #[test]
    fn the_memory_of_a_connection_and_of_its_network_is_bounded() {
        let room = MemoryBudget::new(BOUNDS);
        let connections: Vec<_> = (0..3).map(|_| room.open_account(ip(1))).collect();
        let held: Vec<_> = connections.iter().map(|one| fill(one, BudgetShare::WHOLE)).collect();
        assert_eq!(held.iter().map(|(_, held)| *held).collect::<Vec<_>>(), [400, 400, 0]);
        let (first, second) = (room.open_account(ip(2)), room.open_account(ip(2)));
        let (mut other, has) = fill(&first, BudgetShare::WHOLE);
        assert_eq!(has, 400, "half of what all may hold");
        assert!(!MemoryCharge::new(&second).try_set(20, BudgetShare::WHOLE));
        other.force(200);
        assert!(MemoryCharge::new(&second).try_set(20, BudgetShare::WHOLE));
        drop((held, other));
        assert_eq!(room.held(), 0);
        assert_eq!(room.networks.lock().unwrap().sharers, 0);
    }

    #[test]
    fn networks_that_hold_little_take_nothing_from_the_others() {
        let room = MemoryBudget::new(BOUNDS);
        let little: Vec<_> = (2..200)
            .map(|n| {
                let mut charge = MemoryCharge::new(&room.open_account(ip(n)));
                assert!(charge.try_set(BOUNDS.guaranteed, BudgetShare::WHOLE));
                charge
            })
            .collect();
        assert_eq!(fill(&room.open_account(ip(1)), BudgetShare::WHOLE).1, 400);
        drop(little);
    }

    #[test]
    fn a_charge_that_may_fill_only_a_part_leaves_the_rest_to_others() {
        let account = MemoryBudget::new(BOUNDS).open_account(ip(1));
        let (_large, held) = fill(&account, BudgetShare(4));
        assert_eq!(held, 200);
        assert_eq!(fill(&account, BudgetShare::WHOLE).1, 200);
    }

    #[test]
    fn forced_charges_are_counted() {
        let room = MemoryBudget::new(BOUNDS);
        let account = room.open_account(ip(1));
        let mut charge = MemoryCharge::new(&account);
        charge.force(1_000);
        assert_eq!((account.held(), room.held()), (1_000, 1_000));
        assert!(!MemoryCharge::new(&account).try_set(1, BudgetShare::WHOLE));
        assert!(charge.try_set(100, BudgetShare::WHOLE), "less always fits");
        assert!(MemoryCharge::new(&account).try_set(1, BudgetShare::WHOLE));
    }
}
