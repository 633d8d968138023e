//! Stores changes of running clusters, and members' reports about their clusters.

use discovery_formation as formation;
use discovery_types::api::{IntentState, Outcome};
use discovery_types::digest::MemberId;
use discovery_types::intent::{Intent, Verb};
use discovery_types::jws::Jws;
use discovery_types::key::PublicKey;
use discovery_types::service::VerifiedService;
use serde_json::Value;
use sqlx::postgres::PgArguments;
use sqlx::query::QueryScalar;
use sqlx::{PgConnection, Postgres};
use uuid::Uuid;

use super::changes::{MembershipReport, StoredIntent, WaitReason};
use super::cluster::{CHANNEL, append_event};
use super::{Store, StoreError, UnixMicros};
use crate::domain::number_to_row;

/// A new intent, to be stored.
pub(crate) struct NewIntent {
    /// The intent, as the API returns it.
    pub intent: Intent,
    /// Host that the intent makes a member, if any.
    pub newcomer: Option<IntentNewcomer>,
    /// Name of the newcomer, or id of the member that the intent is about.
    pub subject: String,
    /// Name of the admin who signed the intent.
    pub made_by: String,
    /// Time of the redeem, if the newcomer waits under a replacement policy.
    pub seen_us: Option<UnixMicros>,
}

/// Host that redeemed a join ticket.
pub(crate) struct IntentNewcomer {
    /// Id of the ticket's grant.
    pub grant: String,
    /// Public key of the host's agent.
    pub agent: PublicKey,
    /// Source address of the redeem.
    pub address: String,
    /// Virtual machine of the host, if the token requires an identity document.
    pub instance: Option<String>,
    /// Zone of the host, if its record names one.
    pub zone: Option<String>,
}

/// A recovery statement that discovery is about to follow, and the fields of the event about it.
pub(crate) struct NewRecovery<'a> {
    /// Position in the chain, counted from 1.
    pub number: usize,
    pub jws: &'a Jws,
    /// Id of the new Raft cluster, in hexadecimal.
    pub raft_cluster: &'a str,
    /// Name of the admin who signed the statement.
    pub by: &'a str,
}

/// Stores a recovery statement that discovery follows from now on. Deletes members' reports about
/// the lost cluster.
pub(crate) async fn store_followed_recovery(
    connection: &mut PgConnection,
    cluster: Uuid,
    now: formation::UnixMicros,
    new: &NewRecovery<'_>,
) -> Result<(), StoreError> {
    insert_recovery(connection, cluster, now, (new.number, new.jws, true)).await?;
    for sql in [
        "DELETE FROM directory_reports WHERE cluster_id = $1",
        "DELETE FROM directory WHERE cluster_id = $1",
        // The recovered cluster numbers its configurations from the start, so the lost cluster's
        // numbers mean nothing there.
        "UPDATE intents SET planned_at = NULL WHERE cluster_id = $1 AND state = 'open'
             AND redeem IS NOT NULL",
    ] {
        sqlx::query(sql).bind(cluster).execute(&mut *connection).await?;
    }
    let body = serde_json::json!({
        "number": new.number, "raft_cluster": new.raft_cluster, "by": new.by,
        "statement": new.jws.hash().to_string(),
    });
    append_event(connection, cluster, now, "recovered", &body).await?;
    increment_revision(connection, cluster).await?;
    Ok(())
}

/// Stores a recovery statement that competes with the chain of recoveries that discovery follows.
/// Returns `false` if a competing statement with this number was stored before.
pub(crate) async fn store_competing_recovery(
    connection: &mut PgConnection,
    cluster: Uuid,
    now: formation::UnixMicros,
    number: usize,
    jws: &Jws,
) -> Result<bool, StoreError> {
    if !insert_recovery(connection, cluster, now, (number, jws, false)).await? {
        return Ok(false);
    }
    let body = serde_json::json!({ "number": number, "statement": jws.hash().to_string() });
    append_event(connection, cluster, now, "recovery_contested", &body).await?;
    increment_revision(connection, cluster).await?;
    Ok(true)
}

/// Inserts a recovery statement. Returns `false` if the cluster has one with the same number and
/// the same value of `followed`.
async fn insert_recovery(
    connection: &mut PgConnection,
    cluster: Uuid,
    now: formation::UnixMicros,
    (number, jws, followed): (usize, &Jws, bool),
) -> Result<bool, StoreError> {
    let inserted = sqlx::query(
        "INSERT INTO recoveries (cluster_id, number, jws, followed, at_us)
         VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING",
    )
    .bind(cluster)
    .bind(i32::try_from(number).unwrap_or(i32::MAX))
    .bind(jws.as_str())
    .bind(followed)
    .bind(number_to_row(now.0)?)
    .execute(connection)
    .await?;
    Ok(inserted.rows_affected() > 0)
}

/// Increments the cluster's change counter, and notifies other processes.
pub(super) async fn increment_revision(
    connection: &mut PgConnection,
    cluster: Uuid,
) -> Result<u64, StoreError> {
    let rev: i64 = sqlx::query_scalar(
        "WITH next AS (UPDATE clusters SET rev = rev + 1 WHERE id = $1 RETURNING rev),
              told AS (SELECT pg_notify($2, $1::text))
         SELECT rev FROM next, told",
    )
    .bind(cluster)
    .bind(CHANNEL)
    .fetch_one(connection)
    .await?;
    Ok(rev.unsigned_abs())
}

/// SQL for one change of a cluster, for which agents wait in long polls. It increments the
/// cluster's change counter, appends an event, notifies other processes, and runs `$write`.
/// `$write` can read the counter's new value from `next`. [`query_change`] binds `$1` to `$5`:
/// cluster, channel, and the event's time, kind and body.
macro_rules! change {
    ($write:literal) => {
        concat!(
            "WITH next AS (UPDATE clusters SET rev = rev + 1 WHERE id = $1 RETURNING rev),
                  event AS (INSERT INTO events (stream, number, at_us, kind, body, previous, hash)
                      VALUES ($1, 1, $3, $4, $5, '', '')),
                  written AS (",
            $write,
            ") SELECT rev, pg_notify($2, $1::text) FROM next"
        )
    };
}

/// Makes the query for an SQL text of [`change!`]. The query returns the new value of the cluster's
/// change counter.
fn query_change<'q>(
    sql: &'static str,
    cluster: Uuid,
    now: formation::UnixMicros,
    kind: &'q str,
    body: &Value,
) -> Result<QueryScalar<'q, Postgres, i64, PgArguments>, StoreError> {
    let query = sqlx::query_scalar(sql).bind(cluster).bind(CHANNEL).bind(number_to_row(now.0)?);
    Ok(query.bind(kind).bind(body.to_string()))
}

/// Stores a new intent and its event. Returns the intent as stored.
pub(crate) async fn insert(
    connection: &mut PgConnection,
    now: formation::UnixMicros,
    new: NewIntent,
) -> Result<StoredIntent, StoreError> {
    const INSERT: &str = change!(
        "INSERT INTO intents (cluster_id, operation, verb, authority, redeem, grant_id, agent_key,
             subject, address, planned_at, made_us, made_by, expires_us, seen_us, instance, state,
             rev)
         SELECT $1, $6, $7, $8, $9, $10, $11, $12, $13, $14, $3, $15, $16, $17, $18, 'open', rev
         FROM next"
    );
    let NewIntent { intent, newcomer, subject, made_by, seen_us } = new;
    let mut body = serde_json::json!({
        "operation": intent.operation.to_string(), "verb": intent.verb.as_str(),
        "subject": subject, "by": made_by,
        "address": newcomer.as_ref().map(|host| host.address.as_str()),
    });
    if let Some(host) = &newcomer {
        body["grant"] = serde_json::json!(host.grant);
        body["key"] = serde_json::json!(host.agent.key_id().to_string());
        for (name, value) in [("zone", &host.zone), ("instance", &host.instance)] {
            if let Some(value) = value {
                body[name] = serde_json::json!(value);
            }
        }
    }
    let (grant, agent, address, instance) = match newcomer {
        Some(host) => (Some(host.grant), Some(host.agent), Some(host.address), host.instance),
        None => (None, None, None, None),
    };
    let rev = query_change(INSERT, intent.cluster, now, "intent", &body)?
        .bind(&intent.operation.0[..])
        .bind(intent.verb.as_str())
        .bind(intent.authority.as_str())
        .bind(intent.redeem.as_ref().map(|jws| jws.as_str()))
        .bind(grant)
        .bind(agent.map(|key| key.as_bytes().to_vec()))
        .bind(&subject)
        .bind(&address)
        .bind(intent.planned_at.map(number_to_row).transpose()?)
        .bind(&made_by)
        .bind(number_to_row(intent.expires_at.saturating_mul(1_000_000))?)
        .bind(seen_us)
        .bind(instance)
        .fetch_one(connection)
        .await?;
    Ok(StoredIntent {
        intent,
        state: IntentState::Open,
        rev: rev.unsigned_abs(),
        subject,
        agent,
        made_by,
        made_us: now.0 as UnixMicros,
        outcome: None,
        member: None,
        reported_by: None,
        position: None,
        contested_by: None,
        address,
        wait_reason: None,
        recovery: 0,
        seen_us,
        replaces: None,
    })
}

/// How long a standby is kept after its last request, in microseconds: a day.
const GONE_STANDBY_KEPT_US: UnixMicros = 86_400 * 1_000_000;

/// Deletes a cluster's standbys whose last request is more than a day old. Hosts that come and go
/// would otherwise fill the table.
pub(crate) async fn delete_gone_standbys(
    connection: &mut PgConnection,
    cluster: Uuid,
    now: formation::UnixMicros,
) -> Result<(), StoreError> {
    sqlx::query(
        "DELETE FROM intents WHERE cluster_id = $1 AND state = 'open' AND seen_us < $2
             AND member_id IS NULL",
    )
    .bind(cluster)
    .bind((now.0 as UnixMicros).saturating_sub(GONE_STANDBY_KEPT_US))
    .execute(connection)
    .await?;
    Ok(())
}

/// Notes that a standby was heard of at `now`. If it `was_gone`, increments the cluster's change
/// counter, so that agents learn that it waits again.
pub(crate) async fn note_standby(
    connection: &mut PgConnection,
    now: UnixMicros,
    known: &StoredIntent,
    was_gone: bool,
) -> Result<StoredIntent, StoreError> {
    let cluster = known.intent.cluster;
    let rev = match was_gone {
        true => increment_revision(connection, cluster).await?,
        false => known.rev,
    };
    sqlx::query(
        "UPDATE intents SET seen_us = $3, rev = $4
         WHERE cluster_id = $1 AND operation = $2 AND state = 'open'",
    )
    .bind(cluster)
    .bind(&known.intent.operation.0[..])
    .bind(now)
    .bind(number_to_row(rev)?)
    .execute(connection)
    .await?;
    Ok(StoredIntent { seen_us: Some(now), rev, ..known.clone() })
}

impl Store {
    /// Notes that a standby was heard of at `now`, as [`note_standby`] does.
    pub(crate) async fn note_standby(
        &self,
        known: &StoredIntent,
        now: UnixMicros,
        was_gone: bool,
    ) -> Result<(), StoreError> {
        let mut transaction = self.begin("BEGIN").await?;
        note_standby(&mut transaction, now, known, was_gone).await?;
        transaction.commit().await?;
        Ok(())
    }
}

/// Result of an intent: its new state, the reported outcome, and the position in the cluster's log.
pub(crate) struct IntentResult<'a> {
    pub state: IntentState,
    /// The reported outcome. `None` if the intent was withdrawn.
    pub outcome: Option<&'a Outcome>,
    /// Name of the reporter.
    pub by: &'a str,
    /// Raft term and index that the agent reported together with the outcome.
    pub position: Option<(u64, u64)>,
    /// Number of recoveries that the cluster has gone through.
    pub recovery: usize,
}

/// Stores the result of an intent. Returns the intent as stored.
pub(crate) async fn store_result(
    connection: &mut PgConnection,
    now: formation::UnixMicros,
    known: &StoredIntent,
    became: &IntentResult<'_>,
) -> Result<StoredIntent, StoreError> {
    const UPDATE: &str = change!(
        "UPDATE intents SET state = $7, outcome = $8, reported_by = $9, raft_term = $10,
             raft_index = $11, rev = next.rev, member_id = $12, recovery = $13, replaces = $14
         FROM next WHERE cluster_id = $1 AND operation = $6"
    );
    let intent = &known.intent;
    let newcomer = match intent.verb {
        Verb::Join | Verb::Replace => became.outcome.and_then(Outcome::member),
        Verb::Remove | Verb::Update => None,
    };
    let member = known.member.or(newcomer);
    let recovery = if known.member.is_none() { became.recovery } else { known.recovery };
    let replaces = match became.outcome {
        // A reported `replaces` counts only for a standby, whose intent has `seen_us`. A ticket
        // itself names the member that its newcomer replaces.
        Some(Outcome::Added { replaces: Some(member), .. }) if known.seen_us.is_some() => {
            Some(*member)
        }
        _ => known.replaces,
    };
    let outcome = became.outcome.map(|outcome| serde_json::json!(outcome).to_string());
    let number = |number: Option<u64>| number.map(number_to_row).transpose();
    let body = serde_json::json!({
        "operation": intent.operation.to_string(), "state": became.state.as_str(),
        "by": became.by, "outcome": became.outcome,
    });
    let rev = query_change(UPDATE, intent.cluster, now, "intent", &body)?
        .bind(&intent.operation.0[..])
        .bind(became.state.as_str())
        .bind(outcome)
        .bind(became.by)
        .bind(number(became.position.map(|(term, _)| term))?)
        .bind(number(became.position.map(|(_, index)| index))?)
        .bind(member.map(|member| member.0.to_vec()))
        .bind(i32::try_from(recovery).unwrap_or(i32::MAX))
        .bind(replaces.map(|member| member.0.to_vec()))
        .fetch_one(connection)
        .await?;
    Ok(StoredIntent {
        replaces,
        state: became.state,
        outcome: became.outcome.cloned(),
        reported_by: Some(became.by.to_owned()),
        position: became.position,
        rev: rev.unsigned_abs(),
        member,
        recovery,
        ..known.clone()
    })
}

/// Stores the reason why an intent isn't carried out yet. Increments the cluster's change counter
/// only if the reason differs from the stored one. Returns the intent as stored.
pub(crate) async fn note_wait(
    connection: &mut PgConnection,
    now: formation::UnixMicros,
    known: &StoredIntent,
    reason: String,
    by: String,
) -> Result<StoredIntent, StoreError> {
    let is_new = known.wait_reason.as_ref().is_none_or(|waits| waits.reason != reason);
    let cluster = known.intent.cluster;
    let rev = match is_new {
        true => increment_revision(connection, cluster).await?,
        false => known.rev,
    };
    sqlx::query(
        "UPDATE intents SET waits_for = $3, waits_by = $4, waits_us = $5, rev = $6
         WHERE cluster_id = $1 AND operation = $2",
    )
    .bind(cluster)
    .bind(&known.intent.operation.0[..])
    .bind(&reason)
    .bind(&by)
    .bind(number_to_row(now.0)?)
    .bind(number_to_row(rev)?)
    .execute(connection)
    .await?;
    let wait_reason = Some(WaitReason { reason, by, at_us: now.0 as UnixMicros });
    Ok(StoredIntent { wait_reason, rev, ..known.clone() })
}

/// Records that another key tried to redeem a used ticket. Returns `false` if that was recorded
/// before.
pub(crate) async fn note_ticket_reuse(
    connection: &mut PgConnection,
    now: formation::UnixMicros,
    known: &StoredIntent,
    address: &str,
) -> Result<bool, StoreError> {
    const UPDATE: &str =
        change!("UPDATE intents SET contested = $7 WHERE cluster_id = $1 AND operation = $6");
    if known.contested_by.is_some() {
        return Ok(false);
    }
    let operation = known.intent.operation;
    let body = serde_json::json!({ "operation": operation.to_string(), "address": address });
    query_change(UPDATE, known.intent.cluster, now, "ticket_contested", &body)?
        .bind(&operation.0[..])
        .bind(address)
        .fetch_one(connection)
        .await?;
    Ok(true)
}

/// Stores a service statement, which replaces the cluster's previous one. `by` is the name of the
/// admin who signed it.
pub(crate) async fn store_service(
    connection: &mut PgConnection,
    cluster: Uuid,
    now: formation::UnixMicros,
    service: &VerifiedService,
    by: &str,
) -> Result<(), StoreError> {
    const UPSERT: &str = change!(
        "INSERT INTO service_statements (cluster_id, sequence, jws, stored_us)
         VALUES ($1, $6, $7, $3)
         ON CONFLICT (cluster_id) DO UPDATE SET sequence = $6, jws = $7, stored_us = $3"
    );
    let body = serde_json::json!({
        "sequence": service.sequence(), "urls": service.statement().urls, "by": by,
        "pins": service.statement().pins, "statement": service.jws().hash().to_string(),
    });
    query_change(UPSERT, cluster, now, "service_announced", &body)?
        .bind(number_to_row(service.sequence())?)
        .bind(service.jws().as_str())
        .fetch_one(connection)
        .await?;
    Ok(())
}

/// Stores a member's report, which replaces the member's previous one.
pub(crate) async fn note_report(
    connection: &mut PgConnection,
    cluster: Uuid,
    member: MemberId,
    said: &MembershipReport,
) -> Result<(), StoreError> {
    let configuration = said.membership.configuration.map(number_to_row).transpose()?;
    sqlx::query(
        "INSERT INTO directory_reports (cluster_id, member_id, configuration, raft_term, raft_index,
             leader, membership, at_us) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
         ON CONFLICT (cluster_id, member_id) DO UPDATE SET configuration = $3, raft_term = $4,
             raft_index = $5, leader = $6, membership = $7, at_us = $8",
    )
    .bind(cluster)
    .bind(&member.0[..])
    .bind(configuration)
    .bind(number_to_row(said.term)?)
    .bind(number_to_row(said.index)?)
    .bind(said.leader.map(|leader| leader.0.to_vec()))
    .bind(serde_json::json!(said.membership).to_string())
    .bind(said.at_us)
    .execute(connection)
    .await?;
    Ok(())
}

/// Stores the membership that a quorum confirmed, and the removed members in `gone`. Each of these
/// has its agent's key, its id, and a text that says who removed it.
pub(crate) async fn confirm(
    connection: &mut PgConnection,
    cluster: Uuid,
    now: formation::UnixMicros,
    view: &MembershipReport,
    gone: &[(Option<PublicKey>, MemberId, String)],
) -> Result<(), StoreError> {
    let configuration = view.membership.configuration.map(number_to_row).transpose()?;
    sqlx::query(
        "INSERT INTO directory (cluster_id, configuration, raft_term, raft_index, membership, at_us)
         VALUES ($1, $2, $3, $4, $5, $6)
         ON CONFLICT (cluster_id) DO UPDATE SET configuration = $2, raft_term = $3,
             raft_index = $4, membership = $5, at_us = $6",
    )
    .bind(cluster)
    .bind(configuration)
    .bind(number_to_row(view.term)?)
    .bind(number_to_row(view.index)?)
    .bind(serde_json::json!(view.membership).to_string())
    .bind(number_to_row(now.0)?)
    .execute(&mut *connection)
    .await?;
    for (key, member, by) in gone {
        sqlx::query(
            "INSERT INTO removed_members (cluster_id, member_id, agent_key, at_us, by)
             VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING",
        )
        .bind(cluster)
        .bind(&member.0[..])
        .bind(key.map(|key| key.as_bytes().to_vec()))
        .bind(number_to_row(now.0)?)
        .bind(by)
        .execute(&mut *connection)
        .await?;
        let body = serde_json::json!({ "member": member.to_string(), "by": by });
        append_event(connection, cluster, now, "member_removed", &body).await?;
    }
    increment_revision(connection, cluster).await?;
    Ok(())
}
