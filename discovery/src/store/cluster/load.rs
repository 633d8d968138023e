//! Loads a cluster from its rows.

use std::collections::BTreeMap;
use std::sync::Arc;

use discovery_formation as formation;
use discovery_formation::service::{
    Applicant, Cluster, ClusterEnd, EndCause, FrozenList, LastError, Phase, ProbeOutcome, Seating,
    Split,
};
use discovery_types::approval::Approval;
use discovery_types::convert;
use discovery_types::statement::StatementChain;
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use sqlx::types::Json;
use uuid::Uuid;

use super::super::StoreError;
use super::super::changes::{ChangeRows, change_columns};
use super::StoredCommit;
use super::records::Caches;

/// Whether the signatures in rows are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trust {
    /// Verify every signature: the normal case.
    Verify,
    /// Don't verify signatures, so that a cluster can be abandoned even if somebody changed its
    /// rows.
    Unverified,
}

/// Columns of the table `clusters`, except for those that never change.
#[derive(Debug, sqlx::FromRow)]
struct ClusterRow {
    id: Uuid,
    phase: String,
    deadline_us: i64,
    epoch: i64,
    floor: i64,
    rev: i64,
    next_place: i64,
    frozen_epoch: Option<i64>,
    frozen_h: Option<Vec<u8>>,
    frozen_statement: Option<Vec<u8>>,
    frozen_us: Option<i64>,
    unsettled: bool,
    ended_cause: Option<String>,
    ended_us: Option<i64>,
    ended_by: Option<String>,
    split_other: Option<Vec<u8>>,
    split_epoch: Option<i64>,
    error_us: Option<i64>,
    error_key: Option<Vec<u8>>,
    error_text: Option<String>,
}

#[derive(Debug, Deserialize)]
struct AgentRow {
    record: String,
    token_record: String,
    grant_id: String,
    grant: String,
    key: Hex,
    seat: Option<i16>,
    standby: Option<i64>,
    lease_us: i64,
    boot: Option<i64>,
    nonce: Option<Hex>,
    highest_epoch: i64,
    counts: i32,
    held_us: i64,
    release_epoch: Option<i64>,
    release_jws: Option<String>,
    approval: Option<String>,
}

#[derive(Debug, Deserialize)]
struct SeatRow {
    record: String,
    token_record: String,
    grant_id: String,
    grant: String,
}

#[derive(Debug, Deserialize)]
struct AckRow {
    key: Hex,
    epoch: i64,
    jws: String,
}

#[derive(Debug, Deserialize)]
struct ProbeRow {
    key: Hex,
    epoch: i64,
    row: MatrixRow,
}

#[derive(Debug, Deserialize)]
struct ReportRow {
    key: Hex,
    raft_cluster: Hex,
}

/// Bytes that Postgres sends as hex in JSON.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "String")]
pub(in crate::store) struct Hex(pub(in crate::store) Vec<u8>);

impl TryFrom<String> for Hex {
    type Error = data_encoding::DecodeError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        data_encoding::HEXLOWER.decode(text.as_bytes()).map(Hex)
    }
}

/// All rows of a cluster, and the database's state in the same snapshot.
#[derive(Debug, sqlx::FromRow)]
pub(super) struct ClusterRows {
    #[sqlx(flatten)]
    row: ClusterRow,
    /// Database time at which the rows were read. In a transaction, that is after the cluster was
    /// locked.
    pub(super) now: i64,
    pub(super) settled: bool,
    pub(super) void_before_us: i64,
    pub(super) generation: i64,
    /// Number of the database's newest decision; 0 if there is none.
    pub(super) newest: i64,
    /// Hash of the decision with the number [`LoadParameters::copied`]; `None` if the database
    /// doesn't have that decision.
    pub(super) at_copied: Option<Vec<u8>>,
    /// Sweep counter in this process's row; `None` if there is no such row.
    pub(super) beat: Option<i64>,
    /// Object id of the database to which the connection leads.
    pub(super) database_oid: i64,
    /// Object ids of the core tables.
    pub(super) table_oids: Vec<i64>,
    pub(super) statements: Vec<String>,
    /// The requested grants that belong to this cluster.
    pub(super) requested_grants: Json<Vec<RequestedGrant>>,
    agents: Json<Vec<AgentRow>>,
    seats: Json<Vec<SeatRow>>,
    acks: Json<Vec<AckRow>>,
    probes: Json<Vec<ProbeRow>>,
    reports: Json<Vec<ReportRow>>,
    revoked: Vec<String>,
    /// Revoked grants whose seats were freed.
    freed: Vec<String>,
    /// Changes since the cluster's commit. Empty unless [`LoadParameters::with_changes`] is set.
    #[sqlx(flatten)]
    pub(super) changes: ChangeRows,
    /// Row of the cluster's commit. It is loaded only if the changes are loaded, too, and a grant
    /// is requested.
    #[sqlx(default)]
    pub(super) commit: Option<Json<CommitRow>>,
}

/// Row of a cluster's commit, without the members' certificates.
#[derive(Debug, Deserialize)]
pub(super) struct CommitRow {
    h: Hex,
    document: String,
}

impl CommitRow {
    /// Parses the row of `cluster`.
    pub(super) fn parse(self, cluster: Uuid) -> Result<StoredCommit, StoreError> {
        let damaged = |_| StoreError::damaged(format!("the document of cluster {cluster}"));
        let document = self.document.parse().map_err(damaged)?;
        Ok(StoredCommit { h: self.h.0, document, leaves: None })
    }
}

/// Row of the grant that a redeem request names.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct RequestedGrant {
    /// Id of the grant.
    pub id: String,
    /// JWS of the grant.
    pub jws: String,
    /// The token's public key, from the row.
    #[serde(deserialize_with = "hex")]
    pub token_key: Vec<u8>,
    /// When the grant was stored, in microseconds.
    pub stored_us: i64,
    /// When the grant was revoked, in microseconds.
    pub revoked_us: Option<i64>,
    /// JWS of the newest confirmation.
    pub confirmation: Option<String>,
}

fn hex<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    Hex::deserialize(deserializer).map(|Hex(bytes)| bytes)
}

/// SQL that loads the clusters `$1` and the database's state in one statement, with the columns
/// `$more` in addition. It scans no table: it reads the needed rows through indexes, and only in
/// tables that can have rows in the cluster's phase. The time is read once, for all clusters.
macro_rules! load_clusters {
    ($($more:tt)*) => {
        concat!(
            "
SELECT c.id, c.phase, c.deadline_us, c.epoch, c.floor, c.rev, c.next_place, c.frozen_epoch,
    c.frozen_h, c.frozen_statement, c.frozen_us, c.unsettled, c.ended_cause, c.ended_us,
    c.ended_by, c.split_other, c.split_epoch, c.error_us, c.error_key, c.error_text,
    (SELECT now_us()) AS now, g.settled, g.void_before_us, g.number AS generation,
    (SELECT coalesce(max(number), 0) FROM decisions) AS newest,
    (SELECT hash FROM decisions WHERE number = $2) AS at_copied,
    (SELECT beat FROM processes WHERE id = $4) AS beat, ",
            crate::ledger::oids!(),
            ",
    ARRAY(SELECT jws FROM statements WHERE cluster_id = c.id ORDER BY sequence) AS statements,
    (SELECT coalesce(json_agg(r), '[]') FROM (
        SELECT id, jws, encode(token_key, 'hex') AS token_key, stored_us, revoked_us, confirmation
        FROM grants WHERE id = ANY($3) AND cluster_id = c.id) r) AS requested_grants,
    ARRAY(SELECT id FROM grants WHERE cluster_id = c.id AND revoked_us IS NOT NULL) AS revoked,
    ARRAY(SELECT id FROM grants WHERE cluster_id = c.id AND freed_us IS NOT NULL) AS freed,
    (SELECT coalesce(json_agg(r), '[]') FROM (
        SELECT a.record, a.token_record, a.grant_id, gr.jws AS grant, encode(a.key, 'hex') AS key,
            a.seat, a.standby, a.lease_us, a.boot, encode(a.nonce, 'hex') AS nonce,
            a.highest_epoch, a.counts, a.held_us, a.release_epoch, a.release_jws, a.approval
        FROM agents a JOIN grants gr ON gr.id = a.grant_id WHERE a.cluster_id = c.id) r) AS agents,
    CASE WHEN c.frozen_h IS NULL THEN '[]' ELSE (
        SELECT coalesce(json_agg(r ORDER BY r.seat), '[]') FROM (
            SELECT f.seat, f.record, f.token_record, f.grant_id, gr.jws AS grant
            FROM frozen_seats f JOIN grants gr ON gr.id = f.grant_id WHERE f.cluster_id = c.id) r)
    END AS seats,
    CASE WHEN c.frozen_h IS NULL THEN '[]' ELSE (
        SELECT coalesce(json_agg(r), '[]') FROM (
            SELECT encode(key, 'hex') AS key, epoch, jws FROM acks WHERE cluster_id = c.id) r)
    END AS acks,
    CASE WHEN c.frozen_h IS NULL THEN '[]' ELSE (
        SELECT coalesce(json_agg(r), '[]') FROM (
            SELECT encode(key, 'hex') AS key, epoch, row FROM probes WHERE cluster_id = c.id) r)
    END AS probes,
    CASE WHEN c.phase NOT IN ('committed', 'formed', 'retired') THEN '[]' ELSE (
        SELECT coalesce(json_agg(r), '[]') FROM (
            SELECT encode(key, 'hex') AS key, encode(raft_cluster, 'hex') AS raft_cluster
            FROM reports WHERE cluster_id = c.id) r)
    END AS reports",
            $($more)*
            "
FROM generation g JOIN clusters c ON c.id = ANY($1) AND c.phase <> 'draft'"
        )
    };
}

/// Loads clusters that form.
const LOAD: &str = load_clusters!();

/// Loads clusters with their changes since the commit, and with the commit if a grant is requested.
/// This isn't a part of [`LOAD`], because Postgres prepares all parts of a plan before it executes
/// any of them. That takes time even for parts that it then doesn't need.
const LOAD_WITH_CHANGES: &str = load_clusters!(
    ",\n",
    change_columns!(),
    ",
    (SELECT json_build_object('h', encode(h, 'hex'), 'document', document)
     FROM commits WHERE cluster_id = c.id AND cardinality($3) > 0) AS commit",
);

/// Parameters of the SQL statements [`LOAD`] and [`LOAD_WITH_CHANGES`].
pub(super) struct LoadParameters<'a> {
    pub(super) ids: &'a [Uuid],
    /// Number of the last decision that the ledger has copied.
    pub(super) copied: u64,
    /// Ids of the grants that redeem requests name.
    pub(super) requested_grants: &'a [String],
    /// Id of the calling process.
    pub(super) process: Uuid,
    /// Whether to load the changes since the commit.
    pub(super) with_changes: bool,
}

/// Reads all rows of clusters, in any order. Returns none for drafts, which aren't clusters yet.
pub(super) async fn read(
    connection: &mut PgConnection,
    of: &LoadParameters<'_>,
) -> Result<Vec<ClusterRows>, StoreError> {
    let sql = if of.with_changes { LOAD_WITH_CHANGES } else { LOAD };
    let loaded = sqlx::query_as(sql).bind(of.ids).bind(of.copied as i64).bind(of.requested_grants);
    Ok(loaded.bind(of.process).fetch_all(connection).await?)
}

/// One probe's result, as `probes.row` stores it for a peer's key.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ProbeJson {
    Reached,
    Failed(String),
}

/// A row of the connectivity matrix: peer's key in hex → probe result.
pub(super) type MatrixRow = BTreeMap<String, ProbeJson>;

/// Builds the cluster from its rows.
pub(super) fn load(
    caches: &Caches,
    loaded: ClusterRows,
    chain: &StatementChain,
    trust: Trust,
) -> Result<Cluster, StoreError> {
    let row = loaded.row;
    let id = row.id;
    let damaged = |what: &str| StoreError::damaged(format!("{what} of cluster {id}"));
    let phase = Phase::parse(&row.phase).ok_or_else(|| damaged("the phase"))?;
    let ended = match (row.ended_cause, row.ended_us, row.ended_by) {
        (Some(cause), Some(at), Some(by)) => {
            let cause = EndCause::parse(&cause).ok_or_else(|| damaged("the end"))?;
            Some(ClusterEnd { cause, at: micros(at), by })
        }
        _ => None,
    };
    let split = match (&row.split_other, row.split_epoch) {
        (Some(other), Some(epoch)) => {
            let other = hash(other).ok_or_else(|| damaged("the second document"))?;
            Some(Split { other, epoch: epoch.unsigned_abs() })
        }
        _ => None,
    };
    let last_error = match (row.error_us, row.error_text) {
        (Some(at), Some(text)) => {
            let key = row.error_key.as_deref().and_then(key);
            Some(LastError { at: micros(at), key, text })
        }
        _ => None,
    };
    let header = match (row.frozen_epoch, row.frozen_h, row.frozen_statement, row.frozen_us) {
        (Some(epoch), Some(h), Some(statement), Some(at)) => {
            let h = hash(&h).ok_or_else(|| damaged("the list's hash"))?;
            let statement = hash(&statement).ok_or_else(|| damaged("the list's statement"))?;
            Some(FrozenHeader { epoch: epoch.unsigned_abs(), h, statement, at: micros(at) })
        }
        _ => None,
    };
    let lists = (loaded.seats.0, loaded.acks.0, loaded.probes.0);
    let frozen = match header {
        Some(header) => Some(build_frozen(caches, id, header, lists, (chain, trust))?),
        None => None,
    };
    let reports = match phase {
        Phase::Committed | Phase::Formed | Phase::Retired => reports(loaded.reports.0),
        _ => BTreeMap::new(),
    };
    Ok(Cluster {
        id: convert::cluster(id),
        statement: convert::statement(chain),
        phase,
        epoch: row.epoch.unsigned_abs(),
        floor: row.floor.unsigned_abs(),
        rev: row.rev.unsigned_abs(),
        deadline: micros(row.deadline_us),
        agents: agents(caches, id, loaded.agents.0, (chain, trust))?,
        next_queue_number: row.next_place.unsigned_abs(),
        frozen,
        reports,
        revoked: loaded.revoked.into_iter().map(|id| formation::GrantId(id.into())).collect(),
        freed: loaded.freed.into_iter().map(|id| formation::GrantId(id.into())).collect(),
        ended,
        split,
        is_unsettled: row.unsettled,
        last_error,
    })
}

struct FrozenHeader {
    epoch: u64,
    h: formation::Hash,
    statement: formation::Hash,
    at: formation::UnixMicros,
}

fn agents(
    caches: &Caches,
    id: Uuid,
    rows: Vec<AgentRow>,
    (chain, trust): (&StatementChain, Trust),
) -> Result<BTreeMap<formation::AgentKey, Applicant>, StoreError> {
    let mut agents = BTreeMap::new();
    for row in rows {
        let agent_key = key(&row.key.0)
            .ok_or_else(|| StoreError::damaged(format!("an agent's key in cluster {id}")))?;
        let grant = caches.grant(&row.grant, chain, trust)?;
        let record = caches.stored_record(&row.record, &row.token_record, &grant.key, trust)?;
        let own = record.key == agent_key && record.cluster.0 == id.as_u128();
        if trust == Trust::Verify && !own {
            return Err(StoreError::damaged(format!("an agent's record in cluster {id}")));
        }
        let approval = row.approval.clone().filter(|jws| is_approval(jws, chain, agent_key));
        let mut applicant = agent(row, record, u32::from(grant.uses));
        applicant.approval = approval.map(Into::into);
        agents.insert(agent_key, applicant);
    }
    Ok(agents)
}

fn agent(row: AgentRow, record: Arc<formation::AgentRecord>, uses: u32) -> Applicant {
    let seating = match (row.seat, row.standby) {
        (Some(seat), _) => Seating::Seat(seat as u8),
        (None, Some(order)) => Seating::Standby(order.unsigned_abs()),
        (None, None) => Seating::Absent,
    };
    let nonce = row.nonce.and_then(|nonce| <[u8; 16]>::try_from(nonce.0).ok());
    let session = row.boot.zip(nonce).map(|(boot, nonce)| formation::AgentSession {
        boot: boot.unsigned_abs(),
        nonce: u128::from_be_bytes(nonce),
    });
    let release = row
        .release_epoch
        .zip(row.release_jws)
        .map(|(epoch, jws)| formation::Release { epoch: epoch.unsigned_abs(), jws: jws.into() });
    Applicant {
        record,
        uses,
        seating,
        lease_until: micros(row.lease_us),
        session,
        highest_epoch: row.highest_epoch.unsigned_abs(),
        failed_lists: row.counts.unsigned_abs(),
        backoff_until: micros(row.held_us),
        release,
        approval: None,
    }
}

/// Whether a row's approval is for this agent, and by an admin who may still approve hosts under
/// the newest statement. Otherwise an issuer has to approve the agent again.
fn is_approval(jws: &str, chain: &StatementChain, agent: formation::AgentKey) -> bool {
    let approval = jws.parse().ok().and_then(|jws| Approval::verify(&jws, chain).ok());
    approval.is_some_and(|approval| convert::key(&approval.agent) == agent)
}

fn build_frozen(
    caches: &Caches,
    id: Uuid,
    header: FrozenHeader,
    (rows, acks, probes): (Vec<SeatRow>, Vec<AckRow>, Vec<ProbeRow>),
    (chain, trust): (&StatementChain, Trust),
) -> Result<FrozenList, StoreError> {
    let mut records = Vec::with_capacity(rows.len());
    for row in rows {
        let grant = caches.grant(&row.grant, chain, trust)?;
        records.push(caches.stored_record(&row.record, &row.token_record, &grant.key, trust)?);
    }
    let proposal = formation::ProposedList {
        cluster: convert::cluster(id),
        statement: header.statement,
        epoch: header.epoch,
        records,
    };
    if trust == Trust::Verify && convert::proposal_hash(&proposal) != header.h {
        return Err(StoreError::damaged(format!("the frozen list of cluster {id}")));
    }
    Ok(FrozenList {
        proposal,
        proposal_hash: header.h,
        at: header.at,
        acks: acks
            .into_iter()
            .filter(|ack| ack.epoch.unsigned_abs() == header.epoch)
            .filter_map(|ack| Some((key(&ack.key.0)?, ack.jws.into())))
            .collect(),
        probes: probes
            .into_iter()
            .filter(|probe| probe.epoch.unsigned_abs() == header.epoch)
            .filter_map(|probe| Some((key(&probe.key.0)?, matrix_row(probe.row))))
            .collect(),
    })
}

fn matrix_row(row: MatrixRow) -> BTreeMap<formation::AgentKey, ProbeOutcome> {
    row.into_iter()
        .filter_map(|(peer, found)| {
            let peer = data_encoding::HEXLOWER.decode(peer.as_bytes()).ok()?;
            let found = match found {
                ProbeJson::Reached => ProbeOutcome::Reached,
                ProbeJson::Failed(why) => ProbeOutcome::Failed(why),
            };
            Some((key(&peer)?, found))
        })
        .collect()
}

fn reports(rows: Vec<ReportRow>) -> BTreeMap<formation::AgentKey, u64> {
    let report = |row: ReportRow| {
        Some((key(&row.key.0)?, u64::from_be_bytes(row.raft_cluster.0.try_into().ok()?)))
    };
    rows.into_iter().filter_map(report).collect()
}

impl ClusterRows {
    /// Returns the cluster's id.
    pub(super) fn id(&self) -> Uuid {
        self.row.id
    }

    /// Returns the grants of all agents and seats, and the requested grants, each as a JWS under
    /// its id.
    pub(super) fn grants(&self) -> BTreeMap<String, String> {
        let agents = self.agents.0.iter().map(|row| (row.grant_id.clone(), row.grant.clone()));
        let seats = self.seats.0.iter().map(|row| (row.grant_id.clone(), row.grant.clone()));
        let requested = &self.requested_grants.0;
        let requested = requested.iter().map(|grant| (grant.id.clone(), grant.jws.clone()));
        agents.chain(seats).chain(requested).collect()
    }
}

fn micros(value: i64) -> formation::UnixMicros {
    formation::UnixMicros(value.unsigned_abs())
}

fn key(bytes: &[u8]) -> Option<formation::AgentKey> {
    bytes.try_into().ok().map(formation::AgentKey)
}

fn hash(bytes: &[u8]) -> Option<formation::Hash> {
    bytes.try_into().ok().map(formation::Hash)
}
