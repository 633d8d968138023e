//! Saves clusters: writes the rows that differ from the loaded ones in one SQL statement.

use std::collections::BTreeMap;

use data_encoding::HEXLOWER;
use discovery_formation as formation;
use discovery_formation::service::{
    Applicant, Cluster, ClusterChange, FrozenList, ProbeOutcome, Seating,
};
use serde_json::{Value, json};
use sqlx::types::Json;
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use super::super::StoreError;
use super::load::{MatrixRow, ProbeJson};
use super::{CHANNEL, LeafPair, LoadedCluster, NewCommit, RequestDetails};
use crate::domain::{describe, number_to_row};

/// SQL that writes rows of clusters into their tables. `$rows` stands for the rows as JSON, each
/// with its cluster's id, `$1` for the ids of all clusters, and `$2` for the time.
///
/// One SQL statement writes the rows of all clusters and tables, each table in a part of its
/// `WITH`. Most of its cost doesn't depend on the number of rows: Postgres prepares the plan, the
/// checks of the tables and the types of the JSON at each execution.
///
/// The parts of the `WITH` don't see each other's changes. That is harmless here: Postgres checks
/// foreign keys at the end of the SQL statement. Another statement later writes the commit row,
/// because a trigger compares it with the decided rows.
type WriteParts = &'static [&'static str];

/// The condition on `$1` makes Postgres look the clusters up by id. Without it, Postgres would read
/// a whole table of some thousand clusters, because it expects 100 rows from the JSON.
const CLUSTER: WriteParts = &["
    UPDATE clusters c SET phase = n.phase, deadline_us = n.deadline_us, epoch = n.epoch,
        floor = n.floor, rev = n.rev, next_place = n.next_place, frozen_epoch = n.frozen_epoch,
        frozen_h = decode(n.frozen_h, 'hex'),
        frozen_statement = decode(n.frozen_statement, 'hex'), frozen_us = n.frozen_us,
        unsettled = n.unsettled, ended_cause = n.ended_cause, ended_us = n.ended_us,
        ended_by = n.ended_by, split_other = decode(n.split_other, 'hex'),
        split_epoch = n.split_epoch, error_us = n.error_us,
        error_key = decode(n.error_key, 'hex'), error_text = n.error_text,
        next_deadline_us = n.next_deadline_us
    FROM jsonb_to_recordset($rows) AS n (cluster_id uuid, phase text, deadline_us bigint,
        epoch bigint, floor bigint, rev bigint, next_place bigint, frozen_epoch bigint,
        frozen_h text, frozen_statement text, frozen_us bigint, unsettled boolean,
        ended_cause text, ended_us bigint, ended_by text, split_other text, split_epoch bigint,
        error_us bigint, error_key text, error_text text, next_deadline_us bigint)
    WHERE c.id = n.cluster_id AND c.id = ANY($1)"];

const AGENTS: WriteParts = &["
    INSERT INTO agents (cluster_id, size, key, grant_id, record, token_record, seat, standby,
        lease_us, boot, nonce, highest_epoch, counts, held_us, release_epoch, release_jws, approval,
        address, instance, redeemed_us)
    SELECT n.cluster_id, n.size, decode(n.key, 'hex'), n.grant_id, n.record, n.token_record, n.seat,
        n.standby, n.lease_us, n.boot, decode(n.nonce, 'hex'), n.highest_epoch, n.counts,
        n.held_us, n.release_epoch, n.release_jws, n.approval, n.address, n.instance, $2
    FROM jsonb_to_recordset($rows) AS n (cluster_id uuid, size smallint, key text,
        grant_id text, record text,
        token_record text, seat smallint, standby bigint, lease_us bigint, boot bigint, nonce text,
        highest_epoch bigint, counts integer, held_us bigint, release_epoch bigint,
        release_jws text, approval text, address text, instance text)
    ON CONFLICT (cluster_id, key) DO UPDATE SET grant_id = excluded.grant_id,
        record = excluded.record, token_record = excluded.token_record, seat = excluded.seat,
        standby = excluded.standby, lease_us = excluded.lease_us, boot = excluded.boot,
        nonce = excluded.nonce, highest_epoch = excluded.highest_epoch, counts = excluded.counts,
        held_us = excluded.held_us, release_epoch = excluded.release_epoch,
        release_jws = excluded.release_jws, approval = excluded.approval,
        instance = coalesce(excluded.instance, agents.instance)"];

const SEATS: WriteParts = &[
    "
    INSERT INTO frozen_seats (cluster_id, size, epoch, seat, key, name, incarnation, node_key,
        grant_id, record, token_record)
    SELECT n.cluster_id, n.size, n.epoch, n.seat, decode(n.key, 'hex'), n.name,
        decode(n.incarnation, 'hex'), decode(n.node_key, 'hex'), n.grant_id, n.record,
        n.token_record
    FROM jsonb_to_recordset($rows) AS n (cluster_id uuid, size smallint, epoch bigint,
        seat smallint, key text,
        name text, incarnation text, node_key text, grant_id text, record text, token_record text)",
    "
    INSERT INTO frozen_urls (cluster_id, url, seat)
    SELECT n.cluster_id, url, n.seat
    FROM jsonb_to_recordset($rows) AS n (cluster_id uuid, seat smallint, urls text[]),
        unnest(n.urls) AS url",
];

const ACKS: WriteParts = &["
    INSERT INTO acks (cluster_id, key, epoch, jws)
    SELECT n.cluster_id, decode(n.key, 'hex'), n.epoch, n.jws
    FROM jsonb_to_recordset($rows) AS n (cluster_id uuid, key text, epoch bigint, jws text)"];

const PROBES: WriteParts = &["
    INSERT INTO probes (cluster_id, key, epoch, row)
    SELECT n.cluster_id, decode(n.key, 'hex'), n.epoch, n.row
    FROM jsonb_to_recordset($rows) AS n (cluster_id uuid, key text, epoch bigint, row jsonb)
    ON CONFLICT (cluster_id, key) DO UPDATE SET epoch = excluded.epoch, row = excluded.row"];

const REPORTS: WriteParts = &["
    INSERT INTO reports (cluster_id, key, raft_cluster)
    SELECT n.cluster_id, decode(n.key, 'hex'), decode(n.raft_cluster, 'hex')
    FROM jsonb_to_recordset($rows) AS n (cluster_id uuid, key text, raft_cluster text)
    ON CONFLICT (cluster_id, key) DO UPDATE SET raft_cluster = excluded.raft_cluster"];

const EVENTS: WriteParts = &["
    INSERT INTO events (stream, number, at_us, kind, body, previous, hash)
    SELECT n.cluster_id, 1, $2, n.kind, n.body, '', ''
    FROM ROWS FROM (jsonb_to_recordset($rows) AS (cluster_id uuid, kind text, body text))
        WITH ORDINALITY AS n (cluster_id, kind, body, place) ORDER BY n.place"];

/// Changes of a loaded cluster that are still to be saved, apart from the differences between its
/// rows.
#[derive(Debug, Default)]
pub(super) struct UnsavedChanges {
    /// Whether a step has changed the cluster.
    pub(super) is_changed: bool,
    /// Rows of events, in their order.
    pub(super) events: Vec<Value>,
    /// Facts about the hosts of agents that sent requests. They are stored with new agents.
    pub(super) hosts: BTreeMap<formation::AgentKey, AgentHost>,
    pub(super) next_deadline: Option<formation::UnixMicros>,
    /// Whether the COMMIT notifies the other discovery processes.
    pub(super) notifies: bool,
}

/// Facts about an agent's host.
#[derive(Debug)]
pub(super) struct AgentHost {
    /// Source address of the agent's request.
    pub(super) address: Option<String>,
    /// Virtual machine of the host, if it was verified.
    pub(super) instance: Option<String>,
}

/// A table, and the rows to write into it.
type TableRows = (WriteParts, Vec<Value>);

/// Writes the rows of clusters that differ from the loaded ones. The clusters were loaded together.
pub(super) async fn save(
    connection: &mut PgConnection,
    clusters: &[&LoadedCluster],
) -> Result<(), StoreError> {
    let new_lists: Vec<Uuid> = clusters
        .iter()
        .filter(|loaded| loaded.before.frozen.is_some() && !has_same_list(loaded))
        .map(|loaded| loaded.id())
        .collect();
    if !new_lists.is_empty() {
        // Deleting the seats also deletes their acks, probes and URLs.
        sqlx::query("DELETE FROM frozen_seats WHERE cluster_id = ANY($1)")
            .bind(new_lists)
            .execute(&mut *connection)
            .await?;
    }
    let mut tables: [TableRows; 7] =
        [CLUSTER, AGENTS, SEATS, ACKS, PROBES, REPORTS, EVENTS].map(|parts| (parts, Vec::new()));
    for loaded in clusters {
        for ((_, rows), new) in tables.iter_mut().zip(rows_of(loaded)?) {
            rows.extend(new);
        }
    }
    let ids: Vec<Uuid> = clusters.iter().map(|loaded| loaded.id()).collect();
    let notified: Vec<Uuid> = clusters
        .iter()
        .filter(|loaded| loaded.unsaved.notifies)
        .map(|loaded| loaded.id())
        .collect();
    let now = clusters.first().map_or(0, |loaded| loaded.now.0);
    let written: Vec<TableRows> = tables.into_iter().filter(|(_, rows)| !rows.is_empty()).collect();
    let sql = write_statement(written.iter().map(|(parts, _)| *parts));
    let mut query = sqlx::query(AssertSqlSafe(sql)).bind(ids).bind(number_to_row(now)?);
    query = query.bind(notified);
    for (_, rows) in written {
        query = query.bind(Json(rows));
    }
    query.execute(connection).await?;
    Ok(())
}

fn has_same_list(loaded: &LoadedCluster) -> bool {
    let list = |cluster: &Cluster| cluster.frozen.as_ref().map(|frozen| frozen.proposal_hash);
    list(&loaded.before) == list(&loaded.cluster)
}

/// Returns the rows of a cluster that differ from the loaded ones, in the order of the tables in
/// [`save`].
fn rows_of(loaded: &LoadedCluster) -> Result<[Vec<Value>; 7], StoreError> {
    let (before, after) = (&loaded.before, &loaded.cluster);
    let same = has_same_list(loaded);
    // If an agent's lease was renewed and nothing else changed, don't rewrite the cluster's row.
    // The stored deadline can then be too early. In that case the sweep finds nothing to do, and
    // corrects the deadline.
    let own = match row_differs(before, after) || before == after {
        true => vec![cluster_row(after, loaded.unsaved.next_deadline)?],
        false => Vec::new(),
    };
    let agents = after.agents.iter().filter(|(key, agent)| before.agents.get(key) != Some(*agent));
    let agents = agents
        .map(|(key, agent)| agent_row(after, *key, agent, loaded.unsaved.hosts.get(key)))
        .collect::<Result<Vec<_>, _>>()?;
    let frozen = after.frozen.as_ref();
    let new_seats = frozen.filter(|_| !same);
    let known = before.frozen.as_ref().filter(|_| same);
    let reports = after.reports.iter().filter(|(key, raft)| before.reports.get(key) != Some(*raft));
    let reports = reports.map(|(key, raft_cluster)| {
        json!({ "key": hex(&key.0), "raft_cluster": format!("{raft_cluster:016x}") })
    });
    let mut rows = [
        own,
        agents,
        new_seats.map_or(Ok(Vec::new()), |frozen| seat_rows(after, frozen))?,
        frozen.map_or(Ok(Vec::new()), |frozen| ack_rows(known, frozen))?,
        frozen.map_or(Ok(Vec::new()), |frozen| probe_rows(known, frozen))?,
        reports.collect(),
        loaded.unsaved.events.clone(),
    ];
    let id = json!(loaded.id());
    for row in rows.iter_mut().flatten() {
        row["cluster_id"] = id.clone();
    }
    Ok(rows)
}

/// Returns the row of an event, which describes `change` for auditors. `after` is the cluster after
/// the change.
pub(super) fn event_row(
    change: &ClusterChange,
    after: &Cluster,
    request: &RequestDetails<'_>,
) -> Value {
    let (kind, mut body) = describe(change);
    add_details(&mut body, change, after, request);
    json!({ "kind": kind, "body": body.to_string() })
}

/// Returns the SQL statement that writes rows into the tables of `tables`, and notifies the other
/// processes of the clusters `$3`. `$4` and the parameters after it are the rows of one table each.
/// Tables without rows are left out, because each costs time even if nothing is written.
fn write_statement(tables: impl Iterator<Item = WriteParts>) -> String {
    let mut parts = Vec::new();
    for (table, number) in tables.zip(4..) {
        for part in table {
            let sql = part.replace("$rows", &format!("${number}"));
            parts.push(format!("w{} AS ({sql})", parts.len()));
        }
    }
    let with = if parts.is_empty() { String::new() } else { format!("WITH {}", parts.join(", ")) };
    format!("{with} SELECT pg_notify('{CHANNEL}', id::text) FROM unnest($3) AS id")
}

/// Adds details for auditors to an event's body: with which token and from where an agent came, or
/// who revoked which token.
fn add_details(
    body: &mut Value,
    change: &ClusterChange,
    after: &Cluster,
    request: &RequestDetails<'_>,
) {
    match change {
        ClusterChange::Joined { key } => {
            let record = after.agents.get(key).map(|agent| &agent.record);
            body["grant"] = json!(record.map(|record| &*record.grant.0));
            body["name"] = json!(record.map(|record| &record.name));
            body["address"] = json!(request.address);
            if let Some(instance) = request.instance {
                body["instance"] = json!(instance);
            }
        }
        ClusterChange::GrantRevoked | ClusterChange::SeatFreed { .. } => {
            body["grant"] = json!(request.revocation.map(|revoked| revoked.grant.to_string()));
            body["by"] = json!(request.revocation.map(|revoked| &revoked.by));
        }
        _ => {}
    }
}

/// Whether a column of the cluster's own row differs.
fn row_differs(before: &Cluster, after: &Cluster) -> bool {
    before.phase != after.phase
        || before.epoch != after.epoch
        || before.floor != after.floor
        || before.rev != after.rev
        || before.deadline != after.deadline
        || before.next_queue_number != after.next_queue_number
        || before.is_unsettled != after.is_unsettled
        || before.ended != after.ended
        || before.split != after.split
        || before.last_error != after.last_error
        || before.frozen.as_ref().map(|f| (f.proposal_hash, f.at))
            != after.frozen.as_ref().map(|f| (f.proposal_hash, f.at))
}

fn hex(bytes: &[u8]) -> String {
    HEXLOWER.encode(bytes)
}

fn cluster_row(
    cluster: &Cluster,
    next_deadline: Option<formation::UnixMicros>,
) -> Result<Value, StoreError> {
    let frozen = cluster.frozen.as_ref();
    let (ended, split) = (cluster.ended.as_ref(), cluster.split.as_ref());
    let error = cluster.last_error.as_ref();
    let row = |number: u64| number_to_row(number);
    Ok(json!({
        "phase": cluster.phase.as_str(),
        "deadline_us": row(cluster.deadline.0)?,
        "epoch": row(cluster.epoch)?,
        "floor": row(cluster.floor)?,
        "rev": row(cluster.rev)?,
        "next_place": row(cluster.next_queue_number)?,
        "frozen_epoch": frozen.map(|frozen| row(frozen.proposal.epoch)).transpose()?,
        "frozen_h": frozen.map(|frozen| hex(&frozen.proposal_hash.0)),
        "frozen_statement": frozen.map(|frozen| hex(&frozen.proposal.statement.0)),
        "frozen_us": frozen.map(|frozen| row(frozen.at.0)).transpose()?,
        "unsettled": cluster.is_unsettled,
        "ended_cause": ended.map(|ended| ended.cause.as_str()),
        "ended_us": ended.map(|ended| row(ended.at.0)).transpose()?,
        "ended_by": ended.map(|ended| ended.by.as_str()),
        "split_other": split.map(|split| hex(&split.other.0)),
        "split_epoch": split.map(|split| row(split.epoch)).transpose()?,
        "error_us": error.map(|error| row(error.at.0)).transpose()?,
        "error_key": error.and_then(|error| error.key).map(|key| hex(&key.0)),
        "error_text": error.map(|error| error.text.as_str()),
        "next_deadline_us": next_deadline.map(|at| row(at.0)).transpose()?,
    }))
}

fn agent_row(
    cluster: &Cluster,
    key: formation::AgentKey,
    agent: &Applicant,
    host: Option<&AgentHost>,
) -> Result<Value, StoreError> {
    let (seat, standby) = match agent.seating {
        Seating::Seat(seat) => (Some(seat), None),
        Seating::Standby(order) => (None, Some(number_to_row(order)?)),
        Seating::Absent => (None, None),
    };
    let (session, release) = (agent.session, agent.release.as_ref());
    Ok(json!({
        "size": cluster.statement.size,
        "key": hex(&key.0),
        "grant_id": &*agent.record.grant.0,
        "record": &*agent.record.jws,
        "token_record": &*agent.record.token_jws,
        "seat": seat,
        "standby": standby,
        "lease_us": number_to_row(agent.lease_until.0)?,
        "boot": session.map(|session| number_to_row(session.boot)).transpose()?,
        "nonce": session.map(|session| hex(&session.nonce.to_be_bytes())),
        "highest_epoch": number_to_row(agent.highest_epoch)?,
        "counts": i32::try_from(agent.failed_lists).unwrap_or(i32::MAX),
        "held_us": number_to_row(agent.backoff_until.0)?,
        "release_epoch": release.map(|release| number_to_row(release.epoch)).transpose()?,
        "release_jws": release.map(|release| &*release.jws),
        "approval": agent.approval.as_deref(),
        "address": host.and_then(|host| host.address.as_deref()),
        "instance": host.and_then(|host| host.instance.as_deref()),
    }))
}

fn seat_rows(cluster: &Cluster, frozen: &FrozenList) -> Result<Vec<Value>, StoreError> {
    let epoch = number_to_row(frozen.proposal.epoch)?;
    let row = |(seat, record): (u8, &std::sync::Arc<formation::AgentRecord>)| {
        let urls: Vec<&String> = record.peer_urls.iter().chain(&record.client_urls).collect();
        json!({
            "size": cluster.statement.size,
            "epoch": epoch,
            "seat": seat,
            "key": hex(&record.key.0),
            "name": record.name,
            "incarnation": hex(&record.incarnation.0.to_be_bytes()),
            "node_key": hex(&record.node_key.0),
            "grant_id": &*record.grant.0,
            "record": &*record.jws,
            "token_record": &*record.token_jws,
            "urls": urls,
        })
    };
    Ok((1_u8..).zip(&frozen.proposal.records).map(row).collect())
}

fn ack_rows(known: Option<&FrozenList>, frozen: &FrozenList) -> Result<Vec<Value>, StoreError> {
    let epoch = number_to_row(frozen.proposal.epoch)?;
    let new = |key: &&formation::AgentKey| known.is_none_or(|known| !known.acks.contains_key(key));
    let rows = frozen.acks.iter().filter(|(key, _)| new(key));
    Ok(rows
        .map(|(key, jws)| json!({ "key": hex(&key.0), "epoch": epoch, "jws": &**jws }))
        .collect())
}

fn probe_rows(known: Option<&FrozenList>, frozen: &FrozenList) -> Result<Vec<Value>, StoreError> {
    let epoch = number_to_row(frozen.proposal.epoch)?;
    let known = |key: &formation::AgentKey| known.and_then(|known| known.probes.get(key));
    let new = frozen.probes.iter().filter(|(key, row)| known(key) != Some(*row));
    let row = |(key, row): (&formation::AgentKey, &formation::service::ProbeResults)| {
        let found = |(peer, found): (&formation::AgentKey, &ProbeOutcome)| {
            let found = match found {
                ProbeOutcome::Reached => ProbeJson::Reached,
                ProbeOutcome::Failed(why) => ProbeJson::Failed(why.clone()),
            };
            (hex(&peer.0), found)
        };
        let row: MatrixRow = row.iter().map(found).collect();
        json!({ "key": hex(&key.0), "epoch": epoch, "row": row })
    };
    Ok(new.map(row).collect())
}

/// Renames an ended cluster that becomes live again, if another cluster has its name. The new name
/// ends in a part of the cluster's id.
pub(super) async fn rename_if_name_taken(
    connection: &mut PgConnection,
    id: Uuid,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE clusters c SET name = left(c.name, 50) || '-' || right(c.id::text, 8)
         WHERE c.id = $1 AND EXISTS (SELECT 1 FROM clusters o WHERE o.name = c.name
             AND o.id <> c.id AND o.phase IN ('open', 'preparing', 'committed', 'formed'))",
    )
    .bind(id)
    .execute(connection)
    .await?;
    Ok(())
}

/// Appends an event to a stream's chain. The database sets its number and hashes.
pub(in crate::store) async fn append_event(
    connection: &mut PgConnection,
    stream: Uuid,
    at: formation::UnixMicros,
    kind: &str,
    body: &Value,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO events (stream, number, at_us, kind, body, previous, hash)
         VALUES ($1, 1, $2, $3, $4, '', '')",
    )
    .bind(stream)
    .bind(number_to_row(at.0)?)
    .bind(kind)
    .bind(body.to_string())
    .execute(connection)
    .await?;
    Ok(())
}

/// Stores decisions with the members' certificates, in one SQL statement. Call this after the
/// decided rows are written: a trigger compares each commit with them.
pub(super) async fn commits(
    connection: &mut PgConnection,
    now: formation::UnixMicros,
    commits: &[(Uuid, &NewCommit)],
) -> Result<(), StoreError> {
    let epochs = commits.iter().map(|(_, commit)| number_to_row(commit.epoch));
    let mut leaves = LeafColumns::default();
    for (cluster, commit) in commits {
        leaves.add(*cluster, &commit.leaves);
    }
    sqlx::query(
        "WITH c AS (
             INSERT INTO commits (cluster_id, epoch, h, document, adopted, committed_us)
             SELECT n.cluster_id, n.epoch, n.h, n.document, n.adopted, $6
             FROM unnest($1, $2, $3, $4, $5) AS n (cluster_id, epoch, h, document, adopted)
         )
         INSERT INTO leaves (cluster_id, seat, purpose, certificate)
         SELECT n.cluster_id, n.seat, n.purpose, n.certificate
         FROM unnest($7, $8, $9, $10) AS n (cluster_id, seat, purpose, certificate)",
    )
    .bind(commits.iter().map(|(cluster, _)| *cluster).collect::<Vec<Uuid>>())
    .bind(epochs.collect::<Result<Vec<i64>, _>>()?)
    .bind(commits.iter().map(|(_, commit)| &commit.h.0[..]).collect::<Vec<&[u8]>>())
    .bind(commits.iter().map(|(_, commit)| commit.document.as_str()).collect::<Vec<&str>>())
    .bind(commits.iter().map(|(_, commit)| commit.adopted).collect::<Vec<bool>>())
    .bind(number_to_row(now.0)?)
    .bind(leaves.clusters)
    .bind(leaves.seats)
    .bind(leaves.purposes)
    .bind(leaves.certificates)
    .execute(connection)
    .await?;
    Ok(())
}

/// Rows of the table `leaves`, one vector for each column.
#[derive(Default)]
struct LeafColumns<'a> {
    clusters: Vec<Uuid>,
    seats: Vec<i16>,
    purposes: Vec<&'static str>,
    certificates: Vec<&'a [u8]>,
}

impl<'a> LeafColumns<'a> {
    /// Adds the certificates of all members of a cluster, seat 1 first.
    fn add(&mut self, cluster: Uuid, leaves: &'a [LeafPair]) {
        for (seat, (peer, client)) in (1..).zip(leaves) {
            for (purpose, certificate) in [("peer", peer), ("client", client)] {
                self.clusters.push(cluster);
                self.seats.push(seat);
                self.purposes.push(purpose);
                self.certificates.push(certificate);
            }
        }
    }
}
