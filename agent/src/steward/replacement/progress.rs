//! Decides whether a replacement that has begun goes on, and what it leaves when it ends.

use std::time::Duration;

use discovery_types::intent::{IntentChange, VerifiedIntent};
use tokio::time::Instant;

use super::decide::{Continuation, DeadMemberState, continuation, leaves_vacancy};
use super::{store, texts};
use crate::cluster::{MemberId, MemberList};
use crate::exit::error_chain as causes;
use crate::steward::Steward;

impl Steward {
    /// Decides whether the replacement of an intent goes on. Returns `None` if the intent isn't a
    /// replacement that a policy has begun, or if the newcomer votes already. `own` is this host's
    /// member.
    pub(crate) async fn continuation(
        &mut self,
        intent: &VerifiedIntent,
        members: &MemberList,
        own: MemberId,
    ) -> Option<Continuation> {
        let (policy, IntentChange::Add { record, .. }) = (intent.policy()?, intent.change()) else {
            return None;
        };
        let policy_use = self.replacement.uses.of(&intent.operation)?.clone();
        let newcomer = members.of_peer_urls(&texts(&record.peer_urls));
        if newcomer.is_some_and(|found| found.id != policy_use.member && !found.is_learner) {
            return None;
        }
        let voters = members.list.iter().filter(|member| !member.is_learner);
        let voters: Vec<MemberId> = voters.map(|member| member.id).collect();
        let mut state = None;
        if let Some(old) = members.of_id(policy_use.member).filter(|_| !policy_use.fills_vacancy) {
            let seen = self.replacement.voters.borrow().state_of(old.id, own, Instant::now());
            // The other agents' observations matter only if this host can't reach the member.
            let observers = match seen {
                DeadMemberState::Unreachable => {
                    match self.observers_of((own, old.id), members, Duration::ZERO).await {
                        Ok(observers) => observers,
                        Err(why) => return Some(Continuation::Pause(why)),
                    }
                }
                _ => Vec::new(),
            };
            state = Some(seen.with_observers(old.id, &observers, &voters));
        }
        match store::read(&self.node).await {
            Ok(stored) => self.replacement.stored = stored,
            Err(why) => return Some(Continuation::Pause(why)),
        }
        let standing = self.replacement.stored.standing(policy);
        Some(continuation(&policy_use, standing, state, voters.len()))
    }

    /// Returns whether the replacement of an intent leaves its dead member's place free, now that
    /// it ends. If an earlier agent may have removed that member, asks the cluster.
    pub(crate) async fn leaves_vacancy(
        &mut self,
        intent: &VerifiedIntent,
        is_promoted: bool,
    ) -> Result<bool, String> {
        let Some(policy_use) = self.replacement.uses.of(&intent.operation).cloned() else {
            return Ok(false);
        };
        let members = self.node.list_members().await.map_err(|error| causes(&error))?;
        let is_vacant = |steward: &Self| {
            let origin = steward.removal_origin(&intent.operation);
            leaves_vacancy(&policy_use, is_promoted, &members, origin)
        };
        if is_vacant(self).is_none() {
            self.find_remover(intent, policy_use.member, &members).await;
        }
        let member = policy_use.member;
        is_vacant(self).ok_or_else(|| format!("the cluster doesn't say who has removed {member}"))
    }

    /// Returns the voters, this host's `own` included, whose agents observe now that `dead` has
    /// been unreachable for `after`. The list is empty if this host's agent can't verify
    /// observations.
    pub(super) async fn observers_of(
        &mut self,
        (own, dead): (MemberId, MemberId),
        members: &MemberList,
        after: Duration,
    ) -> Result<Vec<MemberId>, String> {
        let Some(observer) = &self.replacement.observer else { return Ok(Vec::new()) };
        let observations = &mut self.replacement.observations;
        let statements = self.statements.chain();
        let mut observers = observations
            .agreeing(observer, &self.node, (members, statements), (own, dead), after)
            .await?;
        observers.push(own);
        Ok(observers)
    }
}
