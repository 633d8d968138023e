//! Machines that lose what their member has promised to its peers, such as its votes. One of three
//! faults is drawn: the machine's disk is wiped, an earlier image of the disk is put back, or such
//! an image is started on another machine. No peer may accept such a machine as the old member, and
//! an operator replaces it.
//!
//! Some cases are left out, because no peer could notice them:
//! - The return of an image, if the peers also lose what they remember of the member's promises.
//! - An image from a time when the member was the only voter and asked no peer.
//! - The loss of so many founders' disks that these founders could form the cluster again, while no
//!   member that would refuse them runs.
//!
//! Other cases are left out, because nothing could repair them:
//! - A loss that leaves the cluster without a quorum.
//! - The loss of the only member that knows the new addresses of two members that have moved.

use node_consensus::Members;
use node_engine::witness::{DiskState, ProcessClaim, Witness};
use node_state::disk::simulated::SimulatedDisk;
use node_state::identity::{Incarnation, MemberId};

use super::InvariantViolation;
use super::members::{first_incarnation, url};
use super::node::{DiskImage, SimulatedNode, SmallFiles};
use super::simulation::{ScheduledEvent, Simulation, index_of};

impl Simulation {
    pub(super) fn cause_amnesia(&mut self) -> Result<(), InvariantViolation> {
        let id = self.random_machine();
        let node = &self.nodes[index_of(id)];
        if !self.acts_for_member(node) || node.files.tombstone || node.process.is_none() {
            return Ok(());
        }
        let seed = self.rng.number();
        if node.image.is_none() && self.rng.chance(500) {
            let is_only_voter = node
                .store_view()
                .is_some_and(|view| view.members().voters_and_learners().voters == [node.member]);
            let node = self.node(id);
            let status = node.process.as_ref().map(|process| process.core.driver().status());
            let Some(status) = status.filter(|_| !is_only_voter) else { return Ok(()) };
            let disk_state = DiskState { term: status.term, vote: status.vote, last: status.last };
            let (disk, files) = (node.disk.duplicate(seed), node.files.clone());
            node.image = Some(DiskImage { disk, files, on_disk: disk_state });
            return Ok(());
        }
        match self.rng.range(0, 3) {
            0 => self.restore_disk_image(id, seed),
            1 => {
                self.start_copy_from_image(id, seed);
                Ok(())
            }
            _ => self.wipe_disk(id, seed),
        }
    }

    /// Empties the machine's disk. The machine's name and address stay.
    fn wipe_disk(&mut self, id: u64, seed: u64) -> Result<(), InvariantViolation> {
        let files = SmallFiles::new(first_incarnation(id) ^ u128::from(seed));
        // The machine of a single founder starts without asking any peer, so no peer could refuse
        // it.
        let starts_alone =
            self.plan.members == 1 && self.nodes[index_of(id)].is_founder(&self.plan);
        let is_refused =
            !starts_alone && self.would_all_peers_refuse(id, &files, DiskState::default());
        if !is_refused || self.could_wiped_founders_form_cluster(id) || !self.has_quorum_without(id)
        {
            return Ok(());
        }
        self.lose_promises(id)?;
        let node = self.node(id);
        node.disk = SimulatedDisk::new(seed);
        node.files = files;
        Ok(())
    }

    /// Returns whether this founder and the founders wiped earlier are a majority, which could form
    /// the cluster again.
    fn could_wiped_founders_form_cluster(&self, id: u64) -> bool {
        let founders = self.nodes.iter().filter(|node| node.is_founder(&self.plan));
        let wiped = founders.filter(|node| node.id == id || node.has_lost_promises).count() as u64;
        self.nodes[index_of(id)].is_founder(&self.plan) && wiped > self.plan.members / 2
    }

    fn restore_disk_image(&mut self, id: u64, seed: u64) -> Result<(), InvariantViolation> {
        let Some((disk, files)) = self.outdated_image(id, seed) else { return Ok(()) };
        if !self.has_quorum_without(id) {
            return Ok(());
        }
        self.lose_promises(id)?;
        let node = self.node(id);
        (node.disk, node.files) = (disk, files);
        Ok(())
    }

    fn start_copy_from_image(&mut self, id: u64, seed: u64) {
        let Some((disk, files)) = self.outdated_image(id, seed) else { return };
        // Start no copy if this machine with the old image and the machines that lost promises
        // earlier might together be a quorum.
        if !self.has_quorum_without(id) {
            return;
        }
        let copy = self.add_machine();
        let member = self.node(id).member;
        let node = self.node(copy);
        (node.member, node.disk, node.files) = (member, disk, files);
        node.has_lost_promises = true;
        self.report.amnesia += 1;
        self.schedule(1_000, ScheduledEvent::Restart { node: copy });
    }

    /// Returns the stored image of the machine's disk, if the image has a log and every peer would
    /// refuse it as outdated.
    fn outdated_image(&self, id: u64, seed: u64) -> Option<(SimulatedDisk, SmallFiles)> {
        let DiskImage { disk, files, on_disk: disk_state } =
            self.nodes[index_of(id)].image.as_ref()?;
        let known = self.would_all_peers_refuse(id, files, *disk_state);
        (known && files.had_log).then(|| (disk.duplicate(seed), files.clone()))
    }

    fn lose_promises(&mut self, id: u64) -> Result<(), InvariantViolation> {
        self.report.amnesia += 1;
        let member = self.node(id).member;
        self.end_process(id, false);
        self.node(id).has_lost_promises = true;
        self.invariants.monotone.forget(id);
        for other in 1..=self.nodes.len() as u64 {
            self.set_stream(other, member, None)?;
        }
        Ok(())
    }

    /// Returns whether every other machine that may act for a member would refuse this machine if
    /// it had these files and this disk state. Only promises that the others have written to disk
    /// count. The answer holds however often the machine starts.
    ///
    /// Machines of removed members that don't know of their removal are included. Together with
    /// this machine they may be a quorum of the members that they know.
    fn would_all_peers_refuse(&self, id: u64, files: &SmallFiles, disk: DiskState) -> bool {
        let member = MemberId(self.nodes[index_of(id)].member);
        let incarnation = Incarnation(files.incarnation.to_be_bytes());
        let claim = ProcessClaim { incarnation, boot: u64::MAX, run: 0, disk };
        let refuses = |node: &SimulatedNode| {
            let witness = Witness::decode(&node.files.witness);
            witness.is_ok_and(|witness| witness.is_new(member, &claim).is_err())
        };
        let may_vote = |node: &&SimulatedNode| {
            let was_removed =
                node.files.had_log && !node.files.tombstone && !node.has_lost_promises;
            node.id != id && (self.acts_for_member(node) || was_removed)
        };
        let mut others = self.nodes.iter().filter(may_vote).peekable();
        others.peek().is_some() && others.all(refuses)
    }

    /// Returns whether a quorum is left without this machine. That must hold for the present
    /// members, for each change under way, and for each change that some member may not know. A
    /// member that lags behind needs a quorum of each configuration in turn. Members that know of
    /// their own removal don't count.
    fn has_quorum_without(&self, id: u64) -> bool {
        let table = self.latest_table();
        let has_quorum = |members: &Members| {
            let available = members.voters.iter().filter(|voter| {
                let mut machines = self.nodes.iter().filter(|node| node.member == **voter);
                let may_vote = machines.clone().any(|node| {
                    let is_usable =
                        node.files.had_log && !node.files.tombstone && !node.has_lost_promises;
                    node.id != id && is_usable
                });
                // A member doesn't count if one of its machines has lost promises and may still
                // run: that machine and machine `id` together might be a quorum.
                may_vote && !machines.any(|node| node.has_lost_promises && !node.has_ended_for_good)
            });
            available.count() > members.voters.len() / 2
        };
        let under_way = self.proposed_changes.iter().filter(|(planned_at, _)| {
            planned_at.is_none_or(|at| at == table.configuration_index())
        });
        let mut tables = under_way.filter_map(|(_, change)| {
            let mut after = table.clone();
            after.apply_change(change.clone(), u64::MAX).ok().map(|_| after)
        });
        let others = || self.acting_machines().filter(|other| other.id != id);
        let cannot_reach = |node: &SimulatedNode| {
            others().any(|other| other.id > node.id && self.may_lose_contact(node, other))
        };
        // The index that a stopped machine has applied isn't known before its start, so it is taken
        // as 0.
        let applied =
            |node: &SimulatedNode| node.store_view().map_or(0, |view| view.applied().index);
        let oldest = others().map(applied).min().unwrap_or(0);
        let mut configurations = self.invariants.stores.model.members.configurations_since(oldest);
        self.plan.strict
            && configurations.all(|configuration| has_quorum(&configuration.members))
            && tables.all(|after| has_quorum(&after.voters_and_learners()))
            && !others().any(cannot_reach)
    }

    /// Returns whether both machines have moved or are about to move, and neither is sure to know
    /// the other's address.
    fn may_lose_contact(&self, node: &SimulatedNode, other: &SimulatedNode) -> bool {
        let knows_address = |node: &SimulatedNode, wanted: &SimulatedNode| {
            let known = self.latest_table().member(MemberId(wanted.member));
            let at = known
                .and_then(|member| member.peer_urls.iter().find(|url| wanted.has_address(url)));
            let at = at.unwrap_or(&wanted.url);
            *at == url(wanted.id, 0)
                || node.store_view().is_some_and(|view| {
                    let member = view.members().member(MemberId(wanted.member));
                    member.is_some_and(|member| member.peer_urls.contains(at))
                })
        };
        !knows_address(node, other) && !knows_address(other, node)
    }

    /// Returns whether every learner that waits to become a voter has been promoted. A learner is
    /// ignored if no machine can act for it, because then it can't be promoted.
    pub(super) fn has_no_learner_to_promote(&self) -> bool {
        let learner = self.latest_table().learner_to_promote();
        learner.is_none_or(|id| !self.acting_machines().any(|node| MemberId(node.member) == id))
    }
}
