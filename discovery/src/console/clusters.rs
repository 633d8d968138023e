//! The list of clusters.

use actix_web::HttpResponse;
use actix_web::http::header::LOCATION;
use actix_web::web::{Data, Query};
use askama::Template;
use discovery_types::api::{
    ClusterList, ClusterQuery, ClusterState, ClusterStates, ClusterSummary,
};
use discovery_types::name::Name;
use discovery_types::role::Action;
use serde::Deserialize;

use super::PAGE_ROWS;
use super::error::ConsoleError;
use super::layout::{PageFrame, Section, render};
use super::live;
use super::text::{Badge, ShownTime, Tone};
use super::visitor::Visitor;
use crate::app::App;
use crate::handlers::clusters::cluster_list;

/// Value of the filter for clusters that haven't ended.
const LIVE: &str = "live";
/// Value of the filter for all clusters.
const ALL: &str = "all";

/// Query of the list, as its form sends it. The form sends an empty string for an empty field.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    name: Option<String>,
    state: Option<String>,
    after: Option<String>,
}

/// A choice of states in the list's form.
struct StateChoice {
    value: &'static str,
    label: &'static str,
    is_chosen: bool,
}

struct ListRow {
    path: String,
    name: String,
    state: Badge,
    seats: String,
    /// Number of members that reported lately, with a symbol if some didn't.
    reporting_members: Option<Badge>,
    standbys: u32,
    epoch: u64,
    created: ShownTime,
    expires: Option<ShownTime>,
}

#[derive(Template)]
#[template(path = "clusters.html")]
struct ClustersPage {
    layout: PageFrame,
    name: String,
    /// Reason why the requested name can't be a cluster's name.
    name_error: Option<String>,
    states: Vec<StateChoice>,
    rows: Vec<ListRow>,
    is_filtered: bool,
    /// Path of the first page. `None` on that page itself.
    first: Option<String>,
    next: Option<String>,
}

/// Redirects to the list of clusters.
pub(super) async fn home(visitor: Visitor) -> Result<HttpResponse, ConsoleError> {
    visitor.check(Action::ListClusters, None)?;
    Ok(HttpResponse::SeeOther().insert_header((LOCATION, "/clusters")).finish())
}

pub(super) async fn list(
    app: Data<App>,
    visitor: Visitor,
    query: Query<ListQuery>,
) -> Result<HttpResponse, ConsoleError> {
    visitor.check(Action::ListClusters, None)?;
    let seen = *app.notifier.subscribe_all().borrow();
    let query = query.into_inner();
    let chosen = query.state.filter(|state| !state.is_empty()).unwrap_or_else(|| LIVE.into());
    let states = states_of(&chosen)?;
    let text = query.name.unwrap_or_default();
    let name = (!text.is_empty()).then(|| text.parse::<Name>());
    let (name, name_error) = match name.transpose() {
        Ok(name) => (name, None),
        Err(error) => (None, Some(error.to_string())),
    };
    let filter = ClusterQuery {
        name,
        state: states,
        after: query.after.clone(),
        limit: Some(PAGE_ROWS),
        ..ClusterQuery::default()
    };
    let found = match name_error {
        None => cluster_list(&app, &filter).await?,
        Some(_) => ClusterList { clusters: Vec::new(), next: None },
    };
    // The filters are checked, so they have no character that a URL would have to encode.
    let shown_name = filter.name.as_ref().map(ToString::to_string).unwrap_or_default();
    let page = format!("/clusters?name={shown_name}&state={chosen}");
    let now_ms = app.clock.micros() / 1_000;
    render(&ClustersPage {
        layout: PageFrame::new(&app, &visitor, Section::Clusters, "Clusters")
            .live(live::ALL_CLUSTERS, seen),
        is_filtered: !text.is_empty() || chosen != ALL,
        name: text,
        name_error,
        states: choices(&chosen),
        rows: found.clusters.iter().map(|cluster| row(cluster, now_ms)).collect(),
        first: query.after.map(|_| page.clone()),
        next: found.next.map(|next| format!("{page}&after={next}")),
    })
}

/// Returns the states that a choice stands for; `None` for all.
fn states_of(choice: &str) -> Result<Option<ClusterStates>, ConsoleError> {
    match choice {
        ALL => Ok(None),
        LIVE => Ok(Some(ClusterStates::new(
            ClusterState::ALL.into_iter().filter(|state| !has_ended(*state)),
        ))),
        other => {
            let found = ClusterState::ALL.into_iter().find(|state| state.as_str() == other);
            let state = found.ok_or_else(ConsoleError::bad_query)?;
            Ok(Some(ClusterStates::new([state])))
        }
    }
}

fn has_ended(state: ClusterState) -> bool {
    matches!(state, ClusterState::Abandoned | ClusterState::Expired | ClusterState::Retired)
}

fn choices(chosen: &str) -> Vec<StateChoice> {
    let named = [(LIVE, "not ended"), (ALL, "all")];
    let single = ClusterState::ALL.map(|state| (state.as_str(), state.as_str()));
    let choice = |(value, label): (&'static str, &'static str)| StateChoice {
        value,
        label,
        is_chosen: value == chosen,
    };
    named.into_iter().chain(single).map(choice).collect()
}

fn row(cluster: &ClusterSummary, now_ms: i64) -> ListRow {
    let reporting_members = cluster.heard.zip(cluster.members).map(|(reporting, members)| {
        let tone = if reporting < members { Tone::Bad } else { Tone::Good };
        Badge::new(tone, format!("{reporting}/{members}"))
    });
    ListRow {
        path: format!("/clusters/{}", cluster.cluster),
        name: cluster.name.to_string(),
        state: Badge::of_cluster(cluster.state),
        seats: format!("{}/{}", cluster.seated, cluster.size),
        reporting_members,
        standbys: cluster.standbys,
        epoch: cluster.epoch,
        created: ShownTime::relative(cluster.created_at_ms, now_ms),
        expires: cluster.deadline_at_ms.map(|at| ShownTime::relative(at, now_ms)),
    }
}
