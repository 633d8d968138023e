//! The event chains of the service and of clusters, newest events first.

use actix_web::HttpResponse;
use actix_web::web::{Data, Query};
use askama::Template;
use discovery_types::api::{ClusterQuery, EventView};
use discovery_types::role::Action;
use serde::Deserialize;
use uuid::Uuid;

use super::PAGE_ROWS;
use super::error::ConsoleError;
use super::events::{self, EventRow, HostNames};
use super::layout::{PageFrame, Section, render};
use super::live;
use super::visitor::Visitor;
use crate::app::App;
use crate::error::ApiError;
use crate::handlers::clusters::{cluster_list, cluster_view};

/// Query of the page: which chain, and which part of it.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AuditQuery {
    /// Name or id of a cluster; the service's own chain without it.
    cluster: Option<String>,
    /// The page shows events with numbers below this one.
    before: Option<u64>,
}

/// The cluster whose events a page shows.
struct AuditedCluster {
    id: Uuid,
    name: String,
    hosts: HostNames,
}

#[derive(Template)]
#[template(path = "audit.html")]
struct AuditPage {
    layout: PageFrame,
    /// Name and path of the cluster. `None` on the page of the service's own chain.
    cluster: Option<(String, String)>,
    searched: String,
    rows: Vec<EventRow>,
    last: u64,
    is_consistent: bool,
    /// Path of the page with the newest events. `None` on that page itself.
    newest: Option<String>,
    older: Option<String>,
}

/// Shows a part of an event chain.
pub(super) async fn show(
    app: Data<App>,
    visitor: Visitor,
    query: Query<AuditQuery>,
) -> Result<HttpResponse, ConsoleError> {
    visitor.check(Action::ReadEvents, None)?;
    let seen = *app.notifier.subscribe_all().borrow();
    let searched = query.cluster.clone().unwrap_or_default();
    let cluster = match searched.trim() {
        "" => None,
        text => {
            visitor.check(Action::ShowCluster, None)?;
            Some(find_cluster(&app, text).await?)
        }
    };
    let stream = cluster.as_ref().map_or(Uuid::nil(), |cluster| cluster.id);
    let (last, events) = page_of(&app, stream, query.before).await?;
    let page = cluster
        .as_ref()
        .map_or_else(|| "/audit?".to_owned(), |cluster| format!("/audit?cluster={}&", cluster.id));
    let first = events.first().map_or(0, |event| event.number);
    let names = cluster.as_ref().map(|cluster| cluster.hosts.clone()).unwrap_or_default();
    let layout = PageFrame::new(&app, &visitor, Section::Audit, "Audit");
    let layout = match &cluster {
        Some(cluster) => layout.live(format_args!("/live/{}", cluster.id), seen),
        None => layout.live(live::ALL_CLUSTERS, seen),
    };
    render(&AuditPage {
        layout,
        cluster: cluster.map(|cluster| (cluster.name, format!("/clusters/{}", cluster.id))),
        searched,
        rows: events::rows(&events, &names, app.clock.micros() / 1_000),
        last,
        is_consistent: events::are_consistent(&stream, &events),
        newest: query.before.map(|_| page.trim_end_matches(['?', '&']).to_owned()),
        older: (first > 1).then(|| format!("{page}before={first}")),
    })
}

/// Reads the events with numbers below `before`, or the newest events if there is no `before`. Also
/// returns the number of the chain's last event.
async fn page_of(
    app: &App,
    stream: Uuid,
    before: Option<u64>,
) -> Result<(u64, Vec<EventView>), ConsoleError> {
    let rows = u64::from(PAGE_ROWS);
    let end = match before {
        Some(before) => before.saturating_sub(1),
        None => app.store.event_chain(stream, i64::MAX, 0).await?.0,
    };
    let after = i64::try_from(end.saturating_sub(rows)).unwrap_or(i64::MAX);
    let limit = i64::try_from(end.min(rows)).unwrap_or(i64::MAX);
    Ok(app.store.event_chain(stream, after, limit).await?)
}

/// Returns the cluster with this name or id. Of several clusters with the name, it takes the
/// newest.
async fn find_cluster(app: &App, text: &str) -> Result<AuditedCluster, ConsoleError> {
    let missing = || ApiError::not_found("cluster with this name or id");
    let id = match Uuid::try_parse(text) {
        Ok(id) => id,
        Err(_) => {
            let name = text.parse().map_err(|_| missing())?;
            let query =
                ClusterQuery { name: Some(name), limit: Some(1), ..ClusterQuery::default() };
            let found = cluster_list(app, &query).await?.clusters;
            found.first().ok_or_else(missing)?.cluster
        }
    };
    let view = cluster_view(app, id).await?;
    let hosts = super::cluster::host_names(&view);
    Ok(AuditedCluster { id, name: view.summary.name.to_string(), hosts })
}
