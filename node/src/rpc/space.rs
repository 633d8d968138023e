//! A leader whose disk is almost full must not fill it up with what others pass on to it.
//!
//! Each member refuses its own clients while its disk is short of space. What other members' clients
//! write goes to the leader, though. So a leader that runs short hands over to a peer, once; if it
//! finds itself leading again, because nobody else can or all disks are short, it raises the NOSPACE
//! alarm: then every member refuses such writes, `etcdctl alarm list` says why, and deletions and
//! compactions go on. The alarm is lowered again by who raised it when there is space, or by
//! `etcdctl alarm disarm`.

use std::sync::Arc;
use std::time::Duration;

use node_proto::etcdserverpb::alarm_request::AlarmAction;
use node_proto::etcdserverpb::{AlarmRequest, AlarmType};

use super::Context;
use super::context::Held;
use super::error::Error;

/// After the alarm could not be raised or lowered.
const AGAIN: Duration = Duration::from_secs(1);

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
    Nothing,
}

impl Done {
    fn next(self, short: bool, leads: bool) -> Next {
        match (short, leads) {
            (true, true) if !self.handed_over => Next::HandOver,
            (true, true) if !self.raised => Next::Alarm(AlarmAction::Activate),
            (false, _) if self.raised => Next::Alarm(AlarmAction::Deactivate),
            _ => Next::Nothing,
        }
    }
}

pub(super) async fn guard(context: Arc<Context>) {
    let (mut space, mut leader) = (context.space.clone(), context.leader.clone());
    let own = context.identity.member_id;
    let mut done = Done::default();
    loop {
        let short = *space.borrow_and_update();
        let leads = *leader.borrow_and_update() == own;
        match done.next(short, leads) {
            Next::HandOver => {
                done.handed_over = true;
                context.handle.hand_over().await;
            }
            Next::Alarm(action) => match set(&context, action).await {
                Ok(()) => done.raised = action == AlarmAction::Activate,
                Err(error) => {
                    tracing::warn!(error = %error.text(), "cannot tell the cluster about the disk's space yet");
                    tokio::time::sleep(AGAIN).await;
                }
            },
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
    context.propose(request, &mut Held::by_nobody()).await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_leader_hands_over_once_then_raises_the_alarm_and_lowers_it_when_there_is_space() {
        let mut done = Done::default();
        assert_eq!(done.next(false, true), Next::Nothing);
        assert_eq!(
            done.next(true, false),
            Next::Nothing,
            "followers refuse their own clients only"
        );
        assert_eq!(done.next(true, true), Next::HandOver);
        done.handed_over = true;
        assert_eq!(done.next(true, true), Next::Alarm(AlarmAction::Activate));
        done.raised = true;
        assert_eq!(done.next(true, true), Next::Nothing);
        assert_eq!(done.next(false, false), Next::Alarm(AlarmAction::Deactivate));
    }
}
