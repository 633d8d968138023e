//! Machines that lose what their member has promised. One is wiped, one gets an earlier image of its
//! disk back, and for another one such an image is started beside it. No peer may accept any of them as
//! the member that it was, and an operator replaces it.
//!
//! Some cases are left out, because no peer could notice them:
//! - An image with everything that the others remember of its member's promises.
//! - An image from a time when the member was the only voter and asked nobody.
//! - So many wiped founders that they could form their cluster again, while no member that knows better
//!   runs.
//!
//! Others are left out because nothing could repair them:
//! - A cluster that would lose its quorum.
//! - The loss of the only member that knows where two others have moved to.

use node_consensus::Members;
use node_engine::witness::{DiskState, ProcessClaim, Witness};
use node_state::disk::simulated::SimulatedDisk;
use node_state::identity::{Incarnation, MemberId};

use super::InvariantViolation;
use super::members::{first_incarnation, url};
use super::node::{DiskImage, SimulatedNode, SmallFiles};
use super::world::{ScheduledEvent, Simulation, index_of};

impl Simulation {
    pub(super) fn forget_something(&mut self) -> Result<(), InvariantViolation> {
        let id = self.any_machine();
        let node = &self.nodes[index_of(id)];
        if !self.counts(node) || node.files.tombstone || node.process.is_none() {
            return Ok(());
        }
        let seed = self.rng.number();
        if node.image.is_none() && self.rng.chance(500) {
            let alone = node
                .store_view()
                .is_some_and(|view| view.members().voters_and_learners().voters == [node.member]);
            let node = self.node(id);
            let status = node.process.as_ref().map(|live| live.core.driver().status());
            let Some(status) = status.filter(|_| !alone) else { return Ok(()) };
            let held = DiskState { term: status.term, vote: status.vote, last: status.last };
            let (disk, papers) = (node.disk.duplicate(seed), node.files.clone());
            node.image = Some(DiskImage { disk, files: papers, on_disk: held });
            return Ok(());
        }
        match self.rng.range(0, 3) {
            0 => self.put_image_back(id, seed),
            1 => {
                self.start_image_beside(id, seed);
                Ok(())
            }
            _ => self.wipe(id, seed),
        }
    }

    /// Empties the machine's disk. Name and address stay.
    fn wipe(&mut self, id: u64, seed: u64) -> Result<(), InvariantViolation> {
        let papers = SmallFiles::new(first_incarnation(id) ^ u128::from(seed));
        // A single founder starts without asking anybody, so it would start again.
        let asks_nobody = self.plan.members == 1 && self.nodes[index_of(id)].is_founder(&self.plan);
        let refused = !asks_nobody && self.all_refuse(id, &papers, DiskState::default());
        if !refused || self.founders_would_begin(id) || !self.can_do_without(id) {
            return Ok(());
        }
        self.loses(id)?;
        let node = self.node(id);
        node.disk = SimulatedDisk::new(seed);
        node.files = papers;
        Ok(())
    }

    /// Returns whether this machine and those that were wiped before could form their cluster again.
    fn founders_would_begin(&self, id: u64) -> bool {
        let founders = self.nodes.iter().filter(|node| node.is_founder(&self.plan));
        let wiped = founders.filter(|node| node.id == id || node.has_lost_promises).count() as u64;
        self.nodes[index_of(id)].is_founder(&self.plan) && wiped > self.plan.members / 2
    }

    fn put_image_back(&mut self, id: u64, seed: u64) -> Result<(), InvariantViolation> {
        let Some((disk, papers)) = self.old_image(id, seed) else { return Ok(()) };
        if !self.can_do_without(id) {
            return Ok(());
        }
        self.loses(id)?;
        let node = self.node(id);
        (node.disk, node.files) = (disk, papers);
        Ok(())
    }

    fn start_image_beside(&mut self, id: u64, seed: u64) {
        let Some((disk, papers)) = self.old_image(id, seed) else { return };
        // Together with the image, machines that have lost promises before might be a quorum.
        if !self.can_do_without(id) {
            return;
        }
        let twin = self.new_machine();
        let member = self.node(id).member;
        let node = self.node(twin);
        (node.member, node.disk, node.files) = (member, disk, papers);
        node.has_lost_promises = true;
        self.report.amnesia += 1;
        self.schedule(1_000, ScheduledEvent::Restart { node: twin });
    }

    /// Returns the machine's image, if every other member knows that it is old.
    fn old_image(&self, id: u64, seed: u64) -> Option<(SimulatedDisk, SmallFiles)> {
        let DiskImage { disk, files: papers, on_disk: held } =
            self.nodes[index_of(id)].image.as_ref()?;
        let known = self.all_refuse(id, papers, *held);
        (known && papers.had_log).then(|| (disk.duplicate(seed), papers.clone()))
    }

    fn loses(&mut self, id: u64) -> Result<(), InvariantViolation> {
        self.report.amnesia += 1;
        let member = self.node(id).member;
        self.take_down(id, false);
        self.node(id).has_lost_promises = true;
        self.invariants.monotone.forget(id);
        for other in 1..=self.nodes.len() as u64 {
            self.set_stream(other, member, None)?;
        }
        Ok(())
    }

    /// Returns whether every other machine that may act for a member would refuse this one with such a
    /// disk. Only what those have written counts, and the answer holds for any number of starts.
    ///
    /// A removed member that doesn't know of its removal counts as well: with this machine it may be a
    /// quorum of the members that it knows.
    fn all_refuse(&self, id: u64, papers: &SmallFiles, disk: DiskState) -> bool {
        let member = MemberId(self.nodes[index_of(id)].member);
        let incarnation = Incarnation(papers.incarnation.to_be_bytes());
        let shown = ProcessClaim { incarnation, boot: u64::MAX, run: 0, disk };
        let refuses = |node: &SimulatedNode| {
            let witness = Witness::decode(&node.files.witness);
            witness.is_ok_and(|witness| witness.is_new(member, &shown).is_err())
        };
        let speaks = |node: &&SimulatedNode| {
            let was_removed =
                node.files.had_log && !node.files.tombstone && !node.has_lost_promises;
            node.id != id && (self.counts(node) || was_removed)
        };
        let mut others = self.nodes.iter().filter(speaks).peekable();
        others.peek().is_some() && others.all(refuses)
    }

    /// Returns whether a quorum is left without this machine. That must hold for the present members,
    /// for each change under way, and for each change that some member may not know of yet. A member
    /// that is behind needs a quorum of each configuration in turn. Members that know of their own
    /// removal don't count.
    fn can_do_without(&self, id: u64) -> bool {
        let table = self.table();
        let enough = |members: &Members| {
            let left = members.voters.iter().filter(|voter| {
                let mut its = self.nodes.iter().filter(|node| node.member == **voter);
                let speaks = its.clone().any(|node| {
                    let knows =
                        node.files.had_log && !node.files.tombstone && !node.has_lost_promises;
                    node.id != id && knows
                });
                // If a copy of the member's machine may run, that one and this machine might be a
                // quorum.
                speaks && !its.any(|node| node.has_lost_promises && !node.has_ended_for_good)
            });
            left.count() > members.voters.len() / 2
        };
        let under_way = self.proposed_changes.iter().filter(|(planned_at, _)| {
            planned_at.is_none_or(|at| at == table.configuration_index())
        });
        let mut after = under_way.filter_map(|(_, change)| {
            let mut after = table.clone();
            after.apply_change(change.clone(), u64::MAX).ok().map(|_| after)
        });
        let others = || self.counted().filter(|other| other.id != id);
        let apart = |one: &SimulatedNode| {
            others().any(|other| other.id > one.id && self.are_apart(one, other))
        };
        // A stopped machine counts as having applied nothing: what is on its disk shows only when it
        // starts.
        let applied =
            |node: &SimulatedNode| node.store_view().map_or(0, |view| view.applied().index);
        let oldest = others().map(applied).min().unwrap_or(0);
        let mut since = self.invariants.stores.model.members.configurations_since(oldest);
        self.plan.strict
            && since.all(|configuration| enough(&configuration.members))
            && after.all(|after| enough(&after.voters_and_learners()))
            && !others().any(apart)
    }

    /// Returns whether two machines have both moved, or are about to, and neither is sure to know the
    /// other's address.
    fn are_apart(&self, one: &SimulatedNode, other: &SimulatedNode) -> bool {
        let knows = |node: &SimulatedNode, sought: &SimulatedNode| {
            let known = self.table().member(MemberId(sought.member));
            let at = known.and_then(|member| member.peer_urls.iter().find(|url| sought.owns(url)));
            let at = at.unwrap_or(&sought.url);
            *at == url(sought.id, 0)
                || node.store_view().is_some_and(|view| {
                    let member = view.members().member(MemberId(sought.member));
                    member.is_some_and(|member| member.peer_urls.contains(at))
                })
        };
        !knows(one, other) && !knows(other, one)
    }

    /// Returns whether no living member waits for its vote.
    pub(super) fn nobody_waits_for_a_vote(&self) -> bool {
        let waits = self.table().learner_to_promote();
        waits.is_none_or(|id| !self.counted().any(|node| MemberId(node.member) == id))
    }
}
