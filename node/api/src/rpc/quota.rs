//! The limit on the size of the store's contents.

use std::sync::atomic::AtomicBool;

/// Value of `--quota-backend-bytes` as given; 0 means the default, and a negative value no quota.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quota(pub i64);

impl Quota {
    /// etcd's default in bytes, used for 0 (server/storage/quota.go).
    const DEFAULT: i64 = 2 << 30;

    /// Returns the quota in bytes for the status; negative if there is none.
    pub(crate) fn reported_bytes(self) -> i64 {
        if self.0 == 0 { Self::DEFAULT } else { self.0 }
    }

    /// Whether a store of `held` bytes has room for `more` bytes.
    pub(super) fn has_room(self, held: u64, more: usize) -> bool {
        u64::try_from(self.reported_bytes())
            .map_or(true, |quota| held.saturating_add(more as u64) <= quota)
    }
}

/// Whether the quota is a reason for this member's NOSPACE alarm.
#[derive(Debug, Default)]
pub(crate) struct NospaceClaim {
    pub(super) by_quota: AtomicBool,
    /// Lock held by a request while it raises the alarm. Other requests that exceed the quota wait
    /// for the lock, and then find the alarm raised.
    pub(super) raising: tokio::sync::Mutex<()>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quota_follows_etcds_rules() {
        let two_gib = 2 << 30;
        assert!(Quota(0).has_room(two_gib - 1, 1) && !Quota(0).has_room(two_gib - 1, 2));
        assert!(Quota(10).has_room(4, 6) && !Quota(10).has_room(4, 7));
        assert!(Quota(-1).has_room(u64::MAX, usize::MAX));
        assert!(!Quota(i64::MAX).has_room(u64::MAX, 1));
        assert_eq!([Quota(0), Quota(7), Quota(-5)].map(Quota::reported_bytes), [2 << 30, 7, -5]);
    }
}
