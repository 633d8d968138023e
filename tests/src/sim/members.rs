//! Changes of the members, as far as entries go: learners that have no machine come and go. Consensus
//! compares itself with the member table at each of them, and on each snapshot.

use muster_node::apply::{Outcome, Response};
use muster_node::driver::Proposal;
use muster_node::identity::{Incarnation, MemberId};
use muster_node::machine::{EntryKind, RequestId};
use muster_node::membership::{Member, MemberChange, MemberTable};
use node_proto::command::{self, Operation};

use super::Violation;
use super::clients::{NOBODY, request_id};
use super::world::World;

/// Ids from here on have no machine.
const STRANGERS: u64 = 100;

fn member(id: u64, is_learner: bool) -> Member {
    Member {
        id: MemberId(id),
        name: format!("m{id}"),
        peer_urls: vec![format!("http://m{id}:2380")],
        client_urls: Vec::new(),
        is_learner,
        incarnation: Some(Incarnation((u128::from(id) << 64 | 0xfeed).to_be_bytes())),
        node_key: None,
        changed: 0,
        vote_when_ready: false,
        operations: Vec::new(),
    }
}

/// Whom every store begins with.
pub(super) fn first_members(count: u64) -> Vec<Member> {
    (1..=count).map(|id| member(id, false)).collect()
}

pub(super) fn has_changed_members(outcome: &Outcome) -> bool {
    matches!(outcome, Ok(Response::MembersChanged(_)))
}

/// Takes the learner out that is there, else adds one of an id that was never used.
fn next_change(table: &MemberTable) -> MemberChange {
    match table.members().find(|member| member.is_learner) {
        Some(learner) => MemberChange::Remove(learner.id),
        None => MemberChange::Add(member(STRANGERS + table.removed().count() as u64, true)),
    }
}

impl World {
    pub(super) fn has_machine(&self, id: u64) -> bool {
        id <= self.plan.members
    }

    /// Somebody is asked to change the members, by what it knows of them.
    pub(super) fn change_members(&mut self) -> Result<(), Violation> {
        let (id, request) = (self.any_member(), request_id(self.next_id, NOBODY));
        self.next_id += 1;
        let Some(live) = &mut self.node(id).live else { return Ok(()) };
        let change = next_change(live.store.view().members());
        let data = command::encode(request, Operation::ChangeMember((&change).into()));
        let proposal = Proposal { id: RequestId(request), kind: EntryKind::ConfChange, data };
        // If it finds no room, another one comes.
        let _ = live.mail.propose(proposal);
        self.wake(id)
    }

    /// At the end, all stores have the same members, and the same removed ones.
    pub(super) fn equal_members(&self) -> Result<(), Violation> {
        let mut views = self.nodes.iter().filter_map(|node| {
            let live = node.live.as_ref()?;
            Some((node.id, live.store.view()))
        });
        let Some((first, one)) = views.next() else { return Ok(()) };
        match views.find(|(_, other)| other.members() != one.members()) {
            None => Ok(()),
            Some((odd, _)) => {
                let what = format!("{odd} has other members than {first}");
                Err(Violation::new("equal members", what))
            }
        }
    }
}
