//! `policy`: lists and revokes the replacement policies in the cluster's own store. No request is
//! sent to discovery.

use discovery_types::grant::GrantId;
use serde::Serialize;

use crate::cli::{PolicyCommand, PolicySubcommand};
use crate::commands::member::cluster_client;
use crate::commands::printer::Printer;
use crate::exit::ExitError;
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
}

/// Runs the command `policy`.
pub(crate) async fn run(typed: &PolicyCommand, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    let node = cluster_client(&typed.access)?;
    let json = typed.access.json;
    let text = match typed.verb {
        PolicySubcommand::List => {
            let stored = store::read(&node).await.map_err(ExitError::Failed)?;
            let policies = stored.ids().map(|(id, revoked)| ListedPolicy { id, revoked }).collect();
            let replacements = read_uses(&node).await.map_err(ExitError::Failed)?;
            let listing = PolicyListing { policies, replacements };
            if json { to_json(&listing)? } else { listing.to_text() }
        }
        PolicySubcommand::Revoke { id } => {
            let is_new = store::revoke(&node, id).await.map_err(ExitError::Failed)?;
            let revoked = ListedPolicy { id, revoked: true };
            match (json, is_new) {
                (true, _) => to_json(&revoked)?,
                (false, true) => format!("policy {id} is revoked in this cluster, for ever"),
                (false, false) => format!("policy {id} was revoked in this cluster before"),
            }
        }
    };
    printer.line(&text).map_err(|error| ExitError::Failed(error.to_string()))
}

fn to_json(value: &impl Serialize) -> Result<String, ExitError> {
    serde_json::to_string(value).map_err(|error| ExitError::Failed(error.to_string()))
}

impl PolicyListing {
    fn to_text(&self) -> String {
        let policies = self.policies.iter().map(|policy| {
            format!(
                "policy {} is {}",
                policy.id,
                if policy.revoked { "revoked" } else { "in force" }
            )
        });
        let replacements = self.replacements.iter().map(|each| {
            let began = i64::try_from(each.began_at).ok();
            let began = began.and_then(|at| jiff::Timestamp::from_second(at).ok());
            format!(
                "{}: {} takes the place of {} ({}) by the policy {}: {}",
                began.map(|at| at.to_string()).unwrap_or_default(),
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
