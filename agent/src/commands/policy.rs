//! `policy`: lists and revokes the replacement policies in the cluster's own store. No request is
//! sent to discovery.

use std::path::Path;

use discovery_types::grant::{Grant, GrantId, ReplacementLimits};
use serde::Serialize;
use uuid::Uuid;

use crate::cli::{PolicyCommand, PolicySubcommand};
use crate::commands::member::cluster_client;
use crate::commands::printer::Printer;
use crate::exit::ExitError;
use crate::state::{Layout, journal};
use crate::steward::replacement::uses::PolicyUse;
use crate::steward::replacement::{read_uses, store};

/// The output of `policy list --json`.
#[derive(Serialize)]
struct PolicyListing {
    policies: Vec<ListedPolicy>,
    /// Replacements that were begun, oldest first.
    replacements: Vec<PolicyUse>,
}

/// A policy in the cluster's own store.
#[derive(Serialize)]
struct ListedPolicy {
    id: GrantId,
    /// Whether the policy was revoked.
    revoked: bool,
    /// Whether the policy is for another cluster, whose data this one got by a snapshot. Then it
    /// has no effect here. Known only on a member's host.
    of_other_cluster: bool,
    /// End and limits of the policy. `None` if the store has only the policy's revocation.
    #[serde(flatten)]
    terms: Option<PolicyTerms>,
}

/// End and limits of a policy, and the number of its replacements that count towards its limit now.
#[derive(Serialize)]
struct PolicyTerms {
    /// End of the policy, in seconds since 1970.
    expires_at: u64,
    #[serde(flatten)]
    limits: ReplacementLimits,
    /// Number of replacements that count towards `at_most` now, by this host's clock.
    used: usize,
}

impl PolicyTerms {
    /// Reads a policy's terms from its grant. `uses` are the replacements of all policies.
    fn new(grant: &Grant, uses: &[PolicyUse], now: u64) -> Option<Self> {
        let limits = grant.replacement?;
        let counts = |each: &&PolicyUse| {
            each.policy == grant.id && each.began_at.saturating_add(limits.per_seconds) > now
        };
        let used = uses.iter().filter(counts).count();
        Some(Self { expires_at: grant.expires_at, limits, used })
    }
}

/// Runs the command `policy`.
pub(crate) async fn run(typed: &PolicyCommand, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    let node = cluster_client(&typed.access)?;
    let json = typed.access.json;
    let text = match typed.verb {
        PolicySubcommand::List => {
            let stored = store::read(&node).await.map_err(ExitError::Failed)?;
            let replacements = read_uses(&node).await.map_err(ExitError::Failed)?;
            let now = jiff::Timestamp::now().as_second().unsigned_abs();
            let own = own_cluster(&typed.access.data_dir);
            let listed = |(id, revoked, grant): (GrantId, bool, Option<Grant>)| {
                let of = grant.as_ref().map(|grant| grant.cluster);
                let of_other_cluster = own.zip(of).is_some_and(|(own, of)| own != of);
                let terms = grant.and_then(|grant| PolicyTerms::new(&grant, &replacements, now));
                ListedPolicy { id, revoked, of_other_cluster, terms }
            };
            let policies = stored.list().map(listed).collect();
            let listing = PolicyListing { policies, replacements };
            if json { to_json(&listing)? } else { listing.to_text(now) }
        }
        PolicySubcommand::Revoke { id } => {
            let is_new = store::revoke(&node, id).await.map_err(ExitError::Failed)?;
            let revoked = ListedPolicy { id, revoked: true, of_other_cluster: false, terms: None };
            match (json, is_new) {
                (true, _) => to_json(&revoked)?,
                (false, true) => format!("policy {id} is revoked in this cluster, for ever"),
                (false, false) => format!("policy {id} was revoked in this cluster before"),
            }
        }
    };
    printer.line(&text).map_err(|error| ExitError::Failed(error.to_string()))
}

/// Returns the id of the cluster of this host's agent. `None` without an agent.
fn own_cluster(data_dir: &Path) -> Option<Uuid> {
    let layout = Layout::new_read_only(data_dir).ok()?;
    let (_, loaded) = journal::read(&layout).ok()??;
    loaded.extras.join.map(|join| join.cluster)
}

fn to_json(value: &impl Serialize) -> Result<String, ExitError> {
    serde_json::to_string(value).map_err(|error| ExitError::Failed(error.to_string()))
}

/// Formats a time in seconds since 1970.
fn format_time(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|at| jiff::Timestamp::from_second(at).ok());
    time.map(|at| at.to_string()).unwrap_or_default()
}

impl ListedPolicy {
    fn to_text(&self, now: u64) -> String {
        let state = match &self.terms {
            _ if self.revoked => "is revoked".to_owned(),
            _ if self.of_other_cluster => {
                "is for the cluster that this data came from, and has no effect here".to_owned()
            }
            None => "is in force".to_owned(),
            Some(terms) if terms.expires_at <= now => {
                format!("ended at {}", format_time(terms.expires_at))
            }
            Some(PolicyTerms { expires_at, limits, used }) => format!(
                "is in force until {}: after {} s, at most {} in {} s, of which {used} are used",
                format_time(*expires_at),
                limits.after_seconds,
                limits.at_most,
                limits.per_seconds
            ),
        };
        format!("policy {} {state}", self.id)
    }
}

impl PolicyListing {
    fn to_text(&self, now: u64) -> String {
        let policies = self.policies.iter().map(|policy| policy.to_text(now));
        let replacements = self.replacements.iter().map(|each| {
            format!(
                "{}: {} takes the place of {} ({}) by the policy {}: {}",
                format_time(each.began_at),
                each.newcomer,
                each.member_name,
                each.member,
                each.policy,
                each.ended.as_deref().unwrap_or("under way")
            )
        });
        let lines: Vec<String> = policies.chain(replacements).collect();
        match lines.is_empty() {
            true => "this cluster has no replacement policy".to_owned(),
            false => lines.join("\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use discovery_types::fixtures::policy_fixture;

    use super::*;

    #[test]
    fn a_policy_is_listed_with_its_end_its_limits_and_the_uses_that_count() {
        let grant = policy_fixture().grant;
        let limits = grant.replacement.unwrap();
        let of = |policy: GrantId, began_at: u64| {
            let text = serde_json::json!({
                "policy": policy, "operation": "00000000000000000000000000000000",
                "member": "0000000000000005", "member_name": "db-1", "newcomer": "db-4",
                "voters": 3, "raft_cluster": "0000000000000001", "began_at": began_at,
            });
            serde_json::from_value::<PolicyUse>(text).unwrap()
        };
        let now = grant.expires_at - 1;
        let uses = [
            of(grant.id, now - limits.per_seconds),
            of(grant.id, now - limits.per_seconds + 1),
            of(grant.id, now),
            of(GrantId::random(), now),
        ];
        let terms = || PolicyTerms::new(&grant, &uses, now);
        assert_eq!(terms().unwrap().used, 2, "neither the oldest nor another policy's use counts");
        let text = |revoked, now| {
            let (id, terms) = (grant.id, terms());
            ListedPolicy { id, revoked, of_other_cluster: false, terms }.to_text(now)
        };
        let shown = text(false, now);
        let (most, end) = (limits.at_most, format_time(grant.expires_at));
        assert!(shown.contains(&format!("is in force until {end}: after")), "{shown}");
        assert!(shown.contains(&format!("at most {most} in")) && shown.ends_with("2 are used"));
        assert!(text(false, grant.expires_at).ends_with(&format!("ended at {end}")));
        assert!(text(true, now).ends_with("is revoked"));
        let (id, terms) = (grant.id, terms());
        let foreign = ListedPolicy { id, revoked: false, of_other_cluster: true, terms };
        assert!(foreign.to_text(now).ends_with("has no effect here"));
    }
}
