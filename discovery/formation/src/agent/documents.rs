//! How an agent takes a commit document as its own, and launches the node that it allows.

use std::sync::Arc;

use crate::agent::directory::Directory;
use crate::agent::event::{Action, From, Output};
use crate::agent::journal::Start;
use crate::agent::step::{Agent, EXIT_FAILED};
use crate::rules::{Rule, Rules};
use crate::values::{Document, Machine};

impl Agent {
    pub(super) fn document_shown(
        &mut self,
        rules: &Rules,
        document: Arc<Document>,
        machine: &Machine,
        output: &mut Output,
    ) {
        if let Some(held) = &self.journal.held {
            if held.h == document.h {
                if self.journal.start == Start::NotYet {
                    output.then.push(Action::LookAtDirectory);
                }
                return;
            }
            // Never hold a second document. Showing the held one lets the service notice that there
            // are two.
            if rules.on(Rule::OneDocument) {
                output.then.push(Action::ShowDocument { h: held.h });
                return;
            }
        }
        match self.may_hold(rules, &document, machine) {
            Ok(()) => {
                self.journal.held = Some(document);
                self.considered = None;
                self.persist(output);
                output.then.push(Action::LookAtDirectory);
            }
            Err(why) => output.then.push(Action::ReplacementWanted { why }),
        }
    }

    /// Checks whether this agent may be a member of `document`; the error says why it never can.
    fn may_hold(
        &self,
        rules: &Rules,
        document: &Document,
        machine: &Machine,
    ) -> Result<(), String> {
        let journal = &self.journal;
        if journal.admitted {
            return Err("I have been added to the cluster that runs".to_owned());
        }
        let epoch = document.proposal.epoch;
        let listed = document.proposal.record_of(journal.key).map(|record| record.hash);
        let mine = journal.record.as_ref().map(|record| record.hash);
        if listed.is_none() || listed != mine {
            return Err(format!("the document of epoch {epoch} has not my record in it"));
        }
        if rules.on(Rule::HoldAboveReleased) && epoch <= journal.released {
            return Err(format!(
                "I have promised the others never to be in a list of an epoch up to {}, and the \
                 document is of epoch {epoch}",
                journal.released
            ));
        }
        if rules.on(Rule::HoldWhatWasSigned)
            && journal.bound.get(&epoch).is_none_or(|bound| bound.h != document.h)
        {
            return Err(format!(
                "the document of epoch {epoch} has my signature, and my journal knows nothing of it: \
                 this directory is an old copy"
            ));
        }
        if rules.on(Rule::SameMachine) && journal.machine.differs_from(machine) {
            return Err("this is not the machine that my key was made on".to_owned());
        }
        Ok(())
    }

    pub(super) fn admitted(&mut self, output: &mut Output) {
        if self.journal.start != Start::NotYet || self.journal.held.is_some() {
            return;
        }
        if !self.journal.admitted {
            self.journal.admitted = true;
            self.persist(output);
        }
        output.then.push(Action::LookAtDirectory);
    }

    pub(super) fn looked(&mut self, rules: &Rules, directory: &Directory, output: &mut Output) {
        if !self.journal.may_launch() || self.journal.start != Start::NotYet {
            return;
        }
        let incarnation = self.journal.incarnation;
        match directory {
            Directory::Blank if rules.on(Rule::LaunchingBeforeExec) => {
                output.then.push(Action::WriteMarker { incarnation });
            }
            Directory::Blank => output.then.push(Action::Launch(From::List)),
            Directory::Marked(whose) if *whose == incarnation => self.launch(rules, output),
            other => {
                let reason = format!("the node's directory is not blank: {other}");
                output.then.push(Action::Stop { exit: EXIT_FAILED, reason });
            }
        }
    }

    pub(super) fn launch(&mut self, rules: &Rules, output: &mut Output) {
        let after_log = rules.on(Rule::RanAfterLog);
        self.journal.start = if after_log { Start::Launching } else { Start::Ran };
        self.persist(output);
        output.then.push(Action::Launch(From::List));
    }
}
