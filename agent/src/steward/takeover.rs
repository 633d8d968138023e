//! Takes over the leadership if the agent beside the leader is silent.
//!
//! The agent beside the leader carries out intents. While intents are pending, it writes a sign of
//! life to the cluster's own store every few seconds. Each other voter's agent times the sign by
//! its own monotonic clock, so neither another host's clock nor discovery can move the leadership.
//! After [`SILENT_AFTER`] without a new sign, the first of these agents asks the leader's node to
//! hand over to its own node. It then carries out the intents itself. If that agent is silent too,
//! the next one follows after another [`SILENT_AFTER`].
//!
//! The leadership must not move if another leader could do no more than this one. So an agent takes
//! over under three conditions:
//! - There is an intent on which it could act at once.
//! - It has tried fewer than [`MOST_TAKEOVERS`] times for that intent.
//! - It has written a sign of its own, which proves that others will see it alive.

use std::collections::BTreeMap;
use std::time::Duration;

use discovery_types::api::IntentView;
use discovery_types::digest::OperationId;
use discovery_types::intent::VerifiedIntent;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::act::label;
use super::decide::Act;
use super::{Seen, Steward};
use crate::cluster::{Member, MemberId, Members, NodeStatus, Stored};
use crate::exit::chain as causes;

/// Key of the sign of life that the agent beside the leader writes.
const SIGN: &str = "muster/v1/steward";
/// How often the agent beside the leader writes its sign while intents are pending.
const SIGN_EVERY: Duration = Duration::from_secs(5);
/// How long the agent beside the leader may write no sign before the next agent takes over.
const SILENT_AFTER: Duration = Duration::from_secs(15);
/// How often one agent tries to take over for one intent.
const MOST_TAKEOVERS: u32 = 3;

/// The sign of life of the agent beside the leader.
#[derive(Debug, Serialize, Deserialize)]
struct Sign {
    version: u32,
    /// The member's id in hexadecimal digits.
    member: String,
    /// Time of writing by that host's clock. For people only; no decision depends on it.
    at: String,
}

impl Sign {
    fn of(member: MemberId) -> Vec<u8> {
        let (member, at) = (member.to_string(), jiff::Timestamp::now().to_string());
        serde_json::to_vec(&Self { version: 1, member, at }).expect("texts always serialise")
    }

    /// Returns the revision of the sign of `leader`'s agent, if the stored sign is its.
    fn revision(stored: &Stored, leader: MemberId) -> Option<i64> {
        let sign: Sign = serde_json::from_slice(stored.value.as_ref()?).ok()?;
        (sign.member.parse() == Ok(leader)).then_some(stored.revision())
    }
}

/// Observations of the agent beside the leader, and this agent's attempts to take over.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// The leader, the revision of its agent's newest sign, and when that was first seen.
    last: Option<(MemberId, Option<i64>, Instant)>,
    /// When this agent last wrote its own sign.
    signed: Option<Instant>,
    /// Number of attempts to take over, by intent.
    takeovers: BTreeMap<OperationId, u32>,
}

impl Watch {
    /// Forgets everything. Called while no intent is pending, when no sign is written.
    pub(super) fn rest(&mut self) {
        *self = Self::default();
    }

    /// Notes the newest sign of `leader`'s agent. Returns for how long no newer one was seen.
    fn note(&mut self, leader: MemberId, revision: Option<i64>, now: Instant) -> Duration {
        match self.last {
            Some((of, newest, since)) if (of, newest) == (leader, revision) => now - since,
            _ => {
                self.last = Some((leader, revision, now));
                Duration::ZERO
            }
        }
    }

    /// Returns whether this agent may try to take over once more for an intent.
    fn may_try(&self, operation: &OperationId) -> bool {
        self.takeovers.get(operation).is_none_or(|tries| *tries < MOST_TAKEOVERS)
    }

    /// Counts an attempt for each of `operations`, and restarts the measurement of silence.
    fn tried(&mut self, operations: &[OperationId]) {
        self.last = None;
        for operation in operations {
            *self.takeovers.entry(*operation).or_default() += 1;
        }
    }
}

/// Returns how long the leader's agent has to be silent before the agent of `own` takes over.
/// Voters take over in the order of their ids. `None` for the leader itself and for a learner.
fn patience(members: &Members, leader: MemberId, own: MemberId) -> Option<Duration> {
    let heir = |member: &&Member| !member.is_learner && member.id != leader;
    let mut heirs: Vec<MemberId> =
        members.list.iter().filter(heir).map(|member| member.id).collect();
    heirs.sort_unstable();
    let rank = heirs.iter().position(|id| *id == own)?;
    Some(SILENT_AFTER * u32::try_from(rank + 1).unwrap_or(u32::MAX))
}

impl Steward {
    /// Writes this agent's sign of life, unless the last one is recent.
    pub(super) async fn leave_sign(&mut self, own: MemberId) {
        if self.watch.signed.is_some_and(|signed| signed.elapsed() < SIGN_EVERY) {
            return;
        }
        match self.write_sign(own).await {
            Ok(()) => self.watch.signed = Some(Instant::now()),
            Err(why) => self.complain(&format!(
                "no sign can be left in the cluster, so another agent may take the leadership over: \
                 {why}"
            )),
        }
    }

    async fn write_sign(&self, own: MemberId) -> Result<(), String> {
        let stored = self.node.read(SIGN).await.map_err(|error| causes(&error))?;
        let written = self.node.replace(SIGN, &stored, &Sign::of(own)).await;
        match written.map_err(|error| causes(&error))? {
            true => Ok(()),
            false => Err("another agent has just left one".to_owned()),
        }
    }

    /// Takes over the leadership if two conditions hold: the agent beside `leader` has been silent
    /// for long enough, and this agent could act on one of `intents` at once.
    pub(super) async fn watch_leader(
        &mut self,
        intents: &[IntentView],
        status: &NodeStatus,
        leader: MemberId,
    ) -> Result<(), String> {
        let stored = self.node.read(SIGN).await.map_err(|error| causes(&error))?;
        let revision = Sign::revision(&stored, leader);
        let silence = self.watch.note(leader, revision, Instant::now());
        if silence < SILENT_AFTER {
            return Ok(());
        }
        let members = self.node.list().await.map_err(|error| causes(&error))?;
        let (Some(leads), Some(own)) = (members.of_id(leader), members.of_id(status.member_id))
        else {
            return Ok(());
        };
        let due = patience(&members, leader, own.id).is_some_and(|patience| silence >= patience);
        if !due {
            return Ok(());
        }
        let movable = self.movable(intents, &members, own.id);
        if movable.is_empty() {
            return Ok(());
        }
        let ids: Vec<OperationId> = movable.iter().map(|intent| intent.operation).collect();
        // Count the attempt first: one that fails must not be repeated without end.
        self.watch.tried(&ids);
        self.write_sign(own.id).await?;
        let (silent, heir) = (label(leads), label(own));
        tracing::warn!(
            "the agent beside the leader, {silent}, has left no sign for {} s: this host's member \
             takes the leadership over",
            silence.as_secs()
        );
        let moved = self.node.move_leader(leads, own.id).await;
        let became = match &moved {
            Ok(()) => format!("{heir} has taken the leadership over"),
            Err(error) => format!("{heir} can't take the leadership over: {}", causes(error)),
        };
        for intent in &movable {
            let why = format!(
                "the agent of {silent}, which led, has done nothing for {} s: look there with \
                 systemctl status muster-agent and muster-agent status; {became}",
                silence.as_secs()
            );
            self.explain(intent.operation, &why).await;
        }
        moved.map_err(|error| causes(&error))
    }

    /// Returns the intents on which this agent could act at once if its node led.
    fn movable(
        &self,
        intents: &[IntentView],
        members: &Members,
        own: MemberId,
    ) -> Vec<VerifiedIntent> {
        let verified = intents.iter().filter_map(|view| {
            let intent = VerifiedIntent::verify(&view.intent, self.statements.chain()).ok()?;
            let seen = Seen::default();
            let act = self.sight(&intent, view, members, (own, own), &seen).decide();
            let acts = matches!(act, Act::Change(..) | Act::FindRemover(_) | Act::Tell(_));
            (acts && self.watch.may_try(&intent.operation)).then_some(intent)
        });
        verified.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEADER: MemberId = MemberId(7);

    fn members(ids: &[(u64, bool)]) -> Members {
        let member = |&(id, is_learner): &(u64, bool)| Member {
            id: MemberId(id),
            is_learner,
            ..Member::default()
        };
        Members { list: ids.iter().map(member).collect(), ..Members::default() }
    }

    #[test]
    fn voters_wait_for_one_another_by_rank_and_learners_never_take_over() {
        let members = members(&[(9, false), (7, false), (3, false), (1, true)]);
        let of = |id| patience(&members, LEADER, MemberId(id));
        assert_eq!(of(3), Some(SILENT_AFTER));
        assert_eq!(of(9), Some(2 * SILENT_AFTER));
        assert_eq!([of(7), of(1), of(8)], [None; 3], "the leader, a learner, nobody's");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_counted_from_the_last_new_sign_of_whoever_leads() {
        let mut watch = Watch::default();
        let pause = SILENT_AFTER / 3;
        let mut note = async |leader, revision| {
            tokio::time::advance(pause).await;
            watch.note(leader, revision, Instant::now())
        };
        assert_eq!(note(LEADER, Some(4)).await, Duration::ZERO);
        assert_eq!(note(LEADER, Some(4)).await, pause);
        assert_eq!(note(LEADER, Some(4)).await, 2 * pause);
        assert_eq!(note(LEADER, Some(5)).await, Duration::ZERO, "a new sign");
        assert_eq!(note(LEADER, Some(5)).await, pause);
        assert_eq!(note(MemberId(3), None).await, Duration::ZERO, "another leader");
        assert_eq!(note(MemberId(3), None).await, pause, "whose agent never left one");
    }

    #[test]
    fn a_sign_of_another_member_is_none_of_the_leaders() {
        let stored = |value: Vec<u8>| {
            let mut stored = Stored::default();
            stored.value = Some(value);
            stored
        };
        assert_eq!(Sign::revision(&stored(Sign::of(LEADER)), LEADER), Some(0));
        assert_eq!(Sign::revision(&stored(Sign::of(MemberId(3))), LEADER), None);
        assert_eq!(Sign::revision(&stored(b"junk".to_vec()), LEADER), None);
        assert_eq!(Sign::revision(&Stored::default(), LEADER), None);
    }

    #[tokio::test(start_paused = true)]
    async fn one_intent_moves_the_leadership_a_few_times_at_most() {
        let mut watch = Watch::default();
        let operation = OperationId([1; 16]);
        for _ in 0..MOST_TAKEOVERS {
            assert!(watch.may_try(&operation));
            watch.note(LEADER, None, Instant::now());
            tokio::time::advance(SILENT_AFTER).await;
            watch.tried(&[operation]);
            let silence = watch.note(LEADER, None, Instant::now());
            assert_eq!(silence, Duration::ZERO, "the next attempt waits as long again");
        }
        assert!(!watch.may_try(&operation));
        assert!(watch.may_try(&OperationId([2; 16])));
    }
}
