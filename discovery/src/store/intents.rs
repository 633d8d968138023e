//! Changes of clusters that run, and what members say that their clusters are.

use discovery_formation as formation;
use discovery_types::api::{DirectoryView, IntentState, Membership, Outcome};
use discovery_types::digest::{MemberId, OperationId};
use discovery_types::intent::{Intent, Verb};
use discovery_types::key::PublicKey;
use discovery_types::problem::Removal;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;
use uuid::Uuid;

use super::cluster::{CHANNEL, event};
use super::{Micros, Store, StoreError};
use crate::domain::epoch_to_row;

/// A cluster's intents that are read: the newest, and whatever brought a member.
const INTENTS_READ: i64 = 1_000;

/// An intent as it stands.
#[derive(Clone, Debug)]
pub(crate) struct StoredIntent {
    /// As it is handed out.
    pub intent: Intent,
    /// How far it has come, as far as anybody has said.
    pub state: IntentState,
    /// The cluster's revision when it changed last.
    pub rev: u64,
    /// A newcomer's name, or the id of the member that it is about.
    pub subject: String,
    /// The newcomer's key.
    pub agent: Option<PublicKey>,
    /// Who signed it.
    pub made_by: String,
    /// When it came.
    pub made_us: Micros,
    /// What was said last.
    pub outcome: Option<Outcome>,
    /// The newcomer's id, once it is added.
    pub member: Option<MemberId>,
    /// Name of the member whose agent said so.
    pub reported_by: Option<String>,
    /// (Raft term, Raft index) of that.
    pub position: Option<(u64, u64)>,
    /// From where another key tried the same ticket.
    pub contested: Option<String>,
    /// Name of the member whose agent said last why it waits, and its words.
    pub waiting: Option<(String, String)>,
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
    made_us: Micros,
    made_by: String,
    expires_us: Micros,
    state: String,
    rev: i64,
    outcome: Option<String>,
    member_id: Option<Vec<u8>>,
    reported_by: Option<String>,
    raft_term: Option<i64>,
    raft_index: Option<i64>,
    contested: Option<String>,
    waiting: Option<String>,
    waiting_by: Option<String>,
}

/// An intent that is new.
pub(crate) struct NewIntent<'a> {
    /// As it is handed out.
    pub intent: &'a Intent,
    /// The ticket's id and who redeemed it, from where.
    pub newcomer: Option<(String, PublicKey, String)>,
    /// A newcomer's name, or the id of the member that it is about.
    pub subject: String,
    /// Who signed it.
    pub made_by: String,
}

/// All that is known of a cluster's changes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Changes {
    /// Oldest first.
    pub intents: Vec<StoredIntent>,
    /// Members that were confirmed as gone.
    pub removed: Vec<(Option<PublicKey>, Removal)>,
    /// What was confirmed last.
    pub confirmed: Option<Said>,
    /// What each member said last.
    pub said: Vec<(MemberId, Said)>,
}

/// What somebody said that a cluster is, and where in its log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    /// The members.
    pub membership: Membership,
    /// Raft term.
    pub term: u64,
    /// Raft index.
    pub index: u64,
    /// The leader.
    pub leader: Option<MemberId>,
    /// When.
    pub at_us: Micros,
}

#[derive(sqlx::FromRow)]
struct SaidRow {
    member_id: Option<Vec<u8>>,
    raft_term: i64,
    raft_index: i64,
    leader: Option<Vec<u8>>,
    membership: String,
    at_us: Micros,
}

#[derive(sqlx::FromRow)]
struct RemovedRow {
    member_id: Vec<u8>,
    agent_key: Option<Vec<u8>>,
    at_us: Micros,
    by: String,
}

impl SaidRow {
    fn said(self, cluster: Uuid) -> Result<(Option<MemberId>, Said), StoreError> {
        let membership = serde_json::from_str(&self.membership)
            .map_err(|_| StoreError::damaged(format!("the directory of cluster {cluster}")))?;
        let id = |bytes: Option<Vec<u8>>| bytes.and_then(|b| b.try_into().ok()).map(MemberId);
        let said = Said {
            membership,
            term: self.raft_term.unsigned_abs(),
            index: self.raft_index.unsigned_abs(),
            leader: id(self.leader),
            at_us: self.at_us,
        };
        Ok((id(self.member_id), said))
    }
}

impl Said {
    /// As it is shown.
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

fn intent(cluster: Uuid, row: IntentRow) -> Result<StoredIntent, StoreError> {
    let damaged = || StoreError::damaged(format!("an intent of cluster {cluster}"));
    let operation = OperationId(row.operation.try_into().map_err(|_| damaged())?);
    let key = |bytes: Vec<u8>| bytes.try_into().ok().map(PublicKey::from_bytes);
    Ok(StoredIntent {
        intent: Intent {
            cluster,
            verb: word(&row.verb).ok_or_else(damaged)?,
            operation,
            authority: row.authority.parse().map_err(|_| damaged())?,
            redeem: row.redeem.map(|jws| jws.parse()).transpose().map_err(|_| damaged())?,
            planned_at: row.planned_at.map(i64::unsigned_abs),
            expires_at: row.expires_us.unsigned_abs() / 1_000_000,
        },
        state: word(&row.state).ok_or_else(damaged)?,
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
        contested: row.contested,
        waiting: row.waiting_by.zip(row.waiting),
    })
}

/// A verb or a state, from its name.
fn word<T: DeserializeOwned>(text: &str) -> Option<T> {
    serde_json::from_value(serde_json::Value::from(text)).ok()
}

const INTENT: &str = "SELECT operation, verb, authority, redeem, agent_key, subject, planned_at, \
    made_us, made_by, expires_us, state, rev, outcome, member_id, reported_by, raft_term, \
    raft_index, contested, waiting, waiting_by FROM intents";

/// All that is known of a cluster's changes.
pub(crate) async fn changes(
    connection: &mut PgConnection,
    cluster: Uuid,
) -> Result<Changes, StoreError> {
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
    let intents = rows.into_iter().map(|row| intent(cluster, row)).collect::<Result<_, _>>()?;
    let rows: Vec<SaidRow> = sqlx::query_as(
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
        match row.said(cluster)? {
            (Some(member), report) => said.push((member, report)),
            (None, view) => confirmed = Some(view),
        }
    }
    let rows: Vec<RemovedRow> = sqlx::query_as(
        "SELECT member_id, agent_key, at_us, by FROM removed_members WHERE cluster_id = $1",
    )
    .bind(cluster)
    .fetch_all(connection)
    .await?;
    let removed = rows.into_iter().filter_map(|row| {
        let key = row.agent_key.and_then(|bytes| bytes.try_into().ok()).map(PublicKey::from_bytes);
        Some((key, removal(row.member_id, row.at_us, row.by)?))
    });
    Ok(Changes { intents, removed: removed.collect(), confirmed, said })
}

fn removal(member: Vec<u8>, at_us: Micros, by: String) -> Option<Removal> {
    Some(Removal { member: MemberId(member.try_into().ok()?), at_ms: at_us / 1_000, by })
}

/// The cluster's next revision, announced.
pub(crate) async fn next_rev(
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

/// Stores a new intent.
pub(crate) async fn insert(
    connection: &mut PgConnection,
    now: formation::Micros,
    new: &NewIntent<'_>,
) -> Result<(), StoreError> {
    let intent = new.intent;
    let rev = next_rev(connection, intent.cluster).await?;
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
    .bind(intent.planned_at.map(epoch_to_row).transpose()?)
    .bind(epoch_to_row(now.0)?)
    .bind(&new.made_by)
    .bind(epoch_to_row(intent.expires_at.saturating_mul(1_000_000))?)
    .bind(epoch_to_row(rev)?)
    .execute(&mut *connection)
    .await?;
    let body = serde_json::json!({
        "operation": intent.operation.to_string(), "verb": intent.verb.as_str(),
        "subject": new.subject, "by": new.made_by, "address": address,
    });
    event(connection, intent.cluster, now, "intent", &body).await
}

/// What became of one: its state, who says so, and where in the cluster's log.
pub(crate) struct Became<'a> {
    /// From now on.
    pub state: IntentState,
    /// What was said; none where somebody takes it back.
    pub outcome: Option<&'a Outcome>,
    /// By whom.
    pub by: &'a str,
    /// (Raft term, Raft index).
    pub position: Option<(u64, u64)>,
}

/// Stores what became of an intent.
pub(crate) async fn carry(
    connection: &mut PgConnection,
    now: formation::Micros,
    intent: &Intent,
    became: &Became<'_>,
) -> Result<(), StoreError> {
    let rev = next_rev(connection, intent.cluster).await?;
    let newcomer = match intent.verb {
        Verb::Join | Verb::Replace => became.outcome.and_then(Outcome::member),
        Verb::Remove | Verb::Update => None,
    };
    let said = became.outcome.map(|outcome| serde_json::json!(outcome).to_string());
    let number = |number: Option<u64>| number.map(epoch_to_row).transpose();
    sqlx::query(
        "UPDATE intents SET state = $3, outcome = $4, reported_by = $5, raft_term = $6,
             raft_index = $7, rev = $8, member_id = coalesce(member_id, $9), waiting = NULL,
             waiting_by = NULL
         WHERE cluster_id = $1 AND operation = $2",
    )
    .bind(intent.cluster)
    .bind(&intent.operation.0[..])
    .bind(became.state.as_str())
    .bind(&said)
    .bind(became.by)
    .bind(number(became.position.map(|(term, _)| term))?)
    .bind(number(became.position.map(|(_, index)| index))?)
    .bind(epoch_to_row(rev)?)
    .bind(newcomer.map(|member| member.0.to_vec()))
    .execute(&mut *connection)
    .await?;
    let body = serde_json::json!({
        "operation": intent.operation.to_string(), "state": became.state.as_str(),
        "by": became.by, "outcome": became.outcome,
    });
    event(connection, intent.cluster, now, "intent", &body).await
}

/// Stores why an intent isn't carried on now, in the words of the agent of the member `by`.
pub(crate) async fn note_waiting(
    connection: &mut PgConnection,
    intent: &Intent,
    by: &str,
    reason: &str,
) -> Result<(), StoreError> {
    let rev = next_rev(connection, intent.cluster).await?;
    sqlx::query(
        "UPDATE intents SET waiting = $3, waiting_by = $4, rev = $5
         WHERE cluster_id = $1 AND operation = $2",
    )
    .bind(intent.cluster)
    .bind(&intent.operation.0[..])
    .bind(reason)
    .bind(by)
    .bind(epoch_to_row(rev)?)
    .execute(connection)
    .await?;
    Ok(())
}

/// Notes that another key tried a ticket that is taken. `false`: somebody has before.
pub(crate) async fn contest(
    connection: &mut PgConnection,
    now: formation::Micros,
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
    next_rev(connection, intent.cluster).await?;
    let body = serde_json::json!({
        "operation": intent.operation.to_string(), "address": address,
    });
    event(connection, intent.cluster, now, "ticket_contested", &body).await?;
    Ok(true)
}

/// Stores what a member says.
pub(crate) async fn note_report(
    connection: &mut PgConnection,
    cluster: Uuid,
    member: MemberId,
    said: &Said,
) -> Result<(), StoreError> {
    let configuration = said.membership.configuration.map(epoch_to_row).transpose()?;
    sqlx::query(
        "INSERT INTO directory_reports (cluster_id, member_id, configuration, raft_term, raft_index,
             leader, membership, at_us) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
         ON CONFLICT (cluster_id, member_id) DO UPDATE SET configuration = $3, raft_term = $4,
             raft_index = $5, leader = $6, membership = $7, at_us = $8",
    )
    .bind(cluster)
    .bind(&member.0[..])
    .bind(configuration)
    .bind(epoch_to_row(said.term)?)
    .bind(epoch_to_row(said.index)?)
    .bind(said.leader.map(|leader| leader.0.to_vec()))
    .bind(serde_json::json!(said.membership).to_string())
    .bind(said.at_us)
    .execute(connection)
    .await?;
    Ok(())
}

/// Stores what was confirmed, and who is gone with it: key, id, and by whose order.
pub(crate) async fn confirm(
    connection: &mut PgConnection,
    cluster: Uuid,
    now: formation::Micros,
    view: &Said,
    gone: &[(Option<PublicKey>, MemberId, String)],
) -> Result<(), StoreError> {
    let configuration = view.membership.configuration.map(epoch_to_row).transpose()?;
    sqlx::query(
        "INSERT INTO directory (cluster_id, configuration, raft_term, raft_index, membership, at_us)
         VALUES ($1, $2, $3, $4, $5, $6)
         ON CONFLICT (cluster_id) DO UPDATE SET configuration = $2, raft_term = $3,
             raft_index = $4, membership = $5, at_us = $6",
    )
    .bind(cluster)
    .bind(configuration)
    .bind(epoch_to_row(view.term)?)
    .bind(epoch_to_row(view.index)?)
    .bind(serde_json::json!(view.membership).to_string())
    .bind(epoch_to_row(now.0)?)
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
        .bind(epoch_to_row(now.0)?)
        .bind(by)
        .execute(&mut *connection)
        .await?;
        let body = serde_json::json!({ "member": member.to_string(), "by": by });
        event(connection, cluster, now, "member_removed", &body).await?;
    }
    next_rev(connection, cluster).await?;
    Ok(())
}

/// When and by whom the member of this agent was removed, if it was.
pub(crate) async fn removal_of(
    connection: &mut PgConnection,
    cluster: Uuid,
    key: &[u8; 32],
) -> Result<Option<Removal>, StoreError> {
    let row: Option<(Vec<u8>, Micros, String)> = sqlx::query_as(
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
    /// All that is known of a cluster's changes.
    pub(crate) async fn changes(&self, cluster: Uuid) -> Result<Changes, StoreError> {
        changes(&mut *self.acquire().await?, cluster).await
    }

    /// When and by whom the member of this agent was removed, if it was.
    pub(crate) async fn removal_of(
        &self,
        cluster: Uuid,
        key: &[u8; 32],
    ) -> Result<Option<Removal>, StoreError> {
        removal_of(&mut *self.acquire().await?, cluster, key).await
    }
}
