//! Cluster → rows: only what differs from what was loaded.

use discovery_formation as formation;
use discovery_formation::service::{Agent, Cluster, Frozen, Place, Probe};
use serde_json::Value;
use sqlx::PgConnection;
use sqlx::types::Json;
use uuid::Uuid;

use super::super::StoreError;
use super::NewCommit;
use super::load::{MatrixRow, ProbeJson};
use crate::domain::epoch_to_row;

/// Writes what differs. `address` is noted for keys that are new.
pub(super) async fn save(
    connection: &mut PgConnection,
    before: &Cluster,
    after: &Cluster,
    next_deadline: Option<formation::Micros>,
    now: formation::Micros,
    address: Option<&str>,
) -> Result<(), StoreError> {
    // A renewed lease alone leaves the cluster's row in peace: its next deadline may then stand
    // too early there, and the sweep finds nothing to do and moves it.
    if row_differs(before, after) || before == after {
        cluster_row(connection, after, next_deadline).await?;
    }
    let id = Uuid::from_u128(after.id.0);
    for (key, agent) in &after.agents {
        if before.agents.get(key) != Some(agent) {
            agent_row(connection, after, *key, agent, now, address).await?;
        }
    }
    if before.frozen != after.frozen {
        frozen_rows(connection, after, before.frozen.as_ref(), after.frozen.as_ref()).await?;
    }
    for (key, raft_cluster) in &after.reports {
        if before.reports.get(key) != Some(raft_cluster) {
            sqlx::query(
                "INSERT INTO reports (cluster_id, key, raft_cluster) VALUES ($1, $2, $3)
                 ON CONFLICT (cluster_id, key) DO UPDATE SET raft_cluster = $3",
            )
            .bind(id)
            .bind(&key.0[..])
            .bind(&raft_cluster.to_be_bytes()[..])
            .execute(&mut *connection)
            .await?;
        }
    }
    Ok(())
}

/// Whether anything in the cluster's own row differs.
fn row_differs(before: &Cluster, after: &Cluster) -> bool {
    before.phase != after.phase
        || before.epoch != after.epoch
        || before.floor != after.floor
        || before.rev != after.rev
        || before.deadline != after.deadline
        || before.next_place != after.next_place
        || before.unsettled != after.unsettled
        || before.ended != after.ended
        || before.split != after.split
        || before.last_error != after.last_error
        || before.frozen.as_ref().map(|f| (f.h, f.at)) != after.frozen.as_ref().map(|f| (f.h, f.at))
}

async fn cluster_row(
    connection: &mut PgConnection,
    cluster: &Cluster,
    next_deadline: Option<formation::Micros>,
) -> Result<(), StoreError> {
    let frozen = cluster.frozen.as_ref();
    let (ended, split) = (cluster.ended.as_ref(), cluster.split.as_ref());
    let error = cluster.last_error.as_ref();
    sqlx::query(
        "UPDATE clusters SET phase = $2, deadline_us = $3, epoch = $4, floor = $5, rev = $6,
             next_place = $7, frozen_epoch = $8, frozen_h = $9, frozen_statement = $10,
             frozen_us = $11, unsettled = $12, ended_cause = $13, ended_us = $14, ended_by = $15,
             split_other = $16, split_epoch = $17, error_us = $18, error_key = $19,
             error_text = $20, next_deadline_us = $21
         WHERE id = $1",
    )
    .bind(Uuid::from_u128(cluster.id.0))
    .bind(cluster.phase.as_str())
    .bind(epoch_to_row(cluster.deadline.0)?)
    .bind(epoch_to_row(cluster.epoch)?)
    .bind(epoch_to_row(cluster.floor)?)
    .bind(epoch_to_row(cluster.rev)?)
    .bind(epoch_to_row(cluster.next_place)?)
    .bind(frozen.map(|frozen| epoch_to_row(frozen.proposal.epoch)).transpose()?)
    .bind(frozen.map(|frozen| frozen.h.0.to_vec()))
    .bind(frozen.map(|frozen| frozen.proposal.statement.0.to_vec()))
    .bind(frozen.map(|frozen| epoch_to_row(frozen.at.0)).transpose()?)
    .bind(cluster.unsettled)
    .bind(ended.map(|ended| ended.cause.as_str()))
    .bind(ended.map(|ended| epoch_to_row(ended.at.0)).transpose()?)
    .bind(ended.map(|ended| ended.by.as_str()))
    .bind(split.map(|split| split.other.0.to_vec()))
    .bind(split.map(|split| epoch_to_row(split.epoch)).transpose()?)
    .bind(error.map(|error| epoch_to_row(error.at.0)).transpose()?)
    .bind(error.and_then(|error| error.key).map(|key| key.0.to_vec()))
    .bind(error.map(|error| error.text.as_str()))
    .bind(next_deadline.map(|at| epoch_to_row(at.0)).transpose()?)
    .execute(connection)
    .await?;
    Ok(())
}

async fn agent_row(
    connection: &mut PgConnection,
    cluster: &Cluster,
    key: formation::KeyId,
    agent: &Agent,
    now: formation::Micros,
    address: Option<&str>,
) -> Result<(), StoreError> {
    let (seat, standby) = match agent.place {
        Place::Seat(seat) => (Some(i16::from(seat)), None),
        Place::Standby(order) => (None, Some(epoch_to_row(order)?)),
        Place::Absent => (None, None),
    };
    let release = agent.release.as_ref();
    sqlx::query(
        "INSERT INTO agents (cluster_id, size, key, grant_id, record, token_record, seat, standby,
             lease_us, boot, nonce, highest_epoch, counts, held_us, release_epoch, release_jws,
             address, redeemed_us)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)
         ON CONFLICT (cluster_id, key) DO UPDATE SET grant_id = $4, record = $5, token_record = $6,
             seat = $7, standby = $8, lease_us = $9, boot = $10, nonce = $11, highest_epoch = $12,
             counts = $13, held_us = $14, release_epoch = $15, release_jws = $16",
    )
    .bind(Uuid::from_u128(cluster.id.0))
    .bind(i16::from(cluster.statement.size))
    .bind(&key.0[..])
    .bind(&*agent.record.grant.0)
    .bind(&*agent.record.jws)
    .bind(&*agent.record.token_jws)
    .bind(seat)
    .bind(standby)
    .bind(epoch_to_row(agent.lease_until.0)?)
    .bind(agent.session.map(|session| epoch_to_row(session.boot)).transpose()?)
    .bind(agent.session.map(|session| session.nonce.to_be_bytes().to_vec()))
    .bind(epoch_to_row(agent.highest_epoch)?)
    .bind(i32::try_from(agent.counts).unwrap_or(i32::MAX))
    .bind(epoch_to_row(agent.held_until.0)?)
    .bind(release.map(|release| epoch_to_row(release.epoch)).transpose()?)
    .bind(release.map(|release| &*release.jws))
    .bind(address)
    .bind(epoch_to_row(now.0)?)
    .execute(connection)
    .await?;
    Ok(())
}

async fn frozen_rows(
    connection: &mut PgConnection,
    cluster: &Cluster,
    before: Option<&Frozen>,
    after: Option<&Frozen>,
) -> Result<(), StoreError> {
    let id = Uuid::from_u128(cluster.id.0);
    let same = before.map(|frozen| frozen.h) == after.map(|frozen| frozen.h);
    if !same {
        // Acks, probes and URLs go with their seats.
        sqlx::query("DELETE FROM frozen_seats WHERE cluster_id = $1")
            .bind(id)
            .execute(&mut *connection)
            .await?;
        if let Some(frozen) = after {
            seat_rows(connection, cluster, frozen).await?;
        }
    }
    let Some(after) = after else { return Ok(()) };
    let before = before.filter(|_| same);
    let epoch = epoch_to_row(after.proposal.epoch)?;
    for (key, jws) in &after.acks {
        if before.is_some_and(|before| before.acks.contains_key(key)) {
            continue;
        }
        sqlx::query("INSERT INTO acks (cluster_id, key, epoch, jws) VALUES ($1, $2, $3, $4)")
            .bind(id)
            .bind(&key.0[..])
            .bind(epoch)
            .bind(&**jws)
            .execute(&mut *connection)
            .await?;
    }
    for (key, row) in &after.probes {
        if before.is_some_and(|before| before.probes.get(key) == Some(row)) {
            continue;
        }
        let row: MatrixRow = row
            .iter()
            .map(|(peer, found)| {
                let found = match found {
                    Probe::Reached => ProbeJson::Reached,
                    Probe::Failed(why) => ProbeJson::Failed(why.clone()),
                };
                (data_encoding::HEXLOWER.encode(&peer.0), found)
            })
            .collect();
        sqlx::query(
            "INSERT INTO probes (cluster_id, key, epoch, row) VALUES ($1, $2, $3, $4)
             ON CONFLICT (cluster_id, key) DO UPDATE SET epoch = $3, row = $4",
        )
        .bind(id)
        .bind(&key.0[..])
        .bind(epoch)
        .bind(Json(row))
        .execute(&mut *connection)
        .await?;
    }
    Ok(())
}

async fn seat_rows(
    connection: &mut PgConnection,
    cluster: &Cluster,
    frozen: &Frozen,
) -> Result<(), StoreError> {
    let id = Uuid::from_u128(cluster.id.0);
    for (seat, record) in (1_i16..).zip(&frozen.proposal.records) {
        sqlx::query(
            "INSERT INTO frozen_seats (cluster_id, size, epoch, seat, key, name, incarnation,
                 node_key, grant_id, record, token_record)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
        )
        .bind(id)
        .bind(i16::from(cluster.statement.size))
        .bind(epoch_to_row(frozen.proposal.epoch)?)
        .bind(seat)
        .bind(&record.key.0[..])
        .bind(&record.name)
        .bind(&record.incarnation.0.to_be_bytes()[..])
        .bind(&record.node_key.0[..])
        .bind(&*record.grant.0)
        .bind(&*record.jws)
        .bind(&*record.token_jws)
        .execute(&mut *connection)
        .await?;
        for url in record.peer_urls.iter().chain(&record.client_urls) {
            sqlx::query("INSERT INTO frozen_urls (cluster_id, url, seat) VALUES ($1, $2, $3)")
                .bind(id)
                .bind(url)
                .bind(seat)
                .execute(&mut *connection)
                .await?;
        }
    }
    Ok(())
}

/// A cluster comes back to life: if its name was taken meanwhile, it gets a part of its id.
pub(super) async fn free_name(connection: &mut PgConnection, id: Uuid) -> Result<(), StoreError> {
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

/// One link of a stream's chain; the database numbers and hashes it.
pub(in crate::store) async fn event(
    connection: &mut PgConnection,
    stream: Uuid,
    at: formation::Micros,
    kind: &str,
    body: &Value,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO events (stream, number, at_us, kind, body, previous, hash)
         VALUES ($1, 1, $2, $3, $4, '', '')",
    )
    .bind(stream)
    .bind(epoch_to_row(at.0)?)
    .bind(kind)
    .bind(body.to_string())
    .execute(connection)
    .await?;
    Ok(())
}

/// The decision, with the members' certificates.
pub(super) async fn commit(
    connection: &mut PgConnection,
    id: Uuid,
    now: formation::Micros,
    commit: &NewCommit,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO commits (cluster_id, epoch, h, document, adopted, committed_us)
         VALUES ($1, $2, $3, $4, $5, $6)",
    )
    .bind(id)
    .bind(epoch_to_row(commit.epoch)?)
    .bind(&commit.h.0[..])
    .bind(commit.document.as_str())
    .bind(commit.adopted)
    .bind(epoch_to_row(now.0)?)
    .execute(&mut *connection)
    .await?;
    for (seat, (peer, client)) in (1_i16..).zip(&commit.leaves) {
        for (purpose, certificate) in [("peer", peer), ("client", client)] {
            sqlx::query(
                "INSERT INTO leaves (cluster_id, seat, purpose, certificate) VALUES ($1, $2, $3, $4)",
            )
            .bind(id)
            .bind(seat)
            .bind(purpose)
            .bind(certificate)
            .execute(&mut *connection)
            .await?;
        }
    }
    Ok(())
}
