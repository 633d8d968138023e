//! The rules that each stop a known way to end with two clusters, or with none.
//!
//! Both machines ask [`Rules`] before they apply a rule, so that the exhaustive exploration can
//! switch one off and show that the disaster which it stops is then found again. A rule that nobody
//! can switch off can't be shown to matter.
//!
//! **In the product every rule is always on, by construction.** The field of [`Rules`] is private,
//! and the only value that this crate hands out is [`Rules::ALL`]. `Rules::without` exists under
//! `cfg(rules_off)` alone, and that is not a Cargo feature, which a workspace build would unify into
//! the programs: the package `formation-explored` compiles these same source files a second time,
//! as a crate of its own, with that `cfg` set by its build script. The programs link
//! `discovery-formation`, which never has it.

/// One rule. Each says what goes wrong without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Rule {
    /// Time is judged before the event: leases lapse first. Without it a last ack commits a list
    /// whose other members died long ago.
    LapseFirst,
    /// A freeze takes an epoch above everything that its agents have signed or released. Without
    /// it a restored database proposes epochs that nobody may sign.
    FreezeAboveFloor,
    /// One session for each key: a boot counter not above the last, from another nonce, is a
    /// second holder of the key. Without it two copies of a host share one seat.
    ///
    /// Defence in depth, so no exploration isolates it: a copy is stopped by [`Rule::SameMachine`]
    /// first, and where nobody can tell the machines apart, refusing the copy's word doesn't keep a
    /// document from reaching it. What this rule adds is that somebody is told.
    OneSession,
    /// A use of a token is a held seat. Without it (a use is a key) a re-imaged host finds the
    /// token full.
    UseIsASeat,
    /// Whoever is counted twice goes behind the live standbys. Without it an unreachable host
    /// keeps its seat while a good one waits.
    CountedGoBehind,
    /// Members who miss each other in pairs are counted although most reach each of them. Without
    /// it one broken link between two of many hosts freezes the same list for ever.
    PairsAreCounted,
    /// Times that were stored lie no further ahead than one that is stored now could. Without it
    /// a clock that was ahead for seconds holds everybody back for as long as it was ahead.
    ClampStoredTimes,
    /// An ack for the committed proposal is answered with the document, however often it comes.
    /// Without it a lost answer strands the member.
    AckAgain,
    /// An owner-signed retire ends a committed cluster. Without it one whose members died at the
    /// wrong moment has no way out.
    RetireIsAnExit,
    /// Abandon is refused from the commit on. Without it nodes start after it.
    AbandonBeforeCommit,
    /// Neither abandon nor the deadline ends a cluster in a changed database before the ledgers have
    /// been compared. Without it one that is committed is called abandoned, and its nodes start.
    EndWhenSettled,
    /// S5: one list for each epoch, and none at or below a released one. Without it, whoever has
    /// promised the others to be in no such list signs one after all. [`Rule::HoldAboveReleased`]
    /// stands behind it (the signer would not hold the document); with that off, two lists get a
    /// majority.
    OneListPerEpoch,
    /// S6: no second list before enough members of each earlier one have released it. Without it
    /// one host is the majority's last vote in two lists.
    ReleasesFirst,
    /// S6 waits for so many releases that fewer than a quorum are left. Without it (for one less)
    /// the quorum that is left starts, while those who released are the majority of another list.
    EnoughReleases,
    /// A document is held only if its epoch is above everything that was released. Without it a
    /// promise to others is broken.
    HoldAboveReleased,
    /// A document is held only by whose journal knows that it was signed. Without it a directory
    /// restored from an old copy holds what it may have released since.
    ///
    /// Defence in depth, so no exploration isolates it: an agent never holds what it did not sign,
    /// unless its journal has forgotten; and a journal that forgets may as well sign anew, which no
    /// rule can notice. It makes the narrower case safe, in which only the document comes.
    HoldWhatWasSigned,
    /// Whoever holds a document releases nothing.
    HeldReleasesNothing,
    /// One document for each incarnation: a second one is reported, never held.
    ///
    /// Defence in depth, so no exploration isolates it: whoever signs a later list has released the
    /// earlier one with it ([`Rule::HoldAboveReleased`]), and whoever holds a document signs no
    /// other list (S7), so of all documents with its signature there is one that it may hold.
    /// Without the rule nobody would be told that there are two.
    OneDocument,
    /// The marker and `launching` are durable before the node is executed. Without it a disk that
    /// is lost right after looks like one that was never used.
    LaunchingBeforeExec,
    /// `ran` is journalled once the node's log is seen, not before. Without it a kill before the
    /// exec looks like lost data.
    RanAfterLog,
    /// A directory with nothing but `lost+found` is blank.
    LostAndFoundIsBlank,
    /// A journal found on another machine is put aside. Without it a clone starts as its original.
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

/// Which rules are on. Outside the exploration that is [`Rules::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    off: u32,
}

impl Rules {
    /// Every rule on: the only value that the programs can have.
    pub const ALL: Rules = Rules { off: 0 };

    /// Whether `rule` is on.
    #[inline]
    #[must_use]
    pub fn on(&self, rule: Rule) -> bool {
        self.off & (1 << rule as u8) == 0
    }

    /// These rules with `rule` switched off.
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
                assert_eq!(rules.on(rule), rule != off, "{off:?} off, asked for {rule:?}");
            }
        }
    }
}
