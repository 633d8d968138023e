//! Decides the next action for an intent, from the cluster's own state. Pure.
//!
//! The decision is made again at each pass over the intents, and depends on nothing that the
//! cluster doesn't show. So if an agent or a leader fails halfway, the next one can go on.

use discovery_types::api::{InitialMember, IntentState, Outcome};
use discovery_types::digest;
use discovery_types::intent::{Errand, Step, UntimelyIntent, VerifiedIntent};
use discovery_types::record::VerifiedRecord;
use discovery_types::url::NodeUrl;

use crate::bootstrap::cut;
use crate::cluster::{Change, Member, MemberId, Members, NewMember};

/// The facts about an intent on which the decision depends.
pub(super) struct Sight<'a> {
    /// The signed intent, verified.
    pub intent: &'a VerifiedIntent,
    /// The intent's state according to discovery.
    pub state: IntentState,
    /// Member id of the newcomer according to discovery, if it has one.
    pub told: Option<digest::MemberId>,
    /// The members, from a linearizable read.
    pub members: &'a Members,
    /// The member of this agent's own node.
    pub own: MemberId,
    /// The cluster's current leader.
    pub leader: MemberId,
    /// Why the intent must not be begun now, if so.
    pub untimely: Option<UntimelyIntent>,
    /// Whether the newcomer has made no progress for too long.
    pub stalled: bool,
    /// Whether the cluster says that it has added the newcomer before.
    pub added_before: bool,
    /// Whether the cluster refuses another member because the one to be replaced is down.
    pub old_is_down: bool,
    /// The operation that removed the replaced member, if that is gone.
    pub departure: Departure,
}

/// The operation that removed the member which an intent replaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Departure {
    /// The cluster has not been asked yet.
    #[default]
    Unknown,
    /// The intent itself removed it, so the newcomer takes the free place.
    Own,
    /// Another operation removed it, so the newcomer would be one member more than was signed.
    Foreign,
}

/// The next action for an intent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Do nothing now, for this reason.
    Wait(String),
    /// Ask this agent's own node for this change.
    Change(Change, Step),
    /// Find out whether the intent itself removed this member, which is gone.
    FindRemover(MemberId),
    /// Move the leadership to another member, since this agent's own member is to be removed.
    HandOver,
    /// Report this outcome to discovery.
    Tell(Outcome),
}

impl Sight<'_> {
    /// Returns the next action for the intent.
    pub(super) fn decide(&self) -> Act {
        let act = match self.intent.errand() {
            Errand::Add { record, replaces } => self.newcomer(record, *replaces),
            Errand::Remove { member } => self.removal(*member),
            Errand::Update { member, peer_urls } => self.update(*member, peer_urls),
        };
        let leads = self.own == self.leader;
        // Discovery doesn't accept a host's own report that it has joined.
        let newcomer_leads = self.told.is_some_and(|told| told.get() == self.leader.0);
        match act {
            Act::Tell(_) if leads == newcomer_leads => {
                Act::Wait("an agent of another member tells discovery".to_owned())
            }
            Act::Tell(_) => act,
            _ if !leads => Act::Wait("the agent beside the leader does it".to_owned()),
            _ => act,
        }
    }

    fn newcomer(&self, record: &VerifiedRecord, replaces: Option<digest::MemberId>) -> Act {
        let urls = texts(&record.peer_urls);
        let old = replaces.and_then(|id| self.members.of_id(MemberId(id.get())));
        let found = self.members.of_peer_urls(&urls);
        let found = found.filter(|found| old.is_none_or(|old| old.id != found.id));
        let gone = replaces.filter(|_| old.is_none()).map(|id| MemberId(id.get()));
        match (self.state, found) {
            (IntentState::Added, Some(member)) if member.is_learner => self.learner(member, gone),
            (IntentState::Added, Some(member)) => self.voter(member, old),
            (IntentState::Added, None) => self.gone(),
            (_, Some(member)) if self.is_newcomer(member, &urls) => {
                let member = digest::MemberId::new(member.id.0);
                Act::Tell(Outcome::Added { member, initial_cluster: self.initial(member, record) })
            }
            (_, None) if self.added_before => self.gone(),
            (_, Some(member)) if !self.knows_operations() => refused(format!(
                "member {} ({}) is at this host's peer URL already",
                member.id, member.name
            )),
            // The cluster itself decides, at the addition, whether a member at these URLs is the
            // newcomer.
            (_, found) => self.add(record, urls, old, gone.filter(|_| found.is_none())),
        }
    }

    /// Returns whether a member at the newcomer's URLs is the newcomer. `muster-node` tells whether
    /// this operation added it. Stock etcd doesn't; there, a learner with these URLs counts as the
    /// newcomer.
    fn is_newcomer(&self, member: &Member, urls: &[String]) -> bool {
        let same = member.peer_urls.len() == urls.len();
        same && if self.knows_operations() { self.added_before } else { member.is_learner }
    }

    fn knows_operations(&self) -> bool {
        self.members.configuration.is_some()
    }

    fn add(
        &self,
        record: &VerifiedRecord,
        urls: Vec<String>,
        old: Option<&Member>,
        gone: Option<MemberId>,
    ) -> Act {
        if let Some(why) = self.untimely {
            return Act::Wait(why.to_string());
        }
        if self.intent.planned_at > self.members.configuration && self.knows_operations() {
            return Act::Wait(
                "discovery knows of a later list of members than this one".to_owned(),
            );
        }
        match (gone, self.departure) {
            (Some(gone), Departure::Unknown) => return Act::FindRemover(gone),
            (Some(gone), Departure::Foreign) => return refused(why_foreign(gone)),
            _ => {}
        }
        // Two members can't have one URL, so the old member is removed first then. A member that is
        // down is also removed first, if the cluster refuses an addition beside it.
        let in_the_way = |old: &&Member| old.peer_urls.iter().any(|url| urls.contains(url));
        if let Some(old) = old.filter(|old| self.old_is_down || in_the_way(old)) {
            return self.remove(old.id);
        }
        // A name in a command or an order must identify one member.
        let name = record.name.to_string();
        let called =
            |member: &&Member| member.name == name && old.is_none_or(|o| o.id != member.id);
        if let Some(member) = self.members.list.iter().find(called) {
            return refused(format!("member {} is called {name} already", member.id));
        }
        let new = NewMember {
            peer_urls: urls,
            is_learner: true,
            incarnation: Some(record.incarnation.to_string()),
            node_key: Some(record.node_key().to_string()),
        };
        Act::Change(Change::Add(new), Step::Add)
    }

    /// Decides about a newcomer that is still a learner. `gone` is the replaced member if that is
    /// no longer listed; another operation may have removed it.
    fn learner(&self, member: &Member, gone: Option<MemberId>) -> Act {
        match (gone, self.departure) {
            _ if self.stalled => Act::Change(Change::Remove(member.id), Step::TakeOut),
            (Some(gone), Departure::Unknown) => Act::FindRemover(gone),
            (Some(_), Departure::Foreign) => Act::Change(Change::Remove(member.id), Step::TakeOut),
            _ => Act::Change(Change::Promote(member.id), Step::Promote),
        }
    }

    /// Decides about a newcomer that votes: only the member that it replaces remains to be removed.
    fn voter(&self, member: &Member, old: Option<&Member>) -> Act {
        match old {
            Some(old) => self.remove(old.id),
            None => Act::Tell(Outcome::Promoted { member: digest::MemberId::new(member.id.0) }),
        }
    }

    fn removal(&self, member: digest::MemberId) -> Act {
        let id = MemberId(member.get());
        if self.members.of_id(id).is_none() {
            return Act::Tell(Outcome::Removed { member });
        }
        self.unless_late(|| self.remove(id))
    }

    fn remove(&self, id: MemberId) -> Act {
        let voters = self.members.list.iter().filter(|member| !member.is_learner).count();
        if id == self.own && voters > 1 {
            return Act::HandOver;
        }
        Act::Change(Change::Remove(id), Step::Remove)
    }

    fn update(&self, member: digest::MemberId, peer_urls: &[NodeUrl]) -> Act {
        let id = MemberId(member.get());
        let change = Change::Update(id, texts(peer_urls));
        if self.members.of_id(id).is_none() {
            return refused(format!("there is no member {id}"));
        }
        if change.is_shown_by(self.members) {
            return Act::Tell(Outcome::Updated { member });
        }
        self.unless_late(|| Act::Change(change, Step::Update))
    }

    /// Returns `act`, unless the order has expired or was planned for another configuration.
    fn unless_late(&self, act: impl FnOnce() -> Act) -> Act {
        match (self.untimely, self.intent.planned_at, self.members.configuration) {
            (Some(why), ..) => Act::Wait(why.to_string()),
            (None, Some(planned), Some(now)) if planned != now => refused(format!(
                "it was planned at configuration {planned}, and the members have changed since: \
                 they are at {now}. Look at them, and order again"
            )),
            _ => act(),
        }
    }

    fn gone(&self) -> Act {
        let reason = "the cluster had added this host, and it was removed again since".to_owned();
        match self.told {
            Some(member) if self.state == IntentState::Added => {
                Act::Tell(Outcome::Stalled { member, reason })
            }
            _ => refused(reason),
        }
    }

    /// Returns the initial list of members with which the newcomer starts.
    fn initial(&self, own: digest::MemberId, record: &VerifiedRecord) -> Vec<InitialMember> {
        let mut initial = Vec::new();
        for member in &self.members.list {
            let is_own = member.id.0 == own.get();
            let name = if is_own { record.name.to_string() } else { member.name.clone() };
            let urls = member.peer_urls.iter().filter_map(|url| url.parse().ok());
            initial.extend(urls.map(|peer_url| InitialMember { name: name.clone(), peer_url }));
        }
        initial
    }
}

/// Returns why a newcomer doesn't take the place of `gone`.
pub(super) fn why_foreign(gone: MemberId) -> String {
    format!(
        "member {gone}, which this ticket replaces, was removed by another operation, so this host \
         would be one member more. Ask for a ticket without --replace if one more is meant"
    )
}

/// Returns whether the cluster refused a change because a member is down.
pub(super) fn is_unhealthy(text: &str) -> bool {
    text.contains("unhealthy cluster") || text.contains("not enough started members")
}

/// Returns whether the cluster's refusal may pass, so that the change is tried again.
pub(super) fn may_pass(text: &str) -> bool {
    [
        "unhealthy cluster",
        "not enough started members",
        "too many learner members",
        "in sync with leader",
        "too many requests",
    ]
    .iter()
    .any(|passing| text.contains(passing))
}

pub(super) fn refused(reason: String) -> Act {
    Act::Tell(Outcome::Refused { reason: cut(reason) })
}

fn texts(urls: &[NodeUrl]) -> Vec<String> {
    urls.iter().map(NodeUrl::to_string).collect()
}

#[cfg(test)]
mod tests;
