//! The uses of replacement policies, as the cluster's own store counts them. Pure.
//!
//! A use is one replacement that was begun. It is written before the first step, so a replacement
//! that fails has used the policy, too. Only one replacement is under way at a time: the log has at
//! most one use that has not ended.

use discovery_types::digest::OperationId;
use discovery_types::grant::{GrantId, ReplacementLimits};
use discovery_types::intent::Intent;
use serde::{Deserialize, Serialize};

use crate::cluster::MemberId;

/// Version of the log's format.
const VERSION: u32 = 1;
/// Maximum number of uses in a [`UseLog`]. If it is full and all of its uses are newer than
/// [`KEPT_SECONDS`], no replacement can begin.
const MAX_USES: usize = 256;
/// Time for which an ended use is kept, in seconds: the longest time for which a policy counts a
/// use.
const KEPT_SECONDS: u64 = *ReplacementLimits::PER.end();

/// One replacement that was begun by a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PolicyUse {
    /// Id of the policy.
    pub policy: GrantId,
    /// Operation by which the newcomer becomes a member. Its id is derived from the newcomer's
    /// record.
    pub operation: OperationId,
    /// Id of the dead member.
    #[serde(with = "hexadecimal")]
    pub member: MemberId,
    /// Name of the dead member.
    pub member_name: String,
    /// Name of the newcomer.
    pub newcomer: String,
    /// Number of voters before the dead member is removed.
    pub voters: usize,
    /// Id of the Raft cluster, 16 hexadecimal digits. A recovery gives the same store another id.
    pub raft_cluster: String,
    /// Whether an earlier replacement has removed the dead member already, and its newcomer failed.
    #[serde(default)]
    pub fills_vacancy: bool,
    /// When the replacement began, in seconds since 1970 by the clock of the agent that began it.
    pub began_at: u64,
    /// The newcomer's intent, while the replacement is under way. With it, the replacement can be
    /// finished even if discovery has lost the intent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intent: Option<Box<Intent>>,
    /// How the replacement ended; `None` while it is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// Whether the replacement has removed the dead member and then failed.
    #[serde(default)]
    pub left_vacancy: bool,
}

/// Returns the text of a Raft cluster's id in the log.
pub(crate) fn raft_cluster_text(id: u64) -> String {
    format!("{id:016x}")
}

impl PolicyUse {
    /// Whether the replacement began in this Raft cluster.
    pub(crate) fn is_of(&self, raft_cluster: u64) -> bool {
        self.raft_cluster == raft_cluster_text(raft_cluster)
    }
}

/// All uses of a cluster's policies, oldest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UseLog {
    version: u32,
    uses: Vec<PolicyUse>,
}

impl Default for UseLog {
    fn default() -> Self {
        Self { version: VERSION, uses: Vec::new() }
    }
}

/// Why a log in the store can't be used. Replacements wait until a person has looked at it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the count of replacements in the cluster's store can't be read: {0}")]
pub(crate) struct UnreadableLog(String);

/// Why no use can be added to the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UseError {
    /// Another replacement is under way.
    #[error("another replacement is under way")]
    UnderWay,
    /// The newcomer was in a replacement before.
    #[error("this host was in a replacement before")]
    UsedBefore,
    /// The log is full of uses that still count.
    #[error("too many replacements have begun in the last 30 days")]
    Full,
}

impl UseLog {
    /// Parses the stored value; a missing one is an empty log.
    pub(crate) fn parse(stored: Option<&[u8]>) -> Result<Self, UnreadableLog> {
        let Some(bytes) = stored else { return Ok(Self::default()) };
        let log: Self =
            serde_json::from_slice(bytes).map_err(|error| UnreadableLog(error.to_string()))?;
        match log.version {
            VERSION => Ok(log),
            other => Err(UnreadableLog(format!("it is of version {other}, not {VERSION}"))),
        }
    }

    /// Returns the value to be stored.
    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("texts always serialise")
    }

    /// Returns all uses, oldest first.
    pub(crate) fn into_uses(self) -> Vec<PolicyUse> {
        self.uses
    }

    /// Returns the use of this operation.
    pub(crate) fn of(&self, operation: &OperationId) -> Option<&PolicyUse> {
        self.uses.iter().find(|each| each.operation == *operation)
    }

    /// Returns the use that is under way.
    pub(crate) fn under_way(&self) -> Option<&PolicyUse> {
        self.uses.iter().find(|each| each.ended.is_none())
    }

    /// Returns the number of a policy's uses that began after `now - limits.per_seconds`. A use
    /// that is dated in the future counts, too, since a clock may have been set back.
    pub(crate) fn count(&self, policy: &GrantId, limits: &ReplacementLimits, now: u64) -> usize {
        let counts = |each: &&PolicyUse| {
            each.policy == *policy && each.began_at.saturating_add(limits.per_seconds) > now
        };
        self.uses.iter().filter(counts).count()
    }

    /// Returns when the next of a policy's uses stops counting, in seconds since 1970. `None` if no
    /// use counts now.
    pub(crate) fn next_free(
        &self,
        policy: &GrantId,
        limits: &ReplacementLimits,
        now: u64,
    ) -> Option<u64> {
        let of = self.uses.iter().filter(|each| each.policy == *policy);
        let ends = of.map(|each| each.began_at.saturating_add(limits.per_seconds));
        ends.filter(|end| *end > now).min()
    }

    /// Whether any replacement has left its dead member's place free. The place may be filled by
    /// now.
    pub(crate) fn has_left_vacancy(&self) -> bool {
        self.uses.iter().any(|each| each.left_vacancy)
    }

    /// Returns a use whose dead member was removed and whose newcomer failed, if nobody has filled
    /// that place since. `voters` is the number of voters of `raft_cluster` today. A recovered
    /// cluster has no vacant places: its operator adds the other members. If several places are
    /// vacant, returns the use that began with the fewest voters. Once that place is filled, the
    /// other places still count as vacant.
    pub(crate) fn vacancy(&self, voters: usize, raft_cluster: u64) -> Option<&PolicyUse> {
        let is_last = |at: usize, member: MemberId| {
            !self.uses[at + 1..].iter().any(|later| later.member == member)
        };
        let each = self.uses.iter().enumerate();
        let open = each.filter(|(at, each)| {
            let is_open = each.left_vacancy && each.is_of(raft_cluster);
            is_open && is_last(*at, each.member) && voters < each.voters
        });
        open.map(|(_, each)| each).min_by_key(|each| each.voters)
    }

    /// Adds a use, which is under way from now on.
    pub(crate) fn begin(&mut self, new: PolicyUse, now: u64) -> Result<(), UseError> {
        if self.under_way().is_some() {
            return Err(UseError::UnderWay);
        }
        if self.of(&new.operation).is_some() {
            return Err(UseError::UsedBefore);
        }
        if self.uses.len() >= MAX_USES {
            self.uses.retain(|each| each.began_at.saturating_add(KEPT_SECONDS) > now);
        }
        if self.uses.len() >= MAX_USES {
            return Err(UseError::Full);
        }
        self.uses.push(new);
        Ok(())
    }

    /// Notes how an operation's use has ended, and whether the dead member was removed without a
    /// newcomer in its place. Returns `false` if there is nothing to note.
    pub(crate) fn end(&mut self, operation: &OperationId, how: &str, leaves_vacancy: bool) -> bool {
        let open = |each: &&mut PolicyUse| each.operation == *operation && each.ended.is_none();
        match self.uses.iter_mut().find(open) {
            Some(each) => {
                each.ended = Some(how.to_owned());
                each.left_vacancy = leaves_vacancy;
                each.intent = None;
                true
            }
            None => false,
        }
    }
}

/// A member's id as hexadecimal digits.
mod hexadecimal {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::cluster::MemberId;

    pub(super) fn serialize<S: Serializer>(
        id: &MemberId,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(id)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<MemberId, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
impl UseLog {
    /// Returns the log with vacant places that never count as filled. The simulation switches a
    /// guard off in this way.
    pub(super) fn with_vacancies_for_ever(mut self) -> Self {
        for each in &mut self.uses {
            each.voters = usize::MAX;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ReplacementLimits =
        ReplacementLimits { after_seconds: 60, at_most: 2, per_seconds: 3_600 };

    fn one(number: u8, policy: GrantId, began_at: u64) -> PolicyUse {
        PolicyUse {
            policy,
            operation: OperationId([number; 16]),
            member: MemberId(0xab),
            member_name: "db-2".to_owned(),
            newcomer: format!("db-{number}"),
            voters: 3,
            raft_cluster: raft_cluster_text(5),
            fills_vacancy: false,
            began_at,
            intent: None,
            ended: None,
            left_vacancy: false,
        }
    }

    #[test]
    fn one_replacement_is_under_way_at_a_time_and_a_newcomer_has_one_chance() {
        let (mut log, policy) = (UseLog::default(), GrantId::random());
        log.begin(one(1, policy, 100), 100).unwrap();
        assert_eq!(log.begin(one(2, policy, 101), 101), Err(UseError::UnderWay));
        let first = OperationId([1; 16]);
        assert!(log.end(&first, "stalled", false) && !log.end(&first, "promoted", false));
        let ended = log.of(&first).unwrap();
        assert!(ended.ended.as_deref() == Some("stalled") && ended.intent.is_none());
        assert_eq!(log.begin(one(1, policy, 102), 102), Err(UseError::UsedBefore));
        log.begin(one(2, policy, 102), 102).unwrap();
        let stored = log.encode();
        assert_eq!(UseLog::parse(Some(&stored)).unwrap(), log);
    }

    #[test]
    fn uses_count_for_their_policy_and_time_even_if_they_failed_or_come_from_the_future() {
        let (mut log, policy, other) = (UseLog::default(), GrantId::random(), GrantId::random());
        for (number, of, at) in [(1, policy, 1_000), (2, other, 2_000), (3, policy, 9_000)] {
            log.begin(one(number, of, at), at).unwrap();
            log.end(&OperationId([number; 16]), "stalled", false);
        }
        assert_eq!(log.count(&policy, &LIMITS, 4_599), 2, "one of them is in the future");
        assert_eq!(log.next_free(&policy, &LIMITS, 4_599), Some(4_600));
        assert_eq!(log.count(&policy, &LIMITS, 4_600), 1);
        assert_eq!(log.count(&policy, &LIMITS, 12_600), 0);
        assert_eq!(log.next_free(&policy, &LIMITS, 12_600), None);
    }

    #[test]
    fn a_place_is_vacant_after_a_removal_whose_newcomer_failed_until_somebody_fills_it() {
        let (mut log, policy) = (UseLog::default(), GrantId::random());
        log.begin(one(1, policy, 100), 100).unwrap();
        assert_eq!(log.vacancy(2, 5), None, "it is under way");
        log.end(&OperationId([1; 16]), "stalled", true);
        assert_eq!(log.vacancy(2, 5).map(|each| each.member), Some(MemberId(0xab)));
        assert_eq!(log.vacancy(3, 5), None, "somebody filled it by hand");
        assert_eq!(log.vacancy(2, 6), None, "the cluster was recovered");
        log.begin(one(2, policy, 200), 200).unwrap();
        log.end(&OperationId([2; 16]), "promoted", false);
        assert_eq!(log.vacancy(2, 5), None, "the second newcomer filled it");
    }

    #[test]
    fn all_of_several_vacant_places_are_filled() {
        let (mut log, policy) = (UseLog::default(), GrantId::random());
        let members = [MemberId(1), MemberId(2)];
        for (number, member, voters) in [(1, members[0], 5), (2, members[1], 4)] {
            log.begin(PolicyUse { member, voters, ..one(number, policy, 100) }, 100).unwrap();
            log.end(&OperationId([number; 16]), "stalled", true);
        }
        for (number, voters) in [(3, 3), (4, 4)] {
            let vacant = log.vacancy(voters, 5).unwrap().clone();
            assert_eq!(vacant.voters, voters + 1);
            let PolicyUse { member, voters, .. } = vacant;
            let fills_vacancy = true;
            let new = PolicyUse { member, voters, fills_vacancy, ..one(number, policy, 200) };
            log.begin(new, 200).unwrap();
            log.end(&OperationId([number; 16]), "promoted", false);
        }
        assert_eq!(log.vacancy(5, 5), None);
    }

    #[test]
    fn a_full_log_drops_only_uses_that_no_longer_count() {
        let (mut log, policy) = (UseLog::default(), GrantId::random());
        let mut number = 0_u16;
        let mut begin = |log: &mut UseLog, at: u64| {
            number += 1;
            let mut id = [0; 16];
            id[..2].copy_from_slice(&number.to_be_bytes());
            let operation = OperationId(id);
            let begun = log.begin(PolicyUse { operation, ..one(0, policy, at) }, at);
            log.end(&operation, "promoted", false);
            begun
        };
        for _ in 0..MAX_USES {
            begin(&mut log, 1_000).unwrap();
        }
        assert_eq!(begin(&mut log, 1_000 + KEPT_SECONDS - 1), Err(UseError::Full));
        begin(&mut log, 1_000 + KEPT_SECONDS).unwrap();
        assert_eq!(log.uses.len(), 1);
    }

    #[test]
    fn junk_and_newer_logs_are_no_empty_logs() {
        assert_eq!(UseLog::parse(None).unwrap(), UseLog::default());
        assert!(UseLog::parse(Some(b"junk")).is_err());
        assert!(UseLog::parse(Some(br#"{"version":2,"uses":[]}"#)).is_err());
    }
}
