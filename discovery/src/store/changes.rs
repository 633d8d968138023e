//! Reads what is stored about changes of running clusters: intents, members' reports, removed
//! members and recoveries.

use discovery_types::api::{DirectoryView, IntentState, Membership, Outcome, PolicyView};
use discovery_types::digest::{MemberId, OperationId};
use discovery_types::intent::Intent;
use discovery_types::jws::Jws;
use discovery_types::key::PublicKey;
use discovery_types::problem::Removal;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;
use sqlx::types::Json;
use uuid::Uuid;

use super::cluster::Hex;
use super::{Store, StoreError, UnixMicros};

/// A stored intent and its progress.
#[derive(Clone, Debug)]
pub(crate) struct StoredIntent {
    /// The intent, as the API returns it.
    pub intent: Intent,
    /// Last reported state of the intent.
    pub state: IntentState,
    /// Value of the cluster's change counter (column `clusters.rev`) at the intent's last change.
    pub rev: u64,
    /// Name of the newcomer. For a removal or an update: id of the member.
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
    /// Raft term and index that the agent reported together with the outcome.
    pub position: Option<(u64, u64)>,
    /// Source address of a request that tried to redeem the same ticket with another key.
    pub contested_by: Option<String>,
    /// Source address of the newcomer.
    pub address: Option<String>,
    /// The last reason that a member's agent gave for not carrying out the intent yet.
    pub wait_reason: Option<WaitReason>,
    /// Number of recoveries that the cluster had gone through when the newcomer became a member.
    pub recovery: usize,
    /// When a host that waits under a replacement policy was last heard of. `None` for every other
    /// intent.
    pub seen_us: Option<UnixMicros>,
    /// Member that a host under a replacement policy replaces, by decision of the cluster's agents.
    pub replaces: Option<MemberId>,
}

/// A stored replacement policy that has not expired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredPolicy {
    /// Grant that an operator signed.
    pub grant: Jws,
    /// Whether an admin has revoked the policy.
    pub is_revoked: bool,
}

impl StoredPolicy {
    /// Converts the policy to the API's view of it.
    pub(crate) fn view(&self) -> PolicyView {
        PolicyView { grant: self.grant.clone(), is_revoked: self.is_revoked }
    }
}

/// Reason why an intent isn't carried out yet, as the agent on the leader's host reported it last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WaitReason {
    /// The reason, in the agent's words.
    pub reason: String,
    /// Name of the member whose agent reported the reason.
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
    /// Whether discovery follows this statement. `false` for a statement that competes with the
    /// followed one.
    pub followed: bool,
}

/// Everything stored about changes of a running cluster's members, and about the members' reports.
#[derive(Clone, Debug, Default)]
pub(crate) struct MembershipChanges {
    /// Stored intents, oldest first.
    pub intents: Vec<StoredIntent>,
    /// Members whose removal a quorum confirmed, each with the key of its agent.
    pub removed: Vec<(Option<PublicKey>, Removal)>,
    /// The membership that a quorum confirmed last.
    pub confirmed: Option<MembershipReport>,
    /// The last report of each member.
    pub reports: Vec<(MemberId, MembershipReport)>,
    /// Recovery statements, both followed and competing, in chain order.
    pub recoveries: Vec<StoredRecovery>,
    /// The newest service statement that an owner sent.
    pub service: Option<Jws>,
    /// Replacement policies that have not expired, newest first.
    pub policies: Vec<StoredPolicy>,
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

/// SQL for the columns of [`ChangeRows`], about the cluster with the id `c.id`. It selects the
/// newest 1,000 intents, and older ones only if they added a member.
macro_rules! change_columns {
    () => {
        "(SELECT coalesce(json_agg(r ORDER BY r.made_us, r.operation), '[]') FROM (
            SELECT encode(operation, 'hex') AS operation, verb, authority, redeem,
                encode(agent_key, 'hex') AS agent_key, subject, planned_at, made_us, made_by,
                expires_us, state, rev, outcome, encode(member_id, 'hex') AS member_id,
                reported_by, raft_term, raft_index, contested, address, waits_for, waits_by,
                waits_us, recovery, seen_us, encode(replaces, 'hex') AS replaces
            FROM intents WHERE cluster_id = c.id AND (member_id IS NOT NULL OR operation IN
                (SELECT operation FROM intents WHERE cluster_id = c.id
                 ORDER BY made_us DESC, operation LIMIT 1000))) r) AS intents,
         (SELECT coalesce(json_agg(r), '[]') FROM (
            SELECT encode(member_id, 'hex') AS member_id, raft_term, raft_index,
                encode(leader, 'hex') AS leader, membership, at_us
            FROM directory_reports WHERE cluster_id = c.id) r) AS directory_reports,
         (SELECT row_to_json(r) FROM (SELECT raft_term, raft_index, membership, at_us
            FROM directory WHERE cluster_id = c.id) r) AS confirmed,
         (SELECT coalesce(json_agg(r), '[]') FROM (
            SELECT encode(member_id, 'hex') AS member_id, encode(agent_key, 'hex') AS agent_key,
                at_us, by FROM removed_members WHERE cluster_id = c.id) r) AS removed,
         (SELECT coalesce(json_agg(r ORDER BY r.number, r.followed DESC), '[]') FROM (
            SELECT number, jws, followed FROM recoveries WHERE cluster_id = c.id) r) AS recoveries,
         (SELECT jws FROM service_statements WHERE cluster_id = c.id) AS service,
         (SELECT coalesce(json_agg(r), '[]') FROM (
            SELECT jws, revoked_us IS NOT NULL AS is_revoked FROM grants
            WHERE cluster_id = c.id AND kind = 'heal'
                AND expires_us > (SELECT now_us() OFFSET 0)
            ORDER BY stored_us DESC LIMIT 32) r) AS policies"
    };
}
pub(super) use change_columns;

/// Rows about a cluster's changes, as one SQL statement reads them. They are empty if the statement
/// doesn't select [`change_columns`].
#[derive(Debug, Default, sqlx::FromRow)]
#[sqlx(default)]
pub(super) struct ChangeRows {
    intents: Json<Vec<IntentRow>>,
    directory_reports: Json<Vec<MembershipReportRow>>,
    confirmed: Option<Json<MembershipReportRow>>,
    removed: Json<Vec<RemovedRow>>,
    recoveries: Json<Vec<RecoveryRow>>,
    service: Option<String>,
    policies: Json<Vec<PolicyRow>>,
}

#[derive(Debug, Deserialize)]
struct PolicyRow {
    jws: String,
    is_revoked: bool,
}

#[derive(Debug, Deserialize)]
struct IntentRow {
    operation: Hex,
    verb: String,
    authority: String,
    redeem: Option<String>,
    agent_key: Option<Hex>,
    subject: String,
    planned_at: Option<i64>,
    made_us: UnixMicros,
    made_by: String,
    expires_us: UnixMicros,
    state: String,
    rev: i64,
    outcome: Option<String>,
    member_id: Option<Hex>,
    reported_by: Option<String>,
    raft_term: Option<i64>,
    raft_index: Option<i64>,
    contested: Option<String>,
    address: Option<String>,
    waits_for: Option<String>,
    waits_by: Option<String>,
    waits_us: Option<UnixMicros>,
    recovery: i32,
    seen_us: Option<UnixMicros>,
    replaces: Option<Hex>,
}

/// Row of a member's report, or of the confirmed membership. A confirmed membership has no member
/// id and no leader.
#[derive(Debug, Deserialize)]
struct MembershipReportRow {
    member_id: Option<Hex>,
    raft_term: i64,
    raft_index: i64,
    leader: Option<Hex>,
    membership: String,
    at_us: UnixMicros,
}

#[derive(Debug, Deserialize)]
struct RemovedRow {
    member_id: Hex,
    agent_key: Option<Hex>,
    at_us: UnixMicros,
    by: String,
}

#[derive(Debug, Deserialize)]
struct RecoveryRow {
    number: i32,
    jws: String,
    followed: bool,
}

impl ChangeRows {
    /// Parses the rows of `cluster`.
    pub(super) fn parse(self, cluster: Uuid) -> Result<MembershipChanges, StoreError> {
        let intent = |row: IntentRow| {
            row.parse(cluster)
                .ok_or_else(|| StoreError::damaged(format!("an intent of cluster {cluster}")))
        };
        let report = |row: MembershipReportRow| {
            row.parse()
                .ok_or_else(|| StoreError::damaged(format!("the directory of cluster {cluster}")))
        };
        let reports = self.directory_reports.0.into_iter().filter_map(|row| {
            let member = row.member_id.clone().and_then(member_id)?;
            Some(report(row).map(|report| (member, report)))
        });
        let removed = |row: RemovedRow| {
            let removal = removal(row.member_id.0, row.at_us, row.by)?;
            Some((row.agent_key.and_then(public_key), removal))
        };
        let recovery = |row: RecoveryRow| {
            let what = || format!("a recovery statement of cluster {cluster}");
            let number = row.number.unsigned_abs() as usize;
            let jws = row.jws.parse().map_err(|_| StoreError::damaged(what()));
            jws.map(|jws| StoredRecovery { number, jws, followed: row.followed })
        };
        let policy = |row: PolicyRow| {
            let what = || format!("a replacement policy of cluster {cluster}");
            let grant = row.jws.parse().map_err(|_| StoreError::damaged(what()));
            grant.map(|grant| StoredPolicy { grant, is_revoked: row.is_revoked })
        };
        Ok(MembershipChanges {
            policies: self.policies.0.into_iter().map(policy).collect::<Result<_, _>>()?,
            service: parse_service(self.service, cluster)?,
            intents: self.intents.0.into_iter().map(intent).collect::<Result<_, _>>()?,
            removed: self.removed.0.into_iter().filter_map(removed).collect(),
            confirmed: self.confirmed.map(|Json(row)| report(row)).transpose()?,
            reports: reports.collect::<Result<_, _>>()?,
            recoveries: self.recoveries.0.into_iter().map(recovery).collect::<Result<_, _>>()?,
        })
    }
}

impl IntentRow {
    /// Parses the row. `None` if the row is damaged.
    fn parse(self, cluster: Uuid) -> Option<StoredIntent> {
        Some(StoredIntent {
            intent: Intent {
                cluster,
                verb: parse_name(&self.verb)?,
                operation: OperationId(self.operation.0.try_into().ok()?),
                authority: self.authority.parse().ok()?,
                redeem: self.redeem.map(|jws| jws.parse()).transpose().ok()?,
                planned_at: self.planned_at.map(i64::unsigned_abs),
                expires_at: self.expires_us.unsigned_abs() / 1_000_000,
            },
            state: parse_name(&self.state)?,
            rev: self.rev.unsigned_abs(),
            subject: self.subject,
            agent: self.agent_key.and_then(public_key),
            made_by: self.made_by,
            made_us: self.made_us,
            outcome: self.outcome.map(|text| serde_json::from_str(&text)).transpose().ok()?,
            member: self.member_id.and_then(member_id),
            reported_by: self.reported_by,
            position: self
                .raft_term
                .zip(self.raft_index)
                .map(|(term, index)| (term.unsigned_abs(), index.unsigned_abs())),
            contested_by: self.contested,
            address: self.address,
            wait_reason: match (self.waits_for, self.waits_by, self.waits_us) {
                (Some(reason), Some(by), Some(at_us)) => Some(WaitReason { reason, by, at_us }),
                _ => None,
            },
            recovery: self.recovery.unsigned_abs() as usize,
            seen_us: self.seen_us,
            replaces: self.replaces.and_then(member_id),
        })
    }
}

impl MembershipReportRow {
    /// Parses the row. `None` if its membership is damaged.
    fn parse(self) -> Option<MembershipReport> {
        Some(MembershipReport {
            membership: serde_json::from_str(&self.membership).ok()?,
            term: self.raft_term.unsigned_abs(),
            index: self.raft_index.unsigned_abs(),
            leader: self.leader.and_then(member_id),
            at_us: self.at_us,
        })
    }
}

fn parse_service(stored: Option<String>, cluster: Uuid) -> Result<Option<Jws>, StoreError> {
    let damaged = |_| StoreError::damaged(format!("the service statement of cluster {cluster}"));
    stored.map(|jws| jws.parse()).transpose().map_err(damaged)
}

fn member_id(Hex(bytes): Hex) -> Option<MemberId> {
    bytes.try_into().ok().map(MemberId)
}

fn public_key(Hex(bytes): Hex) -> Option<PublicKey> {
    bytes.try_into().ok().map(PublicKey::from_bytes)
}

fn removal(member: Vec<u8>, at_us: UnixMicros, by: String) -> Option<Removal> {
    Some(Removal { member: MemberId(member.try_into().ok()?), at_ms: at_us / 1_000, by })
}

/// Parses a verb or a state from its serialised name.
fn parse_name<T: DeserializeOwned>(text: &str) -> Option<T> {
    serde_json::from_value(serde_json::Value::from(text)).ok()
}

/// Reads everything stored about changes of a running cluster's members.
pub(crate) async fn membership_changes(
    connection: &mut PgConnection,
    cluster: Uuid,
) -> Result<MembershipChanges, StoreError> {
    const READ: &str = concat!("SELECT ", change_columns!(), " FROM (SELECT $1::uuid AS id) c");
    let rows: ChangeRows = sqlx::query_as(READ).bind(cluster).fetch_one(connection).await?;
    rows.parse(cluster)
}

/// Returns the removal of the member with this agent key, if the member was removed.
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
    /// Reads everything stored about changes of a running cluster's members.
    pub(crate) async fn membership_changes(
        &self,
        cluster: Uuid,
    ) -> Result<MembershipChanges, StoreError> {
        membership_changes(&mut *self.acquire().await?, cluster).await
    }

    /// Returns the newest service statement that an owner of the cluster sent.
    pub(crate) async fn service_statement(&self, cluster: Uuid) -> Result<Option<Jws>, StoreError> {
        let stored: Option<String> =
            sqlx::query_scalar("SELECT jws FROM service_statements WHERE cluster_id = $1")
                .bind(cluster)
                .fetch_optional(&mut *self.acquire().await?)
                .await?;
        parse_service(stored, cluster)
    }

    /// Returns the removal of the member with this agent key, if the member was removed.
    pub(crate) async fn removal_of(
        &self,
        cluster: Uuid,
        key: &[u8; 32],
    ) -> Result<Option<Removal>, StoreError> {
        removal_of(&mut *self.acquire().await?, cluster, key).await
    }
}
