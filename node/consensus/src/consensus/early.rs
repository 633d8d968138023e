//! What a member can't do yet when it is asked to, and does as soon as it can. Whoever asked asks once,
//! and would find out by the clock only that nothing came of it.

use std::mem;

use raft::StateRole;

use super::Consensus;
use crate::convert::message_in;
use crate::{Message, MessageKind};

/// Questions that wait for a leader's first commit; more are dropped, and asked again later.
const MOST_QUESTIONS: usize = 64;

/// What came too early.
#[derive(Default)]
pub(super) struct Early {
    /// For a leader's commit index, before it has committed anything in its term: it doesn't know how far
    /// it must be (Raft dissertation 6.4). etcd's raft.go keeps them as well.
    questions: Vec<Message>,
    /// A leader's word that this member is to take over, and for how many ticks that leader waits for it.
    turn: Option<(Message, usize)>,
}

impl Early {
    /// A tick of the clock.
    pub(super) fn tick(&mut self) {
        let waits = |(told, ticks): (Message, usize)| Some((told, ticks.checked_sub(1)?));
        self.turn = self.turn.take().and_then(waits);
    }
}

impl Consensus {
    /// Asks for the leader's commit index, in this member's name or in another one's.
    pub(super) fn ask_index(&mut self, question: Message) {
        let raft = &self.raw.raft;
        if raft.state != StateRole::Leader || raft.commit_to_current_term() {
            let _ = self.raw.step(message_in(question));
        } else if self.early.questions.len() < MOST_QUESTIONS {
            self.early.questions.push(question);
        }
    }

    /// Takes up the questions that waited for the term's first commit. Those who asked a leader that is
    /// none any more ask the next one.
    pub(super) fn answer_early(&mut self) {
        let raft = &self.raw.raft;
        let leads = raft.state == StateRole::Leader;
        if self.early.questions.is_empty() || (leads && !raft.commit_to_current_term()) {
            return;
        }
        for question in mem::take(&mut self.early.questions) {
            if leads {
                let _ = self.raw.step(message_in(question));
            }
        }
    }

    /// The leader hands over to this member. It may not stand for election while a change of members is
    /// committed and not applied here.
    pub(super) fn take_over(&mut self, told: Message, ticks: usize) {
        debug_assert_eq!(told.kind, MessageKind::TimeoutNow, "nothing else tells it to");
        let _ = self.raw.step(message_in(told.clone()));
        let raft = &self.raw.raft;
        let waits = raft.state == StateRole::Follower && raft.term == told.term;
        if waits && raft.promotable() {
            self.early.turn = Some((told, ticks));
        }
    }

    /// Something was applied: it may be what kept this member from taking over.
    pub(super) fn take_over_late(&mut self) {
        if let Some((told, ticks)) = self.early.turn.take() {
            self.take_over(told, ticks);
            self.after_input();
        }
    }
}
