//! Takes over the leadership if the leader's agent is silent.
//!
//! The leader's agent carries out intents. While intents are pending, it writes a heartbeat to the
//! cluster's own store every few seconds. Each other voter's agent measures the time since the last
//! heartbeat by its own monotonic clock. So neither another host's clock nor discovery can move the
//! leadership. After [`TAKEOVER_TIMEOUT`] without a new heartbeat, the first of these agents asks
//! the leader's node to hand the leadership over to the agent's own node. That agent then carries
//! out the intents. If it is silent too, the next one follows after another [`TAKEOVER_TIMEOUT`].
//!
//! The leadership must not move to a node whose agent could do no more than the present leader's
//! agent. So an agent takes over under three conditions:
//! - There is an intent on which it could act at once.
//! - It has tried fewer than [`MAX_TAKEOVERS`] times for that intent.
//! - It has written a heartbeat of its own, which proves that other agents will see its heartbeats.

use std::collections::BTreeMap;
use std::time::Duration;

use discovery_types::api::IntentView;
use discovery_types::digest::OperationId;
use discovery_types::intent::VerifiedIntent;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::act::label;
use super::decide::StewardAction;
use super::{IntentObservations, Steward};
use crate::cluster::{ClusterMember, MemberId, MemberList, NodeStatus, StoredValue};
use crate::exit::error_chain as causes;

/// Key of the heartbeat that the leader's agent writes.
const HEARTBEAT_KEY: &str = "muster/v1/steward";
/// How often the leader's agent writes its heartbeat while intents are pending.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// How long the leader's agent may write no heartbeat before the next agent takes over.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum number of times that one agent tries to take over for one intent.
const MAX_TAKEOVERS: u32 = 3;

/// Heartbeat of the leader's agent, or of an agent that takes over.
#[derive(Debug, Serialize, Deserialize)]
struct Heartbeat {
    version: u32,
    /// The member's id in hexadecimal digits.
    member: String,
    /// Time of writing, by the clock of the host that wrote the heartbeat. For people only; no
    /// decision depends on it.
    at: String,
}

impl Heartbeat {
    fn encode(member: MemberId) -> Vec<u8> {
        let (member, at) = (member.to_string(), jiff::Timestamp::now().to_string());
        serde_json::to_vec(&Self { version: 1, member, at }).expect("texts always serialise")
    }

    /// Returns the revision of the stored heartbeat, if `leader`'s agent wrote it.
    fn revision(stored: &StoredValue, leader: MemberId) -> Option<i64> {
        let heartbeat: Heartbeat = serde_json::from_slice(stored.value.as_ref()?).ok()?;
        (heartbeat.member.parse() == Ok(leader)).then_some(stored.revision())
    }
}

/// Observations of the leader's agent, and this agent's attempts to take over.
#[derive(Debug, Default)]
pub(super) struct LeaderWatch {
    /// The leader, the revision of its agent's newest heartbeat, and when that heartbeat was first
    /// seen.
    last: Option<(MemberId, Option<i64>, Instant)>,
    /// When this agent last wrote its own heartbeat.
    heartbeat_written: Option<Instant>,
    /// Number of attempts to take over, by intent.
    takeovers: BTreeMap<OperationId, u32>,
}

impl LeaderWatch {
    /// Forgets everything. Called while no intent is pending, because nobody writes a heartbeat
    /// then.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Notes the newest heartbeat of `leader`'s agent. Returns for how long no newer one was seen.
    fn record_heartbeat(
        &mut self,
        leader: MemberId,
        revision: Option<i64>,
        now: Instant,
    ) -> Duration {
        match self.last {
            Some((of, newest, since)) if (of, newest) == (leader, revision) => now - since,
            _ => {
                self.last = Some((leader, revision, now));
                Duration::ZERO
            }
        }
    }

    /// Returns whether this agent may try to take over once more for an intent.
    fn may_take_over(&self, operation: &OperationId) -> bool {
        self.takeovers.get(operation).is_none_or(|tries| *tries < MAX_TAKEOVERS)
    }

    /// Counts an attempt for each of `operations`. From now on, the time without a heartbeat is
    /// measured anew.
    fn count_attempts(&mut self, operations: &[OperationId]) {
        self.last = None;
        for operation in operations {
            *self.takeovers.entry(*operation).or_default() += 1;
        }
    }
}

/// Returns how long the leader's agent has to be silent before the agent of `own` takes over.
/// Voters take over in the order of their ids. `None` for the leader itself and for a learner.
fn takeover_delay(members: &MemberList, leader: MemberId, own: MemberId) -> Option<Duration> {
    let heir = |member: &&ClusterMember| !member.is_learner && member.id != leader;
    let mut heirs: Vec<MemberId> =
        members.list.iter().filter(heir).map(|member| member.id).collect();
    heirs.sort_unstable();
    let rank = heirs.iter().position(|id| *id == own)?;
    Some(TAKEOVER_TIMEOUT * u32::try_from(rank + 1).unwrap_or(u32::MAX))
}

impl Steward {
    /// Writes this agent's heartbeat, unless the last one is recent.
    pub(super) async fn write_heartbeat_if_due(&mut self, own: MemberId) {
        if self
            .leader_watch
            .heartbeat_written
            .is_some_and(|signed| signed.elapsed() < HEARTBEAT_INTERVAL)
        {
            return;
        }
        match self.write_heartbeat(own).await {
            Ok(()) => self.leader_watch.heartbeat_written = Some(Instant::now()),
            Err(why) => self.warn_once(&format!(
                "no sign can be left in the cluster, so another agent may take the leadership over: \
                 {why}"
            )),
        }
    }

    async fn write_heartbeat(&self, own: MemberId) -> Result<(), String> {
        let stored = self.node.read_key(HEARTBEAT_KEY).await.map_err(|error| causes(&error))?;
        let written = self
            .node
            .replace_key_if_unchanged(HEARTBEAT_KEY, &stored, &Heartbeat::encode(own))
            .await;
        match written.map_err(|error| causes(&error))? {
            true => Ok(()),
            false => Err("another agent has just left one".to_owned()),
        }
    }

    /// Takes the leadership over if the agent of `leader` has been silent for long enough. This
    /// agent must also be able to act on one of `intents` at once.
    pub(super) async fn watch_leader(
        &mut self,
        intents: &[IntentView],
        status: &NodeStatus,
        leader: MemberId,
    ) -> Result<(), String> {
        let stored = self.node.read_key(HEARTBEAT_KEY).await.map_err(|error| causes(&error))?;
        let revision = Heartbeat::revision(&stored, leader);
        let silence = self.leader_watch.record_heartbeat(leader, revision, Instant::now());
        if silence < TAKEOVER_TIMEOUT {
            return Ok(());
        }
        let members = self.node.list_members().await.map_err(|error| causes(&error))?;
        let (Some(leads), Some(own)) = (members.of_id(leader), members.of_id(status.member_id))
        else {
            return Ok(());
        };
        let due =
            takeover_delay(&members, leader, own.id).is_some_and(|patience| silence >= patience);
        if !due {
            return Ok(());
        }
        // Read the store's statement chain first, which may be newer than this agent's. An agent
        // that can't read that chain doesn't take over.
        self.statements.sync_store(&self.node).await?;
        let movable = self.actionable_intents(intents, &members, own.id);
        if movable.is_empty() {
            return Ok(());
        }
        let ids: Vec<OperationId> = movable.iter().map(|intent| intent.operation).collect();
        // Count the attempt first: one that fails must not be repeated without end.
        self.leader_watch.count_attempts(&ids);
        self.write_heartbeat(own.id).await?;
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
    fn actionable_intents(
        &self,
        intents: &[IntentView],
        members: &MemberList,
        own: MemberId,
    ) -> Vec<VerifiedIntent> {
        let verified = intents.iter().filter_map(|view| {
            let intent = VerifiedIntent::verify(&view.intent, self.statements.chain()).ok()?;
            if self.could_begin(&intent) {
                return self.leader_watch.may_take_over(&intent.operation).then_some(intent);
            }
            let intent = self.with_replaced_member(intent)?;
            let seen = IntentObservations::default();
            let act = self.collect_facts(&intent, view, members, (own, own), &seen).decide();
            let acts = matches!(
                act,
                StewardAction::Change(..)
                    // A wait for a newcomer is a reason to take over, too: only the leader's agent
                    // can remove a newcomer that makes no progress.
                    | StewardAction::AwaitNewcomer(_)
                    | StewardAction::FindRemover(_)
                    | StewardAction::Report(_)
            );
            (acts && self.leader_watch.may_take_over(&intent.operation)).then_some(intent)
        });
        verified.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEADER: MemberId = MemberId(7);

    fn members(ids: &[(u64, bool)]) -> MemberList {
        let member = |&(id, is_learner): &(u64, bool)| ClusterMember {
            id: MemberId(id),
            is_learner,
            ..ClusterMember::default()
        };
        MemberList { list: ids.iter().map(member).collect(), ..MemberList::default() }
    }

    #[test]
    fn voters_take_over_in_the_order_of_their_ids_and_learners_never_do() {
        let members = members(&[(9, false), (7, false), (3, false), (1, true)]);
        let of = |id| takeover_delay(&members, LEADER, MemberId(id));
        assert_eq!(of(3), Some(TAKEOVER_TIMEOUT));
        assert_eq!(of(9), Some(2 * TAKEOVER_TIMEOUT));
        assert_eq!([of(7), of(1), of(8)], [None; 3], "the leader, a learner, nobody's");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_counts_from_the_leaders_last_heartbeat() {
        let mut watch = LeaderWatch::default();
        let pause = TAKEOVER_TIMEOUT / 3;
        let mut note = async |leader, revision| {
            tokio::time::advance(pause).await;
            watch.record_heartbeat(leader, revision, Instant::now())
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
    fn a_heartbeat_of_another_member_does_not_count_for_the_leader() {
        let stored = |value: Vec<u8>| {
            let mut stored = StoredValue::default();
            stored.value = Some(value);
            stored
        };
        assert_eq!(Heartbeat::revision(&stored(Heartbeat::encode(LEADER)), LEADER), Some(0));
        assert_eq!(Heartbeat::revision(&stored(Heartbeat::encode(MemberId(3))), LEADER), None);
        assert_eq!(Heartbeat::revision(&stored(b"junk".to_vec()), LEADER), None);
        assert_eq!(Heartbeat::revision(&StoredValue::default(), LEADER), None);
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_takeovers_for_one_intent_is_limited() {
        let mut watch = LeaderWatch::default();
        let operation = OperationId([1; 16]);
        for _ in 0..MAX_TAKEOVERS {
            assert!(watch.may_take_over(&operation));
            watch.record_heartbeat(LEADER, None, Instant::now());
            tokio::time::advance(TAKEOVER_TIMEOUT).await;
            watch.count_attempts(&[operation]);
            let silence = watch.record_heartbeat(LEADER, None, Instant::now());
            assert_eq!(silence, Duration::ZERO, "the next attempt waits as long again");
        }
        assert!(!watch.may_take_over(&operation));
        assert!(watch.may_take_over(&OperationId([2; 16])));
    }
}
