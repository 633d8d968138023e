//! The page of one cluster.

mod forming;
mod running;

use actix_web::HttpResponse;
use actix_web::web::{Data, Path};
use askama::Template;
use discovery_types::api::{ClusterView, Explanation, GrantQuery, Moment};
use discovery_types::role::Action;
use uuid::Uuid;

use self::forming::{ProbeTable, SeatRow};
use self::running::{AskingRow, ChangeRow, MemberTableRow};
use super::error::ConsoleError;
use super::events::{self, EventRow, HostNames};
use super::layout::{PageFrame, Section, render};
use super::text::{Badge, ShownTime, TextPart, parts, plain, plain_list};
use super::tokens::{self, TokenRow};
use super::visitor::Visitor;
use crate::app::App;
use crate::error::sentence;
use crate::handlers::clusters::cluster_view;
use crate::handlers::grants::grant_list;
use crate::intents::IntentReader;

/// Number of events on the page: the newest.
const EVENTS: u64 = 10;
/// Number of tokens on the page: the newest.
const TOKENS: u16 = 5;
/// Number of replacement policies on the page: as many as a cluster may have in force, and some
/// that ended.
const POLICIES: u16 = 12;

/// A fact about the cluster.
struct Fact {
    label: &'static str,
    value: String,
    /// Whether the value is an id or a hash, for programs.
    is_code: bool,
}

/// A reason why the cluster waits.
struct ReasonRow {
    sentence: Vec<TextPart>,
    held_by: String,
    last_error: Option<String>,
    next_try: Option<ShownTime>,
    /// Advice on what to do; empty without any.
    advice: Vec<TextPart>,
}

/// An event in the cluster's life.
struct TimelineRow {
    event: String,
    at: ShownTime,
    /// Time since the last missing agent arrived.
    since_full: String,
}

#[derive(Template)]
#[template(path = "cluster.html")]
struct ClusterPage {
    layout: PageFrame,
    id: Uuid,
    name: String,
    state: Badge,
    epoch: u64,
    facts: Vec<Fact>,
    created: ShownTime,
    deadline: Option<ShownTime>,
    ended: Option<(ShownTime, String)>,
    undo_until: Option<(&'static str, ShownTime)>,
    alarms: Vec<String>,
    reasons: Vec<ReasonRow>,
    probes: Option<ProbeTable>,
    seats: Vec<SeatRow>,
    is_forming: bool,
    members: Vec<MemberTableRow>,
    are_members_confirmed: bool,
    asking: Vec<AskingRow>,
    standbys: Vec<ChangeRow>,
    changes: Vec<ChangeRow>,
    policies: Vec<TokenRow>,
    tokens: Vec<TokenRow>,
    moments: Vec<TimelineRow>,
    /// The newest events. `None` if the visitor may not read events.
    events: Option<Vec<EventRow>>,
}

/// Returns the page of one cluster.
pub(super) async fn show(
    app: Data<App>,
    visitor: Visitor,
    path: Path<Uuid>,
) -> Result<HttpResponse, ConsoleError> {
    let id = *path;
    visitor.check(Action::ShowCluster, Some(id))?;
    let seen = *app.notifier.subscribe_all().borrow();
    let view = cluster_view(&app, id).await?;
    let now_ms = app.clock.micros() / 1_000;
    let has_statement = view.statement.is_some();
    let intents = match has_statement && visitor.may(Action::ReadIntents) {
        true => app.intents(id, IntentReader::Admin, true).await?.intents,
        false => Vec::new(),
    };
    let (standbys, changes) = running::changes(&intents, now_ms);
    let (tokens, policies) = match visitor.may(Action::ReadGrants) {
        true => (grants(&app, id, false, TOKENS).await?, grants(&app, id, true, POLICIES).await?),
        false => (Vec::new(), Vec::new()),
    };
    let events = match visitor.may(Action::ReadEvents) {
        true => Some(newest_events(&app, id, &host_names(&view), now_ms).await?),
        false => None,
    };
    let summary = &view.summary;
    let ended = view.ended.as_ref();
    render(&ClusterPage {
        layout: PageFrame::new(&app, &visitor, Section::Clusters, summary.name.to_string())
            .live(format_args!("/live/{id}"), seen),
        id,
        name: summary.name.to_string(),
        state: Badge::of_cluster(summary.state),
        epoch: summary.epoch,
        facts: facts(&view),
        created: ShownTime::new(summary.created_at_ms, now_ms),
        deadline: summary.deadline_at_ms.map(|at| ShownTime::relative(at, now_ms)),
        ended: ended.map(|end| (ShownTime::new(end.at_ms, now_ms), plain(&end.by))),
        undo_until: ended.and_then(|end| {
            let unretire = end.unretire_until_ms.map(|at| ("unretired", at));
            let undo = unretire.or(end.reopen_until_ms.map(|at| ("reopened", at)));
            undo.map(|(word, at)| (word, ShownTime::relative(at, now_ms)))
        }),
        alarms: view.alarms.iter().map(|alarm| plain(alarm)).collect(),
        reasons: view.explain.iter().map(|reason| reason_row(reason, now_ms)).collect(),
        probes: forming::probe_table(&view),
        seats: forming::seat_rows(&view, now_ms),
        is_forming: forming::is_forming(summary.state),
        members: running::member_rows(&view.present, now_ms),
        are_members_confirmed: view.present.confirmed,
        asking: view.asking.iter().map(|host| running::asking_row(host, now_ms)).collect(),
        standbys,
        changes,
        policies,
        tokens,
        moments: view.timeline.iter().map(|moment| timeline_row(moment, now_ms)).collect(),
        events,
    })
}

/// Reads the newest tokens of a cluster, or its newest replacement policies.
async fn grants(
    app: &App,
    cluster: Uuid,
    only_policies: bool,
    limit: u16,
) -> Result<Vec<TokenRow>, ConsoleError> {
    let query = GrantQuery { after: None, limit: Some(limit), policies: Some(only_policies) };
    let found = grant_list(app, Some(cluster), &query).await?.grants;
    tokens::rows(app, &found).await
}

/// Reads the newest events of a cluster.
async fn newest_events(
    app: &App,
    cluster: Uuid,
    names: &HostNames,
    now_ms: i64,
) -> Result<Vec<EventRow>, ConsoleError> {
    let (last, _) = app.store.event_chain(cluster, i64::MAX, 0).await?;
    let after = i64::try_from(last.saturating_sub(EVENTS)).unwrap_or(i64::MAX);
    let (_, found) = app.store.event_chain(cluster, after, EVENTS as i64).await?;
    Ok(events::rows(&found, names, now_ms))
}

/// Returns the names of the cluster's hosts, by their agents' public keys as events write them.
pub(super) fn host_names(view: &ClusterView) -> HostNames {
    let named = view.seats.iter().filter_map(|seat| {
        let key = seat.agent_key.as_ref()?;
        Some((data_encoding::HEXLOWER.encode(key.as_bytes()), seat.name.to_string()))
    });
    named.collect()
}

fn facts(view: &ClusterView) -> Vec<Fact> {
    let summary = &view.summary;
    let mut facts = vec![Fact {
        label: "Seats",
        value: format!("{} of {} taken", summary.seated, summary.size),
        is_code: false,
    }];
    if let Some((reporting, members)) = summary.heard.zip(summary.members) {
        let value = format!("{reporting} of {members} reported lately");
        facts.push(Fact { label: "Members", value, is_code: false });
    }
    if summary.standbys > 0 {
        let value = summary.standbys.to_string();
        facts.push(Fact { label: "Standbys", value, is_code: false });
    }
    let mut code = |label, value: Option<String>| {
        facts.extend(value.map(|value| Fact { label, value, is_code: true }));
    };
    code("Cluster id", Some(summary.cluster.to_string()));
    code("Raft cluster", view.raft_cluster_id.as_ref().map(|id| plain(id)));
    code("Statement", view.statement.as_ref().map(ToString::to_string));
    code("Commit document", view.document.as_ref().map(ToString::to_string));
    facts
}

fn reason_row(reason: &Explanation, now_ms: i64) -> ReasonRow {
    ReasonRow {
        sentence: parts(&sentence(&reason.missing)),
        held_by: plain_list(&reason.held_by),
        last_error: reason.last_error.as_ref().map(|error| plain(error)),
        next_try: reason.next_retry_ms.map(|at| ShownTime::relative(at, now_ms)),
        advice: reason.command.as_deref().map(parts).unwrap_or_default(),
    }
}

fn timeline_row(moment: &Moment, now_ms: i64) -> TimelineRow {
    TimelineRow {
        event: plain(&moment.event.replace('_', " ")),
        at: ShownTime::new(moment.at_ms, now_ms),
        since_full: moment.since_full_ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms} ms")),
    }
}
