//! Decides whether an agent may hold a commit document, and launches the node of an agent that
//! holds one.

use std::sync::Arc;

use crate::agent::directory::DirectoryKind;
use crate::agent::event::{AgentAction, AgentOutput, StartSource};
use crate::agent::journal::LaunchState;
use crate::agent::step::{Agent, EXIT_FAILED};
use crate::rules::{Rule, Rules};
use crate::values::{CommitDocument, MachineIdentity};

impl Agent {
    pub(super) fn handle_document(
        &mut self,
        rules: &Rules,
        document: Arc<CommitDocument>,
        machine: &MachineIdentity,
        output: &mut AgentOutput,
    ) {
        if let Some(held) = &self.journal.held_document {
            if held.proposal_hash == document.proposal_hash {
                if self.journal.launch_state == LaunchState::NotStarted {
                    output.actions.push(AgentAction::ExamineDirectory);
                }
                return;
            }
            // An agent that holds a commit document holds no second one. It sends the held one to
            // the service, which can then notice that there are two.
            if rules.is_on(Rule::OneDocument) {
                output.actions.push(AgentAction::SendDocument { h: held.proposal_hash });
                return;
            }
        }
        match self.check_document(rules, &document, machine) {
            Ok(()) => {
                self.journal.held_document = Some(document);
                self.pending_proposal = None;
                self.persist(output);
                output.actions.push(AgentAction::ExamineDirectory);
            }
            Err(why) => output.actions.push(AgentAction::RequestReplacement { why }),
        }
    }

    /// Checks whether this agent may hold `document`, and so become a member. Otherwise the error
    /// says why the agent may never hold it.
    fn check_document(
        &self,
        rules: &Rules,
        document: &CommitDocument,
        machine: &MachineIdentity,
    ) -> Result<(), String> {
        let journal = &self.journal;
        if journal.is_admitted {
            return Err("I have been added to the cluster that runs".to_owned());
        }
        let epoch = document.proposal.epoch;
        let listed = document.proposal.record_of(journal.key).map(|record| record.hash);
        let mine = journal.record.as_ref().map(|record| record.hash);
        if listed.is_none() || listed != mine {
            return Err(format!("the document of epoch {epoch} has not my record in it"));
        }
        if rules.is_on(Rule::HoldAboveReleased) && epoch <= journal.released_epoch {
            return Err(format!(
                "I have promised the others never to be in a list of an epoch up to {}, and the \
                 document is of epoch {epoch}",
                journal.released_epoch
            ));
        }
        if rules.is_on(Rule::HoldWhatWasSigned)
            && journal
                .signed_lists
                .get(&epoch)
                .is_none_or(|bound| bound.proposal_hash != document.proposal_hash)
        {
            return Err(format!(
                "the document of epoch {epoch} has my signature, and my journal knows nothing of it: \
                 this directory is an old copy"
            ));
        }
        if rules.is_on(Rule::SameMachine) && journal.machine.differs_from(machine) {
            return Err("this is not the machine that my key was made on".to_owned());
        }
        Ok(())
    }

    pub(super) fn handle_admission(&mut self, output: &mut AgentOutput) {
        if self.journal.launch_state != LaunchState::NotStarted
            || self.journal.held_document.is_some()
        {
            return;
        }
        if !self.journal.is_admitted {
            self.journal.is_admitted = true;
            self.persist(output);
        }
        output.actions.push(AgentAction::ExamineDirectory);
    }

    pub(super) fn handle_directory(
        &mut self,
        rules: &Rules,
        directory: &DirectoryKind,
        output: &mut AgentOutput,
    ) {
        if !self.journal.may_launch() || self.journal.launch_state != LaunchState::NotStarted {
            return;
        }
        let incarnation = self.journal.incarnation;
        match directory {
            DirectoryKind::Blank if rules.is_on(Rule::LaunchingBeforeExec) => {
                output.actions.push(AgentAction::WriteMarker { incarnation });
            }
            DirectoryKind::Blank => output.actions.push(AgentAction::Launch(StartSource::List)),
            DirectoryKind::Marked(whose) if *whose == incarnation => self.launch(rules, output),
            other => {
                let reason = format!("the node's directory is not blank: {other}");
                output.actions.push(AgentAction::Stop { exit: EXIT_FAILED, reason });
            }
        }
    }

    pub(super) fn launch(&mut self, rules: &Rules, output: &mut AgentOutput) {
        let after_log = rules.is_on(Rule::RanAfterLog);
        self.journal.launch_state =
            if after_log { LaunchState::Launching } else { LaunchState::Ran };
        self.persist(output);
        output.actions.push(AgentAction::Launch(StartSource::List));
    }
}
