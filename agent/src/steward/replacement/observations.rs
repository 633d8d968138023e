//! Observations in the cluster's own store: each voter's agent signs which voters it can't reach,
//! and the leader's agent counts the voters that agree.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use discovery_types::digest;
use discovery_types::document::VerifiedDocument;
use discovery_types::key::SigningKey;
use discovery_types::member_proof::{CertifiedMember, MemberProof};
use discovery_types::observation::{Observation, SignedObservation, UnreachableMember};
use discovery_types::statement::{Statement, StatementChain};
use tokio::time::Instant;
use uuid::Uuid;

use crate::cluster::{ClusterApiClient, MemberId, MemberList};
use crate::exit::error_chain;

/// How often an agent repeats its observation, after the second one.
const OBSERVATION_INTERVAL: Duration = Duration::from_secs(15);
/// Time until an agent repeats its first observation. Others count an agent's observations from the
/// second on.
const FIRST_INTERVAL: Duration = Duration::from_secs(2);
/// Time without an observation after which the next observation counts as a first observation
/// again.
const PAUSE_BEFORE_FIRST: Duration = Duration::from_secs(60);
/// How long an observation counts after this agent has seen that it is new.
pub(super) const OBSERVATION_LIFETIME: Duration = Duration::from_secs(45);

/// Key and proof to sign this host's observations, and facts to verify the observations of other
/// agents.
#[derive(Clone)]
pub(crate) struct VoterObserver {
    /// The cluster's id at discovery.
    pub cluster: Uuid,
    /// The agent's private key.
    pub key: Arc<SigningKey>,
    /// Proof that the agent belongs to this host's member.
    pub proof: MemberProof,
    /// The commit document, with which the cluster was founded.
    pub document: VerifiedDocument,
    /// Whether the cluster was recovered. Its founders then have other member ids than those in the
    /// commit document.
    pub is_recovered: bool,
}

impl VoterObserver {
    /// Returns whether the member that a certificate names can be the member `id`.
    fn is_of(&self, certified: CertifiedMember, id: MemberId) -> bool {
        match certified {
            CertifiedMember::Added(certified) => certified.get() == id.0,
            CertifiedMember::Founder(_) if self.is_recovered => true,
            CertifiedMember::Founder(seat) => {
                let index = usize::from(seat).checked_sub(1);
                let record = index.and_then(|index| self.document.records().get(index));
                let founder = record.map(|record| self.document.founder_id(record));
                founder.is_some_and(|founder: digest::MemberId| founder.get() == id.0)
            }
        }
    }
}

/// A member's newest observation, as this agent has seen it.
#[derive(Debug)]
struct LatestObservation {
    /// Revision that wrote the observation.
    revision: u64,
    /// When this agent last read the observation from the cluster's store.
    looked: Instant,
    /// When this agent last saw that the observation was new. `None` for the first observation
    /// after a break in the reads: it may be old.
    renewed: Option<Instant>,
}

/// Observations that this agent has written and seen.
#[derive(Debug, Default)]
pub(super) struct Observations {
    /// Time of the last written observation, and whether that was a first observation.
    written: Option<(Instant, bool)>,
    seen: BTreeMap<MemberId, LatestObservation>,
}

/// A value in the store, and the revision that wrote it.
type Written = (Vec<u8>, u64);

/// Returns the key of a member's observation in the cluster's own store.
fn key_of(member: MemberId) -> String {
    format!("muster/v1/observations/{member}")
}

impl Observations {
    /// Whether this host's last observation is old enough for another one.
    pub(super) fn is_due(&self) -> bool {
        self.written.is_none_or(|(written, is_first)| {
            let interval = if is_first { FIRST_INTERVAL } else { OBSERVATION_INTERVAL };
            written.elapsed() >= interval
        })
    }

    /// Writes this host's observation, unless the last one is recent.
    pub(super) async fn write_if_due(
        &mut self,
        observer: &VoterObserver,
        node: &ClusterApiClient,
        own: MemberId,
        unreachable: &[(MemberId, Duration)],
    ) -> Result<(), String> {
        if !self.is_due() {
            return Ok(());
        }
        let is_first =
            self.written.is_none_or(|(written, _)| written.elapsed() > PAUSE_BEFORE_FIRST);
        let key = key_of(own);
        let stored = node.read_key(&key).await.map_err(|error| error_chain(&error))?;
        let listed = unreachable.iter().map(|(member, time)| UnreachableMember {
            member: digest::MemberId::new(member.0),
            for_seconds: time.as_secs(),
        });
        let observation = Observation {
            cluster: observer.cluster,
            agent: *observer.key.public(),
            observer: digest::MemberId::new(own.0),
            // The number is the revision of the observation that this one replaces. It grows, also
            // across restarts of the agent, and shows that this observation is newer than the
            // replaced one.
            number: stored.revision().unsigned_abs(),
            unreachable: listed.collect(),
        };
        let signed = observation.sign(&observer.key, observer.proof.clone());
        let text = serde_json::to_vec(&signed).expect("texts always serialise");
        let written = node.replace_key_if_unchanged(&key, &stored, &text).await;
        if written.map_err(|error| error_chain(&error))? {
            self.written = Some((Instant::now(), is_first));
        }
        Ok(())
    }

    /// Returns the voters other than `own` whose agents say that `dead` has been unreachable for
    /// `after`.
    pub(super) async fn agreeing(
        &mut self,
        observer: &VoterObserver,
        node: &ClusterApiClient,
        (members, statements): (&MemberList, &StatementChain),
        (own, dead): (MemberId, MemberId),
        after: Duration,
    ) -> Result<Vec<MemberId>, String> {
        let mut values = BTreeMap::new();
        let others = members.list.iter().filter(|member| !member.is_learner);
        for member in others.filter(|member| member.id != own && member.id != dead) {
            let stored = node.read_key(&key_of(member.id)).await;
            let stored = stored.map_err(|error| error_chain(&error))?;
            let revision = stored.revision().unsigned_abs();
            values.extend(stored.value.map(|value| (member.id, (value, revision))));
        }
        let now = Instant::now();
        Ok(self.count(observer, statements.newest(), &values, (dead, after), now))
    }

    /// Returns the members whose values in the store count: each is a new observation of that
    /// member's own agent, that `dead` has been unreachable for `after`.
    fn count(
        &mut self,
        observer: &VoterObserver,
        statement: &Statement,
        values: &BTreeMap<MemberId, Written>,
        (dead, after): (MemberId, Duration),
        now: Instant,
    ) -> Vec<MemberId> {
        let (mut agreeing, mut certified) = (Vec::new(), BTreeSet::new());
        for (member, (value, revision)) in values {
            let Some((observation, proven)) = verified(observer, statement, *member, value) else {
                continue;
            };
            let is_fresh = self.is_fresh(*member, (observation.number, *revision), now);
            let agrees = observation.unreachable.iter().any(|each| {
                each.member.get() == dead.0 && Duration::from_secs(each.for_seconds) >= after
            });
            // Each certificate counts for one voter only.
            if is_fresh && agrees && certified.insert(proven) {
                agreeing.push(*member);
            }
        }
        agreeing
    }

    /// Notes an observation: its number, and the revision that wrote it. Returns whether the
    /// observation counts now.
    ///
    /// The number is the revision of the observation that this one replaced. The observation is new
    /// if that revision is at least the last one that this agent has seen. So an old observation
    /// that somebody writes again isn't new.
    pub(super) fn is_fresh(
        &mut self,
        of: MemberId,
        (number, revision): (u64, u64),
        now: Instant,
    ) -> bool {
        let first = LatestObservation { revision, looked: now, renewed: None };
        let seen = self.seen.entry(of).or_insert(first);
        // After a break in the reads, it isn't known when the observation was written. So it
        // doesn't count until a newer one is seen.
        if now.duration_since(seen.looked) >= OBSERVATION_LIFETIME {
            *seen = LatestObservation { revision, looked: now, renewed: None };
        }
        if number >= seen.revision {
            seen.renewed = Some(now);
        }
        (seen.looked, seen.revision) = (now, revision);
        seen.renewed.is_some_and(|renewed| now.duration_since(renewed) < OBSERVATION_LIFETIME)
    }
}

/// Verifies a value in the store as the observation of this member's agent. Returns the observation
/// and the member that the agent's certificate names.
fn verified(
    observer: &VoterObserver,
    statement: &Statement,
    member: MemberId,
    value: &[u8],
) -> Option<(Observation, CertifiedMember)> {
    let signed: SignedObservation = serde_json::from_slice(value).ok()?;
    let verified = signed.verify(statement).inspect_err(|error| {
        tracing::debug!("{} doesn't count: {}", key_of(member), error_chain(error));
    });
    let (observation, proven) = verified.ok()?;
    let is_own_word = observation.observer.get() == member.0;
    (is_own_word && observer.is_of(proven.member, member)).then_some((observation, proven.member))
}

#[cfg(test)]
mod tests;
