//! Machines that forget what their member has promised: one is wiped, on one an earlier image of its
//! disk is put back, or that is started beside it. Nobody may take any of them for the member that it
//! was; an operator replaces it.
//!
//! What nobody could notice is not drawn: an image of which nobody remembers that the member went on
//! since, or of a time when it was the only voter and asked nobody. Nor what nothing could mend: a
//! cluster that would lose its quorum.

use muster_node::disk::simulated::SimulatedDisk;
use muster_node::identity::MemberId;
use muster_node::membership::MemberTable;

use super::Violation;
use super::members::first_incarnation;
use super::node::{Node, Papers};
use super::world::{Event, World, place};

/// Starts that others have seen since an image was taken, at the least: it counts its own, too.
const SEEN_SINCE: u64 = 4;

impl World {
    pub(super) fn forget_something(&mut self) -> Result<(), Violation> {
        let id = self.any_machine();
        let node = &self.nodes[place(id)];
        if !self.counts(node) || node.papers.tombstone || node.live.is_none() {
            return Ok(());
        }
        let seed = self.rng.next();
        if node.image.is_none() && self.rng.chance(500) {
            let alone = node
                .members()
                .is_some_and(|view| view.members().voters_and_learners().voters == [node.member]);
            let node = self.node(id);
            if alone {
                return Ok(());
            }
            node.image = Some((node.disk.duplicate(seed), node.papers.clone()));
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

    /// The disk is empty, name and address are as they were.
    fn wipe(&mut self, id: u64, seed: u64) -> Result<(), Violation> {
        if !self.can_do_without(id) || !self.is_known(id, |_| true) {
            return Ok(());
        }
        self.loses(id)?;
        let node = self.node(id);
        node.disk = SimulatedDisk::new(seed);
        node.papers = Papers::new(first_incarnation(id) ^ u128::from(seed));
        Ok(())
    }

    fn put_image_back(&mut self, id: u64, seed: u64) -> Result<(), Violation> {
        let Some((disk, papers)) = self.old_image(id, seed) else { return Ok(()) };
        if !self.can_do_without(id) {
            return Ok(());
        }
        self.loses(id)?;
        let node = self.node(id);
        (node.disk, node.papers) = (disk, papers);
        Ok(())
    }

    fn start_image_beside(&mut self, id: u64, seed: u64) {
        let Some((disk, papers)) = self.old_image(id, seed) else { return };
        let twin = self.new_machine();
        let member = self.node(id).member;
        let node = self.node(twin);
        (node.member, node.disk, node.papers) = (member, disk, papers);
        node.is_lost = true;
        self.report.amnesia += 1;
        self.after(1_000, Event::Restart { node: twin });
    }

    /// An image of which every other member knows that it is old.
    fn old_image(&self, id: u64, seed: u64) -> Option<(SimulatedDisk, Papers)> {
        let (disk, papers) = self.nodes[place(id)].image.as_ref()?;
        let known = self.is_known(id, |boots| boots >= papers.boots + SEEN_SINCE);
        (known && papers.had_log).then(|| (disk.duplicate(seed), papers.clone()))
    }

    fn loses(&mut self, id: u64) -> Result<(), Violation> {
        self.report.amnesia += 1;
        let member = self.node(id).member;
        self.take_down(id, false);
        self.node(id).is_lost = true;
        self.invariants.monotone.forget(id);
        for other in 1..=self.nodes.len() as u64 {
            self.set_stream(other, member, None)?;
        }
        Ok(())
    }

    /// Whether every other machine that counts remembers enough of this one's starts.
    fn is_known(&self, id: u64, enough: impl Fn(u64) -> bool) -> bool {
        let member = self.nodes[place(id)].member;
        let knows =
            |node: &Node| node.papers.marks.get(&member).is_some_and(|mark| enough(mark.boots));
        let mut others = self.counted().filter(|node| node.id != id).peekable();
        others.peek().is_some() && others.all(knows)
    }

    /// Whether a quorum is left without this machine, also after a change that may be under way.
    fn can_do_without(&self, id: u64) -> bool {
        let table = self.table();
        let enough = |table: &MemberTable| {
            let voters = table.voters_and_learners().voters;
            let left = voters.iter().filter(|voter| {
                self.nodes.iter().any(|node| {
                    node.member == **voter && node.id != id && !node.is_lost && node.papers.had_log
                })
            });
            left.count() > voters.len() / 2
        };
        let under_way = self
            .proposed
            .iter()
            .filter(|(planned_at, _)| planned_at.is_none_or(|at| at == table.changed()));
        let mut after = under_way.filter_map(|(_, change)| {
            let mut after = table.clone();
            after.change(change.clone(), u64::MAX).ok().map(|_| after)
        });
        self.plan.strict && enough(table) && after.all(|after| enough(&after))
    }

    /// Nobody who still can vote waits for it.
    pub(super) fn nobody_waits_for_a_vote(&self) -> bool {
        let waits = self.table().waits_for_vote();
        waits.is_none_or(|id| !self.counted().any(|node| MemberId(node.member) == id))
    }
}
