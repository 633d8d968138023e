//! Whose agents speak for a cluster that runs: those of its founders, and of newcomers that its
//! members have added. After a recovery the survivor is the one founder, and the lost cluster's
//! other members speak for nobody. Pure.

use std::collections::BTreeSet;

use discovery_formation::service::{Cluster, Phase};
use discovery_types::api::{IntentState, ListedMember};
use discovery_types::convert;
use discovery_types::digest::{Digest, MemberId};
use discovery_types::jws::{Jws, Typ};
use discovery_types::key::PublicKey;
use discovery_types::problem::{Code, Removal};
use discovery_types::raft_id;
use discovery_types::record::{Record, VerifiedRecord};
use discovery_types::recovery::Recovery;
use discovery_types::redeem::Redeem;
use discovery_types::statement::StatementChain;
use discovery_types::url::NodeUrl;

use super::lineage::Lineage;
use crate::error::ApiError;
use crate::store::StoreError;
use crate::store::intents::{Changes, StoredIntent};

/// A member, as it was committed or redeemed.
#[derive(Clone, Debug)]
pub(super) struct Member {
    /// Its agent's key.
    pub(super) key: PublicKey,
    /// Its id in its Raft cluster.
    pub(super) id: MemberId,
    /// What stands in its certificates: a founder's seat, a newcomer's id.
    pub(super) label: String,
    /// What its host said of it.
    pub(super) record: Record,
    /// SHA-256 of its node's public key.
    pub(super) node_key: Digest,
}

/// Everybody that discovery knows of a cluster.
#[derive(Debug)]
pub(super) struct Roster {
    /// The members that the cluster began with: the document's, or the one that a recovery made.
    founders: Vec<Member>,
    newcomers: Vec<Member>,
    removed: Vec<(Option<PublicKey>, Removal)>,
    /// Members of the clusters that were lost.
    lost: Vec<Member>,
    /// Which Raft cluster this is.
    pub(super) lineage: Lineage,
}

/// What can't be done for a cluster that doesn't run.
pub(super) fn must_run(cluster: &Cluster) -> Result<(), ApiError> {
    match cluster.phase {
        Phase::Committed | Phase::Formed => Ok(()),
        Phase::Open | Phase::Preparing => Err(ApiError::new(
            Code::WrongState,
            "The cluster is still forming.",
            "Use a boot token (`muster-discovery token create`), or wait until the cluster runs.",
        )),
        Phase::Retired => Err(ApiError::new(
            Code::Retired,
            "The cluster was retired.",
            "Ask who retired it: `muster-discovery cluster show` tells.",
        )),
        Phase::Abandoned | Phase::Expired => Err(ApiError::new(
            Code::WrongState,
            format!("The cluster is {}: it has never run.", cluster.phase.as_str()),
            "Create another one.",
        )),
    }
}

impl Roster {
    /// From what is stored of a cluster.
    pub(super) fn of(
        cluster: &Cluster,
        chain: &StatementChain,
        changes: &Changes,
    ) -> Result<Self, StoreError> {
        let damaged = || StoreError::damaged("a member's record");
        let documented = documented(cluster).ok_or_else(damaged)?;
        let founded = raft_id::of_cluster(documented.iter().map(|founder| founder.id));
        let lineage = Lineage::of(&changes.recoveries, chain, founded)
            .map_err(|_| StoreError::damaged("the chain of recovery statements"))?;
        let added = |intent: &&StoredIntent| {
            matches!(intent.state, IntentState::Added | IntentState::Promoted)
        };
        let (mut newcomers, mut lost) = (Vec::new(), Vec::new());
        for intent in changes.intents.iter().filter(added) {
            let Some((id, redeem)) = intent.member.zip(intent.intent.redeem.as_ref()) else {
                continue;
            };
            let is_of_this_cluster = intent.recovery == lineage.count();
            let members = if is_of_this_cluster { &mut newcomers } else { &mut lost };
            members.push(newcomer(id, redeem).ok_or_else(damaged)?);
        }
        let mut roster = Roster {
            founders: documented,
            newcomers,
            removed: changes.removed.clone(),
            lost,
            lineage,
        };
        if let Some(recovery) = roster.lineage.newest() {
            let founder = roster.founder_made_by(recovery, changes).ok_or_else(damaged)?;
            let before = std::mem::replace(&mut roster.founders, vec![founder]);
            roster.lost.extend(before);
        }
        Ok(roster)
    }

    /// The one member that a recovery made: the survivor, under its new id. None where its agent is
    /// unknown, or the id can't be read. Its certificates keep their label, which names the user
    /// that its agent is for the cluster.
    pub(super) fn founder_made_by(&self, recovery: &Recovery, changes: &Changes) -> Option<Member> {
        let id = MemberId::new(u64::from_str_radix(&recovery.is.member_id, 16).ok()?);
        let mut known = self.newcomers.iter().rev().chain(&self.lost).chain(&self.founders);
        if let Some(survivor) = known.find(|member| member.key == recovery.agent) {
            return Some(Member { id, ..survivor.clone() });
        }
        // A newcomer that was added, of which discovery hadn't heard before the cluster was lost.
        let own = |intent: &&StoredIntent| intent.agent == Some(recovery.agent);
        let redeemed = changes.intents.iter().rev().find(own)?;
        newcomer(id, redeemed.intent.redeem.as_ref()?)
    }

    fn all(&self) -> impl Iterator<Item = &Member> {
        self.founders.iter().chain(&self.newcomers)
    }

    /// Ids of the members that the cluster began with.
    pub(super) fn founders(&self) -> BTreeSet<MemberId> {
        self.founders.iter().map(|founder| founder.id).collect()
    }

    /// The members of the commit document.
    pub(super) fn founding_members(&self) -> Vec<ListedMember> {
        let urls = |urls: &[NodeUrl]| urls.iter().map(ToString::to_string).collect();
        let listed = |founder: &Member| ListedMember {
            id: founder.id,
            name: founder.record.name.to_string(),
            peer_urls: urls(&founder.record.peer_urls),
            client_urls: urls(&founder.record.client_urls),
            is_learner: false,
        };
        self.founders.iter().map(listed).collect()
    }

    /// The member whose agent has this key.
    pub(super) fn member(&self, key: &PublicKey) -> Result<&Member, ApiError> {
        if let Some(removal) = self.removal(key) {
            return Err(ApiError::removed(removal.clone()));
        }
        // A host that joins anew after it was taken out has the newest of its places.
        let found = self.newcomers.iter().rev().chain(&self.founders).find(|m| m.key == *key);
        found.ok_or_else(|| {
            if let Some(lost) = self.lost.iter().find(|member| member.key == *key) {
                return self.refuse_lost(lost);
            }
            let next =
                "A newcomer speaks for the cluster once an agent of the cluster has added it.";
            ApiError::new(Code::Forbidden, "This takes an agent of a member of the cluster.", next)
        })
    }

    /// The answer to an agent whose node is a member of a lost cluster.
    fn refuse_lost(&self, member: &Member) -> ApiError {
        let detail = format!(
            "Member {} ({}) is of a cluster that was lost: an operator has made Raft cluster \
             {:016x} of what was left.",
            member.record.name,
            member.id,
            self.lineage.raft_cluster()
        );
        let next = "Stop this host's agent and node, run `muster-agent reset --yes`, and let the \
                    host join the recovered cluster with a ticket.";
        ApiError::new(Code::ClusterLost, detail, next)
    }

    /// Whether this was a member of a cluster that was lost.
    pub(super) fn is_lost(&self, id: MemberId) -> bool {
        self.by_id(id).is_none() && self.lost.iter().any(|member| member.id == id)
    }

    /// The member with this id.
    pub(super) fn by_id(&self, id: MemberId) -> Option<&Member> {
        self.all().find(|member| member.id == id)
    }

    /// When and by whom the member of this agent was removed.
    pub(super) fn removal(&self, key: &PublicKey) -> Option<&Removal> {
        let removed = self.removed.iter().find(|(own, _)| own.as_ref() == Some(key));
        removed.map(|(_, removal)| removal)
    }

    /// Whether this member was removed.
    pub(super) fn is_removed(&self, id: MemberId) -> bool {
        self.removed.iter().any(|(_, removal)| removal.member == id)
    }

    /// A member that is called as this newcomer is, and that it doesn't replace: a name in a command
    /// or an order has to mean one member.
    pub(super) fn called(
        &self,
        newcomer: &VerifiedRecord,
        replaces: Option<MemberId>,
    ) -> Option<MemberId> {
        let same = |member: &&Member| {
            member.record.name == newcomer.name
                && Some(member.id) != replaces
                && !self.is_removed(member.id)
        };
        self.all().find(same).map(|member| member.id)
    }

    /// Refuses a newcomer that was here before: each life of a member has keys of its own.
    pub(super) fn may_join(&self, newcomer: &VerifiedRecord) -> Result<(), ApiError> {
        if let Some(removal) = self.removal(&newcomer.agent_key) {
            return Err(ApiError::removed(removal.clone()));
        }
        let same = |member: &&Member| {
            member.key == newcomer.agent_key
                || member.node_key == *newcomer.node_key()
                || member.record.incarnation == newcomer.incarnation
        };
        match self.all().chain(&self.lost).find(same) {
            None => Ok(()),
            Some(member) => Err(ApiError::new(
                Code::Conflict,
                format!(
                    "This host's keys are those of member {} ({}).",
                    member.record.name, member.id
                ),
                "A host comes anew after `muster-agent reset`, with another ticket.",
            )),
        }
    }
}

/// The members of the document; none before there is one.
fn documented(cluster: &Cluster) -> Option<Vec<Member>> {
    let decided = matches!(cluster.phase, Phase::Committed | Phase::Formed | Phase::Retired);
    let Some(frozen) = cluster.frozen.as_ref().filter(|_| decided) else {
        return Some(Vec::new());
    };
    let h = convert::digest(frozen.h);
    let founders = (1..).zip(&frozen.proposal.records).map(|(seat, founder)| {
        let jws: Jws = founder.jws.parse().ok()?;
        let record: Record = jws.claims_unverified(Typ::Record).ok()?;
        Some(Member {
            key: convert::public_key(founder.key),
            id: raft_id::of_founder(&h, &record.peer_urls),
            label: format!("{seat}"),
            node_key: convert::digest(founder.node_key),
            record,
        })
    });
    founders.collect()
}

/// From the envelope that its intent holds; it was verified when it came.
fn newcomer(id: MemberId, redeem: &Jws) -> Option<Member> {
    let redeem: Redeem = redeem.claims_unverified(Typ::Redeem).ok()?;
    let record: Record = redeem.signed.record.claims_unverified(Typ::Record).ok()?;
    Some(Member {
        key: record.agent_key,
        id,
        label: id.to_string(),
        node_key: record.csr.verify().ok()?.node_key,
        record,
    })
}
