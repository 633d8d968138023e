//! Rows → cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use discovery_formation as formation;
use discovery_formation::service::{
    Agent, Cluster, EndCause, Ended, Frozen, LastError, Phase, Place, Probe, Split,
};
use discovery_types::convert;
use discovery_types::statement::StatementChain;
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use sqlx::types::Json;
use uuid::Uuid;

use super::super::StoreError;
use super::records::Caches;

/// Whether the signatures in rows are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// Always, but for:
    Verify,
    /// giving up a cluster whose rows somebody changed.
    Claims,
}

/// The columns of `clusters`, without those that never change.
#[derive(Debug, sqlx::FromRow)]
pub(super) struct ClusterRow {
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

#[derive(Debug, sqlx::FromRow)]
struct AgentRow {
    record: String,
    token_record: String,
    grant: String,
    key: Vec<u8>,
    seat: Option<i16>,
    standby: Option<i64>,
    lease_us: i64,
    boot: Option<i64>,
    nonce: Option<Vec<u8>>,
    highest_epoch: i64,
    counts: i32,
    held_us: i64,
    release_epoch: Option<i64>,
    release_jws: Option<String>,
}

#[derive(Debug, sqlx::FromRow)]
struct SeatRow {
    record: String,
    token_record: String,
    grant: String,
}

/// A probe's result as `probes.row` holds it: peer's key in hex → what happened.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ProbeJson {
    Reached,
    Failed(String),
}

/// A row of the matrix.
pub(super) type MatrixRow = BTreeMap<String, ProbeJson>;

/// The row, locked; `None` for drafts, which aren't clusters yet.
pub(super) async fn lock(
    connection: &mut PgConnection,
    id: Uuid,
) -> Result<Option<ClusterRow>, StoreError> {
    let row = sqlx::query_as(
        "SELECT id, phase, deadline_us, epoch, floor, rev, next_place, frozen_epoch, frozen_h,
                frozen_statement, frozen_us, unsettled, ended_cause, ended_us, ended_by,
                split_other, split_epoch, error_us, error_key, error_text
         FROM clusters WHERE id = $1 AND phase <> 'draft' FOR UPDATE",
    )
    .bind(id)
    .fetch_optional(connection)
    .await?;
    Ok(row)
}

/// The row, as it is.
pub(super) async fn read(
    connection: &mut PgConnection,
    id: Uuid,
) -> Result<Option<ClusterRow>, StoreError> {
    let row = sqlx::query_as(
        "SELECT id, phase, deadline_us, epoch, floor, rev, next_place, frozen_epoch, frozen_h,
                frozen_statement, frozen_us, unsettled, ended_cause, ended_us, ended_by,
                split_other, split_epoch, error_us, error_key, error_text
         FROM clusters WHERE id = $1 AND phase <> 'draft'",
    )
    .bind(id)
    .fetch_optional(connection)
    .await?;
    Ok(row)
}

/// Everything else of the cluster.
pub(super) async fn load(
    connection: &mut PgConnection,
    caches: &Caches,
    row: ClusterRow,
    chain: &StatementChain,
    trust: Trust,
) -> Result<Cluster, StoreError> {
    let id = row.id;
    let damaged = |what: &str| StoreError::damaged(format!("{what} of cluster {id}"));
    let phase = Phase::parse(&row.phase).ok_or_else(|| damaged("the phase"))?;
    let ended = match (row.ended_cause, row.ended_us, row.ended_by) {
        (Some(cause), Some(at), Some(by)) => {
            let cause = EndCause::parse(&cause).ok_or_else(|| damaged("the end"))?;
            Some(Ended { cause, at: micros(at), by })
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
    let frozen = match header {
        Some(header) => Some(frozen(connection, caches, id, header, (chain, trust)).await?),
        None => None,
    };
    let reports = match phase {
        Phase::Committed | Phase::Formed => reports(connection, id).await?,
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
        agents: agents(connection, caches, id, (chain, trust)).await?,
        next_place: row.next_place.unsigned_abs(),
        frozen,
        reports,
        revoked: revoked(connection, id).await?,
        ended,
        split,
        unsettled: row.unsettled,
        last_error,
    })
}

struct FrozenHeader {
    epoch: u64,
    h: formation::Hash,
    statement: formation::Hash,
    at: formation::Micros,
}

async fn agents(
    connection: &mut PgConnection,
    caches: &Caches,
    id: Uuid,
    (chain, trust): (&StatementChain, Trust),
) -> Result<BTreeMap<formation::KeyId, Agent>, StoreError> {
    let rows: Vec<AgentRow> = sqlx::query_as(
        "SELECT a.record, a.token_record, g.jws AS grant, a.key, a.seat, a.standby, a.lease_us,
                a.boot, a.nonce, a.highest_epoch, a.counts, a.held_us, a.release_epoch,
                a.release_jws
         FROM agents a JOIN grants g ON g.id = a.grant_id WHERE a.cluster_id = $1",
    )
    .bind(id)
    .fetch_all(connection)
    .await?;
    let mut agents = BTreeMap::new();
    for row in rows {
        let agent_key = key(&row.key)
            .ok_or_else(|| StoreError::damaged(format!("an agent's key in cluster {id}")))?;
        let grant = caches.grant(&row.grant, chain, trust)?;
        let record = caches.record(&row.record, &row.token_record, &grant.key, trust)?;
        let own = record.key == agent_key && record.cluster.0 == id.as_u128();
        if trust == Trust::Verify && !own {
            return Err(StoreError::damaged(format!("an agent's record in cluster {id}")));
        }
        agents.insert(agent_key, agent(row, record, u32::from(grant.uses)));
    }
    Ok(agents)
}

fn agent(row: AgentRow, record: Arc<formation::Record>, uses: u32) -> Agent {
    let place = match (row.seat, row.standby) {
        (Some(seat), _) => Place::Seat(seat as u8),
        (None, Some(order)) => Place::Standby(order.unsigned_abs()),
        (None, None) => Place::Absent,
    };
    let nonce = row.nonce.and_then(|nonce| <[u8; 16]>::try_from(nonce).ok());
    let session = row.boot.zip(nonce).map(|(boot, nonce)| formation::Session {
        boot: boot.unsigned_abs(),
        nonce: u128::from_be_bytes(nonce),
    });
    let release = row
        .release_epoch
        .zip(row.release_jws)
        .map(|(epoch, jws)| formation::Release { epoch: epoch.unsigned_abs(), jws: jws.into() });
    Agent {
        record,
        uses,
        place,
        lease_until: micros(row.lease_us),
        session,
        highest_epoch: row.highest_epoch.unsigned_abs(),
        counts: row.counts.unsigned_abs(),
        held_until: micros(row.held_us),
        release,
    }
}

async fn frozen(
    connection: &mut PgConnection,
    caches: &Caches,
    id: Uuid,
    header: FrozenHeader,
    (chain, trust): (&StatementChain, Trust),
) -> Result<Frozen, StoreError> {
    let rows: Vec<SeatRow> = sqlx::query_as(
        "SELECT f.record, f.token_record, g.jws AS grant
         FROM frozen_seats f JOIN grants g ON g.id = f.grant_id
         WHERE f.cluster_id = $1 ORDER BY f.seat",
    )
    .bind(id)
    .fetch_all(&mut *connection)
    .await?;
    let mut records = Vec::with_capacity(rows.len());
    for row in rows {
        let grant = caches.grant(&row.grant, chain, trust)?;
        records.push(caches.record(&row.record, &row.token_record, &grant.key, trust)?);
    }
    let acks: Vec<(Vec<u8>, String)> =
        sqlx::query_as("SELECT key, jws FROM acks WHERE cluster_id = $1 AND epoch = $2")
            .bind(id)
            .bind(header.epoch as i64)
            .fetch_all(&mut *connection)
            .await?;
    let probes: Vec<(Vec<u8>, Json<MatrixRow>)> =
        sqlx::query_as("SELECT key, row FROM probes WHERE cluster_id = $1 AND epoch = $2")
            .bind(id)
            .bind(header.epoch as i64)
            .fetch_all(connection)
            .await?;
    let proposal = formation::Proposal {
        cluster: convert::cluster(id),
        statement: header.statement,
        epoch: header.epoch,
        records,
    };
    if trust == Trust::Verify && convert::proposal_hash(&proposal) != header.h {
        return Err(StoreError::damaged(format!("the frozen list of cluster {id}")));
    }
    Ok(Frozen {
        proposal,
        h: header.h,
        at: header.at,
        acks: acks.into_iter().filter_map(|(of, jws)| Some((key(&of)?, jws.into()))).collect(),
        probes: probes
            .into_iter()
            .filter_map(|(of, Json(row))| Some((key(&of)?, matrix_row(row))))
            .collect(),
    })
}

fn matrix_row(row: MatrixRow) -> BTreeMap<formation::KeyId, Probe> {
    row.into_iter()
        .filter_map(|(peer, found)| {
            let peer = data_encoding::HEXLOWER.decode(peer.as_bytes()).ok()?;
            let found = match found {
                ProbeJson::Reached => Probe::Reached,
                ProbeJson::Failed(why) => Probe::Failed(why),
            };
            Some((key(&peer)?, found))
        })
        .collect()
}

async fn reports(
    connection: &mut PgConnection,
    id: Uuid,
) -> Result<BTreeMap<formation::KeyId, u64>, StoreError> {
    let rows: Vec<(Vec<u8>, Vec<u8>)> =
        sqlx::query_as("SELECT key, raft_cluster FROM reports WHERE cluster_id = $1")
            .bind(id)
            .fetch_all(connection)
            .await?;
    let report = |(of, raft): (Vec<u8>, Vec<u8>)| {
        Some((key(&of)?, u64::from_be_bytes(raft.try_into().ok()?)))
    };
    Ok(rows.into_iter().filter_map(report).collect())
}

async fn revoked(
    connection: &mut PgConnection,
    id: Uuid,
) -> Result<BTreeSet<formation::GrantId>, StoreError> {
    let rows: Vec<String> = sqlx::query_scalar(
        "SELECT id FROM grants WHERE cluster_id = $1 AND revoked_us IS NOT NULL",
    )
    .bind(id)
    .fetch_all(connection)
    .await?;
    Ok(rows.into_iter().map(|id| formation::GrantId(id.into())).collect())
}

fn micros(value: i64) -> formation::Micros {
    formation::Micros(value.unsigned_abs())
}

fn key(bytes: &[u8]) -> Option<formation::KeyId> {
    bytes.try_into().ok().map(formation::KeyId)
}

fn hash(bytes: &[u8]) -> Option<formation::Hash> {
    bytes.try_into().ok().map(formation::Hash)
}
