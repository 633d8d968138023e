//! Members of a running cluster: who they are, and which of them report. [`directory`],
//! [`lineage`], [`present`] and [`roster`] are pure.

mod addresses;
mod branches;
pub(crate) mod directory;
pub(crate) mod lineage;
pub(crate) mod present;
pub(crate) mod roster;

use std::time::Duration;

use discovery_formation::service::Cluster;
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use discovery_types::text::printable;

use self::present::{RedeemSource, SilenceTimes};
use self::roster::Roster;
use crate::error::ApiError;
use crate::store::UnixMicros;
use crate::store::changes::membership_changes;
use crate::store::cluster::ClusterTransaction;
use crate::store::present::troubles;
use crate::store::unknown_members::unknown_members;

/// Refuses a retirement while members' agents report. An owner can force it.
pub(crate) async fn refuse_if_reporting(
    transaction: &mut ClusterTransaction,
    listening_for: Duration,
) -> Result<(), ApiError> {
    let (id, now) = (transaction.id(), transaction.now.0 as UnixMicros);
    let changes = membership_changes(transaction.connection(), id).await?;
    let troubles = troubles(transaction.connection(), id).await?;
    let cluster = &transaction.cluster;
    let roster = Roster::of(cluster, &transaction.chain, &changes)?;
    let source = |_: &PublicKey| RedeemSource::default();
    let times = silence_times(cluster, now, listening_for);
    let view = present::present_members(&roster, &changes, &troubles, times, source);
    let unknown = unknown_members(transaction.connection(), id).await?;
    let heard = |member: &&discovery_types::api::MemberView| {
        member.last_heard_ms.is_some() && !member.is_silent && !member.is_released
    };
    let known = view.members.iter().filter(heard).map(|member| member.display_name());
    let names: Vec<String> =
        known.chain(unknown.iter().map(|member| printable(&member.name).into_owned())).collect();
    if names.is_empty() {
        return Ok(());
    }
    let awaited = view.members.iter().filter(heard).any(|member| member.is_awaited);
    let detail = match awaited {
        false => format!("Agents of these members reported a moment ago: {}.", names.join(", ")),
        true => format!(
            "Agents of these members could not report until a moment ago, and may run: {}.",
            names.join(", ")
        ),
    };
    let next =
        "Stop the members first, or retire the cluster with --force: its nodes go on running.";
    Err(ApiError::new(Code::MembersReport, detail, next))
}

/// Returns the times from which the silence of a cluster's members is computed.
pub(crate) fn silence_times(
    cluster: &Cluster,
    now: UnixMicros,
    listening_for: Duration,
) -> SilenceTimes {
    let decided = cluster.frozen.as_ref().map_or(now, |frozen| frozen.at.0 as UnixMicros);
    SilenceTimes { decided, now, listening_for }
}
