//! Converts a cluster to the responses that show it.

use std::sync::Arc;

use data_encoding::BASE64;
use discovery_formation as formation;
use discovery_formation::service::{
    AgentStanding, Answer, Cluster, FormationSettings, Phase, ProbeOutcome, Seating, WaitReason,
    explain,
};
use discovery_types::api::{
    self, ClusterState, ClusterSummary, CommitDocument, Explanation, PollResponse, ProbeResult,
};
use discovery_types::convert;
use discovery_types::jws::Jws;
use discovery_types::leaves::Leaves;
use discovery_types::name::Name;
use discovery_types::statement::StatementChain;

use super::{ClusterReply, Delivery};
use crate::error::ApiError;
use crate::ledger::Generation;
use crate::store::StoreError;
use crate::store::admins::StoredEvent;
use crate::store::cluster::LeafPair;
use crate::store::clusters::{ClusterSummaryRow, Origin};

/// Maximum number of events that a cluster's timeline is built from; the newest are used.
pub(crate) const TIMELINE_EVENTS: i64 = 500;
/// Code of the explanation that comes from the database, not from the cluster.
const DATABASE_CHANGED: &str = "database_changed";
/// Length of a PEM line, in characters.
const PEM_WIDTH: usize = 64;

/// Builds the response to poll, ack, nack, probes and release.
pub(crate) fn poll_response(
    applied: &ClusterReply,
    key: Option<formation::AgentKey>,
    settings: &FormationSettings,
    generation: Option<&Generation>,
) -> Result<PollResponse, ApiError> {
    let ClusterReply { cluster, chain, now, answer, document, grants, .. } = applied;
    let agent = key.and_then(|key| cluster.agents.get(&key));
    let forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    let damaged = |_| StoreError::damaged("a record of the frozen list");
    let proposal = match (&answer.proposal, &cluster.frozen) {
        (Some(_), Some(frozen)) => {
            Some(convert::wire_proposal(&frozen.proposal, grants.clone()).map_err(damaged)?)
        }
        _ => None,
    };
    let approvals = match &proposal {
        Some(_) if cluster.statement.needs_approval => approvals(cluster),
        _ => Vec::new(),
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
        approvals,
        matrix: matrix(cluster),
        releases,
        document: document.as_ref().map(|delivery| commit_document(delivery, &chain.jws())),
        explain: explanations(cluster, chain, settings, *now, generation),
    })
}

/// Returns the approvals of the listed agents.
fn approvals(cluster: &Cluster) -> Vec<Jws> {
    let seats = cluster.seats();
    let approval = |key| cluster.agents[key].approval.as_ref()?.parse().ok();
    seats.values().filter_map(approval).collect()
}

fn prepare_ms(
    cluster: &Cluster,
    settings: &FormationSettings,
    now: formation::UnixMicros,
) -> Option<u64> {
    let frozen = cluster.frozen.as_ref().filter(|_| cluster.phase == Phase::Preparing)?;
    Some(now.until(frozen.at.after(settings.ack_timeout)).0)
}

/// Builds a commit document: the signed document, its statement chain and the caller's
/// certificates.
pub(crate) fn commit_document(delivery: &Delivery, statements: &[Jws]) -> CommitDocument {
    let leaves = delivery.leaves.as_ref().map(leaves);
    CommitDocument { document: delivery.document.clone(), statements: statements.to_vec(), leaves }
}

/// Converts a member's two certificates to PEM.
pub(crate) fn leaves((peer, client): &LeafPair) -> Leaves {
    Leaves { peer: pem("CERTIFICATE", peer), client: pem("CERTIFICATE", client) }
}

/// Converts DER to PEM (RFC 7468).
pub(crate) fn pem(label: &str, der: &[u8]) -> String {
    let mut text = format!("-----BEGIN {label}-----\n");
    for line in BASE64.encode(der).as_bytes().chunks(PEM_WIDTH) {
        text.extend(line.iter().map(|byte| char::from(*byte)));
        text.push('\n');
    }
    text.push_str(&format!("-----END {label}-----\n"));
    text
}

fn standing(cluster: &Cluster, answer: &Answer, key: Option<formation::AgentKey>) -> api::Standing {
    let decided = matches!(answer.phase, Phase::Committed | Phase::Formed | Phase::Retired);
    let seat = |key| cluster.frozen.as_ref().and_then(|frozen| frozen.proposal.seat_of(key));
    if let (true, Some(seat)) = (decided, key.and_then(seat)) {
        return api::Standing::Member(seat);
    }
    match answer.standing {
        Some(AgentStanding::Seat(seat)) => api::Standing::Seated(seat),
        Some(AgentStanding::Standby { ahead }) => api::Standing::Standby(ahead as u32),
        // An agent whose lease has ended gets back into the queue with its next poll, so it is
        // shown at the end.
        Some(AgentStanding::Unseated) => api::Standing::Standby(cluster.standbys().len() as u32),
        None => api::Standing::Reader,
    }
}

fn milliseconds(at: formation::UnixMicros) -> i64 {
    (at.0 / 1_000) as i64
}

/// Returns the connectivity matrix of the frozen list.
pub(crate) fn matrix(cluster: &Cluster) -> Vec<api::MatrixRow> {
    let Some(frozen) = &cluster.frozen else { return Vec::new() };
    let row = |(seat, record): (u8, &Arc<formation::AgentRecord>)| {
        let row = frozen.probes.get(&record.key)?;
        let result = |(peer, probe): (&formation::AgentKey, &ProbeOutcome)| {
            Some(ProbeResult {
                seat: frozen.proposal.seat_of(*peer)?,
                reached: *probe == ProbeOutcome::Reached,
                error: match probe {
                    ProbeOutcome::Reached => None,
                    ProbeOutcome::Failed(why) => Some(why.clone()),
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

/// Returns the reasons why the cluster waits. A reason that concerns the whole database comes
/// first.
pub(crate) fn explanations(
    cluster: &Cluster,
    chain: &StatementChain,
    settings: &FormationSettings,
    now: formation::UnixMicros,
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
    let name = |key: &formation::AgentKey| {
        let agent = cluster.agents.get(key);
        agent.map_or_else(|| key.to_string(), |agent| agent.record.name.clone())
    };
    // If `generation` is given, only the generation decides whether the explanation
    // [`DATABASE_CHANGED`] is shown. The cluster stores whether its database was settled, too. That
    // can be outdated, because only a cluster event updates it.
    let known = generation.is_some();
    let own = explain(cluster, settings, now).into_iter();
    let own = own.filter(|line| !(known && line.code == DATABASE_CHANGED));
    let is_adopted = chain.newest().adopted.is_some();
    let remedy = |line: &WaitReason| {
        let for_adoption = advice_for_adoption(line.code).filter(|_| is_adopted);
        for_adoption.map_or_else(|| line.remedy.clone(), str::to_owned).replace("NAME", called)
    };
    lines.extend(own.map(|line: WaitReason| Explanation {
        command: Some(remedy(&line)).filter(|text| !text.is_empty()),
        code: line.code.into(),
        missing: line.explanation,
        held_by: line.blocking_agents.iter().map(name).collect(),
        last_error: line.last_error,
        next_retry_ms: line.next_try.map(milliseconds),
    }));
    if chain.trusts_cas_before_adoption() {
        // Until all members are taken over, the earlier lines say what is next.
        lines.extend((cluster.phase == Phase::Formed).then(|| cas_before_adoption(called)));
    } else if chain.newest().also_trusted.is_some() {
        lines.push(Explanation {
            code: "cas_being_replaced".into(),
            missing: "the cluster's CAs are being replaced: members trust the old and the new ones"
                .into(),
            held_by: vec!["owner".into()],
            last_error: None,
            next_retry_ms: None,
            command: Some(format!("muster-discovery cluster rotate-ca {called}")),
        });
    }
    lines
}

/// Returns what to do in a cluster that is being adopted, for these reasons to wait. Its members
/// run already, so the advice for a cluster that forms would be wrong. `None` for other reasons.
fn advice_for_adoption(code: &str) -> Option<&'static str> {
    match code {
        "seats_free" => Some(
            "run `muster-agent adopt enrol` on the hosts of all members, with a bundle for each; give \
             up with `muster-discovery cluster abandon NAME`, since no etcd is changed yet",
        ),
        "nodes_not_reported" => Some(
            "run `muster-agent adopt take-over` on these hosts, one after the other; where that is \
             done, look at `muster-agent status`",
        ),
        _ => None,
    }
}

/// Explains that the CAs from before the adoption are still trusted. If an owner drops them too
/// early, members and clients refuse each other.
fn cas_before_adoption(called: &str) -> Explanation {
    Explanation {
        code: "cas_before_adoption".into(),
        missing: "members still trust the CAs from before the adoption".into(),
        held_by: vec!["owner".into()],
        last_error: None,
        next_retry_ms: None,
        command: Some(format!(
            "take over all members; then run `muster-agent adopt certificates` on one host after the \
             other; once no client uses a certificate of those CAs, run `muster-discovery cluster \
             rotate-ca {called}`"
        )),
    }
}

/// Builds an item of the cluster list from its row.
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
        heard: Some(row.reporting_members)
            .filter(|_| runs)
            .map(|count| count.unsigned_abs() as u32),
    })
}

/// Returns the agents as admins see them: seats in order, then standbys, then agents whose lease
/// has ended.
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
                .claims_unverified(discovery_types::jws::JwsType::Record)
                .ok()?;
            let origin = origins.iter().find(|origin| origin.key[..] == key.0);
            Some(api::SeatView {
                seat,
                name: record.name,
                agent: record.agent_key.key_id(),
                agent_key: Some(record.agent_key),
                is_approved: cluster.statement.needs_approval.then(|| cluster.is_approved(*key)),
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

/// Returns the id of the Raft cluster that a majority of members reports, in hex.
pub(crate) fn raft_cluster(cluster: &Cluster) -> Option<String> {
    cluster.majority_report().map(|id| format!("{id:016x}"))
}

/// Builds a cluster's timeline from its events (newest first). Its moment `full` is the time at
/// which the last missing agent took its seat.
pub(crate) fn timeline(mut events: Vec<StoredEvent>) -> Vec<api::Moment> {
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
            | "recovered" | "recovery_contested" | "service_announced" => {
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

/// Returns how a cluster ended, and until when that can be undone.
pub(crate) fn end_view(
    cluster: &Cluster,
    settings: &FormationSettings,
    now: formation::UnixMicros,
) -> Option<api::EndView> {
    let ended = cluster.ended.as_ref()?;
    let until = cluster.undo_until(settings).filter(|until| *until >= now).map(milliseconds);
    let (unretire_until_ms, reopen_until_ms) = match cluster.phase {
        Phase::Expired => (None, until),
        _ => (until, None),
    };
    Some(api::EndView {
        at_ms: milliseconds(ended.at),
        by: ended.by.clone(),
        unretire_until_ms,
        reopen_until_ms,
    })
}

/// Returns a text if another valid commit document of this cluster exists, which is called a split.
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
