//! Finds members of a running cluster by the names that people type.

use std::time::Duration;

use discovery_types::api::{DirectoryView, IntentView, ListedMember, Outcome};
use discovery_types::digest::MemberId;
use discovery_types::grant::Grant;
use discovery_types::jws::JwsType;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::CliError;
use super::session::AdminSession;

/// Maximum time to wait until the members report the result of the last change. `POLL_INTERVAL` is
/// the pause between two requests for the member list.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Discovery's list of a cluster's members. `None` as long as no member has reported.
pub(super) struct MemberDirectory(Option<DirectoryView>);

impl MemberDirectory {
    pub(super) async fn fetch(session: &AdminSession, cluster: Uuid) -> Result<Self, CliError> {
        Ok(MemberDirectory(session.client.directory(cluster).await?.view))
    }

    /// Returns the member list, after waiting until it contains the result of the last intent. An
    /// order that was planned with an older list would be refused. The wait is limited, because
    /// somebody can have changed the members again with the cluster's own API.
    pub(super) async fn fetch_settled(
        session: &AdminSession,
        cluster: Uuid,
    ) -> Result<Self, CliError> {
        let start = Instant::now();
        loop {
            let members = Self::fetch(session, cluster).await?;
            let intents = session.client.intents(cluster, None, true).await?.intents;
            let last = intents.iter().max_by_key(|view| view.rev);
            if last.is_none_or(|view| members.has_result_of(view))
                || start.elapsed() >= SETTLE_TIMEOUT
            {
                return Ok(members);
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Whether the member list contains the result of the intent in `view`.
    fn has_result_of(&self, view: &IntentView) -> bool {
        let Some(directory) = &self.0 else { return true };
        let listed = |id: MemberId| directory.membership.members.iter().find(|m| m.id == id);
        let votes = |member: &ListedMember| !member.is_learner;
        let grant = view.intent.authority.claims_unverified::<Grant>(JwsType::Grant).ok();
        let old = grant.and_then(|grant| grant.replaces);
        let went_on = match (view.intent.planned_at, directory.membership.configuration) {
            (Some(before), Some(now)) => now > before,
            (None, _) | (_, None) => true,
        };
        match &view.outcome {
            Some(Outcome::Promoted { member }) => {
                listed(*member).is_some_and(votes) && old.and_then(listed).is_none()
            }
            Some(Outcome::Removed { member }) => listed(*member).is_none(),
            Some(Outcome::Updated { .. }) => went_on,
            _ => true,
        }
    }

    /// The configuration that a quorum of the members has reported. Changes are planned for this
    /// configuration. `None` if there is no such configuration.
    pub(super) fn configuration(&self) -> Option<u64> {
        let confirmed = self.0.as_ref().filter(|view| view.confirmed)?;
        confirmed.membership.configuration
    }

    /// Returns the member with this name, or with this id as `etcdctl member list` prints it.
    pub(super) fn find(&self, text: &str) -> Result<MemberId, CliError> {
        let listed = self.0.iter().flat_map(|view| &view.membership.members);
        let named: Vec<MemberId> =
            listed.clone().filter(|member| member.name == text).map(|member| member.id).collect();
        if let [one] = named[..] {
            return Ok(one);
        }
        let id = u64::from_str_radix(text, 16).ok().map(MemberId::new);
        let known = |id: &MemberId| self.0.is_none() || listed.clone().any(|m| m.id == *id);
        if let (Some(id), true) = (id.filter(known), named.is_empty()) {
            return Ok(id);
        }
        let ids: Vec<String> =
            listed.map(|member| format!("{} ({})", member.id, member.name)).collect();
        Err(CliError::Usage(match (named.len(), ids.is_empty()) {
            (0, true) => format!(
                "`{text}` is no member's id, and no member of this cluster has told its name yet: \
                 use an id of `etcdctl member list`"
            ),
            (0, false) => format!("the cluster has no member `{text}`, but {}", ids.join(", ")),
            _ => format!("several members are called `{text}`: use an id of {}", ids.join(", ")),
        }))
    }
}

#[cfg(test)]
mod tests {
    use discovery_types::api::{ListedMember, Membership};

    use super::*;

    fn members(names: &[(&str, u64)]) -> MemberDirectory {
        let listed = |(name, id): &(&str, u64)| ListedMember {
            id: MemberId::new(*id),
            name: (*name).to_owned(),
            peer_urls: Vec::new(),
            client_urls: Vec::new(),
            is_learner: false,
        };
        MemberDirectory(Some(DirectoryView {
            membership: Membership {
                configuration: Some(7),
                members: names.iter().map(listed).collect(),
            },
            confirmed: true,
            raft_term: 1,
            raft_index: 9,
            leader: None,
            reporters: 1,
            at_ms: 0,
        }))
    }

    #[test]
    fn a_member_is_found_by_name_or_by_the_id_that_etcdctl_prints() {
        let members = members(&[("db-1", 0x8e9e05c52164694d), ("db-2", 0xabc), ("abc", 5)]);
        assert_eq!(members.find("db-1").unwrap().get(), 0x8e9e05c52164694d);
        assert_eq!(members.find("8e9e05c52164694d").unwrap().get(), 0x8e9e05c52164694d);
        assert_eq!(members.find("0000000000000abc").unwrap().get(), 0xabc);
        assert_eq!(members.find("abc").unwrap().get(), 5, "a name comes first");
        assert_eq!(members.configuration(), Some(7));
    }

    #[test]
    fn an_unknown_or_ambiguous_member_is_refused_with_a_list_of_the_members() {
        let twins = members(&[("db", 1), ("db", 2)]);
        for (text, wanted) in
            [("db", "several"), ("db-9", "0000000000000001 (db)"), ("77", "no member")]
        {
            let error = twins.find(text).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(wanted), "{error}");
        }
    }

    #[test]
    fn before_any_member_has_reported_every_id_is_accepted() {
        let members = MemberDirectory(None);
        assert_eq!(members.find("abc").unwrap().get(), 0xabc);
        assert!(members.find("db-1").unwrap_err().to_string().contains("etcdctl"));
        assert_eq!(members.configuration(), None);
    }
}
