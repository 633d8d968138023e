//! `cluster list`, `show` and `explain`: print clusters.

use std::num::NonZeroUsize;
use std::time::Duration;

use discovery_types::api::{
    AskingHost, ClusterQuery, ClusterState, ClusterStates, ClusterSummary, ClusterView,
    DirectoryView, IntentState, IntentView, MembersView, SeatView,
};
use discovery_types::features::waiting_features;

use super::ListArgs;
use crate::cli::CliError;
use crate::cli::intent;
use crate::cli::pages;
use crate::cli::printer::{Printer, TextOutput, or_dash, time, write_explanations};
use crate::cli::session::{AdminSession, live_states};

/// Output of `cluster list`.
#[derive(serde::Serialize)]
struct ListOutput<'a> {
    clusters: &'a [ClusterSummary],
    /// Whether there are more clusters than `--limit` allows.
    has_more: bool,
}

pub(super) async fn list(
    session: &AdminSession,
    args: &ListArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    if args.newer_than.or(args.older_than).is_some() {
        // The command's ages are relative to the service's time. The client learns that time from
        // the answer to this request.
        session.client.context().await?;
    }
    let now = session.client.service_now_ms().unsigned_abs();
    let ago =
        |age: Duration| now.saturating_sub(u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
    let query = ClusterQuery {
        name: args.name.clone(),
        state: match args.state.is_empty() {
            true => (!args.all).then(live_states),
            false => Some(ClusterStates::new(args.state.iter().copied())),
        },
        created_from_ms: args.newer_than.map(ago),
        created_before_ms: args.older_than.map(ago),
        ..ClusterQuery::default()
    };
    let list = pages::clusters(session, &query, args.limit.map(NonZeroUsize::get), printer).await?;
    let output = ListOutput { clusters: &list.items, has_more: list.has_more };
    printer.print_value(&output, |out| table(out, &list.items))?;
    list.note_if_cut(printer);
    Ok(())
}

pub(super) fn print_summary(
    printer: &mut Printer,
    cluster: &ClusterSummary,
) -> Result<(), CliError> {
    printer.print_value(cluster, |out| table(out, std::slice::from_ref(cluster)))
}

fn table(out: &mut TextOutput<'_>, clusters: &[ClusterSummary]) {
    let header = ["NAME", "STATE", "SEATS", "HEARD", "STANDBY", "EPOCH", "CREATED", "ID"];
    let rows = clusters.iter().map(|cluster| {
        [
            cluster.name.to_string(),
            cluster.state.to_string(),
            format!("{}/{}", cluster.seated, cluster.size),
            or_dash(cluster.heard.zip(cluster.members).map(|(heard, of)| format!("{heard}/{of}"))),
            cluster.standbys.to_string(),
            cluster.epoch.to_string(),
            time(cluster.created_at_ms),
            cluster.cluster.to_string(),
        ]
    });
    out.table(header, rows);
}

/// Output of `cluster show`: the cluster, its members' reports, and its pending changes.
#[derive(serde::Serialize)]
struct ShowOutput {
    #[serde(flatten)]
    view: ClusterView,
    directory: Option<DirectoryView>,
    intents: Vec<IntentView>,
}

fn write_directory(out: &mut TextOutput<'_>, view: &DirectoryView) {
    let said = match view.confirmed {
        true => "confirmed by a quorum of its voters",
        false => "not confirmed yet: those of the commit document",
    };
    out.line("");
    out.fields(&[
        ("members", said.to_owned()),
        ("heard from", format!("{} of them, last {}", view.reporters, time(view.at_ms))),
        ("raft", format!("term {}, index {}", view.raft_term, view.raft_index)),
        ("configuration", or_dash(view.membership.configuration)),
    ]);
}

/// Prints the present members of a running cluster.
fn write_members(out: &mut TextOutput<'_>, present: &MembersView) {
    out.line("");
    let rows = present.members.iter().map(|member| {
        let urls = [member.peer_urls.join(","), member.client_urls.join(",")];
        let [peers, clients] = urls.map(|urls| or_dash(Some(urls).filter(|urls| !urls.is_empty())));
        [
            member.id.to_string(),
            member.display_name(),
            member.role_name().to_owned(),
            peers,
            clients,
            or_dash(member.zone.as_ref()),
            or_dash(member.source.as_ref()),
            or_dash(member.agent.as_ref().map(|agent| &agent.version)),
            or_dash(member.last_heard_ms.map(time)),
            member.health_name().to_owned(),
        ]
    });
    let header = [
        "MEMBER",
        "NAME",
        "ROLE",
        "PEER URLS",
        "CLIENT URLS",
        "ZONE",
        "FROM",
        "AGENT",
        "LAST HEARD",
        "SAYS",
    ];
    out.table(header, rows);
    for line in waiting_features(&present.reported_builds()) {
        out.line(&format!("feature {line}"));
    }
}

fn write_asking_hosts(out: &mut TextOutput<'_>, hosts: &[AskingHost]) {
    if hosts.is_empty() {
        return;
    }
    out.line("");
    let rows = hosts.iter().map(|host| {
        let times = format!("{} times", host.times);
        [
            host.name.clone(),
            host.source.clone(),
            host.agent.to_string(),
            time(host.first_ms),
            time(host.last_ms),
            times,
        ]
    });
    out.table(["ASKING", "FROM", "KEY ID", "FIRST", "LAST", "ASKED"], rows);
}

/// Writes the hosts that wait under a replacement policy.
fn write_standbys(out: &mut TextOutput<'_>, standbys: &[&IntentView]) {
    if standbys.is_empty() {
        return;
    }
    out.line("");
    let rows = standbys.iter().map(|view| {
        let since = view.made_at_ms;
        let waits = view.waits.as_ref().map(|waits| waits.reason.clone());
        [view.subject.clone(), or_dash(view.policy), time(since), or_dash(waits)]
    });
    out.table(["STANDBY", "POLICY", "WAITS SINCE", "FOR"], rows);
}

fn write_seats(out: &mut TextOutput<'_>, view: &ClusterView) {
    out.line("");
    out.table(
        ["SEAT", "NAME", "FROM", "PEER URLS", "CLIENT URLS", "ACKED", "REACHES", "LEASE UNTIL"],
        view.seats.iter().map(|of| seat(of, view.summary.state)),
    );
}

pub(super) async fn show(
    session: &AdminSession,
    cluster: &str,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let id = session.cluster(cluster).await?.cluster;
    let shown = ShowOutput {
        view: session.client.show_cluster(id).await?,
        directory: session.client.directory(id).await?.view,
        intents: session.client.intents(id, None, false).await?.intents,
    };
    let view = &shown.view;
    printer.print_value(&shown, |out| {
        write_header(out, view);
        if let Some(view) = &shown.directory {
            write_directory(out, view);
        }
        match view.present.members.is_empty() {
            true => write_seats(out, view),
            false => write_members(out, &view.present),
        }
        write_asking_hosts(out, &view.asking);
        let is_standby =
            |view: &&IntentView| view.policy.is_some() && view.state == IntentState::Open;
        let (standbys, changes): (Vec<&IntentView>, Vec<&IntentView>) =
            shown.intents.iter().partition(is_standby);
        write_standbys(out, &standbys);
        if !changes.is_empty() {
            out.line("");
            intent::table(out, changes);
        }
        if !view.timeline.is_empty() {
            out.line("");
            let rows = view.timeline.iter().map(|moment| {
                let since = moment.since_full_ms.map(|ms| format!("{ms} ms"));
                [moment.event.clone(), time(moment.at_ms), or_dash(since)]
            });
            out.table(["EVENT", "AT", "SINCE FULL"], rows);
        }
        write_explanations(out, &view.explain);
    })?;
    for alarm in &view.alarms {
        printer.warn(alarm);
    }
    Ok(())
}

fn write_header(out: &mut TextOutput<'_>, view: &ClusterView) {
    let summary = &view.summary;
    let state = format!("{} (epoch {})", summary.state, summary.epoch);
    let mut fields = vec![
        ("name", summary.name.to_string()),
        ("id", summary.cluster.to_string()),
        ("state", state),
        ("seats", format!("{} of {}", summary.seated, summary.size)),
        ("created", time(summary.created_at_ms)),
    ];
    if let Some(deadline) = summary.deadline_at_ms {
        fields.push(("expires", time(deadline)));
    }
    if let Some(ended) = &view.ended {
        fields.push(("ended", format!("{} ({})", time(ended.at_ms), ended.by)));
        let until = ended.unretire_until_ms.map(time);
        fields.extend(until.map(|until| ("unretire until", until)));
        let until = ended.reopen_until_ms.map(time);
        fields.extend(until.map(|until| ("reopen until", until)));
    }
    fields.push(("statement", or_dash(view.statement)));
    fields.push(("document", or_dash(view.document)));
    fields.push(("raft cluster", or_dash(view.raft_cluster_id.as_ref())));
    out.fields(&fields);
}

/// Returns seat, name and source address of an agent.
fn seat_identity(seat: &SeatView) -> [String; 3] {
    let place = seat.seat.map_or_else(|| "standby".to_owned(), |seat| seat.to_string());
    let from = or_dash(seat.source.as_ref());
    let from = if seat.is_outside_binding() { format!("{from}(!)") } else { from };
    [place, seat.name.to_string(), from]
}

fn seat(seat: &SeatView, state: ClusterState) -> [String; 8] {
    let urls = |urls: &[discovery_types::url::NodeUrl]| {
        urls.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    };
    let reached = seat.probes.iter().filter(|probe| probe.reached).count();
    let [place, name, from] = seat_identity(seat);
    [
        place,
        name,
        from,
        urls(&seat.peer_urls),
        urls(&seat.client_urls),
        if seat.acked { "yes" } else { "-" }.into(),
        // Probe results are of interest only until every agent has signed.
        if seat.probes.is_empty() || state != ClusterState::Preparing {
            "-".into()
        } else {
            format!("{reached}/{}", seat.probes.len())
        },
        or_dash(seat.lease_until_ms.map(time)),
    ]
}

pub(super) async fn explain(
    session: &AdminSession,
    cluster: &str,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let id = session.cluster(cluster).await?.cluster;
    let answer = session.client.explain(id).await?;
    printer.print_value(&answer, |out| {
        out.line(&format!("{} (epoch {})", answer.state, answer.epoch));
        if !answer.present.members.is_empty() {
            write_members(out, &answer.present);
        } else if !answer.seats.is_empty() {
            out.line("");
            out.table(["SEAT", "NAME", "FROM"], answer.seats.iter().map(seat_identity));
        }
        write_asking_hosts(out, &answer.asking);
        out.line("");
        if answer.explain.is_empty() {
            out.line(match answer.state {
                ClusterState::Formed => {
                    "waits for nothing, as far as its members have reported in the last five minutes"
                }
                _ => "waits for nothing",
            });
        }
        write_explanations(out, &answer.explain);
    })
}
