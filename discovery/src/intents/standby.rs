//! Hosts that wait under a replacement policy, without a vote, for the place of a dead member.
//!
//! A standby keeps its place by asking for its intent. A standby that hasn't asked within
//! [`STANDBY_LEASE_US`] doesn't count as waiting, and the cluster's agents don't learn of it. It
//! counts as waiting again as soon as it asks.

use discovery_types::api::{Explanation, IntentState, MembersView};
use discovery_types::grant::{Grant, GrantId};
use discovery_types::jws::{Jws, JwsType};
use discovery_types::problem::Code;

use crate::app::App;
use crate::error::ApiError;
use crate::store::UnixMicros;
use crate::store::changes::{MembershipChanges, StoredIntent};
use crate::store::cluster::ClusterTransaction;
use crate::store::intents;

/// How long a standby counts as waiting after its last request for its intent, in microseconds. It
/// is longer than a long poll and the pause after a failed one.
pub(crate) const STANDBY_LEASE_US: UnixMicros = 120 * 1_000_000;
/// Maximum number of hosts of one cluster that wait under policies at the same time.
const MAX_STANDBYS: usize = 8;
/// Minimum time between two updates of the time at which a standby was last heard of.
const MIN_NOTE_INTERVAL_US: UnixMicros = 15 * 1_000_000;

impl StoredIntent {
    /// Whether the host waits, or waited, under a replacement policy.
    pub(super) fn is_standby(&self) -> bool {
        self.seen_us.is_some() && self.state == IntentState::Open
    }

    /// Whether the host is a standby that was not heard of for too long.
    pub(super) fn is_standby_gone(&self, now: UnixMicros) -> bool {
        self.is_standby()
            && self.seen_us.is_some_and(|seen| now.saturating_sub(seen) > STANDBY_LEASE_US)
    }

    /// Whether the time of a standby's present request must be stored, because the stored time of
    /// its last request is too old.
    fn is_note_due(&self, now: UnixMicros) -> bool {
        self.is_standby()
            && self.seen_us.is_some_and(|seen| now.saturating_sub(seen) > MIN_NOTE_INTERVAL_US)
    }
}

/// Returns an error if too many hosts of the cluster wait already.
pub(super) fn check_limit(changes: &MembershipChanges, now: UnixMicros) -> Result<(), ApiError> {
    let waits = |known: &&StoredIntent| known.is_standby() && !known.is_standby_gone(now);
    let waiting = changes.intents.iter().filter(waits).count();
    if waiting < MAX_STANDBYS {
        return Ok(());
    }
    let detail =
        format!("{waiting} hosts wait under replacement policies of this cluster already.");
    let next = "Stop this host, or some of the others. This host's agent tries again by itself.";
    Err(ApiError::new(Code::Conflict, detail, next).mark_retryable())
}

impl App {
    /// Stores in `transaction` that a standby has asked for its intent, if the stored time of its
    /// last request is too old. Returns the intent. Does nothing for an intent that isn't a
    /// standby's.
    pub(super) async fn note_standby(
        &self,
        transaction: &mut ClusterTransaction,
        known: &StoredIntent,
    ) -> Result<StoredIntent, ApiError> {
        let now = transaction.now.0 as UnixMicros;
        if !known.is_note_due(now) {
            return Ok(known.clone());
        }
        let was_gone = known.is_standby_gone(now);
        Ok(intents::note_standby(transaction.connection(), now, known, was_gone).await?)
    }

    /// Stores that a standby has asked for its intent, if the stored time of its last request is
    /// too old.
    pub(super) async fn keep_standby(
        &self,
        known: &StoredIntent,
        now: UnixMicros,
    ) -> Result<(), ApiError> {
        if !known.is_note_due(now) {
            return Ok(());
        }
        let was_gone = known.is_standby_gone(now);
        self.store.note_standby(known, now, was_gone).await?;
        if was_gone {
            self.notifier.wake(known.intent.cluster);
        }
        Ok(())
    }
}

/// Explains what the cluster's standbys wait for, and what its policies lack while a member is
/// silent.
pub(crate) fn explain(
    changes: &MembershipChanges,
    view: &MembersView,
    name: &str,
    now: UnixMicros,
) -> Vec<Explanation> {
    let waits = |known: &&StoredIntent| known.is_standby() && !known.is_standby_gone(now);
    let lines: Vec<Explanation> = changes
        .intents
        .iter()
        .filter(waits)
        .map(|known| {
            let reason = known.wait_reason.as_ref().map(|waits| waits.reason.clone());
            let reason = reason.unwrap_or_else(|| "nobody is known to be dead".to_owned());
            let (subject, policy) = (&known.subject, name_policy(known));
            line("standby", format!("{subject} is a standby by {policy}: {reason}"), None)
        })
        .collect();
    let in_force: Vec<String> = changes
        .policies
        .iter()
        .filter(|policy| !policy.is_revoked)
        .filter_map(|policy| Some(grant_id(&policy.grant)?.to_string()))
        .collect();
    let is_silent = view.members.iter().any(|member| member.is_silent);
    if lines.is_empty() && !in_force.is_empty() && is_silent {
        let missing = format!(
            "a host with a replacement policy's bundle may take the place of a dead member, and no \
             such host waits; policies in force: {}",
            in_force.join(", ")
        );
        let command = Some(format!("muster-discovery policy list --cluster {name}"));
        return vec![line("no_standby", missing, command)];
    }
    lines
}

fn line(code: &str, missing: String, command: Option<String>) -> Explanation {
    Explanation {
        code: code.into(),
        missing,
        held_by: vec!["admin".into()],
        last_error: None,
        next_retry_ms: None,
        command,
    }
}

/// Returns the id of the replacement policy under which the host waits, or waited, as a standby.
/// `None` for any other host. A policy is a grant.
pub(super) fn policy_id(known: &StoredIntent) -> Option<GrantId> {
    known.seen_us.and_then(|_| grant_id(&known.intent.authority))
}

/// Names the replacement policy of a standby, as a part of a sentence.
pub(super) fn name_policy(known: &StoredIntent) -> String {
    let name = policy_id(known).map(|id| format!("replacement policy {id}"));
    name.unwrap_or_else(|| "a replacement policy".to_owned())
}

/// Returns the id of a stored grant, whose signature was verified before it was stored.
fn grant_id(jws: &Jws) -> Option<GrantId> {
    let grant: Grant = jws.claims_unverified(JwsType::Grant).ok()?;
    Some(grant.id)
}
