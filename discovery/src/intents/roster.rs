//! Whose agents speak for a cluster that runs: those of its founders, and of newcomers that its
//! members have added. Pure.

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
use discovery_types::redeem::Redeem;
use discovery_types::url::NodeUrl;

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
    founders: Vec<Member>,
    newcomers: Vec<Member>,
    removed: Vec<(Option<PublicKey>, Removal)>,
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
    pub(super) fn of(cluster: &Cluster, changes: &Changes) -> Result<Self, StoreError> {
        let damaged = || StoreError::damaged("a member's record");
        let decided = matches!(cluster.phase, Phase::Committed | Phase::Formed | Phase::Retired);
        let frozen = cluster.frozen.as_ref().filter(|_| decided);
        let records = frozen.iter().flat_map(|frozen| &frozen.proposal.records);
        let founders = (1..).zip(records).map(|(seat, founder)| {
            let jws: Jws = founder.jws.parse().ok()?;
            let record: Record = jws.claims_unverified(Typ::Record).ok()?;
            let h = convert::digest(frozen?.h);
            Some(Member {
                key: convert::public_key(founder.key),
                id: raft_id::of_founder(&h, &record.peer_urls),
                label: format!("{seat}"),
                node_key: convert::digest(founder.node_key),
                record,
            })
        });
        let added = |intent: &&StoredIntent| {
            matches!(intent.state, IntentState::Added | IntentState::Promoted)
        };
        let newcomers = changes.intents.iter().filter(added).filter_map(|intent| {
            let (id, redeem) = (intent.member?, intent.intent.redeem.as_ref()?);
            Some(newcomer(id, redeem))
        });
        Ok(Roster {
            founders: founders.collect::<Option<_>>().ok_or_else(damaged)?,
            newcomers: newcomers.collect::<Option<_>>().ok_or_else(damaged)?,
            removed: changes.removed.clone(),
        })
    }

    fn all(&self) -> impl Iterator<Item = &Member> {
        self.founders.iter().chain(&self.newcomers)
    }

    /// Ids of those with whom the cluster began.
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
            let next =
                "A newcomer speaks for the cluster once an agent of the cluster has added it.";
            ApiError::new(Code::Forbidden, "This takes an agent of a member of the cluster.", next)
        })
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
        match self.all().find(same) {
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
