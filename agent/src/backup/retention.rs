//! Decides which backups are deleted after a new one was published; pure.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::listing::BackupListing;
use super::name::BackupName;
use super::schedule::is_in_future;

/// Maximum number of backups, and of leftover files, that are deleted after one new backup. The
/// rest follows after later backups.
const MAX_DELETIONS: usize = 16;
/// Age above which a leftover file is deleted. Saving a backup takes less time, so no agent is
/// still writing such an old file.
pub(super) const LEFTOVER_AGE: SignedDuration = SignedDuration::from_hours(24);

/// How many backups are kept, and how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RetentionPolicy {
    /// Number of newest backups that are kept; at least 1.
    pub keep: usize,
    /// Age above which a backup is deleted even if `keep` would keep it; `None` for no limit.
    pub max_age: Option<Duration>,
}

/// Files and backups to delete after a new backup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DeletionPlan {
    /// Published backups, oldest first.
    pub backups: Vec<BackupName>,
    /// Names of leftover files.
    pub leftovers: Vec<String>,
}

/// Plans the deletions after the backup `verified` was published. `verified` always stays, because
/// this process has read its snapshot. Backups that are dated in the future stay too, because their
/// age is unknown.
pub(super) fn plan(
    listing: &BackupListing,
    policy: &RetentionPolicy,
    verified: &BackupName,
    now: Timestamp,
) -> DeletionPlan {
    let max_age = policy.max_age.and_then(|age| SignedDuration::try_from(age).ok());
    let dated: Vec<&BackupName> =
        listing.published.iter().filter(|name| !is_in_future(name, now)).collect();
    let surplus = dated.len().saturating_sub(policy.keep.max(1));
    let is_old = |begun_at: Timestamp, age| now.duration_since(begun_at) > age;
    let backups = dated.iter().enumerate().filter(|(at, name)| {
        *at < surplus || max_age.is_some_and(|age| is_old(name.begun_at(), age))
    });
    let leftovers = listing.leftovers.iter().filter(|left| is_old(left.begun_at, LEFTOVER_AGE));
    DeletionPlan {
        backups: backups
            .map(|(_, name)| *name)
            .filter(|name| *name != verified)
            .take(MAX_DELETIONS)
            .cloned()
            .collect(),
        leftovers: leftovers.take(MAX_DELETIONS).map(|left| left.file.clone()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::listing::Leftover;

    const HOUR: i64 = 3600;

    fn now() -> Timestamp {
        Timestamp::from_second(10_000 * HOUR).unwrap()
    }

    /// Returns the names of backups that were begun this many hours ago, oldest first.
    fn names(hours_ago: impl IntoIterator<Item = i64>) -> Vec<BackupName> {
        let at = |hours: i64| now() - SignedDuration::from_hours(hours);
        hours_ago.into_iter().map(|hours| BackupName::new(at(hours), 1)).collect()
    }

    fn plan_of(published: &[BackupName], keep: usize, max_age: Option<i64>) -> Vec<BackupName> {
        let listing = BackupListing { published: published.to_vec(), ..BackupListing::default() };
        let max_age = max_age.map(|hours| Duration::from_hours(hours.unsigned_abs()));
        let policy = RetentionPolicy { keep, max_age };
        plan(&listing, &policy, published.last().unwrap(), now()).backups
    }

    #[test]
    fn the_oldest_go_once_there_are_too_many() {
        let all = names([40, 30, 20, 10, 0]);
        assert_eq!(plan_of(&all, 5, None), []);
        assert_eq!(plan_of(&all, 3, None), all[..2]);
    }

    #[test]
    fn an_age_limit_deletes_although_the_number_allows_more() {
        let all = names([40, 30, 20, 10, 0]);
        assert_eq!(plan_of(&all, 30, Some(25)), all[..2]);
        assert_eq!(plan_of(&all, 2, Some(1000)), all[..3]);
    }

    #[test]
    fn the_verified_backup_stays_whatever_the_policy_says() {
        let all = names([40, 30]);
        assert_eq!(plan_of(&all, 1, Some(1)), all[..1]);
        assert_eq!(plan_of(&all, 0, Some(0)), all[..1]);
        let listing = BackupListing { published: all.clone(), ..BackupListing::default() };
        let policy = RetentionPolicy { keep: 1, max_age: None };
        // Another agent has published a newer backup, which this process has not read.
        assert_eq!(plan(&listing, &policy, &all[0], now()).backups, []);
    }

    #[test]
    fn one_round_deletes_a_bounded_number() {
        let all = names((0..100).rev());
        assert_eq!(plan_of(&all, 1, None), all[..MAX_DELETIONS]);
    }

    #[test]
    fn backups_from_the_future_are_neither_deleted_nor_counted() {
        let all = [names([3, 2, 1]), names([-50, -51])].concat();
        let listing = BackupListing { published: all.clone(), ..BackupListing::default() };
        let policy = RetentionPolicy { keep: 2, max_age: None };
        assert_eq!(plan(&listing, &policy, &all[2], now()).backups, all[..1]);
    }

    #[test]
    fn only_old_leftovers_are_removed() {
        let left = |hours: i64| Leftover {
            file: format!("left-{hours}"),
            begun_at: now() - SignedDuration::from_hours(hours),
        };
        let leftovers = vec![left(1), left(25), left(-5)];
        let listing = BackupListing { leftovers, ..BackupListing::default() };
        let policy = RetentionPolicy { keep: 2, max_age: None };
        let verified = BackupName::new(now(), 1);
        assert_eq!(plan(&listing, &policy, &verified, now()).leftovers, ["left-25"]);
    }
}
