//! Decides how a member treats a requested change. The decision uses no lock, clock or wait, so the
//! API and the simulation run the same code.

use std::{collections::BTreeMap, time::Duration};

use member_rules::{
    Connection, HEALTHY_AFTER, IN_SYNC_ENTRIES, MemberRole, MemberStanding, MembershipView,
    QuorumObjection, quorum,
};
use node_consensus::{Guards, PeerStatus};
use node_proto::command;

use super::{
    ChangeError, ChangeRequest, Member, MemberChange, MemberTable,
    judge::{ChangeObjection, LearnerProgress},
};
use crate::identity::MemberId;

/// Rules by which changes of members are judged.
#[derive(Clone, Copy, Debug)]
pub struct ChangeRules {
    /// Whether changes that could cost the quorum are refused (`--strict-reconfig-check`).
    pub strict: bool,
    /// Maximum number of learners (`--max-learners`).
    pub max_learners: u64,
    /// Minimum duration of a member's uninterrupted connection for the member to count as healthy.
    pub healthy_after: Duration,
    /// Maximum number of missing entries with which a learner is in sync.
    pub in_sync_entries: u64,
    /// Rules that tests may switch off; [`Guards::ALL`] elsewhere.
    pub guards: Guards,
}

impl ChangeRules {
    /// Returns the rules with these flags and default values for the rest.
    #[must_use]
    pub fn new(strict: bool, max_learners: u64) -> Self {
        Self {
            strict,
            max_learners,
            healthy_after: HEALTHY_AFTER,
            in_sync_entries: IN_SYNC_ENTRIES,
            guards: Guards::ALL,
        }
    }
}

/// Judge of requested changes on one member, with what that member knows at this moment.
#[derive(Debug)]
pub struct ChangeJudge<'a> {
    /// Rules by which the member judges.
    pub rules: ChangeRules,
    /// Id of the member that judges.
    pub local: MemberId,
    /// Whether this member is the leader.
    pub is_leader: bool,
    /// Member table of this member.
    pub table: &'a MemberTable,
    /// Duration of each other member's current connection; disconnected members are absent.
    pub connected: &'a BTreeMap<MemberId, Duration>,
    /// Replication progress of the other members, if this member is the leader.
    pub peers: &'a [PeerStatus],
    /// On the leader, index of an entry after the last change of members. A member that has this
    /// entry on disk knows the current members.
    pub settled_index: Option<u64>,
    /// Index of the last entry in this member's log.
    pub last: u64,
}

/// Action of a leader on a change that is allowed.
#[derive(Clone, Debug, PartialEq)]
pub enum ChangeDecision {
    /// The change removes the leader itself. So the leader transfers the leadership, and the new
    /// leader has to be asked.
    TransferLeadership,
    /// The leader proposes this change. If it is refused as [`ChangeError::Stale`], the request is
    /// judged again.
    Propose(Box<command::MemberChange>),
}

/// Why a requested change is not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeRefusal {
    /// This member is not the leader, so another member has to be asked.
    #[error("this member does not lead")]
    NotLeader,
    /// The change could cost the quorum.
    #[error(transparent)]
    Objection(#[from] ChangeObjection),
    /// The member table, or an operation recorded in it, forbids the change.
    #[error(transparent)]
    Change(#[from] ChangeError),
}

impl ChangeJudge<'_> {
    /// Makes the checks of the member that receives a request. As in etcd, they come before the
    /// leader is asked.
    ///
    /// # Errors
    /// Fails if there is an objection, or if the operation was carried out before.
    pub fn precheck(&self, asked: &ChangeRequest) -> Result<(), ChangeRefusal> {
        // Staleness is not checked, because this member is possibly behind the configuration on
        // which the change was planned.
        self.table.check_fresh(&ChangeRequest { planned_at: None, ..asked.clone() })?;
        match &asked.change {
            MemberChange::Add(member) => self.check_add(member)?,
            MemberChange::Remove(id) => self.check_remove(*id)?,
            MemberChange::Promote(_) | MemberChange::Update(..) => {}
        }
        Ok(())
    }

    /// Decides as the leader. First it checks that the change was not carried out before, and that
    /// its plan is not stale. Then etcd's checks follow, in etcd's order.
    ///
    /// # Errors
    /// Fails if this member is not the leader, or if the change is not allowed.
    pub fn decide(&self, asked: &ChangeRequest) -> Result<ChangeDecision, ChangeRefusal> {
        if !self.is_leader {
            return Err(ChangeRefusal::NotLeader);
        }
        self.table.check_fresh(asked)?;
        let change = self.check_change(&asked.change)?;
        if change == MemberChange::Remove(self.local) {
            return Ok(ChangeDecision::TransferLeadership);
        }
        let named = self.rules.guards.one_change_at_a_time();
        let planned_at = named.then_some(self.table.configuration_index());
        let judged = ChangeRequest { change, planned_at, ..asked.clone() };
        Ok(ChangeDecision::Propose(Box::new((&judged).into())))
    }

    fn check_change(&self, change: &MemberChange) -> Result<MemberChange, ChangeRefusal> {
        let asks_for_learner = matches!(change, MemberChange::Add(Member { is_learner: true, .. }));
        let mut change = change.clone();
        match &mut change {
            MemberChange::Add(member) => {
                self.check_add(member)?;
                let voters = self.table.voters_and_learners().voters.len();
                if self.rules.strict && !member.is_learner && voters == 1 {
                    // A second member that joins the only voter is added as a learner first. As a
                    // voter, it would be needed for the quorum before it has even started.
                    member.is_learner = true;
                    member.vote_when_ready = true;
                }
            }
            MemberChange::Remove(id) => {
                self.check_remove(*id)?;
                self.check_settled_without(*id)?;
            }
            MemberChange::Promote(id) => self.check_promote(*id)?,
            MemberChange::Update(..) => {}
        }
        // A change that would be refused when it is applied is not proposed.
        let (mut table, next) = (self.table.clone(), self.table.configuration_index() + 1);
        table.apply_change_with_guards(self.rules.guards, change.clone(), next)?;
        if asks_for_learner && !self.view().has_room_for_learner(self.rules.max_learners) {
            return Err(ChangeObjection::TooManyLearners.into());
        }
        Ok(change)
    }

    fn check_add(&self, member: &Member) -> Result<(), ChangeObjection> {
        self.check_if_strict(|view| view.addition_objections(member.is_learner).first().copied())
    }

    fn check_remove(&self, id: MemberId) -> Result<(), ChangeObjection> {
        self.check_if_strict(|view| view.removal_objection(id.0))
    }

    /// Checks that a quorum of the remaining voters has the last change of members on disk. A voter
    /// without that change may know no other member than the removed one, which stops. The
    /// remaining voters would then refuse each other's connections for ever.
    fn check_settled_without(&self, id: MemberId) -> Result<(), ChangeObjection> {
        if self.table.is_learner(id) || !self.rules.guards.change_barrier() {
            return Ok(());
        }
        let has = |peer: &PeerStatus| self.settled_index.is_some_and(|index| peer.matched >= index);
        let knows = |voter: &u64| {
            *voter == self.local.0
                || self.peers.iter().any(|peer| peer.member == *voter && has(peer))
        };
        let voters = self.table.voters_and_learners().voters;
        let left = voters.iter().filter(|voter| **voter != id.0);
        let (count, known) = (left.clone().count(), left.filter(|voter| knows(voter)).count());
        if known >= quorum(count) { Ok(()) } else { Err(ChangeObjection::Unsettled) }
    }

    fn check_promote(&self, id: MemberId) -> Result<(), ChangeRefusal> {
        let member = self.table.member(id).ok_or(ChangeError::NotFound)?;
        // The member's replication is checked even if the member is a voter already, because etcd
        // also checks it first.
        if id != self.local && self.rules.guards.promote_in_sync() {
            let peer = self.peers.iter().find(|peer| peer.member == id.0);
            let peer = peer.ok_or(ChangeObjection::LearnerNotReady)?;
            let connected = peer.silent_ticks.is_some() && self.connected.contains_key(&id);
            let (prompt, matched) = (peer.is_prompt(), peer.matched);
            let progress = LearnerProgress { connected, prompt, matched, last: self.last };
            progress.check_in_sync(member.changed_at, self.rules.in_sync_entries)?;
        }
        Ok(self.check_if_strict(MembershipView::promotion_objection)?)
    }

    fn check_if_strict(
        &self,
        objection: impl FnOnce(&MembershipView) -> Option<QuorumObjection>,
    ) -> Result<(), ChangeObjection> {
        let objection = if self.rules.strict { objection(&self.view()) } else { None };
        objection.map_or(Ok(()), |objection| Err(objection.into()))
    }

    /// Returns the state of all members, as this member sees it.
    fn view(&self) -> MembershipView {
        let connection = |id: MemberId| match self.connected.get(&id) {
            _ if id == self.local => Connection::Healthy,
            Some(since) if *since > self.rules.healthy_after => Connection::Healthy,
            Some(_) => Connection::Fresh,
            None => Connection::Missing,
        };
        let standing = |member: &Member| MemberStanding {
            id: member.id.0,
            role: match (member.is_learner, member.vote_when_ready) {
                (false, _) => MemberRole::Voter,
                (true, false) => MemberRole::Learner,
                (true, true) => MemberRole::PromisedVoter,
            },
            is_started: member.is_started(),
            connection: connection(member.id),
        };
        self.table.members().map(standing).collect()
    }
}

#[cfg(test)]
mod tests {
    use node_consensus::PeerState;

    use super::*;
    use crate::identity::OperationId;

    fn member(id: u64, is_learner: bool) -> Member {
        Member {
            id: MemberId(id),
            name: format!("m{id}"),
            peer_urls: vec![format!("http://m{id}:2380")],
            client_urls: Vec::new(),
            is_learner,
            incarnation: None,
            node_key: None,
            changed_at: 0,
            vote_when_ready: false,
            operations: Vec::new(),
        }
    }

    /// Returns the judge for member 1 as a leader without connections.
    fn leader(table: &MemberTable) -> ChangeJudge<'_> {
        static NOBODY: BTreeMap<MemberId, Duration> = BTreeMap::new();
        ChangeJudge {
            rules: ChangeRules::new(true, 1),
            local: MemberId(1),
            is_leader: true,
            table,
            connected: &NOBODY,
            peers: &[],
            settled_index: Some(9),
            last: 5_000,
        }
    }

    /// Returns member 1's ruling in a cluster of `voters` voters, all connected for a long time.
    fn rule(
        voters: u64,
        change: &MemberChange,
        leads: bool,
    ) -> Result<ChangeDecision, ChangeRefusal> {
        rule_on(voters, &change.clone().into(), leads)
    }

    fn rule_on(
        voters: u64,
        asked: &ChangeRequest,
        leads: bool,
    ) -> Result<ChangeDecision, ChangeRefusal> {
        let table = MemberTable::new((1..=voters).map(|id| member(id, false)));
        let peers: Vec<PeerStatus> = (2..=voters).map(|id| at(id, 9)).collect();
        rule_among(&table, &peers, asked, leads)
    }

    fn at(member: u64, matched: u64) -> PeerStatus {
        PeerStatus { member, matched, next: 10, silent_ticks: Some(1), state: PeerState::Replicate }
    }

    fn rule_among(
        table: &MemberTable,
        peers: &[PeerStatus],
        asked: &ChangeRequest,
        leads: bool,
    ) -> Result<ChangeDecision, ChangeRefusal> {
        let long = Duration::from_secs(60);
        let connected = peers.iter().map(|peer| (MemberId(peer.member), long)).collect();
        let judge = ChangeJudge {
            rules: ChangeRules::new(true, 1),
            local: MemberId(1),
            is_leader: leads,
            table,
            connected: &connected,
            peers,
            settled_index: Some(9),
            last: 9,
        };
        judge.precheck(asked)?;
        judge.decide(asked)
    }

    #[test]
    fn the_state_of_a_member_follows_from_the_table_and_its_connection() {
        let unnamed = Member { name: String::new(), ..member(2, false) };
        let promised = Member { vote_when_ready: true, ..member(4, true) };
        let table = MemberTable::new([member(1, false), unnamed, member(3, true), promised]);
        let connected = [(2, 4), (3, 60), (9, 60)]
            .map(|(id, since)| (MemberId(id), Duration::from_secs(since)));
        let connected = connected.into();
        let judge = ChangeJudge { connected: &connected, ..leader(&table) };
        let standing =
            |id, role, is_started, connection| MemberStanding { id, role, is_started, connection };
        let expected = [
            standing(1, MemberRole::Voter, true, Connection::Healthy),
            standing(2, MemberRole::Voter, false, Connection::Fresh),
            standing(3, MemberRole::Learner, true, Connection::Healthy),
            standing(4, MemberRole::PromisedVoter, true, Connection::Missing),
        ];
        assert_eq!(judge.view(), expected.into_iter().collect());
    }

    #[test]
    fn a_removal_needs_a_remaining_quorum_that_has_the_last_change() {
        let mut table = MemberTable::new((1..=3).map(|id| member(id, false)));
        let removal = MemberChange::Remove(MemberId(3)).into();
        // Member 2 was unreachable when member 1 was added. It knows only member 3, which is to be
        // removed.
        let rule =
            |table: &_, two, three| rule_among(table, &[at(2, two), at(3, three)], &removal, true);
        let unsettled = Err(ChangeObjection::Unsettled.into());
        assert_eq!(rule(&table, 8, 9), unsettled);
        assert!(rule(&table, 9, 8).is_ok());
        let hand_over = MemberChange::Remove(MemberId(1)).into();
        let peers = [at(2, 8), at(3, 9)];
        assert_eq!(rule_among(&table, &peers, &hand_over, true), unsettled, "its successor knows");
        table = MemberTable::new([member(1, false), member(2, false), member(3, true)]);
        assert!(rule(&table, 8, 9).is_ok(), "a learner is in no quorum");
    }

    fn proposed(ruling: Result<ChangeDecision, ChangeRefusal>) -> MemberChange {
        match ruling {
            Ok(ChangeDecision::Propose(entry)) => {
                assert_eq!(entry.planned_at, Some(0), "it names the members it was judged on");
                MemberChange::try_from(*entry).unwrap()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_leader_hands_over_instead_of_removing_itself() {
        assert_eq!(
            rule(3, &MemberChange::Remove(MemberId(1)), true),
            Ok(ChangeDecision::TransferLeadership)
        );
        let other = MemberChange::Remove(MemberId(2));
        assert_eq!(proposed(rule(3, &other, true)), other);
    }

    #[test]
    fn only_a_leader_makes_changes() {
        let change = MemberChange::Remove(MemberId(2));
        assert_eq!(rule(3, &change, false), Err(ChangeRefusal::NotLeader));
    }

    #[test]
    fn the_second_member_of_a_cluster_begins_as_a_learner() {
        let change = MemberChange::Add(member(9, false));
        let waits = Member { vote_when_ready: true, ..member(9, true) };
        assert_eq!(proposed(rule(1, &change, true)), MemberChange::Add(waits));
        assert_eq!(proposed(rule(3, &change, true)), change);
    }

    #[test]
    fn a_change_that_apply_would_refuse_is_not_proposed() {
        for (change, why) in [
            (MemberChange::Promote(MemberId(1)), ChangeError::NotALearner),
            (MemberChange::Promote(MemberId(9)), ChangeError::NotFound),
            (MemberChange::Remove(MemberId(9)), ChangeError::NotFound),
            (MemberChange::Add(member(2, true)), ChangeError::IdExists),
        ] {
            assert_eq!(rule(3, &change, true), Err(why.into()), "{change:?}");
        }
    }

    #[test]
    fn repeated_and_stale_changes_are_refused_before_any_objection() {
        let asked = |planned_at| ChangeRequest {
            change: MemberChange::Remove(MemberId(9)),
            operation: Some(OperationId([7; 16])),
            planned_at: Some(planned_at),
        };
        let stale = ChangeError::Stale { now: 0 };
        assert_eq!(rule_on(3, &asked(5), true), Err(stale.into()));
        assert_eq!(rule_on(3, &asked(0), true), Err(ChangeError::NotFound.into()));
        let proposed = rule_on(3, &MemberChange::Remove(MemberId(2)).into(), true).unwrap();
        let ChangeDecision::Propose(entry) = proposed else { panic!("{proposed:?}") };
        assert!(entry.operation.is_empty());
        let known = ChangeRequest { change: MemberChange::Remove(MemberId(2)), ..asked(0) };
        let Ok(ChangeDecision::Propose(entry)) = rule_on(3, &known, true) else {
            panic!("not proposed")
        };
        assert_eq!(entry.operation, [7; 16].as_slice());
        let mut table = MemberTable::new((1..=3).map(|id| member(id, false)));
        table.apply_change(known.clone(), 8).unwrap();
        let judge = ChangeJudge {
            rules: ChangeRules::new(true, 1),
            local: MemberId(1),
            is_leader: true,
            table: &table,
            // No member is healthy, which does not matter for this check.
            connected: &BTreeMap::new(),
            peers: &[],
            settled_index: None,
            last: 9,
        };
        let done = Err(ChangeRefusal::Change(ChangeError::CarriedOut { at: 8 }));
        assert_eq!(judge.decide(&known), done);
        assert_eq!(judge.precheck(&known).map(|()| ChangeDecision::TransferLeadership), done);
    }

    fn peer(member: u64, matched: u64) -> PeerStatus {
        let state = PeerState::Replicate;
        PeerStatus { member, matched, next: matched + 1, silent_ticks: Some(1), state }
    }

    /// Returns member 1's ruling as the leader of voters 1 and 2, and of the learner 3. All have
    /// been connected for a long time. The learner has acknowledged the first `learner` of 5,000
    /// entries.
    fn beside_a_learner(
        change: MemberChange,
        learner: u64,
    ) -> Result<ChangeDecision, ChangeRefusal> {
        let connected = [2, 3].map(|id| (MemberId(id), Duration::from_secs(60))).into();
        among_connected(connected, change, learner)
    }

    fn among_connected(
        connected: BTreeMap<MemberId, Duration>,
        change: MemberChange,
        learner: u64,
    ) -> Result<ChangeDecision, ChangeRefusal> {
        let table = MemberTable::new([member(1, false), member(2, false), member(3, true)]);
        let peers = [peer(2, 5_000), peer(3, learner)];
        let judge = ChangeJudge { connected: &connected, peers: &peers, ..leader(&table) };
        judge.decide(&change.into())
    }

    #[test]
    fn a_learner_is_promoted_once_it_has_nearly_all_of_the_log() {
        let promote = MemberChange::Promote(MemberId(3));
        assert_eq!(proposed(beside_a_learner(promote.clone(), 4_000)), promote);
        let behind = beside_a_learner(promote, 3_999);
        assert_eq!(behind, Err(ChangeObjection::LearnerNotReady.into()));
    }

    /// A learner that has just disconnected has possibly lost its disk. As a voter it could cost
    /// the quorum.
    #[test]
    fn a_learner_that_has_just_disconnected_is_not_promoted() {
        let promote = MemberChange::Promote(MemberId(3));
        let connected = [(MemberId(2), Duration::from_secs(60))].into();
        let gone = among_connected(connected, promote, 5_000);
        assert_eq!(gone, Err(ChangeObjection::LearnerNotReady.into()));
    }

    /// A paused process keeps its connections open.
    #[test]
    fn a_learner_that_answers_no_heartbeats_is_not_promoted() {
        let table = MemberTable::new([member(1, false), member(2, false), member(3, true)]);
        let connected = [2, 3].map(|id| (MemberId(id), Duration::from_secs(60))).into();
        let promote = |silent_ticks| {
            let peers = [peer(2, 5_000), PeerStatus { silent_ticks, ..peer(3, 5_000) }];
            let judge = ChangeJudge { connected: &connected, peers: &peers, ..leader(&table) };
            judge.decide(&MemberChange::Promote(MemberId(3)).into()).map(|_| ())
        };
        assert_eq!(promote(Some(2)), Ok(()));
        assert_eq!(promote(Some(3)), Err(ChangeObjection::LearnerSilent.into()));
        assert_eq!(promote(None), Err(ChangeObjection::LearnerNotReady.into()));
    }

    #[test]
    fn no_more_learners_are_proposed_than_allowed() {
        let more = beside_a_learner(MemberChange::Add(member(9, true)), 5_000);
        assert_eq!(more, Err(ChangeObjection::TooManyLearners.into()));
    }

    #[test]
    fn a_voter_that_begins_as_a_learner_does_not_count_for_the_limit() {
        let table = MemberTable::new([member(1, false), member(2, true)]);
        let judge = leader(&table);
        let rule = |new| proposed(judge.decide(&MemberChange::Add(new).into()));
        let waits = Member { vote_when_ready: true, ..member(9, true) };
        assert_eq!(rule(member(9, false)), MemberChange::Add(waits.clone()));
        let table = MemberTable::new([member(1, false), waits]);
        let connected = [(MemberId(9), Duration::from_secs(60))].into();
        let judge = ChangeJudge { connected: &connected, ..leader(&table) };
        let learner = MemberChange::Add(member(3, true));
        assert_eq!(proposed(judge.decide(&learner.clone().into())), learner);
    }

    #[test]
    fn a_voter_that_begins_as_a_learner_serves_as_a_voter() {
        let waits = Member { vote_when_ready: true, ..member(9, true) };
        let table = MemberTable::new([member(1, false), waits, member(3, true)]);
        assert!(table.is_learner(MemberId(9)) && !table.serves_as_learner(MemberId(9)));
        assert!(table.serves_as_learner(MemberId(3)));
        assert!(!table.serves_as_learner(MemberId(1)) && !table.serves_as_learner(MemberId(7)));
    }

    #[test]
    fn a_promotion_needs_a_quorum_of_started_members() {
        let unstarted = |id, is_learner| Member { name: String::new(), ..member(id, is_learner) };
        let others = [member(1, false), unstarted(2, false), unstarted(3, false), member(4, true)];
        let table = MemberTable::new(others);
        let peers = [peer(4, 5_000)];
        let connected = [(MemberId(4), Duration::from_secs(60))].into();
        let judge = ChangeJudge { peers: &peers, connected: &connected, ..leader(&table) };
        let promote = ChangeRequest::from(MemberChange::Promote(MemberId(4)));
        assert_eq!(judge.decide(&promote), Err(ChangeObjection::NotEnoughStarted.into()));
        let heedless = ChangeJudge { rules: ChangeRules::new(false, 1), ..judge };
        assert!(heedless.decide(&promote).is_ok(), "as its operator wants it");
    }

    #[test]
    fn a_precheck_accepts_a_plan_on_a_newer_configuration() {
        let table = MemberTable::new((1..=3).map(|id| member(id, false)));
        let connected = (2..=3).map(|id| (MemberId(id), Duration::from_secs(60))).collect();
        let follower = ChangeJudge { is_leader: false, connected: &connected, ..leader(&table) };
        let change = MemberChange::Remove(MemberId(2));
        let ahead = ChangeRequest { planned_at: Some(5), ..change.into() };
        assert_eq!(follower.precheck(&ahead), Ok(()), "the leader knows better");
    }
}
