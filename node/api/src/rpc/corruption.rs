//! Comparison of the members' data ([`node_state::corruption`]). The leader queries the members,
//! judges their answers, and raises the CORRUPT alarm of a member whose data differs. A member with
//! that alarm refuses requests for data (`ApiContext::ensure_not_corrupt`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use node_proto::etcdserverpb::alarm_request::AlarmAction;
use node_proto::etcdserverpb::{AlarmMember, AlarmRequest, AlarmType};
use node_proto::musterpb::{StoreAnswer, StoreQuestion};
use node_state::corruption::{
    AlarmActions, Claim, CorruptionVerdict, Question, SuspectCounts, decode_claims, encode_claims,
    judge_claims, make_claims,
};
use node_state::identity::MemberId;
use prost::Message as _;
use rustix::time::{ClockId, clock_gettime};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::ApiContext;
use super::context::CallContext;

/// Interval of comparisons if `--corrupt-check-time` isn't given.
pub const COMPARISON_INTERVAL: Duration = Duration::from_secs(30);
/// Interval after a comparison in which members differed, and after a member has reconnected.
const RECHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Interval of checks whether the next comparison is due.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Minimum interval of comparisons, as a multiple of the leader's processor time for the last one.
/// It limits the load, because a comparison reads the whole store. The second factor applies after
/// a comparison in which members differed.
const CPU_TIME_FACTORS: (u32, u32) = (10, 2);
/// Minimum interval of comparisons, as a multiple of the elapsed time of the last one. It limits
/// the load on a slow disk. The factor is small, because a comparison also takes long if processors
/// are busy, and a difference must still be found in time.
const ELAPSED_TIME_FACTOR: u32 = 2;
/// Maximum time for a member to apply the requested index and to learn who leads.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for a member's answer: a multiple of the time in which the leader read its own
/// store, plus a constant.
const ANSWER_TIMEOUT: (u32, Duration) = (3, Duration::from_secs(10));

/// Time spent on reading this member's own store.
#[derive(Clone, Copy, Default)]
struct ReadCost {
    /// Elapsed time of the monotonic clock.
    elapsed: Duration,
    /// Processor time of the reading thread.
    cpu_time: Duration,
}

/// Data that determines when the next comparison of the members' data is due.
struct Schedule {
    began: Instant,
    cost: ReadCost,
    is_urgent: bool,
}

impl Schedule {
    fn next(&self, every: Duration, somebody_came: bool) -> Instant {
        let ReadCost { elapsed: passed, cpu_time: worked } = self.cost;
        let pause = if self.is_urgent {
            worked * CPU_TIME_FACTORS.1
        } else {
            (passed * ELAPSED_TIME_FACTOR).max(worked * CPU_TIME_FACTORS.0)
        };
        let least =
            if self.is_urgent || somebody_came { RECHECK_INTERVAL.min(every) } else { every };
        self.began + least.max(pause)
    }
}

/// Result of a comparison.
#[derive(Default)]
struct Comparison {
    verdict: CorruptionVerdict,
    cost: ReadCost,
}

/// Returns the processor time that this thread has used so far.
fn thread_cpu_time() -> Duration {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    spent.try_into().expect("a thread's time is never before its beginning")
}

/// Compares the members repeatedly while this member leads. If the leader's own data is wrong, the
/// leader transfers its leadership, so that it doesn't send that data to other members.
pub(super) async fn run_comparisons(context: Arc<ApiContext>) {
    let (mut leader, own) = (context.leader.clone(), context.identity.member_id);
    while leader.wait_for(|leader| *leader == own).await.is_ok() {
        let mut counts = SuspectCounts::default();
        while context.leads() {
            if context.is_corrupt() {
                context.handle.hand_over().await;
            }
            let began = Instant::now();
            let Comparison { verdict, cost: effort } = compare(&context).await;
            context.metrics.comparisons.record(began.elapsed());
            let compared = i64::try_from(verdict.compared.len()).unwrap_or(i64::MAX);
            context.metrics.compared.store(compared, Ordering::Relaxed);
            let AlarmActions { alarms, mut hurry } = counts.add_verdict(&verdict);
            for member in alarms {
                hurry |= !raise(&context, member).await;
            }
            // The leader whose data is corrupt has tried to transfer its leadership. As that can
            // fail, the next attempt follows soon.
            hurry |= context.is_corrupt();
            wait_until_due(&context, &Schedule { began, cost: effort, is_urgent: hurry }).await;
        }
        context.metrics.compared.store(0, Ordering::Relaxed);
    }
}

/// Raises a member's CORRUPT alarm, unless it is raised already. Member id 0 stands for the whole
/// cluster. Returns false if that failed.
async fn raise(context: &ApiContext, member_id: u64) -> bool {
    let alarm = AlarmType::Corrupt;
    let same = |a: &AlarmMember| a.member_id == member_id && a.alarm() == alarm;
    if context.alarms.borrow().iter().any(same) {
        return true;
    }
    if member_id == 0 {
        tracing::error!(
            "members hold different data, and no quorum says whose is right: raising the CORRUPT alarm of the whole cluster"
        );
    } else {
        tracing::error!(
            member.id = %MemberId(member_id),
            "a member's data is another than a quorum's: raising its CORRUPT alarm; replace it (member remove, member add), then disarm the alarm"
        );
    }
    let action = AlarmAction::Activate.into();
    let request = AlarmRequest { action, member_id, alarm: alarm.into() };
    let raised = context.propose(request, &mut CallContext::for_member()).await;
    if let Err(error) = &raised {
        // The error needs no handling: the next comparison tries again to raise the alarm.
        tracing::warn!(error = %error.text(), "cannot raise the alarm yet");
    }
    raised.is_ok()
}

/// Compares this member's data once with that of all connected members.
async fn compare(context: &ApiContext) -> Comparison {
    let Some(peers) = &context.peers else { return Comparison::default() };
    let (question, voters, others) = {
        let view = context.store.view();
        let members = view.members().voters_and_learners();
        let connected = peers.connected();
        let ids = members.voters.iter().chain(&members.learners).copied();
        let others: Vec<u64> = ids.filter(|id| connected.contains_key(&MemberId(*id))).collect();
        (Question::of(&view), members.voters.into_iter().collect::<BTreeSet<u64>>(), others)
    };
    if question.index == 0 || others.is_empty() {
        return Comparison::default();
    }
    let request = Bytes::from(question.encode().encode_to_vec());
    let mut asked = JoinSet::new();
    for id in others.iter().copied() {
        let (peers, request) = (peers.clone(), request.clone());
        asked.spawn(async move { (id, peers.ask(MemberId(id), request).await) });
    }
    let began = Instant::now();
    let (own, worked) = own_claims(context, question).await;
    let mut said = BTreeMap::from([(context.identity.member_id, own)]);
    let effort = ReadCost { elapsed: began.elapsed(), cpu_time: worked };
    let deadline = Instant::now() + effort.elapsed * ANSWER_TIMEOUT.0 + ANSWER_TIMEOUT.1;
    while let Ok(Some(Ok((id, answer)))) = timeout_at(deadline, asked.join_next()).await {
        match answer.map(StoreAnswer::decode) {
            Ok(Ok(answer)) => {
                said.insert(id, decode_claims(answer));
            }
            Ok(Err(error)) => {
                tracing::warn!(peer.member.id = %MemberId(id), %error, "a member says of its data what can't be understood");
            }
            // The member runs a build that doesn't know this request, or has disconnected. The
            // comparison goes on without it.
            Err(error) => {
                tracing::debug!(peer.member.id = %MemberId(id), %error, "a member does not say what it holds");
            }
        }
    }
    let verdict = judge_claims(&voters, &said);
    tracing::debug!(?question, ?verdict, "compared the members' data");
    Comparison { verdict, cost: effort }
}

/// Returns the checksums of this member's data, and the processor time that they took. Returns no
/// checksums if this member is already computing them for another comparison.
async fn own_claims(context: &ApiContext, question: Question) -> (Vec<Claim>, Duration) {
    let nothing = (Vec::new(), Duration::ZERO);
    let Ok(alone) = context.comparison_permit.clone().try_acquire_owned() else { return nothing };
    let store = context.store.clone();
    let work = move || {
        let (_alone, before) = (alone, thread_cpu_time());
        let claims = make_claims(&store, &store.view(), question);
        (claims, thread_cpu_time() - before)
    };
    let (why, worked) = match tokio::task::spawn_blocking(work).await {
        Ok((Ok(claims), worked)) => return (claims, worked),
        Ok((Err(error), worked)) => (error.to_string(), worked),
        // redb, the library under the store, panics on some kinds of damage.
        Err(error) if error.is_panic() => (error.to_string(), Duration::ZERO),
        Err(_) => return nothing,
    };
    tracing::error!(error = why, "this member cannot read its own data");
    (vec![Claim::unreadable(question)], worked)
}

/// Answers the leader's question about this member's data. Before that, waits a limited time until
/// this member has applied as much as `question` needs. Returns `None` for a malformed question.
/// Only the leader gets checksums; for any other sender the store isn't read.
pub(super) async fn answer_store(
    context: &ApiContext,
    from: MemberId,
    request: Bytes,
) -> Option<Bytes> {
    let question = Question::decode(StoreQuestion::decode(request).ok()?)?;
    let (mut status, mut leader) = (context.status.clone(), context.leader.clone());
    let ready = async {
        let _ = status.wait_for(|status| status.applied.index >= question.index).await;
        // Wait until this member knows the sender as leader. A new leader's question can arrive
        // before that.
        let _ = leader.wait_for(|leader| *leader == from.0).await;
    };
    let _ = timeout(CATCH_UP_TIMEOUT, ready).await;
    let is_leader = *context.leader.borrow() == from.0;
    let claims = if is_leader { own_claims(context, question).await.0 } else { Vec::new() };
    Some(encode_claims(claims).encode_to_vec().into())
}

/// Waits until the next comparison is due, or until this member no longer leads.
async fn wait_until_due(context: &ApiContext, done: &Schedule) {
    let came_since = || {
        let connected = context.peers.as_ref().map(|peers| peers.connected()).unwrap_or_default();
        // A member that has connected just now is possibly not ready to answer.
        connected
            .values()
            .any(|since| *since > done.began.into_std() && since.elapsed() > POLL_INTERVAL)
    };
    while context.leads() && Instant::now() < done.next(context.limits.corrupt_check, came_since())
    {
        sleep(POLL_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the seconds from the start of one comparison to the start of the next.
    fn next(passed: u64, worked: u64, hurry: bool, every: u64, came: bool) -> u64 {
        let seconds = Duration::from_secs;
        let effort = ReadCost { elapsed: seconds(passed), cpu_time: seconds(worked) };
        let began = Instant::now();
        (Schedule { began, cost: effort, is_urgent: hurry }.next(seconds(every), came) - began)
            .as_secs()
    }

    #[test]
    fn comparisons_take_a_limited_part_of_the_time() {
        assert_eq!(next(1, 1, false, 30, false), 30);
        assert_eq!(next(4, 4, false, 30, false), 40);
        assert_eq!(next(0, 0, true, 30, false), 2);
        assert_eq!(next(0, 0, false, 30, true), 2);
        assert_eq!(next(4, 4, true, 30, false), 8);
        let came = next(4, 4, false, 30, true);
        assert_eq!(came, 40, "who comes and goes all the time makes no more work");
        assert_eq!(next(0, 0, true, 1, false), 1, "never later than the regular one");
    }

    #[test]
    fn a_busy_processor_does_not_delay_the_next_comparison_much() {
        // 1 s of work that got a fifteenth of a processor takes 15 s. Two comparisons and the
        // interval between them take less than a minute.
        assert_eq!(next(15, 1, false, 30, false), 30);
        assert_eq!(next(15, 1, true, 30, false), 2);
        assert_eq!(
            next(100, 1, false, 30, false),
            200,
            "a slow disk has half of its time for others"
        );
    }

    #[test]
    fn processor_time_does_not_include_sleep() {
        let (began, asleep) = (thread_cpu_time(), Duration::from_millis(200));
        std::thread::sleep(asleep);
        let before = thread_cpu_time();
        assert!(before - began < asleep);
        while thread_cpu_time() == before {}
    }
}
