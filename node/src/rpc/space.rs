//! Room for what clients write, and the NOSPACE alarm, which says that there is none: while any
//! member's is raised, every member refuses what makes the data grow, as each of them applies the
//! log. Deletions, compactions and defragmentations go on, and `etcdctl alarm list` shows whose it is.
//!
//! This member raises its own, by proposing it, for two reasons:
//!
//! - **The quota**, `--quota-backend-bytes`. What counts is what the store holds: the bytes of all
//!   revisions' keys and values and what belongs to them ([`Store::record_bytes`]; `dbSizeInUse` in the
//!   status), the same on every member. The file's length, which etcd counts, says here how the file
//!   grew, by doubling, and when it was last defragmented. The member whose client asks for
//!   more refuses it and raises the alarm. An operator lowers it (`etcdctl alarm disarm`), once a
//!   compaction has made room.
//! - **The disk.** Each member refuses its own clients while its disk is short of space. What other
//!   members' clients write goes to the leader, though, and must not fill its disk up. So a leader that
//!   runs short hands over to a peer, once; if it finds itself leading again, because nobody else can
//!   or all disks are short, it raises the alarm. That is lowered again by who raised it when there is
//!   space, unless the quota has claimed it meanwhile.
//!
//! [`Store::record_bytes`]: crate::mvcc::Store::record_bytes

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use node_proto::etcdserverpb::alarm_request::AlarmAction;
use node_proto::etcdserverpb::{AlarmRequest, AlarmType};

use super::Context;
use super::context::Held;
use super::error::Error;

/// After the alarm could not be raised or lowered.
const AGAIN: Duration = Duration::from_secs(1);

/// `--quota-backend-bytes`, as it was given.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Quota(pub(crate) i64);

impl Quota {
    /// etcd's, for 0 (server/storage/quota.go).
    const DEFAULT: i64 = 2 << 30;

    /// As the status shows it, bytes; negative: there is none.
    pub(crate) fn told(self) -> i64 {
        if self.0 == 0 { Self::DEFAULT } else { self.0 }
    }

    /// Whether a store that holds so many bytes has room for so many more.
    pub(super) fn has_room(self, held: u64, more: usize) -> bool {
        u64::try_from(self.told()).map_or(true, |quota| held.saturating_add(more as u64) <= quota)
    }
}

/// Whether the quota is a reason for this member's alarm.
#[derive(Debug, Default)]
pub(crate) struct Claim {
    by_quota: AtomicBool,
    /// Held by the one request that raises the alarm; whoever comes meanwhile finds it raised.
    raising: tokio::sync::Mutex<()>,
}

/// Raises the alarm for a request that the quota has no room for, and returns once it stands.
pub(super) async fn over_quota(context: &Context) {
    context.claim.by_quota.store(true, Ordering::Relaxed);
    let _one = context.claim.raising.lock().await;
    if is_raised(context) {
        return;
    }
    tracing::warn!(
        quota_size_bytes = context.limits.quota.told(),
        size_bytes = context.store.record_bytes(),
        "message exceeded backend quota; raising alarm: compact, then disarm it"
    );
    if let Err(error) = set(context, AlarmAction::Activate).await {
        // The next request that has no room tries again.
        tracing::warn!(error = %error.text(), "cannot raise the alarm yet");
    }
}

fn is_raised(context: &Context) -> bool {
    let own = context.identity.member_id;
    let view = context.store.view();
    view.alarms().iter().any(|a| a.member_id == own && a.alarm() == AlarmType::Nospace)
}

/// What this member has done about its disk so far.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    handed_over: bool,
    raised: bool,
}

/// What is to be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    HandOver,
    Alarm(AlarmAction),
    /// The alarm stays, for the quota's sake.
    Leave,
    Nothing,
}

impl Done {
    fn next(self, short: bool, leads: bool, by_quota: bool) -> Next {
        match (short, leads) {
            (true, true) if !self.handed_over => Next::HandOver,
            (true, true) if !self.raised => Next::Alarm(AlarmAction::Activate),
            (false, _) if self.raised && by_quota => Next::Leave,
            (false, _) if self.raised => Next::Alarm(AlarmAction::Deactivate),
            _ => Next::Nothing,
        }
    }
}

pub(super) async fn guard(context: Arc<Context>) {
    let (mut space, mut leader) = (context.space.clone(), context.leader.clone());
    let own = context.identity.member_id;
    let by_quota = &context.claim.by_quota;
    let mut done = Done::default();
    loop {
        let short = *space.borrow_and_update();
        let leads = *leader.borrow_and_update() == own;
        match done.next(short, leads, by_quota.load(Ordering::Relaxed)) {
            Next::HandOver => {
                done.handed_over = true;
                context.handle.hand_over().await;
            }
            Next::Alarm(action) => {
                if action == AlarmAction::Activate && !is_raised(&context) {
                    // What the quota had raised before has been disarmed since.
                    by_quota.store(false, Ordering::Relaxed);
                }
                match set(&context, action).await {
                    Ok(()) => done.raised = action == AlarmAction::Activate,
                    Err(error) => {
                        tracing::warn!(error = %error.text(), "cannot tell the cluster about the disk's space yet");
                        tokio::time::sleep(AGAIN).await;
                    }
                }
            }
            Next::Leave => done.raised = false,
            Next::Nothing => {
                done.handed_over &= short;
                let changed = tokio::select! {
                    changed = space.changed() => changed,
                    changed = leader.changed() => changed,
                };
                if changed.is_err() {
                    return;
                }
            }
        }
    }
}

async fn set(context: &Context, action: AlarmAction) -> Result<(), Error> {
    let request = AlarmRequest {
        action: action.into(),
        member_id: context.identity.member_id,
        alarm: AlarmType::Nospace.into(),
    };
    context.propose(request, &mut Held::by_member()).await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_leader_hands_over_once_then_raises_the_alarm_and_lowers_it_when_there_is_space() {
        let mut done = Done::default();
        assert_eq!(done.next(false, true, false), Next::Nothing);
        assert_eq!(
            done.next(true, false, false),
            Next::Nothing,
            "followers refuse their own clients only"
        );
        assert_eq!(done.next(true, true, false), Next::HandOver);
        done.handed_over = true;
        assert_eq!(done.next(true, true, false), Next::Alarm(AlarmAction::Activate));
        done.raised = true;
        assert_eq!(done.next(true, true, false), Next::Nothing);
        assert_eq!(done.next(false, false, false), Next::Alarm(AlarmAction::Deactivate));
    }

    #[test]
    fn an_alarm_that_the_quota_claims_is_not_lowered_by_space_on_the_disk() {
        let done = Done { handed_over: true, raised: true };
        assert_eq!(done.next(false, true, true), Next::Leave);
        let left = Done { raised: false, ..done };
        assert_eq!(left.next(false, true, true), Next::Nothing);
    }

    #[test]
    fn the_quota_is_what_was_given_by_etcds_rules() {
        let two_gib = 2 << 30;
        assert!(Quota(0).has_room(two_gib - 1, 1) && !Quota(0).has_room(two_gib - 1, 2));
        assert!(Quota(10).has_room(4, 6) && !Quota(10).has_room(4, 7));
        assert!(Quota(-1).has_room(u64::MAX, usize::MAX));
        assert!(!Quota(i64::MAX).has_room(u64::MAX, 1));
        assert_eq!([Quota(0), Quota(7), Quota(-5)].map(Quota::told), [2 << 30, 7, -5]);
    }
}
