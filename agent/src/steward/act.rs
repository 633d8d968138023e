//! Carries out the action that was decided for an intent.

use discovery_types::api::Outcome;
use discovery_types::digest;
use discovery_types::intent::{IntentChange, IntentStep, VerifiedIntent};
use futures_util::future::join_all;
use tokio::time::Instant;

use super::Steward;
use super::decide::{StewardAction, foreign_removal_reason, refusal};
use crate::cluster::{
    ChangeMetadata, ClusterError, ClusterMember, ClusterMemberChange, ClusterRefusal, MemberId,
    MemberList, NodeStatus, RemovalOrigin,
};
use crate::crash;
use crate::exit::error_chain as causes;
use discovery_types::text::truncate_reason;

impl Steward {
    /// Sends one change to the cluster, and handles its answer. The change isn't sent after
    /// `send_before`.
    pub(super) async fn change(
        &mut self,
        intent: &VerifiedIntent,
        (change, step): (&ClusterMemberChange, IntentStep),
        members: &MemberList,
        send_before: Option<Instant>,
    ) {
        let operation = *intent.step_operation(step).as_bytes();
        if let (IntentChange::Add { .. }, IntentStep::Remove, ClusterMemberChange::Remove(old)) =
            (intent.change(), step, change)
            && let Err(error) = self.node.announce_removal(*old, &operation, members).await
        {
            return self.report_wait(intent, &causes(&error)).await;
        }
        let carrying = ChangeMetadata { operation, planned_at: members.configuration, send_before };
        match self.node.carry_out(change, &carrying).await {
            Ok(_) => {
                crash::at(crash::Failpoint::Changed);
                tracing::info!(operation = %intent.operation, "{} is carried out", change.name());
                self.note_change(intent, change, step).await;
            }
            Err(ClusterError::CarriedOut { text, .. }) => {
                let seen = self.observations.entry(intent.operation).or_default();
                if step == IntentStep::Add {
                    seen.added_before = true;
                } else {
                    self.report_wait(intent, &text).await;
                }
            }
            Err(ClusterError::Refused { refusal, text }) if refusal.is_transient() => {
                self.handle_transient_refusal(intent, step, members, (refusal, text)).await;
            }
            // A refusal to promote a learner is never final, so it isn't reported as the outcome:
            // the learner is promoted once it is ready.
            Err(ClusterError::Refused { text, .. }) if step != IntentStep::Promote => {
                let StewardAction::Report(outcome) = refusal(text) else { return };
                self.report_outcome(intent, outcome).await;
            }
            // The change may have been made: the next pass over the intents reads the list of
            // members again.
            Err(error) => self.report_wait(intent, &causes(&error)).await,
        }
    }

    /// Handles a refusal that may be temporary, and reports which members cause it.
    async fn handle_transient_refusal(
        &mut self,
        intent: &VerifiedIntent,
        step: IntentStep,
        members: &MemberList,
        (refusal, text): (ClusterRefusal, String),
    ) {
        let is_about_quorum = refusal.is_about_quorum();
        let silent = if is_about_quorum { self.silent_members(members).await } else { Vec::new() };
        let seen = self.observations.entry(intent.operation).or_default();
        seen.refused_addition = (is_about_quorum && step == IntentStep::Add)
            .then(|| silent.iter().map(|member| member.id).collect());
        seen.progress.record_refusal(&text);
        let why = match silent.as_slice() {
            [] => text,
            silent => {
                let names = silent.iter().map(|member| label(member));
                format!("{text}: no answer from {}", names.collect::<Vec<_>>().join(", "))
            }
        };
        self.report_wait(intent, &why).await;
    }

    /// Returns the members that don't answer.
    async fn silent_members<'a>(&self, members: &'a MemberList) -> Vec<&'a ClusterMember> {
        let asked = members.list.iter().map(|member| self.node.status_of(member));
        let answers = join_all(asked).await;
        let silent = members.list.iter().zip(answers).filter(|(_, answer)| answer.is_err());
        silent.map(|(member, _)| member).collect()
    }

    /// Notes facts about a change that was just made, because the list of members doesn't show
    /// these facts. If the change removed a newcomer that was still a learner, reports the outcome.
    async fn note_change(
        &mut self,
        intent: &VerifiedIntent,
        change: &ClusterMemberChange,
        step: IntentStep,
    ) {
        let seen = self.observations.entry(intent.operation).or_default();
        seen.added_before |= step == IntentStep::Add;
        if step == IntentStep::Remove {
            seen.removal_origin = RemovalOrigin::Own;
        }
        if let (IntentStep::RemoveLearner, ClusterMemberChange::Remove(id)) = (step, change) {
            let reason = match (seen.removal_origin, intent.leaving_member()) {
                _ if seen.given_up.is_some() => seen.given_up.clone().unwrap_or_default(),
                (RemovalOrigin::Foreign, Some(old)) => foreign_removal_reason(MemberId(old.get())),
                _ => seen.progress.why_stalled(),
            };
            let member = digest::MemberId::new(id.0);
            self.report_outcome(
                intent,
                Outcome::Stalled { member, reason: truncate_reason(reason) },
            )
            .await;
        }
    }

    /// Asks the cluster whether this intent removed `old`, the replaced member, which is gone.
    pub(super) async fn find_remover(
        &mut self,
        intent: &VerifiedIntent,
        old: MemberId,
        members: &MemberList,
    ) {
        let operation = *intent.step_operation(IntentStep::Remove).as_bytes();
        match self.node.removal_origin(old, &operation, members).await {
            Ok(origin) => {
                self.observations.entry(intent.operation).or_default().removal_origin = origin;
            }
            Err(error) => self.report_wait(intent, &causes(&error)).await,
        }
    }

    /// Moves the leadership to another voter that answers.
    pub(super) async fn hand_over(
        &mut self,
        intent: &VerifiedIntent,
        members: &MemberList,
        status: &NodeStatus,
    ) {
        let Some(own) = members.of_id(status.member_id) else { return };
        for heir in members.list.iter().filter(|heir| !heir.is_learner && heir.id != own.id) {
            if self.node.status_of(heir).await.is_ok() {
                match self.node.move_leader(own, heir.id).await {
                    Ok(()) => return self.log_wait(intent, &format!("{} leads now", heir.id)),
                    Err(error) => self.report_wait(intent, &causes(&error)).await,
                }
            }
        }
    }
}

/// Returns a member's name and id for messages. A member that has not started has its peer URLs
/// instead of a name.
pub(super) fn label(member: &ClusterMember) -> String {
    if member.is_started() {
        format!("{} ({})", member.name, member.id)
    } else {
        format!("{} ({}), which has not started", member.peer_urls.join(","), member.id)
    }
}
