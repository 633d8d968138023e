//! Rules of formation: each prevents a known way to end with two clusters, or with none.
//!
//! Both state machines ask [`Rules`] whether a rule is on before they apply it. So the exhaustive
//! exploration can switch a rule off, and show the disaster that the rule prevents. A rule that
//! nobody can switch off can't be shown to matter.
//!
//! **In the product every rule is always on, by construction.** The field of [`Rules`] is private,
//! and the only value that this crate hands out is [`Rules::ALL`]. `Rules::without` exists under
//! `cfg(rules_off)` alone. That is not a Cargo feature, which a workspace build would unify into
//! the programs. The package `formation-explored` compiles these same source files a second time,
//! as a crate of its own, with that `cfg` set by its build script. The programs link
//! `discovery-formation`, which never has it.

/// One rule of formation. Each variant's comment says what goes wrong without the rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Rule {
    /// Leases whose time is over lapse before any event is judged. Without the rule, the last ack
    /// commits a list although its other members died long ago.
    LapseFirst,
    /// A list of members is frozen at an epoch above everything that its agents have signed or
    /// released. Without the rule a restored database proposes epochs that nobody may sign.
    FreezeAboveFloor,
    /// Each key has one session. A request with another nonce, and a boot counter that isn't above
    /// the session's, comes from a second holder of the key. Without the rule two copies of a host
    /// share one seat.
    ///
    /// Defence in depth: other rules back this one up, so no exploration fails if only this rule is
    /// off. [`Rule::SameMachine`] stops a copied host first. If the two machines can't be told
    /// apart, the copy may get the commit document although its messages are refused. But this rule
    /// makes the service inform an operator.
    OneSession,
    /// A key takes a use of its token only while it has a seat. Without the rule each key takes a
    /// use forever, and a re-imaged host finds the token exhausted.
    UseIsASeat,
    /// Once two failed lists of members were counted against an agent, it goes behind the live
    /// standbys in the queue. Without the rule an unreachable host keeps its seat while a good one
    /// waits.
    CountedGoBehind,
    /// If pairs of members can't reach each other, a failed list is counted against the fewest
    /// members that together touch every pair. That holds even if most other members reach them.
    /// Without the rule one broken link between two of many hosts freezes the same list for ever.
    PairsAreCounted,
    /// A stored time is lowered if it is later than any time that could be stored now. Without the
    /// rule, a clock that was set ahead for some seconds delays every cluster by the whole
    /// difference.
    ClampStoredTimes,
    /// An ack for the committed proposal is answered with the commit document, however often it
    /// comes. Without the rule a lost answer strands the member.
    AckAgain,
    /// A retirement that an owner signed ends a committed cluster. Without the rule a cluster whose
    /// members died at the wrong moment has no way out.
    RetireIsAnExit,
    /// A committed cluster can't be abandoned. Without the rule its nodes start although it was
    /// abandoned.
    AbandonBeforeCommit,
    /// Neither abandon nor the deadline ends a cluster in a changed database before the ledgers
    /// have been compared. Without the rule a committed cluster is shown as abandoned, although its
    /// nodes start.
    EndWhenSettled,
    /// Rule S5 of `agent/sign.rs`: an agent signs one list of members per epoch, and none at or
    /// below a released epoch. Without the rule an agent signs a list after it has promised, by a
    /// release, to be in no such list. [`Rule::HoldAboveReleased`] backs this rule up, because the
    /// signer would not hold the commit document. With both rules off, two lists get a majority.
    OneListPerEpoch,
    /// Rule S6 of `agent/sign.rs`: an agent signs no second list of members before enough members
    /// of each earlier one have released it. Without the rule one host completes the majorities of
    /// two lists.
    ReleasesFirst,
    /// By rule S6 of `agent/sign.rs` an agent waits until fewer than a quorum of the earlier list's
    /// members are left that have not released it. Without this rule the agent waits for one
    /// release less. A quorum that has not released the list can then start, while the other
    /// members help another list to a majority.
    EnoughReleases,
    /// An agent holds a commit document only if the document's epoch is above every epoch that the
    /// agent has released. Without the rule the agent breaks a promise to others.
    HoldAboveReleased,
    /// An agent holds a commit document only if its journal records that it signed the document's
    /// list. Without the rule, an agent whose directory was set back to an older copy holds a
    /// document that it may have released since that copy.
    ///
    /// Defence in depth: other rules back this one up, so no exploration fails if only this rule is
    /// off. An agent gets a document of a list that it did not sign only if its journal was set
    /// back to an older state. An agent with such a journal may also sign a second list, which no
    /// rule can notice. This rule covers the case in which the agent only receives the document.
    HoldWhatWasSigned,
    /// An agent that holds a commit document releases nothing. Without the rule its release helps
    /// others to sign a second list of members.
    HeldReleasesNothing,
    /// Each incarnation has one commit document. An agent that holds one never holds a second one.
    /// It sends the held one to the service, which can then notice that there are two.
    ///
    /// Defence in depth: other rules back this one up, so no exploration fails if only this rule is
    /// off. An agent that signs a later list has released the earlier one
    /// ([`Rule::HoldAboveReleased`]). An agent that holds a document signs no other list (rule S7
    /// of `agent/sign.rs`). So of all documents with its signature, an agent may hold only one. But
    /// without this rule nobody would be informed that there are two.
    OneDocument,
    /// The marker and `launching` are durable before the node is executed. Without the rule, a disk
    /// whose data is lost right after the start looks like one that was never used.
    LaunchingBeforeExec,
    /// The journal says `ran` only after the agent has seen the node's log. Without the rule a kill
    /// before the exec looks like lost data.
    RanAfterLog,
    /// A directory with nothing but `lost+found` is blank. Without the rule an agent refuses a new
    /// file system.
    LostAndFoundIsBlank,
    /// A journal that was made on another machine is set aside. Without the rule a clone starts as
    /// its original.
    SameMachine,
}

impl Rule {
    /// Every rule, in the order of declaration.
    pub const EACH: [Rule; 22] = [
        Rule::LapseFirst,
        Rule::FreezeAboveFloor,
        Rule::OneSession,
        Rule::UseIsASeat,
        Rule::CountedGoBehind,
        Rule::PairsAreCounted,
        Rule::ClampStoredTimes,
        Rule::AckAgain,
        Rule::RetireIsAnExit,
        Rule::AbandonBeforeCommit,
        Rule::EndWhenSettled,
        Rule::OneListPerEpoch,
        Rule::ReleasesFirst,
        Rule::EnoughReleases,
        Rule::HoldAboveReleased,
        Rule::HoldWhatWasSigned,
        Rule::HeldReleasesNothing,
        Rule::OneDocument,
        Rule::LaunchingBeforeExec,
        Rule::RanAfterLog,
        Rule::LostAndFoundIsBlank,
        Rule::SameMachine,
    ];
}

/// Set of the rules that are on. Outside the exploration it is [`Rules::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    off: u32,
}

impl Rules {
    /// The set in which every rule is on. In a production build, no other value exists.
    pub const ALL: Rules = Rules { off: 0 };

    /// Whether `rule` is on.
    #[inline]
    #[must_use]
    pub fn is_on(&self, rule: Rule) -> bool {
        self.off & (1 << rule as u8) == 0
    }

    /// Returns these rules with `rule` switched off.
    #[cfg(any(test, rules_off))]
    #[must_use]
    pub fn without(self, rule: Rule) -> Rules {
        Rules { off: self.off | (1 << rule as u8) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switching_one_rule_off_leaves_the_others_on() {
        for off in Rule::EACH {
            let rules = Rules::ALL.without(off);
            for rule in Rule::EACH {
                assert_eq!(rules.is_on(rule), rule != off, "{off:?} off, asked for {rule:?}");
            }
        }
    }
}
