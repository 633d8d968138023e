//! Decides which agents may report for a running cluster: the agents of its founders, and of
//! newcomers that its members have added. After a recovery the survivor is the only founder, and
//! agents of the lost cluster's other members are refused. These functions are pure.

use std::collections::{BTreeMap, BTreeSet};

use discovery_formation::fitness;
use discovery_formation::service::{Cluster, Phase};
use discovery_types::adoption::Adoption;
use discovery_types::api::{IntentState, ListedMember};
use discovery_types::convert;
use discovery_types::digest::{Digest, MemberId};
use discovery_types::jws::{Jws, JwsType};
use discovery_types::key::PublicKey;
use discovery_types::name::Name;
use discovery_types::problem::{Code, Removal};
use discovery_types::raft_id;
use discovery_types::record::{Record, VerifiedRecord};
use discovery_types::recovery::Recovery;
use discovery_types::redeem::Redeem;
use discovery_types::statement::{Statement, StatementChain};
use discovery_types::url::NodeUrl;

use super::lineage::Lineage;
use crate::error::ApiError;
use crate::store::StoreError;
use crate::store::changes::{MembershipChanges, StoredIntent};

/// A member, with its record from the commit document or from its redeem.
#[derive(Clone, Debug)]
pub(crate) struct RosterMember {
    /// Public key of the member's agent.
    pub(crate) key: PublicKey,
    /// Id of the member in its Raft cluster.
    pub(crate) id: MemberId,
    /// Label in the member's certificates: a founder's seat or a newcomer's id.
    pub(crate) label: String,
    /// The record that the member's host signed.
    pub(crate) record: Record,
    /// SHA-256 of the public key of the member's node.
    pub(crate) node_key: Digest,
}

/// All members of a cluster that discovery knows, present and past.
#[derive(Debug)]
pub(crate) struct Roster {
    /// The first members: the commit document's, or the single one that a recovery made.
    founders: Vec<RosterMember>,
    newcomers: Vec<RosterMember>,
    removed: Vec<(Option<PublicKey>, Removal)>,
    /// Members of clusters that were lost.
    lost: Vec<RosterMember>,
    /// The chain of recoveries that discovery follows. The last recovery determines the current
    /// Raft cluster.
    pub(crate) lineage: Lineage,
}

/// Returns an error unless the cluster runs, that is, unless it is committed or formed.
pub(crate) fn check_running(cluster: &Cluster) -> Result<(), ApiError> {
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
    /// Builds the roster from the stored data of a cluster.
    pub(crate) fn of(
        cluster: &Cluster,
        chain: &StatementChain,
        changes: &MembershipChanges,
    ) -> Result<Self, StoreError> {
        let damaged = || StoreError::damaged("a member's record");
        let statement = chain.newest();
        let documented = document_members(cluster, statement).ok_or_else(damaged)?;
        let adopted = statement.adopted.as_ref().and_then(Adoption::raft_cluster_id);
        let founded = adopted
            .unwrap_or_else(|| raft_id::of_cluster(documented.iter().map(|founder| founder.id)));
        let lineage = Lineage::of(&changes.recoveries, chain, founded).map_err(|error| {
            let damaged = || StoreError::damaged("the chain of recovery statements");
            StoreError::unreadable(&error, damaged)
        })?;
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

    /// Returns the single member that a recovery made: the survivor with its new id. Returns `None`
    /// if the survivor's agent is unknown or the id doesn't parse. The survivor's certificates keep
    /// their label, because the label is the agent's user name in the cluster.
    pub(crate) fn founder_made_by(
        &self,
        recovery: &Recovery,
        changes: &MembershipChanges,
    ) -> Option<RosterMember> {
        let id = MemberId::new(u64::from_str_radix(&recovery.is.member_id, 16).ok()?);
        let mut known = self.newcomers.iter().rev().chain(&self.lost).chain(&self.founders);
        if let Some(survivor) = known.find(|member| member.key == recovery.agent) {
            return Some(RosterMember { id, ..survivor.clone() });
        }
        // The survivor can also be a newcomer whose addition was never reported before the cluster
        // was lost. Its record is then only in the intent of its ticket.
        let own = |intent: &&StoredIntent| intent.agent == Some(recovery.agent);
        let redeemed = changes.intents.iter().rev().find(own)?;
        newcomer(id, redeemed.intent.redeem.as_ref()?)
    }

    fn all(&self) -> impl Iterator<Item = &RosterMember> {
        self.founders.iter().chain(&self.newcomers)
    }

    /// Returns the ids of the founders.
    pub(crate) fn founders(&self) -> BTreeSet<MemberId> {
        self.founders.iter().map(|founder| founder.id).collect()
    }

    /// Returns the founders as a list of members.
    pub(crate) fn founding_members(&self) -> Vec<ListedMember> {
        let urls = |urls: &[NodeUrl]| urls.iter().map(ToString::to_string).collect();
        let listed = |founder: &RosterMember| ListedMember {
            id: founder.id,
            name: founder.record.name.to_string(),
            peer_urls: urls(&founder.record.peer_urls),
            client_urls: urls(&founder.record.client_urls),
            is_learner: false,
        };
        self.founders.iter().map(listed).collect()
    }

    /// Returns the member whose agent has this key. Returns an error if the member was removed, was
    /// lost, or isn't known.
    pub(crate) fn member(&self, key: &PublicKey) -> Result<&RosterMember, ApiError> {
        if let Some(removal) = self.removal(key) {
            return Err(ApiError::removed(removal.clone()));
        }
        // A host that was removed and joined again has several entries; its newest one is used.
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

    /// Returns the keys of the agents whose members were not removed.
    pub(crate) fn present_keys(&self) -> impl Iterator<Item = &PublicKey> {
        let members = self.founders.iter().chain(&self.newcomers);
        members.map(|member| &member.key).filter(|key| self.removal(key).is_none())
    }

    /// Error for the agent of a lost cluster's member.
    fn refuse_lost(&self, member: &RosterMember) -> ApiError {
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

    /// Whether this id belongs to a member of a lost cluster.
    pub(crate) fn is_lost(&self, id: MemberId) -> bool {
        self.by_id(id).is_none() && self.lost.iter().any(|member| member.id == id)
    }

    /// Returns the present or removed member with this id.
    pub(crate) fn by_id(&self, id: MemberId) -> Option<&RosterMember> {
        self.all().find(|member| member.id == id)
    }

    /// Returns when and by whom this agent's member was removed.
    pub(crate) fn removal(&self, key: &PublicKey) -> Option<&Removal> {
        let removed = self.removed.iter().find(|(own, _)| own.as_ref() == Some(key));
        removed.map(|(_, removal)| removal)
    }

    pub(crate) fn is_removed(&self, id: MemberId) -> bool {
        self.removed.iter().any(|(_, removal)| removal.member == id)
    }

    /// Returns the zones of the present members, as their records name them.
    pub(crate) fn zones(&self) -> BTreeMap<MemberId, Name> {
        let present = self.all().filter(|member| !self.is_removed(member.id));
        present.filter_map(|member| Some((member.id, member.record.zone.clone()?))).collect()
    }

    /// Checks that a newcomer's zone has room, in a cluster whose members are spread over zones.
    pub(crate) fn check_zone(
        &self,
        newcomer: &VerifiedRecord,
        replaces: Option<MemberId>,
    ) -> Result<(), ApiError> {
        let zones = self.zones();
        let others: Vec<Option<&str>> = self
            .all()
            .filter(|member| !self.is_removed(member.id) && Some(member.id) != replaces)
            .map(|member| zones.get(&member.id).map(Name::as_str))
            .collect();
        let (zone, size) = (newcomer.zone.as_ref().map(Name::as_str), others.len() + 1);
        fitness::check_zone(zone, others, size).map_err(|fault| {
            let detail = format!("The host can't be a member: it {fault}.");
            let next = "Start the agent with the `--zone` that the host is in, or take a host in \
                        another zone. The ticket was not used.";
            ApiError::new(Code::RecordRefused, detail, next)
        })
    }

    /// Returns another present member with the newcomer's name, except the member that the newcomer
    /// replaces. A name in a command or an order must identify one member.
    pub(crate) fn member_with_name(
        &self,
        newcomer: &VerifiedRecord,
        replaces: Option<MemberId>,
    ) -> Option<MemberId> {
        let same = |member: &&RosterMember| {
            member.record.name == newcomer.name
                && Some(member.id) != replaces
                && !self.is_removed(member.id)
        };
        self.all().find(same).map(|member| member.id)
    }

    /// Returns the present member whose agent has one of these keys. The member with the id
    /// `replaces` is left out.
    pub(crate) fn present_member_of(
        &self,
        keys: &[PublicKey],
        replaces: Option<MemberId>,
    ) -> Option<&RosterMember> {
        self.all().find(|member| {
            keys.contains(&member.key) && Some(member.id) != replaces && !self.is_removed(member.id)
        })
    }

    /// Refuses a newcomer with keys that were used before: each incarnation of a member has its own
    /// keys.
    pub(crate) fn check_unused_keys(&self, newcomer: &VerifiedRecord) -> Result<(), ApiError> {
        if let Some(removal) = self.removal(&newcomer.agent_key) {
            return Err(ApiError::removed(removal.clone()));
        }
        let same = |member: &&RosterMember| {
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

/// Returns the commit document's members; an empty list before the commit.
fn document_members(cluster: &Cluster, statement: &Statement) -> Option<Vec<RosterMember>> {
    let decided = matches!(cluster.phase, Phase::Committed | Phase::Formed | Phase::Retired);
    let Some(frozen) = cluster.frozen.as_ref().filter(|_| decided) else {
        return Some(Vec::new());
    };
    let h = convert::digest(frozen.proposal_hash);
    let founders = (1..).zip(&frozen.proposal.records).map(|(seat, founder)| {
        let jws: Jws = founder.jws.parse().ok()?;
        let record: Record = jws.claims_unverified(JwsType::Record).ok()?;
        Some(RosterMember {
            key: convert::public_key(founder.key),
            id: statement.founder_id(&h, &record)?,
            label: format!("{seat}"),
            node_key: convert::digest(founder.node_key),
            record,
        })
    });
    founders.collect()
}

/// Builds the member that a newcomer became, from the redeem envelope in the newcomer's intent. The
/// envelope was verified on arrival.
fn newcomer(id: MemberId, redeem: &Jws) -> Option<RosterMember> {
    let redeem: Redeem = redeem.claims_unverified(JwsType::Redeem).ok()?;
    let record: Record = redeem.signed.record.claims_unverified(JwsType::Record).ok()?;
    Some(RosterMember {
        key: record.agent_key,
        id,
        label: id.to_string(),
        node_key: record.csr.verify().ok()?.node_key,
        record,
    })
}
