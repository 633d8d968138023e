//! The NOSPACE alarm, which a member raises when its quota or its disk is exhausted.
//!
//! While any member's NOSPACE alarm is active, every member refuses requests that would make the
//! data grow, when it applies them. Deletions, compactions and defragmentations continue. `etcdctl
//! alarm list` shows whose alarm is active.
//!
//! A member raises its own alarm, by proposing it, for two reasons:
//!
//! - **The quota**, `--quota-backend-bytes`. It limits the size of the store's contents: the bytes
//!   of all revisions' keys, values and metadata ([`Store::record_bytes`]; `dbSizeInUse` in the
//!   status). This size is the same on every member. etcd limits the file's length instead. The
//!   length of our file isn't suitable: it depends on how the file grew, by doubling, and on the
//!   last defragmentation. The member whose client exceeds the quota refuses the request and raises
//!   the alarm. After a compaction has made room, an operator disarms the alarm (`etcdctl alarm
//!   disarm`).
//! - **The disk.** Each member refuses its own clients' writes while its disk is short of space.
//!   But writes of other members' clients go to the leader, and must not fill its disk. So a leader
//!   that runs short transfers its leadership, once. If it leads again later, because no other
//!   member can lead or all disks are short, it raises the alarm. The same member lowers the alarm
//!   when its disk has space again, unless its store exceeds the quota by then.
//!
//! [`Store::record_bytes`]: node_state::mvcc::Store::record_bytes

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use node_proto::etcdserverpb::alarm_request::AlarmAction;

use super::context::ApiContext;

/// Wait before another attempt to raise or lower the alarm.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Actions that this member has taken so far against the lack of space on its disk.
#[derive(Clone, Copy, Debug, Default)]
struct SpaceActions {
    handed_over: bool,
    raised: bool,
}

/// Next action about the lack of space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpaceAction {
    HandOver,
    Alarm(AlarmAction),
    /// Leave the alarm raised, since the quota is a reason for it.
    LeaveAlarm,
    Nothing,
}

impl SpaceActions {
    fn next(self, short: bool, leads: bool, by_quota: bool) -> SpaceAction {
        match (short, leads) {
            (true, true) if !self.handed_over => SpaceAction::HandOver,
            (true, true) if !self.raised => SpaceAction::Alarm(AlarmAction::Activate),
            (false, _) if self.raised && by_quota => SpaceAction::LeaveAlarm,
            (false, _) if self.raised => SpaceAction::Alarm(AlarmAction::Deactivate),
            _ => SpaceAction::Nothing,
        }
    }
}

pub(super) async fn run_space_guard(context: Arc<ApiContext>) {
    let (mut space, mut leader) = (context.disk_low.clone(), context.leader.clone());
    let own = context.identity.member_id;
    let by_quota = &context.nospace_claim.by_quota;
    let mut done = SpaceActions::default();
    loop {
        let short = *space.borrow_and_update();
        let leads = *leader.borrow_and_update() == own;
        match done.next(short, leads, by_quota.load(Ordering::Relaxed)) {
            SpaceAction::HandOver => {
                done.handed_over = true;
                context.handle.hand_over().await;
            }
            SpaceAction::Alarm(action) => {
                if action == AlarmAction::Activate && !context.has_nospace_alarm() {
                    // This member has no NOSPACE alarm now. If it raised one for the quota earlier,
                    // an operator has disarmed that. So the quota no longer keeps the alarm raised.
                    by_quota.store(false, Ordering::Relaxed);
                }
                match context.propose_nospace_alarm(action).await {
                    Ok(()) => done.raised = action == AlarmAction::Activate,
                    Err(error) => {
                        tracing::warn!(error = %error.text(), "cannot tell the cluster about the disk's space yet");
                        tokio::time::sleep(RETRY_INTERVAL).await;
                    }
                }
            }
            SpaceAction::LeaveAlarm => done.raised = false,
            SpaceAction::Nothing => {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_short_of_space_hands_over_once_and_then_raises_the_alarm() {
        let mut done = SpaceActions::default();
        assert_eq!(done.next(false, true, false), SpaceAction::Nothing);
        assert_eq!(
            done.next(true, false, false),
            SpaceAction::Nothing,
            "followers refuse their own clients only"
        );
        assert_eq!(done.next(true, true, false), SpaceAction::HandOver);
        done.handed_over = true;
        assert_eq!(done.next(true, true, false), SpaceAction::Alarm(AlarmAction::Activate));
        done.raised = true;
        assert_eq!(done.next(true, true, false), SpaceAction::Nothing);
        assert_eq!(done.next(false, false, false), SpaceAction::Alarm(AlarmAction::Deactivate));
    }

    #[test]
    fn free_disk_space_does_not_lower_an_alarm_that_the_quota_needs() {
        let done = SpaceActions { handed_over: true, raised: true };
        assert_eq!(done.next(false, true, true), SpaceAction::LeaveAlarm);
        let left = SpaceActions { raised: false, ..done };
        assert_eq!(left.next(false, true, true), SpaceAction::Nothing);
    }
}
