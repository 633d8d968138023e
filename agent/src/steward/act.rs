//! Carries out the action that was decided for an intent.

use discovery_types::api::Outcome;
use discovery_types::digest;
use discovery_types::intent::{Errand, Step, VerifiedIntent};
use futures_util::future::join_all;

use super::Steward;
use super::decide::{Act, Departure, is_unhealthy, may_pass, refused, why_foreign};
use crate::bootstrap::cut;
use crate::cluster::{Carrying, Change, ClusterError, Member, MemberId, Members, NodeStatus};
use crate::crash;
use crate::exit::chain as causes;

impl Steward {
    /// Sends one change to the cluster, and handles its answer.
    pub(super) async fn change(
        &mut self,
        intent: &VerifiedIntent,
        change: &Change,
        step: Step,
        members: &Members,
    ) {
        let operation = *intent.step(step).as_bytes();
        if let (Errand::Add { .. }, Step::Remove, Change::Remove(old)) =
            (intent.errand(), step, change)
            && let Err(error) = self.node.announce_removal(*old, &operation, members).await
        {
            return self.wait(intent, &causes(&error)).await;
        }
        let carrying = Carrying { operation, planned_at: members.configuration };
        match self.node.carry_out(change, &carrying).await {
            Ok(_) => {
                crash::at(crash::Step::Changed);
                tracing::info!(operation = %intent.operation, "{} is carried out", change.what());
                self.changed(intent, change, step).await;
            }
            Err(ClusterError::CarriedOut { text, .. }) => {
                let seen = self.seen.entry(intent.operation).or_default();
                if step == Step::Add {
                    seen.added_before = true;
                } else {
                    self.wait(intent, &text).await;
                }
            }
            Err(ClusterError::Refused { text, .. }) if may_pass(&text) => {
                self.postponed(intent, step, members, text).await;
            }
            // The cluster's refusal to promote is never final: a learner is promoted once it is
            // ready.
            Err(ClusterError::Refused { text, .. }) if step != Step::Promote => {
                let Act::Tell(outcome) = refused(text) else { return };
                self.tell(intent, outcome).await;
            }
            // The change may have been made: the next pass over the intents reads the list of
            // members again.
            Err(error) => self.wait(intent, &causes(&error)).await,
        }
    }

    /// Handles a refusal that may pass, and reports which members cause it.
    async fn postponed(
        &mut self,
        intent: &VerifiedIntent,
        step: Step,
        members: &Members,
        text: String,
    ) {
        let silent = if is_unhealthy(&text) { self.silent(members).await } else { Vec::new() };
        let old = intent.leaves().map(|id| MemberId(id.get()));
        let old_is_down = silent.iter().any(|member| Some(member.id) == old);
        let seen = self.seen.entry(intent.operation).or_default();
        seen.old_is_down = step == Step::Add && old_is_down;
        seen.progress.refused(&text);
        let why = match silent.as_slice() {
            [] => text,
            silent => {
                let names = silent.iter().map(|member| label(member));
                format!("{text}: no answer from {}", names.collect::<Vec<_>>().join(", "))
            }
        };
        self.wait(intent, &why).await;
    }

    /// Returns the members that don't answer.
    async fn silent<'a>(&self, members: &'a Members) -> Vec<&'a Member> {
        let asked = members.list.iter().map(|member| self.node.status_of(member));
        let answers = join_all(asked).await;
        let silent = members.list.iter().zip(answers).filter(|(_, answer)| answer.is_err());
        silent.map(|(member, _)| member).collect()
    }

    /// Notes facts about a change just made that the list of members doesn't show.
    async fn changed(&mut self, intent: &VerifiedIntent, change: &Change, step: Step) {
        let seen = self.seen.entry(intent.operation).or_default();
        seen.added_before |= step == Step::Add;
        if step == Step::Remove {
            seen.departure = Departure::Own;
        }
        if let (Step::TakeOut, Change::Remove(id)) = (step, change) {
            let reason = match (seen.departure, intent.leaves()) {
                (Departure::Foreign, Some(old)) => why_foreign(MemberId(old.get())),
                _ => seen.progress.why_stalled(),
            };
            let member = digest::MemberId::new(id.0);
            self.tell(intent, Outcome::Stalled { member, reason: cut(reason) }).await;
        }
    }

    /// Asks the cluster whether this intent removed `old`, the replaced member, which is gone.
    pub(super) async fn find_remover(
        &mut self,
        intent: &VerifiedIntent,
        old: MemberId,
        members: &Members,
    ) {
        let operation = *intent.step(Step::Remove).as_bytes();
        let departure = match self.node.has_removed(old, &operation, members).await {
            Ok(true) => Departure::Own,
            Ok(false) => Departure::Foreign,
            Err(error) => return self.wait(intent, &causes(&error)).await,
        };
        self.seen.entry(intent.operation).or_default().departure = departure;
    }

    /// Moves the leadership to another voter that answers.
    pub(super) async fn hand_over(
        &mut self,
        intent: &VerifiedIntent,
        members: &Members,
        status: &NodeStatus,
    ) {
        let Some(own) = members.of_id(status.member_id) else { return };
        for heir in members.list.iter().filter(|heir| !heir.is_learner && heir.id != own.id) {
            if self.node.status_of(heir).await.is_ok() {
                match self.node.move_leader(own, heir.id).await {
                    Ok(()) => return self.log_wait(intent, &format!("{} leads now", heir.id)),
                    Err(error) => self.wait(intent, &causes(&error)).await,
                }
            }
        }
    }
}

/// Returns a member's name and id for messages. A member that has not started has its peer URLs
/// instead of a name.
pub(super) fn label(member: &Member) -> String {
    if member.is_started() {
        format!("{} ({})", member.name, member.id)
    } else {
        format!("{} ({}), which has not started", member.peer_urls.join(","), member.id)
    }
}
