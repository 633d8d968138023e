//! Queries on changes of running clusters, and on members' reports about their clusters.

use discovery_formation as formation;
use discovery_types::api::{DirectoryView, IntentState, Membership, Outcome};
use discovery_types::digest::{MemberId, OperationId};
use discovery_types::intent::{Intent, Verb};
use discovery_types::jws::Jws;
use discovery_types::key::PublicKey;
use discovery_types::problem::Removal;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;
use uuid::Uuid;

use super::cluster::{CHANNEL, append_event};
use super::{Store, StoreError, UnixMicros};
use crate::domain::number_to_row;

/// Maximum number of a cluster's intents that are read: the newest. Intents that added a member are
/// always read.
const INTENTS_READ: i64 = 1_000;

/// A stored intent and its progress.
#[derive(Clone, Debug)]
pub(crate) struct StoredIntent {
    /// The intent, as the API returns it.
    pub intent: Intent,
    /// Last reported state of the intent.
    pub state: IntentState,
    /// Revision of the cluster at the intent's last change.
    pub rev: u64,
    /// Name of the newcomer, or id of the member that the intent is about.
    pub subject: String,
    /// Public key of the newcomer's agent.
    pub agent: Option<PublicKey>,
    /// Name of the admin who signed the intent.
    pub made_by: String,
    /// When the intent was stored.
    pub made_us: UnixMicros,
    /// The last reported outcome.
    pub outcome: Option<Outcome>,
    /// Member id of the newcomer, once it is added.
    pub member: Option<MemberId>,
    /// Name of the member whose agent reported the outcome.
    pub reported_by: Option<String>,
    /// (Raft term, Raft index) of the reported outcome.
    pub position: Option<(u64, u64)>,
    /// Source address of another key that tried to redeem the same ticket.
    pub contested_by: Option<String>,
    /// Source address of the newcomer.
    pub address: Option<String>,
    /// Why the intent waits, as a member's agent reported last.
    pub wait_reason: Option<WaitReason>,
    /// Number of recoveries that the cluster had gone through when the newcomer became a member.
    pub recovery: usize,
}

/// Why an intent waits, as the leader's agent reported last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WaitReason {
    /// The reason, in the agent's words.
    pub reason: String,
    /// Name of the member whose agent reported it.
    pub by: String,
    /// When the reason was reported.
    pub at_us: UnixMicros,
}

/// A stored recovery statement of a cluster.
#[derive(Clone, Debug)]
pub(crate) struct StoredRecovery {
    /// Position in the chain, counted from 1.
    pub number: usize,
    pub jws: Jws,
    /// Whether discovery follows this statement. False if the statement competes with the chain
    /// that discovery follows.
    pub followed: bool,
}

#[derive(sqlx::FromRow)]
struct IntentRow {
    operation: Vec<u8>,
    verb: String,
    authority: String,
    redeem: Option<String>,
    agent_key: Option<Vec<u8>>,
    subject: String,
    planned_at: Option<i64>,
    made_us: UnixMicros,
    made_by: String,
    expires_us: UnixMicros,
    state: String,
    rev: i64,
    outcome: Option<String>,
    member_id: Option<Vec<u8>>,
    reported_by: Option<String>,
    raft_term: Option<i64>,
    raft_index: Option<i64>,
    contested: Option<String>,
    address: Option<String>,
    waits_for: Option<String>,
    waits_by: Option<String>,
    waits_us: Option<UnixMicros>,
    recovery: i32,
}

/// A new intent, to be stored.
pub(crate) struct NewIntent<'a> {
    /// The intent, as the API returns it.
    pub intent: &'a Intent,
    /// Ticket id, agent key and source address of the newcomer.
    pub newcomer: Option<(String, PublicKey, String)>,
    /// Name of the newcomer, or id of the member that the intent is about.
    pub subject: String,
    /// Name of the admin who signed the intent.
    pub made_by: String,
}

/// Everything stored about a cluster's changes and its members' reports.
#[derive(Clone, Debug, Default)]
pub(crate) struct MembershipChanges {
    /// Stored intents, oldest first.
    pub intents: Vec<StoredIntent>,
    /// Members whose removal was confirmed, with the keys of their agents.
    pub removed: Vec<(Option<PublicKey>, Removal)>,
    /// The membership that a quorum confirmed last.
    pub confirmed: Option<MembershipReport>,
    /// The last report of each member.
    pub reports: Vec<(MemberId, MembershipReport)>,
    /// Recovery statements, both followed and competing, in chain order.
    pub recoveries: Vec<StoredRecovery>,
}

/// A report of a cluster's membership, with its position in the Raft log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MembershipReport {
    pub membership: Membership,
    /// Raft term of the report.
    pub term: u64,
    /// Raft index of the report.
    pub index: u64,
    /// The leader that the reporter saw.
    pub leader: Option<MemberId>,
    /// When the report was stored.
    pub at_us: UnixMicros,
}

#[derive(sqlx::FromRow)]
struct MembershipReportRow {
    member_id: Option<Vec<u8>>,
    raft_term: i64,
    raft_index: i64,
    leader: Option<Vec<u8>>,
    membership: String,
    at_us: UnixMicros,
}

/// Row of a removed member or of a recovery statement. A statement has a `number`, and its JWS is
/// in `by`.
#[derive(sqlx::FromRow)]
struct RemovalOrRecoveryRow {
    member_id: Option<Vec<u8>>,
    agent_key: Option<Vec<u8>>,
    at_us: UnixMicros,
    by: String,
    number: Option<i32>,
    followed: Option<bool>,
}

impl MembershipReportRow {
    fn into_report(
        self,
        cluster: Uuid,
    ) -> Result<(Option<MemberId>, MembershipReport), StoreError> {
        let membership = serde_json::from_str(&self.membership)
            .map_err(|_| StoreError::damaged(format!("the directory of cluster {cluster}")))?;
        let id = |bytes: Option<Vec<u8>>| bytes.and_then(|b| b.try_into().ok()).map(MemberId);
        let said = MembershipReport {
            membership,
            term: self.raft_term.unsigned_abs(),
            index: self.raft_index.unsigned_abs(),
            leader: id(self.leader),
            at_us: self.at_us,
        };
        Ok((id(self.member_id), said))
    }
}

impl MembershipReport {
    /// Converts the report to the API's view of it.
    pub(crate) fn view(&self, confirmed: bool, reporters: usize) -> DirectoryView {
        DirectoryView {
            membership: self.membership.clone(),
            confirmed,
            raft_term: self.term,
            raft_index: self.index,
            leader: self.leader,
            reporters: reporters as u32,
            at_ms: self.at_us / 1_000,
        }
    }
}

fn to_stored_intent(cluster: Uuid, row: IntentRow) -> Result<StoredIntent, StoreError> {
    let damaged = || StoreError::damaged(format!("an intent of cluster {cluster}"));
    let operation = OperationId(row.operation.try_into().map_err(|_| damaged())?);
    let key = |bytes: Vec<u8>| bytes.try_into().ok().map(PublicKey::from_bytes);
    Ok(StoredIntent {
        intent: Intent {
            cluster,
            verb: parse_name(&row.verb).ok_or_else(damaged)?,
            operation,
            authority: row.authority.parse().map_err(|_| damaged())?,
            redeem: row.redeem.map(|jws| jws.parse()).transpose().map_err(|_| damaged())?,
            planned_at: row.planned_at.map(i64::unsigned_abs),
            expires_at: row.expires_us.unsigned_abs() / 1_000_000,
        },
        state: parse_name(&row.state).ok_or_else(damaged)?,
        rev: row.rev.unsigned_abs(),
        subject: row.subject,
        agent: row.agent_key.and_then(key),
        made_by: row.made_by,
        made_us: row.made_us,
        outcome: row
            .outcome
            .map(|text| serde_json::from_str(&text))
            .transpose()
            .map_err(|_| damaged())?,
        member: row.member_id.and_then(|bytes| bytes.try_into().ok()).map(MemberId),
        reported_by: row.reported_by,
        position: row
            .raft_term
            .zip(row.raft_index)
            .map(|(term, index)| (term.unsigned_abs(), index.unsigned_abs())),
        contested_by: row.contested,
        address: row.address,
        wait_reason: match (row.waits_for, row.waits_by, row.waits_us) {
            (Some(reason), Some(by), Some(at_us)) => Some(WaitReason { reason, by, at_us }),
            _ => None,
        },
        recovery: row.recovery.unsigned_abs() as usize,
    })
}

/// Parses a verb or a state from its serialised name.
fn parse_name<T: DeserializeOwned>(text: &str) -> Option<T> {
    serde_json::from_value(serde_json::Value::from(text)).ok()
}

const INTENT: &str = "SELECT operation, verb, authority, redeem, agent_key, subject, planned_at, \
    made_us, made_by, expires_us, state, rev, outcome, member_id, reported_by, raft_term, \
     raft_index, contested, address, waits_for, waits_by, waits_us, recovery FROM intents";

/// Reads everything stored about a cluster's changes.
pub(crate) async fn membership_changes(
    connection: &mut PgConnection,
    cluster: Uuid,
) -> Result<MembershipChanges, StoreError> {
    let sql = format!(
        "{INTENT} WHERE cluster_id = $1 AND (member_id IS NOT NULL OR operation IN
             (SELECT operation FROM intents WHERE cluster_id = $1
              ORDER BY made_us DESC, operation LIMIT $2))
         ORDER BY made_us, operation"
    );
    let rows: Vec<IntentRow> = sqlx::query_as(sqlx::AssertSqlSafe(sql))
        .bind(cluster)
        .bind(INTENTS_READ)
        .fetch_all(&mut *connection)
        .await?;
    let intents =
        rows.into_iter().map(|row| to_stored_intent(cluster, row)).collect::<Result<_, _>>()?;
    let rows: Vec<MembershipReportRow> = sqlx::query_as(
        "SELECT member_id, raft_term, raft_index, leader, membership, at_us
         FROM directory_reports WHERE cluster_id = $1
         UNION ALL SELECT NULL, raft_term, raft_index, NULL, membership, at_us
         FROM directory WHERE cluster_id = $1",
    )
    .bind(cluster)
    .fetch_all(&mut *connection)
    .await?;
    let (mut said, mut confirmed) = (Vec::new(), None);
    for row in rows {
        match row.into_report(cluster)? {
            (Some(member), report) => said.push((member, report)),
            (None, view) => confirmed = Some(view),
        }
    }
    // One query reads both tables, because agents ask for intents often.
    let rows: Vec<RemovalOrRecoveryRow> = sqlx::query_as(
        "SELECT member_id, agent_key, at_us, by, NULL::integer AS number, NULL::boolean AS followed
         FROM removed_members WHERE cluster_id = $1
         UNION ALL SELECT NULL, NULL, at_us, jws, number, followed
         FROM recoveries WHERE cluster_id = $1
         ORDER BY number, followed DESC",
    )
    .bind(cluster)
    .fetch_all(connection)
    .await?;
    let (mut removed, mut recoveries) = (Vec::new(), Vec::new());
    for row in rows {
        let key = row.agent_key.and_then(|bytes| bytes.try_into().ok()).map(PublicKey::from_bytes);
        match (row.member_id, row.number.zip(row.followed)) {
            (Some(member), _) => {
                removed.extend(removal(member, row.at_us, row.by).map(|removal| (key, removal)));
            }
            (None, Some((number, followed))) => {
                let damaged =
                    |_| StoreError::damaged(format!("a recovery statement of cluster {cluster}"));
                let jws = row.by.parse().map_err(damaged)?;
                let number = number.unsigned_abs() as usize;
                recoveries.push(StoredRecovery { number, jws, followed });
            }
            (None, None) => {}
        }
    }
    Ok(MembershipChanges { intents, removed, confirmed, reports: said, recoveries })
}

/// A recovery statement that discovery is about to follow, and the data of its event.
pub(crate) struct NewRecovery<'a> {
    /// Position in the chain, counted from 1.
    pub number: usize,
    pub jws: &'a Jws,
    /// Id of the new Raft cluster, in hexadecimal.
    pub raft_cluster: &'a str,
    /// Name of the admin who signed the statement.
    pub by: &'a str,
}

/// Follows a recovery. Members' reports about the lost cluster are deleted.
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
        // The recovered cluster numbers its configurations from the start, so old numbers mean
        // nothing in it.
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

/// Inserts a recovery statement. Returns `false` if its place in the chain is taken.
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

fn removal(member: Vec<u8>, at_us: UnixMicros, by: String) -> Option<Removal> {
    Some(Removal { member: MemberId(member.try_into().ok()?), at_ms: at_us / 1_000, by })
}

/// Increments the cluster's revision and notifies other processes.
pub(crate) async fn increment_revision(
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

/// Stores a new intent and its event.
pub(crate) async fn insert(
    connection: &mut PgConnection,
    now: formation::UnixMicros,
    new: &NewIntent<'_>,
) -> Result<(), StoreError> {
    let intent = new.intent;
    let rev = increment_revision(connection, intent.cluster).await?;
    let (grant, key, address) = match &new.newcomer {
        Some((grant, key, address)) => (Some(grant), Some(key), Some(address)),
        None => (None, None, None),
    };
    sqlx::query(
        "INSERT INTO intents (cluster_id, operation, verb, authority, redeem, grant_id, agent_key,
             subject, address, planned_at, made_us, made_by, expires_us, state, rev)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, 'open', $14)",
    )
    .bind(intent.cluster)
    .bind(&intent.operation.0[..])
    .bind(intent.verb.as_str())
    .bind(intent.authority.as_str())
    .bind(intent.redeem.as_ref().map(|jws| jws.as_str()))
    .bind(grant)
    .bind(key.map(|key| key.as_bytes().to_vec()))
    .bind(&new.subject)
    .bind(address)
    .bind(intent.planned_at.map(number_to_row).transpose()?)
    .bind(number_to_row(now.0)?)
    .bind(&new.made_by)
    .bind(number_to_row(intent.expires_at.saturating_mul(1_000_000))?)
    .bind(number_to_row(rev)?)
    .execute(&mut *connection)
    .await?;
    let body = serde_json::json!({
        "operation": intent.operation.to_string(), "verb": intent.verb.as_str(),
        "subject": new.subject, "by": new.made_by, "address": address,
    });
    append_event(connection, intent.cluster, now, "intent", &body).await
}

/// Result of an intent: its state, the reporter, and the position in the cluster's log.
pub(crate) struct IntentResult<'a> {
    /// New state of the intent.
    pub state: IntentState,
    /// The reported outcome. `None` if the intent was withdrawn.
    pub outcome: Option<&'a Outcome>,
    /// Name of the reporter.
    pub by: &'a str,
    /// (Raft term, Raft index) of the outcome.
    pub position: Option<(u64, u64)>,
    /// Number of recoveries that the cluster has gone through.
    pub recovery: usize,
}

/// Stores the result of an intent.
pub(crate) async fn store_result(
    connection: &mut PgConnection,
    now: formation::UnixMicros,
    intent: &Intent,
    became: &IntentResult<'_>,
) -> Result<(), StoreError> {
    let rev = increment_revision(connection, intent.cluster).await?;
    let newcomer = match intent.verb {
        Verb::Join | Verb::Replace => became.outcome.and_then(Outcome::member),
        Verb::Remove | Verb::Update => None,
    };
    let said = became.outcome.map(|outcome| serde_json::json!(outcome).to_string());
    let number = |number: Option<u64>| number.map(number_to_row).transpose();
    sqlx::query(
        "UPDATE intents SET state = $3, outcome = $4, reported_by = $5, raft_term = $6,
             raft_index = $7, rev = $8, member_id = coalesce(member_id, $9),
             recovery = CASE WHEN member_id IS NULL THEN $10 ELSE recovery END
         WHERE cluster_id = $1 AND operation = $2",
    )
    .bind(intent.cluster)
    .bind(&intent.operation.0[..])
    .bind(became.state.as_str())
    .bind(&said)
    .bind(became.by)
    .bind(number(became.position.map(|(term, _)| term))?)
    .bind(number(became.position.map(|(_, index)| index))?)
    .bind(number_to_row(rev)?)
    .bind(newcomer.map(|member| member.0.to_vec()))
    .bind(i32::try_from(became.recovery).unwrap_or(i32::MAX))
    .execute(&mut *connection)
    .await?;
    let body = serde_json::json!({
        "operation": intent.operation.to_string(), "state": became.state.as_str(),
        "by": became.by, "outcome": became.outcome,
    });
    append_event(connection, intent.cluster, now, "intent", &body).await
}

/// Stores why an intent waits. The revision changes only if the reason is a new one.
pub(crate) async fn note_wait(
    connection: &mut PgConnection,
    now: formation::UnixMicros,
    known: &StoredIntent,
    reason: &str,
    by: &str,
) -> Result<(), StoreError> {
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
    .bind(reason)
    .bind(by)
    .bind(number_to_row(now.0)?)
    .bind(number_to_row(rev)?)
    .execute(connection)
    .await?;
    Ok(())
}

/// Stores that another key tried to redeem a used ticket. Returns `false` if that was stored
/// before.
pub(crate) async fn note_ticket_reuse(
    connection: &mut PgConnection,
    now: formation::UnixMicros,
    intent: &Intent,
    address: &str,
) -> Result<bool, StoreError> {
    let noted = sqlx::query(
        "UPDATE intents SET contested = $3
         WHERE cluster_id = $1 AND operation = $2 AND contested IS NULL",
    )
    .bind(intent.cluster)
    .bind(&intent.operation.0[..])
    .bind(address)
    .execute(&mut *connection)
    .await?;
    if noted.rows_affected() == 0 {
        return Ok(false);
    }
    increment_revision(connection, intent.cluster).await?;
    let body = serde_json::json!({
        "operation": intent.operation.to_string(), "address": address,
    });
    append_event(connection, intent.cluster, now, "ticket_contested", &body).await?;
    Ok(true)
}

/// Stores a member's report in the place of its last one.
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

/// Stores the confirmed membership, and the members removed by it: agent key, member id, and the
/// order's signer.
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

/// Returns when and by whom this agent's member was removed, if it was.
pub(crate) async fn removal_of(
    connection: &mut PgConnection,
    cluster: Uuid,
    key: &[u8; 32],
) -> Result<Option<Removal>, StoreError> {
    let row: Option<(Vec<u8>, UnixMicros, String)> = sqlx::query_as(
        "SELECT member_id, at_us, by FROM removed_members
         WHERE agent_key = $2 AND cluster_id = $1",
    )
    .bind(cluster)
    .bind(&key[..])
    .fetch_optional(connection)
    .await?;
    Ok(row.and_then(|(member, at_us, by)| removal(member, at_us, by)))
}

impl Store {
    /// Reads everything stored about a cluster's changes.
    pub(crate) async fn membership_changes(
        &self,
        cluster: Uuid,
    ) -> Result<MembershipChanges, StoreError> {
        membership_changes(&mut *self.acquire().await?, cluster).await
    }

    /// Returns when and by whom this agent's member was removed, if it was.
    pub(crate) async fn removal_of(
        &self,
        cluster: Uuid,
        key: &[u8; 32],
    ) -> Result<Option<Removal>, StoreError> {
        removal_of(&mut *self.acquire().await?, cluster, key).await
    }
}
