//! Ends of a cluster, and the effects of a changed database on it.
//!
//! A decided list stays decided for ever. Retiring a cluster freezes or commits nothing, nor does
//! taking the retirement back. An expired cluster has decided nothing, so its owner may let it form
//! after all.

use crate::rules::Rule;
use crate::service::cluster::{ClusterEnd, EndCause, Phase, Seating};
use crate::service::outcome::{ClusterChange, ReopenReason};
use crate::service::refusal::Refusal;
use crate::service::step::{EventResult, StepState};
use crate::values::UnixMicros;

impl StepState<'_> {
    pub(super) fn abandon(&mut self, by: String) -> EventResult {
        let committed = matches!(self.cluster.phase, Phase::Committed | Phase::Formed);
        if committed && self.context.rules.is_on(Rule::AbandonBeforeCommit) {
            return Err(Refusal::AlreadyCommitted { phase: self.cluster.phase });
        }
        // An abandonment may be repeated. After any other end the request is refused: if `db
        // accept` or a ledger has ended the cluster, its commit document may bring it back. The
        // answer must then not say that the cluster was abandoned.
        let cause = self.cluster.ended.as_ref().map(|ended| ended.cause);
        if cause != Some(EndCause::Abandon) {
            self.refuse_if_ended()?;
            // While the ledgers have not agreed, one of them may show that the cluster is
            // committed. Then its nodes may run.
            if self.cluster.is_unsettled && self.context.rules.is_on(Rule::EndWhenSettled) {
                return Err(Refusal::Unsettled);
            }
            self.end(Phase::Abandoned, EndCause::Abandon, by);
        }
        Ok(None)
    }

    pub(super) fn retire(&mut self, by: String) -> EventResult {
        match self.cluster.phase {
            Phase::Retired => Ok(None),
            phase @ (Phase::Open | Phase::Preparing) => Err(Refusal::NothingToRetire { phase }),
            phase @ (Phase::Committed | Phase::Formed) => {
                if !self.context.rules.is_on(Rule::RetireIsAnExit) {
                    return Err(Refusal::AlreadyCommitted { phase });
                }
                self.end(Phase::Retired, EndCause::Retire, by);
                Ok(None)
            }
            Phase::Expired | Phase::Abandoned => {
                self.refuse_if_ended()?;
                Ok(None)
            }
        }
    }

    /// Takes a retirement back. The decided list, its commit document and its reports were kept, so
    /// the cluster continues as it was. This freezes and commits nothing.
    pub(super) fn unretire(&mut self, by: String) -> EventResult {
        match self.cluster.phase {
            Phase::Committed | Phase::Formed => Ok(None),
            phase @ (Phase::Open | Phase::Preparing) => Err(Refusal::NothingToUnretire { phase }),
            Phase::Expired | Phase::Abandoned => {
                self.refuse_if_ended()?;
                Ok(None)
            }
            Phase::Retired => {
                let settings = self.context.settings;
                if self.cluster.undo_until(settings).is_none_or(|until| until < self.now) {
                    return Err(Refusal::UnretireTooLate { within: settings.undo_window });
                }
                let phase = match self.cluster.majority_report() {
                    Some(_) => Phase::Formed,
                    None => Phase::Committed,
                };
                self.cluster.phase = phase;
                self.cluster.ended = None;
                self.record_change(ClusterChange::Unretired { phase, by });
                Ok(None)
            }
        }
    }

    /// Opens an expired cluster again, with a new deadline. The cluster goes on with the next
    /// epoch. So an agent that signed a list earlier signs another one only after enough members
    /// have released the earlier list.
    pub(super) fn reopen_expired(&mut self, by: String, deadline: UnixMicros) -> EventResult {
        match self.cluster.phase {
            Phase::Open | Phase::Preparing => Ok(None),
            phase @ (Phase::Committed | Phase::Formed) => Err(Refusal::NothingToReopen { phase }),
            Phase::Abandoned | Phase::Retired => {
                self.refuse_if_ended()?;
                Ok(None)
            }
            Phase::Expired => {
                let settings = self.context.settings;
                if self.cluster.undo_until(settings).is_none_or(|until| until < self.now) {
                    return Err(Refusal::ReopenTooLate { within: settings.undo_window });
                }
                self.cluster.ended = None;
                self.cluster.deadline = deadline;
                // No lease was judged while the cluster was ended, so nobody has a valid seat now.
                // Agents that still run ask for seats again.
                for agent in self.cluster.agents.values_mut() {
                    agent.seating = Seating::Absent;
                }
                self.reopen(ReopenReason::NewDeadline { by });
                Ok(None)
            }
        }
    }

    pub(super) fn database_changed(&mut self) -> EventResult {
        if !self.cluster.is_unsettled {
            self.cluster.is_unsettled = true;
            self.record_change(ClusterChange::Unsettled);
        }
        if self.cluster.phase == Phase::Preparing {
            self.reopen(ReopenReason::DatabaseChanged);
        }
        Ok(None)
    }

    pub(super) fn database_settled(&mut self) -> EventResult {
        if self.cluster.is_unsettled {
            self.cluster.is_unsettled = false;
            self.record_change(ClusterChange::Settled);
        }
        Ok(None)
    }

    pub(super) fn end(&mut self, phase: Phase, cause: EndCause, by: String) {
        self.cluster.phase = phase;
        self.cluster.ended = Some(ClusterEnd { cause, at: self.now, by });
        // A retired cluster keeps its decided list. Any other end happens before the commit, and
        // makes a proposal void.
        if phase != Phase::Retired {
            self.cluster.frozen = None;
        }
        self.record_change(ClusterChange::Ended { phase });
    }
}
