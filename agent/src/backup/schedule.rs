//! When the next backup or verification is due, and what is verified; pure.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::listing::BackupListing;
use super::name::BackupName;

/// How far in the future a backup may be dated. Backups with a later date are ignored: otherwise
/// one host with a wrong clock would stop the schedule of all hosts.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_mins(10);
/// Pause after the first of several failed attempts to save a backup.
const FIRST_RETRY_PAUSE: Duration = Duration::from_secs(30);
/// The longest pause between two attempts.
const LONGEST_RETRY_PAUSE: Duration = Duration::from_mins(30);

/// Returns the newest backup that is not dated in the future. `published` is ordered by time.
pub(super) fn newest(published: &[BackupName], now: Timestamp) -> Option<&BackupName> {
    published.iter().rev().find(|name| !is_in_future(name, now))
}

/// Whether this backup is dated more than [`MAX_CLOCK_SKEW`] in the future, by a wrong clock.
pub(super) fn is_in_future(name: &BackupName, now: Timestamp) -> bool {
    name.begun_at().duration_since(now) > MAX_CLOCK_SKEW
}

/// Returns when the next backup is due: `every` after the newest one was begun, and now if there is
/// none.
pub(super) fn due_at(published: &[BackupName], every: Duration, now: Timestamp) -> Timestamp {
    let every = SignedDuration::try_from(every).unwrap_or(SignedDuration::MAX);
    newest(published, now)
        .map_or(now, |newest| newest.begun_at().checked_add(every).unwrap_or(Timestamp::MAX))
}

/// Whether a verification is due: `every` after the last one, and now if there was none.
pub(super) fn is_verification_due(
    last: Option<Timestamp>,
    every: Duration,
    now: Timestamp,
) -> bool {
    let every = SignedDuration::try_from(every).unwrap_or(SignedDuration::MAX);
    // If the last verification is in the future, the clock was set back since. A verification is
    // then due at once.
    last.is_none_or(|last| last > now || now.duration_since(last) >= every)
}

/// Returns the backups that one verification examines: the newest one, and an older one if there is
/// one. If some of `damaged` are still stored, the older one is the first of them: the alert about
/// it ends once it is whole. Otherwise `random` chooses the older one.
pub(super) fn choose_for_verification<'a>(
    listing: &'a BackupListing,
    damaged: &[BackupName],
    random: u64,
    now: Timestamp,
) -> Vec<&'a BackupName> {
    let newest = newest(&listing.published, now);
    let is_older = |name: &BackupName| Some(name) != newest;
    let mut stored = listing.published.iter().chain(&listing.incomplete);
    let damaged = stored.find(|name| is_older(name) && damaged.contains(name));
    let others: Vec<&BackupName> = listing.published.iter().filter(|name| is_older(name)).collect();
    let at = random.checked_rem(others.len() as u64).and_then(|at| usize::try_from(at).ok());
    let chosen = at.and_then(|at| others.get(at).copied());
    newest.into_iter().chain(damaged.or(chosen)).collect()
}

/// Returns how long to wait for the next attempt after this many failed attempts in a row. The
/// pause is never longer than the interval of backups.
pub(super) fn retry_pause(failures: u32, every: Duration) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    (FIRST_RETRY_PAUSE * (1 << doublings)).min(LONGEST_RETRY_PAUSE).min(every)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_hours(6);

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn backups(times: &[&str]) -> Vec<BackupName> {
        times.iter().map(|time| BackupName::new(at(time), 1)).collect()
    }

    #[test]
    fn the_first_backup_is_due_at_once() {
        let now = at("2026-01-01T00:00:00Z");
        assert_eq!(due_at(&[], EVERY, now), now);
    }

    #[test]
    fn the_newest_backup_decides_whoever_made_it() {
        let made = backups(&["2026-01-01T00:00:00Z", "2026-01-01T06:00:00Z"]);
        for now in ["2026-01-01T06:00:01Z", "2026-01-01T11:59:59Z", "2026-03-01T00:00:00Z"] {
            assert_eq!(due_at(&made, EVERY, at(now)), at("2026-01-01T12:00:00Z"), "{now}");
        }
    }

    #[test]
    fn a_backup_from_the_future_stops_no_schedule() {
        let made = backups(&["2026-01-01T00:00:00Z", "2099-01-01T00:00:00Z"]);
        let now = at("2026-01-02T00:00:00Z");
        assert_eq!(due_at(&made, EVERY, now), at("2026-01-01T06:00:00Z"));
        let skewed = backups(&["2026-01-02T00:09:59Z"]);
        assert_eq!(due_at(&skewed, EVERY, now), at("2026-01-02T06:09:59Z"));
    }

    #[test]
    fn an_interval_beyond_the_calendar_is_never_due() {
        let made = backups(&["2026-01-01T00:00:00Z"]);
        assert_eq!(due_at(&made, Duration::MAX, at("2026-01-02T00:00:00Z")), Timestamp::MAX);
    }

    #[test]
    fn a_verification_is_due_one_interval_after_the_last_one() {
        let now = at("2026-01-02T00:00:00Z");
        let is_due = |last: &str| is_verification_due(Some(at(last)), EVERY, now);
        assert!(is_verification_due(None, EVERY, now));
        assert!(is_due("2026-01-01T18:00:00Z") && is_due("2025-01-01T00:00:00Z"));
        assert!(!is_due("2026-01-01T18:00:01Z") && !is_due("2026-01-02T00:00:00Z"));
        assert!(is_due("2026-01-02T00:00:01Z"), "the clock was set back");
        assert!(!is_verification_due(Some(at("2026-01-01T00:00:00Z")), Duration::MAX, now));
    }

    #[test]
    fn a_verification_examines_the_newest_backup_and_each_older_one_in_its_turn() {
        let published =
            backups(&["2026-01-01T00:00:00Z", "2026-01-01T06:00:00Z", "2026-01-01T12:00:00Z"]);
        let now = at("2026-01-02T00:00:00Z");
        let listing = |published: &[BackupName]| BackupListing {
            published: published.to_vec(),
            ..BackupListing::default()
        };
        let all = listing(&published);
        let newest = &published[2];
        assert_eq!(choose_for_verification(&all, &[], 6, now), [newest, &published[0]]);
        assert_eq!(choose_for_verification(&all, &[], 7, now), [newest, &published[1]]);
        let one = listing(&published[2..]);
        assert_eq!(choose_for_verification(&one, &[], 7, now), [newest]);
        assert!(choose_for_verification(&listing(&[]), &[], 7, now).is_empty());
    }

    #[test]
    fn a_damaged_backup_is_examined_again_while_it_is_stored() {
        let published =
            backups(&["2026-01-01T00:00:00Z", "2026-01-01T06:00:00Z", "2026-01-01T12:00:00Z"]);
        let [oldest, damaged, newest] = [0, 1, 2].map(|at| &published[at]);
        let now = at("2026-01-02T00:00:00Z");
        let mut listing =
            BackupListing { published: published.clone(), ..BackupListing::default() };
        let choose = |listing: &BackupListing, damaged: &BackupName| -> Vec<BackupName> {
            let damaged = std::slice::from_ref(damaged);
            choose_for_verification(listing, damaged, 0, now).into_iter().cloned().collect()
        };
        assert_eq!(choose(&listing, damaged), [newest.clone(), damaged.clone()]);
        assert_eq!(choose(&listing, newest), [newest.clone(), oldest.clone()]);
        listing.incomplete = vec![listing.published.remove(1)];
        assert_eq!(choose(&listing, damaged), [newest.clone(), damaged.clone()]);
        listing.incomplete.clear();
        assert_eq!(choose(&listing, damaged), [newest.clone(), oldest.clone()]);
    }

    #[test]
    fn pauses_after_failures_grow_and_are_bounded() {
        assert_eq!(retry_pause(1, EVERY), FIRST_RETRY_PAUSE);
        assert_eq!(retry_pause(2, EVERY), 2 * FIRST_RETRY_PAUSE);
        assert_eq!(retry_pause(u32::MAX, EVERY), LONGEST_RETRY_PAUSE);
        let often = Duration::from_secs(5);
        assert_eq!(retry_pause(u32::MAX, often), often);
    }
}
