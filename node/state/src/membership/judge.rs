//! Rules for whether a change of members may be made now. They are etcd's, in etcd's order
//! (server/etcdserver/server.go, `mayAddMember`, `mayRemoveMember`, `mayPromoteMember`).
//!
//! The rules are about a quorum of the configuration that the change leads to. A member counts as
//! *started* once it has published its name. It counts as *healthy* once it has been connected for
//! [`HEALTHY_AFTER`].

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Member, MemberTable};
use crate::identity::MemberId;

/// How long a member must have been connected without interruption to count as healthy.
pub(super) const HEALTHY_AFTER: Duration = Duration::from_secs(5);

/// Maximum number of missing entries with which a learner is in sync. A busy leader has about this
/// many entries in flight to a member at any time. etcd requires a share of the log instead. That
/// would be millions of entries in an old cluster, and every entry in a young one.
pub(super) const IN_SYNC_ENTRIES: u64 = 1_000;

/// Why a change of members is not allowed now. The API has its own texts for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeObjection {
    /// Too few members have started to form a quorum.
    #[error("not enough started members")]
    NotEnoughStarted,
    /// Too few members have been healthy for long enough to form a quorum.
    #[error("unhealthy cluster")]
    Unhealthy,
    /// The learner lacks too many entries, or is not connected.
    #[error("the learner is not in sync with the leader")]
    LearnerNotReady,
    /// The learner has not answered the last heartbeats. It may just be late, so the change should
    /// be judged again soon.
    #[error("the learner has not answered the leader's last heartbeats")]
    LearnerSilent,
    /// No quorum of the remaining voters is known to have the last change of members.
    #[error("no quorum of the members that stay has heard of the last change yet")]
    Unsettled,
    /// The cluster already has the maximum number of learners.
    #[error("too many learner members in cluster")]
    TooManyLearners,
}

/// Replication progress of a learner, as its leader knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LearnerProgress {
    /// Whether the learner is connected, and has answered at least once.
    pub connected: bool,
    /// Whether the learner has answered one of the last heartbeats.
    pub prompt: bool,
    /// Index of the last entry that the learner has on disk.
    pub matched: u64,
    /// Index of the leader's last entry.
    pub last: u64,
}

/// The members as one of them sees them.
#[derive(Debug)]
pub(super) struct MembershipView<'a> {
    /// Member table of that member.
    pub table: &'a MemberTable,
    /// Id of the member whose view this is.
    pub local: MemberId,
    /// How long each other member has been connected; disconnected members are absent.
    pub connected: &'a BTreeMap<MemberId, Duration>,
    /// How long a member must have been connected to count as healthy.
    pub healthy_after: Duration,
}

impl MembershipView<'_> {
    /// Checks whether a member may be added.
    ///
    /// A learner that was requested as a voter counts as a voter here. Until it is promoted, the
    /// change that added it is not complete.
    pub(super) fn check_add(&self, is_learner: bool) -> Result<(), ChangeObjection> {
        let voters = self.voters(|member| !member.is_learner || member.vote_when_ready);
        let started = voters.iter().filter(|member| member.is_started()).count();
        let after = voters.len() + 1;
        // A single started member may always be joined by a second one.
        let first = started == 1 && after == 2;
        if !is_learner && !first && started < quorum(after) {
            return Err(ChangeObjection::NotEnoughStarted);
        }
        if voters.len() > 1 && self.healthy(&voters) < quorum(after) {
            return Err(ChangeObjection::Unhealthy);
        }
        if !is_learner && voters.iter().any(|member| member.is_learner) {
            return Err(ChangeObjection::Unhealthy);
        }
        Ok(())
    }

    /// Checks whether this member may be removed.
    pub(super) fn check_remove(&self, id: MemberId) -> Result<(), ChangeObjection> {
        if self.table.is_learner(id) {
            return Ok(());
        }
        let voters = self.voters(|member| !member.is_learner);
        let left = || voters.iter().filter(|member| member.id != id);
        let majority = quorum(left().count());
        if left().filter(|member| member.is_started()).count() < majority {
            return Err(ChangeObjection::NotEnoughStarted);
        }
        // An unreachable member may be removed if the reachable ones that remain form a quorum.
        // (etcd does not require this. Then the removed member itself may return, commit its own
        // removal, and leave the others without a quorum.)
        if id != self.local && !self.connected.contains_key(&id) {
            let there = |member: &&&Member| {
                member.id == self.local || self.connected.contains_key(&member.id)
            };
            let few = left().filter(there).count() < majority;
            return if few { Err(ChangeObjection::Unhealthy) } else { Ok(()) };
        }
        if self.healthy(&voters) < majority + 1 { Err(ChangeObjection::Unhealthy) } else { Ok(()) }
    }

    /// Checks whether one more member may become a voter.
    pub(super) fn check_promote(&self) -> Result<(), ChangeObjection> {
        let voters = self.voters(|member| !member.is_learner);
        // The learner itself has started, because it could not be in sync otherwise.
        let started = 1 + voters.iter().filter(|member| member.is_started()).count();
        if started < quorum(voters.len() + 1) {
            return Err(ChangeObjection::NotEnoughStarted);
        }
        Ok(())
    }

    fn voters(&self, votes: impl Fn(&Member) -> bool) -> Vec<&Member> {
        self.table.members().filter(|member| votes(member)).collect()
    }

    fn healthy(&self, members: &[&Member]) -> usize {
        let long = |since: &Duration| *since > self.healthy_after;
        let healthy = |member: &&&Member| {
            member.id == self.local || self.connected.get(&member.id).is_some_and(long)
        };
        members.iter().filter(healthy).count()
    }
}

impl LearnerProgress {
    /// Checks whether a learner, added by the entry `added`, lacks at most `most` entries and
    /// answers heartbeats.
    pub(super) fn check_in_sync(self, added: u64, most: u64) -> Result<(), ChangeObjection> {
        let Self { connected, prompt, matched, last } = self;
        let fetched = matched >= added && last.saturating_sub(matched) <= most;
        match (connected && fetched, prompt) {
            (false, _) => Err(ChangeObjection::LearnerNotReady),
            (true, false) => Err(ChangeObjection::LearnerSilent),
            (true, true) => Ok(()),
        }
    }
}

/// Checks whether one more learner may be added. A learner that was requested as a voter does not
/// count, because in etcd it is a voter from the beginning.
pub(super) fn check_add_learner(table: &MemberTable, most: u64) -> Result<(), ChangeObjection> {
    let stays = |member: &&Member| member.is_learner && !member.vote_when_ready;
    let learners = table.members().filter(stays).count() as u64;
    if learners < most { Ok(()) } else { Err(ChangeObjection::TooManyLearners) }
}

fn quorum(members: usize) -> usize {
    members / 2 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a table from a string with one letter for each member; ids count from 1. `V` is a
    /// voter, `v` a voter that has not started, `L` a learner. `W` is a learner that was requested
    /// as a voter and has started, `w` one that has not started.
    fn table(members: &str) -> MemberTable {
        MemberTable::new((1..).zip(members.chars()).map(|(id, kind)| Member {
            id: MemberId(id),
            name: if kind.is_uppercase() { format!("m{id}") } else { String::new() },
            peer_urls: vec![format!("http://m{id}:2380")],
            client_urls: Vec::new(),
            is_learner: "LlWw".contains(kind),
            incarnation: None,
            node_key: None,
            changed_at: 0,
            vote_when_ready: "Ww".contains(kind),
            operations: Vec::new(),
        }))
    }

    /// Evaluates `look` for the view of member 1. The members in `away` are not connected; those in
    /// `fresh` have been for a short time only.
    fn seen<T>(
        members: &str,
        away: &[u64],
        fresh: &[u64],
        look: impl Fn(&MembershipView<'_>) -> T,
    ) -> T {
        let table = table(members);
        let connected = table
            .members()
            .filter(|member| member.id.0 != 1 && !away.contains(&member.id.0))
            .map(|member| {
                let long = !fresh.contains(&member.id.0);
                (member.id, Duration::from_secs(if long { 60 } else { 4 }))
            })
            .collect();
        look(&MembershipView {
            table: &table,
            local: MemberId(1),
            connected: &connected,
            healthy_after: HEALTHY_AFTER,
        })
    }

    const NOT_STARTED: Result<(), ChangeObjection> = Err(ChangeObjection::NotEnoughStarted);
    const UNHEALTHY: Result<(), ChangeObjection> = Err(ChangeObjection::Unhealthy);

    /// The expected verdicts are those of etcd 3.5 and 3.7, as measured. The exceptions are the
    /// cases with members that were requested as voters but are still learners.
    #[test]
    fn adding_a_voter_needs_a_quorum_of_what_comes_out() {
        for (members, away, fresh, expected) in [
            ("V", &[][..], &[][..], Ok(())),
            ("Vv", &[2], &[], NOT_STARTED),
            ("VV", &[], &[], Ok(())),
            ("VV", &[], &[2], UNHEALTHY),
            ("VVV", &[], &[], Ok(())),
            ("VVV", &[3], &[], UNHEALTHY),
            ("VVVv", &[4], &[], Ok(())),
            ("VVVVV", &[5], &[], Ok(())),
            ("VVVVV", &[4, 5], &[], UNHEALTHY),
            ("VVvv", &[3, 4], &[], NOT_STARTED),
            ("VVVL", &[4], &[], Ok(())),
            ("Vw", &[2], &[], NOT_STARTED),
            ("VW", &[], &[], UNHEALTHY),
        ] {
            let found = seen(members, away, fresh, |sight| sight.check_add(false));
            assert_eq!(found, expected, "{members} without {away:?}, just back {fresh:?}");
        }
    }

    #[test]
    fn adding_a_learner_needs_healthy_members_only() {
        for (members, away, expected) in [
            ("V", &[][..], Ok(())),
            ("VVV", &[3], UNHEALTHY),
            ("VVV", &[], Ok(())),
            ("VVVvv", &[4, 5], UNHEALTHY),
            ("VVVVvv", &[5, 6], Ok(())),
        ] {
            let found = seen(members, away, &[], |sight| sight.check_add(true));
            assert_eq!(found, expected, "{members} without {away:?}");
        }
    }

    #[test]
    fn removing_must_leave_a_quorum_that_is_there() {
        for (members, away, id, expected) in [
            ("V", &[][..], 1, NOT_STARTED),
            ("VV", &[], 2, Ok(())),
            ("VV", &[2], 2, Ok(())),
            ("VV", &[2], 1, UNHEALTHY),
            ("Vv", &[2], 1, NOT_STARTED),
            ("Vv", &[2], 2, Ok(())),
            ("VVV", &[3], 3, Ok(())),
            ("VVV", &[3], 2, UNHEALTHY),
            ("VVV", &[2, 3], 3, UNHEALTHY),
            ("VVV", &[], 1, Ok(())),
            ("VVVL", &[2, 3, 4], 4, Ok(())),
            ("VVVVV", &[5], 4, Ok(())),
            ("VVVVV", &[4, 5], 3, UNHEALTHY),
            ("VVVV", &[3, 4], 4, Ok(())),
            ("VVVVV", &[3, 4, 5], 5, UNHEALTHY),
        ] {
            let found = seen(members, away, &[], |sight| sight.check_remove(MemberId(id)));
            assert_eq!(found, expected, "{members} without {away:?}, remove {id}");
        }
    }

    #[test]
    fn a_vote_more_must_not_cost_the_quorum() {
        for (members, expected) in [("VL", Ok(())), ("VVvvvL", NOT_STARTED), ("VvL", Ok(()))] {
            assert_eq!(
                seen(members, &[], &[], |sight| sight.check_promote()),
                expected,
                "{members}"
            );
        }
    }

    #[test]
    fn a_learner_is_in_sync_by_what_it_has_to_fetch() {
        let progress = |connected, prompt, matched, last| {
            LearnerProgress { connected, prompt, matched, last }.check_in_sync(7, IN_SYNC_ENTRIES)
        };
        let ready = |connected, matched, last| progress(connected, true, matched, last);
        assert_eq!(ready(true, 1_000_000, 1_000_000 + IN_SYNC_ENTRIES), Ok(()));
        // The learner has more than nine tenths of the log, but still lacks too many entries.
        let behind = Err(ChangeObjection::LearnerNotReady);
        assert_eq!(ready(true, 1_000_000, 1_000_001 + IN_SYNC_ENTRIES), behind);
        // The learner was just added to a young cluster and has acknowledged nothing yet.
        assert_eq!(ready(true, 0, 9), behind);
        assert_eq!(ready(false, 9, 9), behind);
        assert_eq!(ready(true, 7, 9), Ok(()));
        assert_eq!(progress(true, false, 7, 9), Err(ChangeObjection::LearnerSilent));
        assert_eq!(progress(false, false, 7, 9), behind);
        assert_eq!(progress(true, false, 0, 9), behind);
    }

    #[test]
    fn learners_are_limited() {
        assert_eq!(check_add_learner(&table("VVV"), 1), Ok(()));
        assert_eq!(check_add_learner(&table("VVVL"), 1), Err(ChangeObjection::TooManyLearners));
        assert_eq!(check_add_learner(&table("VW"), 1), Ok(()));
        assert_eq!(check_add_learner(&table("VWL"), 1), Err(ChangeObjection::TooManyLearners));
        assert_eq!(check_add_learner(&table("VVVL"), 2), Ok(()));
    }
}
