//! The cluster, as it is shown.

use std::sync::Arc;

use data_encoding::BASE64;
use discovery_formation as formation;
use discovery_formation::service::{
    Answer, Cluster, Line, Phase, Probe, Seating, Settings, Standing, explain,
};
use discovery_types::api::{
    self, ClusterState, ClusterSummary, CommitDocument, Explanation, PollResponse, ProbeResult,
};
use discovery_types::convert;
use discovery_types::jws::Jws;
use discovery_types::leaves::Leaves;
use discovery_types::name::Name;
use discovery_types::statement::StatementChain;

use super::{Applied, Delivery};
use crate::error::ApiError;
use crate::ledger::Generation;
use crate::store::StoreError;
use crate::store::admins::Event;
use crate::store::cluster::LeafPair;
use crate::store::clusters::{ClusterSummaryRow, Origin};

/// Events that a cluster's timeline is made of, the newest ones.
pub(crate) const TIMELINE_EVENTS: i64 = 500;
/// The code of the one reason that isn't the cluster's own.
const DATABASE_CHANGED: &str = "database_changed";
/// PEM lines.
const PEM_WIDTH: usize = 64;

/// The answer to poll, ack, nack, probes and release.
pub(crate) fn poll_response(
    applied: &Applied,
    key: Option<formation::KeyId>,
    settings: &Settings,
    generation: Option<&Generation>,
) -> Result<PollResponse, ApiError> {
    let Applied { cluster, chain, now, answer, document, grants, .. } = applied;
    let agent = key.and_then(|key| cluster.agents.get(&key));
    let forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    let damaged = |_| StoreError::damaged("a record of the frozen list");
    let proposal = match (&answer.proposal, &cluster.frozen) {
        (Some(_), Some(frozen)) => {
            Some(convert::wire_proposal(&frozen.proposal, grants.clone()).map_err(damaged)?)
        }
        _ => None,
    };
    let releases = match forming {
        true => cluster
            .agents
            .values()
            .filter_map(|agent| agent.release.as_ref()?.jws.parse::<Jws>().ok())
            .collect(),
        false => Vec::new(),
    };
    Ok(PollResponse {
        rev: answer.rev,
        now_ms: milliseconds(*now),
        state: convert::state(answer.phase),
        epoch: answer.epoch,
        standing: standing(cluster, answer, key),
        seated: cluster.seats().len() as u8,
        size: cluster.statement.size,
        lease_ms: agent.filter(|_| forming).map(|agent| now.until(agent.lease_until).0),
        prepare_ms: prepare_ms(cluster, settings, *now),
        statements: chain.jws(),
        proposal,
        matrix: matrix(cluster),
        releases,
        document: document.as_ref().map(|delivery| commit_document(delivery, &chain.jws())),
        explain: explanations(cluster, chain, settings, *now, generation),
    })
}

fn prepare_ms(cluster: &Cluster, settings: &Settings, now: formation::Micros) -> Option<u64> {
    let frozen = cluster.frozen.as_ref().filter(|_| cluster.phase == Phase::Preparing)?;
    Some(now.until(frozen.at.after(settings.prepare)).0)
}

/// A document with its chain and the asker's leaves.
pub(crate) fn commit_document(delivery: &Delivery, statements: &[Jws]) -> CommitDocument {
    let leaves = delivery.leaves.as_ref().map(leaves);
    CommitDocument { document: delivery.document.clone(), statements: statements.to_vec(), leaves }
}

/// A member's two certificates.
pub(crate) fn leaves((peer, client): &LeafPair) -> Leaves {
    Leaves { peer: pem("CERTIFICATE", peer), client: pem("CERTIFICATE", client) }
}

/// DER → PEM (RFC 7468).
pub(crate) fn pem(label: &str, der: &[u8]) -> String {
    let mut text = format!("-----BEGIN {label}-----\n");
    for line in BASE64.encode(der).as_bytes().chunks(PEM_WIDTH) {
        text.extend(line.iter().map(|byte| char::from(*byte)));
        text.push('\n');
    }
    text.push_str(&format!("-----END {label}-----\n"));
    text
}

fn standing(cluster: &Cluster, answer: &Answer, key: Option<formation::KeyId>) -> api::Standing {
    let decided = matches!(answer.phase, Phase::Committed | Phase::Formed | Phase::Retired);
    let seat = |key| cluster.frozen.as_ref().and_then(|frozen| frozen.proposal.seat_of(key));
    if let (true, Some(seat)) = (decided, key.and_then(seat)) {
        return api::Standing::Member(seat);
    }
    match answer.standing {
        Some(Standing::Seat(seat)) => api::Standing::Seated(seat),
        Some(Standing::Standby { ahead }) => api::Standing::Standby(ahead as u32),
        // A lapsed agent that speaks is queued anew with its next poll.
        Some(Standing::Out) => api::Standing::Standby(cluster.standbys().len() as u32),
        None => api::Standing::Reader,
    }
}

fn milliseconds(at: formation::Micros) -> i64 {
    (at.0 / 1_000) as i64
}

/// The matrix of the present list.
pub(crate) fn matrix(cluster: &Cluster) -> Vec<api::MatrixRow> {
    let Some(frozen) = &cluster.frozen else { return Vec::new() };
    let row = |(seat, record): (u8, &Arc<formation::Record>)| {
        let row = frozen.probes.get(&record.key)?;
        let result = |(peer, probe): (&formation::KeyId, &Probe)| {
            Some(ProbeResult {
                seat: frozen.proposal.seat_of(*peer)?,
                reached: *probe == Probe::Reached,
                error: match probe {
                    Probe::Reached => None,
                    Probe::Failed(why) => Some(why.clone()),
                },
                round_trip_us: None,
            })
        };
        let mut results: Vec<_> = row.iter().filter_map(result).collect();
        results.sort_by_key(|result| result.seat);
        Some(api::MatrixRow { seat, results })
    };
    (1..).zip(&frozen.proposal.records).filter_map(row).collect()
}

/// Why it waits, the database's own reason first.
pub(crate) fn explanations(
    cluster: &Cluster,
    chain: &StatementChain,
    settings: &Settings,
    now: formation::Micros,
    generation: Option<&Generation>,
) -> Vec<Explanation> {
    let called = chain.newest().name.as_str();
    let mut lines = Vec::new();
    if let Some(text) = generation.and_then(Generation::explain) {
        lines.push(Explanation {
            code: DATABASE_CHANGED.into(),
            missing: text,
            held_by: vec!["service".into()],
            last_error: None,
            next_retry_ms: None,
            command: Some("muster-discovery process list".into()),
        });
    }
    let name = |key: &formation::KeyId| {
        let agent = cluster.agents.get(key);
        agent.map_or_else(|| key.to_string(), |agent| agent.record.name.clone())
    };
    // The database's own reason was given above, or is over since the cluster's last event.
    let known = generation.is_some();
    let own = explain(cluster, settings, now).into_iter();
    let own = own.filter(|line| !(known && line.code == DATABASE_CHANGED));
    lines.extend(own.map(|line: Line| Explanation {
        code: line.code.into(),
        missing: line.what,
        held_by: line.who.iter().map(name).collect(),
        last_error: line.last_error,
        next_retry_ms: line.next.map(milliseconds),
        command: Some(line.way_out.replace("NAME", called)).filter(|text| !text.is_empty()),
    }));
    lines
}

/// A row of the list.
pub(crate) fn summary_of(row: &ClusterSummaryRow) -> Result<ClusterSummary, StoreError> {
    let damaged = || StoreError::damaged(format!("the row of cluster {}", row.id));
    let state = match row.phase.as_str() {
        "draft" => ClusterState::Draft,
        phase => convert::state(Phase::parse(phase).ok_or_else(damaged)?),
    };
    let forming =
        matches!(state, ClusterState::Draft | ClusterState::Open | ClusterState::Preparing);
    let runs = matches!(state, ClusterState::Committed | ClusterState::Formed);
    Ok(ClusterSummary {
        cluster: row.id,
        name: row.name.parse::<Name>().map_err(|_| damaged())?,
        size: row.size as u8,
        state,
        epoch: row.epoch.unsigned_abs(),
        seated: row.seated as u8,
        standbys: row.standbys as u32,
        created_at_ms: row.created_us / 1_000,
        deadline_at_ms: forming.then_some(row.deadline_us / 1_000),
        members: row.members.filter(|_| runs).map(|count| count.unsigned_abs() as u32),
        heard: Some(row.heard).filter(|_| runs).map(|count| count.unsigned_abs() as u32),
    })
}

/// Agents as admins see them: seats in order, then standbys, then those who have lapsed.
pub(crate) fn seats(cluster: &Cluster, origins: &[Origin]) -> Vec<api::SeatView> {
    let mut agents: Vec<_> = cluster.agents.iter().collect();
    agents.sort_by_key(|(_, agent)| match agent.seating {
        Seating::Seat(seat) => (0, u64::from(seat)),
        Seating::Standby(order) => (1, order),
        Seating::Absent => (2, agent.lease_until.0),
    });
    let matrix = matrix(cluster);
    agents
        .into_iter()
        .filter_map(|(key, agent)| {
            let seat = match agent.seating {
                Seating::Seat(seat) => Some(seat),
                Seating::Standby(_) | Seating::Absent => None,
            };
            let forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
            let row = |row: &&api::MatrixRow| Some(row.seat) == seat;
            let error = cluster.last_error.as_ref().filter(|error| error.key == Some(*key));
            let frozen = cluster.frozen.as_ref();
            let record: discovery_types::record::Record = agent
                .record
                .jws
                .parse::<Jws>()
                .ok()?
                .claims_unverified(discovery_types::jws::Typ::Record)
                .ok()?;
            let origin = origins.iter().find(|origin| origin.key[..] == key.0);
            Some(api::SeatView {
                seat,
                name: record.name,
                agent: record.agent_key.key_id(),
                incarnation: record.incarnation,
                peer_urls: record.peer_urls,
                client_urls: record.client_urls,
                grant: record.grant,
                source: origin.and_then(|origin| origin.address.clone()),
                bound_to: origin.map(Origin::bound_to).unwrap_or_default(),
                lease_until_ms: forming.then_some(milliseconds(agent.lease_until)),
                acked: frozen.is_some_and(|frozen| frozen.acks.contains_key(key)),
                probes: matrix.iter().find(row).map(|row| row.results.clone()).unwrap_or_default(),
                last_nack: error.map(|error| error.text.clone()),
            })
        })
        .collect()
}

/// The Raft cluster that a majority reports.
pub(crate) fn raft_cluster(cluster: &Cluster) -> Option<String> {
    cluster.majority_report().map(|id| format!("{id:016x}"))
}

/// A cluster's life so far, from its events (newest first): `full` is when the last missing agent
/// came.
pub(crate) fn timeline(mut events: Vec<Event>) -> Vec<api::Moment> {
    events.reverse();
    let mut moments: Vec<(String, i64)> = Vec::new();
    let (mut seated, mut full) = (None, None);
    for event in events {
        let at = event.at_us / 1_000;
        match event.kind.as_str() {
            "seated" => seated = Some(at),
            "frozen" => {
                if let Some(at) = seated.take() {
                    full = Some(at);
                    moments.push(("full".into(), at));
                }
                moments.push(("preparing".into(), at));
            }
            "open" | "reopened" | "committed" | "adopted" | "formed" | "unretired" | "split"
            | "recovered" | "recovery_contested" => {
                moments.push((event.kind, at));
            }
            "ended" => {
                let phase = event.body.get("phase").and_then(|phase| phase.as_str());
                moments.push((phase.unwrap_or("ended").to_owned(), at));
            }
            _ => {}
        }
    }
    let moment = |(event, at_ms): (String, i64)| api::Moment {
        event,
        at_ms,
        since_full_ms: full.map(|full| at_ms - full).filter(|since| *since >= 0),
    };
    moments.into_iter().map(moment).collect()
}

/// How a cluster ended, and until when that can be taken back.
pub(crate) fn ended(
    cluster: &Cluster,
    settings: &Settings,
    now: formation::Micros,
) -> Option<api::EndView> {
    let ended = cluster.ended.as_ref()?;
    let until = cluster.unretire_until(settings).filter(|until| *until >= now);
    Some(api::EndView {
        at_ms: milliseconds(ended.at),
        by: ended.by.clone(),
        unretire_until_ms: until.map(milliseconds),
    })
}

/// Competing recoveries, one sentence each with the next step.
pub(crate) fn alarms(cluster: &Cluster) -> Vec<String> {
    let split = |split: &formation::service::Split| {
        format!(
            "two commit documents of this cluster exist; the other one is {} (epoch {})",
            split.other, split.epoch
        )
    };
    cluster.split.iter().map(split).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pem_has_lines_of_64_characters() {
        let text = pem("CERTIFICATE", &[0xff; 60]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "-----BEGIN CERTIFICATE-----");
        assert_eq!((lines[1].len(), lines[2].len()), (64, 16));
        assert_eq!(lines[3], "-----END CERTIFICATE-----");
    }
}
