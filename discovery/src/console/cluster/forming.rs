//! How far a cluster is with forming: its seats, and which host reaches which.

use discovery_types::api::{ClusterState, ClusterView, ProbeResult, SeatView};

use crate::console::text::{Badge, ShownTime, Tone, plain, plain_list};

/// A host with a seat, or one that waits for a seat.
pub(super) struct SeatRow {
    pub(super) place: String,
    pub(super) name: String,
    pub(super) key: String,
    pub(super) from: String,
    /// Whether the host's source address or an advertised address lies outside the networks that
    /// its token is bound to.
    pub(super) is_outside: bool,
    pub(super) peer_urls: String,
    pub(super) client_urls: String,
    pub(super) token: String,
    pub(super) approved: Option<Badge>,
    pub(super) signed: Badge,
    pub(super) lease: Option<ShownTime>,
    pub(super) last_nack: Option<String>,
}

/// Result of one host's probe of another, as a cell of the table shows it.
pub(super) struct ProbeCell {
    pub(super) class: &'static str,
    pub(super) symbol: &'static str,
    pub(super) word: &'static str,
}

/// A host's row in the table of probes: its probes of the other hosts, and whether it has signed.
pub(super) struct ProbeRow {
    pub(super) seat: u8,
    pub(super) name: String,
    pub(super) cells: Vec<ProbeCell>,
    pub(super) signed: ProbeCell,
}

/// Table of probes: a row for each host that probes, a column for each one that is probed.
pub(super) struct ProbeTable {
    pub(super) heads: Vec<String>,
    pub(super) rows: Vec<ProbeRow>,
    /// Failed probes, as sentences.
    pub(super) failures: Vec<String>,
    pub(super) seated: usize,
    pub(super) size: usize,
    pub(super) reached: usize,
    /// Number of probes in a full table: each host probes every other one.
    pub(super) wanted: usize,
    pub(super) signatures: usize,
}

const OWN: ProbeCell = ProbeCell { class: "own", symbol: "", word: "itself" };
const FREE: ProbeCell = ProbeCell { class: "free", symbol: "", word: "no host yet" };
const WAITING: ProbeCell = ProbeCell { class: "waiting", symbol: "·", word: "not probed yet" };
const UNREPORTED: ProbeCell = ProbeCell { class: "free", symbol: "–", word: "not reported" };
const REACHED: ProbeCell = ProbeCell { class: "reached", symbol: "✓", word: "reached" };
const FAILED: ProbeCell = ProbeCell { class: "failed", symbol: "✗", word: "not reached" };
const SIGNED: ProbeCell = ProbeCell { class: "reached", symbol: "✓", word: "signed" };
const UNSIGNED: ProbeCell = ProbeCell { class: "waiting", symbol: "·", word: "not signed yet" };

/// Whether a cluster in this state has yet to decide its list of members.
pub(super) fn is_forming(state: ClusterState) -> bool {
    matches!(state, ClusterState::Draft | ClusterState::Open | ClusterState::Preparing)
}

/// Makes the table of probes. `None` for a draft, and for a cluster that ended before its commit.
pub(super) fn probe_table(view: &ClusterView) -> Option<ProbeTable> {
    let ended = [ClusterState::Draft, ClusterState::Abandoned, ClusterState::Expired];
    if ended.contains(&view.summary.state) {
        return None;
    }
    let at = |seat: u8| view.seats.iter().find(|host| host.seat == Some(seat));
    let seats = 1..=view.summary.size;
    let name = |seat: u8| at(seat).map_or_else(|| "free".to_owned(), |host| host.name.to_string());
    // The last signature commits the list, so some probes may never be reported.
    let missing = |host: Option<&SeatView>| match host {
        None => FREE,
        Some(_) if is_forming(view.summary.state) => WAITING,
        Some(_) => UNREPORTED,
    };
    let row = |seat: u8| ProbeRow {
        seat,
        name: name(seat),
        cells: seats.clone().map(|to| cell(at(seat), seat, to, missing(at(to)))).collect(),
        signed: match at(seat) {
            None => FREE,
            Some(host) if host.acked => SIGNED,
            Some(_) => UNSIGNED,
        },
    };
    let failure = |(host, probe): (&SeatView, &ProbeResult)| {
        let why = plain(probe.error.as_deref().unwrap_or("no reason was given"));
        format!("{} doesn't reach {}: {why}", host.name, name(probe.seat))
    };
    let seated: Vec<&SeatView> = view.seats.iter().filter(|host| host.seat.is_some()).collect();
    let probes: Vec<(&SeatView, &ProbeResult)> =
        seated.iter().flat_map(|host| host.probes.iter().map(|probe| (*host, probe))).collect();
    let size = usize::from(view.summary.size);
    Some(ProbeTable {
        heads: seats.clone().map(name).collect(),
        rows: seats.clone().map(row).collect(),
        failures: probes.iter().filter(|(_, probe)| !probe.reached).copied().map(failure).collect(),
        seated: seated.len(),
        size,
        reached: probes.iter().filter(|(_, probe)| probe.reached).count(),
        wanted: size * size.saturating_sub(1),
        signatures: seated.iter().filter(|host| host.acked).count(),
    })
}

/// Makes the cell for the probe by the host at `seat` of the host at `to`. `missing` is the cell
/// for a probe that hasn't been reported.
fn cell(host: Option<&SeatView>, seat: u8, to: u8, missing: ProbeCell) -> ProbeCell {
    if seat == to {
        return OWN;
    }
    let Some(host) = host else { return FREE };
    match host.probes.iter().find(|probe| probe.seat == to) {
        Some(probe) if probe.reached => REACHED,
        Some(_) => FAILED,
        None => missing,
    }
}

/// Makes the rows of the hosts: those with seats, then standbys and hosts that went away.
pub(super) fn seat_rows(view: &ClusterView, now_ms: i64) -> Vec<SeatRow> {
    view.seats.iter().map(|host| seat_row(host, now_ms)).collect()
}

fn seat_row(host: &SeatView, now_ms: i64) -> SeatRow {
    SeatRow {
        place: host.seat.map_or_else(|| "standby".to_owned(), |seat| seat.to_string()),
        name: host.name.to_string(),
        key: host.agent.to_string(),
        from: host.source.as_deref().map_or_else(|| "-".to_owned(), plain),
        is_outside: host.is_outside_binding(),
        peer_urls: plain_list(&host.peer_urls),
        client_urls: plain_list(&host.client_urls),
        token: host.grant.to_string(),
        approved: host.is_approved.map(|is_approved| match is_approved {
            true => Badge::new(Tone::Good, "approved"),
            false => Badge::new(Tone::Busy, "waits for approval"),
        }),
        signed: match host.acked {
            true => Badge::new(Tone::Good, "signed"),
            false => Badge::new(Tone::Busy, "not yet"),
        },
        lease: host.lease_until_ms.map(|at| ShownTime::relative(at, now_ms)),
        last_nack: host.last_nack.as_deref().map(plain),
    }
}
