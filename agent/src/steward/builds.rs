//! Versions and features of the members' agents, in the cluster's own store.
//!
//! All agents share one key. Each agent adds its build to the key's value, by compare-and-swap, if
//! the value has another build for it. So nothing is written while no agent is upgraded. Each write
//! drops the builds of removed members.
//!
//! Agents of versions before this module never write the key. If a host goes back to such a
//! version, the build of its newer agent stays in the key. So a feature may be used although that
//! host's agent lacks it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use discovery_types::features::{
    AgentBuild, Feature, MemberBuild, lowest_version, waiting_features,
};
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::Steward;
use crate::cluster::{
    ClusterApiClient, ClusterMember, MemberId, MemberList, NodeStatus, StoredValue,
};
use crate::exit::error_chain;
use crate::observe::status::StatusHandle;

/// Key in the cluster's store whose value has the builds. Keys that begin with `muster/` are
/// Muster's own.
const BUILDS: &str = "muster/v1/agents";
/// Version of the value's format.
const VERSION: u32 = 1;
/// How often an agent compares the stored builds with its own.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// Maximum number of attempts to write the build. An attempt fails if another agent has just
/// written its own.
const MAX_ATTEMPTS: usize = 10;

/// Returns the build of this agent. Tests take features away with the variable
/// `MUSTER_AGENT_FEATURES`, which a release build doesn't read.
pub(crate) fn own_build() -> AgentBuild {
    #[cfg(debug_assertions)]
    if let Some(build) = std::env::var("MUSTER_AGENT_FEATURES").ok().and_then(|t| t.parse().ok()) {
        return build;
    }
    AgentBuild::own()
}

/// Builds of the agents, by the ids of their members in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StoredBuilds {
    version: u32,
    agents: BTreeMap<String, AgentBuild>,
}

impl Default for StoredBuilds {
    fn default() -> Self {
        Self { version: VERSION, agents: BTreeMap::new() }
    }
}

impl StoredBuilds {
    /// Parses the stored value; a missing value holds no build. Builds that aren't valid are left
    /// out.
    fn parse(stored: Option<&[u8]>) -> Result<Self, String> {
        let Some(bytes) = stored else { return Ok(Self::default()) };
        let mut found: Self = serde_json::from_slice(bytes)
            .map_err(|error| format!("{BUILDS} can't be read: {error}"))?;
        found.agents.retain(|_, build| build.is_valid());
        match found.version {
            VERSION => Ok(found),
            other => Err(format!("{BUILDS} is of version {other}, not {VERSION}")),
        }
    }

    fn of(&self, member: MemberId) -> Option<&AgentBuild> {
        self.agents.get(&member.to_string())
    }

    /// Sets the build of the member `own`, and drops members that `members` doesn't have. Returns
    /// whether the build of `own` has changed.
    fn set(&mut self, own: MemberId, build: &AgentBuild, members: &MemberList) -> bool {
        let listed: Vec<String> = members.list.iter().map(|each| each.id.to_string()).collect();
        if !listed.contains(&own.to_string()) {
            return false;
        }
        let before = self.agents.insert(own.to_string(), build.clone());
        self.agents.retain(|id, _| listed.contains(id));
        before.as_ref() != Some(build)
    }

    /// Returns the builds of these members' agents, for [`waiting_features`].
    fn of_members<'a>(&'a self, members: &'a MemberList) -> Vec<MemberBuild<'a>> {
        let name = |member: &ClusterMember| match member.is_started() {
            true => member.name.clone(),
            false => format!("member {}", member.id),
        };
        members.list.iter().map(|member| (name(member), self.of(member.id))).collect()
    }
}

async fn read(node: &ClusterApiClient) -> Result<(StoredValue, StoredBuilds), String> {
    let stored = node.read_key(BUILDS).await.map_err(|error| error_chain(&error))?;
    let builds = StoredBuilds::parse(stored.value.as_deref())?;
    Ok((stored, builds))
}

/// The task that publishes this agent's build, and shows in the status which features wait for
/// which agents.
#[derive(Clone)]
pub(crate) struct BuildKeeper {
    board: StatusHandle,
}

impl BuildKeeper {
    /// Makes the task of a running node's steward.
    pub(crate) fn new(board: StatusHandle) -> Self {
        Self { board }
    }

    /// Compares the stored builds with this agent's until the future is dropped.
    pub(super) async fn run(self, node: ClusterApiClient) -> Infallible {
        let mut logged = None;
        loop {
            // A node without a leader can't read the store, and other tasks log that already. A
            // learner of stock etcd refuses all reads.
            if let Ok(NodeStatus { leader: Some(_), is_learner: false, member_id, .. }) =
                node.status().await
            {
                let failure = self.check(&node, member_id).await.err();
                if let Some(why) = failure.as_ref().filter(|_| logged != failure) {
                    tracing::warn!("the agents' versions can't be compared: {why}");
                }
                logged = failure;
            }
            sleep(CHECK_INTERVAL).await;
        }
    }

    async fn check(&self, node: &ClusterApiClient, own: MemberId) -> Result<(), String> {
        let members = node.list_members().await.map_err(|error| error_chain(&error))?;
        let builds = publish(node, own, &members).await?;
        let agents = builds.of_members(&members);
        self.board.update(|status| {
            status.lowest_agent_version = lowest_version(&agents).map(ToOwned::to_owned);
            status.waiting_features = waiting_features(&agents);
        });
        Ok(())
    }
}

/// Writes this agent's build, if the stored one differs. Returns all builds.
async fn publish(
    node: &ClusterApiClient,
    own: MemberId,
    members: &MemberList,
) -> Result<StoredBuilds, String> {
    for _ in 0..MAX_ATTEMPTS {
        let (stored, mut builds) = read(node).await?;
        if !builds.set(own, &own_build(), members) {
            return Ok(builds);
        }
        let text = serde_json::to_vec(&builds).expect("texts always serialise");
        let written = node.replace_key_if_unchanged(BUILDS, &stored, &text).await;
        if written.map_err(|error| error_chain(&error))? {
            return Ok(builds);
        }
    }
    Err("other agents keep writing their versions".to_owned())
}

impl Steward {
    /// Returns which of `members` have an agent that lacks a feature, according to the builds in
    /// the cluster's own store.
    pub(super) async fn without_feature(
        &self,
        feature: Feature,
        members: &[MemberId],
    ) -> Result<Vec<MemberId>, String> {
        let (_, builds) = read(&self.node).await?;
        let has = |id: &MemberId| builds.of(*id).is_some_and(|build| build.has(feature));
        Ok(members.iter().copied().filter(|id| !has(id)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: MemberId = MemberId(0xa1);

    fn members(ids: &[u64]) -> MemberList {
        let member = |id: &u64| ClusterMember {
            id: MemberId(*id),
            name: format!("db-{id:x}"),
            ..ClusterMember::default()
        };
        MemberList { list: ids.iter().map(member).collect(), ..MemberList::default() }
    }

    #[test]
    fn an_agent_writes_only_if_its_build_differs_from_the_stored_one() {
        let (mut builds, list) = (StoredBuilds::default(), members(&[0xa1, 0xb2]));
        let (old, new) = ("0.0.9".parse().unwrap(), AgentBuild::own());
        assert!(builds.set(OWN, &old, &list) && !builds.set(OWN, &old, &list));
        assert!(builds.set(OWN, &new, &list) && !builds.set(OWN, &new, &list), "an upgrade");
        assert!(builds.set(OWN, &old, &list), "the way back");
        let text = serde_json::to_vec(&builds).unwrap();
        assert_eq!(StoredBuilds::parse(Some(&text)).unwrap(), builds);
    }

    #[test]
    fn builds_of_removed_members_are_dropped_and_a_removed_member_writes_none() {
        let (mut builds, new) = (StoredBuilds::default(), AgentBuild::own());
        builds.set(MemberId(0xb2), &new, &members(&[0xa1, 0xb2]));
        builds.set(OWN, &new, &members(&[0xa1, 0xc3]));
        assert_eq!(builds.agents.keys().collect::<Vec<_>>(), ["a1"]);
        assert!(!builds.set(MemberId(0xb2), &new, &members(&[0xa1, 0xc3])));
        assert_eq!(builds.of(MemberId(0xb2)), None);
    }

    #[test]
    fn a_member_without_a_build_and_one_with_an_older_build_make_features_wait() {
        let (mut builds, list) = (StoredBuilds::default(), members(&[0xa1, 0xb2, 0xc3]));
        builds.set(OWN, &AgentBuild::own(), &list);
        builds.set(MemberId(0xb2), &"0.0.9 grant-2".parse().unwrap(), &list);
        let agents = builds.of_members(&list);
        assert_eq!(lowest_version(&agents), None);
        let waiting = waiting_features(&agents);
        let grants = waiting.iter().find(|line| line.starts_with("grant-2")).unwrap();
        assert!(grants.ends_with("waits for db-c3 (no version known)"), "{grants}");
        let last = waiting.iter().find(|line| line.starts_with("confirmed-replacements"));
        assert!(last.unwrap().ends_with("db-b2 (0.0.9), db-c3 (no version known)"), "{last:?}");
    }

    #[test]
    fn junk_and_newer_formats_are_neither_read_nor_overwritten() {
        assert_eq!(StoredBuilds::parse(None).unwrap(), StoredBuilds::default());
        assert!(StoredBuilds::parse(Some(b"junk")).is_err());
        assert!(StoredBuilds::parse(Some(br#"{"version":2,"agents":{}}"#)).is_err());
        let strange = br#"{"version":1,"agents":{"b2":{"version":"1\n2","features":[]}}}"#;
        assert_eq!(StoredBuilds::parse(Some(strange)).unwrap(), StoredBuilds::default());
    }
}
