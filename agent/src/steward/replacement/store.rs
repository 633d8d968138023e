//! Replacement policies in the cluster's own store, where discovery can neither withhold nor revive
//! them.
//!
//! The leader's agent copies policies from discovery to the store, after it has verified their
//! signatures. A revocation is kept until the policy would have expired. It needs no signature: a
//! client with write access can end a policy, which only makes the cluster wait for a person.

use std::collections::BTreeMap;

use discovery_types::api::PolicyView;
use discovery_types::grant::{Grant, GrantId, MAX_POLICY_SECONDS, TokenKind, VerifiedGrant};
use discovery_types::jws::{Jws, JwsType};
use discovery_types::statement::StatementChain;
use serde::{Deserialize, Serialize};

use super::decide::PolicyStanding;
use crate::cluster::ClusterApiClient;
use crate::exit::error_chain;

/// Key of the policies. Keys that begin with `muster/` are Muster's own.
pub(crate) const POLICIES: &str = "muster/v1/policies";
/// Version of the value's format.
const VERSION: u32 = 1;
/// Maximum number of policies in the store.
const MAX_POLICIES: usize = 64;
/// How long a policy is kept after its expiry, in seconds: an hour, because a clock may be wrong.
const KEPT_AFTER_EXPIRY_SECONDS: u64 = 3_600;

/// A policy in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StoredPolicy {
    /// Grant that an operator signed. Missing if the policy was revoked before the store had it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    grant: Option<Jws>,
    /// Whether the policy was revoked.
    revoked: bool,
    /// When the policy is forgotten, in seconds since 1970. The leader's agent sets this time if
    /// there is no valid grant, which would say when the policy expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kept_until: Option<u64>,
}

/// All policies in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredPolicies {
    version: u32,
    policies: BTreeMap<GrantId, StoredPolicy>,
}

impl Default for StoredPolicies {
    fn default() -> Self {
        Self { version: VERSION, policies: BTreeMap::new() }
    }
}

impl StoredPolicies {
    /// Parses the stored value; a missing one holds no policy.
    pub(crate) fn parse(stored: Option<&[u8]>) -> Result<Self, String> {
        let Some(bytes) = stored else { return Ok(Self::default()) };
        let found: Self = serde_json::from_slice(bytes)
            .map_err(|error| format!("{POLICIES} can't be read: {error}"))?;
        match found.version {
            VERSION => Ok(found),
            other => Err(format!("{POLICIES} is of version {other}, not {VERSION}")),
        }
    }

    /// Returns a policy's state in the store.
    pub(crate) fn standing(&self, policy: &VerifiedGrant) -> PolicyStanding {
        match self.policies.get(&policy.id) {
            Some(StoredPolicy { revoked: true, .. }) => PolicyStanding::Revoked,
            Some(stored) if stored.grant.as_ref() == Some(policy.jws()) => PolicyStanding::InForce,
            None if self.is_full() => PolicyStanding::NoRoom,
            _ => PolicyStanding::Missing,
        }
    }

    fn is_full(&self) -> bool {
        self.policies.len() >= MAX_POLICIES
    }

    /// Returns the first policy in force at discovery for which the store has no room. `known` are
    /// discovery's policies, each with whether it was revoked.
    pub(super) fn first_without_room(&self, known: &[(VerifiedGrant, bool)]) -> Option<GrantId> {
        let in_force = known.iter().filter(|(_, is_revoked)| !is_revoked);
        let mut policies = in_force.map(|(policy, _)| policy);
        let found = policies.find(|policy| self.standing(policy) == PolicyStanding::NoRoom);
        found.map(|policy| policy.id)
    }

    /// Returns all policies in the store: the id, whether the policy was revoked, and the grant as
    /// stored, whose signature isn't verified here. There is no grant if the policy was revoked
    /// before the store had it.
    pub(crate) fn list(&self) -> impl Iterator<Item = (GrantId, bool, Option<Grant>)> {
        self.policies.iter().map(|(id, stored)| {
            let grant = stored.grant.as_ref();
            let grant = grant.and_then(|jws| jws.claims_unverified(JwsType::Grant).ok());
            (*id, stored.revoked, grant)
        })
    }

    /// Revokes a policy. Returns whether that changes anything.
    pub(crate) fn revoke(&mut self, id: GrantId) -> bool {
        let new = StoredPolicy { grant: None, revoked: false, kept_until: None };
        let stored = self.policies.entry(id).or_insert(new);
        !std::mem::replace(&mut stored.revoked, true)
    }

    /// Adds or updates a policy that an operator signed. Returns whether that changes anything. A
    /// revoked policy stays revoked, and a full store takes no further policy.
    fn take(&mut self, policy: &VerifiedGrant, is_revoked: bool) -> bool {
        let grant = Some(policy.jws().clone());
        let is_full = self.is_full();
        match self.policies.get_mut(&policy.id) {
            Some(known) => {
                let before = known.clone();
                known.revoked |= is_revoked;
                known.grant = grant;
                *known != before
            }
            None if is_full => false,
            None => {
                let new = StoredPolicy { grant, revoked: is_revoked, kept_until: None };
                self.policies.insert(policy.id, new);
                true
            }
        }
    }

    /// Forgets policies that ended long ago by their own expiry. Without a valid grant the expiry
    /// isn't known, so the policy is kept for the longest time that a policy may last. Returns
    /// whether that changes anything.
    ///
    /// `clocks` are the times by this host's clock and by the service's. A clock that is wrong can
    /// only delay the end, so that discovery can't revive a revoked policy.
    fn forget_expired(&mut self, chain: &StatementChain, clocks: (u64, u64)) -> bool {
        let (earlier, later) = (clocks.0.min(clocks.1), clocks.0.max(clocks.1));
        let mut is_changed = false;
        self.policies.retain(|_, stored| {
            let grant =
                stored.grant.as_ref().and_then(|jws| VerifiedGrant::verify_kept(jws, chain).ok());
            let end = match grant {
                Some(grant) => grant.expires_at.saturating_add(KEPT_AFTER_EXPIRY_SECONDS),
                None => *stored.kept_until.get_or_insert_with(|| {
                    is_changed = true;
                    later.saturating_add(MAX_POLICY_SECONDS + KEPT_AFTER_EXPIRY_SECONDS)
                }),
            };
            is_changed |= end <= earlier;
            end > earlier
        });
        is_changed
    }
}

/// Says that the store has no room for a policy.
pub(super) fn no_room_text(id: GrantId) -> String {
    format!(
        "the cluster's own store has no room for the policy {id}: it keeps {MAX_POLICIES} policies, \
         revoked ones too, until an hour after they expire (muster-agent policy list)"
    )
}

/// Verifies the policies that discovery hands out, under the newest statement.
pub(super) fn verified(views: &[PolicyView], chain: &StatementChain) -> Vec<(VerifiedGrant, bool)> {
    let verify = |view: &PolicyView| {
        let grant = VerifiedGrant::verify(&view.grant, chain).ok()?;
        (grant.kind == TokenKind::Heal).then_some((grant, view.is_revoked))
    };
    views.iter().filter_map(verify).collect()
}

/// Reads the policies from the store.
pub(crate) async fn read(node: &ClusterApiClient) -> Result<StoredPolicies, String> {
    let stored = node.read_key(POLICIES).await.map_err(|error| error_chain(&error))?;
    StoredPolicies::parse(stored.value.as_deref())
}

/// Writes policies from discovery to the store, if it lacks any. Returns all policies in the store.
/// `clocks` are the times by this host's clock and by the service's, in seconds since 1970.
pub(super) async fn sync(
    node: &ClusterApiClient,
    known: &[(VerifiedGrant, bool)],
    chain: &StatementChain,
    clocks: (u64, u64),
) -> Result<StoredPolicies, String> {
    let stored = node.read_key(POLICIES).await.map_err(|error| error_chain(&error))?;
    let mut policies = StoredPolicies::parse(stored.value.as_deref())?;
    let mut is_changed = policies.forget_expired(chain, clocks);
    for (policy, is_revoked) in known {
        is_changed |= policies.take(policy, *is_revoked);
    }
    if is_changed {
        replace(node, &stored, &policies).await?;
    }
    Ok(policies)
}

async fn replace(
    node: &ClusterApiClient,
    stored: &crate::cluster::StoredValue,
    policies: &StoredPolicies,
) -> Result<(), String> {
    let text = serde_json::to_vec(policies).expect("texts always serialise");
    let written = node.replace_key_if_unchanged(POLICIES, stored, &text).await;
    match written.map_err(|error| error_chain(&error))? {
        true => Ok(()),
        false => Err("another agent has just written the policies".to_owned()),
    }
}

/// Revokes a policy in the store, for ever. Returns `false` if it was revoked before.
pub(crate) async fn revoke(node: &ClusterApiClient, id: GrantId) -> Result<bool, String> {
    let stored = node.read_key(POLICIES).await.map_err(|error| error_chain(&error))?;
    let mut policies = StoredPolicies::parse(stored.value.as_deref())?;
    if !policies.revoke(id) {
        return Ok(false);
    }
    replace(node, &stored, &policies).await?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use discovery_types::fixtures::{ClusterFixture, policy_fixture};

    use super::*;

    /// Returns the fixture's policy, which an owner has signed.
    fn policy_of(world: &ClusterFixture) -> VerifiedGrant {
        VerifiedGrant::verify(&world.grant.sign(&world.owner), &world.chain()).unwrap()
    }

    /// Returns a time by two clocks that agree.
    fn both(now: u64) -> (u64, u64) {
        (now, now)
    }

    #[test]
    fn a_revoked_policy_never_comes_back() {
        let world = policy_fixture();
        let (policy, mut stored) = (policy_of(&world), StoredPolicies::default());
        assert_eq!(stored.standing(&policy), PolicyStanding::Missing);
        assert!(stored.take(&policy, false) && !stored.take(&policy, false));
        assert_eq!(stored.standing(&policy), PolicyStanding::InForce);
        assert!(stored.take(&policy, true));
        assert!(!stored.take(&policy, false), "discovery says that it is not revoked");
        assert_eq!(stored.standing(&policy), PolicyStanding::Revoked);
        let text = serde_json::to_vec(&stored).unwrap();
        assert_eq!(StoredPolicies::parse(Some(&text)).unwrap(), stored);
    }

    #[test]
    fn a_policy_can_be_revoked_before_the_store_has_it() {
        let world = policy_fixture();
        let (policy, mut stored) = (policy_of(&world), StoredPolicies::default());
        assert!(stored.revoke(policy.id) && !stored.revoke(policy.id));
        stored.take(&policy, false);
        assert_eq!(stored.standing(&policy), PolicyStanding::Revoked);
    }

    #[test]
    fn another_policy_with_the_same_id_is_not_in_force() {
        let mut world = policy_fixture();
        let (policy, mut stored) = (policy_of(&world), StoredPolicies::default());
        stored.take(&policy, false);
        world.grant.expires_at += 1;
        assert_eq!(stored.standing(&policy_of(&world)), PolicyStanding::Missing);
    }

    #[test]
    fn a_policy_is_forgotten_an_hour_after_its_end() {
        let world = policy_fixture();
        let (policy, chain) = (policy_of(&world), world.chain());
        let mut stored = StoredPolicies::default();
        stored.take(&policy, true);
        assert!(!stored.forget_expired(&chain, both(policy.expires_at + 3_599)));
        assert!(stored.forget_expired(&chain, both(policy.expires_at + 3_600)));
        assert_eq!(stored, StoredPolicies::default());
    }

    #[test]
    fn one_wrong_clock_makes_no_revoked_policy_forgotten() {
        let world = policy_fixture();
        let (policy, chain) = (policy_of(&world), world.chain());
        let (now, kept) = (policy.issued_at, MAX_POLICY_SECONDS + KEPT_AFTER_EXPIRY_SECONDS);
        let (mut with_grant, mut without_grant) =
            (StoredPolicies::default(), StoredPolicies::default());
        with_grant.take(&policy, true);
        for clocks in [(u64::MAX, now), (now, u64::MAX)] {
            assert!(!with_grant.forget_expired(&chain, clocks), "{clocks:?}");
        }
        without_grant.revoke(policy.id);
        assert!(without_grant.forget_expired(&chain, (now, 0)), "the time is noted");
        assert!(!without_grant.forget_expired(&chain, both(now + kept - 1)));
        assert_eq!(without_grant.standing(&policy), PolicyStanding::Revoked);
    }

    #[test]
    fn a_full_store_says_so_and_has_room_once_policies_without_a_grant_are_forgotten() {
        let world = policy_fixture();
        let (policy, chain) = (policy_of(&world), world.chain());
        let known = [(policy.clone(), false)];
        let mut stored = StoredPolicies::default();
        assert_eq!(stored.first_without_room(&known), None, "it is missing, and there is room");
        for _ in 0..MAX_POLICIES {
            stored.revoke(GrantId::random());
        }
        assert!(!stored.take(&policy, false));
        assert_eq!(stored.standing(&policy), PolicyStanding::NoRoom);
        assert_eq!(stored.first_without_room(&known), Some(policy.id));
        assert_eq!(stored.first_without_room(&[(policy.clone(), true)]), None);
        let (now, kept) = (policy.issued_at, MAX_POLICY_SECONDS + KEPT_AFTER_EXPIRY_SECONDS);
        assert!(stored.forget_expired(&chain, both(now)), "the time is noted");
        let text = serde_json::to_vec(&stored).unwrap();
        assert_eq!(StoredPolicies::parse(Some(&text)).unwrap(), stored);
        assert!(!stored.forget_expired(&chain, both(now + kept - 1)));
        assert!(stored.forget_expired(&chain, both(now + kept)));
        assert!(stored.take(&policy, false));
        assert_eq!(stored.standing(&policy), PolicyStanding::InForce);
    }

    #[test]
    fn junk_is_no_empty_list_of_policies() {
        assert!(StoredPolicies::parse(Some(b"junk")).is_err());
        assert!(StoredPolicies::parse(Some(br#"{"version":2,"policies":{}}"#)).is_err());
        assert_eq!(StoredPolicies::parse(None).unwrap(), StoredPolicies::default());
    }
}
